"""Functions that make metrics and are none themselves: given without being called, they are refused before a run."""

from collections.abc import Callable
from typing import Any

from keepk.errors import SpaceError
from keepk.plan.names import shown
from keepk.rank.channel_metrics import Blend, blend, norm
from keepk.rank.metrics import random
from keepk.rank.taylor import taylor

CALLS: list[tuple[Callable[..., Any], str]] = [
    (random, "keepk.metrics.random(seed=0)"),
    (norm, 'keepk.metrics.norm("l2")'),
    (blend, "keepk.metrics.blend(alpha=0.5)"),
    (taylor, "keepk.metrics.taylor(statistics)"),
]


def refuse_uncalled(metric: Callable[..., Any] | None, space: str) -> None:
    """Refuse a function or a class that makes metrics; the terms of a blend are looked at, too."""
    for term in (it for _, it in metric.terms) if isinstance(metric, Blend) else ():
        refuse_uncalled(term, space)
    made = next((call for factory, call in CALLS if factory is metric), None)
    if made is not None or isinstance(metric, type):
        name = getattr(metric, "__name__", None) or shown(metric)
        raise SpaceError(
            f"space {space!r}: metric={name} makes metrics, and is none: a metric gives a tensor with one score for "
            f"each unit. Call it: {made or f'{name}(...)'}."
        )
