"""`load`: turn a freshly built model into a saved one. Nothing is ever unpickled.

Loading is a replay of the recorded cuts, which needs facts about modules but no trace. The tracer, its rules and the
`Pruner` are imported only where a caller asks for them.
"""

import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import nn

from keepk.cut.changes import forget_compiled
from keepk.cut.holders import refuse_holders
from keepk.deploy.arch_json import dense_from, from_document
from keepk.deploy.description import describe, refuse_extra_state, refuse_meta, user_module
from keepk.deploy.folder import read_folder
from keepk.deploy.replay import edits_of, refuse_other_model, refuse_other_sizes, refuse_shrunk, replay, unpacked
from keepk.deploy.sizes import refuse_impossible, widths_of_norms
from keepk.errors import FileError, ShrinkError
from keepk.graph.edits import Edits
from keepk.run.files import place

Model = TypeVar("Model", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])


def _accepts_old_order(function: Function) -> Function:
    """Let `load` also be called as load(path, model), its former order, with a DeprecationWarning."""

    @wraps(function)
    def either_order(*args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], str | os.PathLike):
            # The second argument may also have been given by name. Two paths, or a path and anything else, are
            # mistakes in either order: they reach `load`, whose error names the right one.
            given = args[1:] if len(args) > 1 else (options.get("model"),)
            if len(args) <= 2 and isinstance(given[0], nn.Module):
                warnings.warn(
                    "keepk.load(path, model) is deprecated: call keepk.load(model, path), in the order of keepk.save.",
                    DeprecationWarning,
                    stacklevel=2,
                )
                args = (given[0], args[0])
                options.pop("model", None)
        return function(*args, **options)

    return cast("Function", either_order)


@_accepts_old_order
def load(model: Model, path: str | os.PathLike[str], *, example: Any = None) -> Model:
    """Cut a freshly built model as the model saved in the folder `path` was cut, and give it the saved values.

    Parameter objects, devices, `requires_grad` and train or eval mode stay. Everything is checked first: if anything is
    refused, the model has not changed. The folder is not trusted: whatever its files say, `load` changes only tensors
    and sizes, and only to values that a cut of this very model can leave.

    Args:
        model: The model as its constructor builds it, of the saved model's dtype and on any device but meta.
        path: A folder that `save` wrote.
        example: An input of forward, as for `trace`. With it, the model is traced and its forward replayed at the saved
            sizes on a copy without weights, so that code that was edited since the save (a ``.squeeze()``, a branch on
            a width) is found before anything changes. Without it, only the sizes of tensors and attributes are checked.

    Returns:
        The same model object, which now has the saved sizes and values.

    Raises:
        FileError: The folder holds no saved model or a damaged one, the given model is not the dense model that was
            saved, or forward does not work at the saved sizes.
        ShrinkError: Another object holds a tensor that would be cut.
        TraceError: The model cannot be traced with `example`.

    Examples:
        >>> import keepk, tempfile
        >>> def build():
        ...     return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> net, x = build(), torch.ones(2, 8)
        >>> edits = keepk.shrink(net, keepk.trace(net, x), [0, 5])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     keepk.save(net, folder)
        ...     loaded = keepk.load(build(), folder)
        >>> loaded[0], torch.equal(loaded(x), net(x))
        (Linear(in_features=8, out_features=4, bias=True), True)
    """
    order = "model, path"
    inner, folder = user_module(model, "load", order), place(path, "load", order, FileError)
    document, stored = read_folder(folder)
    try:
        refuse_shrunk(inner)
        refuse_extra_state(inner)
        refuse_meta(inner, "Build the model on the CPU, or call model.to_empty(device=...) and tie its ties again.")
        # In this order: indices take memory, so they are read only for axes that the given model has.
        dense, given = dense_from(document), describe(inner)
        refuse_other_model(inner, dense, given)
        saved = from_document(document, dense, widths_of_norms(inner))
        refuse_other_sizes(inner, saved)
        values = unpacked(saved, stored)
        refuse_impossible(inner, saved)
        if example is not None:
            _refuse_unfit(inner, example, edits_of(saved))
    except (FileError, ShrinkError) as error:
        raise FileError(f"{folder}: {error}") from error
    with torch.inference_mode(False), torch.no_grad():  # tensors made in inference mode could not be trained
        refuse_holders(model, edits_of(saved))
        replay(inner, saved, given, values)
    forget_compiled(model)
    return model


def _refuse_unfit(model: nn.Module, example: Any, edits: Edits) -> None:
    """Refuse saved sizes at which forward would not do what it does at the dense ones."""
    # Here and not above, because only `example=` needs the trace: a program that just loads a model and runs it should
    # not depend on the tracer and its rules.
    from keepk.cut.verify import refuse_unfit  # noqa: PLC0415
    from keepk.graph.trace import trace  # noqa: PLC0415

    graph = trace(model, example, train_mode="accept", value_branches="accept")
    refuse_unfit(model, graph, replace(edits, units=graph.lost(edits.cuts)), "load")
