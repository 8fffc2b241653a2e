"""The `Pruner`: prunes a model by a plan while the user's own loop trains it.

One call of `Pruner.step` is an *event*. It runs in this order:

1. The user's loop ends an epoch and calls `Pruner.step`.
2. `Pruner._decide` refuses unusable state (a closed Pruner, a wrapper of another model, pruned weights that are no
   longer zero) and calls `Session.decide` (`run.session`). The session has two sides, one for channel spaces and one
   for weight spaces. Each adds its decisions to an `Event`, without changing the model:

   * `ChannelSide.decide` runs first. The metric scores the layers (`metrics.channels.channel_scores`), `keep_best`
     (`rank.channels`) keeps exactly as many channels as the plan says, and `Surgery.operation` prepares the removal: it
     makes every new tensor and replays the cut on a copy without weights.
   * `WeightSide.decide` runs second, because the K of a weight space counts weights in the remaining channels only.
     `cut_points` (`rank.weights`) finds the threshold of each tensor and how many weights tied with it to keep;
     `dead_mask` makes the new masks.

3. `agreed` (`run.distributed`) compares the decisions of all processes. Nothing has changed so far, so any process can
   still refuse.
4. `carried_out` runs `Session.apply` in every process, all or nothing. `ChannelSide.apply` puts the new tensors in
   place (or stores the new masks), `WeightSide.apply` stores its masks, and `Session._hold` zeroes masked weights,
   their optimizer state and the followers. The session then enters the next epoch, which may freeze other parameters,
   and writes the certificate into the model's record. If any process fails, the others undo their changes.
5. Training continues. After every ``optimizer.step()``, the hook `Pruner._after_update` zeroes the masked weights
   again.

Before the first event, `Pruner.__init__` checks its arguments with `run_spec` (`run.checks`) and builds the `Session`
from the result, a frozen `RunSpec`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepk.cut.holders import TAKEN_BACK, Follower, disarm, refuse_other_wrapper, rewrapped
from keepk.cut.masks import without_updates
from keepk.cut.record import Certificate
from keepk.errors import ShrinkError
from keepk.metrics.statistics import Statistics
from keepk.model.example import TrainMode, ValueBranches
from keepk.model.names import unwrap
from keepk.model.sharded import exchange_device, plain_twin, reshard_around, sharded_otherwise
from keepk.plan.budgets import WORDS, checked_budget
from keepk.plan.phases import Phase
from keepk.plan.spaces import Space
from keepk.run.channels import Event
from keepk.run.checks import Shrink, register_live, run_spec
from keepk.run.distributed import Exchange, agreed, are_several, carried_out, summed
from keepk.run.session import Session
from keepk.run.sharded_channels import exchange_to_make

if TYPE_CHECKING:
    from keepk.reports.run import RunReport

Wrapper = TypeVar("Wrapper")
SHOWN = 10  # spaces in a repr


class Pruner:
    """Prunes a model to exactly K weights or channels per space while the user's own loop trains it.

    Call `step` at the end of every epoch. It ranks the units of each space and keeps exactly as many as the plan says.
    Pruned weights stay zero through every following ``optimizer.step()``. Pruned channels are removed from the model,
    the optimizer and the followers, or masked. No module or parameter is renamed or wrapped, and only parameters
    that FSDP2 shards are replaced when they are cut (see `step`). After the last event of the plan, `step` prunes
    nothing more but still keeps masked weights at zero, so fine-tuning is just more training.

    Args:
        model: The model; `DistributedDataParallel` and `torch.compile` wrappers are looked through.
        spaces: What to keep: one or more of `keepk.weights(...)` and `keepk.channels(...)`.
        optimizer: The optimizer that trains the model, or several. Wrappers without state of their own (accelerate's,
            Fabric's) are looked through. Pass None only if nothing trains after an event, because without an optimizer
            the zeros are not held, and () if you build it later and pass it to `attach`.
        epochs: The length of the plan. None uses the length of the schedules.
        phases: Spans of epochs in which some spaces are pruned and some parameters frozen. Their lengths add up to the
            length of the plan.
        example: An input, as for `keepk.trace`; required for channels. The Pruner keeps it to count MACs in reports.
        examples: Several inputs, for a model that takes different paths; see `keepk.trace`.
        training_example: The input of forward in train mode, if it differs from `example`.
        train_mode: "accept" allows a forward that fails in train mode on the example; see `keepk.trace`.
        value_branches: "accept" allows a forward with paths that no example takes; see `keepk.trace`.
        replay: Whether to run forward first at the new sizes, on a copy without weights, before channels are cut. If
            forward fails or computes something that the trace has not seen, the event is refused and nothing changes.
        shrink: Channels are removed at "each" event, at the "end" of their plans, or "never"; until then they are
            masked.
        followers: Copies of the model's weights, to be cut and zeroed with it at every event: an `AveragedModel`,
            timm's ``ModelEmaV3``, a copy of the model, dicts of tensors.
        macs: One budget for all channel spaces that have no `keep`, `prune`, `macs` or `parameters` of their own: a
            bound on the multiply-accumulates of the whole model, per sample. A float below 1 is a share of `model` as
            it is given, an int is the number itself. Each of these spaces keeps the same share of its channels, to the
            block. They need equal schedules, which lower the bound.
        parameters: The same for the number of parameters of the whole model.

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

    def __init__(  # noqa: PLR0913 - all but three by name; a budget is a number of the run, as in keepk.channels
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
        macs: float | None = None,
        parameters: float | None = None,
    ) -> None:
        made = list[Session]()

        def make() -> None:
            spec = run_spec(
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
                budget=checked_budget("Pruner", macs, parameters),
            )
            made.append(Session(spec))

        # Channels of a sharded model are ranked by all processes together, so a failure in one has to reach the others.
        exchange_to_make(model, spaces).together("a new Pruner", make)
        [self._session] = made
        self._spec = self._session.spec
        self._handles: list[RemovableHandle] = []
        # Public hooks only: the optimizer's methods are never replaced, and `close` removes the hooks again.
        for it in self._session.optimizers:
            self._hook(it)
        register_live(self)

    @property
    def plan(self) -> dict[str, tuple[int, ...]]:
        """By space: how many units are left after epochs 1, 2, ... of the run.

        For a space with a budget these are the bounds on the cost of the whole model, in MACs per sample or parameters.
        A budget of the `Pruner` has an entry named ``"macs"`` or ``"parameters"``, and its spaces have none. See
        `implied` for the number of channels.
        """
        # A plain dict, so that it can be pickled, written as JSON and put into a checkpoint's extra.
        return dict(self._spec.plan)

    @property
    def spaces(self) -> tuple[str, ...]:
        """The names of the spaces."""
        return self._spec.names

    @property
    def implied(self) -> dict[str, tuple[int, ...]]:
        """By space with a budget: how many channels are left after epochs 1, 2, ... of the run.

        Past events have the numbers that they kept. For those to come, the plan fixes the cost and not the number of
        channels, so these are the numbers that the present ranking implies. They change as the model trains.

        Raises:
            RankError: The channels cannot be ranked now, for example because a metric has seen no gradients.
            DisagreementError: The model is sharded, and another process has failed.

        >>> import keepk
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> spaces = [keepk.channels("0", macs=0.5, schedule=[50, 33])]
        >>> with Pruner(model, spaces, example=torch.zeros(2, 8)) as pruner:
        ...     pruner.plan, pruner.implied  # a hidden neuron has 8 + 3 MACs
        ({'0': (50, 33)}, {'0': (4, 3)})
        """
        found, session = dict[str, tuple[int, ...]](), self._session
        alone = self.ranks_alone or not session.channels.budgets
        exchange = session.exchange("rank the channels", "Nothing has changed.", call="implied", alone=alone)
        with torch.no_grad():
            exchange.together("implied counts", lambda: found.update(session.channels.implied))
        return found

    @property
    def ranks_alone(self) -> bool:
        """Whether this process can rank units without others; False if they have shards of the model."""
        return not (self._session.sharded and are_several())

    @property
    def budgets(self) -> dict[str, dict[str, Any]]:
        """By budget, under its name in `plan`: the bounds, and the cost that the last event reached.

        The entries are ``cost`` ("macs", per sample, or "parameters"), ``spaces``, ``dense``, ``planned``, the bound
        after the last event, ``asked``, the bound at the end, and ``reached``. Masked channels count as removed.
        """
        planned, reached = self._session.planned(self.epoch), self._session.channels.reached
        return {
            it.name: {
                "cost": it.cost,
                "spaces": list(it.spaces),
                "dense": it.dense,
                "planned": planned[it.name],
                "asked": it.target,
                "reached": reached[it.name],
            }
            for it in self._spec.budgets
        }

    @property
    def round_to(self) -> dict[str, dict[str, int]]:
        """By space, and by layer of it: the number of channels of which the layer keeps a multiple, or all.

        These are the numbers that ``round_to="auto"`` has chosen, or that follow from ``round_to=8``. They are 1 where
        any number may be kept, and part of `state_dict` where they were chosen.
        """
        return {name: dict(it.steps) for name, it in self._spec.channels.items()}

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
        """By space: how many units are left now, counted in the model's tensors.

        A kept weight counts even if its value is 0.0, and so does a masked weight that is no longer 0.0. If the count
        differs from the number that the last event kept, a `KeepkWarning` reports both; `apply_masks` repairs it. Of
        sharded parameters, each process looks for such weights in its own shards, so this does not communicate.
        """
        return self._counted("kept")

    @property
    def masks(self) -> dict[str, Tensor]:
        """By parameter: a bool tensor of its shape, True where an entry is kept. A kept entry may be 0.0.

        The masks of sharded parameters are sharded in the same way.
        """
        self._session.follow_cuts()
        return self._session.masks

    @property
    def certificate(self) -> dict[str, dict[str, Any]]:
        """By space: its kind, its globs, and its units: ``total``, ``asked`` for, and ``kept`` by the last event.

        ``alive`` is present if a different number is left now: fewer after `keepk.compact`, or more if pruned units are
        no longer zero. In the second case ``kept`` has the larger number too, and a `KeepkWarning` is issued. Channel
        spaces also have ``masked``, the number of channels that are masked but not removed, and ``fixed``, the number
        of channels in the same layers that cannot be removed and are not counted.

        Of a space with a budget, ``asked`` is the bound on the cost of the whole model, in the unit that ``budget``
        names; ``dense`` is the cost that the run began with, and ``reached`` the cost after the last event.
        """
        return self.counted_certificate("certificate")

    def counted_certificate(self, asked_by: str) -> Certificate:
        """The certificate with counts of the model's tensors; warns if a count is wrong.

        Args:
            asked_by: The name of the caller; each caller gets one warning per space.
        """
        return self._session.certificate(self._counted(asked_by))

    def counted_layers(self) -> list[tuple[str, str, int, int]]:
        """By layer and kind of unit: the module, the kind, the units before the first event, and those left now.

        A module that produces or reads several layers of a space is listed once for each of them.
        """
        self._session.follow_cuts()
        return self._session.counted_layers()

    def counted_masked(self) -> int:
        """How many entries of the model's parameters are masked and 0.0."""
        return self._session.counted_masked()

    @property
    def statistics(self) -> tuple[Statistics, ...]:
        """The statistics that the metrics of the spaces read, each once."""
        return self._session.statistics

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session.closed

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self._spec.model

    @property
    def plain_model(self) -> nn.Module | None:
        """The model; if FSDP2 shards it, a copy that is not sharded and has no weights.

        None for a model that is sharded in another way, whose forward pass works only where it is sharded.
        """
        if not self._session.sharded:
            return self._spec.model
        return None if sharded_otherwise(self._spec.model) else plain_twin(self._spec.model)

    @property
    def example(self) -> Any:
        """The example that was passed, or the first of several; None without one."""
        return self._spec.example

    @overload
    def step(self, wrapper: None = None) -> None: ...

    @overload
    def step(self, wrapper: Wrapper, *, wrap: Callable[[Wrapper], object] | None = None) -> Wrapper: ...

    @torch.no_grad()
    def step(
        self, wrapper: Wrapper | None = None, *, wrap: Callable[[Wrapper], object] | None = None
    ) -> Wrapper | None:
        """End an epoch: keep exactly as many units of each space as the plan says.

        All or nothing: anything that cannot be ranked or removed is refused before the first weight changes. In a
        distributed run, every process must call it, and all of them keep the same units. After the end of the plan, it
        only zeroes the masked weights again.

        Args:
            wrapper: The `DistributedDataParallel` wrapper of the model, if it has one and channels are removed. The old
                wrapper cannot be used afterwards; continue with the returned one: ``ddp = pruner.step(ddp)``. If the
                model is sharded by FSDP2, pass the model itself.
            wrap: The function that shards the model in place, by calling ``fully_shard`` on its modules. Needed if
                channels of a sharded model are removed: ``model = pruner.step(model, wrap=shard)``. Parameters that are
                cut are then replaced by others, also in the optimizer.

        Returns:
            A new DDP wrapper if one was passed and the event removed channels; otherwise `wrapper` itself.

        Raises:
            RankError: Weights or scores are NaN or infinite, or the remaining channels have fewer weights than the plan
                needs.
            ShrinkError: Channels cannot be removed, or the model was changed since the Pruner was made.
            OptimizerError: The optimizer has state that cannot be zeroed weight by weight.
            DisagreementError: Another process has failed or would keep different units.
            StateError: Pruned weights are no longer zero, and the Pruner has no optimizer whose steps would zero them.
            PlanError: A phase freezes parameters, and no optimizer was attached.
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
            self._refuse_unusable(wrapper, wrap)
            session.zero_masked()
            return wrapper
        before, after = session.planned(self.epoch), session.planned(self.epoch + 1)
        device = exchange_device(self._spec.model.parameters())
        with ExitStack() as stack:
            # Every process gets here, whatever it decides below, so that none waits for a sum that never comes.
            for statistics in session.statistics if are_several() else ():
                stack.enter_context(statistics.summed(partial(summed, device=device)))
            event = agreed(lambda it: self._decide(it, wrapper, wrap, before, after), lambda it: it.flags, device)
        # DDP allocates gradient buckets for the shapes that it was built with, so it has to be rebuilt after a cut.
        old: Any = wrapper if event.cuts and wrap is None else None
        try:
            # The undo needs a copy of the values that are zeroed. It runs only if another process fails after this one
            # has succeeded, so a single process skips the copy.
            carried_out(lambda: session.apply(event, keep_values=are_several()), device)
        except Exception:
            if old is not None:
                disarm(old, TAKEN_BACK)  # it would silently stop averaging gradients
            raise
        session.watch.event(fell=any(after[name] < before[name] for name in after))
        session.follow_statistics()  # the next epoch collects them for the remaining units
        if old is None:
            return wrapper
        disarm(old)
        return rewrapped(old)  # type: ignore[return-value]  # of the same class

    @torch.no_grad()
    def apply_masks(self) -> None:
        """Set every masked entry to zero again: in the model, in the optimizer's state and in the followers.

        Every step of the Pruner's optimizer does this for the model. Call it after anything else that writes to the
        model, such as ``model.load_state_dict(best)``, to make the counts of `kept`, `keepk.report` and `keepk.save`
        correct again.

        Raises:
            StateError: A masked parameter no longer exists or has a different shape.

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

    @torch.no_grad()
    def attach(self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
        """Add an optimizer that trains the model, as if it had been passed to the Pruner.

        Use it where a framework builds the optimizer after the Pruner. From now on the optimizer's steps keep pruned
        weights at zero, and its state is zeroed and cut at every event. Nothing changes now; optimizers that the Pruner
        already has are ignored.

        Args:
            optimizer: The optimizer, or several. Wrappers without state of their own are looked through.

        Raises:
            OptimizerError: An optimizer does not train the model, or its state cannot be zeroed weight by weight;
                none of them is attached.
            KeepkError: The Pruner is closed.

        >>> import keepk
        >>> model = nn.Linear(10, 10)
        >>> pruner = Pruner(model, keepk.weights("weight", keep=25), optimizer=())
        >>> pruner.step()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> pruner.attach(optimizer)
        >>> model(torch.ones(1, 10)).sum().backward()
        >>> optimizer.step()
        >>> pruner.kept
        {'weight': 25}
        """
        self._session.refuse_closed()
        self._session.follow_cuts()
        for it in self._session.attach(optimizer):
            self._hook(it)

    def report(self, *, error: float | None = None) -> "RunReport":
        """A summary of the run: planned, kept and requested units per space, parameters and MACs.

        Args:
            error: An error in percent to show in the report.

        Returns:
            A `RunReport`. It prints as a table; ``.line`` fits a progress bar, ``.data()`` returns plain values.

        Raises:
            KeepkError: `error` is not a number.

        >>> import keepk
        >>> pruner = Pruner(nn.Linear(10, 10), keepk.weights("weight", keep=25))
        >>> pruner.step()
        >>> pruner.report().line
        'epoch 1/1: kept weight 25 of 100; 110 parameters (75 masked)'
        """
        # Imported here because packages import only from packages before them (ARCHITECTURE.md), and `reports` comes
        # after `run`. A method is easier to find than `keepk.report(pruner)`, so this and `_repr_html_` are the only
        # exceptions.
        from keepk.reports.run import report  # noqa: PLC0415 - `report` imports this module

        return report(self, error=error)

    def untrue_counts(self) -> dict[str, tuple[int, int]]:
        """By space with a wrong count: how many units the last event left, and how many there are now.

        Changes nothing. If the model was cut elsewhere and the masks have not followed yet, there is no count to
        compare, and the result is empty.
        """
        session = self._session
        if session.behind:
            return {}
        # `keepk.save` calls this before it writes anything, and a save must not change the run.
        claimed, found = session.kept, session.counted
        return {name: (claimed[name], found[name]) for name in self.spaces if claimed[name] != found[name]}

    def warn_of_save_before_step(self) -> None:
        """Warn, once, about a model that is saved before its first event."""
        starts, plan = self._spec.starts, self._spec.plan
        name = next((name for name, counts in plan.items() if counts[-1] < starts[name]), None)
        if self.epoch == 0 and name is not None:
            budget = next((it for it in self._spec.budgets if it.name == name), None)
            if budget is None:
                where, left = f"space {name!r}", f"has all of its {starts[name]:,} units"
            else:
                where, left = budget.where, f"has all of its {starts[name]:,} {WORDS[budget.cost]}"
            subject = where if budget is None else f"the model of {where}"
            self._session.watch.once(
                ("unpruned",),
                f"save: pruner.step() has not been called yet, so nothing is pruned: {subject} still {left}, and its "
                f"target is {plan[name][-1]:,}. Call pruner.step() first. "
                f"To save the dense model on purpose, do it before the Pruner is made, or after pruner.close().",
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of the run as plain values and bool tensors.

        Returns:
            A dict that ``torch.load(..., weights_only=True)`` reads.

        Raises:
            StateError: The model was cut by `keepk.compact` or `keepk.shrink` since the run began, or pruned weights
                are no longer zero and the Pruner has no optimizer.
        """
        return self._session.state()

    def load_state_dict(self, state: Mapping[str, Any], *, wrap: Callable[[nn.Module], object] | None = None) -> None:
        """Resume from a state: cut a freshly built model to its saved size, and restore masks and epoch.

        Args:
            state: What `state_dict` returned.
            wrap: The function that shards the model, as for `step`, if it is sharded and has lost channels.

        Raises:
            StateError: The state comes from a different model, plan or format version; nothing has changed.
            DisagreementError: The model is sharded, and another process has failed; nothing has changed.
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
        self._session.load(state, wrap)

    def close(self) -> None:
        """Remove the hooks from the optimizer, so that nothing is kept at zero or frozen; weights do not change.

        Hooks of a `keepk.Statistics` that the metrics read are removed as well.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for statistics in self._session.statistics:
            statistics.release()
        self._session.closed = True

    def __enter__(self) -> "Pruner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """A line for the run and one for each space. The numbers are those of the last event; nothing is recounted."""
        session, totals, plan = self._session, self._spec.totals, self._spec.plan
        kinds = {name: side.kind for side in session.sides for name in side.members}
        kept, closed = session.kept, ", closed" if self.closed else ""
        lines = [f"Pruner(epoch {self.epoch} of {self.epochs}{closed})"]
        budgets = self._spec.budgets
        bounded = {name for it in budgets for name in it.spaces}
        for name in self.spaces[:SHOWN]:
            count = f"{kept[name]:,} of {totals[name]:,} {kinds[name]} kept"
            lines.append(f"  {name}: {count}" + ("" if name in bounded else f", {plan[name][-1]:,} at the end"))
        lines += [f"  ... and {len(self.spaces) - SHOWN} more spaces"] if len(self.spaces) > SHOWN else []
        for it in budgets:
            reached = f"{session.channels.reached[it.name]:,} of {it.dense:,} {WORDS[it.cost]}"
            lines.append(f"  budget {it.name}: {reached}, at most {it.target:,} at the end")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The plan as a table, below the epoch."""
        from keepk.reports.tables import plan_html  # noqa: PLC0415 - for notebooks only, see `report`

        return f"<p>Plan of a Pruner at epoch {self.epoch} of {self.epochs}</p>{plan_html(self._spec.plan)}"

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles.append(optimizer.register_step_pre_hook(self._before_update))
        self._handles.append(optimizer.register_step_post_hook(self._after_update))

    @property
    def _is_at_work(self) -> bool:
        """Whether events are still to come or weights are still masked."""
        return not self.closed and (not self.done or bool(self._session.held))

    def _before_update(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The hook before an optimizer step: drops the gradients of frozen parameters, so they are not updated."""
        self._session.follow_cuts()
        frozen = self._session.frozen
        return without_updates(frozen, args, kwargs) if frozen else None

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The hook after an optimizer step: zeroes masked weights, which momentum or weight decay may have moved."""
        self._session.watch.updated(optimizer)
        self._session.zero_masked()

    def _decide(
        self, exchange: Exchange, wrapper: Any, wrap: Any, before: Mapping[str, int], after: Mapping[str, int]
    ) -> Event:
        """Decide the event. All refusals happen here, so that `agreed` can report them to the other processes."""
        reshard_around(self._spec.model)
        self._session.follow_cuts()
        self._refuse_unusable(wrapper, wrap)
        # Without an optimizer there are no steps to count, and pruning without training is intended.
        if self._session.optimizers:
            self._session.watch.hasty(before, after, self.epochs)
        return self._session.decide(None if wrap is not None else wrapper, wrap, exchange)

    def _refuse_unusable(self, wrapper: Any, wrap: Any) -> None:
        self._session.refuse_closed()
        self._session.refuse_revived()
        self._session.refuse_not_frozen()
        if wrap is not None or (wrapper is self._spec.model and self._session.sharded):
            if not isinstance(wrapper, nn.Module) or unwrap(wrapper) is not self._spec.model:
                raise ShrinkError(
                    f"step: got {type(wrapper).__name__}, which is not the Pruner's model. Pass the sharded model: "
                    f"model = pruner.step(model, wrap=shard)."
                )
        elif wrapper is not None:
            refuse_other_wrapper(wrapper, self._spec.model)

    def _counted(self, asked_by: str) -> dict[str, int]:
        """By space: the units counted in the model's tensors; warns if the last event left a different number."""
        self._session.follow_cuts()
        found = self._session.counted
        self._session.watch.untrue_counts(asked_by, self._session.kept, found)
        return {name: found[name] for name in self.spaces}
