"""An operation of the forward pass, and its mask rule, which computes how the operation passes influence on.

A mask rule works on masks, tensors that are 1 where an element can be nonzero. It computes sums of products of the
inputs' masks, which are positive exactly where influence passes. Its gradient says which inputs reach an output.

For example, y = W x with W = [[0, 2], [0, 0]] has the mask rule y = [[0, 1], [0, 0]] @ x. From x = [1, 1] it gives
[1, 0]: no input reaches y[1]. The gradient of the sum of y is [0, 1]: x[0] reaches no output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from keepk.graph.call import base_name

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
