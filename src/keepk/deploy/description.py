"""What a model is, in plain values: its dense architecture, and all that was done to it since it was built."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from torch import Tensor, nn

from keepk.cut.certificate import certificate_of, masked_places
from keepk.cut.record import ATTRIBUTE, PART, Places, record_of, was_cut
from keepk.errors import FileError
from keepk.graph.edits import Indices, Setting, read_attribute
from keepk.graph.layers import HeadwiseAttention
from keepk.graph.tracer import named_tensors
from keepk.run.packing import dtype_name, pack, unpackable


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer.

    Attributes:
        dtype: As 'float32'.
        dense: Its shape in the dense model.
        kept: By axis, the indices of the dense tensor that are left; see `keepk.graph.edits.Cut`.
        stride: Its strides, if they are not those of a contiguous tensor.
        persistent: Whether it is in the model's state_dict.
    """

    dtype: str
    dense: tuple[int, ...]
    kept: dict[int, Indices]
    stride: tuple[int, ...] | None
    persistent: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape now."""
        return tuple(self.kept[dim].shape[-1] if dim in self.kept else size for dim, size in enumerate(self.dense))


@dataclass(frozen=True)
class Description:
    """A model.

    Attributes:
        modules: The class names of the dense model, by path.
        tensors: Every parameter and buffer under its first name.
        ties: By each further name of a tensor, the first one.
        settings: Attributes that were set; `old` is the value in the dense model.
        selections: By path of a BatchNorm, the channels that it reads.
        headwise: The attentions that lost heads.
        certificate: By space of a run, its kind, the units in the beginning, how many were asked for and are kept.
        masked: By space, where its channels are that are masked and were not removed; see `record_of`.
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
        """The hash of the dense architecture: classes by path; names, shapes, dtypes and ties of what is persistent."""
        tensors = {name: [it.dtype, it.dense] for name, it in self.tensors.items() if it.persistent}
        text = json.dumps([self.modules, tensors, self.ties], sort_keys=True)
        return sha256(text.encode("ascii")).hexdigest()


def describe(model: nn.Module) -> Description:
    """A model and the record of what was done to it; refused if the two do not agree."""
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
        # A copy inside other wrappers has other names.
        masked={space: places for space, places in masked_places(model).items() if set(places) <= set(tensors)},
    )


def dense_value(module: nn.Module, setting: Setting) -> Any:
    """What a module has where a setting is going to be made; None if there is no such place."""
    try:
        return read_attribute(module, setting)
    except (AttributeError, LookupError, TypeError):
        return None


def _refuse_records_of_parts(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if path and ATTRIBUTE in module.__dict__ and was_cut(module):
            raise FileError(
                f"model {type(model).__name__}: its part {path!r} was shrunk by itself, so the whole has no record of "
                f"it. Save and load that part: model.get_submodule({path!r})."
            )


def _refuse_parts_of_larger(modules: Mapping[str, nn.Module], cut: Mapping[str, Any]) -> None:
    known = {name.rpartition(".")[0] for name in cut}
    for path, module in modules.items():
        if PART in module.__dict__ and path not in known:
            raise FileError(
                f"module {path or type(module).__name__!r}: was cut as a part of a larger model, which has the record "
                f"of it. Save that model; keepk.load gives it back, and the part with it."
            )


def _refuse_removed_parametrizations(modules: Mapping[str, nn.Module], cut: Mapping[str, Any]) -> None:
    for name in cut:
        path, parametrized, rest = name.partition(".parametrizations.")
        attribute = rest.partition(".")[0]
        if parametrized and f"{path}.parametrizations" not in modules and hasattr(modules.get(path), attribute):
            raise FileError(
                f"module {path!r}: its parametrization of {attribute!r} was removed after the model was shrunk, so the "
                f"record does not fit. Remove parametrizations before the first cut."
            )


def _dense_class(module: nn.Module) -> str:
    swapped = isinstance(module, HeadwiseAttention) or hasattr(type(module), "reads_selection")
    return type(module).__mro__[1 if swapped else 0].__name__


def _entries(model: nn.Module, cut: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    passing = set(_not_persistent(model))
    for name, tensor, _ in named_tensors(model):
        if reason := unpackable(tensor):
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
            f"model was shrunk. Replace layers before keepk.shrink, in the model's own constructor."
        )
    return entry


def _not_persistent(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            yield f"{path}.{name}" if path else name


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
                    f"Leave sizes of a shrunk model alone."
                )
            yield setting


def setting_of(path: str, key: str, value: Mapping[str, Any]) -> Setting:
    """From a record: 'normalized_shape.0' is the first entry of a tuple, 'config.heads' a value in an object."""
    attribute, _, item = key.rpartition(".")
    if not item.isdecimal():
        attribute, item = key, ""
    return Setting(path, attribute, int(item) if item else None, value["dense"], value["now"])
