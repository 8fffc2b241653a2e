"""Optimizers that accelerate, Fabric and Lightning wrap: the wrappers are looked through."""

import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn

import keepk
from keepk.cut.masks import unwrap_optimizer


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)


def by_accelerate(net, optimizer):
    return Accelerator(cpu=True).prepare(net, optimizer)


def by_fabric(net, optimizer):
    fabric = Fabric(accelerator="cpu", devices=1)
    return fabric.setup(net, optimizer)


WRAPPERS = {"accelerate": by_accelerate, "fabric": by_fabric}


def trained(wrap):
    """A run with weights and channels, and the wrapped optimizer passed to every function that takes one."""
    net = network()
    bare = adam(net)
    model, optimizer = wrap(net, bare)
    if wrap is not unwrapped:
        assert unwrap_optimizer(optimizer) is bare is not optimizer
    spaces = [
        keepk.channels("0", keep=4, schedule=[6, 4]),
        keepk.weights("2.weight", keep=7, schedule=[10, 7]),
    ]
    example = torch.randn(2, 6)
    pruner = keepk.Pruner(net, spaces, optimizer, example=example)
    for rows in torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(1)):
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        pruner.step()
        assert int(net[2].weight.count_nonzero()) == pruner.kept["2.weight"]
    assert pruner.kept == {"0": 4, "2.weight": 7}
    assert all(it.shape == p.shape for p in net.parameters() for it in bare.state[p].values() if it.ndim)
    return net, bare, optimizer, pruner, example


def unwrapped(net, optimizer):
    return net, optimizer


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_run_with_a_wrapped_optimizer_is_that_with_the_bare_one(name, tmp_path):
    net, bare, optimizer, pruner, example = trained(WRAPPERS[name])
    plain, other, *_ = trained(unwrapped)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(bare.state[mine][key], value) for key, value in other.state[theirs].items())
    keepk.save_checkpoint(tmp_path, optimizer=optimizer, model=net)
    keepk.load_checkpoint(tmp_path, optimizer=other, model=plain)  # a checkpoint does not depend on the wrapper
    pruner.attach(optimizer)  # it has this optimizer already
    assert len(bare._optimizer_step_post_hooks) == 1
    keepk.shrink(net, graph := keepk.trace(net, example), graph.groups[0].units[:1], optimizer=optimizer)
    assert bare.state[net[0].weight]["exp_avg"].shape == (3, 6)


def test_lightnings_wrapper_is_looked_through():
    bare = adam(network())
    assert unwrap_optimizer(LightningOptimizer(bare)) is bare


def test_a_wrapper_beside_its_optimizer_counts_once():
    net = network()
    bare = adam(net)
    _, wrapped = by_fabric(net, bare)
    with keepk.Pruner(net, keepk.weights("*", keep=5), [wrapped, bare]):
        assert len(bare._optimizer_step_post_hooks) == 1
