"""The networks of ``benchmarks/zoo.py``, small and with random weights.

A source is one module of this package with a table ``NETWORKS``. It is imported only when it is requested, so that a
missing library affects only its own networks.
"""

import importlib
from collections.abc import Iterable

import torchvision_on_cpu
from zoo_networks.network import Inputs as Inputs
from zoo_networks.network import Network as Network

SOURCES = ("handwritten", "vision", "timm", "language", "medical")

torchvision_on_cpu.make_importable()


def listing(sources: Iterable[str] = SOURCES) -> list[Network]:
    """The networks of these sources, in the order of the tables."""
    return [network for name in sources for network in importlib.import_module(f"{__name__}.{name}").NETWORKS]
