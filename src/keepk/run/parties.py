"""Who takes part in a run, checked before it begins: the spaces, the channels of the model, the optimizers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from keepk.cut.followers import Follower, parameters_of, refuse_missing, tensors_of
from keepk.cut.optimizer_state import refuse_factored, refuse_foreign_state, refuse_stranger, refuse_wrapping
from keepk.errors import PlanError, SpaceError
from keepk.graph.given import TraceInputs, no_model, quantised_module, refuse_quantised
from keepk.graph.trace import trace_inputs
from keepk.graph.weight_norm import lengths_of
from keepk.graph.wrappers import unwrap
from keepk.plan.names import shown
from keepk.plan.phases import Phase, Plan
from keepk.plan.spaces import ChannelSpace, Space, WeightSpace
from keepk.run.channel_members import NoChannelsError, find_channels
from keepk.run.channel_side import ChannelSide
from keepk.run.resolve import find_frozen
from keepk.run.surgery import Replayed, Surgery
from keepk.run.weight_side import WeightSide


def refuse_wrong_types(model: object, spaces: object, phases: object, shrink: object) -> None:
    """Refuse arguments of a `Pruner` that are not of their kinds."""
    if not isinstance(model, nn.Module):
        raise SpaceError(f"Pruner: {no_model(model)}")
    listed = [spaces] if isinstance(spaces, Space) else spaces
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(it, Space) for it in listed):
        raise SpaceError(
            f"Pruner: spaces={shown(spaces)}. Give a list of keepk.weights(...) and keepk.channels(...), at least one."
        )
    if phases is not None and not (
        isinstance(phases, list | tuple) and phases and all(isinstance(it, Phase) for it in phases)
    ):
        raise PlanError(f"Pruner: phases={shown(phases)}. Give a list of keepk.Phase(...), at least one.")
    if not isinstance(shrink, str) or shrink not in ("each", "end", "never"):
        raise PlanError(f'Pruner: shrink={shown(shrink)}. Give "each", "end" or "never".')


def listed_spaces(spaces: Space | Sequence[Space]) -> tuple[list[WeightSpace], list[ChannelSpace]]:
    """The spaces of weights and those of channels; each has a name of its own."""
    listed = [spaces] if isinstance(spaces, Space) else list(spaces)
    names = [space.name for space in listed]
    for name in names:
        if names.count(name) > 1:
            raise SpaceError(f"space {name!r}: the name is given twice. Give each space a name of its own.")
    weights = [space for space in listed if isinstance(space, WeightSpace)]
    return weights, [space for space in listed if isinstance(space, ChannelSpace)]


def channel_side(
    model: nn.Module,
    inputs: TraceInputs | None,
    spaces: Sequence[ChannelSpace],
    optimizers: Sequence[torch.optim.Optimizer],
    followers: Sequence[Follower],
    replayed: Replayed,
) -> ChannelSide | None:
    """The channels of a model, by one trace; None if no space asks for any."""
    if not spaces:
        return None
    if inputs is None:
        raise SpaceError(
            f"space {spaces[0].name!r}: channels are found by a trace, which needs an input. "
            f"Give Pruner(..., example=...), such as one batch."
        )
    inner = unwrap(model)
    graph = trace_inputs(inner, inputs)
    modules = dict(inner.named_modules(remove_duplicate=False))
    try:
        found = find_channels(graph, modules, spaces)
    except NoChannelsError as error:
        if not (quantised := quantised_module(inner)):
            raise
        raise SpaceError(
            f"{str(error).partition(': select=')[0]}: {quantised}, so its channels cannot be followed. "
            f"Prune first and quantise afterwards: give the model as it was before it was prepared."
        ) from error
    side = ChannelSide(graph, inner, found, Surgery(inner, graph, optimizers, followers, replayed))
    refuse_quantised(inner, SpaceError, side.touched)
    _refuse_without_values(side)
    with torch.no_grad():
        side.try_metrics()
    return side


def _refuse_without_values(side: ChannelSide) -> None:
    for name, tensor in side.touched.items():
        if tensor.is_meta:
            raise SpaceError(
                f"parameter {name!r} is on the meta device and has no values, so its channels cannot be ranked. "
                f"Load the weights first; keepk.trace and keepk.inspect need none."
            )


def refuse_unfit_followers(followers: Sequence[Follower], weights: WeightSide, channels: ChannelSide | None) -> None:
    """Refuse a follower without the tensors of the spaces; a dict may be of trained weights alone."""
    touched = channels.touched if channels else {}
    for place, follower in enumerate(followers):
        for tensors, needed in ((parameters_of(follower), weights.parameters), (tensors_of(follower), touched)):
            of_dict = (name for name, tensor in needed.items() if tensor.requires_grad)
            refuse_missing(follower, tensors, of_dict if isinstance(follower, dict) else needed, place)


def refuse_weights_that_end_before_channels(plan: Plan, weights: WeightSide, channels: ChannelSide | None) -> None:
    """Refuse a plan in which weights are at K while channels with such weights still go: there would be fewer."""
    for name, it in (channels.members if channels else {}).items():
        last = plan[name].index(it.keep) if it.keep < it.total else -1
        touched = {tensor for layer in it.layers for tensor, _, _ in layer.axes}
        for other, members in weights.members.items():
            done = plan[other].index(members.keep)
            if done < last and touched & set(members.parameters):
                raise PlanError(
                    f"space {other!r}: reaches its {members.keep} weights at epoch {done + 1}, but channels of "
                    f"{name!r} go until epoch {last + 1} and would take some of them along. "
                    f"Let its schedule end at epoch {last + 1} or later."
                )


def refuse_masked_directions(model: nn.Module, weights: WeightSide, channels: ChannelSide | None, shrink: str) -> None:
    """Refuse weights in directions of weight norm beside channels that are masked: those stay, and would be counted."""
    directions = lengths_of(model) if channels is not None and shrink != "each" else {}
    for name, members in weights.members.items():
        for tensor, parameter in members.parameters.items():
            if parameter in directions:
                raise PlanError(
                    f"space {name!r}: {tensor!r} is a direction of weight norm, which a masked channel cannot make "
                    f'zero, so its weights could not be counted. Say shrink="each", or leave it out.'
                )


def checked_optimizers(
    model: nn.Module, given: Any, names: Mapping[nn.Parameter, str], freezes: bool
) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of a run, if all of them train the model and keep state that can follow."""
    several = isinstance(given, Iterable) and not isinstance(given, nn.Module)
    optimizers = () if given is None else tuple(given) if several else (given,)
    for optimizer in optimizers:
        refuse_stranger(optimizer, [*model.parameters()])
        refuse_factored(optimizer)
        refuse_foreign_state(optimizer, names)
    refuse_wrapping(optimizers)
    if freezes and not optimizers:
        raise PlanError("Pruner: a phase freezes parameters, but there is no optimizer. Give the one that trains them.")
    return optimizers


def frozen_by_epoch(model: nn.Module, phases: Sequence[Phase]) -> list[tuple[nn.Parameter, ...]]:
    """For each epoch of the phases, the parameters that get no update."""
    return [frozen for phase in phases for frozen in [find_frozen(model, phase.freeze)] * phase.epochs]
