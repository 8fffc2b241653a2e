"""The zoo: small networks with random weights that judge channel removal.

A source is one module of this package, with its table ``NETWORKS``; it is imported when it is asked for, so that
a missing library hides only its own networks.
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
