"""`keepk.fit`: the search against all candidates, with injected times; real runs whose asserts ignore the clock."""

import copy
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import keepk
from keepk.deploy.fit import Bench, Candidates, fit, found, search
from keepk.deploy.fit_report import with_budget
from keepk.deploy.latency import Spread
from keepk.errors import KeepkError, SpaceError
from keepk.model.costs import model_costs
from keepk.model.example import Example
from reported_runs import rendered
from saved_models import looks, unchanged

L2 = keepk.metrics.l2


def network():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4)]
    return nn.Sequential(*layers)


EXAMPLE = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))


def spaces(**options):
    return [keepk.channels("*", **{"name": "all", "metric": L2, "layer_floor": 1, **options})]


def exactly(ms):
    return Spread(ms, ms, ms)


# The search, with times that do not come from a clock


@given(
    steps=st.lists(st.integers(0, 5), min_size=2, max_size=300),
    limit=st.integers(0, 400),
    resolution=st.integers(1, 20),
)
def test_where_time_falls_with_cost_it_finds_the_largest_of_all_candidates(steps, limit, resolution):
    """The oracle tries all budgets from the largest one down."""
    times = [sum(steps[: place + 1]) for place in range(len(steps))]  # by budget, never falling
    least, dense = 0, len(times) - 1
    if times[least] > limit or times[dense] <= limit:
        return  # refused before the search
    asked = list[int]()

    def measure(bound):
        asked.append(bound)
        return exactly(times[bound])

    measured = search(least=least, dense=dense, limit=limit, measure=measure, resolution=resolution)
    best = max(bound for bound, spread in measured.items() if spread.median <= limit)
    largest = next(bound for bound in range(dense, -1, -1) if times[bound] <= limit)
    assert largest - resolution < best <= largest
    assert best == largest or resolution > 1
    assert len(asked) <= 2 + (dense - least).bit_length()


@given(times=st.lists(st.integers(0, 9), min_size=3, max_size=60), limit=st.integers(0, 9))
def test_whatever_the_times_are_the_result_was_measured_and_meets_the_limit(times, limit):
    times[0], times[-1] = 0, 10
    measured = search(least=0, dense=len(times) - 1, limit=limit, measure=lambda it: exactly(times[it]), resolution=1)
    best = max(bound for bound, spread in measured.items() if spread.median <= limit)
    assert times[best] <= limit
    assert best + 1 == len(times) - 1 or times[best + 1] > limit  # the next larger one does not meet it


@pytest.fixture(scope="module")
def candidates():
    return Candidates(network(), spaces(), EXAMPLE)


def by_macs(candidates):
    """One microsecond per MAC."""
    return lambda bound: exactly(candidates.reached(bound) / 1_000)


def test_candidates_are_what_a_pruner_with_that_budget_leaves(candidates):
    dense = model_costs(network(), EXAMPLE).macs
    assert candidates.dense == dense
    assert candidates.least == 8 + 1 + 4
    for bound in (dense, dense - 1, dense // 2, 200, candidates.least):
        model, reached = candidates.model(bound), candidates.reached(bound)
        assert model_costs(model, EXAMPLE).macs == reached <= bound
        assert not model.training
        if bound < dense:
            other = network()
            pruner = keepk.Pruner(other, with_budget(spaces(), reached), example=EXAMPLE)
            pruner.step()
            assert pruner.kept == candidates.kept(bound)
            theirs = other.state_dict()
            assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())


def test_the_largest_model_that_meets_it_is_found_and_confirmed(candidates):
    for limit in (0.013, 0.4, 1.0, 1.6):
        macs, confirmed, notes = found(candidates, limit, by_macs(candidates), by_macs(candidates))
        assert macs <= 1_000 * limit
        tolerance = candidates.dense // 100
        more = candidates.reached(min(macs + tolerance + 50, candidates.dense))  # a channel has up to 34 MACs
        assert more > 1_000 * limit
        assert confirmed == exactly(macs / 1_000)
        assert notes == []


def test_a_latency_that_a_fresh_process_misses_is_given_up_for_a_lower_one(candidates):
    confirmed = list[int]()

    def slower(bound):
        confirmed.append(bound)
        return exactly(candidates.reached(bound) / 900)

    macs, spread, notes = found(candidates, 1.0, by_macs(candidates), slower)
    assert spread is not None
    assert macs / 900 == spread.median <= 1.0
    assert len(confirmed) == len(notes) + 1 > 1
    assert "in a fresh process, and was given up" in notes[0]


