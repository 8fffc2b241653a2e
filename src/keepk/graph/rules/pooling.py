"""Pooling and resampling of images: each channel by itself, over the spatial dims behind it."""

from keepk.graph.call import Call
from keepk.graph.maps import support
from keepk.graph.table import rule

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
