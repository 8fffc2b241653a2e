"""The states of the random number generators that a training loop draws from."""

import random
from typing import Any

import numpy as np
import torch

from keepk.errors import CheckpointError


def rng_state() -> dict[str, Any]:
    """The states of the generators of Python, numpy (the global one), torch's CPU and, if in use, all CUDA devices."""
    in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        # Reading a CUDA state would initialize CUDA, which takes seconds and memory and breaks a later fork.
        "cuda": torch.cuda.get_rng_state_all() if in_use else [],
    }


def check_rng_state(saved: dict[str, Any]) -> None:
    """Refuse states that `set_rng_state` could not set."""
    own = rng_state()
    kinds = (saved["numpy"]["bit_generator"], own["numpy"]["bit_generator"])
    if kinds[0] != kinds[1]:
        raise CheckpointError(f"rng: numpy's global generator was {kinds[0]}, here it is {kinds[1]}")
    sizes = (saved["torch"].numel(), own["torch"].numel())
    if sizes[0] != sizes[1] or saved["python"][0] != own["python"][0]:
        raise CheckpointError(
            "rng: the states were saved by another version of Python or torch. Use the versions that saved them."
        )
    try:  # on fresh generators, so that the global ones do not change
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(saved["numpy"])
        # Checked by type only, because a CUDA state cannot be tried on a machine without that device.
        for state in [saved["torch"], *saved["cuda"]]:
            if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.ndim != 1:
                raise TypeError("a state of torch is not a tensor of bytes")
        torch.Generator().set_state(saved["torch"])
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"rng: the states of the random number generators are damaged ({error}). Use another checkpoint."
        ) from error


def set_rng_state(saved: dict[str, Any]) -> None:
    """Restore the states that `rng_state` returned. States of CUDA devices that this machine lacks are ignored."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    for device, state in zip(range(torch.cuda.device_count()), saved["cuda"], strict=False):
        torch.cuda.set_rng_state(state, device)
