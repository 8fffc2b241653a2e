"""`export_onnx`: write a model as one ``.onnx`` file, after running it and comparing the outputs with torch's."""

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from keepk.deploy.runtime import (
    bound,
    difference,
    feeds,
    in_order,
    is_batched,
    open_session,
    require_packages,
    rows_of,
    tensors_of,
    with_rows,
)
from keepk.errors import FileError, TraceError
from keepk.model.copies import Workshop
from keepk.model.example import Example, likely_slip, not_a_model, refuse_scripted
from keepk.model.names import named_tensors, unwrap
from keepk.model.torch_internals import tree_map
from keepk.plan.names import shown
from keepk.storage.files import own_folder, place, sync_folder

# Tolerances relative to the largest output: for float32 summed in another order, and for half precision or TF32.
ROUNDING, COARSE_ROUNDING = 1e-4, 1e-2
REASON = 400  # characters of the exporter's message, which may be pages long
SHOWN = 3  # inputs and outputs in a repr


@dataclass(frozen=True)
class OnnxReport:
    """The result of `keepk.export_onnx`. It prints as one line.

    Attributes:
        path: The file.
        opset: The version of ONNX's operators that it uses.
        inputs: Name, type and shape of each input; a name in a shape marks a dimension that may vary.
        outputs: Name, type and shape of each output.
        difference: The largest max|torch - onnxruntime| / max|torch| of all outputs; None if it was not checked.
        bytes: The size on disk.
    """

    path: Path
    opset: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    difference: float | None
    bytes: int

    def __str__(self) -> str:
        return self._summary(", ".join(self.inputs), ", ".join(self.outputs))

    def __repr__(self) -> str:
        # A language model's cache has two tensors per layer, each of them an input and an output.
        return f"<OnnxReport {self._summary(_shortened(self.inputs), _shortened(self.outputs))}>"

    def _summary(self, inputs: str, outputs: str) -> str:
        checked = "not checked" if self.difference is None else f"differs from torch by {self.difference:.1e}"
        return f"{self.path}: {inputs} -> {outputs}; opset {self.opset}, {self.bytes:,} bytes, {checked}"


def _shortened(specs: Sequence[str]) -> str:
    more = [f"{len(specs) - SHOWN} more"] if len(specs) > SHOWN else []
    return ", ".join([*specs[:SHOWN], *more])


def export_onnx(
    model: nn.Module,
    example: Any,
    path: str | os.PathLike[str],
    *,
    check: bool = True,
    tolerance: float | None = None,
    dynamic_batch: bool = True,
) -> OnnxReport:
    """Export a model, shrunk or not, to ONNX, and run the file to check that it computes what torch computes.

    The model is exported in eval mode, from a copy. The file is self-contained up to 1.5 GB; for larger models torch
    puts the values into ``<path>.data``. If this raises, an existing file at `path` is unchanged.

    Args:
        model: Any module that `torch.export` accepts; `DistributedDataParallel` and `torch.compile` wrappers are looked
            through.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        path: The file, in a folder that exists.
        check: Whether to run the file with onnxruntime on the example and compare its outputs with torch's.
        tolerance: The largest max|torch - onnxruntime| / max|torch| that passes the check. None means 1e-4, or 1e-2 for
            half precision and on a GPU, where convolutions are rounded to TF32.
        dynamic_batch: Whether the batch size may vary, that is, the first dim of every tensor that has as many rows as
            the first tensor. The check then also runs a batch of one, and one row more than the example has.

    Returns:
        A report: inputs and outputs with names, types and shapes, the size, and the largest difference found.

    Raises:
        TraceError: The argument is not a model, or forward fails on the example.
        FileError: torch or onnxruntime cannot process the model, the outputs differ by more than `tolerance`, or the
            file cannot be written.
        KeepkError: onnx, onnxscript or onnxruntime is not installed.

    Examples:
        >>> import keepk, tempfile
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> edits = keepk.shrink(net, keepk.trace(net, torch.zeros(2, 8)), [0, 5])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_onnx(net, torch.randn(2, 8), f"{folder}/net.onnx")
        >>> report.inputs, report.outputs
        (('input: float[batch, 8]',), ('linear_1: float[batch, 3]',))
    """
    if not isinstance(model, nn.Module):
        raise TraceError(f"export_onnx: {not_a_model(model)}")
    refuse_scripted("export_onnx", model)
    target = place(path, "export_onnx", "model, example, path", FileError)
    _refuse_tolerance(tolerance)
    require_packages("export_onnx", "onnx", "onnxscript", *(["onnxruntime"] if check else []))
    examples = _examples(Example.of(example), dynamic=dynamic_batch)
    workshop = Workshop(unwrap(model), examples[0], None)
    with torch.inference_mode(False), _draft(target) as draft:
        twin = workshop.copy()
        wanted = [_outputs(twin, replace(workshop, example=each)) for each in (examples if check else examples[:1])]
        _write(twin, workshop, draft, dynamic=dynamic_batch)
        largest = None
        if check:
            allowed = _default_tolerance(workshop) if tolerance is None else tolerance
            largest = _checked(workshop.model, draft, examples, wanted, allowed)
        report = _report(target, draft, largest)
        _commit(draft, target)
    return report


def _refuse_tolerance(tolerance: object) -> None:
    is_number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and tolerance >= 0):  # type: ignore[operator]  # `is_number` says so
        raise FileError(
            f"export_onnx: tolerance={shown(tolerance)}. Pass a number of at least 0, such as 1e-4, or None for the "
            f"default."
        )


