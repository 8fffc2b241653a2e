"""The script that `test_two_processes_...` runs under torchrun. Every rank asserts, and prints a line at the end."""

import copy
import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

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
    for make in (torch.optim.SGD, torch.optim.LBFGS):
        take_back_what_another_rank_could_not_do(rank, make)
    print(f"all checks passed on rank {rank}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # without the interpreter's shutdown, in which torch's gloo threads sometimes abort


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
    with pytest.raises(DisagreementError, match="rank 1: selected different units than rank 0"):
        pruner.step()
    assert pruner.epoch == 0
    assert all(parameter.all() for parameter in net.parameters())


def refuse_failure_of_another(rank):
    """A rank that fails to rank does not leave the others waiting."""
    net = mlp()
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=9)])
    if rank == 1:
        with torch.no_grad():
            net[0].bias[0] = float("nan")
    expected = RankError if rank == 1 else DisagreementError
    with pytest.raises(expected, match=r"'0.bias'|rank 1: failed to decide"):
        pruner.step()
    assert pruner.epoch == 0


def refuse_a_model_changed_on_one_rank(rank):
    net = mlp()
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=9)])
    if rank == 0:
        net[0] = torch.nn.Linear(6, 5)
    expected = SpaceError if rank == 0 else DisagreementError
    with pytest.raises(expected, match=r"'0.weight': the model has a different|rank 0: failed to decide"):
        pruner.step()


def take_back_what_another_rank_could_not_do(rank, make):
    """If a rank fails after the agreement, weights, state, masks and epoch are restored on all ranks."""
    net = mlp()
    average = AveragedModel(net)
    optimizer = make(net.parameters(), lr=0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {}))
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=9, schedule=[20, 9])], optimizer, followers=[average])

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    for event in range(2):
        optimizer.step(closure)
        before = copy.deepcopy([net.state_dict(), average.state_dict(), optimizer.state_dict(), pruner.state_dict()])
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(pruner._session, "_hold", out_of_memory)
            expected = MemoryError if rank == 1 else DisagreementError
            with pytest.raises(expected, match=r"none left|rank 1: failed while the event was carried out; see its"):
                pruner.step()
        after = [net.state_dict(), average.state_dict(), optimizer.state_dict(), pruner.state_dict()]
        assert repr(after) == repr(before)
        assert pruner.epoch == event
        pruner.step()
        assert pruner.kept == {"*": [20, 9][event]}
    assert_same_everywhere([mask.int() for mask in pruner.masks.values()])


def out_of_memory(*_):
    raise MemoryError("none left")


def step_while_another_is_in_backward(rank):
    """Collectives that do not match end by the group's timeout, and keepk reports the probable cause."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    net = DistributedDataParallel(mlp())
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=9)])
    before = copy.deepcopy(net.state_dict())
    if rank == 0:
        words = r"step: rank 0 got no answer from the other processes \(.*\)\. All .* still in backward"
        with pytest.raises(DisagreementError, match=words):
            pruner.step()
        assert pruner.epoch == 0
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    else:
        with pytest.raises(RuntimeError):
            net(torch.ones(2, 6)).square().mean().backward()
    print(f"all checks passed on rank {rank}", flush=True)
    os._exit(0)


def assert_same_everywhere(tensors):
    for tensor in tensors:
        from_rank_0 = tensor.clone()
        dist.broadcast(from_rank_0, 0)
        assert torch.equal(from_rank_0, tensor)


if __name__ == "__main__":
    step_while_another_is_in_backward(int(os.environ["RANK"])) if "late" in sys.argv else main()
