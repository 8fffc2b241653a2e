"""The table of mask rules: which input elements can influence which output elements of an operation.

A mask rule works on masks, tensors that are 1 where an element can be nonzero. It computes sums of products of the
inputs' masks, which are positive exactly where influence passes. Its gradient says which inputs reach an output. A
convolution is its own mask rule; the mask rule of an elementwise operation is a sum. For an operation that is not in
the table, every input element may influence every output element, which is always safe.

For example, y = W x with W = [[0, 2], [0, 0]] has the mask rule y = [[0, 1], [0, 0]] @ x. From x = [1, 1] it gives
[1, 0]: no input reaches y[1]. The gradient of the sum of y is [0, 1]: x[0] reaches no output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from keepk.errors import TraceError
from keepk.graph.rules.call import base_name, is_pointwise
from keepk.graph.rules.reduction import POOLS, SPATIAL
from keepk.model.torch_internals import tree_flatten, tree_leaves, tree_unflatten
from keepk.plan.names import shown

Masks: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True)
class Spread:
    """The mask rule of one operation.

    Attributes:
        through: Computes the masks of the outputs from those of the inputs.
        product: Whether inputs are multiplied, so that a zero in one of them stops the others.
        edges: Whether a nonzero constant comes out differently by position or size, because zeros are padded around it
            or because it is summed up.
    """

    through: Callable[[Masks], list[Tensor]]
    product: bool = False
    edges: bool = False


class Operation:
    """An operation that has run.

    Attributes:
        function: The ATen overload.
        name: Its name, such as ``"convolution"``.
        inputs: The tensors among its arguments, in order.
        outputs: The tensors that it returned.
        shapes: Their shapes.
    """

    def __init__(self, function: Any, arguments: Sequence[Any], by_name: dict[str, Any], result: Any) -> None:
        self.function, self.name = function, base_name(function).removeprefix("aten::")
        self._leaves, self._tree = tree_flatten((tuple(arguments), by_name))
        self.inputs = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.shapes = [tuple(output.shape) for output in self.outputs]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by their names in the schema, including defaults."""
        positional, by_name = tree_unflatten(self._leaves, self._tree)
        schema = self.function._schema.arguments
        given = {argument.name: value for argument, value in zip(schema, positional, strict=False)}
        defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        return {**defaults, **given, **by_name}

    @cached_property
    def written(self) -> list[Tensor]:
        """The inputs that it writes into."""
        marked = {a.name for a in self.function._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        values = [value for name, value in self.arguments.items() if name in marked]
        return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]

    def again(self) -> Callable[[Masks], list[Tensor]]:
        """The operation itself as a function of masks: every other argument stays as it was."""
        # Copied without the tensors, so that a step does not keep the forward pass's activations alive.
        kept = [None if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        places = [place for place, leaf in enumerate(self._leaves) if isinstance(leaf, Tensor)]
        function, tree = self.function, self._tree

        def through(masks: Masks) -> list[Tensor]:
            leaves = list(kept)
            for place, mask in zip(places, masks, strict=True):
                leaves[place] = mask
            positional, by_name = tree_unflatten(leaves, tree)
            return [leaf for leaf in tree_leaves(function(*positional, **by_name)) if isinstance(leaf, Tensor)]

        return through


Builder: TypeAlias = Callable[[Operation], Spread]
BUILDERS: dict[str, Builder] = {}


def _builds(*names: str) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        for name in names:
            if name in BUILDERS:
                known = BUILDERS[name].__name__
                raise TraceError(f"mask rule for {name}: there is one already, {shown(known)}. Register it once.")
            BUILDERS[name] = builder
        return builder

    return register


def spread_of(operation: Operation) -> Spread:
    """The mask rule of an operation; for an unknown one, everything reaches everything."""
    builder = BUILDERS.get(operation.name)
    if builder is None:
        builder = by_element if is_pointwise(operation.function) else everywhere
    return builder(operation)


def everywhere(operation: Operation) -> Spread:
    """Every input reaches every output."""
    return to_all(operation.shapes)


def to_all(shapes: Sequence[tuple[int, ...]]) -> Spread:
    """Everything reaches everything in outputs of these shapes."""
    return Spread(lambda masks: [_total(masks).expand(shape) for shape in shapes])


@_builds("where", "masked_fill", "_prelu_kernel", "lerp", "celu", "clamp", "hardswish", "log_sigmoid_forward", "fill",
         "zero", "floor_divide", "hardtanh", "softplus")  # fmt: skip
def by_element(operation: Operation) -> Spread:
    """Elementwise, with broadcasting."""
    shapes = operation.shapes
    return Spread(lambda masks: [_sum([mask.broadcast_to(shape) for mask in masks]) for shape in shapes])


@_builds("mul")
def _times(operation: Operation) -> Spread:
    if len(operation.inputs) != 2:
        return by_element(operation)
    return Spread(lambda masks: [masks[0] * masks[1]], product=True)


@_builds("glu")
def _gated(operation: Operation) -> Spread:
    dim = operation.arguments["dim"]

    def through(masks: Masks) -> list[Tensor]:
        value, gate = masks[0].chunk(2, dim)
        return [value * (1 + gate)]  # a gate of 0 is sigmoid(0) = 0.5, which lets the value pass

    return Spread(through, product=True)


@_builds("copy")
def _written(operation: Operation) -> Spread:
    shape = operation.shapes[0]
    return Spread(lambda masks: [masks[1].broadcast_to(shape)])


@_builds("detach", "alias", "_to_copy", "clone", "lift_fresh", "lift_fresh_copy", "contiguous", "view", "_unsafe_view",
         "reshape", "_reshape_alias", "unflatten", "flatten")  # fmt: skip
def _same(operation: Operation) -> Spread:
    shape = operation.shapes[0]
    return Spread(lambda masks: [masks[0].reshape(shape)])


@_builds("permute", "t", "transpose", "numpy_T", "mT", "unsqueeze", "squeeze", "expand", "flip", "repeat", "cat",
         "stack", "slice", "narrow", "select", "unbind", "split", "split_with_sizes", "chunk", "unsafe_split",
         "unsafe_split_with_sizes", "unsafe_chunk", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
         "native_channel_shuffle", "unfold")  # fmt: skip
def _moved(operation: Operation) -> Spread:
    # Moving elements is the same for masks. In-place variants would write into the masks, so they are not followed.
    return everywhere(operation) if operation.written else Spread(operation.again())


@_builds("constant_pad_nd")
def _padded(operation: Operation) -> Spread:
    pad = list(operation.arguments["pad"])
    return Spread(lambda masks: [F.pad(masks[0], pad)], edges=True)


@_builds("convolution", "_convolution")
def _convolved(operation: Operation) -> Spread:
    given = operation.arguments
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    settings = [given[name] for name in names]

    def through(masks: Masks) -> list[Tensor]:
        bias = masks[2] if len(masks) > 2 else None
        return [torch.ops.aten.convolution.default(masks[0], masks[1], bias, *settings)]

    return Spread(through, product=True, edges=bool(given["transposed"]) or any(given["padding"]))


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "mm": torch.mm, "bmm": torch.bmm, "addmm": torch.addmm, "baddbmm": torch.baddbmm, "mv": torch.mv, "dot": torch.dot,
    "linear": F.linear,
}  # fmt: skip


