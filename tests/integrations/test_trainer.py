"""Pruning in the Trainer of transformers: events, logs, refusals, and runs that are killed and resumed."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import save_file
from torch import nn

import keepk
from keepk.errors import CheckpointError, KeepkError, KeepkWarning, PlanError
from keepk.integrations.transformers import PruningCallback, resume
from keepk.run.checks import live_pruner
from killing import in_child, in_two_ranks

# transformers logs a table of every checkpoint that it writes or reads, and forked children are single-threaded
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
EVENTS = [16, 10]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x, labels=None):
        scores = self.last(self.drop(self.norm(self.first(x)).relu()))
        loss = None if labels is None else nn.functional.cross_entropy(scores, labels)
        return {"logits": scores} if loss is None else {"loss": loss, "logits": scores}


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, number=24):
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(number, 6, generator=generator)
        self.labels = torch.randint(0, 4, (number,), generator=generator)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, place):
        return {"x": self.rows[place], "labels": self.labels[place]}


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self):
        yield from (Rows()[place] for place in range(24))


def spaces():
    return [
        keepk.channels("first", keep=EVENTS[-1], schedule=EVENTS, name="hidden", metric=keepk.metrics.product),
        keepk.weights("last.weight", keep=17, schedule=[30, 17], name="last"),
    ]


def callback_of(_net, **options):
    return PruningCallback(spaces(), example=torch.randn(2, 6), **options)


def trainer_of(folder, *callbacks, model=None, data=None, prunes=True, every="epoch", given=callback_of, **options):
    """A Trainer of 4 epochs of 6 optimizer steps, on the CPU."""
    transformers.set_seed(0)
    net = Net() if model is None else model
    arguments = {
        "num_train_epochs": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = transformers.TrainingArguments(str(folder), **{**arguments, **options})
    pruning = [given(net, every=every)] if prunes else []
    loud = [{"x": 100 * it["x"], "labels": it["labels"]} for it in map(Rows().__getitem__, range(24))]
    return transformers.Trainer(
        net, args, train_dataset=data or Rows(), eval_dataset=loud, callbacks=[*callbacks, *pruning]
    )


def callback_in(trainer):
    return next(it for it in trainer.callback_handler.callbacks if isinstance(it, PruningCallback))


def bits(trainer):
    """Everything that training has changed: weights, statistics of BatchNorms and the optimizer's state."""
    state = [value for it in trainer.optimizer.state.values() for value in it.values()]
    return [*trainer.model.state_dict().values(), *state]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Events and logs


