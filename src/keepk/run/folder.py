"""A folder that always holds one whole checkpoint: the old one or the new one.

::

    checkpoint.json              the contents, with size and sha256 of the tensor file
    tensors-<hex>.safetensors    the tensors

The new tensor file is written beside the old one under a fresh name. Replacing ``checkpoint.json`` is the commit: from
then on the folder holds the new checkpoint. Processes that write into one folder take turns, and the last checkpoint
written stays; on a file system without locks, no process deletes a file that another one may still be writing.
`keepk.deploy.folder` does the same for saved models, on the same functions of `files` and `trusted`.
"""

import json
import re
import secrets
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from keepk.errors import CheckpointError
from keepk.run.files import (
    deleted_on_failure,
    replace_index,
    safetensors_bytes,
    sweep,
    sync_folder,
    write_synced,
    writing,
)
from keepk.run.trusted import Trusted

INDEX, FORMAT, VERSION = "checkpoint.json", "keepk.checkpoint", 1
_OURS = re.compile(r"tensors-[0-9a-f]{32}\.safetensors|checkpoint-[0-9a-f]{32}\.json\.tmp")


def _digest(document: dict[str, Any]) -> str:
    # In the order of the document: sorted keys would change the hash of every checkpoint written so far.
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
    """Replace the checkpoint in a folder.

    Each byte is hashed while it is written and no tensor is in memory twice: SHA-256 is the only cost beyond the disk.
    """
    with writing(folder, tensors, CheckpointError) as locked:
        tensor_file, before = _commit(folder, document, tensors)
        _settle(folder, tensor_file, before, locked=locked)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the checkpoint in a folder: its document and its tensors, both verified by their hashes."""
    return CHECKPOINT.whole(folder, lambda document: _tensors(folder, document))


def _tensors(folder: Path, document: dict[str, Any]) -> dict[str, Tensor]:
    named = document.get("tensors")
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
        document = {**CHECKPOINT.head(), **document, "tensors": named}
        text = json.dumps({**document, "sha256": _digest(document)}, allow_nan=False)
        before = replace_index(draft, folder / INDEX, text, lambda: _named_in_index(folder))
    return tensor_file, before


def _settle(folder: Path, tensor_file: Path, before: Path | None, *, locked: bool) -> None:
    """After the commit: make it durable and delete leftovers."""
    try:
        sync_folder(folder)
        sweep(folder, _OURS, keep=_named_in_index(folder), locked=locked, done={tensor_file, before})
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
