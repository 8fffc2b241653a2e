"""Run the paper's experiments: every recipe with every seed. A killed run resumes from its last epoch."""

import os
import signal
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch

from keepk.checkpoint.checkpoint import load_checkpoint
from keepk.errors import DataError, KeepkWarning
from keepk.plan.names import nearest
from keepk.plan.numbers import count
from keepk.plan.schedules import Cubic
from keepk.run.pruner import Pruner
from keepk_paper import densenet, lenet, parity, vgg
from keepk_paper import results as result_files
from keepk_paper.data import Mnist, mnist
from keepk_paper.one_run import settled
from keepk_paper.pictures import Pictures, cifar10, cifar100, svhn
from keepk_paper.recipes import Recipe, Stage, by_quality
from keepk_paper.results import USUAL, Training
from keepk_paper.train import Progress, Run

FULL = "full-"
EXPERIMENTS: dict[str, dict[str, Recipe]] = {**lenet.EXPERIMENTS, **vgg.EXPERIMENTS, **densenet.EXPERIMENTS}
LOADERS = {"cifar10": cifar10, "cifar100": cifar100, "svhn": svhn}
DATA: dict[str, Callable[[Path | None], Mnist | Pictures]] = {
    **dict.fromkeys(lenet.EXPERIMENTS, mnist),
    **{name: LOADERS[name.rpartition("-")[2]] for name in (*vgg.EXPERIMENTS, *densenet.EXPERIMENTS)},
}
PARITY, ALL = "parity", "all"
SHARED_OPTIONS: dict[str, Any] = {
    "recipe": None,
    "results": Path("results"),
    "threads": 1,
    "device": "cpu",
    "quick": False,
}
# The options of `run` and their defaults: for experiments made of recipes, and for parity.
OPTIONS = {**SHARED_OPTIONS, "seeds": 5, "data": None, "runs": Path("runs"), "jobs": 2, "full": False, "amp": False}
PARITY_OPTIONS = {**SHARED_OPTIONS, "seeds": parity.DRAWS, "inits": parity.INITS, "figure": None}
# A quick run trains on this many images and tests on as many; it shows that everything works, not how well.
QUICK_IMAGES, QUICK_EPOCHS, QUICK_PARITY = 128, 3, (1_000, 500, 500)


@dataclass(frozen=True)
class Report:
    """The progress of one run, at the end of an epoch.

    Attributes:
        who: The experiment, the recipe and the seed.
        epoch: The number of epochs trained.
        epochs: The number of epochs of the whole run.
        kept: The number of units left.
        seconds: The time so far, also before an interruption.
        train_error: The error of the last epoch in percent, on augmented images.
        test_error: The test error in percent, if the epoch ends at a point of the experiment.
        note: A message in place of all that, for a run that is not trained.
    """

    who: str
    epoch: int = 0
    epochs: int = 0
    kept: int = 0
    seconds: float = 0.0
    train_error: float | None = None
    test_error: float | None = None
    note: str = ""

    def __str__(self) -> str:
        """A line for a log file."""
        if self.note:
            return f"{self.who}: {self.note}"
        return f"{self.who}  epoch {self.epoch}/{self.epochs}  kept {self.kept:,}  {self.seconds:.0f} s  {self.errors}"

    @property
    def errors(self) -> str:
        """The errors that are known."""
        known = (("train", self.train_error), ("test", self.test_error))
        return "  ".join(f"{name} {error:.2f} %" for name, error in known if error is not None)


Watch = Callable[[Report], None]


def _print(report: Report) -> None:
    print(report, flush=True)