def test_an_event_after_each_epoch(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    pruner = callback_in(trainer).pruner
    assert pruner.kept == {"hidden": 10, "last": 17}
    assert trainer.model.first.out_features == 10
    assert int(trainer.model.last.weight.count_nonzero()) == 17
    events = [it for it in trainer.state.log_history if "keepk/event" in it]
    parameters = [6 * width + 3 * width + 4 * width + 4 for width in EVENTS]  # first, norm and last with their biases
    assert events == [
        {
            "keepk/event": number,
            "keepk/kept/hidden": EVENTS[number - 1],
            "keepk/kept/last": (30, 17)[number - 1],
            "keepk/parameters": parameters[number - 1],
            "keepk/macs": 10 * EVENTS[number - 1],
            "epoch": float(number),
            "step": 6 * number,
        }
        for number in (1, 2)
    ]
    trainer.train()  # the plan has ended: further training holds the zeros
    assert int(trainer.model.last.weight.count_nonzero()) == 17


class Reporter(transformers.TrainerCallback):
    """A logger, which comes before the callbacks of the user, as TensorBoard's and wandb's do."""

    def __init__(self):
        self.got = []

    def on_log(self, *_, logs, **__):
        self.got.append(dict(logs))


def test_loggers_get_the_numbers_of_an_event_and_lose_no_other(tmp_path):
    reporter = Reporter()
    trainer = trainer_of(tmp_path, reporter, logging_steps=6)
    assert resume(trainer) is None  # there is no checkpoint: a new run
    trainer.train()
    assert [it["keepk/kept/hidden"] for it in reporter.got if "keepk/event" in it] == EVENTS
    assert [it["step"] for it in trainer.state.log_history if "keepk/event" in it] == [6, 12]
    assert [it["step"] for it in trainer.state.log_history if "loss" in it] == [6, 12, 18, 24]


def test_an_event_every_n_optimizer_steps_with_accumulation(tmp_path):
    trainer = trainer_of(tmp_path, every=5, gradient_accumulation_steps=2)  # 3 steps per epoch, 12 in all
    trainer.train()
    assert callback_in(trainer).pruner.done
    assert [it["step"] for it in trainer.state.log_history if "keepk/event" in it] == [5, 10]
    data = trainer_of(tmp_path, data=Stream(), every=5, max_steps=12)
    data.train()
    assert callback_in(data).pruner.done


class Stopping(transformers.TrainerCallback):
    def on_step_end(self, _args, state, control, **_):
        control.should_epoch_stop = state.global_step % 6 == 3


def test_an_epoch_that_is_cut_short_has_its_event(tmp_path):
    trainer = trainer_of(tmp_path, Stopping())
    trainer.train()
    assert [it["step"] for it in trainer.state.log_history if "keepk/event" in it] == [3, 9]


def with_statistics(_net, **options):
    seen = keepk.Statistics(_net)
    space = keepk.channels("first", keep=10, schedule=EVENTS, metric=keepk.metrics.taylor(seen))
    active = keepk.weights("last.weight", keep=17, schedule=[30, 17], metric=keepk.metrics.wanda(seen))
    return PruningCallback([space, active], example=torch.randn(2, 6), **options)


class Batches(transformers.TrainerCallback):
    """Notes after each step how many batches the statistics have counted."""

    def __init__(self):
        self.counted = []

    def on_step_end(self, *_, model, **__):
        pruner = live_pruner(model)
        assert pruner is not None
        self.counted.append(pruner.statistics[0].batches)


@pytest.mark.parametrize("kind", ["gradients", "activations"])
def test_metrics_that_need_data_see_training_steps_only(kind, tmp_path):
    def given(net, **options):
        seen = keepk.Statistics(net, of=(kind,))
        metric = keepk.metrics.taylor(seen) if kind == "gradients" else keepk.metrics.activation(seen)
        space = keepk.channels("first", keep=10, schedule=EVENTS, metric=metric)
        return PruningCallback(space, example=torch.randn(2, 6), **options)

    batches = Batches()
    trainer = trainer_of(tmp_path, batches, given=given, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert batches.counted[:12] == [1, 2, 3, 4, 5, 6] * 2
    assert callback_in(trainer).pruner.done


# Resuming


class Kill(transformers.TrainerCallback):
    """Kills the process after an optimizer step, before anything is saved for it."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, _args, state, _control, **_):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def saved_and_resumed(folder, kill, checkpoint, **options):
    """The end of an uninterrupted run, and that of one that was killed and resumed from its newest checkpoint."""
    whole = trainer_of(folder / "whole", **options)
    whole.train()
    killed, _ = in_child(lambda: trainer_of(folder / "killed", Kill(kill), **options).train() and None)
    assert killed == signal.SIGKILL
    again = trainer_of(folder / "killed", **options)
    newest = folder / "killed" / f"checkpoint-{checkpoint}"
    if options.get("prunes", True):
        assert resume(again) == str(newest)
    again.train(resume_from_checkpoint=str(newest))
    assert again.state.global_step == whole.state.global_step == 24
    return bits(whole), bits(again)


SAVING = {"save_strategy": "steps", "save_steps": 4}


@pytest.mark.parametrize(
    ("kill", "checkpoint"),
    [
        pytest.param(5, 4, id="before the first event"),
        pytest.param(11, 8, id="between two events"),
        pytest.param(15, 12, id="at the last event"),
        pytest.param(23, 20, id="after the last event"),
    ],
)
def test_a_run_that_was_killed_ends_with_the_same_bits(kill, checkpoint, tmp_path):
    assert same(*saved_and_resumed(tmp_path / "dense", kill, checkpoint, prunes=False, **SAVING))  # the control
    whole, again = saved_and_resumed(tmp_path, kill, checkpoint, **SAVING)
    assert same(whole, again)
    assert whole[0].shape == (10, 6)


def test_statistics_are_resumed_too(tmp_path):
    assert same(*saved_and_resumed(tmp_path, 11, 8, given=with_statistics, **SAVING))


def test_masked_channels_are_resumed_too(tmp_path):
    given = lambda net, **options: callback_of(net, shrink="never", **options)  # noqa: E731
    assert same(*saved_and_resumed(tmp_path, 11, 8, given=given, **SAVING))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with the checkpoints of a run."""
    folder = tmp_path_factory.mktemp("written")
    trainer_of(folder, **SAVING).train()
    return folder


def test_a_checkpoint_that_was_not_finished_is_not_resumed(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "run")
    shutil.rmtree(folder / "checkpoint-24" / "keepk")
    with pytest.warns(KeepkWarning, match=r"checkpoint-24 is incomplete, .* Resuming from .*checkpoint-20\."):
        assert resume(trainer_of(folder)) == str(folder / "checkpoint-20")
    with pytest.raises(CheckpointError, match="checkpoint-24: has no keepk/"):
        resume(trainer_of(folder), str(folder / "checkpoint-24"))
    for checkpoint in folder.iterdir():
        shutil.rmtree(checkpoint / "keepk", ignore_errors=True)
    with pytest.raises(CheckpointError, match="none of its 6 checkpoints has a state of pruning"):
        resume(trainer_of(folder))


def test_a_checkpoint_that_is_loaded_without_its_pruning_is_refused(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "run")
    with pytest.raises(RuntimeError, match="size mismatch"):  # torch's words
        trainer_of(folder).train(resume_from_checkpoint=True)
    trainer = trainer_of(folder)
    resume(trainer, str(folder / "checkpoint-12"))
    with pytest.raises(
        KeepkError, match=r"continues from step 16, but the state of pruning is that of step 12\. Resume"
    ):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-16"))
    weights_only = lambda _, **options: PruningCallback(  # noqa: E731
        keepk.weights("last.weight", keep=17, schedule=[30, 17]), **options
    )
    trainer_of(tmp_path / "weights", given=weights_only, **SAVING).train()
    with pytest.raises(KeepkError, match="continues from step 24, but"):  # no size differs here
        trainer_of(tmp_path / "weights", given=weights_only).train(resume_from_checkpoint=True)


def test_what_cannot_be_resumed_is_refused(written):
    trainer = trainer_of(written)
    trainer.model_init = Net
    with pytest.raises(KeepkError, match="model_init, so train"):
        resume(trainer)
    with pytest.raises(KeepkError, match="'Trainer' with 0 PruningCallbacks"):
        resume(trainer_of(written, prunes=False))
    trainer = trainer_of(written)
    resume(trainer)
    with pytest.raises(KeepkError, match="Net was cut already"):
        resume(trainer_of(written, model=trainer.model))
    other = lambda _, **options: PruningCallback(keepk.weights("*", keep=5), **options)  # noqa: E731
    fresh = trainer_of(written, given=other)
    with pytest.raises(keepk.errors.StateError, match="has spaces"):
        resume(fresh)
    keepk.Pruner(fresh.model, keepk.weights("*", keep=5)).close()  # the refused one is closed


# Refusals at the start


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"num_train_epochs": 1},
            r"needs 2 more events, one after each of 2 epochs, but training of 6 .* time for 1, so",
        ),
        ({"every": 13}, r"after each of 2 times 13 optimizer steps, but training of 24 .* a smaller every="),
        ({"data": Stream(), "max_steps": 24}, r"no length, so epochs have no end\. Pass every="),
    ],
)
def test_training_that_ends_before_the_plan_is_refused(options, words, tmp_path):
    trainer = trainer_of(tmp_path, **options)
    before = [value.clone() for value in trainer.model.state_dict().values()]
    with pytest.raises(PlanError, match=words):
        trainer.train()
    assert same(before, list(trainer.model.state_dict().values()))
    assert callback_in(trainer).pruner.closed


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 3}


