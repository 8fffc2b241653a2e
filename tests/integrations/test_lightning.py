"""Pruning in the Trainer of Lightning: events, logs, refusals, averages, and runs that are killed and resumed."""

import logging
import os
import signal
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import keepk
from keepk.errors import KeepkError, KeepkWarning, PlanError
from keepk.integrations.lightning import PruningCallback
from killing import in_child, in_two_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore:.*no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint"),
    pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
EVENTS = [16, 10]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())

    def training_step(self, batch, _):
        rows, labels = batch
        return nn.functional.cross_entropy(self(rows), labels)

    def validation_step(self, batch, _):
        self.log("val_loss", self.training_step(batch, _))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Outer(pl.LightningModule):
    """A LightningModule around the network that is pruned."""

    def __init__(self):
        super().__init__()
        self.net: Any = Net()

    def training_step(self, batch, _):
        rows, labels = batch
        return nn.functional.cross_entropy(self.net(rows), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def rows(scale=1.0):
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        scale * torch.randn(24, 6, generator=generator), torch.randint(0, 4, (24,), generator=generator)
    )
    return DataLoader(data, batch_size=4)


def spaces():
    return [
        keepk.channels("first", keep=EVENTS[-1], schedule=EVENTS, name="hidden", metric=keepk.metrics.product),
        keepk.weights("last.weight", keep=17, schedule=[30, 17], name="last"),
    ]


def callback_of(**options):
    return PruningCallback(spaces(), example=torch.randn(2, 6), **options)


class Recorder(Logger):
    name, version = "recorder", 0

    def __init__(self):
        super().__init__()
        self.got = []

    def log_metrics(self, metrics, step=None):
        self.got.append({**metrics, "step": step})

    def log_hyperparams(self, *_):
        pass


def trainer_of(folder, *callbacks, **options):
    """A Trainer of 4 epochs of 6 batches, on the CPU."""
    arguments = {"max_epochs": 4, "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    arguments |= {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    return pl.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**arguments, **options})


def bits(trainer):
    state = [value for it in trainer.optimizers[0].state.values() for value in it.values()]
    return [*trainer.lightning_module.state_dict().values(), *state]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def net():
    torch.manual_seed(0)
    return Net()


# Events and logs


def test_an_event_after_each_epoch_goes_to_the_loggers(tmp_path):
    pruning, model = callback_of(), net()
    recorder = Recorder()
    trainer_of(tmp_path, pruning, logger=recorder).fit(model, rows(), rows(100.0))
    assert pruning.pruner.kept == {"hidden": 10, "last": 17}
    assert model.first.out_features == 10
    assert int(model.last.weight.count_nonzero()) == 17
    assert [it for it in recorder.got if "keepk/event" in it] == [
        {
            "keepk/event": number,
            "keepk/kept/hidden": width,
            "keepk/kept/last": (30, 17)[number - 1],
            "keepk/parameters": 13 * width + 4,
            "keepk/macs": 10 * width,
            "step": 6 * number,
        }
        for number, width in enumerate(EVENTS, 1)
    ]
    again = trainer_of(tmp_path, pruning, max_epochs=1)
    again.fit(model, rows())  # the plan has ended: further training holds the zeros
    assert int(model.last.weight.count_nonzero()) == 17


def test_an_event_every_n_optimizer_steps_with_accumulation(tmp_path):
    pruning = callback_of(every=5)
    trainer_of(tmp_path, pruning, accumulate_grad_batches=2).fit(net(), rows())  # 3 steps per epoch, 12 in all
    assert pruning.pruner.done


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self):
        yield from rows().dataset


def test_data_without_a_length_are_judged_by_the_number_of_steps(tmp_path):
    data = DataLoader(Stream(), batch_size=4)
    pruning = callback_of(every=5)
    trainer_of(tmp_path, pruning, max_steps=12).fit(net(), data)
    assert pruning.pruner.done
    with pytest.raises(PlanError, match="or 9 optimizer steps, has time for 1, so"):
        trainer_of(tmp_path, callback_of(every=5), max_steps=9).fit(net(), data)
    with pytest.raises(PlanError, match=r"no length, and training ends after max_steps, .* Pass every="):
        trainer_of(tmp_path, callback_of(), max_steps=12).fit(net(), data)


