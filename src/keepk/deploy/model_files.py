"""`save` and `load`: a model as ``model.safetensors`` and ``arch.json``. Nothing is ever pickled or unpickled."""

import os
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from keepk.cut.certificate import certificate_of, recounted, revived_channels, untrue_weights
from keepk.cut.changes import forget_compiled
from keepk.cut.holders import refuse_holders
from keepk.cut.tensors import sharded
from keepk.cut.verify import refuse_unfit
from keepk.deploy.arch_json import dense_from, from_document, to_document
from keepk.deploy.description import describe
from keepk.deploy.folder import read_folder, write_folder
from keepk.deploy.replay import edits_of, refuse_other_model, refuse_other_sizes, refuse_shrunk, replay, unpacked
from keepk.deploy.sizes import refuse_impossible, widths_of_norms
from keepk.errors import FileError, ShrinkError
from keepk.graph.edits import Edits
from keepk.graph.given import no_model
from keepk.graph.layers import SELECTED
from keepk.graph.trace import trace
from keepk.graph.tracer import named_tensors
from keepk.graph.wrappers import unwrap
from keepk.run.files import place
from keepk.run.packing import pack
from keepk.run.parties import live_pruner
from keepk.run.watch import told_untrue

Model = TypeVar("Model", bound=nn.Module)


def save(model: nn.Module, path: str | os.PathLike[str], *, certificate: bool = True) -> None:
    """Write a model into the folder `path`: its values, and what was cut from it since it was built.

    A kill at any moment leaves the old files or the new ones. The same model gives the same bytes. A model with more
    units than its last event kept, because pruned ones came back, is refused: its certificate would not be true.

    Processes that save into one folder take turns, and the last one's model stays; ranks that save the same model all
    succeed. On a file system without locks the folder also keeps the values under a separate name, to which
    ``model.safetensors`` is a link.

    Args:
        model: Shrunk any number of times, or never.
        path: The folder; it is made if it is missing.
        certificate: Whether to write what the model's runs were asked for and kept; False for a model that was trained
            on without masks, on purpose.

    Examples:
        >>> import keepk, tempfile
        >>> def build():
        ...     return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
        >>> net = build()
        >>> edits = keepk.shrink(net, keepk.trace(net, torch.zeros(2, 8)), [0, 5])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(net, folder)
        ...     loaded = load(folder, build())
        >>> torch.equal(loaded(torch.ones(2, 8)), net(torch.ones(2, 8)))
        True
    """
    order = "model, path"
    inner, folder = _user_module(model, "save", order), place(path, "save", order, FileError)
    _refuse_extra_state(inner)
    _refuse_meta(inner, "Materialize the model first.")
    if certificate:
        _refuse_untrue(inner)
    description = describe(inner)
    if certificate:
        pruner = live_pruner(inner)
        description = replace(description, certificate=recounted(inner, pruner.plan if pruner else ()))
    else:
        description = replace(description, certificate={}, masked={})
    write_folder(folder, to_document(description), dict(_packed(inner)))


def load(path: str | os.PathLike[str], model: Model, *, example: Any = None) -> Model:
    """Make a freshly built model the one that was saved in the folder `path`, and return it.

    It is cut as the saved one was and filled with its values. Parameter objects, devices, `requires_grad` and train or
    eval mode stay. Everything is checked first: if anything is refused, the model is as it was. Nothing of the folder
    is trusted: whatever its files say, only tensors and sizes that follow a cut of this very model can change.

    Args:
        path: A folder that `save` wrote.
        model: As the user's own constructor makes it, of the dtype of the saved one; on any device that holds values.
        example: An input of forward, as for `trace`. With it, the model is traced and its forward replayed at the saved
            sizes on a copy without weights, so that code that was edited since (a ``.squeeze()``, a branch on a width)
            is found before anything changes. Without it, only the sizes of tensors and attributes are checked.
    """
    order = "path, model"
    inner, folder = _user_module(model, "load", order), place(path, "load", order, FileError)
    document, stored = read_folder(folder)
    try:
        refuse_shrunk(inner)
        _refuse_extra_state(inner)
        _refuse_meta(inner, "Build the model on the CPU, or call model.to_empty(device=...) and tie its ties again.")
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
    with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode could not be trained
        refuse_holders(model, edits_of(saved))
        replay(inner, saved, given, values)
    forget_compiled(model)
    return model


