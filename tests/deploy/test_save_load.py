"""A saved model is two files that record what was cut; loading them into a new model is bit-exact."""

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from functools import partial, reduce
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import keepk
from keepk.cut.record import record_of, was_cut
from keepk.deploy.arch_json import as_text, digest, from_text
from keepk.errors import FileError
from keepk.storage import files
from killing import file_step
from masked import call, leaves
from networks import NETWORKS, WITH_EXACT_UNITS
from saved_models import contents, looks, named, refused, unchanged
from traced_once import traced_network
from untyped import untyped

FILES = ["arch.json", "model.safetensors"]


def built(seed=0, width=12, dtype=torch.float32):
    """A small network with a BatchNorm and tied weights."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 9), nn.Linear(9, 9))
    net.append(nn.Linear(9, 9))
    net[5].weight = net[4].weight
    return net.to(dtype)


def shrunk(seed=0, units=(0, 3, 4)):
    net = built(seed)
    keepk.shrink(net, keepk.trace(net, torch.randn(3, 7)), units)
    return net


def outputs(model, example):
    with torch.no_grad():
        return leaves(call(model.eval(), example))


def same(wanted, got):
    return all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def round_trip(folder, model, example, fresh):
    """Save a model, load it into a new network, and save that again."""
    wanted = outputs(model, example)
    keepk.save(model, folder / "first")
    identities = {name: id(parameter) for name, parameter in fresh.named_parameters()}
    assert keepk.load(fresh, folder / "first") is fresh
    assert same(wanted, outputs(fresh, example))
    assert {name: id(parameter) for name, parameter in fresh.named_parameters()} == identities
    assert str(fresh) == str(model)
    assert [type(module).__name__ for module in fresh.modules()] == [
        type(module).__name__ for module in model.modules()
    ]
    assert record_of(fresh) == record_of(model)
    keepk.save(fresh, folder / "second")
    assert sorted(contents(folder / "first")) == FILES
    assert contents(folder / "first") == contents(folder / "second")


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_comes_back_after_no_shrink_one_and_two(tmp_path, name):
    model, example, graph = traced_network(name)
    round_trip(tmp_path / "0", model, example, NETWORKS[name](seed=7)[0])
    for turn in (1, 2) if name in WITH_EXACT_UNITS else ():  # without exact units nothing would have changed
        keepk.shrink(model, graph, graph.choose(0.4, seed=turn))
        round_trip(tmp_path / str(turn), model, example, NETWORKS[name](seed=7)[0])


@pytest.mark.parametrize(
    "name", ["grouped", "dense_block", "multihead_attention", "lstm", "layer_norm", "tied_embedding"]
)
def test_a_loaded_network_is_shrunk_and_saved_again(tmp_path, name):
    """Cuts after a load are added to the record of the earlier ones."""
    model, example = NETWORKS[name]()
    for turn in range(3):
        graph = keepk.trace(model, example)
        keepk.shrink(model, graph, graph.choose(0.3, seed=turn, lossy=True))
        fresh = NETWORKS[name](seed=turn + 5)[0]
        round_trip(tmp_path / str(turn), model, example, fresh)
        model = fresh


def listed(text):
    """A slow parser of index lists such as '0:3, 5'."""
    return [i for part in text.split(", ") for i in (range(*map(int, part.split(":"))) if ":" in part else [int(part)])]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_indices_in_arch_json_lead_from_the_dense_tensors_to_the_saved_ones(tmp_path, name):
    model, _, graph = traced_network(name)
    dense = {key: value.detach().numpy().copy() for key, value in named(model).items()}
    for turn in (1, 2):
        keepk.shrink(model, graph, graph.choose(0.4, seed=turn))
    keepk.save(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for key, entry in json.loads((tmp_path / "arch.json").read_bytes())["tensors"].items():
        left = dense[key]
        assert [str(left.dtype), list(left.shape)] == [entry["dtype"], entry["dense"]]
        for axis, kept in sorted(entry.get("kept", {}).items()):
            if isinstance(kept, str):
                left = np.take(left, listed(kept), int(axis))
            else:
                left = np.stack([row[listed(columns)] for row, columns in zip(left, kept, strict=True)])
        if np.iscomplexobj(left):  # stored as pairs of real numbers
            left = np.stack([left.real, left.imag], -1)
        assert np.array_equal(left, saved[key].numpy())


def test_arch_json_can_be_read(tmp_path):
    keepk.save(shrunk(), tmp_path)
    lines = (tmp_path / "arch.json").read_text().splitlines()
    arch = json.loads("\n".join(lines))
    assert "keepk.save" in arch["about"]["file"]
    assert arch["modules"][""] == "Sequential"
    assert arch["tensors"]["3.weight"] == {"dtype": "float32", "dense": [9, 12], "kept": {"1": "1:3, 5:12"}}
    assert '        "1": "1:3, 5:12"' in lines
    assert arch["ties"] == {"5.weight": "4.weight"}
    assert arch["attributes"]["0"] == {"out_features": {"dense": 12, "now": 9}}
    assert arch["values"]["sha256"] == sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()


def test_the_values_can_be_read_by_others(tmp_path):
    """They have the names and shapes of the state_dict; a tied tensor is stored once."""
    model = shrunk().to(torch.bfloat16)
    keepk.save(model, tmp_path)
    state, saved = model.state_dict(), load_file(tmp_path / "model.safetensors")
    assert state.keys() - saved.keys() == {"5.weight"}
    assert all(torch.equal(state[name], value) and state[name].dtype == value.dtype for name, value in saved.items())


@given(st.sets(st.integers(0, 40), min_size=1))
def test_runs_of_indices_are_read_back(indices):
    text = as_text(sorted(indices))
    assert from_text(text, 41) == listed(text) == sorted(indices)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", ["dense_block", "grouped", "multihead_attention"])
def test_copies_and_pickles_can_be_saved(tmp_path, copied, name):
    model, _, graph = traced_network(name)
    keepk.shrink(model, graph, graph.choose(0.5, seed=0))
    keepk.save(model, tmp_path / "original")
    twin = copied(model)
    assert record_of(twin) == record_of(model)
    assert any(record_of(twin).values())
    keepk.save(twin, tmp_path / "copy")
    assert contents(tmp_path / "original") == contents(tmp_path / "copy")


def test_ties_dtypes_requires_grad_and_mode_stay(tmp_path):
    model = shrunk().to(torch.bfloat16)
    keepk.save(model, tmp_path)
    fresh = built(1, dtype=torch.bfloat16).train()
    fresh[0].weight.requires_grad_(False)
    keepk.load(fresh, tmp_path)
    assert fresh[5].weight is fresh[4].weight
    assert (fresh.training, fresh[0].weight.requires_grad, fresh[3].weight.requires_grad) == (True, False, True)
    assert fresh[0].weight.dtype == torch.bfloat16
    assert same(model.state_dict().values(), fresh.state_dict().values())


def convolutions(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("units", [[], [0, 5]])
def test_channels_last_stays(tmp_path, units):
    model, example = convolutions(0).to(memory_format=torch.channels_last), torch.randn(2, 3, 9, 9)
    keepk.shrink(model, keepk.trace(model, example), units)
    fresh = convolutions(1)
    round_trip(tmp_path, model, example, fresh)
    assert [p.stride() for p in fresh.parameters()] == [p.stride() for p in model.parameters()]
    assert fresh[3].weight.is_contiguous(memory_format=torch.channels_last)


class Odd(nn.Module):
    """Tensors that safetensors cannot store as they are."""

    seen: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 8), nn.Linear(8, 5)
        self.turned = nn.Parameter(torch.randn(4, 3).t())
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("wide", torch.randn(3, 1).expand(3, 4))
        self.register_buffer("short", torch.randint(0, 9, (3,)).to(torch.uint16))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("number", torch.tensor(float(torch.rand(()))))
        self.register_buffer("seen", self.last.bias.detach()[1:3])

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def test_odd_tensors_come_back(tmp_path):
    torch.manual_seed(0)
    model, fresh, example = Odd(), Odd(), torch.randn(2, 7)
    keepk.shrink(model, keepk.trace(model, example), [1, 2])
    round_trip(tmp_path, model, example, fresh)
    for name, tensor in named(model).items():
        assert torch.equal(tensor, named(fresh)[name])
        assert tensor.dtype == named(fresh)[name].dtype
    assert fresh.turned.stride() == model.turned.stride() == (1, 3)
    assert fresh.seen.data_ptr() == fresh.last.bias.data_ptr() + 4


def test_a_model_on_the_meta_device_has_no_place_for_values(tmp_path):
    model = shrunk()
    keepk.save(model, tmp_path)
    with torch.device("meta"):
        fresh = built()
    shapes = {name: tensor.shape for name, tensor in named(fresh).items()}
    with pytest.raises(FileError, match=r"'0\.weight' is a meta tensor, .*on the CPU, or .*to_empty\(device=\.\.\.\)"):
        keepk.load(fresh, tmp_path)
    assert {name: tensor.shape for name, tensor in named(fresh).items()} == shapes
    with pytest.raises(FileError, match=r"'0\.weight' is a meta tensor.*Materialize"):
        keepk.save(fresh, tmp_path)
    fresh.to_empty(device="cpu")
    fresh[5].weight = fresh[4].weight  # to_empty unties them
    loaded = keepk.load(fresh, tmp_path)
    assert same(outputs(model, torch.ones(3, 7)), outputs(loaded, torch.ones(3, 7)))


class Caching(nn.Module):
    """Creates a buffer in its first forward pass."""

    cache: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 8), nn.Linear(8, 5)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x):
        if len(self.cache) < len(x):
            self.cache = torch.ones(len(x), 1)
        return self.last(torch.relu(self.first(x))) * self.cache[: len(x)]


def test_a_cache_is_left_to_its_model(tmp_path):
    model, example = Caching(), torch.randn(2, 7)
    keepk.shrink(model, keepk.trace(model, example), [1, 2])
    wanted = outputs(model, example)
    keepk.save(model, tmp_path)
    assert same(wanted, outputs(keepk.load(Caching(), tmp_path), example))


def test_the_wrapper_of_torch_compile_is_looked_through(tmp_path):
    model = shrunk()
    keepk.save(model, tmp_path)
    wrapper = nn.Module()
    wrapper._orig_mod = built(1)
    assert keepk.load(wrapper, tmp_path) is wrapper
    assert same(model.state_dict().values(), wrapper.get_submodule("_orig_mod").state_dict().values())


def test_a_loaded_model_trains(tmp_path):
    keepk.save(shrunk(), tmp_path)
    fresh = built(1)
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    with torch.inference_mode():
        keepk.load(fresh, tmp_path)
    before = copy.deepcopy(fresh.state_dict())
    fresh(torch.randn(3, 7)).sum().backward()
    optimizer.step()
    assert fresh[0].weight.grad.shape == (9, 7)
    assert not torch.equal(before["0.weight"], fresh[0].weight)


# Refusals


@pytest.fixture
def folder(tmp_path):
    keepk.save(shrunk(), tmp_path / "model")
    return tmp_path / "model"


def edited(folder, change, rehash=True):
    """Change arch.json and update its hash, so that the change itself must be detected."""
    arch = json.loads((folder / "arch.json").read_bytes())
    change(arch)
    if rehash:
        arch["sha256"] = digest(arch)
    (folder / "arch.json").write_text(json.dumps(arch))


def kept(text):
    return lambda arch: arch["tensors"]["3.weight"]["kept"].update({"1": text})


def dense_hash(arch):
    arch["dense_sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (kept("1:3, 5:13"), r"'5:13' is not a rising run of indices of an axis of 12"),
        (kept("5:12, 1:3"), r"'1:3' is not a rising run"),
        (kept("1:4, 5:12"), r"'3\.weight' has shape \(9, 9\), but arch\.json leaves \(9, 10\) of it"),
        (kept("three"), r"is not laid out as keepk\.save writes it"),
        (kept(["0:9"] * 8), r"8 rows of indices for 9 rows"),
        (kept(["0:9"] * 8 + ["0:8"]), r"is not laid out as keepk\.save writes it"),
        (dense_hash, r"dense_sha256 is not the hash of the modules, tensors and ties"),
        (lambda arch: arch.pop("tensors"), r"not laid out as keepk\.save writes it \('tensors'\)"),
        (lambda arch: arch.pop("values"), r"it names no values"),
        (lambda arch: arch["values"].update(sha256="../x"), r"it names no values"),
        (lambda arch: arch.update(version=3), r"has version 3, this keepk reads version 1 and 2\. Read .* keepk 0"),
        (lambda arch: arch.update(format="other"), r"is not a 'keepk\.model'"),
        (
            lambda arch: arch["attributes"]["0"]["out_features"].update(dense=13),
            r"out_features of module '0' was 13 and is 12",
        ),
        (
            lambda arch: arch["selections"].update({"1": "0:8"}),
            r"module '1' reads 8 channels, but its tensors have 9",
        ),
        (lambda arch: arch["headwise"].append("0"), r"module '0' is not an attention"),
    ],
)
def test_a_forged_arch_json_is_refused(folder, change, match):
    edited(folder, change)
    refused(folder, built(1), match)


def setting(path, key, dense, now):
    return lambda arch: arch["attributes"].setdefault(path, {}).update({key: {"dense": dense, "now": now}})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (setting("1", "eps", 1e-5, 0.5), r"attribute 'eps' of module '1' is not a size: got 1e-05"),
        (setting("1", "padding_mode", "zeros", "circular"), r"'padding_mode' of module '1' is not a size: got 'zeros'"),
        (setting("1", "_forward_hooks", {}, {}), r"'_forward_hooks' of module '1' is not the name of a size"),
        (setting("1", "training", True, False), r"'training' of module '1' is not a size: got True"),
        (setting("0", "forward", 1, 1), r"forward of module '0' was 1 and is a method"),
        (setting("0", "weight.0", 9, 9), r"weight of module '0' was 9 and is a Tensor"),
        (setting("0", "__class__", 1, 1), r"'__class__' of module '0' is not the name of a size"),
        (setting("0", "out_features", 12, 0), r"got 0 instead of an int from 1 to 12"),
        (setting("0", "out_features", 12, 13), r"got 13 instead of an int from 1 to 12"),
        (setting("0", "out_features", 12, 9.0), r"got 9\.0 instead of an int"),
        (setting("0", "out_features", 12, True), r"got True instead of an int"),
        (setting("0", "out_features", 12, 8), r"out_features of module '0' would be 8, but its tensors leave 9"),
        (setting("0", "in_features", 7, 6), r"in_features of module '0' would be 6, but its tensors leave 7"),
        (lambda arch: arch["attributes"].pop("3"), r"in_features of module '3' would be 12, but its tensors leave 9"),
        (setting("9", "width", 12, 9), r"width of module '9' was 12 and is None"),
        (
            lambda arch: arch["selections"].update({"1": "0:2147483648"}),
            r"not a rising run of indices of an axis of 12",
        ),
        (lambda arch: arch["selections"].update({"0": "0:9"}), r"module '0' is not a BatchNorm"),
        (kept("0:2147483648"), r"not a rising run of indices of an axis of 12"),
        (lambda arch: arch["tensors"]["3.weight"]["kept"].update({"-1": "0:9"}), r"'-1' is not an axis of a tensor"),
        (lambda arch: arch["tensors"]["3.weight"]["kept"].update({"01": "0:9"}), r"'01' is not an axis of a tensor"),
        (lambda arch: arch["tensors"]["3.weight"].update(stride=[2**40, 1]), r"strides .* do not lay out a tensor"),
        (lambda arch: arch["tensors"]["3.weight"].update(stride=[0, 0]), r"strides .* do not lay out a tensor"),
        (lambda arch: arch["tensors"]["3.weight"].update(code="x"), r"a tensor has no 'code'"),
        (lambda arch: arch["headwise"].append([]), r"not laid out as keepk\.save writes it"),
        (lambda arch: arch["values"].update(size="12"), r"size '12' and sha256 .*, which is impossible"),
        (
            lambda arch: arch["values"].update(size=10**5000),
            r"is not valid JSON|which is impossible|has [\d,]+ bytes",
        ),
        (
            lambda arch: arch.update(certificate={"a": {"kind": "weights", "total": 1, "asked": 1, "kept": 1}}),
            r"not laid out as keepk\.save writes it \('select'\)",
        ),
    ],
)
def test_a_hostile_arch_json_sets_nothing(folder, change, match):
    sys.set_int_max_str_digits(0)
    try:
        edited(folder, change)
    finally:
        sys.set_int_max_str_digits(4300)
    refused(folder, built(1), match)


def with_dense_hash(arch):
    """A document whose hash of the dense model is recomputed as well, where possible."""
    tensors = {name: [it["dtype"], it["dense"]] for name, it in arch["tensors"].items() if it.get("persistent", True)}
    text = json.dumps([arch["modules"], tensors, arch["ties"]], sort_keys=True)
    arch["dense_sha256"] = sha256(text.encode("ascii")).hexdigest()


def test_two_kilobytes_do_not_ask_for_gigabytes(folder):
    """An axis that the given model does not have is refused before its indices are listed."""

    def change(arch):
        arch["tensors"]["3.weight"].update(dense=[9, 2**31], kept={"1": f"0:{2**31}"})
        with_dense_hash(arch)

    edited(folder, change)
    tracemalloc.start()
    try:
        refused(folder, built(1), r"tensor '3\.weight' was float32 \(9, 2147483648\) and is float32 \(9, 12\)")
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


class Numbers(nn.Module):
    """A custom module with a size among its attributes, and a torch layer with numbers that are not sizes."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 12, 3, stride=2, padding=1), nn.Linear(12, 5)
        self.width, self.depth = 12, 12
        self.sizes = (12, 7)

    def forward(self, x):
        h = torch.relu(self.first(x)).mean((2, 3))
        return self.last(h.view(-1, self.width))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (setting("first", "stride.0", 2, 1), r"stride of module 'first' \(Conv2d\) is not a size"),
        (setting("first", "padding.1", 1, 1), r"padding of module 'first' \(Conv2d\) is not a size"),
        (setting("first", "kernel_size.0", 3, 1), r"kernel_size of module 'first' \(Conv2d\) is not a size"),
        (setting("", "depth", 12, 2), r"depth of module '' would change from 12 to 2, but no axis was cut in that way"),
        (setting("", "sizes.1", 7, 2), r"sizes of module '' would change from 7 to 2"),
        (setting("", "sizes.2", 7, 6), r"sizes of module '' was 7 and is None"),
        (setting("", "sizes.-1", 7, 6), r"'sizes\.-1' of module '' is not the name of a size"),
        (setting("", "width", 12, 8), r"width of module '' would change from 12 to 8, but no axis was cut in that way"),
    ],
)
def test_numbers_that_do_not_follow_the_cut_stay(tmp_path, change, match):
    model, example = Numbers(), torch.randn(2, 3, 8, 8)
    keepk.shrink(model, keepk.trace(model, example), [0, 4, 5])
    keepk.save(model, tmp_path)
    fresh = keepk.load(Numbers(), tmp_path)
    assert (fresh.width, fresh.depth) == (9, 12)
    assert same(outputs(model, example), outputs(fresh, example))
    edited(tmp_path, change)
    refused(tmp_path, Numbers(), match)


ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2,
    9,
    2**31,
    2**63,
    1.5,
    1e308,
    "",
    "0",
    "0:3",
    "0:2147483648",
    "eps",
    [],
    {},
    [0],
    ["0:2"],
]
HOSTILE = {"linear": None, "compact": None} | dict.fromkeys(
    ["grouped", "dense_block", "multihead_attention", "lstm", "layer_norm", "masked_heads", "split_sizes"]
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """Folders of saved models, with their documents and constructors."""
    found = {}
    for name in HOSTILE:
        if name in ("linear", "compact"):
            model, build = shrunk(), built
            model[3].weight.detach()[:, 1:] = 0
        else:
            model, _, graph = traced_network(name)
            keepk.shrink(model, graph, graph.choose(0.4, seed=1, lossy=True))
            build = partial(lambda name: NETWORKS[name](seed=1)[0], name)
        folder = tmp_path_factory.mktemp(name)
        keepk.save(model, folder, compact=name == "compact")
        found[name] = folder, json.loads((folder / "arch.json").read_bytes()), build
    return found


def places(tree, path=()):
    """The paths of all values in a document."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield (*path, key)
        yield from places(tree[key], (*path, key))


@st.composite
def mutations(draw):
    kind = draw(st.sampled_from(["set", "nudge", "delete", "copy", "attribute"]))
    return kind, draw(st.integers(0, 10**6)), draw(st.integers(0, 10**6)), draw(st.sampled_from(ODD))


def mutate(arch, build, kind, first, second, value):
    """Make one random change to a document, possibly without an effect."""
    if kind == "attribute":
        modules = dict(build().named_modules())
        path = sorted(modules)[first % len(modules)]
        attributes = sorted(vars(modules[path]))
        key = attributes[second % len(attributes)]
        dense = vars(modules[path])[key]
        plain = dense if isinstance(dense, int | float | str) else value
        arch["attributes"].setdefault(path, {})[key] = {"dense": plain, "now": value}
        return
    changeable = [path for path in places(arch) if path[0] not in ("about", "format", "version", "sha256")]
    *above, key = changeable[first % len(changeable)]
    owner = reduce(lambda tree, step: tree[step], above, arch)
    if kind == "set":
        owner[key] = copy.deepcopy(value)
    elif kind == "nudge" and type(owner[key]) is int:
        owner[key] += second % 5 - 2
    elif kind == "nudge" and isinstance(owner[key], str):
        owner[key] = owner[key].replace(str(second % 10), str(second // 10 % 10), 1)
    elif kind == "delete":
        del owner[key]
    elif kind == "copy":
        source = changeable[second % len(changeable)]
        owner[key] = copy.deepcopy(reduce(lambda tree, step: tree[step], source, arch))


def as_built(module):
    """The shapes of a torch layer that is built from this layer's attributes; None if it is not a torch layer."""
    bias = getattr(module, "bias", None) is not None
    twin: nn.Module
    with torch.device("meta"):
        if isinstance(module, nn.Linear):
            twin = nn.Linear(module.in_features, module.out_features, bias)
        elif isinstance(module, nn.Conv2d):
            kernel = cast("tuple[int, int]", module.kernel_size)
            twin = nn.Conv2d(module.in_channels, module.out_channels, kernel, groups=module.groups, bias=bias)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            twin = nn.BatchNorm2d(module.num_features, affine=module.affine)
        elif isinstance(module, nn.LayerNorm):
            twin = nn.LayerNorm(module.normalized_shape, bias=bias)
        elif isinstance(module, nn.LSTM):
            twin = nn.LSTM(module.input_size, module.hidden_size, module.num_layers, bidirectional=module.bidirectional)
        else:
            return None
    return {name: tensor.shape for name, tensor in twin.state_dict().items()}


def options(model):
    """All attributes of the modules that are neither tensors nor sizes."""
    return {
        path: {key: value for key, value in vars(module).items() if not isinstance(value, int | tuple | list | dict)}
        for path, module in model.named_modules()
    }


@given(
    name=st.sampled_from(sorted(HOSTILE)), changes=st.lists(mutations(), min_size=1, max_size=2), dense=st.booleans()
)
@settings(max_examples=int(os.environ.get("KEEPK_FUZZ", "300")), deadline=None)
def test_a_mutated_arch_json_is_refused_or_gives_a_model_that_agrees_with_itself(hostile, name, changes, dense):
    folder, document, build = hostile[name]
    arch = copy.deepcopy(document)
    with suppress(LookupError, TypeError, AttributeError):  # the first change may have removed the second one's path
        for change in changes:
            mutate(arch, build, *change)
        if dense:
            with_dense_hash(arch)
    arch["sha256"] = digest(arch)
    (folder / "arch.json").write_text(json.dumps(arch))
    fresh = build()
    before = options(fresh)
    try:
        keepk.load(fresh, folder)
    except FileError:
        assert not was_cut(fresh)
        return
    for path, module in fresh.named_modules():
        if (shapes := as_built(module)) is not None:
            own = {key: value.shape for key, value in module.state_dict().items() if key in shapes}
            assert own == shapes, path
    after = options(fresh)
    for path, values in before.items():
        assert {key: after[path][key] for key in values} == values, path


@pytest.mark.parametrize("change", [kept("0:9"), dense_hash, lambda arch: arch.update(sha256="0" * 64)])
def test_an_edited_arch_json_is_refused(folder, change):
    edited(folder, change, rehash=False)
    refused(folder, built(1), r"arch\.json: was edited or damaged after it was written: its sha256 differs")


def test_another_layout_of_the_same_json_is_fine(folder):
    edited(folder, lambda _: None, rehash=False)
    assert same(keepk.load(built(1), folder).state_dict().values(), shrunk().state_dict().values())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    keepk.save(shrunk(), folder)
    return folder


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=50)
def test_no_flipped_bit_is_read(whole, place, bit):
    for name, data in contents(whole).items():
        flipped = bytearray(data)
        flipped[place % len(data)] ^= 1 << bit
        (whole / name).write_bytes(flipped)
        try:
            loaded = keepk.load(built(1), whole)
        except FileError:
            pass
        else:  # whitespace may change
            assert name == "arch.json"
            assert same(loaded.state_dict().values(), shrunk().state_dict().values())
        (whole / name).write_bytes(data)


