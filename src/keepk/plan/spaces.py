"""Spaces: named, disjoint sets of units, each with its own K."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keepk.errors import SpaceError
from keepk.plan.names import as_globs
from keepk.plan.numbers import count, exact_share, keep_count
from keepk.plan.schedules import AnySchedule, OneShot


@dataclass(frozen=True)
class WeightSpace:
    """A space of single weights; `weights` makes it."""

    select: tuple[str, ...]
    exclude: tuple[str, ...]
    keep: int | None
    prune: float | None
    name: str
    metric: Callable[..., Any] | None
    schedule: AnySchedule
    layer_floor: int

    def count_kept(self, total: int) -> int:
        """K, for a space of `total` weights."""
        if self.prune is not None:
            keep = keep_count(total, exact_share(self.prune, f"space {self.name!r}: prune", SpaceError))
            if keep < 1:
                raise SpaceError(
                    f"space {self.name!r}: prune={self.prune} of {total} weights keeps none. Prune less, or give keep=."
                )
            return keep
        assert self.keep is not None  # `weights` takes exactly one of the two
        if self.keep > total:
            raise SpaceError(
                f"space {self.name!r}: keep={self.keep}, but {list(self.select)} matches only {total} weights. "
                f"Choose keep <= {total} or widen the pattern."
            )
        return self.keep


def weights(
    select: str | Sequence[str],
    *,
    keep: int | None = None,
    prune: float | None = None,
    exclude: str | Sequence[str] = (),
    name: str | None = None,
    metric: Callable[..., Any] | None = None,
    schedule: AnySchedule = OneShot(),  # noqa: B008 - a frozen value
    layer_floor: int = 0,
) -> WeightSpace:
    """A space of single weights, found by name (DSC-1).

    Args:
        select: A glob, or several, over ``model.named_parameters()``: ``"*"``, ``"fc*.weight"``.
        keep: K, how many weights are left at the end. Met exactly.
        prune: The share that goes instead; K = floor(M (1 - prune)), exact in the decimals written.
        exclude: Globs of names that stay out of the space.
        name: What the space is called in plans, reports and phases; by default the globs.
        metric: Ranks the weights, see `keepk.metrics`. None means magnitude.
        schedule: How many are left after each epoch: a schedule, a callable or a list of ints.
        layer_floor: At least so many weights stay in each tensor of two or more dims. K is still met.

    >>> weights("fc*", prune=0.98).name
    'fc*'
    >>> weights("fc*", keep=100, prune=0.98)
    Traceback (most recent call last):
        ...
    keepk.errors.SpaceError: space 'fc*': got both keep=100 and prune=0.98. Give exactly one of them.

    """
    globs, excluded = as_globs(select), as_globs(exclude)
    if not globs or excluded is None:
        raise SpaceError(
            f"weights(select={select!r}, exclude={exclude!r}): not globs. "
            f"Give a string or a list of strings, such as 'fc*'."
        )
    called = _called(name, globs)
    if (keep is None) == (prune is None):
        got = "neither keep= nor prune=" if keep is None else f"both keep={keep} and prune={prune}"
        raise SpaceError(f"space {called!r}: got {got}. Give exactly one of them.")
    if keep is not None:
        keep = count(keep, f"space {called!r}: keep", SpaceError, least=1)
    if prune is not None:
        exact_share(prune, f"space {called!r}: prune", SpaceError)
    if metric is not None and not callable(metric):
        raise SpaceError(f"space {called!r}: metric={metric!r} is not callable. Give a function, see keepk.metrics.")
    layer_floor = count(layer_floor, f"space {called!r}: layer_floor", SpaceError, least=0)
    frozen = schedule if callable(schedule) or not isinstance(schedule, list) else tuple(schedule)
    return WeightSpace(globs, excluded, keep, prune, called, metric, frozen, layer_floor)


def _called(name: object, globs: tuple[str, ...]) -> str:
    if name is None:
        return "+".join(globs)
    if not isinstance(name, str) or not name:
        raise SpaceError(f"weights(name={name!r}): not a name. Give a string.")
    return name
