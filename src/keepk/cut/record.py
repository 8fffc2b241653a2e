"""The record of what was cut from a model: plain data on the model itself, so that copies and pickles have it too.

Indices are kept in arrays of machine integers (`array.array`), which a deepcopy copies as one block and `==` compares
as a list would; a list of Python ints would be visited one by one by every deepcopy of the model.
"""

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from keepk.cut.undo import Change, Undo, undone_by
from keepk.graph.edits import Cut, Edits, read_attribute

ATTRIBUTE = "keepk_record"
Places = Mapping[str, Mapping[str, Any]]  # by tensor and axis, the owner of each index as `packed` keeps it
PART = "keepk_was_cut"  # on each module that lost something, so that a part does not pass for a dense model


def record_of(model: nn.Module) -> dict[str, Any]:
    """What was done to a model since it was built; empty lists and dicts if nothing.

    ``tensors`` has, by name, the dense shape and the kept indices of each axis; ``attributes``, by module, the values
    that were set (``now``) and those of the dense model; ``selections`` the channels that BatchNorms read; ``headwise``
    the attentions that lost heads; ``certificate``, if a `Pruner` was at work, what was asked for and what is kept;
    ``masked``, by space, where its channels are that are masked and were not removed: by tensor and axis, for each
    index the number of its masked channel, -1 for none.
    """
    found = model.__dict__.get(ATTRIBUTE)
    return found if found is not None else {"tensors": {}, "attributes": {}, "selections": {}, "headwise": []}


def packed(indices: NDArray[np.int64]) -> Any:
    """Indices as a record keeps them: an array, or a list of arrays where each row has its own.

    >>> packed(np.array([0, 2])), packed(np.array([[0, 2], [1, 3]]))
    (array('q', [0, 2]), [array('q', [0, 2]), array('q', [1, 3])])
    """
    if indices.ndim == 2:
        return [packed(row) for row in indices]
    return array("q", np.ascontiguousarray(indices, np.int64).tobytes())


def cuts_since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Cut]:
    """By tensor, what was cut between two records of the same model.

    >>> before = {"tensors": {"w": {"shape": [4, 2], "kept": {"0": [0, 2, 3]}}}}
    >>> now = {"tensors": {"w": {"shape": [4, 2], "kept": {"0": [0, 3]}}}}
    >>> cuts_since(before, now)["w"]
    Cut(tensor='w', kept={0: array([0, 2])}, before=(3, 2), after=(2, 2))
    """
    old = before["tensors"]
    cuts = (_cut_between(name, old.get(name), entry) for name, entry in now["tensors"].items())
    return {cut.tensor: cut for cut in cuts if cut.before != cut.after}


def _cut_between(name: str, before: dict[str, Any] | None, now: dict[str, Any]) -> Cut:
    def kept(entry: dict[str, Any] | None, axis: str) -> NDArray[np.int64]:
        found = None if entry is None else entry["kept"].get(axis)
        return np.arange(now["shape"][int(axis)]) if found is None else np.asarray(found, np.int64)

    axes = range(len(now["shape"]))
    positions = dict[int, NDArray[np.int64]]()
    for axis in map(int, now["kept"]):
        old, new = kept(before, str(axis)), kept(now, str(axis))
        if new.ndim == 2:  # for each row, its columns: where they stand among those that the row had
            rows = np.searchsorted(kept(before, "0"), kept(now, "0"))
            old = old[rows] if old.ndim == 2 else np.broadcast_to(old, (len(rows), len(old)))
            positions[axis] = (old[:, None, :] == new[:, :, None]).argmax(axis=2)
        else:
            positions[axis] = np.searchsorted(old, new)
    shapes = (tuple(kept(entry, str(axis)).shape[-1] for axis in axes) for entry in (before, now))
    return Cut(name, positions, *shapes)


def was_cut(model: nn.Module) -> bool:
    """Whether anything was cut from a model since it was built."""
    return any(value for key, value in record_of(model).items() if key not in ("certificate", "masked"))


def noted(model: nn.Module, edits: Edits) -> Change:
    """A change that adds edits to the record, and can be undone. Prepare it before the attributes change."""
    modules = dict(model.named_modules())
    before = [read_attribute(modules[setting.module], setting) for setting in edits.settings]

    owners = {modules[cut.tensor.rpartition(".")[0]] for cut in edits.cuts}

    def change() -> Undo:
        old = model.__dict__.get(ATTRIBUTE)
        fresh = [owner for owner in owners if PART not in owner.__dict__]

        def undo() -> None:
            put_back(model, old)
            for owner in fresh:
                owner.__dict__.pop(PART, None)

        with undone_by(undo):
            model.__dict__[ATTRIBUTE] = _added(record_of(model), edits, before)
            for owner in fresh:
                owner.__dict__[PART] = True
            return undo

    return change


