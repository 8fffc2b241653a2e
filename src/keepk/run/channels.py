"""The channel spaces of a run: which channels are left, and which are pruned at the next event.

An `Event` holds the channels to remove or mask, and the new masks of weights. It is decided first and applied
afterwards, so that everything that can be refused is refused before the model changes, and so that distributed
processes can compare their decisions before any of them changes a tensor.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.masks import Masks
from keepk.cut.record import Places
from keepk.cut.sharded import PreparedShards, Wrap
from keepk.cut.shrink import Prepared, prepare
from keepk.errors import RankError, ShrinkError, StateError
from keepk.graph.graph import Graph
from keepk.graph.ids.maps import Flags
from keepk.graph.probe.verify import refuse_unfit
from keepk.metrics.channels import bn_scale, channel_scores, collected_terms, product, reads_scales
from keepk.metrics.layers import Layer, Parameters, Use, layers_of
from keepk.model.edits import Cut, Edits, Indices, Undo, doomed, left_of, silencing, undone_by
from keepk.model.names import changed_model, lengths_of, named_parameters, refuse_other_parameters
from keepk.model.sharded import Block
from keepk.plan.budgets import WORDS
from keepk.plan.names import shown
from keepk.plan.phases import Plan
from keepk.plan.portions import Split
from keepk.run.channel_members import ChannelMembers, unit_sizes
from keepk.run.choosing import Chooser, Ranking, RunBudget, RunCosts, first_chains, ranked
from keepk.run.counting import count_channels, masked_places
from keepk.run.distributed import Exchange, Flagged
from keepk.run.state import Saved
from keepk.run.warnings import Watch

# Which removals are replayed first: none, physical cuts only, or also masked channels that are cut later.
Replayed: TypeAlias = Literal["none", "cuts", "masks"]


def nothing() -> None:
    """Do nothing: the undo of an empty change."""


@dataclass(frozen=True)
class Operation:
    """A prepared removal of channels; nothing has changed yet.

    Attributes:
        edits: The changes that it makes, or that a later removal of masked channels would make.
        cuts: The cuts of `edits` by parameter, under names without wrappers.
        prepared: The physical removal; None if channels are only masked.
        parameters: The model's parameters, by the same names.
        lengths: By direction parameter of weight norm, its length parameter.
    """

    edits: Edits
    cuts: Mapping[str, Cut]
    prepared: Prepared | PreparedShards | None
    parameters: Mapping[str, nn.Parameter] = field(repr=False)
    lengths: Mapping[nn.Parameter, nn.Parameter] = field(repr=False)

    @property
    def gone(self) -> Indices:
        """The removed units, including those outside of all spaces that nothing reads any more."""
        return self.edits.units

    @property
    def renewed(self) -> Mapping[int, nn.Parameter]:
        """By id of a sharded parameter that is cut, the one that takes its place."""
        return self.prepared.renewed if isinstance(self.prepared, PreparedShards) else {}

    @property
    def flags(self) -> Flags:
        """`gone` as flags by unit, up to the last removed one."""
        flags = np.zeros(int(self.gone.max(initial=-1)) + 1, bool)
        flags[self.gone] = True
        return flags

    def shape_of(self, name: str, parameter: Tensor) -> tuple[int, ...]:
        """The shape of a parameter after the removal."""
        return self.cuts[name].after if self.prepared and name in self.cuts else tuple(parameter.shape)

    def after(self, masks: Masks) -> Masks:
        """The masks, which fit the model as it is now, cut to the shapes after the removal."""
        if self.prepared is None:
            return masks
        return {name: left_of(mask, self.cuts[name]) if name in self.cuts else mask for name, mask in masks.items()}

    def doomed(self, names: Iterable[str] | None = None) -> Masks:
        """By parameter, a mask of the entries that are removed, or zeroed if channels are only masked.

        Args:
            names: The parameters to return masks for; None for all. A mask is as large as its parameter.
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
            # The user may have compiled any module, and torch stops recompiling after a few new shapes.
            torch.compiler.reset()
        return undo


NO_OPERATION = Operation(Edits(np.zeros(0, np.int64), (), (), (), ()), {}, None, {}, {})


