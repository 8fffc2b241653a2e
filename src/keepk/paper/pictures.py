"""Colour pictures: the whole data set in memory as bytes, made float batch by batch."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepk.errors import DataError
from keepk.paper.augment import crop_and_flip
from keepk.paper.data import Split, mean_and_std


@dataclass(frozen=True, eq=False)
class Pictures:
    """A data set in three parts; its pictures are bytes [N, 3, 32, 32].

    ::

        data = cifar10().to(device)
        for chosen in torch.split(torch.randperm(len(data.train)), 128):
            images = data.normalised(crop_and_flip(data.train.images[chosen], generator))
            loss = F.cross_entropy(model(images), data.train.labels[chosen])

    Args:
        train: What networks learn from.
        validation: What recipes are chosen by.
        test: What is reported.
        classes: How many there are; labels are 0 .. classes - 1.
        mean: Of the training part's bytes, by channel [3].
        std: Their standard deviations.
        mirror: Whether training pictures are mirrored at random; not for digits, which change their meaning.
    """

    train: Split
    validation: Split
    test: Split
    classes: int
    mean: Tensor
    std: Tensor
    mirror: bool = True

    def normalised(self, images: Tensor) -> Tensor:
        """Each byte x as (x - m) / s of its channel, float32, where the pictures are."""
        mean, std = (values.to(images.device)[:, None, None] for values in (self.mean, self.std))
        return torch.sub(images, mean).div_(std)

    def training_batch(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """The network's input for these training pictures: random windows of them, mirrored at random."""
        return self.seen(crop_and_flip(self.train.images[rows], generator, flip=self.mirror))

    def seen(self, images: Tensor) -> Tensor:
        """What a network gets of pictures."""
        return self.normalised(images).contiguous(memory_format=torch.channels_last)  # convolutions like it

    def to(self, device: torch.device | str) -> "Pictures":
        """The same data set on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("train", "validation", "test", "mean", "std")}
        return replace(self, **moved)


def in_parts(title: str, published: Split, validates: Tensor, test: Split, classes: int) -> Pictures:
    """The published training pictures, cut in two by the mask `validates`, beside the test pictures."""
    train, validation = (Split(published.images[rows], published.labels[rows]) for rows in (~validates, validates))
    if not len(validation):
        raise DataError(
            f"{title}: {len(published)} training pictures are too few to set a tenth aside for validation. "
            "Give files with more."
        )
    channels = [mean_and_std(train.images[:, channel]) for channel in range(3)]
    for name, (mean, std) in zip(("red", "green", "blue"), channels, strict=True):
        if std == 0:
            raise DataError(
                f"{title}: its training files hold no pictures: {name} is {mean:.0f} in every pixel. "
                "Delete them and download them again."
            )
    constants = torch.tensor(channels, dtype=torch.float32, device=train.images.device)
    return Pictures(train, validation, test, classes, constants[:, 0], constants[:, 1])
