"""The state of a run: its epoch, its masks, and its two sides, one for channel spaces and one for weight spaces.

A `Side` handles one kind of units, and the `Session` combines both. It always visits channels first: the K of a weight
space counts weights in the remaining channels only, so channels have to be decided before weights are ranked.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from keepk.cut.holders import followed, parameters_of, refuse_mismatched_followers, zero_followers
from keepk.cut.masks import Held, Masks, flat_history, held, restart_flat_history, state_per_weight
from keepk.cut.record import (
    Certificate,
    Places,
    certificate_of,
    certified,
    certify,
    cuts_since,
    masked_places,
    record_of,
)
from keepk.cut.sharded import Wrap
from keepk.errors import KeepkError, PlanError, ShrinkError, StateError
from keepk.metrics.channels import collected_terms
from keepk.metrics.layers import Use
from keepk.model.edits import Cut, Undo, left_of, undone_by
from keepk.model.names import changed_model, named_parameters
from keepk.model.sharded import exchange_device, guarding, is_sharded, local, reshard
from keepk.rank.kth_largest import one_thread
from keepk.run.channel_members import module_of, modules_of
from keepk.run.channels import (
    NO_OPERATION,
    AnySurgery,
    ChannelSide,
    Event,
    Operation,
    Surgery,
    by_plain_name,
    nothing,
)
from keepk.run.checks import RunSpec, checked_optimizers
from keepk.run.counting import channels_by_layer, count_masked, weights_by_parameter
from keepk.run.distributed import Exchange
from keepk.run.sharded_channels import ShardedSurgery
from keepk.run.state import Saved, pruner_state, read_pruner_state
from keepk.run.warnings import Watch
from keepk.run.weights import WeightSide


class Side(Protocol):
    """One kind of units of a run: `WeightSide`, `ChannelSide`, or its null object `NoChannels`."""

    @property
    def kind(self) -> str:
        """``"weights"`` or ``"channels"``, as in a certificate."""

    @property
    def members(self) -> Mapping[str, Any]:
        """The spaces by name, each with its total, its K and its units."""

    @property
    def kept(self) -> Mapping[str, int]:
        """By space: the number of units left, as the last event or cut recorded it."""

    @property
    def certified(self) -> Mapping[str, int]:
        """By space: the number of units left by the last event."""

    @property
    def counted(self) -> Mapping[str, int]:
        """By space: the number of units left, counted in the model's tensors."""

    @property
    def uses(self) -> Sequence[Use]:
        """The metrics of this side that read statistics."""

    @property
    def zeroed(self) -> Masks:
        """By parameter: a mask of the entries that are kept at zero."""

    @property
    def masks(self) -> Masks:
        """By parameter: a mask of the entries that are kept."""

    def decide(self, event: Event) -> Event:
        """The event with this side's decisions added; nothing changes."""

    def apply(self, event: Event) -> Undo:
        """Carry out this side's part of an event. The returned undo runs before a snapshot is restored."""

    def follow_cuts(self, cuts: Mapping[str, Cut], follow: Callable[[Masks], Masks]) -> None:
        """Follow cuts that this run did not make; `follow` returns masks that are cut in the same way."""

    def snapshot(self) -> Undo:
        """A function that restores masks and counts as they are now."""

    def state(self) -> dict[str, Any]:
        """The entries of this side in a `Pruner`'s state."""

    def load(self, saved: Saved, exchange: Exchange) -> None:
        """Restore a saved state; the model must already have its saved size."""

    def notes(self, name: str, revived: int) -> dict[str, Any]:
        """Additional entries for the certificate of a space; `revived` masked units are no longer zero."""


