"""``arch.json``: reading and writing the description of a model as readable JSON, with one line per axis.

Runs of indices are written like Python slices. The reader does not trust the file: an edited file can have a correct
hash, so every entry is checked for its type and range before it is used.

>>> as_text([0, 1, 2, 5, 8, 9])
'0:3, 5, 8:10'
>>> from_text("0:3, 5, 8:10", 10)
[0, 1, 2, 5, 8, 9]
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from keepk.cut.record import Places, packed
from keepk.deploy.arch import Description, Entry, setting_of
from keepk.errors import FileError
from keepk.model.edits import Indices, Setting
from keepk.plan.budgets import COSTS
from keepk.storage.sparse import PARTS

ABOUT = {
    "file": "A model that keepk.save wrote, with model.safetensors. Read it with keepk.load(YourModel(), folder).",
    "modules": "The class of each module of the dense model, by its path.",
    "tensors": "dense: the shape before anything was removed. kept: for each axis that lost something, the indices of "
    "the dense tensor that stayed; '0:3, 5' is 0, 1, 2, 5. A list has an entry for each row that stayed.",
    "ties": "Further names of a tensor, each with its first name.",
    "attributes": "Values of modules that changed with the sizes.",
    "selections": "BatchNorms that read only these channels of their input.",
    "headwise": "Attentions that lost heads.",
    "certificate": "By space of the run: how many units there were at the start (total), were asked for, and were "
    "kept; for weights also how many are alive (not zero), if dead neurons were removed. cut_since: units of the "
    "network that were removed after the run, by hand or as dead neurons; kept does not count what was lost with them. "
    "masked: how many of the pruned channels were set to zero but not removed. fixed: how many channels of the same "
    "layers could not be removed; no other count includes them.",
    "masked": "By space, tensor and axis: for each masked channel its indices in the saved tensor. '0,1' counts the "
    "entries of the first two axes row by row.",
}
ABOUT_COMPACT = {
    "stored": "How model.safetensors holds a tensor NAME with many zeros: 'gaps' as NAME.values and NAME.gaps, "
    "'bitmask' as NAME.values and NAME.bitmask, in row-major order. A gap is the number of zeros before a value; the "
    "largest number of its dtype has no value and is continued by the next gap. A bitmask has one bit for each entry, "
    "lowest bit first. values: the dtype to which the values were rounded, if that is not the tensor's.",
}
KINDS = ("weights", "channels")
FORMAT = "keepk.model"
PLAIN, COMPACT = 1, 2
VERSIONS = (PLAIN, COMPACT)
"""Files whose tensors are all ordinary ones have version 1, so that every keepk reads them."""
LARGEST = 2**63 - 1  # torch's sizes are 64-bit ints


def version_of(document: Mapping[str, Any]) -> int:
    """The lowest version of the format that has all entries of a document of `to_document`."""
    return COMPACT if any("stored" in entry for entry in document["tensors"].values()) else PLAIN


def about(version: int) -> dict[str, str]:
    """The explanations for readers at the beginning of the file."""
    return ABOUT if version == PLAIN else ABOUT | ABOUT_COMPACT


def to_document(description: Description) -> dict[str, Any]:
    """A description as a JSON document, without its head and hash."""
    document: dict[str, Any] = {
        "dense_sha256": description.dense_sha256(),
        "modules": description.modules,
        "tensors": {name: _entry(entry) for name, entry in description.tensors.items()},
        "ties": description.ties,
        "attributes": _attributes(description.settings),
        "selections": {path: as_text(channels) for path, channels in description.selections.items()},
        "headwise": list(description.headwise),
        "certificate": description.certificate,
    }
    if description.masked:
        document["masked"] = {space: _masked(places) for space, places in description.masked.items()}
    return document


def dense_from(document: Mapping[str, Any]) -> Description:
    """The dense model that a document describes. An axis that was cut gets an empty list of indices.

    Indices are read later, by `from_document`: a range such as ``0:2147483648`` takes memory, so the axes are first
    compared with those of the user's model.

    Raises:
        FileError: The document does not describe a dense model, or not the one whose hash it has.
    """
    with _laid_out():
        found = Description(
            modules=_texts(document["modules"]),
            tensors={name: _dense_entry(it, document["version"]) for name, it in document["tensors"].items()},
            ties=_texts(document["ties"]),
            settings=(),
            selections={},
            headwise=(),
            certificate={},
        )
    if found.dense_sha256() != document.get("dense_sha256"):
        raise FileError("dense_sha256 is not the hash of the modules, tensors and ties that it lists")
    return found


def from_document(document: Mapping[str, Any], dense: Description, widths: Mapping[str, int]) -> Description:
    """The description in a document.

    Args:
        document: A document of `to_document`.
        dense: The result of `dense_from`, after it was compared with the user's model.
        widths: The number of channels of each BatchNorm of that model, by path.

    Raises:
        FileError: The document does not have the layout or the value ranges that `to_document` writes.
    """
    with _laid_out():
        found = replace(
            dense,
            tensors={name: _cut_entry(dense.tensors[name], it) for name, it in document["tensors"].items()},
            settings=tuple(_read_settings(document["attributes"])),
            selections={path: _selection(path, text, widths) for path, text in document["selections"].items()},
            headwise=tuple(_texts(dict.fromkeys(document["headwise"], ""))),
            certificate={name: _certificate(name, entry) for name, entry in document.get("certificate", {}).items()},
        )
        return replace(
            found, masked={name: _places(name, it, found) for name, it in document.get("masked", {}).items()}
        )


@contextmanager
def _laid_out() -> Iterator[None]:
    """Turn the errors that malformed values lead to into one `FileError`."""
    try:
        yield
    # Everything that indexing, converting and unpacking arbitrary JSON can raise.
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"is not laid out as keepk.save writes it ({error})") from error


def text_of(document: Mapping[str, Any]) -> str:
    """The text of the whole file: indented, with a hash of all entries at the end."""
    return _indented({**document, "sha256": digest(document)}) + "\n"


def digest(document: Mapping[str, Any]) -> str:
    """A hash of a document's entries, which does not depend on their order or on the indentation."""
    said = {key: value for key, value in document.items() if key != "sha256"}
    return sha256(json.dumps(said, sort_keys=True).encode("ascii")).hexdigest()


