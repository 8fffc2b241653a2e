"""The runs that test_channel_resume.py kills: models that shrink while they train.

One process builds each dense run once and forks every child from there; the last child builds its run again.
Prints a report as JSON.
"""

import json
import random
import signal
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer step imports it: do it once here, not in every child
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import keepk
from keepk.checkpoint.parts import rng_state
from keepk.cut.record import record_of
from keepk.storage.codec import encode
from keepk.storage.files import safetensors_bytes
from killing import count_calls, every_call, file_step, in_child, killed
from resume_job import unreferenced

SAMPLES, BATCH, KILLS = 24, 8, 10
IN_STEPS = keepk.Annealing(p0=0.2, n1=1, nu=0.1)


class Convnet(nn.Module):
    """Two convolutions with BatchNorm, followed by two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 10, 3), nn.BatchNorm2d(10)
        self.drop = nn.Dropout(0.2)
        self.hidden, self.out = nn.Linear(10, 12), nn.Linear(12, 3)

    def forward(self, x):
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu().mean((2, 3))
        return self.out(self.drop(self.hidden(x).relu()))


class Densenet(nn.Module):
    """Every BatchNorm reads all earlier channels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, bias=False)
        self.norm1, self.conv1 = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(12), nn.Conv2d(12, 4, 3, padding=1, bias=False)
        self.norm3, self.out = nn.BatchNorm2d(16), nn.Linear(16, 3)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.conv1(self.norm1(x).relu())], 1)
        x = torch.cat([x, self.conv2(self.norm2(x).relu())], 1)
        return self.out(self.norm3(x).relu().mean((2, 3)))


