"""Trying out: cut copies of the model are traced again until every operation does what the maps predict.

Where one does not, a number in the model's Python stands in the way (``num_heads``, ``split_size``). Attributes of the
module and its parents that have the old size are tried; what helps is kept, for every module of that class at that line
of source. Where one number stands for two widths, both lose equally many. Nothing helps: the axis is fixed, with
operation and place. A number that is computed from a size and is not itself a size (1 / sqrt(d)) makes the units lossy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keepk.errors import ShrinkError
from keepk.graph.blame import passing_through
from keepk.graph.edits import Indices
from keepk.graph.facts import Bound, Facts, Line, Lines, Reason
from keepk.graph.graph import Graph
from keepk.graph.maps import Flags, Map
from keepk.graph.program_numbers import ProgramNumbers, Where, rows_of_both
from keepk.graph.replay import Mismatch, Modes, Replays
from keepk.graph.shell import Workshop
from keepk.graph.solve import alive_atoms, solve
from keepk.graph.tracer import Step
from keepk.graph.wiring import Constant, Wiring

ROUNDS = 60  # a bound on the wait: each is a forward pass or more


class NotRepeatable(Exception):  # noqa: N818 - it is caught at once, and the model is traced again
    """An uncut copy does something else than the first trace."""


@dataclass
class Probe:
    """A graph that is being tried out.

    Args:
        workshop: Makes the copies.
        replays: The forward passes that were traced, and that every copy must repeat.
        facts: The facts about atoms that these passes found.
        atoms: How many atoms there are.
        wiring: The tensors and axes of the model.
        pins: What stays besides what the facts say; grows.
        lossy: What is lossy besides; grows.
        constants: Numbers in the model's Python that follow a size; grows.
    """

    workshop: Workshop
    replays: Replays
    facts: Facts
    atoms: int
    wiring: Wiring
    pins: list[Bound]
    lossy: list[Bound]
    constants: list[Constant]

    def __post_init__(self) -> None:
        self._steps = self.replays.steps
        self._numbers = ProgramNumbers(self._steps, dict(self.workshop.model.named_modules()))
        self._repeats = False
        self._modes: Modes = "runs"
        self._tried = set[tuple[object, ...]]()
        self._loosened = set[Lines]()
        self._ties = dict[bytes, Bound]()  # parts whose size is one number in the model's Python
        self._aligned = list[Bound]()  # parts of which a multiple must be left
        self._literal = set[tuple[str, str]]()  # slices with numbers of their own, which bind no parts
        self.graph = self._solved()

    def _solved(self) -> Graph:
        known = self.facts
        even = [bound for bound in known.even if (bound.reason.operation, bound.reason.place) not in self._literal]
        facts = replace(known, lossy=[*known.lossy, *self.lossy], even=[*even, *self._ties.values()])
        solution = solve(facts, self.atoms, self.pins, self._loosened, self._aligned)
        return Graph(self.wiring, solution, self.constants)

    def settle(self) -> Graph:
        """Try parts of the exact units of every space, then of all units, until everything fits."""
        fitting = None
        while self.graph is not fitting:  # what gives way for lossy units may loosen exact ones: try those again
            self._try_out(lossy=False)
            fitting = self.graph
            self._try_out(lossy=True)
        following = {(it.module, it.attribute, it.item) for it in self.constants}
        following |= {(it.module, it.attribute, it.item) for it in self.wiring.sized}
        beside = [*self._numbers.beside(), *self._numbers.ranks_beside(self.wiring)]
        self.graph.beside = tuple(it for it in beside if (it.module, it.attribute, it.item) not in following)
        return self.graph

    def _try_out(self, *, lossy: bool) -> None:
        """Cut copies until one fits; where none does, all units of the kind stay."""
        failing = 0
        for _ in range(ROUNDS):
            units, found = self._first_failure(lossy=lossy)
            if found is None:
                found = self._align(lossy=lossy)
                if found is None:
                    return
            elif not self._repaired(found, units) and not self._tied(found) and not self._fits_aligned(found, units):
                self._refuse_unrepeatable()
                self._give_up(found, units)
            failing = max(found.step, 0)
        self._fix_all(self._steps[failing], lossy=lossy)

    def _refuse_unrepeatable(self) -> None:
        """Before a failure of a cut copy fixes anything, see whether an uncut one repeats the trace."""
        if not self._repeats and (found := self._attempt(np.zeros(0, np.int64))) is not None:
            raise NotRepeatable(found.why)
        self._repeats = True

    def _first_failure(self, *, lossy: bool) -> tuple[Indices, Mismatch | None]:
        """Of half of every space, of uneven shares and of sources, which do not fit; None if all do."""
        choices = self.graph.choose_half, self.graph.choose_unevenly, self.graph.choose_sources
        for number, choose in enumerate(choices):
            units = choose(lossy=lossy)
            of_kind = self.graph.units.lossy[units] == lossy
            # One of them in train mode, where that does the same but for dropout: it costs no pass more.
            trained: Modes = "trained" if number == 1 and self._modes == "runs" else self._modes
            if of_kind.any() and (found := self._attempt(units, modes=trained)) is not None:
                return units, self._in_eval_mode(found, units)
        return units, None

    def _in_eval_mode(self, found: Mismatch, units: Indices) -> Mismatch:
        """The failure as it is in eval mode; if eval mode works, train mode is tried on every copy from now on."""
        if found.run is None or not any(found.run is run for run, _ in self.replays.echoes):
            return found
        if (plain := self._attempt(units)) is not None:
            return plain
        self._modes = "all"
        return found

    def _align(self, *, lossy: bool) -> Mismatch | None:
        """Where other parts fit, and all but one unit do not, widths must be multiples."""
        units = self.graph.choose_one(lossy=lossy)
        of_kind = self.graph.units.lossy[units] == lossy
        found = self._attempt(units) if of_kind.any() else None
        if found is not None:
            if found.others:  # a position that is written in the model's Python
                self._give_up(found, units)
                return found
            self._aligned.append(self._to_align(found, units))
            self.graph = self._solved()
        return found

    def _to_align(self, found: Mismatch, units: Indices) -> Bound:
        """The atoms of which a multiple must be left, so that an operation fits."""
        found, atoms = self._blamed(found, units)
        classes = self.graph.units.classes
        if not np.isin(self.graph.solution.classes[atoms], classes[units]).any():
            found, culprits = self._culprits(found, units)
            atoms = classes[culprits].astype(np.int32)
        step = self._steps[max(found.step, 0)]
        reason = Reason(f"other widths do not fit: {found.why}"[:200], step.name, step.module, step.place)
        return Bound(atoms, reason)

    def _fits_aligned(self, found: Mismatch, units: Indices) -> bool:
        """Where torch refuses a width, whether a multiple of 8 nearby gets further; it must then be one."""
        step, lossy = self._steps[found.step], bool(self.graph.units.lossy[units].any())
        if not found.raised or (step.name, step.place, lossy) in self._tried:
            return False
        self._tried.add((step.name, step.place, lossy))
        bound = self._to_align(found, units)
        self._aligned.append(bound)
        self.graph = self._solved()
        chosen = self.graph.choose_unevenly(lossy=lossy)
        if np.isin(self.graph.solution.classes[bound.array], self.graph.units.classes[chosen]).any():
            after = self._attempt(chosen)
            if after is None or after.step > found.step:
                return True
        self._aligned.pop()
        self.graph = self._solved()
        return False

    def _fix_all(self, step: Step, *, lossy: bool) -> None:
        """Nothing is known of what was not tried out to the end."""
        units = self.graph.units
        why = f"did not fit after {ROUNDS} tries on cut copies"
        atoms = units.classes[units.lossy == lossy].astype(np.int32)
        self.pins.append(Bound(atoms, Reason(why, step.name, step.module, step.place)))
        self.graph = self._solved()

    def _attempt(
        self, units: Indices, constants: Sequence[Constant] | None = None, modes: Modes | None = None
    ) -> Mismatch | None:
        """Cut a copy and trace it again; where it went another way."""
        graph = self.graph if constants is None else Graph(self.wiring, self.graph.solution, list(constants))
        try:
            edits = graph.edits(units)
        except ShrinkError as error:
            return Mismatch(-1, str(error))
        return self.replays.mismatch(self.workshop, graph, edits, modes=modes or self._modes)

    def _repaired(self, found: Mismatch, units: Indices) -> bool:
        """Try the numbers that could be the one in the way; keep what moves the failure on."""
        if found.step < 0 or found.number:
            return False
        alive = self._alive(units)
        searched = (
            self._most_helpful(self._numbers.too_large(found.step, alive, where), found, units) for where in Where
        )
        best = next((constants for constants in searched if constants), [])
        known = {(c.module, c.attribute, c.item): c for c in self.constants}
        for constant in best:
            for sibling in self._numbers.siblings(constant, found.step):
                known.setdefault((sibling.module, sibling.attribute, sibling.item), sibling)
        self.constants[:] = known.values()  # the graph holds this very list
        return bool(best)

    def _most_helpful(self, candidates: Iterable[Constant], found: Mismatch, units: Indices) -> list[Constant]:
        """Of constants, the one that gets furthest, or those of all together that are needed; none if none helps."""
        listed = list(candidates)
        best, reached = list[Constant](), found.step
        for group in [[one] for one in listed] + ([listed] if len(listed) > 1 else []):
            key = (found.step, *((c.module, c.attribute, c.item, c.shape, c.dim) for c in group))
            if key in self._tried:
                continue
            self._tried.add(key)
            if (after := self._reached(units, group)) > reached:
                best, reached = group, after
            if reached == len(self._steps):
                break
        for constant in best if len(best) > 1 else ():  # one that is not needed counts something else
            fewer = [other for other in best if other is not constant]
            best = fewer if self._reached(units, fewer) >= reached else best
        return best

    def _reached(self, units: Indices, constants: Sequence[Constant]) -> int:
        """The step at which a cut copy fails when these constants follow as well."""
        after = self._attempt(units, [*self.constants, *constants])
        return len(self._steps) if after is None else after.step

    def _tied(self, found: Mismatch) -> bool:
        """Where one number stands for two widths, equally many go of both; whether that is news."""
        if found.step < 0 or found.number:
            return False
        step, before = self._steps[found.step], len(self._ties)
        known = {(c.module, c.attribute, c.item): c for c in self.constants}
        for new in self._numbers.at(found.step):
            old = known.get((new.module, new.attribute, new.item))
            if old is not None and len(rows := rows_of_both(old, new)):
                why = f"has its size in {new.attribute!r}, as another part"
                bound = Bound(rows, Reason(why, step.name, step.module, step.place))
                self._ties.setdefault(rows.tobytes(), bound)
        if len(self._ties) > before:
            self.graph = self._solved()
        return len(self._ties) > before

    def _give_up(self, found: Mismatch, units: Indices) -> None:
        """Fix the axis at the operation that failed, or call its units lossy if only a number changed."""
        found, atoms = self._blamed(found, units)
        step = self._steps[max(found.step, 0)]
        if not found.number and self._loosen_heads(atoms):
            return
        if found.number:
            why = f"a number that depends on the size is used: {found.why}"
            reason = Reason(why, step.name, step.module, step.place)
            self.lossy.append(Bound(np.stack([atoms, np.zeros_like(atoms)], axis=1), reason))
        else:
            why = f"the size is written in the model's Python: {found.why}"[:200]
            self.pins.append(Bound(atoms, Reason(why, step.name, step.module, step.place)))
            if step.name == "aten::slice":
                self._literal.add((step.name, step.place))
        self.graph = self._solved()

    def _loosen_heads(self, atoms: Map) -> bool:
        """Where heads cannot go as a whole, places within them may, equally many of each; whether there are any."""
        classes = self.graph.solution.classes
        blamed = np.zeros(len(classes), bool)
        blamed[classes[atoms]] = True
        heads = [lines for lines in self.facts.lines[Line.HEADS] if blamed[classes[lines.cells]].any()]
        fresh = set(heads) - self._loosened
        self._loosened |= fresh
        if fresh:
            self.graph = self._solved()
        return bool(fresh)

    def _blamed(self, found: Mismatch, units: Indices) -> tuple[Mismatch, Map]:
        """What fails, and the atoms of units that come out of the operation, or go into it, or else make it fail."""
        units_of = self.graph.units
        kind = units_of.lossy == bool(units_of.lossy[units].any())
        removable = np.zeros(len(self.graph.solution.classes), bool)
        removable[units_of.classes[kind]] = True
        atoms = passing_through(self._steps, found.step, removable[self.graph.solution.classes])
        if len(atoms):
            return found, atoms
        found, culprits = self._culprits(found, units)
        mine = culprits[kind[culprits]]
        blamed: Map = units_of.classes[mine if len(mine) else culprits].astype(np.int32)
        return found, blamed

    def _culprits(self, found: Mismatch, units: Indices) -> tuple[Mismatch, Indices]:
        """The units of the spaces whose removal alone fails, found by halving, and how they fail."""
        spaces = [np.concatenate(blocks) for blocks in self.graph.choices()]
        spaces = [space for space in spaces if np.isin(space, units).any()]
        while len(spaces) > 1:
            halves = spaces[: len(spaces) // 2], spaces[len(spaces) // 2 :]
            tries = ((half, self._attempt(np.intersect1d(np.concatenate(half), units))) for half in halves)
            failing = next(((half, why) for half, why in tries if why is not None), None)
            if failing is None:
                break
            spaces, found = failing
        return found, np.concatenate(spaces)

    def _alive(self, units: Indices) -> Flags:
        removed = self.graph.edits(units).units
        return alive_atoms(self.graph.solution.classes, self.graph.units.classes[removed])