def test_a_fresh_process_that_never_meets_it_is_an_error_with_numbers(candidates):
    words = r"fit: latency_ms=1: macs=[\d,]+ took 5 ms in a fresh process, and was given up; .*too noisy, or"
    with pytest.raises(KeepkError, match=words):
        found(candidates, 1.0, by_macs(candidates), lambda _: exactly(5.0))


def test_a_model_that_cannot_be_sent_is_said(candidates):
    macs, confirmed, notes = found(candidates, 1.0, by_macs(candidates), lambda _: "it is a lambda")
    assert macs <= 1_000
    assert confirmed is None
    assert notes == ["not confirmed in a fresh process: it is a lambda"]


def test_latencies_out_of_reach_are_errors_with_numbers(candidates):
    with pytest.raises(
        KeepkError,
        match=r"fit: latency_ms=0\.001 cannot be met: the dense model takes 1\.64 ms .* 13 of 1,640 MACs, 0\.013 ms",
    ):
        found(candidates, 0.001, by_macs(candidates), by_macs(candidates))
    with pytest.raises(KeepkError, match=r"fit: latency_ms=2 is met without pruning: the dense model takes 1\.64 ms"):
        found(candidates, 2.0, by_macs(candidates), by_macs(candidates))


def test_noise_is_said(candidates):
    def vague(bound):
        ms = candidates.reached(bound) / 1_000
        return Spread(ms * 0.9, ms, ms * 1.1)

    _, _, notes = found(candidates, 1.0, vague, vague)
    assert "noise: 1 ms lies within the quartiles (" in notes[-1]

    def hopeless(bound):
        return Spread(0.1, 0.5 + candidates.reached(bound) / 10_000, 3.0)

    with pytest.raises(KeepkError, match=r"fit: the noise is larger than the difference: .*\(quartiles 0\.1 to 3\)"):
        found(candidates, 0.6, hopeless, hopeless)


# Bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"latency_ms": 0}, r"fit: latency_ms=0\. Pass milliseconds, a number above 0\."),
        ({"latency_ms": -1.5}, r"latency_ms=-1\.5"),
        ({"latency_ms": float("nan")}, r"latency_ms=nan"),
        ({"latency_ms": True}, r"latency_ms=True"),
        ({"latency_ms": "5"}, r"latency_ms='5'"),
        ({"batch": 0}, r"fit: batch=0\. Pass an int of at least 1\."),
        ({"threads": 1.0}, r"fit: threads=1\.0"),
        ({"repeats": False}, r"fit: repeats=False"),
        ({"runtime": "tensorrt"}, r"fit: runtime='tensorrt'\. Choose from torch, onnxruntime\."),
        ({"runtime": None}, r"fit: runtime=None"),
        ({"spaces": []}, r"fit: spaces=\[\]\. Pass one or more of keepk\.channels\(\.\.\.\), without a number\."),
        ({"spaces": "0"}, r"fit: spaces='0'"),
        ({"spaces": keepk.weights("*", keep=3)}, r"space '\*': keepk\.weights, whose zeros do not make a model faster"),
        ({"spaces": spaces(keep=3)}, r"space 'all': got keep=3, but fit finds the number\. Leave it out\."),
        ({"spaces": spaces(prune=0.5)}, r"space 'all': got prune=0\.5, but fit"),
        ({"spaces": spaces(macs=0.5)}, r"space 'all': got macs=0\.5, but fit"),
        ({"spaces": spaces() * 2}, r"space 'all': two spaces have this name"),
        ({"model": "net"}, r"fit: .*str"),
    ],
)
def test_bad_input_is_refused(options, words):
    model = network()
    before = looks(model)
    with pytest.raises(KeepkError, match=words):
        fit(**{"model": model, "spaces": spaces(), "example": EXAMPLE, "latency_ms": 5.0, **options})
    unchanged(model, before)


def test_a_metric_that_needs_data_is_refused():
    model = network()
    space = keepk.channels("*", metric=keepk.metrics.taylor(keepk.Statistics(model)), name="all")
    with pytest.raises(SpaceError, match=r"metric Taylor reads more than weights, .*pass macs=fit\(\.\.\.\)\.macs"):
        keepk.fit(model, space, EXAMPLE, latency_ms=5)


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(KeepkError, match=r'fit: onnxruntime is not installed\. Run: pip install "keepk\[onnx\]"'):
        keepk.fit(network(), spaces(), EXAMPLE, latency_ms=5, runtime="onnxruntime")


# Real runs


