"""Train all networks of the parity figure at once: every initialisation and every number of nodes, in one stack.

Data (`draw`): the label is the product of five of fifty signs, and one label in ten is wrong.

Stack (`Stack`): many networks with one hidden layer in one module, trained together by one optimizer. Every member sees
the same batches, so the first layers of all members are one matrix product. Pruned nodes are removed. Members with
fewer nodes than the widest are padded with nodes of zeros, which stay zero: tanh(0) = 0, so neither their incoming nor
their outgoing weights ever get a gradient.

Lines (`Line`, `split`): networks with the same initialisation and different numbers of nodes to keep are identical
until the event at which their plans differ. Until then one member of the stack represents all of them; then it splits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import cos, pi
from time import perf_counter, process_time
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from keepk.errors import DataError, RankError
from keepk.metrics.layers import Layer
from keepk.plan.numbers import count
from keepk.plan.phases import Phase
from keepk.plan.schedules import AnySchedule, plan
from keepk.plan.spaces import channels
from keepk.run.pruner import Pruner

INPUTS, PARITY, NOISE = 50, 5, 0.1
SIZES = (15_000, 5_000, 5_000)
NEAR = 0.2  # percentage points above the noise floor that still count as reaching it


def at_floor(error: float, floor: float) -> bool:
    """Whether an error reaches the noise floor, both in percent: 10.3 reaches 10.1.

    >>> at_floor(10.3, 10.1), at_floor(10.32, 10.1)
    (True, False)
    """
    return error <= floor + NEAR + 1e-9  # 10.1 + 0.2 is below 10.3 in floats


@dataclass(frozen=True)
class Part:
    """Signs [N, 50], their labels [N] of -1 or 1, and which of the labels are wrong [N]."""

    signs: Tensor
    labels: Tensor
    flipped: Tensor

    def to(self, target: torch.device | torch.dtype | str) -> "Part":
        """The same part on another device, or with signs and labels of another dtype."""
        flipped = self.flipped if isinstance(target, torch.dtype) else self.flipped.to(target)
        return Part(self.signs.to(target), self.labels.to(target), flipped)

    @property
    def floor(self) -> float:
        """The error of the true parity on these labels in percent; lower errors are due to chance."""
        return 100 * int(self.flipped.count_nonzero()) / len(self.flipped)

    def errors(self, outputs: Tensor) -> Tensor:
        """The error of each row of `outputs` in percent. An output of exactly zero counts as wrong."""
        wrong = (outputs * self.labels <= 0).count_nonzero(-1)
        return 100 * wrong.double() / len(self.labels)


@dataclass(frozen=True)
class Parity:
    """One draw of the data."""

    train: Part
    validation: Part
    test: Part

    def to(self, target: torch.device | torch.dtype | str) -> "Parity":
        """The same draw on another device, or with signs and labels of another dtype."""
        return Parity(*(part.to(target) for part in (self.train, self.validation, self.test)))


def draw(seed: int, *, sizes: tuple[int, int, int] = SIZES) -> Parity:
    r"""Draw uniform signs and labels that are the product of the first five, wrong with probability 0.1.

    .. math:: y = \pm x_1 x_2 x_3 x_4 x_5, \quad P(-) = 0.1

    The learner does not know the five indices. A network treats all inputs alike, so they may be the first five.

    >>> part = draw(1, sizes=(6, 2, 4)).train
    >>> bool(((part.signs[:, :5].prod(1) != part.labels) == part.flipped).all())
    True
    """
    count(seed, "parity: seed", DataError, least=0)
    for size in sizes:
        count(size, "parity: size of a part", DataError, least=1)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (sum(sizes), INPUTS), generator=generator).float() * 2 - 1
    flipped = torch.rand(sum(sizes), generator=generator) < NOISE
    labels = signs[:, :PARITY].prod(1) * torch.where(flipped, -1.0, 1.0)
    parts = zip(*(torch.split(tensor, list(sizes)) for tensor in (signs, labels, flipped)), strict=True)
    return Parity(*(Part(*tensors) for tensors in parts))


class Stack(nn.Module):
    r"""Networks with one hidden layer of tanh units.

    .. math:: f_s(x) = c_s + \sum_h v_{sh} \tanh(W_{sh} x + b_{sh})

    Args:
        incoming: W with b as its last column, members x nodes x (inputs + 1).
        outgoing: v, members x nodes.
        offset: c, one per member.
        widths: The number of nodes of each member; the nodes after these are padding.
    """

    def __init__(self, incoming: Tensor, outgoing: Tensor, offset: Tensor, widths: Sequence[int]) -> None:
        super().__init__()
        alive = _first(widths, outgoing)
        self.incoming = nn.Parameter(torch.where(alive[..., None], incoming, 0.0))
        self.outgoing = nn.Parameter(torch.where(alive, outgoing, 0.0))
        self.offset = nn.Parameter(offset.clone())
        self.widths = tuple(widths)

    @classmethod
    def fresh(cls, widths: Sequence[int], inputs: int, seeds: Sequence[int]) -> "Stack":
        """Members initialised as `nn.Linear` does, each with a separate seed.

        >>> Stack.fresh([3, 2], 50, seeds=[0, 1])(torch.ones(4, 51)).shape
        torch.Size([2, 4])
        """
        widest = max(widths)
        members = [_fresh_member(width, inputs, seed) for width, seed in zip(widths, seeds, strict=True)]
        incoming = torch.stack([F.pad(first, (0, 0, 0, widest - len(first))) for first, _, _ in members])
        outgoing = torch.stack([F.pad(last, (0, widest - len(last))) for _, last, _ in members])
        return cls(incoming, outgoing, torch.stack([offset for _, _, offset in members]), widths)

    def forward(self, signs: Tensor) -> Tensor:
        """The outputs, members x examples. The last column of `signs` must be ones."""
        members, nodes, columns = self.incoming.shape
        hidden = (self.incoming.view(-1, columns) @ signs.T).view(members, nodes, -1).tanh()
        return (self.outgoing[:, None] @ hidden).squeeze(1) + self.offset[:, None]

    def loss(self, signs: Tensor, labels: Tensor) -> Tensor:
        """The sum of the members' mean logistic losses; the gradient of a member depends on that member alone."""
        return F.softplus(-labels * self(signs)).mean(1).sum()

    @torch.no_grad()
    def scores(self) -> Tensor:
        """|v| ||W||, members x nodes, a bound on how much a node can change the output."""
        scores: Tensor = self.outgoing.abs() * torch.linalg.vector_norm(self.incoming, dim=2)
        return scores

    @torch.no_grad()
    def regroup(self, members: Sequence[int], widths: Sequence[int], optimizer: Optimizer) -> None:
        """Replace the members by copies of `members`, each with its `widths` best nodes, and update the optimizer.

        Among equal scores the earlier node is kept; nodes keep their order.
        """
        source = torch.tensor(members, device=self.outgoing.device)
        order = ranking(self.scores())[source, : max(widths)]
        alive = _first(widths, order)
        # Padding sorts to the end as an index past the last node, and is then clamped to a valid index that is masked.
        nodes = torch.where(alive, order, self.outgoing.shape[1]).sort(1).values.clamp(max=self.outgoing.shape[1] - 1)

        def of_nodes(tensor: Tensor) -> Tensor:
            shape = alive.shape + (1,) * (tensor.dim() - 2)
            return torch.where(alive.view(shape), tensor[source[:, None], nodes], 0.0)

        _replace(self.incoming, of_nodes, optimizer)
        _replace(self.outgoing, of_nodes, optimizer)
        _replace(self.offset, lambda tensor: tensor[source], optimizer)
        self.widths = tuple(widths)


