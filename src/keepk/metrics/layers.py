"""The interface of metrics: `Traits`, which say how one can be used, and `Layer`, the argument of a channel metric.

A metric may have attributes that say how it can be used; see `Traits`. Nothing else distinguishes a metric of keepk
from one of yours, so yours may carry them too:

>>> def taylor(weight):
...     return (weight * weight.grad).abs()
>>> traits_of(taylor)  # without attributes nothing is assumed
Traits(ranks=('weights', 'channels'), needs=None, over=None)
>>> traits_of(describes(ranks=("weights",), needs=("weights", "gradients"))(taylor))
Traits(ranks=('weights',), needs=('weights', 'gradients'), over=None)

A metric for weights gets a tensor (`keepk.metrics.weights`). A metric for channels gets a `Layer`: the channels of a
layer as tensors, grouped by role.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from keepk.errors import KeepkError, RankError, ShrinkError, SpaceError
from keepk.graph.graph import Graph
from keepk.graph.ids.facts import Role
from keepk.graph.ids.maps import Flags
from keepk.graph.units import Group
from keepk.model.edits import Indices
from keepk.model.names import changed_model, lengths_of, weight_grad_of, weight_of
from keepk.model.sharded import gathered
from keepk.model.values import values_of
from keepk.plan.names import shortened, shown

At = Literal["output", "input"]
Ranks = Literal["weights", "channels"]
Needs = Literal["weights", "gradients", "activations"]
Over = Literal["space", "layer"]
Metric = TypeVar("Metric", bound=Callable[..., Any])
ALLOWED = {"ranks": get_args(Ranks), "needs": get_args(Needs), "over": get_args(Over)}


def metric_name(metric: Callable[..., Any]) -> str:
    """The name of a metric for errors: that of the function, its `kind`, or its class.

    >>> metric_name(abs)
    'abs'
    """
    return getattr(metric, "__name__", None) or getattr(metric, "kind", None) or type(metric).__name__


@contextmanager
def naming_failures(metric: Callable[..., Any], where: str, without_gradient: Iterable[str]) -> Iterator[None]:
    """Turn any exception that a metric raises into a `RankError` that names the metric and the place.

    Args:
        metric: The metric that is called.
        where: The layer or parameter that it is called on.
        without_gradient: The names of its parameters that have no gradient; iterated over only after a failure.
    """
    try:
        yield
    except KeepkError:
        raise
    except Exception as error:
        remedy = "Correct the metric; nothing was pruned."
        missing = next(iter(without_gradient), None)
        # A metric may fail for other reasons even if weights have no gradients. Only an error about None suggests that
        # it tried to use a gradient.
        if missing is not None and "NoneType" in str(error):
            remedy = f"Parameter {missing!r} has no gradient. Call step() after backward() and before zero_grad()."
        detail = f"{type(error).__name__}: {shortened(str(error))}"
        raise RankError(f"metric {metric_name(metric)}: failed on {where} ({detail}). {remedy}") from error


@dataclass(frozen=True)
class Traits:
    """How a metric can be used, read from its attributes of the same names.

    Attributes:
        ranks: The kinds of units that it can score. A metric for channels only is refused for a weight space, and vice
            versa, before training.
        needs: The inputs that it reads. A channel metric that needs only weights is tried before training, so that a
            layer it cannot rank is refused early; infinite scores are refused. None if unknown: the metric is then not
            called before the first event, and may return an infinite score to protect a unit.
        over: The set of units that a score is relative to: the whole "space", or each "layer". A channel metric with
            this attribute has a method ``scores(layers)``. None if the score of a unit does not depend on other units.
    """

    ranks: tuple[Ranks, ...] = ("weights", "channels")
    needs: tuple[Needs, ...] | None = None
    over: Over | None = None


def traits_of(metric: Callable[..., Any]) -> Traits:
    """The traits of a metric; a missing attribute gets a default that assumes nothing."""
    found: dict[str, Any] = {name: getattr(metric, name, None) for name in ALLOWED}
    # A user's class may have an attribute `over` or `needs` that has nothing to do with this. It is ignored.
    return Traits(**{name: value for name, value in found.items() if _is_allowed(name, value)})


def describes(
    *, ranks: tuple[Ranks, ...], needs: tuple[Needs, ...] | None = None, over: Over | None = None
) -> Callable[[Metric], Metric]:
    """A decorator that sets the attributes of a metric; see `Traits`.

    Raises:
        RankError: If an attribute has an unknown value.
    """
    given = {name: value for name, value in (("ranks", ranks), ("needs", needs), ("over", over)) if value is not None}
    for name, value in given.items():
        if not _is_allowed(name, value):
            words = ", ".join(map(repr, ALLOWED[name]))
            kind = "one of" if name == "over" else "a tuple of"
            raise RankError(f"describes({name}={shown(value)}): unknown. Pass {kind} {words}.")

    def attach(metric: Metric) -> Metric:
        vars(metric).update(given)  # mypy has no attributes on functions, so they are set through their dict
        return metric

    return attach


def _is_allowed(name: str, value: object) -> bool:
    if name == "over":
        return value in ALLOWED[name]
    return isinstance(value, tuple) and all(it in ALLOWED[name] for it in value) and (name != "ranks" or bool(value))


def makes_metrics(example: str) -> Callable[[Metric], Metric]:
    """A decorator for functions that return metrics: passing one uncalled raises an error that shows this example."""

    def attach(factory: Metric) -> Metric:
        vars(factory).update(example_call=example)
        return factory

    return attach


def refuse_uncalled(metric: Callable[..., Any] | None, space: str) -> None:
    """Refuse a function or class that returns metrics instead of being one, even as a term of a blend.

    Raises:
        SpaceError: The message shows the missing call.
    """
    for _, term in getattr(metric, "terms", ()):
        refuse_uncalled(term, space)
    call = getattr(metric, "example_call", None)
    # A class is callable too, and calling it on a tensor would construct it instead of ranking.
    if call is not None or isinstance(metric, type):
        name = getattr(metric, "__name__", None) or shown(metric)
        raise SpaceError(
            f"space {space!r}: metric={name} is a factory, not a metric: a metric returns a tensor with one score for "
            f"each unit. Call it: {call or f'{name}(...)'}."
        )


def _whole_values(parameter: Tensor) -> Tensor:
    """The values of a whole parameter, which may be in a file or sharded over processes."""
    return gathered(values_of(parameter))


@dataclass(frozen=True)
class Slices:
    """The part of one parameter that belongs to the channels of a layer.

    For weight norm, the name is that of the direction, but the values are those of the weight that it computes.

    Attributes:
        name: The parameter's name.
        module: The class of the module that owns it.
    """

    name: str
    module: type[nn.Module]
    _parameter: nn.Parameter = field(repr=False)
    _length: nn.Parameter | None = field(repr=False)  # if the parameter is a direction of weight norm
    _places: "_Places" = field(repr=False)

    @property
    def parameter(self) -> nn.Parameter:
        """The whole parameter, including entries of other channels."""
        return self._parameter

    @property
    def tensor(self) -> Tensor:
        """The weights, of shape [channels, ...]: entry i has all weights of channel i in this parameter."""
        weights = _whole_values(self._parameter)
        if self._length is not None:
            weights = weight_of(weights, _whole_values(self._length))
        return self._places.take(weights)

    @property
    def grad(self) -> Tensor | None:
        """The gradient in the same shape, or None."""
        grad = self.whole_grad
        return None if grad is None else self._places.take(grad)

    @property
    def whole_grad(self) -> Tensor | None:
        """The gradient of the whole parameter, including entries of other channels, or None."""
        grad = self._parameter.grad if self._length is None else weight_grad_of(self._parameter, self._length)
        return None if grad is None else gathered(grad)

    def part_of(self, whole: Tensor) -> Tensor:
        """The entries of the channels in a tensor of the parameter's shape, channels first like `tensor`."""
        return self._places.take(whole)

    def inputs(self, axis: int, groups: int = 1) -> NDArray[np.int64] | None:
        """The input features that the channels are, for a weight that reads them: an array of shape [channels, ...].

        Args:
            axis: The axis of the weight that belongs to the layer's input.
            groups: The number of groups, if the layer is a convolution.

        Returns:
            The positions in the layer's input; None if the channels are not on this axis.
        """
        places, per_group = self._places, self._parameter.shape[axis]
        if places.axis != axis:
            return None
        if places.rows is not None:  # a grouped convolution, whose rows read different channels
            return places.rows // (self._parameter.shape[0] // groups) * per_group + places.index
        by_group = places.index[:, None, :] + np.arange(groups)[None, :, None] * per_group
        return by_group.reshape(len(places.index), -1)

    @property
    def versions(self) -> tuple[int, int]:
        """Version counters of the parameter and its gradient, which change with every in-place write."""
        grad = self._parameter.grad
        return self._parameter._version, -1 if grad is None else grad._version


