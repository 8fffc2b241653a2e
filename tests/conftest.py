"""One thread a worker, and property tests that repeat."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # `strategies` is shared by the tests

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Examples in documentation give no warning of any kind: the exceptions for tests are not for what users copy."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.filterwarnings("error::keepk.KeepkWarning"))
