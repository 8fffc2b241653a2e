"""Who follows a model's weights: copies, averages, dicts of tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from keepk.cut.zero import zero_dead
from keepk.errors import ShrinkError
from keepk.graph.tracer import named_tensors
from keepk.graph.wrappers import named_parameters, unwrap

Follower = nn.Module | dict[str, Tensor]


def followed(follower: nn.Module) -> nn.Module:
    """The module that is built like the model."""
    return unwrap(follower.module if isinstance(follower, AveragedModel) else follower)


def tensors_of(follower: object) -> Mapping[str, Tensor]:
    """The tensors of a follower by the model's names."""
    if isinstance(follower, dict):
        return follower
    if isinstance(follower, nn.Module):
        return {name: tensor for name, tensor, _ in named_tensors(followed(follower))}
    raise ShrinkError(
        f"followers: got {type(follower).__name__}. "
        f"Give modules (a copy, an AveragedModel) or dicts of tensors by name."
    )


def zero_followers(followers: Iterable[Follower], dead: Mapping[str, Tensor]) -> None:
    """Zero in every follower what is dead; its own averaging then keeps it zero."""
    for follower in followers:
        tensors = _parameters(follower)
        for name, mask in dead.items():
            if name in tensors:
                zero_dead([tensors[name].detach()], mask.to(tensors[name].device))


def refuse_strange_followers(followers: Iterable[Follower], parameters: Mapping[str, Tensor]) -> None:
    """Refuse a follower whose tensors are not shaped as the model's, or cannot be written to."""
    for place, follower in enumerate(followers):
        for name, tensor in _parameters(follower).items():
            if name in parameters and tensor.shape != parameters[name].shape:
                raise ShrinkError(
                    f"followers[{place}]: {name!r} has shape {tuple(tensor.shape)}, the model's "
                    f"{tuple(parameters[name].shape)}. Make it from the model as it is now."
                )
            if name in parameters and tensor.is_inference():
                raise ShrinkError(
                    f"followers[{place}]: {name!r} was made in inference mode and cannot change. Make it outside of it."
                )


def _parameters(follower: Any) -> Mapping[str, Tensor]:
    return follower if isinstance(follower, dict) else named_parameters(followed(follower))
