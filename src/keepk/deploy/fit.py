"""`fit`: find the budget in MACs with which a model meets a latency on this machine.

Bisection over the budget shrinks copies of the model and measures each of them in turns with the dense one. Latency
does not quite fall with MACs, because kernels like some widths more than others, so only measured models are chosen:

>>> def measure(macs):  # a kernel that takes steps of 100 MACs
...     return Spread(*[-(-macs // 100) * 1.0] * 3)
>>> measured = search(least=50, dense=1_000, limit=5.0, measure=measure, resolution=1)
>>> max(bound for bound, spread in measured.items() if spread.median <= 5)
500

The largest model that meets the latency is measured again in a fresh process, where nothing of this one is warm. If it
misses the latency there, the search goes on below it.
"""

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from keepk.cut.shrink import shrink
from keepk.deploy.fit_report import Fit, FitPoint, with_budget
from keepk.deploy.latency import NANOSECONDS, RUNTIMES, Run, Spread, onnx_run, take_turns, torch_run, try_out
from keepk.deploy.runtime import (
    feeds,
    no_collection,
    open_session,
    random_state_kept,
    require_packages,
    rows_of,
    threads_set,
    with_rows,
)
from keepk.errors import KeepkError, SpaceError
from keepk.graph.graph import Graph
from keepk.metrics.layers import metric_name, traits_of
from keepk.model.edits import Indices
from keepk.model.example import Example, TraceInputs, not_a_model
from keepk.model.names import unwrap
from keepk.plan.budgets import Budget
from keepk.plan.names import shown
from keepk.plan.spaces import ChannelSpace, Space
from keepk.run.budgets import FoundSpaces, trial
from keepk.run.checks import listed_spaces, traced_channels
from keepk.run.choosing import RunBudget, RunCosts

RESOLUTION = 0.01  # of the dense model's MACs: budgets that are closer are not told apart
TRIES = 4  # of the confirmation in a fresh process
Runtime = Literal["torch", "onnxruntime"]
Measure = Callable[[int], Spread]


def fit(
    model: nn.Module,
    spaces: Space | Sequence[Space],
    example: Any,
    *,
    latency_ms: float,
    batch: int = 1,
    threads: int = 1,
    runtime: Runtime = "torch",
    repeats: int = 30,
) -> Fit:
    """Find the largest budget in MACs with which a model meets a latency on this machine.

    The model is not changed: copies are shrunk, as a one-shot `Pruner` with that budget would shrink it, and measured
    in turns with the dense model. The result is confirmed in a fresh process. Give its `spaces` to a `Pruner`, which
    reaches the same MACs after training; as the ranking changes, widths and with them the latency may differ a little.

    Args:
        model: The dense model.
        spaces: One or more of ``keepk.channels(...)`` without a number. Several share one budget. Their metrics must
            read weights alone, since copies have no gradients.
        example: An input, as for `keepk.trace`; the first dim is the batch.
        latency_ms: The median time of a forward pass in eval mode, in milliseconds, that is to be met.
        batch: The batch size; the example's rows are repeated or left out as needed.
        threads: How many threads an operation may use.
        runtime: ``"torch"``, or ``"onnxruntime"`` on the CPU, through `export_onnx`.
        repeats: How often each model is measured, after a warm-up.

    Returns:
        A `Fit`: the spaces with their budget, and the curve that was measured. It prints as a table.

    Raises:
        KeepkError: A number is invalid, the smallest model does not meet the latency, the dense one already does, or
            the machine is too noisy to tell them apart. The message names the measured numbers.
        SpaceError: A space has a number of its own, or matches nothing.
        TraceError: The example does not fit the model, or the model cannot be traced.
    """
    if not isinstance(model, nn.Module):
        raise KeepkError(f"fit: {not_a_model(model)}")
    _refuse_numbers(latency_ms, batch=batch, threads=threads, repeats=repeats)
    if not isinstance(runtime, str) or runtime not in RUNTIMES:
        raise KeepkError(f"fit: runtime={shown(runtime)}. Choose from {', '.join(RUNTIMES)}.")
    if runtime == "onnxruntime":
        require_packages("fit", "onnx", "onnxscript", "onnxruntime")
    chosen = _checked_spaces(spaces)
    candidates = Candidates(unwrap(model), chosen, example)
    with ExitStack() as stack:
        stack.enter_context(threads_set(threads))
        stack.enter_context(random_state_kept())
        folder = Path(stack.enter_context(TemporaryDirectory()))
        bench = Bench(candidates, with_rows(Example.of(example), batch), runtime, threads, repeats, folder)
        macs, confirmed, notes = found(candidates, latency_ms, bench.measure, bench.confirm)
    curve = tuple(sorted(bench.points.values(), key=lambda it: -it.macs))
    return Fit(
        spaces=with_budget(chosen, macs),
        macs=macs,
        latency_ms=float(latency_ms),
        curve=curve,
        confirmed=confirmed,
        runtime=runtime,
        batch=batch,
        threads=threads,
        repeats=repeats,
        notes=tuple(notes),
    )


