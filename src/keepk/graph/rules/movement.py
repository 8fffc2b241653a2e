"""Data movement: the maps are moved in the same way, if the movement commutes with removing channels.

A movement commutes with removal if "move, then remove" and "remove, then move" give the same tensor. An unsqueeze does
for any choice of channels, a reshape only if what remains fills a box, a roll never.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from keepk.graph.ids.atoms import COPIES, label_of
from keepk.graph.ids.maps import Map, aligned, along, compress, support
from keepk.graph.ids.merge import Operand
from keepk.graph.rules.call import Call
from keepk.graph.rules.registry import rule


# Most of these reach the trace under torch.inference_mode only; otherwise torch turns them into permute and transpose.
@rule("permute", "t", "transpose", "numpy_T", "mT", "mH", "matrix_H", "adjoint", "swapaxes", "swapdims", "movedim",
      "moveaxis")  # fmt: skip
def permuted(call: Call) -> None:
    """Permute the maps; a map over several dims that change their order requires a grid."""
    order = _order(call)
    moved = []
    for index_map in call.maps(call.inputs[0]):
        places = [order.index(dim) for dim in support(index_map)]
        if places != sorted(places):
            call.require_grid(index_map, "is transposed")
        moved.append(index_map.transpose(order))
    call.label_output(moved)


def _order(call: Call) -> list[int]:
    """For each dim of the result, the dim of the input that it comes from."""
    # All of these operations have different arguments. Running one on a meta tensor of shape (0, 1, 2, ...) lets torch
    # interpret them: the shape of the result is the permutation.
    numbered = torch.empty(tuple(range(call.inputs[0].ndim)), device="meta")
    return list(call.operation(**{**call.arguments, "self": numbered}).shape)


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten", "flatten")
def reshaped(call: Call) -> None:
    """Fold and unfold runs of dims in row-major order."""
    source, output = call.inputs[0], call.outputs[0]
    if source.numel() == 0 or source.numel() != output.numel():
        call.pin_inputs("is viewed as another dtype")
        return
    runs = _runs(tuple(source.shape), tuple(output.shape))
    maps = _without_folded_copies(call, call.maps(source), runs)
    call.label_output([_refolded(call, m, tuple(source.shape), tuple(output.shape), runs) for m in maps])


def _without_folded_copies(call: Call, maps: Sequence[Map], runs: list[tuple[list[int], list[int]]]) -> Sequence[Map]:
    """The maps without atoms of expanded dims that are folded together with channels."""
    # Keys of grouped queries are expanded over the queries of a group and then folded into the heads. Each copy is the
    # same channel once more, so the map of the channels already says everything.
    copies = [m for m in maps if call.atoms.axis(int(m.max())).dim == COPIES]
    taken = {dim for m in maps if not any(m is copy for copy in copies) for dim in support(m)}
    folded = {dim for old_dims, _ in runs if taken & set(old_dims) for dim in old_dims}
    return [m for m in maps if not any(m is copy for copy in copies) or not folded & set(support(m))]


def _refolded(
    call: Call, index_map: Map, old: tuple[int, ...], new: tuple[int, ...], runs: list[tuple[list[int], list[int]]]
) -> Map:
    """The map in the new shape. Only runs of dims that it depends on are spread to full size, so it stays small."""
    spread, target = [1] * len(old), [1] * len(new)
    unfolded = False
    for old_dims, new_dims in runs:
        hot = [dim for dim in old_dims if index_map.shape[dim] > 1]
        if hot:
            for dim in old_dims:
                spread[dim] = old[dim]
            for dim in new_dims:
                target[dim] = new[dim]
            unfolded |= sum(new[dim] > 1 for dim in new_dims) > 1
    folded = compress(np.broadcast_to(index_map, spread).reshape(target))
    if unfolded and len(support(folded)) > 1:
        # view(batch, heads, -1) works on what remains only if every head keeps equally many.
        call.require_equal_rows(folded, "is unfolded into equal parts")
    return folded


def _runs(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Which runs of old dims become which runs of new dims: the shortest ones with equal products.

    >>> _runs((2, 12, 5), (2, 3, 4, 5))
    [([0], [0]), ([1], [1, 2]), ([2], [3])]
    """
    runs, one, other = [], 0, 0
    while one < len(old) or other < len(new):
        left, right, size_left, size_right = list[int](), list[int](), 1, 1
        while not (left or right) or size_left != size_right:
            grow_left = size_left <= size_right and one < len(old) and not (size_left == size_right and left)
            if grow_left or other >= len(new):
                left.append(one)
                size_left *= old[one]
                one += 1
            else:
                right.append(other)
                size_right *= new[other]
                other += 1
        runs.append((left, right))
    return runs


