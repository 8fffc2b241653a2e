"""Masks held and parameters frozen, through the optimizer's public hooks."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from keepk.cut.optimizer_state import zero_state


@torch.no_grad()
def silence(pruned: Iterable[tuple[nn.Parameter, Tensor]], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Zero the dead weights and their optimizer state."""
    optimizers = tuple(optimizers)
    for parameter, dead in pruned:
        parameter.masked_fill_(dead, 0)
        for optimizer in optimizers:
            zero_state(optimizer, parameter, dead)


def without_updates(
    frozen: Iterable[nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an optimizer step that leaves `frozen` alone.

    A parameter without a gradient gets no update, no weight decay and no momentum. Gradients that a closure will make
    are dropped after each of its calls.
    """
    frozen = tuple(frozen)
    _drop_gradients(frozen)
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _dropping(frozen, kwargs["closure"])}
    if len(args) > 1 and callable(args[1]):  # args[0] is the optimizer itself
        return (args[0], _dropping(frozen, args[1]), *args[2:]), kwargs
    return args, kwargs


def _dropping(frozen: tuple[nn.Parameter, ...], closure: Callable[[], Any]) -> Callable[[], Any]:
    def without_frozen_gradients() -> Any:
        loss = closure()
        _drop_gradients(frozen)
        return loss

    return without_frozen_gradients


def _drop_gradients(frozen: tuple[nn.Parameter, ...]) -> None:
    for parameter in frozen:
        parameter.grad = None
