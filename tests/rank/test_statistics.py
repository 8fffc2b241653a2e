"""Statistics of gradients over an epoch: `taylor` and `fisher` compared with plain loops, after shrinks, without data.

`test_activations.py` has the statistics of activations.
"""

import copy

import pytest
import torch
from torch import nn

import keepk
from keepk.errors import KeepkError, RankError, SpaceError, StateError
from keepk.graph.ids.facts import Role
from keepk.metrics.layers import Use
from untyped import untyped


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4),
    )  # fmt: skip


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))


class Residual(nn.Module):
    """Two convolutions and their BatchNorms write into one stream."""

    def __init__(self):
        super().__init__()
        self.first, self.bn1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        stream = self.bn1(self.first(x))
        return self.head((stream + self.bn2(self.second(torch.relu(stream)))).mean((2, 3)))


def residual():
    torch.manual_seed(0)
    return Residual()


PICTURES, ROWS = torch.randn(5, 6, 3, 8, 8), torch.randn(5, 6, 10)
NETWORKS = {"convnet": (convnet, PICTURES), "mlp": (mlp, ROWS), "residual": (residual, PICTURES)}


def run(net, batches, *, keep, statistics=None, **options):
    statistics = statistics or keepk.Statistics(net, of=("gradients",))
    space = keepk.channels("*", keep=keep, metric=keepk.metrics.taylor(statistics), name="c", **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    return statistics, optimizer, keepk.Pruner(net, space, optimizer, example=batches[0])


def backward(net, batch):
    net.zero_grad()
    net(batch).logsumexp(1).square().mean().backward()


def layers_of(pruner):
    return pruner._session.channels.layers("c")


def gates_of(net, graph):
    """By unit, the slices of its gates: its BatchNorms' if there are any, else those of its own weights and biases."""
    norms = {f"{name}." for name, it in net.named_modules() if isinstance(it, nn.modules.batchnorm._BatchNorm)}
    found = {}
    for space in graph.groups:
        roles = {(tensor, axis): role for tensor, axis, role in space.axes}
        gates = {key for key in roles if any(key[0].startswith(norm) for norm in norms)}
        own = gates or {key for key, role in roles.items() if role is not Role.READER}
        for unit in space.units.tolist():
            slices = [it for it in graph.slices(unit) if it[:2] in own and it[0] in dict(net.named_parameters())]
            found[unit] = slices
    return found


def plain_sums(net, graph):
    """By unit, the sum of w g over its gates."""
    sums = {}
    for unit, slices in gates_of(net, graph).items():
        sums[unit] = 0.0
        for tensor, axis, index in slices:
            parameter = net.get_parameter(tensor)
            sums[unit] += float((parameter.detach() * parameter.grad).double().select(axis, index).sum())
    return sums


@pytest.mark.parametrize("name", NETWORKS)
def test_the_means_are_what_a_plain_loop_computes(name):
    make, batches = NETWORKS[name]
    net = make()
    graph = keepk.trace(net, batches[0])
    seen, optimizer, pruner = run(net, batches, keep={"convnet": 14, "mlp": 8, "residual": 3}[name])
    total = dict[int, float]()
    for batch in batches:
        backward(net, batch)
        for unit, value in plain_sums(net, graph).items():
            total[unit] = total.get(unit, 0.0) + value**2 / len(batches)
        seen.update()
        optimizer.step()
    layers = layers_of(pruner)
    got = {
        u: s for layer in layers for u, s in zip(layer.units.tolist(), seen.mean_squares(layer).tolist(), strict=True)
    }
    assert got == pytest.approx(total, rel=1e-4)
    assert len(set(got.values())) == len(got) > 5
    kept = sorted(got, key=got.__getitem__)[len(got) - pruner.plan["c"][-1] :]
    pruner.step()
    assert sorted(kept) == [unit for layer in layers_of(pruner) for unit in layer.units.tolist()]
    assert seen.batches == 0


def test_the_gate_of_a_channel_is_its_batchnorms_scale_and_shift():
    """E[(gamma g_gamma + beta g_beta)^2], written out."""
    net = convnet()
    with torch.no_grad():
        for norm in (net[1], net[4]):
            norm.weight.uniform_(0.5, 1.5)
            norm.bias.uniform_(-1, 1)
    seen, _, pruner = run(net, PICTURES, keep=10)
    squares = []
    for batch in PICTURES:
        backward(net, batch)
        seen.update()
        squares.append((net[1].weight * net[1].weight.grad + net[1].bias * net[1].bias.grad).detach() ** 2)
    layer = layers_of(pruner)[0]
    torch.testing.assert_close(seen.mean_squares(layer).float(), torch.stack(squares).mean(0))


def test_reads_are_ranked_by_what_reads_them():
    net = mlp()
    seen, _, pruner = run(net, ROWS, keep=8, at="input")
    backward(net, ROWS[0])
    seen.update()
    layer = next(it for it in layers_of(pruner) if len(it) == 7)
    wanted = ((net[2].weight * net[2].weight.grad).sum(0) + net[0].bias * net[0].bias.grad).detach() ** 2
    torch.testing.assert_close(seen.mean_squares(layer).float(), wanted)


def scores_of(pruner, metric):
    layers = layers_of(pruner)
    return {u: s for layer in layers for u, s in zip(layer.units.tolist(), metric(layer).tolist(), strict=True)}


@pytest.mark.parametrize("name", NETWORKS)
def test_fisher_is_what_a_plain_loop_computes(name):
    """The sum over a channel's gates of E[g^2] w^2, with the weights as they are at the event."""
    make, batches = NETWORKS[name]
    net = make()
    graph = keepk.trace(net, batches[0])
    metric = keepk.metrics.fisher(seen := keepk.Statistics(net))
    keep = {"convnet": 14, "mlp": 8, "residual": 3}[name]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    pruner = keepk.Pruner(net, keepk.channels("*", keep=keep, metric=metric, name="c"), optimizer, example=batches[0])
    squares = {key: torch.zeros_like(it, dtype=torch.float64) for key, it in net.named_parameters()}
    for batch in batches:
        backward(net, batch)
        for key, parameter in net.named_parameters():
            squares[key] += parameter.grad.double() ** 2 / len(batches)
        seen.update()
        optimizer.step()
    wanted = dict.fromkeys(range(len(graph.units)), 0.0)
    for unit, slices in gates_of(net, graph).items():
        for tensor, axis, index in slices:
            weights = net.get_parameter(tensor).detach().double()
            wanted[unit] += float((squares[tensor] * weights**2).select(axis, index).sum())
    got = scores_of(pruner, metric)
    assert got == pytest.approx(wanted, rel=1e-5)
    assert len(set(got.values())) == len(got) > 5
    kept = sorted(got, key=got.__getitem__)[len(got) - keep :]
    pruner.step()
    assert sorted(kept) == [unit for layer in layers_of(pruner) for unit in layer.units.tolist()]
    assert seen.batches == 0


def test_fisher_of_reads_is_that_of_the_weights_that_read_them():
    net = mlp()
    metric = keepk.metrics.fisher(seen := keepk.Statistics(net))
    pruner = keepk.Pruner(net, keepk.channels("*", keep=8, metric=metric, name="c", at="input"), example=ROWS[0])
    backward(net, ROWS[0])
    seen.update()
    layer = next(it for it in layers_of(pruner) if len(it) == 7)
    wanted = ((net[2].weight * net[2].weight.grad) ** 2).sum(0) + (net[0].bias * net[0].bias.grad) ** 2
    torch.testing.assert_close(metric(layer), wanted.detach())


def test_fisher_of_attention_heads():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
            self.heads = 4

        def forward(self, x):
            q, k, v = (it(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for it in (self.q, self.k, self.v))
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    net, tokens = Attention(), torch.randn(3, 2, 5, 6)
    metric = keepk.metrics.fisher(seen := keepk.Statistics(net))
    pruner = keepk.Pruner(net, keepk.channels("q", keep=2, metric=metric, name="c"), example=tokens[0])
    squares = {key: torch.zeros_like(it) for key, it in net.named_parameters()}
    for batch in tokens:
        net.zero_grad()
        net(batch).square().mean().backward()
        seen.update()
        for key, total in squares.items():
            total.add_(untyped(net.get_parameter(key).grad) ** 2 / 3)
    wanted = [0.0] * 4
    for head in range(4):
        for name in ("q", "k", "v"):
            for feature in (2 * head, 2 * head + 1):
                weight, bias = net.get_parameter(f"{name}.weight"), net.get_parameter(f"{name}.bias")
                wanted[head] += float((squares[f"{name}.weight"][feature] * weight[feature].detach() ** 2).sum())
                wanted[head] += float(squares[f"{name}.bias"][feature] * bias[feature].detach() ** 2)
    got = scores_of(pruner, metric)
    assert [got[unit] for unit in sorted(got)] == pytest.approx(wanted, rel=1e-5)
    pruner.step()
    assert net.heads == 2


def test_fisher_of_weights_and_a_blend_with_taylor():
    """E[g^2] w^2 for each weight; the same statistics serve channels of other layers."""
    net = convnet()
    seen = keepk.Statistics(net)
    fisher = keepk.metrics.fisher(seen)
    spaces = [
        keepk.weights("8.*", keep=20, metric=fisher, name="w"),
        keepk.channels("*", keep=14, metric=keepk.metrics.blend(0.5, scale=keepk.metrics.taylor(seen), weights=fisher)),
    ]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    pruner = keepk.Pruner(net, spaces, optimizer, example=PICTURES[0], shrink="never")
    squares = {key: torch.zeros_like(net.get_parameter(key)) for key in ("8.weight", "8.bias")}
    for batch in PICTURES:
        backward(net, batch)
        seen.update()
        for key, total in squares.items():
            total.add_(net.get_parameter(key).grad ** 2 / len(PICTURES))
        optimizer.step()
    for key, means in squares.items():
        weight = net.get_parameter(key).detach()
        torch.testing.assert_close(fisher(weight, name=key), means * weight**2)
    pruner.step()
    assert pruner.kept == {"w": 20, "*": 14}


def test_fisher_with_weight_norm_is_that_of_the_computed_weight():
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(10, 7))
    net = nn.Sequential(normed, nn.ReLU(), nn.Linear(7, 3))
    plain = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 3))
    plain.load_state_dict({**{key: it for key, it in net.state_dict().items() if "par" not in key},
                           "0.weight": untyped(normed).weight.detach()})  # fmt: skip
    scores = []
    for it in (net, plain):
        metric = keepk.metrics.fisher(seen := keepk.Statistics(it))
        pruner = keepk.Pruner(it, keepk.channels("0", keep=3, metric=metric, name="c"), example=ROWS[0])
        backward(it, ROWS[0])
        seen.update()
        gates = [it for layer in layers_of(pruner) for it in layer.producer]
        scores.append(sum((seen.squared_gradients(g) * g.tensor**2).flatten(1).sum(1) for g in gates[:1]))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-9)


