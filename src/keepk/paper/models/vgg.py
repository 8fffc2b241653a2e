"""VGG-16 for images of 32 x 32, as in Li et al. (2017)."""

from collections.abc import Sequence

from torch import Tensor, nn

from keepk.errors import KeepkError
from keepk.paper.models.parts import he_normal, scaled

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
HIDDEN = 512


class VGG16(nn.Module):
    """13 convolutions of 3 x 3 with BatchNorm, in five blocks that halve the image, then 512 hidden nodes.

    Args:
        classes: The number of outputs.
        width: A factor for the number of channels and hidden nodes; 0.25 gives 16, 16, 32, ... 128.
        filters: The number of filters of each of the 13 convolutions instead, as a pruned network has them; `width`
            still sets the hidden nodes.

    >>> network = VGG16(width=0.25)
    >>> [layer.out_channels for layer in network.features if isinstance(layer, nn.Conv2d)]
    [16, 16, 32, 32, 64, 64, 64, 128, 128, 128, 128, 128, 128]
    """

    def __init__(self, classes: int = 10, width: float = 1.0, filters: Sequence[int] | None = None) -> None:
        super().__init__()
        layers, channels = list[nn.Module](), 3
        given = [scaled(number, width) for block in BLOCKS for number in block] if filters is None else list(filters)
        if len(given) != sum(map(len, BLOCKS)) or min(given) < 1:
            raise KeepkError(f"VGG16: filters={given}: give the filters of 13 convolutions, each at least 1.")
        left = iter(given)
        for block in BLOCKS:
            for _ in block:
                layers += _convolution(channels, channels := next(left))
            layers.append(nn.MaxPool2d(2))
        hidden = scaled(HIDDEN, width)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, classes))
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes for images [N, 3, 32, 32]."""
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


def _convolution(channels: int, filters: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, filters, 3, padding=1), nn.BatchNorm2d(filters), nn.ReLU(inplace=True)]
