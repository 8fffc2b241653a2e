"""DenseNet-40 on CIFAR-10, CIFAR-100 and SVHN: the paper's Tables 4 and 5.

Every layer of a dense block reads all earlier channels through a separate BatchNorm. A unit is one such read, and a
channel is removed with its last read.

==========================  ========================================================================================
dense, control, keepk-60    growth rate 4, a third of the images: 16 epochs from scratch; 14 more from there, dense
                            and pruned; trained-M-P have other metrics and rates
one-run-*                   growth rate 6, all images, one run under one learning-rate curve; see `one_run`
full-*                      the paper's sizes and lengths, as in `vgg`, with alpha = 1, which the paper found to be as
                            good as other values here
==========================  ========================================================================================
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from keepk.plan.schedules import Annealing
from keepk_paper import one_run
from keepk_paper.models import DenseNet40
from keepk_paper.one_run import METRICS, SLOW, Setting
from keepk_paper.recipes import Recipe, Stage, paper_dense, paper_pruned
from keepk_paper.vgg import GAMMA

densenet = partial(Recipe, network=DenseNet40, spaces={"reads": "*"}, units="input", batch=64)
small = partial(densenet, options={"growth": 4, "initial": 8}, pictures=15_000)
SIX = {"growth": 6, "initial": 12}
CIFAR_10 = Setting(partial(densenet, options=SIX), 30, first=9, middle=14, plans={60: (1_872, SLOW)})
CIFAR_100 = Setting(partial(densenet, options={**SIX, "classes": 100}), 30, 9, 14, {60: (1_872, SLOW)})
SVHN = Setting(partial(densenet, options=SIX), 20, 6, 9, {60: (1_872, Annealing(p0=0.5, n1=4, nu=0.04))})

DENSE = small(name="dense", stages=[Stage(16, lr=0.1, decay=2e-4)])
CONTROL = small(
    name="control",
    start="dense",
    stages=[Stage(8, lr=0.05, flat=8, decay=2e-4, report=False), Stage(6, lr=0.05, decay=2e-4)],
)
# Other rates, for the curve of error against the rate; of 3,120 reads.
RATES = {
    10: (2_808, Annealing(p0=0.05, n1=4, nu=0.02)),
    30: (2_184, Annealing(p0=0.2, n1=4, nu=0.05)),
    50: (1_560, Annealing(p0=0.4, n1=4, nu=0.05)),
    70: (936, Annealing(p0=0.5, n1=4, nu=0.05)),
}


def _from_dense(name: str, keep: int, schedule: Annealing, **options: Any) -> Recipe:
    """8 epochs of annealing, then 6 of fine-tuning."""
    goal = {"reads": (keep, schedule)}
    events = Stage(8, lr=0.05, flat=8, decay=2e-4, keep=goal, report=False)
    return small(name=name, start="dense", stages=[events, Stage(6, lr=0.05, decay=2e-4)], **options)


def _rates() -> Iterator[Recipe]:
    for percent, plan in RATES.items():
        for metric, ranking in METRICS.items():
            yield _from_dense(f"trained-{metric}-{percent}", *plan, **ranking, only_by_name=True)


FULL_DENSE = paper_dense(DenseNet40, {"reads": "*"}, "input")
RECIPES = (
    DENSE,
    CONTROL,
    _from_dense("keepk-60", 1_248, Annealing(p0=0.5, n1=4, nu=0.05), metric=GAMMA),
    FULL_DENSE,
    paper_pruned(FULL_DENSE, "full-60", 3_744, 15, GAMMA),
    paper_pruned(FULL_DENSE, "full-70", 2_808, 20, GAMMA),
)


def _one_run(setting: Setting) -> dict[str, Recipe]:
    return one_run.by_name(one_run.dense(setting), one_run.pruned(setting))


EXPERIMENTS = {
    "densenet40-cifar10": {**one_run.by_name(iter(RECIPES), _rates()), **_one_run(CIFAR_10)},
    "densenet40-cifar100": _one_run(CIFAR_100),
    "densenet40-svhn": _one_run(SVHN),
}
