"""Giving a tensor object new contents of another shape, so that everybody who holds the object follows.

``parameter.data = small`` keeps the object, its hooks and its name. The node that accumulates its gradient remembers the
old shape, and lives on as long as any loss that was computed with it: torch makes a new one only if dtype or device
change, so the contents pass through another dtype for a moment.
"""

import numpy as np
import torch
from torch import Tensor

from keepk.graph.edits import Cut
from keepk.graph.shell import cut_tensor


def left_of(tensor: Tensor, cut: Cut) -> Tensor:
    """What is left of a tensor, as memory of its own in the memory format that it had."""
    left = cut_tensor(tensor.detach(), cut)
    for layout in (torch.channels_last, torch.channels_last_3d):
        rank = 4 if layout is torch.channels_last else 5
        if tensor.dim() == rank and tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous():
            return left.contiguous(memory_format=layout)
    return left.contiguous()


def replace_contents(tensor: Tensor, contents: Tensor) -> None:
    """Put other contents into a tensor object; its gradient is the caller's affair."""
    if tensor.requires_grad:
        other = torch.float64 if tensor.dtype != torch.float64 else torch.float32
        tensor.grad = None
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = contents


def index_tensor(indices: np.ndarray, like: Tensor) -> Tensor:
    """Indices beside a tensor."""
    return torch.from_numpy(np.ascontiguousarray(indices)).to(like.device)
