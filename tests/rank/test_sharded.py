"""The selection of weights over shards, in one process: a thread for each rank. The oracle ranks the whole tensors."""

import threading
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keepk.errors import RankError
from keepk.model.sharded import Block, chunks
from keepk.rank import sharded, weights
from keepk.rank.kth_largest import Ranked
from keepk.rank.sharded import Part


class Sums:
    """Adds up the vectors of several threads, and counts the sums."""

    def __init__(self, ranks):
        self.sizes, self._found, self._stages = [], {}, set()
        self._barrier = threading.Barrier(ranks, timeout=20)

    def total(self, rank):
        def add_up(stage, compute):
            self._found[rank] = compute()
            self._stages.add(stage)
            self._barrier.wait()
            assert len(self._stages) == 1, "ranks are in different sums"
            found = sum(self._found.values())
            if self._barrier.wait() == 0:
                self._stages.clear()
                self.sizes.append(8 * len(found))
            self._barrier.wait()
            return found

        return add_up


def blocks_of(shape, dims, mesh):
    """The blocks of all ranks of a mesh; by dim of the mesh, the sharded dim of the tensor, or None for a replica."""
    found = []
    for coordinate in torch.cartesian_prod(*(torch.arange(size) for size in mesh)).reshape(-1, len(mesh)).tolist():
        ranges, edges, counts = [(0, size) for size in shape], [(0, shape[0])], True
        for dim, size, place in zip(dims, mesh, coordinate, strict=True):
            if dim is None:
                counts &= place == 0
                continue
            start, end = ranges[dim]
            ranges[dim] = chunks(start, end, size)[place]
            if dim == 0:
                edges = [part for start, end in edges for part in chunks(start, end, size)]
        starts, sizes = [start for start, _ in ranges], [end - start for start, end in ranges]
        row = prod(shape[1:])
        rowwise = {0} | {start * row for start, end in edges if end > start}
        of_rows = all(dim in (0, None) for dim in dims)
        found.append(
            Block(tuple(shape), tuple(starts), tuple(sizes), counts, tuple(sorted(rowwise)) if of_rows else None)
        )
    return found


