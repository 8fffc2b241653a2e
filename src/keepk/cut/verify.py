"""Checks of a cut on copies of the model: compare outputs (`verify`), or replay forward at the new sizes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from keepk.cut.tensors import doomed, sharded, silencing
from keepk.errors import ShrinkError
from keepk.graph.blame import passing_through
from keepk.graph.edits import Edits, Indices
from keepk.graph.facts import Reason
from keepk.graph.given import no_model
from keepk.graph.graph import Graph
from keepk.graph.replay import Mismatch, Replays
from keepk.graph.shell import Example, Workshop
from keepk.graph.tracer import named_tensors
from keepk.graph.weight_norm import lengths_of
from keepk.graph.wrappers import unwrap

TOLERANCE = 1e-8  # in float64; what is wrong is off by much more
SHOWN = 6  # layers in a message
REMEDIES = {
    "shrink": "Leave more units there, leave the layer out (exclude=...), or pass replay=False if the difference is "
    "meant.",
    "load": "Load it with the model's code as it was when it was saved, or omit example= if the difference is meant.",
}


def verify(model: nn.Module, graph: Graph, example: Any, *, share: float = 0.5, seed: int = 0) -> float:
    """Remove a share of all exact units from a copy, zero them in another, and compare the outputs in float64.

    A trace proves by itself that every operation of a cut copy gets what it should. This is a second opinion, for a
    network of unusual Python or with rules of one's own; it runs the model twice, on copies with weights.

    Args:
        model: The model that was traced; it stays as it is.
        graph: What `keepk.trace` found.
        example: As for `keepk.trace`.
        share: How much of each space goes.
        seed: Which ones go.

    Returns:
        The largest difference, relative to the largest output.

    Raises:
        ShrinkError: The outputs differ; the layers whose removal alone makes a difference are named.

    Examples:
        >>> import keepk
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> keepk.verify(net, keepk.trace(net, torch.zeros(2, 8)), torch.randn(2, 8)) < 1e-12
        True
    """
    if not isinstance(model, nn.Module):
        raise ShrinkError(f"verify: {no_model(model)}")
    if found := sharded(model):
        raise ShrinkError(f"verify: {found} is sharded over processes. Trace, verify and shrink before sharding.")
    trial = _Trial(Workshop(unwrap(model), _in_float64(Example.of(example)), None), graph)
    units = graph.choose(share, seed=seed)
    largest = trial.difference(graph.edits(units))
    if largest > TOLERANCE:
        raise ShrinkError(
            f"verify: {len(units)} units removed and the same units masked give outputs that differ by {largest:.1e} "
            f"of the largest, because of {', '.join(trial.guilty(units)) or 'several layers together'}. Leave these "
            f"layers out, and look for a rule of your own or for Python that depends on their size."
        )
    return largest


class _Trial:
    """Cut and masked copies of one model."""

    def __init__(self, workshop: Workshop, graph: Graph) -> None:
        self._workshop, self._graph = workshop, graph

    def difference(self, edits: Edits) -> float:
        cut, masked = (self._workshop.copy(it).double() for it in (edits, None))
        _silence(masked, edits)
        return _largest_difference(*(self._outputs(twin) for twin in (masked, cut)))

    def guilty(self, units: Indices) -> list[str]:
        """The spaces that differ alone."""
        spaces = (np.intersect1d(np.concatenate(blocks), units) for blocks in self._graph.choices())
        apart = [mine for mine in spaces if len(mine) and self.difference(self._graph.edits(mine)) > TOLERANCE]
        names = self._graph.units.group[np.concatenate([*apart, np.zeros(0, np.int64)])]
        return [repr(self._graph.groups[number].name) for number in np.unique(names)]

    def _outputs(self, twin: nn.Module) -> list[Tensor]:
        with self._workshop.running() as example:
            torch.manual_seed(0)  # the same draws in both; the user's own state comes back
            output = twin(*example.arguments, **example.by_name)
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _in_float64(example: Example) -> Example:
    def converted(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return Example(tree_map(converted, example.arguments), tree_map(converted, example.by_name))


@torch.no_grad()
def _silence(model: nn.Module, edits: Edits) -> None:
    """Zero what a cut would take away; of weight norm the length, since a direction of zeros is none."""
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


def refuse_unfit(model: nn.Module, graph: Graph, edits: Edits, verb: str = "shrink") -> None:
    """Refuse a cut after which the model's forward would fail or do something else than the trace has seen.

    A trace tries a few widths. A forward may branch on others (``if h.shape[1] < 6``), or lose an axis where one
    channel is left (``.squeeze()``), so that each cut is replayed at its own sizes, on a copy without weights. Widths
    that were replayed before are not replayed again.

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
    workshop = Workshop(model, replays.runs[0][0].example, replays.device)
    found = replays.mismatch(workshop, graph, edits, lenient=True)
    if (
        found is None
        or found.step < 0  # a module that cannot have its new size says so when it gets it
        or _is_torchs_shortcut(model, graph, edits, found)
        or _has_changed_since(workshop, graph, edits, found)
    ):
        replays.fitting.add(shapes)
        return
    step = replays.steps[max(found.step, 0)]
    where = Reason("", step.name, step.module, step.place)
    raise ShrinkError(
        f"{verb}: with {_widths(graph, edits, replays, found)}, forward would not do what it did when it was traced "
        f"({found.run}): {found.why}{where}. Nothing was changed. {REMEDIES[verb]}"
    )