@rule("unsqueeze")
def unsqueezed(call: Call) -> None:
    """Insert a dim of size 1."""
    dim = call["dim"] % call.outputs[0].ndim
    call.label_output([np.expand_dims(m, dim) for m in call.maps(call.inputs[0])])


@rule("squeeze")
def squeezed(call: Call) -> None:
    """Remove dims of size 1."""
    source = call.inputs[0]
    gone = {dim for dim in call.dims("dim", source.ndim) if source.shape[dim] == 1}
    kept = [dim for dim in range(source.ndim) if dim not in gone]
    call.label_output([m.reshape([m.shape[dim] for dim in kept]) for m in call.maps(source)])


@rule("expand", "expand_as")
def expanded(call: Call) -> None:
    """Repeat along dims of size 1: the maps stay, and the repeated dims get atoms."""
    call.label_output([*(aligned(m, call.outputs[0].ndim) for m in call.maps(call.inputs[0])), *_copies(call)])


def _copies(call: Call) -> list[Map]:
    """Atoms for the dims along which a tensor is repeated."""
    # Every entry along such a dim is the same, so any of them may be removed together with the channel it meets: a
    # token mask expanded over channels, an index that is the same for all channels, keys that all heads share. Without
    # atoms the dim would count as one without channels, and pin what it is combined with.
    source, output = call.inputs[0], call.outputs[0]
    before = (1,) * (output.ndim - source.ndim) + tuple(source.shape)
    spread = [dim for dim, size in enumerate(output.shape) if before[dim] == 1 < size]
    return [along(call.atoms.new(output.shape[dim], dim=COPIES), dim, output.ndim) for dim in spread]


@rule("flip")
def flipped(call: Call) -> None:
    """Reverse dims, which commutes with removal where whole rows or columns go."""
    source = call.inputs[0]
    dims = call.dims("dims", source.ndim)
    moved = []
    for index_map in call.maps(source):
        over = tuple(dim for dim in dims if index_map.shape[dim] > 1)
        if over and len(support(index_map)) > 1:
            call.require_grid(index_map, "is flipped")
        moved.append(np.flip(index_map, over))
    call.label_output(moved)


@rule("repeat", "tile")
def repeated(call: Call) -> None:
    """Repeat whole blocks: 1 2 becomes 1 2 1 2."""
    repeats = call.get("repeats", call.get("dims"))
    rank = call.outputs[0].ndim
    moved = []
    for index_map in (aligned(m, rank) for m in call.maps(call.inputs[0])):
        times = [count if size > 1 else 1 for count, size in zip(repeats, index_map.shape, strict=True)]
        copies = np.tile(index_map, times)
        _demand_grid(call, index_map, [dim for dim, count in enumerate(times) if count > 1])
        moved.append(copies)
    call.label_output([*moved, *_copies(call)])


@rule("repeat_interleave")
def interleaved(call: Call) -> None:
    """Repeat each entry: 1 2 becomes 1 1 2 2."""
    if len(call.inputs) != 1 or not isinstance(call.get("repeats"), int) or call.get("dim") is None:
        call.pin_inputs("is repeated by a tensor")
        return
    dim = call["dim"] % call.inputs[0].ndim
    moved = []
    for index_map in call.maps(call.inputs[0]):
        many = call["repeats"] if index_map.shape[dim] > 1 else 1
        _demand_grid(call, index_map, [dim] if many > 1 else [])
        moved.append(np.repeat(index_map, many, axis=dim))
    call.label_output(moved)


def _demand_grid(call: Call, index_map: Map, repeated: list[int]) -> None:
    """Require whole rows or columns of a map over several dims, without which its repetition would be out of order."""
    if repeated and len(support(index_map)) > 1:
        call.require_grid(index_map, "is repeated")


@rule("roll")
def rolled(call: Call) -> None:
    """Pin the rolled dims: which entry wraps around depends on the size."""
    source = call.inputs[0]
    dims = call.dims("dims", source.ndim)
    kept = []
    for index_map in call.maps(source):
        if set(support(index_map)) & set(dims):
            call.pin(index_map, "roll along the axis does not commute with removal")
        else:
            kept.append(index_map)
    call.label_output(kept)


