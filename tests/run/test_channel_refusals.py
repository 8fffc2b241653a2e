"""Impossible channel spaces are refused early, with what, where, got what, do what; nothing changes."""

import copy
import itertools
import math
import re
import warnings

import pytest
import torch
from torch import nn

import keepk
from keepk.errors import KeepkError, OptimizerError, PlanError, RankError, ShrinkError, SpaceError, TraceError
from keepk.metrics.layers import describes
from keepk.run.channel_members import find_channels
from networks import NETWORKS
from saved_models import looks, unchanged
from traced_once import traced_network
from untyped import untyped


def small():
    """A network with 6 channels in '0' and 5 in '2'; '4' is the output."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def inputs():
    return torch.linspace(-1, 1, 8).view(2, 4)


def refused(kind, words, model, spaces, **arguments):
    before = looks(model)
    with pytest.raises(kind, match=words):
        keepk.Pruner(model, spaces, **arguments)
    unchanged(model, before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"keep": 3, "prune": 0.5}, "both keep=3 and prune=0.5"),
        ({"keep": 2.0}, "space 'f': keep=2.0: got float. Pass an int of at least 1"),
        ({"keep": 0}, "keep=0: too small"),
        ({"prune": 50}, "space 'f': prune=50: a share lies between 0 and 1"),
        ({"prune": 1.0}, "space 'f': prune=1.0 keeps none. Prune less, or pass keep=."),
        ({"keep": 3, "at": "middle"}, "space 'f': at='middle'. Pass \"output\" or \"input\""),
        ({"keep": 3, "at": None}, 'at=None. Pass "output" or "input"'),
        ({"keep": 3, "round_to": 0}, "space 'f': round_to=0: too small. Pass an int of at least 1"),
        ({"keep": 3, "round_to": 8.0}, "round_to=8.0: got float"),
        ({"keep": 3, "round_to": True}, "round_to=True: got bool"),
        ({"keep": 3, "lossy": 1}, "space 'f': lossy=1: got int. Pass True or False"),
        ({"keep": 3, "lossy": "no"}, "lossy='no': got str"),
        ({"keep": 3, "layer_floor": 0}, "space 'f': layer_floor=0: too small. Pass an int of at least 1"),
        ({"keep": 3, "layer_floor": 1.5}, "layer_floor=1.5: got float"),
        ({"keep": 3, "metric": "l1"}, "space 'f': metric='l1' is not callable. Pass a function, see keepk.metrics"),
        ({"keep": 3, "metric": 0.5}, "metric=0.5 is not callable"),
        ({"keep": 3, "name": ""}, r"channels\(name=''\): not a name"),
        ({"keep": 3, "exclude": 7}, r"channels\(select='f', exclude=7\): not globs. .*such as 'features.\*'"),
    ],
)
def test_a_space_that_makes_no_sense(arguments, words):
    with pytest.raises(SpaceError, match=words):
        keepk.channels("f", **arguments)


@pytest.mark.parametrize(
    ("spaces", "words"),
    [
        ([keepk.channels("00", keep=1)], r"space '00': select='00' matches no module. Nearest names: '0'"),
        ([keepk.channels("*", exclude="5", keep=2)], r"exclude='5' matches no module. Nearest names: '0', '1', '2'"),
        ([keepk.channels(["0", "conv*"], keep=1)], r"space '0\+conv\*': select='conv\*' matches no module"),
        (
            [keepk.channels("*.weight", keep=1)],
            r"matches no module. .*channels takes names of modules, keepk.weights names of parameters.$",
        ),
        ([keepk.channels("*.wait", keep=1)], r"'\*.wait' matches no module. Nearest names: '0', '1', '2'.$"),
        (
            [keepk.channels("0", keep=2, metric=keepk.metrics.magnitude)],
            "^space '0': metric magnitude ranks weights, not channels. Use keepk.metrics.l2 or product.$",
        ),
        (
            [keepk.channels("0", keep=2, metric=describes(ranks=("weights",))(lambda weight: weight))],
            "^space '0': metric <lambda> ranks weights, not channels. Use keepk.metrics.l2 or product.$",
        ),
        ([keepk.channels("1", keep=1)], r"'1' matches modules, but none that has channels at its output. .*: '0', '2'"),
        ([keepk.channels("*", keep=12)], r"keep=12, but \['\*'\] matches only 11 channels. Choose keep <= 11"),
        ([keepk.channels("*", prune=0.95)], "prune=0.95 of 11 channels keeps none. Prune less, or pass keep="),
        ([keepk.channels("*", keep=1)], "keep=1, but layer_floor=1 in 2 layers needs 2 channels. Choose keep >= 2"),
        (
            [keepk.channels("*", keep=7, layer_floor=4)],
            "keep=7, but layer_floor=4 in 2 layers needs 8 channels. Choose keep >= 8 or a lower floor",
        ),
        (
            [keepk.channels("*", keep=9, name="all"), keepk.channels("2", keep=1)],
            "space '2': the channels of '2' are in space 'all' too. Spaces are disjoint: narrow one, or use exclude=",
        ),
        ([keepk.channels("0", keep=2), keepk.channels("0", keep=3)], "space '0': two spaces have this name"),
        ([keepk.channels("0", keep=2), keepk.weights("0*", keep=3, name="0")], "space '0': two spaces have this name"),
    ],
)
def test_spaces_that_do_not_fit_the_model(spaces, words):
    refused(SpaceError, words, small(), spaces, example=inputs())


def test_channels_that_are_fixed_come_with_the_graphs_own_reason():
    for name, select in (("roll", "first"), ("topk_over_channels", "first"), ("output", "head")):
        model, example, graph = traced_network(name)
        fixed = next(it for it in graph.fixed if it.tensor == f"{select}.weight" and it.axis == 0)
        words = f"space '{select}': select='{select}' matches no channel that can be removed: axis 0 of "
        words += f"'{select}.weight' is fixed, {fixed.why}. keepk.inspect(model, example) lists what can shrink."
        refused(SpaceError, f"^{re.escape(words)}$", model, keepk.channels(select, keep=1), example=example)
    refused(
        SpaceError,
        "axis 1 of '0.weight' is fixed, is multiplied with an axis that has no channels",
        small(),
        keepk.channels("0", keep=1, at="input"),
        example=inputs(),
    )


def test_channels_that_are_lossy_come_with_the_reason_and_the_way_out():
    model, example, graph = traced_network("layer_norm")
    why = graph.groups[0].lossy
    words = "space 'first': select='first' matches 12 channels of 'first', but removing one changes more than "
    words += f"zeroing it would: {why}. Use lossy=True to remove them anyway."
    refused(SpaceError, f"^{re.escape(words)}$", model, keepk.channels("first", keep=3), example=example)
    pruner = keepk.Pruner(model, keepk.channels("first", keep=3, lossy=True), example=example)
    pruner.step()
    assert model.first.out_features == 3


def test_one_layer_under_two_names_is_one_layer():
    """The convolutions of a residual connection produce the same channels."""
    model, example = NETWORKS["residual"]()
    spaces = [keepk.channels("first", keep=4), keepk.channels("conv2", keep=4)]
    refused(
        SpaceError, "space 'conv2': the channels of 'first' are in space 'first' too", model, spaces, example=example
    )


def test_an_example_that_is_missing_or_does_not_fit():
    space = keepk.channels("0", keep=2)
    refused(SpaceError, r"space '0': channels are found by a trace.* Pass one with example=", small(), space)
    for example, words in (
        (torch.zeros(2, 5), r"model Sequential: its forward failed on the example \(RuntimeError: .*2x5 and 4x6"),
        ({"x": inputs()}, "its forward failed on the example"),
        ("batch", "example: got str. Pass a tensor, a tuple"),
    ):
        refused(TraceError, words, small(), space, example=example)


def accepted(graph, space):
    """None if K can be met, else the numbers at the end of the error."""
    modules = dict.fromkeys(["first", "second", "grouped", "last", "head"], nn.Identity())
    try:
        find_channels(graph, modules, [space])
    except SpaceError as error:
        return [int(number) for number in re.findall(r"\d+", str(error).rpartition("Nearest possible:")[2])], str(error)
    return None, ""


def nearest_by_counting(possible, keep):
    below, above = [it for it in possible if it < keep], [it for it in possible if it > keep]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


@pytest.mark.parametrize("floor", [1, 3, 5])
@pytest.mark.parametrize("round_to", [2, 4, 5, 7])
def test_the_nearest_counts_of_round_to_are_those_of_counting(round_to, floor):
    """A layer keeps all of its channels, or a multiple of `round_to` that is not below the floor."""
    *_, graph = traced_network("linears")
    allowed = [[n for n in range(1, size + 1) if n == size or (n % round_to == 0 and n >= floor)] for size in (12, 9)]
    possible = {sum(counts) for counts in itertools.product(*allowed)}
    for keep in range(1, 22):
        space = keepk.channels(["first", "second"], keep=keep, round_to=round_to, layer_floor=floor)
        got, words = accepted(graph, space)
        assert (got is None) == (keep in possible)
        if keep not in possible and keep > min(possible):
            assert got == nearest_by_counting(possible, keep)
            assert f"keep={keep} of 21 channels cannot be met: round_to={round_to} restricts the width" in words
        elif keep not in possible:
            assert f"needs {min(possible)} channels. Choose keep >= {min(possible)}" in words


@pytest.mark.parametrize("round_to", [None, 4, 6])
@pytest.mark.parametrize("select", [("first",), ("grouped",), ("first", "grouped", "last")])
def test_the_nearest_counts_of_bound_groups_are_those_of_counting(select, round_to):
    """A convolution with 2 groups, which lose equal numbers of inputs and of outputs."""
    *_, graph = traced_network("grouped")
    sizes = {"first": 12, "grouped": 8, "last": 7}
    allowed = []
    for name in select:
        steps = range(1, sizes[name] + 1) if name == "last" else range(2, sizes[name] + 1, 2)
        allowed.append([n for n in steps if round_to is None or n == sizes[name] or n % round_to == 0])
    possible = {sum(counts) for counts in itertools.product(*allowed)}
    total = sum(sizes[name] for name in select)
    for keep in range(min(possible), total + 1):
        got, words = accepted(graph, keepk.channels(list(select), keep=keep, round_to=round_to))
        assert (got is None) == (keep in possible)
        if keep not in possible:
            assert got == nearest_by_counting(possible, keep)
            assert f"keep={keep} of {total} channels cannot be met: 2 parts must keep equal numbers" in words


class JoinedGroups(nn.Module):
    """A convolution with two groups over two layers, which lose equal numbers."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
        self.grouped = nn.Conv2d(8, 6, 1, groups=2)
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.grouped(torch.cat([self.left(x), self.right(x)], 1).relu()).mean((2, 3)))