def test_a_part_of_a_module_is_pruned(tmp_path):
    torch.manual_seed(0)
    model, pruning = Outer(), callback_of(module="net")
    trainer_of(tmp_path, pruning).fit(model, rows())
    assert model.net.first.out_features == 10
    with pytest.raises(KeepkError, match=r"module='nets': .*Pass the path of a module"):
        trainer_of(tmp_path, callback_of(module="nets")).fit(Outer(), rows())


class EndsEarly(pl.Callback):
    """Skips the rest of an epoch after 3 batches, as a LightningModule may do."""

    def on_train_batch_start(self, _trainer, pl_module, _batch, batch_idx):
        pl_module.skips = batch_idx == 3


class Skipping(Net):
    skips = False

    def on_train_batch_start(self, *_):
        return -1 if self.skips else None


def test_an_epoch_that_is_cut_short_has_its_event(tmp_path):
    pruning, recorder = callback_of(), Recorder()
    torch.manual_seed(0)
    trainer_of(tmp_path, EndsEarly(), pruning, logger=recorder).fit(Skipping(), rows())
    assert [it["step"] for it in recorder.got if "keepk/event" in it] == [3, 6]


class Batches(pl.Callback):
    """Notes after each batch how many batches the statistics have counted."""

    def __init__(self, pruning):
        self.pruning, self.counted = pruning, []

    def on_train_batch_end(self, *_):
        self.counted.append(self.pruning.pruner.statistics[0].batches)


@pytest.mark.parametrize("kind", ["gradients", "activations"])
def test_metrics_that_need_data_see_training_batches_only(kind, tmp_path):
    model = net()
    seen = keepk.Statistics(model, of=(kind,))
    metric = keepk.metrics.taylor(seen) if kind == "gradients" else keepk.metrics.activation(seen)
    space = keepk.channels("first", keep=10, schedule=EVENTS, metric=metric)
    pruning = PruningCallback(space, example=torch.randn(2, 6))
    batches = Batches(pruning)
    trainer_of(tmp_path, batches, pruning, val_check_interval=2).fit(model, rows(), rows(100.0))
    assert batches.counted[:12] == [1, 2, 3, 4, 5, 6] * 2
    assert pruning.pruner.done


# Resuming


