"""The demo keeps exactly what it was asked for, says so, and gives the same numbers again."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

import keepk
from keepk.cli.commands import app
from keepk.paper import digits
from keepk.paper.results import REQUIRED

TINY = digits.Recipe(keep=777, dense_epochs=2, fine_tune_epochs=1, schedule=keepk.Annealing(p0=0.9, n1=1, nu=0.05))


@pytest.fixture(scope="module")
def report():
    return digits.run(3, recipe=TINY)


def test_exactly_k_weights_are_kept(report):
    assert (report.asked, report.kept, report.total) == (777, 777, 50_610)
    assert [(layer.name, layer.total) for layer in report.layers] == [("fc1", 19_500), ("fc2", 30_100), ("fc3", 1_010)]
    assert sum(layer.kept for layer in report.layers) == 777


def test_the_history_follows_the_plan(report):
    plan = TINY.schedule(50_610, 777, None)
    assert [epoch.kept for epoch in report.history] == [50_610, 50_610, *plan, 777]
    assert [epoch.phase for epoch in report.history] == ["dense"] * 2 + ["anneal"] * len(plan) + ["fine-tune"]
    assert digits.epochs_of(TINY) == len(report.history)


def test_errors_are_those_of_the_parts(report):
    assert report.val_error == pytest.approx(100 - report.history[-1].accuracy, abs=1e-4)
    for error in (report.dense_test_error, report.test_error):
        assert (error * 4).is_integer()  # 400 pictures
        assert 0 <= error < 60  # it has learnt something: guessing is 90


def test_the_same_seed_gives_the_same_numbers(report):
    again, other = digits.run(3, recipe=TINY), digits.run(4, recipe=TINY)
    assert replace(again, seconds=0) == replace(report, seconds=0)
    assert again.history != other.history


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_the_callers_random_numbers_and_threads_are_left_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    digits.run(0, recipe=replace(TINY, dense_epochs=0, fine_tune_epochs=0))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 3


def test_the_parts_are_disjoint_and_do_not_move():
    data = digits.load_digits()
    assert [len(part.labels) for part in (data.train, data.validation, data.test)] == [1097, 300, 400]
    assert data.train.images.shape == (1097, 64)
    assert (data.train.images.min(), data.train.images.max()) == (0, 1)
    again = digits.load_digits()
    assert torch.equal(data.test.images, again.test.images)
    assert sorted(
        torch.cat([p.labels for p in (data.train, data.validation, data.test)]).bincount().tolist()
    ) == sorted([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])


def test_the_command_trains_prints_and_saves(tmp_path):
    out = tmp_path / "new" / "folder"
    arguments = ["demo", "--out", str(out), "--dense-epochs", "1", "--fine-tune-epochs", "0"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    picture, numbers = out / "keepk-demo.png", out / "keepk-demo.json"
    assert f"Picture: {picture}" in result.output
    assert f"Numbers: {numbers}" in result.output
    assert imread(picture).shape == (704, 1600, 4)
    written = json.loads(numbers.read_text())
    assert [key for key in REQUIRED if key not in written] == []
    assert written["asked"] == written["kept"] == digits.Recipe().keep == sum(it["kept"] for it in written["layers"])
    rows = [line.split() for line in result.output.splitlines()]
    errors = [f"{written[key]:.2f}%" for key in ("dense_test_error", "test_error")]
    assert ["1,000", "1,000", *errors] in rows
    assert ["total", "50,610", "1,000", "1.98%"] in rows


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_a_missing_package_is_named_before_anything_is_done(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert f'keepk demo: {package} is not installed. Run: pip install "keepk[demo]"' in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(tmp_path):
    (tmp_path / "taken").write_text("a file")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "taken")])
    assert result.exit_code == 1
    assert "keepk demo: cannot make the folder" in result.stderr
    assert result.stdout == ""
