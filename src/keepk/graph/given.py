"""What was given in the place of a model or an example, in the words of a refusal."""

from inspect import signature

import torch
from torch import nn

from keepk.errors import TraceError
from keepk.graph.shell import Example


def no_model(given: object, place: str = "model") -> str:
    """What was given instead of a model, and what to give.

    >>> no_model("net"), no_model(nn.ReLU)
    ('got str as the model. Give a torch.nn.Module.', 'got the class ReLU. Give ReLU(), a model.')
    """
    if isinstance(given, type) and issubclass(given, nn.Module):
        return f"got the class {given.__name__}. Give {given.__name__}(), a model."
    return f"got {type(given).__name__} as the {place}. Give a torch.nn.Module."


def refuse_scripted(verb: str, model: nn.Module) -> None:
    """Refuse a model that is TorchScript, or has a part that is: its forward is no Python that could be watched."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = f"module {path!r}" if path else "the model"
            raise TraceError(
                f"{verb}: {where} is TorchScript ({type(module).__name__}). Give the nn.Module as it was before "
                f"torch.jit.script or torch.jit.trace, and compile it afterwards."
            )


def is_shape(example: Example) -> bool:
    """Whether an example is the shape of a tensor rather than a tensor.

    >>> is_shape(Example.of((2, 3, 8, 8)))
    True
    """
    return bool(example.arguments) and all(isinstance(argument, int) for argument in example.arguments)


def likely_slip(model: nn.Module, example: Example) -> str:
    """What to add where forward failed on a tuple that was hardly meant as several arguments; otherwise nothing."""
    if is_shape(example) or (len(example.arguments) > 1 and _takes_one(model)):
        return " A tuple is several arguments: give the tensor itself, not its shape and not the labels."
    return ""


def _takes_one(model: nn.Module) -> bool:
    try:
        signature(model.forward).bind(None)
    except (TypeError, ValueError):
        return False
    return True
