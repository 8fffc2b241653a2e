"""Reading the numbers that users pass: counts are ints, shares are exact rationals.

`keep_count` is the only place where a share becomes a count. In floats, 6.5 % of 266,200 weights is 17,302.999...,
which floors to 17,302. The decimal that the user wrote gives 17,303. Plans consist of such floors, and an error of one
would make the last count miss K.
"""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from math import floor
from numbers import Integral, Rational, Real

from keepk.errors import KeepkError
from keepk.plan.names import shown


def exact_share(value: object, what: str, error: Callable[[str], KeepkError]) -> Fraction:
    """A share in [0, 1] as an exact rational of the decimal that the user wrote.

    >>> exact_share(0.935, "prune", KeepkError)
    Fraction(187, 200)
    """
    share = exact_number(value, what, error)
    if not 0 <= share <= 1:
        raise error(f"{what}={value}: a share lies between 0 and 1. Write 0.9 for 90 %.")
    return share


def exact_number(value: object, what: str, error: Callable[[str], KeepkError]) -> Fraction:
    """A finite, non-negative number as an exact rational of its decimals.

    Raises:
        KeepkError: Of the class `error`, if it is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        raise error(f"{what}={shown(value)}: got {type(value).__name__}. Pass a number.")
    try:
        # str(0.935) is the shortest decimal that gives this float, which is what the user wrote. Fraction(0.935) would
        # be the binary number 0.93500000000000005...
        number = Fraction(value) if isinstance(value, Rational) else Fraction(str(value))
    except ValueError:
        raise error(f"{what}={value}: not a finite number. Pass a number such as 0.9.") from None
    if number < 0:
        raise error(f"{what}={value}: negative. Pass a number of at least 0.")
    return number


def count(value: object, what: str, error: Callable[[str], KeepkError], *, least: int) -> int:
    """An int of at least `least`; bools and floats are refused.

    Raises:
        KeepkError: Of the class `error`, if it is not such an int.
    """
    # True is an int in Python and 0.9 rounds down to 0, but keep=True and keep=0.9 are mistakes. Integers of numpy and
    # torch are fine, hence Integral.
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{what}={shown(value)}: got {type(value).__name__}. Pass an int of at least {least}.")
    if value < least:
        raise error(f"{what}={value}: too small. Pass an int of at least {least}.")
    return int(value)


def keep_count(total: int, pruned: Fraction) -> int:
    """K = floor(M (1 - p)), in exact rationals.

    >>> keep_count(266_200, Fraction("0.935")), int(266_200 * (1 - 0.935))
    (17303, 17302)
    """
    return floor(total * (1 - pruned))
