"""Law: decoding restores the values, types and ties of what was encoded."""

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from keepk.errors import CheckpointError
from keepk.storage.codec import decode, encode
from keepk.storage.files import safetensors_bytes

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


def through_bytes(tree):
    """Encode, write JSON text and safetensors bytes, read them with the standard readers, and decode."""
    encoded, tensors = encode(tree, "extra")
    data = b"".join(bytes(chunk) for chunk in safetensors_bytes(tensors))
    return decode(json.loads(json.dumps(encoded, allow_nan=False)), safetensors.torch.load(data))


def raw(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).tolist()


def in_order(value):
    """A string that does not depend on the iteration order of sets."""
    if isinstance(value, set | frozenset | tuple) and not isinstance(value, torch.Size):
        items = [in_order(item) for item in value]
        return f"{type(value).__name__}{items if isinstance(value, tuple) else sorted(items)}"
    return f"{type(value).__name__} {value!r}"


def assert_same(left, right):
    """The oracle: exact types, floats and tensors by their bits, dicts in order."""
    assert type(left) is type(right)
    if isinstance(left, float):
        assert struct.pack("d", left) == struct.pack("d", right)
    elif isinstance(left, complex):
        assert_same((left.real, left.imag), (right.real, right.imag))
    elif isinstance(left, torch.Tensor):
        assert (left.shape, left.dtype, raw(left)) == (right.shape, right.dtype, raw(right))
    elif isinstance(left, np.ndarray | np.generic):
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
    elif isinstance(left, set | frozenset):
        assert in_order(left) == in_order(right)
    elif isinstance(left, dict):
        assert_same(list(left.items()), list(right.items()))
        assert getattr(left, "default_factory", 0) is getattr(right, "default_factory", 0)
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


numpy_scalars = st.one_of(
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.integers(0, 255).map(np.uint8),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.booleans().map(np.bool_),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),
    st.sampled_from(["$tuple", "$tensor", "$", "codec", "value", "\ud800"]),
    st.binary(max_size=9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cuda:1"), torch.device("cpu"), torch.Size([2, 0])]),
    numpy_scalars,
)
hashables = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
tensors = st.builds(
    lambda shape, seed, dtype: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.complex128]),
)
arrays = st.builds(
    lambda shape, dtype: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(["<f4", ">f8", "<i2", "|b1", "<c16", "<U3", "<M8[s]"]),
)


def containers(inner):
    mappings = st.dictionaries(hashables, inner, max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        mappings,
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        mappings.map(OrderedDict),
        mappings.map(Counter),
        st.builds(defaultdict, st.sampled_from([None, int, float, list, dict, set]), mappings),
        st.sets(hashables, max_size=4),
    )


@settings(max_examples=250, deadline=None, derandomize=True)
@given(st.recursive(st.one_of(scalars, tensors, arrays), containers, max_leaves=12))
def test_a_tree_comes_back_as_it_was(tree):
    assert_same(through_bytes(tree), tree)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.recursive(st.one_of(scalars, tensors), containers, max_leaves=12))
def test_the_same_tree_gives_the_same_bytes(tree):
    first, second = encode(tree), encode(tree)
    assert json.dumps(first[0]) == json.dumps(second[0])
    assert [*map(bytes, safetensors_bytes(first[1]))] == [*map(bytes, safetensors_bytes(second[1]))]


def test_a_set_is_written_in_an_order_that_no_hash_seed_changes():
    words = [f"word{index:02}" for index in range(50)]
    assert encode(set(words))[0]["value"]["$set"] == words


def test_int_keys_stay_ints():
    back = through_bytes(Counter({30: 1, 60: 2}))
    assert type(back) is Counter
    assert [*back.items()] == [(30, 1), (60, 2)]


@pytest.mark.parametrize("key", ["$tuple", "$dict", "$tensor", "$", "$unknown"])
def test_keys_that_look_like_tags_survive(key):
    tree = {key: [1, {key: {"$tuple": [key]}}]}
    assert_same(through_bytes(tree), tree)


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e22])
def test_floats_keep_their_bits(value):
    assert_same(through_bytes([value, complex(value, -value)]), [value, complex(value, -value)])


def test_a_nan_keeps_its_payload():
    odd = struct.unpack(">d", bytes.fromhex("7ff8000000abcdef"))[0]
    assert struct.pack(">d", through_bytes(odd)).hex() == "7ff8000000abcdef"


def test_ints_of_more_digits_than_python_reads():
    huge = 7**9000
    assert through_bytes([huge, -huge]) == [huge, -huge]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 2)], ids=str)
def test_every_dtype_by_its_bits(dtype, shape):
    width = torch.empty((), dtype=dtype).element_size()
    size = math.prod(shape) * width
    content = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8)
    tensor = content.view(dtype).reshape(shape)
    assert_same(through_bytes({"t": tensor}), {"t": tensor})


def test_tied_tensors_are_stored_once_and_come_back_as_one():
    weight = nn.Parameter(torch.randn(3, 4))
    tree = {"a": weight, "b": weight.detach(), "c": [weight.view(3, 4)], "other": weight.detach().clone()}
    assert len(encode(tree)[1]) == 2
    back = through_bytes(tree)
    assert back["a"] is back["b"]
    assert back["a"] is back["c"][0]
    assert back["other"] is not back["a"]
    assert type(back["a"]) is torch.Tensor


