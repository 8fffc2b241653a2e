"""A run of a recipe: exact counts, bit-equal resuming, equality with a plain training loop, and its result lines."""

import json
import os
import shutil
import struct
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from functools import partial
from io import StringIO
from math import cos, pi
from multiprocessing import get_context
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn
from typer.testing import CliRunner

import keepk
from keepk.cli.commands import app
from keepk.errors import DataError
from keepk.metrics.weights import magnitude
from keepk.plan.schedules import plan
from keepk_paper import cli, experiments, results, vgg
from keepk_paper.data import MNIST_FILES, Mnist, Split
from keepk_paper.models import LeNet5, LeNet300
from keepk_paper.recipes import Recipe, Stage, saliency
from keepk_paper.train import Run, error_percent, packed_flags, wrong_pictures

pytestmark = pytest.mark.xdist_group("test_training")  # run the fixture in one process only

SEED = 3
FC, CONV = 405_510, 25_570
STAGES = [
    Stage(1, lr=0.1, flat=None, momentum=0.0, nesterov=False),
    Stage(
        2,
        lr=0.05,
        flat=1,
        decay=1e-3,
        dropout=(0.2, 0.4),
        keep={"fc": (8_110, [100_000, 8_110])},
        freeze=("conv*",),
        report=False,
    ),
    Stage(2, lr=0.02, nesterov=False, keep={"conv": (7_671, [20_000, 7_671])}, freeze=("fc*",)),
    Stage(1, lr=0.05, dropout=(0.1, 0.0), decay=1e-4),
]
RECIPE = Recipe("short", LeNet5, {"fc": "fc*", "conv": "conv*"}, STAGES, batch=32)
EPOCHS = 6


class Pooled(nn.Module):
    """A linear model on 2 x 2 pixels, so that 50,000 images take no time."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 10)

    def forward(self, images):
        return self.fc(images[:, 0, ::14, ::14].flatten(1))


def pictures(number, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(number, 1, 28, 28, generator=generator, dtype=torch.float64).to(dtype)
    return Split(images, torch.randint(10, (number,), generator=generator))


def small_data(dtype=torch.float32):
    return Mnist(train=pictures(120, 1, dtype), validation=pictures(50, 2, dtype), test=pictures(70, 3, dtype))


DATA = small_data()


class KilledError(Exception):
    pass


def silent(progress, pruner):
    pass


def untimed(points):
    return [{key: value for key, value in point.items() if "seconds" not in key} for point in points]


def assert_same(run, other):
    """Check that weights, momenta, masks, random states and points are bit-equal."""
    for tensors, others in ((run.model.state_dict(), other.model.state_dict()), (run.pruner.masks, other.pruner.masks)):
        assert tensors.keys() == others.keys()
        assert [name for name, tensor in tensors.items() if not tensor.equal(others[name])] == []
    momenta, others = ([state["momentum_buffer"] for state in it.optimizer.state.values()] for it in (run, other))
    assert [mine.equal(theirs) for mine, theirs in zip(momenta, others, strict=True)] == [True] * 8
    assert run.order.get_state().equal(other.order.get_state())
    assert untimed(run.progress.points) == untimed(other.progress.points)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, and its weights after every epoch."""
    run, seen = Run(RECIPE, SEED, DATA, tmp_path_factory.mktemp("whole")), []

    def look(progress, pruner):
        weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        seen.append((progress.epoch, pruner.kept, weights))

    seen.append((0, run.pruner.kept, {name: tensor.clone() for name, tensor in run.model.state_dict().items()}))
    assert run.finish(look) is run.progress.points
    return run, seen


def test_every_epoch_ends_at_its_number(whole):
    _, seen = whole
    assert [epoch for epoch, _, _ in seen] == list(range(EPOCHS + 1))
    assert [kept["fc"] for _, kept, _ in seen] == [FC, FC, 100_000, 8_110, 8_110, 8_110, 8_110]
    assert [kept["conv"] for _, kept, _ in seen] == [CONV, CONV, CONV, CONV, 20_000, 7_671, 7_671]


