"""Channel metrics compared with a loop over single units, on dense models and after cuts have moved positions."""

import copy
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import keepk
from keepk import metrics
from keepk.cut.record import record_of
from keepk.errors import RankError
from keepk.graph.ids.facts import Role
from keepk.metrics.channels import channel_scores, default_metric
from keepk.metrics.layers import Parameters, Slices, Traits, describes, layers_of, traits_of
from networks import NETWORKS
from random_networks import random_networks
from shrinking import backward
from strategies import seeds
from traced_once import traced_network
from untyped import untyped

WIRINGS = [
    ("conv_bn_flatten", "output"),
    ("conv_bn_flatten", "input"),
    ("residual", "output"),
    ("depthwise", "output"),
    ("depthwise_multiplier", "output"),
    ("grouped", "output"),
    ("grouped", "input"),
    ("grouped_transposed", "output"),
    ("transposed", "input"),
    ("attention_by_hand", "output"),
    ("multihead_attention", "output"),
    ("lstm", "output"),
    ("gru", "input"),
    ("concat", "input"),
    ("shared_module", "output"),
    ("dense_block", "input"),
]
CONVOLUTIONS = nn.Conv2d | nn.ConvTranspose2d
KINDS = {"output": ("channel", "source"), "input": ("channel", "read")}


class Loops:
    """A slow view of a traced model in plain Python: the entries of each single unit."""

    def __init__(self, model, graph):
        self.model, self.graph = model, graph
        convolutions = ((path, it) for path, it in model.named_modules() if isinstance(it, CONVOLUTIONS))
        self.groups = {f"{path}.weight": it.groups for path, it in convolutions}
        scaled = (path for path, it in model.named_modules() if isinstance(it, nn.BatchNorm1d | nn.BatchNorm2d))
        self.scales = {f"{path}.weight" for path in scaled}

    def values(self, unit, role, *, grad=False):
        """The entries of a unit that are still in the model, for each axis with this role."""
        home = self.graph.groups[int(self.graph.units.group[unit])]
        found: dict[tuple[str, int], list[float]] = {
            (tensor, axis): [] for tensor, axis, its in home.axes if (its or Role.CARRIER) is role
        }
        found = {key: values for key, values in found.items() if key[0] in dict(self.model.named_parameters())}
        for tensor, axis, index in self.graph.slices(unit):
            if (tensor, axis) in found:
                found[tensor, axis] += self.slice(tensor, axis, index, grad=grad)
        return found

    def slice(self, tensor, axis, index, *, grad=False):
        dense = self.dense(tensor, grad=grad)
        groups = self.groups.get(tensor, 1)
        if groups > 1 and axis == 1:
            group, column = divmod(index, dense.shape[1])
            height = len(dense) // groups
            part = dense[group * height : (group + 1) * height, column]
        else:
            part = dense.select(axis, index)
        return part[~part.isnan()].tolist()

    def dense(self, tensor, *, grad=False):
        """A parameter in its traced shape, with NaN where something was cut."""
        parameter = self.model.get_parameter(tensor)
        now = (parameter.grad if grad else parameter.detach()).double()
        cut = record_of(self.model)["tensors"].get(tensor)
        if cut is None:
            return now
        assert set(cut["kept"]) <= {"0", "1"}
        dense = torch.full(cut["shape"], math.nan, dtype=torch.float64)
        for place, row in enumerate(cut["kept"].get("0", range(len(dense)))):
            columns = cut["kept"].get("1", slice(None))
            if isinstance(columns, list):  # separate columns for each row
                columns = columns[place]
            dense[(row, columns) if dense.dim() > 1 else row] = now[place]
        return dense

    def weights(self, unit, role):
        return [value for values in self.values(unit, role).values() for value in values]

    def scale(self, unit):
        found = self.values(unit, Role.CARRIER).items()
        means = [mean([abs(value) for value in values]) for (tensor, _), values in found if tensor in self.scales]
        return mean(means) if means else None


def mean(values):
    return math.fsum(values) / len(values)


def size(values, kind):
    one, two = math.fsum(map(abs, values)), math.sqrt(math.fsum(value * value for value in values))
    mean_size, root_mean_square = one / len(values), two / math.sqrt(len(values))
    return {
        "l1": one,
        "l2": two,
        "l1_l2": (one + two) / 2,
        "mean l1": mean_size,
        "mean l2": root_mean_square,
        "mean l1_l2": (mean_size + root_mean_square) / 2,
    }[kind]


