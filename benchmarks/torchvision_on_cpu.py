"""Make PyPI's torchvision importable with a CPU build of torch.

PyPI's wheel is linked with CUDA. With a CPU build of torch its library of C++ operators does not load, so
``torchvision::nms`` is not defined, and ``import torchvision`` fails when it registers a fake kernel for it. Defining
the operator without a kernel is enough, because the zoo's networks never call it.
"""

import importlib.util
from pathlib import Path

import torch

_declarations: list[torch.library.Library] = []  # keep a reference: deleting a library removes its operators


def make_importable() -> None:
    """Define the operators that ``import torchvision`` needs, if torchvision's library does not load. Call it first."""
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
