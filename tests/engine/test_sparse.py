"""Compiled programs compute what the model computes, for every graph, sparsity, batch size and number of threads."""

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import keepk
from keepk.engine import kernels
from keepk.engine import sparse as sparse_module
from keepk.engine.kernels import Code
from keepk.engine.machine import Machine, chosen, compiler, host, optimize
from keepk.errors import SparseError
from keepk_paper.models import VGG16, LeNet5, LeNet300
from sparse_networks import error, pruned
from untyped import untyped


def assert_same_samples(fast, x, batches):
    """Each sample gets the same bits in batches of every size."""
    whole = fast(x)
    for size in batches:
        parts = [fast(part) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), whole), size


def runs_in_keepk(fast):
    return not fast.report.fallbacks


WIDTHS = (16, 8, 4)


@pytest.fixture(params=WIDTHS, ids=lambda width: f"width {width}")
def machine(request, monkeypatch):
    """This CPU with vectors of each width; LLVM splits those that it does not have."""
    vectors = {16: 12, 8: 8, 4: 16}[request.param]
    made = Machine(host().name, host().features, request.param, vectors)
    monkeypatch.setattr(sparse_module, "host", lambda: made)
    return made


@pytest.mark.parametrize("density", [0, 0.001, 0.02, 0.1, 0.3])
def test_a_multilayer_perceptron(machine, density):
    net = pruned(LeNet300(), density)
    fast = keepk.sparse(net, torch.randn(2, 1, 28, 28))
    assert runs_in_keepk(fast)
    assert fast.report.vector == machine.width
    x = torch.randn(150, 1, 28, 28)
    with torch.no_grad():
        assert error(net(x), fast(x)) <= 1e-6
    assert_same_samples(fast, x, [1, 2, 7, 16, 50, 64, 100])


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("build", "shape"), [(LeNet5, (1, 28, 28)), (lambda: VGG16(width=0.1), (3, 32, 32))])
def test_convolutional_networks(build, shape):
    net = pruned(build(), 0.05)
    fast = keepk.sparse(net, torch.randn(2, *shape))
    assert runs_in_keepk(fast)
    x = torch.randn(40, *shape)
    with torch.no_grad():
        assert error(net(x), fast(x)) <= 1e-6
    assert_same_samples(fast, x, [1, 3, 16, 37])


# Random networks


class Residual(nn.Module):
    def __init__(self, channels, inner, join):
        super().__init__()
        self.inner, self.join = inner, join
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1), nn.Sigmoid())

    def forward(self, x):
        y = self.inner(x)
        if self.join == "add":
            return torch.relu(x + y)
        if self.join == "mul":
            return x * y
        if self.join == "gate":
            return y * self.gate(x)
        return torch.cat([x, y, x], 1)


ACTIVATIONS: list[Callable[[], nn.Module]] = [
    nn.ReLU,
    nn.ReLU6,
    nn.SiLU,
    nn.GELU,
    nn.Sigmoid,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Tanh,
    nn.Identity,
]
ACTIVATIONS += [lambda: nn.GELU("tanh"), lambda: nn.ReLU(inplace=True), lambda: nn.Hardtanh(0.25, 2.0), nn.Dropout]