def test_accumulated_gradients_are_one_batch():
    net = mlp()
    seen, _, pruner = run(net, ROWS, keep=8)
    metric = keepk.metrics.fisher(other := keepk.Statistics(net))
    other.follow([keepk_use(pruner, metric)])
    for batch in ROWS[:2]:
        net(batch).logsumexp(1).square().mean().backward()
    seen.update()
    other.update()
    layer = layers_of(pruner)[0]
    products = net[0].weight * net[0].weight.grad, net[0].bias * net[0].bias.grad
    torch.testing.assert_close(seen.mean_squares(layer).float(), ((products[0].sum(1) + products[1]) ** 2).detach())
    torch.testing.assert_close(metric(layer), ((products[0] ** 2).sum(1) + products[1] ** 2).detach())
    assert (seen.batches, other.batches) == (1, 1)


def keepk_use(pruner, metric):
    return Use("c", metric, layers=layers_of(pruner))


@pytest.mark.parametrize("factory", [keepk.metrics.taylor, keepk.metrics.fisher])
def test_a_step_that_the_gradient_scaler_skips_is_not_counted(factory):
    net = mlp()
    metric = factory(seen := keepk.Statistics(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    space = keepk.channels("*", keep=8, metric=metric, name="c")
    pruner = keepk.Pruner(net, space, optimizer, example=ROWS[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    found = []
    for number, batch in enumerate(ROWS[:3]):
        optimizer.zero_grad()
        loss = net(batch).logsumexp(1).square().mean()
        scaler.scale(loss * torch.inf if number == 1 else loss).backward()
        scaler.unscale_(optimizer)
        seen.update()
        if number != 1:
            backward(twin := copy.deepcopy(net), batch)
            found.append([parameter.grad for parameter in twin.parameters()])
        before = copy.deepcopy(net.state_dict())
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(it, before[key]) for key, it in net.state_dict().items()) == (number == 1)
    assert seen.batches == 2
    scores = metric(layers_of(pruner)[0])
    assert scores.isfinite().all()
    if factory is keepk.metrics.fisher:
        weight, bias = ((one**2 + two**2) / 2 for one, two in zip(*(it[:2] for it in found), strict=True))
        wanted = (weight * net[0].weight.detach() ** 2).sum(1) + bias * net[0].bias.detach() ** 2
        torch.testing.assert_close(scores, wanted, rtol=1e-4, atol=1e-9)


def test_nothing_in_the_model_changes():
    net = convnet()
    seen, optimizer, _ = run(net, PICTURES, keep=10)
    backward(net, PICTURES[0])
    before = copy.deepcopy(net.state_dict()), [parameter.grad.clone() for parameter in net.parameters()]
    versions = [(parameter._version, parameter.grad._version) for parameter in net.parameters()]
    with seen:
        seen.update()
    assert all(torch.equal(before[0][key], value) for key, value in net.state_dict().items())
    assert all(torch.equal(old, it.grad) for old, it in zip(before[1], net.parameters(), strict=True))
    assert versions == [(parameter._version, parameter.grad._version) for parameter in net.parameters()]
    assert not any(module._forward_hooks or module._backward_hooks for module in net.modules())
    assert not any(parameter._backward_hooks for parameter in net.parameters())
    with pytest.raises(KeepkError, match="it was closed"):
        seen.update()
    del optimizer


@pytest.mark.parametrize("shrink", ["each", "end", "never"])
def test_it_follows_the_network_down(shrink):
    net = convnet()
    seen = keepk.Statistics(net)
    space = keepk.channels("*", keep=6, metric=keepk.metrics.taylor(seen), name="c", schedule=[20, 14, 10, 6])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    pruner = keepk.Pruner(net, space, optimizer, example=PICTURES[0], shrink=shrink)
    for left in (20, 14, 10, 6):
        for batch in PICTURES:
            backward(net, batch)
            seen.update()
            optimizer.step()
        assert seen.batches == len(PICTURES)
        pruner.step()
        assert (pruner.kept, seen.batches) == ({"c": left}, 0)


def test_without_data_an_event_is_refused_and_nothing_changes():
    net = convnet()
    seen, _, pruner = run(net, PICTURES, keep=10)
    with pytest.raises(
        RankError, match=r"there was no batch since the last event. Call statistics.update\(\) after every"
    ):
        pruner.step()
    assert (pruner.epoch, pruner.kept) == (0, {"c": 20})
    with pytest.raises(RankError, match=r"found no gradient .* Call it after backward\(\) and before zero_grad"):
        seen.update()
    backward(net, PICTURES[0])
    seen.update()
    seen.reset()
    with pytest.raises(RankError, match="there was no batch"):
        pruner.step()
    seen.update()
    pruner.step()
    assert pruner.kept == {"c": 10}


def test_a_batch_whose_gradients_overflowed_is_not_counted():
    net = convnet()
    seen, _, pruner = run(net, PICTURES, keep=10)
    backward(net, PICTURES[0])
    net[4].weight.grad[3] = torch.inf
    seen.update()
    assert seen.batches == 0
    with pytest.raises(RankError, match="all 1 batches since the last event had NaN or infinite gradients"):
        pruner.step()
    backward(net, PICTURES[0])
    seen.update()
    assert seen.batches == 1
    pruner.step()


def test_a_layer_that_is_not_used_is_refused_only_if_no_batch_used_it():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)) for _ in range(2))
            self.both = True

        def forward(self, x):
            return self.a(x) + self.b(x) if self.both else self.a(x)

    net = Sometimes()
    seen, _, pruner = run(net, torch.randn(2, 5, 4), keep=6)
    net.both = False
    net(torch.randn(5, 4)).sum().backward()
    seen.update()
    with pytest.raises(RankError, match=r"'b.0.weight' had no gradient in any batch.* exclude="):
        pruner.step()
    net.both = True
    net(torch.randn(5, 4)).sum().backward()
    seen.update()
    pruner.step()
    assert pruner.kept == {"c": 6}


