"""The exact selection of weights compared with a slow sort, at sizes that force several pieces, misses and rounds."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepk.errors import RankError
from keepk.rank.kth_largest import Ranked, Sizes, round_down, round_up
from keepk.rank.weights import DTYPES, CutPoint, cut_points, dead_mask

LEVELS = [level / 8 for level in range(-8, 8)]
KINDS = ("normal", "levels", "zeros", "equal", "infinite", "ordered", "tiny")

sizes = st.builds(
    Sizes,
    piece=st.sampled_from([5, 64, 1024, 4096]),
    sample=st.sampled_from([4, 32, 1 << 18]),
    room=st.sampled_from([0, 1, 8, 100, 1 << 23]),
)
no_floor = st.just(0)
shapes = st.sampled_from([(), (0,), (1,), (7,), (40,), (3, 5), (2, 3, 4, 2), (4, 0, 2), (64, 33), (16, 64, 2)])


def values_of(kind, shape, generator):
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "levels":
        return torch.tensor(LEVELS, dtype=torch.float64)[torch.randint(16, shape, generator=generator)]
    if kind == "zeros":
        return torch.where(torch.rand(shape, generator=generator) < 0.95, 0.0 * normal, normal)  # 0.0 and -0.0
    if kind == "equal":
        return torch.full(shape, 0.3, dtype=torch.float64)
    if kind == "infinite":
        return torch.where(normal.abs() > 1, normal * math.inf, normal)
    if kind == "ordered":
        return normal.flatten().sort().values.view(shape)
    return normal * 1e-44 if kind == "tiny" else normal


@st.composite
def ranked(draw, kinds=KINDS, dtypes=DTYPES, floors=no_floor):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape, kind, absolute = draw(shapes), draw(st.sampled_from(kinds)), draw(st.booleans())
    kind = "normal" if absolute and kind == "infinite" else kind
    scores = values_of(kind, shape, generator).to(draw(st.sampled_from(dtypes)))
    layout = draw(st.sampled_from(["rows", "channels_last", "transposed", "every other"]))
    if layout == "channels_last" and len(shape) == 4:
        scores = scores.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        scores = scores.mT.contiguous().mT if len(shape) >= 2 else scores
    elif layout == "every other" and shape:
        scores = torch.repeat_interleave(scores, 2, dim=-1)[..., ::2]
    dead = None
    if draw(st.booleans()):
        dead = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.95, 1.0]))
        garbage = draw(st.sampled_from([0.0, math.nan, math.inf]))
        scores = torch.where(dead, garbage, scores).to(scores.dtype) if garbage else scores.masked_fill(dead, 0.0)
    return Ranked(f"layer{draw(st.integers(0, 99))}", scores, dead, absolute, draw(floors))


def alive_entries(tensors):
    """(-score, tensor, index) of all unpruned entries: sorted, the best come first; the earlier index wins a tie."""
    entries = []
    for layer, (_, scores, dead, absolute, _) in enumerate(tensors):
        pruned = [False] * scores.numel() if dead is None else dead.flatten().tolist()
        for index, (score, gone) in enumerate(zip(scores.flatten().tolist(), pruned, strict=True)):
            if not gone:
                entries.append((-abs(score) if absolute else -score, layer, index))
    return sorted(entries)


def oracle(tensors, k):
    """The kept (tensor, index) pairs: each tensor's best up to its floor, then the best of the rest."""
    entries = alive_entries(tensors)
    kept = set()
    for layer, tensor in enumerate(tensors):
        kept.update([(at, index) for _, at, index in entries if at == layer][: tensor.floor])
    rest = [(at, index) for _, at, index in entries if (at, index) not in kept]
    return kept | set(rest[: k - len(kept)])


def kept_by(tensors, k, sizes):
    cuts = cut_points(tensors, k, sizes=sizes)
    masks = [dead_mask(tensor, cut, sizes=sizes) for tensor, cut in zip(tensors, cuts, strict=True)]
    assert [cut.kept for cut in cuts] == [int((~mask).sum()) for mask in masks]
    return {(layer, index) for layer, mask in enumerate(masks) for index in (~mask).flatten().nonzero()[:, 0].tolist()}


