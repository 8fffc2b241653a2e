"""Recipes that train and prune VGG-16 in one run under one learning-rate curve, their controls and their rivals.

The network shrinks in the middle third: 40 epochs of a cosine, events at the ends of epochs 12 to 22 by the paper's
plan, nothing frozen. ``one-run-blend-*`` ranks by the paper's blend with norms as means and a floor of a tenth in every
layer, ``one-run-taylor-*`` by the Taylor importance of the BatchNorm's gate. Beside them, with as many epochs:

========================  ==========================================================================================
one-run-dense             the dense network (in `colour`)
one-run-scratch-M-P       the widths that one-run-M-P ended with, trained from scratch
narrow-M-P                a uniformly narrower network with as many MACs as one-run-M-P
seconds-M-P               the dense network, for as many CPU seconds as one-run-M-P took
one-shot-M-P              all channels removed at one event, in the middle of the plan's events
slimming-L-P              Network Slimming (Liu et al. 2017): L1 penalty L on the scales, one event, fine-tuning
filters-P                 L1 norms of filters, the same share of every layer, one event (Li et al. 2017)
random-P                  channels drawn at random, by the plan
trained-M-P               from the trained dense network: 12 epochs with events, 12 more
paper-M-P                 the paper's text from the trained dense network: .005, halved at each quarter, no decay
========================  ==========================================================================================

M is the metric, P the share of the channels that goes, in percent.

`settled` completes recipes that are like a finished run: as wide, as costly, or as long as it was.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import floor
from typing import Any

import torch
from torch import nn

from keepk.metrics.channels import blend, bn_scale, l1
from keepk.metrics.statistics import taylor
from keepk.metrics.weights import random
from keepk.model.costs import layer_costs
from keepk.plan.schedules import Annealing, OneShot
from keepk_paper.colour import FC, GAMMA, small_vgg
from keepk_paper.models import VGG16
from keepk_paper.recipes import Recipe, Stage

DENSE = "one-run-dense"
# How channels are ranked, and the least that stays in every layer; the run itself gives `taylor` its statistics.
METRICS: dict[str, dict[str, Any]] = {
    "blend": {"metric": blend(alpha=0.5), "layer_floor": 0.1},
    "taylor": {"metric": taylor},
}
PENALTIES = {"1e-4": 1e-4, "3e-4": 3e-4, "1e-3": 1e-3}  # Liu's 1e-4 is for 160 epochs


@dataclass(frozen=True)
class Setting:
    """A network's width and a run's length.

    Args:
        width: Of the VGG-16.
        epochs: Of every recipe.
        first: The epoch at whose end the first event is.
        middle: That of a single event.
        plans: By the percentage that goes, how many channels stay, and the schedule.
    """

    width: float
    epochs: int
    first: int
    middle: int
    plans: Mapping[int, tuple[int, Annealing]]


SLOW, FAST = Annealing(p0=0.5, n1=6, nu=0.02), Annealing(p0=0.5, n1=6, nu=0.04)
QUARTER = Setting(0.25, 40, 12, 17, {60: (422, SLOW), 70: (316, FAST)})
HALF = Setting(0.5, 40, 12, 17, {60: (844, SLOW), 70: (633, FAST)})
FULL = Setting(1.0, 30, 9, 14, {60: (1_689, SLOW), 70: (1_267, FAST)})
DIGITS = Setting(1.0, 20, 6, 9, {60: (1_689, Annealing(p0=0.5, n1=4, nu=0.04))})


def recipes(setting: Setting) -> dict[str, Recipe]:
    """The runs of a setting, their controls and their rivals, by name."""
    found = (it for percent in setting.plans for make in (_runs, _rivals) for it in make(setting, percent))
    return {recipe.name: recipe for recipe in found}


def _runs(setting: Setting, percent: int) -> Iterator[Recipe]:
    """By each metric, the pruned run and what is compared with its outcome."""
    keep, schedule = setting.plans[percent]
    recipe = partial(small_vgg, options={"width": setting.width}, control=DENSE)
    curve = partial(Stage, setting.epochs, lr=0.1, warmup=1, decay=5e-4)
    for name, ranking in METRICS.items():
        run = f"one-run-{name}-{percent}"
        events = curve(keep={"conv": (keep, schedule)}, first_event=setting.first)
        yield recipe(name=run, stages=[events], **ranking)
        for alike, match in (("one-run-scratch", "widths"), ("narrow", "macs"), ("seconds", "seconds")):
            yield recipe(name=f"{alike}-{name}-{percent}", stages=[curve()], like=run, match=match)


def _rivals(setting: Setting, percent: int) -> Iterator[Recipe]:
    keep, schedule = setting.plans[percent]
    goal = {"conv": (keep, OneShot())}
    recipe = partial(small_vgg, options={"width": setting.width}, control=DENSE)
    curve = partial(Stage, setting.epochs, lr=0.1, warmup=1, decay=5e-4)
    for name, ranking in METRICS.items():
        one_event = curve(keep=goal, first_event=setting.middle)
        yield recipe(name=f"one-shot-{name}-{percent}", stages=[one_event], **ranking)
    sparse = setting.epochs * 3 // 5
    for written, penalty in PENALTIES.items():
        training = Stage(sparse, lr=0.1, warmup=1, decay=5e-4, keep=goal, first_event=sparse, scale_l1=penalty)
        tuning = Stage(setting.epochs - sparse, lr=0.05, decay=5e-4)
        stages = [replace(training, report=False), tuning]
        yield recipe(name=f"slimming-{written}-{percent}", stages=stages, metric=bn_scale)
    shares = equal_shares(filters_of(VGG16(width=setting.width)), keep)
    by_layer = curve(keep={name: (count, OneShot()) for name, count in shares.items()}, first_event=setting.middle)
    spaces = {name: name for name in shares}
    yield recipe(name=f"filters-{percent}", spaces=spaces, stages=[by_layer], metric=l1)
    drawn = curve(keep={"conv": (keep, schedule)}, first_event=setting.first)
    yield recipe(name=f"random-{percent}", stages=[drawn], metric=random)


def _from_trained(setting: Setting, percent: int) -> Iterator[Recipe]:
    """From the last network of the recipe ``dense``."""
    keep, schedule = setting.plans[percent]
    goal = {"conv": (keep, schedule)}
    recipe = partial(small_vgg, options={"width": setting.width}, start="dense")
    for name, ranking in METRICS.items():
        stages = [
            Stage(12, lr=0.05, flat=12, decay=5e-4, keep=goal, freeze=FC, report=False),
            Stage(12, lr=0.05, decay=5e-4),
        ]
        yield recipe(name=f"trained-{name}-{percent}", stages=stages, **ranking)
    quarter = partial(Stage, 12, flat=None, nesterov=False, report=False)
    rates = (0.0025, 0.00125, 0.000625)
    text = [quarter(lr=0.005, keep=goal, freeze=FC), *(quarter(lr=lr) for lr in rates)]
    text[-1] = replace(text[-1], report=True)
    yield recipe(name=f"paper-gamma-{percent}", stages=text, metric=GAMMA)
    yield recipe(name=f"paper-blend-{percent}", stages=text, **METRICS["blend"])


def filters_of(network: nn.Module) -> dict[str, int]:
    """By name, the filters of every convolution."""
    return {name: it.out_channels for name, it in network.named_modules() if isinstance(it, nn.Conv2d)}


def equal_shares(widths: Mapping[str, int], keep: int) -> dict[str, int]:
    """`keep` channels in all, the same share of every layer; what rounding leaves goes to the largest remainders.

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