def test_files_cut_short_or_missing_are_refused(folder, tmp_path):
    for name, match in [
        ("arch.json", r"arch\.json: is not valid JSON: the file is truncated or was edited"),
        ("model.safetensors", r"model\.safetensors: has [\d,]+ bytes, arch\.json says [\d,]+"),
    ]:
        data = (folder / name).read_bytes()
        for end in (0, 1, len(data) // 2, len(data) - 2):
            (folder / name).write_bytes(data[:end])
            refused(folder, built(1), match)
        (folder / name).write_bytes(data)
    (folder / "model.safetensors").write_bytes(bytes(len((folder / "model.safetensors").read_bytes())))
    refused(folder, built(1), r"its sha256 is not the one in arch\.json")
    (folder / "model.safetensors").unlink()
    refused(folder, built(1), r"model\.safetensors: cannot be read .*, but arch\.json names it")
    (folder / "arch.json").write_bytes(b"\xff not JSON")
    refused(folder, built(1), r"is not valid JSON")
    (folder / "arch.json").write_bytes(b"[" * 100_000)
    refused(folder, built(1), r"is not valid JSON")
    (folder / "arch.json").write_bytes(b"[1]")
    refused(folder, built(1), r"is not a 'keepk\.model'\. Pass a folder that keepk\.save wrote")
    refused(tmp_path / "nowhere", built(1), r"nowhere/arch\.json: there is no saved model to read")


class Other(nn.Sequential):
    pass


def untied():
    net = built()
    net[5].weight = nn.Parameter(net[5].weight.detach().clone())
    return net


def renamed():
    net = built()
    net.named = nn.Linear(2, 2)
    return net


def resized():
    net = built()
    net[3].in_features = 11
    return net


def lazy():
    net = built()
    net[0] = nn.LazyLinear(12)
    return net


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (
            lambda: Other(*built()),
            r"given Other is not the dense .*: the model was Sequential and is Other\. Build it with",
        ),
        (lambda: nn.Linear(2, 2), r"the model was Sequential and is Linear; .* \(and \d+ more\)"),
        (lambda: built(width=13), r"tensor '0\.weight' was float32 \(12, 7\) and is float32 \(13, 7\); .*more"),
        (lambda: built(dtype=torch.float64), r"'0\.weight' was float32 \(12, 7\) and is float64 \(12, 7\)"),
        (
            untied,
            r"'5\.weight' was not there and is float32 \(9, 9\); tie of '5\.weight' was 4\.weight and is not there",
        ),
        (renamed, r"module 'named' was not there and is Linear"),
        (resized, r"in_features of module '3' was 12 and is 11"),
        (shrunk, r"given Sequential was already shrunk\. Pass a freshly built one"),
    ],
)
def test_another_model_is_refused_with_what_differs(folder, build, match):
    refused(folder, build(), rf"{re.escape(str(folder))}: .*{match}")


