"""Indexing by tensors: along an indexed dim the positions are data, so channels there are pinned."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keepk.graph.algebra import Operand
from keepk.graph.call import Call
from keepk.graph.label import label_of
from keepk.graph.maps import Map, along, support
from keepk.graph.table import rule

BOOLEAN = (torch.bool, torch.uint8)


@rule("index_select")
def picked(call: Call) -> None:
    """Pick rows of one dim by an index: pin channels along it, pass on maps over other dims."""
    source = call.inputs[0]
    kept = [m for m in call.maps(source) if m.shape[call["dim"]] == 1]
    _pin_rest(call, call.maps(source), kept)
    call.label_output(kept, zero=source)


@rule("gather", "take_along_dim")
def gathered(call: Call) -> None:
    """Gather elements along one dim: pin channels along it; across it, source and index are matched by element."""
    source, index = call.inputs
    maps = _across(call, call["dim"], (source, index), "is gathered", in_part="is gathered in part")
    call.label_output(maps, zero=call.zero_in([source], maps))


@rule("index", "_unsafe_index")
def indexed(call: Call) -> None:
    """Apply advanced indexing: pin the indexed dims, move the maps of all others to their new positions."""
    # As in numpy: dims of the index take the place of the indexed dims if those are adjacent, and come first if not.
    source, output = call["self"], call.outputs[0]
    dims, width, mask = _indexed_dims(call["indices"])
    kept = [m for m in call.maps(source) if not set(support(m)) & set(dims)]
    _pin_rest(call, call.maps(source), kept)
    for index in call["indices"]:
        for index_map in call.maps(index) if isinstance(index, Tensor) else ():
            call.pin(index_map, "is used as an index")
    others = [dim for dim in range(source.ndim) if dim not in dims]
    together = dims == list(range(dims[0], dims[0] + len(dims))) if dims else True
    first = (dims[0] if dims else 0) if together else 0
    fresh = 1 if mask else width
    order = [*others[:first], *[None] * fresh, *others[first:]]
    if len(order) == output.ndim:
        call.label_output([m.reshape([1 if dim is None else m.shape[dim] for dim in order]) for m in kept], zero=source)
    else:
        for index_map in kept:
            call.pin(index_map, "is indexed by tensors")


def _indexed_dims(indices: list[Tensor | None]) -> tuple[list[int], int, bool]:
    """The dims that are indexed, the rank of the index, and whether a boolean mask is among the indices."""
    # A boolean mask indexes as many dims as it has, and becomes one dim of unknown length.
    dims, dim, width, mask = list[int](), 0, 0, False
    for index in indices:
        count = index.ndim if index is not None and index.dtype in BOOLEAN else 1
        if index is not None:
            dims += range(dim, dim + count)
            mask |= index.dtype in BOOLEAN
            width = max(width, 1 if index.dtype in BOOLEAN else index.ndim)
        dim += count
    return dims, width, mask


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def put(call: Call) -> None:
    """Write rows by index: pin the indexed dims, merge the dims behind them with those of the values."""
    target, values = call["self"], call["values"]
    dims, _, _ = _indexed_dims(call["indices"])
    tail = target.ndim - len(dims)
    if dims != list(range(len(dims))) or values.ndim < tail:
        # mask[:, cls] = 0 writes one number along untracked dims and binds no channels.
        if values.numel() == 1 and not any(set(support(m)) & set(dims) for m in call.maps(target)):
            call.label_output(call.maps(target), zero=False)
            return
        call.pin_inputs("is written by index")
        return
    _merge_tails(call, (target, values), tail, "is written by index", lambda m: m.reshape((1,) * len(dims) + m.shape))


@rule("index_add", "index_copy", "index_reduce")
def rows_added(call: Call) -> None:
    """Add or copy rows along one dim: across it, source and target are merged."""
    target, source = call["self"], call["source"]
    maps = _across(call, call["dim"], (target, source), "is added by index")
    call.label_output(maps, zero=call.zero_in([target, source], maps))


@rule("scatter", "scatter_add", "scatter_reduce")
def scattered(call: Call) -> None:
    """Scatter elements along one dim: across it, target, source and index are matched by element."""
    target, source, index = call["self"], call.get("src"), call["index"]
    if not isinstance(source, Tensor):
        call.pin_inputs("is scattered by index")
        return
    maps = _across(call, call["dim"], (target, source, index), "is scattered", in_part="is scattered in part")
    call.label_output(maps, zero=call.zero_in([target, source], maps))


def _across(call: Call, dim: int, tensors: Sequence[Tensor], why: str, in_part: str = "") -> list[Map]:
    """The merged maps across `dim`; channels along it are pinned, since positions there are data.

    Args:
        call: The operation.
        dim: The indexed dim.
        tensors: The tensors that are matched by element across it.
        why: A few words about the operation for the reasons of its facts.
        in_part: The reason for pinning maps over dims along which the last tensor, the index, is shorter than another
            one. By default that cannot happen.
    """
    rank, index = tensors[0].ndim, tensors[-1]
    operands = []
    for tensor in tensors:
        known = call.operand(tensor, rank)
        kept = [m for m in known.maps if m.shape[dim] == 1]
        _pin_rest(call, known.maps, kept)
        for index_map in kept if in_part else ():
            if any(tensor.shape[place] != index.shape[place] for place in support(index_map)):
                call.pin(index_map, in_part)
        shape = tuple(1 if place == dim % rank else size for place, size in enumerate(known.shape))
        operands.append(Operand(kept, shape, [False] * len(kept), known.neutral))  # `zero_in` asks the tensors
    return call.merge(operands, why)


@rule("index_fill", "masked_scatter")
def filled(call: Call) -> None:
    """Pin everything: elements are written by position, or in the order of the values."""
    call.pin_inputs("is scattered by index")


@rule("embedding", "_embedding_bag", "_embedding_bag_forward_only")
def embedded(call: Call) -> None:
    """Look up rows of a table: the vocabulary is pinned, the width is an axis of channels."""
    table, output = call["weight"], call.outputs[0]
    # The ids come from the data, so no row of the vocabulary can be renumbered.
    kept = [m for m in call.maps(table) if m.shape[0] == 1]
    _pin_rest(call, call.maps(table), kept, "rows of an embedding are picked by index")
    call.label_output([along(m.ravel(), output.ndim - 1, output.ndim) for m in kept], zero=table)
    call.note_producer(table, 1)


@rule("topk", "sort", "kthvalue", "argsort", "cummax", "cummin", "msort", "mode", "median", "nanmedian")
def ordered(call: Call) -> None:
    """Order by value along a dim: channels along it are pinned, since their order depends on the data."""
    source = call.inputs[0]
    dim = call.get("dim", -1) % source.ndim if source.ndim else 0
    over_all = "dim" not in call.arguments  # median() of a whole tensor
    kept = [] if over_all else [m for m in call.maps(source) if m.shape[dim] == 1]
    _pin_rest(call, call.maps(source), kept, "is ordered by value along the axis")
    for output in call.outputs:
        if output.ndim == source.ndim:
            call.label_output(kept, to=output, zero=False)
        else:
            call.label_output([m.squeeze(dim) for m in kept], to=output, zero=False)


def _merge_tails(call: Call, pair: tuple[Tensor, Tensor], tail: int, why: str, back: Any) -> None:
    """Merge the last `tail` dims of two tensors; `back` gives a merged map the rank of the output."""
    operands = []
    for tensor in pair:
        head = tensor.ndim - tail
        kept = [m for m in call.maps(tensor) if all(dim >= head for dim in support(m))]
        _pin_rest(call, call.maps(tensor), kept, why)
        label = label_of(tensor)
        operands.append(
            Operand(
                [m.reshape(m.shape[head:]) for m in kept],
                tuple(tensor.shape[head:]),
                [label.zero_along(m) for m in kept],
                label.neutral or tensor.numel() == 1,
                label.all_zero,
            )
        )
    merged = call.merge(operands, why)
    zeros = [all(operand.zero_along(m) for operand in operands) for m in merged]
    call.label_output([back(m) for m in merged], zero=zeros)


def _pin_rest(call: Call, maps: Sequence[Map], kept: list[Map], why: str = "is picked by index along the axis") -> None:
    """Pin the maps that are not among those kept."""
    for index_map in maps:
        if not any(index_map is other for other in kept):
            call.pin(index_map, why)
