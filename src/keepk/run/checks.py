"""The checks before a run, which turn the arguments of a `Pruner` into a frozen `RunSpec` or raise an error.

Start with `run_spec`, which runs the cheap checks first: types, then names in the model, then the trace, then the plan.
Nothing is hooked, masked or cut before all of them have passed.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_up
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.holders import (
    Follower,
    parameters_of,
    refuse_bad_followers,
    refuse_mismatched_followers,
    refuse_missing,
    tensors_of,
)
from keepk.cut.masks import (
    refuse_factored,
    refuse_foreign_state,
    refuse_stranger,
    refuse_wrapping,
    unwrapped_optimizers,
)
from keepk.errors import PlanError, SpaceError
from keepk.graph.graph import Graph
from keepk.graph.trace import trace_inputs
from keepk.metrics.channels import channel_scores, default_metric
from keepk.metrics.layers import Parameters, layers_of, traits_of
from keepk.model.example import TraceInputs, TrainMode, ValueBranches, not_a_model, quantised_module, refuse_quantised
from keepk.model.names import lengths_of, named_parameters, named_tensors, unwrap
from keepk.model.sharded import reshard_around
from keepk.model.values import is_stored
from keepk.plan.budgets import Budget
from keepk.plan.names import shown
from keepk.plan.numbers import count
from keepk.plan.phases import Goal, Phase, Plan, check_phases, timeline
from keepk.plan.spaces import ChannelSpace, Space, WeightSpace
from keepk.run.budgets import (
    AskedBudget,
    FoundSpaces,
    after_budgets,
    asked_budgets,
    budget_goals,
    planned_budgets,
    plans_after_budgets,
    refuse_unreachable,
    run_budgets,
    trial,
)
from keepk.run.channel_members import ChannelMembers, NoChannelsError, find_channels, snapped_plans
from keepk.run.channels import Replayed
from keepk.run.choosing import RunBudget, RunCosts
from keepk.run.sharded_channels import twin_of
from keepk.run.undercut import find_bounds, late_goals, refuse_undercut
from keepk.run.weights import Members, find_frozen, find_members

if TYPE_CHECKING:
    from keepk.run.pruner import Pruner

Shrink = Literal["each", "end", "never"]
# Weak, so that the registry does not keep a Pruner alive. The numbers keep the Pruners in order of creation.
_LIVE: WeakValueDictionary[int, "Pruner"] = WeakValueDictionary()
_NUMBERS = count_up()


@dataclass(frozen=True, eq=False)
class RunSpec:
    """The checked arguments of a run, from which a `Session` is built.

    Attributes:
        model: The model without wrappers.
        twin: Of a sharded model with channel spaces, a copy that is not sharded and has no weights, which `graph` is
            the trace of.
        example: The first example, for counting MACs; None without one.
        weights: The weight spaces by name, with their parameters.
        channels: The channel spaces by name, with their units of `graph`.
        graph: The traced model; None without channel spaces.
        names: The spaces in the user's order.
        totals: By space, M, the number of its units before the first event.
        plan: By space, in the user's order, the counts after epochs 1, 2, ...; for a space with a budget, the bounds.
            A budget of the `Pruner` has an entry of its own, and its spaces have none.
        starts: By entry of the plan, where it starts: M, or the cost of the dense model.
        budgets: The budgets.
        costs: The cost of the model without any of its channels; None without budgets.
        late: The weight spaces that are pruned after a budget has cut their tensors.
        optimizers: The optimizers that were passed; `Pruner.attach` adds others to the session.
        followers: Copies of the weights that are cut and zeroed with the model.
        frozen_by_epoch: For each epoch of the phases, the frozen parameters; empty without phases.
        shrink: When channels are removed: at "each" event, at the "end", or "never".
        replayed: Which removals are replayed first.
    """

    model: nn.Module
    twin: nn.Module | None
    example: Any
    weights: Mapping[str, Members]
    channels: Mapping[str, ChannelMembers]
    graph: Graph | None
    names: tuple[str, ...]
    totals: Mapping[str, int]
    plan: Plan
    starts: Mapping[str, int]
    budgets: tuple[RunBudget, ...]
    costs: RunCosts | None
    late: frozenset[str]
    optimizers: tuple[torch.optim.Optimizer, ...]
    followers: Sequence[Follower]
    frozen_by_epoch: Sequence[tuple[nn.Parameter, ...]]
    shrink: Shrink
    replayed: Replayed


def run_spec(
    model: nn.Module,
    spaces: Space | Sequence[Space],
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None,
    *,
    epochs: int | None,
    phases: Sequence[Phase] | None,
    example: Any,
    examples: Sequence[Any] | None,
    training_example: Any,
    train_mode: TrainMode,
    value_branches: ValueBranches,
    shrink: Shrink,
    replay: bool,
    followers: Sequence[Follower],
    budget: Budget | None,
) -> RunSpec:
    """Check the arguments of a `Pruner` (see there) and resolve them; nothing is changed."""
    refuse_wrong_types(model, spaces, phases, shrink)
    refuse_bad_followers(followers, model, "Pruner")
    if epochs is not None:
        count(epochs, "Pruner: epochs", PlanError, least=1)
    of_weights, of_channels = listed_spaces(spaces)
    asked = asked_budgets(of_channels, budget, phases)
    inner, first = unwrap(model), examples[0] if example is None and examples else example
    reshard_around(inner)

    # Match names with the model, the optimizers and the followers.
    weights = find_members(model, of_weights)
    of_spaces = {name: parameter for it in weights.values() for name, parameter in it.parameters.items()}
    frozen = frozen_by_epoch(model, phases or ())
    names = {parameter: name for name, parameter in of_spaces.items()}
    optimizers = checked_optimizers(model, optimizer, names, any(frozen))
    refuse_mismatched_followers(followers, named_parameters(model))

    # Trace the model to find its channels. This is the slow part, so checks that do not need the trace come first.
    inputs = None
    if of_channels and first is not None:
        inputs = TraceInputs.of(example, examples, training_example, train_mode, value_branches)
    twin = twin_of(inner, [*of_weights, *of_channels], followers, shrink)
    graph, channels = traced_channels(inner, inputs, of_channels, twin)
    refuse_second(model)
    refuse_unfit_followers(followers, of_spaces, touched_tensors(inner, channels))

    # Make the plan of each space, then check the plans against each other.
    planned = make_plan(FoundSpaces(inner, graph, weights, channels), first, asked, epochs, phases, twin)
    if channels and shrink != "each":
        refuse_masked_directions(inner, weights)
    # Channels that stay masked until the end are replayed when they are masked: at the end, refusing is too late.
    replayed: Replayed = "none" if not replay else "masks" if shrink == "end" else "cuts"
    order = tuple(space.name for space in (spaces if isinstance(spaces, Sequence) else [spaces]))
    found: dict[str, Members | ChannelMembers] = {**weights, **channels}
    totals = {name: it.total for name, it in found.items()}
    dense = {it.name: it.dense for it in planned.budgets}
    of_run = {it.name: it.spaces for it in planned.budgets if it.name not in order}
    shared = {name for names in of_run.values() for name in names}
    plan = {name: planned.plan[name] for name in [*order, *of_run] if name not in shared}
    return RunSpec(
        model=inner,
        twin=twin,
        example=first,
        weights=weights,
        channels=channels,
        graph=graph,
        names=order,
        totals=totals,
        plan=plan,
        starts={**totals, **dense},
        budgets=planned.budgets,
        costs=planned.costs,
        late=planned.late,
        optimizers=optimizers,
        followers=followers,
        frozen_by_epoch=tuple(frozen),
        shrink=shrink,
        replayed=replayed,
    )


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run; see `RunSpec`."""

    plan: Plan
    budgets: tuple[RunBudget, ...]
    costs: RunCosts | None
    late: frozenset[str]


