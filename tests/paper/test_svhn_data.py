"""SVHN's MATLAB files are read exactly or refused."""

import hashlib
import struct
import sys
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepk.errors import DataError
from keepk_paper import pictures as module
from keepk_paper.pictures import read_digits, svhn

pytest.importorskip("scipy")
fixed = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],  # the first call imports scipy
)
HEADER = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
CODES = {"uint8": (9, 2), "int16": (10, 3), "float64": (6, 9)}


def element(kind, content):
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(name, array, *, packed):
    """An array as an element of a MAT-file, in MATLAB's column-major order."""
    kind, storage = CODES[array.dtype.name]
    body = element(6, struct.pack("<II", kind, 0)) + element(5, struct.pack(f"<{array.ndim}i", *array.shape))
    whole = element(14, body + element(1, name.encode()) + element(storage, array.tobytes(order="F")))
    if not packed:
        return whole
    squeezed = zlib.compress(whole)
    return struct.pack("<II", 15, len(squeezed)) + squeezed


def mat_file(pictures, digits, *, packed=False):
    """The file of images [N, 3, 32, 32] and their digits, where 10 means the digit 0."""
    labels = np.array([digit or 10 for digit in digits], np.uint8)[:, None]
    cube = pictures.transpose(2, 3, 1, 0)
    return HEADER + matrix("X", cube, packed=packed) + matrix("y", labels, packed=packed)


def made(seed, number):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (number, 3, 32, 32), np.uint8), rng.integers(0, 10, number).tolist()


@fixed
@given(digits=st.lists(st.integers(0, 9), min_size=1, max_size=4), seed=st.integers(0, 99), packed=st.booleans())
def test_a_file_gives_back_its_pictures_and_digits(digits, seed, packed):
    pictures = made(seed, len(digits))[0]
    got = read_digits("file", mat_file(pictures, digits, packed=packed))
    np.testing.assert_array_equal(got.images.numpy(), pictures, strict=True)
    assert got.images.is_contiguous()
    assert got.labels.tolist() == digits
    assert got.labels.dtype == torch.int64


WHOLE = {packed: mat_file(*made(0, 2), packed=packed) for packed in (False, True)}


@pytest.mark.parametrize("packed", [False, True])
@fixed
@given(data=st.data())
def test_a_file_cut_short_anywhere_never_gives_other_digits(packed, data):
    stop = data.draw(
        st.integers(0, len(WHOLE[packed]) - 1) | st.integers(0, 300) | st.integers(1, 100).map(lambda n: -n)
    )
    pictures, digits = made(0, 2)
    if -6 <= stop < 0 and not packed:  # only the padding of the last element is missing
        got = read_digits("file", WHOLE[packed][:stop])
        np.testing.assert_array_equal(got.images.numpy(), pictures, strict=True)
        assert got.labels.tolist() == digits
        return
    with pytest.raises(DataError, match=r"^file: is .*: expected .* Delete it and download it again\.$"):
        read_digits("file", WHOLE[packed][:stop])


@fixed
@given(st.binary(max_size=400) | st.binary(max_size=200).map(lambda tail: HEADER + tail))
def test_any_bytes_are_refused(content):
    with pytest.raises(DataError, match=r"file: is (damaged or truncated|not SVHN's): expected .*, got "):
        read_digits("file", content)


CUBE, DIGITS = np.zeros((32, 32, 3, 2), np.uint8), np.ones((2, 1), np.uint8)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (CUBE[:31], DIGITS, r"is not SVHN's: expected X as uint8 \[32, 32, 3, N\], got uint8 \[31, 32, 3, 2\]"),
        (CUBE.astype(np.int16), DIGITS, r"expected X as uint8 \[32, 32, 3, N\], got int16 \[32, 32, 3, 2\]"),
        (None, DIGITS, r"expected X as uint8 \[32, 32, 3, N\], got nothing of that name"),
        (CUBE, None, r"expected y as 2 integers, got nothing of that name"),
        (CUBE, DIGITS[:1], r"expected y as 2 integers, got uint8 \[1, 1\]"),
        (CUBE, DIGITS.astype(np.float64), r"expected y as 2 integers, got float64 \[2, 1\]"),
        (CUBE, DIGITS * 11, r"is damaged: expected a label from 1 to 10, got 11 at position 0"),
        (CUBE, DIGITS * np.array([[1], [0]], np.uint8), r"expected a label from 1 to 10, got 0 at position 1"),
    ],
    ids=["size", "type", "no X", "no y", "count", "type of y", "label 11", "label 0"],
)
def test_a_file_that_is_not_svhn_is_refused(images, labels, message):
    arrays = {"X": images, "y": labels}
    parts = [matrix(name, array, packed=False) for name, array in arrays.items() if array is not None]
    with pytest.raises(DataError, match=f"file: .*{message}. Delete it and download it again."):
        read_digits("file", HEADER + b"".join(parts))


