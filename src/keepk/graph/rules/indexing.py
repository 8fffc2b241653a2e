"""Slices, splits and indexing.

Whether a slice follows a cut (``x[:, : c // 2]``) or not (``x[:, :4]``) cannot be seen from one forward pass. The rules
assume that it follows, and replays on cut copies find out.

Along a dim that is indexed by a tensor the positions are data, so channels there are pinned.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepk.graph.ids.atoms import label_of
from keepk.graph.ids.maps import Map, along, compress, support
from keepk.graph.ids.merge import Operand
from keepk.graph.rules.call import Call
from keepk.graph.rules.registry import rule


@rule("slice", "narrow")
def sliced(call: Call) -> None:
    """Slice the maps along a dim; a step pins positions along it."""
    source, output = call.inputs[0], call.outputs[0]
    dim = call.get("dim", 0) % source.ndim
    kept = []
    for index_map in call.maps(source):
        if index_map.shape[dim] == 1 or source.shape[dim] == output.shape[dim]:
            kept.append(index_map)
        elif call.get("step", 1) != 1:
            why = "a slice with a step does not commute with removal"
            if call.pin_along(index_map, dim, why):
                taken = range(source.shape[dim])[call.get("start") : call.get("end") : call.get("step")]
                kept.append(compress(np.take(index_map, taken, axis=dim)))
        else:
            start = call.get("start", 0)
            size = source.shape[dim]
            start = int(max(start + size, 0) if start < 0 else min(start, size))  # as Python clips a slice
            kept.append(_run(call, index_map, dim, start, output.shape[dim]))
    call.label_output(kept)


def _run(call: Call, index_map: Map, dim: int, start: int, length: int) -> Map:
    """A run of consecutive positions of a map, with the conditions under which it follows a cut."""
    part = np.take(index_map, range(start, start + length), axis=dim)
    if length > 1 and index_map.shape[dim] % length == 0 and start % length == 0:
        # Halves and thirds: `x[:, : c // 2]` follows a cut if all parts keep the same number.
        _bind(call, np.split(index_map, index_map.shape[dim] // length, axis=dim), dim, "is sliced in equal parts")
    elif len(support(index_map)) > 1:
        call.require_grid(index_map, "is sliced")
    return _followed(call, part)


def _followed(call: Call, part: Map) -> Map:
    """The part of a map that is taken; a single channel leaves no map, so it is recorded by its number."""
    part = compress(part)
    if not support(part):
        call.take_by_number(part)
    return part


@rule("select")
def selected(call: Call) -> None:
    """Take one row of a dim."""
    source = call.inputs[0]
    dim, index = call["dim"] % source.ndim, call["index"]
    rows = [_followed(call, np.take(m, [index], axis=dim)) if m.shape[dim] > 1 else m for m in call.maps(source)]
    for index_map in call.maps(source):
        if index_map.shape[dim] > 1 and support(index_map)[0] != dim:
            call.require_grid(index_map, "a row is selected")
    call.label_output([row.squeeze(dim) for row in rows])


@rule("unbind")
def unbound(call: Call) -> None:
    """Take all rows of a dim, one by one."""
    source = call.inputs[0]
    dim = call.get("dim", 0) % source.ndim
    _split(call, [1] * len(call.outputs), dim, squeeze=True)


@rule("split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk", "unsafe_chunk", "tensor_split",
      "split_copy", "split_with_sizes_copy")  # fmt: skip
def split(call: Call) -> None:
    """Split a dim into consecutive runs."""
    dim = call.get("dim", 0) % call.inputs[0].ndim
    _split(call, [output.shape[dim] for output in call.outputs], dim, squeeze=False)


def _split(call: Call, sizes: Sequence[int], dim: int, *, squeeze: bool) -> None:
    """Label all outputs with their parts of the maps; `squeeze` removes the dim, as unbind does."""
    ends = np.cumsum(sizes)[:-1]
    parts: list[list[Map]] = [[] for _ in sizes]
    for index_map in call.maps(call.inputs[0]):
        pieces = [index_map] * len(sizes) if index_map.shape[dim] == 1 else np.split(index_map, ends, axis=dim)
        if index_map.shape[dim] > 1:
            _bind(call, pieces, dim, "is split in equal parts")
        for part, piece in zip(parts, pieces, strict=True):
            folded = _followed(call, piece) if support(index_map) else piece
            part.append(folded.squeeze(dim) if squeeze else folded)
    for output, maps in zip(call.outputs, parts, strict=True):
        call.label_output(maps, to=output)


def _bind(call: Call, pieces: Sequence[Map], dim: int, why: str) -> None:
    """Require that parts of equal size keep equal numbers."""
    # Along an inner dim of a map over several dims, a part is a set of columns: they are removed as a whole.
    index_map = pieces[0]
    inner = len(support(index_map)) > 1 and dim != support(index_map)[0]
    if inner:
        call.require_grid(np.concatenate(pieces, axis=dim), why)
    if len(pieces) > 1 and len({piece.shape for piece in pieces}) == 1 and index_map.size > 1:
        call.require_equal_rows(np.stack([piece.ravel() for piece in pieces]), why)


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
    _pin_indices(call)
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


def _pin_indices(call: Call) -> None:
    for index in call["indices"]:
        for index_map in call.maps(index) if isinstance(index, Tensor) else ():
            call.pin(index_map, "is used as an index")


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
    _pin_indices(call)
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
    for other in call.inputs[1:]:  # ids, which a bag sums over, and offsets and weights of bags
        for index_map in call.maps(other):
            call.pin(index_map, "picks or weighs rows of an embedding")
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
