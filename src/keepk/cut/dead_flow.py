"""One forward pass that is watched for influence: what no input reaches, and what reaches no output.

Of every element of every tensor three things are kept. It *varies* if it may be another number for another input. It is
*nonzero* if it varies or is a number other than zero. It is *void* if it is zero whatever the input is, and stays zero
when further weights are set to zero. All of it follows from the zeros among the weights, operation by operation; an
operation that is not known passes everything on, so that what is found is proved and never guessed.

Backwards from the outputs, an element is *needed* if an output depends on it: a factor in a product is not, where all
that it is multiplied with is void. Weights that are not needed can all be set to zero at once: a term could only change
if one of its factors did and none of the others were void.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keepk.cut.dead_operation import Operation, Spread
from keepk.cut.dead_ops import everywhere, spread_of, to_all
from keepk.graph.label import tensors_in
from keepk.graph.shell import Workshop, plain_tensors
from keepk.graph.tracer import named_tensors

# What is made of nothing is the same for every input only if it is filled with one number.
FILLS = {"zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "scalar_tensor", "zeros_like", "ones_like"}
# How much is taken of a table of positions may depend on how long the input is.
PARTS = {"slice", "narrow", "select", "index", "index_select", "gather", "unfold", "as_strided"}
# Even of zeros these give another number for another size.
COUNTS = {"_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "logcumsumexp"}
HALF = 0.5  # masks count terms, and a count is a whole number up to rounding


class NotFollowed(Exception):  # noqa: N818 - it is caught at once and says why
    """The forward pass does what cannot be followed."""


@dataclass(eq=False)
class Knowledge:
    """What is known of the elements of one tensor; `needed` is None as long as nothing is."""

    varies: Tensor
    nonzero: Tensor
    void: Tensor
    needed: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Input:
    """What a module was called with: the tensor, and its version, by which a later change is seen."""

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
        uses: By id of a parameter, in how many operations it was used.
        calls: By path of a module, what it was called with each time.
    """

    def __init__(self, model: nn.Module, watched: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._model, self._watched = model, list(watched)
        self._known: dict[int, tuple[Tensor, Knowledge]] = {}
        self._neighbours: dict[int, list[Tensor]] = {}
        self._steps: list[_Step] = []
        self.uses: dict[int, int] = {}
        self.calls: dict[str, list[Input]] = {}
        for _, tensor, _ in named_tensors(model):
            self._know(tensor, _constant(tensor))
            self.uses[id(tensor)] = 0

    def run(self, workshop: Workshop) -> "Flow":
        """One forward pass on the example, then back from its outputs."""
        with workshop.running() as example, torch.backends.cudnn.flags(enabled=False):
            with self._watching_calls(), self:
                output = self._model(*example.arguments, **example.by_name)
            kept = [tensor for tensor in plain_tensors(self._model) if id(tensor) in self._known]
            for tensor in (*tensors_in(output), *kept):
                self.knowledge(tensor).needed = torch.ones_like(tensor, dtype=torch.bool)
            self._back()
        return self

    def knowledge(self, tensor: Tensor) -> Knowledge:
        """What is known of a tensor; one that comes from outside may be anything."""
        if id(tensor) in self._known:
            return self._known[id(tensor)][1]
        same = self._neighbours.get(_memory(tensor), [])  # `tensor.data` is another object over the same memory
        for other in same:
            if id(other) in self.uses:
                self.uses[id(other)] += 1
        if same:
            return self._join(tensor, [self.knowledge(other) for other in same])
        self._know(tensor, _anything(tensor))
        return self._known[id(tensor)][1]

    def needed(self, tensor: Tensor) -> Tensor:
        """Which elements of a parameter are needed; of one that was not used, all."""
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
        """What has no source: made on the spot, or drawn at random."""
        drawn = torch.Tag.nondeterministic_seeded in getattr(operation.function, "tags", ())
        if drawn and inputs:
            raise NotFollowed(f"forward draws random numbers in eval mode (aten::{operation.name})")
        if operation.name in FILLS:
            return [_constant(tensor) for tensor in operation.outputs]
        return None if inputs else [_anything(tensor) for tensor in operation.outputs]

    def _note_writing(self, operation: Operation, inputs: list[Knowledge]) -> None:
        """Who shares memory with what was written into depends on all that went in."""
        returned = {id(tensor) for tensor in operation.outputs}
        for written in operation.written:
            for tensor in list(self._neighbours.get(_memory(written), [])):
                if id(tensor) in self.uses:
                    raise NotFollowed(f"forward writes into a parameter or buffer (aten::{operation.name})")
                if id(tensor) not in returned:
                    made = [self.knowledge(output) for output in operation.outputs]
                    self._join(tensor, [self.knowledge(tensor), *inputs, *made])

    def _join(self, tensor: Tensor, sources: list[Knowledge]) -> Knowledge:
        """It may be anything now, made of any of the sources."""
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
    with torch.autocast(masks[0].device.type, enabled=False):  # halves cannot count beyond 2,048
        return spread.through(masks)


def _fitting(operation: Operation, inputs: list[Knowledge]) -> Spread:
    """The operation's own stand-in, or the one that passes everything on where that one does not fit."""
    spread = spread_of(operation)
    try:
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
    """Where a term has a factor that varies, and no factor that is zero."""
    varying = [source.nonzero if spread.edges and place == 0 else source.varies for place, source in enumerate(inputs)]
    if not spread.product:
        return [mask > HALF for mask in _through(spread, _counted(varying))]
    every = _through(spread, _counted(source.nonzero for source in inputs))
    still = [source.nonzero & ~moving for source, moving in zip(inputs, varying, strict=True)]
    return [one - other > HALF for one, other in zip(every, _through(spread, _counted(still)), strict=True)]


def _pulled(step: _Step) -> list[Tensor]:
    """Which elements of the inputs the needed elements of the outputs depend on: the stand-in's gradient."""
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
