"""Channels of several layers that meet: residuals, concatenations, gates, several heads."""

import torch
import torch.nn.functional as F
from torch import nn

from networks.registry import Pictured, network, pictures, sequences


@network("residual", "exact", "first.weight", 0)
class Residual(Pictured):
    def __init__(self):
        super().__init__(8, 8)
        self.conv1 = nn.Conv2d(8, 12, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)

    def pattern(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class PreActivationBlock(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(width)
        self.conv1 = nn.Conv2d(width, inner, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, width, 3, padding=1, bias=False)

    def forward(self, x):
        return x + self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))


@network("preactivation_residual", "exact", "blocks.0.conv1.weight", 0)
class PreActivationResidual(Pictured):
    def __init__(self):
        super().__init__(8, 8)
        self.blocks = nn.Sequential(PreActivationBlock(8, 6), PreActivationBlock(8, 6))
        self.norm = nn.BatchNorm2d(8)

    def pattern(self, x):
        return F.relu(self.norm(self.blocks(x)))


@network("concat", "exact", "down.weight", 0)
class Concat(Pictured):
    """A U-Net with one level."""

    def __init__(self):
        super().__init__(8, 7)
        self.down = nn.Conv2d(8, 12, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.join = nn.Conv2d(14, 7, 3, padding=1)

    def pattern(self, x):
        deep = F.relu(self.down(F.max_pool2d(x, 2)))
        return F.relu(self.join(torch.cat([x, self.up(deep)], 1)))


@network("dense_block", "exact", "norms.1.weight", 0)
class DenseBlock(Pictured):
    """Each BatchNorm reads the concatenation of all earlier outputs, and its reads can be removed one by one."""

    def __init__(self):
        super().__init__(8, 20)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8 + 4 * step) for step in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(8 + 4 * step, 4, 3, padding=1, bias=False) for step in range(3))
        self.last = nn.BatchNorm2d(20)

    def forward(self, x):
        x = self.first(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return self.head(F.relu(self.last(x)).mean((2, 3)))


@network("se_gate", "exact", "squeeze.weight", 0)
class SqueezeGate(Pictured):
    def __init__(self):
        super().__init__(8, 8)
        self.squeeze = nn.Conv2d(8, 4, 1)
        self.excite = nn.Conv2d(4, 8, 1)

    def pattern(self, x):
        small = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(small))))


@network("broadcast_gate", "exact", "first.weight", 0)
class BroadcastGate(Pictured):
    """A spatial gate of one channel, then a scale per channel."""

    def __init__(self):
        super().__init__(8, 8)
        self.gate = nn.Conv2d(8, 1, 1)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def pattern(self, x):
        return x * torch.sigmoid(self.gate(x)) * self.scale


@network("two_branch_product", "exact", "left.weight", 0)
class TwoBranchProduct(Pictured):
    def __init__(self):
        super().__init__(8, 12)
        self.left = nn.Conv2d(8, 12, 1)
        self.right = nn.Conv2d(8, 12, 1)

    def pattern(self, x):
        return self.left(x) * torch.tanh(self.right(x)).amax((2, 3), keepdim=True)


@network("summed_branches", "exact", "left.weight", 0)
class SummedBranches(Pictured):
    """Branches that are stacked and summed must keep the same channels."""

    def __init__(self):
        super().__init__(8, 12)
        self.left = nn.Conv2d(8, 12, 1)
        self.right = nn.Conv2d(8, 12, 3, padding=1)

    def pattern(self, x):
        return torch.stack([F.relu(self.left(x)), self.right(x)]).sum(0)


@network("mean_of_branches", "exact", "left.weight", 0)
class MeanOfBranches(SummedBranches):
    def pattern(self, x):
        return torch.stack([self.left(x), self.right(x)], -1).mean(-1)