@rule("cat", "concat", "concatenate")
def concatenated(call: Call) -> None:
    """Concatenate the maps along one dim, and merge them along the others."""
    parts = [tensor for tensor in call["tensors"] if tensor.numel()]
    rank = call.outputs[0].ndim
    dim = call.get("dim", 0) % rank
    along_dim = [[m for m in call.maps(part) if m.shape[dim] > 1] for part in parts]
    across = [[m for m in call.maps(part) if m.shape[dim] == 1] for part in parts]
    merged = _agreeing(call, parts, across, dim)
    zeros = call.zero_in(parts, merged)
    if any(along_dim):
        merged.append(_joined(call, parts, along_dim, dim))
        # A part without a map along the dim has no channels that could be removed, so it is not asked.
        zeros.append(
            all(label_of(part).zero_along(m) for part, maps in zip(parts, along_dim, strict=True) for m in maps)
        )
    call.label_output(merged, zero=zeros)


@rule("stack")
def stacked(call: Call) -> None:
    """Concatenate along a new dim, which makes maps over (part, channel)."""
    parts = call["tensors"]
    rank = call.outputs[0].ndim
    dim = call.get("dim", 0) % rank
    maps = [[np.expand_dims(m, dim) for m in call.maps(part)] for part in parts]
    places = {support(m): None for part in maps for m in part}
    stacked_maps = []
    for place in places:
        pieces = [next((m for m in part if support(m) == place), None) for part in maps]
        if any(piece is None for piece in pieces):
            for piece in pieces:
                if piece is not None:
                    call.pin(piece, "is stacked with a tensor that has no channels")
            continue
        joint = compress(np.concatenate([piece for piece in pieces if piece is not None], axis=dim))
        if len(support(joint)) > 1:  # different channels in each part, so all parts must keep equally many
            call.require_equal_rows(np.moveaxis(joint, dim, 0), "is stacked")
            if support(joint)[0] != dim:
                call.require_grid(joint, "is stacked")
        stacked_maps.append(joint)
    # A map over the parts has the atoms of all of them; one that all share has the same ones in each.
    zeros = [all(_zero_where_tracked(part, joint) for part in parts) for joint in stacked_maps]
    call.label_output(stacked_maps, zero=zeros)


def _zero_where_tracked(part: Tensor, joint: Map) -> bool:
    """Whether a tensor is zero along all of its maps that have atoms in common with a joint map."""
    label = label_of(part)
    return label.all_zero or all(
        zero for m, zero in zip(label.maps, label.zeros, strict=True) if np.isin(m[m > 0], joint).any()
    )


def _agreeing(call: Call, parts: list[Tensor], across: list[list[Map]], dim: int) -> list[Map]:
    """The merged maps of the parts across the concatenated dim."""
    operands = []
    for part, maps in zip(parts, across, strict=True):
        shape = tuple(1 if place == dim else size for place, size in enumerate(part.shape))
        operands.append(Operand(maps, shape, [False] * len(maps), label_of(part).neutral))  # `zero_in` asks the parts
    return call.merge(operands, "is concatenated") if len(operands) > 1 else list(operands[0].maps)


def _joined(call: Call, parts: list[Tensor], along_dim: list[list[Map]], dim: int) -> Map:
    """The maps of the parts along the concatenated dim, as one; 0 for a part that has none."""
    places = {place for maps in along_dim for m in maps[:1] for place in support(m)} | {dim}
    pieces = []
    for part, maps in zip(parts, along_dim, strict=True):
        shape = [size if place in places else 1 for place, size in enumerate(part.shape)]
        for extra in maps[1:]:
            call.pin(extra, "two axes are folded into one and concatenated")
        pieces.append(np.broadcast_to(maps[0], shape) if maps else np.zeros(shape, np.int32))
    joint = compress(np.concatenate(pieces, axis=dim))
    if len(support(joint)) > 1:
        call.require_equal_rows(joint, "is concatenated")
    return joint


@rule("as_strided", "diagonal", "diag_embed", "rot90", "unfold_backward")
def restrided(call: Call) -> None:
    """Pin everything: elements are picked by memory address or position."""
    call.pin_inputs("elements are picked by position")


@rule("unfold")
def windows(call: Call) -> None:
    """Pin the dim along which windows slide; all others keep their maps."""
    dim = call["dimension"] % call.inputs[0].ndim
    kept = []
    for index_map in call.maps(call.inputs[0]):
        if index_map.shape[dim] > 1:
            call.pin(index_map, "windows slide along the axis")
        else:
            kept.append(index_map[..., None])
    call.label_output(kept)
