"""Data sets of colour images: kept in memory as uint8, converted to float batch by batch."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepk.errors import DataError
from keepk.paper.augment import crop_and_flip
from keepk.paper.data import Split, mean_and_std


@dataclass(frozen=True, eq=False)
class Pictures:
    """A data set in three parts, with images as uint8 [N, 3, 32, 32].

    ::

        data = cifar10().to(device)
        for chosen in torch.split(torch.randperm(len(data.train)), 128):
            images = data.normalised(crop_and_flip(data.train.images[chosen], generator))
            loss = F.cross_entropy(model(images), data.train.labels[chosen])

    Args:
        train: The part that networks are trained on.
        validation: The part by which recipes are chosen.
        test: The part whose errors are reported.
        classes: The number of classes; labels are 0 .. classes - 1.
        mean: The mean of the training images by channel, [3].
        std: The standard deviation by channel, [3].
        mirror: Whether training images are mirrored at random. False for digits, whose meaning would change.
    """

    train: Split
    validation: Split
    test: Split
    classes: int
    mean: Tensor
    std: Tensor
    mirror: bool = True

    def normalised(self, images: Tensor) -> Tensor:
        """Normalise uint8 images to float32 by channel, (x - mean) / std, on the images' device."""
        mean, std = (values.to(images.device)[:, None, None] for values in (self.mean, self.std))
        return torch.sub(images, mean).div_(std)

    def training_batch(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """The network's input for these training images, cropped and mirrored at random."""
        return self.seen(crop_and_flip(self.train.images[rows], generator, flip=self.mirror))

    def seen(self, images: Tensor) -> Tensor:
        """The network's input for images, without augmentation."""
        # Convolutions are faster in this memory format, also on a CPU.
        return self.normalised(images).contiguous(memory_format=torch.channels_last)

    def to(self, device: torch.device | str) -> "Pictures":
        """Copy the data set to another device."""
        moved = {name: getattr(self, name).to(device) for name in ("train", "validation", "test", "mean", "std")}
        return replace(self, **moved)


def in_parts(title: str, published: Split, validates: Tensor, test: Split, classes: int) -> Pictures:
    """Divide the published training images by the mask `validates`, and compute the constants of normalisation.

    Raises:
        DataError: If no image is left for validation, or a channel is constant.
    """
    train, validation = (Split(published.images[rows], published.labels[rows]) for rows in (~validates, validates))
    if not len(validation):
        raise DataError(
            f"{title}: {len(published)} training images are too few to set a tenth aside for validation. "
            "Give files with more."
        )
    channels = [mean_and_std(train.images[:, channel]) for channel in range(3)]
    for name, (mean, std) in zip(("red", "green", "blue"), channels, strict=True):
        if std == 0:
            raise DataError(
                f"{title}: the training files contain no images: {name} is {mean:.0f} in every pixel. "
                "Delete them and download them again."
            )
    constants = torch.tensor(channels, dtype=torch.float32, device=train.images.device)
    return Pictures(train, validation, test, classes, constants[:, 0], constants[:, 1])
