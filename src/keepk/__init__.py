"""keepk prunes PyTorch models to exactly K weights or channels, inside your own training loop.

Pruned channels, heads and neurons are removed from the tensors; pruned weights are kept at zero. Start with
`keepk.Pruner`; `keepk.typing` has the types for annotations.

>>> import keepk, torch
>>> model = torch.nn.Linear(100, 10)
>>> keepk.Pruner(model, [keepk.weights("*", keep=50, schedule=keepk.OneShot())]).step()
>>> sum(int(parameter.count_nonzero()) for parameter in model.parameters())
50
"""

from keepk import errors as errors
from keepk import metrics as metrics
from keepk.checkpoint.checkpoint import load_checkpoint as load_checkpoint
from keepk.checkpoint.checkpoint import save_checkpoint as save_checkpoint
from keepk.compaction.compact import compact as compact
from keepk.cut.shrink import shrink as shrink
from keepk.deploy.fit import fit as fit
from keepk.deploy.latency import latency as latency
from keepk.deploy.load import load as load
from keepk.deploy.onnx import export_onnx as export_onnx
from keepk.deploy.prune import prune as prune
from keepk.deploy.save import save as save
from keepk.engine.sparse import sparse as sparse
from keepk.errors import KeepkWarning as KeepkWarning
from keepk.graph.probe.verify import verify as verify
from keepk.graph.rules.registry import rule as rule
from keepk.graph.trace import trace as trace
from keepk.integrations.files import shrink_files as shrink_files
from keepk.integrations.pretrained import from_pretrained as from_pretrained
from keepk.integrations.pretrained import save_pretrained as save_pretrained
from keepk.metrics.statistics import Statistics as Statistics
from keepk.plan.phases import Phase as Phase
from keepk.plan.schedules import Annealing as Annealing
from keepk.plan.schedules import Cubic as Cubic
from keepk.plan.schedules import OneShot as OneShot
from keepk.plan.spaces import channels as channels
from keepk.plan.spaces import weights as weights
from keepk.reports.inspection import inspect as inspect
from keepk.reports.run import report as report
from keepk.run.pruner import Pruner as Pruner
from keepk.run.recalibrate import recalibrate as recalibrate
from keepk.version import __version__ as __version__

__all__ = [
    "Annealing",
    "Cubic",
    "KeepkWarning",
    "OneShot",
    "Phase",
    "Pruner",
    "Statistics",
    "channels",
    "compact",
    "errors",
    "export_onnx",
    "fit",
    "from_pretrained",
    "inspect",
    "latency",
    "load",
    "load_checkpoint",
    "metrics",
    "prune",
    "recalibrate",
    "report",
    "rule",
    "save",
    "save_checkpoint",
    "save_pretrained",
    "shrink",
    "shrink_files",
    "sparse",
    "trace",
    "verify",
    "weights",
]
