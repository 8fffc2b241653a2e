"""The saves that test_save_load.py kills at each of their file-system steps. Prints a report as JSON."""

import json
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import keepk
import resume_job
from resume_job import file_step, in_child, kill_after

resume_job.FILE_CODE = ("keepk.run.folder", "keepk.run.files", "keepk.deploy.folder", "pathlib")


def build():
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 30))


def made(value: int) -> nn.Module:
    """A model whose parameters all have one value, and from which so many units were removed."""
    model = build()
    keepk.shrink(model, keepk.trace(model, torch.zeros(2, 20)), range(value))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


MODELS = {value: made(value) for value in (1, 2)}


def save_value(folder: Path, value: int, step: int | None = None) -> None:
    if step is not None:
        kill_after(step, file_step)
    keepk.save(MODELS[value], folder)


def read_value(folder: Path) -> int:
    """What the folder holds: 0 for no model; one that is not whole raises."""
    if not (folder / "arch.json").exists():
        return 0
    model = keepk.load(folder, build())
    value = 60 - model[0].out_features
    assert all(bool((parameter == value).all()) for parameter in model.parameters())
    return value


def what_is_left(folder: Path, old: int) -> tuple[int, list[str]]:
    """What the folder holds, and which files there are after one more save."""
    found = read_value(folder)
    save_value(folder, max(old, 1))
    assert read_value(folder) == max(old, 1)
    return found, sorted(path.name for path in folder.iterdir())


def sweep(folder: Path, old: int) -> dict[str, list]:
    """Kill a save at each of its file-system steps; what the folder then holds, step by step."""
    in_child(lambda: save_value(folder, max(old, 1)))
    found, files = [], []
    while True:
        if not old:
            shutil.rmtree(folder)
        if not in_child(lambda: save_value(folder, old + 1, len(found) + 1))[0]:
            return {"found": found, "files": files}
        held, names = in_child(lambda: what_is_left(folder, old))[1]
        found.append(held)
        files.append(names)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([sweep(Path(sys.argv[1]) / "model", old) for old in (0, 1)]))