def test_the_points_hold_what_was_asked(whole):
    run, seen = whole
    points = run.progress.points
    assert [point["epochs"] for point in points] == [1, 5, 6]
    assert [point["asked"] for point in points] == [431_080, 15_781, 15_781]
    for point in points:
        weights = seen[point["epochs"]][2]
        kept = {
            layer: sum(int(weights[f"{layer}.{part}"].count_nonzero()) for part in ("weight", "bias"))
            for layer in ("conv1", "conv2", "fc1", "fc2")
        }
        assert {layer: counts[0] for layer, counts in point["layers"].items()} == kept
        assert point["kept"] == sum(kept.values()) == sum(point["spaces"].values()) == point["asked"]
        assert point["total"] == sum(counts[1] for counts in point["layers"].values()) == 431_080
        assert point["seconds"] >= 0 <= point["cpu_seconds"]


def test_the_points_hold_the_errors_of_their_epoch(whole):
    run, seen = whole
    for point in run.progress.points:
        model = LeNet5()
        model.load_state_dict(seen[point["epochs"]][2])
        assert point["test_error"] == pytest.approx(wrong_percent(model, DATA.test))
        assert point["val_error"] == pytest.approx(wrong_percent(model, DATA.validation))


def test_what_a_stage_freezes_stands_still_and_the_rest_moves(whole):
    _, seen = whole
    frozen = ["", "conv", "conv", "fc", "fc", ""]
    for epoch, kind in enumerate(frozen, start=1):
        before, after = seen[epoch - 1][2], seen[epoch][2]
        still = {name for name in after if after[name].equal(before[name])}
        assert still == {name for name in after if kind and name.startswith(kind)}


@pytest.mark.parametrize("epoch", range(1, EPOCHS + 1))
def test_killed_after_an_epoch_it_ends_bit_equal(whole, tmp_path, epoch):
    def kill(progress, _pruner):
        if progress.epoch == epoch:
            raise KilledError

    with pytest.raises(KilledError):
        Run(RECIPE, SEED, DATA, tmp_path).finish(kill)
    left = []
    resumed = Run(RECIPE, SEED, DATA, tmp_path)
    resumed.finish(lambda progress, _pruner: left.append(progress.epoch))
    assert left == list(range(epoch + 1, EPOCHS + 1))
    assert_same(resumed, whole[0])


@pytest.mark.parametrize("batch", [0, 2, 4, 10, 17])
def test_killed_in_the_middle_of_an_epoch_it_ends_bit_equal(whole, tmp_path, batch):
    """An epoch has three batches; the first kill comes before the first checkpoint."""
    run, calls = Run(RECIPE, SEED, DATA, tmp_path), iter(range(10**6))

    def kill(module, _args):
        if module.training and next(calls) == batch:
            raise KilledError

    run.model.get_submodule("fc2").register_forward_pre_hook(kill)
    with pytest.raises(KilledError):
        run.finish(silent)
    assert run.progress.epoch == batch // 3
    torch.rand(7)
    resumed = Run(RECIPE, SEED, DATA, tmp_path)
    resumed.finish(silent)
    assert_same(resumed, whole[0])


def killed_after_every_epoch(recipe, folder):
    def kill(_progress, _pruner):
        raise KilledError

    for _ in range(EPOCHS):
        with pytest.raises(KilledError):
            Run(recipe, SEED, DATA, folder).finish(kill)
    resumed = Run(recipe, SEED, DATA, folder)
    resumed.finish(kill)
    return resumed


def test_killed_after_every_epoch_it_ends_bit_equal(whole, tmp_path):
    assert_same(killed_after_every_epoch(RECIPE, tmp_path), whole[0])


def test_another_seed_is_another_run(tmp_path):
    first = Recipe("first", LeNet5, {"fc": "fc*"}, [Stage(1, lr=0.1, keep={"fc": (8_110, keepk.OneShot())})], batch=32)
    runs = [Run(first, seed, DATA, tmp_path / f"{seed}") for seed in (SEED, SEED + 1)]
    first_weights = [run.model.get_parameter("fc1.weight") for run in runs]
    assert not first_weights[0].equal(first_weights[1])
    assert not torch.randperm(120, generator=runs[0].order).equal(torch.randperm(120, generator=runs[1].order))


