"""Objects besides the model that hold its tensors or copies of them: followers, DDP wrappers, views.

Followers are copies of a model, averages of it (EMA), and dicts of its tensors. They are cut and masked with the model.
Other holders (DDP wrappers, views, tensors that cannot be changed) are refused before the first cut. The exception is
the wrapper that was passed to `Pruner.step`, which is replaced: its reducer allocates buffers for gradients when it is
built and hooks into every parameter. Neither can be resized, so an event disarms the old wrapper and builds a new one
with the same options. `keepk.load` uses this module too, so it does not import the tracer.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from keepk.cut.masks import zero_dead
from keepk.errors import ShrinkError
from keepk.model.edits import Cut, Edits
from keepk.model.names import named_parameters, named_tensors, unwrap
from keepk.model.sharded import local, same_sharding


def sharing_memory(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names of tensors whose memory overlaps; tensors side by side in one storage do not overlap.

    A tensor that overlaps several others is paired with the one that reaches furthest.

    >>> import torch
    >>> flat = torch.zeros(9)
    >>> list(sharing_memory({"a": flat[:4], "b": flat[4:], "c": flat[2:3], "d": torch.zeros(9)}))
    [('a', 'c')]
    """
    parts = ((name, local(tensor)) for name, tensor in tensors.items())
    spans = sorted((*_span(part), name) for name, part in parts if part.numel() and not part.is_meta)
    reached, holder = (-1, 0), ""  # the device is -1 for the CPU
    # Sorted by device and first address, a tensor overlaps an earlier one only if it starts before the furthest end.
    for place, start, end, name in spans:
        if (place, start) < reached:
            yield holder, name
        if (place, end) > reached:
            reached, holder = (place, end), name


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """The device of a tensor, its first address, and the address after its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return tensor.get_device(), start, start + (last + 1) * tensor.element_size()


Follower = nn.Module | dict[str, Tensor]
EMAS = {"ModelEmaV2", "ModelEmaV3"}  # of timm, which is not a dependency


def followed(follower: nn.Module) -> nn.Module:
    """The module inside a follower that has the model's structure and names."""
    averages = isinstance(follower, AveragedModel) or EMAS & {kind.__name__ for kind in type(follower).__mro__}
    inner = getattr(follower, "module", None) if averages else None
    return unwrap(inner if isinstance(inner, nn.Module) else follower)


def tensors_of(follower: object) -> Mapping[str, Tensor]:
    """The tensors of a follower, by the model's names."""
    if isinstance(follower, dict):
        return follower
    if isinstance(follower, nn.Module):
        return {name: tensor for name, tensor, _ in named_tensors(followed(follower))}
    raise _not_a_follower(follower)


def refuse_bad_followers(followers: object, model: nn.Module, who: str) -> None:
    """Refuse anything but a list of followers, and a list that would cut the same object twice."""
    if isinstance(followers, nn.Module | dict):
        raise ShrinkError(
            f"{who}: followers: got one {type(followers).__name__}. Pass a list, even for one: followers=[...]."
        )
    listed = followers if isinstance(followers, Sequence) and not isinstance(followers, str) else [followers]
    known = {id(unwrap(model)): "the model itself"}
    for place, follower in enumerate(listed):
        if not isinstance(follower, nn.Module | dict):
            raise _not_a_follower(follower)
        # Two wrappers around one module are the same follower, so compare the modules inside.
        core = id(followed(follower) if isinstance(follower, nn.Module) else follower)
        if core in known:
            raise ShrinkError(
                f"{who}: followers[{place}] ({type(follower).__name__}) is {known[core]}, and would be cut twice. "
                f"Leave it out; a follower is a copy with separate tensors."
            )
        known[core] = f"followers[{place}] again"


def refuse_missing(follower: Follower, tensors: Mapping[str, Tensor], names: Iterable[str], place: int) -> None:
    """Refuse a follower that lacks one of these tensors."""
    for name in names:
        if not isinstance(tensors.get(name), Tensor):
            inner = getattr(follower, "module", None)
            remedy = (
                "Its .module has it: pass that"
                if isinstance(inner, nn.Module) and name in tensors_of(inner)
                else "A follower is a copy of the model, an AveragedModel of it, or a dict of tensors with its names"
            )
            raise ShrinkError(f"{follower_label(follower, place)}: has no tensor {name!r}. {remedy}.")


