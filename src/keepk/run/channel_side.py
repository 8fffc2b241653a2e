"""The channels of a run: which are still there, and which go at the next event."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from keepk.errors import RankError, StateError
from keepk.graph.edits import Cut, Indices
from keepk.graph.graph import Graph
from keepk.graph.maps import Flags
from keepk.graph.tracer import named_tensors
from keepk.plan.phases import Plan
from keepk.plan.portions import Split, chain, has_even_steps, snapped
from keepk.rank.channel_metrics import (
    bn_scale,
    channel_scores,
    default_metric,
    product,
    reads_scales,
    reads_weights_alone,
)
from keepk.rank.choices import Decision, keep_best, rank_values
from keepk.rank.layers import Layer, Parameters, layers_of
from keepk.rank.statistics import Statistics, statistics_of
from keepk.run.channel_members import ChannelMembers
from keepk.run.surgery import Surgery
from keepk.run.watch import Watch


@dataclass(frozen=True)
class ChannelEvent:
    """What one event decides: the units of the spaces that go, and by space the chains that lead on to K."""

    removed: Indices
    chains: dict[str, tuple[Split, ...]]


class ChannelSide:
    """The channel spaces of a run over one graph."""

    def __init__(self, graph: Graph, model: nn.Module, members: Mapping[str, ChannelMembers], surgery: Surgery) -> None:
        self.graph, self.members, self.surgery = graph, members, surgery
        self.watch = Watch()
        self._model, self._parameters = model, Parameters.of(model)
        self.dead: Flags = np.zeros(len(graph.units), bool)
        self._plan: Plan = {}
        self._chains = dict[str, tuple[Split, ...]]()
        self.certified = self.kept  # at the last event, before anybody swept what is dead

    def settle(self, plan: Plan) -> dict[str, tuple[int, ...]]:
        """The plan moved to counts that can be met, which is followed from now on."""
        self._plan = {name: snapped(_portions(it), plan[name]) for name, it in self.members.items()}
        for name, it in self.members.items():
            if not has_even_steps(_portions(it)):
                found = chain(_portions(it), self._plan[name])
                assert found is not None  # the plan was snapped along one
                self._chains[name] = found
        return dict(self._plan)

    def try_metrics(self) -> None:
        """Rank once by every metric that needs weights alone, so that what it misses is refused before training."""
        for name, it in self.members.items():
            layers = self.layers(name)
            metric = it.space.metric or default_metric(layers)
            if reads_weights_alone(metric):
                channel_scores(metric, layers)

    def warn_of_uncounted(self) -> None:
        """Warn of layers that have channels which their space does not count."""
        for name, it in self.members.items():
            self.watch.uncounted(name, it.keep, it.total, [(u.layer, u.channels, u.width, u.why) for u in it.uncounted])

    def follow_statistics(self) -> None:
        """Tell the statistics that metrics read which channels there are now; they start again."""
        spaces = dict[Statistics, dict[str, list[Layer]]]()
        for name, it in self.members.items():
            for statistics in statistics_of(it.space.metric):
                spaces.setdefault(statistics, {})[name] = self.layers(name)
        for statistics, layers in spaces.items():
            statistics.follow(layers)

    @property
    def kept(self) -> dict[str, int]:
        """By space, how many channels are left."""
        return {name: it.total - int(self.dead[it.units].sum()) for name, it in self.members.items()}

    @property
    def touched(self) -> dict[str, Tensor]:
        """By name, the tensors that have something of the channels."""
        layers = (layer for it in self.members.values() for layer in it.layers)
        names = {tensor for layer in layers for tensor, _, _ in layer.axes}
        return {name: tensor for name, tensor, _ in named_tensors(self._model) if name in names}

    def layers(self, name: str) -> list[Layer]:
        """The channels of a space that are left, layer by layer, as a metric sees them."""
        members = self.members[name]
        return layers_of(self.graph, self._parameters, members.layers, ~self.dead, members.space.at)

    def decide(self, epoch: int) -> ChannelEvent:
        """Which units go at the end of an epoch. Reads only."""
        removed, chains, kept = [np.zeros(0, np.int64)], dict[str, tuple[Split, ...]](), self.kept
        for name, counts in self._plan.items():
            known = self._chains.get(name, ())
            if counts[epoch] < kept[name]:
                decision = self._decide(self.members[name], counts[epoch:], known)
                removed.append(decision.removed)
                chains[name] = decision.chain
            else:
                chains[name] = tuple(known[1:])
        return ChannelEvent(np.sort(np.concatenate(removed)), chains)

    def follow(self, event: ChannelEvent, gone: Indices) -> None:
        """Take note that an event happened; `gone` are all units that went, those of no space too."""
        self.dead = self.dead.copy()
        self.dead[gone] = True
        self._chains = dict(event.chains)

    def certify(self) -> None:
        """Take note that the counts are those of an event."""
        self.certified = self.kept

    def follow_cuts(self, cuts: Iterable[Cut]) -> None:
        """Take note of what somebody else has cut from the model."""
        gone = self.graph.lost(cuts)
        self.graph.removed(gone)
        self.dead = self.dead.copy()
        self.dead[gone] = True

    def refuse_other_counts(self, event: ChannelEvent, gone: Indices) -> None:
        """Refuse a removal that takes other channels of a space along than were chosen."""
        unasked = np.zeros_like(self.dead)
        unasked[gone] = True
        unasked[event.removed] = False
        unasked &= ~self.dead
        for name, it in self.members.items() if unasked.any() else ():
            if more := int(unasked[it.units].sum()):
                raise RankError(
                    f"space {name!r}: {more} more channels would go with those that were chosen, so the count "
                    f"could not be kept. Make the space narrower."
                )

    def snapshot(self) -> tuple[Any, ...]:
        """Where it stands, for `restore`."""
        return self.dead, self._chains, self.certified

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Stand there again."""
        self.dead, self._chains, self.certified = snapshot

    def state(self) -> dict[str, Any]:
        """Where it stands, as plain values."""
        return {
            "total": len(self.dead),
            "gone": np.flatnonzero(self.dead).tolist(),
            "removed": np.flatnonzero(~self.graph.alive).tolist(),
            "chains": {name: [list(counts) for counts in found] for name, found in self._chains.items()},
        }

    def refuse_other_state(self, saved: Mapping[str, Any], epoch: int) -> None:
        """Refuse a state of other units, with counts that the plan does not have, or behind what is gone already."""
        try:
            total, gone, removed = saved["total"], np.asarray(saved["gone"], np.int64), {*saved["removed"]}
            fits = (
                total == len(self.dead) and (gone >= 0).all() and (gone < total).all() and removed <= {*gone.tolist()}
            )
            chains_fit = all(
                not found or [sum(counts) for counts in found] == list(self._plan[name][epoch:])
                for name, found in saved["chains"].items()
            )
        except (KeyError, TypeError, ValueError):
            fits = chains_fit = False
        if not fits or not chains_fit:
            raise StateError(
                "pruner state: its channels are not those of this model. It is damaged, or of another one."
            )
        after = np.zeros(total, bool)
        after[gone] = True
        for name, it in self.members.items():
            kept, planned = it.total - int(after[it.units].sum()), self._plan[name][epoch - 1] if epoch else it.total
            if kept != planned:
                raise StateError(
                    f"pruner state: {kept} channels of space {name!r} are left, the plan says {planned}. It is damaged."
                )
        if (self.dead & ~after).any():
            raise StateError(
                f"pruner state: {int((self.dead & ~after).sum())} of its channels are gone here already, and do not "
                f"come back. Build the model anew, and load the state into a new Pruner."
            )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Stand where a state stood that was not refused."""
        self.dead = np.zeros(len(self.dead), bool)
        self.dead[np.asarray(saved["gone"], np.int64)] = True
        self._chains = {name: tuple(tuple(counts) for counts in found) for name, found in saved["chains"].items()}

    def _decide(self, members: ChannelMembers, rest: Sequence[int], known: Sequence[Split]) -> Decision:
        layers = self.layers(members.space.name)
        metric = members.space.metric or default_metric(layers)
        scores = channel_scores(metric, layers)
        units = np.concatenate([layer.units for layer in layers])
        values = rank_values(units, scores, np.zeros(len(self.dead), bool), members.links)
        forced = self._forced(members, values)
        if forced.any():
            values = rank_values(units, scores, forced, members.links)
        decision = keep_best(members.choices, ~self.dead, values, rest, known)
        assert not forced[decision.removed].any()  # every choice has room for what must stay
        self._warn_of_ranking(members, metric, units, scores, decision.removed)
        if reads_scales(metric):
            scales = channel_scores(bn_scale, layers)
            self.watch.alike_scales(members.space.name, float(scales.mean()), float(scales.std()))
        return decision

    def _warn_of_ranking(
        self, members: ChannelMembers, metric: object, units: Indices, scores: NDArray[np.float64], removed: Indices
    ) -> None:
        """Warn of most channels tied at the cut, or of layers that keep nearly nothing."""
        name, stays = members.space.name, ~self.dead
        stays[removed] = False
        values, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
        kept = np.bincount(group, weights=stays[units], minlength=len(sizes))
        split = (kept > 0) & (kept < sizes)
        if metric is product:
            split &= values != 0  # dead already: they may go in any order
        self.watch.tied_scores(name, "channels", int(sizes[split].sum()), len(units))
        if members.space.layer_floor == 1:  # a higher floor is the user's decision about thin layers
            layers = [(layer.name, int(stays[layer.units].sum()), len(layer.units)) for layer in members.layers]
            self.watch.thin_layers(name, "channels", layers)

    def _forced(self, members: ChannelMembers, values: np.ndarray) -> Flags:
        """The best of every layer, up to its floor, with all that they read, and the best reading of every source."""
        forced, heights = np.zeros(len(values), bool), members.links.heights
        layers = sorted(members.layers, key=lambda layer: int(heights[layer.units[0]]))  # readings before sources
        needs = [(layer.units, members.space.floor_of(len(layer.units))) for layer in layers]
        needs += [(readings, 1) for readings in members.sources]
        for units, least in needs:
            living = units[~self.dead[units]]
            if not forced[living].sum() >= least:
                forced[living[np.argsort(-values[living], kind="stable")[:least]]] = True
                forced = members.links.raised(forced)
        return forced


def _portions(members: ChannelMembers) -> list[Any]:
    return [choice.portion for choice in members.choices]
