"""Encoding a tree of plain values as JSON and a dict of tensors, and back, with every type kept.

JSON alone would turn int keys into strings, tuples into lists and NaN into an error. (A MultiStepLR with string keys
never decays again.) A type that JSON lacks becomes an object with one key that begins with ``$``, such as
``{"$tuple": [1, 2]}``. A user's dict with such a key, or with a key that is not a string, is written as pairs, so that
the two cannot be confused.

>>> encode({1: (2, 3)})[0]
{'codec': 1, 'value': {'$dict': [[1, {'$tuple': [2, 3]}]]}}
>>> decode(*encode({1: (2, 3)}))
{1: (2, 3)}
"""

import base64
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepk.errors import CheckpointError
from keepk.storage.tensors import array_bytes, array_from, dtype_name, dtype_named, pack, tie, unpack, unpackable

CODEC_VERSION = 1
_MAX_DEPTH = 100
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (int, float, list, dict, set)}


def encode(value: Any, name: str = "value") -> tuple[Any, dict[str, Tensor]]:
    """The tree as JSON, and its tensors by the path of their first appearance.

    Tensors that are the same view of one storage are stored once. Contiguous tensors are not copied: write them before
    they change.

    Args:
        value: The tree.
        name: The beginning of every path; if empty, paths begin with the keys of the outermost dict.

    Raises:
        CheckpointError: The tree holds something other than plain values, arrays and tensors; the error has its path.
    """
    encoder = _Encoder()
    return {"codec": CODEC_VERSION, "value": encoder.encode(value, name)}, encoder.tensors


def decode(encoded: Any, tensors: dict[str, Tensor]) -> Any:
    """The tree that was encoded. Tensors are detached, and tied ones are one object.

    Raises:
        CheckpointError: The encoding is malformed, or of another version.
    """
    version = encoded.get("codec") if isinstance(encoded, dict) else None
    if version != CODEC_VERSION or set(encoded) != {"codec", "value"}:
        raise CheckpointError(f"got a tree of codec version {version!r}; this keepk reads {CODEC_VERSION}")
    decoder = _Decoder(tensors)
    try:
        value = decoder.decode(encoded["value"])
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"the encoded tree cannot be read: {error}") from error
    if unused := sorted(set(tensors) - set(decoder.unpacked)):
        raise CheckpointError(f"the tree does not use the tensors {unused[:3]}")
    return value


