"""Tensors with many zeros, stored as the other values and their places.

The entries are taken in row-major order. An entry counts as zero if all of its bits are zero, so -0.0 is a value, and
restoring a tensor gives back every bit of it. `compacted` chooses the smallest of three forms:

* ``values`` and ``gaps`` of one byte: for each value, the number of zeros between it and the value before. The byte 255
  stands for 255 zeros that are followed by another gap.
* The same with gaps of two bytes, where 65,535 means "another gap follows". Smaller than one byte if fewer than about
  0.3 % of the entries are values.
* ``values`` and a ``bitmask``: one bit for each entry, the first entry in the lowest bit of the first byte. Smaller
  than gaps if more than about 12 % of the entries are values.

>>> parts = compacted(torch.tensor([0.0, 0.0, 1.5] + 300 * [0.0] + [-0.0]))
>>> parts["values"], parts["gaps"]
(tensor([1.5000, -0.0000]), tensor([  2, 255,  45], dtype=torch.uint8))
>>> expanded(parts, torch.float32, 304)[[2, 3, 303]]
tensor([1.5000, 0.0000, -0.0000])

The reader does not trust the parts: it refuses everything that `compacted` cannot have written for a tensor of that
size, before it allocates the tensor.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepk.errors import FileError
from keepk.storage.codec import dtype_name

PARTS = {"gaps": ("values", "gaps"), "bitmask": ("values", "bitmask")}
"""The names of the parts of each form."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_SMALLEST_HALF = 2.0**-24


def can_be_compacted(tensor: Tensor) -> bool:
    """Whether `compacted` takes the tensor: floats of 2, 4 or 8 bytes."""
    return tensor.is_floating_point() and tensor.element_size() in _BITS


def compacted(tensor: Tensor) -> dict[str, Tensor]:
    """The parts of a tensor in its smallest form, on the CPU.

    Args:
        tensor: Floats of 2, 4 or 8 bytes, of any shape.

    Returns:
        ``values`` with either ``gaps`` or ``bitmask``.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    alive = _bits(flat) != 0
    places = np.flatnonzero(alive)
    zeros = np.diff(places, prepend=-1) - 1  # before each value
    gaps, short = [
        (width * (len(zeros) + int((zeros // np.iinfo(kind).max).sum())), kind)
        for width, kind in ((1, np.uint8), (2, np.uint16))
    ]
    best, kind = min(gaps, short, key=lambda it: it[0])
    values = flat[torch.from_numpy(places)]
    if best <= -(-len(alive) // 8):
        return {"values": values, "gaps": torch.from_numpy(_gaps(zeros, kind))}
    return {"values": values, "bitmask": torch.from_numpy(np.packbits(alive, bitorder="little"))}


def _gaps(zeros: NDArray[np.int64], kind: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """The numbers of zeros, each as any number of largest values and one smaller one."""
    largest = int(np.iinfo(kind).max)
    skips = zeros // largest
    gaps = np.full(len(zeros) + int(skips.sum()), largest, kind)
    gaps[np.arange(len(zeros)) + np.cumsum(skips)] = (zeros % largest).astype(kind)
    return gaps


def as_half(values: Tensor) -> Tensor:
    """The values rounded to float16, so that none becomes zero.

    Raises:
        ValueError: A finite value is out of float16's range.
    """
    half = values.to(torch.float16)
    if (lost := half.isinf() & ~values.isinf()).any():
        raise ValueError(f"{float(values[lost][0])} is out of the range of float16, which ends at 65,504")
    # A value that became 0 would no longer count as a kept weight. Adding 0.0 keeps the sign bit of every number but 0.
    gone = (half == 0) & (values != 0)
    return torch.where(gone, torch.copysign(torch.full_like(values, _SMALLEST_HALF), values).to(torch.float16), half)


def expanded(parts: Mapping[str, Tensor], dtype: torch.dtype, size: int) -> Tensor:
    """The tensor of which `compacted` made the parts, with one dimension.

    Args:
        parts: The parts, by name. The values may have another dtype than the tensor: those that `as_half` rounded.
        dtype: The tensor's dtype.
        size: The number of its entries, which is trusted: that many are allocated.

    Raises:
        FileError: The parts cannot be those of such a tensor.
    """
    for name, part in parts.items():
        if part.dim() != 1:
            raise FileError(f"its {name} have shape {tuple(part.shape)} instead of one dimension")
    values = parts["values"]
    if dtype.itemsize not in _BITS or values.dtype.itemsize not in _BITS:
        raise FileError(f"its values are {dtype_name(values.dtype)}, which is never stored without its zeros")
    if not _bits(values).all():
        raise FileError("one of its values is 0, which is never stored")
    places = _from_bitmask(parts, size) if "bitmask" in parts else _from_gaps(parts, size)
    tensor = torch.zeros(size, dtype=dtype)
    _bits(tensor)[places] = _bits(values.to(dtype))
    return tensor


def _from_gaps(parts: Mapping[str, Tensor], size: int) -> NDArray[np.int64]:
    if parts["gaps"].dtype not in (torch.uint8, torch.uint16):
        raise FileError(f"its gaps are {dtype_name(parts['gaps'].dtype)} instead of uint8 or uint16")
    gaps, count = parts["gaps"].numpy(), len(parts["values"])
    ends = gaps != np.iinfo(gaps.dtype).max  # the gaps that a value follows
    if np.count_nonzero(ends) != count or (len(gaps) and not ends[-1]):
        raise FileError(f"it has {count:,} values, but its gaps have places for {np.count_nonzero(ends):,}")
    if len(gaps) > size:  # each gap is about at least one entry; checked first, because the sums are 8 bytes each
        raise FileError(f"it has {len(gaps):,} gaps, but only {size:,} entries")
    places: NDArray[np.int64] = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count)
    if count and places[-1] >= size:
        raise FileError(f"its gaps lead to entry {places[-1]:,}, but it has only {size:,}")
    return places


def _from_bitmask(parts: Mapping[str, Tensor], size: int) -> NDArray[np.bool_]:
    mask, count = parts["bitmask"], len(parts["values"])
    if mask.dtype != torch.uint8 or len(mask) != -(-size // 8):
        raise FileError(f"its bitmask has {len(mask):,} entries of {dtype_name(mask.dtype)} for {size:,} entries")
    bits = np.unpackbits(mask.numpy(), bitorder="little").view(np.bool_)
    if bits[size:].any() or np.count_nonzero(bits) != count:
        raise FileError(f"it has {count:,} values, but its bitmask has places for {np.count_nonzero(bits):,}")
    return bits[:size]


def _bits(flat: Tensor) -> NDArray[Any]:
    """The values as integers of the same bits, sharing memory."""
    array: NDArray[Any] = flat.view(_BITS[flat.element_size()]).numpy()
    return array
