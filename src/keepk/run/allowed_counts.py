"""Which numbers of channels may be kept: floors, equal parts, `round_to` and `per_layer`, as choices with counts.

A `Choice` is a set of channels that an event chooses from, with the numbers that may be kept of it. The layers of a
space give several of them:

* Parts that must lose equal numbers, such as the groups of a convolution, are one choice of several blocks.
* A layer whose width must be a multiple of something is one choice.
* All other layers are one choice together, from which any channel may be removed.
* With ``per_layer=True`` there is a single choice with a block for every layer. Blocks lose channels in the ratio of
  their sizes, so that every layer keeps the same share:

>>> import keepk, torch
>>> from torch import nn
>>> net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2))
>>> graph = keepk.trace(net, torch.zeros(2, 4))
>>> space = keepk.channels("*", keep=10, per_layer=True)
>>> (choice,), _ = allowed_choices(graph, space, graph.groups, (), Links(np.zeros((0, 2), int), np.zeros(20, int)))
>>> choice, choice.lost(10)  # a quarter of both layers, half, three quarters, or all of them
(<Choice: 12 + 8 units, keep <Portion: 5..20 by 5>>, [6, 4])
"""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd, lcm

import numpy as np

from keepk.errors import SpaceError
from keepk.graph.graph import Graph
from keepk.graph.ids.facts import Role
from keepk.graph.units import Group
from keepk.model.edits import Indices
from keepk.plan.portions import Portion
from keepk.plan.spaces import ChannelSpace
from keepk.rank.channels import Choice, Links, refuse_bound_links

NONE = np.zeros(0, np.int64)
Floors = tuple[tuple[Indices, int], ...]


def allowed_choices(
    graph: Graph, space: ChannelSpace, layers: Sequence[Group], sources: Sequence[Indices], links: Links
) -> tuple[tuple[Choice, ...], Floors]:
    """The sets of channels that are chosen from together, each with the counts that may be kept.

    Args:
        graph: The graph of the model.
        space: The space, with its floor, `round_to` and `per_layer`.
        layers: The layers of the space.
        sources: Sets of reads of which one must stay.
        links: Which channels of the space are read by others of it.

    Returns:
        The choices; every count of them leaves room for the floors of the layers and for a read of each source. And
        sets of units of which the ranking has to keep at least so many: the layers whose floors are not met by the
        counts alone.

    Raises:
        SpaceError: A layer must lose as many channels as one outside of the space, or the counts of channels that are
            read by others are restricted.
    """
    mine = np.zeros(len(graph.units), bool)
    mine[np.concatenate([layer.units for layer in layers])] = True
    bindings = [blocks for blocks in graph.bindings if mine[np.concatenate(blocks)].any()]
    for blocks in bindings:
        members = np.concatenate(blocks)
        _refuse_outsiders(graph, space, members[~mine[members]])
    if space.per_layer:
        found = [_same_share(graph, space, layers, bindings, sources)]
        refuse_bound_links(graph, space, links, NONE)
    else:
        found = [_together(graph, space, blocks, sources) for blocks in bindings]
        found += _apart(graph, space, layers, bindings, sources, links)
    ensured = {home for choice in found if not choice.free for home in _whole_layers(graph, choice.blocks)}
    floors = [
        (layer.units, space.floor_of(len(layer.units)))
        for layer in layers
        if int(graph.units.group[layer.units[0]]) not in ensured
    ]
    return tuple(found), tuple(floors)


def why_not(graph: Graph, space: ChannelSpace, layers: Sequence[Group]) -> str:
    """Why a number of channels cannot be kept, for errors."""
    mine = set(np.concatenate([layer.units for layer in layers]).tolist())
    bound = [blocks for blocks in graph.bindings if mine & set(np.concatenate(blocks).tolist())]
    widths = sorted({len(layer.units) for layer in layers})
    reasons = [f"{len(blocks)} parts must keep equal numbers" for blocks in bound[:1]]
    if space.per_layer and len(widths) == 1:
        reasons += [f"per_layer=True keeps equal numbers of all {len(layers)} layers"]
    elif space.per_layer:
        some = f"{', '.join(map(str, widths[:3]))}{', ...' * (len(widths) > 3)}"
        reasons += [f"per_layer=True keeps the same share of all {len(layers)} layers, whose widths are {some}"]
    reasons += [f"round_to={space.round_to} restricts the width of each layer"] if space.round_to else []
    aligned = [layer for layer in graph.groups if layer.multiple > 1 and mine & set(layer.units.tolist())]
    reasons += [f"{layer.name!r} must keep a multiple of {layer.multiple} ({layer.aligned})" for layer in aligned[:1]]
    return " and ".join(reasons)


