"""The inputs that metrics read: sums over the inputs of layers, collected by forward hooks (`InputSums`).

The activation of a channel is read at the input of the layers that read the channel. There it is after the BatchNorm,
the activation function and the pooling that follow the layer which computes it. The sums are kept per input feature of
the layer that reads it, so one hook serves metrics for channels and for weights. `InputStatistics` has the hooks of all
layers that the metrics of a run read:

>>> layer = nn.Linear(3, 2)
>>> sums = InputSums("fc", layer.weight, layer, orders=(0, 1, 2))
>>> handle = layer.register_forward_pre_hook(sums, with_kwargs=True)
>>> _ = layer(torch.tensor([[1.0, 0.0, -3.0], [1.0, 0.0, 0.0]]))
>>> handle.remove()
>>> sums.totals.of(order=1)  # the sum of |x| for each feature
tensor([2., 0., 3.], dtype=torch.float64)
>>> sums.totals.mean(order=0)  # the share of values that are not zero
tensor([1.0000, 0.0000, 0.5000], dtype=torch.float64)
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepk.errors import RankError
from keepk.metrics.layers import Layer, Slices, Use, without_data
from keepk.model.names import lengths_of
from keepk.model.torch_internals import current_graph_task_id

Order = Literal[0, 1, 2]  # of the sum over |x|^order; 0 counts the values that are not zero
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Reads(NamedTuple):
    """How a layer reads its input.

    Attributes:
        axis: The axis of the weight that belongs to the input.
        dim: The dim of the input that has the features, from the end.
        groups: The number of groups of a convolution.
    """

    axis: int
    dim: int
    groups: int = 1


def reads_of(module: nn.Module) -> Reads | None:
    """How a layer reads its input; None for layers whose input cannot be seen by a hook on the module.

    >>> reads_of(nn.Conv2d(4, 8, 3, groups=2))
    Reads(axis=1, dim=-3, groups=2)
    """
    if isinstance(module, nn.Linear):
        return Reads(axis=1, dim=-1)
    if isinstance(module, _CONVOLUTIONS):
        return Reads(axis=1, dim=-1 - len(module.kernel_size), groups=module.groups)
    if isinstance(module, _TRANSPOSED):
        return Reads(axis=0, dim=-1 - len(module.kernel_size))
    return None


def layers_by_weight(model: nn.Module) -> dict[nn.Parameter, list[tuple[str, nn.Module]]]:
    """By weight, the layers that multiply their input by it, each with its path; several for a tied weight.

    A parametrized weight belongs to the layer, not to its parametrization. The output projection of an
    `nn.MultiheadAttention` is left out: torch reads its weight without calling the module, so no hook would run.
    """
    modules, found = dict(model.named_modules()), dict[nn.Parameter, list[tuple[str, nn.Module]]]()
    lengths = set(lengths_of(model).values())
    for path, module in modules.items():
        home = f".{path}".partition(".parametrizations.")[0].removeprefix(".")
        layer, above = modules[home], modules[home.rpartition(".")[0]]
        reads = reads_of(layer)
        if reads is None or isinstance(above, nn.MultiheadAttention):
            continue
        for parameter in module.parameters(recurse=False):
            # Not `parameter is layer.weight`: a parametrized weight is computed, which may change buffers.
            if parameter.ndim < 2 or parameter in lengths:
                continue
            width = parameter.shape[reads.axis] * reads.groups
            if width == getattr(layer, "in_features", None) or width == getattr(layer, "in_channels", None):
                found.setdefault(parameter, []).append((home, layer))
    return found


@dataclass(frozen=True)
class Totals:
    """The sums of one layer's inputs, of this process or of all of them.

    Attributes:
        orders: The orders that were summed.
        sums: Of shape [orders, features].
        values: How many values of each feature were counted, as a tensor.
        calls: How many calls of the layer were counted, as a tensor.
        tried: How many calls there were, including those whose inputs were NaN or infinite, which are not counted.
    """

    orders: tuple[Order, ...]
    sums: Tensor
    values: Tensor
    calls: Tensor
    tried: Tensor

    def of(self, order: Order) -> Tensor:
        """The sum of |x|^order for each feature."""
        return self.sums[self.orders.index(order)]

    def mean(self, order: Order) -> Tensor:
        """The mean of |x|^order for each feature; zero if there was no value."""
        return self.of(order) / self.values.clamp(min=1)

    @property
    def flat(self) -> Tensor:
        """All numbers as one vector, which can be summed over processes."""
        counts = torch.stack([self.values, self.calls, self.tried])
        return torch.cat([self.sums.flatten(), counts.to(self.sums.dtype)])

    def with_numbers(self, flat: Tensor) -> "Totals":
        """The same with the numbers of a vector like `flat`."""
        flat = flat.to(self.sums)
        values, calls, tried = flat[-3:].round().long()
        return Totals(self.orders, flat[:-3].reshape(self.sums.shape), values, calls, tried)


class Switch:
    """Whether hooks count; shared by the hooks of one `Statistics`."""

    on = True


class InputSums:
    """A forward pre-hook that adds up the inputs of one layer, feature by feature. It changes nothing.

    A copy of the module gets a hook that does nothing, so the passes of copies (averaged models, the trial runs of
    keepk) are not counted.

    Args:
        name: The path of the layer, for errors.
        weight: Its weight. The sums are on its device.
        module: The layer, one for which `reads_of` is not None.
        orders: The orders to sum.
        switch: Turns the counting off and on.
    """

    def __init__(
        self, name: str, weight: nn.Parameter, module: nn.Module, orders: Sequence[Order], switch: Switch | None = None
    ) -> None:
        reads = reads_of(module)
        assert reads is not None
        self.name, self.reads, self.weight = name, reads, weight
        self.orders: tuple[Order, ...] = tuple(sorted(set(orders)))
        self._switch = switch or Switch()
        self._features = weight.shape[reads.axis] * reads.groups
        self.reset()

    def reset(self) -> None:
        """Discard all sums."""
        device = self.weight.device
        kind = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        # Made here and not by the hook: a tensor made in inference mode could not be changed outside of it.
        self._sums = torch.zeros(len(self.orders), self._features, dtype=kind, device=device)
        self._values, self._calls, self._tried = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(3))

    @property
    def totals(self) -> Totals:
        """The sums of this process."""
        return Totals(self.orders, self._sums, self._values, self._calls, self._tried)

    def load(self, totals: Totals) -> None:
        """Continue from these sums."""
        self.reset()
        self._sums.copy_(totals.sums)
        self._values, self._calls, self._tried = (
            torch.as_tensor(it, dtype=torch.int64).to(self._sums.device, copy=True)
            for it in (totals.values, totals.calls, totals.tried)
        )

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook: add the input of one call."""
        inputs = args[0] if args else kwargs.get("input")
        dim = self.reads.dim
        if not self._switch.on or not isinstance(inputs, Tensor) or inputs.is_nested or inputs.ndim < -dim:
            return
        # A different width means that the model was cut elsewhere. The Pruner follows the cut and starts over.
        if inputs.shape[dim] != self._features or _is_recomputing():
            return
        with torch.no_grad():
            self._add(inputs.detach())

    def _add(self, inputs: Tensor) -> None:
        if self._sums.device != self.weight.device:
            self._move()
        # Half precision overflows at 65,504, also in a sum.
        wide = inputs if inputs.dtype == torch.float64 else inputs.float()
        others = [dim for dim in range(wide.ndim) if dim != wide.ndim + self.reads.dim]
        if not others:  # one unbatched row
            wide, others = wide[None], [0]
        if not wide.numel():
            self._calls += 1
            self._tried += 1
            return
        # abs().sum() writes a temporary, and is still several times as fast as vector_norm(1).
        sizes = wide.abs()
        scale = _power_of_two(sizes.amax(others, keepdim=True))
        scaled, back = sizes * scale, scale.reshape(-1).to(self._sums)
        found = dict[int, Tensor]()
        if self.orders != (2,):
            # Also without order 1: sign() turns NaN into 0, so a count does not show it.
            found[1] = scaled.sum(others).to(self._sums) / back
            if 0 in self.orders:
                found[0] = sizes.sign_().sum(others).to(self._sums)
        if 2 in self.orders:
            found[2] = scaled.square_().sum(others).to(self._sums) / back.square()
        # A tensor, because bool() would wait for the device.
        counts = torch.stack([*found.values()]).isfinite().all()
        self._sums += torch.where(counts, torch.stack([found[order] for order in self.orders]), 0)
        self._values += counts * (wide.numel() // self._features)
        self._calls += counts
        self._tried += 1

    def _move(self) -> None:
        with torch.inference_mode(False):
            device = self.weight.device
            self._sums, self._values = self._sums.to(device), self._values.to(device)
            self._calls, self._tried = self._calls.to(device), self._tried.to(device)

    def __deepcopy__(self, _: object) -> Any:
        return no_hook

    def __reduce__(self) -> Any:
        return _make_no_hook, ()


def _power_of_two(largest: Tensor) -> Tensor:
    """Factors by which finite values can be multiplied so that sums of their squares neither overflow nor vanish.

    A power of two rounds nothing, so the sums are those of the values themselves.
    """
    most = 126 if largest.dtype == torch.float32 else 1000  # its inverse, too, is a normal number
    return largest.log2().ceil().clamp(-most, most).neg().exp2()


def no_hook(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """The hook that takes the place of an `InputSums` in copies of a module."""


def _make_no_hook() -> Any:
    return no_hook


def _is_recomputing() -> bool:
    """Whether a backward pass repeats a forward pass, as activation checkpointing does. Do not count it again."""
    return not torch.compiler.is_compiling() and current_graph_task_id() != -1


class InputStatistics:
    """The sums that metrics read from inputs of layers, for the units that a model has now.

    Args:
        model: The model without wrappers.
        uses: The metrics that read statistics; those that read no inputs are skipped.
        switch: Turns the counting off and on.

    Raises:
        RankError: Units are read by layers whose input no hook can see.
    """

    def __init__(self, model: nn.Module, uses: Sequence[Use], switch: Switch) -> None:
        uses = [use for use in uses if use.reads == "inputs"]
        owners = layers_by_weight(model) if uses else {}
        wanted = dict[nn.Parameter, set[Order]]()
        for use in uses:
            for weight in _readers(use, owners):
                wanted.setdefault(weight, set()).add(getattr(use.metric, "order", 2))
        self._model = model
        # The weights of weight spaces that are ranked by their inputs.
        self._weights = {name: it for use in uses for name, it in use.parameters.items()}
        # By weight, one for each layer that has it: several for a tied weight.
        self._inputs = {
            weight: [InputSums(name, weight, it, [*orders], switch) for name, it in owners[weight]]
            for weight, orders in wanted.items()
        }
        self._of_all = dict[InputSums, Totals]()  # summed over processes, while an event is decided
        self._handles = list[RemovableHandle]()
        weakref.finalize(self, _remove, self._handles)  # an object that is gone leaves no hooks behind

    @property
    def hooks(self) -> list[InputSums]:
        """The hooks of all layers."""
        return [it for found in self._inputs.values() for it in found]

    @property
    def calls(self) -> int:
        """The number of calls of the layer that was called most often."""
        return max((int(it.totals.calls) for it in self.hooks), default=0)

    @property
    def described(self) -> list[tuple[str, list[Order], torch.Size]]:
        """Of every hook: its layer, its orders and the shape of its sums."""
        return [(it.name, list(it.orders), it.totals.sums.shape) for it in self.hooks]

    def collect(self) -> None:
        """Register the hooks."""
        modules = dict(self._model.named_modules())
        for it in self.hooks:
            self._handles.append(modules[it.name].register_forward_pre_hook(it, with_kwargs=True))

    def release(self) -> None:
        """Remove the hooks from the model. The sums can still be read."""
        _remove(self._handles)

    def reset(self) -> None:
        """Discard all sums."""
        for hook in self.hooks:
            hook.reset()

    def means(self, layer: Layer, order: Order) -> Tensor:
        """See `Statistics.mean_inputs`."""
        hooks = [
            (slices, it)
            for slices in layer.reader
            for it in self._inputs.get(slices.parameter, ())
            if slices.inputs(it.reads.axis, it.reads.groups) is not None
        ]
        if not hooks or any(order not in it.orders for _, it in hooks):
            raise without_data(f"the {len(layer)} channels of {layer.name!r}", "activation")
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

    def norms(self, name: str) -> Tensor:
        """See `Statistics.input_norms`."""
        weight = self._weights.get(name)
        hooks = self._inputs.get(weight, []) if weight is not None else []
        if weight is None or not hooks or any(2 not in it.orders for it in hooks):
            raise without_data(f"parameter {name!r}", "wanda")
        totals = [self._totals(it) for it in hooks]
        if not any(it.calls for it in totals):
            raise self._no_pass(hooks, f"the {weight.numel()} weights of {name!r}")
        norms = sum(
            (it.of(2) for it in totals[1:]), totals[0].of(2)
        ).sqrt()  # a tied weight multiplies the inputs of all its layers
        reads = hooks[0].reads
        if reads.axis == 0:
            return norms.reshape(-1, *[1] * (weight.ndim - 1))
        # Row r of a grouped convolution belongs to group r // (rows / groups), which reads a block of the features.
        by_row = norms.reshape(reads.groups, -1).repeat_interleave(weight.shape[0] // reads.groups, 0)
        return by_row.reshape(*by_row.shape, *[1] * (weight.ndim - 2))

    @contextmanager
    def summed(self, add: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """A context in which activations are those of all processes; `Pruner.step` decides an event in it.

        Args:
            add: Sums a vector over processes. All processes must call it with vectors of the same length.
        """
        hooks = self.hooks
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

    def _totals(self, it: InputSums) -> Totals:
        return self._of_all.get(it, it.totals)

    def state(self) -> list[dict[str, Any]]:
        """The sums of every hook, of this process."""
        return [
            {
                "layer": it.name,
                "orders": list(it.orders),
                "sums": it.totals.sums.clone(),
                "counts": [int(number) for number in (it.totals.values, it.totals.calls, it.totals.tried)],
            }
            for it in self.hooks
        ]

    def load(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a state, which fits these hooks."""
        for hook, it in zip(self.hooks, state, strict=True):
            hook.load(Totals(hook.orders, it["sums"], *(torch.tensor(number) for number in it["counts"])))

    def _no_pass(self, hooks: Sequence[InputSums], units: str) -> RankError:
        """The error about units whose readers were never called."""
        names, tried = ", ".join(repr(it.name) for it in hooks), max(int(self._totals(it).tried) for it in hooks)
        if tried:
            return RankError(
                f"Statistics: the input of {names} was NaN or infinite in all {tried} forward passes since the last "
                f"event, so {units} cannot be ranked by it. Find out where training diverged; nothing was pruned."
            )
        others = [int(it.calls) for found in self.hooks if (it := self._totals(found))]
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


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
