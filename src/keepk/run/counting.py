"""How many units of each space the model has now, counted on its tensors and not taken from the plan.

The masks say what is kept; a kept weight may be 0.0. A masked entry that is not 0.0 counts as there again, no matter
what brought it back: ``model.load_state_dict(best)``, training without the Pruner's optimizer, an
assignment. A parameter that was replaced is counted as the model has it now.
"""

from collections.abc import Mapping

import numpy as np
from torch import Tensor, nn

from keepk.cut.hold import Masks, count_revived
from keepk.cut.record import Places, packed
from keepk.errors import ShrinkError
from keepk.graph.facts import Role
from keepk.graph.maps import Flags
from keepk.graph.units import Group
from keepk.graph.weight_norm import lengths_of
from keepk.graph.wrappers import named_parameters
from keepk.plan.names import matches
from keepk.rank.changed import changed_model
from keepk.run.channel_side import ChannelSide
from keepk.run.resolve import Members
from keepk.run.weight_side import WeightSide


def count_weights(side: WeightSide, model: nn.Module) -> dict[str, int]:
    """By space of weights: kept by the masks, and masked entries that are not 0.0."""
    now, objects = named_parameters(model), {id(parameter) for parameter in model.parameters()}
    found, revived = dict(side.kept), list[tuple[str, Tensor]]()
    known_objects = {id(it) for members in side.members.values() for it in members.parameters.values()}
    for space, members in side.members.items():
        counted = set[int]()
        for name, known in members.parameters.items():
            dead = side.dead.get(name)
            # Under another name it is still there: torch.nn.utils.parametrize moves it.
            parameter = now.get(name, known if id(known) in objects else None)
            counted.add(id(parameter))
            if parameter is None or parameter.shape != known.shape:
                found[space] -= known.numel() - (0 if dead is None else int(dead.count_nonzero()))
                found[space] += 0 if parameter is None else parameter.numel()  # no mask fits it
            elif dead is not None:
                revived.append((space, count_revived(parameter, dead)))
        for parameter in _added_since(members, now, counted):  # a tie that was undone, a new layer
            # One that was there under another name is zero where it was pruned.
            found[space] += int(parameter.count_nonzero()) if id(parameter) in known_objects else parameter.numel()
    for space, count in revived:  # waits for the device only now
        found[space] += int(count)
    return found


def _added_since(members: Members, now: Mapping[str, nn.Parameter], counted: set[int]) -> list[nn.Parameter]:
    """The parameters that the globs of a space name now and that were not counted under another name."""
    select, exclude = members.space.select, members.space.exclude
    others = counted | {id(parameter) for name, parameter in now.items() if matches(name, exclude)}
    found = {id(it): it for name, it in now.items() if id(it) not in others and matches(name, select)}
    return list(found.values())


def count_channels(side: ChannelSide, silenced: Masks, model: nn.Module) -> dict[str, int]:
    """By space of channels: those of the layers' present widths, without masked ones whose numbers are all 0.0."""
    found, back = side.kept, _revived_units(side, silenced, model)
    for space, members in side.members.items():
        found[space] += int(back[members.units].sum())
        for layer in members.layers:
            found[space] += _width_gained(side, layer, back, model)
    return found


def count_masked(masks: Mapping[str, Tensor], model: nn.Module) -> int:
    """How many entries of the model's parameters are held at 0.0 by masks (True where kept), and are 0.0."""
    now = named_parameters(model)
    fitting = [(now[name], ~mask) for name, mask in masks.items() if name in now and now[name].shape == mask.shape]
    counts = [(dead.count_nonzero(), count_revived(parameter, dead)) for parameter, dead in fitting]
    return sum(int(dead) - int(revived) for dead, revived in counts)


def masked_places(side: ChannelSide, model: nn.Module) -> dict[str, Places]:
    """By space with channels that are masked and not removed: where those are; see `keepk.cut.record.record_of`."""
    masked, lengths = side.dead & side.graph.alive, lengths_of(model)
    found = dict[str, Places]()
    for space, members in side.members.items():
        units = members.units[masked[members.units]]
        numbers = np.full(len(masked) + 1, -1)  # the last entry is for what belongs to no unit
        numbers[units] = np.arange(len(units))
        names = {tensor for layer in members.layers for tensor, _, _ in layer.axes} if len(units) else set()
        places = dict[str, dict[str, object]]()
        for name, parameter in ((name, it) for name, it in model.named_parameters() if name in names):
            length = lengths.get(parameter)
            for axis, owners in side.graph.owners(name).items():
                # The directions of weight norm are not set to zero, only their lengths; see `silencing`.
                silenced = length is None or length.dim() != parameter.dim() or length.shape[axis] == 1
                if silenced and (numbers[owners] >= 0).any():
                    places.setdefault(name, {})[str(axis)] = packed(numbers[owners])
        found |= {space: places} if places else {}
    return found


def _revived_units(side: ChannelSide, silenced: Masks, model: nn.Module) -> Flags:
    """Which masked channels have a number that is not 0.0 again."""
    now, back = named_parameters(model), np.zeros(len(side.dead), bool)
    own_names = dict(zip(now, (name for name, _ in model.named_parameters(remove_duplicate=False)), strict=True))
    fitting = [(name, mask) for name, mask in silenced.items() if name in now and now[name].shape == mask.shape]
    counts = [(name, mask, count_revived(now[name], mask)) for name, mask in fitting]
    for name, mask in ((name, mask) for name, mask, count in counts if int(count)):
        alive = now[name].detach().ne(0).logical_and_(mask.to(now[name].device))
        for axis, owner in side.graph.owners(own_names[name]).items():
            # By index of the axis, or by row and column where the owners of a grouped convolution differ by row.
            kept_dims = {axis} if owner.ndim == 1 else {0, 1}
            others = tuple(dim for dim in range(alive.dim()) if dim not in kept_dims)
            hit = (alive.any(dim=others) if others else alive).cpu().numpy()
            units = owner[hit]
            back[units[units >= 0]] = True
    return back & side.dead & side.graph.alive


def _width_gained(side: ChannelSide, layer: Group, back: Flags, model: nn.Module) -> int:
    """By how many channels a layer is wider than the Pruner left it; negative where it is narrower or gone."""
    axes = [it for it in layer.axes if it[0] in side.graph.wiring.parameters]
    # The channels of a layer are counted at what produces them, if that has parameters.
    tensor, axis, _ = next((it for it in axes if it[2] is Role.PRODUCER), axes[0])
    known, now = side.graph.shape(tensor), _tensor_of(model, tensor)
    if now is not None and (now.dim() <= axis or now.shape[axis] == known[axis]):
        return 0
    units = layer.units[side.graph.alive[layer.units]]
    counted = int((~side.dead[units] | back[units]).sum())
    if now is None:
        return -counted
    owner = side.graph.owners(tensor).get(axis, np.zeros(0, np.int64))
    slices = len(owner) // max(1, len(units))  # of each channel: a head has several
    if owner.ndim > 1 or not np.isin(owner, units).all() or slices == 0 or now.shape[axis] % slices:
        raise changed_model(
            ShrinkError, tensor, f"has shape {tuple(now.shape)}, but the Pruner left it with shape {known}"
        )
    return int(now.shape[axis]) // slices - counted


def _tensor_of(model: nn.Module, name: str) -> Tensor | None:
    """The tensor of this name, also where a parametrization computes it by now; None if it is gone."""
    path, _, attribute = name.rpartition(".")
    try:
        found = getattr(model.get_submodule(path), attribute, None)
    except AttributeError:
        return None
    return found if isinstance(found, Tensor) else None
