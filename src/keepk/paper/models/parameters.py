"""The number of parameters of a network, counted as in the paper's tables."""

from itertools import chain

from torch import nn

from keepk.paper.models.vgg import VGG16


def printed_parameters(network: nn.Module) -> int:
    """The number of parameters to compare with the paper's.

    Counted are, for LeNet and DenseNet-40, all parameters: weights, biases, and scales and shifts of BatchNorm. For
    VGG-16 they are the weights of convolutions and the weights and biases of fully connected layers, but neither
    BatchNorm's parameters nor the biases of convolutions: 14.98M fits only so.

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
