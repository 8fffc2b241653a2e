"""A decided event: the channels to remove or mask, and the new masks of weights.

An `Event` is decided first and applied afterwards, so that everything that can be refused is refused while the model is
still whole, and so that several processes can compare their decisions before any of them changes a tensor.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from keepk.plan.portions import Split
from keepk.rank.changed import changed_model, refuse_other_parameters

# Which removals are replayed at their own sizes before they are made: physical cuts, or also masks that are cut later.
Replayed: TypeAlias = Literal["none", "cuts", "masks"]


def nothing() -> None:
    """The undo of a change that changed nothing."""


@dataclass(frozen=True)
class Operation:
    """A prepared removal of channels; nothing has changed yet.

    Attributes:
        edits: The changes that it makes, or that a later removal of masked channels would make.
        cuts: The same by parameter, under the name without wrappers.
        prepared: The physical removal; None where channels are only masked.
        parameters: The model's parameters, by the same names.
        lengths: By direction of weight norm, the parameter with its lengths.
    """

    edits: Edits
    cuts: Mapping[str, Cut]
    prepared: Prepared | None
    parameters: Mapping[str, nn.Parameter] = field(repr=False)
    lengths: Mapping[nn.Parameter, nn.Parameter] = field(repr=False)

    @property
    def gone(self) -> Indices:
        """The removed units, with those outside every space that nothing reads any more."""
        return self.edits.units

    @property
    def flags(self) -> Flags:
        """The same as flags, up to the last removed unit."""
        flags = np.zeros(int(self.gone.max(initial=-1)) + 1, bool)
        flags[self.gone] = True
        return flags

    def shape_of(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """The shape of a parameter afterwards."""
        return self.cuts[name].after if self.prepared and name in self.cuts else tuple(parameter.shape)

    def after(self, masks: Masks) -> Masks:
        """Masks over the model as it is now, cut to the shapes of the model afterwards."""
        if self.prepared is None:
            return masks
        return {name: left_of(mask, self.cuts[name]) if name in self.cuts else mask for name, mask in masks.items()}

    def doomed(self, names: Iterable[str] | None = None) -> Masks:
        """By parameter, the entries that are removed, or that masks set to zero instead.

        Args:
            names: The parameters of interest; None for all. A mask is as large as its parameter, so ask for few.
        """
        wanted = self.parameters if names is None else set(names)
        cuts = {name: cut for name, cut in self.cuts.items() if name in wanted}
        if self.prepared is None:
            # A masked channel of weight norm is silenced by its length; its direction stays.
            lengths = {name: self.lengths.get(self.parameters[name]) for name in cuts}
            cuts = {name: silencing(cut, lengths[name]) for name, cut in cuts.items()}
        found = {name: doomed(cut, self.parameters[name].device) for name, cut in cuts.items()}
        return {name: mask for name, mask in found.items() if mask.any()}

    def apply(self) -> Undo:
        """Remove the channels, unless they are only masked; returns the undo."""
        if self.prepared is None:
            return nothing
        undo = self.prepared.apply()
        if "torch._dynamo" in sys.modules:
            # Any module may have been compiled by the user, and torch stops recompiling after a few new shapes.
            torch.compiler.reset()
        return undo


NO_OPERATION = Operation(Edits(np.zeros(0, np.int64), (), (), (), ()), {}, None, {}, {})


@dataclass(frozen=True)
class Event:
    """The decisions of one event, before anything changes. Each side adds its own with `dataclasses.replace`.

    Attributes:
        epoch: Which entry of the plan is due, from 0.
        wrapper: The DDP wrapper that the user passed to `Pruner.step`.
        operation: The removal or masking of channels.
        chains: By channel space, the splits that lead on to K; see `plan.portions`.
        masks: The new masks of weights (True where pruned), over the model as it is now.
        due: By weight space that is pruned at this event, its new count.
    """

    epoch: int
    wrapper: nn.Module | None = None
    operation: Operation = NO_OPERATION
    chains: Mapping[str, tuple[Split, ...]] = field(default_factory=dict)
    masks: Masks = field(default_factory=dict)
    due: Mapping[str, int] = field(default_factory=dict)

    @property
    def told(self) -> list[Tensor]:
        """The decisions that all processes must agree on, as flags."""
        return [*self.masks.values(), torch.from_numpy(self.operation.flags)]

    @property
    def cuts(self) -> bool:
        """Whether it changes the shapes of the model."""
        return self.operation.prepared is not None

    @property
    def prunes(self) -> bool:
        """Whether any unit is pruned."""
        return bool(self.masks) or len(self.operation.gone) > 0


class Surgery:
    """Prepares removals for one model, its optimizers and its followers."""

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
        """Prepare the removal of the units `going`, and of those in `dead` that are masked so far."""
        refuse_other_parameters(self._model, self._parameters, ShrinkError)
        # Masked units are part of every operation: their masks are made again from it, or they are removed by it.
        masked = np.flatnonzero(dead & self._graph.alive)
        units = np.union1d(masked, np.fromiter(going, np.int64))
        if physical:
            prepared = prepare(
                self._model,
                self._graph,
                units,
                optimizer=list(self._optimizers),
                followers=self._followers,
                wrapper=wrapper,
                replay=self._replayed != "none",
            )
            cuts = by_plain_name(self._model, prepared.edits)
            return Operation(prepared.edits, cuts, prepared, self._parameters, self._lengths)
        edits = self._graph.edits(units)
        cuts = by_plain_name(self._model, edits)
        for name, cut in cuts.items():  # `prepare` checks this for physical removals
            if (got := tuple(self._parameters[name].shape)) != cut.before:
                raise changed_model(
                    ShrinkError, name, f"has shape {got}, but the Pruner left it with shape {cut.before}"
                )
        if self._replayed == "masks":  # they will be cut at the end, where a refusal would come too late
            refuse_unfit(self._model, self._graph, edits)
        return Operation(edits, cuts, None, self._parameters, self._lengths)


def by_plain_name(model: nn.Module, edits: Edits | Mapping[str, Cut]) -> dict[str, Cut]:
    """The cuts of parameters under their names without wrappers; cuts of buffers are left out."""
    cuts = {cut.tensor: cut for cut in edits.cuts} if isinstance(edits, Edits) else edits
    own = (name for name, _ in model.named_parameters(remove_duplicate=False))
    plain = dict(zip(own, named_parameters(model), strict=True))
    return {plain[name]: cut for name, cut in cuts.items() if name in plain}
