"""A small convnet on scikit-learn's handwritten digits, pruned to exactly K channels and K' weights of the head.

The 1,797 images of 8 x 8 pixels are part of scikit-learn, so nothing is downloaded. `prune` shows how the library is
used. The recipe was chosen by validation error.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepk
from keepk.plan.schedules import plan
from keepk.reports.tables import EpochRecord, LayerCount, layer_counts
from keepk.typing import Space, SpaceReport
from keepk_paper.data import Split

CHANNELS, HEAD = "channels", "head weights"
CONVOLUTIONS = {"conv1": 64, "conv2": 128, "conv3": 128}
CHANNEL_SCHEDULE = keepk.Annealing(p0=0.75, n1=16, nu=0.02, mu=1)
HEAD_SCHEDULE = keepk.Cubic(epochs=7)
Record = Callable[[EpochRecord, str], None]


@dataclass(frozen=True)
class Recipe:
    """Counts to keep and settings of the training. An epoch is a pass over the training set."""

    keep: int = 32
    keep_head: int = 500
    dense_epochs: int = 10
    fine_tune_epochs: int = 14
    schedule: keepk.Annealing = CHANNEL_SCHEDULE
    head_schedule: keepk.Cubic = HEAD_SCHEDULE
    dense_rate: float = 0.05
    dense_batch: int = 64
    pruning_rate: float = 0.03
    pruning_batch: int = 32
    decay: float = 5e-4


@dataclass(frozen=True, eq=False)
class Digits:
    """Images [N, 1, 8, 8] in a fixed split: 1,097 for training, 300 for validation, 400 for testing."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class Kept:
    """The units left after pruning.

    Attributes:
        spaces: Requested and kept units of each space.
        channels: Kept channels of each convolution.
        head: Kept weights and biases of each layer of the head.
        parameters: The number of entries in the network's parameters that are not masked.
    """

    spaces: tuple[SpaceReport, ...]
    channels: tuple[LayerCount, ...]
    head: tuple[LayerCount, ...]
    parameters: int


class DigitsNet(nn.Module):
    """Three convolutions with BatchNorm, 64, 128 and 128 channels, and a fully connected head 512 - 64 - 10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.conv2, self.norm2 = nn.Conv2d(64, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128)
        self.conv3, self.norm3 = nn.Conv2d(128, 128, 3, padding=1, bias=False), nn.BatchNorm2d(128)
        self.fc1, self.fc2 = nn.Linear(512, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits for images [N, 1, 8, 8]."""
        seen = F.relu(self.norm1(self.conv1(images)))
        seen = F.max_pool2d(F.relu(self.norm2(self.conv2(seen))), 2)
        seen = F.max_pool2d(F.relu(self.norm3(self.conv3(seen))), 2)
        return self.fc2(F.relu(self.fc1(seen.flatten(1))))  # type: ignore[no-any-return]


def train_dense(model: DigitsNet, digits: Digits, recipe: Recipe, record: Record) -> None:
    """Train from scratch, before any pruning."""
    optimizer = _sgd(model, recipe.dense_rate, recipe.decay)
    channels, weights = sum(widths(model).values()), sum(head_sizes(model).values())
    for rate in _falling(recipe.dense_rate, recipe.dense_epochs):
        train_one_epoch(model, digits.train, optimizer, rate=rate, batch=recipe.dense_batch)
        record(EpochRecord("dense", channels, accuracy(model, digits.validation)), f"{weights:,} {HEAD}")


def spaces(recipe: Recipe) -> list[Space]:
    """The two spaces: channels of the convolutions (DSC-2) and weights of the head (DSC-1)."""
    return [
        keepk.channels(
            "conv*", keep=recipe.keep, name=CHANNELS, metric=keepk.metrics.product, schedule=recipe.schedule
        ),
        keepk.weights("fc*", keep=recipe.keep_head, name=HEAD, schedule=recipe.head_schedule),
    ]


