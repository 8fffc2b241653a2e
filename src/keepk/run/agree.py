"""Several processes keep the same set, or none of them prunes.

An event is decided, compared, and carried out; then the processes compare once more whether all of them could. One that
fails, before or after, answers first and raises afterwards, so that the others learn its rank and stop as well.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from keepk.cut.undo import Undo
from keepk.errors import DisagreementError
from keepk.plan.names import shortened

T = TypeVar("T")
BLOCK = 1 << 20


def agreed(decide: Callable[[], T], masks: Callable[[T], Iterable[Tensor]], device: torch.device) -> T:
    """What this process decides, if all processes decide the same; otherwise an error in every one of them.

    A process whose `decide` raises still answers the others, so that nobody waits for it.
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
            f"rank {_listed(differing)}: would keep other units than rank 0. Nothing was pruned. "
            f"Start all processes from the same weights (DistributedDataParallel does), "
            f"and let the metric see averaged gradients only."
        )
    return decision  # type: ignore[return-value]  # decided: no failure


def carried_out(act: Callable[[], Undo], device: torch.device) -> None:
    """Do something in all processes, or take it back in all of them.

    `act` is all or nothing by itself, and returns what takes it back.
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
    """Whether other processes take part in the run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _answers(digest: int | None, failure: Exception | None, device: torch.device) -> list[int | None]:
    """The answer of every process, None from one that failed; this process's own failure is raised once it is told."""
    try:
        answers = _exchange(digest, device)
    except RuntimeError as error:
        if failure:
            raise failure from None
        raise DisagreementError(
            f"step: rank {dist.get_rank()} got no answer from the other processes ({shortened(str(error))}). "
            f"All of them "
            f"call step() at the same point of the run; probably one is still in backward or in another epoch, or has "
            f"ended: see its own output. Nothing was pruned."
        ) from error
    if failure:
        raise failure
    return answers


def fingerprint(masks: Iterable[Tensor]) -> int:
    """64 bits that depend on every entry of every mask and on its place, made on the masks' own device."""
    sums = [_weighed(mask, position) for position, mask in enumerate(masks)]
    total = sum(int(found) for found in sums)  # waits for the device only now
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def _weighed(mask: Tensor, position: int) -> Tensor:
    """The sum of random numbers, one for each entry; in int64, which wraps around."""
    weights = _random_ints(position, min(BLOCK, mask.numel()), mask.device)
    total = torch.zeros((), dtype=torch.int64, device=mask.device)
    for index, block in enumerate(torch.split(mask.reshape(-1), BLOCK)):
        total += torch.where(block, weights[: block.numel()], 0).sum() * (2 * index + 1)
    return total


def _random_ints(seed: int, count: int, device: torch.device) -> Tensor:
    # Made on the CPU, where one generator gives the same numbers beside every device.
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 40), 1 << 40, (count,), generator=generator).to(device)


def _exchange(digest: int | None, device: torch.device) -> list[int | None]:
    own = torch.tensor([digest is not None, digest or 0], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [int(answer[1]) if answer[0] else None for answer in everyone]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
