"""`shrink`: take channels out for real, and everybody along who follows the model's weights.

All new tensors are made before the first old one is touched; putting them in place is then all or nothing.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.changes import cut_module, forget_compiled, new_entry
from keepk.cut.followers import Follower, followed, refuse_no_followers, tensors_of
from keepk.cut.holders import refuse_follower, refuse_holders, refuse_optimizers
from keepk.cut.optimizer_state import flat_history, restart_flat_history, state_per_weight
from keepk.cut.tensors import left_of
from keepk.cut.undo import Change, Undo, all_or_nothing, undone_by
from keepk.cut.verify import refuse_unfit
from keepk.errors import ShrinkError
from keepk.graph.edits import Cut, Edits
from keepk.graph.given import refuse_quantised
from keepk.graph.graph import Graph
from keepk.graph.tracer import named_tensors
from keepk.graph.wrappers import unwrap
from keepk.plan.names import shown


def shrink(
    model: nn.Module,
    graph: Graph,
    units: Iterable[int],
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    followers: Sequence[Follower] = (),
    replay: bool = True,
) -> Edits:
    """Remove units from a model, in place.

    Parameter objects, module classes, names, ties, hooks, dtypes, devices, memory formats and `requires_grad` stay. The
    graph stays valid: any number of shrinks needs one trace.

    Args:
        model: The model that was traced.
        graph: What `keepk.trace` found.
        units: Numbers of units; see `Graph.groups` and `Graph.choose`.
        optimizer: Its state of the cut parameters is cut along. Several may be given.
        followers: Copies of the model, averages of it (`AveragedModel`) or dicts of tensors with its names (of all
            that is trained, at least), which are cut along the same lines.
        replay: Whether the cut is first replayed at its own sizes on a copy without weights. It is refused if forward
            would then fail or do something else than the trace has seen.

    Examples:
        >>> import keepk
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> graph = keepk.trace(net, torch.zeros(2, 8))
        >>> print(keepk.shrink(net, graph, [0, 5]))
        2 units removed: 3 tensors cut, 24 of their 72 numbers gone
        >>> net
        Sequential(
          (0): Linear(in_features=8, out_features=4, bias=True)
          (1): ReLU()
          (2): Linear(in_features=4, out_features=3, bias=True)
        )
    """
    prepared = prepare(model, graph, units, optimizer=optimizer, followers=followers, replay=replay)
    prepared.apply()
    return prepared.edits


@dataclass(frozen=True)
class Prepared:
    """A shrink that is ready: everything is checked and every new tensor made, and nothing has changed yet."""

    model: nn.Module
    edits: Edits
    changes: Sequence[Change]
    touched: Sequence[Tensor]

    def apply(self) -> Undo:
        """Put the new tensors in place, all or none; what is returned puts the old ones back."""
        with torch.inference_mode(False), torch.no_grad():
            undo = all_or_nothing(self.changes)
        for tensor in self.touched:
            torch.autograd.graph.increment_version(tensor)  # torch then refuses what it saved for old losses
        if self.changes:
            forget_compiled(self.model)
        return undo


def prepare(
    model: nn.Module,
    graph: Graph,
    units: Iterable[int],
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    followers: Sequence[Follower] = (),
    wrapper: nn.Module | None = None,
    replay: bool = True,
) -> Prepared:
    """All of a shrink but the last step. `wrapper` is a DDP wrapper that will be gone by then."""
    _refuse_strange(model, graph)
    refuse_quantised(unwrap(model), ShrinkError)
    refuse_no_followers(followers, model, "shrink")
    with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode could not be trained
        inner = unwrap(model)
        _refuse_other_model(inner, graph, {name: tensor for name, tensor, _ in named_tensors(inner)})
        edits = graph.edits(_numbers(units))
        if not len(edits.units):
            return Prepared(model, edits, (), ())
        refuse_holders(model, edits, wrapper)
        if replay:
            refuse_unfit(inner, graph, edits)
        return _prepared(model, graph, edits, _listed(optimizer), list(followers))


def _prepared(
    model: nn.Module,
    graph: Graph,
    edits: Edits,
    optimizers: list[torch.optim.Optimizer],
    followers: list[Follower],
) -> Prepared:
    inner = unwrap(model)
    named = {name: tensor for name, tensor, _ in named_tensors(inner)}
    refuse_optimizers(optimizers, named, edits)
    following = [tensors_of(follower) for follower in followers]
    names = _all_names(inner)
    for place, (follower, tensors) in enumerate(zip(followers, following, strict=True)):
        refuse_follower(follower, tensors, _expected_of(follower, named, edits), names, place)
    changes = cut_module(inner, named, edits)
    for optimizer in optimizers:
        changes += [*_cut_states(optimizer, named, edits.cuts), _new_history(optimizer)]
    for follower, tensors in zip(followers, following, strict=True):
        changes += _cut_follower(follower, tensors, edits, names)
    return Prepared(model, edits, [*changes, _new_graph(graph, edits)], [named[cut.tensor] for cut in edits.cuts])


def _refuse_strange(model: object, graph: object) -> None:
    if not isinstance(model, nn.Module):
        raise ShrinkError(f"shrink: got {type(model).__name__} as the model. Give the torch.nn.Module that was traced.")
    if not isinstance(graph, Graph):
        raise ShrinkError(
            f"shrink: got {type(graph).__name__} as the graph. Give what keepk.trace(model, example) returns."
        )


def _numbers(units: Iterable[Any]) -> np.ndarray:
    """The units as numbers, each once; a mask or a share is not a number of a unit."""
    _refuse_share(units)
    given = units.numpy(force=True) if isinstance(units, Tensor) else units
    if not (isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu"):
        given = np.array([_number(unit) for unit in given], object)  # of any size: the graph says what there is
    numbers, counts = np.unique(given, return_counts=True)
    if (counts > 1).any():
        raise ShrinkError(f"shrink: unit {numbers[counts > 1][0]} is named more than once. Name each unit once.")
    return numbers


def _number(unit: Any) -> int:
    plain = unit.tolist() if hasattr(unit, "tolist") else unit
    if not isinstance(plain, int) or isinstance(plain, bool):
        raise ShrinkError(
            f"shrink: units has {shown(plain)} ({type(plain).__name__}). Give the units' numbers as ints; of "
            f"a mask over "
            f"all units, numpy.flatnonzero(mask)."
        )
    return plain


def _refuse_share(units: object) -> None:
    try:
        iter(units)  # type: ignore[call-overload]  # a tensor of no dims has __iter__ and refuses to be gone through
    except TypeError:
        share = units if isinstance(units, float) else 0.5
        raise ShrinkError(
            f"shrink: units={shown(units)}. Give the units' numbers; a share is graph.choose({share})."
        ) from None


def _listed(optimizer: object) -> list[Any]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]


def _all_names(model: nn.Module) -> dict[str, list[str]]:
    """By the first name of a tensor all names under which it is tied."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first, names = dict[int, str](), dict[str, list[str]]()
    for name, tensor in named:
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return names


