"""One thread per worker, and reproducible property tests."""

import gc

import pytest
import torch
from hypothesis import settings

from networks import NETWORKS

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the cases of each network into one process, which traces it once (`traced_once.py`)."""
    for item in items:
        if (name := network_of(item)) and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(name))


@pytest.fixture(scope="module", autouse=True)
def no_garbage_collection_of_what_other_modules_left() -> None:
    """Exclude everything that exists before a module's first test from garbage collection.

    keepk collects garbage before it refuses a second Pruner or a DDP wrapper that may have been deleted. Each time,
    Python would walk over all collected tests, all of torch, and the graphs and libraries of earlier modules.
    """
    gc.collect()
    gc.freeze()


def network_of(item: pytest.Item) -> str | None:
    """The network that a test was parametrized with, or None."""
    name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    return name if isinstance(name, str) and name in NETWORKS else None
