"""Compact files: tensors with many zeros are stored as values and places, and every bit of them comes back."""

import json
import os
import tracemalloc
from hashlib import sha256

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import keepk
from keepk.deploy.arch_json import digest
from keepk.errors import FileError
from keepk.storage.sparse import as_half, compacted, expanded
from networks import NETWORKS
from saved_models import contents, looks, named, refused, unchanged
from untyped import untyped

INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
INTEGERS |= {torch.float64: torch.int64}


def bits(tensor):
    return tensor.detach().contiguous().view(INTEGERS[tensor.dtype])


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


# Parts of single tensors


def slow_parts(flat, form, largest=255):
    """The parts, one entry after the other."""
    values, gaps, mask, zeros = [], [], [0] * -(-len(flat) // 8), 0
    for place, pattern in enumerate(bits(flat).tolist()):
        if pattern == 0:
            zeros += 1
            continue
        values.append(place)
        while zeros >= largest:
            gaps.append(largest)
            zeros -= largest
        gaps.append(zeros)
        zeros = 0
        mask[place // 8] |= 1 << place % 8
    places = gaps if form == "gaps" else mask
    return {"values": flat[values], form: torch.tensor(places, dtype=torch.uint16 if largest > 255 else torch.uint8)}


def forms(flat):
    return [slow_parts(flat, "gaps"), slow_parts(flat, "gaps", 65_535), slow_parts(flat, "bitmask")]


def nbytes(parts):
    return sum(part.nbytes for part in parts.values())


def equal_parts(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(*(bits_of(it[name]) for it in (one, other)))
        for name in one
    )


def bits_of(part):
    return bits(part) if part.is_floating_point() else part.to(torch.int64)


@st.composite
def sparse_tensors(draw, largest=3000):
    size, density = draw(st.integers(0, largest)), draw(st.sampled_from([0, 0.001, 0.003, 0.02, 0.1, 0.13, 0.5, 1]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    flat = torch.randn(size, generator=generator).to(draw(st.sampled_from(list(INTEGERS))))
    flat[torch.rand(size, generator=generator) >= density] = 0
    odd = draw(st.sampled_from([-0.0, float("nan"), float("inf"), 1e-42]))
    if size:
        flat[draw(st.integers(0, size - 1))] = odd
    return flat


@given(sparse_tensors())
@settings(deadline=None)
def test_every_bit_of_a_tensor_comes_back_from_the_smallest_form(flat):
    parts = compacted(flat)
    assert same_bits(expanded(parts, flat.dtype, len(flat)), flat)
    assert any(equal_parts(parts, form) for form in forms(flat))
    assert nbytes(parts) == min(map(nbytes, forms(flat)))


@given(sparse_tensors(largest=400))
@settings(deadline=None, max_examples=50)
def test_all_forms_of_a_tensor_can_be_read(flat):
    for form in forms(flat):
        assert same_bits(expanded(form, flat.dtype, len(flat)), flat)


@pytest.mark.parametrize("last", [254, 255, 256, 509, 510, 65_534, 65_535, 65_536, 200_000])
def test_long_gaps(last):
    flat = torch.zeros(last + 4)
    flat[0] = flat[last + 1] = 1.0
    for parts in (compacted(flat), *forms(flat)):
        assert same_bits(expanded(parts, flat.dtype, len(flat)), flat)


@st.composite
def damaged_parts(draw):
    """Parts of a tensor with random damage: bytes flipped, entries removed or added, another size or dtype."""
    flat = draw(sparse_tensors(largest=200))
    parts = dict(draw(st.sampled_from(forms(flat))))
    size = len(flat) + draw(st.sampled_from([0, 0, 0, -1, 1, -8, 8, 200]))
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(parts)))
        raw = bytearray(parts[name].view(torch.uint8).numpy().tobytes())
        width, place = parts[name].element_size(), draw(st.integers(0, 10**6))
        what = draw(st.sampled_from(["flip", "byte", "drop", "add", "repeat"]))
        if what == "flip" and raw:
            raw[place % len(raw)] ^= 1 << draw(st.integers(0, 7))
        elif what == "byte" and raw:
            raw[place % len(raw)] = draw(st.sampled_from([0, 1, 254, 255]))
        elif what == "drop":
            del raw[max(0, len(raw) - width) :]
        elif what == "add":
            raw += bytes([draw(st.sampled_from([0, 1, 255]))]) * width
        elif what == "repeat":
            raw *= 2
        parts[name] = torch.frombuffer(bytearray(raw) or bytearray(width), dtype=parts[name].dtype)[: len(raw) // width]
    return parts, flat.dtype, max(0, size)


@given(damaged_parts())
@settings(deadline=None, max_examples=int(os.environ.get("KEEPK_FUZZ", "300")))
def test_damaged_parts_are_refused_or_those_of_another_tensor(damaged):
    """Every tensor has exactly one encoding in each form, so accepted parts must be what the slow encoder writes."""
    parts, dtype, size = damaged
    try:
        tensor = expanded(parts, dtype, size)
    except FileError:
        return
    largest = 65_535 if "gaps" in parts and parts["gaps"].dtype == torch.uint16 else 255
    assert equal_parts(parts, slow_parts(tensor, "gaps" if "gaps" in parts else "bitmask", largest))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"gaps": [0, 1]}, r"3 values, but its gaps have places for 2"),
        ({"gaps": [0, 1, 255]}, r"3 values, but its gaps have places for 2"),
        ({"gaps": [0, 1, 5, 255]}, r"3 values, but its gaps have places for 3"),
        ({"gaps": [0, 1, 254]}, r"its gaps lead to entry 257, but it has only 10"),
        ({"gaps": [255] * 20 + [0, 0, 0]}, r"23 gaps, but only 10 entries"),
        ({"values": [1.0, 0.0, 2.0]}, r"one of its values is 0"),
        ({"values": [[1.0], [2.0], [3.0]]}, r"its values have shape \(3, 1\)"),
        ({"gaps": [[0, 1, 2]]}, r"its gaps have shape \(1, 3\)"),
    ],
)
def test_gaps_that_cannot_be(change, match):
    parts = {"values": torch.tensor([1.0, 2.0, 3.0]), "gaps": torch.tensor([0, 1, 2], dtype=torch.uint8)}
    assert expanded(parts, torch.float32, 10).tolist() == [1, 0, 2, 0, 0, 3, 0, 0, 0, 0]
    parts |= {name: torch.tensor(value, dtype=parts[name].dtype) for name, value in change.items()}
    with pytest.raises(FileError, match=match):
        expanded(parts, torch.float32, 10)


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        ([0b10011], r"has 1 entries of uint8 for 10 entries"),
        ([0b10011, 0, 0], r"has 3 entries of uint8"),
        ([0b10011, 0b100], r"3 values, but its bitmask has places for 4"),  # beyond the last entry
        ([0b10001, 0], r"places for 2"),
    ],
)
def test_bitmasks_that_cannot_be(mask, match):
    parts = {"values": torch.tensor([1.0, 2.0, 3.0]), "bitmask": torch.tensor([0b10011, 0], dtype=torch.uint8)}
    assert expanded(parts, torch.float32, 10).tolist() == [1, 2, 0, 0, 3, 0, 0, 0, 0, 0]
    with pytest.raises(FileError, match=match):
        expanded(parts | {"bitmask": torch.tensor(mask, dtype=torch.uint8)}, torch.float32, 10)


