"""Plans with weight spaces and channel spaces: the fewest weights that pruned channels may leave.

Pruning a channel removes its weights. Before a run it is known how many channels will be kept, but not which ones. The
smallest number of weights over all choices of channels is an upper bound for the plan of a weight space: a plan that
keeps more cannot always be met, so it is refused. For example, two layers of 4 and 2 channels that read 3 inputs each
have 18 weights; if 3 of the 6 channels are kept, 9 weights are left. If the first layer reads 10 inputs instead, the
number depends on the choice: with a floor of 1 channel per layer, it is at least 10 + 2 * 3 = 16.

`WeightBound` computes that bound for one weight space. `_KindCounts` describes the weights left in each tensor as a
product of counts of channels, and `plan.fewest_weights.least` minimises the sum of these products.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from keepk.errors import PlanError
from keepk.graph.graph import Graph
from keepk.graph.ids.maps import Flags
from keepk.model.edits import Indices
from keepk.model.names import named_tensors
from keepk.plan.fewest_weights import Count, Factor, Product, least
from keepk.plan.names import matches
from keepk.plan.phases import Goal, Phase, Plan, through_phases
from keepk.rank.channels import Choice
from keepk.run.channel_members import ChannelMembers, snapped_plans
from keepk.run.weights import Members

SHOWN = 12  # counts of a plan in an error


class WeightBound:
    """The least number of weights that may be left in a space, for given numbers of kept channels.

    Attributes:
        members: The weight space.
        channels: The channel spaces by name.
        is_shared: Whether any of its weights belongs to a channel that may be removed.
    """

    def __init__(
        self, model: nn.Module, members: Members, graph: Graph, channels: Mapping[str, ChannelMembers]
    ) -> None:
        self.members, self.channels = members, channels
        self._known = dict[tuple[tuple[int, ...], int | None], int]()
        names = {parameter: name for name, parameter, is_one in named_tensors(model) if is_one}
        own = [names[parameter] for parameter in members.parameters.values()]
        self._kinds = _KindCounts(graph, channels, own)
        self._products = [self._kinds.product(name) for name in own]
        self.is_shared = any(factor.multiples for product in self._products for factor in product.factors)

    def least(self, kept: Mapping[str, int], enough: int | None = None) -> int:
        """The least number of weights left if each channel space keeps `kept` channels; `enough` is that of `least`."""
        key = tuple(kept[name] for name in self.channels), enough
        if key not in self._known:
            gone = sum(it.total - kept[name] for name, it in self.channels.items())
            totals = {name: kept[name] for name in self.channels}
            self._known[key] = least(self._products, self._kinds.counts(gone), totals, enough)
        return self._known[key]


class _KindCounts:
    """How many units of each kind are kept, as variables of `least`, and how many weights these leave in a tensor.

    Two units of a layer are of one kind if they have equally many slices in each tensor of the weight space. It does
    not matter which of them is kept, only how many, so each kind has one variable: a `Count`. For example, if the 16
    outputs of a ``Linear(8, 16)`` are in a channel space, they are of one kind. If c of them are kept, its weight has
    8 c entries left, which is what `product` returns.

    A unit outside of all spaces is kept, unless it is removed with another one: a read with its source, or a source
    with its last read.
    """

    def __init__(self, graph: Graph, spaces: Mapping[str, ChannelMembers], tensors: Sequence[str]) -> None:
        self._graph = graph
        self._counts = list[Count]()
        self._spare = dict[int, tuple[int, int]]()  # by count: its units, and how many reads each of them has
        self._affine = list[tuple[int, float, float]]()  # by kind: its count; units left = constant + multiple * count
        self._kind = np.full(len(graph.units) + 1, -1)  # by unit; the last entry is for indices without a unit
        self._sizes = list[int]()
        self._is_counted = np.zeros(len(graph.units) + 1, bool)
        for members in spaces.values():
            self._is_counted[members.units] = True
        self._removed_with_others = _removed_with_others(graph, self._is_counted)
        self._leader = _leaders(graph, self._is_counted | self._removed_with_others)
        marks = self._marks(tensors)
        for name, members in spaces.items():
            for choice in members.choices:
                if not self._add_bound(name, choice, marks):
                    self._add_free(name, members, choice, marks)
        self._add_loose(marks)
        self._kind = self._kind[self._leader]

    def counts(self, gone: int) -> list[Count]:
        """The counts after `gone` channels of all spaces were removed."""
        found = list(self._counts)
        for place, (size, reads) in self._spare.items():
            found[place] = Count(range(max(1, size - gone // reads if reads else 1), size + 1), None)
        return found

    def product(self, tensor: str) -> Product:
        """How many entries of a tensor are left, as a product of one factor per axis."""
        shape, owners = self._graph.shape(tensor), self._graph.owners(tensor)
        rest = [size for axis, size in enumerate(shape) if axis not in owners]
        factors = [self._factor(it) if it.ndim == 1 else self._row_factor(it, owners.get(0)) for it in owners.values()]
        return Product(float(np.prod(rest, dtype=np.float64)), tuple(factors))

    def _factor(self, owners: Indices) -> Factor:
        """How many indices of an axis are left."""
        kinds, numbers = np.unique(self._kind[owners], return_counts=True)
        constant, multiples = 0.0, dict[int, float]()
        for kind, number in zip(kinds.tolist(), numbers.tolist(), strict=True):
            if kind < 0:
                constant += number
                continue
            place, offset, slope = self._affine[kind]
            each = number / self._sizes[kind]  # indices per unit; a head has several
            constant += each * offset
            multiples[place] = multiples.get(place, 0.0) + each * slope
        return Factor(constant, multiples)

    def _row_factor(self, owners: Indices, rows: Indices | None) -> Factor:
        """How many in-channels are left in each row of a grouped convolution's weight, the same number in every row."""
        leaders = self._leader[owners]
        if rows is not None and (leaders == self._leader[rows][:, None]).all():
            return Factor(owners.shape[1], {})  # columns are removed only with their row, so a row that is left has all
        found = [self._factor(row) for row in np.unique(owners, axis=0)]
        # If rows differ, use a bound that always holds: one column per row.
        return found[0] if all(it == found[0] for it in found) else Factor(1, {})

    def _marks(self, tensors: Iterable[str]) -> Indices:
        """By unit, a hash of how many slices it and the units removed with it have in each tensor."""
        marks = np.zeros(len(self._graph.units) + 1, np.int64)
        random = np.random.default_rng(0)  # a random number per tensor and axis, so equal sums mean equal slices
        for tensor in tensors:
            for owners in self._graph.owners(tensor).values():
                np.add.at(marks, self._leader[owners].ravel(), random.integers(1, 2**62))
        return marks

    def _add_bound(self, name: str, choice: Choice, marks: Indices) -> bool:
        """Add one count for all blocks of a binding, if each block has one kind of units; otherwise return False."""
        blocks = choice.blocks
        if len(blocks) == 1 or any(len(np.unique(marks[block])) > 1 for block in blocks):
            return False
        self._counts.append(Count(choice.portion.counts, name))
        total = sum(map(len, blocks))
        rates = choice.lost(choice.step)
        for block, rate in zip(blocks, rates, strict=True):
            part = rate / choice.step  # of the units that are lost
            self._add(block, len(self._counts) - 1, len(block) - total * part, part)
        return True

    def _add_free(self, name: str, members: ChannelMembers, choice: Choice, marks: Indices) -> None:
        """Add one count for each kind of units in each layer, from the fewest that may be kept to all."""
        blocks, counts = choice.blocks, choice.portion.counts
        for block, most_gone in zip(blocks, choice.lost(sum(map(len, blocks)) - counts[0]), strict=True):
            homes = self._graph.units.group[block]
            for home in np.unique(homes).tolist():
                layer = block[homes == home]
                floor = members.space.floor_of(len(self._graph.groups[home].units))
                kept = max(len(layer) - most_gone, min(floor, len(layer)) * (len(blocks) == 1))
                kinds = [layer[marks[layer] == mark] for mark in np.unique(marks[layer])]
                whole = len(kinds) == 1 and len(layer) == len(block) == counts[-1]
                for units in kinds:
                    low = max(0, kept - (len(layer) - len(units)))
                    self._counts.append(Count(counts if whole else range(low, len(units) + 1), name))
                    self._add(units, len(self._counts) - 1, 0, 1)

    def _add_loose(self, marks: Indices) -> None:
        """Add bounds for units outside of all spaces that may be removed with others, since no plan counts them."""
        links = self._graph.links()
        for space in self._graph.groups:
            for mark in np.unique(marks[space.units]).tolist():
                units = space.units[(marks[space.units] == mark) & self._removed_with_others[space.units]]
                if len(units):
                    numbers = np.bincount(links[:, 0], minlength=len(self._graph.units))[units]
                    direct = self._is_counted[links[np.isin(links[:, 0], units), 1]].all()
                    self._counts.append(Count(range(1, len(units) + 1), None))
                    self._spare[len(self._counts) - 1] = len(units), int(numbers.min()) if direct else 0
                    self._add(units, len(self._counts) - 1, 0, 1)

    def _add(self, units: Indices, count: int, offset: float, slope: float) -> None:
        self._kind[units] = len(self._affine)
        self._affine.append((count, offset, slope))
        self._sizes.append(len(units))