def run(experiment: str, options: Mapping[str, Any], watch: Watch = _print) -> list[Path]:
    """Run an experiment and return the paths of its result files.

    Args:
        experiment: A name of `EXPERIMENTS`, `PARITY`, or `ALL`.
        options: Values for the names in `OPTIONS`, or in `PARITY_OPTIONS` for parity. None means the default. With
            `quick`, every run is cut short, and results and checkpoints go to a folder `quick` of their folders.
        watch: Called at the end of every epoch of every run.

    Raises:
        DataError: If an option does not belong to this experiment, or a recipe is unknown.
    """
    if experiment == ALL:
        return _run_all(options, watch)
    known = PARITY_OPTIONS if experiment == PARITY else OPTIONS
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in known:
            other = "another experiment" if experiment == PARITY else PARITY
            raise DataError(f"run: --{name} is not an option of {experiment}. Leave it out, or run {other}.")
    chosen = {**known, **given}
    recipes = chosen.pop("recipe") or None  # an empty list means all recipes, too
    if chosen["quick"]:
        chosen |= {name: chosen[name] / "quick" for name in ("results", "runs") if name in chosen}
        chosen["seeds"] = given.get("seeds", 1)
    if experiment == PARITY:
        return [_parity(recipes=recipes, **chosen)]
    return [_run_recipes(experiment, recipes=recipes, watch=watch, **chosen)]


def _run_all(options: Mapping[str, Any], watch: Watch) -> list[Path]:
    """Every experiment, with the options that it has."""
    refused = [name for name in ("recipe", "inits", "figure") if options.get(name)]
    if refused:
        raise DataError(f"run: --{refused[0]} is not an option of {ALL}. Leave it out, or name an experiment.")
    written = list[Path]()
    for experiment in (*EXPERIMENTS, PARITY):
        known = PARITY_OPTIONS if experiment == PARITY else OPTIONS
        written += run(experiment, {name: value for name, value in options.items() if name in known}, watch)
    return written


def quick_version(recipe: Recipe) -> Recipe:
    """The same network and the same counts in a few epochs of few images."""

    def short(stage: Stage) -> Stage:
        return replace(
            stage,
            epochs=QUICK_EPOCHS,
            flat=None if stage.flat is None else min(stage.flat, QUICK_EPOCHS - 1),
            first_event=min(stage.first_event, 2),
            keep={name: (keep, Cubic(epochs=2)) for name, (keep, _) in stage.keep.items()},
        )

    return replace(recipe, stages=list(map(short, recipe.stages)), batch=64, pictures=None)


def _parity(*, seeds: int, figure: Path | None, quick: bool, inits: int, **options: Any) -> Path:
    if quick:
        options["sizes"], inits = QUICK_PARITY, 1
    written = parity.run_parity(draws=seeds, inits=inits, **options)
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
    device: str,
    amp: bool,
    quick: bool,
    watch: Watch,
) -> Path:
    """Run every recipe with seeds 1, 2, ..., append the points to the experiment's result file and return its path.

    A killed seed resumes from its last epoch, and a finished one is skipped. `jobs` seeds run at a time, each in a
    process with `threads` threads. A recipe waits for the recipes that it needs; one whose numbers suffice is not
    trained again if the result file has it. If `recipes` is None, those that two
    cores can train are run, or with `full` those of the paper's size.
    """
    for name, value in (("seeds", seeds), ("jobs", jobs), ("threads", threads)):
        count(value, f"experiment {experiment!r}: {name}", DataError, least=1)
    training = Training(device, amp)
    recorded = {} if quick else _recorded(results / f"{experiment}.jsonl", training)

    def known(recipe: str) -> bool:
        return all((recipe, seed) in recorded for seed in range(1, seeds + 1))

    chosen = _with_needed(experiment, recipes or _usual(experiment, full), known)
    DATA[experiment](data)  # download once, before several workers try to
    where: dict[str, Any] = {"data": data, "results": results, "runs": runs}
    work = partial(_one_seed, experiment, threads=threads, device=device, amp=amp, quick=quick, **where)
    context = get_context("spawn")
    reports: SimpleQueue[Report] = context.SimpleQueue()
    pool = ProcessPoolExecutor(
        max_workers=jobs, mp_context=context, initializer=_start_worker, initargs=(reports, os.getpid())
    )
    try:
        for names in _in_turn(experiment, chosen):
            tasks = [pool.submit(work, name, seed) for name in names for seed in range(1, seeds + 1)]
            _follow(tasks, reports, watch)
    finally:  # after a failed seed or Ctrl-C, do not start the waiting ones
        pool.shutdown(cancel_futures=True)
    return results / f"{experiment}.jsonl"


def _follow(tasks: Iterable[Future[None]], reports: "SimpleQueue[Report]", watch: Watch) -> None:
    """Pass on the workers' reports until all tasks are done; raises the error of a task that failed."""
    waiting = {*tasks}
    while waiting:
        done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
        while not reports.empty():
            watch(reports.get())
        for task in done:
            task.result()