def test_arguments_in_the_wrong_order_are_refused_with_the_right_one(folder, tmp_path):
    no_model = "got str as the model. Pass a torch.nn.Module."
    for verb, arguments, words in (
        (keepk.load, (str(folder), str(folder)), f"load: {no_model} The order is model, path."),
        (keepk.save, (str(tmp_path), built()), f"save: {no_model} The order is model, path."),
        (keepk.load, (built(), 3), "load: got int as the path. The order is model, path."),
        (keepk.load, (built(), built()), "load: got Sequential as the path. The order is model, path."),
        (keepk.save, (built(), built()), "save: got Sequential as the path. The order is model, path."),
    ):
        with pytest.raises(FileError, match=f"^{re.escape(words)}$"):
            verb(*arguments)


def test_load_takes_the_path_first_as_it_did_with_a_warning(folder):
    wanted = [*shrunk().state_dict().values()]
    arguments: tuple[Any, ...]
    for arguments, options in (
        ((str(folder), built(1)), {}),
        ((folder, built(1)), {"example": None}),
        ((folder,), {"model": built(1)}),
    ):
        words = r"^keepk\.load\(path, model\) is deprecated: call keepk\.load\(model, path\)"
        with pytest.warns(DeprecationWarning, match=words) as caught:
            loaded = keepk.load(*arguments, **options)
        assert caught[0].filename == __file__
        assert same(loaded.state_dict().values(), wanted)
    for arguments, options in (
        ((), {"path": folder, "model": built(1)}),
        ((built(1),), {"path": folder}),
    ):
        assert same(keepk.load(*arguments, **options).state_dict().values(), wanted)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'path'"):
        untyped(keepk.load)(built(1))


