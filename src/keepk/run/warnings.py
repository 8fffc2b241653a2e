"""The warnings of a run, once per cause: untrue counts, meaningless rankings, events without training in between."""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from keepk.errors import KeepkWarning

_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))
Thin = tuple[str, int, int]  # a layer's name, how many of its units are about to stay, how many it had
SPREAD = 0.05  # of scales, relative to their mean: below it, their order is mostly noise
SHARE = 0.05  # of a layer's units: if fewer are about to stay, the ranking is usually meaningless


def warn(message: str) -> None:
    """Issue a `KeepkWarning` that points at the line of the user's code that called keepk."""
    # A fixed stacklevel would point into torch where an optimizer's hook warns.
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, KeepkWarning, stacklevel=level)


class Watch:
    """The warnings already given, and the optimizer steps since the last event."""

    def __init__(self) -> None:
        self._told = set[tuple[str, ...]]()
        self._updates = Counter[int]()  # by optimizer
        self._falls = 0  # events in a row at which counts fell after one update or none

    def once(self, cause: tuple[str, ...], message: str) -> None:
        """Warn, unless this cause was warned about before."""
        if cause not in self._told:
            warn(message)
            self._told.add(cause)  # after the warning: a filter that raises it must not silence the next one

    def untrue_counts(self, asked_by: str, claimed: Mapping[str, int], found: Mapping[str, int]) -> None:
        """Warn about spaces whose count differs from what the last event left."""
        wrong = {space: count for space, count in found.items() if count != claimed[space]}
        # A space that was repaired is warned about again when its count becomes wrong again.
        self._told -= {cause for cause in self._told if cause[0] == "untrue" and cause[2] not in wrong}
        for space, count in wrong.items():
            self.once(("untrue", asked_by, space), told_untrue(space, claimed[space], count))

    def thin_layers(self, space: str, kind: str, layers: Sequence[Thin]) -> None:
        """Warn about layers that are about to lose almost all of their units while the space keeps many."""
        share = sum(left for _, left, _ in layers) / max(1, sum(total for _, _, total in layers))
        if thin := thin_layers(layers, share):
            self.once(("thin", space), told_thin(space, kind, thin))

    def uncounted(self, space: str, keep: int, total: int, layers: Sequence[tuple[str, int, int, str]]) -> None:
        """Warn about channels that cannot be removed and are not counted."""
        if layers:
            self.once(("uncounted", space), told_uncounted(space, keep, total, layers))

    def tied_scores(self, space: str, kind: str, tied: int, total: int) -> None:
        """Warn if most units of a space have the score at which the ranking is cut."""
        if 2 * tied > total:
            self.once(("tied", space), told_tied(space, kind, tied, total))

    def alike_scales(self, space: str, mean: float, deviation: float) -> None:
        """Warn where a space is ranked by BatchNorm scales that hardly differ; equal ones are tied, which is told."""
        if 0 < deviation < SPREAD * mean:
            self.once(("alike", space), told_alike(space, mean, deviation))

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Count an optimizer step."""
        # A single step of LBFGS makes many updates, so it is never too few.
        self._updates[id(optimizer)] += 2 if isinstance(optimizer, torch.optim.LBFGS) else 1

    def hasty(self, before: Mapping[str, int], counts: Mapping[str, int], epochs: int) -> None:
        """Warn if counts fall for the second time in a row with at most one optimizer step in between."""
        falling = [name for name, count in counts.items() if count < before[name]]
        if falling and self._falls and self._is_hasty:
            self.once(
                ("hasty",),
                f"pruner.step() was called twice in a row after one optimizer step or none, while the plan falls "
                f"(space {falling[0]!r}: now from {before[falling[0]]:,} to {counts[falling[0]]:,}). Called once per "
                f"batch, the whole plan is over after {epochs} batches, with no training in between. Call it at the "
                f"end of every epoch, or every n batches. If one update per event is intended, as with full batches, "
                f'ignore this: warnings.filterwarnings("ignore", "pruner.step", keepk.KeepkWarning).',
            )

    def event(self, *, fell: bool) -> None:
        """Record that an event is over; `fell` says whether any count fell."""
        self._falls = self._falls + fell if self._is_hasty else 0
        self._updates.clear()

    def restart(self) -> None:
        """Reset the counters after a state was loaded."""
        self._falls = 0
        self._updates.clear()

    @property
    def _is_hasty(self) -> bool:
        return max(self._updates.values(), default=0) <= 1


def told_untrue(space: str, claimed: int, found: int) -> str:
    """The message about a count that differs from what the last event kept."""
    if found > claimed:
        return (
            f"space {space!r}: the last event kept {claimed:,} units, but {found:,} are there now: pruned ones are no "
            f"longer zero. load_state_dict, or training that the Pruner's optimizer does not do, brings them back. "
            f"Call pruner.apply_masks() to set them to zero again; where parameters were added or untied since, make a "
            f"new Pruner."
        )
    return (
        f"space {space!r}: the last event kept {claimed:,} units, but only {found:,} are there now: parameters were "
        f"removed or replaced. Make a new Pruner for the model as it is."
    )


def thin_layers(layers: Sequence[Thin], share: float) -> list[Thin]:
    """The layers that keep less than 5 % of their units, and less than half of what their space keeps.

    The second condition is for spaces that keep little as a whole: at 3 % in all, a layer with 2 % is to be expected.

    >>> thin_layers([("a", 1, 64), ("b", 300, 512)], share=0.5)
    [('a', 1, 64)]
    """
    limit = min(SHARE, share / 2)
    return [(name, left, total) for name, left, total in layers if left < limit * total]


def told_uncounted(space: str, keep: int, total: int, layers: Sequence[tuple[str, int, int, str]]) -> str:
    """The message about layers with channels that are not counted."""
    fixed = sum(channels for _, channels, _, _ in layers)
    some = "; ".join(f"{name!r} {channels:,} of {width:,}, {why}" for name, channels, width, why in layers[:5])
    more = f"; and {len(layers) - 5} layers more" if len(layers) > 5 else ""
    are = "are" if fixed > 1 else "is"
    return (
        f"space {space!r}: {fixed:,} channel{'s' * (fixed > 1)} of its layers cannot be removed and {are} not counted: "
        f"{some}{more}. It keeps {keep:,} of the {total:,} others, so that {keep + fixed:,} are left in all. Choose "
        f"keep= with that in mind, or leave these layers out with exclude=."
    )


def told_thin(space: str, kind: str, thin: Sequence[Thin]) -> str:
    """The message about layers that keep almost nothing."""
    some = ", ".join(f"{name!r} {left:,} of {total:,}" for name, left, total in thin[:5])
    more = f" and {len(thin) - 5} more" if len(thin) > 5 else ""
    return (
        f"space {space!r}: {len(thin)} layer{'s' if len(thin) > 1 else ''} would keep less than 5 % of "
        f"{'their' if len(thin) > 1 else 'its'} {kind}: {some}{more}. One ranking over all layers says little about "
        f"untrained weights. Train first, set layer_floor=..., or choose another metric=."
    )


def told_alike(space: str, mean: float, deviation: float) -> str:
    """How little the scales differ, why, and what to do."""
    return (
        f"space {space!r}: its BatchNorm scales hardly differ (mean {mean:.3g}, standard deviation {deviation:.2g}), "
        f"so ranking by them says little. Weight decay moves them apart slowly: it shrinks those that the loss does "
        f"not need to exp(-S), where S is the sum of lr x decay / (1 - momentum) over all steps, and should be above "
        f"2. Train longer first, or choose another metric=, such as keepk.metrics.taylor or product."
    )


def told_tied(space: str, kind: str, tied: int, total: int) -> str:
    """The message about scores that are equal where the ranking is cut."""
    return (
        f"space {space!r}: {tied:,} of its {total:,} {kind} are tied where the ranking is cut, so that their order in "
        f"the model decides which of them stay, not their scores. BatchNorm scales, for example, are all equal before "
        f"training. Train first, or choose another metric=."
    )
