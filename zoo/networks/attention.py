"""Attention: written by hand, fused, with grouped queries, and in torch's own modules."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from networks.registry import network, sequences


def heads(x, count):
    """[batch, time, count * size] -> [batch, count, time, size]"""
    return x.view(x.shape[0], x.shape[1], count, -1).transpose(1, 2)


def two_sequences():
    return torch.randn(3, 4, 12), torch.randn(3, 5, 7), torch.randn(3, 5, 9)


def joined(x):
    return x.transpose(1, 2).flatten(2)


@network("attention_by_hand", "exact", "value.weight", 0, example=sequences)
class AttentionByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.scale = 2, 0.4
        self.query = nn.Linear(7, 12)
        self.key = nn.Linear(7, 12)
        self.value = nn.Linear(7, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        query, key, value = (heads(layer(x), self.num_heads) for layer in (self.query, self.key, self.value))
        weights = (query @ key.transpose(-1, -2) * self.scale).softmax(-1)
        return self.out(joined(weights @ value))


@network("one_size_for_all_heads", "exact", "value.weight", 0, example=sequences)
class OneSizeForAllHeads(nn.Module):
    """The number of heads is literal; their size is one attribute for queries, keys and values."""

    def __init__(self):
        super().__init__()
        self.size = 6
        self.query, self.key, self.value = (nn.Linear(7, 12) for _ in range(3))
        self.out = nn.Linear(12, 7)

    def forward(self, x):
        shape = len(x), x.shape[1], 2, self.size
        query, key, value = (f(x).view(shape).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = (query @ key.transpose(2, 3)).softmax(-1) @ value
        return self.out(attended.transpose(1, 2).reshape(len(x), x.shape[1], 2 * self.size))


@network("fused_qkv", "exact", "qkv.weight", 0, example=sequences)
class FusedQkv(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.qkv = nn.Linear(7, 36)
        self.out = nn.Linear(12, 5)

    def forward(self, x):
        query, key, value = (heads(part, self.num_heads) for part in self.qkv(x).chunk(3, -1))
        return self.out(joined(F.scaled_dot_product_attention(query, key, value, scale=0.4)))


@network("grouped_query_attention", "exact", "value.weight", 0, example=sequences)
class GroupedQueryAttention(nn.Module):
    """Four heads of queries share two heads of keys and values."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = 4, 2, 6
        self.query = nn.Linear(7, 24, bias=False)
        self.key = nn.Linear(7, 12, bias=False)
        self.value = nn.Linear(7, 12, bias=False)
        self.out = nn.Linear(24, 5)

    def split(self, x, count):
        return x.view(x.shape[0], x.shape[1], count, self.head_dim).transpose(1, 2)

    def forward(self, x):
        query = self.split(self.query(x), self.num_heads)
        key, value = (self.split(layer(x), self.num_key_value_heads) for layer in (self.key, self.value))
        copies = self.num_heads // self.num_key_value_heads
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        return self.out(joined(F.scaled_dot_product_attention(query, key, value, scale=0.4, is_causal=True)))


class SharedKeys(nn.Module):
    """All query heads share one head of keys and values.

    Either heads or positions inside a head could be units; the six heads are, because there are more of them.
    """

    attend: Callable[..., torch.Tensor]  # defined by subclasses

    def __init__(self):
        super().__init__()
        self.num_heads = 6
        self.query, self.key, self.value = nn.Linear(7, 24), nn.Linear(7, 4), nn.Linear(7, 4)
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        query, key, value = heads(self.query(x), self.num_heads), self.key(x)[:, None], self.value(x)[:, None]
        return self.out(joined(self.attend(query, key, value)))


@network("shared_keys_broadcast", "exact", "query.weight", 0, example=sequences)
class SharedKeysBroadcast(SharedKeys):
    def attend(self, query, key, value):
        return (query @ key.transpose(2, 3)).softmax(-1) @ value


@network("shared_keys_expanded", "exact", "query.weight", 0, example=sequences)
class SharedKeysExpanded(SharedKeys):
    def attend(self, query, key, value):
        key, value = (part.expand(-1, self.num_heads, -1, -1) for part in (key, value))
        return F.scaled_dot_product_attention(query, key, value)


@network("shared_keys_repeated", "exact", "query.weight", 0, example=sequences)
class SharedKeysRepeated(SharedKeys):
    def attend(self, query, key, value):
        key, value = (part.repeat(1, self.num_heads, 1, 1) for part in (key, value))
        return F.scaled_dot_product_attention(query, key, value)


@network("multihead_attention", "exact", "attention.in_proj_weight", 0, example=sequences)
class TorchAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 12)
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.head(self.attention(x, x, x, need_weights=False)[0])