def slow(loops, unit, name, at):
    """The score of one unit by the metric of this name; None if the metric does not apply."""
    producer, reader = (loops.weights(unit, role) for role in (Role.PRODUCER, Role.READER))
    if name == "bn_scale":
        return loops.scale(unit)
    if name == "product":
        sides = [size(side, "l2") for side in (producer, reader) if side]
        return math.prod(sides) if sides else None
    if name == "outgoing":
        return size(reader, "l2") if reader else None
    if name.startswith("norm of"):
        side = producer if name == "norm of producer" else reader
        return size(side, "l1") if side else None
    side = producer if at == "output" else reader
    return size(side, name) if side else None


NAMED: dict[str, Callable[..., torch.Tensor]] = {
    "bn_scale": metrics.bn_scale,
    "l1": metrics.l1,
    "l2": metrics.l2,
    "l1_l2": metrics.l1_l2,
    "product": metrics.product,
    "outgoing": metrics.outgoing,
    "norm of producer": metrics.norm("l1", of="producer"),
    "norm of reader": metrics.norm("l1", of="reader"),
    **{f"mean {kind}": metrics.norm(kind, per_weight=True) for kind in ("l1", "l2", "l1_l2")},
}


def layers(model, graph, at, alive=None):
    spaces = [space for space in graph.groups if space.kind in KINDS[at]]
    return layers_of(graph, Parameters.of(model), spaces, graph.alive if alive is None else alive, at)


def compare(loops, at, tolerance, alive=None):
    """Compare every metric on every layer. Returns the number of comparisons."""
    compared = 0
    for layer in layers(loops.model, loops.graph, at, alive):
        for name, metric in NAMED.items():
            wanted = [slow(loops, unit, name, at) for unit in layer.units.tolist()]
            if None in wanted:
                assert wanted == [None] * len(layer)
                with pytest.raises(RankError, match=rf"layer '{layer.name}' has no"):
                    channel_scores(metric, [layer])
                continue
            assert channel_scores(metric, [layer]) == pytest.approx(wanted, rel=tolerance)
            compared += len(wanted)
    return compared


@pytest.mark.parametrize(("name", "at"), WIRINGS)
def test_every_metric_is_the_loop_over_units_before_and_after_shrinks(name, at):
    model, _, graph = traced_network(name)
    loops = Loops(model, graph)
    compared = [compare(loops, at, 1e-12)]
    for seed in (1, 2):
        keepk.shrink(model, graph, graph.choose(0.3, seed=seed))
        compared.append(compare(loops, at, 1e-12))
    assert compared[0] > compared[1] > compared[2] > 0 or name == "attention_by_hand"


@given(network=random_networks(), at=st.sampled_from(["output", "input"]), seed=seeds)
@settings(max_examples=10, phases=[Phase.generate])  # shrinking an example takes long
def test_every_metric_is_the_loop_over_units_of_random_networks(network, at, seed):
    model, example = network
    graph = keepk.trace(model, example)
    loops = Loops(model, graph)
    compare(loops, at, 1e-12)
    keepk.shrink(model, graph, graph.choose(0.4, seed=seed, lossy=True))
    compare(loops, at, 1e-12)


