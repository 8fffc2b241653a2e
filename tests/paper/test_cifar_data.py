"""CIFAR's binary files are read exactly or refused, loose or inside their archive."""

import gzip
import hashlib
import io
import tarfile
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepk.errors import DataError
from keepk_paper import pictures as cifar
from keepk_paper.data import Source
from keepk_paper.pictures import CIFAR_10_LABELS, CIFAR_100_LABELS, cifar10, cifar100, last_tenth_of_each_class
from keepk_paper.pictures import read_records as read
from local_server import serving

fixed = settings(derandomize=True, deadline=None, max_examples=50)
TEN = ("data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin")
TEN_FILES = (*TEN, "test_batch.bin")
HUNDRED_FILES = ("train.bin", "test.bin")


def batch(seed, *labels):
    """A file with one record per row of labels, [(fine,), ...] or [(coarse, fine), ...], and its images."""
    pictures = np.random.default_rng(seed).integers(0, 256, (len(labels), 3, 32, 32), np.uint8)
    content = b"".join(bytes(row) + picture.tobytes() for row, picture in zip(labels, pictures, strict=True))
    return content, pictures


def ten():
    """Six small files of CIFAR-10, by name; each of the ten classes occurs 10 times in the training files."""
    rng = np.random.default_rng(5)
    classes = rng.permutation(np.repeat(np.arange(10), 10))
    parts = {name: classes[20 * number : 20 * number + 20] for number, name in enumerate(TEN)}
    parts["test_batch.bin"] = np.array([3, 0, 9])
    return {
        name: (*batch(seed, *((int(c),) for c in labels)), labels) for seed, (name, labels) in enumerate(parts.items())
    }


def write(folder, files, names=None):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or files:
        (folder / name).write_bytes(files[name][0])


def archive(files, folder="cifar-10-batches-bin"):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, (content, *_) in {"readme.html": (b"<html>",), **files}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return packed.getvalue()


def assert_is_ten(data):
    """Check the three parts by their definition: a loop over the training images from the last to the first."""
    made = ten()
    images = np.concatenate([made[name][1] for name in TEN])
    labels = np.concatenate([made[name][2] for name in TEN])
    seen, validation = set(), []
    for row in reversed(range(100)):
        if labels[row] not in seen:
            seen.add(labels[row])
            validation.append(row)
    validation.sort()
    train = [row for row in range(100) if row not in validation]
    for part, rows in ((data.train, train), (data.validation, validation)):
        np.testing.assert_array_equal(part.images.numpy(), images[rows], strict=True)
        np.testing.assert_array_equal(part.labels.numpy(), labels[rows], strict=True)
    np.testing.assert_array_equal(data.test.images.numpy(), made["test_batch.bin"][1], strict=True)
    assert data.test.labels.tolist() == [3, 0, 9]
    assert data.classes == 10
    values = images[train].transpose(1, 0, 2, 3).reshape(3, -1).astype(np.float64)
    np.testing.assert_allclose(data.mean.numpy(), values.mean(1), rtol=1e-6)
    np.testing.assert_allclose(data.std.numpy(), values.std(1), rtol=1e-6)


# ---- one file


@fixed
@given(
    rows=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 99)), min_size=1, max_size=4), seed=st.integers(0, 99)
)
def test_a_file_gives_back_its_pictures_and_fine_labels(rows, seed):
    content, pictures = batch(seed, *rows)
    got = read("file", content, CIFAR_100_LABELS)
    np.testing.assert_array_equal(got.images.numpy(), pictures, strict=True)
    assert got.labels.tolist() == [fine for _, fine in rows]
    assert got.labels.dtype == torch.int64


def test_planes_are_red_green_blue_row_by_row():
    record = bytes([7]) + b"\x01" * 1024 + bytes(range(32)) * 32 + b"".join(bytes([row]) * 32 for row in range(32))
    got = read("file", record, CIFAR_10_LABELS)
    red, green, blue = got.images[0]
    assert (red == 1).all()
    assert (green == torch.arange(32)).all()
    assert (blue == torch.arange(32)[:, None]).all()
    assert got.labels.tolist() == [7]


