"""Followers: copies of a model, averages of it (EMA), and dicts of its tensors, which are cut and masked with it."""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from keepk.cut.holders import refuse_uncuttable
from keepk.cut.zero import zero_dead
from keepk.errors import ShrinkError
from keepk.graph.edits import Cut
from keepk.graph.tracer import named_tensors
from keepk.graph.wrappers import named_parameters, unwrap

Follower = nn.Module | dict[str, Tensor]


def followed(follower: nn.Module) -> nn.Module:
    """The module inside a follower that has the model's structure and names."""
    return unwrap(follower.module if isinstance(follower, AveragedModel) else follower)


def tensors_of(follower: object) -> Mapping[str, Tensor]:
    """The tensors of a follower, by the model's names."""
    if isinstance(follower, dict):
        return follower
    if isinstance(follower, nn.Module):
        return {name: tensor for name, tensor, _ in named_tensors(followed(follower))}
    raise _no_follower(follower)


def refuse_no_followers(followers: object, model: nn.Module, who: str) -> None:
    """Refuse anything but a list of followers, and a list that would cut the same object twice."""
    if isinstance(followers, nn.Module | dict):
        raise ShrinkError(
            f"{who}: followers: got one {type(followers).__name__}. Give a list, also of one: followers=[...]."
        )
    listed = followers if isinstance(followers, Sequence) and not isinstance(followers, str) else [followers]
    known = {id(unwrap(model)): "the model itself"}
    for place, follower in enumerate(listed):
        if not isinstance(follower, nn.Module | dict):
            raise _no_follower(follower)
        # Two wrappers around one module are one follower: compare what is inside.
        core = id(followed(follower) if isinstance(follower, nn.Module) else follower)
        if core in known:
            raise ShrinkError(
                f"{who}: followers[{place}] ({type(follower).__name__}) is {known[core]}, which is cut once. "
                f"Leave it out; a follower is a copy with separate tensors."
            )
        known[core] = f"followers[{place}] again"


def refuse_missing(follower: Follower, tensors: Mapping[str, Tensor], names: Iterable[str], place: int) -> None:
    """Refuse a follower that lacks one of these tensors."""
    for name in names:
        if not isinstance(tensors.get(name), Tensor):
            inner = getattr(follower, "module", None)
            remedy = (
                "Its .module has it: give that"
                if isinstance(inner, nn.Module) and name in tensors_of(inner)
                else "A follower is a copy of the model, an AveragedModel of it, or a dict of tensors with its names"
            )
            raise ShrinkError(f"{told(follower, place)}: has no tensor {name!r}. {remedy}.")


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
    who = told(follower, place)
    for cut in cuts:
        for name in names[cut.tensor]:
            if name in tensors and tuple(tensors[name].shape) != cut.before:
                raise ShrinkError(
                    f"{who}: {name!r} has shape {tuple(tensors[name].shape)}, the model's {cut.before}. "
                    f"Pass a follower to every shrink of the model, or make a new copy of the model."
                )
    # The tensors of a dict are replaced under their keys, never resized in place, so they may be of any kind.
    if isinstance(follower, nn.Module):
        refuse_uncuttable(tensors, cuts, f"{who}: ")


def _no_follower(given: object) -> ShrinkError:
    return ShrinkError(
        f"followers: got {type(given).__name__}. "
        f"Give a list of modules (a copy, an AveragedModel) or dicts of tensors by name."
    )


def told(follower: Follower, place: int) -> str:
    """How error messages refer to a follower."""
    return f"followers[{place}] ({type(follower).__name__})"


def zero_followers(followers: Iterable[Follower], dead: Mapping[str, Tensor]) -> None:
    """Zero the pruned weights in every follower; averaging with zeros then keeps them zero."""
    for follower in followers:
        tensors = parameters_of(follower)
        for name, mask in dead.items():
            if name in tensors:
                zero_dead([tensors[name].detach()], mask.to(tensors[name].device))


def refuse_strange_followers(followers: Iterable[Follower], parameters: Mapping[str, Tensor]) -> None:
    """Refuse a follower whose tensors differ in shape from the model's, or cannot be written to."""
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
    """The parameters of a follower, by the names that they have without wrappers."""
    return follower if isinstance(follower, dict) else named_parameters(followed(follower))