@dataclass(frozen=True)
class Layer:
    """The remaining channels of one layer, as a channel metric gets them. ``len(layer)`` is their number.

    Attributes:
        name: The module that produces the channels; for reads of a BatchNorm, that BatchNorm.
        units: Their numbers in the graph.
        at: "output" if they are counted where they are produced, "input" if they are counted where they are read.
        producer: The weights that compute them: filters, rows of a linear layer.
        carrier: The parameters that scale and shift them: biases, BatchNorms.
        reader: The weights that read them: slices of the next layers.
    """

    name: str
    units: Indices
    at: At
    producer: tuple[Slices, ...]
    carrier: tuple[Slices, ...]
    reader: tuple[Slices, ...]

    def __len__(self) -> int:
        return len(self.units)

    @property
    def slices(self) -> tuple[Slices, ...]:
        """The slices of all roles: producer, carrier, reader."""
        return self.producer + self.carrier + self.reader


@dataclass(frozen=True)
class Use:
    """A metric that reads statistics, and the units of its space as they are now.

    Attributes:
        space: The name of the space.
        metric: The metric, or a term of a blend. Its attribute ``reads`` says what it reads: "products" of weights and
            gradients, "squares" of gradients, or "inputs" of layers, of which it reads the sum of order ``order``.
        layers: The layers of a channel space.
        parameters: By name, the parameters of a weight space.
    """

    space: str
    metric: Any
    layers: Sequence[Layer] = ()
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)

    @property
    def reads(self) -> str:
        """The name of the statistics that the metric reads."""
        return getattr(self.metric, "reads", "products")


