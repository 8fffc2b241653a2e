"""Recipes: how a network of the paper is trained, pruned and fine-tuned, as plain values.

A recipe is a sequence of stages. Dense training is the first stage, so that one `keepk.Pruner`, one optimizer and one
plan cover the whole run. Each stage with ``report=True`` ends in a point of the result file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from math import cos, pi
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from keepk.metrics.layers import At
from keepk.metrics.weights import magnitude
from keepk.plan.names import as_globs, matches
from keepk.plan.phases import Phase
from keepk.plan.schedules import Annealing, AnySchedule, plan
from keepk.plan.spaces import ChannelSpace, WeightSpace, channels, weights

Metric: TypeAlias = Callable[[Tensor], Tensor]


def saliency(weight: Tensor) -> Tensor:
    r"""|w| times the root mean square of its gradients over the epoch, which training writes to ``.grad``.

    .. math:: R(w) = |w| \sqrt{E[g^2]}

    Up to a factor, the square is the increase of the loss if w is removed, by a second-order expansion with the
    diagonal of the empirical Fisher matrix instead of the Hessian (LeCun's optimal brain damage).
    """
    assert weight.grad is not None  # `train.MeanSquares` writes it before every event
    return (weight * weight.grad).abs()


@dataclass(frozen=True)
class Stage:
    """A span of epochs with fixed training settings.

    Args:
        epochs: The number of epochs.
        lr: The peak learning rate.
        flat: The number of epochs at `lr` before it decays to zero as a cosine; None keeps it constant.
        warmup: The number of epochs in which the learning rate first rises linearly from zero to `lr`. They count as
            part of `flat`, or of the cosine if `flat` is shorter.
        decay: Weight decay.
        momentum: Momentum; 0 is plain SGD.
        nesterov: Whether the momentum is Nesterov's.
        dropout: The rates of the model's dropout layers.
        keep: The number of units to keep and the schedule that reaches it, by space.
        freeze: Globs of parameters that are not updated.
        report: Whether the end of the stage is a point of the experiment.
        metric: Ranks the weights at the events of the stage.
        first_event: The epoch that ends with the first event.
        scale_l1: The L1 penalty on the scales of BatchNorms (Network Slimming).
    """

    epochs: int
    lr: float
    flat: int | None = 0
    decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = True
    dropout: tuple[float, ...] = ()
    keep: Mapping[str, tuple[int, AnySchedule]] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    report: bool = True
    metric: Metric = field(default=magnitude, repr=False)
    warmup: int = 0
    first_event: int = 1
    scale_l1: float = 0.0

    def learning_rate(self, progress: float) -> float:
        """The rate after `progress` epochs of this stage.

        >>> [round(Stage(4, lr=1.0, flat=2).learning_rate(epoch), 2) for epoch in range(5)]
        [1.0, 1.0, 1.0, 0.5, 0.0]
        >>> [round(Stage(4, lr=1.0, warmup=2, flat=2).learning_rate(epoch), 2) for epoch in range(5)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
        """
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        if self.flat is None or progress <= self.flat:
            return self.lr
        return self.lr * 0.5 * (1 + cos(pi * (progress - self.flat) / (self.epochs - self.flat)))


@dataclass(frozen=True)
class Recipe:
    """The settings of a run, from initialisation to its last point.

    Args:
        name: The name in result files.
        network: The class of the network.
        spaces: The glob of each space by name, or several globs.
        stages: The stages, in order.
        batch: Images per step.
        options: Arguments of the network.
        units: The units of the spaces: "weights", or channels at the "output" or the "input" of modules.
        metric: Ranks channels; None is the library's default. For `taylor` and `random`, give the factory itself: each
            run calls it with its statistics or its seed. Weights are ranked by their stage's metric.
        start: The recipe whose final network this one starts from.
        smoothing: Label smoothing.
        pictures: Train on this many images, the first of the training set; None is all.
        layer_floor: The minimum number of channels kept in each layer, as a count or a share.
        control: The recipe whose final network is the dense baseline, if it is not `start`.
        like: The recipe whose finished run with the same seed this one imitates.
        match: The property in which it imitates that run: "widths", "macs" or CPU "seconds"; see `keepk_paper.one_run`.
        quality: Of each space, keep the weights of the network of `start` whose magnitude is at least this many
            standard deviations of the space's nonzero weights (Han et al. 2015). How many these are is counted when the
            run begins, and replaces the numbers in `keep` of the stages that prune; see `by_quality`.
        only_by_name: Whether a run of the whole experiment skips this recipe. There are dozens of comparisons.
    """

    name: str
    network: type[nn.Module]
    spaces: Mapping[str, str | tuple[str, ...]]
    stages: Sequence[Stage]
    batch: int
    options: Mapping[str, Any] = field(default_factory=dict)
    units: Literal["weights", "output", "input"] = "weights"
    metric: Callable[..., Any] | None = None
    start: str | None = None
    smoothing: float = 0.0
    pictures: int | None = None
    layer_floor: int | float = 1
    control: str | None = None
    like: str | None = None
    match: Literal["widths", "macs", "seconds"] | None = None
    only_by_name: bool = False
    quality: float | None = None

    @property
    def needs(self) -> list[str]:
        """The recipes that must be finished before this one can start."""
        control = self.control if self.match == "seconds" else None
        return [name for name in (self.start, self.like, control) if name]

    def fingerprint(self) -> str:
        """A hash of every setting that affects the result, by which a checkpoint is matched to its recipe.

        Fields that have their default value are left out, so that a field added later does not invalidate the
        checkpoints of the recipes that do not use it.
        """
        metrics = [stage.metric.__name__ for stage in self.stages]
        stages = list(map(_not_default, self.stages))
        said: tuple[Any, ...] = (self.network.__name__, dict(self.spaces), self.batch, metrics, stages)
        metric = getattr(self.metric, "__name__", self.metric)  # not the address of a function
        more = (dict(self.options), self.units, metric, self.start, self.smoothing, self.pictures)
        usual: tuple[Any, ...] = ({}, "weights", None, None, 0.0, None)
        said = said if more == usual else said + more
        added = {"layer_floor": (self.layer_floor, 1), "like": (self.like, None), "match": (self.match, None)}
        added["quality"] = (self.quality, None)
        changed = {name: value for name, (value, default) in added.items() if value != default}
        return sha256(repr((*said, changed) if changed else said).encode()).hexdigest()

    @property
    def epochs(self) -> int:
        """The total number of epochs."""
        return sum(stage.epochs for stage in self.stages)

    def phases(self) -> list[Phase] | None:
        """The phases of the pruner, one or two per stage; None if no stage prunes."""
        if not any(stage.keep for stage in self.stages):
            return None
        return [phase for stage in self.stages for phase in _phases(stage)]

    def weight_spaces(self, totals: Mapping[str, int], metric: Metric = magnitude) -> list[WeightSpace]:
        """The spaces of weights, each with one plan for all of its stages."""
        return [self._space(name, glob, totals[name], metric) for name, glob in self.spaces.items()]

    def channel_spaces(self, metric: Callable[..., Any] | None) -> list[ChannelSpace]:
        """The spaces of channels. A space that no stage prunes keeps all of its channels."""
        assert self.units != "weights"
        goals = {name: goal for stage in self.stages for name, goal in stage.keep.items()}
        space = partial(channels, at=self.units, metric=metric, layer_floor=self.layer_floor)
        return [
            space(glob, keep=goals[name][0], schedule=goals[name][1], name=name)
            if name in goals
            else space(glob, prune=0.0, name=name)
            for name, glob in self.spaces.items()
        ]

    def _space(self, name: str, glob: str | tuple[str, ...], total: int, metric: Metric) -> WeightSpace:
        counts, left = list[int](), total
        for stage in self.stages:
            if name in stage.keep:
                keep, schedule = stage.keep[name]
                counts += plan(schedule, left, keep, epochs=stage.epochs - stage.first_event + 1)
                left = keep
        if not counts:  # a dense network: no stage prunes this space
            return weights(glob, prune=0.0, name=name, metric=metric)
        return weights(glob, keep=left, name=name, schedule=counts, metric=metric)


def by_quality(recipe: Recipe, model: nn.Module) -> Recipe:
    """The recipe with the numbers of weights that its `quality` keeps in this model.

    Keeping that many weights by magnitude is the same as pruning by the threshold, so K is an outcome here.

    >>> from keepk import OneShot
    >>> layer = nn.Linear(4, 1, bias=False)
    >>> layer.weight.data = torch.tensor([[-2.0, -1.0, 1.0, 0.0]])  # the nonzero ones deviate by 1.25 from their mean
    >>> stage = Stage(1, lr=0.1, keep={"all": (0, OneShot())})
    >>> by_quality(Recipe("han", nn.Linear, {"all": "*"}, [stage], batch=1, quality=1.0), layer).stages[0].keep
    {'all': (1, OneShot())}
    """
    assert recipe.quality is not None
    counts = dict[str, int]()
    for name, glob in recipe.spaces.items():
        chosen = [
            tensor.detach().flatten() for key, tensor in model.named_parameters() if matches(key, as_globs(glob) or ())
        ]
        values = torch.cat(chosen)
        deviation = values[values != 0].std(correction=0)
        counts[name] = int((values.abs() >= recipe.quality * deviation).sum())
    stages = [
        replace(stage, keep={name: (counts[name], schedule) for name, (_, schedule) in stage.keep.items()})
        for stage in recipe.stages
    ]
    return replace(recipe, stages=stages)


def _phases(stage: Stage) -> list[Phase]:
    """A stage as one phase, or as two if its first event is not at the end of its first epoch."""
    before = stage.first_event - 1 if stage.keep else 0
    dense = [Phase(before, freeze=stage.freeze)] if before else []
    return [*dense, Phase(stage.epochs - before, prune=tuple(stage.keep), freeze=stage.freeze)]


def _not_default(stage: Stage) -> dict[str, Any]:
    """The fields of a stage that do not have their default value, except the metric, which is hashed by its name."""
    values = {item.name: (getattr(stage, item.name), item.default) for item in fields(stage) if item.name != "metric"}
    return {name: value for name, (value, default) in values.items() if value != default}


FC = ("classifier.*",)  # the fully connected layers, which the paper freezes while it removes channels


def paper_dense(network: type[nn.Module], spaces: Mapping[str, str], units: At) -> Recipe:
    """Dense training as in the paper's text: 250 epochs of SGD at .1, divided by five after each quarter."""
    quarters = zip((62, 63, 62, 63), (0.1, 0.02, 0.004, 0.0008), strict=True)
    stages = [Stage(epochs, lr=lr, flat=None, nesterov=False, decay=5e-4, report=False) for epochs, lr in quarters]
    stages[-1] = replace(stages[-1], report=True)
    return Recipe("full-dense", network, spaces, stages, batch=128, units=units)


def paper_pruned(dense: Recipe, name: str, keep: int, annealing: int, metric: Callable[..., Any]) -> Recipe:
    """Pruning the dense network as in the paper's text: 250 epochs at .005, halved after each quarter.

    Channels are removed in the first `annealing` epochs, with the fully connected layers frozen.
    """
    part = partial(Stage, flat=None, nesterov=False, report=False)
    goal = {next(iter(dense.spaces)): (keep, Annealing(p0=0.5, n1=10, nu=0.02))}
    stages = [
        part(annealing, lr=0.005, keep=goal, freeze=FC),
        part(62 - annealing, lr=0.005),
        part(63, lr=0.0025),
        part(62, lr=0.00125),
        part(63, lr=0.000625, report=True),
    ]
    return replace(dense, name=name, metric=metric, start=dense.name, stages=stages)
