"""Networks with pruned weights, and how far two results are apart."""

from typing import TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def pruned(net: Network, density: float, seed: int = 0) -> Network:
    """A network in eval mode with a random share of each weight left, and BatchNorms that have seen data."""
    generator = torch.Generator().manual_seed(seed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            ranges = {"running_mean": (-0.2, 0.2), "running_var": (0.5, 2), "weight": (0.5, 1.5), "bias": (-0.2, 0.2)}
            for name, (low, high) in ranges.items():
                getattr(module, name).detach().uniform_(low, high, generator=generator)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            parameter.detach()[torch.rand(parameter.shape, generator=generator) >= density] = 0
    return net.eval()


def error(wanted: Tensor, got: Tensor) -> float:
    """max|wanted - got| / max|wanted|."""
    scale = wanted.abs().max()
    gap = (wanted - got).abs().max()
    return float(gap / scale if scale > 0 else gap)
