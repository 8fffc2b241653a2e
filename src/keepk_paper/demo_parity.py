"""The demo's parity experiment: `keepk paper run parity` with fewer starts, fewer epochs and one draw."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keepk.plan.schedules import Annealing
from keepk_paper.parity import ADAM, KEEPK, NODES
from keepk_paper.parity_training import SIZES, Parity, Recipe, Trained, at_floor, train

# 12 nodes are left after the first 6 epochs of annealing, then one is removed every second epoch.
SCHEDULE = Annealing(p0=0.95, n1=6, nu=1 / NODES, every=2)
ANNEALED = replace(KEEPK, dense=24, anneal=30, tail=10, schedule=SCHEDULE)
FROM_THE_START = replace(ADAM, dense=54, tail=10)
Watch = Callable[[str, str], None]


@dataclass(frozen=True)
class Setting:
    """The size of the experiment. Both recipes get the same number of starts and epochs."""

    goals: Sequence[int] = range(1, 11)
    inits: int = 3
    sizes: tuple[int, int, int] = SIZES
    recipes: tuple[Recipe, ...] = (ANNEALED, FROM_THE_START)

    @property
    def epochs(self) -> int:
        """The total number of epochs."""
        return sum(recipe.epochs for recipe in self.recipes)


def parity_points(parity: Parity, setting: Setting, *, seed: int, watch: Watch) -> tuple[dict[str, Any], ...]:
    """The errors in percent by recipe and number of nodes: of all starts, and of the one chosen by validation."""
    points = list[dict[str, Any]]()
    for recipe in setting.recipes:
        trained = train(
            recipe,
            parity,
            seed=seed,
            inits=setting.inits,
            goals=setting.goals,
            watch=lambda _, stack: watch("parity", f"{max(stack.widths)} hidden nodes"),
        )
        points += [_point(recipe, trained, parity, goal) for goal in setting.goals]
    return tuple(points)


def _point(recipe: Recipe, trained: Trained, parity: Parity, goal: int) -> dict[str, Any]:
    errors, floor = trained.errors[goal], parity.test.floor
    return {
        "recipe": recipe.name,
        "asked": goal,
        "kept": trained.kept[goal],
        "total": recipe.start or goal,
        "val_error": errors.validation[errors.chosen],
        "test_error": errors.test[errors.chosen],
        "test_errors": errors.test,
        "noise_floor": floor,
        "at_floor": at_floor(errors.test[errors.chosen], floor),
    }
