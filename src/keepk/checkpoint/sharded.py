"""Checkpoints of runs whose tensors are sharded over processes: every process writes and reads its own part.

::

    checkpoint.json                  names the folder of shards, with the sha256 of every part
    shards-<hex>/rank-0/             an ordinary checkpoint folder, written by process 0
    shards-<hex>/rank-1/             and so on

In a part, a DTensor is a dict with the shape of the whole tensor, the place of the block, and the block; a block that
several processes hold is in one part only. All parts are written to new places before process 0 replaces
``checkpoint.json``, so the folder always contains one complete checkpoint. It has to be on a file system that all
processes see.

To load, a process reads its own part. If it needs other entries, because there are now more or fewer processes or the
model is sharded in another way, it reads the other parts too, one after the other.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from keepk.errors import CheckpointError
from keepk.model.sharded import Block, as_sharded, block_of, is_sharded, local, own_part

SHARD = "keepk.shard"  # the key of a block in a part
Steps = tuple[Any, ...]  # the keys that lead to a value in a tree


def rank_and_world() -> tuple[int, int]:
    """The number of this process, and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sharded_leaves(tree: Any) -> Iterator[Tensor]:
    """The sharded tensors in a tree of dicts, lists and tuples."""
    yield from (value for _, value in _walk(tree, ()) if isinstance(value, Tensor) and is_sharded(value))


