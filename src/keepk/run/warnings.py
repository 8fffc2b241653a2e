"""The warnings of a run, issued once per cause: wrong counts, meaningless rankings, events without training."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from keepk.errors import KeepkWarning

_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
Thin = tuple[str, int, int]  # a layer's name, how many of its units the event would keep, how many it has
SPREAD = 0.05  # standard deviation of scales relative to their mean, below which their order is mostly noise
Unit = tuple[str, int]  # a layer's name, and the number of weights of one of its units
MIXED = 10  # times as many weights: a head of 2,000 weights beside a hidden neuron of 72
SHARE = 0.05  # of a layer's units: a ranking that keeps fewer is usually meaningless


def warn(message: str) -> None:
    """Issue a `KeepkWarning` that points at the line of the user's code that called keepk."""
    # Not a fixed stacklevel: a warning from an optimizer hook would then point into torch.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, KeepkWarning, stacklevel=level)


class Watch:
    """The warnings issued so far, and the optimizer steps since the last event."""

    def __init__(self) -> None:
        self._warned = set[tuple[str, ...]]()
        self._updates = Counter[int]()  # by optimizer
        self._falls = 0  # consecutive events that lowered counts after at most one update

    def once(self, cause: tuple[str, ...], message: str) -> None:
        """Issue a warning, unless this cause was warned about before."""
        if cause not in self._warned:
            warn(message)
            # Only after the warning: if a filter turns it into an error, the next call must warn again.
            self._warned.add(cause)

    def untrue_counts(self, asked_by: str, claimed: Mapping[str, int], found: Mapping[str, int]) -> None:
        """Warn about spaces whose count differs from the number that the last event left."""
        wrong = {space: count for space, count in found.items() if count != claimed[space]}
        # A space whose count is right again gets a new warning when it becomes wrong the next time.
        self._warned -= {cause for cause in self._warned if cause[0] == "untrue" and cause[2] not in wrong}
        for space, count in wrong.items():
            self.once(("untrue", asked_by, space), untrue_message(space, claimed[space], count))

    def thin_layers(self, space: str, kind: str, layers: Sequence[Thin]) -> None:
        """Warn about layers that would lose almost all of their units while the space keeps many."""
        share = sum(left for _, left, _ in layers) / max(1, sum(total for _, _, total in layers))
        if thin := thin_layers(layers, share):
            self.once(("thin", space), thin_message(space, kind, thin))

    def uncounted(self, space: str, keep: int | None, total: int, layers: Sequence[tuple[str, int, int, str]]) -> None:
        """Warn about channels that cannot be removed and are not counted."""
        if layers:
            self.once(("uncounted", space), uncounted_message(space, keep, total, layers))

    def mixed_units(self, space: str, heads: Unit | None, channels: Unit | None) -> None:
        """Warn about a space that ranks heads beside single channels of a very different size."""
        if heads is not None and channels is not None and heads[1] >= MIXED * channels[1]:
            self.once(("mixed", space), mixed_message(space, heads, channels))

    def adapted_weights(self, space: str, names: Sequence[str]) -> None:
        """Warn about weights to which the weights of adapters will be added."""
        if names:
            self.once(
                ("adapted", space),
                f"space {space!r}: {names[0]!r}{f' and {len(names) - 1} more' if names[1:] else ''} "
                f"{'are' if names[1:] else 'is'} of a layer with adapters. merge_and_unload() adds them to the weights "
                f"of the layer, pruned ones too, which are then no longer zero. Merge first and prune the merged "
                f"model, or keep the adapters apart.",
            )

    def tied_scores(self, space: str, kind: str, tied: int, total: int) -> None:
        """Warn if most units of a space have the score at which the ranking is cut."""
        if 2 * tied > total:
            self.once(("tied", space), tied_message(space, kind, tied, total))

    def alike_scales(self, space: str, mean: float, deviation: float) -> None:
        """Warn if a space is ranked by BatchNorm scales that hardly differ; `tied_scores` warns about equal ones."""
        if 0 < deviation < SPREAD * mean:
            self.once(("alike", space), alike_message(space, mean, deviation))

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer step."""
        # A single step of LBFGS makes many updates, so one step between events is enough.
        self._updates[id(optimizer)] += 2 if isinstance(optimizer, torch.optim.LBFGS) else 1

    def hasty(self, before: Mapping[str, int], counts: Mapping[str, int], epochs: int) -> None:
        """Warn if two consecutive events lower counts with at most one optimizer step in between."""
        falling = [name for name, count in counts.items() if count < before[name]]
        if falling and self._falls and self._is_hasty:
            self.once(
                ("hasty",),
                f"pruner.step() was called twice in a row after at most one optimizer step, and both calls prune "
                f"(space {falling[0]!r}: now from {before[falling[0]]:,} to {counts[falling[0]]:,}). If it is called "
                f"once per batch, the whole plan is over after {epochs} batches, with almost no training. "
                f"Call it at the end of every epoch, or every n batches. If one update per event is intended, as with "
                f'full batches, ignore this: warnings.filterwarnings("ignore", "pruner.step", keepk.KeepkWarning).',
            )

    def event(self, *, fell: bool) -> None:
        """Record the end of an event; `fell` says whether it lowered any count."""
        self._falls = self._falls + fell if self._is_hasty else 0
        self._updates.clear()

    def restart(self) -> None:
        """Reset the counters after a state was loaded."""
        self._falls = 0
        self._updates.clear()

    @property
    def _is_hasty(self) -> bool:
        return max(self._updates.values(), default=0) <= 1


def untrue_message(space: str, claimed: int, found: int) -> str:
    """The message about a count that differs from the number that the last event kept."""
    if found > claimed:
        return (
            f"space {space!r}: the last event kept {claimed:,} units, but there are {found:,} now: pruned ones are no "
            f"longer zero, for example after load_state_dict, or after training with an optimizer that was not passed "
            f"to the Pruner. Call pruner.apply_masks() to set them to zero again. If parameters were added or untied "
            f"since, make a new Pruner."
        )
    return (
        f"space {space!r}: the last event kept {claimed:,} units, but there are only {found:,} now: parameters were "
        f"removed or replaced. Make a new Pruner for the current model."
    )


def thin_layers(layers: Sequence[Thin], share: float) -> list[Thin]:
    """The layers that keep less than 5 % of their units, and less than half of what their space keeps.

    The second condition is for spaces that keep few units overall: if they keep 3 %, a layer with 2 % is no surprise.

    >>> thin_layers([("a", 1, 64), ("b", 300, 512)], share=0.5)
    [('a', 1, 64)]
    """
    limit = min(SHARE, share / 2)
    return [(name, left, total) for name, left, total in layers if left < limit * total]


def uncounted_message(space: str, keep: int | None, total: int, layers: Sequence[tuple[str, int, int, str]]) -> str:
    """The message about layers with channels that are not counted; `keep` is None for a space with a budget."""
    fixed = sum(channels for _, channels, _, _ in layers)
    some = "; ".join(f"{name!r} {channels:,} of {width:,}, {why}" for name, channels, width, why in layers[:5])
    more = f"; and {len(layers) - 5} more layers" if len(layers) > 5 else ""
    are = "are" if fixed > 1 else "is"
    said = (
        f"space {space!r}: {fixed:,} channel{'s' * (fixed > 1)} of its layers cannot be removed and {are} not counted"
    )
    if keep is None:
        return f"{said}: {some}{more}. They stay in addition to those that the budget keeps of the {total:,} others."
    return (
        f"{said}: "
        f"{some}{more}. The space keeps {keep:,} of the {total:,} others, so {keep + fixed:,} remain in total. Choose "
        f"keep= accordingly, or leave these layers out with exclude=."
    )


def mixed_message(space: str, heads: Unit, channels: Unit) -> str:
    """The message about a space with units of very different size."""
    return (
        f"space {space!r}: has units of very different size: one of {heads[0]!r} has {heads[1]:,} weights, one of "
        f"{channels[0]!r} has {channels[1]:,}. One ranking of both says little. Put them into separate spaces, "
        f"under one budget with Pruner(macs=...), or pass per_layer=True."
    )


def thin_message(space: str, kind: str, thin: Sequence[Thin]) -> str:
    """The message about layers that would keep almost nothing."""
    some = ", ".join(f"{name!r} {left:,} of {total:,}" for name, left, total in thin[:5])
    more = f" and {len(thin) - 5} more" if len(thin) > 5 else ""
    return (
        f"space {space!r}: {len(thin)} layer{'s' if len(thin) > 1 else ''} would keep less than 5 % of "
        f"{'their' if len(thin) > 1 else 'its'} {kind}: {some}{more}. One ranking over all layers says little about "
        f"untrained weights. Train first, set layer_floor=..., or choose another metric=."
    )


def alike_message(space: str, mean: float, deviation: float) -> str:
    """The message about scales that hardly differ."""
    return (
        f"space {space!r}: its BatchNorm scales hardly differ (mean {mean:.3g}, standard deviation {deviation:.2g}), "
        f"so ranking by them says little. Weight decay separates them slowly: it shrinks the scales that the loss "
        f"does not need by a factor of exp(-S), where S is the sum of lr * decay / (1 - momentum) over all steps and "
        f"should be above 2. Train longer first, or choose another metric=, such as keepk.metrics.taylor or product."
    )


def tied_message(space: str, kind: str, tied: int, total: int) -> str:
    """The message about ties at the cut of the ranking."""
    return (
        f"space {space!r}: {tied:,} of its {total:,} {kind} are tied at the cut of the ranking, so their order in the "
        f"model decides which of them are kept, not their scores. BatchNorm scales, for example, are all equal before "
        f"training. Train first, or choose another metric=."
    )
