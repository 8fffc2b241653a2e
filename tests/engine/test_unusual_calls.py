"""Compiled models in unusual calls: modes and defaults of torch, forks, tracers, forwards that are not plain layers."""

import copy
import logging
import os
import signal
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import keepk
from keepk.engine import program
from keepk.engine import sparse as sparse_module
from keepk.engine.machine import host
from keepk.errors import SparseError
from keepk.model.torch_internals import tree_flatten, tree_map
from keepk_paper.models import LeNet5, LeNet300
from sparse_networks import error, pruned
from untyped import untyped

SIZES = (300, 400, 300)  # of layers that are worth compiling


class Layers(nn.Module):
    """Two layers, and what `between` does between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(*SIZES[:2]), nn.Linear(*SIZES[1:])

    def forward(self, x):
        return self.after(self.second(self.between(self.first(x))), x)

    def between(self, y):
        return y

    def after(self, z, x):  # noqa: ARG002 - others need it
        return z


class Split(Layers):
    def between(self, y):
        return torch.cumsum(y, 1)


class CountsInputs(Layers):
    def after(self, z, x):
        return z * torch.nonzero(x > 0).shape[0]  # a size that is no batch


class CountsResults(Layers):
    def between(self, y):
        self.found = y[y > 0]
        return y

    def after(self, z, x):  # noqa: ARG002
        return z + self.found.sum() / self.found.size(0)


class TakesItem(Layers):
    def after(self, z, x):  # noqa: ARG002
        return z * (z > 0).sum().item()


class WritesToInput(Layers):
    def forward(self, x):
        return super().forward(F.relu_(x))


class DropsOutAlways(Layers):
    def between(self, y):
        return F.dropout(y, 0.5, training=True)


class ReturnsMore(Layers):
    def after(self, z, x):
        return {"twice": [z, z], "input": x, "weight": self.first.weight, "nothing": None}


FACTORS = torch.full((SIZES[1],), 2.0)


class ReadsGlobal(Layers):
    def between(self, y):
        return y * FACTORS


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(*SIZES[:2])

    def forward(self, x, y, *, z):
        return self.layer(x) + 2 * self.layer(y) + 3 * self.layer(z)


class Float64(AbstractContextManager[None]):
    """float64 as the default type of torch."""

    def __enter__(self):
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_):
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference_mode": torch.inference_mode,
    "meta device": lambda: torch.device("meta"),
    "float64": Float64,
}


@pytest.mark.parametrize("build", [Layers, Split])  # without and with a step in torch
def test_modes_and_defaults_of_torch_change_nothing(build):
    net, x = pruned(build(), 0.05), torch.randn(40, SIZES[0])
    fast = keepk.sparse(net, x[:2])
    assert {layer.name for layer in fast.report.layers if layer.runs == "keepk"} == {"first", "second"}
    with torch.no_grad():
        assert error(net(x), fast(x)) <= 1e-5
    assert fast(x[:0]).shape == (0, SIZES[-1])
    made = {"outside": fast}
    for name in ("autocast", "inference_mode", "float64") if build is Split else ():
        with MODES[name]():
            made[name] = keepk.sparse(net, x[:2])
    for where, compiled in made.items():
        for mode in MODES.values():
            for batch in (1, 5, 40):
                with mode():
                    got = compiled(x[:batch])
                assert got.dtype == torch.float32, where
                assert torch.equal(got, fast(x[:batch])), where


@pytest.mark.parametrize("build", [CountsInputs, CountsResults, TakesItem, ReadsGlobal, WritesToInput])
def test_forwards_with_sizes_of_their_own(build):
    net, x = pruned(build(), 0.05), torch.randn(7, SIZES[0])
    kept = x.clone()
    fast = keepk.sparse(net, x)
    assert torch.equal(x, kept)  # the example is not written to
    for batch in (1, 7):
        with torch.no_grad():
            wanted = net(x[:batch].clone())
        assert error(wanted, fast(x[:batch].clone())) <= 1e-5


class OfSize(Layers):
    """A forward that does something of its own for some sizes of the batch."""

    def __init__(self, forward):
        super().__init__()
        self.own = forward

    def forward(self, x):
        return self.own(self, x)


OF_SIZE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "more than one": lambda net, x: net.second(net.first(x).relu() if x.shape[0] > 1 else net.first(x).sigmoid()),
    "centred": lambda net, x: net.second(net.first(x) - net.first(x).mean(0) if x.shape[0] >= 2 else net.first(x)),
    "one": lambda net, x: net.second(net.first(x).relu() if x.shape[0] == 1 else net.first(x).sigmoid()),
    "rarely seen": lambda net, x: net.second(net.first(x).clamp(max=50) if x.shape[0] == 1 else net.first(x)),
    "numbers": lambda net, x: net.second(net.first(x).clamp(max=50) if x.numel() > SIZES[0] else net.first(x)),
    "squeezed": lambda net, x: net.second(net.first(x).relu()).squeeze(0),
    "squeezed inside": lambda net, x: net.second(net.first(x).relu().squeeze()),
    "empty": lambda net, x: x.new_zeros(0, 3) if x.shape[0] == 0 else net.second(net.first(x).relu()),
    "structure": lambda net, x: [net.second(net.first(x))] if x.shape[0] else None,
    "type": lambda net, x: (net.second(net.first(x)), x.shape[0] == 1),
    "more than four": lambda net, x: net.second(net.first(x).relu() if x.shape[0] > 4 else net.first(x).sigmoid()),
}


@pytest.mark.parametrize("name", OF_SIZE)
def test_forwards_that_depend_on_the_size_of_the_batch(name):
    net = pruned(OfSize(OF_SIZE[name]), 0.05)
    for rows in (1, 2, 6):
        fast = keepk.sparse(net, torch.randn(rows, SIZES[0]))
        if name not in ("squeezed", "type"):  # there torch runs only the squeeze, or the comparison
            assert [layer.runs for layer in fast.report.layers] == ["torch"]
            assert "batch" in fast.report.layers[0].reason
        for batch in (0, 1, 2, 3, 7):
            x = 60 * torch.randn(batch, SIZES[0])
            with torch.no_grad():
                wanted, got = net(x), fast(x)
            assert tree_flatten(wanted)[1] == tree_flatten(got)[1]
            for one, other in zip(tree_flatten(wanted)[0], tree_flatten(got)[0], strict=True):
                if isinstance(one, torch.Tensor):
                    assert one.shape == other.shape
                    assert batch == 0 or error(one, other) <= 1e-5
                else:
                    assert one == other


def test_tensors_from_outside_the_model_are_part_of_the_snapshot():
    fast, x = keepk.sparse(pruned(ReadsGlobal(), 0.05), torch.randn(2, SIZES[0])), torch.randn(3, SIZES[0])
    wanted = fast(x)
    FACTORS.zero_()
    try:
        assert torch.equal(fast(x), wanted)
    finally:
        FACTORS.fill_(2.0)


def test_results_of_any_structure():
    net, x = pruned(ReturnsMore(), 0.05), torch.randn(5, SIZES[0])
    fast = keepk.sparse(net, x[:2])
    got, wanted = fast(x), net(x)
    assert got.keys() == wanted.keys()
    assert all(error(wanted["twice"][0].detach(), it) <= 1e-5 for it in got["twice"])
    assert got["input"] is x
    assert got["nothing"] is None
    assert torch.equal(got["weight"], wanted["weight"])


def test_arguments_by_position_or_by_name_in_any_order():
    net = pruned(Several(), 0.05)
    x, y, z = (torch.randn(4, SIZES[0]) for _ in range(3))
    with torch.no_grad():
        wanted = net(x, y, z=z)
    fast = keepk.sparse(net, {"z": z, "y": y, "x": x})
    for got in (fast(x, y, z=z), fast(z=z, y=y, x=x), fast(x, z=z, y=y)):
        assert error(wanted, got) <= 1e-5
    for arguments, named in (((x, y), {}), ((x,), {"z": z}), ((x, y, z), {}), ((x, y), {"z": z, "w": z})):
        with pytest.raises(SparseError, match=r"sparse: got arguments"):
            fast(*arguments, **named)
    with pytest.raises(SparseError, match=r"the arguments have batches of \[3, 4\]"):
        fast(x, y[:3], z=z)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(*SIZES[:2])

    def forward(self, x, y):
        return self.layer(x), self.layer(y)


class Added(Siamese):
    def forward(self, x, y):
        return (self.layer(x) + self.layer(y)).relu()


class Inner(Layers):
    def forward(self, x):
        y = self.first(x).relu()
        return {"inner": y, "out": self.second(y)}


class OfList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(*SIZES[:2])

    def forward(self, parts):
        return self.layer(parts[0]) * self.layer(parts[1])


@pytest.mark.parametrize("build", [Siamese, Added, Inner, OfList])
def test_several_inputs_or_outputs_of_one_program(build):
    net, x, y = pruned(build(), 0.05), torch.randn(20, SIZES[0]), torch.randn(20, SIZES[0])
    every: dict[Any, tuple[Any, ...]] = {Inner: (x,), OfList: ([x, y],)}
    arguments = every.get(build, (x, y))
    fast = keepk.sparse(net, {"parts": [x[:2], y[:2]]} if build is OfList else tuple(it[:2] for it in arguments))
    assert len(fast._steps) == 1
    assert not fast.report.fallbacks
    for batch in (0, 1, 5, 20):
        given = tree_map(lambda it, batch=batch: it[:batch], arguments)
        with torch.no_grad():
            wanted, structure = tree_flatten(net(*given))
        got, own = tree_flatten(fast(*given))
        assert structure == own
        for one, other in zip(wanted, got, strict=True):
            assert one.shape == other.shape
            assert batch == 0 or error(one, other) <= 1e-5


class OfOneList(Layers):
    def forward(self, parts):
        return super().forward(parts[0])


class MaskFirst(Layers):
    def forward(self, x=None, y=None):  # the first one is a mask
        return super().forward(y if x is None else x * y)


class OfAny(Layers):
    def forward(self, *parts, **named):
        return super().forward(*parts, *named.values())


def test_a_bare_tensor_is_taken_only_where_the_example_has_it():
    x = torch.randn(5, SIZES[0])
    examples: list[tuple[type[Layers], Any]] = [
        (OfOneList, {"parts": [x[:2]]}),
        (OfOneList, ((x[:2],),)),
        (MaskFirst, {"y": x[:2]}),
        (OfAny, {"x": x[:2]}),
    ]
    for build, example in examples:
        fast = keepk.sparse(pruned(build(), 0.05), example)
        for batch in (1, 5):
            with pytest.raises(SparseError, match="sparse: got arguments"):
                fast(x[:batch])
    fast = keepk.sparse(pruned(Layers(), 0.05), {"x": x[:2]})
    assert torch.equal(fast(x), fast(x=x))
    net = pruned(MaskFirst(), 0.05)
    fast = keepk.sparse(net, {"y": x[:2]})
    with torch.no_grad():
        assert error(net(y=x), fast(y=x)) <= 1e-5


def test_models_whose_weights_are_computed():
    masked = Layers()
    for layer in (masked.first, masked.second):
        prune.l1_unstructured(layer, "weight", 0.95)
    normed = pruned(Layers(), 0.05)
    parametrizations.spectral_norm(normed.first)
    hooked = pruned(Layers(), 0.05)
    hooked.first.register_forward_hook(lambda _module, _arguments, y: 2 * y)
    x = torch.randn(9, SIZES[0])
    nets: list[Any] = [masked, normed, hooked, torch.compile(pruned(Layers(), 0.05), backend="eager")]
    for net in nets:
        fast = keepk.sparse(net, x[:2])
        assert sum(layer.runs == "keepk" for layer in fast.report.layers) == 2
        assert fast.report.macs_left < 0.06
        net.eval()
        with torch.no_grad():
            assert error(net(x), fast(x)) <= 1e-5


def test_shared_layers_and_models_in_train_mode():
    layer = nn.Linear(300, 300)
    net = pruned(nn.Sequential(layer, nn.BatchNorm1d(300), nn.Dropout(0.5), nn.ReLU(), layer, nn.ReLU(), layer), 0.05)
    x = torch.randn(9, 300)
    fast = keepk.sparse(net.train(), x[:2])
    with torch.no_grad():
        assert error(net.eval()(x), fast(x)) <= 1e-5
    assert len(fast.report.layers) == 3


def test_a_sample_with_nan_changes_no_other_and_no_later_call():
    net, x = pruned(LeNet5(), 0.2), torch.randn(40, 1, 28, 28)
    fast = keepk.sparse(net, x[:2])
    wanted = fast(x)
    broken = x.clone()
    broken[[3, 20, 39]] = float("nan")
    broken[[4, 21]] = float("inf")
    others = [row for row in range(40) if row not in (3, 4, 20, 21, 39)]
    for size in (1, 5, 16, 40):
        got = torch.cat([fast(part) for part in broken.split(size)])
        assert got[[3, 20, 39]].isnan().all()
        assert torch.equal(got[others], wanted[others])
        assert torch.equal(torch.cat([fast(part) for part in x.split(size)]), wanted)


def test_a_buffer_of_more_than_2_gb_is_never_made(monkeypatch):
    x = torch.randn(40, 1, 28, 28)
    net = pruned(LeNet5(), 0.1)
    wanted = keepk.sparse(net, x[:2])(x)
    lanes, whole = host().lanes, 4 * 20 * 24 * 24  # bytes of the largest value of a sample
    for limit, groups in ((whole * lanes * 3 // 4, set()), (whole * lanes * 2, {lanes})):
        monkeypatch.setattr(program, "LARGEST", limit)
        monkeypatch.setattr(sparse_module, "LARGEST", limit)
        fast = keepk.sparse(net, x[:2])
        assert {group for step in fast._steps for group in getattr(step, "_groups", ())} == groups
        assert torch.equal(fast(x), wanted)
    monkeypatch.setattr(program, "LARGEST", 1_000)
    report = keepk.sparse(net, x[:2]).report
    assert [layer.reason for layer in report.layers] == ["its activations need more than 2 GB"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own(monkeypatch):
    monkeypatch.setattr(sparse_module, "PARALLEL", 0.0)
    x = torch.randn(70, 1, 28, 28)
    fast = keepk.sparse(pruned(LeNet300(), 0.05), x[:2], threads=2)
    wanted = fast(x)
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends a child that waits for threads that it does not have
        os._exit(0 if torch.equal(fast(x), wanted) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_copies_are_the_same_object():
    fast = keepk.sparse(pruned(LeNet300(), 0.05), torch.randn(2, 1, 28, 28))
    assert copy.deepcopy([fast])[0] is fast


def test_tracers_are_refused():
    fast, x = keepk.sparse(pruned(LeNet300(), 0.05), torch.randn(2, 1, 28, 28)), torch.randn(3, 1, 28, 28)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for given in (x, x[:1], mode.from_tensor(x)):
            with pytest.raises(SparseError, match="got a FakeTensor instead of a tensor in memory"):
                fast(given)

    def called(y):
        return fast(y)

    for given in (x, x[:1]):
        with (
            pytest.warns(DeprecationWarning, match=r"torch\.jit\.trace"),
            pytest.raises(SparseError, match=r"torch\.jit\.trace cannot record machine code"),
        ):
            torch.jit.trace(called, given)


class Anchored(Layers):
    """It returns tensors that belong to it, and views of them."""

    anchors: torch.Tensor
    more: Any

    def __init__(self):
        super().__init__()
        self.register_buffer("anchors", torch.arange(4.0))
        self.more = [torch.ones(2)]

    def after(self, z, x):
        scaled = z * self.anchors.sum() * self.more[0].sum()
        return scaled, self.anchors, self.anchors[1:].view(3, 1), self.anchors.expand(x.shape[0], 4), self.more[0]


class AnchoredInTorch(Anchored):
    def between(self, y):
        return -y if y.sum() > 1e9 else y


@pytest.mark.parametrize("build", [Anchored, AnchoredInTorch])
def test_writing_to_results_changes_no_later_call(build):
    fast, x = keepk.sparse(pruned(build(), 0.05), torch.randn(2, SIZES[0])), torch.randn(3, SIZES[0])
    assert ("torch" in {layer.runs for layer in fast.report.layers if layer.name == build.__name__}) == (
        build is AnchoredInTorch
    )
    wanted = [it.clone() for it in fast(x)]
    for index in range(5):
        fast(x)[index].copy_(torch.full_like(wanted[index], 100.0))
        assert all(map(torch.equal, wanted, fast(x)))


def following(net, way):
    """A network whose forward calls layers of `net` through something that copies do not copy."""
    other: Any = OfSize(None)
    first, second = net.first, net.second

    def call(_, x):
        y = second(first(x))
        return -y if y.sum() > 1e9 else y

    if way == "closure":
        other.first, other.second, other.own = first, second, call
    elif way == "default":
        other.first, other.second = first, second
        other.own = lambda _, x, inner=net: inner(x) if x.sum() < 1e9 else -x
    else:
        other.first, other.second, other.own = first, second, lambda _, x: x if x.sum() > 1e9 else x @ first.weight.T
    return other.eval()


@pytest.mark.parametrize("way", ["closure", "default", "tensor"])
def test_a_model_that_its_copy_reaches_is_refused_where_torch_runs_it(way):
    net = pruned(Layers(), 0.05)
    with pytest.raises(SparseError, match=r"uses tensors of the model that was passed.*a snapshot"):
        keepk.sparse(following(net, way), torch.randn(2, SIZES[0]))


class NormsFirst(nn.Module):
    """A reshape of the input that torch runs."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(300), nn.Linear(300, 400)

    def forward(self, x):
        return self.layer(self.norm(x.flatten(1))) + self.layer(self.norm(x.reshape(-1, 300)))


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_strides_of_inputs_that_torch_reshapes(memory):
    net, x = pruned(NormsFirst(), 0.05), torch.randn(4, 3, 10, 10)
    fast = keepk.sparse(net, x[:2].to(memory_format=memory))
    assert {"norm", "view"} & {layer.name for layer in fast.report.fallbacks}
    with torch.no_grad():
        wanted = net(x)
    flipped = x.transpose(2, 3).contiguous().transpose(2, 3)
    for given in (x, x.to(memory_format=torch.channels_last), flipped, torch.cat([x, x], 3)[..., :10]):
        assert error(wanted, fast(given)) <= 1e-5
        assert error(wanted[:1], fast(given[:1])) <= 1e-5


