"""Latency is measured in turns and summarised by quartiles; no test here depends on a real clock."""

import gc
import io
import itertools
import json
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from keepk.checkpoint.parts import rng_state
from keepk.deploy.latency import WARM_UP, LatencyReport, LatencyRow, Spread, latency, summary, take_turns
from keepk.errors import KeepkError, TraceError
from strategies import mlp


class FakeClock:
    """A clock that advances only when a run tells it to."""

    now = 0

    def __call__(self):
        return self.now


def runner(clock, name, durations, calls):
    left = iter(durations)

    def run():
        calls.append(name)
        clock.now += next(left)

    return run


tables = st.integers(1, 3).flatmap(
    lambda width: st.lists(st.lists(st.integers(1, 9), min_size=width, max_size=width), min_size=1, max_size=8)
)


@given(rounds=tables, warm_up=st.integers(0, 3))
def test_every_run_has_its_turn_in_every_round_and_its_own_time(rounds, warm_up):
    """The oracle spells out the order: forwards in even rounds, backwards in odd ones; warm-up rounds are negative."""
    clock, calls, width = FakeClock(), list[int](), len(rounds[0])
    durations = [[1000] * warm_up + [taken[place] for taken in rounds] for place in range(width)]
    runs = [runner(clock, place, durations[place], calls) for place in range(width)]
    times = take_turns(runs, len(rounds), warm_up=warm_up, clock=clock)
    assert times == [[taken[place] for taken in rounds] for place in range(width)]
    forth = list(range(width))
    wanted = [forth if turn % 2 == 0 else forth[::-1] for turn in range(-warm_up, len(rounds))]
    assert calls == [place for order in wanted for place in order]


def test_a_clock_that_stands_still_gives_no_zero():
    assert take_turns([lambda: None], 2, clock=FakeClock()) == [[1, 1]]


def slow_quartile(values, share):
    """A quartile by linear interpolation between neighbours in sorted order."""
    ordered, place = sorted(map(Fraction, values)), Fraction(len(values) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (place - low))


def slow_spread(values):
    return pytest.approx([slow_quartile(values, Fraction(part, 4)) for part in (1, 2, 3)], rel=1e-12)


def quartiles(spread):
    return [spread.lower, spread.median, spread.upper]


@given(rounds=st.lists(st.tuples(st.integers(1, 10**9), st.integers(1, 10**9)), min_size=1, max_size=9))
def test_a_row_has_quartiles_in_milliseconds_and_of_the_ratios_of_pairs(rounds):
    ours, theirs = (list(times) for times in zip(*rounds, strict=True))
    row = summary("torch", 4, [ours, theirs])
    assert quartiles(row.model) == slow_spread([Fraction(taken, 10**6) for taken in ours])
    assert quartiles(row.baseline) == slow_spread([Fraction(taken, 10**6) for taken in theirs])
    assert quartiles(row.ratio) == slow_spread([Fraction(slow, fast) for fast, slow in rounds])
    alone = summary("torch", 4, [ours])
    assert (alone.model, alone.baseline, alone.ratio) == (row.model, None, None)


def test_model_and_baseline_alternate_on_every_batch_in_eval_and_inference_mode():
    calls = []
    nets = {"model": mlp((6, 3)), "baseline": mlp((6, 5, 3))}
    for name, net in nets.items():
        net.register_forward_hook(
            lambda module, inputs, _, name=name: calls.append(
                (name, len(inputs[0]), module.training, torch.is_inference_mode_enabled(), torch.get_num_threads())
            )
        )
    example = torch.randn(2, 6)
    report = latency(nets["model"], example, baseline=nets["baseline"], batches=(1, 5), repeats=4, threads=2)
    turns = WARM_UP + 4
    assert len(calls) == 2 * 2 * (1 + turns)
    for at, batch in enumerate((1, 5)):
        part = calls[at * 2 * (1 + turns) :][: 2 * (1 + turns)]
        assert {call[1:] for call in part} == {(batch, False, True, 2)}
        rounds = [(part[place][0], part[place + 1][0]) for place in range(2, len(part), 2)]
        assert all(set(pair) == set(nets) for pair in rounds)
        assert all(one == other[::-1] for one, other in itertools.pairwise(rounds))
    assert [(row.runtime, row.batch) for row in report.rows] == [("torch", 1), ("torch", 5)]
    assert (report.model, report.baseline, report.device) == ("Sequential", "Sequential", "cpu")
    assert (report.threads, report.repeats) == (2, 4)
    assert all(row.model.lower <= row.model.median <= row.model.upper for row in report.rows)


