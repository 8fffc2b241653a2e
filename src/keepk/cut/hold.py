"""Holding masks and freezing parameters through the optimizer's public hooks.

`Held.zero` runs after every optimizer step and zeroes pruned weights again: momentum, weight decay and foreach kernels
update a weight whatever its mask says.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from keepk.cut.optimizer_state import state_per_weight
from keepk.cut.zero import WORDS, alive_words, takes_words, zero_dead

Masks = dict[str, Tensor]  # by parameter
WIDENED = 1 << 22  # weights, up to which widened masks are kept; in float32 they take 16 MB


class Held:
    """A parameter with its mask, ready to be applied after every step.

    The hook runs in every training step, so the view of the weights is made once and used until their address changes.
    The view keeps their memory alive, so that the same address cannot come to mean different memory.
    """

    def __init__(self, parameter: nn.Parameter, dead: Tensor, words: Tensor | None) -> None:
        self._parameter, self._dead, self._words = parameter, dead, words
        self._view, self._address = parameter.detach(), -1

    @property
    def outgrown(self) -> bool:
        """Whether the parameter was cut after the mask was made."""
        return self._parameter.shape != self._dead.shape

    @property
    def revived(self) -> int:
        """How many dead weights are not zero."""
        return int(count_revived(self._parameter, self._dead))

    def zero(self) -> None:
        """Zero the dead weights."""
        if self._parameter.data_ptr() != self._address:
            self._look_up()
        if self._words is None:
            zero_dead([self._parameter.detach()], self._dead)
        else:
            self._view.bitwise_and_(self._words)

    def zero_state(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Zero the optimizer state of the dead weights."""
        zero_dead([it for optimizer in optimizers for it in state_per_weight(optimizer, self._parameter)], self._dead)

    def _look_up(self) -> None:
        """Make the mask and the view again for weights that were cast or moved."""
        weights = self._parameter.detach()
        self._address, self._dead = weights.data_ptr(), self._dead.to(weights.device)
        words = self._words
        if words is not None and (weights.element_size(), weights.device) != (words.element_size(), words.device):
            self._words = _widened(weights, self._dead)
        self._view = weights if self._words is None else weights.view(self._words.dtype)


def count_revived(weights: Tensor, dead: Tensor) -> Tensor:
    """How many dead entries are not 0.0, as a scalar tensor on the weights' device.

    The largest temporary is one mask. Reading the result waits for the device, so that is left to the caller.

    >>> int(count_revived(torch.tensor([1.0, -0.0, float("nan"), 2.0]), torch.tensor([False, True, True, True])))
    2
    """
    return weights.detach().ne(0).logical_and_(dead.to(weights.device)).count_nonzero()


def held(pruned: Iterable[tuple[nn.Parameter, Tensor]]) -> list[Held]:
    """Prepare masks, given as (parameter, dead) pairs, for being applied in many steps."""
    pairs = list(pruned)
    small = sum(dead.numel() for _, dead in pairs) <= WIDENED
    return [Held(parameter, dead, _widened(parameter, dead) if small else None) for parameter, dead in pairs]


def _widened(weights: Tensor, dead: Tensor) -> Tensor | None:
    """The mask widened to the weights' element size; None where `masked_fill_` is used instead."""
    return alive_words(dead, WORDS[weights.element_size()]) if takes_words(weights, dead) else None


def without_updates(
    frozen: Iterable[nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an optimizer step that does not update the `frozen` parameters.

    Args:
        frozen: The parameters.
        args: The positional arguments of the optimizer's step hook; the first is the optimizer.
        kwargs: The keyword arguments.

    Returns:
        The arguments, with a closure replaced by one that drops the gradients of the frozen parameters.
    """
    # An optimizer skips a parameter without a gradient: no update, weight decay or momentum. Setting requires_grad to
    # False would not be enough, since an existing gradient would still be applied.
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
