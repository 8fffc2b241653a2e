"""`keepk.trace`: find the channels of any model by watching its forward passes.

A channel is rarely one slice of one tensor. Output channel 3 of a convolution is also entry 3 of the BatchNorm that
follows it, and input channel 3 of the next convolution: all of these slices have to be removed together. The trace
finds such sets without knowing any layer class, from the operations that run:

1. **Copy.** `copies.Workshop` copies the model to the meta device, where tensors have shapes and no values.
2. **Watch.** `_Watched` runs forward on the copies. A `tracer.Tracer` gives an id (an *atom*) to every index of every
   axis of every parameter, moves the ids through each operation, and collects facts such as "atoms 3 and 17 are
   removed together". Each example is run in eval mode, in train mode, and once for each branch that depends on a value
   (`values.Outcomes`). All passes share one set of atoms, so their facts add up.
3. **Solve.** `solve.solve` merges atoms into classes. A class that contains a slice of a parameter, and that no fact
   pins, is a *unit*.
4. **Probe.** `probe.settle` removes some units from a copy and traces the copy again (`replay.Replays`). If the copy
   does anything that the atoms do not predict, a repair changes the assumptions and the loop starts over.
5. **Result.** The `graph.Graph` that survives this lists the units and knows how to remove them.

For two linear layers, a unit is a hidden neuron: a row of the first weight, an entry of the first bias and a column of
the second weight. The inputs and outputs of the model are fixed:

>>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
>>> graph = trace(net, torch.zeros(2, 8))
>>> graph.slices(4)
[('0.weight', 0, 4), ('0.bias', 0, 4), ('2.weight', 1, 4)]
>>> for fixed in graph.fixed:
...     print(f"{fixed.tensor} axis {fixed.axis}: {fixed.reason.why}")
0.weight axis 1: is multiplied with an axis that has no channels
2.weight axis 0: is an output of the model
2.bias axis 0: is an output of the model
"""

import inspect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from keepk.errors import ShrinkError, TraceError
from keepk.graph.choose import choose_half, choose_unevenly
from keepk.graph.graph import Graph
from keepk.graph.ids.atoms import tensors_kept_by
from keepk.graph.ids.facts import Bound, Facts, Reason
from keepk.graph.ids.maps import support
from keepk.graph.probe.probe import Bench, NotRepeatable, settle
from keepk.graph.probe.replay import Differs, Echo, Replays, Run
from keepk.graph.rules.call import Call
from keepk.graph.solve.solve import solve
from keepk.graph.tracer import Recorded, Step, Tracer, UnseenOperation, output_maps
from keepk.graph.units import Wiring
from keepk.graph.values import Asked, Outcomes, ValueRead, asked_in, fails_with_values_too, is_raised_by_program
from keepk.model.copies import META, Workshop
from keepk.model.edits import Indices
from keepk.model.example import (
    Example,
    TraceInputs,
    TrainMode,
    ValueBranches,
    likely_slip,
    not_a_model,
    refuse_scripted,
)
from keepk.model.layer_sizes import sized_attributes
from keepk.model.layers import HeadwiseAttention
from keepk.model.names import adapters_of, named_tensors, unwrap

# A forward that fills a cache in its first pass runs other operations in the second, and repeats those from then on.
ATTEMPTS = 3
# The most passes with flipped truth values for each example and mode, which bounds the time of a trace. A model with
# more places that branch on values is refused, or its other branches are reported as unknown.
BRANCHES = 24
PAIRS = 16  # the number of these passes after which no more pairs of truth values are flipped


class TrainForwardError(TraceError):
    """Raised when forward fails in train mode, so that code that runs only in training cannot be traced."""


