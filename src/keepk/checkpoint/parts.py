"""The parts of a checkpoint: for each kind of object, how its state is captured, checked and restored.

`check` refuses a state that does not fit and changes nothing. It is called for all parts before the first `restore`,
which then does not check again.

Learning-rate schedulers need a special case: a LambdaLR keeps functions in its state_dict, which a file cannot store
without pickle. A checkpoint has only their names, and restoring uses the functions of the scheduler that the user has
rebuilt.

A training loop draws from several random number generators, whose states are read and set together (`rng_state`).
"""

import copy
import random
from collections import OrderedDict
from collections.abc import Mapping
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.masks import unwrap_optimizer
from keepk.errors import CheckpointError
from keepk.model.edits import Undo
from keepk.model.names import unwrap
from keepk.model.sharded import as_sharded, is_sharded, local
from keepk.run.channels import nothing
from keepk.run.distributed import Exchange
from keepk.storage.codec import unpackable


class Part(Protocol):
    """One object whose state is in a checkpoint."""

    def capture(self) -> Any:
        """The current state: plain values, and the live tensors without copies."""

    def check(self, saved: Any) -> None:
        """Raise `CheckpointError` if the saved state does not fit the object."""

    def restore(self, saved: Any) -> None:
        """Load the saved state into the object."""


class StatefulPart:
    """Any object with `state_dict` and `load_state_dict`, such as a scaler or a user's EMA."""

    def __init__(self, name: str, stateful: Any) -> None:
        self._name, self._stateful = name, stateful

    def capture(self) -> Any:
        """See `Part`."""
        return self._stateful.state_dict()

    def check(self, saved: Any) -> None:
        """See `Part`."""
        # A disabled GradScaler has an empty state and silently ignores any other.
        if self._name == "scaler" and bool(saved) != bool(self._stateful.state_dict()):
            here, there = ("disabled", "enabled") if saved else ("enabled", "disabled")
            raise CheckpointError(f"scaler: is {here} here and {there} in the checkpoint. Build the same one.")

    def restore(self, saved: Any) -> None:
        """See `Part`."""
        self._stateful.load_state_dict(saved)


class PrunerPart:
    """A `Pruner`, which checks a state itself before it changes anything."""

    def __init__(self, _: str, pruner: Any) -> None:
        self._pruner = pruner
        self._forget_masks: Undo = nothing
        self._exchange: Exchange | None = None

    def capture(self) -> Any:
        """See `Part`."""
        return self._pruner.state_dict()

    def check(self, saved: Any) -> None:
        """Do nothing: `take_shape` was called before, and refuses a state that does not fit."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, the parameters that have masks in a state."""
        found: dict[str, nn.Parameter] = self._pruner._session.weights.parameters
        return found

    def take_shape(self, saved: Any, wrap: Any, exchange: Exchange) -> Undo:
        """Cut the model to its saved shapes, so that the other states fit.

        Returns:
            A function that undoes this, after undoing the masks if they were restored.
        """
        self._exchange = exchange
        undo: Undo = self._pruner._session.take_shape(saved, wrap, exchange)

        def take_back() -> None:
            self._forget_masks()
            undo()

        return take_back

    def restore(self, saved: Any) -> None:
        """See `Part`."""
        self._forget_masks = self._pruner._session.take_masks(saved, self._exchange)


