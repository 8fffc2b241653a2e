"""Globs over dotted names, suggestions for names that matched nothing, and short reprs for error messages."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from reprlib import Repr
from typing import Any


def as_globs(globs: object) -> tuple[str, ...] | None:
    """One glob or several as a tuple; None if the argument is neither.

    >>> as_globs("fc*"), as_globs(["a", "b"]), as_globs(3)
    (('fc*',), ('a', 'b'), None)
    """
    if isinstance(globs, str):
        return (globs,)
    if isinstance(globs, Iterable):
        patterns = tuple(globs)
        return patterns if all(isinstance(pattern, str) for pattern in patterns) else None
    return None


def matches(name: str, globs: Iterable[str]) -> bool:
    """Whether any of the globs matches the whole name; ``*`` also matches dots.

    >>> matches("features.3.weight", ["fc*", "features.*"])
    True
    """
    return any(fnmatchcase(name, glob) for glob in globs)  # not fnmatch, which ignores case on Windows


def nearest(name: str, known: Sequence[str], most: int = 3) -> str:
    """The known names most similar to `name`, or the first few, for the end of an error message."""
    close = get_close_matches(name, known, n=most, cutoff=0.4) or list(known[:most])
    return ", ".join(repr(candidate) for candidate in close) or "none at all"


class _Short(Repr):
    """A repr of bounded length, without the contents of modules and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = 6
        self.maxlevel = 3

    def repr_instance(self, x: Any, level: int) -> str:
        """A module by its class, a tensor or array by its shape, anything else by the beginning of its repr."""
        kind = type(x).__name__
        # Recognised by attributes, because this package imports neither torch nor numpy for it.
        if hasattr(type(x), "named_modules"):
            return f"<{kind}>"
        if hasattr(type(x), "shape") and hasattr(type(x), "dtype"):
            return f"<{kind} of shape {tuple(x.shape)}>"
        return super().repr_instance(x, level)

    def repr1(self, x: Any, level: int) -> str:
        # reprlib dispatches on the class name alone, so it would mistake a user's class called `list` for a list.
        plain = type(x).__module__ in ("builtins", "collections", "array")
        return super().repr1(x, level) if plain else self.repr_instance(x, level)


_SHORT = _Short()


def shown(value: object) -> str:
    """The repr of a value that a user passed, for an error message: on one line, at most 200 characters.

    >>> shown("fc*"), shown([1, 2]), shown(range(3)), shown(list(range(100)))
    ("'fc*'", '[1, 2]', 'range(0, 3)', '[0, 1, 2, 3, 4, 5, ...]')
    """
    return shortened(_SHORT.repr(value), 200)


def shortened(text: str, most: int = 400) -> str:
    """A text on one line, with its middle left out if it is longer than `most` characters.

    >>> shortened("one  two", 20), shortened("abcdefghijklmnopqrstuvwxyz", 11)
    ('one two', 'abcd...wxyz')
    """
    line = " ".join(text.split())
    half = (most - 3) // 2
    return line if len(line) <= most else f"{line[:half]}...{line[-half:]}"