@pytest.mark.parametrize(("by", "enough", "short"), [("epoch", 2, 1), ("steps", 12, 11)])
def test_a_best_model_of_another_size_is_refused(by, enough, short, tmp_path):
    options = {**BEST, "eval_strategy": by, "save_strategy": by, "eval_steps": 3, "save_steps": 3}
    trainer = trainer_of(tmp_path, eval_delay=short, **options)
    words = rf"could load a model from before the last event, at step 12, .* Pass eval_delay={enough} \({by[:4]}"
    with pytest.raises(PlanError, match=words):
        trainer.train()
    trainer = trainer_of(tmp_path, eval_delay=enough, **options)
    trainer.train()
    assert trainer.state.best_global_step >= 12
    assert callback_in(trainer).pruner.kept == {"hidden": 10, "last": 17}


@pytest.mark.parametrize("every", [0, -3, 2.0, True, "step"])
def test_every_is_an_epoch_or_a_number_of_steps(every):
    with pytest.raises(PlanError, match=r'every=.*\. Pass "epoch" or a number'):
        callback_of(Net(), every=every)


def test_the_pruner_is_there_once_training_has_begun(tmp_path):
    callback = callback_of(Net())
    with pytest.raises(KeepkError, match="made when training begins"):
        _ = callback.pruner
    with pytest.raises(KeepkError, match="optimizer= comes from the framework"):
        callback_of(Net(), optimizer=None)
    trainer = trainer_of(tmp_path, given=lambda *_, **__: callback)
    trainer.train()
    with pytest.raises(KeepkError, match="pruned another Net already"):
        trainer_of(tmp_path, given=lambda *_, **__: callback).train()


