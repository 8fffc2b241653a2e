"""Fabric: checkpoints and logs of a `keepk.Pruner` in a training loop with ``lightning.fabric.Fabric``.

This module uses the public methods of a ``Fabric`` and imports nothing of Lightning.

>>> import keepk, tempfile, torch
>>> from lightning.fabric import Fabric
>>> from keepk.integrations.fabric import prepare
>>> def build():
...     fabric = Fabric(accelerator="cpu", devices=1)
...     net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
...     model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
...     pruner = keepk.Pruner(net, keepk.channels("0", keep=2, schedule=[4, 2]), optimizer, example=torch.zeros(2, 8))
...     return {"model": model, "optimizer": optimizer, "epoch": 0}, prepare(fabric, pruner)
>>> state, pruning = build()
>>> pruning.step(state["model"])  # at the end of an epoch
>>> state["epoch"] += 1
>>> with tempfile.TemporaryDirectory() as folder:
...     pruning.save(f"{folder}/last.ckpt", state)
...     state, pruning = build()  # after a kill
...     _ = pruning.load(f"{folder}/last.ckpt", state)  # cuts the model, then loads its weights
>>> pruning.pruner.kept, state["epoch"], state["model"].module[0].out_features
({'0': 4}, 1, 4)
"""

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from keepk.errors import CheckpointError, KeepkError
from keepk.integrations.runs import cut_before_wrapping, load_run_state, pruner_of, run_state, states_in, stepped
from keepk.run.pruner import Pruner

KEY = "keepk"  # in a checkpoint
# By Fabric, its Pruners in the order of `prepare`. Weak, because a model may refer to its Fabric.
_PREPARED = WeakKeyDictionary[Any, list[ref[Pruner]]]()


def prepare(fabric: Any, pruner: Pruner) -> "Pruning":
    """A `Pruner` in a loop with a ``Fabric``.

    Pass the `Pruner` the module that was given to ``fabric.setup``; the optimizer may be the one that it returned.

    A ``Fabric`` with several models can have a `Pruner` for each of them; a resumed run prepares the same ones in the
    same order. ``save`` and ``load`` of any of them include the states of those whose models are in `state`.

    Args:
        fabric: The ``Fabric``.
        pruner: The `Pruner`.

    Returns:
        An object whose ``step`` ends an epoch, and whose ``save`` and ``load`` take the place of Fabric's.

    Raises:
        KeepkError: An argument has another type.
    """
    if not all(callable(getattr(fabric, method, None)) for method in ("save", "load", "log_dict")):
        raise KeepkError(f"prepare: got {type(fabric).__name__} as the fabric. Pass a lightning.fabric.Fabric.")
    pruner = pruner_of(pruner, "prepare")
    prepared = _PREPARED.setdefault(fabric, [])
    if not any(it() is pruner for it in prepared):
        prepared.append(ref(pruner))
    return Pruning(fabric, pruner)


