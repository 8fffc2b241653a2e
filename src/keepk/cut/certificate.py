"""The certificate of a run in a model's record: for each space, how many units were asked for and how many are kept.

Channels that were masked but not removed are recorded with their places, so that the ones that are still zero can be
counted again later, in the model, in a copy or in a loaded file, without the `Pruner`.
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
    """A model's certificate; empty if no run has written one."""
    found: Certificate = record_of(model).get("certificate", {})
    return found


def masked_places(model: nn.Module) -> dict[str, Places]:
    """By certified space, the places of its masked channels; see `record_of`."""
    found: dict[str, Places] = record_of(model).get("masked", {})
    return found


def certify(model: nn.Module, certificate: Certificate, masked: Mapping[str, Places]) -> None:
    """Write a run's certificate and the places of its masked channels into the record, each unless it is empty."""
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
    """A change that adds to each certified space of weights how many of them are not zero (``alive``)."""
    found = {
        name: entry | ({"alive": alive_weights(model, entry)} if entry["kind"] == "weights" else {})
        for name, entry in certificate_of(model).items()
    }
    return certified(model, found, masked_places(model))


def recounted(model: nn.Module, known: Container[str]) -> Certificate:
    """The certificate with ``alive`` of weights counted again, because a stored number may be older than the weights.

    Args:
        model: The model.
        known: The spaces of the model's open Pruner.
    """
    found = dict[str, dict[str, Any]]()
    for name, entry in certificate_of(model).items():
        alive = alive_weights(model, entry) if entry["kind"] == "weights" else entry["kept"]
        # A later run may have left fewer weights than the space's own run kept. For an open Pruner the mask counts, not
        # the value: a kept weight may be 0.0, so that alone does not mean that fewer are left.
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
                return None  # the tensor was replaced, so the places do not apply to it
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
