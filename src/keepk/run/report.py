"""What a plan and a run have to say, as plain values: the tables and pictures of `show` read nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from keepk.errors import PlanError
from keepk.plan.numbers import count
from keepk.plan.schedules import AnySchedule, plan
from keepk.plan.spaces import weights


@dataclass(frozen=True)
class LayerCount:
    """How many units (weights or channels) of one layer are kept."""

    name: str
    total: int
    kept: int


@dataclass(frozen=True)
class EpochRecord:
    """The end of one epoch: how many units are left, and the accuracy on the validation part in percent."""

    phase: str
    kept: int
    accuracy: float


@dataclass(frozen=True)
class PlanSpan:
    """Epochs `first` to `last`, at whose ends the same number is kept; `pruned` go at the end of `first`."""

    first: int
    last: int
    kept: int
    pruned: int


@dataclass(frozen=True)
class PlanReport:
    """A checked plan: M, and how many of them are left after epochs 1, 2, ..."""

    total: int
    counts: tuple[int, ...]

    @property
    def keep(self) -> int:
        """K, where the plan ends."""
        return self.counts[-1]

    @property
    def spans(self) -> list[PlanSpan]:
        """The plan with epochs at which nothing changes folded into one span.

        >>> PlanReport(100, (50, 50, 10)).spans
        [PlanSpan(first=1, last=2, kept=50, pruned=50), PlanSpan(first=3, last=3, kept=10, pruned=40)]
        """
        before = (self.total, *self.counts)
        changed = [epoch for epoch in range(1, len(before)) if epoch == 1 or before[epoch] != before[epoch - 1]]
        return [
            PlanSpan(first, following - 1, before[first], before[first - 1] - before[first])
            for first, following in pairwise([*changed, len(before)])
        ]


def plan_report(
    schedule: AnySchedule, total: int, *, keep: int | None = None, prune: float | None = None, epochs: int | None = None
) -> PlanReport:
    """The plan of `total` weights, by the count to keep or by the share to prune, as a `Pruner` would make it.

    >>> plan_report([400, 250], 1000, prune=0.75)
    PlanReport(total=1000, counts=(400, 250))
    """
    count(total, "plan: total", PlanError, least=1)
    if epochs is not None:
        count(epochs, "plan: epochs", PlanError, least=1)
    kept = weights("*", keep=keep, prune=prune, name="plan").count_kept(total)
    return PlanReport(total, plan(schedule, total, kept, epochs=epochs))


def layer_counts(masks: Mapping[str, Tensor]) -> list[LayerCount]:
    """By layer, in the order of the masks: ``fc1.weight`` and ``fc1.bias`` are both of ``fc1``.

    >>> import torch
    >>> layer_counts({"fc1.weight": torch.tensor([True, False]), "fc1.bias": torch.tensor([False])})
    [LayerCount(name='fc1', total=3, kept=1)]
    """
    layers = dict[str, list[Tensor]]()
    for name, mask in masks.items():
        layers.setdefault(name.rpartition(".")[0] or name, []).append(mask)
    return [
        LayerCount(layer, sum(mask.numel() for mask in found), sum(int(mask.count_nonzero()) for mask in found))
        for layer, found in layers.items()
    ]


def whole(layers: Sequence[LayerCount], name: str = "total") -> LayerCount:
    """All layers as one.

    >>> whole([LayerCount("a", 10, 1), LayerCount("b", 5, 2)])
    LayerCount(name='total', total=15, kept=3)
    """
    return LayerCount(name, sum(layer.total for layer in layers), sum(layer.kept for layer in layers))
