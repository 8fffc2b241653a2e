"""IDX files are read exactly or refused, and MNIST is found wherever its four files are."""

import gzip
import hashlib
import itertools
import os
import struct
import tracemalloc
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from keepk.errors import DataError
from keepk_paper import data
from keepk_paper.data import data_folder, mnist, read_idx
from local_server import serving

CODES = {
    "uint8": (8, "B"),
    "int8": (9, "b"),
    "int16": (11, "h"),
    "int32": (12, "i"),
    "float32": (13, "f"),
    "float64": (14, "d"),
}
fixed = settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # `read` rewrites its file each time
)


def idx(values: np.ndarray) -> bytes:
    """The IDX file of an array, written value by value."""
    code, letter = CODES[values.dtype.name]
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, code, values.ndim, *values.shape)
    return header + b"".join(struct.pack(f">{letter}", value) for value in values.ravel().tolist())


@pytest.fixture
def read(tmp_path):
    """`read_idx` of a file with these bytes."""

    def read_bytes(content: bytes) -> np.ndarray:
        (tmp_path / "file").write_bytes(content)
        return read_idx(tmp_path / "file")

    return read_bytes


SMALL = idx(np.arange(-3, 3, dtype=np.int16).reshape(2, 3))
PACKED = gzip.compress(SMALL, mtime=0)


@fixed
@given(
    values=st.sampled_from(sorted(CODES)).flatmap(
        lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4))
    ),
    packed=st.booleans(),
)
def test_an_idx_file_gives_back_its_array(read, values, packed):
    content = idx(values)
    got = read(gzip.compress(content) if packed else content)
    assert got.dtype == values.dtype
    assert got.dtype.isnative
    assert got.flags.writeable
    np.testing.assert_array_equal(got, values, strict=True)