class Stateful(DataLoader[Any]):
    """A DataLoader that continues where a checkpoint was written; Lightning resumes only such loaders mid-epoch."""

    place = 0

    def __iter__(self):
        start = self.place % len(self)
        for number, batch in enumerate(super().__iter__()):
            if number >= start:
                self.place = number + 1
                yield batch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Kill(pl.Callback):
    """Kills the process after an optimizer step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def saved_and_resumed(folder, kill, checkpoint, *, saving, given=callback_of, data=rows, average=False):
    """The end of an uninterrupted run, and that of one that was killed and resumed from a checkpoint."""

    def run(where, *callbacks, path=None):
        torch.manual_seed(0)
        model = Net()
        pruning = [] if given is None else [given(model)] if given is with_statistics else [given()]
        saver = ModelCheckpoint(where, filename="{step}", save_top_k=-1, **saving)
        averaging = [WeightAveraging(avg_fn=get_ema_avg_fn(0.8))] if average else []
        trainer = trainer_of(where, *callbacks, *averaging, *pruning, saver, enable_checkpointing=True)
        trainer.fit(model, data(), ckpt_path=path, weights_only=False)
        assert trainer.global_step == 24
        return bits(trainer)

    whole = run(folder / "whole")
    killed, _ = in_child(lambda: run(folder / "killed", Kill(kill)) and None)
    assert killed == signal.SIGKILL
    return whole, run(folder / "killed", path=folder / "killed" / f"step={checkpoint}.ckpt")


def with_statistics(model):
    seen = keepk.Statistics(model)
    space = keepk.channels("first", keep=10, schedule=EVENTS, metric=keepk.metrics.taylor(seen))
    active = keepk.weights("last.weight", keep=17, schedule=[30, 17], metric=keepk.metrics.wanda(seen))
    return PruningCallback([space, active], example=torch.randn(2, 6))


BY_EPOCH, BY_STEP = {"every_n_epochs": 1, "save_on_train_epoch_end": True}, {"every_n_train_steps": 4}


def stateful():
    return Stateful(rows().dataset, batch_size=4)


@pytest.mark.parametrize(
    ("saving", "data", "kill", "checkpoint"),
    [
        pytest.param(BY_EPOCH, rows, 8, 6, id="after the first event"),
        pytest.param(BY_EPOCH, rows, 13, 12, id="after the last event"),
        pytest.param(BY_STEP, stateful, 11, 8, id="within an epoch"),
        pytest.param(BY_STEP, stateful, 15, 12, id="at an event"),
    ],
)
def test_a_run_that_was_killed_ends_with_the_same_bits(saving, data, kill, checkpoint, tmp_path):
    options = {"saving": saving, "data": data}
    assert same(*saved_and_resumed(tmp_path / "dense", kill, checkpoint, given=None, **options))  # the control
    whole, again = saved_and_resumed(tmp_path, kill, checkpoint, **options)
    assert same(whole, again)
    assert whole[0].shape == (10, 6)


def test_statistics_are_resumed_too(tmp_path):
    assert same(*saved_and_resumed(tmp_path, 11, 8, saving=BY_STEP, given=with_statistics, data=stateful))


def test_averages_follow_every_cut_and_are_resumed(tmp_path):
    for given in (None, callback_of):
        whole, again = saved_and_resumed(tmp_path / str(given), 8, 6, saving=BY_EPOCH, given=given, average=True)
        assert same(whole, again)
    assert whole[0].shape == (10, 6)
    assert int(whole[7].count_nonzero()) == 17  # at the end of training, the model gets the average


# Refusals at the start


@pytest.mark.parametrize(
    ("options", "every", "words"),
    [
        ({"max_epochs": 1}, "epoch", r"needs 2 more events, .* but training of 1 epochs, or 6 .* time for 1, so"),
        ({"max_epochs": -1, "max_steps": 11}, "epoch", r"needs 2 more events, .* has time for 1, so"),
        ({}, 13, r"after each of 2 times 13 optimizer steps, .* a smaller every="),
    ],
)
def test_training_that_ends_before_the_plan_is_refused(options, every, words, tmp_path):
    pruning, model = callback_of(every=every), net()
    with pytest.raises(PlanError, match=words):
        trainer_of(tmp_path, pruning, **options).fit(model, rows())
    assert pruning.pruner.closed
    assert model.first.out_features == 24


def test_a_checkpoint_of_another_plan_is_refused(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    trainer_of(tmp_path, callback_of(), saver, enable_checkpointing=True).fit(net(), rows())
    other = PruningCallback(keepk.weights("last.weight", keep=5))
    with pytest.raises(keepk.errors.StateError, match="has spaces"):
        trainer_of(tmp_path, other).fit(net(), rows(), ckpt_path=tmp_path / "step=12.ckpt", weights_only=False)
    trainer, model = trainer_of(tmp_path, pruning := callback_of()), net()
    trainer.validate(model, rows(), ckpt_path=tmp_path / "step=6.ckpt", weights_only=False, verbose=False)
    assert model.first.out_features == pruning.pruner.kept["hidden"] == 16


# Two processes


def test_two_processes_lose_the_same_channels(tmp_path):
    """The wrapper is replaced after each cut. BatchNorm's statistics differ between processes, parameters do not."""

    def run():
        model, pruning = net(), callback_of()
        trainer_of(tmp_path, pruning, strategy="ddp", devices=2).fit(model, rows())
        assert pruning.pruner.kept == {"hidden": 10, "last": 17}
        return [parameter.tolist() for parameter in model.parameters()]

    first, second = in_two_ranks(run)
    assert first == second
    assert len(first[0]) == 10


def test_a_part_of_a_module_in_a_wrapper_is_refused(tmp_path):
    def run():
        with pytest.raises(KeepkError, match=r"'net' is a part .* has to be rebuilt after a cut\. Leave module= out"):
            trainer_of(tmp_path, callback_of(module="net"), strategy="ddp", devices=2).fit(Outer(), rows())

    in_two_ranks(run)


# Several optimizers


