"""The least number of weights that can remain, if only the number of remaining channels is known.

A weight of a convolution remains if its output channel and its input channel do. The number of weights left in a tensor
is therefore a product of two counts, and that of a network a sum of such products. Before training it is not known
which channels will be kept, only how many in total. `least` bounds the sum from below over all ways to keep that many,
so that a plan that might keep more weights than are left is refused before the first batch.

The method is branch and bound, exact while the search is small. A part of the search is a range for every count. Its
bound comes from McCormick's planes: for x in [a, b] and y in [c, d], both a y + c x - a c and b y + d x - b d are at
most x y, and so is every mixture of the two. A mixture makes the sum linear, and a linear sum is least where the
cheapest counts are filled first. Subgradient steps improve the mixtures.

>>> counts = [Count(range(1, 17), "c"), Count(range(1, 17), "c")]  # two layers of 16 channels, at least 1 of each
>>> middle = Product(1, (Factor(0, {0: 1.0}), Factor(0, {1: 1.0})))  # the weight between them
>>> least([middle], counts, {"c": 12})  # 1 and 11 channels
11
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, prod

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
PARTS = 200  # the most parts to search; after that the bound is valid, but may not be exact
STEPS = 25  # subgradient steps for each part
SLACK = 1e-6  # for rounding errors of float64: sums are integers, so a bound of 11.9999999 means 12


@dataclass(frozen=True)
class Count:
    """An unknown count: the values it may have, in ascending order, and the name of the total that it is part of."""

    values: Sequence[int]
    total: str | None


@dataclass(frozen=True)
class Factor:
    """A constant plus multiples of counts, by their positions. Multiples and values are never negative."""

    constant: float
    multiples: Mapping[int, float]


@dataclass(frozen=True)
class Product:
    """A scale times the product of its factors."""

    scale: float
    factors: tuple[Factor, ...]

    def value(self, counts: Sequence[float]) -> float:
        """The value of the product for given counts."""
        factors = (it.constant + sum(by * counts[place] for place, by in it.multiples.items()) for it in self.factors)
        return self.scale * prod(factors)


def least(
    products: Sequence[Product], counts: Sequence[Count], totals: Mapping[str, int], enough: int | None = None
) -> int:
    """A lower bound of a sum of products over all counts with given totals.

    Args:
        products: The terms of the sum.
        counts: The unknown counts.
        totals: By name of a total, the sum of its counts.
        enough: Stop as soon as the bound is known to be at least this, or some counts are known to give less.

    Returns:
        The bound, rounded up to an int.

    Raises:
        ValueError: If no counts have these totals.
    """
    search = _Search(products, counts, totals)
    first = search.part(*search.whole)
    if first is None:
        raise ValueError(f"no counts have the totals {dict(totals)}")
    # Best first: the part with the lowest bound limits the answer, so it is split next. The number breaks ties, since
    # parts themselves cannot be compared.
    best, heap, number = first.reached, [(first.bound, 0, first)], 0
    while heap:
        bound, _, part = heap[0]
        done = bound > best - 1 + SLACK or number >= PARTS
        if done or (enough is not None and (bound > enough - 1 + SLACK or best < enough)):
            break
        heappop(heap)
        for low, high in search.halves(part):
            half = search.part(low, high, best)
            if half is not None:
                number += 1
                best = min(best, half.reached)
                heappush(heap, (max(half.bound, bound), number, half))
    lowest = min(heap[0][0], best) if heap else best
    return ceil(lowest - SLACK)


@dataclass(frozen=True, eq=False)
class _Part:
    """A part of the search.

    Attributes:
        low: The smallest value of each count.
        high: The largest value of each count.
        bound: A lower bound of the sum in these ranges.
        point: The counts at which the bound is attained.
        reached: The smallest sum found for counts that are allowed.
    """

    low: Floats
    high: Floats
    bound: float
    point: Floats
    reached: float


class _Search:
    """The problem in matrices: every product as scale * (constant + x counts) * (constant + y counts)."""

    def __init__(self, products: Sequence[Product], counts: Sequence[Count], totals: Mapping[str, int]) -> None:
        self._counts = counts
        self._groups = [
            (np.array([place for place, count in enumerate(counts) if count.total == name], int), float(total))
            for name, total in totals.items()
        ]
        self._loose = np.array([place for place, count in enumerate(counts) if count.total not in totals], int)
        self.whole = self._ranges([0.0] * len(counts), [float("inf")] * len(counts))
        simple = [self._two_factors(product) for product in products]
        self._constant = sum(scale for scale, factors in simple if not factors)
        varying = [(scale, factors) for scale, factors in simple if factors]
        self._scale = np.array([scale for scale, _ in varying])
        self._x = self._matrix([factors[0] for _, factors in varying])
        self._y = self._matrix([factors[1] if len(factors) > 1 else Factor(1, {}) for _, factors in varying])

    def part(self, low: Floats, high: Floats, best: float = float("inf")) -> _Part | None:
        """A part with its bound; None if no counts in it have the totals, or none can be better than `best`."""
        low, high = self._tightened(low, high)
        if (low > high).any() or any(not low[g].sum() <= total <= high[g].sum() for g, total in self._groups):
            return None
        planes = self._planes(low, high)
        # Start from the best of three uniform mixtures. The steps below climb from there.
        ends = [np.full(len(self._scale), share) for share in (0.0, 1.0, 0.5)]
        mixture = max(ends, key=lambda it: self._bounded(planes, it, low, high)[0])
        found = _Part(low, high, -np.inf, low, np.inf)
        for step in range(STEPS):
            bound, point, difference = self._bounded(planes, mixture, low, high)
            reached = min(found.reached, self._sum(point) if self._allowed(point) else np.inf)
            kept = (bound, point) if bound > found.bound else (found.bound, found.point)
            found = _Part(low, high, *kept, reached)
            aim = min(reached, best)
            squared = float(difference @ difference)
            if found.bound > aim - 1 + SLACK or squared == 0:
                break
            # Polyak's step length towards the best sum known, shortened slowly so that it settles.
            length = (aim - bound) / squared if np.isfinite(aim) else abs(bound) / squared
            mixture = np.clip(mixture + length / (1 + step / 8) * difference, 0, 1)
        return None if found.bound > best - 1 + SLACK and found.reached > best - 1 + SLACK else found

    def halves(self, part: _Part) -> list[tuple[Floats, Floats]]:
        """The part split in two, or nothing if it is a single point."""
        # Split the range that contributes most to the gap between the products and the planes below them.
        width = part.high - part.low
        xs, ys = (constant + matrix @ part.point for constant, matrix in (self._x, self._y))
        planes = self._planes(part.low, part.high)
        missed = np.maximum(self._scale * xs * ys - np.maximum(*(p[2] + p[0] * xs + p[1] * ys for p in planes)), 0)
        blame = ((missed[:, None] + SLACK) * (self._x[1] + self._y[1])).sum(axis=0) * width
        place = int(np.argmax(blame if blame.any() else width))
        if width[place] == 0:
            return []
        middle = np.floor((part.low[place] + part.high[place]) / 2)
        upper, lower = part.high.copy(), part.low.copy()
        upper[place], lower[place] = middle, middle + 1
        return [(part.low, upper), (lower, part.high)]

    def _two_factors(self, product: Product) -> tuple[float, list[Factor]]:
        """A product as a scale and at most two factors that vary."""
        # McCormick's planes are for two factors. Any further one is replaced by its least value, which keeps the bound
        # valid. It is rare: the weight of a bilinear layer.
        scale, varying = product.scale, list[Factor]()
        for factor in product.factors:
            if factor.multiples and len(varying) < 2:
                varying.append(factor)
            else:
                constant, matrix = self._matrix([factor])
                scale *= float(constant[0] + self._extremes(matrix, *self.whole)[0])
        return scale, varying

    def _matrix(self, factors: Sequence[Factor]) -> tuple[Floats, Floats]:
        """Factors as constants and a matrix of multiples, one row for each factor."""
        matrix = np.zeros((len(factors), len(self._counts)))
        for row, factor in enumerate(factors):
            for place, by in factor.multiples.items():
                matrix[row, place] += by
        return np.array([factor.constant for factor in factors], float), matrix

    def _ranges(self, low: Sequence[float], high: Sequence[float]) -> tuple[Floats, Floats]:
        """The ranges narrowed to values that the counts may have."""
        bounds = list[tuple[float, float]]()
        for count, least_, most in zip(self._counts, low, high, strict=True):
            begin, end = bisect_left(count.values, least_), bisect_right(count.values, most)
            # An empty range is marked by low > high.
            bounds.append((count.values[begin], count.values[end - 1]) if begin < end else (1.0, 0.0))
        found = np.array(bounds, float).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def _tightened(self, low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """The ranges narrowed by the totals: a count is at least its total minus the largest values of the others."""
        for _ in range(3):  # narrowing one range narrows others; few rounds give nearly all of it
            before, low, high = (low, high), low.copy(), high.copy()
            for places, total in self._groups:
                others_low, others_high = low[places].sum() - low[places], high[places].sum() - high[places]
                low[places], high[places] = (
                    np.maximum(low[places], total - others_high),
                    np.minimum(high[places], total - others_low),
                )
            low, high = self._ranges(low.tolist(), high.tolist())
            if (low > high).any() or (np.array_equal(low, before[0]) and np.array_equal(high, before[1])):
                break
        return low, high

    def _planes(self, low: Floats, high: Floats) -> tuple[tuple[Floats, Floats, Floats], ...]:
        """McCormick's two planes below each product, each as multiples of x and of y, and a constant."""
        (x_constant, x), (y_constant, y) = self._x, self._y
        x_low, y_low = x_constant + self._extremes(x, low, high), y_constant + self._extremes(y, low, high)
        x_high, y_high = x_constant - self._extremes(-x, low, high), y_constant - self._extremes(-y, low, high)
        s = self._scale
        return (s * y_low, s * x_low, -s * x_low * y_low), (s * y_high, s * x_high, -s * x_high * y_high)

    def _bounded(
        self, planes: tuple[tuple[Floats, Floats, Floats], ...], mixture: Floats, low: Floats, high: Floats
    ) -> tuple[float, Floats, Floats]:
        """The bound by a mixture of the planes, its point, and by how much the second plane is higher there.

        The difference is the subgradient of the bound with respect to the mixture.
        """
        (x_constant, x), (y_constant, y) = self._x, self._y
        of_x, of_y, constant = (
            (1 - mixture) * one + mixture * other for one, other in zip(planes[0], planes[1], strict=True)
        )
        slopes = of_x @ x + of_y @ y
        point = self._cheapest(slopes, low, high)
        bound = self._constant + float((constant + of_x * x_constant + of_y * y_constant).sum() + slopes @ point)
        xs, ys = x_constant + x @ point, y_constant + y @ point
        heights = [plane[2] + plane[0] * xs + plane[1] * ys for plane in planes]
        return bound, point, heights[1] - heights[0]

    def _cheapest(self, slopes: Floats, low: Floats, high: Floats) -> Floats:
        """The counts with the least linear sum: within each total, the cheapest are filled first."""
        point = low.copy()
        for places, total in self._groups:
            order = places[np.argsort(slopes[places], kind="stable")]
            room = (high - low)[order]
            before = np.cumsum(room) - room
            point[order] += np.clip(total - low[places].sum() - before, 0, room)
        # A count that belongs to no total is free: at its largest if that lowers the sum, otherwise at its smallest.
        loose = self._loose[slopes[self._loose] < 0]
        point[loose] = high[loose]
        return point

    def _extremes(self, matrix: Floats, low: Floats, high: Floats) -> Floats:
        """The least value of each row's linear sum."""
        least_ = matrix @ low
        for places, total in self._groups:
            part = matrix[:, places]
            order = np.argsort(part, axis=1, kind="stable")
            room = (high - low)[places][order]
            before = np.cumsum(room, axis=1) - room
            added = np.clip(total - low[places].sum() - before, 0, room)
            least_ = least_ + (np.take_along_axis(part, order, axis=1) * added).sum(axis=1)
        falls = np.minimum(matrix[:, self._loose], 0) * (high - low)[self._loose]
        extremes: Floats = least_ + falls.sum(axis=1)
        return extremes

    def _sum(self, point: Floats) -> float:
        """The sum of products at a point."""
        (x_constant, x), (y_constant, y) = self._x, self._y
        return self._constant + float((self._scale * (x_constant + x @ point) * (y_constant + y @ point)).sum())

    def _allowed(self, point: Floats) -> bool:
        """Whether every count has one of its values."""
        pairs = zip(self._counts, point.tolist(), strict=True)
        return all(
            (at := bisect_left(count.values, value)) < len(count.values) and count.values[at] == value
            for count, value in pairs
        )
