"""The paper's parity experiment: the smallest number of hidden nodes that learns the parity of 5 out of 50 signs.

Networks with one hidden layer of 256 nodes are annealed to 1 .. 16 nodes and compared with networks that start with
1 .. 16 nodes. For each number the best of ten initialisations is reported, chosen by validation error.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keepk.errors import DataError
from keepk.plan.names import nearest
from keepk.plan.numbers import count
from keepk.plan.schedules import Annealing
from keepk_paper import results as result_files
from keepk_paper.parity_training import (
    SEEDS_A_DRAW,
    SIZES,
    Recipe,
    Trained,
    at_floor,
    draw,
    train,
    train_by_pruner,
)
from keepk_paper.results import Training

NODES = 256
GOALS = tuple(range(1, 17))
DRAWS, INITS = 3, 10

# 17 nodes are left after the first 8 epochs of annealing, then one is removed every third epoch, to 1 after 48 more.
# Strong decay of the incoming weights and none of the outgoing ones keeps the nodes out of saturation, so that they
# can still change their role: by validation error, four nodes then reach the floor; with one decay throughout, five do.
KEEPK = Recipe(
    name="keepk",
    optimizer="adam",
    lr=0.01,
    shrink=((0.001, 0.001), (0.005, 0.0), (0.001, 0.0)),
    dense=30,
    anneal=56,
    tail=16,
    start=NODES,
    schedule=Annealing(p0=0.93, n1=8, nu=1 / NODES, every=3),
)
# The baselines have their final size from the start, the same number of epochs, and the decay that ours starts with.
from_the_start = partial(Recipe, dense=86, anneal=0, tail=16)
DECAY, LIGHT_DECAY = ((0.001, 0.001),) * 3, ((0.0001, 0.0001),) * 3
ADAM = from_the_start(name="adam", optimizer="adam", lr=0.01, shrink=DECAY)
SGD = from_the_start(name="sgd", optimizer="sgd", lr=1.0, shrink=DECAY)
# By validation error SGD needs a lighter decay.
SGD_LIGHT = from_the_start(name="sgd, light decay", optimizer="sgd", lr=1.0, shrink=LIGHT_DECAY)
# The KEEPK recipe for networks that `keepk.Pruner` prunes one at a time, and only to these numbers of nodes.
BY_PRUNER = replace(KEEPK, name="keepk, Pruner")
PRUNER_GOALS = (4, 6)
RECIPES = {recipe.name: recipe for recipe in (KEEPK, ADAM, SGD, SGD_LIGHT, BY_PRUNER)}


def run_parity(
    *,
    draws: int = DRAWS,
    inits: int = INITS,
    results: Path,
    recipes: Sequence[str] | None = None,
    sizes: tuple[int, int, int] = SIZES,
    device: torch.device | str = "cpu",
    threads: int = 1,
) -> Path:
    """Run every recipe on data draws 1, 2, ... and append the points to the result file.

    Recipes and draws whose points are in the file already are skipped. `sizes` are the numbers of training, validation
    and test rows.

    Returns:
        The path of the result file.

    Raises:
        DataError: If a count is out of range or a recipe is unknown.
    """
    for name, value in (("draws", draws), ("inits", inits), ("threads", threads)):
        count(value, f"experiment 'parity': {name}", DataError, least=1)
    if inits >= SEEDS_A_DRAW:
        raise DataError(f"experiment 'parity': inits={inits}: too many. Choose fewer than {SEEDS_A_DRAW}.")
    chosen = [_recipe(name) for name in recipes or RECIPES]
    path = results / "parity.jsonl"
    known = result_files.read(path)
    for other in {Training.of(point) for point in known} - {Training(str(device))}:
        raise DataError(f"{path}: holds results in {other}, which are not mixed. Give another folder with --results.")
    done = {(point["recipe"], point["seed"], point["fingerprint"], point["inits"]) for point in known}
    for seed in range(1, draws + 1):
        for recipe in chosen:
            if (recipe.name, seed, recipe.fingerprint(), inits) in done:
                print(f"parity {recipe.name} draw {seed}: in {path} already", flush=True)
                continue
            with _threads(threads):
                result_files.append(path, points(recipe, seed=seed, inits=inits, sizes=sizes, device=device))
    return path


def points(
    recipe: Recipe,
    *,
    seed: int,
    inits: int,
    goals: Sequence[int] = GOALS,
    sizes: tuple[int, int, int] = SIZES,
    device: torch.device | str = "cpu",
) -> list[dict[str, Any]]:
    """The points of one recipe on one draw: the dense network, if there is one, and each number of nodes."""
    versions = result_files.versions()  # now: the checkout may have moved on by the end of the run
    parity = draw(seed, sizes=sizes).to(device)
    if recipe.name == BY_PRUNER.name:
        goals = PRUNER_GOALS
        trained = train_by_pruner(recipe, parity, seed=seed, inits=inits, goals=goals)
    else:
        trained = train(recipe, parity, seed=seed, inits=inits, goals=goals)
    shared = {
        "noise_floor": parity.test.floor,
        "val_noise_floor": parity.validation.floor,
        "inits": inits,
        "seconds": trained.seconds,
        "cpu_seconds": trained.cpu_seconds,
        "threads": torch.get_num_threads(),
        "fingerprint": recipe.fingerprint(),
        "versions": versions,
        **Training(str(device)).keys,
    }
    made = [_point(recipe, trained, seed, asked) for asked in trained.errors]
    print(f"parity {recipe.name} draw {seed}: {inits} x {len(goals)} networks, {trained.cpu_seconds} CPU s", flush=True)
    return [{**point, "at_floor": at_floor(point["test_error"], parity.test.floor), **shared} for point in made]


def save_figure(result_file: Path, picture: Path) -> None:
    """Draw the figure from a result file, without training."""
    from keepk_paper.figures.panels import write_png  # noqa: PLC0415 - training needs no matplotlib
    from keepk_paper.figures.parity import parity_figure  # noqa: PLC0415 - running needs no matplotlib

    points = result_files.read(result_file)
    if not points:
        raise DataError(f"{result_file}: no results to draw. Run `keepk paper run parity` first.")
    write_png(parity_figure(points), picture)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise DataError(f"experiment 'parity': no recipe {name!r}. Nearest names: {nearest(name, list(RECIPES))}.")
    return RECIPES[name]


def _point(recipe: Recipe, trained: Trained, seed: int, asked: int) -> dict[str, Any]:
    """The result for one number of nodes: the errors of all networks, and which one was chosen."""
    errors = trained.errors[asked]
    dense = errors if recipe.start is None else trained.errors[recipe.start]
    return {
        "experiment": "parity",
        "recipe": recipe.name,
        "seed": seed,
        "asked": asked,
        "kept": trained.kept[asked],
        "total": recipe.start or asked,
        "test_error": errors.test[errors.chosen],
        "val_error": errors.validation[errors.chosen],
        "dense_test_error": dense.test[dense.chosen],
        "epochs": recipe.dense if asked == recipe.start else recipe.epochs,
        "init": errors.chosen,
        "val_errors": errors.validation,
        "test_errors": errors.test,
    }
