"""Weights together with channels: the bound on remaining weights, compared with every choice of channels."""

import copy
from itertools import combinations, product
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import keepk
from keepk.errors import PlanError, RankError
from keepk.plan.fewest_weights import Count, Factor, Product, least
from keepk.plan.schedules import plan
from keepk.run import checks as checks_module
from keepk.run.channels import ChannelSide
from keepk.run.undercut import find_bounds

# The bound by itself -------------------------------------------------------------------------------------------------


@st.composite
def sums(draw):
    """Sums of a few products of counts, with totals that can be met."""
    names = draw(st.sampled_from([["a"], ["a", "b"]]))
    values = st.sampled_from([range(1, 5), range(6), (2, 4, 8), (1, 4, 5, 9), (3,)])
    counts = [Count(draw(values), draw(st.sampled_from([*names, None]))) for _ in range(draw(st.integers(1, 4)))]
    places = st.integers(0, len(counts) - 1)
    factor = st.builds(
        Factor, st.sampled_from([0, 0, 3]), st.dictionaries(places, st.sampled_from([1.0, 2.0, 0.5]), max_size=2)
    )
    terms = st.builds(Product, st.integers(1, 9), st.lists(factor, min_size=1, max_size=2).map(tuple))
    products = draw(st.lists(terms, min_size=1, max_size=5))
    point = [draw(st.sampled_from(list(count.values))) for count in counts]
    return products, counts, totals_of(counts, point)


def totals_of(counts, point):
    totals = dict[str, int]()
    for count, value in zip(counts, point, strict=True):
        if count.total is not None:
            totals[count.total] = totals.get(count.total, 0) + value
    return totals


@given(sums())
@settings(deadline=None)
def test_the_least_sum_is_that_of_all_counts(given_sum):
    products, counts, totals = given_sum
    points = [it for it in product(*(count.values for count in counts)) if totals_of(counts, it) == totals]
    true = min(sum(it.value(point) for it in products) for point in points)
    assert least(products, counts, totals) == int(np.ceil(true - 1e-6))
    assert least(products, counts, totals, enough=int(true)) >= int(true)
    assert least(products, counts, totals, enough=int(true) + 2) < int(true) + 2