def test_two_spaces_and_a_blend_read_the_same_statistics():
    net = convnet()
    seen = keepk.Statistics(net)
    taylor = keepk.metrics.taylor(seen)
    spaces = [
        keepk.channels("0", keep=3, metric=taylor, name="one"),
        keepk.channels("3", keep=5, metric=keepk.metrics.blend(0.5, weights=taylor), name="two"),
    ]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner = keepk.Pruner(net, spaces, optimizer, example=PICTURES[0])
    with torch.no_grad():
        net[4].weight.uniform_(0.5, 1.5)
    backward(net, PICTURES[0])
    seen.update()
    pruner.step()
    assert pruner.kept == {"one": 3, "two": 5}


def test_within_an_epoch_a_state_goes_on_bit_equal():
    def started():
        net = convnet()
        return net, *run(net, PICTURES, keep=10, schedule=[16, 10])

    def trained(net, seen, optimizer, batches):
        for batch in batches:
            backward(net, batch)
            seen.update()
            optimizer.step()

    net, seen, optimizer, pruner = started()
    trained(net, seen, optimizer, PICTURES)
    pruner.step()
    trained(net, seen, optimizer, PICTURES[:2])
    state = copy.deepcopy([net.state_dict(), optimizer.state_dict(), pruner.state_dict(), seen.state_dict()])
    trained(net, seen, optimizer, PICTURES[2:])
    pruner.step()

    again, other, sgd, second = started()
    second.load_state_dict(state[2])
    again.load_state_dict(state[0])
    sgd.load_state_dict(state[1])
    other.load_state_dict(state[3])
    assert other.batches == 2
    trained(again, other, sgd, PICTURES[2:])
    second.step()
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in net.state_dict().items()}
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in again.state_dict().items())