def refuse_follower(
    follower: Follower,
    tensors: Mapping[str, Tensor],
    cuts: Sequence[Cut],
    names: Mapping[str, Sequence[str]],
    place: int,
) -> None:
    """Refuse a follower whose tensors do not have the names and shapes of the model's.

    Args:
        follower: A module or a dict.
        tensors: Its tensors by name.
        cuts: The cuts that it has to follow.
        names: By the first name of a tensor, all names under which it is tied.
        place: Its position in the list of followers.
    """
    refuse_missing(follower, tensors, [cut.tensor for cut in cuts], place)
    who = follower_label(follower, place)
    for cut in cuts:
        for name in names[cut.tensor]:
            if name in tensors and tuple(tensors[name].shape) != cut.before:
                raise ShrinkError(
                    f"{who}: {name!r} has shape {tuple(tensors[name].shape)}, the model's {cut.before}. "
                    f"Pass a follower to every shrink of the model, or make a new copy of the model."
                )
    # Only tensors of modules are resized in place. A dict gets new tensors under its keys, so its old ones may be of
    # any kind.
    if isinstance(follower, nn.Module):
        refuse_uncuttable(tensors, cuts, f"{who}: ")


def _not_a_follower(given: object) -> ShrinkError:
    return ShrinkError(
        f"followers: got {type(given).__name__}. "
        f"Pass a list of modules (a copy, an AveragedModel) or dicts of tensors by name."
    )


def follower_label(follower: Follower, place: int) -> str:
    """How error messages refer to a follower."""
    return f"followers[{place}] ({type(follower).__name__})"


def zero_followers(followers: Iterable[Follower], dead: Mapping[str, Tensor]) -> None:
    """Zero the pruned weights in every follower; averaging with zeros then keeps them zero."""
    for follower in followers:
        tensors = parameters_of(follower)
        for name, mask in dead.items():
            if name in tensors:
                weights = local(tensors[name])
                zero_dead([weights], mask.to(weights.device))


def refuse_mismatched_followers(followers: Iterable[Follower], parameters: Mapping[str, Tensor]) -> None:
    """Refuse a follower whose tensors differ in shape from the model's, or cannot be written to."""
    for place, follower in enumerate(followers):
        for name, tensor in parameters_of(follower).items():
            if name in parameters and tensor.shape != parameters[name].shape:
                raise ShrinkError(
                    f"followers[{place}]: {name!r} has shape {tuple(tensor.shape)}, the model's "
                    f"{tuple(parameters[name].shape)}. Make it from the model as it is now."
                )
            if name in parameters and not same_sharding(tensor, parameters[name]):
                raise ShrinkError(
                    f"followers[{place}]: {name!r} is not sharded over processes like the model's. Make it from the "
                    f"sharded model, for example as a dict of copies of its parameters."
                )
            if name in parameters and tensor.is_inference():
                raise ShrinkError(
                    f"followers[{place}]: {name!r} was made in inference mode and cannot be changed. Make it outside "
                    f"of inference mode."
                )


def parameters_of(follower: Follower) -> Mapping[str, Tensor]:
    """The parameters of a follower, by their names without wrappers."""
    return follower if isinstance(follower, dict) else named_parameters(followed(follower))


