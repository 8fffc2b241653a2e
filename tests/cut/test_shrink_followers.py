"""Followers of a shrink (optimizers, averages, teachers, dicts of tensors), copies, and attention that lost heads."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import keepk
from keepk.errors import OptimizerError, ShrinkError
from keepk.model.layers import HeadwiseAttention
from masked import leaves, masked, relative_error, zero_slices
from networks import NETWORKS
from pictures import picture
from shrinking import KINDS, TOLERANCE, Stubborn, check_gradients, left, output, step, traced

# Optimizers

OPTIMIZERS = {
    "momentum": lambda them: torch.optim.SGD(them, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda them: torch.optim.Adam(them, lr=0.01, amsgrad=True),
    "adamw_fused": lambda them: torch.optim.AdamW(them, lr=0.01, fused=True),
    "adamw_foreach": lambda them: torch.optim.AdamW(them, lr=0.01, foreach=True),
    "rmsprop": lambda them: torch.optim.RMSprop(them, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda them: torch.optim.Adagrad(them, lr=0.01),
    "nadam": lambda them: torch.optim.NAdam(them, lr=0.01),
    "lbfgs": lambda them: torch.optim.LBFGS(them, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", ["linears", "conv_bn_flatten", "tied_embedding"])
def test_the_optimizer_goes_on_as_with_the_masked_network(name, kind):
    """It holds exactly the model's parameters, with state of their shapes, and updates them like the masked copy's."""
    model, example, graph, units = traced(name)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    for _ in range(2):
        step(model, example, optimizer)
    dense, its_optimizer = masked_twin(kind, model, optimizer, graph, units)
    keepk.shrink(model, graph, units, optimizer=optimizer)
    check_holds(optimizer, model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(model, example, optimizer)
    step(dense, example, its_optimizer)
    check_holds(optimizer, model)
    for (path, now), old, (_, wanted) in zip(model.named_parameters(), before, dense.named_parameters(), strict=True):
        assert not torch.equal(now, old) or now.grad.abs().max() < TOLERANCE, path  # a bias before a BatchNorm
        assert relative_error(left(wanted.detach(), path, graph, units), now) < 1e-8, path


def masked_twin(kind, model, optimizer, graph, units):
    """A copy with a separate optimizer, whose state is zero where the weights are; LBFGS restarts its history."""
    if kind == "lbfgs":
        dense = copy.deepcopy(model)
        its_optimizer = OPTIMIZERS[kind](list(dense.parameters()))
    else:
        dense, its_optimizer = copy.deepcopy((model, optimizer))
    named = dict(dense.named_parameters())
    zero_slices(named, dense, graph, units)
    for key in {key for state in its_optimizer.state.values() for key in state}:
        values = {name: its_optimizer.state[parameter][key] for name, parameter in named.items()}
        per_weight = {name: value for name, value in values.items() if torch.is_tensor(value) and value.dim()}
        zero_slices(per_weight, dense, graph, units)
    return dense, its_optimizer


def check_holds(optimizer, model):
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert list(map(id, held)) == list(map(id, model.parameters()))
    if isinstance(optimizer, torch.optim.LBFGS):
        return
    assert {id(parameter) for parameter in optimizer.state} == set(map(id, held))
    for parameter, state in optimizer.state.items():
        shapes = {value.shape for value in state.values() if torch.is_tensor(value) and value.dim()}
        assert shapes == {parameter.shape}


def test_the_history_of_lbfgs_comes_back_with_the_rest():
    model, example, graph, units = traced()
    optimizer = OPTIMIZERS["lbfgs"](list(model.parameters()))
    step(model, example, optimizer)
    values = Stubborn((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
    values.patience = 1
    before = picture([model, optimizer])
    with pytest.raises(RuntimeError, match="no more entries"):
        keepk.shrink(model, graph, units, optimizer=optimizer, followers=[values])
    assert picture([model, optimizer]) == before


@pytest.mark.parametrize("together", [True, False])
def test_several_groups_and_several_optimizers(together):
    model, example, graph, units = traced("conv_bn_flatten")
    weights, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    if together:
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 0.1}]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=0.01)]
    else:
        optimizers = [torch.optim.SGD(weights, lr=0.01, momentum=0.9), torch.optim.Adam(rest, lr=0.1)]
    for optimizer in optimizers:
        step(model, example, optimizer)
    keepk.shrink(model, graph, units, optimizer=optimizers[0] if together else tuple(optimizers))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            assert all(
                value.shape == parameter.shape for value in state.values() if torch.is_tensor(value) and value.dim()
            )
        step(model, example, optimizer)
    assert not any(torch.equal(old, now) for old, now in zip(before, model.parameters(), strict=True))
    assert [list(map(id, group["params"])) for optimizer in optimizers for group in optimizer.param_groups] == [
        list(map(id, weights)),
        list(map(id, rest)),
    ]


def test_an_optimizer_without_state_yet_needs_none():
    model, example, graph, units = traced()
    optimizer = torch.optim.Adam(model.parameters())
    keepk.shrink(model, graph, units, optimizer=optimizer)
    assert not optimizer.state
    step(model, example, optimizer)


def matrices(model):
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (
            lambda model: torch.optim.Adafactor(model.parameters()),
            "optimizer Adafactor: keeps its second moments per row",
        ),
        (lambda _: torch.optim.SGD(nn.Linear(3, 3).parameters()), "optimizer SGD: holds no parameter of the model"),
        (lambda _: 0.1, "optimizer: got float. Pass a torch.optim.Optimizer, or several"),
        (lambda model: [torch.optim.SGD(model.parameters()), None], "optimizer: got NoneType"),
    ],
)
def test_an_optimizer_that_cannot_follow_is_refused(optimizer, words):
    model, _, graph, units = traced()
    before = picture([model, graph])
    with pytest.raises(OptimizerError, match=words):
        keepk.shrink(model, graph, units, optimizer=optimizer(model))
    assert picture([model, graph]) == before


def test_optimizer_state_of_another_shape_is_refused_by_name():
    model, example, graph, units = traced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, example, optimizer)
    optimizer.state[model.first.weight]["rows"] = torch.zeros(12)
    before = picture([model, graph, optimizer])
    with pytest.raises(OptimizerError, match=r"its state 'rows' of 'first.weight' is of shape \(12,\)"):
        keepk.shrink(model, graph, units, optimizer=optimizer)
    assert picture([model, graph, optimizer]) == before


class Lookahead(torch.optim.Optimizer):
    """Every second step moves half-way back to slow weights, stored in the inner optimizer's state or in its own."""

    def __init__(self, inner, *, own_state):
        super().__init__(inner.param_groups, {})
        self.param_groups, self.inner, self.steps = inner.param_groups, inner, 0
        self.slow = self.state if own_state else inner.state

    def step(self, closure=None):
        loss = self.inner.step(closure)
        self.steps += 1
        for group in self.param_groups if self.steps % 2 == 0 else ():
            for parameter in group["params"]:
                self.pull(parameter)
        return loss

    @torch.no_grad()
    def pull(self, parameter):
        slow = self.slow[parameter].setdefault("slow", parameter.detach().clone())
        slow.lerp_(parameter, 0.5)
        parameter.copy_(slow)