def test_a_state_of_other_channels_is_refused():
    seen, *_ = run(convnet(), PICTURES, keep=10)
    other, *_ = run(mlp(), ROWS, keep=10)
    with pytest.raises(StateError, match="belongs to different channels; the model has 20 now"):
        seen.load_state_dict(other.state_dict())
    for wrong in ({}, None, {**seen.state_dict(), "version": 3}):
        with pytest.raises(StateError, match="not the state of a Statistics object"):
            seen.load_state_dict(wrong)
    with pytest.raises(StateError, match="does not have one sum per channel"):
        seen.load_state_dict({**seen.state_dict(), "sums": torch.zeros(3), "batches": 1})


def test_a_state_of_version_1_is_loaded():
    """It has the sums of Taylor scores only."""
    net = convnet()
    seen, _, pruner = run(net, PICTURES, keep=10)
    backward(net, PICTURES[0])
    seen.update()
    state = seen.state_dict()
    old = {key: state[key] for key in ("units", "batches", "with_gradient", "sums")} | {"version": 1}
    other, _, _ = run(convnet(), PICTURES, keep=10)
    other.load_state_dict(old)
    assert other.batches == 1
    layer = layers_of(pruner)[0]
    assert torch.equal(other.mean_squares(layer), seen.mean_squares(layer))
    assert other.state_dict()["version"] == 2


