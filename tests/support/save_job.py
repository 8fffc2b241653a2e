"""The saves that test_save_load.py kills at each of their file-system steps, or runs concurrently.

Prints a report as JSON. Arguments: a folder, and "kills", "locks" or "no locks".
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import keepk
from keepk.storage import files
from killing import file_step, kill_after, race, sweep

ROUNDS = int(os.environ.get("KEEPK_RACES", "8"))


def build():
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 30))


def made(value: int) -> nn.Module:
    """A model whose parameters all have the same value, with this number of units removed."""
    model = build()
    keepk.shrink(model, keepk.trace(model, torch.zeros(2, 20)), range(value))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


MODELS = {value: made(value) for value in (1, 2, 3)}


def save_value(folder: Path, value: int, step: int | None = None) -> None:
    if step is not None:
        kill_after(step, file_step)
    keepk.save(MODELS[value], folder)


def read_value(folder: Path) -> int:
    """The value in the folder, or 0 without a model; an incomplete model raises."""
    if not (folder / "arch.json").exists():
        return 0
    model = keepk.load(build(), folder)
    value = 60 - model[0].out_features
    assert all(bool((parameter == value).all()) for parameter in model.parameters())
    return value


def what_is_left(folder: Path, old: int) -> tuple[int, list[str]]:
    """The value in the folder, and its files after one more save."""
    found = read_value(folder)
    save_value(folder, max(old, 1))
    assert read_value(folder) == max(old, 1)
    return found, sorted(path.name for path in folder.iterdir())


def save_checkpoint_value(folder: Path, value: int) -> None:
    model = build()
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    keepk.save_checkpoint(folder, model=model, extra=value)


def read_checkpoint_value(folder: Path) -> int:
    value: int = keepk.load_checkpoint(folder, model=(model := build()))
    assert all(bool((parameter == value).all()) for parameter in model.parameters())
    return value


def races(folder: Path) -> dict[str, Any]:
    """Models and checkpoints."""
    return {
        "models": race(folder / "models", save_value, read_value, rounds=ROUNDS, seed=0),
        "checkpoints": race(
            folder / "checkpoints", save_checkpoint_value, read_checkpoint_value, rounds=ROUNDS, seed=1
        ),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, kind = Path(sys.argv[1]), sys.argv[2]
    if kind == "no locks":
        files.try_lock = lambda handle: None  # noqa: ARG005 - called by this name in its type
    kills = (sweep(place / "model", old, save_value, what_is_left) for old in (0, 1))
    print(json.dumps(list(kills) if kind == "kills" else races(place)))