def test_a_checkpoint_of_another_recipe_is_refused(whole, tmp_path):
    shutil.copytree(whole[0].folder, tmp_path / "run")
    others = [*STAGES[:-1], Stage(2, lr=0.05)]
    with pytest.raises(keepk.errors.KeepkError, match="plan"):
        Run(Recipe("other", LeNet5, RECIPE.spaces, others, batch=32), SEED, DATA, tmp_path / "run")


def test_a_recipe_may_leave_dropout_alone(tmp_path):
    """Without rates there is no dropout, also after a stage that has some."""
    stages = [Stage(1, lr=0.1, dropout=(0.5, 0.5, 0.5)), Stage(1, lr=0.1, keep={"all": (999, keepk.OneShot())})]
    run = Run(Recipe("rates", LeNet300, {"all": "*"}, stages, batch=60), SEED, DATA, tmp_path)
    rates = []
    run.finish(lambda _progress, _pruner: rates.append({layer.p for layer in cast(LeNet300, run.model).dropout}))
    assert rates == [{0.5}, {0.0}]


def plain_run(recipe, seed, data):
    """The same training as a plain loop over the whole model."""
    torch.manual_seed(seed)
    model, order = recipe.network(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    alive = {name: torch.ones_like(parameter, dtype=torch.bool) for name, parameter in model.named_parameters()}
    for stage in recipe.stages:
        plain_stage_begins(model, optimizer, stage)
        for epoch in range(stage.epochs):
            rows = torch.randperm(len(data.train), generator=order)
            batches = [batch for batch in torch.split(rows, recipe.batch) if len(batch) == recipe.batch]
            met = []
            for number, batch in enumerate(batches):
                optimizer.param_groups[0]["lr"] = plain_rate(stage, epoch + number / len(batches))
                plain_gradients(model, data.train, batch)
                met.append({name: parameter.grad.clone() for name, parameter in trained(model)})
                for name, parameter in trained(model):
                    parameter.grad.mul_(alive[name])
                optimizer.step()
            scores = PLAIN_SCORES[stage.metric](model, met) if stage.keep else {}
            for space, (_, counts) in stage.keep.items():
                plain_prune(model, optimizer, alive, scores, space, counts[epoch])
    return model, alive


def plain_stage_begins(model, optimizer, stage):
    frozen = tuple(glob.rstrip("*") for glob in stage.freeze)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Dropout)]
    for number, layer in enumerate(layers):
        layer.p = stage.dropout[number] if stage.dropout else 0.0
    optimizer.param_groups[0].update(momentum=stage.momentum, nesterov=stage.nesterov, weight_decay=stage.decay)


def plain_rate(stage, progress):
    if stage.flat is None or progress <= stage.flat:
        return stage.lr
    return stage.lr * cos(pi / 2 * (progress - stage.flat) / (stage.epochs - stage.flat)) ** 2


def trained(model):
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def plain_gradients(model, split, batch):
    model.train().zero_grad()
    F.cross_entropy(model(split.images[batch]), split.labels[batch]).backward()


def plain_magnitude(model, _met):
    return {name: parameter.detach().abs() for name, parameter in trained(model)}


def plain_saliency(model, met):
    """|w| times the root mean square of its gradients over the epoch."""
    return {
        name: parameter.detach().abs() * torch.stack([gradients[name] ** 2 for gradients in met]).mean(0).sqrt()
        for name, parameter in trained(model)
    }


PLAIN_SCORES = {magnitude: plain_magnitude, saliency: plain_saliency}


@torch.no_grad()
def plain_prune(model, optimizer, alive, scores, space, count):
    """Sort all remaining weights, the earlier one first among ties, and keep the first `count`."""
    members = [(name, parameter) for name, parameter in model.named_parameters() if name.startswith(space)]
    ranked = torch.cat([scores[name].where(alive[name], -1.0).flatten() for name, _ in members])
    kept = torch.zeros_like(ranked, dtype=torch.bool)
    kept[ranked.sort(descending=True, stable=True).indices[:count]] = True
    for (name, parameter), mask in zip(members, kept.split([it.numel() for _, it in members]), strict=True):
        alive[name] = mask.view_as(parameter)
        parameter.mul_(alive[name])
        optimizer.state[parameter]["momentum_buffer"].mul_(alive[name])


