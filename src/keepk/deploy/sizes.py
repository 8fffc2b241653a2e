"""Checking that a description can be the result of shrinking a dense model: sizes agree, and nothing else changed.

``arch.json`` may come from anywhere, and an edited file can have a correct hash. So a value from it is set on a model
only if it is a size that follows from the cuts. The sizes of torch's layers are computed from their tensors. A number
in a user's module must be the number of remaining entries of an axis, or of a part of one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from keepk.deploy.arch import Description, Entry
from keepk.errors import FileError
from keepk.model.edits import Setting, entries_of
from keepk.model.layer_sizes import GATES, Sized, sized_attributes
from keepk.model.layers import HeadwiseAttention
from keepk.model.names import named_tensors
from keepk.model.torch_internals import BatchNormBase, NormBase

SMALL = 8  # a number up to this is as likely to be a dim, a depth or a stride as the size of a part of an axis

Place = tuple[str, str, int | None]
"""A module's path, an attribute, and the index of an entry of it."""
Mask = NDArray[np.bool_]


def widths_of_norms(model: nn.Module) -> dict[str, int]:
    """The number of channels of each BatchNorm, by path; one without tensors never reads a selection."""
    norms = ((path, it) for path, it in model.named_modules() if isinstance(it, BatchNormBase))
    return {path: it.num_features for path, it in norms if [*it.parameters(recurse=False), *it.buffers(recurse=False)]}


def refuse_impossible(model: nn.Module, saved: Description) -> None:
    """Refuse a description that no shrink of the model can lead to.

    Args:
        model: The dense model.
        saved: The description, whose dense sizes are known to be the model's.

    Raises:
        FileError: Says which size is impossible.
    """
    for found in _impossible(model, saved):
        raise FileError(
            f"arch.json: {found}, which no shrink can lead to. It was edited or damaged after it was written. "
            f"Save the model again."
        )


def _impossible(model: nn.Module, saved: Description) -> Iterator[str]:
    modules, names = dict(model.named_modules()), {id(tensor): name for name, tensor, _ in named_tensors(model)}
    now: dict[Place, int] = {(it.module, it.attribute, it.item): it.new for it in saved.settings}
    known = dict(_known_sizes(list(sized_attributes(model, names)), modules, saved))
    for (path, attribute, item), (old, new) in known.items():
        if now.get((path, attribute, item), old) != new:
            told = now.get((path, attribute, item), old)
            yield f"{attribute} of module {path!r} would be {told}, but its tensors leave {new}"
    axes = _cut_axes(modules, saved)
    for setting in saved.settings:
        if (setting.module, setting.attribute, setting.item) not in known:
            yield from _unfounded(modules[setting.module], setting, axes)
    for path in saved.headwise:
        if not HeadwiseAttention.fits(modules[path]):
            yield f"module {path!r} is an attention of a kind that cannot lose heads, but would have lost some"
    for path, module in modules.items():
        sizes = {attribute: size for (owner, attribute, _), size in now.items() if owner == path}
        yield from _disagreeing(path, module, sizes, names, saved)


# Sizes of torch's layers


def _known_sizes(
    sized: list[Sized], modules: Mapping[str, nn.Module], saved: Description
) -> Iterator[tuple[Place, tuple[int, int]]]:
    """Attributes of layers that repeat a size of their tensors: the dense value, and the value after the cuts."""
    groups = {it.module: it for it in sized if it.attribute == "groups"}
    for it in sized:
        value = getattr(modules[it.module], it.attribute)
        old = value if it.item is None else value[it.item]
        if old == _size_of(it, groups, saved, dense=True):  # otherwise a subclass uses the attribute differently
            yield (it.module, it.attribute, it.item), (old, _size_of(it, groups, saved, dense=False))


