"""Statistics over the batches of an epoch, and the Taylor importance that is computed from them.

Statistics that a metric needs besides the weights, gathered over the batches of an epoch.

A metric is a function of tensors as they are at an event. Where it needs to know what the gradients were like, a
`Statistics` object beside the training loop gathers that; the `Pruner` tells it which channels there are.

Taylor importance of channels: how much the loss would change if a channel were removed, to first order.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keepk.errors import KeepkError, RankError, SpaceError, StateError
from keepk.metrics.channels import Blend
from keepk.metrics.layers import Layer, Slices
from keepk.metrics.weights import Needs, Ranks, makes_metrics
from keepk.model.names import unwrap
from keepk.model.torch_internals import BatchNormBase
from keepk.plan.names import shown

KINDS = ("gradients",)
VERSION = 1


@dataclass(frozen=True)
class _Gates:
    """The parameters that scale the channels of one layer, and the shapes that they had when they were found."""

    layer: Layer
    slices: tuple[Slices, ...]
    shapes: tuple[torch.Size, ...]


class Statistics:
    r"""Statistics of gradients since the last event, for metrics such as `keepk.metrics.taylor`.

    For every channel of the spaces that it ranks, it keeps the mean over batches of

    .. math:: \Big(\sum_j w_j\, \partial L / \partial w_j\Big)^2

    where w are the scale and the shift of the channel's BatchNorm. For a channel without a BatchNorm, w are all weights
    and biases that compute the channel (with ``at="input"``, those that read it).

    Call `update` after ``backward()`` and before the gradients change or go: once per optimizer step, before
    ``optimizer.step()``; with a gradient scaler, after ``scaler.unscale_(optimizer)``. A batch with NaN or infinite
    gradients, which a gradient scaler skips, is not counted. Under DDP gradients are averages, the same in every
    process, and so are the statistics.

    The object only reads: it registers no hooks and changes nothing in the model. It follows the Pruner: after each
    `Pruner.step`, and after a state was loaded into the Pruner, it starts again with the channels that are left.
    A checkpoint written right after an event therefore does not need it. In a checkpoint written within an epoch, save
    its `state_dict` in ``extra``, and load it after the Pruner's state.

    Args:
        model: The model that is pruned; wrappers are looked through.
        of: The quantities to gather: ``("gradients",)``.

    Raises:
        KeepkError: `model` is not an nn.Module, or `of` names something else.

    >>> import keepk
    >>> model = nn.Sequential(nn.Linear(20, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> seen = Statistics(model, of=("gradients",))
    >>> space = keepk.channels("0", keep=4, metric=keepk.metrics.taylor(seen))
    >>> pruner = keepk.Pruner(model, space, optimizer, example=torch.randn(2, 20))
    >>> for batch in torch.randn(3, 8, 20):
    ...     optimizer.zero_grad()
    ...     model(batch).square().mean().backward()
    ...     seen.update()
    ...     optimizer.step()
    >>> seen.batches
    3
    >>> pruner.step()
    >>> model[0].out_features, seen.batches
    (4, 0)
    """

    def __init__(self, model: nn.Module, of: Sequence[str] = KINDS) -> None:
        if not isinstance(model, nn.Module):
            raise KeepkError(f"Statistics: model: got {type(model).__name__}. Pass the nn.Module that is trained.")
        kinds = of if isinstance(of, tuple | list) else ()
        if not kinds or any(kind not in KINDS for kind in kinds):
            raise KeepkError(f'Statistics: of={shown(of)}: unknown. Pass of=("gradients",).')
        self._model = unwrap(model)
        self._gates: tuple[_Gates, ...] = ()
        self._units: NDArray[np.int64] = np.zeros(0, np.int64)
        self._closed = False
        self.reset()

    @property
    def batches(self) -> int:
        """How many batches were counted since the last event."""
        return int(self._batches)

    def reset(self) -> None:
        """Forget all batches. The Pruner calls it at every event."""
        self._sums = torch.zeros(0, dtype=torch.float64)  # by channel of all layers, one after another
        self._batches = torch.zeros((), dtype=torch.int64)
        self._with_gradient = [0] * len(self._gates)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the gradients of one batch: call it after ``backward()`` and before ``optimizer.step()``."""
        if self._closed:
            raise KeepkError("Statistics: it was closed. Make a new one, and a Pruner that ranks by it.")
        if not self._gates:
            raise RankError(
                "Statistics: update() before a Pruner ranks by it, so it does not know the channels. Make the Pruner "
                "first: channels(..., metric=keepk.metrics.taylor(statistics))."
            )
        found = [_first_order(gates) for gates in self._gates]
        device = next((it.device for it in found if it is not None), None)
        if device is None:
            raise RankError(
                "Statistics: update() found no gradient in any parameter of the channels. Call it after backward() "
                "and before zero_grad()."
            )
        # MPS has no float64.
        kind = torch.float32 if device.type == "mps" else torch.float64
        parts = [
            torch.zeros(len(gates.layer), dtype=kind, device=device) if it is None else it.to(device, kind)
            for it, gates in zip(found, self._gates, strict=True)
        ]
        squares = torch.cat(parts).square_()
        if not len(self._sums):
            self._sums, self._batches = torch.zeros_like(squares), self._batches.to(device)
        counts = squares.isfinite().all()  # nothing waits for the device
        self._sums += torch.where(counts, squares, 0)
        self._batches += counts
        for number, it in enumerate(found):
            self._with_gradient[number] += it is not None

    def mean_squares(self, layer: Layer) -> Tensor:
        """The means for the channels of a layer, as float64 [channels]."""
        self._refuse_no_data()
        place = np.full(max(int(self._units.max()), int(layer.units.max())) + 1, -1)
        place[self._units] = np.arange(len(self._units))
        chosen = place[layer.units]
        if (chosen < 0).any():
            raise RankError(
                f"Statistics: it knows nothing of {int((chosen < 0).sum())} of the {len(layer)} channels of "
                f"{layer.name!r}. Rank the space by taylor(statistics), and let the Pruner's own step() ask for the "
                f"scores."
            )
        for gates, batches in zip(self._gates, self._with_gradient, strict=True):
            if not batches and np.isin(gates.layer.units, layer.units).any():
                raise RankError(
                    f"Statistics: {gates.slices[0].name!r} had no gradient in any batch, so the channels of "
                    f"{layer.name!r} cannot be ranked by gradients. Train the layer, or leave it out with exclude=."
                )
        sums = self._sums[torch.from_numpy(chosen).to(self._sums.device)]
        return sums / self._batches

    def follow(self, spaces: Mapping[str, Sequence[Layer]]) -> None:
        """Start again with these channels; the Pruner calls it whenever channels may have changed.

        Args:
            spaces: By name of a space that is ranked by these statistics, its layers as they are now.
        """
        own = {id(parameter) for parameter in self._model.parameters()}
        gates = list[_Gates]()
        for space, layers in spaces.items():
            for layer in layers:
                slices = gates_of(layer)
                if any(id(it.parameter) not in own for it in slices):
                    raise SpaceError(
                        f"space {space!r}: its metric reads the statistics of another model. Make them from the model "
                        f"that the Pruner gets: Statistics(model)."
                    )
                frozen = next((it.name for it in slices if not it.parameter.requires_grad), None)
                if frozen is not None or not slices:
                    what = f"parameter {frozen!r} of the" if frozen else "no parameter of the"
                    raise RankError(
                        f"space {space!r}: {what} channels of {layer.name!r} gets {'no' if frozen else 'a'} gradient, "
                        f"so they cannot be ranked by gradients. Leave the layer out with exclude=, or choose another "
                        f"metric=."
                    )
                gates.append(_Gates(layer, slices, tuple(it.parameter.shape for it in slices)))
        self._gates = tuple(gates)
        self._units = np.concatenate([it.layer.units for it in gates]) if gates else np.zeros(0, np.int64)
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        """The statistics since the last event, as plain values and tensors."""
        return {
            "version": VERSION,
            "units": torch.from_numpy(self._units.copy()),
            "batches": self.batches,
            "with_gradient": list(self._with_gradient),
            "sums": self._sums.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned; load the Pruner's state first, which says what channels there are."""
        keys = {"version", "units", "batches", "with_gradient", "sums"}
        if not isinstance(state, Mapping) or not keys <= set(state) or state["version"] != VERSION:
            raise StateError("Statistics: not a state of statistics. Pass what state_dict() returned.")
        units, sums, batches = state["units"], state["sums"], state["batches"]
        fits = isinstance(units, Tensor) and units.tolist() == self._units.tolist()
        if not fits or len(state["with_gradient"]) != len(self._gates):
            raise StateError(
                f"Statistics: the state belongs to different channels; the model has {len(self._units)} now. Build the "
                f"same model and Pruner, and load their states first."
            )
        if not isinstance(sums, Tensor) or len(sums) not in ((len(self._units),) if batches else (0, len(self._units))):
            raise StateError("Statistics: the state has no sum for each of its channels. It is damaged.")
        device = next((it.parameter.device for gates in self._gates for it in gates.slices), torch.device("cpu"))
        self._sums = sums.to(device, copy=True)
        self._batches = torch.tensor(batches, dtype=torch.int64, device=device)
        self._with_gradient = list(state["with_gradient"])

    def close(self) -> None:
        """End the gathering: `update` is refused from now on. The means so far can still be read."""
        self._closed = True

    def __enter__(self) -> "Statistics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_no_data(self) -> None:
        if not self.batches:
            skipped = max(self._with_gradient, default=0)
            why = (
                f"in all {skipped} batches since the last event some gradient was NaN or infinite. Find out where "
                f"training diverged"
                if skipped
                else "they saw no batch since the last event. Call statistics.update() after every backward() and "
                "before optimizer.step()"
            )
            raise RankError(f"Statistics: {why}; nothing was pruned.")


def gates_of(layer: Layer) -> tuple[Slices, ...]:
    """The parameters whose product with their gradients says what a layer's channels are worth."""
    norms = tuple(it for it in layer.carrier if issubclass(it.module, BatchNormBase))
    return norms or (layer.producer if layer.at == "output" else layer.reader) + layer.carrier


def statistics_of(metric: Callable[..., Any] | None) -> list[Statistics]:
    """The statistics that a metric needs, with those of a blend's terms."""
    if isinstance(metric, Blend):
        return [it for weight, term in metric.terms if weight for it in statistics_of(term)]
    found = getattr(metric, "statistics", None)
    return [found] if isinstance(found, Statistics) else []


def _first_order(gates: _Gates) -> Tensor | None:
    """By channel, the sum of w dL/dw over its gates in this batch; None if no gate has a gradient."""
    total: Tensor | None = None
    for it, shape in zip(gates.slices, gates.shapes, strict=True):
        if it.parameter.shape != shape:
            raise RankError(
                f"Statistics: {it.name!r} had shape {tuple(shape)} at the last event and has "
                f"{tuple(it.parameter.shape)} now: something else than the Pruner has cut the model. Read pruner.kept "
                f"after the cut, which makes the Pruner and the statistics follow it."
            )
        grad = it.grad
        if grad is None:  # not used in this batch
            continue
        weights = it.tensor
        wide = weights if weights.dtype == torch.float64 else weights.float()
        product = wide * grad
        part = product.flatten(1).sum(1) if product.ndim > 1 else product
        total = part if total is None else total + part.to(total.device)
    return total


@dataclass(frozen=True, eq=False)
class Taylor:
    """The metric that `taylor` makes."""

    statistics: Statistics
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

    over batches, where g are the gradients of the scale and the shift of the channel's BatchNorm. Without one, the sum
    is over all weights and biases that compute the channel. To first order this is the square of what the loss of a
    batch changes by if the channel is removed (Molchanov et al. 2019). Scores of different layers are comparable, so
    that one ranking over all layers needs no floor.

    Args:
        statistics: The collector of the gradients; see `keepk.Statistics`.

    >>> from torch import nn
    >>> taylor(Statistics(nn.Linear(2, 2)))
    Taylor()
    """
    if not isinstance(statistics, Statistics):
        raise RankError(
            f"taylor(statistics={shown(statistics)}): got {type(statistics).__name__}. Make it with "
            f"keepk.Statistics(model), and call its update() after every backward()."
        )
    return Taylor(statistics)
