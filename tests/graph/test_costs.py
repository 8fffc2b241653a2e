"""Costs computed from a trace equal those that torch counts on the network after it was really cut."""

import copy
import importlib
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import keepk
from keepk.errors import ShrinkError
from keepk.graph.costs import CostModel, uncounted_operations
from keepk.model.costs import model_costs
from masked import call
from networks import NETWORKS
from random_networks import random_networks
from traced_once import traced_network

# (share removed of every group, seed, whether lossy units are removed too); the last one leaves a single unit of each
CUTS = ((0.5, 0, False), (0.3, 1, True), (0.99, 2, True))
# Fixed branches on sizes refuse to be cut that far.
UNCUTTABLE = {"strides_by_the_size"}
REFUSED = {"my.python_branch"}  # keepk.trace refuses a forward that reads a number from a tensor
LARGE = {"my.vgg16_cifar", "my.unet_lite", "my.cyclegan_gen", "my.crnn"}  # they take longer and add no other wiring


def handwritten():
    """The handwritten networks of `zoo_networks`. The package itself imports libraries that tests do not need."""
    package = ModuleType("zoo_networks")
    package.__path__ = [str(Path(__file__).parents[2] / "zoo" / "zoo_networks")]
    with mock.patch.dict(sys.modules, zoo_networks=package):
        return importlib.import_module("zoo_networks.handwritten").NETWORKS


def flags(graph, units):
    found = np.zeros(len(graph.units), bool)
    found[units] = True
    return found


def check_cuts(model, example, graph, cuts):
    """Compare the costs that the trace predicts with the counts on cut networks; returns the number of cuts made."""
    made, dense = 0, model_costs(model, example)
    nothing = np.zeros(len(graph.units), bool)
    before = CostModel(graph, dense.batch, model)
    assert (before.macs(nothing), before.parameters(nothing)) == (dense.macs, dense.parameters)
    for units in cuts:
        cut, its_graph = copy.deepcopy((model, graph))
        try:
            keepk.shrink(cut, its_graph, units)
        except ShrinkError:
            continue
        made += 1
        counted = model_costs(cut, example)
        assert counted.batch == dense.batch
        removed = flags(graph, units)
        assert before.parameters(removed) == counted.parameters == sum(p.numel() for p in cut.parameters())
        assert before.macs(removed) == counted.macs
        # The graph follows the cut, so a model of the cut network starts from the same costs.
        after = CostModel(its_graph, dense.batch, cut)
        assert (after.macs(nothing), after.parameters(nothing)) == (counted.macs, counted.parameters)
    return made


@pytest.mark.parametrize("name", NETWORKS)
def test_costs_of_every_network_at_random_cuts(name):
    model, example, graph = traced_network(name)
    cuts = [graph.choose(share, seed=seed, lossy=lossy) for share, seed, lossy in CUTS]
    made = check_cuts(model, example, graph, cuts)
    assert made == len(CUTS) or name in UNCUTTABLE


@pytest.mark.parametrize(
    "network", [it for it in handwritten() if it.name not in LARGE | REFUSED], ids=lambda it: it.name
)
def test_costs_of_real_architectures(network):
    model, example = network.build(), network.inputs()
    graph = keepk.trace(model, example)
    cuts = [graph.choose(share, seed=3, lossy=lossy) for share, lossy in ((0.4, False), (0.7, True))]
    assert check_cuts(model, example, graph, cuts)


@settings(max_examples=15)
@given(random_networks(), st.integers(0, 2**16), st.sampled_from((0.2, 0.5, 0.8)))
def test_costs_of_random_networks(network, seed, share):
    model, example = network
    graph = keepk.trace(model, example)
    check_cuts(model, example, graph, [graph.choose(share, seed=seed)])


def test_a_source_goes_with_its_last_reading():
    model, example, graph = traced_network("dense_block")
    source, _ = graph.links()[0]
    if graph.otherwise_used()[source]:
        pytest.skip("the source has other readers")
    readings = graph.links()[graph.links()[:, 0] == source, 1]
    costs = CostModel(graph, len(example), model)
    assert costs.gone(flags(graph, readings))[source]
    assert check_cuts(model, example, graph, [readings, readings[:1]]) == 2


def test_macs_are_half_of_what_torch_counts_per_sample():
    """The oracle itself, without keepk's own counting: one forward pass under torch's counter."""
    for name in ("conv_bn_flatten", "grouped", "multihead_attention"):
        model, example, graph = traced_network(name)
        rows = len(example)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            call(copy.deepcopy(model).eval().to("meta"), example.to("meta"))
        costs = CostModel(graph, rows, model)
        assert costs.macs(np.zeros(len(graph.units), bool)) * 2 * rows == counter.get_total_flops()


def test_an_einsum_over_one_channel_is_counted_on_a_cut_copy():
    model, example, graph = traced_network("einsum")
    units = graph.choose(0.99, seed=0)
    cut, its_graph = copy.deepcopy((model, graph))
    keepk.shrink(cut, its_graph, units)
    counted = model_costs(cut, example).macs
    removed = flags(graph, units)
    assert CostModel(graph, len(example), model).macs(removed) == counted
    assert CostModel(graph, len(example)).macs(removed) > counted  # torch multiplies elementwise, which is not counted


def test_uncounted_operations_are_listed_without_moves():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 2))
    found = uncounted_operations(keepk.trace(net, torch.zeros(2, 3, 6, 6)))
    assert sorted(found.values()) == [1, 1]
    assert set(found) == {"relu", "native_batch_norm"}
