"""Recipes that train and prune a network in one run under one learning-rate curve, their controls and their rivals.

The network shrinks in the middle third of the run, by the paper's schedule, and no layer is frozen.
``one-run-blend-*`` ranks channels by the paper's blend, with norms that are means and at least a tenth of every layer
kept; ``one-run-taylor-*`` ranks them by the Taylor importance of the BatchNorm's scale and shift. All of these have the
same number of epochs:

========================  ==========================================================================================
one-run-dense             the dense network
one-run-scratch-M-P       a network with the final widths of one-run-M-P, trained from scratch
narrow-M-P                a uniformly narrower network with as many MACs as one-run-M-P
one-shot-M-P              all channels removed at one event, in the middle of the schedule's events
slimming-L-P              Network Slimming (Liu et al. 2017): L1 penalty L on the scales, one event, fine-tuning
filters-P                 L1 norms of filters, the same share of every layer, one event (Li et al. 2017)
random-P                  channels drawn at random, by the same schedule
========================  ==========================================================================================

``seconds-M-P`` trains the dense network for as many CPU seconds as one-run-M-P took. M is the metric, and P the
percentage of channels removed.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import floor
from typing import Any

import torch
from torch import nn

from keepk.metrics.channels import blend, bn_scale, l1
from keepk.metrics.from_statistics import taylor
from keepk.metrics.weights import random
from keepk.model.costs import layer_costs
from keepk.plan.schedules import Annealing, OneShot
from keepk_paper.recipes import Recipe, Stage

DENSE = "one-run-dense"
# How channels are ranked, and the least share that every layer keeps. A run creates the statistics for `taylor`.
METRICS: dict[str, dict[str, Any]] = {
    "blend": {"metric": blend(alpha=0.5), "layer_floor": 0.1},
    "taylor": {"metric": taylor},
}
PENALTIES = {"1e-4": 1e-4, "3e-4": 3e-4, "1e-3": 1e-3}  # Liu et al. use 1e-4, with 160 epochs
# Schedules that remove 60 % and 70 % in ten and eleven events.
SLOW, FAST = Annealing(p0=0.5, n1=6, nu=0.02), Annealing(p0=0.5, n1=6, nu=0.04)


@dataclass(frozen=True)
class Setting:
    """A network and the length of its runs.

    Args:
        recipe: Makes a recipe of the network: `Recipe` without name and stages. It has one space.
        epochs: The epochs of every recipe.
        first: The epoch that ends with the first event.
        middle: The epoch that ends with the event of the recipes that have only one.
        plans: By the percentage of channels removed, the number of channels to keep and the schedule.
    """

    recipe: Callable[..., Recipe]
    epochs: int
    first: int
    middle: int
    plans: Mapping[int, tuple[int, Annealing]]

    def curve(self, **options: Any) -> Stage:
        """The single stage of most recipes: one epoch of warm-up, then a cosine to zero."""
        return Stage(self.epochs, lr=0.1, warmup=1, decay=5e-4, **options)

    def goal(self, keep: int, schedule: Annealing | OneShot) -> dict[str, tuple[int, Annealing | OneShot]]:
        """The goal of a stage, for the network's only space."""
        (space,) = self.recipe(name="", stages=[]).spaces
        return {space: (keep, schedule)}


def by_name(*several: Iterator[Recipe]) -> dict[str, Recipe]:
    """Recipes by their names."""
    return {recipe.name: recipe for recipes in several for recipe in recipes}


def dense(setting: Setting) -> Iterator[Recipe]:
    """The dense control."""
    yield setting.recipe(name=DENSE, stages=[setting.curve()])


def pruned(setting: Setting) -> Iterator[Recipe]:
    """The pruned runs, by each metric."""
    for percent, (keep, schedule) in setting.plans.items():
        for metric, ranking in METRICS.items():
            events = setting.curve(keep=setting.goal(keep, schedule), first_event=setting.first)
            yield setting.recipe(name=f"one-run-{metric}-{percent}", stages=[events], control=DENSE, **ranking)


def alike(setting: Setting) -> Iterator[Recipe]:
    """Unpruned networks that are as wide, as costly or trained as long as a pruned run; see `settled`."""
    recipe = partial(setting.recipe, control=DENSE, only_by_name=True)
    for percent in setting.plans:
        for metric in METRICS:
            for kind, match in (("one-run-scratch", "widths"), ("narrow", "macs"), ("seconds", "seconds")):
                name, run = f"{kind}-{metric}-{percent}", f"one-run-{metric}-{percent}"
                yield recipe(name=name, stages=[setting.curve()], like=run, match=match)


