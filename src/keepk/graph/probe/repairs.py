"""Numbers in the model's Python objects that repeat a size, such as ``self.num_heads``.

A cut copy may fail because the model has the old width in an attribute: ``x.view(batch, self.heads, -1)`` works only
while `heads` is the number of heads. This module finds the attributes that could be such a number for a failing
operation, and `probe` tries which of them have to follow the width. An attribute is identified by module, name and,
in a list or tuple, the position of the entry:

>>> net = nn.Identity()
>>> net.heads, net.sizes = 4, (4, 8)
>>> holding(net, 4)
[('heads', None), ('sizes', 0)]
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import numpy as np
from torch import Tensor, nn

from keepk.graph.ids.maps import Flags, Map, fibres, predict, support
from keepk.graph.tracer import MAY_DIFFER, Shaped, Step
from keepk.graph.units import Constant, Wiring
from keepk.model.edits import entries_of

PICKS = ("aten::select", "aten::unbind")  # operations that take rows by index


def passing_through(steps: Sequence[Step], number: int, removable: Flags) -> Map:
    """The removable atoms of the outputs of an operation, or of its inputs if the outputs have none.

    All steps that ran the same operation on the same line are included: a literal in a block's forward prevents the
    cut in every block, and one failure should settle all of them.
    """
    if number < 0:
        return np.zeros(0, np.int32)
    origin = steps[number]
    same = [step for step in steps if step.name == origin.name and step.place == origin.place and step.place]
    outside = _atoms((step.outputs for step in same or [origin]), removable)
    inside = _atoms((step.inputs for step in same or [origin]), removable)
    if origin.name in PICKS:
        inside = np.setdiff1d(inside, outside)  # the rows, because one is missing, not the channels within a row
        return inside if len(inside) else outside
    return outside if len(outside) else inside


def _atoms(sides: Iterable[Sequence[Shaped]], removable: Flags) -> Map:
    found = [index_map.ravel() for side in sides for _, maps in side for index_map in maps]
    atoms: Map = np.unique(np.concatenate([*found, np.zeros(0, np.int32)]))
    return atoms[removable[atoms]]


# The search stays near the operation: every candidate costs a forward pass, and a distant attribute with the same value
# is more likely to be equal by coincidence.
PARENTS = 3  # levels upwards, the module itself included
CHILDREN = 2  # levels downwards
BELOW = 16  # modules downwards, in all
SIZES = 64  # entries of a list of sizes; longer lists are tables of indices


class Where(Enum):
    """Where to look for a number, in order of preference."""

    ATTRIBUTE = "in an attribute of the module or of its parents"
    OBJECT = "in an object that one of them holds"
    CHILD = "in a module inside it"


@dataclass(frozen=True)
class ProgramNumbers:
    """The numbers in the modules that ran the operations of a trace, and in their parents and children."""

    steps: Sequence[Step]
    modules: Mapping[str, nn.Module]

    def at(self, number: int, where: Where | None = None) -> Iterator[Constant]:
        """Attributes near an operation that equal the size of one of its dims with channels.

        Args:
            number: The number of the step.
            where: Look only there; everywhere if None.
        """
        for step in self._of_one_call(number):
            for shape, maps in step.tensors:
                for dim in sorted({dim for index_map in maps for dim in support(index_map)}):
                    for path, attribute, item in self._kept(number, shape[dim], where):
                        yield Constant(path, attribute, item, shape, maps, dim)

    def _kept(self, number: int, size: int, where: Where | None) -> Iterator[tuple[str, str, int | None]]:
        """(module, attribute, item) of each attribute near an operation that equals `size`."""
        around = list(upwards(self.steps[number].module))
        if where in (None, Where.ATTRIBUTE):
            yield from ((path, *found) for path in around for found in holding(self.modules.get(path), size))
        if where in (None, Where.OBJECT):
            yield from ((path, *found) for path in around for found in holding_inside(self.modules.get(path), size))
        if where in (None, Where.CHILD):
            for path in self._below(number):
                module = self.modules[path]
                yield from ((path, *found) for found in (*holding(module, size), *holding_inside(module, size)))

    def _below(self, number: int) -> list[str]:
        """The modules inside an operation's module; those close to the module that ran before it come first."""
        module, before = self.steps[number].module, self.steps[max(number - 1, 0)].module.split(".")
        inside = (child for child in self._inside(module, CHILDREN) if not _is_of_torch(child))  # see `layer_sizes`
        found = dict.fromkeys(self._first_path[id(child)] for child in inside)
        return sorted(found, key=lambda path: -_alike(path.split("."), before))[:BELOW]

    def _inside(self, path: str, depth: int) -> Iterator[nn.Module]:
        level = [self.modules[path]] if path in self.modules else []
        for _ in range(depth):
            level = [child for module in level for child in module.children()]
            yield from level

    @cached_property
    def _first_path(self) -> dict[int, str]:
        """By id of a module, the name by which a shared module is known."""
        return {id(module): path for path, module in self.modules.items()}

    def _of_one_call(self, number: int) -> Iterator[Step]:
        """The step, and the movements after it on the same line.

        A reshape that copies is a clone and a view. On a failure the clone is blamed, because neither of them ran, but
        the number that prevents the cut is a size of the view.
        """
        first = self.steps[number]
        yield first
        for step in self.steps[number + 1 :]:
            if step.name not in MAY_DIFFER or (step.module, step.place) != (first.module, first.place):
                return
            yield step

    def too_large(self, number: int, alive: Flags, where: Where) -> Iterator[Constant]:
        """The attributes of `at` whose dim is smaller on the cut copy: they hold the old size."""
        for constant in self.at(number, where):
            after = predict(constant.shape, constant.maps, alive)
            if after is not None and after[constant.dim] != constant.shape[constant.dim]:
                yield constant

    def beside(self) -> Iterator[Constant]:
        """Attributes that equal the size of a dim with channels in their module's forward, whether used there or not.

        Such an attribute may count these channels (``num_heads`` next to ``view(..., -1, head_dim)``) or be equal by
        coincidence. torch's own layers are left out, since `layer_sizes` lists their sizes.
        """
        own = {path: module for path, module in self.modules.items() if not _is_of_torch(module)}
        seen = set[tuple[object, ...]]()
        for step in (step for step in self.steps if step.module in own):
            for shape, maps in step.tensors:
                for dim, first in {dim: int(m.flat[0]) for m in maps for dim in support(m)}.items():
                    for attribute, item in holding(own[step.module], shape[dim]):
                        key = (step.module, attribute, item, shape, dim, first)
                        if key not in seen:
                            seen.add(key)
                            yield Constant(step.module, attribute, item, shape, maps, dim)

    def ranks_beside(self, wiring: Wiring) -> Iterator[Constant]:
        """The ranks that peft stores for its adapters: ``r`` of a layer and of the config, by adapter name."""
        configured = next((path for path, it in self.modules.items() if hasattr(it, "peft_config")), None)
        for tensor, adapter in wiring.adapters.items():
            path, _, kind = adapter.rpartition(".")
            name = tensor[len(adapter) + 1 :].partition(".")[0]
            if kind != "lora_A" or tensor not in wiring.tensors:
                continue
            shape, maps = wiring.shapes[tensor], wiring.tensors[tensor]
            ranks, configs = getattr(self.modules.get(path), "r", None), None
            if isinstance(ranks, Mapping) and ranks.get(name) == shape[0]:
                yield Constant(path, f"r.{name}", None, shape, maps, 0)
            if configured is not None:
                configs = getattr(self.modules[configured], "peft_config", None)
            if isinstance(configs, Mapping) and getattr(configs.get(name), "r", None) == shape[0]:
                yield Constant(configured or "", f"peft_config.{name}.r", None, shape, maps, 0)

    def siblings(self, constant: Constant, number: int) -> Iterator[Constant]:
        """The same attribute in every other module where the same line of source ran the same operation."""
        yield constant
        origin = next(
            step for step in self._of_one_call(number) if any(maps is constant.maps for _, maps in step.tensors)
        )
        tensor = next(i for i, (_, maps) in enumerate(origin.tensors) if maps is constant.maps)
        for step in self.steps:
            same_line = step is not origin and step.name == origin.name and step.place == origin.place
            if not same_line or len(step.outputs) != len(origin.outputs):
                continue
            path = _moved(constant.module, origin.module, step.module)
            shape, maps = step.tensors[tensor]
            if path is not None and self._holds(path, constant, shape):
                yield replace(constant, module=path, shape=shape, maps=maps)

    def _holds(self, path: str, constant: Constant, shape: tuple[int, ...]) -> bool:
        module, known = self.modules.get(path), self.modules.get(constant.module)
        if module is None or type(module) is not type(known) or len(shape) <= constant.dim:
            return False
        size = shape[constant.dim]
        return (constant.attribute, constant.item) in (*holding(module, size), *holding_inside(module, size))


