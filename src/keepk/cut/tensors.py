"""Giving a tensor object new contents of another shape, so that everybody who holds the object follows.

``parameter.data = small`` keeps the object, its hooks and its name. The node that accumulates its gradient remembers
the old shape, and lives on as long as any loss that was computed with it: torch makes a new one only if dtype or device
change, so the contents pass through another dtype for a moment.

A loss from before the cut can no longer be back-propagated: its graph has the old sizes. Mostly torch fails by itself,
because shapes differ; where it would not, the gradient would have the old shape, so the old node refuses.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepk.errors import ShrinkError
from keepk.graph.edits import Cut, cut_tensor

LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def left_of(tensor: Tensor, cut: Cut) -> Tensor:
    """What is left of a tensor, as memory of its own in the memory format that it had."""
    left, layout = cut_tensor(tensor.detach(), cut), _layout(tensor)
    if layout is torch.contiguous_format:
        return left.contiguous()
    return torch.empty(left.shape, dtype=left.dtype, device=left.device, memory_format=layout).copy_(left)


def _layout(tensor: Tensor) -> torch.memory_format:
    """The memory format by the strides: with one channel or one pixel a tensor is contiguous in both."""
    layout = LAYOUTS.get(tensor.dim())
    if layout is None or not tensor.is_contiguous(memory_format=layout):
        return torch.contiguous_format
    usual = torch.empty(tensor.shape, device="meta", memory_format=layout).stride()
    return layout if not tensor.is_contiguous() or tensor.stride() == usual else torch.contiguous_format


def replace_contents(tensor: Tensor, contents: Tensor) -> None:
    """Put other contents into a tensor object; its gradient is the caller's affair."""
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32  # both are on every device
    tensor.grad = None
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = contents


def refuse_old_losses(tensor: Tensor, name: str) -> Callable[[], None]:
    """Losses computed so far cannot reach this tensor any more; what is returned takes that back."""
    if not tensor.requires_grad:
        return lambda: None

    def refuse(_gradients: Any) -> None:
        raise ShrinkError(
            f"backward: this loss was computed before {name!r} was cut to shape {tuple(tensor.shape)}, so its gradient "
            f"does not fit. Run the forward pass again."
        )

    node = torch.autograd.graph.get_gradient_edge(tensor).node
    handle = node.register_prehook(refuse)
    return handle.remove


def sharded(model: nn.Module) -> str | None:
    """The part of a model that is spread over processes, or None. A process sees only its own share of it."""
    for path, module in model.named_modules():
        # By name: the import of FSDP takes long, and not every build of torch has it.
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            return f"module {path!r}" if path else "the model"
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if hasattr(tensor, "device_mesh"):
            return f"tensor {name!r}"
    return None


def index_tensor(indices: np.ndarray, like: Tensor) -> Tensor:
    """Indices beside a tensor, in memory of their own."""
    return torch.tensor(indices, device=like.device)


def silencing(cut: Cut, length: Tensor | None) -> Cut:
    """What of a cut makes its channels zero: of weight norm, g v / |v|, the length g and not the direction."""
    if length is None or length.ndim != len(cut.before):
        return cut
    return replace(cut, kept={axis: kept for axis, kept in cut.kept.items() if length.shape[axis] == 1})


def doomed(cut: Cut, device: torch.device) -> Tensor:
    """Which numbers of a tensor go by a cut.

    >>> doomed(Cut("w", {0: np.array([0, 2])}, before=(3, 2), after=(2, 2)), torch.device("cpu"))[:, 0]
    tensor([False,  True, False])
    """
    stays = torch.ones(cut.before, dtype=torch.bool, device=device)
    for axis, indices in cut.kept.items():
        kept = torch.zeros(cut.before[: axis + 1] if indices.ndim == 2 else cut.before[axis], dtype=torch.bool)
        if indices.ndim == 2:
            rows = cut.kept.get(0, np.arange(cut.before[0]))
            kept[torch.from_numpy(rows)[:, None], torch.from_numpy(indices)] = True
        else:
            kept[torch.from_numpy(indices)] = True
        shape = [1] * axis if indices.ndim == 1 else []
        stays &= kept.reshape(*shape, *kept.shape, *[1] * (stays.ndim - axis - 1)).to(device)
    return ~stays
