"""Checkpoints of a training run: killed at any moment and resumed, it ends as if it had never stopped.

Nothing is ever pickled or unpickled; see `keepk.run.folder` for what is on disk.
"""

import os
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keepk.errors import CheckpointError, KeepkError
from keepk.run.codec import decode, encode
from keepk.run.files import place
from keepk.run.folder import INDEX, read_folder, write_folder
from keepk.run.parts import (
    GeneratorPart,
    ModulePart,
    OptimizerPart,
    Part,
    PrunerPart,
    StatefulPart,
    host_copy,
)
from keepk.run.rng import check_rng_state, rng_state, set_rng_state
from keepk.run.scheduler import SchedulerPart

_ORDER = "path, then model=, pruner=, optimizer= and the others by name"
_FOR_INFERENCE = {"model", "ema"}
_OF_TORCH = {"optimizer", "scheduler", "scaler", "generator"}
_MAY_BE_SEVERAL = {"optimizer", "scheduler", "generator"}
_PARTS: dict[str, Any] = {
    "pruner": PrunerPart,
    "optimizer": OptimizerPart,
    "scheduler": SchedulerPart,
    "generator": GeneratorPart,
}


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    pruner: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    generator: Any = None,
    extra: Any = None,
) -> None:
    """Write the state of a run into the folder `path`, whole or not at all.

    Besides what is given, the states of the random number generators are saved (Python's, numpy's global one,
    torch's CPU and CUDA ones). A kill at any moment leaves the old checkpoint or the new one. Processes that write into
    one folder take turns, and the last one's checkpoint stays. With several processes, let one write, or give each a
    folder of its own: their random number generators differ.

    >>> import tempfile
    >>> net = nn.Linear(2, 1)
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(folder, model=net, optimizer=sgd, extra={"epoch": 3})
    ...     load_checkpoint(folder, model=net, optimizer=sgd)
    {'epoch': 3}

    Args:
        path: The folder; it is made if it is missing.
        model: Saved under the names it has without DDP or torch.compile wrappers.
        pruner: The `Pruner`.
        optimizer: One or a list.
        scheduler: One or a list. Functions in its state (a LambdaLR's) are not saved: build it with the same ones.
        scaler: A `torch.amp.GradScaler`.
        ema: An `AveragedModel`, or anything with `state_dict` and `load_state_dict`.
        generator: The `torch.Generator` of a sampler, or a list.
        extra: Any tree of plain values, arrays and tensors, such as ``{"epoch": 3, "batch": 17}``.

    """
    folder = place(path, "save_checkpoint", _ORDER, CheckpointError)
    given = {"model": model, "pruner": pruner, "optimizer": optimizer, "scheduler": scheduler}
    parts = _parts({**given, "scaler": scaler, "ema": ema, "generator": generator})
    captured = {name: [part.capture() for part in several] for name, several in parts.items()}
    tree, tensors = encode({**captured, "rng": rng_state(), "extra": extra}, name="")
    document = {"torch": str(torch.__version__), "parts": list(parts), "tree": tree}
    write_folder(folder, document, tensors)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    pruner: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    generator: Any = None,
) -> Any:
    """Give freshly built objects the states in the folder `path`; returns `extra`.

    With only `model` or `ema` (or nothing) it is a read for inference: other parts are ignored and random number
    generators are left alone. With any other part it is a resume: every part that was saved must be given, and the
    generators go on where they stood. Tensors in `extra` come back on the CPU.

    >>> import tempfile
    >>> net, fresh = nn.Linear(2, 1), nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(folder, model=net, extra={"accuracy": 0.98})
    ...     load_checkpoint(folder, model=fresh)
    {'accuracy': 0.98}
    >>> torch.equal(net.weight, fresh.weight)
    True

    Everything is read, verified and checked against the objects before the first of them changes. Should one still
    refuse its state, all of them get their old states back, from a copy on the host.
    """
    folder = place(path, "load_checkpoint", _ORDER, CheckpointError)
    given = {"model": model, "pruner": pruner, "optimizer": optimizer, "scheduler": scheduler}
    parts = _parts({**given, "scaler": scaler, "ema": ema, "generator": generator})
    document, tensors = read_folder(folder)
    resumes = bool(set(parts) - _FOR_INFERENCE)
    held = document.get("parts")
    if not isinstance(held, list) or not all(isinstance(name, str) for name in held) or "tree" not in document:
        raise CheckpointError(f"{folder / INDEX}: is not laid out as a checkpoint: it lists no parts")
    _refuse_other_parts(folder, set(parts), held, resumes)
    kept = _copies(parts)
    with ExitStack() as shapes:
        try:
            saved = decode(document["tree"], tensors)
            for part in parts.get("pruner", ()):
                shapes.callback(part.take_shape(saved["pruner"][0]))  # type: ignore[attr-defined]  # a PrunerPart
            _check(parts, saved, resumes)
        except CheckpointError as error:
            raise CheckpointError(f"{folder / INDEX}: {error}") from error
        except KeepkError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(f"{folder / INDEX}: is not laid out as a checkpoint ({error!r})") from error
        pairs = [(name, *pair) for name in parts for pair in zip(parts[name], saved[name], strict=True)]
        _restore(folder, pairs, shapes, kept)
        shapes.pop_all()
    if resumes:
        set_rng_state(saved["rng"])
    return saved["extra"]


