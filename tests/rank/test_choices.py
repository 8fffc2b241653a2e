"""The exact selection of channels, compared with Python's sort and brute force over all splits."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keepk.plan.portions import Portion, chain, has_even_steps, snapped
from keepk.rank.channels import Choice, keep_best, rank_values

SCORES = (0.0, 0.0, 1.0, 1.0, 2.0, -1.0, 0.5, np.inf, -np.inf)


def free(size, floor):
    return (size,), tuple(range(min(floor, size), size + 1))


def rounded(size, step):
    return (size,), (*range(step, size, step), size)


def bound(sizes, step):
    """A choice in which each block loses equal numbers, in steps, and keeps at least one."""
    lost = range(0, min(sizes), step)
    return tuple(sizes), tuple(sorted(sum(sizes) - len(sizes) * number for number in lost))


kinds = st.one_of(
    st.builds(free, st.integers(1, 6), st.integers(0, 2)),
    st.builds(rounded, st.integers(2, 10), st.sampled_from([2, 3, 5])),
    st.builds(bound, st.lists(st.integers(1, 5), min_size=2, max_size=3), st.integers(1, 2)),
)


@st.composite
def choices(draw, kinds=kinds):
    """Some choices over shuffled unit ids, and the number of units, some of which are in no choice."""
    shapes = draw(st.lists(kinds, min_size=1, max_size=3))
    count = sum(sum(sizes) for sizes, _ in shapes)
    size = count + draw(st.integers(0, 3))
    numbers = iter(draw(st.permutations(range(size))))
    made = []
    for sizes, counts in shapes:
        blocks = tuple(np.array(sorted(next(numbers) for _ in range(width)), np.int64) for width in sizes)
        made.append(Choice(blocks, Portion(counts)))
    return made, size


@st.composite
def plans(draw, portions):
    """Arbitrary non-increasing counts, snapped to a plan that can be met."""
    possible = sorted({sum(counts) for counts in product(*(portion.counts for portion in portions))})
    keep = draw(st.sampled_from(possible))
    before = sorted(draw(st.lists(st.integers(keep, possible[-1]), max_size=4)), reverse=True)
    return snapped(portions, (*before, keep))


def drawn_values(data, units, size):
    """Ranks by scores with many ties, and the scores."""
    scores = np.array([data.draw(st.sampled_from(SCORES)) for _ in units])
    return rank_values(units, scores, np.zeros(size, bool)), dict(zip(units.tolist(), scores, strict=True))


def members(made):
    return np.sort(np.concatenate([block for choice in made for block in choice.blocks]))


def worth(choice, alive, values, stay):
    """The total value of the best `stay` units of a choice with equal losses per block, by Python's sort."""
    living = [sorted((values[unit] for unit in block if alive[unit]), reverse=True) for block in choice.blocks]
    lost = (sum(map(len, living)) - stay) // len(living)
    return sum(sum(block[: len(block) - lost]) for block in living)


def best_worth(made, alive, values, total):
    """The largest sum of values over all splits, one by one."""
    left = [sum(int(alive[block].sum()) for block in choice.blocks) for choice in made]
    options = [[count for count in it.portion.counts if count <= most] for it, most in zip(made, left, strict=True)]
    return max(
        sum(worth(choice, alive, values, stay) for choice, stay in zip(made, counts, strict=True))
        for counts in product(*options)
        if sum(counts) == total
    )


@given(data=st.data(), size=st.integers(1, 12), strangers=st.integers(0, 3))
def test_without_bonds_it_is_a_sort(data, size, strangers):
    """The highest scores are kept, the lower index first among ties."""
    units = np.array(sorted(data.draw(st.permutations(range(size + strangers)))[:size]), np.int64)
    parts = data.draw(st.integers(1, size))
    blocks = [Choice((part,), Portion(tuple(range(len(part) + 1)))) for part in np.array_split(units, parts)]
    values, scores = drawn_values(data, units, size + strangers)
    keep = data.draw(st.integers(0, size))
    decision = keep_best(blocks, np.ones(size + strangers, bool), values, [keep], ())
    order = sorted(scores, key=lambda unit: (-scores[unit], unit))
    assert decision.removed.tolist() == sorted(order[keep:])


@given(made=choices(), data=st.data())
@settings(max_examples=100)
def test_a_whole_plan_is_met_and_never_strands(made, data):
    """Every event keeps the exact count, with equal losses per block and allowed numbers, and the best remaining units.

    It is the best of all splits if steps are equal or at the last event; otherwise the best may make K unreachable.
    """
    made, size = made
    portions = [choice.portion for choice in made]
    plan = data.draw(plans(portions))
    known = () if has_even_steps(portions) else chain(portions, plan)
    assert known is not None
    alive = np.zeros(size, bool)
    alive[members(made)] = True
    for event, total in enumerate(plan):
        values, _ = drawn_values(data, np.flatnonzero(alive), size)
        decision = keep_best(made, alive, values, plan[event:], known)
        after = alive.copy()
        after[decision.removed] = False
        assert alive[decision.removed].all()
        assert after.sum() == total
        kept_worth = sum(values[after])
        best = best_worth(made, alive, values, total)
        assert kept_worth == best if has_even_steps(portions) or event == len(plan) - 1 else kept_worth <= best
        for choice in made:
            losses = {int(alive[block].sum() - after[block].sum()) for block in choice.blocks}
            stay = sum(int(after[block].sum()) for block in choice.blocks)
            assert len(losses) == 1
            assert stay in choice.portion.counts
            assert sum(values[block[after[block]]].sum() for block in choice.blocks) == worth(
                choice, alive, values, stay
            )
        alive, known = after, decision.chain


@given(data=st.data(), size=st.integers(1, 10))
def test_values_are_places_in_the_order(data, size):
    """Units that must stay have a higher value than all others together, and are ordered among themselves."""
    units = np.array(data.draw(st.permutations(range(size + 2)))[:size], np.int64)
    scores = np.array([data.draw(st.sampled_from(SCORES)) for _ in units])
    forced = np.zeros(size + 2, bool)
    forced[[unit for unit in units if data.draw(st.booleans())]] = True
    values = rank_values(units, scores, forced)
    by_score = dict(zip(units.tolist(), scores, strict=True))
    expected = sorted(by_score, key=lambda unit: (not forced[unit], -by_score[unit], unit))
    assert sorted(by_score, key=lambda unit: -values[unit]) == expected
    others = sum(values[unit] for unit in by_score if not forced[unit])
    assert all(values[unit] > others for unit in by_score if forced[unit])


def test_the_best_split_is_left_where_it_would_strand():
    """With steps of 3 and 5 and the plan 23, 11: 3 + 20 has the higher value, but only 18 + 5 can reach 6 + 5."""
    threes = Choice((np.arange(18),), Portion((3, 6, 9, 12, 15, 18)))
    fives = Choice((np.arange(18, 38),), Portion((5, 10, 15, 20)))
    portions, plan = [threes.portion, fives.portion], (23, 11)
    alive, values = np.ones(38, bool), np.r_[np.full(18, 1.0), np.full(20, 9.0)]
    assert snapped(portions, plan) == plan
    known = chain(portions, plan)
    assert known is not None
    first = keep_best([threes, fives], alive, values, plan, known)
    alive[first.removed] = False
    assert (alive[:18].sum(), alive[18:].sum()) == (18, 5)
    second = keep_best([threes, fives], alive, values, plan[1:], first.chain)
    alive[second.removed] = False
    assert (alive[:18].sum(), alive[18:].sum()) == (6, 5)
