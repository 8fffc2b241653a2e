"""Influence in one forward pass: which elements no input reaches, and which elements reach no output.

Three facts are kept about every element of every tensor. It *varies* if it may be different for different inputs. It is
*nonzero* if it varies or is a nonzero constant. It is *void* if it is zero for every input, and stays zero when more
weights are set to zero. All of this follows from the zeros among the weights, operation by operation. An unknown
operation is assumed to pass everything on, so every finding is proved.

Backwards from the outputs, an element is *needed* if an output depends on it. A factor of a product is not needed where
everything that it is multiplied with is void. All weights that are not needed can be set to zero together: a term could
change only if one of its factors did and none of the others were void.

For example, take h = W x, y = V h with two hidden units. If row 0 of W is zero, h[0] is void, and column 0 of V is not
needed. If column 1 of V is zero, h[1] varies, but neither it nor row 1 of W is needed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keepk.compaction.operations import Operation, Spread, everywhere, spread_of, to_all
from keepk.graph.ids.atoms import tensors_kept_by
from keepk.model.copies import Workshop, plain_tensors
from keepk.model.names import named_tensors
from keepk.model.torch_internals import TorchDispatchMode

# Operations that create a tensor filled with one number. Anything else that is created, such as an `arange`, may differ
# from input to input, for example with the input's length.
FILLS = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor", "zeros_like", "ones_like"}
# Parts of a constant, such as a table of positions: which part is taken may depend on the input's length.
PARTS = {"slice", "narrow", "select", "index", "index_select", "gather", "unfold", "as_strided"}
# Even for zeros, the result of these depends on how many there are.
COUNTS = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "logcumsumexp"}
HALF = 0.5  # a mask rule's output counts terms, so it is an integer up to rounding


class NotFollowed(Exception):  # noqa: N818 - a reason that `compact` catches and reports, not an error
    """The forward pass does something that cannot be followed; the message says what."""


@dataclass(eq=False)
class Knowledge:
    """Facts about the elements of one tensor, as masks of its shape; `needed` is None until an element is needed."""

    varies: Tensor
    nonzero: Tensor
    void: Tensor
    needed: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Input:
    """The input of a module's call: the tensor, its facts, and its version, by which a later write is noticed."""

    tensor: Tensor
    knowledge: Knowledge
    version: int


@dataclass(frozen=True, eq=False)
class _Step:
    spread: Spread
    inputs: list[Knowledge]
    outputs: list[Knowledge]


class Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Watches the forward pass of a copy of a model.

    Attributes:
        uses: By id of a parameter or buffer, the number of operations that used it.
        calls: By path of a watched module, the input of each call.
    """

    def __init__(self, model: nn.Module, watched: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._model, self._watched = model, list(watched)
        self._known: dict[int, tuple[Tensor, Knowledge]] = {}  # with the tensor, so that no other gets its id
        self._neighbours: dict[int, list[Tensor]] = {}
        self._steps: list[_Step] = []
        self.uses: dict[int, int] = {}
        self.calls: dict[str, list[Input]] = {}
        for _, tensor, _ in named_tensors(model):
            self._know(tensor, _constant(tensor))
            self.uses[id(tensor)] = 0

    def run(self, workshop: Workshop) -> "Flow":
        """Run one forward pass on the example, then find the needed elements backwards from its outputs."""
        with workshop.running() as example, torch.backends.cudnn.flags(enabled=False):
            with self._watching_calls(), self:
                output = self._model(*example.arguments, **example.by_name)
            # A tensor that a module stores (a hidden state, a cache) may be read later: it counts as an output.
            kept = [tensor for tensor in plain_tensors(self._model) if id(tensor) in self._known]
            for tensor in (*tensors_kept_by(output), *kept):
                self.knowledge(tensor).needed = torch.ones_like(tensor, dtype=torch.bool)
            self._back()
        return self

    def knowledge(self, tensor: Tensor) -> Knowledge:
        """The facts about a tensor; nothing is known about one that comes from outside, such as an input."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        same = self._neighbours.get(_memory(tensor), [])  # `tensor.data` is a new object over the same memory
        for other in same:
            if id(other) in self.uses:
                self.uses[id(other)] += 1
        if same:
            return self._join(tensor, [self.knowledge(other) for other in same])
        self._know(tensor, _anything(tensor))
        return self._known[id(tensor)][1]

    def needed(self, tensor: Tensor) -> Tensor:
        """A mask of the needed elements of a parameter; all of them if no operation used it."""
        # An unused parameter may be read by Python, or in a path that this example does not take.
        found = self.knowledge(tensor).needed
        if not self.uses[id(tensor)]:
            return torch.ones_like(tensor, dtype=torch.bool)
        return torch.zeros_like(tensor, dtype=torch.bool) if found is None else found

    @contextmanager
    def _watching_calls(self) -> Iterator[None]:
        modules = dict(self._model.named_modules())
        handles = [modules[path].register_forward_pre_hook(partial(self._called, path)) for path in self._watched]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, path: str, _module: nn.Module, arguments: tuple[Any, ...]) -> None:
        first = arguments[0] if arguments and isinstance(arguments[0], Tensor) else torch.empty(0)
        self.calls.setdefault(path, []).append(Input(first, self.knowledge(first), first._version))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = Operation(func, args, kwargs or {}, result)
        inputs = [self.knowledge(tensor) for tensor in operation.inputs]
        for tensor in operation.inputs:
            if id(tensor) in self.uses:
                self.uses[id(tensor)] += 1
        self._pass_on(operation, inputs)
        self._note_writing(operation, inputs)
        return result

    def _pass_on(self, operation: Operation, inputs: list[Knowledge]) -> None:
        made = self._of_nothing(operation, inputs)
        if made is None:
            spread = _fitting(operation, inputs)
            made = _outputs(operation, spread, inputs)
            self._steps.append(_Step(spread, inputs, made))
        for tensor, knowledge in zip(operation.outputs, made, strict=True):
            self._know(tensor, knowledge)

    def _of_nothing(self, operation: Operation, inputs: list[Knowledge]) -> list[Knowledge] | None:
        """The facts about outputs of an operation without tensor inputs; None for other operations."""
        drawn = torch.Tag.nondeterministic_seeded in getattr(operation.function, "tags", ())
        if drawn and inputs:
            raise NotFollowed(f"forward draws random numbers in eval mode (aten::{operation.name})")
        if operation.name in FILLS:
            return [_constant(tensor) for tensor in operation.outputs]
        return None if inputs else [_anything(tensor) for tensor in operation.outputs]

    def _note_writing(self, operation: Operation, inputs: list[Knowledge]) -> None:
        """After an in-place operation, let every tensor that shares the written memory depend on all its inputs."""
        returned = {id(tensor) for tensor in operation.outputs}
        for written in operation.written:
            for tensor in list(self._neighbours.get(_memory(written), [])):
                if id(tensor) in self.uses:
                    raise NotFollowed(f"forward writes into a parameter or buffer (aten::{operation.name})")
                if id(tensor) not in returned:
                    made = [self.knowledge(output) for output in operation.outputs]
                    self._join(tensor, [self.knowledge(tensor), *inputs, *made])

    def _join(self, tensor: Tensor, sources: list[Knowledge]) -> Knowledge:
        """Treat all elements of a tensor as unknown from now on, and as computed from all of the sources."""
        new = _anything(tensor)
        self._steps.append(_Step(to_all([tuple(tensor.shape)]), sources, [new]))
        self._know(tensor, new)
        return new

    def _know(self, tensor: Tensor, knowledge: Knowledge) -> None:
        if id(tensor) not in self._known:
            self._neighbours.setdefault(_memory(tensor), []).append(tensor)
        self._known[id(tensor)] = (tensor, knowledge)

    def _back(self) -> None:
        for step in reversed(self._steps):
            if any(output.needed is not None for output in step.outputs):
                for source, needed in zip(step.inputs, _pulled(step), strict=True):
                    source.needed = needed if source.needed is None else source.needed | needed


