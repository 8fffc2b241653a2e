"""Where a user wants files to be."""

import os
from pathlib import Path

from keepk.errors import FileError


def place(given: object, verb: str, order: str) -> Path:
    """The path that was given; what is none is hardly ever more than arguments in the wrong order.

    >>> place(3, "save", "model, path")
    Traceback (most recent call last):
        ...
    keepk.errors.FileError: save: got int as the path. The order is model, path.
    """
    if not isinstance(given, str | os.PathLike):
        raise FileError(f"{verb}: got {type(given).__name__} as the path. The order is {order}.")
    return Path(given)