class NoChannels:
    """The channel side of a run without channel spaces: every method does nothing."""

    kind = "channels"

    def __init__(self) -> None:
        self.members: Mapping[str, Any] = {}
        self.zeroed: Masks = {}
        self.kept = self.certified = self.counted = dict[str, int]()
        self.masks: Masks = {}
        self.sizes = dict[str, Any]()
        self.places = dict[str, Places]()
        self.uses = list[Use]()
        self.budgets = ()
        self.implied = dict[str, tuple[int, ...]]()
        self.reached = dict[str, int]()

    def warn_of_uncounted(self) -> None:
        """There is nothing to warn about."""

    def decide(self, event: Event) -> Event:
        """No channels are pruned."""
        return event

    def apply(self, _: Event) -> Undo:
        """No channels are removed."""
        return nothing

    def follow_cuts(self, _: Mapping[str, Cut], _follow: Callable[[Masks], Masks]) -> None:
        """There are no channels that could have been cut."""

    def snapshot(self) -> Undo:
        """There is nothing to restore."""
        return nothing

    def state(self) -> dict[str, Any]:
        """No entries."""
        return {}

    def refuse_other_state(self, _: Saved) -> None:
        """Any state fits."""

    def resized(self, _saved: Saved, _wrap: Wrap | None) -> Operation:
        """The model keeps its size."""
        return NO_OPERATION

    def load(self, _saved: Saved, _exchange: Exchange) -> None:
        """There is nothing to restore."""

    def notes(self, _name: str, _revived: int) -> dict[str, Any]:
        """Nothing to add to a certificate."""
        return {}


