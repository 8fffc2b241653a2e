"""Channels folded into pictures and back, gates over halves, padding, transforms."""

import math
from collections.abc import Callable

import numpy as np

from keepk.graph.call import Call
from keepk.graph.maps import Map, along, compress, support
from keepk.graph.table import rule


@rule("pixel_shuffle")
def pixels_from_channels(call: Call) -> None:
    """Each r * r channels become one."""
    block = call["upscale_factor"] ** 2
    _by_channel(call, lambda ids, size: call.union_over(ids.reshape(-1, size), [1]).ravel(), block)


@rule("pixel_unshuffle")
def channels_from_pixels(call: Call) -> None:
    """Each channel becomes r * r."""
    _by_channel(call, np.repeat, call["downscale_factor"] ** 2)


@rule("im2col")
def patches(call: Call) -> None:
    """Each channel becomes a row for every place of the kernel."""
    block = math.prod(call["kernel_size"])
    _by_channel(call, np.repeat, block, dim=1)


@rule("col2im")
def pictures_from_patches(call: Call) -> None:
    """Back again."""
    block = math.prod(call["kernel_size"])
    _by_channel(call, lambda ids, size: call.union_over(ids.reshape(-1, size), [1]).ravel(), block, dim=1)


def _by_channel(call: Call, fold: Callable[[Map, int], Map], block: int, dim: int | None = None) -> None:
    source, output = call.inputs[0], call.outputs[0]
    channel = source.ndim - 3 if dim is None else dim
    moved = []
    for index_map in call.maps(source):
        if support(index_map) == (channel,):
            ids = fold(index_map.ravel(), block)
            moved.append(along(ids, channel, output.ndim))
        else:
            call.pin(index_map, "is folded into pictures")
    call.label_output(moved)


@rule("channel_shuffle", "native_channel_shuffle")
def shuffled(call: Call) -> None:
    """(groups, n) transposed."""
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
    """The first half times a gate of the second half, place by place."""
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
    """New places have no atoms; channels cannot be padded, since the padding would not shrink."""
    source, pad = call.inputs[0], call["pad"]
    widths = [(0, 0)] * source.ndim
    for place in range(len(pad) // 2):
        widths[source.ndim - 1 - place] = (pad[2 * place], pad[2 * place + 1])
    moved = []
    for index_map in call.maps(source):
        own = [pair if size > 1 else (0, 0) for pair, size in zip(widths, index_map.shape, strict=True)]
        moved.append(_padded(index_map, own))
    call.label_output(moved, zero=source if call.get("value", 0) == 0 else False)


def _padded(index_map: Map, widths: list[tuple[int, int]]) -> Map:
    kept = index_map
    for dim, (before, after) in enumerate(widths):
        if before < 0 or after < 0:
            kept = np.take(kept, range(max(-before, 0), kept.shape[dim] - max(-after, 0)), axis=dim)
    return np.pad(kept, [(max(before, 0), max(after, 0)) for before, after in widths])


@rule("_fft_r2c", "_fft_c2c", "_fft_c2r")
def transformed(call: Call) -> None:
    """Fourier transforms mix a dim."""
    source = call.inputs[0]
    dims = {dim % source.ndim for dim in call["dim"]}
    kept = []
    for index_map in call.maps(source):
        if set(support(index_map)) & dims:
            call.pin(index_map, "is Fourier-transformed along the axis")
        else:
            kept.append(index_map)
    call.label_output(kept)
