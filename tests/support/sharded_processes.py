"""The script that `tests/run/test_sharded_processes.py` runs in two and three gloo processes, over sharded models.

Every rank asserts, and prints a line at the end. The oracle is one process: a plain copy of the model with the same
weights, pruned by a Pruner of its own.
"""

import copy
import os
import sys
import time
import warnings
import weakref
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import keepk
from keepk.errors import (
    CheckpointError,
    DisagreementError,
    KeepkError,
    OptimizerError,
    RankError,
    ShrinkError,
    SpaceError,
    StateError,
)
from keepk.model.sharded import gathered, same_sharding

SMALL = keepk.Cubic(epochs=3)


class Traffic:
    """Counts the all-reduces of this process and the largest of them."""

    def __init__(self):
        self.count, self.largest, self._all_reduce = 0, 0, dist.all_reduce

    def __enter__(self):
        dist.all_reduce = self._counted
        return self

    def __exit__(self, *_):
        dist.all_reduce = self._all_reduce

    def _counted(self, tensor, *args, **kwargs):
        self.count, self.largest = self.count + 1, max(self.largest, tensor.nbytes)
        return self._all_reduce(tensor, *args, **kwargs)


def mlp(dtype=torch.float32, levels=0, seed=0):
    """A network of odd sizes. With `levels`, its weights have only so many values, zeros and ties among them."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    with torch.no_grad():
        for parameter in net.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((values * levels).round() / levels if levels else values)
    return net


def fsdp(net, **options):
    for layer in (net[0], net[2]):
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def tensor_parallel(net):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})  # "4" stays plain


def columns(net):
    """Weights by columns, biases replicated, the last layer by rows."""
    return placed(net, lambda name, it: Shard(0) if name.startswith("4") else Shard(1) if it.dim() > 1 else Replicate())


def placed(net, placement):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for path, module in net.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            places = [placement(f"{path}.{name}", parameter)]
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, places)))
    return net


def hybrid(net):
    """Shards in one dim of the mesh and replicas in the other, of size 1 in one of both."""
    world = dist.get_world_size()
    return fsdp(net, mesh=init_device_mesh("cpu", (1, world) if world == 3 else (world, 1), mesh_dim_names=("r", "s")))


LAYOUTS = [fsdp, tensor_parallel, columns, hybrid]


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain_copy(net, dtype=torch.float32):
    """A plain model with the weights of a sharded one."""
    twin = mlp(dtype)
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), net.parameters(), strict=True):
            mine.copy_(whole(theirs))
            if theirs.grad is not None:
                mine.grad = whole(theirs.grad)
    return twin


def assert_same_masks(pruner, oracle):
    assert pruner.masks.keys() == oracle.masks.keys()
    for name, mask in pruner.masks.items():
        assert torch.equal(whole(mask.int()), oracle.masks[name].int()), name
    assert pruner.kept == oracle.kept


def assert_zero(net, pruner):
    """Every masked weight is 0.0 in the shards of this rank."""
    for name, mask in pruner.masks.items():
        assert not whole(net.get_parameter(name))[~whole(mask.int()).bool()].any()


# Weights --------------------------------------------------------------------------------------------------------------


def masks_are_those_of_one_process():
    for layout in LAYOUTS:
        for dtype, levels, keep, floor in (
            (torch.float32, 0, 40, 0),
            (torch.float32, 2, 64, 3),
            (torch.bfloat16, 3, 40, 0),
            (torch.float64, 2, 40, 0),
            (torch.float16, 0, 1, 0),
        ):
            net, twin = layout(mlp(dtype, levels)), mlp(dtype, levels)
            space = keepk.weights("*", keep=keep, layer_floor=floor, schedule=[120, keep])
            pruner, oracle = keepk.Pruner(net, space), keepk.Pruner(twin, space)
            for _ in range(2):
                with Traffic() as traffic:
                    pruner.step()
                oracle.step()
                assert_same_masks(pruner, oracle)
                assert_zero(net, pruner)
                if not floor and dtype != torch.float64:
                    assert traffic.count <= 3, (layout, dtype, traffic.count)
                assert traffic.largest < 1_000_000
            assert pruner.report().masked == oracle.report().masked
            assert [it.weights_kept for it in pruner.report().layers] == [
                it.weights_kept for it in oracle.report().layers
            ]
            assert pruner.certificate == oracle.certificate


def large_ties_by_columns():
    """Ties in a tensor of many entries that is sharded by columns need further sums, each below 1 MB."""
    net = nn.Linear(601, 701, bias=False)
    with torch.no_grad():
        net.weight.fill_(0.5)
    twin = copy.deepcopy(net)
    placed(net, lambda *_: Shard(1))
    space = keepk.weights("*", keep=123_457)
    pruner, oracle = keepk.Pruner(net, space), keepk.Pruner(twin, space)
    with Traffic() as traffic:
        pruner.step()
    oracle.step()
    assert traffic.count == 4
    assert traffic.largest < 1_000_000
    assert_same_masks(pruner, oracle)


def metrics_see_whole_tensors():
    def taylor(weight):
        return weight * weight.grad  # signed: the lowest ones go

    for metric in (keepk.metrics.lamp, keepk.metrics.random(seed=1), taylor):
        for layout in (fsdp, columns):
            net = layout(mlp(levels=2))
            x = torch.ones(2, 7)
            if layout is columns:
                x = DTensor.from_local(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Replicate()])
            net(x).square().mean().backward()
            twin = plain_copy(net)
            space = keepk.weights("*", keep=50, metric=metric)
            pruner, oracle = keepk.Pruner(net, space), keepk.Pruner(twin, space)
            pruner.step()
            oracle.step()
            assert_same_masks(pruner, oracle)


def train(net, optimizer, step, accumulate=1, dtype=torch.float32):
    for part in range(accumulate):
        torch.manual_seed(10 * step + part)
        if accumulate > 1 and hasattr(net, "set_requires_gradient_sync"):
            net.set_requires_gradient_sync(part == accumulate - 1)
        net(torch.randn(8, 7, dtype=dtype)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def training_is_that_of_one_process():
    exact = dist.get_world_size() == 2  # a mean over three equal gradients is rounded
    for make, options, accumulate in (
        (torch.optim.AdamW, {}, 1),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}, 2),
        (torch.optim.Adam, {"foreach": False}, 1),
    )[: 3 if exact else 1]:
        net, twin = fsdp(mlp()), mlp()
        optimizers = [make(it.parameters(), lr=0.03, **options) for it in (net, twin)]
        space = keepk.weights("*.weight", keep=33, schedule=SMALL)
        pruner, oracle = (
            keepk.Pruner(it, space, optimizer) for it, optimizer in zip((net, twin), optimizers, strict=True)
        )
        for step in range(5):
            train(net, optimizers[0], step, accumulate)
            train(twin, optimizers[1], step, accumulate)
            if not exact:
                with torch.no_grad():
                    for mine, theirs in zip(twin.parameters(), net.parameters(), strict=True):
                        mine.copy_(whole(theirs))
            assert_zero(net, pruner)
            with torch.no_grad():
                net(torch.ones(2, 7))  # leaves the parameters of the outermost module gathered
            pruner.step()
            oracle.step()
            assert_same_masks(pruner, oracle)
            for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
                assert torch.equal(whole(parameter), other) or not exact
                for key, value in optimizers[0].state[parameter].items():
                    if isinstance(value, DTensor):
                        expected = optimizers[1].state[other][key]
                        assert torch.equal(whole(value), expected) or not exact
                        mask = whole(pruner.masks.get(parameter_name(net, parameter), torch.tensor(1)).int()).bool()
                        assert not (whole(value) * ~mask).any() or step >= pruner.epochs  # after the last event


def parameter_name(net, wanted):
    return next(name for name, parameter in net.named_parameters() if parameter is wanted)


def other_ways_to_train():
    """Mixed precision, CPU offload, bfloat16 parameters: masks are those of one process with the same weights."""
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options, dtype in (
        ({"mp_policy": mixed}, torch.float32),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, torch.float32),
        ({}, torch.bfloat16),
        ({"reshard_after_forward": False}, torch.float32),
    ):
        net = fsdp(mlp(dtype), **options)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.03)
        pruner = keepk.Pruner(net, keepk.weights("*.weight", keep=33, schedule=SMALL), optimizer)
        state = None
        for step in range(4):
            train(net, optimizer, step, dtype=dtype)
            assert_zero(net, pruner)
            twin = plain_copy(net, dtype)
            oracle = keepk.Pruner(twin, keepk.weights("*.weight", keep=33, schedule=SMALL))
            if state is not None:
                oracle.load_state_dict(state)
            pruner.step()
            oracle.step()
            assert_same_masks(pruner, oracle)
            state = oracle.state_dict()
            assert_zero(net, pruner)
        assert pruner.kept == {"*.weight": 33}


def followers_and_states():
    net = fsdp(mlp())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    average = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    pruner = keepk.Pruner(net, keepk.weights("*", keep=30, schedule=SMALL), optimizer, followers=[average])
    pruner.step()
    for name, mask in pruner.masks.items():
        assert not whole(average[name])[~whole(mask.int()).bool()].any()
    state = pruner.state_dict()
    for layout in LAYOUTS:
        other = layout(mlp())
        space = keepk.weights("*", keep=30, schedule=SMALL)
        resumed = keepk.Pruner(other, space, example=torch.zeros(2, 7))
        resumed.load_state_dict(state)
        # Only FSDP2 can be taken off a copy to count MACs.
        assert resumed.report().macs == (7 * 11 + 11 * 5 + 5 if layout in (fsdp, hybrid) else None)
        assert_zero(other, resumed)
        assert resumed.kept == pruner.kept
    # A state of one process, with whole masks, and back.
    twin = mlp()
    oracle = keepk.Pruner(twin, keepk.weights("*", keep=30, schedule=SMALL))
    oracle.load_state_dict(
        {**state, "masks": {name: whole(mask.int()).bool() for name, mask in state["masks"].items()}}
    )
    assert_same_masks(pruner, oracle)
    pruner.load_state_dict(oracle.state_dict())
    assert_same_masks(pruner, oracle)
    # One process alone may ask for counts: that does not communicate.
    if dist.get_rank() == 0:
        assert pruner.kept == {"*": [30, oracle.kept["*"]][1]}
        assert str(pruner.report())
    # Weights that come back are seen where they are, and zeroed again.
    with torch.no_grad():
        net[0].weight.to_local().fill_(1.0)
    with pytest.warns(keepk.KeepkWarning, match="pruned"):
        assert pruner.kept["*"] > oracle.kept["*"]
    pruner.apply_masks()
    assert pruner.kept == oracle.kept
    damaged = {**state, "masks": {**state["masks"], "0.weight": state["masks"]["0.bias"]}}
    with pytest.raises(
        StateError if dist.get_rank() == 0 else (StateError, DisagreementError),
        match=r"'0\.weight'|rank \d: failed to load the state",
    ):
        pruner.load_state_dict(damaged)


def refusals():
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    net = nn.Linear(6, 6)
    net.weight = nn.Parameter(DTensor.from_local(torch.ones(6, 6), mesh, [Partial()]))
    with pytest.raises(SpaceError, match=r"parameter 'weight' is a DTensor with placement Partial .* Only Shard and"):
        keepk.Pruner(net, keepk.weights("weight", keep=3))
    if world == 3:
        group = dist.new_group([0, 1])
        if rank < 2:
            small = DeviceMesh.from_group(group, "cpu")
            net.weight = nn.Parameter(DTensor.from_local(torch.ones(3, 6), small, [Shard(0)]))
            with pytest.raises(SpaceError, match=r"on a mesh of 2 of the 3 processes. Use a mesh of all"):
                keepk.Pruner(net, keepk.weights("weight", keep=3))
    net = fsdp(mlp())
    statistics = keepk.Statistics(net)
    with pytest.raises(SpaceError, match=r"metric Fisher reads statistics, which are not collected over shards"):
        keepk.Pruner(net, keepk.weights("*", keep=3, metric=keepk.metrics.fisher(statistics)))
    with pytest.raises(ShrinkError, match=r"followers\[0\]: '0.weight' is not sharded over processes like the model's"):
        keepk.Pruner(net, keepk.weights("*", keep=3), followers=[mlp()])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net[0].weight]["momentum_buffer"] = torch.zeros(11, 7)
    with pytest.raises(
        OptimizerError, match=r"'momentum_buffer' of '0.weight' is of shape \(11, 7\), not sharded like"
    ):
        keepk.Pruner(net, keepk.weights("*", keep=3), optimizer)


def failures_reach_every_process():
    """A rank that fails, differs or has drifted is named on all ranks; nothing has changed, and the run continues."""
    last = dist.get_world_size() - 1
    mine = dist.get_rank() == last
    net = fsdp(mlp())
    pruner = keepk.Pruner(net, keepk.weights("*", keep=9, schedule=[50, 9]))
    before = [whole(parameter) for parameter in net.parameters()]
    # In the middle of a decision: NaN in one shard.
    shard = net[0].weight.to_local()
    kept = shard.detach().clone()
    if mine:
        with torch.no_grad():
            shard.fill_(float("nan"))
    with pytest.raises(RankError if mine else DisagreementError, match=rf"'0.weight'|rank {last}: failed to decide"):
        pruner.step()
    with torch.no_grad():
        shard.copy_(kept)
    # Before it: a module was replaced in one process.
    if mine:
        net.add_module("2", nn.Linear(11, 5))
    with pytest.raises(SpaceError if mine else DisagreementError, match=rf"'2.weight'|rank {last}: failed to decide"):
        pruner.step()
    assert pruner.epoch == 0
    # Other spaces.
    net = fsdp(mlp())
    pruner = keepk.Pruner(net, keepk.weights("*", keep=9 + mine, schedule=[50 + mine, 9 + mine]))
    with pytest.raises(DisagreementError, match=rf"rank {last}: is not at the same point of the run as rank 0"):
        pruner.step()

    # A metric that fails in one process.
    def metric(weight):
        return weight.abs() if not mine else None

    pruner.close()
    pruner = keepk.Pruner(net, keepk.weights("*", keep=9, metric=metric))
    with pytest.raises(RankError if mine else DisagreementError, match=rf"returned|rank {last}: failed to decide"):
        pruner.step()
    pruner.close()
    # While it is carried out.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    pruner = keepk.Pruner(net, keepk.weights("*", keep=9), optimizer)
    train(net, optimizer, 0)
    before = [whole(parameter) for parameter in net.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        if mine:
            patch.setattr(pruner._session, "_hold", out_of_memory)
        with pytest.raises(MemoryError if mine else DisagreementError, match=r"none left|failed while the event"):
            pruner.step()
    assert all(torch.equal(whole(it), old) for it, old in zip(net.parameters(), before, strict=True))
    pruner.step()
    assert pruner.kept == {"*": 9}
    # Replicas that have drifted.
    net = columns(mlp())
    pruner = keepk.Pruner(net, keepk.weights("*", keep=60))
    if mine:
        with torch.no_grad():
            net[0].bias.to_local().zero_()
    with pytest.raises(DisagreementError, match=r"rank \d: selected different units than rank \d"):
        pruner.step()


# Channels -------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions with BatchNorms and a residual sum, then linear layers, all of odd sizes; two tied weights."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(7, 9, 3, padding=1), nn.ReLU(), nn.Conv2d(9, 7, 3, padding=1))
        self.hidden, self.head = nn.Linear(7 * 4, 11), nn.Linear(11, 3)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.block(x)
        return self.head(self.hidden(x.flatten(1)).relu())


PICTURES = torch.zeros(2, 3, 2, 2)


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def shard(model):
    for part in (model.stem, model.block, model.hidden):
        fully_shard(part)
    return fully_shard(model)


def optimizer_of(model, make=torch.optim.AdamW, **options):
    """Two groups, one of them without weight decay."""
    thin = [it for it in model.parameters() if it.dim() == 1]
    thick = [it for it in model.parameters() if it.dim() > 1]
    return make([{"params": thick}, {"params": thin, "weight_decay": 0.0}], lr=0.01, **options)


def fit(model, optimizer, step):
    torch.manual_seed(step)
    model(torch.randn(6, 3, 2, 2)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_equal_models(model, twin, optimizers, exact):
    """The same weights, gradients aside, and the same state in the optimizers, in the same groups."""
    close = torch.equal if exact else lambda one, two: torch.allclose(one, two, rtol=1e-4, atol=1e-6)
    own, others = dict(model.named_parameters()), dict(twin.named_parameters())
    assert own.keys() == others.keys()
    for name, parameter in own.items():
        assert isinstance(parameter, DTensor), name
        assert close(whole(parameter), others[name]), name
        states = [optimizer.state[it] for optimizer, it in zip(optimizers, (parameter, others[name]), strict=True)]
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            assert close(whole(value), states[1][key]), (name, key)
    for name, buffer in model.named_buffers():
        assert close(buffer, twin.get_buffer(name)), name
    groups = [[[tuple(it.shape) for it in group["params"]] for group in it.param_groups] for it in optimizers]
    assert groups[0] == groups[1]
    assert {id(it) for group in optimizers[0].param_groups for it in group["params"]} == {*map(id, model.parameters())}
    assert set(optimizers[0].state) == set(model.parameters())


def channels_are_cut_as_in_one_process():
    exact = dist.get_world_size() == 2
    spaces = lambda: [keepk.channels("*", keep=16, schedule=[24, 20, 16], metric=keepk.metrics.l2)]  # noqa: E731
    for make, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}))[: 1 + exact]:
        model, twin = shard(net()), net()
        modules = [*model.modules()]
        optimizers = [optimizer_of(it, make, **options) for it in (model, twin)]
        schedulers = [torch.optim.lr_scheduler.StepLR(it, 2, 0.5) for it in optimizers]
        average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        pruner = keepk.Pruner(model, spaces(), optimizers[0], example=PICTURES, followers=[average])
        oracle = keepk.Pruner(twin, spaces(), optimizers[1], example=PICTURES)
        for step in range(4 if make is torch.optim.AdamW else 2):
            fit(model, optimizers[0], step)
            fit(twin, optimizers[1], step)
            for it in schedulers:
                it.step()
            if not exact:
                copy_state(model, twin, optimizers)
            with torch.no_grad():
                model(PICTURES)  # leaves the parameters of the outermost module gathered
                twin(PICTURES)
            assert pruner.step(model, wrap=shard) is model
            oracle.step()
            assert pruner.kept == oracle.kept
            assert pruner.state_dict()["channels"] == oracle.state_dict()["channels"]
            assert [*model.modules()] == modules
            assert_equal_models(model, twin, optimizers, exact)
            assert str(pruner.report()) == str(oracle.report())
            assert all(average[name].shape == it.shape for name, it in model.named_parameters())
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        assert model.hidden.out_features == twin.hidden.out_features < 11


def copy_state(model, twin, optimizers):
    """Make the model in one process the same again, where a mean over three equal gradients was rounded."""
    with torch.no_grad():
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            mine.copy_(whole(theirs))
            for key, value in optimizers[0].state[theirs].items():
                optimizers[1].state[mine][key].copy_(whole(value))
        for mine, theirs in zip(twin.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)


@contextmanager
def one_whole_tensor_at_a_time():
    """Fail if a tensor is gathered for a cut while an earlier one is still in memory."""
    seen = list[weakref.ref[torch.Tensor]]()

    def counted(tensor):
        assert all(found() is None for found in seen)
        result = gathered(tensor)
        seen.append(weakref.ref(result))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("keepk.cut.sharded.gathered", counted)
        yield seen


def other_channel_runs():
    """Budgets, mixed precision, CPU offload, frozen layers, modules that are sharded as a group."""
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for options in ({"mp_policy": mixed}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):

        def wrap(model, options=options):
            fully_shard([model.block, model.hidden], **options)
            fully_shard(model)  # BatchNorm on a CPU does not take bfloat16 weights

        model = net()
        wrap(model)
        optimizer = optimizer_of(model)
        phases = [keepk.Phase(2, prune=["*"], freeze=["head.*"]), keepk.Phase(1, prune=["*"])]
        space = keepk.channels("*", macs=0.5, schedule=keepk.Cubic(epochs=3))
        pruner = keepk.Pruner(model, space, optimizer, example=PICTURES, phases=phases)
        head = whole(model.head.bias)
        for step in range(3):
            fit(model, optimizer, step)
            assert torch.equal(head, whole(model.head.bias)) == (step < 2)
            if step == 0:
                twin = net()
                twin.load_state_dict({name: whole(it) for name, it in model.state_dict().items()})
                oracle = keepk.Pruner(twin, space, example=PICTURES, phases=phases, optimizer=())
                assert oracle.implied == pruner.implied
            with one_whole_tensor_at_a_time() as cuts:
                pruner.step(model, wrap=wrap)
        assert len(cuts) > 5
        assert pruner.budgets["*"]["reached"] <= pruner.budgets["*"]["asked"]
        fit(model, optimizer, 3)


def channels_resume():
    """A state is loaded into a new model, sharded or not; both go on as the first one does."""
    space = keepk.channels("*", keep=16, schedule=[24, 16])
    model = shard(net())
    optimizer = optimizer_of(model)
    pruner = keepk.Pruner(model, space, optimizer, example=PICTURES)
    fit(model, optimizer, 0)
    pruner.step(model, wrap=shard)
    state = pruner.state_dict()
    other = shard(net(seed=1))
    resumed = keepk.Pruner(other, space, optimizer_of(other), example=PICTURES)
    with pytest.raises(StateError, match=r"pruner.load_state_dict\(state, wrap=shard\)"):
        resumed.load_state_dict(state)
    resumed.load_state_dict(state, wrap=shard)
    assert resumed.kept == pruner.kept
    shapes = {name: it.shape for name, it in model.state_dict().items()}
    assert {name: it.shape for name, it in other.state_dict().items()} == shapes
    plain = net()
    alone = keepk.Pruner(plain, space, example=PICTURES)
    alone.load_state_dict(state)
    assert {name: it.shape for name, it in plain.state_dict().items()} == shapes


def channels_are_refused():
    space = keepk.channels("*", keep=20)
    model = shard(net())
    optimizer = optimizer_of(model)
    both = [space, keepk.weights("head.weight", keep=3)]
    with pytest.raises(SpaceError, match=r"channels and weights cannot be pruned by one Pruner. Prune channels first"):
        keepk.Pruner(model, both, optimizer, example=PICTURES)
    with pytest.raises(SpaceError, match=r"channels cannot be masked, so shrink='end' is not possible"):
        keepk.Pruner(model, space, optimizer, example=PICTURES, shrink="end")
    with pytest.raises(ShrinkError, match=r"followers\[0\]: got FSDPNet, but the model is sharded"):
        keepk.Pruner(model, space, optimizer, example=PICTURES, followers=[shard(net())])
    with pytest.raises(
        SpaceError, match=r"parameter '0.weight' is not sharded by fully_shard .* Prune channels before"
    ):
        keepk.Pruner(tensor_parallel(mlp()), keepk.channels("0", keep=3), example=torch.zeros(2, 7))
    pruner = keepk.Pruner(model, space, optimizer, example=PICTURES)
    fit(model, optimizer, 0)
    before = [whole(it) for it in model.parameters()]
    objects = [*model.parameters()]
    with pytest.raises(ShrinkError, match=r"Pass the function that does so: model = pruner.step\(model, wrap=shard\)"):
        pruner.step(model)
    with pytest.raises(ShrinkError, match=r"step: got Net, which is not the Pruner's model"):
        pruner.step(net(), wrap=shard)
    with pytest.raises(ShrinkError, match=r"wrap= left Parameter of shape .* fully_shard with the same mesh"):
        pruner.step(model, wrap=lambda it: fully_shard(it.block))
    model.set_requires_gradient_sync(False)
    model(torch.randn(6, 3, 2, 2)).square().mean().backward()
    with pytest.raises(ShrinkError, match=r"FSDP2 holds gradients that were accumulated .* Call step\(\) after"):
        pruner.step(model, wrap=shard)
    model.set_requires_gradient_sync(True)
    model(torch.randn(6, 3, 2, 2)).square().mean().backward()
    optimizer.zero_grad()
    # A wrap that fails in one process: the model is as it was in all of them, and can be trained.
    last = dist.get_rank() == dist.get_world_size() - 1
    failing = (lambda it: shard(it) and out_of_memory()) if last else shard
    with pytest.raises(
        MemoryError if last else DisagreementError, match=r"none left|failed while the event was carried"
    ):
        pruner.step(model, wrap=failing)
    assert all(one is two for one, two in zip(model.parameters(), objects, strict=True))
    assert all(torch.equal(whole(it), old) for it, old in zip(model.parameters(), before, strict=True))
    assert model.hidden.out_features == 11
    fit(model, optimizer, 1)
    pruner.step(model, wrap=shard)
    fit(model, optimizer, 2)
    assert pruner.kept == {"*": 20}
    plain = net()
    with pytest.raises(ShrinkError, match=r"wrap= is for models that are sharded over processes, and this one is not"):
        keepk.Pruner(plain, space, example=PICTURES).step(plain, wrap=shard)


class Tied(nn.Module):
    """Two layers with one weight, which a state_dict has under both names."""

    def __init__(self):
        super().__init__()
        self.first, self.back, self.second = nn.Linear(7, 11), nn.Linear(11, 7), nn.Linear(7, 11)
        self.second.weight = self.first.weight
        self.head = nn.Linear(11, 3)

    def forward(self, x):
        return self.head(self.second(self.back(self.first(x).relu())).relu())


def tied(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Tied()


def partly(model):
    """Shard the first layer only; the other parameters stay plain, and every process has them."""
    fully_shard(model[0])
    return model


def all_but_the_last(model):
    return fully_shard(model, ignored_params={*model[4].parameters()})


def plain_parameters_are_cut_beside_sharded_ones():
    """With their state in the optimizer, their gradients and their followers, like those of one process."""
    for wrap, make in (
        (partly, torch.optim.AdamW),
        (partly, lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)),
        (all_but_the_last, torch.optim.AdamW),
    ):
        model, twin = wrap(mlp()), mlp()
        optimizers = [make(it.parameters()) for it in (model, twin)]
        averages = [{name: it.detach().clone() for name, it in each.named_parameters()} for each in (model, twin)]
        space = keepk.channels("*", keep=8, schedule=[12, 8])
        pruners = [
            keepk.Pruner(each, space, optimizer, example=torch.zeros(2, 7), followers=[average])
            for each, optimizer, average in zip((model, twin), optimizers, averages, strict=True)
        ]
        for step in range(3):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                torch.manual_seed(step)
                x = torch.randn(8, 7)

                def closure(each=each, optimizer=optimizer, x=x):
                    optimizer.zero_grad()
                    loss = each(x).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            if step < 2:
                for it in optimizers:
                    it.zero_grad(set_to_none=step == 1)
                pruners[0].step(model, wrap=wrap)
                pruners[1].step()
            for (name, it), other in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(whole(it), other), name
                assert whole(averages[0][name]).shape == averages[1][name].shape, name
                states = [optimizers[0].state[it], optimizers[1].state[other]]
                assert states[0].keys() == states[1].keys()
                assert all(
                    torch.equal(whole(value), states[1][key])
                    for key, value in states[0].items()
                    if isinstance(value, torch.Tensor)
                ), name
        assert pruners[0].kept == pruners[1].kept == {"*": 8}
        assert isinstance(model[0].weight, DTensor)
        assert not isinstance(model[4].weight, DTensor)


def wrap_has_to_shard_the_same_parameters():
    """A wrap= that shards more than before would leave the optimizer with parameters that the model lost."""
    model = partly(mlp())
    optimizer = torch.optim.AdamW(model.parameters())
    pruner = keepk.Pruner(model, keepk.channels("*", keep=8), optimizer, example=torch.zeros(2, 7))
    train(model, optimizer, 0)
    objects, before = [*model.parameters()], [whole(it) for it in model.parameters()]
    moments = [whole(optimizer.state[it]["exp_avg"]) for it in objects]
    last = dist.get_rank() == dist.get_world_size() - 1
    for wrap, error, words in (
        (fsdp, ShrinkError, r"wrap= left DTensor .* where the model had a plain parameter .* '2.weight'"),
        (out_of_memory if last else partly, MemoryError if last else DisagreementError, "none left|failed while"),
    ):
        with pytest.raises(error, match=words):
            pruner.step(model, wrap=wrap)
        assert all(one is two for one, two in zip(model.parameters(), objects, strict=True))
        assert all(torch.equal(whole(it), old) for it, old in zip(model.parameters(), before, strict=True))
        now = [whole(optimizer.state[it]["exp_avg"]) for it in objects]
        assert all(torch.equal(one, two) for one, two in zip(now, moments, strict=True))
    pruner.step(model, wrap=partly)
    train(model, optimizer, 1)
    assert pruner.kept == {"*": 8}


def followers_are_cut_under_all_names():
    model, twin = fully_shard(tied()), tied()
    averages = [{name: it.detach().clone() for name, it in each.state_dict().items()} for each in (model, twin)]
    for each, average in zip((model, twin), averages, strict=True):
        space = keepk.channels("first", keep=5)
        pruner = keepk.Pruner(each, space, example=torch.zeros(2, 7), followers=[average])
        pruner.step(each, wrap=fully_shard) if each is model else pruner.step()
    assert averages[0].keys() == averages[1].keys()
    assert {"first.weight", "second.weight"} < averages[0].keys()
    for name, it in averages[0].items():
        assert torch.equal(whole(it), averages[1][name]), name
        assert same_sharding(it, model.state_dict()[name]), name
    # One that has lost a tensor since, or has one of another shape.
    other = fully_shard(tied())
    average = {name: it.detach().clone() for name, it in other.state_dict().items()}
    pruner = keepk.Pruner(other, keepk.channels("first", keep=5), example=torch.zeros(2, 7), followers=[average])
    taken = average.pop("first.bias")
    with pytest.raises(ShrinkError, match=r"followers\[0\] \(dict\): has no tensor 'first.bias'"):
        pruner.step(other, wrap=fully_shard)
    average["first.bias"] = taken
    pruner.step(other, wrap=fully_shard)
    assert all(it.shape == other.state_dict()[name].shape for name, it in average.items())


class Outer(nn.Module):
    """A model with the network to be pruned in it."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.rest = nn.Sequential(nn.Linear(1, 5), nn.Linear(5, 2))

    def forward(self, x):
        return self.rest(self.net(x))


