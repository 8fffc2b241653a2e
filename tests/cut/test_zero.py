"""Zeroing by bitwise AND equals a plain masked_fill."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from keepk.cut import masks as zero
from strategies import DTYPES, seeds


@given(
    shape=st.lists(st.integers(0, 7), max_size=4).map(tuple),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    turned=st.booleans(),
    block=st.integers(1, 40),
    seed=seeds,
)
def test_zero_dead_is_a_masked_fill(shape, dtypes, turned, block, seed):
    generator = torch.Generator().manual_seed(seed)
    dead = torch.rand(shape, generator=generator) < 0.5
    tensors = [torch.randn(shape, generator=generator).to(dtype) for dtype in dtypes]
    tensors = [torch.where(torch.rand(shape, generator=generator) < 0.2, torch.nan, tensor) for tensor in tensors]
    if turned and len(shape) == 4:
        tensors = [tensor.to(memory_format=torch.channels_last) for tensor in tensors]
    expected = [tensor.masked_fill(dead, 0) for tensor in tensors]
    usual, zero.BLOCK = zero.BLOCK, block
    try:
        zero.zero_dead(tensors, dead)
    finally:
        zero.BLOCK = usual
    for tensor, oracle in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.isnan(), oracle.isnan())
        assert torch.equal(tensor.nan_to_num(), oracle.nan_to_num())
        assert not tensor[dead].signbit().any()  # +0.0, not -0.0
