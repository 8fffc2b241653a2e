"""Every recipe's plan ends at the requested numbers, and the recipes named `paper` follow the paper's text."""

from itertools import accumulate, pairwise
from math import cos, pi

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keepk
from keepk_paper.lenet import EXPERIMENTS
from keepk_paper.models import LeNet5, LeNet300
from keepk_paper.recipes import Recipe, Stage, by_quality

TOTALS = {
    LeNet300: {"all": 785 * 300 + 301 * 100 + 101 * 10},
    LeNet5: {"fc": 801 * 500 + 501 * 10, "conv": 26 * 20 + 501 * 50, "all": 431_080},
}
# The number of weights left at the end of each stage, by space.
LEFT = {
    ("lenet-300-100", "paper"): {"all": [266_610, 17_329]},
    ("lenet-300-100", "keepk"): {"all": [266_610, 17_329, 8_300, 3_999]},
    ("lenet-5", "paper"): {"fc": [405_510, 8_110, 8_110, 8_110], "conv": [25_570, 25_570, 7_671, 7_671]},
    ("lenet-5", "keepk"): {"all": [431_080, 15_781, 8_621, 3_879, 2_500, 1_724]},
}
LEFT_AT_ONCE = {"lenet-300-100": (17_329, 3_999), "lenet-5": (8_621, 3_879, 1_724)}
RECIPES = {
    (experiment, name): recipe
    for experiment, named in EXPERIMENTS.items()
    for name, recipe in named.items()
    if not recipe.only_by_name
}
STAGES = [
    pytest.param(stage, id=f"{experiment}-{name}-{number}")
    for (experiment, name), recipe in RECIPES.items()
    for number, stage in enumerate(recipe.stages)
]


def pruner_of(recipe, model, optimizer):
    return keepk.Pruner(model, recipe.weight_spaces(TOTALS[recipe.network]), optimizer, phases=recipe.phases())


def plan_of(recipe):
    model = recipe.network()
    return pruner_of(recipe, model, torch.optim.SGD(model.parameters(), lr=0.1)).plan


def stage_ends(recipe):
    return list(accumulate(stage.epochs for stage in recipe.stages))


def test_these_are_all_the_recipes():
    assert RECIPES.keys() == LEFT.keys()
    assert all(recipe.name == name for (_, name), recipe in RECIPES.items())


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_rivals_end_with_the_same_number_of_epochs_and_start_from_the_same_dense_stage(experiment):
    ours, named = EXPERIMENTS[experiment]["keepk"], EXPERIMENTS[experiment]
    assert [*named] == ["paper", "keepk", "dense", *(f"one-shot-{keep}" for keep in LEFT_AT_ONCE[experiment])] + [
        f"han-{number}" for number in (1, 2, 3)
    ]
    assert named["dense"].stages == ours.stages[:1]
    reached = dict(zip((stage.keep.get("all", (0,))[0] for stage in ours.stages), stage_ends(ours), strict=True))
    for keep in LEFT_AT_ONCE[experiment]:
        recipe = named[f"one-shot-{keep}"]
        (space,) = recipe.weight_spaces({"all": TOTALS[ours.network]["all"]})
        assert recipe.needs == ["dense"]
        assert (space.keep, recipe.stages[0].epochs) == (keep, reached[keep] - ours.stages[0].epochs)
    rounds = [named[f"han-{number}"] for number in (1, 2, 3)]
    assert [recipe.needs for recipe in rounds] == [["dense"], ["han-1"], ["han-2"]]
    assert abs(sum(recipe.epochs for recipe in rounds) + named["dense"].epochs - ours.epochs) <= 1


@pytest.mark.parametrize("network", [LeNet300, LeNet5])
def test_a_quality_keeps_what_is_above_the_deviation_of_its_layer(network):
    """Also in a second round, where most weights are zero: these do not count and do not come back."""
    recipe = EXPERIMENTS["lenet-300-100" if network is LeNet300 else "lenet-5"]["han-1"]
    torch.manual_seed(0)
    model = network()
    for _ in range(2):
        kept = 0
        settled = by_quality(recipe, model)
        for name, (count, _) in settled.stages[0].keep.items():
            layer = model.get_submodule(name)
            values = torch.cat([parameter.detach().flatten() for parameter in layer.parameters()]).numpy()
            above = np.abs(values) >= values[values != 0].std()
            assert 0 < count == above.sum() < len(values)
            kept += count
        spaces = settled.weight_spaces({name: size_of(model.get_submodule(name)) for name in recipe.spaces})
        pruner = keepk.Pruner(model, spaces, epochs=settled.epochs)
        pruner.step()
        pruner.close()
        assert sum(int(parameter.count_nonzero()) for parameter in model.parameters()) == kept


def size_of(layer):
    return sum(parameter.numel() for parameter in layer.parameters())


@pytest.mark.parametrize("network", TOTALS)
def test_the_networks_have_the_papers_sizes(network):
    sizes = {name: parameter.numel() for name, parameter in network().named_parameters()}
    by_kind = {
        kind: sum(size for name, size in sizes.items() if name.startswith(kind) or kind == "all")
        for kind in TOTALS[network]
    }
    assert by_kind == TOTALS[network]


@pytest.mark.parametrize("key", RECIPES, ids="-".join)
def test_every_stage_ends_at_the_number_asked_for(key):
    recipe = RECIPES[key]
    plan = plan_of(recipe)
    assert {space: [counts[end - 1] for end in stage_ends(recipe)] for space, counts in plan.items()} == LEFT[key]


