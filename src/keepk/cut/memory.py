"""Tensor objects that lie over the same memory."""

from collections.abc import Iterator, Mapping

from torch import Tensor


def sharing_memory(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Names of objects whose memory overlaps, two by two; neighbours in one piece of memory do not.

    >>> import torch
    >>> flat = torch.zeros(9)
    >>> list(sharing_memory({"a": flat[:4], "b": flat[4:], "c": flat[2:3], "d": torch.zeros(9)}))
    [('a', 'c')]
    """
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if tensor.numel() and not tensor.is_meta)
    reached, holder = (-1, 0), ""  # -1 is the CPU
    for place, start, end, name in spans:
        if (place, start) < reached:
            yield holder, name
        if (place, end) > reached:
            reached, holder = (place, end), name


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """The device, the first and the last address of a tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.get_device(), start, start + (last + 1) * tensor.element_size()
