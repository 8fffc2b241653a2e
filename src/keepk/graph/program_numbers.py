"""Numbers in the model's Python: where they are kept, and what they count."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn

from keepk.graph.maps import Flags, Map, fibres, predict, support
from keepk.graph.replay import MAY_DIFFER
from keepk.graph.tracer import Step
from keepk.graph.wiring import Constant

PARENTS = 3  # how far up a number may be kept
SIZES = 64  # how many numbers a list of sizes has at most: longer ones are tables of indices


@dataclass(frozen=True)
class ProgramNumbers:
    """The numbers that stand beside the operations of a trace, in the modules that ran them and in their parents."""

    steps: Sequence[Step]
    modules: Mapping[str, nn.Module]

    def at(self, number: int) -> Iterator[Constant]:
        """Attributes of an operation's module and its parents that are the old size of a dim with channels."""
        for step in self._of_one_call(number):
            for shape, maps in step.tensors:
                for dim in sorted({dim for index_map in maps for dim in support(index_map)}):
                    for path in upwards(step.module):
                        for attribute, item in holding(self.modules.get(path), shape[dim]):
                            yield Constant(path, attribute, item, shape, maps, dim)

    def _of_one_call(self, number: int) -> Iterator[Step]:
        """The step, and the movements that follow it on the same line.

        A reshape that copies is a clone and a view. It fails before either of them runs, so the clone is blamed, but
        the number in the way is a size of the view.
        """
        first = self.steps[number]
        yield first
        for step in self.steps[number + 1 :]:
            if step.name not in MAY_DIFFER or (step.module, step.place) != (first.module, first.place):
                return
            yield step

    def too_large(self, number: int, alive: Flags) -> Iterator[Constant]:
        """Those of something that should have shrunk."""
        for constant in self.at(number):
            after = predict(constant.shape, constant.maps, alive)
            if after is not None and after[constant.dim] != constant.shape[constant.dim]:
                yield constant

    def siblings(self, constant: Constant, number: int) -> Iterator[Constant]:
        """The same attribute in every module of that class, wherever the same line did the same operation."""
        yield constant
        origin = next(
            step for step in self._of_one_call(number) if any(maps is constant.maps for _, maps in step.tensors)
        )
        up = len(origin.module.split(".")) - len(constant.module.split(".")) if constant.module else None
        tensor = next(i for i, (_, maps) in enumerate(origin.tensors) if maps is constant.maps)
        for step in self.steps:
            same_line = step is not origin and step.name == origin.name and step.place == origin.place
            if not same_line or len(step.outputs) != len(origin.outputs) or up is None:
                continue
            path = ".".join(step.module.split(".")[: len(step.module.split(".")) - up])
            shape, maps = step.tensors[tensor]
            if self._holds(path, constant, shape):
                yield replace(constant, module=path, shape=shape, maps=maps)

    def _holds(self, path: str, constant: Constant, shape: tuple[int, ...]) -> bool:
        module, known = self.modules.get(path), self.modules.get(constant.module)
        if module is None or type(module) is not type(known) or len(shape) <= constant.dim:
            return False
        return (constant.attribute, constant.item) in holding(module, shape[constant.dim])


def rows_of_both(one: Constant, other: Constant) -> Map:
    """The atoms along the dims that two constants count, a row for each place in other dims; none if they are alike."""
    mine, theirs = _rows(one), _rows(other)
    if not len(mine) or not len(theirs) or np.isin(mine, theirs).any():
        return np.zeros((0, 0), np.int32)
    return np.concatenate([mine, theirs])


def _rows(constant: Constant) -> Map:
    along = [index_map for index_map in constant.maps if constant.dim in support(index_map)]
    if len(along) != 1:  # two axes that are folded into one
        return np.zeros((0, 0), np.int32)
    return fibres(along[0], [dim for dim in support(along[0]) if dim != constant.dim])


def upwards(path: str) -> Iterator[str]:
    """A module's path, and those of its parents."""
    for _ in range(PARENTS):
        yield path
        if not path:
            return
        path = path.rpartition(".")[0]


def holding(module: nn.Module | None, size: int) -> list[tuple[str, int | None]]:
    """The attributes, and entries of attributes, that are this number."""
    found = list[tuple[str, int | None]]()
    for attribute, value in vars(module).items() if module is not None else ():
        if attribute.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, int) and value == size:
            found.append((attribute, None))
        elif isinstance(value, list | tuple) and len(value) <= SIZES and all(type(entry) is int for entry in value):
            found += [(attribute, item) for item, entry in enumerate(value) if entry == size]
    return found