@network("cross_attention", "exact", "attention.v_proj_weight", 0, example=two_sequences)
class CrossAttention(nn.Module):
    """Keys and values have different widths, so that each has a separate weight."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, kdim=7, vdim=9, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, queries, keys, values):
        return self.head(self.attention(queries, keys, values, need_weights=False)[0])


@network("encoder_layer", "exact", "layer.linear1.weight", 0, example=sequences)
class EncoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 12)
        self.layer = nn.TransformerEncoderLayer(12, 4, 16, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.layer(self.first(x)))


@network("scale_from_shape", "inexact", "query.weight", 0, example=sequences)
class ScaleFromShape(nn.Module):
    """The temperature 1 / sqrt(d) is read from the shape, so a narrower query changes it."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(7, 12)
        self.key = nn.Linear(7, 12)
        self.value = nn.Linear(7, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        weights = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
        return self.out(weights @ value)


@network("scale_from_tensor", "inexact", "query.weight", 0, example=sequences)
class ScaleFromTensor(ScaleFromShape):
    """The scale is a tensor that is computed from the size."""

    def forward(self, x):
        query, key, value = self.query(x), self.key(x), self.value(x)
        scale = torch.sqrt(torch.tensor(query.shape[-1], dtype=query.dtype))
        return self.out((query @ key.transpose(1, 2) / scale).softmax(-1) @ value)


@network("rotated_pairs", "exact", "value.weight", 0, example=sequences)
class RotatedPairs(nn.Module):
    """Rotary positions over pairs of neighbours: only whole heads can be removed."""

    def __init__(self):
        super().__init__()
        self.count = 4
        self.query, self.key, self.value = (nn.Linear(7, 24) for _ in range(3))
        self.out = nn.Linear(24, 7)

    def forward(self, x):
        query, key, value = (heads(layer(x), self.count) for layer in (self.query, self.key, self.value))
        weights = (self.rotated(query) @ self.rotated(key).transpose(2, 3)).softmax(-1)
        return self.out(joined(weights @ value))

    def rotated(self, x):
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
        return torch.stack(turned, -1).flatten(-2)


@network("scale_from_default", "inexact", "query.weight", 0, example=sequences)
class ScaleFromDefault(nn.Module):
    """The same temperature, computed inside torch's fused attention."""

    def __init__(self):
        super().__init__()
        self.query = nn.Linear(7, 12)
        self.key = nn.Linear(7, 12)
        self.value = nn.Linear(7, 8)
        self.out = nn.Linear(8, 5)

    def forward(self, x):
        parts = (layer(x).unsqueeze(1) for layer in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*parts).squeeze(1))


@network("reshape_that_copies", "exact", "qkv.weight", 0, example=sequences)
class ReshapeThatCopies(nn.Module):
    """The total width of the heads is a separate attribute, and the reshape that uses it is a clone and a view."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = 4, 6, 24
        self.qkv, self.proj = nn.Linear(7, 72), nn.Linear(24, 5)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        x = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        return self.proj(x.transpose(1, 2).reshape(batch, length, self.attn_dim))


@network("one_norm_for_all_heads", "exact", "value.weight", 0, example=sequences)
class OneNormForAllHeads(nn.Module):
    """All heads share the weight of a norm. With one of two heads left, its shape equals that of its input."""

    def __init__(self):
        super().__init__()
        self.size = 6
        self.query, self.key, self.value = (nn.Linear(7, 12) for _ in range(3))
        self.scale, self.out = nn.Parameter(torch.ones(6)), nn.Linear(12, 5)

    def forward(self, x):
        query, key, value = (layer(x).unflatten(-1, (-1, self.size)) for layer in (self.query, self.key, self.value))
        query, key, value = (part.transpose(1, 2) for part in (self.normed(query), self.normed(key), value))
        return self.out(joined((query @ key.transpose(2, 3)).softmax(-1) @ value))

    def normed(self, x):
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attending(nn.Module):
    """Attention that gets the number of heads and their total width from another object."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 24) for _ in range(3))
        self.out = nn.Linear(24, 8)

    def attend(self, x, sizes):
        batch, length, _ = x.shape
        query, key, value = (heads(layer(x), sizes.heads) for layer in (self.query, self.key, self.value))
        x = (query @ key.transpose(2, 3)).softmax(-1) @ value
        return self.out(x.transpose(1, 2).reshape(batch, length, sizes.width))


class Sizes(nn.Module):
    """A module without parameters that holds sizes for other modules."""

    def __init__(self):
        super().__init__()
        self.heads, self.width = 4, 24


