"""The budgets of a run, checked before training: which spaces they cut, how low they go, and at which epochs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from torch import Tensor, nn

from keepk.errors import PlanError, SpaceError
from keepk.graph.graph import Graph
from keepk.graph.ids.maps import Flags
from keepk.graph.remaining import closure
from keepk.metrics.layers import Parameters
from keepk.model.names import named_tensors
from keepk.plan.budgets import WORDS, Budget
from keepk.plan.names import matches
from keepk.plan.phases import Goal, Phase, Plan, through_phases
from keepk.plan.spaces import ChannelSpace
from keepk.run.channel_members import ChannelMembers
from keepk.run.choosing import Chooser, RunBudget, RunCosts, first_chains, ranked
from keepk.run.weights import Members


@dataclass(frozen=True, eq=False)
class FoundSpaces:
    """A model without wrappers, and the units that its spaces were found to have.

    Attributes:
        model: The model.
        graph: Its trace; None without channel spaces, and then there are no budgets either.
        weights: The weight spaces by name.
        channels: The channel spaces by name.
    """

    model: nn.Module
    graph: Graph | None
    weights: Mapping[str, Members]
    channels: Mapping[str, ChannelMembers]


@dataclass(frozen=True)
class AskedBudget:
    """A budget as the user passed it: its name in the plan, its spaces, and its number."""

    name: str
    spaces: tuple[str, ...]
    budget: Budget


def asked_budgets(
    spaces: Sequence[ChannelSpace], of_run: Budget | None, phases: Sequence[Phase] | None
) -> list[AskedBudget]:
    """The budgets of the spaces and of the `Pruner`; refuses those that are missing, or compete in one phase.

    Args:
        spaces: The channel spaces.
        of_run: The budget of the `Pruner`, for the spaces without a number.
        phases: The phases of the run; None without phases.
    """
    own = [(it.name, it.budget) for it in spaces if it.budget is not None]
    found = [AskedBudget(name, (name,), budget) for name, budget in own if not budget.shared]
    without = tuple(it.name for it in spaces if it.has_budget and it.budget is None)
    if of_run is None and without:
        raise SpaceError(
            f"space {without[0]!r}: got neither keep= nor prune=, macs= or parameters=, and the Pruner has no budget. "
            f"Pass exactly one of them to keepk.channels, or a budget for all such spaces to the Pruner: macs=0.5."
        )
    if of_run is not None and not without:
        raise SpaceError(
            f"Pruner: {of_run}, but no channel space is left to it: each has its own keep=, prune=, macs= or "
            f"parameters=. Leave these out of the spaces that the budget is for."
        )
    of_several = [(of_run, without)] if of_run is not None else []
    for budget in dict.fromkeys(budget for _, budget in own if budget.shared):  # of `keepk.fit`
        of_several.append((budget, tuple(name for name, other in own if other == budget)))
    for budget, names in of_several:
        if any(it.name == budget.cost for it in spaces):
            raise SpaceError(
                f"space {budget.cost!r}: a budget of the Pruner has this name in the plan. Give the space another "
                f"name=."
            )
        found.append(AskedBudget(budget.cost, names, budget))
    _refuse_two_at_once(found, phases)
    return found


def _refuse_two_at_once(found: Sequence[AskedBudget], phases: Sequence[Phase] | None) -> None:
    """Refuse two budgets in one phase: each could be met by the spaces of the other one."""
    for place, one in enumerate(found):
        for other in found[place + 1 :]:
            both = [
                number
                for number, phase in enumerate(phases or (), start=1)
                if _prunes(phase, one.spaces) and _prunes(phase, other.spaces)
            ]
            if phases is not None and not both:
                continue
            when = f"in phase {both[0]}" if both else "at the same time"
            raise SpaceError(
                f"spaces {one.spaces[0]!r} and {other.spaces[0]!r}: {one.budget} and {other.budget} {when}, but each "
                f"budget bounds the whole model. Give both spaces one budget, Pruner({one.budget}), or prune them "
                f"in different phases."
            )


def _prunes(phase: Phase, spaces: Sequence[str]) -> bool:
    return any(matches(name, phase.prune) for name in spaces)


def run_budgets(
    asked: Sequence[AskedBudget], costs: RunCosts | None, phases: Sequence[Phase] | None
) -> tuple[list[RunBudget], dict[str, int]]:
    """The budgets with dense cost and target, but no plan yet; and by budget, the cost that its schedule starts from.

    A budget that comes after another one in the phases starts from the target of that one.
    """
    found, starts = list[RunBudget](), dict[str, int]()
    for it in sorted(asked, key=lambda it: _first_phase(it, phases)):
        assert costs is not None  # made whenever there are budgets
        name = it.name
        budget = RunBudget(name, it.spaces, it.budget, 0, 0)
        dense = costs.dense(budget.where, it.budget)
        target = it.budget.target(dense)
        before = min((other.target for other in found if other.cost == it.budget.cost), default=dense)
        if target >= before:
            left = "of the dense model" if before == dense else "that an earlier phase leaves"
            raise SpaceError(
                f"{budget.where}: {it.budget} is not below the {costs.shown(budget.cost, before)} {left}, so nothing "
                f"would be pruned. Choose less than {before}."
            )
        found.append(replace(budget, dense=dense, target=target))
        starts[name] = before
    return found, starts


def _first_phase(asked: AskedBudget, phases: Sequence[Phase] | None) -> int:
    return next((place for place, it in enumerate(phases or ()) if _prunes(it, asked.spaces)), 0)


def budget_goals(
    budgets: Sequence[RunBudget], starts: Mapping[str, int], spaces: Sequence[ChannelSpace]
) -> dict[str, Goal]:
    """By space of a budget, the goal of its plan: from the dense cost to the target."""
    schedules = {space.name: space.schedule for space in spaces}
    return {
        name: Goal(it.dense, it.target, schedules[name], starts[it.name] if starts[it.name] < it.dense else None)
        for it in budgets
        for name in it.spaces
    }


def planned_budgets(budgets: Sequence[RunBudget], plan: Plan) -> list[RunBudget]:
    """The budgets with their plans; refuses spaces that share a budget but not its plan."""
    for it in budgets:
        first = it.spaces[0]
        for other in it.spaces[1:]:
            if plan[other] != plan[first]:
                raise PlanError(
                    f"spaces {first!r} and {other!r}: they share the budget {it.asked} of the Pruner, but their "
                    f"schedules or phases differ. Give both the same schedule= and prune them in the same phases."
                )
    return [replace(it, plan=plan[it.spaces[0]]) for it in budgets]


def trial(found: FoundSpaces, plan: Plan, budgets: Sequence[RunBudget], costs: RunCosts | None) -> Chooser:
    """A `Chooser` of a run that has not begun, for the present ranking."""
    graph, members = found.graph, found.channels
    assert graph is not None  # a budget needs channels
    parameters, dead = Parameters.of(found.model), np.zeros(len(graph.units), bool)
    counted = {name: plan[name] for name, it in members.items() if it.keep is not None}
    return Chooser(
        members,
        counted,
        budgets,
        costs,
        lambda name: ranked(graph, parameters, members[name], dead, trial=True),
        dead,
        first_chains(members, counted),
    )


def refuse_unreachable(chooser: Chooser, budgets: Sequence[RunBudget], costs: RunCosts) -> None:
    """Refuse a bound that cannot be met with all channels removed that the floors allow.

    Args:
        chooser: The run to come, with the present ranking.
        budgets: Its budgets.
        costs: The cost of its model.
    """
    # A later bound is lower, so only the last one matters, unless other spaces are cut on the way.
    alone = len(budgets) == 1 and not chooser.counts
    length = len(budgets[0].plan)
    for epoch in range(length - 1 if alone else 0, length):
        chooser.counted(epoch)
        for it in budgets:
            if it.plan[epoch] < it.dense and (least := chooser.least(it)) > it.plan[epoch]:
                raise SpaceError(_unreachable(it, costs, it.plan[epoch], least, epoch))
            if len(budgets) > 1:  # a later budget starts from the channels that this one leaves
                chooser.within(it, epoch)


def _unreachable(budget: RunBudget, costs: RunCosts, bound: int, least: int, epoch: int) -> str:
    exact = bound == budget.asked.amount
    said = "" if exact else f" ({bound:,} {WORDS[budget.cost]}{f' at epoch {epoch + 1}' * (bound > budget.target)})"
    # The dense cost itself is not a budget, so a larger one does not help if the floors allow no removal.
    larger = f"{budget.cost}={least} or more, " if least < budget.dense else ""
    return (
        f"{budget.where}: {budget.asked}{said} is below the {costs.shown(budget.cost, least)} that the model still has "
        f"when every layer keeps only its floor. Choose {larger}a lower layer_floor= or round_to=, or select more "
        f"layers."
    )


def cut_tensors(graph: Graph, members: ChannelMembers) -> set[str]:
    """The tensors that may be cut with a space: those of its channels, and of the channels removed with them."""
    mine = np.zeros(len(graph.units), bool)
    mine[members.units] = True
    links = graph.links()
    for _ in range(len(graph.groups)):  # a read may itself be a source
        before = mine.sum()
        mine[links[mine[links].any(axis=1)].ravel()] = True
        if mine.sum() == before:
            break
    groups = np.unique(graph.units.group[mine]).tolist()
    return {tensor for number in groups for tensor, _, _ in graph.groups[number].axes}


def after_budgets(
    spaces: FoundSpaces, budgets: Sequence[RunBudget], phases: Sequence[Phase] | None
) -> dict[str, Members]:
    """The weight spaces in tensors that a budget cuts; refuses one that is not pruned in a later phase.

    How many channels a budget keeps is not known before its last event, and a weight space counts weights in the
    channels that are left.
    """
    if spaces.graph is None:
        return {}
    found, names = dict[str, Members](), _graph_names(spaces.model)
    for it in budgets:
        touched = {tensor for name in it.spaces for tensor in cut_tensors(spaces.graph, spaces.channels[name])}
        for name, members in spaces.weights.items():
            if touched.isdisjoint(names[parameter] for parameter in members.parameters.values()):
                continue
            found[name] = members
            last = max((n for n, phase in enumerate(phases or ()) if _prunes(phase, it.spaces)), default=0)
            first = next((n for n, phase in enumerate(phases or ()) if _prunes(phase, [name])), 0)
            if first <= last:
                raise PlanError(
                    f"space {name!r}: some of its weights are in channels of {it.spaces[0]!r}, and how many of these "
                    f"{it.asked} keeps is not known before they are cut. Prune weights in a later phase: "
                    f"Pruner(phases=[keepk.Phase(..., prune={it.spaces[0]!r}), keepk.Phase(..., prune={name!r})])."
                )
    return found


def _graph_names(model: nn.Module) -> dict[Tensor, str]:
    """By parameter, its name in the graph, with the names of wrappers."""
    return {parameter: name for name, parameter, is_one in named_tensors(model) if is_one}


def weights_left(model: nn.Module, graph: Graph, members: Members, dead: Flags) -> int:
    """How many weights of a space are left once these units are removed."""
    left, names = graph.left_without(np.flatnonzero(closure(graph, dead))), _graph_names(model)
    return sum(prod(left.shape(names[parameter])) for parameter in members.parameters.values())


def plans_after_budgets(
    spaces: FoundSpaces,
    late: Mapping[str, Members],
    goals: Mapping[str, Goal],
    forecast: Chooser,
    epochs: int,
    phases: Sequence[Phase],
) -> dict[str, tuple[int, ...]]:
    """The plans of weight spaces that come after the budgets; refuses a K above the number of weights then left.

    Such a space starts from the weights that are left once the budgets are met. Before the run this is an estimate by
    the present ranking, so a count of its plan is an upper bound until it reaches K.

    Args:
        spaces: The model and its spaces.
        late: The weight spaces, as `after_budgets` returned them.
        goals: Their goals, by name.
        forecast: The run to come, with the present ranking.
        epochs: The number of its events.
        phases: Its phases; without any, `after_budgets` refuses such spaces.
    """
    assert spaces.graph is not None  # there are budgets
    for epoch in range(epochs):
        forecast.event(epoch)
    found = dict[str, tuple[int, ...]]()
    for name, members in late.items():
        left = weights_left(spaces.model, spaces.graph, members, forecast.dead)
        if members.keep > left:
            raise PlanError(
                f"space {name!r}: keeps {members.keep} weights, but with the present ranking the channels that the "
                f"budgets keep have only {left} of its {members.total}. Keep fewer weights, or raise the budget."
            )
        if callable(members.space.schedule) and left < members.total:
            found[name] = through_phases(name, replace(goals[name], start=left), phases)
    return found
