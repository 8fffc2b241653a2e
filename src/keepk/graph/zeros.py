"""Which operations keep a removed channel at zero, found by running them on a few numbers.

A table of such operations would be long and would have to know every argument (``clamp`` keeps 0 with ``min=-1`` and
not with ``min=1``). Elementwise operations are cheap to run, so they are tried instead.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

# Both signs, zero, and sizes on both sides of 1, for the inputs that are not zero.
FLOATS = (-1.3, 0.7, 2.1, -0.4, 0.0)
OTHERS = (0, 1, 3, 1, -2)
NOT_NEEDED = ("device", "generator", "memory_format")  # of the meta tensors in the trace; samples are on the CPU


def stays_zero(operation: Any, arguments: tuple[Sequence[Any], dict[str, Any]], zero: Sequence[bool]) -> bool:
    """Whether the result is 0 wherever the tensors flagged in `zero` are 0, for any values of the other tensors.

    Args:
        operation: The overload of an ATen operation.
        arguments: Its positional and its named arguments.
        zero: For each tensor among the arguments, in order, whether it is 0.

    >>> one, other = torch.zeros(3), torch.zeros(3)
    >>> stays_zero(torch.ops.aten.mul.Tensor, ((one, other), {}), (True, False))
    True
    >>> stays_zero(torch.ops.aten.add.Tensor, ((one, other), {}), (True, False))
    False
    >>> stays_zero(torch.ops.aten.cos.default, ((one,), {}), (True,))
    False
    """
    if not any(zero) or torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()):
        return False
    positional, by_name = arguments
    named = {key: value for key, value in by_name.items() if key not in NOT_NEEDED}
    leaves, tree = tree_flatten((list(positional), named))
    flags = iter(zero)
    values = tuple((value.dtype, next(flags)) if isinstance(value, Tensor) else value for value in leaves)
    tensors = tuple(isinstance(value, Tensor) for value in leaves)
    try:
        return _run_on_samples(operation, tree, values, tensors)
    except TypeError:  # an argument that cannot be hashed
        return bool(_run_on_samples.__wrapped__(operation, tree, values, tensors))


@lru_cache(maxsize=4096)  # a network repeats its layers, and a trace its forward passes
def _run_on_samples(operation: Any, tree: Any, values: tuple[Any, ...], tensors: tuple[bool, ...]) -> bool:
    """Run an operation with samples for its tensors; False if it fails on them, which leaves the question open."""
    leaves = [_sample(*value) if is_tensor else value for value, is_tensor in zip(values, tensors, strict=True)]
    positional, by_name = tree_unflatten(leaves, tree)
    try:
        result = operation(*positional, **by_name)
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return False
    first = result if isinstance(result, Tensor) else next(iter(result), None)
    # 0 / 0 is NaN in the masked network as well as in the cut one, so NaN does not count against the operation.
    return isinstance(first, Tensor) and not bool(
        (
            first.nan_to_num(nan=0.0) if first.dtype.is_floating_point or first.dtype.is_complex else first
        ).count_nonzero()
    )


def _sample(dtype: torch.dtype, zero: bool) -> Tensor:
    """A few numbers in place of a tensor: zeros, or a mixture."""
    if zero:
        return torch.zeros(len(FLOATS), dtype=dtype, device="cpu")
    return torch.tensor(FLOATS if dtype.is_floating_point or dtype.is_complex else OTHERS, device="cpu").to(dtype)