# Two processes


def test_two_processes_keep_the_same_weights_and_resume(tmp_path):
    weights_only = lambda _, **options: PruningCallback(  # noqa: E731
        keepk.weights("last.weight", keep=17, schedule=[30, 17]), **options
    )
    options = {"given": weights_only, "ddp_backend": "gloo", **SAVING}

    def run(checkpoint=None):
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = trainer_of(tmp_path, **options)
        trainer.train(
            resume_from_checkpoint=None if checkpoint is None else resume(trainer, str(tmp_path / checkpoint))
        )
        assert trainer.args.world_size == 2
        assert callback_in(trainer).pruner.kept == {"last.weight": 17}
        return [value.tolist() for value in trainer.model.state_dict().values()]

    first, second = in_two_ranks(run)
    assert first[-2:] == second[-2:]  # the last layer: BatchNorm's statistics differ between processes
    again = in_two_ranks(lambda: run("checkpoint-4"))
    assert again[0][-2:] == first[-2:]


def test_a_wrapper_that_a_cut_would_have_to_replace_is_refused(tmp_path):
    def run():
        AcceleratorState._reset_state(reset_partial_state=True)
        trainer = trainer_of(tmp_path, ddp_backend="gloo")
        with pytest.raises(KeepkError, match="wraps the model in DistributedDataParallel and keeps this wrapper"):
            trainer.train()
        masked = trainer_of(tmp_path, given=lambda net, **options: callback_of(net, shrink="never", **options))
        masked.train()
        return callback_in(masked).pruner.kept

    assert in_two_ranks(run) == [{"hidden": 10, "last": 17}] * 2


