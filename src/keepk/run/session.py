"""The state of a run: its epoch, its masks, and its two sides, channels and weights.

A `Session` does for all spaces together what a `Side` does for its own kind of units. Wherever it loops over the sides,
channels come first: a weight's K counts the weights in channels that stay, so channels have to be decided before
weights are ranked.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from keepk.cut.holders import followed, parameters_of, refuse_strange_followers, zero_followers
from keepk.cut.masks import Held, Masks, flat_history, held, restart_flat_history, state_per_weight
from keepk.cut.module_edits import left_of
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
from keepk.errors import KeepkError, ShrinkError, StateError
from keepk.model.edits import Cut, Undo
from keepk.model.names import changed_model, named_parameters
from keepk.rank.kth_largest import one_thread
from keepk.run.channels import NO_OPERATION, ChannelSide, Event, Operation, Surgery, by_plain_name, nothing
from keepk.run.checks import RunSpec
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
        """The spaces by name, with their total, their K and the units that they took."""

    @property
    def kept(self) -> Mapping[str, int]:
        """By space: the units left, by the run's own account."""

    @property
    def certified(self) -> Mapping[str, int]:
        """By space: the units left at the last event."""

    @property
    def counted(self) -> Mapping[str, int]:
        """By space: the units left, counted on the model's tensors."""

    @property
    def zeroed(self) -> Masks:
        """By parameter: the entries that are held at zero."""

    @property
    def masks(self) -> Masks:
        """By parameter: the entries that are kept."""

    def decide(self, event: Event) -> Event:
        """The event with this side's decisions added. Reads only."""

    def apply(self, event: Event) -> Undo:
        """Carry out this side's part of a decided event; the undo is called before a snapshot is restored."""

    def follow_cuts(self, cuts: Mapping[str, Cut], follow: Callable[[Masks], Masks]) -> None:
        """Take note of cuts that this run did not make; `follow` cuts masks in the same way."""

    def snapshot(self) -> Undo:
        """A function that restores masks and counts as they are now."""

    def state(self) -> dict[str, Any]:
        """The entries of this side in a `Pruner`'s state."""

    def load(self, saved: Saved) -> None:
        """Take over a saved state, over a model that has its saved size."""

    def notes(self, name: str, revived: int) -> dict[str, Any]:
        """Entries for the certificate of a space besides its counts; `revived` masked units are no longer zero."""


class NoChannels:
    """The side of a run without channel spaces: nothing to decide, to mask or to save."""

    kind = "channels"

    def __init__(self) -> None:
        self.members: Mapping[str, Any] = {}
        self.zeroed: Masks = {}
        self.kept = self.certified = self.counted = dict[str, int]()
        self.masks: Masks = {}
        self.sizes = dict[str, Any]()
        self.places = dict[str, Places]()

    def warn_of_uncounted(self) -> None:
        """Nothing is left uncounted."""

    def follow_statistics(self) -> None:
        """No metric of channels reads statistics."""

    def decide(self, event: Event) -> Event:
        """No channels are pruned."""
        return event

    def apply(self, _: Event) -> Undo:
        """No channels are removed."""
        return nothing

    def follow_cuts(self, _: Mapping[str, Cut], _follow: Callable[[Masks], Masks]) -> None:
        """No channels are followed."""

    def snapshot(self) -> Undo:
        """There is nothing to restore."""
        return nothing

    def state(self) -> dict[str, Any]:
        """A state without channels has no entry for them."""
        return {}

    def refuse_other_state(self, _: Saved) -> None:
        """Any state fits whose spaces fit."""

    def resized(self, _: Saved) -> Operation:
        """The model keeps its size."""
        return NO_OPERATION

    def load(self, _: Saved) -> None:
        """There is nothing to take over."""

    def notes(self, _name: str, _revived: int) -> dict[str, Any]:
        """Nothing to add to a certificate."""
        return {}