def make_plan(
    spaces: FoundSpaces,
    example: Any,
    asked: Sequence[AskedBudget],
    epochs: int | None,
    phases: Sequence[Phase] | None,
    twin: nn.Module | None = None,
) -> RunPlan:
    """The plan of every space and budget; refuses plans that cannot be met or contradict each other."""
    model, graph, weights, channels = spaces.model, spaces.graph, spaces.weights, spaces.channels
    counted = {name: it for name, it in channels.items() if it.keep is not None}
    costs = RunCosts(model if twin is None else twin, graph, example) if asked and graph is not None else None
    budgets, starts = run_budgets(asked, costs, phases)
    goals = {name: Goal(it.total, it.keep, it.space.schedule) for name, it in weights.items()}
    goals |= {name: Goal(it.total, it.keep, it.space.schedule) for name, it in counted.items() if it.keep is not None}
    goals |= budget_goals(budgets, starts, [it.space for it in channels.values()])
    if phases is not None and channels:
        check_phases(goals, epochs, phases)
    late = after_budgets(spaces, budgets, phases)
    bounds = find_bounds(model, {name: it for name, it in weights.items() if name not in late}, graph, counted)
    if phases is not None and channels:
        goals |= late_goals(goals, counted, bounds, phases)
    plan = timeline(goals, epochs=epochs, phases=phases)
    plan |= snapped_plans(channels, plan)
    budgets = planned_budgets(budgets, plan)
    if costs is not None:
        plan |= {it.name: it.plan for it in budgets}
        refuse_unreachable(trial(spaces, plan, budgets, costs), budgets, costs)
        if late and phases is not None:
            forecast = trial(spaces, plan, budgets, costs)  # a fresh one: the check above has removed channels
            plan |= plans_after_budgets(spaces, late, goals, forecast, len(budgets[0].plan), phases)
    refuse_weights_that_end_before_channels(plan, weights, counted)
    refuse_undercut(plan, bounds)
    return RunPlan(plan, tuple(budgets), costs, frozenset(late))


