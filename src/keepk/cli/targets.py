"""Arguments of the command line: a model given as ``module:name``, an input given as ``2x3x224x224``."""

import importlib
import re
import sys
from functools import reduce
from pathlib import Path
from textwrap import shorten
from types import ModuleType

import torch
from torch import Tensor, nn

from keepk.errors import TraceError
from keepk.plan.names import nearest

REASON = 200  # characters of torch's error that are quoted; some of its messages are a page long


def model_from(target: str) -> nn.Module:
    """Import the model given as ``module:name``.

    Args:
        target: A Python module and, after the colon, the name in it of a `torch.nn.Module` or of a callable without
            arguments that returns one. The name may contain dots.

    Returns:
        The model.

    Raises:
        TraceError: If `target` has a different form, or does not lead to a module.

    >>> model_from("torch.nn:ReLU")
    ReLU()
    """
    path, _, name = target.partition(":")
    if not path or not name:
        raise TraceError(
            f"model {target!r}: not of the form module:name. Write mynet:make_model for make_model in mynet.py."
        )
    if path.endswith(".py"):
        module = ".".join(Path(path).with_suffix("").parts)
        raise TraceError(f'model {target!r}: names a file, not a module. Leave out ".py": {module}:{name}.')
    found = _attribute(_imported(path, target), name, target)
    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise TraceError(
            f"model {target!r}: {name} has type {type(found).__name__}. "
            f"Name a torch.nn.Module or a callable without arguments that returns one."
        )
    try:
        made = found()
    except Exception as error:
        raise TraceError(
            f"model {target!r}: {name}() failed ({type(error).__name__}: {error}). "
            f"Name a callable that needs no arguments."
        ) from error
    if not isinstance(made, nn.Module):
        raise TraceError(f"model {target!r}: {name}() returned {type(made).__name__}. Return a torch.nn.Module.")
    return made


def _imported(path: str, target: str) -> ModuleType:
    # A console script has its own folder first in sys.path, not the current one, unlike `python -m`.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as missing:
        # The named module may exist and fail to import another one, which is a different error.
        if missing.name is not None and (path == missing.name or path.startswith(f"{missing.name}.")):
            raise TraceError(
                f"model {target!r}: there is no module {missing.name!r} in {here} or among the installed packages. "
                f"Run the command in the folder of {missing.name.partition('.')[0]}.py, or install it."
            ) from missing
        raise _broken(path, target, missing) from missing
    except Exception as error:
        raise _broken(path, target, error) from error


def _broken(path: str, target: str, error: Exception) -> TraceError:
    return TraceError(
        f"model {target!r}: importing {path} failed ({type(error).__name__}: {error}). "
        f"Make `python -c 'import {path}'` work."
    )


def _attribute(module: ModuleType, name: str, target: str) -> object:
    try:
        found: object = reduce(getattr, name.split("."), module)
    except AttributeError:
        known = [word for word in vars(module) if not word.startswith("_")]
        raise TraceError(
            f"model {target!r}: {module.__name__} has no {name!r}. Nearest names: {nearest(name, known)}."
        ) from None
    return found


def input_from(spec: str) -> Tensor:
    """Create the tensor given as ``2x3x224x224`` or ``2x12:int64``.

    Args:
        spec: Sizes joined by "x" and, after a colon, a torch dtype; float32 by default.

    Returns:
        Random numbers with a fixed seed, or zeros for an integer dtype: zero is a valid index for any embedding.

    Raises:
        TraceError: If `spec` has a different form, or the tensor cannot be created.

    >>> input_from("2x12:int64").shape
    torch.Size([2, 12])
    """
    sizes, _, kind = spec.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or not isinstance(dtype, torch.dtype):
        raise TraceError(
            f"input {spec!r}: not of the form SIZExSIZE... or SIZExSIZE...:DTYPE. "
            f"Write 2x3x224x224 for two images, 2x12:int64 for two rows of 12 integers."
        )
    try:
        return _tensor(tuple(map(int, sizes.split("x"))), dtype)
    except (
        RuntimeError,
        OverflowError,
        TypeError,
        ValueError,
    ) as error:  # which one depends on how large the numbers are
        reason = shorten(f"{type(error).__name__}: {error}", REASON, placeholder=" ...")
        raise TraceError(
            f"input {spec!r}: the tensor cannot be created ({reason}). Use smaller sizes or a common dtype."
        ) from error


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(shape, dtype=dtype)
