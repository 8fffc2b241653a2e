"""Converting dense tensors and arrays into tensors that a safetensors file can hold, and back without loss.

The format has no strides, no complex dtypes and no conjugate bit. A record stored with each tensor says how to restore
it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from keepk.errors import CheckpointError

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


def tie(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for tensors that are the same view of one storage."""
    if tensor.numel() == 0:  # all empty storages may have the same address
        return (id(tensor),)
    storage = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*storage, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def unpackable(tensor: Tensor) -> str | None:
    """Why the tensor cannot be stored, or None."""
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
    if tensor.is_meta:
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
