"""Metrics: functions that score weights or channels. The units with the highest scores are kept.

A metric for weights takes a parameter's tensor and returns scores of the same shape. A metric for channels takes a
`keepk.typing.Layer` and returns one score per channel. Functions that take arguments, such as `norm`, `blend` and
`taylor`, are factories: call them to get a metric.

>>> import torch
>>> magnitude(torch.tensor([-3.0, 1.0, 2.0]))
tensor([3., 1., 2.])
"""

from keepk.metrics.channels import blend, bn_scale, l1, l1_l2, l2, norm, outgoing, product
from keepk.metrics.from_statistics import activation, fisher, taylor, wanda
from keepk.metrics.weights import lamp, magnitude, random

__all__ = [
    "activation",
    "blend",
    "bn_scale",
    "fisher",
    "l1",
    "l1_l2",
    "l2",
    "lamp",
    "magnitude",
    "norm",
    "outgoing",
    "product",
    "random",
    "taylor",
    "wanda",
]