def _constant(tensor: Tensor) -> Knowledge:
    nonzero = tensor != 0
    return Knowledge(torch.zeros_like(nonzero), nonzero, ~nonzero)


def _anything(tensor: Tensor) -> Knowledge:
    every = torch.ones_like(tensor, dtype=torch.bool)
    return Knowledge(every, every, torch.zeros_like(every))


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or -id(tensor)
    except (NotImplementedError, RuntimeError) as error:
        raise NotFollowed(f"forward works with {tensor.layout} tensors, which are not followed") from error


def _counted(masks: Iterable[Tensor]) -> list[Tensor]:
    return [mask.to(torch.float32) for mask in masks]


def _through(spread: Spread, masks: list[Tensor]) -> list[Tensor]:
    with torch.autocast(masks[0].device.type, enabled=False):  # half precision cannot count beyond 2,048
        return spread.through(masks)


def _fitting(operation: Operation, inputs: list[Knowledge]) -> Spread:
    """The mask rule of an operation; if it fails or gives wrong shapes, the one that passes everything on."""
    spread = spread_of(operation)
    try:  # on the real masks: variants of an operation may have arguments that its mask rule does not expect
        found = _through(spread, _counted(source.nonzero for source in inputs))
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return everywhere(operation)
    return spread if [tuple(mask.shape) for mask in found] == operation.shapes else everywhere(operation)


def _outputs(operation: Operation, spread: Spread, inputs: list[Knowledge]) -> list[Knowledge]:
    varies = _varying(spread, inputs)
    alive = _through(spread, _counted(~source.void for source in inputs))
    part = operation.name in PARTS and not bool(inputs[0].varies.any()) and operation.inputs[0].shape != varies[0].shape
    made = []
    for tensor, moving, living in zip(operation.outputs, varies, alive, strict=True):
        if part or operation.name in COUNTS:
            made.append(_anything(tensor))
        else:
            made.append(Knowledge(moving, moving | (tensor != 0), (living < HALF) & (tensor == 0) & ~moving))
    return made


def _varying(spread: Spread, inputs: list[Knowledge]) -> list[Tensor]:
    """Masks of the output elements with a term of which one factor varies and none is zero."""
    # Where edges matter, a nonzero constant comes out differently by position, so it counts as varying.
    varying = [source.nonzero if spread.edges and place == 0 else source.varies for place, source in enumerate(inputs)]
    if not spread.product:
        return [mask > HALF for mask in _through(spread, _counted(varying))]
    # Terms without a zero factor, less those in which no factor varies.
    every = _through(spread, _counted(source.nonzero for source in inputs))
    still = [source.nonzero & ~moving for source, moving in zip(inputs, varying, strict=True)]
    return [one - other > HALF for one, other in zip(every, _through(spread, _counted(still)), strict=True)]


def _pulled(step: _Step) -> list[Tensor]:
    """Masks of the input elements that the needed output elements depend on: the mask rule's gradient."""
    with torch.enable_grad():
        masks = [mask.requires_grad_() for mask in _counted(~source.void for source in step.inputs)]
        outputs = _through(step.spread, masks)
        wanted = [(mask, o.needed) for mask, o in zip(outputs, step.outputs, strict=True) if o.needed is not None]
        gradients = torch.autograd.grad(
            [mask for mask, _ in wanted], masks, _counted(needed for _, needed in wanted), allow_unused=True
        )
    return [
        torch.zeros_like(source.void) if gradient is None else gradient > HALF
        for source, gradient in zip(step.inputs, gradients, strict=True)
    ]