# The best model of a run that was resumed


def growing_loss(folder, *callbacks, **options):
    """A Trainer whose evaluation is best at the first evaluation."""
    options = {"save_strategy": "epoch", "eval_strategy": "epoch", "metric_for_best_model": "falls", **options}
    trainer = trainer_of(folder, *callbacks, greater_is_better=True, **options)
    trainer.compute_metrics = lambda _: {"falls": -float(trainer.state.global_step)}
    return trainer


@pytest.mark.parametrize("given", [callback_of, "weights"])
@pytest.mark.parametrize(("checkpoint", "delay", "best"), [(12, 0, 18), (18, 0, 24), (6, 2, 12), (24, 0, None)])
def test_a_resumed_run_ends_with_the_best_model_of_the_final_size(checkpoint, delay, best, given, tmp_path):
    if given == "weights":
        given = lambda _, **options: PruningCallback(  # noqa: E731
            keepk.weights("last.weight", keep=17, schedule=[30, 17], name="last"), **options
        )
    first = growing_loss(tmp_path, given=given)
    first.train()
    assert first.state.best_global_step == 6
    trainer = growing_loss(tmp_path, given=given, load_best_model_at_end=True, eval_delay=delay)
    with pytest.warns(KeepkWarning, match=r"of step 6, .* before the last event, .* Forgetting it"):
        trainer.train(resume_from_checkpoint=resume(trainer, str(tmp_path / f"checkpoint-{checkpoint}")))
    assert callback_in(trainer).pruner.kept["last"] == 17
    assert int(trainer.model.last.weight.count_nonzero()) == 17
    assert trainer.state.best_global_step == best


@pytest.mark.parametrize("old", [False, True])
def test_the_best_model_of_the_final_size_is_remembered(old, tmp_path):
    growing_loss(tmp_path, eval_delay=2).train()
    if old:  # as before states had the step of the last event
        folder = tmp_path / "checkpoint-18" / "keepk"
        saved = keepk.load_checkpoint(folder)
        assert saved.pop("step_of_last_event") == 12
        keepk.save_checkpoint(folder, extra=saved)
    trainer = growing_loss(tmp_path, eval_delay=2, load_best_model_at_end=True)
    trainer.train(resume_from_checkpoint=resume(trainer, str(tmp_path / "checkpoint-18")))
    assert trainer.state.best_global_step == 12


# Training that ends early