class Session:
    """The state of one run, and every change of it. `Pruner` is its public face.

    Attributes:
        spec: The checked arguments of the run.
        watch: The warnings of the run.
        channels: The channel spaces.
        weights: The weight spaces.
        sides: Both, channels first.
        epoch: How many events there were.
        frozen: The parameters that get no update in the coming epoch.
        held: The masks, ready to be applied after every optimizer step.
        closed: Whether the user has closed the `Pruner`.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self.watch, self.closed = spec, Watch(), False
        self.channels: ChannelSide | NoChannels = NoChannels()
        if spec.graph is not None:
            surgery = Surgery(spec.model, spec.graph, spec.optimizers, spec.followers, spec.replayed)
            self.channels = ChannelSide(
                spec.graph, spec.model, spec.channels, surgery, spec.plan, spec.shrink, self.watch
            )
        self.weights = WeightSide(spec.model, spec.weights, spec.plan, spec.optimizers, self.watch)
        self.sides: tuple[Side, ...] = (self.channels, self.weights)
        self.held: list[Held] = []
        self._record = record_of(spec.model)  # of the model that the masks fit
        self._cut_elsewhere: str | None = None  # a tensor that something else than this run has cut
        self.channels.warn_of_uncounted()
        self.channels.follow_statistics()
        self.frozen: tuple[nn.Parameter, ...] = ()
        self.enter_epoch(0)

    # Counts and masks ------------------------------------------------------------------------------------------------

    @property
    def kept(self) -> dict[str, int]:
        """By space: how many units are left, by the run's own account."""
        return {name: count for side in self.sides for name, count in side.kept.items()}

    @property
    def counted(self) -> dict[str, int]:
        """By space: how many units the model's tensors have now, masked ones that came back included."""
        return {name: count for side in self.sides for name, count in side.counted.items()}

    @property
    def masks(self) -> Masks:
        """By parameter of a weight space, or with masked channels: which entries are kept."""
        return {name: mask for side in self.sides for name, mask in side.masks.items()}

    @property
    def _zeroed(self) -> Masks:
        """By parameter: the entries held at zero.

        Where both sides have a mask, the one of the weights counts: it includes the entries of masked channels.
        """
        return {name: mask for side in self.sides for name, mask in side.zeroed.items()}

    def planned(self, epoch: int) -> dict[str, int]:
        """By space: how many units the plan leaves after a number of events."""
        totals = self.spec.totals
        return {name: counts[epoch - 1] if epoch else totals[name] for name, counts in self.spec.plan.items()}

    def certificate(self, left: Mapping[str, int]) -> Certificate:
        """By space: its globs, what was asked for, what the last event kept, and `left`, if it differs, as alive.

        Where more units are left than the last event kept, its number is no longer true, and `left` replaces it.
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
                    "asked": it.keep,
                    "kept": max(certified, left[name]),
                    **({"alive": left[name]} if left[name] != certified else {}),
                    **side.notes(name, left[name] - kept[name]),
                }
        return {name: found[name] for name in self.spec.plan}

    # An event --------------------------------------------------------------------------------------------------------

    def decide(self, wrapper: nn.Module | None) -> Event:
        """Decide the coming event. Reads only, and refuses everything that can be refused."""
        refuse_strange_followers(self.spec.followers, named_parameters(self.spec.model))
        event = Event(self.epoch, wrapper)
        for side in self.sides:
            event = side.decide(event)
        return event

    def apply(self, event: Event, *, keep_values: bool = False) -> Undo:
        """Carry out a decided event, all or nothing; returns the undo.

        Args:
            event: What `decide` returned.
            keep_values: Whether the undo brings zeroed weights back. It costs a copy of them, which is needed only
                where another process may fail after this one has succeeded.
        """
        with ExitStack() as way_back:
            way_back.callback(self.snapshot())
            for side in self.sides:
                way_back.callback(side.apply(event))
            if event.prunes:
                if keep_values:
                    way_back.callback(self._values())
                self._hold()
            else:
                self.zero_masked()  # counts are exact after every event, also after one that prunes nothing
            way_back.callback(self.enter_epoch, self.epoch)
            self.enter_epoch(event.epoch + 1)
            self._certify(way_back)
            return way_back.pop_all().close

    def enter_epoch(self, epoch: int) -> None:
        """Set the number of past events, and freeze what the phase of the coming epoch freezes."""
        self.epoch = epoch
        frozen = self.spec.frozen_by_epoch[epoch] if epoch < len(self.spec.frozen_by_epoch) else ()
        if frozen is not self.frozen:
            for optimizer in self.spec.optimizers:
                restart_flat_history(optimizer)  # LBFGS would still move frozen weights along its old directions
        self.frozen = frozen

    def _certify(self, way_back: ExitStack | None = None) -> None:
        """Write the certificate into the record of the model and of the modules that follow it."""
        modules = [followed(it) for it in self.spec.followers if isinstance(it, nn.Module)]
        mine, places = self.certificate(self.kept), self.channels.places
        for module in (self.spec.model, *modules):
            # Spaces of earlier runs over the same model keep their entries.
            others = {name: entry for name, entry in certificate_of(module).items() if name not in mine}
            masked: dict[str, Places] = {name: it for name, it in masked_places(module).items() if name in others}
            if way_back is None:
                certify(module, {**others, **mine}, {**masked, **places})
            else:
                way_back.callback(certified(module, {**others, **mine}, {**masked, **places})())

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
            if name not in now or now[name].shape != mask.shape:
                got = f"has shape {tuple(now[name].shape)}" if name in now else "no longer exists"
                raise changed_model(StateError, name, f"{got}, but its mask has shape {tuple(mask.shape)}")
        refuse_strange_followers(self.spec.followers, now)
        self._hold()

    def _hold(self) -> None:
        """Zero what is masked, with its state and in the followers, and keep the masks for every update to come."""
        zeroed = self._hold_masks()
        with one_thread():  # an event is rare: no thread pool to wait for
            for it in self.held:
                it.zero()
                it.zero_state(self.spec.optimizers)
            zero_followers(self.spec.followers, zeroed)
        for optimizer in self.spec.optimizers if zeroed else ():
            restart_flat_history(optimizer)

    def _hold_masks(self) -> Masks:
        """Make the masks ready for every update of the model as it is now, without zeroing anything yet."""
        self._record = record_of(self.spec.model)
        parameters, zeroed = named_parameters(self.spec.model), self._zeroed
        self.held = held((parameters[name], mask) for name, mask in zeroed.items())
        return zeroed

    def _values(self) -> Undo:
        """Copy the weights and the state that the masks are about to zero; the returned function puts them back."""
        parameters, zeroed = named_parameters(self.spec.model), self._zeroed
        tensors = [(parameters[name].detach(), mask) for name, mask in zeroed.items()]
        for optimizer in self.spec.optimizers:
            tensors += [(it, m) for name, m in zeroed.items() for it in state_per_weight(optimizer, parameters[name])]
        for follower in self.spec.followers:
            found = parameters_of(follower)
            tensors += [(found[name].detach(), mask) for name, mask in zeroed.items() if name in found]
        places = [(tensor, mask.to(tensor.device) & (tensor != 0)) for tensor, mask in tensors]
        values = [(tensor, place, tensor[place]) for tensor, place in places]
        histories = [flat_history(optimizer) for optimizer in self.spec.optimizers]

        def put_back() -> None:
            with torch.no_grad():
                for tensor, place, value in values:
                    tensor[place] = value
            for restore in histories:
                restore()

        return put_back

    def refuse_revived(self) -> None:
        """Refuse to continue if pruned weights were trained although the `Pruner` knows no optimizer."""
        if self.spec.optimizers:
            return  # their hooks zero the weights after every step
        for name, it in zip(self._zeroed, self.held, strict=True):
            if revived := it.revived:
                raise StateError(
                    f"parameter {name!r}: {revived} pruned weights are no longer zero. Something trains the model, "
                    f"and the Pruner was given no optimizer to hold them. Make it with the optimizer that trains; if "
                    f"they came back another way, as by load_state_dict, call pruner.apply_masks() first."
                )

    # Cuts by others --------------------------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether the model was cut outside of this run and the masks have not been cut yet."""
        before, now = self._record["tensors"], record_of(self.spec.model)["tensors"]
        return not (before is now or before == now) or any(it.outgrown for it in self.held)

    def follow_cuts(self) -> None:
        """Cut the masks if something else has cut the model, such as `keepk.compact`.

        To be called before an update: `compact` folds constants into biases, which revives those that were masked, and
        that shows only until the next update zeroes them.
        """
        if not self.behind:
            return
        made = cuts_since(self._record, record_of(self.spec.model))
        self._cut_elsewhere = next(iter(made), None)
        parameters, cuts = named_parameters(self.spec.model), by_plain_name(self.spec.model, made)

        def follow(masks: Masks) -> Masks:
            return {name: _cut_mask(name, mask, cuts, parameters) for name, mask in masks.items()}

        for side in self.sides:
            side.follow_cuts(made, follow)
        self._hold_masks()  # without zeroing: this is called where only a count is wanted
        self._certify()
        self.channels.follow_statistics()

    # States ----------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state of the run as plain values and bool tensors."""
        self.follow_cuts()
        self.refuse_revived()
        if self._cut_elsewhere is not None:  # no plan leads to this shape, so no fresh model could be brought to it
            raise StateError(
                f"pruner state: {self._cut_elsewhere!r} was cut since the run began, by keepk.compact or keepk.shrink, "
                f"so a fresh model could not take it. Checkpoint before that; afterwards keepk.save the model."
            )
        units = {**self.weights.state(), **self.channels.state()}
        return pruner_state(self._sizes, self.spec.plan, self.epoch, units)

    @torch.no_grad()
    def take_shape(self, state: Mapping[str, Any]) -> Undo:
        """Cut the model to the size that it had in a saved state; returns the undo.

        The first half of loading a state. A checkpoint loads the model and the optimizer between the two halves: their
        tensors fit only a model of the saved size.
        """
        self.refuse_closed()
        saved = self._read(state)
        operation = self.channels.resized(saved)
        self.weights.refuse_other_masks(saved, operation.shape_of)
        return operation.apply()

    @torch.no_grad()
    def take_masks(self, state: Mapping[str, Any]) -> Undo:
        """Take over the epoch and the masks of a saved state, over a model of its size; returns the undo.

        The second half of loading a state. The undo does not bring zeroed weights back.
        """
        saved = self._read(state)
        with ExitStack() as way_back:
            way_back.callback(self.enter_epoch, self.epoch)
            way_back.callback(self.snapshot())
            for side in self.sides:
                side.load(saved)
            self._hold()
            self.enter_epoch(saved.epoch)
            self.watch.restart()
            self.channels.follow_statistics()
            self._certify(way_back)
            return way_back.pop_all().close

    def refuse_closed(self) -> None:
        """Refuse to change anything once the `Pruner` is closed."""
        if self.closed:
            raise KeepkError("Pruner: it was closed, so masks are no longer held. Make a new one.")

    @property
    def _sizes(self) -> dict[str, Any]:
        return {**self.weights.sizes, **self.channels.sizes}

    def _read(self, state: Mapping[str, Any]) -> Saved:
        saved = read_pruner_state(state, self._sizes, self.spec.plan)
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
            f"replaced by something else than keepk. Change the model first, then make the Pruner."
        )
    if name.rpartition(".")[2] != "bias":
        return left
    return left & (parameter.detach() == 0).to(left.device)  # compact folds constants into biases, which then live
