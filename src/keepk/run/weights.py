"""The weight spaces of a run: which weights are left, and which are pruned at the next event.

`find_members` matches the globs of spaces with the names of a model's parameters, and checks the result.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from keepk.model.names import adapted_parameters, dims_of_length, lengths_of, named_parameters, refuse_other_parameters
from keepk.model.sharded import (
    as_sharded,
    block_of,
    gathered,
    is_sharded,
    local,
    refuse_unknown_sharding,
    same_sharding,
)
from keepk.plan.names import matches, nearest
from keepk.plan.phases import Plan
from keepk.plan.spaces import WeightSpace
from keepk.rank import sharded
from keepk.rank.kth_largest import Ranked
from keepk.rank.sharded import Part, ShardedCut
from keepk.rank.weights import CutPoint, cut_points, dead_mask
from keepk.run.channels import Event, nothing
from keepk.run.counting import count_weights
from keepk.run.distributed import Exchange
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
    taken, lengths = dict[nn.Parameter, str](), lengths_of(model)
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
            if is_sharded(parameter) and parameter in lengths:
                raise SpaceError(
                    f"space {space.name!r}: parameter {name!r} is a sharded direction of weight norm, of which no "
                    f"process sees whole rows. Remove weight norm before sharding, or exclude it."
                )
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
    weights = local(parameter)
    if weights.numel() == 0 or all(bound.isfinite() for bound in weights.aminmax()):
        return
    bad = int(weights.numel() - weights.isfinite().sum())
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
    if is_sharded(parameter):
        refuse_unknown_sharding(where, parameter, SpaceError)
        if space.metric is not None and collected_terms(space.metric):
            raise SpaceError(
                f"{where} is sharded over processes, but metric {metric_name(space.metric)} reads statistics, which "
                f"are not collected over shards. Use a metric of weights or their gradients, such as metrics.magnitude."
            )
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


def _local_mask(saved: Tensor, parameter: nn.Parameter) -> Tensor:
    """The local part of a saved mask, which may be whole or sharded in any way."""
    if not is_sharded(saved):
        return block_of(parameter).of(saved)
    return local(saved) if same_sharding(saved, parameter) else block_of(parameter).of(gathered(saved))


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
        left: By sharded parameter, how many weights of the whole parameter the masks leave. The mask of a sharded
            parameter is that of its local part.
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
        self.left = {name: parameter.numel() for name, parameter in self.parameters.items() if is_sharded(parameter)}
        adapted = adapted_parameters(model) if members else set[nn.Parameter]()
        for name, it in members.items():
            watch.adapted_weights(name, [each for each, parameter in it.parameters.items() if parameter in adapted])

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
        found = Masks()
        for name, parameter in self.parameters.items():
            dead = self.zeroed.get(name)
            kept = torch.ones_like(local(parameter), dtype=torch.bool) if dead is None else ~dead
            found[name] = as_sharded(kept, parameter)
        return found

    @property
    def counted(self) -> dict[str, int]:
        """By space: how many weights the model's tensors have now, including pruned ones that are no longer zero."""
        return count_weights(self.members, self.zeroed, self.kept, self._model, self.left)

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
        shards = list[tuple[Part, ShardedCut]]()
        for name, keep in planned.items():
            self._refuse_undercut(name, keep, left[name], by_channels=bool(before))
            members = self.members[name]
            if keep < left[name] and any(map(is_sharded, members.parameters.values())):
                parts = self._parts(members, event.exchange)
                alive = [self._left_in(it.ranked.name, self.zeroed) for it in parts]
                points = sharded.cut_points(parts, alive, keep, event.exchange.total)
                self._warn_of_ranking(members, left[name], [it.point for it in points])
                shards += zip(parts, points, strict=True)
            elif keep < left[name]:
                ranked = self._ranked(members, before)
                found = cut_points(ranked, keep)
                self._warn_of_ranking(members, left[name], found)
                cuts += zip(ranked, found, strict=True)
        masks = {**before, **{ranked.name: dead_mask(ranked, cut) for ranked, cut in cuts}}
        masks |= {part.ranked.name: sharded.dead_mask(part, cut) for part, cut in shards}
        self._refuse_empty_directions(masks, before)
        of_shards = [(part.ranked.name, part.block, cut) for part, cut in shards if part.ranked.name in self.left]
        return replace(
            event,
            masks=masks,
            due=due,
            left={name: cut.kept for name, _, cut in of_shards},
            blocks={name: block for name, block, _ in of_shards},
        )

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
        self.left = {**self.left, **event.left}
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
        present = self.zeroed, self.kept, self.certified, self.left

        def restore() -> None:
            self.zeroed, self.kept, self.certified, self.left = present

        return restore

    def state(self) -> dict[str, Any]:
        """The weights' part of a `Pruner`'s state: the masks."""
        return {"masks": dict(self.masks)}

    def refuse_other_masks(
        self, saved: Saved, shape_of: Callable[[str, Tensor], tuple[int, ...]], exchange: Exchange
    ) -> None:
        """Refuse saved masks that do not fit the plan, or the shapes that the parameters will have after `shape_of`."""
        left = self._left_by(saved, shape_of, exchange)
        for name, it in self.members.items():
            kept = sum(left[key] for key in it.parameters)
            planned = self._plan[name][saved.epoch - 1] if saved.epoch else it.total
            # A space whose plan has not begun may still have lost weights that were removed with their channels.
            waits = planned == it.total or name in self._late
            fewer = bool(saved.channels) and waits and it.keep <= kept < planned
            if kept != planned and not fewer:
                raise StateError(
                    f"pruner state: space {name!r} keeps {kept} weights, the plan says {planned}. The state is damaged."
                )

    def load(self, saved: Saved, exchange: Exchange) -> None:
        """Restore saved masks; the model must already have its saved size."""
        self.refuse_other_masks(saved, lambda _, parameter: tuple(parameter.shape), exchange)
        masks = {name: (it, _local_mask(saved.masks[name], it)) for name, it in self.parameters.items()}
        self.zeroed = {name: (~mask).to(local(it).device) for name, (it, mask) in masks.items() if not mask.all()}
        left = self._left_by(saved, lambda _, it: tuple(it.shape), exchange) if self.left else {}
        self.left = {name: left[name] for name in self.left}
        self.kept = self._counts(self.zeroed)
        self.certified = dict(self.kept)

    def notes(self, _name: str, _revived: int) -> dict[str, Any]:
        """Nothing to add to the certificate of a space."""
        return {}

    def _counts(self, zeroed: Masks) -> dict[str, int]:
        """By space: how many weights these masks leave."""
        return {name: sum(self._left_in(key, zeroed) for key in it.parameters) for name, it in self.members.items()}

    def _left_in(self, name: str, zeroed: Masks) -> int:
        """How many weights of a whole parameter these masks leave; for a sharded one, those of the last event."""
        if name in self.left:
            return self.left[name]
        return self.parameters[name].numel() - (int(zeroed[name].sum()) if name in zeroed else 0)

    def _left_by(
        self, saved: Saved, shape_of: Callable[[str, Tensor], tuple[int, ...]], exchange: Exchange
    ) -> dict[str, int]:
        """By parameter, how many weights a saved mask keeps; refuses masks of another shape than `shape_of` says."""
        parameters, masks = self.parameters, saved.masks

        def counted() -> Tensor:
            counts = list[int]()
            for name, parameter in parameters.items():
                mask, shape = masks.get(name), shape_of(name, parameter)
                if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
                    raise StateError(f"pruner state: no bool mask of shape {shape} for {name!r}. The state is damaged.")
                mine = parts == 1 or block_of(mask).counts
                counts.append(int(local(mask).sum()) if mine else 0)
            return torch.tensor(counts, dtype=torch.int64)

        # A state of one process has whole masks, which every process counts by itself.
        parts = max((math.prod(it.device_mesh.shape) for it in masks.values() if is_sharded(it)), default=1)
        found = counted() if parts == 1 else exchange.total("weights left by the masks of a pruner state", counted)
        return dict(zip(parameters, found.tolist(), strict=True))

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

    def _parts(self, members: Members, exchange: Exchange) -> list[Part]:
        """The own parts of the scores of a space with sharded parameters."""
        metric = members.space.metric or magnitude
        by_magnitude = metric is magnitude
        found = list[Part]()
        for name, parameter in members.parameters.items():
            scores, block = local(parameter), block_of(parameter)
            if not by_magnitude:
                # A metric may compare the weights of a tensor, so it gets all of them, one tensor at a time.
                grad = parameter.grad is not None
                exchange.together(f"scores of {name}, {grad=}", partial(refuse_not_finite, name, parameter))
                whole = gathered(parameter)
                whole.grad = None if parameter.grad is None else gathered(parameter.grad)
                scores = block.of(score(metric, whole, name)).clone()
            dead = self.zeroed.get(name)
            dead = None if dead is None else dead.to(scores.device)  # the model may have moved since
            found.append(Part(Ranked(name, scores, dead, by_magnitude, members.floor(parameter)), block))
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
