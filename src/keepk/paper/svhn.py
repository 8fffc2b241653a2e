"""SVHN, cropped digits: the published training file divided into training and validation, and the test file."""

import zlib
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from keepk.errors import DataError
from keepk.paper.archives import Published, Source
from keepk.paper.data import Split, bad_file
from keepk.paper.pictures import Pictures, in_parts

HOME = "http://ufldl.stanford.edu/housenumbers"
SVHN = Published(
    title="SVHN, cropped digits",
    folder="svhn",
    files=("train_32x32.mat", "test_32x32.mat"),
    sources=(
        Source(f"{HOME}/train_32x32.mat", 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Source(f"{HOME}/test_32x32.mat", 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
    ),
    largest=1 << 28,  # 73,257 images of 3,072 bytes are 225 MB
)
CLASSES = 10
CHUNK = 1 << 20
COMPRESSED = 15  # miCOMPRESSED, an element of a MATLAB file that is compressed by zlib


def svhn(folder: str | Path | None = None, *, download: bool = True) -> Pictures:
    """Load SVHN from the published .mat files; missing files are downloaded.

    The validation set is the last tenth of the training file. Digits of one house number are neighbours in the file, so
    a random choice would put digits of the same photograph into both parts.

    Args:
        folder: The data folder (see `data_folder`).
        download: Whether missing files may be downloaded.

    Returns:
        The three parts, in memory, with `mirror` off.

    Raises:
        DataError: If a file is missing and cannot be downloaded, is damaged, or scipy is not installed.
    """
    _matlab_reader()  # fails without scipy, before a download of 246 MB
    contents = SVHN.read(folder, download=download)
    train, test = (read_digits(where, content) for where, content in contents.items())
    validates = torch.zeros_like(train.labels, dtype=torch.bool)
    validates[len(train) - len(train) // 10 :] = True
    return replace(in_parts(SVHN.title, train, validates, test, CLASSES), mirror=False)


def read_digits(where: str, content: bytes) -> Split:
    """Parse a MATLAB 5 file with images X [32, 32, 3, N] and labels y [N, 1], where 10 is the digit 0."""
    _refuse_more_than(where, content, SVHN.largest)
    arrays = _matlab_arrays(where, content)
    images, labels = (np.asarray(arrays.get(name)) for name in ("X", "y"))
    number = images.shape[-1] if images.ndim else 0
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, number) or number == 0:
        raise bad_file(where, "is not SVHN's", "X as uint8 [32, 32, 3, N]", _described(images))
    if labels.dtype.kind not in "ui" or labels.size != number:
        raise bad_file(where, "is not SVHN's", f"y as {number:,} integers", _described(labels))
    labels = labels.reshape(number).astype(np.int64)
    for place in np.flatnonzero((labels < 1) | (labels > CLASSES))[:1]:
        raise bad_file(where, "is damaged", f"a label from 1 to {CLASSES}", f"{labels[place]} at position {place:,}")
    pictures = np.ascontiguousarray(images.transpose(3, 2, 0, 1))
    return Split(torch.from_numpy(pictures), torch.from_numpy(labels % CLASSES))


def _refuse_more_than(where: str, content: bytes, largest: int) -> None:
    """Refuse a MATLAB file whose compressed elements expand to more than `largest` bytes.

    scipy decompresses an element as a whole, so a small crafted file could fill the memory.
    """
    order: Literal["little", "big"] = "big" if content[126:128] == b"MI" else "little"
    place, total = 128, 0  # elements start after a header of 128 bytes
    while place + 8 <= len(content):
        kind, size = (int.from_bytes(content[at : at + 4], order) for at in (place, place + 4))
        data = content[place + 8 : place + 8 + size]
        place += 8 + size
        if kind != COMPRESSED:
            continue
        unpacker = zlib.decompressobj()
        try:
            while data and total <= largest:
                total += len(unpacker.decompress(data, CHUNK))
                data = unpacker.unconsumed_tail
        except zlib.error:
            return  # scipy reports the damage in more detail
        if total > largest:
            raise bad_file(where, "is too large", f"at most {largest:,} bytes", "more, uncompressed")


def _matlab_arrays(where: str, content: bytes) -> dict[str, Any]:
    read = _matlab_reader()
    try:
        return read(BytesIO(content), variable_names=("X", "y"))
    except Exception as error:  # scipy raises errors of many types on damaged files
        raise bad_file(where, "is damaged or truncated", "a complete MATLAB 5 file", f"{error!r}") from error


def _matlab_reader() -> Callable[..., dict[str, Any]]:
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]  # noqa: PLC0415 - the extra keepk[demo]
    except ModuleNotFoundError:
        message = 'SVHN: scipy, which reads its .mat files, is not installed. Run: pip install "keepk[demo]"'
        raise DataError(message) from None
    read: Callable[..., dict[str, Any]] = loadmat
    return read


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype.name} {list(array.shape)}" if array.ndim else "nothing of that name"
