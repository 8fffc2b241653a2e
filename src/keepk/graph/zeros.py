"""Which operations keep a removed channel at zero: found by running them on a few numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from keepk.graph.label import label_of

FLOATS = (-1.3, 0.7, 2.1, -0.4)
OTHERS = (0, 1, 3, 1)


def stays_zero(operation: Any, arguments: tuple[Sequence[Any], dict[str, Any]]) -> bool:
    """Whether the result is 0 wherever the tensors that are 0 on removed channels are 0, whatever the others are.

    >>> zero, other = torch.zeros(3), torch.zeros(3)
    >>> from keepk.graph.label import Label, set_label
    >>> set_label(zero, Label(zero=True))
    >>> stays_zero(torch.ops.aten.mul.Tensor, ((zero, other), {}))
    True
    >>> stays_zero(torch.ops.aten.add.Tensor, ((zero, other), {}))
    False
    >>> stays_zero(torch.ops.aten.cos.default, ((zero,), {}))
    False
    """
    if torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()):
        return False
    positional, by_name = tree_map(_stand_in, arguments)
    by_name = {key: value for key, value in by_name.items() if key not in ("device", "generator", "memory_format")}
    try:
        result = operation(*positional, **by_name)
    except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
        return False
    first = result if isinstance(result, Tensor) else next(iter(result), None)
    return isinstance(first, Tensor) and not bool(first.count_nonzero())


def _stand_in(value: Any) -> Any:
    """A few numbers in the place of a tensor: zeros if it is 0 on removed channels, else a mixture."""
    if not isinstance(value, Tensor):
        return value
    if label_of(value).zero:
        return torch.zeros(len(FLOATS), dtype=value.dtype, device="cpu")
    numbers = FLOATS if value.is_floating_point() or value.is_complex() else OTHERS
    return torch.tensor(numbers, device="cpu").to(value.dtype)
