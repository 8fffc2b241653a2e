"""Verdicts: how a claim is judged by comparisons of runs.

A claim about errors rests on comparisons of two runs, each with a target. A comparison is confirmed if the upper end of
the 95 % interval of the difference is at most the target plus a tolerance. Without an interval (one seed, and no record
of which pictures were wrong) a difference above that bound is not confirmed, and one below it is left open.

Only runs of the same precision and device are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean

from keepk_paper.report import runs
from keepk_paper.report.intervals import Interval, paired
from keepk_paper.report.lines import Line, Lines, Results, in_common
from keepk_paper.report.numbers import Cell

TOLERANCE = 0.3

Fact = tuple[str, Cell, str]


class Verdict(str, Enum):
    """The outcome of a claim or a comparison."""

    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "not confirmed"
    NOT_TESTABLE = "not testable here"
    NOT_YET_RUN = "not yet run"


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same seeds.

    Attributes:
        setting: The network and the data.
        recipe: The run in question.
        other: The run that it is compared with.
        of: The lines of the one.
        against: The lines of the other, seed by seed.
        target: The difference that is asked for.
        tolerance: How far the difference may exceed the target; 0 asks for a difference below it.
        chosen: Whether the run represents the paper's method in this setting.
        decides: Whether the claim's verdict depends on it.
        caveat: A restriction of the data that readers should know.
    """

    setting: str
    recipe: str
    other: str
    of: Lines
    against: Lines
    target: float
    tolerance: float = TOLERANCE
    chosen: bool = True
    decides: bool = True
    caveat: str = ""

    @property
    def interval(self) -> Interval | None:
        """The difference with its 95 % interval."""
        return paired(self.of, self.against)

    @property
    def verdict(self) -> Verdict:
        """By the rule of this module."""
        # 0.3 + 1.4 is not quite 1.7 in floats. Without a tolerance the claim is "better", and a draw is not enough.
        bound = self.target + self.tolerance + (1e-9 if self.tolerance else -1e-9)
        if self.interval is not None:
            return Verdict.CONFIRMED if self.interval.high <= bound else Verdict.NOT_CONFIRMED
        difference = fmean(
            one["test_error"] - other["test_error"] for one, other in zip(self.of, self.against, strict=True)
        )
        return Verdict.NOT_CONFIRMED if difference > bound else Verdict.NOT_YET_RUN


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and its verdict.

    Attributes:
        key: Identifies it on the page.
        statement: The claim in a sentence.
        where: Where the paper makes it.
        printed: The paper's numbers for it.
        verdict: The outcome.
        reason: Why, in a sentence.
        rule: The criterion of the verdict.
        comparisons: The pairs of runs.
        facts: Other numbers, each with its name and unit.
        commands: The commands for the runs that are missing.
        caveat: A restriction of the data that readers should know.
    """

    key: str
    statement: str
    where: str
    printed: str
    verdict: Verdict = Verdict.NOT_YET_RUN
    reason: str = ""
    rule: str = ""
    comparisons: tuple[Comparison, ...] = ()
    facts: tuple[Fact, ...] = ()
    commands: tuple[str, ...] = ()
    caveat: str = ""


def compared(
    results: Results, of: Sequence[Line], against: Sequence[Line], *, target: float, tolerance: float = TOLERANCE
) -> Comparison | None:
    """Compare two runs on the seeds that both have; None if they share no seed."""
    of, against = in_common(of, against)
    if not of:
        return None
    experiment, recipe = of[0].experiment, of[0]["recipe"]
    other = f"{against[0]['recipe']}{' (dense)' if against[0]['recipe'] == recipe else ''}"
    setting, caveat = setting_title(results, of[0]), runs.caveat(experiment)
    return Comparison(setting, recipe, other, of, against, target, tolerance, caveat=caveat)


def setting_title(results: Results, line: Line) -> str:
    """The network, data and precision of a run, for headings."""
    return next((it.title for it in runs.settings(results) if line in it), runs.dense_title(line.experiment, None))


def decided(claim: Claim, comparisons: Sequence[Comparison], missing: tuple[str, ...]) -> Claim:
    """The claim with its verdict: confirmed if all deciding comparisons are."""
    deciding = [it.verdict for it in comparisons if it.decides]
    if Verdict.NOT_CONFIRMED in deciding:
        verdict = Verdict.NOT_CONFIRMED
    elif deciding and Verdict.NOT_YET_RUN not in deciding:
        verdict = Verdict.CONFIRMED
    else:
        verdict = Verdict.NOT_YET_RUN
    reasons = list[str]()
    if verdict is Verdict.NOT_YET_RUN:
        small = comparisons and not deciding
        reasons += (
            ["Only networks that are too small to decide have been run; their numbers are below."] if small else []
        )
        reasons += [] if missing else ["This version has no recipe for the runs that decide."]
    reason = " ".join(reasons)
    commands = missing if verdict is Verdict.NOT_YET_RUN else ()
    return replace(claim, verdict=verdict, reason=reason, comparisons=tuple(comparisons), commands=commands)


def judged(holds: bool, known: bool) -> Verdict:
    """The verdict of a claim that holds or not, if there are results for it."""
    if not known:
        return Verdict.NOT_YET_RUN
    return Verdict.CONFIRMED if holds else Verdict.NOT_CONFIRMED
