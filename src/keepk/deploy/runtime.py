"""Running a model for export and measurement: other batch sizes, onnxruntime, comparing outputs, restoring state.

The context managers at the end restore everything that a measurement changes: threads, modes, buffers, random states
and Python's garbage collection.
"""

import gc
import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keepk.checkpoint.parts import rng_state, set_rng_state
from keepk.errors import KeepkError, TraceError
from keepk.model.example import Example, is_shape
from keepk.model.torch_internals import tree_leaves, tree_map


def tensors_of(value: object) -> list[Tensor]:
    """The tensors of a nested value, or of an example's arguments, in order."""
    parts = (value.arguments, value.by_name) if isinstance(value, Example) else value
    return [leaf for leaf in tree_leaves(parts) if isinstance(leaf, Tensor)]


def rows_of(example: Example) -> int:
    """The batch size of an example: the first dim of its first tensor.

    >>> rows_of(Example.of({"ids": torch.zeros(3, 5), "scale": 2.0}))
    3
    """
    if is_shape(example):
        raise TraceError(f"example: got the shape {example.arguments}. Pass a tensor, not a shape.")
    first = next(iter(tensors_of(example)), None)
    if first is None or first.dim() == 0 or len(first) == 0:
        got = "no tensor" if first is None else f"a first tensor of shape {tuple(first.shape)}"
        raise TraceError(f"example: has {got}, so its batch size cannot be changed. Let the first dim be the batch.")
    return len(first)


def is_batched(value: object, rows: int) -> bool:
    """Whether a value is a tensor whose first dim is the batch."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == rows


def with_rows(example: Example, rows: int) -> Example:
    """The example with a different batch size: its rows are repeated. Tensors of another length stay as they are.

    >>> with_rows(Example.of(torch.tensor([[1], [2], [3]])), 5).arguments[0].T
    tensor([[1, 2, 3, 1, 2]])
    """
    before = rows_of(example)

    def repeated(value: Any) -> Any:
        # A concatenation keeps the memory format (channels_last); indexing by a list of rows would not.
        return torch.cat([value] * max(1, -(-rows // before)))[:rows] if is_batched(value, before) else value

    return Example(tree_map(repeated, example.arguments), tree_map(repeated, example.by_name))


def bound(model: nn.Module, example: Example) -> dict[str, Any]:
    """The example's arguments by name, in the order of forward's signature."""
    return dict(inspect.signature(model.forward).bind(*example.arguments, **example.by_name).arguments)


def in_order(model: nn.Module, example: Example) -> Example:
    """The example with its keyword arguments in the order of forward, which is the order of an ONNX file's inputs."""
    first = {name: example.by_name[name] for name in bound(model, example) if name in example.by_name}
    return Example(example.arguments, {**first, **example.by_name})


def require_packages(verb: str, *packages: str) -> None:
    """Raise an error that says what to install if a package is missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as missing:
            raise KeepkError(f'{verb}: {missing.name} is not installed. Run: pip install "keepk[onnx]"') from None


def open_session(path: Path, threads: int | None = None) -> Any:
    """A session of onnxruntime for an ONNX file, on the CPU."""
    import onnxruntime  # noqa: PLC0415 - the extra keepk[onnx]

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    # By default onnxruntime's threads spin while they wait, which would slow down the model that runs next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def feeds(session: Any, model: nn.Module, example: Example) -> dict[str, Any]:
    """An example in the form that onnxruntime takes: arrays by the names of the file's inputs."""
    tensors = tensors_of(in_order(model, example))
    return {put.name: tensor.numpy(force=True) for put, tensor in zip(session.get_inputs(), tensors, strict=True)}


def difference(wanted: Tensor, got: Tensor) -> float:
    """max|a - b| / max|a|, where the maximum of |a| is over its finite entries.

    It is infinite if the shapes differ, or if an inf or NaN of one is not the same in the other.

    >>> difference(torch.tensor([4.0, -8.0]), torch.tensor([4.0, -6.0]))
    0.25
    """
    if wanted.shape != got.shape:
        return float("inf")
    if wanted.numel() == 0:
        return 0.0
    ours, theirs = wanted.detach().cpu().double(), got.double()
    alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
    gap = (ours - theirs).abs().masked_fill(alike, 0.0).nan_to_num(nan=float("inf"), posinf=float("inf")).max()
    scale = ours.abs().masked_fill(~ours.isfinite(), 0.0).max()
    return float(gap / scale if scale > 0 else gap)


@contextmanager
def threads_set(count: int | None) -> Iterator[int]:
    """Set torch's number of threads for the block, unless it is None; yields the number in use."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def in_eval_mode(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put all modules into eval mode for the block; each gets its previous mode back."""
    before = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def buffers_kept(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restore buffers that forward writes to or replaces."""
    modules = dict.fromkeys(module for model in models for module in model.modules())
    places = [(module._buffers, dict(module._buffers)) for module in modules]
    buffers = {buffer for _, own in places for buffer in own.values() if buffer is not None}
    values = {buffer: buffer.detach().clone() for buffer in buffers if not _is_expanded(buffer)}
    try:
        yield
    finally:
        for place, own in places:
            place.clear()
            place.update(own)
        with torch.inference_mode():  # buffers that were made in inference mode can be written to only here
            for buffer, value in values.items():
                buffer.copy_(value)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements of a tensor share memory, so that torch refuses to write to it."""
    return tensor.layout == torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the states of all random number generators after the block."""
    before = rng_state()
    try:
        yield
    finally:
        set_rng_state(before)


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn off Python's garbage collection, which would slow down one of the measured models at random."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
