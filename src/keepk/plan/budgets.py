"""Budgets: bounds on the cost of the whole model, in multiply-accumulates (MACs) or parameters.

A float below 1 is a share of the dense model's cost, an int is the cost itself:

>>> Budget("macs", 0.5).target(1_000), Budget("macs", 700).target(1_000)
(500, 700)
"""

from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import floor, isfinite
from numbers import Integral, Real
from typing import Literal, TypeAlias

from keepk.errors import SpaceError
from keepk.plan.names import shown

Cost: TypeAlias = Literal["macs", "parameters"]
COSTS: tuple[Cost, ...] = ("macs", "parameters")
WORDS = {"macs": "MACs", "parameters": "parameters"}


@dataclass(frozen=True)
class Budget:
    """A bound on the cost of the whole model, as the user wrote it.

    Attributes:
        cost: The bounded cost: "macs", per sample, or "parameters".
        amount: A share of the dense model's cost, between 0 and 1, or the bound itself, an int of at least 2.
        shared: Whether all spaces with this budget share it, as they would share one of the `Pruner`.
    """

    cost: Cost
    amount: int | float
    shared: bool = False

    def __str__(self) -> str:
        return f"{self.cost}={self.amount}"

    def target(self, dense: int) -> int:
        """The bound for a model that costs `dense`; a share is rounded down, exact in the decimals that were written.

        >>> Budget("macs", 0.29).target(100), int(0.29 * 100)
        (29, 28)
        """
        if isinstance(self.amount, int):
            return self.amount
        return floor(dense * Fraction(str(self.amount)))


def checked_budget(where: str, macs: object, parameters: object) -> Budget | None:
    """The budget that a user passed as ``macs=`` or ``parameters=``; None if neither was passed.

    Args:
        where: The function or space that it was passed to, for errors.
        macs: The value of ``macs=``.
        parameters: The value of ``parameters=``.

    Raises:
        SpaceError: Both were passed, or the number is neither a share between 0 and 1 nor an int of at least 2.

    >>> print(checked_budget("Pruner", None, 0.5))
    parameters=0.5
    >>> checked_budget("Pruner", 1.0, None)
    Traceback (most recent call last):
        ...
    keepk.errors.SpaceError: Pruner: macs=1.0 would be the dense model, or a single MAC. Pass a float below 1 for a \
share of the dense model, such as macs=0.5, or an int of at least 2 for a number of MACs.
    """
    if macs is not None and parameters is not None:
        raise SpaceError(
            f"{where}: got both macs={shown(macs)} and parameters={shown(parameters)}. Pass exactly one of them."
        )
    cost, amount = COSTS[0] if parameters is None else COSTS[1], macs if parameters is None else parameters
    return None if amount is None else Budget(cost, _checked_amount(where, cost, amount))


def _checked_amount(where: str, cost: Cost, amount: object) -> int | float:
    what = f"{where}: {cost}={shown(amount)}"
    remedy = (
        f"Pass a float below 1 for a share of the dense model, such as {cost}=0.5, "
        f"or an int of at least 2 for a number of {WORDS[cost]}."
    )
    if isinstance(amount, bool) or not isinstance(amount, Real | Decimal):
        raise SpaceError(f"{what}: got {type(amount).__name__}. {remedy}")
    if not isfinite(amount):
        raise SpaceError(f"{what} is not a finite number. {remedy}")
    if amount == 1:
        raise SpaceError(f"{what} would be the dense model, or a single {WORDS[cost].removesuffix('s')}. {remedy}")
    if float(amount) <= 0:
        raise SpaceError(f"{what}: a budget is above 0. {remedy}")
    if isinstance(amount, Integral):
        return int(amount)
    if float(amount) > 1:
        raise SpaceError(f"{what}: got {type(amount).__name__}, which is a share of the dense model. {remedy}")
    return float(Fraction(str(amount)))  # the decimal that was written, for a float32 of numpy too
