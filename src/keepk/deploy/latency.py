"""`latency`: measure how long a forward pass takes, with the model and its baseline taking turns.

A machine that gets slower while it is measured (heat, other processes) would favour the model that ran first. So the
two alternate, and the speed-up is computed from pairs of runs that were next to each other.
"""

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

from keepk.deploy.onnx import export_onnx
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
from keepk.model.example import Example, likely_slip, not_a_model
from keepk.model.names import named_tensors, unwrap
from keepk.plan.names import shown
from keepk.reports.tables import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

RUNTIMES = ("torch", "onnxruntime")
WARM_UP = 5  # rounds that are not counted: the first ones allocate memory, choose kernels and may compile
NANOSECONDS = 1e6  # per millisecond
Run = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """The quartiles of several measurements.

    Attributes:
        lower: The first quartile.
        median: The second.
        upper: The third.
    """

    lower: float
    median: float
    upper: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """The quartiles of the values, interpolated linearly.

        >>> Spread.of([4.0, 1.0, 2.0, 3.0])
        Spread(lower=1.75, median=2.5, upper=3.25)
        """
        return Spread(*map(float, np.quantile(values, (0.25, 0.5, 0.75))))

    def cells(self, unit: str = "") -> tuple[str, str]:
        """The median, and the range from the first to the third quartile, as text.

        Args:
            unit: Appended to the median.
        """
        return f"{self.median:.3g}{unit}", f"{self.lower:.3g} - {self.upper:.3g}"


@dataclass(frozen=True)
class LatencyRow:
    """The times of one batch size in one runtime, in milliseconds.

    Attributes:
        runtime: ``"torch"`` or ``"onnxruntime"``.
        batch: The batch size.
        model: The model's times.
        baseline: The baseline's times; None without a baseline.
        ratio: The speed-up over the baseline: baseline / model of each round, in which both ran once. If its quartiles
            include 1, no speed-up was measurable.
    """

    runtime: str
    batch: int
    model: Spread
    baseline: Spread | None
    ratio: Spread | None


