"""The public metrics; `keepk.rank.metrics` and `keepk.rank.channel_metrics` say what a metric is."""

from keepk.rank.channel_metrics import blend, bn_scale, l1, l1_l2, l2, norm, outgoing, product
from keepk.rank.metrics import magnitude, random
from keepk.rank.taylor import taylor

__all__ = ["blend", "bn_scale", "l1", "l1_l2", "l2", "magnitude", "norm", "outgoing", "product", "random", "taylor"]
