"""The tables and figures of pruning to a budget: made-up results with numbers computed by hand."""

import json

import numpy as np
import pytest

from keepk.errors import DataError
from keepk_paper.figures.budgets import CREPE, budget_figure
from keepk_paper.tables import budgets


def line(recipe, asked, accuracy, *, seed=0, kept=None, **more):
    kept = asked if kept is None else kept
    return {
        **{"experiment": "crepe", "recipe": recipe, "seed": seed, "asked": asked, "kept": kept, "total": 100},
        **{"test_error": 100 - accuracy, "val_error": 1.0, "dense_test_error": 3.0, "seconds": 1.0, "versions": {}},
        **{"parameters": 1_000 * kept, "file_bytes": 40_000 * kept},
        **more,
    }


def speed(ms, ratio):
    return {"ms": ms, "times_as_fast": [ratio, 1.0, 3.0], "batch": 32}


LINES = [
    line("dense", 100, 97.0, **speed(30.0, 1.0)),
    line("tiny, trained", 4, 97.0),
    line("tiny", 4, 94.0, **speed(3.0, 9.0)),
    line("dense, trained", 100, 98.0),
    line("one-shot, random", 10, 20.0, kept=9, seed=1, **speed(4.0, 7.0)),
    line("one-shot, random", 10, 30.0, seed=2, **speed(5.0, 6.0)),
    line("one-shot", 50, 88.0),
    line("one-shot, random", 50, 80.0, kept=49),
    line("one-shot", 10, 60.0),
    line("annealed", 10, 90.0, kept=8, device="cpu", amp=True),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "crepe.jsonl").write_text("".join(json.dumps(it) + "\n" for it in LINES))
    return tmp_path


def test_crepes_rows_are_means_over_seeds_by_falling_budget(folder):
    table = budgets.crepe(folder)
    assert table.rows == (
        ("dense", "1", "100,000", "97.0", "30.00", "1.0", "4.0", "1"),
        ("dense, trained", "1", "100,000", "98.0", "-", "-", "4.0", "1"),
        ("one-shot", "0.500", "50,000", "88.0", "-", "-", "2.0", "1"),
        ("one-shot, random", "0.490", "49,000", "80.0", "-", "-", "2.0", "1"),
        ("annealed", "0.080", "8,000", "90.0", "-", "-", "0.3", "1"),
        ("one-shot", "0.100", "10,000", "60.0", "-", "-", "0.4", "1"),
        ("one-shot, random", "0.095", "9,500", "25.0 (20.0 to 30.0)", "4.50", "6.5", "0.4", "2"),
        ("tiny", "0.040", "4,000", "94.0", "3.00", "9.0", "0.2", "1"),
        ("tiny, trained", "0.040", "4,000", "97.0", "-", "-", "0.2", "1"),
    )
    assert len(table.columns) == len(table.rows[0])


def test_minilms_rows_have_sizes_agreement_and_speed(tmp_path):
    more = {"spearman": 0.91236, "top1": 80.0, "top10": 70.0, "heads": [3, 2], "mlps": [700, 500]}
    made = line("annealed", 50, 70.0, **more, **speed(16.0, 1.9))
    (tmp_path / "minilm.jsonl").write_text(json.dumps(made) + "\n")
    table = budgets.minilm(tmp_path)
    figures = ("0.912", "80.0", "70.0", "2000", "1.9", "2.0")
    assert table.rows == (("annealed", "0.500", "50,000", "5", "1,200", *figures),)
    assert len(table.columns) == len(table.rows[0])


def test_the_readmes_rows_are_of_the_annealed_networks_that_there_are(folder):
    title = "CREPE, pretrained, bfloat16 mixed precision"
    assert budgets.pretrained_rows(folder) == [
        (title, "0.0 of 0.0 M MACs", "10.00", "2.00", "1", "1/12.5", "1/12.5"),
    ]
    published = [it for it in LINES if it["recipe"] != "dense, trained"]
    (folder / "crepe.jsonl").write_text("".join(json.dumps(it) + "\n" for it in published))
    assert [row[2:4] for row in budgets.pretrained_rows(folder)] == [("10.00", "3.00 (published)")]
    assert budgets.pretrained_rows(folder / "none") == []


