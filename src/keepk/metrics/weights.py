"""Metrics for weights.

A metric is a pure function from one parameter's tensor to a tensor of scores of the same shape; the weights with the
highest scores are kept. It is called without autograd, on a detached tensor whose ``.grad`` is the parameter's. For
example, a Taylor metric is

>>> def taylor(weight):
...     return (weight * weight.grad).abs()

A metric that needs to distinguish parameters takes a second argument called ``name``.

A metric may have attributes that say how it can be used; see `Traits`. Nothing else distinguishes a metric of keepk
from one of yours, so yours may carry them too:

>>> traits_of(magnitude)
Traits(ranks=('weights',), needs=('weights',), over=None)
>>> traits_of(taylor)  # without attributes nothing is assumed
Traits(ranks=('weights', 'channels'), needs=None, over=None)
>>> traits_of(describes(ranks=("weights",), needs=("weights", "gradients"))(taylor))
Traits(ranks=('weights',), needs=('weights', 'gradients'), over=None)
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, Literal, TypeVar, get_args
from zlib import crc32

import torch
from torch import Tensor

from keepk.errors import RankError, SpaceError
from keepk.metrics.layers import Layer, metric_name, naming_failures
from keepk.plan.names import shown

Ranks = Literal["weights", "channels"]
Needs = Literal["weights", "gradients"]
Over = Literal["space", "layer"]
Metric = TypeVar("Metric", bound=Callable[..., Any])
ALLOWED = {"ranks": get_args(Ranks), "needs": get_args(Needs), "over": get_args(Over)}


@dataclass(frozen=True)
class Traits:
    """How a metric can be used, read from its attributes of the same names.

    Attributes:
        ranks: The kinds of units that it can score. A metric for channels only is refused for a weight space, and vice
            versa, before training.
        needs: The inputs that it reads. A channel metric that needs only weights is tried before training, so that a
            layer it cannot rank is refused early; infinite scores are refused. None if unknown: the metric is then not
            called before the first event, and may return an infinite score to protect a unit.
        over: The set of units that a score is relative to: the whole "space", or each "layer". A channel metric with
            this attribute has a method ``scores(layers)``. None if the score of a unit does not depend on other units.
    """

    ranks: tuple[Ranks, ...] = ("weights", "channels")
    needs: tuple[Needs, ...] | None = None
    over: Over | None = None


def traits_of(metric: Callable[..., Any]) -> Traits:
    """The traits of a metric; a missing attribute gets a default that assumes nothing."""
    found: dict[str, Any] = {name: getattr(metric, name, None) for name in ALLOWED}
    # A user's class may have an attribute `over` or `needs` that has nothing to do with this. It is ignored.
    return Traits(**{name: value for name, value in found.items() if _is_allowed(name, value)})


def describes(
    *, ranks: tuple[Ranks, ...], needs: tuple[Needs, ...] | None = None, over: Over | None = None
) -> Callable[[Metric], Metric]:
    """A decorator that sets the attributes of a metric; see `Traits`.

    Raises:
        RankError: If an attribute has an unknown value.
    """
    given = {name: value for name, value in (("ranks", ranks), ("needs", needs), ("over", over)) if value is not None}
    for name, value in given.items():
        if not _is_allowed(name, value):
            words = ", ".join(map(repr, ALLOWED[name]))
            kind = "one of" if name == "over" else "a tuple of"
            raise RankError(f"describes({name}={shown(value)}): unknown. Pass {kind} {words}.")

    def attach(metric: Metric) -> Metric:
        vars(metric).update(given)  # mypy has no attributes on functions, so they are set through their dict
        return metric

    return attach


def _is_allowed(name: str, value: object) -> bool:
    if name == "over":
        return value in ALLOWED[name]
    return isinstance(value, tuple) and all(it in ALLOWED[name] for it in value) and (name != "ranks" or bool(value))


def makes_metrics(example: str) -> Callable[[Metric], Metric]:
    """A decorator for functions that return metrics: passing one uncalled raises an error that shows this example."""

    def attach(factory: Metric) -> Metric:
        vars(factory).update(example_call=example)
        return factory

    return attach


def refuse_uncalled(metric: Callable[..., Any] | None, space: str) -> None:
    """Refuse a function or class that returns metrics instead of being one, even as a term of a blend.

    Raises:
        SpaceError: The message shows the missing call.
    """
    for _, term in getattr(metric, "terms", ()):
        refuse_uncalled(term, space)
    call = getattr(metric, "example_call", None)
    # A class is callable too, and calling it on a tensor would construct it instead of ranking.
    if call is not None or isinstance(metric, type):
        name = getattr(metric, "__name__", None) or shown(metric)
        raise SpaceError(
            f"space {space!r}: metric={name} is a factory, not a metric: a metric returns a tensor with one score for "
            f"each unit. Call it: {call or f'{name}(...)'}."
        )


@describes(ranks=("weights",), needs=("weights",))
def magnitude(weight: Tensor) -> Tensor:
    """R(w) = |w|, the paper's metric for weights.

    Args:
        weight: A parameter, of any shape.

    Returns:
        The scores, of the same shape.

    >>> magnitude(torch.tensor([-2.0, 1.0]))
    tensor([2., 1.])
    """
    return weight.abs()


@dataclass(frozen=True)
class Random:
    """Random scores of weights or channels; see `random`."""

    seed: int

    kind: ClassVar[str] = "random"  # its name in errors
    ranks: ClassVar[tuple[Ranks, ...]] = ("weights", "channels")
    needs: ClassVar[tuple[Needs, ...]] = ()
    over: ClassVar[None] = None

    def __call__(self, weight: Tensor | Layer, name: str = "") -> Tensor:
        """One number for each weight or channel, the same at every call."""
        if isinstance(weight, Layer):
            # Index by the unit's number and not by its position in the layer: positions change as channels are removed,
            # and each remaining channel must keep its score.
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.rand(int(weight.units.max()) + 1, generator=generator, dtype=torch.float64)
            return drawn[torch.from_numpy(weight.units)]
        # crc32 and not hash(), which differs from process to process: a resumed run must draw the same numbers.
        generator = torch.Generator(device=weight.device).manual_seed(crc32(f"{self.seed}/{name}".encode()))
        return torch.rand(weight.shape, generator=generator, device=weight.device)


@makes_metrics("keepk.metrics.random(seed=0)")
def random(seed: int) -> Random:
    """Random scores of weights or channels, the same at every event: a baseline for other metrics.

    Args:
        seed: Determines the scores, together with the parameter's name or the channel's number.

    Returns:
        A metric for spaces of weights or of channels.

    Raises:
        RankError: If the seed is not an int.

    >>> score = random(seed=0)
    >>> torch.equal(score(torch.zeros(5), name="a"), score(torch.ones(5), name="a"))
    True
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise RankError(f"random(seed={shown(seed)}): got {type(seed).__name__}. Pass an int.")
    return Random(seed)