def some_k(data, low, high):
    return data.draw(st.one_of(st.sampled_from([low, min(low + 1, high), high]), st.integers(low, high)))


@settings(derandomize=True, max_examples=300, deadline=None)
@given(tensors=st.lists(ranked(), max_size=4), sizes=sizes, data=st.data())
def test_exactly_the_k_best_stay(tensors, sizes, data):
    """Any mix of dtypes, shapes, layouts, ties and masks; k from 0 to all."""
    k = some_k(data, 0, len(alive_entries(tensors)))
    assert kept_by(tensors, k, sizes) == oracle(tensors, k)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(tensors=st.lists(ranked(floors=st.integers(0, 60)), min_size=1, max_size=5), sizes=sizes, data=st.data())
def test_floors_come_first_and_k_is_still_met(tensors, sizes, data):
    total = len(alive_entries(tensors))
    needed = sum(min(tensor.floor, len(alive_entries([tensor]))) for tensor in tensors)
    k = some_k(data, needed, total)
    kept = kept_by(tensors, k, sizes)
    assert len(kept) == k
    assert kept == oracle(tensors, k)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(tensors=st.lists(ranked(), min_size=1, max_size=3), sizes=sizes, data=st.data())
def test_two_cuts_are_one(tensors, sizes, data):
    """Cutting to k1 and then to k2 < k1 is cutting to k2."""
    k1 = some_k(data, 0, len(alive_entries(tensors)))
    k2 = some_k(data, 0, k1)
    first = cut_points(tensors, k1, sizes=sizes)
    later = [t._replace(dead=dead_mask(t, cut, sizes=sizes)) for t, cut in zip(tensors, first, strict=True)]
    assert kept_by(later, k2, sizes) == kept_by(tensors, k2, sizes)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(tensor=ranked(), sizes=sizes, data=st.data())
def test_inputs_are_only_read_and_the_mask_is_new(tensor, sizes, data):
    before = tensor.scores.clone(), None if tensor.dead is None else tensor.dead.clone()
    (cut,) = cut_points([tensor], some_k(data, 0, len(alive_entries([tensor]))), sizes=sizes)
    mask = dead_mask(tensor, cut, sizes=sizes)
    assert torch.equal(bits(tensor.scores), bits(before[0]))
    assert tensor.dead is None if before[1] is None else torch.equal(tensor.dead, before[1])
    assert mask.dtype == torch.bool
    assert mask.stride() == torch.empty_like(tensor.scores, dtype=torch.bool).stride()
    assert tensor.dead is None or mask.data_ptr() != tensor.dead.data_ptr() or mask.numel() == 0


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


@settings(derandomize=True, deadline=None)
@given(
    value=st.one_of(st.floats(allow_nan=False), st.floats(-1e-37, 1e-37), st.floats(-7e4, 7e4)),
    dtype=st.sampled_from(DTYPES),
)
def test_rounding_down_and_up_is_tight(value, dtype):
    """No number of the dtype lies strictly between the value and its rounded value."""
    below, above = round_down(value, dtype), round_up(value, dtype)
    assert torch.tensor([below, above], dtype=torch.float64).to(dtype).tolist() == [below, above]
    assert below <= value <= above
    if below != above:
        next_up = torch.nextafter(torch.tensor(below, dtype=dtype), torch.tensor(math.inf, dtype=dtype))
        assert next_up.item() == above
        assert math.isinf(value) or Fraction(value) not in [Fraction(x) for x in (below, above) if math.isfinite(x)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.02, 0.5, 0.97])
def test_large_tensors_with_the_default_sizes(kind, share):
    """Above the sample size and with the default piece size, counts and kept sets agree with a stable sort."""
    generator = torch.Generator().manual_seed(1)
    tensors = [
        Ranked("a", values_of(kind, (400, 1000), generator).float()),
        Ranked("b", values_of(kind, (64, 32, 30, 8), generator).float().to(memory_format=torch.channels_last)),
    ]
    scores = torch.cat([tensor.scores.reshape(-1) for tensor in tensors])
    k = int(share * len(scores))
    expected = torch.zeros(len(scores), dtype=torch.bool)
    expected[scores.sort(descending=True, stable=True).indices[:k]] = True
    masks = [dead_mask(t, cut) for t, cut in zip(tensors, cut_points(tensors, k), strict=True)]
    assert torch.equal(torch.cat([~mask.reshape(-1) for mask in masks]), expected)