@_builds(*PRODUCTS)
def _multiplied(operation: Operation) -> Spread:
    product = PRODUCTS[operation.name]
    return Spread(lambda masks: [product(*masks)], product=True)


@_builds("embedding")
def _embedded(operation: Operation) -> Spread:
    shape = operation.shapes[0]

    def through(masks: Masks) -> list[Tensor]:
        # The indices differ from input to input, so any row may come out; index 0 is a valid index, not a zero factor.
        rows, index = masks
        return [rows.sum(0).broadcast_to(shape) * (1 + index.unsqueeze(-1))]

    return Spread(through, product=True)


@_builds("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "batch_norm",
         "_batch_norm_no_update")  # fmt: skip
def _batch_normalised(operation: Operation) -> Spread:
    given, shapes = operation.arguments, operation.shapes
    carriers = [given.get(name) for name in ("weight", "bias", "running_mean", "running_var")]
    rank = len(shapes[0])
    # With batch statistics every element of a channel depends on all others; only running ones are followed.
    if given.get("training", False) or carriers[2] is None or carriers[3] is None or rank < 2:
        return everywhere(operation)
    there = [carrier is not None for carrier in carriers]
    channels = tuple(-1 if dim == 1 else 1 for dim in range(rank))

    def through(masks: Masks) -> list[Tensor]:
        left = iter(mask.view(channels) for mask in masks[1:])
        scale, shift = (next(left) if found else None for found in there[:2])
        mean, variance = left
        scaled = (masks[0] + mean) * (1 + variance)  # it divides by sqrt(variance + eps), so a zero stops nothing
        scaled = scaled if scale is None else scaled * scale
        return [scaled if shift is None else scaled + shift, *(_total(masks).expand(shape) for shape in shapes[1:])]

    return Spread(through, product=True)