def _removed_with_others(graph: Graph, counted: Flags) -> Flags:
    """Which units outside of all spaces may be removed with others: unread sources, reads of several sources."""
    sources, readers = graph.links().T
    used = np.isin(graph.units.classes, graph.solution.used)
    removable = np.zeros(len(counted), bool)
    removable[:-1] = (np.bincount(sources, minlength=len(used)) > 0) & ~used & ~counted[:-1]
    for _ in range(len(graph.groups)):  # a source is kept if one of its reads is; chains take several rounds
        removable[sources[~(removable | counted)[readers]]] = False
    several = np.flatnonzero(np.bincount(readers, minlength=len(used)) > 1)
    removable[several[~counted[several]]] = True
    return removable


def _leaders(graph: Graph, independent: Flags) -> Indices:
    """By unit, the unit that it is removed with: the source that it reads, or itself if it is independent of it."""
    leader = np.arange(len(independent))
    sources, readers = graph.links().T
    follows = ~independent[readers]
    for _ in range(len(graph.groups)):  # a source may itself be a read of another source
        before = leader.copy()
        leader[readers[follows]] = leader[sources[follows]]
        if (leader == before).all():
            break
    return leader


def late_goals(
    goals: Mapping[str, Goal],
    channels: Mapping[str, ChannelMembers],
    bounds: Mapping[str, WeightBound],
    phases: Sequence[Phase],
) -> dict[str, Goal]:
    """New goals for weight spaces that are pruned after channels: they start from the weights left by then.

    A schedule that started from all weights of its space could keep more than there are. Lists of counts stay as the
    user has written them.
    """
    found = dict[str, Goal]()
    plan = snapped_plans(channels, {name: through_phases(name, goals[name], phases) for name in channels})
    for name, bound in bounds.items():
        first = next(place for place, phase in enumerate(phases) if matches(name, phase.prune))
        begin = sum(phase.epochs for phase in phases[:first])
        if begin and callable(bound.members.space.schedule):
            left = bound.least({other: plan[other][begin - 1] for other in bound.channels})
            if bound.members.keep <= left < bound.members.total:
                found[name] = replace(goals[name], start=left)
    return found


