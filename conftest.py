"""Imports and warnings that tests and documentation examples share."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

# Lightning and timm import torchvision, which may be built for a different torch.
if importlib.util.find_spec("torchvision"):
    sys.path.append(str(Path(__file__).parent / "benchmarks"))
    importlib.import_module("torchvision_on_cpu").make_importable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make every warning in a documentation example an error, because users copy them, and tests have exceptions."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.filterwarnings("error::keepk.KeepkWarning"))
