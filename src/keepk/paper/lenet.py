"""The MNIST experiments: LeNet-300-100 and LeNet-5, the paper's way and ours (Tables 1 and 2).

``paper`` is the paper's text taken literally; what it leaves open is set here: the dense net is trained by plain SGD
with batches of 64 and a rate of 0.1 until its error is the paper's.
"""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from keepk.errors import DataError
from keepk.paper import results as result_files
from keepk.paper.data import mnist
from keepk.paper.models import LeNet5, LeNet300
from keepk.paper.recipes import Recipe, Stage, saliency
from keepk.paper.training import Progress, Run
from keepk.plan.names import nearest
from keepk.plan.numbers import count
from keepk.plan.schedules import Annealing, Cubic
from keepk.run.pruner import Pruner

by_plain_sgd = partial(Stage, lr=0.1, flat=None, momentum=0.0, nesterov=False)
by_a_tenth = partial(Stage, lr=0.01, flat=None, momentum=0.9, nesterov=False)
light_dropout = partial(Stage, lr=0.05, decay=1e-4, dropout=(0.05, 0.1, 0.05), metric=saliency)
sparse = partial(Stage, lr=0.05, decay=1e-4, dropout=(0.05, 0.1))

LENET_300_PAPER = Recipe(
    name="paper",
    network=LeNet300,
    spaces={"all": "*"},
    batch=64,
    stages=[
        by_plain_sgd(30),
        by_a_tenth(20, keep={"all": (17_329, Annealing(p0=0.85, n1=1, nu=0.05))}),
    ],
)

# Down in rounds: each takes a part of the weights in half of its epochs or so, while the rate falls from .05 to zero.
LENET_300_OURS = Recipe(
    name="keepk",
    network=LeNet300,
    spaces={"all": "*"},
    batch=128,
    stages=[
        Stage(40, lr=0.05, decay=2e-4, dropout=(0.1, 0.3, 0.2)),
        light_dropout(60, keep={"all": (17_329, Cubic(epochs=20))}),
        light_dropout(40, keep={"all": (8_300, Cubic(epochs=25))}),
        light_dropout(80, keep={"all": (3_999, Cubic(epochs=40))}),
    ],
)

LENET_5_PAPER = Recipe(
    name="paper",
    network=LeNet5,
    spaces={"fc": "fc*", "conv": "conv*"},
    batch=64,
    stages=[
        by_plain_sgd(12),
        by_a_tenth(
            3,
            keep={"fc": (8_110, Annealing(p0=0.9, n1=1, nu=0.05))},
            freeze=("conv*",),
            report=False,
        ),
        by_a_tenth(
            14,
            keep={"conv": (7_671, Annealing(p0=0.0, n1=0, nu=0.05))},
            freeze=("fc*",),
            report=False,
        ),
        by_a_tenth(23),
    ],
)

LENET_5_OURS = Recipe(
    name="keepk",
    network=LeNet5,
    spaces={"all": "*"},
    batch=128,
    stages=[
        Stage(15, lr=0.05, decay=2e-4, dropout=(0.2, 0.5)),
        Stage(16, lr=0.05, decay=1e-4, dropout=(0.1, 0.3), keep={"all": (15_781, Cubic(epochs=8))}),
        Stage(12, lr=0.05, decay=1e-4, dropout=(0.05, 0.2), keep={"all": (8_621, Cubic(epochs=7))}),
        sparse(16, keep={"all": (3_879, Cubic(epochs=10))}),
        sparse(12, keep={"all": (2_500, Cubic(epochs=5))}, metric=saliency),
        sparse(24, keep={"all": (1_724, Cubic(epochs=7))}, metric=saliency),
    ],
)

EXPERIMENTS = {
    "lenet-300-100": {recipe.name: recipe for recipe in (LENET_300_PAPER, LENET_300_OURS)},
    "lenet-5": {recipe.name: recipe for recipe in (LENET_5_PAPER, LENET_5_OURS)},
}


def run(
    experiment: str,
    *,
    recipes: Sequence[str] | None,
    seeds: int,
    data: Path | None,
    results: Path,
    runs: Path,
    jobs: int = 1,
    threads: int = 1,
) -> Path:
    """Run every recipe with seeds 1, 2, ... and add the points to the experiment's result file, which is returned.

    A seed that was killed goes on from its last epoch; one that is finished is not run again. `jobs` seeds run at a
    time, each in a process with `threads` threads.
    """
    for name, value in (("seeds", seeds), ("jobs", jobs), ("threads", threads)):
        count(value, f"experiment {experiment!r}: {name}", DataError, least=1)
    chosen = recipes or list(EXPERIMENTS[experiment])
    for name in chosen:
        if name not in EXPERIMENTS[experiment]:
            raise DataError(
                f"experiment {experiment!r}: no recipe {name!r}. Nearest names: "
                f"{nearest(name, list(EXPERIMENTS[experiment]))}."
            )
    mnist(data)  # found or fetched once, before the workers look for it
    work = partial(_one_seed, experiment, data=data, results=results, runs=runs, threads=threads)
    tasks = [(name, seed) for name in chosen for seed in range(1, seeds + 1)]
    pool = ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn"))
    try:
        for finished in as_completed([pool.submit(work, name, seed) for name, seed in tasks]):
            finished.result()
    finally:  # a seed that failed, or Ctrl-C: those that wait need not start
        pool.shutdown(cancel_futures=True)
    return results / f"{experiment}.jsonl"


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
    run_of_seed = Run(chosen, seed, mnist(data), folder)
    points = run_of_seed.finish(partial(_say, f"{experiment} {recipe} seed {seed}"))
    shared = {"experiment": experiment, "recipe": recipe, "seed": seed}
    about = {
        "dense_test_error": points[0]["test_error"],
        "threads": threads,
        "versions": result_files.versions(),
    }
    result_files.append(results / f"{experiment}.jsonl", [{**shared, **point, **about} for point in points])
    finished.write_text(chosen.fingerprint())


def _say(who: str, progress: Progress, pruner: Pruner) -> None:
    point: dict[str, Any] = progress.points[-1] if progress.points else {}
    reached = f"  test {point['test_error']:.2f} %" if point.get("epochs") == progress.epoch else ""
    kept = sum(pruner.kept.values())
    spent = f"{progress.seconds:.0f} s"
    print(f"{who}  epoch {progress.epoch}/{pruner.epochs}  kept {kept:,}  {spent}{reached}", flush=True)
