"""Checks of the model and the example that a user passes, and their error messages."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor, nn

from keepk.errors import KeepkError, TraceError
from keepk.model.torch_internals import tree_map
from keepk.model.values import LARGEST, keep_value_beside


@dataclass(frozen=True)
class Example:
    """The positional and keyword arguments of forward."""

    arguments: tuple[Any, ...]
    by_name: dict[str, Any]

    @staticmethod
    def of(given: object) -> "Example":
        """An example from a tensor, a tuple of positional arguments, or a dict of keyword arguments."""
        if isinstance(given, Tensor):
            return Example((given,), {})
        if isinstance(given, tuple | list):
            return Example(tuple(given), {})
        if isinstance(given, Mapping):
            return Example((), dict(given))
        raise TraceError(
            f"example: got {type(given).__name__}. Pass a tensor, a tuple of positional arguments, or a dict of "
            f"keyword arguments, as the model's forward takes them."
        )

    def on(self, device: torch.device | None) -> "Example":
        """A copy with all tensors on a device; None keeps each tensor's device.

        On the meta device, small tensors carry their values with them, so that masks can be read.
        """

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if device is None:
                return value.detach().clone()
            copied = value.detach().to(device)
            if copied.is_meta and value.numel() <= LARGEST:
                keep_value_beside(copied, value.detach().to("cpu", copy=True) if not value.is_meta else value)
            return copied

        return Example(tree_map(moved, self.arguments), tree_map(moved, self.by_name))


# Modules that replace float modules in quantisation, or are inserted beside them. Stubs and fused float modules are not
# listed, since they still compute in floats.
QUANTISED = (
    "torch.ao.nn.quantized",
    "torch.ao.nn.qat",
    "torch.ao.nn.intrinsic.qat",
    "torch.ao.nn.intrinsic.quantized",
    "torch.ao.quantization.fake_quantize",
    "torch.ao.quantization.observer",
    "torchao.quantization",
)

TrainMode = Literal["check", "accept"]
ValueBranches = Literal["check", "accept"]


@dataclass(frozen=True)
class TraceInputs:
    """The inputs that a trace runs forward on, and the checks that it may skip; see `keepk.trace`.

    Attributes:
        examples: One or more inputs of forward.
        training: Inputs for train mode; empty if they are the same.
        train_mode: "check" refuses a forward that fails in train mode, "accept" records it as unknown.
        value_branches: "check" refuses a path that no example takes, "accept" records it as unknown.
        reports: Record unknown paths in `Graph.unknown` instead of refusing them.
    """

    examples: tuple[Example, ...]
    training: tuple[Example, ...] = ()
    train_mode: TrainMode = "check"
    value_branches: ValueBranches = "check"
    reports: bool = False

    @staticmethod
    def of(
        example: Any,
        examples: Sequence[Any] | None = None,
        training_example: Any = None,
        train_mode: TrainMode = "check",
        value_branches: ValueBranches = "check",
    ) -> "TraceInputs":
        """Check the arguments of `keepk.trace` and collect them.

        Raises:
            TraceError: If no example is given, or an argument has the wrong type or value.
        """
        for name, value, known in (
            ("train_mode", train_mode, ("check", "accept")),
            ("value_branches", value_branches, ("check", "accept")),
        ):
            if value not in known:
                raise TraceError(f"{name}={value!r}: unknown. Pass {known[0]!r} or {known[1]!r}.")
        # A tensor is a sequence of rows and a dict a container of names: neither is a list of examples.
        if examples is not None and (isinstance(examples, Tensor | Mapping) or not isinstance(examples, Sequence)):
            raise TraceError(
                f"examples: got {type(examples).__name__}. Pass a list, each entry a tensor, a tuple of positional "
                f"arguments or a dict of keyword arguments."
            )
        listed = [*([] if example is None else [example]), *(examples or ())]
        training = () if training_example is None else (Example.of(training_example),)
        if not listed:
            raise TraceError(
                "example: got NoneType. Pass a tensor, a tuple of positional arguments, or a dict of keyword "
                "arguments, as the model's forward takes them, such as one batch of the training data."
            )
        return TraceInputs(tuple(map(Example.of, listed)), training, train_mode, value_branches)


def not_a_model(given: object, place: str = "model") -> str:
    """The part of an error that says what was passed instead of a model, and what to pass.

    >>> not_a_model("net"), not_a_model(nn.ReLU)
    ('got str as the model. Pass a torch.nn.Module.', 'got the class ReLU. Pass ReLU(), a model.')
    """
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f"got the class {given.__name__}. Pass {given.__name__}(), a model."
    return f"got {type(given).__name__} as the {place}. Pass a torch.nn.Module."


def refuse_scripted(verb: str, model: nn.Module) -> None:
    """Refuse a model that is, or contains, TorchScript, because the trace can only follow Python."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"module {path!r}" if path else "the model"
            raise TraceError(
                f"{verb}: {where} is TorchScript ({type(module).__name__}). Pass the nn.Module as it was before "
                f"torch.jit.script or torch.jit.trace, and compile it afterwards."
            )


def quantised_tensor(tensor: torch.Tensor) -> bool:
    """Whether a parameter is a tensor subclass that stores quantised values, such as those of torchao."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    sharded = hasattr(tensor, "device_mesh")  # a DTensor
    return not plain and not sharded and hasattr(type(tensor), "__tensor_flatten__")


def refuse_quantised(model: nn.Module, error: type[KeepkError], names: Container[str] | None = None) -> None:
    """Refuse quantised parameters.

    Args:
        model: The model.
        error: The class of the error.
        names: The parameters to check; by default all of them.
    """
    for name, parameter in model.named_parameters():
        if quantised_tensor(parameter) and (names is None or name in names):
            raise error(
                f"parameter {name!r} is quantised ({type(parameter).__name__}), so it can be neither ranked nor cut. "
                f"Prune first and quantise afterwards: pass the model as it was before quantisation."
            )


def quantised_module(model: nn.Module) -> str:
    """The first module that is quantised or prepared for quantisation, described for an error; otherwise empty.

    >>> quantised_module(nn.Sequential(nn.Linear(2, 2)))
    ''
    """
    for path, module in model.named_modules():
        if type(module).__module__.startswith(QUANTISED):
            return (
                f"module {path!r} is quantised or prepared for it ({type(module).__module__}.{type(module).__name__})"
            )
    return ""


def is_shape(example: Example) -> bool:
    """Whether an example is the shape of a tensor rather than a tensor: a tuple of ints.

    >>> is_shape(Example.of((2, 3, 8, 8)))
    True
    """
    return bool(example.arguments) and all(isinstance(argument, int) for argument in example.arguments)


def likely_slip(model: nn.Module, example: Example) -> str:
    """A hint for the error when forward failed on a tuple that was probably meant as one argument; empty otherwise."""
    if is_shape(example) or (len(example.arguments) > 1 and _takes_one(model)):
        return " A tuple is several arguments: pass the tensor itself, not its shape and not the labels."
    return ""


def _takes_one(model: nn.Module) -> bool:
    """Whether forward can be called with a single argument."""
    try:
        signature(model.forward).bind(None)
    except (TypeError, ValueError):
        return False
    return True