def _parts(given: dict[str, Any]) -> dict[str, list[Part]]:
    """The given objects by argument, in the order in which they are restored."""
    # The pruner zeroes weights and optimizer state when it loads, so what it zeroes comes after it.
    order = ("pruner", "optimizer", "scheduler", "scaler", "generator", "ema", "model")
    return {name: list(_several(name, given[name])) for name in order if given[name] is not None}


def _several(name: str, value: Any) -> Iterable[Part]:
    if name in _MAY_BE_SEVERAL and isinstance(value, list | tuple):
        return [_part(name, f"{name}[{index}]", item) for index, item in enumerate(value)]
    return [_part(name, name, value)]


def _part(kind: str, name: str, value: Any) -> Part:
    needed = ("get_state", "set_state") if kind == "generator" else ("state_dict", "load_state_dict")
    if not all(hasattr(value, method) for method in needed):
        raise CheckpointError(f"{name}: got a {type(value).__name__}, which has no {' and '.join(needed)}")
    if kind == "model" and not isinstance(value, nn.Module):
        raise CheckpointError(f"model: got a {type(value).__name__}. Give a torch.nn.Module.")
    if isinstance(value, nn.Module):
        return ModulePart(name, value)
    if kind == "optimizer" and not isinstance(value, torch.optim.Optimizer):
        raise CheckpointError(f"{name}: got a {type(value).__name__}. Give a torch.optim.Optimizer.")
    part: Part = _PARTS.get(kind, StatefulPart)(name, value)
    return part


def _refuse_other_parts(folder: Path, given: set[str], held: list[str], resumes: bool) -> None:
    if strange := sorted(given - set(held)):
        raise CheckpointError(f"{folder}: holds no {strange[0]}, only {', '.join(held)}. Leave {strange[0]}= out.")
    if resumes and (missing := sorted(set(held) - given)):
        raise CheckpointError(
            f"{folder}: holds a {missing[0]}, without which the run would not go on as it was. "
            f"Pass {', '.join(f'{name}=...' for name in missing)}, or only model= to read it for inference."
        )


def _check(parts: dict[str, list[Part]], saved: dict[str, Any], resumes: bool) -> None:
    for name, several in parts.items():
        if len(several) != len(saved[name]):
            raise CheckpointError(f"{name}: got {len(several)}, but {len(saved[name])} were saved. Give as many.")
        for part, state in zip(several, saved[name], strict=True):
            part.check(state)
    if resumes:
        check_rng_state(saved["rng"])


def _copies(parts: dict[str, list[Part]]) -> list[tuple[Part, Any]]:
    """What all parts hold now, on the host; a pruner knows its own way back."""
    others = [part for name, several in parts.items() for part in several if name != "pruner"]
    return [(part, host_copy(part.capture())) for part in others]


def _restore(folder: Path, pairs: list[tuple[str, Part, Any]], shapes: ExitStack, kept: list[tuple[Part, Any]]) -> None:
    name = ""
    try:
        for name, part, state in pairs:  # noqa: B007 - it is needed afterwards
            part.restore(state)
    except BaseException as error:
        shapes.close()  # first, because what was kept is of the old shapes
        for part, state in kept:
            with suppress(Exception):  # who refused the new state may refuse the old one: the others still get theirs
                part.restore(state)
        # What a model or an EMA of the user's own raises is for the user; torch says nothing of the checkpoint.
        if name in _OF_TORCH and isinstance(error, Exception) and not isinstance(error, KeepkError):
            raise CheckpointError(
                f"{folder / INDEX}: the {name} refused its state ({type(error).__name__}: {error}). Everything has its "
                f"old state. Build the same {name}, or use another checkpoint."
            ) from error
        raise
