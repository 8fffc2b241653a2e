"""`prune`: prune a trained model in one call, without a training loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from keepk.deploy.runtime import buffers_kept
from keepk.errors import KeepkError
from keepk.metrics.layers import traits_of
from keepk.metrics.statistics import Statistics
from keepk.model.example import TrainMode, ValueBranches, not_a_model
from keepk.model.names import unwrap
from keepk.plan.names import shown
from keepk.plan.spaces import channels
from keepk.reports.run import RunReport, report
from keepk.run.pruner import Pruner
from keepk.run.recalibrate import forward_of, norms_with_statistics, recomputed, refuse_inference_tensors, rehearse

Loss = Callable[[nn.Module, Any], Tensor]
STAGES = ("trace", "run the batches", "rank and cut", "recalibrate")


def prune(  # noqa: PLR0913 - the arguments of `channels` and `trace`, all but two by keyword
    model: nn.Module,
    example: Any,
    *,
    macs: int | float | None = None,
    parameters: int | float | None = None,
    keep: int | None = None,
    prune: float | None = None,
    select: str | Sequence[str] = "*",
    exclude: str | Sequence[str] = (),
    metric: Callable[..., Any] | None = None,
    calibrate: Iterable[Any] | None = None,
    loss: Loss | None = None,
    layer_floor: int | float | None = None,
    round_to: int | Literal["auto"] | None = None,
    per_layer: bool = False,
    lossy: bool = False,
    train_mode: TrainMode = "check",
    value_branches: ValueBranches = "check",
    on_stage: Callable[[str], None] | None = None,
) -> RunReport:
    """Prune channels of a trained model in place, at once, without training it.

    Everything that can fail is tried before the model changes: the trace, the ranking, and a forward pass of every
    calibration batch, so that a loader is read up to three times. For less loss of accuracy at high rates, prune in
    steps while training: `keepk.Pruner`.

    Args:
        model: The trained model. It is cut in place.
        example: An input of forward with a batch of two or more; see `keepk.trace`.
        macs: The most multiply-accumulates per sample of the whole model: a share below 1 of the present number, or an
            int. Pass exactly one of `macs`, `parameters`, `keep` and `prune`.
        parameters: The most parameters of the whole model, in the same way.
        keep: The number of channels to keep.
        prune: The share of channels to prune.
        select: Globs over names of modules, whose output channels may be removed.
        exclude: Globs over the same names, which are left out.
        metric: The metric that ranks channels; None for the default, which reads weights alone. A metric that needs
            data is passed uncalled, as ``keepk.metrics.taylor``, ``fisher`` or ``activation`` (or a `partial` of it):
            its statistics are collected from `calibrate`.
        calibrate: Batches of inputs, as for `keepk.recalibrate`. After the cut, running statistics of BatchNorms are
            recomputed from them. A few batches of training data are enough.
        loss: A function of the model and a batch of `calibrate` that returns the loss, for metrics that need gradients;
            refused for others, which would not use it.
        layer_floor: The least number, or share, of channels to keep in each layer; None means a tenth under a budget,
            otherwise 1.
        round_to: Each cut layer keeps a number of channels that makes its width a multiple of this;
            "auto" chooses one for each layer, under a budget.
        per_layer: Every layer keeps the same share of its channels.
        lossy: Also select channels whose removal changes the output more than zeroing them would.
        train_mode: "accept" allows a forward that fails in train mode on the example; see `keepk.trace`.
        value_branches: "accept" allows a forward with paths that no example takes; see `keepk.trace`.
        on_stage: Called with the name of each stage as it begins, one of `STAGES`, for a progress bar.

    Returns:
        A report of what was asked and reached. It prints as a table.

    Raises:
        SpaceError: No channel matches, or not exactly one of the four numbers is given, or it cannot be met.
        TraceError: The example does not fit the model, or the model cannot be traced.
        RankError: The channels cannot be ranked.
        KeepkError: The metric needs data or a loss that is missing, or a batch has the wrong form.

    >>> import keepk
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(
    ...     nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(),
    ...     nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ... )
    >>> images = list(torch.randn(4, 16, 3, 8, 8))
    >>> keepk.prune(net, images[0], macs=0.5, metric=keepk.metrics.l2, calibrate=images).budgets[0].reached
    161260
    >>> net[0].out_channels, net[3].out_channels
    (19, 52)
    """
    if not isinstance(model, nn.Module):
        raise KeepkError(f"prune: {not_a_model(model)}")
    refuse_inference_tensors(chain(model.named_parameters(), model.named_buffers()), "prune")
    batches = _listed(calibrate)
    statistics = _statistics_for(unwrap(model), metric, batches, loss)
    space = channels(
        select,
        keep=keep,
        prune=prune,
        macs=macs,
        parameters=parameters,
        exclude=exclude,
        metric=metric if statistics is None or metric is None else metric(statistics),
        layer_floor=layer_floor,
        round_to=round_to,
        per_layer=per_layer,
        lossy=lossy,
    )
    begin = on_stage or (lambda _: None)
    begin("trace")
    pruner = Pruner(model, space, example=example, train_mode=train_mode, value_branches=value_branches)
    with pruner:
        begin("run the batches")
        known = _try_batches(unwrap(model), batches, statistics, loss)
        begin("rank and cut")
        pruner.step()
        found = report(pruner)
    begin("recalibrate")
    if batches is not None and norms_with_statistics(unwrap(model)):
        recomputed(unwrap(model), batches, "prune: calibrate, after the cut", known)
    return found


def _listed(calibrate: Iterable[Any] | None) -> Iterable[Any] | None:
    """The batches as something that can be iterated over more than once; None without batches."""
    if calibrate is None:
        return None
    if isinstance(calibrate, Tensor | Mapping | str) or not isinstance(calibrate, Iterable):
        raise KeepkError(
            f"prune: calibrate: got one {type(calibrate).__name__}. Pass a loader or a list of batches, such as "
            f"[inputs]."
        )
    # A DataLoader begins again. With persistent workers it does so although it always returns the same iterator.
    if isinstance(calibrate, DataLoader):
        return calibrate
    # An iterator, or an object that always returns the same one, can be used only once.
    first = iter(calibrate)
    return list(first) if first is calibrate or iter(calibrate) is first else calibrate


def _statistics_for(
    model: nn.Module, metric: Callable[..., Any] | None, batches: Iterable[Any] | None, loss: Loss | None
) -> Statistics | None:
    """Statistics for a metric that was passed uncalled; None for metrics that need none."""
    made_by = metric.func if isinstance(metric, partial) else metric
    # A factory of metrics has an example of how it is called. Those that need data take statistics as their argument.
    if "(statistics" not in getattr(made_by, "example_call", ""):
        if metric is not None and "gradients" in (traits_of(metric).needs or ()):
            raise KeepkError(
                f"prune: metric={shown(metric)} needs gradients, and prune() does not train. Pass "
                f"metric=keepk.metrics.taylor with calibrate= and loss=."
            )
        _refuse_loss(loss, metric)
        return None
    assert metric is not None
    statistics = Statistics(model)
    needs, name = traits_of(metric(statistics)).needs or (), getattr(made_by, "__name__", "it")
    if "gradients" not in needs:
        _refuse_loss(loss, metric)
    if batches is None:
        raise KeepkError(f"prune: metric={name} is computed from data. Pass batches with calibrate=.")
    if "gradients" in needs and not callable(loss):
        raise KeepkError(
            f"prune: metric={name} needs gradients of a loss, got loss={shown(loss)}. Pass loss=function, which takes "
            f"the model and a batch of calibrate= and returns the loss."
        )
    return statistics


def _refuse_loss(loss: object, metric: Callable[..., Any] | None) -> None:
    """Refuse a loss that nothing would read."""
    if loss is not None:
        ranks = "channels are ranked by weights alone" if metric is None else f"metric={shown(metric)} needs none"
        raise KeepkError(
            f"prune: got loss={shown(loss)}, which is for metrics that need gradients, and {ranks}. Leave it out, or "
            f"pass metric=keepk.metrics.taylor with calibrate=."
        )


def _try_batches(
    model: nn.Module, batches: Iterable[Any] | None, statistics: Statistics | None, loss: Loss | None
) -> frozenset[str]:
    """Run every batch, for the statistics, and to refuse in time whatever would fail after the cut.

    Statistics are collected in eval mode. Gradients, modes and buffers are restored.

    Returns:
        The names of BatchNorms that no batch reaches.
    """
    if batches is None:
        return frozenset()
    norms = norms_with_statistics(model)
    with buffers_kept([model]):  # a loss may put the model into train mode
        number = _collect(model, batches, statistics, loss, only_first=statistics is None and bool(norms))
        if not number:
            raise KeepkError("prune: calibrate= has no batches. Pass at least one, or omit it.")
        if not norms:
            return frozenset()
        with (
            nullcontext() if statistics is None else statistics.paused(),
            _naming("the forward pass of a calibrate= batch"),
        ):
            found = rehearse(model, batches, "prune: calibrate")
    if not any(True for _ in batches):  # they are read once more, after the cut
        raise KeepkError(
            f"prune: calibrate= has no batches left after {found.batches}, and has to be read once more. Pass a list, "
            f"or a loader whose dataset begins again."
        )
    return found.kept


def _collect(
    model: nn.Module,
    batches: Iterable[Any],
    statistics: Statistics | None,
    loss: Loss | None,
    *,
    only_first: bool,
) -> int:
    """Collect statistics from every batch; returns the number of batches. Gradients and modes are restored."""
    number = 0
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for number, batch in enumerate(batches, start=1):
            if only_first:
                break  # the rehearsal runs all of them
            model.eval()  # again for each batch, because the loss may have changed it
            if statistics is None or loss is None:
                with torch.no_grad(), _naming(f"the forward pass of calibrate= batch {number}"):
                    forward_of(model, batch, "prune: calibrate")
                continue
            for parameter, _ in gradients:
                parameter.grad = None
            with torch.enable_grad(), _naming(f"loss= of batch {number}"):
                _checked_loss(loss(model, batch), number).backward()  # type: ignore[no-untyped-call]  # torch's own
            statistics.update()
    finally:
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return number


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Raise a KeepkError in place of whatever the user's model or loss raises."""
    try:
        yield
    except (KeepkError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:300]
        raise KeepkError(
            f"prune: {what} failed ({said}). Pass batches that the model takes as model(inputs), as tensors, "
            f"(inputs, targets) or dicts of keyword arguments, and a loss that takes the model and a batch."
        ) from error


def _checked_loss(value: Any, number: int) -> Tensor:
    """The value of a loss, if it is one number with gradients."""
    remedy = "It has to return the loss of the batch as a tensor with one element, computed by the model."
    if not isinstance(value, Tensor):
        raise KeepkError(f"prune: loss= returned a {type(value).__name__} for batch {number}. {remedy}")
    if value.numel() != 1:
        raise KeepkError(f"prune: loss= returned a tensor of shape {tuple(value.shape)} for batch {number}. {remedy}")
    if not value.requires_grad:
        raise KeepkError(
            f"prune: loss= returned a tensor without gradients for batch {number}. {remedy} Leave out detach() and "
            f"torch.no_grad(), and check that the model's parameters have requires_grad=True."
        )
    return value
