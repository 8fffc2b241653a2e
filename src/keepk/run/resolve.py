"""From names to parameters: the weight spaces of a run, looked up in a model and checked."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from keepk.cut.memory import sharing_memory
from keepk.errors import RankError, SpaceError
from keepk.graph.given import quantised_module, quantised_tensor
from keepk.graph.wrappers import named_parameters
from keepk.plan.names import matches, nearest
from keepk.plan.spaces import WeightSpace
from keepk.rank.asking import called
from keepk.rank.channel_metrics import ranks_channels_alone
from keepk.rank.factories import refuse_uncalled
from keepk.rank.metrics import traits_of

RANKABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Members:
    """The parameters of one weight space.

    Attributes:
        space: The user's request.
        parameters: By name, in the model's order. The objects stay the same when they are cut.
        shapes: Their shapes when the run began.
        total: M, how many weights they had then.
        keep: K.
    """

    space: WeightSpace
    parameters: dict[str, nn.Parameter]
    shapes: dict[str, list[int]]
    total: int
    keep: int

    def floor(self, parameter: nn.Parameter) -> int:
        """How many weights of a parameter must stay. A layer floor applies to tensors of two or more dims only."""
        return min(self.space.layer_floor, parameter.numel()) if parameter.dim() >= 2 else 0


def find_members(model: nn.Module, spaces: Sequence[WeightSpace]) -> dict[str, Members]:
    """The parameters of every space, checked: each glob matches something, no weight is in two spaces."""
    named = named_parameters(model)
    found = dict[str, Members]()
    taken = dict[nn.Parameter, str]()
    if spaces and not named and (quantised := quantised_module(model)):
        raise SpaceError(
            f"space {spaces[0].name!r}: the model has no parameters, because {quantised}. Prune first and quantise "
            f"afterwards: give the model as it was before that."
        )
    for space in spaces:
        refuse_uncalled(space.metric, space.name)
        _refuse_metric_of_channels(space)
        parameters = _select(space, named)
        for name, parameter in parameters.items():
            _refuse_unrankable(space, name, parameter)
            if parameter in taken:
                raise SpaceError(
                    f"space {space.name!r}: {name!r} is in space {taken[parameter]!r} too. "
                    f"Spaces are disjoint: narrow one, or use exclude=."
                )
            taken[parameter] = space.name
        found[space.name] = _counted(space, parameters)
    _refuse_shared_memory({name: p for members in found.values() for name, p in members.parameters.items()})
    return found


def find_frozen(model: nn.Module, globs: Sequence[str]) -> tuple[nn.Parameter, ...]:
    """The parameters that match the globs of a phase, each once."""
    named = named_parameters(model)
    for glob in globs:
        if not any(matches(name, [glob]) for name in named):
            raise SpaceError(
                f"Phase(freeze={glob!r}): matches no parameter. Nearest names: {nearest(glob, list(named))}."
            )
    return tuple({id(p): p for name, p in named.items() if matches(name, globs)}.values())


def refuse_not_finite(name: str, parameter: torch.Tensor) -> None:
    """Refuse NaN and infinite weights, in one read and without a copy."""
    # NaN and infinities reach the minimum or the maximum, so two scalars tell; isfinite() alone would make a mask.
    if parameter.numel() == 0 or all(bound.isfinite() for bound in parameter.detach().aminmax()):
        return
    bad = int(parameter.numel() - parameter.detach().isfinite().sum())
    raise RankError(
        f"parameter {name!r}: {bad} of {parameter.numel()} weights are NaN or infinite, so they cannot be ranked. "
        f"Find out where training diverged; nothing was pruned."
    )


def _refuse_metric_of_channels(space: WeightSpace) -> None:
    if space.metric is None:
        return
    if ranks_channels_alone(space.metric) or "weights" not in traits_of(space.metric).ranks:
        raise SpaceError(
            f"space {space.name!r}: metric {called(space.metric)} ranks channels, not weights. "
            f"Use keepk.metrics.magnitude, or leave metric= out."
        )


def _select(space: WeightSpace, named: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    for option, globs in (("select", space.select), ("exclude", space.exclude)):
        for glob in globs:
            if not any(matches(name, [glob]) for name in named):
                raise SpaceError(
                    f"space {space.name!r}: {option}={glob!r} matches no parameter. "
                    f"Nearest names: {nearest(glob, list(named))}."
                )
    # By object, not by name: a tied parameter is excluded if any of its names is.
    excluded = {id(p) for name, p in named.items() if matches(name, space.exclude)}
    chosen = {id(p) for name, p in named.items() if matches(name, space.select)} - excluded
    # A tied parameter counts once, under the first of its names.
    first_names = {id(p): name for name, p in reversed(named.items())}
    return {name: p for name, p in named.items() if id(p) in chosen and first_names[id(p)] == name}


def _counted(space: WeightSpace, parameters: dict[str, nn.Parameter]) -> Members:
    total = sum(parameter.numel() for parameter in parameters.values())
    if total == 0:
        raise SpaceError(
            f"space {space.name!r}: {list(space.select)} without {list(space.exclude)} leaves no weight. "
            f"Widen the space."
        )
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    members = Members(space, parameters, shapes, total, space.count_kept(total))
    floors = sum(members.floor(parameter) for parameter in parameters.values())
    if floors > members.keep:
        raise SpaceError(
            f"space {space.name!r}: layer_floor={space.layer_floor} needs {floors} weights, but only {members.keep} "
            f"are kept. Choose a lower floor, or keep >= {floors}."
        )
    return members


def _refuse_unrankable(space: WeightSpace, name: str, parameter: nn.Parameter) -> None:
    where = f"space {space.name!r}: parameter {name!r}"
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise SpaceError(f"{where} has no shape yet. Run one forward pass of the lazy module first.")
    if hasattr(parameter, "device_mesh"):  # a DTensor, as FSDP2 makes: each process sees a part of it
        raise SpaceError(f"{where} is sharded over processes. Prune before sharding, or exclude it.")
    if quantised_tensor(parameter):
        raise SpaceError(
            f"{where} is quantised ({type(parameter).__name__}), so it cannot be ranked. Prune first and quantise "
            f"afterwards, or leave it out with exclude={name!r}."
        )
    if parameter.dtype not in RANKABLE or parameter.layout != torch.strided:
        raise SpaceError(
            f"{where} is {parameter.dtype}, {parameter.layout}. Only dense real float weights can be ranked; "
            f"leave it out with exclude={name!r}."
        )
    if parameter.is_meta:
        raise SpaceError(f"{where} is on the meta device and has no values. Load the weights first.")
    refuse_not_finite(name, parameter)


def _refuse_shared_memory(parameters: dict[str, nn.Parameter]) -> None:
    for one, other in sharing_memory(parameters):
        raise SpaceError(
            f"parameters {one!r} and {other!r} share memory but are two objects, so their weights would count twice. "
            f"Tie them as one Parameter, or exclude one."
        )
