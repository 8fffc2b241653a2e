"""Train one seed of a recipe. Data sets are tensors in memory, batches are row indices; every epoch is resumable."""

import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepk.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from keepk.errors import DataError
from keepk.metrics.from_statistics import taylor
from keepk.metrics.statistics import Statistics
from keepk.metrics.weights import random
from keepk.model.costs import layer_costs
from keepk.model.names import named_parameters
from keepk.plan.names import as_globs, matches
from keepk.plan.spaces import Space
from keepk.reports.tables import layer_counts
from keepk.run.pruner import Pruner
from keepk_paper.data import Mnist, Split
from keepk_paper.models import LeNet5, printed_parameters
from keepk_paper.pictures import Pictures
from keepk_paper.recipes import Recipe, Stage, saliency
from keepk_paper.results import Training


@dataclass
class Progress:
    """The progress of a run: the recipe's fingerprint, completed epochs, their cost, and the points reached.

    `device` and `amp` are those of `keepk_paper.results.Training`; older checkpoints have neither.
    """

    recipe: str
    epoch: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    points: list[dict[str, Any]] = field(default_factory=list)
    train_error: float | None = None  # of the last epoch, in percent, on augmented images and changing weights
    commits: list[str] = field(default_factory=list)  # of the code that trained it, oldest first
    device: str = "cpu"
    amp: bool = False

    @property
    def training(self) -> Training:
        """The device and precision of the run."""
        return Training(self.device, self.amp)


@dataclass(frozen=True)
class Inputs:
    """The input of an epoch, and the part of the model that it is fed to.

    Attributes:
        batch: Maps row indices of the training set to a batch.
        labels: The labels of the training set.
        forward: The model, or its trainable part.
    """

    batch: Callable[[Tensor], Tensor]
    labels: Tensor
    forward: Callable[[Tensor], Tensor]


class MeanSquares:
    """The root mean square of each gradient over an epoch, for a metric that reads ``.grad``."""

    def __init__(self, model: nn.Module) -> None:
        self._sums = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
        self._batches = 0

    def add(self) -> None:
        """Add the gradients of one batch."""
        self._batches += 1
        for parameter, total in self._sums.items():
            if parameter.grad is not None:
                total.addcmul_(parameter.grad, parameter.grad)

    def leave_roots(self) -> None:
        """Write the root mean squares to ``.grad``."""
        for parameter, total in self._sums.items():
            parameter.grad = total.div_(self._batches).sqrt_()