class Grouped(nn.Module):
    """One layer loses channels in threes, another one by one, so not every split can reach K."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12)
        self.grouped, self.norm2 = nn.Conv2d(12, 9, 3, groups=3), nn.BatchNorm2d(9)
        self.last = nn.Conv2d(9, 10, 1)
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        x = self.norm2(self.grouped(self.norm1(self.stem(x)).relu())).relu()
        return self.out(self.last(x).relu().mean((2, 3)))


def convnet_spaces(keep=9):
    kept = keepk.channels("conv*", keep=keep, name="channels", schedule=IN_STEPS)
    weights = keepk.weights("*.weight", exclude="norm*", keep=90, schedule=[500, 300, 150, 100, 95, 90])
    return [weights, kept]


def densenet_spaces():
    return [keepk.channels("norm*", at="input", keep=18, name="channels", schedule=IN_STEPS)]


def grouped_spaces():
    kept = keepk.channels(["stem", "grouped", "last"], keep=14, name="channels", schedule=IN_STEPS)
    return [kept, keepk.weights("out.weight", keep=3, schedule=[30, 30, 8, 7, 5, 3])]


def budget_spaces():
    """A budget that anneals, beside a space with a count; 4,338 MACs at first."""
    bounded = keepk.channels("conv*", macs=0.3, name="channels", metric=keepk.metrics.l2, schedule=IN_STEPS)
    return [bounded, keepk.channels("hidden", keep=5, schedule=[10, 8, 7, 6, 5])]


def read_budget_spaces():
    return [keepk.channels("norm*", at="input", parameters=0.5, name="channels", schedule=IN_STEPS)]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


class Training:
    """A training script with every kind of object that has a state."""

    def __init__(self, kind=Convnet, spaces=convnet_spaces, optimizer=momentum, shrink="each", *, follows=True):
        torch.manual_seed(5)
        self.model = kind()
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = MultiStepLR(self.optimizer, [2, 4], gamma=0.3)
        average = get_ema_multi_avg_fn(0.9)
        self.ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)
        data = torch.Generator().manual_seed(7)
        self.images = torch.randn(SAMPLES, 1, 6, 6, generator=data)
        self.labels = torch.randint(0, 3, (SAMPLES,), generator=data)
        self.pruner = keepk.Pruner(
            self.model,
            spaces(),
            self.optimizer,
            example=self.images[:2],
            shrink=shrink,
            followers=[self.ema] if follows else (),
        )
        self.generator = torch.Generator().manual_seed(6)

    def parts(self):
        names = ("model", "pruner", "optimizer", "scheduler", "ema", "generator")
        return {name: getattr(self, name) for name in names}

    def run(self, folder: Path | None, epochs: int | None = None) -> str:
        """Train for the given number of epochs, or for one epoch more than the plan has."""
        random.seed(5)  # Python reseeds a forked child
        epoch, batch, order = 0, 0, None
        if folder and (folder / "checkpoint.json").exists():
            extra = keepk.load_checkpoint(folder, **self.parts())
            epoch, batch, order = extra["epoch"], extra["batch"], extra["order"]
        while epoch < (self.pruner.epochs + 1 if epochs is None else epochs):
            order = torch.randperm(SAMPLES, generator=self.generator) if order is None else order
            for at in range(batch, SAMPLES, BATCH):
                self.update(order[at : at + BATCH])
                if at == BATCH:
                    self.save(folder, epoch, at + BATCH, order)
            self.pruner.step()
            self.scheduler.step()
            epoch, batch, order = epoch + 1, 0, None
            self.save(folder, epoch, batch, order)
        return self.fingerprint()

    def update(self, chosen):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.images[chosen]), self.labels[chosen]).backward()
        self.optimizer.step()
        self.ema.update_parameters(self.model)

    def save(self, folder, epoch, batch, order):
        if folder:
            keepk.save_checkpoint(folder, **self.parts(), extra={"epoch": epoch, "batch": batch, "order": order})

    def fingerprint(self) -> str:
        """The complete state of the run, bit by bit: state dicts, the record of the cuts, random numbers."""
        state = {name: part.state_dict() for name, part in self.parts().items() if name != "generator"}
        # Cuts made at once and cuts made step by step are recorded in a different order.
        records = json.dumps([record_of(self.model), record_of(self.ema.module)], sort_keys=True, default=list)
        encoded, tensors = encode([state, records, self.generator.get_state(), rng_state()])
        data = b"".join(map(bytes, safetensors_bytes(tensors)))
        return sha256(json.dumps(encoded).encode() + data).hexdigest()


SCENARIOS = {
    "each": partial(Training),
    "end": partial(Training, optimizer=adam, shrink="end"),
    "never": partial(Training, shrink="never"),
    "reads": partial(Training, Densenet, densenet_spaces, adam),
    "bound": partial(Training, Grouped, grouped_spaces),
    "budget": partial(Training, spaces=budget_spaces),
    "budget_of_reads_masked": partial(Training, Densenet, read_budget_spaces, adam, "end"),
}


def scenario(name: str, folder: Path) -> dict[str, Any]:
    """One run that is killed several times and then allowed to finish."""
    built = SCENARIOS[name]()
    plan, chains = built.pruner.plan["channels"], built.pruner.state_dict()["channels"]["chains"]
    _, uninterrupted = in_child(lambda: built.run(None))
    _, calls = in_child(lambda: count_calls(lambda: built.run(folder / f"{name} counted")))
    draw, where, kills, inside_a_save, resumed_at = random.Random(name), folder / name, 0, 0, []
    for turn in range(KILLS):
        limit, counts = (draw.randint(1, calls * 2 // 5), every_call) if turn % 3 else (draw.randint(1, 160), file_step)
        ended_by, _ = in_child(partial(killed, lambda: built.run(where), limit, counts))
        kills += ended_by == signal.SIGKILL
        inside_a_save += unreferenced(where)
        if (where / "checkpoint.json").exists():
            resumed_at.append(keepk.load_checkpoint(where)["epoch"])
    _, final = in_child(lambda: SCENARIOS[name]().run(where))
    found = {"uninterrupted": uninterrupted, "final": final, "kills": kills, "inside_a_save": inside_a_save}
    return {**found, "resumed_at": resumed_at, "epochs": len(plan), "chained": bool(chains), "calls": calls}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    print(json.dumps({name: scenario(name, folder) for name in SCENARIOS}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