@fixed
@given(stop=st.integers(0, 3 * 3073 - 1) | st.integers(3 * 3073 + 1, 4 * 3073 - 1))
def test_a_file_of_no_whole_records_is_refused(stop):
    content = batch(0, (1,), (2,), (3,), (4,))[0][:stop]
    if stop and stop % 3073 == 0:
        assert len(read("file", content, CIFAR_10_LABELS)) == stop // 3073
        return
    message = (
        f"file: is truncated, or is not the binary version: expected complete records of 3,073 bytes, got {stop:,} "
    )
    with pytest.raises(DataError, match=message):
        read("file", content, CIFAR_10_LABELS)


@pytest.mark.parametrize(
    ("labels", "rows", "message"),
    [
        (CIFAR_10_LABELS, [(0,), (9,), (10,), (255,)], "a label from 0 to 9, got 10 in record 2"),
        (CIFAR_100_LABELS, [(19, 99), (20, 0)], "a coarse label from 0 to 19, got 20 in record 1"),
        (CIFAR_100_LABELS, [(0, 100)], "a fine label from 0 to 99, got 100 in record 0"),
    ],
)
def test_a_wrong_label_is_named_with_its_record(labels, rows, message):
    with pytest.raises(DataError, match=f"file: is damaged: expected {message}. Delete it and download it again"):
        read("file", batch(0, *rows)[0], labels)


# ---- the split


@fixed
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_the_last_tenth_of_each_class_is_for_validation(labels):
    chosen = last_tenth_of_each_class(torch.tensor(labels)).tolist()
    for label in range(4):
        rows = [row for row, one in enumerate(labels) if one == label]
        tenth = len(rows) // 10
        assert [row for row in rows if chosen[row]] == rows[len(rows) - tenth :]


# ---- the folder


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_cifar_10_is_read_from_loose_files(tmp_path, place):
    write(tmp_path / place, ten())
    assert_is_ten(cifar10(tmp_path, download=False))


def test_cifar_10_is_read_from_both_places(monkeypatch, tmp_path):
    write(tmp_path, ten(), TEN_FILES[:2])
    write(tmp_path / "cifar-10-batches-bin", ten(), TEN_FILES[2:])
    monkeypatch.setenv("KEEPK_DATA", str(tmp_path))
    with torch.device("meta"):  # like a script that creates its models on a GPU
        data = cifar10(download=False)
    assert_is_ten(data)


@pytest.mark.parametrize("inner", ["cifar-10-batches-bin", "./another/folder"])
@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_cifar_10_is_read_from_its_archive_which_is_not_unpacked(tmp_path, place, inner):
    write(tmp_path, ten(), TEN_FILES[:1])
    path = tmp_path / place / "cifar-10-binary.tar.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(archive(ten(), inner))
    before = sorted(tmp_path.rglob("*"))
    assert_is_ten(cifar10(tmp_path, download=False))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("packed", [False, True])
