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


@describes(ranks=("weights",), needs=("weights",), over="layer")
def lamp(weight: Tensor) -> Tensor:
    r"""LAMP, the layer-adaptive magnitude (Lee et al. 2021): a weight's share of the weights at least as large.

    .. math:: R(w_u) = w_u^2 \Big/ \sum_{v:\, |w_v| \ge |w_u|} w_v^2

    The sum is over the same tensor, so the order within a tensor is that of the magnitudes, and scores of different
    tensors are comparable: one ranking over all layers finds a suitable share for each. Equal magnitudes have equal
    scores. Pruned weights are 0.0, so they add nothing to a sum and score 0.

    The largest weight of a tensor scores 1 (or 1/n, if n weights are tied). A short bias therefore ranks above most
    weights; leave biases out of the space, as the authors do.

    Args:
        weight: A parameter, of any shape.

    Returns:
        The scores, of the same shape, in float64 (float32 on MPS).

    >>> lamp(torch.tensor([[0.0, -2.0], [1.0, 2.0]]))
    tensor([[0.0000, 0.5000],
            [0.1111, 0.5000]], dtype=torch.float64)
    """
    # MPS has no float64.
    sizes = weight.abs().to(torch.float32 if weight.device.type == "mps" else torch.float64).flatten()
    if not len(sizes):
        return sizes.reshape(weight.shape)
    largest = sizes.max()
    # Scores do not depend on the scale. Relative to the largest weight, squares neither overflow nor vanish.
    ascending, order = (sizes / torch.where(largest > 0, largest, 1)).square().sort(stable=True)
    at_least = ascending.flip(0).cumsum(0).flip(0)
    # Tied weights share the sum that begins with the first of them, so that their scores are exactly equal.
    at_least = at_least[torch.searchsorted(ascending, ascending)]
    scores = torch.empty_like(ascending)
    scores[order] = ascending / torch.where(at_least > 0, at_least, 1)
    return scores.reshape(weight.shape)


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
