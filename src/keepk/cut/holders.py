"""Who else holds what is going to be cut: found and named before the first cut."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from keepk.cut.optimizer_state import refuse_factored, refuse_foreign_state, refuse_stranger
from keepk.errors import ShrinkError
from keepk.graph.edits import Cut, Edits
from keepk.graph.tracer import named_tensors
from keepk.graph.wrappers import unwrap


def refuse_holders(model: nn.Module, edits: Edits) -> None:
    """Refuse to cut what a DDP wrapper, shared memory or an exported program holds."""
    _refuse_ddp(model)
    _refuse_shared_memory(unwrap(model), {cut.tensor for cut in edits.cuts})
    _refuse_strange_tensors(unwrap(model), {cut.tensor for cut in edits.cuts})


def refuse_optimizers(optimizers: Sequence[Any], named: Mapping[str, Tensor], edits: Edits) -> None:
    """Refuse an optimizer whose state cannot be cut along."""
    for optimizer in optimizers:
        refuse_stranger(optimizer, [p for p in named.values() if isinstance(p, nn.Parameter)])
        refuse_factored(optimizer)
        touched = {named[cut.tensor]: cut.tensor for cut in edits.cuts if isinstance(named[cut.tensor], nn.Parameter)}
        refuse_foreign_state(optimizer, touched)  # type: ignore[arg-type]  # the names are of parameters


def refuse_follower(follower: object, tensors: Mapping[str, Tensor], cuts: Iterable[Cut], place: int) -> None:
    """Refuse a follower that has not the model's tensors in the model's shapes."""
    for cut in cuts:
        found = tensors.get(cut.tensor)
        if found is None:
            raise ShrinkError(
                f"followers[{place}] ({type(follower).__name__}): has no tensor {cut.tensor!r}. A follower is a copy of the "
                f"model, an AveragedModel of it, or a dict of tensors with its names."
            )
        if tuple(found.shape) != cut.before:
            raise ShrinkError(
                f"followers[{place}] ({type(follower).__name__}): {cut.tensor!r} has shape {tuple(found.shape)}, the model's "
                f"{cut.before}. A follower must have followed every shrink before."
            )


def _refuse_ddp(model: nn.Module) -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    inner = unwrap(model)
    for held in gc.get_objects():
        if isinstance(held, DistributedDataParallel) and unwrap(held) is inner:
            raise ShrinkError(
                f"model {type(inner).__name__}: a DistributedDataParallel wrapper holds its gradients, which would be out of "
                f"step after a cut. Delete the wrapper, shrink its .module on every rank, and wrap it again."
            )


def _refuse_shared_memory(model: nn.Module, touched: set[str]) -> None:
    """Two tensor objects over one memory would come apart."""
    owners = dict[int, str]()
    for name, tensor, _ in named_tensors(model):
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        address = tensor.untyped_storage().data_ptr()
        other = owners.setdefault(address, name)
        if other != name and touched & {name, other}:
            raise ShrinkError(
                f"tensors {other!r} and {name!r} share memory but are two objects, so a cut would take them apart. "
                f"Tie them as one Parameter, or make one a copy."
            )


def _refuse_strange_tensors(model: nn.Module, touched: set[str]) -> None:
    for name, tensor, _ in named_tensors(model):
        if name not in touched:
            continue
        if tensor.is_inference():
            raise ShrinkError(f"tensor {name!r} was made in inference mode and cannot change. Build the model outside of it.")
        if hasattr(tensor, "device_mesh") or tensor.layout != torch.strided or tensor.is_quantized:
            raise ShrinkError(
                f"tensor {name!r} is {type(tensor).__name__}, {tensor.layout}: it cannot be cut. Shrink before sharding, "
                f"sparsifying or quantizing."
            )
        if not tensor.is_leaf:
            raise ShrinkError(f"tensor {name!r} is the result of a computation. Detach it before shrinking.")
