"""A pruner's state as plain data: named, versioned, free of code."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepk.errors import StateError
from keepk.plan.names import shown
from keepk.plan.phases import Plan

VERSION = 1  # raised whenever a state of before could be misread


@dataclass(frozen=True)
class Saved:
    """A state that fits this run's spaces and plan. Its masks are checked later, when shapes are known."""

    epoch: int
    masks: Mapping[str, Any]
    channels: Mapping[str, Any]


def pruner_state(sizes: Mapping[str, Any], plan: Plan, epoch: int, units: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a run.

    Args:
        sizes: By space, the shapes or widths of what it took when the run began.
        plan: By space, its counts.
        epoch: How many events there were.
        units: The entries that the sides add: masks, and channels that are gone.
    """
    return {"version": VERSION, "epoch": epoch, "spaces": _described(sizes, plan), **units}


def read_pruner_state(state: Mapping[str, Any], sizes: Mapping[str, Any], plan: Plan) -> Saved:
    """A state, if it comes from a run with the same spaces over the same model and with the same plan."""
    if not isinstance(state, Mapping) or not {"version", "epoch", "spaces", "masks"} <= set(state):
        raise StateError("pruner state: not the state of a Pruner. Give what state_dict() returned.")
    if not isinstance(state["version"], int) or state["version"] != VERSION:
        raise StateError(f"pruner state: version {shown(state['version'])}, but this keepk reads version {VERSION}.")
    _refuse_other_run(state["spaces"], _described(sizes, plan))
    epoch = state["epoch"]
    length = len(next(iter(plan.values())))
    # bool is a subclass of int, and True would pass for epoch 1.
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= length:
        raise StateError(f"pruner state: epoch {shown(epoch)}, but the plan has {length} epochs. The state is damaged.")
    return Saved(epoch, state["masks"], state.get("channels", {}))


def _described(sizes: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    return {name: {"parameters": found, "plan": list(plan[name])} for name, found in sizes.items()}


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
