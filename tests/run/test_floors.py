"""A floor given as a share is exact and relative to the width at the start of the run, also after resuming."""

from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import keepk

ROW = torch.randn(2, 5)


def net():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 30), nn.ReLU(), nn.Linear(30, 21), nn.ReLU(), nn.Linear(21, 10), nn.ReLU(), nn.Linear(10, 2)]
    return nn.Sequential(*layers)


def last_first(layer):
    """A metric that scores every channel of a later layer higher."""
    return torch.arange(len(layer), dtype=torch.float64) / 100 + int(layer.name)


def widths(model):
    return [model[number].out_features for number in (0, 2, 4)]


@given(percent=st.integers(1, 99), width=st.integers(1, 2_000))
def test_the_floor_is_the_ceiling_of_the_decimals_written(percent, width):
    space = keepk.channels("*", keep=5, layer_floor=percent / 100)
    assert space.floor_of(width) == ceil(Fraction(percent, 100) * width)
    assert keepk.channels("*", keep=5, layer_floor=percent).floor_of(width) == percent


@pytest.mark.parametrize(("floor", "expected"), [(0.1, [3, 6, 10]), (0.3, [9, 7, 3]), (3, [3, 6, 10])])
def test_each_layer_keeps_its_share_and_k_is_met(floor, expected):
    model = net()
    pruner = keepk.Pruner(model, keepk.channels("*", keep=19, layer_floor=floor, metric=last_first), example=ROW)
    pruner.step()
    assert widths(model) == expected


def test_floors_that_need_more_than_k_are_refused():
    with pytest.raises(
        keepk.errors.SpaceError, match=r"layer_floor=0.3 in 3 layers needs 19 channels. Choose keep >= 19"
    ):
        keepk.Pruner(net(), keepk.channels("*", keep=18, layer_floor=0.3), example=ROW)


def test_the_share_is_of_the_dense_width_after_events_and_after_a_resume():
    def started():
        model = net()
        space = keepk.channels("*", keep=19, layer_floor=0.3, metric=last_first, schedule=[40, 25, 19])
        return model, keepk.Pruner(model, space, example=ROW)

    model, pruner = started()
    pruner.step()
    assert widths(model) == [9, 21, 10]
    state = pruner.state_dict()
    again, resumed = started()
    resumed.load_state_dict(state)
    assert widths(again) == [9, 21, 10]
    for run in (pruner, resumed):
        run.step()
        run.step()
    assert widths(model) == widths(again) == [9, 7, 3]  # 0.3 of 30, 21 and 10, independent of the counts in between


@pytest.mark.parametrize("wrong", [1.0, 0.0, 1.5, -0.1, float("nan"), True])
def test_what_is_neither_a_count_nor_a_share_is_refused(wrong):
    with pytest.raises(keepk.errors.SpaceError, match=r"layer_floor=.*Pass an int of at least 1, or a share between"):
        keepk.channels("*", keep=5, layer_floor=wrong)
