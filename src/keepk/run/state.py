"""A pruner's state as plain data: named, versioned, free of code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepk.errors import StateError
from keepk.plan.names import shown
from keepk.plan.phases import Plan
from keepk.run.channel_side import ChannelSide
from keepk.run.resolve import Members
from keepk.run.weight_side import WeightSide

VERSION = 1


@dataclass(frozen=True)
class Saved:
    """What a state says, checked against this run's spaces and plan; its masks are checked once shapes are known."""

    epoch: int
    masks: Mapping[str, Any]
    channels: Mapping[str, Any]


def pruner_state(weights: WeightSide, channels: ChannelSide | None, plan: Plan, epoch: int) -> dict[str, Any]:
    """The state of a run after `epoch` events."""
    state = {
        "version": VERSION,
        "epoch": epoch,
        "spaces": _described(weights.members, channels, plan),
        "masks": dict(weights.masks),
    }
    return state if channels is None else {**state, "channels": channels.state()}


def read_pruner_state(state: Mapping[str, Any], weights: WeightSide, channels: ChannelSide | None, plan: Plan) -> Saved:
    """A state, if it is one of this very model and plan."""
    if not isinstance(state, Mapping) or not {"version", "epoch", "spaces", "masks"} <= set(state):
        raise StateError("pruner state: not the state of a Pruner. Give what state_dict() returned.")
    if not isinstance(state["version"], int) or state["version"] != VERSION:
        raise StateError(f"pruner state: version {shown(state['version'])}, but this keepk reads version {VERSION}.")
    _refuse_other_run(state["spaces"], _described(weights.members, channels, plan))
    epoch = state["epoch"]
    length = len(next(iter(plan.values())))
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= length:
        raise StateError(f"pruner state: epoch {shown(epoch)}, but the plan has {length} epochs. The state is damaged.")
    saved = Saved(epoch, state["masks"], state.get("channels", {}))
    if channels is not None:
        channels.refuse_other_state(saved.channels, epoch)
    return saved


def read_masks(
    saved: Saved, members: Mapping[str, Members], shape_of: Callable[[str, Tensor], tuple[int, ...]], plan: Plan
) -> dict[str, Tensor]:
    """The masks of a state, if each has the shape that its parameter is going to have, and they keep enough."""
    for name, it in members.items():
        for key, parameter in it.parameters.items():
            _refuse_wrong_mask(key, saved.masks.get(key), shape_of(key, parameter))
        kept = sum(int(saved.masks[key].sum()) for key in it.parameters)
        planned = plan[name][saved.epoch - 1] if saved.epoch else it.total
        waits = planned == it.total  # and channels may have taken the others
        fewer = bool(saved.channels) and waits and it.keep <= kept < planned
        if kept != planned and not fewer:
            raise StateError(
                f"pruner state: the masks of space {name!r} keep {kept}, the plan says {planned}. It is damaged."
            )
    return {key: saved.masks[key] for it in members.values() for key in it.parameters}


def _described(members: Mapping[str, Members], channels: ChannelSide | None, plan: Plan) -> dict[str, Any]:
    spaces: dict[str, Any] = {name: {"parameters": it.shapes, "plan": list(plan[name])} for name, it in members.items()}
    for name, found in (channels.members if channels else {}).items():
        layers = {layer.module: len(layer.units) for layer in found.layers}
        spaces[name] = {"parameters": layers, "plan": list(plan[name])}
    return spaces


def _refuse_other_run(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if set(saved) != set(own):
        raise StateError(
            f"pruner state: of spaces {sorted(saved)}, but this Pruner has {sorted(own)}. Make it with the same spaces."
        )
    for name in own:
        for key, what in (("parameters", "model"), ("plan", "plan")):
            if saved[name][key] != own[name][key]:
                raise StateError(
                    f"pruner state: space {name!r} is of another {what}: its {key} are {shown(saved[name][key])}, "
                    f"here they are {shown(own[name][key])}. Load it into the same model with the same spaces and "
                    f"epochs."
                )


def _refuse_wrong_mask(key: str, mask: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
        raise StateError(f"pruner state: no bool mask of shape {shape} for {key!r}. It is damaged.")