def trace(
    model: nn.Module,
    example: Any = None,
    *,
    examples: Sequence[Any] | None = None,
    training_example: Any = None,
    train_mode: TrainMode = "check",
    value_branches: ValueBranches = "check",
) -> Graph:
    """Find the channels of a model: which slices of its tensors are removed together, and which are fixed and why.

    The model itself is not changed: forward passes run in eval and in train mode on copies without weights. If the
    model's Python code reads values that depend on the weights, the copies get weights. Where the code branches on a
    truth value (``if mask.any()``), both branches are run.

    Args:
        model: Any module whose forward works on the example.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments, with a batch size of at
            least 2, so that the batch dimension can be told apart from dimensions of size 1.
        examples: Several examples, for a forward that takes different paths. Parameters that no path uses keep their
            size.
        training_example: The input of forward in train mode, if it differs (a detector's targets).
        train_mode: "check" refuses a forward that fails in train mode on the example. "accept" traces train mode up to
            the failure; code after it may fail or compute something else once channels are removed, and parameters
            that only this code uses keep their size.
        value_branches: "check" refuses a forward that reads numbers from tensors, or that branches on values and fails
            on the branch that no example takes. "accept" traces the paths of the examples; the others stay unknown and
            are listed in `Graph.unknown`.

    Returns:
        The graph of the model's units.

    Raises:
        TraceError: forward fails on an example, or the examples do not determine its behaviour.

    Examples:
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> graph = trace(net, torch.zeros(2, 8))
        >>> [(space.name, len(space.units)) for space in graph.groups]
        [('0', 6)]
        >>> graph.slices(0)
        [('0.weight', 0, 0), ('0.bias', 0, 0), ('2.weight', 1, 0)]
    """
    inputs = TraceInputs.of(example, examples, training_example, train_mode, value_branches)
    return trace_inputs(model, inputs)


def trace_inputs(model: nn.Module, inputs: TraceInputs) -> Graph:
    """`trace` with arguments that have been checked already."""
    _refuse_strange(model, inputs)
    with torch.inference_mode(False):  # inference tensors lack `_version` and `_base`, which are read here
        try:
            return _traced(unwrap(model), inputs, META)
        except _NotOnMeta:
            return _traced(unwrap(model), inputs, None)


class _NotOnMeta(Exception):  # noqa: N818 - a signal: trace again on copies with weights
    """Raised when the forward pass does not work on the meta device, without values."""


def _traced(model: nn.Module, inputs: TraceInputs, device: torch.device | None) -> Graph:
    workshop = Workshop(model, inputs.examples[0], device)
    for attempt in range(ATTEMPTS):
        watched = _Watched(workshop, inputs).all_runs()
        try:
            return _settled(model, workshop, watched)
        except NotRepeatable as error:
            # The model keeps state between forward passes, such as a dict of tables, which is filled by now.
            if attempt + 1 == ATTEMPTS:
                raise TraceError(
                    f"model {type(model).__name__}: its forward is not repeatable: on the same example it runs "
                    f"different operations each time ({error}). Remove counters and random choices, or trace the "
                    f"model in a state in which they no longer change."
                ) from error
    raise AssertionError("unreachable")


def _settled(model: nn.Module, workshop: Workshop, watched: "_Watched") -> Graph:
    """Solve the facts of all passes and probe the result until every pass repeats on cut copies."""
    wiring, atoms = _wiring(model, watched), watched.tracers[0].atoms.count
    light = _for_replays(workshop, watched.replays, wiring, watched)
    while True:
        replays = Replays(tuple(watched.runs), tuple(watched.echoes))
        graph = settle(Bench(light, replays, watched.facts, atoms, wiring))
        if watched.is_repeated_by_others(light, graph):
            graph.replays = replace(watched.replays, device=light.device)
            graph.unknown = tuple(dict.fromkeys(watched.unknown))
            return graph


def _for_replays(workshop: Workshop, replays: Replays, wiring: Wiring, watched: "_Watched") -> Workshop:
    """A workshop without weights for the cut copies, even if the first trace needed weights.

    A replay repeats the values that Python read in the first trace, so most models need no weights any more. A forward
    in which sizes depend on values (``x[mask]``) still does; for such a model, `workshop` itself is returned.
    """
    if workshop.device is not None:
        return workshop
    light = replace(workshop, device=META)
    uncut = Graph(wiring, solve(watched.facts, watched.tracers[0].atoms.count))
    return light if replays.mismatch(light, uncut, uncut.edits([])) is None else workshop


