"""The `Pruner`: the paper's algorithm beside a user's own training loop."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from keepk.cut.hold import Held, held, without_updates
from keepk.cut.optimizer_state import (
    refuse_factored,
    refuse_foreign_state,
    refuse_stranger,
    restart_flat_history,
)
from keepk.errors import KeepkError, PlanError, SpaceError
from keepk.graph.wrappers import named_parameters
from keepk.plan.numbers import count
from keepk.plan.phases import Goal, Phase, timeline
from keepk.plan.spaces import WeightSpace
from keepk.rank.metrics import magnitude, score
from keepk.rank.pieces import one_thread
from keepk.rank.select import Cut, Ranked, cut_points, dead_mask
from keepk.run.agree import agreed
from keepk.run.resolve import Members, find_frozen, find_members, refuse_not_finite
from keepk.run.state import pruner_state, read_pruner_state


class Pruner:
    """Keeps exactly K weights in every space, by the plan, while the user's own loop trains (DSC-1).

    Call `step` at the end of every epoch: it ranks the weights of each space, keeps exactly as many as the plan says
    and zeroes the others. From then on they stay zero after every ``optimizer.step()``. Nothing in the model is
    renamed, wrapped or replaced. When the plan has ended, `step` changes nothing and the masks are still held, so
    fine-tuning is simply more training.

    Args:
        model: The user's model; `DistributedDataParallel` and `torch.compile` wrappers are looked through.
        spaces: What to keep: one or more of `keepk.weights(...)`.
        optimizer: The optimizer (or several) that trains the model. None if nothing trains after the event.
        epochs: How long the plan is. None takes the schedules' own length.
        phases: Spans of epochs in which some spaces are pruned and some parameters frozen; their sum is the length.

    >>> import keepk
    >>> model = nn.Sequential(nn.Linear(20, 10), nn.ReLU(), nn.Linear(10, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> spaces = [keepk.weights("*.weight", keep=33, name="all", schedule=keepk.Annealing(p0=0.5, n1=2, nu=0.2))]
    >>> pruner = Pruner(model, spaces, optimizer)
    >>> pruner.plan
    {'all': (119, 110, 66, 33)}
    >>> for epoch in range(pruner.epochs):
    ...     loss = model(torch.randn(8, 20)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     pruner.step()
    >>> pruner.done, pruner.kept, sum(int(mask.sum()) for mask in pruner.masks.values())
    (True, {'all': 33}, 33)

    """

    def __init__(
        self,
        model: nn.Module,
        spaces: WeightSpace | Sequence[WeightSpace],
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        epochs: int | None = None,
        phases: Sequence[Phase] | None = None,
    ) -> None:
        _refuse_wrong_types(model, spaces, phases)
        if epochs is not None:
            count(epochs, "Pruner: epochs", PlanError, least=1)
        self._model = model
        self._members = find_members(model, [spaces] if isinstance(spaces, WeightSpace) else list(spaces))
        goals = {name: Goal(it.total, it.keep, it.space.schedule) for name, it in self._members.items()}
        self._plan = timeline(goals, epochs=epochs, phases=phases)
        self._frozen_by_epoch = _frozen_by_epoch(model, phases or ())
        self._optimizers = self._checked_optimizers(optimizer)
        self._dead = dict[str, Tensor]()
        self._kept = {name: members.total for name, members in self._members.items()}
        self._epoch = 0
        self._held: list[Held] = []
        self._frozen: tuple[nn.Parameter, ...] = ()
        self._handles: list[RemovableHandle] | None = self._hook()

    @property
    def plan(self) -> dict[str, tuple[int, ...]]:
        """By space: how many weights are left after epochs 1, 2, ... of the run."""
        return dict(self._plan)

    @property
    def epochs(self) -> int:
        """How many events the plan has."""
        return len(next(iter(self._plan.values())))

    @property
    def epoch(self) -> int:
        """How many events are behind us."""
        return self._epoch

    @property
    def done(self) -> bool:
        """Whether the plan has ended."""
        return self._epoch >= self.epochs

    @property
    def kept(self) -> dict[str, int]:
        """By space: how many weights are left now."""
        return dict(self._kept)

    @property
    def masks(self) -> dict[str, Tensor]:
        """By parameter: which entries are kept. The mask says so, not the value: a kept weight may be 0.0."""
        return {
            name: ~self._dead[name] if name in self._dead else torch.ones_like(parameter, dtype=torch.bool)
            for name, parameter in self._parameters().items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """End an epoch: keep exactly as many weights of each space as the plan says, and hold the rest at zero.

        All or nothing: whatever cannot be ranked is refused before the first weight changes. With several processes
        all of them call it, and all keep the same weights.
        """
        self._refuse_closed()
        if self.done:
            return
        due = {
            name: counts[self._epoch] for name, counts in self._plan.items() if counts[self._epoch] < self._kept[name]
        }
        device = next(iter(self._parameters().values())).device
        pruned = agreed(lambda: self._decide(due), lambda masks: masks.values(), device) if due else {}
        self._apply(pruned)
        self._kept |= due
        self._epoch += 1
        self._enter_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, as plain values and bool tensors; loads with ``weights_only=True``."""
        return pruner_state(self._members, self._plan, self._epoch, self.masks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` stood. A state of another model, plan or version is refused, and nothing changes."""
        self._refuse_closed()
        self._refuse_changed_model()
        epoch, masks = read_pruner_state(state, self._members, self._plan)
        parameters = self._parameters()
        self._dead = {}
        self._apply({name: (~mask).to(parameters[name].device) for name, mask in masks.items() if not mask.all()})
        self._epoch = epoch
        self._kept = {name: counts[epoch - 1] for name, counts in self._plan.items()} if epoch else self._totals()
        self._enter_epoch()

    def close(self) -> None:
        """Let go of the optimizer: masks are no longer held and nothing is frozen. The weights stay as they are."""
        for handle in self._handles or ():
            handle.remove()
        self._handles = None

    def __enter__(self) -> "Pruner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for members in self._members.values() for name, p in members.parameters.items()}

    def _totals(self) -> dict[str, int]:
        return {name: members.total for name, members in self._members.items()}

    def _checked_optimizers(self, given: Any) -> tuple[torch.optim.Optimizer, ...]:
        optimizers = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
        for optimizer in optimizers:
            refuse_stranger(optimizer, [*self._model.parameters()])
            refuse_factored(optimizer)
            refuse_foreign_state(optimizer, self._names())
        if any(self._frozen_by_epoch) and not optimizers:
            raise PlanError(
                "Pruner: a phase freezes parameters, but there is no optimizer. Give the one that trains them."
            )
        return optimizers

    def _names(self) -> dict[nn.Parameter, str]:
        return {parameter: name for name, parameter in self._parameters().items()}

    def _decide(self, due: dict[str, int]) -> dict[str, Tensor]:
        """The new dead masks of the spaces that are due. Reads only; what it refuses, all processes hear of."""
        self._refuse_changed_model()
        for optimizer in self._optimizers:
            refuse_foreign_state(optimizer, self._names())
        cuts = list[tuple[Ranked, Cut]]()
        for name, keep in due.items():
            ranked = self._ranked(self._members[name])
            cuts += zip(ranked, cut_points(ranked, keep), strict=True)
        return {ranked.name: dead_mask(ranked, cut) for ranked, cut in cuts}

    def _ranked(self, members: Members) -> list[Ranked]:
        metric = members.space.metric or magnitude
        found = []
        for name, parameter in members.parameters.items():
            by_magnitude = metric is magnitude
            if not by_magnitude:
                refuse_not_finite(name, parameter)
            # The magnitude itself is never materialised: the selection reads the weights.
            scores = parameter.detach() if by_magnitude else score(metric, parameter, name)
            dead = self._dead[name].to(scores.device) if name in self._dead else None  # the model may have moved
            found.append(Ranked(name, scores, dead, by_magnitude, members.floor(parameter)))
        return found

    def _apply(self, pruned: dict[str, Tensor]) -> None:
        parameters = self._parameters()
        self._dead |= pruned
        self._held = held((parameters[name], dead) for name, dead in self._dead.items())
        with one_thread():  # an event is rare: no thread pool to wait for
            for it in self._held if pruned else ():
                it.zero()
                it.zero_state(self._optimizers)
        for optimizer in self._optimizers if pruned else ():
            restart_flat_history(optimizer)

    def _hook(self) -> list[RemovableHandle]:
        self._enter_epoch()
        handles = [optimizer.register_step_pre_hook(self._before_update) for optimizer in self._optimizers]
        return handles + [optimizer.register_step_post_hook(self._after_update) for optimizer in self._optimizers]

    def _before_update(
        self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        return without_updates(self._frozen, args, kwargs) if self._frozen else None

    def _after_update(self, *_: object) -> None:
        for it in self._held:
            it.zero()

    def _enter_epoch(self) -> None:
        """Freeze what the phase of the coming epoch freezes."""
        frozen = self._frozen_by_epoch[self._epoch] if self._epoch < len(self._frozen_by_epoch) else ()
        if frozen is not self._frozen:
            for optimizer in self._optimizers:
                restart_flat_history(optimizer)
        self._frozen = frozen

    def _refuse_closed(self) -> None:
        if self._handles is None:
            raise KeepkError("Pruner: it was closed, so masks are no longer held. Make a new one.")

    def _refuse_changed_model(self) -> None:
        now = named_parameters(self._model)
        for name, parameter in self._parameters().items():
            if now.get(name) is not parameter:
                raise SpaceError(
                    f"parameter {name!r}: the model's is another object than when the Pruner was made. "
                    f"Change the model first (load, move, wrap, replace layers), then make the Pruner."
                )


def _refuse_wrong_types(model: object, spaces: object, phases: object) -> None:
    if not isinstance(model, nn.Module):
        raise SpaceError(f"Pruner: got a {type(model).__name__} as model. Give a torch.nn.Module.")
    listed = [spaces] if isinstance(spaces, WeightSpace) else spaces
    if not isinstance(listed, list | tuple) or not listed or not all(isinstance(it, WeightSpace) for it in listed):
        raise SpaceError(f"Pruner: spaces={spaces!r}. Give a list of keepk.weights(...), at least one.")
    if phases is not None and not (
        isinstance(phases, list | tuple) and phases and all(isinstance(it, Phase) for it in phases)
    ):
        raise PlanError(f"Pruner: phases={phases!r}. Give a list of keepk.Phase(...), at least one.")


def _frozen_by_epoch(model: nn.Module, phases: Sequence[Phase]) -> list[tuple[nn.Parameter, ...]]:
    return [frozen for phase in phases for frozen in [find_frozen(model, phase.freeze)] * phase.epochs]