def _dense(setting: Setting) -> Recipe:
    stage = Stage(setting.epochs, lr=0.1, warmup=1, decay=5e-4)
    return small_vgg(name=DENSE, options={"width": setting.width}, stages=[stage])


_TRAINED = (it for percent in QUARTER.plans for it in _from_trained(QUARTER, percent))
# The pruned runs themselves; everything else is compared with them.
PRUNED = {f"one-run-{name}-{percent}" for name in METRICS for percent in (60, 70)} | {DENSE}
EXPERIMENTS: dict[str, dict[str, Recipe]] = {
    "vgg16-cifar10": {**recipes(QUARTER), **{recipe.name: recipe for recipe in _TRAINED}},
    "vgg16-half-cifar10": recipes(HALF),
    "vgg16-svhn": recipes(DIGITS),
    "vgg16-full-cifar10": {DENSE: _dense(FULL), **recipes(FULL)},
}

FINENESS = 512  # uniform widths are tried in steps of 1 / 512
Point = Mapping[str, Any]


def settled(recipe: Recipe, reference: Point, control: Point | None) -> Recipe:
    """The recipe with the widths, the factor of all widths or the epochs that its reference calls for.

    Args:
        recipe: One that says `like` and `match`.
        reference: The last point of the run that it is like.
        control: The last point of the dense control, for CPU seconds per epoch.
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
    """The width whose MACs are nearest; they rise with it, so the place is found by halving."""
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
