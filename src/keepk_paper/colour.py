"""The experiments on colour pictures: VGG-16 and DenseNet-40, channels taken out while they train (Tables 3 to 5).

The usual recipes are small enough for two cores. ``full-*`` is the paper's text at full width: 250 epochs of SGD at .1
for the dense network, a fifth of it after each quarter; then 250 at .005, half of it after each quarter, without weight
decay. Its p0, N^c and alpha come from a grid search that it does not give: here p0 = .5 by epoch 10, nu = .02, and
alpha = 1, the BatchNorm's scale, which it found best for VGG-16 and as good as others for DenseNet-40. ``blend-70``
shows what alpha = .5 does with norms that are sums: they shrink with the layer in front, and the first layers are
thinned out. The recipes of `one_run` take means.
"""

from dataclasses import replace
from functools import partial

from keepk.metrics.channels import blend, l1_l2
from keepk.metrics.layers import At
from keepk.plan.schedules import Annealing
from keepk_paper.models import VGG16, DenseNet40
from keepk_paper.recipes import Recipe, Stage

FC = ("classifier.*",)
# The weights' norm as a sum, which has no part in alpha = 1, but in the name that checkpoints know the recipes by.
GAMMA = blend(alpha=1.0, weights=l1_l2)
SUMS = blend(alpha=0.5, weights=l1_l2)
small_vgg = partial(
    Recipe,
    network=VGG16,
    options={"width": 0.25},
    spaces={"conv": "features.*"},
    units="output",
    batch=128,
    smoothing=0.1,
)
small_densenet = partial(
    Recipe,
    network=DenseNet40,
    options={"growth": 4, "initial": 8},
    spaces={"reads": "*"},
    units="input",
    batch=64,
    pictures=15_000,
)
anneal = partial(Annealing, p0=0.5, n1=6)


def _vgg(name: str, keep: int, nu: float) -> Recipe:
    """12 epochs of annealing with the fully connected layers frozen, 12 of fine-tuning with all."""
    return small_vgg(
        name=name,
        metric=GAMMA,
        start="dense",
        stages=[
            Stage(12, lr=0.05, flat=12, decay=5e-4, keep={"conv": (keep, anneal(nu=nu))}, freeze=FC, report=False),
            Stage(12, lr=0.05, decay=5e-4),
        ],
    )


VGG_DENSE = small_vgg(name="dense", stages=[Stage(50, lr=0.1, flat=10, decay=5e-4)])
VGG_CONTROL = small_vgg(
    name="control",
    start="dense",
    stages=[Stage(12, lr=0.05, flat=12, decay=5e-4, report=False), Stage(12, lr=0.05, decay=5e-4)],
)
DENSENET_DENSE = small_densenet(name="dense", stages=[Stage(16, lr=0.1, decay=2e-4)])
DENSENET_CONTROL = small_densenet(
    name="control",
    start="dense",
    stages=[Stage(8, lr=0.05, flat=8, decay=2e-4, report=False), Stage(6, lr=0.05, decay=2e-4)],
)
DENSENET_60 = small_densenet(
    name="keepk-60",
    metric=GAMMA,
    start="dense",
    stages=[
        Stage(8, lr=0.05, flat=8, decay=2e-4, keep={"reads": (1_248, anneal(n1=4, nu=0.05))}, report=False),
        Stage(6, lr=0.05, decay=2e-4),
    ],
)


def _full_dense(network: type[VGG16 | DenseNet40], spaces: dict[str, str], units: At) -> Recipe:
    quarters = zip((62, 63, 62, 63), (0.1, 0.02, 0.004, 0.0008), strict=True)
    stages = [Stage(epochs, lr=lr, flat=None, nesterov=False, decay=5e-4, report=False) for epochs, lr in quarters]
    stages[-1] = replace(stages[-1], report=True)
    return Recipe("full-dense", network, spaces, stages, batch=128, units=units)


def _full(dense: Recipe, name: str, keep: int, annealing: int) -> Recipe:
    """`annealing` epochs with the fully connected layers frozen, and the rest of 250 with all."""
    by = partial(Stage, flat=None, nesterov=False, report=False)
    goal = {next(iter(dense.spaces)): (keep, Annealing(p0=0.5, n1=10, nu=0.02))}
    stages = [
        by(annealing, lr=0.005, keep=goal, freeze=FC),
        by(62 - annealing, lr=0.005),
        by(63, lr=0.0025),
        by(62, lr=0.00125),
        by(63, lr=0.000625, report=True),
    ]
    return replace(dense, name=name, metric=GAMMA, start="full-dense", stages=stages)


VGG_FULL = _full_dense(VGG16, {"conv": "features.*"}, "output")
DENSENET_FULL = _full_dense(DenseNet40, {"reads": "*"}, "input")
VGG = (
    VGG_DENSE,
    VGG_CONTROL,
    _vgg("keepk-60", 422, 0.02),
    _vgg("keepk-70", 316, 0.04),
    replace(_vgg("blend-70", 316, 0.04), metric=SUMS),
    VGG_FULL,
    _full(VGG_FULL, "full-50", 2_112, 10),
    _full(VGG_FULL, "full-60", 1_689, 15),
    _full(VGG_FULL, "full-70", 1_267, 20),
)
DENSENET = (
    DENSENET_DENSE,
    DENSENET_CONTROL,
    DENSENET_60,
    DENSENET_FULL,
    _full(DENSENET_FULL, "full-60", 3_744, 15),
    _full(DENSENET_FULL, "full-70", 2_808, 20),
)


def _one_run_dense(width: float, epochs: int) -> Recipe:
    """The dense control of a run that trains and prunes under one learning-rate curve."""
    stage = Stage(epochs, lr=0.1, warmup=1, decay=5e-4)
    return small_vgg(name="one-run-dense", options={"width": width}, stages=[stage])


EXPERIMENTS = {
    "vgg16-cifar10": {recipe.name: recipe for recipe in (*VGG, _one_run_dense(0.25, 40))},
    "vgg16-half-cifar10": {"one-run-dense": _one_run_dense(0.5, 40)},
    "vgg16-svhn": {"one-run-dense": _one_run_dense(1.0, 20)},
    "densenet40-cifar10": {recipe.name: recipe for recipe in DENSENET},
}