def a_part_of_a_sharded_model():
    """Channels need the module that is sharded, and the error says which; weights do not."""
    root: Any = fully_shard
    model, twin = root(Outer()), Outer()
    optimizer = torch.optim.AdamW(model.parameters())
    example = torch.zeros(2, 7)
    space = keepk.channels("*", keep=8)
    words = (
        r"parameter '0.weight' by fully_shard of the Outer around this Sequential, .* Pass the Outer to the Pruner, "
        r"with an example for it and spaces of 'net\.\*'; or call fully_shard on the Sequential too"
    )
    for _ in range(2):
        with pytest.raises(SpaceError, match=words):
            keepk.Pruner(model.net, space, optimizer, example=example)
        with torch.no_grad():
            model(example)  # leaves the parameters of the outermost module gathered
    inner: Any = nn.Module()  # two modules around it: the inner one is named
    inner.model = root(Outer())
    root(inner)
    with pytest.raises(SpaceError, match=words):
        keepk.Pruner(inner.model.net, space, example=example)
    # Both remedies.
    oracle = keepk.Pruner(twin.net, space, example=example)
    oracle.step()
    other = Outer()
    root(other.net)
    optimizers = optimizer, torch.optim.AdamW(root(other).parameters())
    for outer, pruned, names, each in zip(
        (model, other), (model, other.net), ("net.[02]", "[02]"), optimizers, strict=True
    ):
        with keepk.Pruner(pruned, keepk.channels(names, keep=8), each, example=example) as pruner:
            pruner.step(pruned, wrap=root)
        for it, expected in zip(outer.parameters(), twin.parameters(), strict=True):
            assert torch.equal(whole(it), expected)
        train(outer, each, 0)
    # Weights, right after a forward pass.
    model, twin = root(Outer()), Outer()
    with torch.no_grad():
        model(example)
    pruner = keepk.Pruner(model.net, keepk.weights("*", keep=30, schedule=[60, 30]))
    oracle = keepk.Pruner(twin.net, keepk.weights("*", keep=30, schedule=[60, 30]))
    for _ in range(2):
        pruner.step()
        oracle.step()
        assert_same_masks(pruner, oracle)
        with torch.no_grad():
            model(example)