def test_compiling_in_several_threads_leaves_logging_and_warnings_alone():
    x, filters = torch.randn(2, SIZES[0]), list(warnings.filters)
    nets = [pruned(Layers(), 0.05, seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda net: keepk.sparse(net, x), nets))
    assert logging.root.manager.disable == 0
    assert warnings.filters == filters
    for net, fast in zip(nets, made, strict=True):
        with torch.no_grad():
            assert error(net(x), fast(x)) <= 1e-5
        assert not fast.report.fallbacks


def shrunk(x, floats):
    """A tensor after its storage has lost floats."""
    found = x if x.storage_offset() else x.clone()
    found.untyped_storage().resize_(4 * floats)
    return found


WITHOUT_MEMORY: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "functionalize": lambda fast, x: torch.func.functionalize(fast)(x),
    "a closure in functionalize": lambda fast, x: torch.func.functionalize(lambda y: fast(x) + y.sum())(x),
    "vmap": lambda fast, x: torch.vmap(fast)(x[None]),
    "grad": lambda fast, x: torch.func.grad(lambda y: fast(y).sum())(x),
    "jacrev": lambda fast, x: torch.func.jacrev(fast)(x),
    "zeros": lambda fast, x: fast(torch._efficientzerotensor(x.shape)),
    "no storage": lambda fast, x: fast(shrunk(x, 0)),
    "a small storage": lambda fast, x: fast(shrunk(x, x.numel() - 1)),
    "a small storage of columns": lambda fast, x: fast(shrunk(torch.cat([x, x], 1)[:, 1::2], 2 * x.numel() - 1)),
}


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_tensors_without_memory_are_refused(name):
    x = torch.randn(3, SIZES[0])
    for build in (Layers, Siamese):
        net = pruned(build(), 0.05)
        given = x[:2] if build is Layers else (x[:2], x[:2])
        fast = keepk.sparse(net, given)
        call = fast if build is Layers else lambda y, fast=fast: fast(y, y)[0]
        wanted = call(x)
        for batch in (1, 3):
            with pytest.raises(SparseError, match=r"got a tensor .*Call the compiled model outside of them"):
                WITHOUT_MEMORY[name](call, x[:batch].clone())
        assert torch.equal(call(x), wanted)


