"""What a model costs, layer by layer: parameters, and multiply-accumulates of one forward pass."""

import functools
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from keepk.graph.shell import META, Example, Workshop


@dataclass(frozen=True)
class LayerCost:
    """What one module costs, without the modules inside it.

    Attributes:
        name: Its path; empty for the model itself.
        type: Its class.
        parameters: How many numbers its parameters have; a shared parameter counts at its first owner.
        macs: Multiply-accumulates of what its own forward does, for the whole example.
    """

    name: str
    type: str
    parameters: int
    macs: int


def layer_costs(model: nn.Module, example: Any) -> tuple[LayerCost, ...]:
    """The modules that have parameters or multiply something, in the model's order.

    Counted on a copy without weights; where the model's Python looks at values, the copy has weights.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> [(layer.name, layer.parameters, layer.macs) for layer in layer_costs(net, torch.zeros(2, 8))]
    [('0', 54, 96), ('2', 21, 36)]
    """
    given = Example.of(example)
    try:
        flops = _flops(Workshop(model, given, META))
    except Exception:  # whatever a copy without weights raises, one with weights may not
        flops = _flops(Workshop(model, given, None))
    counted = set[int]()
    costs = []
    for path, module in model.named_modules():
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) not in counted}
        counted |= own.keys()
        costs.append(LayerCost(path, type(module).__name__, sum(own.values()), flops[path] // 2))
    return tuple(cost for cost in costs if cost.parameters or cost.macs)


def _flops(workshop: Workshop) -> dict[str, int]:
    """By path, the floating-point operations of each module's own forward: two for a multiply-accumulate."""
    twin = workshop.copy()
    counter = FlopCounterMode(display=False)
    own: dict[str, int] = defaultdict(int)
    with workshop.running() as example, _metering(twin, counter, own), counter:
        twin(*example.arguments, **example.by_name)
    return own


@contextmanager
def _metering(model: nn.Module, counter: FlopCounterMode, own: dict[str, int]) -> Iterator[None]:
    """Give each module what the counter gains between its beginning and its end, less what modules inside it got."""
    begun = list[int]()

    def enter(_module: nn.Module, _arguments: Any) -> None:
        begun.append(counter.get_total_flops())

    def leave(path: str, _module: nn.Module, _arguments: Any, _output: Any) -> None:
        spent = counter.get_total_flops() - begun.pop()
        own[path] += spent
        # What is booked here is not the outer module's own: it began so much later.
        begun[:] = [start + spent for start in begun]

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(functools.partial(leave, path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