def test_a_network_of_many_layers_is_bounded_exactly():
    """VGG-16, whose minimum has one channel in every other layer, found by trying many corners."""
    widths = [64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    counts = [Count(range(1, width + 1), "c") for width in widths]
    products = [Product(27, (Factor(0, {0: 1.0}),)), Product(10, (Factor(0, {12: 1.0}),))]
    products += [Product(9, (Factor(0, {place: 1.0}), Factor(0, {place + 1: 1.0}))) for place in range(12)]
    known = {4000: 12_651_200, 3000: 3_900_608, 2000: 36_239, 1000: 17_911, 60: 991}
    assert {total: least(products, counts, {"c": total}) for total in known} == known


# The bound of a network ----------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4)
        self.one, self.two = nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = x + self.two(self.one(x).relu())
        return self.head(x.mean((2, 3)))


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.grouped = nn.Conv2d(1, 6, 1), nn.Conv2d(6, 4, 3, padding=1, groups=2)
        self.depthwise, self.last = nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        x = self.grouped(self.stem(x).relu()).relu()
        return self.last(self.depthwise(x).relu()).mean((2, 3))


class Densely(nn.Module):
    """Each BatchNorm reads all earlier channels separately."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 1)
        self.norm1, self.conv1 = nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(5), nn.Conv2d(5, 2, 1)
        self.out = nn.Linear(2, 2)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.conv1(self.norm1(x).relu())], 1)
        return self.out(self.conv2(self.norm2(x).relu()).mean((2, 3)))


def mlp():
    first, second = [nn.Linear(3, 4), nn.ReLU()], [nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU()]
    return nn.Sequential(*first, *second, nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2))


ROW, PICTURE = torch.zeros(2, 3), torch.zeros(2, 1, 5, 5)
NETWORKS = {
    "one layer": (mlp, [keepk.channels("0", keep=1)], ROW),
    "two layers": (mlp, [keepk.channels(["0", "2"], keep=2)], ROW),
    "three layers": (mlp, [keepk.channels(["0", "2", "5"], keep=3)], ROW),
    "a floor": (mlp, [keepk.channels(["0", "2", "5"], keep=6, layer_floor=2)], ROW),
    "two spaces": (mlp, [keepk.channels("0", keep=1, name="a"), keepk.channels(["2", "5"], keep=2, name="b")], ROW),
    "rounded": (mlp, [keepk.channels(["0", "2"], keep=4, round_to=2)], ROW),
    "residual": (Residual, [keepk.channels(["stem", "one"], keep=2)], torch.zeros(2, 2, 4, 4)),
    "grouped": (Grouped, [keepk.channels(["stem", "grouped"], keep=4)], PICTURE),
    "only the stem": (Grouped, [keepk.channels("stem", keep=2)], PICTURE),
    "sources": (Densely, [keepk.channels(["stem", "conv*"], keep=3)], PICTURE),
    "reads": (Densely, [keepk.channels("norm*", at="input", keep=4)], PICTURE),
}
GLOBS = [["*"], ["*.weight"], ["*.bias"]]


def every_choice(side, kept):
    """All sets of channels that may be removed, by brute force: each space keeps its count, each layer its floor."""
    for chosen in product(*(combinations(it.units, it.total - kept[name]) for name, it in side.members.items())):
        gone = np.concatenate([np.array(units, np.int64) for units in chosen])
        if all(fits(it, gone) for it in side.members.values()):
            try:
                yield side.graph.edits(np.sort(gone))
            except keepk.errors.ShrinkError:
                continue  # groups must lose equal numbers


def fits(members, gone):
    for layer in members.layers:
        left = int((~np.isin(layer.units, gone)).sum())
        if left < min(members.space.layer_floor, len(layer.units)):
            return False
        if members.space.round_to and left != len(layer.units) and left % members.space.round_to:
            return False
    return True


def weights_left(parameters, edits):
    cuts = {cut.tensor: cut.after for cut in edits.cuts}
    return sum(int(np.prod(cuts.get(name, parameter.shape))) for name, parameter in parameters.items())


@pytest.mark.parametrize("globs", GLOBS, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_bound_is_the_least_of_all_choices_of_channels(name, globs):
    make, channels, example = NETWORKS[name]
    model = make()
    total = sum(p.numel() for n, p in model.named_parameters() if globs == ["*"] or n.endswith(globs[0][1:]))
    waiting = keepk.weights(globs, keep=1, name="weights", schedule=[total, 1])
    pruner = keepk.Pruner(model, [*channels, waiting], example=example)
    side, weights = pruner._session.channels, pruner._session.weights
    assert isinstance(side, ChannelSide)
    bounds_of = find_bounds(model, weights.members, side.graph, side.members)["weights"]
    tried = 0
    for kept in product(*(range(cast(int, it.keep), it.total + 1) for it in side.members.values())):
        wanted = dict(zip(side.members, kept, strict=True))
        left = [weights_left(weights.parameters, edits) for edits in every_choice(side, wanted)]
        if left:
            tried += 1
            bound = bounds_of.least(wanted)
            # A source is removed with its last read, which the bound does not distinguish.
            assert bound == min(left) if name != "reads" else bound <= min(left), wanted
    assert tried > 1


# Plans ---------------------------------------------------------------------------------------------------------------


def pair(width=30):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))


def undercut_spaces(weights=(70, 20, 7)):
    return [
        keepk.channels("0", keep=3, schedule=[10, 3, 3], name="c"),
        keepk.weights("*.weight", keep=weights[-1], schedule=list(weights), name="w"),
    ]


def test_a_plan_that_channels_undercut_is_refused_with_the_counts_that_fit():
    words = (
        r"space 'w': keeps 70 weights at epoch 1, but the channels left by then may have as few as 40 of its 120\. "
        r"Use a schedule that keeps at most these counts, by epoch: 40, 12, 12\. Or prune weights after "
        r"channels: Pruner\(phases=\[keepk\.Phase\(3, prune='c'\), keepk\.Phase\(3, prune='w'\)\]\); "
        r"up to 12 weights can be kept then\."
    )
    with pytest.raises(PlanError, match=words):
        keepk.Pruner(pair(), undercut_spaces(), example=torch.zeros(2, 2))
    with pytest.raises(PlanError, match=r"keeps 20 weights at epoch 2, .* as few as 12"):
        keepk.Pruner(pair(), undercut_spaces((40, 20, 7)), example=torch.zeros(2, 2))


def test_the_counts_of_the_message_and_its_phases_are_accepted():
    pruner = keepk.Pruner(pair(), undercut_spaces((40, 12, 7)), example=torch.zeros(2, 2))
    for _ in range(3):
        pruner.step()
        assert pruner.kept == {name: counts[pruner.epoch - 1] for name, counts in pruner.plan.items()}
    phases = [keepk.Phase(3, prune="c"), keepk.Phase(3, prune="w")]
    pruner = keepk.Pruner(pair(), undercut_spaces((12, 9, 7)), example=torch.zeros(2, 2), phases=phases)
    for _ in range(6):
        pruner.step()
    assert pruner.kept == {"c": 3, "w": 7}
    with pytest.raises(
        PlanError, match=r"keeps 70 weights at epoch 4, .* keeps at most these counts, by epoch: [\d, ]+\.$"
    ):
        keepk.Pruner(pair(), undercut_spaces(), example=torch.zeros(2, 2), phases=phases)


@pytest.mark.parametrize("schedule", [keepk.Cubic(), keepk.OneShot(), keepk.Annealing(p0=0.2, n1=1, nu=0.2)], ids=str)
def test_a_schedule_after_the_channels_starts_from_what_is_sure_to_be_left(schedule):
    spaces = [undercut_spaces()[0], keepk.weights("*.weight", keep=7, schedule=schedule, name="w")]
    phases = [keepk.Phase(3, prune="c"), keepk.Phase(3, prune="w")]
    pruner = keepk.Pruner(pair(), spaces, example=torch.zeros(2, 2), phases=phases)
    assert pruner.plan["w"][:3] == (120, 120, 120)
    assert pruner.plan["w"][3:] == tuple(plan(schedule, 12, 7, epochs=3))
    for _ in range(6):
        pruner.step()
        if pruner.epoch > 3:
            assert pruner.kept["w"] == pruner.plan["w"][pruner.epoch - 1]


def test_more_weights_than_channels_leave_at_the_end_are_refused_without_phases_as_the_cure():
    with pytest.raises(PlanError, match=r"and 12 at the end\. Keep at most 12 weights, or more channels") as refused:
        keepk.Pruner(
            pair(), undercut_spaces((40, 12, 12))[:1] + undercut_spaces((30, 20, 13))[1:], example=torch.zeros(2, 2)
        )
    assert "Phase" not in str(refused.value)


def test_channels_that_have_nothing_of_the_weights_do_not_matter():
    spaces = [keepk.channels("0", keep=1), keepk.weights("7.*", keep=3, schedule=[8, 8, 3])]
    pruner = keepk.Pruner(mlp(), spaces, example=ROW)
    assert pruner.plan["7.*"] == (8, 8, 3)


def the_last(layer):
    return torch.as_tensor(layer.units).float()


def parts(model, optimizer):
    tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    return str(model), [(tuple(tensor.shape), tensor.flatten().tolist()) for tensor in tensors]


@pytest.mark.parametrize("shrink", ["each", "end", "never"])
def test_an_event_that_would_undercut_is_refused_and_changes_nothing(shrink):
    """All kept weights are in channels that the metric removes."""
    model = pair(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        model[0].weight[:4] *= 100
    spaces = [
        keepk.channels("0", keep=4, schedule=[8, 4], name="c", metric=the_last),
        keepk.weights("0.weight", keep=6, schedule=[8, 6], name="w"),
    ]
    pruner = keepk.Pruner(model, spaces, optimizer, example=torch.zeros(2, 2), shrink=shrink)
    model(torch.randn(3, 2)).square().sum().backward()
    optimizer.step()
    pruner.step()
    before, state = copy.deepcopy(parts(model, optimizer)), repr(pruner.state_dict())
    words = (
        r"'w': the remaining channels have only 2 of its weights, fewer than the 6 that its plan keeps at this event"
    )
    for _ in range(2):
        with pytest.raises(RankError, match=words):
            pruner.step()
        assert parts(model, optimizer) == before
        assert (repr(pruner.state_dict()), pruner.epoch) == (state, 1)


@st.composite
def runs(draw):
    name = draw(st.sampled_from(sorted(NETWORKS)))
    make, channels, example = NETWORKS[name]
    model = make()
    named = dict(model.named_parameters())
    globs = draw(st.sampled_from(GLOBS))
    total = sum(p.numel() for n, p in named.items() if globs == ["*"] or n.endswith(globs[0][1:]))
    counts = sorted(draw(st.lists(st.integers(1, total), min_size=2, max_size=3)), reverse=True)
    weights = keepk.weights(globs, keep=counts[-1], name="weights", schedule=counts)
    late = draw(st.booleans())
    phases = [keepk.Phase(1, prune=[it.name for it in channels]), keepk.Phase(len(counts), prune="weights")]
    return model, [*channels, weights], example, phases if late else None, draw(st.sampled_from(["each", "never"]))


@given(runs(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_an_accepted_plan_is_kept_or_the_event_is_refused_and_nothing_changed(run, seed):
    model, spaces, example, phases, shrink = run
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    try:
        pruner = keepk.Pruner(model, spaces, example=example, phases=phases, shrink=shrink)
    except PlanError:
        return
    while not pruner.done:
        before, state = copy.deepcopy(model.state_dict()), repr(pruner.state_dict())
        try:
            pruner.step()
        except RankError:
            assert phases is None, "after the channels nothing takes weights along"
            assert repr(pruner.state_dict()) == state
            assert all(torch.equal(before[name], it) for name, it in model.state_dict().items())
            return
        planned = pruner.plan["weights"][pruner.epoch - 1]
        kept = sum(int(mask.sum()) for mask in pruner._session.weights.masks.values())
        waits = planned == pruner.certificate["weights"]["total"]
        assert kept == pruner.kept["weights"]
        assert kept <= planned if waits else kept == planned


def test_without_the_check_such_a_plan_undercuts():
    """The events of the first plan above would keep fewer weights, so the refusal comes from the check."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks_module, "refuse_undercut", lambda *_: None)
        pruner = keepk.Pruner(pair(), undercut_spaces(), example=torch.zeros(2, 2))
    with pytest.raises(RankError, match="have only 40 of its weights, fewer than the 70"):
        pruner.step()