@pytest.mark.parametrize("name", ["file.gz", "file"])
@pytest.mark.parametrize("content", [SMALL, PACKED], ids=["raw", "packed"])
def test_the_content_says_whether_it_is_packed(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read_idx(str(tmp_path / name)).tolist() == [[-3, -2, -1], [0, 1, 2]]


@pytest.mark.parametrize("stop", range(len(SMALL)))
def test_a_raw_file_cut_short_anywhere_is_refused(tmp_path, stop):
    path = tmp_path / "cut"
    path.write_bytes(SMALL[:stop])
    expected = {0: "an empty file", 4: "12 bytes of header, got 4", 12: r"24 bytes for int16 \[2, 3\], got 12"}
    with pytest.raises(DataError, match=expected.get(stop, "expected .*, got .*")) as caught:
        read_idx(path)
    assert str(caught.value).startswith(f"{path}: is ")
    assert str(caught.value).endswith("Delete it and download it again.")


@pytest.mark.parametrize("stop", range(2, len(PACKED)))
def test_a_packed_file_cut_short_anywhere_is_refused(read, stop):
    with pytest.raises(DataError, match=r"is damaged or truncated: expected a complete gzip file, got .+\. Delete"):
        read(PACKED[:stop])


def test_a_packed_file_of_a_cut_file_is_refused(read):
    with pytest.raises(DataError, match="is truncated: expected 24 bytes"):
        read(gzip.compress(SMALL[:-1]))


def test_one_wrong_bit_in_a_packed_file_never_gives_another_array(read):
    whole = read(PACKED)
    refused = 0
    for position, bit in np.ndindex(len(PACKED), 8):
        damaged = bytearray(PACKED)
        damaged[position] ^= 1 << bit
        try:
            np.testing.assert_array_equal(read(bytes(damaged)), whole, strict=True)
        except DataError:
            refused += 1
    assert refused > 4 * len(PACKED)


def bomb(size, head=b""):
    """A small gzip file that expands to this number of bytes."""
    content = BytesIO()
    with gzip.GzipFile(fileobj=content, mode="wb", compresslevel=9) as packed:
        packed.write(head)
        for _ in range(0, size, 1 << 20):
            packed.write(bytes(1 << 20))
    return content.getvalue()


def test_a_gzip_bomb_is_refused_before_it_fills_the_memory(tmp_path):
    """This does not depend on the size in its header."""
    path = tmp_path / "file.gz"
    too_large, many = r"is too large: expected at most 1,048,576 bytes, got more", "00010000 00010000 00010000 00010000"
    heads = {"": "is not an IDX file", f"00000804 {many}": too_large, "00000801 00000010": "has bytes after its end"}
    for head, wrong in heads.items():
        path.write_bytes(bomb(64 << 20, bytes.fromhex(head)))
        assert path.stat().st_size < 1 << 17
        tracemalloc.start()
        try:
            with pytest.raises(DataError, match=rf"file\.gz: {wrong}"):
                read_idx(path, 1 << 20)
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


def test_a_bomb_in_the_place_of_mnist_is_refused(tmp_path, monkeypatch):
    small = tuple(replace(file, shape=(2, *file.shape[1:])) for file in data.MNIST_FILES)
    monkeypatch.setattr(data, "MNIST_FILES", small)
    for file in small:
        (tmp_path / f"{file.name}.gz").write_bytes(bomb(16 << 20))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz: is not an IDX file"):
        mnist(tmp_path, download=False)


@pytest.mark.parametrize("content", [SMALL, PACKED], ids=["raw", "packed"])
def test_trailing_bytes_are_refused(read, content):
    with pytest.raises(DataError, match=r"has bytes after its end|is damaged"):
        read(content + b"x")


@pytest.mark.parametrize("magic", ["01 00 08 01", "00 01 08 01", "00 00 0a 01", "00 00 00 01", "00 00 08 21"])
def test_other_magic_bytes_are_refused(read, magic):
    with pytest.raises(DataError, match=rf"is not an IDX file: expected the first bytes 00 00, .*, got {magic}\. "):
        read(bytes.fromhex(magic) + bytes(200))


def test_dimensions_beyond_any_memory_are_only_counted(read):
    expected = 4 + 4 * 8 + 8 * (2**32 - 1) ** 8
    with pytest.raises(DataError, match=f"is truncated: expected {expected:,} bytes for float64"):
        read(b"\0\0\x0e\x08" + b"\xff" * 32)


@fixed
@given(st.binary(max_size=40) | st.binary(max_size=40).map(lambda tail: b"\0\0\x08" + tail))
def test_any_bytes_are_an_array_or_a_data_error(read, content):
    try:
        values = read(content)
    except DataError:
        return
    assert idx(values) == content


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing: cannot be read .*No such file.* Check the path"):
        read_idx(tmp_path / "nothing")


# ---- the folder


@pytest.fixture
def no_variables(monkeypatch, tmp_path):
    """Unset both variables, and use an empty home folder."""
    for name in ("KEEPK_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_folder_is_the_argument_the_variable_or_the_cache(monkeypatch, no_variables, tmp_path):
    assert data_folder() == no_variables / ".cache" / "keepk"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_folder() == tmp_path / "cache" / "keepk"
    monkeypatch.setenv("KEEPK_DATA", str(tmp_path / "named"))
    assert data_folder() == tmp_path / "named"
    assert data_folder(tmp_path / "given") == tmp_path / "given"


def test_a_tilde_is_the_home_folder(monkeypatch, no_variables):
    assert data_folder("~/data") == no_variables / "data"
    monkeypatch.setenv("KEEPK_DATA", "~/other")
    assert data_folder() == no_variables / "other"


@pytest.mark.parametrize("cache", ["", "relative/cache"])
def test_an_empty_variable_or_a_relative_cache_counts_as_unset(monkeypatch, no_variables, cache):
    monkeypatch.setenv("KEEPK_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert data_folder() == no_variables / ".cache" / "keepk"


# ---- MNIST, with generated images of the published number and size

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SHAPES = ((60_000, 28, 28), (60_000,), (10_000, 28, 28), (10_000,))


def header(shape: tuple[int, ...]) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)


@pytest.fixture(scope="module")
def made():
    """Four arrays without equal neighbours that still compress quickly."""
    rng = np.random.default_rng(0)
    pixels, digits = (rng.integers(0, high, 10_007, dtype=np.uint8) for high in (256, 10))
    return tuple(np.resize(pixels if len(shape) == 3 else digits, shape) for shape in SHAPES)


@pytest.fixture(scope="module")
def files(made, tmp_path_factory):
    """A folder with the four raw files, and one with the four gzipped files."""
    raw, packed = tmp_path_factory.mktemp("raw"), tmp_path_factory.mktemp("packed")
    for name, values in zip(NAMES, made, strict=True):
        content = header(values.shape) + values.tobytes()
        (raw / name).write_bytes(content)
        (packed / f"{name}.gz").write_bytes(gzip.compress(content, 1))
    return raw, packed


@pytest.fixture(scope="module")
def expected(made):
    """The three splits, by their definition."""
    images, labels, test_images, test_labels = made
    train = images[:50_000].astype(np.float64)
    mean = train.mean()
    std = np.sqrt(((train - mean) ** 2).mean())
    parts = (images[:50_000], labels[:50_000]), (images[50_000:], labels[50_000:]), (test_images, test_labels)
    return [(((pixels - mean) / std).astype(np.float32)[:, None], digits) for pixels, digits in parts]


def place(files: tuple[Path, Path], index: int, target: Path) -> None:
    """Copy the file `index` to `target`, gzipped if the name of the target ends in .gz."""
    raw, packed = files
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(packed / f"{NAMES[index]}.gz" if target.suffix == ".gz" else raw / NAMES[index])


def assert_splits(got: data.Mnist, expected) -> None:
    for split, (images, labels) in zip((got.train, got.validation, got.test), expected, strict=True):
        assert split.images.dtype == torch.float32
        assert split.labels.dtype == torch.int64
        assert len(split) == len(labels)
        np.testing.assert_array_equal(split.labels.numpy(), labels)
        assert split.images.shape == images.shape
        assert (split.images - torch.from_numpy(images)).abs_().max() < 1e-6


FOLDERS, PACKINGS, MARKS = ("", "mnist", "MNIST/raw"), ("", ".gz"), ("-idx", ".idx")
WAYS = list(itertools.product(FOLDERS, PACKINGS, MARKS))


@pytest.mark.parametrize("shift", range(3))
def test_mnist_is_read_from_every_place_spelling_and_packing(tmp_path, files, expected, shift):
    """Each of the four files is in one of the twelve combinations."""
    for index, (name, way) in enumerate(zip(NAMES, WAYS[shift::3], strict=True)):
        folder, packing, mark = way
        place(files, index, tmp_path / folder / (name.replace("-idx", mark) + packing))
    assert_splits(mnist(tmp_path, download=False), expected)


def test_mnist_is_read_from_the_folder_that_the_variable_names(monkeypatch, tmp_path, files, expected):
    for index, name in enumerate(NAMES):
        place(files, index, tmp_path / "MNIST" / "raw" / name)
    monkeypatch.setenv("KEEPK_DATA", str(tmp_path))
    with torch.device("meta"):  # like a script that creates its models on a GPU
        got = mnist(download=False)
    assert_splits(got, expected)


def test_missing_files_are_named_with_where_to_put_and_to_get_them(tmp_path, files):
    place(files, 1, tmp_path / "data" / "mnist" / NAMES[1])
    with pytest.raises(DataError) as caught:
        mnist(tmp_path / "data", download=False)
    root = tmp_path / "data"
    assert str(caught.value).splitlines() == [
        f"MNIST is not complete in {root}: missing {NAMES[0]}, {NAMES[2]}, {NAMES[3]}.",
        f"Put the four files {', '.join(NAMES)}, raw or .gz, into {root} or {root / 'mnist'} or {root / 'MNIST/raw'}.",
        "They are published at https://ossci-datasets.s3.amazonaws.com/mnist/ and "
        "https://storage.googleapis.com/cvdf-datasets/mnist/ (add .gz to the name).",
        "To use another folder, pass --data DIR or set $KEEPK_DATA.",
        "The download is switched off (download=False).",
    ]


def test_a_folder_that_is_not_there_is_not_made_without_a_download(tmp_path):
    with pytest.raises(DataError, match=r"MNIST is not complete in .*: missing train-images"):
        mnist(tmp_path / "nowhere", download=False)
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture
def server(files, monkeypatch):
    """A mirror that serves the gzipped files, whose sizes and checksums are patched into `MNIST_FILES`."""
    published = []
    for file in data.MNIST_FILES:
        content = (files[1] / f"{file.name}.gz").read_bytes()
        published.append(replace(file, packed_size=len(content), packed_md5=hashlib.md5(content).hexdigest()))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(data, "MNIST_FILES", tuple(published))
    with serving(files[1]) as (address, asked):
        monkeypatch.setattr(data, "MNIST_MIRRORS", (address,))
        yield asked


def test_only_what_is_missing_is_downloaded_and_only_once(tmp_path, files, expected, server, capsys):
    place(files, 1, tmp_path / NAMES[1])
    assert_splits(mnist(tmp_path), expected)
    missing = [f"{name}.gz" for name in NAMES if name != NAMES[1]]
    assert server == [f"/{name}" for name in missing]
    assert {path.name for path in (tmp_path / "mnist").iterdir()} == {".lock", *missing}
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == missing
    mnist(tmp_path)
    assert len(server) == len(missing)


def test_a_download_that_stops_half_way_names_only_what_is_still_missing(tmp_path, server, monkeypatch):
    *served, last = data.MNIST_FILES
    monkeypatch.setattr(data, "MNIST_FILES", (*served, replace(last, name="t10k-other-idx1-ubyte")))
    with pytest.raises(DataError, match=r"missing t10k-other-idx1-ubyte\.\n(.|\n)*HTTP 404"):
        mnist(tmp_path)
    assert server == [f"/{file.name}.gz" for file in data.MNIST_FILES]


def test_offline_the_message_says_what_to_do_and_what_each_mirror_said(tmp_path, monkeypatch):
    closed = ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler)
    closed.server_close()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(data, "MNIST_MIRRORS", (f"http://127.0.0.1:{closed.server_port}/",))
    with pytest.raises(DataError, match=r"Put the four files(.|\n)*--data DIR(.|\n)*The download failed: ") as caught:
        mnist(tmp_path)
    assert f"http://127.0.0.1:{closed.server_port}/train-images-idx3-ubyte.gz: " in str(caught.value)
    assert "refused" in str(caught.value)


@pytest.mark.parametrize(
    ("index", "content", "message"),
    [
        (1, header((59_999,)) + bytes(59_999), r"expected uint8 \[60000\], got uint8 \[59999\]"),
        (3, b"\0\0\x09" + header((10_000,))[3:] + bytes(10_000), r"expected uint8 \[10000\], got int8 \[10000\]"),
        (2, header((10_000, 784)) + bytes(7_840_000), r"expected uint8 \[10000, 28, 28\], got uint8 \[10000, 784\]"),
        (1, header((60_000,)) + bytes(59_999) + b"\x0a", "expected labels from 0 to 9, got the label 10"),
        (3, header((10_000,)) + bytes(9_999) + b"\xff", "expected labels from 0 to 9, got the label 255"),
        (0, header(SHAPES[0]) + b"\x07" * 47_040_000, "expected images, got the value 7 in every pixel"),
    ],
    ids=["count", "type", "shape", "label 10", "label 255", "one value"],
)
def test_a_file_that_is_not_mnist_is_refused_by_name(tmp_path, files, index, content, message):
    for other, name in enumerate(NAMES):
        if other != index:
            place(files, other, tmp_path / name)
    (tmp_path / NAMES[index]).write_bytes(content)
    with pytest.raises(DataError, match=f"{NAMES[index]}: is not .*{message}. Delete it and download it again."):
        mnist(tmp_path)


# ---- MNIST itself


@pytest.mark.skipif(not os.environ.get("KEEPK_DATA"), reason="needs the real MNIST: set $KEEPK_DATA to its folder")
def test_the_real_mnist():
    real = mnist(download=False)
    assert [len(split) for split in (real.train, real.validation, real.test)] == [50_000, 10_000, 10_000]
    assert real.train.images.shape == (50_000, 1, 28, 28)
    assert real.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert real.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    labels = torch.cat([real.train.labels, real.validation.labels])
    assert labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert real.test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    train = real.train.images.double()
    assert train.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert train.std(correction=0).item() == pytest.approx(1.0, abs=1e-6)
    std, mean = torch.std_mean(torch.cat([train, real.validation.images]), correction=0)
    black, white = train.aminmax()
    assert round(((mean - black) / (white - black)).item(), 4) == 0.1307
    assert round((std / (white - black)).item(), 4) == 0.3081
