"""Channels of a space that are read by other units of the same space.

Where several BatchNorms read a channel, each read is a unit (see docs/decisions/0010). Removing the channel, the
source, removes its reads too. A source has to be kept while one of its reads is, so it is ranked by the best of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepk.graph.edits import Indices


@dataclass(frozen=True, eq=False)
class Links:
    """Which channels of a space are read by other units of it.

    Attributes:
        pairs: (source, read) pairs of units.
        heights: By unit, the length of the longest chain of layers that read its layer; 0 for most.
    """

    pairs: NDArray[np.int64]
    heights: NDArray[np.int64]

    def __repr__(self) -> str:
        return f"<Links: {len(self.pairs)} reads>"

    def raised(self, values: np.ndarray) -> np.ndarray:
        """By unit, the largest of its value and those of its reads, and of their reads in turn.

        >>> Links(np.array([[0, 1], [1, 2]]), np.array([2, 1, 0, 0])).raised(np.array([1.0, 3.0, 2.0, 9.0]))
        array([3., 3., 2., 9.])
        """
        raised = values.copy()
        heights = self.heights[self.pairs[:, 0]]
        # From low to high, so that a read that is a source itself has its final value before its source takes it.
        for height in range(1, int(heights.max(initial=0)) + 1):
            sources, reads = self.pairs[heights == height].T
            np.maximum.at(raised, sources, raised[reads])
        return raised

    def needed(self, layers: Sequence[Indices], floors: Sequence[int]) -> list[int]:
        """By layer, how many units may have to be kept so that every layer keeps its floor.

        A layer must keep the sources of the units that its readers keep, too.

        >>> links = Links(np.array([[0, 3], [1, 4]]), np.array([1, 1, 1, 0, 0]))
        >>> links.needed([np.arange(3), np.array([3, 4])], floors=[2, 2])
        [2, 2]
        """
        home = np.full(len(self.heights), -1)
        for number, units in enumerate(layers):
            home[units] = number
        needed = [min(floor, len(units)) for floor, units in zip(floors, layers, strict=True)]
        for number in sorted(range(len(layers)), key=lambda it: int(self.heights[layers[it][0]])):
            reads = self.pairs[home[self.pairs[:, 0]] == number, 1]
            # An upper bound: readers might share sources, but which units they keep is not known before the run.
            sources_of = np.bincount(reads, minlength=len(home))
            wanted = sum(
                needed[reader] * int(sources_of[layers[reader]].max()) for reader in np.unique(home[reads]).tolist()
            )
            needed[number] = min(max(needed[number], wanted), len(layers[number]))
        return needed
