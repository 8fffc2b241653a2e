"""Laws of `compact`: equal outputs, the fixed point of counting degrees, idempotence, all or nothing."""

import copy
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

import keepk
from dead_networks import ACTIVATIONS, Pictures, finished, mlp, oracle, prune, pruned_networks
from keepk.compaction.compact import compact
from keepk.cut.record import record_of
from keepk.errors import OptimizerError, ShrinkError, TraceError
from keepk_paper.models import LeNet5, LeNet300
from masked import call, relative_error, zero_slices
from networks import NETWORKS, WITH_EXACT_UNITS, WITHOUT_EXACT_UNITS
from traced_once import traced_before, traced_network
from untyped import untyped

TOLERANCE = 1e-10
COMPACT = "keepk.compaction.compact"  # the module whose trace is replaced by one that was made before


@torch.no_grad()
def outputs(model, example):
    """The outputs in eval mode for the example, for other values, and for another batch size."""
    generator = torch.Generator().manual_seed(5)
    others = [torch.randn(size, *example.shape[1:], generator=generator).to(example) * 3 for size in (len(example), 5)]
    was = model.training
    result = [model.eval()(given) for given in (example, *others)]
    model.train(was)
    return result


@settings(max_examples=30)
@given(pruned_networks())
def test_the_function_stays_and_nothing_is_left_to_do(network):
    model, example = network
    before = outputs(model, example)
    report = compact(model, example)
    assert relative_error(before, outputs(model, example)) < TOLERANCE
    assert report.parameters_after == sum(p.numel() for p in model.parameters())
    assert (report.parameters_after < report.parameters_before) == (report.units > 0)
    assert report.units == sum(report.removed.values()) == sum(len(edits) for edits in report.edits)
    again = compact(model, example)
    assert again.units == again.rounds == 0
    assert again.edits == ()