def phases(recipe: Recipe) -> list[keepk.Phase]:
    """Channels first: removing a channel also removes weights of the head, whose count is exact only afterwards."""
    channels = plan(recipe.schedule, sum(CONVOLUTIONS.values()), recipe.keep)
    return [
        keepk.Phase(len(channels), prune=CHANNELS),
        keepk.Phase(recipe.head_schedule.epochs or 1, prune=HEAD),
    ]


def prune(model: DigitsNet, digits: Digits, recipe: Recipe, record: Record) -> Kept:
    """Anneal to exactly K channels while the network shrinks, then to K' weights of the head, then fine-tune."""
    channels, weights = widths(model), head_sizes(model)
    optimizer = _sgd(model, recipe.pruning_rate, recipe.decay)

    example = digits.train.images[:2]
    with keepk.Pruner(model, spaces(recipe), optimizer, phases=phases(recipe), example=example) as pruner:
        rates = [recipe.pruning_rate] * pruner.epochs + _falling(recipe.pruning_rate, recipe.fine_tune_epochs)
        for epoch, rate in enumerate(rates):
            train_one_epoch(model, digits.train, optimizer, rate=rate, batch=recipe.pruning_batch)
            pruner.step()  # removes channels, then masks weights; after the end of the plan it changes nothing

            phase = "anneal" if epoch < pruner.epochs else "fine-tune"
            seen = EpochRecord(phase, pruner.kept[CHANNELS], accuracy(model, digits.validation))
            record(seen, f"{pruner.kept[HEAD]:,} {HEAD}")
        left = {layer.name: layer.kept for layer in layer_counts(pruner.masks)}
        report = keepk.report(pruner)
        return Kept(
            report.spaces, _counts(channels, widths(model)), _counts(weights, left), report.parameters - report.masked
        )


def train_one_epoch(
    model: nn.Module, split: Split, optimizer: torch.optim.Optimizer, *, rate: float, batch: int
) -> None:
    """Train for one pass over the images in random order."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    for chosen in torch.split(torch.randperm(len(split)), batch):
        loss = F.cross_entropy(model(split.images[chosen]), split.labels[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """The accuracy in percent. Leaves the model in train mode."""
    model.eval()
    right = model(split.images).argmax(dim=1) == split.labels
    model.train()
    return 100 * int(right.sum()) / len(split)


def epochs_of(recipe: Recipe) -> int:
    """The total number of epochs. Raises an error for a recipe whose plan is impossible, before any training."""
    with torch.random.fork_rng(devices=[]):
        example = torch.zeros(2, 1, 8, 8)
        pruner = keepk.Pruner(DigitsNet(), spaces(recipe), phases=phases(recipe), example=example)
    return recipe.dense_epochs + pruner.epochs + recipe.fine_tune_epochs


def load_digits() -> Digits:
    """Load scikit-learn's digits. The split does not depend on the seed of a run."""
    from sklearn import datasets  # noqa: PLC0415 - the extra keepk[demo]

    images, labels = datasets.load_digits(return_X_y=True)
    pictures = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    classes = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    return Digits(*(Split(pictures[part], classes[part]) for part in torch.split(order, [1097, 300, 400])))


def widths(model: DigitsNet) -> dict[str, int]:
    """The current number of channels of each convolution."""
    return {name: it.out_channels for name, it in model.named_children() if isinstance(it, nn.Conv2d)}


def head_sizes(model: DigitsNet) -> dict[str, int]:
    """The current number of weights and biases of each layer of the head."""
    layers = {name: it for name, it in model.named_children() if isinstance(it, nn.Linear)}
    return {name: sum(parameter.numel() for parameter in it.parameters()) for name, it in layers.items()}


def _counts(before: dict[str, int], after: dict[str, int]) -> tuple[LayerCount, ...]:
    return tuple(LayerCount(name, total, after[name]) for name, total in before.items())


def _falling(rate: float, epochs: int) -> list[float]:
    """Learning rates that decrease linearly to zero."""
    return [rate * (1 - epoch / epochs) for epoch in range(epochs)]


def _sgd(model: nn.Module, rate: float, decay: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=decay)
