"""Reading back what was written: a document and the file that it names, trusted only if every bit is as it was."""

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

Document = dict[str, Any]
Contents = TypeVar("Contents")


@dataclass(frozen=True)
class Trusted:
    """How one kind of document is read.

    Attributes:
        name: The document's file.
        noun: What it describes.
        format: What its entry "format" says.
        version: What its entry "version" says.
        digest: The sha256 of a document, without its entry "sha256".
        error: What is raised.
        source: What the user should give, as a sentence.
        remedy: What the user should do about a damaged one, as a sentence.
    """

    name: str
    noun: str
    format: str
    version: int
    digest: Callable[[Document], str]
    error: type[KeepkError]
    source: str
    remedy: str

    def whole(self, folder: Path, read: Callable[[Document], Contents]) -> tuple[Document, Contents]:
        """The document of a folder, and what is read by it.

        Another process may put a new document and new files into the folder in the meantime. An error counts only if
        the document was the same one twice.
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
        """The document of a folder, if it is of this kind and was not changed."""
        path = folder / self.name
        try:
            document = json.loads(_regular_bytes(path), parse_constant=_refuse_constant)
        except OSError as error:
            wanted = f"there is no {self.noun} to read ({error}). {self.source}{_meant(folder, self.name)}"
            raise self.error(f"{path}: {wanted}") from error
        except (ValueError, RecursionError) as error:
            raise self.error(f"{path}: is no JSON, so it was cut short or edited ({error}). {self.remedy}") from error
        if not isinstance(document, dict) or document.get("format") != self.format:
            raise self.error(f"{path}: is not a {self.format!r}. {self.source}")
        if document.get("version") != self.version:
            raise self.error(
                f"{path}: has version {document.get('version')!r}, this keepk reads version {self.version}. "
                f"Read it with keepk {document.get('keepk')}."
            )
        try:
            digest = self.digest(document)
        except (ValueError, RecursionError) as error:  # 1e999 is JSON, but no number of Python's
            raise self.error(f"{path}: holds what {self.name} never has ({error}). {self.remedy}") from error
        if document.get("sha256") != digest:
            raise self.error(f"{path}: was edited or damaged after it was written: its sha256 differs. {self.remedy}")
        return document

    def tensors(self, path: Path, named: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors in a file whose size and sha256 the document names."""
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
        except Exception as error:  # a forged file leads safetensors and torch to whatever error there is
            raise self.error(f"{path}: is no safetensors file ({error}). {self.remedy}") from error

    def _version(self, folder: Path) -> tuple[int, ...] | None:
        try:
            found = (folder / self.name).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class _OtherSizeError(Exception):
    """A file is longer or shorter than it should be."""


def _regular_bytes(path: Path, size: int | None = None) -> bytes:
    """The bytes of a file; nothing is read from a pipe, which may never end, or from a file of another size."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is not a regular file")
    if size is not None and found.st_size != size:
        raise _OtherSizeError(f"{found.st_size:,}")
    return path.read_bytes()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}")


READ_BY = {
    "checkpoint.json": ("a checkpoint", "keepk.load_checkpoint"),
    "arch.json": ("a model that keepk.save wrote", "keepk.load"),
}


def _meant(given: Path, name: str) -> str:
    """What to do with a folder of the other kind, or with a file of a folder; nothing where that is not known."""
    try:
        folder = given.parent if given.is_file() else given
    except OSError:  # a path that the system refuses
        return ""
    if given.is_file() and (folder / name).is_file():
        return f" {given.name} is a file of one: give {folder}."
    for other, (what, function) in READ_BY.items():
        if other != name and (folder / other).is_file():
            return f" {folder} has {what}: read it with {function}."
    return ""