class WithSizes(Attending):
    heads: int  # set by the network that deletes `sizes`
    width: int

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def forward(self, x):
        return self.attend(x, self.sizes)


class Blocks(nn.Module):
    """Blocks with residual connections, between two linear layers."""

    def __init__(self, *blocks):
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(7, 8), nn.ModuleList(blocks), nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@network("heads_in_a_child", "exact", "blocks.1.value.weight", 0, example=sequences)
class HeadsInAChild(Blocks):
    def __init__(self):
        super().__init__(WithSizes(Sizes()), WithSizes(Sizes()))


@network("heads_in_a_shared_child", "exact", "blocks.1.value.weight", 0, example=sequences)
class HeadsInASharedChild(Blocks):
    """Both blocks use the same number of heads, so they lose equal numbers."""

    def __init__(self):
        sizes = Sizes()
        super().__init__(WithSizes(sizes), WithSizes(sizes))


@network("heads_in_a_config", "exact", "blocks.1.value.weight", 0, example=sequences)
class HeadsInAConfig(Blocks):
    """Both blocks use one object. Each gets a copy of it, so that they may keep different numbers of heads."""

    def __init__(self):
        sizes = SimpleNamespace(heads=4, width=24, layers=2)
        super().__init__(WithSizes(sizes), WithSizes(sizes))


@network("heads_of_the_child_that_the_parent_runs", "exact", "inner.value.weight", 0, example=sequences)
class HeadsOfTheChildThatTheParentRuns(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(7, 8), WithSizes(Sizes()), nn.Linear(8, 5)
        del self.inner.sizes
        self.inner.heads, self.inner.width = 4, 24

    def forward(self, x):
        return self.head(self.inner.attend(self.first(x), self.inner))


class InDict(Attending):
    def __init__(self):
        super().__init__()
        self.options = {"heads": 4, "width": 24, "layers": 4}

    def forward(self, x):
        return self.attend(x, SimpleNamespace(**self.options))


@network("heads_in_a_dict", "exact", "blocks.1.value.weight", 0, example=sequences)
class HeadsInADict(Blocks):
    def __init__(self):
        super().__init__(InDict(), InDict())


def angles(size, length):
    """The complex numbers that rotate pairs of neighbours, computed as in Llama's reference code."""
    steps = 1.0 / 10_000 ** (torch.arange(0, size, 2).double() / size)
    turns = torch.outer(torch.arange(length).double(), steps)
    return torch.polar(torch.ones_like(turns), turns)


@network("complex_rotary", "exact", "wv.weight", 0, example=sequences)
class ComplexRotary(nn.Module):
    """Llama's reference code: rotary positions by complex numbers, and keys shared by groups of queries."""

    def __init__(self):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.n_rep, self.head_dim = 4, 2, 2, 6
        self.wq, self.wk, self.wv = (nn.Linear(7, 6 * count, bias=False) for count in (4, 2, 2))
        self.wo = nn.Linear(24, 7, bias=False)
        self.freqs_cis = self.table()

    def table(self):
        return angles(6, 8)

    def forward(self, x):
        batch, length, _ = x.shape
        query = self.wq(x).view(batch, length, self.n_heads, self.head_dim)
        key, value = (layer(x).view(batch, length, self.n_kv_heads, self.head_dim) for layer in (self.wk, self.wv))
        query, key = (self.turned(part, self.freqs_cis[:length]) for part in (query, key))
        query, key, value = (part.transpose(1, 2) for part in (query, self.repeated(key), self.repeated(value)))
        x = (query @ key.transpose(2, 3) / self.head_dim**0.5).softmax(-1) @ value
        return self.wo(x.transpose(1, 2).contiguous().view(batch, length, -1))

    def turned(self, x, freqs):
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        freqs = freqs.view(1, pairs.shape[1], 1, pairs.shape[-1])
        return torch.view_as_real(pairs * freqs).flatten(3).type_as(x)

    def repeated(self, x):
        batch, length, count, size = x.shape
        spread = x[:, :, :, None, :].expand(batch, length, count, self.n_rep, size)
        return spread.reshape(batch, length, count * self.n_rep, size)


@network("complex_rotary_in_a_buffer", "exact", "wv.weight", 0, example=sequences)
class ComplexRotaryInABuffer(ComplexRotary):
    def __init__(self):
        super().__init__()
        del self.freqs_cis
        self.register_buffer("freqs_cis", self.table(), persistent=False)


@network("complex_rotary_made_in_forward", "exact", "wv.weight", 0, example=sequences)
class ComplexRotaryMadeInForward(ComplexRotary):
    def forward(self, x):
        self.freqs_cis = angles(self.head_dim, x.shape[1])
        return super().forward(x)
