"""The paper's networks: LeNet-300-100, LeNet-5, VGG-16 and DenseNet-40.

VGG-16 is Li et al.'s version for images of 32 x 32 (2017). DenseNet-40 is Huang et al.'s (2017), without bottlenecks
and compression. `printed_parameters` counts parameters as the paper's tables do.
"""

from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepk.errors import KeepkError


def scaled(channels: int, width: float) -> int:
    """`channels` times `width`, rounded, at least 1.

    >>> scaled(64, 0.25), scaled(64, 0.001)
    (16, 1)
    """
    if channels < 1 or not 0 < width < float("inf"):
        raise KeepkError(
            f"the width of a network: got {channels} channels times {width}. "
            "Give at least 1 channel and a factor above 0; 1.0 is the paper's network."
        )
    return max(1, round(channels * width))


def he_normal(network: nn.Module) -> None:
    """Initialise filters as in He et al., from N(0, 2 / (k k c)) for c filters of k x k, and biases with 0."""
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class LeNet300(nn.Module):
    """LeNet-300-100: two hidden layers, 266,610 parameters.

    Args:
        dropout: Rates in front of fc1, fc2 and fc3.

    >>> sum(parameter.numel() for parameter in LeNet300().parameters())
    266610
    """

    def __init__(self, dropout: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> None:
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 300)
        self.fc2 = nn.Linear(300, 100)
        self.fc3 = nn.Linear(100, 10)
        self.dropout = nn.ModuleList(nn.Dropout(rate) for rate in dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits for images [N, 1, 28, 28]."""
        hidden = F.relu(self.fc1(self.dropout[0](images.flatten(1))))
        hidden = F.relu(self.fc2(self.dropout[1](hidden)))
        scores: Tensor = self.fc3(self.dropout[2](hidden))
        return scores


class LeNet5(nn.Module):
    """LeNet-5 as in Caffe: 20 and 50 filters of 5 x 5, then 500 hidden nodes; 431,080 parameters.

    Args:
        dropout: Rates in front of fc1 and fc2.

    >>> sum(parameter.numel() for parameter in LeNet5().parameters())
    431080
    """

    def __init__(self, dropout: tuple[float, float] = (0.0, 0.0)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.fc2 = nn.Linear(500, 10)
        self.dropout = nn.ModuleList(nn.Dropout(rate) for rate in dropout)

    def features(self, images: Tensor) -> Tensor:
        """The output of the convolutional layers for images [N, 1, 28, 28], constant while they are frozen."""
        maps = F.relu(F.max_pool2d(self.conv1(images), 2))
        return F.relu(F.max_pool2d(self.conv2(maps), 2)).flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        """Logits of the ten digits, from the features."""
        hidden = F.relu(self.fc1(self.dropout[0](features)))
        scores: Tensor = self.fc2(self.dropout[1](hidden))
        return scores

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits for images [N, 1, 28, 28]."""
        return self.classify(self.features(images))


BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
HIDDEN = 512


class VGG16(nn.Module):
    """13 convolutions of 3 x 3 with BatchNorm, in five blocks that halve the image, then 512 hidden nodes.

    Args:
        classes: The number of outputs.
        width: A factor for the number of channels and hidden nodes; 0.25 gives 16, 16, 32, ... 128.
        filters: The number of filters of each of the 13 convolutions, which overrides `width` there; `width` still sets
            the hidden nodes.

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


DENSE_BLOCKS = 3
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
        layers, left_over = divmod(depth - LAYERS_AROUND, DENSE_BLOCKS)
        if layers < 1 or left_over:
            raise KeepkError(f"DenseNet40: depth={depth}. Choose 3 n + 4 layers: 7, 10, 13, ... 40.")
        growth, channels = scaled(growth, width), scaled(initial, width)
        self.features = nn.Sequential()
        self.features.add_module("conv", nn.Conv2d(3, channels, 3, padding=1, bias=False))
        for block in range(1, DENSE_BLOCKS + 1):
            dense = [DenseLayer(channels + growth * layer, growth) for layer in range(layers)]
            channels += growth * layers
            self.features.add_module(f"block{block}", nn.Sequential(*dense))
            if block < DENSE_BLOCKS:
                self.features.add_module(f"transition{block}", Transition(channels))
        self.features.add_module("norm", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, classes)
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the classes for images [N, 3, 32, 32]."""
        maps = F.relu(self.features(images), inplace=True)
        scores: Tensor = self.classifier(F.adaptive_avg_pool2d(maps, 1).flatten(1))
        return scores


def printed_parameters(network: nn.Module) -> int:
    """The number of parameters, counted as the paper's tables count them.

    For LeNet and DenseNet-40 this is all parameters: weights, biases, and BatchNorm's scales and shifts. For VGG-16 it
    excludes BatchNorm's parameters and the biases of convolutions; only that count gives the paper's 14.98M.

    >>> f"{printed_parameters(VGG16()):,}", f"{printed_parameters(VGG16(classes=100)):,}"
    ('14,978,250', '15,024,420')
    """
    total = sum(parameter.numel() for parameter in network.parameters())
    return total - (_left_out_of_vgg(network) if isinstance(network, VGG16) else 0)


def _left_out_of_vgg(network: nn.Module) -> int:
    layers = list(network.modules())
    norms = chain.from_iterable(layer.parameters() for layer in layers if isinstance(layer, nn.BatchNorm2d))
    biases = (layer.bias for layer in layers if isinstance(layer, nn.Conv2d) and layer.bias is not None)
    return sum(parameter.numel() for parameter in chain(norms, biases))