class Candidates:
    """The models that a budget can lead to, as sets of removed units of one traced copy.

    Attributes:
        dense: The MACs of the dense model, per sample.
        least: The MACs of the smallest model that the floors allow.
    """

    def __init__(self, model: nn.Module, spaces: Sequence[ChannelSpace], example: Any) -> None:
        given = Example.of(example)
        rows_of(given)
        self._model = copy.deepcopy(model).eval()
        names = tuple(it.name for it in spaces)
        inputs = TraceInputs.of(example, None, None, "check", "check")
        graph, self._members = traced_channels(self._model, inputs, with_budget(spaces, 2))
        assert graph is not None  # there is at least one channel space
        self._graph: Graph = graph
        self._costs = RunCosts(self._model, graph, example)
        asked = Budget("macs", 2)
        self.dense = self._costs.dense("fit", asked)
        self._budget = RunBudget(names[0] if len(names) == 1 else "macs", names, asked, self.dense, 2)
        chooser = self._chooser(self.dense)
        self.least = chooser.least(self._budget)
        self._known = dict[int, tuple[Indices, int]]()

    def reached(self, bound: int) -> int:
        """The MACs of the model that a budget leads to."""
        return self._chosen(bound)[1]

    def kept(self, bound: int) -> dict[str, int]:
        """By space, the channels that a budget leaves."""
        units = self._chosen(bound)[0]
        return {name: it.total - int(np.isin(it.units, units).sum()) for name, it in self._members.items()}

    def model(self, bound: int) -> nn.Module:
        """A copy of the model, shrunk to a budget, in eval mode."""
        model, graph = copy.deepcopy((self._model, self._graph))
        units = self._chosen(bound)[0]
        if len(units):
            shrink(model, graph, units.tolist())
        return model

    def _chosen(self, bound: int) -> tuple[Indices, int]:
        if bound not in self._known:
            chooser = self._chooser(bound)
            assert chooser.within(self._budget_of(bound), 0)
            self._known[bound] = np.flatnonzero(chooser.dead), self._costs.of("macs", chooser.dead)
        return self._known[bound]

    def _budget_of(self, bound: int) -> RunBudget:
        it = self._budget
        return RunBudget(it.name, it.spaces, it.asked, it.dense, bound, (bound,))

    @torch.no_grad()
    def _chooser(self, bound: int) -> Any:
        found = FoundSpaces(self._model, self._graph, {}, self._members)
        return trial(found, {}, [self._budget_of(bound)], self._costs)