# Checkpoints ----------------------------------------------------------------------------------------------------------


def run_of(model):
    """The objects of a run that prunes channels of a sharded or a plain model."""
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    space = keepk.channels("*", keep=16, schedule=[24, 20, 16], metric=keepk.metrics.l2)
    pruner = keepk.Pruner(model, space, optimizer, example=PICTURES)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "pruner": pruner}


def go_on(run, wrap, steps):
    for step in steps:
        fit(run["model"], run["optimizer"], step)
        run["scheduler"].step()
        if wrap is None:
            run["pruner"].step()
        else:
            run["pruner"].step(run["model"], wrap=wrap)


def plain_state(run):
    """The whole weights and the whole state of the optimizer."""
    names = {parameter: name for name, parameter in run["model"].named_parameters()}
    moments = {names[it]: {k: whole(v) for k, v in state.items()} for it, state in run["optimizer"].state.items()}
    return {"model": {name: whole(it) for name, it in run["model"].state_dict().items()}, "optimizer": moments}


def assert_same_tensors(one, two):
    assert one.keys() == two.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_same_tensors(value, two[key])
        else:
            assert torch.equal(value, two[key]), key


def checkpoints():
    """Two processes write; they, three others and a single one (in the test) read, and all of them go on alike."""
    folder = Path(sys.argv[1]).parent / "checkpoint"
    if dist.get_world_size() == 2:
        run = run_of(shard(net()))
        for steps in ([0], [1]):  # the second checkpoint replaces the first one
            go_on(run, shard, steps)
            keepk.save_checkpoint(folder, **run, extra={"step": steps[0]})
        middle = plain_state(run)
        go_on(run, shard, [2, 3])
        if dist.get_rank() == 0:
            assert len([*folder.glob("shards-*")]) == 1
            torch.save([middle, plain_state(run)], folder.parent / "expected.pt")
        else:
            plain_state(run)
        again = run_of(shard(net(seed=1)))
        with pytest.raises(StateError, match=r"pruner.load_state_dict\(state, wrap=shard\)"):
            keepk.load_checkpoint(folder, **again)
        assert keepk.load_checkpoint(folder, **again, wrap=shard) == {"step": 1}
        assert_same_tensors(plain_state(again), middle)
        go_on(again, shard, [2, 3])
        assert_same_tensors(plain_state(again), plain_state(run))
        fail_to_write(again, folder)
    else:
        expected = torch.load(folder.parent / "expected.pt")
        run = run_of(shard(net(seed=2)))
        keepk.load_checkpoint(folder, **run, wrap=shard)
        assert_same_tensors(plain_state(run), expected[0])
        go_on(run, shard, [2, 3])
        assert [it.shape for it in plain_state(run)["model"].values()] == [
            it.shape for it in expected[1]["model"].values()
        ]
        uncut = shard(net())
        with pytest.raises(CheckpointError, match=r"here and .* in the checkpoint"):
            keepk.load_checkpoint(folder, model=uncut)
    weights_in_checkpoints(folder)