def as_text(indices: ArrayLike) -> str:
    """Indices with runs written as slices."""
    array = np.asarray(indices, np.int64)
    runs = np.split(array, np.flatnonzero(np.diff(array) != 1) + 1) if len(array) else []
    return ", ".join(f"{run[0]}:{run[-1] + 1}" if len(run) > 1 else str(run[0]) for run in runs)


def from_text(text: str, size: int) -> list[int]:
    """The indices that `as_text` wrote, for an axis of this size.

    Raises:
        ValueError: They are not rising indices of the axis.
    """
    indices = list[int]()
    for part in text.split(", "):
        first, _, end = part.partition(":")
        run = range(int(first), int(end or int(first) + 1))  # checked as a range, which takes no memory
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
    if entry.stored is not None:
        written["stored"] = entry.stored
    if entry.values is not None:
        written["values"] = entry.values
    return written


def _attributes(settings: Sequence[Setting]) -> dict[str, Any]:
    written = dict[str, Any]()
    for setting in settings:
        key = setting.attribute if setting.item is None else f"{setting.attribute}.{setting.item}"
        written.setdefault(setting.module, {})[key] = {"dense": setting.old, "now": setting.new}
    return written


def _certificate(name: str, written: Mapping[str, Any]) -> dict[str, Any]:
    # Of a space with a budget, "asked" is a cost, as are "dense" and "reached".
    costs = ["dense", "asked", "reached"] if "budget" in written else []
    counts = ["total", "kept", *(key for key in ("alive", "cut_since", "masked", "fixed") if key in written)]
    counts += [] if costs else ["asked"]
    numbers = counts + costs
    wrong = [key for key in numbers if type(written[key]) is not int or written[key] < 0]  # `type`, to refuse a bool
    wrong = wrong or [key for key in counts if key not in ("cut_since", "fixed") and written[key] > written["total"]]
    wrong = wrong or [key for key in costs if written[key] > written["dense"]]
    wrong += [] if written["kind"] in KINDS else ["kind"]
    wrong += [] if not costs or written["budget"] in COSTS else ["budget"]
    if wrong:
        raise ValueError(f"{wrong[0]} of the certificate of {name!r} is {written[wrong[0]]!r}")
    for key in ("select", "exclude"):
        if not isinstance(written[key], list) or not all(isinstance(glob, str) for glob in written[key]):
            raise ValueError(f"{key} of the certificate of {name!r} is {written[key]!r}, not a list of names")
    return dict(written)


