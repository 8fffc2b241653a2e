"""Budgets of a run: refusals before training, budgets of the `Pruner`, phases, masks, states and certificates."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn

import keepk
from keepk.errors import PlanError, RankError, SpaceError, StateError
from keepk.model.costs import model_costs
from keepk.plan.budgets import Budget
from keepk.run.choosing import RunCosts
from saved_models import looks, unchanged
from untyped import untyped

L2 = keepk.metrics.l2


def small():
    """A network with 6 hidden units in '0' and 5 in '2': 4 * 6 + 6 * 5 + 5 * 2 = 64 MACs, 77 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def convnet():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 12, 3),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
    )


def pictures():
    return torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(2))


def inputs():
    return torch.linspace(-1, 1, 8).view(2, 4)


def refused(kind, words, spaces, model=None, **arguments):
    model = small() if model is None else model
    before = looks(model)
    with pytest.raises(kind, match=words):
        keepk.Pruner(model, spaces, **{"example": inputs(), **arguments})
    unchanged(model, before)


def channels(name="0", **options):
    return keepk.channels(name, **{"metric": L2, "name": name, **options})


def run_to_the_end(pruner):
    while not pruner.done:
        pruner.step()
    return pruner


# Refusals


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (
            {"macs": 64},
            "space '0': macs=64 is not below the 64 MACs per sample of the dense model, so nothing would be",
        ),
        ({"macs": 1_000}, "space '0': macs=1000 is not below the 64 MACs per sample .* Choose less than 64."),
        ({"parameters": 77}, "parameters=77 is not below the 77 parameters of the dense model"),
        # The other layer keeps its 5 units: 4 * 1 + 1 * 5 + 5 * 2.
        ({"macs": 18}, r"space '0': macs=18 is below the 19 MACs per sample that the model still has when every layer"),
        (
            {"macs": 0.1},
            r"space '0': macs=0.1 \(6 MACs\) is below the 19 MACs per sample .* Choose macs=19 or more, a ",
        ),
        ({"macs": 20, "layer_floor": 2}, "macs=20 is below the 28 MACs per sample"),
        # Every removal is forbidden, so no budget helps, and the dense cost itself would be refused.
        ({"macs": 20, "layer_floor": 8}, r"below the 64 MACs .* keeps only its floor. Choose a lower layer_floor= or"),
        ({"macs": 20, "round_to": 4}, "macs=20 is below the 46 MACs per sample .* a lower layer_floor= or round_to="),
        ({"parameters": 10}, "parameters=10 is below the 27 parameters that the model still has"),
        ({"macs": 0.5, "schedule": [40, 50, 32]}, "space '0': plan .*rises from 40 to 50"),
        ({"macs": 0.5, "schedule": [40]}, "space '0': schedule .* ends at 40, not at the 32"),
    ],
)
def test_budgets_that_cannot_be_met_are_refused_before_training(space, words):
    refused(SpaceError if "schedule" not in space else PlanError, words, [channels(**space)])


def test_the_least_budget_that_the_error_names_can_be_met():
    pruner = keepk.Pruner(small(), [channels(macs=19)], example=inputs())
    pruner.step()
    assert pruner.kept == {"0": 1}
    assert pruner.certificate["0"]["reached"] == 19


def test_spaces_without_a_number_need_a_budget_of_the_pruner():
    words = (
        "space '0': got neither keep= nor prune=, macs= or parameters=, and the Pruner has no budget. Pass exactly one "
        "of them to keepk.channels, or a budget for all such spaces to the Pruner: macs=0.5."
    )
    refused(SpaceError, f"^{re.escape(words)}$", [channels()])


def test_a_budget_of_the_pruner_needs_spaces_without_a_number():
    for space in (channels(keep=3), channels(macs=0.5), keepk.weights("*", keep=10)):
        refused(
            SpaceError, "^Pruner: macs=0.5, but no channel space is left to it: each has its own", [space], macs=0.5
        )
    refused(SpaceError, "^Pruner: macs=1 would be the dense model", [channels()], macs=1)
    refused(SpaceError, "^Pruner: parameters=True: got bool", [channels()], parameters=True)
    refused(SpaceError, "^Pruner: got both macs=0.5 and parameters=0.5", [channels()], macs=0.5, parameters=0.5)
    refused(SpaceError, "^Pruner: macs=64 is not below the 64 MACs per sample of the dense", [channels()], macs=64)
    refused(SpaceError, r"^Pruner: macs=0.1 \(6 MACs\) is below the 19 MACs", [channels()], macs=0.1)
    named = keepk.channels("0", name="macs")
    refused(SpaceError, "space 'macs': a budget of the Pruner has this name in the plan. Give the", [named], macs=0.5)


