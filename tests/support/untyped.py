"""Arguments that the library's annotations forbid, for tests of how it treats them."""

from typing import Any


def untyped(value: object) -> Any:
    """`value` itself, which the type checker then accepts anywhere."""
    return value
