"""A folder that always holds one whole checkpoint: the old one or the new one.

::

    checkpoint.json              what is in it, and size and sha256 of the tensor file
    tensors-<hex>.safetensors    the tensors

The new tensor file is written beside the old one under a fresh name; replacing ``checkpoint.json`` is the
moment at which the new checkpoint takes the old one's place. One process writes into a folder at a time.
"""

import json
import os
import re
import secrets
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from keepk.errors import CheckpointError
from keepk.run.files import made, safetensors_bytes, sync_folder, write_synced

INDEX = "checkpoint.json"
_OURS = re.compile(r"tensors-[0-9a-f]{32}\.safetensors|checkpoint-[0-9a-f]{32}\.json\.tmp")


def write_folder(folder: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Put a checkpoint into the folder, in place of the one that is there.

    Each byte is hashed while it is written and no tensor is held twice: SHA-256 is the only cost beyond the disk.
    """
    try:
        with made(folder):
            name = _commit(folder, document, tensors)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written ({error}). Choose a folder that can be, with room for "
            f"{sum(tensor.nbytes for tensor in tensors.values()):,} bytes. What was there is as it was."
        ) from error
    try:
        sync_folder(folder)
        _sweep(folder, name)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the new checkpoint is there, but may not survive a power cut ({error}). Check the disk."
        ) from error


def read_folder(folder: Path, expected_format: str, version: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The checkpoint in the folder, verified to the last bit."""
    index = folder / INDEX
    try:
        document = json.loads(index.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{index}: there is no checkpoint to read ({error}). Give a folder that keepk.save_checkpoint wrote."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: is no JSON, so it was cut short or edited ({error})") from error
    _refuse_other_document(index, document, expected_format, version)
    return document, _read_tensors(folder, **document["tensors"])


def _commit(folder: Path, document: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    token = secrets.token_hex(16)
    tensor_file, draft = folder / f"tensors-{token}.safetensors", folder / f"checkpoint-{token}.json.tmp"
    try:
        size, digest = write_synced(tensor_file, safetensors_bytes(tensors))
        document = {**document, "tensors": {"file": tensor_file.name, "size": size, "sha256": digest}}
        text = json.dumps({**document, "sha256": _digest(document)}, allow_nan=False)
        write_synced(draft, iter([text.encode("ascii")]))
        sync_folder(folder)
        os.replace(draft, folder / INDEX)  # noqa: PTH105 - the commit point, by its well-known name
    except BaseException:
        # An interrupt may arrive just after the commit: what the index names must stay.
        for leftover in {draft, tensor_file} - {folder / _named_in_index(folder)}:
            leftover.unlink(missing_ok=True)
        raise
    return tensor_file.name


def _named_in_index(folder: Path) -> str:
    try:
        return str(json.loads((folder / INDEX).read_bytes())["tensors"]["file"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def _sweep(folder: Path, name: str) -> None:
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name != name:
            with suppress(OSError):  # the new checkpoint is whole: a leftover is no failure
                path.unlink()


def _digest(document: dict[str, Any]) -> str:
    return sha256(json.dumps(document, allow_nan=False).encode("ascii")).hexdigest()


def _refuse_other_document(index: Path, document: Any, expected_format: str, version: int) -> None:
    if not isinstance(document, dict) or document.get("format") != expected_format:
        raise CheckpointError(f"{index}: is not a {expected_format!r}. Give the folder that save_checkpoint wrote.")
    if document.get("version") != version:
        raise CheckpointError(
            f"{index}: has version {document.get('version')!r}, this keepk reads version {version}. "
            f"Read it with keepk {document.get('keepk')}."
        )
    without = {key: value for key, value in document.items() if key != "sha256"}
    if document.get("sha256") != _digest(without):
        raise CheckpointError(f"{index}: was edited or damaged after it was written. Use another checkpoint.")
    named = document.get("tensors")
    if not isinstance(named, dict) or set(named) != {"file", "size", "sha256"}:
        raise CheckpointError(f"{index}: is not laid out as a checkpoint: it names no tensor file")
    if not _OURS.fullmatch(str(named["file"])):
        raise CheckpointError(f"{index}: names {named['file']!r}, which is no tensor file of a checkpoint")


def _read_tensors(folder: Path, file: str, size: int, sha256: str) -> dict[str, Tensor]:
    path = folder / file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}), but {INDEX} names it") from error
    if len(data) != size:
        raise CheckpointError(f"{path}: has {len(data)} bytes, {INDEX} says {size}. Use another checkpoint.")
    if _sha256(data) != sha256:
        raise CheckpointError(f"{path}: its sha256 is not the one in {INDEX}: it is damaged. Use another checkpoint.")
    return safetensors.torch.load(data)


def _sha256(data: bytes) -> str:
    return sha256(data).hexdigest()
