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
    path = os.fspath(given)
    if not isinstance(path, str) or not path or not _can_be_named(path):
        raise FileError(f"{verb}: got {path!r} as the path, which no file can have. Give a name, such as 'out/net'.")
    return Path(path)


def _can_be_named(path: str) -> bool:
    """Whether the system can have a file of that name: no character in it is NUL, or half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
