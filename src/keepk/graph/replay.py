"""Tracing a cut copy again: every operation must give what the maps predict, element by element.

Shapes alone would not tell a shuffled order from the right one. The copy's weights carry the ids that survived, so that
each operation's result can be held against the first trace with the removed ids taken out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from keepk.graph.call import Call, is_pointwise
from keepk.graph.edits import Edits, Indices, Selection
from keepk.graph.facts import Facts
from keepk.graph.graph import Graph
from keepk.graph.label import Label, Origin, label_of, origin_of, set_label, set_origin, tensors_in
from keepk.graph.layers import SELECTED
from keepk.graph.maps import Flags, Map, aligned, compress, restrict_all, shape_left, support
from keepk.graph.shell import META, Example, Workshop
from keepk.graph.tracer import MAY_DIFFER, Numbers, Recorded, Step, Tracer, constants_of, kind_of, numbers_of, sizes_of
from keepk.graph.union import Classes
from keepk.graph.values import CREATED, Answers

# A linear layer is one operation or two (a product and a sum), and its product has a batch or not, depending on the
# strides of its input.
ADDMM, ADD = "aten::addmm", "aten::add"
PRODUCTS = ("aten::mm", "aten::bmm")


Modes: TypeAlias = Literal["all", "runs", "trained"]


class Mismatch(Exception):  # noqa: N818 - it is caught at once and tells where
    """The cut copy did something else than predicted."""

    def __init__(
        self, step: int, why: str, *, number: bool = False, others: bool = False, raised: bool = False
    ) -> None:
        super().__init__(why)
        self.step, self.why = step, why
        self.run: Run | None = None  # the forward pass in which it happened
        self.number, self.others = number, others  # a value is another one; the size is right, the channels are not
        self.raised = raised  # by torch or the user's forward, before there was anything to compare


class Replay(Tracer):  # type: ignore[no-untyped-call]  # torch's own
    """A trace of a cut copy, compared with the first trace as it goes.

    An axis that is down to one channel has no map, so that what it is joined with may have none either. A `lenient`
    replay accepts that; what does have a map must be in order.
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
        """The step that is to blame if the next operation fails."""
        where = self._position if self._doubtful is None else self._doubtful
        return min(where, len(self._first.steps) - 1)

    def finish(self, output: Any) -> None:
        """Refuse a copy that did less than the first trace, or that returns something else."""
        if any(step.name not in MAY_DIFFER for step in self._first.steps[self._position :]):
            raise Mismatch(self.position, "ends early")
        returned = tuple(map(origin_of, tensors_in(output)))
        if _differ(returned, self._first.returned):
            raise Mismatch(self.position, "returns another tensor", number=self._same_numbers)

    def _apply_rule(self, call: Call) -> None:
        if call.name == "aten::index_select" and self.module in self._selected and call["dim"] == 1:
            maps = [_selected(m, self._selected[self.module]) for m in call.maps(call.inputs[0])]
            call.label_output(maps)
        else:
            super()._apply_rule(call)

    def record_numbers(self, numbers: tuple[float, ...]) -> None:
        """Hold the numbers that a tensor is made of against the first trace."""
        steps, number = self._first.steps, self._next()
        if number == len(steps) or steps[number].name != CREATED:
            raise Mismatch(self.position, f"a tensor is made of {numbers}, which was not so before")
        self._position = number + 1
        self._compare_numbers(steps[number], (("data", numbers),), number)

    def answer(self, tensors: Sequence[Tensor], *, boolean: bool, read: Callable[[Sequence[Tensor]], Any]) -> Any:  # noqa: ARG002 - the first trace has read it
        """Tell Python the value that it read in the first trace."""
        known, number = self._first.reads, len(self.reads)
        if number == len(known) or known[number].place != self.place():
            raise Mismatch(self.position, f"a value is read at {self.place()}, which was not read before")
        self.reads.append(known[number])
        return known[number].value

    def record(self, call: Call) -> None:
        """Hold the operation against the first trace and give its outputs the ids that they had there."""
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
        if len(call.outputs) != len(step.outputs):
            raise Mismatch(blamed, f"{call.name} gave {len(call.outputs)} parts, expected {len(step.outputs)}")
        for output, (shape, maps) in zip(call.outputs, step.outputs, strict=True):
            self._compare(call, output, shape, maps, blamed)
        self._doubtful = None

    def _note_step(self, call: Call, *, matched: bool) -> None:
        """Number the outputs as in the first trace; they are not known where torch took another way to the same."""
        if call.name == "aten::index_select" and self.module in self._selected:
            set_origin(call.outputs[0], origin_of(call.inputs[0]))
        else:
            self.note_origins(call, (self._position - 1,) if matched else None)

    def _compare_sources(self, step: Step, call: Call, origins: Sequence[Origin], blamed: int) -> None:
        """Compare which results the operation gets, the constants among them and, if it has no channels, its sizes."""
        if not self._same_numbers or len(origins) != len(step.origins):
            return
        if _differ(origins, step.origins):
            raise Mismatch(blamed, f"{call.name} gets the result of another operation", number=True)
        if _differ(constants_of(call), step.constants):
            raise Mismatch(blamed, f"{call.name} gets other constants", number=True)
        if not step.has_channels:
            self._compare_numbers(replace(step, numbers=step.sizes), sizes_of(call), blamed)

    def _matching_movement(self, call: Call) -> Step | None:
        """The step that an operation which only moves data repeats, if there is one with its shape."""
        steps = self._first.steps
        for number in range(self._position, len(steps)):
            step = steps[number]
            if step.name not in MAY_DIFFER:
                break
            if step.name == kind_of(call) and self._fits(step, call):
                self._position = number + 1
                return step
            if step.name == kind_of(call) and self._doubtful is None:
                self._doubtful = number
        return None

    def _left(self, maps: tuple[Map, ...]) -> list[Map] | None:
        """The remaining maps of one tensor, cached: most tensors are an output of one step and an input of others."""
        if id(maps) not in self._restricted:  # the first trace holds them, so that no other object gets their id
            self._restricted[id(maps)] = restrict_all(maps, self._alive)
        return self._restricted[id(maps)]

    def _note_written(self, outputs: Sequence[Tensor]) -> None:
        """Do nothing: the first trace knows which entries are zero."""

    def _fits(self, step: Step, call: Call) -> bool:
        shapes = [shape_left(shape, maps, self._left(maps)) for shape, maps in step.outputs]
        return shapes == [tuple(output.shape) for output in call.outputs]

    def _matching(self, call: Call) -> Step | None:
        """The step that an operation repeats; None for one that torch adds or leaves out where strides differ."""
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
        """Where the first trace goes on after a linear layer that it computed another way; None if it did not.

        ``addmm(bias, x, weight)`` may become ``mm(x, weight)`` and ``add(product, bias)``, or the reverse, and ``mm``
        may become ``bmm``; the tensors are the same ones.
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
        """The number of the next step that must be repeated."""
        steps, number = self._first.steps, self._position
        while number < len(steps) and steps[number].name in MAY_DIFFER:
            number += 1
        return number

    def _compare_numbers(self, step: Step, numbers: Numbers, blamed: int) -> None:
        """Arguments that are no sizes must be as before: a kernel, a padding or a factor that follows a width."""
        if self._same_numbers and step.numbers != numbers:
            pairs = zip(step.numbers, numbers, strict=False)
            changed = next(((name, old, new) for (name, old), (_, new) in pairs if old != new), ("count", "", ""))
            why = f"{changed[0]} of {step.name} was {changed[1]} and became {changed[2]}"
            raise Mismatch(blamed, why[:200], number=True)

    def _compare_taken(self, step: Step, call: Call, blamed: int) -> None:
        """A channel that was taken by its number must be the same one, unless it is the only one left."""
        if len(call.taken) != len(step.taken):
            return
        found, wanted = np.array([call.taken, step.taken], np.int32)
        known = found < self._known
        if (self._classes[found[known]] != self._classes[wanted[known]]).any():
            raise Mismatch(blamed, f"{call.name} takes another channel", others=True)

    def _compare_inputs(self, step: Step, call: Call, blamed: int) -> None:
        """Movements are matched loosely, so that what they moved is looked at where it is used."""
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
                return  # statistics that nobody follows
            raise Mismatch(blamed, f"{call.name} gave {tuple(output.shape)}, expected {expected}")
        left = left or []
        found = [m for m in map(compress, (*label_of(output).maps, *_passed_on(call, output.ndim))) if support(m)]
        for index_map in (m for m in map(compress, left) if support(m)):
            known = [other for other in found if other.shape == index_map.shape]
            if self._lenient and not known:
                continue
            if not any(self._same(index_map, other) for other in known):
                raise Mismatch(blamed, f"{call.name} puts the channels in another order", others=True)
        label = label_of(output)
        # No facts are collected here: the flags only tell weights from buffers.
        set_label(output, replace(label, maps=tuple(left), zeros=(any(label.zeros),) * len(left)))

    def _same(self, wanted: Map, found: Map) -> bool:
        """Whether the ids are those predicted; what is down to one channel carries none (0), and could not be moved."""
        known, fresh = (found > 0) & (found < self._known), found >= self._known
        if (self._classes[found[known]] != self._classes[wanted[known]]).any():
            return False
        if not fresh.any():
            return True
        pairs = np.stack([found[fresh], self._classes[wanted[fresh]]])
        return len(np.unique(pairs, axis=1).T) == len(np.unique(pairs[0]))


def _differ(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Whether tensors come from somewhere else, or have other values, as far as that is known of both."""
    return len(found) != len(known) or any(
        one != other for one, other in zip(found, known, strict=True) if None not in (one, other)
    )


