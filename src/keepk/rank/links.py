"""Channels of one space that read others of it: a source takes its readings along, so it stays while one of them does.

What is ranked is then not a source alone: it is worth as much as the best of its readings, at least.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepk.graph.edits import Indices


@dataclass(frozen=True, eq=False)
class Links:
    """Which channels of a space are read by others of it.

    Attributes:
        pairs: (source, reading) pairs of units.
        heights: By unit, how many layers read its layer one after another; 0 for most.
    """

    pairs: NDArray[np.int64]
    heights: NDArray[np.int64]

    def raised(self, values: np.ndarray) -> np.ndarray:
        """By unit, its own value or the highest of its readings, and of theirs.

        >>> Links(np.array([[0, 1], [1, 2]]), np.array([2, 1, 0, 0])).raised(np.array([1.0, 3.0, 2.0, 9.0]))
        array([3., 3., 2., 9.])
        """
        raised = values.copy()
        heights = self.heights[self.pairs[:, 0]]
        for height in range(1, int(heights.max(initial=0)) + 1):  # readings before what they read
            sources, readings = self.pairs[heights == height].T
            np.maximum.at(raised, sources, raised[readings])
        return raised

    def needed(self, layers: Sequence[Indices], floors: Sequence[int]) -> list[int]:
        """By layer, how many may have to stay so that each keeps its floor: the sources of what stays elsewhere, too.

        >>> links = Links(np.array([[0, 3], [1, 4]]), np.array([1, 1, 1, 0, 0]))
        >>> links.needed([np.arange(3), np.array([3, 4])], floors=[2, 2])
        [2, 2]
        """
        home = np.full(len(self.heights), -1)
        for number, units in enumerate(layers):
            home[units] = number
        needed = [min(floor, len(units)) for floor, units in zip(floors, layers, strict=True)]
        for number in sorted(range(len(layers)), key=lambda it: int(self.heights[layers[it][0]])):
            readings = self.pairs[home[self.pairs[:, 0]] == number, 1]
            sources_of = np.bincount(readings, minlength=len(home))
            wanted = sum(
                needed[reader] * int(sources_of[layers[reader]].max()) for reader in np.unique(home[readings]).tolist()
            )
            needed[number] = min(max(needed[number], wanted), len(layers[number]))
        return needed
