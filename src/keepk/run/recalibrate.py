"""`recalibrate`: recompute BatchNorm statistics, which are out of date after a cut."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from keepk.errors import KeepkError
from keepk.model.torch_internals import BatchNormBase


@torch.no_grad()
def recalibrate(model: nn.Module, batches: Iterable[Any]) -> int:
    """Recompute the running statistics of every BatchNorm, as plain means over batches.

    Right after channels are removed, running means and variances are still those of the larger network. Training
    updates them gradually; to evaluate immediately, recalibrate first. Each BatchNorm gets the mean over batches of the
    batch's mean and (unbiased) variance, as in `torch.optim.swa_utils.update_bn`, except that all other modules are in
    eval mode, so dropout is off. Weights do not change; modes and momenta are restored. If a forward pass fails, the
    old statistics are restored as well.

    Args:
        model: The model, or a wrapper of it. Every BatchNorm that has running statistics is recalibrated.
        batches: Inputs of the model: tensors; tuples or lists whose first entry is the input, ``(inputs, targets)``;
            or dicts of keyword arguments. Tensors are moved to the model's device.

    Returns:
        The number of batches.

    Raises:
        KeepkError: The model has no BatchNorm with running statistics, `batches` is empty or a single batch, a batch
            has none of the forms above or no rows, a BatchNorm gets only one value per channel, or its statistics
            would not be finite.

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
    with _only_these_train(model, norms):
        return _recompute(model, norms, batches, "recalibrate")


@torch.no_grad()
def rehearse(model: nn.Module, batches: Iterable[Any], caller: str) -> None:
    """Do what `recalibrate` does and restore the old statistics, to find out whether it succeeds.

    Args:
        model: A model without wrappers, with a BatchNorm that has running statistics.
        batches: As for `recalibrate`, at least one.
        caller: The function and argument that errors name.
    """
    norms = norms_with_statistics(model)
    before = _buffers_of(norms)
    with _only_these_train(model, norms):
        _recompute(model, norms, batches, caller)
    _restore(before)


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


def _buffers_of(norms: Sequence[BatchNormBase]) -> list[tuple[Tensor, Tensor]]:
    return [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]


def _restore(before: Sequence[tuple[Tensor, Tensor]]) -> None:
    for buffer, old in before:
        buffer.copy_(old)


@contextmanager
def _only_these_train(model: nn.Module, norms: Sequence[BatchNormBase]) -> Iterator[None]:
    """Put BatchNorms into train mode with fresh statistics, all others into eval mode; restore modes and momenta."""
    modes = [(module, module.training) for module in model.modules()]
    momenta = [(norm, norm.momentum) for norm in norms]
    before = _buffers_of(norms)
    try:
        for module, _ in modes:
            module.training = False  # not .eval(): some modules override it
        for norm in norms:
            norm.training, norm.momentum = True, None  # with momentum None, torch computes the mean over all batches
            norm.reset_running_stats()
        yield
    except BaseException:
        _restore(before)
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
