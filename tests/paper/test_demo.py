"""The demo keeps exactly the requested numbers, reports them, and is reproducible."""

import inspect
import json
import sys
from dataclasses import replace

import pytest
import torch
from matplotlib.image import imread
from torch import nn
from typer.testing import CliRunner

import keepk
from keepk.cli import commands
from keepk.errors import DataError, FileError, PlanError
from keepk_paper import cli, demo, demo_parity, digits, parity
from keepk_paper.demo_parity import ANNEALED, FROM_THE_START, Setting, parity_points
from keepk_paper.parity_training import draw
from keepk_paper.results import REQUIRED

pytestmark = pytest.mark.xdist_group("test_demo")  # run the fixture in one process only

TINY = digits.Recipe(
    keep=60,
    keep_head=900,
    dense_epochs=1,
    fine_tune_epochs=1,
    schedule=keepk.Annealing(p0=0.5, n1=1, nu=0.2),
    head_schedule=keepk.Cubic(epochs=2),
)
TINY_PARITY = Setting(
    goals=(1, 2),
    inits=2,
    sizes=(300, 100, 200),
    recipes=(
        replace(ANNEALED, start=16, dense=1, anneal=3, tail=1, schedule=keepk.Annealing(p0=0.5, n1=1, nu=0.25)),
        replace(FROM_THE_START, dense=4, tail=1),
    ),
)


def parameters_and_macs(a, b, c):
    """Parameters and MACs of the network with these widths, by hand: 64 pixels before the first pooling, 16 after."""
    head = 4 * c * 64 + 640
    parameters = 9 * (a + a * b + b * c) + 2 * (a + b + c) + head + 74
    return parameters, 64 * 9 * (a + a * b) + 16 * 9 * b * c + head


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def report(folder):
    return demo.run(folder, 3, recipe=TINY, parity=TINY_PARITY)


def test_exactly_k_channels_and_head_weights_are_kept(report):
    spaces = {space.name: (space.total, space.asked, space.kept) for space in report.kept.spaces}
    assert spaces == {"channels": (320, 60, 60), "head weights": (33_482, 900, 900)}
    assert [(it.name, it.total) for it in report.kept.channels] == [("conv1", 64), ("conv2", 128), ("conv3", 128)]
    assert [(it.name, it.total) for it in report.kept.head] == [("fc1", 32_832), ("fc2", 650)]
    assert sum(it.kept for it in report.kept.channels) == 60
    assert sum(it.kept for it in report.kept.head) == 900


def test_the_history_follows_the_plan(report):
    assert TINY.head_schedule.epochs is not None
    plan = [*TINY.schedule(320, 60, None), *[60] * TINY.head_schedule.epochs]
    assert [epoch.kept for epoch in report.history] == [320, *plan, 60]
    assert [epoch.phase for epoch in report.history] == ["dense"] + ["anneal"] * len(plan) + ["fine-tune"]


def test_costs_are_those_of_the_widths_and_of_the_disk(report, folder):
    widths = [it.kept for it in report.kept.channels]
    assert (report.before.parameters, report.before.macs) == parameters_and_macs(64, 128, 128)
    assert (report.after.parameters, report.after.macs) == parameters_and_macs(*widths)
    in_head = 4 * widths[2] * 64 + 64 + 650
    assert report.kept.parameters == report.after.parameters - in_head + 900
    for network, name in ((report.before, "dense"), (report.after, "small")):
        files = [folder / name / file for file in ("model.safetensors", "arch.json")]
        assert network.file_bytes == sum(len(file.read_bytes()) for file in files)


def test_what_is_on_disk_has_the_errors_that_are_reported(report, folder):
    data = digits.load_digits()
    for name, network in (("dense", report.before), ("small", report.after)):
        loaded = keepk.load(digits.DigitsNet(), folder / name).eval()
        wrong = (loaded(data.test.images).argmax(1) != data.test.labels).sum()
        assert network.test_error == 100 * wrong / 400
        assert network.test_error < 60  # better than guessing, which has 90 %
    wrong = (loaded(data.validation.images).argmax(1) != data.validation.labels).sum()
    assert report.val_error == pytest.approx(float(100 * wrong / 300), abs=1e-4)
    assert report.val_error == pytest.approx(100 - report.history[-1].accuracy, abs=1e-4)
    assert sum(int(it.count_nonzero()) for layer in (loaded.fc1, loaded.fc2) for it in layer.parameters()) <= 900


