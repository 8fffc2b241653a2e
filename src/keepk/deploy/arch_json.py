"""``arch.json``: a description as text that people can read, one line an axis, and back.

Runs of indices are written as in Python slices.

>>> as_text([0, 1, 2, 5, 8, 9])
'0:3, 5, 8:10'
>>> from_text("0:3, 5, 8:10", 10)
[0, 1, 2, 5, 8, 9]
"""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keepk.deploy.description import Description, Entry, setting_of
from keepk.errors import FileError
from keepk.graph.edits import Indices, Setting

ABOUT = {
    "file": "A model that keepk.save wrote, with model.safetensors. Read it with keepk.load(folder, YourModel()).",
    "modules": "The class of each module of the dense model, by its path.",
    "tensors": "dense: the shape before anything was removed. kept: for each axis that lost something, the indices of "
    "the dense tensor that stayed; '0:3, 5' is 0, 1, 2, 5. A list has an entry for each row that stayed.",
    "ties": "Names that are one tensor.",
    "attributes": "Values of modules that changed with the sizes.",
    "selections": "BatchNorms that read only these of their input's channels.",
    "headwise": "Attentions that lost heads.",
    "certificate": "By space of the run: how many units there were in the beginning, were asked for, and were kept; of "
    "weights also how many are alive, if dead neurons were swept. cut_since: units of the network that were removed "
    "after that, by hand or as dead neurons; kept does not count what was lost with them.",
}
KINDS = ("weights", "channels")
FORMAT = "keepk.model"
VERSION = 1


def to_document(description: Description) -> dict[str, Any]:
    """A description as what JSON has words for."""
    return {
        "dense_sha256": description.dense_sha256(),
        "modules": description.modules,
        "tensors": {name: _entry(entry) for name, entry in description.tensors.items()},
        "ties": description.ties,
        "attributes": _attributes(description.settings),
        "selections": {path: as_text(channels) for path, channels in description.selections.items()},
        "headwise": list(description.headwise),
        "certificate": description.certificate,
    }


def from_document(document: Mapping[str, Any]) -> Description:
    """The description in a document; refused if it cannot be one."""
    try:
        found = _description(document)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise FileError(f"is not laid out as keepk.save writes it ({error})") from error
    if found.dense_sha256() != document.get("dense_sha256"):
        raise FileError("dense_sha256 is not the hash of the modules, tensors and ties that it lists")
    return found


def text_of(document: Mapping[str, Any]) -> str:
    """The whole file: indented, and with a hash of all of it at the end."""
    return _indented({**document, "sha256": digest(document)}) + "\n"


def digest(document: Mapping[str, Any]) -> str:
    """A hash of what a document says, however it is laid out."""
    said = {key: value for key, value in document.items() if key != "sha256"}
    return sha256(json.dumps(said, sort_keys=True).encode("ascii")).hexdigest()


def as_text(indices: ArrayLike) -> str:
    """Indices with runs written as slices."""
    array = np.asarray(indices, np.int64)
    runs = np.split(array, np.flatnonzero(np.diff(array) != 1) + 1) if len(array) else []
    return ", ".join(f"{run[0]}:{run[-1] + 1}" if len(run) > 1 else str(run[0]) for run in runs)


def from_text(text: str, size: int) -> list[int]:
    """The indices of an axis of that size."""
    indices = list[int]()
    for part in text.split(", "):
        first, _, end = part.partition(":")
        run = range(int(first), int(end or int(first) + 1))
        if not run or run[0] < 0 or run[-1] >= size or (indices and run[0] <= indices[-1]):
            raise ValueError(f"{part!r} is not a rising run of indices of an axis of {size}")
        indices += run
    return indices


def _entry(entry: Entry) -> dict[str, Any]:
    written: dict[str, Any] = {"dtype": entry.dtype, "dense": list(entry.dense)}
    if entry.stride is not None:
        written["stride"] = list(entry.stride)
    if not entry.persistent:
        written["persistent"] = False
    if entry.kept:
        rows = entry.kept.items()
        written["kept"] = {str(dim): as_text(it) if it.ndim == 1 else [as_text(row) for row in it] for dim, it in rows}
    return written


def _attributes(settings: Sequence[Setting]) -> dict[str, Any]:
    written = dict[str, Any]()
    for setting in settings:
        key = setting.attribute if setting.item is None else f"{setting.attribute}.{setting.item}"
        written.setdefault(setting.module, {})[key] = {"dense": setting.old, "now": setting.new}
    return written


def _description(document: Mapping[str, Any]) -> Description:
    tensors = {name: _read_entry(written) for name, written in document["tensors"].items()}
    attributes = document["attributes"].items()
    return Description(
        modules=dict(document["modules"]),
        tensors=tensors,
        ties=dict(document["ties"]),
        settings=tuple(setting_of(path, key, value) for path, values in attributes for key, value in values.items()),
        selections={path: _selection(text) for path, text in document["selections"].items()},
        headwise=tuple(document["headwise"]),
        certificate={name: _certificate(name, entry) for name, entry in document.get("certificate", {}).items()},
    )


def _certificate(name: str, written: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ["total", "asked", "kept", *(key for key in ("alive", "cut_since") if key in written)]
    wrong = [key for key in numbers if type(written[key]) is not int or written[key] < 0]  # a bool is none
    wrong = wrong or [key for key in numbers if key != "cut_since" and written[key] > written["total"]]
    wrong += [] if written["kind"] in KINDS else ["kind"]
    if wrong:
        raise ValueError(f"{wrong[0]} of the certificate of {name!r} is {written[wrong[0]]!r}")
    return dict(written)


def _read_entry(written: Mapping[str, Any]) -> Entry:
    dense, stride = tuple(map(int, written["dense"])), written.get("stride")
    entry = Entry(
        dtype=str(written["dtype"]),
        dense=dense,
        kept={int(dim): _axis(kept, dense[int(dim)]) for dim, kept in written.get("kept", {}).items()},
        stride=None if stride is None else tuple(map(int, stride)),
        persistent=written.get("persistent", True) is True,
    )
    for dim, kept in entry.kept.items():
        if kept.ndim == 2 and (dim != 1 or len(kept) != entry.shape[0]):
            raise ValueError(f"axis {dim} has {len(kept)} rows of indices for {entry.shape[0]} rows")
    return entry


def _axis(written: str | list[str], size: int) -> Indices:
    if isinstance(written, str):
        return np.asarray(from_text(written, size), np.int64)
    return np.asarray([from_text(row, size) for row in written], np.int64)


def _selection(text: str) -> Indices:
    return np.asarray(from_text(text, 2**31), np.int64)


def _indented(value: Any, depth: int = 1) -> str:
    if not isinstance(value, dict) or not value or (isinstance(value.get("dense"), list | int) and "kept" not in value):
        return json.dumps(value)
    lines = (f"{'  ' * depth}{json.dumps(key)}: {_indented(item, depth + 1)}" for key, item in value.items())
    return "{\n" + ",\n".join(lines) + "\n" + "  " * (depth - 1) + "}"
