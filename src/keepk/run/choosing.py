"""Which channels an event removes: first those of spaces with a count, then those that budgets ask for.

A space with ``keep=`` or ``prune=`` keeps exactly as many channels as its plan says (`rank.channels.keep_best`). A
budget then removes blocks from its own spaces, lowest ranks first, until the whole model is within the bound of this
event (`rank.budget`). The cost of the model without any set of channels comes from its trace (`graph.costs`).

A `Chooser` holds one ranking of each space. `ChannelSide` makes a new one for each event and takes a single step with
it. To see how many channels the later bounds would leave with the present ranking, it takes all of the remaining steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from keepk.errors import RankError, SpaceError
from keepk.graph.costs import CostModel
from keepk.graph.graph import Graph
from keepk.graph.ids.maps import Flags
from keepk.metrics.channels import channel_scores, default_metric
from keepk.metrics.layers import Layer, Parameters, layers_of, traits_of
from keepk.model.costs import model_costs, per_what
from keepk.model.edits import Edits, Indices
from keepk.plan.budgets import WORDS, Budget, Cost
from keepk.plan.phases import Plan
from keepk.plan.portions import Split, chain, has_even_steps
from keepk.rank.budget import Removals, interleaved, removals, shortest
from keepk.rank.channels import keep_best, rank_values
from keepk.run.channel_members import ChannelMembers


@dataclass(frozen=True)
class RunBudget:
    """A budget of a run and the spaces that are cut to meet it.

    Attributes:
        name: Its name in the plan: that of its space, or "macs" or "parameters" for a budget of the `Pruner`.
        spaces: The names of its spaces.
        asked: The budget as the user wrote it.
        dense: The cost of the model given to the `Pruner`.
        target: The bound at the end of the plan.
        plan: The bound after epochs 1, 2, ...
    """

    name: str
    spaces: tuple[str, ...]
    asked: Budget
    dense: int
    target: int
    plan: tuple[int, ...] = ()

    @property
    def cost(self) -> Cost:
        """The bounded cost."""
        return self.asked.cost

    @property
    def where(self) -> str:
        """The place in the user's call, for errors."""
        return f"space {self.name!r}" if self.spaces == (self.name,) else "Pruner"


class RunCosts:
    """The cost of a run's model without any of its channels.

    Attributes:
        batch: The batch size by which the MACs of the example are divided; None if it is not known.
    """

    def __init__(self, model: nn.Module, graph: Graph, example: Any) -> None:
        counted = model_costs(model, example)
        self.batch = counted.batch
        self._dense: dict[Cost, int] = {"macs": counted.macs, "parameters": counted.parameters}
        self._model = CostModel(graph, counted.batch, model)
        self._nothing = np.zeros(len(graph.units), bool)

    def of(self, cost: Cost, removed: Flags) -> int:
        """The cost of the model once these units are removed."""
        return self._model.macs(removed) if cost == "macs" else self._model.parameters(removed)

    def dense(self, where: str, asked: Budget) -> int:
        """The cost of the whole model; refuses one that the trace does not know, or that is 0."""
        counted = self._dense[asked.cost]
        if counted == 0:
            raise SpaceError(
                f"{where}: {asked}, but the model has no MACs: torch counts matrix products and convolutions only, "
                f"and its forward has none. Pass parameters= or keep=."
            )
        if (traced := self.of(asked.cost, self._nothing)) != counted:
            raise SpaceError(
                f"{where}: {asked}: the trace of the model has {traced:,} {WORDS[asked.cost]}, but {counted:,} are "
                f"counted when it runs, so the cost of a smaller model is not known. Pass keep= or prune=."
            )
        return counted

    def counted_macs(self, edits: Edits) -> int | None:
        """The MACs that torch counts on a cut copy, to compare them with those that the trace predicts.

        None if forward reads values, which the copy does not have. The replay of the cut has then compared the shapes
        of all operations with the trace, on the path that the example takes.
        """
        return self._model.counted_macs(edits)

    def shown(self, cost: Cost, amount: int) -> str:
        """An amount with its unit, for errors and reports."""
        return f"{amount:,} {WORDS[cost]}" + (f" {per_what(self.batch)}" if cost == "macs" else "")


@dataclass(frozen=True, eq=False)
class Ranking:
    """The ranking of the channels that are left of a space.

    Attributes:
        layers: The channels layer by layer, as metrics take them.
        metric: The metric that scored them.
        units: The channels.
        scores: Their scores.
        values: By unit of the graph, its rank, from 1 for the lowest; see `rank_values`.
        forced: By unit of the graph, whether a floor forces it to stay.
    """

    layers: Sequence[Layer]
    metric: Callable[..., Any]
    units: Indices
    scores: NDArray[np.float64]
    values: NDArray[np.float64]
    forced: Flags


def ranked(
    graph: Graph, parameters: Parameters, members: ChannelMembers, dead: Flags, *, trial: bool = False
) -> Ranking:
    """Rank the channels of a space that are left.

    Args:
        graph: The graph of the model.
        parameters: The model's parameters.
        members: The space.
        dead: By unit, whether it is pruned.
        trial: Whether to give equal scores to all channels if the metric reads more than weights, such as gradients,
            which a model does not have before training.
    """
    layers = layers_of(graph, parameters, members.layers, ~dead, members.space.at)
    metric = members.space.metric or default_metric(layers)
    units = np.concatenate([layer.units for layer in layers])
    if trial and traits_of(metric).needs != ("weights",):
        scores = np.zeros(len(units))
    else:
        scores = channel_scores(metric, layers)
    values = rank_values(units, scores, np.zeros(len(dead), bool), members.links)
    return Ranking(layers, metric, units, scores, values, _forced(members, values, dead))