@dataclass(frozen=True)
class LatencyReport:
    """The result of `keepk.latency`, in plain values. It prints as a table, in notebooks and on a rich console too.

    Attributes:
        model: The name of the model's class.
        baseline: The name of the baseline's class; None without a baseline.
        device: The device, or several.
        threads: How many threads an operation could use.
        repeats: How often each was measured.
        rows: One row per runtime and batch size.
    """

    model: str
    baseline: str | None
    device: str
    threads: int
    repeats: int
    rows: tuple[LatencyRow, ...]

    def json(self) -> str:
        """All attributes, as JSON."""
        return json.dumps(asdict(self), indent=2)

    def data(self) -> dict[str, Any]:
        """All attributes, as plain dicts, lists, strings and numbers."""
        plain: dict[str, Any] = json.loads(self.json())
        return plain

    def table(self) -> Table:
        """A table with one row per runtime and batch size: medians with quartiles beside them."""
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
    """Measure forward passes in eval mode without gradients, of a model and optionally of a baseline.

    In every round both run once, and the one that runs first alternates, so that anything that slows the machine down
    affects both. On a GPU each run waits until all work is done. Modes, buffers, threads, gradients and random states
    are restored afterwards.

    Args:
        model: The model. It is measured as passed, including a `torch.compile` wrapper.
        example: A tensor, a tuple of positional arguments, or a dict of keyword arguments; the first dim is the batch.
        baseline: A model to compare with, such as the dense one; it takes the same example.
        batches: The batch sizes to measure, one or several; the example's rows are repeated as needed.
        repeats: How often each is measured, after a warm-up.
        threads: How many threads an operation may use; None keeps torch's setting.
        runtimes: ``"torch"``, ``"onnxruntime"`` (on the CPU, through `export_onnx` for each batch size), or both.

    Returns:
        A report with one row per runtime and batch size: quartiles of the times and of the speed-up.

    Raises:
        TraceError: An argument is not a model, or forward fails on the example.
        KeepkError: A number or runtime is invalid, a package is missing, or onnxruntime is asked for on a GPU.
        FileError: The model cannot be exported for onnxruntime.

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
    """Time several functions in turns: in order in even rounds, in reverse order in odd ones.

    Args:
        runs: The functions.
        repeats: The number of rounds.
        warm_up: The number of rounds before, which are not counted.
        clock: Returns nanoseconds.

    Returns:
        For each function, its time in each round.
    """
    times: list[list[int]] = [[] for _ in runs]
    for turn in range(-warm_up, repeats):
        places = range(len(runs))
        for place in places if turn % 2 == 0 else reversed(places):
            start = clock()
            runs[place]()
            taken = clock() - start
            if turn >= 0:
                times[place].append(max(1, taken))  # a coarse clock may not advance, and ratios divide by the time
    return times


def summary(runtime: str, batch: int, times: Sequence[Sequence[int]]) -> LatencyRow:
    """A row of the report, from the times in nanoseconds of the model and, if there is one, of the baseline."""
    spreads = [Spread.of([taken / NANOSECONDS for taken in each]) for each in times]
    if len(times) == 1:
        return LatencyRow(runtime, batch, spreads[0], None, None)
    # Ratios within a round, because both runs of a round had the same conditions, which may change between rounds.
    ratios = [theirs / ours for ours, theirs in zip(*times, strict=True)]
    return LatencyRow(runtime, batch, spreads[0], spreads[1], Spread.of(ratios))


def _measured(
    runtime: str, models: Sequence[nn.Module], example: Example, batch: int, repeats: int, threads: int
) -> LatencyRow:
    with ExitStack() as stack:
        if runtime == "torch":
            runs = [torch_run(model, example) for model in models]
        else:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            runs = [onnx_run(model, example, folder / f"{at}.onnx", threads) for at, model in enumerate(models)]
        stack.enter_context(torch.inference_mode())
        for model, run in zip(models, runs, strict=True):
            try_out(model, run, example, batch)
        stack.enter_context(no_collection())  # only now, because exporting and trying out leave garbage to collect
        return summary(runtime, batch, take_turns(runs, repeats))


def torch_run(model: nn.Module, example: Example) -> Run:
    """A function that runs the model once, and waits for its end."""
    busy = [device for device in _devices([model], example) if device.type != "cpu"]

    def run() -> None:
        model(*example.arguments, **example.by_name)
        for device in busy:
            torch.accelerator.synchronize(device)  # kernels run asynchronously, so wait for their end

    return run


def onnx_run(model: nn.Module, example: Example, path: Path, threads: int) -> Run:
    """Export the model, and return a function that runs the file once."""
    export_onnx(model, (example.arguments or example.by_name), path, dynamic_batch=False)
    session = open_session(path, threads)
    arrays = feeds(session, unwrap(model), example)
    return lambda: session.run(None, arrays)


def try_out(model: nn.Module, run: Run, example: Example, batch: int) -> None:
    """Run once; refuse an example that forward does not take."""
    try:
        run()
    except Exception as error:
        raise TraceError(
            f"model {type(unwrap(model)).__name__}: its forward failed on the example with {batch} rows "
            f"({type(error).__name__}: {error}). Pass an example whose first dim is the batch, or other batches."
            f"{likely_slip(model, example)}"
        ) from error


def _models(model: nn.Module, baseline: nn.Module | None) -> list[nn.Module]:
    models = [model] if baseline is None else [model, baseline]
    for given, word in zip(models, ("model", "baseline"), strict=False):
        if not isinstance(given, nn.Module):
            raise TraceError(f"latency: {not_a_model(given, word)}")
    # These wrappers would communicate with other processes or devices during a measurement.
    return [each.module if isinstance(each, DistributedDataParallel | DataParallel) else each for each in models]


def _devices(models: Sequence[nn.Module], example: Example) -> list[torch.device]:
    tensors = [tensor for model in models for _, tensor, _ in named_tensors(model)]
    return list(dict.fromkeys(tensor.device for tensor in (*tensors, *tensors_of(example))))


def _sizes(batches: int | Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(batches) if isinstance(batches, Sequence) else (batches,)
    if not sizes or not all(map(_is_count, sizes)):
        raise KeepkError(f"latency: batches={shown(batches)}. Pass one or more ints of at least 1, such as (1, 32).")
    return sizes


def _refuse_numbers(repeats: int, threads: int | None) -> None:
    if not _is_count(repeats):
        raise KeepkError(f"latency: repeats={shown(repeats)}. Pass an int of at least 1.")
    if threads is not None and not _is_count(threads):
        raise KeepkError(
            f"latency: threads={shown(threads)}. Pass an int of at least 1, or None to keep torch's setting."
        )


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
        raise KeepkError(f"latency: onnxruntime runs on the CPU, but the model is on {elsewhere[0]}. Move it.")


def _cells(row: LatencyRow) -> tuple[str, ...]:
    cells = (row.runtime, str(row.batch), *row.model.cells())
    if row.baseline is None or row.ratio is None:
        return cells
    return (*cells, *row.baseline.cells(), *row.ratio.cells("x"))
