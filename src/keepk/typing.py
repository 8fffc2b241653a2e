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

from keepk.cut.compact import Compaction
from keepk.deploy.latency import LatencyReport, LatencyRow, Spread
from keepk.deploy.onnx_files import OnnxReport
from keepk.graph.call import Call
from keepk.graph.costs import LayerCost
from keepk.graph.edits import Edits
from keepk.graph.graph import Graph
from keepk.graph.units import Group
from keepk.plan.phases import Plan
from keepk.plan.schedules import AnySchedule, Schedule
from keepk.plan.spaces import ChannelSpace, Space, WeightSpace
from keepk.rank.layers import Layer, Slices
from keepk.show.inspection import Inspection
from keepk.show.run_report import RunReport, SpaceReport

__all__ = [
    "AnySchedule",
    "Call",
    "ChannelSpace",
    "Compaction",
    "Edits",
    "Graph",
    "Group",
    "Inspection",
    "LatencyReport",
    "LatencyRow",
    "Layer",
    "LayerCost",
    "OnnxReport",
    "Plan",
    "RunReport",
    "Schedule",
    "Slices",
    "Space",
    "SpaceReport",
    "Spread",
    "WeightSpace",
]
