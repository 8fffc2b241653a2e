"""Layers whose weight is computed from other parameters: masking equals removing."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import keepk
from keepk.errors import PlanError
from keepk.model.names import weight_grad_of, weight_of

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
    second = low_rank(nn.Linear(8, 6)) if wrap is low_rank else nn.Linear(8, 6)  # a norm over its inputs would be lossy
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


NORMED = [parametrizations.weight_norm, pytest.param(nn.utils.weight_norm, marks=OLD)]
FILTERS = [keepk.metrics.l1, keepk.metrics.l2, keepk.metrics.l1_l2, keepk.metrics.product, None]


def normed_by_inputs(wrap, shrink, metric):
    torch.manual_seed(0)
    first, second = (wrap(nn.Conv2d(inside, width, 3, padding=1), dim=1) for inside, width in ((2, 8), (8, 12)))
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)]
    model = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.BatchNorm2d(12), nn.ReLU(), *tail).double()
    images, optimizer = IMAGES.reshape(6, 2, 1, 5), torch.optim.SGD(model.parameters(), lr=0.05)
    space = keepk.channels("*", keep=8, schedule=[14, 11, 8], metric=metric)
    pruner = keepk.Pruner(model, space, optimizer, example=images, shrink=shrink)
    outputs = []
    for _ in range(4):
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
        pruner.step()
        outputs.append(model(images).detach())
    return torch.stack(outputs)


@pytest.mark.parametrize("metric", [None, keepk.metrics.l2])
@pytest.mark.parametrize("wrap", NORMED)
def test_directions_of_masked_inputs_do_not_count(wrap, metric):
    each = normed_by_inputs(wrap, "each", metric)
    torch.testing.assert_close(normed_by_inputs(wrap, "never", metric), each, rtol=1e-9, atol=1e-12)


def parts_of(layer):
    if hasattr(layer, "weight_v"):
        return layer.weight_v, layer.weight_g
    return layer.parametrizations.weight.original1, layer.parametrizations.weight.original0


@pytest.mark.parametrize("wrap", NORMED)
@pytest.mark.parametrize("metric", FILTERS)
def test_a_filter_is_ranked_by_the_weight_and_not_by_its_direction(wrap, metric):
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(10, 8, bias=False)), nn.ReLU(), nn.Linear(8, 3)).double()
    direction, length = parts_of(model[0])
    with torch.no_grad():
        length[:4] = 1e-6
        direction[:4] *= 100
    keepk.Pruner(model, keepk.channels("0", keep=4, metric=metric), example=IMAGES).step()
    assert (parts_of(model[0])[1] > 1e-3).all()


@pytest.mark.parametrize("wrap", NORMED)
@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_the_weight_and_its_gradient_are_those_that_torch_computes(wrap, dim):
    torch.manual_seed(0)
    layer = wrap(nn.Conv1d(4, 6, 3), dim=dim).double()
    direction, length = parts_of(layer)
    images = torch.randn(5, 4, 7, dtype=torch.float64)
    assert weight_grad_of(direction, length) is None
    with parametrize.cached():
        layer(images)
        weight = layer.weight
        weight.retain_grad()
        if hasattr(layer, "weight_v"):
            nn.functional.conv1d(images, weight, layer.bias).square().sum().backward()
        else:
            layer(images).square().sum().backward()
    torch.testing.assert_close(weight_of(direction, length), weight)
    torch.testing.assert_close(weight_grad_of(direction, length), weight.grad)


def test_a_length_of_zero_leaves_what_is_known_of_the_gradient():
    direction, length = (nn.Parameter(torch.tensor(it)) for it in ([[3.0, 4.0]], [[0.0]]))
    weight_of(direction, length).sum().backward()
    torch.testing.assert_close(weight_grad_of(direction, length), torch.tensor([[0.84, 1.12]]))


def test_directions_of_weight_norm_are_not_counted_beside_masked_channels():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(10, 8)), nn.ReLU(), nn.Linear(8, 3))
    spaces = [keepk.channels("0", keep=4), keepk.weights("*original1", keep=20, name="directions")]
    with pytest.raises(PlanError, match=r"'directions': '0.parametrizations.weight.original1' is a direction"):
        keepk.Pruner(model, spaces, example=IMAGES.float(), shrink="end")
    keepk.Pruner(model, spaces, example=IMAGES.float()).step()
