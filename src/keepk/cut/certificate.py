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


def true_certificate(model: nn.Module) -> Certificate:
    """The certificate, with the weights that are alive where they are more than were kept: something trained on."""
    found = dict(certificate_of(model))
    for name, entry in found.items():
        if entry["kind"] == "weights" and (alive := alive_weights(model, entry)) > entry["kept"]:
            found[name] = entry | {"alive": alive}
    return found


def alive_weights(model: nn.Module, entry: Mapping[str, Any]) -> int:
    """How many weights of a certified space are not zero."""
    named = named_parameters(model)
    mine = {p for name, p in named.items() if matches(name, entry["select"]) and not matches(name, entry["exclude"])}
    if found := sharded(model):
        raise ShrinkError(
            f"certificate: {found} is sharded over processes, so that the weights that are not zero cannot be counted "
            f"here. Count, compact and save before sharding, or gather the model into a plain one."
        )
    return sum(int(parameter.count_nonzero()) for parameter in mine)