def weights_in_checkpoints(folder):
    """Masks and weights, in any layout, also in a checkpoint that one process wrote."""
    folder = folder.parent / f"weights-{dist.get_world_size()}"
    twin = mlp()
    oracle = keepk.Pruner(twin, keepk.weights("*", keep=30, schedule=SMALL))
    oracle.step()
    if dist.get_rank() == 0:
        keepk.save_checkpoint(folder, model=twin, pruner=oracle)
    dist.barrier()
    for layout in LAYOUTS:
        sharded = layout(mlp(seed=3))
        pruner = keepk.Pruner(sharded, keepk.weights("*", keep=30, schedule=SMALL))
        keepk.load_checkpoint(folder, model=sharded, pruner=pruner)
        assert_same_masks(pruner, oracle)
        assert all(torch.equal(whole(it), two) for it, two in zip(sharded.parameters(), twin.parameters(), strict=True))
        keepk.save_checkpoint(folder, model=sharded, pruner=pruner)
        dist.barrier()


def fail_to_write(run, folder):
    """A process that cannot write leaves the old checkpoint in place, and the others learn of it."""
    mine = dist.get_rank() == 1
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if mine:
            patch.setattr("keepk.checkpoint.checkpoint.write_folder", out_of_memory)
        with pytest.raises(
            MemoryError if mine else DisagreementError, match=r"none left|rank 1: failed to write .*check"
        ):
            keepk.save_checkpoint(folder, **run)
    dist.barrier()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def full_disk_above_shards(folder, _):
    if not folder.name.startswith("rank-"):
        raise OSError("no space left")