def put_back(model: nn.Module, old: dict[str, Any] | None) -> None:
    """Let a model have this record, or none."""
    if old is None:
        model.__dict__.pop(ATTRIBUTE, None)
    else:
        model.__dict__[ATTRIBUTE] = old


def _added(record: dict[str, Any], edits: Edits, before: list[Any]) -> dict[str, Any]:
    new = _copied(record)
    for cut in edits.cuts:
        entry = new["tensors"].setdefault(cut.tensor, {"shape": list(cut.before), "kept": {}})
        entry["kept"] = _composed(entry, cut)
    for setting, old in zip(edits.settings, before, strict=True):
        values = new["attributes"].setdefault(setting.module, {})
        key = setting.attribute if setting.item is None else f"{setting.attribute}.{setting.item}"
        values[key] = {"dense": values.get(key, {"dense": old})["dense"], "now": setting.new}
    for selection in edits.selections:
        new["selections"][selection.module] = packed(selection.channels)
    new["headwise"] = sorted({*new["headwise"], *edits.headwise})
    if "certificate" in new:  # a run that is at work writes its own anew; after it, somebody else was
        new["certificate"] = {
            name: space | {"cut_since": space.get("cut_since", 0) + len(edits.units)}
            for name, space in new["certificate"].items()
        }
    if "masked" in new:
        _cut_masked(new, {cut.tensor: cut for cut in edits.cuts})
    return new


def _cut_masked(record: dict[str, Any], cuts: Mapping[str, Cut]) -> None:
    """Let the places of masked channels follow a cut; channels that it took are not masked any more."""
    left = dict[str, Places]()
    for space, places in record["masked"].items():
        found = _places_left(places, cuts)
        owners = [np.asarray(it).ravel() for axes in found.values() for it in axes.values()]
        number = max((int(it.max(initial=-1)) + 1 for it in owners), default=0)
        entry = {key: value for key, value in record["certificate"][space].items() if key != "masked"}
        record["certificate"][space] = entry | ({"masked": number} if number else {})
        left |= {space: found} if number else {}
    del record["masked"]
    record |= {"masked": left} if left else {}


def _places_left(places: Places, cuts: Mapping[str, Cut]) -> Places:
    left = {
        tensor: {axis: _owners_left(np.asarray(owners, np.int64), int(axis), cuts.get(tensor)) for axis, owners in it}
        for tensor, it in ((tensor, axes.items()) for tensor, axes in places.items())
    }
    numbers = np.unique(np.concatenate([owners.ravel() for axes in left.values() for owners in axes.values()]))
    numbers = numbers[numbers >= 0]
    # The channels that are left are numbered from 0 again.
    return {
        tensor: {axis: packed(np.where(it >= 0, np.searchsorted(numbers, it), -1)) for axis, it in axes.items()}
        for tensor, axes in left.items()
    }


def _owners_left(owners: NDArray[np.int64], axis: int, cut: Cut | None) -> NDArray[np.int64]:
    if cut is None:
        return owners
    if owners.ndim == 2 and 0 in cut.kept:
        owners = owners[cut.kept[0]]
    kept = cut.kept.get(axis)
    if kept is None:
        return owners
    if owners.ndim == 1:
        return owners[kept]  # by row and column, if that is how they were cut
    return np.take_along_axis(owners, kept, axis=1) if kept.ndim == 2 else owners[:, kept]


def _copied(record: dict[str, Any]) -> dict[str, Any]:
    """A new record that shares the arrays of indices, which are replaced and never changed."""
    nested = {key: {name: dict(entry) for name, entry in record[key].items()} for key in ("tensors", "attributes")}
    return {**record, **nested, "selections": dict(record["selections"])}


def _composed(entry: dict[str, Any], cut: Cut) -> dict[str, Any]:
    """The kept indices of the dense tensor, after one more cut."""
    kept = dict(entry["kept"])
    rows = cut.kept.get(0)
    if rows is not None and np.ndim(kept.get("1", [])) == 2:
        kept["1"] = packed(np.asarray(kept["1"])[rows])
    for axis, indices in cut.kept.items():
        before = np.asarray(kept.get(str(axis), np.arange(entry["shape"][axis])))
        if indices.ndim == 2 and before.ndim == 2:
            kept[str(axis)] = packed(np.take_along_axis(before, indices, axis=1))
        else:
            kept[str(axis)] = packed(before[..., indices])
    return kept
