"""Layers whose weight is computed from other parameters: masked channels are what removed ones are."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import keepk
from keepk.errors import PlanError

IMAGES = torch.linspace(-2, 2, 60, dtype=torch.float64).reshape(6, 10).sin()
OLD = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")


class LowRank(nn.Module):
    """The product of two thin matrices, neither of which is a length."""

    def forward(self, left, right):
        return left @ right

    def right_inverse(self, weight):
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
        return left[:, :4] * sizes[:4], right[:4]


def low_rank(layer):
    return parametrize.register_parametrization(layer, "weight", LowRank(), unsafe=True)


def trained(wrap, shrink, act):
    torch.manual_seed(0)
    second = low_rank(nn.Linear(8, 6)) if wrap is low_rank else nn.Linear(8, 6)  # a norm over what goes would be lossy
    model = nn.Sequential(wrap(nn.Linear(10, 8)), act(), second, act(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    spaces = [keepk.channels(["0", "2"], keep=6, schedule=[11, 8, 6], name="all", metric=keepk.metrics.random(seed=3))]
    pruner = keepk.Pruner(model, spaces, optimizer, example=IMAGES, shrink=shrink)
    outputs = []
    for _ in range(4):
        for _ in range(2):
            optimizer.zero_grad()
            model(IMAGES).square().sum().backward()
            optimizer.step()
        pruner.step()
        outputs.append(model(IMAGES).detach())
    return torch.stack(outputs)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Sigmoid])
@pytest.mark.parametrize(
    "wrap",
    [parametrizations.weight_norm, pytest.param(nn.utils.weight_norm, marks=OLD), low_rank],
    ids=["weight norm", "the older weight norm", "low rank"],
)
def test_all_modes_are_one_run(wrap, act):
    each = trained(wrap, "each", act)
    assert each.isfinite().all()
    for shrink in ("end", "never"):
        torch.testing.assert_close(trained(wrap, shrink, act), each, rtol=1e-9, atol=1e-12)


def test_directions_of_weight_norm_are_not_counted_beside_masked_channels():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(10, 8)), nn.ReLU(), nn.Linear(8, 3))
    spaces = [keepk.channels("0", keep=4), keepk.weights("*original1", keep=20, name="directions")]
    with pytest.raises(PlanError, match=r"'directions': '0.parametrizations.weight.original1' is a direction"):
        keepk.Pruner(model, spaces, example=IMAGES.float(), shrink="end")
    keepk.Pruner(model, spaces, example=IMAGES.float()).step()
