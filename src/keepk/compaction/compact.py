"""`compact`: remove the units that weight pruning has left without inputs or without readers.

Each sweep traces the model, computes on a copy which elements can influence which (`influence`), folds constant
channels into biases and finds the units that are then provably dead (`dead_units`), and removes those. Removing units
may leave others without inputs or readers, so sweeps are repeated until one finds nothing.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from keepk.compaction.dead_units import (
    common_constants,
    dead_units,
    fold,
    read_constants,
    reader_paths,
    removable,
    would_matter,
)
from keepk.compaction.influence import Flow, NotFollowed
from keepk.cut.holders import Follower, tensors_of
from keepk.cut.masks import refuse_stranger
from keepk.cut.record import certified_alive
from keepk.cut.shrink import prepare
from keepk.errors import ShrinkError
from keepk.graph.graph import Graph
from keepk.graph.ids.maps import Flags
from keepk.graph.trace import trace_inputs
from keepk.model.copies import META, Workshop
from keepk.model.edits import Change, Edits, Undo, all_or_nothing, replaced
from keepk.model.example import Example, TraceInputs, TrainMode, ValueBranches, not_a_model, refuse_quantised
from keepk.model.names import unwrap
from keepk.model.torch_internals import tree_leaves, tree_map


@dataclass(frozen=True)
class Compaction:
    """The result of `compact`.

    Attributes:
        rounds: The number of sweeps that found something.
        unread: Units removed because nothing that they compute reaches the output.
        unfed: Units removed because no input reaches them.
        folded: How many of the `unfed` units were nonzero constants, folded into biases.
        edits: The cuts, one entry per round.
        parameters_before: The number of parameters of the model before.
        parameters_after: The number of parameters of the model now.
        note: Why nothing more could be proved dead; empty if the forward pass could be followed.
    """

    rounds: int
    unread: int
    unfed: int
    folded: int
    edits: tuple[Edits, ...]
    parameters_before: int
    parameters_after: int
    note: str = ""

    @property
    def removed(self) -> dict[str, int]:
        """The number of removed units, by reason."""
        return {"unread": self.unread, "unfed": self.unfed}

    @property
    def units(self) -> int:
        """The number of removed units."""
        return self.unread + self.unfed

    def __len__(self) -> int:
        return self.units

    def __repr__(self) -> str:
        # The default repr would print every kept index of every cut tensor.
        return f"<Compaction: {self}>"

    def __str__(self) -> str:
        """A summary in one line."""
        if self.note and not self.units:
            return f"nothing removed: {self.note}"
        reasons = f"{self.unread} without a reader, {self.unfed} without an input, {self.folded} folded into biases"
        sizes = f"{self.parameters_before:,} -> {self.parameters_after:,} parameters"
        rounds = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        return f"{self.units} dead units removed in {rounds} ({reasons}): {sizes}"


def compact(
    model: nn.Module,
    example: Any = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    examples: Sequence[Any] | None = None,
    training_example: Any = None,
    train_mode: TrainMode = "check",
    value_branches: ValueBranches = "check",
    followers: Sequence[Follower] = (),
) -> Compaction:
    """Remove units that are dead because of zeros among the weights, in place; outputs in eval mode do not change.

    A unit is dead if nothing that it computes reaches the output, or if no input reaches it. In the second case it is a
    constant c, which is folded into the biases of the layers that read it, b + W c. If that is not exact (because of
    zero padding, or without a bias), the unit stays. Every layer keeps at least one unit.

    Args:
        model: A model in which some weights are zero.
        example: An input of forward: a tensor, a tuple of positional arguments, or a dict of keyword arguments. Removed
            units are dead for all inputs of these shapes, whatever their values, and for any batch size.
        optimizer: The optimizer, or several, whose state is cut like the parameters.
        examples: Several inputs, for a model that takes different paths; a unit is removed if it is dead for all.
        training_example: The input of forward in train mode, if it differs; see `keepk.trace`.
        train_mode: See `keepk.trace`.
        value_branches: See `keepk.trace`.
        followers: Copies and averages of the model, which are cut in the same way; folded constants are added to their
            biases.

    Returns:
        How many units were removed and why, and the cuts. If the forward pass cannot be followed (it draws random
        numbers, writes into a buffer, looks at values), `note` says so.

    Raises:
        ShrinkError: The model, a follower or another holder of its tensors cannot be cut; nothing has changed.
        OptimizerError: The optimizer does not hold the model's parameters, or its state cannot be cut.
        TraceError: The model cannot be traced with these examples.

    Examples:
        >>> import keepk
        >>> net = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3))
        >>> with torch.no_grad():
        ...     net[0].weight[:2] = 0  # no input reaches these two
        ...     net[2].weight[:, 3:] = 0  # and no layer reads these three
        >>> print(compact(net, torch.zeros(2, 4)))
        5 dead units removed in 1 round (3 without a reader, 2 without an input, 2 folded into biases):
        51 -> 11 parameters
    """
    if not isinstance(model, nn.Module):
        raise ShrinkError(f"compact: {not_a_model(model)}")
    refuse_quantised(unwrap(model), ShrinkError)
    # Check this before the sweep, so that a wrong optimizer is refused even if nothing is dead.
    given = optimizer if isinstance(optimizer, Sequence) else () if optimizer is None else (optimizer,)
    for each in given:
        refuse_stranger(each, model.parameters())
    inputs = TraceInputs.of(example, examples, training_example, train_mode, value_branches)
    before, note, done = _count(model), "", list[tuple[_Found, Edits]]()
    with ExitStack() as undos, torch.inference_mode(False), torch.no_grad():
        try:
            while (found := _sweep(model, inputs, first=not done)).gone.any():
                undo, edits = _commit(model, found, optimizer, followers)
                undos.callback(undo)
                done.append((found, edits))
        except NotFollowed as reason:
            note = str(reason)
        if done:
            undos.callback(certified_alive(unwrap(model))())
        undos.pop_all()
    return Compaction(
        rounds=len(done),
        unread=sum(int((found.gone & ~found.unfed).sum()) for found, _ in done),
        unfed=sum(int(found.unfed.sum()) for found, _ in done),
        folded=sum(int(found.folded.sum()) for found, _ in done),
        edits=tuple(edits for _, edits in done),
        parameters_before=before,
        parameters_after=_count(model),
        note=note,
    )


@dataclass(frozen=True)
class _Found:
    """The result of one sweep.

    Attributes:
        graph: The trace that it used.
        gone: The units to remove.
        unfed: The units among them that no input reaches.
        folded: The units among them that were nonzero constants, folded into biases.
        biases: New values of biases, by name.
    """

    graph: Graph
    gone: Flags
    unfed: Flags
    folded: Flags
    biases: dict[str, Tensor]


def _sweep(model: nn.Module, inputs: TraceInputs, *, first: bool) -> _Found:
    """Find the dead units of a model on a copy, folding only the constants of units that can be removed."""
    graph, inner = trace_inputs(model, inputs), unwrap(model)
    if first:
        for example in inputs.examples:
            _refuse_looking(inner, example)
    nothing = np.zeros(len(graph.units), bool)
    if not len(graph.units):
        return _Found(graph, nothing, nothing, nothing, {})
    workshops = [Workshop(inner, example, None) for example in inputs.examples]
    copy = workshops[0].copy()
    flows = [Flow(copy, reader_paths(copy)).run(workshop) for workshop in workshops]
    constants = common_constants([read_constants(copy, flow) for flow in flows])
    matters = np.any([would_matter(graph, copy, flow) for flow in flows], axis=0)
    wanted = ~graph.units.lossy
    while True:
        lost, folded = fold(graph, copy, constants, wanted)
        after = [Flow(copy, ()).run(workshop) for workshop in workshops] if lost.any() else flows
        dead = np.all([dead_units(graph, copy, flow) for flow in after], axis=0)
        chosen = removable(graph, dead & wanted)
        if not (lost & ~chosen).any():
            return _Found(graph, chosen, chosen & (lost | matters), folded, _new_biases(copy, inner))
        # Some folded units have to stay, for example because their layer needs equal numbers per group. Folding them
        # changes biases to no purpose, so start over from the original weights with fewer units.
        wanted = chosen
        for mine, original in zip(copy.parameters(), inner.parameters(), strict=True):
            mine.copy_(original)


def _new_biases(copy: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    old = dict(model.named_parameters())
    biases = [(name, new) for name, new in copy.named_parameters() if name.rpartition(".")[2] == "bias"]
    return {name: new.detach() for name, new in biases if not torch.equal(new, old[name])}


def _refuse_looking(model: nn.Module, example: Example) -> None:
    """Refuse a forward that may branch on values. One that runs on the meta device, which has no values, cannot."""
    workshop = Workshop(model, example, META)
    try:
        with workshop.running() as given, _WithoutValues():
            workshop.copy()(*given.arguments, **given.by_name)
    except Exception as error:
        raise NotFollowed(f"forward seems to look at values ({type(error).__name__}: {error})") from error


class _WithoutValues(TorchFunctionMode):
    """Moves the other tensors of an operation on the meta device there too, such as a table in a global cache."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if len({tensor.is_meta for tensor in tensors}) > 1:
            args, kwargs = tree_map(lambda leaf: leaf.to(META) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _commit(
    model: nn.Module,
    found: _Found,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    followers: Sequence[Follower],
) -> tuple[Undo, Edits]:
    """Apply new biases and cuts as one transaction; returns its undo, and the cuts."""
    changes = list[Change]()
    named = dict(unwrap(model).named_parameters())
    following = [tensors_of(follower) for follower in followers]
    for name, new in found.biases.items():
        changes.append(_new_values(named[name], new))
        for held in (held[name] for held in following if name in held):
            # Checked explicitly, before any change, because broadcasting would hide some wrong shapes below.
            if held.shape != new.shape:
                raise ShrinkError(
                    f"followers: {name!r} has shape {tuple(held.shape)}, the model's {tuple(new.shape)}. "
                    f"Pass a follower to every shrink of the model, or make a new copy of the model."
                )
            changes.append(_new_values(held, held + (new - named[name]).to(held)))
    done = list[Edits]()

    def cut() -> Undo:
        # Prepared only after the biases have their new values, because preparing copies the values that are kept.
        units = np.flatnonzero(found.gone).tolist()
        prepared = prepare(model, found.graph, units, optimizer=optimizer, followers=followers)
        done.append(prepared.edits)
        return prepared.apply()

    return all_or_nothing([*changes, cut]), done[0]


def _new_values(bias: Tensor, values: Tensor) -> Change:
    return replaced(bias.detach().clone, bias.detach().copy_, values)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
