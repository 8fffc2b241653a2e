"""A checkpoint is complete or absent, loads bit-exactly or is refused, and a refused load changes nothing."""

import copy
import json
import math
import os
import pickle
import random
import re
import resource
from collections import Counter
from collections.abc import Callable
from functools import reduce
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import keepk
from keepk import load_checkpoint, save_checkpoint
from keepk.checkpoint.parts import rng_state
from keepk.errors import CheckpointError, KeepkError, StateError
from keepk.storage.codec import encode
from keepk.storage.files import safetensors_bytes


def bits(tree):
    """A bit-exact fingerprint of a tree."""
    encoded, tensors = encode(tree)
    return sha256(json.dumps(encoded).encode() + b"".join(map(bytes, safetensors_bytes(tensors)))).hexdigest()


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv = nn.Conv2d(2, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        return self.out(self.drop(self.norm(self.conv(x)).relu()).mean((2, 3)))


class Run:
    """All objects of a training run."""

    def __init__(self, seed, width=8, keep=60, enabled=True):
        torch.manual_seed(seed)
        self.model = Net(width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        schedule = keepk.Annealing(p0=0.3, n1=1, nu=0.2)
        spaces = [keepk.weights("*.weight", exclude="norm.*", keep=keep, schedule=schedule)]
        self.pruner = keepk.Pruner(self.model, spaces, self.optimizer)
        self.scheduler = lrs.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=enabled)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.generator = torch.Generator().manual_seed(seed)

    def parts(self):
        names = ("model", "pruner", "optimizer", "scheduler", "scaler", "ema", "generator")
        return {name: getattr(self, name) for name in names}

    def epoch(self):
        for _ in range(2):
            x = torch.randn(4, 2, 6, 6, generator=self.generator) * random.random() + np.random.rand()
            self.scaler.scale(self.model(x).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.ema.update_parameters(self.model)
        self.pruner.step()
        self.scheduler.step()
        return self

    def bits(self):
        state = {name: part.state_dict() for name, part in self.parts().items() if name != "generator"}
        return bits([state, self.generator.get_state(), rng_state()])


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit(folder, **changes):
    """Change checkpoint.json and update its sha256, as a newer version would write it."""
    index = folder / "checkpoint.json"
    document = {**json.loads(index.read_text()), **changes}
    document.pop("sha256")
    document["sha256"] = sha256(json.dumps(document).encode()).hexdigest()
    index.write_text(json.dumps(document))


def the_tensor_file(folder):
    (path,) = folder.glob("tensors-*.safetensors")
    return path


def test_a_loaded_run_goes_on_bit_equal(tmp_path):
    run = Run(1).epoch().epoch()
    save_checkpoint(tmp_path, **run.parts(), extra={"epoch": 2, 7: (1, float("inf"))})
    saved = run.bits()
    other = Run(2).epoch()
    assert other.bits() != saved
    assert load_checkpoint(tmp_path, **other.parts()) == {"epoch": 2, 7: (1, float("inf"))}
    assert other.bits() == saved
    after = other.epoch().epoch().epoch().bits()
    load_checkpoint(tmp_path, **run.parts())
    assert run.epoch().epoch().epoch().bits() == after


def test_saving_changes_nothing(tmp_path):
    run = Run(1).epoch()
    before = run.bits()
    save_checkpoint(tmp_path, **run.parts())
    assert run.bits() == before


def test_nothing_is_pickled_or_unpickled(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    run = Run(1).epoch()
    save_checkpoint(tmp_path, **run.parts())
    load_checkpoint(tmp_path, **run.parts())


def test_the_tensors_can_be_read_without_keepk(tmp_path):
    model = Net()
    save_checkpoint(tmp_path, model=model)
    stored = safetensors.torch.load_file(the_tensor_file(tmp_path))
    torch.testing.assert_close(stored["model[0]['state']['conv.weight']"], model.conv.weight.detach(), rtol=0, atol=0)


# Contents of a folder ------------------------------------------------------------------------------------------------


def test_a_new_checkpoint_replaces_the_old_and_its_leftovers_and_nothing_else(tmp_path):
    (tmp_path / "tensors-mine.safetensors").write_bytes(b"not ours")
    (tmp_path / f"tensors-{'0' * 32}.safetensors").write_bytes(b"left by a kill")
    (tmp_path / f"checkpoint-{'0' * 32}.json.tmp").write_bytes(b"left by a kill")
    for value in (1, 2):
        save_checkpoint(tmp_path, extra=value)
    assert load_checkpoint(tmp_path) == 2
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 3
    assert {"checkpoint.json", "tensors-mine.safetensors"} < names


def test_missing_folders_are_made_and_removed_again_if_the_save_fails(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "a" / "b", extra=1)
    assert load_checkpoint(str(tmp_path / "a" / "b")) == 1

    def full(handle, fsync=os.fsync):
        if not Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot be written \(\[Errno 28\] No space left on device\)"):
        save_checkpoint(tmp_path / "c" / "d", extra=1)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_extra_that_cannot_be_encoded_leaves_the_old_checkpoint(tmp_path):
    save_checkpoint(tmp_path, extra=1)
    before = snapshot(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"extra\['callback'\]\[0\]: got builtin_function_or_method print; keep plain"
    ):
        save_checkpoint(tmp_path, extra={"callback": [print]})
    assert snapshot(tmp_path) == before


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    save_checkpoint(tmp_path, extra=1)
    before = snapshot(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written .* with room for 4,0\d\d,\d\d\d bytes"):
            save_checkpoint(tmp_path, extra=torch.zeros(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert snapshot(tmp_path) == before


def test_an_interrupt_just_after_the_commit_leaves_the_new_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, extra=1)

    def interrupted(*names, replace=os.replace):
        replace(*names)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, extra=2)
    assert load_checkpoint(tmp_path) == 2


def test_a_disk_that_fails_after_the_commit_leaves_the_new_checkpoint(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, extra=1)
    replaced = []

    def replace(*names, replace=os.replace):
        replace(*names)
        replaced.append(names)

    def fsync(handle, fsync=os.fsync):
        if replaced:
            raise OSError(5, "Input/output error")
        fsync(handle)

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="the new checkpoint is there, but may not survive a power cut"):
        save_checkpoint(tmp_path, extra=2)
    assert load_checkpoint(tmp_path) == 2


@pytest.mark.parametrize("below", [(), ("sub",)], ids=["file", "below a file"])
def test_a_path_that_is_a_file_is_refused(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(CheckpointError, match=r"file.*cannot be written"):
        save_checkpoint(file.joinpath(*below), extra=1)
    assert file.read_text() == "mine"


# Refusals when reading -----------------------------------------------------------------------------------------------


def cut_short(folder):
    path = the_tensor_file(folder)
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(folder):
    path = the_tensor_file(folder)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def edit_the_text(folder):
    index = folder / "checkpoint.json"
    index.write_text(index.read_text().replace('"lr": 0.1', '"lr": 0.3'))


def cut_the_text(folder):
    index = folder / "checkpoint.json"
    index.write_text(index.read_text()[:-9])


DAMAGES = [
    (
        lambda folder: (folder / "checkpoint.json").unlink(),
        r"there is no checkpoint to read .* Pass a folder that keepk.save_checkpoint wrote\.",
    ),
    (lambda folder: the_tensor_file(folder).unlink(), r"tensors-.*: cannot be read .*but checkpoint.json names it"),
    (cut_short, r"tensors-.*: has [\d,]+ bytes, checkpoint.json says [\d,]+"),
    (flip_a_bit, r"tensors-.*: its sha256 is not the one in checkpoint.json: it is damaged"),
    (edit_the_text, r"checkpoint\.json: was edited or damaged after it was written"),
    (cut_the_text, r"checkpoint\.json: is not valid JSON: the file is truncated or was edited"),
    (lambda folder: (folder / "checkpoint.json").write_text("[]"), r"is not a 'keepk.checkpoint'"),
    (lambda folder: edit(folder, format="other"), r"is not a 'keepk.checkpoint'"),
    (lambda folder: edit(folder, version=3), r"has version 3, this keepk reads version 1 and 2"),
    (lambda folder: edit(folder, tree={"codec": 1, "value": {"$new": 1}}), r"unknown type tag '\$new'"),
    (lambda folder: edit(folder, tree={"codec": 9, "value": 1}), r"codec version 9"),
    (lambda folder: edit(folder, tensors=None), r"checkpoint\.json: is not laid out as a checkpoint: it names no"),
    (
        lambda folder: edit(folder, tensors={"file": "../x", "size": 1, "sha256": ""}),
        r"names '../x', which is not a checkpoint's tensor",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_damage_is_named_and_nothing_changes(tmp_path, damage, message):
    save_checkpoint(tmp_path, **Run(1).epoch().parts())
    damage(tmp_path)
    run = Run(2).epoch()
    before = run.bits()
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, **run.parts())
    assert run.bits() == before


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("place", ["torch", "keepk", "parts", "tree"])
def test_numbers_that_json_has_no_word_for_are_refused(tmp_path, place, text):
    """json.loads accepts NaN and infinities, but the hash of a document cannot contain them."""
    save_checkpoint(tmp_path, extra=1)
    index = tmp_path / "checkpoint.json"
    document = json.loads(index.read_bytes())
    document[place] = "here"
    index.write_text(json.dumps(document).replace('"here"', text))
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.json: (is not valid JSON|holds a value that checkpoint\.json never has)"
    ):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"parts": None}, r"checkpoint\.json: is not laid out as a checkpoint: it lists no parts"),
        ({"parts": [[]]}, r"it lists no parts"),
        ({"tree": 1}, r"got a tree of codec version None"),
        ({"tree": {"codec": 1, "value": {"rng": {"$size": [2**70]}}}}, r"checkpoint\.json: .*"),
    ],
)
def test_a_forged_checkpoint_is_refused(tmp_path, change, match):
    save_checkpoint(tmp_path, extra=1)
    edit(tmp_path, **change)
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("size", "digest"), [("12", "0" * 64), (-1, "0" * 64), (True, "0" * 64), (None, "0" * 64), (8, None), (8, ["x"])]
)
def test_a_size_or_hash_that_no_file_can_have_is_refused(tmp_path, size, digest):
    save_checkpoint(tmp_path, extra=torch.ones(3))
    edit(tmp_path, tensors={"file": the_tensor_file(tmp_path).name, "size": size, "sha256": digest})
    with pytest.raises(CheckpointError, match=r"checkpoint\.json: says that tensors-.* has size .*, which is imposs"):
        load_checkpoint(tmp_path)


