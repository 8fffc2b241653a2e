"""Globs over dotted names, and the names nearest to one that matched nothing."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase


def as_globs(globs: object) -> tuple[str, ...] | None:
    """One glob or several, as a tuple; None if it is neither.

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
    """Whether any of the globs matches the whole name.

    >>> matches("features.3.weight", ["fc*", "features.*"])
    True
    """
    return any(fnmatchcase(name, glob) for glob in globs)


def nearest(name: str, known: Sequence[str], most: int = 3) -> str:
    """The known names that look most like `name`, or the first few, for an error's last words."""
    close = get_close_matches(name, known, n=most, cutoff=0.4) or list(known[:most])
    return ", ".join(repr(candidate) for candidate in close) or "none at all"