def test_bound_layers_are_selected_together():
    pictures = torch.zeros(2, 3, 4, 4)
    words = "space 'left': some of its layers must lose as many channels as 'right', which is not in the space. "
    words += "Select that module too, or exclude both."
    refused(SpaceError, re.escape(words), JoinedGroups(), keepk.channels("left", keep=2), example=pictures)
    model = JoinedGroups()
    keepk.Pruner(model, keepk.channels(["left", "right"], keep=4), example=pictures).step()
    assert (model.left.out_channels, model.right.out_channels) == (2, 2)


def test_a_channel_and_its_reads_are_not_counted_in_one_run():
    model, example = NETWORKS["dense_block"]()
    outputs = keepk.channels("convs.0", keep=2, name="outputs")
    reads = keepk.channels("norms.1", keep=6, name="reads", at="input")
    words = "spaces 'outputs' and 'reads': channels of 'convs.0' are read by 'norms.1', whose channels are removed "
    words += "with them. Put both layers into one space"
    for spaces in ([outputs, reads], [reads, outputs]):
        refused(SpaceError, words, model, spaces, example=example)


def test_modes_and_lists_of_the_wrong_kind():
    space = keepk.channels("0", keep=2)
    for shrink in ("sometimes", None, True):
        words = f'Pruner: shrink={shrink!r}. Pass "each", "end" or "never"'
        refused(PlanError, re.escape(words), small(), space, example=inputs(), shrink=shrink)
    refused(SpaceError, r"Pass a list of keepk.weights\(...\) and keepk.channels\(...\)", small(), ["0"])


