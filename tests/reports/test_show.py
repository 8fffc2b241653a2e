"""Tables, terminal plots and figures agree with the report."""

import io
from itertools import accumulate, combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text
from rich.console import Console

from keepk.reports.tables import (
    EpochRecord,
    LayerCount,
    PlanReport,
    Table,
    layer_counts,
    layer_table,
    plan_report,
    plan_table,
    whole,
)
from keepk.reports.terminal import PlanPlot
from keepk_paper.figures.demo import demo_figure
from keepk_paper.figures.panels import BLUE, ORANGE
from untyped import untyped

falls = st.lists(st.one_of(st.just(0), st.integers(0, 10**7)), min_size=1, max_size=300)


@st.composite
def reports(draw):
    """A non-increasing plan with K at least 1, built from its decreases."""
    pruned = draw(falls)
    total = sum(pruned) + draw(st.integers(1, 10**7))
    return PlanReport(total, tuple(total - gone for gone in accumulate(pruned)))


LAYERS = [LayerCount("fc1", 19_500, 433), LayerCount("fc2", 30_100, 324), LayerCount("fc3", 1_010, 243)]


def rendered(thing, *, encoding="utf-8", width=80):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=stream, width=width, color_system=None).print(thing)
    stream.seek(0)
    return stream.read()


@given(reports())
def test_spans_unfold_to_the_plan(report):
    unfolded = [span.kept for span in report.spans for _ in range(span.first, span.last + 1)]
    assert tuple(unfolded) == report.counts
    assert [span.first for span in report.spans] == [1, *(span.last + 1 for span in report.spans[:-1])]
    assert sum(span.pruned for span in report.spans) == report.total - report.keep
    assert all(span.pruned > 0 for span in report.spans[1:])


def test_plan_report_refuses_what_the_pruner_refuses():
    with pytest.raises(ValueError, match=r"space 'plan': prune=0\.99 of 10 weights keeps none"):
        plan_report([1], 10, prune=0.99)
    with pytest.raises(ValueError, match=r"plan: total=10\.0: got float\. Pass an int of at least 1\."):
        plan_report([1], untyped(10.0), keep=1)


@given(reports(), st.integers(40, 80), st.integers(1, 12), st.booleans())
def test_a_plot_is_never_wider_than_asked(report, width, height, unicode):
    lines = PlanPlot(report, height).lines(width, unicode=unicode)
    assert max(map(len, lines)) <= width
    assert len(lines) == height + 2
    assert unicode or "".join(lines).isascii()
    assert f"{report.total:,} " in lines[0]
    assert sum(line.endswith(f" {report.keep:,}") for line in lines) >= 1