def _apart(
    graph: Graph,
    space: ChannelSpace,
    layers: Sequence[Group],
    bindings: Iterable[Sequence[Indices]],
    sources: Sequence[Indices],
    links: Links,
) -> Iterator[Choice]:
    """The choices of channels that no binding restricts."""
    bound = np.zeros(len(graph.units), bool)
    for blocks in bindings:
        bound[np.concatenate(blocks)] = True
    free = [(layer, layer.units[~bound[layer.units]]) for layer in layers]
    free = [(layer, members) for layer, members in free if len(members)]
    steps = [_step(graph, layer, space.round_to) for layer, _ in free]
    loose = [it for it, step in zip(free, steps, strict=True) if step == 1]
    refuse_bound_links(graph, space, links, np.concatenate([NONE, *(members for _, members in loose)]))
    if loose:
        # Layers without conditions on their counts form one choice: any of their channels may be removed.
        members = np.concatenate([members for _, members in loose])
        floors = [space.floor_of(len(layer.units)) for layer, _ in loose]
        needed = links.needed([own for _, own in loose], floors)
        least = sum(needed) + _count_read(graph, sources, members)
        yield Choice((members,), Portion(tuple(range(min(least, len(members)), len(members) + 1))), free=True)
    for (layer, members), step in zip(free, steps, strict=True):
        if step > 1:
            least = space.floor_of(len(layer.units)) + _count_read(graph, sources, members)
            yield Choice((members,), _rounded(len(members), least, step))


def _together(graph: Graph, space: ChannelSpace, blocks: Sequence[Indices], sources: Sequence[Indices]) -> Choice:
    """The choice of blocks that lose equal numbers."""
    return Choice(tuple(blocks), _portion(graph, space, blocks, [1] * len(blocks), sources))


