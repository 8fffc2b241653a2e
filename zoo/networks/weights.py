"""Weights that are used twice, transposed, raw, or through a parametrization."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from networks.registry import Pictured, network, sequences, vectors, words


@network("tied_autoencoder", "exact", "encoder.weight", 0, example=vectors)
class TiedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(7, 12)
        self.inner = nn.Linear(12, 6)
        self.inner_bias = nn.Parameter(torch.zeros(12))
        self.outer_bias = nn.Parameter(torch.zeros(7))

    def forward(self, x):
        code = torch.tanh(self.inner(F.relu(self.encoder(x))))
        wide = F.relu(F.linear(code, self.inner.weight.t(), self.inner_bias))
        return F.linear(wide, self.encoder.weight.t(), self.outer_bias)


@network("tied_embedding", "exact", "embedding.weight", 1, example=words)
class TiedEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.second = nn.Linear(8, 12)
        self.third = nn.Linear(12, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        return self.head(x + self.third(F.relu(self.second(x))))


@network("shared_module", "exact", "shared.weight", 0)
class SharedModule(Pictured):
    def __init__(self):
        super().__init__(8, 8)
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def pattern(self, x):
        for _ in range(3):
            x = F.relu(self.norm(self.shared(x)))
        return x


@network("functional_conv", "exact", "kernel", 0)
class FunctionalConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(8, 3, 3, 3) / 5)
        self.bias = nn.Parameter(torch.zeros(8))
        self.mean = nn.Parameter(torch.zeros(1, 8, 1, 1))
        self.out = nn.ParameterDict({"weight": torch.randn(5, 8) / 3})

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.kernel, self.bias, padding=1) - self.mean)
        return F.linear(F.avg_pool2d(x, (6, 10)).flatten(1), self.out["weight"])


@network("einsum", "exact", "mix", 1, example=sequences)
class Einsum(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 8)
        self.mix = nn.Parameter(torch.randn(8, 3, 4) / 3)
        self.out = nn.Parameter(torch.randn(3, 4, 5) / 3)

    def forward(self, x):
        x = torch.einsum("btd,dhe->bthe", F.relu(self.first(x)), self.mix)
        return torch.einsum("bthe,heo->bto", F.relu(x), self.out)


@network("bmm_experts", "exact", "inner", 2, example=sequences)
class BmmExperts(nn.Module):
    """Three experts, each with its own matrices, mixed by a gate."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(7, 3)
        self.inner = nn.Parameter(torch.randn(3, 7, 8) / 3)
        self.outer = nn.Parameter(torch.randn(3, 8, 5) / 3)

    def forward(self, x):
        batch, time, size = x.shape
        flat = x.reshape(1, batch * time, size).expand(3, -1, -1)
        answers = torch.bmm(F.relu(torch.bmm(flat, self.inner)), self.outer)
        gate = self.gate(x).softmax(-1).reshape(batch * time, 3).t().unsqueeze(-1)
        return (answers * gate).sum(0).view(batch, time, 5)


@network("weight_norm", "exact", "second.parametrizations.weight.original0", 0)
class WeightNorm(Pictured):
    """The norm runs over the layer's inputs, so only its outputs can be removed exactly."""

    def __init__(self):
        super().__init__(8, 12)
        self.first = parametrizations.weight_norm(self.first)
        self.second = parametrizations.weight_norm(nn.Conv2d(8, 12, 3, padding=1))

    def pattern(self, x):
        return F.relu(self.second(x))


class Bounded(nn.Module):
    """An elementwise parametrization that maps zero to zero."""

    def forward(self, weight):
        return torch.tanh(weight)


@network("parametrized", "exact", "second.parametrizations.weight.original", 0)
class Parametrized(Pictured):
    def __init__(self):
        super().__init__(8, 12)
        self.second = nn.Conv2d(8, 12, 1)
        parametrize.register_parametrization(self.second, "weight", Bounded())

    def pattern(self, x):
        return F.relu(self.second(x))


@network("spectral_norm", "exact", "second.parametrizations.weight.original", 0)
class SpectralNorm(Pictured):
    """The largest singular value is estimated with buffers u and v, whose entries are removed with their channels."""

    def __init__(self):
        super().__init__(8, 12)
        parametrizations.spectral_norm(self.first)
        self.second = parametrizations.spectral_norm(nn.Conv2d(8, 12, 3, padding=1))

    def pattern(self, x):
        return F.relu(self.second(x))


@network("spectral_norm_by_hooks", "exact", "second.weight_orig", 1)
class SpectralNormByHooks(Pictured):
    def __init__(self):
        super().__init__(8, 12)
        self.first = nn.utils.spectral_norm(self.first)
        self.second = nn.utils.spectral_norm(nn.ConvTranspose2d(8, 12, 3, padding=1))

    def pattern(self, x):
        return F.relu(self.second(x))


@network("spectral_norm_of_linears", "exact", "first.weight_orig", 0, example=sequences)
class SpectralNormOfLinears(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.utils.spectral_norm(nn.Linear(7, 8)), nn.utils.spectral_norm(nn.Linear(8, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(F.relu(self.second(F.relu(self.first(x)))))


@network("bilinear", "exact", "mixed.weight", 0, example=sequences)
class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(7, 8), nn.Linear(7, 6)
        self.mixed, self.head = nn.Bilinear(8, 6, 10), nn.Linear(10, 5)

    def forward(self, x):
        return self.head(F.relu(self.mixed(F.relu(self.left(x)), F.relu(self.right(x)))))


@network("bilinear_inputs", "exact", "right.weight", 0, example=vectors)
class BilinearInputs(nn.Module):
    """Neither input is zero for a removed channel, but the slices of the weight are."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(7, 8), nn.Linear(7, 6), nn.Bilinear(8, 6, 5, bias=False)

    def forward(self, x):
        return self.head(torch.sigmoid(self.left(x)), torch.sigmoid(self.right(x)))