def rows_of_both(one: Constant, other: Constant) -> Map:
    """The atoms that two constants count, one row for each position in the other dims; empty if they share atoms."""
    mine, theirs = _rows(one), _rows(other)
    if not len(mine) or not len(theirs) or np.isin(mine, theirs).any():
        return np.zeros((0, 0), np.int32)
    return np.concatenate([mine, theirs])


def _rows(constant: Constant) -> Map:
    along = [index_map for index_map in constant.maps if constant.dim in support(index_map)]
    if len(along) != 1:  # two axes flattened into one dim, which no single row describes
        return np.zeros((0, 0), np.int32)
    return fibres(along[0], [dim for dim in support(along[0]) if dim != constant.dim])


def upwards(path: str) -> Iterator[str]:
    """A module's path, and those of its parents."""
    for _ in range(PARENTS):
        yield path
        if not path:
            return
        path = path.rpartition(".")[0]


def _moved(path: str, origin: str, other: str) -> str | None:
    """The path that relates to `other` as `path` relates to `origin`; None for the model itself.

    >>> _moved("blocks.0.attn", "blocks.0.attn.qkv", "blocks.3.attn.qkv")
    'blocks.3.attn'
    >>> _moved("blocks.0.sizes", "blocks.0", "blocks.3")
    'blocks.3.sizes'
    """
    if not path:
        return None
    if f"{path}.".startswith(f"{origin}." if origin else ""):
        return f"{other}{path[len(origin) :]}" if origin else path
    up = len(origin.split(".")) - len(path.split("."))
    return ".".join(other.split(".")[: len(other.split(".")) - up])


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "torch"