class Pruning:
    """A `Pruner` in a loop with a ``Fabric``; made by `prepare`.

    Attributes:
        pruner: The `Pruner`.
    """

    def __init__(self, fabric: Any, pruner: Pruner) -> None:
        self._fabric, self.pruner = fabric, pruner

    def step(self, model: Any, *, step: int | None = None) -> None:
        """End an epoch: call `Pruner.step`, and log the numbers of the event with ``fabric.log_dict``.

        Args:
            model: The module that ``fabric.setup`` returned. After a cut, the `DistributedDataParallel` wrapper inside
                of it is replaced.
            step: The number of the training step, for the loggers.

        Raises:
            KeepkError: `model` is not that of the Pruner, or whatever `Pruner.step` raises; nothing has changed.
        """
        inner = getattr(model, "_forward_module", None)
        if inner is None:
            raise KeepkError(f"step: got {type(model).__name__}. Pass the module that fabric.setup returned.")
        replaced = stepped(self.pruner, inner, lambda numbers: self._fabric.log_dict(numbers, step=step))
        if replaced is not None:
            model._forward_module = replaced

    def save(self, path: str | Path, state: dict[str, Any]) -> None:
        """``fabric.save`` with the state of pruning; every process calls it.

        Args:
            path: As for ``fabric.save``.
            state: As for ``fabric.save``: modules, optimizers and plain values. The key "keepk" is taken.

        Raises:
            KeepkError: `state` has this key.
        """
        _refuse_own_key(state, "save")
        numbered = self._pruners_of(state)
        saved = {**run_state(*numbered.values()), "numbers": list(numbered)}
        self._fabric.save(path, {**state, KEY: saved})

    def load(self, path: str | Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
        """``fabric.load``, after the model was cut to its saved size.

        Args:
            path: As for ``fabric.load``.
            state: As for ``fabric.load``; plain values in it are replaced.
            **options: Other arguments of ``fabric.load``.

        Returns:
            The items of the checkpoint that are not in `state`.

        Raises:
            CheckpointError: The checkpoint has no state of pruning.
            StateError: The state comes from another model or plan.
            KeepkError: The model is in a `DistributedDataParallel` wrapper already (see `resume`), or `state` has the
                key "keepk".
        """
        _refuse_own_key(state, "load")
        if not options.get("strict", True):  # Fabric would load the weights of a checkpoint without pruning
            self._state_in(path, options)
        # Fabric restores the items in their order, and this one cuts the model.
        part = _Part(path, self._pruners_of(state))
        given = {KEY: part, **state}
        try:
            remainder: dict[str, Any] = self._fabric.load(path, given, **options)
        except KeyError:
            self._state_in(path, options)
            raise
        state.update({key: given[key] for key in state})
        return remainder

    def resume(self, path: str | Path) -> None:
        """Cut the model to its size in a checkpoint, before ``fabric.setup`` wraps it; then call `load`.

        A run of one process does not need this: `load` cuts the model.

        Args:
            path: A checkpoint that `save` wrote.

        Raises:
            CheckpointError: The checkpoint has no state of pruning.
            StateError: The state comes from another model or plan.
        """
        found = self._state_in(path, {})
        states = states_in(found)
        own = self._number
        numbers = found.get("numbers", [own]) if len(states) > 1 else [own]
        if own not in numbers:
            raise _other_pruners(path, numbers, [own])
        load_run_state([self.pruner], [states[numbers.index(own)]])

    def _state_in(self, path: str | Path, options: dict[str, Any]) -> dict[str, Any]:
        """The state of pruning in a checkpoint, of which nothing is restored."""
        found = self._fabric.load(path, **{key: value for key, value in options.items() if key != "strict"})
        if KEY not in found:
            raise CheckpointError(
                f"{path}: has no state of pruning, so it was not written by the save of keepk.integrations.fabric. "
                f"Pass another checkpoint."
            )
        state: dict[str, Any] = found[KEY]
        return state

    @property
    def _number(self) -> int:
        return next(number for number, it in enumerate(_PREPARED[self._fabric]) if it() is self.pruner)

    def _pruners_of(self, state: dict[str, Any]) -> dict[int, Pruner]:
        """The own Pruner and the others whose models are in `state`, by their numbers."""
        modules = {part for it in state.values() if isinstance(it, nn.Module) for part in it.modules()}
        found = {number: it() for number, it in enumerate(_PREPARED[self._fabric])}
        return {
            number: it for number, it in found.items() if it is not None and (it is self.pruner or it.model in modules)
        }


def _refuse_own_key(state: dict[str, Any], who: str) -> None:
    if KEY in state:
        raise KeepkError(f"{who}: state has a {KEY!r}, under which the state of pruning is saved. Rename it.")


class _Part:
    """The states of Pruners as an object of a checkpoint."""

    def __init__(self, path: str | Path, pruners: dict[int, Pruner]) -> None:
        self._path, self._pruners = path, pruners

    def state_dict(self) -> dict[str, Any]:
        return run_state(*self._pruners.values())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states, own = states_in(state), list(self._pruners)
        numbers = state.get("numbers", own)
        # A single Pruner may have had another number in a process with more of them.
        if len(states) != len(own) or (len(own) > 1 and numbers != own):
            raise _other_pruners(self._path, numbers, own)
        with cut_before_wrapping("Call pruning.resume(path) before fabric.setup, then pruning.load."):
            load_run_state(list(self._pruners.values()), states)


def _other_pruners(path: str | Path, saved: list[int], own: list[int]) -> CheckpointError:
    def listed(numbers: list[int]) -> str:
        return f"number {' and '.join(str(it + 1) for it in numbers)}"

    return CheckpointError(
        f"{path}: has the states of {len(saved)} Pruners ({listed(saved)}), and you have passed the models of "
        f"{len(own)} ({listed(own)}, in the order of prepare). Prepare the same Pruners in the same order as in the "
        f"run that saved, and pass the same models."
    )
