"""`save`: write a model as ``model.safetensors`` and ``arch.json``, without pickle; see `keepk.deploy.load`."""

import os
from dataclasses import replace

from torch import nn

from keepk.cut.record import certificate_of, recounted, revived_channels, untrue_weights
from keepk.deploy.arch import describe, refuse_extra_state, refuse_meta, user_module
from keepk.deploy.arch_json import to_document
from keepk.deploy.folder import write_folder
from keepk.errors import FileError
from keepk.model.names import named_tensors
from keepk.run.checks import live_pruner
from keepk.run.warnings import untrue_message
from keepk.storage.codec import pack
from keepk.storage.files import place


def save(model: nn.Module, path: str | os.PathLike[str], *, certificate: bool = True) -> None:
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

    Raises:
        FileError: The folder cannot be written, the model has state that the files cannot represent, or its counts are
            wrong. The contents of the folder are then unchanged.

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
    write_folder(folder, to_document(description), tensors)


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
    for space, (kept, found) in untrue.items():
        raise FileError(
            f"save: {untrue_message(space, kept, found)} If its Pruner is gone, make one with the same space and "
            f"call step(). To save the model as it is, without the counts: keepk.save(model, path, certificate=False)."
        )
    if pruner is not None:
        pruner.warn_of_save_before_step()