def out_of_memory(*_):
    raise MemoryError("none left")


# Failures of one process in every step of a call --------------------------------------------------------------------


WRONG: Any = 7  # in the place of a path, a state, an optimizer


@contextmanager
def failing_in(rank, words):
    """One rank fails with these words, the others learn of it; all of them go on with the same collective."""
    mine = dist.get_rank() == rank
    with pytest.raises(Exception, match=words if mine else f"rank {rank}: failed to ") as caught:
        yield mine
    assert isinstance(caught.value, DisagreementError) != mine, caught.value
    together()


def together():
    """Fail, or run into the timeout, unless every process makes the same collective now."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert int(ones) == dist.get_world_size()


class AnyState:
    """A user's object of which only its state says that it is sharded."""

    def __init__(self, model):
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict


class Average:
    """A user's object with a state, which can be made to fail."""

    def __init__(self, value=1.0):
        self.value, self.fails = torch.tensor(value), ""

    def state_dict(self):
        assert self.fails != "state_dict", "no state"
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"].clone()
        # It refuses the new state, after it has taken it, and takes the old one back.
        assert self.fails != "load_state_dict" or self.value != 3.0, "refused"


def files_in(folder):
    dist.barrier()
    found = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    dist.barrier()
    return found


@contextmanager
def revived(pruner, model, mine):
    """Pruned weights of this process are not zero, if `mine`."""
    with torch.no_grad():
        model[0].weight.to_local().fill_(1.0 if mine else 0.0)
    yield
    pruner.apply_masks()


