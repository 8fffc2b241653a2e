"""`shrink_files`: prune a checkpoint on disk without ever having the model in memory.

The model is built on the meta device, where its tensors have shapes and no values, and a `Pruner` prunes it there as it
would prune any other. A parameter gets its values from the files at the moment that a metric asks for them
(`keepk.model.values`), one tensor at a time. The files are then read a second time, and each tensor is cut and written
before the next one is read:

1. Open the shards and compare names and shapes with the meta model (`_Files`).
2. Trace, score and cut the meta model. Scores are kept, so each tensor is read once however often the Pruner ranks.
3. Find out whether another config describes the cut model (`keepk.integrations.pretrained.described_by_config`). The
   outputs cannot be compared, because a meta model has no values. Instead, a model that the new config builds has to
   run the same operations with the same numbers.
4. Write the shards, config and other files into a folder of their own beside the target, and rename it.
"""

import copy
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.record import record_of
from keepk.deploy.arch import Description, describe, refuse_extra_state
from keepk.deploy.arch_json import to_document
from keepk.deploy.folder import INDEX as ARCH
from keepk.deploy.folder import VALUES, index_text
from keepk.errors import FileError, SpaceError
from keepk.graph.probe.verify import same_operations
from keepk.integrations.pretrained import dense_config, described_by_config, random_inputs
from keepk.metrics.channels import channel_scores, default_metric
from keepk.metrics.layers import Layer, Needs, Ranks, metric_name, traits_of
from keepk.model.edits import Cut, cut_tensor
from keepk.model.values import forget, keep_value_beside, store
from keepk.plan.names import shortened, shown
from keepk.plan.spaces import ChannelSpace
from keepk.run.pruner import Pruner
from keepk.storage.files import made, own_folder, place, sync_folder
from keepk.storage.shards import INDEX, Shards, StoredTensor, open_shards, write_shard

CONFIG = "config.json"
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Files with weights in other formats, or with the state of a training run, which would not fit the pruned model.
OF_DENSE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".npz",
            ".tflite", ".ot", ".index.json")  # fmt: skip


