"""`keepk.trace` changes nothing, works wherever forward works, reports its limits, and accepts new rules."""

import copy
import random
import threading
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import keepk
from keepk.errors import ShrinkError, TraceError
from keepk.graph.rules import registry as table
from masked import call, masked, relative_error
from networks import NETWORKS
from pictures import picture
from traced_once import traced_network
from untyped import untyped

TOLERANCE = 1e-10
KINDS = ("conv_bn_flatten", "dense_block", "multihead_attention", "lstm", "tied_embedding", "caches", "python_branch")


def output(model, example):
    with torch.no_grad():
        return call(model.eval(), example)


def spaces(graph):
    return [(space.name, len(space.units)) for space in graph.groups]


def reasons(graph, tensor, axis):
    return [record.why for record in graph.fixed if (record.tensor, record.axis) == (tensor, axis)]


def check_exact(model, example, share=0.5):
    """Check that something can be removed, and that the rest computes what the masked model computes."""
    graph = keepk.trace(model, example)
    units = graph.choose(share, seed=0)
    oracle = masked(model, graph, units)
    assert len(keepk.shrink(model, graph, units))
    assert relative_error(output(oracle, example), output(model, example)) < TOLERANCE


# It changes nothing


def surroundings():
    """The global state that a forward pass may change."""
    backends = torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled, torch.is_grad_enabled()
    kind, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())
    generators = torch.get_rng_state().tolist(), (kind, keys.tolist(), *rest), random.getstate()
    return (
        backends,
        generators,
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
    )


@pytest.mark.parametrize("name", KINDS)
def test_a_trace_leaves_the_model_as_it_was(name):
    """Weights, statistics, gradients, modes, hooks and their order, and every attribute."""
    model, example = NETWORKS[name]()
    model.train()
    next(iter(model.children())).eval()
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _: None)
        parameter.requires_grad_(index % 3 != 1)
        parameter.grad = torch.ones_like(parameter)
    for module in model.modules():
        for _ in range(2):
            module.register_forward_hook(lambda *_: None)
            module.register_forward_pre_hook(lambda *_: None)
    before, around = picture([model, example]), surroundings()
    keepk.trace(model, example)
    assert picture([model, example]) == before
    assert surroundings() == around


class Restless(nn.Module):
    """Draws from every generator, counts its calls, and writes into its input and buffers."""

    seen: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))
        self.calls, self.log = 0, []

    def forward(self, x):
        x.add_(1.0)
        self.calls += 1
        self.log.append(x)
        hidden = F.dropout(self.first(x) * random.random() + np.random.rand(), 0.5) + torch.rand(1)
        self.seen += 1.0
        return self.head(hidden)


def test_a_forward_with_side_effects_has_them_on_the_copy():
    model, example = Restless(), torch.randn(3, 4)
    before, around = picture([model, example]), surroundings()
    keepk.trace(model, example)
    assert picture([model, example]) == before
    assert surroundings() == around


def test_a_trace_that_fails_leaves_the_model_as_it_was():
    model, example = Restless(), torch.randn(3, 5)
    before, around = picture([model, example]), surroundings()
    with pytest.raises(TraceError, match="its forward failed"):
        keepk.trace(model, example)
    assert picture([model, example]) == before
    assert surroundings() == around


# It works wherever forward works


def test_a_model_on_the_meta_device():
    """The result does not depend on values, and the model can be cut on that device."""
    model, example = NETWORKS["conv_bn_flatten"]()
    real, meta = keepk.trace(model, example), copy.deepcopy(model).to("meta")
    graph = keepk.trace(meta, example.to("meta"))
    assert spaces(graph) == spaces(real)
    assert [graph.slices(unit) for unit in range(20)] == [real.slices(unit) for unit in range(20)]
    keepk.shrink(meta, graph, units := graph.choose(0.5, seed=0))
    keepk.shrink(model, real, units)
    assert [p.shape for p in meta.parameters()] == [p.shape for p in model.parameters()]
    assert meta(example.to("meta")).shape == model(example).shape


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", KINDS)
def test_under_any_gradient_mode_the_same_is_found(name, mode):
    model, example, wanted = traced_network(name)
    with mode():
        found = keepk.trace(model, example)
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode)
    assert spaces(found) == spaces(wanted)
    assert np.array_equal(found.choose(0.5, seed=0), wanted.choose(0.5, seed=0))


