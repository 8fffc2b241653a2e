"""Contractions: convolutions and matrix products, and operations that fold channels.

A convolution is a sum of products over input channels, group by group. With g groups, output channel o of a group sums
over the input channels i of the same group only. The joint index space is therefore (group, out, in), and a convolution
without groups is the case of one group.

A matrix product is a merge in the joint index space, then a sum over the contracted dim. ``(batch, n, k) @ (batch, k,
m)`` is a product over (batch, n, m, k), summed over k. All products here are brought to that layout, with dims of size
1 where a factor does not have them.

This module also has rules for channels folded into image dims and back, gates over halves, padding, and Fourier
transforms.
"""

import math
from collections.abc import Callable

import numpy as np
from torch import Tensor

from keepk.graph.ids.atoms import label_of
from keepk.graph.ids.facts import Line
from keepk.graph.ids.maps import Map, aligned, along, compress, support
from keepk.graph.ids.merge import Operand, Tracked
from keepk.graph.rules.call import Call
from keepk.graph.rules.registry import rule


@rule("convolution", "_convolution", "convolution_overrideable", "mkldnn_convolution", "thnn_conv2d",
      "conv_depthwise3d", "_slow_conv2d_forward", "slow_conv3d_forward", "_conv_depthwise2d",
      "cudnn_convolution")  # fmt: skip