@given(reports())
def test_columns_fall_as_the_plan_falls(report):
    """The columns never get taller to the right; the first is full and the last is not empty."""
    bars = [line.split("┤")[1] for line in PlanPlot(report).lines(80, unicode=True) if "┤" in line]
    blocks = " ▁▂▃▄▅▆▇█"
    drawn = [[blocks.index(cell) if cell in blocks else 0 for cell in bar] for bar in bars]
    columns = max(len(bar.rstrip("0123456789, ")) for bar in bars)
    heights = [sum(row[column] for row in drawn if column < len(row)) for column in range(columns)]
    assert heights[0] == 80
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] == max(1, 80 * report.keep // report.total)


def test_a_plot_in_eighths_of_a_cell():
    assert PlanPlot(PlanReport(800, (450, 100)), height=2).lines(80, unicode=True) == [
        "800 ┤██████▁▁▁▁▁▁",
        "    ┤████████████▂▂▂▂▂▂ 100",
        "  0 └──────────────────",
        "     0     1     2      epoch",
    ]


def test_a_plan_of_more_epochs_than_columns_still_shows_its_end():
    lines = PlanPlot(PlanReport(80, (80,) * 499 + (8,))).lines(80, unicode=True)
    row = lines[-3].removeprefix("   ┤")
    assert lines[0].endswith("█")
    assert lines[-3].endswith("█ 8")
    assert len(lines[0].removeprefix("80 ┤")) + 1 == len(row.removesuffix(" 8"))
    assert lines[-1].split() == ["0", "50", "100", "150", "200", "250", "300", "350", "400", "450", "500", "epoch"]


def test_a_console_without_unicode_gets_ascii():
    plot = PlanPlot(PlanReport(800, (450, 100)))
    assert rendered(plot, encoding="ascii").splitlines() == str(plot).splitlines()
    assert "█" in rendered(plot)
    assert rendered(plan_table(plot.report), encoding="ascii").isascii()


def test_plain_and_rich_tables_hold_the_same_words():
    table = layer_table(LAYERS, title="LeNet", total=whole(LAYERS))
    words = ["fc1", "19,500", "433", "2.22%", "fc3", "1,010", "243", "24.06%", "total", "50,610", "1,000", "1.98%"]
    for text in (str(table), rendered(table)):
        assert "LeNet" in text.splitlines()[0]
        assert [word for word in words if word not in text.split()] == []


def test_a_notebook_gets_every_word_escaped():
    table = Table(("layer", "<kept>"), (("a & b", "7"), ("<i>", "12")), title="<b>", total_row=True)
    html = table._repr_html_()
    assert html.startswith("<table><caption>&lt;b&gt;</caption><thead><tr>")
    assert [word for word in ("&lt;kept&gt;", "a &amp; b", "&lt;i&gt;", ">7<", ">12<") if word not in html] == []
    assert html.endswith("</tfoot></table>")
    assert "<tfoot>" not in Table(("a",), (("b",),))._repr_html_()
    assert "<tbody></tbody>" in Table(("a",), ())._repr_html_()


def test_words_with_brackets_are_no_markup():
    table = Table(("layer[0]",), (("[red]fc1[/red]",),))
    assert "[red]fc1[/red]" in rendered(table)
    assert "layer[0]" in rendered(table)


@given(st.dictionaries(st.sampled_from("ab"), st.lists(st.booleans(), min_size=1), min_size=1), st.lists(st.booleans()))
def test_layers_are_counted_by_the_name_before_the_last_dot(weights, bias):
    masks = {f"block.{name}.weight": torch.tensor(kept) for name, kept in weights.items()}
    masks |= {f"block.{name}.bias": torch.tensor(bias, dtype=torch.bool) for name in weights}
    masks["scale"] = torch.tensor([True, False])
    oracle = [
        LayerCount(f"block.{name}", len(kept) + len(bias), sum(kept) + sum(bias)) for name, kept in weights.items()
    ]
    assert layer_counts(masks) == [*oracle, LayerCount("scale", 2, 1)]


CONVOLUTIONS = [LayerCount("conv1", 64, 7), LayerCount("conv2", 128, 9), LayerCount("conv3", 128, 16)]
SHOWN = [*CONVOLUTIONS, whole(CONVOLUTIONS, "all channels"), LayerCount("head weights", 33_482, 500)]
RUN = [
    *(EpochRecord("dense", 320, 60.0 + 4 * epoch) for epoch in range(10)),
    *(EpochRecord("anneal", kept, 90.0) for kept in range(300, 31, -12)),
    *(EpochRecord("fine-tune", 32, 99.0) for _ in range(9)),
]
ERRORS = {"keepk": [35.0, 15.0, 10.1], "adam": [52.0, 50.0, 10.1]}
POINTS = [
    {
        "recipe": recipe,
        "asked": nodes,
        "total": 256 if recipe == "keepk" else nodes,
        "test_error": error,
        "test_errors": (error, 50.0, 49.0),
        "noise_floor": 10.06,
    }
    for recipe, errors in ERRORS.items()
    for nodes, error in enumerate(errors, start=1)
]


def drawn(title="2.5 % -> 2.75 %", subtitle="1,031 kB -> 35 kB"):
    return demo_figure(RUN, SHOWN, POINTS, total=320, title=title, subtitle=subtitle)


def test_the_figure_shows_the_run():
    accuracy, kept, *_ = drawn().axes
    epochs = len(RUN)
    assert list(accuracy.lines[0].get_xdata()) == list(range(1, epochs + 1))
    assert list(accuracy.lines[0].get_ydata()) == [epoch.accuracy for epoch in RUN]
    assert accuracy.lines[0].get_color() == ORANGE
    assert list(kept.lines[0].get_xdata()) == list(range(epochs + 1))
    assert list(kept.lines[0].get_ydata()) == [320, *(epoch.kept for epoch in RUN)]
    assert kept.lines[0].get_drawstyle() == "steps-post"
    assert {text.get_text() for text in kept.texts} == {"320", "exactly 32"}
    assert [(text.get_text(), text.get_position()[0]) for text in accuracy.texts] == [
        ("dense", 5.0),
        ("anneal", 21.5),
        ("fine-tune", epochs - 4.5),
    ]


def test_the_figure_shows_what_is_kept_by_layer():
    layers = drawn().axes[2]
    shares = [bar.get_width() for bar in layers.patches if to_hex(bar.get_facecolor()).upper() == BLUE]
    assert shares == pytest.approx([100 * it.kept / it.total for it in SHOWN])
    words = {text.get_text() for text in layers.texts}
    assert {"conv3", "16 of 128", "12.5 %", "all channels", "32 of 320", "10.0 %", "500 of 33,482", "1.5 %"} <= words


def test_the_figure_shows_the_parity_errors_and_the_floor():
    axes = drawn().axes[3]
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["annealed from 256 nodes"] == ERRORS["keepk"]
    assert lines["this few from the start"] == ERRORS["adam"]
    assert [10.06, 10.06] in lines.values()
    assert [text.get_text() for text in axes.texts] == ["noise floor 10.1 %"]
    assert axes.get_xlabel() == "hidden nodes (the best of 3 starts)"


def words_in_sight(figure):
    """All visible text; matplotlib also has labels of ticks beyond the ends of an axis."""
    all_axes = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
    ticks = [(tick, sorted(axis.get_view_interval())) for axis in all_axes for tick in axis.get_major_ticks()]
    beyond = {tick.label1 for tick, (low, high) in ticks if not low <= tick.get_loc() <= high}
    off = {text for axes in figure.axes if not axes.axison for text in axes.findobj(Text)}
    off -= {text for axes in figure.axes for text in axes.texts}
    return [it for it in figure.findobj(Text) if it.get_visible() and it.get_text().strip() and it not in beyond | off]


def test_no_words_of_the_figure_touch_each_other_or_the_edge():
    figure = drawn("32 of 320 channels, 109x fewer MACs, test error 0.50 % -> 1.00 %")
    FigureCanvasAgg(figure).draw()
    boxes = [(it.get_text(), it.get_window_extent()) for it in words_in_sight(figure)]
    assert len(boxes) > 40
    assert [(one, other) for (one, box), (other, its) in combinations(boxes, 2) if box.overlaps(its)] == []
    width, height = figure.bbox.size
    assert [name for name, it in boxes if it.x0 < 0 or it.y0 < 0 or it.x1 > width or it.y1 > height] == []


def test_arrows_are_drawn_as_arrows():
    assert {"2.5 % → 2.75 %", "1,031 kB → 35 kB"} <= {text.get_text() for text in drawn().texts}


def test_drawing_leaves_no_figure_open():
    from matplotlib import pyplot

    drawn()
    assert pyplot.get_fignums() == []
