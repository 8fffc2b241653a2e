"""Prune a convnet in the Trainer of Lightning, and save it for a program that needs neither Lightning nor this script.

    python examples/prune_in_lightning.py [--channels 24] [--epochs 5] [--out folder]

The data are the handwritten digits that come with scikit-learn. To adapt the script, change `Classifier`,
`load_pictures` and the space in `run`. Run it again with the same ``--out`` after it was killed, and it continues. It
needs ``pip install "keepk[lightning]"`` and scikit-learn.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import keepk
from keepk.integrations.lightning import PruningCallback


def make_network() -> nn.Module:
    """The dense network, with 16 + 32 channels. `keepk.load` starts from it, too."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 4, 10))


class Classifier(pl.LightningModule):  # type: ignore[misc]  # mypy does not look into lightning
    """The network and how it is trained. Nothing here is specific to pruning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_network()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """The loss of a batch."""
        pictures, labels = batch
        return nn.functional.cross_entropy(self.net(pictures), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer, which Lightning builds after it has loaded a checkpoint."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def load_pictures() -> tuple[Tensor, Tensor]:
    """Pictures of 8 x 8 pixels and their labels."""
    pictures, labels = load_digits(return_X_y=True)
    return torch.tensor(pictures / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)


def run(*, channels: int, epochs: int, folder: Path) -> nn.Module:
    """Train and prune, save to ``folder / "small"``, and return what `keepk.load` reads from there."""
    pl.seed_everything(0, verbose=False)
    module, (pictures, labels) = Classifier(), load_pictures()
    space = keepk.channels(
        "*",
        keep=channels,
        name="channels",
        layer_floor=4,
        schedule=keepk.Cubic(epochs=epochs - 1),  # the last epoch is fine-tuning
        metric=keepk.metrics.product,
    )
    pruning = PruningCallback(space, example=pictures[:2], module="net")
    saving = ModelCheckpoint(folder / "run", save_last=True, save_on_train_epoch_end=True)
    trainer: Any = pl.Trainer(
        max_epochs=epochs,
        callbacks=[pruning, saving],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = folder / "run" / "last.ckpt"
    data = DataLoader(TensorDataset(pictures, labels), batch_size=64, shuffle=True)
    # The file is our own: weights_only=False lets Lightning read everything that it has written.
    trainer.fit(module, data, ckpt_path=last if last.exists() else None, weights_only=False)
    print(pruning.pruner.report())

    keepk.save(module.net, folder / "small")
    loaded = keepk.load(make_network(), folder / "small").eval()
    with torch.no_grad():
        print(
            f"accuracy on the training data: {100 * float((loaded(pictures).argmax(1) == labels).float().mean()):.1f} %"
        )
    return loaded


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
