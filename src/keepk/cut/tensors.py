"""Giving a tensor object new contents of a different shape, so that everything that holds the object follows.

``parameter.data = small`` keeps the object, its hooks and its name. But the autograd node that accumulates its gradient
remembers the old shape, and lives as long as any loss that was computed with it. Torch makes a new node only if the
dtype or device changes, so the contents pass through another dtype for a moment.

A loss from before the cut can no longer be back-propagated: its graph has the old sizes. Usually torch raises because
shapes differ; where it would not, the gradient would have the old shape, so the old node is made to raise.
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
    """The part of a tensor that a cut leaves, in new memory and in the tensor's memory format."""
    left, layout = cut_tensor(tensor.detach(), cut), _layout(tensor)
    if layout is torch.contiguous_format:
        return left.contiguous()
    return torch.empty(left.shape, dtype=left.dtype, device=left.device, memory_format=layout).copy_(left)


def _layout(tensor: Tensor) -> torch.memory_format:
    """The memory format of a tensor."""
    layout = LAYOUTS.get(tensor.dim())
    if layout is None or not tensor.is_contiguous(memory_format=layout):
        return torch.contiguous_format
    # A tensor of one channel or one pixel is contiguous in both formats; only its strides tell which one is meant.
    usual = torch.empty(tensor.shape, device="meta", memory_format=layout).stride()
    return layout if not tensor.is_contiguous() or tensor.stride() == usual else torch.contiguous_format


def replace_contents(tensor: Tensor, contents: Tensor) -> None:
    """Put new contents into a tensor object and drop its gradient, which callers set again."""
    other = torch.float16 if tensor.dtype != torch.float16 else torch.float32  # every device has both
    tensor.grad = None
    tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = contents


def refuse_old_losses(tensor: Tensor, name: str) -> Callable[[], None]:
    """Make the backward pass of every loss computed so far raise when it reaches this tensor.

    Returns:
        A function that undoes this.
    """
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
    """The part of a model that is sharded over processes (FSDP, DTensor), as words for an error; None if none is."""
    for path, module in model.named_modules():
        # By name: importing FSDP takes long, and not every build of torch has it.
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            return f"module {path!r}" if path else "the model"
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if hasattr(tensor, "device_mesh"):
            return f"tensor {name!r}"
    return None


def index_tensor(indices: np.ndarray, like: Tensor) -> Tensor:
    """Indices as a new tensor on the device of another one."""
    return torch.tensor(indices, device=like.device)


def silencing(cut: Cut, length: Tensor | None) -> Cut:
    """The part of a cut that makes its channels zero when it is applied as a mask.

    Weight norm computes g v / |v|. Zeros in the length g make a channel zero, but a direction v of zeros gives 0 / 0.
    So the direction is masked only along axes where g has size 1, that is, within a channel.

    Args:
        cut: The cut.
        length: The length g, if the cut tensor is the direction of a weight norm.
    """
    if length is None or length.ndim != len(cut.before):
        return cut
    return replace(cut, kept={axis: kept for axis, kept in cut.kept.items() if length.shape[axis] == 1})


def doomed(cut: Cut, device: torch.device) -> Tensor:
    """A mask of the entries of a tensor that a cut removes.

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
