"""Tensors created in forward: a constant fits any channels, so each of its dims gets fresh atoms."""

from keepk.graph.call import Call
from keepk.graph.label import Label, set_label
from keepk.graph.maps import along
from keepk.graph.table import rule

ZERO = ("zeros", "new_zeros", "zeros_like")
LARGEST = 1 << 24  # elements; above it, a mask over (tokens, tokens) say, atoms cost more than following it is worth


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided",
      "new_empty_strided", "scalar_tensor")  # fmt: skip
def constant(call: Call) -> None:
    """Give every dim fresh atoms."""
    # `out = zeros(...); out[:, :k] = a` and the initial state of an LSTM meet channels later. Their atoms are then
    # united with these, and the size in the call to zeros is found to follow them.
    output = call.outputs[0]
    maps = [
        along(call.atoms.new(size), dim, output.ndim)
        for dim, size in enumerate(output.shape)
        if size > 1 and output.numel() < LARGEST
    ]
    zero = call.name.removeprefix("aten::") in ZERO
    set_label(output, Label(tuple(maps), neutral=True, zeros=(zero,) * len(maps), all_zero=zero))


@rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
def like(call: Call) -> None:
    """Take the maps of the input, whose shape it has."""
    maps = call.maps(call.inputs[0])
    constant_fill = not call.name.startswith("aten::rand")  # random numbers differ between channels
    zero = call.name.removeprefix("aten::") in ZERO
    set_label(call.outputs[0], Label(maps, neutral=constant_fill, zeros=(zero,) * len(maps), all_zero=zero))
