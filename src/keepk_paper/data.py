"""The data folder, MNIST, and data sets that are published as several files.

MNIST has 50,000 images for training, 10,000 for validation and 10,000 for testing. `Published` reads a data set of
several files from the data folder, loose or inside their archive, and downloads missing ones.
"""

import gzip
import os
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod, sqrt
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from keepk.errors import DataError
from keepk_paper.download import fetch, progress_bar

IDX_DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype("u1"),
    0x09: np.dtype("i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
IDX_MAX_DIMS = 32
IDX_MAX_BYTES = 2 << 30
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True, eq=False)
class Split:
    """Images [N, ...], as float32 or uint8, and their classes as int64 [N]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, number: int) -> "Split":
        """The first images and their labels."""
        return Split(self.images[:number], self.labels[:number])

    def to(self, device: torch.device | str) -> "Split":
        """Copy the images and labels to another device."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Mnist:
    """MNIST, with the published training file divided into a training and a validation part.

    Images are float32 [N, 1, 28, 28], normalised with the mean and standard deviation of the training part.
    """

    train: Split
    validation: Split
    test: Split

    def to(self, device: torch.device | str) -> "Mnist":
        """Copy the data set to another device."""
        return Mnist(*(part.to(device) for part in (self.train, self.validation, self.test)))

    def training_batch(self, rows: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002 - `Pictures` draws from it
        """The network's input for these training images. MNIST is not augmented, so nothing is random."""
        return self.train.images[rows]

    def seen(self, images: Tensor) -> Tensor:
        """The network's input for images, which are normalised already."""
        return images


@dataclass(frozen=True)
class IdxFile:
    """One published IDX file: the shape of its array, and the size and MD5 of the gzip file that mirrors serve."""

    name: str
    shape: tuple[int, ...]
    packed_size: int
    packed_md5: str

    @property
    def spellings(self) -> tuple[str, ...]:
        """The names under which the file is distributed: `-idx3` or `.idx3`, raw or gzipped."""
        names = (self.name, self.name.replace("-idx", ".idx"))
        return (*names, *(f"{name}.gz" for name in names))


MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
MNIST_FILES = (
    IdxFile("train-images-idx3-ubyte", (60_000, 28, 28), 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    IdxFile("train-labels-idx1-ubyte", (60_000,), 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
    IdxFile("t10k-images-idx3-ubyte", (10_000, 28, 28), 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
    IdxFile("t10k-labels-idx1-ubyte", (10_000,), 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
)
MNIST_PLACES = (".", "mnist", "MNIST/raw")  # the last is where torchvision puts them
MNIST_CLASSES = 10
MNIST_TRAIN = 50_000


def data_folder(folder: str | Path | None = None) -> Path:
    """The data folder: `folder` if given, else `$KEEPK_DATA`, else `keepk` in the user's cache.

    >>> print(data_folder("pictures"))
    pictures
    """
    if folder is not None:
        return Path(folder).expanduser()
    if named := os.environ.get("KEEPK_DATA"):
        return Path(named).expanduser()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else Path.home() / ".cache") / "keepk"


def mnist(folder: str | Path | None = None, *, download: bool = True) -> Mnist:
    """Load MNIST from the published files; missing files are downloaded.

    The validation set is the last 10,000 images of the training file. All images are normalised with the mean and
    standard deviation m, s of the 50,000 training images: x -> (x - m) / s.

    Args:
        folder: The data folder (see `data_folder`).
        download: Whether missing files may be downloaded.

    Returns:
        The three parts, in memory.

    Raises:
        DataError: If a file is missing and cannot be downloaded, or is not the published one.
    """
    paths = _mnist_paths(data_folder(folder), download=download)
    images, labels, test_images, test_labels = map(_read_published, paths, MNIST_FILES)
    for path, values in ((paths[1], labels), (paths[3], test_labels)):
        _check_labels(path, values)
    mean, std = mean_and_std(images[:MNIST_TRAIN])
    if std == 0:
        raise bad_file(paths[0], "is not MNIST", "images", f"the value {mean:.0f} in every pixel")

    def split(pixels: Tensor, classes: Tensor) -> Split:
        return Split(pixels.to(torch.float32).sub_(mean).div_(std).unsqueeze(1), classes.to(torch.int64))

    return Mnist(
        train=split(images[:MNIST_TRAIN], labels[:MNIST_TRAIN]),
        validation=split(images[MNIST_TRAIN:], labels[MNIST_TRAIN:]),
        test=split(test_images, test_labels),
    )


def read_idx(path: str | Path, largest: int = IDX_MAX_BYTES) -> NDArray[Any]:
    """Read the array in an IDX file.

    An IDX file is 00 00, a type, the number of dimensions, each dimension as uint32, then the values, all big-endian.

    Args:
        path: The file, raw or gzipped; its first bytes tell which.
        largest: The maximum size in bytes of the uncompressed file. A larger one is refused before it is decompressed.

    Returns:
        The array, in the machine's byte order.

    Raises:
        DataError: If the file cannot be read, is not an IDX file, is truncated, or is too large.
    """
    path = Path(path)
    dtype, shape = _idx_header(path, _read(path, 4 + 4 * IDX_MAX_DIMS))
    offset, count = 4 + 4 * len(shape), prod(shape)
    expected = offset + count * dtype.itemsize
    content = (
        unpacked(path, largest) if expected > largest else _read(path, expected + 1)
    )  # one byte more than announced
    if len(content) != expected:
        wrong, got = "is truncated", f"{len(content):,}"
        if len(content) > expected:
            wrong, got = "has bytes after its end", "more"
        raise bad_file(path, wrong, f"{expected:,} bytes for {dtype.name} {list(shape)}", got)
    values = np.frombuffer(content, dtype, count, offset)
    return values.reshape(shape).astype(dtype.newbyteorder("="))


def unpacked(path: Path, largest: int) -> bytes:
    """Read a file, decompressed if it is gzipped; refuse it if it has more than `largest` bytes.

    A gzip file of a few kilobytes can expand to gigabytes, so at most `largest` bytes are ever in memory.
    """
    content = _read(path, largest + 1)
    if len(content) > largest:
        raise bad_file(path, "is too large", f"at most {largest:,} bytes", "more")
    return content


def _read(path: Path, number: int) -> bytes:
    """The first `number` bytes of a file, decompressed if it is gzipped; all of them if there are fewer."""
    try:
        with path.open("rb") as file:
            packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            file.seek(0)
            source = gzip.GzipFile(fileobj=file) if packed else file
            return _at_most(number, cast("IO[bytes]", source))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise bad_file(path, "is damaged or truncated", "a complete gzip file", str(error)) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}). Check the path and its permissions.") from error


def _at_most(number: int, source: IO[bytes]) -> bytes:
    content = bytearray()
    # In pieces, because a single read would allocate the whole limit first.
    while len(content) < number and (piece := source.read(min(1 << 20, number - len(content)))):
        content += piece
    return bytes(content)


def bad_file(path: Path | str, wrong: str, expected: str, got: str) -> DataError:
    """The error for a wrong data file: what is wrong, what was expected, what was found, and what to do."""
    return DataError(f"{path}: {wrong}: expected {expected}, got {got}. Delete it and download it again.")


def mean_and_std(pixels: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of uint8 values, from exact integer sums.

    Float sums over millions of pixels depend on the order of summation, and with them every later result.

    >>> mean_and_std(torch.tensor([0, 0, 3, 3], dtype=torch.uint8))
    (1.5, 1.5)
    """
    counts = torch.bincount(pixels.flatten(), minlength=256)
    values = torch.arange(256, device=counts.device)
    number, total = pixels.numel(), int(counts @ values)
    return total / number, sqrt(number * int(counts @ values**2) - total**2) / number


def _idx_header(path: Path, content: bytes) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and shape in the header of an IDX file."""
    magic = content[:4]
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in IDX_DTYPES or magic[3] > IDX_MAX_DIMS:
        types = ", ".join(f"{code:02x}" for code in IDX_DTYPES)
        expected = f"the first bytes 00 00, a type ({types}), at most {IDX_MAX_DIMS} dimensions"
        raise bad_file(path, "is not an IDX file", expected, magic.hex(" ") or "an empty file")
    dims = magic[3]
    if len(content) < 4 + 4 * dims:
        raise bad_file(path, "is truncated", f"{4 + 4 * dims} bytes of header", f"{len(content)}")
    shape = np.frombuffer(content, ">u4", dims, 4)
    return IDX_DTYPES[magic[2]], tuple(shape.tolist())


def _read_published(path: Path, published: IdxFile) -> Tensor:
    """Read a published file; refuse it if its dtype or shape differ from the published ones."""
    # The limit allows for the widest dtype: a file of another dtype gets an error about its dtype, not its size.
    values = read_idx(path, 4 + 4 * IDX_MAX_DIMS + 8 * prod(published.shape))
    if values.dtype != np.uint8 or values.shape != published.shape:
        expected, got = f"uint8 {list(published.shape)}", f"{values.dtype.name} {list(values.shape)}"
        raise bad_file(path, f"is not the published {published.name}", expected, got)
    return torch.from_numpy(values)


def _check_labels(path: Path, labels: Tensor) -> None:
    if (highest := int(labels.max())) >= MNIST_CLASSES:
        raise bad_file(path, "is not MNIST", f"labels from 0 to {MNIST_CLASSES - 1}", f"the label {highest}")


def _mnist_paths(root: Path, *, download: bool) -> tuple[Path, ...]:
    """The paths of `MNIST_FILES`, after downloading the missing ones."""
    if not download and _missing(root):
        raise _not_found(root, "is switched off (download=False).")
    try:
        return tuple(_find(root, file) or _fetch(root / "mnist", file) for file in MNIST_FILES)
    except DataError as error:
        raise _not_found(root, f"failed: {error}") from error


def _missing(root: Path) -> list[str]:
    return [file.name for file in MNIST_FILES if _find(root, file) is None]


def _find(root: Path, file: IdxFile) -> Path | None:
    candidates = (root / place / name for place in MNIST_PLACES for name in file.spellings)
    return next((path for path in candidates if path.is_file()), None)


def _fetch(folder: Path, file: IdxFile) -> Path:
    name = f"{file.name}.gz"
    urls = [mirror + name for mirror in MNIST_MIRRORS]
    with progress_bar(name) as progress:
        return fetch(name, urls, size=file.packed_size, folder=folder, md5=file.packed_md5, progress=progress)


def _not_found(root: Path, download: str) -> DataError:
    """The error that says which files to put where, and why they were not downloaded."""
    return DataError(
        f"MNIST is not complete in {root}: missing {', '.join(_missing(root))}.\n"
        f"Put the four files {', '.join(file.name for file in MNIST_FILES)}, raw or .gz, "
        f"into {' or '.join(str(root / place) for place in MNIST_PLACES)}.\n"
        f"They are published at {' and '.join(MNIST_MIRRORS)} (add .gz to the name).\n"
        "To use another folder, pass --data DIR or set $KEEPK_DATA.\n"
        f"The download {download}"
    )


ARCHIVE_REST = 1 << 24  # bytes for tar headers and files that are not read, such as batches.meta.txt


@dataclass(frozen=True)
class Source:
    """A published file, and the size and checksum that a download must have.

    Attributes:
        url: Where it is published.
        size: Bytes.
        md5: In hexadecimal.
    """

    url: str
    size: int
    md5: str

    @property
    def name(self) -> str:
        """The name of the file.

        >>> Source("https://example.org/digits.tar.gz", 10, "").name
        'digits.tar.gz'
        """
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Published:
    """A data set of several files.

    Args:
        title: The name of the data set, for errors.
        folder: The subfolder of the data folder for downloaded files; files in the data folder itself are found too.
        files: The names of the files.
        sources: The downloads: each file, or one archive with all of them, which is read without extracting it.
        largest: The maximum size in bytes of each uncompressed file. Larger ones are refused before they fill memory.
    """

    title: str
    folder: str
    files: tuple[str, ...]
    sources: tuple[Source, ...]
    largest: int

    @property
    def archive(self) -> str | None:
        """The name of the archive, or None if the files are published one by one."""
        return next((source.name for source in self.sources if source.name.endswith(".tar.gz")), None)

    def read(self, folder: str | Path | None = None, *, download: bool = True) -> dict[str, bytes]:
        """Read all files. Loose files take precedence over the archive; missing files are downloaded.

        Args:
            folder: The data folder (see `data_folder`).
            download: Whether missing files may be downloaded.

        Returns:
            The content of each of `files`, by the path at which it was found.

        Raises:
            DataError: If a file is missing and cannot be downloaded, is damaged, or is too large.
        """
        root = data_folder(folder)
        if self._missing(root) and self._find_archive(root) is None:
            self._download(root, allowed=download)
        if self._missing(root):
            return self._from_archive(root)
        paths = [path for name in self.files if (path := self._find(root, name))]
        return {str(path): unpacked(path, self.largest) for path in paths}

    def _missing(self, root: Path) -> list[str]:
        return [name for name in self.files if self._find(root, name) is None]

    def _find(self, root: Path, name: str) -> Path | None:
        return next((path for place in (".", self.folder) if (path := root / place / name).is_file()), None)

    def _find_archive(self, root: Path) -> Path | None:
        return self._find(root, self.archive) if self.archive else None

    def _download(self, root: Path, *, allowed: bool) -> None:
        if not allowed:
            raise self._not_found(root, "is switched off (download=False).")
        target = root if self.archive else root / self.folder
        try:
            for source in self.sources:
                if self._find(root, source.name) is None:
                    _fetch_archive(source, target)
        except DataError as error:
            raise self._not_found(root, f"failed: {error}") from error

    def _not_found(self, root: Path, download: str) -> DataError:
        """The error that says which files to put where, and why they were not downloaded."""
        places = f"{root} or {root / self.folder}"
        archive = f", or the archive {self.archive} that contains them," if self.archive else ""
        return DataError(
            f"{self.title} is not complete in {root}: missing {', '.join(self._missing(root))}.\n"
            f"Put the files {', '.join(self.files)}{archive} into {places}.\n"
            f"They are published at {' and '.join(source.url for source in self.sources)}.\n"
            "To use another folder, pass --data DIR or set $KEEPK_DATA.\n"
            f"The download {download}"
        )

    def _from_archive(self, root: Path) -> dict[str, bytes]:
        archive = self._find_archive(root)
        assert archive is not None  # `read` found it or downloaded it
        try:
            content = unpacked(archive, len(self.files) * self.largest + ARCHIVE_REST)
            members = _members(archive, content, self.files, self.largest)
        except tarfile.TarError as error:
            raise bad_file(archive, "is not an archive", "a complete .tar.gz file", str(error)) from error
        if absent := [name for name in self.files if name not in members]:
            got = f"no {', '.join(absent)}"
            raise bad_file(archive, f"is not the published {self.archive}", ", ".join(self.files), got)
        return {f"{archive} ({name})": members[name] for name in self.files}


def _members(archive: Path, content: bytes, names: tuple[str, ...], largest: int) -> Mapping[str, bytes]:
    """The requested files of a tar archive by name, from any folder in it."""
    found = {}
    with tarfile.open(fileobj=BytesIO(content), mode="r:") as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            if name in names and member.isfile() and (file := tar.extractfile(member)):
                if member.size > largest:  # a sparse file of any size takes only a few bytes in the archive
                    raise bad_file(
                        f"{archive} ({name})", "is too large", f"at most {largest:,} bytes", f"{member.size:,}"
                    )
                found[name] = file.read()
    return found


def _fetch_archive(source: Source, folder: Path) -> None:
    with progress_bar(source.name) as progress:
        fetch(source.name, [source.url], size=source.size, folder=folder, md5=source.md5, progress=progress)