def test_squared_gradients_are_part_of_the_state():
    def started():
        net = mlp()
        metric = keepk.metrics.fisher(seen := keepk.Statistics(net))
        spaces = [
            keepk.channels("0", keep=3, metric=metric, name="c"),
            keepk.weights("4.weight", keep=9, metric=metric, name="w"),
        ]
        return net, seen, keepk.Pruner(net, spaces, example=ROWS[0])

    net, seen, pruner = started()
    backward(net, ROWS[0])
    seen.update()
    other, second, its_pruner = started()
    second.load_state_dict(copy.deepcopy(seen.state_dict()))
    for it, statistics, run_ in ((net, seen, pruner), (other, second, its_pruner)):
        backward(it, ROWS[1])
        statistics.update()
        run_.step()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in net.state_dict().items())
    with pytest.raises(StateError, match=r"squared gradients of 3 parameters .* read those of 0 and 0, or they differ"):
        keepk.Statistics(net).load_state_dict({**seen.state_dict(), "squares": started()[1].state_dict()["squares"]})


def test_a_cut_that_the_pruner_has_not_seen_is_told():
    net = mlp()
    seen, _, pruner = run(net, ROWS, keep=10, schedule=[14, 10])
    with torch.no_grad():
        net[0].weight[2], net[0].bias[2] = 0, 0
    keepk.compact(net, ROWS[0])
    backward(net, ROWS[0])
    with pytest.raises(RankError, match=r"the model was cut, but not by the Pruner. Read pruner.kept"):
        seen.update()
    assert pruner.kept == {"c": 15}
    seen.update()
    assert seen.batches == 1