def _masked(places: Places) -> dict[str, dict[str, list[str]]]:
    """The places of masked channels as JSON: by tensor and axis, a text of indices for each channel."""
    arrays = {name: {axis: np.asarray(it, np.int64) for axis, it in axes.items()} for name, axes in places.items()}
    number = 1 + max(int(owners.max(initial=-1)) for axes in arrays.values() for owners in axes.values())
    written = dict[str, dict[str, list[str]]]()
    for name, axes in arrays.items():
        for axis, owners in axes.items():
            flat = owners.ravel()
            # Group the positions by owner. The first group belongs to -1, that is, to no masked channel.
            order = np.argsort(flat, kind="stable")
            parts = np.split(order, np.searchsorted(flat[order], np.arange(number)))[1:]
            key = axis if owners.ndim == 1 else f"0,{axis}"
            written.setdefault(name, {})[key] = [as_text(part) for part in parts]
    return written


def _places(space: str, written: Mapping[str, Any], found: Description) -> Places:
    number = found.certificate[space].get("masked")
    return {
        name: {key.removeprefix("0,"): _owners(key, texts, number, found.tensors[name].shape) for key, texts in it}
        for name, it in ((name, axes.items()) for name, axes in written.items())
    }


def _owners(key: str, texts: Any, number: object, shape: Sequence[int]) -> Any:
    """For each index of an axis, or of the first two axes, the number of the masked channel that it belongs to."""
    dims = [_number_in(dim, len(shape)) for dim in key.split(",")]
    if len(dims) > 1 and dims != [0, 1]:
        raise ValueError(f"{key!r} is not an axis of a masked channel")
    if not isinstance(texts, list) or len(texts) != number:
        raise ValueError(f"the certificate has {number!r} masked channels, an axis has a different number")
    sizes = [shape[dim] for dim in dims]
    owners = np.full(math.prod(sizes), -1, np.int64)
    for channel, text in enumerate(texts):
        if text:
            owners[from_text(text, len(owners))] = channel
    return packed(owners.reshape(sizes))


def _dense_entry(written: Mapping[str, Any], version: int) -> Entry:
    known = {"dtype", "dense", "stride", "persistent", "kept"} | ({"stored", "values"} if version == COMPACT else set())
    if strange := set(written) - known:
        raise ValueError(f"a tensor has no {sorted(strange)[0]!r}")
    dense = tuple(_number(size, 0, LARGEST) for size in written["dense"])
    stored, values = written.get("stored"), written.get("values")
    # A buffer outside the state_dict may have any size, since it is not compared with the user's model.
    if "stored" in written and (stored not in PARTS or written.get("persistent", True) is not True):
        raise ValueError(f"a tensor cannot be stored as {stored!r}")
    if "values" in written and (stored is None or (written["dtype"], values) != ("float32", "float16")):
        raise ValueError(f"a tensor of {written['dtype']!r} cannot have values of {values!r}")
    return Entry(
        dtype=_text(written["dtype"]),
        dense=dense,
        kept={_number_in(axis, len(dense)): np.zeros(0, np.int64) for axis in written.get("kept", {})},
        stride=None,
        persistent=written.get("persistent", True) is True,
        stored=stored,
        values=values,
    )


