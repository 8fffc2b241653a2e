"""The paper's experiments: every recipe with every seed, each killed run going on where it stood."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from keepk.checkpoint.checkpoint import load_checkpoint
from keepk.errors import DataError
from keepk.plan.names import nearest
from keepk.plan.numbers import count
from keepk.run.pruner import Pruner
from keepk_paper import densenet, lenet, parity, vgg
from keepk_paper import results as result_files
from keepk_paper.data import Mnist, mnist
from keepk_paper.one_run import settled
from keepk_paper.pictures import Pictures, cifar10, cifar100, svhn
from keepk_paper.recipes import Recipe, by_quality
from keepk_paper.train import Progress, Run

FULL = "full-"
EXPERIMENTS: dict[str, dict[str, Recipe]] = {**lenet.EXPERIMENTS, **vgg.EXPERIMENTS, **densenet.EXPERIMENTS}
LOADERS = {"cifar10": cifar10, "cifar100": cifar100, "svhn": svhn}
DATA: dict[str, Callable[[Path | None], Mnist | Pictures]] = {
    **dict.fromkeys(lenet.EXPERIMENTS, mnist),
    **{name: LOADERS[name.rpartition("-")[2]] for name in (*vgg.EXPERIMENTS, *densenet.EXPERIMENTS)},
}
PARITY = "parity"
SHARED_OPTIONS: dict[str, Any] = {"recipe": None, "results": Path("results"), "threads": 1}
# The options of a run of recipes, and of one of parity, with what they are if nobody says.
OPTIONS = {**SHARED_OPTIONS, "seeds": 5, "data": None, "runs": Path("runs"), "jobs": 2, "full": False}
PARITY_OPTIONS = {**SHARED_OPTIONS, "seeds": parity.DRAWS, "inits": parity.INITS, "figure": None}


def run(experiment: str, options: Mapping[str, Any]) -> Path:
    """Run an experiment, parity or another, and return its result file.

    Args:
        experiment: Its name.
        options: By the names of `OPTIONS` or `PARITY_OPTIONS`; None is what stands there. What is of the other kind of
            experiment is refused.
    """
    known = PARITY_OPTIONS if experiment == PARITY else OPTIONS
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in known:
            other = "another experiment" if experiment == PARITY else PARITY
            raise DataError(f"run: --{name} is no option of {experiment}. Leave it out, or run {other}.")
    chosen = {**known, **given}
    recipes = chosen.pop("recipe") or None  # none named: all of them
    return (_parity if experiment == PARITY else partial(_run_recipes, experiment))(recipes=recipes, **chosen)


def _parity(*, seeds: int, figure: Path | None, **options: Any) -> Path:
    written = parity.run_parity(draws=seeds, **options)
    if figure is not None:
        parity.save_figure(written, figure)
    return written


def _run_recipes(
    experiment: str,
    *,
    recipes: Sequence[str] | None,
    seeds: int,
    data: Path | None,
    results: Path,
    runs: Path,
    jobs: int,
    threads: int,
    full: bool,
) -> Path:
    """Run every recipe with seeds 1, 2, ... and add the points to the experiment's result file, which is returned.

    A seed that was killed goes on from its last epoch; one that is finished is not run again. `jobs` seeds run at a
    time, each in a process with `threads` threads. A recipe that needs another one waits for it. Without names, all
    recipes are run that two cores can carry; `full` takes the paper's own networks instead.
    """
    for name, value in (("seeds", seeds), ("jobs", jobs), ("threads", threads)):
        count(value, f"experiment {experiment!r}: {name}", DataError, least=1)
    chosen = _with_starts(experiment, recipes or _usual(experiment, full))
    DATA[experiment](data)  # found or fetched once, before the workers look for it
    work = partial(_one_seed, experiment, data=data, results=results, runs=runs, threads=threads)
    pool = ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn"))
    try:
        for names in _in_turn(experiment, chosen):
            tasks = [pool.submit(work, name, seed) for name in names for seed in range(1, seeds + 1)]
            for finished in as_completed(tasks):
                finished.result()
    finally:  # a seed that failed, or Ctrl-C: those that wait need not start
        pool.shutdown(cancel_futures=True)
    return results / f"{experiment}.jsonl"


def _usual(experiment: str, full: bool) -> list[str]:
    """The recipes of a run without names: those that two cores can train, or with `full` those of the paper's size.

    Recipes that are compared with those, several dozen, are trained only by name.
    """
    names = [name for name, recipe in EXPERIMENTS[experiment].items() if not recipe.only_by_name]
    if not any(name.startswith(FULL) for name in names):
        return names
    return [name for name in names if name.startswith(FULL) is full]


def _with_starts(experiment: str, names: Sequence[str]) -> list[str]:
    """The recipes, and those that they need, first."""
    known = EXPERIMENTS[experiment]
    for name in names:
        if name not in known:
            raise DataError(
                f"experiment {experiment!r}: no recipe {name!r}. Nearest names: {nearest(name, list(known))}."
            )
    needed = list(dict.fromkeys(other for name in names for other in known[name].needs if other not in names))
    return [*_with_starts(experiment, needed), *names] if needed else list(dict.fromkeys(names))


def _in_turn(experiment: str, names: Sequence[str]) -> list[list[str]]:
    """The recipes in groups, each of which needs only recipes of the groups before it."""
    known, done, groups = EXPERIMENTS[experiment], set[str](), list[list[str]]()
    while left := [name for name in dict.fromkeys(names) if name not in done]:
        groups.append([name for name in left if not {*known[name].needs} - done])
        assert groups[-1]  # no recipe needs itself
        done |= {*groups[-1]}
    return groups


def _one_seed(
    experiment: str, recipe: str, seed: int, *, data: Path | None, results: Path, runs: Path, threads: int
) -> None:
    torch.set_num_threads(threads)
    folder = runs / experiment / f"{recipe}-{seed}"
    chosen = EXPERIMENTS[experiment][recipe]
    finished = folder / "finished"
    if finished.exists() and finished.read_text() == chosen.fingerprint():
        print(f"{experiment} {recipe} seed {seed}: finished before; remove {folder} to run it again", flush=True)
        return
    start = runs / experiment / f"{chosen.start}-{seed}" if chosen.start else None
    trained = chosen
    if chosen.like is not None:
        control = _finished_point(runs / experiment, chosen.control, seed) if chosen.match == "seconds" else None
        trained = settled(chosen, _finished_point(runs / experiment, chosen.like, seed), control)
    if chosen.quality is not None:
        assert start is not None
        model = chosen.network(**chosen.options)
        load_checkpoint(start, model=model)
        trained = by_quality(chosen, model)
    run_of_seed = Run(trained, seed, DATA[experiment](data), folder, start)
    versions = result_files.versions()  # of the code that runs, not of a checkout that has moved on when it ends
    commits = run_of_seed.progress.commits
    if (commit := versions.get("commit")) and commit not in commits:
        commits.append(commit)
    points = run_of_seed.finish(partial(_say, f"{experiment} {recipe} seed {seed}"))
    shared = {"experiment": experiment, "recipe": recipe, "seed": seed}
    about = {
        "dense_test_error": _dense_error(points, start, runs / experiment, chosen.control, seed),
        "threads": threads,
        "versions": versions,
        "commits": commits,
    }
    result_files.append(results / f"{experiment}.jsonl", [{**shared, **point, **about} for point in points])
    finished.write_text(chosen.fingerprint())


def _dense_error(
    points: Sequence[dict[str, Any]], start: Path | None, runs: Path, control: str | None, seed: int
) -> float | None:
    """The test error of the dense network that a run began with, or of its control; None if that is not finished."""
    if control is not None and not (runs / f"{control}-{seed}" / "finished").exists():
        return None
    if control is not None:
        return float(_finished_point(runs, control, seed)["test_error"])
    first = points[0] if start is None else load_checkpoint(start)["points"][-1]
    return float(first["test_error"])


def _finished_point(runs: Path, recipe: str | None, seed: int) -> dict[str, Any]:
    """The last point of a finished run."""
    folder = runs / f"{recipe}-{seed}"
    if not (folder / "finished").exists():
        raise DataError(
            f"{folder}: no finished run of recipe {recipe!r} with seed {seed}, which is needed. Run it first."
        )
    point: dict[str, Any] = load_checkpoint(folder)["points"][-1]
    return point


def _say(who: str, progress: Progress, pruner: Pruner) -> None:
    point: dict[str, Any] = progress.points[-1] if progress.points else {}
    reached = f"  test {point['test_error']:.2f} %" if point.get("epochs") == progress.epoch else ""
    kept = sum(pruner.kept.values())
    spent = f"{progress.seconds:.0f} s"
    print(f"{who}  epoch {progress.epoch}/{pruner.epochs}  kept {kept:,}  {spent}{reached}", flush=True)
