"""Functions that return metrics: passing one without calling it is refused before the run."""

from collections.abc import Callable
from typing import Any

from keepk.errors import SpaceError
from keepk.metrics.channels import Blend, blend, norm
from keepk.metrics.statistics import taylor
from keepk.metrics.weights import makes_metrics
from keepk.plan.names import shown

# The mark belongs on their definitions, like that of `random`.
makes_metrics('keepk.metrics.norm("l2")')(norm)
makes_metrics("keepk.metrics.blend(alpha=0.5)")(blend)
makes_metrics("keepk.metrics.taylor(statistics)")(taylor)


def refuse_uncalled(metric: Callable[..., Any] | None, space: str) -> None:
    """Refuse a function or class that returns metrics instead of being one, also among the terms of a blend.

    Raises:
        SpaceError: With the call that is missing.
    """
    for _, term in metric.terms if isinstance(metric, Blend) else ():
        refuse_uncalled(term, space)
    call = getattr(metric, "example_call", None)
    # A class is callable too, and calling it on a tensor would construct it instead of ranking.
    if call is not None or isinstance(metric, type):
        name = getattr(metric, "__name__", None) or shown(metric)
        raise SpaceError(
            f"space {space!r}: metric={name} is a factory, not a metric: a metric returns a tensor with one score for "
            f"each unit. Call it: {call or f'{name}(...)'}."
        )
