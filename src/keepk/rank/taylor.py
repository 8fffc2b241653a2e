"""Taylor importance of channels: how much the loss would change if a channel were removed, to first order."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from keepk.errors import RankError
from keepk.plan.names import shown
from keepk.rank.layers import Layer
from keepk.rank.metrics import Needs, Ranks
from keepk.rank.statistics import Statistics


@dataclass(frozen=True, eq=False)
class Taylor:
    """The metric that `taylor` makes."""

    statistics: Statistics
    ranks: ClassVar[tuple[Ranks, ...]] = ("channels",)
    needs: ClassVar[tuple[Needs, ...]] = ("weights", "gradients")

    def __repr__(self) -> str:
        return "Taylor()"

    def __call__(self, layer: Layer) -> Tensor:
        """One score for each channel of a layer."""
        return self.statistics.mean_squares(layer)


def taylor(statistics: Statistics) -> Taylor:
    r"""The Taylor importance of a channel's gate, from the gradients of the batches since the last event.

    .. math:: R(C) = E\big[(\gamma g_\gamma + \beta g_\beta)^2\big]

    over batches, where g are the gradients of the scale and the shift of the channel's BatchNorm. Without one, the sum
    is over all weights and biases that compute the channel. To first order this is the square of what the loss of a
    batch changes by if the channel is removed (Molchanov et al. 2019). Scores of different layers are comparable, so
    that one ranking over all layers needs no floor.

    Args:
        statistics: The collector of the gradients; see `keepk.Statistics`.

    >>> from torch import nn
    >>> taylor(Statistics(nn.Linear(2, 2)))
    Taylor()
    """
    if not isinstance(statistics, Statistics):
        raise RankError(
            f"taylor(statistics={shown(statistics)}): got {type(statistics).__name__}. Make it with "
            f"keepk.Statistics(model), and call its update() after every backward()."
        )
    return Taylor(statistics)