def _refuse_other_model(model: nn.Module, graph: Graph, named: Mapping[str, Tensor]) -> None:
    for name in graph.wiring.shapes:
        expected = graph.shape(name)
        if name not in named or tuple(named[name].shape) != expected:
            got = f"has shape {tuple(named[name].shape)}" if name in named else "is not there"
            raise ShrinkError(
                f"shrink: the graph does not fit the model {type(model).__name__}: {name!r} should have shape "
                f"{expected} and {got}. Trace this very model; one that was cut elsewhere needs a trace of its own."
            )
    for name in (name for name, tensor in named.items() if tensor.dim() and name not in graph.wiring.shapes):
        raise ShrinkError(
            f"shrink: the graph does not know {name!r} of {type(model).__name__}, of shape {tuple(named[name].shape)}, "
            f"which came into the model after the trace. Change the model first, then trace it."
        )


def _cut_states(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], cuts: Iterable[Cut]) -> list[Change]:
    changes = list[Change]()
    for cut in cuts:
        parameter = named[cut.tensor]
        if isinstance(parameter, nn.Parameter):
            mine = {id(tensor) for tensor in state_per_weight(optimizer, parameter)}
            state = optimizer.state.get(parameter, {})
            changes += [new_entry(state, key, left_of(v, cut)) for key, v in state.items() if id(v) in mine]
    return changes


def _new_history(optimizer: torch.optim.Optimizer) -> Change:
    def change() -> Undo:
        with undone_by(undo := flat_history(optimizer)):
            restart_flat_history(optimizer)
            return undo

    return change


def _new_graph(graph: Graph, edits: Edits) -> Change:
    def change() -> Undo:
        def undo() -> None:
            graph.restored(edits.units)

        with undone_by(undo):
            graph.removed(edits.units)
            return undo

    return change


def _expected_of(follower: object, named: Mapping[str, Tensor], edits: Edits) -> list[Cut]:
    """A module has all that the model has; a dict may be of trained weights alone."""
    if isinstance(follower, dict):
        return [cut for cut in edits.cuts if cut.tensor in follower or named[cut.tensor].requires_grad]
    return list(edits.cuts)


def _cut_follower(
    follower: object, tensors: Mapping[str, Tensor], edits: Edits, names: Mapping[str, list[str]]
) -> Iterator[Change]:
    if isinstance(follower, nn.Module):
        yield from cut_module(followed(follower), tensors, edits)
    elif isinstance(follower, dict):
        for cut in edits.cuts:
            tied = [name for name in names[cut.tensor] if name in follower]
            yield from (new_entry(follower, name, left_of(follower[name], cut)) for name in tied)
