"""The channels of each channel space: globs matched with the modules of a traced model, and checked."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

import numpy as np
from torch import nn

from keepk.errors import SpaceError
from keepk.graph.findings import is_output
from keepk.graph.graph import Graph
from keepk.graph.ids.facts import Role
from keepk.graph.ids.maps import Flags
from keepk.graph.units import Group
from keepk.metrics.layers import metric_name, refuse_uncalled, traits_of
from keepk.model.edits import Indices
from keepk.plan.names import matches, nearest
from keepk.plan.phases import Plan
from keepk.plan.portions import Portion, nearest_totals, snapped
from keepk.plan.spaces import ChannelSpace
from keepk.rank.channels import Choice, Links, find_links
from keepk.run.allowed_counts import allowed_choices, steps_of, why_not

# The kinds of groups that a space can select. If several BatchNorms read a layer, its output channels are "source"
# units and each BatchNorm's view of them is a separate set of "read" units. A plain channel is one unit on both sides.
KINDS = {"output": ("channel", "source"), "input": ("channel", "read")}


@dataclass(frozen=True)
class Uncounted:
    """The number of a layer's channels that cannot be removed, its width, and the reason."""

    layer: str
    channels: int
    width: int
    why: str


@dataclass(frozen=True, eq=False)
class ChannelMembers:
    """The channels of one channel space.

    Attributes:
        space: The user's request.
        layers: The groups of the graph that it selects, one per layer.
        units: The units of these groups.
        total: M, the number of units.
        keep: K, the number of units to keep; None if a budget says how many.
        choices: The sets of units that are chosen from together.
        floors: Sets of units, each with the number that the ranking has to keep, where the counts of `choices` do not
            ensure it.
        sources: One set of reads for each layer that several BatchNorms read. At least one unit of each set must
            stay, so that the layer is still read.
        links: Which units are read by other units of the space.
        steps: By name of a layer, the number of channels of which it keeps a multiple, or all.
        uncounted: Channels of the same layers that cannot be removed; they are not part of `units`.
    """

    space: ChannelSpace
    layers: tuple[Group, ...]
    units: Indices
    total: int
    keep: int | None
    choices: tuple[Choice, ...]
    floors: tuple[tuple[Indices, int], ...]
    sources: tuple[Indices, ...]
    links: Links
    steps: Mapping[str, int]
    uncounted: tuple[Uncounted, ...] = ()

    @property
    def fixed(self) -> int:
        """How many channels of its layers are not counted."""
        return sum(it.channels for it in self.uncounted)

    @property
    def rounded(self) -> dict[str, int]:
        """The steps that ``round_to="auto"`` has chosen; empty without it."""
        return dict(self.steps) if self.space.round_to == "auto" else {}

    @property
    def portions(self) -> list[Portion]:
        """For each choice, the counts that may be kept."""
        return [choice.portion for choice in self.choices]

    def allow(self, dead: Flags) -> bool:
        """Whether the options of the space allow the counts of its layers once these units are removed."""
        space = self.space
        if space.round_to is None and not space.per_layer and space.layer_floor == 1:
            return True  # only the model restricts the counts, which is checked when the units are removed
        return all(choice.free or choice.allows(dead) for choice in self.choices)


class NoChannelsError(SpaceError):
    """Raised if a glob matches modules, but no channel that can be removed."""


def find_channels(
    graph: Graph, modules: Mapping[str, nn.Module], spaces: Sequence[ChannelSpace]
) -> dict[str, ChannelMembers]:
    """The channels of every space. Refuses a glob without channels, a channel in two spaces, and an impossible K."""
    found = dict[str, ChannelMembers]()
    taken = dict[int, str]()  # by the first unit of a layer, its space; a layer is never split between spaces
    for space in spaces:
        refuse_uncalled(space.metric, space.name)
        _refuse_metric_of_weights(space)
        layers = _select(graph, list(modules), space)
        for layer in layers:
            if (other := taken.get(int(layer.units[0]))) is not None:
                raise SpaceError(
                    f"space {space.name!r}: the channels of {layer.name!r} are in space {other!r} too. "
                    f"Spaces are disjoint: narrow one, or use exclude=."
                )
        taken |= {int(layer.units[0]): space.name for layer in layers}
        uncounted = (*_pinned_channels(graph, space, layers), *_only_channels(graph, modules, space))
        found[space.name] = replace(_counted(graph, modules, space, layers), uncounted=uncounted)
    _refuse_sources_beside_reads(graph, found)
    return found