class Run:
    """One seed of a recipe. Killed at any moment, it resumes from its last complete epoch and ends bit-equal.

    Args:
        recipe: The recipe.
        seed: Seed of the weights, the batches and a random metric.
        data: The data set, already on the device to train on.
        folder: The folder of the checkpoint. A checkpoint found there is resumed.
        start: The folder of the finished run whose network this one starts from.
        amp: Whether to train in mixed precision with bfloat16. Errors are evaluated in float32.

    Raises:
        DataError: If the folder holds a run of another recipe, device or precision.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        data: Mnist | Pictures,
        folder: Path,
        start: Path | None = None,
        *,
        amp: bool = False,
    ) -> None:
        torch.manual_seed(seed)
        self.recipe, self.data, self.folder, self._amp = recipe, data, folder, amp
        self.model = recipe.network(**recipe.options).to(data.train.images.device)
        # In this memory format convolutions on a CPU take half the time.
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=recipe.stages[0].lr)
        self._stage = recipe.stages[0]
        if start is not None:
            load_checkpoint(start, model=self.model)
        self._statistics = Statistics(self.model) if recipe.metric is taylor else None
        self.pruner = self._new_pruner(seed)
        self.order = torch.Generator().manual_seed(seed)
        device = self.data.train.images.device.type
        self.progress = Progress(recipe.fingerprint(), device=device, amp=amp)
        if (folder / "checkpoint.json").exists():
            self.progress = self._resumed(load_checkpoint(folder, **self._parts()))

    def _new_pruner(self, seed: int) -> Pruner:
        recipe, data = self.recipe, self.data
        example = None if recipe.units == "weights" else data.seen(data.train.images[:2])
        spaces: list[Space] = (
            [*recipe.weight_spaces(_totals(self.model, recipe), self._score)]
            if recipe.units == "weights"
            else [*recipe.channel_spaces(self._channel_metric(seed))]
        )
        return Pruner(self.model, spaces, self.optimizer, epochs=recipe.epochs, phases=recipe.phases(), example=example)

    def _channel_metric(self, seed: int) -> Callable[..., Any] | None:
        if self._statistics is not None:
            return taylor(self._statistics)
        return random(seed) if self.recipe.metric is random else self.recipe.metric

    def finish(self, report: Callable[[Progress, Pruner], None]) -> list[dict[str, Any]]:
        """Train the remaining epochs, calling `report` after each, and return the points of all stages."""
        first = 0
        for stage in self.recipe.stages:
            if self.progress.epoch < first + stage.epochs:
                self._finish_stage(stage, first, report)
            first += stage.epochs
        self.pruner.close()
        return self.progress.points

    def _resumed(self, saved: dict[str, Any]) -> Progress:
        if saved.get("recipe") != self.progress.recipe:
            raise DataError(
                f"{self.folder}: holds a run of another recipe {self.recipe.name!r}, so it cannot be resumed. "
                f"Remove the folder to start over."
            )
        found = Progress(**saved)
        if found.training != self.progress.training:
            raise DataError(
                f"{self.folder}: holds a run of recipe {self.recipe.name!r} in {found.training}, so it cannot be "
                f"resumed in {self.progress.training}. Train it as before, give another folder with --runs, or remove "
                "this one to start over."
            )
        return found

    def _finish_stage(self, stage: Stage, first: int, report: Callable[[Progress, Pruner], None]) -> None:
        self._enter(stage)
        inputs = self._inputs(stage)
        progress, last = self.progress, first + stage.epochs
        while progress.epoch < last:
            wall, cpu = time.perf_counter(), time.process_time()
            self._train_epoch(stage, progress.epoch - first, inputs)
            self.pruner.step()
            progress.epoch += 1
            progress.seconds += time.perf_counter() - wall
            progress.cpu_seconds += time.process_time() - cpu
            if progress.epoch == last and stage.report:
                progress.points.append(self._point())
            save_checkpoint(self.folder, **self._parts(), extra=vars(progress))
            report(progress, self.pruner)

    def _enter(self, stage: Stage) -> None:
        self._stage = stage
        options = {"momentum": stage.momentum, "nesterov": stage.nesterov, "weight_decay": stage.decay}
        self.optimizer.param_groups[0].update(options)
        layers = [module for module in self.model.modules() if isinstance(module, nn.Dropout)]
        for layer, rate in zip(layers, stage.dropout or (0.0,) * len(layers), strict=True):
            layer.p = rate

    def _inputs(self, stage: Stage) -> Inputs:
        """The training images, or the features that frozen convolutions compute from them, once per stage."""
        train = self.data.train
        if isinstance(self.model, LeNet5) and matches("conv1.weight", stage.freeze):
            self.model.eval()
            with torch.no_grad():
                features = torch.cat([self.model.features(images) for images in torch.split(train.images, 2_000)])
            return Inputs(features.__getitem__, train.labels, self.model.classify)
        return Inputs(partial(self.data.training_batch, generator=self.order), train.labels, self.model)

    def _train_epoch(self, stage: Stage, epoch: int, inputs: Inputs) -> None:
        self.model.train()
        size, total = self.recipe.batch, self.recipe.pictures or len(inputs.labels)
        # Only full batches: the remaining rows are skipped in this epoch.
        rows = torch.randperm(total, generator=self.order).to(inputs.labels.device)[: total - total % size]
        batches = torch.split(rows, size)
        due = self._is_event_due()
        squares = MeanSquares(self.model) if due and stage.metric is saliency else None
        statistics = self._statistics if due else None
        scales = [it.weight for it in self.model.modules() if isinstance(it, nn.BatchNorm2d) and stage.scale_l1]
        wrong = torch.zeros((), dtype=torch.int64, device=inputs.labels.device)
        for number, chosen in enumerate(batches):
            self.optimizer.param_groups[0]["lr"] = stage.learning_rate(epoch + number / len(batches))
            with torch.autocast(wrong.device.type, torch.bfloat16, enabled=self._amp):
                scores = inputs.forward(inputs.batch(chosen))
            scores = scores.float() if self._amp else scores
            wrong += (scores.detach().argmax(1) != inputs.labels[chosen]).sum()
            loss = F.cross_entropy(scores, inputs.labels[chosen], label_smoothing=self.recipe.smoothing)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            if squares:
                squares.add()
            if statistics:
                statistics.update()
            for scale in scales:  # the subgradient of the penalty
                assert scale.grad is not None
                scale.grad.add_(scale.detach().sign(), alpha=stage.scale_l1)
            self.optimizer.step()
        if squares:
            squares.leave_roots()
        self.progress.train_error = 100 * int(wrong) / len(rows)

    def _is_event_due(self) -> bool:
        """Whether units are removed at the end of this epoch, so that a metric may need the gradients."""
        pruner, kept = self.pruner, self.pruner.kept
        return any(counts[pruner.epoch] < kept[name] for name, counts in pruner.plan.items())

    def _point(self) -> dict[str, Any]:
        certified = self.pruner.certificate.values()
        wrong = wrong_pictures(self.model, self.data.test, self.data.seen)
        return {
            "asked": sum(counts[self.pruner.epoch - 1] for counts in self.pruner.plan.values()),
            "kept": sum(space["kept"] for space in certified),
            "total": sum(space["total"] for space in certified),
            "test_error": 100 * int(wrong.sum()) / len(wrong),
            "val_error": error_percent(self.model, self.data.validation, self.data.seen),
            "spaces": self.pruner.kept,
            **(self._weights_left() if self.recipe.units == "weights" else self._costs()),
            "epochs": self.progress.epoch,
            "seconds": round(self.progress.seconds, 1),
            "cpu_seconds": round(self.progress.cpu_seconds, 1),
            "test_wrong": packed_flags(wrong),  # for comparing two runs image by image
        }

    def _weights_left(self) -> dict[str, Any]:
        layers = layer_counts(self.pruner.masks)
        return {"layers": {layer.name: [layer.kept, layer.total] for layer in layers}}

    def _costs(self) -> dict[str, Any]:
        """Widths, parameters, and MACs for one image."""
        costs = layer_costs(self.model, self.data.seen(self.data.test.images[:1]))
        parameters, macs = sum(layer.parameters for layer in costs), sum(layer.macs for layer in costs)
        counted = {"parameters": parameters, "printed_parameters": printed_parameters(self.model), "macs": macs}
        options = {name: value for name, value in self.recipe.options.items() if name != "filters"}
        dense = _widths(self.recipe.network(**options), self.recipe.units)
        layers = {name: [width, dense[name]] for name, width in _widths(self.model, self.recipe.units).items()}
        return {"layers": layers, **counted}

    def _score(self, weight: Tensor) -> Tensor:
        """The scores by the current stage's metric. One pruner runs all stages, and a space has one metric."""
        return self._stage.metric(weight)

    def _parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "pruner": self.pruner,
            "optimizer": self.optimizer,
            "generator": self.order,
        }


