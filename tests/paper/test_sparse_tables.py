"""The tables and the figure of keepk.sparse: made-up results with numbers computed by hand."""

import json

import numpy as np
import pytest

from keepk.errors import DataError
from keepk_paper.figures.sparse import points, sparse_figure
from keepk_paper.tables import sparse


def times(**us):
    return {name.replace("_at_", " "): [value, value - 1, value + 1] for name, value in us.items()}


LAYERS = {
    "limit": 50.0,
    "cells": [
        {
            **{"layer": "conv", "batch": 16, "weights": 1000, "kept": {"50": 500, "90": 100}, "pixels": 100},
            "us": times(torch=100.0, torch_channels_last=80.0, ort=40.0, keepk_at_50=50.0, keepk_at_90=20.0)
            | times(mnn_sparse_at_90=60.0),
        }
    ],
}


def cell(network, batch, ours, *, left=100_000, in_torch=0, **us):
    about = {"network": network, "batch": batch, "macs": {"left": left, "dense": 1_000_000}, "in_torch": in_torch}
    return {**about, "us": times(keepk=ours, **us)}


NETWORKS = [
    cell("vgg-weights-5", 16, 200.0, torch=900.0, ort=800.0, mnn=400.0, mnn_sparse=300.0),
    cell("vgg-weights-5", 1, 20.0, torch=300.0, ort=100.0),
    cell("vgg-dense", 1, 280.0, in_torch=9, torch=280.0, ort=120.0, ort_int8=50.0),
    cell("vgg-weights-10", 1, 40.0, torch=300.0, ort=100.0),
]
ERRORS = {"vgg-weights-5": 12.345, "vgg-weights-10": 12.0, "vgg-dense": 11.0}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "sparse").mkdir()
    (tmp_path / "benchmarks" / "sparse_layers.json").write_text(json.dumps(LAYERS))
    report = {"limit": 40.0, "cells": NETWORKS}
    (tmp_path / "benchmarks" / "sparse_networks.json").write_text(json.dumps(report))
    required = {"experiment": "sparse-models", "seed": 1, "asked": 1, "kept": 1, "total": 2, "val_error": 1.0}
    required |= {"dense_test_error": 1.0, "seconds": 1.0, "versions": {}}
    lines = [{**required, "recipe": name, "test_error": error} for name, error in ERRORS.items()]
    (tmp_path / "sparse" / "models.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_layers_are_compared_with_the_faster_memory_format(folder):
    table = sparse.layers(folder / "benchmarks")
    assert table.rows == (("conv", "16", "80", "2.00", "", "", "", "1.60", "4.00"),)
    assert table.columns[-2:] == ("keepk 50 %", "keepk 90 %")
    assert len(table.columns) == len(table.rows[0])


def test_layers_beside_other_engines_for_zeros(folder):
    table = sparse.sparse_layers(folder / "benchmarks")
    # 100 weights, 100 pixels, 16 samples in 20 us: 8 MACs in a nanosecond, of 50
    assert table.rows == (("conv", "16", "90 %", "20.0", "19.0 to 21.0", "3.0", "", "8", "16 %"),)
    assert len(table.columns) == len(table.rows[0])


def test_networks_by_kind_then_batch(folder):
    table = sparse.networks(folder)
    assert [row[0].partition(", ")[2] for row in table.rows] == ["dense", "10 % of weights", *["5 % of weights"] * 2]
    first, last = table.rows[0], table.rows[-1]
    assert first == (
        *("VGG-16/4, dense", "11.00", "1", "", "280", "120", "50", "", "", "", "280 (279 to 281)"),
        *("0.4", "", ""),
    )
    assert last == (
        *("VGG-16/4, 5 % of weights", "12.35", "16", "10.0 %", "900", "800", "", "", "400", "300"),
        *("200 (199 to 201)", "4.0", "1.5", "20 %"),
    )
    assert len(table.columns) == len(last)


def test_the_figure_has_the_fastest_float32_engine_and_keepk():
    found = points(NETWORKS, ERRORS, 1)
    assert found == {
        "dense": [(0.12, 11.0)],
        "channels pruned": [],
        "weights pruned": [(0.02, 12.345), (0.04, 12.0)],
        "both": [],
    }
    (axes,) = sparse_figure(NETWORKS, ERRORS, batches=(1,)).axes
    drawn = {str(it.get_label()): np.array(it.get_xydata()).tolist() for it in axes.get_lines()}
    assert drawn == {"dense": [[0.12, 11.0]], "weights pruned": [[0.02, 12.345], [0.04, 12.0]]}


def test_missing_results_are_named(tmp_path):
    with pytest.raises(DataError, match=r"sparse_layers\.json: no such result. Run python benchmarks/sparse_speed\.py"):
        sparse.layers(tmp_path)
