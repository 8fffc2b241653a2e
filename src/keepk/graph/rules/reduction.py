"""Reductions, pooling and normalisations.

A reduction over channels is exact if a removed channel contributed nothing, and lossy otherwise. Pooling and resampling
treat each channel by itself. Normalisations are exact where whole groups are removed, and lossy where part of a group
is. BatchNorm normalises each channel by itself, so removing one changes no other. LayerNorm and softmax divide by a sum
over channels, which changes when one is missing, so the channels are marked lossy and the user decides.
"""

import torch
from torch import Tensor

from keepk.graph.ids.atoms import label_of
from keepk.graph.ids.facts import Line
from keepk.graph.ids.maps import Map, along, support
from keepk.graph.ids.merge import Operand, Tracked
from keepk.graph.rules.call import Call
from keepk.graph.rules.registry import rule

# Removing zeros does not change these, except for norms of negative order, where a single 0 makes the result 0.
ZEROS_DO_NOT_COUNT = ("sum", "linalg_vector_norm", "norm", "any", "count_nonzero", "frobenius_norm", "nansum")


@rule("sum", "mean", "amax", "amin", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm", "prod",
      "nansum", "logsumexp", "any", "all", "argmax", "argmin", "count_nonzero", "frobenius_norm", "nanmean",
      "aminmax")  # fmt: skip
def reduced(call: Call) -> None:
    """Reduce the maps over some dims; lossy unless removed channels are 0 and zeros do not count."""
    # A channel of zeros adds nothing to a sum. It does count in a mean (the divisor), a maximum, a product or a
    # variance.
    source = call.inputs[0]
    dims = call.dims("dim", source.ndim)
    label = label_of(source)
    left = list[Tracked]()
    for index_map, zero in zip(label.maps, label.zeros, strict=True):
        call.require_aligned(index_map, dims, "is reduced")
        if not (zero and _zeros_do_not_count(call)):
            call.mark_lossy(index_map, dims, f"{call.name.removeprefix('aten::')} over the axis")
        left += [Tracked(rows, zero and _is_zero_of_zeros(call)) for rows in call.reduce([index_map], dims)]
    call.note_reader("a reduction", label.maps, dims)
    for output in call.outputs:
        is_position = output.dtype == torch.int64 and output is not call.outputs[0]  # of a maximum
        zeros = [zero and not is_position for _, zero in left]
        call.label_output([_shaped(m, dims, output.ndim) for m, _ in left], to=output, zero=zeros)


@rule("max", "min")
def extreme(call: Call) -> None:
    """Apply the pointwise rule to two tensors, the reduction to one."""
    if len(call.inputs) == 2:
        call.pointwise()
    else:
        reduced(call)


def _zeros_do_not_count(call: Call) -> bool:
    """Whether the result is the same without the zeros among the reduced elements."""
    order, name = call.get("ord", call.get("p", 2)), call.name.removeprefix("aten::")
    counts_nan = name in ("any", "count_nonzero") and label_of(call.inputs[0]).undefined
    return name in ZEROS_DO_NOT_COUNT and order >= 0 and not counts_nan


def _shaped(index_map: Map, dims: list[int], rank: int) -> Map:
    """A reduced map without the reduced dims, unless the operation kept them (keepdim=True)."""
    if rank == index_map.ndim:
        return index_map
    return index_map.reshape([size for dim, size in enumerate(index_map.shape) if dim not in dims])


def _is_zero_of_zeros(call: Call) -> bool:
    """Whether the result is 0 where everything reduced is 0; positions (argmax) are not values."""
    return call.name not in ("aten::logsumexp", "aten::all", "aten::prod", "aten::argmax", "aten::argmin")


POOLS = (
    "max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_linear1d",
    "upsample_trilinear3d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "grid_sampler_2d", "grid_sampler_3d", "mkldnn_max_pool2d",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "fractional_max_pool2d", "max_unpool2d", "cudnn_grid_sampler",
)  # fmt: skip
SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


