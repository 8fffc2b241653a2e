"""Train the pruned networks whose speed `sparse_speed.py` measures, and save them as compact files.

    python benchmarks/sparse_models.py --data DATA --runs RUNS

LeNet-300-100 and LeNet-5 are trained by this repository's recipes, up to 3,999 and 3,879 weights. The others are VGG-16
of width 1/4 on CIFAR-10: 24 epochs of dense training, and from there 16 epochs each,

    vgg-dense             without pruning
    vgg-weights-P         with P % of the weights of convolutions and linear layers left (DSC-1, magnitude)
    vgg-channels-P        with P % of the channels left (DSC-2, the paper's blend)
    vgg-both-P            after vgg-channels-30, 16 more epochs, with weights equal to P % of those of the dense network

One seed each, one thread. Each finished network goes to ``results/sparse/NAME`` (but the dense one, whose values no
speed depends on), and its errors to ``results/sparse/models.jsonl``. A killed run resumes from its last epoch, and
finished networks are skipped.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import keepk
from keepk.plan.schedules import Annealing
from keepk_paper import results
from keepk_paper.data import mnist
from keepk_paper.lenet import LENET_5_OURS, LENET_300_OURS
from keepk_paper.models import VGG16
from keepk_paper.one_run import METRICS
from keepk_paper.pictures import cifar10
from keepk_paper.recipes import Recipe, Stage
from keepk_paper.train import Progress, Run

OUT = Path("results/sparse")
LINES = OUT / "models.jsonl"
SEED = 1
WIDTH = 0.25
WEIGHTS = {name: it.numel() for name, it in VGG16(width=WIDTH).named_parameters() if it.dim() > 1}
TOTAL = sum(WEIGHTS.values())
CHANNELS = 1_056
vgg = partial(Recipe, network=VGG16, batch=128, options={"width": WIDTH}, smoothing=0.1)
of_weights = partial(vgg, spaces={"all": tuple(WEIGHTS)})
tuned = partial(Stage, 16, lr=0.05, decay=5e-4)


def by_weights(name: str, per_mille: int, start: str = "vgg-start", p0: float = 0.7) -> Recipe:
    keep = TOTAL * per_mille // 1_000
    return of_weights(name=name, start=start, stages=[tuned(keep={"all": (keep, Annealing(p0=p0, n1=3, nu=0.05))})])


def by_channels(name: str, percent: int) -> Recipe:
    goal = {"conv": (CHANNELS * percent // 100, Annealing(p0=0.4, n1=3, nu=0.05))}
    return vgg(
        name=name,
        start="vgg-start",
        spaces={"conv": "features.*"},
        units="output",
        stages=[tuned(keep=goal)],
        **METRICS["blend"],
    )


def recipes() -> Iterator[Recipe]:
    yield replace(LENET_300_OURS, name="lenet-300-100")
    yield of_weights(name="vgg-start", stages=[Stage(24, lr=0.1, warmup=1, decay=5e-4)])
    yield by_weights("vgg-weights-10", 100)
    yield by_weights("vgg-weights-5", 50)
    yield by_channels("vgg-channels-30", 30)
    yield by_weights("vgg-both-5", 50, "vgg-channels-30", p0=0.1)
    yield replace(LENET_5_OURS, name="lenet-5", stages=LENET_5_OURS.stages[:4])
    yield of_weights(name="vgg-dense", start="vgg-start", stages=[tuned()])
    yield by_weights("vgg-both-2.5", 25, "vgg-channels-30", p0=0.3)
    yield by_channels("vgg-channels-50", 50)
    yield by_weights("vgg-weights-20", 200, p0=0.5)


def train(recipe: Recipe, data: Any, runs: Path) -> None:
    def report(progress: Progress, pruner: keepk.Pruner) -> None:
        kept, seconds = sum(pruner.kept.values()), progress.cpu_seconds
        print(f"{recipe.name}: epoch {progress.epoch}/{recipe.epochs}, kept {kept:,}, {seconds:.0f} s", flush=True)

    start, lines = runs / recipe.start if recipe.start else None, {it["recipe"]: it for it in results.read(LINES)}
    before = lines.get(recipe.start or "", {})
    if "conv" in before.get("spaces", {}):  # it has lost channels
        filters = [left for left, _ in before["layers"].values()]
        recipe = replace(recipe, options={**recipe.options, "filters": filters})
    run = Run(recipe, SEED, data, runs / recipe.name, start)
    points = run.finish(report)
    if recipe.name not in ("vgg-start", "vgg-dense"):
        keepk.save(run.model, OUT / recipe.name, compact=True)
    about = {
        "experiment": "sparse-models",
        "recipe": recipe.name,
        "seed": SEED,
        "dense_test_error": lines.get("vgg-start", points[0])["test_error"] if start else points[0]["test_error"],
        "options": dict(recipe.options),
        "versions": results.versions(),
    }
    results.append(LINES, [{**points[-1], **about}])
    print(f"{recipe.name}: test error {points[-1]['test_error']:.2f} %", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/sparse"))
    parser.add_argument("--only", nargs="+", help="names of networks; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load: dict[type, Callable[..., Any]] = {VGG16: cifar10}
    done = {line["recipe"] for line in results.read(LINES)}
    for recipe in recipes():
        if recipe.name not in done and (not options.only or recipe.name in options.only):
            train(recipe, load.get(recipe.network, mnist)(options.data), options.runs)


if __name__ == "__main__":
    main()