def error_percent(
    model: nn.Module, split: Split, seen: Callable[[Tensor], Tensor] = Tensor.detach, *, batch: int = 2_000
) -> float:
    """The error on a split in percent. `seen` maps images to the network's input."""
    return 100 * int(wrong_pictures(model, split, seen, batch=batch).sum()) / len(split.labels)


def wrong_pictures(
    model: nn.Module, split: Split, seen: Callable[[Tensor], Tensor] = Tensor.detach, *, batch: int = 2_000
) -> Tensor:
    """The images of a split that the model misclassifies in eval mode, as bool [N]."""
    model.eval()
    with torch.no_grad():
        pairs = zip(torch.split(split.images, batch), torch.split(split.labels, batch), strict=True)
        return torch.cat([model(seen(images)).argmax(1) != labels for images, labels in pairs])


def packed_flags(flags: Tensor) -> str:
    """Booleans packed into base64, eight per byte, the first in the highest bit, as `numpy.unpackbits` expects.

    >>> packed_flags(torch.tensor([True, False, False, False, False, False, False, True]))
    'gQ=='
    """
    return b64encode(np.packbits(flags.cpu().numpy()).tobytes()).decode()


def _totals(model: nn.Module, recipe: Recipe) -> dict[str, int]:
    named = named_parameters(model)
    return {
        name: sum(parameter.numel() for key, parameter in named.items() if matches(key, as_globs(glob) or ()))
        for name, glob in recipe.spaces.items()
    }


def _widths(model: nn.Module, units: str) -> dict[str, int]:
    """The output channels of each convolution, or the channels that each BatchNorm reads."""
    if units == "output":
        return {name: it.out_channels for name, it in model.named_modules() if isinstance(it, nn.Conv2d)}
    return {name: it.num_features for name, it in model.named_modules() if isinstance(it, nn.BatchNorm2d)}
