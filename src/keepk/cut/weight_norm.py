"""Weight norm, w = g v / |v|: which parameters are directions v, and which lengths g they have.

A direction must not become zero, for 0 / 0; a channel is silenced by its length alone.
"""

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm


def lengths_of(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """By direction, its length.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    >>> [(tuple(v.shape), tuple(g.shape)) for v, g in lengths_of(layer).items()]
    [((2, 3), (2, 1))]
    """
    return {direction: length for module in model.modules() for direction, length in _pairs(module)}


def _pairs(module: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):  # of torch.nn.utils.weight_norm, the older way
            yield getattr(module, f"{hook.name}_v"), getattr(module, f"{hook.name}_g")
    for found in module.children():
        if isinstance(found, nn.ModuleDict):  # that is where torch keeps parametrizations
            yield from (_pair(it) for it in found.values() if isinstance(it, ParametrizationList) and _is_norm(it))


def _is_norm(found: ParametrizationList) -> bool:
    return isinstance(found[0], _WeightNorm)


def _pair(found: ParametrizationList) -> tuple[nn.Parameter, nn.Parameter]:
    direction, length = found.original1, found.original0
    assert isinstance(direction, nn.Parameter)
    assert isinstance(length, nn.Parameter)
    return direction, length