def convolved(call: Call) -> None:
    """Contract the input channels, produce the output channels; the dims of the kernel are neither."""
    images, weight, bias = call.inputs[0], call.inputs[1], call.get("bias")
    output = call.outputs[0]
    groups, transposed = call.get("groups", 1), bool(call.get("transposed", False))
    channels, passing = _channels(call, images)
    kernel = _kernel(call, weight, groups)
    sizes = (groups, output.shape[1] // groups, images.shape[1] // groups)
    tracked = _grouped(call, channels, kernel, sizes, transposed=transposed)
    maps, zeros = [m for m, _ in tracked], [zero for _, zero in tracked]
    if bias is not None:
        shape = (1, output.shape[1])
        operands = [Operand(maps, shape, zeros), call.shaped_operand(bias, lambda m: m[None, :], shape)]
        maps = call.merge(operands, "has a bias")
        zeros = [all(operand.zero_along(m) for operand in operands) for m in maps]
    call.note_weight(weight, read=0 if transposed else 1, produced=1 if transposed else 0)
    # A depthwise convolution works channel by channel, like a BatchNorm: it carries channels rather than reading them,
    # and as a reader it would turn a BatchNorm beside it into a separate read.
    if sizes[2] > 1 or groups == 1:
        call.note_reader(call.module or "model", call.maps(images), (1,))
    zeros += [bias is None and label_of(images).zero_along(m) for m in passing]
    call.label_output([*(along(m.ravel(), 1, output.ndim) for m in maps), *passing], zero=zeros)


def _channels(call: Call, images: Tensor) -> tuple[list[Tracked], list[Map]]:
    """The maps over the channels, as rows, and the maps over the batch, which pass through unchanged."""
    rows, passing = list[Tracked](), list[Map]()
    label = label_of(images)
    for index_map, zero in zip(label.maps, label.zeros, strict=True):
        dims = support(index_map)
        if 1 in dims:
            row = call.union_over(index_map, [dim for dim in dims if dim != 1]).reshape(1, -1)
            rows.append(Tracked(row, zero))
        elif dims == (0,):
            passing.append(index_map)
        else:
            call.pin(index_map, "a convolution slides along the axis")
    return rows, passing


def _kernel(call: Call, weight: Tensor, groups: int) -> list[Tracked]:
    """The weight's maps over its first two dims, out and in."""
    kept = list[Tracked]()
    label = label_of(weight)
    for index_map, zero in zip(label.maps, label.zeros, strict=True):
        inner = [dim for dim in support(index_map) if dim > 1]
        if inner and len(inner) == len(support(index_map)):
            call.pin(index_map, "an axis of the kernel")
            continue
        flat = call.union_over(index_map, inner).reshape(index_map.shape[:2])
        if groups > 1 and support(flat) == (1,):
            # The parameter has one atom per column, but column 0 of group 0 and column 0 of group 1 read different
            # channels. The trace starts over with separate atoms for each group; in this pass they are pinned.
            call.note_groups(flat, groups, weight.shape[0])
            call.pin(flat, "the in-channels of a grouped convolution are shared")
            continue
        kept.append(Tracked(flat, zero))
    return kept


def _grouped(
    call: Call, channels: list[Tracked], kernel: list[Tracked], sizes: tuple[int, int, int], *, transposed: bool
) -> list[Tracked]:
    """The maps over the output's channels, as one row; the joint index space is (group, out, in)."""
    groups, outs, ins = sizes
    left = [np.broadcast_to(m, (1, groups * ins)).reshape(groups, 1, ins) for m, _ in channels]
    right = [_by_group(m, sizes, transposed=transposed) for m, _ in kernel]
    if groups > 1 and ins > 1:
        # The weight is (out, in / groups): one number of input channels for all groups.
        for index_map in (*left, *(m for m in right if m.shape[0] > 1 and m.shape[2] > 1)):
            call.require_equal_rows(index_map, "goes into a grouped convolution")
    operands = (
        Operand(left, (groups, 1, ins), [zero for _, zero in channels]),
        Operand(right, (groups, outs, ins), [zero for _, zero in kernel]),
    )
    if groups == 1:
        tracked = call.contract(operands, 2, "is convolved")
    else:
        # With one input or one output channel per group, the group's channels on both sides are one: depthwise.
        # Otherwise the channels of a group can be removed one by one.
        kind = Line.COLLAPSE if ins == 1 or outs == 1 else Line.LOOSE
        merged = call.merge(operands, "is convolved by groups", kind, 2 if kind is Line.COLLAPSE else None)
        tracked = call.sum_of_products(operands, merged, 2, (kind, kind))
    rows = list[Tracked]()
    for index_map, zero in tracked:
        spread = np.broadcast_to(index_map, (groups, outs, 1))
        if groups > 1 and outs > 1 and len(support(index_map)) > 1:
            call.require_equal_rows(spread[:, :, 0], "comes out of a grouped convolution")
        rows.append(Tracked(spread.reshape(1, groups * outs), zero))
    return [row for row in rows if row.map.size > 1]


def _by_group(index_map: Map, sizes: tuple[int, int, int], *, transposed: bool) -> Map:
    """A map over (out, in of the group), or (in, out of the group) if transposed, as (group, out, in)."""
    groups, outs, ins = sizes
    shape = (groups, ins, outs) if transposed else (groups, outs, ins)
    full = (groups * ins, outs) if transposed else (groups * outs, ins)
    spread = np.broadcast_to(index_map, full).reshape(shape)
    return compress(spread.transpose(0, 2, 1) if transposed else spread)


@rule("pixel_shuffle")
def pixels_from_channels(call: Call) -> None:
    """Fold each r * r channels into one, so they are removed together."""
    block = call["upscale_factor"] ** 2
    _by_channel(call, lambda ids, size: call.union_over(ids.reshape(-1, size), [1]).ravel(), block)


@rule("pixel_unshuffle")
def channels_from_pixels(call: Call) -> None:
    """Turn each channel into r * r channels, which all keep its atom."""
    _by_channel(call, np.repeat, call["downscale_factor"] ** 2)


@rule("im2col")
def patches(call: Call) -> None:
    """Turn each channel into one row for every position of the kernel."""
    block = math.prod(call["kernel_size"])
    _by_channel(call, np.repeat, block, dim=1)


@rule("col2im")
def images_from_patches(call: Call) -> None:
    """Undo `patches`: the rows of a channel become one channel again."""
    block = math.prod(call["kernel_size"])
    _by_channel(call, lambda ids, size: call.union_over(ids.reshape(-1, size), [1]).ravel(), block, dim=1)


def _by_channel(call: Call, fold: Callable[[Map, int], Map], block: int, dim: int | None = None) -> None:
    """Fold a map over the channels, and pin maps over any other dims."""
    source, output = call.inputs[0], call.outputs[0]
    # Pixel shuffles take images without a batch as well, so channels are counted from the end.
    channel = source.ndim - 3 if dim is None else dim
    moved = []
    for index_map in call.maps(source):
        if support(index_map) == (channel,):
            ids = fold(index_map.ravel(), block)
            moved.append(along(ids, channel, output.ndim))
        else:
            call.pin(index_map, "is folded into image dims")
    call.label_output(moved)


@rule("channel_shuffle", "native_channel_shuffle")
def shuffled(call: Call) -> None:
    """Transpose the channels as (groups, n)."""
    source = call.inputs[0]
    moved = []
    for index_map in call.maps(source):
        if support(index_map) == (1,):
            matrix = index_map.reshape(call["groups"], -1)
            call.require_equal_rows(matrix, "is shuffled")
            call.require_grid(matrix, "is shuffled")
            moved.append(along(matrix.T.ravel(), 1, source.ndim))
        else:
            call.pin(index_map, "is shuffled")
    call.label_output(moved)


@rule("glu")
def gated(call: Call) -> None:
    """Unite each channel of the first half with its gate in the second half."""
    source = call.inputs[0]
    dim = call.get("dim", -1) % source.ndim
    moved = []
    for index_map in call.maps(source):
        if index_map.shape[dim] > 1:
            value, gate = np.split(index_map, 2, axis=dim)
            call.facts.add_equal(value, gate)
            moved.append(compress(value))
        else:
            moved.append(index_map)
    call.label_output(moved)


@rule("constant_pad_nd")
def padded(call: Call) -> None:
    """Keep the atoms and leave the padding without any."""
    # The width of the padding is a number in the model's Python that follows no channel. With 0 in the map, the next
    # merge pins the channels that the padding is added to (a ResNet shortcut with zero-padded channels).
    source, pad = call.inputs[0], call["pad"]
    widths = [(0, 0)] * source.ndim
    for place in range(len(pad) // 2):
        widths[source.ndim - 1 - place] = (pad[2 * place], pad[2 * place + 1])
    moved = []
    for index_map in call.maps(source):
        tracked = [pair if size > 1 else (0, 0) for pair, size in zip(widths, index_map.shape, strict=True)]
        moved.append(_padded(index_map, tracked))
    call.label_output(moved, zero=source if call.get("value", 0) == 0 else False)


def _padded(index_map: Map, widths: list[tuple[int, int]]) -> Map:
    """The map with 0 for the padding; negative widths crop, as they do in torch."""
    kept = index_map
    for dim, (before, after) in enumerate(widths):
        if before < 0 or after < 0:
            kept = np.take(kept, range(max(-before, 0), kept.shape[dim] - max(-after, 0)), axis=dim)
    return np.pad(kept, [(max(before, 0), max(after, 0)) for before, after in widths])


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def transformed(call: Call) -> None:
    """Pin the dims that a Fourier transform mixes."""
    source = call.inputs[0]
    dims = {dim % source.ndim for dim in call["dim"]}
    kept = []
    for index_map in call.maps(source):
        if set(support(index_map)) & dims:
            call.pin(index_map, "is Fourier-transformed along the axis")
        else:
            kept.append(index_map)
    call.label_output(kept)


@rule("mm", "bmm", "addmm", "baddbmm", "_addmm_activation", "mv", "addmv", "dot", "vdot")
def product(call: Call) -> None:
    """Contract k of (batch, n, k) times (batch, k, m), and merge with an addend if there is one."""
    left, right = call.inputs[-2:]  # of addmm(self, mat1, mat2) the last two are the factors
    sizes = _sizes(left, right)
    tracked = call.contract(
        (
            call.shaped_operand(left, lambda m: _as_left(m, left.ndim), (sizes[0], sizes[1], 1, sizes[2])),
            call.shaped_operand(right, lambda m: _as_right(m, right.ndim), (sizes[3], 1, sizes[4], sizes[2])),
        ),
        3,
        "is multiplied",
    )
    _note_roles(call, left, right)
    output = call.outputs[0]
    shaped = [m.reshape(m.shape[:3])[_kept_dims(left, right)] for m, _ in tracked]
    zeros = [zero for _, zero in tracked]
    if "input" not in call.arguments and not call.name.startswith("aten::add") and call.name != "aten::baddbmm":
        call.label_output(shaped, zero=zeros)
        return
    operands = [Operand(shaped, tuple(output.shape), zeros), call.operand(call["self"], output.ndim)]
    merged = call.merge(operands, "is added")
    call.label_output(merged, zero=[all(operand.zero_along(m) for operand in operands) for m in merged])


@rule("addbmm")
def batch_of_products(call: Call) -> None:
    """Pin everything: addbmm sums over the batch too, and the layout of `product` keeps the batch."""
    call.pin_inputs("sums over a batch")


def _sizes(left: Tensor, right: Tensor) -> tuple[int, int, int, int, int]:
    """The sizes of the left batch, n, k, the right batch, and m."""
    batch_left = left.shape[0] if left.ndim == 3 else 1
    batch_right = right.shape[0] if right.ndim == 3 else 1
    rows = left.shape[-2] if left.ndim > 1 else 1
    columns = right.shape[-1] if right.ndim > 1 else 1
    return batch_left, rows, left.shape[-1], batch_right, columns


def _as_left(index_map: Map, rank: int) -> Map:
    """A map of the left factor as (batch, n, 1, k)."""
    return aligned(index_map, 3)[:, :, None, :] if rank else index_map.reshape(1, 1, 1, 1)


def _as_right(index_map: Map, rank: int) -> Map:
    """A map of the right factor as (batch, 1, m, k)."""
    column = index_map[:, None] if rank == 1 else index_map
    return aligned(column, 3).transpose(0, 2, 1)[:, None, :, :]


def _kept_dims(left: Tensor, right: Tensor) -> tuple[int | slice, ...]:
    """An index that removes those of (batch, n, m) that the result does not have."""
    batch = slice(None) if max(left.ndim, right.ndim) == 3 else 0
    rows = slice(None) if left.ndim > 1 else 0
    columns = slice(None) if right.ndim > 1 else 0
    return (batch, rows, columns)


def _note_roles(call: Call, left: Tensor, right: Tensor) -> None:
    """Record which factor is a weight, and who reads the channels of the other one."""
    # F.linear(x, w) is x @ w.T, so the weight is usually on the right. Of two activations (queries and keys) neither
    # produces channels; both are read by the product.
    if label_of(right).from_parameters:
        call.note_weight(right, read=right.ndim - 2 if right.ndim > 1 else 0, produced=right.ndim - 1)
        call.note_reader(call.module or "model", call.maps(left), (left.ndim - 1,))
    elif label_of(left).from_parameters:
        call.note_weight(left, read=left.ndim - 1, produced=max(left.ndim - 2, 0))
        call.note_reader(call.module or "model", call.maps(right), (max(right.ndim - 2, 0),))
    else:
        call.note_reader("a product", call.maps(left), (left.ndim - 1,))
        call.note_reader("a product", call.maps(right), (max(right.ndim - 2, 0),))


@rule("_trilinear")
def bilinear(call: Call) -> None:
    """Contract i and j of left (n, i) times weight (o, i, j) times right (n, j), in the joint space (n, o, i, j)."""
    left, weight, right = call["i1"], call["i2"], call["i3"]
    # The operation is general, but only torch.nn.functional.bilinear calls it, always with this layout.
    layout = [list(call[name]) for name in ("expand1", "expand2", "expand3", "sumdim")]
    if layout != [[1, 3], [0], [1, 2], [2, 3]]:
        call.pin_inputs("a trilinear product of this layout has no rule")
        return
    rows, (outs, lefts, rights) = left.shape[0], weight.shape
    inner = call.shaped_operand(weight, lambda m: m[None], (1, outs, lefts, rights))
    one = call.shaped_operand(left, lambda m: m[:, None, :, None], (rows, 1, lefts, 1))
    other = call.shaped_operand(right, lambda m: m[:, None, None, :], (rows, 1, 1, rights))
    # Two contractions one after the other, each with the rules of a matrix product.
    half = call.contract((one, inner), 2, "is multiplied")
    between = Operand([m for m, _ in half], (rows, outs, 1, rights), [zero for _, zero in half])
    tracked = call.contract((between, other), 3, "is multiplied")
    call.note_weight(weight, read=1, produced=0)
    call.note_weight(weight, read=2, produced=0)
    for tensor in (left, right):
        call.note_reader(call.module or "model", call.maps(tensor), (1,))
    call.label_output([m[:, :, 0, 0] for m, _ in tracked], zero=[zero for _, zero in tracked])


@rule("_grouped_mm")
def experts(call: Call) -> None:
    """Contract tokens with one matrix for each expert; the experts are pinned, since tokens pick them by index."""
    tokens, weights = call.inputs[0], call.inputs[1]
    if tokens.ndim != 2 or weights.ndim != 3:
        call.pin_inputs("grouped products of this shape have no rule")
        return
    label = label_of(weights)
    shared = list[Tracked]()
    for index_map, zero in zip(label.maps, label.zeros, strict=True):
        if index_map.shape[0] > 1:
            call.pin(index_map, "experts are picked by index")
        else:
            shared.append(Tracked(index_map.transpose(0, 2, 1), zero))
    tracked = call.contract(
        (
            call.shaped_operand(tokens, lambda m: m[:, None, :], (tokens.shape[0], 1, tokens.shape[1])),
            Operand([m for m, _ in shared], (1, weights.shape[2], weights.shape[1]), [zero for _, zero in shared]),
        ),
        2,
        "is multiplied",
    )
    call.note_weight(weights, read=1, produced=2)
    call.note_reader(call.module or "model", call.maps(tokens), (1,))
    call.label_output([m[:, :, 0] for m, _ in tracked], zero=[zero for _, zero in tracked])
