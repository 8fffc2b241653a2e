"""Finding the dead units of a graph: each of their weights is zero, or no output needs it.

Removing a unit has the same effect as setting all of its weights to zero. If each of them is zero already or is not
needed by any output, that changes nothing.

Channels that are constant for every input are folded into the bias of the layer that reads them. A layer with weight W
and bias b that reads a channel of constant value c computes the same with bias b + W c and without that channel, if it
reads c at every position. A convolution with zero padding does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from keepk.compaction.influence import Flow, Input
from keepk.errors import ShrinkError
from keepk.graph.choose import fitting
from keepk.graph.graph import Graph
from keepk.graph.ids.atoms import Axis
from keepk.graph.ids.facts import Role
from keepk.graph.ids.maps import Flags
from keepk.model.edits import Indices


def dead_units(graph: Graph, model: nn.Module, flow: Flow) -> Flags:
    """Flags of the units that can be removed without changing an output.

    Inexact units (`lossy`) are never among them: removing them does more than zeroing their weights.
    """
    parameters = dict(model.named_parameters())
    used = {name: flow.needed(tensor) & (tensor != 0) for name, tensor in parameters.items()}
    return ~_touched(graph, used) & ~graph.units.lossy


def would_matter(graph: Graph, model: nn.Module, flow: Flow) -> Flags:
    """Flags of the units whose producer weights would influence an output if they were not zero.

    A dead unit with this flag is dead for lack of inputs, one without it for lack of readers.
    """
    made = {(tensor, dim) for (tensor, dim), role in graph.wiring.roles.items() if role is Role.PRODUCER}
    parameters = dict(model.named_parameters())
    needed = {name: flow.needed(tensor) for name, tensor in parameters.items()}
    return _touched(graph, needed, made)


def _touched(graph: Graph, marks: Mapping[str, Tensor], only: set[tuple[str, int]] | None = None) -> Flags:
    """Flags of the units that have a marked element in one of their slices; `only` limits the axes."""
    touched = np.zeros(len(graph.units), bool)
    for axis, units, places in _slices(graph):
        if axis.tensor in marks and (only is None or (axis.tensor, axis.dim) in only):
            along = _by_index(marks[axis.tensor], axis).cpu().numpy()
            touched[units[along[places]]] = True
    return touched


def _slices(graph: Graph) -> Iterator[tuple[Axis, Indices, Indices]]:
    """Axis by axis, the units that have slices on it, and the indices of these slices."""
    units = graph.units
    owner = np.repeat(np.arange(len(units)), np.diff(units.starts))
    for number in np.unique(units.axis).tolist():
        mine = units.axis == number
        yield graph.wiring.axes[number], owner[mine], units.index[mine]


def _by_index(marks: Tensor, axis: Axis) -> Tensor:
    """For each index of an axis, whether any element there is marked."""
    # The in-channels of a grouped convolution are numbered through all groups, but each row has only those of one.
    if axis.groups > 1:
        grouped = marks.reshape(axis.groups, -1, *marks.shape[1:]).any(dim=1)
        return grouped.reshape(axis.size, -1).any(dim=1)
    return marks.movedim(axis.dim, 0).reshape(axis.size, -1).any(dim=1)


def column_units(graph: Graph, tensor: str, dim: int) -> Indices:
    """The unit of each index of a tensor's axis; -1 for an index without one."""
    found = np.full(graph.wiring.shapes[tensor][dim], -1, np.int64)
    for axis, units, places in _slices(graph):
        if (axis.tensor, axis.dim, axis.groups) == (tensor, dim, 1):
            found[places] = units
    return found


def removable(graph: Graph, dead: Flags) -> Flags:
    """Flags of as many dead units as can be removed.

    Every layer keeps one unit, bound blocks lose equal numbers, and no unit is removed with them that is not dead.
    """
    picks = [pick for blocks in graph.choices() if len(pick := _pick(graph, blocks, dead))]
    # Usually all picks can be removed together. If they do not fit together, add them one by one.
    together = _closed(graph, np.concatenate([*picks, np.zeros(0, np.int64)]), dead)
    if together is not None:
        return together
    chosen = np.zeros(len(dead), bool)
    for pick in picks:
        closed = _closed(graph, np.union1d(np.flatnonzero(chosen), pick), dead)
        chosen = chosen if closed is None else closed
    return chosen


def _pick(graph: Graph, blocks: tuple[Indices, ...], dead: Flags) -> Indices:
    """The first dead units of each block, the same number from each."""
    # Channels that several BatchNorms read separately ("source") are removed with their last read, not picked here.
    if any(graph.groups[group].kind == "source" for group in np.unique(graph.units.group[np.concatenate(blocks)])):
        return np.zeros(0, np.int64)
    count = min(min(int(dead[block].sum()), len(block) - 1) for block in blocks)
    count = fitting(count, map(len, blocks), graph.multiple(blocks))
    return np.concatenate([block[dead[block]][:count] for block in blocks])


def _closed(graph: Graph, units: Indices, dead: Flags) -> Flags | None:
    """Flags of the units and of those removed with them; None if they cannot be removed, or not all are dead."""
    try:
        edits = graph.edits(np.unique(units).tolist())
    except ShrinkError:
        return None
    closed = np.zeros(len(dead), bool)
    closed[edits.units] = True
    return closed if dead[closed].all() else None


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
READERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
ROUNDING = 32  # units in the last place by which sums of the same numbers may differ between positions


@dataclass(frozen=True)
class ReadConstants:
    """A layer and the constants that it reads, one per input channel; NaN for a channel that varies."""

    path: str
    constants: Tensor


