"""The gradients that metrics read: sums over the batches since the last event (`GradientSums`).

A metric for channels reads the gradients of a channel's gates (`gates_of`): the parameters that multiply or shift the
channel as a whole, which are those of its BatchNorm if it has one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keepk.errors import RankError, StateError
from keepk.metrics.layers import Layer, Slices, Use, without_data
from keepk.model.torch_internals import BatchNormBase


@dataclass(frozen=True)
class _Gates:
    """The parameters that scale the channels of one layer, and the shapes that they had when they were found."""

    layer: Layer
    slices: tuple[Slices, ...]
    shapes: tuple[torch.Size, ...]


@dataclass
class _Squares:
    """The sum over batches of the squared gradient of one parameter.

    Attributes:
        name: The parameter's name.
        parameter: The parameter.
        grad: Returns its gradient; for a channel with weight norm, that of the weight that it computes.
        sums: Of the parameter's shape.
        with_gradient: In how many batches it had a gradient.
    """

    name: str
    parameter: nn.Parameter
    grad: Callable[[], Tensor | None]
    sums: Tensor = field(init=False)
    with_gradient: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        kind = torch.float64 if self.parameter.dtype == torch.float64 else torch.float32
        self.sums = torch.zeros_like(self.parameter, dtype=kind, requires_grad=False)
        self.with_gradient = 0

    def found(self) -> Tensor | None:
        """The gradient of this batch in the dtype of the sums; None if the parameter was not used."""
        if self.parameter.shape != self.sums.shape:
            raise _cut_elsewhere(self.name, self.sums.shape, self.parameter.shape)
        if self.sums.device != self.parameter.device:
            self.sums = self.sums.to(self.parameter.device)
        grad = self.grad()
        return None if grad is None else grad.detach().to(self.sums.dtype)


class GradientSums:
    """The sums that metrics read from gradients, for the units that a model has now.

    Args:
        uses: The metrics that read statistics; those that read no gradients are skipped.

    Raises:
        RankError: A parameter of the units gets no gradient.
    """

    def __init__(self, uses: Sequence[Use] = ()) -> None:
        found = [_gates(use, layer) for use in uses if use.reads == "products" for layer in use.layers]
        self._gates = tuple(found)
        self._squares = {key: it for use in uses if use.reads == "squares" for key, it in _squares(use)}
        self._units: NDArray[np.int64] = (
            np.concatenate([it.layer.units for it in found]) if found else np.zeros(0, np.int64)
        )
        self.reset()

    @property
    def is_empty(self) -> bool:
        """Whether no metric reads gradients."""
        return not self._gates and not self._squares

    @property
    def batches(self) -> int:
        """The number of batches counted. Reading it waits for the device that counts them."""
        return int(self._batches)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """By key, the shapes of the squared gradients."""
        return {key: it.sums.shape for key, it in self._squares.items()}

    def reset(self) -> None:
        """Discard all batches."""
        self._sums = torch.zeros(0, dtype=torch.float64)  # by channel, all layers concatenated
        self._batches = torch.zeros((), dtype=torch.int64)
        self._with_gradient = [0] * len(self._gates)
        for it in self._squares.values():
            it.reset()

    def add(self) -> None:
        """Add the gradients that the parameters have now, as one batch.

        Raises:
            RankError: There are no gradients, or the model was cut elsewhere.
        """
        products = [_first_order(gates) for gates in self._gates]
        gradients = [it.found() for it in self._squares.values()]
        device = next((it.device for it in (*products, *gradients) if it is not None), None)
        if device is None:
            raise RankError(
                "Statistics: update() found no gradient in any parameter of the channels. Call it after backward() "
                "and before zero_grad()."
            )
        self._add(products, gradients, device)

    def _add(self, products: Sequence[Tensor | None], gradients: Sequence[Tensor | None], device: torch.device) -> None:
        """Add one batch, unless a number in it is not finite, without waiting for a device."""
        # MPS has no float64.
        kind = torch.float32 if device.type == "mps" else torch.float64
        parts = [
            torch.zeros(len(gates.layer), dtype=kind, device=device) if it is None else it.to(device, kind)
            for it, gates in zip(products, self._gates, strict=True)
        ]
        squares = torch.cat([torch.zeros(0, dtype=kind, device=device), *parts]).square_()
        if len(self._sums) != len(squares):
            self._sums = torch.zeros_like(squares)
        self._batches = self._batches.to(device)
        # Tensors, because bool() would wait for the device. A norm overflows if a square does.
        sizes = [torch.linalg.vector_norm(it).to(device) for it in gradients if it is not None]
        counts = squares.isfinite().all()
        if sizes:
            counts = counts & torch.stack(sizes).isfinite().all()
        self._sums += torch.where(counts, squares, 0)
        self._batches += counts
        for number, product in enumerate(products):
            self._with_gradient[number] += product is not None
        for it, gradient in zip(self._squares.values(), gradients, strict=True):
            if gradient is not None:
                it.sums += torch.where(counts.to(gradient.device), gradient.square(), 0)
                it.with_gradient += 1

    def mean_squares(self, layer: Layer) -> Tensor:
        """See `Statistics.mean_squares`."""
        self._refuse_no_data()
        place = np.full(max(int(self._units.max(initial=-1)), int(layer.units.max())) + 1, -1)
        place[self._units] = np.arange(len(self._units))
        chosen = place[layer.units]
        if (chosen < 0).any():
            raise without_data(f"{int((chosen < 0).sum())} of the {len(layer)} channels of {layer.name!r}", "taylor")
        for gates, batches in zip(self._gates, self._with_gradient, strict=True):
            if not batches and np.isin(gates.layer.units, layer.units).any():
                raise _without_gradient(gates.slices[0].name, f"the channels of {layer.name!r}")
        sums = self._sums[torch.from_numpy(chosen).to(self._sums.device)]
        return sums / self._batches

    def mean_of_squares(self, of: str | Slices) -> Tensor:
        """See `Statistics.squared_gradients`."""
        self._refuse_no_data()
        name = of if isinstance(of, str) else of.name
        it = self._squares.get(name if isinstance(of, str) else _of_channels(of))
        if it is None:
            raise without_data(f"parameter {name!r}", "fisher")
        if not it.with_gradient:
            raise _without_gradient(name, f"the weights of {name!r}")
        means = it.sums / self._batches.to(it.sums.device)
        return means if isinstance(of, str) else of.part_of(means)

    def state(self) -> dict[str, Any]:
        """The sums as plain values and tensors."""
        return {
            "units": torch.tensor(self._units.tolist(), dtype=torch.int64),
            "batches": int(self._batches),
            "with_gradient": list(self._with_gradient),
            "sums": self._sums.clone(),
            "squares": {
                key: {"sums": it.sums.clone(), "with_gradient": it.with_gradient} for key, it in self._squares.items()
            },
        }

    def refuse_other_channels(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that belongs to different channels."""
        units, sums, batches = state["units"], state["sums"], state["batches"]
        fits = isinstance(units, Tensor) and units.tolist() == self._units.tolist()
        if not fits or len(state["with_gradient"]) != len(self._gates):
            raise StateError(
                f"Statistics: the state belongs to different channels; the model has {len(self._units)} now. Build the "
                f"same model and Pruner, and load their states first."
            )
        # Before the first batch there are no sums yet.
        if not isinstance(sums, Tensor) or len(sums) not in ((len(self._units),) if batches else (0, len(self._units))):
            raise StateError("Statistics: the state does not have one sum per channel. It is damaged.")

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which fits these units."""
        device = next((it.parameter.device for gates in self._gates for it in gates.slices), torch.device("cpu"))
        self._sums = state["sums"].to(device, copy=True)
        self._batches = torch.tensor(state["batches"], dtype=torch.int64, device=device)
        self._with_gradient = list(state["with_gradient"])
        for key, it in state.get("squares", {}).items():
            mine = self._squares[key]
            mine.sums = it["sums"].to(mine.parameter.device, copy=True)
            mine.with_gradient = it["with_gradient"]

    def _refuse_no_data(self) -> None:
        if not int(self._batches):
            skipped = max([*self._with_gradient, *(it.with_gradient for it in self._squares.values())], default=0)
            why = (
                f"all {skipped} batches since the last event had NaN or infinite gradients. Find out where "
                f"training diverged"
                if skipped
                else "there was no batch since the last event. Call statistics.update() after every backward() and "
                "before optimizer.step()"
            )
            raise RankError(f"Statistics: {why}; nothing was pruned.")


def gates_of(layer: Layer) -> tuple[Slices, ...]:
    """The parameters whose gradients score a layer's channels."""
    norms = tuple(it for it in layer.carrier if issubclass(it.module, BatchNormBase))
    return norms or (layer.producer if layer.at == "output" else layer.reader) + layer.carrier