def lookahead(model, *, own_state):
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return Lookahead(inner, own_state=own_state)


def test_an_optimizer_around_another_one_is_refused():
    model, example, graph, units = traced()
    outer = lookahead(model, own_state=False)
    words = r"Lookahead: wraps SGD as 'inner', whose state would not be pruned\. Pass the wrapped .*, optimizer\.inner"
    with pytest.raises(OptimizerError, match=words):
        keepk.shrink(model, graph, units, optimizer=outer)
    with pytest.raises(OptimizerError, match=words):
        keepk.Pruner(model, keepk.channels("first", keep=4), outer, example=example)
    outer.inner = [outer.inner]
    with pytest.raises(OptimizerError, match=r"wraps SGD as 'inner\[0\]', .* optimizer\.inner\[0\]; or both"):
        keepk.Pruner(model, keepk.weights("first.weight", keep=4), outer)


@pytest.mark.parametrize("own_state", [True, False])
def test_both_optimizers_or_the_inner_one_alone_follow(own_state):
    """The slow weights are cut as well, and training equals that of the masked copy."""
    outputs = []
    for shrink in ("each", "never"):
        model, example = NETWORKS["linears"]()
        outer = lookahead(model, own_state=own_state)
        given = [outer, outer.inner] if own_state else outer.inner
        spaces = keepk.channels("*", keep=8, schedule=[14, 8])
        pruner = keepk.Pruner(model, spaces, given, example=example, shrink=shrink)
        for _ in range(5):
            for _ in range(3):
                step(model, example, outer)
            pruner.step()
        assert pruner.kept == {"*": 8}
        outputs.append(output(model, example))
    assert relative_error(*outputs) < TOLERANCE


