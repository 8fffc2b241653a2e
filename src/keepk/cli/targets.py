"""What the command line names: a model as ``module:name``, an input as ``2x3x224x224``."""

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

REASON = 200  # letters of what torch says


def model_from(target: str) -> nn.Module:
    """The model that ``module:name`` stands for: a module, or what a callable without arguments returns.

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
            f"model {target!r}: {name} is of type {type(found).__name__}. "
            f"Name a torch.nn.Module or a callable without arguments that returns one."
        )
    try:
        made = found()
    except Exception as error:
        raise TraceError(
            f"model {target!r}: {name}() failed ({type(error).__name__}: {error}). "
            f"Name a callable that works without arguments."
        ) from error
    if not isinstance(made, nn.Module):
        raise TraceError(f"model {target!r}: {name}() returned {type(made).__name__}. Return a torch.nn.Module.")
    return made


def _imported(path: str, target: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (path == missing.name or path.startswith(f"{missing.name}.")):
            raise TraceError(
                f"model {target!r}: there is no module {missing.name!r} in {here} or among the installed ones. "
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
    """The tensor that ``2x3x224x224`` or ``2x12:int64`` stands for: random numbers, or zeros of an integer type.

    >>> input_from("2x12:int64").shape
    torch.Size([2, 12])
    """
    sizes, _, kind = spec.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes) or not isinstance(dtype, torch.dtype):
        raise TraceError(
            f"input {spec!r}: not of the form SIZExSIZE... or SIZExSIZE...:DTYPE. "
            f"Write 2x3x224x224 for two pictures, 2x12:int64 for two rows of 12 whole numbers."
        )
    try:
        return _tensor(tuple(map(int, sizes.split("x"))), dtype)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:  # which one depends on the digits
        reason = shorten(f"{type(error).__name__}: {error}", REASON, placeholder=" ...")
        raise TraceError(
            f"input {spec!r}: there is no such tensor ({reason}). Give smaller sizes or a plain type."
        ) from error


def _tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return torch.zeros(shape, dtype=dtype)
