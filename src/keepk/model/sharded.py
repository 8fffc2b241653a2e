"""Facts about tensors that are sharded over processes: DTensors, as FSDP2 and tensor parallelism make them.

A DTensor looks like the whole tensor and holds one block of it, the `local` part. `block_of` says where the block lies.
Which process holds which block follows from the mesh and the placements, so nothing here communicates, except for
`gathered`. A block that several processes hold (a replica) is counted by exactly one of them.

Tensors that are no DTensors are their own local part. In a run of several processes each of them holds the same one.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from keepk.errors import KeepkError, TraceError
from keepk.model.names import named_tensors
from keepk.model.torch_internals import fsdp_modules, take_off_fsdp


@dataclass(frozen=True)
class Block:
    """The part of a tensor that this process holds.

    Attributes:
        shape: The shape of the whole tensor.
        starts: By dim, the index in the whole tensor at which the block begins.
        sizes: The shape of the block.
        counts: Whether this process counts the entries of the block: of several with the same block, one does.
        edges: The flat indices of the whole tensor at which blocks begin, if each of them is a range of rows (or the
            whole tensor); None if blocks of several processes alternate in row-major order.
        everywhere: Whether every process holds the whole tensor.
    """

    shape: tuple[int, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    counts: bool
    edges: tuple[int, ...] | None
    everywhere: bool = False

    def flat(self, places: Tensor) -> Tensor:
        """The flat indices in the whole tensor of entries of the block, given by their flat indices in the block.

        >>> Block((4, 3), (2, 1), (2, 2), True, None).flat(torch.arange(4))
        tensor([ 7,  8, 10, 11])
        """
        found, inner, outer = torch.zeros_like(places), 1, 1
        for whole, start, size in zip(reversed(self.shape), reversed(self.starts), reversed(self.sizes), strict=True):
            found += (places // inner % size + start) * outer
            inner, outer = inner * size, outer * whole
        return found

    def of(self, whole: Tensor) -> Tensor:
        """The block, as a view of the whole tensor."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


def is_sharded(tensor: object) -> bool:
    """Whether a tensor is a DTensor, of which this process may hold only a part."""
    return hasattr(tensor, "device_mesh")  # by an attribute: importing DTensor takes a second


def shards_of(given: object) -> list[Tensor]:
    """The sharded tensors of a module or an optimizer, found without its state_dict, which may fail; none of others."""
    tensors: Iterable[Tensor] = ()
    if isinstance(given, nn.Module):
        reshard_around(given)
        tensors = (tensor for _, tensor, _ in named_tensors(given))
    elif isinstance(given, torch.optim.Optimizer):
        tensors = (parameter for group in given.param_groups for parameter in group["params"])
    return [tensor for tensor in tensors if is_sharded(tensor)]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, which shares its memory, without its gradient history."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # of a DTensor
    return part.detach()


def block_of(tensor: Tensor, whole: Sequence[int] | None = None) -> Block:
    """Where the local part of a tensor lies in the whole tensor, or would lie if that had the shape `whole`."""
    shape = tuple(tensor.shape if whole is None else whole)
    if not is_sharded(tensor):
        first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
        return Block(shape, (0,) * len(shape), shape, first, (0,), everywhere=True)
    given: Any = tensor
    ranges = [[(0, size)] for size in shape]  # by dim, the parts of all processes, in order
    place, counts, rowwise = [0] * len(shape), True, True
    for placement, size, own in zip(given.placements, given.device_mesh.shape, _coordinate(given), strict=True):
        if placement.is_replicate():
            counts &= own == 0
        else:
            dim = placement.dim
            ranges[dim] = [part for start, end in ranges[dim] for part in chunks(start, end, size)]
            place[dim] = place[dim] * size + own
            rowwise &= dim == 0
    held = [parts[index] for parts, index in zip(ranges, place, strict=True)]
    row = prod(shape[1:])
    edges = sorted({start * row for start, end in ranges[0] if end > start} | {0}) if shape else [0]
    starts, sizes = tuple(start for start, _ in held), tuple(end - start for start, end in held)
    everywhere = all(placement.is_replicate() for placement in given.placements)
    return Block(shape, starts, sizes, counts, tuple(edges) if rowwise else None, everywhere)


def _coordinate(tensor: Any) -> Sequence[int]:
    found: Sequence[int] = tensor.device_mesh.get_coordinate()
    return found


def chunks(start: int, end: int, parts: int) -> list[tuple[int, int]]:
    """The parts of a range as `torch.chunk` makes them: all have the same size, except for the last ones.

    >>> chunks(0, 5, 4)
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-(end - start) // parts)
    return [(min(end, start + i * size), min(end, start + (i + 1) * size)) for i in range(parts)]


def refuse_unknown_sharding(where: str, tensor: Tensor, kind: type[KeepkError]) -> None:
    """Refuse a DTensor of which it is not known which process holds which part of its values."""
    given: Any = tensor
    if not is_sharded(tensor):
        return
    for placement in given.placements:
        # By name: a _StridedShard says that it is a shard, but its blocks lie elsewhere.
        if (found := type(placement).__name__) not in ("Shard", "Replicate"):
            raise kind(
                f"{where} is a DTensor with placement {found} ({tuple(given.placements)}). Only Shard and Replicate "
                f"are supported. Shard each dim of a tensor over one dim of the mesh, or prune before sharding."
            )
    world = dist.get_world_size()
    if given.device_mesh.size() != world or given.device_mesh.get_coordinate() is None:
        raise kind(
            f"{where} is a DTensor on a mesh of {given.device_mesh.size()} of the {world} processes. Use a mesh of all "
            f"processes of the default process group, because all of them decide together."
        )
    if tuple(local(tensor).shape) != block_of(tensor).sizes:
        raise kind(
            f"{where} is a DTensor whose local part has shape {tuple(local(tensor).shape)}; placements "
            f"{tuple(given.placements)} give {block_of(tensor).sizes}. Shard it with distribute_tensor or fully_shard."
        )


def same_sharding(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same shape have the same local parts in every process."""
    if not is_sharded(one) or not is_sharded(other):
        return is_sharded(one) == is_sharded(other)
    first: Any = one
    second: Any = other
    return bool(first.device_mesh == second.device_mesh and tuple(first.placements) == tuple(second.placements))


