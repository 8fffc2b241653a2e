"""`keepk.prune`: one call prunes a trained model to a budget, recalibrates it, and changes nothing if it fails."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import keepk
from keepk.errors import KeepkError, SpaceError
from keepk.model.costs import model_costs
from untyped import untyped

pytestmark = pytest.mark.filterwarnings("ignore:space .* would keep:keepk.KeepkWarning")
EXAMPLE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def network(*, batch_norm=True):
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(width) if batch_norm else nn.Identity() for width in (16, 24)]
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), norms[0], nn.ReLU(), nn.Conv2d(16, 24, 3), norms[1], nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
    )
    for norm in norms if batch_norm else ():
        nn.init.uniform_(norm.get_parameter("weight"))  # as if it were trained
    return net


def batches(number=3):
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator))
        for _ in range(number)
    ]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


TAYLOR = {"macs": 0.5, "metric": keepk.metrics.taylor, "calibrate": batches()}


def macs_of(net):
    found = model_costs(net, EXAMPLE).macs
    assert found is not None
    return found


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize(
    "metric", [None, keepk.metrics.l2, keepk.metrics.taylor, keepk.metrics.fisher, keepk.metrics.activation]
)
def test_the_budget_is_met_and_the_report_tells_it(metric, batch_norm):
    net = network(batch_norm=batch_norm)
    dense = macs_of(net)
    needs_loss = metric in (keepk.metrics.taylor, keepk.metrics.fisher)
    given = loss if needs_loss else None
    report = keepk.prune(net, EXAMPLE, macs=0.5, metric=metric, calibrate=batches(), loss=given)
    (budget,) = report.budgets
    assert (budget.dense, budget.asked, budget.reached) == (dense, dense // 2, macs_of(net))
    assert budget.reached <= budget.asked
    assert report.spaces[0].kept == net[0].out_channels + net[3].out_channels < 40
    assert net.training
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(module._forward_pre_hooks for module in net.modules())
    keepk.Pruner(net, keepk.channels("*", keep=4), example=EXAMPLE).close()  # its own Pruner is closed


def test_it_removes_what_a_pruner_with_the_same_statistics_removes():
    net, other = network(), network()
    keepk.prune(net, EXAMPLE, macs=0.5, metric=partial(keepk.metrics.activation, kind="l2"), calibrate=batches())
    seen = keepk.Statistics(other)
    space = keepk.channels("*", macs=0.5, metric=keepk.metrics.activation(seen, kind="l2"))
    pruner = keepk.Pruner(other, space, example=EXAMPLE)
    with torch.no_grad():
        other.eval()
        for images, _ in batches():
            other(images)
    pruner.step()
    keepk.recalibrate(other, batches())
    assert {name: value.shape for name, value in net.state_dict().items()} == {
        name: value.shape for name, value in other.state_dict().items()
    }
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())


def test_an_iterator_and_the_other_numbers_serve_too():
    net = network()
    report = keepk.prune(net, EXAMPLE, keep=20, calibrate=iter(batches()), select="*", exclude="8")
    assert report.spaces[0].kept == 20 == net[0].out_channels + net[3].out_channels
    assert net[1].num_batches_tracked == 3
    assert keepk.prune(network(), EXAMPLE, prune=0.5).spaces[0].kept == 20
    small = network()
    keepk.prune(small, EXAMPLE, parameters=2_000, round_to=4)
    assert sum(it.numel() for it in small.parameters()) <= 2_000
    assert small[0].out_channels % 4 == small[3].out_channels % 4 == 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, SpaceError, "neither"),
        ({"macs": 0.5, "keep": 3}, SpaceError, "macs=0.5 and keep=3|keep=3 and macs=0.5"),
        ({"macs": 1.0}, SpaceError, "macs=1.0"),
        (
            {"macs": 0.5, "metric": keepk.metrics.taylor},
            KeepkError,
            "metric=taylor is computed from data. Pass batches",
        ),
        (
            {"macs": 0.5, "metric": keepk.metrics.fisher, "calibrate": batches()},
            KeepkError,
            "metric=fisher needs gradients of a loss, got loss=None",
        ),
        ({"macs": 0.5, "calibrate": EXAMPLE}, KeepkError, "calibrate: got one Tensor. Pass a loader or a list"),
        ({"macs": 0.5, "calibrate": {"x": EXAMPLE}}, KeepkError, "calibrate: got one dict. Pass a loader or a list"),
        ({"macs": 0.5, "calibrate": ["picture"]}, KeepkError, "prune: calibrate: a batch is a str"),
        (
            {"macs": 0.5, "calibrate": [EXAMPLE, EXAMPLE[:, :2]]},
            KeepkError,
            "of a calibrate= batch failed .RuntimeError",
        ),
        (
            {"macs": 0.5, "calibrate": [EXAMPLE.half()], "metric": keepk.metrics.activation},
            KeepkError,
            "forward pass of calibrate= batch 1 failed .RuntimeError",
        ),
        (TAYLOR | {"loss": lambda net, it: net(it["x"])}, KeepkError, "loss= of batch 1 failed .TypeError"),
        (
            {"macs": 0.5, "metric": keepk.metrics.activation, "calibrate": []},
            KeepkError,
            "calibrate= has no batches. Pass at least one",
        ),
        ({"macs": 0.5, "calibrate": []}, KeepkError, "calibrate= has no batches. Pass at least one"),
        ({"macs": 0.5, "calibrate": [EXAMPLE, EXAMPLE[:1, :, :3, :3]]}, KeepkError, "batch 2 has only one value"),
        ({"macs": 0.5, "calibrate": [EXAMPLE[:0]]}, KeepkError, "prune: calibrate: batch 1 is empty"),
        ({"macs": 0.5, "calibrate": [EXAMPLE * torch.nan]}, KeepkError, "BatchNorm '1' would be NaN or infinite"),
        # The loss takes these batches, but recalibration could not run them after the cut.
        (
            {
                "macs": 0.5,
                "metric": keepk.metrics.taylor,
                "calibrate": [(3, EXAMPLE)],
                "loss": lambda net, it: net(it[1]).mean(),
            },
            KeepkError,
            "prune: calibrate: a batch is a tuple that begins with int",
        ),
        (TAYLOR | {"loss": lambda net, it: net(it[0]).mean().item()}, KeepkError, "loss= returned a float"),
        (TAYLOR | {"loss": lambda net, it: net(it[0])}, KeepkError, r"loss= returned a tensor of shape \(8, 10\)"),
        (TAYLOR | {"loss": lambda net, it: net(it[0]).mean().detach()}, KeepkError, "without gradients"),
        (TAYLOR | {"loss": "mse"}, KeepkError, "got loss='mse'"),
        ({"macs": 0.5, "loss": 3}, KeepkError, "got loss=3, which is for metrics that need gradients"),
        (
            {"macs": 0.5, "metric": keepk.metrics.l2, "calibrate": batches(), "loss": loss},
            KeepkError,
            "metric=.*l2.* needs none. Leave it out",
        ),
        (
            {"macs": 0.5, "metric": keepk.metrics.activation, "calibrate": batches(), "loss": loss},
            KeepkError,
            "metric=.*activation.* needs none. Leave it out",
        ),
    ],
)
def test_a_refused_call_changes_nothing(options, error, words):
    net = network()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(error, match=words):
        keepk.prune(net, EXAMPLE, **untyped(options))
    assert net.training
    after = net.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in after.items())


class Always:
    """Returns one iterator whenever it is asked for one."""

    def __init__(self):
        self.only = iter(batches())

    def __iter__(self):
        return self.only


class Stream(IterableDataset[torch.Tensor]):
    """Can be read only `times` times."""

    def __init__(self, times):
        self.times = times

    def __iter__(self):
        self.times -= 1
        return iter([images for images, _ in batches()] if self.times >= 0 else [])


def test_batches_that_can_be_read_only_once():
    net, same = network(), network()
    keepk.prune(net, EXAMPLE, keep=20, calibrate=Always())
    keepk.prune(same, EXAMPLE, keep=20, calibrate=batches())
    assert all(torch.equal(value, same.state_dict()[name]) for name, value in net.state_dict().items())
    for times, metric, words in (
        (1, None, "batches is empty"),
        (2, None, "no batches left after 3"),
        (2, keepk.metrics.activation, "no batches left after 3"),
    ):
        net = network()
        before = copy.deepcopy(net.state_dict())
        loader = DataLoader(Stream(times), batch_size=None)
        with pytest.raises(KeepkError, match=words):
            keepk.prune(net, EXAMPLE, keep=20, calibrate=loader, metric=metric)
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_loss_in_train_mode_changes_no_statistics():
    def of_training(model, batch):
        model.train()
        return loss(model, batch) if batch[1] is not None else 1 / 0

    net = network()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(KeepkError, match=r"loss= of batch 2 failed .ZeroDivisionError"):
        keepk.prune(net, EXAMPLE, **(TAYLOR | {"calibrate": [batches()[0], (EXAMPLE, None)]}), loss=of_training)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    keepk.prune(net, EXAMPLE, **TAYLOR, loss=of_training)
    other = network()
    keepk.prune(other, EXAMPLE, **TAYLOR, loss=lambda model, batch: loss(model.train(), batch))
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in other.state_dict().items())


class WithAuxiliaryHead(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.aux = nn.Sequential(nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.body(x)
        out = self.head(x.mean((2, 3)))
        return (out, self.aux(x)) if self.training else out


def test_statistics_that_no_batch_reaches_stay():
    net = WithAuxiliaryHead()
    net(EXAMPLE)
    before = copy.deepcopy(net.aux[1].state_dict())
    with pytest.warns(keepk.KeepkWarning, match=r"no batch reaches BatchNorm 'aux\.1' in eval mode") as caught:
        keepk.prune(net, EXAMPLE, keep=12, select="body*", calibrate=batches(), train_mode="accept")
    assert len([it for it in caught if "no batch reaches" in str(it.message)]) == 1
    assert net.aux[0].in_channels == 12
    assert all(torch.equal(value, before[name]) for name, value in net.aux[1].state_dict().items())
    assert net.body[1].num_batches_tracked == 3


def test_a_model_of_inference_mode_is_refused():
    with torch.inference_mode():
        net = network()
    with pytest.raises(KeepkError, match=r"prune: tensor '0.weight' .* inside torch.inference_mode.*copy.deepcopy"):
        keepk.prune(net, EXAMPLE, keep=20, calibrate=batches())
    keepk.prune(copy.deepcopy(net), EXAMPLE, keep=20, calibrate=batches())
    with torch.inference_mode(), pytest.raises(KeepkError, match=r"prune: tensor '0.weight'"):
        keepk.prune(network(), EXAMPLE, keep=20, calibrate=batches())


def test_a_string_is_not_a_model():
    with pytest.raises(KeepkError, match="prune: got str as the model"):
        keepk.prune(untyped("net"), EXAMPLE, macs=0.5)
