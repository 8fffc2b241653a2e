"""Masks are held through casts and moves of the weights."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keepk.cut import masks as hold
from keepk.cut.masks import held
from strategies import DTYPES, seeds


@given(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4), st.booleans(), seeds)
def test_a_mask_is_held_through_casts(dtypes, widened, seed):
    """After each cast the weights have new memory, and possibly a different word size."""
    generator = torch.Generator().manual_seed(seed)
    parameter = nn.Parameter(torch.randn(5, 7, generator=generator))
    dead = torch.rand(5, 7, generator=generator) < 0.5
    usual, hold.WIDENED = hold.WIDENED, hold.WIDENED if widened else 0
    try:
        (mask,) = held([(parameter, dead)])
    finally:
        hold.WIDENED = usual
    for dtype in dtypes:
        with torch.no_grad():
            parameter.data = torch.randn(5, 7, generator=generator).to(dtype)
            kept = parameter.detach().clone()
            mask.zero()
            assert parameter[dead].eq(0).all()
            assert parameter[~dead].equal(kept[~dead])


def test_weights_that_were_cast_let_go_of_their_old_memory():
    parameter = nn.Parameter(torch.randn(5, 7))
    (mask,) = held([(parameter, torch.zeros(5, 7, dtype=torch.bool))])
    mask.zero()
    old = parameter.data.untyped_storage()._weak_ref()
    parameter.data = parameter.data.double()
    mask.zero()
    assert torch.UntypedStorage._expired(old)


def test_complex_weights_are_held():
    parameter = nn.Parameter(torch.ones(3, dtype=torch.complex128))
    (mask,) = held([(parameter, torch.tensor([True, False, True]))])
    mask.zero()
    assert parameter.tolist() == [0, 1, 0]
