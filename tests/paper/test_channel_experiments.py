"""Experiments that remove channels: a recipe starts from another's network, is killed, resumed and recorded."""

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from keepk.plan.schedules import Annealing
from keepk_paper import experiments, results
from keepk_paper.data import Split
from keepk_paper.models import printed_parameters
from keepk_paper.pictures import Pictures
from keepk_paper.recipes import Recipe, Stage
from keepk_paper.tables.channels import PRINTED, cost_table, layer_table
from keepk_paper.train import Run, error_percent


class Tiny(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 3), nn.BatchNorm2d(8)
        )
        self.classifier = nn.Linear(8, 4)

    def forward(self, images):
        return self.classifier(self.features(images).amax((2, 3)))


def split(number, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (number, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return Split(images, torch.randint(4, (number,), generator=generator))


DATA = Pictures(split(64, 1), split(20, 2), split(30, 3), 4, torch.full((3,), 127.0), torch.full((3,), 74.0))
SHARED: dict[str, Any] = {
    "network": Tiny,
    "spaces": {"conv": "features.*"},
    "units": "output",
    "batch": 16,
    "smoothing": 0.1,
}
DENSE = Recipe(name="dense", stages=[Stage(2, lr=0.05)], options={"width": 7}, **SHARED)
PRUNED = Recipe(
    name="pruned",
    start="dense",
    options={"width": 7},
    stages=[
        Stage(3, lr=0.05, keep={"conv": (5, Annealing(p0=0.2, n1=1, nu=0.3))}, freeze=("classifier.*",), report=False),
        Stage(2, lr=0.02),
    ],
    **SHARED,
)


@pytest.fixture
def seed_of(monkeypatch, tmp_path):
    monkeypatch.setitem(experiments.EXPERIMENTS, "vgg16-cifar10", {"dense": DENSE, "pruned": PRUNED})
    monkeypatch.setitem(experiments.DATA, "vgg16-cifar10", lambda _: DATA)
    folders = {"data": None, "results": tmp_path / "results", "runs": tmp_path / "runs"}
    return partial(experiments._one_seed, "vgg16-cifar10", seed=1, threads=1, **folders)


def test_a_recipe_goes_on_with_another_recipes_network(seed_of, tmp_path):
    seed_of(recipe="dense")
    seed_of(recipe="pruned")
    file = tmp_path / "results" / "vgg16-cifar10.jsonl"
    dense, pruned = [json.loads(line) for line in file.read_text().splitlines()]
    assert set(results.REQUIRED) <= dense.keys() & pruned.keys()
    assert (dense["asked"], dense["kept"], dense["total"], dense["epochs"]) == (15, 15, 15, 2)
    assert (pruned["asked"], pruned["kept"], pruned["total"], pruned["epochs"]) == (5, 5, 15, 5)
    assert pruned["dense_test_error"] == dense["dense_test_error"] == dense["test_error"]
    assert pruned["parameters"] < dense["parameters"]
    assert pruned["macs"] < dense["macs"]
    start = Run(PRUNED, 1, DATA, tmp_path / "fresh", tmp_path / "runs" / "vgg16-cifar10" / "dense-1")
    assert error_percent(start.model, DATA.test, DATA.seen) == dense["test_error"]
    table = cost_table("vgg16-cifar10", [dense, pruned])
    assert table.rows[0] == ("printed: baseline", "4,224", "", "6.34", "", "14.98M", "", "", "")
    ours = table.rows[len(PRINTED["vgg16-cifar10"]) + 1]
    assert ours[:6] == (
        *("pruned", "5", "5", f"{pruned['test_error']:.2f}", f"{pruned['val_error']:.2f}"),
        f"{pruned['printed_parameters']:,}",
    )
    by_layer = layer_table("vgg16-cifar10", [dense, pruned])
    widths = [module.out_channels for module in start.model.modules() if isinstance(module, nn.Conv2d)]
    assert [row[1] for row in by_layer.rows] == [*map(str, widths), "15"]
    assert sum(int(row[2]) for row in by_layer.rows[:-1]) == int(by_layer.rows[-1][2]) == 5


def test_a_killed_run_of_channels_ends_bit_equal(seed_of, tmp_path):
    seed_of(recipe="dense")
    start = tmp_path / "runs" / "vgg16-cifar10" / "dense-1"

    def finished(folder, *, killed_after):
        run = Run(PRUNED, 1, DATA, folder, start)

        def kill(progress, _):
            if progress.epoch == killed_after:
                raise KeyboardInterrupt

        if killed_after:
            with pytest.raises(KeyboardInterrupt):
                run.finish(kill)
            run = Run(PRUNED, 1, DATA, folder, start)
        run.finish(lambda *_: None)
        return run.model.state_dict()

    whole = finished(tmp_path / "whole", killed_after=0)
    for epoch in (1, 2, 4):
        resumed = finished(tmp_path / f"killed{epoch}", killed_after=epoch)
        assert resumed.keys() == whole.keys()
        assert [name for name in whole if not whole[name].equal(resumed[name])] == []


def test_the_classifier_is_frozen_while_channels_go(seed_of, tmp_path):
    seed_of(recipe="dense")
    run = Run(PRUNED, 1, DATA, tmp_path / "run", tmp_path / "runs" / "vgg16-cifar10" / "dense-1")
    biases = [run.model.get_parameter("classifier.bias").detach().clone()]
    run.finish(lambda *_: biases.append(run.model.get_parameter("classifier.bias").detach().clone()))
    assert [biases[0].equal(bias) for bias in biases] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("experiment", ["vgg16-cifar10", "densenet40-cifar10"])
def test_recipes_ask_for_the_papers_counts_and_lengths(experiment):
    recipes = experiments.EXPERIMENTS[experiment]
    full = {name: recipe for name, recipe in recipes.items() if name.startswith("full")}
    assert {recipe.epochs for recipe in full.values()} == {250}
    asked = {name: next(iter(stage.keep.values()))[0] for name, r in full.items() for stage in r.stages if stage.keep}
    counts = {"vgg16-cifar10": {"full-50": 2_112, "full-60": 1_689, "full-70": 1_267}}
    assert asked == counts.get(experiment, {"full-60": 3_744, "full-70": 2_808})
    assert all(recipe.start in recipes for recipe in recipes.values() if recipe.start)
    assert printed_parameters(recipes["full-dense"].network()) in (14_978_250, 1_059_298)
