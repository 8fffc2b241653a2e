"""A DistributedDataParallel wrapper around a model that changes its shapes: the old one lets go, a new one is made."""

from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepk.errors import ShrinkError
from keepk.graph.wrappers import unwrap

# What a wrapper is made with, as it keeps it. Buckets and buffers are not among them: see `_options`.
OPTIONS = ("device_ids", "output_device", "dim", "process_group", "find_unused_parameters")
FLAGS = ("gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params", "batched_grad_copy")
# What a wrapper may have besides, which is tied to its own reducer or leaves hooks on the model.
FOREIGN = {
    "_comm_hooks": "a communication hook, whose state is its own",
    "mixed_precision": "mixed precision, which leaves hooks on the model",
    "_delay_all_reduce_params": "parameters that are reduced late, in memory of their old size",
}
MEGABYTE = 1024 * 1024


REPLACED = (
    "forward: this DistributedDataParallel wrapper was replaced when channels were taken out of its model. "
    "Go on with what step returned: ddp = pruner.step(ddp)."
)
TAKEN_BACK = (
    "forward: an event failed on some rank after channels were taken out of the model of this DistributedDataParallel "
    "wrapper. They are back, but the wrapper has lost its hold on them. Wrap the model again."
)


def disarm(wrapper: DistributedDataParallel, why: str = REPLACED) -> None:
    """Take away a wrapper's reducer, and with it its hooks on the parameters; it cannot be used afterwards."""
    wrapper._remove_autograd_hooks()  # type: ignore[no-untyped-call]  # it has no types
    del wrapper.reducer

    def refuse_forward(*_: object) -> NoReturn:
        raise ShrinkError(why)

    wrapper.register_forward_pre_hook(refuse_forward)


def rewrapped(wrapper: DistributedDataParallel) -> DistributedDataParallel:
    """A new wrapper with the options of an old one around the same module."""
    new = DistributedDataParallel(wrapper.module, **_options(wrapper))
    new.training = wrapper.training  # what is inside has its own modes
    return new


def refuse_other_wrapper(wrapper: Any, model: nn.Module) -> None:
    """Refuse what is no DDP wrapper of this model, has lost its reducer before, or cannot be made anew."""
    if not isinstance(wrapper, DistributedDataParallel):
        raise ShrinkError(
            f"step: got {type(wrapper).__name__}. Give the DistributedDataParallel wrapper of the model, or nothing."
        )
    if unwrap(wrapper) is not model:
        raise ShrinkError("step: the wrapper is around another model than the Pruner's. Give the wrapper of that one.")
    if not hasattr(wrapper, "reducer"):
        raise ShrinkError(
            "step: the wrapper was replaced in an event before. Go on with what step returned: ddp = pruner.step(ddp)."
        )
    for attribute, what in FOREIGN.items():
        if getattr(wrapper, attribute, None):
            raise ShrinkError(
                f"step: the wrapper has {what}, so it cannot be made anew. Delete the wrapper before the event, call "
                f"step() on every rank, and wrap the model again."
            )


def _options(wrapper: DistributedDataParallel) -> dict[str, Any]:
    # All ranks have the same weights already, and buffers that a rank has for itself stay its own.
    options: dict[str, Any] = {"init_sync": False, **{name: getattr(wrapper, name) for name in OPTIONS}}
    if getattr(wrapper, "device_mesh", None) is not None:
        options["process_group"], options["device_mesh"] = None, wrapper.device_mesh
    if not wrapper.broadcast_buffers:
        # torch renames the option, and warns of the old name.
        options["forward_sync_buffers" if hasattr(wrapper, "forward_sync_buffers") else "broadcast_buffers"] = False
    if getattr(wrapper, "bucket_bytes_cap_list", None):
        options["bucket_cap_mb_list"] = [size / MEGABYTE for size in wrapper.bucket_bytes_cap_list]
    elif not getattr(wrapper, "bucket_bytes_cap_default", False):
        options["bucket_cap_mb"] = wrapper.bucket_bytes_cap / MEGABYTE
    return options | {name: True for name in FLAGS if getattr(wrapper, name, False)}