def test_wrong_uses_are_refused():
    net = convnet()
    with pytest.raises(KeepkError, match=r"Statistics: of='gradients': unknown. Pass of=\(\"gradients\",\)"):
        keepk.Statistics(net, of="gradients")
    with pytest.raises(KeepkError, match="unknown"):
        keepk.Statistics(net, of=("noise",))
    with pytest.raises(KeepkError, match="model: got list"):
        keepk.Statistics(untyped([net]))
    with pytest.raises(RankError, match=r"update\(\) was called before a Pruner uses it"):
        keepk.Statistics(net).update()
    with pytest.raises(RankError, match=r"taylor\(statistics=3\): got int. Make it with keepk.Statistics\(model\)"):
        keepk.metrics.taylor(untyped(3))
    with pytest.raises(SpaceError, match=r"Call it: keepk.metrics.taylor\(statistics\)"):
        keepk.Pruner(net, keepk.channels("*", keep=9, metric=keepk.metrics.taylor), example=PICTURES[0])
    with pytest.raises(SpaceError, match="ranks channels, not weights"):
        keepk.Pruner(net, keepk.weights("*", keep=9, metric=keepk.metrics.taylor(keepk.Statistics(net))))
    with pytest.raises(RankError, match=r"fisher\(statistics=None\): got NoneType"):
        keepk.metrics.fisher(untyped(None))
    with pytest.raises(SpaceError, match="reads the statistics of another model"):
        run(net, PICTURES, keep=9, statistics=keepk.Statistics(convnet()))
    net[1].weight.requires_grad_(False)
    with pytest.raises(RankError, match=r"parameter '1.weight' of the channels of '0' gets no gradient"):
        run(net, PICTURES, keep=9)
    with pytest.raises(RankError, match=r"parameter '1.weight' gets no gradient, so its weights cannot be ranked"):
        keepk.Pruner(net, keepk.weights("1.*", keep=9, metric=keepk.metrics.fisher(keepk.Statistics(net))))
