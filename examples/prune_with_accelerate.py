"""Prune a convnet in a loop of your own with Accelerate, on one or several processes, with checkpoints.

    accelerate launch examples/prune_with_accelerate.py [--channels 24] [--epochs 5] [--out folder]

The data are the handwritten digits that come with scikit-learn. To adapt the script, change `make_network`,
`load_pictures` and the space in `run`. If it was killed, run it again with the same ``--out``, and it continues. It
needs ``pip install "keepk[accelerate]"`` and scikit-learn.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepk
from keepk.integrations.accelerate import prepare


def make_network() -> nn.Module:
    """The dense network, with 16 + 32 channels. `keepk.load` starts from it, too."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 4, 10))


def load_pictures() -> TensorDataset:
    """Pictures of 8 x 8 pixels and their labels."""
    pictures, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(pictures / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels))


def run(*, channels: int, epochs: int, folder: Path) -> nn.Module:
    """Train and prune, save to ``folder / "small"``, and return what `keepk.load` reads from there."""
    set_seed(0)
    accelerator = Accelerator()
    network, data = make_network(), load_pictures()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    space = keepk.channels(
        "*",
        keep=channels,
        name="channels",
        layer_floor=4,
        schedule=keepk.Cubic(epochs=epochs - 1),  # the last epoch is fine-tuning
        metric=keepk.metrics.product,
    )
    # Before accelerator.prepare: the Pruner traces the network as it was written, and resume() cuts it before it is
    # wrapped for several processes.
    pruner = keepk.Pruner(network, space, optimizer, example=data.tensors[0][:2])
    pruning = prepare(accelerator, pruner)
    checkpoint, first = folder / "last", 0
    if resumes := (checkpoint / "epoch").exists():
        pruning.resume(checkpoint)
    model, optimizer, loader = accelerator.prepare(network, optimizer, DataLoader(data, batch_size=64, shuffle=True))
    if resumes:
        accelerator.load_state(str(checkpoint))
        first = int((checkpoint / "epoch").read_text())
    for epoch in range(first, epochs):
        model.train()
        for pictures, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(pictures), labels))
            optimizer.step()
        model = pruning.step(model)  # a new wrapper, if there are several processes
        accelerator.save_state(str(checkpoint))
        if accelerator.is_main_process:
            (checkpoint / "epoch").write_text(str(epoch + 1))
    accelerator.print(keepk.report(pruner))
    if accelerator.is_main_process:
        keepk.save(network, folder / "small")
    accelerator.wait_for_everyone()
    return keepk.load(make_network(), folder / "small").eval()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=24, help="channels to keep, of 48")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder to write to; by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(channels=options.channels, epochs=options.epochs, folder=options.out or Path(temporary))


if __name__ == "__main__":
    main()