def test_many_narrow_rounds_end_right():
    """A third of the entries are equal, the others are distinct, and only single entries may be gathered."""
    weights = torch.arange(1, 2049, dtype=torch.float64).flip(0)
    weights[::3] = 5000.0
    sizes = Sizes(piece=3, sample=700, room=1)
    tensors = [Ranked("fc", weights)]
    for k in (1, 600, 700, 1500, 2048):
        assert kept_by(tensors, k, sizes) == oracle(tensors, k)


def test_a_float64_threshold_is_not_rounded_to_float32():
    """float64's 0.1 is below float32's 0.1, so rounding the threshold would keep one entry too few."""
    wide = Ranked("wide", torch.tensor([0.1, 0.1 + 1e-12], dtype=torch.float64))
    narrow = Ranked("narrow", torch.tensor([0.1, 0.05]))
    assert kept_by([wide, narrow], 2, None) == {(0, 1), (1, 0)}
    assert kept_by([wide, narrow], 3, None) == {(0, 0), (0, 1), (1, 0)}


def test_parameters_are_ranked_without_their_gradients():
    weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
    tensor = Ranked("fc.weight", weight, absolute=True)
    (cut,) = cut_points([tensor], 2)
    assert cut == CutPoint(value=2.0, ties=1, kept=2)
    assert dead_mask(tensor, cut).tolist() == [[True, False], [True, False]]


def test_the_number_of_threads_is_given_back():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RankError):
            cut_points([Ranked("fc", torch.ones(3))], 4)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_scores_are_refused_by_name(dtype):
    bad = Ranked("conv1.weight", torch.tensor([1.0, math.nan, math.nan, math.inf], dtype=dtype))
    with pytest.raises(RankError, match=r"2 of the 4 scores of 'conv1.weight' are NaN; return a number for every"):
        cut_points([Ranked("fc", torch.ones(2)), bad], 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_not_finite_are_refused_by_name(dtype):
    weights = torch.tensor([1.0, math.nan, -math.inf, math.inf], dtype=dtype)
    message = r"parameter 'fc1.weight': 3 of 4 values are NaN or infinite; fix the training before pruning"
    with pytest.raises(RankError, match=message):
        cut_points([Ranked("fc1.weight", weights, absolute=True)], 1)


def test_large_finite_weights_are_no_infinite_ones():
    """Their sum overflows, but they are ranked like any others."""
    weights = torch.tensor([3e38, 2e38, -3.3e38])
    assert kept_by([Ranked("fc", weights, absolute=True)], 2, None) == {(0, 0), (0, 2)}


@pytest.mark.parametrize(
    ("k", "message"),
    [
        (-1, r"k=-1 entries; choose k >= 0"),
        (5, r"k=5 entries, but only 4 are alive in 2 tensors; choose k <= 4"),
        (2, r"k=2 entries, but the floors of 2 tensors need 3; choose k >= 3 or lower the floors"),
    ],
)
def test_impossible_counts_are_refused_with_the_numbers(k, message):
    dead = torch.tensor([True, False, False])
    tensors = [Ranked("a", torch.ones(3), dead, floor=9), Ranked("b", torch.ones(2), floor=1)]
    with pytest.raises(RankError, match=message):
        cut_points(tensors, k)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (Ranked("a", torch.ones(3, dtype=torch.int32)), r"'a': scores are torch.int32; rank float16"),
        (Ranked("b", torch.ones(3), torch.zeros(2, dtype=torch.bool)), r"'b': the mask is torch.bool \(2,\)"),
        (Ranked("c", torch.ones(3), torch.zeros(3)), r"'c': the mask is torch.float32 \(3,\) on cpu"),
    ],
)
def test_what_is_no_score_or_no_mask_is_refused(tensor, message):
    with pytest.raises(RankError, match=message):
        cut_points([tensor], 1)
