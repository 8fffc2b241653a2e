"""Shared by the networks for colour images: scaled widths and the initialisation of filters."""

from torch import nn

from keepk.errors import KeepkError


def scaled(channels: int, width: float) -> int:
    """`channels` times `width`, rounded, at least 1.

    >>> scaled(64, 0.25), scaled(64, 0.001)
    (16, 1)
    """
    if channels < 1 or not 0 < width < float("inf"):
        raise KeepkError(
            f"the width of a network: got {channels} channels times {width}. "
            "Give at least 1 channel and a factor above 0; 1.0 is the paper's network."
        )
    return max(1, round(channels * width))


def he_normal(network: nn.Module) -> None:
    """Initialise filters as in He et al., from N(0, 2 / (k k c)) for c filters of k x k, and biases with 0."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
