"""The laws of channel spaces over whole runs: exact counts, nothing comes back, and shrunk equals masked."""

import copy
import re
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import keepk
from keepk.errors import PlanError, RankError, ShrinkError, SpaceError, StateError
from keepk.graph.units import Units as GraphUnits
from keepk.rank.channels import find_links
from keepk.run.channels import ChannelSide
from masked import call, leaves, relative_error, without_dropout, zero_slices
from networks import NETWORKS, WITH_EXACT_UNITS, WITHOUT_EXACT_UNITS
from pictures import picture
from random_networks import random_networks
from shrinking import left, output, step
from strategies import seeds
from traced_once import traced_before, traced_network
from untyped import untyped

MODES = ("each", "end", "never")
TOLERANCE, ROUNDING = 1e-9, 1e-12
BOUND = (
    "grouped",
    "grouped_transposed",
    "channel_shuffle",
    "chunk",
    "halves",
    "one_number_for_two",
    "one_size_for_all_heads",
)

# Some channels of the first layer cannot be removed and are not counted.
FIXED_IN_PART = {
    "padded_shortcut",
    "the_first_channel",
    "a_slice_of_the_first",
    "a_slice_of_the_last",
    "the_first_narrowed",
    "the_first_split_off",
    "the_first_of_all",
    "the_first_written",
    "the_last_written",
    "the_first_four",
    "training_takes_another_channel",
}
pytestmark = pytest.mark.filterwarnings("ignore:space .* cannot be removed and (is|are) not:keepk.KeepkWarning")

# With the default eps Adam turns gradients that are rounding errors into steps of full length.
ADAM = partial(torch.optim.Adam, lr=1e-3, eps=1e-4)
MOMENTUM = partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.01)