def refuse_wrong_types(model: object, spaces: object, phases: object, shrink: object) -> None:
    """Refuse arguments of a `Pruner` that have the wrong type."""
    if not isinstance(model, nn.Module):
        raise SpaceError(f"Pruner: {not_a_model(model)}")
    listed = [spaces] if isinstance(spaces, Space) else spaces
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(it, Space) for it in listed):
        raise SpaceError(
            f"Pruner: spaces={shown(spaces)}. Pass a list of keepk.weights(...) and keepk.channels(...), at least one."
        )
    if phases is not None and not (
        isinstance(phases, list | tuple) and phases and all(isinstance(it, Phase) for it in phases)
    ):
        raise PlanError(f"Pruner: phases={shown(phases)}. Pass a list of keepk.Phase(...), at least one.")
    if not isinstance(shrink, str) or shrink not in ("each", "end", "never"):
        raise PlanError(f'Pruner: shrink={shown(shrink)}. Pass "each", "end" or "never".')


def listed_spaces(spaces: Space | Sequence[Space]) -> tuple[list[WeightSpace], list[ChannelSpace]]:
    """The weight spaces and the channel spaces; refuses duplicate names."""
    listed = [spaces] if isinstance(spaces, Space) else list(spaces)
    names = [space.name for space in listed]
    for name in names:
        if names.count(name) > 1:
            raise SpaceError(f"space {name!r}: two spaces have this name. Give each space a different name=.")
    weights = [space for space in listed if isinstance(space, WeightSpace)]
    return weights, [space for space in listed if isinstance(space, ChannelSpace)]


