"""Weights and channels of one run together: what an event decides, and doing it."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.followers import Follower, parameters_of, refuse_strange_followers, zero_followers
from keepk.cut.hold import Held, Masks, held
from keepk.cut.optimizer_state import flat_history, refuse_foreign_state, restart_flat_history, state_per_weight
from keepk.cut.record import Places, cuts_since, record_of
from keepk.cut.tensors import left_of
from keepk.cut.undo import Undo
from keepk.errors import ShrinkError, StateError
from keepk.graph.edits import Cut
from keepk.graph.maps import Flags
from keepk.graph.wrappers import named_parameters
from keepk.plan.phases import Plan
from keepk.rank.changed import changed_model
from keepk.rank.pieces import one_thread
from keepk.run.channel_side import ChannelEvent, ChannelSide
from keepk.run.counting import count_channels, count_weights, masked_places
from keepk.run.parties import Shrink
from keepk.run.state import Saved, read_masks
from keepk.run.surgery import Operation, Surgery, by_plain_name, nothing
from keepk.run.weight_side import WeightSide

NONE = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Event:
    """What one event decides, before anything changes.

    Attributes:
        due: By weight space, how many are left.
        channels: Which channels go.
        operation: What removes them.
        masks: The new masks of weights, over the model as it is now.
    """

    due: Mapping[str, int]
    channels: ChannelEvent | None
    operation: Operation | None
    masks: Masks

    @property
    def told(self) -> list[Tensor]:
        """What all processes must agree on, as flags."""
        gone = [] if self.operation is None else [torch.from_numpy(self.operation.flags)]
        return [*self.masks.values(), *gone]

    @property
    def cuts(self) -> bool:
        """Whether it changes the shapes of the model."""
        return self.operation is not None and self.operation.prepared is not None


class Sides:
    """The weights and the channels of a run, with what is masked and held."""

    def __init__(
        self,
        model: nn.Module,
        weights: WeightSide,
        channels: ChannelSide | None,
        optimizers: Sequence[torch.optim.Optimizer],
        followers: Sequence[Follower],
        shrink: Shrink,
    ) -> None:
        self.weights, self.channels = weights, channels
        self._model, self._optimizers, self._followers, self._shrink = model, optimizers, followers, shrink
        self._silenced: Masks = {}  # by channels that are masked
        self.held: list[Held] = []
        self._record = record_of(model)  # of the model that the masks fit
        self._cut_elsewhere: str | None = None  # a tensor that somebody else has cut

    @property
    def kept(self) -> dict[str, int]:
        """By space: how many units are left."""
        return {**self.weights.kept, **(self.channels.kept if self.channels else {})}

    @property
    def counted(self) -> dict[str, int]:
        """By space: how many units the model's tensors have now, masked ones that came back included."""
        channels = count_channels(self.channels, self._silenced, self._model) if self.channels else {}
        return {**count_weights(self.weights, self._model), **channels}

    @property
    def masked_places(self) -> dict[str, Places]:
        """By space: where its channels are that are masked and not removed."""
        return masked_places(self.channels, self._model) if self.channels else {}

    @property
    def masks(self) -> Masks:
        """By parameter of a weight space, or with masked channels: which entries are kept."""
        return {**{name: ~mask for name, mask in self._silenced.items()}, **self.weights.masks}

    def decide(self, plan: Plan, epoch: int, wrapper: nn.Module | None) -> Event:
        """What goes at the end of an epoch: channels first, then weights of what stays. Reads only."""
        refuse_strange_followers(self._followers, named_parameters(self._model))
        now = {name: plan[name][epoch] for name in self.weights.members}
        due = {name: keep for name, keep in now.items() if keep < self.weights.kept[name]}
        channels, operation, doomed = None, None, Masks()
        if self.channels is not None:
            self._refuse_unknown_channels()
            channels = self.channels.decide(epoch)
            operation = self._operation(self.channels, channels, self._is_physical(plan, epoch), wrapper)
            doomed = self.channels.surgery.doomed(operation, self.weights.parameters) if operation else {}
        names = {parameter: name for name, parameter in self.weights.parameters.items()}
        for optimizer in self._optimizers if due else ():
            refuse_foreign_state(optimizer, names)
        return Event(due, channels, operation, self.weights.decide(now, doomed))

    def follow(self, event: Event, *, keep_values: bool = False) -> Undo:
        """Do what was decided, all or nothing: take channels out, then hold what is left at its masks.

        Return a function that undoes it; zeroed weights get their values back only with `keep_values`.
        """
        with ExitStack() as way_back:
            way_back.callback(self.snapshot())
            self._follow(event, way_back, keep_values)
            return way_back.pop_all().close

    def _follow(self, event: Event, way_back: ExitStack, keep_values: bool) -> None:
        masks = {**self.weights.dead, **event.masks}
        if event.operation is not None and self.channels is not None:
            masks = event.operation.after(masks)
            way_back.callback(event.operation.apply())
            self._silenced = {} if event.cuts else self.channels.surgery.doomed(event.operation)
        if event.channels is not None and self.channels is not None:
            self.channels.follow(event.channels, event.operation.gone if event.operation else NONE)
            self.channels.certify()
        self.weights.follow(masks, self.weights.counts(masks) if event.operation else event.due)
        self.weights.certify()
        if event.masks or event.operation:
            if keep_values:
                way_back.callback(self._values())
            self._hold()
        else:
            for it in self.held:  # exact after every event, also after one at which nothing goes
                it.zero()

    @property
    def behind(self) -> bool:
        """Whether the model was cut outside of this run and the masks have not been cut yet."""
        before, now = self._record["tensors"], record_of(self._model)["tensors"]
        return not (before is now or before == now) or any(it.outgrown for it in self.held)

    def follow_cuts(self) -> bool:
        """Whether somebody else has cut the model, as `compact` does; the masks are then cut along.

        A constant that was folded into a bias revives it, which only shows until the next update: to be asked before.
        """
        if not self.behind:
            return False
        made = cuts_since(self._record, record_of(self._model))
        self._cut_elsewhere = next(iter(made), None)
        if self.channels is not None:
            self.channels.follow_cuts(made.values())
        parameters = named_parameters(self._model)
        cuts = by_plain_name(self._model, made)
        self._silenced = {n: _cut_along(n, mask, cuts, parameters) for n, mask in self._silenced.items()}
        dead = {n: _cut_along(n, mask, cuts, parameters) for n, mask in self.weights.dead.items()}
        self.weights.follow(dead, self.weights.counts(dead))
        self._hold_masks()  # what is zeroed is another matter: this is asked where nothing but a count is wanted
        return True

    def refuse_cut_elsewhere(self) -> None:
        """Refuse to make a state of what no plan leads to: a model that somebody else has cut."""
        if self._cut_elsewhere is not None:
            raise StateError(
                f"pruner state: {self._cut_elsewhere!r} was cut since the run began, by keepk.compact or keepk.shrink, "
                f"so a fresh model could not take it. Checkpoint before that; afterwards keepk.save the model."
            )

    def _refuse_unknown_channels(self) -> None:
        """Channels that somebody else took are not in the plan, so it could not end at K."""
        if self._cut_elsewhere is not None:
            raise ShrinkError(
                f"parameter {self._cut_elsewhere!r}: was cut by keepk.compact or keepk.shrink, which the plan of the "
                f"channels does not know. Change the model first, then make the Pruner; or wait until its plan ends."
            )

    def take_shape(self, saved: Saved, plan: Plan) -> Undo:
        """Give the model the size that it had in a saved run. What is returned takes it back."""
        operation = None
        if self.channels is not None:
            alive = self.channels.graph.alive
            going = [unit for unit in saved.channels["removed"] if alive[unit]]
            operation = self._as_saved(self.channels.surgery, np.zeros_like(self.channels.dead), going, physical=True)
        read_masks(saved, self.weights.members, operation.shape_of if operation else _shape_now, plan)
        return operation.apply() if operation else nothing

    def take_masks(self, saved: Saved, plan: Plan) -> None:
        """Hold what a saved run held, over a model that has the size that it had."""
        masks = read_masks(saved, self.weights.members, _shape_now, plan)
        parameters = self.weights.parameters
        dead = {name: (~mask).to(parameters[name].device) for name, mask in masks.items() if not mask.all()}
        self.weights.follow(dead, self.weights.counts(dead))
        self.weights.certify()
        if self.channels is not None:
            self.channels.load(saved.channels)
            self.channels.certify()
            masked = self._as_saved(self.channels.surgery, self.channels.dead, (), physical=False)
            self._silenced = self.channels.surgery.doomed(masked)
        self._hold()

    def apply_masks(self) -> None:
        """Zero again what is masked: weights, optimizer state, followers."""
        now = named_parameters(self._model)
        for name, mask in {**self._silenced, **self.weights.dead}.items():
            if name not in now or now[name].shape != mask.shape:
                got = f"has shape {tuple(now[name].shape)}" if name in now else "is not there any more"
                raise changed_model(StateError, name, f"{got}, but its mask has shape {tuple(mask.shape)}")
        refuse_strange_followers(self._followers, now)
        self._hold()

    def refuse_revived(self) -> None:
        """Refuse to go on where no optimizer is known, and yet something has trained weights that were pruned."""
        if self._optimizers:
            return
        for name, it in zip({**self._silenced, **self.weights.dead}, self.held, strict=True):
            if revived := it.revived:
                raise StateError(
                    f"parameter {name!r}: {revived} pruned weights are not zero any more. Something trains the model, "
                    f"and the Pruner was given no optimizer to hold them. Make it with the optimizer that trains; if "
                    f"they came back another way, as by load_state_dict, call pruner.apply_masks() first."
                )

    def snapshot(self) -> Undo:
        """Where it stands; what is returned stands there again."""
        weights, silenced, kept_held, record = self.weights.snapshot(), self._silenced, self.held, self._record
        channels = self.channels.snapshot() if self.channels else None

        def restore() -> None:
            self.weights.restore(weights)
            self._silenced, self.held, self._record = silenced, kept_held, record
            if self.channels is not None and channels is not None:
                self.channels.restore(channels)

        return restore

    @staticmethod
    def _as_saved(surgery: Surgery, dead: Flags, going: Sequence[int], *, physical: bool) -> Operation:
        try:
            return surgery.operation(dead, going, physical=physical, wrapper=None)
        except ShrinkError as error:
            raise StateError(
                f"pruner state: the channels that were gone cannot go from this model, because of {error} "
                f"Load the state into a freshly built model, before it is wrapped or changed."
            ) from error

    def _is_physical(self, plan: Plan, epoch: int) -> bool:
        members = self.channels.members.items() if self.channels else ()
        ends = all(plan[name][epoch] == it.keep for name, it in members)
        return self._shrink == "each" or (self._shrink == "end" and ends)

    @staticmethod
    def _operation(
        channels: ChannelSide, event: ChannelEvent, physical: bool, wrapper: nn.Module | None
    ) -> Operation | None:
        waiting = (channels.dead & channels.graph.alive).any()
        if not len(event.removed) and not (physical and waiting):
            return None
        operation = channels.surgery.operation(channels.dead, event.removed, physical=physical, wrapper=wrapper)
        channels.refuse_other_counts(event, operation.gone)
        return operation

    def _values(self) -> Undo:
        """The weights and the state that the masks are about to make zero; what is returned puts them back."""
        parameters, dead = named_parameters(self._model), {**self._silenced, **self.weights.dead}
        tensors = [(parameters[name].detach(), mask) for name, mask in dead.items()]
        for optimizer in self._optimizers:
            tensors += [(it, m) for name, m in dead.items() for it in state_per_weight(optimizer, parameters[name])]
        for follower in self._followers:
            found = parameters_of(follower)
            tensors += [(found[name].detach(), mask) for name, mask in dead.items() if name in found]
        places = [(tensor, mask.to(tensor.device) & (tensor != 0)) for tensor, mask in tensors]
        values = [(tensor, place, tensor[place]) for tensor, place in places]
        histories = [flat_history(optimizer) for optimizer in self._optimizers]

        def put_back() -> None:
            with torch.no_grad():
                for tensor, place, value in values:
                    tensor[place] = value
            for restore in histories:
                restore()

        return put_back

    def _hold_masks(self) -> Masks:
        """Make the masks ready for every update of the model as it is now."""
        self._record = record_of(self._model)
        parameters = named_parameters(self._model)
        dead = {**self._silenced, **self.weights.dead}
        self.held = held((parameters[name], mask) for name, mask in dead.items())
        return dead

    def _hold(self) -> None:
        dead = self._hold_masks()
        with one_thread():  # an event is rare: no thread pool to wait for
            for it in self.held:
                it.zero()
                it.zero_state(self._optimizers)
            zero_followers(self._followers, dead)
        for optimizer in self._optimizers if dead else ():
            restart_flat_history(optimizer)


