"""CIFAR-10 and CIFAR-100: 45,000 images for training, 5,000 for validation, 10,000 for testing.

Read from the binary version, because the Python version is pickled.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from keepk.paper.archives import Published, Source
from keepk.paper.data import Split, bad_file
from keepk.paper.pictures import Pictures, in_parts

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
