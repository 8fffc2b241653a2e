"""The expected outputs of a shrunk network, without help from the library that shrank it.

Every weight of the dense network gets a unique value before the cut, so the kept slices are found by their values. The
shrunk network must compute what the dense one computes with all removed slices set to zero; a norm over channels is
evaluated on the kept channels.
"""

import copy
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from zoo_networks.network import Inputs

SORTED_DRAW_LIMIT = 20_000_000  # for larger tensors a permutation takes too long, and random values rarely collide
ROUNDING = 1e-6
TINY = 1e-6

Kept = dict[str, list[list[int] | None]]


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 7) -> nn.Module:
    """Give every weight and running statistic a unique value, in place, at the scale of a trained network."""
    generator = torch.Generator().manual_seed(seed)
    of_norms = {
        id(weight) for module in model.modules() if _is_norm(module) for weight in module.parameters(recurse=False)
    }
    for name, weight in model.named_parameters():
        if weight.is_floating_point():
            normal = _unequal_normals(weight.shape, generator)
            weight.copy_(_weight_like(name, weight, normal, of_norm=id(weight) in of_norms))
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.copy_(0.1 * _unequal_normals(buffer.shape, generator))
        elif name.endswith("running_var"):
            buffer.copy_(1 + 0.2 * _unequal_normals(buffer.shape, generator).atan())
    return model


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() or isinstance(module, nn.modules.batchnorm._NormBase)


def _unequal_normals(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Quantiles of the normal distribution in random order, so that no two are equal."""
    count = math.prod(shape)
    if count > SORTED_DRAW_LIMIT:
        return torch.randn(shape, generator=generator)
    quantiles = (torch.randperm(count, generator=generator).double() + 0.5) / count
    return (torch.erfinv(2 * quantiles - 1) * 2**0.5).float().view(shape)


def _weight_like(name: str, weight: Tensor, normal: Tensor, *, of_norm: bool) -> Tensor:
    if of_norm:
        return 1 + 0.2 * normal if name.endswith("weight") else 0.1 * normal
    if weight.ndim >= 2:
        fan_in = max(1, weight.numel() // weight.shape[0])
        scale: float = 1.4 / fan_in**0.5
        return normal * scale  # large enough that attention is not uniform
    return weight + 0.05 * normal


def outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    """All float tensors in the model's output, in order."""
    return _float_tensors(model(*inputs))


def _float_tensors(output: object) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in _float_tensors(part)]
    return _float_tensors(output.to_tuple()) if hasattr(output, "to_tuple") else []


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def kept_indices(dense: nn.Module, shrunk: nn.Module) -> Kept:
    """The kept indices along each axis, for each tensor that got smaller; None for an axis of unchanged size."""
    small = _tensors(shrunk)
    kept: Kept = {}
    for name, tensor in _tensors(dense).items():
        if name not in small or not tensor.is_floating_point() or small[name].shape == tensor.shape:
            continue
        if small[name].ndim != tensor.ndim or small[name].numel() == 0:
            raise ValueError(f"{name}: {tuple(tensor.shape)} became {tuple(small[name].shape)}")
        kept[name] = _located(name, tensor.detach().numpy(), small[name].detach().numpy())
    return kept


def _located(name: str, whole: NDArray[np.float32], part: NDArray[np.float32]) -> list[list[int] | None]:
    """Find one corner of the part in the whole, then its neighbours along each axis."""
    for corner in zip(*np.nonzero(whole == part[(0,) * part.ndim]), strict=True):
        axes = [
            _matched(_fibre(whole, corner, axis), _fibre(part, (0,) * part.ndim, axis)) for axis in range(part.ndim)
        ]
        if all(indices is not None for indices in axes):
            return [None if old == new else axis for axis, old, new in zip(axes, whole.shape, part.shape, strict=True)]
    raise ValueError(f"{name}: the kept values {part.shape} are not found in the dense {whole.shape}")


def _fibre(array: NDArray[np.float32], corner: tuple[int, ...], axis: int) -> NDArray[np.float32]:
    index: tuple[int | slice, ...] = (*corner[:axis], slice(None), *corner[axis + 1 :])
    return array[index]