@dataclass(eq=False)
class _Watched:
    """The forward passes of a model, traced over one set of atoms.

    Attributes:
        runs: Passes that cut copies are probed on.
        echoes: Passes in train mode that repeat a run except for dropout and BatchNorm statistics; most models have
            nothing else in train mode. They are replayed less often than runs.
        spare: Passes with flipped truth values in which no new operation ran; they are checked once, at the end.
        facts: The facts of all passes.
        unknown: Messages about behaviour that the trace has not seen and the user accepted.
    """

    workshop: Workshop
    inputs: TraceInputs
    groups: dict[str, int] = field(default_factory=dict)

    def all_runs(self) -> "_Watched":
        """Trace every pass; start over when a pass finds new grouped convolutions."""
        # The atoms of a grouped weight depend on its number of groups, which only its operation shows.
        while True:
            known = len(self.groups)
            self.runs, self.tracers, self.facts = list[tuple[Run, Recorded]](), list[Tracer](), Facts()
            self.echoes = list[tuple[Run, Recorded]]()
            self._touched, self.spare = set[str](), list[tuple[Run, Recorded]]()
            self._echoed, self._seen = set[int](), set[tuple[bool, Asked, bool]]()
            self._rewritten = set[str]()
            self.unknown, self._trains = list[str](), True
            for example in self.inputs.examples:
                self._watch(Run(example))
            self._watch_training()
            self._watch_other_branches()
            if len(self.groups) == known:
                break
        self._pin_unused("is never used in forward")
        self._refuse_numbers_read()
        return self

    def _watch_training(self) -> None:
        for example in self.inputs.training or self.inputs.examples:
            run = Run(example, training=True, gradients=True)
            same = [(known, recorded) for known, recorded in self.runs if known.example is example]
            if any(self._echo(run, recorded) is not None for _, recorded in same):
                self._echoed.update(id(known) for known, _ in same)
                continue
            try:
                self._watch_with_or_without_gradients(run)
            except TrainForwardError as error:
                self._not_known(error, accepted=self.inputs.train_mode == "accept")
                self._trains = False
                # The facts up to the failure still count: they fix the inputs of layers that keep their size.
                tracer, cause = self._latest, error.__cause__
                self.facts.extend(tracer.facts)
                why = f"is used in training at most, where forward fails: {type(cause).__name__}: {cause}"[:200]
                self._pin_unused(why)

    def _watch_with_or_without_gradients(self, run: Run) -> None:
        """Trace train mode as it runs in training, or without gradients if forward works only then."""
        try:
            self._watch(run)
        except (TrainForwardError, _NotOnMeta):
            self._watch(replace(run, gradients=False))

    def _not_known(self, error: TraceError, *, accepted: bool = False) -> None:
        """Record behaviour that the trace cannot see; raise the error unless the user accepts it."""
        self.unknown.append(str(error))
        if not accepted and not self.inputs.reports:
            raise error

    def _watch(self, run: Run) -> None:
        self._keep(run, self._traced(run))

    def _keep(self, run: Run, recorded: Recorded) -> None:
        self.runs.append((run, recorded))

    def _traced(self, run: Run) -> Recorded:
        """Trace a pass and add its facts to those of the other passes."""
        self._latest = tracer = self._new_tracer(run)
        try:
            with self.workshop.running(run.example, gradients=run.gradients) as example:
                output = self._followed(tracer, example)
        except UnseenOperation as error:
            raise TraceError(
                f"model {type(self.workshop.model).__name__}: {error}, because its forward computes in another thread, "
                f"or with torch's dispatch modes turned off. Run all of forward in one thread."
            ) from error
        except Exception as error:
            if self.workshop.device is not None and not (run.answers and fails_with_values_too(error)):
                raise _NotOnMeta from error
            raise self._failed(run, error) from error
        place = _place_of_forward(self.workshop.model)
        for index_map in output_maps(_cache_in(output)):
            why = "is kept in past_key_values, the cache that forward returns; trace the model with use_cache=False"
            tracer.facts.add_pin(index_map, Reason(why, place=place))
        for index_map in output_maps(output):
            tracer.facts.add_pin(index_map, Reason("is an output of the model", place=place))
        tracer.forget_unused()
        self.tracers.append(tracer)
        self._touched |= tracer.touched
        self.facts.extend(tracer.facts)
        self._note_outcomes(run, tracer.reads)
        return tracer.recorded(output)

    def _followed(self, tracer: Tracer, example: Example) -> Any:
        """Run forward, and note which buffers it writes: a number read from one of them may change."""
        before = {name: (buffer, buffer._version) for name, buffer in tracer.model.named_buffers()}
        output = tracer.follow(example.arguments, example.by_name)
        for name, buffer in tracer.model.named_buffers():
            if name in before and (buffer is not before[name][0] or buffer._version != before[name][1]):
                self._rewritten.add(name)
        return output

    def _note_outcomes(self, run: Run, reads: Sequence[ValueRead]) -> None:
        self._seen |= {(run.training, asked, bool(reads[number].value)) for number, asked in asked_in(reads).items()}

    def _new_tracer(self, run: Run) -> Tracer:
        tracer = Tracer(self.workshop.copy(training=run.training), self.groups, run.answers)
        if self.tracers:
            # Parameters keep their ids in every pass, so that facts can be merged; only constants get new ones.
            tracer.atoms = self.tracers[0].atoms
            tracer.label_tensors(self.tracers[0].tensors)
        else:
            tracer.label_tensors()
            self._weights_end = tracer.atoms.count
            _bind_recurrent(tracer)
        return tracer

    def _echo(self, run: Run, recorded: Recorded, kind: type[Echo] = Echo) -> Echo | None:
        """The echo of a known pass, if this pass repeats it, dropout and BatchNorm flags aside; else None.

        An echo applies no rules, so it costs less than a trace.
        """
        echo = kind(self.workshop.copy(training=run.training), recorded, run.answers)
        echo.atoms = self.tracers[0].atoms
        try:
            with self.workshop.running(run.example, gradients=run.gradients) as example:
                output = self._followed(echo, example)
            echo.finish(output)
        except Exception:  # it differs or fails; the full trace that follows shows which
            return None
        self._note_outcomes(run, echo.reads)
        if kind is Echo:
            self.echoes.append((run, echo.recorded(output)))
        self.facts.extend(echo.facts)
        return echo

    def _watch_other_branches(self) -> None:
        """Run forward again with flipped truth values wherever Python read one; see `values.Outcomes`."""
        self._failing = list[tuple[Run, BaseException | None]]()
        for run, recorded in list(self.runs):
            outcomes = Outcomes(recorded.reads, BRANCHES, PAIRS)
            if outcomes.too_many:
                place = next(read.place for read in recorded.reads if read.boolean)
                error = self._refused(place, f"forward branches on values in more than {BRANCHES - 1} places", "")
                self._not_known(error, accepted=self._accepts_branches)
            known = dict[tuple[Any, ...], Recorded]()  # by the outcomes that were forced, for comparisons below
            for answers in outcomes:
                other, similar = replace(run, answers=answers), known.get(answers.goals[:-1], recorded)
                found = self._watch_branch(other, [recorded] if similar is recorded else [similar, recorded])
                if found is not None:
                    known[answers.goals] = found
                    outcomes.learn(answers, found.reads)
                if id(run) in self._echoed:
                    self._watch_branch_in_training(replace(other, training=True, gradients=True), found)
        self._refuse_failing()

    def _watch_branch(self, run: Run, similar: Sequence[Recorded]) -> Recorded | None:
        """Trace a pass with flipped answers, unless it repeats a similar pass; None if it fails."""
        for recorded in similar:
            if (echo := self._echo(run, recorded, _StrictEcho)) is not None:
                found = replace(recorded, reads=[*echo.reads], forgotten=echo.forgotten)
                self.spare.append((run, found))
                return found
        try:
            found = self._traced(run)
        except TraceError as error:
            # A branch that ends in a `raise` of the model's own code validates the input and computes nothing.
            cause = error.__cause__
            if not (isinstance(cause, Exception) and is_raised_by_program(cause)):
                self._failing.append((run, cause))
            return None
        # Replaying a pass costs time in every probe. One whose operations all ran elsewhere is kept for the last check.
        known = {_what(step) for _, recorded in self.runs for step in recorded.steps}
        if known.issuperset(map(_what, found.steps)):
            self.spare.append((run, found))
        else:
            self._keep(run, found)
        return found

    def _watch_branch_in_training(self, run: Run, in_eval: Recorded | None) -> None:
        """Run the same answers in train mode, for a model whose train mode echoes its eval mode so far."""
        if in_eval is None or self._echo(run, in_eval) is None:
            self._watch_branch(run, [])

    def _refuse_failing(self) -> None:
        """Refuse outcomes on which forward fails, unless another pass had them and completed.

        Truth values may depend on each other: with ``if n > 4`` and ``if n > 2``, flipping only the second answer gives
        a combination that no input produces.
        """
        for run, cause in self._failing:
            asked, outcome = run.answers.goals[-1]
            # A forward that fails when a mask selects nothing does not accept such inputs, whether it is cut or not.
            may_fail = any(goal.may_fail for goal, _ in run.answers.goals)
            if not may_fail and (run.training, asked, outcome) not in self._seen:
                what = f"forward branches on a value, and fails on the side that the example does not take ({cause})"
                self._not_known(self._refused(asked.place, what[:300], ""), accepted=self._accepts_branches)

    @property
    def replays(self) -> Replays:
        """All passes that a cut model must repeat before the cut is applied."""
        return Replays((*self.runs, *self.spare), tuple(self.echoes), inputs=self.inputs)

    def is_repeated_by_others(self, workshop: Workshop, graph: Graph) -> bool:
        """Whether cut copies repeat the spare passes; one that differs becomes a run, to be probed like the others.

        In ``h / (16 if mask.any() else h.shape[1])`` with 16 channels, both branches do the same until one is cut.
        """
        chosen = [choose_half(graph), choose_unevenly(graph), choose_half(graph, lossy=True)]
        for number, run in enumerate(self.spare):
            if any(len(units) and _does_not_repeat(workshop, graph, run, units) for units in chosen):
                self.runs.append(self.spare.pop(number))
                return False
        return True

    @property
    def _accepts_branches(self) -> bool:
        return self.inputs.value_branches == "accept"

    def _failed(self, run: Run, error: Exception) -> TraceError:
        name = type(self.workshop.model).__name__
        what = f"({type(error).__name__}: {error})"[:300]
        if run.training and not run.answers:
            return TrainForwardError(
                f"model {name}: its forward works on the example in eval mode and fails in train mode {what}, so code "
                f"that runs only in training cannot be traced. Pass training_example=..., an input that works in train "
                f'mode, or train_mode="accept" if a cut may break code that runs only in training.'
            )
        return TraceError(
            f"model {name}: its forward failed on the example {what}. Pass an example on which model(*example) works."
            f"{likely_slip(self.workshop.model, run.example)}"
        )

    def _refused(self, place: str, what: str, more: str) -> TraceError:
        return TraceError(
            f"model {type(self.workshop.model).__name__}: {what}, at {place}{more}. Other inputs may take a path that "
            f"the trace has not seen. Pass examples=[...] that take all paths, or "
            f'value_branches="accept" if all inputs take the path of the example.'
        )

    def _refuse_numbers_read(self) -> None:
        """Refuse numbers that Python reads from tensors: unlike a truth value, a number has too many other outcomes."""
        # A read without a place in the user's code is torch's own, such as that of a quantization observer.
        reads = [read for _, recorded in self.replays.runs for read in recorded.reads if not read.boolean]
        reads = [it for it in reads if it.place and (not it.constant or it.constant in self._rewritten)]
        for read in {read.place: read for read in reads}.values():
            value = " ".join(repr(read.value).split())
            shown = f", which was {value if len(value) < 40 else value[:40] + '...'}"
            if read.own:
                error = self._refused_own(read, shown)
            else:
                error = self._refused(read.place, "forward reads a number from a tensor", f"{shown} for the example")
            self._not_known(error, accepted=self._accepts_branches)

    def _refused_own(self, read: ValueRead, shown: str) -> TraceError:
        return TraceError(
            f"model {type(self.workshop.model).__name__}: forward reads a number from its own parameters or buffers, "
            f"at {read.place}{shown}. Training may change it, and forward may then take a path that the trace has not "
            f"seen. Keep a constant as a Python number or in a buffer of integers that forward does not write, or pass "
            f'value_branches="accept" if the number never changes.'
        )

    def _pin_unused(self, why: str) -> None:
        """Pin the parameters and buffers that no forward pass has used so far."""
        place = _place_of_forward(self.workshop.model)
        tensors = self.tracers[0].tensors
        for name in set(tensors) - self._touched:
            for index_map in tensors[name]:
                self.facts.add_pin(index_map, Reason(why, place=place))


