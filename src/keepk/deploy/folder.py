"""A folder that always holds one whole saved model: the old one or the new one.

::

    arch.json             what the model is, and size and sha256 of the values
    model.safetensors     the values

Two files cannot be replaced at once. So the new values are first put beside the old ones under a name that has their
hash; replacing ``arch.json`` is the moment at which the new model takes the old one's place; then the values get their
own name. After a kill between the last two steps they are read under the first name.

Processes that save into one folder at the same time take turns; the last one's model stays. On a file system without
locks nobody can take turns, and a second process could put its values under the well-known name between any two steps
of the first. There ``arch.json`` names a file that belongs to this save alone; ``model.safetensors`` is a link to it.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from keepk.deploy.arch_json import ABOUT, FORMAT, VERSION, digest, text_of
from keepk.errors import FileError
from keepk.run.files import alone, made, not_written, safetensors_bytes, sweep, sync_folder, write_synced
from keepk.run.trusted import Trusted
from keepk.version import __version__

INDEX, VALUES = "arch.json", "model.safetensors"
_OWN = re.compile(r"model-[0-9a-f]{32}\.safetensors")
_OURS = re.compile(rf"model-[0-9a-f]{{64}}\.safetensors|{_OWN.pattern}|(model|arch)-[0-9a-f]{{32}}\.tmp")
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
        with made(folder), alone(folder) as locked:
            if (folder / VALUES).is_dir():  # found out now and not after the new arch.json is in place
                raise IsADirectoryError(f"{VALUES} is a folder")
            values, before = _commit(folder, document, tensors, locked=locked)
            _settle(folder, values, before, locked=locked)
    except OSError as error:
        raise FileError(not_written(folder, tensors, error)) from error


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The model in the folder, verified to the last bit."""
    return SAVED_MODEL.whole(folder, lambda document: _values(folder, document))


def _values(folder: Path, document: Mapping[str, Any]) -> dict[str, Tensor]:
    path = _place_of_values(folder, document.get("values"))
    if path is None:
        raise FileError(
            f"{folder / INDEX}: is not laid out as keepk.save writes it: it names no values. {SAVED_MODEL.remedy}"
        )
    if not path.exists():
        path = folder / VALUES
    return SAVED_MODEL.tensors(path, document["values"])


def _commit(
    folder: Path, document: Mapping[str, Any], tensors: dict[str, Tensor], *, locked: bool
) -> tuple[Path, Path | None]:
    """Up to the commit point; returns where the values are, and where those of the model before are."""
    token = secrets.token_hex(16)
    drafts = [folder / f"model-{token}.tmp", folder / f"arch-{token}.tmp"]
    try:
        size, hashed = write_synced(drafts[0], safetensors_bytes(tensors))
        named = {"file": VALUES if locked else f"model-{token}.safetensors", "size": size, "sha256": hashed}
        values = _place_of_values(folder, named)
        assert values is not None  # it is laid out as it should be
        drafts.append(values)
        os.replace(drafts[0], values)  # noqa: PTH105
        head = {"about": ABOUT, "format": FORMAT, "version": VERSION, "keepk": __version__}
        text = text_of({**head, "values": named, **document})
        write_synced(drafts[1], iter([text.encode("ascii")]))
        sync_folder(folder)
        before = _named_in_index(folder)
        os.replace(drafts[1], folder / INDEX)  # noqa: PTH105 - the commit point
    except BaseException:
        # What the index in place relies on must stay: an interrupt may arrive just after the commit.
        for leftover in set(drafts) - {_named_in_index(folder)}:
            leftover.unlink(missing_ok=True)
        raise
    return values, before


def _settle(folder: Path, values: Path, before: Path | None, *, locked: bool) -> None:
    """After the commit: the values get their well-known name, and leftovers are deleted."""
    try:
        sync_folder(folder)
        if not locked:
            _link(folder)
        elif _named_in_index(folder) == values:  # always, unless the locks of this file system do not lock
            os.replace(values, folder / VALUES)  # noqa: PTH105
        sync_folder(folder)
        sweep(folder, _OURS, keep=_named_in_index(folder), locked=locked, done={values, before})
    except OSError as error:
        if _named_in_index(folder) != values:  # another process has replaced it, as if it had come later
            sweep(folder, _OURS, keep=_named_in_index(folder), locked=False, done={values, before})
            return
        raise FileError(
            f"{folder}: the new model is there and keepk.load reads it, but its values are still in {values.name} or "
            f"may not survive a power cut ({error}). Save again, or check the disk."
        ) from error


def _link(folder: Path) -> None:
    """Let the values that the index names have their well-known name as well, whoever wrote them."""
    draft = folder / f"model-{secrets.token_hex(16)}.tmp"
    while values := _named_in_index(folder):
        try:
            try:
                os.link(values, draft)
            except OSError:  # not every file system has links
                shutil.copyfile(values, draft)
            os.replace(draft, folder / VALUES)  # noqa: PTH105
        finally:
            draft.unlink(missing_ok=True)  # a rename onto another name of the same file does nothing
        if _named_in_index(folder) == values:
            return


def _place_of_values(folder: Path, named: Any) -> Path | None:
    """Where the values are until they get their well-known name; None if that is not what a save writes."""
    if not isinstance(named, dict) or not {"size", "sha256"} <= set(named):
        return None
    if isinstance(own := named.get("file"), str) and _OWN.fullmatch(own):
        return folder / own
    waiting = f"model-{named['sha256']}.safetensors"
    return folder / waiting if _OURS.fullmatch(waiting) and not _OWN.fullmatch(waiting) else None


def _named_in_index(folder: Path) -> Path | None:
    try:
        return _place_of_values(folder, json.loads((folder / INDEX).read_bytes())["values"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
