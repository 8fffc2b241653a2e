"""Hugging Face transformers: pruning in its `Trainer`, and models with ``arch.json``.

`PruningCallback` calls `Pruner.step` at the end of every epoch or every n optimizer steps. An event at the end of an
epoch is already part of a checkpoint that the Trainer writes after the epoch's last step, so a run that resumes from it
does not repeat the event.

To resume, the model has to be cut before the Trainer loads weights. ``Trainer.train`` loads them before it calls any
callback, so `resume` does it:

    trainer.train(resume_from_checkpoint=resume(trainer))
"""

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from keepk.cut.record import was_cut
from keepk.errors import CheckpointError, FileError, KeepkError, PlanError
from keepk.integrations.runs import CallbackRun, Every, has_state, read_state, run_state, write_state
from keepk.plan.names import shortened, shown
from keepk.plan.spaces import Space
from keepk.run.pruner import Pruner
from keepk.run.warnings import warn

try:
    import transformers
    from transformers import AutoConfig, GenerationConfig, TrainerCallback
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f'keepk.integrations.transformers: {missing.name} is not installed. Run: pip install "keepk[transformers]"',
        name=missing.name,
    ) from None

STATE = "keepk"  # a folder in each of the Trainer's checkpoints
EVENT_STEP = "step_of_last_event"
WEIGHTS = "weights"  # by file of weights in the checkpoint, its digest
WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".distcp"}
BLOCK = 1 << 22
OTHER_FILES = ("optimizer", "scheduler", "scaler", "rng_state", "training_args")
CAN_GENERATE = "generation_config.json"


class PruningCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not look into transformers
    """Prunes the model of a transformers ``Trainer`` while it trains.

    The `Pruner` is made when training begins. After each event, a flat dict of kept units, parameters and MACs is
    logged. Statistics that metrics read are collected in training steps only: gradients before each optimizer step,
    after clipping, and activations in the forward passes between the beginning of a step and its end.

    Args:
        spaces: What to keep, as for `keepk.Pruner`.
        example: An input of forward, such as a batch; required for channels. Decoders need ``"use_cache": False`` in it
            for heads to be removed.
        every: The time between events: "epoch", or a number of optimizer steps.
        **options: Other arguments of `keepk.Pruner`: `epochs`, `phases`, `shrink`, `macs`, `followers` and so on.

    Attributes:
        trainer: The Trainer, if events are to be logged by ``trainer.log``; `resume` sets it. Without it, they are in
            ``state.log_history`` only, and loggers such as TensorBoard do not get them.

    Raises:
        PlanError: At the start of training, if training is too short for the plan, or if ``load_best_model_at_end``
            could load a model from before the last event.
        KeepkError: At the start of training, if a checkpoint was loaded without `resume`, or if channels would be
            removed from a model in a `DistributedDataParallel` wrapper, which the Trainer cannot replace.
    """

    def __init__(
        self,
        spaces: Space | Sequence[Space],
        *,
        example: Any = None,
        every: Every = "epoch",
        **options: Any,
    ) -> None:
        self._run = CallbackRun("PruningCallback", spaces, every, {"example": example, **options})
        self.trainer: Any = None
        self._resumed_at: int | None = None  # the step of the checkpoint that `resume` has read
        self._had_event = False  # in the present epoch
        self._event_step: int | None = 0  # of the last event; None if a checkpoint does not say

    @property
    def pruner(self) -> Pruner:
        """The `Pruner`, which exists once training has begun or `resume` was called."""
        return self._run.pruner

    def resume(self, model: nn.Module, folder: Path) -> None:
        """Cut a dense model to its size in a checkpoint; `keepk.integrations.transformers.resume` calls this."""
        saved = read_state(folder / STATE)
        self._run.resume(model, saved)
        self._resumed_at, self._event_step = saved["step"], saved.get(EVENT_STEP)

    def on_train_begin(self, args: Any, state: Any, _control: Any, **objects: Any) -> None:
        """Make the Pruner, and refuse training that could not do what was asked."""
        if state.global_step != (self._resumed_at or 0):
            raise KeepkError(
                f"PruningCallback: the Trainer continues from step {state.global_step:,}, but the state of pruning "
                f"is that of step {self._resumed_at or 0:,}. Resume with both: from keepk.integrations.transformers "
                f"import resume; trainer.train(resume_from_checkpoint=resume(trainer, checkpoint))."
            )
        if self._resumed_at is None:
            self._event_step = 0
        elif self._event_step is None:  # the checkpoint of an older version
            logged = [it["step"] for it in state.log_history if "keepk/event" in it and "step" in it]
            self._event_step = max(logged, default=state.global_step)
        self._resumed_at = None
        with self._run.begun(objects["model"], objects["optimizer"]):
            self._refuse_wrapper(args)
            self._refuse_other_training(args, state, _steps_per_epoch(objects["train_dataloader"], args))
            self._run.pause()

    def _refuse_other_training(self, args: Any, state: Any, steps: int | None) -> None:
        """Refuse training that could not end with K units; `steps` is the number of optimizer steps in an epoch."""
        if state.is_hyper_param_search and args.save_strategy != "no":
            raise KeepkError(
                "PruningCallback: checkpoints of a hyperparameter search are not supported. Pass save_strategy='no'."
            )
        if self._run.every == "epoch" and steps is None:
            raise PlanError(
                "PruningCallback: the training data have no length, so epochs have no end. Pass every=, a number of "
                "optimizer steps."
            )
        every = steps if self._run.every == "epoch" else self._run.every
        assert isinstance(every, int)
        # The events of this training are at every, 2 * every, ... steps after this one, which is that of the last
        # whole epoch, unless a resumed run begins with a new epoch.
        begin = state.global_step
        if self._run.every != "epoch" or not args.ignore_data_skip:
            begin -= begin % every
        self._run.refuse_too_short((state.max_steps - begin) // every, f"of {state.max_steps:,} optimizer steps")
        missing, last_step = self.pruner.epochs - self.pruner.epoch, self._event_step or 0
        if missing:
            last_step = begin + missing * every
            _refuse_best_of_other_sizes(args, last_step=last_step, steps_per_epoch=steps)
        if args.load_best_model_at_end:
            _forget_best_of_other_sizes(state, last_step)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Expect an event in this epoch."""
        self._had_event = False

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Count the forward passes of this step for metrics that read activations."""
        self._run.unpause()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Collect the gradients for metrics that read them."""
        self._run.collect_gradients()

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hold the event that is due. The Trainer evaluates and saves after this."""
        self._run.pause()
        if self._run.every == "epoch":
            due = state.epoch == int(state.epoch)
        else:
            due = state.global_step % self._run.every == 0
        if due:
            self._event(state, control)

    def on_epoch_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Hold the event of an epoch that a callback has cut short."""
        if self._run.every == "epoch" and control.should_epoch_stop and not self._had_event:
            self._event(state, control)

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Write the state of pruning into the checkpoint that the Trainer has just written."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            # A later run may write this folder again and be killed before it gets here. The state would then be beside
            # weights that it does not belong to.
            weights = {name: _digest(folder / name) for name in _weight_files(folder)}
            saved = {**run_state(self.pruner), EVENT_STEP: self._event_step, WEIGHTS: weights}
            write_state(folder / STATE, saved, state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Count forward passes again. The Pruner stays open, so that further training keeps its zeros."""
        self._run.unpause()
        self._run.warn_at_end()

    def _event(self, state: Any, control: Any) -> None:
        self._had_event = True
        if self.pruner.done:
            return
        self.pruner.step()
        self._event_step = state.global_step
        numbers = self.pruner.report().flat()
        if self.trainer is None:
            state.log_history.append({**numbers, "epoch": state.epoch, "step": state.global_step})
        else:
            # Trainer.log takes the present step's own log for done.
            should_log = control.should_log
            self.trainer.log(numbers)
            control.should_log = should_log

    def _refuse_wrapper(self, args: Any) -> None:
        if args.parallel_mode.value == "distributed" and self._run.removes_channels:
            raise KeepkError(
                "PruningCallback: the Trainer wraps the model in DistributedDataParallel and keeps this wrapper, whose "
                'buffers do not follow a cut. Pass shrink="never", which masks channels during training, or train in '
                "a loop of your own with accelerate (keepk.integrations.accelerate)."
            )


def resume(trainer: Any, checkpoint: str | Literal[True] = True) -> str | None:
    """Prepare a Trainer with a `PruningCallback` for resuming: cut its model to the size in a checkpoint.

    Pass the result on: ``trainer.train(resume_from_checkpoint=resume(trainer))``. The same line starts a new run if
    there is no checkpoint yet.

    Args:
        trainer: A transformers ``Trainer`` with a dense model, as it was built for the first run.
        checkpoint: A checkpoint of the Trainer, or True for the newest complete one in its output folder.

    Returns:
        The checkpoint; None if True was passed and there is none.

    Raises:
        CheckpointError: The checkpoint has no state of a `PruningCallback`, a damaged one, or that of other weights.
        StateError: The state comes from another model or plan.
        KeepkError: The Trainer has no `PruningCallback`, its model was cut already, or it builds its model anew.
    """
    callback = _callback_of(trainer)
    callback.trainer = trainer
    folder = _newest(Path(trainer.args.output_dir)) if checkpoint is True else Path(checkpoint)
    if folder is None:
        return None
    if trainer.model_init is not None:
        raise KeepkError(
            "resume: the Trainer has model_init, so train() would build a dense model again. Pass model= to it instead."
        )
    if not has_state(folder / STATE):
        raise CheckpointError(
            f"{folder}: has no {STATE}/, so it was not written by a Trainer with a PruningCallback, or writing it was "
            f"interrupted. Pass another checkpoint."
        )
    if not _is_complete(folder):
        raise CheckpointError(
            f"{folder}: its weights are not those that were saved with the state of pruning in {STATE}/. Writing it "
            f"was interrupted, or files of weights were changed since. Pass another checkpoint."
        )
    if not callback._run.has_begun and was_cut(trainer.model):
        raise KeepkError(
            f"resume: the Trainer's {type(trainer.model).__name__} was cut already. Build the dense model, a new "
            f"Trainer and a new PruningCallback, as for the first run."
        )
    callback.resume(trainer.model, folder)
    return str(folder)


def _callback_of(trainer: Any) -> PruningCallback:
    handler = getattr(trainer, "callback_handler", None)
    found = [it for it in getattr(handler, "callbacks", ()) if isinstance(it, PruningCallback)]
    if len(found) != 1:
        raise KeepkError(
            f"resume: got {shown(type(trainer).__name__)} with {len(found)} PruningCallbacks. Pass a transformers "
            f"Trainer with one: Trainer(..., callbacks=[PruningCallback(...)])."
        )
    return found[0]


def _newest(folder: Path) -> Path | None:
    """The newest complete checkpoint: the callback writes last, so one with the state of its weights is complete."""
    found = [it for it in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if it.name.rpartition("-")[2].isdecimal()]
    found.sort(key=lambda it: int(it.name.rpartition("-")[2]))
    complete = next((it for it in reversed(found) if _is_complete(it)), None)
    if found and complete is None:
        raise CheckpointError(
            f"{folder}: none of its {len(found)} checkpoints has a state of pruning ({STATE}/) that belongs to its "
            f"weights. They were written without a PruningCallback, or writing them was interrupted. Pass another "
            f"output_dir to start a new run."
        )
    if complete is not None and complete is not found[-1]:
        warn(f"resume: {found[-1]} is incomplete, because writing it was interrupted. Resuming from {complete}.")
    return complete


def _is_complete(folder: Path) -> bool:
    """Whether a checkpoint has a state of pruning, and the weights that were saved with it."""
    if not has_state(folder / STATE):
        return False
    # Checkpoints of older versions do not say which weights they have.
    weights = read_state(folder / STATE).get(WEIGHTS, {})
    return all((folder / name).is_file() and _digest(folder / name) == digest for name, digest in weights.items())


def _weight_files(folder: Path) -> list[str]:
    """The files of weights in a checkpoint, also those of adapters and of sharded models in folders of their own."""
    found = [it.relative_to(folder) for it in folder.rglob("*") if it.suffix in WEIGHT_FILES and it.is_file()]
    return sorted(
        it.as_posix()
        for it in found
        if it.parts[0] != STATE
        and not any(part.startswith(OTHER_FILES) for part in it.parts)
        and "optim_states" not in it.name  # DeepSpeed's
    )


def _digest(file: Path) -> str:
    digest = sha256()
    with file.open("rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _steps_per_epoch(dataloader: Any, args: Any) -> int | None:
    """The number of optimizer steps in an epoch, as the Trainer counts them; None if the data have no length."""
    try:
        batches = len(dataloader)
    except TypeError:
        return None
    return max(1, -(-batches // int(args.gradient_accumulation_steps)))


def _refuse_best_of_other_sizes(args: Any, *, last_step: int, steps_per_epoch: int | None) -> None:
    """Refuse to load the best model at the end if it may be one from before the last event."""
    if not args.load_best_model_at_end:
        return
    by_epoch = getattr(args.eval_strategy, "value", args.eval_strategy) == "epoch"
    last = last_step / steps_per_epoch if by_epoch and steps_per_epoch else last_step
    if args.eval_delay < last:
        raise PlanError(
            f"PruningCallback: load_best_model_at_end could load a model from before the last event, at step "
            f"{last_step:,}, which has more units and other sizes. Pass eval_delay={last:g} "
            f"({'epochs' if by_epoch else 'steps'}), so that only models of the final size are compared, or "
            f"load_best_model_at_end=False."
        )


def _forget_best_of_other_sizes(state: Any, last_step: int) -> None:
    """Forget the best model of a resumed run if it is one from before the last event."""
    if state.best_metric is None and state.best_model_checkpoint is None:
        return
    step = state.best_global_step
    if step is None:  # an older transformers has the name of the checkpoint only
        number = str(state.best_model_checkpoint).rpartition("-")[2]
        step = int(number) if number.isdecimal() else 0
    if step >= last_step:
        return
    warn(
        f"PruningCallback: the best model of the resumed run is that of step {step:,}, which has more units or other "
        f"sizes than the final model, because it is from before the last event, at step {last_step:,}. Forgetting it: "
        f"load_best_model_at_end compares the models that are evaluated from now on."
    )
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None


def dense_model(cls: Any, folder: Any, options: dict[str, Any]) -> nn.Module:
    """The dense model that the config in a folder describes, with random weights, in the dtype of the config.

    Args:
        cls: A class of transformers: a model's, or an auto class.
        folder: A folder with a ``config.json``.
        options: Options of ``from_config``.

    Raises:
        FileError: There is no ``config.json``.
    """
    if not (Path(folder) / "config.json").is_file():
        raise FileError(
            f"{folder}: has no config.json, because saving was interrupted or a file was deleted. Save the model again."
        )
    config_class = getattr(cls, "config_class", None) or AutoConfig
    config = config_class.from_pretrained(folder)
    build = cls.from_config if hasattr(cls, "from_config") else cls._from_config  # models have only the second
    model: nn.Module = build(config, **options)
    if (Path(folder) / CAN_GENERATE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def empty_model(folder: Path) -> nn.Module:
    """The model that the config in a folder names, on the meta device and in eval mode.

    Raises:
        FileError: The config cannot be read, or names a class that transformers does not have.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        names = config.architectures or []
        cls = getattr(transformers, names[0], None) if len(names) == 1 else None
        if cls is None or getattr(config, "auto_map", None):
            raise ValueError(f"its architectures are {names}, and one class of transformers is needed")
        with torch.device("meta"):
            model: nn.Module = cls._from_config(config).eval()
    except Exception as error:  # a config may hold anything, and a class may raise anything on it
        said = f"{type(error).__name__}: {shortened(str(error))}"
        raise FileError(
            f"{folder}: transformers {transformers.__version__} cannot build the model of config.json ({said}). Pass a "
            f"function that builds it: model=make_model."
        ) from error
    return model


def names_in_model(model: Any, names: Sequence[str]) -> dict[str, str]:
    """By name of a tensor in a checkpoint, its name in the model; those that are merged from several are left out.

    Some classes were renamed inside since their checkpoints were written, and ``from_pretrained`` renames the tensors.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [it for it in transforms if isinstance(it, WeightRenaming)]
    converters = [it for it in transforms if isinstance(it, WeightConverter)]
    found, own = dict[str, str](), model.state_dict()
    for name in sorted(names, key=dot_natural_key):  # the order in which transformers renames them
        renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, own)
        if converted is None:
            found[name] = renamed
    return found
