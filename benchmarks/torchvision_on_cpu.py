"""Make torchvision importable beside a CPU build of torch.

The wheel that PyPI has is linked with CUDA: beside a CPU torch its library of C++ operators does not load, nobody
declares ``torchvision::nms``, and ``import torchvision`` dies where it describes that operator. A declaration is
enough: the zoo's networks never call it.
"""

import importlib.util
from pathlib import Path

import torch

_declarations: list[torch.library.Library] = []  # a library that is dropped takes its operators along


def make_importable() -> None:
    """Declare the operators that ``import torchvision`` needs, if its own library cannot; to be called before it."""
    spec = importlib.util.find_spec("torchvision")
    if _declarations or spec is None or spec.origin is None or _own_operators_load(Path(spec.origin).parent):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declarations.append(library)


def _own_operators_load(folder: Path) -> bool:
    for library in folder.glob("_C*"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return True
    return False