class BytesPath:
    def __fspath__(self):
        return b"net"


@pytest.mark.parametrize("path", ["", "net\0", "net\ud800", BytesPath()], ids=["empty", "nul", "surrogate", "bytes"])
def test_a_path_that_no_file_can_have_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    words = f"got {os.fspath(path)!r} as the path, which no file can have. Pass a name, such as 'out/net'."
    with pytest.raises(FileError, match=f"^save: {re.escape(words)}$"):
        keepk.save(built(), path)
    with pytest.raises(FileError, match=f"^load: {re.escape(words)}$"):
        keepk.load(built(), path)
    assert not [*tmp_path.iterdir()]


def test_what_is_no_plain_module_is_refused(folder, tmp_path):
    with pytest.raises(FileError, match=r"load: got dict as the model\. Pass a torch\.nn\.Module"):
        keepk.load(untyped({}), folder)
    with pytest.raises(FileError, match=r"save: got dict as the model"):
        keepk.save(untyped({}), tmp_path / "new")
    with pytest.raises(FileError, match=r"^load: got the class Linear\. Pass Linear\(\), a model\.$"):
        keepk.load(untyped(nn.Linear), folder)
    with pytest.raises(FileError, match=r"'0\.weight' is an uninitialized parameter; run one batch first"):
        keepk.load(lazy(), folder)
    sparse = built()
    sparse.register_buffer("few", torch.eye(3).to_sparse())
    with pytest.raises(FileError, match=r"'few' is a tensor of layout torch\.sparse_coo"):
        keepk.save(sparse, tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Remembering(nn.Linear):
    def get_extra_state(self):
        return {1: object()}


def test_what_would_be_lost_is_refused(tmp_path):
    with pytest.raises(FileError, match=r"module '0' \(Remembering\) has extra state"):
        keepk.save(nn.Sequential(Remembering(2, 2)), tmp_path / "new")
    with pytest.raises(FileError, match=r"its submodule '0' was shrunk separately.*get_submodule\('0'\)"):
        keepk.save(nn.Sequential(shrunk()), tmp_path / "new")
    model = shrunk()
    model[3] = nn.Linear(9, 10)
    with pytest.raises(FileError, match=r"'3\.weight' has shape \(10, 9\), but was cut to \(9, 9\): it was replaced"):
        keepk.save(model, tmp_path / "new")
    model = shrunk()
    model[0].out_features = 5
    with pytest.raises(FileError, match=r"module '0': out_features is 5, but was set to 9 when the model was shrunk"):
        keepk.save(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


class Attending(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.heads, self.out = nn.MultiheadAttention(16, 4, batch_first=True, **options), nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.heads(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("options", [{}, {"bias": False}])
@pytest.mark.parametrize("heads", [None, 1, 4])
def test_heads_that_the_tensors_do_not_leave_are_refused(tmp_path, heads, options):
    model = Attending(**options).eval()
    graph = keepk.trace(model, torch.randn(2, 5, 16))
    keepk.shrink(model, graph, graph.choose(0.5))
    assert model.heads.num_heads == 2
    keepk.save(model, tmp_path)
    keepk.load(Attending(**options), tmp_path)
    document = json.loads((tmp_path / "arch.json").read_text())
    document["attributes"]["heads"]["num_heads"]["now"] = heads
    if heads is None:
        del document["attributes"]["heads"]["num_heads"]
    document["sha256"] = digest(document)
    (tmp_path / "arch.json").write_text(json.dumps(document))
    with pytest.raises(
        FileError, match=rf"num_heads of module 'heads' would (be {heads or 4}, but its tensors leave 2|change)"
    ):
        keepk.load(Attending(**options), tmp_path)


class Packing(nn.Module):
    """Adds a tensor that is neither a parameter nor a buffer to its state_dict, as quantised modules do."""

    def __init__(self):
        super().__init__()
        self.scale = torch.randn(4)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "scale"] = self.scale
        destination[prefix + "version"] = 3


def test_state_that_is_neither_parameter_nor_buffer_is_refused(tmp_path):
    folder = tmp_path / "new"
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Packing()))
    words = (
        r"module '1\.0' \(Packing\) keeps state .* would be lost: '1\.0\.scale', '1\.0\.version'\. Keep it in buffers"
    )
    with pytest.raises(FileError, match=words):
        keepk.save(model, folder)
    keepk.save(nn.Linear(4, 4), folder)
    with pytest.raises(FileError, match=r"module '' \(Packing\) keeps state"):
        keepk.load(Packing(), folder)

    hooked = nn.Sequential(nn.Linear(4, 4))
    hooked[0].register_state_dict_post_hook(lambda _, state, prefix, __: state.update({prefix + "seen": 7}))
    with pytest.raises(FileError, match=r"module '0' \(Linear\) keeps state .*'0\.seen'"):
        keepk.save(hooked, folder)


@pytest.mark.filterwarnings("ignore:.*quantization:DeprecationWarning", "ignore::UserWarning")
def test_a_dynamically_quantised_model_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with pytest.raises(FileError, match=r"module '0' \(Linear\) .*'0\.scale'.*quantise it after keepk\.load"):
        keepk.save(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_hook_that_renames_what_is_saved_loses_nothing(tmp_path):
    def renamed(_module, state, prefix, _metadata):
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"outer.{key}"] = state.pop(key)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.register_state_dict_post_hook(renamed)
    keepk.save(model, tmp_path)
    loaded = keepk.load(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), tmp_path)
    assert torch.equal(loaded.get_parameter("0.weight"), model.get_parameter("0.weight"))


