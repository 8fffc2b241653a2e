"""Who follows a model's weights: copies, averages, dicts of tensors."""

from collections.abc import Iterable, Mapping, Sequence

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
    raise _no_follower(follower)


def refuse_no_followers(followers: object, model: nn.Module, who: str) -> None:
    """Refuse what is no list of followers, and whoever would be cut twice: one named again, or the model itself."""
    if isinstance(followers, nn.Module | dict):
        raise ShrinkError(
            f"{who}: followers: got one {type(followers).__name__}. Give a list, also of one: followers=[...]."
        )
    listed = followers if isinstance(followers, Sequence) and not isinstance(followers, str) else [followers]
    known = {id(unwrap(model)): "the model itself"}
    for place, follower in enumerate(listed):
        if not isinstance(follower, nn.Module | dict):
            raise _no_follower(follower)
        core = id(followed(follower) if isinstance(follower, nn.Module) else follower)
        if core in known:
            raise ShrinkError(
                f"{who}: followers[{place}] ({type(follower).__name__}) is {known[core]}, which is cut once. "
                f"Leave it out; a follower is a copy with tensors of its own."
            )
        known[core] = f"followers[{place}] again"


def refuse_missing(follower: Follower, tensors: Mapping[str, Tensor], names: Iterable[str], place: int) -> None:
    """Refuse a follower that has not got all of these tensors."""
    for name in names:
        if not isinstance(tensors.get(name), Tensor):
            inner = getattr(follower, "module", None)
            remedy = (
                "Its .module has it: give that"
                if isinstance(inner, nn.Module) and name in tensors_of(inner)
                else "A follower is a copy of the model, an AveragedModel of it, or a dict of tensors with its names"
            )
            raise ShrinkError(f"{told(follower, place)}: has no tensor {name!r}. {remedy}.")


def _no_follower(given: object) -> ShrinkError:
    return ShrinkError(
        f"followers: got {type(given).__name__}. "
        f"Give a list of modules (a copy, an AveragedModel) or dicts of tensors by name."
    )


def told(follower: Follower, place: int) -> str:
    """A follower in an error."""
    return f"followers[{place}] ({type(follower).__name__})"


def zero_followers(followers: Iterable[Follower], dead: Mapping[str, Tensor]) -> None:
    """Zero in every follower what is dead; its own averaging then keeps it zero."""
    for follower in followers:
        tensors = parameters_of(follower)
        for name, mask in dead.items():
            if name in tensors:
                zero_dead([tensors[name].detach()], mask.to(tensors[name].device))


def refuse_strange_followers(followers: Iterable[Follower], parameters: Mapping[str, Tensor]) -> None:
    """Refuse a follower whose tensors are not shaped as the model's, or cannot be written to."""
    for place, follower in enumerate(followers):
        for name, tensor in parameters_of(follower).items():
            if name in parameters and tensor.shape != parameters[name].shape:
                raise ShrinkError(
                    f"followers[{place}]: {name!r} has shape {tuple(tensor.shape)}, the model's "
                    f"{tuple(parameters[name].shape)}. Make it from the model as it is now."
                )
            if name in parameters and tensor.is_inference():
                raise ShrinkError(
                    f"followers[{place}]: {name!r} was made in inference mode and cannot change. Make it outside of it."
                )


def parameters_of(follower: Follower) -> Mapping[str, Tensor]:
    """The parameters of a follower by the names that they have without wrappers."""
    return follower if isinstance(follower, dict) else named_parameters(followed(follower))
