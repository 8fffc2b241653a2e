"""Agreement between distributed processes: all of them keep the same units, or none of them prunes.

Each process decides an event, and the decisions are compared before any of them is carried out. Afterwards the
processes compare whether all of them succeeded. A process that fails sends its answer first and raises afterwards, so
that the others learn its rank and stop too, instead of waiting for it.

Decisions about tensors that are sharded over processes need sums over all of them (`Exchange.total`). Before each sum,
every process sends the same kind of answer as at the end of a decision. So a process that has failed in the meantime,
or is about to add up something else, is found here as well, and no process is left waiting in a sum.

Other calls over shards (making a Pruner, loading a state, checkpoints) run within `Exchange.together` from their first
check to their last, so a failure in one process, wherever it happens, is an error in all of them at the same place.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from hashlib import sha256
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from keepk.errors import DisagreementError
from keepk.model.edits import Undo
from keepk.model.sharded import guarding
from keepk.plan.names import shortened

T = TypeVar("T")
BLOCK = 1 << 20  # entries of a mask that are summed at a time, with 8 MB of random numbers


class Flagged(NamedTuple):
    """The decisions of a process as bool tensors, to be compared with those of other processes.

    Attributes:
        common: Those that are equal in all processes.
        shards: Those about the shards that this process holds, equal in all processes that hold the same ones.
        place: A number that is equal in processes that hold the same shards.
    """

    common: Sequence[Tensor]
    shards: Sequence[Tensor] = ()
    place: int = 0


class Exchange:
    """Sums over all processes that a decision needs, and agreement on failures.

    Args:
        device: The device on which numbers are exchanged: NCCL needs a GPU.
        doing: The decision, for errors.
        left: A sentence for errors that says in which state a failure leaves the run.
        call: The call that every process has to make, for errors.
        alone: Whether this process decides by itself, although there may be others.

    Attributes:
        device: The device.
        several: Whether there are other processes to agree with.
        over: Whether the decision has failed and all processes know it, so that none of them waits for an answer.
    """

    def __init__(
        self,
        device: torch.device,
        doing: str = "decide the event",
        left: str = "Nothing was pruned.",
        *,
        call: str = "step",
        alone: bool = False,
    ) -> None:
        self.device, self._doing, self._left, self._call = device, doing, left, call
        self.several = are_several() and not alone
        self._end: Exception | None = None  # the error with which it has failed

    @property
    def over(self) -> bool:  # noqa: D102 - documented above
        return self._end is not None

    def total(self, stage: str, compute: Callable[[], Tensor]) -> Tensor:
        """The sum over all processes of the int64 vectors that they compute, on the CPU; or all of them raise.

        Args:
            stage: The name of this sum, the same in all processes.
            compute: Computes the vector of this process. If it raises, all processes do.
        """
        found = list[Tensor]()
        self.together(stage, lambda: found.append(compute().to(self.device)))
        if self.several:
            try:
                dist.all_reduce(found[0])
            except RuntimeError as error:  # a timeout, or the connection to a process that has ended
                self._end = _unanswered(error, self._call, self._left)
                raise self._end from error
        return found[0].cpu()

    def together(self, stage: str, act: Callable[[], object]) -> None:
        """Do something in all processes; if it fails in one of them, all raise.

        Args:
            stage: Its name, the same in all processes.
            act: Does it. It may gather tensors (`keepk.model.sharded.gathered`) and use this exchange, but must not
                communicate in any other way.
        """
        failure = None
        try:
            with guarding(lambda it: self.together(it, lambda: None)):
                act()
        except Exception as error:
            if self.over:
                raise
            failure = error
        if not self.several:
            if failure:
                raise failure
            return
        self.refuse_over()
        digest = int.from_bytes(sha256(stage.encode()).digest()[:8], "big", signed=True)
        try:
            found = _answers(Answer(digest), failure, self.device, self._call, self._left)
            answers = _refuse_failed(found, self._doing, self._left)
            if differing := [rank for rank, answer in enumerate(answers) if answer != answers[0]]:
                raise DisagreementError(
                    f"rank {_listed(differing)}: is not at the same point of the run as rank 0, or has other spaces. "
                    f"{self._left} Make the same Pruner in all processes, and call the same methods in all."
                )
        except Exception as error:
            self._end = error
            raise

    def carried_out(self, stage: str, act: Callable[[], Undo]) -> Undo:
        """Change something in all processes, or undo it in all of them; returns the undo of this process.

        Args:
            stage: Its name, the same in all processes.
            act: Makes the change, all or nothing, and returns its undo; see `together`.
        """
        with ExitStack() as undos:
            self.together(stage, lambda: undos.callback(act()))
            return undos.pop_all().close

    def refuse_over(self) -> None:
        """Raise the error with which the decision has failed, if it has, in case that a metric has caught it."""
        if self._end is not None:
            raise self._end


def agreed(decide: Callable[[Exchange], T], flags: Callable[[T], Flagged], device: torch.device) -> T:
    """The decision of this process, if all processes decide the same; otherwise every process raises.

    Args:
        decide: Makes the decision, without changing anything. If it raises, the process still answers the others.
        flags: Returns the decision in the form in which processes compare it.
        device: The device on which answers are exchanged: NCCL needs a GPU.
    """
    exchange = Exchange(device)
    if not are_several():
        return decide(exchange)
    decision, failure, own = None, None, Answer()
    try:
        decision = decide(exchange)
        exchange.refuse_over()
        found = flags(decision)
        own = Answer(fingerprint(found.common), found.place, fingerprint(found.shards))
    except Exception as error:
        if exchange.over:
            raise
        failure = error
    answers = _refuse_failed(_answers(own, failure, device))
    differing, other = [rank for rank, it in enumerate(answers) if it.common != answers[0].common], 0
    if not differing:  # then compare replicas of the same shards
        first = {it.place: rank for rank, it in reversed([*enumerate(answers)])}
        differing = [rank for rank, it in enumerate(answers) if it != answers[first[it.place]]]
        other = first[answers[differing[0]].place] if differing else 0
    if differing:
        raise DisagreementError(
            f"rank {_listed(differing)}: selected different units than rank {other}. Nothing was pruned. "
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
        answers = _answers(Answer(), failure, device)
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
    lengths = _exchange(Answer(len(own)), device)
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


class Answer(NamedTuple):
    """The answer of a process that has not failed: fingerprints of what it has decided; see `Flagged`."""

    common: int = 0
    place: int = 0
    shards: int = 0


def _answers(
    own: Answer,
    failure: Exception | None,
    device: torch.device,
    call: str = "step",
    left: str = "Nothing was pruned.",
) -> list[Answer | None]:
    """The answer of every process, None for one that failed. Raises `failure`, if any, after sending the answer."""
    try:
        answers = _exchange(None if failure else own, device)
    except RuntimeError as error:  # a timeout, or the connection to a process that has ended
        if failure:
            raise failure from None
        raise _unanswered(error, call, left) from error
    if failure:
        raise failure
    return answers


def _refuse_failed(
    answers: Sequence[Answer | None], doing: str = "decide the event", left: str = "Nothing was pruned."
) -> list[Answer]:
    if failed := [rank for rank, answer in enumerate(answers) if answer is None]:
        raise DisagreementError(f"rank {_listed(failed)}: failed to {doing}; see its own error. {left}")
    return [answer for answer in answers if answer is not None]


def _unanswered(error: RuntimeError, call: str, left: str) -> DisagreementError:
    return DisagreementError(
        f"{call}: rank {dist.get_rank()} got no answer from the other processes ({shortened(str(error))}). "
        f"All of them must call {call}() at the same point of the run. Probably one of them has ended, or is still "
        f"in backward or in another epoch; see its output. {left}"
    )


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


def _exchange(answer: Answer | None, device: torch.device) -> list[Answer | None]:
    # A plain all_gather of integers, because all_gather_object unpickles the messages of other processes.
    own = torch.tensor([answer is not None, *(answer or Answer())], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return [Answer(*it[1:].tolist()) if it[0] else None for it in everyone]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