class Stubborn(nn.Linear):
    """Refuses a new size on demand."""

    stubborn = False

    def __setattr__(self, name, value):
        if self.stubborn and name == "in_features":
            raise RuntimeError("no")
        super().__setattr__(name, value)


def test_a_replay_that_fails_half_way_is_taken_back(tmp_path, monkeypatch):
    def build():
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), Stubborn(6, 3))

    model, fresh = build(), build()
    keepk.shrink(model, keepk.trace(model, torch.randn(2, 4)), [0])
    keepk.save(model, tmp_path)
    monkeypatch.setattr(Stubborn, "stubborn", True)
    before = looks(fresh)
    with pytest.raises(RuntimeError, match="no"):
        keepk.load(fresh, tmp_path)
    unchanged(fresh, before)
    monkeypatch.setattr(Stubborn, "stubborn", False)
    assert same(keepk.load(fresh, tmp_path).state_dict().values(), model.state_dict().values())


# Writing


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FileError, match=r"file.*: cannot be written .* Its previous contents are unchanged"):
            keepk.save(built(), path)
    assert (tmp_path / "file").read_text() == "mine"
    for name in FILES:
        blocked = tmp_path / f"blocked by {name}"
        (blocked / name).mkdir(parents=True)
        with pytest.raises(FileError, match="cannot be written"):
            keepk.save(built(), blocked)
        assert [path.name for path in blocked.iterdir()] == [name]


