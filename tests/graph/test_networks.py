"""The fixtures of the channel tests: the networks run, repeat, copy and train; the oracle zeroes the right slices."""

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import keepk
from masked import call, leaves, masked, relative_error, without_dropout
from networks import EXPECTED, NETWORKS
from random_networks import OPERATIONS, random_network, random_networks
from traced_once import traced_network

SEEDS = range(50)


def check_sound(model, example):
    """Check that a model is deterministic, copies, has finite gradients, and does not change its example."""
    before = copy.deepcopy(example)
    model.eval()
    with torch.no_grad():
        first, again, copied = (call(each, example) for each in (model, model, copy.deepcopy(model)))
    for output in (again, copied):
        assert all(torch.equal(a, b) for a, b in zip(leaves(first), leaves(output), strict=True))
    assert all(leaf.dtype == torch.float64 and leaf.isfinite().all() for leaf in leaves(first))
    sum(leaf.square().sum() for leaf in leaves(call(without_dropout(model), example))).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert any(gradient.any() for gradient in gradients)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(torch.equal(a, b) for a, b in zip(leaves(before), leaves(example), strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_sound(name):
    check_sound(*NETWORKS[name]())


def plain_settings(model):
    return [{key: repr(it) for key, it in vars(module).items() if key[0] != "_"} for module in model.modules()]


@pytest.mark.parametrize("name", NETWORKS)
def test_what_one_test_does_to_a_traced_network_reaches_no_other(name):
    """The trace is cached per process, and each caller gets unmodified copies."""
    model, example, graph = traced_network(name)
    units = len(graph.units)
    keepk.shrink(model, graph, graph.choose(0.5, seed=0, lossy=True), replay=False)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers(), *leaves(example)):
            tensor.zero_()
    model.train(not model.training)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, list | dict):  # including those of modules and parameters
                value.clear()
    (model, example, graph), (fresh, given) = traced_network(name), NETWORKS[name]()
    assert len(graph.units) == units
    assert graph.alive.all()
    assert str(model) == str(fresh)
    assert plain_settings(model) == plain_settings(fresh)
    assert model.state_dict().keys() == fresh.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in fresh.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(leaves(example), leaves(given), strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_networks_of_seeds_are_sound(seed):
    check_sound(*random_network(seed))


@given(network=random_networks())
@settings(deadline=None, max_examples=20)
def test_random_networks_of_hypothesis_are_sound(network):
    check_sound(*network)


def test_a_seed_always_gives_the_same_network():
    (one, x), (other, y) = random_network(7), random_network(7)
    assert torch.equal(x, y)
    assert repr(one) == repr(other)
    assert torch.equal(call(one.eval(), x), call(other.eval(), y))


def test_every_operation_is_drawn():
    drawn = {type(operation) for seed in range(300) for operation in random_network(seed)[0].operations}
    assert drawn == set(OPERATIONS)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_expected_axis_exists(name):
    verdict, tensor, axis, _ = EXPECTED[name]
    assert verdict in {"exact", "lossy", "inexact", "fixed"}
    assert NETWORKS[name]()[0].get_parameter(tensor).shape[axis] > 1


class Slices:
    """The part of a graph that the oracle needs."""

    def __init__(self, *units):
        self.units = units

    def slices(self, unit):
        return self.units[unit]


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("removed", range(6))
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_oracle_blinds_a_convolution_to_one_input(removed, groups):
    """Zeroing an index of axis 1 of a (grouped) weight makes the output independent of only that input channel."""
    model = nn.Conv2d(6, 6, 3, groups=groups).double()
    blind = masked(model, Slices([("weight", 1, removed)]), [0])
    x = numbers(2, 6, 5, 5)
    for channel in range(6):
        other = x.clone()
        other[:, channel] += 1.0
        assert torch.equal(blind(x), blind(other)) == (channel == removed)
    kept = [channel for channel in range(6) if channel != removed]
    x[:, removed] = 0.0
    assert torch.equal(blind(x), model(x)), f"the weights of {kept} were touched"


@pytest.mark.parametrize("removed", range(6))
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_oracle_silences_one_output_of_a_transposed_convolution(removed, groups):
    model = nn.ConvTranspose2d(6, 6, 3, groups=groups).double()
    silent = masked(model, Slices([("weight", 1, removed), ("bias", 0, removed)]), [0])
    x = numbers(2, 6, 4, 4)
    wanted = model(x)
    wanted[:, removed] = 0.0
    assert torch.equal(silent(x), wanted)


def test_the_oracle_zeroes_the_length_of_a_weight_norm_and_not_its_direction():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).double()
    path = "parametrizations.weight.original"
    silent = masked(model, Slices([(f"{path}0", 0, 1), (f"{path}1", 0, 1), ("bias", 0, 1), (f"{path}1", 1, 2)]), [0])
    output = silent(numbers(2, 4))
    assert output.isfinite().all()
    assert not output[:, 1].any()
    assert not silent.weight[:, 2].any()
    assert silent.weight[[0, 2]][:, [0, 1, 3]].all()


def test_the_oracle_leaves_buffers_but_means():
    model = nn.BatchNorm1d(3).double().eval()
    assert model.running_mean is not None
    model.running_mean.fill_(2.0)
    names = ("weight", "bias", "running_mean", "running_var")
    silent = masked(model, Slices([(name, 0, 1) for name in names]), [0])
    assert silent.running_mean.tolist() == [2.0, 0.0, 2.0]
    assert silent.running_var.tolist() == [1.0, 1.0, 1.0]
    assert model.weight.all(), "the original is not touched"


@pytest.mark.parametrize(
    ("wanted", "got", "error"),
    [
        ({"a": [numbers(3)], "b": (numbers(2), numbers(1))}, {"a": [numbers(3)], "b": (numbers(2), numbers(1))}, 0.0),
        (torch.tensor([4.0, -8.0]), torch.tensor([4.0, -6.0]), 0.25),
        ((torch.tensor([1.0]), torch.tensor([2.0])), (torch.tensor([1.5]), torch.tensor([2.0])), 0.5),
        ((torch.tensor([1.0]), torch.tensor([2.0])), (torch.tensor([1.0]), torch.tensor([float("nan")])), float("inf")),
        (torch.ones(2), torch.ones(3), float("inf")),
        (torch.ones(0), torch.ones(0), 0.0),
    ],
)
def test_the_relative_error_of_nested_outputs(wanted, got, error):
    assert relative_error(wanted, got) == error
