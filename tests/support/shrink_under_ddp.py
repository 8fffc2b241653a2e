"""The script that `test_a_model_under_ddp` runs in a separate process with one rank."""

import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepk
from keepk.errors import ShrinkError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "zoo"))

from masked import masked, relative_error
from networks import NETWORKS
from pictures import picture


def main():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=Path(folder, "store").as_uri(), rank=0, world_size=1)
        check()
        dist.destroy_process_group()
    print("all checks passed", flush=True)
    os._exit(0)  # without the interpreter's shutdown, in which torch's gloo threads sometimes abort


def check():
    net, example = NETWORKS["linears"]()
    ddp = DistributedDataParallel(net)
    graph = keepk.trace(ddp, example)
    assert graph.slices(0)[0] == ("first.weight", 0, 0), "names are those of the unwrapped model"
    units = graph.choose(0.5, seed=0)
    optimizer = torch.optim.Adam(ddp.parameters())
    train(ddp, example, optimizer)
    for model in (ddp, net):
        refused(model, graph, units)
    refused_inside_another(ddp, graph, units)
    oracle = masked(net, graph, units)
    ddp.__dict__["itself"] = ddp  # a cycle, which only the garbage collector frees
    del ddp, model
    keepk.shrink(net, graph, units, optimizer=optimizer)
    assert relative_error(oracle(example), net(example)) < 1e-10
    again = DistributedDataParallel(net)
    train(again, example, optimizer)
    before = net.first.weight.detach().clone()
    train(again, example, optimizer)
    assert not torch.equal(before, net.first.weight)


def refused(model, graph, units):
    before = picture([graph, dict(model.named_parameters())])
    with pytest.raises(
        ShrinkError, match=r"model Linears: a DistributedDataParallel wrapper holds its gradients.*wrap it again"
    ):
        keepk.shrink(model, graph, units)
    assert picture([graph, dict(model.named_parameters())]) == before


def refused_inside_another(ddp, graph, units):
    """The wrapper holds a larger model, of which the one to shrink is a part."""
    gc.collect()
    net, _ = NETWORKS["linears"]()
    outer = DistributedDataParallel(torch.nn.Sequential(net, torch.nn.Linear(5, 5)))
    refused(net, graph, units)
    del outer, ddp


def train(model, example, optimizer):
    optimizer.zero_grad()
    model(example).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    main()
