"""The laws of budgets: an event removes blocks by rank until the model is within its bound, and none after that.

The oracle removes one block at a time from a copy of the network, really cuts it, and has torch count what is left.
"""

import copy
import re
from collections import Counter
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import keepk
from keepk.errors import SpaceError
from keepk.model.copies import Workshop
from keepk.model.costs import model_costs, module_flops
from keepk.model.example import Example
from keepk.run.channels import ChannelSide
from masked import call
from networks import WITH_EXACT_UNITS
from random_networks import random_networks
from strategies import seeds
from traced_once import traced_before, traced_network

pytestmark = [
    pytest.mark.filterwarnings("ignore:space .* cannot be removed and (is|are) not:keepk.KeepkWarning"),
    pytest.mark.filterwarnings("ignore:space .* would keep less than 5 %:keepk.KeepkWarning"),
    pytest.mark.filterwarnings("ignore:space .* are tied at the cut:keepk.KeepkWarning"),
]
COSTS = ("macs", "parameters")


def table_metric(seed, levels=1_000):
    """A metric with a random score per unit, the same at every event."""
    table = np.random.default_rng(seed).integers(0, levels, 10_000)
    return lambda layer: torch.from_numpy(table[layer.units]).double()


def thirds(total, keep, _epochs):
    """Three events, evenly down to the target."""
    return [total - (total - keep) * event // 3 for event in (1, 2, 3)]


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


class Run:
    """A network that is pruned to a budget. If its graph is given, it is not traced again."""

    def __init__(self, network, spaces, **options):
        self.model, self.example, *graph = network
        with traced_before(self.model, self.example, *graph) if graph else nullcontext():
            self.pruner = keepk.Pruner(self.model, spaces, example=self.example, **options)
        side = self.pruner._session.channels
        assert isinstance(side, ChannelSide)
        self.side = side

    @property
    def living(self):
        return {name: it.units[~self.side.dead[it.units]].tolist() for name, it in self.side.members.items()}

    def counted(self, cost):
        """The cost of the network as it is now; MACs are counted by torch."""
        return parameters_of(self.model) if cost == "parameters" else model_costs(self.model, self.example).macs


def one_space(cost, amount, **options):
    return [keepk.channels("*", name="all", **{cost: amount, "schedule": thirds, **options})]


def with_least(build, cost, amount):
    """The result of `build` for a budget or, if the floors do not allow it, for the least one that the error names."""
    try:
        return build(amount)
    except SpaceError as refused:
        found = re.search(rf"Choose {cost}=(\d+) or more", str(refused))
        if found is None:
            raise
        return build(int(found[1]))


class Oracle:
    """One space of a run: removes block by block from a copy of the network, and counts what is left of it."""

    def __init__(self, run, name, cost):
        self.members, self.cost = run.side.members[name], cost
        self.model, self.graph, self.example = copy.deepcopy((run.model, run.side.graph, run.example))
        # The batch size does not change, so a block is counted in one pass; `model_costs` finds it again in a second.
        self.batch = (model_costs(run.model, run.example).batch if cost == "macs" else None) or 1
        self.living = [u for u in self.members.units.tolist() if not run.side.dead[u]]
        metric, units = self.members.space.metric, self.members.units
        scores = dict(zip(units.tolist(), metric(Units(units)).tolist(), strict=True))
        # Of equal scores, the lower unit has the higher rank.
        order = sorted(self.living, key=lambda unit: (scores[unit], -unit))
        self.rank = {unit: place for place, unit in enumerate(order, start=1)}
        self.home = {unit: layer.name for layer in self.members.layers for unit in layer.units.tolist()}
        self.floors = {it.name: self.members.space.floor_of(len(it.units)) for it in self.members.layers}

    def now(self):
        if self.cost == "parameters":
            return parameters_of(self.model)
        flops = module_flops(Workshop(self.model, Example.of(self.example), device=None))
        return sum(number // 2 // self.batch for number in flops.values())

    def keeps_floors(self, gone):
        left = [unit for unit in self.living if unit not in gone]
        counts = Counter(self.home[unit] for unit in left)
        floors = all(counts[name] >= floor for name, floor in self.floors.items())
        return floors and all(set(reads.tolist()) & set(left) for reads in self.members.sources)

    def lowest(self, units, number):
        """The lowest units that may go without breaking a floor; none if there are too few."""
        found = list[int]()
        for unit in sorted(units, key=lambda unit: self.rank[unit]):
            if len(found) < number and self.keeps_floors({*found, unit}):
                found.append(unit)
        return found if len(found) == number else []

    def candidates(self):
        """The next block of each layer or binding that may lose some."""
        for choice in self.members.choices:
            parts = [[u for u in part.tolist() if u in set(self.living)] for part in choice.blocks]
            count = sum(map(len, parts))
            allowed = range(count) if choice.free else choice.portion.counts
            numbers = [n for n in range(1, len(parts[0]) + 1) if count - n * len(parts) in allowed]
            chosen = [self.lowest(part, numbers[0]) for part in parts] if numbers else []
            block = [unit for units in chosen for unit in units]
            if block and all(chosen) and self.keeps_floors({*block}):
                yield block

    def remove_until(self, bound):
        """Remove blocks until the cost is at most `bound`; returns the costs on the way."""
        costs = [self.now()]
        while costs[-1] > bound:
            block = min(self.candidates(), key=lambda it: (sum(self.rank[u] for u in it) / len(it), min(it)))
            keepk.shrink(self.model, self.graph, block, replay=False)
            self.living = [unit for unit in self.living if unit not in block]
            costs.append(self.now())
        return costs


class Units:
    """A stand-in for a layer, of which the metric of a table reads only the units."""

    def __init__(self, units):
        self.units = units


def check_events(run, cost, *, name="all"):
    """Compare each event with the oracle; returns the number of blocks that went."""
    blocks, before = 0, run.counted(cost)
    for bound in run.pruner.plan[name]:
        oracle, living = Oracle(run, name, cost), run.living
        costs = oracle.remove_until(bound)
        run.pruner.step()
        assert run.living[name] == oracle.living
        assert set(run.living[name]) <= set(living[name])
        assert run.counted(cost) == costs[-1] == run.pruner.certificate[name]["reached"] <= bound
        assert run.counted(cost) <= before
        assert len(costs) == 1 or costs[-2] > bound  # without the last block it would be above the bound
        blocks, before = blocks + len(costs) - 1, costs[-1]
    assert run.pruner.kept[name] == len(run.living[name]) == run.pruner.implied[name][-1]
    return blocks


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("conv_bn_flatten", {}),
        ("conv_bn_flatten", {"round_to": 4}),
        ("conv_bn_flatten", {"layer_floor": 0.5}),
        ("residual", {}),
        ("concat", {"layer_floor": 2}),
        ("grouped", {}),
        ("grouped", {"round_to": 4}),
        ("depthwise", {}),
        ("channel_shuffle", {}),
        ("chunk", {"layer_floor": 0.25}),
        ("dense_block", {"at": "input"}),
        ("dense_block", {}),
        ("multihead_attention", {}),
        ("grouped_query_attention", {}),
        ("encoder_layer", {"lossy": True, "round_to": 2}),
        ("lstm", {}),
        ("tied_autoencoder", {}),
        ("einsum", {}),
    ],
)
def test_every_event_removes_the_blocks_of_the_oracle(name, options, cost):
    removed = 0
    for seed, share in ((0, 0.75), (1, 0.5))[: 1 if name == "lstm" else 2]:  # a trace follows every step of an LSTM
        asked = partial(one_space, cost, metric=table_metric(seed), **options)
        run = with_least(lambda amount, asked=asked: Run(traced_network(name), asked(amount)), cost, share)
        removed += check_events(run, cost)
    assert removed


