"""Replays: tracing a cut copy and comparing it with the first trace, operation by operation.

The first trace predicts every intermediate result of a cut copy: take its index maps and delete the removed atoms. If
a layer has the channels ``[1 2 3 4]`` and the atoms 2 and 4 are removed, each tensor that carried this map must carry
``[1 3]``. The weights of the copy are labelled with the atoms that survive, so a replay can check that: comparing
shapes alone would accept ``[3 1]``, a wrong order, or ``[2 4]``, the wrong channels.

Here a copy loses hidden neurons 1 and 3. With all of the edits it repeats the first trace; if one tensor is left uncut
(the second weight), the first operation that uses it is found:

>>> import keepk
>>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
>>> graph = keepk.trace(net, torch.zeros(2, 8))
>>> edits = graph.edits([1, 3])
>>> workshop = Workshop(net, Example.of(torch.zeros(2, 8)), META)
>>> graph.replays.mismatch(workshop, graph, edits) is None
True
>>> graph.replays.mismatch(workshop, graph, replace(edits, cuts=edits.cuts[:2]))
Mismatch('aten::t got (3, 6), expected (3, 4)')

There are two kinds of replay. `Replay` follows a cut copy; the first difference raises `Mismatch`, which `probe` turns
into a repair. `Echo` follows an uncut copy in another mode, to see whether the pass does anything new. `Run` is one way
of calling forward, and `Replays` lists all passes that a cut copy has to repeat.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from keepk.graph.graph import Graph
from keepk.graph.ids.atoms import Label, Origin, label_of, origin_of, set_label, set_origin, tensors_kept_by
from keepk.graph.ids.facts import Bound, Facts
from keepk.graph.ids.maps import Flags, Map, aligned, compress, restrict_all, shape_left, support
from keepk.graph.rules.call import Call, is_pointwise
from keepk.graph.solve.bindings import Classes
from keepk.graph.tracer import MAY_DIFFER, Numbers, Recorded, Step, Tracer, constants_of, kind_of, numbers_of, sizes_of
from keepk.graph.values import CREATED, Answers
from keepk.model.copies import META, Workshop
from keepk.model.edits import Edits, Indices, Selection
from keepk.model.example import Example, TraceInputs
from keepk.model.layers import SELECTED

# torch computes a linear layer as one operation or two (a product and a sum), and the product with or without a batch
# dim, depending on the strides of the input. A cut may change the strides, so each form must match the others.
ADDMM, ADD = "aten::addmm", "aten::add"
PRODUCTS = ("aten::mm", "aten::bmm")
# Which passes a cut copy has to repeat; see `Replays.mismatch`.
Modes: TypeAlias = Literal["all", "runs", "trained"]


class Mismatch(Exception):  # noqa: N818 - never leaves this package: a finding that `probe` acts on
    """The first difference between a cut copy and the first trace.

    Attributes:
        step: The number of the step in the first trace; -1 if the cut could not be made at all.
        why: The difference, as a message.
        run: The forward pass in which it occurred.
        number: Whether an argument that is not a size changed (1 / sqrt(d)); shapes and channels are as predicted.
        others: Whether the size is as predicted, but the channels are not.
        raised: Whether torch or the user's forward raised, so that there was nothing to compare.
    """

    def __init__(
        self, step: int, why: str, *, number: bool = False, others: bool = False, raised: bool = False
    ) -> None:
        super().__init__(why)
        self.step, self.why = step, why
        self.run: Run | None = None
        self.number, self.others, self.raised = number, others, raised


class Replay(Tracer):  # type: ignore[no-untyped-call]  # torch's own
    """A trace of a cut copy that compares each operation with the first trace while it runs.

    Args:
        model: The cut copy.
        first: The first trace of the same pass.
        classes: The class of each atom; atoms of one class are interchangeable.
        alive: Which atoms survive the cut.
        selections: The BatchNorms of the copy that read a selection of their input, which adds an operation.
        same_numbers: Whether numbers that are not sizes must be unchanged; they may change where units are lossy.
        lenient: Whether a missing map is accepted. An axis with a single channel left has no map, and results that
            combine it with other tensors may have none either. Maps that do exist are still compared.
    """

    def __init__(
        self,
        model: nn.Module,
        first: Recorded,
        classes: Classes,
        alive: Flags,
        selections: Sequence[Selection],
        *,
        same_numbers: bool,
        lenient: bool = False,
    ) -> None:
        super().__init__(model, first.groups)
        self._lenient = lenient
        self._first, self._classes, self._alive, self._same_numbers = first, classes, alive, same_numbers
        self._selected = {selection.module: selection.channels for selection in selections}
        self.atoms = first.atoms.branch()
        self.facts = Facts()
        self._known = first.atoms.count
        self._restricted = dict[int, list[Map] | None]()
        self._position = 0
        self._doubtful: int | None = None
        left = {name: tuple(restrict_all(maps, alive) or ()) for name, maps in first.tensors.items()}
        named = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        self.label_tensors(left | dict.fromkeys(named - set(left), ()))

    @property
    def position(self) -> int:
        """The step that a failure of the next operation is attributed to."""
        where = self._position if self._doubtful is None else self._doubtful
        return min(where, len(self._first.steps) - 1)

    def finish(self, output: Any) -> None:
        """Raise `Mismatch` for a copy that stopped early or returns different tensors."""
        if any(step.name not in MAY_DIFFER for step in self._first.steps[self._position :]):
            raise Mismatch(self.position, "ends early")
        returned = tuple(map(origin_of, tensors_kept_by(output)))
        if _differ(returned, self._first.returned):
            raise Mismatch(self.position, "returns another tensor", number=self._same_numbers)
        for found in self._lossy:
            if self._same_numbers and found.exists:
                why = f"the result of {self._first.steps[found.step].name} is used, which nothing did"
                raise Mismatch(found.step, why, number=True)

    def _apply_rule(self, call: Call) -> None:
        # The first trace has no such operation: a BatchNorm reads a selection only after a cut.
        if call.name == "aten::index_select" and self.module in self._selected and call["dim"] == 1:
            maps = [_selected(m, self._selected[self.module]) for m in call.maps(call.inputs[0])]
            call.label_output(maps)
        else:
            super()._apply_rule(call)

    def record_numbers(self, numbers: tuple[float, ...]) -> None:
        """Compare the numbers that a tensor is made from with the first trace."""
        steps, number = self._first.steps, self._next()
        if number == len(steps) or steps[number].name != CREATED:
            raise Mismatch(self.position, f"a tensor is made from {numbers}, which the uncut model does not do")
        self._position = number + 1
        self._compare_numbers(steps[number], (("data", numbers),), number)

    def answer(self, tensors: Sequence[Tensor], *, boolean: bool, read: Callable[[Sequence[Tensor]], Any]) -> Any:  # noqa: ARG002 - the first trace has read it
        """The value that Python read here in the first trace, so that the copy takes the same path."""
        known, number = self._first.reads, len(self.reads)
        if number == len(known) or known[number].place != self.place():
            raise Mismatch(self.position, f"a value is read at {self.place()}, which the uncut model does not do")
        self.reads.append(known[number])
        return known[number].value

    def record(self, call: Call) -> None:
        """Compare the operation with the first trace and give its outputs the maps predicted from there."""
        moves, before = kind_of(call) in MAY_DIFFER, self._position
        step = self._matching_movement(call) if moves else self._matching(call)
        origins = tuple(map(origin_of, call.inputs))
        self._note_step(call, matched=self._position > before)
        if step is None:
            return
        blamed = self._position - 1 if self._doubtful is None else self._doubtful
        self._compare_taken(step, call, blamed)
        self._compare_numbers(step, numbers_of(call), blamed)
        if not moves and self.module not in self._selected:
            self._compare_inputs(step, call, blamed)
            self._compare_sources(step, call, origins, blamed)
        if not moves and (forgotten := self._first.forgotten.get(self._position - 1)) is not None:
            super()._note_lossy(call, self._position - 1, forgotten)
        if len(call.outputs) != len(step.outputs):
            raise Mismatch(blamed, f"{call.name} gave {len(call.outputs)} parts, expected {len(step.outputs)}")
        for output, (shape, maps) in zip(call.outputs, step.outputs, strict=True):
            self._compare(call, output, shape, maps, blamed)
        self._doubtful = None

    def _note_step(self, call: Call, *, matched: bool) -> None:
        """Give the outputs the origins of the first trace; unknown where torch computed the same in another way."""
        if call.name == "aten::index_select" and self.module in self._selected:
            set_origin(call.outputs[0], origin_of(call.inputs[0]))
        else:
            self.note_origins(call, (self._position - 1,) if matched else None)

    def _compare_sources(self, step: Step, call: Call, origins: Sequence[Origin], blamed: int) -> None:
        """Compare where the inputs come from, their constants and, without channels, the size arguments."""
        if not self._same_numbers or len(origins) != len(step.origins):
            return
        if _differ(origins, step.origins):
            raise Mismatch(blamed, f"{call.name} gets the result of another operation", number=True)
        if _differ(constants_of(call), step.constants):
            raise Mismatch(blamed, f"{call.name} gets other constants", number=True)
        if not step.has_channels:
            self._compare_numbers(replace(step, numbers=step.sizes), sizes_of(call), blamed)

    def _matching_movement(self, call: Call) -> Step | None:
        """The step repeated by an operation that only moves data, if there is one with the predicted shape."""
        steps = self._first.steps
        for number in range(self._position, len(steps)):
            step = steps[number]
            if step.name not in MAY_DIFFER:
                break
            if step.name == kind_of(call) and self._fits(step, call):
                self._position = number + 1
                return step
            # Either the shape is wrong, or torch moved the data in another order. If a later comparison fails, this
            # step is to blame, since the number that prevents the cut is an argument of this operation.
            if step.name == kind_of(call) and self._doubtful is None:
                self._doubtful = number
        return None

    def _left(self, maps: tuple[Map, ...]) -> list[Map] | None:
        """The maps of a tensor without the removed atoms; None if the rest is not a box.

        Cached, since most tensors are an output of one step and an input of others.
        """
        if id(maps) not in self._restricted:  # the first trace keeps the maps alive, so their ids are unique
            self._restricted[id(maps)] = restrict_all(maps, self._alive)
        return self._restricted[id(maps)]

    def _note_written(self, outputs: Sequence[Tensor]) -> None:
        """Do nothing: a replay collects no facts, so it needs no zero flags."""

    def _note_lossy(self, call: Call, step: int, bounds: tuple[Bound, ...]) -> None:
        """Do nothing: only the results that nothing used in the first trace matter, and `record` notes these."""

    def _fits(self, step: Step, call: Call) -> bool:
        shapes = [shape_left(shape, maps, self._left(maps)) for shape, maps in step.outputs]
        return shapes == [tuple(output.shape) for output in call.outputs]

    def _matching(self, call: Call) -> Step | None:
        """The step that an operation repeats; None for one that torch adds or omits when strides differ."""
        steps, number = self._first.steps, self._next()
        there = steps[number].name if number < len(steps) else "the end"
        if there == kind_of(call):
            self._position = number + 1
            return steps[number]
        if call.name == "aten::index_select" and self.module in self._selected:
            return None
        if there in (ADDMM, *PRODUCTS, ADD) and call.name in (ADDMM, *PRODUCTS, ADD):
            origins = tuple(map(origin_of, call.inputs))
            if (taken := self._steps_of_linear(number, call.name, origins)) is not None:
                self._position = taken
                return None
        raise Mismatch(self.position, f"{there} became {call.name}")

    def _steps_of_linear(self, number: int, name: str, origins: tuple[Origin, ...]) -> int | None:
        """The step after a linear layer that the first trace computed in another form; None if it is something else.

        ``addmm(bias, x, weight)`` may become ``mm(x, weight)`` and ``add(product, bias)``, or the reverse, and ``mm``
        may become ``bmm``. The origins of the tensors must be the same.
        """
        steps, step = self._first.steps, self._first.steps[number]
        if step.name == ADDMM and name in PRODUCTS and not _differ(origins, step.origins[1:]):
            return self._position  # the sum is still to come
        if step.name == ADDMM and name == ADD and not _differ(origins[1:], step.origins[:1]):
            return number + 1
        if step.name in PRODUCTS and name in PRODUCTS and not _differ(origins, step.origins):
            return number + 1
        after = next((n for n in range(number + 1, len(steps)) if steps[n].name not in MAY_DIFFER), number)
        adds = steps[after].name == ADD and (number, 0) in steps[after].origins
        if step.name in PRODUCTS and name == ADDMM and adds and not _differ(origins[1:], step.origins):
            return after + 1
        return None

    def _next(self) -> int:
        """The number of the next step that does more than move data."""
        steps, number = self._first.steps, self._position
        while number < len(steps) and steps[number].name in MAY_DIFFER:
            number += 1
        return number

    def _compare_numbers(self, step: Step, numbers: Numbers, blamed: int) -> None:
        """Refuse a changed argument that is not a size: a kernel, a padding or a factor computed from a width."""
        if self._same_numbers and step.numbers != numbers:
            pairs = zip(step.numbers, numbers, strict=False)
            changed = next(((name, old, new) for (name, old), (_, new) in pairs if old != new), ("count", "", ""))
            why = f"{changed[0]} of {step.name} was {changed[1]} and became {changed[2]}"
            raise Mismatch(blamed, why[:200], number=True)

    def _compare_taken(self, step: Step, call: Call, blamed: int) -> None:
        """Refuse a different channel where one was taken by index, unless it is the only one left."""
        if len(call.taken) != len(step.taken) or not call.taken:
            return
        found, wanted = np.array([call.taken, step.taken], np.int32)
        known = found < self._known
        if (self._classes[found[known]] != self._classes[wanted[known]]).any():
            raise Mismatch(blamed, f"{call.name} takes another channel", others=True)

    def _compare_inputs(self, step: Step, call: Call, blamed: int) -> None:
        """Compare the shapes of the inputs: movements are matched loosely, so their results are checked at the use."""
        sizes = [*call.input_shapes(), *((number,) for number, _ in call.counts)]
        if len(sizes) != len(step.inputs):
            return
        for found, (shape, maps) in zip(sizes, step.inputs, strict=True):
            expected = shape_left(shape, maps, self._left(maps)) if maps else shape
            if expected is not None and expected != found:
                raise Mismatch(blamed, f"{call.name} got {found}, expected {expected}")

    def _compare(self, call: Call, output: Tensor, shape: tuple[int, ...], maps: tuple[Map, ...], blamed: int) -> None:
        left = self._left(maps)
        expected = shape_left(shape, maps, left)
        if expected != tuple(output.shape):
            if not maps and output is not call.outputs[0]:
                return  # a secondary output without maps, such as the statistics of a norm
            raise Mismatch(blamed, f"{call.name} gave {tuple(output.shape)}, expected {expected}")
        left = left or []
        uncompressed = (*label_of(output).maps, *_passed_on(call, output.ndim))
        # Most maps are found as they are, without the repetitions that `compress` removes.
        others = [m for m in left if not any(m.shape == known.shape and (m == known).all() for known in uncompressed)]
        found = [m for m in map(compress, uncompressed if others else ()) if support(m)]
        for index_map in (m for m in map(compress, others) if support(m)):
            known = [other for other in found if other.shape == index_map.shape]
            if self._lenient and not known:
                continue
            if not any(self._same(index_map, other) for other in known):
                raise Mismatch(blamed, f"{call.name} puts the channels in another order", others=True)
        label = label_of(output)
        # The predicted maps replace those found, so that a later difference is blamed on the operation that makes it.
        # The zero flags do not matter, since a replay collects no facts.
        set_label(output, replace(label, maps=tuple(left), zeros=(any(label.zeros),) * len(left)))

    def _same(self, wanted: Map, found: Map) -> bool:
        """Whether a map has the predicted atoms.

        Id 0 matches anything: it marks an axis with one channel left, which cannot be in a wrong order. Ids that the
        replay created match if each of them corresponds to one predicted class.
        """
        known, fresh = (found > 0) & (found < self._known), found >= self._known
        if (self._classes[found[known]] != self._classes[wanted[known]]).any():
            return False
        if not fresh.any():
            return True
        pairs = np.stack([found[fresh], self._classes[wanted[fresh]]])
        return len(np.unique(pairs, axis=1).T) == len(np.unique(pairs[0]))


def _differ(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether two lists of origins or constants differ; None is unknown and matches anything."""
    return len(found) != len(known) or any(
        one != other for one, other in zip(found, known, strict=True) if None not in (one, other)
    )


