"""`latency`: how long a forward pass takes, measured; a model and its baseline take turns."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from keepk.deploy.onnx_files import export_onnx
from keepk.deploy.runtime import (
    buffers_kept,
    feeds,
    in_eval_mode,
    no_collection,
    open_session,
    random_state_kept,
    require_packages,
    rows_of,
    tensors_of,
    threads_set,
    with_rows,
)
from keepk.errors import KeepkError, TraceError
from keepk.graph.given import likely_slip, no_model
from keepk.graph.shell import Example
from keepk.graph.tracer import named_tensors
from keepk.graph.wrappers import unwrap
from keepk.plan.names import shown
from keepk.show.tables import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

RUNTIMES = ("torch", "onnxruntime")
WARM_UP = 5  # rounds that are not counted
NANOSECONDS = 1e6  # in a millisecond
Run = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """The quartiles of many measurements."""

    lower: float
    median: float
    upper: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """The quartiles, between two measurements in proportion.

        >>> Spread.of([4.0, 1.0, 2.0, 3.0])
        Spread(lower=1.75, median=2.5, upper=3.25)
        """
        return Spread(*map(float, np.quantile(values, (0.25, 0.5, 0.75))))

    def cells(self, unit: str = "") -> tuple[str, str]:
        """The median, and the quartiles around it, in words."""
        return f"{self.median:.3g}{unit}", f"{self.lower:.3g} - {self.upper:.3g}"


@dataclass(frozen=True)
class LatencyRow:
    """One batch in one runtime, in milliseconds.

    Attributes:
        runtime: Who ran it.
        batch: With how many rows.
        model: The model's times.
        baseline: The baseline's.
        ratio: How many times as fast as the baseline: baseline / model of each round, in which both had their turn.
    """

    runtime: str
    batch: int
    model: Spread
    baseline: Spread | None
    ratio: Spread | None


@dataclass(frozen=True)
class LatencyReport:
    """What `keepk.latency` measured, in plain values. It prints itself, richly on a rich console.

    Attributes:
        model: The model's class.
        baseline: The baseline's class.
        device: Where it ran.
        threads: How many threads an operation could use.
        repeats: How often each was measured.
        rows: A row for each runtime and batch.
    """

    model: str
    baseline: str | None
    device: str
    threads: int
    repeats: int
    rows: tuple[LatencyRow, ...]

    def json(self) -> str:
        """Everything as JSON."""
        return json.dumps(asdict(self), indent=2)

    def data(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, words and numbers: what JSON gives back."""
        plain: dict[str, Any] = json.loads(self.json())
        return plain

    def table(self) -> Table:
        """A row for each runtime and batch; medians, and quartiles beside them."""
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        title = f"{self.model}: ms per batch on {self.device}, {threads}, median and quartiles of {self.repeats}"
        columns = ["runtime", "batch", "ms", "quartiles"]
        if self.baseline is not None:
            columns += ["baseline ms", "quartiles", "times as fast", "quartiles"]
        return Table(tuple(columns), tuple(map(_cells, self.rows)), title)

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return str(self)  # the table is shorter than the fields, and is what an interactive session should show

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def __rich__(self) -> "RichTable":
        return self.table().__rich__()


def latency(
    model: nn.Module,
    example: Any,
    *,
    baseline: nn.Module | None = None,
    batches: int | Sequence[int] = (1, 32),
    repeats: int = 30,
    threads: int | None = None,
    runtimes: str | Sequence[str] = ("torch",),
) -> LatencyReport:
    """Measure forward passes in eval mode, without gradients; a baseline takes turns with the model.

    In every round both run once, and who is first alternates, so that what slows the machine down slows both down. On a
    GPU the clock stops when all work is done. Modes, buffers, threads, gradients and random states are as
    before afterwards.

    Args:
        model: As it is called: a `torch.compile` wrapper is measured as such.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments; the first dim is the batch.
        baseline: What the model is compared with, such as the dense one; it takes the same example.
        batches: How many rows, one number or several; each is measured, and the example's rows are repeated.
        repeats: How often each is measured, after a warm-up.
        threads: How many threads an operation may use; None: as it is.
        runtimes: ``"torch"``, ``"onnxruntime"`` (on the CPU, through `export_onnx` for each batch), or both.

    Examples:
        >>> net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> report = latency(net, torch.randn(2, 8), batches=(1, 4), repeats=3)
        >>> [(row.runtime, row.batch) for row in report.rows]
        [('torch', 1), ('torch', 4)]
    """
    models = _models(model, baseline)
    given, chosen = Example.of(example), (runtimes,) if isinstance(runtimes, str) else tuple(runtimes)
    devices = _devices(models, given)
    sizes = _sizes(batches)
    _refuse_numbers(repeats, threads)
    _refuse_runtimes(chosen, devices)
    rows_of(given)
    with threads_set(threads) as used, in_eval_mode(models), buffers_kept(models), random_state_kept():
        rows = tuple(
            _measured(runtime, models, with_rows(given, batch), batch, repeats, used)
            for runtime in chosen
            for batch in sizes
        )
    names = [type(unwrap(each)).__name__ for each in models]
    return LatencyReport(
        model=names[0],
        baseline=names[1] if baseline is not None else None,
        device=", ".join(map(str, devices)),
        threads=used,
        repeats=repeats,
        rows=rows,
    )


