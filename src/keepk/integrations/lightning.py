"""Lightning: a callback that prunes in its `Trainer`.

`PruningCallback` calls `Pruner.step` after the last batch of every epoch or every n optimizer steps, before Lightning
validates and writes checkpoints. The state of pruning is part of these checkpoints.

To resume, the model has to be cut before Lightning loads weights, and a callback's ``on_load_checkpoint`` comes after
that. So ``setup``, which comes before, registers torch's hook that runs at the beginning of ``load_state_dict``.
Nothing else is needed: ``trainer.fit(module, ckpt_path=...)``.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from keepk.errors import KeepkError, PlanError
from keepk.integrations.runs import CallbackRun, Every, run_state
from keepk.plan.spaces import Space
from keepk.run.pruner import Pruner

try:
    from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging, WeightAveraging
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f'keepk.integrations.lightning: {missing.name} is not installed. Run: pip install "keepk[lightning]"',
        name=missing.name,
    ) from None

EVENT_EPOCH = "epoch_of_last_event"


class PruningCallback(Callback):  # type: ignore[misc]  # mypy does not look into lightning
    """Prunes a LightningModule, or a part of it, while a Lightning ``Trainer`` trains it.

    The `Pruner` is made when training begins. After each event, a flat dict of kept units, parameters and MACs goes to
    the Trainer's loggers. Statistics that metrics read are collected in training steps only: gradients before each
    optimizer step, and activations in the forward passes of training batches. The averages of Lightning's callbacks
    ``WeightAveraging`` and ``StochasticWeightAveraging`` follow every event.

    Args:
        spaces: What to keep, as for `keepk.Pruner`. Names are those of the pruned module.
        example: An input of the pruned module's forward; required for channels.
        module: The path of the module to prune, such as ``"net"``; empty for the whole LightningModule.
        every: The time between events: "epoch", or a number of optimizer steps.
        **options: Other arguments of `keepk.Pruner`: `epochs`, `phases`, `shrink`, `macs`, `followers` and so on.

    Raises:
        PlanError: When training begins: it is too short for the plan.
        KeepkError: When training begins: `module` is not a module, it is a part of a module in a
            `DistributedDataParallel` wrapper, or an average was made after the Pruner.
    """

    def __init__(
        self,
        spaces: Space | Sequence[Space],
        *,
        example: Any = None,
        module: str = "",
        every: Every = "epoch",
        **options: Any,
    ) -> None:
        self._run = CallbackRun("PruningCallback", spaces, every, {"example": example, **options})
        self._module = module
        self._event_epoch, self._event_step = -1, 0
        self._handle: RemovableHandle | None = None
        self._state_to_load: dict[str, Any] | None = None

    @property
    def pruner(self) -> Pruner:
        """The `Pruner`, which exists once training has begun or a checkpoint was loaded."""
        return self._run.pruner

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - the signature is Lightning's
        """Have the model cut to its size in a checkpoint before weights are loaded from it."""

        # A function, which a deepcopy of the module shares; a copy of a bound method would copy this callback.
        def cut_first(module: nn.Module, *_: Any) -> None:
            saved = _loaded_state(trainer, self.state_key)
            if module is pl_module and saved is not None and self._state_to_load is not saved:
                self._state_to_load = saved  # a checkpoint may be loaded in two steps, as WeightAveraging does
                self._resume(trainer, pl_module, saved)

        self._release()
        self._handle = pl_module.register_load_state_dict_pre_hook(cut_first)

    def state_dict(self) -> dict[str, Any]:
        """The state of pruning, which Lightning saves in its checkpoints."""
        if not self._run.has_begun:
            return {}
        return {**run_state(self.pruner), EVENT_EPOCH: self._event_epoch}

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002 - the signature is Lightning's
        """Remove the hook of `setup`. The Pruner stays open, so that further training keeps its zeros."""
        self._release()

    def _release(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._state_to_load = None

    def _resume(self, trainer: Any, pl_module: Any, saved: dict[str, Any]) -> None:
        self._run.follow(self._averages(trainer))
        self._run.resume(self._pruned(pl_module), saved)
        self._event_epoch = saved[EVENT_EPOCH]

    # Training --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the Pruner, and refuse training that is too short for its plan."""
        model = self._pruned(pl_module)
        self._run.follow(self._averages(trainer))
        with self._run.begun(model, trainer.optimizers):
            if _wrapper(trainer) is not None and self._module:
                raise KeepkError(
                    f"PruningCallback: module={self._module!r} is a part of a LightningModule in a "
                    f"DistributedDataParallel wrapper, which has to be rebuilt after a cut. Leave module= out."
                )
            self._refuse_too_short(trainer)
            self._run.pause()
        self._event_step = trainer.global_step

    def on_train_batch_start(self, *_: Any) -> None:
        """Count the forward passes of this batch for metrics that read activations."""
        self._run.unpause()

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Collect the gradients for metrics that read them."""
        self._run.collect_gradients()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Hold the event that is due. Lightning validates and saves after this."""
        self._run.pause()
        if self._run.every == "epoch":
            due = trainer.is_last_batch
        else:  # several batches may belong to one optimizer step, and several steps to one batch
            due = trainer.global_step // self._run.every > self._event_step // self._run.every
        if due:
            self._event(trainer)

    def on_train_epoch_end(self, trainer: Any, _pl_module: Any) -> None:
        """Hold the event of an epoch that ended before its last batch, unless training ends with it."""
        ended = trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step
        missing = self._event_epoch != trainer.current_epoch and self._event_step != trainer.global_step
        if self._run.every == "epoch" and missing and not ended:
            self._event(trainer)

    def on_train_end(self, *_: Any) -> None:
        """Count forward passes again."""
        self._run.unpause()

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        """Warn if more units are left than planned. Other callbacks may still change weights in ``on_train_end``."""
        if not trainer.fast_dev_run:
            self._run.warn_at_end()

    def _event(self, trainer: Any) -> None:
        self._event_epoch, self._event_step = trainer.current_epoch, trainer.global_step
        if self.pruner.done:
            return
        wrapper = _wrapper(trainer)
        if wrapper is None:
            self.pruner.step()
        else:
            trainer.strategy.model = self.pruner.step(wrapper)
        numbers = self.pruner.report().flat()
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)

    def _pruned(self, pl_module: nn.Module) -> nn.Module:
        try:
            return pl_module.get_submodule(self._module)
        except AttributeError as error:
            raise KeepkError(f"PruningCallback: module={self._module!r}: {error}. Pass the path of a module.") from None

    def _averages(self, trainer: Any) -> list[nn.Module]:
        """The averages of Lightning's callbacks that are made of the pruned module."""
        found = list[nn.Module]()
        for it in trainer.callbacks:
            average = getattr(it, "_average_model", None)
            if average is None or not isinstance(it, WeightAveraging | StochasticWeightAveraging):
                continue
            copy = average.module if isinstance(it, WeightAveraging) else average  # of the LightningModule
            found.append(copy.get_submodule(self._module) if self._module else average)
        return found

    def _refuse_too_short(self, trainer: Any) -> None:
        if trainer.fast_dev_run:
            return
        per_batch = _steps_per_batch(trainer)
        if self._run.every == "epoch":
            batches = -(-trainer.num_training_batches // trainer.accumulate_grad_batches)  # inf without a length
            by_steps = float("inf") if trainer.max_steps < 0 else trainer.max_steps // (batches * per_batch)
            by_epochs = _epochs(trainer)
            events = min(by_steps, by_epochs) - trainer.current_epoch - (self._event_epoch == trainer.current_epoch)
            if trainer.num_training_batches == float("inf") and trainer.max_steps >= 0:
                raise PlanError(
                    "PruningCallback: the training data have no length, and training ends after max_steps, so the "
                    "number of epochs is not known. Pass every=, a number of optimizer steps."
                )
        else:
            steps = _last_step(trainer)
            events = (
                steps if steps == float("inf") else steps // self._run.every - trainer.global_step // self._run.every
            )
            if per_batch > 1:  # several steps of one batch have one event
                events = min(events, _batches_left(trainer))
        if events < float("inf"):
            steps = _last_step(trainer)
            counted = f" (one of each of {per_batch} optimizers in a batch)" if per_batch > 1 else ""
            self._run.refuse_too_short(
                int(events), f"of {trainer.max_epochs} epochs, or {steps:,} optimizer steps{counted},"
            )


def _wrapper(trainer: Any) -> DistributedDataParallel | None:
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def _steps_per_batch(trainer: Any) -> int:
    """How far ``trainer.global_step`` goes in a batch, which is a guess if the module itself steps its optimizers."""
    return 1 if trainer.lightning_module.automatic_optimization else max(1, len(trainer.optimizers))


def _epochs(trainer: Any) -> float:
    """The number of epochs that train; infinite if there is no end."""
    if trainer.max_epochs in (None, -1):
        return float("inf")
    # StochasticWeightAveraging adds an epoch that only collects the statistics of BatchNorm for the averaged weights.
    epochs: int = trainer.max_epochs - any(
        it._model_contains_batch_norm for it in trainer.callbacks if isinstance(it, StochasticWeightAveraging)
    )
    return epochs


def _batches_left(trainer: Any) -> float:
    """How many batches training still has; infinite if it has no end."""
    left: float = trainer.num_training_batches * _epochs(trainer) - (trainer.fit_loop.total_batch_idx + 1)
    return left


def _last_step(trainer: Any) -> float:
    """The ``trainer.global_step`` with which training ends; infinite if it has no end."""
    if trainer.num_training_batches == float("inf"):
        steps = float("inf")
    elif trainer.lightning_module.automatic_optimization:
        steps = -(-trainer.num_training_batches // trainer.accumulate_grad_batches) * _epochs(trainer)
    else:  # the steps of past batches are known
        steps = trainer.global_step + _batches_left(trainer) * _steps_per_batch(trainer)
    return steps if trainer.max_steps < 0 else min(steps, trainer.max_steps)


def _loaded_state(trainer: Any, key: str) -> dict[str, Any] | None:
    """The state of a callback in the checkpoint that Lightning is loading; None if there is none."""
    # Lightning has read the whole file at this point; `trainer.ckpt_path` names it, but reading it twice is slow.
    loaded = trainer._checkpoint_connector._loaded_checkpoint or {}
    found: dict[str, Any] | None = loaded.get("callbacks", {}).get(key)
    return found or None