# Followers


@pytest.mark.parametrize("name", KINDS)
def test_a_moving_average_follows(name):
    """It is cut as well, and continues to average as the masked copies would."""
    model, example, graph, units = traced(name)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    average.update_parameters(model)
    step(model, example, optimizer)
    average.update_parameters(model)
    oracle = masked(average.module, graph, units)
    keepk.shrink(model, graph, units, optimizer=optimizer, followers=[average])
    assert relative_error(output(oracle, example), output(average, example)) < TOLERANCE
    wanted = [(ours + theirs) / 2 for ours, theirs in zip(model.parameters(), average.module.parameters(), strict=True)]
    average.update_parameters(model)
    for parameter, value in zip(average.module.parameters(), wanted, strict=True):
        assert torch.allclose(parameter, value)
    assert all(leaf.isfinite().all() for leaf in leaves(output(average, example)))


def test_a_teacher_and_its_optimizer_state_are_apart():
    model, example, graph, units = traced("multihead_attention")
    teacher = copy.deepcopy(model).requires_grad_(requires_grad=False)
    with torch.no_grad():
        teacher.first.weight.mul_(0.5)
    oracle = masked(teacher, graph, units)
    keepk.shrink(model, graph, units, followers=[teacher])
    assert relative_error(output(oracle, example), output(teacher, example)) < TOLERANCE
    assert isinstance(teacher.attention, HeadwiseAttention)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    keepk.shrink(model, graph, graph.choose(0.5, seed=1), followers=[teacher])
    assert all(
        ours.shape == theirs.shape for ours, theirs in zip(model.parameters(), teacher.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", ["conv_bn_flatten", "tied_embedding", "caches"])
def test_a_dict_of_tensors_follows(name):
    """A state_dict with a tied tensor under each of its names still loads afterwards."""
    model, example, graph, units = traced(name)
    values = {key: value.clone() * 1 for key, value in model.state_dict().items()}
    values["epoch"] = 3
    wanted = masked(model, graph, units)
    keepk.shrink(model, graph, units, followers=[values])
    assert values.pop("epoch") == 3
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.load_state_dict(values)
    assert relative_error(output(wanted, example), output(model, example)) < TOLERANCE


def test_a_dict_of_trained_weights_follows():
    """The dict has neither buffers nor frozen weights."""
    model, _, graph, units = traced("conv_bn_flatten")
    model.first.requires_grad_(requires_grad=False)
    trained = {
        name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    keepk.shrink(model, graph, units, followers=[trained])
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in trained.items())
    assert len(trained) == 8


def other_shape(model):
    values = dict(model.state_dict())
    values["first.weight"] = torch.zeros(11, 7)
    return values


@pytest.mark.parametrize(
    ("follower", "words"),
    [
        (lambda _: {}, r"followers\[1\] \(dict\): has no tensor 'first.weight'. A follower is a copy of the model"),
        (lambda _: {"first.weight": "none"}, r"followers\[1\] \(dict\): has no tensor 'first.weight'"),
        (other_shape, r"followers\[1\] \(dict\): 'first.weight' has shape \(11, 7\), the model's \(12, 7\)"),
        (lambda _: nn.Linear(3, 3), r"followers\[1\] \(Linear\): has no tensor 'first.weight'"),
        (lambda _: "teacher", r"followers: got str. Pass a list of modules \(a copy, an AveragedModel\) or dicts of"),
    ],
)
def test_what_is_no_follower_is_refused(follower, words):
    model, _, graph, units = traced()
    good, wrong = copy.deepcopy(model), follower(model)
    before = picture([model, graph, good, wrong])
    with pytest.raises(ShrinkError, match=words):
        keepk.shrink(model, graph, units, followers=[good, wrong])
    assert picture([model, graph, good, wrong]) == before


@pytest.mark.parametrize(
    ("followers", "words"),
    [
        (
            lambda _, twin: [twin, twin],
            r"shrink: followers\[1\] \(.*\) is followers\[0\] again, and would be cut twice. Leave",
        ),
        (lambda _, twin: [AveragedModel(twin), twin, twin], r"followers\[2\] \(.*\) is followers\[1\] again"),
        (
            lambda model, _: [model],
            r"shrink: followers\[0\] \(.*\) is the model itself, and would be cut twice. Leave it out",
        ),
        (lambda model, twin: [twin, nn.DataParallel(model)], r"followers\[1\] \(DataParallel\) is the model itself"),
        (lambda _, twin: twin, r"^shrink: followers: got one \w+. Pass a list, even for one: followers=\[...\].$"),
        (lambda model, _: dict(model.state_dict()), r"^shrink: followers: got one dict. Pass a list, even for one"),
    ],
)
def test_a_follower_that_would_be_cut_twice_and_one_without_a_list_are_refused(followers, words):
    model, _, graph, units = traced()
    twin = copy.deepcopy(model)
    before = picture([model, graph, twin])
    with pytest.raises(ShrinkError, match=words):
        keepk.shrink(model, graph, units, followers=followers(model, twin))
    assert picture([model, graph, twin]) == before


def test_the_same_values_in_a_dict_of_their_own_are_another_follower():
    model, _, graph, units = traced()
    one, other = dict(model.state_dict()), dict(model.state_dict())
    keepk.shrink(model, graph, units, followers=[one, other])
    assert all(torch.equal(one[name], it) and torch.equal(other[name], it) for name, it in model.state_dict().items())


# Copies


@pytest.mark.parametrize("name", [*KINDS, "encoder_layer", "preactivation_residual"])
def test_copies_and_pickles_of_a_shrunk_model_compute_the_same(name):
    model, example, graph, units = traced(name)
    keepk.shrink(model, graph, units)
    wanted = output(model, example)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False)]
    for twin in copies:
        assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
        assert all(torch.equal(a, b) for a, b in zip(leaves(wanted), leaves(output(twin, example)), strict=True))
        assert twin.state_dict().keys() == model.state_dict().keys()
        check_gradients(twin, example)


