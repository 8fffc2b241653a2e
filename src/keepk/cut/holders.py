"""Who else holds what is going to be cut: found and named before the first cut."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from keepk.cut.followers import Follower, refuse_missing, told
from keepk.cut.memory import sharing_memory
from keepk.cut.optimizer_state import refuse_factored, refuse_foreign_state, refuse_stranger, refuse_wrapping
from keepk.errors import ShrinkError
from keepk.graph.edits import Cut, Edits
from keepk.graph.tracer import named_tensors
from keepk.graph.wrappers import unwrap


def refuse_holders(model: nn.Module, edits: Edits, wrapper: nn.Module | None = None) -> None:
    """Refuse to cut what a DDP wrapper or another tensor holds, and tensors that cannot change.

    `wrapper` is a DDP wrapper that will be gone before the cut.
    """
    _refuse_ddp(model, wrapper)
    tensors = {name: tensor for name, tensor, _ in named_tensors(unwrap(model))}
    _refuse_strange_tensors(tensors, edits.cuts)
    _refuse_shared_memory(tensors, {cut.tensor for cut in edits.cuts})


def refuse_optimizers(optimizers: Sequence[Any], named: Mapping[str, Tensor], edits: Edits) -> None:
    """Refuse an optimizer whose state cannot be cut along."""
    for optimizer in optimizers:
        refuse_stranger(optimizer, [p for p in named.values() if isinstance(p, nn.Parameter)])
        refuse_factored(optimizer)
        touched = {named[cut.tensor]: cut.tensor for cut in edits.cuts if isinstance(named[cut.tensor], nn.Parameter)}
        refuse_foreign_state(optimizer, touched)  # type: ignore[arg-type]  # the names are of parameters
    refuse_wrapping(optimizers)


def refuse_follower(
    follower: Follower,
    tensors: Mapping[str, Tensor],
    cuts: Sequence[Cut],
    names: Mapping[str, Sequence[str]],
    place: int,
) -> None:
    """Refuse a follower that has not the model's tensors in the model's shapes.

    Args:
        follower: A module or a dict.
        tensors: What it has, by name.
        cuts: What it must have.
        names: By the first name of a tensor all names under which it is tied.
        place: Its place among the followers.
    """
    refuse_missing(follower, tensors, [cut.tensor for cut in cuts], place)
    who = told(follower, place)
    for cut in cuts:
        for name in names[cut.tensor]:
            if name in tensors and tuple(tensors[name].shape) != cut.before:
                raise ShrinkError(
                    f"{who}: {name!r} has shape {tuple(tensors[name].shape)}, the model's {cut.before}. "
                    f"A follower must have followed every shrink before."
                )
    if isinstance(follower, nn.Module):
        _refuse_strange_tensors(tensors, cuts, f"{who}: ")


def _refuse_ddp(model: nn.Module, leaving: nn.Module | None) -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    mine = {id(parameter) for parameter in model.parameters()}
    if _ddp_over(mine, leaving):
        gc.collect()  # a wrapper that was deleted may wait for the collector
    if _ddp_over(mine, leaving):
        raise ShrinkError(
            f"model {type(unwrap(model)).__name__}: a DistributedDataParallel wrapper holds its gradients, which would "
            f"be out of step after a cut. Say ddp = pruner.step(ddp); or delete the wrapper, shrink its .module on "
            f"every rank, and wrap it again."
        )


def _ddp_over(parameters: set[int], leaving: nn.Module | None) -> bool:
    # By type(), because isinstance() asks a dead weak proxy for its class, which raises.
    wrappers = (held for held in gc.get_objects() if issubclass(type(held), DistributedDataParallel))
    armed = (wrapper for wrapper in wrappers if wrapper is not leaving and hasattr(wrapper, "reducer"))
    return any(id(parameter) in parameters for wrapper in armed for parameter in wrapper.parameters())


def _refuse_shared_memory(tensors: Mapping[str, Tensor], touched: set[str]) -> None:
    for one, other in sharing_memory(tensors):
        if touched & {one, other}:
            raise ShrinkError(
                f"tensors {one!r} and {other!r} share memory but are two objects, so a cut would take them apart. "
                f"Tie them as one Parameter, or make one a copy."
            )


def _refuse_strange_tensors(tensors: Mapping[str, Tensor], cuts: Sequence[Cut], who: str = "") -> None:
    for name in (cut.tensor for cut in cuts):
        tensor = tensors[name]
        if tensor.is_inference():
            raise ShrinkError(
                f"{who}tensor {name!r} was made in inference mode and cannot change. Build the model outside of it."
            )
        if hasattr(tensor, "device_mesh") or tensor.layout != torch.strided or tensor.is_quantized:
            raise ShrinkError(
                f"{who}tensor {name!r} is {type(tensor).__name__}, {tensor.layout}: it cannot be cut. "
                f"Shrink before sharding, sparsifying or quantizing."
            )
        if not tensor.is_leaf:
            raise ShrinkError(f"{who}tensor {name!r} is the result of a computation. Detach it before shrinking.")
        if tensor.grad is not None and tensor.grad.layout != torch.strided:
            raise ShrinkError(
                f"{who}the gradient of {name!r} is {tensor.grad.layout}: it cannot be cut. "
                f"Call zero_grad() before shrinking."
            )