def _gates(use: Use, layer: Layer) -> _Gates:
    """The gates of a layer; refuses one that gets no gradient."""
    slices = gates_of(layer)
    frozen = next((it.name for it in slices if not it.parameter.requires_grad), None)
    if frozen is not None or not slices:
        what = f"parameter {frozen!r} of the" if frozen else "no parameter of the"
        raise RankError(
            f"space {use.space!r}: {what} channels of {layer.name!r} gets {'no' if frozen else 'a'} gradient, "
            f"so they cannot be ranked by gradients. Leave the layer out with exclude=, or choose another metric=."
        )
    return _Gates(layer, slices, tuple(it.parameter.shape for it in slices))


def _squares(use: Use) -> Iterator[tuple[str, _Squares]]:
    """By key, the squared gradients that a metric reads."""
    for layer in use.layers:
        for it in _gates(use, layer).slices:
            yield _of_channels(it), _Squares(it.name, it.parameter, lambda it=it: it.whole_grad)  # type: ignore[misc]
    for name, parameter in use.parameters.items():
        if not parameter.requires_grad:
            raise RankError(
                f"space {use.space!r}: parameter {name!r} gets no gradient, so its weights cannot be ranked by "
                f"gradients. Leave it out with exclude=, or choose another metric=."
            )
        yield name, _Squares(name, parameter, lambda parameter=parameter: parameter.grad)  # type: ignore[misc]


