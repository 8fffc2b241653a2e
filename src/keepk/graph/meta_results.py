"""The results of common operations on the meta device, found faster than torch finds them.

On the meta device an operation computes only the shape of its result. For most operations torch does so by a
decomposition in Python, which takes .2 to 1.5 ms: that was a third of the time of a trace. The results of the most
frequent operations are simple enough to be written down:

>>> x = torch.empty(2, 3, 8, 8, device="meta")
>>> meta_result(torch.ops.aten.relu.default, (x,), {}).shape
torch.Size([2, 3, 8, 8])

They are used only for tensors that are contiguous and have one floating-point dtype, where sizes fit. Everything else,
errors included, is left to torch:

>>> meta_result(torch.ops.aten.relu.default, (x.transpose(0, 1),), {}) is None
True
>>> meta_result(torch.ops.aten.add.Tensor, (x, x[:, :2]), {}) is None
True
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

aten = torch.ops.aten
Arguments: TypeAlias = Sequence[Any]
Named: TypeAlias = Mapping[str, Any]
# One or more result tensors; None leaves the operation to torch.
Result: TypeAlias = Tensor | tuple[Tensor, ...] | None


def meta_result(operation: Any, arguments: Arguments, by_name: Named) -> Result:
    """The result of an operation on meta tensors; None if torch has to compute it.

    Args:
        operation: The overload of an ATen operation, below autograd: the result has no gradient.
        arguments: Its positional arguments.
        by_name: Its keyword arguments.
    """
    shortcut = _SHORTCUTS.get(operation)
    return shortcut(arguments, by_name) if shortcut is not None else None


def _is_plain(tensor: Any, dtype: torch.dtype | None = None) -> bool:
    """Whether a tensor is on the meta device, contiguous, and of a floating-point dtype, the given one if there is."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_meta
        and tensor.dtype.is_floating_point
        and (dtype is None or tensor.dtype is dtype)
        and tensor.is_contiguous()
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)  # torch refuses some operations with bools


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _like_first(arguments: Arguments, by_name: Named) -> Result:
    """A function of one tensor, element by element; further arguments are numbers."""
    x, *others = arguments
    others += by_name.values()
    if not _is_plain(x) or not all(_is_number(it) or it is None or isinstance(it, str) for it in others):
        return None
    return _empty(x.shape, x.dtype)


def _clamp(arguments: Arguments, by_name: Named) -> Result:
    bounds = (*arguments[1:], *by_name.values())
    return _like_first(arguments, by_name) if any(bound is not None for bound in bounds) else None


def _in_place(arguments: Arguments, by_name: Named) -> Result:
    """The in-place form of `_like_first`; autograd has counted the write before."""
    return arguments[0] if _like_first(arguments, by_name) is not None else None


def _clamp_in_place(arguments: Arguments, by_name: Named) -> Result:
    return arguments[0] if _clamp(arguments, by_name) is not None else None


def _broadcast(arguments: Arguments, by_name: Named) -> Result:
    """A sum, product or quotient of two tensors, or of a tensor and a number."""
    x, y = arguments
    if not all(map(_is_number, by_name.values())):  # `alpha`
        return None
    if _is_number(y):
        return _empty(x.shape, x.dtype) if _is_plain(x) else None
    if not _is_plain(x) or not _is_plain(y, x.dtype):
        return None
    shape = _broadcast_shape(x.shape, y.shape)
    return None if shape is None else _empty(shape, x.dtype)


def _broadcast_shape(one: Sequence[int], other: Sequence[int]) -> Sequence[int] | None:
    """The shape of two broadcast shapes; None if they do not fit.

    >>> _broadcast_shape((2, 1, 4), (3, 1)), _broadcast_shape((2, 3), (2,))
    ((2, 3, 4), None)
    """
    if one == other:
        return one
    short, long = sorted((tuple(one), tuple(other)), key=len)
    short = (1,) * (len(long) - len(short)) + short
    if any(a != b and 1 not in (a, b) for a, b in zip(short, long, strict=True)):
        return None
    return tuple(b if a == 1 else a for a, b in zip(short, long, strict=True))


def _addmm(arguments: Arguments, by_name: Named) -> Result:
    bias, x, weight = arguments
    if by_name or x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[0]:
        return None
    # The strides of the factors do not matter: the result is contiguous.
    same = all(it.is_meta and it.dtype is x.dtype and it.dtype.is_floating_point for it in arguments)
    shape = (x.shape[0], weight.shape[1])
    return _empty(shape, x.dtype) if same and _broadcast_shape(bias.shape, shape) == shape else None