@given(st.lists(st.floats(width=32, allow_nan=True), min_size=1, max_size=50))
def test_half_values_are_the_nearest_and_never_zero(numbers):
    values = torch.tensor([it for it in numbers if it != 0] or [1.0])
    values = values[~((values.abs() > 65_504) & values.isfinite())]
    half = as_half(values)
    assert (half != 0).all()
    assert torch.equal(half.isnan(), values.isnan())
    known = values.abs() >= 2**-24
    torch.testing.assert_close(half[known].float(), values[known].half().float(), rtol=0, atol=0)
    assert (half[~known & ~values.isnan()].float().abs() == 2**-24).all()
    assert torch.equal(half[~values.isnan()].signbit(), values[~values.isnan()].signbit())


# Saved models


def lenet(seed=0, density=0.05, dtype=torch.float32):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(200, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 30), nn.Linear(30, 4)).to(
        dtype
    )
    for name in ("0.weight", "3.weight"):
        weight = net.get_parameter(name).detach()
        weight[torch.rand(weight.shape) >= density] = 0
    return net


def arch_of(folder):
    return json.loads((folder / "arch.json").read_bytes())


def assert_same_model(one, other):
    first, second = named(one), named(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert same_bits(tensor, second[name]) if tensor.is_floating_point() else torch.equal(tensor, second[name])
        assert second[name].stride() == tensor.stride()
        assert second[name].layout == torch.strided


@pytest.mark.parametrize("dtype", list(INTEGERS))
@pytest.mark.parametrize("density", [0, 0.001, 0.05, 0.5])
def test_a_compact_model_comes_back_bit_equal_and_smaller(tmp_path, dtype, density):
    net = lenet(density=density, dtype=dtype)
    with torch.no_grad():
        net[0].weight[3, :4] = torch.tensor([-0.0, float("nan"), float("inf"), 0.0])
    for compact, folder in ((True, tmp_path / "small"), (False, tmp_path / "large"), ("auto", tmp_path / "auto")):
        untyped(keepk.save)(net, folder, compact=compact)
        assert_same_model(net, keepk.load(lenet(1, dtype=dtype), folder))
    small, large = (sum(map(len, contents(tmp_path / it).values())) for it in ("small", "large"))
    assert small < large
    assert contents(tmp_path / "auto") == contents(tmp_path / "small")
    keepk.save(keepk.load(lenet(1, dtype=dtype), tmp_path / "small"), tmp_path / "again", compact=True)
    assert contents(tmp_path / "again") == contents(tmp_path / "small")


def test_without_compact_tensors_the_files_are_those_of_version_1(tmp_path):
    net = lenet()
    keepk.save(net, tmp_path / "plain", compact=False)
    arch, saved = arch_of(tmp_path / "plain"), load_file(tmp_path / "plain" / "model.safetensors")
    assert arch["version"] == 1
    assert "stored" not in arch["about"]
    assert saved.keys() == net.state_dict().keys()
    assert all(torch.equal(value, saved[name]) for name, value in net.state_dict().items())
    dense = nn.Sequential(nn.Linear(60, 40), nn.Linear(40, 3))
    for compact in (True, False, "auto"):
        untyped(keepk.save)(dense, tmp_path / str(compact), compact=compact)
    assert contents(tmp_path / "True") == contents(tmp_path / "False") == contents(tmp_path / "auto")


def test_auto_leaves_files_alone_that_would_hardly_get_smaller(tmp_path):
    for build, version in (
        (lambda: lenet(density=0.05), 2),
        (lambda: lenet(density=0.8), 1),  # 17 % smaller
        (lambda: nn.Linear(20, 20).requires_grad_(False), 1),
    ):
        net = build()
        if isinstance(net, nn.Linear):
            net.weight[1:] = 0  # 19 times smaller, but only by 1.5 KB
        keepk.save(net, tmp_path)
        assert arch_of(tmp_path)["version"] == version


def test_arch_json_says_how_to_read_the_tensors(tmp_path):
    """A reader that knows nothing but the text in the file."""
    net = lenet(density=0.05)
    with torch.no_grad():
        net[3].weight[torch.rand(30, 60) < 0.4] = 1
        net[4].weight.zero_()
    keepk.save(net, tmp_path)
    arch, saved = arch_of(tmp_path), load_file(tmp_path / "model.safetensors")
    assert arch["tensors"]["0.weight"] == {"dtype": "float32", "dense": [60, 200], "stored": "gaps"}
    assert arch["tensors"]["3.weight"]["stored"] == "bitmask"
    assert "NAME.gaps" in arch["about"]["stored"]
    for name, entry in arch["tensors"].items():
        if "stored" not in entry:
            assert torch.equal(saved[name], net.state_dict()[name])
            continue
        flat, place, values = [0.0] * int(np.prod(entry["dense"])), 0, iter(saved[f"{name}.values"].tolist())
        if entry["stored"] == "gaps":
            for gap in saved[f"{name}.gaps"].tolist():
                place += gap
                if gap < 255:
                    flat[place] = next(values)
                    place += 1
        else:
            for byte in saved[f"{name}.bitmask"].tolist():
                for bit in range(8):
                    if byte >> bit & 1:
                        flat[place] = next(values)
                    place += 1
        assert torch.equal(torch.tensor(flat).reshape(entry["dense"]), net.state_dict()[name])
        assert next(values, None) is None


@pytest.mark.parametrize("name", ["grouped", "tied_embedding", "lstm", "dense_block", "multihead_attention"])
def test_cut_and_masked_networks_come_back(tmp_path, name):
    model, example = NETWORKS[name]()
    graph = keepk.trace(model, example)
    keepk.shrink(model, graph, graph.choose(0.3, seed=0, lossy=True))
    for parameter in model.parameters():
        parameter.detach()[torch.rand(parameter.shape) < 0.9] = 0
    keepk.save(model, tmp_path, compact=True)
    assert arch_of(tmp_path)["version"] == 2
    fresh = NETWORKS[name](seed=7)[0]
    assert_same_model(model, keepk.load(fresh, tmp_path))


def test_strides_and_ties_stay(tmp_path):
    def build():
        net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 3), nn.Conv2d(8, 16, 3))
        net[2].weight = net[0].weight
        return net

    net = build().to(memory_format=torch.channels_last)
    net[0].weight.detach()[torch.rand(16, 8, 3, 3) < 0.9] = 0
    keepk.save(net, tmp_path, compact=True)
    fresh = keepk.load(build(), tmp_path)
    assert_same_model(net, fresh)
    assert fresh[2].weight is fresh[0].weight
    assert fresh[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_pruned_run_is_counted_and_certified_as_before(tmp_path):
    net = lenet(density=1)
    pruner = keepk.Pruner(net, [keepk.weights("*.weight", keep=400, schedule=keepk.OneShot())])
    pruner.step()
    keepk.save(net, tmp_path)
    assert arch_of(tmp_path)["version"] == 2
    [space] = arch_of(tmp_path)["certificate"].values()
    loaded = keepk.load(lenet(1, density=1), tmp_path)
    weights = [it for name, it in loaded.named_parameters() if name.endswith("weight")]
    assert space["kept"] == 400 == sum(int(it.count_nonzero()) for it in weights)


def test_a_name_that_is_taken_is_not_used(tmp_path):
    net = nn.Module()
    net.register_parameter("weight", nn.Parameter(torch.zeros(50, 50)))
    net.register_module("other", nn.Linear(60, 60))
    net._parameters["weight.values"] = nn.Parameter(
        torch.ones(3)
    )  # torch refuses a dot, but only when it is registered
    net.get_parameter("other.weight").detach()[1:] = 0
    keepk.save(net, tmp_path, compact=True)
    arch = arch_of(tmp_path)["tensors"]
    assert "stored" not in arch["weight"]
    assert arch["other.weight"]["stored"] == "gaps"


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(40, 40))
        self.register_buffer("cache", torch.zeros(40, 40), persistent=False)
        self.register_buffer("mask", torch.zeros(40, 40, dtype=torch.bool))
        self.layer = nn.Linear(3, 3)


