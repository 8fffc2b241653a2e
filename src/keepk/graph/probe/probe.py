"""Probing: cut copies of the model and trace them again, until every operation does what the atoms predict.

The facts of a trace say which channels belong together. They do not say whether the model's Python code survives a
change of width: ``x.split(self.width, dim=1)`` fails as soon as a channel is removed, unless `width` changes with it.
So `settle` removes some units from a copy and replays every forward pass (`replay`). The `REPAIRS` are tried on the
first mismatch, in order; each is a function that returns extended `Assumptions`, or None if it does not apply. If none
of them helps, one of the `CONCESSIONS` gives up the units that are to blame. Then the facts are solved again under the
new assumptions, and the next copy is cut, until all copies fit.

Assumptions only grow, so the loop ends. In this model a repair finds that `width` has to follow the number of channels:

>>> import keepk, torch
>>> from torch import nn
>>> class Halves(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.first, self.left, self.right, self.width = nn.Linear(8, 12), nn.Linear(6, 3), nn.Linear(6, 3), 6
...
...     def forward(self, x):
...         left, right = self.first(x).split(self.width, dim=1)
...         return self.left(left) + self.right(right)
>>> graph = keepk.trace(Halves(), torch.zeros(2, 8))
>>> [(constant.attribute, constant.shape, constant.dim) for constant in graph.constants]
[('width', (2, 6), 1)]
>>> [(it.attribute, it.old, it.new) for it in graph.edits(graph.choose(0.5)).settings]
[('out_features', 12, 6), ('in_features', 6, 3), ('in_features', 6, 3), ('width', 6, 3)]
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from keepk.errors import ShrinkError
from keepk.graph.choose import choose_half, choose_one, choose_sources, choose_unevenly
from keepk.graph.graph import Graph
from keepk.graph.ids.facts import Bound, Facts, Line, Lines, Reason
from keepk.graph.ids.maps import Map
from keepk.graph.probe.repairs import ProgramNumbers, Where, passing_through, rows_of_both
from keepk.graph.probe.replay import Mismatch, Modes, Replays
from keepk.graph.solve.solve import Solution, alive_atoms, solve
from keepk.graph.tracer import Step
from keepk.graph.units import Constant, Wiring
from keepk.model.copies import Workshop
from keepk.model.edits import Indices

# Bounds the time of a trace: each round takes at least one forward pass. Networks that fit at all needed far fewer.
ROUNDS = 60


class NotRepeatable(Exception):  # noqa: N818 - a signal: the model is traced again
    """Raised when an uncut copy differs from the first trace."""


@dataclass(frozen=True)
class Assumptions:
    """Everything that probing has learned so far, in addition to the facts of the trace.

    A repair returns an extended value (`dataclasses.replace`); nothing is ever removed.

    Attributes:
        constants: Attributes of the model that have to follow a size.
        ties: Parts whose sizes are one number in the model's Python, so that they must lose equal numbers.
        aligned: Parts whose remaining count must be a multiple of `solve.ALIGNED`.
        loosened: Heads that cannot be removed as a whole; the positions within them may be, equally in each head.
        literals: (operation, place) of slices with hard-coded bounds. Facts of such a slice bind no parts.
        lossy: Atoms whose removal changes a number that is computed from a size, such as 1 / sqrt(d).
        pins: Atoms that cannot be removed.
        modes: The passes that every copy repeats. Train mode is left out until it turns out to matter.
    """

    constants: tuple[Constant, ...] = ()
    ties: tuple[Bound, ...] = ()
    aligned: tuple[Bound, ...] = ()
    loosened: tuple[Lines, ...] = ()
    literals: frozenset[tuple[str, str]] = frozenset()
    lossy: tuple[Bound, ...] = ()
    pins: tuple[Bound, ...] = ()
    modes: Modes = "runs"

    def solved_like(self, other: "Assumptions") -> bool:
        """Whether both lead to the same solution: constants and modes only affect replays."""
        # By identity: `replace` keeps the fields that a repair did not touch, and arrays have no plain equality.
        fields = ("ties", "aligned", "loosened", "literals", "lossy", "pins")
        return all(getattr(self, name) is getattr(other, name) for name in fields)

    def with_constants(self, more: Iterable[Constant]) -> "Assumptions":
        """These assumptions and more constants; an attribute that is known already keeps its meaning."""
        known = {_attribute(constant): constant for constant in self.constants}
        for constant in more:
            known.setdefault(_attribute(constant), constant)
        return replace(self, constants=tuple(known.values()))


def _attribute(constant: Constant) -> tuple[str, str, int | None]:
    return constant.module, constant.attribute, constant.item


@dataclass(frozen=True, eq=False)
class Bench:
    """The model and its traces, which stay the same while assumptions grow.

    Args:
        workshop: Makes the copies.
        replays: The traced forward passes, which every copy must repeat.
        facts: The facts of these passes.
        atoms: The number of atoms.
        wiring: The tensors and axes of the model.
        tried: Attempts that are not worth repeating; filled by the repairs.
    """

    workshop: Workshop
    replays: Replays
    facts: Facts
    atoms: int
    wiring: Wiring
    tried: set[object] = field(default_factory=set)

    @cached_property
    def steps(self) -> list[Step]:
        """The operations of all passes; a mismatch counts through these."""
        return self.replays.steps

    @cached_property
    def numbers(self) -> ProgramNumbers:
        """The numbers in the model's Python objects."""
        return ProgramNumbers(self.steps, dict(self.workshop.model.named_modules()))

    def solve(self, assumptions: Assumptions) -> Solution:
        """The classes of atoms under some assumptions."""
        known = self.facts
        even = [it for it in known.even if (it.reason.operation, it.reason.place) not in assumptions.literals]
        facts = replace(known, lossy=[*known.lossy, *assumptions.lossy], even=[*even, *assumptions.ties])
        return solve(facts, self.atoms, assumptions.pins, assumptions.loosened, assumptions.aligned)

    def attempt(self, graph: Graph, units: Indices, modes: Modes) -> Mismatch | None:
        """Cut units from a copy and replay it; the first mismatch, or None if the copy fits."""
        try:
            edits = graph.edits(units)
        except ShrinkError as error:
            return Mismatch(-1, str(error))
        return self.replays.mismatch(self.workshop, graph, edits, modes=modes)

    def refuse_unrepeatable(self, graph: Graph, modes: Modes) -> None:
        """Raise `NotRepeatable` if even an uncut copy fails: a failing cut then says nothing about its units."""
        if "uncut" not in self.tried:
            if (found := self.attempt(graph, np.zeros(0, np.int64), modes)) is not None:
                raise NotRepeatable(found.why)
            self.tried.add("uncut")


