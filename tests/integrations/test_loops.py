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
from keepk.integrations.runs import digests
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


# Several Pruners in one loop


class Two:
    """Two networks of one shape with different weights, each with a Pruner, in a loop of either framework."""

    def __init__(self, kind, spaces=("weights", "weights")):
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        self.kind = kind
        self.nets = [nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)) for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in self.nets]
        self.pruners = [
            keepk.Pruner(net, keepk.weights("0.weight", keep=9, schedule=[30, 9]), optimizer)
            if what == "weights"
            else keepk.Pruner(net, keepk.channels("0", keep=3, schedule=[6, 3]), optimizer, example=torch.randn(2, 6))
            for what, net, optimizer in zip(spaces, self.nets, optimizers, strict=True)
        ]
        if kind is accelerate:
            self.loop = Accelerator(cpu=True)
            self.models = list(self.loop.prepare(*self.nets, *optimizers))
        else:
            self.loop = Fabric(accelerator="cpu", devices=1)
            pairs = [self.loop.setup(*pair) for pair in zip(self.nets, optimizers, strict=True)]
            self.models = [model for model, _ in pairs]
        self.prunings = [kind.prepare(self.loop, pruner) for pruner in self.pruners]

    def step(self, places=(0, 1)):
        for place in places:
            self.prunings[place].step(self.models[place])

    def save(self, folder):
        if self.kind is accelerate:
            self.loop.save_state(str(folder))
        else:
            self.prunings[1].save(folder / "last.ckpt", {"one": self.models[0], "two": self.models[1]})

    def load(self, folder):
        if self.kind is accelerate:
            self.loop.load_state(str(folder))
        else:
            self.prunings[0].load(folder / "last.ckpt", {"one": self.models[0], "two": self.models[1]})

    @property
    def masks(self):
        return [mask for pruner in self.pruners for mask in pruner.masks.values()]


MODULES = [accelerate, fabric]


@pytest.mark.parametrize("spaces", [("weights", "weights"), ("channels", "weights"), ("channels", "channels")])
@pytest.mark.parametrize("kind", MODULES)
def test_each_pruner_of_a_loop_has_its_own_state(kind, spaces, tmp_path):
    one = Two(kind, spaces)
    one.step()
    one.step([0])
    one.save(tmp_path)
    two = Two(kind, spaces)
    two.load(tmp_path)
    assert [it.epoch for it in two.pruners] == [2, 1]
    assert len(one.masks) == len(two.masks)
    assert all(torch.equal(a, b) for a, b in zip(one.masks, two.masks, strict=True))
    ours, theirs = ([value for net in it.nets for value in net.parameters()] for it in (one, two))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", MODULES)
