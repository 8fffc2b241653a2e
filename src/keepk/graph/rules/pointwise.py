"""Elementwise operations, and operations that create tensors.

These are the elementwise operations that torch does not tag as pointwise, and operations that pass their input on. A
constant that is created in forward fits any channels, so each of its dims gets new atoms.
"""

from dataclasses import replace

from torch import Tensor

from keepk.graph.ids.atoms import Label, label_of, set_label
from keepk.graph.ids.maps import along, support
from keepk.graph.rules.call import Call
from keepk.graph.rules.registry import rule


@rule("where", "masked_fill", "_prelu_kernel", "lerp", "addcmul", "addcdiv", "rrelu_with_noise", "celu", "bernoulli",
      "normal", "uniform", "exponential", "polar", "complex", "log_sigmoid_forward", "clamp", "hardswish", "real",
      "imag", "floor_divide", "log_sigmoid", "prelu", "poisson", "geometric", "cauchy", "log_normal", "random",
      "fake_quantize_per_tensor_affine_cachemask", "isnan")  # fmt: skip
def elementwise(call: Call) -> None:
    """Merge the inputs like any pointwise operation."""
    call.pointwise()


@rule("zero", "fill")
def overwritten(call: Call) -> None:
    """Fill with one constant, like a tensor that was created with it."""
    value = call.get("value", 0)
    if isinstance(value, Tensor):
        call.pointwise()
        return
    maps = call.maps(call.inputs[0])
    set_label(call.outputs[0], Label(maps, neutral=True, zeros=(value == 0,) * len(maps), all_zero=value == 0))


@rule("copy")
def copy_into(call: Call) -> None:
    """Copy into a tensor, which may be a slice of another one."""
    # The target keeps its atoms and is merged with the source. If it is a slice, the whole tensor has these atoms as
    # well, so everything written into it is tied together.
    target, source = call["self"], call["src"]
    values = call.operand(source, target.ndim)
    call.merge([call.operand(target, target.ndim), values], "is written over")
    written = label_of(source)
    if target._base is None and not label_of(target).maps:
        # A whole tensor without channels (torch.empty) simply becomes the source.
        label = replace(written, neutral=False)
        set_label(call.outputs[0], label)
        set_label(target, replace(label, from_parameters=False))
        return
    if not label_of(target).maps:
        for index_map in written.maps:
            call.pin(index_map, "is written into a slice that has no channels")
    zeros = tuple(values.zero_along(m) for m in label_of(target).maps)
    set_label(target, Label(label_of(target).maps, zeros=zeros))
    set_label(call.outputs[0], Label(label_of(target).maps, from_parameters=written.from_parameters, zeros=zeros))


@rule("detach", "alias", "_to_copy", "clone", "lift_fresh", "lift_fresh_copy", "contiguous", "_conj", "_neg_view",
      "resolve_conj", "view_of")  # fmt: skip
def passed_on(call: Call) -> None:
    """Pass on the same elements at the same positions."""
    for output in call.outputs:
        # As a boolean, NaN is True; as an integer, it is any number.
        replaced = label_of(call.inputs[0]).undefined and not (output.is_floating_point() or output.is_complex())
        call.label_output(call.maps(call.inputs[0]), to=output, zero=False if replaced else None)


@rule("native_dropout", "dropout", "alpha_dropout", "feature_dropout")
def dropped_out(call: Call) -> None:
    """Pass on the maps to the result and to the mask; only the result is 0 where the input is."""
    source = call.inputs[0]
    for output in call.outputs:
        # alpha_dropout replaces dropped elements by a negative constant, and shifts the others.
        keeps_zero = output is call.outputs[0] and call.name != "aten::alpha_dropout"
        call.label_output(call.maps(source), to=output, zero=source if keeps_zero else False)


@rule("tril", "triu")
def triangle(call: Call) -> None:
    """Pin channels along the last two dims, where elements are kept by position; constants are dropped instead."""
    rank = call.inputs[0].ndim
    kept = []
    for index_map in call.maps(call.inputs[0]):
        if set(support(index_map)) & {rank - 1, rank - 2} and not label_of(call.inputs[0]).neutral:
            call.pin(index_map, "a triangle is cut along the axis")
        elif not set(support(index_map)) & {rank - 1, rank - 2}:
            kept.append(index_map)
    call.label_output(kept)


@rule("view_as_complex", "view_as_real")
def complex_pairs(call: Call) -> None:
    """Unite real and imaginary parts."""
    kept = []
    for index_map in call.maps(call.inputs[0]):
        if call.name == "aten::view_as_real":
            kept.append(index_map[..., None])
        else:
            last = index_map.ndim - 1
            kept.append(call.union_over(index_map, [last] if index_map.shape[last] > 1 else []).squeeze(last))
    call.label_output(kept)


@rule("_local_scalar_dense", "is_nonzero", "item", "_assert_async", "_assert_scalar", "_assert_tensor_metadata",
      "sym_size", "record_stream")  # fmt: skip
def to_python(call: Call) -> None:
    """Drop the maps: the value goes to Python, and replays on cut copies check what Python does with it."""
    for output in call.outputs:
        call.label_output((), to=output, zero=False)


@rule("bincount", "histc", "equal", "allclose")
def counted(call: Call) -> None:
    """Mark everything lossy: all values are counted or compared, even zeros, so a removal changes the result."""
    for tensor in call.inputs:
        for index_map in call.maps(tensor):
            call.mark_lossy(index_map, support(index_map), f"{call.name.removeprefix('aten::')} counts all values")
            call.note_reader("a count", [index_map], support(index_map))
    for output in call.outputs:
        call.label_output((), to=output, zero=False)


@rule("nonzero", "unique_dim", "_unique", "_unique2", "unique_consecutive")
def found(call: Call) -> None:
    """Pin everything: the result is positions along the axis, or values without their positions."""
    call.pin_inputs("values are looked for along the axis")
    for output in call.outputs:
        call.label_output((), to=output, zero=False)


ZERO = ("zeros", "new_zeros", "zeros_like")
LARGEST = 1 << 24  # elements; for larger tensors, such as a mask over (tokens, tokens), atoms cost too much


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
    zero = _fills_with_zero(call)
    set_label(output, Label(tuple(maps), neutral=True, zeros=(zero,) * len(maps), all_zero=zero))


@rule("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like")
def like(call: Call) -> None:
    """Copy the maps of the input, which has the same shape."""
    maps = call.maps(call.inputs[0])
    constant_fill = not call.name.startswith("aten::rand")  # random numbers differ between channels
    zero = _fills_with_zero(call)
    set_label(call.outputs[0], Label(maps, neutral=constant_fill, zeros=(zero,) * len(maps), all_zero=zero))


def _fills_with_zero(call: Call) -> bool:
    """Whether every element of a new tensor is 0."""
    value = call.get("fill_value", call.get("s"))  # of `full`, or of `scalar_tensor`
    return call.name.removeprefix("aten::") in ZERO or (not isinstance(value, Tensor) and value == 0)