def _same_share(
    graph: Graph,
    space: ChannelSpace,
    layers: Sequence[Group],
    bindings: Sequence[Sequence[Indices]],
    sources: Sequence[Indices],
) -> Choice:
    """The choice of all layers if each of them keeps the same share; so does each part of a layer that is bound."""
    parts = np.full(len(graph.units), -1)
    for number, block in enumerate(block for blocks in bindings for block in blocks):
        parts[block] = number
    cells = [layer.units[parts[layer.units] == part] for layer in layers for part in np.unique(parts[layer.units])]
    divisor = gcd(*map(len, cells))
    rates = [len(cell) // divisor for cell in cells]
    for blocks in bindings:
        # The blocks of a binding lose equal numbers, so the same share only if they are equally large.
        sizes = sorted({len(block) for block in blocks})
        if len(sizes) > 1:
            names = sorted({graph.groups[home].name for block in blocks for home in _homes(graph, block)})
            raise SpaceError(
                f"space {space.name!r}: per_layer=True, but parts of {', '.join(map(repr, names[:3]))} with "
                f"{sizes[0]} and {sizes[-1]} channels must lose equal numbers, which are different shares. Exclude "
                f"these layers, or leave out per_layer=."
            )
    portion = _portion(graph, space, cells, rates, sources)
    choice = Choice(tuple(cells), portion, rates=tuple(rates))
    if len(portion.counts) == 1:
        raise SpaceError(
            f"space {space.name!r}: {why_not(graph, space, layers)}, and with layer_floor={space.layer_floor} only all "
            f"of their channels can be kept. Select layers whose widths have a larger common divisor, or leave out "
            f"per_layer=."
        )
    return choice


def _portion(
    graph: Graph, space: ChannelSpace, blocks: Sequence[Indices], rates: Sequence[int], sources: Sequence[Indices]
) -> Portion:
    """The counts that may be kept of blocks that lose numbers in the ratio of `rates`."""
    whole = _whole_layers(graph, blocks)
    most = list[int]()
    for block, rate in zip(blocks, rates, strict=True):
        # Where the counts of the blocks do not determine that of a layer, a block has room for all of its floor.
        floors = [space.floor_of(len(graph.groups[home].units)) for home in _homes(graph, block) if home not in whole]
        least = max(sum(floors) + _count_read(graph, sources, block), 0)
        most.append((len(block) - min(least, len(block))) // rate)
    for home in whole:
        width = len(graph.groups[home].units)
        each = sum(rate for block, rate in zip(blocks, rates, strict=True) if graph.units.group[block[0]] == home)
        most.append((width - min(space.floor_of(width), width)) // each)
    total, together = sum(map(len, blocks)), sum(rates)
    homes = {int(graph.units.group[block[0]]) for block in blocks}
    steps = {home: _step(graph, graph.groups[home], space.round_to) for home in homes}
    any_width = all(step == 1 for step in steps.values())
    times = [it for it in range(min(most), -1, -1) if any_width or _fits(graph, steps, blocks, rates, it)]
    return Portion(tuple(total - together * it for it in times))


def _fits(graph: Graph, steps: dict[int, int], blocks: Sequence[Indices], rates: Sequence[int], times: int) -> bool:
    """Whether every layer has an allowed width after the blocks have lost channels so many times."""
    if times == 0:
        return True
    widths = dict[int, int]()
    for block, rate in zip(blocks, rates, strict=True):
        home = int(graph.units.group[block[0]])
        widths[home] = widths.get(home, 0) + len(block) - rate * times
    return all(count % steps[home] == 0 for home, count in widths.items())


def _homes(graph: Graph, block: Indices) -> list[int]:
    """The numbers of the layers that a block has units of."""
    homes: list[int] = np.unique(graph.units.group[block]).tolist()
    return homes


def _whole_layers(graph: Graph, blocks: Sequence[Indices]) -> set[int]:
    """The layers that consist of whole blocks, so that the counts of the blocks determine theirs."""
    sizes, mixed = dict[int, int](), set[int]()
    for block in blocks:
        homes = _homes(graph, block)
        mixed |= set(homes) if len(homes) > 1 else set()
        sizes[homes[0]] = sizes.get(homes[0], 0) + len(block)
    return {home for home, size in sizes.items() if home not in mixed and size == len(graph.groups[home].units)}


def _count_read(graph: Graph, sources: Iterable[Indices], units: Indices) -> int:
    """How many of the sources have a read among these units."""
    here = np.zeros(len(graph.units), bool)
    here[units] = True
    return sum(bool(here[reads].any()) for reads in sources)


def _refuse_outsiders(graph: Graph, space: ChannelSpace, outside: Indices) -> None:
    if len(outside):
        other = graph.groups[int(graph.units.group[outside[0]])]
        remedy = "Use lossy=True" if other.lossy and not space.lossy else "Select that module too"
        raise SpaceError(
            f"space {space.name!r}: some of its layers must lose as many channels as {other.name!r}, "
            f"which is not in the space. {remedy}, or exclude both."
        )


def _step(graph: Graph, layer: Group, round_to: int | None) -> int:
    """The number of channels that a layer must lose at a time, so that its width stays a multiple of `round_to`.

    A channel may have several indices: with heads of 8 indices, every width is a multiple of 8.
    """
    if round_to is None:
        return layer.multiple
    tensor, axis, _ = next((it for it in layer.axes if it[2] is Role.PRODUCER), layer.axes[0])
    slices = [(name, dim) for name, dim, _ in graph.slices(int(layer.units[0]))]
    width = max(slices.count((tensor, axis)), 1)
    return lcm(round_to // gcd(round_to, width), layer.multiple)


def _rounded(size: int, floor: int, step: int) -> Portion:
    multiples = [count for count in range(step, size, step) if count >= floor]
    return Portion((*multiples, size))
