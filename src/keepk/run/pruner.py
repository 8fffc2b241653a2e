"""The `Pruner`: prunes by a plan beside a user's own training loop.

An event, in the order in which it happens:

1. The user's loop ends an epoch and calls `Pruner.step`.
2. `Pruner._decide` refuses what cannot be used (a closed Pruner, a wrapper of another model, pruned weights that came
   back) and asks `Session.decide` (`run.session`), which asks each side to add its decisions to an `Event`:

   * `ChannelSide.decide` first. The metric scores the layers (`metrics.channels.channel_scores`), `keep_best`
     (`rank.channels`) keeps exactly as many channels as the plan says, and `Surgery.operation` prepares the removal:
     every new tensor is made, and the cut is replayed on a copy without weights. The model is still whole.
   * `WeightSide.decide` then, because K counts the weights in channels that stay. `cut_points` (`rank.weights`) finds,
     for each tensor, the value to cut at and how many ties stay; `dead_mask` makes the new masks.

3. `agreed` (`run.distributed`) compares the decisions of all processes. Up to here nothing has changed, so any of them
   may still refuse.
4. `carried_out` runs `Session.apply` in every process, all or nothing. `ChannelSide.apply` puts the new tensors in
   place (or takes over masks), `WeightSide.apply` takes over the masks, and `Session._hold` zeroes weights, optimizer
   state and followers. The session then enters the next epoch, which may freeze other parameters, and writes the
   certificate into the model's record. If another process fails, the undo takes all of it back.
5. Training goes on. After every ``optimizer.step()`` the hook `Pruner._after_update` zeroes the masked weights again.

Before all that, `Pruner.__init__` has the arguments checked by `run_spec` (`run.checks`), whose result, a frozen
`RunSpec`, is all that a `Session` is made from.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepk.cut.ddp import TAKEN_BACK, disarm, refuse_other_wrapper, rewrapped
from keepk.cut.holders import Follower
from keepk.cut.masks import without_updates
from keepk.cut.record import Certificate
from keepk.model.edits import undone_by
from keepk.model.example import TrainMode, ValueBranches
from keepk.plan.phases import Phase
from keepk.plan.spaces import Space
from keepk.run.channels import Event
from keepk.run.checks import Shrink, register_live, run_spec
from keepk.run.distributed import agreed, are_several, carried_out
from keepk.run.session import Session

if TYPE_CHECKING:
    from keepk.reports.run import RunReport

Wrapper = TypeVar("Wrapper")
SHOWN = 10  # spaces in a repr


class Pruner:
    """Prunes a model to exactly K weights or channels per space while the user's own loop trains it.

    Call `step` at the end of every epoch. It ranks the units of each space and keeps exactly as many as the plan says.
    Pruned weights are zero from then on, after every ``optimizer.step()``; pruned channels are removed from the model,
    the optimizer and the followers, or masked. Nothing in the model is renamed, wrapped or replaced. After the last
    event of the plan, `step` prunes nothing more and the masks are still held, so fine-tuning is simply more training.

    Args:
        model: The model; `DistributedDataParallel` and `torch.compile` wrappers are looked through.
        spaces: What to keep: one or more of `keepk.weights(...)` and `keepk.channels(...)`.
        optimizer: The optimizer that trains the model, or several. Pass None only if nothing trains after an event:
            without an optimizer the zeros are not held.
        epochs: The length of the plan. None takes the schedules' own length.
        phases: Spans of epochs in which some spaces are pruned and some parameters frozen; their sum is the length.
        example: An input, as for `keepk.trace`; required for channels. It is kept, to count multiply-accumulates.
        examples: Several inputs, for a model that takes different paths; see `keepk.trace`.
        training_example: The input of the model's forward in train mode, if it differs.
        train_mode: "accept" allows a forward that fails in train mode on the example; see `keepk.trace`.
        value_branches: "accept" leaves paths unknown that no example takes; see `keepk.trace`.
        replay: Whether each cut is first replayed at its own sizes, on a copy without weights. An event is refused,
            and nothing changes, if forward would then fail or differ from what the trace has seen.
        shrink: Channels are removed at "each" event, at the "end" of their plans, or "never"; until then they are
            masked.
        followers: Copies of the model's weights that are cut and zeroed with it at every event: an `AveragedModel`, a
            copy of the model, dicts of tensors.

    Raises:
        SpaceError: A space matches nothing, asks for more than there is, overlaps another space, or the model has an
            open Pruner already.
        PlanError: A schedule cannot end at K in its epochs, or the phases or the plans of two spaces contradict each
            other.
        OptimizerError: An optimizer does not train the model, or its state cannot be zeroed weight by weight.
        ShrinkError: A follower does not have the model's tensors.
        TraceError: The example does not fit the model, or the model cannot be traced.

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
        self._spec = run_spec(
            model,
            spaces,
            optimizer,
            epochs=epochs,
            phases=phases,
            example=example,
            examples=examples,
            training_example=training_example,
            train_mode=train_mode,
            value_branches=value_branches,
            shrink=shrink,
            replay=replay,
            followers=followers,
        )
        self._session = Session(self._spec)
        self._handles: list[RemovableHandle] = []
        # Public hooks only: nothing of the optimizer is replaced, and `close` leaves no trace.
        for it in self._spec.optimizers:
            self._handles.append(it.register_step_pre_hook(self._before_update))
        for it in self._spec.optimizers:
            self._handles.append(it.register_step_post_hook(self._after_update))
        register_live(self)

    @property
    def plan(self) -> dict[str, tuple[int, ...]]:
        """By space: how many units are left after epochs 1, 2, ... of the run."""
        # A plain dict, so that it can be pickled, written as JSON and put into a checkpoint's extra.
        return dict(self._spec.plan)

    @property
    def epochs(self) -> int:
        """The number of events in the plan."""
        return len(next(iter(self._spec.plan.values())))

    @property
    def epoch(self) -> int:
        """The number of events so far."""
        return self._session.epoch

    @property
    def done(self) -> bool:
        """Whether the plan has ended."""
        return self.epoch >= self.epochs

    @property
    def kept(self) -> dict[str, int]:
        """By space: how many units are left now, counted on the model's tensors.

        A masked weight that is not 0.0 counts as left, no matter how it came back, and so does a kept one that is 0.0.
        If the count differs from what the last event kept, a `KeepkWarning` has both numbers; `apply_masks` repairs it.
        """
        return self._counted("kept")

    @property
    def masks(self) -> dict[str, Tensor]:
        """By parameter: which entries are kept. The mask says so, not the value: a kept weight may be 0.0."""
        self._session.follow_cuts()
        return self._session.masks

    @property
    def certificate(self) -> dict[str, dict[str, Any]]:
        """By space: its kind, its globs, and its units: ``total``, ``asked`` for, and ``kept`` at the last event.

        ``alive`` is there if another number is left now: fewer after `keepk.compact`; more, with a `KeepkWarning`, if
        pruned units came back, and then ``kept`` has that number too. Channel spaces also say how many channels are
        ``masked`` and not removed, and how many ``fixed`` ones their layers have, which cannot be removed and are not
        counted.
        """
        return self.counted_certificate("certificate")

    def counted_certificate(self, asked_by: str) -> Certificate:
        """The certificate by the model's tensors; warns once per space and caller if a count is not true."""
        return self._session.certificate(self._counted(asked_by))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.closed

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self._spec.model

    @property
    def example(self) -> Any:
        """The example that was passed; the first of several."""
        return self._spec.example

    @overload
    def step(self, wrapper: None = None) -> None: ...

    @overload
    def step(self, wrapper: Wrapper) -> Wrapper: ...

    @torch.no_grad()
    def step(self, wrapper: Wrapper | None = None) -> Wrapper | None:
        """End an epoch: keep exactly as many units of each space as the plan says.

        All or nothing: anything that cannot be ranked or removed is refused before the first weight changes. With
        several processes, all of them must call it, and all keep the same units. After the plan has ended, it only
        zeroes the masked weights again.

        Args:
            wrapper: The `DistributedDataParallel` wrapper of the model, if channels are removed from it. The old
                wrapper cannot be used afterwards; continue with the returned one: ``ddp = pruner.step(ddp)``.

        Returns:
            A new wrapper if one was passed and the event removed channels; otherwise `wrapper` itself.

        Raises:
            RankError: Weights or scores are NaN or infinite, or channels leave fewer weights than the plan says.
            ShrinkError: Channels cannot be removed, or the model was changed since the Pruner was made.
            OptimizerError: The optimizer has state that cannot be zeroed weight by weight.
            DisagreementError: Another process has failed or would keep different units.
            StateError: Pruned weights came back and the Pruner has no optimizer to hold them.
            KeepkError: The Pruner is closed.

        >>> import keepk
        >>> model = nn.Linear(10, 10)
        >>> pruner = Pruner(model, keepk.weights("weight", keep=25, schedule=[50, 25]))
        >>> pruner.step()
        >>> pruner.kept
        {'weight': 50}
        """
        session = self._session
        if self.done:
            session.follow_cuts()
            self._refuse_unusable(wrapper)
            session.zero_masked()
            return wrapper
        before, now = session.planned(self.epoch), session.planned(self.epoch + 1)
        device = next(self._spec.model.parameters()).device
        event = agreed(lambda: self._decide(wrapper, before, now), lambda it: it.told, device)
        # DDP holds the shapes of the parameters that it was made from, so it has to be made again after a cut.
        old: Any = wrapper if event.cuts else None
        try:
            # Zeroed values are copied only if another process may still fail after this one has succeeded.
            carried_out(lambda: session.apply(event, keep_values=are_several()), device)
        except Exception:
            if old is not None:
                disarm(old, TAKEN_BACK)  # it would no longer average gradients, without a word
            raise
        session.watch.event(fell=any(now[name] < before[name] for name in now))
        session.channels.follow_statistics()  # those of the next epoch are of the network that is left
        if old is None:
            return wrapper
        disarm(old)
        return rewrapped(old)  # type: ignore[return-value]  # of the same class

    @torch.no_grad()
    def apply_masks(self) -> None:
        """Set every masked entry to zero again: in the model, in the optimizer's state and in the followers.

        Every step of the Pruner's optimizer does this for the model. Call it after anything else that writes into the
        model, such as ``model.load_state_dict(best)``; then the counts of `kept`, `keepk.report` and `keepk.save` are
        true again.

        Raises:
            StateError: A parameter with a mask is gone or has another shape.

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
        self._session.follow_cuts()
        self._session.apply_masks()

    def report(self, *, error: float | None = None) -> "RunReport":
        """A summary of the run: planned, kept and requested units per space, parameters and MACs.

        Args:
            error: An error in percent to show in the report.

        Returns:
            A `RunReport`. It prints as a table; ``.line`` fits a progress bar, ``.data()`` is plain values.

        Raises:
            KeepkError: `error` is not a number.

        >>> import keepk
        >>> pruner = Pruner(nn.Linear(10, 10), keepk.weights("weight", keep=25))
        >>> pruner.step()
        >>> pruner.report().line
        'epoch 1/1: kept weight 25 of 100; 110 parameters (75 masked)'
        """
        # Imported here because reports are made from runs, and rooms import from their left only. A method is easier
        # to find than a function that takes the Pruner, so this is the one exception.
        from keepk.reports.run import report  # noqa: PLC0415

        return report(self, error=error)

    def untrue_counts(self) -> dict[str, tuple[int, int]]:
        """By space whose count is not true: how many units the last event left, and how many there are now.

        Reads only: masks that have not been cut with the model yet have no count to compare.
        """
        session = self._session
        if session.behind:
            return {}
        # `keepk.save` asks this before it writes anything, and a save must not change the run.
        claimed, found = session.kept, session.counted
        return {name: (claimed[name], found[name]) for name in self._spec.plan if claimed[name] != found[name]}

    def warn_of_save_before_step(self) -> None:
        """Warn, once, about a model that is saved before its first event."""
        totals, plan = self._spec.totals, self._spec.plan
        space = next((name for name, total in totals.items() if plan[name][-1] < total), None)
        if self.epoch == 0 and space is not None:
            self._session.watch.once(
                ("unpruned",),
                f"save: the model's Pruner has not made a step yet, so nothing is pruned: space {space!r} still has "
                f"all of its {totals[space]:,} units, and its target is {plan[space][-1]:,}. Call pruner.step() first. "
                f"To save the dense model on purpose, do it before the Pruner is made, or after pruner.close().",
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of the run as plain values and bool tensors.

        Returns:
            A dict that ``torch.load(..., weights_only=True)`` reads.

        Raises:
            StateError: The model was cut by `keepk.compact` or `keepk.shrink` since the run began, or pruned weights
                came back and the Pruner has no optimizer to hold them.
        """
        return self._session.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: cut a freshly built model to the size that it had, and take over masks and epoch.

        Args:
            state: What `state_dict` returned.

        Raises:
            StateError: The state comes from a different model, plan or format version. Nothing changes then.
            KeepkError: The Pruner is closed.

        >>> import keepk
        >>> def make():
        ...     torch.manual_seed(0)
        ...     return Pruner(nn.Linear(10, 10), keepk.weights("weight", keep=25, schedule=[50, 25]))
        >>> first, second = make(), make()
        >>> first.step()
        >>> second.load_state_dict(first.state_dict())
        >>> second.epoch, second.kept
        (1, {'weight': 50})
        """
        # Two halves, because `load_checkpoint` has to load the model and the optimizer between them.
        with undone_by(self._session.take_shape(state)):
            self._session.take_masks(state)

    def close(self) -> None:
        """Remove the hooks from the optimizer: masks are no longer held and nothing is frozen. Weights stay as is."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._session.closed = True

    def __enter__(self) -> "Pruner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """A line for the run and one for each space, by the run's own account: nothing is counted or changed."""
        session, totals, plan = self._session, self._spec.totals, self._spec.plan
        kinds = {name: side.kind for side in session.sides for name in side.members}
        kept, closed = session.kept, ", closed" if self.closed else ""
        lines = [f"Pruner(epoch {self.epoch} of {self.epochs}{closed})"]
        for name in list(plan)[:SHOWN]:
            count = f"{kept[name]:,} of {totals[name]:,} {kinds[name]} kept"
            lines.append(f"  {name}: {count}, {plan[name][-1]:,} at the end")
        lines += [f"  ... and {len(plan) - SHOWN} more spaces"] if len(plan) > SHOWN else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The plan as a table, below the epoch."""
        from keepk.reports.tables import plan_html  # noqa: PLC0415 - for notebooks only, see `report`

        return f"<p>Plan of a Pruner at epoch {self.epoch} of {self.epochs}</p>{plan_html(self._spec.plan)}"

    @property
    def _is_at_work(self) -> bool:
        """Whether events are still to come or masks are held."""
        return not self.closed and (not self.done or bool(self._session.held))

    def _before_update(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The hook before an optimizer step: frozen parameters get no gradient, so no update either."""
        self._session.follow_cuts()
        frozen = self._session.frozen
        return without_updates(frozen, args, kwargs) if frozen else None

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The hook after an optimizer step: momentum or weight decay may have moved masked weights."""
        self._session.watch.updated(optimizer)
        self._session.zero_masked()

    def _decide(self, wrapper: Any, before: Mapping[str, int], now: Mapping[str, int]) -> Event:
        """The decisions of the event. Everything that one process may refuse is refused here: others wait for it."""
        self._session.follow_cuts()
        self._refuse_unusable(wrapper)
        # Without an optimizer there are no steps to count, so pruning without training is no mistake.
        if self._spec.optimizers:
            self._session.watch.hasty(before, now, self.epochs)
        return self._session.decide(wrapper)

    def _refuse_unusable(self, wrapper: Any) -> None:
        self._session.refuse_closed()
        self._session.refuse_revived()
        if wrapper is not None:
            refuse_other_wrapper(wrapper, self._spec.model)

    def _counted(self, asked_by: str) -> dict[str, int]:
        """By space: the units left by the model's tensors, with a warning where the run's own account differs."""
        self._session.follow_cuts()
        found = self._session.counted
        self._session.watch.untrue_counts(asked_by, self._session.kept, found)
        return {name: found[name] for name in self._spec.plan}