def refuse_holders(model: nn.Module, edits: Edits, wrapper: nn.Module | None = None) -> None:
    """Refuse to cut tensors that a DDP wrapper or another tensor object also uses, or that cannot be changed.

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
                f"{who}tensor {name!r} was made in inference mode and cannot be changed. Build the model outside of "
                f"inference mode."
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
    # type() instead of isinstance(), which reads __class__ of a dead weak proxy and raises ReferenceError.
    wrappers = (held for held in gc.get_objects() if issubclass(type(held), DistributedDataParallel))
    # A wrapper that lost its reducer (`disarm`) no longer has buffers for gradients.
    armed = (wrapper for wrapper in wrappers if wrapper is not leaving and hasattr(wrapper, "reducer"))
    return any(id(parameter) in parameters for wrapper in armed for parameter in wrapper.parameters())


def _refuse_shared_memory(tensors: Mapping[str, Tensor], touched: set[str]) -> None:
    for one, other in sharing_memory(tensors):
        if touched & {one, other}:
            raise ShrinkError(
                f"tensors {one!r} and {other!r} share memory but are two objects, so a cut would separate them. "
                f"Tie them as one Parameter, or make one a copy."
            )


# Replacing a DDP wrapper ---------------------------------------------------------------------------------------------

# Constructor arguments that a wrapper stores under the same names. `_options` handles those for buckets and buffers.
OPTIONS = ("device_ids", "output_device", "dim", "process_group", "find_unused_parameters")
FLAGS = ("gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params", "batched_grad_copy")
# Features that cannot be carried over, because they are tied to the old reducer or leave hooks on the model.
FOREIGN = {
    "_comm_hooks": "a communication hook, whose state keepk does not know",
    "mixed_precision": "mixed precision, which leaves hooks on the model",
    "_delay_all_reduce_params": "parameters with a delayed all-reduce, in buffers of their old size",
}
MEGABYTE = 1024 * 1024
REPLACED = (
    "forward: this DistributedDataParallel wrapper was replaced when channels were removed from its model. "
    "Use the wrapper that step returned: ddp = pruner.step(ddp)."
)
TAKEN_BACK = (
    "forward: an event failed on some rank after channels were removed from the model of this DistributedDataParallel "
    "wrapper. The channels are back, but the wrapper has lost its hooks on them. Wrap the model again."
)


def disarm(wrapper: DistributedDataParallel, why: str = REPLACED) -> None:
    """Remove a wrapper's reducer and its hooks on the parameters; calling the wrapper then raises `why`."""
    wrapper._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # it has no types
    del wrapper.reducer

    def refuse_forward(*_: object) -> NoReturn:
        raise ShrinkError(why)

    wrapper.register_forward_pre_hook(refuse_forward)


def rewrapped(wrapper: DistributedDataParallel) -> DistributedDataParallel:
    """A new wrapper with the options of an old one around the same module."""
    new = DistributedDataParallel(wrapper.module, **_options(wrapper))
    new.training = wrapper.training  # not .train(), which would also change the modules inside
    return new


def refuse_other_wrapper(wrapper: Any, model: nn.Module) -> None:
    """Refuse anything but a DDP wrapper of this model that still has its reducer and can be rebuilt."""
    if not isinstance(wrapper, DistributedDataParallel):
        raise ShrinkError(
            f"step: got {type(wrapper).__name__}. Pass the DistributedDataParallel wrapper of the model, or nothing."
        )
    if unwrap(wrapper) is not model:
        raise ShrinkError(
            "step: the wrapper holds a different model than the Pruner. Pass a wrapper of the Pruner's model."
        )
    if not hasattr(wrapper, "reducer"):
        raise ShrinkError(
            "step: the wrapper was replaced in an earlier event. Use the wrapper that step returned: "
            "ddp = pruner.step(ddp)."
        )
    for attribute, what in FOREIGN.items():
        if getattr(wrapper, attribute, None):
            raise ShrinkError(
                f"step: the wrapper has {what}, so it cannot be rebuilt. Delete the wrapper before the event, call "
                f"step() on every rank, and wrap the model again."
            )


def _options(wrapper: DistributedDataParallel) -> dict[str, Any]:
    # No initial synchronization: all ranks have the same weights, and buffers may legitimately differ by rank.
    options: dict[str, Any] = {"init_sync": False, **{name: getattr(wrapper, name) for name in OPTIONS}}
    if getattr(wrapper, "device_mesh", None) is not None:
        options["process_group"], options["device_mesh"] = None, wrapper.device_mesh
    if not wrapper.broadcast_buffers:
        # Newer versions of torch have renamed the option and warn about the old name.
        options["forward_sync_buffers" if hasattr(wrapper, "forward_sync_buffers") else "broadcast_buffers"] = False
    if getattr(wrapper, "bucket_bytes_cap_list", None):
        options["bucket_cap_mb_list"] = [size / MEGABYTE for size in wrapper.bucket_bytes_cap_list]
    elif not getattr(wrapper, "bucket_bytes_cap_default", False):
        options["bucket_cap_mb"] = wrapper.bucket_bytes_cap / MEGABYTE
    return options | {name: True for name in FLAGS if getattr(wrapper, name, False)}