@pytest.mark.usefixtures("report")
def test_a_network_that_computes_something_else_than_its_files_is_refused(folder):
    images = torch.ones(2, 1, 8, 8)
    small = keepk.load(digits.DigitsNet(), folder / "small").eval()
    assert isinstance(demo.loaded(folder / "small", small, images), digits.DigitsNet)
    nn.init.constant_(small.fc2.bias, 7.0)
    with pytest.raises(FileError, match="small: the loaded network computes different outputs than the one in memory"):
        demo.loaded(folder / "small", small, images)


def test_latency_is_measured_against_the_dense_network_on_one_thread(report):
    assert [row.batch for row in report.latency.rows] == [1, 256]
    assert (report.latency.baseline, report.latency.threads) == ("DigitsNet", 1)
    assert all(row.model.median > 0 and row.baseline.median > 0 for row in report.latency.rows)


def test_the_table_says_asked_before_and_after(report):
    rows = {row[0].strip(): row[1:] for row in report.table().rows}
    before, after = report.before, report.after
    assert rows["channels"] == ("320", "60", "60", "5.3x")
    assert rows["head weights"] == ("33,482", "900", "900", "37x")
    assert rows["test error"] == (f"{before.test_error:.2f}%", "", f"{after.test_error:.2f}%", "")
    assert rows["parameters"][:3] == ("255,882", "", f"{after.parameters:,}")
    assert rows["of which not masked"][:3] == ("255,882", "", f"{report.kept.parameters:,}")
    assert rows["MACs per image"][:3] == ("7,148,160", "", f"{after.macs:,}")
    assert rows["file size, kB"][2] == f"{after.file_bytes / 1000:,.1f}"
    assert rows["ms for a batch of 256"][2] == f"{report.latency.rows[1].model.median:.3g}"
    assert [line for line in str(report).splitlines() if "33,482" in line] != []


def test_parity_points_are_those_of_the_experiment(report, capsys):
    experiment = [
        point
        for recipe in TINY_PARITY.recipes
        for point in parity.points(recipe, seed=3, inits=2, goals=(1, 2), sizes=TINY_PARITY.sizes)
        if point["asked"] in (1, 2)
    ]
    assert capsys.readouterr().out != ""
    assert len(report.parity) == 4
    for point, expected in zip(report.parity, experiment, strict=True):
        assert point == {key: expected[key] for key in point}


def test_parity_words_name_the_nodes_at_the_floor(report):
    def reached(recipe, flags):
        return [{"recipe": recipe, "asked": at, "at_floor": it, "noise_floor": 9.96} for at, it in enumerate(flags, 1)]

    told = replace(report, parity=(*reached("keepk", [False, True, True]), *reached("adam", [False, False, False])))
    assert told.parity_line == (
        "Parity, a small version of `keepk paper run parity`: hidden nodes that reach the noise floor of 10.0 %: "
        "2, 3 if annealed; none if trained with that number from the start."
    )


def test_both_parity_recipes_get_as_many_epochs_and_reach_every_goal():
    setting = Setting()
    assert len({recipe.epochs for recipe in setting.recipes}) == 1
    for recipe in setting.recipes:
        assert [recipe.plan(goal)[-1] for goal in setting.goals] == list(setting.goals)


def test_watch_hears_of_every_epoch():
    heard = []
    parity_points(draw(1, sizes=(50, 10, 10)), TINY_PARITY, seed=1, watch=lambda *words: heard.append(words))
    assert len(heard) == TINY_PARITY.epochs == 10
    assert heard[0] == ("parity", "16 hidden nodes")
    assert heard[-1] == ("parity", "2 hidden nodes")


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_the_same_seed_gives_the_same_numbers_and_leaves_the_callers_alone(report, tmp_path):
    def timeless(it):
        return replace(it, seconds=0, latency=None)

    torch.manual_seed(5)
    state = torch.get_rng_state()
    heard = []
    again = demo.run(tmp_path / "again", 3, recipe=TINY, parity=TINY_PARITY, watch=lambda *it: heard.append(it))
    assert timeless(again) == timeless(report)
    assert len(heard) == demo.epochs_in_all(TINY, TINY_PARITY)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 3


