"""A model that was changed behind the back of a `Pruner`: noticed in several places, told in one way."""

from collections.abc import Mapping

from torch import nn

from keepk.errors import KeepkError
from keepk.graph.wrappers import named_parameters


def changed_model(kind: type[KeepkError], name: str, how: str) -> KeepkError:
    """The error about a parameter that is not what it was."""
    return kind(
        f"parameter {name!r}: {how}. Change the model first (load, move, wrap, replace layers), then make the Pruner."
    )


def refuse_other_parameters(model: nn.Module, known: Mapping[str, nn.Parameter], kind: type[KeepkError]) -> None:
    """Refuse a model whose parameters of these names are other objects by now."""
    now = named_parameters(model)
    for name, parameter in known.items():
        if now.get(name) is not parameter:
            raise changed_model(kind, name, "the model's is another object than when the Pruner was made")
