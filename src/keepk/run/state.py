"""A pruner's state as plain data: named, versioned, free of code."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from keepk.errors import StateError
from keepk.run.resolve import Members

VERSION = 1


def pruner_state(
    members: Mapping[str, Members],
    plan: Mapping[str, tuple[int, ...]],
    epoch: int,
    masks: Mapping[str, Tensor],
) -> dict[str, Any]:
    """The state of a run after `epoch` events."""
    return {"version": VERSION, "epoch": epoch, "spaces": _described(members, plan), "masks": dict(masks)}


def read_pruner_state(
    state: Mapping[str, Any], members: Mapping[str, Members], plan: Mapping[str, tuple[int, ...]]
) -> tuple[int, dict[str, Tensor]]:
    """The epoch and the masks of a state, if it is one of this very model and plan."""
    if not isinstance(state, Mapping) or not {"version", "epoch", "spaces", "masks"} <= set(state):
        raise StateError("pruner state: not the state of a Pruner. Give what state_dict() returned.")
    if state["version"] != VERSION:
        raise StateError(f"pruner state: version {state['version']!r}, but this keepk reads version {VERSION}.")
    _refuse_other_run(state["spaces"], _described(members, plan))
    epoch, masks = state["epoch"], state["masks"]
    length = len(next(iter(plan.values())))
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= length:
        raise StateError(f"pruner state: epoch {epoch!r}, but the plan has {length} epochs. The state is damaged.")
    for name, it in members.items():
        _refuse_wrong_masks(name, it, masks, plan[name][epoch - 1] if epoch else it.total)
    return epoch, {name: masks[name] for it in members.values() for name in it.parameters}


def _described(members: Mapping[str, Members], plan: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        name: {
            "parameters": {key: list(parameter.shape) for key, parameter in it.parameters.items()},
            "plan": list(plan[name]),
        }
        for name, it in members.items()
    }


def _refuse_other_run(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if set(saved) != set(own):
        raise StateError(
            f"pruner state: of spaces {sorted(saved)}, but this Pruner has {sorted(own)}. Make it with the same spaces."
        )
    for name in own:
        for key, what in (("parameters", "model"), ("plan", "plan")):
            if saved[name][key] != own[name][key]:
                raise StateError(
                    f"pruner state: space {name!r} is of another {what}: its {key} are {saved[name][key]}, "
                    f"here they are {own[name][key]}. Load it into the same model with the same spaces and epochs."
                )


def _refuse_wrong_masks(name: str, members: Members, masks: Mapping[str, Any], expected: int) -> None:
    for key, parameter in members.parameters.items():
        mask = masks.get(key)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != parameter.shape:
            raise StateError(
                f"pruner state: no bool mask of shape {tuple(parameter.shape)} for {key!r}. It is damaged."
            )
    kept = sum(int(masks[key].sum()) for key in members.parameters)
    if kept != expected:
        raise StateError(
            f"pruner state: the masks of space {name!r} keep {kept}, the plan says {expected}. It is damaged."
        )
