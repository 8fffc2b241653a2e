"""`shrink`: remove channels physically, from the model, its optimizers' state and its followers.

Every new tensor is made before the first old one is changed. Putting them in place is a transaction: all changes are
made, or none.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.holders import Follower, followed, refuse_bad_followers, refuse_follower, refuse_holders, tensors_of
from keepk.cut.masks import (
    flat_history,
    refuse_factored,
    refuse_foreign_state,
    refuse_stranger,
    refuse_wrapping,
    restart_flat_history,
    state_per_weight,
    unwrapped_optimizers,
)
from keepk.cut.record import noted
from keepk.errors import ShrinkError
from keepk.graph.graph import Graph
from keepk.graph.probe.verify import refuse_unfit
from keepk.model.edits import (
    Change,
    Cut,
    Edits,
    Undo,
    all_or_nothing,
    cut_module,
    forget_compiled,
    left_of,
    new_entry,
    refuse_missing_modules,
    undone_by,
)
from keepk.model.example import refuse_quantised
from keepk.model.names import named_tensors, unwrap
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

    Parameter objects, module classes, names, ties, hooks, dtypes, devices, memory formats and `requires_grad` do not
    change. The graph stays valid: one trace is enough for any number of shrinks. If this raises, nothing has changed.

    Args:
        model: The model that was traced.
        graph: The graph that `keepk.trace` returned for this model.
        units: The numbers of the units to remove; see `Graph.groups` and `Graph.choose`. Units that depend on them are
            removed too.
        optimizer: The optimizer, or several. State with one entry per weight (momentum, Adam's moments) is cut like the
            parameters.
        followers: Copies of the model, averages of it (`AveragedModel`), or dicts of tensors under its names (at least
            of everything that is trained), which are cut in the same way.
        replay: Whether to run forward first at the new sizes, on a copy without weights, and refuse the cut if forward
            fails or computes something that the trace has not seen.

    Returns:
        The edits that were made: the removed units, and each tensor and attribute that changed.

    Raises:
        ShrinkError: The graph belongs to another model, a unit does not exist or cannot be removed, another object
            refers
            to a tensor that would be cut, or the replay failed.
        OptimizerError: The optimizer has state that cannot be cut, or does not hold the model's parameters.

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
    """A shrink that is ready to apply: everything is checked, every new tensor is made, nothing has changed yet.

    Attributes:
        model: The model.
        edits: The cuts.
        changes: The steps, in order.
        touched: The tensor objects that get new contents.
    """

    model: nn.Module
    edits: Edits
    changes: Sequence[Change]
    touched: Sequence[Tensor]

    def apply(self) -> Undo:
        """Put the new tensors in place, all or none.

        Returns:
            A function that puts the old ones back.
        """
        with torch.inference_mode(False), torch.no_grad():
            undo = all_or_nothing(self.changes)
        for tensor in self.touched:
            # `.data = ...` does not count as a write. Without this, torch would back-propagate an old loss through
            # tensors that it saved before the cut, where their shapes happen to allow it.
            torch.autograd.graph.increment_version(tensor)
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
    """Check a shrink and make its new tensors, without changing anything; the arguments are those of `shrink`.

    `wrapper` is a DDP wrapper around the model that will be discarded before the shrink is applied.
    """
    if not isinstance(model, nn.Module):
        raise ShrinkError(f"shrink: got {type(model).__name__} as the model. Pass the torch.nn.Module that was traced.")
    if not isinstance(graph, Graph):
        raise ShrinkError(
            f"shrink: got {type(graph).__name__} as the graph. Pass what keepk.trace(model, example) returns."
        )
    refuse_quantised(unwrap(model), ShrinkError)
    refuse_bad_followers(followers, model, "shrink")
    with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could not be trained
        inner = unwrap(model)
        refuse_other_model(inner, graph, {name: tensor for name, tensor, _ in named_tensors(inner)})
        edits = graph.edits(_numbers(units))
        if not len(edits.units):
            return Prepared(model, edits, (), ())
        refuse_missing_modules(inner, dict(inner.named_modules()), edits)
        refuse_holders(model, edits, wrapper)
        if replay:  # after the cheap checks: it runs forward
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
    names = all_names(inner)
    for place, (follower, tensors) in enumerate(zip(followers, following, strict=True)):
        refuse_follower(follower, tensors, expected_of(follower, named, edits), names, place)
    changes = [*cut_module(inner, named, edits), noted(inner, edits)]
    for optimizer in optimizers:
        changes += [*cut_states(optimizer, named, edits.cuts), new_history(optimizer)]
    for follower, tensors in zip(followers, following, strict=True):
        changes += _cut_follower(follower, tensors, edits, names)
    return Prepared(model, edits, [*changes, _new_graph(graph, edits)], [named[cut.tensor] for cut in edits.cuts])


def refuse_optimizers(optimizers: Sequence[Any], named: Mapping[str, Tensor], edits: Edits) -> None:
    """Refuse an optimizer whose state cannot be cut with the parameters."""
    for optimizer in optimizers:
        refuse_stranger(optimizer, [p for p in named.values() if isinstance(p, nn.Parameter)])
        refuse_factored(optimizer)
        touched = {named[cut.tensor]: cut.tensor for cut in edits.cuts if isinstance(named[cut.tensor], nn.Parameter)}
        refuse_foreign_state(optimizer, touched)  # type: ignore[arg-type]  # the filter leaves only parameters
    refuse_wrapping(optimizers)


def _numbers(units: Iterable[Any]) -> np.ndarray:
    """The units as an array of distinct ints; masks, shares and duplicates are refused."""
    _refuse_share(units)
    given = units.numpy(force=True) if isinstance(units, Tensor) else units
    if not (isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu"):
        # As objects, so that even an int beyond 64 bits reaches the graph, whose error says which units exist.
        given = np.array([_number(unit) for unit in given], object)
    numbers, counts = np.unique(given, return_counts=True)
    if (counts > 1).any():
        raise ShrinkError(f"shrink: unit {numbers[counts > 1][0]} is listed more than once. List each unit once.")
    return numbers


def _number(unit: Any) -> int:
    plain = unit.tolist() if hasattr(unit, "tolist") else unit
    if not isinstance(plain, int) or isinstance(plain, bool):
        raise ShrinkError(
            f"shrink: units contains {shown(plain)} ({type(plain).__name__}). Pass the units' numbers as ints; for a "
            f"mask over all units, numpy.flatnonzero(mask)."
        )
    return plain


def _refuse_share(units: object) -> None:
    try:
        iter(units)  # type: ignore[call-overload]  # by trying: a 0-dim tensor has __iter__, and calling it raises
    except TypeError:
        share = units if isinstance(units, float) else 0.5
        raise ShrinkError(
            f"shrink: units={shown(units)}. Pass the units' numbers; a share is graph.choose({share})."
        ) from None


def _listed(optimizer: object) -> list[Any]:
    if optimizer is None:
        return []
    return unwrapped_optimizers(optimizer if isinstance(optimizer, Sequence) else [optimizer])


def all_names(model: nn.Module) -> dict[str, list[str]]:
    """By the first name of a tensor, all names under which it is tied."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first, names = dict[int, str](), dict[str, list[str]]()
    for name, tensor in named:
        names.setdefault(first.setdefault(id(tensor), name), []).append(name)
    return names


