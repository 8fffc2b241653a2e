"""`keepk.shrink`: all or nothing, the same objects, losses computed before the cut, and clear refusals."""

import copy
import gc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import keepk
from keepk.cut import record
from keepk.cut import shrink as shrinking_module
from keepk.cut.record import record_of
from keepk.errors import ShrinkError
from keepk.model import edits
from masked import call, leaves, masked, relative_error, without_dropout
from networks import NETWORKS
from pictures import picture
from shrinking import KINDS, TOLERANCE, Stubborn, backward, check_gradients, left, output, step, traced

# All or nothing


class Interrupt(BaseException):
    """Like KeyboardInterrupt, not a subclass of Exception."""


FILES = (edits, record, shrinking_module)


class InterruptAtLine:
    """A trace function that raises at the n-th executed line while changes are being made."""

    files = tuple(module.__file__ for module in FILES)

    def __init__(self, number):
        self.left, self.inside = number, False

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename not in self.files:
            return None
        if frame.f_code.co_name == "all_or_nothing" and event in {"call", "return"}:
            self.inside = event == "call"
        if event == "line" and self.inside:
            self.left -= 1
            if not self.left:
                raise Interrupt
        return self


def interrupted(number, shrink):
    """Whether the shrink was interrupted at that line."""
    before = sys.gettrace()
    sys.settrace(InterruptAtLine(number))
    try:
        shrink()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize(
    ("name", "stride"), [("linears", 2), ("multihead_attention", 11), ("dense_block", 37), ("lstm", 37)]
)
def test_a_shrink_that_is_interrupted_at_any_line_did_nothing(name, stride):
    """Tries every line up to the last, after which the shrink is complete."""
    model, example, graph, units = traced(name)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, example, optimizer)
    average, values = AveragedModel(model), {key: value.clone() for key, value in model.state_dict().items()}
    everything = [model, optimizer, average, values, graph]
    before, oracle = picture(everything), masked(model, graph, units)
    number = 1
    while interrupted(
        number, lambda: keepk.shrink(model, graph, units, optimizer=optimizer, followers=[average, values])
    ):
        if picture(everything) != before:
            break
        number += stride
    assert number > 100
    check_whole(model, optimizer, average, values)
    assert not graph.alive[units].any()
    assert relative_error(output(oracle, example), output(model, example)) < TOLERANCE


def check_whole(model, optimizer, average, values):
    for name, parameter in model.named_parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == optimizer.state[parameter]["exp_avg_sq"].shape
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.grad.shape == parameter.shape
        assert average.module.get_parameter(name).shape == values[name].shape == parameter.shape


@pytest.mark.parametrize("method", ["index_select", "contiguous", "detach"])
@pytest.mark.parametrize("name", ["conv_bn_flatten", "multihead_attention", "lstm"])
def test_a_shrink_that_runs_out_of_memory_did_nothing(name, method, monkeypatch):
    """Tries every call of torch that could fail."""
    model, example, graph, units = traced(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, example, optimizer)
    twin = copy.deepcopy(model)
    before, real, failures = picture([model, optimizer, twin, graph]), getattr(torch.Tensor, method), 0
    while True:
        calls = iter(range(failures + 1))

        def failing(self, *arguments, calls=calls, **by_name):
            if next(calls, None) is None:
                raise torch.OutOfMemoryError("no memory left")
            return real(self, *arguments, **by_name)

        monkeypatch.setattr(torch.Tensor, method, failing)
        try:
            keepk.shrink(model, graph, units, optimizer=optimizer, followers=[twin])
        except torch.OutOfMemoryError:
            monkeypatch.undo()
            assert picture([model, optimizer, twin, graph]) == before
            failures += 1
        else:
            break
    assert failures > 3