def _passed_on(call: Call, rank: int) -> Iterator[Map]:
    """The maps of what an operation combines element by element: each holds for the result as well.

    With one head left, a weight that all heads share has the shape of what it scales, so that the result carries the
    weight's ids; a table without channels leaves it none.
    """
    if is_pointwise(call.operation):
        for tensor in call.inputs:
            yield from (aligned(m, rank) for m in call.maps(tensor) if m.ndim <= rank)


def _selected(index_map: Map, channels: Indices) -> Map:
    return np.take(index_map, channels, axis=1) if index_map.shape[1] > 1 else index_map


class Differs(Exception):  # noqa: N818 - it is caught at once
    """A forward pass does something else than another one."""


NOISE = ("aten::empty_like", "aten::empty", "aten::new_empty")
NOT_IN_TRAINING = ("training", "momentum")  # arguments of a BatchNorm that differ between the modes


class Echo(Tracer):  # type: ignore[no-untyped-call]  # torch's own
    """A forward pass of the same model that is expected to do what another one did, but for dropout.

    No rule is applied: an operation with the same arguments, on the same inputs, makes the same. Dropout and stochastic
    depth multiply by a mask of random zeros, made by `empty`, `bernoulli` and `div`, and pass on what they multiply.
    The steps are written down, those of dropout with them, so that cut copies can be made to repeat this pass, too;
    the facts are those about the masks.

    Raises:
        Differs: It does something else.
    """

    def __init__(self, model: nn.Module, first: Recorded, answers: Answers) -> None:
        super().__init__(model, first.groups, answers)
        self._first, self._position = first, 0
        self._noise: dict[int, Tensor] = {}
        self._there: dict[int, Origin] = {}  # by the number of a step here, what the other pass has in its place
        self.label_tensors(first.tensors)

    def answer(self, tensors: Sequence[Tensor], *, boolean: bool, read: Callable[[Sequence[Tensor]], Any]) -> Any:
        """Answer as in the other pass, if that was asked there."""
        facts, self.facts = self.facts, Facts()  # those of the read are known from the other pass
        value = super().answer(tensors, boolean=boolean, read=read)
        self.facts = facts
        known, number = self._first.reads, len(self.reads) - 1
        if number >= len(known) or known[number].place != self.reads[-1].place:
            raise Differs(f"a value is read at {self.reads[-1].place}")
        return value

    def record_numbers(self, numbers: tuple[float, ...]) -> None:
        """Compare the numbers that a tensor is made of."""
        step = self._next()
        if step is None or (step.name, step.numbers) != (CREATED, (("data", numbers),)):
            raise Differs("a tensor is made of other numbers")
        self._repeat(step)

    def _next(self) -> Step | None:
        return self._first.steps[self._position] if self._position < len(self._first.steps) else None

    def _repeat(self, step: Step) -> None:
        self._there[len(self.steps)] = (self._position,)
        self.steps.append(step)
        self._position += 1

    def _apply_rule(self, call: Call) -> None:
        """Labels come from the other pass; see `record`."""

    def _note_written(self, outputs: Sequence[Tensor]) -> None:
        """So do their flags."""

    def record(self, call: Call) -> None:
        """Compare an operation with the next one of the other pass, and give its outputs the labels of that."""
        if self._is_dropout(call) or self._counts_batches(call):
            return
        step, kind = self._next(), kind_of(call)
        if step is None or step.name != kind or not self._same_numbers(kind, step.numbers, numbers_of(call)):
            raise Differs(f"{step.name if step else 'the end'} became {kind}")
        if sizes_of(call) != step.sizes or _differ(constants_of(call), step.constants):
            raise Differs(f"{call.name} has other sizes or constants")
        shapes, expected = call.input_shapes(), step.inputs[: len(call.inputs)]
        written = set(map(id, call.outputs))  # in place: the other pass wrote down the label that it has afterwards
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
        self.note_origins(call, (len(self.steps),))
        self._repeat(replace(step, numbers=numbers_of(call), origins=origins))

    def _in_the_other(self, origin: Origin) -> Origin:
        """Where a tensor of this pass comes from, in the numbers of the other one."""
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
        """Write down an operation that the other pass does not have, and what that has in the place of its result."""
        step = self.step_of(call)
        self._there[len(self.steps)] = there
        self.note_origins(call, (len(self.steps),))
        self.steps.append(step)

    def _is_dropout(self, call: Call) -> bool:
        """Whether an operation makes or applies a mask of dropout; what it is applied to is passed on."""
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
        super()._apply_rule(call)  # the mask goes with what it is multiplied with
        set_label(call.outputs[0], label)
        self._add(call, self._in_the_other(origin_of(call.inputs[0])))
        return True

    def _makes_noise(self, call: Call) -> bool:
        super()._apply_rule(call)  # the mask has the channels of what it is made like
        self._noise[id(call.outputs[0])] = call.outputs[0]
        self._add(call, None)
        return True

    def finish(self, output: Any) -> None:
        """Compare the end: nothing is left to do, and the same tensors are returned."""
        if self._position < len(self._first.steps) or len(self.reads) < len(self._first.reads):
            raise Differs("ends early")
        if tuple(self._in_the_other(origin_of(tensor)) for tensor in tensors_in(output)) != self._first.returned:
            raise Differs("returns something else")