def test_optimizers_that_cannot_follow():
    model, space = small(), keepk.channels("0", keep=2)
    for optimizer, words in (
        (
            torch.optim.SGD(small().parameters(), lr=0.1),
            "optimizer SGD: holds no parameter of the model. Build it from",
        ),
        (torch.optim.Adafactor(model.parameters()), "optimizer Adafactor: keeps its second moments per row and column"),
        ("sgd", "optimizer: got str. Pass a torch.optim.Optimizer"),
    ):
        refused(OptimizerError, words, model, space, optimizer=optimizer, example=inputs())


class Wrapped(nn.Module):
    """Looks like DistributedDataParallel but is not one."""

    def __init__(self, module):
        super().__init__()
        self.module, self.reducer = module, None


def refused_step(pruner, model, kind, words, *arguments):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=keepk.KeepkWarning)  # some have layers that the plan does not know
        before, kept = looks(model), pruner.kept
        with pytest.raises(kind, match=words):
            pruner.step(*arguments)
        unchanged(model, before)
        assert (pruner.epoch, pruner.kept) == (0, kept)


def test_a_wrapper_that_is_none():
    model = small()
    pruner = keepk.Pruner(model, keepk.channels("0", keep=2), example=inputs())
    for wrapper in (Wrapped(model), model, "ddp"):
        words = f"step: got {type(wrapper).__name__}. Pass the DistributedDataParallel wrapper of the model, or nothing"
        refused_step(pruner, model, ShrinkError, words, wrapper)
    pruner.step()
    assert pruner.kept == {"0": 2}


