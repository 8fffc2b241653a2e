"""The figures: what is drawn is what the table beside it says, in colours that the page sets."""

import re
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from keepk_paper.figures import report
from keepk_paper.report import runs
from keepk_paper.report.lines import read_folder
from keepk_paper.report.numbers import Number, Planned
from made_results import line, write

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture
def results(tmp_path):
    """A dense network, runs at 60 and 70 % with two seeds each, a rival that failed, and SVHN."""
    made = [line("vgg16-cifar10", "one-run-dense", seed) for seed in (1, 2)]
    for percent, kept in ((60, 422), (70, 316)):
        made += [line("vgg16-cifar10", f"one-run-taylor-{percent}", seed, kept=kept, rate=0.15) for seed in (1, 2)]
    made.append(line("vgg16-cifar10", "random-70", kept=316, rate=0.7))
    digits = [line("vgg16-svhn", "one-run-dense", total=4_224)]
    digits.append(line("vgg16-svhn", "one-run-blend-60", total=4_224, kept=1_689))
    return read_folder(write(tmp_path, {"vgg16-cifar10": made, "vgg16-svhn": digits}))


@pytest.fixture
def nothing(tmp_path):
    made = [line("vgg16-cifar10", "one-run-dense")]
    return read_folder(write(tmp_path / "nothing", {"vgg16-cifar10": made}))


def values(drawing, column):
    return [row[column].value for row in drawing.grid.rows if isinstance(row[column], Number | Planned)]


def shown(drawing):
    assert drawing.figure is not None
    return drawing.figure


def named(drawings, name):
    return next(it for it in drawings if it.name == name)


def test_the_plan_draws_its_numbers():
    drawing = report.annealing_plan()
    for column, curve in enumerate(shown(drawing).axes[0].lines, start=1):
        assert [*curve.get_ydata()][1:] == values(drawing, column)
    assert [round(it, 2) for it in values(drawing, 1)][:4] == [56.0, 41.33, 34.0, 29.6]


def test_the_ratio_of_macs_is_drawn_as_it_is_printed(results):
    drawing = report.macs_ratio(results)
    bars = shown(drawing).axes[0].containers[1]
    assert [it.get_width() for it in bars] == values(drawing, 2)
    # 422, 316 of 1,056 channels and 1,689 of 4,224 at equal cost
    assert values(drawing, 2) == pytest.approx([100 * 422 / 1_056, 100 * 316 / 1_056, 100 * 1_689 / 4_224])
    assert "SVHN, re-created, with 15,000 training pictures" in drawing.caption


def test_layers_are_drawn_at_seventy_percent(results):
    drawing = report.layers_left(results, "vgg16")
    assert [it.get_height() for it in shown(drawing).axes[0].containers[0]] == values(drawing, 1)[:-1]
    assert "one-run-taylor-70, 70 % removed" in drawing.caption
    assert drawing.commands == ()


def test_errors_by_rate_start_at_the_dense_network(results):
    drawing = named(report.by_rate(results), "rate-vgg16")
    line_of_points = shown(drawing).axes[0].lines[0]
    assert [*line_of_points.get_xdata()] == [0, 60, 70]
    assert [*line_of_points.get_ydata()] == values(drawing, 2)
    assert len(values(drawing, 3)) == 3  # spreads over two seeds


def test_a_failed_run_does_not_squeeze_the_others(results):
    drawing = named(report.against_costs(results), "macs-vgg16-cifar10")
    axes = shown(drawing).axes[0]
    assert axes.get_ylim()[1] < 40 < max(values(drawing, 3))
    assert [it.get_text() for it in axes.texts] == [f"{max(values(drawing, 3)):.1f} %"]
    inside = {value for curve in axes.lines if len(curve.get_ydata()) for value in curve.get_ydata()}
    assert {it for it in values(drawing, 3) if it < 40} <= inside


def test_svhn_says_what_it_rests_on_beside_every_figure(results):
    about = [it for it in report.drawings(results) if it.name.endswith("vgg16-svhn")]
    assert len(about) == 2
    assert all("SVHN, re-created, with 15,000 training pictures" in it.caption for it in about)