@dataclass(frozen=True, eq=False)
class Run:
    """A forward pass that a trace knows.

    Attributes:
        example: The arguments of forward.
        training: In train mode.
        answers: The truth values that Python is told instead of the true ones.
    """

    example: Example
    training: bool = False
    answers: Answers = field(default_factory=Answers)

    def __str__(self) -> str:
        """When the model's forward is called like this."""
        mode = "in train mode" if self.training else "in eval mode"
        other = f", on the other side of the branch at {', '.join(self.answers.places)}" if self.answers else ""
        return f"{mode}{other}"


@dataclass(frozen=True, eq=False)
class Replays:
    """The forward passes that every cut copy must repeat.

    Attributes:
        runs: Each with the trace of the uncut copy.
        echoes: Passes in train mode that do what one of the runs does, but for dropout. A cut copy repeats them, too.
        device: Where cut copies run: the meta device, or None for where the model is, if sizes depend on values.
        fitting: The shapes of all tensors with which the model was found to repeat every pass.
    """

    runs: tuple[tuple[Run, Recorded], ...]
    echoes: tuple[tuple[Run, Recorded], ...] = ()
    device: torch.device | None = META
    fitting: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Replays":
        return self  # a record of the past

    @cached_property
    def steps(self) -> list[Step]:
        """The operations of all passes, one after the other."""
        return [step for _, recorded in (*self.runs, *self.echoes) for step in recorded.steps]

    def mismatch(
        self, workshop: Workshop, graph: Graph, edits: Edits, *, lenient: bool = False, modes: Modes = "all"
    ) -> Mismatch | None:
        """Where a copy cut by edits leaves the way of the uncut one; None if it never does.

        Args:
            workshop: Makes the copy.
            graph: The graph of the model.
            edits: The cut.
            lenient: Accept a missing map; see `Replay`.
            modes: Which passes it has to repeat: "all", without the "echoes" as long as they are not needed ("runs"),
                or each echo in the place of the run that it echoes ("trained").
        """
        passes = (*self.runs, *(self.echoes if modes == "all" else ()))
        if modes == "trained":
            passes = tuple((*self._echo_of(run), (run, recorded))[0] for run, recorded in self.runs)
        for run, recorded in passes:
            found = _followed(workshop, run, recorded, graph, edits, lenient=lenient)
            if found is not None:
                found.run = run
                found.step += self._offset(recorded) if found.step >= 0 else 0
                return found
        return None

    def _echo_of(self, run: Run) -> list[tuple[Run, Recorded]]:
        same = (it for it in self.echoes if it[0].example is run.example and it[0].answers == run.answers)
        return [] if run.training else list(same)

    def _offset(self, wanted: Recorded) -> int:
        """The place of a pass in `steps`."""
        offset = 0
        for _, recorded in (*self.runs, *self.echoes):
            if recorded is wanted:
                break
            offset += len(recorded.steps)
        return offset


