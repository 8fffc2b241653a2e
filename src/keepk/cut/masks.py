"""Masks: keep pruned weights and their optimizer state at zero, through the optimizer's public hooks.

`Held.zero` runs after every optimizer step and zeroes pruned weights again, because momentum, weight decay and foreach
kernels update masked weights too.

Optimizer state follows the masks. State of the parameter's shape (momentum, Adam's moments) is zeroed entry by entry.
Counters are left alone. The flat history of LBFGS has no entry per weight, so it is cleared. Any other state is refused
by name, before anything is pruned. A wrapper around an optimizer that has no state of its own is looked through.

Zeroing runs at memory bandwidth. On a CPU, ``masked_fill_`` handles one entry at a time. Instead, a mask is widened to
words of the weights' size, with all bits set where a weight is alive, and combined with the bits of the weights by a
bitwise and. That is vectorized, gives exactly 0.0, and clears NaN too, which a product with 0 would not. Widened masks
are as large as the weights, so they are stored only for small networks, where the time to widen them matters; masks of
larger networks are widened block by block in a core's cache. On other devices ``masked_fill_`` is faster: it is one
kernel and reads a quarter of the bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from keepk.errors import OptimizerError
from keepk.model.sharded import local, same_sharding

COUNTER = "step"  # recognised by torch's name for it, because for a 0-dim parameter it has the parameter's shape


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
                got += ", not sharded like it" if getattr(value, "shape", None) == parameter.shape else ""
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


def unwrapped_optimizers(given: Iterable[Any]) -> list[Any]:
    """The optimizers inside wrappers that have no state of their own (`unwrap_optimizer`), each once."""
    return list({id(inner): inner for inner in map(unwrap_optimizer, given)}.values())


def unwrap_optimizer(given: Any) -> Any:
    """The optimizer inside a wrapper that has no state of its own, such as accelerate's, Fabric's and Lightning's.

    Such a wrapper only forwards ``step()``: its state and its parameter groups are those of the inner optimizer, which
    runs the hooks. Anything else is returned as it is.
    """
    if not isinstance(given, torch.optim.Optimizer):
        return given
    for _, inner in _inside(given):
        shared = given.state is inner.state and given.param_groups is inner.param_groups
        if shared and not any(isinstance(value, Tensor) for value in vars(given).values()):
            return unwrap_optimizer(inner)
    return given


def refuse_wrapping(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer with state that wraps another one, unless both were passed: one state would not be pruned."""
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
        raise OptimizerError(f"optimizer: {_not_an_optimizer(optimizer)}")
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for parameter in parameters):
        raise OptimizerError(
            f"optimizer {type(optimizer).__name__}: holds no parameter of the model. "
            f"Build it from the parameters of this model object, after any copy or move."
        )