def _of_channels(slices: Slices) -> str:
    """The key of a parameter's squared gradients for channels.

    It is not the parameter's name: with weight norm, the gradient for channels is that of the computed weight, and a
    weight space may need that of the parameter itself.
    """
    return f"channels of {slices.name}"


def _first_order(gates: _Gates) -> Tensor | None:
    """By channel, the sum of w dL/dw over its gates in this batch; None if no gate has a gradient."""
    total: Tensor | None = None
    for it, shape in zip(gates.slices, gates.shapes, strict=True):
        if it.parameter.shape != shape:
            raise _cut_elsewhere(it.name, shape, it.parameter.shape)
        grad = it.grad
        if grad is None:  # not used in this batch
            continue
        weights = it.tensor
        wide = weights if weights.dtype == torch.float64 else weights.float()
        product = wide * grad
        part = product.flatten(1).sum(1) if product.ndim > 1 else product
        total = part if total is None else total + part.to(total.device)
    return total


def _cut_elsewhere(name: str, before: torch.Size, now: torch.Size) -> RankError:
    return RankError(
        f"Statistics: {name!r} had shape {tuple(before)} at the last event and has {tuple(now)} now: the model was "
        f"cut, but not by the Pruner. Read pruner.kept after such a cut, which updates the Pruner and the statistics."
    )


def _without_gradient(name: str, units: str) -> RankError:
    return RankError(
        f"Statistics: {name!r} had no gradient in any batch, so {units} cannot be ranked by gradients. Train the "
        f"layer, or leave it out with exclude=."
    )
