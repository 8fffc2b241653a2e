"""One small network for each wiring pattern that channel removal meets, and the verdict expected on it."""

from networks import attention, convolutions, joins, masks, moves, numbers, paths, recurrent, refused, two_axes, weights
from networks.registry import EXPECTED, NETWORKS, Expected, spread

__all__ = [
    "EXPECTED",
    "NETWORKS",
    "Expected",
    "attention",
    "convolutions",
    "joins",
    "masks",
    "moves",
    "numbers",
    "paths",
    "recurrent",
    "refused",
    "spread",
    "two_axes",
    "weights",
]
