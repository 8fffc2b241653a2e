"""`save`: write a model as ``model.safetensors`` and ``arch.json``, without pickle; see `keepk.deploy.load`."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from keepk.cut.record import certificate_of, recounted, revived_channels, untrue_weights
from keepk.deploy.arch import Description, Entry, describe, refuse_extra_state, refuse_meta, user_module
from keepk.deploy.arch_json import to_document
from keepk.deploy.folder import write_folder
from keepk.errors import FileError
from keepk.model.names import named_tensors, sharded
from keepk.run.checks import live_pruner, pruners_around
from keepk.run.warnings import untrue_message
from keepk.storage.codec import dtype_name, pack
from keepk.storage.files import place
from keepk.storage.sparse import as_half, can_be_compacted, compacted

CLEARLY = 0.75  # compact="auto": at most this share of the bytes of ordinary tensors,
BLOCK = 4096  # and this much less, since file systems allocate blocks of that size
NAMED = 100  # about the bytes that a further name takes in the header of a file


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    certificate: bool = True,
    compact: Literal["auto"] | bool = "auto",
    half: bool = False,
) -> None:
    """Write a model into the folder `path`: its values, and everything that was cut from it since it was built.

    If the process is killed, the folder contains either the old files or the new ones. Saving the same model twice
    writes the same bytes. A model with more units than its last event kept, because pruned ones are no longer zero, is
    refused: its certificate would be wrong.

    Processes that save into one folder take turns, and the last model written stays; all ranks of a run may save the
    same model. On a file system without locks, the values also have a second name in the folder, to which
    ``model.safetensors`` is a link.

    Args:
        model: Any model, shrunk any number of times or never.
        path: The folder; it is created if it does not exist.
        certificate: Whether to write how many units the model's runs were asked to keep and kept. Pass False for a
            model that was deliberately trained further without its masks.
        compact: Whether to store tensors with many zeros as their other values and the places of these, from which
            `keepk.load` restores every bit. True does so for each tensor that gets smaller, "auto" only if the file
            gets smaller by at least a quarter. False writes only ordinary tensors, which other readers of safetensors
            understand.
        half: Whether to round the values of compact float32 weights (tensors of two or more dims) to float16, which
            ``arch.json`` records. They are float32 again after `keepk.load`. Nothing is rounded by default.

    Raises:
        FileError: The folder cannot be written, the model has state that the files cannot represent, its counts are
            wrong, or a value is out of the range of float16. The contents of the folder are then unchanged.

    Examples:
        >>> import keepk, tempfile, torch
        >>> def build():
        ...     return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> net = build()
        >>> edits = keepk.shrink(net, keepk.trace(net, torch.zeros(2, 8)), [0, 5])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(net, folder)
        ...     loaded = keepk.load(build(), folder)
        >>> torch.equal(loaded(torch.ones(2, 8)), net(torch.ones(2, 8)))
        True
    """
    order = "model, path"
    inner, folder = user_module(model, "save", order), place(path, "save", order, FileError)
    _refuse_options(compact, half)
    refuse_extra_state(inner)
    refuse_meta(inner, "Materialize the model first.")
    if certificate:
        refuse_untrue(inner)
    description = describe(inner)
    if certificate:
        pruner = live_pruner(inner)
        description = replace(description, certificate=recounted(inner, pruner.spaces if pruner else ()))
    else:
        description = replace(description, certificate={}, masked={})
    # Always contiguous, so that other readers of safetensors get each tensor in its shape; arch.json has the strides.
    tensors = {name: pack(tensor.detach().contiguous())[0] for name, tensor, _ in named_tensors(inner)}
    if compact:
        description, tensors = _compacted(description, tensors, half=half, only_clearly=compact == "auto" and not half)
    write_folder(folder, to_document(description), tensors)


def _refuse_options(compact: object, half: object) -> None:
    if not isinstance(compact, bool) and compact != "auto":
        raise FileError(f'save: compact={compact!r}. Pass "auto", True or False.')
    if not isinstance(half, bool):
        raise FileError(f"save: half={half!r}. Pass True or False.")
    if half and compact is False:
        raise FileError(
            "save: half=True rounds the values of compact tensors, but compact=False stores none. Drop one."
        )


def _compacted(
    description: Description, tensors: Mapping[str, Tensor], *, half: bool, only_clearly: bool
) -> tuple[Description, dict[str, Tensor]]:
    """Replace each tensor by its values and their places where that is smaller.

    Args:
        description: The model's description.
        tensors: Its tensors as they would be stored otherwise.
        half: Whether to round weights to float16.
        only_clearly: Whether to leave everything as it is unless the file gets clearly smaller.

    Returns:
        The description and the tensors to be stored.
    """
    entries, stored = dict(description.tensors), dict(tensors)
    for name, tensor in tensors.items():
        entry, parts = _parts(name, entries[name], tensor, half=half)
        before, after = tensor.nbytes, sum(part.nbytes + NAMED for part in parts.values()) - NAMED
        named = {place: parts[part] for part, place in entry.names(name).items()}
        # A name that another tensor has would be ambiguous; such a tensor stays as it is.
        if entry.stored and after < before and not named.keys() & entries.keys():
            entries[name] = entry
            del stored[name]
            stored.update(named)
    before, after = (sum(tensor.nbytes for tensor in it.values()) for it in (tensors, stored))
    if only_clearly and (after > CLEARLY * before or before - after < BLOCK):
        return description, dict(tensors)
    return replace(description, tensors=entries), stored


def _parts(name: str, entry: Entry, tensor: Tensor, *, half: bool) -> tuple[Entry, dict[str, Tensor]]:
    """A tensor's parts and their description; the tensor itself if it cannot get smaller."""
    rounds = half and entry.dtype == "float32" and tensor.dim() >= 2
    # A buffer outside the state_dict is not compared with the user's model, so `load` could not trust its size.
    if not (entry.persistent and can_be_compacted(tensor)) or dtype_name(tensor.dtype) != entry.dtype:
        return entry, {"": tensor}
    # A bitmask takes at least 1/64 of a tensor. Counted on the tensor's device, to copy only tensors with zeros.
    if not rounds and int(tensor.count_nonzero()) > tensor.numel() * 63 // 64:
        return entry, {"": tensor}
    parts = compacted(tensor)
    if rounds:
        try:
            parts["values"] = as_half(parts["values"])
        except ValueError as error:
            raise FileError(f"save: tensor {name!r}: {error}. Save with half=False.") from error
    form = "gaps" if "gaps" in parts else "bitmask"
    return replace(entry, stored=form, values="float16" if rounds else None), parts


