"""The repairs of a probe, one by one: each returns extended assumptions for the failures that it handles, else None."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn

import keepk
from keepk.graph import trace
from keepk.graph.choose import choose_half
from keepk.graph.probe import probe
from keepk.graph.probe.probe import Assumptions, Bench, Failure, Trial
from keepk.graph.probe.replay import Mismatch, Replays
from keepk.model.copies import META, Workshop
from keepk.model.example import TraceInputs


class Halves(nn.Module):
    """Both halves of a layer use one attribute as their size, and the scale depends on it."""

    def __init__(self, divide=False):
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 12), nn.Linear(6, 3), nn.Linear(6, 3)
        self.width, self.divide = 6, divide

    def forward(self, x):
        left, right = self.first(x).split(self.width, dim=1)
        return self.left(left) + self.right(right) / (left.shape[1] if self.divide else 1)


def first_trial(model):
    inputs = TraceInputs.of(torch.zeros(2, 8), None, None, "check", "check")
    workshop = Workshop(model, inputs.examples[0], META)
    watched = trace._Watched(workshop, inputs).all_runs()
    wiring, atoms = trace._wiring(model, watched), watched.tracers[0].atoms.count
    return Trial.first(Bench(workshop, Replays(tuple(watched.runs)), watched.facts, atoms, wiring))


def failed(trial, units=None):
    units = choose_half(trial.graph) if units is None else units
    return Failure(trial, trial.attempt(units), units)


def made_up(trial, name, **flags):
    """A failure at the first operation of this name."""
    step = next(number for number, step in enumerate(trial.bench.steps) if name in step.name)
    return Failure(trial, Mismatch(step, "made up", **flags), choose_half(trial.graph))


def grown(before, after):
    return [field.name for field in fields(Assumptions) if getattr(before, field.name) != getattr(after, field.name)]


def test_a_number_follows_the_size_that_it_repeats():
    trial = first_trial(Halves())
    failure = failed(trial)
    assumptions = probe.follow_numbers(failure)
    assert assumptions is not None
    assert grown(trial.assumptions, assumptions) == ["constants"]
    assert [it.attribute for it in assumptions.constants] == ["width"]
    then = trial.assuming(assumptions)
    assert then.graph.solution is trial.graph.solution
    assert trial.assumptions == Assumptions()
    after = then.attempt(failure.units)
    assert after is None or after.step > failure.mismatch.step


@pytest.mark.parametrize("repair", [probe.follow_numbers, probe.tie_parts])
def test_numbers_do_not_help_where_no_size_is_in_the_way(repair):
    trial = first_trial(Halves())
    units = choose_half(trial.graph)
    assert repair(Failure(trial, Mismatch(-1, "the cut is impossible"), units)) is None
    assert repair(made_up(trial, "addmm", number=True)) is None


def test_parts_with_one_number_are_tied_once():
    trial = first_trial(Halves())
    # If the number counts the left part, a failure of the right part binds the two.
    numbers = probe.follow_numbers(failed(trial))
    assert numbers is not None
    [constant] = [it for it in numbers.constants if it.attribute == "width"]
    trial = trial.assuming(trial.assumptions.with_constants([constant]))
    split = made_up(trial, "split")
    assumptions = probe.tie_parts(split)
    assert assumptions is not None
    assert grown(trial.assumptions, assumptions) == ["ties"]
    assert assumptions.ties[0].array.shape == (2, 6)
    assert "has its size in 'width'" in assumptions.ties[0].reason.why
    assert probe.tie_parts(made_up(trial.assuming(assumptions), "split")) is None


def test_a_changed_number_makes_units_lossy_and_nothing_else():
    trial = first_trial(Halves(divide=True))
    failure = made_up(trial, "split", number=True)
    assert probe.loosen_heads(failure) is None
    assumptions = probe.mark_lossy(failure)
    assert grown(trial.assumptions, assumptions) == ["lossy"]
    assert trial.assuming(assumptions).graph.units.lossy.any()
    assert probe.mark_lossy(made_up(trial, "split")) is None


def test_a_pin_keeps_the_blamed_units():
    trial = first_trial(Halves())
    assumptions = probe.pin(made_up(trial, "split"))
    assert grown(trial.assumptions, assumptions) == ["pins"]
    assert len(trial.assuming(assumptions).graph.units) < len(trial.graph.units)


def test_widths_become_multiples_unless_channels_are_wrong():
    trial = first_trial(Halves())
    assert probe.require_multiples(made_up(trial, "split", others=True)) is None
    assumptions = probe.require_multiples(made_up(trial, "split"))
    assert grown(trial.assumptions, assumptions) == ["aligned"]
    assert {it.multiple for it in trial.assuming(assumptions).graph.groups} == {8}


def test_multiples_are_tried_only_where_torch_raised_and_once():
    trial = first_trial(Halves())
    assert probe.try_multiples(made_up(trial, "split")) is None
    failure = made_up(trial, "split", raised=True)
    probe.try_multiples(failure)
    tried = len(trial.bench.tried)
    assert probe.try_multiples(failure) is None
    assert len(trial.bench.tried) == tried


def test_the_first_repair_that_helps_decides():
    asked = []

    def repair(name, result):
        return lambda failure: asked.append(name) or (failure.trial.assumptions if result else None)

    trial = first_trial(Halves())
    failure = made_up(trial, "split")
    assert probe.repaired(failure, [repair("one", False), repair("two", True), repair("three", True)]) is not None
    assert asked == ["one", "two"]
    assert probe.repaired(failure, [repair("one", False)]) is None


def test_settling_ends_with_a_graph_that_fits():
    model = Halves()
    graph = probe.settle(first_trial(model).bench)
    traced = keepk.trace(model, torch.zeros(2, 8))
    assert np.array_equal(graph.units.classes, traced.units.classes)
    assert [it.attribute for it in graph.constants] == [it.attribute for it in traced.constants] == ["width"]
