"""Uniting atoms into classes of what goes together."""

import numpy as np
from numpy.typing import NDArray

from keepk.graph.maps import Map

Classes = NDArray[np.int32]


class Union:
    """Classes of atoms, each named by its smallest member."""

    def __init__(self, count: int) -> None:
        self.classes: Classes = np.arange(count, dtype=np.int32)
        self._ones: list[Map] = []
        self._others: list[Map] = []
        self._fresh = False

    def add(self, ones: Map, others: Map) -> None:
        """Atoms at the same place go together; takes effect at the next `settle`."""
        self._ones.append(ones.ravel())
        self._others.append(others.ravel())
        self._fresh = True

    def settle(self) -> bool:
        """Unite all that was added; whether anything changed."""
        if not self._fresh:
            return False
        self._fresh = False
        before = self.classes
        self.classes = _components(before, np.concatenate(self._ones), np.concatenate(self._others))
        self._ones, self._others = [], []
        return not np.array_equal(before, self.classes)


def _components(labels: Classes, ones: Map, others: Map) -> Classes:
    """Label propagation: the smaller label wins until nothing changes."""
    labels = labels.copy()
    while True:
        left, right = labels[ones], labels[others]
        apart = left != right
        if not apart.any():
            return labels
        ones, others, left, right = ones[apart], others[apart], left[apart], right[apart]
        np.minimum.at(labels, np.maximum(left, right), np.minimum(left, right))
        while not np.array_equal(jumped := labels[labels], labels):
            labels = jumped