def test_other_pruners_than_those_that_were_saved_are_refused_and_nothing_changes(kind, tmp_path):
    one = Two(kind, ("channels", "channels"))
    one.step()
    one.save(tmp_path)
    other = Two(kind, ("channels", "weights"))  # the first would fit
    before = [value.clone() for net in other.nets for value in net.parameters()]
    with pytest.raises(keepk.errors.StateError, match="has spaces"):
        other.load(tmp_path)
    after = [value for net in other.nets for value in net.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert [it.epoch for it in other.pruners] == [0, 0]


@pytest.mark.parametrize(("loop", "words"), [(WithAccelerate, "prepared 1"), (WithFabric, "passed the models of 1")])
def test_another_number_of_pruners_is_refused(loop, words, tmp_path):
    two = Two(accelerate if loop is WithAccelerate else fabric)
    two.save(tmp_path)
    one = loop()
    load = (
        partial(one.accelerator.load_state, str(tmp_path))
        if loop is WithAccelerate
        else partial(one.pruning.load, tmp_path / "last.ckpt", {"one": one.model})
    )
    with pytest.raises(CheckpointError, match=f"has the states of 2 Pruners.*, and you have {words}"):
        load()
    assert one.pruning.pruner.epoch == 0


def test_fabric_writes_pruners_into_separate_files(tmp_path):
    """Each file has the state of the Pruner whose model it has."""
    one = Two(fabric)
    one.step()
    for place in (0, 1):
        one.prunings[place].save(tmp_path / f"{place}.ckpt", {"model": one.models[place]})
    two = Two(fabric)
    two.prunings[1].load(tmp_path / "1.ckpt", {"model": two.models[1]})
    assert [it.epoch for it in two.pruners] == [0, 1]
    two.prunings[0].load(tmp_path / "0.ckpt", {"model": two.models[0]})
    assert all(torch.equal(a, b) for a, b in zip(one.masks, two.masks, strict=True))


def test_models_that_are_prepared_in_another_order_are_refused(tmp_path):
    one = Two(accelerate)
    one.step()
    one.save(tmp_path)
    two = Two(accelerate)
    two.loop._models.reverse()
    with pytest.raises(CheckpointError, match=r"model number 1, .* is now number 2.*Prepare the same models"):
        two.load(tmp_path)
    assert [it.epoch for it in two.pruners] == [0, 0]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_checkpoint_of_one_pruner_has_the_form_that_it_always_had(loop, tmp_path):
    """Checkpoints written before there could be several Pruners have one state, which is not in a list."""
    first = loop()
    first.step()
    first.save(tmp_path)
    plain = {"pruner": first.pruning.pruner.state_dict(), "statistics": []}
    if loop is WithAccelerate:
        keepk.save_checkpoint(tmp_path / "keepk", extra={"step": 0, **plain})
    else:
        found = first.fabric.load(tmp_path / "last.ckpt")
        first.fabric.save(tmp_path / "last.ckpt", {**found, "keepk": plain})
    again = loop(tmp_path)
    assert again.pruning.pruner.epoch == 1
    assert again.net[0].out_features == EVENTS[0]


# Interrupted saves


@pytest.fixture
def breaking(monkeypatch):
    """Lets save_state fail before it writes any weights."""

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    def broken(save):
        with monkeypatch.context() as patched:
            patched.setattr("accelerate.accelerator.save_accelerator_state", fail)
            with pytest.raises(OSError, match="No space"):
                save()

    return broken


def moved(net):
    with torch.no_grad():
        net[3].weight.add_((net[3].weight != 0) * 0.5)


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("event", [True, False])
def test_an_interrupted_save_into_an_old_checkpoint_is_not_loaded(event, safe, breaking, tmp_path):
    loop = WithAccelerate()
    loop.step()
    loop.accelerator.save_state(str(tmp_path), safe_serialization=safe)
    fresh = WithAccelerate()
    fresh.accelerator.load_state(str(tmp_path))
    assert fresh.pruning.pruner.epoch == 1
    loop = WithAccelerate()
    loop.step()
    if event:
        loop.step()
    moved(loop.net)
    breaking(lambda: loop.accelerator.save_state(str(tmp_path), safe_serialization=safe))
    fresh = WithAccelerate()
    name = "model.safetensors" if safe else "pytorch_model.bin"
    words = rf"{name} has other weights than those that were saved with keepk/\. .* Pass another checkpoint"
    for load in (fresh.pruning.resume, fresh.accelerator.load_state):
        with pytest.raises(CheckpointError, match=words):
            load(str(tmp_path))
    assert fresh.pruning.pruner.epoch == 0
    assert fresh.net[0].out_features == 24


def test_a_first_save_that_was_interrupted_is_not_loaded(breaking, tmp_path):
    loop = WithAccelerate()
    loop.step()
    breaking(lambda: loop.accelerator.save_state(str(tmp_path)))
    fresh = WithAccelerate()
    for load in (fresh.pruning.resume, fresh.accelerator.load_state):
        with pytest.raises(CheckpointError, match=r"has no weights, .* interrupted\. Pass another checkpoint"):
            load(str(tmp_path))
    assert fresh.net[0].out_features == 24


def test_a_save_that_was_interrupted_after_the_weights_is_not_loaded(tmp_path, monkeypatch):
    """The optimizer's state is that of an older save."""
    loop = WithAccelerate()
    loop.step()
    loop.accelerator.save_state(str(tmp_path))
    monkeypatch.setattr(loop.optimizer, "state_dict", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loop.accelerator.save_state(str(tmp_path))
    fresh = WithAccelerate()
    with pytest.raises(CheckpointError, match=r"has no random_states_0\.pkl, .* interrupted\. Pass another"):
        fresh.accelerator.load_state(str(tmp_path))
    assert fresh.net[0].out_features == 24


def test_weights_that_hooks_of_the_user_save_are_loaded(tmp_path):
    """As in the training scripts of diffusers: these hooks take the weights out of Accelerate's list."""

    def save(models, weights, folder):
        torch.save(weights.pop(), f"{folder}/mine.pth")
        assert len(models) == 1

    def load(models, folder):
        models.pop().load_state_dict(torch.load(f"{folder}/mine.pth"))

    one = WithAccelerate()
    one.accelerator.register_save_state_pre_hook(save)
    one.accelerator.register_load_state_pre_hook(load)
    one.step()
    one.accelerator.save_state(str(tmp_path))
    assert not (tmp_path / "model.safetensors").exists()
    two = WithAccelerate()
    two.accelerator.register_load_state_pre_hook(load)
    two.accelerator.load_state(str(tmp_path))
    assert two.net[0].out_features == EVENTS[0]
    assert torch.equal(one.net[0].weight, two.net[0].weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.bool])
def test_digests_are_those_of_names_and_bits(dtype):
    one = {"a": torch.ones(3, 4, dtype=dtype), "b": torch.zeros((), dtype=dtype), "c": torch.zeros(0, 2, dtype=dtype)}
    other = {name: value.clone() for name, value in one.items()}
    assert digests(one) == digests(other)
    assert set(digests(one)) == {"a", "b", "c"}
    assert digests({"a": one["a"].T.contiguous().T}) == digests({"a": one["a"]})
    other["a"][1, 2] = 0
    assert digests(one)["a"] != digests(other)["a"]
    assert digests({"a": one["a"].reshape(4, 3)}) != digests({"a": one["a"]})
    assert digests({"a": 1}) == {}


# Misuse


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"strict": False}])
@pytest.mark.parametrize("others", [{}, {"more": 3}])
def test_a_checkpoint_of_fabric_without_pruning_changes_nothing(options, others, tmp_path):
    loop = WithFabric()
    state = {"model": loop.model, "epoch": 3}
    loop.fabric.save(tmp_path / "plain.ckpt", state)
    fresh = WithFabric()
    moved(fresh.net)
    before = [value.clone() for value in fresh.net.parameters()]
    state = {"model": fresh.model, "epoch": 0, **others}
    with pytest.raises(CheckpointError, match=r"was not written by the save of keepk\.integrations\.fabric"):
        fresh.pruning.load(tmp_path / "plain.ckpt", state, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.net.parameters(), strict=True))
    assert state["epoch"] == 0