class _StrictEcho(Echo):  # type: ignore[no-untyped-call]  # torch's own
    """An echo in the same mode: dropout must match too, and so must the sizes of selections (``x[mask]``)."""

    def record(self, call: Call) -> None:
        super().record(call)
        made = [shape for shape, _ in self._first.steps[self._position - 1].outputs]
        if made != [tuple(output.shape) for output in call.outputs]:
            raise Differs(f"{call.name} gives something else")

    def _is_dropout(self, call: Call) -> bool:  # noqa: ARG002 - no call may differ
        return False

    def _counts_batches(self, call: Call) -> bool:  # noqa: ARG002 - no call may differ
        return False


def _what(step: Step) -> Hashable:
    """A key for an operation: two steps with one key behave alike on every cut copy."""
    shapes = tuple(shape for shape, _ in step.tensors)
    return step.name, step.module, step.place, shapes, repr(step.numbers)


def _does_not_repeat(workshop: Workshop, graph: Graph, run: tuple[Run, Recorded], units: Indices) -> bool:
    try:
        edits = graph.edits(units)
    except ShrinkError:  # an impossible choice says nothing about this pass
        return False
    return Replays((run,)).mismatch(workshop, graph, edits) is not None


def _cache_in(output: Any) -> Any:
    """The keys and values of past tokens in the output of a language model of transformers."""
    if isinstance(output, tuple | list):
        return [part for part in output if type(part).__name__.endswith("Cache")]
    held = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    return held.get("past_key_values")


