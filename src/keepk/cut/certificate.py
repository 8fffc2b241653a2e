"""The certificate of a run in a model's record: by space, what was asked for and what is kept.

Channels that are masked and were not removed are recorded with their places, so that any owner of the model, a copy of
it or its file can count again which of them are still zero. No `Pruner` is needed for that.
"""

from collections.abc import Container, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from keepk.cut.record import ATTRIBUTE, Places, put_back, record_of
from keepk.cut.tensors import sharded
from keepk.cut.undo import Change, Undo, undone_by
from keepk.errors import ShrinkError
from keepk.graph.wrappers import named_parameters
from keepk.plan.names import matches

Certificate = dict[str, dict[str, Any]]


def certificate_of(model: nn.Module) -> Certificate:
    """What is certified of a model; empty if nothing is."""
    found: Certificate = record_of(model).get("certificate", {})
    return found


def masked_places(model: nn.Module) -> dict[str, Places]:
    """By certified space, where its masked channels are; see `record_of`."""
    found: dict[str, Places] = record_of(model).get("masked", {})
    return found


def certify(model: nn.Module, certificate: Certificate, masked: Mapping[str, Places]) -> None:
    """Put the certificate of a run into the record, with the places of masked channels. Empty ones are left out."""
    cuts = {key: value for key, value in record_of(model).items() if key not in ("certificate", "masked")}
    told = {"certificate": certificate, "masked": dict(masked)}
    model.__dict__[ATTRIBUTE] = cuts | {key: value for key, value in told.items() if value}


def certified(model: nn.Module, certificate: Certificate, masked: Mapping[str, Places]) -> Change:
    """The same as a change that can be undone."""

    def change() -> Undo:
        old = model.__dict__.get(ATTRIBUTE)
        with undone_by(undo := partial(put_back, model, old)):
            certify(model, certificate, masked)
            return undo

    return change


def certified_alive(model: nn.Module) -> Change:
    """A change by which a certificate of weights also says how many of them are not zero."""
    found = {
        name: entry | ({"alive": alive_weights(model, entry)} if entry["kind"] == "weights" else {})
        for name, entry in certificate_of(model).items()
    }
    return certified(model, found, masked_places(model))


def recounted(model: nn.Module, known: Container[str]) -> Certificate:
    """The certificate with `alive` of weights counted again: a stored number may be older than the weights.

    A later run may have left fewer weights of a space than its own run kept; spaces that are `known` to a Pruner, which
    counts a kept weight of 0.0 as kept, get that number only if it was there before.
    """
    found = dict[str, dict[str, Any]]()
    for name, entry in certificate_of(model).items():
        alive = alive_weights(model, entry) if entry["kind"] == "weights" else entry["kept"]
        told = entry["kind"] == "weights" and ("alive" in entry or (alive < entry["kept"] and name not in known))
        found[name] = entry | ({"alive": alive} if told else {})
    return found


def untrue_weights(model: nn.Module) -> dict[str, tuple[int, int]]:
    """By certified space that has more weights than it kept: how many it kept, and how many are not zero now."""
    entries = {name: entry for name, entry in certificate_of(model).items() if entry["kind"] == "weights"}
    counts = {name: (entry["kept"], alive_weights(model, entry)) for name, entry in entries.items()}
    return {name: (kept, alive) for name, (kept, alive) in counts.items() if alive > kept}


def revived_channels(model: nn.Module) -> dict[str, int | None]:
    """By certified space with masked channels: how many of them are not zero any more; None if it cannot be told."""
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
                return None  # it was replaced
            alive, others = tensor.detach().ne(0), tuple(dim for dim in range(tensor.dim()) if dim not in dims)
            hit = (alive.any(dim=others) if others else alive).cpu().numpy()
            back |= set(owners[hit & (owners >= 0)].tolist())
    return len(back)


def alive_weights(model: nn.Module, entry: Mapping[str, Any]) -> int:
    """How many weights of a certified space are not zero."""
    named = named_parameters(model)
    if found := sharded(model):
        raise ShrinkError(
            f"certificate: {found} is sharded over processes, so that the weights that are not zero cannot be counted "
            f"here. Count, compact and save before sharding, or gather the model into a plain one."
        )
    # As a run selects: a tied parameter is excluded by any of its names.
    excluded = {p for name, p in named.items() if matches(name, entry["exclude"])}
    mine = {p for name, p in named.items() if matches(name, entry["select"])} - excluded
    return sum(int(parameter.count_nonzero()) for parameter in mine)
