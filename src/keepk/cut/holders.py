"""Checks for anything else that holds the tensors about to be cut: DDP wrappers, views, tensors that cannot change.

`keepk.load` uses this module too, so it imports nothing of the trace, the optimizers or the followers.
"""

import gc
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from keepk.cut.memory import sharing_memory
from keepk.errors import ShrinkError
from keepk.graph.edits import Cut, Edits
from keepk.graph.tracer import named_tensors
from keepk.graph.wrappers import unwrap


def refuse_holders(model: nn.Module, edits: Edits, wrapper: nn.Module | None = None) -> None:
    """Refuse to cut tensors that a DDP wrapper or another tensor object also uses, or that cannot change.

    Args:
        model: The model about to be cut.
        edits: The cuts.
        wrapper: A DDP wrapper that will be discarded before the cut.

    Raises:
        ShrinkError: Names the holder or the tensor.
    """
    _refuse_ddp(model, wrapper)
    tensors = {name: tensor for name, tensor, _ in named_tensors(unwrap(model))}
    refuse_uncuttable(tensors, edits.cuts)
    _refuse_shared_memory(tensors, {cut.tensor for cut in edits.cuts})


def refuse_uncuttable(tensors: Mapping[str, Tensor], cuts: Sequence[Cut], who: str = "") -> None:
    """Refuse to cut inference-mode, sharded, sparse, quantized and computed tensors.

    Args:
        tensors: All tensors by name.
        cuts: The cuts; only the tensors that they name are checked.
        who: How an error message begins, for tensors of a follower.
    """
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


def _refuse_ddp(model: nn.Module, leaving: nn.Module | None) -> None:
    # A wrapper can exist only in an initialized process group, and looking for one walks over all Python objects.
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    mine = {id(parameter) for parameter in model.parameters()}
    if _ddp_over(mine, leaving):
        gc.collect()  # a deleted wrapper is part of a reference cycle and may still await collection
    if _ddp_over(mine, leaving):
        raise ShrinkError(
            f"model {type(unwrap(model)).__name__}: a DistributedDataParallel wrapper holds its gradients in buffers "
            f"that would have the wrong size after a cut. Call ddp = pruner.step(ddp); or delete the wrapper, shrink "
            f"its .module on every rank, and wrap it again."
        )


def _ddp_over(parameters: set[int], leaving: nn.Module | None) -> bool:
    # type() instead of isinstance(): the latter asks a dead weak proxy for its class, which raises ReferenceError.
    wrappers = (held for held in gc.get_objects() if issubclass(type(held), DistributedDataParallel))
    # A wrapper that lost its reducer (`cut.ddp.disarm`) no longer has buffers for gradients.
    armed = (wrapper for wrapper in wrappers if wrapper is not leaving and hasattr(wrapper, "reducer"))
    return any(id(parameter) in parameters for wrapper in armed for parameter in wrapper.parameters())


def _refuse_shared_memory(tensors: Mapping[str, Tensor], touched: set[str]) -> None:
    for one, other in sharing_memory(tensors):
        if touched & {one, other}:
            raise ShrinkError(
                f"tensors {one!r} and {other!r} share memory but are two objects, so a cut would separate them. "
                f"Tie them as one Parameter, or make one a copy."
            )
