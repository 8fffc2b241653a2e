"""Remove half of the channels of a small convnet while it trains; save, load, export and measure the result.

    python examples/prune_a_convnet.py [--channels 96] [--weights 100] [--dense-epochs 6] ...

The data are the handwritten digits that come with scikit-learn: 1,797 images of 8 x 8 pixels, 400 of which are the test
set. To adapt the script, change `make_network`, `load_pictures` and the spaces in `run`. It needs scikit-learn; the
ONNX file is written only if onnx, onnxscript and onnxruntime are installed.
"""

import argparse
import tempfile
from collections import OrderedDict
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import keepk
from keepk.typing import Space

Loader: TypeAlias = DataLoader[tuple[Tensor, ...]]

TEST_PICTURES, BATCH, PRUNING_EPOCHS = 400, 64, 7


def make_network() -> nn.Module:
    """The dense network, with 64 + 128 channels and 64 hidden neurons. `keepk.load` starts from it, too."""
    features = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    head = nn.Sequential(nn.Linear(128 * 2 * 2, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(OrderedDict(features=features, head=head))


def load_pictures() -> tuple[TensorDataset, TensorDataset]:
    """The training and the test set."""
    pictures, labels = load_digits(return_X_y=True)
    images = torch.tensor(pictures / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    digits = torch.tensor(labels)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_PICTURES], order[TEST_PICTURES:]
    return TensorDataset(images[train], digits[train]), TensorDataset(images[test], digits[test])


def train_one_epoch(network: nn.Module, loader: Loader, optimizer: torch.optim.Optimizer) -> None:
    """Train for one epoch. Nothing here is specific to pruning."""
    network.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()


@torch.no_grad()
def accuracy(network: nn.Module, part: TensorDataset) -> float:
    """The accuracy in percent."""
    images, labels = part.tensors
    return 100 * float((network.eval()(images).argmax(1) == labels).float().mean())


def prune(network: nn.Module, spaces: list[Space], loader: Loader, optimizer: torch.optim.Optimizer) -> None:
    """Prune the network to exactly the requested counts; network and optimizer state shrink in every epoch."""
    example = next(iter(loader))[0][:2]
    pruner = keepk.Pruner(network, spaces, optimizer, epochs=PRUNING_EPOCHS, example=example)
    for name, counts in pruner.plan.items():
        print(f"plan of {name}: {counts}")
    for _ in range(pruner.epochs):
        train_one_epoch(network, loader, optimizer)
        pruner.step()
    print(keepk.report(pruner))
    print(keepk.compact(network, example, optimizer))  # removes hidden neurons that no remaining weight reads


def write(network: nn.Module, example: Tensor, folder: Path) -> nn.Module:
    """Save the network, load it into a new dense one, export that if ONNX is installed, and return it."""
    keepk.save(network, folder / "small")
    loaded = keepk.load(make_network(), folder / "small").eval()
    assert torch.equal(loaded(example), network.eval()(example))
    if all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        print(keepk.export_onnx(loaded, example, folder / "small.onnx"))
    return loaded


def run(*, channels: int, weights: int, dense_epochs: int, fine_tune_epochs: int, folder: Path) -> nn.Module:
    """Train a dense network, prune it, fine-tune it, and write it to `folder`."""
    torch.manual_seed(0)
    train, test = load_pictures()
    loader = DataLoader(train, batch_size=BATCH, shuffle=True)
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for _ in range(dense_epochs):
        train_one_epoch(network, loader, optimizer)
    print(f"dense: test accuracy {accuracy(network, test):.2f} %")

    annealing = keepk.Annealing(p0=0.3, n1=3, nu=0.05)
    spaces: list[Space] = [
        keepk.channels(
            "features.*",
            keep=channels,
            schedule=annealing,
            name="channels",
            layer_floor=8,
            metric=keepk.metrics.product,  # the default ranks by BatchNorm scales, which need longer training
        ),
        keepk.weights("head.2.weight", keep=weights, schedule=keepk.Cubic(), name="weights"),
    ]
    prune(network, spaces, loader, optimizer)
    for group in optimizer.param_groups:
        group["lr"] /= 5
    for _ in range(fine_tune_epochs):
        train_one_epoch(network, loader, optimizer)
    print(f"pruned: test accuracy {accuracy(network, test):.2f} %")

    example = test.tensors[0][:2]
    small = write(network, example, folder)
    print(keepk.latency(small, example, baseline=make_network(), batches=(1, 64), repeats=10, threads=1))
    return small


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=96, help="channels to keep, of 192")
    parser.add_argument("--weights", type=int, default=100, help="weights of the last layer to keep, of 640")
    parser.add_argument("--dense-epochs", type=int, default=6)
    parser.add_argument("--fine-tune-epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder to write to; by default a temporary one")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is too small for more
    with tempfile.TemporaryDirectory() as temporary:
        run(
            channels=options.channels,
            weights=options.weights,
            dense_epochs=options.dense_epochs,
            fine_tune_epochs=options.fine_tune_epochs,
            folder=options.out or Path(temporary),
        )


if __name__ == "__main__":
    main()