@dataclass(frozen=True)
class Event:
    """The decisions of one event, before anything changes. Each side adds its decisions with `dataclasses.replace`.

    Attributes:
        epoch: The entry of the plan to carry out, from 0.
        wrapper: The DDP wrapper that the user passed to `Pruner.step`.
        wrap: The function that shards the model, which the user passed to `Pruner.step`.
        operation: The removal or masking of channels.
        chains: By channel space, the splits that lead on to K; see `plan.portions`.
        masks: The new masks of weights (True where pruned), in the current shapes; for a sharded parameter, that of its
            local part.
        due: By weight space that is pruned at this event, its new count.
        left: By sharded parameter with a new mask, how many weights of the whole parameter are left.
        blocks: By sharded parameter with a new mask, where its local part lies.
        exchange: Sums over processes, for the sides that need them.
    """

    epoch: int
    exchange: Exchange = field(repr=False, compare=False)
    wrapper: nn.Module | None = None
    wrap: Wrap | None = None
    operation: Operation = NO_OPERATION
    chains: Mapping[str, tuple[Split, ...]] = field(default_factory=dict)
    masks: Masks = field(default_factory=dict)
    due: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    blocks: Mapping[str, Block] = field(default_factory=dict)

    @property
    def flags(self) -> Flagged:
        """The decisions that processes must agree on."""
        divided = {name: it for name, it in self.blocks.items() if not it.everywhere}
        common = [mask for name, mask in self.masks.items() if name not in divided]
        shards = [mask for name, mask in self.masks.items() if name in divided]
        # The hash of a tuple of ints is the same in all processes.
        place = hash(tuple(number for block in divided.values() for number in (*block.starts, *block.sizes)))
        return Flagged([*common, torch.from_numpy(self.operation.flags)], shards, place)

    @property
    def cuts(self) -> bool:
        """Whether it changes shapes of the model's tensors."""
        return self.operation.prepared is not None

    @property
    def prunes(self) -> bool:
        """Whether any unit is pruned."""
        return bool(self.masks) or len(self.operation.gone) > 0


class AnySurgery(Protocol):
    """Prepares removals: `Surgery`, or `ShardedSurgery` for models that are sharded over processes."""

    @property
    def replays(self) -> bool:
        """Whether removals are tried on a copy first."""

    def operation(
        self,
        dead: Flags,
        going: Iterable[int],
        *,
        physical: bool,
        wrapper: nn.Module | None = None,
        wrap: Wrap | None = None,
    ) -> Operation:
        """Prepare a removal; see `Surgery.operation`."""


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

    @property
    def replays(self) -> bool:
        """Whether removals are tried on a copy first."""
        return self._replayed != "none"

    def operation(
        self,
        dead: Flags,
        going: Iterable[int],
        *,
        physical: bool,
        wrapper: nn.Module | None = None,
        wrap: Wrap | None = None,
    ) -> Operation:
        """Prepare the removal of the units `going`, and of the units in `dead` that are still masked.

        Args:
            dead: By unit, whether it was pruned before.
            going: The units to prune now.
            physical: Whether to remove channels from the tensors, or only to mask them.
            wrapper: The DDP wrapper of the model, which will be rebuilt after a physical removal.
            wrap: A function that shards the model; refused here.
        """
        if wrap is not None:
            raise ShrinkError(
                "step: wrap= is for models that are sharded over processes, and this one is not. Omit it."
            )
        refuse_other_parameters(self._model, self._parameters, ShrinkError)
        # Units that are already masked are part of every operation, which either masks them again or removes them.
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
                replay=self.replays,
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
        if self._replayed == "masks":  # these channels will be cut at the end, too late to refuse them then
            refuse_unfit(self._model, self._graph, edits)
        return Operation(edits, cuts, None, self._parameters, self._lengths)


def by_plain_name(model: nn.Module, edits: Edits | Mapping[str, Cut]) -> dict[str, Cut]:
    """By parameter name without wrappers, its cut; buffers are left out."""
    cuts = {cut.tensor: cut for cut in edits.cuts} if isinstance(edits, Edits) else edits
    own = (name for name, _ in model.named_parameters(remove_duplicate=False))
    plain = dict(zip(own, named_parameters(model), strict=True))
    return {plain[name]: cut for name, cut in cuts.items() if name in plain}


