"""keepk: say how many weights to keep; get exactly that many.

>>> import keepk, torch
>>> model = torch.nn.Linear(100, 10)
>>> keepk.Pruner(model, [keepk.weights("*", keep=50, schedule=keepk.OneShot())]).step()
>>> sum(int(parameter.count_nonzero()) for parameter in model.parameters())
50
"""

from keepk import errors as errors
from keepk import metrics as metrics
from keepk.cut.shrink import shrink as shrink
from keepk.deploy.model_files import load as load
from keepk.deploy.model_files import save as save
from keepk.graph.table import rule as rule
from keepk.graph.trace import trace as trace
from keepk.plan.phases import Phase as Phase
from keepk.plan.schedules import Annealing as Annealing
from keepk.plan.schedules import Cubic as Cubic
from keepk.plan.schedules import OneShot as OneShot
from keepk.plan.spaces import weights as weights
from keepk.run.checkpoint import load_checkpoint as load_checkpoint
from keepk.run.checkpoint import save_checkpoint as save_checkpoint
from keepk.run.pruner import Pruner as Pruner
from keepk.show.inspection import inspect as inspect

__version__ = "0.1.0"

__all__ = [
    "Annealing",
    "Cubic",
    "OneShot",
    "Phase",
    "Pruner",
    "errors",
    "inspect",
    "load",
    "load_checkpoint",
    "metrics",
    "rule",
    "save",
    "save_checkpoint",
    "shrink",
    "trace",
    "weights",
]
