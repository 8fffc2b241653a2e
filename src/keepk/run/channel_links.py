"""Channels of a space that read other channels of the same space, found in the graph.

Removing a source removes its readings too. A space that holds both can be pruned to an exact count only if a source
never has to be removed for the sake of its readings; spaces for which that is not sure are refused here.
"""

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from keepk.errors import SpaceError
from keepk.graph.edits import Indices
from keepk.graph.graph import Graph
from keepk.graph.units import Group
from keepk.plan.spaces import ChannelSpace
from keepk.rank.links import Links


def find_links(graph: Graph, space: ChannelSpace, layers: Sequence[Group]) -> Links:
    """The links between channels of a space, if any number of these channels can be kept exactly."""
    mine = np.zeros(len(graph.units), bool)
    for layer in layers:
        mine[layer.units] = True
    pairs = graph.links()
    pairs = np.unique(pairs[mine[pairs].all(axis=1)], axis=0)
    # A source that something outside of the space reads as well stays when its last reading is removed.
    used = np.isin(graph.units.classes[pairs[:, 0]], graph.solution.used)
    if len(alone := pairs[~used]):
        raise _uncountable(
            graph, space, alone[0], "nothing else reads them, so they would be removed with their last reading"
        )
    return Links(pairs, _heights(graph, space, pairs))


def refuse_bound_links(graph: Graph, space: ChannelSpace, links: Links, free: Indices) -> None:
    """Refuse links between channels whose counts are bound: the exact selection treats either, but not both at once.

    Args:
        graph: The graph.
        space: The space, for the error.
        links: The links between its channels.
        free: The channels whose counts nothing binds.
    """
    bound = ~np.isin(links.pairs, free).all(axis=1)
    if bound.any():
        why = "only certain numbers of them may stay, by round_to or because they are bound"
        raise _uncountable(graph, space, links.pairs[bound][0], why)


def _heights(graph: Graph, space: ChannelSpace, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """By unit, the length of the longest chain of layers that read its layer, one after another."""
    homes = graph.units.group[pairs]
    readers: dict[int, set[int]] = {}
    for source, reading in np.unique(homes, axis=0).tolist():
        readers.setdefault(source, set()).add(reading)
    try:
        order = [*TopologicalSorter(readers).static_order()]  # readers first
    except CycleError as error:
        circle = np.isin(homes, error.args[1]).all(axis=1)
        raise _uncountable(graph, space, pairs[circle][0], "that one is read by them in turn") from None
    heights = dict[int, int]()
    for layer in order:
        heights[layer] = max((heights[reader] + 1 for reader in readers.get(layer, ())), default=0)
    by_layer = np.array([heights.get(number, 0) for number in range(len(graph.groups))])
    return by_layer[graph.units.group]


def _uncountable(graph: Graph, space: ChannelSpace, pair: Indices, why: str) -> SpaceError:
    source, reading = (graph.groups[int(graph.units.group[unit])].name for unit in pair)
    return SpaceError(
        f"space {space.name!r}: channels of {source!r} are read by {reading!r}, whose channels are removed with them "
        f"and are in the space too; {why}, and the count could not be met. Exclude one of the two, or count readings "
        f'instead: at="input".'
    )
