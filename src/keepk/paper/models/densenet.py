"""DenseNet-40 for images of 32 x 32 (Huang et al., 2017), without bottlenecks and without compression."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepk.errors import KeepkError
from keepk.paper.models.parts import he_normal, scaled

BLOCKS = 3
LAYERS_AROUND = 4  # the first convolution, two transitions, the classifier


class DenseLayer(nn.Module):
    """BatchNorm, ReLU, 3 x 3 convolution; the output is concatenated to the input."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C + growth, H, W]."""
        return torch.cat([maps, self.conv(F.relu(self.norm(maps), inplace=True))], 1)


class Transition(nn.Module):
    """BatchNorm, ReLU, 1 x 1 convolution over all channels, 2 x 2 average pooling."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H / 2, W / 2]."""
        return F.avg_pool2d(self.conv(F.relu(self.norm(maps), inplace=True)), 2)


class DenseNet40(nn.Module):
    """Three blocks of (depth - 4) / 3 dense layers, with a transition between them.

    Every layer reads all channels produced before it in its block: with 24 initial channels the BatchNorms have 9,360
    inputs, with 16 they have 9,048.

    Args:
        classes: The number of outputs.
        growth: The number of channels that each layer adds.
        initial: Channels of the first convolution.
        depth: Layers with weights, 3 n + 4.
        width: Factor of `growth` and `initial`.

    >>> sum(parameter.numel() for parameter in DenseNet40().parameters())
    1059298
    >>> sum(parameter.numel() for parameter in DenseNet40(initial=16).parameters())
    1019722
    """

    def __init__(
        self, classes: int = 10, *, growth: int = 12, initial: int = 24, depth: int = 40, width: float = 1.0
    ) -> None:
        super().__init__()
        layers, left_over = divmod(depth - LAYERS_AROUND, BLOCKS)
        if layers < 1 or left_over:
            raise KeepkError(f"DenseNet40: depth={depth}. Choose 3 n + 4 layers: 7, 10, 13, ... 40.")
        growth, channels = scaled(growth, width), scaled(initial, width)
        self.features = nn.Sequential()
        self.features.add_module("conv", nn.Conv2d(3, channels, 3, padding=1, bias=False))
        for block in range(1, BLOCKS + 1):
            dense = [DenseLayer(channels + growth * layer, growth) for layer in range(layers)]
            channels += growth * layers
            self.features.add_module(f"block{block}", nn.Sequential(*dense))
            if block < BLOCKS:
                self.features.add_module(f"transition{block}", Transition(channels))
        self.features.add_module("norm", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, classes)
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes for images [N, 3, 32, 32]."""
        maps = F.relu(self.features(images), inplace=True)
        scores: Tensor = self.classifier(F.adaptive_avg_pool2d(maps, 1).flatten(1))
        return scores