@dataclass(frozen=True)
class ShrunkFiles:
    """The result of `keepk.shrink_files`. It prints as a few lines.

    Attributes:
        folder: The new folder.
        kept: By space, the number of channels that were kept.
        parameters: The number of parameters before and after.
        config: By name of a number in the config, its old and its new value.
        reason: Why the folder has an ``arch.json`` and is loaded by keepk; empty if plain ``from_pretrained`` loads it.
        bytes_read: The bytes of tensors that were read.
        bytes_written: The bytes of tensors that were written.
        left_out: Files of the source that were not copied: those with weights of the dense model in other formats,
            hidden files and folders, links to folders or to nothing, and whatever else is not an ordinary file.
    """

    folder: Path
    kept: Mapping[str, int]
    parameters: tuple[int, int]
    config: Mapping[str, tuple[int | None, int]]
    reason: str
    bytes_read: int
    bytes_written: int
    left_out: tuple[str, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether plain ``from_pretrained`` loads the folder, with nothing of keepk installed."""
        return not self.reason

    def __str__(self) -> str:
        before, after = self.parameters
        kept = ", ".join(f"{name} {count:,}" for name, count in self.kept.items())
        if self.reason:
            how = f"keepk loads it, because {self.reason}"
        else:
            changed = ", ".join(f"{name} {old} -> {new}" for name, (old, new) in self.config.items())
            how = f"plain from_pretrained loads it; {changed or 'the config did not change'}"
        lines = [f"{self.folder}: {after:,} of {before:,} parameters; kept {kept}", how]
        lines += [f"not copied: {', '.join(self.left_out)}"] if self.left_out else []
        return "\n".join(lines)


def shrink_files(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    spaces: ChannelSpace | Sequence[ChannelSpace],
    *,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    example: Any = None,
    macs: float | None = None,
    parameters: float | None = None,
) -> ShrunkFiles:
    """Prune the channels of a checkpoint on disk, tensor by tensor, into a new folder.

    The model never is in memory as a whole: only the largest tensor and its scores are. The result has the same tensors
    as pruning the loaded model with the same spaces. Where every layer keeps the same widths (``per_layer=True`` makes
    it so) the new ``config.json`` describes them, and plain ``from_pretrained`` loads the folder. Otherwise the folder
    has an ``arch.json`` too, for `keepk.from_pretrained` or `keepk.load`.

    Args:
        source: A folder with ``model.safetensors``, or with shards and ``model.safetensors.index.json``.
        target: The new folder, which must not exist. Tokenizers and other files are copied into it, except for those in
            `ShrunkFiles.left_out`.
        spaces: What to keep: one or more of ``keepk.channels(...)``, with a metric that reads weights only.
        model: A function that builds the model, called on the meta device, or a model that is there already. None
            builds the model of transformers that ``config.json`` names.
        example: An input of forward, as for `keepk.trace`. None uses token ids or images, if the model of transformers
            takes these.
        macs: One budget for all spaces without numbers of their own, as for `keepk.Pruner`.
        parameters: The same for the number of parameters.

    Returns:
        What was kept and written.

    Raises:
        FileError: The source has no safetensors, shards are missing, an index disagrees with them, the tensors are not
            those of the model, the checkpoint is quantised, or the target exists.
        SpaceError: A space is not one of channels, needs more than weights, or cannot be met.
        TraceError: The model cannot be traced without its weights.

    >>> import keepk, tempfile
    >>> def build():
    ...     return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     keepk.save(build(), f"{folder}/dense")
    ...     Path(folder, "dense", "arch.json").unlink()  # as if another program had written model.safetensors
    ...     space = keepk.channels("0", keep=4)
    ...     found = shrink_files(f"{folder}/dense", f"{folder}/small", space, model=build, example=torch.zeros(2, 8))
    ...     small = keepk.load(build(), f"{folder}/small")
    >>> found.kept, found.parameters, small[0]
    ({'0': 4}, (75, 51), Linear(in_features=8, out_features=4, bias=True))
    """
    folder, into = _places(source, target)
    listed = _checked_spaces(spaces)
    config = _config_of(folder)
    with open_shards(folder) as shards:
        net = _empty_model(folder, model)
        files = _Files(folder, shards, net)
        before = sum(parameter.numel() for parameter in net.parameters())
        given = _example(net, example)
        kept = _pruned(net, files, listed, given, {"macs": macs, "parameters": parameters})
        described = _Described.of(net, given) if config else _Described(None, {}, f"there is no {CONFIG}")
        try:
            with made(into.parent), own_folder(into) as draft:
                written = files.write(draft, described)
                left_out = _copy_others(folder, draft, shards)
                shards.refuse_changed()
                _publish(draft, into)
        except OSError as problem:
            raise FileError(
                f"{into}: cannot be written ({problem}). Choose a folder on a disk with room for the pruned model. "
                f"Nothing was left there."
            ) from problem
        return ShrunkFiles(
            into,
            kept,
            (before, sum(parameter.numel() for parameter in net.parameters())),
            described.changes,
            described.reason,
            shards.bytes_read,
            written,
            tuple(left_out),
        )


# Arguments ------------------------------------------------------------------------------------------------------------


def _places(source: Any, target: Any) -> tuple[Path, Path]:
    order = "source, target"
    folder, into = place(source, "shrink_files", order, FileError), place(target, "shrink_files", order, FileError)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FileError(f"shrink_files: the source {folder} {what}. Pass the folder of a checkpoint.")
    real, new = folder.resolve(), into.resolve()
    if real == new or real in new.parents:
        raise FileError(
            f"shrink_files: the target {into} is {'the source' if real == new else 'inside the source'}. The source "
            f"does not change; pass a new folder elsewhere."
        )
    if os.path.lexists(into):
        raise FileError(f"shrink_files: the target {into} exists. Pass a new folder, or delete it first.")
    return folder, into


def _checked_spaces(spaces: Any) -> list[ChannelSpace]:
    """The spaces, each with a metric that reads every tensor once."""
    listed = list(spaces) if isinstance(spaces, Sequence) else [spaces]
    for space in listed:
        if not isinstance(space, ChannelSpace):
            raise SpaceError(f"shrink_files: got {shown(space)} as a space. Pass one or more of keepk.channels(...).")
        needs = traits_of(space.metric).needs or () if space.metric is not None else ()
        if other := [it for it in needs if it != "weights"]:
            raise SpaceError(
                f"space {space.name!r}: metric={shown(space.metric)} needs {other[0]}, which files do not have. Pass a "
                f"metric that reads weights, such as keepk.metrics.product, or omit it."
            )
    return [replace(it, metric=_Once(it.metric)) for it in listed]


class _Once:
    """A metric that scores each layer once, because the Pruner ranks several times and each time reads the files."""

    over: ClassVar = "space"  # which makes the Pruner call `scores`

    def __init__(self, metric: Callable[..., Any] | None) -> None:
        self._metric, self._known = metric, dict[bytes, list[Tensor]]()
        self.needs: tuple[Needs, ...] | None = ("weights",) if metric is None else traits_of(metric).needs
        self.ranks: tuple[Ranks, ...] = ("channels",) if metric is None else traits_of(metric).ranks
        if metric is not None:
            self.__name__ = metric_name(metric)
            # Passed uncalled, it is refused by the Pruner, whose error shows how to call it.
            if (call := getattr(metric, "example_call", None)) is not None:
                self.example_call = call

    def __repr__(self) -> str:
        return repr(self._metric)

    def __call__(self, layer: Layer) -> Tensor:
        return self.scores([layer])[0]

    def scores(self, layers: Sequence[Layer]) -> list[Tensor]:
        """The scores of all layers; those that are known by their units are not read again."""
        key = np.concatenate([layer.units for layer in layers]).tobytes()
        if key not in self._known:
            metric = self._metric or default_metric(layers)
            relative = traits_of(metric).over is not None
            # A metric that is not relative to other layers takes them one by one.
            parts = [layers] if relative else [[layer] for layer in layers]
            found = np.concatenate([channel_scores(metric, part) for part in parts])
            ends = np.cumsum([len(layer) for layer in layers])[:-1]
            self._known[key] = [torch.from_numpy(it) for it in np.split(found, ends)]
        return [it.clone() for it in self._known[key]]


def _config_of(folder: Path) -> dict[str, Any]:
    """The config of a model of transformers; empty without one."""
    if (folder / ARCH).is_file():
        raise FileError(
            f"{folder}: has an {ARCH}: it was pruned before, to widths that no config describes. Load it with "
            f"keepk.from_pretrained or keepk.load and prune it in memory, or prune the dense checkpoint."
        )
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
        quantised = found.get("quantization_config")
    except (ValueError, AttributeError, RecursionError) as error:
        raise FileError(f"{path}: is not a config of transformers ({error}). Download it again.") from error
    if quantised:
        raise FileError(
            f"{path}: the checkpoint is quantised ({shown(quantised.get('quant_method', 'quantization_config'))}), so "
            f"its weights can be neither ranked nor cut. Prune the checkpoint that was quantised, then quantise the "
            f"result."
        )
    return dict(found)


def _empty_model(folder: Path, given: Any) -> nn.Module:
    """The model on the meta device."""
    if given is None:
        if not (folder / CONFIG).is_file():
            raise FileError(f"{folder}: has no {CONFIG}. Pass a function that builds the model: model=make_model.")
        # Imported here: `import keepk` must not import transformers.
        from keepk.integrations.transformers import empty_model  # noqa: PLC0415 - needs transformers

        return empty_model(folder)
    if isinstance(given, nn.Module):
        net = given
    elif callable(given):
        with torch.device("meta"):
            net = given()
    else:
        raise FileError(f"shrink_files: model={shown(given)} is neither a model nor a function that builds one.")
    if not isinstance(net, nn.Module):
        raise FileError(f"shrink_files: model={shown(given)} returned {type(net).__name__}. Return a torch.nn.Module.")
    for name, parameter in net.named_parameters():
        if not parameter.is_meta:
            raise FileError(
                f"shrink_files: parameter {name!r} of model= is on {parameter.device}. The model is only built to be "
                f"traced, so pass a function that builds it; it is called on the meta device."
            )
    return copy.deepcopy(net).eval()  # a function may return a model of the user's, too


def _example(model: nn.Module, given: Any) -> Any:
    if given is not None:
        return given
    found = random_inputs(model) if hasattr(model, "config") else None
    if found is None:
        raise FileError(
            f"shrink_files: the inputs of {type(model).__name__} are not known. Pass an input of its forward with a "
            f"batch of two: example=..."
        )
    if "input_ids" in found:
        found |= {"attention_mask": torch.ones_like(found["input_ids"])}  # without one, forward looks for padding
    # A cache would be part of the output, and pin all heads.
    return found | {"use_cache": False} if getattr(model, "can_generate", bool)() else found


def _pruned(
    model: nn.Module, files: "_Files", spaces: Sequence[ChannelSpace], example: Any, budget: Mapping[str, Any]
) -> dict[str, int]:
    """Cut the meta model by scores from the files; returns the numbers of channels kept."""
    files.attach()
    try:
        with Pruner(model, spaces, example=example, **budget) as pruner:
            if pruner.epochs != 1:
                raise SpaceError(
                    f"shrink_files: the spaces have plans of {pruner.epochs} events, and there is no training between "
                    f"them. Leave out schedule=."
                )
            pruner.step()
            return dict(pruner.kept)
    finally:
        files.detach()


# Config ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Described:
    """The config of the new folder.

    Attributes:
        config: The config; None without transformers.
        changes: By name of a number in it, the old and the new value.
        reason: Why the config alone does not describe the model; empty if it does.
    """

    config: Any
    changes: Mapping[str, tuple[int | None, int]]
    reason: str

    @staticmethod
    def of(model: Any, example: Any) -> "_Described":
        """The config that describes a cut meta model, or the dense one and the reason."""
        if not hasattr(model, "config") or not hasattr(model.config, "save_pretrained"):
            return _Described(None, {}, f"{type(model).__name__} is not a model of transformers")
        candidates, reason = described_by_config(model)
        for candidate in candidates:
            try:
                with torch.device("meta"):  # in the dtype of the config, as from_pretrained would
                    built = type(model)._from_config(candidate.config(), dtype=model.dtype).eval()
                if not candidate.changes or same_operations(model, built, example):
                    return _Described(_named(candidate.config(), model), candidate.told, "")
                reason = "the config that describes its sizes computes something else"
            except MemoryError:
                raise
            except Exception as error:  # of any class: the model has run this example before, so the config is wrong
                reason = f"the forward of the config that describes its sizes fails ({shortened(str(error))})"
        return _Described(_named(dense_config(model), model), {}, reason)

    def save(self, folder: Path, source: Path) -> None:
        """Write the config, or copy the one of a model that only its own code can build."""
        if self.config is not None:
            self.config.save_pretrained(folder)
        elif (source / CONFIG).is_file():
            shutil.copyfile(source / CONFIG, folder / CONFIG)


def _named(config: Any, model: nn.Module) -> Any:
    """A config that names a class to build it with."""
    config.architectures = config.architectures or [type(model).__name__]
    return config


# Files ----------------------------------------------------------------------------------------------------------------


class _Files:
    """The tensors of a checkpoint, matched with those of a meta model."""

    def __init__(self, folder: Path, shards: Shards, model: nn.Module) -> None:
        self._folder, self._shards, self._model = folder, shards, model
        refuse_extra_state(model)
        # By every name of a tensor in the state_dict, the name under which the trace and the record know it.
        first, tensors = dict[int, str](), dict[str, Tensor]()
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            first.setdefault(id(tensor), name)
            tensors[name] = tensor
        kept = model.state_dict(keep_vars=True)
        self._first = {name: first[id(tensors[name])] for name in tensors if name in kept}
        self._tensors = {name: tensors[name] for name in self._first}
        self._model_names = self._renamed()
        self._stored = dict[str, str]()  # by first name, the name in the files
        self._match()

    def attach(self) -> None:
        """Let the parameters of the model read their values from the files."""
        for name, stored in self._stored.items():
            tensor = self._tensors[name]
            store(tensor, partial(self._shards.read, stored))
            if not tensor.is_floating_point():  # counters and tables, which forward may read
                keep_value_beside(tensor, self._shards.read(stored))

    def detach(self) -> None:
        """Undo `attach`: the values in the files do not fit the cut model."""
        forget(self._tensors.values())

    def write(self, draft: Path, described: _Described) -> int:
        """Write the cut tensors and what describes them; returns the number of bytes of the tensors."""
        if described.reason:
            return self._write_described(draft, described)
        described.save(draft, self._folder)
        written = [self._cut_entry(name) for name in self._shards.tensors]
        for file, metadata in self._shards.metadata.items():
            mine = {it: self._bytes_of(it.name) for it in written if it.file == file}
            write_shard(draft / file, mine, metadata)
        total = sum(it.nbytes for it in written)
        if self._shards.index is not None:
            self._write_index(draft / INDEX, total, sum(int(np.prod(it.shape)) for it in written))
        return total

    def _write_index(self, path: Path, total: int, count: int) -> None:
        index = copy.deepcopy(self._shards.index)
        assert index is not None
        sizes = index.get("metadata")
        now = {"total_size": total, "total_parameters": count}
        if isinstance(sizes, dict):
            sizes.update({key: value for key, value in now.items() if key in sizes})
        path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def _write_described(self, draft: Path, described: _Described) -> int:
        """Write the folder that `keepk.save` would write, with one file for all tensors."""
        description = self._description()
        for name, entry in description.tensors.items():
            dtype = str(self._shards.tensors[self._stored[name]].dtype).removeprefix("torch.")
            if dtype != entry.dtype:
                raise FileError(
                    f"{self._folder}: tensor {name!r} is {dtype} in the files and {entry.dtype} in the model, and "
                    f"{ARCH}, which is needed because {described.reason}, describes the model. Build the model in the "
                    f"dtype of its files, with model=."
                )
        described.save(draft, self._folder)
        entries = [self._cut_entry(self._stored[name], VALUES, name) for name in description.tensors]
        size, digest = write_shard(draft / VALUES, {it: self._bytes_of(self._stored[it.name]) for it in entries}, {})
        named = {"file": VALUES, "size": size, "sha256": digest}
        (draft / ARCH).write_text(index_text(named, to_document(description)), encoding="ascii")
        return sum(it.nbytes for it in entries)

    def _description(self) -> Description:
        """The description of the cut model, without the buffers that its constructor computes."""
        found = describe(self._model)
        for name, entry in found.tensors.items():
            if not entry.persistent and entry.kept:
                raise FileError(
                    f"{self._folder}: buffer {name!r} would be cut and is not in the files, so its values are not "
                    f"known. Prune the model in memory and save it with keepk.save."
                )
        return replace(found, tensors={name: it for name, it in found.tensors.items() if it.persistent})

    def _cut_entry(self, name: str, file: str | None = None, written_as: str | None = None) -> StoredTensor:
        """A tensor of the files as it will be written: in the shape that it has in the cut model."""
        stored = self._shards.tensors[name]
        own = self._tensors.get(self._model_names.get(name, ""))
        shape = stored.shape if own is None else tuple(own.shape)
        return replace(stored, name=written_as or name, file=file or stored.file, shape=shape, start=-1)

    def _bytes_of(self, name: str) -> Iterator[Any]:
        """The bytes of a tensor of the files after the cut."""
        first = self._first.get(self._model_names.get(name, ""), "")
        entry = record_of(self._model)["tensors"].get(first)
        if entry is None:
            yield from self._shards.pieces(name)
            return
        kept = {int(axis): np.asarray(indices, np.int64) for axis, indices in entry["kept"].items()}
        cut = Cut(first, kept, tuple(entry["shape"]), tuple(self._tensors[first].shape))
        yield cut_tensor(self._shards.read(name), cut).contiguous().reshape(-1).view(torch.uint8).numpy().data

    def _renamed(self) -> dict[str, str]:
        """By name in the files, the name in the model; without tensors that the model does not have."""
        self._merged = list[str]()  # names of tensors that have no counterpart of their own in the model
        found = {name: name for name in self._shards.tensors}
        if hasattr(self._model, "base_model_prefix"):
            from keepk.integrations.transformers import names_in_model  # noqa: PLC0415 - as above

            found = names_in_model(self._model, list(found))
            self._merged = [name for name in self._shards.tensors if name not in found]
        return {name: own for name, own in found.items() if own in self._first}

    def _match(self) -> None:
        """Refuse files that do not have exactly the tensors of the model."""
        if self._merged:
            raise FileError(
                f"{self._folder}: transformers merges {len(self._merged)} tensors, such as {self._merged[0]!r}, into "
                f"larger ones of {type(self._model).__name__} (the experts of a mixture are stored one by one), which "
                f"shrink_files does not support. Load the model with from_pretrained and prune it in memory."
            )
        ignored = getattr(self._model, "_keys_to_ignore_on_load_unexpected", None) or ()
        strange = list[str]()
        for name, stored in self._shards.tensors.items():
            own = self._model_names.get(name)
            if own is None:
                strange += [] if any(re.search(pattern, name) for pattern in ignored) else [name]
                continue
            first, tensor = self._first[own], self._tensors[own]
            if tuple(tensor.shape) != stored.shape:
                raise FileError(
                    f"{self._folder}: tensor {name!r} has shape {stored.shape} in {stored.file} and "
                    f"{tuple(tensor.shape)} in the model. {self._remedy}"
                )
            if isinstance(tensor, nn.Parameter) and stored.dtype not in FLOATS:
                raise FileError(
                    f"{self._folder}: parameter {name!r} is {stored.dtype} in {stored.file}: the checkpoint is "
                    f"quantised. Prune the checkpoint that was quantised, then quantise the result."
                )
            if first in self._stored and not self._shards.same(self._stored[first], name):
                raise FileError(
                    f"{self._folder}: tensors {self._stored[first]!r} and {name!r} are tied in the model, and have "
                    f"different values in the files. {self._remedy}"
                )
            self._stored.setdefault(first, name)
        missing = [name for name in self._tensors if self._first[name] not in self._stored]
        for names, what in ((missing, "the model has and the files lack"), (strange, "the files have and it has not")):
            if names:
                raise FileError(
                    f"{self._folder}: {type(self._model).__name__} does not fit: tensor {names[0]!r} is one of "
                    f"{len(names)} that {what}. {self._remedy}"
                )

    @property
    def _remedy(self) -> str:
        if hasattr(self._model, "config"):
            return (
                "Load it with transformers and save it with save_pretrained: that converts checkpoints of other "
                "programs and versions."
            )
        return "Pass the model whose state_dict was saved: model=make_model."


def _copy_others(source: Path, draft: Path, shards: Shards) -> list[str]:
    """Copy ordinary files but weights, and folders; returns the names of whatever else there is."""
    known, left_out, waiting = {*shards.metadata, INDEX, CONFIG}, list[str](), sorted(source.iterdir())
    while waiting:
        path = waiting.pop(0)
        name = path.relative_to(source)
        if str(name) in known:
            continue
        is_folder, is_hidden = path.is_dir() and not path.is_symlink(), path.name.startswith(".")
        if is_hidden or not (is_folder or path.is_file()) or (not is_folder and path.name.endswith(OF_DENSE)):
            left_out.append(str(name))
        elif is_folder:
            (draft / name).mkdir()
            waiting = sorted(path.iterdir()) + waiting
        else:
            shutil.copyfile(path, draft / name)
    return left_out


def _publish(draft: Path, target: Path) -> None:
    """Give the finished folder its final name."""
    sync_folder(draft)
    os.rename(draft, target)  # noqa: PTH104 - unlike Path.rename on some systems, never replaces a folder with files
    sync_folder(target.parent)