@pytest.mark.parametrize("name", ["conv_bn_flatten", "grouped", "dense_block", "lstm"])
def test_what_is_masked_is_no_channel_any_more(name):
    """In a run that masks, dead channels are still in the tensors."""
    model, _, graph = traced_network(name)
    for seed in (1, 2):
        alive = graph.alive
        alive[graph.choose(0.4, seed=seed)] = False
        found = layers(model, graph, "output", alive)
        assert all(alive[layer.units].all() for layer in found)
        assert compare(Loops(model, graph), "output", 1e-12, alive)
        keepk.shrink(model, graph, graph.choose(0.3, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["conv_bn_flatten", "grouped"])
def test_every_dtype_is_summed_in_one_that_has_room(name, dtype):
    model, example = NETWORKS[name]()
    model, example = model.to(dtype), example.to(dtype)
    with torch.no_grad():
        model.first.weight.mul_(1_000)  # squares overflow in half precision
    graph = keepk.trace(model, example)
    loops = Loops(model, graph)
    compare(loops, "output", 1e-5)
    keepk.shrink(model, graph, graph.choose(0.4, seed=0))
    assert compare(loops, "output", 1e-5)


def test_layers_that_are_wired_apart_keep_their_tensors_by_role():
    wanted = {
        "residual": ("first", {"first", "conv2"}, {"first.bias", "conv2.bias", "norm2"}, {"conv1", "head"}),
        "depthwise": ("first", {"first", "depthwise"}, {"first.bias", "depthwise.bias", "norm"}, {"pointwise"}),
    }
    for name, (home, *sides) in wanted.items():
        model, _, graph = traced_network(name)
        found = next(it for it in layers(model, graph, "output") if it.name == home)
        for slices, modules in zip((found.producer, found.carrier, found.reader), sides, strict=True):
            named = {it.name if it.name in modules else it.name.rpartition(".")[0] for it in slices}
            assert named == modules
        assert {it.module for it in found.producer} == {nn.Conv2d}


class MadeWeight(nn.Module):
    """A linear layer whose weight is computed in its forward."""

    def __init__(self, made):
        super().__init__()
        self.made, self.weight, self.scale = made, nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.ones(6, 1))
        self.register_buffer("mask", torch.ones(6, 4))

    def forward(self, x):
        return nn.functional.linear(x, self.made(self))


@pytest.mark.parametrize(
    "made",
    [
        lambda it: it.weight * it.mask,
        lambda it: it.mask * it.weight,
        lambda it: it.scale * it.weight,
        lambda it: it.weight.tanh(),
    ],
)
def test_a_weight_that_is_masked_or_scaled_is_what_produces(made):
    model = nn.Sequential(MadeWeight(made), nn.ReLU(), nn.Linear(6, 3))
    (found,) = layers(model, keepk.trace(model, torch.randn(2, 4)), "output")
    assert (found.name, [it.name for it in found.producer], [it.name for it in found.reader]) == (
        "0",
        ["0.weight"],
        ["2.weight"],
    )


def test_a_channel_that_is_flattened_has_all_of_its_columns():
    model, _, graph = traced_network("conv_bn_flatten")
    layer = layers(model, graph, "output")[1]
    columns = model.head.weight.detach().unflatten(1, (12, 15)).permute(1, 2, 0)
    assert torch.equal(layer.reader[0].tensor, columns)


def taylor(layer):
    return sum((it.tensor * it.grad).flatten(1).sum(1) for it in layer.producer).abs()


@pytest.mark.parametrize("name", ["conv_bn_flatten", "grouped", "residual", "lstm"])
def test_gradients_lie_beside_the_weights(name):
    model, example, graph = traced_network(name)
    loops = Loops(model, graph)
    for seed in (1, 2):
        model.zero_grad()
        backward(model, example)
        for layer in layers(model, graph, "output"):
            wanted = []
            for unit in layer.units.tolist():
                pairs = (loops.values(unit, Role.PRODUCER, grad=grad).values() for grad in (False, True))
                products = (w * g for ws, gs in zip(*pairs, strict=True) for w, g in zip(ws, gs, strict=True))
                wanted.append(abs(math.fsum(products)))
            assert channel_scores(taylor, [layer]) == pytest.approx(wanted, rel=1e-9, abs=1e-12)
        keepk.shrink(model, graph, graph.choose(0.3, seed=seed))


def narrow(widths=(6, 5), *, norm=True):
    torch.manual_seed(0)
    net = nn.Sequential(*(part for i, o in zip((4, *widths), widths) for part in block(i, o, norm=norm)))  # noqa: B905
    net.append(nn.Linear(widths[-1], 3))
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.weight.uniform_(-1, 1)
    return net


def block(inside, outside, *, norm):
    return [nn.Linear(inside, outside), *([nn.BatchNorm1d(outside)] if norm else []), nn.ReLU()]


def example():
    return torch.linspace(-1, 1, 12).view(3, 4)


def test_a_metric_gets_no_gradient_where_there_is_none_and_nothing_changes():
    net = narrow()
    pruner = keepk.Pruner(net, keepk.channels("*", keep=4, metric=taylor), example=example())
    before = str(net)
    words = r"metric taylor: failed on layer '0' \(TypeError: .*NoneType'\). Parameter '0.weight' has no gradient. "
    words += r"Call step\(\) after backward\(\) and before zero_grad\(\)."
    with pytest.raises(RankError, match=words) as caught:
        pruner.step()
    assert isinstance(caught.value.__cause__, TypeError)
    assert (pruner.epoch, pruner.kept, str(net)) == (0, {"*": 11}, before)
    net(example()).square().sum().backward()
    pruner.step()
    assert (pruner.epoch, pruner.kept) == (1, {"*": 4})


