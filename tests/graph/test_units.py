"""Units are grouped by the exact set of their axes, compared with a dict of frozensets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keepk.graph.units import _group_numbers


@st.composite
def slices(draw):
    """Slices of classes on a few axes, in any order. A class has one kind, and may have several slices on one axis."""
    axes = draw(st.integers(1, 5))
    few = st.sets(st.integers(0, axes - 1), min_size=1)
    sets = draw(st.lists(few, min_size=1, max_size=4))
    classes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=20, unique=True))
    owned = {it: (draw(st.sampled_from(sets)), draw(st.integers(0, 2))) for it in classes}
    rows = [(it, axis, sort) for it, (found, sort) in owned.items() for axis in found]
    rows += draw(st.lists(st.sampled_from(rows), max_size=5))
    return axes, draw(st.permutations(rows))


@given(made=slices())
def test_groups_are_the_sets_of_axes(made):
    axes, rows = made
    classes, axis, sort = np.array(rows, np.int64).T
    numbers = _group_numbers(classes, axis, sort, axes)
    owned = {it: frozenset(a for c, a, _ in rows if c == it) for it in classes.tolist()}
    keys = [(owned[c], s) for c, _, s in rows]
    for one, key in zip(numbers.tolist(), keys, strict=True):
        assert [n == one for n in numbers.tolist()] == [other == key for other in keys]
    firsts = {number: min(found) for number, (found, _) in zip(numbers.tolist(), keys, strict=True)}
    assert sorted(firsts) == list(range(len(firsts)))
    assert [firsts[number] for number in sorted(firsts)] == sorted(firsts.values())


def test_sets_with_equal_marks_are_told_apart(monkeypatch):
    """A regression test: sets were compared by a sum of random numbers, in which two sets may agree."""

    class Unlucky:
        def integers(self, *_bounds, size, dtype):
            return np.ones(size, dtype)

    monkeypatch.setattr(np.random, "default_rng", lambda _seed: Unlucky())
    classes, axis = np.array([1, 1, 2, 2, 3, 3]), np.array([0, 1, 0, 2, 0, 1])
    numbers = _group_numbers(classes, axis, np.zeros(6, np.int64), 3)
    assert numbers[0] == numbers[1] == numbers[4] == numbers[5] != numbers[2] == numbers[3]


def test_nothing_has_no_groups():
    none = np.zeros(0, np.int64)
    assert len(_group_numbers(none, none, none, 3)) == 0