def refuse_other_model(model: nn.Module, graph: Graph, named: Mapping[str, Tensor]) -> None:
    """Refuse a model whose tensors are not those of the graph, by name and shape."""
    for name in graph.wiring.shapes:
        expected = graph.shape(name)
        if name not in named or tuple(named[name].shape) != expected:
            got = f"has shape {tuple(named[name].shape)}" if name in named else "is not there"
            raise ShrinkError(
                f"shrink: the graph does not fit the model {type(model).__name__}: {name!r} should have shape "
                f"{expected} and {got}. Trace this model object; a model that was cut elsewhere needs a new trace."
            )
    for name in (name for name, tensor in named.items() if tensor.dim() and name not in graph.wiring.shapes):
        raise ShrinkError(
            f"shrink: {name!r} of {type(model).__name__}, of shape {tuple(named[name].shape)}, is not in the graph: it "
            f"was added to the model after the trace. Change the model first, then trace it."
        )


def cut_states(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor], cuts: Iterable[Cut]) -> list[Change]:
    """The changes that cut an optimizer's state of parameters, of which `named` has the tensors by name."""
    changes = list[Change]()
    for cut in cuts:
        parameter = named[cut.tensor]
        if isinstance(parameter, nn.Parameter):
            mine = {id(tensor) for tensor in state_per_weight(optimizer, parameter)}
            state = optimizer.state.get(parameter, {})
            changes += [new_entry(state, key, left_of(v, cut)) for key, v in state.items() if id(v) in mine]
    return changes


def new_history(optimizer: torch.optim.Optimizer) -> Change:
    """A change that clears the history of LBFGS, in which all weights have places; others are left alone."""

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


def expected_of(follower: object, named: Mapping[str, Tensor], edits: Edits) -> list[Cut]:
    """The cuts that a follower has to follow: a module has every tensor, a dict may have only the trained ones."""
    if isinstance(follower, dict):
        return [cut for cut in edits.cuts if cut.tensor in follower or named[cut.tensor].requires_grad]
    return list(edits.cuts)


def _cut_follower(
    follower: object, tensors: Mapping[str, Tensor], edits: Edits, names: Mapping[str, list[str]]
) -> Iterator[Change]:
    if isinstance(follower, nn.Module):
        yield from cut_module(followed(follower), tensors, edits)
        yield noted(followed(follower), edits)
    elif isinstance(follower, dict):
        for cut in edits.cuts:
            tied = [name for name in names[cut.tensor] if name in follower]
            yield from (new_entry(follower, name, left_of(follower[name], cut)) for name in tied)
