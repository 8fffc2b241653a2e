"""Reading back files that keepk wrote: an index (JSON) and the tensor file that it names, verified by their hashes."""

import json
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import safetensors.torch
from torch import Tensor

from keepk.errors import KeepkError
from keepk.version import __version__

Document = dict[str, Any]
Contents = TypeVar("Contents")


@dataclass(frozen=True)
class Trusted:
    """A kind of folder: the name and format of its index, and how errors speak of it.

    Attributes:
        name: The index's file name.
        noun: The kind of thing that the index describes, for errors.
        format: The value of its entry "format".
        version: The value of its entry "version".
        digest: Computes the sha256 of a document, without its entry "sha256".
        error: The class of the errors that are raised.
        source: The sentence that tells users what to pass instead.
        remedy: The sentence that tells users what to do about a damaged file.
    """

    name: str
    noun: str
    format: str
    version: int
    digest: Callable[[Document], str]
    error: type[KeepkError]
    source: str
    remedy: str

    def head(self) -> Document:
        """The entries that every index of this kind begins with."""
        return {"format": self.format, "version": self.version, "keepk": __version__}

    def unverified(self, folder: Path, key: str) -> Any:
        """One entry of the index as it is on disk, without any check; None if it cannot be read.

        Writers use this to see which tensor file the index names at the moment; it may be damaged or in flux.
        """
        try:
            return json.loads((folder / self.name).read_bytes())[key]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def whole(self, folder: Path, read: Callable[[Document], Contents]) -> tuple[Document, Contents]:
        """The index of a folder, and the contents that `read` makes of it, from one and the same write.

        Another process may replace the index and its files meanwhile, so that the file named by the index that was
        read no longer exists. An error is raised only if it occurs twice with the same index.
        """
        failed = None
        while True:
            version = self._version(folder)
            document = self.document(folder)
            try:
                return document, read(document)
            except self.error:
                if failed == version == self._version(folder):
                    raise
                failed = version

    def document(self, folder: Path) -> Document:
        """The index of a folder.

        Raises:
            KeepkError: It is missing, not JSON, of another format or version, or was changed after it was written.
        """
        path = folder / self.name
        try:
            document = json.loads(_regular_bytes(path), parse_constant=_refuse_constant)
        except OSError as error:
            wanted = f"there is no {self.noun} to read ({error}). {self.source}{_meant(folder, self.name)}"
            raise self.error(f"{path}: {wanted}") from error
        except (ValueError, RecursionError) as error:
            raise self.error(
                f"{path}: is not valid JSON: the file is truncated or was edited ({error}). {self.remedy}"
            ) from error
        if not isinstance(document, dict) or document.get("format") != self.format:
            raise self.error(f"{path}: is not a {self.format!r}. {self.source}")
        if document.get("version") != self.version:
            raise self.error(
                f"{path}: has version {document.get('version')!r}, this keepk reads version {self.version}. "
                f"Read it with keepk {document.get('keepk')}."
            )
        try:
            digest = self.digest(document)
        except (ValueError, RecursionError) as error:  # 1e999 is valid JSON, but Python reads it as inf
            raise self.error(f"{path}: holds a value that {self.name} never has ({error}). {self.remedy}") from error
        if document.get("sha256") != digest:
            raise self.error(f"{path}: was edited or damaged after it was written: its sha256 differs. {self.remedy}")
        return document

    def tensors(self, path: Path, named: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors in a file, whose size and sha256 are those that the index names."""
        size, digest = named["size"], named["sha256"]
        if type(size) is not int or size < 0 or not isinstance(digest, str):
            raise self.error(
                f"{path.parent / self.name}: says that {path.name} has size {size!r} and sha256 {digest!r}, which no "
                f"file can have. {self.remedy}"
            )
        try:
            data = _regular_bytes(path, size)
        except OSError as error:
            raise self.error(f"{path}: cannot be read ({error}), but {self.name} names it. {self.remedy}") from error
        except _OtherSizeError as error:
            raise self.error(f"{path}: has {error} bytes, {self.name} says {size:,}. {self.remedy}") from error
        if sha256(data).hexdigest() != digest:
            raise self.error(f"{path}: its sha256 is not the one in {self.name}: it is damaged. {self.remedy}")
        try:
            return safetensors.torch.load(data)
        except Exception as error:  # a forged file can make safetensors and torch raise any error
            raise self.error(f"{path}: is not a safetensors file ({error}). {self.remedy}") from error

    def _version(self, folder: Path) -> tuple[int, ...] | None:
        # Every write replaces the index by a new file, so the inode changes even within the clock's resolution.
        try:
            found = (folder / self.name).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class _OtherSizeError(Exception):
    """A file is longer or shorter than its index says."""


def _regular_bytes(path: Path, size: int | None = None) -> bytes:
    """The bytes of a regular file of the given size; a pipe, which may never end, is not opened."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is not a regular file")
    if size is not None and found.st_size != size:
        raise _OtherSizeError(f"{found.st_size:,}")
    return path.read_bytes()


def _refuse_constant(name: str) -> NoReturn:
    # Python reads NaN and Infinity although JSON has neither; keepk never writes them.
    raise ValueError(f"it holds {name}")


READ_BY = {
    "checkpoint.json": ("a checkpoint", "keepk.load_checkpoint"),
    "arch.json": ("a model that keepk.save wrote", "keepk.load"),
}


def _meant(given: Path, name: str) -> str:
    """A hint for a user who gave a folder of the other kind, or a file inside a folder; empty if neither is so."""
    try:
        folder = given.parent if given.is_file() else given
    except OSError:  # a path that the system refuses
        return ""
    if given.is_file() and (folder / name).is_file():
        return f" {given.name} is a file inside one: give {folder}."
    for other, (what, function) in READ_BY.items():
        if other != name and (folder / other).is_file():
            return f" {folder} has {what}: read it with {function}."
    return ""