def _matched(whole: NDArray[np.float32], part: NDArray[np.float32]) -> list[int] | None:
    """The indices of the values of `part` in `whole`, or None if a value is missing."""
    order = np.argsort(whole, kind="stable")
    places = np.minimum(np.searchsorted(whole[order], part), len(whole) - 1)
    return order[places].tolist() if np.array_equal(whole[order][places], part) else None


class _OnKeptSlice(nn.Module):
    """The shrunk norm on the kept channels of a dense tensor; zeros elsewhere."""

    kept: Tensor

    def __init__(self, norm: nn.Module, kept: list[int], axis: int) -> None:
        super().__init__()
        self.norm, self.axis = norm, axis
        self.register_buffer("kept", torch.tensor(kept))

    def forward(self, whole: Tensor, *others: object) -> Tensor:
        part = self.norm(whole.index_select(self.axis, self.kept), *others)
        zeros = torch.zeros_like(whole)
        return zeros.index_copy(self.axis % whole.ndim, self.kept, part.to(zeros.dtype))


@torch.no_grad()
def zeroed(dense: nn.Module, shrunk: nn.Module, kept: Kept) -> nn.Module:
    """A copy of the dense network with all removed slices set to zero."""
    model = copy.deepcopy(dense).eval()
    tensors, buffers = _tensors(model), dict(model.named_buffers())
    for name, axes in kept.items():
        if name in buffers and not name.endswith("running_mean"):
            continue  # constants such as a blur filter cannot be found by value
        for axis, indices in enumerate(axes):
            length_of_rows = name.endswith("original1") and axis == 0  # weight norm: a zero direction is 0/0
            if indices is not None and not length_of_rows:
                _zero_others(tensors[name], axis, indices)
    _narrow_norms(model, copy.deepcopy(shrunk).eval(), kept)
    return model


def _zero_others(tensor: Tensor, axis: int, indices: list[int]) -> None:
    removed = torch.ones(tensor.shape[axis], dtype=torch.bool)
    removed[indices] = False
    tensor.index_fill_(axis, removed.nonzero().flatten(), 0)


def _narrow_norms(model: nn.Module, shrunk: nn.Module, kept: Kept) -> None:
    """Make norms that mix channels see only the kept ones."""
    for name, norm in list(model.named_modules()):
        kind = type(norm).__name__.lower()
        axes = kept.get(f"{name}.weight" if name else "weight")
        if "norm" not in kind or "batchnorm" in kind or "instancenorm" in kind or not axes or len(axes) != 1:
            continue
        parent, _, child = name.rpartition(".")
        axis = 1 if "groupnorm" in kind or "2d" in kind else -1
        setattr(model.get_submodule(parent), child, _OnKeptSlice(shrunk.get_submodule(name), axes[0] or [], axis))


@torch.no_grad()
def error(dense: nn.Module, shrunk: nn.Module, inputs: Inputs) -> float:
    """The largest difference between the outputs of the shrunk and the zeroed network, relative to the largest."""
    wanted, got = zeroed(dense, shrunk, kept_indices(dense, shrunk)), copy.deepcopy(shrunk).eval()
    single = difference(outputs(wanted, inputs), outputs(got, inputs))
    if not single > ROUNDING:
        return single
    exact = tuple(value.double() if value.is_floating_point() else value for value in inputs)
    try:  # in float64 a rounding error becomes smaller, and a real difference does not
        return difference(outputs(wanted.double(), exact), outputs(got.double(), exact))
    except RuntimeError:  # the network creates float32 tensors in its forward
        return single


def difference(wanted: list[Tensor], got: list[Tensor]) -> float:
    """The largest relative difference; NaN where shapes differ."""
    if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in got]:
        return math.nan
    pairs = [(old, new) for old, new in zip(wanted, got, strict=True) if old.numel()]
    return max(float((old - new).abs().max() / (old.abs().max() + TINY)) for old, new in pairs)
