"""Spaces: named, disjoint sets of units. Each has a separate K."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar, Literal

from keepk.errors import SpaceError
from keepk.plan.budgets import Budget, checked_budget
from keepk.plan.names import as_globs, shown
from keepk.plan.numbers import count, exact_share, keep_count
from keepk.plan.schedules import AnySchedule, OneShot, checked_schedule

# The metrics of keepk.metrics as they are written in a call, for errors about metrics that are passed as strings.
# Of the layer floors that were measured, the smallest that no longer hurts; see docs/decisions/0020.
BUDGET_FLOOR = 0.1
OF_WEIGHTS = ("magnitude", "lamp", "random(seed=0)", "fisher(statistics)", "wanda(statistics)")
OF_CHANNELS = (
    "l1",
    "l2",
    "l1_l2",
    "product",
    "outgoing",
    "bn_scale",
    'norm("l2")',
    "blend(alpha=0.5)",
    "random(seed=0)",
    "taylor(statistics)",
    "fisher(statistics)",
    'activation(statistics, kind="mean")',
)


@dataclass(frozen=True)
class Space:
    """The fields that both kinds of space have in common.

    Attributes:
        select: Globs over the names of parameters or modules.
        exclude: Globs over the same names, which are left out.
        keep: K, the number of units to keep; None if `prune` or a budget says how many.
        prune: The share of units to prune; None if `keep` or a budget says how many.
        name: The name of the space.
        metric: The function that scores the units; None for the default.
        schedule: The number of units to keep after each epoch.
        layer_floor: The least number of units to keep in each layer.
        units: "weights" or "channels".
    """

    select: tuple[str, ...]
    exclude: tuple[str, ...]
    keep: int | None
    prune: float | None
    name: str
    metric: Callable[..., Any] | None
    schedule: AnySchedule
    layer_floor: int | float
    units: ClassVar[str]

    def count_kept(self, total: int) -> int:
        """K, the number of units to keep in a space of `total` units.

        Raises:
            SpaceError: The space would keep no unit, or more units than there are.
        """
        if self.prune is not None:
            keep = keep_count(total, exact_share(self.prune, f"space {self.name!r}: prune", SpaceError))
            if keep < 1:
                raise SpaceError(
                    f"space {self.name!r}: prune={self.prune} of {total} {self.units} keeps none. "
                    f"Prune less, or pass keep=."
                )
            return keep
        assert self.keep is not None  # asked only of spaces without a budget, which have exactly one of the two
        if self.keep > total:
            raise SpaceError(
                f"space {self.name!r}: keep={self.keep}, but {list(self.select)} matches only {total} {self.units}. "
                f"Choose keep <= {total} or widen the pattern."
            )
        return self.keep


@dataclass(frozen=True)
class WeightSpace(Space):
    """A space of single weights, made by `weights`."""

    layer_floor: int
    units: ClassVar[str] = "weights"


@dataclass(frozen=True)
class ChannelSpace(Space):
    """A space of channels, made by `channels`.

    Attributes:
        at: "output" or "input", the side on which channels are counted.
        round_to: The width of each layer that loses channels is a multiple of this number; "auto" if the layer's own
            width says of which.
        lossy: Whether lossy channels are selected too.
        budget: The bound on the model's cost that says how many channels are kept, in place of `keep` and `prune`.
            Without any of the three, the budget is that of the `Pruner`.
        per_layer: Whether every layer keeps the same share of its channels.
    """

    at: Literal["output", "input"]
    round_to: int | Literal["auto"] | None
    lossy: bool
    budget: Budget | None = None
    per_layer: bool = False
    units: ClassVar[str] = "channels"

    @property
    def has_budget(self) -> bool:
        """Whether a budget says how many channels are kept: its own, or that of the `Pruner`."""
        return self.keep is None and self.prune is None

    def floor_of(self, width: int) -> int:
        """The least number of channels to keep in a layer that had `width` of them when the run began.

        >>> channels("*", keep=20, layer_floor=0.1).floor_of(30), channels("*", keep=20, layer_floor=2).floor_of(30)
        (3, 2)
        """
        if isinstance(self.layer_floor, int):
            return self.layer_floor
        # Computed in decimals: in floats, 0.1 * 30 is above 3.
        return ceil(width * exact_share(self.layer_floor, f"space {self.name!r}: layer_floor", SpaceError))


def weights(
    select: str | Sequence[str],
    *,
    keep: int | None = None,
    prune: float | None = None,
    exclude: str | Sequence[str] = (),
    name: str | None = None,
    metric: Callable[..., Any] | None = None,
    schedule: AnySchedule = OneShot(),  # noqa: B008 - a frozen value
    layer_floor: int = 0,
) -> WeightSpace:
    """A space of single weights, found by name (DSC-1).

    Args:
        select: A glob, or several, over ``model.named_parameters()``: ``"*"``, ``"fc*.weight"``.
        keep: K, the number of weights to keep at the end of the plan. Met exactly.
        prune: The share of weights to prune, in place of `keep`: K = floor(M (1 - prune)), computed in decimals, so
            that ``prune=0.9`` of 1,000 weights keeps 100.
        exclude: Globs over the same names; the parameters that they match are left out of the space.
        name: The name of the space in plans, reports and phases. Default: the globs.
        metric: The function that scores the weights, see `keepk.metrics`. None means magnitude.
        schedule: The number of weights to keep after each epoch: a schedule, a callable or a list of ints.
        layer_floor: The least number of weights to keep in each tensor of two or more dimensions. K is still met.

    Returns:
        A frozen description of the space, for `Pruner` and `Phase`. It is matched with a model when a `Pruner` is made.

    Raises:
        SpaceError: An argument has the wrong type or value, or `keep` and `prune` are both given or both missing.

    >>> weights("fc*", prune=0.98).name
    'fc*'
    >>> weights("fc*", keep=100, prune=0.98)
    Traceback (most recent call last):
        ...
    keepk.errors.SpaceError: space 'fc*': got both keep=100 and prune=0.98. Pass exactly one of them.

    """
    globs, excluded = _globs("weights", select, exclude, such_as="fc*")
    called = _called("weights", name, globs)
    keep = _checked_count(called, keep, prune)
    _refuse_non_metric(called, metric, OF_WEIGHTS)
    schedule = checked_schedule(schedule, f"space {called!r}: schedule")
    layer_floor = count(layer_floor, f"space {called!r}: layer_floor", SpaceError, least=0)
    return WeightSpace(globs, excluded, keep, prune, called, metric, schedule, layer_floor)


def channels(
    select: str | Sequence[str],
    *,
    keep: int | None = None,
    prune: float | None = None,
    macs: float | None = None,
    parameters: float | None = None,
    exclude: str | Sequence[str] = (),
    at: Literal["output", "input"] = "output",
    metric: Callable[..., Any] | None = None,
    schedule: AnySchedule = OneShot(),  # noqa: B008 - a frozen value
    name: str | None = None,
    layer_floor: int | float | None = None,
    round_to: int | Literal["auto"] | None = None,
    per_layer: bool = False,
    lossy: bool = False,
) -> ChannelSpace:
    """A space of channels, found by the names of modules (DSC-2).

    A channel is anything that is removed as a whole: a convolution filter, a hidden neuron, an attention head or a
    group of heads, an RNN cell, a hidden unit of a transformer's MLP. `keepk.inspect` lists them.

    Args:
        select: A glob, or several, over ``model.named_modules()``: ``"features.*"``, ``"*.linear1"``.
        keep: K, the number of channels to keep at the end of the plan. Met exactly, even where layers must have equal
            counts. Channels that cannot be removed (one that the model selects by index, the only one of a layer) are
            not counted: they stay in addition to K, and a `keepk.KeepkWarning` lists them.
        prune: The share of channels to prune, in place of `keep`: K = floor(M (1 - prune)), computed in decimals.
        macs: A budget in place of `keep`: a bound on the multiply-accumulates of the whole model, per sample. A float
            below 1 is a share of the dense model, which is the model given to the `Pruner`; an int is the number
            itself. Each event removes the channels that rank lowest until the model is within the budget, and none
            after that. The schedule lowers the bound from the dense cost to the budget.
        parameters: The same for the number of parameters of the whole model.
        exclude: Globs over the same names; the channels of the modules that they match are left out of the space.
        at: "output" selects the channels that the modules produce, "input" those that they read. With "input", a
            channel that several BatchNorms of a DenseNet read counts once for each of them.
        metric: The function that scores the channels, see `keepk.metrics`. None means the paper's blend where every
            layer has a BatchNorm, and `product` otherwise.
        schedule: The number of channels to keep after each epoch: a schedule, a callable or a list of ints. With a
            budget, the bound on the cost after each epoch.
        name: The name of the space in plans, reports and phases. Default: the globs.
        layer_floor: The least number of channels to keep in each layer. An int is a count; a float below 1 is a share
            of the layer's width when the `Pruner` was made, rounded up. K is still met. None means 1, and a tenth
            (0.1) under a budget, which would otherwise prefer to empty the layers whose scores are low.
        round_to: Each layer keeps either all of its channels, or a number that makes its width a multiple of this.
            "auto", under a budget only, chooses widths that kernels of CPUs like, for each layer: multiples of 16 in
            float32, of 8 or 4 in layers of fewer than 64 or 32 channels, and any number of attention heads.
        per_layer: Every layer keeps the same share of its channels at every event, so that equally wide layers stay
            equally wide, as configuration files with one width require. Scores then decide only within a layer. A K
            that does not divide is refused with the nearest ones that do.
        lossy: Also select channels whose removal changes the output more than zeroing them would, such as channels
            that a LayerNorm normalises.

    Pass exactly one of `keep`, `prune`, `macs` and `parameters`. A space without any of them gets its number from a
    budget of the `Pruner`.

    Returns:
        A frozen description of the space, for `Pruner` and `Phase`. It is matched with a model when a `Pruner` is made.

    Raises:
        SpaceError: An argument has the wrong type or value, or more than one of the four numbers is given.

    >>> channels("features.*", keep=1_267).name
    'features.*'
    >>> print(channels("features.*", macs=0.5).budget)
    macs=0.5
    >>> channels("features.*", keep=64, at="middle")
    Traceback (most recent call last):
        ...
    keepk.errors.SpaceError: space 'features.*': at='middle'. Pass "output" or "input".

    """
    globs, excluded = _globs("channels", select, exclude, such_as="features.*")
    called = _called("channels", name, globs)
    _refuse_several_numbers(called, keep=keep, prune=prune, macs=macs, parameters=parameters)
    budget = checked_budget(f"space {called!r}", macs, parameters)
    if keep is not None or prune is not None:  # a space without any number gets that of the Pruner
        keep = _checked_count(called, keep, prune)
    _refuse_non_metric(called, metric, OF_CHANNELS)
    schedule = checked_schedule(schedule, f"space {called!r}: schedule")
    if layer_floor is None:
        layer_floor = BUDGET_FLOOR if keep is None and prune is None else 1
    elif not (isinstance(layer_floor, float) and 0 < layer_floor < 1):
        layer_floor = count(layer_floor, f"space {called!r}: layer_floor", _or_a_share, least=1)
    if at not in ("output", "input"):
        raise SpaceError(f'space {called!r}: at={shown(at)}. Pass "output" or "input".')
    if isinstance(round_to, str):
        _check_auto(called, round_to, keep, prune)
    elif round_to is not None:
        round_to = count(round_to, f"space {called!r}: round_to", SpaceError, least=1)
    for option, value in (("lossy", lossy), ("per_layer", per_layer)):
        if not isinstance(value, bool):
            raise SpaceError(
                f"space {called!r}: {option}={shown(value)}: got {type(value).__name__}. Pass True or False."
            )
    return ChannelSpace(
        globs, excluded, keep, prune, called, metric, schedule, layer_floor, at, round_to, lossy, budget, per_layer
    )


def _or_a_share(message: str) -> SpaceError:
    return SpaceError(f"{message.removesuffix('.')}, or a share between 0 and 1.")


def _check_auto(called: str, round_to: str, keep: int | None, prune: float | None) -> None:
    """Refuse a `round_to` that is a string other than "auto", or "auto" without a budget."""
    if round_to != "auto":
        raise SpaceError(f'space {called!r}: round_to={shown(round_to)}. Pass an int of at least 1, or "auto".')
    if keep is not None or prune is not None:
        given = f"prune={prune}" if keep is None else f"keep={keep}"
        raise SpaceError(
            f'space {called!r}: round_to="auto" is for budgets, got {given}. Pass macs= or parameters=, or a number: '
            f"round_to=8."
        )


def _globs(function: str, select: Any, exclude: Any, *, such_as: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    globs, excluded = as_globs(select), as_globs(exclude)
    if not globs or excluded is None:
        raise SpaceError(
            f"{function}(select={shown(select)}, exclude={shown(exclude)}): not globs. "
            f"Pass a string or a list of strings, such as {such_as!r}."
        )
    return globs, excluded


def _called(function: str, name: object, globs: tuple[str, ...]) -> str:
    if name is None:
        return "+".join(globs)
    if not isinstance(name, str) or not name:
        raise SpaceError(f"{function}(name={shown(name)}): not a name. Pass a string.")
    return name


def _refuse_several_numbers(called: str, **numbers: Any) -> None:
    given = [f"{option}={shown(value)}" for option, value in numbers.items() if value is not None]
    if len(given) > 1:
        listed = f"both {given[0]} and {given[1]}" if len(given) == 2 else f"{', '.join(given[:-1])} and {given[-1]}"
        raise SpaceError(f"space {called!r}: got {listed}. Pass exactly one of them.")


def _checked_count(called: str, keep: Any, prune: Any) -> int | None:
    """Check that exactly one of `keep` and `prune` is passed and is valid; returns `keep`."""
    if (keep is None) == (prune is None):
        got = "neither keep= nor prune=" if keep is None else f"both keep={shown(keep)} and prune={shown(prune)}"
        raise SpaceError(f"space {called!r}: got {got}. Pass exactly one of them.")
    if prune is not None:
        if exact_share(prune, f"space {called!r}: prune", SpaceError) == 1:
            raise SpaceError(f"space {called!r}: prune={prune} keeps none. Prune less, or pass keep=.")
        return None
    if isinstance(keep, float) and 0 < keep < 1:
        kept = Fraction(str(keep))
        raise SpaceError(
            f"space {called!r}: keep={keep}: got float, but keep= is a count. To keep {float(100 * kept):g} %, pass "
            f"prune={float(1 - kept):g}; to keep a number of units, pass an int."
        )
    return count(keep, f"space {called!r}: keep", SpaceError, least=1)


def _refuse_non_metric(called: str, metric: object, metrics: Sequence[str]) -> None:
    if metric is None or callable(metric):
        return
    remedy = "Pass a function, see keepk.metrics"
    if isinstance(metric, str):
        calls = {call.partition("(")[0]: call for call in metrics}
        likely = get_close_matches(metric, calls, n=1 if metric in calls else 3, cutoff=0.4) or list(calls)[:3]
        remedy += f": {' or '.join(f'keepk.metrics.{calls[it]}' for it in likely)}"
        for kind, others in (("channels", OF_CHANNELS), ("weights", OF_WEIGHTS)):
            if metric not in calls and metric in names_of(others):
                remedy += f"; keepk.metrics.{metric} ranks {kind}"
    raise SpaceError(f"space {called!r}: metric={shown(metric)} is not callable. {remedy}.")


def names_of(calls: Sequence[str]) -> list[str]:
    """The names of functions without their arguments.

    >>> names_of(["l1", 'norm("l2")'])
    ['l1', 'norm']
    """
    return [call.partition("(")[0] for call in calls]