def test_views_that_overlap_in_another_way_are_independent_copies():
    base, square = torch.arange(12.0), torch.randn(3, 3)
    tree = [
        square,
        square.t(),
        base,
        base[2:6],
        base[::2],
        base.view(3, 4),
        base.view(3, 4).t()[:2],
        base.view(torch.int32),
    ]
    back = through_bytes(tree)
    assert_same(back, tree)
    back[0].zero_(), back[2].zero_()
    assert_same([back[1], *back[3:]], [tree[1], *tree[3:]])


def test_tensors_of_one_freed_address_are_not_tied():
    tree = [np.full(64, index) for index in range(50)]
    assert_same(through_bytes(tree), tree)


def test_empty_tensors_are_not_tied():
    tree = [torch.empty(0), torch.empty(0, 3), torch.empty(0)]
    back = through_bytes(tree)
    assert_same(back, tree)
    assert back[0] is not back[2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last),
        torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(4, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(4, 3).t(),
        torch.randn(2, 3, 4).permute(1, 2, 0),
        torch.randn(0, 3, 4).permute(1, 2, 0),
        torch.randn(4, 3, dtype=torch.complex128).t(),
        torch.randint(0, 9, (4, 3), dtype=torch.int32).view(torch.uint32).t(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}{tensor.stride()}",
)
def test_dense_strides_come_back(tensor):
    back = through_bytes(tensor)
    assert_same(back, tensor)
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize(
    "tensor", [torch.randn(3).expand(4, 3), torch.randn(6, 6)[::2, 1:]], ids=["expanded", "sliced"]
)
def test_strides_with_gaps_or_overlaps_become_contiguous(tensor):
    back = through_bytes(tensor)
    assert_same(back, tensor)
    assert back.is_contiguous()


def test_conjugate_and_negative_views_are_resolved():
    z = torch.randn(3, dtype=torch.complex64)
    tree = {"z": z, "conj": z.conj(), "minus": z.conj().imag}
    assert tree["minus"].is_neg()
    back = through_bytes(tree)
    assert_same(back, tree)
    assert not back["conj"].is_conj()


class Point(NamedTuple):
    x: int


def a_function():
    """A placeholder for a callback."""


def cycle():
    ring: list[Any] = []
    ring.append(ring)
    return ring


def deep():
    tree: list[Any] = []
    for _ in range(5000):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"callback": [a_function]},
            r"^extra\['callback'\]\[0\]: got function a_function; keep plain values and tensors",
        ),
        ({"m": nn.ReLU()}, r"^extra\['m'\]: got an object of class ReLU"),
        ([Point(1)], r"^extra\[0\]: got an object of class Point"),
        ({1: lambda: 0}, r"^extra\[1\]: got function .*<lambda>"),
        ({"s": {nn.ReLU}}, r"^a key or element of extra\['s'\]: got type ReLU"),
        ({torch.ones(1): 1}, r"^a key or element of extra: got a tensor, which is looked up by identity"),
        (torch.eye(3).to_sparse(), r"^extra: got a tensor of layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), r"^extra: got a meta tensor"),
        (nn.parameter.UninitializedParameter(), r"^extra: got an uninitialized parameter; run one batch"),
        (np.array([None]), r"^extra: got a numpy value of dtype object"),
        (defaultdict(lambda: 0), r"^extra: got a defaultdict of <lambda>, which is not one of int, float"),
        (defaultdict(Counter), r"^extra: got a defaultdict of Counter"),
        (cycle(), r"^extra\[0\]: got a list that contains itself"),
        (deep(), r"got containers nested deeper than 100"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_plain_value_is_refused_by_its_path(tree, message):
    with pytest.raises(CheckpointError, match=message):
        encode(tree, "extra")


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions")
def test_quantized_tensors_are_refused():
    tensor = torch._empty_affine_quantized([2], scale=0.1, zero_point=0, dtype=torch.qint8)
    with pytest.raises(CheckpointError, match=r"^extra: got a quantized tensor"):
        encode(tensor, "extra")


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ({"codec": 2, "value": 1}, "codec version 2; this keepk reads 1"),
        ({"value": 1}, "codec version None"),
        ([1], "codec version None"),
        ({"codec": 1, "value": {"$lambda": "x"}}, r"unknown type tag '\$lambda'"),
        ({"codec": 1, "value": {"$tuple": [1], "more": 2}}, r"unknown type tag '\$tuple'"),
        ({"codec": 1, "value": {"$tensor": "a"}}, "the tensor 'a' is missing"),
        ({"codec": 1, "value": {"$tensor": "t", "offset": 3}}, r"unknown tensor fields \['offset'\]"),
        ({"codec": 1, "value": {"$tensor": "t", "shape": [9], "stride": [9]}}, "cannot be read"),
        ({"codec": 1, "value": {"$dtype": "load"}}, "this torch has no dtype 'load'"),
        ({"codec": 1, "value": {"$set": [[1]]}}, "cannot be read: unhashable"),
        ({"codec": 1, "value": {"$defaultdict": ["eval", []]}}, "cannot be read: 'eval'"),
        ({"codec": 1, "value": {"$array": ["|O", [1], {"$tensor": "t"}]}}, "arrays of dtype object"),
        ({"codec": 1, "value": None}, r"the tree does not use the tensors \['t'\]"),
    ],
    ids=str,
)
def test_the_decoder_is_strict(encoded, message):
    with pytest.raises(CheckpointError, match=message):
        decode(encoded, {"t": torch.zeros(8, dtype=torch.uint8)})
