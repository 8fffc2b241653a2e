"""How many units of each space the model has now, counted in its tensors and not taken from the plan.

Masks say which weights are kept; a kept weight may be 0.0. A masked entry that is not 0.0 counts as kept again,
whatever changed it: ``model.load_state_dict(best)``, training without the Pruner's optimizer, an assignment. A
parameter that was replaced is counted as it is in the model now.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor, nn

from keepk.cut.masks import Masks, count_revived
from keepk.cut.record import Places, packed
from keepk.errors import ShrinkError
from keepk.graph.graph import Graph
from keepk.graph.ids.facts import Role
from keepk.graph.ids.maps import Flags
from keepk.graph.units import Group
from keepk.model.names import changed_model, lengths_of, named_parameters
from keepk.model.sharded import local
from keepk.plan.names import matches

if TYPE_CHECKING:  # these modules import this one
    from keepk.run.channel_members import ChannelMembers
    from keepk.run.weights import Members

NOTHING: Mapping[str, int] = {}


def count_weights(
    spaces: Mapping[str, "Members"],
    zeroed: Masks,
    kept: Mapping[str, int],
    model: nn.Module,
    left: Mapping[str, int] = NOTHING,
) -> dict[str, int]:
    """By weight space: the number of weights that the masks keep, plus pruned ones that are not 0.0.

    Of sharded parameters, only the shards of this process are searched for pruned weights that are not 0.0.

    Args:
        spaces: The spaces by name.
        zeroed: By parameter, a mask of the pruned entries.
        kept: By space, how many weights these masks keep.
        model: The model as it is now.
        left: By sharded parameter with a mask, how many weights of the whole parameter it keeps.
    """
    now, objects = named_parameters(model), {id(parameter) for parameter in model.parameters()}
    found, revived = dict(kept), list[tuple[str, Tensor]]()
    known_objects = {id(it) for members in spaces.values() for it in members.parameters.values()}
    for space, members in spaces.items():
        counted = set[int]()
        for name, known in members.parameters.items():
            dead = zeroed.get(name)
            # torch.nn.utils.parametrize moves a parameter to another name, where it is still the same object.
            parameter = now.get(name, known if id(known) in objects else None)
            counted.add(id(parameter))
            if parameter is None or parameter.shape != known.shape:
                found[space] -= _left_in(name, known, zeroed, left)
                found[space] += 0 if parameter is None else parameter.numel()  # no mask fits its new shape
            elif dead is not None:
                revived.append((space, count_revived(parameter, dead)))
        for parameter in _added_since(members, now, counted):
            # It was untied from a known parameter, whose pruned entries are zero, or it is new and counts as a whole.
            found[space] += int(parameter.count_nonzero()) if id(parameter) in known_objects else parameter.numel()
    for space, count in revived:  # int() waits for the device: launch all counts before reading the first
        found[space] += int(count)
    return found


def _added_since(members: "Members", now: Mapping[str, nn.Parameter], counted: set[int]) -> list[nn.Parameter]:
    """The parameters that match the globs of a space now and were not counted under another name."""
    select, exclude = members.space.select, members.space.exclude
    others = counted | {id(parameter) for name, parameter in now.items() if matches(name, exclude)}
    found = {id(it): it for name, it in now.items() if id(it) not in others and matches(name, select)}
    return list(found.values())


def count_channels(
    spaces: Mapping[str, "ChannelMembers"], graph: Graph, dead: Flags, zeroed: Masks, model: nn.Module
) -> dict[str, int]:
    """By channel space: the number of channels in the layers as they are now, without masked ones that are zero.

    Args:
        spaces: The spaces by name.
        graph: The graph of the model as the `Pruner` left it.
        dead: By unit, whether it is removed or masked.
        zeroed: By parameter, a mask of the entries of masked channels.
        model: The model as it is now.
    """
    back = _revived_units(graph, dead, zeroed, model)
    found = dict[str, int]()
    for space, members in spaces.items():
        found[space] = members.total - int(dead[members.units].sum()) + int(back[members.units].sum())
        for layer in members.layers:
            found[space] += _width_gained(graph, layer, ~dead | back, model)
    return found


def channels_by_layer(
    spaces: Mapping[str, "ChannelMembers"], graph: Graph, dead: Flags, zeroed: Masks, model: nn.Module
) -> Iterator[tuple["ChannelMembers", Group, int]]:
    """For each layer of each space, the number of its channels that `count_channels` finds."""
    alone = {
        f"{space} {place}": replace(it, layers=(layer,), units=layer.units, total=len(layer.units))
        for space, it in spaces.items()
        for place, layer in enumerate(it.layers)
    }
    found = count_channels(alone, graph, dead, zeroed, model)
    for name, it in alone.items():
        yield it, it.layers[0], found[name]


def weights_by_parameter(
    spaces: Mapping[str, "Members"], zeroed: Masks, model: nn.Module, left: Mapping[str, int]
) -> Iterator[tuple[str, str, int]]:
    """For each parameter of each weight space: the space, its name, and the number that `count_weights` finds."""
    for space, it in spaces.items():
        # Without globs, so that parameters that were added since are not counted with every other one.
        no_globs = replace(it.space, select=(), exclude=())
        for name, parameter in it.parameters.items():
            alone = {space: replace(it, space=no_globs, parameters={name: parameter})}
            kept = _left_in(name, parameter, zeroed, left)
            yield space, name, count_weights(alone, zeroed, {space: kept}, model, left)[space]


def count_masked(zeroed: Masks, model: nn.Module, left: Mapping[str, int]) -> int:
    """How many entries of the model's parameters are masked and 0.0; the arguments are those of `count_weights`."""
    now = named_parameters(model)
    fitting = {name: it for name, it in zeroed.items() if name in now and local(now[name]).shape == it.shape}
    revived = [count_revived(now[name], dead) for name, dead in fitting.items()]
    masked = [now[name].numel() - _left_in(name, now[name], zeroed, left) for name in fitting]
    return sum(masked) - sum(int(count) for count in revived)


