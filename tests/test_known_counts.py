"""Networks whose channels can be counted by hand."""

import torch
from torch import nn

import keepk


class Layer(nn.Module):
    """A layer of DenseNet: what it makes is put beside what it got."""

    def __init__(self, channels, growth):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x):
        return torch.cat([x, self.conv(self.norm(x).relu())], 1)


class Transition(nn.Module):
    """All channels are mixed, and the picture is halved."""

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x):
        return nn.functional.avg_pool2d(self.conv(self.norm(x).relu()), 2)


def densenet40(growth=12, channels=24, depth=12):
    parts = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for block in range(3):
        for _ in range(depth):
            parts.append(Layer(channels, growth))
            channels += growth
        if block < 2:
            parts.append(Transition(channels))
    head = [nn.BatchNorm2d(channels), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*parts, *head)


def vgg16(hidden=512):
    parts, channels = [], 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if width:
            parts += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            channels = width
        else:
            parts.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    return nn.Sequential(*parts, *head)


def test_densenet_40_has_9360_reads():
    """24, 36, ... channels before each of 39 BatchNorms: one reading for each."""
    net = densenet40()
    assert sum(parameter.numel() for parameter in net.parameters()) == 1_059_298
    graph = keepk.trace(net, torch.zeros(2, 3, 32, 32))
    reads = sum(len(space.units) for space in graph.spaces if space.kind in ("read", "channel"))
    assert reads == 9_360 == sum(m.num_features for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    assert not graph.units.lossy.any()


def test_vgg_16_has_4224_channels_and_512_hidden_neurons():
    graph = keepk.trace(vgg16(), torch.zeros(2, 3, 32, 32))
    assert [len(space.units) for space in graph.spaces] == [64] * 2 + [128] * 2 + [256] * 3 + [512] * 7
    assert len(graph.units) == 4_224 + 512


def test_a_reading_leaves_its_channel_to_others_and_the_last_one_takes_it_along():
    net = densenet40(growth=3, channels=4, depth=2).double().eval()
    example = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    graph = keepk.trace(net, example)
    width = net[0].out_channels
    first = next(space for space in graph.spaces if space.kind == "source")
    source = int(first.units[0])
    readers = [int(reader) for one, reader in graph._links() if one == source]
    for reader in readers[:-1]:
        keepk.shrink(net, graph, [reader])
        assert net[0].out_channels == width
    keepk.shrink(net, graph, readers[-1:])
    assert net[0].out_channels == width - 1
    assert net(example).isfinite().all()
