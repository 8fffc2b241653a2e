"""Random crops and reflections of a batch, compared with a loop over its images."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepk.errors import KeepkError
from keepk_paper.pictures import crop_and_flip

fixed = settings(derandomize=True, deadline=None, max_examples=100)


def picture_by_picture(images, seed, padding, flip):
    """The oracle: pixel by pixel, with the same random numbers."""
    generator = torch.Generator().manual_seed(seed)
    number, _, height, width = images.shape
    tops = torch.randint(2 * padding + 1, (number,), generator=generator).tolist()
    lefts = torch.randint(2 * padding + 1, (number,), generator=generator).tolist()
    mirrored = torch.randint(2, (number,), generator=generator).tolist() if flip else [0] * number
    out = torch.zeros_like(images)
    for n, c, row, column in torch.cartesian_prod(*(torch.arange(size) for size in images.shape)).tolist():
        y = row + tops[n] - padding
        x = (width - 1 - column if mirrored[n] else column) + lefts[n] - padding
        if 0 <= y < height and 0 <= x < width:
            out[n, c, row, column] = images[n, c, y, x]
    return out


@fixed
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(2, 6), st.integers(2, 6)),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.float16]),
    channels_last=st.booleans(),
    padding=st.integers(0, 7),
    flip=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_batch_is_what_a_loop_makes_of_it(shape, dtype, channels_last, padding, flip, seed):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    images = images.contiguous(memory_format=layout)
    before = images.clone()
    got = crop_and_flip(images, torch.Generator().manual_seed(seed), padding=padding, flip=flip)
    assert got.dtype == dtype
    assert torch.equal(got, picture_by_picture(images, seed, padding, flip))
    assert torch.equal(images, before)


def test_every_place_and_both_sides_come_equally_often():
    """A bright pixel in the middle of an image reveals the position of its crop, and one next to it the reflection."""
    pictures = torch.zeros(20_000, 1, 5, 5, dtype=torch.uint8)
    pictures[:, 0, 2, 2] = 1
    pictures[:, 0, 2, 3] = 2
    got = crop_and_flip(pictures, torch.Generator().manual_seed(0), padding=1)[:, 0]
    kinds, counts = torch.unique(got.flatten(1), dim=0, return_counts=True)
    assert len(kinds) == 3 * 3 * 2
    assert (counts / 20_000 - 1 / 18).abs().max() < 0.006


def test_the_generator_alone_decides():
    images = torch.arange(8 * 3 * 32 * 32, dtype=torch.float32).reshape(8, 3, 32, 32)
    torch.manual_seed(3)
    first = crop_and_flip(images, torch.Generator().manual_seed(7))
    state = torch.get_rng_state()
    torch.manual_seed(4)
    generator = torch.Generator().manual_seed(7)
    assert torch.equal(crop_and_flip(images, generator), first)
    assert not torch.equal(crop_and_flip(images, generator), first)
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_batch_stays_on_its_device():
    """Operations that mix tensors on the meta device and on the CPU fail."""
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8, device="meta")
    assert crop_and_flip(images, torch.Generator()).device.type == "meta"
    with torch.device("meta"):
        assert crop_and_flip(torch.zeros(2, 3, 8, 8, device="cpu"), torch.Generator()).device.type == "cpu"


def test_an_empty_batch_stays_empty():
    assert crop_and_flip(torch.zeros(0, 3, 32, 32), torch.Generator()).shape == (0, 3, 32, 32)


@pytest.mark.parametrize(("shape", "padding"), [((3, 32, 32), 4), ((1, 1, 3, 32, 32), 4), ((2, 3, 32, 32), -1)])
def test_what_is_no_batch_is_refused(shape, padding):
    message = rf"crop_and_flip: got images \[{', '.join(map(str, shape))}\] and padding={padding}\. Give a batch"
    with pytest.raises(KeepkError, match=message):
        crop_and_flip(torch.zeros(shape), torch.Generator(), padding=padding)