def as_sharded(part: Tensor, like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """A tensor of which every process gives its local part, sharded like another one; `part` itself if that is not.

    Args:
        part: The local part.
        like: The other tensor.
        shape: The shape of the whole tensor; by default that of `like`.
    """
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - takes a second, and there is a DTensor already

    given: Any = like
    shape = torch.Size(like.shape if shape is None else shape)
    stride = torch.empty(shape, device="meta").stride()
    found: Tensor = DTensor.from_local(
        part, given.device_mesh, given.placements, run_check=False, shape=shape, stride=stride
    )
    return found


def own_part(whole: Tensor, like: Tensor) -> Tensor:
    """A tensor of which this process has the whole, sharded like another one, with its local part in new memory."""
    return as_sharded(
        block_of(like, whole.shape).of(whole).clone(memory_format=torch.contiguous_format), like, whole.shape
    )


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on the device of the local part. Every process must call this for the same tensor."""
    if not is_sharded(tensor):
        return tensor.detach()
    _GUARD.get()(f"gather a tensor of shape {tuple(tensor.shape)}")
    given: Any = tensor
    part, device = local(tensor), exchange_device([tensor])
    if part.device.type != device.type:  # CPU offload, beside processes that are connected by their GPUs
        given = as_sharded(part.to(device), tensor)
    with torch.no_grad():
        whole: Tensor = given.detach().full_tensor()
    return whole.to(part.device)


_GUARD: ContextVar[Callable[[str], None]] = ContextVar("guard", default=lambda _: None)


@contextmanager
def guarding(guard: Callable[[str], None]) -> Iterator[None]:
    """Call `guard` before a tensor is gathered within the context, with words that are equal in all processes.

    It can raise if another process has failed and will not take part.
    """
    token = _GUARD.set(guard)
    try:
        yield
    finally:
        _GUARD.reset(token)


def exchange_device(tensors: Iterable[Tensor]) -> torch.device:
    """The device on which processes exchange numbers: that of the first mesh, or of the first tensor without any.

    With CPU offload, the parameters are on the CPU and the processes are connected by their GPUs.
    """
    listed: list[Any] = list(tensors)
    meshes = [it.device_mesh for it in listed if is_sharded(it)]
    if not meshes:
        found: torch.device = listed[0].device
        return found
    kind: str = meshes[0].device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def reshard(model: nn.Module) -> None:
    """Free the whole parameters that FSDP2 has gathered, so that the model has its sharded ones again.

    After a forward pass without a backward pass, the outermost module keeps its parameters gathered.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and hasattr(fsdp, "FSDPModule"):
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def reshard_around(model: nn.Module) -> None:
    """Like `reshard`, also for modules that the model is a part of.

    This looks at all FSDP2 modules of the process, so it is not for every step.
    """
    reshard(model)
    for outer in fsdp_modules():
        if outer is not model and any(it is model for it in outer.modules()):
            outer.reshard()  # type: ignore[operator]  # an FSDPModule


def sharded_around(model: nn.Module, name: str) -> tuple[nn.Module, str] | None:
    """The innermost module around a model that shards one of its parameters, and the model's path there; or None."""
    parameter, own = model.get_parameter(name), {*model.modules()}
    found = [
        (len(list(outer.modules())), outer, path)
        for outer in fsdp_modules()
        if outer not in own and any(it is parameter for it in outer.parameters())
        for path, module in outer.named_modules()
        if module is model
    ]
    _, outer, path = min(found, key=itemgetter(0), default=(0, None, ""))
    return None if outer is None else (outer, path)


def sharded_otherwise(model: nn.Module) -> str | None:
    """The name of a parameter that is sharded, but not in a module that `fully_shard` was applied to, or below one."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: Any = getattr(fsdp, "FSDPModule", ())
    wrapped = (module for module in model.modules() if isinstance(module, kind))
    known = {id(parameter) for module in wrapped for parameter in module.parameters()}
    found = (name for name, it in model.named_parameters() if is_sharded(it) and id(it) not in known)
    return next(found, None)


def without_fsdp(model: nn.Module) -> Callable[[], None]:
    """Make a model that FSDP2 wraps an ordinary one, in place, with its sharded parameters.

    Returns:
        A function that puts everything back.
    """
    reshard(model)
    with ExitStack() as undos:
        for module in model.modules():
            undos.callback(take_off_fsdp(module))
        return undos.pop_all().close


def plain_twin(model: nn.Module) -> nn.Module:
    """A copy of a sharded model as it was before, with parameters on the meta device, which have no values."""
    memo = dict[int, Any]()
    for _, tensor, is_parameter in named_tensors(model):
        if is_parameter:
            memo[id(tensor)] = nn.Parameter(
                torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor.requires_grad
            )
    put_back = without_fsdp(model)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(
            f"model {type(model).__name__}: cannot be copied ({type(error).__name__}: {error}). The channels of a "
            f"sharded model are found on a copy; make copy.deepcopy(model) work, as it was before fully_shard."
        ) from error
    finally:
        put_back()
