"""Checkpoints in shards of safetensors, read and written one tensor at a time.

Hugging Face's folders have either one file ``model.safetensors``, or several shards and an index that says which shard
has which tensor::

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json        {"metadata": {...}, "weight_map": {"lm_head.weight": "model-00002-...", ...}}

A safetensors file is the length of a header (8 bytes), the header (JSON: by tensor its dtype, shape and place), and the
bytes of the tensors one after the other. `Shards` checks all headers before anything is read, and reads tensors into
memory of their own instead of mapping the file, so that the memory in use does not depend on the size of the file.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepk.errors import FileError
from keepk.storage.codec import DTYPE_CODES
from keepk.storage.files import write_synced

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE = 1 << 24  # bytes that are copied at a time
LARGEST_HEADER = 100_000_000  # bytes, as in the reader of safetensors
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_REMEDY = "Download the checkpoint again."


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file.

    Attributes:
        name: Its name.
        file: The name of its file.
        dtype: Its dtype.
        shape: Its shape.
        start: The position of its first byte in the file.
    """

    name: str
    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return prod(self.shape) * self.dtype.itemsize


class Shards:
    """The tensors of a folder. `open_shards` makes it and closes its files.

    Attributes:
        tensors: By name, the tensors, in the order of the files and of their places in them.
        metadata: By file, the metadata of its header.
        index: The index; None for a single file.
        bytes_read: The bytes of tensors that were read so far.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._files = dict[str, tuple[FileIO, tuple[int, int]]]()
        self.tensors = dict[str, StoredTensor]()
        self.metadata = dict[str, dict[str, str]]()
        self.index: dict[str, Any] | None = None
        self.bytes_read = 0
        single, index = folder / ONE_FILE, folder / INDEX
        if single.is_file() and index.is_file():
            raise FileError(
                f"{folder}: has both {ONE_FILE} and {INDEX}, and only one of the two can be the model. Delete the one "
                f"that is out of date."
            )
        if single.is_file():
            self._add(ONE_FILE)
        elif index.is_file():
            self._add_indexed(index)
        else:
            raise FileError(f"{folder}: has neither {ONE_FILE} nor {INDEX}. {_instead(folder)}")

    def read(self, name: str) -> Tensor:
        """The values of a tensor, in memory of their own."""
        stored = self.tensors[name]
        values = torch.empty(stored.nbytes, dtype=torch.uint8)
        self._fill(stored, 0, values.numpy().data)
        return values.view(stored.dtype).reshape(stored.shape)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The bytes of a tensor, a few at a time; each piece is valid until the next one is asked for."""
        stored = self.tensors[name]
        buffer = memoryview(bytearray(min(PIECE, stored.nbytes)))
        for start in range(0, stored.nbytes, PIECE):
            piece = buffer[: min(PIECE, stored.nbytes - start)]
            self._fill(stored, start, piece)
            yield piece

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same dtype, shape and bytes."""
        first, second = self.tensors[one], self.tensors[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        return all(a == b for a, b in zip(self.pieces(one), self.pieces(other), strict=True))

    def refuse_changed(self) -> None:
        """Refuse files that another program has changed since they were opened."""
        for name, (file, seen) in self._files.items():
            if _version(file) != seen:
                raise FileError(f"{self._folder / name}: changed while it was read. Nothing was written.")

    def _fill(self, stored: StoredTensor, start: int, buffer: memoryview) -> None:
        file, _ = self._files[stored.file]
        file.seek(stored.start + start)
        done = 0
        while done < len(buffer):
            count = file.readinto(buffer[done:])
            if not count:
                raise FileError(f"{self._folder / stored.file}: ends before tensor {stored.name!r} does. {_REMEDY}")
            done += count
        self.bytes_read += done

    def _add_indexed(self, path: Path) -> None:
        try:
            self.index = json.loads(path.read_bytes())
            places = dict(self.index["weight_map"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise FileError(
                f"{path}: is not an index of shards ({type(error).__name__}: {error}). {_REMEDY}"
            ) from error
        for file in dict.fromkeys(places.values()):
            if not isinstance(file, str) or Path(file).name != file:
                raise FileError(f"{path}: names the shard {file!r}, which is not a file in this folder. {_REMEDY}")
            if not (self._folder / file).is_file():
                raise FileError(f"{path}: names the shard {file}, which is missing. {_REMEDY}")
            self._add(file)
        found = {name: it.file for name, it in self.tensors.items()}
        for name in {**places, **found}:
            if places.get(name) != found.get(name):
                said = f"in {places[name]}" if name in places else "nowhere"
                raise FileError(
                    f"{path}: disagrees with its shards: it says that tensor {name!r} is {said}, and it is "
                    f"{f'in {found[name]}' if name in found else 'in none of them'}. {_REMEDY}"
                )

    def _add(self, name: str) -> None:
        path = self._folder / name
        # Unbuffered: tensors are read into their own memory, without a copy in between.
        file = self._stack.enter_context(path.open("rb", buffering=0))
        self._files[name] = (file, _version(file))
        try:
            self.metadata[name], tensors = _header(file, name)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FileError(f"{path}: is not a valid safetensors file ({error}). {_REMEDY}") from error
        for it in tensors:
            if it.name in self.tensors:
                raise FileError(f"{path}: tensor {it.name!r} is in {self.tensors[it.name].file} too. {_REMEDY}")
            self.tensors[it.name] = it


@contextmanager
def open_shards(folder: Path) -> Iterator[Shards]:
    """The tensors of a folder.

    Raises:
        FileError: The folder has no safetensors, shards are missing or damaged, or the index disagrees with them.
    """
    with ExitStack() as stack:
        yield Shards(folder, stack)


def _version(file: FileIO) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


def _header(file: FileIO, name: str) -> tuple[dict[str, str], list[StoredTensor]]:
    """The metadata and the tensors of a file, in the order of their places.

    Raises:
        ValueError: The header breaks a rule of the format.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LARGEST_HEADER):
        raise ValueError("its header is longer than the file")
    header = json.loads(file.read(length))
    metadata, found, end = header.pop("__metadata__", {}), list[StoredTensor](), 0
    for tensor, entry in sorted(header.items(), key=lambda it: tuple(it[1]["data_offsets"])):
        code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if code not in _DTYPES:
            raise ValueError(
                f"tensor {tensor!r} has the dtype {code}, which only quantised checkpoints have: prune the checkpoint "
                f"that was quantised, then quantise the result"
            )
        if not all(type(it) is int and it >= 0 for it in (*shape, *offsets)) or len(offsets) != 2:
            raise ValueError(f"tensor {tensor!r} has an impossible shape or place")
        stored = StoredTensor(tensor, name, _DTYPES[code], tuple(shape), 8 + length + offsets[0])
        if offsets[0] != end or offsets[1] - offsets[0] != stored.nbytes:
            raise ValueError(f"tensor {tensor!r} does not begin where the one before ends, or has another size")
        end = offsets[1]
        found.append(stored)
    if 8 + length + end != size:
        raise ValueError(f"it has {size:,} bytes, its header says {8 + length + end:,}")
    return metadata, found


