"""Channels folded into image dims and back, gates over halves, padding, Fourier transforms."""

import math
from collections.abc import Callable

import numpy as np

from keepk.graph.call import Call
from keepk.graph.maps import Map, along, compress, support
from keepk.graph.table import rule


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
