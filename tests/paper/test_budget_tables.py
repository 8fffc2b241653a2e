"""The tables and figures of pruning to a budget: made-up results with numbers computed by hand."""

import json

import numpy as np
import pytest

from keepk.errors import DataError
from keepk_paper.figures.budgets import crepe_figure
from keepk_paper.tables import budgets


def line(network, macs_asked, accuracy, *, seed=1, macs=50, ratio=2.0):
    return {
        **{"network": network, "macs_asked": macs_asked, "seed": seed, "accuracy": accuracy, "macs": macs},
        **{"parameters": 1_000 * macs, "times_as_fast": [ratio, 1.0, 3.0], "file_bytes": 40_000 * macs},
    }


LINES = [
    line("dense", None, 97.0, macs=100, ratio=1.0),
    line("tiny", None, 94.0, macs=4, ratio=9.0),
    line("random", 0.1, 20.0, macs=9),
    line("random", 0.1, 30.0, macs=10, seed=2),
    line("one-shot", 0.5, 88.0),
    line("random", 0.5, 80.0, macs=49),
    line("one-shot", 0.1, 60.0, macs=10, ratio=7.0),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "crepe.jsonl").write_text("".join(json.dumps(it) + "\n" for it in LINES))
    return tmp_path


def test_crepes_rows_are_means_over_seeds_by_falling_budget(folder):
    table = budgets.crepe(folder)
    assert table.rows == (
        ("dense", "1.0000", "100,000", "97.0", "1.0", "4.00", "1"),
        ("tiny", "0.0400", "4,000", "94.0", "9.0", "0.16", "1"),
        ("one-shot", "0.5000", "50,000", "88.0", "2.0", "2.00", "1"),
        ("random", "0.4900", "49,000", "80.0", "2.0", "1.96", "1"),
        ("random", "0.0950", "9,500", "25.0 (20.0 to 30.0)", "2.0", "0.38", "2"),
        ("one-shot", "0.1000", "10,000", "60.0", "7.0", "0.40", "1"),
    )
    assert len(table.columns) == len(table.rows[0])


def test_crepes_figure_has_the_means():
    (axes,) = crepe_figure(LINES).axes
    drawn = {str(it.get_label()): np.array(it.get_xydata()).tolist() for it in axes.get_lines()}
    assert drawn["one-shot"] == [[0.1, 60.0], [0.5, 88.0]]
    assert drawn["random"] == [[0.095, 25.0], [0.49, 80.0]]
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


def test_missing_results_name_the_command(tmp_path):
    with pytest.raises(DataError, match=r"Run python benchmarks/default_metric.py"):
        budgets.default_metric(tmp_path)
    with pytest.raises(DataError, match=r"crepe.jsonl: no such result"):
        budgets.crepe(tmp_path)