def test_a_forged_tensor_file_is_refused(tmp_path):
    save_checkpoint(tmp_path, extra=torch.ones(3))
    for data in (b"", b"12345678", (2**62).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]"):
        the_tensor_file(tmp_path).write_bytes(data)
        named = {"file": the_tensor_file(tmp_path).name, "size": len(data), "sha256": sha256(data).hexdigest()}
        edit(tmp_path, tensors=named)
        with pytest.raises(CheckpointError, match=r"tensors-.*: is not a safetensors file .* Use another checkpoint"):
            load_checkpoint(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a pipe with a name")
@pytest.mark.parametrize("name", ["checkpoint.json", "tensors"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    save_checkpoint(tmp_path, extra=torch.ones(3))
    path = the_tensor_file(tmp_path) if name == "tensors" else tmp_path / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        load_checkpoint(tmp_path)


def places(tree, path=()):
    """The paths of all values in a document."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from places(tree[key], (*path, key))


ODD: list[Any] = [None, True, -1, 2**63, 1.5, "", "x", [], {}, [0], {"$tuple": [1]}, {"$float": "00"}, {"$tensor": "x"}]
ODD += [{"$device": "zzz"}, {"$dtype": "qint8"}, {"$numpy": ["<f8", "00"]}, {"$defaultdict": ["eval", []]}]


def test_a_mutated_checkpoint_is_refused_or_loaded_whole(tmp_path):
    """With an updated hash, there is no error of json, torch or numpy, and a refusal changes nothing."""
    save_checkpoint(tmp_path, **Run(1).epoch().parts(), extra={"a": [1, (2,), {3: math.nan}]})
    document, chance, seen = json.loads((tmp_path / "checkpoint.json").read_bytes()), random.Random(0), Counter[str]()
    every = [path for path in places(document) if path[0] not in ("format", "version", "sha256")]
    short = [path for path in every if "rng" not in path or chance.random() < 0.02]  # it has thousands of paths
    for _ in range(150):
        changed = copy.deepcopy(document)
        *above, key = chance.choice(short)
        reduce(lambda tree, step: tree[step], above, changed)[key] = chance.choice(ODD)
        changed.pop("sha256")
        edit(tmp_path, **changed)
        run = Run(2).epoch()
        before = run.bits()
        try:
            load_checkpoint(tmp_path, **run.parts())
        except KeepkError:
            seen["refused"] += 1
            assert run.bits() == before
        else:
            seen["loaded"] += 1
    assert min(seen["refused"], seen["loaded"]) > 10


class BytesPath:
    def __fspath__(self):
        return b"run"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "got '' as the path, which no file can have. Pass a name, such as 'out/net'."),
        ("run\0", r"got 'run\x00' as the path, which no file can have. Pass a name, such as 'out/net'."),
        ("run\ud800", r"got 'run\ud800' as the path, which no file can have. Pass a name, such as 'out/net'."),
        (BytesPath(), "got b'run' as the path, which no file can have. Pass a name, such as 'out/net'."),
        (b"run", "got bytes as the path. The order is path, then model=, pruner=, optimizer= and the others by name."),
        (None, "got NoneType as the path. The order is path, then model=, pruner=, optimizer= and the others by name."),
        (3, "got int as the path. The order is path, then model=, pruner=, optimizer= and the others by name."),
    ],
    ids=["empty", "nul", "surrogate", "bytes path", "bytes", "none", "int"],
)
def test_a_path_that_no_file_can_have_is_refused(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=f"^save_checkpoint: {re.escape(words)}$"):
        save_checkpoint(path, extra=1)
    with pytest.raises(CheckpointError, match=f"^load_checkpoint: {re.escape(words)}$"):
        load_checkpoint(path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("path", ["x" * 300, "/proc/nowhere/run", "/dev/null/run"], ids=["long", "proc", "device"])
def test_a_path_that_the_system_refuses_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r": cannot be written \(.*\)\. Choose a writable folder"):
        save_checkpoint(path, extra=1)
    with pytest.raises(CheckpointError, match="there is no checkpoint to read"):
        load_checkpoint(path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            save_checkpoint(tmp_path / "run", extra=1)
    finally:
        tmp_path.chmod(0o700)


def test_a_read_only_file_system_is_refused(tmp_path, monkeypatch):
    """Also for root: opening any file for writing fails."""
    real = Path.open

    def opened(self, mode="r", *rest):
        if "r" not in mode:
            raise OSError(30, "Read-only file system")
        return real(self, mode, *rest)

    save_checkpoint(tmp_path, extra=1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(CheckpointError, match=r"cannot be written \(.*Read-only file system\).* are unchanged"):
            save_checkpoint(tmp_path, extra=2)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def other_optimizer(run):
    run.optimizer = torch.optim.AdamW(run.model.parameters())


def other_groups(run):
    parameters = [*run.model.parameters()]
    run.optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)


def other_order(run):
    run.optimizer = torch.optim.SGD([*run.model.parameters()][::-1], lr=0.1)


def other_scheduler(run):
    run.scheduler = lrs.StepLR(run.optimizer, 3)


def two_schedulers(run):
    run.scheduler = [run.scheduler, run.scheduler]


def other_names(run):
    run.model = nn.Sequential(nn.Linear(2, 2))


def other_dtype(run):
    run.model.double()


MISFITS = [
    (other_optimizer, "optimizer: is a AdamW here and a SGD in the checkpoint"),
    (other_groups, r"optimizer: has groups of \[2, 4\] parameters here and of \[6\] in the checkpoint"),
    (other_order, r"optimizer: parameter 0 has shape \(3,\) here and \(8, 2, 3, 3\) in the checkpoint"),
    (other_scheduler, "scheduler: is a StepLR here and a MultiStepLR in the checkpoint"),
    (two_schedulers, "scheduler: got 2, but 1 were saved"),
    (other_names, r"model: 0.weight, 0.bias \(2 in total\) missing from the checkpoint"),
    (other_dtype, r"model: 'conv.weight' is \(8, 2, 3, 3\), torch.float64 here and .*torch.float32 in the checkpoint"),
]


@pytest.mark.parametrize(("change", "message"), MISFITS, ids=[change.__name__ for change, _ in MISFITS])
def test_objects_of_another_run_are_refused_and_nothing_changes(tmp_path, change, message):
    save_checkpoint(tmp_path, **Run(1).epoch().parts())
    run = Run(2).epoch()
    change(run)
    state = {name: part.state_dict() for name, part in run.parts().items() if hasattr(part, "state_dict")}
    before = bits([state, rng_state()])
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, **run.parts())
    assert bits([{name: run.parts()[name].state_dict() for name in state}, rng_state()]) == before


def test_a_model_of_other_shapes_is_refused(tmp_path):
    save_checkpoint(tmp_path, model=Net(8))
    model = Net(9)
    before = bits(model.state_dict())
    with pytest.raises(CheckpointError, match=r"'conv.weight' is \(9, 2, 3, 3\), .* here and \(8, 2, 3, 3\)"):
        load_checkpoint(tmp_path, model=model)
    assert bits(model.state_dict()) == before


def test_a_pruner_of_another_plan_is_refused_and_nothing_changes(tmp_path):
    save_checkpoint(tmp_path, **Run(1).epoch().parts())
    run = Run(2, keep=50).epoch()
    before = run.bits()
    with pytest.raises(StateError, match="belongs to another plan"):
        load_checkpoint(tmp_path, **run.parts())
    assert run.bits() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_is_enabled_in_both_runs_or_in_neither(tmp_path, enabled):
    save_checkpoint(tmp_path, **Run(1, enabled=enabled).epoch().parts())
    load_checkpoint(tmp_path, **Run(2, enabled=enabled).parts())
    with pytest.raises(CheckpointError, match=r"scaler: is (en|dis)abled here and (en|dis)abled in the checkpoint"):
        load_checkpoint(tmp_path, **Run(2, enabled=not enabled).parts())


class Stubborn(nn.Module):
    """A model whose own code refuses a state after half of it was loaded."""

    def __init__(self, refuses):
        super().__init__()
        self.first, self.refuses = nn.Linear(2, 2), refuses

    def get_extra_state(self):
        return {"n": (1, 2)}

    def set_extra_state(self, state):
        assert state == {"n": (1, 2)}
        if self.refuses:
            raise RuntimeError("not today")


def test_a_model_that_refuses_its_state_half_way_gives_everything_back(tmp_path):
    def parts(seed, refuses):
        run = Run(seed).epoch()
        run.model = nn.ModuleList([run.model, Stubborn(refuses)])
        return run

    save_checkpoint(tmp_path, **parts(1, False).parts())
    run = parts(2, True)
    before = run.bits()
    run.model[1].refuses = True
    with pytest.raises(RuntimeError, match="not today"):
        load_checkpoint(tmp_path, **run.parts())
    run.model[1].refuses = False
    assert run.bits() == before


class Refusing:
    """An EMA that refuses every state."""

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        raise RuntimeError(f"not {state}")


def test_an_ema_that_refuses_its_state_gives_the_others_theirs_back(tmp_path):
    save_checkpoint(tmp_path, **{**Run(1).epoch().epoch().parts(), "ema": Refusing()})
    run = Run(2).epoch()
    before = run.bits()
    with pytest.raises(RuntimeError, match=r"not \{'n': 1\}"):
        load_checkpoint(tmp_path, **{**run.parts(), "ema": Refusing()})
    assert run.bits() == before


# Which parts are needed ----------------------------------------------------------------------------------------------


def test_reading_for_inference_ignores_other_parts_and_leaves_the_generators(tmp_path):
    run = Run(1).epoch()
    save_checkpoint(tmp_path, **run.parts(), extra="x")
    other = Run(2)
    before = bits(rng_state())
    assert load_checkpoint(tmp_path) == "x"
    assert load_checkpoint(tmp_path, model=other.model) == "x"
    assert load_checkpoint(tmp_path, model=other.model, ema=other.ema) == "x"
    assert bits(rng_state()) == before
    assert bits([other.model.state_dict(), other.ema.state_dict()]) == bits(
        [run.model.state_dict(), run.ema.state_dict()]
    )


@pytest.mark.parametrize("left_out", ["model", "pruner", "scheduler", "scaler", "ema", "generator"])
def test_a_resume_needs_every_part_that_was_saved(tmp_path, left_out):
    save_checkpoint(tmp_path, **Run(1).parts())
    run = Run(2)
    before = run.bits()
    parts = {name: part for name, part in run.parts().items() if name != left_out}
    with pytest.raises(
        CheckpointError, match=f"has the run.s {left_out}, .*Pass {left_out}=..., or only model= to read it"
    ):
        load_checkpoint(tmp_path, **parts)
    assert run.bits() == before


def test_a_part_that_was_not_saved_is_refused(tmp_path):
    run = Run(1)
    save_checkpoint(tmp_path, model=run.model)
    with pytest.raises(CheckpointError, match=r"has no ema, only model\. Omit ema="):
        load_checkpoint(tmp_path, model=run.model, ema=run.ema)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": 3}, "model: got a int, which has no state_dict and load_state_dict"),
        ({"optimizer": [nn.Linear(1, 1), 3]}, r"optimizer\[1\]: got a int"),
        ({"generator": 3}, "generator: got a int, which has no get_state and set_state"),
        ({"optimizer": torch.amp.GradScaler("cpu")}, "optimizer: got a GradScaler. Pass a torch.optim.Optimizer"),
    ],
    ids=["model", "optimizer", "generator", "scaler"],
)
def test_objects_without_state_are_refused(tmp_path, parts, message):
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path / "new", **parts)
    assert not (tmp_path / "new").exists()


# Random numbers ------------------------------------------------------------------------------------------------------


def draws():
    return (random.random(), random.gauss(0, 1), np.random.randn(), torch.randn(3).tolist(), torch.randn(1).item())


def test_all_generators_go_on_where_they_stood(tmp_path):
    run = Run(1)
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    draws(), torch.rand(3, generator=generators[1])  # after an odd number of calls, gauss() has one value cached
    save_checkpoint(tmp_path, optimizer=run.optimizer, generator=generators)
    expected = draws(), [torch.rand(3, generator=generator).tolist() for generator in generators]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    fresh = [torch.Generator(), torch.Generator()]
    load_checkpoint(tmp_path, optimizer=run.optimizer, generator=fresh)
    assert (draws(), [torch.rand(3, generator=generator).tolist() for generator in fresh]) == expected


# Optimizers ----------------------------------------------------------------------------------------------------------


class WideMoments(torch.optim.Optimizer):
    """SGD with float32 momentum for bf16 weights, an int tensor and a str, which torch would cast on loading."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):  # noqa: ARG002
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(moment=torch.zeros_like(parameter, dtype=torch.float32), kind="wide")
                state.update(count=torch.zeros(3, dtype=torch.int64), nested={"pair": (torch.zeros(2), 3)})
            state["moment"].mul_(0.9).add_(parameter.grad.float())
            state["count"] += 1
            state["nested"]["pair"][0].add_(1 / 3)
            parameter.sub_((0.01 * state["moment"]).to(parameter.dtype))


def test_optimizer_state_keeps_its_dtype(tmp_path):
    def built(seed):
        torch.manual_seed(seed)
        model = nn.Linear(5, 5).bfloat16()
        return model, WideMoments(model.parameters())

    def train(model, optimizer):
        optimizer.zero_grad()
        model(torch.randn(3, 5).bfloat16()).square().sum().backward()
        optimizer.step()

    model, optimizer = built(1)
    train(model, optimizer)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    fresh, its_optimizer = built(2)
    load_checkpoint(tmp_path, model=fresh, optimizer=its_optimizer)
    assert bits(its_optimizer.state_dict()) == bits(optimizer.state_dict())
    assert its_optimizer.state[fresh.weight]["moment"].dtype == torch.float32
    expected = train(fresh, its_optimizer), bits(fresh.state_dict())
    load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    assert (train(model, optimizer), bits(model.state_dict())) == expected


OPTIMIZERS = {
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "adamw-fused": lambda params: torch.optim.AdamW(params, fused=True),
    "adam-foreach": lambda params: torch.optim.Adam(params, foreach=True),
    "tensor-lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "rmsprop": lambda params: torch.optim.RMSprop(params, centered=True, momentum=0.1),
    "adagrad": torch.optim.Adagrad,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
    "adafactor": torch.optim.Adafactor,
    "lbfgs": lambda params: torch.optim.LBFGS(params, max_iter=3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_bit_equal(tmp_path, name):
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))

    def built(seed):
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        return model, OPTIMIZERS[name](model.parameters())

    def train(model, optimizer, steps):
        def closure():
            optimizer.zero_grad()
            loss = (model(x).square().mean() - 1).square()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return bits([model.state_dict(), optimizer.state_dict()])

    model, optimizer = built(1)
    train(model, optimizer, 3)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer)
    fresh, its_optimizer = built(2)
    load_checkpoint(tmp_path, model=fresh, optimizer=its_optimizer)
    assert train(fresh, its_optimizer, 3) == train(model, optimizer, 3)


def test_a_flat_history_is_still_there_after_the_pruner_has_loaded(tmp_path):
    x = torch.randn(30, 8, generator=torch.Generator().manual_seed(0))

    def built(seed):
        torch.manual_seed(seed)
        model = nn.Linear(8, 3)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
        spaces = [keepk.weights("*", keep=12, schedule=keepk.OneShot())]
        return {"model": model, "optimizer": optimizer, "pruner": keepk.Pruner(model, spaces, optimizer)}

    def train(model, optimizer, pruner):
        def closure():
            optimizer.zero_grad()
            loss = (model(x).tanh() - x[:, :3]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure), optimizer.step(closure)
        return bits([model.state_dict(), optimizer.state_dict(), pruner.state_dict()])

    parts, fresh = built(1), built(2)
    train(**parts), parts["pruner"].step(), train(**parts)
    assert parts["optimizer"].state_dict()["state"][0]["old_dirs"]
    save_checkpoint(tmp_path, **parts)
    load_checkpoint(tmp_path, **fresh)
    assert train(**fresh) == train(**parts)


def test_two_optimizers_and_two_schedulers(tmp_path):
    def built(lr):
        models = [nn.Linear(2, 2), nn.Linear(3, 3)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=lr * (i + 1)) for i, m in enumerate(models)]
        return optimizers, tuple(lrs.StepLR(optimizer, 2) for optimizer in optimizers)

    optimizers, schedulers = built(0.1)
    save_checkpoint(tmp_path, optimizer=optimizers, scheduler=schedulers)
    others, their_schedulers = built(0.7)
    load_checkpoint(tmp_path, optimizer=others, scheduler=their_schedulers)
    assert [it.param_groups[0]["lr"] for it in others] == [0.1, 0.2]
    assert [it.get_last_lr() for it in their_schedulers] == [[0.1], [0.2]]
    with pytest.raises(CheckpointError, match="optimizer: got 1, but 2 were saved"):
        load_checkpoint(tmp_path, optimizer=others[0], scheduler=their_schedulers)


# Schedulers ----------------------------------------------------------------------------------------------------------


class Curved(lrs.LRScheduler):
    """Has a function in its state, like SWALR in some versions of torch."""

    def __init__(self, optimizer, curve):
        self.curve = curve
        super().__init__(optimizer)

    def get_lr(self):
        return [self.curve(base, self.last_epoch) for base in self.base_lrs]


def harmonic(base, epoch):
    return base / (1 + epoch)


def quadratic(base, epoch):
    return base / (1 + epoch) ** 2


SCHEDULERS = {
    "multi-step": lambda o: lrs.MultiStepLR(o, [3, 9, 9, 15], gamma=0.3),
    "step": lambda o: lrs.StepLR(o, 4),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.97),
    "linear": lambda o: lrs.LinearLR(o, total_iters=13),
    "polynomial": lambda o: lrs.PolynomialLR(o, total_iters=22, power=1.7),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 11),
    "warm-restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3, 2),
    "one-cycle": lambda o: lrs.OneCycleLR(o, 1.0, total_steps=40),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.3, step_size_up=4, mode="exp_range", gamma=0.9),
    "lambda": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda epoch: 0.9 + epoch / 1000),
    "swa": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=15),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "plateau-max": lambda o: lrs.ReduceLROnPlateau(o, mode="max", patience=0),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1, 5), lrs.MultiStepLR(o, [4, 6])], [5]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o, total_iters=9), lrs.ExponentialLR(o, 0.9)], o),
    "function": lambda o: Curved(o, harmonic),
    "nested-function": lambda o: lrs.ChainedScheduler([Curved(o, harmonic), lrs.ExponentialLR(o, 0.9)], o),
}