class ModulePart:
    """A module, under the names that it has without DDP and torch.compile wrappers."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, unwrap(module)

    def capture(self) -> Any:
        """See `Part`."""
        state = self._module.state_dict()
        return {
            "state": {_plain_name(self._module, key): value for key, value in state.items()},
            "metadata": {_plain_name(self._module, key): value for key, value in _metadata(state).items()},
        }

    def check(self, saved: Any) -> None:
        """See `Part`."""
        own, theirs = self.capture()["state"], saved["state"]
        for these, those, what in ((own, theirs, "missing from the checkpoint"), (theirs, own, "not here")):
            if strange := [key for key in these if key not in those]:
                raise CheckpointError(
                    f"{self._name}: {', '.join(strange[:3])} ({len(strange)} in total) {what}. Build the same model."
                )
        versions = [it.get("version") for it in saved["metadata"].values()]
        if not all(isinstance(version, int | None) for version in versions):
            raise CheckpointError(f"{self._name}: its metadata is not that of a module. Use another checkpoint.")
        for key, tensor in own.items():
            if isinstance(tensor, Tensor) and not key.endswith("_extra_state"):
                _refuse_other_tensor(f"{self._name}: {key!r}", tensor, theirs[key])

    def restore(self, saved: Any) -> None:
        """See `Part`."""
        own = self._module.state_dict()
        state = OrderedDict((key, saved["state"][_plain_name(self._module, key)]) for key in own)
        metadata = {key: saved["metadata"].get(_plain_name(self._module, key), {}) for key in _metadata(own)}
        state._metadata = metadata  # type: ignore[attr-defined]  # torch keeps module versions there
        self._module.load_state_dict(state)


class OptimizerPart:
    """An optimizer, without wrappers, whose state keeps its saved dtype; torch would cast it to the parameter's."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name, self._optimizer = name, unwrap_optimizer(optimizer)

    def capture(self) -> Any:
        """See `Part`."""
        shapes = [[list(p.shape) for p in group["params"]] for group in self._optimizer.param_groups]
        return {
            "class": type(self._optimizer).__qualname__,
            "shapes": shapes,
            "state": self._optimizer.state_dict(),
        }

    def targets(self) -> dict[tuple[Any, ...], Tensor]:
        """By the keys that lead to a state tensor of a parameter in what `capture` returns: that parameter."""
        packed = self._optimizer.state_dict()
        ids = chain.from_iterable(group["params"] for group in packed["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        return {("state", "state", key): parameter for key, parameter in zip(ids, parameters, strict=True)}

    def check(self, saved: Any) -> None:
        """See `Part`."""
        own = self.capture()
        refuse_other_class(self._name, saved["class"], own["class"])
        sizes = [[len(group) for group in shapes] for shapes in (own["shapes"], saved["shapes"])]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"{self._name}: has groups of {sizes[0]} parameters here and of {sizes[1]} in the checkpoint. "
                f"Build it from the same parameters in the same groups."
            )
        pairs = zip(chain(*own["shapes"]), chain(*saved["shapes"]), strict=True)
        for index, (here, there) in enumerate(pairs):
            if here != there:
                raise CheckpointError(
                    f"{self._name}: parameter {index} has shape {tuple(here)} here and {tuple(there)} in the "
                    f"checkpoint. Build it from the parameters in the same order."
                )

    def restore(self, saved: Any) -> None:
        """See `Part`."""
        groups = zip(saved["state"]["param_groups"], self._optimizer.param_groups, strict=True)
        state = {**saved["state"], "param_groups": [_beside(theirs, own) for theirs, own in groups]}
        self._optimizer.load_state_dict(state)
        ids = chain.from_iterable(group["params"] for group in state["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
        for key, parameter in zip(ids, parameters, strict=True):
            if key in state["state"]:
                loaded = self._optimizer.state[parameter]
                self._optimizer.state[parameter] = _uncast(state["state"][key], loaded)


class GeneratorPart:
    """A `torch.Generator`, such as a sampler's."""

    def __init__(self, name: str, generator: torch.Generator) -> None:
        self._name, self._generator = name, generator

    def capture(self) -> Any:
        """See `Part`."""
        return {"device": self._generator.device.type, "state": self._generator.get_state()}

    def check(self, saved: Any) -> None:
        """See `Part`."""
        own = self.capture()
        if saved["device"] != own["device"] or saved["state"].shape != own["state"].shape:
            raise CheckpointError(
                f"{self._name}: is on device {own['device']} here and on {saved['device']} in the checkpoint. "
                f"Make it on the same device."
            )

    def restore(self, saved: Any) -> None:
        """See `Part`."""
        self._generator.set_state(saved["state"])


def host_copy(tree: Any) -> Any:
    """A copy of a state on the host, because a GPU may not have room for a second one."""
    if isinstance(tree, Tensor) and is_sharded(tree):
        return as_sharded(local(tree).clone(), tree)
    if isinstance(tree, Tensor):
        return tree if unpackable(tree) else tree.detach().to("cpu", copy=True)  # `check` refuses unpackable tensors
    if type(tree) in (list, tuple):
        return type(tree)(host_copy(item) for item in tree)
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, host_copy(value)) for key, value in tree.items())
    return copy.deepcopy(tree)


def _metadata(state: Any) -> dict[str, Any]:
    return getattr(state, "_metadata", {})


def _plain_name(module: nn.Module | None, key: str) -> str:
    """A name in a state_dict without the components that lead into a wrapper, at any depth of the model."""
    kept = []
    for step in key.split("."):
        if module is None or unwrap(module) is module:
            kept.append(step)
        module = module._modules.get(step) if module is not None else None
    return ".".join(kept)


def _refuse_other_tensor(where: str, own: Tensor, saved: Any) -> None:
    if not is_sharded(own) and (reason := unpackable(own)):
        raise CheckpointError(f"{where}: is {reason}")
    if own.shape != saved.shape or own.dtype != saved.dtype:
        raise CheckpointError(
            f"{where} is {tuple(own.shape)}, {own.dtype} here and {tuple(saved.shape)}, {saved.dtype} in the "
            f"checkpoint. Build the same model; if the run removes channels, pass its pruner= too, which cuts the "
            f"model first."
        )


def refuse_other_class(name: str, saved: str, own: str) -> None:
    """Refuse the state of an object of another class, such as SGD's for an Adam."""
    if saved != own:
        raise CheckpointError(f"{name}: is a {own} here and a {saved} in the checkpoint. Build the same one.")


def _beside(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A saved param group with its tensors moved to the devices that the optimizer's own group uses.

    For example, the learning rate is a tensor on the GPU if a CUDA graph reads it.
    """
    both = {key: own[key].device for key in own if isinstance(own[key], Tensor)}
    return {k: v.to(both[k]) if k in both and isinstance(v, Tensor) else v for k, v in saved.items()}


def _uncast(saved: Any, loaded: Any) -> Any:
    """The saved state in its own dtype, on the devices to which torch moved it.

    `Optimizer.load_state_dict` also casts state to the parameter's dtype: float32 moments of a bfloat16 parameter would
    lose precision, and the run would not continue bit-equal.
    """
    if isinstance(saved, Tensor) and isinstance(loaded, Tensor):
        return saved.to(loaded.device)
    if isinstance(saved, Mapping) and isinstance(loaded, Mapping):
        return type(saved)((key, _uncast(value, loaded[key])) for key, value in saved.items() if key in loaded)  # type: ignore[call-arg]
    if isinstance(saved, list | tuple) and isinstance(loaded, list | tuple):
        return type(saved)(_uncast(mine, other) for mine, other in zip(saved, loaded, strict=True))
    # torch treats a str as an iterable and splits it into characters.
    return saved if isinstance(saved, str) else loaded


class SchedulerPart:
    """A learning-rate scheduler. Functions in its state are not stored: the rebuilt scheduler must have the same."""

    def __init__(self, name: str, scheduler: Any) -> None:
        self._name, self._scheduler = name, scheduler

    def capture(self) -> Any:
        """See `Part`."""
        functions: dict[tuple[Any, ...], Any] = {}
        state = _without_functions(self._scheduler.state_dict(), (), functions)
        names = {path: function.__qualname__ for path, function in functions.items()}
        return {"class": type(self._scheduler).__qualname__, "functions": names, "state": state}

    def check(self, saved: Any) -> None:
        """See `Part`."""
        own = self.capture()
        refuse_other_class(self._name, saved["class"], own["class"])
        if saved["functions"] != own["functions"]:
            raise CheckpointError(
                f"{self._name}: uses the functions {sorted(own['functions'].values())} here and "
                f"{sorted(saved['functions'].values())} in the checkpoint. Build it with the same ones."
            )

    def restore(self, saved: Any) -> None:
        """See `Part`."""
        functions: dict[tuple[Any, ...], Any] = {}
        _without_functions(self._scheduler.state_dict(), (), functions)
        self._scheduler.load_state_dict(_with_functions(saved["state"], (), functions))


def _without_functions(tree: Any, path: tuple[Any, ...], found: dict[tuple[Any, ...], Any]) -> Any:
    """The tree with None in place of each function; the functions are added to `found`, by path."""
    # A class is callable too, but it is refused later by the codec. A callable object without a name is kept as it is:
    # LambdaLR saves such an object's __dict__ instead of the object.
    if callable(tree) and hasattr(tree, "__qualname__") and not isinstance(tree, type):
        found[path] = tree
        return None
    if type(tree) is dict:
        return {key: _without_functions(value, (*path, key), found) for key, value in tree.items()}
    if type(tree) is list:
        return [_without_functions(value, (*path, index), found) for index, value in enumerate(tree)]
    return tree


def _with_functions(tree: Any, path: tuple[Any, ...], functions: dict[tuple[Any, ...], Any]) -> Any:
    """The tree with the functions back in their places."""
    if path in functions:
        return functions[path]
    if type(tree) is dict:
        return {key: _with_functions(value, (*path, key), functions) for key, value in tree.items()}
    if type(tree) is list:
        return [_with_functions(value, (*path, index), functions) for index, value in enumerate(tree)]
    return tree


# Random number generators --------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """The states of the generators of Python, numpy (the global one), torch's CPU and, if in use, all CUDA devices."""
    in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        # Reading a CUDA state would initialize CUDA, which takes seconds and memory and breaks a later fork.
        "cuda": torch.cuda.get_rng_state_all() if in_use else [],
    }


def check_rng_state(saved: dict[str, Any]) -> None:
    """Refuse states that `set_rng_state` could not set."""
    own = rng_state()
    kinds = (saved["numpy"]["bit_generator"], own["numpy"]["bit_generator"])
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"rng: numpy's global generator was {kinds[0]}, here it is {kinds[1]}")
    sizes = (saved["torch"].numel(), own["torch"].numel())
    if sizes[0] != sizes[1] or saved["python"][0] != own["python"][0]:
        raise CheckpointError(
            "rng: the states were saved by another version of Python or torch. Use the versions that saved them."
        )
    try:  # on fresh generators, so that the global ones do not change
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(saved["numpy"])
        # Checked by type only, because a CUDA state cannot be tried on a machine without that device.
        for state in [saved["torch"], *saved["cuda"]]:
            if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
                raise TypeError("a state of torch is not a tensor of bytes")
        torch.Generator().set_state(saved["torch"])
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"rng: the states of the random number generators are damaged ({error}). Use another checkpoint."
        ) from error


def set_rng_state(saved: dict[str, Any]) -> None:
    """Restore the states that `rng_state` returned. States of CUDA devices that this machine lacks are ignored."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    for device, state in zip(range(torch.cuda.device_count()), saved["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)