def _passed_on(call: Call, rank: int) -> Iterator[Map]:
    """The maps of the inputs of an elementwise operation: each of them is valid for the result as well.

    With one head left, a weight shared by all heads has the shape of the tensor that it scales, so that the result
    carries the atoms of the weight instead of those predicted.
    """
    if is_pointwise(call.operation):
        for tensor in call.inputs:
            yield from (aligned(m, rank) for m in call.maps(tensor) if m.ndim <= rank)


def _selected(index_map: Map, channels: Indices) -> Map:
    return np.take(index_map, channels, axis=1) if index_map.shape[1] > 1 else index_map


class Differs(Exception):  # noqa: N818 - a signal, caught by the trace
    """Raised by an `Echo` that differs from the pass that it was compared with."""


# Operations that allocate the mask of a dropout; see `Echo`.
NOISE = ("aten::empty_like", "aten::empty", "aten::new_empty")
NOT_IN_TRAINING = ("training", "momentum")  # arguments of a BatchNorm that differ between train and eval mode


class Echo(Tracer):  # type: ignore[no-untyped-call]  # torch's own
    """A forward pass that is expected to repeat another pass of the same model, dropout aside.

    No rules are applied: the same operation on the same inputs has the same result, so labels are copied from the other
    pass. Dropout and stochastic depth multiply by a random mask, made by `empty`, `bernoulli` and `div`; these
    operations are skipped in the comparison. All steps are recorded, including those of dropout, so that cut copies
    can repeat this pass too. The only new facts are those about the masks, and those about results that nothing uses in
    the other pass and that outlive this one, such as a loss that a module stores in train mode.

    Raises:
        Differs: The pass differs from the other one.
    """

    def __init__(self, model: nn.Module, first: Recorded, answers: Answers) -> None:
        super().__init__(model, first.groups, answers)
        self._first, self._position = first, 0
        self._noise: dict[int, Tensor] = {}
        self._there: dict[int, Origin] = {}  # by the number of a step here, the same result in the other pass
        self.label_tensors(first.tensors)

    def answer(self, tensors: Sequence[Tensor], *, boolean: bool, read: Callable[[Sequence[Tensor]], Any]) -> Any:
        """The value that Python reads, if the other pass reads one at the same place."""
        facts, self.facts = self.facts, Facts()  # the facts about this read are known from the other pass
        value = super().answer(tensors, boolean=boolean, read=read)
        self.facts = facts
        known, number = self._first.reads, len(self.reads) - 1
        if number >= len(known) or known[number].place != self.reads[-1].place:
            raise Differs(f"a value is read at {self.reads[-1].place}")
        return value

    def record_numbers(self, numbers: tuple[float, ...]) -> None:
        """Compare the numbers that a tensor is made from."""
        step = self._next()
        if step is None or (step.name, step.numbers) != (CREATED, (("data", numbers),)):
            raise Differs("a tensor is made from other numbers")
        self._repeat(step)

    def _next(self) -> Step | None:
        return self._first.steps[self._position] if self._position < len(self._first.steps) else None

    def _repeat(self, step: Step) -> None:
        self._there[len(self.steps)] = (self._position,)
        self.steps.append(step)
        self._position += 1

    def _apply_rule(self, call: Call) -> None:
        """Do nothing: `record` copies the labels of the other pass."""

    def _note_written(self, outputs: Sequence[Tensor]) -> None:
        """Do nothing: the zero flags of the other pass apply."""

    def record(self, call: Call) -> None:
        """Compare an operation with the next one of the other pass, and copy the labels of its outputs."""
        if self._is_dropout(call) or self._counts_batches(call):
            return
        step, kind = self._next(), kind_of(call)
        if step is None or step.name != kind or not self._same_numbers(kind, step.numbers, numbers_of(call)):
            raise Differs(f"{step.name if step else 'the end'} became {kind}")
        if sizes_of(call) != step.sizes or _differ(constants_of(call), step.constants):
            raise Differs(f"{call.name} has other sizes or constants")
        shapes, expected = call.input_shapes(), step.inputs[: len(call.inputs)]
        # An in-place operation changes the label of its input, and the step has the label from after the write.
        written = set(map(id, call.outputs))
        if len(shapes) != len(expected) or any(
            shape != known or (label_of(tensor).maps is not maps and id(tensor) not in written)
            for tensor, shape, (known, maps) in zip(call.inputs, shapes, expected, strict=True)
        ):
            raise Differs(f"{call.name} gets something else")
        origins = tuple(map(origin_of, call.inputs))
        if tuple(map(self._in_the_other, origins)) != step.origins:
            raise Differs(f"{call.name} gets the result of another operation")
        for output, (_, maps) in zip(call.outputs, step.outputs, strict=False):
            set_label(output, Label(maps, zeros=(False,) * len(maps)))
        if self._position in self._first.forgotten:
            self._note_lossy(call, len(self.steps), self._first.forgotten[self._position])
        self.note_origins(call, (len(self.steps),))
        self._repeat(replace(step, numbers=numbers_of(call), origins=origins))

    def _in_the_other(self, origin: Origin) -> Origin:
        """An origin of this pass in the step numbers of the other pass."""
        if not isinstance(origin, tuple) or origin[0] == "input":
            return origin
        if origin[0] == "detached":
            return ("detached", self._in_the_other(origin[1]))
        step, *place = origin
        there = self._there[step]
        return (*there, *place) if isinstance(there, tuple) and len(there) == 1 else there

    def _same_numbers(self, name: str, known: Numbers, found: Numbers) -> bool:
        if known == found or "batch_norm" not in name:
            return known == found
        kept, other = ([it for it in numbers if it[0] not in NOT_IN_TRAINING] for numbers in (known, found))
        return kept == other

    def _counts_batches(self, call: Call) -> bool:
        if call.name != "aten::add" or not self.is_batch_norm(self.module) or call.outputs[0].ndim:
            return False
        self._add(call, None)
        return True

    def _add(self, call: Call, there: Origin) -> None:
        """Record an operation that the other pass lacks, and the result there that corresponds to its output."""
        step = self.step_of(call)
        self._there[len(self.steps)] = there
        self.note_origins(call, (len(self.steps),))
        self.steps.append(step)

    def _is_dropout(self, call: Call) -> bool:
        """Whether an operation makes or applies a dropout mask; applying one keeps the label of the input."""
        step = self._next()
        if call.name in NOISE and (step is None or step.name != call.name):
            return self._makes_noise(call)
        noisy = [id(tensor) in self._noise for tensor in call.inputs]
        if not any(noisy):
            return False
        if call.name in ("aten::bernoulli", "aten::div") and len(noisy) == 1:
            return self._makes_noise(call)
        if call.name != "aten::mul" or noisy != [False, True]:
            raise Differs(f"{call.name} of random numbers")
        label = label_of(call.inputs[0])
        super()._apply_rule(call)  # a fact: the channels of the mask are removed with those of its input
        set_label(call.outputs[0], label)
        self._add(call, self._in_the_other(origin_of(call.inputs[0])))
        return True

    def _makes_noise(self, call: Call) -> bool:
        super()._apply_rule(call)  # `empty_like` copies the channels of its input
        self._noise[id(call.outputs[0])] = call.outputs[0]
        self._add(call, None)
        return True

    def finish(self, output: Any) -> None:
        """Check that no step of the other pass is missing, and that the same tensors are returned."""
        if self._position < len(self._first.steps) or len(self.reads) < len(self._first.reads):
            raise Differs("ends early")
        if tuple(self._in_the_other(origin_of(tensor)) for tensor in tensors_kept_by(output)) != self._first.returned:
            raise Differs("returns something else")
        for found in self._lossy:
            if found.exists:  # nothing used this result in the other pass, but in this one an object holds it
                self.facts.lossy += found.bounds
            else:
                self.forgotten[found.step] = found.bounds


