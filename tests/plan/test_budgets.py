"""Budgets as they are written: shares are exact, and anything else is refused with a remedy."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keepk
from keepk.errors import SpaceError
from keepk.plan.budgets import Budget, checked_budget


@given(st.integers(1, 999), st.integers(1, 10**12))
def test_a_share_is_rounded_down_exactly(thousandths, dense):
    assert Budget("macs", thousandths / 1000).target(dense) == dense * thousandths // 1000


@pytest.mark.parametrize("amount", [0.25, Decimal("0.25"), Fraction(1, 4), np.float32(0.25), np.float64(0.25)])
def test_shares_of_any_type(amount):
    assert checked_budget("here", amount, None) == Budget("macs", 0.25)


def test_an_int_is_absolute():
    assert keepk.channels("x", parameters=2_000_000).budget == Budget("parameters", 2_000_000)
    assert checked_budget("here", None, np.int64(2_000_000)) == Budget("parameters", 2_000_000)
    assert Budget("parameters", 2_000_000).target(5) == 2_000_000


@pytest.mark.parametrize("option", ["macs", "parameters"])
@pytest.mark.parametrize(
    ("amount", "words"),
    [
        (1, "=1 would be the dense model, or a single (MAC|parameter). Pass a float below 1 for a share"),
        (1.0, "=1.0 would be the dense model, or a single (MAC|parameter). "),
        (True, "=True: got bool. Pass a float below 1"),
        ("0.5", "='0.5': got str. Pass a float below 1"),
        (0, "=0: a budget is above 0"),
        (0.0, "=0.0: a budget is above 0"),
        (-5, "=-5: a budget is above 0"),
        (-0.5, "=-0.5: a budget is above 0"),
        (float("nan"), "=nan is not a finite number"),
        (Decimal("nan"), r"=Decimal\('NaN'\) is not a finite number"),
        (float("inf"), "=inf is not a finite number"),
        (2e6, "=2000000.0: got float, which is a share of the dense model"),
        (1.5, "=1.5: got float, which is a share of the dense model"),
    ],
)
def test_numbers_that_are_no_budget(option, amount, words):
    remedy = f"such as {option}=0.5, or an int of at least 2 for a number of (MACs|parameters).$"
    with pytest.raises(SpaceError, match=f"^space 'x': {option}{words}.*{remedy}"):
        keepk.channels("x", **{option: amount})


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"macs": 0.5, "keep": 3}, "both keep=3 and macs=0.5. Pass exactly one of them."),
        ({"macs": 0.5, "prune": 0.5}, "both prune=0.5 and macs=0.5. Pass exactly one of them."),
        ({"macs": 0.5, "parameters": 100}, "both macs=0.5 and parameters=100. Pass exactly one of them."),
        ({"macs": 0.5, "parameters": 100, "keep": 3}, "got keep=3, macs=0.5 and parameters=100. Pass exactly one"),
    ],
)
def test_exactly_one_of_the_four_numbers(numbers, words):
    with pytest.raises(SpaceError, match=words):
        keepk.channels("x", **numbers)


def test_weights_have_no_budget():
    with pytest.raises(TypeError, match="macs"):
        keepk.weights("x", macs=0.5)  # type: ignore[call-arg]