def without_data(what: str, metric: str) -> RankError:
    """The error about units that statistics were not told to follow."""
    return RankError(
        f"Statistics: has no data for {what}. Use {metric}(statistics) as the metric of their space, and let "
        f"Pruner.step() call it."
    )


@dataclass(frozen=True)
class _Places:
    """The positions of a layer's channels in one tensor: one or several indices for each, or rows and columns."""

    axis: int
    index: NDArray[np.int64]
    rows: NDArray[np.int64] | None
    whole: bool

    def take(self, tensor: Tensor) -> Tensor:
        """The entries of the channels, channels first; a copy unless the channels fill the axis in order."""
        if self.rows is not None:
            rows, columns = (torch.from_numpy(it).to(tensor.device) for it in (self.rows, self.index))
            return tensor[rows, columns]
        channels_first = tensor.movedim(self.axis, 0)
        if self.whole:
            return channels_first
        index = torch.from_numpy(self.index.reshape(-1)).to(tensor.device)
        taken = channels_first.index_select(0, index)
        return taken if self.index.shape[1] == 1 else taken.reshape(*self.index.shape, *taken.shape[1:])


@dataclass(frozen=True)
class Parameters:
    """A model's parameters by name, and the lengths of those that are directions of weight norm."""

    model: nn.Module
    by_name: Mapping[str, nn.Parameter]
    lengths: Mapping[nn.Parameter, nn.Parameter]

    @staticmethod
    def of(model: nn.Module) -> "Parameters":
        """The parameters of a model. They stay valid, because a cut never replaces a parameter object."""
        return Parameters(model, dict(model.named_parameters(remove_duplicate=False)), lengths_of(model))

    def length(self, name: str) -> nn.Parameter | None:
        """The length parameter that belongs to a direction of weight norm; None for other parameters."""
        return self.lengths.get(self.by_name[name])


