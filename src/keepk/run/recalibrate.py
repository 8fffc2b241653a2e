"""`recalibrate`: recompute BatchNorm statistics, which are out of date after a cut."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from keepk.errors import KeepkError
from keepk.model.torch_internals import BatchNormBase
from keepk.run.warnings import warn


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Recompute the running statistics of every BatchNorm, as plain means over batches.

    Right after channels are removed, running means and variances are still those of the larger network. Training
    updates them gradually; to evaluate immediately, recalibrate first. Each BatchNorm gets the mean over batches of the
    batch's mean and (unbiased) variance, as in `torch.optim.swa_utils.update_bn`, except that all other modules are in
    eval mode, so dropout is off. Weights do not change; modes and momenta are restored. If a forward pass fails, the
    old statistics are restored as well. A BatchNorm that no batch reaches, such as one of an auxiliary head that only
    runs in train mode, keeps its old statistics, and a warning names it.

    Args:
        model: The model, or a wrapper of it. Every BatchNorm that has running statistics is recalibrated.
        batches: Inputs of the model: tensors; tuples or lists whose first entry is the input, ``(inputs, targets)``;
            or dicts of keyword arguments. Tensors are moved to the model's device.

    Returns:
        The number of batches.

    Raises:
        KeepkError: The model has no BatchNorm with running statistics, `batches` is empty or a single batch, a batch
            has none of the forms above or no rows, a BatchNorm gets only one value per channel, its statistics would
            not be finite, or the model was made in inference mode and this is called outside of it.

    >>> model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout())
    >>> recalibrate(model, [torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [8.0]])])
    2
    >>> model[0].running_mean, model[0].running_var
    (tensor([3.5000]), tensor([5.]))
    """
    if not isinstance(model, nn.Module):
        raise KeepkError(f"recalibrate: model: got {type(model).__name__}. Pass an nn.Module.")
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise KeepkError(
            f"recalibrate: batches: got one {type(batches).__name__}. Pass a loader or a list of batches, such as "
            f"[inputs]."
        )
    norms = norms_with_statistics(model)
    if not norms:
        raise KeepkError(
            "recalibrate: the model has no BatchNorm with running statistics, so there is nothing to compute. "
            "Remove the call."
        )
    return recomputed(model, batches, "recalibrate").batches


@dataclass(frozen=True)
class Recomputed:
    """The result of `recomputed`.

    Attributes:
        batches: The number of batches.
        kept: The names of BatchNorms that no batch reaches.
    """

    batches: int
    kept: frozenset[str]


@torch.no_grad()
def recomputed(
    model: nn.Module, batches: Iterable[Any], caller: str, known: frozenset[str] = frozenset()
) -> Recomputed:
    """Do what `recalibrate` does.

    Args:
        model: A model with a BatchNorm that has running statistics.
        batches: As for `recalibrate`, at least one.
        caller: The function and argument that errors name.
        known: Names of BatchNorms that were named in a warning before.
    """
    norms = norms_with_statistics(model)
    if not torch.is_inference_mode_enabled():
        refuse_inference_tensors(model.named_buffers(), caller)
    with _only_these_train(model, norms) as before:
        number = _recompute(model, norms, batches, caller)
        names = {module: name for name, module in model.named_modules()}
        missed = [norm for norm in norms if not int(norm.get_buffer("num_batches_tracked"))]
        for norm in missed:
            _restore(before[norm])
        kept = frozenset(names[norm] for norm in missed)
        if new := sorted(kept - known):
            warn(
                f"{caller}: no batch reaches BatchNorm {new[0]!r}{f' and {len(new) - 1} more' if new[1:] else ''} in "
                f"eval mode, so {'these keep' if new[1:] else 'it keeps'} the old statistics. That is right for "
                f"modules that only train. Otherwise pass batches that reach "
                f"{'them' if new[1:] else 'it'}: {', '.join(new)}."
            )
    return Recomputed(number, kept)


@torch.no_grad()
def rehearse(model: nn.Module, batches: Iterable[Any], caller: str) -> Recomputed:
    """Do what `recomputed` does and restore the old statistics, to find out whether it succeeds."""
    before = _buffers_of(norms_with_statistics(model))
    try:
        return recomputed(model, batches, caller)
    finally:
        for buffers in before.values():
            _restore(buffers)


