"""A segment of operations as one compiled function.

Each value has a buffer in a workspace. Its layout is ``[channel][row][column][group]``, with a frame of zeros around
the pixels that convolutions with padding read; the columns on the right of one row are those on the left of the next.
So a weight's input is its output's address plus a constant, and the nonzeros of a layer are pairs of that constant and
a value. With a group of one sample, rows are computed without regard to where they end, and what that writes into the
frame is cleared afterwards. All values that one operation relates pixel by pixel have rows of one length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepk.engine import kernels
from keepk.engine.graph import Binary, Cat, Clamp, Exported, Op, Pointwise, Pool, Scale, Segment, Shape, View, Weights
from keepk.engine.kernels import KEEP_ZERO, LONG, SELL, Code, number
from keepk.engine.machine import Machine, Native, aligned

FRONT = 16  # floats before the first channel of each buffer; the first one is always zero
KERNEL_CACHE = 20_000  # bytes of activations that stay in the first-level cache while all rows are computed
LARGEST = 2**31 - 1  # offsets have 32 bits


class Banned(Exception):  # noqa: N818 - not an error: torch runs the operation
    """An operation that does not fit into a program, and why."""

    def __init__(self, output: str, reason: str) -> None:
        super().__init__(reason)
        self.output, self.reason = output, reason


@dataclass(frozen=True)
class Layout:
    """The addresses of one value's pixels, in pixels.

    Attributes:
        frame: Rows and columns of zeros on each side.
        stride: From one row to the next.
        plane: From one channel to the next.
        base: The first pixel of a channel.
    """

    frame: int
    stride: int
    plane: int
    base: int


@dataclass
class Family:
    """Values with rows of the same length.

    Attributes:
        frame: The widest frame that an operation needs.
        rows: The most rows of a value.
        columns: The most columns of a value.
    """

    frame: int = 0
    rows: int = 1
    columns: int = 1

    def layout(self, group: int, width: int) -> Layout:
        """The layout of its values for a group of samples."""
        if (self.frame, self.rows, self.columns) == (0, 1, 1):
            return Layout(0, 1, 1, 0)
        stride = self.columns + self.frame
        base = self.frame * stride + self.frame
        plane = base + self.rows * stride + base
        if group == 1:  # what is computed beyond the end of a channel must not reach the next one
            plane = -(-(plane + width) // 16) * 16
            plane += 16 * (plane // 16 % 2 == 0)  # so that channels do not fall into the same set of the cache
        return Layout(self.frame, stride, plane, base)


class Shapes:
    """Families and sizes of the values of a segment, the same for every group size.

    Attributes:
        sizes: Channels, rows and columns by value.
        source: The value whose buffer a value has; views have their input's.
    """

    def __init__(self, segment: Segment, exported: Exported) -> None:
        self.sizes: dict[str, tuple[int, int, int]] = {}
        self.source: dict[str, str] = {}
        self._family: dict[str, Family] = {}
        for name in segment.inputs:
            self._add(name, _three(exported.shapes[name]))
        for op in segment.ops:
            self._take(op, exported)

    def family(self, name: str) -> Family:
        """The family of a value."""
        return self._family[self.source[name]]

    def largest(self, group: int, machine: Machine) -> int:
        """The bytes of the largest buffer for a group of samples."""
        layouts = ((self.sizes[name][0], self.family(name).layout(group, machine.width)) for name in self.sizes)
        return max(4 * floats_of(channels, layout, group, machine) for channels, layout in layouts)

    def _add(self, name: str, sizes: tuple[int, int, int]) -> None:
        self.sizes[name], self.source[name] = sizes, name
        self._family[name] = Family(0, *sizes[1:])

    def _take(self, op: Op, exported: Exported) -> None:
        shape = exported.shapes[op.output]
        first = self.sizes[op.inputs[0]]
        if isinstance(op, View):
            if len(shape) == 3 and shape != first:
                raise Banned(op.output, f"it reshapes {first} to {shape}")
            self.sizes[op.output], self.source[op.output] = first, self.source[op.inputs[0]]
            return
        sizes = _three(shape)
        if isinstance(op, Pointwise | Binary | Scale | Cat) or (isinstance(op, Weights) and len(shape) == 1):
            related = op.inputs[:1] if isinstance(op, Scale) else op.inputs
            if isinstance(op, Pointwise | Binary | Scale):
                sizes = first  # of a flattened value, the sizes before it was flattened
            whole = isinstance(op, Weights) and op.groups == 1
            if not whole and any(self.sizes[it][1:] != sizes[1:] for it in related):
                raise Banned(op.output, "its operands were flattened from different sizes")
            if isinstance(op, Binary) and self.sizes[op.inputs[1]] != sizes:
                raise Banned(op.output, "its operands were flattened from different sizes")
        self._add(op.output, sizes)
        if isinstance(op, Pointwise | Binary | Cat):
            self._unite(op.output, *op.inputs)
        elif isinstance(op, Scale):
            self._unite(op.output, op.inputs[0])
        elif isinstance(op, Weights) and sizes[1:] != (1, 1):
            self._take_spatial(op, sizes)

    def _take_spatial(self, op: Weights, sizes: tuple[int, int, int]) -> None:
        if op.stride == (1, 1):
            self._unite(op.output, op.inputs[0])
            self.family(op.output).frame = max(self.family(op.output).frame, *op.padding)
            return
        if op.stride[0] != op.stride[1]:
            raise Banned(op.output, f"its strides {op.stride} differ")
        own, source = self.family(op.output), self.family(op.inputs[0])
        phases = phase_sizes(op, self.sizes[op.inputs[0]])
        source.frame = max(source.frame, *op.padding)
        for axis in range(2):
            steps = [step for step, _ in taps(op, axis)]
            over = max(steps) + sizes[1 + axis] - phases[axis]
            own.frame = max(own.frame, -min(steps), over)
        own.rows, own.columns = max(own.rows, phases[0]), max(own.columns, phases[1])

    def _unite(self, *names: str) -> None:
        families = [self.family(name) for name in names]
        whole = Family(*(max(getattr(it, field) for it in families) for field in ("frame", "rows", "columns")))
        olds = set(map(id, families))
        for name, family in self._family.items():
            if id(family) in olds:
                self._family[name] = whole


def _three(shape: Shape) -> tuple[int, int, int]:
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (shape[0], 1, 1)


def floats_of(channels: int, layout: Layout, group: int, machine: Machine) -> int:
    """The size of a buffer, with zeros before its channels, and room after them for what is computed beyond the end."""
    return FRONT + channels * layout.plane * group + layout.stride + 2 * machine.width * machine.vectors


def taps(op: Weights, axis: int) -> list[tuple[int, int]]:
    """For each row (axis 0) or column of a kernel: the step between outputs, and the phase of the input it reads."""
    size, stride = op.weight.shape[2 + axis], op.stride[axis]
    return [divmod(k * op.dilation[axis] - op.padding[axis], stride) for k in range(size)]


def phase_sizes(op: Weights, sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Rows and columns of the largest phase of a strided layer's input."""
    return -(-sizes[1] // op.stride[0]), -(-sizes[2] // op.stride[1])


@dataclass(frozen=True)
class Nonzeros:
    """The nonzero weights of a layer in the order of the dense tensor.

    Attributes:
        row: The output channel; so on for the next ones.
        channel: The input channel.
        down: The row of the kernel.
        across: The column of the kernel.
        value: The weight.
    """

    row: NDArray[np.int64]
    channel: NDArray[np.int64]
    down: NDArray[np.int64]
    across: NDArray[np.int64]
    value: NDArray[np.float32]

    @classmethod
    def of(cls, op: Weights) -> "Nonzeros":
        """Those of a layer."""
        flat = np.flatnonzero(op.weight)
        row, channel, down, across = np.unravel_index(flat, op.weight.shape)
        group = row // (len(op.weight) // op.groups)
        return cls(row, channel + group * op.weight.shape[1], down, across, op.weight.reshape(-1)[flat])

    def __getitem__(self, index: Any) -> "Nonzeros":
        return Nonzeros(*(getattr(self, name)[index] for name in ("row", "channel", "down", "across", "value")))


def ranks(row: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """How many nonzeros of the same row come before each.

    >>> ranks(np.array([0, 0, 2, 2, 2]), 3)
    array([0, 1, 0, 1, 2])
    """
    count = np.bincount(row, minlength=rows)
    return np.arange(len(row)) - (np.cumsum(count) - count)[row]


class Workspace:
    """The memory for the values of one group of samples.

    Attributes:
        address: Where it begins.
    """

    def __init__(self, floats: int) -> None:
        self._memory = aligned(floats)
        self.address: int = self._memory.ctypes.data


class Program:
    """The compiled function of a segment for one group size.

    Args:
        segment: The segment.
        exported: The graph that it is from.
        machine: The CPU.
        group: Samples that are computed together.
    """

    def __init__(self, segment: Segment, exported: Exported, machine: Machine, group: int) -> None:
        self.group = group
        self.inputs, self.outputs = segment.inputs, segment.outputs
        self._segment, self._exported = segment, exported
        self._machine, self._shapes = machine, Shapes(segment, exported)
        self._code = Code(machine.width)
        self._constants: list[NDArray[Any]] = []  # read by the compiled code, so they have to live as long
        self._where: dict[str, int] = {}
        self._free: dict[tuple[Any, ...], list[int]] = {}
        self._size = 0
        self._values: dict[str, str] = {}
        self._write()
        self._native = Native(self._code.text(), machine)
        self.run = self._native.run
        self._idle: list[Workspace] = []

    def workspace(self) -> "Workspace":
        """Memory for one call, which no other call uses; give it back with `release`."""
        try:
            return self._idle.pop()  # atomic, so that threads never get the same one
        except IndexError:
            return Workspace(self._size)

    def release(self, workspace: "Workspace") -> None:
        """Keep a workspace for the next call."""
        self._idle.append(workspace)

    # Writing the function

    def _write(self) -> None:
        code, last = self._code, self._last_uses()
        single = len(self.inputs) == len(self.outputs) == 1
        arguments = ("ptr %space", "ptr %inputs", "ptr %outputs", "i64 %begin", "i64 %end")
        with code.function("run", *arguments), code.loop("%begin", "%end", self.group) as sample:
            for index, name in enumerate(self.inputs):
                source = "%inputs" if single else code.load(code.at("%inputs", index, "ptr"), "ptr")
                self._allocate(name)
                self._move(kernels.pack(code, self.group), source, self._first(name), name, sample)
            for index, op in enumerate(self._segment.ops):
                if not isinstance(op, View):
                    self._allocate(op.output)
                    WRITERS[type(op)](self, op)
                if op.output in self.outputs:
                    place = self.outputs.index(op.output)
                    target = "%outputs" if single else code.load(code.at("%outputs", place, "ptr"), "ptr")
                    self._move(kernels.unpack(code, self.group), self._first(op.output), target, op.output, sample)
                for name in last.get(index, ()):
                    self._free.setdefault(self._key(name), []).append(self._where[name])

    def _last_uses(self) -> dict[int, list[str]]:
        """The buffers that are free after each operation."""
        last, source = dict[str, int](), self._shapes.source
        for index, op in enumerate(self._segment.ops):
            for name in (*op.inputs, op.output):
                last[source[name]] = index
        found: dict[int, list[str]] = {}
        for name, index in last.items():
            found.setdefault(index, []).append(name)
        return found

    def _key(self, name: str) -> tuple[Any, ...]:
        """Buffers with equal keys have their frames at the same places."""
        return self._layout(name), self._shapes.sizes[name]

    def _allocate(self, name: str) -> None:
        key = self._key(name)
        if self._free.get(key):
            self._where[name] = self._free[key].pop()
        else:
            self._where[name] = self._reserve(self._shapes.sizes[name][0], self._layout(name))

    def _reserve(self, channels: int, layout: Layout) -> int:
        where, floats = self._size, floats_of(channels, layout, self.group, self._machine)
        if 4 * floats > LARGEST:
            raise Banned("", "its activations need more than 2 GB")
        self._size += -(-floats // 16) * 16
        return where

    def _layout(self, name: str) -> Layout:
        return self._shapes.family(name).layout(self.group, self._machine.width)

    def _start(self, name: str) -> str:
        """The address of the buffer's first channel, without its frame."""
        return self._code.at("%space", self._where[self._shapes.source[name]] + FRONT)

    def _first(self, name: str) -> str:
        """The address of the first pixel."""
        return self._code.at(self._start(name), self._layout(name).base * self.group)

    def _constant(self, array: NDArray[Any]) -> str:
        held = aligned(max(1, array.size), array.dtype)
        held[: array.size] = array.reshape(-1)
        self._constants.append(held)
        return f"inttoptr (i64 {held.ctypes.data} to ptr)"

    def _call(self, kernel: str, *arguments: str) -> None:
        self._code.do(f"call void @{kernel}({', '.join(arguments)})")

    def _longs(self, *values: int | str) -> list[str]:
        return [f"i64 {value}" for value in values]

    def _move(self, kernel: str, source: str, target: str, name: str, sample: str) -> None:
        (channels, rows, columns), layout = self._shapes.sizes[name], self._layout(name)
        floats = channels * rows * columns
        if layout.plane == 1:  # channels are adjacent: one row of them
            channels, columns, layout = 1, channels, Layout(0, channels, channels, 0)
        elif layout.stride == columns and layout.plane == rows * columns:
            channels, rows, columns = 1, 1, floats
        sizes = self._longs(channels, rows, columns, layout.plane, layout.stride, floats, sample, "%end")
        self._call(kernel, f"ptr {source}", f"ptr {target}", *sizes)

    def _clear_frame(self, name: str) -> None:
        layout = self._layout(name)
        if layout.frame:
            sizes = self._longs(*self._shapes.sizes[name], layout.plane, layout.stride, layout.frame)
            self._call(kernels.clear_frame(self._code, self.group), f"ptr {self._start(name)}", *sizes)

    def _count(self, name: str) -> int:
        floats = self._shapes.sizes[name][0] * self._layout(name).plane * self.group
        return -(-floats // self._machine.width) * self._machine.width

    # Layers with weights

    def _write_weights(self, op: Weights) -> None:
        if self._shapes.sizes[op.output][1:] == (1, 1):
            self._write_vector(op)
        else:
            self._write_spatial(op)

    def _write_vector(self, op: Weights) -> None:
        """A layer with one output pixel: every weight has one input, at a fixed place."""
        name, found = op.inputs[0], Nonzeros.of(op)
        (_, rows, columns), layout = self._shapes.sizes[name], self._layout(name)
        if len(self._exported.shapes[name]) == 1:  # a linear layer: its inputs are numbered through all pixels
            feature = found.channel
            channel, pixel = np.divmod(feature, rows * columns)
            down, across = np.divmod(pixel, columns)
            inside = np.ones(len(feature), np.bool_)
        else:
            channel = found.channel
            down = found.down * op.dilation[0] - op.padding[0]
            across = found.across * op.dilation[1] - op.padding[1]
            inside = (down >= 0) & (down < rows) & (across >= 0) & (across < columns)
        places = channel * layout.plane + layout.base + down * layout.stride + across
        found, places = found[inside], places[inside]
        if self.group == 1:
            self._write_sell(op, found, places)
            return
        vectors = self.group // self._machine.width
        matrix = Matrix(
            found,
            places * self.group * 4,
            np.arange(len(op.weight)) * self._layout(op.output).plane * self.group * 4,
            op.bias,
            *self._blocks(op, found, self._shapes.sizes[name][0] * rows * columns * self.group * 4),
        )
        self._write_blocks(
            op, matrix, self._start(name), self._first(op.output), [(vectors, [0], [0])], 4 * self._machine.width
        )

    def _write_sell(self, op: Weights, found: Nonzeros, places: NDArray[np.int64]) -> None:
        count, outputs = np.bincount(found.row, minlength=len(op.weight)), len(op.weight)
        order = np.argsort(-count, kind="stable")
        slices = -(-outputs // SELL)
        padded = np.full(slices * SELL, -1)
        padded[:outputs] = order
        lengths = np.where(padded >= 0, count[padded], 0).reshape(slices, SELL).max(1)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        # An entry without a weight multiplies the zero before the buffer with -0.0, which does not change any sum.
        index, value = np.zeros((starts[-1], SELL), np.int64), np.full((starts[-1], SELL), -0.0, np.float32)
        rank = np.empty(outputs, np.int64)
        rank[order] = np.arange(outputs)
        at = starts[rank[found.row] // SELL] + ranks(found.row, outputs), rank[found.row] % SELL
        index[at], value[at] = places + FRONT, found.value
        bias = np.zeros(slices * SELL, np.float32)
        bias[:outputs] = op.bias[order]
        plane = self._layout(op.output).plane
        rows = np.full(slices * SELL, outputs * plane, np.int32)  # beyond the last channel
        rows[:outputs] = order * plane
        wide = bool(index.max(initial=0) > np.iinfo(np.uint16).max)
        source = self._code.at(self._start(op.inputs[0]), -FRONT)
        arrays = (starts.astype(np.int32), index.astype(np.uint32 if wide else np.uint16), value, bias, rows)
        self._call(
            kernels.sell(self._code, wide=wide, chunk=kernels.chunk_of(int(count.max()))),
            f"ptr {source}",
            f"ptr {self._first(op.output)}",
            f"i64 {slices}",
            *(f"ptr {self._constant(array)}" for array in arrays),
            *_bounds(op.clamp),
        )

    def _write_spatial(self, op: Weights) -> None:
        name, found, stride = op.inputs[0], Nonzeros.of(op), op.stride[0]
        channels, source, target = self._shapes.sizes[name][0], self._layout(name), self._layout(op.output)
        start = self._start(name)
        down, across = np.asarray(taps(op, 0))[found.down], np.asarray(taps(op, 1))[found.across]
        if self.group == 1 and stride > 1:
            start, source, order = self._write_phases(op)
            channel = order[down[:, 1], across[:, 1]] * channels + found.channel
            places = channel * source.plane + source.base + down[:, 0] * source.stride + across[:, 0]
        else:
            rows, columns = down @ [stride, 1], across @ [stride, 1]
            places = found.channel * source.plane + source.base + rows * source.stride + columns
        step, blocks = self._one_sample(op) if self.group == 1 else self._samples(op, source)
        reach = channels * 4 * self._machine.width * max(it[2] for it in blocks) * op.weight.shape[2]
        matrix = Matrix(
            found,
            places * self.group * 4,
            np.arange(len(op.weight)) * target.plane * self.group * 4,
            op.bias,
            *self._blocks(op, found, reach),
        )
        sizes = [
            (size, [x for x, _, it in blocks if it == size], [y for _, y, it in blocks if it == size])
            for size in sorted({it[2] for it in blocks})
        ]
        self._write_blocks(op, matrix, start, self._first(op.output), sizes, step)
        if self.group == 1:
            self._clear_frame(op.output)

    def _one_sample(self, op: Weights) -> tuple[int, list[tuple[int, int, int]]]:
        """Bytes between vectors; input byte, output byte and vectors of each block: all pixels, row ends included."""
        (_, rows, columns), width = self._shapes.sizes[op.output], self._machine.width
        pixels = (rows - 1) * self._layout(op.output).stride + columns
        return 4 * width, [
            (4 * width * begin, 4 * width * begin, size) for begin, size in self._parts(-(-pixels // width))
        ]

    def _samples(self, op: Weights, source: Layout) -> tuple[int, list[tuple[int, int, int]]]:
        """The same for a group of samples, whose blocks are parts of rows."""
        (_, rows, columns), width, stride = self._shapes.sizes[op.output], self._machine.width, op.stride[0]
        target, group, per_pixel = self._layout(op.output), self.group, self.group // self._machine.width
        if stride > 1 and per_pixel > 1:  # vectors of one pixel are adjacent, those of two are not
            parts, step = [(per_pixel * column, per_pixel) for column in range(columns)], 4 * width
        else:
            parts, step = list(self._parts(columns * per_pixel)), 4 * width * stride
        blocks = []
        for row in range(rows):
            for begin, size in parts:
                x = group * (stride * row * source.stride) + width * stride * begin
                blocks.append((4 * x, 4 * (group * row * target.stride + width * begin), size))
        return step, blocks

    def _parts(self, total: int) -> Iterator[tuple[int, int]]:
        """The beginning and size of nearly equal parts that fit into registers."""
        parts, begin = -(-total // self._machine.vectors), 0
        for index in range(parts):
            size = total // parts + (index < total % parts)
            yield begin, size
            begin += size

    def _write_phases(self, op: Weights) -> tuple[str, Layout, NDArray[np.int64]]:
        """Copy the phases of a strided layer's input that it reads, as channels of a buffer of their own."""
        name, stride = op.inputs[0], op.stride[0]
        (channels, rows, columns), source = self._shapes.sizes[name], self._layout(name)
        needed = [sorted({phase for _, phase in taps(op, axis)}) for axis in range(2)]
        used = [(down, across) for down in needed[0] for across in needed[1] if down < rows and across < columns]
        order = np.full((stride, stride), len(used), np.int64)  # a phase without pixels is one more channel of zeros
        layout = self._layout(op.output)
        where = self._reserve(channels * (len(used) + 1), layout)
        start = self._code.at("%space", where + FRONT)
        for index, (down, across) in enumerate(used):
            order[down, across] = index
            self._call(
                kernels.every(self._code, stride),
                f"ptr {self._code.at(self._first(name), down * source.stride + across)}",
                f"ptr {self._code.at(start, index * channels * layout.plane + layout.base)}",
                *self._longs(channels, source.plane, source.stride, layout.plane, layout.stride),
                *self._longs(-(-(rows - down) // stride), -(-(columns - across) // stride)),
            )
        return start, layout, order

    def _blocks(self, op: Weights, found: Nonzeros, reach: int) -> tuple[int, int]:
        """Parts and chunk of a `Matrix`: the activations of a part should stay in cache."""
        longest = int(np.bincount(found.row, minlength=1).max())
        chunk = kernels.chunk_of(longest)
        if chunk:
            return -(-longest // chunk), chunk
        per_row = np.count_nonzero(op.weight) / len(op.weight)
        return int(max(1, min(16, reach // KERNEL_CACHE, per_row // 12))), 0

    def _write_blocks(
        self,
        op: Weights,
        matrix: "Matrix",
        source: str,
        target: str,
        sizes: Sequence[tuple[int, Sequence[int], Sequence[int]]],
        step: int,
    ) -> None:
        """Calls of the kernel for each block of activations and each part of the nonzeros."""
        code, outputs = self._code, len(op.weight)
        starts, offsets, values, places, bias = (self._constant(it) for it in matrix.arrays())
        for vectors, x_begins, y_begins in sizes:
            rows = {1: 4, 2: 4, 3: 2, 4: 2}.get(vectors, 1)
            together = outputs // rows * rows
            x_table, y_table = (self._constant(np.asarray(it, np.int64)) for it in (x_begins, y_begins))
            with code.loop(0, len(x_begins)) as block:
                x, y = (
                    code.at(base, code.long_at(table, block), "i8")
                    for base, table in ((source, x_table), (target, y_table))
                )
                for part in range(matrix.parts):
                    own = code.at(starts, part * (outputs + 1), "i32")
                    for begin, end, lockstep in ((0, together, rows), (together, outputs, 1)):
                        if begin < end:
                            self._call(
                                kernels.spmm(code, vectors, lockstep, step, added=matrix.chunk > 0),
                                *(f"ptr {it}" for it in (x, y, own, offsets, values, places, bias)),
                                f"i64 {begin}",
                                f"i64 {end}",
                                f"i1 {int(part == 0)}",
                                f"i1 {int(part == matrix.parts - 1)}",
                                *_bounds(op.clamp),
                            )

    # Other operations

    def _write_pointwise(self, op: Pointwise) -> None:
        kernel = kernels.pointwise(self._code, op.kind, *op.clamp)
        source, target = self._start(op.inputs[0]), self._start(op.output)
        self._call(kernel, f"ptr {source}", f"ptr {target}", f"i64 {self._count(op.output)}")
        if not (op.kind in KEEP_ZERO or (op.kind == "clamp" and op.clamp[0] <= 0 <= op.clamp[1])):
            self._clear_frame(op.output)

    def _write_binary(self, op: Binary) -> None:
        _, low, high = _bounds(op.clamp)
        kernel = kernels.binary(self._code, op.kind, clamped=op.clamp is not None)
        places = [f"ptr {self._start(name)}" for name in (*op.inputs, op.output)]
        self._call(kernel, *places, f"i64 {self._count(op.output)}", low, high)
        if op.clamp is not None and not op.clamp[0] <= 0 <= op.clamp[1]:
            self._clear_frame(op.output)

    def _write_scale(self, op: Scale) -> None:
        (value, factors), layout = op.inputs, self._layout(op.output)
        if self._layout(factors).plane != 1:
            raise Banned(op.output, "its factors share their layout with larger values")
        if self.group == 1 and layout.plane % self._machine.width:
            raise Banned(op.output, "its channels are single numbers")
        places = [f"ptr {self._start(name)}" for name in (value, factors, op.output)]
        sizes = self._longs(self._shapes.sizes[op.output][0], layout.plane)
        self._call(kernels.scale(self._code, self.group), *places, *sizes)
        self._clear_frame(op.output)  # an infinite factor makes NaN of the frame's zeros

    def _write_cat(self, op: Cat) -> None:
        channel, layout = 0, self._layout(op.output)
        for name in op.inputs:
            floats = self._shapes.sizes[name][0] * layout.plane * self.group
            target = self._code.at(self._start(op.output), channel * layout.plane * self.group)
            count = -(-floats // self._machine.width) * self._machine.width
            self._call(kernels.copy(self._code), f"ptr {self._start(name)}", f"ptr {target}", f"i64 {count}")
            channel += self._shapes.sizes[name][0]

    def _write_pool(self, op: Pool) -> None:
        source, target = self._layout(op.inputs[0]), self._layout(op.output)
        channels, rows, columns = self._shapes.sizes[op.output]
        places = (f"ptr {self._first(op.inputs[0])}", f"ptr {self._first(op.output)}")
        sizes = self._longs(channels, source.plane, source.stride, target.plane, target.stride, rows, columns)
        tallest, widest = (int((spans[:, 1] - spans[:, 0]).max()) for spans in (op.rows, op.columns))
        long = op.kind == "average" and tallest * widest > LONG
        fits = self.group == 1 and not long and target.plane >= self._machine.width
        if fits and op.uniform is not None and op.uniform[1] <= 2:
            self._call(kernels.pool_windows(self._code, op.kind, *op.uniform), *places, *sizes)
            self._clear_frame(op.output)
            return
        spans = (f"ptr {self._constant(it)}" for it in (op.rows, op.columns))
        self._call(kernels.pool(self._code, op.kind, self.group, long=long), *places, *sizes, *spans)


WRITERS: dict[type, Any] = {
    Weights: Program._write_weights,
    Pointwise: Program._write_pointwise,
    Binary: Program._write_binary,
    Scale: Program._write_scale,
    Cat: Program._write_cat,
    Pool: Program._write_pool,
}


def _bounds(clamp: Clamp | None) -> list[str]:
    low, high = clamp or (0.0, 0.0)
    return [f"i1 {int(clamp is not None)}", f"float {number(low)}", f"float {number(high)}"]


@dataclass(frozen=True)
class Matrix:
    """The nonzeros of a layer for the kernel, rows with many nonzeros first.

    Attributes:
        found: The nonzeros.
        offsets: For each, the bytes from an output's place to its input.
        places: The byte where each row of the output begins.
        bias: One number for each row.
        parts: Into how many parts the nonzeros are divided: by their input channels, or into chunks.
        chunk: How many nonzeros of each row a part has, whose sums are added; 0 if it continues the sums of the others.
    """

    found: Nonzeros
    offsets: NDArray[np.int64]
    places: NDArray[np.int64]
    bias: NDArray[np.float32]
    parts: int
    chunk: int

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Starts of the rows of each part, offsets, values, places and bias."""
        rows, found = len(self.places), self.found
        order = np.argsort(-np.bincount(found.row, minlength=rows), kind="stable")
        # The nonzeros of a row that belong to one part are adjacent, since both follow the dense tensor. So they move
        # as blocks, and their order within a row, and with it every bit of a sum, does not depend on the parts.
        if self.chunk:
            part = ranks(found.row, rows) // self.chunk
        else:
            part = found.channel * self.parts // (int(found.channel.max(initial=0)) + 1)
        blocks = found.row * self.parts + part
        sizes = np.bincount(blocks, minlength=rows * self.parts)
        begins = (np.cumsum(sizes) - sizes).reshape(rows, self.parts)[order].T.reshape(-1)
        sizes = sizes.reshape(rows, self.parts)[order].T.reshape(-1)
        ends = np.cumsum(sizes)
        ordered = np.repeat(begins - (ends - sizes), sizes) + np.arange(len(blocks))
        starts = np.zeros((self.parts, rows + 1), np.int64)
        starts[:, 1:] = ends.reshape(self.parts, rows)
        starts[1:, 0] = starts[:-1, -1]
        if len(self.offsets) and max(abs(int(self.offsets.min())), int(self.offsets.max())) > LARGEST:
            raise Banned("", "its activations need more than 2 GB")
        return (
            starts.astype(np.int32),
            self.offsets[ordered].astype(np.int32),
            found.value[ordered],
            self.places[order].astype(np.int64),
            self.bias[order],
        )