def traced_channels(
    model: nn.Module, inputs: TraceInputs | None, spaces: Sequence[ChannelSpace], twin: nn.Module | None = None
) -> tuple[Graph | None, dict[str, ChannelMembers]]:
    """The graph of an unwrapped model and the channels of the spaces; does not trace if there are no spaces.

    The graph of a sharded model is that of its twin.
    """
    if not spaces:
        return None, {}
    if inputs is None:
        raise SpaceError(
            f"space {spaces[0].name!r}: channels are found by a trace, which needs an input. "
            f"Pass one with example=, such as one batch."
        )
    graph = trace_inputs(model if twin is None else twin, inputs)
    try:
        found = find_channels(graph, dict(model.named_modules(remove_duplicate=False)), spaces)
    except NoChannelsError as error:
        # Fake quantisation pins the channels of a module. Report that cause instead of the names of pinned axes.
        if not (quantised := quantised_module(model)):
            raise
        raise SpaceError(
            f"{str(error).partition(': select=')[0]}: {quantised}, so its channels cannot be followed. "
            f"Prune first and quantise afterwards: pass the model as it was before it was prepared."
        ) from error
    touched = touched_tensors(model, found)
    refuse_quantised(model, SpaceError, touched)
    for name, tensor in touched.items():
        if tensor.is_meta and not is_stored(tensor):
            raise SpaceError(
                f"parameter {name!r} is on the meta device and has no values, so its channels cannot be ranked. "
                f"Load the weights first; only keepk.trace and keepk.inspect work without them."
            )
    with torch.no_grad():
        _try_metrics(model, graph, found)
    return graph, found


def touched_tensors(model: nn.Module, channels: Mapping[str, ChannelMembers]) -> dict[str, Tensor]:
    """By name, the tensors that have slices of the channels."""
    layers = (layer for it in channels.values() for layer in it.layers)
    names = {tensor for layer in layers for tensor, _, _ in layer.axes}
    return {name: tensor for name, tensor, _ in named_tensors(model) if name in names} if names else {}


def _try_metrics(model: nn.Module, graph: Graph, channels: Mapping[str, ChannelMembers]) -> None:
    """Call every metric that reads only weights once, so that a metric that fails is refused before training."""
    parameters, alive = Parameters.of(model), np.ones(len(graph.units), bool)
    for it in channels.values():
        layers = layers_of(graph, parameters, it.layers, alive, it.space.at)
        metric = it.space.metric or default_metric(layers)
        # A metric that reads gradients cannot be checked here: there are no gradients before training.
        if traits_of(metric).needs == ("weights",):
            channel_scores(metric, layers)


def register_live(pruner: "Pruner") -> None:
    """Add a `Pruner` to the registry of live ones, by a weak reference."""
    _LIVE[next(_NUMBERS)] = pruner


def live_pruner(model: nn.Module) -> "Pruner | None":
    """The latest open `Pruner` of an unwrapped model; None if all are closed."""
    found = [pruner for pruner in list(_LIVE.values()) if pruner.model is model and not pruner.closed]
    return found[-1] if found else None


def pruners_around(model: nn.Module) -> "list[Pruner]":
    """The open Pruners of other models that have parameters of this one, such as the model that it was a part of."""
    own = {id(parameter) for parameter in model.parameters()}
    others = [it for it in list(_LIVE.values()) if it.model is not model and not it.closed]
    return [it for it in others if any(id(parameter) in own for parameter in it.model.parameters())]


def refuse_second(model: nn.Module) -> None:
    """Refuse a model that another `Pruner` is pruning: each would prune units that the other counts as kept."""
    own = {id(parameter) for parameter in model.parameters()}

    def at_work() -> list["Pruner"]:
        live = [it for it in list(_LIVE.values()) if it._is_at_work]
        return [it for it in live if any(id(parameter) in own for parameter in it.model.parameters())]

    if at_work():
        gc.collect()  # a Pruner and its hooks refer to each other, so only this deletes an unreferenced one
    for other in at_work():
        spaces = other.spaces
        named = ", ".join(f"{name!r}" for name in spaces)
        where = "at the end of its plan" if other.done else f"at epoch {other.epoch} of {other.epochs}"
        raise SpaceError(
            f"Pruner: the model already has one, with space{'s' * (len(spaces) > 1)} {named}, {where}; each of the "
            f"two would prune units that the other one keeps. Pass all spaces to one Pruner, or close the first one "
            f"with pruner.close(). If no variable refers to it any more, its optimizer still does: delete that too."
        )


