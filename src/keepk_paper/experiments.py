"""Run the paper's experiments: every recipe with every seed. A killed run resumes from its last epoch."""

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
# The options of `run` and their defaults: for experiments made of recipes, and for parity.
OPTIONS = {**SHARED_OPTIONS, "seeds": 5, "data": None, "runs": Path("runs"), "jobs": 2, "full": False}
PARITY_OPTIONS = {**SHARED_OPTIONS, "seeds": parity.DRAWS, "inits": parity.INITS, "figure": None}


def run(experiment: str, options: Mapping[str, Any]) -> Path:
    """Run an experiment and return the path of its result file.

    Args:
        experiment: A name of `EXPERIMENTS`, or `PARITY`.
        options: Values for the names in `OPTIONS`, or in `PARITY_OPTIONS` for parity. None means the default.

    Raises:
        DataError: If an option does not belong to this experiment, or a recipe is unknown.
    """
    known = PARITY_OPTIONS if experiment == PARITY else OPTIONS
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in known:
            other = "another experiment" if experiment == PARITY else PARITY
            raise DataError(f"run: --{name} is not an option of {experiment}. Leave it out, or run {other}.")
    chosen = {**known, **given}
    recipes = chosen.pop("recipe") or None  # an empty list means all recipes, too
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
    """Run every recipe with seeds 1, 2, ..., append the points to the experiment's result file and return its path.

    A killed seed resumes from its last epoch, and a finished one is skipped. `jobs` seeds run at a time, each in a
    process with `threads` threads. A recipe waits for the recipes that it needs. If `recipes` is None, those that two
    cores can train are run, or with `full` those of the paper's size.
    """
    for name, value in (("seeds", seeds), ("jobs", jobs), ("threads", threads)):
        count(value, f"experiment {experiment!r}: {name}", DataError, least=1)
    chosen = _with_starts(experiment, recipes or _usual(experiment, full))
    DATA[experiment](data)  # download once, before several workers try to
    work = partial(_one_seed, experiment, data=data, results=results, runs=runs, threads=threads)
    pool = ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn"))
    try:
        for names in _in_turn(experiment, chosen):
            tasks = [pool.submit(work, name, seed) for name in names for seed in range(1, seeds + 1)]
            for finished in as_completed(tasks):
                finished.result()
    finally:  # after a failed seed or Ctrl-C, do not start the waiting ones
        pool.shutdown(cancel_futures=True)
    return results / f"{experiment}.jsonl"


def _usual(experiment: str, full: bool) -> list[str]:
    """The recipes to run by default: those that two cores can train, or with `full` those of the paper's size.

    The several dozen recipes for comparison are left out, and run only by name.
    """
    names = [name for name, recipe in EXPERIMENTS[experiment].items() if not recipe.only_by_name]
    if not any(name.startswith(FULL) for name in names):
        return names
    return [name for name in names if name.startswith(FULL) is full]


def _with_starts(experiment: str, names: Sequence[str]) -> list[str]:
    """The named recipes, preceded by the recipes that they need."""
    known = EXPERIMENTS[experiment]
    for name in names:
        if name not in known:
            raise DataError(
                f"experiment {experiment!r}: no recipe {name!r}. Nearest names: {nearest(name, list(known))}."
            )
    needed = list(dict.fromkeys(other for name in names for other in known[name].needs if other not in names))
    return [*_with_starts(experiment, needed), *names] if needed else list(dict.fromkeys(names))


def _in_turn(experiment: str, names: Sequence[str]) -> list[list[str]]:
    """The recipes in groups; each group needs only recipes of earlier groups."""
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
    versions = result_files.versions()  # now: the checkout may have moved on by the end of the run
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
    """The test error of the control, or of the dense network at the start; None if the control is not finished."""
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