class ChannelSide:
    """The channel spaces of a run over one graph; see `run.session.Side`.

    Attributes:
        graph: The traced model. Its `alive` says what is physically there.
        members: The spaces by name, with their units.
        dead: By unit, whether it is pruned. A pruned unit is either removed, or masked and still `graph.alive`.
        zeroed: By parameter, a mask of the entries of masked channels; empty once they are removed.
        certified: By space, the number of channels left by the last event, before `keepk.compact` or `keepk.shrink`
            removed more.
        budgets: The budgets of the run.
        reached: By budget, the cost of the model after the last event.
    """

    kind = "channels"

    def __init__(
        self,
        graph: Graph,
        model: nn.Module,
        members: Mapping[str, ChannelMembers],
        surgery: AnySurgery,
        watch: Watch,
        *,
        plan: Plan,
        shrink: str,
        budgets: Sequence[RunBudget] = (),
        costs: RunCosts | None = None,
    ) -> None:
        self.graph, self.members, self.budgets, self._costs = graph, members, budgets, costs
        self._model, self._surgery, self._shrink, self._watch = model, surgery, shrink, watch
        self._parameters = Parameters.of(model)
        self._plan = {name: plan[name] for name, it in members.items() if it.keep is not None}
        self._fixed = {name: it.fixed for name, it in members.items()}
        self._chains = first_chains(members, self._plan)
        self.dead: Flags = np.zeros(len(graph.units), bool)
        self.zeroed: Masks = {}
        self._cut_elsewhere: str | None = None  # a tensor that was cut outside of this run
        self.certified = self.kept
        self.reached = {it.name: it.dense for it in budgets}
        self._history: dict[str, tuple[int, ...]] = {name: () for it in budgets for name in it.spaces}

    def warn_of_uncounted(self) -> None:
        """Warn about layers with channels that their space does not count, and about units that do not compare."""
        for name, it in self.members.items():
            self._watch.mixed_units(name, *unit_sizes(self.graph, it))
            layers = [(u.layer, u.channels, u.width, u.why) for u in it.uncounted]
            self._watch.uncounted(name, it.keep, it.total, layers)

    @property
    def uses(self) -> list[Use]:
        """The metrics that read statistics, with the channels that are left now."""
        found = {name: collected_terms(it.space.metric) for name, it in self.members.items()}
        return [Use(name, term, layers=self.layers(name)) for name, terms in found.items() for term in terms]

    @property
    def kept(self) -> dict[str, int]:
        """By space: how many channels are left."""
        return {name: it.total - int(self.dead[it.units].sum()) for name, it in self.members.items()}

    @property
    def counted(self) -> dict[str, int]:
        """By space: how many channels the model's tensors have now, including masked ones that are no longer zero."""
        return count_channels(self.members, self.graph, self.dead, self.zeroed, self._model)

    @property
    def masks(self) -> Masks:
        """By parameter with masked channels: a mask of the entries that are kept."""
        return {name: ~mask for name, mask in self.zeroed.items()}

    @property
    def sizes(self) -> dict[str, Any]:
        """By space: its layers and their widths when the run began. A saved state must have the same ones."""
        return {name: {layer.module: len(layer.units) for layer in it.layers} for name, it in self.members.items()}

    @property
    def places(self) -> dict[str, Places]:
        """By space with masked channels: their positions in the parameters."""
        masked = self.dead & self.graph.alive
        return masked_places(self.members, self.graph, masked, self._model) if masked.any() else {}

    def layers(self, name: str) -> list[Layer]:
        """The remaining channels of a space, layer by layer, in the form that metrics take."""
        members = self.members[name]
        return layers_of(self.graph, self._parameters, members.layers, ~self.dead, members.space.at)

    def decide(self, event: Event) -> Event:
        """Choose the channels to prune, and prepare their removal or masks; nothing changes."""
        # The plan counts channels that no longer exist, so it could not end at K.
        if self._cut_elsewhere is not None:
            raise ShrinkError(
                f"parameter {self._cut_elsewhere!r}: was cut by keepk.compact or keepk.shrink, so the channels no "
                f"longer fit the plan. Cut the model before the Pruner is made, or after its plan has ended."
            )
        chooser = self._chooser()
        chooser.event(event.epoch)
        going = np.flatnonzero(chooser.dead & ~self.dead)
        for name, ranking in chooser.rankings.items():
            self._warn_of_ranking(self.members[name], ranking, going)
        chains = chooser.chains
        ends = all(counts[event.epoch] == self.members[name].keep for name, counts in self._plan.items())
        ends &= all(it.plan[event.epoch] == it.target for it in self.budgets)
        physical = self._shrink == "each" or (self._shrink == "end" and ends)
        waiting = (self.dead & self.graph.alive).any()  # masked by an earlier event, and not removed yet
        if not len(going) and not (physical and waiting):
            return replace(event, chains=chains)
        operation = self._surgery.operation(self.dead, going, physical=physical, wrapper=event.wrapper, wrap=event.wrap)
        self._refuse_other_counts(going, operation.gone)
        if operation.prepared is not None:
            self._refuse_other_costs(chooser.dead, operation)
        return replace(event, chains=chains, operation=operation)

    @property
    def implied(self) -> dict[str, tuple[int, ...]]:
        """By space of a budget: the channels kept after each event, as today's ranking implies for those to come."""
        chooser, found = self._chooser(), dict(self._history)
        past = min((len(counts) for counts in found.values()), default=0)
        for epoch in range(past, len(self.budgets[0].plan) if found else 0):
            chooser.event(epoch)
            found = {name: (*counts, chooser.kept(name)) for name, counts in found.items()}
        return found

    def _chooser(self) -> Chooser:
        """Chooses the channels of the next events by the present ranking."""
        return Chooser(
            self.members,
            self._plan,
            self.budgets,
            self._costs,
            lambda name: ranked(self.graph, self._parameters, self.members[name], self.dead),
            self.dead,
            self._chains,
        )

    def apply(self, event: Event) -> Undo:
        """Remove the channels of an event, or store their masks; returns the undo of the removal."""
        with undone_by(undo := event.operation.apply()):
            self.dead = self.dead.copy()  # a snapshot may still refer to the old flags
            if event.operation.renewed:
                self._parameters = Parameters.of(self._model)
            self.dead[event.operation.gone] = True
            self._chains = dict(event.chains)
            if len(event.operation.gone):
                self.zeroed = {} if event.cuts else event.operation.doomed()
            self.certified = kept = self.kept
            self._history = {name: (*counts, kept[name]) for name, counts in self._history.items()}
            self.reached = self._reached(self.dead)
            return undo

    def follow_cuts(self, cuts: Mapping[str, Cut], follow: Callable[[Masks], Masks]) -> None:
        """Mark units as dead that were removed outside of this run, and cut the masks."""
        self._cut_elsewhere = next(iter(cuts), None)
        gone = self.graph.lost(cuts.values())
        self.graph.removed(gone)
        self.dead = self.dead.copy()
        self.dead[gone] = True
        self.zeroed = follow(self.zeroed)

    def snapshot(self) -> Undo:
        """A function that restores the current flags, masks and counts; the undo of a removal restores the graph."""
        present = self.dead, self.zeroed, self._chains, self.certified, self.reached, self._history
        parameters = self._parameters

        def restore() -> None:
            self.dead, self.zeroed, self._chains, self.certified, self.reached, self._history = present
            self._parameters = parameters

        return restore

    def state(self) -> dict[str, Any]:
        """The channels' part of a `Pruner`'s state: the pruned units ("gone"), and which of them are removed."""
        return {
            "channels": {
                "total": len(self.dead),
                "gone": np.flatnonzero(self.dead).tolist(),
                "removed": np.flatnonzero(~self.graph.alive).tolist(),
                "chains": {name: [list(counts) for counts in found] for name, found in self._chains.items()},
                # By space of a budget, the channels kept after each event. Older states have no such entry.
                **({"kept": {name: list(it) for name, it in self._history.items()}} if self.budgets else {}),
                **({"round_to": rounded} if (rounded := self._rounded) else {}),
            }
        }

    def refuse_other_state(self, saved: Saved) -> None:
        """Refuse a state with different units or counts than the plan, or one that keeps units already pruned here."""
        try:
            total, removed = saved.channels["total"], {*saved.channels["removed"]}
            gone = np.asarray(saved.channels["gone"], np.int64)
            fits = (
                total == len(self.dead) and (gone >= 0).all() and (gone < total).all() and removed <= {*gone.tolist()}
            )
            chains_fit = all(
                not found or [sum(counts) for counts in found] == list(self._plan[name][saved.epoch :])
                for name, found in saved.channels["chains"].items()
            )
            history = {name: saved.channels["kept"][name] for name in self._history}
            fits &= all(len(kept) == saved.epoch for kept in history.values())
        except (KeyError, TypeError, ValueError):
            fits = chains_fit = False
        if not fits or not chains_fit:
            raise StateError(
                "pruner state: its channels do not fit this model. The state is damaged, or belongs to another model."
            )
        if saved.channels.get("round_to", {}) != self._rounded:
            raise StateError(
                f"pruner state: its channels were rounded to {shown(saved.channels.get('round_to', {}))}, with these "
                f"options they are rounded to {shown(self._rounded)}. Load it with the same round_to= and dtype."
            )
        after = np.zeros(total, bool)
        after[gone] = True
        for name, it in self.members.items():
            kept = it.total - int(after[it.units].sum())
            counts = self._plan[name] if name in self._plan else saved.channels["kept"][name]
            planned = counts[saved.epoch - 1] if saved.epoch else it.total
            if kept != planned:
                raise StateError(
                    f"pruner state: space {name!r} keeps {kept} channels, the plan says {planned}. "
                    f"The state is damaged."
                )
            if not it.allow(after):
                raise StateError(
                    f"pruner state: space {name!r}: its round_to=, layer_floor= and per_layer= do not allow the "
                    f"numbers of channels that its layers keep in this state. Load the state with the options it was "
                    f"saved with."
                )
        for budget in self.budgets:
            reached, bound = self._reached(after)[budget.name], budget.plan[saved.epoch - 1] if saved.epoch else None
            if bound is not None and reached > bound:
                raise StateError(
                    f"pruner state: its channels cost {reached:,} {WORDS[budget.cost]}, the budget of "
                    f"{budget.name!r} is {bound:,} at epoch {saved.epoch}. The state is damaged."
                )
        if (self.dead & ~after).any():
            raise StateError(
                f"pruner state: it keeps {int((self.dead & ~after).sum())} channels that were already pruned from "
                f"this model and cannot be restored. Build a fresh model, and load the state into a new Pruner."
            )

    def resized(self, saved: Saved, wrap: Wrap | None) -> Operation:
        """The removal that cuts the model to its saved size. Channels that were only masked are left to `load`."""
        going = [unit for unit in saved.channels["removed"] if self.graph.alive[unit]]
        return self._as_saved(np.zeros_like(self.dead), going, physical=True, wrap=wrap)

    def load(self, saved: Saved, _: Exchange) -> None:
        """Restore a state that `refuse_other_state` accepted; the model must already have its saved size."""
        self._parameters = Parameters.of(self._model)
        self.dead = np.zeros(len(self.dead), bool)
        self.dead[np.asarray(saved.channels["gone"], np.int64)] = True
        chains = saved.channels["chains"]
        self._chains = {name: tuple(tuple(counts) for counts in found) for name, found in chains.items()}
        self._history = {name: tuple(saved.channels["kept"][name]) for name in self._history}
        self.certified, self.reached = self.kept, self._reached(self.dead)
        self.zeroed = self._as_saved(self.dead, (), physical=False).doomed()

    def notes(self, name: str, revived: int) -> dict[str, Any]:
        """For the certificate of a space: channels that are masked and zero, those not counted, and its budget."""
        budget = next((it for it in self.budgets if name in it.spaces), None)
        bounded = dict[str, Any]()
        if budget is not None:
            costs = {"dense": budget.dense, "asked": budget.target, "reached": self.reached[budget.name]}
            bounded = {"budget": budget.cost, **costs}
        masked = int((self.dead & self.graph.alive)[self.members[name].units].sum()) - max(0, revived)
        fixed = self._fixed[name]
        return {**bounded, **({"masked": masked} if masked > 0 else {}), **({"fixed": fixed} if fixed else {})}

    @property
    def _rounded(self) -> dict[str, dict[str, int]]:
        """By space with ``round_to="auto"``, the numbers that were chosen. A saved state must have the same ones."""
        return {name: it.rounded for name, it in self.members.items() if it.rounded}

    def _as_saved(self, dead: Flags, going: Sequence[int], *, physical: bool, wrap: Wrap | None = None) -> Operation:
        try:
            return self._surgery.operation(dead, going, physical=physical, wrap=wrap)
        except ShrinkError as error:
            raise StateError(
                f"pruner state: the saved channels cannot be removed from this model: {error} "
                f"Load the state into a freshly built model, before it is wrapped or changed."
            ) from error

    def _reached(self, dead: Flags) -> dict[str, int]:
        """By budget, the cost of the model without the units in `dead`, whether they are removed or masked."""
        if self._costs is None:
            return {}
        return {it.name: self._costs.of(it.cost, dead) for it in self.budgets}

    def _refuse_other_costs(self, dead: Flags, operation: Operation) -> None:
        """Refuse a removal after which the model would not have the cost that the trace predicts."""
        for budget in self.budgets if self._surgery.replays else ():
            assert self._costs is not None
            predicted = self._costs.of(budget.cost, dead)
            counted: int | None
            if budget.cost == "macs":
                counted = self._costs.counted_macs(operation.edits)
            else:
                removed = sum(prod(cut.before) - prod(cut.after) for cut in operation.cuts.values())
                counted = sum(parameter.numel() for parameter in self._model.parameters()) - removed
            if counted is not None and counted != predicted:
                raise RankError(
                    f"{budget.where}: {budget.asked}: the cut model would have {counted:,} {WORDS[budget.cost]}, but "
                    f"the trace predicts {predicted:,}, so the budget cannot be met exactly. Nothing was pruned. "
                    f"Use keep= or prune=."
                )

    def _refuse_other_counts(self, going: Indices, gone: Indices) -> None:
        """Refuse a removal that also removes channels of a space that were not chosen."""
        unasked = np.zeros_like(self.dead)
        unasked[gone] = True
        unasked[going] = False
        unasked &= ~self.dead
        for name, it in self.members.items() if unasked.any() else ():
            if more := int(unasked[it.units].sum()):
                raise RankError(
                    f"space {name!r}: {more} more channels would have to be removed with the chosen ones, so the count "
                    f"could not be met. Exclude the layers that they belong to."
                )

    def _warn_of_ranking(self, members: ChannelMembers, ranking: Ranking, removed: Indices) -> None:
        """Warn if most channels are tied at the cut, if scales hardly differ, or if a layer keeps almost nothing."""
        name, stays, units = members.space.name, ~self.dead, ranking.units
        stays[removed] = False
        values, group, sizes = np.unique(ranking.scores, return_inverse=True, return_counts=True)
        kept = np.bincount(group, weights=stays[units], minlength=len(sizes))
        split = (kept > 0) & (kept < sizes)
        if ranking.metric is product:
            split &= values != 0  # a product of 0 means dead already, so it does not matter which of them are pruned
        self._watch.tied_scores(name, "channels", int(sizes[split].sum()), len(units))
        if members.space.layer_floor == 1:  # by setting a higher floor, the user has decided how thin layers may get
            layers = [(layer.name, int(stays[layer.units].sum()), len(layer.units)) for layer in members.layers]
            self._watch.thin_layers(name, "channels", layers)
        if reads_scales(ranking.metric):
            scales = channel_scores(bn_scale, ranking.layers)
            self._watch.alike_scales(name, float(scales.mean()), float(scales.std()))
