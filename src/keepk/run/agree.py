"""Several processes keep the same set, or none of them prunes."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from keepk.errors import DisagreementError

T = TypeVar("T")
BLOCK = 1 << 20


def agreed(decide: Callable[[], T], masks: Callable[[T], Iterable[Tensor]], device: torch.device) -> T:
    """What this process decides, if all processes decide the same; otherwise an error in every one of them.

    A process whose `decide` raises still answers the others, so that nobody waits for it.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return decide()
    decision, failure = None, None
    try:
        decision = decide()
    except Exception as error:
        failure = error
    digest = None if failure else fingerprint(masks(decision))  # type: ignore[arg-type]  # decided: no failure
    answers = _exchange(digest, device)
    if failure:
        raise failure
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
