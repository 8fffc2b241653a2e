"""Uniting atoms into classes that are removed together.

>>> united = UnionFind(6)
>>> united.add(np.array([1, 2], np.int32), np.array([3, 4], np.int32))
>>> united.add(np.array([3], np.int32), np.array([5], np.int32))
>>> united.settle()
True
>>> united.classes.tolist()  # 1, 3 and 5 are one class, 2 and 4 another; each is named by its smallest member
[0, 1, 2, 1, 2, 1]
"""

import numpy as np
from numpy.typing import NDArray

from keepk.graph.maps import Map

Classes = NDArray[np.int32]


class UnionFind:
    """Classes of atoms, each named by its smallest member.

    Pairs are collected by `add` and united by `settle`, all at once: one numpy pass over a million pairs instead of a
    million steps in Python.
    """

    def __init__(self, count: int) -> None:
        self.classes: Classes = np.arange(count, dtype=np.int32)
        self._ones: list[Map] = []
        self._others: list[Map] = []
        self._fresh = False

    def add(self, ones: Map, others: Map) -> None:
        """Unite the atoms at the same positions; takes effect at the next `settle`."""
        self._ones.append(ones.ravel())
        self._others.append(others.ravel())
        self._fresh = True

    def settle(self) -> bool:
        """Unite all pairs that were added; returns whether any class changed."""
        if not self._fresh:
            return False
        self._fresh = False
        before = self.classes
        self.classes = _components(before, np.concatenate(self._ones), np.concatenate(self._others))
        self._ones, self._others = [], []
        return not np.array_equal(before, self.classes)


def _components(labels: Classes, ones: Map, others: Map) -> Classes:
    """Connected components by label propagation: the smaller label wins until nothing changes."""
    labels = labels.copy()
    while True:
        left, right = labels[ones], labels[others]
        apart = left != right
        if not apart.any():
            return labels
        ones, others, left, right = ones[apart], others[apart], left[apart], right[apart]
        # minimum.at and not plain assignment: of several pairs that lower the same label, the smallest must win.
        np.minimum.at(labels, np.maximum(left, right), np.minimum(left, right))
        # Follow labels to their roots (pointer jumping), so that a chain of n pairs takes log n rounds instead of n.
        while not np.array_equal(jumped := labels[labels], labels):
            labels = jumped
