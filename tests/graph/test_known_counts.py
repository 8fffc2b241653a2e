"""Networks whose channels are counted by hand."""

import pytest
import torch
from torch import nn

import keepk
from keepk_paper.models import VGG16, DenseNet40


@pytest.mark.parametrize(("initial", "expected"), [(24, 9_360), (16, 9_048)])
def test_densenet_40_has_a_read_for_every_input_of_its_norms(initial, expected):
    """The 39 BatchNorms have 24, 36, ... inputs, each of which is one read."""
    net = DenseNet40(initial=initial)
    graph = keepk.trace(net, torch.zeros(2, 3, 32, 32))
    reads = sum(len(space.units) for space in graph.groups if space.kind in ("read", "channel"))
    norms = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert reads == expected == sum(norm.num_features for norm in norms)
    assert len(norms) == 39
    assert not graph.units.lossy.any()


def test_vgg_16_has_4224_channels_and_512_hidden_neurons():
    graph = keepk.trace(VGG16(), torch.zeros(2, 3, 32, 32))
    assert [len(space.units) for space in graph.groups] == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 7
    assert len(graph.units) == 4_224 + 512
    assert not graph.units.lossy.any()


def test_a_reading_leaves_its_channel_to_others_and_the_last_one_takes_it_along():
    net = DenseNet40(growth=3, initial=4, depth=10).double().eval()
    example = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    graph = keepk.trace(net, example)
    first_conv = net.features.conv
    assert isinstance(first_conv, nn.Conv2d)
    width = first_conv.out_channels
    first = next(space for space in graph.groups if space.kind == "source")
    source = int(first.units[0])
    readers = [int(reader) for one, reader in graph.links() if one == source]
    for reader in readers[:-1]:
        keepk.shrink(net, graph, [reader])
        assert first_conv.out_channels == width
    keepk.shrink(net, graph, readers[-1:])
    assert first_conv.out_channels == width - 1
    assert net(example).isfinite().all()
