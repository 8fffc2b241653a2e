"""Replaying a saved model's cuts on a freshly built one: everything is checked first, then applied all or nothing."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.certificate import certificate_of, certified, masked_places
from keepk.cut.changes import cut_module, flatten_again
from keepk.cut.record import was_cut
from keepk.cut.tensors import replace_contents
from keepk.cut.undo import Change, Undo, all_or_nothing, undone_by
from keepk.deploy.description import Description, Entry, dense_value
from keepk.errors import CheckpointError, FileError
from keepk.graph.edits import Cut, Edits, Selection
from keepk.graph.tracer import named_tensors
from keepk.run.packing import DTYPE_CODES, dtype_name, unpack

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
        raise FileError(f"the given {type(model).__name__} was shrunk before. Give a freshly built one.")


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
    if strange := set(stored) ^ set(saved.tensors):
        raise FileError(f"arch.json and model.safetensors do not name the same tensors: {sorted(strange)[:SHOWN]}")
    _refuse_other_selections(saved)
    return {name: _value(name, entry, stored[name]) for name, entry in saved.tensors.items()}


def _refuse_other_selections(saved: Description) -> None:
    # Both come from arch.json, so the file may contradict itself.
    for path, channels in saved.selections.items():
        own = [entry for name, entry in saved.tensors.items() if name.rpartition(".")[0] == path and entry.dense]
        if any(entry.shape[0] != len(channels) for entry in own):
            raise FileError(
                f"arch.json: module {path!r} reads {len(channels)} channels, but its tensors have {own[0].shape[0]}"
            )


def replay(model: nn.Module, saved: Description, given: Description, values: Mapping[str, Tensor]) -> None:
    """Cut a dense model as the saved one was cut, and give it the saved values.

    Args:
        model: The dense model.
        saved: The description of the saved model.
        given: The description of `model`.
        values: The saved values.
    """
    tensors = {name: tensor for name, tensor, _ in named_tensors(model)}
    edits = edits_of(saved)
    shrunk = edits.cuts or edits.settings or edits.selections or edits.headwise
    changes = cut_module(model, tensors, edits) if shrunk else []
    # Values come after the cuts, which give the tensors their sizes.
    for name, entry in saved.tensors.items():
        value, own = values[name], given.tensors.get(name)
        # Only a buffer outside the state_dict can be missing or different here: a cache or a table. The constructor's
        # own then stays; one of another dtype is converted if its values are plain numbers.
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
            # The attribute may be anything, even a module or a tensor; only numbers are short enough to print.
            shown = repr(found) if is_number or found is None else f"a {type(found).__name__}"
            yield f"{setting.attribute} of module {setting.module!r} was {setting.old!r} and is {shown}"
    for path in saved.headwise:
        if not isinstance(modules.get(path), nn.MultiheadAttention):
            yield f"module {path!r} is not an attention"


def _value(name: str, entry: Entry, stored: Tensor) -> Tensor:
    try:
        value = unpack(stored, {"dtype": entry.dtype, "shape": list(entry.shape)})
    except (CheckpointError, RuntimeError) as error:
        raise FileError(f"model.safetensors: {name!r} cannot be read as {entry.dtype} ({error})") from error
    if tuple(value.shape) != entry.shape or dtype_name(value.dtype) != entry.dtype:
        raise FileError(
            f"model.safetensors: {name!r} has shape {tuple(value.shape)}, but arch.json leaves {entry.shape} of it"
        )
    return value


def _fill(tensor: Tensor, entry: Entry, value: Tensor) -> Change:
    """A change that gives a tensor the saved values and strides."""
    # A tensor that keeps its shape and layout also keeps its memory, which others may share (a view, a shared model).
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
