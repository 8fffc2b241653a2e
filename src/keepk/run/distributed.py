"""Agreement between distributed processes: all of them keep the same units, or none of them prunes.

Each process decides an event, and the decisions are compared before any of them is carried out. Afterwards the
processes compare whether all of them succeeded. A process that fails sends its answer first and raises afterwards, so
that the others learn its rank and stop too, instead of waiting for it.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from keepk.errors import DisagreementError
from keepk.model.edits import Undo
from keepk.plan.names import shortened

T = TypeVar("T")
BLOCK = 1 << 20  # entries of a mask that are summed at a time, with 8 MB of random numbers


def agreed(decide: Callable[[], T], masks: Callable[[T], Iterable[Tensor]], device: torch.device) -> T:
    """The decision of this process, if all processes decide the same; otherwise every process raises.

    Args:
        decide: Makes the decision, without changing anything. If it raises, the process still answers the others.
        masks: Returns the bool tensors of a decision that have to be equal in all processes.
        device: The device on which answers are exchanged: NCCL needs a GPU.
    """
    if not are_several():
        return decide()
    decision, failure, digest = None, None, None
    try:
        decision = decide()
        digest = fingerprint(masks(decision))
    except Exception as error:
        failure = error
    answers = _answers(digest, failure, device)
    failed = [rank for rank, answer in enumerate(answers) if answer is None]
    if failed:
        raise DisagreementError(
            f"rank {_listed(failed)}: failed to decide the event; see its own error. Nothing was pruned."
        )
    differing = [rank for rank, answer in enumerate(answers) if answer != answers[0]]
    if differing:
        raise DisagreementError(
            f"rank {_listed(differing)}: selected different units than rank 0. Nothing was pruned. "
            f"Start all processes from the same weights (DistributedDataParallel does), "
            f"and let the metric read averaged gradients only."
        )
    return decision  # type: ignore[return-value]  # decided: no failure


def carried_out(act: Callable[[], Undo], device: torch.device) -> None:
    """Change something in all processes, or undo it in all of them.

    Args:
        act: Makes the change, all or nothing, and returns its undo.
        device: The device on which answers are exchanged.
    """
    if not are_several():
        act()
        return
    undo, failure = None, None
    try:
        undo = act()
    except Exception as error:
        failure = error
    try:
        answers = _answers(None if failure else 0, failure, device)
        failed = [rank for rank, answer in enumerate(answers) if answer is None]
        if failed:
            raise DisagreementError(
                f"rank {_listed(failed)}: failed while the event was carried out; see its own error. "
                f"The other ranks have undone it, so nothing was pruned."
            )
    except DisagreementError:
        if undo is not None:
            undo()
        raise


def summed(own: Tensor, device: torch.device) -> Tensor:
    """The sum over all processes of a vector that has the same length in each of them.

    Args:
        own: The vector of this process, in a float dtype.
        device: The device on which vectors are exchanged.

    Raises:
        DisagreementError: The lengths differ.
    """
    # A reduction of vectors with different lengths would hang or crash, so the lengths are compared first.
    lengths = _exchange(len(own), device)
    differing = [rank for rank, length in enumerate(lengths) if length != lengths[0]]
    if differing:
        raise DisagreementError(
            f"rank {_listed(differing)}: collected statistics of different layers than rank 0. Nothing was pruned. "
            f"Make the same Pruner with the same spaces and metrics in all processes."
        )
    total = own.to(device, copy=True)
    dist.all_reduce(total)
    return total.to(own.device)


def are_several() -> bool:
    """Whether the run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _answers(digest: int | None, failure: Exception | None, device: torch.device) -> list[int | None]:
    """The answer of every process, None for one that failed. Raises `failure`, if any, after sending the answer."""
    try:
        answers = _exchange(digest, device)
    except RuntimeError as error:  # a timeout, or the connection to a process that has ended
        if failure:
            raise failure from None
        raise DisagreementError(
            f"step: rank {dist.get_rank()} got no answer from the other processes ({shortened(str(error))}). "
            f"All of them must call step() at the same point of the run. Probably one of them has ended, or is still "
            f"in backward or in another epoch; see its output. Nothing was pruned."
        ) from error
    if failure:
        raise failure
    return answers


def fingerprint(masks: Iterable[Tensor]) -> int:
    """A 64-bit hash of masks that depends on every entry and its position, computed on the masks' device."""
    sums = [_weighed(mask, position) for position, mask in enumerate(masks)]
    total = sum(int(found) for found in sums)  # int() waits for the device, so all sums are launched first
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _weighed(mask: Tensor, position: int) -> Tensor:
    """The sum of one random number for each True entry, in int64, which wraps around."""
    weights = _random_ints(position, min(BLOCK, mask.numel()), mask.device)
    total = torch.zeros((), dtype=torch.int64, device=mask.device)
    for index, block in enumerate(torch.split(mask.reshape(-1), BLOCK)):
        # Every block uses the same numbers times a different odd factor, which loses no bits and tells blocks apart.
        total += torch.where(block, weights[: block.numel()], 0).sum() * (2 * index + 1)
    return total


def _random_ints(seed: int, count: int, device: torch.device) -> Tensor:
    # On the CPU, because processes may use different devices, whose generators draw different numbers.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 40), 1 << 40, (count,), generator=generator).to(device)


def _exchange(digest: int | None, device: torch.device) -> list[int | None]:
    # A plain all_gather of integers, because all_gather_object unpickles the messages of other processes.
    own = torch.tensor([digest is not None, digest or 0], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [int(answer[1]) if answer[0] else None for answer in everyone]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