def take_turns(
    runs: Sequence[Run], repeats: int, *, warm_up: int = WARM_UP, clock: Callable[[], int] = time.perf_counter_ns
) -> list[list[int]]:
    """The times of each run, round by round: first to last, then last to first, and so on."""
    times: list[list[int]] = [[] for _ in runs]
    for turn in range(-warm_up, repeats):
        places = range(len(runs))
        for place in places if turn % 2 == 0 else reversed(places):
            start = clock()
            runs[place]()
            taken = clock() - start
            if turn >= 0:
                times[place].append(max(1, taken))  # a clock may stand still
    return times


def summary(runtime: str, batch: int, times: Sequence[Sequence[int]]) -> LatencyRow:
    """The times of a model, and of a baseline if there is one, in nanoseconds, as a row."""
    spreads = [Spread.of([taken / NANOSECONDS for taken in each]) for each in times]
    if len(times) == 1:
        return LatencyRow(runtime, batch, spreads[0], None, None)
    ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
    return LatencyRow(runtime, batch, spreads[0], spreads[1], Spread.of(ratios))


def _measured(
    runtime: str, models: Sequence[nn.Module], example: Example, batch: int, repeats: int, threads: int
) -> LatencyRow:
    with ExitStack() as stack:
        if runtime == "torch":
            runs = [_torch_run(model, example) for model in models]
        else:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            runs = [_onnx_run(model, example, folder / f"{at}.onnx", threads) for at, model in enumerate(models)]
        stack.enter_context(torch.inference_mode())
        for model, run in zip(models, runs, strict=True):
            _try_out(model, run, example, batch)
        stack.enter_context(no_collection())
        return summary(runtime, batch, take_turns(runs, repeats))


def _torch_run(model: nn.Module, example: Example) -> Run:
    busy = [device for device in _devices([model], example) if device.type != "cpu"]

    def run() -> None:
        model(*example.arguments, **example.by_name)
        for device in busy:
            torch.accelerator.synchronize(device)

    return run


def _onnx_run(model: nn.Module, example: Example, path: Path, threads: int) -> Run:
    export_onnx(model, (example.arguments or example.by_name), path, dynamic_batch=False)
    session = open_session(path, threads)
    arrays = feeds(session, unwrap(model), example)
    return lambda: session.run(None, arrays)


def _try_out(model: nn.Module, run: Run, example: Example, batch: int) -> None:
    try:
        run()
    except Exception as error:
        raise TraceError(
            f"model {type(unwrap(model)).__name__}: its forward failed on the example with {batch} rows "
            f"({type(error).__name__}: {error}). Give an example whose first dim is the batch, or other batches."
            f"{likely_slip(model, example)}"
        ) from error


def _models(model: nn.Module, baseline: nn.Module | None) -> list[nn.Module]:
    models = [model] if baseline is None else [model, baseline]
    for given, word in zip(models, ("model", "baseline"), strict=False):
        if not isinstance(given, nn.Module):
            raise TraceError(f"latency: {no_model(given, word)}")
    # These wrappers would talk to other processes or devices in the middle of a measurement.
    return [each.module if isinstance(each, DistributedDataParallel | DataParallel) else each for each in models]


def _devices(models: Sequence[nn.Module], example: Example) -> list[torch.device]:
    tensors = [tensor for model in models for _, tensor, _ in named_tensors(model)]
    return list(dict.fromkeys(tensor.device for tensor in (*tensors, *tensors_of(example))))


def _sizes(batches: int | Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(batches) if isinstance(batches, Sequence) else (batches,)
    if not sizes or not all(map(_is_count, sizes)):
        raise KeepkError(
            f"latency: batches={shown(batches)}. Give one or more whole numbers from 1 on, such as (1, 32)."
        )
    return sizes


def _refuse_numbers(repeats: int, threads: int | None) -> None:
    if not _is_count(repeats):
        raise KeepkError(f"latency: repeats={shown(repeats)}. Give a whole number from 1 on.")
    if threads is not None and not _is_count(threads):
        raise KeepkError(f"latency: threads={shown(threads)}. Give a whole number from 1 on, or None for torch's own.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _refuse_runtimes(runtimes: Sequence[str], devices: Sequence[torch.device]) -> None:
    unknown = [runtime for runtime in runtimes if runtime not in RUNTIMES]
    if unknown or not runtimes:
        raise KeepkError(f"latency: runtimes={shown(runtimes)}. Choose from {', '.join(RUNTIMES)}.")
    if "onnxruntime" not in runtimes:
        return
    require_packages("latency", "onnx", "onnxscript", "onnxruntime")
    elsewhere = [str(device) for device in devices if device.type != "cpu"]
    if elsewhere:
        raise KeepkError(f"latency: onnxruntime is measured on the CPU, the model is on {elsewhere[0]}. Move it.")


def _cells(row: LatencyRow) -> tuple[str, ...]:
    cells = (row.runtime, str(row.batch), *row.model.cells())
    if row.baseline is None or row.ratio is None:
        return cells
    return (*cells, *row.baseline.cells(), *row.ratio.cells("x"))
