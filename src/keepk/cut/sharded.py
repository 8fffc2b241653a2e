"""`prepare_shards`: remove channels from a model whose parameters are sharded over processes by FSDP2.

A shard cannot be cut in place: after a cut the blocks of all processes begin elsewhere, and FSDP2 has allocated buffers
for the old ones. So every tensor is gathered, cut and divided again, one after the other, and a process never has two
whole tensors. Then FSDP2 is taken off the modules, they get parameters of the new shapes on the meta device, the user's
own function wraps them again, and the new shards are put in place. Parameters and buffers that are not sharded are cut
in place, in every process, with their state in the optimizer.

Modules, the optimizer and its parameter groups stay the same objects. Parameters that are cut are replaced: the size of
a DTensor cannot be changed. The optimizer gets the new ones in the old places, with their state.

Whether the cut is possible is found out on a twin of the model, which is not sharded and has no weights.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from keepk.cut.holders import Follower, refuse_follower, refuse_holders
from keepk.cut.masks import state_per_weight
from keepk.cut.record import noted
from keepk.cut.shrink import (
    Prepared,
    all_names,
    cut_states,
    expected_of,
    new_history,
    prepare,
    refuse_optimizers,
    refuse_other_model,
)
from keepk.errors import ShrinkError
from keepk.graph.graph import Graph
from keepk.model.edits import Change, Cut, Edits, Undo, all_or_nothing, cut_module, left_of, new_entry, undone_by
from keepk.model.names import named_tensors
from keepk.model.sharded import (
    gathered,
    is_sharded,
    local,
    own_part,
    refuse_unknown_sharding,
    reshard,
    same_sharding,
    without_fsdp,
)
from keepk.model.torch_internals import holds_gradients

Wrap = Callable[[Any], Any]  # the user's function that shards a model, in place


@dataclass(frozen=True)
class PreparedShards:
    """A cut of a sharded model that is ready to apply: everything is checked, and every new shard is made.

    Attributes:
        model: The model.
        edits: The cuts.
        twin: The cut of the twin, and of the graph.
        wrap: The user's function that shards the model.
        optimizers: The optimizers.
        renewed: By id of a sharded parameter that is cut, the new one.
        states: By optimizer and id of such a parameter, its new state.
        others: Changes of dicts that follow the model, and of the optimizers' state of parameters that are not sharded.
    """

    model: nn.Module
    edits: Edits
    twin: Prepared
    wrap: Wrap = field(repr=False)
    optimizers: Sequence[torch.optim.Optimizer] = field(repr=False)
    renewed: Mapping[int, nn.Parameter] = field(repr=False)
    states: Sequence[Mapping[int, dict[str, Any]]] = field(repr=False)
    others: Sequence[Change] = field(repr=False)

    def apply(self) -> Undo:
        """Put the new shards in place, all or none; returns a function that puts the old ones back."""
        named = {name: tensor for name, tensor, _ in named_tensors(self.model)}
        plain = replace(self.edits, cuts=_plain_cuts(self.edits, named))
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as undos:
            undos.callback(without_fsdp(self.model))
            undos.callback(all_or_nothing([*cut_module(self.model, named, plain), noted(self.model, self.edits)]))
            undos.callback(self._wrapped())
            undos.callback(all_or_nothing(self.others))
            undos.callback(all_or_nothing([self._optimizer_change(i) for i in range(len(self.optimizers))]))
            undos.callback(self.twin.apply())
            for cut in plain.cuts:
                torch.autograd.graph.increment_version(named[cut.tensor])  # see `Prepared.apply`
            return undos.pop_all().close

    def _wrapped(self) -> Undo:
        """Shard the modules again, by the user's function, around the new shards."""
        everywhere = [
            (path, module, name, old)
            for path, module in self.model.named_modules()
            for name, old in module._parameters.items()
            if old is not None
        ]
        places = [(module, name, old) for _, module, name, old in everywhere if is_sharded(old)]
        new = {id(old): self.renewed.get(id(old), old) for _, _, old in places}
        hollow = {
            old: nn.Parameter(torch.empty(it.shape, dtype=it.dtype, device="meta"), it.requires_grad)
            for old, it in new.items()
        }

        def undo() -> None:
            without_fsdp(self.model)
            _put((module, name, old) for _, module, name, old in everywhere)

        with undone_by(undo):
            _put((module, name, hollow[id(old)]) for module, name, old in places)
            self.wrap(self.model)
            for path, module, name, old in everywhere:
                if not is_sharded(old):
                    _refuse_replaced(f"{path}.{name}" if path else name, old, module._parameters.get(name))
            made = {id(old): _as_wrapped(new[id(old)], module._parameters.get(name)) for module, name, old in places}
            _put((module, name, made[id(old)]) for module, name, old in places)
        return undo

    def _optimizer_change(self, index: int) -> Change:
        optimizer, states = self.optimizers[index], self.states[index]

        def change() -> Undo:
            groups = [list(group["params"]) for group in optimizer.param_groups]
            before = dict(optimizer.state)

            def undo() -> None:
                for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                    group["params"][:] = parameters
                optimizer.state.clear()
                optimizer.state.update(before)

            with undone_by(undo):
                for group in optimizer.param_groups:
                    group["params"][:] = [self.renewed.get(id(it), it) for it in group["params"]]
                for old in [it for it in before if id(it) in self.renewed]:
                    del optimizer.state[old]
                    optimizer.state[self.renewed[id(old)]] = states[id(old)]
                return undo

        return change


