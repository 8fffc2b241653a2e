"""Files that are there whole or not at all: written, synced, hashed on the way."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepk.run.packing import DTYPE_CODES


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """The folder is there, with its parents; what was made for it goes again if the work in it fails."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)
    try:
        yield
    except BaseException:
        for empty in missing:
            with suppress(OSError):
                empty.rmdir()
        raise


def write_synced(path: Path, chunks: Iterator[Any]) -> tuple[int, str]:
    """Write a new file; its size and sha256."""
    digest = sha256()
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def safetensors_bytes(tensors: dict[str, Tensor]) -> Iterator[Any]:
    """A safetensors file, tensor by tensor: only one at a time is on the host if they live on a GPU."""
    header, end = {}, 0
    # Wide dtypes first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.cpu().reshape(-1).view(torch.uint8).numpy().data


def sync_folder(folder: Path) -> None:
    """Make sure that a folder's names survive a power cut."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path, ours: re.Pattern[str], but: str = "") -> None:
    """Delete what earlier writes left behind, by their names; what is there whole does not depend on it."""
    for path in folder.iterdir():
        if ours.fullmatch(path.name) and path.name != but:
            with suppress(OSError):
                path.unlink()


def not_written(folder: Path, tensors: Mapping[str, Tensor], error: OSError) -> str:
    """What to tell a user whose folder could not be written."""
    return (
        f"{folder}: cannot be written ({error}). Choose a folder that can be, with room for "
        f"{sum(tensor.nbytes for tensor in tensors.values()):,} bytes. What was there is as it was."
    )
