"""Imports that tests and documentation examples of frameworks share."""

import importlib
import importlib.util
import sys
from pathlib import Path

# Lightning and timm import torchvision, which may be built for a different torch.
if importlib.util.find_spec("torchvision"):
    sys.path.append(str(Path(__file__).parent / "benchmarks"))
    importlib.import_module("torchvision_on_cpu").make_importable()