def _examples(example: Example, *, dynamic: bool) -> list[Example]:
    """The examples to check; the first one is exported."""
    if not dynamic:
        return [example]
    rows = rows_of(example)
    # torch.export treats a size of 1 as a constant, so a dynamic batch is never exported from a single row.
    return [with_rows(example, size) for size in ((2, 1) if rows == 1 else (rows, rows + 1, 1))]


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """A path to write and check the file at, in a temporary folder beside its final place.

    A process that is killed leaves its folder behind, and the next export to the same path deletes it.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        with own_folder(path) as folder:
            yield folder / path.name
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written ({error}). Choose a file in a folder that exists and can be written. "
            f"An existing file is unchanged."
        ) from error


def _commit(draft: Path, path: Path) -> None:
    # Write a separate file of values before the file that refers to it.
    for file in sorted(draft.parent.iterdir(), key=lambda file: file == draft):
        with file.open("r+b") as handle:
            os.fsync(handle.fileno())
        os.replace(file, path.parent / file.name)  # noqa: PTH105 - also if the file exists, on every system
    sync_folder(path.parent)


def _outputs(twin: nn.Module, workshop: Workshop) -> list[Tensor]:
    try:
        with workshop.running() as example:
            return tensors_of(twin(*example.arguments, **example.by_name))
    except Exception as error:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(workshop.example))
        raise TraceError(
            f"model {type(twin).__name__}: its forward failed on {shapes} ({type(error).__name__}: {error}). Pass an "
            f"example on which model(*example) works; if only other batch sizes fail, export with dynamic_batch=False."
            f"{likely_slip(twin, workshop.example)}"
        ) from error


def _write(twin: nn.Module, workshop: Workshop, file: Path, *, dynamic: bool) -> None:
    ordered = replace(workshop, example=in_order(twin, workshop.example))
    try:
        with _silent_exporter(), ordered.running() as example:
            program = torch.onnx.export(
                twin,
                example.arguments,
                kwargs=example.by_name,
                dynamic_shapes=_dynamic_shapes(twin, example) if dynamic else None,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:
        advice = " If its batch is fixed, export with dynamic_batch=False." if dynamic else ""
        raise FileError(
            f"model {type(twin).__name__}: torch.onnx cannot export it ({_reason(error)}).{advice} Nothing was written."
        ) from error
    assert program is not None  # it never is with dynamo=True
    program.save(file, external_data=False)


def _dynamic_shapes(model: nn.Module, example: Example) -> Any:
    rows, batch = rows_of(example), torch.export.Dim("batch")
    return tree_map(lambda value: {0: batch} if is_batched(value, rows) else None, bound(model, example))


@contextmanager
def _silent_exporter() -> Iterator[None]:
    """Silence the exporter, which warns about internals, logs optional packages, and prints a graph if it fails."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _reason(error: BaseException) -> str:
    # The exporter wraps the first error in several others, whose messages are about its own stages.
    while error.__cause__ is not None:
        error = error.__cause__
    return shorten(f"{type(error).__name__}: {error}", REASON, placeholder=" ...")


def _checked(
    model: nn.Module, file: Path, examples: Sequence[Example], wanted: Sequence[Sequence[Tensor]], allowed: float
) -> float:
    """The largest difference between onnxruntime's outputs and the wanted ones; refused if it exceeds `allowed`."""
    name = type(model).__name__
    try:
        session = open_session(file)
        ran = [session.run(None, feeds(session, model, example)) for example in examples]
    except Exception as error:
        raise FileError(
            f"model {name}: onnxruntime cannot run its ONNX file ({_reason(error)}). Nothing was written; "
            f"check=False writes the file unchecked."
        ) from error
    found = [_largest(ours, list(map(torch.from_numpy, theirs))) for ours, theirs in zip(wanted, ran, strict=True)]
    for example, much in zip(examples, found, strict=True):
        if not much <= allowed:  # also for NaN
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(example))
            raise FileError(
                f"model {name}: its ONNX file differs from torch by {much:.1e} of the largest output on {shapes}, "
                f"more than tolerance={allowed:g}. Nothing was written. Raise the tolerance if this is rounding; if "
                f"only batch sizes other than the example's differ, export with dynamic_batch=False."
            )
    return max(found)


def _largest(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> float:
    if len(wanted) != len(got):
        return float("inf")
    return max(map(difference, wanted, got), default=0.0)


def _default_tolerance(workshop: Workshop) -> float:
    tensors = [*(tensor for _, tensor, _ in named_tensors(workshop.model)), *tensors_of(workshop.example)]
    coarse = any(tensor.is_cuda or tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    return COARSE_ROUNDING if coarse else ROUNDING


def _report(path: Path, draft: Path, largest: float | None) -> OnnxReport:
    import onnx  # noqa: PLC0415 - the extra keepk[onnx]

    def spec(value: Any) -> str:
        kind = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
        sizes = [size.dim_param or str(size.dim_value) for size in value.type.tensor_type.shape.dim]
        return f"{value.name}: {kind}[{', '.join(sizes)}]"

    proto = onnx.load(draft, load_external_data=False)
    return OnnxReport(
        path=path,
        opset=next(used.version for used in proto.opset_import if not used.domain),
        inputs=tuple(map(spec, proto.graph.input)),
        outputs=tuple(map(spec, proto.graph.output)),
        difference=largest,
        bytes=sum(file.stat().st_size for file in draft.parent.iterdir()),
    )
