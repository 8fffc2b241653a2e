"""The script that `tests/run/test_sharded_processes.py` runs in two and three gloo processes, over sharded models.

Every rank asserts, and prints a line at the end. The oracle is one process: a plain copy of the model with the same
weights, pruned by a Pruner of its own.
"""

import copy
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import keepk
from keepk.errors import DisagreementError, OptimizerError, RankError, ShrinkError, SpaceError, StateError

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
        for dtype, levels in (
            (torch.float32, 0),
            (torch.float32, 2),
            (torch.bfloat16, 3),
            (torch.float64, 2),
            (torch.float16, 0),
        ):
            for keep, floor in ((1, 0), (40, 0), (64, 3), (100, 0)):
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
    ):
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
        resumed = keepk.Pruner(other, keepk.weights("*", keep=30, schedule=SMALL))
        resumed.load_state_dict(state)
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
        match=r"'0\.weight'|rank \d: failed to decide",
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


def out_of_memory(*_):
    raise MemoryError("none left")


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
    metrics_see_whole_tensors()
    training_is_that_of_one_process()
    other_ways_to_train()
    followers_and_states()
    refusals()
    failures_reach_every_process()
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
