"""Metrics that are computed from `keepk.Statistics`: of gradients (`taylor`, `fisher`) and of activations."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from keepk.errors import RankError
from keepk.metrics.gradients import gates_of
from keepk.metrics.inputs import Order
from keepk.metrics.layers import Layer, Needs, Ranks, makes_metrics
from keepk.metrics.statistics import Kind, Statistics
from keepk.plan.names import shown

ActivationKind = Literal["mean", "l2", "apoz"]
ORDERS: dict[ActivationKind, Order] = {"mean": 1, "l2": 2, "apoz": 0}


@dataclass(frozen=True, eq=False)
class Taylor:
    """The metric that `taylor` makes."""

    statistics: Statistics
    reads: ClassVar[str] = "products"
    ranks: ClassVar[tuple[Ranks, ...]] = ("channels",)
    needs: ClassVar[tuple[Needs, ...]] = ("weights", "gradients")

    def __repr__(self) -> str:
        return "Taylor()"

    def __call__(self, layer: Layer) -> Tensor:
        """One score for each channel of a layer."""
        return self.statistics.mean_squares(layer)


@makes_metrics("keepk.metrics.taylor(statistics)")
def taylor(statistics: Statistics) -> Taylor:
    r"""The Taylor importance of a channel's gate, from the gradients of the batches since the last event.

    .. math:: R(C) = E\big[(\gamma g_\gamma + \beta g_\beta)^2\big]

    The expectation is over batches, and g are the gradients of the scale and the shift of the channel's BatchNorm.
    Without a BatchNorm, the sum is over all weights and biases that compute the channel. To first order, this is the
    squared change of a batch's loss if the channel is removed (Molchanov et al. 2019). Scores of different layers are
    comparable, so one ranking over all layers works without a floor.

    Args:
        statistics: The statistics that the training loop updates; see `keepk.Statistics`.

    Returns:
        A metric for channels.

    Raises:
        RankError: `statistics` is not a `keepk.Statistics` of gradients.

    >>> from torch import nn
    >>> taylor(Statistics(nn.Linear(2, 2)))
    Taylor()
    """
    return Taylor(_checked(statistics, "taylor", "gradients"))


@dataclass(frozen=True, eq=False)
class Fisher:
    """The metric that `fisher` makes."""

    statistics: Statistics
    reads: ClassVar[str] = "squares"
    ranks: ClassVar[tuple[Ranks, ...]] = ("weights", "channels")
    needs: ClassVar[tuple[Needs, ...]] = ("weights", "gradients")

    def __repr__(self) -> str:
        return "Fisher()"

    def __call__(self, weight: Tensor | Layer, name: str = "") -> Tensor:
        """One score for each weight of a parameter, or for each channel of a layer."""
        if not isinstance(weight, Layer):
            means = self.statistics.squared_gradients(name)
            return means * weight.to(means).square()
        parts = list[Tensor]()
        for it in gates_of(weight):
            means = self.statistics.squared_gradients(it)
            product = means * it.tensor.to(means).square()
            parts.append(product.flatten(1).sum(1) if product.ndim > 1 else product)
        return torch.stack([part.to(parts[0]) for part in parts]).sum(0)


@makes_metrics("keepk.metrics.fisher(statistics)")
def fisher(statistics: Statistics) -> Fisher:
    r"""The diagonal of the empirical Fisher information, from the gradients of the batches since the last event.

    .. math:: R(w) = E[g^2]\, w^2, \qquad R(C) = \sum_{w \in C} E[g_w^2]\, w^2

    The expectation is over batches, as the training loop makes them: g is the gradient of a batch's mean loss. The
    weights w are those at the event. To second order, R is twice the loss that removing the weight costs, if the
    Fisher information approximates the Hessian (LeCun et al. 1990; Theis et al. 2018). The weights of a channel are
    those that `taylor` uses: the scale and the shift of its BatchNorm, or, without a BatchNorm, all weights and biases
    that compute it (with ``at="input"``, that read it). Unlike there, they cannot cancel each other.

    It keeps one more number for each of these weights.

    Args:
        statistics: The statistics that the training loop updates; see `keepk.Statistics`.

    Returns:
        A metric for spaces of weights or of channels.

    Raises:
        RankError: `statistics` is not a `keepk.Statistics` of gradients.

    >>> import keepk
    >>> from torch import nn
    >>> model = nn.Linear(2, 1, bias=False)
    >>> seen = Statistics(model)
    >>> pruner = keepk.Pruner(model, keepk.weights("weight", keep=1, metric=fisher(seen)))
    >>> model(torch.tensor([[5.0, 0.1]])).sum().backward()
    >>> seen.update()
    >>> pruner.step()
    >>> pruner.masks["weight"]
    tensor([[ True, False]])
    """
    return Fisher(_checked(statistics, "fisher", "gradients"))


@dataclass(frozen=True, eq=False)
class Activation:
    """The metric that `activation` makes."""

    statistics: Statistics
    kind: ActivationKind
    reads: ClassVar[str] = "inputs"
    ranks: ClassVar[tuple[Ranks, ...]] = ("channels",)
    needs: ClassVar[tuple[Needs, ...]] = ("activations",)
    __name__: ClassVar[str] = "activation"  # in errors, where `kind` would take its place

    @property
    def order(self) -> Order:
        """The order of the sums that it reads."""
        return ORDERS[self.kind]

    def __repr__(self) -> str:
        return f"Activation(kind={self.kind!r})"

    def __call__(self, layer: Layer) -> Tensor:
        """One score for each channel of a layer."""
        means = self.statistics.mean_inputs(layer, self.order)
        return means.sqrt() if self.kind == "l2" else means


@makes_metrics('keepk.metrics.activation(statistics, kind="mean")')
def activation(statistics: Statistics, kind: ActivationKind = "mean") -> Activation:
    r"""How active a channel is, from the forward passes since the last event.

    .. math:: R(C) = \tfrac1n \sum |x|, \qquad \sqrt{\tfrac1n \sum x^2}, \qquad 1 - \mathrm{APoZ} =
              \tfrac1n\, \#\{x \ne 0\}

    The sums are over all n values x of the channel: all samples, positions and tokens of all forward passes. They are
    read at the input of the linear and convolutional layers that read the channel, so after the BatchNorm, the
    activation function and the pooling in between; APoZ, the average percentage of zeros, is meant after the ReLU (Hu
    et al. 2016). A linear layer behind a flatten reads a channel as several features, all of which count. A channel
    with several readers has the average over them; with ``at="input"``, too. An attention head is all features of the
    output projection that belong to it; it can be ranked where the projection is called as a module, so not in
    `nn.MultiheadAttention`.

    Scores of different layers are comparable only as far as their activations are. For a ranking over all layers use
    "apoz", or `keepk.metrics.blend` with ``over="layer"``.

    Args:
        statistics: The statistics of the model; see `keepk.Statistics`. `update` is not needed.
        kind: "mean", the mean magnitude; "l2", the root mean square; "apoz", the share of values that are not zero,
            which tells channels apart only behind a ReLU.

    Returns:
        A metric for channels.

    Raises:
        RankError: `statistics` is not a `keepk.Statistics` of activations, or `kind` is unknown.

    >>> from torch import nn
    >>> activation(Statistics(nn.Linear(2, 2)), kind="apoz")
    Activation(kind='apoz')
    """
    if not isinstance(kind, str) or kind not in get_args(ActivationKind):
        raise RankError(f'activation(kind={shown(kind)}): unknown. Pass "mean", "l2" or "apoz".')
    return Activation(_checked(statistics, "activation", "activations"), kind)


@dataclass(frozen=True, eq=False)
class Wanda:
    """The metric that `wanda` makes."""

    statistics: Statistics
    reads: ClassVar[str] = "inputs"
    order: ClassVar[Order] = 2
    ranks: ClassVar[tuple[Ranks, ...]] = ("weights",)
    needs: ClassVar[tuple[Needs, ...]] = ("weights", "activations")

    def __repr__(self) -> str:
        return "Wanda()"

    def __call__(self, weight: Tensor, name: str) -> Tensor:
        """One score for each weight of a parameter."""
        # A product in half precision could overflow.
        wide = weight if weight.dtype == torch.float64 else weight.float()
        return wide.abs() * self.statistics.input_norms(name).to(wide)


@makes_metrics("keepk.metrics.wanda(statistics)")
def wanda(statistics: Statistics) -> Wanda:
    r"""Wanda: a weight's magnitude times the norm of the input feature that it multiplies (Sun et al. 2023).

    .. math:: R(w_{ij}) = |w_{ij}|\, \lVert x_j \rVert_2

    The norm is over all values of feature j in all forward passes since the last event. For a convolution, the feature
    is an input channel, at all positions.

    Wanda itself compares weights only with those of the same output row, and prunes the same share of each row. Here
    all weights of a space are ranked together, as for every metric, so exactly K stay in the space, and rows and layers
    may lose different shares. A space for each layer (``keepk.weights("fc1.weight", prune=0.5, ...)``) fixes the share
    of a layer.

    Args:
        statistics: The statistics of the model; see `keepk.Statistics`. `update` is not needed.

    Returns:
        A metric for weights of linear and convolutional layers. Biases have no input and are refused.

    Raises:
        RankError: `statistics` is not a `keepk.Statistics` of activations.

    >>> import keepk
    >>> from torch import nn
    >>> model = nn.Linear(2, 1)
    >>> seen = Statistics(model)
    >>> pruner = keepk.Pruner(model, keepk.weights("weight", keep=1, metric=wanda(seen)))
    >>> _ = model(torch.tensor([[1e-3, 1e3]]))
    >>> pruner.step()
    >>> pruner.masks["weight"]
    tensor([[False,  True]])
    """
    return Wanda(_checked(statistics, "wanda", "activations"))


def _checked(statistics: object, metric: str, kind: Kind) -> Statistics:
    if not isinstance(statistics, Statistics):
        remedy = "and call its update() after every backward()" if kind == "gradients" else "before the Pruner"
        raise RankError(
            f"{metric}(statistics={shown(statistics)}): got {type(statistics).__name__}. Make it with "
            f"keepk.Statistics(model), {remedy}."
        )
    if kind not in statistics.of:
        raise RankError(
            f"{metric}(statistics): it needs {kind}, and the statistics are only of {', '.join(statistics.of)}. Make "
            f"them with keepk.Statistics(model, of=({', '.join(repr(it) for it in (*statistics.of, kind))}))."
        )
    return statistics
