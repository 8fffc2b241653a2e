"""Train all networks of the parity figure at once: every initialisation and every number of nodes, in one stack.

Networks with the same initialisation and different numbers of nodes to keep are identical as long as their plans agree.
Until then they are trained once: one line of the stack represents all of them, and splits at the event at which their
plans differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import cos, pi
from time import perf_counter, process_time
from typing import TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from keepk.paper.parity_data import INPUTS, Parity, Part
from keepk.paper.parity_stack import Stack, train_epoch, with_ones
from keepk.plan.schedules import AnySchedule, plan

Shrink: TypeAlias = tuple[float, float]

SEEDS_A_DRAW = 1_000  # more than there are initialisations, so that no two draws share a seed


@dataclass(frozen=True)
class Recipe:
    """How networks with one hidden layer are trained and pruned.

    Args:
        name: The name in result files.
        optimizer: `adam` is AdamW, `sgd` is plain.
        lr: The learning rate; in the last `tail` epochs it decays to zero as a cosine.
        shrink: The share of an incoming and of an outgoing weight that weight decay removes per step at the full
            learning rate; one pair each for the epochs of `dense`, `anneal` and `tail`.
        dense: Epochs before the first event.
        anneal: Epochs of the schedule.
        tail: Epochs after it.
        start: Nodes at the start. None starts with the number to keep and prunes nothing.
        schedule: The number of nodes left after each epoch of `anneal`.
        batch: Examples per step.
    """

    name: str
    optimizer: str
    lr: float
    shrink: tuple[Shrink, Shrink, Shrink]
    dense: int
    anneal: int
    tail: int
    start: int | None = None
    schedule: AnySchedule | None = None
    batch: int = 100

    @property
    def epochs(self) -> int:
        """The total number of epochs."""
        return self.dense + self.anneal + self.tail

    def fingerprint(self) -> str:
        """A hash of all settings, which tells results of a changed recipe from older ones."""
        return sha256(repr(self).encode()).hexdigest()[:16]

    def plan(self, keep: int) -> tuple[int, ...]:
        """The number of nodes before the first epoch and after each epoch."""
        if self.start is None or self.schedule is None:
            return (keep,) * (1 + self.epochs)
        events = plan(self.schedule, self.start, keep, epochs=self.anneal)
        return (self.start,) * (1 + self.dense) + events + (keep,) * self.tail

    def learning_rate(self, progress: float) -> float:
        """The learning rate after `progress` epochs.

        >>> recipe = Recipe("example", "sgd", lr=1.0, shrink=((0, 0),) * 3, dense=2, anneal=0, tail=2)
        >>> [round(recipe.learning_rate(epoch), 2) for epoch in range(5)]
        [1.0, 1.0, 1.0, 0.5, 0.0]
        """
        into_tail = progress - self.dense - self.anneal
        return self.lr if into_tail <= 0 else self.lr * 0.5 * (1 + cos(pi * into_tail / self.tail))

    def make_optimizer(self, stack: Stack) -> Optimizer:
        """The optimizer of a stack, with separate groups for incoming weights and the rest, whose decay may differ."""
        groups = [{"params": [stack.incoming]}, {"params": [stack.outgoing, stack.offset]}]
        return AdamW(groups, lr=self.lr, fused=True) if self.optimizer == "adam" else SGD(groups, lr=self.lr)

    def tune(self, optimizer: Optimizer, progress: float) -> None:
        """Set the learning rate and the decay for the step after `progress` epochs."""
        phase = (progress >= self.dense) + (progress >= self.dense + self.anneal)
        for group, shrink in zip(optimizer.param_groups, self.shrink[phase], strict=True):
            # torch multiplies the decay by the learning rate, so that `shrink` scales with the cosine too.
            group["lr"], group["weight_decay"] = self.learning_rate(progress), shrink / self.lr


@dataclass(frozen=True)
class Line:
    """A member of the stack: its initialisation, and the numbers of nodes that it will be pruned to."""

    init: int
    goals: tuple[int, ...]


@dataclass(frozen=True)
class Errors:
    """Validation and test error of each network, in percent."""

    validation: tuple[float, ...]
    test: tuple[float, ...]

    @property
    def chosen(self) -> int:
        """The index of the network with the lowest validation error, the first of equals."""
        return self.validation.index(min(self.validation))

    def of(self, places: Sequence[int]) -> "Errors":
        """The errors of the networks at `places`."""
        return Errors(tuple(self.validation[place] for place in places), tuple(self.test[place] for place in places))


@dataclass(frozen=True)
class Trained:
    """The result of a stack: errors and kept nodes by the requested number of nodes, the dense networks first."""

    errors: Mapping[int, Errors]
    kept: Mapping[int, int]
    seconds: float
    cpu_seconds: float


def split(lines: Sequence[Line], counts: Mapping[int, int]) -> tuple[list[int], list[Line], list[int]]:
    """The lines after an event: the line that each is copied from, the lines themselves, and their widths.

    >>> split([Line(0, (1, 2, 3))], {1: 2, 2: 2, 3: 3})
    ([0, 0], [Line(init=0, goals=(1, 2)), Line(init=0, goals=(3,))], [2, 3])
    """
    sources, parts, widths = list[int](), list[Line](), list[int]()
    for source, line in enumerate(lines):
        for width in dict.fromkeys(counts[goal] for goal in line.goals):
            sources.append(source)
            parts.append(Line(line.init, tuple(goal for goal in line.goals if counts[goal] == width)))
            widths.append(width)
    return sources, parts, widths


def train(
    recipe: Recipe,
    parity: Parity,
    *,
    seed: int,
    inits: int,
    goals: Sequence[int],
    watch: Callable[[int, Stack], None] | None = None,
) -> Trained:
    """Train and prune `inits` networks to every number of `goals`; `watch` gets the epoch and the stack."""
    began, cpu_began = perf_counter(), process_time()
    plans = {goal: recipe.plan(goal) for goal in goals}
    whole = [Line(init, tuple(goals)) for init in range(inits)]
    _, lines, widths = split(whole, {goal: counts[0] for goal, counts in plans.items()})
    stack = Stack.fresh(widths, INPUTS, [SEEDS_A_DRAW * seed + 1 + line.init for line in lines])
    stack = stack.to(parity.train.signs)
    optimizer = recipe.make_optimizer(stack)
    order = torch.Generator().manual_seed(SEEDS_A_DRAW * seed)
    errors, kept = dict[int, Errors](), dict[int, int]()
    for epoch in range(1, recipe.epochs + 1):
        train_epoch(stack, optimizer, _batches(recipe, parity.train, epoch, order, optimizer))
        if recipe.start is not None and epoch == recipe.dense:
            errors[recipe.start], kept[recipe.start] = _errors(stack, parity), recipe.start
        sources, lines, widths = split(lines, {goal: counts[epoch] for goal, counts in plans.items()})
        if tuple(widths) != stack.widths:
            stack.regroup(sources, widths, optimizer)
        if watch:
            watch(epoch, stack)
    of_all = _errors(stack, parity)
    for goal in goals:
        places = [place for place, line in enumerate(lines) if goal in line.goals]
        errors[goal], kept[goal] = of_all.of(places), stack.widths[places[0]]
    return Trained(errors, kept, round(perf_counter() - began, 1), round(process_time() - cpu_began, 1))


def _batches(
    recipe: Recipe, part: Part, epoch: int, order: torch.Generator, optimizer: Optimizer
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of an epoch in random order; sets learning rate and decay before each."""
    examples = torch.randperm(len(part.labels), generator=order).to(part.labels.device)
    signs, labels = with_ones(part.signs)[examples], part.labels[examples]
    batches = list(zip(torch.split(signs, recipe.batch), torch.split(labels, recipe.batch), strict=True))
    for step, batch in enumerate(batches):
        recipe.tune(optimizer, epoch - 1 + step / len(batches))
        yield batch


@torch.no_grad()
def _errors(stack: Stack, parity: Parity) -> Errors:
    """The errors of every line."""
    validation, test = (part.errors(stack(with_ones(part.signs))) for part in (parity.validation, parity.test))
    return Errors(tuple(validation.tolist()), tuple(test.tolist()))