def test_an_item_that_fabric_has_not_saved_is_fabrics_error(tmp_path):
    loop = WithFabric()
    loop.pruning.save(tmp_path / "last.ckpt", {"model": loop.model})
    with pytest.raises(KeyError, match="more"):
        loop.pruning.load(tmp_path / "last.ckpt", {"model": loop.model, "more": 3})
    assert loop.pruning.load(tmp_path / "last.ckpt", {"model": loop.model, "more": 3}, strict=False) == {}


def test_the_key_of_pruning_in_a_state_of_fabric_is_refused(tmp_path):
    loop = WithFabric()
    state = {"model": loop.model, "keepk": "mine"}
    with pytest.raises(KeepkError, match=r"save: state has a 'keepk', .* Rename it"):
        loop.pruning.save(tmp_path / "last.ckpt", state)
    assert not list(tmp_path.iterdir())
    loop.pruning.save(tmp_path / "last.ckpt", {"model": loop.model})
    with pytest.raises(KeepkError, match=r"load: state has a 'keepk', .* Rename it"):
        loop.pruning.load(tmp_path / "last.ckpt", state)


@pytest.mark.parametrize("kind", MODULES)
def test_a_step_with_another_model_is_refused(kind):
    two = Two(kind)
    for other, name in ((two.models[1], "Sequential"), (two.nets[0][0], "Linear"), ("nonsense", "str"), (None, "None")):
        with pytest.raises(KeepkError, match=rf"step: got .*{name}.*\. Pass the "):
            two.prunings[0].step(other)
    assert [it.epoch for it in two.pruners] == [0, 0]
    two.step([0])
    two.step([0])
    with pytest.raises(KeepkError, match="step: got "):  # after the end of the plan too
        two.prunings[0].step(two.models[1])


def test_a_step_with_a_wrapper_of_the_pruned_module_is_accepted():
    two = Two(accelerate)
    wrapper = nn.DataParallel(two.nets[0])
    assert two.prunings[0].step(wrapper) is wrapper


def test_a_step_with_a_part_of_the_pruned_module_is_accepted():
    """A Pruner over two networks, which are prepared one by one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    both = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})
    loop, pruner = Accelerator(cpu=True), keepk.Pruner(both, keepk.weights("*.weight", keep=7))
    model, _ = loop.prepare(both["one"], both["two"])
    assert accelerate.prepare(loop, pruner).step(model) is model
    assert pruner.kept == {"*.weight": 7}