def test_files_of_others_stay_and_leftovers_of_kills_go(folder):
    for name in ("notes.txt", f"model-{'0' * 64}.safetensors", f"arch-{'0' * 32}.tmp", f"model-{'0' * 32}.tmp"):
        (folder / name).write_bytes(b"left")
    keepk.save(shrunk(1), folder)
    assert sorted(contents(folder)) == [*FILES, "notes.txt"]


def failing(monkeypatch, name, turn, error):
    """Make the n-th call of a function of the operating system fail."""
    calls, real = [], getattr(os, name)

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == turn:
            raise error
        return real(*arguments)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupt"]
)
@pytest.mark.parametrize(("name", "turn"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("replace", 1), ("replace", 2)])
def test_a_save_that_fails_before_the_commit_changes_nothing(folder, monkeypatch, name, turn, error):
    before = contents(folder)
    with monkeypatch.context() as patch:
        failing(patch, name, turn, error)
        with pytest.raises(FileError if isinstance(error, OSError) else KeyboardInterrupt):
            keepk.save(shrunk(1, [5]), folder)
    assert contents(folder) == before


@pytest.mark.parametrize(("name", "turn"), [("fsync", 4), ("replace", 3), ("fsync", 5)])
def test_a_save_that_fails_after_the_commit_says_that_the_new_model_is_there(folder, monkeypatch, name, turn):
    with monkeypatch.context() as patch:
        failing(patch, name, turn, OSError(5, "Input/output error"))
        with pytest.raises(FileError, match=r"the new model is there and keepk\.load reads it"):
            keepk.save(shrunk(1, [5]), folder)
    assert same(keepk.load(built(), folder).state_dict().values(), shrunk(1, [5]).state_dict().values())
    with monkeypatch.context() as patch:  # a failure now must not delete what the first save wrote
        failing(patch, "replace", 2, OSError(5, "Input/output error"))
        with pytest.raises(FileError, match="Its previous contents are unchanged"):
            keepk.save(shrunk(1, [5]), folder)
    assert same(keepk.load(built(), folder).state_dict().values(), shrunk(1, [5]).state_dict().values())
    keepk.save(shrunk(1, [5]), folder)
    assert sorted(contents(folder)) == FILES