class Breaking(nn.Module):
    """A model that fails for four or more rows."""

    def __init__(self):
        super().__init__()
        self.inner, self.frozen = nn.Linear(6, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        if len(x) > 3:
            raise RuntimeError("too many rows")
        return self.frozen(self.inner(x))


def surroundings(net):
    modes = [module.training for module in net.modules()]
    return modes, torch.get_num_threads(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), gc.isenabled()


def test_everything_is_as_before_also_after_a_failure():
    net = Breaking()
    net.frozen.eval()
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    before = surroundings(net)
    latency(net, torch.randn(2, 6), batches=(1, 3), repeats=1, threads=2)
    assert surroundings(net) == before
    with pytest.raises(
        TraceError, match=r"Breaking: its forward failed on the example with 8 rows \(RuntimeError: too"
    ):
        latency(net, torch.randn(2, 6), batches=(1, 8), repeats=1, threads=2)
    assert surroundings(net) == before
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())


class Counting(nn.Module):
    """Writes to buffers in several ways, has a BatchNorm that is always in train mode, and draws random numbers."""

    calls: torch.Tensor
    strange: torch.Tensor
    total: torch.Tensor

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("last", None)
        self.register_buffer("wide", torch.ones(3, 1).expand(3, 4))
        self.register_buffer("few", torch.eye(3).to_sparse())
        with torch.inference_mode():
            self.register_buffer("strange", torch.ones(3))

    def forward(self, x):
        self.norm.train()
        seen = self.norm(self.inner(x)) + torch.rand(3) + random.random() + np.random.default_rng().random()
        self.calls += 1
        self.strange += 1
        self.total = self.total + seen.sum(0)
        self.last = seen
        if not hasattr(self, "made"):
            self.register_buffer("made", seen)
        return seen + np.random.random()


def test_buffers_and_random_states_are_as_before_also_after_a_failure():
    net, baseline = Counting(), Counting()
    objects = [dict(module._buffers) for module in net.modules()]
    values = {name: buffer.clone() for name, buffer in net.named_buffers()}
    states = rng_state()
    latency(net, torch.randn(4, 6, generator=torch.Generator()), baseline=baseline, batches=(2, 3), repeats=2)
    with pytest.raises(TraceError):
        latency(net, torch.ones(2, 5), batches=2, repeats=1)
    assert torch.equal(rng_state()["torch"], states["torch"])
    assert rng_state()["python"] == states["python"]
    assert np.array_equal(rng_state()["numpy"]["state"]["key"], states["numpy"]["state"]["key"])
    assert rng_state()["numpy"]["state"]["pos"] == states["numpy"]["state"]["pos"]
    for module, own in zip(net.modules(), objects, strict=True):
        assert list(module._buffers) == list(own)
        assert all(module._buffers[name] is buffer for name, buffer in own.items())
    assert all(torch.equal(buffer.to_dense(), values[name].to_dense()) for name, buffer in net.named_buffers())


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"model": torch.relu}, TraceError, "got builtin_function_or_method as the model"),
        ({"baseline": 3}, TraceError, "got int as the baseline"),
        ({"model": nn.ReLU}, TraceError, r"latency: got the class ReLU. Pass ReLU\(\), a model."),
        ({"example": "x"}, TraceError, "example: got str"),
        ({"example": (torch.tensor(1.0),)}, TraceError, "batch size cannot be changed. Let the first dim be the batch"),
        ({"example": (2, 6)}, TraceError, r"example: got the shape \(2, 6\). Pass a tensor, not a shape."),
        ({"example": (torch.ones(2, 6), torch.ones(2))}, TraceError, "other batches. A tuple is several arguments"),
        ({"example": torch.ones(2, 5)}, TraceError, "failed on the example with 1 rows .*cannot be multiplied"),
        ({"batches": ()}, KeepkError, r"batches=\(\). Pass one or more ints"),
        ({"batches": (1, 0)}, KeepkError, r"batches=\(1, 0\)"),
        ({"batches": (1.0,)}, KeepkError, r"batches=\(1.0,\)"),
        ({"batches": 0}, KeepkError, "batches=0. Pass one or more ints of at least 1"),
        ({"batches": True}, KeepkError, "batches=True. Pass one or more"),
        ({"batches": 2.5}, KeepkError, "batches=2.5. Pass one or more"),
        ({"batches": None}, KeepkError, "batches=None. Pass one or more"),
        ({"repeats": 0}, KeepkError, "repeats=0. Pass an int of at least 1"),
        ({"repeats": True}, KeepkError, "repeats=True"),
        ({"threads": 0}, KeepkError, "threads=0. Pass an int of at least 1, or None"),
        ({"runtimes": "tensorrt"}, KeepkError, r"runtimes=\('tensorrt',\). Choose from torch, onnxruntime"),
        ({"runtimes": ()}, KeepkError, r"runtimes=\(\)"),
    ],
)
def test_bad_input_is_refused(options, error, match):
    given = {"model": nn.Linear(6, 3), "example": torch.ones(2, 6), "batches": (1,), "repeats": 1, **options}
    with pytest.raises(error, match=match):
        latency(given.pop("model"), given.pop("example"), **given)


