"""Phases: spans of epochs in which some spaces are pruned and some parameters are frozen.

The paper prunes the fully connected layers first, then the convolutions with the others frozen, then both:

>>> phases = [Phase(2, prune="fc", freeze="conv*"), Phase(1, prune="conv", freeze="fc*"), Phase(1)]
>>> goals = {"fc": Goal(total=100, keep=10, schedule=[50, 10]), "conv": Goal(total=20, keep=5, schedule=[5])}
>>> timeline(goals, epochs=None, phases=phases)  # what is left after epochs 1, 2, 3 and 4
{'fc': (50, 10, 10, 10), 'conv': (20, 20, 5, 5)}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from keepk.errors import PlanError
from keepk.plan.names import as_globs, matches, nearest, shown
from keepk.plan.numbers import count
from keepk.plan.schedules import AnySchedule, plan


@dataclass(frozen=True, init=False)
class Phase:
    """A span of epochs: which spaces are pruned in it, and which parameters are not updated.

    Args:
        epochs: Its length.
        prune: Globs over the names of spaces. The plan of a space advances only in phases that prune it.
        freeze: Globs over ``model.named_parameters()``. A frozen parameter gets no update at all, not even by weight
            decay or momentum. The running statistics of a BatchNorm still change.

    Raises:
        PlanError: If `epochs` is not a positive int, or the globs are not strings.

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
                f"Phase(prune={shown(prune)}, freeze={shown(freeze)}): not globs. Pass a string or a list of strings."
            )
        object.__setattr__(self, "epochs", count(epochs, "Phase: epochs", PlanError, least=1))
        object.__setattr__(self, "prune", pruned)
        object.__setattr__(self, "freeze", frozen)


Plan: TypeAlias = Mapping[str, tuple[int, ...]]  # by space, the number of units left after epochs 1, 2, ...


@dataclass(frozen=True)
class Goal:
    """The inputs of one space's plan.

    Attributes:
        total: M, the number of units.
        keep: K, the number of units to keep.
        schedule: How to get from one to the other.
        start: The count that the schedule starts from; None for M. Weights may be lost to channels pruned earlier.
    """

    total: int
    keep: int
    schedule: AnySchedule
    start: int | None = None


def timeline(
    goals: Mapping[str, Goal], *, epochs: int | None, phases: Sequence[Phase] | None
) -> dict[str, tuple[int, ...]]:
    """The plan of every space over all epochs of the run.

    Args:
        goals: By space, the inputs of its plan.
        epochs: The length of the run; None for the length of the schedules or phases.
        phases: Without phases all spaces advance together. With phases a space waits at M until its first phase, and
            does not change in phases that do not prune it.

    Returns:
        By space, the number of units left after each epoch: entry e - 1 is for epoch e.

    Raises:
        PlanError: If a plan cannot reach K, or the phases do not fit the spaces or the epochs.
    """
    if phases is None:
        plans = {name: _plan_of(name, goal, epochs) for name, goal in goals.items()}
        length = max(map(len, plans.values()))
        return {name: counts + (goals[name].keep,) * (length - len(counts)) for name, counts in plans.items()}
    check_phases(goals, epochs, phases)
    return {name: through_phases(name, goal, phases) for name, goal in goals.items()}


def through_phases(name: str, goal: Goal, phases: Sequence[Phase]) -> tuple[int, ...]:
    """The plan of one space, which advances only in phases that prune it."""
    # The schedule plans only the epochs of those phases, and its counts are then spread over the run, so it does not
    # have to know about phases.
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
    """The plan of a space; errors name the space."""
    try:
        return plan(goal.schedule, goal.start or goal.total, goal.keep, epochs=epochs)
    except PlanError as refused:
        raise PlanError(f"space {name!r}: {refused}") from None


def check_phases(goals: Mapping[str, Goal], epochs: int | None, phases: Sequence[Phase]) -> None:
    """Refuse phases whose length is not `epochs`, that name unknown spaces, or that leave a space out."""
    length = sum(phase.epochs for phase in phases)
    if epochs is not None and epochs != length:
        raise PlanError(f"epochs={epochs}, but the phases have {length} epochs. Omit epochs=, or make them agree.")
    for glob in (glob for phase in phases for glob in phase.prune):
        if not any(matches(name, [glob]) for name in goals):
            raise PlanError(f"Phase(prune={glob!r}): no such space. Nearest names: {nearest(glob, list(goals))}.")
    for name in goals:
        if not any(matches(name, phase.prune) for phase in phases):
            raise PlanError(f"space {name!r}: no phase prunes it. Add its name to a Phase(prune=...).")
