"""A folder that always holds one whole checkpoint: the old one or the new one.

::

    checkpoint.json              what is in it, and size and sha256 of the tensor file
    tensors-<hex>.safetensors    the tensors

The new tensor file is written beside the old one under a fresh name; replacing ``checkpoint.json`` is the
moment at which the new checkpoint takes the old one's place. Processes that write into one folder take turns, and the
last one's checkpoint stays; where the file system has no locks, none deletes what another is still writing.
"""

import json
import os
import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from keepk.errors import CheckpointError
from keepk.run.files import alone, made, not_written, safetensors_bytes, sweep, sync_folder, write_synced
from keepk.run.trusted import Trusted
from keepk.version import __version__

INDEX, FORMAT, VERSION = "checkpoint.json", "keepk.checkpoint", 1
_OURS = re.compile(r"tensors-[0-9a-f]{32}\.safetensors|checkpoint-[0-9a-f]{32}\.json\.tmp")


def _digest(document: dict[str, Any]) -> str:
    said = {key: value for key, value in document.items() if key != "sha256"}
    return sha256(json.dumps(said, allow_nan=False).encode("ascii")).hexdigest()


CHECKPOINT = Trusted(
    INDEX,
    "checkpoint",
    FORMAT,
    VERSION,
    _digest,
    CheckpointError,
    source="Give a folder that keepk.save_checkpoint wrote.",
    remedy="Use another checkpoint.",
)


def write_folder(folder: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Put a checkpoint into the folder, in place of the one that is there.

    Each byte is hashed while it is written and no tensor is held twice: SHA-256 is the only cost beyond the disk.
    """
    try:
        with made(folder), alone(folder) as locked:
            tensor_file, before = _commit(folder, document, tensors)
            _settle(folder, tensor_file, before, locked=locked)
    except OSError as error:
        raise CheckpointError(not_written(folder, tensors, error)) from error


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The checkpoint in the folder, verified to the last bit."""
    return CHECKPOINT.whole(folder, lambda document: _tensors(folder, document))


def _tensors(folder: Path, document: dict[str, Any]) -> dict[str, Tensor]:
    named = document.get("tensors")
    if not isinstance(named, dict) or set(named) != {"file", "size", "sha256"}:
        raise CheckpointError(f"{folder / INDEX}: is not laid out as a checkpoint: it names no tensor file")
    if not _OURS.fullmatch(str(named["file"])):
        raise CheckpointError(f"{folder / INDEX}: names {named['file']!r}, which is no tensor file of a checkpoint")
    return CHECKPOINT.tensors(folder / named["file"], named)


def _settle(folder: Path, tensor_file: Path, before: Path | None, *, locked: bool) -> None:
    try:
        sync_folder(folder)
        sweep(folder, _OURS, keep=_named_in_index(folder), locked=locked, done={tensor_file, before})
    except OSError as error:
        if _named_in_index(folder) != tensor_file:  # another process has replaced it, as if it had come later
            return
        raise CheckpointError(
            f"{folder}: the new checkpoint is there, but may not survive a power cut ({error}). Check the disk."
        ) from error


def _commit(folder: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Path, Path | None]:
    token = secrets.token_hex(16)
    tensor_file, draft = folder / f"tensors-{token}.safetensors", folder / f"checkpoint-{token}.json.tmp"
    try:
        size, digest = write_synced(tensor_file, safetensors_bytes(tensors))
        head = {"format": FORMAT, "version": VERSION, "keepk": __version__}
        document = {**head, **document, "tensors": {"file": tensor_file.name, "size": size, "sha256": digest}}
        text = json.dumps({**document, "sha256": _digest(document)}, allow_nan=False)
        write_synced(draft, iter([text.encode("ascii")]))
        sync_folder(folder)
        before = _named_in_index(folder)
        os.replace(draft, folder / INDEX)  # noqa: PTH105 - the commit point, by its well-known name
    except BaseException:
        # An interrupt may arrive just after the commit: what the index names must stay.
        for leftover in {draft, tensor_file} - {_named_in_index(folder)}:
            leftover.unlink(missing_ok=True)
        raise
    return tensor_file, before


def _named_in_index(folder: Path) -> Path | None:
    try:
        name = str(json.loads((folder / INDEX).read_bytes())["tensors"]["file"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return folder / name if _OURS.fullmatch(name) else None
