"""`load`: restore a saved model into a freshly built one, without unpickling anything.

Loading replays the recorded cuts, which needs facts about modules but no trace. The tracer, its rules and the `Pruner`
are imported only if `load` is called with an example.
"""

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.holders import refuse_holders
from keepk.cut.record import certificate_of, certified, masked_places, noted, was_cut
from keepk.deploy.arch import Description, Entry, dense_value, describe, refuse_extra_state, refuse_meta, user_module
from keepk.deploy.arch_json import dense_from, from_document
from keepk.deploy.folder import read_folder
from keepk.deploy.sizes import refuse_impossible, widths_of_norms
from keepk.errors import CheckpointError, FileError, ShrinkError
from keepk.model.edits import (
    Change,
    Cut,
    Edits,
    Selection,
    Undo,
    all_or_nothing,
    cut_module,
    flatten_again,
    forget_compiled,
    replace_contents,
    undone_by,
)
from keepk.model.names import named_tensors
from keepk.storage.codec import DTYPE_CODES, dtype_name, dtype_named, unpack
from keepk.storage.files import place
from keepk.storage.sparse import expanded

SHOWN = 3  # differences in an error


def edits_of(saved: Description) -> Edits:
    """All cuts of a saved model as one shrink."""
    return Edits(
        units=np.zeros(0, np.int64),
        cuts=tuple(Cut(name, it.kept, it.dense, it.shape) for name, it in saved.tensors.items() if it.kept),
        settings=saved.settings,
        selections=tuple(Selection(path, channels) for path, channels in saved.selections.items()),
        headwise=saved.headwise,
    )


def refuse_shrunk(model: nn.Module) -> None:
    """Refuse a model from which something was already cut."""
    if was_cut(model):
        raise FileError(f"the given {type(model).__name__} was already shrunk. Pass a freshly built one.")


def refuse_other_model(model: nn.Module, saved: Description, given: Description) -> None:
    """Refuse a model that differs from the dense model that was saved in classes, shapes, dtypes or ties."""
    _refuse(model, list(_differences(saved, given)))


def refuse_other_sizes(model: nn.Module, saved: Description) -> None:
    """Refuse a model whose attributes differ from the dense model's, or that lacks an attention that lost heads."""
    _refuse(model, list(_unexpected(dict(model.named_modules()), saved)))


def _refuse(model: nn.Module, found: list[str]) -> None:
    if found:
        more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
        raise FileError(
            f"the given {type(model).__name__} is not the dense model that was saved: {'; '.join(found[:SHOWN])}{more}"
            f". Build it with the same class, arguments and dtype."
        )