def test_seconds_include_the_network_that_a_run_started_from(tmp_path):
    made = [line("vgg16-cifar10", "dense"), line("vgg16-cifar10", "keepk-70", kept=316)]
    results = read_folder(write(tmp_path, {"vgg16-cifar10": made}))
    drawing = named(report.against_costs(results), "seconds-vgg16-cifar10")
    assert values(drawing, 2) == pytest.approx([0.051, 0.102])


AMP = {"device": "cpu", "amp": True}
KEYS = {f"varied-{key}": key for key in runs.VARIANTS}


def made_variants(without=(), seeds=(1, 2), **more):
    """Temporary lines of every value of every variation, with the dense networks."""
    names = dict.fromkeys(name for values in runs.VARIANTS.values() for value in values for name in value.recipes)
    made = [line("vgg16-cifar10", name, seed, **more) for name in ("one-run-dense", "control") for seed in seeds]
    return made + [
        line("vgg16-cifar10", name, seed, kept=316, rate=0.12 + place / 200, **more)
        for place, name in enumerate(names)
        for seed in seeds
        if name not in without
    ]


def read(folder, made):
    return read_folder(write(folder, {"vgg16-cifar10": made}))


def test_variations_are_drawn_as_soon_as_their_lines_exist(tmp_path):
    drawings = {it.name: it for it in report.variants(read(tmp_path, made_variants()))}
    assert drawings.keys() == KEYS.keys()
    for name, drawing in drawings.items():
        values_of = runs.VARIANTS[KEYS[name]]
        axes = shown(drawing).axes[0]
        assert [label.get_text() for label in axes.get_yticklabels()] == [it.label for it in values_of]
        drawn = [x for bars in axes.containers for x in bars[0].get_xdata()]
        assert drawn == values(drawing, 2)
        assert len(drawn) == sum(len(it.recipes) for it in values_of)
        assert all(bars.has_xerr for bars in axes.containers)  # two seeds each
        assert len(values(drawing, 3)) == len(drawn)
        assert "Not yet run" not in drawing.caption
        assert drawing.commands == ()
    grid = drawings["varied-schedules"].grid
    assert grid is not None
    schedules = [row[0] for row in grid.rows[:7]]
    assert schedules == [*(f"annealed, mu {mu}" for mu in (10, 0, 1, 100)), "cubic", "equal events", "one event"]


def test_a_variation_with_one_seed_has_no_error_bars(tmp_path):
    for drawing in report.variants(read(tmp_path, made_variants(seeds=(1,)))):
        assert not any(bars.has_xerr for bars in shown(drawing).axes[0].containers)


def test_a_variation_says_which_of_its_runs_are_missing(tmp_path):
    lacking = ("trained-taylor-mu100-70", "trained-blend-once-70", "alpha-0-sums-70", "trained-taylor-layers-70")
    drawings = {it.name: it for it in report.variants(read(tmp_path, made_variants(lacking, **AMP)))}
    assert "Not yet run: trained-blend-once-70, trained-taylor-mu100-70." in drawings["varied-schedules"].caption
    assert "Not yet run: alpha-0-sums-70." in drawings["varied-alpha"].caption
    assert "Not yet run: trained-taylor-layers-70." in drawings["varied-spaces"].caption
    assert "Not yet run" not in drawings["varied-start"].caption
    assert drawings["varied-alpha"].commands == (
        "keepk paper run vgg16-cifar10 --recipe alpha-0-sums-70 --seeds 1 --amp",
    )
    assert all("Trained in bfloat16 mixed precision." in it.caption for it in drawings.values())


def test_one_value_of_a_variation_is_no_comparison(tmp_path):
    made = [line("vgg16-cifar10", f"trained-{metric}-70", kept=316) for metric in ("blend", "taylor")]
    drawing = named(report.variants(read(tmp_path, made)), "varied-spaces")
    assert drawing.figure is None
    assert [it.split()[5] for it in drawing.commands] == ["trained-blend-layers-70", "trained-taylor-layers-70"]


def test_the_parity_figure_leaves_out_the_width_that_annealing_starts_from():
    drawing = report.parity(read_folder(RESULTS))
    low, high = shown(drawing).axes[0].get_xlim()
    assert (low, high) == (0.5, 16.5)
    assert {curve.get_label() for curve in shown(drawing).axes[0].lines} >= {"256 nodes annealed", "keepk, Pruner"}