class Drawn:
    """A random network of layers that compile, and the shape of a sample at its end."""

    def __init__(self, draw):
        self.draw, self.layers = draw, list[nn.Module]()
        self.input = tuple(draw(st.integers(1, most)) for most in (5, 12, 12))
        self.channels, self.rows, self.columns = self.input

    def pick(self, *values):
        return self.draw(st.sampled_from(values))

    def pair(self, least, most):
        return self.draw(st.integers(least, most)), self.draw(st.integers(least, most))

    def add(self, layer):
        """Append a layer if it takes what is there."""
        try:
            shape = layer.eval()(torch.zeros(1, self.channels, self.rows, self.columns)).shape[1:]
        except RuntimeError:
            return  # the kernel is larger than the input
        self.layers.append(layer)
        self.channels, self.rows, self.columns = shape

    def convolution(self):
        groups, step = self.pick(1, 1, self.channels), self.pick(1, 1, 2, 3)
        options = {"padding": self.pair(0, 3), "dilation": self.pair(1, 2), "stride": (step, self.pick(step, step, 1))}
        out = groups * self.draw(st.integers(1, 6))
        bias = self.draw(st.booleans())
        self.add(nn.Conv2d(self.channels, out, self.pair(1, 5), **options, groups=groups, bias=bias))

    def norm(self):
        self.add(nn.BatchNorm2d(self.channels))

    def activation(self):
        self.add(self.pick(*ACTIVATIONS)())

    def pool(self):
        size, options = self.draw(st.integers(2, 3)), {"ceil_mode": self.draw(st.booleans())}
        step, padding = self.draw(st.integers(1, 3)), self.draw(st.integers(0, 1))
        average = nn.AvgPool2d(size, step, padding, count_include_pad=self.draw(st.booleans()), **options)
        self.add(self.pick(nn.MaxPool2d(size, step, padding, **options), average, nn.AdaptiveAvgPool2d((2, 1))))

    def residual(self):
        kernel = self.pick(1, 3)
        inner = nn.Conv2d(self.channels, self.channels, kernel, padding=kernel // 2)
        join = self.pick("add", "mul", "gate", "cat")
        self.add(Residual(self.channels, nn.Sequential(inner, nn.BatchNorm2d(self.channels)), join))

    def head(self):
        self.layers.append(nn.Flatten())
        size = self.channels * self.rows * self.columns
        for _ in range(self.draw(st.integers(1, 2))):
            out = self.draw(st.integers(1, 20))
            self.layers += [nn.Linear(size, out, bias=self.draw(st.booleans())), self.pick(*ACTIVATIONS)()]
            self.layers += [nn.BatchNorm1d(out)] if self.draw(st.booleans()) else []
            size = out


@st.composite
def random_networks(draw):
    torch.manual_seed(draw(st.integers(0, 1000)))
    drawn = Drawn(draw)
    kinds = [drawn.convolution, drawn.convolution, drawn.norm, drawn.activation, drawn.pool, drawn.residual]
    for _ in range(draw(st.integers(1, 6))):
        draw(st.sampled_from(kinds))()
    if draw(st.booleans()):
        drawn.head()
    net = pruned(
        nn.Sequential(*drawn.layers), draw(st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0])), draw(st.integers(0, 9))
    )
    weights = [it for it in net.parameters() if it.dim() > 1]
    if weights and draw(st.booleans()):  # empty rows, or a layer of zeros
        weights[draw(st.integers(0, len(weights) - 1))].detach()[: draw(st.sampled_from([1, 2, 3, None]))] = 0
    return net, drawn.input


@given(
    drawn=random_networks(),
    width=st.sampled_from(WIDTHS),
    threads=st.sampled_from([1, 3]),
    batch=st.sampled_from([1, 2, 5, 8, 16, 17, 33]),
    forced=st.booleans(),
)
@settings(deadline=None, max_examples=int(os.environ.get("KEEPK_FUZZ", "25")))
def test_random_networks(drawn, width, threads, batch, forced):
    net, shape = drawn
    vectors = {16: 12, 8: 8, 4: 16}[width]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_module, "host", lambda: Machine(host().name, host().features, width, vectors))
        patch.setattr(sparse_module, "PARALLEL", 0.0)
        if forced:  # dense layers, too, run in the program
            patch.setattr("keepk.engine.graph.LAYOUT_COST", 0.0)
            patch.setattr("keepk.engine.graph.SPARSE_RATE", 1e9)
        fast = keepk.sparse(net, torch.randn(2, *shape), threads)
        x = torch.randn(batch, *shape)
        with torch.no_grad():
            wanted = net(x)
        got = fast(x)
        assert got.shape == wanted.shape
        assert error(wanted, got) <= 1e-5
        if runs_in_keepk(fast):
            assert_same_samples(fast, x, [1, 3, 16])


