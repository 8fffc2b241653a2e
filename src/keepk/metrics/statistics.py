"""`Statistics` of gradients and activations over the batches of an epoch, for metrics that need data.

A metric is a function of the tensors at an event. If it also depends on earlier batches, a `Statistics` object
collects what it needs: gradients when the training loop calls `Statistics.update`, activations in every forward pass.
The `Pruner` says which channels and weights there are, and which metrics read the statistics (`Use`). The metrics
themselves are in `keepk.metrics.from_statistics`.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepk.errors import KeepkError, RankError, SpaceError, StateError
from keepk.metrics.inputs import InputSums, Order, Switch, Totals, layers_by_weight, reads_of
from keepk.metrics.layers import Layer, Slices
from keepk.model.names import unwrap
from keepk.model.torch_internals import BatchNormBase
from keepk.plan.names import shown

Kind = Literal["gradients", "activations"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VERSION = 2


@dataclass(frozen=True)
class Use:
    """A metric that reads statistics, and the units of its space as they are now.

    Attributes:
        space: The name of the space.
        metric: The metric, or a term of a blend. Its attribute ``reads`` says what it reads: "products" of weights and
            gradients, "squares" of gradients, or "inputs" of layers, of which it reads the sum of order ``order``.
        layers: The layers of a channel space.
        parameters: By name, the parameters of a weight space.
    """

    space: str
    metric: Any
    layers: Sequence[Layer] = ()
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def reads(self) -> str:
        """The name of the statistics that the metric reads."""
        return getattr(self.metric, "reads", "products")


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


class Statistics:
    r"""Statistics of gradients and activations since the last event, for metrics that need data.

    It collects only what the metrics of the Pruner's spaces read:

    * `keepk.metrics.taylor`: for every channel the mean over batches of :math:`(\sum_j w_j\, \partial L / \partial
      w_j)^2`, where w are the scale and the shift of the channel's BatchNorm. For a channel without a BatchNorm, w are
      all weights and biases that compute the channel (with ``at="input"``, those that read it).
    * `keepk.metrics.fisher`: for every weight, or every w of a channel as above, the mean of :math:`(\partial L /
      \partial w)^2`.
    * `keepk.metrics.activation` and `keepk.metrics.wanda`: for every input feature of a linear or convolutional layer,
      sums over all values of the feature, in all forward passes.

    **Gradients.** Call `update` once per optimizer step, after ``backward()`` and before ``optimizer.step()``; with a
    gradient scaler, after ``scaler.unscale_(optimizer)``. A batch with NaN or infinite gradients, which a gradient
    scaler skips, is not counted. Under DDP, gradients are averaged, so all processes have the same statistics.

    **Activations.** Every forward pass of the model counts, in train or eval mode, with or without gradients; `update`
    is not needed. Use `paused` for passes that should not count, such as validation, `keepk.recalibrate` and
    `keepk.latency`. Passes of copies, and those that activation checkpointing repeats, do not count. A pass in which
    the input of a layer is NaN or infinite is not counted for this layer. Activations are collected by forward hooks,
    which exist from the time the Pruner is made until its plan ends, the Pruner is closed, or `close` is called. The
    hooks change nothing, except that torch does not use its fused kernel for a whole `nn.TransformerEncoderLayer` in
    eval mode while there are any. In a distributed run, `Pruner.step` sums over all processes.

    Nothing in the model changes. After each `Pruner.step`, and after a state was loaded into the Pruner, the statistics
    start over with the remaining units. A checkpoint written right after an event therefore does not need them. For a
    checkpoint written within an epoch, save the `state_dict` in ``extra``, and load it after the Pruner's state.

    Args:
        model: The model that is pruned; wrappers are looked through.
        of: The quantities that may be collected: "gradients", "activations" or both. A metric that needs another one
            is refused.

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

    Activations need no training loop:

    >>> pruner.close()
    >>> seen = Statistics(model, of=("activations",))
    >>> space = keepk.weights("3.weight", keep=5, metric=keepk.metrics.wanda(seen))
    >>> pruner = keepk.Pruner(model, space)
    >>> with torch.no_grad():
    ...     for batch in torch.randn(3, 8, 20):
    ...         _ = model.eval()(batch)
    >>> pruner.step()
    >>> pruner.kept
    {'3.weight': 5}
    """

    def __init__(self, model: nn.Module, of: Sequence[str] = KINDS) -> None:
        if not isinstance(model, nn.Module):
            raise KeepkError(f"Statistics: model: got {type(model).__name__}. Pass the nn.Module that is trained.")
        kinds = of if isinstance(of, tuple | list) else ()
        if not kinds or any(kind not in KINDS for kind in kinds):
            raise KeepkError(
                f'Statistics: of={shown(of)}: unknown. Pass of=("gradients",), of=("activations",) or '
                f'of=("gradients", "activations").'
            )
        self._model, self._of = unwrap(model), tuple(kinds)
        self._gates: tuple[_Gates, ...] = ()
        self._units: NDArray[np.int64] = np.zeros(0, np.int64)
        self._squares = dict[str, _Squares]()  # by parameter's name
        self._inputs = dict[nn.Parameter, list[InputSums]]()  # by weight, one for each layer that has it
        self._weights = dict[str, nn.Parameter]()  # the weights of weight spaces that are ranked by their inputs
        self._of_all = dict[InputSums, Totals]()  # summed over processes, while an event is decided
        self._switch, self._closed = Switch(), False
        self._handles = list[RemovableHandle]()
        weakref.finalize(self, _remove, self._handles)  # an object that is gone leaves no hooks behind
        self.reset()

    @property
    def of(self) -> tuple[str, ...]:
        """The quantities that may be collected."""
        return self._of

    @property
    def batches(self) -> int:
        """The number of batches counted since the last event.

        These are calls of `update` with finite gradients. If only activations are collected, they are the forward
        passes in this process: the number of calls of the layer that was called most often.
        """
        if self._inputs and not self._gates and not self._squares:
            return max(int(it.totals.calls) for it in self._hooks)
        return int(self._batches)

    def reset(self) -> None:
        """Discard all batches. The Pruner calls it at every event."""
        self._sums = torch.zeros(0, dtype=torch.float64)  # by channel, all layers concatenated
        self._batches = torch.zeros((), dtype=torch.int64)
        self._with_gradient = [0] * len(self._gates)
        for it in self._squares.values():
            it.reset()
        for hook in self._hooks:
            hook.reset()

    @torch.no_grad()
    def update(self) -> None:
        """Add the gradients of one batch. Call it after ``backward()`` and before ``optimizer.step()``.

        Activations were added by the forward pass. If no metric reads gradients, this does nothing.

        Raises:
            RankError: No Pruner uses these statistics yet, there are no gradients, or the model was cut elsewhere.
            KeepkError: The statistics are closed.
        """
        if self._closed:
            raise KeepkError("Statistics: it was closed. Make a new one, and a Pruner whose metric uses it.")
        if not (self._gates or self._squares):
            if self._inputs:
                return
            raise RankError(
                "Statistics: update() was called before a Pruner uses it, so it does not know the channels. Make the "
                "Pruner first, with channels(..., metric=keepk.metrics.taylor(statistics))."
            )
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

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which forward passes are not counted, for example while the model is validated."""
        before, self._switch.on = self._switch.on, False
        try:
            yield
        finally:
            self._switch.on = before

    # Reading ---------------------------------------------------------------------------------------------------------

    def mean_squares(self, layer: Layer) -> Tensor:
        """The means of squared first-order changes of the loss, for `keepk.metrics.taylor`.

        Args:
            layer: The channels of one layer.

        Returns:
            A float64 tensor of shape [channels].

        Raises:
            RankError: No batch was counted, or the statistics do not include these channels.
        """
        self._refuse_no_data()
        place = np.full(max(int(self._units.max(initial=-1)), int(layer.units.max())) + 1, -1)
        place[self._units] = np.arange(len(self._units))
        chosen = place[layer.units]
        if (chosen < 0).any():
            raise _without_data(f"{int((chosen < 0).sum())} of the {len(layer)} channels of {layer.name!r}", "taylor")
        for gates, batches in zip(self._gates, self._with_gradient, strict=True):
            if not batches and np.isin(gates.layer.units, layer.units).any():
                raise _without_gradient(gates.slices[0].name, f"the channels of {layer.name!r}")
        sums = self._sums[torch.from_numpy(chosen).to(self._sums.device)]
        return sums / self._batches

    def squared_gradients(self, of: str | Slices) -> Tensor:
        """The means of squared gradients, for `keepk.metrics.fisher`.

        Args:
            of: The name of a parameter of a weight space, or slices of a layer's channels.

        Returns:
            A float tensor of the parameter's shape, or of the shape of the slices' tensor.

        Raises:
            RankError: No batch was counted, or the statistics do not include this parameter.
        """
        self._refuse_no_data()
        name = of if isinstance(of, str) else of.name
        it = self._squares.get(name if isinstance(of, str) else _of_channels(of))
        if it is None:
            raise _without_data(f"parameter {name!r}", "fisher")
        if not it.with_gradient:
            raise _without_gradient(name, f"the weights of {name!r}")
        means = it.sums / self._batches.to(it.sums.device)
        return means if isinstance(of, str) else of.part_of(means)

    def mean_inputs(self, layer: Layer, order: Order) -> Tensor:
        """The means of ``|x|^order`` over the activations x of a layer's channels, for `keepk.metrics.activation`.

        The activations are the inputs of the layers that read the channels. A channel that a linear layer reads as
        several features, as after a flatten, has the mean over these features; a channel with several readers has
        the mean over the readers that were called.

        Args:
            layer: The channels of one layer.
            order: 0 counts values that are not zero, 1 sums magnitudes, 2 sums squares.

        Returns:
            A float tensor of shape [channels].

        Raises:
            RankError: No forward pass was counted, or the statistics do not include these channels.
        """
        hooks = [
            (slices, it)
            for slices in layer.reader
            for it in self._inputs.get(slices.parameter, ())
            if slices.inputs(it.reads.axis, it.reads.groups) is not None
        ]
        if not hooks or any(order not in it.orders for _, it in hooks):
            raise _without_data(f"the {len(layer)} channels of {layer.name!r}", "activation")
        called = [(slices, it, totals) for slices, it in hooks if (totals := self._totals(it)).calls]
        if not called:
            raise self._no_pass([it for _, it in hooks], f"the {len(layer)} channels of {layer.name!r}")
        found = list[Tensor]()
        for slices, it, totals in called:
            features = slices.inputs(it.reads.axis, it.reads.groups)
            assert features is not None  # `hooks` has no others
            means = totals.mean(order)
            found.append(means[torch.from_numpy(features).to(means.device)].mean(1))
        return torch.stack([it.to(found[0].device) for it in found]).mean(0)

    def input_norms(self, name: str) -> Tensor:
        """The L2 norm of each input feature of a layer over all values counted, for `keepk.metrics.wanda`.

        Args:
            name: The name of the layer's weight.

        Returns:
            A float tensor that broadcasts to the weight: every weight has the norm of the feature that it multiplies.

        Raises:
            RankError: No forward pass was counted, or the statistics do not include this weight.
        """
        weight = self._weights.get(name)
        hooks = self._inputs.get(weight, []) if weight is not None else []
        if weight is None or not hooks or any(2 not in it.orders for it in hooks):
            raise _without_data(f"parameter {name!r}", "wanda")
        totals = [self._totals(it) for it in hooks]
        if not any(it.calls for it in totals):
            raise self._no_pass(hooks, f"the {weight.numel()} weights of {name!r}")
        norms = sum((it.of(2) for it in totals[1:]), totals[0].of(2)).sqrt()  # a tied weight multiplies all of them
        reads = hooks[0].reads
        if reads.axis == 0:
            return norms.reshape(-1, *[1] * (weight.ndim - 1))
        # Row r of a grouped convolution belongs to group r // (rows / groups), which reads a block of the features.
        by_row = norms.reshape(reads.groups, -1).repeat_interleave(weight.shape[0] // reads.groups, 0)
        return by_row.reshape(*by_row.shape, *[1] * (weight.ndim - 2))

    @property
    def _hooks(self) -> Iterator[InputSums]:
        return (it for found in self._inputs.values() for it in found)

    def _totals(self, it: InputSums) -> Totals:
        return self._of_all.get(it, it.totals)

    @contextmanager
    def summed(self, add: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """A context in which activations are those of all processes; `Pruner.step` decides an event in it.

        Args:
            add: Sums a vector over processes. All processes must call it with vectors of the same length.
        """
        hooks = list(self._hooks)
        parts = [it.totals.flat for it in hooks]
        if parts:
            device = parts[0].device
            total = add(torch.cat([it.to(device) for it in parts]))
            summed = torch.split(total, [len(it) for it in parts])
            self._of_all = {it: it.totals.with_numbers(flat) for it, flat in zip(hooks, summed, strict=True)}
        try:
            yield
        finally:
            self._of_all = {}

    # Following the model ---------------------------------------------------------------------------------------------

    def follow(self, uses: Sequence[Use], *, collect: bool = True) -> None:
        """Start over with these units; the Pruner calls it whenever units may have changed.

        Args:
            uses: The metrics that read these statistics, with their units.
            collect: Whether activations are needed again; if not, no hooks are registered.

        Raises:
            SpaceError: The statistics are those of another model.
            RankError: Units cannot be ranked by the statistics that a metric reads.
        """
        own = set(self._model.parameters())
        for use in uses:
            used = [it.parameter for layer in use.layers for it in layer.slices]
            if any(it not in own for it in (*used, *use.parameters.values())):
                raise SpaceError(
                    f"space {use.space!r}: its metric reads the statistics of another model. Make them from the model "
                    f"that is passed to the Pruner: Statistics(model)."
                )
        gates = [_gates(use, layer) for use in uses if use.reads == "products" for layer in use.layers]
        squares = {key: it for use in uses if use.reads == "squares" for key, it in _squares(use)}
        self._follow_inputs([use for use in uses if use.reads == "inputs"], collect=collect)
        self._gates, self._squares = tuple(gates), squares
        self._units = np.concatenate([it.layer.units for it in gates]) if gates else np.zeros(0, np.int64)
        self.reset()

    def _follow_inputs(self, uses: Sequence[Use], *, collect: bool) -> None:
        """Hook the layers whose inputs metrics read, in place of the layers that are hooked now."""
        owners = layers_by_weight(self._model) if uses else {}
        wanted = dict[nn.Parameter, set[Order]]()
        for use in uses:
            for weight in _readers(use, owners):
                wanted.setdefault(weight, set()).add(getattr(use.metric, "order", 2))
        self.release()
        self._weights = {name: it for use in uses for name, it in use.parameters.items()}
        self._inputs = {
            weight: [InputSums(name, weight, it, [*orders], self._switch) for name, it in owners[weight]]
            for weight, orders in wanted.items()
        }
        if collect and not self._closed:
            modules = dict(self._model.named_modules())
            for it in self._hooks:
                self._handles.append(modules[it.name].register_forward_pre_hook(it, with_kwargs=True))

    def release(self) -> None:
        """Remove the hooks from the model; the Pruner calls it when it is closed. The statistics can still be read."""
        _remove(self._handles)

    def close(self) -> None:
        """Stop collecting: hooks are removed, and `update` raises. The statistics so far can still be read."""
        self.release()
        self._closed = True

    def __enter__(self) -> "Statistics":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # States ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The statistics since the last event, of this process.

        Returns:
            A dict of plain values and tensors, for `load_state_dict`.
        """
        return {
            "version": VERSION,
            "units": torch.tensor(self._units.tolist(), dtype=torch.int64),
            "batches": int(self._batches),
            "with_gradient": list(self._with_gradient),
            "sums": self._sums.clone(),
            "squares": {
                key: {"sums": it.sums.clone(), "with_gradient": it.with_gradient} for key, it in self._squares.items()
            },
            "inputs": [
                {
                    "layer": it.name,
                    "orders": list(it.orders),
                    "sums": it.totals.sums.clone(),
                    "counts": [int(number) for number in (it.totals.values, it.totals.calls, it.totals.tried)],
                }
                for it in self._hooks
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state. Load the Pruner's state first, because it determines the units.

        Args:
            state: What `state_dict` returned, in this version of keepk or an earlier one.

        Raises:
            StateError: The state belongs to other units or metrics, or is damaged.
        """
        keys = {"version", "units", "batches", "with_gradient", "sums"}
        if not isinstance(state, Mapping) or not keys <= set(state) or state["version"] not in (1, VERSION):
            raise StateError("Statistics: not the state of a Statistics object. Pass what state_dict() returned.")
        units, sums, batches = state["units"], state["sums"], state["batches"]
        squares, inputs = state.get("squares", {}), state.get("inputs", [])  # version 1 has only Taylor's sums
        fits = isinstance(units, Tensor) and units.tolist() == self._units.tolist()
        if not fits or len(state["with_gradient"]) != len(self._gates):
            raise StateError(
                f"Statistics: the state belongs to different channels; the model has {len(self._units)} now. Build the "
                f"same model and Pruner, and load their states first."
            )
        if not isinstance(sums, Tensor) or len(sums) not in ((len(self._units),) if batches else (0, len(self._units))):
            raise StateError("Statistics: the state does not have one sum per channel. It is damaged.")
        mine = [(it.name, list(it.orders), it.totals.sums.shape) for it in self._hooks]
        if {key: it["sums"].shape for key, it in squares.items()} != {
            key: it.sums.shape for key, it in self._squares.items()
        } or [(it["layer"], it["orders"], it["sums"].shape) for it in inputs] != mine:
            raise StateError(
                f"Statistics: the state has squared gradients of {len(squares)} parameters and inputs of {len(inputs)} "
                f"layers, and the metrics read those of {len(self._squares)} and {len(mine)}, or they differ in shape. "
                f"Build the same model and Pruner, with the same metrics, and load their states first."
            )
        device = next((it.parameter.device for gates in self._gates for it in gates.slices), torch.device("cpu"))
        self._sums = sums.to(device, copy=True)
        self._batches = torch.tensor(batches, dtype=torch.int64, device=device)
        self._with_gradient = list(state["with_gradient"])
        for key, it in squares.items():
            mine_here = self._squares[key]
            mine_here.sums = it["sums"].to(mine_here.parameter.device, copy=True)
            mine_here.with_gradient = it["with_gradient"]
        for hook, it in zip(self._hooks, inputs, strict=True):
            hook.load(Totals(hook.orders, it["sums"], *(torch.tensor(number) for number in it["counts"])))

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

    def _no_pass(self, hooks: Sequence[InputSums], units: str) -> RankError:
        """The error about units whose readers were never called."""
        names, tried = ", ".join(repr(it.name) for it in hooks), max(int(self._totals(it).tried) for it in hooks)
        if tried:
            return RankError(
                f"Statistics: the input of {names} was NaN or infinite in all {tried} forward passes since the last "
                f"event, so {units} cannot be ranked by it. Find out where training diverged; nothing was pruned."
            )
        others = [int(it.calls) for found in self._hooks if (it := self._totals(found))]
        if any(others):
            return RankError(
                f"Statistics: {names} was called in none of the {max(others)} forward passes since the last event, so "
                f"{units} cannot be ranked by its input. Run batches that use it, or leave it out with exclude=; "
                f"nothing was pruned."
            )
        return RankError(
            f"Statistics: there was no forward pass since the last event, 0 in all, so {units} cannot be ranked by "
            f"activations. Run a few batches through the model before pruner.step(), in train mode or, with "
            f"torch.no_grad(), in eval mode; nothing was pruned."
        )


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


def _readers(use: Use, owners: Mapping[nn.Parameter, Sequence[tuple[str, nn.Module]]]) -> Iterator[nn.Parameter]:
    """The weights of the layers whose inputs a metric reads; refuses units whose readers cannot be watched."""
    for layer in use.layers:
        found = [it.parameter for it in layer.reader if _is_watched(it, owners)]
        if not found:
            names = ", ".join(repr(it.name) for it in layer.reader) or "no parameter"
            raise RankError(
                f"space {use.space!r}: the channels of {layer.name!r} are read by {names}, and activations are read at "
                f"the input of nn.Linear and nn.Conv modules. Rank them by weights or gradients "
                f"(keepk.metrics.fisher), or leave the layer out with exclude=."
            )
        yield from found
    for name, parameter in use.parameters.items():
        if parameter not in owners:
            raise RankError(
                f"space {use.space!r}: {name!r} of shape {tuple(parameter.shape)} is not the weight of an nn.Linear or "
                f"nn.Conv module, so its weights have no input feature to be ranked by. Leave it out with "
                f"exclude={name!r}, or select weights only, such as '*.weight'."
            )
        yield parameter


def _is_watched(slices: Slices, owners: Mapping[nn.Parameter, Sequence[tuple[str, nn.Module]]]) -> bool:
    """Whether channels are input features of a layer whose input a hook can see."""
    reads = [reads_of(module) for _, module in owners.get(slices.parameter, ())]
    return any(it is not None and slices.inputs(it.axis, it.groups) is not None for it in reads)


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


def _without_data(what: str, metric: str) -> RankError:
    return RankError(
        f"Statistics: has no data for {what}. Use {metric}(statistics) as the metric of their space, and let "
        f"Pruner.step() call it."
    )


def _without_gradient(name: str, units: str) -> RankError:
    return RankError(
        f"Statistics: {name!r} had no gradient in any batch, so {units} cannot be ranked by gradients. Train the "
        f"layer, or leave it out with exclude=."
    )


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
