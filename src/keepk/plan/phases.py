"""Phases: spans of epochs in which some spaces are pruned and some parameters are frozen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from keepk.errors import PlanError
from keepk.plan.names import as_globs, matches, nearest, shown
from keepk.plan.numbers import count
from keepk.plan.schedules import AnySchedule, plan


@dataclass(frozen=True, init=False)
class Phase:
    """A span of epochs: which spaces are pruned in it, and which parameters get no update.

    Args:
        epochs: How long it is.
        prune: Globs over the names of spaces. A space's plan advances only in its own phases.
        freeze: Globs over ``model.named_parameters()``. Frozen means no update at all, of weight decay or momentum
            either; statistics of a BatchNorm still move.

    >>> fc_then_conv_then_both = [
    ...     Phase(3, prune="fc", freeze="conv*"),
    ...     Phase(14, prune="conv", freeze="fc*"),
    ...     Phase(23),
    ... ]

    """

    epochs: int
    prune: tuple[str, ...]
    freeze: tuple[str, ...]

    def __init__(self, epochs: int, *, prune: str | Sequence[str] = (), freeze: str | Sequence[str] = ()) -> None:
        pruned, frozen = as_globs(prune), as_globs(freeze)
        if pruned is None or frozen is None:
            raise PlanError(
                f"Phase(prune={shown(prune)}, freeze={shown(freeze)}): not globs. Give a string or a list of strings."
            )
        object.__setattr__(self, "epochs", count(epochs, "Phase: epochs", PlanError, least=1))
        object.__setattr__(self, "prune", pruned)
        object.__setattr__(self, "freeze", frozen)


Plan: TypeAlias = Mapping[str, tuple[int, ...]]  # by space, how many units are left after epochs 1, 2, ...


@dataclass(frozen=True)
class Goal:
    """The inputs of one space's plan: M, K, the schedule, and the count that it starts from, if not M."""

    total: int
    keep: int
    schedule: AnySchedule
    start: int | None = None


def timeline(
    goals: Mapping[str, Goal], *, epochs: int | None, phases: Sequence[Phase] | None
) -> dict[str, tuple[int, ...]]:
    """The plan of every space over the epochs of the whole run.

    Entry e - 1 is what is left after epoch e. Without phases all spaces advance together; with them a space waits at
    M until its first phase and stands still between its phases.

    >>> goals = {"fc": Goal(100, 10, [50, 10]), "conv": Goal(20, 5, [5])}
    >>> timeline(goals, epochs=None, phases=[Phase(2, prune="fc"), Phase(1, prune="conv"), Phase(1)])
    {'fc': (50, 10, 10, 10), 'conv': (20, 20, 5, 5)}
    """
    if phases is None:
        plans = {name: _plan_of(name, goal, epochs) for name, goal in goals.items()}
        length = max(map(len, plans.values()))
        return {name: counts + (goals[name].keep,) * (length - len(counts)) for name, counts in plans.items()}
    check_phases(goals, epochs, phases)
    return {name: through_phases(name, goal, phases) for name, goal in goals.items()}


def through_phases(name: str, goal: Goal, phases: Sequence[Phase]) -> tuple[int, ...]:
    """The plan of one space, which advances in its own phases."""
    own = [matches(name, phase.prune) for phase in phases]
    counts = _plan_of(name, goal, sum(phase.epochs for phase, mine in zip(phases, own, strict=True) if mine))
    spent, left, whole = 0, goal.total, list[int]()
    for phase, mine in zip(phases, own, strict=True):
        span = counts[spent : spent + phase.epochs] if mine else (left,) * phase.epochs
        spent += phase.epochs if mine else 0
        whole += span
        left = whole[-1]
    return tuple(whole)


def _plan_of(name: str, goal: Goal, epochs: int | None) -> tuple[int, ...]:
    try:
        return plan(goal.schedule, goal.start or goal.total, goal.keep, epochs=epochs)
    except PlanError as refused:
        raise PlanError(f"space {name!r}: {refused}") from None


def check_phases(goals: Mapping[str, Goal], epochs: int | None, phases: Sequence[Phase]) -> None:
    """Refuse phases of another length, of spaces that do not exist, or none for one that does."""
    length = sum(phase.epochs for phase in phases)
    if epochs is not None and epochs != length:
        raise PlanError(f"epochs={epochs}, but the phases have {length} epochs. Leave epochs out, or let them agree.")
    for glob in (glob for phase in phases for glob in phase.prune):
        if not any(matches(name, [glob]) for name in goals):
            raise PlanError(f"Phase(prune={glob!r}): no such space. Nearest names: {nearest(glob, list(goals))}.")
    for name in goals:
        if not any(matches(name, phase.prune) for phase in phases):
            raise PlanError(f"space {name!r}: no phase prunes it. Add its name to a Phase(prune=...).")