def test_cifar_100_has_fine_labels(tmp_path, packed):
    labels = [(fine // 5, fine) for fine in range(100) for _ in range(10)]
    files = {"train.bin": batch(0, *labels), "test.bin": batch(1, (3, 17), (19, 99))}
    if packed:
        (tmp_path / "cifar-100-binary.tar.gz").write_bytes(archive(files, "cifar-100-binary"))
    else:
        write(tmp_path / "cifar-100-binary", files)
    data = cifar100(tmp_path, download=False)
    assert data.classes == 100
    assert torch.equal(data.validation.labels, torch.arange(100))
    assert torch.equal(data.train.labels, torch.arange(100).repeat_interleave(9))
    np.testing.assert_array_equal(data.validation.images.numpy(), files["train.bin"][1][9::10])
    assert data.test.labels.tolist() == [17, 99]


def test_batches_are_normalised_by_channel(tmp_path):
    write(tmp_path, ten())
    data = cifar10(tmp_path, download=False)
    chosen = torch.tensor([3, 1, 88])
    images = data.train.images[chosen]
    before = images.clone()
    got = data.normalised(images)
    assert got.dtype == torch.float32
    assert torch.equal(images, before)
    for channel in range(3):
        expected = (before[:, channel].double() - data.mean[channel].double()) / data.std[channel].double()
        torch.testing.assert_close(got[:, channel].double(), expected, rtol=0, atol=1e-6)
    whole = data.normalised(data.train.images)
    torch.testing.assert_close(whole.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(whole.std((0, 2, 3), correction=0), torch.ones(3), rtol=0, atol=1e-4)


def test_a_data_set_moves_as_a_whole(tmp_path):
    write(tmp_path, ten())
    data = cifar10(tmp_path, download=False)
    moved = data.to("meta")
    parts = (moved.train, moved.validation, moved.test)
    tensors = [moved.mean, moved.std, *(part.images for part in parts), *(part.labels for part in parts)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.normalised(moved.train.images[:2]).device.type == "meta"
    assert data.normalised(moved.train.images[:2]).device.type == "meta"
    assert moved.classes == 10
    assert_is_ten(data)


# ---- refusals


def test_missing_files_are_named_with_where_to_put_and_to_get_them(tmp_path):
    write(tmp_path / "data", ten(), ("data_batch_2.bin", "test_batch.bin"))
    with pytest.raises(DataError) as caught:
        cifar10(tmp_path / "data", download=False)
    root = tmp_path / "data"
    assert str(caught.value).splitlines() == [
        f"CIFAR-10, binary version is not complete in {root}: missing {TEN[0]}, {TEN[2]}, {TEN[3]}, {TEN[4]}.",
        f"Put the files {', '.join(TEN_FILES)}, or the archive cifar-10-binary.tar.gz that contains them, "
        f"into {root} or {root / 'cifar-10-batches-bin'}.",
        "They are published at https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz.",
        "To use another folder, pass --data DIR or set $KEEPK_DATA.",
        "The download is switched off (download=False).",
    ]


def test_a_folder_that_is_not_there_is_not_made_without_a_download(tmp_path):
    message = r"CIFAR-100, binary version is not complete in .*: missing train.bin, test.bin\.(.|\n)*cifar-100-binary"
    with pytest.raises(DataError, match=message):
        cifar100(tmp_path / "nowhere", download=False)
    assert not (tmp_path / "nowhere").exists()


def test_a_bad_file_is_named(tmp_path):
    write(tmp_path, ten())
    (tmp_path / "data_batch_4.bin").write_bytes(bytes(3072))
    with pytest.raises(DataError, match=r"data_batch_4\.bin: is truncated, .* got 3,072 bytes"):
        cifar10(tmp_path, download=False)


def test_a_bad_file_in_an_archive_is_named(tmp_path):
    files = ten() | {"data_batch_4.bin": batch(0, (11,))}
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive(files))
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz \(data_batch_4\.bin\): is damaged: .* got 11 in"):
        cifar10(tmp_path, download=False)


def test_an_archive_of_something_else_is_refused(tmp_path):
    files = {name: made for name, made in ten().items() if name != "data_batch_3.bin"}
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive(files))
    message = (
        r"tar.gz: is not the published cifar-10-binary.tar.gz: expected data_batch_1.bin.*, got no data_batch_3.bin\."
    )
    with pytest.raises(DataError, match=message):
        cifar10(tmp_path, download=False)


def test_an_archive_that_is_none_is_refused(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"<html>not found</html>" * 100)
    with pytest.raises(
        DataError, match=r"cifar-10-binary\.tar\.gz: is not an archive: expected a complete \.tar\.gz file"
    ):
        cifar10(tmp_path, download=False)


def test_an_archive_cut_short_or_damaged_is_refused(tmp_path):
    whole = archive(ten())
    path = tmp_path / "cifar-10-binary.tar.gz"
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 1
    for content in (*(whole[:stop] for stop in range(2, len(whole), len(whole) // 23)), whole[:-1], bytes(damaged)):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"tar.gz: is (damaged or truncated|not an archive): expected a complete"):
            cifar10(tmp_path, download=False)


def test_too_few_pictures_to_validate_are_refused(tmp_path):
    few = {name: batch(0, (1,)) for name in TEN_FILES}
    write(tmp_path, few)
    message = "CIFAR-10, binary version: 5 training images are too few to set a tenth aside for validation. Give"
    with pytest.raises(DataError, match=message):
        cifar10(tmp_path, download=False)


def test_files_without_pictures_are_refused(tmp_path):
    content = b"".join(bytes([1]) + bytes(1024) + b"\x07" * 2048 for _ in range(10))
    write(tmp_path, dict.fromkeys(TEN_FILES, (content,)))
    with pytest.raises(DataError, match=r"the training files contain no images: red is 0 in every pixel\. Delete"):
        cifar10(tmp_path, download=False)


# ---- the download


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A server with a small archive; yields its folder and its requests."""
    folder = tmp_path / "home"
    folder.mkdir()
    content = archive(ten())
    (folder / "cifar-10-binary.tar.gz").write_bytes(content)
    monkeypatch.setenv("no_proxy", "*")
    with serving(folder) as (address, asked):
        source = Source(f"{address}cifar-10-binary.tar.gz", len(content), hashlib.md5(content).hexdigest())
        monkeypatch.setattr(cifar, "CIFAR_10", replace(cifar.CIFAR_10, sources=(source,)))
        yield folder, asked


def test_the_archive_is_downloaded_once(tmp_path, home, capsys):
    root = tmp_path / "data"
    assert_is_ten(cifar10(root))
    assert {path.name for path in root.iterdir()} == {".lock", "cifar-10-binary.tar.gz"}
    assert "downloading cifar-10-binary.tar.gz" in capsys.readouterr().err
    assert_is_ten(cifar10(root))
    assert home[1] == ["/cifar-10-binary.tar.gz"]


def test_what_is_there_is_not_downloaded(tmp_path, home):
    write(tmp_path / "data", ten())
    assert_is_ten(cifar10(tmp_path / "data"))
    assert home[1] == []


def test_a_home_that_serves_something_else_leaves_nothing(tmp_path, home):
    path = home[0] / "cifar-10-binary.tar.gz"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=r"Put the files(.|\n)*The download failed: (.|\n)*expected md5"):
        cifar10(tmp_path / "data")
    assert {path.name for path in (tmp_path / "data").iterdir()} == {".lock"}


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "CIFAR_10", replace(cifar.CIFAR_10, largest=1 << 20))
    monkeypatch.setattr("keepk_paper.data.ARCHIVE_REST", 1 << 20)
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(packed.getvalue())
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz: is too large: .* 7,340,032 bytes"):
            cifar10(tmp_path, download=False)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    for path in tmp_path.iterdir():
        path.unlink()
    for name in cifar.CIFAR_10.files:
        (tmp_path / name).write_bytes(packed.getvalue())
    with pytest.raises(DataError, match=r"data_batch_1\.bin: is too large: expected at most 1,048,576 bytes"):
        cifar10(tmp_path, download=False)


def test_a_sparse_file_in_an_archive_is_refused(tmp_path):
    """Its header claims gigabytes of zeros, none of which are stored."""
    member = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
    sparse = {"major": "0", "minor": "1", "map": "0,0", "size": "9999999999"}
    member.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(b""))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(content.getvalue())
    with pytest.raises(DataError, match=r"\(data_batch_1\.bin\): is too large: .* 30,730,000 bytes, got 9,999"):
        cifar10(tmp_path, download=False)
