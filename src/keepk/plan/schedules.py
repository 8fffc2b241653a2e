"""Schedules: how many units are left after each epoch.

A schedule is any callable from (M units, K to keep, epochs or None) to ints, one per epoch. `plan` calls it, checks the
result and returns the tuple that training follows: every entry is an int, none is larger than the one before, and the
last one is K.

>>> def halves(total, keep, epochs):
...     return [max(keep, total >> epoch) for epoch in range(1, (epochs or 10) + 1)]
>>> plan(halves, total=1000, keep=100, epochs=5)
(500, 250, 125, 100, 100)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import floor
from typing import Any, Protocol, TypeAlias

from keepk.errors import KeepkError, PlanError
from keepk.plan.names import shortened, shown
from keepk.plan.numbers import count, exact_number, exact_share

LONGEST = 1_000_000  # epochs; a longer plan is a mistake in nu


class Schedule(Protocol):
    """A function (M, K, epochs) -> M_1 .. M_n."""

    def __call__(self, total: int, keep: int, epochs: int | None) -> Sequence[int]:
        """Compute the counts after each epoch.

        Args:
            total: M, the number of units.
            keep: K, the number of units to keep.
            epochs: The number of epochs; None for the schedule's natural length, up to its first K.
        """
        ...


AnySchedule: TypeAlias = Schedule | Callable[[int, int, int | None], Sequence[int]] | Sequence[int]


@dataclass(frozen=True)
class Annealing:
    r"""The paper's annealing schedule: prune quickly to a share p0, then nu more every few epochs until K is reached.

    .. math::
        M_e = \begin{cases}
            [(1 - p_0) + p_0 (N_1 - e) / (\mu e + N_1)] M & 1 \le e \le N_1 \\
            [1 - \min(p, p_0 + \lfloor (e - N_1) / N^c \rfloor \nu)] M & N_1 < e
        \end{cases}

    rounded down, and never below K. All shares are shares *pruned*.

    Args:
        p0: The share that is pruned by epoch n1.
        n1: The length of the first, fast part in epochs. 1 prunes p0 in one event; 0 omits the first part.
        nu: The share that each event of the second part adds.
        mu: How steep the first part is.
        every: The number of epochs between two events of the second part (the paper's N^c).

    Raises:
        PlanError: If an argument is out of range; when called, if p0 prunes more than K allows or K is never reached.

    >>> Annealing(p0=0.8, n1=10, nu=0.02)(10_000, 1_000, None)
    (5600, 4133, 3400, 2960, 2666, 2457, 2300, 2177, 2080, 2000, 1800, 1600, 1400, 1200, 1000)

    """

    p0: float
    n1: int
    nu: float
    mu: float = 10
    every: int = 1

    def __post_init__(self) -> None:
        exact_share(self.p0, "Annealing: p0", PlanError)
        count(self.n1, "Annealing: n1", PlanError, least=0)
        exact_share(self.nu, "Annealing: nu", PlanError)
        exact_number(self.mu, "Annealing: mu", PlanError)
        count(self.every, "Annealing: every", PlanError, least=1)

    def __call__(self, total: int, keep: int, epochs: int | None) -> tuple[int, ...]:
        """The counts after each epoch, exact in the decimals of p0, nu and mu; see `Schedule`."""
        # Rationals and not floats: each count is a floor of M times a share, and a float just below an integer would be
        # one too low. `keep=` and `prune=` would then give different plans for the same K.
        first = exact_share(self.p0, "Annealing: p0", PlanError)
        if (1 - first) * total < keep:
            raise PlanError(
                f"Annealing: p0={self.p0} leaves {floor((1 - first) * total)} of {total}, fewer than the {keep} "
                f"to keep. Choose p0 <= {float(1 - Fraction(keep, total)):.6g}, the share pruned at the end."
            )
        # The length is computed, not counted: nu=1e-9 would otherwise loop for a billion epochs before it is refused.
        length = self._own_length(total, keep) if epochs is None else epochs
        if length > LONGEST:
            raise PlanError(
                f"Annealing: nu={self.nu} takes {length} epochs from {total} to {keep}, more than {LONGEST}. "
                f"Choose a larger nu."
            )
        return tuple(max(keep, floor(self._share_left(e) * total)) for e in range(1, length + 1))

    def _share_left(self, epoch: int) -> Fraction:
        """The share of units left after an epoch. The paper's two branches agree at n1."""
        first, step, steepness = (Fraction(str(value)) for value in (self.p0, self.nu, self.mu))
        if epoch <= self.n1:
            return (1 - first) + first * Fraction(self.n1 - epoch) / (steepness * epoch + self.n1)
        return 1 - first - (epoch - self.n1) // self.every * step

    def _own_length(self, total: int, keep: int) -> int:
        """The first epoch with floor(share * M) <= K, found by solving the formula for e."""
        first, step = Fraction(str(self.p0)), Fraction(str(self.nu))
        if floor((1 - first) * total) <= keep:
            return self._first_part_length(total, keep)
        if step == 0:
            raise PlanError(
                f"Annealing: nu=0 stays at p0={self.p0} and never gets from {floor((1 - first) * total)} "
                f"to {keep}. Choose nu > 0, or p0 at the share pruned at the end."
            )
        # floor(share * M) <= K means share * M < K + 1, so events > (1 - p0 - (K + 1) / M) / nu.
        events = floor((1 - first - Fraction(keep + 1, total)) / step) + 1
        return self.n1 + max(1, events) * self.every

    def _first_part_length(self, total: int, keep: int) -> int:
        """The first epoch of the first part with a count of at most K; by bisection, since that part never rises."""
        low, high = 1, max(1, self.n1)
        while low < high:
            middle = (low + high) // 2
            if floor(self._share_left(middle) * total) <= keep:
                high = middle
            else:
                low = middle + 1
        return low


@dataclass(frozen=True)
class OneShot:
    """Prune down to K at the first event.

    >>> OneShot()(1000, 100, None), OneShot()(1000, 100, 3)
    ((100,), (100, 100, 100))
    """

    def __call__(self, total: int, keep: int, epochs: int | None) -> tuple[int, ...]:  # noqa: ARG002 - as all schedules
        """K from the first epoch on."""
        return (keep,) * (1 if epochs is None else epochs)


@dataclass(frozen=True)
class Cubic:
    r"""The gradual schedule of Zhu and Gupta (AGP): fast at first, then slower and slower towards K.

    .. math:: s_e = p + (p_0 - p) (1 - t)^3, \quad t = (e - begin) / n, \quad M_e = \lfloor (1 - s_e) M \rfloor

    where t changes only at events (`every`) and stays at 1 after the end.

    Args:
        epochs: n, the number of epochs from `begin` to K. None means all epochs of the run or the phase.
        p0: The share pruned at `begin`.
        begin: The number of epochs before pruning starts.
        every: The number of epochs between two events.

    Raises:
        PlanError: If an argument is out of range; when called, if p0 prunes more than K allows, or no length is given.

    >>> Cubic(epochs=5)(1000, 100, None)
    (560, 294, 157, 107, 100)

    """

    epochs: int | None = None
    p0: float = 0.0
    begin: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        if self.epochs is not None:
            count(self.epochs, "Cubic: epochs", PlanError, least=1)
        exact_share(self.p0, "Cubic: p0", PlanError)
        count(self.begin, "Cubic: begin", PlanError, least=0)
        count(self.every, "Cubic: every", PlanError, least=1)

    def __call__(self, total: int, keep: int, epochs: int | None) -> tuple[int, ...]:
        """The counts after each epoch, exact in the decimals of p0; see `Schedule`."""
        # The final share is taken from K, not from prune=, so the last floor is exactly K.
        first, last = Fraction(str(self.p0)), 1 - Fraction(keep, total)
        if first > last:
            raise PlanError(
                f"Cubic: p0={self.p0} prunes more than the share pruned at the end, {float(last):.6g}. Choose less."
            )
        length, span = self._lengths(epochs)
        shares = (last + (first - last) * (1 - self._progress(e, span)) ** 3 for e in range(1, length + 1))
        begun = enumerate(shares, start=1)
        return tuple(total if e <= self.begin else max(keep, floor((1 - share) * total)) for e, share in begun)

    def _lengths(self, epochs: int | None) -> tuple[int, int]:
        """The length of the plan, and of the span from `begin` to K."""
        if self.epochs is not None:
            return (self.begin + self.epochs if epochs is None else epochs), self.epochs
        if epochs is None:
            raise PlanError("Cubic: no length. Set epochs= of Cubic or of the Pruner, or use phases.")
        if epochs <= self.begin:
            raise PlanError(f"Cubic: begin={self.begin} leaves none of the {epochs} epochs. Choose a smaller begin.")
        return epochs, epochs - self.begin

    def _progress(self, epoch: int, span: int) -> Fraction:
        """The formula's t: rounded down to whole events, but 1 at the end even if `every` does not divide the span."""
        done = min(epoch - self.begin, span)
        return Fraction(done if done == span else done - done % self.every, span)


def plan(schedule: AnySchedule, total: int, keep: int, *, epochs: int | None = None) -> tuple[int, ...]:
    """The checked plan of a space: ints that never rise and end at K.

    Args:
        schedule: A schedule, a function like one, or the counts themselves.
        total: M, the number of units.
        keep: K, the number of units to keep.
        epochs: The length of the plan. A shorter schedule stays at K for the rest.

    Returns:
        The number of units left after each epoch.

    Raises:
        PlanError: If the counts rise, fall below K, or do not reach K within the epochs; the message says how many
            epochs it would take.

    >>> plan([500, 100], total=1000, keep=100, epochs=4)
    (500, 100, 100, 100)
    """
    counts = _ask(schedule, total, keep, epochs)
    _check(counts, total, keep)
    # A list of ints may be longer than the run. The rest is dropped if K comes before it. Otherwise the run would stop
    # above K, so it is refused before the first batch.
    if epochs is not None and len(counts) > epochs:
        counts, dropped = counts[:epochs], counts[epochs:]
        if not counts or counts[-1] != keep:
            needed = epochs + dropped.index(keep) + 1 if keep in dropped else None
            raise _misses(schedule, counts, keep, needed)
    if not counts or counts[-1] != keep:
        raise _misses(schedule, counts, keep, _epochs_needed(schedule, total, keep))
    return counts + (keep,) * ((epochs or 0) - len(counts))


def checked_schedule(given: Any, what: str) -> AnySchedule:
    """Check a schedule that a user passed: it must be a callable or a sequence. A list becomes a tuple.

    >>> checked_schedule([50, 10], "schedule")
    (50, 10)
    """
    # A module is callable too, but would fail when it is called. It is recognised without importing torch.
    if callable(given) and not hasattr(given, "named_parameters"):
        return given  # type: ignore[no-any-return]  # its result is checked when it is called
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise PlanError(
            f"{what}={shown(given)}: got {type(given).__name__}. Pass keepk.Cubic(epochs=...), a callable or "
            f"a list of ints."
        )
    return tuple(given) if isinstance(given, list) else given


def _ask(schedule: AnySchedule, total: int, keep: int, epochs: int | None) -> tuple[int, ...]:
    """The counts that a schedule returns, checked to be ints."""
    schedule = checked_schedule(schedule, "plan: schedule")
    answer = _called(schedule, total, keep, epochs) if callable(schedule) else schedule
    if isinstance(answer, str | bytes) or not isinstance(answer, Sequence):
        raise PlanError(f"schedule {shown(schedule)}: got {type(answer).__name__}. Pass a sequence of ints.")
    read = partial(count, what=f"schedule {shown(schedule)}: an entry", error=PlanError, least=0)
    return tuple(read(entry) for entry in answer)


def _called(schedule: Callable[..., Any], total: int, keep: int, epochs: int | None) -> Any:
    """Call a schedule; an exception in a user's function is reported with the arguments."""
    try:
        return schedule(total, keep, epochs)
    except KeepkError:
        raise
    except Exception as error:
        raise PlanError(
            f"schedule {shown(schedule)}: failed on ({total}, {keep}, {epochs}), which are M, K and the epochs, or "
            f"None for its own length ({type(error).__name__}: {shortened(str(error))}). Pass a function that takes "
            f"these three and returns a sequence of ints."
        ) from error


def _check(counts: tuple[int, ...], total: int, keep: int) -> None:
    """Refuse counts that rise or fall below K."""
    before = total
    for epoch, after in enumerate(counts, start=1):
        if after > before:
            raise PlanError(
                f"plan {_short(counts)}: rises from {before} to {after} at epoch {epoch}. "
                f"Pruned units cannot be restored, so counts must never rise, and not exceed {total}."
            )
        if after < keep:
            raise PlanError(
                f"plan {_short(counts)}: {after} at epoch {epoch} is fewer than the {keep} to keep. "
                f"End at exactly {keep}."
            )
        before = after


def _epochs_needed(schedule: AnySchedule, total: int, keep: int) -> int | None:
    """The number of epochs in which a schedule reaches K at its natural length; None if that is unknown."""
    if not callable(schedule):
        return None
    try:
        return len(_ask(schedule, total, keep, None))
    except PlanError:
        return None


def _misses(schedule: AnySchedule, counts: tuple[int, ...], keep: int, needed: int | None) -> PlanError:
    """The error about a plan that does not end at K."""
    reached = f"ends at {counts[-1]}" if counts else "is empty"
    remedy = f"It needs {needed} epochs" if needed else f"Let it end at exactly {keep}"
    return PlanError(
        f"schedule {shown(schedule)}: after {len(counts)} epochs the plan {reached}, not at the {keep} "
        f"to keep. {remedy}."
    )


def _short(counts: tuple[int, ...], most: int = 8) -> str:
    return f"({', '.join(map(str, counts[:most]))}{', ...' if len(counts) > most else ''})"