def _not_an_optimizer(given: object) -> str:
    """The part of an error about an object that is not an optimizer: its type, and what to pass instead."""
    kind = type(given).__name__
    if isinstance(given, type) and issubclass(given, torch.optim.Optimizer):
        return f"got the class {given.__name__}. Pass {given.__name__}(model.parameters(), ...), or several optimizers."
    if isinstance(given, nn.Module | nn.Parameter):
        return f"got {kind}, a part of the model. Pass the torch.optim.Optimizer that trains it, or several."
    inner = getattr(given, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        what = "a learning-rate scheduler" if isinstance(given, LRScheduler) else "which holds an optimizer"
        return (
            f"got {kind}, {what}. Pass the torch.optim.Optimizer itself, which is its .optimizer "
            f"({type(inner).__name__})."
        )
    return f"got {kind}. Pass a torch.optim.Optimizer, or several."


def _follows(key: str, value: Any, parameter: nn.Parameter) -> bool:
    if isinstance(value, Tensor):
        if key == COUNTER or value.numel() == 1:
            return True
        return value.shape == parameter.shape and same_sharding(value, parameter)
    # A plain number applies to the whole parameter; a container may hold anything.
    return not isinstance(value, list | tuple | dict)


BLOCK = 1 << 20  # entries; larger blocks do not fit in the cache, smaller ones cost more thread synchronization
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def zero_dead(tensors: Sequence[Tensor], dead: Tensor) -> None:
    """Zero the dead entries of tensors that have the mask's shape.

    >>> weights = torch.tensor([1.0, float("nan"), 3.0])
    >>> zero_dead([weights], torch.tensor([True, True, False]))
    >>> weights
    tensor([0., 0., 3.])
    """
    by_word: dict[torch.dtype, list[Tensor]] = {}  # a block of the mask is widened once for all tensors of one size
    for tensor in tensors:
        if takes_words(tensor, dead):
            by_word.setdefault(WORDS[tensor.element_size()], []).append(tensor)
        else:
            tensor.masked_fill_(dead.to(tensor.device), 0)
    rows = max(1, BLOCK * len(dead) // max(1, dead.numel())) if by_word else 0
    for word, several in by_word.items():
        for start in range(0, len(dead), rows):
            block = slice(start, start + rows)
            alive = alive_words(dead[block], word)
            for tensor in several:
                tensor[block].view(word).bitwise_and_(alive)


def takes_words(tensor: Tensor, dead: Tensor) -> bool:
    """Whether a tensor can be zeroed by words: it and the mask are on a CPU, and its elements have a word's size."""
    cpu = tensor.device.type == dead.device.type == "cpu"
    return cpu and dead.dim() > 0 and tensor.element_size() in WORDS


def alive_words(dead: Tensor, word: torch.dtype) -> Tensor:
    """The mask widened to words: all bits set where alive, none where dead.

    >>> alive_words(torch.tensor([True, False]), torch.int32)
    tensor([ 0, -1], dtype=torch.int32)
    """
    return dead.view(torch.int8).to(word).sub_(1)  # True is 1, which becomes 0; False is 0, which becomes -1: all bits


Masks = dict[str, Tensor]  # by parameter
WIDENED = 1 << 22  # the most weights for which widened masks are stored; in float32 they take 16 MB


class Held:
    """A parameter with its mask, ready to be applied after every step.

    The hook runs in every training step, so the view of the weights is made once and reused until their address
    changes. The view keeps their memory alive, so the address cannot be reused for other memory. The mask and the view
    of a sharded parameter are those of its local part.
    """

    def __init__(self, parameter: nn.Parameter, dead: Tensor, words: Tensor | None) -> None:
        self._parameter, self._dead, self._words = parameter, dead, words
        self._view, self._address = local(parameter), -1

    @property
    def outgrown(self) -> bool:
        """Whether the parameter was cut after the mask was made."""
        return local(self._parameter).shape != self._dead.shape

    @property
    def revived(self) -> int:
        """How many dead weights are not zero."""
        return int(count_revived(self._parameter, self._dead))

    def zero(self) -> None:
        """Zero the dead weights."""
        weights = local(self._parameter)
        if weights.data_ptr() != self._address:
            self._look_up(weights)
        if self._words is None:
            zero_dead([weights], self._dead)
        else:
            self._view.bitwise_and_(self._words)

    def zero_state(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Zero the optimizer state of the dead weights."""
        states = (it for optimizer in optimizers for it in state_per_weight(optimizer, self._parameter))
        zero_dead([local(it) for it in states], self._dead)

    def _look_up(self, weights: Tensor) -> None:
        """Make the mask and the view again for weights that were cast or moved."""
        self._address, self._dead = weights.data_ptr(), self._dead.to(weights.device)
        words = self._words
        if words is not None and (weights.element_size(), weights.device) != (words.element_size(), words.device):
            self._words = _widened(weights, self._dead)
        self._view = weights if self._words is None else weights.view(self._words.dtype)


def count_revived(weights: Tensor, dead: Tensor) -> Tensor:
    """How many dead entries are not 0.0, as a scalar tensor on the weights' device; of a sharded parameter, locally.

    The largest temporary is one mask. The caller decides when to read the result, which waits for the device.

    >>> int(count_revived(torch.tensor([1.0, -0.0, float("nan"), 2.0]), torch.tensor([False, True, True, True])))
    2
    """
    here = local(weights)
    return here.ne(0).logical_and_(dead.to(here.device)).count_nonzero()


def held(pruned: Iterable[tuple[nn.Parameter, Tensor]]) -> list[Held]:
    """Prepare masks, given as (parameter, dead) pairs, to be applied after every step."""
    pairs = list(pruned)
    small = sum(dead.numel() for _, dead in pairs) <= WIDENED
    return [Held(parameter, dead, _widened(local(parameter), dead) if small else None) for parameter, dead in pairs]


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