@dataclass
class Bench:
    """Measures candidates in turns with the dense model, and one of them again in a fresh process."""

    candidates: Candidates
    example: Example
    runtime: Runtime
    threads: int
    repeats: int
    folder: Path

    def __post_init__(self) -> None:
        self.points = dict[int, FitPoint]()  # by MACs
        self._dense: Run | None = None

    def measure(self, bound: int) -> Spread:
        """The quartiles of the times of the model that a budget leads to, in milliseconds."""
        macs = self.candidates.reached(bound)
        if macs not in self.points:
            self._dense = self._dense or self._run(self.candidates.dense)
            run = self._run(bound)
            with torch.inference_mode(), no_collection():
                ours, theirs = take_turns([run, self._dense], self.repeats)
            spreads = (_milliseconds(ours), _milliseconds(theirs))
            kept, share = self.candidates.kept(bound), macs / self.candidates.dense
            self.points[macs] = FitPoint(macs, share, kept, *spreads)
        return self.points[macs].ms

    def _run(self, bound: int) -> Run:
        model = self.candidates.model(bound)
        if self.runtime == "torch":
            run = torch_run(model, self.example)
        else:
            run = onnx_run(model, self.example, self.folder / f"{bound}.onnx", self.threads)
        with torch.inference_mode():
            try_out(model, run, self.example, rows_of(self.example))
        return run

    def confirm(self, bound: int) -> Spread | str:
        """The times in a fresh process; if the model cannot be sent there, the reason."""
        model, path = self.candidates.model(bound), self.folder / "fresh"
        if self.runtime == "onnxruntime":
            onnx = self.folder / "fresh.onnx"
            run = onnx_run(model, self.example, onnx, self.threads)
            run()
            arrays = feeds(open_session(onnx, self.threads), model, self.example)
            content: Any = ("onnxruntime", str(onnx), arrays, self.threads, self.repeats)
        else:
            own = {type(it).__module__ for it in model.modules()}
            if "__main__" in own:
                return "its class is defined in the script that runs, which a fresh process cannot import"
            content = ("torch", model, self.example, self.threads, self.repeats)
        try:
            path.write_bytes(pickle.dumps(content))
        except Exception as error:  # pickle raises anything, depending on the object
            return f"the model cannot be pickled ({type(error).__name__}: {error})"
        return _in_fresh_process(path)


def found(
    candidates: Candidates, latency_ms: float, measure: Measure, confirm: Callable[[int], Spread | str]
) -> tuple[int, Spread | None, list[str]]:
    """Search for the largest model that meets a latency, and confirm it.

    Args:
        candidates: The models.
        latency_ms: The latency.
        measure: Measures the model of a budget.
        confirm: Measures it in a fresh process, or says why it cannot.

    Returns:
        Its MACs, its times in a fresh process, and notes on noise.
    """
    dense, least = measure(candidates.dense), measure(candidates.least)
    _refuse_out_of_reach(candidates, latency_ms, dense, least)
    resolution = max(1, round(RESOLUTION * candidates.dense))
    top, refused = candidates.dense, list[str]()
    for _ in range(TRIES):
        measured = search(least=candidates.least, dense=top, limit=latency_ms, measure=measure, resolution=resolution)
        bound = max(it for it, spread in measured.items() if spread.median <= latency_ms)
        macs = candidates.reached(bound)
        confirmed = confirm(bound)
        if isinstance(confirmed, str):
            return macs, None, [f"not confirmed in a fresh process: {confirmed}", *_noise(measured, latency_ms)]
        if confirmed.median <= latency_ms:
            return macs, confirmed, [*refused, *_noise(measured, latency_ms)]
        refused.append(f"macs={macs:,} took {confirmed.median:.3g} ms in a fresh process, and was given up")
        if macs <= candidates.least:
            break
        top = macs  # the search goes on below it
    raise KeepkError(
        f"fit: latency_ms={latency_ms:g}: {'; '.join(refused)}. The machine is too noisy, or the latency too close to "
        f"the {least.median:.3g} ms of the smallest model. Close other programs, pass more repeats=, or allow more."
    )


def search(*, least: int, dense: int, limit: float, measure: Measure, resolution: int) -> dict[int, Spread]:
    """Bisect over budgets between one that meets a limit and one that does not.

    Args:
        least: The smallest budget; its median has to be within the limit.
        dense: The largest one, which is not within the limit.
        limit: The limit, in milliseconds.
        measure: Measures a budget.
        resolution: The search stops when the two budgets are no further apart.

    Returns:
        By measured budget, its times.
    """
    measured = {least: measure(least)}
    low, high = least, dense
    while high - low > resolution:
        middle = (low + high) // 2
        measured[middle] = measure(middle)
        if measured[middle].median <= limit:
            low = middle
        else:
            high = middle
    return measured


