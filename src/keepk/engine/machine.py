"""The CPU that programs run on, and the compiler: llvmlite, imported only when a program is compiled."""

import ctypes
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepk.errors import SparseError


@dataclass(frozen=True)
class Machine:
    """A CPU that kernels can be compiled for.

    Attributes:
        name: LLVM's name of the CPU.
        features: LLVM's feature string.
        width: Floats in a vector.
        vectors: How many vectors of sums a kernel keeps in registers.
    """

    name: str
    features: str
    width: int
    vectors: int

    @property
    def lanes(self) -> int:
        """The smallest number of samples that are computed together."""
        return max(8, self.width)


def chosen(architecture: str, features: Mapping[str, bool]) -> tuple[int, int]:
    """The width of vectors and the number of sums in registers.

    Args:
        architecture: The machine's architecture, such as "x86_64".
        features: The CPU's features by LLVM's names.

    Raises:
        SparseError: The CPU has no fused multiply-add on vectors of at least 8 floats.

    Examples:
        >>> chosen("x86_64", {"avx2": True, "fma": True})
        (8, 8)
        >>> chosen("x86_64", {"sse4.2": True})
        Traceback (most recent call last):
            ...
        keepk.errors.SparseError: sparse: this x86_64 CPU has neither AVX2 with FMA nor AVX-512. Run the model in torch.
    """
    if architecture.lower() in ("arm64", "aarch64"):
        return 4, 16
    if architecture.lower() not in ("x86_64", "amd64"):
        raise SparseError(
            f"sparse: there are no kernels for {architecture or 'an unknown architecture'}, only for x86-64 with AVX2 "
            f"and for 64-bit ARM. Run the model in torch."
        )
    if features.get("avx512f") and features.get("avx512vl"):
        return 16, 12
    if features.get("avx2") and features.get("fma"):
        return 8, 8
    raise SparseError(f"sparse: this {architecture} CPU has neither AVX2 with FMA nor AVX-512. Run the model in torch.")


@lru_cache(maxsize=1)
def compiler() -> Any:
    """The module `llvmlite.binding`, initialized.

    Raises:
        SparseError: llvmlite is not installed, or its library cannot be loaded.
    """
    try:
        import llvmlite.binding as llvm  # noqa: PLC0415 - an extra, imported where it is used
    except (ImportError, OSError, RuntimeError) as error:
        raise SparseError(
            f'sparse: llvmlite cannot be imported ({error}). Install it with pip install "keepk[sparse]".'
        ) from error
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


@lru_cache(maxsize=1)
def host() -> Machine:
    """The CPU of this process.

    Raises:
        SparseError: It cannot be served, or llvmlite is missing.
    """
    llvm = compiler()
    features = llvm.get_host_cpu_features()
    width, vectors = chosen(platform.machine(), features)
    return Machine(llvm.get_host_cpu_name(), features.flatten(), width, vectors)


class Native:
    """A compiled function ``run``; the memory with its code lives as long as this object."""

    def __init__(self, text: str, machine: Machine) -> None:
        llvm = compiler()
        module = llvm.parse_assembly(text)
        module.verify()
        target = llvm.Target.from_default_triple().create_target_machine(
            cpu=machine.name, features=machine.features, opt=3
        )
        optimize(module, target)
        self._engine = llvm.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        self.address: int = self._engine.get_function_address("run")
        # ctypes releases the GIL while the function runs.
        self.run = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64
        )(self.address)


def optimize(module: Any, target: Any) -> None:
    """Turn variables into registers and tidy up: the kernels are vectorised and unrolled as they were written.

    The default passes would take four times as long, and the code would not be faster.
    """
    llvm = compiler()
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    passes.add_loop_rotate_pass()
    passes.add_simplify_cfg_pass()
    options = llvm.create_pipeline_tuning_options(speed_level=1)
    passes.run(module, llvm.create_pass_builder(target, options))


ALIGNMENT = 64


def aligned(shape: int | tuple[int, ...], dtype: Any = np.float32) -> NDArray[Any]:
    """An array of zeros that begins at a multiple of 64 bytes."""
    kind = np.dtype(dtype)
    size = math.prod(shape) if isinstance(shape, tuple) else shape
    raw = np.zeros(size * kind.itemsize + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    array: NDArray[Any] = raw[skip : skip + size * kind.itemsize].view(kind).reshape(shape)
    return array
