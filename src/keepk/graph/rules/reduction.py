"""Reductions over dims: exact if a removed channel contributed nothing, lossy otherwise."""

import torch

from keepk.graph.ids.atoms import label_of
from keepk.graph.ids.maps import Map, support
from keepk.graph.ids.merge import Tracked
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
    """Whether the result is the same without the zeros among what is reduced."""
    order = call.get("ord", call.get("p", 2))
    return call.name.removeprefix("aten::") in ZEROS_DO_NOT_COUNT and order >= 0


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