def test_a_copy_of_a_shrunk_model_can_be_shrunk_further_on_its_own():
    model, example, graph, units = traced("dense_block")
    keepk.shrink(model, graph, units)
    twin = copy.deepcopy(model)
    again = keepk.trace(twin, example)
    units = again.choose(0.5, seed=1)
    oracle = masked(twin, again, units)
    keepk.shrink(twin, again, units)
    assert relative_error(output(oracle, example), output(twin, example)) < TOLERANCE
    assert all(leaf.isfinite().all() for leaf in leaves(output(model, example)))


@pytest.mark.filterwarnings("ignore:The tensor attributes self.rnn._flat_weights")  # as for a dense model
@pytest.mark.parametrize("name", ["dense_block", "multihead_attention", "lstm", "tied_embedding"])
def test_a_shrunk_model_can_be_exported(name):
    model, example, graph, units = traced(name)
    keepk.shrink(model, graph, units)
    wanted = output(model, example)
    assert relative_error(wanted, torch.export.export(model, (example,)).module()(example)) < TOLERANCE


# Attention


@pytest.fixture
def fused_attention():
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.usefixtures("fused_attention")
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_that_lost_heads_does_not_take_the_fused_path(norm_first):
    layer = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True, norm_first=norm_first).double().eval()
    example = torch.randn(3, 5, 12, dtype=torch.float64)
    graph = keepk.trace(layer, example)
    oracle = masked(layer, graph, units := graph.choose(0.5, seed=0))
    assert output(layer, example).shape == example.shape
    keepk.shrink(layer, graph, units)
    assert layer.self_attn.num_heads == 2
    assert relative_error(output(oracle, example), output(layer, example)) < TOLERANCE


