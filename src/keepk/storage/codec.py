"""The codec of all stored files: a tree of plain values as JSON and a dict of tensors, and back, with every type kept.

JSON alone would turn int keys into strings, tuples into lists and NaN into an error. (A MultiStepLR with string keys
never decays again.) A type that JSON lacks becomes an object with one key that begins with ``$``, such as
``{"$tuple": [1, 2]}``. A user's dict with such a key, or with a key that is not a string, is written as pairs, so that
the two cannot be confused.

>>> encode({1: (2, 3)})[0]
{'codec': 1, 'value': {'$dict': [[1, {'$tuple': [2, 3]}]]}}
>>> decode(*encode({1: (2, 3)}))
{1: (2, 3)}

A safetensors file has no strides, no complex dtypes and no conjugate bit. `pack` turns a tensor into one that the file
can hold, with a record that says how `unpack` restores it.
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
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from keepk.errors import CheckpointError

CODEC_VERSION = 1
_MAX_DEPTH = 100
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (int, float, list, dict, set)}
DTYPE_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PLAIN_ARRAY_KINDS = "biufcmMSU"


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


# Tensors and arrays --------------------------------------------------------------------------------------------------


def tie(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors that are the same view of one storage."""
    if tensor.numel() == 0:  # all empty storages may have the same address
        return (id(tensor),)
    storage = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*storage, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def unpackable(tensor: Tensor, *, with_values: bool = True) -> str | None:
    """Why the tensor cannot be stored, or None. Without values, a meta tensor stands for one that can."""
    if is_lazy(tensor):
        return "an uninitialized parameter; run one batch first"
    if hasattr(tensor, "device_mesh"):
        return f"a {type(tensor).__name__}, sharded over processes; gather it with full_tensor() on all of them"
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"a tensor of class {type(tensor).__name__}; convert it to a plain tensor"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout}; store its dense parts"
    if tensor.is_quantized:
        return "a quantized tensor; store its int_repr(), scale and zero point"
    if with_values and tensor.is_meta:
        return "a meta tensor, which has no values; materialize it first"
    return None


def pack(tensor: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """A contiguous tensor of a dtype that the format has, and the record that `unpack` needs to undo the change."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    stored, record = _contiguous(plain)
    if stored.is_complex():
        record["dtype"] = dtype_name(stored.dtype)
        return torch.view_as_real(stored), record
    if stored.dtype not in DTYPE_CODES:
        record.setdefault("shape", list(stored.shape))
        record["dtype"] = dtype_name(stored.dtype)
        return stored.reshape(-1).view(torch.uint8), record
    return stored, record


def _contiguous(plain: Tensor) -> tuple[Tensor, dict[str, Any]]:
    # A contiguous tensor may have any stride in a dim of size 1, so channels_last can be hidden in its strides.
    by_stride = sorted(range(plain.dim()), key=plain.stride().__getitem__, reverse=True)
    turned = plain if plain.is_contiguous() else plain.permute(by_stride)
    if not turned.is_contiguous():  # gaps or overlaps (a slice, an expanded view): only the values are kept
        return plain.contiguous(), {}
    if plain.stride() == torch.empty(plain.shape, device="meta").stride():
        return turned, {}
    return turned, {"shape": list(plain.shape), "stride": list(plain.stride())}


def unpack(stored: Tensor, record: dict[str, Any]) -> Tensor:
    """The tensor that was passed to `pack`."""
    if unknown := set(record) - {"dtype", "shape", "stride"}:
        raise CheckpointError(f"unknown tensor fields {sorted(unknown)}")
    dtype = dtype_named(record["dtype"]) if "dtype" in record else stored.dtype
    if dtype.is_complex:
        stored = torch.view_as_complex(stored)
    elif dtype != stored.dtype:
        stored = stored.view(dtype).reshape(record["shape"])
    if "stride" in record:
        return stored.as_strided(record["shape"], record["stride"])
    return stored


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """torch.float32 for 'float32'."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"this torch has no dtype {name!r}")
    return dtype


def array_bytes(array: np.ndarray[Any, Any]) -> bytes | None:
    """The array's values in C order; None for dtypes such as object, which have no plain values."""
    if array.dtype.kind not in _PLAIN_ARRAY_KINDS or array.dtype.itemsize == 0:
        return None
    return array.tobytes()


def array_from(data: bytes, dtype: str, shape: list[int]) -> np.ndarray[Any, Any]:
    """The array that was passed to `array_bytes`, writable and in C order."""
    kind = np.dtype(dtype)
    if kind.kind not in _PLAIN_ARRAY_KINDS:
        raise CheckpointError(f"arrays of dtype {kind} are never stored")
    return np.ndarray(tuple(shape), kind, bytearray(data))
