"""Reductions over dims: exact if a removed channel contributed nothing, lossy otherwise."""

import torch

from keepk.graph.algebra import Tracked
from keepk.graph.call import Call
from keepk.graph.label import label_of
from keepk.graph.maps import Map
from keepk.graph.table import rule

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
