"""What `test_two_processes_...` runs under torchrun: every rank asserts, and says so at its end."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import keepk
from keepk.errors import DisagreementError, RankError, SpaceError
from strategies import mlp


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net, pruner = train_together(rank)
    assert_same_everywhere([mask.int() for mask in pruner.masks.values()])
    assert_same_everywhere([parameter.detach() for parameter in net.parameters()])
    assert pruner.kept == {"*.weight": 11}
    refuse_drift(rank)
    refuse_failure_of_another(rank)
    refuse_a_model_changed_on_one_rank(rank)
    print(f"all checks passed on rank {rank}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # all is said; torch's threads for gloo now and then abort in the interpreter's own shutdown


def train_together(rank):
    net = DistributedDataParallel(mlp(seed=rank))  # DDP sends rank 0's weights to all
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    space = keepk.weights("*.weight", keep=11, schedule=keepk.Cubic(epochs=3), metric=taylor)
    pruner = keepk.Pruner(net, [space], optimizer)
    for step in range(5):
        torch.manual_seed(100 * rank + step)  # each rank sees its own data
        optimizer.zero_grad()
        net(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        pruner.step()
        assert_same_everywhere([mask.int() for mask in pruner.masks.values()])
    return net, pruner


def taylor(weight):
    return (weight * weight.grad).abs()


def refuse_drift(rank):
    """A rank whose weights differ is named on all ranks, and none of them prunes."""
    net = mlp(seed=rank)
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=9)])
    with pytest.raises(DisagreementError, match="rank 1: would keep other units than rank 0"):
        pruner.step()
    assert pruner.epoch == 0
    assert all(parameter.all() for parameter in net.parameters())


def refuse_failure_of_another(rank):
    """A rank that cannot rank does not leave the others waiting."""
    net = mlp()
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=9)])
    if rank == 1:
        with torch.no_grad():
            net[0].bias[0] = float("nan")
    expected = RankError if rank == 1 else DisagreementError
    with pytest.raises(expected, match=r"'0.bias'|rank 1: failed to rank"):
        pruner.step()
    assert pruner.epoch == 0


def refuse_a_model_changed_on_one_rank(rank):
    net = mlp()
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=9)])
    if rank == 0:
        net[0] = torch.nn.Linear(6, 5)
    expected = SpaceError if rank == 0 else DisagreementError
    with pytest.raises(expected, match=r"'0.weight': the model's is another|rank 0: failed to rank"):
        pruner.step()


def assert_same_everywhere(tensors):
    for tensor in tensors:
        from_rank_0 = tensor.clone()
        dist.broadcast(from_rank_0, 0)
        assert torch.equal(from_rank_0, tensor)


if __name__ == "__main__":
    main()