def replace_layer(model):
    model[2] = nn.Linear(6, 5)


def take_layer_out(model):
    model[2] = nn.Identity()


def resize_weight(shape):
    def change(model):
        model[2].weight.data = torch.ones(shape)

    return change


@pytest.mark.parametrize("shrink", ["each", "end", "never"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            replace_layer,
            "parameter '2.weight': the model has a different object than when the Pruner was made. Change the",
        ),
        (
            take_layer_out,
            r"parameter '2.weight': no longer exists, but the Pruner left it with shape .* then make the Pruner",
        ),
        (
            resize_weight((5, 7)),
            r"parameter '2.weight': has shape \(5, 7\), but the Pruner left it with shape \(5, 6\)",
        ),
        (
            resize_weight((4, 6)),
            r"parameter '2.weight': has shape \(4, 6\), but the Pruner left it with shape \(5, 6\)",
        ),
        (
            resize_weight((6, 5)),
            r"parameter '2.weight': has shape \(6, 5\), but the Pruner left it with shape \(5, 6\)",
        ),
    ],
)
def test_a_model_that_was_changed_behind_the_pruners_back(change, words, shrink):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = keepk.Pruner(model, keepk.channels("*", keep=4), optimizer, example=inputs(), shrink=shrink)
    change(model)
    refused_step(pruner, model, ShrinkError, words)


def test_a_metric_without_what_it_ranks_by_is_refused_before_the_run():
    for metric, words in (
        (
            keepk.metrics.bn_scale,
            "metric bn_scale: layer '0' has no BatchNorm with a scale. Leave the layer out, or rank",
        ),
        (keepk.metrics.blend(0.5), "metric bn_scale: layer '0' has no BatchNorm"),
    ):
        with pytest.raises(RankError, match=words):
            keepk.Pruner(small(), keepk.channels("*", keep=4, metric=metric), example=inputs())
    model, example = NETWORKS["zero_preserving_sum"]()
    words = r"metric l2: layer 'first' has no weights on the reader side. Choose the other side"
    with pytest.raises(RankError, match=words):
        keepk.Pruner(model, keepk.channels("first", keep=4, metric=keepk.metrics.outgoing), example=example)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_cannot_be_ranked_are_refused_before_the_run(value):
    model = small()
    with torch.no_grad():
        model[0].weight[1, 1] = value
    with pytest.raises(RankError, match=r"'0'.* nothing was pruned"):
        keepk.Pruner(model, keepk.channels("*", keep=4), example=inputs())


def test_a_parametrized_layer_has_the_name_that_its_user_gave_it():
    model, example = NETWORKS["weight_norm"]()
    assert keepk.Pruner(model, keepk.channels("second", keep=1), example=example).plan == {"second": (1,)}


def test_an_exclude_that_leaves_nothing_says_so():
    for select, exclude in (("0", ["0"]), ("*", ["0", "2"]), ("*", ["*"])):
        words = f"select={select!r} leaves no channel after exclude={exclude}. Exclude less"
        space = keepk.channels(select, exclude=exclude, keep=1)
        refused(SpaceError, re.escape(words), small(), space, example=inputs())


def test_a_model_without_values_is_refused():
    words = r"^parameter '0.weight' is on the meta device and has no values, so its channels cannot be ranked. Load the"
    for metric in (None, keepk.metrics.l2, keepk.metrics.random(seed=0)):
        space = keepk.channels("0", keep=2, metric=metric)
        with pytest.raises(SpaceError, match=words):
            keepk.Pruner(small().to("meta"), space, example=inputs().to("meta"))


def test_all_of_these_are_errors_of_values():
    with pytest.raises(ValueError, match="matches no module"):
        keepk.Pruner(small(), keepk.channels("fc", keep=2), example=inputs())
    assert issubclass(KeepkError, ValueError)