# ---- the folder


@pytest.mark.parametrize("place", ["", "svhn"])
def test_the_last_tenth_of_the_training_file_is_for_validation(tmp_path, place):
    (tmp_path / place).mkdir(exist_ok=True)
    pictures, digits = made(1, 25)
    test_pictures, test_digits = made(2, 4)
    (tmp_path / place / "train_32x32.mat").write_bytes(mat_file(pictures, digits))
    (tmp_path / place / "test_32x32.mat").write_bytes(mat_file(test_pictures, test_digits, packed=True))
    data = svhn(tmp_path, download=False)
    assert not data.mirror  # a mirrored digit is not a digit
    parts = ((data.train, pictures[:23], digits[:23]), (data.validation, pictures[23:], digits[23:]))
    for part, images, labels in (*parts, (data.test, test_pictures, test_digits)):
        np.testing.assert_array_equal(part.images.numpy(), images, strict=True)
        assert part.labels.tolist() == labels
    assert data.classes == 10
    values = pictures[:23].transpose(1, 0, 2, 3).reshape(3, -1).astype(np.float64)
    np.testing.assert_allclose(data.mean.numpy(), values.mean(1), rtol=1e-6)
    np.testing.assert_allclose(data.std.numpy(), values.std(1), rtol=1e-6)


def test_missing_files_are_named_with_where_to_put_and_to_get_them(tmp_path):
    (tmp_path / "test_32x32.mat").write_bytes(WHOLE[False])
    with pytest.raises(DataError) as caught:
        svhn(tmp_path, download=False)
    assert str(caught.value).splitlines() == [
        f"SVHN, cropped digits is not complete in {tmp_path}: missing train_32x32.mat.",
        f"Put the files train_32x32.mat, test_32x32.mat into {tmp_path} or {tmp_path / 'svhn'}.",
        "They are published at http://ufldl.stanford.edu/housenumbers/train_32x32.mat and "
        "http://ufldl.stanford.edu/housenumbers/test_32x32.mat.",
        "To use another folder, pass --data DIR or set $KEEPK_DATA.",
        "The download is switched off (download=False).",
    ]


def test_only_the_file_that_is_missing_is_asked_for(tmp_path, monkeypatch):
    """A complete leftover of a download needs no server."""
    content = mat_file(*made(1, 10))
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn" / "train_32x32.mat.part").write_bytes(content)
    (tmp_path / "test_32x32.mat").write_bytes(WHOLE[False])
    train, test = module.SVHN.sources
    train = replace(train, size=len(content), md5=hashlib.md5(content).hexdigest())
    monkeypatch.setattr(module, "SVHN", replace(module.SVHN, sources=(train, test)))
    assert len(svhn(tmp_path).train) == 9
    assert (tmp_path / "svhn" / "train_32x32.mat").is_file()


def test_too_few_pictures_to_validate_are_refused(tmp_path):
    for name in ("train_32x32.mat", "test_32x32.mat"):
        (tmp_path / name).write_bytes(mat_file(*made(1, 9)))
    with pytest.raises(DataError, match="SVHN, cropped digits: 9 training images are too few"):
        svhn(tmp_path, download=False)


def test_without_scipy_nothing_is_downloaded(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name == "scipy" or name.startswith("scipy.")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r'SVHN: scipy, .* is not installed. Run: pip install "keepk\[demo\]"'):
        svhn(tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("order", ["little", "big"])
def test_a_packed_element_that_is_too_large_is_refused(monkeypatch, order):
    monkeypatch.setattr(module, "SVHN", replace(module.SVHN, largest=1 << 20))
    packed = zlib.compress(bytes(64 << 20))
    header = HEADER[:126] + (b"MI" if order == "big" else b"IM")
    content = header + (15).to_bytes(4, order) + len(packed).to_bytes(4, order) + packed
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"bomb\.mat: is too large: .* 1,048,576 bytes, got more"):
            read_digits("bomb.mat", content)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