def thirds(total, keep, _epochs):
    """Three events, evenly down to K."""
    return [total - (total - keep) * event // 3 for event in (1, 2, 3)]


def no_opinion(layer):
    return torch.zeros(len(layer))


def table_metric(seed, levels):
    """A metric with a random score per unit, the same at every event, with many ties."""
    table = np.random.default_rng(seed).integers(0, levels, 1_000)
    return lambda layer: torch.from_numpy(table[layer.units]).double()


class Run:
    """A network that is trained and pruned. If its graph is given, it is not traced again."""

    def __init__(self, network, spaces, *, make=ADAM, **options):
        self.model, self.example, *graph = network
        self.optimizer = make(self.model.parameters())
        self.ids = {name: id(parameter) for name, parameter in self.model.named_parameters()}
        self.keys = list(self.model.state_dict())
        self.rows = {name: len(it) for name, it in self.model.named_parameters() if it.dim()}
        with traced_before(self.model, self.example, *graph) if graph else nullcontext():
            self.pruner = keepk.Pruner(self.model, spaces, self.optimizer, example=self.example, **options)
        side = self.pruner._session.channels
        assert isinstance(side, ChannelSide)
        self.side = side

    def epoch(self):
        step(self.model, self.example, self.optimizer)
        self.pruner.step()

    def members(self, name="all"):
        return self.side.members[name]

    def living(self, units):
        return units[~self.side.dead[units]]


def all_channels(**options):
    return [keepk.channels("*", name="all", **{"schedule": thirds, **options})]


def with_nearest_keep(build, **asked):
    """The result of `build` for the requested K or, if that is refused, for the nearest K that the error names."""
    try:
        return build(**asked)
    except SpaceError as refused:
        found = re.search(r"(?:Nearest possible: |Choose keep >= )(\d+)", str(refused))
        if found is None:
            raise
        return build(keep=int(found[1]))


def three_runs(network, *, make=ADAM, **options):
    """The same run with each value of `shrink`."""
    first = with_nearest_keep(lambda **keep: Run(network(), all_channels(**keep, **options), make=make), prune=0.5)
    keep = first.pruner.certificate["all"]["asked"]
    spaces = all_channels(keep=keep, **options)
    return [first, *(Run(network(), spaces, make=make, shrink=shrink) for shrink in MODES[1:])]


def eval_output(run):
    return output(run.model, run.example)


def training_output(run):
    with torch.no_grad():
        return call(without_dropout(run.model), run.example)


def check_in_lockstep(runs):
    """Check exact and monotone counts, and equal outputs in eval and in train mode, after every event."""
    first = runs[0]
    for epoch in range(first.pruner.epochs):
        for run in runs:
            dead = run.side.dead
            run.epoch()
            assert run.pruner.kept == {name: counts[epoch] for name, counts in run.pruner.plan.items()}
            assert run.side.dead[dead].all()
            check_exact(run)
        check_alike(runs)
    for run in runs:
        assert run.pruner.done
        check_same_objects(run)
        check_trains_on(run)
    check_alike(runs)


def check_alike(runs):
    for run in runs[1:]:
        assert np.array_equal(runs[0].side.dead, run.side.dead)
    for mode in (eval_output, training_output):
        wanted, *others = [mode(run) for run in runs]
        assert all(relative_error(wanted, got) < TOLERANCE for got in others), mode.__name__


def check_exact(run):
    """Check that removed units are gone from the tensors, or are zero in them."""
    graph, dead = run.side.graph, np.flatnonzero(run.side.dead)
    for name, kept in run.pruner.kept.items():
        assert len(run.living(run.members(name).units)) == kept
    physical = np.flatnonzero(~graph.alive)
    assert np.array_equal(physical, dead) or not len(physical)
    lost = Counter((tensor, axis) for unit in physical for tensor, axis, _ in graph.slices(int(unit)))
    for name, rows in run.rows.items():
        assert len(run.model.get_parameter(name)) == rows - lost[name, 0]
    if not len(physical):
        values = {name: parameter.detach() for name, parameter in run.model.named_parameters()}
        zeroed = {name: value.clone() for name, value in values.items()}
        zero_slices(zeroed, run.model, graph, dead)
        assert all(torch.equal(value, zeroed[name]) for name, value in values.items())


def check_same_objects(run):
    """Law 5: Parameter objects and keys are unchanged; the optimizer holds exactly these, with matching state."""
    assert {name: id(parameter) for name, parameter in run.model.named_parameters()} == run.ids
    assert [key for key in run.model.state_dict() if key in run.keys] == run.keys
    held = [parameter for group in run.optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == list(run.ids.values())
    for parameter, state in run.optimizer.state.items():
        assert id(parameter) in run.ids.values()
        assert {value.shape for value in state.values() if torch.is_tensor(value) and value.dim()} <= {parameter.shape}


def check_trains_on(run):
    masks = run.pruner.masks
    before = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    step(run.model, run.example, run.optimizer)
    for name, parameter in run.model.named_parameters():
        kept = masks.get(name, torch.ones_like(parameter, dtype=torch.bool))
        # The gradients of a bias before a BatchNorm, or of keys under a softmax, are zero up to rounding.
        if parameter.grad is not None and (parameter.grad[kept].abs() > ROUNDING).any():
            assert not torch.equal(before[name], parameter), name
        assert not parameter.detach()[~kept].any()


@pytest.mark.parametrize("name", WITH_EXACT_UNITS)
def test_shrunk_at_each_event_at_the_end_and_never_are_one_run(name):
    runs = three_runs(partial(traced_network, name))
    told = any("fixed" in entry for entry in runs[0].pruner.certificate.values())
    assert told == (name in FIXED_IN_PART)  # a warning is issued for these networks and for no others
    check_in_lockstep(runs)


@pytest.mark.parametrize(
    "name", ["linears", "conv_bn_flatten", "grouped", "dense_block", "multihead_attention", "lstm"]
)
def test_with_momentum_and_decay_too(name):
    check_in_lockstep(three_runs(NETWORKS[name], make=MOMENTUM, metric=keepk.metrics.random(seed=3)))


@given(network=random_networks(), seed=seeds)
@settings(deadline=None, max_examples=4)
def test_random_networks_are_one_run_in_all_modes(network, seed):
    network = (*network, keepk.trace(*network))
    try:
        runs = three_runs(lambda: copy.deepcopy(network), metric=table_metric(seed, levels=4))
    except SpaceError as refused:
        assume("cannot be met" in str(refused))  # otherwise it was refused because it has no exact channel
        raise
    check_in_lockstep(runs)


@pytest.mark.parametrize("name", WITHOUT_EXACT_UNITS)
def test_a_network_without_exact_channels_is_refused_with_the_reason(name):
    with pytest.raises(SpaceError, match=r"removing one changes more than|is fixed|none that has channels"):
        Run(traced_network(name), all_channels(prune=0.5))


# Selection


@given(data=st.data(), seed=seeds, levels=st.integers(1, 4), floor=st.integers(1, 3))
@settings(deadline=None, max_examples=15)
def test_the_very_ones_stay_that_a_sort_chooses(data, seed, levels, floor):
    """The best of each layer up to its floor, then by score, the lower index first among equals."""
    name = data.draw(st.sampled_from(["linears", "conv_bn_flatten", "concat"]))
    metric, total = table_metric(seed, levels), {"linears": 21, "conv_bn_flatten": 20, "concat": 33}[name]
    least = floor * (4 if name == "concat" else 2)
    keep = data.draw(st.sampled_from([least, total]) | st.integers(least, total))
    plan = [*sorted(data.draw(st.lists(st.integers(keep, total), max_size=2)), reverse=True), keep]
    run = Run(traced_network(name), all_channels(keep=keep, metric=metric, schedule=plan, layer_floor=floor))
    layers = [layer.units.tolist() for layer in run.members().layers]
    assert sum(map(len, layers)) == total
    scores = {unit: float(metric(Units([unit]))) for layer in layers for unit in layer}
    for count in plan:
        order = sorted((unit for layer in layers for unit in layer), key=lambda unit: (-scores[unit], unit))
        forced = {unit for layer in layers for unit in [it for it in order if it in layer][:floor]}
        best = set(sorted(order, key=lambda unit: unit not in forced)[:count])
        run.pruner.step()
        layers = [[unit for unit in layer if unit in best] for layer in layers]
        assert run.living(run.members().units).tolist() == sorted(best)


class Units:
    """The part of a layer that `table_metric` needs."""

    def __init__(self, units):
        self.units = np.array(units)


@pytest.mark.parametrize("keep", ["least", "all"])
@pytest.mark.parametrize("name", ["linears", "grouped", "channel_shuffle", "grouped_query_attention", "chunk", "lstm"])
def test_as_few_as_possible_and_all(name, keep):
    """All scores are tied."""

    def build(**asked):
        return Run(traced_network(name), all_channels(**asked, metric=no_opinion))

    run = with_nearest_keep(build, **({"keep": 1} if keep == "least" else {"prune": 0.0}))
    for _ in range(run.pruner.epochs):
        run.epoch()
        check_exact(run)
    sizes = [len(run.living(layer.units)) for layer in run.members().layers]
    assert sum(sizes) == run.members().keep
    assert sizes == [len(layer.units) for layer in run.members().layers] or keep == "least"
    assert min(sizes) >= 1


@pytest.mark.parametrize("name", BOUND)
def test_bound_parts_lose_equally_many(name):
    run = with_nearest_keep(lambda **keep: Run(traced_network(name), all_channels(**keep)), prune=0.6)
    assert run.side.graph.bindings
    for counts in run.pruner.plan["all"]:
        run.epoch()
        assert run.pruner.kept == {"all": counts}
        for blocks in run.side.graph.bindings:
            assert len({len(block) - len(run.living(block)) for block in blocks}) == 1


@given(data=st.data(), round_to=st.integers(1, 5), seed=seeds)
@settings(deadline=None, max_examples=15)
def test_widths_are_multiples(data, round_to, seed):
    """Each layer keeps all of its channels or a multiple of `round_to`, after every event."""
    name = data.draw(st.sampled_from(["linears", "conv_bn_flatten", "grouped", "channel_shuffle", "chunk", "concat"]))
    share = data.draw(st.sampled_from([0.2, 0.5, 0.8]))

    def build(**asked):
        spaces = all_channels(**asked, round_to=round_to, metric=table_metric(seed, levels=3))
        return Run(traced_network(name), spaces)

    run = with_nearest_keep(build, prune=share)
    for count in run.pruner.plan["all"]:
        run.pruner.step()
        assert run.pruner.kept == {"all": count}
        check_exact(run)
        for layer in run.members().layers:
            width = width_of(run, layer)
            assert width % round_to == 0 or len(run.living(layer.units)) == len(layer.units)


def width_of(run, layer):
    """The width of a layer's remaining units, in entries of the tensor that produces them."""
    tensor, axis = next((tensor, axis) for tensor, axis, role in layer.axes if str(role).endswith("PRODUCER"))
    slices = [slice_[:2] for unit in run.living(layer.units) for slice_ in run.side.graph.slices(int(unit))]
    return slices.count((tensor, axis))


# Reads


@given(data=st.data(), seed=seeds, floor=st.integers(1, 2))
@settings(deadline=None, max_examples=12)
def test_reads_of_a_dense_net_are_counted(data, seed, floor):
    """8 + 12 + 16 + 20 reads; every layer keeps its floor, and every source has a reader."""
    least = 4 * floor + 4
    keep = data.draw(st.sampled_from([least, 56]) | st.integers(least, 56))
    spaces = all_channels(keep=keep, at="input", metric=table_metric(seed, levels=3), layer_floor=floor)
    run = Run(traced_network("dense_block"), spaces)
    assert run.members().total == 56
    for count in run.pruner.plan["all"]:
        run.epoch()
        assert run.pruner.kept == {"all": count}
        check_exact(run)
        check_read(run)
        assert min(len(run.living(layer.units)) for layer in run.members().layers) >= floor


def check_read(run):
    """Check that every layer with several readers has a channel left, and every such channel a read."""
    graph = run.side.graph
    for layer in (space for space in graph.groups if space.kind == "source"):
        assert len(run.living(layer.units))
        for source in run.living(layer.units):
            reads = graph.links()[graph.links()[:, 0] == source, 1]
            assert len(run.living(reads))


def test_reads_are_one_run_in_all_modes():
    check_in_lockstep(three_runs(partial(traced_network, "dense_block"), at="input"))


@pytest.mark.parametrize("round_to", [1, 2, 4])
def test_rounded_reads_are_met_or_refused_before_the_run(round_to):
    """The best reads of all layers may share their sources, but the other sources need a reader as well."""

    def build(**asked):
        spaces = all_channels(**asked, at="input", round_to=round_to, metric=prefer_first)
        return Run(traced_network("dense_block"), spaces)

    run = with_nearest_keep(build, keep=1)
    for count in run.pruner.plan["all"]:
        run.epoch()
        assert run.pruner.kept == {"all": count}
        check_read(run)


def prefer_first(layer):
    return -torch.from_numpy(layer.units).double()


# Channels that read others of their space


class Branches(nn.Module):
    """A convolution in parallel to a BatchNorm: each output channel is also a read of that input channel."""

    def __init__(self, width):
        super().__init__()
        self.conv, self.norm, self.identity = nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x):
        return (self.norm(self.conv(x)) + self.identity(x)).relu()


def branches(depth=3, width=5):
    torch.manual_seed(0)
    blocks = [Branches(width) for _ in range(depth)]
    net = nn.Sequential(nn.Conv2d(3, width, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 2)
    return net.double(), torch.randn(4, 3, 5, 5, dtype=torch.float64)


@pytest.mark.parametrize("metric", [None, keepk.metrics.l2, keepk.metrics.random(seed=1), no_opinion])
def test_channels_that_read_each_other_are_one_run_in_all_modes(metric):
    runs = three_runs(branches, metric=metric)
    assert len(runs[0].members().links.pairs) == 10  # the last of the four is a read, which is not counted
    check_in_lockstep(runs)


@pytest.mark.parametrize("options", [{"per_layer": True}, {"round_to": 2}])
def test_channels_that_read_each_other_cannot_have_restricted_counts(options):
    model, example = branches()
    words = "only certain numbers of them may be kept, because of round_to, per_layer or equal parts, so the count"
    with pytest.raises(SpaceError, match=words):
        keepk.Pruner(model, keepk.channels("*", macs=0.5, **options), example=example)


@given(data=st.data(), seed=seeds, levels=st.integers(1, 4), floor=st.integers(1, 3))
@settings(deadline=None, max_examples=15)
def test_a_source_stays_as_long_as_one_of_its_reads(data, seed, levels, floor):
    """Oracle: a sort in which a source scores as high as the best of the reads that are removed with it."""
    metric = table_metric(seed, levels)
    keep = data.draw(st.sampled_from([3 * floor, 15]) | st.integers(3 * floor, 15))
    run = Run(branches(), all_channels(keep=keep, metric=metric, layer_floor=floor))
    below = dict(run.members().links.pairs.tolist())
    assert {len(layer.units) for layer in run.members().layers} == {5}
    for count in run.pruner.plan["all"]:
        living = run.living(run.members().units).tolist()
        run.pruner.step()
        left = run.living(run.members().units).tolist()
        assert len(left) == count
        assert all(source in left for source, read in below.items() if read in left)
        assert min(len(run.living(layer.units)) for layer in run.members().layers) >= floor
        check_exact(run)
        if floor == 1 and count > 10:  # then no channel is kept only because of its floor
            worst = {it: max(float(metric(Units([unit]))) for unit in chain_of(it, below, living)) for it in living}
            assert min(worst[it] for it in left) >= max((worst[it] for it in living if it not in left), default=-1)


def chain_of(unit, below, living):
    found = [unit]
    while below.get(found[-1]) in living:
        found.append(below[found[-1]])
    return found


class ReadByNormsAlone(nn.Module):
    """Only two BatchNorms read the first layer, and one more BatchNorm reads each of them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 1)
        self.norms, self.again = (nn.ModuleList(nn.BatchNorm2d(6) for _ in range(2)) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(6, 4, 1) for _ in range(4))

    def forward(self, x):
        y = self.first(x)
        ways = [it for norm, more in zip(self.norms, self.again, strict=True) for it in self.way(norm(y).relu(), more)]
        return sum(conv(way).mean((2, 3)) for conv, way in zip(self.convs, ways, strict=True))

    def way(self, y, more):
        return y, more(y).relu()


def test_links_that_cannot_be_counted_are_refused():
    words = r"space '\*': channels of '0' are read by '1.conv', whose channels are removed with them and are in "
    words += "the space too; "
    words += (
        r'only certain numbers of them may be kept, .* Exclude one of the two, or count reads instead: at="input".$'
    )
    with pytest.raises(SpaceError, match=words):
        keepk.Pruner(branches()[0], keepk.channels("*", keep=8, round_to=2), example=branches()[1])
    words = (
        r"channels of 'first' are read by 'norms.0', .*; nothing else reads them, so they would be removed with their"
    )
    with pytest.raises(SpaceError, match=words):
        keepk.Pruner(ReadByNormsAlone(), keepk.channels("*", prune=0.5), example=torch.randn(2, 3, 4, 4))


class TwoWay:
    """The part of a graph that `links` needs: two layers of two channels that read each other."""

    units = GraphUnits(np.arange(4), np.array([0, 0, 1, 1]), *[np.zeros(4, bool)] * 4)
    solution = SimpleNamespace(used=np.arange(4))
    groups = tuple(SimpleNamespace(name=name, units=np.array(units)) for name, units in (("a", [0, 1]), ("b", [2, 3])))

    def links(self):
        return np.array([[0, 2], [3, 1]])


def test_layers_that_read_each_other_in_turn_are_refused():
    words = "channels of 'a' are read by 'b', .*; both layers read each other, so the count could not be met."
    with pytest.raises(SpaceError, match=words):
        find_links(untyped(TwoWay()), keepk.channels("*", keep=2), untyped(TwoWay.groups))


# Spaces beside spaces


def weights_beside_channels(keep=400):
    return [
        keepk.channels("first", keep=5, name="first", schedule=thirds),
        keepk.channels("second", keep=7, name="second", schedule=thirds, metric=keepk.metrics.l2),
        keepk.weights("*.weight", keep=keep, exclude="norm*", name="weights", schedule=thirds),
    ]


def test_weights_and_channels_in_one_run():
    """Weights of removed channels do not count; the masks of the shrunk run are the cut masks of the masked run."""
    spaces = weights_beside_channels()
    runs = [Run(traced_network("conv_bn_flatten"), spaces, make=MOMENTUM, shrink=shrink) for shrink in MODES]
    for epoch in range(3):
        for run in runs:
            run.epoch()
            planned = {name: counts[epoch] for name, counts in run.pruner.plan.items()}
            kept = run.pruner.kept
            counted = sum(int(run.pruner.masks[f"{name}.weight"].sum()) for name in ("first", "second", "head"))
            assert kept == {**planned, "weights": counted}
            assert counted <= planned["weights"]
            assert counted == planned["weights"] or epoch < 2
        check_alike(runs)
        each, never = runs[0], runs[2]
        for name, mask in each.pruner.masks.items():
            whole = never.pruner.masks[name]
            dead = np.flatnonzero(never.side.dead)
            assert torch.equal(left(whole, name, never.side.graph, dead), mask)
            silent = whole.double()
            zero_slices({name: silent}, never.model, never.side.graph, dead)
            assert torch.equal(silent.bool(), whole)
    for run in runs:
        assert run.pruner.kept == {"first": 5, "second": 7, "weights": 400}
        check_same_objects(run)
        check_trains_on(run)


@pytest.mark.parametrize("shrink", MODES)
def test_phases_freeze_one_part_while_another_is_pruned(shrink):
    """Frozen parameters keep their values, also if parts of them are cut out."""
    spaces = [
        keepk.channels(["first", "second"], keep=12, name="convs", schedule=[16, 12]),
        keepk.weights("head.weight", keep=50, name="head"),
    ]
    phases = [keepk.Phase(2, prune="convs", freeze="head*"), keepk.Phase(1, prune="head", freeze=["first*", "second*"])]
    run = Run(traced_network("conv_bn_flatten"), spaces, make=MOMENTUM, phases=phases, shrink=shrink)
    graph = traced_network("conv_bn_flatten")[2]
    frozen = {name: run.model.get_parameter(name).detach().clone() for name in ("head.weight", "head.bias")}
    for kept in ({"convs": 16, "head": 900}, {"convs": 12, "head": 900}):
        run.epoch()
        assert run.pruner.kept["convs"] == kept["convs"]
        for name, before in frozen.items():
            now = run.model.get_parameter(name).detach()
            dead = np.flatnonzero(run.side.dead)
            zero_slices({name: before}, run.model, graph, dead)
            assert torch.equal(now, before if now.shape == before.shape else left(before, name, graph, dead))
    before = run.model.second.weight.detach().clone()
    run.epoch()
    assert torch.equal(run.model.second.weight, before)
    assert run.pruner.kept == {"convs": 12, "head": 50}
    check_same_objects(run)


def test_lossy_channels_go_when_asked():
    with pytest.raises(SpaceError, match="Use lossy=True to remove them anyway"):
        Run(traced_network("layer_norm"), all_channels(keep=5))
    run = Run(traced_network("layer_norm"), all_channels(keep=5, lossy=True))
    for count in run.pruner.plan["all"]:
        run.epoch()
        assert run.pruner.kept == {"all": count}
        check_exact(run)
        assert all(leaf.isfinite().all() for leaf in leaves(eval_output(run)))
    assert (run.model.first.out_features, run.model.norm.normalized_shape) == (5, (5,))


# A failed event


def state_of(run):
    """Everything that an event could change."""
    state = run.pruner.state_dict()
    masks = {name: mask.tolist() for name, mask in state.pop("masks").items()}
    return picture([run.model, run.optimizer, run.side.graph]), masks, repr(state), run.pruner.kept


class Moody:
    """A metric that fails on demand."""

    def __init__(self, failure):
        self.failure, self.fails = failure, False

    def __call__(self, layer):
        return self.failure(layer) if self.fails else keepk.metrics.l2(layer)


def broken(_layer):
    raise RuntimeError("out of luck")


def not_a_number(layer):
    return torch.full((len(layer),), float("nan"))


def too_many(layer):
    return torch.zeros(len(layer) + 1)


@pytest.mark.parametrize("shrink", MODES)
@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (broken, RankError, r"metric Moody: failed on layer 'second' \(RuntimeError: out of luck\)"),
        (not_a_number, RankError, "have NaN"),
        (too_many, RankError, "one score for each"),
    ],
)
def test_an_event_whose_metric_fails_changes_nothing(failure, error, words, shrink):
    """The next attempt continues as if it had not happened."""
    moody = Moody(failure)
    spaces = [
        keepk.channels("first", keep=5, name="first", schedule=thirds),
        keepk.channels("second", keep=4, name="second", schedule=thirds, metric=moody),
        keepk.weights("head.*", keep=100, name="head", schedule=thirds),
    ]
    run = Run(traced_network("conv_bn_flatten"), spaces, shrink=shrink)
    run.epoch()
    step(run.model, run.example, run.optimizer)
    before, moody.fails = state_of(run), True
    with pytest.raises(error, match=words):
        run.pruner.step()
    assert state_of(run) == before
    moody.fails = False
    run.pruner.step()
    run.epoch()
    assert run.pruner.kept == {"first": 5, "second": 4, "head": 100}


@pytest.mark.parametrize("shrink", MODES)
@pytest.mark.parametrize(
    ("keep", "events", "least", "left", "planned"),
    [(1_500, 0, 1707, 1707, 1820), (1_100, 1, 1323, 1310, 1394)],
    ids=["first event", "second event"],
)
def test_channels_that_leave_too_few_weights_change_nothing(keep, events, least, left, planned, shrink, monkeypatch):
    """Such a plan is refused before the run, and so is an event that would undercut its plan."""
    refusal = (
        rf"keeps {planned} weights at epoch {events + 1}, .* as few as {least} .*Keep at most 975 weights, or more"
    )
    with pytest.raises(PlanError, match=refusal):
        Run(traced_network("conv_bn_flatten"), weights_beside_channels(keep=keep), shrink=shrink)
    monkeypatch.setattr("keepk.run.checks.refuse_undercut", lambda *_: None)
    run = Run(traced_network("conv_bn_flatten"), weights_beside_channels(keep=keep), shrink=shrink)
    for _ in range(events):
        run.epoch()
    step(run.model, run.example, run.optimizer)
    before = state_of(run)
    with pytest.raises(
        RankError, match=f"have only {left} of its weights, fewer than the {planned} that its plan keeps at th"
    ):
        run.pruner.step()
    assert state_of(run) == before


def replace_parameter(run):
    run.model.second.weight = nn.Parameter(run.model.second.weight.detach().clone())


def replace_module(run):
    run.model.second = nn.Identity()


def cut_elsewhere(run):
    graph = keepk.trace(run.model, run.example)
    keepk.shrink(run.model, graph, [0, 9], optimizer=run.optimizer)


@pytest.mark.filterwarnings("ignore:space .* the last event kept:keepk.KeepkWarning")  # the change lowers the counts
@pytest.mark.parametrize("shrink", ["each", "never"])
@pytest.mark.parametrize("change", [replace_parameter, replace_module])
def test_a_model_that_was_changed_behind_the_pruner_is_refused(change, shrink):
    run = Run(traced_network("conv_bn_flatten"), all_channels(keep=9), shrink=shrink)
    run.epoch()
    change(run)
    before = state_of(run)
    with pytest.raises(ShrinkError, match="Change the model first"):
        run.pruner.step()
    assert state_of(run) == before


@pytest.mark.parametrize("shrink", ["each", "never"])
def test_a_model_that_was_cut_behind_the_pruner_is_counted_and_refused(shrink):
    """Counts are those of the cut model; further events and `state_dict` are refused."""
    run = Run(traced_network("conv_bn_flatten"), all_channels(keep=9), shrink=shrink)
    run.epoch()
    (name, kept), *_ = run.pruner.kept.items()
    left = kept - 2 if shrink == "each" else kept - int((~run.side.dead[[0, 9]]).sum())  # one may be masked already
    cut_elsewhere(run)
    assert run.pruner.kept == {name: left}
    assert run.pruner.certificate[name]["kept"] == kept
    assert run.pruner.certificate[name]["alive"] == left
    before = picture([run.model, run.optimizer])
    with pytest.raises(ShrinkError, match="Cut the model before the Pruner is made"):
        run.pruner.step()
    with pytest.raises(StateError, match=r"was cut since the run began, by keepk.compact or keepk.shrink"):
        run.pruner.state_dict()
    assert picture([run.model, run.optimizer]) == before


class RelativeBias(nn.Module):
    """An MLP over a fixed table of coordinates, as for relative position biases."""

    def __init__(self, *, trained):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.mlp = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 6))
        if trained:
            self.coordinates = nn.Parameter(torch.randn(5, 2))
        else:
            self.register_buffer("coordinates", torch.randn(5, 2))

    def forward(self, x):
        return self.head(self.embed(x) + self.mlp(self.coordinates))


@pytest.mark.parametrize("trained", [False, True])
def test_columns_that_read_a_table_are_not_output_channels_of_their_layer(trained):
    torch.manual_seed(0)
    model, example = RelativeBias(trained=trained), torch.randn(2, 5, 6)
    assert [space.name for space in keepk.inspect(model, example).spaces if space.units == 2] == ["coordinates"]
    pruner = keepk.Pruner(model, keepk.channels("mlp.0", keep=17, name="h"), example=example)
    assert pruner.certificate["h"]["total"] == 32
    pruner.step()
    assert model.mlp[0].weight.shape == (17, 2)
    pruner.close()

    total = keepk.Pruner(model, keepk.channels("*", keep=20, name="h"), example=example).certificate["h"]["total"]
    assert total == 6 + 17 + 2 * trained  # a trained table is a layer with channels, a buffer is not
    pruner = keepk.Pruner(model, keepk.channels("mlp.0", at="input", keep=1, name="in"), example=example)
    pruner.step()
    assert (cast(nn.Linear, model.mlp[0]).in_features, tuple(model.coordinates.shape)) == (1, (5, 1))
