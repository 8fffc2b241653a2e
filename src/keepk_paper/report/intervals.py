"""The difference between two runs with a 95 % interval, paired by test picture or by seed.

With d_i the mean over the seeds of (wrong in the one run) - (wrong in the other) for test picture i, the difference of
the test errors is the mean of the d_i, and its standard error is their standard deviation over the root of their
number:

>>> pictures = over_pictures([[1, 1, 0, 0]], [[0, 1, 0, 0]])
>>> pictures.difference, round(pictures.high - pictures.difference, 2)
(25.0, 49.0)

The interval says how the difference would vary with other test pictures, for these trained networks. It does not
include the variation between seeds.
"""

from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keepk.errors import DataError
from keepk_paper.report.lines import Line

NORMAL = 1.959963984540054  # the 97.5 % quantile
# The same quantile of Student's t with 1, 2, ... degrees of freedom; for more than ten, that of ten is a little wide.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Interval:
    """A difference of errors in percent, and the ends of its 95 % interval.

    Attributes:
        difference: The mean difference.
        low: The lower end.
        high: The upper end.
        over: The kind of units that were paired: "pictures" or "seeds".
        units: How many of them there are.
    """

    difference: float
    low: float
    high: float
    over: str
    units: int


def over_pictures(wrong: ArrayLike, other: ArrayLike) -> Interval:
    """The interval of two arrays of flags, [seeds, pictures]."""
    paired = np.asarray(wrong, dtype=np.float64) - np.asarray(other, dtype=np.float64)
    by_picture = 100 * paired.mean(axis=0)
    difference = float(by_picture.mean())
    half = NORMAL * float(by_picture.std(ddof=1)) / sqrt(by_picture.size)
    return Interval(difference, difference - half, difference + half, "pictures", by_picture.size)


def over_seeds(errors: Sequence[float], others: Sequence[float]) -> Interval:
    """The interval of two lists of errors in percent, one per seed, by Student's t.

    >>> interval = over_seeds([2.0, 3.0], [1.0, 1.0])
    >>> interval.difference, round(interval.high, 2)
    (1.5, 7.85)
    """
    paired = [one - other for one, other in zip(errors, others, strict=True)]
    quantile = STUDENT[min(len(paired) - 1, len(STUDENT)) - 1]
    half = quantile * stdev(paired) / sqrt(len(paired))
    return Interval(mean(paired), mean(paired) - half, mean(paired) + half, "seeds", len(paired))


def paired(of: Sequence[Line], against: Sequence[Line]) -> Interval | None:
    """The interval of two runs, whose lines have the same seeds in the same order.

    Returns:
        Over the test pictures if all lines store which they got wrong, else over the seeds if there are several; None
        if neither is possible.
    """
    assert [line["seed"] for line in of] == [line["seed"] for line in against]
    if not of:
        return None
    if all("test_wrong" in line.record for line in (*of, *against)):
        flags = [[wrong_pictures(line) for line in lines] for lines in (of, against)]
        numbers = {len(one) for lines in flags for one in lines}
        if len(numbers) > 1:
            names = ", ".join(line.name for line in (*of, *against))
            raise DataError(f"report: {names} were tested on different numbers of pictures. Run them on the same data.")
        return over_pictures(*flags)
    if len(of) < 2:
        return None
    return over_seeds(*([line["test_error"] for line in lines] for lines in (of, against)))


def wrong_pictures(line: Line) -> NDArray[np.bool_]:
    """Which test pictures the run got wrong: bool [pictures].

    Raises:
        DataError: If the flags are not base64, or do not give the line's test error.
    """
    packed: Any = line["test_wrong"]
    try:
        flags = np.unpackbits(np.frombuffer(b64decode(packed, validate=True), np.uint8)).astype(bool)
    except (ValueError, TypeError):
        raise DataError(f"report: {line.name}: test_wrong is not base64. Remove or repair the line.") from None
    # Eight flags share a byte, so the last byte may be padded. The test error tells how many pictures there were.
    wrong = int(flags.sum())
    number = round(100 * wrong / line["test_error"]) if line["test_error"] else flags.size
    if not flags.size - 8 < number <= flags.size or flags[number:].any():
        raise DataError(
            f"report: {line.name}: test_wrong marks {wrong} of up to {flags.size} pictures, but test_error is "
            f"{line['test_error']} %. Remove or repair the line."
        )
    return flags[:number]