def _place_of_forward(model: nn.Module) -> str:
    """File and line of the model's forward; its class name if there is no source."""
    try:
        source, line = inspect.getsourcefile(type(model).forward), inspect.getsourcelines(type(model).forward)[1]
    except (OSError, TypeError):
        return type(model).__qualname__
    return f"{Path(source or '').name}:{line}"


def _bind_recurrent(tracer: Tracer) -> None:
    """Bind the hidden units of torch's recurrent layers: one hidden size serves all layers and directions."""
    for path, module in tracer.model.named_modules():
        if isinstance(module, nn.RNNBase):
            prefix = f"{path}." if path else ""
            rows = [
                index_map.ravel()
                for name, maps in tracer.tensors.items()
                if name.startswith(f"{prefix}weight_hh") and name.rpartition(".")[0] == path
                for index_map in maps
                if support(index_map) == (1,)
            ]
            if len(rows) > 1:
                why = Reason("has one hidden size for all layers and directions", module=path)
                tracer.facts.even.append(Bound(np.stack(rows), why))


def _wiring(model: nn.Module, watched: _Watched) -> Wiring:
    tensors, tracer = list(named_tensors(model)), watched.tracers[0]
    names = {id(tensor): name for name, tensor, _ in tensors}
    return Wiring(
        axes=tracer.atoms.axes,
        tensors=tracer.tensors,
        shapes={name: tuple(tensor.shape) for name, tensor, _ in tensors},
        parameters={name for name, _, parameter in tensors if parameter},
        roles=watched.facts.roles,
        sized=tuple(sized_attributes(model, names)),
        headwise=dict(_attentions(model, names)),
        adapters=adapters_of(model),
    )


