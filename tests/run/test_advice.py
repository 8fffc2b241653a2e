"""Warnings of a run: rankings that decide little, events that follow too fast, a save before the first event."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import keepk
from keepk import KeepkWarning
from strategies import mlp


@contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Block(nn.Module):
    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x):
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + self.down(x))


def resnet():
    """A ResNet as libraries initialise it: BatchNorm scales are 1, and 0 in the last BatchNorm of a block."""
    torch.manual_seed(0)
    blocks = [Block(24, 24, 1), Block(24, 32, 2), Block(32, 48, 2)]
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
    )  # fmt: skip


IMAGES = torch.zeros(2, 3, 8, 8)


def test_a_fresh_resnet_warns_of_ties_and_of_the_layers_that_would_keep_one_channel():
    model = resnet()
    pruner = keepk.Pruner(model, keepk.channels("*", prune=0.5, name="c"), example=IMAGES)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pruner.step()
    assert {it.category for it in told} == {KeepkWarning}
    assert {it.filename for it in told} == {__file__}
    words = sorted(str(it.message) for it in told)
    assert len(words) == 2
    assert "are tied at the cut of the ranking" in words[0]
    assert "Train first, or choose another metric=" in words[0]
    assert "would keep less than 5 % of their channels: '4.conv2' 1 of 32" in words[1] or "1 of 48" in words[1]
    assert "Train first, set layer_floor=..., or choose another metric=." in words[1]
    assert model[3].down[0].out_channels in (1, 24)


def test_a_floor_or_another_metric_silences_what_it_cures():
    ties, thin = "are tied at", "would keep less than 5 %"
    for options, expected in (
        ({"layer_floor": 4}, ties),
        ({"metric": lambda layer: torch.linspace(0, 1, len(layer))}, None),
        ({"metric": keepk.metrics.random(0)}, None),
    ):
        pruner = keepk.Pruner(resnet(), keepk.channels("*", prune=0.5, **options), example=IMAGES)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pruner.step()
        assert [ties in str(it.message) for it in told] == ([True] if expected else []), options
        assert not any(thin in str(it.message) for it in told)


def test_a_warning_that_is_an_error_changes_nothing():
    model = resnet()
    before = copy.deepcopy(model.state_dict())
    pruner = keepk.Pruner(model, keepk.channels("*", prune=0.5), example=IMAGES)
    for _ in range(2):
        with quiet(), pytest.raises(KeepkWarning, match="tied"):
            pruner.step()
    assert pruner.epoch == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_each_is_told_once_over_many_events():
    pruner = keepk.Pruner(resnet(), keepk.channels("*", keep=20, schedule=[90, 60, 40, 20]), example=IMAGES)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            pruner.step()
    assert 1 <= len(told) <= 2
    assert len({str(it.message)[:60] for it in told}) == len(told)


def wide(scales):
    """Two layers of 100 channels with the given scores."""
    model = nn.Sequential(nn.Linear(5, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 3))
    scores = {name: torch.tensor([float(it) for it in given]) for name, given in zip("02", scales, strict=True)}
    return model, lambda layer: scores[layer.name]


@pytest.mark.parametrize(
    ("first", "second", "keep", "warns"),
    [
        (range(100), range(100, 200), 104, "'0' 4 of 100"),
        (range(100), range(100, 200), 105, None),  # 5 % is not less than 5 %
        (range(100), range(100, 200), 4, None),  # the whole space keeps 2 %, and the floor keeps one in each layer
        ([1.0] * 100, [1.0] * 100, 100, "200 of its 200 channels are tied"),
        ([0.0] * 100, [1.0] * 100, 110, None),  # of those tied at the cut, half of the space, not most
        ([0.0] * 50 + [1.0] * 50, [1.0] * 50 + [0.0] * 50, 100, None),  # ties that decide nothing
        ([*range(40), *[50.0] * 60], [*range(60, 100), *[50.0] * 60], 80, "120 of its 200 channels are tied"),
        ([*range(60), *[70.0] * 40], [*range(80, 140), *[70.0] * 40], 80, None),  # fewer than half
    ],
)
def test_what_counts_as_thin_or_tied(first, second, keep, warns):
    model, metric = wide((first, second))
    pruner = keepk.Pruner(model, keepk.channels("*", keep=keep, metric=metric), example=torch.zeros(2, 5))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pruner.step()
    assert any(warns in str(it.message) for it in told) if warns else not told


def test_weights_are_watched_too():
    net = mlp((10, 30, 30))
    with torch.no_grad():
        net[0].weight[:] = torch.randn(30, 10)
        net[2].weight *= 1e-3
    pruner = keepk.Pruner(net, keepk.weights("*.weight", prune=0.8, name="w"))
    with pytest.warns(KeepkWarning, match=r"1 layer would keep less than 5 % of its weights: '2.weight' \d+ of 900"):
        pruner.step()
    net = mlp((10, 30, 30))
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.5)
    pruner = keepk.Pruner(net, keepk.weights("*.weight", keep=600, name="w"))
    with pytest.warns(KeepkWarning, match="space 'w': 1,200 of its 1,200 weights are tied at the cut of the ranking"):
        pruner.step()
    with quiet():  # the order of zeros does not matter, and a floor is the user's decision
        net = mlp((10, 30, 30))
        with torch.no_grad():
            net[0].weight.zero_()
            net[2].weight[:, :20] = 0
        keepk.Pruner(net, keepk.weights("*.weight", keep=500, layer_floor=1)).step()


def run(updates, *, events=4, schedule=(1000, 800, 600, 400), optimizers=1):
    """Run events with these numbers of updates before each, and return the warnings."""
    net = mlp((30, 40, 10))
    made = [torch.optim.SGD(net.parameters(), lr=1e-3) for _ in range(optimizers)]
    pruner = keepk.Pruner(net, keepk.weights("*.weight", keep=schedule[-1], name="w", schedule=list(schedule)), made)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for event in range(events):
            for optimizer, count in zip(made, updates[event] if optimizers > 1 else [updates[event]], strict=True):
                for _ in range(count):
                    net(torch.randn(4, 30)).square().mean().backward()
                    optimizer.step()
            pruner.step()
    assert all(it.category is KeepkWarning for it in told)
    return [str(it.message) for it in told]


@pytest.mark.parametrize(
    ("updates", "warns"),
    [
        ([1, 1, 1, 1], True),
        ([0, 0, 0, 0], True),
        ([0, 1, 0, 1], True),  # once per batch, with gradients accumulated over two
        ([2, 2, 2, 2], False),
        ([50, 1, 50, 1], False),
        ([1, 50, 50, 50], False),
        ([50, 50, 1, 1], True),
        ([1, 50, 1, 50], False),
    ],
)
def test_events_after_one_update_each_are_told_once(updates, warns):
    told = run(updates)
    assert len(told) == warns
    for words in told:
        assert words.startswith("pruner.step() was called twice in a row after at most one optimizer step")
        assert "the whole plan is over after 4 batches" in words
        assert "Call it at the end of every epoch, or every n batches" in words


def test_hasty_events_at_which_nothing_falls_are_not_told():
    assert run([1] * 6, events=6, schedule=(400,)) == []  # one event, then fine-tuning
    assert run([1] * 6, events=6, schedule=(400,) * 6) == []
    assert len(run([1] * 6, events=6, schedule=(800, 800, 800, 400, 400, 400))) == 1  # it decreases every third batch


def test_one_of_several_optimizers_is_enough():
    assert run([(1, 9)] * 4, optimizers=2) == []
    assert len(run([(1, 1)] * 4, optimizers=2)) == 1


def test_lbfgs_and_a_run_without_an_optimizer_are_not_judged():
    net = mlp((30, 40, 10))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=5)
    pruner = keepk.Pruner(net, keepk.weights("*.weight", keep=400, schedule=[1000, 800, 400]), optimizer)

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(4, 30)).square().mean()
        loss.backward()
        return loss

    with quiet():
        for _ in range(3):
            optimizer.step(closure)
            pruner.step()
        pruner = keepk.Pruner(mlp((30, 40, 10)), keepk.weights("*.weight", keep=400, schedule=[1000, 800, 400]))
        for _ in range(3):
            pruner.step()


def test_a_resumed_run_is_judged_from_there_on():
    def made():
        net = mlp((30, 40, 10))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        space = keepk.weights("*.weight", keep=400, schedule=[1000, 800, 600, 400])
        return keepk.Pruner(net, space, optimizer)

    with quiet():
        pruner, resumed = made(), made()
        pruner.step()
        resumed.load_state_dict(pruner.state_dict())
        resumed.step()
        with pytest.raises(KeepkWarning, match="twice in a row"):
            resumed.step()
        assert resumed.epoch == 2


def test_a_model_that_is_saved_before_its_first_event(tmp_path):
    net = mlp((10, 10))
    pruner = keepk.Pruner(net, keepk.weights("*.weight", keep=30, name="w"))
    words = r"save: pruner.step\(\) has not been called.*space 'w' still has all of its 100 units, and its target is 30"
    with pytest.warns(KeepkWarning, match=words):
        keepk.save(net, tmp_path / "a")
    with quiet():
        keepk.save(net, tmp_path / "a")  # warned only once
        pruner.step()
        keepk.save(net, tmp_path / "a")
        closed = keepk.Pruner(net := mlp((10, 10)), keepk.weights("*.weight", keep=30))
        closed.close()
        keepk.save(net, tmp_path / "b")
        everything = keepk.Pruner(net, keepk.weights("*.weight", keep=100))
        keepk.save(net, tmp_path / "c")
        assert everything.epoch == 0
        everything.close()
        pruner = keepk.Pruner(net, keepk.weights("*.weight", keep=30))
        del pruner
        keepk.save(net, tmp_path / "d")  # the pruner is gone


def test_scales_that_hardly_differ_are_told_once():
    """After a few steps all BatchNorm scales are near 1, and their order means nothing yet."""
    for spread, warns in ((0.02, True), (0.4, False)):
        torch.manual_seed(0)
        layers = [part for _ in range(2) for part in (nn.Linear(40, 40), nn.BatchNorm1d(40), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(40, 3))
        with torch.no_grad():
            for norm in (model[1], model[4]):
                norm.get_parameter("weight").copy_(torch.linspace(1 - spread, 1 + spread, 40))
        space = keepk.channels("*", keep=40, schedule=[60, 40], name="c", metric=keepk.metrics.blend(0.5))
        pruner = keepk.Pruner(model, space, example=torch.zeros(2, 40))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pruner.step()
            pruner.step()
        words = [str(it.message) for it in told]
        assert len(words) == warns, words
        if warns:
            assert "space 'c': its BatchNorm scales hardly differ (mean 1, standard deviation 0.012)" in words[0]
            assert "Train longer first, or choose another metric=" in words[0]
    with quiet():
        keepk.Pruner(model, keepk.channels("*", keep=30, metric=keepk.metrics.l2), example=torch.zeros(2, 40)).step()


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(64, 8, 128, batch_first=True)


def run_once(model, space):
    keepk.Pruner(model, space, example=torch.randn(2, 5, 64)).step()


def test_heads_beside_neurons_are_told_once_with_their_sizes():
    words = (
        r"space '\*': has units of very different size: one of 'self_attn.in_proj_weight' has 2,072 weights, one of "
        r"'linear1' has 129\. One ranking of both says little\. Put them into separate spaces, under one budget"
    )
    sizes = {}
    for name, kept in (("self_attn*", 7), ("linear1", 127)):
        model = encoder()
        before = sum(it.numel() for it in model.parameters())
        run_once(model, keepk.channels(name, keep=kept))
        sizes[name] = before - sum(it.numel() for it in model.parameters())
    assert sizes == {"self_attn*": 2072, "linear1": 129}
    for number in ({"macs": 0.6}, {"keep": 100}):
        with pytest.warns(KeepkWarning, match=words) as told:
            run_once(encoder(), keepk.channels("*", **number))
        assert sum("has units" in str(it.message) for it in told) == 1


def test_units_that_compare_are_not_told():
    spaces = [keepk.channels(it, name=it) for it in ("self_attn*", "linear1")]
    widths = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 2_000), nn.ReLU(), nn.Linear(2_000, 2))
    cells = nn.LSTM(8, 64, batch_first=True)
    rows = torch.randn(2, 5, 64)
    with quiet():
        keepk.Pruner(encoder(), spaces, macs=0.6, example=rows)
        keepk.Pruner(encoder(), keepk.channels("*", macs=0.7, per_layer=True), example=rows)
        keepk.Pruner(encoder(), [spaces[0]], macs=0.9, example=rows)
        keepk.Pruner(widths, keepk.channels("*", macs=0.6), example=torch.randn(2, 3))
        keepk.Pruner(Outputs(cells), keepk.channels("*", macs=0.6), example=torch.randn(2, 5, 8))


class Outputs(nn.Module):
    """The last output of an LSTM, through hidden neurons of few weights."""

    def __init__(self, cells):
        super().__init__()
        self.cells, self.hidden, self.out = cells, nn.Linear(64, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(self.cells(x)[0][:, -1])))
