"""Accelerate: checkpoints and logs of a `keepk.Pruner` in a training loop with an ``Accelerator``.

>>> import keepk, tempfile, torch
>>> from accelerate import Accelerator
>>> from keepk.integrations.accelerate import prepare
>>> def build():
...     accelerator, net = Accelerator(cpu=True), torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 3))
...     model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
...     space = keepk.channels("0", keep=2, schedule=[4, 2])
...     return accelerator, model, prepare(accelerator, keepk.Pruner(net, space, optimizer, example=torch.zeros(2, 8)))
>>> accelerator, model, pruning = build()
>>> model = pruning.step(model)  # at the end of an epoch
>>> with tempfile.TemporaryDirectory() as folder:
...     _ = accelerator.save_state(folder)
...     accelerator, model, pruning = build()  # after a kill
...     accelerator.load_state(folder)  # cuts the model, then loads its weights
>>> pruning.pruner.kept, model[0].out_features
({'0': 4}, 4)
"""

from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import nn

from keepk.errors import CheckpointError, KeepkError
from keepk.integrations.runs import (
    cut_before_wrapping,
    digests,
    has_state,
    load_run_state,
    pruner_of,
    read_state,
    run_state,
    states_in,
    stepped,
    write_state,
)
from keepk.run.pruner import Pruner

try:
    from accelerate import Accelerator
    from accelerate.utils import MODEL_NAME, RNG_STATE_NAME, SAFE_MODEL_NAME, load
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f'keepk.integrations.accelerate: {missing.name} is not installed. Run: pip install "keepk[accelerate]"',
        name=missing.name,
    ) from None

Model = TypeVar("Model", bound=nn.Module)
STATE = "keepk"  # a folder in each checkpoint
LAST = f"{RNG_STATE_NAME}_0.pkl"  # the file that the main process writes last, except for custom objects


def prepare(accelerator: Any, pruner: Pruner) -> "Pruning":
    """Let an ``Accelerator`` save and load the state of a `Pruner` with its own.

    From now on ``accelerator.save_state`` writes the state of pruning into its folder, and ``accelerator.load_state``
    cuts the model to its saved size before it loads weights. Wrapped optimizers can be passed to the `Pruner`, which
    looks through them. Make the `Pruner` before ``accelerator.prepare`` if that changes the model's forward (mixed
    precision), so that it is traced as it was written.

    An ``Accelerator`` with several models can have a `Pruner` for each of them. A resumed run prepares the same ones in
    the same order.

    Args:
        accelerator: The ``Accelerator``.
        pruner: The `Pruner`.

    Returns:
        An object whose ``step`` ends an epoch.

    Raises:
        KeepkError: An argument has another type.
    """
    if not isinstance(accelerator, Accelerator):
        raise KeepkError(
            f"prepare: got {type(accelerator).__name__} as the accelerator. Pass an accelerate.Accelerator."
        )
    pruner = pruner_of(pruner, "prepare")
    saved = _Saved.of(accelerator)
    saved.add(pruner)
    return Pruning(accelerator, pruner, saved)


class Pruning:
    """A `Pruner` in a loop with an ``Accelerator``; made by `prepare`.

    Attributes:
        pruner: The `Pruner`.
    """

    def __init__(self, accelerator: Any, pruner: Pruner, saved: "_Saved") -> None:
        self._accelerator, self.pruner, self._saved = accelerator, pruner, saved

    def step(self, model: Model, *, step: int | None = None) -> Model:
        """End an epoch: call `Pruner.step`, and log the numbers of the event with ``accelerator.log``.

        Args:
            model: The prepared model.
            step: The number of the training step, for the trackers.

        Returns:
            The model to continue with: the same, or a new `DistributedDataParallel` wrapper after a cut.

        Raises:
            KeepkError: `model` is not that of the Pruner, or whatever `Pruner.step` raises; nothing has changed.
        """
        models = self._accelerator._models
        replaced = stepped(self.pruner, model, lambda numbers: self._accelerator.log(dict(numbers), step=step), models)
        if replaced is None or replaced is model:
            return model
        # accelerate saves and loads the models of this list, and the old wrapper is of no use any more.
        models[:] = [replaced if it is model else it for it in models]
        found: Model = replaced
        return found

    def resume(self, folder: str | Path) -> None:
        """Cut the model to its size in a checkpoint, before ``accelerator.prepare`` wraps it; then call ``load_state``.

        A run of one process does not need this: ``accelerator.load_state`` cuts the model.

        Args:
            folder: A folder that ``accelerator.save_state`` wrote.

        Raises:
            CheckpointError: The folder has no state of pruning, or weights that do not belong to it.
            StateError: The state comes from another model or plan.
        """
        self._saved.resume(self.pruner, Path(folder))