def certificate(sides: Sides, left: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """By space: its globs, what was asked for, what was kept at the last event, and `left`, if it differs, as alive.

    Where more are left than the last event kept, that number is not true any more, and `left` takes its place. Of
    channels, also how many are masked and not removed, and how many their layers have that are not counted.
    """
    found = dict[str, dict[str, Any]]()
    kept = {**sides.weights.certified, **(sides.channels.certified if sides.channels else {})}
    members: list[Any] = [*sides.weights.members.values(), *(sides.channels.members.values() if sides.channels else ())]
    for it in members:
        name = it.space.name
        entry: dict[str, Any] = {
            "kind": "weights" if name in sides.weights.members else "channels",
            "select": list(it.space.select),
        }
        entry |= {
            "exclude": list(it.space.exclude),
            "total": it.total,
            "asked": it.keep,
            "kept": max(kept[name], left[name]),
        }
        masked = _count_masked(sides.channels, name) - max(0, left[name] - sides.kept[name])
        found[name] = entry | ({"alive": left[name]} if left[name] != kept[name] else {})
        found[name] |= {"masked": masked} if masked > 0 else {}
        found[name] |= {"fixed": it.fixed} if name not in sides.weights.members and it.fixed else {}
    return found


def _count_masked(channels: ChannelSide | None, space: str) -> int:
    """How many channels of a space are masked and not removed."""
    if channels is None or space not in channels.members:
        return 0
    return int((channels.dead & channels.graph.alive)[channels.members[space].units].sum())


def _cut_along(name: str, dead: Tensor, cuts: Mapping[str, Cut], parameters: Mapping[str, Tensor]) -> Tensor:
    if name not in parameters:
        raise changed_model(ShrinkError, name, "is not there any more, and the model was cut since")
    parameter, left = parameters[name], left_of(dead, cuts[name]) if name in cuts else dead
    if left.shape != parameter.shape:
        raise ShrinkError(
            f"parameter {name!r}: has shape {tuple(parameter.shape)}, its mask {tuple(left.shape)}: it was cut or "
            f"replaced by something else than keepk. Change the model first, then make the Pruner."
        )
    if name.rpartition(".")[2] != "bias":
        return left
    return left & (parameter.detach() == 0).to(left.device)  # compact folds constants into biases, which then live


def _shape_now(_name: str, parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape)
