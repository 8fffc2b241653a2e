"""Forward passes with more than one path: code that runs only in training, branches on values, branches on widths."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from networks.registry import network, vectors


class Hidden(nn.Module):
    """Twelve hidden channels of `a`, read by `o`. `drop` has the rate of all random operations."""

    in_training: Callable[..., torch.Tensor]  # defined by subclasses

    def __init__(self):
        super().__init__()
        self.a, self.o, self.drop = nn.Linear(7, 12), nn.Linear(12, 3), nn.Dropout(0.2)

    def forward(self, x):
        h = F.relu(self.a(x))
        return self.o(self.in_training(h) if self.training else h)


# Only in training


@network("activity_penalty_in_training", "lossy", "a.weight", 0, example=vectors, only=True)
class ActivityPenalty(Hidden):
    def forward(self, x):
        h = F.relu(self.a(x))
        return (self.o(h), h.square().mean()) if self.training else self.o(h)


@network("sum_of_squares_in_training", "exact", "a.weight", 0, example=vectors)
class SumOfSquares(Hidden):
    """A sum over channels is unchanged by channels that are zero."""

    def forward(self, x):
        h = F.relu(self.a(x))
        return (self.o(h), h.square().sum()) if self.training else self.o(h)


@network("literal_size_in_training", "fixed", "a.weight", 0, example=vectors, only=True)
class LiteralSizeInTraining(Hidden):
    def in_training(self, h):
        return (h.view(-1, 3, 4) * 2).view(-1, 12)


@network("layer_norm_in_training", "lossy", "a.weight", 0, example=vectors, only=True)
class LayerNormInTraining(Hidden):
    def in_training(self, h):
        return F.layer_norm(h, h.shape[1:])


@network("softmax_in_training", "lossy", "a.weight", 0, example=vectors, only=True)
class SoftmaxInTraining(Hidden):
    def in_training(self, h):
        return h.softmax(1)


@network("roll_in_training", "fixed", "a.weight", 0, example=vectors, only=True)
class RollInTraining(Hidden):
    def in_training(self, h):
        return h.roll(1, 1)


@network("width_as_factor_in_training", "lossy", "a.weight", 0, example=vectors, only=True)
class WidthInTraining(Hidden):
    def in_training(self, h):
        return h / h.shape[1]


@network("features_returned_in_training", "fixed", "a.weight", 0, example=vectors, only=True)
class FeaturesInTraining(Hidden):
    def forward(self, x):
        h = F.relu(self.a(x))
        return (self.o(h), h) if self.training else self.o(h)


@network("dropout_in_training", "exact", "a.weight", 0, example=vectors)
class DropoutInTraining(Hidden):
    def in_training(self, h):
        return F.dropout(h, self.drop.p)


@network("feature_dropout", "exact", "a.weight", 0)
class FeatureDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.o = nn.Conv2d(3, 12, 3), nn.Dropout2d(0.2), nn.Linear(12, 3)

    def forward(self, x):
        return self.o(self.drop(F.relu(self.a(x))).mean((2, 3)))


@network("alpha_dropout", "exact", "a.weight", 0, example=vectors)
class AlphaDropout(Hidden):
    def in_training(self, h):
        return F.alpha_dropout(h, self.drop.p, training=True)


@network("alpha_dropout_summed", "lossy", "a.weight", 0, example=vectors, only=True)
class AlphaDropoutSummed(Hidden):
    """Alpha dropout replaces dropped values by a nonzero constant."""

    def __init__(self):
        super().__init__()
        self.o = nn.Linear(1, 3)

    def forward(self, x):
        return self.o(F.alpha_dropout(F.relu(self.a(x)), self.drop.p, training=self.training).sum(1, keepdim=True))


@network("stochastic_depth", "exact", "a.weight", 0, example=vectors)
class StochasticDepth(Hidden):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(12, 12)

    def in_training(self, h):
        keep = h.new_empty((len(h), 1)).bernoulli_(1 - self.drop.p).div_(1 - self.drop.p)
        return h + F.relu(self.b(h)) * keep


@network("auxiliary_head_in_training", "exact", "a.weight", 0, example=vectors)
class AuxiliaryHead(Hidden):
    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(12, 3)

    def forward(self, x):
        h = F.relu(self.a(x))
        return (self.o(h), self.aux(h)) if self.training else self.o(h)


@network("cumulative_batch_norm", "exact", "a.weight", 0, example=vectors)
class CumulativeBatchNorm(Hidden):
    """Without a momentum, BatchNorm reads the number of batches that it has seen."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(12, momentum=None)

    def forward(self, x):
        return self.o(F.relu(self.norm(self.a(x))))


