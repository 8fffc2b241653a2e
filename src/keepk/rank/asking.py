"""Calling metrics that users wrote: their names in errors, and errors that say where they failed and what to do."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from keepk.errors import KeepkError, RankError
from keepk.plan.names import shortened


def metric_name(metric: Callable[..., Any]) -> str:
    """The name of a metric in an error: of a function, of a metric with a `kind`, or of its class.

    >>> metric_name(abs)
    'abs'
    """
    return getattr(metric, "__name__", None) or getattr(metric, "kind", None) or type(metric).__name__


@contextmanager
def naming_failures(metric: Callable[..., Any], where: str, without_gradient: Iterable[str]) -> Iterator[None]:
    """Turn any exception that a metric raises into a `RankError` that names the metric and the place.

    Args:
        metric: The metric that is called.
        where: The layer or parameter that it is called on.
        without_gradient: The parameters there that have no gradient; iterated over only after a failure.
    """
    try:
        yield
    except KeepkError:
        raise
    except Exception as error:
        remedy = "Correct the metric; nothing was pruned."
        missing = next(iter(without_gradient), None)
        # Weights may have no gradients and the metric may still fail for another reason. Only an error about None
        # suggests that it wanted one.
        if missing is not None and "NoneType" in str(error):
            remedy = f"Parameter {missing!r} has no gradient. Call step() after backward() and before zero_grad()."
        detail = f"{type(error).__name__}: {shortened(str(error))}"
        raise RankError(f"metric {metric_name(metric)}: failed on {where} ({detail}). {remedy}") from error


# The names under which channel metrics and the run import these.
called = metric_name
failure_told = naming_failures
