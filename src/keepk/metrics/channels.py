"""Metrics for channels.

A metric takes a `Layer` and returns one score per channel; the channels with the highest scores are kept. It is a pure
function. The layer's parameters are grouped by role, with channels as the first dim, and have gradients if there are
any:

>>> def taylor(layer):
...     return sum((s.tensor * s.grad).flatten(1).sum(1) for s in layer.producer).abs()
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepk.errors import RankError
from keepk.metrics.layers import (
    Layer,
    Needs,
    Ranks,
    Slices,
    describes,
    makes_metrics,
    metric_name,
    naming_failures,
    traits_of,
)
from keepk.metrics.statistics import Statistics
from keepk.model.torch_internals import BatchNormBase
from keepk.plan.names import shown
from keepk.plan.numbers import exact_share

ChannelMetric = Callable[[Layer], Tensor]


@dataclass(frozen=True)
class Norm:
    """The norm of a channel's weights, ||C||; `norm` makes it.

    Attributes:
        kind: "l1", "l2", or "l1_l2", their mean, which is the paper's R_L.
        of: "producer", the filter that computes the channel; "reader", the slices that read it; None means the producer
            if channels are counted at the output, and the reader if they are counted at the input.
        per_weight: Whether the norm is a mean over the channel's weights: mean |w| for "l1", the root mean square for
            "l2". A sum grows with the number of weights, so it shrinks when input channels are removed.
    """

    kind: Literal["l1", "l2", "l1_l2"]
    of: Literal["producer", "reader"] | None = None
    per_weight: bool = False
    ranks: ClassVar[tuple[Ranks, ...]] = ("channels",)
    needs: ClassVar[tuple[Needs, ...]] = ("weights",)

    def __repr__(self) -> str:
        """Omits the default of `per_weight`, because recipes identify their checkpoints by this text."""
        return f"Norm(kind={self.kind!r}, of={self.of!r}{', per_weight=True' * self.per_weight})"

    def __post_init__(self) -> None:
        if not isinstance(self.per_weight, bool):
            raise RankError(
                f"norm(per_weight={shown(self.per_weight)}): got {type(self.per_weight).__name__}. Pass True or False."
            )
        if self.kind not in ("l1", "l2", "l1_l2") or self.of not in (None, "producer", "reader"):
            raise RankError(
                f'norm(kind={shown(self.kind)}, of={shown(self.of)}): unknown. Pass "l1", "l2" or "l1_l2", of '
                f'"producer", "reader" or None.'
            )

    def __call__(self, layer: Layer) -> Tensor:
        """The norms of a layer's channels.

        Args:
            layer: The channels of one layer.

        Returns:
            The scores, of shape [channels].

        Raises:
            RankError: The layer has no weights on the side of `of`.
        """
        side = self.of or ("producer" if layer.at == "output" else "reader")
        slices: tuple[Slices, ...] = getattr(layer, side)
        if not slices:
            raise RankError(
                f"metric {self.kind}: layer {layer.name!r} has no weights on the {side} side. "
                f"Choose the other side with metrics.norm({self.kind!r}, of=...), or another metric."
            )
        orders = {"l1": (1,), "l2": (2,), "l1_l2": (1, 2)}[self.kind]
        norms, count = _norms(slices, orders)
        if self.per_weight:  # in float64, so that rounding makes no ties
            norms = [_double(it) / float(count ** (1 / order)) for it, order in zip(norms, orders, strict=True)]
        return norms[0] if len(norms) == 1 else (norms[0] + norms[1]) / 2


@makes_metrics('keepk.metrics.norm("l2")')
def norm(
    kind: Literal["l1", "l2", "l1_l2"], *, of: Literal["producer", "reader"] | None = None, per_weight: bool = False
) -> Norm:
    r"""A metric: the norm of the weights that compute a channel, or of the weights that read it.

    A channel has n weights w at the moment, those of all its producers (or readers) together:

    .. math:: \text{l1\_l2} = \tfrac12 (\sum |w| + \sqrt{\sum w^2}), \qquad
              \text{per weight: } \tfrac12 (\tfrac1n \sum |w| + \sqrt{\tfrac1n \sum w^2})

    Args:
        kind: "l1", "l2", or "l1_l2", the mean of both.
        of: "producer", "reader", or None: the producer for channels counted at the output, else the reader.
        per_weight: Use means over the channel's weights instead of sums. If all layers are ranked together, a sum
            favours layers with many inputs, and falls when input channels are removed; a mean does neither.

    Returns:
        A metric for channels.

    Raises:
        RankError: An argument has the wrong type or value.

    >>> norm("l2", of="reader")
    Norm(kind='l2', of='reader')
    >>> norm("l1_l2", per_weight=True)
    Norm(kind='l1_l2', of=None, per_weight=True)
    """
    return Norm(kind, of, per_weight)


l1 = Norm("l1")
l2 = Norm("l2")
l1_l2 = Norm("l1_l2")
_MEAN = Norm("l1_l2", per_weight=True)
outgoing = Norm("l2", of="reader")  # the weights that read a channel, such as the output weights of a hidden neuron


@describes(ranks=("channels",), needs=("weights",))
def bn_scale(layer: Layer) -> Tensor:
    """R_B(C) = |gamma|, the scale of the channel's BatchNorm, or the mean over several BatchNorms.

    Args:
        layer: The channels of one layer.

    Returns:
        The scores, of shape [channels].

    Raises:
        RankError: The channels do not pass a BatchNorm with a scale.
    """
    scales = scales_of(layer)
    if not scales:
        raise RankError(
            f"metric bn_scale: layer {layer.name!r} has no BatchNorm with a scale. "
            f"Leave the layer out, or rank by product or l2."
        )
    sizes = [_widened(it.tensor).abs() for it in scales]
    return torch.stack(_together([size if size.ndim == 1 else size.flatten(1).mean(1) for size in sizes])).mean(0)


@describes(ranks=("channels",), needs=("weights",))
def product(layer: Layer) -> Tensor:
    """The l2 norm of the weights that compute a channel times that of the weights that read it.

    The default for models without BatchNorm. A side without weights (a channel that only a pooling reads) counts as 1.

    Args:
        layer: The channels of one layer.

    Returns:
        The scores, of shape [channels].

    Raises:
        RankError: The channels have no weights on either side.
    """
    sides = _together([_norms(side, (2,))[0][0] for side in (layer.producer, layer.reader) if side])
    if not sides:
        raise RankError(f"metric product: layer {layer.name!r} has no weights to rank by. Pass another metric.")
    return sides[0] * sides[1] if len(sides) == 2 else sides[0]


@dataclass(frozen=True)
class Blend:
    """A weighted sum of metrics, each divided by its largest value in the space or in the layer; `blend` makes it."""

    terms: tuple[tuple[float, ChannelMetric], ...]
    over: Literal["space", "layer"]
    ranks: ClassVar[tuple[Ranks, ...]] = ("channels",)

    @property
    def needs(self) -> tuple[Needs, ...] | None:
        """The inputs that its terms need; None if they are unknown for one of the terms."""
        found = [traits_of(metric).needs for _, metric in self.terms]
        if any(needs is None for needs in found):
            return None
        return tuple(dict.fromkeys(it for needs in found for it in needs or ()))

    def __repr__(self) -> str:
        """Shows the names of its metrics, because the repr of a function differs from process to process."""
        terms = " + ".join(f"{weight} {getattr(metric, '__name__', repr(metric))}" for weight, metric in self.terms)
        return f"Blend({terms}, over={self.over!r})"

    def __call__(self, layer: Layer) -> Tensor:
        """The scores of one layer, as if it were the whole space."""
        return self.scores([layer])[0]

    def scores(self, layers: Sequence[Layer]) -> list[Tensor]:
        """The scores of all layers of a space, each on the device of its layer."""
        terms = [(weight, self._shares(metric, layers)) for weight, metric in self.terms if weight]
        total, *others = [[weight * it for it in shares] for weight, shares in terms]
        for term in others:
            total = [so_far + it.to(so_far.device) for so_far, it in zip(total, term, strict=True)]
        return total

    def _shares(self, metric: ChannelMetric, layers: Sequence[Layer]) -> list[Tensor]:
        """One metric divided by its largest value, without waiting for a device."""
        # In float64, so that the division does not round two float32 scores to the same number.
        found = [_double(_shaped(metric, _asked(metric, layer), layer)) for layer in layers]
        largest = [it.max() for it in found]
        if self.over == "space":
            largest = [torch.stack(_together(largest)).max()] * len(layers)
        tops = [top.to(it.device) for it, top in zip(found, largest, strict=True)]
        return [it / torch.where(top > 0, top, 1) for it, top in zip(found, tops, strict=True)]


def collected_terms(metric: Callable[..., Any] | None) -> list[Any]:
    """The metrics that read statistics: this one, or terms of a blend; each has the attribute ``statistics``."""
    if isinstance(metric, Blend):
        return [it for weight, term in metric.terms if weight for it in collected_terms(term)]
    return [metric] if isinstance(getattr(metric, "statistics", None), Statistics) else []


@makes_metrics("keepk.metrics.blend(alpha=0.5)")
def blend(
    alpha: float,
    *,
    scale: ChannelMetric = bn_scale,
    weights: ChannelMetric = _MEAN,
    over: Literal["space", "layer"] = "space",
) -> Blend:
    r"""The paper's metric, a mixture of the BatchNorm's scale (alpha = 1) and the norm of the weights (alpha = 0).

    .. math:: R(C) = \alpha R_B(C) / R_B^{max} + (1 - \alpha) R_L(C) / R_L^{max}

    Args:
        alpha: The weight of the scale, between 0 and 1.
        scale: R_B.
        weights: R_L. By default ``norm("l1_l2", per_weight=True)``: (mean |w| + root mean square) / 2 over the weights
            of all producers of a channel. The literal sum is ``norm("l1_l2", per_weight=False)``; with it, a ranking
            over all layers can reduce a layer to almost nothing.
        over: The set over which the maxima are computed: the whole "space", or each "layer".

    Returns:
        A metric for channels.

    Raises:
        RankError: `alpha` is not between 0 and 1, or `over` is unknown.

    >>> blend(alpha=0.5)
    Blend(0.5 bn_scale + 0.5 Norm(kind='l1_l2', of=None, per_weight=True), over='space')
    """
    share = float(exact_share(alpha, "blend: alpha", RankError))
    if over not in ("space", "layer"):
        raise RankError(f'blend(over={shown(over)}): unknown. Pass "space" or "layer".')
    return Blend(((share, scale), (1 - share, weights)), over)


_SCALE_ALONE = blend(1.0)


def default_metric(layers: Sequence[Layer]) -> ChannelMetric:
    """The metric of a space without one: the BatchNorm scale if every layer has a BatchNorm, otherwise `product`.

    The scale is the paper's blend at alpha = 1, which it found best. Plain norms are not a default: they shrink when
    input channels are removed, so a ranking over all layers can remove nearly all of one layer.
    """
    return _SCALE_ALONE if all(scales_of(layer) for layer in layers) else product


def reads_scales(metric: Callable[..., Any]) -> bool:
    """Whether a built-in metric uses the BatchNorm's scale."""
    if isinstance(metric, Blend):
        return any(weight and reads_scales(term) for weight, term in metric.terms)
    return metric is bn_scale


