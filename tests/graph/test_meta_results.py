"""Results on the meta device are those that the operations give on the CPU."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepk.graph import meta_results
from keepk.graph.meta_results import meta_result

aten = torch.ops.aten
SIZES = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool])
NUMBERS = st.sampled_from([2, 0.5, True])


@st.composite
def tensors(draw, sizes=SIZES, dtypes=DTYPES):
    """A tensor that is often contiguous, sometimes transposed, expanded or channels_last."""
    shape = draw(sizes)
    tensor = torch.ones(shape, dtype=draw(dtypes))
    layout = draw(st.sampled_from(["plain", "plain", "plain", "transposed", "expanded", "channels_last"]))
    if layout == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1)
    if layout == "expanded":
        return tensor[..., None].expand(*shape, 3)
    if layout == "channels_last" and tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


@st.composite
def calls(draw):
    """An operation that has a shortcut, with arguments that often fit."""
    operation = draw(st.sampled_from(sorted(meta_results._SHORTCUTS, key=str)))
    floats = tensors(dtypes=st.sampled_from([torch.float32, torch.float64]))
    name = operation._schema.name.removeprefix("aten::")
    x = draw(tensors() if draw(st.booleans()) else floats)
    if name in ("add", "sub", "mul", "div"):
        other = draw(NUMBERS) if operation._overloadname == "Scalar" else draw(st.one_of(NUMBERS, tensors(), floats))
        alpha = {"alpha": 2} if name in ("add", "sub") and draw(st.booleans()) else {}
        return operation, (x, other), alpha
    if name == "addmm":
        m, k, n = draw(st.tuples(*[st.integers(1, 4)] * 3))
        bias = torch.ones(draw(st.sampled_from([(n,), (1,), (m, n), (1, n), (m, 1), (), (n + 1,)])))
        factor = torch.ones(k + draw(st.sampled_from([0, 0, 1])), n)
        return operation, (bias, torch.ones(m, k) if draw(st.booleans()) else torch.ones(k, m).t(), factor), {}
    if name == "mean":
        dims = draw(st.lists(st.integers(-4, 3), max_size=3))
        return operation, (x, dims, *draw(st.sampled_from([(), (True,), (False,)]))), {}
    if name == "_safe_softmax":
        return operation, (x, draw(st.integers(-3, 3))), {}
    if name == "native_layer_norm":
        rank = draw(st.integers(0, 2))
        shape = list(x.shape[x.ndim - rank :]) if draw(st.booleans()) else [3]
        carrier = torch.ones(shape, dtype=x.dtype) if draw(st.booleans()) else None
        return operation, (x, shape, carrier, carrier, 1e-5), {}
    if name == "native_group_norm":
        channels, groups = draw(st.sampled_from([(4, 2), (4, 3), (6, 3), (2, 0)]))
        x = torch.ones(2, channels, *draw(st.sampled_from([(), (3,), (3, 2)])))
        carrier = torch.ones(channels) if draw(st.booleans()) else None
        sizes = (2, channels, x.numel() // (2 * channels), groups)
        return operation, (x, carrier, None, *sizes, 1e-5), {}
    if name == "native_batch_norm":
        x = torch.ones(2, 3, *draw(st.sampled_from([(), (4,), (4, 2)])))
        carrier, training = torch.ones(3 if draw(st.booleans()) else 2), draw(st.booleans())
        return operation, (x, carrier, carrier, carrier.clone(), carrier.clone(), training, 0.1, 1e-5), {}
    required = [it for it in operation._schema.arguments[1:] if not it.has_default_value() and not it.kwarg_only]
    numbers = [draw(NUMBERS) for _ in required]
    if name in ("clamp", "clamp_"):
        numbers = draw(st.sampled_from([(), (0.5,), (None, 1), (-1, 1)]))
    by_name: dict[str, Any] = {"approximate": "tanh"} if name == "gelu" and draw(st.booleans()) else {}
    return operation, (x, *numbers), by_name


def without_values(tensor):
    """The tensor on the meta device; `to` would make an expanded one contiguous."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def computed(operation, arguments, by_name):
    """The result on the CPU; None if the operation fails."""
    try:
        return operation(*arguments, **by_name)
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None


def described(result):
    """Shape, dtype and strides of each tensor; the stride of a dim of size 1 has no meaning."""
    parts = [result] if isinstance(result, torch.Tensor) else result
    return [
        (tuple(it.shape), it.dtype, [stride for size, stride in zip(it.shape, it.stride(), strict=True) if size > 1])
        for it in parts
    ]


def test_results_have_the_shapes_dtypes_and_strides_of_real_ones():
    found = Counter[str]()

    @settings(max_examples=1500, deadline=None)
    @given(calls())
    def check(call):
        operation, arguments, by_name = call
        on_meta = tuple(without_values(it) if isinstance(it, torch.Tensor) else it for it in arguments)
        try:
            quick = meta_result(operation, on_meta, by_name)
        except RuntimeError:  # a BatchNorm whose channels do not fit; this operation itself does not check them
            assert len(arguments[1]) != arguments[0].shape[1]
            return
        if quick is None:  # left to torch
            return
        real = computed(operation, arguments, by_name)
        assert real is not None, f"{operation} fails"
        assert described(quick) == described(real)
        assert all(it.is_meta for it in ([quick] if isinstance(quick, torch.Tensor) else quick))
        found[operation._schema.name] += 1

    check()
    assert {operation._schema.name for operation in meta_results._SHORTCUTS} == set(found)


@pytest.mark.parametrize("operation", [aten.sigmoid_.default, aten.clamp_.default])
def test_in_place_operations_return_their_tensor(operation):
    x = torch.empty(2, 3, device="meta")
    assert meta_result(operation, (x, 0.5) if operation is aten.clamp_.default else (x,), {}) is x


def test_other_operations_and_devices_are_left_to_torch():
    x = torch.zeros(2, 3)
    assert meta_result(aten.relu.default, (x,), {}) is None
    assert meta_result(aten.add.Tensor, (x.to("meta"), x), {}) is None
    assert meta_result(aten.mm.default, (x.to("meta"), x.to("meta").t()), {}) is None
