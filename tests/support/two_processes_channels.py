"""The script that `test_channel_processes.py` runs under torchrun. Every rank asserts, and prints a line at the end."""

import copy
import os
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import keepk
from keepk.errors import DisagreementError, RankError, ShrinkError, StateError
from masked import relative_error
from pictures import picture

EXAMPLE = torch.randn(2, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
IN_STEPS = keepk.Annealing(p0=0.2, n1=1, nu=0.1)


class Net(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 6, 3), norm(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 8, 3), norm(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm1(self.conv1(x)).relu()
        return self.out(self.norm2(self.conv2(x)).relu().mean((2, 3)))


def net(seed=0, norm=nn.BatchNorm2d):
    torch.manual_seed(seed)
    return Net(norm).double()


def without_norm(_width):
    return nn.Identity()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def spaces():
    weights = keepk.weights("conv2.weight", keep=15, schedule=[200, 70, 40, 15])
    return [weights, keepk.channels("conv*", keep=7, name="conv", schedule=IN_STEPS)]


def one_event(model, optimizer=None, metric=None, shrink="each"):
    return keepk.Pruner(
        model, keepk.channels("conv*", keep=7, metric=metric), optimizer, example=EXAMPLE, shrink=shrink
    )


def loss_of(model, seed, rank):
    """The loss on a rank's part of the batch, or on the whole batch (rank None)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 1, 6, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (12,), generator=generator)
    part = slice(None) if rank is None else slice(6 * rank, 6 * rank + 6)
    return nn.functional.cross_entropy(model(x[part]), y[part])


def assert_same_everywhere(tree):
    """Assert that the tensors are bit-equal on all ranks."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, picture_without_ids(tree))
    assert everyone[0] == everyone[1]


def picture_without_ids(tree):
    if torch.is_tensor(tree):
        return tuple(tree.shape), tree.detach().contiguous().flatten().view(torch.uint8).tolist()
    if isinstance(tree, dict):
        return [(key, picture_without_ids(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return [picture_without_ids(value) for value in tree]
    return repr(tree)


# Training continues --------------------------------------------------------------------------------------------------


def gradients_are_averaged_after_every_event(rank):
    """Training equals that of one process with the whole batch, also if gradients accumulate over an event."""
    options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}
    together, alone = net(rank, without_norm), net(0, without_norm)
    ddp = DistributedDataParallel(together, **options)
    optimizer, its_optimizer = sgd(together), sgd(alone)
    pruner = keepk.Pruner(ddp, spaces(), optimizer, example=EXAMPLE)
    alone_pruner = keepk.Pruner(alone, spaces(), its_optimizer, example=EXAMPLE)
    for epoch in range(pruner.epochs):
        for turn in range(2):
            train(ddp, optimizer, 10 * epoch + turn, rank)
            train(alone, its_optimizer, 10 * epoch + turn, None)
        with ddp.no_sync():
            loss_of(ddp, 1000 + epoch, rank).backward()
        loss_of(alone, 1000 + epoch, None).backward()
        old, ddp = ddp, pruner.step(ddp)
        alone_pruner.step()
        assert (ddp is old) == (pruner.plan["conv"][epoch] == [14, *pruner.plan["conv"]][epoch])
        loss_of(ddp, 2000 + epoch, rank).backward()
        loss_of(alone, 2000 + epoch, None).backward()
        for ours, theirs in zip(together.parameters(), alone.parameters(), strict=True):
            assert relative_error(theirs, ours) < 1e-9
            assert relative_error(theirs.grad, ours.grad) < 1e-9
        assert repr(pruner.state_dict()["channels"]) == repr(alone_pruner.state_dict()["channels"])
        assert {name: getattr(ddp, name) for name in options if name != "bucket_cap_mb"} == {
            "find_unused_parameters": True,
            "gradient_as_bucket_view": True,
        }
        assert ddp.bucket_bytes_cap == int(0.001 * 1024 * 1024)
        assert ddp.broadcast_buffers
        optimizer.step()
        its_optimizer.step()
    assert pruner.kept == {"conv2.weight": 15, "conv": 7}


def train(model, optimizer, seed, rank):
    optimizer.zero_grad()
    loss_of(model, seed, rank).backward()
    optimizer.step()


def all_ranks_stay_the_same(rank):
    """Model, statistics, optimizer, average and masks agree after every event, and K is exact."""
    model = net(rank)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    average = AveragedModel(model, use_buffers=False)
    pruner = keepk.Pruner(ddp, spaces(), optimizer, example=EXAMPLE, followers=[average])
    ddp.eval()
    model.train()
    for epoch in range(pruner.epochs + 1):
        train(ddp, optimizer, epoch, rank)
        average.update_parameters(model)
        ddp = pruner.step(ddp)
        assert not ddp.training, "its mode is kept"
        if not pruner.done:
            assert pruner.kept["conv"] == pruner.plan["conv"][epoch]
        parameters = [*model.parameters(), *average.module.parameters()]
        assert_same_everywhere([parameters, [*optimizer.state.values()], pruner.state_dict()])
        assert all(p.shape == s["exp_avg"].shape for p, s in optimizer.state.items())
    assert pruner.kept == {"conv2.weight": 15, "conv": 7}
    assert model.conv1.out_channels + model.conv2.out_channels == 7


def all_ranks_meet_a_budget(rank):
    """They remove the same blocks; a rank with another ranking is named, and nothing changes."""
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer, sign = sgd(ddp), {"of": 1}

    def own_mind(layer):
        return torch.arange(float(len(layer.units))) * sign["of"]

    spaces = [keepk.channels("conv1", metric=own_mind), keepk.channels("conv2", metric=own_mind)]
    pruner = keepk.Pruner(ddp, spaces, optimizer, example=EXAMPLE, macs=0.5)
    train(ddp, optimizer, 0, rank)
    sign["of"] = 1 - 2 * rank
    with Unchanged(ddp, optimizer, pruner), pytest.raises(DisagreementError, match="rank 1: selected different"):
        pruner.step(ddp)
    sign["of"] = 1
    ddp = pruner.step(ddp)
    train(ddp, optimizer, 1, rank)
    assert_same_everywhere([[*model.parameters()], pruner.state_dict(), pruner.certificate])
    assert pruner.certificate["conv1"]["reached"] <= pruner.plan["macs"][-1]


def buffers_of_a_rank_stay_its_own(rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch renames the option
        ddp = DistributedDataParallel(net(), broadcast_buffers=False)
    pruner = one_event(ddp, optimizer := sgd(ddp))
    train(ddp, optimizer, 0, rank)
    means = ddp.module.norm1.running_mean.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "space .* its BatchNorm scales hardly differ")  # they are new
        ddp = pruner.step(ddp)
    assert not ddp.broadcast_buffers
    kept = ddp.module.keepk_record["tensors"]["norm1.running_mean"]["kept"]["0"]
    assert torch.equal(ddp.module.norm1.running_mean, means[kept])
    everyone = [torch.empty_like(means) for _ in range(2)]
    dist.all_gather(everyone, means)
    assert not torch.equal(*everyone)


def a_wrapper_around_a_compiled_model(rank):
    compiled = torch.compile(net(), backend="eager")
    ddp = one_event(compiled).step(DistributedDataParallel(compiled))
    assert ddp.module is compiled
    loss_of(ddp, 0, rank).backward()


def a_wrapper_that_was_deleted_is_not_kept_alive(rank):
    ddp = DistributedDataParallel(net())
    model, pruner = ddp.module, one_event(ddp)
    del ddp
    assert pruner.step() is None
    ddp = DistributedDataParallel(model)
    loss_of(ddp, 0, rank).backward()
    assert pruner.step(ddp) is ddp


# Refusals ------------------------------------------------------------------------------------------------------------


class Unchanged:
    """A context manager that asserts that a model and its optimizer do not change."""

    def __init__(self, ddp, optimizer, pruner):
        self.things = [ddp.module, optimizer.state, optimizer.param_groups]
        self.pruner = pruner
        self.ddp, self.optimizer = ddp, optimizer

    def __enter__(self):
        self.before = picture(self.things), repr(self.pruner.state_dict())

    def __exit__(self, *error):
        if error[0] is None:
            assert (picture(self.things), repr(self.pruner.state_dict())) == self.before


def trained(rank, metric=None):
    ddp = DistributedDataParallel(net())
    optimizer = sgd(ddp)
    pruner = one_event(ddp, optimizer, metric)
    train(ddp, optimizer, 0, rank)
    return ddp, optimizer, pruner


def goes_on(ddp, optimizer, pruner, rank):
    """After a refusal, training continues with the same wrapper, and the event succeeds."""
    train(ddp, optimizer, 1, rank)
    ddp = pruner.step(ddp)
    train(ddp, optimizer, 2, rank)
    assert_same_everywhere([*ddp.module.parameters()])
    assert pruner.kept == {"conv*": 7}


def a_rank_whose_metric_differs_is_named(rank):
    sign = {"of": rank}

    def own_mind(layer):
        return torch.arange(float(len(layer.units))) * (1 - 2 * sign["of"])

    ddp, optimizer, pruner = trained(rank, own_mind)
    with Unchanged(ddp, optimizer, pruner), pytest.raises(DisagreementError, match="rank 1: selected different"):
        pruner.step(ddp)
    sign["of"] = 0
    goes_on(ddp, optimizer, pruner, rank)


def a_rank_that_fails_is_named(rank):
    ddp, optimizer, pruner = trained(rank)
    right = ddp.module.norm1.weight.detach().clone()
    if rank == 1:
        ddp.module.norm1.weight.data[0] = float("nan")
    expected = RankError if rank == 1 else DisagreementError
    with Unchanged(ddp, optimizer, pruner), pytest.raises(expected, match=r"conv1|rank 1: failed"):
        pruner.step(ddp)
    ddp.module.norm1.weight.data.copy_(right)
    goes_on(ddp, optimizer, pruner, rank)


def an_event_that_a_rank_cannot_carry_out_is_taken_back_on_all(rank):
    """After a failure past the agreement the model has its channels back, and the wrapper refuses to run."""
    ddp, optimizer, pruner = trained(rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(pruner._session, "_hold", out_of_memory)
        expected = MemoryError if rank == 1 else DisagreementError
        with (
            Unchanged(ddp, optimizer, pruner),
            pytest.raises(expected, match=r"none left|rank 1: failed while the event"),
        ):
            pruner.step(ddp)
    assert pruner.epoch == 0
    with pytest.raises(ShrinkError, match=r"forward: an event failed on some rank .* Wrap the model again"):
        loss_of(ddp, 0, rank)
    goes_on(DistributedDataParallel(ddp.module), optimizer, pruner, rank)


def out_of_memory(*_):
    raise MemoryError("none left")


def a_step_without_the_wrapper_is_refused(rank):
    """It is refused on all ranks, also if only one rank omits the wrapper."""
    ddp, optimizer, pruner = trained(rank)
    with Unchanged(ddp, optimizer, pruner), pytest.raises(ShrinkError, match=r"Call ddp = pruner.step\(ddp\)"):
        pruner.step()
    expected = ShrinkError if rank == 1 else DisagreementError
    with Unchanged(ddp, optimizer, pruner), pytest.raises(expected, match=r"ddp = pruner.step\(ddp\)|rank 1: failed"):
        pruner.step(None if rank == 1 else ddp)
    goes_on(ddp, optimizer, pruner, rank)


def a_strange_wrapper_on_one_rank_lets_nobody_wait(rank):
    ddp, optimizer, pruner = trained(rank)
    other = DistributedDataParallel(net())
    for wrong, words in ((other, "holds a different model"), (ddp.module, "got Net. Pass the DistributedDataParallel")):
        expected = ShrinkError if rank == 1 else DisagreementError
        with Unchanged(ddp, optimizer, pruner), pytest.raises(expected, match=f"{words}|rank 1: failed"):
            pruner.step(wrong if rank == 1 else ddp)
    goes_on(ddp, optimizer, pruner, rank)


def the_old_wrapper_is_refused(rank):
    ddp = DistributedDataParallel(net())
    pruner = keepk.Pruner(ddp, spaces(), sgd(ddp), example=EXAMPLE)
    old, ddp = ddp, pruner.step(ddp)
    assert old is not ddp
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(ShrinkError, match=r"forward: .* was replaced .*Use the wrapper that"),
        ):
            loss_of(old, 0, rank)
    with pytest.raises(ShrinkError, match=r"step: the wrapper was replaced in an earlier event. Use the wrapper that"):
        pruner.step(old)
    loss_of(ddp, 0, rank).backward()
    assert pruner.epoch == 1
    while not pruner.done:
        ddp = pruner.step(ddp)
    with pytest.raises(ShrinkError, match="was replaced in an earlier event"):
        pruner.step(old)


def a_wrapper_with_a_communication_hook_is_refused(rank):
    ddp, optimizer, pruner = trained(rank)
    ddp.register_comm_hook(None, lambda _state, bucket: torch.futures.Future().set_result(bucket.buffer()))
    with Unchanged(ddp, optimizer, pruner), pytest.raises(ShrinkError, match="has a communication hook"):
        pruner.step(ddp)


def masks_need_no_wrapper(rank):
    """Nothing is cut, so the wrapper stays valid."""
    ddp = DistributedDataParallel(net())
    pruner = one_event(ddp, optimizer := sgd(ddp), shrink="never")
    train(ddp, optimizer, 0, rank)
    assert pruner.step() is None
    train(ddp, optimizer, 1, rank)
    assert_same_everywhere([*ddp.module.parameters()])
    assert pruner.kept == {"conv*": 7}


def a_checkpoint_is_loaded_before_the_model_is_wrapped(rank):
    def parts():
        model = net()
        return {"model": model, "optimizer": (optimizer := sgd(model)), "pruner": one_event(model, optimizer)}

    with tempfile.TemporaryDirectory() as folder:
        run = parts()
        run["pruner"].step()
        keepk.save_checkpoint(folder, **run)
        fresh = parts()
        ddp = DistributedDataParallel(fresh["model"])
        with (
            Unchanged(ddp, fresh["optimizer"], fresh["pruner"]),
            pytest.raises(StateError, match="before it is wrapped"),
        ):
            keepk.load_checkpoint(folder, **fresh)
        del ddp
        keepk.load_checkpoint(folder, **fresh)
        ddp = DistributedDataParallel(fresh["model"])
        train(ddp, fresh["optimizer"], 0, rank)
        assert_same_everywhere([*copy.deepcopy(fresh["model"]).parameters()])


CHECKS = (
    gradients_are_averaged_after_every_event,
    all_ranks_stay_the_same,
    all_ranks_meet_a_budget,
    buffers_of_a_rank_stay_its_own,
    a_wrapper_around_a_compiled_model,
    a_wrapper_that_was_deleted_is_not_kept_alive,
    a_rank_whose_metric_differs_is_named,
    an_event_that_a_rank_cannot_carry_out_is_taken_back_on_all,
    a_rank_that_fails_is_named,
    a_step_without_the_wrapper_is_refused,
    a_strange_wrapper_on_one_rank_lets_nobody_wait,
    the_old_wrapper_is_refused,
    a_wrapper_with_a_communication_hook_is_refused,
    masks_need_no_wrapper,
    a_checkpoint_is_loaded_before_the_model_is_wrapped,
)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for check in CHECKS:
        print(f"rank {dist.get_rank()}: {check.__name__}", flush=True)
        check(dist.get_rank())
    print(f"all checks passed on rank {dist.get_rank()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # without the interpreter's shutdown, in which torch's gloo threads sometimes abort


if __name__ == "__main__":
    main()
