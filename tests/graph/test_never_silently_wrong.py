"""Forward passes that a trace cannot determine are refused, and so are cuts that would change their behaviour."""

import copy
import functools
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import keepk
from keepk.cut.shrink import prepare
from keepk.errors import FileError, ShrinkError, SpaceError, TraceError
from masked import masked, relative_error


class Hidden(nn.Module):
    """Sixteen hidden channels of `a`, read by `o`."""

    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(7, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.o(self.between(F.relu(self.a(x)), x))

    def between(self, h, _x):
        return h


def vectors(rows=4):
    return torch.randn(rows, 7)


def pruned_to(model, keep, **options):
    """A run of one event."""
    spaces = [keepk.channels("a", keep=keep)]
    return keepk.Pruner(model, spaces, torch.optim.SGD(model.parameters(), lr=0.1), example=vectors(), **options)


def state(model):
    return copy.deepcopy([(name, tensor.detach()) for name, tensor in model.state_dict().items()])


def same_state(before, model):
    after = state(model)
    return [name for name, _ in before] == [name for name, _ in after] and all(
        one.equal(other) for (_, one), (_, other) in zip(before, after, strict=True)
    )


# Zero along one axis only


class AttentionMaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.feat, self.maps = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 6, 3, padding=1)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.head((torch.relu(self.feat(x))[:, None] * torch.sigmoid(self.maps(x))[:, :, None]).sum(1))


def test_maps_that_pool_features_are_not_called_exact():
    model, example = AttentionMaps(), torch.randn(2, 3, 8, 8)
    with pytest.raises(SpaceError, match="lossy"):
        keepk.Pruner(model, [keepk.channels("maps", keep=3)], example=example)
    keepk.Pruner(model, [keepk.channels("feat", keep=3)], example=example).step()
    assert model.feat.out_channels == 3


# Results that nothing uses