def job(folder, kind, seconds=300):
    if not hasattr(os, "fork"):
        pytest.skip("the saves are forked")
    script = Path(__file__).parents[1].joinpath("support", "save_job.py")
    command = [sys.executable, str(script), str(folder), kind]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    return job(tmp_path_factory.mktemp("killed"), "kills")


@pytest.mark.xdist_group("sweeps")  # run the fixture in one process only
@pytest.mark.parametrize("old", [0, 1], ids=["first save", "next save"])
def test_a_save_killed_at_any_file_step_leaves_the_old_or_the_new_model(sweeps, old):
    found, files = sweeps[old]["found"], sweeps[old]["files"]
    assert found == sorted(found)
    assert set(found) == {old, old + 1}
    assert len(found) >= 20
    assert all(names == FILES for names in files)


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_processes_that_save_into_one_folder_leave_one_whole_model(tmp_path, locks):
    """Real processes are killed at random moments; a process that reads meanwhile always finds a complete model."""
    for what, report in job(tmp_path, locks).items():
        assert report["same"] == [0, 0, 0, 0, 3], what
        assert set(report["found"]) <= {1, 2, 3}, what
        assert report["killed"] >= 1, what
        if locks == "locks":
            assert len(report["files"]) == 2, what


def at_step(number, work):
    """Run some work at the n-th file-system step of the code that follows. The result says whether it was reached."""
    left, ran = number, list[Any]()

    def count(*call):
        nonlocal left
        left -= file_step(*call)
        if left == 0 and not ran:
            ran.append(True)
            sys.setprofile(None)
            work()

    sys.setprofile(count)
    return ran