# Long sums


def equal_weights(layer, density):
    """A layer whose products are all equal for a constant input, so that rounding errors add up."""
    kept = torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(0)) < density
    layer.weight.detach().copy_(kept * 0.013)
    layer.bias.detach().fill_(0.1)
    return layer


LONG_SUMS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Sequential(equal_weights(nn.Linear(40_000, 20), 0.1), nn.ReLU()), (40_000,)),
    (lambda: nn.Sequential(nn.Flatten(), equal_weights(nn.Linear(9_000, 9), 0.3)), (10, 30, 30)),
    (lambda: nn.Sequential(equal_weights(nn.Conv2d(200, 9, 3, padding=1), 0.4), nn.ReLU()), (200, 7, 6)),
    (lambda: nn.Sequential(equal_weights(nn.Conv2d(200, 9, 3, 2), 0.4), nn.ReLU()), (200, 9, 8)),
    (lambda: nn.Sequential(equal_weights(nn.Conv2d(200, 9, 5), 0.4), nn.ReLU()), (200, 5, 5)),
    (lambda: nn.Sequential(equal_weights(nn.Conv2d(1, 4, 3), 0.5), nn.AdaptiveAvgPool2d(1)), (1, 112, 112)),
    (lambda: nn.Sequential(equal_weights(nn.Conv2d(1, 4, 1), 1.0), nn.AdaptiveAvgPool2d((2, 3))), (1, 90, 85)),
    (lambda: nn.Sequential(equal_weights(nn.Conv2d(1, 4, 1), 1.0), nn.AvgPool2d(40, 1)), (1, 48, 50)),
    (lambda: nn.Sequential(equal_weights(nn.Conv2d(1, 4, 1), 1.0), nn.AvgPool2d(25, 20, 12)), (1, 48, 50)),
]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("index", range(len(LONG_SUMS)))
def test_long_sums_stay_accurate(index, monkeypatch):
    monkeypatch.setattr("keepk.engine.graph.LAYOUT_COST", 0.0)
    monkeypatch.setattr("keepk.engine.graph.SPARSE_RATE", 1e9)
    monkeypatch.setattr(sparse_module, "PARALLEL", 0.0)
    build, shape = LONG_SUMS[index]
    net = build().eval()
    fast = keepk.sparse(net, torch.randn(2, *shape), threads=2)
    assert runs_in_keepk(fast)
    exact = copy.deepcopy(net).double()
    for x in (torch.full((1, *shape), 0.7), torch.zeros(1, *shape), torch.rand(19, *shape)):
        with torch.no_grad():
            assert error(exact(x.double()), fast(x)) <= 1e-6
    assert_same_samples(fast, x, [1, 2, 7, 16])


RANGES = [(-6.0, -3.0), (-3.0, 3.0), (-100.0, -85.0), (85.0, 100.0), (-1e-3, 1e-3), (-9.0, -5.0)]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("build", [nn.GELU, lambda: nn.GELU("tanh"), nn.Sigmoid, nn.SiLU, nn.Tanh])
@pytest.mark.filterwarnings("ignore")
def test_activations_are_accurate_in_every_range(build, monkeypatch):
    monkeypatch.setattr("keepk.engine.graph.LAYOUT_COST", 0.0)
    monkeypatch.setattr("keepk.engine.graph.SPARSE_RATE", 1e9)
    net = nn.Sequential(nn.Linear(32, 32), build()).eval()
    net.get_parameter("0.weight").detach().copy_(torch.eye(32))
    net.get_parameter("0.bias").detach().zero_()
    fast = keepk.sparse(net, torch.randn(2, 32))
    assert runs_in_keepk(fast)
    exact = copy.deepcopy(net).double()
    for low, high in RANGES:
        x = torch.linspace(low, high, 20 * 32).reshape(20, 32)
        with torch.no_grad():
            wanted = net(x) if low == -100 else exact(x.double())  # in float32 exp(-x) is infinite from -88.72 on
        assert error(wanted, fast(x)) <= 5e-6, (low, high)
        assert_same_samples(fast, x, [1, 16])


