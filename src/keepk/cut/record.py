"""The record of everything that was cut from a model: plain data in the model's ``__dict__``.

There, copies and pickles of the model include it. Indices are stored as `array.array`, which deepcopy copies as one
block and ``==`` compares like a list; for a list of Python ints, every deepcopy of the model would visit each int.

In this example, a Linear with 6 outputs loses outputs 0 and 5, and then output 2. The record has indices of the dense
tensor:

>>> import keepk, torch
>>> net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
>>> graph = keepk.trace(net, torch.zeros(2, 8))
>>> for units in ([0, 5], [2]):
...     edits = keepk.shrink(net, graph, units)
>>> record_of(net)["tensors"]["0.weight"]
{'shape': [6, 8], 'kept': {'0': array('q', [1, 3, 4])}}
>>> record_of(net)["attributes"]["0"]
{'out_features': {'dense': 6, 'now': 3}}

The record also has the certificate of a run: for each space, how many units were asked for and how many were kept. It
stores the places of channels that were masked but not removed, so that they can be counted again later without the
`Pruner`, in the model, in a copy or in a loaded file.
"""

from array import array
from collections.abc import Container, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from keepk.errors import ShrinkError
from keepk.model.edits import Change, Cut, Edits, Undo, read_attribute, undone_by
from keepk.model.names import named_parameters, sharded
from keepk.plan.names import matches

ATTRIBUTE = "keepk_record"
Places = Mapping[str, Mapping[str, Any]]  # by tensor and axis: the masked channel of each index, as `packed` stores it
PART = "keepk_was_cut"  # set on each module that was cut, so that a submodule alone does not pass for a dense model


def record_of(model: nn.Module) -> dict[str, Any]:
    """The record of a model; its entries are empty if nothing was cut.

    Returns:
        A dict with these entries:

        - ``tensors``: by name, the dense shape and the kept indices of each axis that lost some.
        - ``attributes``: by module, the values that were set (``now``) and those of the dense model (``dense``).
        - ``selections``: by BatchNorm, the channels of its input that it reads.
        - ``headwise``: the attentions that lost heads.
        - ``certificate``: if a `Pruner` ran, by space, how many units were asked for and are kept.
        - ``masked``: by space, the places of channels that were masked but not removed: by tensor and axis, for each
          index the number of its masked channel, or -1.
    """
    found = model.__dict__.get(ATTRIBUTE)
    return found if found is not None else {"tensors": {}, "attributes": {}, "selections": {}, "headwise": []}


def packed(indices: NDArray[np.int64]) -> Any:
    """Indices as a record stores them: an array, or a list of arrays for a matrix with different indices in each row.

    >>> packed(np.array([0, 2])), packed(np.array([[0, 2], [1, 3]]))
    (array('q', [0, 2]), [array('q', [0, 2]), array('q', [1, 3])])
    """
    if indices.ndim == 2:
        return [packed(row) for row in indices]
    return array("q", np.ascontiguousarray(indices, np.int64).tobytes())


def cuts_since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Cut]:
    """By tensor, the cut that leads from an earlier record of a model to a later one.

    >>> before = {"tensors": {"w": {"shape": [4, 2], "kept": {"0": [0, 2, 3]}}}}
    >>> now = {"tensors": {"w": {"shape": [4, 2], "kept": {"0": [0, 3]}}}}
    >>> cut = cuts_since(before, now)["w"]
    >>> cut.kept, cut.before, cut.after
    ({0: array([0, 2])}, (3, 2), (2, 2))
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
        if new.ndim == 2:  # different columns in each row: find their positions among the row's previous columns
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
    """A change that adds edits to the record. Call this before the attributes change: it reads their old values."""
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
    """Restore an old record of a model; None removes the record."""
    if old is None:
        model.__dict__.pop(ATTRIBUTE, None)
    else:
        model.__dict__[ATTRIBUTE] = old


def _added(record: dict[str, Any], edits: Edits, before: list[Any]) -> dict[str, Any]:
    # A new record, because the undo needs the old one. Both share the arrays of indices, which are never changed in
    # place.
    nested = {key: {name: dict(entry) for name, entry in record[key].items()} for key in ("tensors", "attributes")}
    new = {**record, **nested, "selections": dict(record["selections"])}
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
    # A running Pruner rewrites its certificate after each event, so this counts only cuts after the last event.
    if "certificate" in new:
        new["certificate"] = {
            name: space | {"cut_since": space.get("cut_since", 0) + len(edits.units)}
            for name, space in new["certificate"].items()
        }
    if "masked" in new:
        _cut_masked(new, {cut.tensor: cut for cut in edits.cuts})
    return new


def _cut_masked(record: dict[str, Any], cuts: Mapping[str, Cut]) -> None:
    """Update the places of masked channels after a cut; channels that it removed are no longer masked."""
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
    # Renumber the remaining channels from 0, so that the highest number says how many there are.
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
        return owners[kept]  # a matrix of indices gives a matrix of owners, with different columns in each row
    return np.take_along_axis(owners, kept, axis=1) if kept.ndim == 2 else owners[:, kept]


def _composed(entry: dict[str, Any], cut: Cut) -> dict[str, Any]:
    """The kept indices of the dense tensor after one more cut, whose indices refer to the tensor before that cut."""
    kept = dict(entry["kept"])
    # Columns that differ by row are stored as one array per row, so they follow a cut of rows.
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


Certificate = dict[str, dict[str, Any]]


def certificate_of(model: nn.Module) -> Certificate:
    """A model's certificate; empty if no run has written one."""
    found: Certificate = record_of(model).get("certificate", {})
    return found


