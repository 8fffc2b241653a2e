"""The tables of the report: the paper's rows beside ours, the rivals, and the runs that are still missing."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

from keepk_paper.report import runs
from keepk_paper.report.chosen import RIVALS, percentages, subject
from keepk_paper.report.lines import ORDER, Line, Results
from keepk_paper.report.numbers import Cell, Commands, Grid, Printed, interval, number, text
from keepk_paper.report.runs import Setting
from keepk_paper.report.verdicts import Claim, Comparison, Verdict, compared
from keepk_paper.tables.channels import TABLES, printed_rows
from keepk_paper.tables.papers import PAPER_ERRORS, PAPER_LAYERS, TABLE_2_KEPT

ERROR_COLUMNS = ("recipe", "kept", "test %", "spread", "best", "val %", "n", "minus dense", "95 % interval")
CHANNEL_COLUMNS = (
    *("recipe", "kept", "test %", "spread", "val %", "n", "minus dense", "95 % interval"),
    *("parameters", "MACs, M", "CPU s", "description"),
)
# The networks and data of Tables 3 to 5; a table without results says how to get them.
EXPECTED = (
    *("vgg16-cifar10", "vgg16-half-cifar10", "vgg16-full-cifar10", "densenet40-cifar10"),
    *("vgg16-half-cifar100", "densenet40-cifar100", "vgg16-svhn", "densenet40-svhn"),
)
EXPECTED_SIZES = {
    "vgg16-cifar10": Fraction(1, 4),
    **dict.fromkeys(("vgg16-half-cifar10", "vgg16-half-cifar100"), Fraction(1, 2)),
    **dict.fromkeys(("densenet40-cifar10", "densenet40-cifar100", "densenet40-svhn"), Fraction(1, 2)),
}
WHOLE = "{:,.0f}"


def mnist_grids(results: Results) -> Iterator[Grid]:
    """Tables 1 and 2 for both LeNets."""
    for experiment, printed in PAPER_ERRORS.items():
        rows: list[Sequence[Cell]] = [
            (f"the paper: {who}", _printed(kept), _printed(error), *[""] * 6) for who, error, kept in printed
        ]
        for recipe in results.recipes(experiment):
            counts = {line["asked"] for line in results.of(experiment, recipe)}
            rows += [
                _error_row(results, results.of(experiment, recipe, asked)) for asked in sorted(counts, reverse=True)
            ]
        title = f"{runs.NETWORKS[experiment]}, MNIST: test error (Table 1)"
        yield Grid(title, ERROR_COLUMNS, rows, name=f"{experiment}-errors")
        yield _layer_percents(results, experiment)


def channel_grids(results: Results) -> Iterator[Grid]:
    """Tables 3 to 5: one for each setting, also for those without results."""
    found = runs.settings(results)
    known = {it.experiment for it in found}
    tables = [(it.experiment, it) for it in found] + [(name, None) for name in EXPECTED if name not in known]
    places = [*TABLES, *(_data(name) for name in known)]
    for experiment, setting in sorted(tables, key=lambda it: (places.index(_data(it[0])), _place(it[0]))):
        rows: list[Sequence[Cell]] = []
        for who, kept, error, parameters in printed_rows(experiment):
            name = f"the paper: {who}".replace(" %", "\N{NO-BREAK SPACE}%")
            rows.append((name, _printed(kept), _printed(error), *[""] * 5, _printed(parameters), "", "", ""))
        if setting is None:
            words, key = runs.dense_title(experiment, EXPECTED_SIZES.get(experiment, Fraction(1))), experiment
            notes = ["Not yet run; the commands are below, under “Runs, done and to come”."]
        else:
            rows += [_channel_row(results, setting, recipe) for recipe in setting.recipes]
            words, key = setting.title, setting.key
            notes = [_without_control(setting)]
        title = f"{words} ({TABLES.get(_data(experiment), 'not in the paper')})"
        note = " ".join(filter(None, [runs.caveat(experiment), *notes]))
        yield Grid(title, CHANNEL_COLUMNS, rows, note, f"{key}-costs")


def rival_grids(results: Results) -> Iterator[Grid]:
    """For each setting with rivals, the chosen run minus each of them, at the same percentage."""
    columns = ("percent removed", "chosen run", "rival", "description", "difference", "95 % interval", "n", "outcome")
    for setting in runs.settings(results):
        rows = [
            row
            for percent in percentages(setting)
            if (chosen := subject(results, setting, percent))
            for row in _rival_rows(results, setting, percent, chosen)
        ]
        if rows:
            title = f"{setting.title}: the chosen run minus its rivals"
            note = "A negative difference is in favour of the chosen run, which has the lowest validation error. "
            yield Grid(title, columns, rows, note + runs.caveat(setting.experiment), f"{setting.key}-rivals")


def parity_grid(results: Results) -> Grid | None:
    """The parity experiment: errors, and how many draws and starts reach the noise floor; None without results."""
    lines = results.of("parity")
    recipes = results.recipes("parity")
    columns = ["hidden nodes", *(f"{name}{part}" for name in recipes for part in (", test %", ", draws", ", starts"))]
    rows = list[Sequence[Cell]]()
    for asked in sorted({line["asked"] for line in lines}):
        row: list[Cell] = [f"{asked}"]
        for name in recipes:
            of = results.of("parity", name, asked)
            row.append(number("mean:test_error", of))
            row += [number(part, of, form="{:.0f}") for part in ("draws_at_floor", "starts_at_floor")]
        rows.append(row)
    note = (
        "The mean test error of the networks chosen by validation error, and on how many draws of the data the chosen "
        "network, and how many of all starts, reach the noise floor. keepk anneals 256 nodes; the others start small."
    )
    return Grid("Parity of 5 in 50 signs, 10 % of the labels wrong", columns, rows, note, "parity") if lines else None


PROGRAMME_COLUMNS = ("recipes", "experiment", "state", "seeds run", "wanted", "command")


def programme_grids(results: Results) -> list[Grid]:
    """The runs that the comparison needs, and how many of their seeds have been run: a table for each of its rows."""
    by_row = dict[str, list[Sequence[Cell]]]()
    for state in runs.programme(results):
        wanted = state.wanted
        done = state.done == wanted.seeds
        started = [it for it in state.commands if any(f" {line['recipe']} " in f"{it} " for line in state.found)]
        commands: Cell = Commands(tuple(started) or state.commands) if state.commands else "no recipe in this version"
        by_row.setdefault(wanted.row, []).append(
            (
                " or ".join(wanted.recipes),
                wanted.experiment,
                "done" if done else "partly run" if state.found else "not yet run",
                number("seeds", state.found, form="{:.0f}"),
                f"of {wanted.seeds}",
                "" if done else commands,
            )
        )
    return [
        Grid(row, PROGRAMME_COLUMNS, rows, name=f"programme-{place}")
        for place, (row, rows) in enumerate(by_row.items(), start=1)
    ]


def programme_grid(results: Results) -> Grid:
    """The same in one table for the pages in Markdown, where each row of the programme is named once."""
    rows = [
        (grid.title if place == 0 else "", *cells)
        for grid in programme_grids(results)
        for place, cells in enumerate(grid.rows)
    ]
    return Grid("Runs that the comparison needs", ("row", *PROGRAMME_COLUMNS), rows, name="programme-runs")


def claim_grid(claim: Claim) -> Grid | None:
    """The comparisons of a claim; None without any."""
    columns = ("setting", "run", "against", "test %", "theirs %", "difference", "95 % interval", "over", "n", "bound")
    ordered = sorted(claim.comparisons, key=lambda it: (not it.decides, not it.chosen))
    rows = [_comparison_row(it) for it in ordered]
    return Grid("", (*columns, "outcome", "decides"), rows, name=f"table-{claim.key}") if rows else None


def verdict_grid(claims: Sequence[Claim]) -> Grid:
    """One row per claim, for the pages in Markdown."""
    rows = [
        (claim.statement, claim.where, Printed(claim.printed), _measured(claim), claim.verdict.value)
        for claim in claims
    ]
    return Grid("", ("claim", "in the paper", "printed", "measured here", "verdict"), rows, name="verdicts")


def _measured(claim: Claim) -> str:
    """The numbers of a claim as a sentence."""
    parts = [f"{name}: {text(cell)} {unit}".rstrip() for name, cell, unit in claim.facts if text(cell)]
    for it in main_comparisons(claim):
        difference, span = interval(it.of, it.against)
        ends = f" ({text(span)})" if text(span) else " (no interval)"
        parts.append(f"{it.setting}: {it.recipe} {text(difference)}{ends}, n = {len(it.of)}")
    return "; ".join(parts)


def main_comparisons(claim: Claim) -> Sequence[Comparison]:
    """The comparisons that decide, or else those of the chosen runs."""
    deciding = [it for it in claim.comparisons if it.decides]
    return deciding or [it for it in claim.comparisons if it.chosen]


def _comparison_row(it: Comparison) -> Sequence[Cell]:
    difference, span = interval(it.of, it.against)
    over: Cell = "one seed, no interval"
    if it.interval:
        over = number("units", it.of, it.against, "{:,.0f} " + it.interval.over)
    return (
        it.setting,
        it.recipe,
        it.other,
        number("mean:test_error", it.of),
        number("mean:test_error", it.against),
        difference,
        span,
        over,
        number("seeds", it.of, form="{:.0f}"),
        f"at most {it.target + it.tolerance:+.2f}",
        "open" if it.verdict is Verdict.NOT_YET_RUN else it.verdict.value,
        "yes" if it.decides else "no",
    )


def _rival_rows(results: Results, setting: Setting, percent: int, chosen: str) -> Iterator[Sequence[Cell]]:
    for rival in setting.recipes:
        if runs.percent_removed(rival) != percent or not runs.matches(rival, RIVALS):
            continue
        pair = setting.of(results, chosen), setting.of(results, rival)
        found = compared(results, *pair, target=0, tolerance=0)
        if found:
            difference, span = interval(found.of, found.against)
            better = "" if found.interval is None else _outcome(found.interval.low, found.interval.high)
            n = number("seeds", found.of, form="{:.0f}")
            yield (f"{percent} %", chosen, rival, runs.kind(rival).label, difference, span, n, better)


def _outcome(low: float, high: float) -> str:
    if high < 0:
        return "better"
    return "worse" if low > 0 else "no clear difference"


def _error_row(results: Results, lines: Sequence[Line]) -> Sequence[Cell]:
    recipe = lines[0]["recipe"]
    dense = lines[0]["asked"] == lines[0]["total"]
    difference, span = ("", "") if dense else interval(lines, runs.dense_lines(results, lines[0]))
    return (
        f"{recipe}, dense" if dense else recipe,
        number("mean:kept", lines, form=WHOLE),
        number("mean:test_error", lines),
        number("spread:test_error", lines),
        number("least:test_error", lines),
        number("mean:val_error", lines),
        number("seeds", lines, form="{:.0f}"),
        difference,
        span,
    )


def _layer_percents(results: Results, experiment: str) -> Grid:
    asked = TABLE_2_KEPT[experiment]
    recipes = [name for name in results.recipes(experiment) if results.of(experiment, name, asked)]
    rows = [
        (
            layer,
            _printed(f"{han}"),
            _printed(f"{theirs}"),
            *(number(f"share:{layer}", results.of(experiment, name, asked), form="{:.1f}") for name in recipes),
        )
        for layer, (han, theirs) in PAPER_LAYERS[experiment].items()
    ]
    columns = ("layer", "Han et al. (printed)", "DSC-1 (printed)", *recipes)
    title = f"{runs.NETWORKS[experiment]}, MNIST: percentage of the weights left at {asked:,} (Table 2)"
    return Grid(title, columns, rows, name=f"{experiment}-layers")


def _without_control(setting: Setting) -> str:
    """The runs of a setting whose dense network has not been trained in the same precision, and how to train it."""
    lacking = dict[str, list[str]]()
    for recipe in setting.recipes:
        name = runs.control(setting.experiment, recipe)
        if name and name not in setting.recipes:
            lacking.setdefault(name, []).append(recipe)
    return " ".join(
        f"Not compared, because the dense network {name} has not been trained in {setting.training}: "
        f"{', '.join(recipes)}. To run: {runs.command(setting.experiment, name, 1, setting.training)}."
        for name, recipes in lacking.items()
    )


def _channel_row(results: Results, setting: Setting, recipe: str) -> Sequence[Cell]:
    lines = setting.of(results, recipe)
    dense = runs.dense_lines(results, lines[0])
    own = dense and dense[0]["recipe"] == recipe
    difference, span = ("", "") if own else interval(lines, dense)
    return (
        recipe,
        number("mean:kept", lines, form=WHOLE),
        number("mean:test_error", lines),
        number("spread:test_error", lines),
        number("mean:val_error", lines),
        number("seeds", lines, form="{:.0f}"),
        difference,
        span,
        number("mean:printed_parameters", lines, form=WHOLE),
        number("millions:macs", lines, form="{:.1f}"),
        number("sum_of_runs:cpu_seconds", lines, runs.starts(results, lines[0]), WHOLE),
        runs.kind(recipe).label,
    )


def _data(experiment: str) -> str:
    return runs.network_and_data(experiment)[1]


def _place(experiment: str) -> int:
    return ORDER.index(experiment) if experiment in ORDER else len(ORDER)


def _printed(words: str) -> Printed:
    """A number of the paper, sorted by its value: ``17.4K`` is 17,400."""
    digits, unit = words.replace(",", "").upper(), 1.0
    for letter, factor in (("K", 1e3), ("M", 1e6)):
        if digits.endswith(letter):
            digits, unit = digits[:-1], factor
    return Printed(words, float(digits) * unit)