def refuse_untrue(model: nn.Module) -> None:
    """Refuse wrong counts; warn about a model whose Pruner has not pruned anything yet."""
    pruner, untrue, kept_by = live_pruner(model), untrue_weights(model), certificate_of(model)
    for space, back in revived_channels(model).items():
        # An open Pruner counts its own spaces, below, by its masks instead of by zeros.
        if pruner is not None and space in pruner.spaces:
            continue
        if back is None:
            raise FileError(
                f"save: space {space!r}: {kept_by[space]['masked']:,} of its channels were masked but not removed, and "
                f"the model has no record of which parameters were zeroed for them, so the "
                f"{kept_by[space]['kept']:,} channels that it kept cannot be counted. Save while its Pruner is open, "
                f'or have it remove the channels (shrink="each"). To save without the counts: keepk.save(model, path, '
                f"certificate=False)."
            )
        if back:
            untrue[space] = (kept_by[space]["kept"], kept_by[space]["kept"] + back)
    if pruner is not None:
        untrue |= pruner.untrue_counts()
    elif not sharded(model):
        # merge_and_unload() of peft adds adapters to pruned weights, and returns a part of the model that was pruned.
        for around in pruners_around(model):
            untrue |= {name: it for name, it in around.untrue_counts().items() if it[1] > it[0]}
    for space, (kept, found) in untrue.items():
        raise FileError(
            f"save: {untrue_message(space, kept, found)} If its Pruner is gone, make one with the same space and "
            f"call step(). To save the model as it is, without the counts: keepk.save(model, path, certificate=False)."
        )
    if pruner is not None:
        pruner.warn_of_save_before_step()