class Session:
    """The state of one run and all methods that change it; `Pruner` is the public interface.

    Attributes:
        spec: The checked arguments of the run.
        watch: The warnings of the run.
        channels: The channel spaces.
        weights: The weight spaces.
        sides: Both, channels first.
        statistics: The statistics that metrics read, in an order that is the same in all processes.
        epoch: The number of past events.
        frozen: The parameters that get no update in the coming epoch.
        optimizers: The optimizers that train the model.
        held: The masks, ready to be applied after every optimizer step.
        sharded: Whether the model has parameters that are sharded over processes.
        closed: Whether the user has closed the `Pruner`.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.watch, self.closed = spec, Watch(), False
        self.optimizers = [*spec.optimizers]  # shared with both sides, so that they see those attached later
        self.channels: ChannelSide | NoChannels = NoChannels()
        if spec.graph is not None:
            surgery: AnySurgery
            if spec.twin is None:
                surgery = Surgery(spec.model, spec.graph, self.optimizers, spec.followers, spec.replayed)
            else:
                surgery = ShardedSurgery(
                    spec.model,
                    spec.twin,
                    spec.graph,
                    self.optimizers,
                    spec.followers,
                    replays=spec.replayed != "none",
                )
            self.channels = ChannelSide(
                spec.graph,
                spec.model,
                spec.channels,
                surgery,
                self.watch,
                plan=spec.plan,
                shrink=spec.shrink,
                budgets=spec.budgets,
                costs=spec.costs,
            )
        self.weights = WeightSide(spec.model, spec.weights, spec.plan, self.optimizers, self.watch, spec.late)
        self.sides: tuple[Side, ...] = (self.channels, self.weights)
        metrics = [it.space.metric for side in self.sides for it in side.members.values()]
        self.statistics = tuple(dict.fromkeys(it.statistics for metric in metrics for it in collected_terms(metric)))
        self.sharded = any(map(is_sharded, spec.model.parameters()))
        self.held: list[Held] = []
        self._record = record_of(spec.model)  # of the model as it was when the masks were made
        self._cut_elsewhere: str | None = None  # a tensor that was cut outside of this run
        self.channels.warn_of_uncounted()
        self.frozen: tuple[nn.Parameter, ...] = ()
        self._frozen_by_epoch: Sequence[tuple[nn.Parameter, ...]] = spec.frozen_by_epoch
        self.enter_epoch(0)
        try:
            self.follow_statistics()
        except Exception:
            for statistics in self.statistics:  # no Pruner is made, so no hooks may stay
                statistics.release()
            raise

    # Counts and masks ------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> dict[str, int]:
        """By space: how many units are left, as the last event or cut recorded it."""
        return {name: count for side in self.sides for name, count in side.kept.items()}

    @property
    def counted(self) -> dict[str, int]:
        """By space: how many units the model's tensors have now, including masked ones that are no longer zero."""
        return {name: count for side in self.sides for name, count in side.counted.items()}

    def counted_layers(self) -> list[tuple[str, str, int, int]]:
        """By layer: its module, the kind of its units, and how many there were at first and are counted now."""
        model, found = self.spec.model, list[tuple[str, str, int, int]]()
        modules = {module_of(f"{name}.") for name, _ in model.named_modules()}
        if isinstance(side := self.channels, ChannelSide):
            for members, layer, kept in channels_by_layer(side.members, side.graph, side.dead, side.zeroed, model):
                # A name may be that of a parametrization, or of a parameter such as `in_proj_weight`.
                names = list(dict.fromkeys(module_of(f"{it}.") for it in modules_of(layer, members.space.at)))
                for name in [it for it in names if it in modules] or names[:1]:
                    found.append((name, side.kind, len(layer.units), kept))
        sizes = self.weights.sizes
        mine = self.weights
        for space, name, kept in weights_by_parameter(mine.members, mine.zeroed, model, mine.left):
            found.append((module_of(name), self.weights.kind, prod(sizes[space][name]), kept))
        return found

    def counted_masked(self) -> int:
        """How many entries of the model's parameters are masked and 0.0."""
        return count_masked(self._zeroed, self.spec.model, self.weights.left)

    @property
    def masks(self) -> Masks:
        """By parameter with a weight space or masked channels: a mask of the entries that are kept."""
        return {name: mask for side in self.sides for name, mask in side.masks.items()}

    @property
    def _zeroed(self) -> Masks:
        """By parameter: a mask of the entries kept at zero.

        If both sides have a mask for a parameter, the weight side's is used: it includes the entries of masked
        channels.
        """
        return {name: mask for side in self.sides for name, mask in side.zeroed.items()}

    def planned(self, epoch: int) -> dict[str, int]:
        """By entry of the plan: how many units, or which cost, it leaves after a number of events."""
        starts = self.spec.starts
        return {name: counts[epoch - 1] if epoch else starts[name] for name, counts in self.spec.plan.items()}

    def certificate(self, left: Mapping[str, int]) -> Certificate:
        """By space: its globs, the units asked for and kept by the last event, and ``alive`` if `left` differs.

        If more units are left than the last event kept, `left` also replaces ``kept``, which would no longer be true.
        """
        found, kept = Certificate(), self.kept
        for side in self.sides:
            for name, it in side.members.items():
                certified = side.certified[name]
                found[name] = {
                    "kind": side.kind,
                    "select": list(it.space.select),
                    "exclude": list(it.space.exclude),
                    "total": it.total,
                    "asked": it.keep,  # a budget is in the notes
                    "kept": max(certified, left[name]),
                    **({"alive": left[name]} if left[name] != certified else {}),
                    **side.notes(name, left[name] - kept[name]),
                }
        return {name: found[name] for name in self.spec.names}

    # An event --------------------------------------------------------------------------------------------------------

    def decide(self, wrapper: nn.Module | None, wrap: Wrap | None, exchange: Exchange) -> Event:
        """Decide the next event, without changing anything; everything that can be refused is refused here."""
        refuse_mismatched_followers(self.spec.followers, named_parameters(self.spec.model))
        event = Event(self.epoch, exchange, wrapper, wrap)
        with guarding(lambda stage: exchange.together(stage, nothing)):
            for side in self.sides:
                event = side.decide(event)
        return event

    def apply(self, event: Event, *, keep_values: bool = False) -> Undo:
        """Carry out an event, all or nothing; returns the undo.

        Args:
            event: The result of `decide`.
            keep_values: Whether the undo restores the values of zeroed weights. This needs a copy of them, which only
                distributed runs make: another process may fail after this one has succeeded.
        """
        with ExitStack() as undos:
            # Undone in reverse order: first the sides' changes to tensors, then masks and counts by the snapshot.
            undos.callback(self.snapshot())
            for side in self.sides:
                undos.callback(side.apply(event))
            undos.callback(self._renew_frozen(event.operation.renewed))
            if event.prunes:
                if keep_values:
                    undos.callback(self._copied_values())
                self._hold()
            else:
                self.zero_masked()  # counts are exact after every event, even one that prunes nothing
            undos.callback(self.enter_epoch, self.epoch)
            self.enter_epoch(event.epoch + 1)
            self._certify(undos)
            return undos.pop_all().close

    def enter_epoch(self, epoch: int) -> None:
        """Set the number of past events, and freeze the parameters that the next epoch's phase names."""
        self.epoch = epoch
        frozen = self._frozen_by_epoch[epoch] if epoch < len(self._frozen_by_epoch) else ()
        if frozen is not self.frozen:
            for optimizer in self.optimizers:
                restart_flat_history(optimizer)  # LBFGS would still move frozen weights along its old directions
        self.frozen = frozen

    def _renew_frozen(self, renewed: Mapping[int, nn.Parameter]) -> Undo:
        """Freeze the parameters that have taken the places of others, instead of these."""
        before = self._frozen_by_epoch
        if renewed:
            self._frozen_by_epoch = [tuple(renewed.get(id(it), it) for it in frozen) for frozen in before]

        def undo() -> None:
            self._frozen_by_epoch = before

        return undo

    def _certify(self, undos: ExitStack | None = None) -> None:
        """Write the certificate into the records of the model and its followers; the undo is added to `undos`."""
        modules = [followed(it) for it in self.spec.followers if isinstance(it, nn.Module)]
        mine, places = self.certificate(self.kept), self.channels.places
        for module in (self.spec.model, *modules):
            # Spaces of earlier runs over the same model keep their entries.
            others = {name: entry for name, entry in certificate_of(module).items() if name not in mine}
            masked: dict[str, Places] = {name: it for name, it in masked_places(module).items() if name in others}
            if undos is None:
                certify(module, {**others, **mine}, {**masked, **places})
            else:
                undos.callback(certified(module, {**others, **mine}, {**masked, **places})())

    def snapshot(self) -> Undo:
        """A function that restores masks and counts as they are now."""
        restores = [side.snapshot() for side in self.sides]
        present = self.held, self._record

        def restore() -> None:
            for undo in restores:
                undo()
            self.held, self._record = present

        return restore

    # Holding masks ---------------------------------------------------------------------------------------------------

    def zero_masked(self) -> None:
        """Set the masked weights to zero, as after every optimizer step."""
        for it in self.held:
            it.zero()

    def apply_masks(self) -> None:
        """Set masked entries to zero in the weights, the optimizer's state and the followers."""
        now = named_parameters(self.spec.model)
        for name, mask in self._zeroed.items():
            if name not in now or local(now[name]).shape != mask.shape:
                got = f"has shape {tuple(now[name].shape)}" if name in now else "no longer exists"
                raise changed_model(StateError, name, f"{got}, but its mask has shape {tuple(mask.shape)}")
        refuse_mismatched_followers(self.spec.followers, now)
        self._hold()

    def _hold(self) -> None:
        """Zero masked weights, their optimizer state and their copies in followers; keep the masks for every update."""
        zeroed = self._hold_masks()
        with one_thread():  # waking a thread pool takes longer than it saves here
            for it in self.held:
                it.zero()
                it.zero_state(self.optimizers)
            zero_followers(self.spec.followers, zeroed)
        for optimizer in self.optimizers if zeroed else ():
            restart_flat_history(optimizer)

    def _hold_masks(self) -> Masks:
        """Prepare the masks to be applied after every update, without zeroing anything yet."""
        self._record = record_of(self.spec.model)
        parameters, zeroed = named_parameters(self.spec.model), self._zeroed
        self.held = held((parameters[name], mask) for name, mask in zeroed.items())
        return zeroed

    def _copied_values(self) -> Undo:
        """Copy the weights and optimizer state that the masks are about to zero; returns a function to restore them."""
        parameters, zeroed = named_parameters(self.spec.model), self._zeroed
        tensors = [(local(parameters[name]), mask) for name, mask in zeroed.items()]
        for optimizer in self.optimizers:
            states = ((state_per_weight(optimizer, parameters[name]), mask) for name, mask in zeroed.items())
            tensors += [(local(it), mask) for several, mask in states for it in several]
        for follower in self.spec.followers:
            found = parameters_of(follower)
            tensors += [(local(found[name]), mask) for name, mask in zeroed.items() if name in found]
        places = [(tensor, mask.to(tensor.device) & (tensor != 0)) for tensor, mask in tensors]
        values = [(tensor, place, tensor[place]) for tensor, place in places]
        histories = [flat_history(optimizer) for optimizer in self.optimizers]

        def put_back() -> None:
            with torch.no_grad():
                for tensor, place, value in values:
                    tensor[place] = value
            for restore in histories:
                restore()

        return put_back

    def refuse_revived(self) -> None:
        """Refuse to continue if pruned weights were trained by an optimizer that the `Pruner` does not know."""
        if self.optimizers:
            return  # their hooks zero the weights after every step
        for name, it in zip(self._zeroed, self.held, strict=True):
            if revived := it.revived:
                raise StateError(
                    f"parameter {name!r}: {revived} pruned weights are no longer zero, and the Pruner has no optimizer "
                    f"whose steps would zero them. Pass the optimizer that trains the model to Pruner(...). If "
                    f"something else changed them, such as load_state_dict, call pruner.apply_masks() first."
                )

    def refuse_not_frozen(self) -> None:
        """Refuse an event after an epoch with frozen parameters if the optimizer that trains them is not known."""
        if self.frozen and not self.optimizers:
            raise PlanError(
                "Pruner: a phase freezes parameters in this epoch, but no optimizer was attached, so they may have "
                "been trained. Call pruner.attach(optimizer) before training."
            )

    # Optimizers ------------------------------------------------------------------------------------------------------

    def attach(self, given: Any) -> list[torch.optim.Optimizer]:
        """Add optimizers; returns those that are new."""
        names = {parameter: name for it in self.spec.weights.values() for name, parameter in it.parameters.items()}
        asked = [None] if given is None else given  # None is no optimizer here
        found = checked_optimizers(self.spec.model, asked, names, any(self.spec.frozen_by_epoch), self.optimizers)
        new = [it for it in found if not any(it is known for known in self.optimizers)]
        # The new optimizer's state is not zeroed here: in a resumed run it was saved with the masks applied, and the
        # run has to end bit-equal.
        self.optimizers += new
        return new

    # Cuts by others --------------------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether the model was cut outside of this run and the masks have not followed yet."""
        before, now = self._record["tensors"], record_of(self.spec.model)["tensors"]
        return not (before is now or before == now) or any(it.outgrown for it in self.held)

    def follow_cuts(self) -> None:
        """Cut the masks if the model was cut outside of this run, for example by `keepk.compact`.

        Call this before an update. `compact` folds constants into biases, so a masked bias may become nonzero and must
        no longer be masked. The next update would zero it again.
        """
        if self.sharded:
            reshard(self.spec.model)
        if not self.behind:
            return
        made = cuts_since(self._record, record_of(self.spec.model))
        self._cut_elsewhere = next(iter(made), None)
        parameters, cuts = named_parameters(self.spec.model), by_plain_name(self.spec.model, made)

        def follow(masks: Masks) -> Masks:
            return {name: _cut_mask(name, mask, cuts, parameters) for name, mask in masks.items()}

        for side in self.sides:
            side.follow_cuts(made, follow)
        self._hold_masks()  # without zeroing: `kept` calls this and must not change weights
        self._certify()
        self.follow_statistics()

    # Statistics ------------------------------------------------------------------------------------------------------

    def follow_statistics(self) -> None:
        """Restart the statistics that metrics read, for the units that are left now."""
        uses = [use for side in self.sides for use in side.uses]
        ended = self.epoch >= len(next(iter(self.spec.plan.values())))
        for statistics in self.statistics:
            mine = [use for use in uses if use.metric.statistics is statistics]
            statistics.follow(mine, collect=not ended)  # no event will read them after the last one

    # States ----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state of the run as plain values and bool tensors."""
        self.follow_cuts()
        self.refuse_revived()
        if self._cut_elsewhere is not None:  # replaying the plan on a fresh model would not lead to this shape
            raise StateError(
                f"pruner state: {self._cut_elsewhere!r} was cut since the run began, by keepk.compact or keepk.shrink, "
                f"so the state would not fit a fresh model. Checkpoint before that cut; after it, use keepk.save."
            )
        units = {**self.weights.state(), **self.channels.state()}
        return pruner_state(self._sizes, self.spec.plan, self.epoch, units, self._budgets)

    def load(self, state: Mapping[str, Any], wrap: Wrap | None = None) -> None:
        """Load a state: cut the model to its size, then restore masks and epoch; if it fails, nothing has changed."""
        exchange = self._loading(state)
        with undone_by(self.take_shape(state, wrap, exchange)):
            self.take_masks(state, exchange)

    def _loading(self, state: Mapping[str, Any]) -> Exchange:
        """The exchange to load a state: over all processes if the model or masks in the state are sharded."""
        masks = state.get("masks") if isinstance(state, Mapping) else None
        alone = not self.sharded and not any(map(is_sharded, masks.values() if isinstance(masks, Mapping) else ()))
        return self.exchange("load the state", "Nothing was loaded.", call="load_state_dict", alone=alone)

    def exchange(self, doing: str, left: str, *, call: str, alone: bool) -> Exchange:
        """An exchange over the processes of this run; the arguments are those of `Exchange`."""
        return Exchange(exchange_device(self.spec.model.parameters()), doing, left, call=call, alone=alone)

    @torch.no_grad()
    def take_shape(self, state: Mapping[str, Any], wrap: Wrap | None = None, exchange: Exchange | None = None) -> Undo:
        """Cut the model to its size in a saved state; returns the undo. `wrap` shards it again, if it is sharded.

        This is the first half of loading a state. A checkpoint restores the model and the optimizer between the two
        halves, because their tensors fit only a model of the saved size.
        """
        together = self._loading(state) if exchange is None else exchange

        def cut() -> Undo:
            self.refuse_closed()
            saved = self._read(state)
            if self.sharded:
                reshard(self.spec.model)
            operation = self.channels.resized(saved, wrap)
            self.weights.refuse_other_masks(saved, operation.shape_of, together)
            with ExitStack() as undos:
                undos.callback(operation.apply())
                undos.callback(self._renew_frozen(operation.renewed))
                return undos.pop_all().close

        return together.carried_out("size of a pruner state", cut)

    @torch.no_grad()
    def take_masks(self, state: Mapping[str, Any], exchange: Exchange | None = None) -> Undo:
        """Restore the epoch and the masks of a saved state, for a model of its size; returns the undo.

        This is the second half of loading a state. The undo restores the values of zeroed weights only if another
        process may fail.
        """
        together = self._loading(state) if exchange is None else exchange

        def restore() -> Undo:
            saved = self._read(state)
            with ExitStack() as undos:
                undos.callback(self.enter_epoch, self.epoch)
                undos.callback(self.snapshot())
                for side in self.sides:
                    side.load(saved, together)
                if together.several:
                    undos.callback(self._copied_values())
                self._hold()
                self.enter_epoch(saved.epoch)
                self.watch.restart()
                self.follow_statistics()
                self._certify(undos)
                return undos.pop_all().close

        return together.carried_out("masks of a pruner state", restore)

    def refuse_closed(self) -> None:
        """Refuse to change anything once the `Pruner` is closed."""
        if self.closed:
            raise KeepkError("Pruner: it was closed, so masked weights are no longer kept at zero. Make a new one.")

    @property
    def _sizes(self) -> dict[str, Any]:
        return {**self.weights.sizes, **self.channels.sizes}

    @property
    def _budgets(self) -> dict[str, Any]:
        """By budget: the entries that a saved state must have."""
        return {
            it.name: {"cost": it.cost, "dense": it.dense, "target": it.target, "spaces": list(it.spaces)}
            for it in self.spec.budgets
        }

    def _read(self, state: Mapping[str, Any]) -> Saved:
        saved = read_pruner_state(state, self._sizes, self.spec.plan, self._budgets)
        self.channels.refuse_other_state(saved)
        return saved


def _cut_mask(name: str, dead: Tensor, cuts: Mapping[str, Cut], parameters: Mapping[str, Tensor]) -> Tensor:
    """A mask cut in the same way as its parameter."""
    if name not in parameters:
        raise changed_model(ShrinkError, name, "no longer exists, and the model was cut since")
    parameter, left = parameters[name], left_of(dead, cuts[name]) if name in cuts else dead
    if left.shape != parameter.shape:
        raise ShrinkError(
            f"parameter {name!r}: has shape {tuple(parameter.shape)}, its mask {tuple(left.shape)}: it was cut or "
            f"replaced outside of keepk. Change the model first, then make the Pruner."
        )
    if name.rpartition(".")[2] != "bias":
        return left
    return left & (parameter.detach() == 0).to(left.device)  # compact folds constants into masked biases
