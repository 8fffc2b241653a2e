"""The states of the random number generators that a training loop draws from."""

import random
from typing import Any

import numpy as np
import torch

from keepk.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """Python's, numpy's global, torch's CPU and, once CUDA is in use, every CUDA device's state."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
    }


def check_rng_state(saved: dict[str, Any]) -> None:
    """Refuse what `set_rng_state` could not set."""
    own = rng_state()
    kinds = (saved["numpy"]["bit_generator"], own["numpy"]["bit_generator"])
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"rng: numpy's global generator was {kinds[0]}, here it is {kinds[1]}")
    sizes = (saved["torch"].numel(), own["torch"].numel())
    if sizes[0] != sizes[1] or saved["python"][0] != own["python"][0]:
        raise CheckpointError("rng: the generators are of another version of Python or torch; use the same ones")
    try:  # in generators that nobody draws from
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(saved["numpy"])
        for state in [saved["torch"], *saved["cuda"]]:
            _refuse_no_state(state)
        torch.Generator().set_state(saved["torch"])
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"rng: the states of the random number generators are damaged ({error}). Use another checkpoint."
        ) from error


def set_rng_state(saved: dict[str, Any]) -> None:
    """Go on drawing where `rng_state` stood. CUDA devices that are not here are passed over."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    for device, state in zip(range(torch.cuda.device_count()), saved["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)


def _refuse_no_state(state: object) -> None:
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
        raise TypeError("a state of torch is not a tensor of bytes")


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
