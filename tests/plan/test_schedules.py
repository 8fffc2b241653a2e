"""Plans are exact in the decimals as written, never rise, and end at K."""

import itertools
from decimal import Decimal
from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn

import keepk
from keepk.errors import KeepkError, PlanError
from keepk.plan.numbers import count, exact_share, keep_count
from keepk.plan.schedules import plan
from untyped import untyped

FIGURE_1 = ".56 .4133 .34 .296 .2667 .2457 .23 .2178 .208 .20 .18 .16 .14 .12 .10 .10 .10 .10 .10 .10".split()  # noqa: SIM905
thousandths = st.integers(0, 1000).map(lambda n: n / 1000)


def oracle_share_left(e, p0, n1, nu, mu, every, p):
    """The paper's two branches, in decimals; e = N1 belongs to the first."""
    p0, nu, mu, p = (Fraction(Decimal(str(value))) for value in (p0, nu, mu, p))
    if e <= n1:
        return (1 - p0) + p0 * (Fraction(n1 - e) / (mu * e + n1))
    return 1 - min(p, p0 + ((e - n1) // every) * nu)


def test_figure_1_of_the_paper():
    counts = plan(keepk.Annealing(p0=0.8, n1=10, nu=0.02), 1_000_000, 100_000, epochs=20)
    assert [round(n / 1_000_000, 4) for n in counts] == [float(share) for share in FIGURE_1]


def test_the_papers_lenet_plans():
    direct = keepk.Annealing(p0=0.85, n1=1, nu=0.05)
    assert plan(direct, 266_610, 17_329) == (39_991, 26_661, 17_329)
    assert plan(keepk.Annealing(p0=0.9, n1=1, nu=0.05), 405_510, 8_110) == (40_551, 20_275, 8_110)
    conv = plan(keepk.Annealing(p0=0.0, n1=0, nu=0.05), 25_570, 7_671)
    assert len(conv) == 14
    assert conv[-1] == 7_671


def test_both_branches_agree_at_n1():
    for every in (1, 2, 3):
        schedule = keepk.Annealing(p0=0.3, n1=4, nu=0.1, every=every)
        assert schedule(1000, 1, 4)[-1] == 700


@given(
    total=st.integers(1, 10**7),
    pruned=thousandths,
    p0=thousandths,
    n1=st.integers(0, 12),
    nu=thousandths.filter(bool),
    mu=st.sampled_from([0, 0.5, 3, 10, 10.25]),
    every=st.integers(1, 3),
)
@example(total=266_200, pruned=0.935, p0=0.85, n1=1, nu=0.05, mu=10, every=1)
def test_annealing_is_the_papers_formula_exactly(total, pruned, p0, n1, nu, mu, every):
    keep = keep_count(total, exact_share(pruned, "prune", PlanError))
    assume(keep >= 1 and p0 <= pruned)
    schedule = keepk.Annealing(p0=p0, n1=n1, nu=nu, mu=mu, every=every)
    own = plan(schedule, total, keep)
    shares = [oracle_share_left(e, p0, n1, nu, mu, every, pruned) for e in range(1, len(own) + 1)]
    assert own == tuple(max(keep, floor(share * total)) for share in shares)
    assert own[-1] == keep
    assert keep not in own[:-1]  # the schedule's own length, up to the first K
    assert all(before >= after for before, after in itertools.pairwise(own))
    padded = plan(schedule, total, keep, epochs=len(own) + 3)
    assert padded == own + (keep,) * 3


@given(total=st.integers(2, 10**6), data=st.data())
def test_keep_and_prune_give_one_plan(total, data):
    pruned = data.draw(thousandths)
    keep = keep_count(total, exact_share(pruned, "prune", PlanError))
    assume(keep >= 1)
    for schedule in (keepk.Annealing(p0=0.0, n1=0, nu=0.1), keepk.Cubic(epochs=7), keepk.OneShot()):
        by_keep = keepk.weights("*", keep=keep, schedule=schedule)
        by_prune = keepk.weights("*", prune=pruned, schedule=schedule)
        assert by_keep.count_kept(total) == by_prune.count_kept(total) == keep


@given(
    total=st.integers(1, 10**6),
    share=st.fractions(0, 1),
    epochs=st.integers(1, 30),
    begin=st.integers(0, 5),
    every=st.integers(1, 4),
    p0=thousandths,
)
def test_cubic_ends_at_k_and_never_rises(total, share, epochs, begin, every, p0):
    keep = max(1, floor(total * share))
    assume(Fraction(str(p0)) <= 1 - Fraction(keep, total))
    counts = plan(keepk.Cubic(epochs=epochs, begin=begin, every=every, p0=p0), total, keep)
    assert len(counts) == begin + epochs
    assert counts[:begin] == (total,) * begin
    last = 1 - Fraction(keep, total)
    for e, left in enumerate(counts[begin:], start=1):
        t = Fraction(e if e == epochs else e // every * every, epochs)
        pruned = last + (Fraction(str(p0)) - last) * (1 - t) ** 3
        assert left == max(keep, floor(total * (1 - pruned)))
    assert counts[-1] == keep


def test_cubic_takes_the_length_of_the_run():
    assert plan(keepk.Cubic(), 1000, 100, epochs=5) == plan(keepk.Cubic(epochs=5), 1000, 100)
    assert plan(keepk.Cubic(begin=2), 1000, 100, epochs=5)[:2] == (1000, 1000)


def test_callables_and_lists_are_schedules():
    assert plan(lambda total, keep, _epochs: [total // 2, keep], 100, 10) == (50, 10)
    assert plan([70, 70, 10], 100, 10, epochs=4) == (70, 70, 10, 10)
    assert plan([50, 10, 10], 100, 10, epochs=2) == (50, 10)  # only repetitions of K are dropped


@pytest.mark.parametrize(
    ("schedule", "epochs", "words"),
    [
        (
            keepk.Annealing(p0=0.5, n1=2, nu=0.1),
            4,
            r"after 4 epochs the plan ends at 300, not at the 100 .* needs 6 epochs",
        ),
        (keepk.Annealing(p0=0.5, n1=2, nu=0.0), None, "nu=0 stays at p0=0.5"),
        (keepk.Annealing(p0=0.5, n1=2, nu=1e-9), None, "takes .* epochs from 1000 to 100, more than 1000000"),
        (keepk.Annealing(p0=0.95, n1=2, nu=0.1), None, r"p0=0.95 leaves 50 of 1000, .* Choose p0 <= 0.9"),
        (keepk.Cubic(epochs=9), 5, r"needs 9 epochs"),
        (keepk.Cubic(), None, "no length"),
        (keepk.Cubic(begin=5), 5, "begin=5 leaves none of the 5"),
        (keepk.Cubic(epochs=5, p0=0.95), None, "p0=0.95 prunes more"),
        ([500, 600, 100], None, "rises from 500 to 600 at epoch 2"),
        ([1001, 100], None, "rises from 1000 to 1001 at epoch 1"),
        ([500, 50], None, "50 at epoch 2 is fewer than the 100"),
        ([500, 300], None, "ends at 300"),
        ([500, 300, 100], 2, "needs 3 epochs"),
        ([], None, "is empty"),
        ([500.0, 100], None, "got float"),
        ([True], None, "got bool"),
        ("abc", None, "got str"),
        (lambda *_: None, None, "got NoneType"),
        (lambda: [100], None, r"failed on \(1000, 100, None\), which are M, K and the epochs.* \(TypeError: .* Pass a"),
        (lambda *_: [1 // 0], 7, r"failed on \(1000, 100, 7\).* \(ZeroDivisionError: .*sequence of ints.$"),
        (lambda _m, _k, epochs: [500] * epochs, 2, "after 2 epochs the plan ends at 500.* Let it end at exactly 100"),
    ],
)
def test_a_plan_that_misses_k_is_refused(schedule, epochs, words):
    with pytest.raises(PlanError, match=words):
        plan(schedule, 1000, 100, epochs=epochs)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"p0": 1.5, "n1": 1, "nu": 0.1}, "p0=1.5: a share lies between 0 and 1"),
        ({"p0": -0.5, "n1": 1, "nu": 0.1}, "p0=-0.5: negative"),
        ({"p0": True, "n1": 1, "nu": 0.1}, "p0=True: got bool"),
        ({"p0": "a", "n1": 1, "nu": 0.1}, "p0='a': got str"),
        ({"p0": float("nan"), "n1": 1, "nu": 0.1}, "p0=nan: not a finite number"),
        ({"p0": 0.5, "n1": True, "nu": 0.1}, "n1=True: got bool"),
        ({"p0": 0.5, "n1": -1, "nu": 0.1}, "n1=-1: too small"),
        ({"p0": 0.5, "n1": 1.0, "nu": 0.1}, "n1=1.0: got float"),
        ({"p0": 0.5, "n1": 1, "nu": -0.1}, "nu=-0.1: negative"),
        ({"p0": 0.5, "n1": 1, "nu": 0.1, "mu": -1}, "mu=-1: negative"),
        ({"p0": 0.5, "n1": 1, "nu": 0.1, "mu": float("inf")}, "mu=inf: not a finite number"),
        ({"p0": 0.5, "n1": 1, "nu": 0.1, "every": 0}, "every=0: too small"),
    ],
)
def test_wrong_numbers_are_refused_when_the_schedule_is_made(kwargs, words):
    with pytest.raises(PlanError, match=words):
        keepk.Annealing(**kwargs)


def test_shares_are_read_as_the_decimals_written():
    assert keep_count(266_200, exact_share(0.935, "p", KeepkError)) == 17_303
    assert exact_share(Fraction(1, 3), "p", KeepkError) == Fraction(1, 3)
    assert exact_share(1, "p", KeepkError) == 1
    assert exact_share(Decimal("0.1"), "p", KeepkError) == Fraction(1, 10)
    assert exact_share(np.float32(0.1), "p", KeepkError) == Fraction(1, 10)
    assert type(keepk.weights("*", keep=untyped(np.int64(3))).keep) is int
    assert count(3, "n", KeepkError, least=0) == 3


@pytest.mark.parametrize("kind", [keepk.weights, keepk.channels])
@pytest.mark.parametrize("schedule", ["cubic", 5, None])
def test_what_is_no_schedule_is_refused_when_the_space_is_made(kind, schedule):
    words = rf"^space 'f': schedule={schedule!r}: got {type(schedule).__name__}. "
    with pytest.raises(PlanError, match=words + r"Pass keepk.Cubic\(epochs=...\), a callable or a list of ints.$"):
        kind("f", keep=3, schedule=schedule)


def test_a_module_is_no_schedule():
    with pytest.raises(PlanError, match=r"schedule=.*got Linear\. Pass keepk.Cubic"):
        keepk.weights("*", keep=3, schedule=nn.Linear(2, 2))
