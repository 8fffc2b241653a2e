"""The public metrics; `keepk.rank.metrics` says what a metric is."""

from keepk.rank.metrics import magnitude, random

__all__ = ["magnitude", "random"]
