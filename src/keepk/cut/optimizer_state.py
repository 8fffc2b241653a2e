"""Optimizer state follows the masks: the state of a pruned weight is zero.

State of the parameter's shape (momentum, Adam's moments) is zeroed entry by entry. Counters are left alone. Any other
state has no entry per weight: LBFGS keeps one flat history, which is known and restarted; everything else is refused by
name, before anything is pruned.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from keepk.errors import OptimizerError

COUNTER = "step"  # torch's name for it; told apart by name, because for a 0-dim parameter it has the parameter's shape


def state_per_weight(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    """The optimizer's state tensors that have one entry per weight of the parameter."""
    state = optimizer.state.get(parameter)
    if not state or isinstance(optimizer, torch.optim.LBFGS):
        return []
    return [
        value
        for key, value in state.items()
        if key != COUNTER and isinstance(value, Tensor) and value.shape == parameter.shape
    ]


def restart_flat_history(optimizer: torch.optim.Optimizer) -> None:
    """Clear the history of LBFGS, which mixes all weights in one vector; other optimizers are left alone."""
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.state.clear()
        optimizer._numel_cache = None  # it counts its weights only once


def flat_history(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Take a snapshot of the history of LBFGS; returns the function that restores it."""
    if not isinstance(optimizer, torch.optim.LBFGS):
        return lambda: None
    state, count = dict(optimizer.state), optimizer._numel_cache

    def restore() -> None:
        optimizer.state.update(state)
        optimizer._numel_cache = count

    return restore


def refuse_foreign_state(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Refuse state of these parameters that has no entry per weight.

    Args:
        optimizer: The optimizer.
        names: The parameters that will be pruned, with their names for the error.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return
    for parameter, name in names.items():
        for key, value in (optimizer.state.get(parameter) or {}).items():
            if not _follows(key, value, parameter):
                got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise OptimizerError(
                    f"optimizer {type(optimizer).__name__}: its state {key!r} of {name!r} is {got}, but "
                    f"the parameter has shape {tuple(parameter.shape)}, so the state of a pruned weight cannot be "
                    f"zeroed. Use an optimizer with state per weight, such as SGD, Adam or AdamW."
                )


def refuse_factored(optimizer: torch.optim.Optimizer) -> None:
    """Refuse Adafactor, by its class: its factored state appears only at the first step, which is too late."""
    if "Adafactor" in {base.__name__ for base in type(optimizer).__mro__}:
        raise OptimizerError(
            f"optimizer {type(optimizer).__name__}: keeps its second moments per row and column, so the state of a "
            f"pruned weight cannot be zeroed. Use an optimizer with state per weight, such as SGD, Adam or AdamW."
        )


def refuse_wrapping(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that wraps another one which was not passed too: the inner state would not be pruned."""
    for outer in optimizers:
        for attribute, inner in _inside(outer):
            if not any(inner is it for it in optimizers):
                raise OptimizerError(
                    f"optimizer {type(outer).__name__}: wraps {type(inner).__name__} as {attribute!r}, whose state "
                    f"would not be pruned. Pass the wrapped optimizer, optimizer.{attribute}; or both, if the outer "
                    f"one has state too."
                )


def _inside(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    for attribute, value in vars(optimizer).items():
        for place, held in enumerate(value if isinstance(value, list | tuple) else [value]):
            if isinstance(held, torch.optim.Optimizer):
                yield attribute if held is value else f"{attribute}[{place}]", held


def refuse_stranger(optimizer: object, parameters: Iterable[nn.Parameter]) -> None:
    """Refuse anything but an optimizer, and an optimizer that holds none of these parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OptimizerError(f"optimizer: {_no_optimizer(optimizer)}")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in parameters):
        raise OptimizerError(
            f"optimizer {type(optimizer).__name__}: holds no parameter of the model. "
            f"Build it from this very model's parameters, after any copy or move."
        )


def _no_optimizer(given: object) -> str:
    """Describe an object that was passed as the optimizer, and say what to pass."""
    kind = type(given).__name__
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return f"got the class {given.__name__}. Give {given.__name__}(model.parameters(), ...), or several optimizers."
    if isinstance(given, nn.Module | nn.Parameter):
        return f"got {kind}, a part of the model. Give the torch.optim.Optimizer that trains it, or several."
    inner = getattr(given, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        what = "a learning-rate scheduler" if isinstance(given, LRScheduler) else "which holds an optimizer"
        return (
            f"got {kind}, {what}. Give the torch.optim.Optimizer itself, which is its .optimizer "
            f"({type(inner).__name__})."
        )
    return f"got {kind}. Give a torch.optim.Optimizer, or several."


def _follows(key: str, value: Any, parameter: nn.Parameter) -> bool:
    if isinstance(value, Tensor):
        return key == COUNTER or value.numel() == 1 or value.shape == parameter.shape
    # Plain numbers hold for the whole parameter; a container may hold anything.
    return not isinstance(value, list | tuple | dict)
