"""Replacing the `DistributedDataParallel` wrapper of a model whose shapes have changed.

A wrapper's reducer allocates buffers for gradients when it is built and hooks into every parameter. Neither can be
resized, so an event disarms the old wrapper and builds a new one with the same options.
"""

from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from keepk.errors import ShrinkError
from keepk.model.names import unwrap

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