def test_only_floats_in_the_state_dict_are_compact(tmp_path):
    keepk.save(Buffers(), tmp_path, compact=True)
    stored = {name for name, entry in arch_of(tmp_path)["tensors"].items() if "stored" in entry}
    assert stored == {"table"}
    keepk.load(Buffers(), tmp_path)


def test_half_values_are_rounded_recorded_and_float32_again(tmp_path):
    net = lenet(density=0.1)
    with torch.no_grad():
        net[0].weight[0, 0] = 1e-30
    keepk.save(net, tmp_path / "exact")
    keepk.save(net, tmp_path / "half", half=True)
    arch = arch_of(tmp_path / "half")
    assert arch["tensors"]["0.weight"]["values"] == "float16"
    assert "values" not in arch_of(tmp_path / "exact")["tensors"]["0.weight"]
    assert "rounded" in arch["about"]["stored"]
    loaded = keepk.load(lenet(1), tmp_path / "half")
    sizes = [(tmp_path / it / "model.safetensors").stat().st_size for it in ("exact", "half")]
    assert sizes[1] < 0.75 * sizes[0]
    for (name, before), after in zip(net.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert after.dtype == before.dtype
        if before.dim() == 2:
            assert torch.equal(before != 0, after != 0)
            assert ((before - after).abs() <= before.abs() * 2**-11 + 2**-24).all(), name
            assert not torch.equal(before, after)
        else:
            assert torch.equal(before, after), name


def test_options_that_contradict_each_other_are_refused(tmp_path):
    net = lenet()
    for options, words in (
        ({"compact": "yes"}, r"save: compact='yes'\. Pass \"auto\", True or False"),
        ({"compact": None}, r"save: compact=None"),
        ({"compact": 1}, r"save: compact=1"),
        ({"half": "float16"}, r"save: half='float16'\. Pass True or False"),
        ({"half": True, "compact": False}, r"half=True rounds the values of compact tensors, but compact=False"),
    ):
        with pytest.raises(FileError, match=words):
            untyped(keepk.save)(net, tmp_path / "new", **options)
    with torch.no_grad():
        net[3].weight[1, 1] = 1e6
    with pytest.raises(FileError, match=r"save: tensor '3\.weight': 1000000\.0 is out of the range.*half=False"):
        keepk.save(net, tmp_path / "new", half=True)
    assert not (tmp_path / "new").exists()


# Damaged and forged files


def forged(folder, change, arch_change=None):
    """Change the stored tensors, and update every hash, so that the change itself must be detected."""
    path, arch = folder / "model.safetensors", arch_of(folder)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    data = path.read_bytes()
    arch["values"] |= {"size": len(data), "sha256": sha256(data).hexdigest()}
    if arch_change is not None:
        arch_change(arch["tensors"])
    arch["sha256"] = digest(arch)
    (folder / "arch.json").write_text(json.dumps(arch))


def nothing(_):
    pass


def renamed(old, new):
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def set_to(name, make):
    return lambda tensors: tensors.update({name: make(tensors[name])})


@pytest.mark.parametrize(
    ("change", "arch_change", "match"),
    [
        (
            set_to("0.weight.values", lambda it: it[:-1]),
            None,
            r"'0\.weight' cannot be read as float32 \(it has \d+ values",
        ),
        (set_to("0.weight.values", lambda it: it.half()), None, r"values are float16, arch\.json says float32"),
        (set_to("0.weight.values", lambda it: it.int()), None, r"values are int32, arch\.json says float32"),
        (set_to("0.weight.gaps", lambda it: it.int()), None, r"its gaps are int32 instead of uint8 or uint16"),
        (set_to("0.weight.gaps", lambda it: it + 1), None, r"its gaps lead to entry|gaps have places for"),
        (renamed("0.weight.gaps", "0.weight.bitmask"), None, r"do not name the same tensors"),
        (lambda tensors: tensors.pop("0.weight.gaps"), None, r"do not name the same tensors: \['0\.weight\.gaps'\]"),
        (nothing, lambda arch: arch["0.weight"].update(stored="bitmask"), r"do not name the same tensors"),
        (nothing, lambda arch: arch["0.weight"].pop("stored"), r"do not name the same tensors"),
        (nothing, lambda arch: arch["0.weight"].update(stored="zip"), r"cannot be stored as 'zip'"),
        (nothing, lambda arch: arch["0.weight"].update(stored=None), r"cannot be stored as None"),
        (nothing, lambda arch: arch["0.weight"].update(stored=["gaps"]), r"not laid out as keepk\.save writes it"),
        (nothing, lambda arch: arch["0.weight"].update(values="float64"), r"cannot have values of 'float64'"),
        (
            nothing,
            lambda arch: arch["0.weight"].update(values="float16"),
            r"values are float32, arch\.json says float16",
        ),
        (nothing, lambda arch: arch["4.bias"].update(values="float16"), r"cannot have values of 'float16'"),
        (nothing, lambda arch: arch["0.weight"].update(persistent=False), r"cannot be stored as 'gaps'"),
    ],
)
def test_a_forged_compact_file_is_refused(tmp_path, change, arch_change, match):
    keepk.save(lenet(), tmp_path)
    forged(tmp_path, nothing)
    keepk.load(lenet(1), tmp_path)  # the forger itself does no damage
    forged(tmp_path, change, arch_change)
    refused(tmp_path, lenet(1), match)


def test_a_file_of_version_1_has_no_compact_tensors(tmp_path):
    keepk.save(lenet(), tmp_path)
    arch = arch_of(tmp_path) | {"version": 1}
    arch["sha256"] = digest(arch)
    (tmp_path / "arch.json").write_text(json.dumps(arch))
    refused(tmp_path, lenet(1), r"a tensor has no 'stored'")


def test_a_small_file_does_not_ask_for_gigabytes(tmp_path):
    """The size of a tensor is the user's model's, so a file can only name it, never choose it."""
    keepk.save(lenet(), tmp_path)

    def huge(arch):
        arch["0.weight"]["dense"] = [2**20, 2**20]

    def huge_hash(arch):
        huge(arch["tensors"])
        tensors = {name: [it["dtype"], it["dense"]] for name, it in arch["tensors"].items()}
        text = json.dumps([arch["modules"], tensors, arch["ties"]], sort_keys=True)
        arch["dense_sha256"] = sha256(text.encode("ascii")).hexdigest()
        arch["sha256"] = digest(arch)

    arch = arch_of(tmp_path)
    huge_hash(arch)
    (tmp_path / "arch.json").write_text(json.dumps(arch))
    net = lenet(1)
    before = looks(net)
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=r"'0\.weight' was float32 \(1048576, 1048576\)"):
            keepk.load(net, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()
    unchanged(net, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    net = lenet()
    with torch.no_grad():
        net[3].weight[torch.rand(30, 60) < 0.4] = 1
    keepk.save(net, folder)
    assert {it.get("stored") for it in arch_of(folder)["tensors"].values()} == {None, "gaps", "bitmask"}
    return folder, contents(folder), net


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_flipped_bit_and_no_truncated_file_is_read(whole, place, bit, cut):
    folder, files, net = whole
    for name, data in files.items():
        damaged = bytearray(data)
        if cut:
            del damaged[place % len(data) :]
        else:
            damaged[place % len(data)] ^= 1 << bit
        (folder / name).write_bytes(damaged)
        try:
            loaded = keepk.load(lenet(1), folder)
        except FileError:
            pass
        else:  # whitespace may change
            assert name == "arch.json"
            assert_same_model(net, loaded)
        (folder / name).write_bytes(data)


@given(data=st.data())
@settings(max_examples=int(os.environ.get("KEEPK_FUZZ", "150")), deadline=None)
def test_a_file_whose_tensors_were_damaged_and_rehashed_is_refused_or_of_another_model(whole, data):
    """With all hashes recomputed, only the layout of the parts is left to be checked."""
    folder, files, _ = whole
    for name, content in files.items():
        (folder / name).write_bytes(content)
    name = data.draw(st.sampled_from([f"{it}.{part}" for it, part in (("0.weight", "gaps"), ("3.weight", "bitmask"))]))

    def change(tensors):
        part = data.draw(st.sampled_from([name, f"{name.rpartition('.')[0]}.values"]))
        raw = tensors[part].numpy().view(np.uint8).copy()
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        tensors[part] = torch.from_numpy(raw).view(tensors[part].dtype)

    forged(folder, change)
    stored = load_file(folder / "model.safetensors")
    net = lenet(1)
    before = looks(net)
    try:
        keepk.load(net, folder)
    except FileError:
        unchanged(net, before)
        return
    weight, form = name.rsplit(".", 1)
    flat = dict(net.named_parameters())[weight].detach().reshape(-1)
    assert equal_parts({part: stored[f"{weight}.{part}"] for part in ("values", form)}, slow_parts(flat, form))
