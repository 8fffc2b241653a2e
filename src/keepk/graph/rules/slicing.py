"""Parts of a tensor: slices, splits, single rows.

Whether a slice follows a cut (``x[:, : c // 2]``) or not (``x[:, :4]``) cannot be seen from one forward pass. The rules
assume that it follows, and replays on cut copies find out.
"""

from collections.abc import Sequence

import numpy as np

from keepk.graph.call import Call
from keepk.graph.maps import Map, compress, support
from keepk.graph.table import rule


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