def _size_of(sized: Sized, groups: Mapping[str, Sized], saved: Description, *, dense: bool) -> int:
    entry = saved.tensors[sized.tensor]
    if sized.blocks:  # the number of blocks of rows (heads, groups) with at least one row left
        rows = np.arange(entry.dense[0]) if dense or 0 not in entry.kept else entry.kept[0]
        return len(np.unique(rows // max(1, entry.dense[0] // sized.blocks)))
    size = (entry.dense if dense else entry.shape)[sized.dim] // sized.parts
    if sized.times_groups and sized.module in groups:
        size *= _size_of(groups[sized.module], groups, saved, dense=dense)
    return size


# Numbers in a user's modules


@dataclass(frozen=True, eq=False)
class _Axis:
    """An axis that lost entries.

    Attributes:
        size: Its dense size.
        left: How many entries are left.
        alive: Which ones; None if they differ from row to row.
    """

    size: int
    left: int
    alive: Mask | None


def _cut_axes(modules: Mapping[str, nn.Module], saved: Description) -> list[_Axis]:
    axes = dict[tuple[int, int, bytes], _Axis]()
    cuts = [(it.dense[axis], kept) for it in saved.tensors.values() for axis, kept in it.kept.items()]
    cuts += [(int(modules[path].num_features), channels) for path, channels in saved.selections.items()]  # type: ignore[arg-type]  # a BatchNorm's
    for size, kept in cuts:
        alive = None
        if kept.ndim == 1:
            alive = np.zeros(size, np.bool_)
            alive[kept] = True
        key = size, kept.shape[-1], b"" if alive is None else np.packbits(alive).tobytes()
        axes.setdefault(key, _Axis(size, kept.shape[-1], alive))
    return list(axes.values())


def _unfounded(module: nn.Module, setting: Setting, axes: list[_Axis]) -> Iterator[str]:
    """Yield an objection if a setting is not the size of anything that was cut."""
    where = f"{setting.attribute} of module {setting.module!r}"
    outer, _, inner = setting.attribute.partition(".")  # "config.num_heads" is in an object that the module holds
    held = outer in vars(module) and (not inner or inner in entries_of(vars(module)[outer]))
    if not held or _is_option(module, outer):
        yield f"{where} ({type(module).__name__}) is not a size, but would change from {setting.old} to {setting.new}"
    elif not _counts(setting.old, setting.new, axes):
        yield f"{where} would change from {setting.old} to {setting.new}, but no axis was cut in that way"


SIZES = {"embed_dim", "kdim", "vdim", "num_heads", "head_dim", "num_features", "normalized_shape", "num_groups"}
SIZES |= {"num_channels", "groups", "unflattened_size", "in_features", "out_features", "in_channels", "out_channels"}
SIZES |= {"in1_features", "in2_features", "num_embeddings", "embedding_dim", "num_parameters"}
SIZES |= {"input_size", "hidden_size", "proj_size"}


def _is_option(module: nn.Module, attribute: str) -> bool:
    """Whether the attribute is an option of one of torch's classes, such as a kernel size or a stride."""
    # torch lists the attributes of its layers in __constants__; those that are not sizes are options.
    of_torch = (kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules."))
    options = {name for kind in of_torch for name in getattr(kind, "__constants__", ())}
    return attribute in options - SIZES


def _counts(old: int, new: int, axes: list[_Axis]) -> bool:
    """Whether some axis, two axes together, or a part of an axis had `old` entries and has `new` now."""
    if old == new:
        return True
    pairs = {(axis.size, axis.left) for axis in axes}
    if any(old % size == 0 and new == old // size * left for size, left in pairs):  # an axis, or several copies
        return True
    if any((old - size, new - left) in pairs for size, left in pairs):  # two axes side by side
        return True
    return any(_counts_part(old, new, axis.alive) for axis in axes if axis.alive is not None and old < axis.size)


def _counts_part(old: int, new: int, alive: Mask) -> bool:
    """Whether `new` of the `old` entries of a part of an axis are left.

    The part is a factor of the axis (the heads, or the channels of each head), or lies at one end (as in a split); a
    large part may lie anywhere.
    """
    # An axis of 24 entries may be 4 heads of 6, and a module may store both the 4 and the 6. The same number has to be
    # left everywhere, or the reshape in forward would fail.
    inner = [step for step in range(1, len(alive) // old + 1) if len(alive) % (old * step) == 0]
    for step in inner:
        left = alive.reshape(-1, old, step).sum(axis=1)
        if new in left and set(np.unique(left)) <= {0, new}:
            return True
    windows = (
        np.convolve(alive, np.ones(old, np.int64), "valid") if old > SMALL else [alive[:old].sum(), alive[-old:].sum()]
    )
    return bool(np.isin(new, windows))


# Tensors of one layer


def _disagreeing(
    path: str, module: nn.Module, now: Mapping[str, int], names: Mapping[int, str], saved: Description
) -> Iterator[str]:
    """Yield an objection for each tensor of a torch layer that would no longer fit the layer's other tensors."""
    own = ((name, names[id(it)]) for name, it in _own_tensors(module))
    # Buffers outside the state_dict may be missing.
    entries = {name: saved.tensors[stored] for name, stored in own if stored in saved.tensors}
    if not any(entry.kept for entry in entries.values()):
        return
    for kind, relations in RELATIONS.items():
        if isinstance(module, kind):
            before = relations(
                module, _Layer({name: it.dense for name, it in entries.items()}, partial(getattr, module))
            )
            after = relations(module, _Layer(_shapes(entries), lambda name: now.get(name, getattr(module, name))))
            # A relation that does not hold in the dense layer (of a subclass) need not hold after the cuts.
            for (what, was, should), (_, found, expected) in zip(before, after, strict=True):
                if was == should and found != expected:
                    yield f"{what} of module {path!r} would have {found}, but the layer needs {expected}"
            if kind is nn.MultiheadAttention and path not in saved.headwise and _lost_heads(entries):
                yield f"module {path!r} would have lost heads without being listed under headwise"
            if kind is nn.MultiheadAttention and (told := now.get("num_heads", module.num_heads)) != (
                heads := _heads_left(module, entries)
            ):
                yield f"num_heads of module {path!r} would be {told}, but its tensors leave {heads}"
            return


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    if isinstance(module, nn.MultiheadAttention):  # its forward reads out_proj's tensors instead of calling out_proj
        own += [(f"out_proj.{name}", it) for name, it in module.out_proj.named_parameters(recurse=False)]
    return iter(own)


def _shapes(entries: Mapping[str, Entry]) -> dict[str, tuple[int, ...]]:
    return {name: entry.shape for name, entry in entries.items()}


@dataclass(frozen=True)
class _Layer:
    """The shapes of a layer's tensors, and a function that returns its attributes by name."""

    shapes: Mapping[str, tuple[int, ...]]
    size: Callable[[str], Any]


Relations = Iterator[tuple[str, Any, Any]]
"""Triples: a tensor's name, its shape or size, and the one that it should have."""


def _bias(attribute: str) -> Callable[[nn.Module, _Layer], Relations]:
    def relations(_: nn.Module, layer: _Layer) -> Relations:
        if "bias" in layer.shapes:
            yield "bias", layer.shapes["bias"], (layer.size(attribute),)

    return relations


def _norm(_: nn.Module, layer: _Layer) -> Relations:
    sized = [(name, shape) for name, shape in layer.shapes.items() if shape]
    for name, shape in sized:
        yield name, shape, sized[0][1]


def _recurrent(module: Any, layer: _Layer) -> Relations:
    hidden, directions = layer.size("hidden_size"), 2 if module.bidirectional else 1
    rows, out = GATES.get(module.mode, 1) * hidden, layer.size("proj_size") or hidden
    for name, shape in layer.shapes.items():
        first = name.partition("_l")[2].startswith("0")
        expected = {
            "weight_ih": (rows, layer.size("input_size") if first else out * directions),
            "weight_hh": (rows, out),
            "weight_hr": (out, hidden),
        }
        yield name, shape, expected.get(name.partition("_l")[0], (rows,))


def _cell(module: Any, layer: _Layer) -> Relations:
    hidden = layer.size("hidden_size")
    rows = {nn.LSTMCell: 4, nn.GRUCell: 3}.get(type(module), 1) * hidden
    expected = {"weight_ih": (rows, layer.size("input_size")), "weight_hh": (rows, hidden)}
    for name, shape in layer.shapes.items():
        yield name, shape, expected.get(name, (rows,))


def _attention(_: nn.Module, layer: _Layer) -> Relations:
    rows = _projected(layer.shapes)
    yield "num_heads", [size % layer.size("num_heads") for size in rows], [0, 0, 0]
    yield "k_proj_weight", rows[1], rows[0]
    if "in_proj_bias" in layer.shapes:
        yield "in_proj_bias", layer.shapes["in_proj_bias"], (sum(rows),)
    if "out_proj.weight" in layer.shapes:
        yield "out_proj.weight", layer.shapes["out_proj.weight"][-1], rows[2]


def _projected(shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The number of rows of queries, keys and values."""
    if "in_proj_weight" in shapes:
        return [shapes["in_proj_weight"][0] // 3] * 3
    return [shapes[f"{which}_proj_weight"][0] for which in "qkv" if f"{which}_proj_weight" in shapes] or [0, 0, 0]


def _lost_heads(entries: Mapping[str, Entry]) -> bool:
    return _projected(_shapes(entries)) != _projected({name: it.dense for name, it in entries.items()})


def _heads_left(module: Any, entries: Mapping[str, Entry]) -> int:
    """How many heads have queries left; the rows of a head are adjacent."""
    entry = entries.get("in_proj_weight") or entries.get("q_proj_weight")
    if entry is None or 0 not in entry.kept:
        return int(module.num_heads)
    queries = entry.kept[0][entry.kept[0] < module.embed_dim]
    return len(np.unique(queries // module.head_dim))


RELATIONS: dict[type[nn.Module], Callable[[Any, _Layer], Relations]] = {
    nn.Linear: _bias("out_features"),
    nn.Bilinear: _bias("out_features"),
    nn.modules.conv._ConvNd: _bias("out_channels"),
    NormBase: _norm,
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.GroupNorm: _norm,
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _cell,
    nn.MultiheadAttention: _attention,
}