@_builds("native_layer_norm", "_fused_rms_norm")
def _layer_normalised(operation: Operation) -> Spread:
    rank = operation.inputs[0].ndim
    over = tuple(range(rank - len(operation.arguments["normalized_shape"]), rank))
    shapes = operation.shapes

    def through(masks: Masks) -> list[Tensor]:
        total = masks[0].sum(over, keepdim=True)
        output = _sum([mask.broadcast_to(shapes[0]) for mask in (total, *masks[1:])])
        return [output, *(total.reshape(shape) for shape in shapes[1:])]

    return Spread(through)


@_builds("native_group_norm")
def _group_normalised(operation: Operation) -> Spread:
    shape, groups = operation.shapes[0], operation.arguments["group"]
    channels = tuple(-1 if dim == 1 else 1 for dim in range(len(shape)))

    def through(masks: Masks) -> list[Tensor]:
        fibres = masks[0].reshape(shape[0], groups, -1)
        total = fibres.sum(2, keepdim=True)
        output = _sum([total.expand_as(fibres).reshape(shape), *(mask.view(channels) for mask in masks[1:])])
        return [output, total[:, :, 0], total[:, :, 0]]

    return Spread(through)


# For equal numbers, the result of these does not depend on how many there are; that of a sum does.
WHATEVER_THE_SIZE = {"mean", "amax", "amin", "max", "min", "any", "all", "var", "std"}


@_builds("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "sum", "mean", "amax",
         "amin", "var", "std", "norm", "linalg_vector_norm", "prod", "logsumexp", "any", "all")  # fmt: skip
def _over_dims(operation: Operation) -> Spread:
    if len(operation.inputs) != 1:
        return everywhere(operation)
    given = operation.arguments.get("dim")
    dims = tuple(given) if isinstance(given, Sequence) else () if given is None else (given,)
    rank = operation.inputs[0].ndim
    spread = _mixed(operation, tuple(dim % rank for dim in dims) if rank else ())
    return Spread(spread.through, edges=operation.name not in WHATEVER_THE_SIZE)


@_builds("max", "min")
def _extreme(operation: Operation) -> Spread:
    return by_element(operation) if len(operation.inputs) == 2 else _over_dims(operation)


@_builds(*POOLS)
def _pooled(operation: Operation) -> Spread:
    if len(operation.inputs) != 1:
        return everywhere(operation)
    rank = operation.inputs[0].ndim
    count = next((n for mark, n in SPATIAL.items() if mark in operation.name), 2)
    padding = operation.arguments.get("padding", 0)
    padded = any(padding) if isinstance(padding, Sequence) else bool(padding)
    spread = _mixed(operation, tuple(range(rank - count, rank)))
    # Only averages count padded zeros. A maximum ignores them, and reflection or replication pads with real elements.
    return Spread(spread.through, edges=padded and operation.name.startswith("avg_pool"))


def _mixed(operation: Operation, dims: tuple[int, ...]) -> Spread:
    """Elements along the dims reach each other; an empty tuple means all dims."""
    rank, shapes = operation.inputs[0].ndim, operation.shapes
    over = dims or tuple(range(rank))

    def through(masks: Masks) -> list[Tensor]:
        total = masks[0].sum(over, keepdim=True) if rank else masks[0]
        squeezed = total.squeeze(over) if rank else total
        return [(total if len(shape) == rank else squeezed).broadcast_to(shape) for shape in shapes]

    return Spread(through)


def _total(masks: Masks) -> Tensor:
    return torch.stack([mask.sum() for mask in masks]).sum()


def _sum(masks: Masks) -> Tensor:
    return sum(masks[1:], masks[0])
