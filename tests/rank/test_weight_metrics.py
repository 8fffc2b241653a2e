"""Metrics for weights that need no data: compared with loops over single weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import keepk
from untyped import untyped


def plain_lamp(weights):
    """The definition, one weight at a time."""
    values = weights.detach().tolist()
    sums = [sum(other**2 for other in values if abs(other) >= abs(value)) for value in values]
    return [value**2 / total if total else 0.0 for value, total in zip(values, sums, strict=True)]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -2.0, 3.25, 1e-3, 1e4]), min_size=1, max_size=30))
def test_lamp_is_what_a_loop_computes(values):
    weights = torch.tensor(values)
    got = keepk.metrics.lamp(weights)
    assert got.tolist() == pytest.approx(plain_lamp(weights), rel=1e-12)
    # Ties are exact, and a larger weight never scores less: the order is that of the magnitudes.
    for one, score in zip(values, got.tolist(), strict=True):
        for other, other_score in zip(values, got.tolist(), strict=True):
            assert (score == other_score) == (abs(one) == abs(other))
            assert (score < other_score) == (abs(one) < abs(other))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_lamp_of_a_matrix_of_any_dtype(dtype):
    torch.manual_seed(0)
    weights = torch.randn(7, 5, 3, dtype=torch.float32).to(dtype)
    got = keepk.metrics.lamp(weights)
    assert got.shape == weights.shape
    assert got.flatten().tolist() == pytest.approx(plain_lamp(weights.flatten()), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-160, 1e160])
def test_lamp_neither_overflows_nor_vanishes(scale):
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(keepk.metrics.lamp(weights * scale), keepk.metrics.lamp(weights), rtol=1e-12, atol=0)


def test_lamp_of_nothing_and_of_zeros():
    assert keepk.metrics.lamp(torch.zeros(3, 0)).shape == (3, 0)
    assert keepk.metrics.lamp(torch.zeros(2, 2)).tolist() == [[0, 0], [0, 0]]
    assert float(keepk.metrics.lamp(torch.tensor(-3.0))) == 1


def test_lamp_keeps_exactly_k_and_its_scores_ignore_pruned_weights():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4))
    with torch.no_grad():
        net.get_parameter("2.weight").mul_(1e-3)  # by magnitude, this layer would lose everything
    space = keepk.weights("*.weight", keep=30, metric=keepk.metrics.lamp, schedule=[80, 30], name="w")
    pruner = keepk.Pruner(net, space)
    for kept in (80, 30):
        scores = {key: plain_lamp(net.get_parameter(key).flatten()) for key in ("0.weight", "2.weight")}
        alive = {key: mask.flatten().tolist() for key, mask in pruner.masks.items()}
        ranked = [
            (-score, key, place)
            for key, found in scores.items()
            for place, score in enumerate(found)
            if alive[key][place]
        ]
        pruner.step()
        wanted = {(key, place) for _, key, place in sorted(ranked)[:kept]}
        got = {
            (key, place) for key, mask in pruner.masks.items() for place in mask.flatten().nonzero().flatten().tolist()
        }
        assert got == wanted
    assert pruner.kept == {"w": 30}
    assert pruner.masks["2.weight"].any()


def test_lamp_says_how_it_can_be_used():
    net = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 4))
    with pytest.raises(keepk.errors.SpaceError, match="metric lamp ranks weights, not channels"):
        keepk.Pruner(net, keepk.channels("0", keep=3, metric=keepk.metrics.lamp), example=torch.zeros(2, 12))
    with pytest.raises(keepk.errors.SpaceError, match=r"is not callable. Pass a function, .*: keepk.metrics.lamp"):
        keepk.weights("*", keep=3, metric=untyped("lamp"))
    with pytest.raises(keepk.errors.SpaceError, match=r"is not callable.*; keepk.metrics.wanda ranks weights"):
        keepk.channels("*", keep=3, metric=untyped("wanda"))
