"""The kernels as LLVM IR, written as text.

Each function of this module defines one kernel. `Code` writes instructions; variables are stack slots, which LLVM's
``sroa`` pass turns into registers, and loops are context managers, so that a kernel reads like C.

Activations of a group of G samples are laid out as ``[channel][row][column][G]``. With G = 1 a vector covers adjacent
pixels of one sample, otherwise it covers samples. In both cases every output is computed as one chain of fused
multiply-adds: the bias first, then each nonzero weight in the order of the dense tensor. A sample's result therefore
has the same bits in every layout, whatever the size of the batch and the number of threads.

The error of a chain grows with its length, up to 1e-8 of the result for each weight where all products are equal. A
layer with more than `LONG` weights in a row therefore computes sums of a fixed number of weights (`chunk_of`) and adds
them one after the other; averages over more than `LONG` pixels are sums in float64. Both follow from the model alone.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, pairwise

SELL = 8  # rows that the kernel for single samples computes together
LONG = 256  # numbers that are added in one chain


def chunk_of(longest: int) -> int:
    """How many weights are summed before the sum is added to the result, if a row has `longest`; 0 if all of them are.

    It is a power of two near the root, so that neither the chunks nor their number are large.

    >>> chunk_of(256), chunk_of(257), chunk_of(25_088)
    (0, 32, 256)
    """
    return 0 if longest <= LONG else 1 << -(-(longest - 1).bit_length() // 2)


class Code:
    """A module of IR under construction.

    Args:
        width: The number of floats in a vector: 16 for AVX-512, 8 for AVX2, 4 for NEON.

    Attributes:
        width: The same.
        vector: The type of a vector.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.vector = f"<{width} x float>"
        self._functions: dict[str, str] = {}
        self._names = count()
        self._slots: list[str] = []
        self._lines: list[str] = []

    def text(self) -> str:
        """The whole module."""
        fma = "".join(f"declare {kind} @llvm.fma.{short}({kind}, {kind}, {kind})\n" for kind, short in self._kinds())
        bits = f"<{self.width} x i32>"
        legal = max(256, 32 * self.width)  # on some CPUs LLVM avoids wide vectors unless a function asks for them
        return (
            fma
            + f"declare {bits} @llvm.fptosi.sat.{self._short('i32')}.{self._short('f32')}({self.vector})\n"
            + "\n".join(self._functions.values())
            + f'\nattributes #0 = {{ nounwind "min-legal-vector-width"="{legal}" "prefer-vector-width"="{legal}" }}\n'
        )

    def _kinds(self) -> list[tuple[str, str]]:
        widths = sorted({self.width, SELL})
        return [("float", "f32"), *((f"<{width} x float>", f"v{width}f32") for width in widths)]

    def _short(self, kind: str) -> str:
        return f"v{self.width}{kind}"

    @contextmanager
    def function(self, name: str, *arguments: str) -> Iterator[None]:
        """Define a function; it has a body only once, however often it is defined.

        Args:
            name: Its name.
            arguments: Its arguments with their types, as in "ptr %x".
        """
        outer = self._lines, self._slots
        self._lines, self._slots = [], []
        yield
        shown = "define" if name == "run" else "define internal"
        head = f"{shown} void @{name}({', '.join(arguments)}) #0 {{\nentry:\n"
        self._functions[name] = head + "\n".join([*self._slots, *self._lines, "  ret void", "}"])
        self._lines, self._slots = outer

    def has(self, name: str) -> bool:
        """Whether a function is defined already."""
        return name in self._functions

    def let(self, text: str) -> str:
        """Name the result of an instruction."""
        name = f"%v{next(self._names)}"
        self._lines.append(f"  {name} = {text}")
        return name

    def do(self, text: str) -> None:
        """Write an instruction without a result."""
        self._lines.append(f"  {text}")

    def slot(self, kind: str, value: str | None = None) -> str:
        """A variable."""
        name = f"%v{next(self._names)}"
        self._slots.append(f"  {name} = alloca {kind}")
        if value is not None:
            self.do(f"store {kind} {value}, ptr {name}")
        return name

    def get(self, kind: str, slot: str) -> str:
        """The value of a variable."""
        return self.let(f"load {kind}, ptr {slot}")

    @contextmanager
    def loop(self, begin: str | int, end: str | int, step: str | int = 1) -> Iterator[str]:
        """A loop over an i64."""
        index, number = self.slot("i64", str(begin)), next(self._names)
        self.do(f"br label %head{number}")
        self._lines.append(f"head{number}:")
        i = self.get("i64", index)
        more = self.let(f"icmp slt i64 {i}, {end}")
        self.do(f"br i1 {more}, label %body{number}, label %done{number}")
        self._lines.append(f"body{number}:")
        yield i
        after = self.let(f"add i64 {i}, {step}")
        self.do(f"store i64 {after}, ptr {index}")
        self.do(f"br label %head{number}")
        self._lines.append(f"done{number}:")

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """A block that runs if an i1 is true."""
        number = next(self._names)
        self.do(f"br i1 {condition}, label %then{number}, label %after{number}")
        self._lines.append(f"then{number}:")
        yield
        self.do(f"br label %after{number}")
        self._lines.append(f"after{number}:")

    def plus(self, one: str | int, other: str | int) -> str:
        """The sum of two i64."""
        return self.let(f"add i64 {one}, {other}")

    def times(self, one: str | int, other: str | int) -> str:
        """The product of two i64."""
        return self.let(f"mul i64 {one}, {other}")

    def at(self, pointer: str, index: str | int, kind: str = "float") -> str:
        """The address of an element."""
        return self.let(f"getelementptr {kind}, ptr {pointer}, i64 {index}")

    def long_at(self, pointer: str, index: str | int) -> str:
        """An element of an array of i64."""
        return self.load(self.at(pointer, index, "i64"), "i64")

    def int_at(self, pointer: str, index: str | int) -> str:
        """An element of an array of i32, as i64."""
        return self.let(f"sext i32 {self.load(self.at(pointer, index, 'i32'), 'i32')} to i64")

    def load(self, pointer: str, kind: str = "") -> str:
        """Load a vector (or a value of another kind) from an address that may not be aligned."""
        return self.let(f"load {kind or self.vector}, ptr {pointer}, align 4")

    def store(self, value: str, pointer: str, kind: str = "") -> None:
        """Store a vector (or a value of another kind) to an address that may not be aligned."""
        self.do(f"store {kind or self.vector} {value}, ptr {pointer}, align 4")

    def splat(self, value: str, kind: str = "") -> str:
        """A vector of equal floats; the value itself if the kind is float."""
        kind = kind or self.vector
        if kind == "float":
            return value
        width = kind.partition(" ")[0][1:]
        first = self.let(f"insertelement {kind} poison, float {value}, i32 0")
        return self.let(f"shufflevector {kind} {first}, {kind} poison, <{width} x i32> zeroinitializer")

    def fma(self, one: str, other: str, added: str, kind: str = "") -> str:
        """One * other + added, rounded once."""
        kind = kind or self.vector
        short = "f32" if kind == "float" else f"v{kind.partition(' ')[0][1:]}f32"
        return self.let(f"call {kind} @llvm.fma.{short}({kind} {one}, {kind} {other}, {kind} {added})")

    def select(self, compare: str, one: str, other: str, then: str, otherwise: str, kind: str = "") -> str:
        """`then` where the comparison holds, `otherwise` elsewhere; comparisons with NaN do not hold."""
        kind = kind or self.vector
        flags = "i1" if kind == "float" else f"<{kind.partition(' ')[0][1:]} x i1>"
        chosen = self.let(f"fcmp {compare} {kind} {one}, {other}")
        return self.let(f"select {flags} {chosen}, {kind} {then}, {kind} {otherwise}")

    def clamp(self, value: str, low: str, high: str, kind: str = "") -> str:
        """The value within two bounds; NaN stays NaN."""
        raised = self.select("olt", value, low, low, value, kind)
        return self.select("ogt", raised, high, high, raised, kind)

    def transpose(self, vectors: Sequence[str]) -> list[str]:
        """The transpose of `width` vectors, in log2(width) rounds that exchange halves of pairs."""
        found, width, distance = list(vectors), self.width, 1
        while distance < width:
            after = list(found)
            low = [j if not j & distance else width + j - distance for j in range(width)]
            high = [j + distance if not j & distance else width + j for j in range(width)]
            for i in (i for i in range(width) if not i & distance):
                pair = f"{self.vector} {found[i]}, {self.vector} {found[i + distance]}"
                for place, mask in ((i, low), (i + distance, high)):
                    after[place] = self.let(f"shufflevector {pair}, {self.indices(mask)}")
            found, distance = after, 2 * distance
        return found

    def indices(self, mask: Sequence[int]) -> str:
        """The indices of a shuffle."""
        return f"<{len(mask)} x i32> <{', '.join(f'i32 {j}' for j in mask)}>"


