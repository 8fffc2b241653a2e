"""Data sets of colour images: CIFAR-10, CIFAR-100 and SVHN, and random crops of their batches.

Images are kept in memory as uint8 and converted to float batch by batch. CIFAR-10 and CIFAR-100 have 45,000 images for
training, 5,000 for validation and 10,000 for testing; they are read from the binary version, because the Python version
is pickled. SVHN is the version with cropped digits, whose training file is divided into training and validation.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from keepk.errors import DataError, KeepkError
from keepk_paper.data import Published, Source, Split, bad_file, mean_and_std


def crop_and_flip(images: Tensor, generator: torch.Generator, *, padding: int = 4, flip: bool = True) -> Tensor:
    """Shift each image of a batch by up to `padding` pixels in each direction, and mirror it with probability 1/2.

    Each image is padded with zeros and cropped to its original size at a random position. For uint8 images the padding
    is black; for normalised images it has the colour of the mean.

    Args:
        images: A batch [N, C, H, W] of any dtype; not modified.
        generator: The source of random numbers. They are drawn on its device, so that a CPU generator gives the same
            crops on every device.
        padding: The width of the padding.
        flip: Whether images may be mirrored (not for digits).

    Returns:
        A new batch of the same shape.

    Raises:
        KeepkError: If `images` is not a batch of images, or `padding` is negative.
    """
    if images.ndim != 4 or padding < 0:
        raise KeepkError(
            f"crop_and_flip: got images {list(images.shape)} and padding={padding}. "
            "Give a batch [N, C, H, W] and a padding of 0 or more."
        )
    number, _, height, width = images.shape

    def drawn(choices: int) -> Tensor:
        numbers = torch.randint(choices, (number,), generator=generator, device=generator.device)
        return numbers.to(images.device)

    top, left = drawn(2 * padding + 1), drawn(2 * padding + 1)
    framed = F.pad(images, (padding,) * 4)
    windows = framed.unfold(2, height, 1).unfold(3, width, 1)  # a view of all crops; the next line copies one each
    crops = windows[torch.arange(number, device=images.device), :, top, left]
    if not flip:
        return crops
    mirrored = drawn(2).bool()[:, None, None, None]
    return torch.where(mirrored, crops.flip(3), crops)


@dataclass(frozen=True, eq=False)
class Pictures:
    """A data set in three parts, with images as uint8 [N, 3, 32, 32].

    ::

        data = cifar10().to(device)
        for chosen in torch.split(torch.randperm(len(data.train)), 128):
            images = data.normalised(crop_and_flip(data.train.images[chosen], generator))
            loss = F.cross_entropy(model(images), data.train.labels[chosen])

    Args:
        train: The part that networks are trained on.
        validation: The part by which recipes are chosen.
        test: The part whose errors are reported.
        classes: The number of classes; labels are 0 .. classes - 1.
        mean: The mean of the training images by channel, [3].
        std: The standard deviation by channel, [3].
        mirror: Whether training images are mirrored at random. False for digits, whose meaning would change.
    """

    train: Split
    validation: Split
    test: Split
    classes: int
    mean: Tensor
    std: Tensor
    mirror: bool = True

    def normalised(self, images: Tensor) -> Tensor:
        """Normalise uint8 images to float32 by channel, (x - mean) / std, on the images' device."""
        mean, std = (values.to(images.device)[:, None, None] for values in (self.mean, self.std))
        return torch.sub(images, mean).div_(std)

    def training_batch(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """The network's input for these training images, cropped and mirrored at random."""
        return self.seen(crop_and_flip(self.train.images[rows], generator, flip=self.mirror))

    def seen(self, images: Tensor) -> Tensor:
        """The network's input for images, without augmentation."""
        # Convolutions are faster in this memory format, also on a CPU.
        return self.normalised(images).contiguous(memory_format=torch.channels_last)

    def to(self, device: torch.device | str) -> "Pictures":
        """Copy the data set to another device."""
        moved = {name: getattr(self, name).to(device) for name in ("train", "validation", "test", "mean", "std")}
        return replace(self, **moved)


def in_parts(title: str, published: Split, validates: Tensor, test: Split, classes: int) -> Pictures:
    """Divide the published training images by the mask `validates`, and compute the constants of normalisation.

    Raises:
        DataError: If no image is left for validation, or a channel is constant.
    """
    train, validation = (Split(published.images[rows], published.labels[rows]) for rows in (~validates, validates))
    if not len(validation):
        raise DataError(
            f"{title}: {len(published)} training images are too few to set a tenth aside for validation. "
            "Give files with more."
        )
    channels = [mean_and_std(train.images[:, channel]) for channel in range(3)]
    for name, (mean, std) in zip(("red", "green", "blue"), channels, strict=True):
        if std == 0:
            raise DataError(
                f"{title}: the training files contain no images: {name} is {mean:.0f} in every pixel. "
                "Delete them and download them again."
            )
    constants = torch.tensor(channels, dtype=torch.float32, device=train.images.device)
    return Pictures(train, validation, test, classes, constants[:, 0], constants[:, 1])


PICTURE = (3, 32, 32)
PICTURE_BYTES = 3 * 32 * 32
CIFAR_10 = Published(
    title="CIFAR-10, binary version",
    folder="cifar-10-batches-bin",
    files=(*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"),
    sources=(
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"
        ),
    ),
    largest=10_000 * (1 + PICTURE_BYTES),
)
CIFAR_10_LABELS = {"label": 10}
CIFAR_100 = Published(
    title="CIFAR-100, binary version",
    folder="cifar-100-binary",
    files=("train.bin", "test.bin"),
    sources=(
        Source(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"
        ),
    ),
    largest=50_000 * (2 + PICTURE_BYTES),
)
CIFAR_100_LABELS = {"coarse label": 20, "fine label": 100}


def cifar10(folder: str | Path | None = None, *, download: bool = True) -> Pictures:
    """Load CIFAR-10 from the published files; missing files are downloaded.

    The validation set is the last tenth of each class in the order of the files, 500 images per class.

    Args:
        folder: The data folder (see `data_folder`).
        download: Whether missing files may be downloaded.

    Returns:
        The three parts, in memory.

    Raises:
        DataError: If a file is missing and cannot be downloaded, or is damaged.
    """
    return _cifar(CIFAR_10, CIFAR_10_LABELS, folder, download=download)


def cifar100(folder: str | Path | None = None, *, download: bool = True) -> Pictures:
    """Load CIFAR-100 with its 100 fine classes; see `cifar10`. The validation set has 50 images per class."""
    return _cifar(CIFAR_100, CIFAR_100_LABELS, folder, download=download)


def read_records(where: str, content: bytes, labels: dict[str, int]) -> Split:
    """Parse the images of a binary file and their last label (for CIFAR-100, the fine one).

    Args:
        where: The file's name, for errors.
        content: Records of one byte for each of `labels`, then the red, green and blue plane of 1,024 bytes each, row
            by row.
        labels: The number of classes of each label, by name.

    Returns:
        Images as uint8 [N, 3, 32, 32].

    Raises:
        DataError: If there is an incomplete record or a label out of range.
    """
    record = len(labels) + PICTURE_BYTES
    if not content or len(content) % record:
        wrong = "is truncated, or is not the binary version"
        raise bad_file(where, wrong, f"complete records of {record:,} bytes", f"{len(content):,} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    for column, (name, classes) in enumerate(labels.items()):
        for number in np.flatnonzero(records[:, column] >= classes)[:1]:
            got = f"{records[number, column]} in record {number:,}"
            raise bad_file(where, "is damaged", f"a {name} from 0 to {classes - 1}", got)
    # A copy, because `frombuffer` gives a read-only view, of which torch warns.
    images = records[:, len(labels) :].copy().reshape(-1, *PICTURE)
    return Split(torch.from_numpy(images), torch.from_numpy(records[:, len(labels) - 1].astype(np.int64)))


def last_tenth_of_each_class(labels: Tensor) -> Tensor:
    """A mask of the training images used for validation: of the n images of a class, the last floor(n / 10).

    >>> last_tenth_of_each_class(torch.tensor([0, 1] * 10)).nonzero().flatten()
    tensor([18, 19])
    """
    chosen = torch.zeros_like(labels, dtype=torch.bool)
    for label in range(int(labels.max()) + 1):
        rows = torch.nonzero(labels == label).flatten()
        chosen[rows[len(rows) - len(rows) // 10 :]] = True
    return chosen


def _cifar(published: Published, labels: dict[str, int], folder: str | Path | None, *, download: bool) -> Pictures:
    contents = published.read(folder, download=download)
    *batches, test = (read_records(where, content, labels) for where, content in contents.items())
    images, classes = (torch.cat(parts) for parts in zip(*((one.images, one.labels) for one in batches), strict=True))
    number_of_classes = list(labels.values())[-1]
    return in_parts(published.title, Split(images, classes), last_tenth_of_each_class(classes), test, number_of_classes)


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
        from scipy.io import loadmat  # noqa: PLC0415 - the extra keepk[demo]
    except ModuleNotFoundError:
        message = 'SVHN: scipy, which reads its .mat files, is not installed. Run: pip install "keepk[demo]"'
        raise DataError(message) from None
    read: Callable[..., dict[str, Any]] = loadmat
    return read


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype.name} {list(array.shape)}" if array.ndim else "nothing of that name"