def _alike(path: Sequence[str], other: Sequence[str]) -> int:
    """The number of leading names that two paths share."""
    return next((n for n, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), min(len(path), len(other)))


def holding(module: nn.Module | None, size: int) -> list[tuple[str, int | None]]:
    """The attributes of a module, and entries of its lists, that equal `size`: pairs of name and position."""
    return _numbers_in(vars(module), size) if module is not None else []


def holding_inside(module: nn.Module | None, size: int) -> list[tuple[str, int | None]]:
    """The same in objects that a module refers to, such as configs and dicts: ``config.num_heads``.

    >>> net = nn.Identity()
    >>> net.config = {"heads": 4, "sizes": (4, 8)}
    >>> holding_inside(net, 4)
    [('config.heads', None), ('config.sizes', 0)]
    """
    held = vars(module).items() if module is not None else ()
    return [
        (f"{name}.{attribute}", item)
        for name, value in held
        if not name.startswith("_") and _is_holder(value)
        for attribute, item in _numbers_in(entries_of(value), size)
    ]


def _is_holder(value: object) -> bool:
    """Whether a value is a dict or a plain object with attributes, rather than a module, tensor, class or function."""
    if type(value) is dict:
        return all(isinstance(key, str) for key in value)
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Tensor)


def _numbers_in(entries: Mapping[str, object], size: int) -> list[tuple[str, int | None]]:
    found = list[tuple[str, int | None]]()
    for attribute, value in entries.items():
        if attribute.startswith("_") or not attribute.isidentifier() or isinstance(value, bool):
            continue
        if isinstance(value, int) and value == size:
            found.append((attribute, None))
        elif isinstance(value, list | tuple) and len(value) <= SIZES and all(type(entry) is int for entry in value):
            found += [(attribute, item) for item, entry in enumerate(value) if entry == size]
    return found
