"""Metrics for weights.

A metric is a pure function from one parameter's tensor to a tensor of scores of the same shape; the weights with the
highest scores are kept. It is called without autograd, on a detached tensor whose ``.grad`` is the parameter's. For
example, a Taylor metric is

>>> def taylor(weight):
...     return (weight * weight.grad).abs()

A metric that needs to distinguish parameters takes a second argument called ``name``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import ClassVar
from zlib import crc32

import torch
from torch import Tensor

from keepk.errors import RankError
from keepk.metrics.layers import Layer, Needs, Ranks, describes, makes_metrics, metric_name, naming_failures
from keepk.plan.names import shown


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