def reader_paths(model: nn.Module) -> list[str]:
    """The layers into whose bias constants can be folded: plain ones, not grouped, with untied weight and bias."""
    owners: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return [
        path
        for path, module in model.named_modules()
        if type(module) in READERS
        and getattr(module, "groups", 1) == 1
        and set(module._parameters) == {"weight", "bias"}
        and all(owners[id(parameter)] == 1 for parameter in module.parameters())
    ]


def read_constants(model: nn.Module, flow: Flow) -> list[ReadConstants]:
    """The constants that layers read, for layers that are called once and whose weights are used once."""
    modules = dict(model.named_modules())
    return [
        ReadConstants(path, _constants(modules[path], calls[0]))
        for path, calls in flow.calls.items()
        if len(calls) == 1 and all(flow.uses[id(parameter)] == 1 for parameter in modules[path].parameters())
    ]


def common_constants(by_example: Sequence[list[ReadConstants]]) -> list[ReadConstants]:
    """The constants that layers read in the forward passes of all examples; NaN where these differ."""
    first, *others = by_example
    same = list[ReadConstants]()
    for layer in first:
        found = [next((it for it in other if it.path == layer.path), None) for other in others]
        if all(it is not None for it in found):
            agree = [it.constants == layer.constants for it in found if it is not None]
            unknown = torch.full_like(layer.constants, torch.nan)
            kept = torch.stack(agree).all(dim=0) if agree else torch.ones_like(unknown, dtype=torch.bool)
            same.append(ReadConstants(layer.path, torch.where(kept, layer.constants, unknown)))
    return same


def _constants(module: nn.Module, given: Input) -> Tensor:
    """The value of each channel if it is the same constant at every position, else NaN."""
    weight, tensor = module.get_parameter("weight"), given.tensor
    channels = weight.shape[_read_dim(module)]
    dim = tensor.ndim - 1 if isinstance(module, nn.Linear) else tensor.ndim + 1 - weight.ndim
    unknown = torch.full((channels,), torch.nan, dtype=torch.float64, device=weight.device)
    # If the tensor was written to after the call, it no longer has the values that the layer read.
    if tensor._version != given.version or not tensor.is_floating_point() or not tensor.numel():
        return unknown
    if not 0 <= dim < tensor.ndim or tensor.shape[dim] != channels:
        return unknown
    values = tensor.movedim(dim, 0).reshape(channels, -1).to(torch.float64)
    varies = given.knowledge.varies.movedim(dim, 0).reshape(channels, -1).any(dim=1)
    low, high = values.amin(dim=1), values.amax(dim=1)
    slack = ROUNDING * torch.finfo(tensor.dtype).eps * torch.maximum(low.abs(), high.abs())
    return torch.where(varies | ~(high - low <= slack) | ~low.isfinite(), unknown, (low + high) / 2)


def _read_dim(module: nn.Module) -> int:
    return 0 if isinstance(module, TRANSPOSED) else 1


def _meets_everywhere(module: nn.Module) -> bool:
    """Whether a layer has a bias, and reads a nonzero constant at every position."""
    # A transposed convolution adds up different numbers of taps near the edges, even without padding.
    if getattr(module, "bias", None) is None or isinstance(module, TRANSPOSED):
        return False
    padding = getattr(module, "padding", 0)
    return padding == "valid" or (not isinstance(padding, str) and not np.any(padding))


@torch.no_grad()
def fold(graph: Graph, model: nn.Module, found: list[ReadConstants], wanted: Flags) -> tuple[Flags, Flags]:
    """Fold the constants of the wanted units wherever that is exact, and zero the columns that read them.

    Args:
        graph: The trace.
        model: A copy of the model, which is changed.
        found: The constants that layers read.
        wanted: The units that may be folded.

    Returns:
        Flags of the units that lost a column, and of those whose constant was not zero.
    """
    lost, given = np.zeros(len(wanted), bool), np.zeros(len(wanted), bool)
    for module, units, constants in _columns(graph, model, found):
        weight = module.get_parameter("weight")
        columns = weight.movedim(_read_dim(module), 0)
        foldable = ~constants.isnan() & (columns != 0).flatten(1).any(dim=1)
        if not _meets_everywhere(module):
            foldable &= constants == 0  # zeros add nothing to a bias, and padding adds more zeros
        asked = (units >= 0) & wanted[units] & foldable.cpu().numpy()
        index = torch.from_numpy(np.flatnonzero(asked)).to(weight.device)
        if len(index):
            _into_bias(module, columns[index], constants[index])
            columns[index] = 0
            lost[units[asked]] = True
            given[units[asked & (constants != 0).cpu().numpy()]] = True
    return lost, given


def _columns(
    graph: Graph, model: nn.Module, found: list[ReadConstants]
) -> Iterator[tuple[nn.Module, np.ndarray, Tensor]]:
    """For each layer, the unit and the constant of each of its input columns."""
    modules = dict(model.named_modules())
    for layer in found:
        module, name = modules[layer.path], f"{layer.path}.weight".removeprefix(".")
        yield module, column_units(graph, name, _read_dim(module)), layer.constants


def _into_bias(module: nn.Module, columns: Tensor, constants: Tensor) -> None:
    if bool((constants != 0).any()):
        # A constant is the same under every tap of a kernel, so the taps can be added up. In float64, since the sum
        # replaces thousands of additions that the layer would have made in its own order.
        sums = columns.flatten(2).sum(dim=2, dtype=torch.float64) if columns.ndim > 2 else columns.to(torch.float64)
        bias = module.get_parameter("bias")
        bias.copy_((bias.to(torch.float64) + constants @ sums).to(bias.dtype))
