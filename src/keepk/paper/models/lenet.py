"""The networks for MNIST: LeNet-300-100 and LeNet-5."""

import torch.nn.functional as F
from torch import Tensor, nn


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