def _refuse_out_of_reach(candidates: Candidates, latency_ms: float, dense: Spread, least: Spread) -> None:
    """Refuse a latency that no model meets or that every model meets, and a machine that cannot tell the two apart."""
    times = (
        f"the dense model takes {dense.median:.3g} ms (quartiles {dense.lower:.3g} to {dense.upper:.3g}), the smallest "
        f"that the floors allow, with {candidates.least:,} of {candidates.dense:,} MACs, {least.median:.3g} ms "
        f"({least.lower:.3g} to {least.upper:.3g})"
    )
    if least.median > latency_ms:
        raise KeepkError(
            f"fit: latency_ms={latency_ms:g} cannot be met: {times}. Allow more, a lower layer_floor= or round_to=, or "
            f"select more layers."
        )
    if dense.median <= latency_ms:
        raise KeepkError(f"fit: latency_ms={latency_ms:g} is met without pruning: {times}. Allow less.")
    if least.upper >= dense.lower:
        raise KeepkError(
            f"fit: the noise is larger than the difference: {times}. Close other programs, or pass more repeats=."
        )


def _noise(measured: dict[int, Spread], limit: float) -> list[str]:
    """A note if quartiles of the chosen model reach beyond the limit, or those of the next larger one below it."""
    bound = max(it for it, spread in measured.items() if spread.median <= limit)
    larger = sorted(it for it in measured if it > bound)
    spreads = [measured[it] for it in (bound, *larger[:1])]
    if not any(it.lower <= limit < it.upper for it in spreads):
        return []
    ranges = " and ".join(f"{it.lower:.3g} to {it.upper:.3g} ms" for it in spreads)
    return [
        f"noise: {limit:g} ms lies within the quartiles ({ranges}) of the chosen model or of the next larger one that "
        f"was measured, so another run may choose a neighbour"
    ]


def _milliseconds(times: Sequence[int]) -> Spread:
    return Spread.of([taken / NANOSECONDS for taken in times])


def _in_fresh_process(path: Path) -> Spread | str:
    # The parent's own pickle, in a folder that only this user can read: no file from elsewhere is unpickled.
    code = "import sys; from keepk.deploy.fit import fresh_times; fresh_times(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(it for it in sys.path if it)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"the model did not run there ({reason})"
    return _milliseconds(json.loads(done.stdout.splitlines()[-1]))


def fresh_times(path: str) -> None:
    """Measure a pickled model, or an ONNX file, and print the nanoseconds of each run; the fresh process of `fit`."""
    runtime, model, given, threads, repeats = pickle.loads(Path(path).read_bytes())
    with threads_set(threads), torch.inference_mode():
        if runtime == "torch":
            run = torch_run(model, given)
        else:
            session = open_session(Path(model), threads)

            def run() -> object:
                return session.run(None, given)

        with no_collection():
            (times,) = take_turns([run], repeats)
    print(json.dumps(times))


def _refuse_numbers(latency_ms: object, **counts: object) -> None:
    is_number = isinstance(latency_ms, int | float) and not isinstance(latency_ms, bool)
    if not is_number or not isfinite(latency_ms) or latency_ms <= 0:  # type: ignore[arg-type, operator]  # a number
        raise KeepkError(f"fit: latency_ms={shown(latency_ms)}. Pass milliseconds, a number above 0.")
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise KeepkError(f"fit: {name}={shown(value)}. Pass an int of at least 1.")


def _checked_spaces(spaces: Space | Sequence[Space]) -> list[ChannelSpace]:
    listed = [spaces] if isinstance(spaces, Space) else spaces
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(it, Space) for it in listed):
        raise SpaceError(f"fit: spaces={shown(spaces)}. Pass one or more of keepk.channels(...), without a number.")
    weights, found = listed_spaces(listed)
    if weights:
        raise SpaceError(
            f"space {weights[0].name!r}: keepk.weights, whose zeros do not make a model faster. Pass channel spaces to "
            f"fit, and prune weights in a later phase of the Pruner."
        )
    for it in found:
        given = [f"{name}={value}" for name, value in (("keep", it.keep), ("prune", it.prune)) if value is not None]
        given += [str(it.budget)] if it.budget is not None else []
        if given:
            raise SpaceError(f"space {it.name!r}: got {given[0]}, but fit finds the number. Leave it out.")
        if it.metric is not None and traits_of(it.metric).needs != ("weights",):
            raise SpaceError(
                f"space {it.name!r}: metric {metric_name(it.metric)} reads more than weights, and the copies that fit "
                f"measures have no gradients or statistics. Call fit with another metric, such as keepk.metrics.l2, "
                f"and pass macs=fit(...).macs to your own space."
            )
    return found