# Branches on values


class Branching(Hidden):
    def __init__(self):
        super().__init__()
        self.b, self.c = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x):
        h = F.relu(self.a(x))
        return self.o(F.relu(self.taken(h) if self.decides(x, h) else self.other(h)))

    def decides(self, x, h):  # noqa: ARG002
        return x.sum() > -1e6

    def taken(self, h):
        return self.b(h)

    def other(self, h):
        return self.c(h)


@network("branch_on_the_input", "exact", "a.weight", 0, example=vectors)
class BranchOnInput(Branching):
    pass


@network("the_other_branch_is_cut_too", "exact", "c.weight", 1, example=vectors)
class OtherBranchCut(Branching):
    pass


@network("branch_on_an_activation", "exact", "a.weight", 0, example=vectors)
class BranchOnActivation(Branching):
    def decides(self, x, h):  # noqa: ARG002
        return h.sum() > -1


@network("literal_size_in_the_other_branch", "fixed", "a.weight", 0, example=vectors, only=True)
class LiteralInOther(Branching):
    def other(self, h):
        return h.view(-1, 3, 4).flip(1).reshape(-1, 12)


@network("softmax_in_the_other_branch", "lossy", "a.weight", 0, example=vectors)
class SoftmaxInOther(Branching):
    def other(self, h):
        return self.c(h.softmax(1))


@network("check_that_raises", "exact", "a.weight", 0, example=vectors)
class CheckThatRaises(Branching):
    def other(self, h):  # noqa: ARG002
        raise ValueError("the input is not finite")


@network("assertion_on_values", "exact", "a.weight", 0, example=vectors)
class AssertionOnValues(Branching):
    def decides(self, x, h):  # noqa: ARG002
        assert x.isfinite().all(), "the input is not finite"
        return True


@network("loop_until_small", "exact", "a.weight", 0, example=vectors)
class LoopUntilSmall(Branching):
    def taken(self, h):
        while h.norm() > 1e6:
            h = self.b(h) / 2
        return self.c(h)


@network("either_of_two_values", "lossy", "a.weight", 0, example=vectors)
class EitherOfTwo(Branching):
    """The other branch runs only if both values are false."""

    def decides(self, x, h):  # noqa: ARG002
        return (x > -1e6).any() or (x < 1e6).any()

    def other(self, h):
        return self.c(h.softmax(1))


@network("layer_drop", "exact", "a.weight", 0, example=vectors)
class LayerDrop(Hidden):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        h = F.relu(self.a(x))
        for layer in self.layers:
            if self.training and torch.rand([]) < self.drop.p:
                continue
            h = h + F.relu(layer(h))
        return self.o(h)


@network("comparison_by_equal", "exact", "a.weight", 0, example=vectors)
class ByEqual(Branching):
    def decides(self, x, h):  # noqa: ARG002
        return not torch.equal(x, torch.zeros_like(x))


@network("number_in_a_buffer", "exact", "a.weight", 0, example=vectors)
class NumberInBuffer(Hidden):
    """A number in a buffer that no input changes is treated as a constant."""

    power: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("power", torch.tensor(2))

    def forward(self, x):
        return self.o(F.relu(self.a(x)) ** int(self.power))


# Caches


CACHE: dict[Any, torch.Tensor] = {}


@network("global_cache", "exact", "a.weight", 0, example=vectors)
class GlobalCache(Hidden):
    """The first forward pass fills a cache, so it does more than later ones."""

    def forward(self, x):
        key = (len(x), x.device, x.dtype, random.Random(3).random())
        if key not in CACHE:
            CACHE[key] = torch.linspace(0, 1, len(x), device=x.device, dtype=x.dtype)[:, None].cos()
        return self.o(F.relu(self.a(x)) * CACHE[key])
