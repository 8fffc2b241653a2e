"""Normalisations: exact where whole groups are removed, lossy where part of a group is.

BatchNorm normalises each channel by itself, so removing one changes no other. LayerNorm and softmax divide by a sum
over channels, which changes when one is missing; the channels are then marked lossy, and the user decides.
"""

from torch import Tensor

from keepk.graph.ids.atoms import label_of
from keepk.graph.ids.facts import Line
from keepk.graph.ids.maps import Map, along, support
from keepk.graph.ids.merge import Operand
from keepk.graph.rules.call import Call
from keepk.graph.rules.registry import rule


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
    scaled = len([tensor for tensor in carriers if all(label_of(tensor).zeros) and call.maps(tensor)]) >= 2
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
    call.label_output(merged, zero=[bool(scaling) and all(it.zero_along(m) for it in scaling) for m in merged])


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
