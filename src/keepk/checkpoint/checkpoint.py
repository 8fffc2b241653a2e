"""Checkpoints of a training run. A run that is killed and resumed ends with the same bits as an uninterrupted one.

Nothing is ever pickled or unpickled. `checkpoint.parts` captures and restores the objects of a run, `storage.codec`
turns their states into JSON and tensors, and `write_folder` writes both to disk.

A checkpoint is a folder that always contains one complete state, the old one or the new one.

::

    checkpoint.json              the contents, with size and sha256 of the tensor file
    tensors-<hex>.safetensors    the tensors

The new tensor file is written beside the old one under a new name. Replacing ``checkpoint.json`` is the commit: from
then on the folder contains the new checkpoint. Processes that write into one folder take turns, and the last checkpoint
written stays. On a file system without locks, no process deletes a file that another one may still be writing.
`keepk.deploy.folder` does the same for saved models, with the same functions of `keepk.storage.files`.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepk.checkpoint.parts import (
    GeneratorPart,
    ModulePart,
    OptimizerPart,
    Part,
    PrunerPart,
    SchedulerPart,
    StatefulPart,
    check_rng_state,
    host_copy,
    rng_state,
    set_rng_state,
)
from keepk.checkpoint.sharded import (
    Parts,
    delete_others,
    new_token,
    part_folder,
    rank_and_world,
    sharded_leaves,
    shards_folder,
    targets_of,
    with_blocks,
    written_digests,
)
from keepk.errors import CheckpointError, KeepkError
from keepk.model.edits import Undo
from keepk.model.sharded import exchange_device, is_sharded, shards_of
from keepk.run.channels import nothing
from keepk.run.distributed import Exchange
from keepk.storage.codec import decode, encode
from keepk.storage.files import (
    Trusted,
    alone,
    deleted_on_failure,
    place,
    replace_index,
    safetensors_bytes,
    sweep,
    sync_folder,
    write_synced,
    writing,
)

INDEX, FORMAT, VERSION = "checkpoint.json", "keepk.checkpoint", 1
SHARDED = 2  # the version of an index that names shards of several processes
_SHARDS = re.compile(r"shards-[0-9a-f]{32}")
_OURS = re.compile(r"tensors-[0-9a-f]{32}\.safetensors|checkpoint-[0-9a-f]{32}\.json\.tmp")


def _digest(document: dict[str, Any]) -> str:
    # Keys are not sorted, because that would change the hash of every checkpoint written so far.
    said = {key: value for key, value in document.items() if key != "sha256"}
    return sha256(json.dumps(said, allow_nan=False).encode("ascii")).hexdigest()


CHECKPOINT = Trusted(
    INDEX,
    "checkpoint",
    FORMAT,
    (VERSION, SHARDED),
    _digest,
    CheckpointError,
    source="Pass a folder that keepk.save_checkpoint wrote.",
    remedy="Use another checkpoint.",
)


def write_folder(folder: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Replace the checkpoint in a folder.

    Bytes are hashed while they are written, and tensors are copied from a GPU one at a time.
    """
    with writing(folder, tensors, CheckpointError) as locked:
        tensor_file, before = _commit(folder, document, tensors)
        _settle(folder, tensor_file, before, locked=locked)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the checkpoint in a folder: its document and its tensors, both verified by their hashes."""
    return CHECKPOINT.whole(folder, lambda document: _tensors(folder, document))


def _tensors(folder: Path, document: dict[str, Any]) -> dict[str, Tensor]:
    named = document.get("tensors")
    if document.get("version") == SHARDED:
        raise CheckpointError(f"{folder / INDEX}: was written by several processes. Use keepk.load_checkpoint.")
    if not isinstance(named, dict) or set(named) != {"file", "size", "sha256"}:
        raise CheckpointError(f"{folder / INDEX}: is not laid out as a checkpoint: it names no tensor file")
    # A forged index must not make keepk read a file outside the folder.
    if not _OURS.fullmatch(str(named["file"])):
        raise CheckpointError(f"{folder / INDEX}: names {named['file']!r}, which is not a checkpoint's tensor file")
    return CHECKPOINT.tensors(folder / named["file"], named)


def _commit(folder: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Path, Path | None]:
    """Write both files up to the commit; returns the new tensor file and the one before."""
    token = secrets.token_hex(16)
    tensor_file, draft = folder / f"tensors-{token}.safetensors", folder / f"checkpoint-{token}.json.tmp"
    with deleted_on_failure([tensor_file, draft], lambda: _named_in_index(folder)):
        size, digest = write_synced(tensor_file, safetensors_bytes(tensors))
        named = {"file": tensor_file.name, "size": size, "sha256": digest}
        document = {**CHECKPOINT.head(VERSION), **document, "tensors": named}
        text = json.dumps({**document, "sha256": _digest(document)}, allow_nan=False)
        before = replace_index(draft, folder / INDEX, text, lambda: _named_in_index(folder))
    return tensor_file, before


def _settle(folder: Path, tensor_file: Path, before: Path | None, *, locked: bool) -> None:
    """After the commit: make it durable and delete leftovers."""
    try:
        sync_folder(folder)
        sweep(folder, _OURS, keep=_named_in_index(folder), locked=locked, done={tensor_file, before})
        if locked:
            delete_others(folder, None)
    except OSError as error:
        if _named_in_index(folder) != tensor_file:  # a later writer has replaced this checkpoint: nothing is lost
            return
        raise CheckpointError(
            f"{folder}: the new checkpoint is there, but may not survive a power cut ({error}). Check the disk."
        ) from error


def _named_in_index(folder: Path) -> Path | None:
    """The tensor file that the index names, whether or not it is whole; None if it names none."""
    named = CHECKPOINT.unverified(folder, "tensors")
    name = str(named["file"]) if isinstance(named, dict) and "file" in named else ""
    return folder / name if _OURS.fullmatch(name) else None


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
    """Write the state of a run into the folder `path`, completely or not at all.

    The states of the random number generators are saved too (Python's, numpy's global one, torch's for CPU and CUDA).
    If the process is killed, the folder contains either the old checkpoint or the new one. Processes that write into
    one folder take turns, and the last checkpoint written stays. In a distributed run, let one process write, or use a
    separate folder for each: their random number generators differ. If tensors are sharded over processes (FSDP2), all
    processes must call this with the same folder, and each of them writes its shards.

    Args:
        path: The folder; it is created if it does not exist.
        model: The model, saved under the names that it has without DDP or torch.compile wrappers.
        pruner: The `Pruner`.
        optimizer: The optimizer, or a list of several.
        scheduler: The learning-rate scheduler, or a list. Functions in its state (a LambdaLR's) are not saved: build it
            with the same ones when you resume.
        scaler: A `torch.amp.GradScaler`.
        ema: An `AveragedModel`, or any object with `state_dict` and `load_state_dict`.
        generator: The `torch.Generator` of a sampler, or a list.
        extra: Any tree of plain values, arrays and tensors, such as ``{"epoch": 3, "batch": 17}``.

    Raises:
        CheckpointError: An argument has no state to save, a state contains something other than plain values and
            tensors, or the folder cannot be written. The contents of the folder are then unchanged.

    Examples:
        >>> import tempfile
        >>> net = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder, model=net, optimizer=sgd, extra={"epoch": 3})
        ...     load_checkpoint(folder, model=net, optimizer=sgd)
        {'epoch': 3}
    """
    given = {"model": model, "pruner": pruner, "optimizer": optimizer, "scheduler": scheduler}
    given |= {"scaler": scaler, "ema": ema, "generator": generator}
    shards, captured = _known_shards(given), dict[str, list[Any]]()
    written = list[tuple[Path, dict[str, Any], dict[str, Tensor]]]()

    def capture() -> None:
        for name, several in _parts(given).items():
            captured[name] = [part.capture() for part in several]

    def prepare() -> None:
        folder = place(path, "save_checkpoint", _ORDER, CheckpointError)
        refuse_failed()
        tree, tensors = encode({**with_blocks(captured), "rng": rng_state(), "extra": extra}, name="")
        written.append((folder, {"torch": str(torch.__version__), "parts": list(captured), "tree": tree}, tensors))

    refuse_failed = _attempted(capture)
    shards += sharded_leaves(captured)
    exchange = _exchange_to_save(path, shards)
    exchange.together("state of a checkpoint", prepare)
    [(folder, document, tensors)] = written
    if shards:
        _write_shards(folder, document, tensors, exchange)
    else:
        write_folder(folder, document, tensors)


def _attempted(act: Callable[[], object]) -> Callable[[], None]:
    """Do something now, and return a function that raises its error, if any, once all processes can learn of it."""
    try:
        act()
    except Exception as error:
        failure = error

        def fail() -> None:
            raise failure

        return fail
    return nothing


def _exchange_to_save(path: object, shards: Sequence[Tensor]) -> Exchange:
    device, left = exchange_device([*shards, torch.empty(0)]), "The folder has its old contents."
    return Exchange(device, f"write {path}", left, call="save_checkpoint", alone=not shards)


def _known_shards(given: Mapping[str, Any]) -> list[Tensor]:
    """The sharded tensors of the given objects, as far as they are known before their states are asked for.

    Capturing a state can fail in one process only. All of them must know before that they have to agree.
    """
    found = list[Tensor]()
    for name, value in given.items():
        for it in value if isinstance(value, list | tuple) else [value]:
            found += shards_of(getattr(it, "model", None) if name == "pruner" else it)
    return found


def _write_shards(folder: Path, document: dict[str, Any], tensors: dict[str, Tensor], exchange: Exchange) -> None:
    """Write the parts of all processes, then the index that names them."""
    rank, world = rank_and_world()
    shards = shards_folder(folder, exchange.total("token of a checkpoint", new_token))
    before = list[Path | None]()

    def write() -> None:
        write_folder(part_folder(shards, rank), document, tensors)

    def commit() -> None:
        # Only process 0 deletes files from here on: another one may be waiting in vain when process 0 commits.
        with _forgotten_unless_named(folder, shards, shards), writing(folder, {}, CheckpointError):
            before.append(_named_in_index(folder))
            named = {"folder": shards.name, "parts": written_digests(shards, INDEX)}
            index = CHECKPOINT.head(SHARDED) | {key: document[key] for key in ("torch", "parts")} | {"shards": named}
            text = json.dumps({**index, "sha256": _digest(index)}, allow_nan=False)
            draft = folder / f"checkpoint-{secrets.token_hex(16)}.json.tmp"
            with deleted_on_failure([draft], lambda: None):
                replace_index(draft, folder / INDEX, text, lambda: None)

    def settle() -> None:
        try:
            sync_folder(folder)
            with alone(folder) as locked:
                sweep(folder, _OURS, keep=_named_in_index(folder), locked=locked, done={*before})
            delete_others(folder, shards)
        except OSError as error:
            raise CheckpointError(
                f"{folder}: the new checkpoint is there, but may not survive a power cut ({error}). Check the disk."
            ) from error

    with _forgotten_unless_named(folder, shards, part_folder(shards, rank)):
        exchange.together(f"parts of {world} processes", write)
    exchange.together("index of a checkpoint", commit if rank == 0 else nothing)
    left = "The new checkpoint is there, but may not survive a power cut."
    after = Exchange(exchange.device, f"make {folder} durable", left, call="save_checkpoint")
    after.together("new checkpoint", settle if rank == 0 else nothing)


@contextmanager
def _forgotten_unless_named(folder: Path, shards: Path, written: Path) -> Iterator[None]:
    """If the block fails, delete what was written, unless the index names these shards by then."""
    try:
        yield
    except BaseException:
        named = CHECKPOINT.unverified(folder, "shards")
        if not isinstance(named, dict) or named.get("folder") != shards.name:
            shutil.rmtree(written, ignore_errors=True)
            with suppress(OSError):
                shards.rmdir()
        raise


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
    wrap: Any = None,
) -> Any:
    """Restore freshly built objects to the states in the folder `path`.

    With only `model` or `ema` (or nothing), this reads the checkpoint for inference: other parts are ignored, and
    random number generators do not change. With any other part, it resumes a run: every part that was saved must be
    passed, and the generators continue from their saved states.

    A checkpoint of a sharded run is read by all processes together. Their number may differ from the number that wrote
    it; the random number generators are then left as they are.

    Everything is read, verified and compared with the objects before the first of them changes. If an object still
    refuses its state, all objects are reset to their old states, from a copy on the host.

    Args:
        path: A folder that `save_checkpoint` wrote.
        model: The model, as its constructor builds it. With `pruner`, it is cut to its saved shapes first.
        pruner: A `Pruner` with the same spaces.
        optimizer: The optimizer or optimizers, of the same classes and over the same parameters.
        scheduler: The scheduler or schedulers, of the same classes and with the same functions.
        scaler: The `GradScaler`.
        ema: The average of the model.
        generator: The generator or generators, on the same devices.
        wrap: The function that shards the model, as for `Pruner.step`, if it is sharded and has lost channels.

    Returns:
        The `extra` that was saved. Tensors in it are on the CPU.

    Raises:
        CheckpointError: The folder has no checkpoint or a damaged one, a part is missing or was not saved, or an object
            does not match its saved state. Every object then has its old state.

    Examples:
        >>> import tempfile
        >>> net, fresh = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(folder, model=net, extra={"accuracy": 0.98})
        ...     load_checkpoint(folder, model=fresh)
        {'accuracy': 0.98}
        >>> torch.equal(net.weight, fresh.weight)
        True
    """
    given = {"model": model, "pruner": pruner, "optimizer": optimizer, "scheduler": scheduler}
    given |= {"scaler": scaler, "ema": ema, "generator": generator}
    shards, parts = _known_shards(given), dict[str, list[Part]]()

    def find() -> None:
        parts.update(_parts(given))
        for name, several in parts.items():
            shards.extend(it for it in targets_of(name, several).values() if is_sharded(it))

    refuse_failed = _attempted(find)
    exchange = _exchange_to_load(path, shards)  # without sharded tensors, a process reads by itself
    places = list[Path]()

    def begin() -> None:
        places.append(place(path, "load_checkpoint", _ORDER, CheckpointError))
        refuse_failed()

    exchange.together("objects to restore", begin)
    [folder] = places
    if not shards and CHECKPOINT.document(folder)["version"] != SHARDED:
        return _load_whole(folder, parts, exchange)
    extra = list[Any]()
    exchange.carried_out("restored", lambda: _load_shards(folder, parts, exchange, wrap, extra))
    return extra[0]


def _exchange_to_load(path: object, shards: Sequence[Tensor]) -> Exchange:
    device, left = exchange_device([*shards, torch.empty(0)]), "Every object has its old state."
    return Exchange(device, f"read {path}", left, call="load_checkpoint", alone=not shards)


def _load_whole(folder: Path, parts: dict[str, list[Part]], exchange: Exchange) -> Any:
    """`load_checkpoint` for a run in which nothing is sharded."""
    document, tensors = read_folder(folder)
    resumes = bool(set(parts) - _FOR_INFERENCE)
    held = document.get("parts")
    if not isinstance(held, list) or not all(isinstance(name, str) for name in held) or "tree" not in document:
        raise CheckpointError(f"{folder / INDEX}: is not laid out as a checkpoint: it lists no parts")
    _refuse_other_parts(folder, set(parts), held, resumes)
    kept = _kept(parts)
    with ExitStack() as undos:
        try:
            saved = decode(document["tree"], tensors)
            # This comes first, because the other checks compare shapes with those of the model.
            for part in parts.get("pruner", ()):
                undos.callback(part.take_shape(saved["pruner"][0], None, exchange))  # type: ignore[attr-defined]  # a PrunerPart
            _check(parts, saved, resumes)
        except CheckpointError as error:
            raise CheckpointError(f"{folder / INDEX}: {error}") from error
        except KeepkError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            raise CheckpointError(f"{folder / INDEX}: is not laid out as a checkpoint ({error!r})") from error
        _restore(folder, parts, saved, kept, undos)
        undos.pop_all()
    if resumes:
        set_rng_state(saved["rng"])
    return saved["extra"]


def _load_shards(folder: Path, parts: dict[str, list[Part]], exchange: Exchange, wrap: Any, extra: list[Any]) -> Undo:
    """`load_checkpoint` for runs whose tensors are sharded, or were sharded when they were saved.

    The `extra` that was saved is added to a list. All processes run this within the exchange.

    Returns:
        A function that gives every object its old state.
    """
    resumes, document = bool(set(parts) - _FOR_INFERENCE), CHECKPOINT.document(folder)
    held = document.get("parts")
    if not isinstance(held, list) or not all(isinstance(name, str) for name in held):
        raise CheckpointError(f"{folder / INDEX}: is not laid out as a checkpoint: it lists no parts")
    _refuse_other_parts(folder, set(parts), held, resumes)
    read = _read_shards(folder, document)
    saved, resumes_random = read.tree, resumes and read.same
    kept = _kept(parts)
    with ExitStack() as undos:
        for name, several in parts.items():  # the pruner is first: others are compared with the shapes that it leaves
            read.place(name, targets_of(name, several))
            for part in several if name == "pruner" else ():
                undos.callback(part.take_shape(saved[name][0], wrap, exchange))  # type: ignore[attr-defined]  # a PrunerPart
        exchange.together("check", lambda: _check(parts, saved, resumes_random))
        _restore(folder, parts, saved, kept, undos)
        if resumes_random:
            undos.callback(set_rng_state, rng_state())
            set_rng_state(saved["rng"])
        extra.append(saved["extra"])
        return undos.pop_all().close


def _read_shards(folder: Path, document: dict[str, Any]) -> Parts:
    """The parts of a checkpoint; one that a single process wrote has one part."""
    if document["version"] != SHARDED:
        return Parts(folder, lambda _: decode(document["tree"], _tensors(folder, document)), 1)
    named = document.get("shards")
    digests = named.get("parts") if isinstance(named, dict) else None
    if not isinstance(named, dict) or not isinstance(digests, list) or not _SHARDS.fullmatch(str(named.get("folder"))):
        raise CheckpointError(f"{folder / INDEX}: is not laid out as a checkpoint: it names no shards")

    def read(rank: int) -> Any:
        place = part_folder(folder / named["folder"], rank)
        found, tensors = read_folder(place)
        if found.get("sha256") != digests[rank]:
            raise CheckpointError(f"{place}: is not the part that {folder / INDEX} names. Use another checkpoint.")
        return decode(found["tree"], tensors)

    return Parts(folder, read, len(digests))


def _parts(given: dict[str, Any]) -> dict[str, list[Part]]:
    """The given objects, by argument, in the order in which they are restored."""
    # The pruner zeroes weights and optimizer state when it loads, so the model and the optimizer are restored later.
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
        raise CheckpointError(f"model: got a {type(value).__name__}. Pass a torch.nn.Module.")
    if isinstance(value, nn.Module):
        return ModulePart(name, value)
    if kind == "optimizer" and not isinstance(value, torch.optim.Optimizer):
        raise CheckpointError(f"{name}: got a {type(value).__name__}. Pass a torch.optim.Optimizer.")
    part: Part = _PARTS.get(kind, StatefulPart)(name, value)
    return part


def _refuse_other_parts(folder: Path, given: set[str], held: list[str], resumes: bool) -> None:
    if strange := sorted(given - set(held)):
        raise CheckpointError(f"{folder}: has no {strange[0]}, only {', '.join(held)}. Omit {strange[0]}=.")
    if resumes and (missing := sorted(set(held) - given)):
        raise CheckpointError(
            f"{folder}: has the run's {missing[0]}, without which the run would not continue as before. "
            f"Pass {', '.join(f'{name}=...' for name in missing)}, or only model= to read it for inference."
        )


def _check(parts: dict[str, list[Part]], saved: dict[str, Any], resumes: bool) -> None:
    for name, several in parts.items():
        if len(several) != len(saved[name]):
            raise CheckpointError(
                f"{name}: got {len(several)}, but {len(saved[name])} were saved. Pass the same number."
            )
        for part, state in zip(several, saved[name], strict=True):
            part.check(state)
    if resumes:
        check_rng_state(saved["rng"])


def _kept(parts: dict[str, list[Part]]) -> list[tuple[Part, Any]]:
    """Copies of the current states on the host, for an undo. The pruner needs none, because it undoes its changes."""
    others = [part for name, several in parts.items() for part in several if name != "pruner"]
    return [(part, host_copy(part.capture())) for part in others]


def _restore(
    folder: Path, parts: dict[str, list[Part]], saved: dict[str, Any], kept: list[tuple[Part, Any]], undos: ExitStack
) -> None:
    """Restore all states. `undos` has the undo of the pruner's cuts, and gets one that then restores the `kept` states.

    The copies have the old shapes, so they are restored after the cuts are undone.
    """

    def put_back() -> None:
        for part, state in kept:
            # The object that refused its new state may also refuse the old one; the others are still restored.
            with suppress(Exception):
                part.restore(state)

    before = undos.pop_all()
    undos.callback(put_back)
    undos.callback(before.close)
    name = ""
    try:
        for name, several in parts.items():
            for part, state in zip(several, saved[name], strict=True):
                part.restore(state)
    except Exception as error:
        # Errors of a user's model or EMA are raised unchanged. Torch's do not mention the checkpoint, so add it.
        if name in _OF_TORCH and not isinstance(error, KeepkError):
            raise CheckpointError(
                f"{folder / INDEX}: the {name} refused its state ({type(error).__name__}: {error}). Every object has "
                f"its old state again. Build the same {name}, or use another checkpoint."
            ) from error
        raise
