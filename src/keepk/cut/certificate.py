"""The certificate of a run in a model's record: by space, what was asked for and what is kept."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from keepk.cut.record import ATTRIBUTE, put_back, record_of
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


def certify(model: nn.Module, certificate: Certificate) -> None:
    """Put the certificate of a run into the record. An empty one is none."""
    cuts = {key: value for key, value in record_of(model).items() if key != "certificate"}
    model.__dict__[ATTRIBUTE] = {**cuts, "certificate": certificate} if certificate else cuts


def certified(model: nn.Module, certificate: Certificate) -> Change:
    """The same as a change that can be undone."""

    def change() -> Undo:
        old = model.__dict__.get(ATTRIBUTE)
        with undone_by(undo := partial(put_back, model, old)):
            certify(model, certificate)
            return undo

    return change


def certified_alive(model: nn.Module) -> Change:
    """A change by which a certificate of weights also says how many of them are not zero."""
    found = {
        name: entry | ({"alive": alive_weights(model, entry)} if entry["kind"] == "weights" else {})
        for name, entry in certificate_of(model).items()
    }
    return certified(model, found)


def recounted(model: nn.Module) -> Certificate:
    """The certificate with `alive` of weights counted again: a stored number may be older than the weights."""
    return {
        name: entry
        | ({"alive": alive_weights(model, entry)} if "alive" in entry and entry["kind"] == "weights" else {})
        for name, entry in certificate_of(model).items()
    }


def untrue_weights(model: nn.Module) -> dict[str, tuple[int, int]]:
    """By certified space that has more weights than it kept: how many it kept, and how many are not zero now."""
    entries = {name: entry for name, entry in certificate_of(model).items() if entry["kind"] == "weights"}
    counts = {name: (entry["kept"], alive_weights(model, entry)) for name, entry in entries.items()}
    return {name: (kept, alive) for name, (kept, alive) in counts.items() if alive > kept}


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
