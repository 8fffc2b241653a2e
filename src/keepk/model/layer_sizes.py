"""Sizes that torch's layers keep as attributes (``out_features``, ``groups``), and the axes they follow.

torch uses only some of them in forward (``groups``, ``num_groups``), but ``repr`` and the user's code read the others,
so a cut updates them all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Sized:
    """An attribute that repeats the size of an axis.

    Attributes:
        module: The module's path.
        attribute: Its attribute.
        item: Which entry, if the attribute is a tuple or list.
        tensor: The tensor whose axis it follows.
        dim: The axis.
        times_groups: The attribute is the axis size times the number of groups.
        parts: The number of equal parts of the axis (the gates of an LSTM); the attribute is the size of one part.
        blocks: If above 0, the attribute is the number of remaining blocks of the axis, out of `blocks` at first.
    """

    module: str
    attribute: str
    tensor: str
    dim: int
    item: int | None = None
    times_groups: bool = False
    parts: int = 1
    blocks: int = 0


GATES = {"LSTM": 4, "GRU": 3}


def sized_attributes(model: nn.Module, first_names: dict[int, str]) -> Iterator[Sized]:
    """The size attributes of all layers of a model.

    Args:
        model: The model.
        first_names: By id of a parameter or buffer, its name; of a tied one, the first name.
    """
    for path, module in model.named_modules():
        for kind, describe in TABLE.items():
            if isinstance(module, kind):
                yield from describe(path, module, first_names)
                break
        else:
            # By name, because transformers is not a dependency: its Conv1D is a linear layer with a transposed weight.
            if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
                yield from _plain(path, first_names[id(module.weight)], nx=0, nf=1)


def _plain(path: str, tensor: str, **dims: int) -> Iterator[Sized]:
    """Attributes that are simply the size of a dim, as ``attribute=dim``."""
    for attribute, dim in dims.items():
        yield Sized(path, attribute, tensor, dim)


def _weight_name(module: nn.Module, names: dict[int, str]) -> str | None:
    """The tensor that has the weight's shape: the weight itself, or the parameter it is computed from."""
    parametrized = getattr(module, "parametrizations", {})
    if "weight" in parametrized:
        # Not module.weight.shape: computing the weight may change buffers (the power iteration of spectral norm).
        shape = _weight_shape(module)
        return next((names[id(p)] for p in parametrized["weight"].parameters() if p.shape == shape), None)
    # The older weight norm and spectral norm store it under different names.
    kept = (module._parameters.get(name) for name in ("weight", "weight_v", "weight_orig"))
    weight = next((parameter for parameter in kept if parameter is not None), None)
    return None if weight is None else names.get(id(weight))


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    """The shape of a layer's weight, from the layer's attributes."""
    if isinstance(module, nn.modules.conv._ConvNd):
        first, second = module.out_channels, module.in_channels // module.groups
        if module.transposed:
            first, second = module.in_channels, module.out_channels // module.groups
        return first, second, *module.kernel_size
    return tuple(int(getattr(module, name)) for name in ("out_features", "in_features"))


def _linear(path: str, module: nn.Linear, names: dict[int, str]) -> Iterator[Sized]:
    if name := _weight_name(module, names):
        yield from _plain(path, name, out_features=0, in_features=1)


def _convolution(path: str, module: nn.modules.conv._ConvNd, names: dict[int, str]) -> Iterator[Sized]:
    if name := _weight_name(module, names):
        first, second = ("in_channels", "out_channels") if module.transposed else ("out_channels", "in_channels")
        if module.groups > 1:
            yield Sized(path, "groups", name, 0, blocks=module.groups)
        yield Sized(path, first, name, 0)
        yield Sized(path, second, name, 1, times_groups=True)


def _batch_norm(path: str, module: nn.modules.batchnorm._NormBase, names: dict[int, str]) -> Iterator[Sized]:
    # With affine=False there are only the running statistics, with track_running_stats=False only the weight.
    for tensor in (module.weight, module.running_mean):
        if tensor is not None:
            yield from _plain(path, names[id(tensor)], num_features=0)
            return


def _layer_norm(path: str, module: nn.LayerNorm, names: dict[int, str]) -> Iterator[Sized]:
    if module.weight is not None:
        for dim in range(module.weight.ndim):
            yield Sized(path, "normalized_shape", names[id(module.weight)], dim, item=dim)


def _group_norm(path: str, module: nn.GroupNorm, names: dict[int, str]) -> Iterator[Sized]:
    if module.weight is not None:
        name = names[id(module.weight)]
        yield Sized(path, "num_groups", name, 0, blocks=module.num_groups)
        yield Sized(path, "num_channels", name, 0)


def _embedding(path: str, module: nn.Embedding, names: dict[int, str]) -> Iterator[Sized]:
    yield from _plain(path, names[id(module.weight)], num_embeddings=0, embedding_dim=1)


def _prelu(path: str, module: nn.PReLU, names: dict[int, str]) -> Iterator[Sized]:
    yield from _plain(path, names[id(module.weight)], num_parameters=0)


def _recurrent(path: str, module: nn.RNNBase, names: dict[int, str]) -> Iterator[Sized]:
    inner, outer = names[id(module.weight_hh_l0)], names[id(module.weight_ih_l0)]
    yield Sized(path, "input_size", outer, 1)
    yield Sized(path, "hidden_size", inner, 0, parts=GATES.get(module.mode, 1))
    if module.proj_size:
        yield Sized(path, "proj_size", inner, 1)


def _cell(path: str, module: nn.RNNCellBase, names: dict[int, str]) -> Iterator[Sized]:
    yield from _plain(path, names[id(module.weight_hh)], hidden_size=1)
    yield from _plain(path, names[id(module.weight_ih)], input_size=1)


def _bilinear(path: str, module: nn.Bilinear, names: dict[int, str]) -> Iterator[Sized]:
    yield from _plain(path, names[id(module.weight)], out_features=0, in1_features=1, in2_features=2)


TABLE: dict[type[nn.Module], Callable[..., Iterator[Sized]]] = {
    nn.Linear: _linear,
    nn.Bilinear: _bilinear,
    nn.modules.conv._ConvNd: _convolution,
    nn.modules.batchnorm._NormBase: _batch_norm,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding,
    nn.PReLU: _prelu,
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _cell,
}