MASKS = {
    "none": lambda *_: {},
    "padding_bool": lambda batch, _, source: {"key_padding_mask": holes(batch, source)},
    "padding_float": lambda batch, _, source: {"key_padding_mask": holes(batch, source).double() * -1.5},
    "mask_bool": lambda _, target, source: {"attn_mask": holes(target, source)},
    "mask_float": lambda _, target, source: {"attn_mask": torch.linspace(-2, 1, target * source).view(target, source)},
    "mask_per_head": lambda batch, target, source: {"attn_mask": holes(batch * 4, target, source)},
    "mask_per_head_float": lambda batch, target, source: {"attn_mask": holes(batch * 4, target, source) * -0.7},
    "both": lambda batch, target, source: {
        "attn_mask": holes(target, source),
        "key_padding_mask": holes(batch, source, shift=1),
    },
}


def holes(*shape, shift=0):
    """An attention mask with some, but never all, entries of each row masked."""
    return (torch.arange(int(np.prod(shape))).view(shape) + shift) % 3 == 0


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [(12, 12), (7, 9)])
def test_headwise_attention_is_attention(masks, batch_first, batched, bias, widths):
    torch.manual_seed(0)
    kdim, vdim = widths
    attention = nn.MultiheadAttention(12, 4, bias=bias, batch_first=batch_first, kdim=kdim, vdim=vdim).double()
    headwise = copy.deepcopy(attention)
    headwise.__class__ = HeadwiseAttention
    batch, target, source = 2, 5, 7
    given = MASKS[masks](batch if batched else 1, target, source)
    shapes = (target, 12), (source, kdim), (source, vdim)
    query, key, value = (torch.randn(batch, *shape, dtype=torch.float64) for shape in shapes)
    if not batched:
        query, key, value = query[0], key[0], value[0]
        given = {k: v[0] if k == "key_padding_mask" else v for k, v in given.items()}
    elif not batch_first:
        query, key, value = (it.transpose(0, 1) for it in (query, key, value))
    given = {k: v if v.dtype == torch.bool else v.double() for k, v in given.items()}
    for need_weights, average in ((True, True), (True, False), (False, True)):
        options = {"need_weights": need_weights, "average_attn_weights": average, **given}
        wanted, got = attention(query, key, value, **options), headwise(query, key, value, **options)
        assert relative_error(wanted[0], got[0]) < TOLERANCE
        assert (wanted[1] is None) == (got[1] is None)
        assert wanted[1] is None or relative_error(wanted[1], got[1]) < TOLERANCE


def test_headwise_attention_wants_the_causal_mask_as_torch_does():
    attention, x = nn.MultiheadAttention(12, 4), torch.randn(5, 2, 12)
    for kind in (nn.MultiheadAttention, HeadwiseAttention):
        attention.__class__ = kind
        with pytest.raises(RuntimeError, match="Need attn_mask if specifying the is_causal hint"):
            attention(x, x, x, is_causal=True, need_weights=False)


def test_a_mask_for_more_heads_than_there_are_is_refused():
    model, _, graph, units = traced("multihead_attention")
    keepk.shrink(model, graph, units)
    attention, x = model.attention, torch.randn(1, 5, model.attention.in_proj_weight.shape[1], dtype=torch.float64)
    assert attention.num_heads == 2
    masks = torch.zeros(4, 5, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        attention(x, x, x, attn_mask=masks)


@pytest.mark.usefixtures("fused_attention")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_an_encoder_that_lost_heads_takes_padded_sequences():
    layer = nn.TransformerEncoderLayer(12, 4, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double().eval()
    example, padding = torch.randn(3, 5, 12, dtype=torch.float64), torch.arange(5) >= torch.tensor([[5], [3], [4]])
    graph = keepk.trace(encoder, example)
    oracle = masked(encoder, graph, units := graph.choose(0.5, seed=0))
    keepk.shrink(encoder, graph, units)
    with torch.no_grad():
        wanted, got = (each(example, src_key_padding_mask=padding) for each in (oracle, encoder))
    assert relative_error(wanted[~padding], got[~padding]) < TOLERANCE
