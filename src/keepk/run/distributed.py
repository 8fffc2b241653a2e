"""Agreement between processes: all of them keep the same units, or none of them prunes.

An event is decided, compared and carried out; then the processes compare once more whether all of them succeeded. A
process that fails, before or after the comparison, answers first and raises afterwards, so that the others learn its
rank and stop as well instead of waiting for it.
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
BLOCK = 1 << 20  # entries of a mask that are summed at once: 8 MB of random numbers


def agreed(decide: Callable[[], T], masks: Callable[[T], Iterable[Tensor]], device: torch.device) -> T:
    """The decision of this process, if all processes decide the same; otherwise an error in every one of them.

    Args:
        decide: Makes the decision, without changing anything. If it raises, the process still answers the others.
        masks: The flags of a decision that are compared.
        device: Where the answers are exchanged: NCCL needs them on the GPU.
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
            f"rank {_listed(failed)}: failed to rank its units; see its own error. Nothing was pruned."
        )
    differing = [rank for rank, answer in enumerate(answers) if answer != answers[0]]
    if differing:
        raise DisagreementError(
            f"rank {_listed(differing)}: selected different units than rank 0. Nothing was pruned. "
            f"Start all processes from the same weights (DistributedDataParallel does), "
            f"and let the metric see averaged gradients only."
        )
    return decision  # type: ignore[return-value]  # decided: no failure


def carried_out(act: Callable[[], Undo], device: torch.device) -> None:
    """Change something in all processes, or undo it in all of them.

    Args:
        act: Makes the change, all or nothing, and returns its undo.
        device: Where the answers are exchanged.
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
                f"It was taken back on the other ranks, so nothing was pruned."
            )
    except DisagreementError:
        if undo is not None:
            undo()
        raise


def are_several() -> bool:
    """Whether the run has more than one process."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _answers(digest: int | None, failure: Exception | None, device: torch.device) -> list[int | None]:
    """The answer of every process, None from one that failed. This process's own failure is raised after it is sent."""
    try:
        answers = _exchange(digest, device)
    except RuntimeError as error:  # a timeout, or the connection to a process that has ended
        if failure:
            raise failure from None
        raise DisagreementError(
            f"step: rank {dist.get_rank()} got no answer from the other processes ({shortened(str(error))}). "
            f"All of them must call step() at the same point of the run; probably one is still in backward or in "
            f"another epoch, or has ended: see its own output. Nothing was pruned."
        ) from error
    if failure:
        raise failure
    return answers


def fingerprint(masks: Iterable[Tensor]) -> int:
    """64 bits that depend on every entry of every mask and on its position, computed on the masks' own device."""
    sums = [_weighed(mask, position) for position, mask in enumerate(masks)]
    total = sum(int(found) for found in sums)  # int() waits for the device: only once all sums are launched
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _weighed(mask: Tensor, position: int) -> Tensor:
    """The sum of one random number for each True entry, in int64, which wraps around."""
    weights = _random_ints(position, min(BLOCK, mask.numel()), mask.device)
    total = torch.zeros((), dtype=torch.int64, device=mask.device)
    for index, block in enumerate(torch.split(mask.reshape(-1), BLOCK)):
        # The same numbers serve every block, times an odd factor: that keeps all 64 bits and tells blocks apart.
        total += torch.where(block, weights[: block.numel()], 0).sum() * (2 * index + 1)
    return total


def _random_ints(seed: int, count: int, device: torch.device) -> Tensor:
    # On the CPU, because processes may have different devices, whose generators give different numbers.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 40), 1 << 40, (count,), generator=generator).to(device)


def _exchange(digest: int | None, device: torch.device) -> list[int | None]:
    # Integers in a plain all_gather: all_gather_object would unpickle what other processes send.
    own = torch.tensor([digest is not None, digest or 0], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [int(answer[1]) if answer[0] else None for answer in everyone]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