@rule(*POOLS)
def pooled(call: Call) -> None:
    """Pin maps over the spatial dims, and pass on all others."""
    source = call.inputs[0]
    # grid_sampler_2d and the like end in "2d". For a name without a number, two spatial dims is what torch means.
    count = next((n for mark, n in SPATIAL.items() if mark in call.name), 2)
    moved = set(range(source.ndim - count, source.ndim))
    kept = []
    for index_map in call.maps(source):
        inside = set(support(index_map)) & moved
        # A map over channels and positions stays a map over channels, with its positions united.
        if inside == set(support(index_map)):
            call.pin(index_map, "is pooled or resampled along the axis")
        else:
            kept.append(call.union_over(index_map, sorted(inside)))
    for other in call.inputs[1:]:
        for index_map in call.maps(other):
            call.pin(index_map, "says where to sample")
    # Indices of a max-pooling are positions, and position 0 is not "zero".
    values, *indices = call.outputs
    call.label_output(kept, to=values, zero=source)
    for output in indices:
        call.label_output(kept, to=output, zero=False)


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm",
      "batch_norm", "_batch_norm_no_update", "_batch_norm_with_update", "_batch_norm_with_update_functional",
      "miopen_batch_norm")  # fmt: skip
def batch_normalised(call: Call) -> None:
    """Merge scale, shift and statistics with the channels, or record a read that can be dropped by itself."""
    images, output = call.inputs[0], call.outputs[0]
    carriers = [tensor for tensor in call.inputs[1:] if tensor.ndim == 1 and tensor.shape[0] == images.shape[1]]
    maps = [_over_channels(call, m) for m in call.maps(images)]
    for tensor in carriers:
        call.note_carrier(tensor)
    # With scale and shift at 0 the output is 0, whatever the running statistics are. Without an affine part it is not:
    # (0 - mean) / std.
    affine = [call.get("weight"), call.get("bias")]
    scaled = all(it is not None and all(label_of(it).zeros) and bool(call.maps(it)) for it in affine)
    if call.can_select(maps, carriers):
        left = _read(call, maps, carriers, output.ndim)
        call.label_output(left, zero=[scaled and 1 in support(m) for m in left])
        return
    shape = tuple(size if dim == 1 else 1 for dim, size in enumerate(images.shape))
    operands = [Operand(maps, tuple(images.shape), [False] * len(maps), label_of(images).neutral)]
    operands += [call.shaped_operand(t, lambda m: along(m, 1, output.ndim), shape) for t in carriers]
    for index_map in maps:
        if 1 not in support(index_map):
            call.mark_lossy(index_map, support(index_map), "is normalised over")
    merged = call.merge(operands, "is normalised")
    call.label_output(merged, zero=[scaled and support(m) == (1,) for m in merged])


def _over_channels(call: Call, index_map: Map) -> Map:
    """A map over the channels with all its other dims united, since the statistics are taken over them."""
    dims = support(index_map)
    return call.union_over(index_map, [dim for dim in dims if dim != 1]) if 1 in dims else index_map


def _read(call: Call, maps: list[Map], carriers: list[Tensor], rank: int) -> list[Map]:
    """The maps of a BatchNorm's output, which has the atoms of its parameters; the read links them to its input."""
    # Separate atoms on both sides, so that a channel which several BatchNorms read can be dropped by one of them.
    # `solve` unites the two where the BatchNorm is the only reader.
    own = call.maps(carriers[0])[0]
    for tensor in carriers[1:]:
        call.facts.add_equal(own, call.maps(tensor)[0])
    source = next(m for m in maps if 1 in support(m))
    call.note_read(source.ravel(), own.ravel())
    return [along(own, 1, rank), *(m for m in maps if 1 not in support(m))]