def channel_scores(metric: Callable[..., Any], layers: Sequence[Layer]) -> NDArray[np.float64]:
    """The checked scores of the channels of all layers, concatenated.

    A metric whose scores are relative to its space or layer (`Traits.over`) has a method ``scores(layers)``, which
    takes all layers together and returns one tensor for each.
    """
    slices = [it for layer in layers for it in layer.slices]
    versions = [it.versions for it in slices]
    at_once = getattr(metric, "scores", None) if traits_of(metric).over is not None else None
    found = [_asked(metric, layer) for layer in layers] if at_once is None else _asked_at_once(metric, layers)
    for it, before in zip(slices, versions, strict=True):
        if it.versions != before:
            raise RankError(
                f"metric {metric_name(metric)}: changed parameter {it.name!r} or its gradient in place. "
                f"A metric must only return scores."
            )
    shaped = [_double(_shaped(metric, scores, layer)) for scores, layer in zip(found, layers, strict=True)]
    plain: NDArray[np.float64] = torch.cat(_together(shaped)).cpu().numpy()  # the only place that waits for a device
    if not np.isfinite(plain).all():
        _refuse_not_finite(metric, layers, np.split(plain, np.cumsum([len(layer) for layer in layers])[:-1]))
    return plain


def scales_of(layer: Layer) -> list[Slices]:
    """The scales of the BatchNorms that a layer's channels pass through."""
    return [it for it in layer.carrier if issubclass(it.module, BatchNormBase) and it.name.endswith("weight")]