class Manual(Net):
    """Two optimizers, which take turns: `first` and `second` are how often they step in a batch of either kind."""

    automatic_optimization = False

    def __init__(self, first=(1, 1), second=(0, 1)):
        super().__init__()
        self.times = first, second

    def training_step(self, batch, number):
        for optimizer, times in zip(self.optimizers(), self.times, strict=True):
            for _ in range(times[number % 2]):
                optimizer.zero_grad()
                self.manual_backward(Net.training_step(self, batch, number))
                optimizer.step()

    def configure_optimizers(self):
        ends = [self.first.parameters(), [*self.norm.parameters(), *self.last.parameters()]]
        return [torch.optim.SGD(it, lr=0.02) for it in ends]


def weights_every(every, schedule=(60, 40, 20), **options):
    return PruningCallback(keepk.weights("last.weight", keep=20, schedule=list(schedule)), every=every, **options)


@pytest.mark.parametrize(
    ("model", "every", "steps"),
    [
        pytest.param(Manual(), 4, [4, 9, 12], id="one step, then two"),  # 1, 3, 4, 6, 7, 9, 10, 12 ...
        pytest.param(Manual((1, 1), (1, 1)), 5, [6, 10, 16], id="always two"),
        pytest.param(Manual((2, 2), (3, 3)), 2, [5, 10, 15], id="more than the time between events"),
        pytest.param(Manual((1, 0), (0, 0)), 3, [3, 6, 9], id="accumulating"),
    ],
)
def test_no_event_is_missed_with_several_optimizers(model, every, steps, tmp_path):
    recorder, pruning = Recorder(), weights_every(every)
    trainer_of(tmp_path, pruning, logger=recorder).fit(model, rows())
    assert [it["step"] for it in recorder.got if "keepk/event" in it] == steps
    assert pruning.pruner.done


@pytest.mark.parametrize(
    ("every", "options"),
    [(17, {}), (9, {"max_steps": 20}), (4, {"max_steps": 11, "max_epochs": -1}), ("epoch", {"max_steps": 24})],
)
def test_training_of_several_optimizers_that_ends_before_the_plan_is_refused(every, options, tmp_path):
    """24 batches have 48 steps of two optimizers."""
    with pytest.raises(PlanError, match="needs 3 more events"):
        trainer_of(tmp_path, weights_every(every), **options).fit(Manual((1, 1), (1, 1)), rows())


@pytest.mark.parametrize("every", [16, 9])
def test_the_steps_of_several_optimizers_are_enough_for_the_plan(every, tmp_path):
    pruning = weights_every(every)
    trainer_of(tmp_path, pruning).fit(Manual((1, 1), (1, 1)), rows())
    assert pruning.pruner.done


def test_no_event_is_repeated_or_missed_after_resuming_with_several_optimizers(tmp_path):
    def run(path=None):
        torch.manual_seed(0)
        saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **BY_EPOCH)
        recorder, pruning = Recorder(), weights_every(5, (60, 50, 40, 30, 20))
        trainer = trainer_of(tmp_path, pruning, saver, logger=recorder, enable_checkpointing=True)
        model = Manual()
        trainer.fit(model, rows(), ckpt_path=path, weights_only=False)
        return [it["step"] for it in recorder.got if "keepk/event" in it], model.last.weight

    whole, expected = run()
    assert whole == [6, 10, 15, 21, 25]
    resumed, weight = run(tmp_path / "step=18.ckpt")
    assert resumed == [21, 25]
    assert torch.equal(expected, weight)


# Training that ends early


class Ending(pl.Callback):
    """Ends training after a step, as `EarlyStopping` and `Timer` do."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.should_stop = True


@pytest.mark.parametrize(("every", "step", "events", "kept"), [("epoch", 10, 1, (16, 30)), (7, 6, 0, (24, 96))])
def test_training_that_ends_before_the_last_event_gives_a_warning(every, step, events, kept, tmp_path):
    words = (
        rf"ended after {events} of 2 events of the plan, so more units are left than planned: space 'hidden' has "
        rf"{kept[0]} instead of 10, space 'last' has {kept[1]} instead of 17\."
    )
    with pytest.warns(KeepkWarning, match=words):
        trainer_of(tmp_path, callback_of(every=every), Ending(step)).fit(net(), rows())
    trainer_of(tmp_path, callback_of(), Ending(14)).fit(net(), rows())  # no warning after the last event
    trainer_of(tmp_path, callback_of(), fast_dev_run=True).fit(net(), rows())


def test_fewer_steps_than_expected_give_a_warning(tmp_path):
    model = Manual((1, 0), (0, 0))  # 12 steps, and not 48
    with pytest.warns(KeepkWarning, match=r"ended after 2 of 3 events .* 'last.weight' has 40 instead of 20\."):
        trainer_of(tmp_path, weights_every(5)).fit(model, rows())


# Averages


class Plain(Outer):
    """Without BatchNorm, for which StochasticWeightAveraging adds an epoch."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 4))