def a_failure_while_saving_reaches_every_process():
    """The old checkpoint stays, and training goes on with the same collectives."""
    folder = Path(sys.argv[1]).parent / "saving"
    model = shard(net())
    average, run = Average(3.0), run_of(model)
    go_on(run, shard, [0])
    keepk.save_checkpoint(folder, **run, ema=average, extra={"step": 0})
    before = files_in(folder)
    weights = keepk.Pruner(small := fsdp(mlp()), keepk.weights("*", keep=9))
    weights.step()
    for rank in range(dist.get_world_size()):
        mine = dist.get_rank() == rank
        with failing_in(rank, "save_checkpoint: "):
            keepk.save_checkpoint(WRONG if mine else folder, **run)
        with failing_in(rank, "scheduler: got a int"):
            keepk.save_checkpoint(folder, **run | {"scheduler": 7 if mine else run["scheduler"]})
        with failing_in(rank, "no state"):
            average.fails = "state_dict" if mine else ""
            keepk.save_checkpoint(folder, ema=average, **run)
        average.fails = ""
        for given in (run, {"ema": small}, {"ema": AnyState(small)}):
            with failing_in(rank, "extra"):
                keepk.save_checkpoint(folder, **given, extra=object() if mine else 1)
        with revived(weights, small, mine), failing_in(rank, "pruned weights are no longer zero"):
            keepk.save_checkpoint(folder, pruner=weights)
        with pytest.MonkeyPatch.context() as patch, failing_in(rank, "none left"):
            if mine:
                patch.setattr("keepk.checkpoint.checkpoint.write_folder", out_of_memory)
            keepk.save_checkpoint(folder, **run)
        if rank == 0:  # which writes the index
            with pytest.MonkeyPatch.context() as patch, failing_in(rank, "none left"):
                if mine:
                    patch.setattr("keepk.storage.files.os.replace", out_of_memory)
                keepk.save_checkpoint(folder, **run)
        assert files_in(folder) == before
        assert len([*folder.glob("shards-*")]) == 1
    go_on(run, shard, [1])
    # After the commit, the new checkpoint is there, and all processes say so.
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr("keepk.checkpoint.checkpoint.delete_others", full_disk_above_shards)
        with pytest.raises(KeepkError, match="new checkpoint is there, but may not"):
            keepk.save_checkpoint(folder, **run, ema=average, extra={"step": 1})
    together()
    again = run_of(shard(net(seed=1)))
    assert keepk.load_checkpoint(folder, **again, ema=Average(), wrap=shard) == {"step": 1}
    assert_same_tensors(plain_state(again), plain_state(run))