def number(value: float) -> str:
    """A float constant in IR, which writes the bits of a double."""
    rounded = struct.unpack("f", struct.pack("f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"


# Weights times activations -------------------------------------------------------------------------------------------

SPMM = (
    "ptr noalias readonly %x",
    "ptr noalias %y",
    "ptr noalias readonly %starts",
    "ptr noalias readonly %offsets",
    "ptr noalias readonly %values",
    "ptr noalias readonly %places",
    "ptr noalias readonly %bias",
    "i64 %begin",
    "i64 %end",
    "i1 %first",
    "i1 %last",
    "i1 %clamped",
    "float %low",
    "float %high",
)


def spmm(code: Code, vectors: int, rows: int, step: int, *, added: bool = False) -> str:
    """A sparse matrix times `vectors` vectors of activations.

    Row m adds ``values[i] * x[offsets[i] + j * step]`` for its nonzeros i in starts[m]:starts[m + 1] to vector j of
    ``y[places[m]]``. Several rows are computed in lockstep, so that the chains of multiply-adds overlap.

    Args:
        code: The module.
        vectors: The number of vectors of each row.
        rows: How many rows are computed in lockstep.
        step: The bytes from one vector of activations to the next.
        added: Whether a call that is not the first one adds the sum of its nonzeros to y, rather than continuing y.

    Returns:
        The kernel's name. Its arguments are `SPMM`; the number of rows must be divisible by `rows`.
    """
    name = f"spmm_{vectors}_{rows}_{step}{'_added' if added else ''}"
    if code.has(name):
        return name
    with code.function(name, *SPMM), code.loop("%begin", "%end", rows) as m:
        row = [code.plus(m, r) for r in range(rows)]
        starts = [code.int_at("%starts", r) for r in (*row, code.plus(m, rows))]
        nonzeros = code.let(f"icmp ne i64 {starts[0]}, {starts[-1]}")
        needed = code.let(f"or i1 {code.let('or i1 %first, %last')}, {nonzeros}")
        with code.when(needed):
            _spmm_rows(code, row, starts, vectors, step, added=added)
    return name


def _spmm_rows(code: Code, row: Sequence[str], starts: Sequence[str], vectors: int, step: int, *, added: bool) -> None:
    """Compute rows together; `starts` has one more entry than `row`."""
    outputs = [code.at("%y", code.long_at("%places", r), "i8") for r in row]
    sums = [[code.slot(code.vector) for _ in range(vectors)] for _ in row]
    places = [(it, output, j) for own, output in zip(sums, outputs, strict=True) for j, it in enumerate(own)]
    with code.when("%first"):
        for m, own in zip(row, sums, strict=True):
            bias = code.splat(code.load(code.at("%bias", m), "float"))
            for it in own:
                code.do(f"store {code.vector} {bias}, ptr {it}")
    later = code.let("xor i1 %first, true")
    with code.when(later):
        for it, output, j in places:
            begin = _constant(code, -0.0) if added else code.load(code.at(output, j * code.width))
            code.do(f"store {code.vector} {begin}, ptr {it}")
    _spmm_nonzeros(code, starts, sums, step)
    if added:
        with code.when(later):
            for it, output, j in places:
                total = _sum(code, code.load(code.at(output, j * code.width)), code.get(code.vector, it), code.vector)
                code.do(f"store {code.vector} {total}, ptr {it}")
    with code.when(code.let("and i1 %last, %clamped")):
        low, high = code.splat("%low"), code.splat("%high")
        for it, _, _ in places:
            code.do(f"store {code.vector} {code.clamp(code.get(code.vector, it), low, high)}, ptr {it}")
    for it, output, j in places:
        code.store(code.get(code.vector, it), code.at(output, j * code.width))


def _spmm_nonzeros(code: Code, starts: Sequence[str], sums: Sequence[Sequence[str]], step: int) -> None:
    """Add the nonzeros of several rows: one of each row in turn as long as all have some, then those that are left."""

    def add(r: int, i: str) -> None:
        weight = code.splat(code.load(code.at("%values", i), "float"))
        source = code.at("%x", code.int_at("%offsets", i), "i8")
        for j, it in enumerate(sums[r]):
            x = code.load(code.at(source, j * step, "i8"))
            code.do(f"store {code.vector} {code.fma(weight, x, code.get(code.vector, it))}, ptr {it}")

    if len(sums) == 1:
        with code.loop(starts[0], starts[1]) as i:
            add(0, i)
        return
    lengths = [code.let(f"sub i64 {end}, {begin}") for begin, end in pairwise(starts)]
    shared = lengths[0]
    for length in lengths[1:]:
        less = code.let(f"icmp slt i64 {length}, {shared}")
        shared = code.let(f"select i1 {less}, i64 {length}, i64 {shared}")
    with code.loop(0, shared) as i:
        for r, begin in enumerate(starts[:-1]):
            add(r, code.plus(begin, i))
    for r, (begin, end) in enumerate(pairwise(starts)):
        with code.loop(code.plus(begin, shared), end) as i:
            add(r, i)


SELL_ARGUMENTS = (
    "ptr noalias readonly %x",
    "ptr noalias %y",
    "i64 %slices",
    "ptr noalias readonly %starts",
    "ptr noalias readonly %places",
    "ptr noalias readonly %values",
    "ptr noalias readonly %bias",
    "ptr noalias readonly %rows",
    "i1 %clamped",
    "float %low",
    "float %high",
)


def _sum(code: Code, one: str, other: str, kind: str) -> str:
    return code.let(f"fadd {kind} {one}, {other}")


def sell(code: Code, *, wide: bool, chunk: int = 0) -> str:
    """A sparse matrix times one vector of activations, 8 rows together (SELL-8).

    Step i of slice s multiplies values[8 * i:8 * i + 8] with the activations at places[8 * i:8 * i + 8]. Single loads
    are as fast as a gather instruction on every CPU that was measured, and faster on those with slow gathers.

    Args:
        code: The module.
        wide: Whether places have 32 bits instead of 16.
        chunk: How many steps are summed before the sum is added to the result; 0 for all.

    Returns:
        The kernel's name. Its arguments are `SELL_ARGUMENTS`.
    """
    name, kind, bits = f"sell_{'wide' if wide else 'narrow'}_{chunk}", f"<{SELL} x float>", 32 if wide else 16
    if code.has(name):
        return name
    with code.function(name, *SELL_ARGUMENTS), code.loop(0, "%slices") as s:
        total = code.slot(kind, code.load(code.at("%bias", code.times(s, SELL)), kind))
        begin, end = code.int_at("%starts", s), code.int_at("%starts", code.plus(s, 1))
        if not chunk:
            with code.loop(begin, end) as i:
                _sell_step(code, i, bits, total)
        else:
            # -0.0 changes no sum: the first chunk, which begins with the bias, is the result so far.
            own, nothing = total, code.splat(number(-0.0), kind)
            total = code.slot(kind, nothing)
            with code.loop(begin, end, chunk) as i:
                after = code.plus(i, chunk)
                stop = code.let(f"select i1 {code.let(f'icmp slt i64 {after}, {end}')}, i64 {after}, i64 {end}")
                with code.loop(i, stop) as step:
                    _sell_step(code, step, bits, own)
                code.do(f"store {kind} {_sum(code, code.get(kind, total), code.get(kind, own), kind)}, ptr {total}")
                code.do(f"store {kind} {nothing}, ptr {own}")
            code.do(f"store {kind} {_sum(code, code.get(kind, total), code.get(kind, own), kind)}, ptr {total}")
        with code.when("%clamped"):
            low, high = code.splat("%low", kind), code.splat("%high", kind)
            code.do(f"store {kind} {code.clamp(code.get(kind, total), low, high, kind)}, ptr {total}")
        result, row = code.get(kind, total), code.at("%rows", code.times(s, SELL), "i32")
        for j in range(SELL):
            value = code.let(f"extractelement {kind} {result}, i32 {j}")
            code.do(f"store float {value}, ptr {code.at('%y', code.int_at(row, j))}")
    return name


def _sell_step(code: Code, i: str, bits: int, total: str) -> None:
    """Add step i of a slice to a variable."""
    kind, gathered, first = f"<{SELL} x float>", "poison", code.times(i, SELL)
    weights = code.load(code.at("%values", first), kind)
    place = code.at("%places", first, f"i{bits}")
    words = [code.load(code.at(place, j, "i64"), "i64") for j in range(SELL * bits // 64)]
    for j in range(SELL):
        word, shift = words[j * bits // 64], j * bits % 64
        index = code.let(f"and i64 {code.let(f'lshr i64 {word}, {shift}')}, {2**bits - 1}")
        x = code.let(f"load float, ptr {code.at('%x', index)}")
        gathered = code.let(f"insertelement {kind} {gathered}, float {x}, i32 {j}")
    code.do(f"store {kind} {code.fma(weights, gathered, code.get(kind, total), kind)}, ptr {total}")


# Between layouts -----------------------------------------------------------------------------------------------------


def pack(code: Code, group: int) -> str:
    """Copy a group of samples from ``[sample][channel][row][column]`` into the program's layout.

    Lanes beyond the last sample get a copy of it.
    """
    name = f"pack_{group}"
    if code.has(name):
        return name
    sizes = "i64 %channels, i64 %rows, i64 %columns, i64 %plane, i64 %stride"
    span = "i64 %sample, i64 %begin, i64 %end"
    with code.function(name, "ptr noalias readonly %x", "ptr noalias %y", sizes, span):
        lanes = code.slot(f"[{group} x i64]")
        last = code.let("sub i64 %end, 1")
        with code.loop(0, group) as lane:
            wanted = code.plus("%begin", lane)
            beyond = code.let(f"icmp sgt i64 {wanted}, {last}")
            taken = code.let(f"select i1 {beyond}, i64 {last}, i64 {wanted}")
            code.do(f"store i64 {code.times(taken, '%sample')}, ptr {code.at(lanes, lane, 'i64')}")
        with code.loop(0, "%channels") as c, code.loop(0, "%rows") as r:
            source = code.at("%x", code.times(code.plus(code.times(c, "%rows"), r), "%columns"))
            pixel = code.plus(code.times(c, "%plane"), code.times(r, "%stride"))
            target = code.at("%y", code.times(pixel, group))
            whole = code.times(code.let(f"sdiv i64 %columns, {code.width}"), code.width)
            with code.loop(0, whole, code.width) as e:
                if group == 1:
                    value = code.load(code.at(code.at(source, code.long_at(lanes, 0)), e))
                    code.store(value, code.at(target, e))
                for first in range(0, group, code.width) if group > 1 else ():
                    own = [code.at(code.at(source, code.long_at(lanes, first + j)), e) for j in range(code.width)]
                    for j, vector in enumerate(code.transpose([code.load(it) for it in own])):
                        place = code.plus(code.times(code.plus(e, j), group), first)
                        code.store(vector, code.at(target, place))
            with code.loop(whole, "%columns") as e, code.loop(0, group) as lane:
                value = code.load(code.at(code.at(source, code.long_at(lanes, lane)), e), "float")
                code.store(value, code.at(target, code.plus(code.times(e, group), lane)), "float")
    return name


def unpack(code: Code, group: int) -> str:
    """Copy a group of samples from the program's layout to ``[sample][channel][row][column]``."""
    name = f"unpack_{group}"
    if code.has(name):
        return name
    sizes = "i64 %channels, i64 %rows, i64 %columns, i64 %plane, i64 %stride"
    span = "i64 %sample, i64 %begin, i64 %end"
    with code.function(name, "ptr noalias readonly %x", "ptr noalias %y", sizes, span):
        left = code.let("sub i64 %end, %begin")
        few = code.let(f"icmp slt i64 {left}, {group}")
        valid = code.let(f"select i1 {few}, i64 {left}, i64 {group}")
        out = code.at("%y", code.times("%begin", "%sample"))
        with code.loop(0, "%channels") as c, code.loop(0, "%rows") as r:
            target = code.at(out, code.times(code.plus(code.times(c, "%rows"), r), "%columns"))
            pixel = code.plus(code.times(c, "%plane"), code.times(r, "%stride"))
            source = code.at("%x", code.times(pixel, group))
            whole = code.times(code.let(f"sdiv i64 %columns, {code.width}"), code.width)
            with code.loop(0, whole, code.width) as e:
                if group == 1:
                    code.store(code.load(code.at(source, e)), code.at(target, e))
                for first in range(0, group, code.width) if group > 1 else ():
                    places = [code.plus(code.times(code.plus(e, j), group), first) for j in range(code.width)]
                    turned = code.transpose([code.load(code.at(source, it)) for it in places])
                    for j, vector in enumerate(turned):
                        with code.when(code.let(f"icmp slt i64 {first + j}, {valid}")):
                            row = code.at(target, code.times(first + j, "%sample"))
                            code.store(vector, code.at(row, e))
            with code.loop(whole, "%columns") as e, code.loop(0, valid) as lane:
                value = code.load(code.at(source, code.plus(code.times(e, group), lane)), "float")
                code.store(value, code.at(code.at(target, code.times(lane, "%sample")), e), "float")
    return name


def copy(code: Code) -> str:
    """Copy `%count` floats, a multiple of the vector width."""
    name = "copy"
    if not code.has(name):
        arguments = ("ptr noalias readonly %x", "ptr noalias %y", "i64 %count")
        with code.function(name, *arguments), code.loop(0, "%count", code.width) as i:
            code.store(code.load(code.at("%x", i)), code.at("%y", i))
    return name


def every(code: Code, step: int) -> str:
    """Copy every `step`-th row and column of each plane of one sample: a phase of a strided convolution's input."""
    name = f"every_{step}"
    if code.has(name):
        return name
    planes = "i64 %channels, i64 %from_plane, i64 %from_stride, i64 %to_plane, i64 %to_stride"
    arguments = ("ptr noalias readonly %x", "ptr noalias %y", planes, "i64 %rows, i64 %columns")
    with code.function(name, *arguments), code.loop(0, "%channels") as c, code.loop(0, "%rows") as r:
        line = code.times(code.times(r, step), "%from_stride")
        source = code.at("%x", code.plus(code.times(c, "%from_plane"), line))
        target = code.at("%y", code.plus(code.times(c, "%to_plane"), code.times(r, "%to_stride")))
        whole = code.times(code.let(f"sdiv i64 %columns, {code.width}"), code.width)
        with code.loop(0, whole, code.width) as e:
            code.store(_strided(code, code.at(source, code.times(e, step)), step), code.at(target, e))
        with code.loop(whole, "%columns") as e:
            value = code.load(code.at(source, code.times(e, step)), "float")
            code.store(value, code.at(target, e), "float")
    return name


def _strided(code: Code, pointer: str, step: int) -> str:
    """A vector of every `step`-th float; for a step of 2, the float after the last one is read too."""
    if step == 1:
        return code.load(pointer)
    if step == 2:
        one, other = code.load(pointer), code.load(code.at(pointer, code.width))
        even = code.indices(range(0, 2 * code.width, 2))
        return code.let(f"shufflevector {code.vector} {one}, {code.vector} {other}, {even}")
    vector = "poison"
    for j in range(code.width):
        value = code.load(code.at(pointer, j * step), "float")
        vector = code.let(f"insertelement {code.vector} {vector}, float {value}, i32 {j}")
    return vector


def clear_frame(code: Code, group: int) -> str:
    """Set everything around the pixels of each plane to zero: what convolutions with padding read there."""
    name = f"clear_frame_{group}"
    if code.has(name):
        return name
    kind, parts = ("float", 1) if group == 1 else (code.vector, group // code.width)
    zero = number(0.0) if group == 1 else "zeroinitializer"
    sizes = "i64 %channels, i64 %rows, i64 %columns, i64 %plane, i64 %stride, i64 %frame"
    with code.function(name, "ptr noalias %x", sizes), code.loop(0, "%channels") as c:
        plane = code.times(c, "%plane")
        first = code.plus(code.times("%frame", "%stride"), "%frame")

        def clear(begin: str, end: str) -> None:
            with code.loop(code.plus(plane, begin), code.plus(plane, end)) as pixel:
                for part in range(parts):
                    place = code.plus(code.times(pixel, group), part * code.width)
                    code.store(zero, code.at("%x", place), kind)

        clear("0", first)
        with code.loop(0, "%rows") as r:
            row = code.plus(first, code.times(r, "%stride"))
            clear(code.plus(row, "%columns"), code.plus(row, "%stride"))
        below = code.plus(first, code.times("%rows", "%stride"))
        clear(below, code.plus(below, code.plus(code.times("%frame", "%stride"), "%frame")))
    return name


# Pooling -------------------------------------------------------------------------------------------------------------

POOL = (
    "ptr noalias readonly %x",
    "ptr noalias %y",
    "i64 %channels, i64 %from_plane, i64 %from_stride, i64 %to_plane, i64 %to_stride",
    "i64 %rows",
    "i64 %columns",
    "ptr noalias readonly %row_spans",
    "ptr noalias readonly %column_spans",
)


def pool(code: Code, kind: str, group: int, *, long: bool = False) -> str:
    """The maximum or the average of a window around each output.

    The spans have three i32 for each row or column of the output: the first input row or column of its window, the one
    after the last, and how many count for the average.

    Args:
        code: The module.
        kind: "max" or "average".
        group: The number of samples.
        long: Whether an average is a sum in float64.

    Returns:
        The kernel's name. Its arguments are `POOL`.
    """
    name = f"pool_{kind}_{group}{'_long' if long else ''}"
    if code.has(name):
        return name
    scalar = group == 1
    type_, parts = ("float", 1) if scalar else (code.vector, group // code.width)
    begin = number(float("-inf")) if kind == "max" else number(0.0)
    sums = type_.replace("float", "double") if long else type_
    with code.function(name, *POOL), code.loop(0, "%channels") as c, code.loop(0, "%rows") as r:
        top, bottom, tall = (code.int_at("%row_spans", code.plus(code.times(r, 3), j)) for j in range(3))
        with code.loop(0, "%columns") as e:
            left, right, wide = (code.int_at("%column_spans", code.plus(code.times(e, 3), j)) for j in range(3))
            empty = "zeroinitializer" if long else code.splat(begin, type_)
            totals = [code.slot(sums, empty) for _ in range(parts)]
            with code.loop(top, bottom) as y, code.loop(left, right) as x:
                pixel = code.plus(code.times(y, "%from_stride"), x)
                source = code.at("%x", code.times(code.plus(code.times(c, "%from_plane"), pixel), group))
                for part, total in enumerate(totals):
                    value = code.load(code.at(source, part * code.width), type_)
                    if long:
                        value = code.let(f"fpext {type_} {value} to {sums}")
                    code.do(f"store {sums} {_pooled(code, kind, code.get(sums, total), value, sums)}, ptr {total}")
            pixel = code.plus(code.times(r, "%to_stride"), e)
            target = code.at("%y", code.times(code.plus(code.times(c, "%to_plane"), pixel), group))
            for part, total in enumerate(totals):
                value = code.get(sums, total)
                if long:
                    value = code.let(f"fptrunc {sums} {value} to {type_}")
                if kind == "average":
                    size = code.splat(code.let(f"sitofp i64 {code.times(tall, wide)} to float"), type_)
                    value = code.let(f"fdiv {type_} {value}, {size}")
                code.store(value, code.at(target, part * code.width), type_)
    return name


def _pooled(code: Code, kind: str, total: str, value: str, type_: str) -> str:
    if kind == "average":
        return _sum(code, total, value, type_)
    # As in torch, NaN wins: it is taken because the comparison does not hold, and stays because nothing exceeds it.
    return code.select("uno", total, total, total, code.select("oge", total, value, total, value, type_), type_)


def pool_windows(code: Code, kind: str, size: tuple[int, int], step: int) -> str:
    """The same for one sample and windows of one size that lie inside, `width` outputs at a time.

    It reads and writes up to a vector beyond the end of each row.
    """
    name = f"pool_{kind}_{size[0]}x{size[1]}_{step}"
    if code.has(name):
        return name
    planes = "i64 %channels, i64 %from_plane, i64 %from_stride, i64 %to_plane, i64 %to_stride"
    arguments = ("ptr noalias readonly %x", "ptr noalias %y", planes, "i64 %rows", "i64 %columns")
    loops = (code.loop(0, "%channels"), code.loop(0, "%rows"), code.loop(0, "%columns", code.width))
    with code.function(name, *arguments), loops[0] as c, loops[1] as r, loops[2] as e:
        total = code.splat(number(float("-inf")) if kind == "max" else number(0.0))
        for y in range(size[0]):
            line = code.times(code.plus(code.times(r, step), y), "%from_stride")
            row = code.at("%x", code.plus(code.times(c, "%from_plane"), line))
            for x in range(size[1]):
                value = _strided(code, code.at(row, code.plus(code.times(e, step), x)), step)
                total = _pooled(code, kind, total, value, code.vector)
        if kind == "average":
            total = code.let(f"fdiv {code.vector} {total}, {code.splat(number(size[0] * size[1]))}")
        pixel = code.plus(code.plus(code.times(c, "%to_plane"), code.times(r, "%to_stride")), e)
        code.store(total, code.at("%y", pixel))
    return name


# Element by element --------------------------------------------------------------------------------------------------


def pointwise(code: Code, kind: str, low: float = 0.0, high: float = 0.0) -> str:
    """A function of one variable, applied to `%count` floats, a multiple of the vector width.

    Args:
        code: The module.
        kind: One of `FUNCTIONS`, or "clamp".
        low: The lower bound of a clamp.
        high: The upper bound of a clamp.
    """
    name = f"pointwise_{kind}" + (f"_{number(low)}_{number(high)}" if kind == "clamp" else "")
    if not code.has(name):
        with code.function(name, "ptr %x", "ptr %y", "i64 %count"), code.loop(0, "%count", code.width) as i:
            x = code.load(code.at("%x", i))
            if kind == "clamp":
                value = code.clamp(x, code.splat(number(low)), code.splat(number(high)))
            else:
                value = FUNCTIONS[kind](code, x)
            code.store(value, code.at("%y", i))
    return name


def binary(code: Code, kind: str, *, clamped: bool) -> str:
    """The sum or product of `%count` floats, a multiple of the vector width; the sum may be clamped."""
    name = f"binary_{kind}{'_clamped' if clamped else ''}"
    if not code.has(name):
        arguments = ("ptr %one", "ptr %other", "ptr %y", "i64 %count", "float %low", "float %high")
        with code.function(name, *arguments), code.loop(0, "%count", code.width) as i:
            one, other = code.load(code.at("%one", i)), code.load(code.at("%other", i))
            value = code.let(f"f{kind} {code.vector} {one}, {other}")
            if clamped:
                value = code.clamp(value, code.splat("%low"), code.splat("%high"))
            code.store(value, code.at("%y", i))
    return name


def scale(code: Code, group: int) -> str:
    """Each plane times a number of its own for each sample."""
    name = f"scale_{group}"
    if not code.has(name):
        arguments = ("ptr %x", "ptr noalias readonly %factors", "ptr %y", "i64 %channels", "i64 %plane")
        with code.function(name, *arguments), code.loop(0, "%channels") as c:
            own = code.at("%factors", code.times(c, group))
            parts = 1 if group == 1 else group // code.width
            if group == 1:
                factors = [code.splat(code.load(own, "float"))]
            else:
                factors = [code.load(code.at(own, part * code.width)) for part in range(parts)]
            begin = code.times(code.times(c, "%plane"), group)
            end = code.plus(begin, code.times("%plane", group))
            with code.loop(begin, end, parts * code.width) as i:
                for part, factor in enumerate(factors):
                    place = code.plus(i, part * code.width)
                    value = code.let(f"fmul {code.vector} {code.load(code.at('%x', place))}, {factor}")
                    code.store(value, code.at("%y", place))
    return name


def _constant(code: Code, value: float) -> str:
    return code.splat(number(value))


def _polynomial(code: Code, x: str, coefficients: Sequence[float]) -> str:
    total = _constant(code, coefficients[0])
    for coefficient in coefficients[1:]:
        total = code.fma(total, x, _constant(code, coefficient))
    return total


def exponential(code: Code, x: str) -> str:
    """exp(x): 2 ** n times a polynomial of the rest, within two units in the last place; NaN stays NaN."""
    low, high = _constant(code, -103.9), _constant(code, 88.7228)  # beyond them 0 and infinity
    kept = code.clamp(x, low, high)
    magic = _constant(code, 12582912.0)  # 1.5 * 2 ** 23: adding it rounds to an integer
    shifted = code.fma(kept, _constant(code, 1.4426950408889634), magic)
    n = code.let(f"fsub {code.vector} {shifted}, {magic}")
    rest = code.fma(n, _constant(code, -0.693359375), kept)
    rest = code.fma(n, _constant(code, 2.12194440e-4), rest)
    tail = _polynomial(
        code,
        rest,
        (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1),
    )
    square = code.let(f"fmul {code.vector} {rest}, {rest}")
    value = code.fma(tail, square, code.let(f"fadd {code.vector} {rest}, {_constant(code, 1.0)}"))
    whole = f"<{code.width} x i32>"
    exponent = code.let(f"call {whole} @llvm.fptosi.sat.v{code.width}i32.v{code.width}f32({code.vector} {n})")
    each = f"<{', '.join(['i32 {0}'] * code.width)}>"
    # Two factors, since 2 ** n itself may be too large or too small for a float where the result is not.
    half, scaled = code.let(f"ashr {whole} {exponent}, {each.format(1)}"), value
    for part in (half, code.let(f"sub {whole} {exponent}, {half}")):
        biased = code.let(f"add {whole} {part}, {each.format(127)}")
        power = code.let(f"bitcast {whole} {code.let(f'shl {whole} {biased}, {each.format(23)}')} to {code.vector}")
        scaled = code.let(f"fmul {code.vector} {scaled}, {power}")
    tiny = code.select("olt", x, low, _constant(code, 0.0), scaled)
    return code.select("ogt", x, high, _constant(code, float("inf")), tiny)


def sigmoid(code: Code, x: str) -> str:
    """1 / (1 + exp(-x))."""
    one = _constant(code, 1.0)
    power = exponential(code, code.let(f"fneg {code.vector} {x}"))
    return code.let(f"fdiv {code.vector} {one}, {code.let(f'fadd {code.vector} {one}, {power}')}")


def tanh(code: Code, x: str) -> str:
    """The hyperbolic tangent: 2 sigmoid(2 x) - 1, or a polynomial near 0, where that would cancel."""
    doubled = code.let(f"fadd {code.vector} {x}, {x}")
    far = code.fma(_constant(code, 2.0), sigmoid(code, doubled), _constant(code, -1.0))
    square = code.let(f"fmul {code.vector} {x}, {x}")
    odd = _polynomial(
        code,
        square,
        (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1),
    )
    near = code.fma(code.let(f"fmul {code.vector} {odd}, {square}"), x, x)
    small = _constant(code, 0.625**2)
    return code.select("olt", square, small, near, far)


def _silu(code: Code, x: str) -> str:
    power = exponential(code, code.let(f"fneg {code.vector} {x}"))
    return code.let(f"fdiv {code.vector} {x}, {code.let(f'fadd {code.vector} {_constant(code, 1.0)}, {power}')}")


def _gelu(code: Code, x: str) -> str:
    """GELU: x times the normal distribution, to 1e-6 of the result also where it is small.

    The tail is erfc(|x| / sqrt(2)) / 2 by Chebyshev fitting (Numerical Recipes, erfcc): 1 + erf would cancel.
    """
    zero, one = _constant(code, 0.0), _constant(code, 1.0)
    size = code.select("olt", x, zero, code.let(f"fneg {code.vector} {x}"), x)
    t = code.let(f"fdiv {code.vector} {one}, {code.fma(size, _constant(code, 0.3535533905932738), one)}")
    fitted: tuple[float, ...] = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807)
    fitted += (-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223)
    minus_half = code.let(f"fmul {code.vector} {x}, {_constant(code, -0.5)}")
    power = exponential(code, code.fma(minus_half, x, _polynomial(code, t, fitted)))
    doubled = code.let(f"fmul {code.vector} {t}, {power}")
    tail = code.let(f"fmul {code.vector} {doubled}, {_constant(code, 0.5)}")
    share = code.select("olt", x, zero, tail, code.let(f"fsub {code.vector} {one}, {tail}"))
    return code.let(f"fmul {code.vector} {x}, {share}")


def _gelu_tanh(code: Code, x: str) -> str:
    """Its approximation x (1 + tanh(u)) / 2, as x sigmoid(2 u), where nothing cancels."""
    square = code.let(f"fmul {code.vector} {x}, {x}")
    inner = code.fma(code.let(f"fmul {code.vector} {_constant(code, 0.044715)}, {square}"), x, x)
    inner = code.let(f"fmul {code.vector} {inner}, {_constant(code, 1.5957691216057308)}")
    return code.let(f"fmul {code.vector} {x}, {sigmoid(code, inner)}")


def _hardsigmoid(code: Code, x: str) -> str:
    shifted = code.let(f"fadd {code.vector} {x}, {_constant(code, 3.0)}")
    kept = code.clamp(shifted, _constant(code, 0.0), _constant(code, 6.0))
    return code.let(f"fdiv {code.vector} {kept}, {_constant(code, 6.0)}")


def _hardswish(code: Code, x: str) -> str:
    shifted = code.let(f"fadd {code.vector} {x}, {_constant(code, 3.0)}")
    kept = code.clamp(shifted, _constant(code, 0.0), _constant(code, 6.0))
    product = code.let(f"fmul {code.vector} {x}, {kept}")
    return code.let(f"fdiv {code.vector} {product}, {_constant(code, 6.0)}")


FUNCTIONS = {
    "sigmoid": sigmoid,
    "tanh": tanh,
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
}
"""The functions of `pointwise`."""
KEEP_ZERO = {"tanh", "silu", "gelu", "gelu_tanh", "hardswish"}
"""Those that map 0 to 0, so that zeros around the pixels stay."""