def test_without_locks_a_save_between_any_two_steps_of_another_is_harmless(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "try_lock", lambda _: None)
    folder, steps = tmp_path / "model", 0
    old, first, second = shrunk(), shrunk(1, (0,)), shrunk(2, (1, 2))
    states = [first.state_dict(), second.state_dict()]
    while True:
        keepk.save(old, folder)
        ran = at_step(steps + 1, lambda: keepk.save(second, folder))
        try:
            keepk.save(first, folder)
        finally:
            sys.setprofile(None)
        found = keepk.load(built(), folder).state_dict()
        assert any(
            same(state.values(), found.values()) for state in states if found["0.bias"].shape == state["0.bias"].shape
        )
        assert same(load_file(folder / "model.safetensors").values(), load_file(one_of(folder)).values())
        if not ran:
            break
        steps += 1
    assert steps >= 20


def one_of(folder):
    """The file that arch.json names."""
    return folder / json.loads((folder / "arch.json").read_bytes())["values"]["file"]


def test_without_locks_only_old_leftovers_are_deleted(folder, monkeypatch):
    monkeypatch.setattr(files, "try_lock", lambda _: None)
    fresh, old = f"model-{'0' * 32}.tmp", f"arch-{'0' * 32}.tmp"
    for name in (fresh, old):
        (folder / name).write_bytes(b"left")
    day_before = (folder / fresh).stat().st_mtime - 2 * files.LEFTOVER_AGE
    os.utime(folder / old, (day_before, day_before))
    for seed in (1, 2):
        keepk.save(shrunk(seed), folder)
        assert sorted(contents(folder)) == sorted([*FILES, fresh, one_of(folder).name])
        assert same(keepk.load(built(), folder).state_dict().values(), shrunk(seed).state_dict().values())
    monkeypatch.undo()
    keepk.save(shrunk(3), folder)
    assert sorted(contents(folder)) == FILES


def test_a_file_system_without_links_gets_copies(folder, monkeypatch):
    monkeypatch.setattr(files, "try_lock", lambda _: None)
    failing(monkeypatch, "link", 1, OSError(95, "Operation not supported"))
    keepk.save(shrunk(1), folder)
    assert one_of(folder).read_bytes() == (folder / "model.safetensors").read_bytes()
    assert same(keepk.load(built(), folder).state_dict().values(), shrunk(1).state_dict().values())


def test_a_process_that_stands_still_is_not_waited_for_forever(folder, monkeypatch):
    before = contents(folder)
    monkeypatch.setattr(files, "PATIENCE", 0.2)
    with (folder / files.LOCK).open("ab") as other:
        assert files.try_lock(other)
        with pytest.raises(
            FileError, match=r"another process holds .*lock and has written nothing for .* are unchanged"
        ):
            keepk.save(shrunk(1), folder)
    assert contents(folder) == before | {files.LOCK: b""}
    keepk.save(shrunk(1), folder)  # a lock left by a killed process
    assert sorted(contents(folder)) == FILES


def test_windows_has_locks_of_its_own(folder, monkeypatch):
    """Tested without Windows: its locking calls are replaced by flock."""
    fcntl = pytest.importorskip("fcntl")
    calls = []

    def locking(number, mode, count):
        calls.append((mode, count))
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    keepk.save(shrunk(1), folder)
    assert calls == [(2, 1)]
    assert sorted(contents(folder)) == FILES
    monkeypatch.setitem(sys.modules, "msvcrt", None)
    with (folder / "file").open("ab") as file:
        assert files.try_lock(file) is None


def test_a_part_of_a_model_that_was_shrunk_is_refused(tmp_path):
    """It would be saved as a dense model of sizes that its constructor does not build."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3))
    graph = keepk.trace(model, torch.zeros(2, 4))
    keepk.shrink(model, graph, [0, 1])
    with pytest.raises(FileError, match=r"module '0': was cut as a part of a larger model"):
        keepk.save(model[0], tmp_path / "part")
    assert not (tmp_path / "part").exists()
    keepk.save(model, tmp_path / "whole")
    dense = nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), nn.Linear(6, 3))
    assert keepk.load(dense, tmp_path / "whole").get_submodule("0.0").out_features == 4


def test_a_parametrization_that_is_gone_is_refused(tmp_path):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3))
    keepk.shrink(model, keepk.trace(model, torch.zeros(2, 4)), [0, 1])
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    with pytest.raises(FileError, match=r"module '0': its parametrization of 'weight' was removed after"):
        keepk.save(model, tmp_path / "model")


def test_a_shrink_that_was_taken_back_leaves_no_mark(monkeypatch, tmp_path):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    graph = keepk.trace(model, torch.zeros(2, 4))
    monkeypatch.setattr(type(graph), "removed", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        keepk.shrink(model, graph, [0, 1])
    keepk.save(nn.Sequential(model), tmp_path / "larger")  # a part of it would be refused
    assert not was_cut(model)