def fitted(model, asked, **options):
    """A fit with a latency between those of the smallest and the dense model; on a noisy machine, the third one."""
    for _ in range(3):
        times = keepk.latency(model, EXAMPLE[:1], batches=1, threads=1, repeats=10).rows[0].model
        try:
            return keepk.fit(model, asked, EXAMPLE, latency_ms=0.5 * times.median, repeats=10, **options)
        except KeepkError as error:
            refused = str(error)
    return refused


def wide():
    """Wide enough that the dense model takes longer than the calls of an almost empty one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.ReLU(), nn.Linear(1500, 4))


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
@pytest.mark.filterwarnings("ignore:space .* would keep less than 5 %:keepk.KeepkWarning")
def test_a_real_run_leaves_the_model_alone_and_its_spaces_fit_a_pruner(runtime, tmp_path):
    model = wide()
    before, threads, state = looks(model), torch.get_num_threads(), torch.get_rng_state()
    result = fitted(model, spaces(), runtime=runtime)
    unchanged(model, before)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    if isinstance(result, str):  # too noisy for three tries: the numbers are said
        assert "latency_ms=" in result or "noise" in result
        return
    dense = model_costs(model, EXAMPLE).macs
    assert result.curve[0].macs == dense
    assert [it.macs for it in result.curve] == sorted({it.macs for it in result.curve}, reverse=True)
    assert result.chosen.ms.median <= result.latency_ms
    assert result.confirmed is not None
    assert result.confirmed.median <= result.latency_ms
    assert (result.runtime, result.batch, result.threads, result.repeats) == (runtime, 1, 1, 10)
    pruner = keepk.Pruner(model, result.spaces, example=EXAMPLE)
    pruner.step()
    assert model_costs(model, EXAMPLE).macs == result.macs == pruner.budgets["all"]["reached"]
    assert pruner.kept == result.chosen.kept
    lines = str(result).splitlines()
    assert lines[0].startswith("At most ")
    assert sum(line.endswith("chosen") for line in lines) == 1
    assert f"macs={result.macs:,}" in lines[3 + len(result.curve)]
    assert result.data()["spaces"] == ["all"]
    assert result.data()["macs"] == result.macs
    assert f"macs={result.macs:,}" in rendered(result, 160)
    assert "<table" in result._repr_html_()
    result.plot(tmp_path / "fit.png")
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")


def test_several_spaces_share_the_budget():
    model = network()
    several = [keepk.channels(it, name=it, metric=L2, schedule=keepk.Cubic(2)) for it in ("0", "2")]
    candidates = Candidates(model, several, EXAMPLE)
    macs = candidates.reached(candidates.dense // 2)
    with_macs = with_budget(several, macs)
    pruner = keepk.Pruner(copy.deepcopy(model), with_macs, example=EXAMPLE)
    assert list(pruner.plan) == ["macs"]
    by_run = keepk.Pruner(copy.deepcopy(model), several, example=EXAMPLE, macs=macs)
    for run in (pruner, by_run):
        while not run.done:
            run.step()
    assert pruner.kept == by_run.kept
    one_shot = [keepk.channels(it, name=it, metric=L2) for it in ("0", "2")]
    run = keepk.Pruner(copy.deepcopy(model), with_budget(one_shot, macs), example=EXAMPLE)
    run.step()
    assert run.kept == candidates.kept(macs)
    assert run.certificate["0"]["reached"] == macs
    named = [keepk.channels(it, name=name, metric=L2) for it, name in (("0", "macs"), ("2", "other"))]
    with pytest.raises(SpaceError, match="space 'macs': a budget of the Pruner has this name in the plan"):
        keepk.Pruner(copy.deepcopy(model), with_budget(named, macs), example=EXAMPLE)


def test_a_fresh_process_measures_the_model_and_says_why_if_it_cannot(tmp_path):
    candidates = Candidates(network(), spaces(), EXAMPLE)
    bench = Bench(candidates, Example.of(EXAMPLE), "torch", 1, 3, tmp_path)
    spread = bench.confirm(candidates.dense // 2)
    assert isinstance(spread, Spread)
    assert 0 < spread.lower <= spread.median <= spread.upper

    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, x):
            return self.layers(x)

    local = Candidates(Local(), spaces(), EXAMPLE)
    reason = Bench(local, Example.of(EXAMPLE), "torch", 1, 3, tmp_path).confirm(local.dense // 2)
    assert isinstance(reason, str)
    assert reason.startswith("the model cannot be pickled (")
    Local.__module__ = "__main__"
    reason = Bench(local, Example.of(EXAMPLE), "torch", 1, 3, tmp_path).confirm(local.dense // 2)
    assert reason == "its class is defined in the script that runs, which a fresh process cannot import"