@pytest.mark.parametrize("key", RECIPES, ids="-".join)
def test_a_space_falls_in_its_own_stages_only(key):
    recipe = RECIPES[key]
    for space, counts in plan_of(recipe).items():
        own = [space in stage.keep for stage in recipe.stages for _ in range(stage.epochs)]
        before = [TOTALS[recipe.network][space], *counts]
        assert len(own) == len(counts)
        assert all(first >= second for first, second in pairwise(before))
        assert all(mine or first == second for mine, (first, second) in zip(own, pairwise(before), strict=True))


def test_the_papers_plans_pass_the_papers_numbers():
    """85, 90 and 93.5 % of LeNet-300-100; 90, 95 and 98 % of LeNet-5's fc layers, 5 % steps to 70 % of its conv's."""
    lenet_300 = plan_of(RECIPES["lenet-300-100", "paper"])["all"]
    assert lenet_300[30:34] == (39_991, 26_661, 17_329, 17_329)
    lenet_5 = plan_of(RECIPES["lenet-5", "paper"])
    assert lenet_5["fc"][12:16] == (40_551, 20_275, 8_110, 8_110)
    assert lenet_5["conv"][15:29] == tuple(25_570 * (100 - 5 * step) // 100 for step in range(1, 15))
    assert lenet_5["fc"][-1] + lenet_5["conv"][-1] == 15_781


@pytest.mark.parametrize(("experiment", "epochs"), [("lenet-300-100", 20), ("lenet-5", 40)])
def test_the_papers_pruning_is_as_long_and_as_slow_as_the_text_says(experiment, epochs):
    """Dense training by plain SGD; then a tenth of the rate, momentum .9, and the text's number of epochs."""
    dense, *pruning = RECIPES[experiment, "paper"].stages
    assert sum(stage.epochs for stage in pruning) == epochs
    assert (dense.momentum, dense.nesterov, dense.keep, dense.freeze) == (0, False, {}, ())
    for stage in pruning:
        assert (stage.momentum, stage.nesterov) == (0.9, False)
        assert stage.learning_rate(0) == pytest.approx(dense.learning_rate(0) / 10)
    for stage in (dense, *pruning):
        assert {stage.learning_rate(tenth / 10) for tenth in range(10 * stage.epochs)} == {stage.lr}
        assert (stage.decay, any(stage.dropout)) == (0, False)


@pytest.mark.parametrize("key", RECIPES, ids="-".join)
def test_a_point_is_reported_at_every_number_of_weights(key):
    """The dense network and every joint target; the paper's LeNet-5 has a single point after the joint epochs."""
    totals = [sum(spaces) for spaces in zip(*LEFT[key].values(), strict=True)]
    reported = [left for left, stage in zip(totals, RECIPES[key].stages, strict=True) if stage.report]
    assert reported == ([431_080, 15_781] if key == ("lenet-5", "paper") else totals)


@pytest.mark.parametrize("key", RECIPES, ids="-".join)
def test_each_dropout_layer_has_a_rate_or_none_has(key):
    layers = [module for module in RECIPES[key].network().modules() if isinstance(module, torch.nn.Dropout)]
    assert {len(stage.dropout) for stage in RECIPES[key].stages} <= {0, len(layers)}


def test_the_papers_lenet_5_freezes_what_it_does_not_prune():
    """fc is pruned while conv is frozen, conv while fc is frozen, and at the end nothing is frozen."""
    recipe = RECIPES["lenet-5", "paper"]
    model = recipe.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    pruner = pruner_of(recipe, model, optimizer)
    moved = []
    for _ in range(pruner.epochs):
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        moved.append({name[:2] for name, parameter in model.named_parameters() if not parameter.equal(before[name])})
        pruner.step()
    assert moved == [{"co", "fc"}] * 12 + [{"fc"}] * 3 + [{"co"}] * 14 + [{"co", "fc"}] * 23
    assert pruner.kept == {"fc": 8_110, "conv": 7_671}
    assert sum(int(mask.sum()) for mask in pruner.masks.values()) == 15_781


@pytest.mark.parametrize("stage", STAGES)
def test_every_rate_is_positive_until_the_last_batch(stage):
    rates = [stage.learning_rate(step / 100) for step in range(100 * stage.epochs)]
    assert rates[0] == stage.lr
    assert min(rates) > 0
    assert all(first >= second for first, second in pairwise(rates))


@given(
    flat=st.integers(0, 20),
    falling=st.integers(1, 30),
    lr=st.floats(1e-4, 1),
    progress=st.floats(0, 1, exclude_max=True),
)
def test_the_rate_stays_and_then_falls_to_zero_as_a_cosine(flat, falling, lr, progress):
    """After the flat part, at a share x of the rest: lr cos^2(pi x / 2)."""
    stage = Stage(flat + falling, lr=lr, flat=flat)
    assert stage.learning_rate(progress * flat) == lr
    assert stage.learning_rate(flat + progress * falling) == pytest.approx(lr * cos(pi * progress / 2) ** 2, abs=1e-9)
    assert stage.learning_rate(flat + falling) == pytest.approx(0, abs=1e-12)
    assert stage.learning_rate(flat + falling / 2) == pytest.approx(lr / 2)


@given(epochs=st.integers(1, 50), lr=st.floats(1e-4, 1), progress=st.floats(0, 1))
def test_without_a_flat_part_given_the_rate_stays_for_ever(epochs, lr, progress):
    assert Stage(epochs, lr=lr, flat=None).learning_rate(progress * epochs) == lr


def test_a_recipe_that_cannot_reach_its_number_is_refused_before_any_training():
    slow = {"all": (17_329, keepk.Annealing(p0=0.85, n1=1, nu=0.05))}
    recipe = Recipe("slow", LeNet300, {"all": "*"}, [Stage(2, lr=0.1, keep=slow)], batch=64)
    with pytest.raises(keepk.errors.PlanError, match="It needs 3 epochs"):
        recipe.weight_spaces({"all": 266_610})
