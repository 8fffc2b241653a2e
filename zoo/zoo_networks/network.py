"""One network of the zoo: how to build it, its inputs, and its output layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 13  # widths that no hidden layer has, so that output layers are found by their width
VOCABULARY = 211

Inputs = tuple[Tensor, ...]

_SOURCES = {
    "my": "handwritten",
    "tv": "vision",
    "timm": "timm",
    "hf": "language",
    "monai": "medical",
    "random": "random",
}


@dataclass(frozen=True)
class Network:
    """How to build a network and draw its inputs, reproducibly.

    ``heads`` names the output layers; None finds them by their width.
    """

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[], Tensor | Inputs]
    heads: tuple[str, ...] | None = None

    @property
    def source(self) -> str:
        """Where it comes from: handwritten, vision, timm, language, medical or random."""
        return _SOURCES[self.name.split(".")[0]]

    def build(self, seed: int = 0) -> nn.Module:
        """The network in eval mode, every parameter trainable."""
        torch.manual_seed(seed)
        return self.make().eval().requires_grad_(True)

    def inputs(self, seed: int = 1) -> Inputs:
        """The positional arguments of a forward pass."""
        torch.manual_seed(seed)
        drawn = self.draw()
        return (drawn,) if isinstance(drawn, Tensor) else drawn

    def output_layers(self, model: nn.Module) -> list[nn.Module]:
        """The layers whose width is given by the task and must not change."""
        if self.heads is not None:
            return [model.get_submodule(name) for name in self.heads]
        return [module for module in model.modules() if _width(module) in (CLASSES, VOCABULARY)]


def _width(module: nn.Module) -> int | None:
    names = ("out_channels", "out_features", "nf")  # nf: the Conv1D of transformers
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def images(size: int = 64, *, channels: int = 3, batch: int = 2) -> Callable[[], Tensor]:
    """A function that draws square images."""
    return lambda: torch.randn(batch, channels, size, size)


def noise(*shape: int) -> Callable[[], Tensor]:
    """A function that draws a tensor of this shape."""
    return lambda: torch.randn(*shape)


def tokens(length: int = 12, *, batch: int = 2) -> Callable[[], Tensor]:
    """A function that draws sequences of token ids."""
    return lambda: torch.randint(0, VOCABULARY, (batch, length))