def refuse_unfit_followers(
    followers: Sequence[Follower], parameters: Mapping[str, Tensor], touched: Mapping[str, Tensor]
) -> None:
    """Refuse a follower that lacks tensors of the spaces; a dict needs only those that are trained."""
    for place, follower in enumerate(followers):
        for tensors, needed in ((parameters_of(follower), parameters), (tensors_of(follower), touched)):
            of_dict = (name for name, tensor in needed.items() if tensor.requires_grad)
            refuse_missing(follower, tensors, of_dict if isinstance(follower, dict) else needed, place)


def refuse_weights_that_end_before_channels(
    plan: Plan, weights: Mapping[str, Members], channels: Mapping[str, ChannelMembers]
) -> None:
    """Refuse a plan in which weights reach K before the last channels that contain some of them are removed."""
    for name, it in channels.items():
        assert it.keep is not None  # the plan of a budget is refused before, see `after_budgets`
        last = plan[name].index(it.keep) if it.keep < it.total else -1
        touched = {tensor for layer in it.layers for tensor, _, _ in layer.axes}
        for other, members in weights.items():
            done = plan[other].index(members.keep)
            if done < last and touched & set(members.parameters):
                raise PlanError(
                    f"space {other!r}: reaches its {members.keep} weights at epoch {done + 1}, but channels of "
                    f"{name!r} are removed until epoch {last + 1}, and some of these weights with them. "
                    f"Let its schedule end at epoch {last + 1} or later."
                )


def refuse_masked_directions(model: nn.Module, weights: Mapping[str, Members]) -> None:
    """Refuse weight spaces with directions of weight norm in a run that masks channels.

    A masked channel of weight norm has length zero but keeps its direction (see `model.edits.silencing`), so the
    weights of the direction would still be counted.
    """
    directions = lengths_of(model)
    for name, members in weights.items():
        for tensor, parameter in members.parameters.items():
            if parameter in directions:
                raise PlanError(
                    f"space {name!r}: {tensor!r} is a direction of weight norm, which masking a channel does not set "
                    f'to zero, so its weights could not be counted. Use shrink="each", or leave it out.'
                )


def checked_optimizers(
    model: nn.Module,
    given: Any,
    names: Mapping[nn.Parameter, str],
    freezes: bool,
    known: Iterable[torch.optim.Optimizer] = (),
) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of a run; refuses one that does not train the model, or whose state cannot be cut and zeroed.

    Args:
        model: The unwrapped model.
        given: The user's optimizer, several, or None.
        names: The parameters of weight spaces, with their names.
        freezes: Whether a phase freezes parameters.
        known: Optimizers that the run already has.
    """
    several = isinstance(given, Iterable) and not isinstance(given, nn.Module)
    optimizers = tuple(unwrapped_optimizers(() if given is None else given if several else (given,)))
    for optimizer in optimizers:
        refuse_stranger(optimizer, [*model.parameters()])
        refuse_factored(optimizer)
        refuse_foreign_state(optimizer, names)
    refuse_wrapping([*known, *optimizers])
    if freezes and given is None:
        raise PlanError(
            "Pruner: a phase freezes parameters, but no optimizer was passed. Pass the one that trains them, or "
            "optimizer=() if you build it later and pass it to pruner.attach()."
        )
    return optimizers


def frozen_by_epoch(model: nn.Module, phases: Sequence[Phase]) -> list[tuple[nn.Parameter, ...]]:
    """For each epoch of the phases, the parameters that are frozen in it."""
    return [frozen for phase in phases for frozen in [find_frozen(model, phase.freeze)] * phase.epochs]