def _attentions(model: nn.Module, names: dict[int, str]) -> Iterator[tuple[str, set[str]]]:
    for path, module in model.named_modules():
        if HeadwiseAttention.fits(module):
            yield path, {names[id(weight)] for weight in module.parameters(recurse=False)}


def _refuse_strange(model: object, inputs: TraceInputs) -> None:
    if not isinstance(model, nn.Module):
        raise TraceError(f"trace: {not_a_model(model)}")
    refuse_scripted("trace", model)
    for name, tensor, _ in named_tensors(model):
        if nn.parameter.is_lazy(tensor):
            raise TraceError(f"tensor {name!r} has no shape yet. Run one forward pass of the lazy module first.")
        if hasattr(tensor, "device_mesh"):
            raise TraceError(f"tensor {name!r} is sharded over processes. Trace and shrink before sharding.")
    for example in (*inputs.examples, *inputs.training):
        _refuse_strange_example(model, example)


def _refuse_strange_example(model: nn.Module, example: Example) -> None:
    for place, argument in (*enumerate(example.arguments), *example.by_name.items()):
        for tensor in tensors_kept_by([argument]):
            if tensor.numel() == 0:
                raise TraceError(
                    f"example: argument {place!r} has a tensor of shape {tuple(tensor.shape)}, without elements, so "
                    f"nothing can be traced. Pass an example with a batch size of at least 2 and no empty tensors."
                )
    given = tensors_kept_by([*example.arguments, example.by_name])
    shaped = [tensor for tensor in given if tensor.ndim]
    if shaped and all(tensor.shape[0] == 1 for tensor in shaped):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in shaped[:4])
        raise TraceError(
            f"example: the first dimension of every tensor is 1 ({shapes}). Pass an example with a batch size of at "
            f"least 2, so that the batch dimension can be told apart from dimensions of size 1."
        )
    devices = {tensor.device.type for _, tensor, _ in named_tensors(model)}
    for tensor in given:
        if devices and tensor.device.type not in devices and devices != {"meta"}:
            raise TraceError(
                f"example: a tensor is on {tensor.device}, the model on {', '.join(sorted(devices))}. Move one of them."
            )
