"""A run with both kinds of spaces, and what rich prints of a report."""

import io
from typing import Any

import torch
from rich.console import Console

import keepk
from keepk.run.checks import Shrink
from networks import NETWORKS


def rendered(thing: object, width: int = 100) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(thing)
    return stream.getvalue()


def mixed_run(shrink: Shrink = "each") -> tuple[Any, Any, Any]:
    """A run that prunes channels and weights of one network in three events."""
    model, example = NETWORKS["conv_bn_flatten"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    spaces = [
        keepk.weights(["second.weight", "head.weight"], keep=50, name="weights", schedule=[900, 250, 50]),
        keepk.channels(["first", "second"], keep=6, name="filters", schedule=[15, 10, 6]),
    ]
    return keepk.Pruner(model, spaces, optimizer, example=example, shrink=shrink), example, optimizer