ONE_BY_ONE = Recipe(
    "one by one", Pooled, {"fc": "fc*"}, [Stage(2, lr=0.1, keep={"fc": (20, [30, 20])}, metric=saliency)], batch=1
)
BY_SALIENCY = replace(RECIPE, stages=[replace(stage, metric=saliency) for stage in RECIPE.stages])


@pytest.mark.parametrize("recipe", [RECIPE, BY_SALIENCY, ONE_BY_ONE], ids=["magnitude", "saliency", "one by one"])
def test_a_run_is_what_a_plain_loop_computes(tmp_path, recipe):
    """In float64. The run computes frozen convolutions once, and the plain loop in every batch."""
    exact = replace(recipe, network=lambda: recipe.network().double())
    data = small_data(torch.float64)
    run = Run(exact, SEED, data, tmp_path)
    run.finish(silent)
    model, alive = plain_run(exact, SEED, data)
    for name, mask in run.pruner.masks.items():
        assert mask.equal(alive[name]), name
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(run.model.state_dict()[name], tensor, rtol=0, atol=1e-10)


def test_ranked_by_saliency_it_keeps_other_weights_and_resumes_bit_equal(whole, tmp_path):
    run = Run(BY_SALIENCY, SEED, DATA, tmp_path / "whole")
    run.finish(silent)
    assert run.progress.points[-1]["kept"] == 15_781
    assert not run.pruner.masks["fc1.weight"].equal(whole[0].pruner.masks["fc1.weight"])
    assert_same(killed_after_every_epoch(BY_SALIENCY, tmp_path / "killed"), run)


def wrong_percent(model, split):
    """The error in percent, computed image by image."""
    model.eval()
    wrong = 0
    for image, label in zip(split.images, split.labels, strict=True):
        with torch.no_grad():
            scores = model(image[None])[0].tolist()
        wrong += scores.index(max(scores)) != label
    return 100 * int(wrong) / len(split)


@given(number=st.integers(1, 23), batch=st.integers(1, 25), seed=st.integers(0, 99))
def test_the_error_is_a_plain_count(number, batch, seed):
    """It does not depend on the batch size, and dropout is off."""
    split = pictures(number, seed)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.9), nn.Linear(784, 10)).train()
    assert error_percent(model, split, batch=batch) == pytest.approx(wrong_percent(model, split))
    wrong = wrong_pictures(model, split, batch=batch)
    unpacked = np.unpackbits(np.frombuffer(b64decode(packed_flags(wrong)), np.uint8), count=number)
    assert unpacked.tolist() == wrong.int().tolist()


# The following tests read files of the published form with generated images.


