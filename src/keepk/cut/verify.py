"""`verify`: hold a cut copy of a model against a masked one, by numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from keepk.cut.tensors import doomed, sharded, silencing
from keepk.errors import ShrinkError
from keepk.graph.edits import Edits, Indices
from keepk.graph.given import no_model
from keepk.graph.graph import Graph
from keepk.graph.shell import Example, Workshop
from keepk.graph.weight_norm import lengths_of
from keepk.graph.wrappers import unwrap

TOLERANCE = 1e-8  # in float64; what is wrong is off by much more


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
    largest = trial.difference(units)
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

    def difference(self, units: Indices) -> float:
        edits = self._graph.edits(units)
        cut, masked = (self._workshop.copy(it).double() for it in (edits, None))
        _silence(masked, edits)
        return _largest_difference(*(self._outputs(twin) for twin in (masked, cut)))

    def guilty(self, units: Indices) -> list[str]:
        """The spaces that differ alone."""
        spaces = (np.intersect1d(np.concatenate(blocks), units) for blocks in self._graph.choices())
        apart = [mine for mine in spaces if len(mine) and self.difference(mine) > TOLERANCE]
        names = self._graph.units.space[np.concatenate([*apart, np.zeros(0, np.int64)])]
        return [repr(self._graph.spaces[number].name) for number in np.unique(names)]

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