def _refuse_metric_of_weights(space: ChannelSpace) -> None:
    if space.metric is not None and "channels" not in traits_of(space.metric).ranks:
        raise SpaceError(
            f"space {space.name!r}: metric {metric_name(space.metric)} ranks weights, not channels. "
            f"Use keepk.metrics.l2 or product."
        )


def modules_of(layer: Group, at: str) -> list[str]:
    """The names by which a user can select a layer: its producers or its readers, and its name in the graph."""
    wanted = {Role.PRODUCER if at == "output" else Role.READER}
    if layer.kind == "read":
        wanted.add(Role.CARRIER)  # a read belongs to its BatchNorm
    names = dict.fromkeys(module_of(tensor) for tensor, _, role in layer.axes if role in wanted)
    # `layer.module` refers to the producer, or to the reader if the layer is a read.
    is_named_by_it = at == "output" or layer.kind == "read"
    return list(dict.fromkeys([*names, layer.module])) if is_named_by_it else [*names]


def _has_side(graph: Graph, layer: Group, at: str) -> bool:
    """Whether a layer has channels on the requested side.

    Columns that read a buffer, such as coordinates that the model appends, are inputs that no layer produces.
    """
    own = [role for tensor, _, role in layer.axes if tensor in graph.wiring.parameters]
    return at == "input" or any(role is not Role.READER for role in own)


def module_of(tensor: str) -> str:
    """The path of the module that owns a tensor, without parametrizations and `torch.compile` wrappers."""
    path = f".{tensor.rpartition('.')[0]}".partition(".parametrizations.")[0]
    return path.replace("._orig_mod", "").removeprefix(".")


def _select(graph: Graph, modules: Sequence[str], space: ChannelSpace) -> tuple[Group, ...]:
    layers = [layer for layer in graph.groups if layer.kind in KINDS[space.at] and _has_side(graph, layer, space.at)]
    candidates = [(layer, modules_of(layer, space.at)) for layer in layers]
    known = [*modules, *(name for _, names in candidates for name in names)]
    for option, globs in (("select", space.select), ("exclude", space.exclude)):
        for glob in globs:
            if not any(matches(name, [glob]) for name in known):
                raise SpaceError(
                    f"space {space.name!r}: {option}={glob!r} matches no module. "
                    f"Nearest names: {nearest(glob, [name for name in dict.fromkeys(known) if name])}."
                    f"{_parameters_hint(graph, glob)}"
                )
    named = [layer for layer, names in candidates if _any(names, space.select) and not _any(names, space.exclude)]
    named = [layer for layer in named if _is_selected(graph, layer, modules_of(layer, space.at), space.select)]
    for glob in space.select:
        mine = [layer for layer in named if _any(modules_of(layer, space.at), [glob])]
        if not any(space.lossy or not layer.lossy for layer in mine):
            _refuse_no_channels(graph, space, glob, mine)
    return tuple(layer for layer in named if space.lossy or not layer.lossy)


def _is_selected(graph: Graph, layer: Group, names: Sequence[str], globs: Sequence[str]) -> bool:
    """Whether a space selects a layer. The ranks of a LoRA adapter are selected only if a glob names the adapter.

    A glob names the adapter if it does not match once the adapter's name is removed from the path: ``*.lora_A*`` does,
    ``*.self_attn*`` does not. A user who prunes attention layers rarely means the ranks of the adapters in them.
    """
    adapter = graph.adapter_of(layer)
    if not adapter:
        return True
    own = {graph.wiring.adapters[tensor] for tensor, _, _ in layer.axes}
    return any(
        matches(name, [glob]) and not matches(_without_adapter(name, own), [glob]) for name in names for glob in globs
    )


def _without_adapter(name: str, adapters: Iterable[str]) -> str:
    adapter = next((path for path in adapters if f"{name}.".startswith(f"{path}.")), "")
    return f"{adapter.rpartition('.')[0]}.{name[len(adapter) :]}" if adapter else name


def _parameters_hint(graph: Graph, glob: str) -> str:
    if not _any(graph.wiring.parameters, [glob]):
        return ""
    return " channels takes names of modules, keepk.weights names of parameters."


def _any(names: Iterable[str], globs: Iterable[str]) -> bool:
    return any(matches(name, globs) for name in names)


