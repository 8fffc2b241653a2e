"""The MNIST experiments: LeNet-300-100 and LeNet-5, by the paper's recipe and by ours (Tables 1 and 2).

``paper`` follows the text of the paper literally. The text does not describe the dense training; here it is plain SGD
with batches of 64 and a learning rate of 0.1, until the error matches the paper's. ``keepk`` is our recipe.
"""

from functools import partial

from keepk.plan.schedules import Annealing, Cubic
from keepk_paper.models import LeNet5, LeNet300
from keepk_paper.recipes import Recipe, Stage, saliency

by_plain_sgd = partial(Stage, lr=0.1, flat=None, momentum=0.0, nesterov=False)
by_a_tenth = partial(Stage, lr=0.01, flat=None, momentum=0.9, nesterov=False)
light_dropout = partial(Stage, lr=0.05, decay=1e-4, dropout=(0.05, 0.1, 0.05), metric=saliency)
sparse = partial(Stage, lr=0.05, decay=1e-4, dropout=(0.05, 0.1))

LENET_300_PAPER = Recipe(
    name="paper",
    network=LeNet300,
    spaces={"all": "*"},
    batch=64,
    stages=[
        by_plain_sgd(30),
        by_a_tenth(20, keep={"all": (17_329, Annealing(p0=0.85, n1=1, nu=0.05))}),
    ],
)

# Pruned in rounds. Each removes weights in its first third to five eighths; the rate falls from .05 to zero in each.
LENET_300_OURS = Recipe(
    name="keepk",
    network=LeNet300,
    spaces={"all": "*"},
    batch=128,
    stages=[
        Stage(40, lr=0.05, decay=2e-4, dropout=(0.1, 0.3, 0.2)),
        light_dropout(60, keep={"all": (17_329, Cubic(epochs=20))}),
        light_dropout(40, keep={"all": (8_300, Cubic(epochs=25))}),
        light_dropout(80, keep={"all": (3_999, Cubic(epochs=40))}),
    ],
)

LENET_5_PAPER = Recipe(
    name="paper",
    network=LeNet5,
    spaces={"fc": "fc*", "conv": "conv*"},
    batch=64,
    stages=[
        by_plain_sgd(12),
        by_a_tenth(
            3,
            keep={"fc": (8_110, Annealing(p0=0.9, n1=1, nu=0.05))},
            freeze=("conv*",),
            report=False,
        ),
        by_a_tenth(
            14,
            keep={"conv": (7_671, Annealing(p0=0.0, n1=0, nu=0.05))},
            freeze=("fc*",),
            report=False,
        ),
        by_a_tenth(23),
    ],
)

LENET_5_OURS = Recipe(
    name="keepk",
    network=LeNet5,
    spaces={"all": "*"},
    batch=128,
    stages=[
        Stage(15, lr=0.05, decay=2e-4, dropout=(0.2, 0.5)),
        Stage(16, lr=0.05, decay=1e-4, dropout=(0.1, 0.3), keep={"all": (15_781, Cubic(epochs=8))}),
        Stage(12, lr=0.05, decay=1e-4, dropout=(0.05, 0.2), keep={"all": (8_621, Cubic(epochs=7))}),
        sparse(28, keep={"all": (3_879, Cubic(epochs=20))}),
        sparse(16, keep={"all": (2_500, Cubic(epochs=10))}, metric=saliency),
        sparse(32, keep={"all": (1_724, Cubic(epochs=16))}, metric=saliency),
    ],
)

EXPERIMENTS = {
    "lenet-300-100": {recipe.name: recipe for recipe in (LENET_300_PAPER, LENET_300_OURS)},
    "lenet-5": {recipe.name: recipe for recipe in (LENET_5_PAPER, LENET_5_OURS)},
}
