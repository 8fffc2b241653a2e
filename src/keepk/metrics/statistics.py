"""`Statistics` of gradients over the batches of an epoch, and `taylor`, a metric computed from them.

A metric is a function of the tensors at an event. If it also depends on the gradients of earlier batches, a
`Statistics` object in the training loop collects them; the `Pruner` tells it which channels there are.

The Taylor importance of a channel estimates how much the loss would change if the channel were removed, to first order.
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
from keepk.metrics.layers import Layer, Needs, Ranks, Slices, makes_metrics
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

    For every channel of the spaces whose metrics use it, it keeps the mean over batches of

    .. math:: \Big(\sum_j w_j\, \partial L / \partial w_j\Big)^2

    where w are the scale and the shift of the channel's BatchNorm. For a channel without a BatchNorm, w are all weights
    and biases that compute the channel (with ``at="input"``, those that read it).

    Call `update` once per optimizer step, after ``backward()`` and before ``optimizer.step()``; with a gradient scaler,
    after ``scaler.unscale_(optimizer)``. A batch with NaN or infinite gradients, which a gradient scaler skips, is not
    counted. Under DDP, gradients are averaged, so all processes have the same statistics.

    The object registers no hooks and changes nothing in the model. After each `Pruner.step`, and after a state was
    loaded into the Pruner, it starts over with the remaining channels. A checkpoint written right after an event
    therefore does not need it. For a checkpoint written within an epoch, save its `state_dict` in ``extra``, and load
    it after the Pruner's state.

    Args:
        model: The model that is pruned; wrappers are looked through.
        of: The quantities to collect: ``("gradients",)``.

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
        """The number of batches counted since the last event."""
        return int(self._batches)

    def reset(self) -> None:
        """Discard all batches. The Pruner calls it at every event."""
        self._sums = torch.zeros(0, dtype=torch.float64)  # by channel, all layers concatenated
        self._batches = torch.zeros((), dtype=torch.int64)
        self._with_gradient = [0] * len(self._gates)

    @torch.no_grad()
    def update(self) -> None:
        """Add the gradients of one batch. Call it after ``backward()`` and before ``optimizer.step()``.

        Raises:
            RankError: No Pruner uses these statistics yet, there are no gradients, or the model was cut elsewhere.
            KeepkError: The statistics are closed.
        """
        if self._closed:
            raise KeepkError("Statistics: it was closed. Make a new one, and a Pruner whose metric uses it.")
        if not self._gates:
            raise RankError(
                "Statistics: update() was called before a Pruner uses it, so it does not know the channels. Make the "
                "Pruner first, with channels(..., metric=keepk.metrics.taylor(statistics))."
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
        counts = squares.isfinite().all()  # a tensor, because bool() would wait for the device
        self._sums += torch.where(counts, squares, 0)
        self._batches += counts
        for number, it in enumerate(found):
            self._with_gradient[number] += it is not None

    def mean_squares(self, layer: Layer) -> Tensor:
        """The means for the channels of a layer.

        Args:
            layer: The channels of one layer.

        Returns:
            A float64 tensor of shape [channels].

        Raises:
            RankError: No batch was counted, or the statistics do not include these channels.
        """
        self._refuse_no_data()
        place = np.full(max(int(self._units.max()), int(layer.units.max())) + 1, -1)
        place[self._units] = np.arange(len(self._units))
        chosen = place[layer.units]
        if (chosen < 0).any():
            raise RankError(
                f"Statistics: has no data for {int((chosen < 0).sum())} of the {len(layer)} channels of "
                f"{layer.name!r}. Use taylor(statistics) as the metric of their space, and let Pruner.step() call it."
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
        """Start over with these channels; the Pruner calls it whenever channels may have changed.

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
                        f"that is passed to the Pruner: Statistics(model)."
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
        """The statistics since the last event.

        Returns:
            A dict of plain values and tensors, for `load_state_dict`.
        """
        return {
            "version": VERSION,
            "units": torch.from_numpy(self._units.copy()),
            "batches": self.batches,
            "with_gradient": list(self._with_gradient),
            "sums": self._sums.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Load the Pruner's state first, because it determines the channels.

        Args:
            state: What `state_dict` returned.

        Raises:
            StateError: The state belongs to other channels, or is damaged.
        """
        keys = {"version", "units", "batches", "with_gradient", "sums"}
        if not isinstance(state, Mapping) or not keys <= set(state) or state["version"] != VERSION:
            raise StateError("Statistics: not the state of a Statistics object. Pass what state_dict() returned.")
        units, sums, batches = state["units"], state["sums"], state["batches"]
        fits = isinstance(units, Tensor) and units.tolist() == self._units.tolist()
        if not fits or len(state["with_gradient"]) != len(self._gates):
            raise StateError(
                f"Statistics: the state belongs to different channels; the model has {len(self._units)} now. Build the "
                f"same model and Pruner, and load their states first."
            )
        if not isinstance(sums, Tensor) or len(sums) not in ((len(self._units),) if batches else (0, len(self._units))):
            raise StateError("Statistics: the state does not have one sum per channel. It is damaged.")
        device = next((it.parameter.device for gates in self._gates for it in gates.slices), torch.device("cpu"))
        self._sums = sums.to(device, copy=True)
        self._batches = torch.tensor(batches, dtype=torch.int64, device=device)
        self._with_gradient = list(state["with_gradient"])

    def close(self) -> None:
        """Stop collecting: `update` raises from now on. The means so far can still be read."""
        self._closed = True

    def __enter__(self) -> "Statistics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_no_data(self) -> None:
        if not self.batches:
            skipped = max(self._with_gradient, default=0)
            why = (
                f"all {skipped} batches since the last event had NaN or infinite gradients. Find out where "
                f"training diverged"
                if skipped
                else "there was no batch since the last event. Call statistics.update() after every backward() and "
                "before optimizer.step()"
            )
            raise RankError(f"Statistics: {why}; nothing was pruned.")


def gates_of(layer: Layer) -> tuple[Slices, ...]:
    """The parameters whose products with their gradients score a layer's channels."""
    norms = tuple(it for it in layer.carrier if issubclass(it.module, BatchNormBase))
    return norms or (layer.producer if layer.at == "output" else layer.reader) + layer.carrier


def statistics_of(metric: Callable[..., Any] | None) -> list[Statistics]:
    """The statistics that a metric uses, including those of a blend's terms."""
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
                f"{tuple(it.parameter.shape)} now: the model was cut, but not by the Pruner. Read pruner.kept after "
                f"such a cut, which updates the Pruner and the statistics."
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

    The expectation is over batches, and g are the gradients of the scale and the shift of the channel's BatchNorm.
    Without a BatchNorm, the sum is over all weights and biases that compute the channel. To first order, this is the
    squared change of a batch's loss if the channel is removed (Molchanov et al. 2019). Scores of different layers are
    comparable, so one ranking over all layers works without a floor.

    Args:
        statistics: The statistics that the training loop updates; see `keepk.Statistics`.

    Returns:
        A metric for channels.

    Raises:
        RankError: `statistics` is not a `keepk.Statistics`.

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