def test_a_follower_that_fails_half_way_leaves_all_as_it_was():
    model, example, graph, units = traced()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, example, optimizer)
    values = Stubborn((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
    before = picture([model, optimizer, graph, dict(values)])
    for patience in range(3):
        values.patience = patience
        with pytest.raises(RuntimeError, match="no more entries"):
            keepk.shrink(model, graph, units, optimizer=optimizer, followers=[values])
        assert picture([model, optimizer, graph, dict(values)]) == before


class FixedWidth(nn.Linear):
    """A module whose size cannot be changed."""

    @property
    def out_features(self):
        return self.__dict__["width"]

    @out_features.setter
    def out_features(self, value):
        if self.__dict__.setdefault("width", value) != value:
            raise RuntimeError("the width is fixed")


def test_a_module_that_refuses_a_size_leaves_all_as_it_was():
    model = nn.Sequential(nn.Linear(7, 6), nn.ReLU(), FixedWidth(6, 5), nn.ReLU(), nn.Linear(5, 3))
    example = torch.randn(4, 7)
    backward(model, example)
    graph = keepk.trace(nn.Sequential(*map(plain, model)), example)
    before = picture([model, graph])
    with pytest.raises(RuntimeError, match="the width is fixed"):
        keepk.shrink(model, graph, graph.choose(0.5, seed=0))
    assert picture([model, graph]) == before
    backward(model, example)


def plain(module):
    return nn.Linear(module.in_features, module.weight.shape[0]) if isinstance(module, nn.Linear) else module


# Contents of a model


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("with_grad", [True, False])
def test_tensors_and_gradients_keep_what_is_left(name, with_grad):
    """Compared with the dense model, index by index."""
    model, example, graph, units = traced(name)
    if with_grad:
        backward(model, example)
    dense = copy.deepcopy(model)
    for (_, parameter), (_, copied) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        copied.grad = None if parameter.grad is None else parameter.grad.clone()
    units = keepk.shrink(model, graph, units).units
    for (path, now), (_, before) in zip(tensors(model), tensors(dense), strict=True):
        assert torch.equal(now, left(before.detach(), path, graph, units)), path
        assert (now.grad is None) == (before.grad is None)
        if now.grad is not None:
            assert torch.equal(now.grad, left(before.grad, path, graph, units)), path


def tensors(model):
    return [it for it in (*model.named_parameters(), *model.named_buffers()) if not it[0].endswith("selected_channels")]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_flat_weights_of_recurrent_layers_are_the_parameters(kind):
    net = Recurrent(kind(5, 6, num_layers=2, batch_first=True), nn.Linear(6, 3)).double()
    example = torch.randn(3, 4, 5, dtype=torch.float64)
    graph = keepk.trace(net, example)
    keepk.shrink(net, graph, graph.choose(0.5, seed=0))
    named = dict(net.rnn.named_parameters())
    assert all(
        flat is named[name] for flat, name in zip(net.rnn._flat_weights, net.rnn._flat_weights_names, strict=True)
    )
    assert all(
        reference() is flat for reference, flat in zip(net.rnn._flat_weight_refs, net.rnn._flat_weights, strict=True)
    )
    assert net.rnn.hidden_size == 3
    net.float().double()
    backward(net, example)


class Recurrent(nn.Module):
    def __init__(self, rnn, head):
        super().__init__()
        self.rnn, self.head = rnn, head

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def test_parameters_in_one_piece_of_memory_can_be_cut():
    """As in cuDNN's layout of recurrent layers: adjacent memory, but no shared entries."""
    model, example = NETWORKS["linears"]()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    graph = keepk.trace(model, example)
    oracle = masked(model, graph, units := graph.choose(0.5, seed=0))
    keepk.shrink(model, graph, units)
    assert relative_error(output(oracle, example), output(model, example)) < TOLERANCE


def in_channels_last(tensor):
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor if layout is None else tensor.contiguous(memory_format=layout)


@pytest.mark.parametrize("name", ["conv_bn_flatten", "residual", "depthwise", "grouped", "conv3d", "se_gate"])
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_channels_last_stays_in_weights_gradients_and_optimizer_state(name, share):
    model, example = NETWORKS[name]()
    for parameter in model.parameters():
        parameter.data = in_channels_last(parameter.data)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, example, optimizer)
    for parameter in model.parameters():
        parameter.grad = in_channels_last(parameter.grad)
    graph = keepk.trace(model, example)
    keepk.shrink(model, graph, graph.choose(share, seed=0), optimizer=optimizer)
    for path, parameter in model.named_parameters():
        wanted = in_channels_last(torch.empty(parameter.shape)).stride()
        for tensor in (parameter, parameter.grad, optimizer.state[parameter]["exp_avg"]):
            assert in_channels_last(tensor).data_ptr() == tensor.data_ptr(), path
            assert parameter.dim() < 4 or parameter.shape[1] == 1 or tensor.stride() == wanted, path


@pytest.mark.parametrize("name", ["conv_bn_flatten", "conv3d"])
def test_contiguous_stays_contiguous(name):
    model, example, graph, units = traced(name)
    backward(model, example)
    keepk.shrink(model, graph, units)
    for parameter in model.parameters():
        assert parameter.stride() == torch.empty(parameter.shape).stride()
        assert parameter.grad.stride() == parameter.stride()


def test_frozen_parameters_stay_frozen_and_can_be_thawed():
    """Even if a loss from before the cut still exists."""
    model, example, graph, units = traced()
    loss = backward(model, example)
    model.requires_grad_(requires_grad=False)
    keepk.shrink(model, graph, units)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())
    model.requires_grad_(requires_grad=True)
    check_gradients(model, example)
    del loss


