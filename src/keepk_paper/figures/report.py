"""The figures of the report. Each is drawn from the cells of a table, which the page shows beside it.

Figures are narrow, so that their text is legible on a phone. Colours are names of the page's palette, not values: the
same drawing serves a light and a dark page (see `svg`).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from io import StringIO
from math import ceil
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FuncFormatter, MaxNLocator

from keepk.plan.schedules import Annealing, plan
from keepk_paper.figures.panels import BLUE, INK, ORANGE, SOFT, TRACK
from keepk_paper.figures.parity import GREEN, LOOKS, PURPLE
from keepk_paper.one_run import FAST, METRICS, SLOW
from keepk_paper.parity import NODES
from keepk_paper.report import runs
from keepk_paper.report.chosen import (
    most_removed,
    percentages,
    rate_commands,
    rate_families,
    rates_missing,
    subject,
)
from keepk_paper.report.lines import Line, Results
from keepk_paper.report.numbers import Cell, Grid, Number, Planned, interval, number
from keepk_paper.report.runs import VARIANTS, Setting, Variant
from keepk_paper.report.verdicts import setting_title
from keepk_paper.results import USUAL

SKY, AMBER, GRID = "#56B4E9", "#E69F00", "#D5D5D5"
# The style sheet of the page gives these names a value for light and one for dark.
PALETTE = {
    INK: "ink",
    SOFT: "soft",
    TRACK: "track",
    GRID: "rule",
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    PURPLE: "purple",
    SKY: "sky",
    AMBER: "amber",
}
ROW = 0.205  # inches of a row of the legend
WIDTH, FONT = 5.0, 11  # inches, points; 5 inches are 360 units of the drawing, about as many as a phone has pixels
# By the label of a kind of runs: colour and marker, so that a print in grey can be read as well.
STYLES: dict[str, tuple[str, str]] = {
    "dense, as many epochs": (INK, "o"),
    "dense, trained further, as many epochs": (INK, "s"),
    "dense, at the start of pruning": (SOFT, "D"),
    "one run, blend of means": (BLUE, "o"),
    "one run, Taylor importance": (ORANGE, "o"),
    "from the trained net, blend of means": (BLUE, "^"),
    "from the trained net, Taylor importance": (ORANGE, "^"),
    "from the trained net, BatchNorm scales": (GREEN, "^"),
    "from the trained net, blend of sums": (SKY, "^"),
    "the paper's text, full width": (PURPLE, "*"),
    "the paper's text, BatchNorm scales": (PURPLE, "v"),
    "the paper's text, blend of means": (PURPLE, "<"),
    "the final widths from scratch": (AMBER, "s"),
    "Network Slimming (Liu et al. 2017)": (GREEN, "P"),
    "one-shot, the same ranking": (SKY, "X"),
    "L1 norms of filters, by layer (Li et al. 2017)": (AMBER, "d"),
    "random channels": (SOFT, "x"),
    "uniformly narrower, as many MACs": (AMBER, ">"),
    "dense, as many CPU seconds": (SOFT, "p"),
}


@dataclass(frozen=True)
class Drawing:
    """A figure of the page.

    Attributes:
        name: Identifies it.
        title: The heading above it.
        caption: How to read it.
        figure: The drawing; None if there are no results for it.
        grid: The numbers in it.
        commands: The commands that produce missing results.
    """

    name: str
    title: str
    caption: str
    figure: Figure | None
    grid: Grid | None = None
    commands: tuple[str, ...] = ()


def drawings(results: Results) -> list[Drawing]:
    """All figures, those of the paper first."""
    return [
        annealing_plan(),
        parity(results),
        macs_ratio(results),
        layers_left(results, "vgg16"),
        layers_left(results, "densenet40"),
        *by_rate(results),
        *variants(results),
        *against_costs(results),
    ]


def svg(figure: Figure, name: str, title: str) -> str:
    """The drawing as an element of an HTML page.

    Colours become variables of the page's style sheet, and ids get `name` as a prefix, because a page has several
    drawings. The same drawing gives the same text: no date, and ids that do not depend on chance.
    """
    file = StringIO()
    with mpl.rc_context({"svg.hashsalt": "keepk", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn, flags=re.DOTALL)
    for colour, word in PALETTE.items():
        drawn = re.sub(colour, f"var(--{word})", drawn, flags=re.IGNORECASE)
    drawn = re.sub(r'\bid="', f'id="{name}-', drawn)
    drawn = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", drawn)
    # The page sets the size; the viewBox keeps the proportions.
    drawn = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", drawn, count=1)
    drawn = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", drawn, count=1)
    label = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return drawn.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()


def annealing_plan() -> Drawing:
    """Figure 1 of the paper, and the plans of our runs."""
    plans: list[tuple[str, Annealing, float, str]] = [
        ("Figure 1: p0 .8, N1 10, nu .02, to 10 %", Annealing(p0=0.8, n1=10, nu=0.02), 0.1, INK),
        ("one run, 60 %: p0 .5, N1 6, nu .02", SLOW, 0.4, BLUE),
        ("one run, 70 %: p0 .5, N1 6, nu .04", FAST, 0.3, ORANGE),
    ]
    figure, axes = _axes()
    million, epochs = 1_000_000, 20
    rows: list[list[Cell]] = [[f"{epoch}"] for epoch in range(1, epochs + 1)]
    for name, schedule, left, colour in plans:
        counts = plan(schedule, million, round(left * million), epochs=epochs)
        shares = [100 * count / million for count in counts]
        axes.step(range(epochs + 1), [100, *shares], where="post", color=colour, linewidth=1.8, label=name)
        said = f"p0={schedule.p0} n1={schedule.n1} nu={schedule.nu} mu={schedule.mu} p={1 - left:g}"
        for epoch, (row, share) in enumerate(zip(rows, shares, strict=True), start=1):
            row.append(Planned(f"{share:.2f}", share, f"{said} e={epoch}"))
    axes.set(xlim=(0, epochs), ylim=(0, 102), xlabel="events, one at the end of an epoch", ylabel="units left, %")
    axes.set_xticks(range(0, epochs + 1, 5))
    _tidy(axes)
    _lay_out(figure, axes, 3.0)
    grid = Grid("Units left after each event, %", ("event", *(it[0] for it in plans)), rows, name="plan-numbers")
    caption = (
        "The share of the units that is left after each event, by the paper's formula. Our runs have their first event "
        "in epoch 12 of 40."
    )
    return Drawing("plan", "The annealing plan (the paper's Figure 1)", caption, figure, grid)


def parity(results: Results) -> Drawing:
    """Figure 2: test error by hidden nodes."""
    title = "Parity: test error by hidden nodes (Figure 2)"
    # Without the 256 nodes that the annealed networks start from, which would squeeze all others together.
    small = [it for it in results.of("parity") if it["asked"] < it["total"] or it["total"] < NODES]
    if not small:
        return Drawing("parity-figure", title, "", None, commands=("keepk paper run parity",))
    figure, axes = _axes()
    nodes = sorted({line["asked"] for line in small})
    names = [*(name for name in LOOKS if results.of("parity", name)), *_unknown(results.recipes("parity"), LOOKS)]
    columns = {
        name: [number("mean:test_error", results.of("parity", name, asked)) for asked in nodes] for name in names
    }
    for layer, (name, cells) in enumerate(columns.items()):
        label, colour, marker = LOOKS.get(name, (name, SOFT, "x"))
        drawn = [(asked, cell.value) for asked, cell in zip(nodes, cells, strict=True) if isinstance(cell, Number)]
        axes.plot(*zip(*drawn, strict=True), color=colour, marker=marker, markersize=4.5, label=label, zorder=9 - layer)
    floor = number("mean:noise_floor", small)
    assert isinstance(floor, Number)
    axes.axhline(floor.value, color=SOFT, linewidth=1, linestyle=(0, (5, 3)), zorder=1.5, label="noise floor")
    axes.set(xlim=(nodes[0] - 0.5, nodes[-1] + 0.5), ylim=(0, 54), xlabel="hidden nodes", ylabel="test error, %")
    axes.set_xticks(nodes[:: 1 + len(nodes) // 12])  # every number would not fit on a phone
    _tidy(axes)
    _lay_out(figure, axes, 3.0)
    rows = [[f"{asked}", *(cells[place] for cells in columns.values())] for place, asked in enumerate(nodes)]
    rows.append(["noise floor", floor, *[""] * (len(columns) - 1)])
    grid = Grid("Mean test error of the best starts, %", ("hidden nodes", *columns), rows, name="parity-numbers")
    caption = "The best start by validation error, mean over the draws of the data. The paper needs 6 nodes."
    return Drawing("parity-figure", title, caption, figure, grid)


def macs_ratio(results: Results) -> Drawing:
    """Figure 3: multiply-accumulates of the pruned networks as a share of the dense ones."""
    title = "Multiply-accumulates left, by network and data (Figure 3)"
    rows = list[list[Cell]]()
    for setting in runs.settings(results):
        for percent in percentages(setting):
            name = subject(results, setting, percent)
            if name is None:
                continue
            lines = setting.of(results, name)
            ratio = number("percent:macs", lines, runs.dense_lines(results, lines[0]), "{:.1f}")
            if isinstance(ratio, Number):
                rows.append([f"{setting.short_title}: {percent} % removed", name, ratio])
    if not rows:
        commands = runs.commands(results, runs.QUARTER, ("one-run-dense", "one-run-taylor-70"), 1)
        return Drawing("macs-ratio", title, "", None, commands=commands)
    figure, axes = _axes()
    places = range(len(rows), 0, -1)
    shares = [cell.value for *_, cell in rows if isinstance(cell, Number)]
    axes.barh(places, [100.0] * len(rows), height=0.26, color=TRACK)
    axes.barh(places, shares, height=0.26, color=BLUE)
    for place, (label, _, ratio) in zip(places, rows, strict=True):
        assert isinstance(ratio, Number)
        axes.text(0, place + 0.17, str(label), color=INK, fontsize=FONT, va="bottom")
        axes.text(100, place - 0.17, f"{ratio.text} % left", color=SOFT, fontsize=FONT, va="top", ha="right")
    axes.set(xlim=(0, 100), ylim=(0.45, len(rows) + 0.6))
    axes.set_axis_off()
    figure.set_size_inches(WIDTH, 0.2 + 0.62 * len(rows))
    axes.set_position((0.01, 0.01, 0.98, 0.98))
    grid = Grid("MACs left, % of the dense network", ("network", "recipe", "MACs left, %"), rows, name="ratio-numbers")
    caption = "Of the recipe with the lowest validation error. Rankings that keep more in early layers keep more MACs."
    trainings = {cell.of[0].training for *_, cell in rows if isinstance(cell, Number)}
    caption += " Precisions are mixed; each bar has one, which its label names." if len(trainings) > 1 else ""
    return Drawing("macs-ratio", title, _with_caveats(caption, results), figure, grid)


def layers_left(results: Results, network: str) -> Drawing:
    """Figure 4: the share of the channels left in each layer, at 70 % removed or the most there is."""
    words = runs.NETWORKS[network]
    title = f"{words}: channels left by layer (Figure 4)"
    name = f"layers-{network}"
    lines = most_removed(results, network, "cifar10")
    seventy = runs.commands(results, f"{network}-cifar10", ("one-run-taylor-70", "*-70"), 1)[:1]
    if not lines:
        return Drawing(name, title, "", None, commands=seventy)
    layers = list(lines[0]["layers"])
    cells = [number(f"share:{layer}", lines, form="{:.1f}") for layer in layers]
    shares = [cell.value for cell in cells if isinstance(cell, Number)]
    figure, axes = _axes()
    places = range(1, len(layers) + 1)
    axes.bar(places, shares, color=[AMBER if "transition" in layer else BLUE for layer in layers], width=0.75)
    whole = number("share:total", lines, form="{:.1f}")
    assert isinstance(whole, Number)
    axes.axhline(whole.value, color=SOFT, linewidth=1, linestyle=(0, (5, 3)))
    axes.set(xlim=(0.3, len(layers) + 0.7), ylim=(0, 105), ylabel="channels left, %")
    axes.set_xlabel("layer" if network == "vgg16" else "BatchNorm that reads the channels (amber: transitions)")
    axes.xaxis.set_major_locator(MaxNLocator(13, integer=True, steps=(1, 2, 5, 10), min_n_ticks=2))
    _tidy(axes)
    _lay_out(figure, axes, 2.9)
    percent = round(100 - whole.value)
    rows = [[f"{place}: {layer}", cell] for place, (layer, cell) in enumerate(zip(layers, cells, strict=True), start=1)]
    rows.append(["whole network", whole])
    grid = Grid("Channels left, %", ("layer", "left, %"), rows, name=f"{name}-numbers")
    recipe = lines[0]["recipe"]
    described = f"{setting_title(results, lines[0])}, recipe {recipe}, {percent} % removed"
    caption = f"{described}. The dashed line is the whole network."
    caption += "" if percent == 70 else " The paper's figure is at 70 %, which has not been run here."
    return Drawing(name, title, caption, figure, grid, commands=() if percent == 70 else seventy)


def by_rate(results: Results) -> Iterator[Drawing]:
    """Figure 5: the test error against the share removed by one global rate, for each network."""
    families = rate_families(results)
    for network in ("vgg16", "densenet40"):
        found = [it for it in families if runs.network_and_data(it[0].experiment)[0] == network]
        longest = max((len(names) for _, names in found), default=0)
        found = [
            it for it in found if len(it[1]) >= min(longest, 3)
        ]  # two points are a curve only if there is no other
        title = f"{runs.NETWORKS[network]}: test error against the global rate (Figure 5)"
        name = f"rate-{network}"
        if found:
            yield _rates(results, found, name, title, network)
        else:
            yield Drawing(name, title, "", None, commands=rate_commands(results, (network,)))


def _rates(
    results: Results, families: Sequence[tuple[Setting, list[str]]], name: str, title: str, network: str
) -> Drawing:
    figure, axes = _axes()
    rows = list[list[Cell]]()
    for place, (setting, names) in enumerate(families):
        dense = runs.dense_lines(results, setting.of(results, names[0])[0])
        label = f"{runs.family(names[0])}, {setting.short_title}"
        points = [(0, dense), *((runs.percent_removed(it) or 0, setting.of(results, it)) for it in names)]
        cells = [(percent, number("mean:test_error", of), number("spread:test_error", of)) for percent, of in points]
        rows += [[label, f"{percent}", error, spread] for percent, error, spread in cells]
        drawn = [it for it in cells if isinstance(it[1], Number)]
        errors = [error.value for _, error, _ in drawn if isinstance(error, Number)]
        spreads = [it.value if isinstance(it, Number) else 0.0 for *_, it in drawn]
        style = _style(place)
        axes.errorbar([it[0] for it in drawn], errors, yerr=spreads if any(spreads) else None, label=label, **style)
    highest = max(cell.value for row in rows for cell in row[2:3] if isinstance(cell, Number))
    axes.set(xlim=(-3, 103), ylim=(0, 1.15 * highest), xlabel="channels removed, %", ylabel="test error, %")
    _tidy(axes)
    _lay_out(figure, axes, 3.0)
    grid = Grid(
        "Test error by share removed", ("recipe", "removed, %", "test %", "spread"), rows, name=f"{name}-numbers"
    )
    caption = "At 0 % the dense network that the recipe is compared with. Bars are standard deviations over seeds."
    complete = any(not rates_missing(names) for _, names in families)
    if not complete:
        missing = ", ".join(f"{rate}" for rate in rates_missing(it for _, names in families for it in names))
        caption += (
            f" Not yet run: {missing} %." if missing else " No recipe has been run at all of 10, 30, 50 and 70 %."
        )
    caption += _precisions(setting for setting, _ in families)
    caption = _with_caveats(caption, results, [it[0].experiment for it in families])
    return Drawing(name, title, caption, figure, grid, () if complete else rate_commands(results, (network,)))


# For each variation: the title, and what else differs between its values.
VARIED = {
    "schedules": (
        "schedules of removal",
        "From the trained network, 70 % of the channels removed by the same number of channels and epochs.",
    ),
    "alpha": (
        "the blend of scales and norms",
        "From the trained network, 70 % of the channels removed, ranked by alpha times the BatchNorm's scale plus 1 - "
        "alpha times norms of the weights, as sums or as means per weight. With means, every layer keeps a tenth.",
    ),
    "start": (
        "trained or untrained at the start",
        "70 % of the channels removed: from a network trained for 50 epochs, in 24 more; from the first epoch of 40 "
        "on; and from epoch 12 of 40 on.",
    ),
    "spaces": (
        "several spaces or one",
        "From the trained network, 70 % of the channels removed: ranked over all layers, or the same share of each.",
    ),
}


def variants(results: Results) -> Iterator[Drawing]:
    """For each variation of VGG-16 at a quarter of the width, the test error by its values."""
    for key, values in VARIANTS.items():
        words, caption = VARIED[key]
        title = f"{runs.dense_title(runs.QUARTER, Fraction(1, 4))}: {words}"
        # Runs of different precisions are not compared: the precision with most of the values is shown.
        known = {
            setting: sum(not {*value.recipes}.isdisjoint(setting.recipes) for value in values)
            for setting in runs.settings(results)
            if setting.experiment == runs.QUARTER
        }
        setting = max(known, key=lambda it: known[it], default=None)
        if setting is not None and known[setting] > 1:
            yield _varied(results, setting, f"varied-{key}", title, caption, values)
        else:  # one value is no comparison
            wanted = dict.fromkeys(name for value in values for name in value.recipes)
            lacking = [name for name in wanted if setting is None or name not in setting.recipes]
            commands = runs.commands(results, runs.QUARTER, lacking, 1)
            yield Drawing(f"varied-{key}", title, "", None, commands=commands)


def _varied(
    results: Results, setting: Setting, name: str, title: str, caption: str, values: Sequence[Variant]
) -> Drawing:
    """A row of points for each value; the two rankings have different colours."""
    series = [*METRICS] if len(values[0].recipes) == len(METRICS) else [""]
    rows, missing = list[list[Cell]](), list[str]()
    figure, axes = _axes()
    looks = {"blend": (BLUE, "o", "blend of means"), "taylor": (ORANGE, "^", "Taylor importance"), "": (BLUE, "o", "")}
    for column, metric in enumerate(series):
        colour, marker, label = looks[metric]
        points = list[tuple[float, float, float]]()
        for place, value in enumerate(values):
            recipe = value.recipes[column]
            of = setting.of(results, recipe)
            error, spread = number("mean:test_error", of), number("spread:test_error", of)
            difference = interval(of, setting.of(results, values[0].recipes[column])) if place else ("", "")
            state = number("seeds", of, form="{:.0f}") if of else "not yet run"
            rows.append([value.label, recipe, error, spread, state, *difference])
            if isinstance(error, Number):
                shift = 0.14 * (column - (len(series) - 1) / 2)
                points.append((error.value, place + shift, spread.value if isinstance(spread, Number) else 0.0))
            else:
                missing.append(recipe)
        if points:
            across, up, spreads = zip(*points, strict=True)
            bars = [spreads if any(spreads) else None]
            style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 6, "linestyle": "none"}
            axes.errorbar(across, up, xerr=bars[0], capsize=3, label=label or None, **style)
    axes.set_yticks(range(len(values)), [value.label for value in values])
    axes.set(ylim=(len(values) - 0.5, -0.5), xlabel="test error, %")
    _tidy(axes)
    axes.yaxis.set_major_formatter(FixedFormatter([value.label for value in values]))
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    _lay_out(figure, axes, 0.85 + 0.36 * len(values), left=2.05)
    columns = ("value", "recipe", "test %", "spread", "n", f"minus {values[0].label}", "95 % interval")
    grid = Grid(title, columns, rows, name=f"{name}-numbers")
    caption += " Means over the seeds; bars are standard deviations, where there are several seeds."
    caption += _precisions([setting])
    caption += f" Not yet run: {', '.join(missing)}." if missing else ""
    commands = tuple(runs.command(setting.experiment, it, 1, setting.training) for it in missing)
    return Drawing(name, title, caption, figure, grid, commands)


def _precisions(settings: Iterable[Setting]) -> str:
    """A sentence about the precision of the runs in a figure, if it is not float32 alone."""
    found = sorted({setting.training for setting in settings})
    if found in ([], [USUAL]):
        return ""
    if len(found) == 1:
        return f" Trained in {found[0]}."
    return f" Precisions are mixed: {', '.join(map(str, found))}; each curve has one, which its label names."


def against_costs(results: Results) -> Iterator[Drawing]:
    """For each setting, the test error of all runs against MACs and against the CPU seconds of training."""
    axes: tuple[tuple[str, str, str, Callable[[Sequence[Line]], Cell]], ...] = (
        ("macs", "multiply-accumulates", "MACs per picture, millions", lambda of: number("millions:macs", of)),
        (
            "seconds",
            "CPU seconds of training",
            "CPU seconds of training, thousands",
            lambda of: number("thousands_of_runs:cpu_seconds", of, runs.starts(results, of[0])),
        ),
    )
    known = [setting for setting in runs.settings(results) if len(setting.recipes) > 1]
    for setting in known:
        for key, words, label, cost in axes:
            yield _against(results, setting, key, words, label, cost)
    for key, words, *_ in axes if not known else ():
        commands = runs.commands(results, runs.QUARTER, ("one-run-dense", "one-run-taylor-70"), 1)
        yield Drawing(key, f"Test error against {words}", "", None, commands=commands)


def _against(
    results: Results, setting: Setting, key: str, words: str, label: str, cost: Callable[[Sequence[Line]], Cell]
) -> Drawing:
    rows = list[list[Cell]]()
    for recipe in setting.recipes:
        of = setting.of(results, recipe)
        error, spread = number("mean:test_error", of), number("spread:test_error", of)
        rows.append([recipe, runs.kind(recipe).label, cost(of), error, spread])
    figure, axes = _axes()
    limit = _limit([error.value for *_, error, _ in rows if isinstance(error, Number)])
    for kind in dict.fromkeys(str(row[1]) for row in rows):
        colour, marker = STYLES.get(kind, (SOFT, "."))
        points = [_values(row) for row in rows if row[1] == kind]
        inside = [it for it in points if it[1] <= limit]
        style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 6, "linestyle": "none"}
        across, up, spreads = zip(*inside, strict=True) if inside else ((), (), ())
        axes.errorbar(across, up, yerr=spreads if any(spreads) else None, label=kind, **style)
        for x, y, _ in points:
            if y > limit:  # a failed run would squeeze all others together
                axes.plot([x], [limit], clip_on=False, zorder=5, **{**style, "marker": "^"})
                note = axes.annotate(f"{y:.1f} %", (x, limit), (6, -3), "data", "offset points")
                note.set(color=colour, fontsize=FONT - 1, va="top")
    axes.set(xlabel=label, ylabel="test error, %")
    axes.set_xlim(left=0)
    low, _ = axes.get_ylim()
    axes.set_ylim(low, limit)
    _tidy(axes)
    _lay_out(figure, axes, 3.3)
    title = f"{setting.short_title}: test error against {words}"
    name = f"{key}-{setting.key}"
    grid = Grid(title, ("recipe", "description", label, "test %", "spread"), rows, name=f"{name}-numbers")
    caption = "Means over the seeds; bars are standard deviations. A triangle at the top is a run above the scale."
    if key == "seconds":
        caption += " The seconds include those of the network that a run started from."
    caption += _precisions([setting])
    return Drawing(name, title, _with_caveats(caption, results, [setting.experiment]), figure, grid)


def _values(row: Sequence[Cell]) -> tuple[float, float, float]:
    cost, error, spread = row[2:]
    assert isinstance(cost, Number)
    assert isinstance(error, Number)
    return cost.value, error.value, spread.value if isinstance(spread, Number) else 0.0


def _limit(errors: Sequence[float]) -> float:
    """The top of an axis that shows all errors but those of failed runs: above twice the lowest."""
    usual = [it for it in errors if it <= 2 * min(errors)]
    return max(usual) + 0.12 * (max(usual) - min(usual)) + 0.2


def _with_caveats(caption: str, results: Results, experiments: Sequence[str] | None = None) -> str:
    names = results.channel_experiments if experiments is None else experiments
    return " ".join([caption, *dict.fromkeys(filter(None, map(runs.caveat, names)))])


def _unknown(names: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name not in known]


def _style(place: int) -> dict[str, Any]:
    colours, markers = (BLUE, ORANGE, GREEN, PURPLE, AMBER, SKY), "os^vDP"
    shape = {"marker": markers[place % 6], "markersize": 5, "linewidth": 1.6, "capsize": 3}
    return {"color": colours[place % 6], "linestyle": "-" if place < 6 else "--", **shape}


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, 3))
    return figure, figure.add_subplot()


def _lay_out(figure: Figure, axes: Axes, height: float, columns: int = 1, left: float = 0.68) -> None:
    """Set the size: `height` inches for the axes and their labels, and below them as much as the legend needs.

    `left` are the inches for the labels of the vertical axis.

    Automatic layouts shrink the axes to make room for a legend, down to nothing if it is long.
    """
    lines, names = axes.get_legend_handles_labels()
    legend = ROW * ceil(len(names) / columns) + 0.1 if names else 0.0
    whole = height + legend
    figure.set_size_inches(WIDTH, whole)
    axes.set_position((left / WIDTH, (legend + 0.55) / whole, 1 - (left + 0.17) / WIDTH, (height - 0.7) / whole))
    if names:
        style: dict[str, Any] = {"frameon": False, "labelcolor": INK, "fontsize": FONT, "ncols": columns}
        space: dict[str, Any] = {"labelspacing": 0.3, "borderpad": 0, "borderaxespad": 0, "handlelength": 1.6}
        figure.legend(lines, names, loc="lower left", bbox_to_anchor=(0.02, 0.05 / whole), **style, **space)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelsize=FONT)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set(color=SOFT, fontsize=FONT)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
