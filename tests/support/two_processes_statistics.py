"""The script that `test_statistics_processes.py` runs under torchrun. Every rank asserts, and prints a line."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import keepk
from keepk.errors import DisagreementError, RankError

BATCHES = torch.randn(6, 4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, 9), nn.ReLU(), nn.Linear(9, 3),
    )  # fmt: skip


def pruner_of(model, kind="l2", optimizer=None):
    seen = keepk.Statistics(model)
    spaces = [
        keepk.channels("0", keep=5, name="c", metric=keepk.metrics.activation(seen, kind=kind), schedule=[6, 5]),
        keepk.weights("8.weight", keep=8, name="w", metric=keepk.metrics.wanda(seen), schedule=[15, 8]),
        keepk.weights("6.weight", keep=30, name="f", metric=keepk.metrics.fisher(seen), schedule=[60, 30]),
    ]
    return seen, keepk.Pruner(model, spaces, optimizer, example=BATCHES[0])


def train(model, seen, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        seen.update()
        optimizer.step()


def every_process_counts_all_data(rank):
    """Two processes with half of each batch prune what one process with the whole batches prunes."""
    model, alone = net(), net()
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01)
    its_optimizer = torch.optim.SGD(alone.parameters(), lr=0.01)
    seen, pruner = pruner_of(ddp, optimizer=optimizer)
    everything, its_pruner = pruner_of(alone, optimizer=its_optimizer)
    for _ in range(2):
        train(ddp, seen, optimizer, BATCHES[:, 2 * rank : 2 * rank + 2])
        train(alone, everything, its_optimizer, BATCHES)
        assert seen.batches == everything.batches == 6
        ddp = pruner.step(ddp)
        # A process that is not distributed would not sum over processes. This one is, so the twin counts everything
        # twice: the means are the same, and the norms are larger by the same factor for all weights.
        its_pruner.step()
        assert {k: v.shape for k, v in model.state_dict().items()} == {
            k: v.shape for k, v in alone.state_dict().items()
        }
        assert all(torch.equal(mask, its_pruner.masks[key]) for key, mask in pruner.masks.items())
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert pruner.kept == {"c": 5, "w": 8, "f": 30}


def data_of_one_process_is_enough(rank):
    """Also without gradients, in eval mode; the sums of a process stay its own."""
    model = net().eval()
    seen = keepk.Statistics(model, of=("activations",))
    space = keepk.weights(["6.weight", "8.weight"], keep=30, name="w", metric=keepk.metrics.wanda(seen))
    pruner = keepk.Pruner(model, space)
    if rank == 0:
        with torch.no_grad():
            model(BATCHES[0])
    before = copy.deepcopy(seen.state_dict())
    with seen.summed(lambda own: own * 3):
        assert [it["counts"] for it in seen.state_dict()["inputs"]] == [it["counts"] for it in before["inputs"]]
    assert seen.batches == (1 if rank == 0 else 0)
    pruner.step()
    assert pruner.kept == {"w": 30}
    everyone = [torch.empty_like(pruner.masks["6.weight"], dtype=torch.uint8) for _ in range(2)]
    dist.all_gather(everyone, pruner.masks["6.weight"].to(torch.uint8))
    assert torch.equal(*everyone)


def without_data_all_processes_are_refused(_):
    _, pruner = pruner_of(net())
    with pytest.raises(RankError, match="no forward pass since the last event, 0 in all"):
        pruner.step()
    assert pruner.epoch == 0


def a_process_that_fails_lets_nobody_wait(rank):
    model = net()
    seen, pruner = pruner_of(model)
    model(BATCHES[0]).square().mean().backward()
    seen.update()
    right = model[8].weight.detach().clone()
    if rank == 1:
        model[8].weight.data[0] = float("nan")
    expected = RankError if rank == 1 else DisagreementError
    with pytest.raises(expected, match=r"8.weight|rank 1: failed"):
        pruner.step()
    model[8].weight.data.copy_(right)
    pruner.step()
    assert pruner.kept == {"c": 6, "w": 15, "f": 60}


def other_statistics_in_a_process_are_told(rank):
    model = net()
    seen = keepk.Statistics(model)
    select = ["6.weight", "8.weight"] if rank == 1 else ["6.weight"]
    pruner = keepk.Pruner(model, keepk.weights(select, keep=8, metric=keepk.metrics.wanda(seen)))
    model(BATCHES[0])
    with pytest.raises(DisagreementError, match="rank 1: collected statistics of different layers than rank 0"):
        pruner.step()


CHECKS = (
    every_process_counts_all_data,
    data_of_one_process_is_enough,
    without_data_all_processes_are_refused,
    a_process_that_fails_lets_nobody_wait,
    other_statistics_in_a_process_are_told,
)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for check in CHECKS:
        print(f"rank {dist.get_rank()}: {check.__name__}", flush=True)
        check(dist.get_rank())
        dist.barrier()
    print(f"all checks passed on rank {dist.get_rank()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # without the interpreter's shutdown, in which torch's gloo threads sometimes abort


if __name__ == "__main__":
    main()
