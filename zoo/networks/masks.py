"""Masks and token indices that are broadcast over channels, and so are independent of them."""

import torch
from torch import nn

from networks.attention import heads, joined
from networks.registry import network, sequences, vectors


def masked_sequences():
    return torch.randn(3, 5, 7), torch.tensor([5, 3, 4])[:, None] > torch.arange(5)


def edges():
    """Nine messages, and the node out of four that each is sent to."""
    return torch.randn(9, 7), torch.tensor([0, 3, 1, 1, 2, 0, 3, 3, 1])


class OneHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(7, 6), nn.Linear(6, 3)


@network("mean_over_tokens", "exact", "first.weight", 0, example=masked_sequences)
class MeanOverTokens(OneHidden):
    """A masked mean over tokens, as in the pooling of sentence embeddings."""

    def forward(self, x, there):
        x = self.first(x)
        mask = there[..., None].expand(x.size()).to(x.dtype)
        return self.head((x * mask).sum(1) / mask.sum(1).clamp(min=1e-9))


@network("mask_that_is_counted", "inexact", "first.weight", 0, example=vectors, only=True)
class MaskThatIsCounted(OneHidden):
    """The number of elements that a mask selects depends on the number of channels."""

    def forward(self, x):
        y = self.first(x)
        mask = (x[:, :1] > 0).expand_as(y)
        return self.head(y * mask) / mask.sum().clamp(min=1)


@network("masked_heads", "exact", "value.weight", 0, example=masked_sequences)
class MaskedHeads(nn.Module):
    """The mask is broadcast over the heads, and both are then folded into the batch."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.query, self.key, self.value = (nn.Linear(7, 8) for _ in range(3))
        self.out = nn.Linear(8, 3)

    def forward(self, x, there):
        batch, length, _ = x.shape
        query, key, value = (heads(layer(x), self.num_heads).flatten(0, 1) for layer in self.layers())
        away = ~there[:, None, None].expand(batch, self.num_heads, length, length).reshape(-1, length, length)
        weights = torch.bmm(query, key.transpose(1, 2)).masked_fill(away, -1e9).softmax(-1)
        return self.out(joined((weights @ value).unflatten(0, (batch, self.num_heads))))

    def layers(self):
        return self.query, self.key, self.value


@network("messages_added", "exact", "first.weight", 0, example=edges)
class MessagesAdded(OneHidden):
    def forward(self, x, nodes):
        x = self.first(x)
        return self.head(x.new_zeros(4, x.shape[1]).scatter_add(0, nodes[:, None].expand_as(x), x).relu())


@network("messages_averaged", "exact", "first.weight", 0, example=edges)
class MessagesAveraged(OneHidden):
    def forward(self, x, nodes):
        x = self.first(x)
        index, old = nodes[:, None].repeat(1, x.shape[1]), torch.ones(4, x.shape[1], dtype=x.dtype)
        return self.head(old.scatter_reduce(0, index, x, "mean", include_self=False))


@network("messages_by_channel", "fixed", "first.weight", 0, example=edges, only=True)
class MessagesByChannel(OneHidden):
    """Each channel of a message is sent to a different node."""

    def forward(self, x, nodes):
        x = self.first(x)
        index = (nodes[:, None] + torch.arange(x.shape[1])) % 4
        return self.head(x.new_zeros(4, x.shape[1]).scatter_add(0, index, x).relu())


@network("messages_in_part", "fixed", "first.weight", 0, example=edges, only=True)
class MessagesInPart(OneHidden):
    """The messages have 6 channels, and are added to the first 6 of 8."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x, nodes):
        x = self.first(x)
        return self.head(x.new_zeros(4, 8).scatter_add(0, nodes[:, None].expand_as(x), x).relu())


@network("tokens_picked", "exact", "first.weight", 0, example=sequences)
class TokensPicked(OneHidden):
    """Selects the tokens with the best scores of another layer."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(7, 1)

    def forward(self, x):
        best = self.score(x).topk(2, dim=1).indices
        return self.head(torch.tanh(self.first(x)).gather(1, best.repeat(1, 1, self.first.out_features)))


@network("tokens_picked_by_channel", "exact", "second.weight", 0, example=sequences)
class TokensPickedByChannel(OneHidden):
    """Each channel of one layer selects the token that the same channel of the other layer takes."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(7, 6)

    def forward(self, x):
        best = self.first(x).argmax(1, keepdim=True)
        return self.head(self.second(x).gather(1, best))


@network("normalised_rows", "exact", "head.weight", 1, example=vectors)
class NormalisedRows(OneHidden):
    """A weight whose rows are normalised to length 1; the lengths are expanded over the columns."""

    def forward(self, x):
        weight = self.head.weight
        lengths = weight.pow(2).sum(1, keepdim=True).sqrt().clamp(min=1e-6).expand_as(weight)
        return nn.functional.linear(self.first(x), weight / lengths)