@torch.no_grad()
def silence_rows(model, seed):
    """Zero half of the rows of every weight, including the first, and their biases, so that many get no input."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if "weight" in own and own["weight"].dim() > 1:
            rows = torch.rand(len(own["weight"]), generator=generator) < 0.5
            rows[0] = True
            for parameter in (it for it in own.values() if len(it) == len(rows)):
                parameter[rows] = 0


# Fewer units are removed than were masked: a dense block keeps 2 of 30, and weight norm, whose zeros are in g, all.
LEAST = {"dense_block": 28, "weight_norm": 0}

# Their forward branches on values, so nothing can be proved dead.
NOT_FOLLOWED = (
    "python_branch",
    "branch_on_the_input",
    "the_other_branch_is_cut_too",
    "branch_on_an_activation",
    "softmax_in_the_other_branch",
    "check_that_raises",
    "assertion_on_values",
    "loop_until_small",
    "either_of_two_values",
    "comparison_by_equal",
    "number_in_a_buffer",
)


@pytest.mark.parametrize("name", [name for name in WITH_EXACT_UNITS if name not in NOT_FOLLOWED])
def test_no_wiring_computes_anything_else_afterwards(name):
    """Half of all exact units are masked. All of them are removed: the result is at most as large as after a cut.

    Masking an exact unit equals removing it for every wiring, so the oracle is independent of how `compact` works.
    Other rows are zero as well, some of which are constants that must be folded.
    """
    model, example, graph = traced_network(name)
    silence_rows(model.eval(), seed=1)
    dead = graph.edits(graph.choose(0.5, seed=1)).units
    zero_slices(dict(model.named_parameters(remove_duplicate=False)), model, graph, dead)
    cut, own = copy.deepcopy((model, graph))
    assert len(keepk.shrink(cut, own, dead, replay=False)) > 0
    with torch.no_grad(), traced_before(model, example, graph, COMPACT):
        before = call(model, example)
        report = compact(model, example)
        assert relative_error(before, call(model, example)) < TOLERANCE
    assert report.units >= LEAST.get(name, len(dead))
    if name not in LEAST:
        for (path, ours), theirs in zip(model.named_parameters(), cut.parameters(), strict=True):
            assert all(a <= b for a, b in zip(ours.shape, theirs.shape, strict=True)), path


@pytest.mark.parametrize("name", [*NOT_FOLLOWED, *WITHOUT_EXACT_UNITS])
def test_what_cannot_be_proved_dead_stays(name):
    model, example, graph = traced_network(name)
    silence_rows(model.eval(), seed=1)
    # What a model that looks at values does may depend on its silenced weights, so it is traced with these.
    follows = nullcontext() if name in NOT_FOLLOWED else traced_before(model, example, graph, COMPACT)
    with torch.no_grad(), follows:
        before = call(model, example)
        report = compact(model, example)
        assert relative_error(before, call(model, example)) == 0
    assert report.units == 0
    if name in NOT_FOLLOWED:
        assert "look at values" in report.note


@settings(max_examples=40)
@given(
    st.lists(st.integers(2, 12), min_size=3, max_size=6),
    st.sampled_from(sorted(ACTIVATIONS)),
    st.sampled_from((0.3, 0.6, 0.85, 0.95)),
    st.integers(0, 2**16),
)
def test_a_chain_loses_what_counting_degrees_finds(sizes, activation, share, seed):
    torch.manual_seed(seed)
    model = prune(mlp(sizes, activation).double(), share, seed)
    marks = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    living = oracle(model, activation)
    compact(model, torch.randn(2, sizes[0], dtype=torch.float64))
    widths = [layer.in_features for layer in model if isinstance(layer, nn.Linear)][1:]
    assert widths == [max(len(layer), 1) for layer in living]
    if living[0]:
        kept = sorted(living[0])
        assert torch.equal(model[0].weight, marks[0][kept])
        assert torch.equal(model[0].bias, marks[1][kept])


def reader_case(reader, *, between=(), constant=0.5, channels=(4, 5)):
    """A convolution whose first filter is zero but has a bias, and a layer that reads it."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(3, channels[0], 3), *between, reader, nn.Flatten()).double().eval()
    with torch.no_grad():
        net.get_parameter("0.weight")[0] = 0
        net.get_parameter("0.bias")[0] = constant
    return net, torch.randn(2, 3, 8, 8, dtype=torch.float64)


FOLDS = {
    "conv": (nn.Conv2d(4, 5, 3), (), 1),
    "conv behind relu and max pool": (nn.Conv2d(4, 5, 2), (nn.ReLU(), nn.MaxPool2d(2)), 1),
    "conv behind a norm": (nn.Conv2d(4, 5, 2), (nn.BatchNorm2d(4), nn.Sigmoid()), 1),
    "conv behind an average pool": (nn.Conv2d(4, 5, 2), (nn.AvgPool2d(2),), 1),
    "padded max pool": (nn.Conv2d(4, 5, 2), (nn.MaxPool2d(3, 2, 1),), 1),
    "linear over pixels": (nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 5)), (nn.Tanh(),), 1),
    "padded conv": (nn.Conv2d(4, 5, 3, padding=1), (), 0),
    "same padding": (nn.Conv2d(4, 5, 3, padding="same"), (), 0),
    "conv without a bias": (nn.Conv2d(4, 5, 3, bias=False), (), 0),
    "grouped conv": (nn.Conv2d(4, 6, 3, groups=2), (), 0),
    "transposed conv": (nn.ConvTranspose2d(4, 5, 3), (), 0),
    "padded average pool": (nn.Conv2d(4, 5, 2), (nn.AvgPool2d(3, 2, 1),), 0),
    "frame of zeros": (nn.Conv2d(4, 5, 3), (nn.ZeroPad2d(1),), 0),
    "softmax over channels": (nn.Conv2d(4, 5, 3), (nn.Softmax(1),), 0),
    "group norm": (nn.Conv2d(4, 5, 3), (nn.GroupNorm(2, 4),), 0),
}


