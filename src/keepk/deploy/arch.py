"""The description of a saved model as plain values: its dense architecture, and all changes since it was built.

`describe` makes a description from a model, `arch_json` writes and reads it as JSON, and `load.replay` applies it to a
dense model. The checks in this module refuse models that a description and a file of tensors cannot represent.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from keepk.cut.record import ATTRIBUTE, PART, Places, certificate_of, masked_places, record_of, was_cut
from keepk.errors import FileError
from keepk.model.edits import Indices, Setting, read_attribute
from keepk.model.layers import SELECTED, HeadwiseAttention
from keepk.model.names import named_tensors, sharded, unwrap
from keepk.storage.codec import dtype_name, pack, unpackable
from keepk.storage.sparse import PARTS


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer.

    Attributes:
        dtype: Its dtype's name, such as 'float32'.
        dense: Its shape in the dense model.
        kept: By axis, the indices of the dense tensor that are left; see `keepk.model.edits.Cut`.
        stride: Its strides; None for a contiguous tensor.
        persistent: Whether it is in the model's state_dict.
        stored: How the file holds it: None for an ordinary tensor, or a form of `keepk.storage.sparse.PARTS`.
        values: The dtype of its values in the file, if that is not its own.
    """

    dtype: str
    dense: tuple[int, ...]
    kept: dict[int, Indices]
    stride: tuple[int, ...] | None
    persistent: bool
    stored: str | None = None
    values: str | None = None

    def names(self, name: str) -> dict[str, str]:
        """The names in the file of a tensor of this name, by its parts; an ordinary tensor has one part."""
        return {part: f"{name}.{part}" for part in PARTS[self.stored]} if self.stored else {"": name}

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape after the cuts."""
        return tuple(self.kept[dim].shape[-1] if dim in self.kept else size for dim, size in enumerate(self.dense))


@dataclass(frozen=True)
class Description:
    """A model's dense architecture and its record of cuts.

    Attributes:
        modules: The class names of the dense model's modules, by path.
        tensors: Every parameter and buffer, under its first name.
        ties: The first name of a tensor, by each of its other names.
        settings: Attributes that were set; `old` is the value in the dense model.
        selections: The channels that a BatchNorm reads, by its path.
        headwise: Paths of the attentions that lost heads.
        certificate: By space of a run: its kind, and the numbers of units at the start, asked for, and kept.
        masked: By space, the places of its channels that were masked but not removed; see `record_of`.
    """

    modules: dict[str, str]
    tensors: dict[str, Entry]
    ties: dict[str, str]
    settings: tuple[Setting, ...]
    selections: dict[str, Indices]
    headwise: tuple[str, ...]
    certificate: dict[str, dict[str, Any]]
    masked: dict[str, Places] = field(default_factory=dict)

    def dense_sha256(self) -> str:
        """A hash of the dense architecture: module classes by path, persistent tensors with dtype and shape, ties.

        Buffers outside the state_dict are left out: caches and tables may differ from one build to the next.
        """
        tensors = {name: [it.dtype, it.dense] for name, it in self.tensors.items() if it.persistent}
        text = json.dumps([self.modules, tensors, self.ties], sort_keys=True)
        return sha256(text.encode("ascii")).hexdigest()


def describe(model: nn.Module) -> Description:
    """Describe a model and its record of cuts. Its tensors may be on the meta device; only their sizes are read.

    Raises:
        FileError: The model and its record do not agree, or a tensor cannot be stored.
    """
    _refuse_records_of_parts(model)
    modules, record = dict(model.named_modules()), record_of(model)
    _refuse_parts_of_larger(modules, record["tensors"])
    _refuse_removed_parametrizations(modules, record["tensors"])
    selections = {path: np.asarray(it, np.int64) for path, it in record["selections"].items() if path in modules}
    tensors = dict(_entries(model, record["tensors"]))
    return Description(
        modules={path: _dense_class(module) for path, module in modules.items()},
        tensors=tensors,
        ties=_ties(model),
        settings=tuple(_settings(modules, record["attributes"])),
        selections=selections,
        headwise=tuple(path for path in record["headwise"] if path in modules),
        certificate=dict(certificate_of(model)),
        # A copy inside other wrappers has other names, so recorded places no longer apply to it.
        masked={space: places for space, places in masked_places(model).items() if set(places) <= set(tensors)},
    )


def dense_value(module: nn.Module, setting: Setting) -> Any:
    """The value that a setting would replace; None if the module has no such attribute or entry."""
    try:
        return read_attribute(module, setting)
    except (AttributeError, LookupError, TypeError):
        return None


def user_module(model: object, verb: str, order: str) -> nn.Module:
    """The module that `save` and `load` work on: the user's model without its wrappers.

    Args:
        model: The argument that should be a model.
        verb: The function that the user called.
        order: The order of its arguments, for the error.

    Raises:
        FileError: The argument is not a module, or is sharded over processes.
    """
    if not isinstance(model, nn.Module):
        # Imported only for the error, because its module is about examples, which loading does not need.
        from keepk.model.example import not_a_model  # noqa: PLC0415 - only for this error's text

        swapped = "" if isinstance(model, type) else f" The order is {order}."
        raise FileError(f"{verb}: {not_a_model(model)}{swapped}")
    if found := sharded(model):
        raise FileError(
            f"{verb}: {found} is sharded over processes, and each process sees only a part of it. "
            f"{verb.capitalize()} a plain model: shard it after keepk.load, and gather the full state_dict into a "
            f"plain model before keepk.save."
        )
    return unwrap(model)


def refuse_extra_state(model: nn.Module) -> None:
    """Refuse a model whose state_dict has more than parameters and buffers, because the files store only these."""
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise FileError(
                f"module {path!r} ({type(module).__name__}) has extra state (get_extra_state), which may be any "
                f"object. Keep what has to be saved in buffers."
            )
    # Quantised modules pack their weights into other entries, and any module may add entries. An entry that is a
    # parameter or buffer under another name, as state_dict hooks make it, is not lost.
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names, tensors = {name for name, _ in named}, {id(tensor) for _, tensor in named}
    state = model.state_dict(keep_vars=True)  # the tensor objects themselves, to be recognized by id
    # arch.json has the channels that a BatchNorm selects.
    tensors |= {id(getattr(module, SELECTED)) for module in model.modules() if hasattr(module, "reads_selection")}
    lost = [key for key, value in state.items() if key not in names and id(value) not in tensors]
    if lost:
        path = max((it for it, _ in model.named_modules() if lost[0].startswith(f"{it}." if it else "")), key=len)
        keys = [repr(key) for key in lost if key.startswith(f"{path}." if path else "")]
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        raise FileError(
            f"module {path!r} ({type(model.get_submodule(path)).__name__}) keeps state that is neither a parameter nor "
            f"a buffer and would be lost: {', '.join(keys[:5])}{more}. Keep it in buffers. If the model is quantised, "
            f"save the float model and quantise it after keepk.load, or save model.state_dict() with torch.save."
        )


def refuse_meta(model: nn.Module, remedy: str) -> None:
    """Refuse meta tensors, which have no values to save or to fill; `remedy` says what to do about them."""
    for name, tensor, _ in named_tensors(model):
        # A lazy parameter is on the meta device too; `describe` has a better error for it.
        if tensor.is_meta and not is_lazy(tensor):
            raise FileError(f"tensor {name!r} is a meta tensor, which has no values. {remedy}")


def _refuse_records_of_parts(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if path and ATTRIBUTE in module.__dict__ and was_cut(module):
            raise FileError(
                f"model {type(model).__name__}: its submodule {path!r} was shrunk separately, so the model has no "
                f"record of it. Save and load the submodule: model.get_submodule({path!r})."
            )


def _refuse_parts_of_larger(modules: Mapping[str, nn.Module], cut: Mapping[str, Any]) -> None:
    known = {name.rpartition(".")[0] for name in cut}
    for path, module in modules.items():
        if PART in module.__dict__ and path not in known:
            raise FileError(
                f"module {path or type(module).__name__!r}: was cut as a part of a larger model, which has the record "
                f"of the cut. Save the larger model; keepk.load restores it, including this part."
            )


def _refuse_removed_parametrizations(modules: Mapping[str, nn.Module], cut: Mapping[str, Any]) -> None:
    # remove_parametrizations renames the tensor, so the recorded cut would silently apply to nothing.
    for name in cut:
        path, parametrized, rest = name.partition(".parametrizations.")
        attribute = rest.partition(".")[0]
        if parametrized and f"{path}.parametrizations" not in modules and hasattr(modules.get(path), attribute):
            raise FileError(
                f"module {path!r}: its parametrization of {attribute!r} was removed after the model was shrunk, so the "
                f"record does not fit. Remove parametrizations before the first cut."
            )


def _dense_class(module: nn.Module) -> str:
    # keepk replaces the class of these two kinds of layers by a subclass; the file names the user's class.
    swapped = isinstance(module, HeadwiseAttention) or hasattr(type(module), "reads_selection")
    return type(module).__mro__[1 if swapped else 0].__name__


def _entries(model: nn.Module, cut: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    modules = model.named_modules()
    passing = {f"{path}.{name}".removeprefix(".") for path, it in modules for name in it._non_persistent_buffers_set}
    for name, tensor, _ in named_tensors(model):
        if reason := unpackable(tensor, with_values=False):
            raise FileError(f"tensor {name!r} is {reason}")
        yield name, _entry(name, tensor, cut.get(name), persistent=name not in passing)


def _entry(name: str, tensor: Tensor, cut: Mapping[str, Any] | None, *, persistent: bool) -> Entry:
    stride = pack(tensor)[1].get("stride")
    entry = Entry(
        dtype=dtype_name(tensor.dtype),
        dense=tuple(cut["shape"]) if cut else tuple(tensor.shape),
        kept={int(axis): np.asarray(kept, np.int64) for axis, kept in cut["kept"].items()} if cut else {},
        stride=None if stride is None else tuple(stride),
        persistent=persistent,
    )
    if entry.shape != tuple(tensor.shape):
        raise FileError(
            f"tensor {name!r} has shape {tuple(tensor.shape)}, but was cut to {entry.shape}: it was replaced after the "
            f"model was shrunk. Replace layers before keepk.shrink, in the model's constructor."
        )
    return entry


def _ties(model: nn.Module) -> dict[str, str]:
    first, ties = dict[int, str](), dict[str, str]()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if first.setdefault(id(tensor), name) != name:
            ties[name] = first[id(tensor)]
    return ties


def _settings(modules: Mapping[str, nn.Module], attributes: Mapping[str, Any]) -> Iterator[Setting]:
    for path, values in attributes.items():
        for key, value in values.items() if path in modules else ():
            setting = setting_of(path, key, value)
            found = dense_value(modules[path], setting)
            if found != setting.new:
                raise FileError(
                    f"module {path!r}: {key} is {found!r}, but was set to {setting.new!r} when the model was shrunk. "
                    f"Do not change the sizes of a shrunk model."
                )
            yield setting


def setting_of(path: str, key: str, value: Mapping[str, Any]) -> Setting:
    """A setting from its entry in a record.

    Args:
        path: The module's path.
        key: The attribute; 'normalized_shape.0' is the first entry of a tuple, 'config.heads' a value in an object.
        value: Its value in the dense model (``dense``) and after the cuts (``now``).
    """
    attribute, _, item = key.rpartition(".")
    if not item.isdecimal():
        attribute, item = key, ""
    return Setting(path, attribute, int(item) if item else None, value["dense"], value["now"])