# In a worker: where its reports go, and the process that started it.
_reports: "SimpleQueue[Report] | None" = None
_parent: int | None = None


def _start_worker(reports: "SimpleQueue[Report]", parent: int) -> None:
    global _reports, _parent  # a pool gives its workers nothing but this call
    _reports, _parent = reports, parent
    # Ctrl-C reaches every process of the terminal. The main process reports it; workers stop without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Recipes are deliberate: the paper's own keeps 4 % of the weights of a layer.
    warnings.filterwarnings("ignore", "space .* would keep", KeepkWarning)


def _tell(report: Report) -> None:
    """Report from a worker to the main process, or print if there is no other process."""
    if _reports is None:
        _print(report)
        return
    if os.getppid() != _parent:
        # The main process was killed. A new one may already train the same run from the same checkpoint.
        raise SystemExit(1)
    _reports.put(report)


def _usual(experiment: str, full: bool) -> list[str]:
    """The recipes to run by default: those that two cores can train, or with `full` those of the paper's size.

    The several dozen recipes for comparison are left out, and run only by name.
    """
    names = [name for name, recipe in EXPERIMENTS[experiment].items() if not recipe.only_by_name]
    if not any(name.startswith(FULL) for name in names):
        return names
    return [name for name in names if name.startswith(FULL) is full]


def _with_needed(experiment: str, names: Sequence[str], known: Callable[[str], bool]) -> list[str]:
    """The named recipes, preceded by the recipes that must be trained first.

    A run continues from the weights of its `start`. Of the others that it needs it reads only the numbers, so that
    recipes in the result file (`known`) are left out.
    """
    recipes = EXPERIMENTS[experiment]
    for name in names:
        if name not in recipes:
            raise DataError(
                f"experiment {experiment!r}: no recipe {name!r}. Nearest names: {nearest(name, list(recipes))}."
            )
    every = dict.fromkeys((name, other) for name in names for other in recipes[name].needs)
    needed = [other for name, other in every if other == recipes[name].start or not known(other)]
    missing = [name for name in dict.fromkeys(needed) if name not in names]
    return [*_with_needed(experiment, missing, known), *names] if missing else list(dict.fromkeys(names))


def _in_turn(experiment: str, names: Sequence[str]) -> list[list[str]]:
    """The recipes in groups; each group needs only recipes of earlier groups."""
    recipes, done, groups = EXPERIMENTS[experiment], set[str](), list[list[str]]()
    while left := [name for name in dict.fromkeys(names) if name not in done]:
        groups.append([name for name in left if not {*recipes[name].needs} & {*left}])
        assert groups[-1]  # no recipe needs itself
        done |= {*groups[-1]}
    return groups


def _one_seed(
    experiment: str,
    recipe: str,
    seed: int,
    *,
    data: Path | None,
    results: Path,
    runs: Path,
    threads: int,
    device: str = "cpu",
    amp: bool = False,
    quick: bool = False,
) -> None:
    torch.set_num_threads(threads)
    who = f"{experiment} {recipe} seed {seed}"
    folder = runs / experiment / f"{recipe}-{seed}"
    chosen = EXPERIMENTS[experiment][recipe]
    if quick:
        chosen = quick_version(chosen)
    training = Training(device, amp)
    mark = _finished_mark(chosen, training)
    finished = folder / "finished"
    if finished.exists() and finished.read_text() == mark:
        _tell(Report(who, note=f"finished before; remove {folder} to run it again"))
        return
    start = runs / experiment / f"{chosen.start}-{seed}" if chosen.start else None
    recorded = {} if quick else _recorded(results / f"{experiment}.jsonl", training)
    needed = {
        # The weights of `start` are needed as well, which only a checkpoint has.
        name: _finished_point(runs / experiment, {} if name == chosen.start else recorded, name, seed, training)
        for name in chosen.needs
    }
    trained = _with_numbers_of_others(chosen, needed, start)
    images = DATA[experiment](data)
    if quick:
        few = {name: getattr(images, name).first(QUICK_IMAGES) for name in ("train", "validation", "test")}
        images = replace(images, **few)
    run_of_seed = Run(trained, seed, images.to(device), folder, start, amp=amp)
    versions = result_files.versions()  # now: the checkout may have moved on by the end of the run
    commits = run_of_seed.progress.commits
    if (commit := versions.get("commit")) and commit not in commits:
        commits.append(commit)
    points = run_of_seed.finish(lambda progress, pruner: _tell(_report(who, progress, pruner)))
    shared = {"experiment": experiment, "recipe": recipe, "seed": seed}
    dense_error: float | None
    if chosen.control is None:
        dense_error = float((needed[chosen.start] if chosen.start else points[0])["test_error"])
    else:
        dense_error = _error_of_control(runs / experiment, recorded, chosen.control, seed, training)
    about = {
        "dense_test_error": dense_error,
        "threads": threads,
        "versions": versions,
        "commits": commits,
        **training.keys,
    }
    result_files.append(results / f"{experiment}.jsonl", [{**shared, **point, **about} for point in points])
    finished.write_text(mark)


