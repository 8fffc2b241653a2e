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
>>> space, no_links = keepk.channels("*", keep=10, per_layer=True), Links(np.zeros((0, 2), int), np.zeros(20, int))
>>> (choice,), _ = allowed_choices(graph, space, graph.groups, {0: 1, 1: 1}, (), no_links)
>>> choice, choice.lost(10)  # a quarter of both layers, half, three quarters, or all of them
(<Choice: 12 + 8 units, keep <Portion: 5..20 by 5>>, [6, 4])
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
Steps = Mapping[int, int]
VECTOR = 64  # bytes: the widest vectors of CPUs, and blocks of channels in oneDNN and onnxruntime (16 floats)
FEWEST_STEPS = 4  # a layer is not rounded so coarsely that it has fewer widths to choose from


def allowed_choices(
    graph: Graph,
    space: ChannelSpace,
    layers: Sequence[Group],
    steps: Steps,
    sources: Sequence[Indices],
    links: Links,
) -> tuple[tuple[Choice, ...], Floors]:
    """The sets of channels that are chosen from together, each with the counts that may be kept.

    Args:
        graph: The graph of the model.
        space: The space, with its floor and `per_layer`.
        layers: The layers of the space.
        steps: By number of a layer, the number of which its count must be a multiple; see `steps_of`.
        sources: Sets of reads of which one must stay.
        links: Which channels of the space are read by others of it.

    Returns:
        The choices; every count of them leaves room for the floors of the layers and for a read of each source. Also
        the floors that the ranking has to respect: sets of units, each with the number that must stay, for the layers
        whose floors the counts alone do not ensure.

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
        found = [_same_share(graph, space, layers, steps, bindings, sources)]
        refuse_bound_links(graph, space, links, NONE)
    else:
        found = [
            Choice(tuple(blocks), _portion(graph, space, steps, blocks, [1] * len(blocks), sources))
            for blocks in bindings
        ]
        bound = np.zeros(len(graph.units), bool)
        for blocks in bindings:
            bound[np.concatenate(blocks)] = True
        free = [(layer, layer.units[~bound[layer.units]]) for layer in layers]
        found += _apart(graph, space, [it for it in free if len(it[1])], steps, sources, links)
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
    free: Sequence[tuple[Group, Indices]],
    steps: Steps,
    sources: Sequence[Indices],
    links: Links,
) -> Iterator[Choice]:
    """The choices of layers' channels that no binding restricts."""
    by_step = [(layer, members, steps[int(graph.units.group[members[0]])]) for layer, members in free]
    loose = [(layer, members) for layer, members, step in by_step if step == 1]
    refuse_bound_links(graph, space, links, np.concatenate([NONE, *(members for _, members in loose)]))
    if loose:
        # Layers without conditions on their counts form one choice: any of their channels may be removed.
        members = np.concatenate([members for _, members in loose])
        floors = [space.floor_of(len(layer.units)) for layer, _ in loose]
        needed = links.needed([own for _, own in loose], floors)
        least = sum(needed) + _count_read(graph, sources, members)
        yield Choice((members,), Portion(tuple(range(min(least, len(members)), len(members) + 1))), free=True)
    for layer, members, step in by_step:
        if step > 1:
            least = space.floor_of(len(layer.units)) + _count_read(graph, sources, members)
            yield Choice((members,), _rounded(len(members), least, step))


def _same_share(
    graph: Graph,
    space: ChannelSpace,
    layers: Sequence[Group],
    steps: Steps,
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
    portion = _portion(graph, space, steps, cells, rates, sources)
    choice = Choice(tuple(cells), portion, rates=tuple(rates))
    if len(portion.counts) == 1:
        raise SpaceError(
            f"space {space.name!r}: {why_not(graph, space, layers)}, and with layer_floor={space.layer_floor} only all "
            f"of their channels can be kept. Select layers whose widths have a larger common divisor, or leave out "
            f"per_layer=."
        )
    return choice


def _portion(
    graph: Graph,
    space: ChannelSpace,
    steps: Steps,
    blocks: Sequence[Indices],
    rates: Sequence[int],
    sources: Sequence[Indices],
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
    any_width = all(steps[int(graph.units.group[block[0]])] == 1 for block in blocks)
    times = [it for it in range(min(most), -1, -1) if any_width or _fits(graph, steps, blocks, rates, it)]
    return Portion(tuple(total - together * it for it in times))


def _fits(graph: Graph, steps: Steps, blocks: Sequence[Indices], rates: Sequence[int], times: int) -> bool:
    """Whether every layer has an allowed width after each block has lost channels the given number of times."""
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


def steps_of(
    graph: Graph, space: ChannelSpace, layers: Sequence[Group], bytes_of: Callable[[str], int]
) -> dict[int, int]:
    """By number of a layer, the number of channels of which it must keep a multiple, or all.

    Args:
        graph: The graph of the model.
        space: The space, with its `round_to`.
        layers: The layers of the space.
        bytes_of: The bytes of an element of a tensor, for ``round_to="auto"``.
    """
    found = dict[int, int]()
    for layer in layers:
        home = int(graph.units.group[layer.units[0]])
        slices = Counter((name, dim) for name, dim, _ in graph.slices(int(layer.units[0])))
        tensor, axis, _ = next((it for it in layer.axes if it[2] is Role.PRODUCER), layer.axes[0])
        if space.round_to is None:
            step = 1
        elif space.round_to == "auto":
            # A head has several indices on every axis. An LSTM cell has four where it is produced, and one where read.
            is_one = min(slices.values(), default=1) == 1
            step = auto_multiple(len(layer.units), bytes_of(tensor)) if is_one else 1
        else:
            # A channel may have several indices: with heads of 8 indices, every width is a multiple of 8.
            step = space.round_to // gcd(space.round_to, max(slices[tensor, axis], 1))
        found[home] = lcm(step, layer.multiple)
    return found


def auto_multiple(width: int, element: int) -> int:
    """The number of channels of which a layer keeps a multiple with ``round_to="auto"``.

    As many as fill 64 bytes: 16 of float32. That is halved until the layer has at least four widths to choose from;
    below 4 channels rounding gains nothing, and it is 1. It depends on the layer alone, not on the machine.

    Args:
        width: The number of channels.
        element: The bytes of a weight.

    >>> [auto_multiple(width, 4) for width in (8, 16, 32, 63, 64, 1_000)], auto_multiple(1_000, 2)
    ([1, 4, 8, 8, 16, 16], 32)
    """
    multiple = max(VECTOR // element, 1)
    while multiple * FEWEST_STEPS > width:
        multiple //= 2
    return multiple if multiple >= FEWEST_STEPS else 1


def _rounded(size: int, floor: int, step: int) -> Portion:
    multiples = [count for count in range(step, size, step) if count >= floor]
    return Portion((*multiples, size))