def rivals(setting: Setting) -> Iterator[Recipe]:
    """Other methods of pruning, with as many epochs."""
    recipe = partial(setting.recipe, control=DENSE, only_by_name=True)
    for percent, (keep, schedule) in setting.plans.items():
        at_once = setting.goal(keep, OneShot())
        for metric, ranking in METRICS.items():
            one_event = setting.curve(keep=at_once, first_event=setting.middle)
            yield recipe(name=f"one-shot-{metric}-{percent}", stages=[one_event], **ranking)
        sparse = setting.epochs * 3 // 5
        for written, penalty in PENALTIES.items():
            training = Stage(sparse, lr=0.1, warmup=1, decay=5e-4, keep=at_once, first_event=sparse, scale_l1=penalty)
            tuning = Stage(setting.epochs - sparse, lr=0.05, decay=5e-4)
            stages = [replace(training, report=False), tuning]
            yield recipe(name=f"slimming-{written}-{percent}", stages=stages, metric=bn_scale)
        example = recipe(name="", stages=[])
        shares = equal_shares(filters_of(example.network(**example.options)), keep)
        goals = {name: (count, OneShot()) for name, count in shares.items()}
        by_layer = setting.curve(keep=goals, first_event=setting.middle)
        yield recipe(name=f"filters-{percent}", spaces={name: name for name in shares}, stages=[by_layer], metric=l1)
        drawn = setting.curve(keep=setting.goal(keep, schedule), first_event=setting.first)
        yield recipe(name=f"random-{percent}", stages=[drawn], metric=random)


def filters_of(network: nn.Module) -> dict[str, int]:
    """The number of filters of every convolution, by name."""
    return {name: it.out_channels for name, it in network.named_modules() if isinstance(it, nn.Conv2d)}


def equal_shares(widths: Mapping[str, int], keep: int) -> dict[str, int]:
    """Split `keep` channels over layers in proportion to their widths; remainders go to the largest fractions.

    >>> equal_shares({"a": 16, "b": 16, "c": 32}, 21)
    {'a': 5, 'b': 5, 'c': 11}
    """
    total = sum(widths.values())
    exact = {name: keep * width / total for name, width in widths.items()}
    counts = {name: floor(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: keep - sum(counts.values())]:
        counts[name] += 1
    return counts


FINENESS = 512  # uniform widths are tried in steps of 1 / 512
Point = Mapping[str, Any]


def settled(recipe: Recipe, reference: Point, control: Point | None) -> Recipe:
    """Complete a recipe that imitates a finished run.

    Args:
        recipe: A recipe with `like` and `match`.
        reference: The last point of the run that it imitates.
        control: The last point of the dense control, for CPU seconds per epoch.

    Returns:
        The recipe with the widths, the uniform width or the number of epochs that `match` calls for.
    """
    if recipe.match == "widths":
        filters = tuple(left for left, _ in reference["layers"].values())
        return replace(recipe, options={**recipe.options, "filters": filters})
    if recipe.match == "macs":
        return replace(recipe, options={**recipe.options, "width": _width_with(recipe, reference["macs"])})
    assert control is not None
    (stage,) = recipe.stages
    per_epoch = control["cpu_seconds"] / control["epochs"]
    epochs = max(stage.warmup + 1, round(reference["cpu_seconds"] / per_epoch))
    return replace(recipe, stages=[replace(stage, epochs=epochs)])


def _width_with(recipe: Recipe, macs: int) -> float:
    """The uniform width whose MACs are nearest, found by bisection because MACs rise with the width."""
    low, high = 1, round(recipe.options["width"] * FINENESS)
    while low < high:
        middle = (low + high) // 2
        if _macs(recipe, middle) < macs:
            low = middle + 1
        else:
            high = middle
    nearest = min((it for it in (low - 1, low) if it), key=lambda it: abs(_macs(recipe, it) - macs))
    return nearest / FINENESS


def _macs(recipe: Recipe, width: int) -> int:
    network = recipe.network(**{**recipe.options, "width": width / FINENESS})
    return sum(layer.macs for layer in layer_costs(network, torch.zeros(1, 3, 32, 32)))
