"""Parity with noise: the label is the product of five of fifty signs, and one label in ten is wrong."""

from dataclasses import dataclass

import torch
from torch import Tensor

from keepk.errors import DataError
from keepk.plan.numbers import count

INPUTS, PARITY, NOISE = 50, 5, 0.1
SIZES = (15_000, 5_000, 5_000)
NEAR = 0.2  # percent above the noise floor that count as reaching it


def at_floor(error: float, floor: float) -> bool:
    """Whether an error reaches the noise floor, both in percent: 10.3 reaches 10.1.

    >>> at_floor(10.3, 10.1), at_floor(10.32, 10.1)
    (True, False)
    """
    return error <= floor + NEAR + 1e-9  # 10.1 + 0.2 is below 10.3 in floats


@dataclass(frozen=True)
class Part:
    """Signs [N, 50], their labels [N] of -1 or 1, and which of the labels are wrong [N]."""

    signs: Tensor
    labels: Tensor
    flipped: Tensor

    def to(self, target: torch.device | torch.dtype | str) -> "Part":
        """The same part on another device, or with signs and labels of another dtype."""
        flipped = self.flipped if isinstance(target, torch.dtype) else self.flipped.to(target)
        return Part(self.signs.to(target), self.labels.to(target), flipped)

    @property
    def floor(self) -> float:
        """The error of the true parity on these labels in percent; lower errors are due to chance."""
        return 100 * int(self.flipped.count_nonzero()) / len(self.flipped)

    def errors(self, outputs: Tensor) -> Tensor:
        """The error of each row of `outputs` in percent. An output of exactly zero counts as wrong."""
        wrong = (outputs * self.labels <= 0).count_nonzero(-1)
        return 100 * wrong.double() / len(self.labels)


@dataclass(frozen=True)
class Parity:
    """One draw of the data."""

    train: Part
    validation: Part
    test: Part

    def to(self, target: torch.device | torch.dtype | str) -> "Parity":
        """The same draw on another device, or with signs and labels of another dtype."""
        return Parity(*(part.to(target) for part in (self.train, self.validation, self.test)))


def draw(seed: int, *, sizes: tuple[int, int, int] = SIZES) -> Parity:
    r"""Draw uniform signs and labels that are the product of the first five, wrong with probability 0.1.

    .. math:: y = \pm x_1 x_2 x_3 x_4 x_5, \quad P(-) = 0.1

    The learner does not know the five indices. A network treats all inputs alike, so they may be the first five.

    >>> part = draw(1, sizes=(6, 2, 4)).train
    >>> bool(((part.signs[:, :5].prod(1) != part.labels) == part.flipped).all())
    True
    """
    count(seed, "parity: seed", DataError, least=0)
    for size in sizes:
        count(size, "parity: size of a part", DataError, least=1)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (sum(sizes), INPUTS), generator=generator).float() * 2 - 1
    flipped = torch.rand(sum(sizes), generator=generator) < NOISE
    labels = signs[:, :PARITY].prod(1) * torch.where(flipped, -1.0, 1.0)
    parts = zip(*(torch.split(tensor, list(sizes)) for tensor in (signs, labels, flipped)), strict=True)
    return Parity(*(Part(*tensors) for tensors in parts))
