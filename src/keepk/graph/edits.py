"""Edits: what is cut from which tensor, and what has to change with it, as plain values.

The functions below carry out a single cut or setting. They are shared by trial copies, `keepk.shrink` and `keepk.load`.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Indices = NDArray[np.int64]
SHOWN = 3
PIECE = 1 << 17  # elements; a block of this size stays in a core's cache


@dataclass(frozen=True)
class Cut:
    """What is left of a tensor.

    Attributes:
        tensor: Its name.
        kept: By axis, the indices that stay. Where the in-channels of a grouped convolution's weight differ from group
            to group, the entry of axis 1 is a matrix: for each row that stays, the columns that stay.
        before: Its shape now.
        after: Its shape then.
    """

    tensor: str
    kept: dict[int, Indices]
    before: tuple[int, ...]
    after: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """A module's attribute that gets a new value; `item` is which entry of a tuple or list.

    ``"config.num_heads"`` is a value in an object that the module holds.
    """

    module: str
    attribute: str
    item: int | None
    old: Any
    new: Any


@dataclass(frozen=True)
class Unchanged:
    """An attribute that keeps its value although a size that it was equal to changes.

    Forward works without it, so nothing tells whether it is that size or is equal to it by chance.

    Attributes:
        module: The module's path.
        attribute: Its attribute.
        item: Which entry, if the attribute is a tuple or list.
        value: Its value.
        size: The size that is left.
    """

    module: str
    attribute: str
    item: int | None
    value: int
    size: int

    def __str__(self) -> str:
        """In a few words.

        >>> print(Unchanged("layers.0.attn", "num_heads", None, 8, 4))
        layers.0.attn.num_heads = 8 (4 are left)
        """
        entry = "" if self.item is None else f"[{self.item}]"
        path = f"{self.module}." if self.module else ""
        return f"{path}{self.attribute}{entry} = {self.value} ({self.size} are left)"


@dataclass(frozen=True)
class Selection:
    """A BatchNorm that from now on reads these of its input's channels."""

    module: str
    channels: Indices


@dataclass(frozen=True)
class Edits:
    """All that one shrink does to a model.

    Attributes:
        units: The units that go, those included that had to go with them.
        cuts: Tensors.
        settings: Attributes.
        selections: BatchNorms that read a selection.
        headwise: Attentions that lose heads.
        unchanged: Attributes that forward does not need and that keep an old size, perhaps; see `Unchanged`.
    """

    units: Indices
    cuts: tuple[Cut, ...]
    settings: tuple[Setting, ...]
    selections: tuple[Selection, ...]
    headwise: tuple[str, ...]
    unchanged: tuple[Unchanged, ...] = ()

    def __len__(self) -> int:
        return len(self.units)

    def __str__(self) -> str:
        """How much goes, in a line; a second one has attributes that may keep an old size."""
        before = sum(int(np.prod(cut.before)) for cut in self.cuts)
        after = sum(int(np.prod(cut.after)) for cut in self.cuts)
        gone = f"{before - after:,} of their {before:,} numbers gone"
        line = f"{len(self.units)} units removed: {len(self.cuts)} tensors cut, {gone}"
        if not self.unchanged:
            return line
        more = f" and {len(self.unchanged) - SHOWN} more" if len(self.unchanged) > SHOWN else ""
        return f"{line}\nleft as they are, though a size changed: {', '.join(map(str, self.unchanged[:SHOWN]))}{more}"


def read_attribute(module: Any, setting: Setting) -> Any:
    """The value that a setting is about."""
    outer, _, inner = setting.attribute.partition(".")
    value = getattr(module, outer)
    if inner:
        value = entries_of(value)[inner]
    return value if setting.item is None else value[setting.item]


def write_attribute(module: Any, setting: Setting, value: Any) -> None:
    """Give an attribute, or one entry of it, a value.

    An object that holds it ("config.num_heads") is not changed: other layers, or another model that was built from it,
    may have the same one. The module gets a separate copy.
    """
    outer, _, inner = setting.attribute.partition(".")
    if setting.item is not None:
        whole = read_attribute(module, replace(setting, item=None))
        entries = list(whole)
        entries[setting.item] = value
        value = type(whole)(entries)
    if inner:
        holder = copy.copy(getattr(module, outer))
        entries_of(holder)[inner] = value
        value = holder
    setattr(module, outer, value)


def entries_of(holder: Any) -> dict[str, Any]:
    """The named values that an object such as a config, or a dict, holds."""
    return holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})


def cut_tensor(tensor: Tensor, cut: Cut) -> Tensor:
    """What is left of a tensor; how it lies in memory is the caller's affair."""
    kept = {axis: torch.from_numpy(np.ascontiguousarray(ids)).to(tensor.device) for axis, ids in cut.kept.items()}
    large = tensor.numel() > PIECE and tensor.device.type == "cpu"  # elsewhere many small kernels are slower
    if large and set(kept) == {0, 1} and kept[1].ndim == 1 and tensor.is_contiguous():
        return _cut_in_pieces(tensor, kept[0], kept[1], cut.after)
    for axis, index in sorted(kept.items()):
        if index.ndim == 1:
            tensor = tensor.index_select(axis, index)
        else:
            rows = torch.arange(tensor.shape[0], device=tensor.device)
            tensor = tensor[rows[:, None], index]
    return tensor


def _cut_in_pieces(tensor: Tensor, rows: Tensor, columns: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows and columns at once, some rows at a time, so that what lies between never leaves the cache."""
    left = tensor.new_empty(shape)
    size = max(1, PIECE * len(tensor) // tensor.numel())
    for piece, into in zip(torch.split(rows, size), torch.split(left, size), strict=True):
        torch.index_select(tensor.index_select(0, piece), 1, columns, out=into)
    return left