class AveragesWeights(nn.Module):
    """`nn.MultiheadAttention` returns the mean of its weights over the heads, unless it is told not to."""

    def __init__(self, use):
        super().__init__()
        self.i, self.attention = nn.Linear(5, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.o, self.use, self.last = nn.Linear(16, 3), use, None

    def forward(self, x):
        x = self.i(x)
        y, weights = self.attention(x, x, x)
        if self.use == "stored":
            self.last = weights.detach()
        if self.use == "in a closure":
            self.last = lambda: weights
        if self.use == "computed with":
            y = y * weights.mean()
        if self.use == "read" and weights.sum() > 0:
            y = y * 2
        if self.use == "in train mode" and self.training:
            y = y * weights.mean()
        return (self.o(y), weights) if self.use == "returned" else self.o(y)


def heads_of(model):
    graph = keepk.trace(model, torch.randn(2, 6, 5))
    return next(group for group in graph.groups if group.name.startswith("attention.in_proj"))


def test_a_mean_over_heads_that_is_discarded_does_not_make_them_lossy():
    model, example = AveragesWeights("discarded").double(), torch.randn(2, 6, 5).double()
    heads = heads_of(copy.deepcopy(model).float())
    assert not heads.lossy
    graph = keepk.trace(model, example)
    assert keepk.verify(model, graph, example) < 1e-12
    keepk.shrink(model, graph, heads.units[:3])
    assert model.train()(example).shape == (2, 6, 3)


@pytest.mark.parametrize("use", ["returned", "stored", "in a closure", "computed with", "read", "in train mode"])
def test_a_mean_over_heads_that_is_used_makes_them_lossy(use):
    assert "mean over the axis" in str(heads_of(AveragesWeights(use)).lossy)


class Counts(Hidden):
    """Computes a number from the channels, which is used in the way that a test says."""

    def __init__(self, use):
        super().__init__()
        self.use, self.penalty = use, None
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("variance", torch.ones(2))

    def between(self, h, x):
        return self.use(self, h, x)


class ScaledBackward(torch.autograd.Function):
    """The identity, whose backward multiplies by a number that only autograd keeps."""

    @staticmethod
    def forward(ctx, h, number):
        ctx.save_for_backward(number(h))
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


def stored_in_training(number):
    def use(net, h, _x):
        value = number(h)
        if net.training:
            net.penalty = value
        return h

    return use


def stored_with_gradients(number):
    def use(net, h, _x):
        value = number(h)
        if torch.is_grad_enabled():
            net.penalty = lambda: value
        return h

    return use


def stored_if_positive(net, h, x):
    value = h.mean()
    if x.sum() > 1e9:
        net.penalty = value
    return h


def with_batch_norm_of_two_rows(h, training, net):
    F.batch_norm(h.view(2, 2, -1), net.mean, net.variance, training=training, momentum=1.0)
    return h - net.mean.sum()


@pytest.mark.parametrize(
    ("use", "exact"),
    [
        (stored_in_training(torch.mean), False),
        (stored_in_training(lambda h: h.softmax(1).square().sum()), False),
        (stored_in_training(lambda h: h.square().sum()), True),
        (stored_with_gradients(torch.mean), False),
        (stored_if_positive, False),
        (lambda _net, h, _: ScaledBackward.apply(h, torch.mean), False),
        (lambda _net, h, _: ScaledBackward.apply(h, torch.sum), True),
        (lambda net, h, _: with_batch_norm_of_two_rows(h, net.training, net), False),
    ],
)
def test_a_result_that_outlives_training_or_is_written_counts_as_used(use, exact):
    """Nothing in eval mode uses it, and train mode runs the same operations."""
    assert keepk.trace(Counts(use), vectors()).units.lossy.tolist() == [not exact] * 16


def test_a_penalty_that_train_mode_stores_is_the_same_after_a_cut():
    net = Counts(stored_in_training(lambda h: h.square().sum())).double().train()
    twin, example = copy.deepcopy(net), vectors().double()
    graph = keepk.trace(net, example)
    keepk.shrink(net, graph, range(9))
    with torch.no_grad():
        twin.a.weight[:9], twin.a.bias[:9] = 0.0, 0.0
    twin(example), net(example)
    assert net.penalty is not None
    assert twin.penalty is not None
    assert torch.allclose(net.penalty, twin.penalty, rtol=1e-12)


# Channels that say where a value goes


class PicksByChannels(Hidden):
    def __init__(self, pick):
        super().__init__()
        self.pick, self.table = pick, nn.Embedding(2, 3)

    def forward(self, x):
        h = F.relu(self.a(x))
        return self.o(h) + self.pick(self, h, (h > 0.3).long())


@pytest.mark.parametrize(
    "pick",
    [
        lambda _net, h, at: h.new_zeros(3).index_put((at,), h.new_ones(()), accumulate=True),
        lambda _net, h, at: h.new_zeros(3).index_put((at,), h.new_ones(())),
        lambda net, _h, at: F.embedding_bag(at.flatten(), net.table.weight, at.new_zeros(1), mode="sum"),
        lambda net, _h, at: net.table(at).sum(1),
    ],
)
def test_channels_that_say_where_a_value_goes_are_fixed(pick):
    """With a channel less, fewer values are counted or summed."""
    assert not len(keepk.trace(PicksByChannels(pick), vectors()).units)


def test_rows_that_are_put_by_the_index_of_the_example_keep_channels_exact():
    class Puts(Hidden):
        def between(self, h, x):
            return h.new_zeros(6, h.shape[1]).index_put(((x[:, 0] > 0).long(),), h)[:4]

    assert cut_or_why(Puts(), vectors(), [vectors()]) == ""


# 0 / 0


def share_of(h):
    return h / h.sum(0)


@pytest.mark.parametrize(
    ("replace", "exact"),
    [
        (lambda h: torch.nan_to_num(share_of(h), nan=2.0), False),
        (lambda h: torch.nan_to_num(share_of(h)), True),
        (lambda h: torch.where(torch.isnan(share_of(h)), 1.0, h), False),
        (lambda h: torch.where(torch.isnan(share_of(h)), 0.0, h), True),
        (lambda h: share_of(h).view(2, 2, -1).flatten(0, 1).isnan(), False),
        (lambda h: share_of(h).bool(), False),
        (lambda h: share_of(h).count_nonzero(1).unsqueeze(1), False),
        (lambda h: share_of(h).nansum(1, keepdim=True), True),
        (lambda h: h.isnan(), True),
    ],
)
def test_a_value_that_replaces_0_divided_by_0_counts(replace, exact):
    class Replaces(Hidden):
        def forward(self, x):
            h = F.relu(self.a(x))
            return self.o(h) + replace(h).sum(1, keepdim=True)

    assert keepk.trace(Replaces(), vectors()).units.lossy.tolist() == [not exact] * 16
    if exact:
        assert cut_or_why(Replaces(), vectors(), [vectors()]) == ""


# Values


class Reads(Hidden):
    """Reads a value that the example alone does not determine."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def between(self, h, x):
        return h * 2 if self.read(h, x) else h


@pytest.mark.parametrize(
    "read",
    [
        lambda _, x: float(x.sum()) > 0,
        lambda _, x: x.sum().item() > 0,
        lambda _, x: int(x.sum()) > 0,
        lambda _, x: x[0].tolist()[0] > 0,
        lambda h, _: float(h.detach().numpy(force=True).sum()) > 0,
        lambda h, _: h.argmax(1)[0].item() > 3,
        lambda _, x: len(range(x.abs().sum().int())) > 3,
    ],
)
def test_numbers_that_python_reads_are_refused_with_the_place(read):
    message = r"forward reads a number from a tensor, at test_never_silently_wrong.py:\d+, which was .*value_branches="
    with pytest.raises(TraceError, match=message):
        keepk.trace(Reads(read), vectors())
    graph = keepk.trace(Reads(read), vectors(), value_branches="accept")
    assert len(graph.units) == 16
    assert "reads a number" in graph.unknown[0]


class FailsOtherwise(Hidden):
    def between(self, h, x):
        return h if x.sum() > -1e6 else h.view(-1, 5)


def test_a_branch_that_fails_on_its_other_side_is_refused():
    with pytest.raises(TraceError, match=r"fails on the side that the example does not take .*shape '\[-1, 5\]'"):
        keepk.trace(FailsOtherwise(), vectors())
    graph = keepk.trace(FailsOtherwise(), vectors(), value_branches="accept")
    assert len(graph.units) == 16


class Chooses(nn.Module):
    """Each input passes through one of three layers, selected by a number that is read from it."""

    def __init__(self):
        super().__init__()
        self.a, self.o = nn.Linear(7, 16), nn.Linear(16, 3)
        self.ways = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        way = int(x.abs().sum() * 0 + x[0, 0].abs()) % 3
        return self.o(F.relu(self.ways[way](F.relu(self.a(x)))))


def inputs_of(ways):
    made = [vectors() for _ in range(ways)]
    for way, example in enumerate(made):
        example[0, 0] = way + 0.5
    return made


def test_several_examples_are_traced_and_what_none_uses_stays():
    model = Chooses()
    examples = inputs_of(3)
    graph = keepk.trace(model, examples=examples[:2], value_branches="accept")
    fixed = {fixed.tensor for fixed in graph.fixed if "never used" in fixed.why}
    assert fixed == {"ways.2.weight", "ways.2.bias"}
    graph = keepk.trace(model, examples=examples, value_branches="accept")
    oracle = copy.deepcopy(model)
    units = graph.choose(0.5, seed=0)
    with torch.no_grad():
        for unit in units:
            for name, axis, index in graph.slices(int(unit)):
                oracle.get_parameter(name).select(axis, index).zero_()
    keepk.shrink(model, graph, units)
    assert len(units) > 8
    assert all(relative_error(oracle(x), model(x)) < 1e-5 for x in examples)


def cut_or_why(model, example, others=()):
    """Prune half of `a` by masks and by cutting and compare both on all inputs in both modes, or return the refusal."""
    cut, kept = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    example, *others = (it.double() for it in (example, *others))
    ways: list[tuple[nn.Module, Literal["never", "each"]]] = [(kept, "never"), (cut, "each")]
    for net, shrink in ways:
        try:
            keepk.Pruner(net, [keepk.channels("a", keep=8)], example=example, shrink=shrink).step()
        except keepk.errors.KeepkError as error:
            return str(error)
    assert cut.a.out_features == 8
    for training in (False, True):
        kept.train(training), cut.train(training)
        for x in (example, *others):
            assert relative_error(kept(x), cut(x)) < 1e-9
    return ""


class Experts(Hidden):
    """One line tests for each expert whether it has any input."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def between(self, h, x):
        y = h
        for number, expert in enumerate(self.experts):
            mask = x[:, number] > 0
            if mask.any():
                y = y + torch.where(mask[:, None], F.relu(expert(h)), 0.0)
        return y


class FirstWay(Experts):
    def between(self, h, x):
        for number, expert in enumerate(self.experts):
            if x[0, number] > 0:
                return F.relu(expert(h))
        return h


class SoftmaxIf(Hidden):
    """Normalises the channels depending on two truth values, which `both` combines."""

    def __init__(self, both):
        super().__init__()
        self.both = both

    def between(self, h, x):
        flags = [bool(x.sum() > 0), bool(x[0, 0] > 0)]
        return h.softmax(1) if self.both(*flags) else h


class NestedFlags(Hidden):
    def between(self, h, x):
        if x.sum() > 0:
            return h
        if x[0, 0] > 0:
            return h * 2
        return h.softmax(1) if x[0, 1] > 0 else h


class WidthOnOtherSide(Hidden):
    """Both branches compute the same until something is cut."""

    def between(self, h, x):
        return h / (16 if x.sum() > 0 else h.shape[1])


class TrainsOnOtherSide(Hidden):
    """Both branches compute the same in eval mode."""

    def between(self, h, x):
        return h.softmax(1) if bool(x.sum() < 0) and self.training else h


def signs(*columns):
    x = torch.rand(4, 7) + 0.1
    for column in columns:
        x[:, column] *= -1
    return x


@pytest.mark.parametrize("kind", [Experts, FirstWay])
def test_each_truth_value_that_one_line_reads_has_two_outcomes(kind):
    examples = [signs(1), signs(0, 1), signs(0, 1, 2), signs(0, 2), signs()]
    for number, example in enumerate(examples):
        assert cut_or_why(kind(), example, examples[:number] + examples[number + 1 :]) == ""


@pytest.mark.parametrize(
    "model",
    [
        SoftmaxIf(lambda p, q: p and q),
        SoftmaxIf(lambda p, q: p and not q),
        SoftmaxIf(lambda p, q: not p and not q),
        NestedFlags(),
        WidthOnOtherSide(),
        TrainsOnOtherSide(),
    ],
)
def test_all_outcomes_of_two_truth_values_are_seen(model):
    for example in (signs(), -signs(), -signs(0), signs(0)):
        assert "lossy=True" in cut_or_why(model, example)


def test_truth_values_that_decide_nothing_bind_nothing():
    assert cut_or_why(SoftmaxIf(lambda *flags: len(flags) > 2), signs(), [-signs()]) == ""


class AsksTwice(Hidden):
    """Two truth values that are always the same."""

    def between(self, h, x):
        scale = {}
        if x.sum() > 0:
            scale["two"] = 2
        return h * scale["two"] if x.sum() > 0 else h


def test_a_combination_that_cannot_be_does_not_hinder():
    assert cut_or_why(AsksTwice(), signs(), [-signs()]) == ""
    assert cut_or_why(AsksTwice(), -signs(), [signs()]) == ""


class ManyFlags(Hidden):
    def __init__(self, last):
        super().__init__()
        self.last = last

    def between(self, h, x):
        for column in range(40):
            if x[0, column % 7] < -1e6:
                h = h.softmax(1) if self.last and column in (0, 39) else h * 2
        return h


def test_more_truth_values_than_passes_are_seen_at_the_first_and_the_last():
    assert cut_or_why(ManyFlags(last=False), signs()) == ""
    assert "lossy=True" in cut_or_why(ManyFlags(last=True), signs())


class SoftmaxIfFound(Hidden):
    """Normalises the channels depending on a data-dependent size."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def between(self, h, x):
        return h if self.found(x) else h.softmax(1)


SIZES = [
    lambda x: len(torch.where(x[:, 0] > 0)[0]) > 0,
    lambda x: (x[:, 0] > 0).nonzero().numel(),
    lambda x: x[x > 0].numel() > 0,
    lambda x: x[x[:, 0] > 0].shape[0] > 0,
    lambda x: x[:, x[0] > 0].shape[1] > 0,
    lambda x: len(torch.masked_select(x, x > 0)),
    lambda x: list(x[x > 0]),
    lambda x: torch.argwhere(x > 0).size(0) > 0,
    lambda x: len((x[:, 0] > 0).unique()) > 1,
    lambda x: len(torch.unique((x[:, :2] > 0).int(), dim=0)) > 1,
    lambda x: len(torch.unique_consecutive((x[:, 0] > 0).int())) > 1,
    lambda x: len(torch.bincount((x[:, 0] > 0).int())) > 1,
    lambda x: len(torch.arange(4).repeat_interleave((x[:, 0] > 0).int())) > 0,
]


@pytest.mark.parametrize("found", SIZES)
def test_a_size_that_depends_on_values_has_two_outcomes(found):
    mixed = signs()
    mixed[::2] *= -1
    for example in (signs(), -signs(), mixed):
        assert "lossy=True" in cut_or_why(SoftmaxIfFound(found), example)
        assert cut_or_why(SoftmaxIfFound(lambda x: [found(x)]), example, [-example]) == ""


class RoutedRows(Experts):
    """Each expert gets the rows that are routed to it."""

    def between(self, h, x):
        y = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = torch.where(x[:, number] > 0)[0]
            if rows.numel() == 0:
                continue
            y.index_add_(0, rows, F.relu(expert(h[rows])))
        return h + y


class RoutedByMask(Experts):
    """The same with masks, and without a condition."""

    def between(self, h, x):
        y = h.clone()
        for number, expert in enumerate(self.experts):
            mask = x[:, number] > 0
            y[mask] = F.relu(expert(h[mask]))
        return y


class SoftmaxForNoRows(RoutedByMask):
    def between(self, h, x):
        rows = h[x[:, 0] > 0]
        return super().between(h.softmax(1) if len(rows) == 0 else h, x)


class FailsForNoRows(Hidden):
    """A dense model that fails if nothing is selected from its input."""

    def between(self, h, x):
        return h * x[x[:, 0] > 0][0, 0]


@pytest.mark.parametrize("kind", [RoutedRows, RoutedByMask])
def test_rows_that_are_routed_to_experts(kind):
    examples = [signs(1), signs(0, 1, 2), signs()]
    examples[0][2:] *= -1
    for number, example in enumerate(examples):
        assert cut_or_why(kind(), example, examples[:number] + examples[number + 1 :]) == ""
    assert "lossy=True" in cut_or_why(SoftmaxForNoRows(), signs())
    assert cut_or_why(FailsForNoRows(), signs()) == ""


@pytest.mark.parametrize(
    "read",
    [
        lambda _, x: "True" in str(x[0, 0] > 0),
        lambda _, x: f"{x[0, 0] > 0}" == "True",
        lambda _, x: f"{x[0, 0]:.1f}" == "0.0",
        lambda _, x: repr(x[0, :2]) == "tensor([0., 0.])",
        lambda h, _: h[0].tolist()[0] > 0,
        lambda h, _: len(h[0].tolist()) > 9,
        lambda _, x: (x[0, :2] > 0).numpy().any(),
    ],
)
def test_text_and_lists_of_values_are_read_too(read):
    with pytest.raises(TraceError, match=r"reads a number from a tensor, at test_never_silently_wrong.py:\d+"):
        keepk.trace(Reads(read), vectors())


class ReadsOwn(Hidden):
    """Reads a number from its own tensors, which training may change."""

    steps: torch.Tensor

    def __init__(self, read):
        super().__init__()
        self.read, self.scale = read, nn.Parameter(torch.rand(16))
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("power", torch.tensor([2, 3]))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("ready", torch.tensor(False))

    def between(self, h, _x):
        if self.training:
            self.steps += 1
        return h.softmax(1) if self.read(self) else h * self.scale


@pytest.mark.parametrize(
    "read",
    [
        lambda net: net.level.item() > 0.5,
        lambda net: float(net.level + 1) > 1.5,
        lambda net: int(net.level.round().long()) == 1,
        lambda net: net.steps.item() > 100,
        lambda net: int(net.steps) > 100,
        lambda net: net.scale[0].item() > 2,
        lambda net: net.scale.detach().numpy().std() > 2,
        lambda net: max(net.scale.tolist()) > 2,
        lambda net: len(net.scale.tolist()) < 9,
        lambda net: str(net.level) == "tensor(1.)",
    ],
)
def test_numbers_of_the_model_that_training_changes_are_refused(read):
    message = r"reads a number from its own parameters or buffers, at test_never_silently_wrong.py:\d+.*Training may"
    with pytest.raises(TraceError, match=message):
        keepk.trace(ReadsOwn(read), vectors())


@pytest.mark.parametrize("read", [lambda net: net.ready, lambda net: net.ready.item(), lambda net: net.level > 0.5])
def test_truth_values_of_the_model_have_two_outcomes(read):
    assert "lossy=True" in cut_or_why(ReadsOwn(read), vectors())


@pytest.mark.parametrize(
    "read",
    [lambda net: int(net.power[0]) > 5, lambda net: 7 in net.power.tolist(), lambda net: net.power[1].item() > 9],
)
def test_integers_that_forward_does_not_write_are_constants(read):
    assert cut_or_why(ReadsOwn(read), vectors(), [vectors()]) == ""


def test_an_accepted_list_of_values_is_not_exact():
    """Its length is the width, and it has the values of all channels."""
    for read in (lambda net: len(net.scale.tolist()) < 9, lambda net: net.scale.detach().numpy().std() > 2):
        graph = keepk.trace(ReadsOwn(read), vectors(), value_branches="accept")
        assert graph.units.lossy.tolist() == [True] * 16
        with pytest.raises(SpaceError, match="all values of the axis are read by Python"):
            pruned_to(ReadsOwn(read), 8, value_branches="accept")


@pytest.mark.parametrize(
    ("read", "exact"),
    [
        (lambda h, _: torch.equal(h, h.clamp(min=1e-12)), False),
        (lambda h, _: torch.allclose(h, h.cos()), False),
        (lambda h, _: torch.equal(h, h.abs()), True),
        (lambda h, _: h.equal(h * 2), True),
        (lambda h, x: torch.equal(h, F.pad(x, (0, 9))), False),
        (lambda h, _: torch.allclose(h, h.relu()), True),
        (lambda h, _: (h > 0).any(), True),
        (lambda h, _: (h >= 0).all(), False),
        (lambda h, _: h.sum() > 3, True),
        (lambda h, _: h.mean() > 3, False),
        (lambda h, _: torch.histc(h, 5, -1, 1)[2] > 3, False),
        (lambda h, _: torch.bincount((h > 0.2).flatten().long(), minlength=2)[0] > 3, False),
        (lambda _, x: torch.histc(x, 5, -1, 1)[2] > 3, True),
        (lambda h, _: (h[0] == 0).nonzero().sum() > 3, False),
        (lambda h, _: len(h[0].unique()) > 9, False),
    ],
)
def test_a_comparison_or_count_of_all_channels_is_not_exact(read, exact):
    why = cut_or_why(Reads(read), vectors(), [vectors()])
    assert (why == "") == exact, why


class CountsValues(Hidden):
    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.o(h) + torch.histc(h if self.counted else x, 5, -1, 1)[:3]

    counted = True


def test_a_histogram_of_channels_is_not_exact():
    assert "histc counts all values" in cut_or_why(CountsValues(), vectors())
    other = CountsValues()
    other.counted = False
    assert cut_or_why(other, vectors(), [vectors()]) == ""


class FloatOfFlag(Hidden):
    def between(self, h, x):
        return h * float((x > 0).any()) + h * int((x > 9).any())


def test_a_truth_value_may_become_a_number():
    assert cut_or_why(FloatOfFlag(), signs(), [-signs()]) == ""


@pytest.mark.parametrize("verb", [keepk.trace, keepk.inspect, keepk.compact])
def test_examples_that_are_no_list_are_refused(verb):
    with pytest.raises(TraceError, match=r"examples: got Tensor. Pass a list"):
        verb(Hidden(), examples=vectors())


def test_inspect_reports_what_the_trace_has_not_seen():
    report = keepk.inspect(Reads(lambda _, x: float(x.sum()) > 0), vectors())
    assert "forward reads a number from a tensor" in report.unknown[0]
    assert "Not seen by the trace" in str(report)

    class NeedsTargets(Hidden):
        def forward(self, x, targets=None):
            scores = super().forward(x)
            return F.mse_loss(scores, targets) if self.training else scores

    report = keepk.inspect(NeedsTargets(), vectors())
    assert "fails in train mode" in report.unknown[0]
    assert not keepk.inspect(NeedsTargets(), vectors(), training_example=(vectors(), torch.zeros(4, 3))).unknown


@pytest.mark.parametrize("option", [{"value_branches": "ignore"}, {"train_mode": "skip"}])
def test_options_of_a_trace_are_checked(option):
    with pytest.raises(TraceError, match=r"unknown. Pass 'check' or 'accept'"):
        keepk.trace(Hidden(), vectors(), **option)


# Widths


class DoublesNarrow(Hidden):
    def between(self, h, _x):
        return h * 2 if h.shape[1] < 6 else h


class Squeezes(Hidden):
    def between(self, h, _x):
        return h.squeeze()


@pytest.mark.parametrize(("kind", "fits", "fails"), [(DoublesNarrow, 6, 5), (Squeezes, 2, 1)])
def test_a_cut_is_replayed_at_its_own_size(kind, fits, fails):
    model = kind()
    graph = keepk.trace(model, vectors())
    before = state(model)
    message = rf"with {fails} of 'a', forward would not do what it did.*test_never_silently_wrong.py:\d+.*Nothing was"
    with pytest.raises(ShrinkError, match=message):
        keepk.shrink(model, graph, range(16 - fails))
    assert same_state(before, model)
    keepk.shrink(model, graph, range(16 - fits))
    assert model.a.out_features == fits
    again = kind()
    keepk.shrink(again, keepk.trace(again, vectors()), range(16 - fails), replay=False)
    assert again.a.out_features == fails


@pytest.mark.parametrize("shrink", ["each", "end"])
def test_an_event_that_forward_cannot_have_is_refused_and_changes_nothing(shrink):
    """With shrink="end" it is refused before the channels are masked: at the end it would be too late."""
    model = DoublesNarrow()
    optimizer = torch.optim.Adam(model.parameters())
    model(vectors()).sum().backward()
    optimizer.step()
    spaces = [keepk.channels("a", keep=4, schedule=[12, 4])]
    pruner = keepk.Pruner(model, spaces, optimizer, example=vectors(), shrink=shrink)
    pruner.step()
    model(vectors()).sum().backward()
    optimizer.step()
    before, held = state(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ShrinkError, match="with 4 of 'a', forward would not do what it did"):
        pruner.step()
    assert same_state(before, model)
    assert str(held) == str(optimizer.state_dict())
    assert (pruner.epoch, pruner.kept) == (1, {"a": 12})


def test_masks_that_are_never_cut_are_not_replayed():
    model = DoublesNarrow()
    pruner = pruned_to(model, 4, shrink="never")
    pruner.step()
    assert pruner.kept == {"a": 4}


def test_a_state_whose_widths_forward_cannot_have_is_refused():
    saved = pruned_to(DoublesNarrow(), 4, replay=False)
    saved.step()
    model = DoublesNarrow()
    pruner = pruned_to(model, 4)
    before = state(model)
    with pytest.raises(keepk.errors.KeepkError, match="forward would not do what it did"):
        pruner.load_state_dict(saved.state_dict())
    assert same_state(before, model)


def test_widths_that_were_replayed_are_not_replayed_again(monkeypatch):
    model = Hidden()
    graph = keepk.trace(model, vectors())
    passes = []
    monkeypatch.setattr(Hidden, "between", lambda self, h, _: passes.append(self.training) or h)
    keepk.shrink(model, graph, [0, 1])
    assert passes == [False, True]
    other = Hidden()
    again = keepk.trace(other, vectors())
    passes.clear()
    for _ in range(2):  # as when an event fails on another process and is tried again
        prepare(other, again, [0, 1])
    assert passes == [False, True]


def test_a_projection_stays_narrower_than_the_state():
    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.o = nn.LSTM(5, 8, proj_size=3, batch_first=True), nn.Linear(3, 2)

        def forward(self, x):
            return self.o(self.rnn(x)[0])

    model = Projected()
    graph = keepk.trace(model, torch.randn(4, 6, 5))
    hidden = next(space for space in graph.groups if len(space.units) == 8)
    with pytest.raises(ShrinkError, match=r"hidden_size=3 and proj_size=3. proj_size has to be smaller"):
        keepk.shrink(model, graph, hidden.units[:5])
    keepk.shrink(model, graph, hidden.units[:4])
    assert model.rnn.hidden_size == 4


class NormAfterBranch(nn.Module):
    """The channels of `a` are exact and scaled by a number that depends on their width; those of `m` are lossy."""

    def __init__(self):
        super().__init__()
        self.a, self.m, self.norm, self.b = nn.Linear(7, 16), nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 3)

    def forward(self, x):
        h = F.relu(self.a(x))
        return self.b(self.norm(self.m(h * (2.0 if h.shape[1] < 6 else 1.0))))


def test_numbers_that_depend_on_exact_widths_are_compared_beside_lossy_cuts():
    model = NormAfterBranch()
    spaces = [keepk.channels("a", keep=4), keepk.channels("m", keep=10, lossy=True)]
    before = state(model)
    with pytest.raises(ShrinkError, match=r"with 4 of 'a', forward would not do what it did when it was traced"):
        keepk.Pruner(model, spaces, example=vectors()).step()
    assert same_state(before, model)
    wide = [keepk.channels("a", keep=8), keepk.channels("m", keep=10, lossy=True)]
    keepk.Pruner(model, wide, example=vectors()).step()
    assert (model.a.out_features, model.m.out_features) == (8, 10)


# Models that change after their trace


class Anneals(Hidden):
    """Divides by a temperature that the training loop changes; some paths double the channels where few are left."""

    def __init__(self):
        super().__init__()
        self.temperature, self.rate = 1.0, 0.0

    def between(self, h, x):
        h = F.dropout(h / self.temperature, self.rate, self.training)
        if self.training and h.shape[1] < 6:
            return h * 2
        return h * 3 if x.sum() > 1e3 and h.shape[1] < 6 else h


@pytest.mark.parametrize(("attribute", "value"), [("temperature", 0.97), ("rate", 0.1)])
def test_a_model_that_changed_since_its_trace_is_compared_with_itself_as_it_is_now(attribute, value):
    model, example = Anneals(), vectors()
    graph = keepk.trace(model, example)
    setattr(model, attribute, value)
    before = state(model)
    with pytest.raises(ShrinkError, match=r"with 4 of 'a', forward would not do what it did when it was traced"):
        keepk.shrink(model, graph, range(12))
    assert same_state(before, model)
    keepk.shrink(model, graph, range(9))
    assert model.a.out_features == 7


class SwitchesOff(Hidden):
    """With `narrow` set, the branch for few channels is another one."""

    def __init__(self):
        super().__init__()
        self.narrow = False

    def between(self, h, _):
        return h * 2 if self.narrow and h.shape[1] < 6 else h


def test_a_cut_that_fitted_one_copy_of_a_model_is_replayed_on_another_that_changed():
    model, example = SwitchesOff(), vectors()
    graph = keepk.trace(model, example)
    other, its_graph = copy.deepcopy((model, graph))
    keepk.shrink(model, graph, range(12))
    other.narrow = True
    with pytest.raises(ShrinkError, match="forward would not do what it did"):
        keepk.shrink(other, its_graph, range(12))


class LazyMask(nn.Module):
    """Builds a mask in the first forward; in train mode, `squeeze` drops the axis of a single remaining channel."""

    def __init__(self, dtype):
        super().__init__()
        self.a, self.o, self.aux = nn.Linear(7, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.dtype, self.mask = dtype, None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], x.shape[1], dtype=self.dtype).tril()
        h = F.relu(self.a(x))
        scores = h @ h.transpose(1, 2)
        scores = scores.masked_fill(~self.mask, 0.0) if self.dtype is torch.bool else self.mask @ scores
        y = self.o(scores @ h)
        return (y, self.aux(h.sum(1).squeeze())) if self.training else y


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_cache_that_the_first_forward_fills_neither_hides_nor_causes_a_refusal(dtype):
    model, example = LazyMask(dtype), torch.randn(4, 5, 7)
    graph = keepk.trace(model, example)
    model(example)
    with pytest.raises(ShrinkError, match="in train mode"):
        keepk.shrink(model, graph, range(7))
    keepk.shrink(model, graph, range(4))
    assert model.train()(example)[1].shape == (4, 3)


class ScaledAttention(nn.Module):
    """Lossy channels of `q` and `k`, whose number scales the scores, and exact ones of `m`."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(7, 8), nn.Linear(7, 8), nn.Linear(7, 6)
        self.m, self.o = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        h = F.relu(self.m((q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ self.v(x)))
        return self.o(h * 2 if self.training and h.shape[-1] < 5 else h)


def test_a_lossy_cut_that_changes_a_number_does_not_hide_later_changes_of_exact_layers():
    model, example = ScaledAttention(), torch.randn(3, 5, 7)
    graph = keepk.trace(model, example)
    lossy, exact = (next(it.units for it in graph.groups if bool(it.lossy) is kind) for kind in (True, False))
    exact = next(it.units for it in graph.groups if it.name == "m")
    keepk.shrink(model, graph, lossy[:3])
    with pytest.raises(ShrinkError, match=r"with 4 of 'm', .*\(in train mode\)"):
        keepk.shrink(model, graph, exact[:8])
    keepk.shrink(model, graph, exact[:6])
    assert model.m.out_features == 6


class NormThenSqueeze(Hidden):
    def __init__(self):
        super().__init__()
        self.norm, self.temperature = nn.LayerNorm(16), 1.0

    def between(self, h, _x):
        return self.norm(h).squeeze() / self.temperature


def test_a_lossy_cut_of_a_changed_model_is_refused_if_forward_would_fail():
    model = NormThenSqueeze()
    graph = keepk.trace(model, vectors())
    model.temperature = 0.9
    with pytest.raises(ShrinkError, match=r"with 1 of 'a'"):
        keepk.shrink(model, graph, range(15))
    keepk.shrink(model, graph, range(12))
    assert model(vectors()).shape == (4, 3)


def test_exact_channels_that_have_become_lossy_are_refused():
    class MaySoftmax(Hidden):
        softens = False

        def between(self, h, _x):
            return h.softmax(1) if self.softens else h

    model = MaySoftmax()
    graph = keepk.trace(model, vectors())
    model.softens = True
    with pytest.raises(ShrinkError, match=r"changed since it was traced: removing channels of 'a' now changes more"):
        keepk.shrink(model, graph, range(4))


class Switches(Hidden):
    """Runs other code once `on` is set."""

    def __init__(self, off, on):
        super().__init__()
        self.on, self.ways, self.penalty = False, (off, on), None

    def between(self, h, _x):
        return self.ways[self.on](self, h)


def keeps_mean(net, h):
    net.penalty = h.mean()
    return h


def forgets_mean(_net, h):
    h.mean()
    return h


@pytest.mark.parametrize(
    ("off", "on", "fixed"),
    [
        (lambda _, h: h, lambda _, h: h.roll(1, 1), True),
        (lambda _, h: h, lambda _, h: h.flip(1), True),
        (lambda _, h: h + h[:, :1], lambda _, h: h + h[:, 1:2], True),
        (lambda _, h: h, lambda _, h: h.sort(1)[0], True),
        (forgets_mean, keeps_mean, False),
        (lambda _, h: h, keeps_mean, False),
    ],
)
@pytest.mark.parametrize("left", [1, 7])
def test_channels_that_a_changed_model_fixes_or_averages_are_not_cut(off, on, fixed, left):
    model = Switches(off, on)
    graph = keepk.trace(model, vectors())
    model.on, before = True, state(model)
    why = "can no longer be removed" if fixed else "mean over the axis"
    with pytest.raises(ShrinkError, match=why):
        keepk.shrink(model, graph, range(len(graph.units) - left))
    assert same_state(before, model)


class DoublesOne(Hidden):
    def between(self, h, _x):
        return h * 2 if h.shape[1] == 1 else h


@pytest.mark.parametrize("seed", [0, 16, 26, 28, 30])
@pytest.mark.parametrize("values", ["positive", "zero"])
def test_one_channel_that_is_inactive_for_the_example_is_not_compared_by_its_outputs_alone(values, seed):
    torch.manual_seed(seed)
    example = vectors().abs() if values == "positive" else torch.zeros(2, 7)
    torch.manual_seed(seed)
    model = DoublesOne()
    with torch.no_grad():
        model.a.weight.abs_().neg_(), model.a.bias.zero_()
    graph = keepk.trace(model, example)
    assert not model.a(example).relu().any()
    with pytest.raises(ShrinkError, match="with 1 of 'a'"):
        keepk.shrink(model, graph, range(15))


class Adapted(Hidden):
    """A layer with a low-rank adapter, which is merged into it at some point."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.merged = nn.Linear(7, 2, bias=False), nn.Linear(2, 16, bias=False), False

    def forward(self, x):
        return self.o(torch.relu(self.a(x) if self.merged else self.a(x) + self.up(self.down(x))))


def test_an_adapter_that_was_merged_after_the_trace_is_cut_with_its_layer():
    model, x = Adapted().double(), vectors().double()
    graph = keepk.trace(model, x)
    model.merged = True
    model.a.weight.data += model.up.weight.data @ model.down.weight.data
    units = next(group.units for group in graph.groups if group.name == "a")[:9]
    masked = copy.deepcopy(model)
    for name, axis, index in (it for unit in units for it in graph.slices(int(unit))):
        masked.get_parameter(name).data.select(axis, index).zero_()
    keepk.shrink(model, graph, units)
    assert (model.a.out_features, model.up.out_features) == (7, 7)
    assert relative_error(masked(x), model(x)) < 1e-12


class OneChannelEinsum(nn.Module):
    """torch multiplies in an `einsum` over one channel, instead of calling `bmm`."""

    def __init__(self, case):
        super().__init__()
        self.a, self.w, self.aux = nn.Linear(7, 8), nn.Parameter(torch.randn(8, 3)), nn.Linear(8, 3)
        self.case = case

    def forward(self, x):
        h = F.relu(self.a(x))
        if self.case == "dropout":
            h = F.dropout(h, 0.3, self.training)
        if self.case == "width" and x.sum() > 1e3 and h.shape[-1] == 1:
            h = h * 3
        if self.case == "branch" and x.sum() > 1e3:
            h = h * 3
        y = torch.einsum("bti,io->bto", h, self.w)
        return (y, self.aux(h.sum(1).squeeze())) if self.case == "squeeze" and self.training else y


@pytest.mark.parametrize("case", ["dropout", "branch", "width", "squeeze"])
def test_every_pass_is_compared_where_torch_itself_differs_for_one_channel(case):
    model, example = OneChannelEinsum(case), torch.randn(4, 5, 7)
    graph = keepk.trace(model, example)
    if case in ("width", "squeeze"):
        with pytest.raises(ShrinkError, match="forward would not do what it did when it was traced"):
            keepk.shrink(model, graph, range(7))
        return
    keepk.shrink(model, graph, range(7))
    assert model.train()(example).shape == (4, 5, 3)


# Repeatable


@functools.cache
def table(size, dtype):
    return torch.linspace(0, 1, size, dtype=dtype).cos()


class UsesTable(Hidden):
    def between(self, h, x):
        return h * table(len(x), x.dtype)[:, None]


def test_a_cached_function_is_traced_each_time_and_keeps_no_tensor_of_the_trace():
    model, example = UsesTable(), vectors()
    before = model(example)
    counts = [len(keepk.trace(model, example).units) for _ in range(3)]
    assert counts == [16, 16, 16]
    assert model(example).equal(before)


def test_a_model_without_values_is_traced():
    """Only its example has values."""
    with torch.device("meta"):
        model = Hidden()
    assert len(keepk.trace(model, vectors()).units) == 16


@pytest.mark.parametrize("example", [torch.randn(1, 7), (torch.randn(1, 7),), {"x": torch.randn(1, 7)}])
def test_a_batch_of_one_is_refused(example):
    with pytest.raises(TraceError, match="Pass an example with a batch size of at least 2"):
        keepk.trace(Hidden(), example)


def test_position_ids_of_one_row_beside_a_batch_are_fine():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.o = nn.Embedding(11, 8), nn.Embedding(5, 8), nn.Linear(8, 3)

        def forward(self, words, places):
            return self.o(F.relu(self.words(words) + self.places(places)))

    graph = keepk.trace(Positions(), (torch.randint(0, 11, (3, 5)), torch.arange(5)[None]))
    assert len(graph.units) == 8


class Edited(nn.Module):
    """Its forward is edited between saving and loading, in code that runs only at small widths."""

    edited = False

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.relu(self.first(x))
        if self.edited and h.shape[1] < 4:
            h = 2 * h
        return self.head(h.squeeze() if self.edited else h)


@pytest.mark.parametrize("left", [1, 3])
def test_a_saved_cut_is_replayed_by_load_with_an_example(tmp_path, left, monkeypatch):
    x, net = torch.randn(2, 5), Edited()
    keepk.shrink(net, keepk.trace(net, x), range(8 - left))
    keepk.save(net, tmp_path)
    assert torch.equal(keepk.load(Edited(), tmp_path, example=x)(x), net(x))
    monkeypatch.setattr(Edited, "edited", True)
    fresh = Edited()
    before = copy.deepcopy(fresh.state_dict())
    with pytest.raises(FileError, match=r"load: with .*first.*Nothing was changed. Load it with the code that the"):
        keepk.load(fresh, tmp_path, example=x)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), fresh.state_dict().values(), strict=True))
    keepk.load(fresh, tmp_path)  # not checked without an example
    assert fresh.first.out_features == left


def test_an_example_that_does_not_fit_is_no_reason_to_load(tmp_path):
    net = Edited()
    keepk.save(net, tmp_path)
    with pytest.raises(TraceError, match="forward"):
        keepk.load(Edited(), tmp_path, example=torch.randn(2, 6))


# Norms with a part of their parameters


class SumsOfNorm(Hidden):
    """A norm of the channels, with or without a scale and a shift, and the sum over all channels."""

    def __init__(self, norm):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
        self.mean = nn.Parameter(torch.randn(16))
        self.register_buffer("var", torch.rand(16) + 0.5)
        self.o = nn.Linear(1, 3)
        self.norm = norm

    def forward(self, x):
        return self.o(self.norm(self, self.a(x).sigmoid()).sum(1, keepdim=True))


def wide(h):
    """Three different values for each channel."""
    return h[..., None] * torch.tensor([1.0, 2.0, 4.0], dtype=h.dtype)


@pytest.mark.parametrize(
    ("norm", "exact"),
    [
        (lambda net, h: F.batch_norm(h, net.mean.detach(), net.var, net.scale, net.shift), True),
        (lambda net, h: F.batch_norm(h, net.mean.detach(), net.var, None, net.shift), False),
        (lambda net, h: F.batch_norm(h, net.mean.detach(), net.mean.detach() ** 2 + 1, None, net.shift), False),
        (lambda net, h: F.batch_norm(h, net.mean.detach(), net.var, None, None), False),
        (lambda net, h: F.group_norm(wide(h), h.shape[1], net.scale, net.shift)[..., 0], True),
        (lambda net, h: F.group_norm(wide(h), h.shape[1], net.scale, None)[..., 0], True),
        (lambda net, h: F.group_norm(wide(h), h.shape[1], None, net.shift)[..., 0], False),
        (lambda _, h: F.group_norm(wide(h), h.shape[1], None, None)[..., 0], False),
    ],
)
def test_a_norm_is_zero_only_by_its_scale(norm, exact):
    why = cut_or_why(SumsOfNorm(norm), vectors(), [vectors()])
    assert (why == "") == exact, why


class AddsInitialised(nn.Module):
    """Adds a tensor that `torch.nn.init` fills in forward, such as the identity, to a weight."""

    def __init__(self, init):
        super().__init__()
        self.a = nn.Linear(8, 12)
        self.weight = nn.Parameter(torch.randn(12, 12, 1))
        self.o = nn.Linear(12, 3)
        self.init = init

    def forward(self, x):
        filled = self.init(torch.empty_like(self.weight))
        return self.o(F.conv1d(self.a(x)[..., None], self.weight + filled)[..., 0])


@pytest.mark.parametrize("init", [nn.init.dirac_, nn.init.orthogonal_, nn.init.ones_])
def test_tensors_that_forward_initialises_are_followed(init):
    """Some of these functions do nothing on the meta device, so the trace would not see what they write."""
    torch.manual_seed(0)
    model, x = AddsInitialised(init).double().eval(), torch.randn(3, 8, dtype=torch.double)
    graph = keepk.trace(model, x)
    units = [int(unit) for group in graph.groups if not group.lossy for unit in group.units[::2]]
    assert bool(units) == (init is nn.init.ones_)
    if units:
        oracle = masked(model, graph, units)
        keepk.shrink(model, graph, units)
        assert relative_error(oracle(x), model(x)) < 1e-10