def test_hooks_see_the_gradients_of_the_new_shape():
    model, example, graph, units = traced()
    seen, accumulated, order = dict[str, torch.Size](), dict[str, torch.Size](), []
    for path, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, path=path: seen.__setitem__(path, grad.shape))
        parameter.register_hook(lambda grad: 2 * grad)
        parameter.register_post_accumulate_grad_hook(lambda it, path=path: accumulated.__setitem__(path, it.grad.shape))
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, path=path: order.append(("before", path)))
        module.register_forward_hook(lambda *_, path=path: order.append(("after", path)))
    backward(model, example)
    first = order.copy()
    keepk.shrink(model, graph, units)
    model.zero_grad()
    order.clear()
    backward(model, example)
    assert order == first
    shapes = {path: parameter.shape for path, parameter in model.named_parameters()}
    assert seen == accumulated == shapes
    plain_twin = copy.deepcopy(NETWORKS["linears"]()[0])
    graph = keepk.trace(plain_twin, example)
    keepk.shrink(plain_twin, graph, units)
    backward(plain_twin, example)
    for ours, theirs in zip(model.parameters(), plain_twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, 2 * theirs.grad)


# Losses from before


@pytest.mark.parametrize("name", ["linears", "conv_bn_flatten", "lstm", "multihead_attention"])
@pytest.mark.parametrize("propagated", [True, False])
def test_a_loss_that_is_still_in_scope_does_no_harm(name, propagated):
    """Every parameter's next gradient is right, whether the loss was back-propagated or not."""
    model, example, graph, units = traced(name)
    loss = sum(leaf.square().mean() for leaf in leaves(call(without_dropout(model), example)))
    if propagated:
        loss.backward(retain_graph=True)
    keepk.shrink(model, graph, units)
    check_gradients(model, example)
    assert loss.isfinite()


@pytest.mark.parametrize("name", KINDS)
def test_a_loss_from_before_the_cut_is_refused(name):
    """It leaves no gradient of a wrong shape."""
    model, example, graph, units = traced(name)
    loss = sum(leaf.square().mean() for leaf in leaves(call(without_dropout(model), example)))
    keepk.shrink(model, graph, units)
    with pytest.raises(
        (ShrinkError, RuntimeError), match=r"computed before .* was cut|modified by an inplace operation"
    ):
        loss.backward()
    assert all(parameter.grad is None or parameter.grad.shape == parameter.shape for parameter in model.parameters())
    check_gradients(model, example)


def test_a_loss_that_needs_no_weight_is_refused_by_name():
    """Its autograd graph saved no tensor that changed, so only keepk's guard can detect it."""
    bias, weight = nn.Linear(3, 4), nn.Linear(4, 2)
    model = nn.Sequential(bias, weight)
    graph = keepk.trace(model, torch.randn(5, 3))
    loss = bias.bias.sum()
    keepk.shrink(model, graph, [1])
    with pytest.raises(
        ShrinkError, match=r"this loss was computed before '0.bias' was cut to shape \(3,\).*forward pass again"
    ):
        loss.backward()
    assert bias.bias.grad is None