def test_an_example_made_in_inference_mode():
    model, example = NETWORKS["linears"]()
    with torch.inference_mode():
        made_there = example.clone()
    assert spaces(keepk.trace(model, made_there)) == spaces(keepk.trace(model, example))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_names_are_those_of_the_unwrapped_model(wrap):
    net, example = NETWORKS["linears"]()
    wanted, model = keepk.trace(net, example), wrap(net)
    graph = keepk.trace(model, example)
    assert spaces(graph) == spaces(wanted)
    assert (
        graph.slices(0) == wanted.slices(0) == [("first.weight", 0, 0), ("first.bias", 0, 0), ("second.weight", 1, 0)]
    )
    oracle = masked(net, graph, units := graph.choose(0.5, seed=0))
    keepk.shrink(model, graph, units)
    assert relative_error(output(oracle, example), output(net, example)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_an_example_of_another_dtype_tells_the_same(dtype):
    """Only shapes matter if forward does not read values."""
    model, example = NETWORKS["linears"]()
    assert spaces(keepk.trace(model, example.to(dtype))) == spaces(keepk.trace(model, example))


@pytest.mark.parametrize("given", [tuple, list, dict])
def test_an_example_is_what_forward_takes(given):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, left, right, *, scale=None, flags=()):
            assert scale == 2.0 or flags == ()
            return self.head(self.first(left) + self.first(right))

    left, right = torch.randn(3, 4), torch.randn(3, 4)
    example = {"left": left, "right": right, "scale": 2.0} if given is dict else given([left, right])
    assert spaces(keepk.trace(Sum(), example)) == [("first", 6)]


def test_a_tensor_that_was_computed_and_is_kept_in_a_module():
    """A plain deepcopy refuses such tensors."""
    model = NETWORKS["linears"]()[0]
    model.last = model.first.weight * 2
    model.many = {"a": model.first.bias + 1, "b": [3]}
    example = NETWORKS["linears"]()[1]
    assert spaces(keepk.trace(model, example)) == spaces(keepk.trace(*NETWORKS["linears"]()))
    assert model.last.grad_fn is not None


# Hooks


def test_forward_hooks_run_on_the_copy():
    model, example = NETWORKS["linears"]()
    seen = []
    model.first.register_forward_hook(lambda module, *_: seen.append(module))
    keepk.trace(model, example)
    assert seen
    assert all(type(module) is nn.Linear and module is not model.first for module in seen)


def clamped(_module, _arguments, result):
    return result.clamp(min=-0.5) * 2


def doubled_channels(_module, _arguments, result):
    return result + result.flip(1)


def narrowed(_module, _arguments, result):
    return F.pad(result[:, :6], (0, 6))


@pytest.mark.parametrize("hook", [clamped, doubled_channels])
def test_a_hook_that_changes_the_output_is_followed(hook):
    """One of the hooks adds pairs of channels, so that each pair is one unit."""
    model, example = NETWORKS["linears"]()
    model.first.register_forward_hook(hook)
    graph = keepk.trace(model, example)
    assert dict(spaces(graph))["first"] == (12 if hook is clamped else 6)
    check_exact(model, example)


def test_a_hook_that_picks_channels_fixes_them():
    model, example = NETWORKS["linears"]()
    model.first.register_forward_hook(narrowed)
    graph = keepk.trace(model, example)
    assert "first" not in dict(spaces(graph))
    assert all(reasons(graph, "first.weight", 0))
    check_exact(model, example)


def test_a_hook_that_changes_the_input_is_followed():
    model, example = NETWORKS["linears"]()
    model.second.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 3, *arguments[1:]))
    check_exact(model, example)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_the_weight_norm_of_old_works():
    """A pre-hook computes the weight. The layer's outputs can be removed exactly; its inputs are part of a norm."""
    model, example = NETWORKS["linears"]()
    nn.utils.weight_norm(model.second)
    call(model, example)
    graph = keepk.trace(model, example)
    units = next(
        space.units for space in graph.groups if ("second.weight_g", 0, 0) in graph.slices(int(space.units[0]))
    )
    oracle, _ = NETWORKS["linears"]()
    nn.utils.weight_norm(oracle.second)
    kept = [index for index in range(9) if index not in (2, 5)]
    keepk.shrink(model, graph, units[[2, 5]])
    with torch.no_grad():
        oracle.second.weight_g[[2, 5]] = 0.0
        oracle.second.bias[[2, 5]] = 0.0
    assert torch.equal(model.second.weight_g, oracle.second.weight_g[kept])
    assert relative_error(output(oracle, example), output(model, example)) < TOLERANCE
    call(model.train(), example).sum().backward()
    assert model.second.weight_v.grad.shape == (7, 12)