@dataclass(frozen=True, eq=False)
class Run:
    """One way of calling the model's forward.

    Attributes:
        example: The arguments of forward.
        training: Whether the model is in train mode.
        gradients: Whether gradients are recorded.
        answers: The truth values that Python gets instead of the real ones.
    """

    example: Example
    training: bool = False
    gradients: bool = False
    answers: Answers = field(default_factory=Answers)

    def __str__(self) -> str:
        """For messages, such as "in train mode"."""
        mode = "in train mode" if self.training else "in eval mode"
        other = f", on the other side of the branch at {', '.join(self.answers.places)}" if self.answers else ""
        return f"{mode}{other}"


@dataclass(frozen=True, eq=False)
class Replays:
    """The forward passes that every cut copy must repeat.

    Attributes:
        runs: Passes, each with its trace on the uncut copy.
        echoes: Passes in train mode that repeat one of the runs except for dropout, each with its record.
        device: Where cut copies run: the meta device, or None for the model's own device if sizes depend on values.
        fitting: A cache for callers: the shapes of all tensors with which a cut model repeated every pass.
        inputs: The inputs of the trace, with which a model that has changed is traced again.
    """

    runs: tuple[tuple[Run, Recorded], ...]
    echoes: tuple[tuple[Run, Recorded], ...] = ()
    device: torch.device | None = META
    fitting: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    inputs: TraceInputs | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replays":
        # The rest is immutable and large. The cache is about one model: a copy may change and have the same shapes.
        return replace(self, fitting=set(self.fitting))

    @cached_property
    def steps(self) -> list[Step]:
        """The operations of all passes, one after the other."""
        return [step for _, recorded in (*self.runs, *self.echoes) for step in recorded.steps]

    def mismatch(
        self, workshop: Workshop, graph: Graph, edits: Edits, *, lenient: bool = False, modes: Modes = "all"
    ) -> Mismatch | None:
        """The first difference between a cut copy and the traces; None if the copy repeats every pass.

        See `mismatches` for the arguments.
        """
        return next(self.mismatches(workshop, graph, edits, lenient=lenient, modes=modes), None)

    def mismatches(
        self, workshop: Workshop, graph: Graph, edits: Edits, *, lenient: bool = False, modes: Modes = "all"
    ) -> Iterator[Mismatch]:
        """For each pass that a cut copy does not repeat, the first difference.

        Args:
            workshop: Makes the copy.
            graph: The graph of the model.
            edits: The cut.
            lenient: Accept a missing map; see `Replay`.
            modes: The passes to repeat: "all"; "runs", without the echoes; or "trained", each run replaced by its echo
                where it has one, which covers train mode in the time of the runs alone.

        Yields:
            Mismatches; their `step` counts through `steps`, the operations of all passes.
        """
        passes = (*self.runs, *(self.echoes if modes == "all" else ()))
        if modes == "trained":
            passes = tuple((*self._echo_of(run), (run, recorded))[0] for run, recorded in self.runs)
        for run, recorded in passes:
            found = _followed(workshop, run, recorded, graph, edits, lenient=lenient)
            if found is not None:
                found.run = run
                found.step += self._offset(recorded) if found.step >= 0 else 0
                yield found

    def _echo_of(self, run: Run) -> list[tuple[Run, Recorded]]:
        same = (it for it in self.echoes if it[0].example is run.example and it[0].answers == run.answers)
        return [] if run.training else list(same)

    def _offset(self, wanted: Recorded) -> int:
        """The index in `steps` at which a pass begins."""
        offset = 0
        for _, recorded in (*self.runs, *self.echoes):
            if recorded is wanted:
                break
            offset += len(recorded.steps)
        return offset


