"""Masks held and parameters frozen, through the optimizer's public hooks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keepk.cut.optimizer_state import state_per_weight
from keepk.cut.zero import WORDS, alive_words, zero_by_words, zero_dead

WIDENED = 1 << 22  # weights; their widened masks take 16 MB in float32


@dataclass(frozen=True)
class Held:
    """A parameter with its mask, and the mask in the form that is fastest to apply after every step."""

    parameter: nn.Parameter
    dead: Tensor
    words: Tensor | None

    def zero(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Zero the dead weights and their optimizer state."""
        tensors = [self.parameter.detach()]
        for optimizer in optimizers:
            tensors += state_per_weight(optimizer, self.parameter)
        words = self.words
        if words is not None and all(_fits(tensor, words) for tensor in tensors):
            zero_by_words(tensors, words)
        else:
            zero_dead(tensors, self.dead)


def held(pruned: Iterable[tuple[nn.Parameter, Tensor]]) -> list[Held]:
    """Masks made ready for many steps."""
    pairs = list(pruned)
    small = sum(dead.numel() for _, dead in pairs) <= WIDENED
    return [
        Held(parameter, dead, alive_words(dead, WORDS[parameter.element_size()]) if small and dead.dim() else None)
        for parameter, dead in pairs
    ]


def _fits(tensor: Tensor, words: Tensor) -> bool:
    return tensor.element_size() == words.element_size() and tensor.device == words.device


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