def _mean(arguments: Arguments, by_name: Named) -> Result:
    x, dims, *keep = arguments
    if by_name or not _is_plain(x) or not isinstance(dims, list) or not dims or not x.ndim:
        return None
    if not all(-x.ndim <= dim < x.ndim for dim in dims):
        return None
    gone = {dim % x.ndim for dim in dims}
    if len(gone) < len(dims):
        return None
    sizes = enumerate(x.shape)
    if keep and keep[0]:
        return _empty([1 if dim in gone else size for dim, size in sizes], x.dtype)
    return _empty([size for dim, size in sizes if dim not in gone], x.dtype)


def _softmax(arguments: Arguments, by_name: Named) -> Result:
    x, dim = arguments
    fits = not by_name and _is_plain(x) and x.ndim and -x.ndim <= dim < x.ndim
    return _empty(x.shape, x.dtype) if fits else None


def _layer_norm(arguments: Arguments, by_name: Named) -> Result:
    x, normalized, weight, bias, _ = arguments
    rank = len(normalized)
    carriers = [it for it in (weight, bias) if it is not None]
    if by_name or not _is_plain(x) or not 0 < rank <= x.ndim or list(x.shape[-rank:]) != list(normalized):
        return None
    if not all(_is_plain(it, x.dtype) and list(it.shape) == list(normalized) for it in carriers):
        return None
    rows = [*x.shape[:-rank], *[1] * rank]
    return _empty(x.shape, x.dtype), _empty(rows, x.dtype), _empty(rows, x.dtype)


def _group_norm(arguments: Arguments, by_name: Named) -> Result:
    x, weight, bias, batch, channels, positions, groups, _ = arguments
    carriers = [it for it in (weight, bias) if it is not None]
    if by_name or not _is_plain(x) or x.ndim < 2 or groups < 1 or channels % groups:
        return None
    if tuple(x.shape[:2]) != (batch, channels) or prod(x.shape[2:]) != positions:
        return None
    if not all(_is_plain(it, x.dtype) and tuple(it.shape) == (channels,) for it in carriers):
        return None
    return _empty(x.shape, x.dtype), _empty((batch, groups), x.dtype), _empty((batch, groups), x.dtype)


def _batch_norm(arguments: Arguments, by_name: Named) -> Result:
    pictures, *carriers = arguments[:5]
    if by_name or not pictures.is_meta:
        return None
    if any(carrier is not None and carrier.shape != pictures.shape[1:2] for carrier in carriers):
        raise RuntimeError(f"a BatchNorm of {carriers[0].shape} got {tuple(pictures.shape)}")
    statistics = pictures.new_empty(pictures.shape[1] if arguments[5] else 0)
    return torch.empty_like(pictures), statistics, statistics.clone()


_OF_ONE_TENSOR = (
    *(aten.relu, aten.sigmoid, aten.tanh, aten.gelu, aten.silu, aten.mish, aten.elu, aten.softplus, aten.leaky_relu),
    *(aten.hardtanh, aten.hardswish, aten.hardsigmoid, aten.clamp_min, aten.exp, aten.log, aten.sqrt),
    *(aten.rsqrt, aten.neg, aten.abs, aten.cos, aten.sin, aten.erf, aten.reciprocal),
)
_IN_PLACE = (aten.sigmoid_, aten.tanh_, aten.clamp_min_, aten.hardtanh_, aten.silu_, aten.hardswish_)
_SHORTCUTS: dict[Any, Callable[[Arguments, Named], Result]] = {
    **{packet.default: _like_first for packet in _OF_ONE_TENSOR},
    aten.pow.Tensor_Scalar: _like_first,
    aten.clamp.default: _clamp,
    aten.clamp_.default: _clamp_in_place,
    **{packet.default: _in_place for packet in _IN_PLACE},
    **{packet.Tensor: _broadcast for packet in (aten.add, aten.sub, aten.mul, aten.div)},
    **{packet.Scalar: _broadcast for packet in (aten.add, aten.sub, aten.mul, aten.div)},
    aten.addmm.default: _addmm,
    aten.mean.dim: _mean,
    aten._safe_softmax.default: _softmax,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten.native_batch_norm.default: _batch_norm,
}
