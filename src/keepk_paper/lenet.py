"""The MNIST experiments: LeNet-300-100 and LeNet-5, by the paper's recipe and by ours (Tables 1 and 2).

``paper`` follows the text of the paper literally. The text does not describe the dense training; here it is plain SGD
with batches of 64 and a learning rate of 0.1, until the error matches the paper's. ``keepk`` is our recipe. It is
compared with two rivals that start from the same dense training and have as many epochs:

==============  ====================================================================================================
one-shot-K      all weights but K are pruned at one event
han-1, -2, -3   Han et al. 2015, in three rounds: the weights of each layer that are smaller than its standard deviation
                are pruned, so that K is an outcome, and the network is retrained. The retraining is ours, so that only
                the choice of weights differs; K is counted before it, and the weights are pruned after its first epoch
==============  ====================================================================================================
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from keepk.metrics.weights import magnitude
from keepk.plan.schedules import Annealing, Cubic, OneShot
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


def _rivals(ours: Recipe, one_shot: Mapping[int, Stage], retraining: Stage, layers: Sequence[str]) -> Iterator[Recipe]:
    """The dense network, one-shot pruning to each K, and three rounds of pruning by thresholds.

    Args:
        ours: The recipe whose first stage trains the dense network.
        one_shot: By K, how the pruned network is trained.
        retraining: The training of each round.
        layers: The names of the layers, each of which has its own threshold.
    """
    recipe = partial(Recipe, network=ours.network, batch=ours.batch, only_by_name=True)
    yield recipe(name="dense", spaces={"all": "*"}, stages=ours.stages[:1])
    for keep, stage in one_shot.items():
        pruned = replace(stage, keep={"all": (keep, OneShot())})
        yield recipe(name=f"one-shot-{keep}", spaces={"all": "*"}, stages=[pruned], start="dense", control="dense")
    spaces = {layer: f"{layer}.*" for layer in layers}
    thresholded = replace(retraining, keep={layer: (0, OneShot()) for layer in layers})
    for number, start in enumerate(("dense", "han-1", "han-2"), start=1):
        name = f"han-{number}"
        yield recipe(name=name, spaces=spaces, stages=[thresholded], start=start, control="dense", quality=1.0)


LENET_300_RIVALS = _rivals(
    LENET_300_OURS,
    {17_329: light_dropout(60), 3_999: light_dropout(180)},
    replace(light_dropout(60), metric=magnitude),
    ("fc1", "fc2", "fc3"),
)
LENET_5_RIVALS = _rivals(
    LENET_5_OURS,
    {8_621: sparse(28), 3_879: sparse(56), 1_724: sparse(104, metric=saliency)},
    sparse(35),
    ("conv1", "conv2", "fc1", "fc2"),
)
EXPERIMENTS = {
    "lenet-300-100": {recipe.name: recipe for recipe in (LENET_300_PAPER, LENET_300_OURS, *LENET_300_RIVALS)},
    "lenet-5": {recipe.name: recipe for recipe in (LENET_5_PAPER, LENET_5_OURS, *LENET_5_RIVALS)},
}
