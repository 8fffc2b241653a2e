"""Reading back what was written: a document and the file that it names, trusted only if every bit is as it was."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from keepk.errors import KeepkError

Document = dict[str, Any]


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

    def document(self, folder: Path) -> Document:
        """The document of a folder, if it is of this kind and was not changed."""
        path = folder / self.name
        try:
            document = json.loads(path.read_bytes())
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
        if document.get("sha256") != self.digest(document):
            raise self.error(f"{path}: was edited or damaged after it was written: its sha256 differs. {self.remedy}")
        return document

    def contents(self, path: Path, size: int, digest: str) -> bytes:
        """The bytes of a file that the document names."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise self.error(f"{path}: cannot be read ({error}), but {self.name} names it. {self.remedy}") from error
        if len(data) != size:
            raise self.error(f"{path}: has {len(data):,} bytes, {self.name} says {size:,}. {self.remedy}")
        if sha256(data).hexdigest() != digest:
            raise self.error(f"{path}: its sha256 is not the one in {self.name}: it is damaged. {self.remedy}")
        return data


READ_BY = {
    "checkpoint.json": ("a checkpoint", "keepk.load_checkpoint"),
    "arch.json": ("a model that keepk.save wrote", "keepk.load"),
}


def _meant(given: Path, name: str) -> str:
    """What to do with a folder of the other kind, or with a file of a folder; nothing where that is not known."""
    folder = given.parent if given.is_file() else given
    if given.is_file() and (folder / name).is_file():
        return f" {given.name} is a file of one: give {folder}."
    for other, (what, function) in READ_BY.items():
        if other != name and (folder / other).is_file():
            return f" {folder} has {what}: read it with {function}."
    return ""