def _refuse_no_channels(graph: Graph, space: ChannelSpace, glob: str, lossy: Sequence[Group]) -> None:
    where = f"space {space.name!r}: select={glob!r}"
    role = Role.PRODUCER if space.at == "output" else Role.READER
    fixed = [
        it
        for it in graph.fixed
        if matches(module_of(it.tensor), [glob]) and graph.wiring.roles.get((it.tensor, it.axis)) is role
    ]
    # The outputs of a model are always fixed. Mention them only if the glob does not name a lossy layer.
    by_name = _any([it.module for it in lossy], [glob])
    telling = [it for it in fixed if not is_output(it.reason)] or fixed * (not by_name)
    if lossy and telling:
        raise SpaceError(
            f"{where}: axis {telling[0].axis} of {telling[0].tensor!r} ({len(telling)} such axes) is fixed, "
            f"{telling[0].why}. The only channels that the glob matches, {sum(len(it.units) for it in lossy)} of "
            f"{lossy[0].name!r}, are others: lossy=True would remove those, and none along the fixed axis."
        )
    if lossy:
        raise NoChannelsError(
            f"{where} matches {sum(len(layer.units) for layer in lossy)} channels of {lossy[0].name!r}, but removing "
            f"one changes more than zeroing it would: {lossy[0].lossy}. Use lossy=True to remove them anyway."
        )
    ranks = [layer for layer in graph.groups if graph.adapter_of(layer) and _any(modules_of(layer, space.at), [glob])]
    if ranks:
        adapter = graph.adapter_of(ranks[0]).rpartition(".")[2]
        raise SpaceError(
            f"{where} matches only ranks of adapters ({ranks[0].name!r} and {len(ranks) - 1} more), "
            f"which are left out unless a glob names the adapter. Select {f'*.{adapter}*'!r} to prune ranks."
        )
    sided = [it for it in graph.groups if it.kind in KINDS[space.at] and _has_side(graph, it, space.at)]
    names = [name for layer in sided for name in modules_of(layer, space.at)]
    if _any(names, [glob]):
        raise NoChannelsError(f"{where} leaves no channel after exclude={list(space.exclude)}. Exclude less.")
    if fixed:
        raise NoChannelsError(
            f"{where} matches no channel that can be removed: axis {fixed[0].axis} of {fixed[0].tensor!r} is fixed, "
            f"{fixed[0].why}. keepk.inspect(model, example) lists what can shrink."
        )
    raise NoChannelsError(
        f"{where} matches modules, but none that has channels at its {space.at}. "
        f"Nearest modules that do: {nearest(glob, list(dict.fromkeys(names)))}."
    )


def _counted(
    graph: Graph, modules: Mapping[str, nn.Module], space: ChannelSpace, layers: tuple[Group, ...]
) -> ChannelMembers:
    units = np.sort(np.concatenate([layer.units for layer in layers]))
    total = len(units)
    keep = None if space.has_budget else space.count_kept(total)
    sources = tuple(_sources(graph, units)) if space.at == "input" else ()
    links = find_links(graph, space, layers)

    def bytes_of(tensor: str) -> int:
        path, _, attribute = tensor.rpartition(".")
        size: int = getattr(modules[path], attribute).element_size()
        return size

    steps = steps_of(graph, space, layers, bytes_of)
    choices, floors = allowed_choices(graph, space, layers, steps, sources, links)
    by_name = {graph.groups[home].name: step for home, step in steps.items()}
    members = ChannelMembers(space, layers, units, total, keep, choices, floors, sources, links, by_name)
    if keep is not None:
        _refuse_impossible_keep(graph, members, keep)
    return members


def _refuse_impossible_keep(graph: Graph, members: ChannelMembers, keep: int) -> None:
    """Refuse a K that the floors or the counts of the layers do not allow."""
    space, layers, portions = members.space, members.layers, members.portions
    least = sum(portion.counts[0] for portion in portions)  # counts are in ascending order
    if keep < least:
        needs = [f"layer_floor={space.layer_floor} in {len(layers)} layers"]
        needs += [f"round_to={space.round_to}"] if space.round_to else []
        needs += ["the same share in each"] if space.per_layer else []
        needs += [f"a reader for each of {len(members.sources)} sources"] if members.sources else []
        needs += ["the channels that these read"] if len(members.links.pairs) else []
        raise SpaceError(
            f"space {space.name!r}: keep={keep}, but {' with '.join(needs)} needs {least} channels. "
            f"Choose keep >= {least}{' or a lower floor' if space.layer_floor != 1 else ''}."
        )
    possible = nearest_totals(portions, keep)
    if possible != [keep]:
        raise SpaceError(
            f"space {space.name!r}: keep={keep} of {members.total} channels cannot be met: "
            f"{why_not(graph, space, members.layers)}. Nearest possible: {' and '.join(map(str, possible))}."
        )


