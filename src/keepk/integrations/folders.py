"""The folder of a model of transformers, in which a new model takes the place of an old one.

A config, values in one file or several, an index: no single rename replaces them all, and a new config with old values
may load without an error. So the new model is first written as a whole into a hidden folder (`drafts`), and then
exchanged for the old one (`exchange`):

1. ``model.safetensors`` or the index of the old model is moved out of the way. From then on, nothing loads the folder.
   (Without ``config.json``, transformers would load it with the default numbers of the class.)
2. The other files of the old model follow it, into ``.keepk-old-...``.
3. The files of the new model are moved in, ``model.safetensors`` or the index last.

A failure moves everything back. A process that is killed in between leaves a folder that nothing loads, with the files
of the old model in ``.keepk-old-...``, where they stay until a later save succeeds.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from keepk.deploy.folder import INDEX as ARCH
from keepk.deploy.folder import VALUES
from keepk.errors import FileError
from keepk.storage.files import alone, made, own_folder, sync_folder
from keepk.storage.shards import INDEX

CONFIG = "config.json"
ENTRY = (VALUES, INDEX)  # loaders start from one of these: moved out first, moved in last
OLD = ".keepk-old-"
# Shards of transformers, and files left by a keepk.save that was killed.
_VALUES = re.compile(r"model-(\d{5}-of-\d{5}|[0-9a-f]{32}|[0-9a-f]{64})\.safetensors")


@contextmanager
def drafts(target: Path) -> Iterator[Path]:
    """A temporary folder for new models inside `target`, which is created if needed; disk errors become a FileError."""
    try:
        with made(target), own_folder(target / "keepk") as root:  # ".keepk-....tmp" in target
            yield root
    except (OSError, SafetensorError, FileError) as error:
        problem = error.__cause__ if isinstance(error, FileError) else error  # of keepk.save, which names the draft
        if not isinstance(problem, OSError | SafetensorError):
            raise
        raise FileError(
            f"{target}: cannot be written ({problem}). Choose a writable folder with room for the model. Its previous "
            f"contents are unchanged."
        ) from problem


def exchange(draft: Path, folder: Path) -> None:
    """Move the files of a draft into a folder; a model that the folder had is removed."""
    new = sorted((path.name for path in draft.iterdir()), key=lambda name: name in ENTRY)
    with alone(folder):
        old = [name for name in _model_files(folder) | {*new} if os.path.lexists(folder / name)]
        old.sort(key=lambda name: name not in ENTRY)
        for name in old:
            if (folder / name).is_dir() and not (draft / name).is_dir():
                raise IsADirectoryError(f"{name} is a folder")
        kept = folder / f"{OLD}{secrets.token_hex(4)}"
        kept.mkdir()
        _move([(folder / name, kept / name) for name in old] + [(draft / name, folder / name) for name in new], kept)
        for path in folder.glob(f"{OLD}*"):  # also those of processes that were killed
            shutil.rmtree(path, ignore_errors=True)


def _model_files(folder: Path) -> set[str]:
    """The names of files by which a folder is loaded as a model, whether or not they are there."""
    found = {CONFIG, ARCH, VALUES, INDEX}
    try:
        named = set(json.loads((folder / INDEX).read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):  # missing or damaged
        named = set()
    shards = {str(it) for it in named if Path(str(it)).name == it and str(it).endswith(".safetensors")}
    return found | shards | {path.name for path in folder.iterdir() if _VALUES.fullmatch(path.name)}


def _move(moves: list[tuple[Path, Path]], kept: Path) -> None:
    """Rename files, all or none; no move overwrites a file."""
    begun = list[tuple[Path, Path]]()
    try:
        for source, to in moves:
            begun.append((source, to))  # before the move, because an interrupt may arrive just after it
            os.rename(source, to)  # noqa: PTH104 - on some systems Path.rename replaces what is there
        sync_folder(kept.parent)
    except BaseException as problem:
        try:
            for source, to in reversed(begun):
                if os.path.lexists(to) and not os.path.lexists(source):
                    os.rename(to, source)  # noqa: PTH104 - as above
            kept.rmdir()
        except OSError as second:
            raise FileError(
                f"{kept.parent}: saving failed ({problem}), and the model that was there could not be put back "
                f"({second}). Move its files from {kept} into the folder, {VALUES} or {INDEX} last."
            ) from None
        raise