def _selecting(model: nn.Module, edits: Edits) -> Iterator[Selection]:
    """The selections of earlier cuts that this cut does not change."""
    changed = {selection.module for selection in edits.selections}
    for path, module in model.named_modules():
        channels = getattr(module, SELECTED, None)
        if channels is not None and path not in changed:
            yield Selection(path, channels.numpy(force=True))


def _followed(
    workshop: Workshop, run: Run, first: Recorded, graph: Graph, edits: Edits, *, lenient: bool
) -> Mismatch | None:
    """Replay one pass on a cut copy."""
    alive = graph.alive_after(edits.units)
    try:
        twin = workshop.copy(edits, training=run.training)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a user's module may refuse a new value for an attribute
        return Mismatch(-1, f"{type(error).__name__}: {error}")
    exact = not graph.units.lossy[edits.units].any()
    classes, selections = graph.solution.classes, (*edits.selections, *_selecting(workshop.model, edits))
    replay = Replay(twin, first, classes, alive, selections, same_numbers=exact, lenient=lenient)
    try:
        with workshop.running(run.example, gradients=run.gradients) as example:
            replay.finish(replay.follow(example.arguments, example.by_name))
    except Mismatch as mismatch:
        return mismatch
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the uncut copy ran, so whatever forward raises is caused by a size
        return Mismatch(replay.position, f"{type(error).__name__}: {error}", raised=True)
    return None