@pytest.mark.parametrize("cost", COSTS)
def test_automatic_widths_lose_the_blocks_of_the_oracle(cost):
    torch.manual_seed(0)
    layers = [nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 9), nn.ReLU(), nn.Linear(9, 2)]
    model, example = nn.Sequential(*layers), torch.randn(2, 5)
    run = Run((model, example), one_space(cost, 0.3, metric=table_metric(2), round_to="auto"))
    assert run.pruner.round_to == {"all": {"0": 16, "2": 8, "4": 1}}
    assert check_events(run, cost) > 3


@given(
    network=random_networks(),
    seed=seeds,
    cost=st.sampled_from(COSTS),
    share=st.sampled_from([0.8, 0.6, 0.4]),
    levels=st.sampled_from([3, 1_000]),
    options=st.sampled_from([{}, {"round_to": 4}, {"layer_floor": 0.3}, {"layer_floor": 2}, {"lossy": True}]),
)
@settings(deadline=None, max_examples=6)
def test_random_networks_lose_the_blocks_of_the_oracle(network, seed, cost, share, levels, options):
    network = (*network, keepk.trace(*network))
    metric = table_metric(seed, levels)
    try:
        run = with_least(
            lambda amount: Run(copy.deepcopy(network), one_space(cost, amount, metric=metric, **options)), cost, share
        )
    except SpaceError as refused:
        # No exact channel, links between layers that a round_to binds, or no layer that can lose any.
        assume(not re.search("removing one changes|could not be met|is not below", str(refused)))
        raise
    check_events(run, cost)


@pytest.mark.parametrize("name", WITH_EXACT_UNITS)
def test_costs_are_met_and_counted_in_every_network_and_mode(name):
    """Masked channels count as removed: both modes choose the same ones and reach the same cost."""
    reached = dict[tuple[str, str], object]()
    for cost, shrink in (("macs", "each"), ("parameters", "each"), ("parameters", "never")):
        run = with_least(
            lambda amount, cost=cost, shrink=shrink: Run(
                traced_network(name), one_space(cost, amount, metric=table_metric(5)), shrink=shrink
            ),
            cost,
            0.8,
        )
        for bound in run.pruner.plan["all"]:
            run.pruner.step()
            assert run.pruner.certificate["all"]["reached"] <= bound
            assert shrink == "never" or run.counted(cost) == run.pruner.certificate["all"]["reached"]
        reached[cost, shrink] = run.living, run.pruner.certificate["all"]["reached"]
    assert reached["parameters", "each"] == reached["parameters", "never"]


@pytest.mark.parametrize("name", ["linears", "conv_bn_flatten", "multihead_attention"])
def test_macs_are_those_of_torchs_own_counter(name):
    run = Run(traced_network(name), one_space("macs", 0.5, metric=table_metric(2)))
    while not run.pruner.done:
        run.pruner.step()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(copy.deepcopy(run.model).eval().to("meta"), run.example.to("meta"))
    assert run.pruner.certificate["all"]["reached"] * 2 * len(run.example) == counter.get_total_flops()


@pytest.mark.parametrize(("name", "options"), [("linears", {}), ("concat", {}), ("halves", {}), ("dense_block", {})])
def test_where_all_steps_are_equal_it_is_the_set_that_keep_keeps(name, options):
    seed = table_metric(7)
    run = Run(traced_network(name), one_space("macs", 0.5, metric=seed, schedule=keepk.OneShot(), **options))
    run.pruner.step()
    other = Run(
        traced_network(name), [keepk.channels("*", name="all", keep=run.pruner.kept["all"], metric=seed, **options)]
    )
    other.pruner.step()
    assert run.living == other.living
