"""The runs that test_resume.py kills. Prints a report as JSON."""

import json
import random
import signal
import sys
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first optimizer step imports it: do it once here, not in every child
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import keepk
from keepk.checkpoint.parts import rng_state
from keepk.storage.codec import encode
from keepk.storage.files import safetensors_bytes
from killing import count_calls, every_call, file_step, in_child, kill_after, killed, sweep

EPOCHS, SAMPLES, BATCH = 7, 240, 40
CHAIN_SEEDS, KILLS_PER_CHAIN = (11, 12), 14


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.hidden = nn.Linear(96, 24)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(24, 4)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu().flatten(1)
        return self.out(self.drop(self.hidden(x).relu()))


class Training:
    """A training script with every kind of object that has a state."""

    def __init__(self):
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        self.scheduler = MultiStepLR(self.optimizer, [2, 5], gamma=0.3)
        schedule = keepk.Annealing(p0=0.5, n1=3, nu=0.1)
        fc = keepk.weights(["hidden*", "out*"], prune=0.9, name="fc", schedule=schedule)
        conv = keepk.weights("conv*", keep=21, name="conv", schedule=schedule)
        self.pruner = keepk.Pruner(self.model, [fc, conv], self.optimizer, epochs=EPOCHS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=7)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.generator = torch.Generator().manual_seed(6)
        data = torch.Generator().manual_seed(7)
        self.images = torch.randn(SAMPLES, 1, 6, 6, generator=data)
        self.labels = torch.randint(0, 4, (SAMPLES,), generator=data)

    def parts(self):
        names = ("model", "pruner", "optimizer", "scheduler", "scaler", "ema", "generator")
        return {name: getattr(self, name) for name in names}

    def run(self, folder: Path | None) -> str:
        epoch, batch, order = 0, 0, None
        if folder and (folder / "checkpoint.json").exists():
            extra = keepk.load_checkpoint(folder, **self.parts())
            epoch, batch, order = extra["epoch"], extra["batch"], extra["order"]
        while epoch < EPOCHS:
            order = torch.randperm(SAMPLES, generator=self.generator) if order is None else order
            for at in range(batch, SAMPLES, BATCH):
                self.update(order[at : at + BATCH])
                if at % (2 * BATCH) == 0:
                    self.save(folder, epoch, at + BATCH, order)
            self.pruner.step()
            self.scheduler.step()
            epoch, batch, order = epoch + 1, 0, None
            self.save(folder, epoch, batch, order)
        return self.fingerprint()

    def update(self, chosen):
        images = self.images[chosen] * (1 + 0.1 * random.random()) + 0.1 * float(np.random.randn())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(images), self.labels[chosen])
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.ema.update_parameters(self.model)

    def save(self, folder, epoch, batch, order):
        if folder:
            extra = {"epoch": epoch, "batch": batch, "order": order}
            keepk.save_checkpoint(folder, **self.parts(), extra=extra)

    def fingerprint(self) -> str:
        state = {name: part.state_dict() for name, part in self.parts().items() if name != "generator"}
        encoded, tensors = encode([state, self.generator.get_state(), rng_state()])
        data = b"".join(map(bytes, safetensors_bytes(tensors)))
        return sha256(json.dumps(encoded).encode() + data).hexdigest()


def unreferenced(folder: Path) -> bool:
    """Whether the folder has files that the index does not name, so that the kill was inside save_checkpoint."""
    return folder.exists() and len([*folder.iterdir()]) not in (0, 2)


def chain(folder: Path, seed: int, calls: int) -> dict[str, Any]:
    """One run that is killed several times and then allowed to finish."""
    draw = random.Random(seed)
    kills = inside_a_save = 0
    for turn in range(KILLS_PER_CHAIN):
        # Function calls happen anywhere in a run; file-system steps only in saves and loads.
        limit, counts = (draw.randint(1, calls // 4), every_call) if turn % 2 else (draw.randint(1, 150), file_step)
        ended_by, _ = in_child(partial(killed, lambda: Training().run(folder), limit, counts))
        kills += ended_by == signal.SIGKILL
        inside_a_save += unreferenced(folder)
    _, final = in_child(lambda: Training().run(folder))
    return {"seed": seed, "kills": kills, "inside_a_save": inside_a_save, "final": final}


def save_value(folder: Path, value: int, step: int | None = None) -> None:
    extra = {"value": value, "tensor": torch.full((50_000,), float(value))}
    if step is not None:
        kill_after(step, file_step)
    keepk.save_checkpoint(folder, extra=extra)


def read_value(folder: Path) -> int:
    """The value in the folder, or 0 without a checkpoint; an incomplete checkpoint raises."""
    if not (folder / "checkpoint.json").exists():
        return 0
    extra = keepk.load_checkpoint(folder)
    assert bool((extra["tensor"] == extra["value"]).all())
    return int(extra["value"])


def what_is_left(folder: Path, old: int) -> tuple[int, int]:
    """The value in the folder, and the number of files after one more save."""
    found = read_value(folder)
    save_value(folder, old)
    assert read_value(folder) == old
    return found, len([*folder.iterdir()])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    _, uninterrupted = in_child(lambda: Training().run(None))
    _, calls = in_child(lambda: count_calls(lambda: Training().run(folder / "counted")))
    chains = [chain(folder / str(seed), seed, calls) for seed in CHAIN_SEEDS]
    sweeps = [sweep(folder / "sweep", old, save_value, what_is_left) for old in (0, 1)]
    print(json.dumps({"uninterrupted": uninterrupted, "calls": calls, "chains": chains, "sweeps": sweeps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
