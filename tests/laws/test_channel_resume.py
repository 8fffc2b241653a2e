"""Law: a run that shrinks, killed at any moment and resumed from a dense model, ends as if it had never stopped.

A state that does not fit is refused, and the model keeps its size.
"""

import copy
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import keepk
from channel_resume_job import (
    BATCH,
    SCENARIOS,
    Convnet,
    Densenet,
    Grouped,
    Training,
    adam,
    convnet_spaces,
    densenet_spaces,
    grouped_spaces,
)
from keepk.cut.record import record_of
from keepk.errors import CheckpointError, StateError
from pictures import picture

pytestmark = pytest.mark.xdist_group("test_channel_resume")  # run the fixture in one process only


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    if not hasattr(os, "fork"):
        pytest.skip("the runs are forked")
    job = Path(__file__).parents[1].joinpath("support", "channel_resume_job.py")
    command = [sys.executable, str(job), str(tmp_path_factory.mktemp("resume"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_and_resumed_runs_end_bit_equal_to_the_uninterrupted_one(report, name):
    assert report[name]["final"] == report[name]["uninterrupted"], report[name]


def test_the_runs_were_really_killed_in_the_midst_of_shrinking_and_of_saving(report):
    assert sum(it["kills"] for it in report.values()) >= 20
    assert sum(it["inside_a_save"] for it in report.values()) >= 3
    for name, it in report.items():
        assert any(0 < epoch < it["epochs"] for epoch in it["resumed_at"]), name
    assert report["bound"]["chained"]


# A state into a dense model ------------------------------------------------------------------------------------------


def everything(run):
    """All that a load may change: objects, shapes, values, optimizer state, gradients, the record, the pruner."""
    plain = [run.scheduler.state_dict(), run.pruner.state_dict(), run.pruner.kept, run.pruner.certificate]
    tensors = {name: mask.tolist() for name, mask in run.pruner.masks.items()}
    return [picture([run.model, run.optimizer.state, run.optimizer.param_groups, run.ema]), repr(plain), tensors]


def same_future(one, other):
    """Whether two runs continue bit-equal from the same random state."""
    random_numbers = torch.get_rng_state()
    end = one.run(None, 2)
    torch.set_rng_state(random_numbers)
    return end == other.run(None, 2)


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_checkpoint_of_a_half_annealed_run_is_loaded_into_a_dense_model(tmp_path, name, epochs):
    run = SCENARIOS[name]()
    run.run(None, epochs)
    run.save(tmp_path, epochs, 0, None)
    fresh = SCENARIOS[name]()
    same_objects = [*map(id, fresh.model.parameters())]
    assert keepk.load_checkpoint(tmp_path, **fresh.parts()) == {"epoch": epochs, "batch": 0, "order": None}
    assert fresh.fingerprint() == run.fingerprint()
    assert [*map(id, fresh.model.parameters())] == same_objects
    assert same_future(fresh, run)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_state_alone_cuts_the_model_and_holds_its_masks(name):
    run, fresh = SCENARIOS[name](), SCENARIOS[name]()
    run.run(None, 2)
    stored = io.BytesIO()
    torch.save(run.pruner.state_dict(), stored)
    stored.seek(0)
    fresh.pruner.load_state_dict(torch.load(stored, weights_only=True))
    assert repr(fresh.pruner.state_dict()) == repr(run.pruner.state_dict())
    assert shapes(fresh.model) == shapes(run.model)
    assert shapes(fresh.ema) == shapes(run.ema)
    assert (fresh.pruner.kept, fresh.pruner.epoch) == (run.pruner.kept, 2)
    assert record_of(fresh.model) == record_of(run.model)
    fresh.update(torch.arange(BATCH))
    parameters = dict(fresh.model.named_parameters())
    assert fresh.pruner.masks.keys() == run.pruner.masks.keys()
    for key, mask in fresh.pruner.masks.items():
        assert torch.equal(mask, run.pruner.masks[key])
        assert not parameters[key][~mask].any()
    fresh.model.load_state_dict(run.model.state_dict())


def test_a_state_of_a_later_epoch_goes_on_from_an_earlier_one(tmp_path):
    """A model that is already smaller can load the state of a later epoch, but not of an earlier one."""
    run = SCENARIOS["each"]()
    earlier = copy.deepcopy(run.pruner.state_dict())
    run.run(None, 1)
    run.save(tmp_path, 1, 0, None)
    other = SCENARIOS["each"]()
    keepk.load_checkpoint(tmp_path, **other.parts())
    run.run(None, 2)
    run.save(tmp_path, 3, 0, None)
    keepk.load_checkpoint(tmp_path, **other.parts())
    assert other.fingerprint() == run.fingerprint()
    before = everything(other)
    with pytest.raises(
        StateError, match=r"channels that were already pruned from this model and cannot be restored. Build a fresh"
    ):
        other.pruner.load_state_dict(earlier)
    assert everything(other) == before


# Refusals ------------------------------------------------------------------------------------------------------------


class Told:
    """A stand-in for a pruner that saves a given state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise AssertionError(f"it is only saved, not given {state}")


def saved(folder, name="each", change=lambda _: None):
    """A checkpoint after two epochs, with the pruner's channels modified."""
    run = SCENARIOS[name]()
    run.run(None, 2)
    state = copy.deepcopy(run.pruner.state_dict())
    change(state["channels"])
    keepk.save_checkpoint(folder, **{**run.parts(), "pruner": Told(state)})
    return run


FRESH = {
    "each": partial(Training),
    "never": partial(Training, shrink="never"),
    "reads": partial(Training, Densenet, densenet_spaces),
}


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("name", FRESH)
def test_an_optimizer_of_another_class_is_refused_and_the_model_stays_as_large_as_it_was(tmp_path, name, stepped):
    saved(tmp_path, name)
    run = FRESH[name](optimizer=torch.optim.RMSprop)
    if stepped:
        run.update(torch.arange(BATCH))
    before = everything(run)
    with pytest.raises(CheckpointError, match=r"optimizer: is a RMSprop here and a (SGD|Adam) in the checkpoint"):
        keepk.load_checkpoint(tmp_path, **run.parts())
    assert everything(run) == before
    run.update(torch.arange(BATCH))
    run.pruner.step()


def test_a_model_that_was_refused_once_takes_the_right_state(tmp_path):
    wrong = saved(tmp_path / "wrong", "reads")
    right = SCENARIOS["each"]()
    right.run(None, 2)
    right.save(tmp_path / "right", 2, 0, None)
    run = SCENARIOS["each"]()
    with pytest.raises(StateError, match=r"has spaces .*channels.*, but this Pruner has"):
        keepk.load_checkpoint(tmp_path / "wrong", **{**wrong.parts(), "pruner": run.pruner})
    with pytest.raises(CheckpointError, match="optimizer: is a Adam here"):
        keepk.load_checkpoint(tmp_path / "right", **{**run.parts(), "optimizer": adam(run.model.parameters())})
    keepk.load_checkpoint(tmp_path / "right", **run.parts())
    assert run.fingerprint() == right.fingerprint()
    assert same_future(run, right)


def test_a_state_of_another_plan_is_refused(tmp_path):
    saved(tmp_path)
    run = Training(spaces=partial(convnet_spaces, keep=8))
    before = everything(run)
    with pytest.raises(StateError, match="space 'channels' belongs to another plan"):
        keepk.load_checkpoint(tmp_path, **run.parts())
    with pytest.raises(StateError, match="space 'channels' belongs to another plan"):
        run.pruner.load_state_dict(saved(tmp_path).pruner.state_dict())
    assert everything(run) == before


def test_a_part_that_is_missing_is_asked_for(tmp_path):
    saved(tmp_path)
    run = Training()
    before = everything(run)
    with pytest.raises(
        CheckpointError, match=r"has the run's ema, without which the run would not continue .* Pass ema=\.\.\."
    ):
        keepk.load_checkpoint(tmp_path, **{name: part for name, part in run.parts().items() if name != "ema"})
    assert everything(run) == before


def test_an_average_that_does_not_follow_the_model_is_refused(tmp_path):
    saved(tmp_path)
    run = Training(follows=False)
    before = everything(run)
    with pytest.raises(CheckpointError, match=r"ema: 'module.conv1.weight' is \(8, 1, 3, 3\)"):
        keepk.load_checkpoint(tmp_path, **run.parts())
    assert everything(run) == before


def one_unit_back(channels):
    channels["removed"].remove(channels["gone"].pop())


def another_layer(channels):
    """One unit of the second layer is removed instead of one of the first."""
    first = next(unit for unit in channels["gone"] if unit < 8)
    second = next(unit for unit in range(8, 18) if unit not in channels["gone"])
    for key in ("gone", "removed"):
        channels[key] = sorted({*channels[key], second} - {first})


def no_such_unit(channels):
    channels["gone"][-1] = channels["removed"][-1] = 10**6


def not_cut(channels):
    channels["removed"] = []


def no_list(channels):
    channels["gone"] = channels["removed"] = "all"


TAMPERED: dict[Callable[..., None], tuple[Any, str]] = {
    one_unit_back: (StateError, r"pruner state: space 'channels' keeps 13 channels, the plan says 12"),
    another_layer: ((StateError, CheckpointError), r"no bool mask of shape|is \(\d+, .* here and"),
    no_such_unit: (StateError, "pruner state: its channels do not fit this model"),
    not_cut: (StateError, "no bool mask of shape"),
    no_list: (StateError, "pruner state: its channels do not fit this model"),
}


@pytest.mark.parametrize("change", TAMPERED, ids=lambda change: change.__name__)
def test_a_list_of_units_that_was_changed_is_refused(tmp_path, change):
    error, words = TAMPERED[change]
    saved(tmp_path, change=change)
    run = Training()
    before = everything(run)
    with pytest.raises(error, match=words):
        keepk.load_checkpoint(tmp_path, **run.parts())
    assert everything(run) == before


def unequal(channels):
    """The total is right, but one group has a unit too many and another one too few."""
    back = next(unit for unit in channels["gone"] if unit < 4)
    gone = next(unit for unit in range(4, 8) if unit not in channels["gone"])
    for key in ("gone", "removed"):
        if channels[key]:
            channels[key] = sorted({*channels[key], gone} - {back})


@pytest.mark.parametrize("shrink", ["each", "never"])
def test_units_that_cannot_go_together_are_refused_whether_cut_or_masked(tmp_path, shrink):
    run = Training(Grouped, grouped_spaces, shrink=shrink)
    run.run(None, 4)
    state = copy.deepcopy(run.pruner.state_dict())
    unequal(state["channels"])
    keepk.save_checkpoint(tmp_path, **{**run.parts(), "pruner": Told(state)})
    fresh = Training(Grouped, grouped_spaces, shrink=shrink)
    fresh.update(torch.arange(BATCH))
    before, bits = everything(fresh), fresh.fingerprint()
    with pytest.raises(StateError, match=r"pruner state: .*must lose equal numbers of units from each of its 3 parts"):
        fresh.pruner.load_state_dict(state)
    assert everything(fresh) == before
    with pytest.raises(StateError, match=r"pruner state: .*must lose equal numbers of units from each of its 3 parts"):
        keepk.load_checkpoint(tmp_path, **fresh.parts())
    assert fresh.fingerprint() == bits


class Refusing(nn.Module):
    """An average that refuses its state once, after all other parts were loaded."""

    def __init__(self, ema):
        super().__init__()
        self.ema, self.willing = ema, True

    def get_extra_state(self):
        return {"n": 1}

    def set_extra_state(self, _):
        if not self.willing:
            self.willing = True
            raise RuntimeError("not today")


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "trained"])
def test_a_part_that_refuses_at_the_last_moment_gives_every_part_its_size_and_numbers_back(tmp_path, name, stepped):
    run = SCENARIOS[name]()
    run.run(None, 3)
    keepk.save_checkpoint(tmp_path, **{**run.parts(), "ema": Refusing(run.ema)})
    fresh = SCENARIOS[name]()
    if stepped:
        fresh.update(torch.arange(BATCH))
    before, record = fresh.fingerprint(), record_of(fresh.model)
    refusing = Refusing(fresh.ema)
    refusing.willing = False
    with pytest.raises(RuntimeError, match="not today"):
        keepk.load_checkpoint(tmp_path, **{**fresh.parts(), "ema": refusing})
    assert fresh.fingerprint() == before
    assert record_of(fresh.model) == record
    keepk.load_checkpoint(tmp_path, **{**fresh.parts(), "ema": refusing})
    assert fresh.fingerprint() == run.fingerprint()


def test_a_model_whose_layers_were_replaced_is_not_cut(tmp_path):
    saved(tmp_path)
    run = Training()
    run.model.conv1 = nn.Conv2d(1, 8, 3)
    before = everything(run)
    with pytest.raises(
        StateError, match=r"cannot be removed from this model.*'conv1.weight': the model has a different"
    ):
        keepk.load_checkpoint(tmp_path, **run.parts())
    assert everything(run) == before


def test_the_shape_of_a_run_is_taken_back_by_hand():
    """Both halves of a load can be rolled back; weights that masks zeroed stay zero."""
    run, fresh = (Training(spaces=lambda: convnet_spaces()[1:]) for _ in range(2))
    run.run(None, 3)
    state = run.pruner.state_dict()
    before, dense = everything(fresh), shapes(Convnet())
    larger = fresh.pruner._session.take_shape(state)
    assert shapes(fresh.model) == shapes(run.model) != dense
    unmasked = fresh.pruner._session.take_masks(state)
    assert fresh.pruner.epoch == 3
    unmasked()
    assert fresh.pruner.epoch == 0
    larger()
    assert shapes(fresh.model) == dense
    assert everything(fresh) == before