@dataclass(frozen=True, eq=False)
class Trial:
    """Assumptions and the graph that follows from them."""

    bench: Bench
    assumptions: Assumptions
    graph: Graph

    @staticmethod
    def first(bench: Bench) -> "Trial":
        """The trial without any assumptions."""
        assumptions = Assumptions()
        return Trial(bench, assumptions, Graph(bench.wiring, bench.solve(assumptions)))

    def assuming(self, assumptions: Assumptions) -> "Trial":
        """The trial under other assumptions; solves again only if that can change the solution."""
        if assumptions.solved_like(self.assumptions):
            return Trial(self.bench, assumptions, self.graph.with_constants(assumptions.constants))
        solution = self.bench.solve(assumptions)
        return Trial(self.bench, assumptions, Graph(self.bench.wiring, solution, list(assumptions.constants)))

    def attempt(self, units: Indices, modes: Modes | None = None) -> Mismatch | None:
        """See `Bench.attempt`."""
        return self.bench.attempt(self.graph, units, modes or self.assumptions.modes)


@dataclass(frozen=True, eq=False)
class Failure:
    """A cut copy that did not fit: the input of every repair.

    Attributes:
        trial: The assumptions under which it was cut, and their graph.
        mismatch: The first difference.
        units: The units that were removed.
    """

    trial: Trial
    mismatch: Mismatch
    units: Indices

    @property
    def lossy(self) -> bool:
        """Whether lossy units were removed: exact units are probed first, then all units."""
        return bool(self.trial.graph.units.lossy[self.units].any())

    @property
    def step(self) -> Step:
        """The operation that failed."""
        return self.trial.bench.steps[max(self.mismatch.step, 0)]

    def reason(self, why: str) -> Reason:
        """A reason with the place of the operation that failed."""
        return Reason(why, self.step.name, self.step.module, self.step.place)

    @cached_property
    def blame(self) -> tuple["Failure", Map]:
        """The failure, and the atoms to blame: those of the outputs or inputs of the operation.

        If the operation has no atoms that could be removed, the units are bisected for those that fail alone, and the
        failure is the one that they cause. Cached, since every attempt is a forward pass.
        """
        graph = self.trial.graph
        kind = graph.units.lossy == self.lossy
        removable = np.zeros(len(graph.solution.classes), bool)
        removable[graph.units.classes[kind]] = True
        atoms = passing_through(self.trial.bench.steps, self.mismatch.step, removable[graph.solution.classes])
        if len(atoms):
            return self, atoms
        found, culprits = self.culprits()
        mine = culprits[kind[culprits]]
        # If there is no culprit of the kind that is being probed, give up the others, or no round would change
        # anything.
        blamed: Map = graph.units.classes[mine if len(mine) else culprits].astype(np.int32)
        return found, blamed

    def culprits(self) -> tuple["Failure", Indices]:
        """The units of the groups that fail when removed alone, found by bisection, and that failure."""
        groups = [np.concatenate(blocks) for blocks in self.trial.graph.choices()]
        groups = [group for group in groups if np.isin(group, self.units).any()]
        mismatch = self.mismatch
        while len(groups) > 1:
            halves = groups[: len(groups) // 2], groups[len(groups) // 2 :]
            tries = ((half, self.trial.attempt(np.intersect1d(np.concatenate(half), self.units))) for half in halves)
            failing = next(((half, why) for half, why in tries if why is not None), None)
            if failing is None:  # they fail only in combination
                break
            groups, mismatch = failing
        return replace(self, mismatch=mismatch), np.concatenate(groups)


Repair: TypeAlias = Callable[[Failure], Assumptions | None]


def follow_numbers(failure: Failure) -> Assumptions | None:
    """Let attributes follow a size: those near the failing operation that equal the old size, if the copy gets further.

    A constant that helps one module is assumed for every module that ran the same operation on the same line.
    """
    if failure.mismatch.step < 0 or failure.mismatch.number:
        return None
    bench, graph, number = failure.trial.bench, failure.trial.graph, failure.mismatch.step
    removed = graph.edits(failure.units).units
    alive = alive_atoms(graph.solution.classes, graph.units.classes[removed])
    # Lazily, from near to far: a search stops at the first place where something helps.
    searched = (_most_helpful(bench.numbers.too_large(number, alive, where), failure) for where in Where)
    best = next((constants for constants in searched if constants), [])
    if not best:
        return None
    siblings = [sibling for constant in best for sibling in bench.numbers.siblings(constant, number)]
    return failure.trial.assumptions.with_constants(siblings)


def _most_helpful(candidates: Iterable[Constant], failure: Failure) -> list[Constant]:
    """The single constant that gets furthest, or the smallest useful set of all of them; empty if none helps."""
    listed, bench = list(candidates), failure.trial.bench
    best, reached = list[Constant](), failure.mismatch.step
    for group in [[one] for one in listed] + ([listed] if len(listed) > 1 else []):
        key = (failure.mismatch.step, *((*_attribute(c), c.shape, c.dim) for c in group))
        if key in bench.tried:
            continue
        bench.tried.add(key)
        if (after := _reached(failure, group)) > reached:
            best, reached = group, after
        if reached == len(bench.steps):
            break
    for constant in best if len(best) > 1 else ():  # drop those that are not needed: they count something else
        fewer = [other for other in best if other is not constant]
        best = fewer if _reached(failure, fewer) >= reached else best
    return best


def _reached(failure: Failure, constants: Sequence[Constant]) -> int:
    """The step at which the cut copy fails when these constants follow as well."""
    trial = failure.trial
    graph = trial.graph.with_constants([*trial.assumptions.constants, *constants])
    after = trial.bench.attempt(graph, failure.units, trial.assumptions.modes)
    return len(trial.bench.steps) if after is None else after.step


def tie_parts(failure: Failure) -> Assumptions | None:
    """Make parts lose equal numbers if one attribute is the size of both, such as `head_dim` of queries and keys."""
    if failure.mismatch.step < 0 or failure.mismatch.number:
        return None
    assumptions = failure.trial.assumptions
    known = {_attribute(constant): constant for constant in assumptions.constants}
    ties = {bound.array.tobytes(): bound for bound in assumptions.ties}
    for new in failure.trial.bench.numbers.at(failure.mismatch.step):
        old = known.get(_attribute(new))
        if old is not None and len(rows := rows_of_both(old, new)):
            why = f"has its size in {new.attribute!r}, as another part"
            ties.setdefault(rows.tobytes(), Bound(rows, failure.reason(why)))
    return replace(assumptions, ties=tuple(ties.values())) if len(ties) > len(assumptions.ties) else None


def try_multiples(failure: Failure) -> Assumptions | None:
    """If torch refuses a width, require a multiple of 8, provided that such a width gets further."""
    bench, step, lossy = failure.trial.bench, failure.step, failure.lossy
    if not failure.mismatch.raised or (step.name, step.place, lossy) in bench.tried:
        return None
    bench.tried.add((step.name, step.place, lossy))
    assumptions = _aligned(failure)
    then = failure.trial.assuming(assumptions)
    chosen, atoms = choose_unevenly(then.graph, lossy=lossy), assumptions.aligned[-1].array
    if np.isin(then.graph.solution.classes[atoms], then.graph.units.classes[chosen]).any():
        after = then.attempt(chosen)
        if after is None or after.step > failure.mismatch.step:
            return assumptions
    return None


def _aligned(failure: Failure) -> Assumptions:
    """The assumption that the remaining number of the atoms to blame must be a multiple of 8."""
    found, atoms = failure.blame
    graph = failure.trial.graph
    if not np.isin(graph.solution.classes[atoms], graph.units.classes[failure.units]).any():
        found, culprits = replace(failure, mismatch=found.mismatch).culprits()
        atoms = graph.units.classes[culprits].astype(np.int32)
    bound = Bound(atoms, found.reason(f"other widths do not fit: {found.mismatch.why}"[:200]))
    return replace(failure.trial.assumptions, aligned=(*failure.trial.assumptions.aligned, bound))


def require_multiples(failure: Failure) -> Assumptions | None:
    """Require a multiple of 8 if all larger cuts fit and a cut of single units does not.

    If the copy has the wrong channels, a position is hard-coded in the model, which no width repairs.
    """
    return None if failure.mismatch.others else _aligned(failure)


def loosen_heads(failure: Failure) -> Assumptions | None:
    """If heads cannot be removed as a whole, allow removing positions within them, equally many from each head."""
    found, atoms = failure.blame
    if found.mismatch.number:
        return None
    classes, known = failure.trial.graph.solution.classes, failure.trial.assumptions.loosened
    blamed = np.zeros(len(classes), bool)
    blamed[classes[atoms]] = True
    heads = failure.trial.bench.facts.lines[Line.HEADS]
    fresh = [lines for lines in heads if blamed[classes[lines.cells]].any() and lines not in known]
    return replace(failure.trial.assumptions, loosened=(*known, *fresh)) if fresh else None


def mark_lossy(failure: Failure) -> Assumptions | None:
    """Mark the units as lossy if the only change is in a number that is computed from a size."""
    found, atoms = failure.blame
    if not found.mismatch.number:
        return None
    reason = found.reason(f"a number that depends on the size is used: {found.mismatch.why}")
    # Rows of (atom, 0): `Facts.lossy` has rows that are normalised together, and each of these is lossy by itself.
    bound = Bound(np.stack([atoms, np.zeros_like(atoms)], axis=1), reason)
    return replace(failure.trial.assumptions, lossy=(*failure.trial.assumptions.lossy, bound))


def pin(failure: Failure) -> Assumptions | None:
    """Fix the axis at the operation that failed."""
    found, atoms = failure.blame
    assumptions, step = failure.trial.assumptions, found.step
    bound = Bound(atoms, found.reason(f"the size is written in the model's Python: {found.mismatch.why}"[:200]))
    # A slice binds its parts on the assumption that its bounds follow the width; these bounds do not.
    literals = {(step.name, step.place)} if step.name == "aten::slice" else set()
    return replace(assumptions, pins=(*assumptions.pins, bound), literals=assumptions.literals | literals)


# The order matters. Letting a number follow its size keeps most units free, so it comes first. Ties are looked for
# among numbers that already follow. Multiples are tried last, because they restrict every later choice.
REPAIRS: tuple[Repair, ...] = (follow_numbers, tie_parts, try_multiples)
# Units that are given up, from the smallest loss to the largest.
CONCESSIONS: tuple[Repair, ...] = (loosen_heads, mark_lossy, pin)


def repaired(failure: Failure, repairs: Sequence[Repair]) -> Trial | None:
    """The trial under the assumptions of the first repair that helps; None if none does."""
    found = (repair(failure) for repair in repairs)
    assumptions = next((it for it in found if it is not None), None)
    return None if assumptions is None else failure.trial.assuming(assumptions)


def settle(bench: Bench) -> Graph:
    """Probe parts of the exact units of every group, then of all units, until every copy fits.

    Raises:
        NotRepeatable: An uncut copy differs from the first trace.
    """
    trial, fitting = Trial.first(bench), None
    while trial.graph.solution is not fitting:  # a concession for lossy units may free exact ones: probe those again
        trial = _probed(trial, lossy=False)
        fitting = trial.graph.solution
        trial = _probed(trial, lossy=True)
    following = {*map(_attribute, trial.assumptions.constants)}
    following |= {(it.module, it.attribute, it.item) for it in bench.wiring.sized}
    beside = [*bench.numbers.beside(), *bench.numbers.ranks_beside(bench.wiring)]
    trial.graph.beside = tuple(it for it in beside if _attribute(it) not in following)
    return trial.graph


def _probed(trial: Trial, *, lossy: bool) -> Trial:
    """Cut copies until all of them fit; after `ROUNDS`, pin all units of the kind."""
    failing = 0
    for _ in range(ROUNDS):
        trial, failure = _first_failure(trial, lossy=lossy)
        if failure is not None:
            then = repaired(failure, REPAIRS)
            if then is None:
                # A forward that differs from pass to pass would fail on any copy. Check that before giving up units.
                trial.bench.refuse_unrepeatable(trial.graph, trial.assumptions.modes)
                then = repaired(failure, CONCESSIONS)
        else:
            failure = _failure_of_one(trial, lossy=lossy)
            if failure is None:
                return trial
            then = repaired(failure, (require_multiples, *CONCESSIONS))
        assert then is not None
        trial, failing = then, max(failure.mismatch.step, 0)
    return _all_pinned(trial, trial.bench.steps[failing], lossy=lossy)


def _first_failure(trial: Trial, *, lossy: bool) -> tuple[Trial, Failure | None]:
    """The first of three cuts that does not fit: half of every group, uneven shares, and sources."""
    for number, choose in enumerate((choose_half, choose_unevenly, choose_sources)):
        units = choose(trial.graph, lossy=lossy)
        of_kind = trial.graph.units.lossy[units] == lossy
        # If train mode echoes eval mode, one of the cuts runs in train mode, which covers it without another pass.
        modes: Modes = "trained" if number == 1 and trial.assumptions.modes == "runs" else trial.assumptions.modes
        if of_kind.any() and (found := trial.attempt(units, modes)) is not None:
            echoed = any(found.run is run for run, _ in trial.bench.replays.echoes)
            if echoed and (plain := trial.attempt(units)) is not None:
                found = plain  # it also fails in eval mode, whose steps are easier to repair
            elif echoed:
                # Only train mode fails, so every copy has to repeat it from now on.
                trial = trial.assuming(replace(trial.assumptions, modes="all"))
            return trial, Failure(trial, found, units)
    return trial, None


def _failure_of_one(trial: Trial, *, lossy: bool) -> Failure | None:
    """The failure of a cut of one unit of each group, if it does not fit: odd widths, and shifted positions."""
    units = choose_one(trial.graph, lossy=lossy)
    of_kind = trial.graph.units.lossy[units] == lossy
    found = trial.attempt(units) if of_kind.any() else None
    return None if found is None else Failure(trial, found, units)


def _all_pinned(trial: Trial, step: Step, *, lossy: bool) -> Trial:
    """Pin every remaining unit of the kind: probing did not converge."""
    units = trial.graph.units
    atoms = units.classes[units.lossy == lossy].astype(np.int32)
    reason = Reason(f"did not fit after {ROUNDS} tries on cut copies", step.name, step.module, step.place)
    return trial.assuming(replace(trial.assumptions, pins=(*trial.assumptions.pins, Bound(atoms, reason))))