@pytest.mark.parametrize("name", FOLDS)
def test_a_constant_is_folded_only_where_that_is_exact(name):
    reader, between, folded = FOLDS[name]
    net, example = reader_case(copy.deepcopy(reader), between=copy.deepcopy(between))
    before, weights = outputs(net, example), copy.deepcopy(net.state_dict())
    report = compact(net, example)
    assert report.folded == report.units == report.removed["unfed"] == folded
    assert relative_error(before, outputs(net, example)) < TOLERANCE
    if not folded:
        assert all(torch.equal(value, weights[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize("name", ["padded conv", "conv without a bias", "transposed conv", "padded average pool"])
def test_a_constant_zero_goes_wherever_it_is_read(name):
    reader, between, _ = FOLDS[name]
    net, example = reader_case(copy.deepcopy(reader), between=(nn.ReLU(), *between), constant=-0.5)
    before = outputs(net, example)
    report = compact(net, example)
    assert (report.units, report.unfed, report.folded) == (1, 1, 0)
    assert relative_error(before, outputs(net, example)) < TOLERANCE


class SumsToo(nn.Module):
    """The channels are read by a sum and not by weights."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        x = self.one(x)
        return self.two(x) + x.sum(1, keepdim=True)


class Twice(SumsToo):
    """One layer is called twice, and a value that is constant in one call varies in the other."""

    def forward(self, x):
        return self.two(torch.sigmoid(self.one(x))) + self.two(torch.relu(self.one(x)))


class Tied(SumsToo):
    """The reader shares its weight with another layer."""

    def forward(self, x):
        return self.two(torch.sigmoid(self.one(x))) @ self.two.weight.abs()


class SumsTheBatch(SumsToo):
    """A value that depends on the batch size is not a constant."""

    def forward(self, x):
        return self.two(torch.sigmoid(self.one(x)).sum(0, keepdim=True)) + x[:, :3]


class InTraining(SumsToo):
    """A second head that is used only in training."""

    def __init__(self):
        super().__init__()
        self.aside, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.two(torch.relu(self.one(x)))
        return y + self.last(self.aside(x)) if self.training else y


class WithData(SumsToo):
    """The same memory is accessed through another object."""

    def forward(self, x):
        x = self.one(x)
        return self.two(x) + x.data[:, :3].tanh()


class InSlices(SumsToo):
    """Written into slices of another tensor."""

    def forward(self, x):
        x = self.one(x)
        y = torch.zeros_like(x)
        y[:, :3] = x[:, :3]
        y[:, 3:] = x[:, 3:]
        return self.two(x) + y[:, 1:4].relu()


@pytest.mark.parametrize("kind", [SumsToo, Twice, Tied, SumsTheBatch, InTraining, WithData, InSlices])
def test_what_reaches_the_output_in_another_way_stays(kind):
    torch.manual_seed(0)
    model, example = kind().double().eval(), torch.randn(3, 4, dtype=torch.float64)
    with torch.no_grad():
        model.one.weight[2] = 0
        if kind in (SumsToo, WithData, InSlices):
            model.two.weight.zero_()
    before, shapes = outputs(model, example), [p.shape for p in model.parameters()]
    report = compact(model, example)
    assert relative_error(before, outputs(model, example)) < TOLERANCE
    if kind is InTraining:
        assert model.aside.out_features == 6
        assert report.folded == 1
    else:
        assert [p.shape for p in model.parameters()] == shapes


class Looks(SumsToo):
    def forward(self, x):
        x = torch.relu(self.one(x))
        return self.two(x) if x[:, 0].sum() > 0 else x[:, :3]


class Writes(SumsToo):
    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        x = torch.relu(self.one(x))
        self.mean.copy_(x.mean(0))
        return self.two(x)


class Draws(SumsToo):
    def forward(self, x):
        return self.two(nn.functional.dropout(torch.relu(self.one(x)), 0.5, training=True))


@pytest.mark.parametrize(
    ("kind", "why"), [(Looks, "look at values"), (Writes, "writes into a parameter or buffer"), (Draws, "random")]
)
def test_a_forward_that_cannot_be_followed_is_left_alone(kind, why):
    torch.manual_seed(0)
    model = kind().eval()
    with torch.no_grad():
        model.two.weight[:, :3] = 0
    report = compact(model, torch.randn(3, 4))
    assert report.units == 0
    assert why in report.note
    assert str(report).startswith("nothing removed: forward ")
    assert model.one.out_features == 6


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_the_optimizer_goes_on_as_with_the_dead_left_in(make):
    options = {"lr": 0.05, **({"momentum": 0.9} if make is torch.optim.SGD else {})}
    torch.manual_seed(3)
    model = mlp([6, 9, 8, 4], "relu").double()
    prune(model, 0.6, 4)
    example = torch.randn(7, 6, dtype=torch.float64)
    optimizer = make(model.parameters(), **options)
    optimizer.param_groups[0]["lr"] = 0.0  # creates state without changing weights, so that zeros stay
    model(example).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.05
    assert compact(model, example, optimizer).units > 0
    for parameter in model.parameters():
        for value in optimizer.state[parameter].values():
            assert value.shape in (parameter.shape, ())
    old = [parameter.clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    model(example).square().sum().backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(old, model.parameters(), strict=True))


def test_followers_stay_copies():
    torch.manual_seed(0)
    model, example = mlp([6, 9, 8, 4], "sigmoid").double(), torch.randn(7, 6, dtype=torch.float64)
    prune(model, 0.7, 2)
    twin, average = copy.deepcopy(model), AveragedModel(model)
    by_name = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert compact(model, example, followers=[twin, average, by_name]).folded > 0
    for follower in (twin, average.module):
        assert relative_error(outputs(model, example), outputs(follower, example)) < TOLERANCE
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(by_name[name], tensor)


def test_a_follower_on_another_device_follows():
    """Usually an average on the CPU of a model on a GPU; here an average on the meta device."""
    torch.manual_seed(0)
    model = mlp([6, 9, 8, 4], "sigmoid")
    prune(model, 0.7, 2)
    average = copy.deepcopy(model).to("meta")
    assert compact(model, torch.randn(7, 6), followers=[average]).folded > 0
    assert [it.shape for it in average.parameters()] == [it.shape for it in model.parameters()]


def test_the_certificate_counts_what_is_alive_behind_a_compiled_part():
    torch.manual_seed(0)
    model = mlp([7, 12, 9, 4], "relu")
    model[0] = torch.compile(model[0], backend="eager")
    keepk.Pruner(model, keepk.weights("*", keep=40, name="weights")).step()
    assert compact(model, torch.randn(3, 7)).units > 0
    alive = sum(int(parameter.count_nonzero()) for parameter in model.parameters())
    assert record_of(model)["certificate"]["weights"]["alive"] == alive > 0


def test_saved_and_loaded(tmp_path):
    torch.manual_seed(0)
    model, example = finished(Pictures(0, True, "residual", "relu"), torch.randn(2, 3, 9, 9), 0.8, 1)
    assert compact(model, example).units > 0
    keepk.save(model, tmp_path / "model")
    loaded = keepk.load(Pictures(0, True, "residual", "relu").double(), tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(outputs(model, example), outputs(loaded, example), strict=True))


def test_a_model_in_training_stays_in_training_and_keeps_its_statistics():
    torch.manual_seed(0)
    model, example = finished(Pictures(1, True, "none", "relu"), torch.randn(4, 3, 9, 9), 0.8, 3)
    model.train()
    before = outputs(model, example)
    assert compact(model, example).units > 0
    assert model.training
    assert model.norm.num_batches_tracked == 0
    assert relative_error(before, outputs(model, example)) < TOLERANCE
    model(example).sum().backward()


def test_a_refused_cut_leaves_everything_as_it_was():
    torch.manual_seed(0)
    model, example = mlp([6, 9, 8, 4], "sigmoid").double(), torch.randn(7, 6, dtype=torch.float64)
    prune(model, 0.7, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    smaller, foreign = copy.deepcopy(model), copy.deepcopy(model)
    smaller[2] = nn.Linear(3, 3)
    foreign[4] = nn.Identity()
    for follower, why in ((smaller, "Pass a follower to every shrink of the model"), (foreign, "has no tensor")):
        with pytest.raises(ShrinkError, match=why):
            compact(model, example, followers=[follower])
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert compact(model, example).folded > 0


CALLS = {"made": 0, "allowed": 10**9}


def tire(_module, _arguments):
    CALLS["made"] += 1
    if CALLS["made"] > CALLS["allowed"]:
        raise RuntimeError("tired")


def test_a_failure_in_a_later_round_takes_the_earlier_ones_back(monkeypatch):
    """With one head left, the positions within it become separate units, which takes a second round."""
    model, example = NETWORKS["attention_by_hand"]()
    prune(model, 0.9, 3)
    model.register_forward_pre_hook(tire)
    monkeypatch.setitem(CALLS, "made", 0)
    assert compact(copy.deepcopy(model), example).rounds > 1
    monkeypatch.setitem(CALLS, "allowed", CALLS["made"] - 1)
    monkeypatch.setitem(CALLS, "made", 0)
    before, settings_before = copy.deepcopy(model.state_dict()), plain_numbers(model)
    with pytest.raises(RuntimeError, match="tired"):
        compact(model, example)
    assert plain_numbers(model) == settings_before
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def plain_numbers(model):
    return [{name: v for name, v in vars(module).items() if isinstance(v, int)} for module in model.modules()]


def test_a_wholly_dead_network_keeps_one_unit_of_each_layer():
    model = mlp([5, 7, 6, 3], "sigmoid").double()
    with torch.no_grad():
        model[2].weight.zero_()
    example = torch.randn(2, 5, dtype=torch.float64)
    before = outputs(model, example)
    assert compact(model, example).units == 11
    assert (model[0].out_features, model[2].out_features) == (1, 1)
    assert relative_error(before, outputs(model, example)) < TOLERANCE


@pytest.mark.parametrize(("build", "share"), [(LeNet300, 0.985), (LeNet5, 0.99)], ids=["300", "5"])
def test_lenets_by_magnitude(build, share):
    torch.manual_seed(0)
    model, example = build().double().eval(), torch.randn(2, 1, 28, 28, dtype=torch.float64)
    spaces = [keepk.weights("*", prune=share, schedule=keepk.OneShot())]
    keepk.Pruner(model, spaces).step()
    before = outputs(model, example)
    report = compact(model, example)
    assert report.units > 100
    assert relative_error(before, outputs(model, example)) < TOLERANCE
    line = str(report)
    assert repr(report) == f"<Compaction: {line}>"
    assert "\n" not in line
    assert f"{report.units} dead units removed in" in line
    assert f"-> {report.parameters_after:,} parameters" in line


def test_bad_input_is_refused():
    with pytest.raises(ShrinkError, match=r"compact: got int as the model\. Pass a torch\.nn\.Module"):
        compact(untyped(3), torch.zeros(2, 4))
    with pytest.raises(TraceError, match="its forward failed on the example"):
        compact(nn.Linear(3, 3), torch.zeros(2, 4))
    with pytest.raises(TraceError, match="example: got str"):
        compact(nn.Linear(3, 3), "pictures")


def test_a_model_without_units_is_left_alone():
    report = compact(nn.Linear(3, 3), torch.zeros(2, 3))
    assert (report.units, report.rounds, report.edits, report.note) == (0, 0, (), "")


def test_a_wrong_optimizer_is_refused_where_nothing_is_dead():
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(OptimizerError, match=r"got StepLR, a learning-rate scheduler\. Pass the torch.optim.Optimizer"):
        keepk.compact(net, torch.zeros(2, 4), untyped(scheduler))
    with pytest.raises(OptimizerError, match="holds no parameter of the model"):
        keepk.compact(net, torch.zeros(2, 4), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    keepk.compact(net, torch.zeros(2, 4), [optimizer])