def refuse_inference_tensors(tensors: Iterable[tuple[str, Tensor]], caller: str) -> None:
    """Refuse tensors that were made in inference mode, which torch does not let anyone change outside of it."""
    for name, tensor in tensors:
        if tensor.is_inference():
            raise KeepkError(
                f"{caller}: tensor {name!r} of the model was made inside torch.inference_mode(), which restricts what "
                f"can be done with it. Build the model outside of it, or pass a copy made outside: "
                f"copy.deepcopy(model)."
            )


def norms_with_statistics(model: nn.Module) -> list[BatchNormBase]:
    """The BatchNorms that have running statistics."""
    return [it for it in model.modules() if isinstance(it, BatchNormBase) and it.running_mean is not None]


def _recompute(model: nn.Module, norms: Sequence[BatchNormBase], batches: Iterable[Any], caller: str) -> int:
    """Run all batches, and return their number; refuses batches that give no valid statistics."""
    names = {module: name for name, module in model.named_modules()}
    number = 0

    def refuse_single_values(norm: nn.Module, arguments: tuple[Any, ...]) -> None:
        values = next((it for it in arguments if isinstance(it, Tensor)), None)
        if values is not None and values.ndim > 1 and values.numel() == values.shape[1]:
            raise KeepkError(
                f"{caller}: batch {number} has only one value per channel at BatchNorm {names[norm]!r}, which has no "
                f"variance. Pass batches of two samples or more; a DataLoader drops the last, smaller one with "
                f"drop_last=True."
            )

    hooks = [norm.register_forward_pre_hook(refuse_single_values) for norm in norms]
    try:
        for number, batch in enumerate(batches, start=1):
            _refuse_empty(batch, f"{caller}: batch {number}")
            forward_of(model, batch, caller)
    finally:
        for hook in hooks:
            hook.remove()
    if not number:
        raise KeepkError(
            f"{caller}: batches is empty, so there are no statistics to compute. Pass at least one batch; an "
            f"iterator can be used only once."
        )
    for norm in norms:
        if not all(bool(it.isfinite().all()) for it in norm.buffers(recurse=False)):
            raise KeepkError(
                f"{caller}: the statistics of BatchNorm {names[norm]!r} would be NaN or infinite. Check the batches "
                f"for such values, and for numbers that overflow in the model's dtype."
            )
    return number


def _refuse_empty(batch: Any, where: str) -> None:
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    first = next((it for it in parts if isinstance(it, Tensor)), None)
    if first is not None and first.ndim and not len(first):
        raise KeepkError(f"{where} is empty: its first tensor has the shape {tuple(first.shape)}. Leave it out.")


Buffers: TypeAlias = list[tuple[Tensor, Tensor]]  # with their old values


def _buffers_of(norms: Sequence[BatchNormBase]) -> dict[BatchNormBase, Buffers]:
    return {norm: [(buffer, buffer.clone()) for buffer in norm.buffers(recurse=False)] for norm in norms}


def _restore(before: Buffers) -> None:
    for buffer, old in before:
        buffer.copy_(old)


@contextmanager
def _only_these_train(model: nn.Module, norms: Sequence[BatchNormBase]) -> Iterator[dict[BatchNormBase, Buffers]]:
    """Put BatchNorms into train mode with fresh statistics, all others into eval mode; restore modes and momenta.

    Yields:
        The old statistics, which are restored on failure.
    """
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(norm, norm.momentum) for norm in norms]
    before = _buffers_of(norms)
    try:
        for module, _ in modes:
            module.training = False  # not .eval(): some modules override it
        for norm in norms:
            norm.training, norm.momentum = True, None  # with momentum None, torch computes the mean over all batches
            norm.reset_running_stats()
        yield before
    except BaseException:
        for buffers in before.values():
            _restore(buffers)
        raise
    finally:
        for norm, momentum in momenta:
            norm.momentum = momentum
        for module, training in modes:
            module.training = training


def forward_of(model: nn.Module, batch: Any, caller: str) -> None:
    """Run the model on a batch: a tensor, a tuple or list that begins with one, or a dict of keyword arguments.

    Raises:
        KeepkError: The batch has none of these forms.
    """
    device = next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))
    if isinstance(batch, Mapping):
        model(**{name: it.to(device) if isinstance(it, Tensor) else it for name, it in batch.items()})
        return
    inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(inputs, Tensor):
        raise KeepkError(
            f"{caller}: a batch is a {type(batch).__name__}{_inner(batch)}. Pass tensors, (inputs, targets) or dicts "
            f"of keyword arguments."
        )
    model(inputs.to(device))


def _inner(batch: Any) -> str:
    return f" that begins with {type(batch[0]).__name__}" if isinstance(batch, tuple | list) and batch else ""