def test_a_loss_through_frozen_weights_is_refused():
    """The cut weights get no gradient but were saved for backward, so torch detects the change."""
    model, example, graph, units = traced()
    model.second.requires_grad_(requires_grad=False)
    model.head.requires_grad_(requires_grad=False)
    loss = call(model, example).square().mean()
    keepk.shrink(model, graph, units)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_after_a_shrink_that_failed_old_losses_are_good():
    model, example, graph, units = traced()
    values = Stubborn((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
    loss = sum(leaf.square().mean() for leaf in leaves(call(model, example)))
    wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    values.patience = 2
    with pytest.raises(RuntimeError, match="no more entries"):
        keepk.shrink(model, graph, units, followers=[values])
    loss.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), wanted, strict=True))


# Compiled and wrapped models


@pytest.mark.parametrize("name", ["linears", "conv_bn_flatten", "multihead_attention"])
def test_a_model_that_was_exported_can_be_shrunk_and_exported_again(name):
    model, example, graph, units = traced(name)
    model.eval()
    exported = torch.export.export(model, (example,))
    oracle = masked(model, graph, units)
    keepk.shrink(model, graph, units)
    again = torch.export.export(model, (example,))
    assert relative_error(output(oracle, example), output(model, example)) < TOLERANCE
    assert relative_error(output(oracle, example), again.module()(example)) < TOLERANCE
    del exported


def compiled_module(model, backend):
    return torch.compile(model, backend=backend)


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def compiled_inside(model, backend):
    model.second = torch.compile(model.second, backend=backend)
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads .grad
@pytest.mark.parametrize("how", [compiled_module, compiled_in_place, compiled_inside])
def test_ten_shrinks_of_a_compiled_model(how):
    """By default torch stops compiling after eight shapes."""
    compiled = []

    def backend(graph, _inputs):
        compiled.append(graph)
        return graph.forward

    net, example = NETWORKS["linears"]()
    eager = copy.deepcopy(net)
    model = how(net, backend)
    graph, plan = keepk.trace(model, example), keepk.trace(eager, example)
    for unit in range(10):
        keepk.shrink(model, graph, [unit])
        keepk.shrink(eager, plan, [unit])
        before = len(compiled)
        for each in (model, eager):
            each.zero_grad()
            backward(each, example)
        assert len(compiled) > before
        assert relative_error(output(eager, example), output(model, example)) < TOLERANCE
        for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            assert relative_error(theirs.grad, ours.grad) < TOLERANCE
    torch.compiler.reset()


def test_a_model_under_ddp():
    """Refused while the wrapper exists; see `shrink_under_ddp.py`."""
    script = Path(__file__).parents[1].joinpath("support", "shrink_under_ddp.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "all checks passed" in done.stdout


# Refusals


def refuses(words, model, graph, units, error=ShrinkError, **more):
    """Check the message, and that nothing changed."""
    before = picture([model, graph])
    with pytest.raises(error, match=words):
        keepk.shrink(model, graph, units, **more)
    assert picture([model, graph]) == before


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ([21], "unit 21 does not exist; the graph has 21 units, 0 to 20. graph.groups lists them"),
        ([-1], "unit -1 does not exist"),
        ([0.5], r"units contains 0.5 \(float\). Pass the units' numbers as ints"),
        (["first"], r"units contains 'first' \(str\)"),
        ([True], r"units contains True \(bool\).*numpy.flatnonzero\(mask\)"),
        (np.ones(21, bool), r"units contains True \(bool\)"),
        (torch.ones(21, dtype=torch.bool), r"units contains True \(bool\)"),
        (torch.tensor([1.0]), r"units contains 1.0 \(float\)"),
        ([[0, 1]], r"units contains \[0, 1\] \(list\)"),
        ([3, 4, 3], "unit 3 is listed more than once"),
        (np.array([4, 5, 4], np.uint8), "unit 4 is listed more than once"),
        (torch.tensor([5, 5]), "unit 5 is listed more than once"),
        ([0, 10**30], f"unit {10**30} does not exist; the graph has 21 units"),
        ([-(10**30)], f"unit {-(10**30)} does not exist"),
        (np.array([2**64 - 1], np.uint64), f"unit {2**64 - 1} does not exist"),
        (np.array([[0, 1]]), r"units contains \[0, 1\] \(list\)"),
        (range(12), r"nothing would be left of axis 0 of 'first.weight' \(12 now\). Leave at least one unit"),
    ],
)
def test_units_that_are_none_are_refused(units, words):
    model, _, graph, _ = traced()
    refuses(words, model, graph, units)


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (0.5, r"shrink: units=0.5. Pass the units' numbers; a share is graph.choose\(0.5\)."),
        (0.25, r"a share is graph.choose\(0.25\)."),
        (3, r"shrink: units=3. Pass the units' numbers; a share is graph.choose\(0.5\)."),
        (None, "shrink: units=None. Pass the units' numbers"),
        (torch.tensor(3), r"shrink: units=<Tensor of shape \(\)>\. Pass the units' numbers"),
    ],
)
def test_what_is_no_list_of_units_is_refused(units, words):
    model, _, graph, _ = traced()
    refuses(words, model, graph, units)