def swa():
    return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)


def of_plain(what, **options):
    if what == "weights":
        return PruningCallback(keepk.weights("0.weight", keep=20, schedule=[100, 60, 20]), module="net", **options)
    space = keepk.channels("0", keep=10, schedule=[20, 16, 10])
    return PruningCallback(space, example=torch.randn(2, 6), module="net", **options)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("what", ["weights", "channels"])
def test_stochastic_weight_averaging_keeps_the_zeros_and_the_sizes(what, first, tmp_path):
    torch.manual_seed(0)
    model, pruning = Plain(), of_plain(what)
    trainer_of(tmp_path, *([pruning, swa()] if first else [swa(), pruning])).fit(model, rows())
    assert pruning.pruner.done
    layer = model.net[0]
    assert layer.weight.shape == (24 if what == "weights" else 10, 6)
    assert int(layer.weight.count_nonzero()) == (20 if what == "weights" else 60)


def test_stochastic_weight_averaging_adds_no_event(tmp_path):
    """With BatchNorm the last epoch trains nothing: it collects the statistics of the averaged weights."""
    model, pruning = net(), callback_of()
    trainer_of(tmp_path, pruning, swa(), max_epochs=3).fit(model, rows())
    assert pruning.pruner.kept == {"hidden": 10, "last": 17}
    three = PruningCallback(keepk.weights("last.weight", keep=17, schedule=[40, 30, 17]))
    with pytest.raises(PlanError, match="has time for 2, so"):
        trainer_of(tmp_path, three, swa(), max_epochs=2).fit(net(), rows())


@pytest.mark.parametrize("what", ["weights", "channels"])
def test_stochastic_weight_averaging_is_resumed(what, tmp_path):
    def run(path=None):
        torch.manual_seed(0)
        model, saver = Plain(), ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **BY_EPOCH)
        trainer = trainer_of(tmp_path, swa(), of_plain(what), saver, enable_checkpointing=True)
        trainer.fit(model, rows(), ckpt_path=path, weights_only=False)
        return list(model.parameters())

    whole = run()
    assert same(whole, run(tmp_path / "step=12.ckpt"))


class Restoring(pl.Callback):
    """An average of its own, which does not follow the Pruner."""

    def on_train_start(self, _trainer, pl_module):
        self.dense = pl_module.last.weight.detach().clone()

    def on_train_end(self, _trainer, pl_module):
        with torch.no_grad():
            pl_module.last.weight.copy_(self.dense)


def test_another_average_that_brings_weights_back_gives_a_warning(tmp_path):
    pruning = PruningCallback(keepk.weights("last.weight", keep=17, schedule=[30, 17]))
    with pytest.warns(KeepkWarning, match="kept 17 units, but there are 96 now"):
        trainer_of(tmp_path, pruning, Restoring()).fit(net(), rows())


@pytest.mark.parametrize("averaging", [swa, lambda: WeightAveraging(avg_fn=get_ema_avg_fn(0.8))])
def test_a_new_average_of_a_run_that_goes_on_is_refused(averaging, tmp_path):
    """It is made after the Pruner, which could not cut it."""
    torch.manual_seed(0)
    model, pruning = Plain(), of_plain("channels")
    with pytest.warns(KeepkWarning, match="ended after 1 of 3 events"):
        trainer_of(tmp_path, pruning, Ending(6)).fit(model, rows())
    with pytest.raises(KeepkError, match=r"an average .* made after the Pruner, .* without averaging"):
        trainer_of(tmp_path, pruning, averaging()).fit(model, rows())