def unit_sizes(graph: Graph, members: ChannelMembers) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """The layer with the largest heads, the one with the smallest single channels, and how many weights a unit has.

    A head has several indices on every axis that it belongs to; a single channel has one on at least one of them.

    Returns:
        None for a kind of which the space has no layer, or if layers are ranked apart.
    """
    heads, channels = list[tuple[str, int]](), list[tuple[str, int]]()
    for layer in members.layers if not members.space.per_layer else ():
        slices = Counter((name, dim) for name, dim, _ in graph.slices(int(layer.units[0])))
        sizes = {
            (name, dim): number * prod(graph.wiring.shapes[name]) // graph.wiring.shapes[name][dim]
            for (name, dim), number in slices.items()
            if name in graph.wiring.parameters
        }
        kind = heads if min(slices.values(), default=1) > 1 else channels
        kind.append((layer.name, sum(sizes.values())))
    return max(heads, key=lambda it: it[1], default=None), min(channels, key=lambda it: it[1], default=None)


def _pinned_channels(graph: Graph, space: ChannelSpace, layers: Iterable[Group]) -> Iterator[Uncounted]:
    """The channels of selected layers that cannot be removed because of how the model uses them."""
    axes = {(axis.tensor, axis.dim): axis for axis in graph.wiring.axes}
    role, seen = Role.PRODUCER if space.at == "output" else Role.READER, set[int]()
    for tensor, dim in dict.fromkeys((t, dim) for layer in layers for t, dim, found in layer.axes if found is role):
        axis = axes[tensor, dim]
        classes = np.unique(graph.solution.classes[axis.start : axis.start + axis.size]).tolist()
        # Layers that add to the same residual stream share its channels; count those once.
        pinned = [it for it in classes if it in graph.solution.pinned and it not in seen]
        seen |= set(pinned)
        if pinned:
            yield Uncounted(module_of(tensor), len(pinned), len(classes), str(graph.solution.pinned[pinned[0]]))


def _only_channels(graph: Graph, modules: Mapping[str, nn.Module], space: ChannelSpace) -> Iterator[Uncounted]:
    """The channels of selected layers that have only one; the graph has no units for them, since it must stay."""
    for producer, reader in layers_of_one_channel(graph, modules):
        name = producer if space.at == "output" else reader
        if matches(name, space.select) and not matches(name, space.exclude):
            yield Uncounted(name, 1, 1, "every layer keeps at least one channel")


def layers_of_one_channel(graph: Graph, modules: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    """Each layer with a single output channel, and the next layer with a single input channel, which reads it.

    A layer that no such layer follows is left out: its channel is an output of the model.
    """
    # The graph lists layers in the order of the forward pass. It has no axis for a layer with a single channel on both
    # sides; such a layer is placed after the module before it.
    order = {name: float(place) for place, name in enumerate(module_of(it) for it, _ in graph.wiring.roles)}
    last = -1.0
    for name in modules:
        if name in order or _width(modules[name], "in") == 1:
            last = order.setdefault(name, last + 0.5)
    forward = sorted((name for name in order if name in modules), key=order.__getitem__)
    pairs = []
    for place, name in enumerate(forward):
        if _width(modules[name], "out") == 1:
            later = (it for it in forward[place + 1 :] if _width(modules[it], "in") == 1 and order[it] > order[name])
            pairs += [(name, reader) for reader in islice(later, 1)]
    return pairs


def _width(module: nn.Module, side: str) -> object:
    return getattr(module, f"{side}_features", getattr(module, f"{side}_channels", None))


def _sources(graph: Graph, units: Indices) -> Iterable[Indices]:
    """For each layer that several BatchNorms read: the units that read it, if all of them are in the space."""
    mine = np.zeros(len(graph.units), bool)
    mine[units] = True
    links = graph.links()
    for space in graph.groups:
        if space.kind == "source":
            reads = links[np.isin(links[:, 0], space.units), 1]
            if len(reads) and mine[reads].all():
                yield reads


def _refuse_sources_beside_reads(graph: Graph, found: dict[str, ChannelMembers]) -> None:
    """Refuse a source and its reads in different spaces: removing the source would change the other count."""
    home = dict[int, str]()
    for name, members in found.items():
        home |= dict.fromkeys(members.units.tolist(), name)
    for source, read in graph.links().tolist():
        if source in home and read in home and home[source] != home[read]:
            layer, reader = (graph.groups[int(graph.units.group[unit])].name for unit in (source, read))
            raise SpaceError(
                f"spaces {home[source]!r} and {home[read]!r}: channels of {layer!r} are read by {reader!r}, whose "
                f"channels are removed with them. Put both layers into one space, or prune only one of the two."
            )


def snapped_plans(channels: Mapping[str, ChannelMembers], plan: Plan) -> dict[str, tuple[int, ...]]:
    """The plans of the channel spaces, with each count moved to the nearest one that can be met."""
    return {name: snapped(it.portions, plan[name]) for name, it in channels.items() if it.keep is not None}