LOADING = [
    "keepk.checkpoint.checkpoint.host_copy",
    "keepk.checkpoint.checkpoint.set_rng_state",
    "keepk.checkpoint.checkpoint.read_folder",
    "keepk.run.session.Session._hold",
    "keepk.cut.sharded.own_part",
    "keepk.checkpoint.parts.ModulePart.restore",
]


def a_failure_while_loading_reaches_every_process():
    """Whatever fails, and in whichever process: every object of all processes has its old state."""
    folder = Path(sys.argv[1]).parent / "loading"
    first, average = run_of(shard(net())), Average(3.0)
    go_on(first, shard, [0, 1])
    keepk.save_checkpoint(folder, **first, ema=average, extra={"step": 1})
    run, average = run_of(shard(net(seed=1))), Average()
    fit(run["model"], run["optimizer"], 5)
    before, objects = plain_state(run), [*run["model"].parameters()]
    scheduled, random = dict(run["scheduler"].state_dict()), torch.get_rng_state()

    def refused(words, mine, **changed):
        with failing_in(rank, words):
            keepk.load_checkpoint(**{"path": folder, "ema": average, "wrap": shard} | run | (changed if mine else {}))
        assert all(one is two for one, two in zip(run["model"].parameters(), objects, strict=True))
        assert_same_tensors(plain_state(run), before)
        assert run["scheduler"].state_dict() == scheduled
        assert (run["pruner"].epoch, average.value.item()) == (0, 1.0)
        assert torch.equal(torch.get_rng_state(), random)

    for rank in range(dist.get_world_size()):
        mine = dist.get_rank() == rank
        refused("load_checkpoint: ", mine, path=7)
        refused("no checkpoint|checkpoint.json", mine, path=folder / "missing")
        refused("ema: got a int", mine, ema=7)
        refused("has the run's scheduler", mine, scheduler=None)
        other = torch.optim.lr_scheduler.ConstantLR(run["optimizer"]) if mine else None
        run["scheduler"].load_state_dict(scheduled)
        refused("is a ConstantLR here and a StepLR", mine, scheduler=other)
        run["scheduler"].load_state_dict(scheduled)
        for wrap in (out_of_memory, lambda model: shard(model) and out_of_memory()):
            refused("none left", mine, wrap=wrap)
        refused("Pass the function that does so", mine, wrap=None)
        for fails in ("state_dict", "load_state_dict"):
            average.fails = fails if mine else ""
            with failing_in(rank, "no state|refused"):
                keepk.load_checkpoint(folder, **run, ema=average, wrap=shard)
            average.fails = ""
            assert_same_tensors(plain_state(run), before)
            assert (run["pruner"].epoch, average.value.item()) == (0, 1.0)
        for place in LOADING[rank::2]:
            with failing_once(place, mine):
                refused("none left", mine)
        part = next(folder.glob(f"shards-*/rank-{rank}/tensors-*"))
        kept = part.read_bytes()
        if mine:
            part.write_bytes(kept[:-1] + bytes([kept[-1] ^ 255]))
        refused("sha256|damaged", mine)
        if mine:
            part.write_bytes(kept)
    fit(run["model"], run["optimizer"], 6)
    assert keepk.load_checkpoint(folder, **run, ema=average, wrap=shard) == {"step": 1}
    assert_same_tensors(plain_state(run), plain_state(first))
    assert average.value == 3.0
    go_on(run, shard, [2])


@contextmanager
def failing_once(place, mine):
    """Make the first call of the function at a dotted path fail in this process, if `mine`, and not those after it."""
    original, calls = resolve(place), []

    def once(*given):
        calls.append(1)
        return out_of_memory() if len(calls) == 1 else original(*given)

    with pytest.MonkeyPatch.context() as patch:
        if mine:
            patch.setattr(place, once)
        yield
    assert bool(calls) == mine


def resolve(place):
    """The object at a dotted path, as `MonkeyPatch.setattr` finds it."""
    path, names = place, list[str]()
    while path not in sys.modules:
        path, _, name = path.rpartition(".")
        names.insert(0, name)
    found = sys.modules[path]
    for name in names:
        found = getattr(found, name)
    return found


def a_failure_while_a_state_is_loaded_reaches_every_process():
    space = keepk.channels("*", keep=16, schedule=[24, 16])
    first = keepk.Pruner(model := shard(net()), space, example=PICTURES)
    first.step(model, wrap=shard)
    state = first.state_dict()
    model = shard(net(seed=1))
    optimizer = optimizer_of(model)
    fit(model, optimizer, 0)
    pruner = keepk.Pruner(model, space, optimizer, example=PICTURES)
    objects, before = [*model.parameters()], [whole(it) for it in model.parameters()]
    for rank in range(dist.get_world_size()):
        mine = dist.get_rank() == rank
        for given, wrap, words in (
            (state, out_of_memory, "none left"),
            (state, lambda it: shard(it) and out_of_memory(), "none left"),
            (state, None, "Pass the function that does so"),
            (WRONG, shard, "not the state of a Pruner"),
            ({**state, "epoch": 9}, shard, "epoch 9"),
            ({**state, "channels": {**state["channels"], "gone": []}}, shard, "do not fit|damaged"),
        ):
            with failing_in(rank, words):
                pruner.load_state_dict(given if mine else state, wrap=wrap if mine else shard)
            assert all(one is two for one, two in zip(model.parameters(), objects, strict=True))
            assert all(torch.equal(whole(it), old) for it, old in zip(model.parameters(), before, strict=True))
            assert pruner.epoch == 0
        with pytest.MonkeyPatch.context() as patch, failing_in(rank, "none left"):
            if mine:
                patch.setattr(pruner._session, "_hold", out_of_memory)
            pruner.load_state_dict(state, wrap=shard)
        assert all(one is two for one, two in zip(model.parameters(), objects, strict=True))
    fit(model, optimizer, 1)
    pruner.load_state_dict(state, wrap=shard)
    assert pruner.kept == first.kept
    fit(model, optimizer, 2)
    weight_states_too()