def _refuse_wide_projection(model: nn.Module, edits: Edits, verb: str) -> None:
    """An LSTM's projection must be narrower than its state; torch says so when one is made, and not in forward."""
    modules = dict(model.named_modules())
    after = {(it.module, it.attribute): it.new for it in edits.settings if it.attribute in ("hidden_size", "proj_size")}
    for path in {path for path, _ in after}:
        module = modules[path]
        hidden, projected = (after.get((path, it), getattr(module, it, 0)) for it in ("hidden_size", "proj_size"))
        if isinstance(module, nn.LSTM) and projected >= hidden:
            raise ShrinkError(
                f"{verb}: LSTM {path!r} would have hidden_size={hidden} and proj_size={projected}. proj_size has to be "
                f"smaller than hidden_size: leave more hidden units, or remove as many of the projection."
            )


def _has_changed_since(workshop: Workshop, graph: Graph, edits: Edits, found: Mismatch) -> bool:
    """Whether the uncut model does not repeat its trace either: it filled a cache, or a rate of dropout was changed.

    The difference then says nothing about the cut, and the outputs of a cut and of a masked copy tell, for exact units.
    """
    assert graph.replays is not None
    if graph.replays.mismatch(workshop, graph, graph.edits([]), lenient=True) is None:
        return False
    return bool(graph.units.lossy[edits.units].any()) or _computes_the_same(workshop.model, graph, edits, found)


def _computes_the_same(model: nn.Module, graph: Graph, edits: Edits, found: Mismatch) -> bool:
    """Whether a cut and a masked copy of the model give the same outputs in eval mode."""
    assert found.run is not None
    trial = _Trial(Workshop(model, _in_float64(found.run.example), None), graph)
    try:
        return trial.difference(edits) <= TOLERANCE
    except Exception:  # whatever forward raises on the cut copy, it does not fit
        return False


def _is_torchs_shortcut(model: nn.Module, graph: Graph, edits: Edits, found: Mismatch) -> bool:
    """Whether a difference is torch's own: with one channel left it takes other operations (`einsum` multiplies).

    The outputs of a cut and of a masked copy tell, in eval mode and for exact units.
    """
    alive = graph.alive.copy()
    alive[edits.units] = False
    blocks = [block for blocks in graph.choices() for block in blocks if np.isin(block, edits.units).any()]
    if all(alive[block].sum() > 1 for block in blocks) or graph.units.lossy[edits.units].any():
        return False
    if found.run is None or found.run.training or found.run.answers:
        return False
    return _computes_the_same(model, graph, edits, found)


def _widths(graph: Graph, edits: Edits, replays: Replays, found: Mismatch) -> str:
    """How many units the layers at the failing operation would have; or all that are cut, if it has none."""
    alive = graph.alive.copy()
    alive[edits.units] = False
    cut = np.unique(graph.units.group[edits.units]).tolist()
    through = np.zeros(len(graph.solution.classes), bool)
    through[graph.solution.classes[passing_through(replays.steps, found.step, np.ones(len(through), bool))]] = True
    near = [number for number in cut if through[graph.units.classes[graph.groups[number].units]].any()]
    named = [graph.groups[number] for number in (near or cut)]
    shown = ", ".join(f"{int(alive[space.units].sum())} of {space.name!r}" for space in named[:SHOWN])
    return f"{shown} and others" if len(named) > SHOWN else shown