def test_the_spectral_norm_of_old_works():
    """Rows and columns that are zero do not change the largest singular value, nor the vectors that estimate it."""
    model, example = NETWORKS["linears"]()
    nn.utils.spectral_norm(model.second)
    with torch.no_grad():
        for _ in range(5):
            call(model.train(), example)
    graph = keepk.trace(model, example)
    assert all(space.lossy == "" for space in graph.groups)
    units = graph.choose(0.5, seed=0)
    oracle = masked(model, graph, units)
    keepk.shrink(model, graph, units)
    for mode in (False, True, False):  # training iterates the estimate
        with torch.no_grad():
            assert relative_error(call(oracle.train(mode), example), call(model.train(mode), example)) < 1e-10
    call(model.train(), example).sum().backward()
    assert model.second.weight_orig.grad.shape == model.second.weight_orig.shape == (5, 6)
    assert output(model, example).isfinite().all()


# Rules


@torch.library.custom_op("keepk_test_trace::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@halve.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("keepk_test_trace::only_real", mutates_args=())
def only_real(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@pytest.fixture(autouse=True)
def _rules_as_before():
    before = dict(table.RULES)
    yield
    table.RULES.clear()
    table.RULES.update(before)


class WithOperation(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.first, self.head, self.operation = nn.Linear(4, 6), nn.Linear(6, 3), operation
        self.double()

    def forward(self, x):
        return self.head(getattr(torch.ops.keepk_test_trace, self.operation)(self.first(x)))


def numbers():
    return torch.randn(3, 4, dtype=torch.float64)


@pytest.mark.parametrize("operation", ["halve", "only_real"])
def test_an_operation_without_a_rule_fixes_what_goes_in(operation):
    graph = keepk.trace(WithOperation(operation), numbers())
    assert not graph.groups
    [why] = set(reasons(graph, "first.weight", 0))
    assert why.startswith(f"keepk_test_trace::{operation} has no rule; keepk.rule registers one")
    [place] = {record.place for record in graph.fixed if record.tensor == "first.weight" and record.axis == 0}
    assert place.startswith("test_trace.py:")


@pytest.mark.parametrize("operation", ["halve", "only_real"])
@pytest.mark.parametrize("by", ["packet", "overload", "name"])
def test_an_operation_with_a_rule_is_followed(operation, by):
    packet = getattr(torch.ops.keepk_test_trace, operation)
    named = {"packet": packet, "overload": packet.default, "name": f"keepk_test_trace::{operation}"}[by]

    @keepk.rule(named)
    def pointwise(found):
        assert found.name == f"keepk_test_trace::{operation}"
        found.pointwise()

    assert pointwise.__name__ == "pointwise", "the rule itself is handed back"
    model, example = WithOperation(operation), numbers()
    assert spaces(keepk.trace(model, example)) == [("first", 6)]
    check_exact(model, example)


def test_a_rule_that_fails_fixes_what_goes_in():
    @keepk.rule("keepk_test_trace::halve")
    def wrong(_):
        raise KeyError("alpha")

    graph = keepk.trace(WithOperation("halve"), numbers())
    assert not graph.groups
    assert "the rule of keepk_test_trace::halve failed: KeyError: 'alpha'" in reasons(graph, "first.weight", 0)[0]


def test_a_rule_may_pin():
    @keepk.rule("keepk_test_trace::halve")
    def pinning(found):
        found.pin_inputs("halves are for ever")
        found.pointwise()

    graph = keepk.trace(WithOperation("halve"), numbers())
    assert not graph.groups
    assert "halves are for ever" in reasons(graph, "first.weight", 0)[0]


@pytest.mark.parametrize("old", ["leave", "even", "grid", "lossy"])
def test_the_old_names_of_a_calls_methods_work_and_warn(old):
    found = []

    @keepk.rule("keepk_test_trace::halve")
    def with_old_name(call):
        with pytest.warns(DeprecationWarning, match=rf"^Call\.{old} is now Call\.") as warned:
            method = getattr(call, old)
        new = str(warned[0].message).rpartition(".")[2]
        assert method == getattr(call, new)
        assert not hasattr(call, "no_such_method")
        found.append(new)
        call.pointwise()

    keepk.trace(WithOperation("halve"), numbers())
    assert len(set(found)) == 1


def test_two_rules_for_an_operation_are_refused():
    keepk.rule("keepk_test_trace::halve")(lambda _: None)
    before = dict(table.RULES)
    with pytest.raises(TraceError, match="rule for keepk_test_trace::halve: already registered, by '<lambda>'"):
        keepk.rule(torch.ops.keepk_test_trace.halve)(lambda _: None)
    with pytest.raises(TraceError, match="rule for aten::permute: already registered"):
        keepk.rule(torch.ops.aten.permute)(lambda _: None)
    assert before == table.RULES


@pytest.mark.parametrize("wrong", [F.relu, torch.add, 3, None])
def test_what_is_no_operation_is_refused(wrong):
    before = dict(table.RULES)
    with pytest.raises(TraceError, match=r"rule: got .*Pass an operation such as torch.ops.mylib.scale, or its name"):
        keepk.rule(wrong)(lambda _: None)
    assert before == table.RULES


# Refusals


class Locked(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("model", "example", "words"),
    [
        ("net", torch.zeros(2, 4), "trace: got str as the model. Pass a torch.nn.Module"),
        (F.relu, torch.zeros(2, 4), "trace: got function as the model"),
        (nn.ReLU, torch.zeros(2, 4), r"trace: got the class ReLU. Pass ReLU\(\), a model"),
        (nn.Linear(4, 3), "picture", "example: got str. Pass a tensor, a tuple of positional arguments, or a dict"),
        (nn.Linear(4, 3), None, "example: got NoneType"),
        (nn.Linear(4, 3), np.zeros((2, 4)), "example: got ndarray"),
        (
            nn.Linear(4, 3),
            (),
            r"model Linear: its forward failed on the example \(TypeError: .*Pass an example on which",
        ),
        (nn.Linear(4, 3), torch.zeros(2, 5), r"model Linear: its forward failed on the example \(RuntimeError: mat1"),
        (nn.Linear(4, 3), {"x": torch.zeros(2, 4)}, r"its forward failed on the example \(TypeError: .*'x'"),
        (nn.Linear(4, 3), torch.zeros(2, 4, device="meta"), "example: a tensor is on meta, the model on cpu. Move one"),
        (nn.Linear(4, 3), torch.zeros(1, 4), r"the first dimension of every tensor is 1 \(\(1, 4\)\). Pass an example"),
        (
            nn.Linear(4, 3),
            torch.zeros(0, 4),
            r"argument 0 has a tensor of shape \(0, 4\), without .*batch size of at least 2",
        ),
        (
            nn.Linear(4, 3),
            {"input": torch.zeros(2, 0, 4)},
            r"example: argument 'input' has a tensor of shape \(2, 0, 4\)",
        ),
        (nn.Linear(4, 3), (torch.zeros(2, 4), [torch.zeros(0)]), r"example: argument 1 has a tensor of shape \(0,\)"),
        (nn.LazyLinear(3), torch.zeros(2, 4), "tensor 'weight' has no shape yet. Run one forward pass of the lazy"),
        (nn.LazyBatchNorm1d(affine=False), torch.zeros(2, 4), "tensor 'running_mean' has no shape yet"),
        (
            Locked(),
            torch.zeros(2, 4),
            r"model Locked: cannot be copied \(TypeError: .*make copy.deepcopy\(model\) work",
        ),
    ],
)
def test_what_cannot_be_traced_is_refused(model, example, words):
    with pytest.raises(TraceError, match=words):
        keepk.trace(model, example)


def test_groups_have_unique_names_and_spaces_are_their_old_name():
    model, example = NETWORKS["halves"]()
    graph = keepk.trace(model, example)
    assert [(group.name, group.module) for group in graph.groups[:2]] == [("first", "first"), ("first (2)", "first")]
    assert len({group.name for group in graph.groups}) == len(graph.groups)
    with pytest.warns(DeprecationWarning, match=r"Graph\.spaces is deprecated; use Graph\.groups"):
        old = graph.spaces
    assert [space.name for space in old[:2]] == ["first", "first"]
    assert [space.units.tolist() for space in old] == [group.units.tolist() for group in graph.groups]


def test_a_graph_prints_on_one_screen():
    """The repr of a dataclass would print every atom of every tensor."""
    layers = [layer for width in range(20, 40) for layer in (nn.Linear(width, width + 1), nn.ReLU())]
    graph = keepk.trace(nn.Sequential(*layers, nn.Linear(40, 2)), torch.zeros(2, 20))
    lines = repr(graph).splitlines()
    assert lines[0] == "Graph: 610 of 610 units in 20 groups; 3 axes are fixed"
    assert lines[1].split() == ["0", "21", "of", "21"]
    assert lines[-1] == "  ... and 8 more groups"
    assert len(lines) == 14
    assert max(map(len, lines)) <= 100
    graph.removed(np.arange(3))
    assert repr(graph).splitlines()[1].split() == ["0", "18", "of", "21"]
    page = graph._repr_html_()
    assert page.count("<tr>") == 21
    assert "<td>0</td><td>18</td><td>21</td>" in page


def test_a_graph_without_units_prints():
    graph = keepk.trace(nn.Linear(4, 3), torch.zeros(2, 4))
    assert repr(graph) == "Graph: 0 of 0 units in 0 groups; 3 axes are fixed"


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda net: torch.jit.trace(net, torch.zeros(2, 4))])
def test_torchscript_is_refused_with_what_to_give_instead(make, tmp_path):
    given = make(nn.Linear(4, 3))
    with pytest.raises(TraceError, match=r"^trace: the model is TorchScript \(.*Pass the nn\.Module as it was before"):
        keepk.trace(given, torch.zeros(2, 4))
    with pytest.raises(TraceError, match=r"^trace: module '1' is TorchScript"):
        keepk.Pruner(nn.Sequential(nn.ReLU(), given), [keepk.channels("*", keep=1)], example=torch.zeros(2, 4))
    with pytest.raises(TraceError, match=r"^export_onnx: the model is TorchScript"):
        keepk.export_onnx(given, torch.zeros(2, 4), tmp_path / "net.onnx")


class Failing(nn.Module):
    """A model that raises an error, which must be reported."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)

    def forward(self, _):
        raise ValueError("three of them, please")


def test_the_error_of_the_users_forward_is_told():
    with pytest.raises(TraceError, match=r"model Failing: .*\(ValueError: three of them, please\)") as caught:
        keepk.trace(Failing(), torch.zeros(2, 4))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_model_without_anything_to_remove():
    graph = keepk.trace(nn.Linear(4, 3), torch.zeros(2, 4))
    assert not graph.groups
    assert {record.why for record in graph.fixed if record.axis == 0} == {reasons(graph, "weight", 0)[0]}
    assert "is an output of the model" in reasons(graph, "weight", 0)[0]
    assert graph.choose(0.5).tolist() == []
    with pytest.raises(ShrinkError, match="unit 0 does not exist; the graph has 0 units"):
        keepk.shrink(nn.Linear(4, 3), graph, [0])


def test_a_share_of_units_is_exact_in_the_decimals_written():
    net = nn.Sequential(nn.Linear(8, 100), nn.ReLU(), nn.Linear(100, 3))
    graph = keepk.trace(net, torch.zeros(2, 8))
    counts = [len(graph.choose(percent / 100)) for percent in range(101)]
    assert counts == [*range(100), 99], "something is left everywhere"


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (5, "choose: share=5: a share lies between 0 and 1. Write 0.9 for 90 %."),
        (1.5, "choose: share=1.5: a share lies between 0 and 1"),
        (-1, "choose: share=-1: negative"),
        (float("nan"), "choose: share=nan: not a finite number"),
        ("half", "choose: share='half': got str. Pass a number"),
        (True, "choose: share=True: got bool"),
    ],
)
def test_what_is_no_share_of_units_is_refused(share, words):
    graph = keepk.trace(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), torch.zeros(2, 8))
    with pytest.raises(ShrinkError, match=words):
        graph.choose(share)


def test_what_is_no_seed_and_no_unit_is_refused():
    graph = keepk.trace(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), torch.zeros(2, 4))
    for seed in ("a", -1, 0.5):
        with pytest.raises(ShrinkError, match=r"seed=.* Pass an int of 0 or more"):
            graph.choose(0.5, seed=untyped(seed))
    for unit in (6, -1):
        with pytest.raises(ShrinkError, match=f"slices: unit {unit} does not exist; the graph has units 0 to 5"):
            graph.slices(unit)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)

    def forward(self, x, y):
        return self.first(x + y)


SLIP = "A tuple is several arguments: pass the tensor itself, not its shape and not the labels."


@pytest.mark.parametrize(
    ("model", "example", "slip"),
    [
        (nn.Linear(4, 3), (2, 4), True),
        (nn.Linear(4, 3), torch.Size([4]), True),
        (nn.Linear(4, 3), (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)), True),
        (Two(), (2, 4), True),
        (Two(), (torch.zeros(2, 4), torch.zeros(2, 5)), False),
        (nn.Linear(4, 3), (torch.zeros(2, 5),), False),
        (nn.Linear(4, 3), {"x": torch.zeros(2, 4)}, False),
    ],
)
def test_a_shape_or_a_batch_with_labels_is_recognised(model, example, slip):
    with pytest.raises(TraceError, match="its forward failed on the example") as caught:
        keepk.trace(model, example)
    assert str(caught.value).endswith(f"works. {SLIP}" if slip else "works.")
