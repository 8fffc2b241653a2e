"""A folder that always holds one whole saved model: the old one or the new one.

::

    arch.json             what the model is, and size and sha256 of the values
    model.safetensors     the values

Two files cannot be replaced at once. So the new values are first put beside the old ones under a name that has their
hash; replacing ``arch.json`` is the moment at which the new model takes the old one's place; then the values get their
own name. After a kill between the last two steps they are read under the first name.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from keepk.deploy.arch_json import ABOUT, FORMAT, VERSION, digest, text_of
from keepk.errors import FileError
from keepk.run.files import made, safetensors_bytes, sync_folder, write_synced
from keepk.version import __version__

INDEX, VALUES = "arch.json", "model.safetensors"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OURS = re.compile(r"model-[0-9a-f]{64}\.safetensors|(model|arch)-[0-9a-f]{32}\.tmp")


def write_folder(folder: Path, document: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Put a model into the folder, in place of the one that is there."""
    try:
        if (folder / VALUES).is_dir():  # found out now and not after the new arch.json is in place
            raise IsADirectoryError(f"{VALUES} is a folder")
        with made(folder):
            values = _commit(folder, document, tensors)
    except OSError as error:
        raise FileError(
            f"{folder}: cannot be written ({error}). Choose a folder that can be, with room for "
            f"{sum(tensor.nbytes for tensor in tensors.values()):,} bytes. What was there is as it was."
        ) from error
    try:
        sync_folder(folder)
        os.replace(values, folder / VALUES)  # noqa: PTH105 - by its well-known name
        sync_folder(folder)
        _sweep(folder)
    except OSError as error:
        raise FileError(
            f"{folder}: the new model is there and keepk.load reads it, but its values are still in {values.name} or "
            f"may not survive a power cut ({error}). Save again, or check the disk."
        ) from error


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model in the folder, verified to the last bit."""
    index = folder / INDEX
    try:
        document = json.loads(index.read_bytes())
    except OSError as error:
        raise FileError(f"{index}: there is no saved model to read ({error}). Give a folder of keepk.save.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{index}: is no JSON, so it was cut short or edited ({error}). Save the model again."
        ) from error
    _refuse_other_document(index, document)
    return document, _read_values(folder, document["values"])


def _commit(folder: Path, document: Mapping[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Up to the commit point; returns where the values are."""
    token = secrets.token_hex(16)
    drafts = [folder / f"model-{token}.tmp", folder / f"arch-{token}.tmp"]
    try:
        size, hashed = write_synced(drafts[0], safetensors_bytes(tensors))
        values = folder / _waiting_name(hashed)
        drafts.append(values)
        os.replace(drafts[0], values)  # noqa: PTH105
        head = {"about": ABOUT, "format": FORMAT, "version": VERSION, "keepk": __version__}
        text = text_of({**head, "values": {"file": VALUES, "size": size, "sha256": hashed}, **document})
        write_synced(drafts[1], iter([text.encode("ascii")]))
        sync_folder(folder)
        os.replace(drafts[1], folder / INDEX)  # noqa: PTH105 - the commit point
    except BaseException:
        # What the index in place relies on must stay: an interrupt may arrive just after the commit.
        for leftover in set(drafts) - {_named_in_index(folder)}:
            leftover.unlink(missing_ok=True)
        raise
    return values


def _waiting_name(hashed: str) -> str:
    return f"model-{hashed}.safetensors"


def _named_in_index(folder: Path) -> Path | None:
    try:
        return folder / _waiting_name(json.loads((folder / INDEX).read_bytes())["values"]["sha256"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _sweep(folder: Path) -> None:
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name):
            with suppress(OSError):  # the new model is whole: a leftover is no failure
                path.unlink()


def _refuse_other_document(index: Path, document: Any) -> None:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise FileError(f"{index}: is not a {FORMAT!r}. Give a folder of keepk.save.")
    if document.get("version") != VERSION:
        raise FileError(
            f"{index}: has version {document.get('version')!r}, this keepk reads version {VERSION}. "
            f"Read it with keepk {document.get('keepk')}."
        )
    if document.get("sha256") != digest(document):
        raise FileError(
            f"{index}: was edited or damaged after it was written: its sha256 differs. Save the model again."
        )
    values = document.get("values")
    if not isinstance(values, dict) or not _SHA256.fullmatch(str(values.get("sha256"))) or "size" not in values:
        raise FileError(f"{index}: is not laid out as keepk.save writes it: it names no values")


def _read_values(folder: Path, named: Mapping[str, Any]) -> dict[str, Tensor]:
    waiting = folder / _waiting_name(named["sha256"])
    path = waiting if waiting.exists() else folder / VALUES
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error}), but {INDEX} names it. Save the model again.") from error
    if len(data) != named["size"]:
        raise FileError(f"{path}: has {len(data):,} bytes, {INDEX} says {named['size']:,}. Save the model again.")
    if sha256(data).hexdigest() != named["sha256"]:
        raise FileError(f"{path}: its sha256 is not the one in {INDEX}: it is damaged or of another save. Save again.")
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError) as error:
        raise FileError(f"{path}: is no safetensors file ({error}). Save the model again.") from error
