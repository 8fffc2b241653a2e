"""The state of a `Pruner` as plain values and tensors, with a format version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepk.errors import StateError
from keepk.plan.names import shown
from keepk.plan.phases import Plan

VERSION = 1  # increased whenever an older state could be misread


@dataclass(frozen=True)
class Saved:
    """A state that fits this run's spaces and plan. Its masks are checked later, when shapes are known."""

    epoch: int
    masks: Mapping[str, Any]
    channels: Mapping[str, Any]


def pruner_state(
    sizes: Mapping[str, Any], plan: Plan, epoch: int, units: Mapping[str, Any], budgets: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of a run.

    Args:
        sizes: By space, the shapes of its parameters or the widths of its layers when the run began.
        plan: By space, its counts.
        epoch: The number of past events.
        units: The entries of both sides: masks of weights, and pruned channels.
        budgets: By budget, its kind, the dense cost and the target.
    """
    state = {"version": VERSION, "epoch": epoch, "spaces": _described(sizes, plan), **units}
    # Without budgets there is no such entry, as in the states of older versions.
    return state | ({"budgets": dict(budgets)} if budgets else {})


def read_pruner_state(
    state: Mapping[str, Any], sizes: Mapping[str, Any], plan: Plan, budgets: Mapping[str, Any]
) -> Saved:
    """Read a state; refuses one from a run with another model, other spaces or another plan."""
    if not isinstance(state, Mapping) or not {"version", "epoch", "spaces", "masks"} <= set(state):
        raise StateError("pruner state: not the state of a Pruner. Pass what state_dict() returned.")
    if not isinstance(state["version"], int) or state["version"] != VERSION:
        raise StateError(f"pruner state: version {shown(state['version'])}, but this keepk reads version {VERSION}.")
    _refuse_other_budgets(state.get("budgets", {}), budgets)
    _refuse_other_run(state["spaces"], _described(sizes, plan))
    epoch = state["epoch"]
    length = len(next(iter(plan.values())))
    # bool is a subclass of int, and True would pass for epoch 1.
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= length:
        raise StateError(f"pruner state: epoch {shown(epoch)}, but the plan has {length} epochs. The state is damaged.")
    return Saved(epoch, state["masks"], state.get("channels", {}))


def _described(sizes: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    # A space without a plan has a budget of the Pruner, which is compared separately.
    return {name: {"parameters": found, "plan": list(plan.get(name, ()))} for name, found in sizes.items()}


def _refuse_other_budgets(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if saved == own:
        return
    name = next(name for name in [*own, *saved] if own.get(name) != saved.get(name))
    before, now = (f"has {shown(it[name])}" if name in it else "has no such budget" for it in (saved, own))
    raise StateError(
        f"pruner state: budget {name!r}: the saved run {before}, this one {now}. Load it into the same dense model "
        f"with the same budgets."
    )


def _refuse_other_run(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if set(saved) != set(own):
        raise StateError(
            f"pruner state: has spaces {sorted(saved)}, but this Pruner has {sorted(own)}. Make it with the same ones."
        )
    for name in own:
        for key, what in (("parameters", "model"), ("plan", "plan")):
            if saved[name][key] != own[name][key]:
                raise StateError(
                    f"pruner state: space {name!r} belongs to another {what}: its {key} are "
                    f"{shown(saved[name][key])}, here they are {shown(own[name][key])}. Load it into the same model "
                    f"with the same spaces and epochs."
                )
