"""The cost of a model, layer by layer: parameters, and multiply-accumulates (MACs) per sample.

All costs that keepk shows follow one convention. Tensors are counted as they are, so a masked weight counts until it is
removed. MACs are those of a forward pass in eval mode, as counted by torch's `FlopCounterMode`, divided by the batch
size of the example. If the batch size cannot be determined, MACs are for the whole example, and the report says so.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from keepk.errors import TraceError
from keepk.model.copies import META, Workshop
from keepk.model.edits import Edits
from keepk.model.example import Example
from keepk.model.torch_internals import tree_leaves, tree_map
from keepk.model.values import WithValues

Shape: TypeAlias = tuple[int, ...]
# The FLOPs of an operation from the shapes of its tensor inputs and of its first output, and its other arguments.
Formula: TypeAlias = Callable[[Sequence[Shape], Shape, Mapping[str, Any]], int]


def _matrix_product(inputs: Sequence[Shape], _output: Shape, _numbers: Mapping[str, Any]) -> int:
    left, right = inputs[-2:]  # the first input of addmm and baddbmm is added to the product
    return 2 * prod(left) * right[-1]


def _convolution(inputs: Sequence[Shape], output: Shape, numbers: Mapping[str, Any]) -> int:
    pictures, weight = inputs[:2]
    # A transposed convolution multiplies every input pixel by the kernel, any other every output pixel.
    pixels = pictures[2:] if numbers.get("transposed") else output[2:]
    return 2 * pictures[0] * prod(pixels) * prod(weight)


# By name, the operations that FlopCounterMode counts in a forward pass. `Workshop.running` turns fused operations off,
# so that attention and recurrent layers consist of these too.
FORMULAS: Mapping[str, Formula] = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"), _matrix_product),
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"), _convolution),
    **dict.fromkeys(("aten::cudnn_convolution", "aten::_slow_conv2d_forward"), _convolution),
}


@dataclass(frozen=True)
class LayerCost:
    """The cost of one module, excluding the modules inside it.

    Attributes:
        name: Its path; empty for the model itself.
        type: Its class.
        parameters: The number of elements of its parameters; a shared parameter counts at its first owner.
        macs: Multiply-accumulates of its own forward, per sample; see `Costs.batch`.
    """

    name: str
    type: str
    parameters: int
    macs: int


@dataclass(frozen=True)
class Costs:
    """The cost of a model.

    Attributes:
        layers: The modules that have parameters or multiply something, in the model's order.
        batch: The batch size by which the MACs of the example were divided; None if it could not be determined, in
            which case MACs are for the whole example.
    """

    layers: tuple[LayerCost, ...]
    batch: int | None

    @property
    def parameters(self) -> int:
        """The number of parameters; shared ones count once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one forward pass, per sample."""
        return sum(layer.macs for layer in self.layers)


def model_costs(model: nn.Module, example: Any) -> Costs:
    """Parameters and MACs of every module, per sample.

    The forward pass runs on a copy without weights. If the model's Python code reads values, the copy has weights.

    Args:
        model: Any module whose forward works on the example.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments.

    Returns:
        The costs by module, and the batch size that the MACs were divided by.

    Raises:
        TraceError: forward fails on the example, or under torch's `FlopCounterMode`.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> model_costs(net, torch.zeros(2, 8)).macs
    66
    """
    workshop = Workshop(model, Example.of(example), META)
    try:
        flops = module_flops(workshop)
    except Exception:  # forward may raise anything on the meta device and still work with weights
        workshop = replace(workshop, device=None)
        flops = _flops_or_refusal(workshop)
    batch = _batch(workshop, flops)
    counted = set[int]()
    costs = []
    for path, module in model.named_modules():
        # By id: a tied weight is one parameter, however many modules have it.
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) not in counted}
        counted |= own.keys()
        costs.append(LayerCost(path, type(module).__name__, sum(own.values()), flops[path] // 2 // (batch or 1)))
    return Costs(tuple(cost for cost in costs if cost.parameters or cost.macs), batch)


def layer_costs(model: nn.Module, example: Any) -> tuple[LayerCost, ...]:
    """The layers of `model_costs`.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> [(layer.name, layer.parameters, layer.macs) for layer in layer_costs(net, torch.zeros(2, 8))]
    [('0', 54, 48), ('2', 21, 18)]
    """
    return model_costs(model, example).layers


def per_what(batch: int | None) -> str:
    """The unit of a MAC count, for a table header."""
    return "for the whole example (batch unknown)" if batch is None else "per sample"


def common_rows(values: Iterable[object]) -> int | None:
    """The batch size of a model's inputs: the first dimension that all tensors share; None if they differ.

    Numbers and scalar tensors are ignored, and so is a first dimension of 1 next to a larger one, which is broadcast
    (position ids).

    >>> import torch
    >>> common_rows([torch.zeros(4, 7), torch.zeros(1, 7), torch.tensor(2.0), 0.5])
    4
    >>> common_rows([torch.zeros(4, 7), torch.zeros(7, 7)]) is None
    True
    """
    rows = {len(value) for value in values if isinstance(value, Tensor) and value.dim() > 0}
    found = rows - {1} if len(rows) > 1 else rows
    return next(iter(found)) or None if len(found) == 1 else None  # a batch size of 0 cannot be a divisor


def _batch(workshop: Workshop, flops: Mapping[str, int]) -> int | None:
    """The batch size, if doubling the first dimension doubles the MACs of every module; else None.

    It does not if the first dimension is a sequence in an attention, or if something is computed once per batch. With a
    recurrent layer that takes the sequence first, doubling the sequence doubles the MACs as well, so None is returned.
    """
    given = workshop.example
    rows = common_rows(tree_leaves((given.arguments, given.by_name)))
    if rows is None or any(isinstance(it, nn.RNNBase) and not it.batch_first for it in workshop.model.modules()):
        return None

    def twice(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows
        return torch.cat([value, value]) if has_rows else value

    doubled = Example(tree_map(twice, given.arguments), tree_map(twice, given.by_name))
    try:
        more = module_flops(replace(workshop, example=doubled))
    except Exception:  # the batch size is hard-coded in the model
        return None
    return rows if all(more[path] == 2 * flops[path] for path in {*more, *flops}) else None


def _flops_or_refusal(workshop: Workshop) -> dict[str, int]:
    try:
        return module_flops(workshop)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of forward, or of torch's counter, which does not support all of torch.func
        what = f"{type(error).__name__}: {error}"[:200]
        raise TraceError(
            f"model {type(workshop.model).__name__}: its MACs cannot be counted, because forward failed under torch's "
            f"FlopCounterMode ({what}). Pass an example on which it works."
        ) from error


def module_flops(workshop: Workshop, edits: Edits | None = None) -> dict[str, int]:
    """By path, the FLOPs of each module's own forward, counted on a copy; a multiply-accumulate counts as two.

    Args:
        workshop: Makes the copy and runs it.
        edits: The cut of the copy; None for none.
    """
    twin = workshop.copy(edits)
    counter = FlopCounterMode(display=False)
    own: dict[str, int] = defaultdict(int)
    values = WithValues()  # type: ignore[no-untyped-call]  # torch's own
    with workshop.running() as example, _metering(twin, counter, own), values, counter:
        twin(*example.arguments, **example.by_name)
    return own


@contextmanager
def _metering(model: nn.Module, counter: FlopCounterMode, own: dict[str, int]) -> Iterator[None]:
    """Count the FLOPs of each module's forward into `own`, without those of its submodules."""
    begun = list[int]()

    def enter(_module: nn.Module, _arguments: Any) -> None:
        begun.append(counter.get_total_flops())

    def leave(path: str, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        spent = counter.get_total_flops() - begun.pop()
        own[path] += spent
        # Moving the start of the outer modules keeps these FLOPs out of their own counts.
        begun[:] = [start + spent for start in begun]

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(functools.partial(leave, path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