def ranking(scores: Tensor) -> Tensor:
    """The indices of each row from the best score to the worst, the earlier of equal scores first.

    >>> ranking(torch.tensor([[1.0, 3.0, 1.0, 2.0]]))
    tensor([[1, 3, 0, 2]])
    """
    bad = int(scores.isnan().any(1).count_nonzero())
    if bad:
        raise RankError(f"stack of {len(scores)} networks: {bad} have NaN scores. Lower the learning rate.")
    return scores.argsort(dim=1, descending=True, stable=True)


def with_ones(signs: Tensor) -> Tensor:
    """The inputs with a column of ones, which multiplies the biases."""
    return F.pad(signs, (0, 1), value=1.0)


def train_epoch(stack: Stack, optimizer: Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Train for one pass over batches of signs (with ones) and labels."""
    for signs, labels in batches:
        optimizer.zero_grad()
        stack.loss(signs, labels).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()


def _fresh_member(width: int, inputs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape: tuple[int, ...], fan_in: int) -> Tensor:
        drawn: Tensor = (2 * torch.rand(shape, generator=generator) - 1) / fan_in**0.5
        return drawn

    return uniform((width, inputs + 1), inputs), uniform((width,), width), uniform((), width)


def _first(widths: Sequence[int], like: Tensor) -> Tensor:
    """A mask of the first `width` nodes of each row."""
    return torch.arange(like.shape[1], device=like.device) < torch.tensor(widths, device=like.device)[:, None]


def _replace(parameter: nn.Parameter, change: Callable[[Tensor], Tensor], optimizer: Optimizer) -> None:
    """Apply `change` to the parameter and to the optimizer's state of the same shape."""
    shape = parameter.shape
    parameter.data, parameter.grad = change(parameter.data), None
    for name, value in optimizer.state[parameter].items():
        if value.shape == shape:
            optimizer.state[parameter][name] = change(value)


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


def train_by_pruner(recipe: Recipe, parity: Parity, *, seed: int, inits: int, goals: Sequence[int]) -> Trained:
    """The same as `train`, with separate networks that `keepk.Pruner` prunes: the library itself, without the stack.

    Initial weights, batches, plans and scores are those of the stack, so that both prune the same nodes.
    """
    assert recipe.start is not None
    began, cpu_began = perf_counter(), process_time()
    errors, kept = dict[int, Errors](), dict[int, int]()
    for goal in goals:
        networks = [_pruned_network(recipe, parity, seed, init, goal) for init in range(inits)]
        (kept[goal],) = {network.nodes for network in networks}
        errors[recipe.start] = Errors(*zip(*(network.dense for network in networks), strict=True))
        errors[goal] = Errors(*zip(*(network.pruned for network in networks), strict=True))
    kept[recipe.start] = recipe.start
    return Trained(errors, kept, round(perf_counter() - began, 1), round(process_time() - cpu_began, 1))


@dataclass(frozen=True)
class _Network:
    """The number of nodes at the end, and validation and test errors before the first event and at the end."""

    nodes: int
    dense: tuple[float, float]
    pruned: tuple[float, float]


def _pruned_network(recipe: Recipe, parity: Parity, seed: int, init: int, goal: int) -> _Network:
    assert recipe.start is not None
    incoming, outgoing, offset = _fresh_member(recipe.start, INPUTS, SEEDS_A_DRAW * seed + 1 + init)
    first, last = nn.Linear(INPUTS, recipe.start), nn.Linear(recipe.start, 1)
    with torch.no_grad():
        first.weight.copy_(incoming[:, :-1])
        first.bias.copy_(incoming[:, -1])
        last.weight.copy_(outgoing[None])
        last.bias.copy_(offset[None])
    model = nn.Sequential(first, nn.Tanh(), last).to(parity.train.signs)
    groups = [{"params": [*first.parameters()]}, {"params": [*last.parameters()]}]
    optimizer = AdamW(groups, lr=recipe.lr, fused=True)
    assert recipe.optimizer == "adam"
    assert recipe.schedule is not None
    space = channels("0", keep=goal, schedule=recipe.schedule, metric=weight_in_times_out, name="nodes")
    phases = [Phase(recipe.dense), Phase(recipe.anneal, prune=("nodes",)), Phase(recipe.tail)]
    pruner = Pruner(model, space, optimizer, phases=phases, example=parity.train.signs[:2])
    order = torch.Generator().manual_seed(SEEDS_A_DRAW * seed)

    @torch.no_grad()
    def errors() -> tuple[float, float]:
        validation, test = (part.errors(model(part.signs).squeeze(1)) for part in (parity.validation, parity.test))
        return float(validation), float(test)

    for epoch in range(1, recipe.epochs + 1):
        for signs, labels in _batches(recipe, parity.train, epoch, order, optimizer):
            optimizer.zero_grad()
            loss = F.softplus(-labels * model(signs[:, :-1]).squeeze(1)).mean()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
        if epoch == recipe.dense:
            dense = errors()
        pruner.step()
    pruner.close()
    return _Network(len(first.bias), dense, errors())


def weight_in_times_out(layer: Layer) -> Tensor:
    """A metric of channels: |v| ||(W, b)||, as `Stack.scores`."""
    rows = [part.tensor.view(len(layer), -1) for part in (*layer.producer, *layer.carrier)]  # weights, and the bias
    (reader,) = layer.reader
    scores: Tensor = reader.tensor.view(len(layer)).abs() * torch.linalg.vector_norm(torch.cat(rows, dim=1), dim=1)
    return scores


@torch.no_grad()
def _errors(stack: Stack, parity: Parity) -> Errors:
    """The errors of every line."""
    validation, test = (part.errors(stack(with_ones(part.signs))) for part in (parity.validation, parity.test))
    return Errors(tuple(validation.tolist()), tuple(test.tolist()))
