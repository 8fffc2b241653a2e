"""Tracing a cut copy again: every operation must give what the maps predict, element by element.

Shapes alone would not tell a shuffled order from the right one. The copy's weights carry the ids that survived, so that
each operation's result can be held against the first trace with the removed ids taken out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from keepk.graph.call import Call, is_pointwise
from keepk.graph.created import CREATED
from keepk.graph.edits import Indices, Selection
from keepk.graph.facts import Facts
from keepk.graph.label import label_of, set_label
from keepk.graph.maps import Flags, Map, aligned, compress, predict, restrict_all, support
from keepk.graph.tracer import Step, Tracer, numbers_of
from keepk.graph.union import Classes

# Whether a reshape copies depends on sizes, so these come and go between two runs.
MOVES = "clone _unsafe_view view alias expand slice contiguous _to_copy detach squeeze unsqueeze lift_fresh"
MAY_DIFFER = {f"aten::{name}" for name in MOVES.split()}
# A linear layer is one operation or two (a product and a sum), and its product has a batch or not, depending on the
# strides of its input.
ADDMM, ADD = "aten::addmm", "aten::add"
PRODUCTS = ("aten::mm", "aten::bmm")


class Mismatch(Exception):  # noqa: N818 - it is caught at once and tells where
    """The cut copy did something else than predicted."""

    def __init__(
        self, step: int, why: str, *, number: bool = False, others: bool = False, raised: bool = False
    ) -> None:
        super().__init__(why)
        self.step, self.why = step, why
        self.number, self.others = number, others  # a value is another one; the size is right, the channels are not
        self.raised = raised  # by torch or the user's forward, before there was anything to compare


class Replay(Tracer):  # type: ignore[no-untyped-call]  # torch's own
    """A trace of a cut copy, compared with the first trace as it goes."""

    def __init__(
        self,
        model: nn.Module,
        first: Tracer,
        classes: Classes,
        alive: Flags,
        selections: Sequence[Selection],
        *,
        same_numbers: bool,
    ) -> None:
        super().__init__(model, first.groups)
        self._first, self._classes, self._alive, self._same_numbers = first, classes, alive, same_numbers
        self._selected = {selection.module: selection.channels for selection in selections}
        self.atoms = first.atoms.branch()
        self.facts = Facts()
        self._known = first.atoms.count
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

    def finish(self) -> None:
        """Refuse a copy that did less than the first trace."""
        if any(step.name not in MAY_DIFFER for step in self._first.steps[self._position :]):
            raise Mismatch(self.position, "ends early")

    def _apply_rule(self, call: Call) -> None:
        if call.name == "aten::index_select" and self.module in self._selected and call["dim"] == 1:
            maps = [_selected(m, self._selected[self.module]) for m in call.maps(call.inputs[0])]
            call.leave(maps)
        else:
            super()._apply_rule(call)

    def record_numbers(self, numbers: tuple[float, ...]) -> None:
        """Hold the numbers that a tensor is made of against the first trace."""
        steps, number = self._first.steps, self._next()
        if number == len(steps) or steps[number].name != CREATED:
            raise Mismatch(self.position, f"a tensor is made of {numbers}, which was not so before")
        self._position = number + 1
        self._compare_numbers(steps[number], numbers, number)

    def record(self, call: Call) -> None:
        """Hold the operation against the first trace and give its outputs the ids that they had there."""
        step = self._matching_movement(call) if call.name in MAY_DIFFER else self._matching(call)
        if step is None:
            return
        blamed = self._position - 1 if self._doubtful is None else self._doubtful
        self._compare_taken(step, call, blamed)
        self._compare_numbers(step, numbers_of(call), blamed)
        if call.name not in MAY_DIFFER and self.module not in self._selected:
            self._compare_inputs(step, call, blamed)
        if len(call.outputs) != len(step.outputs):
            raise Mismatch(blamed, f"{call.name} gave {len(call.outputs)} parts, expected {len(step.outputs)}")
        for output, (shape, maps) in zip(call.outputs, step.outputs, strict=True):
            self._compare(call, output, shape, maps, blamed)
        self._doubtful = None

    def _matching_movement(self, call: Call) -> Step | None:
        """The step that an operation which only moves data repeats, if there is one with its shape."""
        steps = self._first.steps
        for number in range(self._position, len(steps)):
            step = steps[number]
            if step.name not in MAY_DIFFER:
                break
            if step.name == call.name and self._fits(step, call):
                self._position = number + 1
                return step
            if step.name == call.name and self._doubtful is None:
                self._doubtful = number
        return None

    def _fits(self, step: Step, call: Call) -> bool:
        shapes = [predict(shape, maps, self._alive) for shape, maps in step.outputs]
        return shapes == [tuple(output.shape) for output in call.outputs]

    def _matching(self, call: Call) -> Step | None:
        """The step that an operation repeats; None for one that torch adds or leaves out where strides differ."""
        steps, number = self._first.steps, self._next()
        there = steps[number].name if number < len(steps) else "the end"
        if there == call.name:
            self._position = number + 1
            return steps[number]
        if call.name == "aten::index_select" and self.module in self._selected:
            return None
        if there == ADDMM and call.name in (*PRODUCTS, ADD):
            self._position = number + 1 if call.name == ADD else self._position
            return None
        if there in (*PRODUCTS, ADD) and call.name == ADDMM:
            self._position = next((n + 1 for n in range(number, len(steps)) if steps[n].name == ADD), number + 1)
            return None
        if there in PRODUCTS and call.name in PRODUCTS:
            self._position = number + 1
            return None
        raise Mismatch(self.position, f"{there} became {call.name}")

    def _next(self) -> int:
        """The number of the next step that must be repeated."""
        steps, number = self._first.steps, self._position
        while number < len(steps) and steps[number].name in MAY_DIFFER:
            number += 1
        return number

    def _compare_numbers(self, step: Step, numbers: tuple[float, ...], blamed: int) -> None:
        if self._same_numbers and step.numbers != numbers:
            raise Mismatch(blamed, f"a number {step.numbers} became {numbers}", number=True)

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
            expected = predict(shape, maps, self._alive) if maps else None
            if expected is not None and expected != found:
                raise Mismatch(blamed, f"{call.name} got {found}, expected {expected}")

    def _compare(self, call: Call, output: Tensor, shape: tuple[int, ...], maps: Sequence[Map], blamed: int) -> None:
        expected = predict(shape, maps, self._alive)
        if expected != tuple(output.shape):
            if not maps and output is not call.outputs[0]:
                return  # statistics that nobody follows
            raise Mismatch(blamed, f"{call.name} gave {tuple(output.shape)}, expected {expected}")
        left = restrict_all(maps, self._alive) or []
        found = [m for m in map(compress, (*label_of(output).maps, *_passed_on(call, output.ndim))) if support(m)]
        for index_map in (m for m in map(compress, left) if support(m)):
            if not any(self._same(index_map, other) for other in found):
                raise Mismatch(blamed, f"{call.name} puts the channels in another order", others=True)
        set_label(output, replace(label_of(output), maps=tuple(left)))

    def _same(self, wanted: Map, found: Map) -> bool:
        """Whether the ids are those predicted; what is down to one channel carries none (0), and could not be moved."""
        if wanted.shape != found.shape:
            return False
        known, fresh = (found > 0) & (found < self._known), found >= self._known
        if (self._classes[found[known]] != self._classes[wanted[known]]).any():
            return False
        if not fresh.any():
            return True
        pairs = np.stack([found[fresh], self._classes[wanted[fresh]]])
        return len(np.unique(pairs, axis=1).T) == len(np.unique(pairs[0]))


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
