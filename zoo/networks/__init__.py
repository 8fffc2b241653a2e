"""One small network for each wiring pattern that channel removal meets, and the verdict expected on it."""

from networks import attention, convolutions, joins, masks, moves, numbers, paths, recurrent, refused, two_axes, weights
from networks.registry import EXPECTED, NETWORKS, Expected, spread

# Taken from the declarations, so that collecting tests needs no trace; test_shrunk_is_masked.py verifies them.
WITHOUT_EXACT_UNITS = tuple(name for name, it in EXPECTED.items() if it.only and it.verdict != "exact")
WITH_EXACT_UNITS = tuple(name for name in NETWORKS if name not in WITHOUT_EXACT_UNITS)

__all__ = [
    "EXPECTED",
    "NETWORKS",
    "WITHOUT_EXACT_UNITS",
    "WITH_EXACT_UNITS",
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