def test_another_seed_gives_other_numbers(report, tmp_path):
    at_once = keepk.Annealing(p0=0.8, n1=1, nu=0.2)
    recipe = replace(TINY, fine_tune_epochs=0, schedule=at_once)
    other = demo.run(tmp_path, 4, recipe=recipe, parity=TINY_PARITY)
    assert other.history[0] != report.history[0]
    assert other.parity != report.parity


def test_what_cannot_be_done_is_refused_before_the_training(tmp_path):
    with pytest.raises(DataError, match="parity: seed=-1"):
        demo.run(tmp_path, -1, recipe=TINY, parity=TINY_PARITY)
    with pytest.raises(PlanError, match=r"Annealing: p0=0\.5 leaves 160 of 320, fewer than the 200 to keep"):
        demo.epochs_in_all(replace(TINY, keep=200), TINY_PARITY)
    assert list(tmp_path.iterdir()) == []


def test_the_parts_are_disjoint_and_do_not_move():
    data = digits.load_digits()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [1097, 300, 400]
    assert data.train.images.shape == (1097, 1, 8, 8)
    assert (data.train.images.min().item(), data.train.images.max().item()) == (0, 1)
    again = digits.load_digits()
    assert torch.equal(data.test.images, again.test.images)
    assert sorted(
        torch.cat([p.labels for p in (data.train, data.validation, data.test)]).bincount().tolist()
    ) == sorted([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])


def test_the_commands_defaults_are_the_recipes():
    defaults = {name: it.default for name, it in inspect.signature(cli.demo).parameters.items()}
    recipe = digits.Recipe()
    assert defaults["dense_epochs"] == recipe.dense_epochs
    assert defaults["fine_tune_epochs"] == recipe.fine_tune_epochs
    assert defaults["parity_starts"] == Setting().inits


def test_the_command_trains_prints_and_saves(tmp_path, monkeypatch):
    # The default parity networks would take most of a minute; `make demo` trains them.
    monkeypatch.setattr(demo_parity, "Setting", lambda inits: replace(TINY_PARITY, inits=inits))
    out = tmp_path / "new" / "folder"
    arguments = ["--dense-epochs", "0", "--fine-tune-epochs", "0", "--parity-starts", "1"]
    result = CliRunner().invoke(
        commands.app, ["demo", "--out", str(out), *arguments], env={"COLUMNS": "80", "TERM": "dumb"}
    )
    assert result.exit_code == 0, result.output
    picture, numbers = out / "keepk-demo.png", out / "keepk-demo.json"
    assert f"Picture: {picture}\nNumbers: {numbers}\nNetwork: {out / 'small'}\n" in result.output
    assert imread(picture).shape == (896, 2080, 4)
    written = json.loads(numbers.read_text())
    assert [key for key in REQUIRED if key not in written] == []
    assert written["asked"] == written["kept"] == sum(it["kept"] for it in written["layers"]["channels"]) == 32
    rows = [line.split() for line in result.output.splitlines()]
    errors = [f"{written[key]:.2f}%" for key in ("dense_test_error", "test_error")]
    assert ["test", "error", *errors] in rows
    assert ["channels", "320", "32", "32", "10x"] in rows
    assert ["head", "weights", "33,482", "500", "500", "67x"] in rows
    assert ["total", "320", "32", "10.00%"] in rows
    assert ["total", "33,482", "500", "1.49%"] in rows
    assert "a small version of `keepk paper run parity`" in result.output


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_a_missing_package_is_named_before_anything_is_done(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(commands.app, ["demo", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert f'keepk demo: {package} is not installed. Run: pip install "keepk[demo]"' in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(tmp_path):
    (tmp_path / "taken").write_text("a file")
    result = CliRunner().invoke(commands.app, ["demo", "--out", str(tmp_path / "taken")])
    assert result.exit_code == 1
    assert "keepk demo: cannot create the folder" in result.stderr
    assert result.stdout == ""
