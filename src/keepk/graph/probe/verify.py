"""Checks of a cut on copies of the model: compare outputs (`verify`), or replay forward (`refuse_unfit`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepk.errors import ShrinkError, TraceError
from keepk.graph.graph import Graph
from keepk.graph.ids.atoms import tensors_kept_by
from keepk.graph.ids.facts import Reason
from keepk.graph.probe.repairs import passing_through
from keepk.graph.probe.replay import Mismatch, Replays, Run
from keepk.graph.trace import trace_inputs
from keepk.graph.tracer import Tracer
from keepk.model.copies import META, Workshop
from keepk.model.edits import Cut, Edits, Indices, doomed, silencing
from keepk.model.example import Example, not_a_model
from keepk.model.names import lengths_of, named_tensors, sharded, unwrap
from keepk.model.torch_internals import TorchDispatchMode, tree_map

TOLERANCE = 1e-8  # in float64, where rounding is far below and a wrong channel far above
SHOWN = 6  # layers in a message
# Comparisons by outputs are repeated with noise on the inputs and other weights: the weights times these, plus noise. A
# channel that is inactive with its own weights is active with their opposites.
NOISY = (1, -1, 0, 0, 1, -1, 0, 0)
REMEDIES = {
    "shrink": "Keep more units there, leave the layer out (exclude=...), or pass replay=False if the difference is "
    "intended.",
    "load": "Load it with the code that the model had when it was saved, or omit example= if the difference is "
    "intended.",
}


def verify(model: nn.Module, graph: Graph, example: Any, *, share: float = 0.5, seed: int = 0) -> float:
    """Remove a share of all exact units from a copy, zero them in another, and compare the outputs in float64.

    A trace already checks that every operation of a cut copy gets the right inputs. This is a second opinion, for
    models with unusual Python code or with custom rules (`keepk.rule`). It runs the model twice, on copies with
    weights.

    Args:
        model: The model that was traced; it is not changed.
        graph: The graph that `keepk.trace` returned for this model.
        example: An input of forward, as for `keepk.trace`.
        share: The share of each group of units to remove, between 0 and 1.
        seed: Seed of the random choice of units.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        ShrinkError: The outputs differ. The error names the layers that make a difference when they are cut alone.

    Examples:
        >>> import keepk
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> keepk.verify(net, keepk.trace(net, torch.zeros(2, 8)), torch.randn(2, 8)) < 1e-12
        True
    """
    if not isinstance(model, nn.Module):
        raise ShrinkError(f"verify: {not_a_model(model)}")
    if found := sharded(model):
        raise ShrinkError(f"verify: {found} is sharded over processes. Trace, verify and shrink before sharding.")
    trial = _Trial(Workshop(unwrap(model), _in_float64(Example.of(example)), None), graph)
    units = graph.choose(share, seed=seed)
    largest = trial.difference(graph.edits(units))
    if largest > TOLERANCE:
        raise ShrinkError(
            f"verify: {len(units)} units removed and the same units masked give outputs that differ by {largest:.1e} "
            f"of the largest, because of {', '.join(trial.guilty(units)) or 'several layers together'}. Leave these "
            f"layers out, and look for a custom rule or for Python code that depends on their size."
        )
    return largest


class _Trial:
    """Compares cut and masked copies of one model in one pass; by default, the example of the workshop in eval mode."""

    def __init__(self, workshop: Workshop, graph: Graph, run: Run | None = None) -> None:
        self._workshop, self._graph, self._run = workshop, graph, run or Run(workshop.example)

    def difference(self, edits: Edits) -> float:
        """The largest difference between the outputs of a cut and a masked copy, relative to the largest output."""
        cut, masked = (self._workshop.copy(it, training=self._run.training).double() for it in (edits, None))
        _silence(masked, edits)
        return _largest_difference(*(self._outputs(twin) for twin in (masked, cut)))

    def guilty(self, units: Indices) -> list[str]:
        """The groups whose removal alone changes the outputs."""
        spaces = (np.intersect1d(np.concatenate(blocks), units) for blocks in self._graph.choices())
        apart = [mine for mine in spaces if len(mine) and self.difference(self._graph.edits(mine)) > TOLERANCE]
        names = self._graph.units.group[np.concatenate([*apart, np.zeros(0, np.int64)])]
        return [repr(self._graph.groups[number].name) for number in np.unique(names)]

    def _outputs(self, twin: nn.Module) -> list[Tensor]:
        run, without_dropout = self._run, _WithoutDropout()  # type: ignore[no-untyped-call]  # torch's own
        with self._workshop.running(run.example, gradients=run.gradients) as example, without_dropout:
            torch.manual_seed(0)  # so that both copies draw the same numbers; `running` restores the user's state
            if run.answers:  # a tracer gives them to Python in place of the real values
                tracer = Tracer(twin, {}, run.answers)
                tracer.label_tensors()
                output = tracer.follow(example.arguments, example.by_name)
            else:
                output = twin(*example.arguments, **example.by_name)
        return [tensor.detach() for tensor in tensors_kept_by(output)]


class _WithoutDropout(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Makes dropout keep everything, because a cut copy draws fewer random numbers than a masked one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float:  # then divided by the probability, which gives ones
            return args[0].fill_(args[1] if len(args) > 1 else 0.5)
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))


def _in_float64(example: Example) -> Example:
    def converted(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return Example(tree_map(converted, example.arguments), tree_map(converted, example.by_name))


@torch.no_grad()
def _silence(model: nn.Module, edits: Edits) -> None:
    """Zero the entries that a cut would remove; of weight norm only the length, see `silencing`."""
    parameters, lengths = dict(model.named_parameters()), lengths_of(model)
    for cut in (cut for cut in edits.cuts if cut.tensor in parameters):
        parameter = parameters[cut.tensor]
        silenced = doomed(silencing(cut, lengths.get(parameter)), parameter.device)
        parameter.masked_fill_(silenced, 0.0)


def _largest_difference(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in got]:
        return float("inf")
    pairs = [(a.double(), b.double()) for a, b in zip(wanted, got, strict=True) if a.numel()]
    return max((float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)) for a, b in pairs), default=0.0)


def same_operations(one: nn.Module, other: nn.Module, example: Any) -> bool:
    """Whether two models run the same operations, on the same shapes and with the same numbers, in eval mode.

    Neither needs weights: both are copied to the meta device. This tells two models apart that have the same tensors
    and compute something else with them, such as attentions with 8 heads of 16 and with 16 heads of 8.

    >>> first, second = nn.Sequential(nn.Linear(4, 4), nn.Softmax(1)), nn.Sequential(nn.Linear(4, 4), nn.Softmax(0))
    >>> same_operations(first, first, torch.zeros(2, 4)), same_operations(first, second, torch.zeros(2, 4))
    (True, False)
    """
    return _operations(one, example) == _operations(other, example)


def _operations(model: nn.Module, example: Any) -> list[tuple[Any, ...]]:
    workshop = Workshop(model, Example.of(example), META)
    with workshop.running() as given:
        tracer = Tracer(workshop.copy(), {})
        tracer.label_tensors()
        tracer.follow(given.arguments, given.by_name)
    return [
        (it.name, it.module, it.numbers, it.sizes, it.constants, [shape for shape, _ in it.tensors])
        for it in tracer.steps
    ]


def refuse_unfit(model: nn.Module, graph: Graph, edits: Edits, verb: str = "shrink") -> None:
    """Refuse a cut after which the model's forward would fail or do something that the trace has not seen.

    A trace tries a few widths. A forward may branch on others (``if h.shape[1] < 6``), or lose an axis where one
    channel is left (``.squeeze()``). So each cut is replayed at its exact sizes, on a copy without weights, unless
    these sizes were replayed before.

    Args:
        model: The model, without wrappers.
        graph: Its graph.
        edits: The cut.
        verb: The function that the user called, for the error: "shrink" or "load".

    Raises:
        ShrinkError: The cut copy did something else; nothing was changed.
    """
    replays = graph.replays
    if replays is None or not len(edits.units):
        return
    after = {cut.tensor: cut.after for cut in edits.cuts}
    shapes = tuple(after.get(name, tuple(tensor.shape)) for name, tensor, _ in named_tensors(model))
    if shapes in replays.fitting:
        return
    _refuse_wide_projection(model, edits, verb)
    standard, parts = graph, [*_exact_part(graph, edits), edits]
    if _differs(model, graph, parts):
        if _has_changed_since(model, graph):
            # The old trace is no longer the standard for the cut model. The uncut model as it is now is.
            standard = _traced_again(model, graph, verb)
            parts = [_with_units_of(standard, graph, part, verb) for part in parts]
        if (found := _first_harmful(model, standard, parts)) is not None:
            raise _unfit(standard, *found, verb)
    replays.fitting.add(shapes)


def _exact_part(graph: Graph, edits: Edits) -> list[Edits]:
    """The exact units of a cut that removes lossy units as well; nothing if it removes units of one kind only.

    Lossy units may change numbers in forward, such as a scale that depends on the width, so a cut with lossy units is
    replayed without comparing numbers. Exact units may not, so they are replayed alone first.
    """
    lossy = graph.units.lossy[edits.units]
    if not lossy.any() or lossy.all():
        return []
    try:
        return [graph.edits(edits.units[~lossy])]
    except ShrinkError:  # they cannot be removed alone: some lossy units must lose equal numbers
        return []


def _differs(model: nn.Module, graph: Graph, parts: Sequence[Edits]) -> bool:
    """Whether the replay of any part of a cut differs from the trace at all."""
    replays = graph.replays
    assert replays is not None
    workshop = Workshop(model, replays.runs[0][0].example, replays.device)
    return any(replays.mismatch(workshop, graph, part, lenient=True) is not None for part in parts)


def _first_harmful(model: nn.Module, graph: Graph, parts: Sequence[Edits]) -> tuple[Edits, Mismatch] | None:
    """The first part of a cut whose replay differs from the trace in a way that is not harmless, and the difference."""
    replays = graph.replays
    assert replays is not None
    workshop = Workshop(model, replays.runs[0][0].example, replays.device)
    for part in parts:
        for found in replays.mismatches(workshop, graph, part, lenient=True):
            if found.step < 0:  # a module refuses its new size before any operation; the cut itself will raise that
                break
            if not _is_torchs_shortcut(model, graph, part, found):
                return part, found
    return None


def _unfit(graph: Graph, edits: Edits, found: Mismatch, verb: str) -> ShrinkError:
    replays = graph.replays
    assert replays is not None
    step = replays.steps[max(found.step, 0)]
    where = Reason("", step.name, step.module, step.place)
    return ShrinkError(
        f"{verb}: with {_widths(graph, edits, replays, found)}, forward would not do what it did when it was traced "
        f"({found.run}): {found.why}{where}. Nothing was changed. {REMEDIES[verb]}"
    )


def _has_changed_since(model: nn.Module, graph: Graph) -> bool:
    """Whether the uncut model does not repeat its trace: it filled a cache, or a temperature or dropout changed."""
    replays = graph.replays
    assert replays is not None
    workshop = Workshop(model, replays.runs[0][0].example, replays.device)
    return replays.mismatch(workshop, graph, graph.edits([]), lenient=True) is not None


def _traced_again(model: nn.Module, graph: Graph, verb: str) -> Graph:
    """A new graph of a model that has changed since it was traced.

    Raises:
        ShrinkError: The model can no longer be traced.
    """
    assert graph.replays is not None
    assert graph.replays.inputs is not None  # every graph of keepk.trace has them
    try:
        return trace_inputs(model, graph.replays.inputs)
    except TraceError as error:
        raise ShrinkError(
            f"{verb}: the model has changed since it was traced, and it cannot be traced again: {error} "
            f"Nothing was changed."
        ) from error


def _with_units_of(again: Graph, graph: Graph, edits: Edits, verb: str) -> Edits:
    """The same cut with the units of another graph of the same model.

    Raises:
        ShrinkError: The cut has exact units only, and some of them are lossy in the other graph; or the other graph
            would not make this cut, because some of its channels are fixed there.
    """
    units = again.lost(edits.cuts)
    if not _plans_the_same(again, units, edits.cuts):
        raise ShrinkError(
            f"{verb}: the model has changed since it was traced, and some of the channels can no longer be removed, "
            f"or no longer without others. Nothing was changed. Trace the model again, or make a new Pruner."
        )
    lossy = again.units.lossy[units]
    if lossy.any() and not graph.units.lossy[edits.units].any():
        layer = again.groups[int(again.units.group[units[lossy][0]])]
        raise ShrinkError(
            f"{verb}: the model has changed since it was traced: removing channels of {layer.name!r} now changes more "
            f"than zeroing them would ({layer.lossy}). Nothing was changed. Trace the model again, or make a new "
            f"Pruner."
        )
    return replace(edits, units=units)


def _plans_the_same(graph: Graph, units: Indices, cuts: Sequence[Cut]) -> bool:
    """Whether a graph cuts the tensors that forward uses in exactly this way when it removes the units."""
    assert graph.replays is not None
    used = {name for _, recorded in (*graph.replays.runs, *graph.replays.echoes) for name in recorded.touched}
    wanted = {cut.tensor: cut.kept for cut in cuts if cut.tensor in used}
    try:
        planned = {cut.tensor: cut.kept for cut in graph.edits(units).cuts if cut.tensor in used}
    except ShrinkError:
        return False
    return planned.keys() == wanted.keys() and all(
        planned[name].keys() == kept.keys() and all(np.array_equal(planned[name][axis], kept[axis]) for axis in kept)
        for name, kept in wanted.items()
    )


def _refuse_wide_projection(model: nn.Module, edits: Edits, verb: str) -> None:
    """Refuse an LSTM whose projection would not be narrower than its state."""
    # torch checks this in the constructor and not in forward, so a replay does not find it.
    modules = dict(model.named_modules())
    after = {(it.module, it.attribute): it.new for it in edits.settings if it.attribute in ("hidden_size", "proj_size")}
    for path in {path for path, _ in after}:
        module = modules[path]
        hidden, projected = (after.get((path, it), getattr(module, it, 0)) for it in ("hidden_size", "proj_size"))
        if isinstance(module, nn.LSTM) and projected >= hidden:
            raise ShrinkError(
                f"{verb}: LSTM {path!r} would have hidden_size={hidden} and proj_size={projected}. proj_size has to be "
                f"smaller than hidden_size: keep more hidden units, or remove more units of the projection."
            )


def _is_torchs_shortcut(model: nn.Module, graph: Graph, edits: Edits, found: Mismatch) -> bool:
    """Whether a mismatch comes from torch itself, which uses other operations for a single channel.

    For example, `einsum` multiplies instead of calling `bmm`. To find out, the same pass is run with weights on a cut
    and on a masked copy, and their outputs are compared, which works for exact units. The channel that is left may be
    inactive for the example, so other weights and inputs are tried as well.
    """
    alive = graph.alive.copy()
    alive[edits.units] = False
    blocks = [block for blocks in graph.choices() for block in blocks if np.isin(block, edits.units).any()]
    if all(alive[block].sum() > 1 for block in blocks) or graph.units.lossy[edits.units].any():
        return False
    assert found.run is not None
    run = replace(found.run, example=_in_float64(found.run.example))
    try:
        same = _Trial(Workshop(model, run.example, None), graph, run).difference(edits) <= TOLERANCE
        noisy = (_with_noise(model, run, times, seed) for seed, times in enumerate(NOISY))
        # NaN says nothing: the noise may leave the domain of an operation (a logarithm).
        return same and not any(_Trial(workshop, graph, it).difference(edits) > TOLERANCE for workshop, it in noisy)
    except Exception:  # forward may raise anything on a copy that it does not fit
        return False


def _with_noise(model: nn.Module, run: Run, times: int, seed: int) -> tuple[Workshop, Run]:
    """A copy of the model whose parameters are multiplied and have noise added, and the run with noise on its input."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)

    def varied(value: Any) -> Any:
        return value + noise(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    example = Example(tree_map(varied, run.example.arguments), tree_map(varied, run.example.by_name))
    twin = Workshop(model, run.example, None).copy()
    with torch.no_grad():
        for parameter in (it for it in twin.parameters() if it.is_floating_point()):
            parameter.copy_(times * parameter + noise(parameter) * parameter.abs().mean())
    return Workshop(twin, example, None), replace(run, example=example)


def _widths(graph: Graph, edits: Edits, replays: Replays, found: Mismatch) -> str:
    """The widths that the layers near the failing operation would have; of all cut layers if none is near."""
    alive = graph.alive.copy()
    alive[edits.units] = False
    cut = np.unique(graph.units.group[edits.units]).tolist()
    through = np.zeros(len(graph.solution.classes), bool)
    through[graph.solution.classes[passing_through(replays.steps, found.step, np.ones(len(through), bool))]] = True
    near = [number for number in cut if through[graph.units.classes[graph.groups[number].units]].any()]
    named = [graph.groups[number] for number in (near or cut)]
    shown = ", ".join(f"{int(alive[space.units].sum())} of {space.name!r}" for space in named[:SHOWN])
    return f"{shown} and others" if len(named) > SHOWN else shown
