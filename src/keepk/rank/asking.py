"""Asking a metric that somebody else wrote: its name, and whatever it raises told with the place and the remedy."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from keepk.errors import KeepkError, RankError
from keepk.plan.names import shortened


def called(metric: Callable[..., Any]) -> str:
    """The name of a metric in an error.

    >>> called(abs)
    'abs'
    """
    return getattr(metric, "__name__", None) or getattr(metric, "kind", None) or type(metric).__name__


@contextmanager
def failure_told(metric: Callable[..., Any], where: str, without_gradient: Iterable[str]) -> Iterator[None]:
    """Whatever a metric raises becomes a `RankError`, with the first one as its cause.

    Args:
        metric: The metric that is asked.
        where: The layer or the parameter that it is asked about.
        without_gradient: The parameters there that have no gradient; looked at only after a failure.
    """
    try:
        yield
    except KeepkError:
        raise
    except Exception as error:
        remedy = "Correct the metric; nothing was pruned."
        missing = next(iter(without_gradient), None)
        # Without gradients a metric that needs none fails for a reason of its own.
        if missing is not None and "NoneType" in str(error):
            remedy = f"Parameter {missing!r} has no gradient. Call step() after backward() and before zero_grad()."
        raise RankError(
            f"metric {called(metric)}: failed on {where} ({type(error).__name__}: {shortened(str(error))}). {remedy}"
        ) from error