def _plain_cuts(edits: Edits, named: Mapping[str, Tensor]) -> tuple[Cut, ...]:
    """The cuts of tensors that are not sharded."""
    return tuple(cut for cut in edits.cuts if not is_sharded(named[cut.tensor]))


def _put(places: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for module, name, parameter in places:
        module._parameters[name] = parameter


def _as_wrapped(new: nn.Parameter, wrapped: nn.Parameter | None) -> nn.Parameter:
    """The new shards of a parameter, as the user's function has placed it."""
    if wrapped is None or wrapped.shape != new.shape or not same_sharding(new, wrapped):
        got = "no parameter" if wrapped is None else f"{type(wrapped).__name__} of shape {tuple(wrapped.shape)}"
        raise ShrinkError(
            f"step: wrap= left {got} where the model had a sharded parameter of shape {tuple(new.shape)}. Pass the "
            f"function that sharded the model before, which calls fully_shard with the same mesh on the same modules."
        )
    return new


def _refuse_replaced(path: str, old: nn.Parameter, wrapped: nn.Parameter | None) -> None:
    """Refuse another object in the place of a parameter that was not sharded, which the optimizer would not know."""
    if wrapped is not old:
        got = "no parameter" if wrapped is None else f"{type(wrapped).__name__} of shape {tuple(wrapped.shape)}"
        raise ShrinkError(
            f"step: wrap= left {got} where the model had a plain parameter of shape {tuple(old.shape)}, {path!r}. "
            f"Pass the function that sharded the model before, which leaves the same parameters out."
        )


def prepare_shards(
    model: nn.Module,
    twin: nn.Module,
    graph: Graph,
    units: Iterable[int],
    *,
    optimizers: Sequence[torch.optim.Optimizer],
    followers: Sequence[Follower],
    wrap: Wrap,
    replay: bool,
) -> PreparedShards:
    """Check a cut and make its new shards, without changing anything. Every process must call this.

    Args:
        model: The sharded model.
        twin: Its twin (`keepk.model.sharded.plain_twin`), of which `graph` is the trace.
        graph: The graph of both.
        units: The units to remove.
        optimizers: The optimizers that train the model.
        followers: Dicts of tensors under the model's names.
        wrap: The user's function that shards the model.
        replay: Whether to run forward first at the new sizes, on a copy of the twin.
    """
    reshard(model)
    if any(map(holds_gradients, model.modules())):
        raise ShrinkError(
            "step: FSDP2 holds gradients that were accumulated without a sum over the processes "
            "(set_requires_gradient_sync(False)), and would lose them when channels are removed. Call step() after "
            "optimizer.step() and optimizer.zero_grad()."
        )
    of_twin = prepare(twin, graph, units, replay=replay)
    edits = of_twin.edits
    named = {name: tensor for name, tensor, _ in named_tensors(model)}
    refuse_other_model(model, graph, named)
    refuse_optimizers(optimizers, named, edits)
    names = all_names(model)
    for place, follower in enumerate(followers):
        assert isinstance(follower, dict)  # others are refused when the Pruner is made
        refuse_follower(follower, follower, expected_of(follower, named, edits), names, place)
    cuts = [cut for cut in edits.cuts if is_sharded(named[cut.tensor])]
    if plain := _plain_cuts(edits, named):
        refuse_holders(model, replace(edits, cuts=plain))
    for cut in cuts:
        refuse_unknown_sharding(f"tensor {cut.tensor!r}", named[cut.tensor], ShrinkError)
    renewed, states, others = (
        dict[int, nn.Parameter](),
        [dict[int, dict[str, Any]]() for _ in optimizers],
        list[Change](),
    )
    with torch.inference_mode(False), torch.no_grad():
        for cut in cuts:
            old = named[cut.tensor]
            new = nn.Parameter(_smaller(old, cut), old.requires_grad)
            new.grad = None if old.grad is None else _smaller(old.grad, cut)
            renewed[id(old)] = new
            for optimizer, found in zip(optimizers, states, strict=True):
                per_weight = {id(it) for it in state_per_weight(optimizer, old)}  # type: ignore[arg-type]  # a parameter
                state = optimizer.state.get(old, {})
                found[id(old)] = {key: _smaller(it, cut) if id(it) in per_weight else it for key, it in state.items()}
        for optimizer in optimizers:
            # The history is first: it is cleared before the states of single parameters are moved to others.
            others += [new_history(optimizer), *cut_states(optimizer, named, plain)]
        for cut in edits.cuts:
            for follower in followers:
                assert isinstance(follower, dict)
                tied = [name for name in names[cut.tensor] if name in follower]
                others += [new_entry(follower, name, _smaller(follower[name], cut)) for name in tied]
    return PreparedShards(model, edits, of_twin, wrap, optimizers, renewed, states, others)


def _smaller(tensor: Tensor, cut: Cut) -> Tensor:
    """The remaining part of a tensor after a cut, sharded in the same way."""
    if not is_sharded(tensor):
        return left_of(tensor, cut)
    return own_part(left_of(gathered(tensor), cut).to(local(tensor).device), tensor)