@pytest.mark.parametrize("units", [[2, 5], (2, 5), np.array([2, 5]), torch.tensor([2, 5]), {2, 5}, iter([2, 5])])
def test_units_come_in_any_container(units):
    model, _, graph, _ = traced()
    assert keepk.shrink(model, graph, units).units.tolist() == [2, 5]
    assert model.first.weight.shape == (10, 7)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("late.weight", nn.Linear(12, 12)),
        ("late.running_mean", nn.BatchNorm1d(12, affine=False)),
        ("late.0.weight", nn.Sequential(nn.PReLU(12))),
    ],
)
def test_what_came_into_the_model_after_the_trace_is_refused(name, part):
    model, _, graph, units = traced()
    model.late = part
    words = rf"{name!r} of \w+, of shape \(12,.*\), is not in the graph: it was added to the model after the trace"
    refuses(rf"{words}. Change the model first, then trace it", model, graph, units)


def test_a_layer_in_the_place_of_one_without_weights_is_refused():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    graph = keepk.trace(model, torch.zeros(2, 4))
    model[1] = nn.Linear(8, 8)
    refuses(r"'1.weight' of Sequential, of shape \(8, 8\), is not in the graph", model, graph, [0])


def test_a_counter_may_come_into_the_model():
    """A tensor without dimensions has no channels."""
    model, _, graph, units = traced()
    model.register_buffer("seen", torch.tensor(0))
    keepk.shrink(model, graph, units)


def test_a_unit_that_is_gone_is_refused():
    model, _, graph, _ = traced()
    keepk.shrink(model, graph, [3])
    refuses(
        r"unit 3 of 'first' \(1 in total\) was already removed. Choose units for which graph.alive",
        model,
        graph,
        [3, 4],
    )


def test_the_last_unit_is_refused_though_the_others_went_before():
    model, _, graph, _ = traced()
    keepk.shrink(model, graph, range(11))
    refuses(r"nothing would be left of axis 0 of 'first.weight' \(1 now\)", model, graph, [11])


def test_unequal_numbers_of_bound_parts_are_refused():
    model, _, graph, _ = traced("grouped")
    one = graph.bindings[0][0][:1]
    refuses(r"must lose equal numbers of units from each of its \d+ parts, because it .*; got 1, 0", model, graph, one)


def test_a_graph_of_another_model_is_refused():
    model, _, _, _ = traced()
    _, _, graph, units = traced("gru")
    refuses(
        r"graph does not fit the model Linears: 'rnn.weight_ih_l0' should have shape \(24, 7\) and is not there",
        model,
        graph,
        units,
    )


def test_a_model_that_was_cut_elsewhere_is_refused():
    model, example, graph, units = traced()
    keepk.shrink(model, keepk.trace(model, example), [0])
    refuses(
        r"'first.weight' should have shape \(12, 7\) and has shape \(11, 7\). Trace this model object",
        model,
        graph,
        units,
    )


def test_a_graph_that_was_spent_on_a_copy_is_refused():
    model, _, graph, units = traced()
    keepk.shrink(copy.deepcopy(model), graph, units)
    refuses(r"'first.weight' should have shape \(6, 7\) and has shape \(12, 7\)", model, graph, graph.choose(0.5))


