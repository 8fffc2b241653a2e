"""Tensors made in forward: constants fit anything, so they carry atoms of their own for each dim."""

from keepk.graph.call import Call
from keepk.graph.label import Label, set_label
from keepk.graph.maps import along
from keepk.graph.table import rule

ZERO = ("zeros", "new_zeros", "zeros_like")
LARGEST = 1 << 24


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided",
      "new_empty_strided", "scalar_tensor")  # fmt: skip
def constant(call: Call) -> None:
    """Atoms for every dim, so that `out = zeros(...); out[:, :k] = a` and an LSTM's first state are followed."""
    output = call.outputs[0]
    maps = [
        along(call.atoms.new(size), dim, output.ndim)
        for dim, size in enumerate(output.shape)
        if size > 1 and output.numel() < LARGEST
    ]
    null = call.name.removeprefix("aten::") in ZERO
    set_label(output, Label(tuple(maps), neutral=True, zeros=(null,) * len(maps), all_zero=null))


@rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
def like(call: Call) -> None:
    """Shaped like the input."""
    maps = call.maps(call.inputs[0])
    constant_fill = not call.name.startswith("aten::rand")
    null = call.name.removeprefix("aten::") in ZERO
    set_label(call.outputs[0], Label(maps, neutral=constant_fill, zeros=(null,) * len(maps), all_zero=null))