def score(metric: Callable[..., object], weight: Tensor, name: str) -> Tensor:
    """The checked scores of one parameter.

    Args:
        metric: The metric.
        weight: The parameter.
        name: Its name.

    Returns:
        A float tensor of the parameter's shape.

    Raises:
        RankError: If the metric raises, changes the parameter or its gradient, or returns anything else.
    """
    view = weight.detach()
    view.grad = weight.grad
    # torch counts writes to a tensor. Comparing the counters costs nothing, and catches a metric that would otherwise
    # change the weights while it ranks them.
    versions = weight._version, None if weight.grad is None else weight.grad._version
    with naming_failures(metric, f"parameter {name!r}", [name] if weight.grad is None else []):
        scores = metric(view, name=name) if _wants_name(metric) else metric(view)
    if (weight._version, None if weight.grad is None else weight.grad._version) != versions:
        raise RankError(
            f"metric {metric_name(metric)}: changed parameter {name!r} in place. A metric must only return scores."
        )
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.shape != weight.shape:
        raise RankError(
            f"metric {metric_name(metric)}: returned {_described(scores)} for parameter {name!r} of shape "
            f"{tuple(weight.shape)}. Return a float tensor of the same shape."
        )
    return scores


def _wants_name(metric: Callable[..., object]) -> bool:
    try:
        return "name" in signature(metric).parameters
    except ValueError:  # torch.abs and other builtins have no signature
        return False


def _described(scores: object) -> str:
    if isinstance(scores, Tensor):
        return f"{scores.dtype} of shape {tuple(scores.shape)}"
    return type(scores).__name__