def weight_states_too():
    """Values that are zeroed in one process come back if another one fails afterwards."""
    spaces = keepk.weights("*", keep=30, schedule=[60, 30])
    first = keepk.Pruner(fsdp(mlp()), spaces)
    first.step()
    state = first.state_dict()
    model = fsdp(mlp(seed=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 0)
    average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    pruner = keepk.Pruner(model, spaces, optimizer, followers=[average])

    def tensors():
        momenta = [optimizer.state[it]["momentum_buffer"] for it in model.parameters()]
        return [whole(it) for it in [*model.parameters(), *momenta, *average.values()]]

    before = tensors()
    for rank in range(dist.get_world_size()):
        mine = dist.get_rank() == rank
        other = {**state, "masks": {**state["masks"], "0.weight": state["masks"]["0.bias"]}}
        with failing_in(rank, "no bool mask of shape"):
            pruner.load_state_dict(other if mine else state)
        with pytest.MonkeyPatch.context() as patch, failing_in(rank, "none left"):
            if mine:
                patch.setattr(pruner._session, "_certify", out_of_memory)
            pruner.load_state_dict(state)
        assert pruner.epoch == 0
        assert all(torch.equal(one, two) for one, two in zip(tensors(), before, strict=True))
        assert pruner.kept == {"*": sum(it.numel() for it in model.parameters())}
    pruner.load_state_dict(state)
    assert_same_masks(pruner, keepk_of(first))


def keepk_of(pruner):
    """The masks of a Pruner, whole, in the form that `assert_same_masks` takes."""
    masks = {name: whole(mask.int()).bool() for name, mask in pruner.masks.items()}
    return SimpleNamespace(masks=masks, kept=pruner.kept)


def of_weights(metric: Any) -> Any:
    """A metric that is called when a Pruner with a budget is made, to find out whether that can be met."""
    metric.needs = ("weights",)
    return metric


def a_failure_while_a_pruner_is_made_reaches_every_process():
    model = shard(net())
    optimizer = optimizer_of(model)
    fit(model, optimizer, 0)
    good: dict[str, Any] = {
        "spaces": keepk.channels("*", macs=0.5, schedule=keepk.Cubic(epochs=2)),
        "example": PICTURES,
    }

    @of_weights
    def of_one(layer):
        return layer.producer[0].tensor.flatten(1).norm(dim=1) if dist.get_rank() != failing else out_of_memory()

    for rank in range(dist.get_world_size()):
        mine, failing = dist.get_rank() == rank, rank
        for changed, words in (
            ({"example": torch.zeros(2, 5, 2, 2)}, "forward failed on the example"),
            ({"spaces": None}, "spaces=None"),
            ({"spaces": keepk.channels("nothing", macs=0.5)}, "nothing"),
            ({"optimizer": 7}, "got int"),
            ({"macs": "x"}, "macs"),
        ):
            with failing_in(rank, words):
                keepk.Pruner(model, **good | (changed if mine else {}))
        space = keepk.channels("*", macs=0.5, schedule=keepk.Cubic(epochs=2), metric=of_one)
        with failing_in(rank, "of_one: failed"):
            keepk.Pruner(model, space, example=PICTURES)
        failing = -1
        with keepk.Pruner(model, space, optimizer, example=PICTURES) as pruner:
            expected, failing = pruner.implied, rank
            with failing_in(rank, "of_one: failed"):
                _ = pruner.implied
            failing = -1
            assert pruner.implied == expected
            if mine:  # one process alone may print a report
                assert str(pruner.report())
        fit(model, optimizer, 1 + rank)
    with keepk.Pruner(model, **good, optimizer=optimizer) as pruner:
        pruner.step(model, wrap=shard)
    fit(model, optimizer, 9)


def a_metric_may_catch_the_error():
    """The failure of another process is not lost if the metric of this one catches it."""

    def careless(layer):
        if mine:
            raise ValueError("no scores")
        try:
            return layer.producer[0].tensor.flatten(1).norm(dim=1)
        except KeepkError:
            return torch.ones(len(layer))

    model = shard(net())
    for rank in range(dist.get_world_size()):
        mine = False
        with keepk.Pruner(model, keepk.channels("*", keep=16, metric=careless), example=PICTURES) as pruner:
            mine = dist.get_rank() == rank
            with failing_in(rank, "no scores"):
                pruner.step(model, wrap=shard)
            assert pruner.epoch == 0


def a_rank_that_dies_is_an_error_on_the_others():
    """The last case: nothing can be exchanged afterwards."""
    net = fsdp(mlp())
    pruner = keepk.Pruner(net, keepk.weights("*", keep=9, metric=dies_on_rank_1))
    with pytest.raises(DisagreementError, match=r"step: rank \d got no answer from the other processes .* has ended"):
        pruner.step()
    assert pruner.epoch == 0


def dies_on_rank_1(weight):
    if dist.get_rank() == 1:
        finish()
    return weight.abs()


def finish():
    print(f"all checks passed on rank {dist.get_rank()} in {time.process_time():.1f} CPU seconds", flush=True)
    os._exit(0)  # without the interpreter's shutdown, in which torch's gloo threads sometimes abort


def main():
    masks_are_those_of_one_process()
    large_ties_by_columns()
    training_is_that_of_one_process()
    refusals()
    failures_reach_every_process()
    channels_are_cut_as_in_one_process()
    checkpoints()
    if dist.get_world_size() == 2:
        metrics_see_whole_tensors()
        other_ways_to_train()
        followers_and_states()
        other_channel_runs()
        channels_resume()
        channels_are_refused()
        plain_parameters_are_cut_beside_sharded_ones()
        wrap_has_to_shard_the_same_parameters()
        followers_are_cut_under_all_names()
        a_part_of_a_sharded_model()
        a_failure_while_saving_reaches_every_process()
        a_failure_while_loading_reaches_every_process()
        a_failure_while_a_state_is_loaded_reaches_every_process()
        a_failure_while_a_pruner_is_made_reaches_every_process()
        a_metric_may_catch_the_error()
    a_rank_that_dies_is_an_error_on_the_others()


if __name__ == "__main__":
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = Path(sys.argv[1])
    warnings.simplefilter("error", keepk.KeepkWarning)
    warnings.filterwarnings("ignore", "space .* (are tied|would keep)|pruner.step", keepk.KeepkWarning)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    for case in sys.argv[2:] or ["main"]:
        globals()[case]()
    finish()
