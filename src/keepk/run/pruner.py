"""The `Pruner`: the paper's algorithm beside a user's own training loop."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count as count_up
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepk.cut.certificate import Certificate, certificate_of, certified, certify, masked_places
from keepk.cut.ddp import TAKEN_BACK, disarm, refuse_other_wrapper, rewrapped
from keepk.cut.followers import Follower, followed, refuse_no_followers, refuse_strange_followers
from keepk.cut.hold import without_updates
from keepk.cut.optimizer_state import restart_flat_history
from keepk.cut.record import Places
from keepk.cut.undo import Undo, undone_by
from keepk.errors import KeepkError, PlanError, SpaceError
from keepk.graph.given import TraceInputs, TrainMode, ValueBranches
from keepk.graph.wrappers import named_parameters, unwrap
from keepk.plan.numbers import count
from keepk.plan.phases import Goal, Phase, check_phases, timeline
from keepk.plan.spaces import Space
from keepk.run.agree import agreed, are_several, carried_out
from keepk.run.parties import (
    channel_side,
    checked_optimizers,
    frozen_by_epoch,
    listed_spaces,
    refuse_masked_directions,
    refuse_unfit_followers,
    refuse_weights_that_end_before_channels,
    refuse_wrong_types,
)
from keepk.run.resolve import find_members
from keepk.run.sides import Event, Shrink, Sides, certificate
from keepk.run.state import pruner_state, read_pruner_state
from keepk.run.surgery import Replayed
from keepk.run.undercut import find_rooms, late_goals, refuse_undercut
from keepk.run.weight_side import WeightSide

Wrapper = TypeVar("Wrapper")
_LIVE: WeakValueDictionary[int, "Pruner"] = WeakValueDictionary()  # in the order in which they were made
_NUMBERS = count_up()


class Pruner:
    """Keeps exactly K weights or channels in every space, by the plan, while the user's own loop trains.

    Call `step` at the end of every epoch: it ranks the units of each space and keeps exactly as many as the plan says.
    Weights that go are zero from then on, after every ``optimizer.step()``; channels that go are taken out of the
    model, the optimizer and the followers, or masked. Nothing in the model is renamed, wrapped or replaced. When the
    plan has ended, `step` changes nothing and the masks are still held, so fine-tuning is simply more training.

    Args:
        model: The user's model; `DistributedDataParallel` and `torch.compile` wrappers are looked through.
        spaces: What to keep: one or more of `keepk.weights(...)` and `keepk.channels(...)`.
        optimizer: The optimizer (or several) that trains the model. None if nothing trains after an event: without it
            the zeros are not held.
        epochs: How long the plan is. None takes the schedules' own length.
        phases: Spans of epochs in which some spaces are pruned and some parameters frozen; their sum is the length.
        example: An input, as for `keepk.trace`; needed for channels. It is kept, to count multiply-accumulates.
        examples: Several inputs, for a model that takes different paths; see `keepk.trace`.
        training_example: The input of the model's forward in train mode, if it differs.
        train_mode: "accept" allows a forward that fails in train mode on the example; see `keepk.trace`.
        value_branches: "accept" leaves paths unknown that no example takes; see `keepk.trace`.
        replay: Whether each cut is first replayed at its own sizes, on a copy without weights. An event is refused,
            and nothing changes, if forward would then fail or do something else than the trace has seen.
        shrink: Channels are taken out at "each" event, at the "end" of their plans, or "never"; until then they are
            masked.
        followers: Who follows the model's weights, and is cut and zeroed along at every event: an `AveragedModel`, a
            copy, dicts of tensors.

    >>> import keepk
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> spaces = [keepk.weights("*.weight", keep=33, name="all", schedule=keepk.Annealing(p0=0.5, n1=2, nu=0.2))]
    >>> pruner = Pruner(model, spaces, optimizer)
    >>> pruner.plan
    {'all': (119, 110, 66, 33)}
    >>> for epoch in range(pruner.epochs):
    ...     for batch in torch.randn(2, 8, 20):
    ...         model(batch).square().mean().backward()
    ...         optimizer.step()
    ...     pruner.step()
    >>> pruner.done, pruner.kept, sum(int(mask.sum()) for mask in pruner.masks.values())
    (True, {'all': 33}, 33)

    >>> pruner.close()  # a model has one Pruner at a time
    >>> pruner = Pruner(model, [keepk.channels("0", keep=4)], optimizer, example=torch.randn(2, 20))
    >>> pruner.step()
    >>> model
    Sequential(
      (0): Linear(in_features=20, out_features=4, bias=True)
      (1): ReLU()
      (2): Linear(in_features=4, out_features=2, bias=True)
    )

    """

    def __init__(
        self,
        model: nn.Module,
        spaces: Space | Sequence[Space],
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        epochs: int | None = None,
        phases: Sequence[Phase] | None = None,
        example: Any = None,
        examples: Sequence[Any] | None = None,
        training_example: Any = None,
        train_mode: TrainMode = "check",
        value_branches: ValueBranches = "check",
        shrink: Shrink = "each",
        replay: bool = True,
        followers: Sequence[Follower] = (),
    ) -> None:
        refuse_wrong_types(model, spaces, phases, shrink)
        refuse_no_followers(followers, model, "Pruner")
        if epochs is not None:
            count(epochs, "Pruner: epochs", PlanError, least=1)
        of_weights, of_channels = listed_spaces(spaces)
        self._model, self._example = unwrap(model), examples[0] if example is None and examples else example
        weights = WeightSide(self._model, find_members(model, of_weights))
        names = {parameter: name for name, parameter in weights.parameters.items()}
        self._frozen_by_epoch = frozen_by_epoch(model, phases or ())
        self._optimizers = checked_optimizers(model, optimizer, names, any(self._frozen_by_epoch))
        self._followers = followers
        refuse_strange_followers(followers, named_parameters(model))
        inputs = None
        if of_channels and self._example is not None:
            inputs = TraceInputs.of(example, examples, training_example, train_mode, value_branches)
        # Channels that are masked until the end are replayed at once: later they cannot come back.
        replayed: Replayed = "none" if not replay else "masks" if shrink == "end" else "cuts"
        channels = channel_side(model, inputs, of_channels, self._optimizers, followers, replayed)
        _refuse_second(model)
        refuse_unfit_followers(followers, weights, channels)
        members: list[Any] = [*weights.members.values(), *(channels.members.values() if channels else ())]
        goals = {it.space.name: Goal(it.total, it.keep, it.space.schedule) for it in members}
        self._totals = {name: goal.total for name, goal in goals.items()}
        rooms = find_rooms(self._model, weights, channels)
        if phases is not None and channels is not None:
            check_phases(goals, epochs, phases)
            goals |= late_goals(goals, channels, rooms, phases)
        plan = timeline(goals, epochs=epochs, phases=phases)
        plan |= channels.settle(plan) if channels else {}
        self._plan = {space.name: plan[space.name] for space in (spaces if isinstance(spaces, Sequence) else [spaces])}
        refuse_weights_that_end_before_channels(self._plan, weights, channels)
        refuse_undercut(self._plan, rooms)
        refuse_masked_directions(self._model, weights, channels, shrink)
        self._sides = Sides(self._model, weights, channels, self._optimizers, followers, shrink)
        self._watch = weights.watch
        if channels is not None:
            channels.watch = self._watch
            channels.warn_of_uncounted()
            channels.follow_statistics()
        self._frozen: tuple[nn.Parameter, ...] = ()
        self._handles: list[RemovableHandle] | None = self._hook()
        _LIVE[next(_NUMBERS)] = self

    @property
    def plan(self) -> dict[str, tuple[int, ...]]:
        """By space: how many units are left after epochs 1, 2, ... of the run."""
        return dict(self._plan)

    @property
    def epochs(self) -> int:
        """How many events the plan has."""
        return len(next(iter(self._plan.values())))

    @property
    def epoch(self) -> int:
        """How many events are behind us."""
        return self._epoch

    @property
    def done(self) -> bool:
        """Whether the plan has ended."""
        return self._epoch >= self.epochs

    @property
    def kept(self) -> dict[str, int]:
        """By space: how many units are left now, counted on the model's tensors.

        A masked weight that is not 0.0 counts as left, no matter what brought it back, and so does a kept one that is
        0.0. A `KeepkWarning` has both numbers if that is not what the last event kept; `apply_masks` puts it right.
        """
        return self._counted("kept")

    @property
    def masks(self) -> dict[str, Tensor]:
        """By parameter: which entries are kept. The mask says so, not the value: a kept weight may be 0.0."""
        self._follow_cuts()
        return self._sides.masks

    @property
    def certificate(self) -> dict[str, dict[str, Any]]:
        """By space: its kind, its globs, how many units there were, are asked for, and were kept at the last event.

        Also how many are alive, if it is another number: fewer after `keepk.compact`; more, with a `KeepkWarning`, if
        pruned units came back, and then ``kept`` has that number too. Of channels also how many are ``masked`` and not
        removed, and how many ``fixed`` ones its layers have besides, which cannot be removed and are not counted.
        """
        return self.counted_certificate("certificate")

    def counted_certificate(self, asked_by: str) -> Certificate:
        """The certificate by the model's tensors; it warns once of each space whose count is not true, per asker."""
        found = certificate(self._sides, self._counted(asked_by))
        return {name: found[name] for name in self._plan}

    @property
    def closed(self) -> bool:
        """Whether it has let go of the optimizer."""
        return self._handles is None

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self._model

    @property
    def example(self) -> Any:
        """The example that was given."""
        return self._example

    @torch.no_grad()
    def step(self, wrapper: Wrapper | None = None) -> Wrapper | None:
        """End an epoch: keep exactly as many units of each space as the plan says.

        All or nothing: whatever cannot be ranked or removed is refused before the first weight changes. With several
        processes all of them call it, and all keep the same units.

        Args:
            wrapper: The `DistributedDataParallel` wrapper of the model, if channels are taken out of it. The old
                wrapper cannot be used afterwards; go on with the one that is returned: ``ddp = pruner.step(ddp)``.
        """
        if self.done:
            self._follow_cuts()
            self._refuse_unusable(wrapper)
            self._zero_masked()
            return wrapper
        device = next(self._model.parameters()).device
        event = agreed(lambda: self._decide(wrapper), lambda it: it.told, device)
        before, now = self._planned(self._epoch), self._planned(self._epoch + 1)
        rewraps: Any = wrapper if event.cuts else None
        try:
            carried_out(lambda: self._carry_out(event), device)
        except Exception:
            if rewraps is not None:
                disarm(rewraps, TAKEN_BACK)  # it would no longer average gradients, without a word
            raise
        self._watch.event(fell=any(now[name] < before[name] for name in now))
        self._follow_statistics()
        if rewraps is None:
            return wrapper
        disarm(rewraps)
        return rewrapped(rewraps)  # type: ignore[return-value]  # of the same class

    @torch.no_grad()
    def apply_masks(self) -> None:
        """Set every masked entry to zero again: in the model, in the optimizer's state and in the followers.

        Every step of the Pruner's optimizer does this. Call it after anything else that writes into the model, such as
        ``model.load_state_dict(best)``, and the counts of `kept`, `keepk.report` and `keepk.save` are true again.

        >>> import keepk
        >>> model = nn.Linear(10, 10)
        >>> dense = {name: value.clone() for name, value in model.state_dict().items()}
        >>> pruner = Pruner(model, keepk.weights("weight", keep=25))
        >>> pruner.step()
        >>> _ = model.load_state_dict(dense)
        >>> pruner.apply_masks()
        >>> pruner.kept
        {'weight': 25}
        """
        self._follow_cuts()
        self._sides.apply_masks()

    def untrue_counts(self) -> dict[str, tuple[int, int]]:
        """By space whose count is not true: how many units the last event left, and how many are there now.

        Reads only: where masks have not followed a cut yet, they have no count to compare.
        """
        if self._sides.behind:
            return {}
        claimed, found = self._sides.kept, self._sides.counted
        return {name: (claimed[name], found[name]) for name in self._plan if claimed[name] != found[name]}

    def warn_of_save_before_step(self) -> None:
        """Warn, once, of a model that is saved before its first event."""
        space = next((name for name, total in self._totals.items() if self._plan[name][-1] < total), None)
        if self._epoch == 0 and space is not None:
            self._watch.once(
                ("unpruned",),
                f"save: the model's Pruner has not made a step yet, so nothing is pruned: space {space!r} has all its "
                f"{self._totals[space]:,} units, asked for are {self._plan[space][-1]:,}. Call pruner.step() first. To "
                f"save the dense model on purpose, do it before the Pruner is made, or after pruner.close().",
            )

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, as plain values and bool tensors; loads with ``weights_only=True``."""
        self._follow_cuts()
        self._sides.refuse_revived()
        self._sides.refuse_cut_elsewhere()
        return pruner_state(self._sides.weights, self._sides.channels, self._plan, self._epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stood. A state of another model, plan or version is refused, and nothing changes.

        A freshly built model is cut to the size that it had then.
        """
        with undone_by(self.take_shape(state)):
            self.take_masks(state)

    @torch.no_grad()
    def take_shape(self, state: Mapping[str, Any]) -> Undo:
        """The first half of `load_state_dict`: cut the model to its size. What is returned takes that back."""
        self._refuse_closed()
        saved = read_pruner_state(state, self._sides.weights, self._sides.channels, self._plan)
        return self._sides.take_shape(saved, self._plan)

    @torch.no_grad()
    def take_masks(self, state: Mapping[str, Any]) -> Undo:
        """The second half of `load_state_dict`, over a model of that size. What is returned forgets the masks again."""
        saved = read_pruner_state(state, self._sides.weights, self._sides.channels, self._plan)
        with ExitStack() as way_back:
            way_back.callback(self._enter_epoch, self._epoch)
            way_back.callback(self._sides.snapshot())
            self._sides.take_masks(saved, self._plan)
            self._enter_epoch(saved.epoch)
            self._watch.restart()
            self._follow_statistics()
            for module in self._certified_modules():
                way_back.callback(certified(module, *self._with_others(module))())
            return way_back.pop_all().close

    def close(self) -> None:
        """Let go of the optimizer: masks are no longer held and nothing is frozen. The weights stay as they are."""
        for handle in self._handles or ():
            handle.remove()
        self._handles = None

    @property
    def _is_at_work(self) -> bool:
        """Whether it still has events to come or holds masks."""
        return self._handles is not None and (not self.done or bool(self._sides.held))

    def __enter__(self) -> "Pruner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hook(self) -> list[RemovableHandle]:
        self._enter_epoch(0)
        handles = [optimizer.register_step_pre_hook(self._before_update) for optimizer in self._optimizers]
        return handles + [optimizer.register_step_post_hook(self._after_update) for optimizer in self._optimizers]

    def _before_update(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._follow_cuts()
        return without_updates(self._frozen, args, kwargs) if self._frozen else None

    def _follow_cuts(self) -> None:
        """Masks follow whoever cut the model since, such as `keepk.compact`."""
        if self._sides.follow_cuts():
            self._certify()
            self._follow_statistics()

    def _follow_statistics(self) -> None:
        if self._sides.channels is not None:
            self._sides.channels.follow_statistics()

    def _certify(self) -> None:
        """Write what is asked and kept into the record of the model and of the modules that follow it."""
        for module in self._certified_modules():
            certify(module, *self._with_others(module))

    def _certified_modules(self) -> list[nn.Module]:
        return [self._model, *(followed(it) for it in self._followers if isinstance(it, nn.Module))]

    def _with_others(self, module: nn.Module) -> tuple[Certificate, dict[str, Places]]:
        """The certificate and the places of masked channels, beside those of other runs over the same model."""
        others = {name: entry for name, entry in certificate_of(module).items() if name not in self._plan}
        mine = certificate(self._sides, self._sides.kept)
        masked = {name: places for name, places in masked_places(module).items() if name in others}
        return {**others, **{name: mine[name] for name in self._plan}}, {**masked, **self._sides.masked_places}

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._watch.updated(optimizer)
        self._zero_masked()

    def _zero_masked(self) -> None:
        for it in self._sides.held:
            it.zero()

    def _counted(self, asked_by: str) -> dict[str, int]:
        self._follow_cuts()
        found = self._sides.counted
        self._watch.untrue_counts(asked_by, self._sides.kept, found)
        return {name: found[name] for name in self._plan}

    def _planned(self, epoch: int) -> dict[str, int]:
        """By space: how many units the plan leaves after a number of events."""
        return {name: counts[epoch - 1] if epoch else self._totals[name] for name, counts in self._plan.items()}

    def _decide(self, wrapper: Any) -> Event:
        """What the event does; all that one process may refuse is refused here, so that no other waits for it."""
        self._follow_cuts()
        self._refuse_unusable(wrapper)
        if self._optimizers:
            self._watch.hasty(self._planned(self._epoch), self._planned(self._epoch + 1), self.epochs)
        return self._sides.decide(self._plan, self._epoch, wrapper)

    def _carry_out(self, event: Event) -> Undo:
        """Apply the decision, all or nothing, and return a function that undoes it if another process fails."""
        with ExitStack() as way_back:
            way_back.callback(self._sides.follow(event, keep_values=are_several()))
            way_back.callback(self._enter_epoch, self._epoch)
            self._enter_epoch(self._epoch + 1)
            for module in self._certified_modules():
                way_back.callback(certified(module, *self._with_others(module))())
            return way_back.pop_all().close

    def _enter_epoch(self, epoch: int) -> None:
        """So many events are behind us: freeze what the phase of the coming epoch freezes."""
        self._epoch = epoch
        frozen = self._frozen_by_epoch[epoch] if epoch < len(self._frozen_by_epoch) else ()
        if frozen is not self._frozen:
            for optimizer in self._optimizers:
                restart_flat_history(optimizer)
        self._frozen = frozen

    def _refuse_unusable(self, wrapper: Any) -> None:
        self._refuse_closed()
        self._sides.refuse_revived()
        if wrapper is not None:
            refuse_other_wrapper(wrapper, self._model)

    def _refuse_closed(self) -> None:
        if self._handles is None:
            raise KeepkError("Pruner: it was closed, so masks are no longer held. Make a new one.")


def live_pruner(model: nn.Module) -> Pruner | None:
    """The latest Pruner of an unwrapped model that was not closed; None if it has none."""
    found = [pruner for pruner in list(_LIVE.values()) if pruner.model is model and not pruner.closed]
    return found[-1] if found else None


def _refuse_second(model: nn.Module) -> None:
    """Refuse a model that another Pruner is at work on: each would take what the other has promised to keep."""
    own = {id(parameter) for parameter in model.parameters()}
    if _at_work(own):
        gc.collect()  # an unreferenced one does not count
    for other in _at_work(own):
        spaces = other.plan
        named = ", ".join(f"{name!r}" for name in spaces)
        where = "at the end of its plan" if other.done else f"at epoch {other.epoch} of {other.epochs}"
        raise SpaceError(
            f"Pruner: the model has one already, of space{'s' * (len(spaces) > 1)} {named}, {where}; two would take "
            f"from each other what they keep. Give one Pruner all the spaces, or close the first: "
            f"pruner.close(). If no "
            f"variable refers to it any more, its optimizer does: delete that too."
        )


def _at_work(parameters: set[int]) -> list[Pruner]:
    """The Pruners at work on a model that has any of these parameters."""
    return [
        it for it in list(_LIVE.values()) if it._is_at_work and any(id(p) in parameters for p in it.model.parameters())
    ]