TINY = Recipe(
    "paper",
    Pooled,
    {"all": "*"},
    [Stage(1, lr=0.1), Stage(1, lr=0.1, keep={"all": (20, keepk.OneShot())})],
    batch=25_000,
)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A folder with four files of the published shapes."""
    folder, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for file in MNIST_FILES:
        values = np.resize(generator.integers(0, 10, 7_841, dtype=np.uint8), file.shape)
        header = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape)
        (folder / file.name).write_bytes(header + values.tobytes())
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def one_seed(monkeypatch, published, tmp_path):
    monkeypatch.setitem(experiments.EXPERIMENTS, "lenet-300-100", {"paper": TINY})
    folders = {"data": published, "results": tmp_path / "results", "runs": tmp_path / "runs"}
    return partial(experiments._one_seed, "lenet-300-100", "paper", 2, threads=1, **folders)


def test_a_seed_writes_one_line_a_point_and_only_once(one_seed, tmp_path, capsys):
    one_seed()
    file = tmp_path / "results" / "lenet-300-100.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        assert set(results.REQUIRED) <= line.keys()
        assert (line["experiment"], line["recipe"], line["seed"]) == ("lenet-300-100", "paper", 2)
        assert (line["total"], line["threads"], line["versions"]) == (50, 1, results.versions())
        assert line["dense_test_error"] == lines[0]["test_error"]
        assert line["layers"] == {"fc": [line["kept"], 50]}
    assert [(line["asked"], line["kept"], line["epochs"]) for line in lines] == [(50, 50, 1), (20, 20, 2)]
    assert results.read(file) == lines
    assert "epoch 2/2  kept 20  " in capsys.readouterr().out

    folder = tmp_path / "runs" / "lenet-300-100" / "paper-2"
    assert (folder / "finished").exists()
    written = file.read_bytes()
    one_seed()
    assert capsys.readouterr().out == (
        f"lenet-300-100 paper seed 2: finished before; remove {folder} to run it again\n"
    )
    assert file.read_bytes() == written


def test_a_seed_killed_before_its_mark_is_written_again_and_counts_once(one_seed, tmp_path, capsys):
    one_seed()
    file = tmp_path / "results" / "lenet-300-100.jsonl"
    first = file.read_bytes()
    (tmp_path / "runs" / "lenet-300-100" / "paper-2" / "finished").unlink()
    capsys.readouterr()
    one_seed()
    assert capsys.readouterr().out == ""
    assert file.read_bytes() == first * 2
    assert len(results.read(file)) == 2


def test_a_run_of_a_changed_recipe_does_not_go_on(one_seed, monkeypatch):
    one_seed()
    recipe = experiments.EXPERIMENTS["lenet-300-100"]["paper"]
    changed = replace(recipe, stages=[replace(stage, lr=0.5) for stage in recipe.stages])
    monkeypatch.setitem(experiments.EXPERIMENTS["lenet-300-100"], "paper", changed)
    with pytest.raises(DataError, match=r"holds a run of another recipe 'paper', .* Remove the folder"):
        one_seed()


FLOAT32, BFLOAT16 = "float32", "bfloat16 mixed precision"


@pytest.mark.parametrize(("first", "then"), [(FLOAT32, BFLOAT16), (BFLOAT16, FLOAT32)])
@pytest.mark.parametrize("finished", [True, False])
def test_a_run_of_another_precision_is_neither_finished_nor_resumed(one_seed, tmp_path, first, then, finished):
    one_seed(amp=first == BFLOAT16)
    folder = tmp_path / "runs" / "lenet-300-100" / "paper-2"
    if not finished:
        (folder / "finished").unlink()
    file = tmp_path / "results" / "lenet-300-100.jsonl"
    before = file.read_bytes()
    words = (
        rf"paper-2: holds a run of recipe 'paper' in {first}, so it cannot be resumed in {then}\. Train it as before"
    )
    with pytest.raises(DataError, match=words):
        one_seed(amp=then == BFLOAT16)
    assert file.read_bytes() == before
    one_seed(amp=first == BFLOAT16)  # in its own precision it is finished, or is marked as such again
    assert len(results.read(file)) == 2


def test_a_line_in_mixed_precision_says_so_and_one_in_float32_has_no_new_keys(one_seed, tmp_path):
    file = tmp_path / "results" / "lenet-300-100.jsonl"
    one_seed()
    assert not {"device", "amp"} & results.read(file)[0].keys()
    assert (tmp_path / "runs" / "lenet-300-100" / "paper-2" / "finished").read_text() == TINY.fingerprint()
    one_seed(amp=True, runs=tmp_path / "amp")
    lines = results.read(file)  # both precisions, of the same recipe and seed
    assert [(line["asked"], line.get("amp"), line.get("device")) for line in lines] == [
        *((asked, None, None) for asked in (50, 20)),
        *((asked, True, "cpu") for asked in (50, 20)),
    ]


def test_checkpoints_and_marks_from_before_mixed_precision_are_float32(one_seed, tmp_path, capsys, monkeypatch):
    def save_as_before(*arguments, extra, **parts):
        old = {key: value for key, value in extra.items() if key not in ("device", "amp")}
        assert len(old) == len(extra) - 2
        keepk.save_checkpoint(*arguments, extra=old, **parts)

    with monkeypatch.context() as patched:
        patched.setattr("keepk_paper.train.save_checkpoint", save_as_before)
        one_seed()
    folder = tmp_path / "runs" / "lenet-300-100" / "paper-2"
    finished = experiments._finished(folder)
    assert finished is not None
    assert finished.training == results.Training()
    (folder / "finished").unlink()
    one_seed()
    assert (folder / "finished").exists()
    capsys.readouterr()
    one_seed()
    assert "finished before" in capsys.readouterr().out
    with pytest.raises(DataError, match="holds a run of recipe 'paper' in float32"):
        one_seed(amp=True)


def test_the_command_runs_no_finished_seed_and_shows_the_tables(published, tmp_path):
    finished = tmp_path / "runs" / "lenet-5" / "paper-1"
    finished.mkdir(parents=True)
    (finished / "finished").write_text(experiments.EXPERIMENTS["lenet-5"]["paper"].fingerprint())
    layers = {"conv1": [390, 520], "conv2": [7_281, 25_050], "fc1": [7_110, 400_500], "fc2": [1_000, 5_010]}
    values = ["lenet-5", "paper", 1, 15_781, 15_781, 431_080, 0.87, 0.98, 0.76, 1.0, {}]
    file = tmp_path / "results" / "lenet-5.jsonl"
    results.append(file, [dict(zip(results.REQUIRED, values, strict=True)) | {"layers": layers}])
    written = file.read_bytes()
    folders = ["--data", published, "--results", file.parent, "--runs", tmp_path / "runs"]
    arguments = ["paper", "run", "lenet-5", "--recipe", "paper", "--seeds", "1", "--jobs", "1", *map(str, folders)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["paper", "15,781", "15,781", "0.87", "-", "0.87", "0.98", "1"] in rows
    assert ["conv1", "66", "75", "75.0"] in rows
    assert f"Results: {file}" in result.stdout
    assert file.read_bytes() == written
    assert [path.name for path in finished.iterdir()] == ["finished"]


@pytest.mark.parametrize("experiment", experiments.EXPERIMENTS)
def test_an_unknown_recipe_is_refused_before_data_is_looked_for(tmp_path, experiment):
    folders = {"data": tmp_path / "data", "results": tmp_path / "results", "runs": tmp_path / "runs"}
    known = next(iter(experiments.EXPERIMENTS[experiment]))
    words = rf"experiment '{experiment}': no recipe '{known}s'\. Nearest names: '{known}'"
    with pytest.raises(DataError, match=words):
        experiments.run(experiment, {"recipe": [known, f"{known}s"], "seeds": 1, **folders})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"seeds": 0}, {"jobs": 0}, {"threads": -1}, {"seeds": True}])
def test_counts_are_checked_before_anything_starts(tmp_path, wrong):
    counts = {"seeds": 1, "jobs": 1, "threads": 1, **wrong}
    with pytest.raises(DataError, match=f"{next(iter(wrong))}="):
        experiments.run("lenet-5", {"data": tmp_path, "results": tmp_path, "runs": tmp_path, **counts})


def test_a_recipe_has_the_same_fingerprint_in_every_process():
    """Otherwise a killed run could not be resumed."""
    recipes = {
        "blend": replace(vgg.CONTROL, metric=keepk.metrics.blend(0.5)),
        "function": replace(vgg.CONTROL, metric=keepk.metrics.bn_scale),
    }
    program = (
        "import keepk; from dataclasses import replace; from keepk_paper.vgg import CONTROL as control;"
        "print(replace(control, metric=keepk.metrics.blend(0.5)).fingerprint(),"
        "replace(control, metric=keepk.metrics.bn_scale).fingerprint())"
    )
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert there == [recipe.fingerprint() for recipe in recipes.values()]
    assert len({*there, vgg.CONTROL.fingerprint()}) == 3


def test_quick_versions_keep_the_network_and_the_counts():
    for named in experiments.EXPERIMENTS.values():
        for recipe in named.values():
            quick = experiments.quick_version(recipe)
            assert (quick.network, quick.options, quick.spaces) == (recipe.network, recipe.options, recipe.spaces)
            assert quick.epochs == experiments.QUICK_EPOCHS * len(recipe.stages)
            for short, stage in zip(quick.stages, recipe.stages, strict=True):
                assert {name: keep for name, (keep, _) in short.keep.items()} == {
                    name: keep for name, (keep, _) in stage.keep.items()
                }
                for keep, schedule in short.keep.values():
                    length = short.epochs - short.first_event + 1
                    assert plan(schedule, 10 * (keep + 1), keep, epochs=length)[-1] == keep
                assert all(short.learning_rate(epoch) >= 0 for epoch in range(short.epochs))


def test_a_quick_run_trains_a_few_images_into_folders_of_its_own(published, tmp_path):
    """Through the command and a worker process."""
    folders = ["--data", str(published), "--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    command = ["paper", "run", "lenet-300-100", "--recipe", "paper", "--quick", "--jobs", "1", *folders]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    file = tmp_path / "results" / "quick" / "lenet-300-100.jsonl"
    lines = results.read(file)
    assert [(line["seed"], line["kept"], line["epochs"]) for line in lines] == [(1, 266_610, 3), (1, 17_329, 6)]
    assert all(len(b64decode(line["test_wrong"])) * 8 == experiments.QUICK_IMAGES for line in lines)
    said = [line.split() for line in result.stdout.splitlines() if line.startswith("lenet-300-100 paper seed 1")]
    assert [line[5] for line in said] == [f"{epoch}/6" for epoch in range(1, 7)]
    assert said[-1][-7:-5] == ["s", "train"]
    assert said[-1][-3:] == ["test", f"{lines[-1]['test_error']:.2f}", "%"]
    assert f"Results: {file}" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "runs"]


def test_quick_runs_of_the_rivals_start_from_the_dense_network(published, tmp_path):
    names = ["one-shot-3999", "han-2"]
    folders = {"data": published, "results": tmp_path / "results", "runs": tmp_path / "runs"}
    (file,) = experiments.run("lenet-300-100", {"recipe": names, "quick": True, "jobs": 1, **folders}, lambda _: None)
    kept = {line["recipe"]: line["kept"] for line in results.read(file)}
    assert list(kept) == ["dense", "han-1", "one-shot-3999", "han-2"]
    assert kept["dense"] == 266_610
    assert kept["one-shot-3999"] == 3_999
    assert 0 < kept["han-2"] < kept["han-1"] < 266_610


def test_a_worker_whose_main_process_was_killed_stops(monkeypatch):
    queue = get_context("spawn").SimpleQueue()
    monkeypatch.setattr(experiments, "_reports", queue)
    monkeypatch.setattr(experiments, "_parent", os.getppid())
    experiments._tell(experiments.Report("a", 1, 2))
    assert queue.get().epoch == 1
    monkeypatch.setattr(experiments, "_parent", os.getppid() + 1)
    with pytest.raises(SystemExit):
        experiments._tell(experiments.Report("a", 2, 2))
    assert queue.empty()


def test_a_terminal_shows_a_bar_for_each_run():
    written = StringIO()
    terminal = Console(file=written, force_terminal=True, width=120, legacy_windows=False, color_system=None)
    with cli.run_progress(terminal) as watch:
        watch(experiments.Report("vgg a seed 1", 1, 4, 90, 2.0, 50.0))
        watch(experiments.Report("vgg a seed 2", 3, 4, 80, 2.0, 40.0))
        watch(experiments.Report("vgg a seed 3", note="finished before"))
        watch(experiments.Report("vgg a seed 1", 2, 4, 70, 4.0, 30.0))
        watch(experiments.Report("vgg a seed 2", 4, 4, 80, 9.0, 20.0, 25.5))
    shown = written.getvalue()
    assert "kept 70  train 30.00 %" in shown
    assert "vgg a seed 2  epoch 4/4  kept 80  9 s  train 20.00 %  test 25.50 %" in shown
    assert "vgg a seed 3: finished before" in shown
    *_, last = (line for line in shown.splitlines() if "vgg" in line)  # the bars as they were drawn last
    assert ("vgg a seed 1" in last, "2/4" in last, "seed 2" in last) == (True, True, False)


@pytest.mark.parametrize("option", ["recipe", "inits", "figure"])
def test_options_of_one_experiment_are_refused_for_all(option):
    with pytest.raises(DataError, match=f"--{option} is not an option of all"):
        experiments.run("all", {option: ["x"]})


def test_all_runs_every_experiment_with_its_options(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(experiments, "_run_recipes", lambda name, **options: asked.append((name, options)) or tmp_path)
    monkeypatch.setattr(experiments, "_parity", lambda **options: asked.append(("parity", options)) or tmp_path)
    experiments.run("all", {"quick": True, "jobs": 3, "results": tmp_path})
    assert [name for name, _ in asked] == [*experiments.EXPERIMENTS, "parity"]
    assert {(options["seeds"], options["results"]) for _, options in asked} == {(1, tmp_path / "quick")}
    assert {options.get("jobs") for _, options in asked} == {3, None}