def masked_places(model: nn.Module) -> dict[str, Places]:
    """By certified space, the places of its masked channels; see `record_of`."""
    found: dict[str, Places] = record_of(model).get("masked", {})
    return found


def certify(model: nn.Module, certificate: Certificate, masked: Mapping[str, Places]) -> None:
    """Write a run's certificate and the places of its masked channels into the record; empty ones are omitted."""
    # A new dict, because `certified` keeps the old record for its undo.
    cuts = {key: value for key, value in record_of(model).items() if key not in ("certificate", "masked")}
    told = {"certificate": certificate, "masked": dict(masked)}
    model.__dict__[ATTRIBUTE] = cuts | {key: value for key, value in told.items() if value}


def certified(model: nn.Module, certificate: Certificate, masked: Mapping[str, Places]) -> Change:
    """`certify` as a change that can be undone."""

    def change() -> Undo:
        old = model.__dict__.get(ATTRIBUTE)
        with undone_by(undo := partial(put_back, model, old)):
            certify(model, certificate, masked)
            return undo

    return change


def certified_alive(model: nn.Module) -> Change:
    """A change that adds ``alive``, the number of nonzero weights, to each certified weight space."""
    found = {
        name: entry | ({"alive": alive_weights(model, entry)} if entry["kind"] == "weights" else {})
        for name, entry in certificate_of(model).items()
    }
    return certified(model, found, masked_places(model))


def recounted(model: nn.Module, known: Container[str]) -> Certificate:
    """The certificate with ``alive`` recounted for weights, because a stored number may be out of date.

    Args:
        model: The model.
        known: The spaces of the model's open Pruner.
    """
    found = dict[str, dict[str, Any]]()
    for name, entry in certificate_of(model).items():
        alive = alive_weights(model, entry) if entry["kind"] == "weights" else entry["kept"]
        # A later run may have left fewer weights than this space's run kept. For the spaces of an open Pruner, though,
        # masks decide and not values: a kept weight may be 0.0, so fewer nonzero weights do not mean that fewer are
        # left.
        told = entry["kind"] == "weights" and ("alive" in entry or (alive < entry["kept"] and name not in known))
        found[name] = entry | ({"alive": alive} if told else {})
    return found


def untrue_weights(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The certified spaces that have more nonzero weights than they kept, with both numbers: (kept, nonzero now)."""
    entries = {name: entry for name, entry in certificate_of(model).items() if entry["kind"] == "weights"}
    counts = {name: (entry["kept"], alive_weights(model, entry)) for name, entry in entries.items()}
    return {name: (kept, alive) for name, (kept, alive) in counts.items() if alive > kept}


def revived_channels(model: nn.Module) -> dict[str, int | None]:
    """By certified space with masked channels, how many of these are no longer zero; None if that is unknown."""
    places = masked_places(model)
    named = {**dict(model.named_parameters(remove_duplicate=False)), **named_parameters(model)}
    masked = [name for name, entry in certificate_of(model).items() if entry.get("masked")]
    return {name: _count_revived(places[name], named) if name in places else None for name in masked}


def _count_revived(places: Places, named: Mapping[str, Tensor]) -> int | None:
    back = set[int]()
    for name, axes in places.items():
        for axis, packed in axes.items():
            owners = np.asarray(packed, np.int64)
            dims = (int(axis),) if owners.ndim == 1 else (0, 1)
            tensor = named.get(name)
            if tensor is None or tuple(tensor.shape[dim] for dim in dims if dim < tensor.dim()) != owners.shape:
                return None  # the tensor was replaced, so its places are unknown
            alive, others = tensor.detach().ne(0), tuple(dim for dim in range(tensor.dim()) if dim not in dims)
            hit = (alive.any(dim=others) if others else alive).cpu().numpy()
            back |= set(owners[hit & (owners >= 0)].tolist())
    return len(back)


def alive_weights(model: nn.Module, entry: Mapping[str, Any]) -> int:
    """How many weights of a certified space are not zero.

    Raises:
        ShrinkError: The model is sharded, so that this process sees only a part of it.
    """
    named = named_parameters(model)
    if found := sharded(model):
        raise ShrinkError(
            f"certificate: {found} is sharded over processes, so its nonzero weights cannot be counted here. Count, "
            f"compact and save before sharding, or gather the model into a plain one."
        )
    # As in a run, a tied parameter is excluded by any of its names.
    excluded = {p for name, p in named.items() if matches(name, entry["exclude"])}
    mine = {p for name, p in named.items() if matches(name, entry["select"])} - excluded
    return sum(int(parameter.count_nonzero()) for parameter in mine)