def _left_in(name: str, parameter: Tensor, zeroed: Masks, left: Mapping[str, int]) -> int:
    """How many weights of a whole parameter its mask keeps."""
    if name in left:
        return left[name]
    return parameter.numel() - (int(zeroed[name].count_nonzero()) if name in zeroed else 0)


def masked_places(
    spaces: Mapping[str, "ChannelMembers"], graph: Graph, masked: Flags, model: nn.Module
) -> dict[str, Places]:
    """By space with masked channels: their positions, in the form of `keepk.cut.record.record_of`."""
    lengths = lengths_of(model)
    found = dict[str, Places]()
    for space, members in spaces.items():
        units = members.units[masked[members.units]]
        numbers = np.full(len(masked) + 1, -1)  # the last entry is for indices that belong to no unit
        numbers[units] = np.arange(len(units))
        names = {tensor for layer in members.layers for tensor, _, _ in layer.axes} if len(units) else set()
        places = dict[str, dict[str, object]]()
        for name, parameter in ((name, it) for name, it in model.named_parameters() if name in names):
            length = lengths.get(parameter)
            for axis, owners in graph.owners(name).items():
                # Of weight norm, only lengths are set to zero, not directions; see `model.edits.silencing`.
                silenced = length is None or length.dim() != parameter.dim() or length.shape[axis] == 1
                if silenced and (numbers[owners] >= 0).any():
                    places.setdefault(name, {})[str(axis)] = packed(numbers[owners])
        found |= {space: places} if places else {}
    return found


def _revived_units(graph: Graph, dead: Flags, zeroed: Masks, model: nn.Module) -> Flags:
    """By unit, whether it is masked but has an entry that is no longer 0.0."""
    now, back = named_parameters(model), np.zeros(len(dead), bool)
    own_names = dict(zip(now, (name for name, _ in model.named_parameters(remove_duplicate=False)), strict=True))
    fitting = [(name, mask) for name, mask in zeroed.items() if name in now and now[name].shape == mask.shape]
    counts = [(name, mask, count_revived(now[name], mask)) for name, mask in fitting]
    for name, mask in ((name, mask) for name, mask, count in counts if int(count)):
        alive = now[name].detach().ne(0).logical_and_(mask.to(now[name].device))
        for axis, owner in graph.owners(own_names[name]).items():
            # Owners are given by index of the axis, or by row and column if those of a grouped convolution differ by
            # row.
            kept_dims = {axis} if owner.ndim == 1 else {0, 1}
            others = tuple(dim for dim in range(alive.dim()) if dim not in kept_dims)
            hit = (alive.any(dim=others) if others else alive).cpu().numpy()
            units = owner[hit]
            back[units[units >= 0]] = True
    return back & dead & graph.alive


def _width_gained(graph: Graph, layer: Group, counted: Flags, model: nn.Module) -> int:
    """By how many channels a layer is wider than the `Pruner` left it; negative if it is narrower or gone."""
    axes = [it for it in layer.axes if it[0] in graph.wiring.parameters]
    # Channels are counted at their producer, if it has parameters.
    tensor, axis, _ = next((it for it in axes if it[2] is Role.PRODUCER), axes[0])
    known, now = graph.shape(tensor), _tensor_of(model, tensor)
    if now is not None and (now.dim() <= axis or now.shape[axis] == known[axis]):
        return 0
    units = layer.units[graph.alive[layer.units]]
    before = int(counted[units].sum())
    if now is None:
        return -before
    owner = graph.owners(tensor).get(axis, np.zeros(0, np.int64))
    slices = len(owner) // max(1, len(units))  # per channel: a head has several
    # A new width says how many channels there are only if the axis belongs to this layer alone.
    if owner.ndim > 1 or not np.isin(owner, units).all() or slices == 0 or now.shape[axis] % slices:
        raise changed_model(
            ShrinkError, tensor, f"has shape {tuple(now.shape)}, but the Pruner left it with shape {known}"
        )
    return int(now.shape[axis]) // slices - before


def _tensor_of(model: nn.Module, name: str) -> Tensor | None:
    """The tensor of this name, even if a parametrization computes it now; None if it no longer exists."""
    path, _, attribute = name.rpartition(".")
    try:
        found = getattr(model.get_submodule(path), attribute, None)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None