class _Encoder:
    """One walk over a tree: the tensors found so far, and the containers that enclose the current value."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._records: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)  # not isinstance: a subclass may have more data than its base, which would be lost
        if kind in _SCALARS:
            return _SCALARS[kind](value)
        if kind in _CONTAINERS:
            return self._inside(value, path, _CONTAINERS[kind])
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        what = getattr(value, "__qualname__", None)
        raise _refusal(path, f"{kind.__name__} {what}" if what else f"an object of class {kind.__qualname__}")

    def _inside(self, value: Any, path: str, rule: Callable[["_Encoder", Any, str], Any]) -> Any:
        if id(value) in self._open:
            raise _refusal(path, f"a {type(value).__name__} that contains itself")
        if len(self._open) >= _MAX_DEPTH:
            raise _refusal(path, f"containers nested deeper than {_MAX_DEPTH}")
        self._open.add(id(value))
        encoded = rule(self, value, path)
        self._open.remove(id(value))
        return encoded

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        if reason := unpackable(tensor):
            raise _refusal(path, reason)
        shared = tie(tensor)
        if shared not in self._records:
            stored, record = pack(tensor)
            name = path if path not in self.tensors else f"{path}#{len(self.tensors)}"
            self.tensors[name] = stored
            self._records[shared] = {"$tensor": name, **record}
        return self._records[shared]

    def _array(self, array: Any, path: str) -> Any:
        data = array_bytes(np.asarray(array))
        if data is None:
            raise _refusal(path, f"a numpy value of dtype {array.dtype}")
        if isinstance(array, np.generic):
            return {"$numpy": [array.dtype.str, data.hex()]}
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return {"$array": [array.dtype.str, list(array.shape), self._tensor(raw, path)]}

    def items(self, values: Iterable[Any], path: str) -> list[Any]:
        return [self.encode(value, f"{path}[{index}]") for index, value in enumerate(values)]

    def pairs(self, mapping: dict[Any, Any], path: str) -> list[list[Any]]:
        return [[self.key(key, path), self.encode(value, _below(path, key))] for key, value in mapping.items()]

    def key(self, key: Any, path: str) -> Any:
        if isinstance(key, Tensor):
            raise _refusal(f"a key or element of {path}", "a tensor, which is looked up by identity")
        return self.encode(key, f"a key or element of {path}")

    def mapping(self, mapping: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in mapping):
            return {key: self.encode(value, _below(path, key)) for key, value in mapping.items()}
        return {"$dict": self.pairs(mapping, path)}

    def factory(self, mapping: defaultdict[Any, Any], path: str) -> Any:
        factory = mapping.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and _FACTORIES.get(name) is not factory:
            raise _refusal(path, f"a defaultdict of {name or factory}, which is not one of {', '.join(_FACTORIES)}")
        return {"$defaultdict": [name if factory else None, self.pairs(mapping, path)]}

    def elements(self, values: Iterable[Any], path: str) -> list[Any]:
        # Each process iterates over a set of strings in a different order; the same state should give the same bytes.
        return sorted((self.key(value, path) for value in values), key=json.dumps)


def _below(path: str, key: Any) -> str:
    return f"{path}[{key!r}]" if path else str(key)


def _refusal(path: str, got: str) -> CheckpointError:
    return CheckpointError(f"{path}: got {got}; keep plain values and tensors there")


def _encode_int(value: int) -> Any:
    # Python refuses to read decimals of more than 4300 digits; hexadecimals have no limit.
    return value if abs(value) < 2**63 else {"$int": hex(value)}


def _encode_float(value: float) -> Any:
    # JSON has no NaN and no infinities. As bits, since a NaN may carry a payload.
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


_SCALARS: dict[type, Callable[[Any], Any]] = {
    NoneType: lambda value: value,
    bool: lambda value: value,
    str: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    complex: lambda value: {"$complex": struct.pack(">dd", value.real, value.imag).hex()},
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode("ascii")},
    torch.Size: lambda value: {"$size": list(value)},
    torch.dtype: lambda value: {"$dtype": dtype_name(value)},
    torch.device: lambda value: {"$device": str(value)},
}

_CONTAINERS: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    list: _Encoder.items,
    tuple: lambda encoder, value, path: {"$tuple": encoder.items(value, path)},
    dict: _Encoder.mapping,
    OrderedDict: lambda encoder, value, path: {"$ordereddict": encoder.pairs(value, path)},
    defaultdict: _Encoder.factory,
    Counter: lambda encoder, value, path: {"$counter": encoder.pairs(value, path)},
    set: lambda encoder, value, path: {"$set": encoder.elements(value, path)},
    frozenset: lambda encoder, value, path: {"$frozenset": encoder.elements(value, path)},
}


class _Decoder:
    """One walk over an encoded tree, with the tensors unpacked so far, so that tied ones become one object again."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._stored = tensors
        self.unpacked: dict[str, Tensor] = {}

    def decode(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.decode(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        tag = next((key for key in encoded if key.startswith("$")), None)
        if tag is None:
            return {key: self.decode(value) for key, value in encoded.items()}
        if tag == "$tensor":
            return self._tensor(dict(encoded))
        if tag not in _TAGS or len(encoded) != 1:
            raise CheckpointError(f"unknown type tag {tag!r}; a newer keepk may have written it")
        return _TAGS[tag](self, encoded[tag])

    def _tensor(self, record: dict[str, Any]) -> Tensor:
        name = record.pop("$tensor")
        if name not in self._stored:
            raise CheckpointError(f"the tensor {name!r} is missing")
        if name not in self.unpacked:
            self.unpacked[name] = unpack(self._stored[name], record)
        return self.unpacked[name]

    def pairs(self, encoded: list[Any]) -> list[tuple[Any, Any]]:
        return [(self.decode(key), self.decode(value)) for key, value in encoded]

    def array(self, encoded: list[Any]) -> np.ndarray[Any, Any]:
        dtype, shape, stored = encoded
        raw: Tensor = self.decode(stored)
        return array_from(raw.numpy().tobytes(), dtype, shape)


def _default_dict(decoder: _Decoder, encoded: list[Any]) -> defaultdict[Any, Any]:
    name, pairs = encoded
    return defaultdict(None if name is None else _FACTORIES[name], decoder.pairs(pairs))


_TAGS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "$int": lambda _, text: int(text, 16),
    "$float": lambda _, text: struct.unpack(">d", bytes.fromhex(text))[0],
    "$complex": lambda _, text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "$bytes": lambda _, text: base64.b64decode(text, validate=True),
    "$size": lambda _, sizes: torch.Size(sizes),
    "$dtype": lambda _, name: dtype_named(name),
    "$device": lambda _, name: torch.device(name),
    "$numpy": lambda _, pair: array_from(bytes.fromhex(pair[1]), pair[0], [])[()],
    "$array": _Decoder.array,
    "$tuple": lambda decoder, items: tuple(decoder.decode(items)),
    "$dict": lambda decoder, pairs: dict(decoder.pairs(pairs)),
    "$ordereddict": lambda decoder, pairs: OrderedDict(decoder.pairs(pairs)),
    "$defaultdict": _default_dict,
    "$counter": lambda decoder, pairs: Counter(dict(decoder.pairs(pairs))),
    "$set": lambda decoder, items: set(decoder.decode(items)),
    "$frozenset": lambda decoder, items: frozenset(decoder.decode(items)),
}