def _walk(tree: Any, steps: Steps) -> Iterator[tuple[Steps, Any]]:
    """The leaves of a tree; a dict that describes a block counts as one leaf."""
    if isinstance(tree, dict) and SHARD not in tree:
        for key, value in tree.items():
            yield from _walk(value, (*steps, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _walk(value, (*steps, index))
    else:
        yield steps, tree


def with_blocks(tree: Any) -> Any:
    """A tree in which every sharded tensor is replaced by the block that this process stores."""
    if isinstance(tree, Tensor) and is_sharded(tree):
        block, part = block_of(tree), local(tree)
        # A replica stores no values, but it needs a tensor, which says the dtype.
        part = part if block.counts else part.new_empty((0,) * part.dim()) if part.dim() else part.new_empty(0)
        return {SHARD: {"shape": list(block.shape), "starts": list(block.starts), "part": part.contiguous()}}
    if next(sharded_leaves(tree), None) is None:
        return tree  # it may be of any type
    if isinstance(tree, dict):
        copied: dict[Any, Any] = {}
        for key, value in tree.items():
            copied[key] = with_blocks(value)
        return copied
    if type(tree) in (list, tuple):
        return type(tree)(with_blocks(value) for value in tree)
    return tree


@dataclass
class _Wanted:
    """A tensor to read: its block, the memory for it, and how many entries have been read."""

    like: Tensor | None
    block: Block
    into: Tensor
    found: int = 0

    @staticmethod
    def of(shard: Mapping[str, Any], like: Tensor | None) -> "_Wanted":
        """The block of a stored tensor that this process holds, if it is sharded like another one; or all of it."""
        shape = tuple(shard["shape"])
        block, device = Block(shape, (0,) * len(shape), shape, True, (0,)), torch.device("cpu")
        if like is not None:
            block, device = block_of(like, shape), local(like).device
        into = torch.empty(block.sizes, dtype=shard["part"].dtype, device=device)
        return _Wanted(like if like is not None and is_sharded(like) else None, block, into)

    def take(self, shard: Mapping[str, Any]) -> None:
        """Copy the entries that a stored block shares with this one."""
        part: Tensor = shard["part"]
        if part.numel() == 0:  # of a replica or an empty block
            return
        ours, theirs = list[slice](), list[slice]()
        for start, size, other, length in zip(
            self.block.starts, self.block.sizes, shard["starts"], part.shape, strict=True
        ):
            low, high = max(start, other), min(start + size, other + length)
            if low >= high:
                return
            ours.append(slice(low - start, high - start))
            theirs.append(slice(low - other, high - other))
        self.into[tuple(ours)] = part[tuple(theirs)].to(self.into.device)
        self.found += prod(it.stop - it.start for it in ours)

    @property
    def tensor(self) -> Tensor:
        """The tensor, sharded as wanted."""
        return self.into if self.like is None else as_sharded(self.into, self.like, self.block.shape)


class Parts:
    """The parts of a checkpoint, and the tree of this process with blocks in the places of sharded tensors.

    Args:
        folder: The folder of the checkpoint, for errors.
        read: Reads the tree of a part.
        count: How many parts there are.
    """

    def __init__(self, folder: Path, read: Callable[[int], Any], count: int) -> None:
        rank, world = rank_and_world()
        self._folder, self._read, self._count = folder, read, count
        self.same = count == world  # then each process continues with its own random number generators
        self._own = rank if self.same else 0
        self.tree = read(self._own)

    def place(self, name: str, targets: Mapping[Steps, Tensor]) -> None:
        """Replace the blocks of an entry of the tree by tensors.

        Args:
            name: The entry.
            targets: By steps from the entry, the tensors that the stored ones at these steps, or one step further, will
                be loaded into. Each stored tensor is sharded like its target, or whole if that is not or is missing.
        """
        wanted, placed = dict[Steps, _Wanted](), dict[Steps, Tensor]()
        for steps, value in _walk(self.tree[name], ()):
            like = targets.get(steps, targets.get(steps[:-1]))
            if isinstance(value, dict) and SHARD in value:
                wanted[steps] = _Wanted.of(value[SHARD], like)
            elif like is not None and _is_whole(value, like):
                placed[steps] = own_part(value.to(local(like).device), like)
        for rank in [self._own, *(it for it in range(self._count) if it != self._own)]:
            if all(it.found >= it.into.numel() for it in wanted.values()):
                break
            tree = self.tree if rank == self._own else self._read(rank)
            for steps, it in wanted.items():
                it.take(_at(tree[name], steps)[SHARD])
        for steps, it in wanted.items():
            if it.found != it.into.numel():
                raise CheckpointError(
                    f"{self._folder}: {name} {'.'.join(map(str, steps))}: {it.found} of {it.into.numel()} entries are "
                    f"stored. The checkpoint is damaged; use another one."
                )
            placed[steps] = it.tensor
        for steps, value in placed.items():
            self.tree[name] = _replaced(self.tree[name], steps, value)


def _is_whole(value: Any, like: Tensor) -> TypeGuard[Tensor]:
    """Whether a value is a whole tensor of the shape of a sharded one."""
    whole = isinstance(value, Tensor) and not is_sharded(value)
    return whole and is_sharded(like) and value.shape == like.shape


def _at(tree: Any, steps: Steps) -> Any:
    for step in steps:
        tree = tree[step]
    return tree


def _replaced(tree: Any, steps: Steps, value: Any) -> Any:
    """The tree with another value at the end of some steps; dicts and lists are changed in place."""
    if not steps:
        return value
    below = _replaced(tree[steps[0]], steps[1:], value)
    if isinstance(tree, tuple):
        return (*tree[: steps[0]], below, *tree[steps[0] + 1 :])
    tree[steps[0]] = below
    return tree


def targets_of(name: str, several: Sequence[Any]) -> dict[Steps, Tensor]:
    """By steps in the captured states of an argument, the tensors that they will be loaded into."""
    found = dict[Steps, Tensor]()
    for index, part in enumerate(several):
        if name == "optimizer":
            found |= {(index, *steps): it for steps, it in part.targets().items()}
        elif name == "pruner":
            found |= {(index, "masks", key): it for key, it in part.parameters().items()}
        else:
            found |= {(index, *steps): it for steps, it in _walk(part.capture(), ()) if isinstance(it, Tensor)}
    return found


# Folders --------------------------------------------------------------------------------------------------------------


def new_token() -> Tensor:
    """Random numbers from process 0, zeros from the others, to be added up."""
    rank, _ = rank_and_world()
    return torch.tensor([secrets.randbits(62) if rank == 0 else 0 for _ in range(2)], dtype=torch.int64)


def shards_folder(folder: Path, token: Tensor) -> Path:
    """The folder of shards with this token."""
    return folder / f"shards-{''.join(f'{number:016x}' for number in token.tolist())}"


def part_folder(shards: Path, rank: int) -> Path:
    """The folder that a process writes to."""
    return shards / f"rank-{rank}"


def written_digests(shards: Path, index: str) -> list[str]:
    """The sha256 of every part, as its index says."""
    _, world = rank_and_world()
    found = list[str]()
    for rank in range(world):
        path = part_folder(shards, rank) / index
        try:
            found.append(json.loads(path.read_bytes())["sha256"])
        except (OSError, ValueError, LookupError) as error:
            raise CheckpointError(
                f"{path}: process {rank} has written it, but process 0 cannot read it ({error}). All processes must "
                f"write to one file system. The old checkpoint is unchanged."
            ) from error
    return found


def delete_others(folder: Path, keep: Path | None) -> None:
    """Delete the folders of shards that earlier checkpoints have left."""
    for path in folder.glob("shards-" + "[0-9a-f]" * 32):
        if path != keep:
            shutil.rmtree(path, ignore_errors=True)