def test_a_variation_shows_the_precision_with_most_of_its_values(tmp_path):
    old = [line("vgg16-cifar10", name, kept=316) for name in ("blend-70", "keepk-70")]
    drawing = named(report.variants(read(tmp_path, [*old, *made_variants(**AMP)])), "varied-alpha")
    assert len(values(drawing, 2)) == 5
    grid = drawing.grid
    assert grid is not None
    assert {it.training.amp for row in grid.rows if isinstance(row[2], Number) for it in row[2].of} == {True}
    alone = named(report.variants(read(tmp_path / "old", old)), "varied-alpha")
    assert len(values(alone, 2)) == 2
    assert "Trained in" not in alone.caption


def test_a_curve_names_the_rates_that_are_missing_and_mixed_precisions(tmp_path):
    def curve(percents, metric, **more):
        return [
            line("vgg16-cifar10", f"trained-{metric}-{percent}", seed, kept=1_056 * (100 - percent) // 100, **more)
            for percent in percents
            for seed in (1, 2)
        ]

    part = named(report.by_rate(read(tmp_path / "a", curve((30, 50, 70), "taylor"))), "rate-vgg16")
    assert "Not yet run: 10 %." in part.caption
    assert part.commands == ("keepk paper run vgg16-cifar10 --recipe trained-taylor-10 --seeds 1",)
    made = [*curve((10, 30, 50, 70), "taylor", **AMP), *curve((10, 30, 50, 70), "blend")]
    both = named(report.by_rate(read(tmp_path / "b", made)), "rate-vgg16")
    assert "Not yet run" not in both.caption
    assert both.commands == ()
    assert "Precisions are mixed: float32, bfloat16 mixed precision" in both.caption
    labels = [str(row[0]) for row in both.grid.rows]
    assert {"trained-taylor, VGG-16, width 1/4, CIFAR-10, bfloat16", "trained-blend, VGG-16, width 1/4, CIFAR-10"} == {
        *labels
    }
    assert len(values(both, 3)) == 8  # a spread over two seeds at every point


def test_figures_without_results_name_their_commands_and_are_not_drawn(nothing):
    drawings = report.drawings(nothing)
    missing = {it.name: it.commands for it in drawings if it.figure is None}
    assert {"parity-figure", "macs-ratio", "layers-vgg16", "rate-vgg16", "macs", "seconds", *KEYS} <= missing.keys()
    assert "keepk paper run vgg16-cifar10 --recipe trained-blend-cubic-70 --seeds 1" in missing["varied-schedules"]
    assert missing["parity-figure"] == ("keepk paper run parity",)
    assert missing["macs-ratio"] == (
        "keepk paper run vgg16-cifar10 --recipe one-run-dense --seeds 1",
        "keepk paper run vgg16-cifar10 --recipe one-run-taylor-70 --seeds 1",
    )


def test_colours_are_the_pages_and_ids_are_the_figures(results):
    drawing = report.layers_left(results, "vgg16")
    text = report.svg(shown(drawing), "one", 'a "title" & more')
    assert text.startswith('<svg role="img" aria-label="a &quot;title&quot; &amp; more"')
    assert "var(--blue)" in text
    assert not re.search(r"#[0-9a-f]{6}\b", text)  # no colour that a dark page could not change
    assert all(it.startswith("one-") for it in re.findall(r'\bid="([^"]*)"', text))
    assert all(it.startswith("one-") for it in re.findall(r'(?:href="#|url\(#)([^")]*)', text))
    assert "<metadata" not in text
    assert report.svg(shown(drawing), "one", 'a "title" & more') == text


def test_the_style_sheet_sets_every_colour_twice():
    from importlib.resources import files

    style = files("keepk_paper.report").joinpath("page.css").read_text()
    for word in report.PALETTE.values():
        assert len(re.findall(rf"--{word}:", style)) == 2
    assert {to_hex(colour) for colour, _ in report.STYLES.values()} <= {to_hex(it) for it in report.PALETTE}
