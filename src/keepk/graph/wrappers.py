"""The user's own module inside the wrappers of torch, and the names that it gives its parameters."""

from collections.abc import Sequence

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside `DistributedDataParallel`, `DataParallel` and `torch.compile` wrappers."""
    inner = _wrapped_name(model)
    return unwrap(getattr(model, inner)) if inner else model


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters under the names that the unwrapped model gives them; a tied one under each of its names."""
    modules = model.named_modules(remove_duplicate=False)
    inner_names = ((path, _wrapped_name(module)) for path, module in modules)
    wrapped = [f"{path}.{inner}" if path else inner for path, inner in inner_names if inner]
    found = model.named_parameters(remove_duplicate=False)
    return {_without(name, wrapped): parameter for name, parameter in found}


def _wrapped_name(module: nn.Module) -> str | None:
    """The attribute under which a wrapper holds the module that it wraps; None for a module that wraps nothing."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    # torch.compile's class lives in torch._dynamo, whose import alone takes seconds.
    return "_orig_mod" if "_orig_mod" in module._modules else None


def _without(name: str, wrapped: Sequence[str]) -> str:
    # The deepest wrapper first, so that the shorter paths in front of it still fit.
    for path in sorted(wrapped, key=len, reverse=True):
        if name.startswith(path + "."):
            outer = path.rpartition(".")[0]
            name = f"{outer}.{name[len(path) + 1 :]}" if outer else name[len(path) + 1 :]
    return name
