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
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from keepk.deploy.arch_json import ABOUT, FORMAT, VERSION, digest, text_of
from keepk.errors import FileError
from keepk.run.files import made, not_written, safetensors_bytes, sweep, sync_folder, write_synced
from keepk.run.trusted import Trusted
from keepk.version import __version__

INDEX, VALUES = "arch.json", "model.safetensors"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OURS = re.compile(r"model-[0-9a-f]{64}\.safetensors|(model|arch)-[0-9a-f]{32}\.tmp")
SAVED_MODEL = Trusted(
    INDEX,
    "saved model",
    FORMAT,
    VERSION,
    digest,
    FileError,
    source="Give a folder of keepk.save.",
    remedy="Save the model again.",
)


def write_folder(folder: Path, document: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Put a model into the folder, in place of the one that is there."""
    try:
        if (folder / VALUES).is_dir():  # found out now and not after the new arch.json is in place
            raise IsADirectoryError(f"{VALUES} is a folder")
        with made(folder):
            values = _commit(folder, document, tensors)
    except OSError as error:
        raise FileError(not_written(folder, tensors, error)) from error
    try:
        sync_folder(folder)
        os.replace(values, folder / VALUES)  # noqa: PTH105 - by its well-known name
        sync_folder(folder)
        sweep(folder, _OURS)
    except OSError as error:
        raise FileError(
            f"{folder}: the new model is there and keepk.load reads it, but its values are still in {values.name} or "
            f"may not survive a power cut ({error}). Save again, or check the disk."
        ) from error


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model in the folder, verified to the last bit."""
    document = SAVED_MODEL.document(folder)
    values = document.get("values")
    if not isinstance(values, dict) or not _SHA256.fullmatch(str(values.get("sha256"))) or "size" not in values:
        raise FileError(f"{folder / INDEX}: is not laid out as keepk.save writes it: it names no values")
    waiting = folder / _waiting_name(values["sha256"])
    path = waiting if waiting.exists() else folder / VALUES
    data = SAVED_MODEL.contents(path, values["size"], values["sha256"])
    try:
        return document, safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError) as error:
        raise FileError(f"{path}: is no safetensors file ({error}). Save the model again.") from error


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