def test_two_budgets_at_once_are_refused():
    words = (
        "spaces '0' and '2': macs=0.5 and parameters=0.4 at the same time, but each budget bounds the whole model. "
        r"Give both spaces one budget, Pruner\(macs=0.5\), or prune them in different phases."
    )
    spaces = [channels("0", macs=0.5), channels("2", parameters=0.4)]
    refused(SpaceError, words, spaces)
    phases = [keepk.Phase(1, prune="0"), keepk.Phase(1, prune=["0", "2"])]
    refused(SpaceError, "macs=0.5 and parameters=0.4 in phase 2, but each budget", spaces, phases=phases)
    refused(SpaceError, "at the same time", [channels("0", macs=0.5), channels("2")], macs=0.4)


def test_a_later_budget_must_be_lower():
    phases = [keepk.Phase(1, prune="0"), keepk.Phase(2, prune="2")]
    spaces = [channels("2", macs=0.7), channels("0", macs=0.5)]
    words = "space '2': macs=0.7 is not below the 32 MACs per sample that an earlier phase leaves"
    refused(SpaceError, words, spaces, phases=phases)


def test_spaces_that_share_a_budget_share_its_plan():
    spaces = [channels("0"), channels("2", schedule=[40, 32])]
    words = "spaces '0' and '2': they share the budget macs=0.5 of the Pruner, but their schedules or phases differ"
    refused(PlanError, words, spaces, macs=0.5, epochs=2)
    phases = [keepk.Phase(1, prune="0"), keepk.Phase(1, prune="2")]
    refused(PlanError, words, [channels("0"), channels("2")], macs=0.5, phases=phases)


