"""Weight norm, w = g v / |v|: finds the directions v and lengths g of a model, and computes the weight w.

A direction must not be zeroed, because 0 / 0 is NaN: a channel is masked by zeroing its length. The norm of a direction
says nothing about the weight (|v| cancels), so channels are ranked by w. A ranking by v kept filters of length 0
because their directions were long.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from keepk.model.torch_internals import WeightNormParametrization


def lengths_of(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """By direction v, its length g, for all weight-normed layers of a model.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    >>> [(tuple(v.shape), tuple(g.shape)) for v, g in lengths_of(layer).items()]
    [((2, 3), (2, 1))]
    """
    return {direction: length for module in model.modules() for direction, length in _pairs(module)}


def weight_of(direction: Tensor, length: Tensor) -> Tensor:
    """The weight g v / |v|, in float32 or float64; zero where the direction is zero.

    >>> weight_of(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[10.0], [1.0]]))
    tensor([[6., 8.],
            [0., 0.]])
    """
    unit, _ = _unit(direction, length)
    return length * unit


def weight_grad_of(direction: Tensor, length: Tensor) -> Tensor | None:
    r"""The gradient of the weight from the gradients of direction and length; None if either has none.

    .. math:: dL/dw = (dL/dg)\; v / |v| + (|v| / g)\; dL/dv

    Where g is zero, dL/dv is zero whatever dL/dw is, so only the first term is known.
    """
    if direction.grad is None or length.grad is None:
        return None
    unit, norm = _unit(direction.detach(), length)
    along = torch.where(length == 0, 0, norm / length)
    return length.grad * unit + along * direction.grad


def dims_of_length(direction: Tensor, length: Tensor) -> list[int]:
    """The dims of a direction over which its norm is taken: those that share one length.

    >>> dims_of_length(torch.zeros(2, 3), torch.zeros(2, 1)), dims_of_length(torch.zeros(2, 3), torch.zeros(()))
    ([1], [0, 1])
    """
    return [dim for dim in range(direction.ndim) if length.ndim == 0 or length.shape[dim] == 1]


def _unit(direction: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vector v / |v|, and |v|, over the dims that share one length."""
    # In half precision a sum of squares overflows at 65,504 and loses small entries.
    wide = direction if direction.dtype == torch.float64 else direction.float()
    norm = torch.linalg.vector_norm(wide, dim=dims_of_length(wide, length), keepdim=True)
    return wide / norm.where(norm > 0, 1), norm


def _pairs(module: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """The directions of a module with their lengths, in both of torch's implementations."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):  # of torch.nn.utils.weight_norm, the older way
            yield getattr(module, f"{hook.name}_v"), getattr(module, f"{hook.name}_g")
    for found in module.children():
        if isinstance(found, nn.ModuleDict):  # that is where torch keeps parametrizations
            lists = (it for it in found.values() if isinstance(it, ParametrizationList))
            yield from (_pair(it) for it in lists if isinstance(it[0], WeightNormParametrization))


def _pair(found: ParametrizationList) -> tuple[nn.Parameter, nn.Parameter]:
    direction, length = found.original1, found.original0  # torch stores g first
    assert isinstance(direction, nn.Parameter)
    assert isinstance(length, nn.Parameter)
    return direction, length