def _selecting(model: nn.Module, edits: Edits) -> Iterator[Selection]:
    """The BatchNorms that read a selection already, and go on with it."""
    changed = {selection.module for selection in edits.selections}
    for path, module in model.named_modules():
        channels = getattr(module, SELECTED, None)
        if channels is not None and path not in changed:
            yield Selection(path, channels.numpy(force=True))


def _followed(
    workshop: Workshop, run: Run, first: Recorded, graph: Graph, edits: Edits, *, lenient: bool
) -> Mismatch | None:
    alive = graph.alive_after(edits.units)
    try:
        twin = workshop.copy(edits, training=run.training)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a module of the user's that does not let its numbers be set
        return Mismatch(-1, f"{type(error).__name__}: {error}")
    exact = not graph.units.lossy[edits.units].any()
    classes, selections = graph.solution.classes, (*edits.selections, *_selecting(workshop.model, edits))
    replay = Replay(twin, first, classes, alive, selections, same_numbers=exact, lenient=lenient)
    try:
        with workshop.running(run.example) as example:
            replay.finish(replay.follow(example.arguments, example.by_name))
    except Mismatch as mismatch:
        return mismatch
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's forward raises, a size that it cannot have made it do so
        return Mismatch(replay.position, f"{type(error).__name__}: {error}", raised=True)
    return None
