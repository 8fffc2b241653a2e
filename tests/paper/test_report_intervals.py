"""Paired intervals of differences, against a slow bootstrap and against scipy."""

import random
from math import sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from keepk.errors import DataError
from keepk_paper.report.intervals import STUDENT, over_pictures, over_seeds, paired, wrong_pictures
from keepk_paper.report.lines import Line
from made_results import flags, line, packed


def lines(*records):
    return tuple(Line("vgg16-cifar10.jsonl", number, record) for number, record in enumerate(records, start=1))


def bootstrap(wrong, other, draws=1_000):
    """The difference, and the quantiles of its distribution over pictures drawn with replacement: the obvious way."""
    by_picture = [100 * float(np.mean(one) - np.mean(two)) for one, two in zip(wrong.T, other.T, strict=True)]
    chance = random.Random(1)
    means = sorted(np.mean(chance.choices(by_picture, k=len(by_picture))) for _ in range(draws))
    return np.mean(by_picture), means[int(0.025 * draws)], means[int(0.975 * draws)]


@pytest.mark.parametrize(("seeds", "gap"), [(1, 0.05), (3, 0.02), (2, 0.0)])
def test_the_interval_over_pictures_is_that_of_a_bootstrap(seeds, gap):
    wrong = np.array([flags(0.12 + gap, seed, 600) for seed in range(seeds)])
    other = np.array([flags(0.12, 50 + seed, 600) for seed in range(seeds)])
    found = over_pictures(wrong, other)
    difference, low, high = bootstrap(wrong, other)
    assert found.difference == pytest.approx(difference)
    width = high - low
    assert found.low == pytest.approx(low, abs=0.1 * width)
    assert found.high == pytest.approx(high, abs=0.1 * width)
    assert (found.over, found.units) == ("pictures", 600)


def test_pairing_by_picture_is_narrower_than_two_independent_samples():
    """Most pictures are hard for both runs, so that the difference varies less than either error."""
    wrong, other = flags(0.15, 1, 2_000), flags(0.12, 2, 2_000)
    found = over_pictures([wrong], [other])
    independent = 1.96 * 100 * sqrt(wrong.var() / 2_000 + other.var() / 2_000)
    assert found.high - found.difference < 0.6 * independent


@settings(max_examples=30)
@given(errors=st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=2, max_size=11))
def test_the_interval_over_seeds_is_students(errors):
    one, other = ([pair[place] for pair in errors] for place in (0, 1))
    found = over_seeds(one, other)
    differences = np.subtract(one, other)
    half = stats.t.ppf(0.975, len(errors) - 1) * stats.sem(differences)
    assert found.difference == pytest.approx(differences.mean(), abs=1e-9)
    assert found.high - found.difference == pytest.approx(half, rel=1e-3, abs=1e-9)
    assert found.difference - found.low == pytest.approx(half, rel=1e-3, abs=1e-9)


def test_more_seeds_than_the_table_has_are_a_little_cautious():
    exact = [stats.t.ppf(0.975, degrees) for degrees in range(1, 11)]
    assert pytest.approx(exact, rel=2e-4) == list(STUDENT)
    many = over_seeds([1.0, 2.0] * 10, [0.0] * 20)
    assert many.high - many.difference > stats.t.ppf(0.975, 19) * stats.sem([1.0, 2.0] * 10)


def test_pictures_are_paired_if_all_lines_store_them_and_seeds_otherwise():
    of = lines(line("vgg16-cifar10", "a", 1), line("vgg16-cifar10", "a", 2))
    against = lines(line("vgg16-cifar10", "b", 1), line("vgg16-cifar10", "b", 2))
    by_pictures = paired(of, against)
    assert by_pictures is not None
    assert by_pictures.over == "pictures"
    older = lines(*({key: value for key, value in it.record.items() if key != "test_wrong"} for it in of))
    by_seeds = paired(older, against)
    assert by_seeds is not None
    assert by_seeds.over == "seeds"
    assert paired(older[:1], against[:1]) is None
    assert paired((), ()) is None


@pytest.mark.parametrize("pictures", [8, 13, 400, 401])
def test_flags_are_read_back_without_the_padding(pictures):
    wrong = np.arange(pictures) % 3 == 0
    (found,) = lines(line("vgg16-cifar10", "a", wrong=wrong))
    assert wrong_pictures(found).tolist() == wrong.tolist()


def test_no_wrong_picture_at_all():
    (found,) = lines(line("vgg16-cifar10", "a", wrong=np.zeros(16, bool)))
    assert wrong_pictures(found).tolist() == [False] * 16


@pytest.mark.parametrize("broken", ["no base64!", 7, None])
def test_flags_that_cannot_be_read_are_refused(broken):
    (found,) = lines(line("vgg16-cifar10", "a") | {"test_wrong": broken})
    with pytest.raises(DataError, match=r"vgg16-cifar10\.jsonl:1: test_wrong is not base64\. Remove or repair"):
        wrong_pictures(found)


def test_flags_that_contradict_the_error_are_refused():
    (found,) = lines(line("vgg16-cifar10", "a", wrong=np.ones(16, bool)) | {"test_error": 12.5})
    with pytest.raises(DataError, match=r"test_wrong marks 16 of up to 16 pictures, but test_error is 12\.5 %"):
        wrong_pictures(found)


def test_runs_on_different_test_sets_are_not_compared():
    of = lines(line("vgg16-cifar10", "a", wrong=flags(0.2, 1, 80)))
    against = lines(line("vgg16-cifar10", "b", wrong=flags(0.2, 2, 160)))
    with pytest.raises(DataError, match="different numbers of pictures"):
        paired(of, against)


def test_packing_is_that_of_the_experiments():
    torch = pytest.importorskip("torch")
    from keepk_paper.train import packed_flags

    wrong = flags(0.3, 5, 77)
    assert packed_flags(torch.from_numpy(wrong)) == packed(wrong)