def test_layouts_and_models_that_are_refused():
    net, x = pruned(LeNet300(), 0.05), torch.randn(3, 1, 28, 28)
    fast = keepk.sparse(net, x)
    for given in (x.to_sparse(), x.to_mkldnn()):
        with pytest.raises(SparseError, match=r"on cpu with layout torch\.(sparse_coo|_mkldnn), the example has"):
            fast(given)
    with pytest.raises(SparseError, match="DropsOutAlways gives different results for the same input in eval mode"):
        keepk.sparse(pruned(DropsOutAlways(), 0.05), torch.randn(3, SIZES[0]))
    broken = pruned(LeNet300(), 0.05)
    broken.get_parameter("fc2.weight").detach()[3, 5] = float("nan")
    with pytest.raises(SparseError, match="It has NaN or infinities, which the compiled model skips"):
        keepk.sparse(broken, x)
    sparse_weights = pruned(LeNet300(), 0.05)
    sparse_weights.fc1.weight = nn.Parameter(sparse_weights.fc1.weight.detach().to_sparse())
    with pytest.raises(SparseError, match=r"tensor 'fc1\.weight' has layout torch\.sparse_coo.*to_dense"):
        keepk.sparse(sparse_weights, x)
    with pytest.raises(SparseError, match=r"argument 0 is ndarray, the example has torch\.float32"):
        untyped(fast)(x.numpy())
