"""With `per_layer=True` every layer keeps the same share at every event, and the best channels of each layer."""

from fractions import Fraction
from itertools import pairwise
from math import gcd

import numpy as np
import pytest
import torch
from torch import nn

import keepk
from keepk.errors import PlanError, SpaceError, StateError
from keepk.model.costs import model_costs
from keepk.run.channels import ChannelSide
from saved_models import looks, unchanged
from traced_once import traced_before, traced_network
from untyped import untyped

pytestmark = [
    pytest.mark.filterwarnings("ignore:space .* cannot be removed and (is|are) not:keepk.KeepkWarning"),
    pytest.mark.filterwarnings("ignore:space .* are tied at the cut:keepk.KeepkWarning"),
    pytest.mark.filterwarnings("ignore:space .* would keep less than 5 %:keepk.KeepkWarning"),
]
# Networks with residual sums, concatenations, groups, halves, heads and cells, each with its options.
CASES = [
    ("conv_bn_flatten", {}),
    ("residual", {}),
    ("concat", {"exclude": "join"}),
    ("grouped", {"exclude": "last"}),
    ("depthwise", {}),
    ("channel_shuffle", {"exclude": ["last", "expand"]}),
    ("chunk", {"exclude": ["left", "right"]}),
    ("multihead_attention", {}),
    ("grouped_query_attention", {}),
    ("encoder_layer", {"lossy": True}),
    ("lstm", {}),
    ("tied_autoencoder", {}),
]


def table_metric(seed, levels=1_000):
    table = np.random.default_rng(seed).integers(0, levels, 10_000)
    return lambda layer: torch.from_numpy(table[layer.units]).double()


def started(network, **options):
    model, example, graph = network
    with traced_before(model, example, graph):
        pruner = keepk.Pruner(model, [keepk.channels("*", name="all", per_layer=True, **options)], example=example)
    side = pruner._session.channels
    assert isinstance(side, ChannelSide)
    return pruner, side


def parts_of(side):
    """The parts of each layer that must lose equal numbers; a layer without such a condition is one part."""
    found = []
    for layer in side.members["all"].layers:
        rest, parts = set(layer.units.tolist()), []
        for blocks in side.graph.bindings:
            parts += [part for block in blocks if (part := rest & set(block.tolist()))]
        rest -= set().union(*parts)
        found.append([sorted(part) for part in [*parts, rest] if part])
    return found


