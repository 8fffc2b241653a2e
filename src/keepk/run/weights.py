"""The weight spaces of a run: which weights are left, and which are pruned at the next event.

`find_members` matches the globs of spaces with the names of a model's parameters, and checks the result.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keepk.cut.holders import sharing_memory
from keepk.cut.masks import Masks, refuse_foreign_state
from keepk.errors import RankError, SpaceError, StateError
from keepk.metrics.channels import collected_terms
from keepk.metrics.layers import Use, metric_name, refuse_uncalled, traits_of
from keepk.metrics.weights import magnitude, score
from keepk.model.edits import Cut as TensorCut
from keepk.model.edits import Undo
from keepk.model.example import quantised_module, quantised_tensor
from keepk.model.names import dims_of_length, lengths_of, named_parameters, refuse_other_parameters
from keepk.plan.names import matches, nearest
from keepk.plan.phases import Plan
from keepk.plan.spaces import WeightSpace
from keepk.rank.kth_largest import Ranked
from keepk.rank.weights import CutPoint, cut_points, dead_mask
from keepk.run.channels import Event, nothing
from keepk.run.counting import count_weights
from keepk.run.state import Saved
from keepk.run.warnings import Watch

RANKABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Members:
    """The parameters of one weight space.

    Attributes:
        space: The user's request.
        parameters: By name, in the model's order. A cut changes the shape of these objects, but never replaces them.
        shapes: Their shapes when the run began.
        total: M, the number of weights when the run began.
        keep: K, the number of weights to keep.
    """

    space: WeightSpace
    parameters: dict[str, nn.Parameter]
    shapes: dict[str, list[int]]
    total: int
    keep: int

    def floor(self, parameter: nn.Parameter) -> int:
        """The least number of weights to keep in a parameter; 0 for biases and other tensors of one dim."""
        return min(self.space.layer_floor, parameter.numel()) if parameter.dim() >= 2 else 0


def find_members(model: nn.Module, spaces: Sequence[WeightSpace]) -> dict[str, Members]:
    """The parameters of every space. Refuses globs that match nothing and weights in two spaces."""
    named = named_parameters(model)
    found = dict[str, Members]()
    taken = dict[nn.Parameter, str]()
    if spaces and not named and (quantised := quantised_module(model)):
        raise SpaceError(
            f"space {spaces[0].name!r}: the model has no parameters, because {quantised}. Prune first and quantise "
            f"afterwards: pass the model as it was before quantisation."
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
    # NaN and infinities show up in the minimum or the maximum. isfinite() would allocate a mask of the whole tensor.
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
    if "weights" not in traits_of(space.metric).ranks:
        raise SpaceError(
            f"space {space.name!r}: metric {metric_name(space.metric)} ranks channels, not weights. "
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
    if hasattr(parameter, "device_mesh"):  # a DTensor, as in FSDP2, of which each process sees only a part
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


class WeightSide:
    """The weight spaces of a run; see `run.session.Side`. Without any space, every method does nothing.

    Attributes:
        members: The spaces by name, with their parameters.
        zeroed: By parameter, a mask of its pruned entries; a parameter without any has no mask.
        kept: By space, how many weights the masks leave.
        certified: By space, how many weights the last event left, before `keepk.compact` or `keepk.shrink` removed
            more.
    """

    kind = "weights"

    def __init__(
        self,
        model: nn.Module,
        members: Mapping[str, Members],
        plan: Plan,
        optimizers: Sequence[torch.optim.Optimizer],
        watch: Watch,
        late: Container[str] = (),
    ) -> None:
        self.members, self._late = members, late
        self._model, self._plan, self._optimizers, self._watch = model, plan, optimizers, watch
        self.zeroed: Masks = {}
        self.kept = {name: it.total for name, it in members.items()}
        self.certified = dict(self.kept)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter of a space, by name."""
        return {name: p for members in self.members.values() for name, p in members.parameters.items()}

    @property
    def uses(self) -> list[Use]:
        """The metrics that read statistics, with the parameters of their spaces."""
        found = ((name, it, collected_terms(it.space.metric)) for name, it in self.members.items())
        return [Use(name, term, parameters=it.parameters) for name, it, terms in found for term in terms]

    @property
    def masks(self) -> Masks:
        """By parameter of a space: a mask of the entries that are kept."""
        return {
            name: ~self.zeroed[name] if name in self.zeroed else torch.ones_like(parameter, dtype=torch.bool)
            for name, parameter in self.parameters.items()
        }

    @property
    def counted(self) -> dict[str, int]:
        """By space: how many weights the model's tensors have now, including pruned ones that are no longer zero."""
        return count_weights(self.members, self.zeroed, self.kept, self._model)

    @property
    def sizes(self) -> dict[str, Any]:
        """By space: the shapes of its parameters when the run began. A saved state must have the same ones."""
        return {name: it.shapes for name, it in self.members.items()}

    def decide(self, event: Event) -> Event:
        """Add new masks: first the weights in pruned channels, then the lowest-ranked ones. Nothing changes."""
        planned = {name: self._plan[name][event.epoch] for name in self.members}
        due = {name: keep for name, keep in planned.items() if keep < self.kept[name]}
        own = self.parameters
        names = {parameter: name for name, parameter in own.items()}
        for optimizer in self._optimizers if due else ():
            refuse_foreign_state(optimizer, names)  # the optimizer may have created state since the last event
        refuse_other_parameters(self._model, own, SpaceError)
        # K counts weights in the remaining channels only, so weights of pruned channels are masked before ranking.
        before = {
            name: mask if name not in self.zeroed else mask | self.zeroed[name].to(mask.device)
            for name, mask in event.operation.doomed(own).items()
        }
        left = self._counts({**self.zeroed, **before}) if before else self.kept
        cuts = list[tuple[Ranked, CutPoint]]()
        for name, keep in planned.items():
            self._refuse_undercut(name, keep, left[name], by_channels=bool(before))
            if keep < left[name]:
                ranked = self._ranked(self.members[name], before)
                found = cut_points(ranked, keep)
                self._warn_of_ranking(self.members[name], left[name], found)
                cuts += zip(ranked, found, strict=True)
        masks = {**before, **{ranked.name: dead_mask(ranked, cut) for ranked, cut in cuts}}
        self._refuse_empty_directions(masks, before)
        return replace(event, masks=masks, due=due)

    def _refuse_empty_directions(self, masks: Masks, removed: Masks) -> None:
        """Refuse an event that prunes every weight of a direction of weight norm: its weight would be 0 / 0.

        Args:
            masks: The new masks.
            removed: Masks of the weights in channels that are removed. A direction may lose all weights with its
                channel.
        """
        lengths, own = lengths_of(self._model), self.parameters
        for name, mask in masks.items():
            if (length := lengths.get(own[name])) is None:
                continue
            dims = dims_of_length(own[name], length)
            empty = mask.all(dims)
            if name in removed:
                empty &= ~removed[name].all(dims)
            if empty.any():
                space = next(it for it, members in self.members.items() if name in members.parameters)
                raise RankError(
                    f"space {space!r}: all weights of {int(empty.sum())} of the {empty.numel()} directions in {name!r} "
                    f"would be pruned, but weight norm divides by their norm. Remove weight norm before pruning "
                    f"(torch.nn.utils.parametrize.remove_parametrizations), exclude {name!r}, or keep more weights."
                )

    def apply(self, event: Event) -> Undo:
        """Store the masks of an event; `Session` zeroes the weights, and undoes this by its snapshot."""
        self.zeroed = event.operation.after({**self.zeroed, **event.masks})
        # Removed channels may have contained weights of spaces that are not pruned at this event: recount all spaces.
        removes = len(event.operation.gone) > 0
        self.kept = {**self.kept, **(self._counts(self.zeroed) if removes else event.due)}
        self.certified = dict(self.kept)
        return nothing

    def follow_cuts(self, _: Mapping[str, TensorCut], follow: Callable[[Masks], Masks]) -> None:
        """Cut the masks after the model was cut outside of this run."""
        self.zeroed = follow(self.zeroed)
        self.kept = self._counts(self.zeroed)

    def snapshot(self) -> Undo:
        """A function that restores the current masks and counts."""
        present = self.zeroed, self.kept, self.certified

        def restore() -> None:
            self.zeroed, self.kept, self.certified = present

        return restore

    def state(self) -> dict[str, Any]:
        """The weights' part of a `Pruner`'s state: the masks."""
        return {"masks": dict(self.masks)}

    def refuse_other_masks(self, saved: Saved, shape_of: Callable[[str, Tensor], tuple[int, ...]]) -> None:
        """Refuse saved masks that do not fit the plan, or the shapes that the parameters will have after `shape_of`."""
        for name, it in self.members.items():
            for key, parameter in it.parameters.items():
                mask, shape = saved.masks.get(key), shape_of(key, parameter)
                if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
                    raise StateError(f"pruner state: no bool mask of shape {shape} for {key!r}. The state is damaged.")
            kept = sum(int(saved.masks[key].sum()) for key in it.parameters)
            planned = self._plan[name][saved.epoch - 1] if saved.epoch else it.total
            # A space whose plan has not begun may still have lost weights that were removed with their channels.
            waits = planned == it.total or name in self._late
            fewer = bool(saved.channels) and waits and it.keep <= kept < planned
            if kept != planned and not fewer:
                raise StateError(
                    f"pruner state: space {name!r} keeps {kept} weights, the plan says {planned}. The state is damaged."
                )

    def load(self, saved: Saved) -> None:
        """Restore saved masks; the model must already have its saved size."""
        self.refuse_other_masks(saved, lambda _, parameter: tuple(parameter.shape))
        masks = {name: (parameter, saved.masks[name]) for name, parameter in self.parameters.items()}
        self.zeroed = {name: (~mask).to(it.device) for name, (it, mask) in masks.items() if not mask.all()}
        self.kept = self._counts(self.zeroed)
        self.certified = dict(self.kept)

    def notes(self, _name: str, _revived: int) -> dict[str, Any]:
        """Nothing to add to the certificate of a space."""
        return {}

    def _counts(self, zeroed: Masks) -> dict[str, int]:
        """By space: how many weights these masks leave."""
        return {
            name: sum(p.numel() - (int(zeroed[key].sum()) if key in zeroed else 0) for key, p in it.parameters.items())
            for name, it in self.members.items()
        }

    def _refuse_undercut(self, name: str, planned: int, left: int, *, by_channels: bool) -> None:
        """Refuse an event after which a space would have fewer weights than its plan says."""
        members = self.members[name]
        # Channels may remove weights of a space whose plan has not begun. After a budget, how many weights are left is
        # known only then, so a count of the plan is an upper bound until it reaches K.
        waits = planned == members.total or name in self._late
        wanted, what = (members.keep, "to keep") if waits else (planned, "that its plan keeps at this event")
        # If the last event already left this count, the plan is met, even if keepk.compact has removed more since.
        reached = not by_channels and self.certified[name] <= wanted
        if left >= wanted or reached:
            return
        why = "the remaining channels have" if by_channels else "the model was cut elsewhere, which left"
        raise RankError(
            f"space {name!r}: {why} only {left} of its weights, fewer than the {wanted} {what}. "
            f"Nothing was pruned. Keep more channels or fewer weights, or prune weights after channels, in phases "
            f"(keepk.Phase)."
        )

    def _ranked(self, members: Members, before: Masks) -> list[Ranked]:
        """The scores of a space's parameters, each with a mask of the entries that are already pruned."""
        metric = members.space.metric or magnitude
        by_magnitude = metric is magnitude
        found = []
        for name, parameter in members.parameters.items():
            if not by_magnitude:
                refuse_not_finite(name, parameter)  # for magnitudes, the selection checks this in the same read
                # Magnitudes are never stored as a tensor: the selection takes absolute values as it reads the weights.
            scores = parameter.detach() if by_magnitude else score(metric, parameter, name)
            dead = before.get(name, self.zeroed.get(name))
            if dead is not None:
                dead = dead.to(scores.device)  # the model may have moved since the mask was made
            found.append(Ranked(name, scores, dead, by_magnitude, members.floor(parameter)))
        return found

    def _warn_of_ranking(self, members: Members, alive: int, cuts: Sequence[CutPoint]) -> None:
        """Warn if most weights are tied at the cut, or if a tensor keeps almost nothing."""
        name, by_magnitude = members.space.name, (members.space.metric or magnitude) is magnitude
        equal, ties = sum(cut.equal for cut in cuts), sum(cut.ties for cut in cuts)
        # Ties among weights that are 0.0 need no warning: it does not matter which of them are pruned.
        if 0 < ties < equal and not (by_magnitude and all(cut.value == 0 for cut in cuts)):
            self._watch.tied_scores(name, "weights", equal, alive)
        if members.space.layer_floor == 0:  # by setting a floor, the user has decided how thin layers may get
            sizes = ((key, math.prod(shape)) for key, shape in members.shapes.items())
            layers = [(key, cut.kept, size) for (key, size), cut in zip(sizes, cuts, strict=True)]
            self._watch.thin_layers(name, "weights", [it for it in layers if len(members.shapes[it[0]]) > 1])