class _Saved:
    """The Pruners of an ``Accelerator``; one state in its checkpoints has all of theirs."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator, self._pruners = accelerator, list[Pruner]()
        accelerator.register_save_state_pre_hook(self._write)
        accelerator.register_load_state_pre_hook(self._read)

    @staticmethod
    def of(accelerator: Any) -> "_Saved":
        """That of an ``Accelerator``, which its first Pruner makes."""
        owners = (getattr(hook, "__self__", None) for hook in accelerator._save_model_state_pre_hook.values())
        return next((it for it in owners if isinstance(it, _Saved)), None) or _Saved(accelerator)

    def add(self, pruner: Pruner) -> None:
        """Save this Pruner too."""
        if not any(it is pruner for it in self._pruners):
            self._pruners.append(pruner)

    def resume(self, pruner: Pruner, folder: Path) -> None:
        """Cut the model of one Pruner to its size in a checkpoint; others may be prepared later."""
        saved = self._state_in(folder)
        states = states_in(saved)
        number = next(number for number, it in enumerate(self._pruners) if it is pruner)
        if number >= len(states):
            self._refuse_other_number(folder, len(states))
        self._refuse_incomplete(folder, saved)
        self._load([pruner], [states[number]])

    def _write(self, _models: Any, weights: list[Any], folder: str) -> None:
        """The hook of ``save_state``, which comes before Accelerate writes the weights."""
        if not self._accelerator.is_main_process:
            return
        models = [self._models_of(pruner) for pruner in self._pruners]
        state = {**run_state(*self._pruners), "models": models}
        # If the save is interrupted, weights of an older checkpoint may stay in the folder. The list is shorter if they
        # are not written by Accelerate itself, but by another hook or by FSDP.
        if len(weights) == len(self._accelerator._models):
            state["weights"] = {str(place): digests(weights[place]) for places in models for place in places}
        write_state(Path(folder) / STATE, state)
        # So may the state of an optimizer; the missing last file, which is about to be written again, shows that.
        (Path(folder) / LAST).unlink(missing_ok=True)

    def _read(self, _models: Any, folder: str) -> None:
        """The hook of ``load_state``."""
        saved = self._state_in(Path(folder))
        states = states_in(saved)
        if len(states) != len(self._pruners):
            self._refuse_other_number(Path(folder), len(states))
        # Checkpoints of older versions do not say which of the Accelerator's models are pruned.
        for pruner, models in zip(self._pruners, saved.get("models", [None] * len(states)), strict=True):
            if models is not None and (now := self._models_of(pruner)) != models:
                raise CheckpointError(
                    f"{folder}: a Pruner had the Accelerator's model number {_listed(models)}, and its "
                    f"{type(pruner.model).__name__} is now number {_listed(now)}. Prepare the same models and Pruners "
                    f"in the same order as in the run that saved."
                )
        self._refuse_incomplete(Path(folder), saved)
        self._load(self._pruners, states)

    def _load(self, pruners: list[Pruner], states: list[dict[str, Any]]) -> None:
        with cut_before_wrapping(
            "Call pruning.resume(folder) before accelerator.prepare, then accelerator.load_state."
        ):
            load_run_state(pruners, states)

    def _state_in(self, folder: Path) -> dict[str, Any]:
        if not has_state(folder / STATE):
            raise CheckpointError(
                f"{folder}: has no {STATE}/, so it was written without keepk.integrations.accelerate.prepare, or "
                f"writing it was interrupted. Pass another checkpoint."
            )
        return read_state(folder / STATE)

    def _refuse_other_number(self, folder: Path, number: int) -> None:
        raise CheckpointError(
            f"{folder}: has the state{'s' * (number > 1)} of {number} Pruner{'s' * (number > 1)}, and you have "
            f"prepared {len(self._pruners)} with this Accelerator. Prepare the same ones in the same order as in the "
            f"run that saved."
        )

    def _refuse_incomplete(self, folder: Path, saved: dict[str, Any]) -> None:
        """Refuse a checkpoint that was not written completely, or has weights that do not belong to its state."""
        if "models" not in saved:  # by an older version
            return
        for place, expected in saved.get("weights", {}).items():
            file = _weights_file(folder, int(place))
            if file is None:
                # Another hook may have taken these weights after this one, and will load them.
                if len(self._accelerator._load_model_state_pre_hook) > 1:
                    continue
                raise CheckpointError(
                    f"{folder}: has no weights, because writing it was interrupted. Pass another checkpoint."
                )
            found = _digests_in(file)
            # Tensors that share memory with others are not in a safetensors file.
            if bool(found) != bool(expected) or any(expected.get(name) != digest for name, digest in found.items()):
                raise CheckpointError(
                    f"{folder}: {file.name} has other weights than those that were saved with {STATE}/. Writing the "
                    f"checkpoint was interrupted. Pass another checkpoint."
                )
        if not (folder / LAST).is_file():
            raise CheckpointError(
                f"{folder}: has no {LAST}, because writing it was interrupted. Pass another checkpoint."
            )

    def _models_of(self, pruner: Pruner) -> list[int]:
        """The places of the Accelerator's models that a Pruner prunes, or prunes a part of."""
        own = set(pruner.model.modules())
        return [place for place, model in enumerate(self._accelerator._models) if not own.isdisjoint(model.modules())]


def _weights_file(folder: Path, place: int) -> Path | None:
    """The file from which Accelerate loads the weights of its model number `place`; None if it does not exist."""
    ending = f"_{place}" if place else ""
    files = folder / f"{SAFE_MODEL_NAME}{ending}.safetensors", folder / f"{MODEL_NAME}{ending}.bin"
    return next((it for it in files if it.is_file()), None)


def _digests_in(file: Path) -> dict[str, str]:
    found = dict[str, str]()
    try:
        if file.suffix == ".bin":
            return digests(load(file, map_location="cpu"))
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is not a dict, and cannot be iterated
                found |= digests({name: tensors.get_tensor(name)})
    except (SafetensorError, RuntimeError, OSError, EOFError) as error:
        raise CheckpointError(f"{file}: cannot be read ({error}). Pass another checkpoint.") from error
    return found


def _listed(places: list[int]) -> str:
    return ", ".join(str(place + 1) for place in places) or "(none)"
