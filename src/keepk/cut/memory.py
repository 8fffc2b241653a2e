"""Finding tensor objects that share memory."""

from collections.abc import Iterator, Mapping

from torch import Tensor


def sharing_memory(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names of tensors whose memory overlaps; tensors side by side in one storage do not.

    A tensor that overlaps several others is paired with the one that reaches furthest.

    >>> import torch
    >>> flat = torch.zeros(9)
    >>> list(sharing_memory({"a": flat[:4], "b": flat[4:], "c": flat[2:3], "d": torch.zeros(9)}))
    [('a', 'c')]
    """
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel() and not tensor.is_meta)
    reached, holder = (-1, 0), ""  # the device is -1 for the CPU
    # Sorted by device and first address, a tensor overlaps an earlier one only if it starts before the furthest end.
    for place, start, end, name in spans:
        if (place, start) < reached:
            yield holder, name
        if (place, end) > reached:
            reached, holder = (place, end), name


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """The device of a tensor, its first address, and the address after its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.get_device(), start, start + (last + 1) * tensor.element_size()
