"""Removing channels during a run: physically, or as masks over a model that keeps its shape."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.hold import Masks
from keepk.cut.shrink import Prepared, prepare
from keepk.cut.tensors import doomed, left_of, silencing
from keepk.cut.undo import Undo
from keepk.cut.verify import refuse_unfit
from keepk.errors import ShrinkError
from keepk.graph.edits import Cut, Edits, Indices
from keepk.graph.graph import Graph
from keepk.graph.maps import Flags
from keepk.graph.weight_norm import lengths_of
from keepk.graph.wrappers import named_parameters
from keepk.rank.changed import changed_model, refuse_other_parameters

# Which removals are replayed at their own sizes before they are made: cuts, or masks as well that will be cut later.
Replayed: TypeAlias = Literal["none", "cuts", "masks"]


@dataclass(frozen=True)
class Operation:
    """A removal of channels that is ready; nothing has changed yet.

    Attributes:
        edits: What it does, or would do, to the model as it is now.
        cuts: The same by parameter, under the name that it has without wrappers.
        prepared: The physical shrink; None where channels are masked only.
    """

    edits: Edits
    cuts: Mapping[str, Cut]
    prepared: Prepared | None

    @property
    def gone(self) -> Indices:
        """The units that go, those of no space too, which nobody reads any more."""
        return self.edits.units

    @property
    def flags(self) -> Flags:
        """The same as flags, up to the last of them."""
        flags = np.zeros(int(self.gone.max(initial=-1)) + 1, bool)
        flags[self.gone] = True
        return flags

    def shape_of(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """The shape that a parameter has afterwards."""
        return self.cuts[name].after if self.prepared and name in self.cuts else tuple(parameter.shape)

    def after(self, masks: Masks) -> Masks:
        """Masks over the model as it is now, as masks over the model as it is afterwards."""
        if self.prepared is None:
            return masks
        return {name: left_of(mask, self.cuts[name]) if name in self.cuts else mask for name, mask in masks.items()}

    def apply(self) -> Undo:
        """Take the channels out, if that is what it does. What is returned takes it back."""
        if self.prepared is None:
            return nothing
        undo = self.prepared.apply()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()  # who compiled the model is not known, and torch gives up after a few new shapes
        return undo


class Surgery:
    """Who is operated on: the model, its optimizers, and who follows its weights."""

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        optimizers: Sequence[torch.optim.Optimizer],
        followers: Sequence[nn.Module | dict[str, Tensor]],
        replayed: Replayed = "cuts",
    ) -> None:
        self._model, self._graph, self._replayed = model, graph, replayed
        self._optimizers, self._followers = optimizers, followers
        self._parameters = named_parameters(model)
        self._lengths = lengths_of(model)

    def operation(self, dead: Flags, going: Iterable[int], *, physical: bool, wrapper: nn.Module | None) -> Operation:
        """What removes these units, and those that are masked so far."""
        refuse_other_parameters(self._model, self._parameters, ShrinkError)
        masked = np.flatnonzero(dead & self._graph.alive)
        units = np.union1d(masked, np.fromiter(going, np.int64))
        if not physical:
            edits = self._graph.edits(units)
            self._refuse_other_shapes(cuts := self._by_name(edits))
            if self._replayed == "masks":
                refuse_unfit(self._model, self._graph, edits)
            return Operation(edits, cuts, None)
        prepared = prepare(
            self._model,
            self._graph,
            units,
            optimizer=list(self._optimizers),
            followers=self._followers,
            wrapper=wrapper,
            replay=self._replayed != "none",
        )
        return Operation(prepared.edits, self._by_name(prepared.edits), prepared)

    def doomed(self, operation: Operation, names: Iterable[str] | None = None) -> Masks:
        """By parameter, the numbers that go, or that masks make zero instead; of all parameters, or of these."""
        wanted = self._parameters if names is None else set(names)
        cuts = {name: cut for name, cut in operation.cuts.items() if name in wanted}
        if operation.prepared is None:
            lengths = {name: self._lengths.get(self._parameters[name]) for name in cuts}
            cuts = {name: silencing(cut, lengths[name]) for name, cut in cuts.items()}
        found = {name: doomed(cut, self._parameters[name].device) for name, cut in cuts.items()}
        return {name: mask for name, mask in found.items() if mask.any()}

    def _by_name(self, edits: Edits) -> dict[str, Cut]:
        return by_plain_name(self._model, {cut.tensor: cut for cut in edits.cuts})

    def _refuse_other_shapes(self, cuts: Mapping[str, Cut]) -> None:
        for name, cut in cuts.items():
            if tuple(self._parameters[name].shape) != cut.before:
                got = tuple(self._parameters[name].shape)
                raise changed_model(
                    ShrinkError, name, f"has shape {got}, but the Pruner left it with shape {cut.before}"
                )


def by_plain_name(model: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Cut]:
    """The cuts of parameters under the names that they have without wrappers."""
    own = (name for name, _ in model.named_parameters(remove_duplicate=False))
    plain = dict(zip(own, named_parameters(model), strict=True))
    return {plain[name]: cut for name, cut in cuts.items() if name in plain}


def nothing() -> None:
    """Nothing was changed, so there is nothing to take back."""