def _with_numbers_of_others(recipe: Recipe, needed: Mapping[str, Mapping[str, Any]], start: Path | None) -> Recipe:
    """The recipe with the numbers that it takes from finished runs: the one it imitates, or the weights of `start`.

    Args:
        recipe: The recipe.
        needed: The last points of the runs that it needs, by recipe.
        start: The folder of the run that it starts from.
    """
    found = recipe
    if recipe.like is not None:
        found = settled(recipe, needed[recipe.like], needed.get(recipe.control or ""))
    if recipe.quality is not None:
        assert start is not None
        model = recipe.network(**recipe.options)
        load_checkpoint(start, model=model)
        found = by_quality(recipe, model)
    return found


def _error_of_control(
    folder: Path, recorded: Mapping[tuple[str, int], dict[str, Any]], control: str, seed: int, training: Training
) -> float | None:
    """The test error of the dense control of a run; None if it has not been trained yet."""
    try:
        return float(_finished_point(folder, recorded, control, seed, training)["test_error"])
    except DataError:
        return None


def _finished_mark(recipe: Recipe, training: Training) -> str:
    """The contents of the file that marks a finished run: the fingerprint, and the training if it is not the usual one.

    Marks that are older than mixed precision have a fingerprint alone.
    """
    return " ".join([recipe.fingerprint(), *([str(training)] if training != USUAL else [])])


def _finished(folder: Path) -> Progress | None:
    """The progress of a finished run; None if it is not finished."""
    return Progress(**load_checkpoint(folder)) if (folder / "finished").exists() else None


def _recorded(path: Path, training: Training) -> dict[tuple[str, int], dict[str, Any]]:
    """The last point of every run in a result file that was trained in this way, by recipe and seed."""
    lines = [line for line in result_files.read(path) if Training.of(line) == training]
    # A run that reports several points has one line for each.
    lines.sort(key=lambda line: int(line.get("epochs", 0)))
    return {(line["recipe"], line["seed"]): line for line in lines}


def _finished_point(
    runs: Path, recorded: Mapping[tuple[str, int], dict[str, Any]], recipe: str, seed: int, training: Training
) -> dict[str, Any]:
    """The last point of a finished run that was trained in the same way: of its checkpoint, else of its result line."""
    folder = runs / f"{recipe}-{seed}"
    found = _finished(folder)
    if found is not None and found.training == training:
        return found.points[-1]
    if (recipe, seed) in recorded:
        return recorded[recipe, seed]
    if found is None:
        raise DataError(
            f"{folder}: no finished run of recipe {recipe!r} with seed {seed}, which is needed. Run it first."
        )
    raise DataError(
        f"{folder}: the finished run of recipe {recipe!r} with seed {seed} was trained in {found.training}, but it "
        f"is needed in {training}. Train both alike, or give another folder with --runs."
    )


def _report(who: str, progress: Progress, pruner: Pruner) -> Report:
    point: dict[str, Any] = progress.points[-1] if progress.points else {}
    test_error = point["test_error"] if point.get("epochs") == progress.epoch else None
    kept = sum(pruner.kept.values())
    return Report(who, progress.epoch, pruner.epochs, kept, progress.seconds, progress.train_error, test_error)
