"""Counts are ints, shares are exact: the one place where a user's number is read."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from math import floor
from numbers import Integral, Rational, Real

from keepk.errors import KeepkError
from keepk.plan.names import shown


def exact_share(value: object, what: str, error: Callable[[str], KeepkError]) -> Fraction:
    """A share in [0, 1], read as the decimal that the user wrote.

    >>> exact_share(0.935, "prune", KeepkError)
    Fraction(187, 200)
    """
    share = exact_number(value, what, error)
    if not 0 <= share <= 1:
        raise error(f"{what}={value}: a share lies between 0 and 1. Write 0.9 for 90 %.")
    return share


def exact_number(value: object, what: str, error: Callable[[str], KeepkError]) -> Fraction:
    """A finite, non-negative number as an exact rational of its decimals."""
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise error(f"{what}={shown(value)}: got {type(value).__name__}. Give a number.")
    try:
        number = Fraction(value) if isinstance(value, Rational) else Fraction(str(value))
    except ValueError:
        raise error(f"{what}={value}: not a finite number. Give a number such as 0.9.") from None
    if number < 0:
        raise error(f"{what}={value}: negative. Give a number of at least 0.")
    return number


def count(value: object, what: str, error: Callable[[str], KeepkError], *, least: int) -> int:
    """An int of at least `least`; a bool or a float is refused, even where Python would let it pass."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{what}={shown(value)}: got {type(value).__name__}. Give an int of at least {least}.")
    if value < least:
        raise error(f"{what}={value}: too small. Give an int of at least {least}.")
    return int(value)


def keep_count(total: int, pruned: Fraction) -> int:
    """K = floor(M (1 - p)), in exact rationals.

    >>> keep_count(266_200, Fraction("0.935")), int(266_200 * (1 - 0.935))
    (17303, 17302)
    """
    return floor(total * (1 - pruned))
