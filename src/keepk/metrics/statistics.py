"""`Statistics` of gradients and activations over the batches of an epoch, for metrics that need data.

A metric is a function of the tensors at an event. If it also depends on earlier batches, a `Statistics` object
collects what it needs: gradients when the training loop calls `Statistics.update`, activations in every forward pass.
The `Pruner` says which channels and weights there are, and which metrics read the statistics (`Use`). The metrics
themselves are in `keepk.metrics.from_statistics`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from keepk.errors import KeepkError, RankError, SpaceError, StateError
from keepk.metrics.gradients import GradientSums
from keepk.metrics.inputs import InputStatistics, Order, Switch
from keepk.metrics.layers import Layer, Slices, Use
from keepk.model.names import unwrap
from keepk.plan.names import shown

Kind = Literal["gradients", "activations"]
KINDS: tuple[Kind, ...] = get_args(Kind)
VERSION = 2


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
        self._switch, self._closed = Switch(), False
        self._gradients = GradientSums()
        self._inputs = InputStatistics(self._model, (), self._switch)

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
        if self._inputs.hooks and self._gradients.is_empty:
            return self._inputs.calls
        return self._gradients.batches

    def reset(self) -> None:
        """Discard all batches. The Pruner calls it at every event."""
        self._gradients.reset()
        self._inputs.reset()

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
        if self._gradients.is_empty:
            if self._inputs.hooks:
                return
            raise RankError(
                "Statistics: update() was called before a Pruner uses it, so it does not know the channels. Make the "
                "Pruner first, with channels(..., metric=keepk.metrics.taylor(statistics))."
            )
        self._gradients.add()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which forward passes are not counted, for example while the model is validated."""
        before, self._switch.on = self._switch.on, False
        try:
            yield
        finally:
            self._switch.on = before

    # For metrics -----------------------------------------------------------------------------------------------------

    def mean_squares(self, layer: Layer) -> Tensor:
        """The means of squared first-order changes of the loss, for `keepk.metrics.taylor`.

        Args:
            layer: The channels of one layer.

        Returns:
            A float64 tensor of shape [channels].

        Raises:
            RankError: No batch was counted, or the statistics do not include these channels.
        """
        return self._gradients.mean_squares(layer)

    def squared_gradients(self, of: str | Slices) -> Tensor:
        """The means of squared gradients, for `keepk.metrics.fisher`.

        Args:
            of: The name of a parameter of a weight space, or slices of a layer's channels.

        Returns:
            A float tensor of the parameter's shape, or of the shape of the slices' tensor.

        Raises:
            RankError: No batch was counted, or the statistics do not include this parameter.
        """
        return self._gradients.mean_of_squares(of)

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
        return self._inputs.means(layer, order)

    def input_norms(self, name: str) -> Tensor:
        """The L2 norm of each input feature of a layer over all values counted, for `keepk.metrics.wanda`.

        Args:
            name: The name of the layer's weight.

        Returns:
            A float tensor that broadcasts to the weight: every weight has the norm of the feature that it multiplies.

        Raises:
            RankError: No forward pass was counted, or the statistics do not include this weight.
        """
        return self._inputs.norms(name)

    @contextmanager
    def summed(self, add: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """A context in which activations are those of all processes; `Pruner.step` decides an event in it.

        Args:
            add: Sums a vector over processes. All processes must call it with vectors of the same length.
        """
        with self._inputs.summed(add):
            yield

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
        # Both may refuse; only then does anything change.
        gradients, inputs = GradientSums(uses), InputStatistics(self._model, uses, self._switch)
        self.release()
        self._gradients, self._inputs = gradients, inputs
        if collect and not self._closed:
            inputs.collect()

    def release(self) -> None:
        """Remove the hooks from the model; the Pruner calls it when it is closed. The statistics can still be read."""
        self._inputs.release()

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
        return {"version": VERSION, **self._gradients.state(), "inputs": self._inputs.state()}

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
        self._gradients.refuse_other_channels(state)
        squares, inputs = state.get("squares", {}), state.get("inputs", [])  # version 1 has only Taylor's sums
        mine = self._gradients.shapes, self._inputs.described
        saved = (
            {key: it["sums"].shape for key, it in squares.items()},
            [(it["layer"], it["orders"], it["sums"].shape) for it in inputs],
        )
        if saved != mine:
            raise StateError(
                f"Statistics: the state has squared gradients of {len(squares)} parameters and inputs of {len(inputs)} "
                f"layers, and the metrics read those of {len(mine[0])} and {len(mine[1])}, or they differ in shape. "
                f"Build the same model and Pruner, with the same metrics, and load their states first."
            )
        self._gradients.load(state)
        self._inputs.load(inputs)
