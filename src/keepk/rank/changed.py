"""The error about a model that was changed after its `Pruner` was made, noticed in several places."""

from collections.abc import Mapping

from torch import nn

from keepk.errors import KeepkError
from keepk.graph.wrappers import named_parameters


def changed_model(kind: type[KeepkError], name: str, how: str) -> KeepkError:
    """The error about a parameter that was changed or replaced; `how` says how."""
    return kind(
        f"parameter {name!r}: {how}. Change the model first (load, move, wrap, replace layers), then make the Pruner."
    )


def refuse_other_parameters(model: nn.Module, known: Mapping[str, nn.Parameter], kind: type[KeepkError]) -> None:
    """Refuse a model in which a name now refers to a different parameter object."""
    # Masks, hooks and optimizer state are tied to the object. With another one in its place they would silently apply
    # to a parameter that the model no longer uses.
    now = named_parameters(model)
    for name, parameter in known.items():
        if now.get(name) is not parameter:
            raise changed_model(kind, name, "the model has a different object than when the Pruner was made")