@pytest.mark.parametrize(
    ("model", "graph", "words"),
    [
        ("net", None, "shrink: got str as the model. Pass the torch.nn.Module that was traced"),
        (None, [0, 1], r"shrink: got list as the graph. Pass what keepk.trace\(model, example\) returns"),
    ],
)
def test_what_is_no_model_or_graph_is_refused(model, graph, words):
    good, _, its_graph, units = traced()
    with pytest.raises(ShrinkError, match=words):
        keepk.shrink(model or good, graph or its_graph, units)


def test_a_model_with_the_tensors_but_not_the_modules_is_refused():
    """Names and shapes fit, but there are no modules whose sizes could be updated."""
    model, _, graph, units = traced()

    class Bag(nn.Module):
        pass

    bag = Bag()
    for name, parameter in model.named_parameters():
        bag._parameters[name] = parameter
    refuses("Bag has no module 'first', which has to change with its tensors", bag, graph, units)


def share_memory(model):
    model.second.bias = nn.Parameter(model.first.weight.detach().flatten()[3 : 3 + len(model.second.bias)])


def make_sparse_gradient(model):
    model.first.weight.grad = torch.zeros(12, 7, dtype=torch.float64).to_sparse()


def compute(model):
    weight = model.first.weight
    del model.first.weight
    model.first.register_buffer("weight", weight * 2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (make_sparse_gradient, r"gradient of 'first.weight' is torch.sparse_coo: it cannot be cut. Call zero_grad\(\)"),
        (compute, "tensor 'first.weight' is the result of a computation. Detach it before shrinking"),
        (
            share_memory,
            "tensors 'first.weight' and 'second.bias' share memory but are two objects.*Tie them as one Parameter",
        ),
    ],
)
def test_tensors_that_cannot_be_cut_are_refused(change, words):
    model, _, graph, units = traced()
    change(model)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    with pytest.raises(ShrinkError, match=words):
        keepk.shrink(model, graph, units)
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == shapes
    assert graph.alive.all()


def test_a_model_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model, example, graph, units = traced()
    with pytest.raises(ShrinkError, match=r"tensor 'first.weight' was made in inference mode and cannot be changed"):
        keepk.shrink(model, graph, units)
    assert graph.alive.all()
    assert output(model, example).isfinite().all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_shrink_under_any_gradient_mode_can_be_trained(mode):
    model, example, graph, units = traced("conv_bn_flatten")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, example, optimizer)
    with mode():
        keepk.shrink(model, graph, units, optimizer=optimizer)
    assert not any(tensor.is_inference() for _, tensor in tensors(model))
    assert all(parameter.is_leaf for parameter in model.parameters())
    step(model, example, optimizer)


def test_nothing_of_the_old_size_stays_in_memory():
    """No undo, cache or history keeps the dense tensors alive."""
    model, example = nn.Sequential(nn.Linear(7, 123), nn.ReLU(), nn.Linear(123, 3)), torch.randn(4, 7)
    graph, optimizer = keepk.trace(model, example), torch.optim.Adam(model.parameters())
    step(model, example, optimizer)
    keepk.shrink(model, graph, graph.choose(0.5, seed=0), optimizer=optimizer)
    gc.collect()
    tensors_in_memory = (it for it in gc.get_objects() if type(it) in {torch.Tensor, nn.Parameter})
    assert not [it for it in tensors_in_memory if tuple(it.shape) in {(123,), (123, 7), (3, 123)}]


def test_copies_of_a_shrunk_model_do_not_visit_every_index():
    """A regression test: each index was an int object, which every deepcopy of the model visited."""
    net = nn.Sequential(nn.Linear(1, 100_000), nn.ReLU(), nn.Linear(100_000, 1))
    graph = keepk.trace(net, torch.zeros(2, 1))
    keepk.shrink(net, graph, np.arange(0, 100_000, 2))
    calls, count = [0], sys.getprofile()
    sys.setprofile(lambda _frame, event, _: calls.__setitem__(0, calls[0] + (event in ("call", "c_call"))))
    try:
        twin = copy.deepcopy(net)
    finally:
        sys.setprofile(count)
    assert calls[0] < 20_000
    assert record_of(twin) == record_of(net)
    assert record_of(twin)["tensors"]["0.weight"]["kept"]["0"].tolist() == list(range(1, 100_000, 2))