def _asked(metric: Callable[..., Any], layer: Layer) -> Any:
    with naming_failures(metric, f"layer {layer.name!r}", (it.name for it in layer.slices if it.grad is None)):
        return metric(layer)


def _asked_at_once(metric: Any, layers: Sequence[Layer]) -> list[Any]:
    with naming_failures(metric, f"{len(layers)} layers", ()):
        found = list(metric.scores(layers))
    if len(found) != len(layers):
        raise RankError(
            f"metric {metric_name(metric)}: scores(layers) returned {len(found)} tensors for {len(layers)} layers. "
            f"Return one for each."
        )
    return found


def _widened(weights: Tensor) -> Tensor:
    """The weights in a dtype in which sums of squares neither overflow nor lose precision."""
    return weights if weights.dtype == torch.float64 else weights.float()


def _norms(slices: Sequence[Slices], orders: Sequence[int]) -> tuple[list[Tensor], int]:
    """For each order, the norm of all of a channel's entries in these slices; and the number of these entries.

    The tensors are taken one at a time, because those of a `keepk.model.values` model are read from a file.
    """
    parts, count = [list[Tensor]() for _ in orders], 0
    for it in slices:
        weights = _widened(it.tensor)
        others = tuple(range(1, weights.ndim))
        count += weights[0].numel()  # the same number for all channels of a layer
        for order, found in zip(orders, parts, strict=True):
            found.append(torch.linalg.vector_norm(weights, order, dim=others) if others else weights.abs())
    norms = [
        found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(_together(found)), order, dim=0)
        for order, found in zip(orders, parts, strict=True)
    ]
    return norms, count