def test_weights_that_would_end_before_the_channels_do_are_refused():
    spaces = [keepk.weights("0.weight", keep=3), keepk.channels("0", keep=2, schedule=[4, 3, 2])]
    words = r"space '0.weight': reaches its 3 weights at epoch 1, but channels of '0' are removed until epoch 3, and"
    with pytest.raises(PlanError, match=words):
        keepk.Pruner(small(), spaces, example=inputs())
    later = [keepk.weights("0.weight", keep=3, schedule=[9, 6, 3]), spaces[1]]
    assert list(keepk.Pruner(small(), later, example=inputs()).plan) == ["0.weight", "0"]


class Average(nn.Module):
    """An average that is not an `AveragedModel` but stores its copy under the same name."""

    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model)


@pytest.mark.parametrize(
    ("followers", "words"),
    [
        (lambda _: 3, "^followers: got int. Pass a list of modules"),
        (lambda _: [3], "^followers: got int. Pass a list of modules"),
        (lambda _: "ema", "^followers: got str. Pass a list of modules"),
        (copy.deepcopy, r"^Pruner: followers: got one Sequential. Pass a list, even for one"),
        (lambda model: model.state_dict(), r"^Pruner: followers: got one OrderedDict. Pass a list, even for one"),
        (lambda model: [copy.deepcopy(model)] * 2, r"^Pruner: followers\[1\] \(Sequential\) is followers\[0\] again"),
        (lambda model: [model], r"^Pruner: followers\[0\] \(Sequential\) is the model itself"),
        (lambda _: [nn.Linear(3, 3)], r"followers\[0\] \(Linear\): has no tensor '0.weight'. A follower is a copy"),
        (lambda _: [{}], r"followers\[0\] \(dict\): has no tensor '0.weight'. A follower is a copy"),
        (lambda model: [Average(model)], r"\(Average\): has no tensor '0.weight'. Its .module has it: pass that.$"),
    ],
)
@pytest.mark.parametrize("space", [keepk.channels("0", keep=2), keepk.weights("0.*", keep=2)])
def test_followers_that_cannot_follow_are_refused_before_the_run(followers, words, space):
    model = small()
    refused(ShrinkError, words, model, space, example=inputs(), followers=followers(model))


def test_a_dict_of_trained_weights_can_follow():
    model = small()
    model[0].requires_grad_(requires_grad=False)
    trained = {name: it.detach().clone() for name, it in model.named_parameters() if it.requires_grad}
    keepk.Pruner(model, keepk.channels("0", keep=2), example=inputs(), followers=[trained]).step()
    assert trained["2.weight"].shape == (5, 2)


def test_the_name_that_the_graph_gives_a_layer_selects_it():
    model, example = NETWORKS["multihead_attention"]()
    space = next(it for it in keepk.inspect(model, example).spaces if it.name.endswith("in_proj_weight"))
    attention = space.name.rpartition(".")[0]
    for glob in (space.name, attention):
        with keepk.Pruner(model, keepk.channels(glob, prune=0.5, name="heads"), example=example) as pruner:
            assert pruner.certificate["heads"]["total"] == space.units


@pytest.mark.parametrize(
    ("metric", "call"),
    [
        (keepk.metrics.random, "keepk.metrics.random(seed=0)"),
        (keepk.metrics.norm, 'keepk.metrics.norm("l2")'),
        (keepk.metrics.blend, "keepk.metrics.blend(alpha=0.5)"),
        (keepk.metrics.blend(0.5, weights=untyped(keepk.metrics.random)), "keepk.metrics.random(seed=0)"),
        (dict, "dict(...)"),
    ],
)
def test_what_makes_metrics_is_no_metric(metric, call):
    for space in (keepk.channels("0", keep=2, metric=metric), keepk.weights("0.weight", keep=2, metric=metric)):
        words = f"^space '{space.name}': metric=.* is a factory, not a metric: .* Call it: {re.escape(call)}.$"
        refused(SpaceError, words, small(), space, example=inputs())


def test_a_metric_of_a_user_says_what_it_ranks_and_needs():
    @describes(ranks=("channels",), needs=("weights",))
    def by_module(layer):
        if layer.name == "2":
            raise KeyError("no table for this layer")
        return layer.producer[0].tensor.flatten(1).sum(1)

    words = "^space '0.weight': metric by_module ranks channels, not weights. Use keepk.metrics.magnitude, or leave"
    refused(SpaceError, words, small(), keepk.weights("0.weight", keep=3, metric=by_module))
    words = "^metric by_module: failed on layer '2' .KeyError: 'no table for this layer'.. Correct the metric"
    refused(RankError, words, small(), keepk.channels("*", keep=6, metric=by_module), example=inputs())
