"""Many networks with one hidden layer, stacked into one module and trained together by one optimizer.

Every member sees the same batches, so the first layers of all members are one matrix product. Pruned nodes are removed.
Members with fewer nodes than the widest are padded with nodes of zeros, which stay zero: tanh(0) = 0, so neither their
incoming nor their outgoing weights ever get a gradient.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from keepk.errors import RankError


class Stack(nn.Module):
    r"""Networks with one hidden layer of tanh units.

    .. math:: f_s(x) = c_s + \sum_h v_{sh} \tanh(W_{sh} x + b_{sh})

    Args:
        incoming: W with b as its last column, members x nodes x (inputs + 1).
        outgoing: v, members x nodes.
        offset: c, one per member.
        widths: The number of nodes of each member; the nodes after these are padding.
    """

    def __init__(self, incoming: Tensor, outgoing: Tensor, offset: Tensor, widths: Sequence[int]) -> None:
        super().__init__()
        alive = _first(widths, outgoing)
        self.incoming = nn.Parameter(torch.where(alive[..., None], incoming, 0.0))
        self.outgoing = nn.Parameter(torch.where(alive, outgoing, 0.0))
        self.offset = nn.Parameter(offset.clone())
        self.widths = tuple(widths)

    @classmethod
    def fresh(cls, widths: Sequence[int], inputs: int, seeds: Sequence[int]) -> "Stack":
        """Members initialised as `nn.Linear` does, each with a separate seed.

        >>> Stack.fresh([3, 2], 50, seeds=[0, 1])(torch.ones(4, 51)).shape
        torch.Size([2, 4])
        """
        widest = max(widths)
        members = [_fresh_member(width, inputs, seed) for width, seed in zip(widths, seeds, strict=True)]
        incoming = torch.stack([F.pad(first, (0, 0, 0, widest - len(first))) for first, _, _ in members])
        outgoing = torch.stack([F.pad(last, (0, widest - len(last))) for _, last, _ in members])
        return cls(incoming, outgoing, torch.stack([offset for _, _, offset in members]), widths)

    def forward(self, signs: Tensor) -> Tensor:
        """The outputs, members x examples. The last column of `signs` must be ones."""
        members, nodes, columns = self.incoming.shape
        hidden = (self.incoming.view(-1, columns) @ signs.T).view(members, nodes, -1).tanh()
        return (self.outgoing[:, None] @ hidden).squeeze(1) + self.offset[:, None]

    def loss(self, signs: Tensor, labels: Tensor) -> Tensor:
        """The sum of the members' mean logistic losses; the gradient of a member depends on that member alone."""
        return F.softplus(-labels * self(signs)).mean(1).sum()

    @torch.no_grad()
    def scores(self) -> Tensor:
        """|v| ||W||, members x nodes, a bound on how much a node can change the output."""
        scores: Tensor = self.outgoing.abs() * torch.linalg.vector_norm(self.incoming, dim=2)
        return scores

    @torch.no_grad()
    def regroup(self, members: Sequence[int], widths: Sequence[int], optimizer: Optimizer) -> None:
        """Replace the members by copies of `members`, each with its `widths` best nodes, and update the optimizer.

        Among equal scores the earlier node is kept; nodes keep their order.
        """
        source = torch.tensor(members, device=self.outgoing.device)
        order = ranking(self.scores())[source, : max(widths)]
        alive = _first(widths, order)
        # Padding sorts to the end as an index past the last node, and is then clamped to a valid index that is masked.
        nodes = torch.where(alive, order, self.outgoing.shape[1]).sort(1).values.clamp(max=self.outgoing.shape[1] - 1)

        def of_nodes(tensor: Tensor) -> Tensor:
            shape = alive.shape + (1,) * (tensor.dim() - 2)
            return torch.where(alive.view(shape), tensor[source[:, None], nodes], 0.0)

        _replace(self.incoming, of_nodes, optimizer)
        _replace(self.outgoing, of_nodes, optimizer)
        _replace(self.offset, lambda tensor: tensor[source], optimizer)
        self.widths = tuple(widths)


def ranking(scores: Tensor) -> Tensor:
    """The indices of each row from the best score to the worst, the earlier of equal scores first.

    >>> ranking(torch.tensor([[1.0, 3.0, 1.0, 2.0]]))
    tensor([[1, 3, 0, 2]])
    """
    bad = int(scores.isnan().any(1).count_nonzero())
    if bad:
        raise RankError(f"stack of {len(scores)} networks: {bad} have NaN scores. Lower the learning rate.")
    return scores.argsort(dim=1, descending=True, stable=True)


def with_ones(signs: Tensor) -> Tensor:
    """The inputs with a column of ones, which multiplies the biases."""
    return F.pad(signs, (0, 1), value=1.0)


def train_epoch(stack: Stack, optimizer: Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Train for one pass over batches of signs (with ones) and labels."""
    for signs, labels in batches:
        optimizer.zero_grad()
        stack.loss(signs, labels).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()


def _fresh_member(width: int, inputs: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape: tuple[int, ...], fan_in: int) -> Tensor:
        drawn: Tensor = (2 * torch.rand(shape, generator=generator) - 1) / fan_in**0.5
        return drawn

    return uniform((width, inputs + 1), inputs), uniform((width,), width), uniform((), width)


def _first(widths: Sequence[int], like: Tensor) -> Tensor:
    """A mask of the first `width` nodes of each row."""
    return torch.arange(like.shape[1], device=like.device) < torch.tensor(widths, device=like.device)[:, None]


def _replace(parameter: nn.Parameter, change: Callable[[Tensor], Tensor], optimizer: Optimizer) -> None:
    """Apply `change` to the parameter and to the optimizer's state of the same shape."""
    shape = parameter.shape
    parameter.data, parameter.grad = change(parameter.data), None
    for name, value in optimizer.state[parameter].items():
        if value.shape == shape:
            optimizer.state[parameter][name] = change(value)