def _cut_entry(dense: Entry, written: Mapping[str, Any]) -> Entry:
    kept = dict[int, Indices]()
    for axis, indices in sorted(written.get("kept", {}).items()):  # rows first: columns may be listed row by row
        number = int(axis)
        if isinstance(indices, str):
            kept[number] = np.asarray(from_text(indices, dense.dense[number]), np.int64)
        else:
            rows = len(kept[0]) if 0 in kept else dense.dense[0]
            kept[number] = _columns(indices, number, rows, dense.dense[number])
    entry = replace(dense, kept={axis: kept[axis] for axis in dense.kept})
    if (stride := written.get("stride")) is not None:
        stride = tuple(_number(step, 0, LARGEST) for step in stride)
        # Strides with gaps would allocate any amount of memory, and overlapping ones would share elements.
        if len(stride) != len(entry.shape) or not _is_dense(entry.shape, stride):
            raise ValueError(f"strides {stride} do not lay out a tensor of shape {entry.shape}")
    return replace(entry, stride=stride)


def _columns(written: list[str], axis: int, rows: int, size: int) -> Indices:
    if axis != 1 or len(written) != rows:
        raise ValueError(f"axis {axis} has {len(written)} rows of indices for {rows} rows")
    return np.asarray([from_text(row, size) for row in written], np.int64)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether strides lay out a tensor without gaps and overlaps; those of axes of size 1 do not matter.

    >>> _is_dense((2, 3), (1, 2)), _is_dense((2, 3), (1, 4)), _is_dense((2, 3), (0, 1))
    (True, False, False)
    """
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != expected and 0 not in shape:
            return False
        expected *= size
    return True


def _read_settings(attributes: Mapping[str, Any]) -> Iterator[Setting]:
    for path, values in attributes.items():
        for key, value in values.items():
            name = key.rpartition(".")[0] if _is_number(key.rpartition(".")[2]) else key
            # Names with a leading underscore are internals of torch or of the model, never sizes that keepk sets. A
            # dotted name is a number in an object that a module refers to, such as its config.
            if any(not part.isidentifier() or part.startswith("_") for part in name.split(".")):
                raise ValueError(f"attribute {key!r} of module {path!r} is not the name of a size")
            if set(value) != {"dense", "now"}:
                raise ValueError(f"attribute {key!r} of module {path!r} has {sorted(value)} instead of dense and now")
            dense = _size(path, key, value["dense"], LARGEST)
            yield setting_of(path, key, {"dense": dense, "now": _size(path, key, value["now"], dense)})


def _size(path: str, key: str, value: object, largest: int) -> int:
    try:
        return _number(value, 1, largest)
    except ValueError as error:
        raise ValueError(f"attribute {key!r} of module {path!r} is not a size: {error}") from error


def _selection(path: str, text: str, widths: Mapping[str, int]) -> Indices:
    if path not in widths:
        raise FileError(f"module {path!r} is not a BatchNorm, but reads a selection of channels")
    return np.asarray(from_text(text, widths[path]), np.int64)


def _texts(written: Mapping[str, Any]) -> dict[str, str]:
    return {_text(key): _text(value) for key, value in written.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"got {value!r} instead of a name")
    return value


def _number(value: object, least: int, largest: int) -> int:
    if type(value) is not int or not least <= value <= largest:  # `type`, to refuse a bool
        raise ValueError(f"got {value!r} instead of an int from {least} to {largest}")
    return value


def _is_number(text: str) -> bool:
    # In canonical form and with at most 9 digits: int() also accepts leading zeros and digits of other scripts.
    return text.isdecimal() and text.isascii() and str(int(text[:9])) == text


def _number_in(text: str, end: int) -> int:
    if not _is_number(text) or int(text) >= end:
        raise ValueError(f"{text!r} is not an axis of a tensor with {end} axes")
    return int(text)


def _indented(value: Any, depth: int = 1) -> str:
    # Uncut tensors and attributes take one line each.
    if not isinstance(value, dict) or not value or (isinstance(value.get("dense"), list | int) and "kept" not in value):
        return json.dumps(value)
    lines = (f"{'  ' * depth}{json.dumps(key)}: {_indented(item, depth + 1)}" for key, item in value.items())
    return "{\n" + ",\n".join(lines) + "\n" + "  " * (depth - 1) + "}"
