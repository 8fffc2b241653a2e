"""A folder that always contains one complete saved model: the old one or the new one.

::

    arch.json             the architecture and what was cut, with size and sha256 of the values
    model.safetensors     the values

Two files cannot be replaced atomically. So the new values are first written beside the old ones, under a name that
contains their hash. Replacing ``arch.json`` is the commit: from then on the folder contains the new model. Only then
are the values renamed to ``model.safetensors``. If the process is killed in between, `read_folder` finds them under the
first name.

Processes that save into one folder take turns, and the last model written stays. Without file locks they cannot, and a
second process could rename its values to ``model.safetensors`` between any two steps of the first. On such a file
system, ``arch.json`` names a file that belongs to one save only, and ``model.safetensors`` is a link to that file.
`keepk.checkpoint.checkpoint` does the same for checkpoints, with the same functions of `keepk.storage.files`.
"""

import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from keepk.deploy.arch_json import FORMAT, VERSIONS, about, digest, text_of, version_of
from keepk.errors import FileError
from keepk.storage.files import (
    Trusted,
    deleted_on_failure,
    replace_index,
    safetensors_bytes,
    sweep,
    sync_folder,
    write_synced,
    writing,
)

INDEX, VALUES = "arch.json", "model.safetensors"
# With 32 hex digits: a file of one save, named by a random token. With 64: values named by their sha256.
_OWN = re.compile(r"model-[0-9a-f]{32}\.safetensors")
_OURS = re.compile(rf"model-[0-9a-f]{{64}}\.safetensors|{_OWN.pattern}|(model|arch)-[0-9a-f]{{32}}\.tmp")
SAVED_MODEL = Trusted(
    INDEX,
    "saved model",
    FORMAT,
    VERSIONS,
    digest,
    FileError,
    source="Pass a folder that keepk.save wrote.",
    remedy="Save the model again.",
)


def write_folder(folder: Path, document: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Replace the model in a folder."""
    with writing(folder, tensors, FileError) as locked:
        if (folder / VALUES).is_dir():  # checked here, because after the commit it is too late to refuse
            raise IsADirectoryError(f"{VALUES} is a folder")
        values, before = _commit(folder, document, tensors, locked=locked)
        _settle(folder, values, before, locked=locked)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the model in a folder: its document and its values, both verified by their hashes."""
    return SAVED_MODEL.whole(folder, lambda document: _values(folder, document))


def _values(folder: Path, document: Mapping[str, Any]) -> dict[str, Tensor]:
    path = _place_of_values(folder, document.get("values"))
    if path is None:
        raise FileError(
            f"{folder / INDEX}: is not laid out as keepk.save writes it: it names no values. {SAVED_MODEL.remedy}"
        )
    if not path.exists():  # the usual case: the save was completed, and the values have their final name
        path = folder / VALUES
    return SAVED_MODEL.tensors(path, document["values"])


def _commit(
    folder: Path, document: Mapping[str, Any], tensors: dict[str, Tensor], *, locked: bool
) -> tuple[Path, Path | None]:
    """Write both files up to the commit; returns where the values are, and where the previous model's are."""
    token = secrets.token_hex(16)
    drafts = [folder / f"model-{token}.tmp", folder / f"arch-{token}.tmp"]
    with deleted_on_failure(drafts, lambda: _named_in_index(folder)):
        size, hashed = write_synced(drafts[0], safetensors_bytes(tensors))
        named = {"file": VALUES if locked else f"model-{token}.safetensors", "size": size, "sha256": hashed}
        values = _place_of_values(folder, named)
        assert values is not None  # `named` has the right layout
        drafts.append(values)
        os.replace(drafts[0], values)  # noqa: PTH105 - also if the file exists, on every system
        before = replace_index(drafts[1], folder / INDEX, index_text(named, document), lambda: _named_in_index(folder))
    return values, before


def index_text(named: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    """The text of ``arch.json``.

    Args:
        named: The values: the name of their ``file``, its ``size`` and ``sha256``.
        document: The description of the model.
    """
    version = version_of(document)
    return text_of({"about": about(version), **SAVED_MODEL.head(version), "values": named, **document})


def _settle(folder: Path, values: Path, before: Path | None, *, locked: bool) -> None:
    """After the commit: rename the values to their final name, and delete leftovers."""
    try:
        sync_folder(folder)
        if not locked:
            _link(folder)
        elif _named_in_index(folder) == values:  # always true, unless locks do not work on this file system
            os.replace(values, folder / VALUES)  # noqa: PTH105 - also if the file exists, on every system
        sync_folder(folder)
        sweep(folder, _OURS, keep=_named_in_index(folder), locked=locked, done={values, before})
    except OSError as error:
        if _named_in_index(folder) != values:  # a later writer has replaced this model: nothing is lost
            sweep(folder, _OURS, keep=_named_in_index(folder), locked=False, done={values, before})
            return
        raise FileError(
            f"{folder}: the new model is there and keepk.load reads it, but its values are still in {values.name} or "
            f"may not survive a power cut ({error}). Save again, or check the disk."
        ) from error


def _link(folder: Path) -> None:
    """Link ``model.safetensors`` to the values that the index names, whichever process wrote them."""
    draft = folder / f"model-{secrets.token_hex(16)}.tmp"
    while values := _named_in_index(folder):
        try:
            try:
                os.link(values, draft)
            except OSError:  # not every file system has links
                shutil.copyfile(values, draft)
            os.replace(draft, folder / VALUES)  # noqa: PTH105 - also if the file exists, on every system
        finally:
            # os.replace does nothing if both names are links to one file, and the draft is then still there.
            draft.unlink(missing_ok=True)
        # Without locks another process may have committed meanwhile; then its values need the link.
        if _named_in_index(folder) == values:
            return


def _place_of_values(folder: Path, named: Any) -> Path | None:
    """Where the values are until they get their final name; None if `named` is not what a save writes."""
    if not isinstance(named, dict) or not {"size", "sha256"} <= set(named):
        return None
    if isinstance(own := named.get("file"), str) and _OWN.fullmatch(own):
        return folder / own
    # The hash comes from the file: only a name that matches the pattern cannot point outside the folder.
    waiting = f"model-{named['sha256']}.safetensors"
    return folder / waiting if _OURS.fullmatch(waiting) and not _OWN.fullmatch(waiting) else None


def _named_in_index(folder: Path) -> Path | None:
    """Where the values that the index names are until they get their final name; None if it names none."""
    return _place_of_values(folder, SAVED_MODEL.unverified(folder, "values"))
