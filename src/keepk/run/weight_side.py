"""The weights of a run: which are pruned, and which go at the next event."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keepk.cut.hold import Masks
from keepk.errors import RankError, SpaceError
from keepk.rank.changed import refuse_other_parameters
from keepk.rank.metrics import magnitude, score
from keepk.rank.select import Cut, Ranked, cut_points, dead_mask
from keepk.run.resolve import Members, refuse_not_finite
from keepk.run.watch import Watch


class WeightSide:
    """The weight spaces of a run."""

    def __init__(self, model: nn.Module, members: Mapping[str, Members], watch: Watch) -> None:
        self.members = members
        self.watch = watch
        self._model = model
        self.dead: Masks = {}
        self.kept = {name: it.total for name, it in members.items()}
        self.certified = dict(self.kept)  # at the last event, before anybody swept what is dead

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of a space, by name."""
        return {name: p for members in self.members.values() for name, p in members.parameters.items()}

    @property
    def masks(self) -> Masks:
        """By parameter: which entries are kept."""
        return {
            name: ~self.dead[name] if name in self.dead else torch.ones_like(parameter, dtype=torch.bool)
            for name, parameter in self.parameters.items()
        }

    def counts(self, dead: Masks) -> dict[str, int]:
        """By space: how many weights these masks leave."""
        return {
            name: sum(p.numel() - (int(dead[key].sum()) if key in dead else 0) for key, p in it.parameters.items())
            for name, it in self.members.items()
        }

    def decide(self, planned: Mapping[str, int], doomed: Masks) -> Masks:
        """The new dead masks of what changes: weights of channels that go, then the lowest-ranked. Reads only.

        `planned` says how many are left of each space; where channels that go leave fewer, the event is refused.
        """
        own = self.parameters
        refuse_other_parameters(self._model, own, SpaceError)
        before = {name: self._with(name, mask) for name, mask in doomed.items() if name in own}
        left = self.counts({**self.dead, **before}) if before else self.kept
        cuts = list[tuple[Ranked, Cut]]()
        for name, keep in planned.items():
            self._refuse_undercut(name, keep, left[name], by_channels=bool(before))
            if keep < left[name]:
                ranked = self._ranked(self.members[name], before)
                found = cut_points(ranked, keep)
                self._warn_of_ranking(self.members[name], left[name], found)
                cuts += zip(ranked, found, strict=True)
        return {**before, **{ranked.name: dead_mask(ranked, cut) for ranked, cut in cuts}}

    def _refuse_undercut(self, name: str, planned: int, left: int, *, by_channels: bool) -> None:
        members = self.members[name]
        waits = planned == members.total  # its plan has not begun, so channels may take weights along
        wanted, what = (members.keep, "to keep") if waits else (planned, "of its plan at this event")
        # At the count of its plan before, as in a flat tail: what was cut since, as by keepk.compact, may be fewer.
        reached = not by_channels and self.certified[name] <= wanted
        if left >= wanted or reached:
            return
        why = "the channels that stay have" if by_channels else "the model was cut elsewhere, which left"
        raise RankError(
            f"space {name!r}: {why} only {left} of its weights, fewer than the {wanted} {what}. "
            f"Nothing was pruned. Keep more channels or fewer weights, or prune weights after channels, in phases "
            f"(keepk.Phase)."
        )

    def follow(self, dead: Masks, counts: Mapping[str, int]) -> None:
        """Take note that these are the masks now, and the counts of the spaces that they changed."""
        self.dead = dead
        self.kept = {**self.kept, **counts}

    def certify(self) -> None:
        """Take note that the counts are those of an event."""
        self.certified = dict(self.kept)

    def snapshot(self) -> tuple[Any, ...]:
        """Where it stands, for `restore`."""
        return self.dead, self.kept, self.certified

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Stand there again."""
        self.dead, self.kept, self.certified = snapshot

    def _warn_of_ranking(self, members: Members, alive: int, cuts: Sequence[Cut]) -> None:
        """Warn of most weights tied at the cut, or of tensors that keep nearly nothing; zeros may go in any order."""
        name, by_magnitude = members.space.name, (members.space.metric or magnitude) is magnitude
        equal, ties = sum(cut.equal for cut in cuts), sum(cut.ties for cut in cuts)
        if 0 < ties < equal and not (by_magnitude and all(cut.value == 0 for cut in cuts)):
            self.watch.tied_scores(name, "weights", equal, alive)
        if members.space.layer_floor == 0:  # a floor that the user has set is a decision about thin layers
            sizes = ((key, math.prod(shape)) for key, shape in members.shapes.items())
            layers = [(key, cut.kept, size) for (key, size), cut in zip(sizes, cuts, strict=True)]
            self.watch.thin_layers(name, "weights", [it for it in layers if len(members.shapes[it[0]]) > 1])

    def _with(self, name: str, doomed: Tensor) -> Tensor:
        return doomed if name not in self.dead else doomed | self.dead[name].to(doomed.device)

    def _ranked(self, members: Members, before: Masks) -> list[Ranked]:
        metric = members.space.metric or magnitude
        found = []
        for name, parameter in members.parameters.items():
            by_magnitude = metric is magnitude
            if not by_magnitude:
                refuse_not_finite(name, parameter)
            # The magnitude itself is never materialised: the selection reads the weights.
            scores = parameter.detach() if by_magnitude else score(metric, parameter, name)
            dead = before.get(name, self.dead.get(name))
            if dead is not None:
                dead = dead.to(scores.device)  # the model may have moved
            found.append(Ranked(name, scores, dead, by_magnitude, members.floor(parameter)))
        return found
