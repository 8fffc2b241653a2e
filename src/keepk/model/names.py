"""The parameters of a model: their names without torch's wrappers, adapters among them, and weight norm.

Weight norm computes a weight w = g v / |v| from two parameters, a direction v and a length g (`lengths_of`). A
direction must not be zeroed, because 0 / 0 is NaN: a channel is masked by zeroing its length. The norm of a direction
says nothing about the weight (|v| cancels), so channels are ranked by w. A ranking by v kept filters of length 0
because their directions were long.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from keepk.errors import KeepkError
from keepk.model.torch_internals import WeightNormParametrization


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Every parameter and buffer once, under its first name, and whether it is a parameter."""
    for name, parameter in model.named_parameters():
        yield name, parameter, True
    for name, buffer in model.named_buffers():
        yield name, buffer, False


def sharded(model: nn.Module) -> str | None:
    """The part of a model that is sharded over processes (FSDP, DTensor), as words for an error; None if none is."""
    for path, module in model.named_modules():
        # By name: importing FSDP takes long, and not every build of torch has it.
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            return f"module {path!r}" if path else "the model"
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if hasattr(tensor, "device_mesh"):
            return f"tensor {name!r}"
    return None


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
    # The deepest wrapper first, so that the shorter paths of outer wrappers still match.
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


def adapted_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of layers of peft that are not of its adapters, which merging adds to them."""
    found = set[nn.Parameter]()
    for module in model.modules():
        if adapters := getattr(module, "adapter_layer_names", ()):
            own = module.named_parameters(remove_duplicate=False)
            found |= {parameter for name, parameter in own if name.partition(".")[0] not in adapters}
    return found


def _adapter(names: Sequence[str], modules: Mapping[str, nn.Module]) -> str:
    """The path of the adapter that a parameter with these path components belongs to; empty for other parameters."""
    for place, name in enumerate(names):
        layer = modules.get(".".join(names[:place]))
        if name.startswith("lora_") or name in getattr(layer, "adapter_layer_names", ()):
            return ".".join(names[: place + 1])
    return ""


def changed_model(kind: type[KeepkError], name: str, how: str) -> KeepkError:
    """The error about a parameter that was changed or replaced; `how` says how."""
    return kind(
        f"parameter {name!r}: {how}. Change the model first (load, move, wrap, replace layers), then make the Pruner."
    )


def refuse_other_parameters(model: nn.Module, known: Mapping[str, nn.Parameter], kind: type[KeepkError]) -> None:
    """Refuse a model in which a name now refers to a different parameter object."""
    # Masks, hooks and optimizer state are tied to the object. With another one in its place they would silently apply
    # to a parameter that the model no longer uses.
    now = named_parameters(model)
    for name, parameter in known.items():
        if now.get(name) is not parameter:
            raise changed_model(kind, name, "the model has a different object than when the Pruner was made")


# Weight norm ----------------------------------------------------------------------------------------------------------


def lengths_of(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """By direction v, its length g, for all weight-normed layers of a model.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    >>> [(tuple(v.shape), tuple(g.shape)) for v, g in lengths_of(layer).items()]
    [((2, 3), (2, 1))]
    """
    return {direction: length for module in model.modules() for direction, length in _pairs(module)}


def weight_of(direction: Tensor, length: Tensor) -> Tensor:
    """The weight g v / |v|, in float32 or float64; zero where the direction is zero.

    >>> weight_of(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([[10.0], [1.0]]))
    tensor([[6., 8.],
            [0., 0.]])
    """
    unit, _ = _unit(direction, length)
    return length * unit


def weight_grad_of(direction: Tensor, length: Tensor) -> Tensor | None:
    r"""The gradient of the weight from the gradients of direction and length; None if either has none.

    .. math:: dL/dw = (dL/dg)\; v / |v| + (|v| / g)\; dL/dv

    Where g is zero, dL/dv is zero whatever dL/dw is, so only the first term is known.
    """
    if direction.grad is None or length.grad is None:
        return None
    unit, norm = _unit(direction.detach(), length)
    along = torch.where(length == 0, 0, norm / length)
    return length.grad * unit + along * direction.grad


def dims_of_length(direction: Tensor, length: Tensor) -> list[int]:
    """The dims of a direction over which its norm is taken: those that share one length.

    >>> dims_of_length(torch.zeros(2, 3), torch.zeros(2, 1)), dims_of_length(torch.zeros(2, 3), torch.zeros(()))
    ([1], [0, 1])
    """
    return [dim for dim in range(direction.ndim) if length.ndim == 0 or length.shape[dim] == 1]


def _unit(direction: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The unit vector v / |v|, and |v|, over the dims that share one length."""
    # In half precision a sum of squares overflows at 65,504 and loses small entries.
    wide = direction if direction.dtype == torch.float64 else direction.float()
    norm = torch.linalg.vector_norm(wide, dim=dims_of_length(wide, length), keepdim=True)
    return wide / norm.where(norm > 0, 1), norm


def _pairs(module: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """The directions of a module with their lengths, in both of torch's implementations."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):  # of torch.nn.utils.weight_norm, the older way
            yield getattr(module, f"{hook.name}_v"), getattr(module, f"{hook.name}_g")
    for found in module.children():
        if isinstance(found, nn.ModuleDict):  # that is where torch keeps parametrizations
            lists = (it for it in found.values() if isinstance(it, ParametrizationList))
            yield from (_pair(it) for it in lists if isinstance(it[0], WeightNormParametrization))


def _pair(found: ParametrizationList) -> tuple[nn.Parameter, nn.Parameter]:
    direction, length = found.original1, found.original0  # torch stores g first
    assert isinstance(direction, nn.Parameter)
    assert isinstance(length, nn.Parameter)
    return direction, length
