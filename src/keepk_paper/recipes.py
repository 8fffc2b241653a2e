"""Recipes: how a network of the paper is trained, pruned and fine-tuned, as plain values.

A recipe is a row of stages. The dense training is the first stage, so that one `keepk.Pruner`, one optimizer and one
plan go from the fresh network to the last point; each stage that ends at a number of weights is a point to report.
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
from keepk.plan.names import matches
from keepk.plan.phases import Phase
from keepk.plan.schedules import Annealing, AnySchedule, plan
from keepk.plan.spaces import ChannelSpace, WeightSpace, channels, weights

Metric: TypeAlias = Callable[[Tensor], Tensor]


def saliency(weight: Tensor) -> Tensor:
    r"""|w| times the root mean square of its gradients in the epoch, which training leaves in ``.grad``.

    .. math:: R(w) = |w| \sqrt{E[g^2]}

    The square is, but for a factor, what the loss gains if w goes, by a second-order expansion with the diagonal of
    the empirical Fisher matrix in the place of the Hessian (LeCun's optimal brain damage).
    """
    assert weight.grad is not None  # put there before every event
    return (weight * weight.grad).abs()


@dataclass(frozen=True)
class Stage:
    """A span of epochs with one way of training.

    Args:
        epochs: How long it is.
        lr: The learning rate at its start.
        flat: For how many epochs the learning rate stays there, before it falls to zero as a cosine; None: always.
        warmup: For how many epochs the learning rate first rises from zero to `lr`, in a straight line. They count as
            part of `flat`, or of the cosine where `flat` is shorter.
        decay: Weight decay.
        momentum: 0 is plain SGD; otherwise with `nesterov` or without.
        dropout: The rates of the model's dropout layers.
        keep: By space, how many weights are left at the end, and the schedule that gets there.
        freeze: Globs of parameters that get no update.
        report: Whether its end is a point of the experiment.
        metric: Ranks the weights at its events.
        first_event: The epoch at whose end the schedule has its first event.
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
    """An experiment's way from a fresh network to its points.

    Args:
        name: What it is called in results.
        network: Makes the fresh network.
        spaces: By name, the glob of each space.
        stages: What is done, in order.
        batch: Pictures per step.
        options: Arguments of the network.
        units: What spaces are of: "weights", or channels counted at the "output" or the "input" of modules.
        metric: Ranks channels; None is the library's own choice. `taylor` and `random` are given as they are: a run
            calls them with its own statistics or seed. Weights are ranked by their stage's metric.
        start: The recipe whose last network this one goes on with.
        smoothing: Of the labels.
        pictures: How many of the training pictures are used, the first ones; None is all.
        layer_floor: The least that stays of every layer's channels: a count, or a share.
        control: The recipe whose last network is the dense one that results are compared with, if it is not `start`.
        like: The recipe whose finished run of the same seed this one imitates.
        match: The property in which it imitates that run: "widths", "macs" or CPU "seconds"; see `keepk_paper.one_run`.
        quality: Of each space, keep the weights of the network of `start` whose magnitude is at least this many
            standard deviations of the space's nonzero weights (Han et al. 2015). The counts go into the stages that
            prune, whose `keep` names the spaces and the schedule, with any number; see `by_quality`.
        only_by_name: Whether a run of the whole experiment leaves this recipe out: there are dozens of comparisons.
    """

    name: str
    network: type[nn.Module]
    spaces: Mapping[str, str]
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
        """A hash of every number of this recipe, which a checkpoint of another recipe does not share.

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
        """The length of all stages."""
        return sum(stage.epochs for stage in self.stages)

    def phases(self) -> list[Phase] | None:
        """Each stage as a phase of the pruner; None if no stage prunes."""
        if not any(stage.keep for stage in self.stages):
            return None
        return [phase for stage in self.stages for phase in _phases(stage)]

    def weight_spaces(self, totals: Mapping[str, int], metric: Metric = magnitude) -> list[WeightSpace]:
        """Each space with the plan that goes through all of its points."""
        return [self._space(name, glob, totals[name], metric) for name, glob in self.spaces.items()]

    def channel_spaces(self, metric: Callable[..., Any] | None) -> list[ChannelSpace]:
        """Each space with the goal of the stage that prunes it; without one it keeps all of its channels."""
        assert self.units != "weights"
        goals = {name: goal for stage in self.stages for name, goal in stage.keep.items()}
        space = partial(channels, at=self.units, metric=metric, layer_floor=self.layer_floor)
        return [
            space(glob, keep=goals[name][0], schedule=goals[name][1], name=name)
            if name in goals
            else space(glob, prune=0.0, name=name)
            for name, glob in self.spaces.items()
        ]

    def _space(self, name: str, glob: str, total: int, metric: Metric) -> WeightSpace:
        counts, left = list[int](), total
        for stage in self.stages:
            if name in stage.keep:
                keep, schedule = stage.keep[name]
                counts += plan(schedule, left, keep, epochs=stage.epochs - stage.first_event + 1)
                left = keep
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
        chosen = [tensor.detach().flatten() for key, tensor in model.named_parameters() if matches(key, [glob])]
        values = torch.cat(chosen)
        deviation = values[values != 0].std(correction=0)
        counts[name] = int((values.abs() >= recipe.quality * deviation).sum())
    stages = [
        replace(stage, keep={name: (counts[name], schedule) for name, (_, schedule) in stage.keep.items()})
        for stage in recipe.stages
    ]
    return replace(recipe, stages=stages)


def _phases(stage: Stage) -> list[Phase]:
    """A stage as a phase, or as two if its events begin later."""
    before = stage.first_event - 1 if stage.keep else 0
    dense = [Phase(before, freeze=stage.freeze)] if before else []
    return [*dense, Phase(stage.epochs - before, prune=tuple(stage.keep), freeze=stage.freeze)]


def _not_default(stage: Stage) -> dict[str, Any]:
    """The fields of a stage that do not have their default value, except the metric, which is hashed by its name."""
    values = {item.name: (getattr(stage, item.name), item.default) for item in fields(stage) if item.name != "metric"}
    return {name: value for name, (value, default) in values.items() if value != default}


FC = ("classifier.*",)  # the fully connected layers, which the paper freezes while it removes channels


def paper_dense(network: type[nn.Module], spaces: Mapping[str, str], units: At) -> Recipe:
    """The dense training of the paper's text: 250 epochs of SGD at .1, a fifth of it after each quarter."""
    quarters = zip((62, 63, 62, 63), (0.1, 0.02, 0.004, 0.0008), strict=True)
    stages = [Stage(epochs, lr=lr, flat=None, nesterov=False, decay=5e-4, report=False) for epochs, lr in quarters]
    stages[-1] = replace(stages[-1], report=True)
    return Recipe("full-dense", network, spaces, stages, batch=128, units=units)


def paper_pruned(dense: Recipe, name: str, keep: int, annealing: int, metric: Callable[..., Any]) -> Recipe:
    """The pruning of the paper's text, from the dense network: 250 epochs at .005, halved after each quarter.

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
