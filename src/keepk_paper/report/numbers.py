"""The numbers of the report: each is a formula over named result lines, and the page says which.

A reader, or a test, can compute every number again from ``data-formula``, ``data-lines`` and ``data-against``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from keepk_paper.parity_training import at_floor
from keepk_paper.report.intervals import Interval, paired
from keepk_paper.report.lines import Line, Lines, in_common

COUNTS = ("seeds", "lines", "exact")  # the formulas that may count runs of several devices and precisions
SIGNED = "{:+.2f}"
Compute = Callable[[Sequence[Line], Sequence[Line], str], float | None]


@dataclass(frozen=True)
class Number:
    """A number as it is printed, and where it comes from.

    Attributes:
        text: The number, formatted.
        value: The number itself, by which tables are sorted.
        formula: The name of the formula, and after a colon its argument.
        of: The lines that it was computed from.
        against: The lines that these are compared with.
    """

    text: str
    value: float
    formula: str
    of: Lines
    against: Lines = ()


@dataclass(frozen=True)
class Printed:
    """A number that the paper prints."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Planned:
    """A number of an annealing plan, which follows from its parameters and not from results."""

    text: str
    value: float
    plan: str


@dataclass(frozen=True)
class Span:
    """The two ends of an interval."""

    low: Number
    high: Number


@dataclass(frozen=True)
class Commands:
    """Commands of the shell, alternatives of each other."""

    lines: tuple[str, ...]


Cell = str | Number | Printed | Planned | Span | Commands


@dataclass(frozen=True)
class Grid:
    """A table of the page.

    Attributes:
        title: Its caption.
        columns: The headings; the first column names the rows.
        rows: One cell per column.
        note: A sentence below it.
        name: Identifies it on the page.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    name: str = field(default="", compare=False)


def number(formula: str, of: Sequence[Line], against: Sequence[Line] = (), form: str = "{:.2f}") -> Cell:
    """Compute a number; an empty cell if there are no lines, or too few.

    Args:
        formula: A key of `FORMULAS`, and after a colon its argument, such as ``mean:test_error``.
        of: The lines.
        against: The lines that they are compared with.
        form: How it is printed.
    """
    name, _, argument = formula.partition(":")
    # A mean over runs in float32 and in mixed precision would be a number of neither.
    assert name in COUNTS or len({line.training for line in (*of, *against)}) <= 1, f"{formula} over several trainings"
    value = FORMULAS[name](of, against, argument) if of else None
    return "" if value is None else Number(form.format(value), value, formula, tuple(of), tuple(against))


def text(cell: Cell) -> str:
    """A cell as plain text."""
    if isinstance(cell, Span):
        return f"{cell.low.text} to {cell.high.text}"
    if isinstance(cell, Commands):
        return " or ".join(f"`{line}`" for line in cell.lines)
    return cell if isinstance(cell, str) else cell.text


def interval(of: Sequence[Line], against: Sequence[Line]) -> tuple[Cell, Cell]:
    """The difference of two runs over the seeds that both have, and its 95 % interval where there is one."""
    of, against = in_common(of, against)
    difference = number("difference:test_error", of, against, SIGNED)
    low, high = (number(part, of, against, SIGNED) for part in ("low", "high"))
    return difference, Span(low, high) if isinstance(low, Number) and isinstance(high, Number) else ""


def fewest_at_floor(of: Sequence[Line]) -> int | None:
    """The smallest number of nodes at which the chosen network reaches the noise floor on every draw."""
    missed = {line["asked"] for line in of if not line["at_floor"]}
    return min({line["asked"] for line in of} - missed, default=None)


def _spread(of: Sequence[Line], against: Sequence[Line], key: str) -> float | None:
    return stdev(line[key] for line in of) if len(of) > 1 else None


def _share(of: Sequence[Line], against: Sequence[Line], layer: str) -> float:
    """The percentage of a layer that is left; "total" is the whole network."""
    pairs = [(line["kept"], line["total"]) if layer == "total" else line["layers"][layer] for line in of]
    return fmean(100 * left / total for left, total in pairs)


def _last_layers(of: Sequence[Line], against: Sequence[Line], number: str) -> float:
    """The percentage left in the last layers together."""
    return fmean(
        100 * sum(left for left, _ in last) / sum(total for _, total in last)
        for last in (list(line["layers"].values())[-int(number) :] for line in of)
    )


def _largest_of_last(of: Sequence[Line], against: Sequence[Line], number: str) -> float:
    """The largest percentage left in one of the last layers."""
    return max(
        fmean(100 * line["layers"][name][0] / line["layers"][name][1] for line in of)
        for name in list(of[0]["layers"])[-int(number) :]
    )


def _unevenness(of: Sequence[Line], against: Sequence[Line], word: str) -> float:
    """The standard deviation of the shares left in the layers without `word` in their names, over their mean."""
    shares = [float(left / total) for name, (left, total) in of[0]["layers"].items() if word not in name]
    return 100 * stdev(shares) / fmean(shares)


def _least_mean(of: Sequence[Line], against: Sequence[Line], key: str) -> float:
    """The smallest mean over the seeds, of all counts."""
    return min(fmean(line[key] for line in of if line["asked"] == asked) for asked in {line["asked"] for line in of})


def _sum_of_runs(of: Sequence[Line], against: Sequence[Line], key: str) -> float:
    """The mean over the seeds of a run together with that of the runs that it started from."""
    recipes = {line["recipe"] for line in against}
    return fmean(line[key] for line in of) + sum(
        fmean(line[key] for line in against if line["recipe"] == recipe) for recipe in recipes
    )


def _of_interval(part: Callable[[Interval], float]) -> Compute:
    def compute(of: Sequence[Line], against: Sequence[Line], _: str) -> float | None:
        interval = paired(of, against)
        return None if interval is None else part(interval)

    return compute


FORMULAS: dict[str, Compute] = {
    "mean": lambda of, _, key: fmean(line[key] for line in of),
    "millions": lambda of, _, key: fmean(line[key] for line in of) / 1e6,
    "spread": _spread,
    "least": lambda of, _, key: min(line[key] for line in of),
    "least_mean": _least_mean,
    "seeds": lambda of, _, __: len({line["seed"] for line in of}),
    "lines": lambda of, _, __: len(of),
    "exact": lambda of, _, __: sum(line["kept"] == line["asked"] for line in of),
    "difference": lambda of, against, key: (
        fmean(one[key] - other[key] for one, other in zip(of, against, strict=True)) if against else None
    ),
    "units": _of_interval(lambda interval: interval.units),
    "low": _of_interval(lambda interval: interval.low),
    "high": _of_interval(lambda interval: interval.high),
    "percent": lambda of, against, key: (
        100 * fmean(line[key] for line in of) / fmean(line[key] for line in against) if against else None
    ),
    "sum_of_runs": _sum_of_runs,
    "thousands_of_runs": lambda of, against, key: _sum_of_runs(of, against, key) / 1e3,
    "share": _share,
    "left": lambda of, _, layer: fmean(line["layers"][layer][0] for line in of),
    "last_layers": _last_layers,
    "largest_of_last": _largest_of_last,
    "unevenness": _unevenness,
    "fewest_at_floor": lambda of, _, __: fewest_at_floor(of),
    "draws_at_floor": lambda of, _, __: sum(line["at_floor"] for line in of),
    "starts_at_floor": lambda of, _, __: sum(
        at_floor(error, line["noise_floor"]) for line in of for error in line["test_errors"]
    ),
}