class Ending(transformers.TrainerCallback):
    """Ends training after a step, as `EarlyStoppingCallback` and time limits do."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, _args, state, control, **_):
        control.should_training_stop = control.should_training_stop or state.global_step == self.step


@pytest.mark.parametrize(("step", "events", "kept"), [(5, 0, (24, 96)), (9, 1, (16, 30))])
def test_training_that_ends_before_the_last_event_gives_a_warning(step, events, kept, tmp_path):
    trainer = trainer_of(tmp_path, Ending(step))
    words = (
        rf"ended after {events} of 2 events of the plan, so more units are left than planned: space 'hidden' has "
        rf"{kept[0]} instead of 10, space 'last' has {kept[1]} instead of 17\."
    )
    with pytest.warns(KeepkWarning, match=words):
        trainer.train()
    trainer_of(tmp_path, Ending(14)).train()  # no warning after the last event


def test_zeros_that_were_overwritten_give_a_warning_at_the_end(tmp_path):
    class Overwriting(transformers.TrainerCallback):
        def on_step_end(self, _args, state, _control, model, **_):
            if state.global_step == 24:
                nn.init.ones_(model.last.weight)

    with pytest.warns(KeepkWarning, match="kept 17 units, but there are 40 now"):
        trainer_of(tmp_path, Overwriting()).train()


def test_a_resumed_run_that_skips_no_data_has_whole_epochs(tmp_path):
    """With ignore_data_skip, a resumed run begins with a new epoch: from step 9 of 24, they end at 15, 21 and 27."""
    three = lambda _, **options: PruningCallback(  # noqa: E731
        keepk.weights("last.weight", keep=10, schedule=[40, 30, 20, 10], name="last"), **options
    )
    options = {"save_strategy": "steps", "save_steps": 3, "ignore_data_skip": True}
    trainer_of(tmp_path, given=three, **options).train()
    trainer = trainer_of(tmp_path, given=three, **options)
    with pytest.raises(PlanError, match=r"needs 3 more events, .* has time for 2, so"):
        trainer.train(resume_from_checkpoint=resume(trainer, str(tmp_path / "checkpoint-9")))
    trainer = trainer_of(tmp_path, given=three, num_train_epochs=5, **options)
    trainer.train(resume_from_checkpoint=resume(trainer, str(tmp_path / "checkpoint-9")))
    assert [it["step"] for it in trainer.state.log_history if "keepk/event" in it] == [6, 15, 21, 27]
    trainer = trainer_of(
        tmp_path, given=three, **{**options, **BEST, "eval_strategy": "steps", "eval_steps": 3, "eval_delay": 26},
        num_train_epochs=5,
    )  # fmt: skip
    with pytest.raises(PlanError, match=r"last event, at step 27, .* Pass eval_delay=27"):
        trainer.train(resume_from_checkpoint=resume(trainer, str(tmp_path / "checkpoint-9")))


# Checkpoints that are written again


class KillInSave(transformers.TrainerCallback):
    """Kills the process when the Trainer has written a checkpoint, and the PruningCallback has not yet."""

    def on_save(self, _args, state, _control, **_):
        if state.global_step == 12:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_that_was_being_written_again_is_not_resumed(sharded, tmp_path):
    """The state of pruning in its folder is that of the run before, which had other weights."""
    weights = lambda _, **options: PruningCallback(  # noqa: E731
        keepk.weights("last.weight", keep=17, schedule=[30, 17], name="last"), **options
    )

    def run(*callbacks, seed=0):
        trainer = trainer_of(tmp_path, *callbacks, given=weights, save_strategy="epoch", logging_strategy="no")
        if sharded:  # as large models are saved
            trainer._save = lambda folder, **_: shards(trainer.model, Path(folder))
        torch.manual_seed(seed)
        nn.init.normal_(trainer.model.last.weight)
        trainer.train()

    def shards(model, folder):
        folder.mkdir(parents=True, exist_ok=True)
        for number, (name, value) in enumerate(sorted(model.state_dict().items()), 1):
            save_file({name: value.contiguous()}, folder / f"model-0000{number}-of-00009.safetensors")

    run()
    assert in_child(lambda: run(KillInSave(), seed=1))[0] == signal.SIGKILL
    for step in (18, 24):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    fresh = trainer_of(tmp_path, given=weights)
    with pytest.raises(CheckpointError, match=r"checkpoint-12: its weights are not those .* Pass another checkpoint"):
        resume(fresh, str(tmp_path / "checkpoint-12"))
    assert not callback_in(fresh)._run.has_begun
    with pytest.warns(KeepkWarning, match=r"checkpoint-12 is incomplete, .* Resuming from .*checkpoint-6\."):
        assert resume(fresh) == str(tmp_path / "checkpoint-6")


def test_a_checkpoint_that_does_not_say_which_weights_it_has_is_resumed(written, tmp_path):
    """As those of older versions."""
    folder = shutil.copytree(written / "checkpoint-8", tmp_path / "checkpoint-8")
    saved = keepk.load_checkpoint(folder / "keepk")
    assert list(saved.pop("weights")) == ["model.safetensors"]
    keepk.save_checkpoint(folder / "keepk", extra=saved)
    trainer = trainer_of(tmp_path)
    trainer.train(resume_from_checkpoint=resume(trainer))
    assert callback_in(trainer).pruner.done