@network("selective_kernel", "exact", "left.weight", 0)
class SelectiveKernel(Pictured):
    """Two branches over the halves of the channels, weighted by a softmax over the branches."""

    def __init__(self):
        super().__init__(12, 8)
        self.width, self.branches = 12, 2
        self.left = nn.Conv2d(6, 8, 1)
        self.right = nn.Conv2d(6, 8, 3, padding=1)
        self.squeeze = nn.Conv2d(8, 6, 1)
        self.select = nn.Conv2d(6, 16, 1)

    def pattern(self, x):
        left, right = x.split(self.width // self.branches, 1)
        both = torch.stack([self.left(left), self.right(right)], 1)
        chosen = self.select(F.relu(self.squeeze(both.sum(1).mean((2, 3), keepdim=True))))
        chosen = chosen.view(len(x), self.branches, chosen.shape[1] // self.branches, 1, 1)
        return (both * chosen.softmax(1)).sum(1)


@network("unit_length", "exact", "first.weight", 0)
class UnitLength(Pictured):
    """The norm is expanded to the shape of the tensor that it divides."""

    def __init__(self):
        super().__init__(12, 12)

    def pattern(self, x):
        return F.normalize(x, dim=1)


@network("expanded_gate", "exact", "first.weight", 0)
class ExpandedGate(Pictured):
    """One number per pixel, expanded over the channels."""

    def __init__(self):
        super().__init__(12, 12)
        self.gate = nn.Conv2d(12, 1, 1)

    def pattern(self, x):
        return x * torch.sigmoid(self.gate(x)).expand_as(x)


@network("padded_shortcut", "exact", "inner.weight", 0)
class PaddedShortcut(Pictured):
    """A shortcut that is padded with channels of zeros. It may be fixed, but the inside of the block is not."""

    def __init__(self):
        super().__init__(8, 12)
        self.inner = nn.Conv2d(8, 6, 1)
        self.outer = nn.Conv2d(6, 12, 1)

    def pattern(self, x):
        return self.outer(F.relu(self.inner(x))) + F.pad(x, (0, 0, 0, 0, 2, 2))


@network("siamese", "exact", "first.weight", 0, example=lambda: (pictures(), pictures()))
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 12, 3)
        self.head = nn.Linear(24, 5)

    def embed(self, x):
        return F.relu(self.second(F.relu(self.first(x)))).mean((2, 3))

    def forward(self, left, right):
        return self.head(torch.cat([self.embed(left), self.embed(right)], 1))


@network(
    "dict_outputs", "exact", "first.weight", 0, example=lambda: {"image": pictures(), "scale": torch.rand(3, 1, 1, 1)}
)
class DictOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.boxes = nn.Sequential(nn.Conv2d(8, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1))
        self.classes = nn.Linear(8, 5)

    def forward(self, image, scale):
        x = F.relu(self.first(image * scale))
        return {"classes": self.classes(x.mean((2, 3))), "more": [self.boxes(x), scale]}


@network("python_branch", "exact", "first.weight", 0)
class PythonBranch(Pictured):
    """A branch on the data, both sides of which read the same channels."""

    def __init__(self):
        super().__init__(8, 7)
        self.often = nn.Conv2d(8, 7, 1)
        self.never = nn.Conv2d(8, 7, 1)

    def pattern(self, x):
        if x.detach().sum() > -1e9:
            return F.relu(self.often(x))
        return self.never(x)


@network("caches", "exact", "first.weight", 0)
class Caches(Pictured):
    """Buffers with one number per channel, and coordinates cached in a plain dict."""

    def __init__(self):
        super().__init__(8, 8)
        self.register_buffer("center", torch.randn(1, 8, 1, 1))
        self.register_buffer("spread", torch.rand(1, 8, 1, 1) + 0.5, persistent=False)
        self.grids = {}

    def pattern(self, x):
        size = tuple(x.shape[2:])
        if size not in self.grids:
            self.grids[size] = torch.linspace(0, 1, size[1], dtype=x.dtype)
        return F.relu((x - self.center) / self.spread + self.grids[size])


@network("batch_norms_of_sequences", "exact", "inner.0.weight", 0, example=sequences)
class BatchNormsOfSequences(nn.Module):
    """Linear layers after transposed BatchNorms: strides decide whether they run as an addmm, or a bmm and a sum."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 8)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(3))
        self.inner = nn.ModuleList(nn.Linear(8, 12) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(12, 8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x)
        for norm, inner, outer in zip(self.norms[:2], self.inner, self.outer, strict=True):
            x = x + outer(F.relu(inner(norm(x.transpose(1, 2)).transpose(1, 2))))
        return self.head(self.norms[2](x.transpose(1, 2)).transpose(1, 2))