def _refuse_unfit(model: nn.Module, example: Any, edits: Edits) -> None:
    """Refuse saved sizes at which forward would not do what it does at the dense ones."""
    graph = trace(model, example, train_mode="accept", value_branches="accept")
    refuse_unfit(model, graph, replace(edits, units=graph.lost(edits.cuts)), "load")


def _refuse_untrue(model: nn.Module) -> None:
    """Refuse counts that are not true; warn of a model whose Pruner has not pruned anything yet."""
    pruner, untrue, kept_by = live_pruner(model), untrue_weights(model), certificate_of(model)
    for space, back in revived_channels(model).items():
        if pruner is not None and space in pruner.plan:
            continue
        if back is None:
            raise FileError(
                f"save: space {space!r}: {kept_by[space]['masked']:,} of its channels are masked and were not removed, "
                f"and nothing tells which of the model's parameters were zero for that, so that the "
                f"{kept_by[space]['kept']:,} that it kept cannot be counted. Save while its Pruner is open, or have it "
                f'remove them (shrink="each"). To save without the counts: keepk.save(model, path, certificate=False).'
            )
        if back:
            untrue[space] = (kept_by[space]["kept"], kept_by[space]["kept"] + back)
    if pruner is not None:
        untrue |= pruner.untrue_counts()
    for space, (kept, found) in untrue.items():
        raise FileError(
            f"save: {told_untrue(space, kept, found)} Without the Pruner, make one with the same space and call its "
            f"step(). To save the model as it is, without the counts: keepk.save(model, path, certificate=False)."
        )
    if pruner is not None:
        pruner.warn_of_save_before_step()


def _user_module(model: object, verb: str, order: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        swapped = "" if isinstance(model, type) else f" The order is {order}."
        raise FileError(f"{verb}: {no_model(model)}{swapped}")
    if found := sharded(model):
        raise FileError(
            f"{verb}: {found} is sharded over processes, and each of them sees only its own part. {verb.capitalize()} "
            f"a plain model: shard after keepk.load, and gather the full state_dict into one before keepk.save."
        )
    return unwrap(model)


def _refuse_extra_state(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise FileError(
                f"module {path!r} ({type(module).__name__}) keeps extra state, which may be any object. "
                f"Keep what has to be saved in buffers."
            )
    _refuse_other_state(model)


def _refuse_other_state(model: nn.Module) -> None:
    """Refuse a model whose state_dict has more than its parameters and buffers, which is all that a file keeps.

    Quantised modules pack their weights so, and modules may write additional entries. An entry that is a parameter or
    buffer under another name, as hooks rename them, loses nothing.
    """
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    names, tensors = {name for name, _ in named}, {id(tensor) for _, tensor in named}
    state = model.state_dict(keep_vars=True)  # with the tensors themselves, not detached ones
    # The channels that a BatchNorm selects are in the file, too.
    tensors |= {id(getattr(module, SELECTED)) for module in model.modules() if hasattr(module, "reads_selection")}
    lost = [key for key, value in state.items() if key not in names and id(value) not in tensors]
    if lost:
        path = max((it for it, _ in model.named_modules() if lost[0].startswith(f"{it}." if it else "")), key=len)
        keys = [repr(key) for key in lost if key.startswith(f"{path}." if path else "")]
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        raise FileError(
            f"module {path!r} ({type(model.get_submodule(path)).__name__}) keeps state that is neither a parameter nor "
            f"a buffer and would be lost: {', '.join(keys[:5])}{more}. Keep it in buffers. Of a quantised model save "
            f"the float one, and quantise it after keepk.load; or save model.state_dict() with torch.save."
        )


def _refuse_meta(model: nn.Module, remedy: str) -> None:
    for name, tensor, _ in named_tensors(model):
        if tensor.is_meta and not is_lazy(tensor):
            raise FileError(f"tensor {name!r} is a meta tensor, which has no values. {remedy}")


def _packed(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Every tensor in its own shape, whatever its strides are, so that others can read the file too."""
    return [(name, pack(tensor.detach().contiguous())[0]) for name, tensor, _ in named_tensors(model)]
