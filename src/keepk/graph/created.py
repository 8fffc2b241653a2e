"""Numbers that a forward pass makes tensors of: on the meta device their values are lost, so they are seen here."""

from collections.abc import Callable, Iterator
from numbers import Complex, Real
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

CREATED = "torch.tensor"
_DATA_AT = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, torch.Tensor.new_tensor: 1, torch.Tensor.new: 1}
FEW = 64  # longer ones are tables, and not computed from a size


class WatchedNumbers(TorchFunctionMode):
    """Tells somebody the numbers that tensors are made of."""

    def __init__(self, tell: Callable[[tuple[float, ...]], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, and tell what it made a tensor of."""
        result = func(*args, **(kwargs or {}))
        place = _DATA_AT.get(func)
        if place is not None:
            by_name = kwargs or {}
            data = args[place] if len(args) > place else by_name.get("data", by_name.get("obj"))
            found = tuple(numbers_in(data)) if func is not torch.Tensor.new or type(data) is list else ()
            if 0 < len(found) <= FEW:
                self._tell(found)
        return result


def numbers_in(data: Any) -> Iterator[float]:
    """The plain numbers of nested lists or an array.

    >>> list(numbers_in([[1, 2.5], (True, np.float32(3)), 4 + 1j]))
    [1.0, 2.5, 1.0, 3.0, 4.0, 1.0]
    """
    if isinstance(data, Real):
        yield float(data)
    elif isinstance(data, Complex):
        yield from (float(data.real), float(data.imag))
    elif isinstance(data, np.ndarray) and data.dtype.kind in "biuf":
        yield from data.ravel().tolist()
    elif isinstance(data, list | tuple | bytes | bytearray):
        for entry in data:
            yield from numbers_in(entry)