class Elementwise(nn.Module):
    """A model whose forward has nothing that torch counts."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.conv = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.norm(x) * self.conv).sum(1)


def test_macs_of_a_model_without_any_are_refused():
    model = Elementwise()
    costs = RunCosts(model, keepk.trace(model, inputs()), inputs())
    with pytest.raises(
        SpaceError, match=r"^here: macs=0.5, but the model has no MACs: torch counts matrix products and"
    ):
        costs.dense("here", Budget("macs", 0.5))
    assert costs.dense("here", Budget("parameters", 0.5)) == 12


def test_weights_in_the_channels_of_a_budget_come_in_a_later_phase():
    weights = keepk.weights("*.weight", keep=10, name="w")
    words = (
        "space 'w': some of its weights are in channels of '0', and how many of these macs=0.5 keeps is not known "
        r"before they are cut. Prune weights in a later phase: Pruner\(phases=\[keepk.Phase\(..., prune='0'\), "
    )
    refused(PlanError, words, [channels(macs=0.5), weights])
    for phases in (
        [keepk.Phase(1, prune=["0", "w"])],
        [keepk.Phase(1, prune="w"), keepk.Phase(1, prune="0")],
        [keepk.Phase(1, prune="0"), keepk.Phase(1, prune="w"), keepk.Phase(1, prune="0")],
    ):
        refused(PlanError, words, [channels(macs=0.5), weights], phases=phases)
    # '4' has no weights of the channels of '0'.
    pruner = keepk.Pruner(small(), [channels(macs=0.5), keepk.weights("4.weight", keep=3, name="w")], example=inputs())
    pruner.step()
    assert pruner.kept["w"] == 3


def test_more_weights_than_the_budget_leaves_are_refused():
    phases = [keepk.Phase(1, prune="0"), keepk.Phase(1, prune="w")]
    spaces = [channels(macs=0.5), keepk.weights("*.weight", keep=60, name="w")]
    words = "space 'w': keeps 60 weights, but with the present ranking the channels that the budgets keep have only 28"
    refused(PlanError, words, spaces, phases=phases)


# Runs


@pytest.mark.parametrize("cost", ["macs", "parameters"])
def test_plan_and_implied_counts(cost):
    schedule = keepk.Annealing(p0=0.2, n1=2, nu=0.1)
    model, example = convnet(), pictures()
    dense = getattr(model_costs(model, example), cost)
    pruner = keepk.Pruner(model, [channels("*", schedule=schedule, **{cost: 0.5})], example=example)
    assert pruner.plan == {"*": tuple(schedule(dense, dense // 2, None))}
    implied = pruner.implied["*"]
    assert len(implied) == pruner.epochs
    for epoch, bound in enumerate(pruner.plan["*"]):
        pruner.step()
        assert pruner.kept["*"] == pruner.implied["*"][epoch]
        assert pruner.certificate["*"]["reached"] == getattr(model_costs(model, example), cost) <= bound
    assert pruner.implied["*"][0] == implied[0]  # nothing was trained before the first event
    entry = {"budget": cost, "dense": dense, "asked": dense // 2, "reached": getattr(model_costs(model, example), cost)}
    assert pruner.certificate["*"].items() >= {**entry, "kept": pruner.kept["*"], "total": 36}.items()


def test_several_spaces_keep_the_same_share_of_their_channels():
    model = convnet()
    spaces = [channels("0"), channels("3"), channels("8")]
    pruner = keepk.Pruner(model, spaces, example=pictures(), macs=0.4)
    assert list(pruner.plan) == ["macs"]
    assert pruner.spaces == ("0", "3", "8")
    assert list(pruner.implied) == ["0", "3", "8"]
    pruner.step()
    kept = pruner.kept
    totals = {"0": 12, "3": 16, "8": 8}
    for one, total in totals.items():
        assert kept[one] == pruner.implied[one][-1]
        # With one unit more, no space would have kept a smaller share than another one.
        assert all((kept[one] + 1) / total >= kept[other] / totals[other] for other in totals)
    costs = model_costs(model, pictures())
    assert {it["reached"] for it in pruner.certificate.values()} == {costs.macs}
    assert costs.macs <= pruner.plan["macs"][-1]


def test_spaces_with_a_count_are_cut_first():
    model, example = convnet(), pictures()
    dense = model_costs(model, example).macs
    bounds = [dense * 9 // 10, dense * 6 // 10, dense * 3 // 10]
    spaces = [channels("0", macs=0.3, schedule=bounds), channels("3", keep=8, schedule=[12, 10, 8])]
    pruner = keepk.Pruner(model, spaces, example=example)
    for count, bound in zip((12, 10, 8), bounds, strict=True):
        pruner.step()
        assert pruner.kept["3"] == count
        assert model_costs(model, example).macs <= bound
        # With one unit of '0' more, which has 7 * 7 pixels and is read by `count` filters, it would cost more.
        assert model_costs(model, example).macs + 7 * 7 * 9 + 5 * 5 * 9 * count > bound or pruner.kept["0"] == 12
    assert pruner.kept["0"] < 12


def test_a_budget_that_other_spaces_meet_removes_nothing():
    pruner = keepk.Pruner(small(), [channels("0", macs=0.5), channels("2", keep=1)], example=inputs())
    pruner.step()
    assert pruner.kept == {"0": 6, "2": 1}
    assert pruner.certificate["0"]["reached"] == 4 * 6 + 6 * 1 + 1 * 2 == 32


def test_masked_channels_count_as_removed():
    runs = {}
    for shrink in ("each", "end", "never"):
        model = convnet()
        space = channels("*", macs=0.5, schedule=keepk.Cubic(3))
        pruner = keepk.Pruner(model, [space], example=pictures(), shrink=shrink)
        dense = model_costs(model, pictures()).macs
        pruner.step()
        assert (model_costs(model, pictures()).macs == dense) == (shrink != "each")
        run_to_the_end(pruner)
        runs[shrink] = pruner.kept, pruner.certificate["*"]["reached"]
        assert (model_costs(model, pictures()).macs == dense) == (shrink == "never")
    assert runs["each"] == runs["end"] == runs["never"]


def test_budgets_in_two_phases_and_weights_after_them():
    model, example = convnet(), pictures()
    dense = model_costs(model, example).macs
    spaces = [
        channels("0", macs=0.6, schedule=keepk.Cubic()),
        channels("3", macs=0.3, schedule=keepk.Cubic()),
        keepk.weights("*.weight", keep=100, name="w", schedule=keepk.Cubic()),
    ]
    phases = [keepk.Phase(2, prune="0"), keepk.Phase(2, prune="3"), keepk.Phase(3, prune="w")]
    pruner = keepk.Pruner(model, spaces, example=example, phases=phases)
    plan = pruner.plan
    assert plan["0"][1:] == (dense * 6 // 10,) * 6
    assert plan["3"][:2] == (dense, dense)
    assert dense * 3 // 10 < plan["3"][2] < dense * 6 // 10  # it starts from the first budget
    assert plan["3"][3:] == (dense * 3 // 10,) * 4
    total = sum(p.numel() for n, p in model.named_parameters() if n.endswith("weight"))
    assert plan["w"][:4] == (total,) * 4
    for epoch in range(7):
        pruner.step()
        assert model_costs(model, example).macs <= min(plan["0"][epoch], plan["3"][epoch])
    assert pruner.kept["w"] == 100


def test_a_later_budget_counts_on_the_channels_that_an_earlier_one_leaves():
    """Alone, the space '2' reaches 4 * 6 + 6 * 1 + 1 * 2 = 32 MACs; after the first budget, fewer."""
    phases = [keepk.Phase(1, prune="0"), keepk.Phase(1, prune="2")]
    pruner = keepk.Pruner(small(), [channels("0", macs=30), channels("2", macs=20)], example=inputs(), phases=phases)
    run_to_the_end(pruner)
    assert pruner.certificate["2"]["reached"] == model_costs(pruner.model, inputs()).macs <= 20
    words = r"space '2': macs=\d+ is below the (\d+) MACs"
    with pytest.raises(SpaceError, match=words) as refused:
        keepk.Pruner(small(), [channels("0", macs=30), channels("2", macs=3)], example=inputs(), phases=phases)
    assert "is below the 12 MACs" in str(refused.value)  # 2 hidden units in '0' are left: 4 * 2 + 2 * 1 + 1 * 2


def test_a_bound_that_the_ranking_of_an_event_cannot_meet_is_refused_and_nothing_changes():
    """With reads, the cost of the floors depends on the ranking, which is not known before the run."""
    pruner = keepk.Pruner(small(), [channels(macs=19)], example=inputs())
    budget = pruner._spec.budgets[0]
    object.__setattr__(budget, "plan", (18,))
    before = looks(pruner.model)
    words = "space '0': macs=19 allows 18 MACs per sample after epoch 1, but the channels that the floors keep cost 19"
    with pytest.raises(RankError, match=words):
        pruner.step()
    unchanged(pruner.model, before)
    assert pruner.epoch == 0


def test_costs_that_differ_from_the_trace_are_refused_and_nothing_changes(monkeypatch):
    for cost in ("macs", "parameters"):
        pruner = keepk.Pruner(small(), [channels(**{cost: 0.6})], example=inputs())
        costs = pruner._spec.costs
        assert costs is not None
        monkeypatch.setattr(costs, "of", lambda *it, right=costs.of: right(*it) - 1)
        before = looks(pruner.model)
        with pytest.raises(
            RankError, match=f"space '0': {cost}=0.6: the cut model would have .* but the trace predicts"
        ):
            pruner.step()
        unchanged(pruner.model, before)


def test_a_metric_that_needs_gradients():
    """Its budget is checked before training without a ranking; the implied counts need one."""
    model = small()
    seen = keepk.Statistics(model)
    pruner = keepk.Pruner(model, [channels(macs=0.5, metric=keepk.metrics.taylor(seen))], example=inputs())
    with pytest.raises(RankError):
        untyped(pruner.implied)
    assert "asked" in str(pruner.report())
    for _ in range(2):
        model(inputs()).square().mean().backward()
        seen.update()
        model.zero_grad()
    assert len(pruner.implied["0"]) == 1
    pruner.step()
    assert model_costs(model, inputs()).macs <= 32


def test_uncounted_channels_of_a_budget():
    class FirstRead(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

        def forward(self, x):
            x = self.conv(x)
            return self.out(x) + x[:, :1]

    torch.manual_seed(0)
    with pytest.warns(keepk.KeepkWarning, match="not counted: .*They stay in addition to those that the budget keeps"):
        pruner = keepk.Pruner(FirstRead(), [channels("conv", macs=0.5)], example=inputs())
    pruner.step()
    assert pruner.certificate["conv"]["fixed"] == 1


def test_repr_and_warnings_before_the_first_event(tmp_path):
    pruner = keepk.Pruner(small(), [channels("0"), channels("2")], example=inputs(), macs=0.5)
    assert repr(pruner).splitlines() == [
        "Pruner(epoch 0 of 1)",
        "  0: 6 of 6 channels kept",
        "  2: 5 of 5 channels kept",
        "  budget macs: 64 of 64 MACs, at most 32 at the end",
    ]
    with pytest.warns(keepk.KeepkWarning, match="nothing is pruned: .* all of its 64 MACs, and its target is 32"):
        keepk.save(pruner.model, tmp_path / "dense")


# States and files


def budget_run(**options):
    spaces = [channels("*", schedule=[9_000, 7_000, 6_000, 5_000], macs=5_000)]
    return keepk.Pruner(convnet(), spaces, example=pictures(), **options)


def test_a_state_of_another_budget_is_refused():
    pruner = budget_run()
    pruner.step()
    state = pruner.state_dict()
    assert state["budgets"] == {
        "*": {"cost": "macs", "dense": model_costs(convnet(), pictures()).macs, "target": 5_000, "spaces": ["*"]}
    }
    other = [channels("*", schedule=[9_000, 7_000, 6_000, 4_000], macs=4_000)]
    words = "pruner state: budget '\\*': the saved run has .*'target': 5000.*, this one has .*'target': 4000"
    by_count = [channels("*", keep=20, schedule=[30, 25, 22, 20])]
    for spaces, said in ((other, words), (by_count, "the saved run has .*, this one has no such budget. Load it into")):
        fresh = keepk.Pruner(convnet(), spaces, example=pictures())
        before = looks(fresh.model)
        with pytest.raises(StateError, match=said):
            fresh.load_state_dict(state)
        unchanged(fresh.model, before)


def test_another_dense_cost_is_refused():
    pruner, fresh = budget_run(), budget_run()
    state = copy.deepcopy(pruner.state_dict())
    state["budgets"]["*"]["dense"] += 1
    with pytest.raises(StateError, match=r"'dense'.*Load it into the same dense model with the same budgets"):
        fresh.load_state_dict(state)


def test_damaged_states_are_refused():
    pruner = budget_run()
    pruner.step()
    state = pruner.state_dict()
    for damage, words in (
        (lambda it: it["channels"].pop("kept"), "do not fit this model"),
        (lambda it: it["channels"]["kept"]["*"].append(3), "do not fit this model"),
        (lambda it: it["channels"]["kept"].update({"*": [3]}), "keeps .* channels, the plan says 3"),
        (lambda it: it.update(epoch=2), "do not fit this model"),
    ):
        bad, fresh = copy.deepcopy(state), budget_run()
        damage(bad)
        before = looks(fresh.model)
        with pytest.raises(StateError, match=words):
            fresh.load_state_dict(bad)
        unchanged(fresh.model, before)
    bad, fresh = copy.deepcopy(state), budget_run()
    bad["channels"]["gone"], bad["channels"]["removed"], bad["channels"]["kept"]["*"] = [], [], [36]
    with pytest.raises(StateError, match=r"its channels cost [\d,]+ MACs, the budget of '\*' is 9,000 at epoch 1. The"):
        fresh.load_state_dict(bad)


def test_a_saved_model_has_the_certificate_of_its_budget(tmp_path):
    pruner = run_to_the_end(budget_run())
    keepk.save(pruner.model, tmp_path / "small")
    loaded = keepk.load(convnet(), tmp_path / "small")
    found = loaded.keepk_record["certificate"]["*"]
    assert found == pruner.certificate["*"]
    assert found["reached"] == model_costs(loaded, pictures()).macs <= found["asked"] == 5_000
    assert np.array_equal(loaded(pictures()).detach(), pruner.model(pictures()).detach()) or loaded.training
