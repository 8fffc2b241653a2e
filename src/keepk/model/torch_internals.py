"""Every private name of torch that keepk uses, in one place, checked when keepk is imported.

torch changes names with a leading underscore, and modules such as ``torch.utils._pytree``, without notice. A version of
torch that lacks one of them fails here, with that name, not in the middle of a run. keepk is tested with torch 2.13.
"""

import os
import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

try:
    from torch._C import DisableTorchFunction
    from torch._C import _current_graph_task_id as current_graph_task_id
    from torch._C import _get_mkldnn_enabled as get_mkldnn_enabled
    from torch._C import _LinAlgError as LinAlgError  # type: ignore[attr-defined]  # missing in torch's types
    from torch._C import _set_mkldnn_enabled as set_mkldnn_enabled
    from torch._C import _will_engine_execute_node as will_engine_execute
    from torch._ops import OpOverload, OpOverloadPacket
    from torch.fx.experimental import _config as symbolic_shapes_config
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.nn.modules.batchnorm import _NormBase as NormBase
    from torch.nn.utils.parametrizations import _WeightNorm as WeightNormParametrization
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

    make_subclass = torch.Tensor._make_subclass
except (ImportError, AttributeError) as missing:
    raise ImportError(
        f"keepk uses internals of torch, and torch {torch.__version__} lacks one of them: {missing}. "
        f"Install a version that keepk is tested with: pip install torch==2.13.0"
    ) from missing

# The hooks that FSDP2 leaves on a module, and the sets of flags beside them.
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def take_off_fsdp(module: torch.nn.Module) -> Callable[[], None]:
    """Make a module that FSDP2 wraps an ordinary one, in place; its parameters stay as they are.

    torch has no public way back from `fully_shard`. Its traces on a module are a class, hooks, entries in two dicts of
    the module, and one in a global dict; the hooks of its submodules are those that are defined in its package.

    Returns:
        A function that puts everything back.
    """
    # Imported late, because they import DTensor, which takes a second. There is a DTensor if this is called.
    try:
        from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY  # noqa: PLC0415 - see above
        from torch.distributed._composable_state import _module_state_mapping as states  # noqa: PLC0415 - see above
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - see above
    except ImportError as missing:
        raise ImportError(
            f"keepk uses internals of torch's FSDP2, and torch {torch.__version__} lacks one of them: {missing}. "
            f"Install a version that keepk is tested with: pip install torch==2.13.0"
        ) from missing
    kind, entries, of_hooks = module.__class__, dict[str, Any](), dict[str, Any]()
    state = states.get(module)
    for name in HOOKS:
        hooks: MutableMapping[int, Any] = getattr(module, name)
        of_hooks[name] = dict(hooks)
        for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
            del hooks[key]
    if isinstance(module, FSDPModule):
        module.__class__ = kind.__bases__[1]  # it was made as (FSDPModule, the original class)
        for key in (STATE_KEY, REGISTRY_KEY):
            entries[key] = module.__dict__.pop(key, {})
        states.pop(module, None)

    def put_back() -> None:
        module.__class__ = kind
        module.__dict__.update(entries)
        if state is not None:
            states[module] = state
        for name, hooks in of_hooks.items():
            getattr(module, name).clear()
            getattr(module, name).update(hooks)

    return put_back


def sizes_as_unknown() -> AbstractContextManager[Any]:
    """A context in which `torch.export` does not assume that a dynamic size is neither 0 nor 1.

    Comparisons of the size then become guards of the exported program, which `guards_against_one` reads.
    """
    if hasattr(symbolic_shapes_config, "backed_size_oblivious"):  # missing in torch 2.6
        patched: AbstractContextManager[Any] = symbolic_shapes_config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        return patched
    return nullcontext()


def guards_against_one(sizes: Sequence[torch.SymInt]) -> list[str]:
    """The questions about sizes of a model's inputs that its own code asked, and whose answer differs for a size of 1.

    Questions of torch's own code are left out: most of them are about strides (whether an image of one pixel is in the
    channels_last format), and change no value.

    Returns:
        Conditions that hold for the sizes in the graph and not for 1; the size is called "batch" in them.
    """
    if not sizes:
        return []
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    asked = [guard.expr for guard in sizes[0].node.shape_env.guards if not _is_asked_by_torch(guard)]
    broken = [it for it in asked if it.subs(dict.fromkeys(symbols, 1)) == False]  # noqa: E712 - that of sympy
    return [str(it.subs({symbol: type(symbol)("batch") for symbol in symbols})) for it in broken]


def _is_asked_by_torch(guard: Any) -> bool:
    place = getattr(guard.sloc, "framework_loc", None)  # the innermost frame outside the code that evaluates guards
    return place is not None and place.filename.startswith(f"{Path(torch.__file__).parent}{os.sep}")


def fsdp_modules() -> list[torch.nn.Module]:
    """All modules of this process that `fully_shard` was applied to, whichever model they belong to."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    composable = sys.modules.get("torch.distributed._composable_state")
    if not hasattr(fsdp, "FSDPModule") or composable is None:
        return []
    # `take_off_fsdp` checks that this version of torch has the dict.
    known: Iterable[torch.nn.Module] = list(getattr(composable, "_module_state_mapping", ()))
    return [module for module in known if isinstance(module, fsdp.FSDPModule)]


def holds_gradients(module: torch.nn.Module) -> bool:
    """Whether FSDP2 holds gradients of a module that it has not summed yet, in the middle of gradient accumulation."""
    fsdp: Any = module
    state = fsdp._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    groups = () if state is None else state._fsdp_param_groups
    held = (it for group in groups for it in group.fsdp_params)
    return any(group._partial_reduce_output is not None for group in groups) or any(
        it.unsharded_accumulated_grad is not None
        or getattr(getattr(it, "_unsharded_param", None), "grad", None) is not None
        for it in held
    )


def _is_of_fsdp(hook: Any) -> bool:
    return str(getattr(getattr(hook, "hook", hook), "__module__", "")).startswith("torch.distributed.fsdp.")


__all__ = [
    "BatchNormBase",
    "DisableTorchFunction",
    "LinAlgError",
    "NormBase",
    "OpOverload",
    "OpOverloadPacket",
    "StorageWeakRef",
    "TorchDispatchMode",
    "WeightNormParametrization",
    "current_graph_task_id",
    "disable_current_modes",
    "fsdp_modules",
    "get_mkldnn_enabled",
    "guards_against_one",
    "holds_gradients",
    "make_subclass",
    "set_mkldnn_enabled",
    "sizes_as_unknown",
    "take_off_fsdp",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "will_engine_execute",
]
