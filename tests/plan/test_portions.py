"""Counts that constrain each other, compared with brute force over all splits."""

from itertools import pairwise, product
from time import process_time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keepk.plan.portions import Portion, chain, has_even_steps, nearest_totals, snapped, split, totals


def in_steps(step, first, number):
    return Portion(tuple(range(first, first + step * number, step)))


any_counts = st.sets(st.integers(0, 12), min_size=1, max_size=4).map(lambda counts: Portion(tuple(sorted(counts))))
stepped = st.builds(in_steps, st.sampled_from([1, 2, 3, 5, 8]), st.integers(0, 5), st.integers(1, 4))
several = st.lists(any_counts | stepped, min_size=1, max_size=4)
of_one_step = st.integers(1, 5).flatmap(
    lambda step: st.lists(
        st.builds(in_steps, st.just(step), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4
    )
)


def splits(portions):
    return list(product(*(portion.counts for portion in portions)))


def met(portions):
    return sorted({sum(counts) for counts in splits(portions)})


def is_below(lower, upper):
    return all(low <= high for low, high in zip(lower, upper, strict=True))


def reachable(portions, falling):
    """The splits of the first total from which all later ones can be reached by removals alone, by brute force."""
    found = [counts for counts in splits(portions) if sum(counts) == falling[-1]]
    for total in reversed(falling[:-1]):
        found = [
            counts
            for counts in splits(portions)
            if sum(counts) == total and any(is_below(lower, counts) for lower in found)
        ]
    return found


@st.composite
def plans(draw, portions):
    """A non-increasing plan that ends at a reachable K; earlier counts are arbitrary."""
    keep = draw(st.sampled_from(met(portions)))
    most = met(portions)[-1]
    return (*sorted(draw(st.lists(st.integers(keep, most), max_size=3)), reverse=True), keep)


@given(st.sets(st.integers(0, 60), min_size=1, max_size=12).map(sorted))
def test_runs_are_the_counts(counts):
    runs = Portion(tuple(counts)).runs()
    assert [first + step * place for first, step, number in runs for place in range(number)] == counts


def test_hundreds_of_thousands_of_units_take_no_time():
    """One bit shift per count would take minutes here."""
    units = 400_000
    free, rounded = Portion(tuple(range(3, units + 1))), Portion((*range(8, units, 8), units))
    began = process_time()
    assert totals([free]) == (1 << units + 1) - (1 << 3)
    assert nearest_totals([free, rounded], 10) == [11]
    assert snapped([free], (units, 1000, 3)) == (units, 1000, 3)
    assert snapped([rounded], (1001, 11, 8)) == (1000, 8, 8)
    assert process_time() - began < 5


@given(several)
def test_totals_are_those_of_all_splits(portions):
    bits = totals(portions)
    assert [total for total in range(bits.bit_length()) if bits >> total & 1] == met(portions)


@given(several, st.integers(0, 60))
def test_nearest_totals_are_the_neighbours(portions, wanted):
    below = [total for total in met(portions) if total < wanted]
    above = [total for total in met(portions) if total > wanted]
    expected = [wanted] if wanted in met(portions) else below[-1:] + above[:1]
    assert nearest_totals(portions, wanted) == expected


@given(several, st.data())
def test_a_split_has_the_total_and_the_largest_gain(portions, data):
    gains = [np.array([float(data.draw(st.integers(-4, 4))) for _ in portion.counts]) for portion in portions]
    total = data.draw(st.sampled_from(met(portions)) | st.integers(0, 50))

    def worth(counts):
        places = [portion.counts.index(count) for portion, count in zip(portions, counts, strict=True)]
        return sum(gain[place] for gain, place in zip(gains, places, strict=True))

    found = split(portions, total, gains)
    possible = [counts for counts in splits(portions) if sum(counts) == total]
    assert (found in possible) if possible else found is None
    assert found is None or worth(found) == max(map(worth, possible))


def test_a_portion_with_no_count_has_no_split():
    nothing = Portion((2, 4)).within(5, 9)
    assert nothing.counts == ()
    assert split([Portion((1, 2)), nothing], 1, [np.zeros(2), np.zeros(0)]) is None


@given(several | of_one_step)
def test_even_steps_lead_from_every_split_to_every_lower_total(portions):
    if has_even_steps(portions):
        for upper in splits(portions):
            below = {sum(counts) for counts in splits(portions) if is_below(counts, upper)}
            assert below == {total for total in met(portions) if total <= sum(upper)}


@given(of_one_step)
def test_portions_of_one_step_have_even_steps(portions):
    assert has_even_steps(portions)


@given(several, st.data())
def test_a_chain_falls_through_the_totals(portions, data):
    """It may miss a chain that exists, but never returns one that does not."""
    falling = sorted(data.draw(st.lists(st.sampled_from(met(portions)), min_size=1, max_size=4)), reverse=True)
    found = chain(portions, falling)
    if found is None:
        assert len(falling) > 1
        assert not has_even_steps(portions)
        return
    assert [sum(counts) for counts in found] == falling
    assert set(found) <= set(splits(portions))
    assert all(is_below(lower, upper) for upper, lower in pairwise(found))


@given(several | of_one_step, st.data())
def test_a_snapped_plan_can_be_met_down_to_k(portions, data):
    falling = data.draw(plans(portions))
    plan = snapped(portions, falling)
    assert len(plan) == len(falling)
    assert plan[-1] == falling[-1]
    assert list(plan) == sorted(plan, reverse=True)
    assert reachable(portions, plan)
    assert chain(portions, plan) is not None
    whole = met(portions)[-1]
    assert all(after == whole for before, after in zip(falling, plan, strict=True) if before == whole)


@given(several | of_one_step, st.data())
def test_a_plan_moves_to_the_nearest_counts(portions, data):
    """To the nearest counts if steps are equal; a plan that a chain can follow is not changed."""
    falling = data.draw(plans(portions))
    if has_even_steps(portions):
        possible = [total for total in met(portions) if total >= falling[-1]]
        nearest = [min(possible, key=lambda total: (abs(total - wanted), total)) for wanted in falling]
        assert list(snapped(portions, falling)) == nearest
    elif chain(portions, falling) is not None:
        assert snapped(portions, falling) == falling


def test_two_layers_of_16_in_eights_on_the_way_to_24():
    """Keeping 12 + 13 in between would make 24 unreachable."""
    layers = [Portion((8, 16)), Portion((8, 16))]
    assert snapped(layers, (32, 29, 27, 25, 24)) == (32, 32, 24, 24, 24)
    assert chain(layers, (32, 24)) in {((16, 16), (8, 16)), ((16, 16), (16, 8))}


def test_steps_of_three_and_five():
    """13 = 3 + 10 and 11 = 6 + 5 are both possible, but not one after the other."""
    threes, fives = Portion((3, 6, 9)), Portion((5, 10, 15))
    assert nearest_totals([threes, fives], 13) == [13]
    assert not reachable([threes, fives], (24, 13, 11))
    assert chain([threes, fives], (24, 13, 11)) is None
    assert snapped([threes, fives], (24, 13, 11)) == (24, 14, 11)