def rates(optimizer, scheduler, metrics):
    found = []
    for metric in metrics:
        optimizer.step()
        scheduler.step(metric) if isinstance(scheduler, lrs.ReduceLROnPlateau) else scheduler.step()
        found.append([(group["lr"], group.get("momentum")) for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_every_scheduler_gives_the_same_next_rates(tmp_path, name, steps):
    def built():
        first, second = nn.Linear(1, 1), nn.Linear(1, 1)
        groups: list[dict[str, Any]] = [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.02}]
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        return optimizer, SCHEDULERS[name](optimizer)

    metrics = torch.rand(27, generator=torch.Generator().manual_seed(0)).tolist()
    optimizer, scheduler = built()
    rates(optimizer, scheduler, metrics[:steps])
    save_checkpoint(tmp_path, optimizer=optimizer, scheduler=scheduler)
    fresh, its_scheduler = built()
    load_checkpoint(tmp_path, optimizer=fresh, scheduler=its_scheduler)
    expected = rates(optimizer, scheduler, metrics[steps : steps + 20])
    assert rates(fresh, its_scheduler, metrics[steps : steps + 20]) == expected
    assert len({str(rate) for rate in expected}) > 1


def test_a_scheduler_with_another_function_is_refused(tmp_path):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    save_checkpoint(tmp_path, optimizer=optimizer, scheduler=Curved(optimizer, harmonic))
    with pytest.raises(CheckpointError, match=r"uses the functions \['quadratic'\] here and \['harmonic'\] in the"):
        load_checkpoint(tmp_path, optimizer=optimizer, scheduler=Curved(optimizer, quadratic))


# Models --------------------------------------------------------------------------------------------------------------


def test_tied_channels_last_and_versioned_modules_come_back(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.conv = nn.Embedding(5, 4), nn.Conv2d(3, 4, 3)
            self.head, self.norm = nn.Linear(4, 5, bias=False), nn.BatchNorm2d(4)
            self.head.weight = self.embed.weight
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types

    model, fresh = Tied(), Tied()
    save_checkpoint(tmp_path, model=model)
    assert sum("weight" in name for name in safetensors.torch.load_file(the_tensor_file(tmp_path))) == 3
    load_checkpoint(tmp_path, model=fresh)
    assert bits(fresh.state_dict()) == bits(model.state_dict())
    assert fresh.head.weight is fresh.embed.weight
    assert fresh.conv.weight.is_contiguous(memory_format=torch.channels_last)
    seen = []
    fresh.norm._register_load_state_dict_pre_hook(lambda *args: seen.append(args[2].get("version")))
    load_checkpoint(tmp_path, model=fresh)
    assert seen == [nn.BatchNorm2d._version]


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's warning when it imports its compiler
def test_a_checkpoint_moves_between_wrapped_and_plain_models(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # public, and not exported
    try:
        wrappers: list[Callable[..., Any]] = [
            lambda m: m,
            DataParallel,
            DistributedDataParallel,
            torch.compile,
            lambda m: torch.compile(DataParallel(m)),
        ]
        for index, wrap in enumerate(wrappers):
            save_checkpoint(tmp_path / str(index), model=wrap(Net()))
        for other in wrappers:
            for index in range(len(wrappers)):
                model = Net()
                load_checkpoint(tmp_path / str(index), model=other(model))
                save_checkpoint(tmp_path / "again", model=model)
                stored = [
                    safetensors.torch.load_file(the_tensor_file(tmp_path / name)) for name in (str(index), "again")
                ]
                model_bits = [bits({k: v for k, v in it.items() if k.startswith("model")}) for it in stored]
                assert model_bits[0] == model_bits[1]
    finally:
        dist.destroy_process_group()


def test_wrappers_inside_a_model_and_names_that_only_look_like_wrappers(tmp_path):
    class Outer(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.module = nn.Linear(2, 2)
            self.inner = wrap(nn.Linear(2, 2))

    plain, wrapped = Outer(lambda m: m), Outer(DataParallel)
    save_checkpoint(tmp_path, model=wrapped)
    load_checkpoint(tmp_path, model=plain)
    assert torch.equal(plain.module.weight, wrapped.module.weight)
    assert torch.equal(plain.inner.weight, wrapped.inner.module.weight)


def test_an_ema_that_is_no_module(tmp_path):
    class Shadow:
        def __init__(self):
            self.values, self.decay = {}, 0.9

        def state_dict(self):
            return {"values": self.values, "decay": self.decay}

        def load_state_dict(self, state):
            self.values, self.decay = state["values"], state["decay"]

    shadow, fresh = Shadow(), Shadow()
    shadow.values[0] = torch.ones(3)
    save_checkpoint(tmp_path, ema=shadow)
    load_checkpoint(tmp_path, ema=fresh)
    assert bits(fresh.state_dict()) == bits(shadow.state_dict())


def test_a_lazy_model_is_refused_until_it_has_shapes(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\[0\]\['state'\]\['weight'\]: got an uninitialized parameter"):
        save_checkpoint(tmp_path / "new", model=nn.LazyLinear(3))
    save_checkpoint(tmp_path, model=nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match=r"model: 'weight': is an uninitialized parameter; run one batch first"):
        load_checkpoint(tmp_path, model=nn.LazyLinear(3))