def _together(parts: Sequence[Tensor]) -> list[Tensor]:
    """The parts on the device of the first one: producers and readers of a channel may be on different devices."""
    return [part.to(parts[0].device) for part in parts]


def _double(scores: Tensor) -> Tensor:
    scores = scores.detach()
    return (scores.cpu() if scores.device.type == "mps" else scores).double()  # MPS has no float64


def _shaped(metric: Callable[..., Any], scores: Any, layer: Layer) -> Tensor:
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.shape != (len(layer),):
        got = f"{scores.dtype} of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise RankError(
            f"metric {metric_name(metric)}: returned {got} for the {len(layer)} channels of {layer.name!r}. "
            f"Return a float tensor with one score for each channel."
        )
    return scores


def _refuse_not_finite(
    metric: Callable[..., Any], layers: Sequence[Layer], scores: Sequence[NDArray[np.float64]]
) -> None:
    for weight, term in metric.terms if isinstance(metric, Blend) else ():
        if weight:
            channel_scores(term, layers)  # raises an error that names the term, if the term alone is not finite
    for layer, plain in zip(layers, scores, strict=True):
        if np.isnan(plain).any():
            raise RankError(
                f"metric {metric_name(metric)}: {int(np.isnan(plain).sum())} of the {len(layer)} channels of "
                f"{layer.name!r} have NaN as their score. Find out where training diverged; nothing was pruned."
            )
        # Other metrics may return infinite scores to protect channels.
        if traits_of(metric).needs == ("weights",) and np.isinf(plain).any():
            raise RankError(
                f"layer {layer.name!r}: the weights of {int(np.isinf(plain).sum())} of its {len(layer)} channels are "
                f"infinite, so they cannot be ranked. Find out where training diverged; nothing was pruned."
            )