def _instead(folder: Path) -> str:
    """The remedy for a folder without safetensors."""
    pickles = sorted(path.name for path in folder.glob("*") if path.name.startswith("pytorch_model"))
    if pickles:
        return (
            f"{pickles[0]} is a pickle, which may run code when it is read and cannot be read tensor by tensor. Load "
            f"the model with transformers and save it with save_pretrained, which writes safetensors."
        )
    if (folder / "adapter_config.json").is_file():
        return "It has adapters of peft: merge them into the model with merge_and_unload(), and save that."
    return "Pass a folder that save_pretrained wrote, or one downloaded from a hub."


def write_shard(
    path: Path, tensors: Mapping[StoredTensor, Iterator[Any]], metadata: Mapping[str, str]
) -> tuple[int, str]:
    """Write a safetensors file whose tensors are made one after the other, and sync it to disk.

    Args:
        path: The file, which does not exist yet.
        tensors: The tensors in their order, each with an iterator over its bytes, which runs when it is its turn.
        metadata: The metadata of the header.

    Returns:
        The size of the file and its sha256.
    """
    header, end = dict[str, Any](__metadata__=dict(metadata)) if metadata else {}, 0
    for it in tensors:
        begin, end = end, end + it.nbytes
        header[it.name] = {"dtype": DTYPE_CODES[it.dtype], "shape": list(it.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)  # the format pads its header, so that the data begins aligned

    def chunks() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for it, pieces in tensors.items():
            written = 0
            for piece in pieces:
                written += len(piece)
                yield piece
            assert written == it.nbytes, it.name  # otherwise all tensors behind it would be read from wrong places

    return write_synced(path, chunks())