def test_one_batch_needs_no_list():
    report = latency(nn.Linear(6, 3), torch.ones(2, 6), batches=4, repeats=1)
    assert [row.batch for row in report.rows] == [4]


def test_onnxruntime_measures_the_exported_model_on_every_batch():
    calls = []
    net = nn.Linear(6, 3)
    net.register_forward_hook(lambda *_: calls.append(torch.is_inference_mode_enabled()))
    report = latency(net, {"input": torch.randn(2, 6)}, batches=(3,), repeats=2, runtimes=("onnxruntime", "torch"))
    assert [(row.runtime, row.batch) for row in report.rows] == [("onnxruntime", 3), ("torch", 3)]
    assert sum(calls) == 1 + WARM_UP + 2, "torch's own turns; those of onnxruntime call no module"


REPORT = LatencyReport(
    model="Small",
    baseline="Big",
    device="cpu",
    threads=1,
    repeats=30,
    rows=(LatencyRow("torch", 1, Spread(0.5, 0.75, 1.0), Spread(1.0, 1.5, 2.0), Spread(1.9, 2.0, 2.1)),),
)
PRINTED = """\
Small: ms per batch on cpu, 1 thread, median and quartiles of 30
runtime  batch    ms  quartiles  baseline ms  quartiles  times as fast  quartiles
-------  -----  ----  ---------  -----------  ---------  -------------  ---------
torch        1  0.75    0.5 - 1          1.5      1 - 2             2x  1.9 - 2.1"""


def words(text):
    return [word for word in text.split() if set(word) - set("-─")]


def test_the_report_prints_itself_plainly_richly_and_as_json():
    assert str(REPORT) == repr(REPORT) == PRINTED
    assert REPORT._repr_html_() == REPORT.table()._repr_html_()
    console = Console(file=(written := io.StringIO()), width=120)
    console.print(REPORT)
    assert words(written.getvalue()) == words(PRINTED)
    data = REPORT.data()
    assert json.loads(REPORT.json()) == data
    assert data["rows"][0]["ratio"] == {"lower": 1.9, "median": 2.0, "upper": 2.1}
    row = data["rows"][0]
    spreads = {key: Spread(**row[key]) for key in ("model", "baseline", "ratio")}
    assert LatencyReport(**{**data, "rows": (LatencyRow(**{**row, **spreads}),)}) == REPORT


def test_without_a_baseline_the_table_has_no_columns_for_it():
    alone = LatencyReport("Small", None, "cpu", 2, 3, (LatencyRow("torch", 1, Spread(1.0, 2.0, 3.0), None, None),))
    assert alone.table().columns == ("runtime", "batch", "ms", "quartiles")
    assert "2 threads" in str(alone)