def test_crepes_figure_has_the_means():
    (axes,) = budget_figure(LINES, CREPE).axes
    drawn = {str(it.get_label()): np.array(it.get_xydata()).tolist() for it in axes.get_lines()}
    assert drawn["one-shot"] == [[0.1, 60.0], [0.5, 88.0]]
    assert drawn["one-shot, random"] == [[0.095, 25.0], [0.49, 80.0]]
    assert [[1.0, 97.0]] in drawn.values()
    assert [[0.04, 94.0]] in drawn.values()


def metric_line(metric, seed, share, floor, **errors):
    return {"network": "digits", "seed": seed, "metric": metric, "share": share, "floor": floor, **errors}


def test_metrics_are_compared_by_mean_errors(tmp_path):
    lines = [
        {"network": "digits", "seed": 1, "metric": "dense", "error": 1.0},
        {"network": "digits", "seed": 2, "metric": "dense", "error": 2.0},
        metric_line("product", 1, 0.5, 1, error_cut=90, error_recalibrated=30),
        metric_line("product", 1, 0.5, 0.1, error_cut=50, error_recalibrated=10),
        metric_line("product", 2, 0.5, 0.1, error_cut=60, error_recalibrated=14),
        metric_line("product", 1, 0.25, 0.1, error_cut=80, error_recalibrated=40, error_tuned=3),
        metric_line("product", 2, 0.25, 0.1, error_cut=70, error_recalibrated=50, error_tuned=4),
    ]
    (tmp_path / "default_metric.json").write_text(json.dumps({"lines": lines}))
    table = budgets.default_metric(tmp_path)
    assert table.rows == (
        ("digits, dense: 1.50 %", "", "", "", "", "", "", "", ""),
        ("product", "55.0", "12.0", "30.0", "75.0", "45.0", "", "3.5", "2"),
    )
    assert len(table.columns) == len(table.rows[1])


def test_a_fits_curve_says_which_model_was_chosen(tmp_path):
    def point(macs, median):
        quartiles = {"lower": median - 0.5, "median": median, "upper": median + 0.5}
        return {"macs": macs, "kept": {"a": macs, "b": 2}, "ms": quartiles, "dense_ms": {"median": 4.0}}

    report = {
        "curve": [point(100, 4.0), point(60, 2.25), point(50, 2.0), point(25, 1.0)],
        "macs": 50,
        "latency_ms": 2.0,
    }
    report["confirmed"] = {"lower": 1.5, "median": 1.75, "upper": 2.0}
    (tmp_path / "fit.json").write_text(json.dumps(report))
    rows = budgets.fit(tmp_path).rows
    assert rows[2] == ("50", "0.5000", "52", "2.00", "1.50 to 2.50", "4.00", "chosen")
    assert [row[-1] for row in rows] == ["no", "no", "chosen", "yes", ""]
    assert rows[-1] == ("chosen, in a fresh process", "", "", "1.75", "1.50 to 2.00", "", "")


def test_rounded_widths_are_compared_where_they_were_measured(tmp_path):
    def row(runtime, batch, median, ratio):
        ratios = {"lower": ratio - 0.1, "median": ratio, "upper": ratio + 0.1}
        return {"runtime": runtime, "batch": batch, "model": {"median": median}, "ratio": ratios}

    line = {"network": "resnet50", "variant": "keepk", "dense_macs": 100, "macs": 49}
    times = [row("torch", 1, 20.0, 1.5), row("torch", 32, 99.0, 9.0), row("onnxruntime", 1, 10.0, 1.75)]
    lines = [{**line, "latency": times}, {**line, "variant": "Torch-Pruning"}]
    lines.append({"network": "vit_tiny", "variant": "Torch-Pruning", "dense_macs": 100, "failed": "KeyError: 3"})
    (tmp_path / "round_to_auto.json").write_text(json.dumps({"lines": lines}))
    assert budgets.round_to_auto(tmp_path).rows == (
        ("ResNet-50, keepk", "0.490", "20.0", "1.50 (1.40 to 1.60)", "10.0", "1.75 (1.65 to 1.85)"),
        ("ResNet-50, Torch-Pruning", "0.490", "-", "-", "-", "-"),
        ("ViT-tiny, Torch-Pruning", "failed: KeyError", "", "", "", ""),
    )


def test_missing_results_name_the_command(tmp_path):
    with pytest.raises(DataError, match=r"Run python benchmarks/default_metric.py"):
        budgets.default_metric(tmp_path)
    with pytest.raises(DataError, match=r"crepe.jsonl: no such result"):
        budgets.crepe(tmp_path)
