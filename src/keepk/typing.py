"""Types for annotations: values that the public functions take and return.

Nothing here is meant to be constructed directly; `keepk.weights` makes a `Space`, `keepk.trace` makes a `Graph`, and so
on. Import the module explicitly, as with ``numpy.typing``: ``import keepk`` does not load it.

>>> import keepk, torch
>>> from keepk.typing import Space
>>> def classifier_spaces(keep: int) -> list[Space]:
...     return [keepk.weights("fc*", keep=keep)]
>>> [space.name for space in classifier_spaces(100)]
['fc*']
"""

from keepk.compaction.compact import Compaction
from keepk.deploy.fit_report import Fit, FitPoint
from keepk.deploy.latency import LatencyReport, LatencyRow, Spread
from keepk.deploy.onnx import OnnxReport
from keepk.graph.graph import Graph
from keepk.graph.rules.call import Call
from keepk.graph.units import Group
from keepk.integrations.files import ShrunkFiles
from keepk.integrations.pretrained import SavedPretrained
from keepk.metrics.layers import Layer, Slices
from keepk.model.costs import LayerCost
from keepk.model.edits import Edits
from keepk.plan.phases import Plan
from keepk.plan.schedules import AnySchedule, Schedule
from keepk.plan.spaces import ChannelSpace, Space, WeightSpace
from keepk.reports.inspection import Inspection
from keepk.reports.layers import LayerReport, LayersReport
from keepk.reports.run import BudgetReport, RunReport, SpaceReport

__all__ = [
    "AnySchedule",
    "BudgetReport",
    "Call",
    "ChannelSpace",
    "Compaction",
    "Edits",
    "Fit",
    "FitPoint",
    "Graph",
    "Group",
    "Inspection",
    "LatencyReport",
    "LatencyRow",
    "Layer",
    "LayerCost",
    "LayerReport",
    "LayersReport",
    "OnnxReport",
    "Plan",
    "RunReport",
    "SavedPretrained",
    "Schedule",
    "ShrunkFiles",
    "Slices",
    "Space",
    "SpaceReport",
    "Spread",
    "WeightSpace",
]
