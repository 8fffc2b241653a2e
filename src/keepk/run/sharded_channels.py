"""Channels of models that are sharded over processes by FSDP2: checks, the twin, and the preparation of removals.

The graph of a sharded model is that of its twin, a copy as it was before `fully_shard`, without weights
(`model.sharded.plain_twin`). Scores are computed of whole tensors, gathered one at a time, so they have the same bits
as in one process. `cut.sharded` cuts the shards.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from keepk.cut.holders import Follower
from keepk.cut.sharded import Wrap, prepare_shards
from keepk.errors import KeepkError, ShrinkError, SpaceError
from keepk.graph.graph import Graph
from keepk.graph.ids.maps import Flags
from keepk.metrics.channels import collected_terms
from keepk.model.names import lengths_of, named_parameters
from keepk.model.sharded import (
    exchange_device,
    is_sharded,
    plain_twin,
    refuse_unknown_sharding,
    sharded_around,
    sharded_otherwise,
    shards_of,
)
from keepk.plan.spaces import ChannelSpace, Space, WeightSpace
from keepk.run.channels import NO_OPERATION, Operation, by_plain_name
from keepk.run.distributed import Exchange


def exchange_to_make(model: object, spaces: object) -> Exchange:
    """The exchange to make a Pruner: over all processes if the model is sharded and may have channel spaces.

    The arguments are those of `Pruner`, not checked yet: they may be wrong in this process only.
    """
    shards = shards_of(model)
    listed = spaces if isinstance(spaces, list | tuple) else [spaces]
    alone = not shards or all(isinstance(space, WeightSpace) for space in listed)
    device = exchange_device([*shards, torch.empty(0)])
    return Exchange(device, "make the Pruner", "No Pruner was made.", call="Pruner", alone=alone)


def twin_of(model: nn.Module, spaces: Sequence[Space], followers: Sequence[Follower], shrink: str) -> nn.Module | None:
    """The twin of a sharded model with channel spaces, None for any other; refuses what cannot be done over shards."""
    of_channels = [space for space in spaces if isinstance(space, ChannelSpace)]
    parameters = named_parameters(model)
    sharded = {name: it for name, it in parameters.items() if is_sharded(it)}
    if not of_channels or not sharded:
        return None
    where = f"space {of_channels[0].name!r}: the model is sharded over processes"
    if len(of_channels) < len(spaces):
        raise SpaceError(
            f"{where}, where channels and weights cannot be pruned by one Pruner. Prune channels first, close the "
            f"Pruner, and make another one for the weights."
        )
    if shrink != "each":
        raise SpaceError(
            f'{where}, where channels cannot be masked, so shrink={shrink!r} is not possible. Pass "each".'
        )
    for space in of_channels:
        if space.metric is not None and collected_terms(space.metric):
            raise SpaceError(
                f"space {space.name!r}: the model is sharded over processes, where statistics are not collected. Use a "
                f"metric of weights or their gradients."
            )
    for place, follower in enumerate(followers):
        if not isinstance(follower, dict):
            raise ShrinkError(
                f"followers[{place}]: got {type(follower).__name__}, but the model is sharded over processes. Pass a "
                f"dict of copies of its parameters."
            )
    for name, parameter in sharded.items():
        refuse_unknown_sharding(f"parameter {name!r}", parameter, SpaceError)
    _refuse_sharded_otherwise(model, where)
    return plain_twin(model)


def _refuse_sharded_otherwise(model: nn.Module, where: str) -> None:
    """Refuse a model with a parameter that is sharded with a module around it, or not by `fully_shard`."""
    if not (strange := sharded_otherwise(model)):
        return
    if around := sharded_around(model, strange):
        name, outer = type(model).__name__.removeprefix("FSDP"), type(around[0]).__name__.removeprefix("FSDP")
        raise SpaceError(
            f"{where}, parameter {strange!r} by fully_shard of the {outer} around this {name}, so it cannot be sharded "
            f"again after a cut without that. Pass the {outer} to the Pruner, with an example for it and spaces of "
            f"{around[1] + '.*'!r}; or call fully_shard on the {name} too, before the {outer}."
        )
    raise SpaceError(
        f"{where}, and parameter {strange!r} is not sharded by fully_shard (FSDP2), so it cannot be sharded again "
        f"after a cut. Prune channels before parallelize_module or distribute_tensor."
    )


class ShardedSurgery:
    """Prepares removals for a sharded model; see `run.channels.Surgery`."""

    def __init__(
        self,
        model: nn.Module,
        twin: nn.Module,
        graph: Graph,
        optimizers: Sequence[torch.optim.Optimizer],
        followers: Sequence[Follower],
        *,
        replays: bool,
    ) -> None:
        self._model, self._twin, self._graph, self.replays = model, twin, graph, replays
        self._optimizers, self._followers = optimizers, followers

    def operation(
        self,
        dead: Flags,
        going: Iterable[int],
        *,
        physical: bool,  # noqa: ARG002 - `twin_of` refuses runs that mask channels
        wrapper: nn.Module | None = None,  # noqa: ARG002 - DDP does not wrap a sharded model
        wrap: Wrap | None = None,
    ) -> Operation:
        """Prepare the removal of the units `going`; every process must call this."""
        units = np.union1d(np.flatnonzero(dead & self._graph.alive), np.fromiter(going, np.int64))
        if not len(units):
            return NO_OPERATION
        if wrap is None:
            raise ShrinkError(
                "step: the model is sharded over processes, and has to be sharded again after channels are removed. "
                "Pass the function that does so: model = pruner.step(model, wrap=shard); or to load a state, "
                "pruner.load_state_dict(state, wrap=shard)."
            )
        if not callable(wrap):
            raise KeepkError(
                f"step: wrap: got {type(wrap).__name__}. Pass the function that shards the model in place."
            )
        prepared = prepare_shards(
            self._model,
            self._twin,
            self._graph,
            units,
            optimizers=self._optimizers,
            followers=self._followers,
            wrap=wrap,
            replay=self.replays,
        )
        parameters: Mapping[str, Tensor] = named_parameters(self._model)
        cuts = by_plain_name(self._model, prepared.edits)
        return Operation(prepared.edits, cuts, prepared, parameters, lengths_of(self._model))  # type: ignore[arg-type]
