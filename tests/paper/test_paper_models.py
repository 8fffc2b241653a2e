"""The paper's networks: their layers, their parameters as printed, and networks of different widths."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import keepk
from keepk.errors import KeepkError
from keepk_paper.models import VGG16, DenseNet40, LeNet5, LeNet300, printed_parameters

VGG_FILTERS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


def convolutions(net):
    return [layer for layer in net.modules() if isinstance(layer, nn.Conv2d)]


def vgg_parameters_by_hand(classes, filters=VGG_FILTERS, hidden=512):
    """The weights of convolutions, and the weights and biases of fully connected layers, by hand."""
    weights = sum(9 * before * after for before, after in zip((3, *filters), filters, strict=False))
    return weights + (filters[-1] + 1) * hidden + (hidden + 1) * classes


def densenet_by_hand(classes, growth, initial, layers):
    """(parameters, inputs of BatchNorms), layer by layer."""
    total, reads, channels = 27 * initial, 0, initial
    for block in range(3):
        for _ in range(layers):
            total += 2 * channels + 9 * channels * growth
            reads += channels
            channels += growth
        if block < 2:
            total += 2 * channels + channels * channels
            reads += channels
    return total + 2 * channels + (channels + 1) * classes, reads + channels


@pytest.mark.parametrize(("classes", "exact", "printed"), [(10, 14_978_250, "14.98M"), (100, 15_024_420, "15.02M")])
def test_vgg_16_has_as_many_parameters_as_printed(classes, exact, printed):
    net = VGG16(classes)
    assert printed_parameters(net) == exact == vgg_parameters_by_hand(classes)
    assert f"{exact / 1e6:.2f}M" == printed
    everything = sum(parameter.numel() for parameter in net.parameters())
    assert everything == exact + 3 * 4_224  # a bias, a scale and a shift for each channel
    assert f"{everything / 1e6:.2f}M" != printed


def test_vgg_16_has_4224_channels():
    net = VGG16()
    assert tuple(layer.out_channels for layer in convolutions(net)) == VGG_FILTERS
    assert sum(VGG_FILTERS) == 4_224
    assert {name.partition(".")[0] for name in net.state_dict()} == {"features", "classifier"}


@pytest.mark.parametrize(("initial", "parameters", "reads"), [(24, 1_059_298, 9_360), (16, 1_019_722, 9_048)])
def test_densenet_40_by_hand(initial, parameters, reads):
    net = DenseNet40(initial=initial)
    assert printed_parameters(net) == parameters
    assert sum(layer.num_features for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)) == reads
    assert densenet_by_hand(10, 12, initial, 12) == (parameters, reads)
    assert len(convolutions(net)) + 1 == 40
    assert {name.partition(".")[0] for name in net.state_dict()} == {"features", "classifier"}


def test_lenets_are_counted_whole():
    assert printed_parameters(LeNet300()) == 266_610
    assert printed_parameters(LeNet5()) == 431_080


@settings(deadline=None, derandomize=True, max_examples=10)
@given(
    classes=st.integers(1, 20),
    growth=st.integers(1, 5),
    initial=st.integers(1, 9),
    layers=st.integers(1, 3),
)
def test_a_densenet_of_any_size_by_hand(classes, growth, initial, layers):
    net = DenseNet40(classes, growth=growth, initial=initial, depth=3 * layers + 4)
    parameters, reads = densenet_by_hand(classes, growth, initial, layers)
    assert printed_parameters(net) == parameters
    assert sum(layer.num_features for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)) == reads
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, classes)


@pytest.mark.parametrize("width", [0.05, 0.25, 0.5, 1.5])
def test_width_scales_every_layer_of_vgg(width):
    net = VGG16(7, width)
    filters = tuple(round(width * channels) for channels in VGG_FILTERS)
    assert tuple(layer.out_channels for layer in convolutions(net)) == filters
    assert printed_parameters(net) == vgg_parameters_by_hand(7, filters, round(512 * width))
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_width_scales_growth_and_first_convolution_of_densenet():
    thin, by_hand = DenseNet40(width=0.25), DenseNet40(growth=3, initial=6)
    assert {name: value.shape for name, value in thin.state_dict().items()} == {
        name: value.shape for name, value in by_hand.state_dict().items()
    }


def test_densenet_computes_what_its_definition_says():
    """Each layer reads the concatenation of all earlier outputs in its block."""
    net = DenseNet40(growth=2, initial=3, depth=10).double().eval()
    for norm in (layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        assert norm.running_mean is not None
        norm.running_mean.normal_()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    parts: dict[str, Any] = dict(net.features.named_children())
    made = [parts["conv"](images)]
    for block in (1, 2, 3):
        for layer in parts[f"block{block}"]:
            made.append(layer.conv(layer.norm(torch.cat(made, 1)).clamp(min=0)))
        if block < 3:
            change = parts[f"transition{block}"]
            made = [F.avg_pool2d(change.conv(change.norm(torch.cat(made, 1)).clamp(min=0)), 2)]
    expected = net.classifier(parts["norm"](torch.cat(made, 1)).clamp(min=0).mean((2, 3)))
    torch.testing.assert_close(net(images), expected, rtol=1e-12, atol=1e-12)


def test_vgg_computes_what_its_definition_says():
    net = VGG16(width=1 / 16).double().eval()
    images = maps = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    layers = convolutions(net)
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    for number, (conv, norm) in enumerate(zip(layers, norms, strict=True), 1):
        maps = norm(conv(maps)).clamp(min=0)
        if number in (2, 4, 7, 10, 13):
            maps = F.max_pool2d(maps, 2)
    assert maps.shape == (2, 32, 1, 1)
    first, last = net.classifier[0], net.classifier[2]
    expected = last(first(maps[:, :, 0, 0]).clamp(min=0))
    torch.testing.assert_close(net(images), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("network", [VGG16, DenseNet40])
def test_filters_start_with_he_et_als_spread(network):
    torch.manual_seed(0)
    for layer in convolutions(network(width=0.5)):
        if layer.weight.numel() > 2_000:
            fan_out = layer.out_channels * layer.kernel_size[0] * layer.kernel_size[1]
            assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.08)


def test_a_shrunk_vgg_is_counted_as_a_thinner_one():
    net = VGG16(width=1 / 16).eval()
    graph = keepk.trace(net, torch.zeros(2, 3, 32, 32))
    for space in graph.groups:
        keepk.shrink(net, graph, [int(unit) for unit in space.units[: len(space.units) // 2]])
    assert printed_parameters(net) == printed_parameters(VGG16(width=1 / 32))


@pytest.mark.parametrize("depth", [4, 6, 39, 41, 0, -5])
def test_a_depth_that_does_not_divide_is_refused(depth):
    with pytest.raises(KeepkError, match=rf"DenseNet40: depth={depth}\. Choose 3 n \+ 4 layers: 7, 10, 13, ... 40"):
        DenseNet40(depth=depth)


@pytest.mark.parametrize("width", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("network", [VGG16, DenseNet40])
def test_a_width_that_is_no_factor_is_refused(network, width):
    with pytest.raises(KeepkError, match=rf"the width of a network: got \d+ channels times {width}\. Give at least 1"):
        network(width=width)


@pytest.mark.parametrize("size", [{"growth": 0}, {"initial": 0}, {"growth": -3}])
def test_a_densenet_without_channels_is_refused(size):
    with pytest.raises(KeepkError, match=r"got (0|-3) channels times 1\.0\. Give at least 1 channel"):
        DenseNet40(**size)
