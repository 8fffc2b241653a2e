"""Metrics: what makes a weight worth keeping.

A metric is a pure function of one parameter's tensor to a tensor of scores of the same shape; the highest scores
stay. It is called without autograd, on a detached tensor whose ``.grad`` is the parameter's, so a Taylor metric is

>>> def taylor(weight):
...     return (weight * weight.grad).abs()

A metric that must tell parameters apart takes a second argument called ``name``.
"""

from collections.abc import Callable
from inspect import signature
from zlib import crc32

import torch
from torch import Tensor

from keepk.errors import RankError
from keepk.plan.names import shown
from keepk.rank.asking import called, failure_told
from keepk.rank.layers import Layer


def magnitude(weight: Tensor) -> Tensor:
    """R(w) = |w|, the paper's metric for weights.

    >>> magnitude(torch.tensor([-2.0, 1.0]))
    tensor([2., 1.])
    """
    return weight.abs()


def random(seed: int) -> Callable[..., Tensor]:
    """Scores of weights or channels drawn at random, the same at every event: the baseline for other metrics.

    >>> score = random(seed=0)
    >>> torch.equal(score(torch.zeros(5), name="a"), score(torch.ones(5), name="a"))
    True
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise RankError(f"random(seed={shown(seed)}): got {type(seed).__name__}. Give an int.")

    def score(weight: Tensor | Layer, name: str = "") -> Tensor:
        if isinstance(weight, Layer):
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.rand(int(weight.units.max()) + 1, generator=generator, dtype=torch.float64)
            return drawn[torch.from_numpy(weight.units)]
        own_seed = crc32(f"{seed}/{name}".encode())
        generator = torch.Generator(device=weight.device).manual_seed(own_seed)
        return torch.rand(weight.shape, generator=generator, device=weight.device)

    return score


def score(metric: Callable[..., object], weight: Tensor, name: str) -> Tensor:
    """The checked scores of one parameter: floats of its shape, and the parameter untouched."""
    view = weight.detach()
    view.grad = weight.grad
    versions = weight._version, None if weight.grad is None else weight.grad._version
    with failure_told(metric, f"parameter {name!r}", [name] if weight.grad is None else []):
        scores = metric(view, name=name) if _wants_name(metric) else metric(view)
    if (weight._version, None if weight.grad is None else weight.grad._version) != versions:
        raise RankError(f"metric {called(metric)}: changed parameter {name!r} in place. Return scores, change nothing.")
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.shape != weight.shape:
        raise RankError(
            f"metric {called(metric)}: gave {_described(scores)} for parameter {name!r} of shape "
            f"{tuple(weight.shape)}. Return a float tensor of the same shape."
        )
    return scores


def _wants_name(metric: Callable[..., object]) -> bool:
    try:
        return "name" in signature(metric).parameters
    except ValueError:  # torch.abs and its like have no signature
        return False


def _described(scores: object) -> str:
    if isinstance(scores, Tensor):
        return f"{scores.dtype} of shape {tuple(scores.shape)}"
    return type(scores).__name__