def refuse_undercut(plan: Plan, bounds: Mapping[str, WeightBound]) -> None:
    """Refuse a plan that keeps more weights than the remaining channels are certain to have.

    Until the plan of a weight space begins, its count may fall with the channels that are removed.
    """
    for name, bound in bounds.items():
        kept = [{other: plan[other][epoch] for other in bound.channels} for epoch in range(len(plan[name]))]
        for epoch, count in enumerate(plan[name]):
            if count < bound.members.total and bound.least(kept[epoch], enough=count) < count:
                limits = [bound.least(it) for it in kept]
                raise PlanError(_undercut(plan, bound.members, list(bound.channels.values()), epoch, limits))


def _undercut(
    plan: Plan, members: Members, channels: Sequence[ChannelMembers], epoch: int, limits: Sequence[int]
) -> str:
    """The message about a plan that keeps too many weights, with a remedy: fewer weights, other counts, or phases."""
    name = members.space.name
    asks = (
        f"space {name!r}: keeps {plan[name][epoch]} weights at epoch {epoch + 1}, but the channels left by then may "
        f"have as few as {limits[epoch]} of its {members.total}"
    )
    if members.keep > limits[-1]:
        return (
            f"{asks}, and {limits[-1]} at the end. Keep at most {limits[-1]} weights, or more channels, or raise "
            f"layer_floor= of the channel space."
        )
    said = f"{asks}. Use a schedule that keeps at most these counts, by epoch: {_short(limits)}"
    last = max(_epochs_of(plan, it) for it in channels)
    begin = next(e for e, count in enumerate(plan[name]) if count < members.total)
    if begin >= last:
        return f"{said}."
    names = [it.space.name for it in channels]
    listed = repr(names[0]) if len(names) == 1 else repr(names)
    after = f"keepk.Phase({last}, prune={listed}), keepk.Phase({_epochs_of(plan, members)}, prune={name!r})"
    # A Phase takes globs over the names of spaces, and a default name such as "*" would match the other space too.
    clash = any(matches(name, [it]) or matches(it, [name]) for it in names)
    return (
        f"{said}. Or prune weights after channels: Pruner(phases=[{after}])"
        f"{', with a name= for each space' if clash else ''}; up to {limits[-1]} weights can be kept then."
    )


def _epochs_of(plan: Plan, members: Members | ChannelMembers) -> int:
    """The number of epochs that the schedule of a space takes."""
    if not callable(members.space.schedule):
        return len(members.space.schedule)
    assert members.keep is not None  # only spaces with counts have bounds
    return plan[members.space.name].index(members.keep) + 1


def _short(counts: Sequence[int]) -> str:
    if len(counts) <= SHOWN:
        return ", ".join(map(str, counts))
    half = SHOWN // 2
    return f"{', '.join(map(str, counts[:half]))}, ..., {', '.join(map(str, counts[-half:]))}"


def find_bounds(
    model: nn.Module, weights: Mapping[str, Members], graph: Graph | None, channels: Mapping[str, ChannelMembers]
) -> dict[str, WeightBound]:
    """By weight space with weights in channels that may be removed: its bound."""
    if graph is None:
        return {}
    bounds = {name: WeightBound(model, members, graph, channels) for name, members in weights.items()}
    return {name: bound for name, bound in bounds.items() if bound.is_shared}
