"""`keepk.recalibrate`: exact means over batches, and nothing else changes."""

import copy

import pytest
import torch
from torch import nn

import keepk
from keepk.errors import KeepkError
from untyped import untyped


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5, momentum=0.3), nn.ReLU(), nn.Dropout(dropout),
        nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2),
    )  # fmt: skip


BATCHES = [torch.randn(number, 3, 7, 7) for number in (4, 6, 3)]


def test_statistics_are_means_over_batches():
    net = network()
    assert keepk.recalibrate(net, BATCHES) == 3
    outputs = [net[0](batch) for batch in BATCHES]
    means = torch.stack([it.mean((0, 2, 3)) for it in outputs]).mean(0)
    variances = torch.stack([it.var((0, 2, 3)) for it in outputs]).mean(0)
    torch.testing.assert_close(net[1].running_mean, means)
    torch.testing.assert_close(net[1].running_var, variances)


def test_it_is_torchs_update_bn_without_dropout():
    net, same = network(dropout=0.5), network(dropout=0.0)
    torch.optim.swa_utils.update_bn(BATCHES, same)
    keepk.recalibrate(net, BATCHES)
    for (key, value), wanted in zip(net.state_dict().items(), same.state_dict().values(), strict=True):
        assert torch.equal(value, wanted), key


def test_modes_momenta_and_weights_stay():
    net = network(dropout=0.5)
    net[4].eval()
    net[1].eval()
    before = copy.deepcopy(net)
    state = torch.random.get_rng_state()
    keepk.recalibrate(net, BATCHES)
    assert torch.equal(state, torch.random.get_rng_state())
    assert [it.training for it in net.modules()] == [it.training for it in before.modules()]
    assert [net[1].momentum, net[5].momentum] == [0.3, None]
    for one, two in zip(net.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, two)
        assert one.grad is None
    assert not torch.equal(net[1].running_mean, before[1].running_mean)


def test_batches_may_come_with_targets_or_as_dicts():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, images, scale):
            return self.net(images * scale)

    wanted = network()
    keepk.recalibrate(wanted, BATCHES)
    for batches in ([(it, torch.zeros(len(it))) for it in BATCHES], [[it] for it in BATCHES], iter(BATCHES)):
        net = network()
        keepk.recalibrate(net, batches)
        assert torch.equal(net[5].running_var, wanted[5].running_var)
    named = Named()
    keepk.recalibrate(named, ({"images": it, "scale": 1.0} for it in BATCHES))
    assert torch.equal(named.net[5].running_var, wanted[5].running_var)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "batches is empty, so there are no statistics to compute. Pass at least one batch"),
        (BATCHES[0], "batches: got one Tensor. Pass a loader or a list of batches"),
        (7, "batches: got one int"),
        ([BATCHES[0], "picture"], "a batch is a str. Pass tensors"),
        ([(3, 4)], "a batch is a tuple that begins with int"),
        ([BATCHES[0], torch.zeros(0, 3, 7, 7)], "batch 2 is empty: its first tensor has the shape \\(0, 3, 7, 7\\)"),
        ([BATCHES[0], BATCHES[1] * torch.nan], "the statistics of BatchNorm '1' would be NaN or infinite"),
        ([BATCHES[0] * 1e38], "the statistics of BatchNorm '1' would be NaN or infinite"),
        ([BATCHES[0], torch.randn(1, 3, 3, 3)], "batch 2 has only one value per channel at BatchNorm '1'"),
    ],
)
def test_what_is_no_batch_is_refused_and_nothing_changes(batches, words):
    net = network()
    net[1].running_mean.fill_(7)
    before = copy.deepcopy(net)
    with pytest.raises(KeepkError, match=words):
        keepk.recalibrate(net, batches)
    assert all(torch.equal(value, before.state_dict()[key]) for key, value in net.state_dict().items())
    assert all(it.training for it in net.modules())
    assert net[1].momentum == 0.3


def test_a_forward_that_fails_leaves_the_old_statistics():
    net = network().eval()
    before = copy.deepcopy(net)
    with pytest.raises(RuntimeError, match="size"):
        keepk.recalibrate(net, [BATCHES[0], torch.zeros(2, 4, 7, 7)])
    assert all(torch.equal(value, before.state_dict()[key]) for key, value in net.state_dict().items())
    assert not any(it.training for it in net.modules())


class Domains(nn.Module):
    """A BatchNorm for each domain, of which only those of the batches are reached."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(4))

    def forward(self, x, domain=0):
        return self.norms[domain](x)


def test_norms_that_no_batch_reaches_keep_their_statistics():
    net = Domains()
    for norm in net.norms:
        norm(torch.randn(5, 3))
    before = copy.deepcopy(net.state_dict())
    batches = [{"x": torch.randn(4, 3), "domain": it} for it in (1, 2, 1)]
    with pytest.warns(keepk.KeepkWarning, match=r"no batch reaches BatchNorm 'norms.0' and 1 more .* norms.0, norms.3"):
        assert keepk.recalibrate(net, batches) == 3
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert {key.rpartition(".")[0] for key in changed} == {"norms.1", "norms.2"}
    assert [int(norm.get_buffer("num_batches_tracked")) for norm in net.norms] == [1, 2, 1, 1]
    with torch.inference_mode():
        made_there = nn.BatchNorm1d(3)
        assert keepk.recalibrate(made_there, [torch.randn(4, 3)]) == 1
    with pytest.raises(KeepkError, match=r"'running_mean' .* made inside torch.inference_mode"):
        keepk.recalibrate(made_there, [torch.randn(4, 3)])


def test_a_model_without_running_statistics_is_refused():
    for net in (nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)):
        with pytest.raises(KeepkError, match="has no BatchNorm with running statistics"):
            keepk.recalibrate(net, [torch.zeros(3, 2)])
    with pytest.raises(KeepkError, match="model: got list"):
        keepk.recalibrate(untyped([nn.BatchNorm1d(2)]), [torch.zeros(3, 2)])