def _forced(members: ChannelMembers, values: NDArray[np.float64], dead: Flags) -> Flags:
    """The units that must stay: the best of every layer up to its floor, and the best read of every source."""
    forced, heights = np.zeros(len(values), bool), members.links.heights
    # Readers before their sources: a kept read also keeps its source, which then counts towards that layer's floor.
    needs = sorted(members.floors, key=lambda it: int(heights[it[0][0]]))
    needs += [(reads, 1) for reads in members.sources]
    for units, least in needs:
        living = units[~dead[units]]
        if not forced[living].sum() >= least:
            forced[living[np.argsort(-values[living], kind="stable")[:least]]] = True
            forced = members.links.raised(forced)
    return forced


def first_chains(members: Mapping[str, ChannelMembers], plan: Plan) -> dict[str, tuple[Split, ...]]:
    """By space whose layers' counts depend on each other, the splits that lead to K; see `plan.portions`."""
    found = dict[str, tuple[Split, ...]]()
    for name, it in members.items():
        if name in plan and not has_even_steps(it.portions):
            splits = chain(it.portions, plan[name])
            assert splits is not None  # the plan was snapped to a chain
            found[name] = splits
    return found


class Chooser:
    """Chooses the channels of one event, or of several in a row if each of them ranked as the first.

    Args:
        members: The channel spaces by name.
        plan: By space with a count, its plan.
        budgets: The budgets.
        costs: The cost of the model; None without budgets.
        rank: Ranks the channels that are left of a space; called once for each space that is needed.
        dead: By unit, whether it is pruned.
        chains: By space with a count, the splits that lead on to K; see `plan.portions`.

    Attributes:
        counts: By space with a count, its plan.
        dead: By unit, whether it is pruned by the events so far.
        chains: The chains for the events that follow.
        rankings: By space that was needed, its ranking.
    """

    def __init__(
        self,
        members: Mapping[str, ChannelMembers],
        plan: Plan,
        budgets: Sequence[RunBudget],
        costs: RunCosts | None,
        rank: Callable[[str], Ranking],
        dead: Flags,
        chains: Mapping[str, tuple[Split, ...]],
    ) -> None:
        self._members, self._budgets, self._costs, self._rank = members, budgets, costs, rank
        self.counts = plan
        self.dead, self.chains = dead.copy(), dict(chains)
        self.rankings = dict[str, Ranking]()
        self._sequences = dict[str, Removals]()
        self._before = dead

    def event(self, epoch: int) -> None:
        """Choose the channels of the event at entry `epoch` of the plan.

        Raises:
            RankError: A budget cannot be met, because the floors do not allow it.
        """
        self.counted(epoch)
        for budget in self._budgets:
            if not self.within(budget, epoch):
                assert self._costs is not None
                raise RankError(
                    f"{budget.where}: {budget.asked} allows {self._costs.shown(budget.cost, budget.plan[epoch])} after "
                    f"epoch {epoch + 1}, but the channels that the floors keep cost {self.least(budget):,}. Nothing "
                    f"was pruned. Lower layer_floor= or raise the budget."
                )

    def within(self, budget: RunBudget, epoch: int) -> bool:
        """Choose only the channels of one budget; returns whether its bound can be met."""
        bound = budget.plan[epoch]
        if self._cost(budget) <= bound:
            return True
        sequence = self._sequence(budget)
        number = shortest(sequence, lambda units: self._cost(budget, units), bound)
        if number is None:
            return False
        self.dead[sequence.prefix(number)] = True
        return True

    def counted(self, epoch: int) -> None:
        """Choose only the channels of spaces with a count."""
        for name, counts in self.counts.items():
            members, known = self._members[name], self.chains.get(name, ())
            if counts[epoch] < members.total - int(self.dead[members.units].sum()):
                ranking = self._ranking(name)
                values = ranking.values.copy()
                values[ranking.forced] += float(len(ranking.units) + 1) ** 2  # above the sum of all ranks
                decision = keep_best(members.choices, ~self.dead, values, counts[epoch:], known)
                assert not ranking.forced[decision.removed].any()  # every allowed count leaves room for them
                self.dead[decision.removed] = True
                self.chains[name] = decision.chain
            else:
                self.chains[name] = tuple(known[1:])  # the first split is the one of this event

    def least(self, budget: RunBudget) -> int:
        """The lowest cost that the spaces of a budget can reach, with the channels that others have removed so far."""
        return self._cost(budget, self._sequence(budget).units)

    def kept(self, name: str) -> int:
        """How many channels of a space are left after the events so far."""
        members = self._members[name]
        return members.total - int(self.dead[members.units].sum())

    def _cost(self, budget: RunBudget, units: Indices | None = None) -> int:
        """The cost of the model after the events so far, and without these units."""
        assert self._costs is not None  # a run with budgets has costs
        dead = self.dead
        if units is not None:
            dead = dead.copy()
            dead[units] = True
        return self._costs.of(budget.cost, dead)

    def _sequence(self, budget: RunBudget) -> Removals:
        """The blocks of a budget's spaces that were there at first, in the order in which they are removed."""
        if budget.name not in self._sequences:
            mine = [(self._members[name], self._ranking(name)) for name in budget.spaces]
            found = [removals(it.choices, ~self._before, ranking.values, ranking.forced) for it, ranking in mine]
            lost = [int(self._before[it.units].sum()) for it, _ in mine]
            self._sequences[budget.name] = interleaved(found, lost, [it.total for it, _ in mine])
        return self._sequences[budget.name]

    def _ranking(self, name: str) -> Ranking:
        if name not in self.rankings:
            self.rankings[name] = self._rank(name)
        return self.rankings[name]
