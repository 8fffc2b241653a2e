"""VGG-16 for images of 32 x 32, as in Li et al. (2017)."""

from torch import Tensor, nn

from keepk.paper.models.parts import he_normal, scaled

BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
HIDDEN = 512


class VGG16(nn.Module):
    """13 convolutions of 3 x 3 with BatchNorm, in five blocks that halve the image, then 512 hidden nodes.

    Args:
        classes: The number of outputs.
        width: A factor for the number of channels and hidden nodes; 0.25 gives 16, 16, 32, ... 128.

    >>> network = VGG16(width=0.25)
    >>> [layer.out_channels for layer in network.features if isinstance(layer, nn.Conv2d)]
    [16, 16, 32, 32, 64, 64, 64, 128, 128, 128, 128, 128, 128]
    """

    def __init__(self, classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        layers, channels = list[nn.Module](), 3
        for block in BLOCKS:
            for filters in block:
                layers += _convolution(channels, channels := scaled(filters, width))
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