@rule("native_layer_norm", "_fused_rms_norm", "rms_norm")
def layer_normalised(call: Call) -> None:
    """Mark the normalised dims lossy, and merge them with scale and shift."""
    source, rank = call.inputs[0], call.outputs[0].ndim
    over = range(rank - len(call["normalized_shape"]), rank)
    for index_map in call.maps(source):
        call.mark_lossy(index_map, over, "is normalised over")
    carriers = call.inputs[1:]
    for tensor in carriers:
        call.note_carrier(tensor)
    merged = call.merge([call.operand(tensor, rank) for tensor in call.inputs], "is normalised")
    call.label_output(merged, zero=call.zero_in(carriers, merged) if carriers else False)
    for output in call.outputs[1:]:  # mean and reciprocal standard deviation, which backward needs
        kept = [m for m in call.maps(source) if not set(support(m)) & set(over)]
        call.label_output([m for m in kept if m.ndim == output.ndim], to=output, zero=False)


@rule("native_group_norm")
def group_normalised(call: Call) -> None:
    """Collapse each group of channels into one unit, and record that the number of groups has to follow."""
    images, rank, groups = call.inputs[0], call.outputs[0].ndim, call["group"]
    channels = images.shape[1]
    maps = [_over_channels(call, m) for m in call.maps(images)]
    rows = list[Map]()
    for index_map in maps:
        if support(index_map) == (1,):
            matrix = index_map.reshape(groups, channels // groups)
            call.mark_lossy(matrix, (1,), "is normalised over")
            if groups > 1 and channels > groups:
                # Whole groups keep the result exact. Removing single channels would be lossy and would also have to
                # leave equally many in every group.
                rows.append(call.atoms.new(groups).reshape(groups, 1))
                call.facts.add_line(rows[-1], matrix, Line.COLLAPSE)
                call.require_equal_rows(matrix, "is normalised by groups")
            else:
                rows.append(index_map)
        else:
            call.mark_lossy(index_map, support(index_map), "is normalised over")
    if groups > 1 and rows:
        call.note_count(groups, rows)
    carriers = [tensor for tensor in (call.get("weight"), call.get("bias")) if tensor is not None]
    for tensor in carriers:
        call.note_carrier(tensor)
    shape = tuple(channels if dim == 1 else 1 for dim in range(rank))
    scaling = [call.shaped_operand(tensor, lambda m: along(m, 1, rank), shape) for tensor in carriers]
    source = Operand(maps, tuple(images.shape), [False] * len(maps), label_of(images).neutral)
    merged = call.merge([source, *scaling], "is normalised")
    # A shift alone does not make the output zero: the normalised values are added to it.
    scaled = call.get("weight") is not None
    call.label_output(merged, zero=[scaled and all(it.zero_along(m) for it in scaling) for m in merged])


@rule("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "logcumsumexp", "_softmax_backward_data")
def over_a_dim(call: Call) -> None:
    """Mark a dim lossy along which every entry depends on others."""
    source = call.inputs[0]
    dim = call["dim"] % source.ndim if source.ndim else 0
    for index_map in call.maps(source):
        call.mark_lossy(index_map, (dim,), "is normalised over")
    call.label_output(call.maps(source), zero=False)


@rule("_weight_norm_interface")
def weight_normalised(call: Call) -> None:
    """Merge direction v and length g of ``g v / |v|``; cutting v along the normed dims would rescale the rest."""
    direction, size = call.inputs[0], call.inputs[1]
    dim = call.get("dim", 0) % direction.ndim
    rank = direction.ndim
    merged = call.merge([call.operand(direction, rank), call.operand(size, rank)], "is normalised")
    for index_map in merged:
        call.mark_lossy(index_map, [d for d in range(rank) if d != dim], "is normalised over")
    call.label_output(merged, zero=True)
    for output in call.outputs[1:]:
        call.label_output(call.maps(size) if output.ndim == rank else (), to=output, zero=False)