@pytest.mark.parametrize("wrapped", [lambda metric: metric, lambda metric: metrics.blend(0.5, weights=metric)])
def test_what_a_metric_raises_is_told_with_its_name_and_the_layer(wrapped):
    def divided(layer):
        return metrics.l2(layer) / untyped([1, 2]) if layer.name == "3" else metrics.l2(layer)

    net = narrow()
    pruner = keepk.Pruner(net, keepk.channels("*", keep=4, metric=wrapped(divided)), example=example())
    words = r"^metric divided: failed on layer '3' \(TypeError: .*\). Correct the metric; nothing was pruned.$"
    with pytest.raises(RankError, match=words) as caught:
        pruner.step()
    assert isinstance(caught.value.__cause__, TypeError)
    assert (pruner.epoch, pruner.kept) == (0, {"*": 11})


class Waits(TorchDispatchMode):
    """Counts device synchronisations: values that are read by the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("metric", [metrics.blend(0.5), metrics.blend(0.5, over="layer"), metrics.product, metrics.l2])
def test_a_space_is_brought_to_the_host_at_once(metric, monkeypatch):
    net, moved = narrow(), []
    found = layers(net, keepk.trace(net, example()), "output")
    to_host = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda it: moved.append(len(it)) or to_host(it))
    with Waits() as waits:
        channel_scores(metric, found)
    assert (moved, waits.count) == ([11], 0)


BY_BOTH_SIDES = metrics.blend(0.5, scale=metrics.l2, weights=metrics.outgoing)


@pytest.mark.parametrize("metric", [metrics.product, metrics.l1_l2, BY_BOTH_SIDES])
@pytest.mark.parametrize("name", ["residual", "shared_module", "conv_bn_flatten"])
def test_parts_of_a_channel_may_be_on_several_devices(name, metric):
    """The first part is on the meta device, and the others are moved to it."""
    model, _, graph = traced_network(name)
    model.first.to("meta")
    layer = layers(model, graph, "output")[0]
    devices = {it.tensor.device.type for it in layer.slices}
    assert devices == {"cpu", "meta"}
    assert metric(layer).shape == (len(layer),)


def test_gathering_is_done_once_for_both_norms(monkeypatch):
    net, taken = narrow(), []
    found = layers(net, keepk.trace(net, example()), "output")
    tensor = vars(Slices)["tensor"].fget
    monkeypatch.setattr(Slices, "tensor", property(lambda it: taken.append(it.name) or tensor(it)))
    metrics.l1_l2(found[0])
    assert taken == ["0.weight"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_term_of_the_blend_that_cannot_be_ranked_is_named(bad):
    net = narrow()
    found = layers(net, keepk.trace(net, example()), "output")
    with torch.no_grad():
        net[3].weight[2, 0] = bad
    words = "metric l1_l2: 1 of the 5 channels of '3' have NaN" if math.isnan(bad) else "layer '3': the weights of 1 of"
    with pytest.raises(RankError, match=words):
        channel_scores(metrics.blend(0.5), found)
    with pytest.raises(RankError, match="metric Blend: 6 of the 6 channels of '0' have NaN as their score"):
        channel_scores(metrics.blend(0.5, weights=lambda layer: torch.full((len(layer),), math.inf)), found)


MEANS = metrics.norm("l1_l2", per_weight=True)


def formula(layers_found, alpha, over, weights):
    """R = alpha R_B / R_B^max + (1 - alpha) R_L / R_L^max, written out."""
    terms = [(alpha, metrics.bn_scale), (1 - alpha, weights)]
    found = [[metric(layer).tolist() for layer in layers_found] for _, metric in terms]
    scores = []
    for number, layer in enumerate(layers_found):
        for channel in range(len(layer)):
            score = 0.0
            for (weight, _), values in zip(terms, found, strict=True):
                top = max(values[number]) if over == "layer" else max(map(max, values))
                score += weight * (values[number][channel] / top if top else 0.0)
            scores.append(score)
    return scores


@pytest.mark.parametrize("over", ["space", "layer"])
@pytest.mark.parametrize("silent", [[], ["1.weight"], ["1.weight", "4.weight"], ["0.weight"], ["0.weight", "3.weight"]])
def test_the_blend_is_the_papers_formula(over, silent):
    net = narrow().double()
    with torch.no_grad():
        for name in silent:
            net.get_parameter(name).zero_()
    found = layers(net, keepk.trace(net, example().double()), "output")
    for alpha in (0, 0.25, 0.5, 1):
        got = channel_scores(metrics.blend(alpha, over=over), found)
        assert got == pytest.approx(formula(found, alpha, over, MEANS), rel=1e-12, abs=1e-15)
        got = channel_scores(metrics.blend(alpha, weights=metrics.norm("l1_l2", per_weight=False), over=over), found)
        assert got == pytest.approx(formula(found, alpha, over, metrics.l1_l2), rel=1e-12, abs=1e-15)


def test_the_mean_of_a_norm_does_not_fall_with_the_number_of_inputs():
    """With equal weights and twice as many of them in the second layer, means are equal and sums are not."""
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.25)
    found = layers(net, keepk.trace(net, torch.zeros(2, 10)), "output")
    assert channel_scores(MEANS, found) == pytest.approx(0.25, rel=1e-6)
    sums = channel_scores(metrics.l1_l2, found)
    assert (sums[20:] > 1.3 * sums[:20]).all()


def test_the_ends_of_the_blend_are_its_terms_to_the_last_bit():
    """The scales are so close that dividing by the largest in float32 would make them equal."""
    net = narrow((64, 5))
    close = 0.75 + torch.arange(63) * 2.0**-24
    with torch.no_grad():
        net[1].weight.copy_(torch.cat([close.flip(0), torch.tensor([1.5])]))
        net[0].weight.zero_()[:, 0] = net[1].weight
        net[4].weight.fill_(0.5)
    found = layers(net, keepk.trace(net, example()), "output")
    for alpha, term in ((1, metrics.bn_scale), (0, MEANS)):
        wanted, got = channel_scores(term, found), channel_scores(metrics.blend(alpha), found)
        assert len(set(wanted[:64].tolist())) == 64
        assert np.array_equal(np.argsort(wanted, kind="stable"), np.argsort(got, kind="stable"))
        assert np.array_equal(np.unique(wanted, return_inverse=True)[1], np.unique(got, return_inverse=True)[1])


def test_terms_of_the_blend_can_be_others():
    net = narrow(norm=False).double()
    found = layers(net, keepk.trace(net, example().double()), "output")
    one, two = (channel_scores(metric, found) for metric in (metrics.outgoing, metrics.l1))
    got = channel_scores(metrics.blend(0.3, scale=metrics.outgoing, weights=metrics.l1), found)
    assert got == pytest.approx(0.3 * one / one.max() + 0.7 * two / two.max())


def test_a_term_of_the_blend_that_keeps_no_contract_is_named():
    def square(layer):
        return metrics.l2(layer).unsqueeze(1)

    net = narrow()
    found = layers(net, keepk.trace(net, example()), "output")
    for metric, words in (
        (
            metrics.blend(0.5, scale=square),
            r"metric square: returned torch.float32 of shape \(6, 1\) for the 6 channels",
        ),
        (
            metrics.blend(0.5, weights=untyped(lambda layer: [1.0] * len(layer))),
            "returned list for the 6 channels of '0'",
        ),
    ):
        with pytest.raises(RankError, match=words):
            channel_scores(metric, found)


@pytest.mark.parametrize(("norms", "wanted"), [((True, True), "blend"), ((True, False), "product")])
def test_the_default_is_the_blend_where_every_layer_has_a_norm(norms, wanted):
    net = nn.Sequential(*block(4, 6, norm=norms[0]), *block(6, 5, norm=norms[1]), nn.Linear(5, 3))
    found = layers(net, keepk.trace(net, example()), "output")
    assert default_metric(found) == (metrics.blend(1.0) if wanted == "blend" else metrics.product)
    gone = []
    for metric in (None, default_metric(found)):
        pruner = keepk.Pruner(copy.deepcopy(net), keepk.channels("*", keep=4, metric=metric), example=example())
        pruner.step()
        gone.append(pruner.state_dict()["channels"]["gone"])
    assert gone[0] == gone[1]
    assert len(gone[0]) == 11 - 4


@pytest.mark.parametrize("wrapped", [lambda metric: metric, lambda metric: metrics.blend(0.5, weights=metric)])
def test_a_metric_is_called_once_for_each_layer_and_event(wrapped):
    seen = []

    def noted(layer):
        seen.append((layer.name, len(layer)))
        return metrics.l2(layer)

    net = narrow()
    space = keepk.channels("*", keep=4, schedule=[8, 4, 4], metric=wrapped(noted))
    pruner = keepk.Pruner(net, space, example=example())
    assert seen == []
    pruner.step()
    assert seen == [("0", 6), ("3", 5)]
    left = [("0", net[0].out_features), ("3", net[3].out_features)]
    pruner.step()
    assert seen[2:] == left
    pruner.step()
    assert len(seen) == 4


@pytest.mark.parametrize("side", ["producer", "carrier", "reader"])
def test_writing_into_what_a_metric_sees_is_refused_by_name(side):
    def greedy(layer):
        getattr(layer, side)[0].tensor.mul_(2)
        return metrics.l2(layer)

    net = narrow()
    pruner = keepk.Pruner(net, keepk.channels("0", keep=2, metric=greedy), example=example())
    name = {"producer": "0.weight", "carrier": "0.bias", "reader": "3.weight"}[side]
    with pytest.raises(
        RankError, match=rf"metric greedy: changed parameter '{name}' .*in place. A metric must only return"
    ):
        pruner.step()
    assert (pruner.epoch, net[0].out_features) == (0, 6)


def test_writing_into_a_gradient_is_refused_by_name():
    def greedy(layer):
        layer.producer[0].grad.zero_()
        return metrics.l2(layer)

    net = narrow()
    net(example()).square().sum().backward()
    pruner = keepk.Pruner(net, keepk.channels("0", keep=2, metric=greedy), example=example())
    with pytest.raises(RankError, match=r"changed parameter '0.weight' or its gradient in place"):
        pruner.step()


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda layer: metrics.l2(layer)[1:], r"returned torch.float32 of shape \(5,\) for the 6 channels of '0'"),
        (lambda layer: metrics.l2(layer).sum(), r"returned torch.float32 of shape \(\) for the 6 channels"),
        (lambda layer: metrics.l2(layer).unsqueeze(0), r"of shape \(1, 6\) for the 6 channels of '0'. Return a float"),
        (lambda layer: metrics.l2(layer).int(), "returned torch.int32"),
        (lambda layer: metrics.l2(layer) > 0, "returned torch.bool"),
        (lambda layer: metrics.l2(layer).tolist(), "returned list"),
        (lambda _: None, "returned NoneType"),
        (lambda layer: metrics.l2(layer) * math.nan, "6 of the 6 channels of '0' have NaN as their score.*nothing was"),
        (metrics.norm("l2", of="reader").__call__, None),
        (partial(metrics.product), None),
    ],
)
def test_scores_that_are_none_are_refused_and_any_callable_will_do(metric, words):
    net = narrow()
    pruner = keepk.Pruner(net, keepk.channels("0", keep=2, metric=metric), example=example())
    if words is None:
        pruner.step()
        assert net[0].out_features == 2
        return
    with pytest.raises(RankError, match=words):
        pruner.step()
    assert (pruner.epoch, pruner.kept, net[0].out_features) == (0, {"0": 6}, 6)


@pytest.mark.parametrize("metric", [metrics.l2, metrics.bn_scale, metrics.blend(0.5), metrics.product])
def test_weights_that_diverged_are_named_and_nothing_is_pruned(metric):
    net = narrow()
    pruner = keepk.Pruner(net, keepk.channels("3", keep=2, metric=metric), example=example())
    with torch.no_grad():
        net[3].weight[2, 0] = math.nan
        net[4].weight[2] = math.nan
    with pytest.raises(RankError, match=r"1 of the 5 channels of '3' have NaN as their score"):
        pruner.step()
    assert net[3].out_features == 5


def test_numbers_of_metrics_that_make_no_sense():
    for alpha, words in ((1.5, "a share"), (-0.1, "negative"), (True, "got bool"), ("0.5", "got str")):
        with pytest.raises(RankError, match=rf"blend: alpha={alpha!r}: .*{words}"):
            metrics.blend(untyped(alpha))
    with pytest.raises(RankError, match=r"norm\(per_weight=1\): got int. Pass True or False"):
        metrics.norm("l1", per_weight=untyped(1))
    with pytest.raises(RankError, match=r"blend\(over='net'\): unknown. Pass \"space\" or \"layer\""):
        metrics.blend(0.5, over=untyped("net"))
    with pytest.raises(RankError, match=r"norm\(kind='l3', of=None\): unknown"):
        metrics.norm(untyped("l3"))
    with pytest.raises(RankError, match=r"norm\(kind='l1', of='both'\): unknown"):
        metrics.norm("l1", of=untyped("both"))
    for seed in (True, 1.0, None):
        with pytest.raises(RankError, match=rf"random\(seed={seed}\): got {type(seed).__name__}. Pass an int"):
            metrics.random(untyped(seed))


def test_random_scores_belong_to_the_unit_at_every_event_and_in_every_mode():
    drawn, gone = dict[int, float](), {}
    for mode in ("each", "end", "never"):
        score = metrics.random(seed=3)

        def noted(layer, score=score):
            scores = score(layer)
            for unit, value in zip(layer.units.tolist(), scores.tolist(), strict=True):
                assert drawn.setdefault(unit, value) == value
            return scores

        net = narrow()
        space = keepk.channels("*", keep=3, schedule=[9, 6, 3], metric=noted)
        pruner = keepk.Pruner(net, space, example=example(), shrink=mode)
        for _ in range(3):
            pruner.step()
        gone[mode] = pruner.state_dict()["channels"]["gone"]
    assert len(set(drawn.values())) == len(drawn) == 11
    assert gone["each"] == gone["end"] == gone["never"]
    graph = keepk.trace(narrow(), example())
    scores = np.concatenate([metrics.random(seed=3)(it).numpy() for it in layers(narrow(), graph, "output")])
    assert scores.tolist() == [drawn[unit] for unit in range(11)]
    other = np.concatenate([metrics.random(seed=4)(it).numpy() for it in layers(narrow(), graph, "output")])
    assert not np.isin(other, scores).any()


def test_attributes_of_a_metric_are_checked_where_they_are_given():
    for wrong in ({"ranks": ("weight",)}, {"ranks": "weights"}, {"ranks": ()}):
        with pytest.raises(
            RankError, match=r"^describes\(ranks=.*\): unknown. Pass a tuple of 'weights', 'channels'.$"
        ):
            describes(**wrong)
    with pytest.raises(
        RankError, match=r"^describes\(needs='weights'\): unknown. Pass a tuple of 'weights', 'gradients'"
    ):
        describes(ranks=("weights",), needs=untyped("weights"))
    with pytest.raises(RankError, match=r"^describes\(over='model'\): unknown. Pass one of 'space', 'layer'.$"):
        describes(ranks=("channels",), over=untyped("model"))


def test_unrelated_attributes_of_a_metric_are_not_taken_for_traits():
    class Mine:
        ranks, needs, over = 3, ["gradients"], "all"

        def __call__(self, layer):
            return layer.producer[0].tensor.flatten(1).sum(1)

    assert traits_of(Mine()) == Traits()


class RelativeToTheSpace:
    """A user's metric that divides by the largest norm of its whole space."""

    ranks, needs, over = ("channels",), ("weights",), "space"

    def __call__(self, layer):
        return self.scores([layer])[0]

    def scores(self, layers):
        found = [keepk.metrics.l1(layer) for layer in layers]
        return [it / max(other.max() for other in found) for it in found]


def test_a_users_metric_can_normalise_over_its_space():
    model, example = NETWORKS["conv_bn_flatten"]()
    space = keepk.channels("*", keep=5, metric=RelativeToTheSpace())
    by_norm = copy.deepcopy(model)
    keepk.Pruner(model, space, example=example).step()
    keepk.Pruner(by_norm, keepk.channels("*", keep=5, metric=keepk.metrics.l1), example=example).step()
    shapes = [[tuple(it.shape) for it in net.parameters()] for net in (model, by_norm)]
    assert shapes[0] == shapes[1]


def test_a_metric_that_returns_too_few_tensors_is_refused():
    class TooFew(RelativeToTheSpace):
        def scores(self, _layers):
            return []

    model, example = NETWORKS["conv_bn_flatten"]()
    with pytest.raises(RankError, match=r"metric TooFew: scores\(layers\) returned 0 tensors for 2 layers"):
        keepk.Pruner(model, keepk.channels("*", keep=5, metric=TooFew()), example=example)
