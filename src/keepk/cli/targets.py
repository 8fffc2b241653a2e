"""Arguments of the command line.

A model is given as ``module:name``, an input as ``2x3x224x224``, an attribute as ``name=value``; weights and batches
are safetensors files.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path
from textwrap import shorten
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from keepk import metrics
from keepk.errors import FileError, KeepkError, TraceError
from keepk.plan.names import nearest

CHANNEL_METRICS = ("bn_scale", "blend", "l1", "l2", "l1_l2", "product", "outgoing", "taylor", "fisher", "activation")
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
    what = f"model {target!r}"
    found = _attribute(_imported(path, what), name, what)
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


def set_attributes(model: nn.Module, settings: Iterable[str]) -> None:
    """Set attributes given as ``name=value`` on the model's ``config``, or on the model itself.

    Args:
        model: The model.
        settings: Names, which may contain dots, and values in JSON (``use_cache=false``); anything else is a string.

    Raises:
        TraceError: If a setting has a different form, or neither the config nor the model has the attribute.

    >>> model = nn.Linear(2, 3)
    >>> set_attributes(model, ["training=false"])
    >>> model.training
    False
    """
    for setting in settings:
        path, equals, written = setting.partition("=")
        if not path or not equals:
            raise TraceError(f"--set {setting!r}: not of the form name=value. Write use_cache=false.")
        *outer, name = path.split(".")
        for start in (getattr(model, "config", None), model):
            try:
                holder = reduce(getattr, outer, start)
            except AttributeError:
                continue
            if hasattr(holder, name):
                setattr(holder, name, _value(written))
                break
        else:
            raise TraceError(
                f"--set {setting!r}: neither the model nor its config has an attribute {path!r}. Correct the name."
            )


def _value(written: str) -> Any:
    try:
        return json.loads(written)
    except ValueError:
        return written


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file into a model; all names and shapes have to match.

    Raises:
        FileError: If the file cannot be read, or does not fit the model.
    """
    try:
        model.load_state_dict(_tensors_of(path))
    except RuntimeError as error:
        reason = shorten(str(error), REASON, placeholder=" ...")
        raise FileError(
            f"{path}: the weights do not fit the model ({reason}). Pass the model that they are of."
        ) from None


def batches_from(path: Path, size: int) -> list[tuple[Tensor, ...]]:
    """The batches of a safetensors file with the tensors ``inputs`` and, optionally, ``targets``.

    Args:
        path: The file.
        size: The number of samples in a batch.

    Raises:
        FileError: If the file cannot be read, or has other tensors.
    """
    tensors = _tensors_of(path)
    if "inputs" not in tensors or {*tensors} - {"inputs", "targets"}:
        raise FileError(
            f"{path}: has the tensors {', '.join(sorted(tensors)) or 'none'}. Save the samples as 'inputs', and "
            f"the targets of the loss, if any, as 'targets'."
        )
    if numbers := sorted(name for name, it in tensors.items() if not it.ndim):
        raise FileError(f"{path}: {numbers[0]!r} is a single number. Save one row of it per sample.")
    lengths = {len(it) for it in tensors.values()}
    if len(lengths) > 1 or 0 in lengths:
        raise FileError(f"{path}: inputs and targets have {sorted(lengths)} rows. Save one row of each per sample.")
    parts = [torch.split(tensors[name], size) for name in ("inputs", "targets") if name in tensors]
    return list(zip(*parts, strict=True))


def _tensors_of(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path}: cannot be read ({error}). Pass a safetensors file.") from None


def metric_from(name: str) -> Callable[..., Any]:
    """The metric for channels of this name; metrics that need data are returned uncalled, for `keepk.prune`.

    Raises:
        KeepkError: If there is no such metric.

    >>> metric_from("l2") is metrics.l2
    True
    """
    if name not in CHANNEL_METRICS:
        raise KeepkError(f"--metric {name!r}: unknown. Pass one of {', '.join(CHANNEL_METRICS)}.")
    found: Callable[..., Any] = getattr(metrics, name)
    return found(alpha=0.5) if name == "blend" else found


def function_from(target: str) -> Callable[..., Any]:
    """The function given as ``module:name``.

    Raises:
        TraceError: If `target` has a different form, or does not lead to a function.
    """
    path, _, name = target.partition(":")
    if not path or not name:
        raise TraceError(f"--loss {target!r}: not of the form module:name. Write mynet:loss for loss in mynet.py.")
    found = _attribute(_imported(path, f"--loss {target!r}"), name, f"--loss {target!r}")
    if not callable(found):
        raise TraceError(f"--loss {target!r}: {name} has type {type(found).__name__}. Name a function.")
    return found


def _imported(path: str, what: str) -> ModuleType:
    """Import a module; `what` says in errors which argument named it."""
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
                f"{what}: there is no module {missing.name!r} in {here} or among the installed packages. "
                f"Run the command in the folder of {missing.name.partition('.')[0]}.py, or install it."
            ) from missing
        raise _broken(path, what, missing) from missing
    except Exception as error:
        raise _broken(path, what, error) from error


def _broken(path: str, what: str, error: Exception) -> TraceError:
    return TraceError(
        f"{what}: importing {path} failed ({type(error).__name__}: {error}). Make `python -c 'import {path}'` work."
    )


def _attribute(module: ModuleType, name: str, what: str) -> object:
    try:
        found: object = reduce(getattr, name.split("."), module)
    except AttributeError:
        known = [word for word in vars(module) if not word.startswith("_")]
        raise TraceError(f"{what}: {module.__name__} has no {name!r}. Nearest names: {nearest(name, known)}.") from None
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
