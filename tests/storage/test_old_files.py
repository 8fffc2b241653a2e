"""Files of an earlier version can be read: a model, a checkpoint in the middle of a run, a state."""

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import keepk
from keepk.model.layers import selecting
from old_files import FOLDER, build, epoch, pictures, run_of

OUTPUTS = torch.load(FOLDER / "outputs.pt", weights_only=True)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}  # a different torch may sum in a different order


def test_a_saved_model_loads():
    net = keepk.load(build(), FOLDER / "model")
    torch.testing.assert_close(net(pictures()), OUTPUTS["end"], **CLOSE)
    assert sum(p.shape[0] for p in (net.stem.weight, net.more.weight, net.wide.weight)) == 20
    assert int((net.head.weight != 0).sum()) == 12


def test_a_run_goes_on_from_a_checkpoint_in_its_middle():
    net = build()
    pruner, optimizer, scheduler = run_of(net)
    parts = {"pruner": pruner, "optimizer": optimizer, "scheduler": scheduler}
    assert keepk.load_checkpoint(FOLDER / "checkpoint", model=net, **parts) == {"epoch": 2}
    torch.testing.assert_close(net(pictures()), OUTPUTS["middle"], **CLOSE)
    assert pruner.epoch == 2
    assert pruner.kept == {"channels": 24, "head": 40}
    for _ in range(2):
        epoch(net, pruner, optimizer, scheduler)
    torch.testing.assert_close(net(pictures()), OUTPUTS["end"], **CLOSE)
    assert pruner.kept == {"channels": 20, "head": 12}


def test_a_pruner_takes_an_old_state():
    net = build()
    pruner, *_ = run_of(net)
    pruner.load_state_dict(torch.load(FOLDER / "pruner.pt", weights_only=True))
    assert pruner.epoch == 2
    assert pruner.kept == {"channels": 24, "head": 40}


@pytest.mark.parametrize("name", ["model", "checkpoint"])
def test_the_old_files_are_small(name):
    assert sum(file.stat().st_size for file in (FOLDER / name).iterdir()) < 100_000


def test_a_layer_that_was_pickled_before_its_module_moved_comes_back():
    written = pickle.dumps(selecting(nn.BatchNorm2d)(8))
    old = written.replace(b"keepk.model.layers", b"keepk.graph.layers")  # of equal length, as pickle's opcodes require
    assert old != written
    assert type(pickle.loads(old)) is selecting(nn.BatchNorm2d)
