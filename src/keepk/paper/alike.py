"""Recipes that are like a finished run: as wide, as costly, or as long as it was."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from keepk.graph.costs import layer_costs
from keepk.paper.recipes import Recipe

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
