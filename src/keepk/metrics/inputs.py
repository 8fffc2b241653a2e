"""`InputSums`: sums over the inputs of a layer, collected by a forward hook.

The activation of a channel is read at the input of the layers that read the channel. There it is after the BatchNorm,
the activation function and the pooling that follow the layer which computes it. The sums are kept per input feature of
the reading layer, so one hook serves metrics for channels and for weights:

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from keepk.model.torch_internals import current_graph_task_id
from keepk.model.weight_norm import lengths_of

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
        tried: The same with the calls whose inputs were NaN or infinite, which are not counted.
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
        # abs().sum() writes a temporary, and is still several times as fast as vector_norm(1).
        found = dict[int, Tensor]()
        if 2 in self.orders:
            found[2] = wide.square().sum(others)
        if self.orders != (2,):
            sizes = wide.abs()
            found[1] = sizes.sum(others)  # also without order 1: sign() turns NaN into 0, so a count does not show it
            if 0 in self.orders:
                found[0] = sizes.sign_().sum(others)
        # A tensor, because bool() would wait for the device.
        counts = torch.stack([*found.values()]).isfinite().all().to(self._sums.device)
        parts = torch.stack([found[order] for order in self.orders]).to(self._sums)
        self._sums += torch.where(counts, parts, 0)
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


def no_hook(_module: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    """The hook that takes the place of an `InputSums` in copies of a module."""


def _make_no_hook() -> Any:
    return no_hook


def _is_recomputing() -> bool:
    """Whether a backward pass repeats a forward pass, as activation checkpointing does; it was counted before."""
    return not torch.compiler.is_compiling() and current_graph_task_id() != -1