def unpacked(saved: Description, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The saved values by name.

    Raises:
        FileError: Names, shapes or dtypes are not those of the described tensors.
    """
    names = Counter(part for name, entry in saved.tensors.items() for part in entry.names(name).values())
    if strange := (set(stored) ^ set(names)) | {name for name, times in names.items() if times > 1}:
        raise FileError(f"arch.json and model.safetensors do not name the same tensors: {sorted(strange)[:SHOWN]}")
    _refuse_other_selections(saved)
    return {
        name: _value(name, entry, {part: stored[place] for part, place in entry.names(name).items()})
        for name, entry in saved.tensors.items()
    }


def _refuse_other_selections(saved: Description) -> None:
    # Both come from arch.json, so the file may contradict itself.
    for path, channels in saved.selections.items():
        own = [entry for name, entry in saved.tensors.items() if name.rpartition(".")[0] == path and entry.dense]
        if any(entry.shape[0] != len(channels) for entry in own):
            raise FileError(
                f"arch.json: module {path!r} reads {len(channels)} channels, but its tensors have {own[0].shape[0]}"
            )


def replay(model: nn.Module, saved: Description, given: Description, values: Mapping[str, Tensor]) -> None:
    """Cut a dense model as the saved one was cut, and fill it with the saved values.

    Args:
        model: The dense model.
        saved: The description of the saved model.
        given: The description of `model`.
        values: The saved values.
    """
    tensors = {name: tensor for name, tensor, _ in named_tensors(model)}
    edits = edits_of(saved)
    shrunk = edits.cuts or edits.settings or edits.selections or edits.headwise
    changes = [*cut_module(model, tensors, edits), noted(model, edits)] if shrunk else []
    # After the cuts, because the values have the saved sizes.
    for name, entry in saved.tensors.items():
        value, own = values[name], given.tensors.get(name)
        # Only a buffer outside the state_dict, such as a cache or a table, can be missing or different here. Then the
        # constructor's buffer stays. If only its dtype differs, the saved values are converted if they are numbers.
        if own and entry.dense == own.dense and (entry.dtype == own.dtype or value.dtype in DTYPE_CODES):
            changes.append(_fill(tensors[name], entry, value))
    changes += [flatten_again(module) for module in model.modules() if isinstance(module, nn.RNNBase)]
    if (saved.certificate, saved.masked) != (certificate_of(model), masked_places(model)):
        changes.append(certified(model, saved.certificate, saved.masked))
    all_or_nothing(changes)


def _differences(saved: Description, given: Description) -> Iterator[str]:
    pairs = (
        ("module", saved.modules, given.modules),
        ("tensor", _dense_tensors(saved, saved), _dense_tensors(given, saved)),
        ("tie of", saved.ties, given.ties),
    )
    for what, wanted, got in pairs:
        for name in {**wanted, **got}:
            if wanted.get(name) != got.get(name):
                there, here = wanted.get(name, "not there"), got.get(name, "not there")
                yield f"{what} {name!r} was {there} and is {here}" if name else f"the model was {there} and is {here}"


def _dense_tensors(description: Description, saved: Description) -> dict[str, str]:
    """The tensors that have to match: those in the state_dict, and those that were cut. Other buffers may differ."""
    cut = {name for name, entry in saved.tensors.items() if entry.kept}
    tensors = description.tensors.items()
    return {name: f"{it.dtype} {it.dense}" for name, it in tensors if it.persistent or name in cut}


def _unexpected(modules: Mapping[str, nn.Module], saved: Description) -> Iterator[str]:
    for setting in saved.settings:
        module = modules.get(setting.module)
        found = None if module is None else dense_value(module, setting)
        is_number = isinstance(found, int) and not isinstance(found, bool)
        if not is_number or found != setting.old:
            # The attribute may be anything, even a module or a tensor, so only numbers are printed.
            shown = repr(found) if is_number or found is None else f"a {type(found).__name__}"
            yield f"{setting.attribute} of module {setting.module!r} was {setting.old!r} and is {shown}"
    for path in saved.headwise:
        if not isinstance(modules.get(path), nn.MultiheadAttention):
            yield f"module {path!r} is not an attention"


def _value(name: str, entry: Entry, parts: Mapping[str, Tensor]) -> Tensor:
    try:
        if entry.stored:
            return _expanded(entry, parts)
        value = unpack(parts[""], {"dtype": entry.dtype, "shape": list(entry.shape)})
    except (CheckpointError, FileError, RuntimeError) as error:
        raise FileError(f"model.safetensors: {name!r} cannot be read as {entry.dtype} ({error})") from error
    if tuple(value.shape) != entry.shape or dtype_name(value.dtype) != entry.dtype:
        raise FileError(
            f"model.safetensors: {name!r} has shape {tuple(value.shape)}, but arch.json leaves {entry.shape} of it"
        )
    return value


def _expanded(entry: Entry, parts: Mapping[str, Tensor]) -> Tensor:
    """A tensor from its values and their places; its size is known to be that of the user's model."""
    dtype, values = dtype_named(entry.dtype), parts["values"].dtype
    if dtype_name(values) != (entry.values or entry.dtype):
        raise FileError(f"its values are {dtype_name(values)}, arch.json says {entry.values or entry.dtype}")
    return expanded(parts, dtype, math.prod(entry.shape)).reshape(entry.shape)


def _fill(tensor: Tensor, entry: Entry, value: Tensor) -> Change:
    """A change that fills a tensor with the saved values, in the saved strides."""
    # A tensor that keeps its shape and layout also keeps its memory, which other objects may share.
    stride = entry.stride or torch.empty(entry.shape, device="meta").stride()
    if not entry.kept and tensor.stride() == stride:
        return _fill_in_place(tensor, value)
    contents = torch.empty_strided(entry.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(value)

    def change() -> Undo:
        old, grad = tensor.data, tensor.grad

        def undo() -> None:
            replace_contents(tensor, old)
            tensor.grad = grad

        with undone_by(undo):
            replace_contents(tensor, contents)
            tensor.grad = grad
        return undo

    return change


def _fill_in_place(tensor: Tensor, value: Tensor) -> Change:
    old = tensor.detach().clone()

    def change() -> Undo:
        def undo() -> None:
            tensor.detach().copy_(old)

        with undone_by(undo):
            tensor.detach().copy_(value)
        return undo

    return change


Model = TypeVar("Model", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])


def _accepts_old_order(function: Function) -> Function:
    """Also accept the former order of arguments, load(path, model), with a DeprecationWarning."""

    @wraps(function)
    def either_order(*args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], str | os.PathLike):
            # The model may also have been passed by name. A path with anything but a model is a mistake in either
            # order: it reaches `load`, whose error names the right order.
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
    """Restore the model saved in the folder `path` into a freshly built one: cut it to the saved sizes, and fill it.

    Parameter objects, devices, `requires_grad` and train or eval mode do not change. Everything is checked first: if
    this raises, the model has not changed. The folder is not trusted: whatever its files say, `load` changes only
    tensors and sizes, and only to sizes that a cut of this model can lead to.

    Args:
        model: The model as its constructor builds it, with the saved model's dtype, on any device but meta.
        path: A folder that `save` wrote.
        example: An input of forward, as for `trace`. With it, the model is traced and its forward replayed at the saved
            sizes on a copy without weights, so that code that was edited since the save (a ``.squeeze()``, a branch on
            a width) is found before anything changes. Without it, only the sizes of tensors and attributes are checked.

    Returns:
        The same model object, which now has the saved sizes and values.

    Raises:
        FileError: The folder has no saved model or a damaged one, `model` is not the dense model that was saved, or
            forward does not work at the saved sizes.
        ShrinkError: Another object refers to a tensor that would be cut.
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
        # Compare the dense models first: indices take memory, so they are read only for axes that the model has.
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
    """Refuse saved sizes at which forward would not do what it does at the dense sizes."""
    # Imported here, because only `example=` needs the trace: a program that just loads a model and runs it should not
    # depend on the tracer and its rules.
    from keepk.graph.probe.verify import refuse_unfit  # noqa: PLC0415 - loading without a check imports no tracer
    from keepk.graph.trace import trace  # noqa: PLC0415 - loading without a check imports no tracer

    graph = trace(model, example, train_mode="accept", value_branches="accept")
    refuse_unfit(model, graph, replace(edits, units=graph.lost(edits.cuts)), "load")