@st.composite
def problems(draw):
    """Tensors with ties, zeros and negative zeros, masks of earlier events, floors, and layouts over a mesh."""
    mesh = draw(st.sampled_from([(2,), (3,), (2, 2)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    levels = draw(st.sampled_from([1, 3, 1000]))
    dtypes = draw(st.lists(st.sampled_from(weights.DTYPES), min_size=1, max_size=3))
    absolute, tensors = draw(st.booleans()), []
    for index, dtype in enumerate(dtypes):
        least_size = draw(st.sampled_from([1, 1, 1, 0]))  # a few tensors are empty
        shape = draw(st.lists(st.integers(least_size, 6), min_size=1, max_size=3))
        values = (torch.randn(shape, generator=generator) * levels).round() / levels
        scores = torch.where(torch.rand(shape, generator=generator) < 0.1, -0.0, values).to(dtype)
        dead = torch.rand(shape, generator=generator) < 0.3 if draw(st.booleans()) else None
        floor = draw(st.integers(0, 4)) if len(shape) > 1 else 0
        dims = [draw(st.sampled_from([None, *range(len(shape))])) for _ in mesh]
        tensors.append((Ranked(f"t{index}", scores, dead, absolute, floor), blocks_of(shape, dims, mesh)))
    assume(any(it.scores.numel() for it, _ in tensors))  # a space without weights is refused
    alive = [it.scores.numel() - (0 if it.dead is None else int(it.dead.sum())) for it, _ in tensors]
    least = sum(min(it.floor, count) for (it, _), count in zip(tensors, alive, strict=True))
    return tensors, alive, draw(st.integers(least, sum(alive)))


def in_all_ranks(tensors, alive, k):
    """The masks that all ranks make, put together, and the sums that they needed."""
    ranks = len(tensors[0][1])
    sums, made, errors = Sums(ranks), dict[int, Any](), []

    def run(rank):
        parts = []
        for ranked, blocks in tensors:
            block = blocks[rank]
            dead = None if ranked.dead is None else block.of(ranked.dead).clone()
            parts.append(Part(ranked._replace(scores=block.of(ranked.scores).clone(), dead=dead), block))
        try:
            cuts = sharded.cut_points(parts, alive, k, sums.total(rank))
            made[rank] = cuts, [sharded.dead_mask(part, cut) for part, cut in zip(parts, cuts, strict=True)]
        except BaseException as error:
            errors.append(error)
            sums._barrier.abort()

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    masks = []
    for place, (ranked, blocks) in enumerate(tensors):
        whole = torch.full(ranked.scores.shape, 2, dtype=torch.int8)
        for rank, block in enumerate(blocks):
            mine = block.of(whole)
            assert ((mine == 2) | (mine == made[rank][1][place])).all(), "replicas differ"
            mine.copy_(made[rank][1][place])
        assert (whole < 2).all(), "an entry without a rank"
        masks.append(whole.bool())
    assert all(cuts == made[0][0] for cuts, _ in made.values())
    return made[0][0], masks, sums


@settings(max_examples=80, deadline=None)
@given(problems())
def test_all_ranks_together_keep_what_one_process_keeps(problem):
    tensors, alive, k = problem
    cuts, masks, _ = in_all_ranks(tensors, alive, k)
    whole = [ranked for ranked, _ in tensors]
    expected = weights.cut_points(whole, k)
    assert sum(int((~mask).sum()) for mask in masks) == k
    for ranked, cut, point, mask in zip(whole, cuts, expected, masks, strict=True):
        assert torch.equal(mask, weights.dead_mask(ranked, point)), ranked.name
        assert cut.point == point


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_empty_tensors_are_divided_too(shape, dim):
    """Beside one with ties, some of which stay, so that ties are counted by ranges."""
    empty = Ranked("empty", torch.zeros(shape), None, True, 0)
    tied = Ranked("tied", torch.ones(5, 4), None, True, 0)
    dims = [None if dim is None else min(dim, len(shape) - 1)]
    tensors = [(empty, blocks_of(shape, dims, (2,))), (tied, blocks_of((5, 4), [1], (2,)))]
    cuts, masks, _ = in_all_ranks(tensors, [0, 20], 7)
    assert [cut.kept for cut in cuts] == [0, 7]
    assert torch.equal(masks[1], torch.arange(20).reshape(5, 4) >= 7)
    assert masks[0].shape == shape


@pytest.mark.parametrize(("dim", "sums"), [(0, 3), (1, 4), (None, 3)])
def test_the_number_of_sums_and_their_size_do_not_depend_on_the_model(dim, sums, monkeypatch):
    """All entries are equal. Only shards that are no ranges of rows need a fourth sum."""
    monkeypatch.setattr(sharded, "ROOM", 4_000)
    scores = torch.full((90, 91), -0.5)
    tensors = [(Ranked("t", scores, None, True), blocks_of((90, 91), [dim], (3,)))]
    _, masks, found = in_all_ranks(tensors, [8190], 4321)
    assert not masks[0].view(-1)[:4321].any()
    assert masks[0].view(-1)[4321:].all()
    assert len(found.sizes) == sums
    assert max(found.sizes) <= 1 << 19


def test_nan_is_refused_and_infinite_scores_protect():
    blocks = blocks_of((4,), [0], (2,))
    with pytest.raises(RankError, match="1 of the 2 scores of 't' are NaN"):
        in_all_ranks([(Ranked("t", torch.tensor([1.0, 2.0, 3.0, float("nan")])), blocks)], [4], 2)
    scores = torch.tensor([1.0, float("inf"), float("-inf"), -5.0])
    _, masks, _ = in_all_ranks([(Ranked("t", scores), blocks)], [4], 3)
    assert masks[0].tolist() == [False, False, True, False]