def possible(side):
    """All totals that keep the same whole share of every part."""
    sizes = [len(part) for parts in parts_of(side) for part in parts]
    steps = gcd(*sizes)
    return [sum(sizes) * kept // steps for kept in range(1, steps + 1)]


def best(part, scores, share):
    """The best units of a part: of equal scores, the lower unit."""
    count = len(part) * share
    assert count.denominator == 1
    return set(sorted(part, key=lambda unit: (-scores[unit], unit))[: int(count)])


@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_layer_keeps_the_same_share_and_its_best(name, options):
    metric = table_metric(3, levels=40)  # with ties
    _, side = started(traced_network(name), macs=0.95, metric=metric, **options)
    totals = possible(side)
    assert len(totals) > 1
    keep = totals[0] if len(totals) < 4 else totals[len(totals) // 3]
    plan = [max(keep, totals[-1] - 1), keep + 1 if keep + 1 < totals[-1] else keep, keep]
    pruner, side = started(traced_network(name), keep=keep, metric=metric, schedule=plan, **options)
    scores = dict(enumerate(np.random.default_rng(3).integers(0, 40, 10_000).tolist()))
    assert set(pruner.plan["all"]) <= set(totals)
    assert pruner.plan["all"][-1] == keep
    for count in pruner.plan["all"]:
        pruner.step()
        share = Fraction(count, totals[-1])
        for parts in parts_of(side):
            for part in parts:
                assert {unit for unit in part if not side.dead[unit]} == best(part, scores, share)
    assert pruner.kept["all"] == keep


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_budget_keeps_the_largest_share_that_meets_it(name, options):
    metric = table_metric(4)
    network = traced_network(name)
    pruner, side = started(network, macs=0.7, metric=metric, schedule=lambda m, k, _: [(m + k) // 2, k], **options)
    totals = possible(side)
    for bound in pruner.plan["all"]:
        pruner.step()
        assert pruner.certificate["all"]["reached"] == model_costs(pruner.model, pruner.example).macs <= bound
        kept = pruner.kept["all"]
        assert kept in totals
        if kept < totals[-1]:
            more = totals[totals.index(kept) + 1]
            other, _ = started(traced_network(name), keep=more, metric=metric, **options)
            other.step()
            assert model_costs(other.model, other.example).macs > bound


def small(*widths):
    torch.manual_seed(0)
    layers = [layer for pair in pairwise((4, *widths)) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 2))


def refused(words, model, *, error=SpaceError, **options):
    before = looks(model)
    with pytest.raises(error, match=words):
        keepk.Pruner(model, keepk.channels("*", name="all", per_layer=True, **options), example=torch.zeros(2, 4))
    unchanged(model, before)


def test_counts_that_cannot_be_met_are_refused_with_the_nearest():
    refused(
        "space 'all': keep=7 of 18 channels cannot be met: per_layer=True keeps equal numbers of all 3 layers. "
        "Nearest possible: 6 and 9.",
        small(6, 6, 6),
        keep=7,
    )
    refused(
        "keep=10 of 24 channels cannot be met: per_layer=True keeps the same share of all 2 layers, whose widths are "
        "8, 16. Nearest possible: 9 and 12.",
        small(8, 16),
        keep=10,
    )
    refused(
        "space 'all': keep=6, but layer_floor=0.5 in 2 layers with the same share in each needs 12 channels.",
        small(8, 16),
        keep=6,
        layer_floor=0.5,
    )
    refused(
        "keep=18 of 24 channels cannot be met: .* and round_to=4 restricts .* Nearest possible: 12 and 24.",
        small(8, 16),
        keep=18,
        round_to=4,
    )


def test_layers_without_a_common_share_are_refused():
    words = (
        "space 'all': per_layer=True keeps the same share of all 2 layers, whose widths are 5, 6, and with "
        "layer_floor=1 only all of their channels can be kept. Select layers whose widths have a larger common divisor"
    )
    refused(words, small(6, 5), keep=5)
    refused(words, small(6, 5), macs=0.5, layer_floor=1)


def test_a_budget_below_the_floors_names_the_least():
    least = 4 * 3 + 3 * 3 + 3 * 2
    refused(f"space 'all': macs=20 is below the {least} MACs per sample", small(6, 6), macs=20, layer_floor=3)


def test_only_bools_are_accepted():
    with pytest.raises(SpaceError, match=r"space 'f': per_layer=1: got int\. Pass True or False"):
        keepk.channels("f", keep=3, per_layer=untyped(1))


def test_blocks_of_different_sizes_that_lose_equal_numbers_are_refused():
    model, example, graph = traced_network("grouped")
    assert graph.bindings  # otherwise this test shows nothing about bindings
    blocks = graph.bindings[0]
    graph.__dict__["bindings"] = [(blocks[0], blocks[1][:-1])]
    words = "per_layer=True, but parts of 'first' with 5 and 6 channels must lose equal numbers, which are different"
    with pytest.raises(SpaceError, match=words):
        started((model, example, graph), macs=0.95, exclude="last")


def test_resumed_runs_end_alike_and_other_options_are_refused():
    def made(**options):
        schedule = [18, 12, 6]
        return keepk.Pruner(
            small(8, 8, 8),
            keepk.channels("*", keep=6, schedule=schedule, name="all", **{"metric": table_metric(1), **options}),
            example=torch.zeros(2, 4),
        )

    one, other = made(per_layer=True), made(per_layer=True)
    one.step()
    other.load_state_dict(one.state_dict())
    for run in (one, other):
        run.step()
        run.step()
    assert [tuple(it.shape) for it in one.model.parameters()] == [tuple(it.shape) for it in other.model.parameters()]
    assert [layer.out_features for layer in one.model if isinstance(layer, nn.Linear)] == [2, 2, 2, 2]
    free, fresh = made(metric=lambda layer: torch.from_numpy(layer.units).double()), made(per_layer=True)
    free.step()
    with pytest.raises(StateError, match="space 'all': its round_to=, layer_floor= and per_layer= do not allow"):
        fresh.load_state_dict(free.state_dict())


def test_weights_beside_channels_count_on_equal_shares():
    """3 channels of each layer leave 4 * 3 + 3 * 3 + 3 * 2 = 27 weights; without `per_layer` it may be fewer."""

    def run(keep, **options):
        spaces = [
            keepk.channels("*", keep=6, name="c", metric=table_metric(1), **options),
            keepk.weights("*.weight", keep=keep, name="w"),
        ]
        return keepk.Pruner(small(6, 6), spaces, example=torch.zeros(2, 4))

    pruner = run(27, per_layer=True)
    pruner.step()
    assert pruner.kept == {"c": 6, "w": 27}
    for arguments in ({"keep": 28, "per_layer": True}, {"keep": 27}):
        with pytest.raises(PlanError, match="space 'w': keeps"):
            run(**arguments)


def test_a_floor_of_a_share_does_not_block_groups():
    """Each of 4 groups of 4 channels may lose 3: the layer of 16 then keeps its floor of 4."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1, groups=4), nn.ReLU(), nn.Conv2d(16, 2, 1)
    )
    space = keepk.channels("0", keep=4, layer_floor=0.25, metric=table_metric(0), name="first")
    pruner = keepk.Pruner(model, space, example=torch.zeros(2, 2, 3, 3))
    pruner.step()
    assert model[0].out_channels == 4
