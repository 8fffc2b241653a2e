"""A Pruner in loops with accelerate and Fabric: logs, checkpoints, and two processes."""

import os
import signal
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepk
from keepk.errors import CheckpointError, KeepkError
from keepk.integrations import accelerate, fabric
from killing import in_child, in_two_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
EVENTS = [16, 10]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 4))


def parts():
    """The network, its optimizer and its Pruner."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    spaces = [
        keepk.channels("0", keep=EVENTS[-1], schedule=EVENTS, name="hidden"),
        keepk.weights("3.weight", keep=17, schedule=[30, 17], name="last"),
    ]
    return net, optimizer, keepk.Pruner(net, spaces, optimizer, example=torch.randn(2, 6))


class WithAccelerate:
    """Four epochs with an Accelerator; the state of the random number generators is part of its checkpoints."""

    def __init__(self, resumed=None):
        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(cpu=True)
        self.net, optimizer, pruner = parts()
        self.pruning = accelerate.prepare(self.accelerator, pruner)
        if resumed is not None and self.accelerator.num_processes > 1:
            self.pruning.resume(resumed)
        self.model, self.optimizer = self.accelerator.prepare(self.net, optimizer)
        self.bare, self.epoch = optimizer, 0
        if resumed is not None:
            self.accelerator.load_state(str(resumed))
            self.epoch = int((resumed / "epoch").read_text())

    def backward(self, loss):
        self.accelerator.backward(loss)

    def step(self):
        self.model = self.pruning.step(self.model)

    def save(self, folder):
        self.accelerator.save_state(str(folder))
        (folder / "epoch").write_text(str(self.epoch))


class WithFabric:
    def __init__(self, resumed=None):
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self.fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
        self.fabric.launch()
        self.net, optimizer, pruner = parts()
        self.pruning = fabric.prepare(self.fabric, pruner)
        if resumed is not None and ranks > 1:
            self.pruning.resume(resumed / "last.ckpt")
        self.model, self.optimizer = self.fabric.setup(self.net, optimizer)
        self.bare, self.epoch = optimizer, 0
        if resumed is not None:
            state = {"model": self.model, "optimizer": self.optimizer, "epoch": 0, "rng": None}
            assert self.pruning.load(resumed / "last.ckpt", state) == {}
            self.epoch = state["epoch"]
            torch.set_rng_state(state["rng"])

    def backward(self, loss):
        self.fabric.backward(loss)

    def step(self):
        self.pruning.step(self.model)

    def save(self, folder):
        state = {"model": self.model, "optimizer": self.optimizer, "epoch": self.epoch, "rng": torch.get_rng_state()}
        self.pruning.save(folder / "last.ckpt", state)


def trained(loop, folder=None, kill=None):
    """Train to the end of the fourth epoch; everything that training has changed."""
    while loop.epoch < 4:
        for rows in torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(loop.epoch)):
            loop.optimizer.zero_grad()
            loop.backward(loop.model(rows).square().mean())
            loop.optimizer.step()
        loop.step()
        loop.epoch += 1
        if folder is not None:
            loop.save(folder)
        if loop.epoch == kill:
            os.kill(os.getpid(), signal.SIGKILL)
    assert loop.pruning.pruner.kept == {"hidden": 10, "last": 17}
    assert int(loop.net[3].weight.count_nonzero()) == 17
    state = [value for it in loop.bare.state.values() for value in it.values()]
    return [*(parameter.detach() for parameter in loop.net.parameters()), *state]


LOOPS = [WithAccelerate, WithFabric]


@pytest.mark.parametrize("kill", [1, 2, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_run_that_was_killed_ends_with_the_same_bits(loop, kill, tmp_path):
    assert in_child(lambda: trained(loop(), tmp_path, kill) and None)[0] == signal.SIGKILL
    whole, again = trained(loop()), trained(loop(tmp_path))
    assert whole[0].shape == (10, 6)
    assert len(whole) == len(again)
    assert all(torch.equal(one, two) for one, two in zip(whole, again, strict=True))


@pytest.mark.parametrize("loop", LOOPS)
def test_two_processes_lose_the_same_channels_and_resume(loop, tmp_path):
    def run(resumed=None):
        it = loop(resumed)
        found = trained(it, None if resumed else tmp_path)
        wrapper = it.model if isinstance(it, WithAccelerate) else it.model._forward_module
        assert isinstance(wrapper, DistributedDataParallel)
        assert wrapper.module is it.net
        return [value.tolist() for value in found[:4]]

    first, second = in_two_ranks(run)
    assert first == second
    assert len(first[0]) == 10
    assert in_two_ranks(lambda: run(tmp_path))[0] == first


@pytest.mark.parametrize(("loop", "words"), [(WithAccelerate, "accelerator.prepare"), (WithFabric, "fabric.setup")])
def test_a_wrapped_model_is_not_cut_by_a_checkpoint(loop, words, tmp_path):
    def run():
        it = loop()
        it.step()
        it.save(tmp_path)
        fresh = loop()
        given = tmp_path / "last.ckpt", {"model": fresh.model}
        load = (
            partial(fresh.pruning.load, *given)
            if loop is WithFabric
            else partial(fresh.accelerator.load_state, tmp_path)
        )
        with pytest.raises(KeepkError, match=rf"before it is wrapped in .* Call pruning\.resume\(\w+\) before {words}"):
            load()
        return fresh.net[0].out_features

    assert in_two_ranks(run) == [24, 24]


def test_events_are_logged(tmp_path):
    loop, got = WithAccelerate(), []
    loop.accelerator.log = lambda values, step: got.append((values, step))
    loop.model = loop.pruning.step(loop.model, step=7)
    assert got == [
        (
            {
                "keepk/event": 1,
                "keepk/kept/hidden": 16,
                "keepk/kept/last": 30,
                "keepk/parameters": 180,
                "keepk/macs": 160,
            },
            7,
        )
    ]
    logger = CSVLogger(tmp_path)
    net, optimizer, pruner = parts()
    own = Fabric(accelerator="cpu", devices=1, loggers=logger)
    model, _ = own.setup(net, optimizer)
    pruning = fabric.prepare(own, pruner)
    for step in (3, 6, 9):  # the plan ends with the second
        pruning.step(model, step=step)
    logger.save()
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(lines) == 3
    assert lines[0].split(",")[:2] == ["keepk/event", "keepk/kept/hidden"]
    assert lines[2].split(",")[:2] == ["2", "10"]


def test_other_objects_and_checkpoints_are_refused(tmp_path):
    loop = WithAccelerate()
    with pytest.raises(KeepkError, match="got Sequential as the accelerator"):
        accelerate.prepare(loop.net, loop.pruning.pruner)
    with pytest.raises(KeepkError, match="got Sequential as the pruner"):
        accelerate.prepare(loop.accelerator, loop.net)
    with pytest.raises(KeepkError, match="got Sequential as the fabric"):
        fabric.prepare(loop.net, loop.pruning.pruner)
    with pytest.raises(CheckpointError, match="has no keepk/"):
        loop.accelerator.load_state(str(tmp_path))
    other = WithFabric()
    with pytest.raises(KeepkError, match=r"got Sequential\. Pass the module that fabric\.setup returned"):
        other.pruning.step(other.net)
    other.fabric.save(tmp_path / "plain.ckpt", {"epoch": 3})
    for load in (other.pruning.resume, lambda path: other.pruning.load(path, {"epoch": 0}, strict=False)):
        with pytest.raises(CheckpointError, match=r"was not written by the save of keepk\.integrations\.fabric"):
            load(tmp_path / "plain.ckpt")