def test_a_bias_of_one_number():
    class OneBias(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(200, 300)), nn.Parameter(torch.randn(1))

        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias)

    net, x = pruned(OneBias(), 0.05), torch.randn(5, 300)
    fast = keepk.sparse(net, x)
    assert runs_in_keepk(fast)
    with torch.no_grad():
        assert error(net(x), fast(x)) <= 1e-6


# Whole networks


class Block(nn.Module):
    """A block of a ResNet, or of a MobileNetV2 if it is inverted."""

    def __init__(self, sizes, stride, last):
        super().__init__()
        before, inner, after = sizes
        layers = [nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), last()]
        groups = inner if last is nn.ReLU6 else 1
        layers += [nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(inner), last()]
        layers += [nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after)]
        self.layers = nn.Sequential(*layers)
        self.inverted = last is nn.ReLU6
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        y = self.layers(x)
        if self.inverted:
            return x + y if y.shape == x.shape else y
        return torch.relu(y + self.shortcut(x))


def of_blocks(last):
    """A small ResNet-50 or MobileNetV2: a strided stem, a padded maximum, blocks with strides, an average."""
    sizes = [(8, 16, 12), (12, 12, 12), (12, 24, 16), (16, 16, 16), (16, 20, 24)]
    strides = [1, 1, 2, 1, 2]
    blocks = [Block(size, stride, last) for size, stride in zip(sizes, strides, strict=True)]
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("last", [nn.ReLU, nn.ReLU6])
def test_residual_networks_compile_without_fallback(last):
    net = pruned(of_blocks(last), 0.2)
    fast = keepk.sparse(net, torch.randn(2, 3, 60, 52))
    assert runs_in_keepk(fast), fast.report
    x = torch.randn(18, 3, 60, 52)
    with torch.no_grad():
        assert error(net(x), fast(x)) <= 1e-5
    assert_same_samples(fast, x, [1, 5, 17])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_images_in_channels_last_down_to_one_pixel_compile_without_fallback(rows):
    """torch asks for the size of the batch itself where it chooses the format of a convolution's result."""
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.MaxPool2d(4)]
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)]
    net = pruned(nn.Sequential(*layers), 0.05)
    for parameter in net.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    fast = keepk.sparse(net, torch.randn(rows, 3, 8, 8))
    assert runs_in_keepk(fast), fast.report
    x = torch.randn(7, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert error(net(x), fast(x)) <= 1e-5
    assert_same_samples(fast, x, [1, 3])


# What torch runs


class Mixed(nn.Module):
    """Operations without kernels between layers, several inputs, and results in a dict."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 6)

    def forward(self, x, scale, *, shift=None):
        y = torch.relu(self.first(x))
        z = self.second(torch.softmax(y, 1))
        z = z.mean((2, 3)) * scale
        out = self.third(torch.cumsum(z, 1))
        return {
            "out": out if shift is None else out + shift,
            "inner": [y.flatten(1), z],
            "batch": x.new_zeros(x.size(0)),
        }


def test_what_has_no_kernel_runs_in_torch_and_is_named():
    net = pruned(Mixed(), 0.2)
    arguments = torch.randn(3, 3, 9, 9), torch.randn(3, 8)
    fast = keepk.sparse(net, {"x": arguments[0], "scale": arguments[1], "shift": torch.randn(3, 6)})
    assert {"first", "second", "third"} == {layer.name for layer in fast.report.layers if layer.runs == "keepk"}
    reasons = " ".join(layer.reason for layer in fast.report.fallbacks)
    assert "there is no kernel for aten.softmax.int" in reasons
    assert "there is no kernel for aten.cumsum.default" in reasons
    for batch in (1, 2, 20):
        given = {"x": torch.randn(batch, 3, 9, 9), "scale": torch.randn(batch, 8), "shift": torch.randn(batch, 6)}
        with torch.no_grad():
            wanted = net(**given)
        got = fast(**given)
        assert error(wanted["out"], got["out"]) <= 1e-5
        assert all(error(one, other) <= 1e-5 for one, other in zip(wanted["inner"], got["inner"], strict=True))
        assert torch.equal(wanted["batch"], got["batch"])


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class FixedBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x).view(2, 2, 2)


@pytest.mark.parametrize("build", [Branching, FixedBatch])
def test_a_model_that_cannot_be_exported_runs_in_torch(build):
    net, x = pruned(build(), 0.3), torch.randn(2, 8)
    fast = keepk.sparse(net, x)
    [layer] = fast.report.layers
    assert (layer.runs, layer.name) == ("torch", build.__name__)
    assert "torch.export cannot trace it for a batch of any size" in layer.reason
    for sign in (1, -1):
        assert torch.equal(fast(sign * x), net(sign * x))


def test_a_dense_model_stays_in_torch_and_a_dense_layer_where_that_is_cheaper():
    dense = nn.Sequential(*VGG16(width=0.25).features).eval()
    report = keepk.sparse(dense, torch.randn(2, 3, 32, 32)).report
    assert [layer.reason for layer in report.layers] == ["no layer is faster without its zeros"]
    net = LeNet5().eval()
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1 and name != "conv1.weight":
            parameter.detach()[torch.rand(parameter.shape) > 0.05] = 0
    assert runs_in_keepk(keepk.sparse(net, torch.randn(2, 1, 28, 28)))  # two changes of layout would cost more
    deep = pruned(VGG16(width=0.25), 0.05)
    weight = deep.get_parameter("features.17.weight")
    weight.detach().fill_(0.01)
    fast = keepk.sparse(deep, torch.randn(2, 3, 32, 32))
    assert [layer.reason for layer in fast.report.fallbacks] == ["dense: 100 % of its weights are left"]
    assert fast.report.fallbacks[0].name == "features.17"
    x = torch.randn(20, 3, 32, 32)
    with torch.no_grad():
        assert error(deep(x), fast(x)) <= 1e-5


# The contract


def test_the_model_is_not_touched_and_the_result_is_a_snapshot():
    net = pruned(LeNet5(), 0.1).train()
    before, x = copy.deepcopy(net.state_dict()), torch.randn(4, 1, 28, 28)
    fast = keepk.sparse(net, x)
    assert net.training
    assert all(parameter.requires_grad for parameter in net.parameters())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    wanted = fast(x)
    for parameter in net.parameters():
        parameter.detach().fill_(7.0)
    assert torch.equal(fast(x), wanted)
    assert not wanted.requires_grad


def test_a_saved_and_loaded_model_gives_the_same_bits(tmp_path):
    net, x = pruned(LeNet300(), 0.05), torch.randn(9, 1, 28, 28)
    keepk.save(net, tmp_path)
    loaded = keepk.load(LeNet300(), tmp_path)
    assert torch.equal(keepk.sparse(loaded, x)(x), keepk.sparse(net, x)(x))


def test_zero_weights_are_skipped_even_where_the_input_is_not_finite():
    net = nn.Sequential(nn.Linear(40, 9))
    weight = net.get_parameter("0.weight").detach()
    weight[:, 3] = weight[2] = 0
    weight[5, 7:] = 0
    fast = keepk.sparse(net, torch.randn(2, 40))
    for value in (float("nan"), float("inf")):
        x = torch.randn(20, 40)
        x[:, 3] = value  # read by no weight
        assert torch.isfinite(fast(x)).all()
        x[:, 9] = value
        got, finite = fast(x), [2, 5]  # the rows without a weight there
        assert torch.isfinite(got[:, finite]).all()
        with torch.no_grad():
            rest = [row for row in range(9) if row not in finite]
            wanted = net(x.index_fill(1, torch.tensor([3]), 0.0))[:, rest]
        assert torch.equal(got[:, rest].isnan(), wanted.isnan())
        assert torch.equal(got[:, rest].isinf(), wanted.isinf())
        assert_same_samples(keepk.sparse(net, torch.randn(2, 40)), torch.randn(40, 40), [1, 16])


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_give_the_same_bits(threads, monkeypatch):
    monkeypatch.setattr(sparse_module, "PARALLEL", 0.0)
    for build, shape in ((LeNet300, (1, 28, 28)), (LeNet5, (1, 28, 28))):
        net, x = pruned(build(), 0.1), torch.randn(75, *shape)
        one, several = keepk.sparse(net, x[:2]), keepk.sparse(net, x[:2], threads=threads)
        for batch in (1, 4, 16, 33, 75):
            assert torch.equal(one(x[:batch]), several(x[:batch]))


def test_calls_from_several_threads_do_not_mix():
    net = pruned(LeNet5(), 0.1)
    fast, batches = keepk.sparse(net, torch.randn(2, 1, 28, 28)), [torch.randn(1 + 7 * i, 1, 28, 28) for i in range(6)]
    wanted = [fast(x) for x in batches]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(20):
            got = list(pool.map(fast, batches))
            assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))


def test_inputs_of_any_layout_in_memory():
    net = pruned(LeNet5(), 0.1)
    fast, x = keepk.sparse(net, torch.randn(1, 1, 28, 28)), torch.randn(5, 1, 28, 28)
    wanted = fast(x)
    strided = torch.randn(5, 1, 28, 56)[..., ::2]
    assert torch.equal(fast(strided), fast(strided.contiguous()))
    for other in (x.to(memory_format=torch.channels_last), x.clone().requires_grad_(), nn.Parameter(x)):
        assert torch.equal(fast(other), wanted)
    assert fast(x[:0]).shape == (0, 10)


def test_a_whole_network_is_one_call():
    for net, shape in ((LeNet300(), (1, 28, 28)), (LeNet5(), (1, 28, 28)), (VGG16(width=0.1), (3, 32, 32))):
        fast = keepk.sparse(pruned(net, 0.1), torch.randn(2, *shape))
        [step] = fast._steps  # sizes in reshapes are not steps of their own
        assert len(getattr(step, "outputs", ())) == 1  # and no value inside is handed over
        assert fast._quick is not None


def test_the_report_counts_weights_and_macs():
    net = pruned(LeNet5(), 0.1)
    report = keepk.sparse(net, torch.randn(2, 1, 28, 28)).report
    assert [layer.name for layer in report.layers] == ["conv1", "conv2", "fc1", "fc2"]
    for layer, pixels in zip(report.layers, (576, 64, 1, 1), strict=True):
        weight = net.get_parameter(f"{layer.name}.weight")
        assert (layer.kept, layer.total) == (int(weight.count_nonzero()), weight.numel())
        assert (layer.macs, layer.dense_macs) == (int(weight.count_nonzero()) * pixels, weight.numel() * pixels)
    assert 0 <= report.difference <= 1e-6
    assert "conv1" in str(report)
    assert "MACs left" in str(report)
    assert '"conv1"' in report.json()


def test_the_report_counts_weights_of_the_model_not_of_folded_layers():
    net = pruned(nn.Sequential(nn.Conv2d(30, 40, 3), nn.BatchNorm2d(40), nn.ReLU()), 0.1)
    net.get_parameter("1.weight").detach()[:20] = 0
    weight = net.get_parameter("0.weight")
    [layer] = keepk.sparse(net, torch.randn(2, 30, 30, 30)).report.layers
    assert layer.kept == int(weight.count_nonzero())
    assert layer.macs == int(weight[20:].count_nonzero()) * 28 * 28


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(SparseError, match=r"sparse: LeNet300 fails on the example, as a batch of 2 \(mat1 and mat2"):
        keepk.sparse(pruned(LeNet300(), 0.1), torch.randn(2, 1, 28, 27))


def test_what_cannot_be_served_is_refused():
    net, x = pruned(LeNet300(), 0.1), torch.randn(2, 1, 28, 28)
    for arguments, words in (
        ((x, net), r"sparse: got Tensor as the model.*The order is model, example"),
        ((net, x, 0), r"sparse: threads=0: too small"),
        ((net, x, True), r"sparse: threads=True: got bool"),
        ((net, 3), r"sparse: example: got int"),
        (
            (copy.deepcopy(net).double(), x.double()),
            r"tensor 'fc1\.weight' is torch\.float64 on cpu.*float\(\)\.cpu\(\)",
        ),
        ((LeNet300().to("meta"), x), r"is torch\.float32 on meta"),
    ):
        with pytest.raises(SparseError, match=words):
            untyped(keepk.sparse)(*arguments)
    fast = keepk.sparse(net, x)
    for wrong, words in (
        (torch.randn(2, 1, 28, 27), r"argument 0 is torch\.float32 \(2, 1, 28, 27\) on cpu, the example has"),
        (x.double(), r"argument 0 is torch\.float64"),
        (x[0], r"argument 0 is torch\.float32 \(1, 28, 28\)"),
        (3, r"argument 0 is int"),
        ([x], r"sparse: got arguments"),
    ):
        with pytest.raises(SparseError, match=words):
            untyped(fast)(wrong)
    with pytest.raises(SparseError, match=r"cannot be pickled.*keepk\.save"):
        pickle.dumps(fast)


def test_without_llvmlite_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['llvmlite'] = None\n"
        "import keepk, torch\n"
        "try: keepk.sparse(torch.nn.Linear(3, 3), torch.zeros(2, 3))\n"
        "except keepk.errors.SparseError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 'Install it with pip install "keepk[sparse]"' in ran.stdout


def test_the_vector_width_follows_from_the_cpu():
    assert chosen("x86_64", {"avx512f": True, "avx512vl": True, "avx2": True, "fma": True}) == (16, 12)
    assert chosen("AMD64", {"avx2": True, "fma": True}) == (8, 8)
    assert chosen("aarch64", {}) == chosen("arm64", {}) == (4, 16)
    for architecture, words in (("x86_64", "neither AVX2 with FMA nor AVX-512"), ("riscv64", "no kernels for riscv64")):
        with pytest.raises(SparseError, match=words):
            chosen(architecture, {"avx2": True})


@pytest.mark.parametrize(
    ("triple", "cpu", "width", "instruction"),
    [
        ("aarch64-unknown-linux-gnu", "neoverse-n1", 4, "fmla"),
        ("x86_64-unknown-linux-gnu", "skylake-avx512", 16, "zmm"),
        ("x86_64-unknown-linux-gnu", "haswell", 8, "vfmadd"),
    ],
)
def test_code_for_other_cpus_is_valid_and_uses_their_vectors(triple, cpu, width, instruction):
    """It is generated and checked by LLVM's verifier, not run."""
    llvm = compiler()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    code = Code(width)
    kernels.spmm(code, 4, 2, 4 * width)
    kernels.sell(code, wide=False)
    kernels.pointwise(code, "gelu")
    module = llvm.parse_assembly(code.text().replace("define internal", "define"))
    module.verify()
    target = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    optimize(module, target)
    assembly = target.emit_assembly(module)
    assert instruction in assembly
    assert "fmaf" not in assembly  # no calls into a library of mathematics
