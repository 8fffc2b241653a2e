"""The user's module inside torch's wrappers, its parameters' names, and the adapters among them."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside `DistributedDataParallel`, `DataParallel` and `torch.compile` wrappers."""
    inner = _wrapped_name(model)
    return unwrap(getattr(model, inner)) if inner else model


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters by their names in the unwrapped model; a tied parameter under each of its names."""
    # Globs of spaces and saved states use these names, so that a run can be wrapped or resumed without the wrapper.
    modules = model.named_modules(remove_duplicate=False)
    inner_names = ((path, _wrapped_name(module)) for path, module in modules)
    wrapped = [f"{path}.{inner}" if path else inner for path, inner in inner_names if inner]
    found = model.named_parameters(remove_duplicate=False)
    return {_without(name, wrapped): parameter for name, parameter in found}


def _wrapped_name(module: nn.Module) -> str | None:
    """The attribute of a wrapper that refers to the wrapped module; None for a module that is not a wrapper."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    # torch.compile's class lives in torch._dynamo, whose import alone takes seconds.
    return "_orig_mod" if "_orig_mod" in module._modules else None


def _without(name: str, wrapped: Sequence[str]) -> str:
    """A parameter's name without the attributes of wrappers."""
    # The deepest wrapper first, so that the shorter paths in front of it still match.
    for path in sorted(wrapped, key=len, reverse=True):
        if name.startswith(path + "."):
            outer = path.rpartition(".")[0]
            name = f"{outer}.{name[len(path) + 1 :]}" if outer else name[len(path) + 1 :]
    return name


def adapters_of(model: nn.Module) -> dict[str, str]:
    """By name of an adapter's parameter, the path of the adapter: ``layer.lora_A`` for ``layer.lora_A.default.weight``.

    Layers of peft list the names of their adapters (``adapter_layer_names``). Elsewhere, a name that starts with
    ``lora_`` is one.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    return {name: found for name, _ in model.named_parameters() if (found := _adapter(name.split("."), modules))}


def _adapter(names: Sequence[str], modules: Mapping[str, nn.Module]) -> str:
    """The path of the adapter that a parameter with these path components belongs to; empty for other parameters."""
    for place, name in enumerate(names):
        layer = modules.get(".".join(names[:place]))
        if name.startswith("lora_") or name in getattr(layer, "adapter_layer_names", ()):
            return ".".join(names[: place + 1])
    return ""