def layers_of(graph: Graph, own: Parameters, spaces: Iterable[Group], alive: Flags, at: At) -> list[Layer]:
    """The layers of some groups of the graph, with the units that are alive.

    Units of a group that have different numbers of slices (uneven heads) become separate layers.
    """
    found, model = list[Layer](), own.model
    for space in spaces:
        units = space.units[alive[space.units]]
        axes = [(tensor, axis, role) for tensor, axis, role in space.axes if tensor in graph.wiring.parameters]
        for tensor, _, _ in axes:
            _refuse_changed(graph, tensor, model)
        owned = [_owned(graph, tensor, axis, units) for tensor, axis, _ in axes]
        for members in _alike(owned, len(units)):
            by_role: dict[Role | None, list[Slices]] = {}
            for (tensor, axis, role), owner in zip(axes, owned, strict=True):
                places = _places(owner, axis, members, len(units))
                module = type(model.get_submodule(tensor.rpartition(".")[0]))
                slices = Slices(tensor, module, own.by_name[tensor], own.length(tensor), places)
                by_role.setdefault(role or Role.CARRIER, []).append(slices)
            sides = (tuple(by_role.get(role, ())) for role in (Role.PRODUCER, Role.CARRIER, Role.READER))
            found.append(Layer(space.module, units[members], at, *sides))
    return found


def _refuse_changed(graph: Graph, tensor: str, model: nn.Module) -> None:
    try:
        got = f"has shape {tuple(model.get_parameter(tensor).shape)}"
    except AttributeError:
        got = "no longer exists"
    if got != f"has shape {graph.shape(tensor)}":
        raise changed_model(ShrinkError, tensor, f"{got}, but the Pruner left it with shape {graph.shape(tensor)}")


def _owned(graph: Graph, tensor: str, axis: int, units: Indices) -> NDArray[np.int64]:
    """For each index of an axis (or each entry of a matrix), the position of its unit in `units`; -1 for none."""
    number = np.full(len(graph.units) + 1, -1, np.int64)  # the last entry is for indices that belong to no unit
    number[units] = np.arange(len(units))
    owners: NDArray[np.int64] = number[graph.owners(tensor)[axis]]
    return owners


def _alike(owned: Iterable[NDArray[np.int64]], count: int) -> Iterator[Indices]:
    """The positions of the units, grouped by how many slices they have in each axis."""
    sizes = np.stack([np.bincount(owner[owner >= 0], minlength=count) for owner in owned])
    if (sizes == sizes[:, :1]).all():
        yield np.arange(count)
        return
    kinds, kind_of = np.unique(sizes, axis=1, return_inverse=True)
    for kind in range(kinds.shape[1]):
        yield np.flatnonzero(kind_of.reshape(-1) == kind)


def _places(owner: NDArray[np.int64], axis: int, members: Indices, count: int) -> _Places:
    number = np.full(count + 1, -1, np.int64)
    number[members] = np.arange(len(members))
    mine = number[owner]
    flat = np.flatnonzero(mine >= 0)
    channel = mine.reshape(-1)[flat]
    order = flat if (channel[1:] >= channel[:-1]).all() else flat[np.argsort(channel, kind="stable")]
    table = order.reshape(len(members), -1)
    if owner.ndim == 2:
        return _Places(axis, table % owner.shape[1], table // owner.shape[1], whole=False)
    whole = len(order) == len(owner) == len(members) and bool((order == np.arange(len(order))).all())
    return _Places(axis, table, None, whole)
