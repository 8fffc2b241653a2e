"""The laws of the library on generated networks, each compared with a slow and obvious oracle."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import keepk
from strategies import DTYPES, OPTIMIZERS, mlp, seeds, small_nets, train_step


def oracle_best(parameters, masks, keep, floors):
    """Python's sort: each tensor's floor first, then the rest by |w|, the earlier index first among ties."""
    cells = [
        (-abs(float(weight)), place, index)
        for place, (parameter, mask) in enumerate(zip(parameters, masks, strict=True))
        for index, (weight, alive) in enumerate(
            zip(parameter.detach().flatten().tolist(), mask.flatten().tolist(), strict=True)
        )
        if alive
    ]
    cells.sort()
    chosen = set()
    for place, floor in enumerate(floors):
        chosen |= set([cell for cell in cells if cell[1] == place][:floor])
    for cell in cells:
        if len(chosen) == keep:
            break
        chosen.add(cell)
    best = [torch.zeros_like(mask) for mask in masks]
    for _, place, index in chosen:
        best[place].view(-1)[index] = True
    return best


@st.composite
def plans(draw, total):
    """A non-increasing plan that ends at K."""
    keep = draw(st.one_of(st.just(1), st.just(total), st.integers(1, total)))
    before = draw(st.lists(st.integers(keep, total), max_size=3).map(lambda counts: sorted(counts, reverse=True)))
    return keep, [*before, keep]


@given(net=small_nets(), data=st.data(), floor=st.integers(0, 2))
@settings(deadline=None)
def test_exact_k_and_the_best_are_kept(net, data, floor):
    """Laws 1 and 2: after every event exactly M_e are kept, those that a sort of the remaining ones would choose."""
    parameters = list(net.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    floors = [min(floor, parameter.numel()) if parameter.dim() > 1 else 0 for parameter in parameters]
    keep, schedule = data.draw(plans(total))
    if sum(floors) > keep:
        floor, floors = 0, [0] * len(floors)
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=keep, schedule=schedule, layer_floor=floor, name="all")])
    alive = [torch.ones_like(parameter, dtype=torch.bool) for parameter in parameters]
    generator = torch.Generator().manual_seed(data.draw(seeds))
    for left in schedule:
        alive = oracle_best(parameters, alive, left, floors)
        pruner.step()
        masks = list(pruner.masks.values())
        assert pruner.kept == {"all": left}
        assert sum(int(mask.sum()) for mask in masks) == left
        for mask, best, parameter in zip(masks, alive, parameters, strict=True):
            assert torch.equal(mask, best)
            assert not parameter.detach()[~mask].any()
            with torch.no_grad():  # change the kept weights, as training would
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.add_(noise * mask)
    assert pruner.done
    before = copy.deepcopy(net.state_dict())
    pruner.step()
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())


@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_several_spaces_each_keep_their_own_k(data):
    net = mlp((4, 5, 3), seed=data.draw(seeds))
    first, second = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 15))
    spaces = [
        keepk.weights("0.weight", keep=first, schedule=[20, first], name="first"),
        keepk.weights("2.*", keep=second, exclude="*.bias", schedule=keepk.Cubic(), name="second"),
    ]
    pruner = keepk.Pruner(net, spaces, epochs=4)
    for epoch in range(pruner.epochs):
        pruner.step()
        expected = {name: counts[epoch] for name, counts in pruner.plan.items()}
        counted = {"first": int(pruner.masks["0.weight"].sum()), "second": int(pruner.masks["2.weight"].sum())}
        assert pruner.kept == expected == counted
    assert set(pruner.masks) == {"0.weight", "2.weight"}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_held(name, dtype):
    """Law 3: pruned weights are 0.0 after every step, events zero their optimizer state, and kept weights change."""
    if dtype in (torch.float16, torch.bfloat16) and name in ("lbfgs", "rprop"):
        pytest.skip("the optimizer itself diverges in half precision")
    net = mlp(dtype=dtype)
    optimizer = OPTIMIZERS[name](net.parameters())
    pruner = keepk.Pruner(net, [keepk.weights("*.weight", keep=20, schedule=[40, 20])], optimizer)
    for seed in range(6):
        train_step(net, optimizer, seed)
        assert_silent(net, pruner)
        if seed in (1, 3):
            pruner.step()
            assert_silent(net, pruner, optimizer)
    assert pruner.done
    before = [parameter.detach().clone() for parameter in net.parameters()]
    train_step(net, optimizer, 7)
    assert any(not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    assert sum(int(layer.weight.count_nonzero()) for layer in (net[0], net[2], net[4])) <= 20


def assert_silent(net, pruner, optimizer=None):
    masks = pruner.masks
    for name, parameter in net.named_parameters():
        dead = ~masks[name] if name in masks else torch.zeros_like(parameter, dtype=torch.bool)
        assert not parameter.detach()[dead].any()
        if optimizer is None or isinstance(optimizer, torch.optim.LBFGS):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(value) and value.shape == parameter.shape and key != "step":
                assert not value[dead].any(), key


def test_held_under_gradient_accumulation():
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    pruner = keepk.Pruner(net, [keepk.weights("*.weight", keep=10)], optimizer)
    pruner.step()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        net(torch.randn(8, 6, generator=generator)).square().mean().backward()
        if seed % 2:
            optimizer.step()
            optimizer.zero_grad()
            assert_silent(net, pruner)
    assert sum(int(layer.weight.count_nonzero()) for layer in (net[0], net[2], net[4])) == 10


def test_held_through_a_skipped_amp_step():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pruner = keepk.Pruner(net, [keepk.weights("*.weight", keep=10)], optimizer)
    pruner.step()
    kept_before = [parameter.detach().clone() for parameter in net.parameters()]
    for overflow in (True, False):
        optimizer.zero_grad()
        scaler.scale(net(torch.randn(8, 6)).square().mean()).backward()
        if overflow:
            net[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert_silent(net, pruner)
        moved = any(not torch.equal(old, new) for old, new in zip(kept_before, net.parameters(), strict=True))
        assert moved is not overflow


def test_two_optimizers_are_both_held():
    net = mlp()
    one = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.AdamW([*net[2].parameters(), *net[4].parameters()], lr=0.1)
    pruner = keepk.Pruner(net, [keepk.weights("*.weight", keep=8)], [one, other])
    pruner.step()
    for _ in range(3):
        net(torch.randn(8, 6)).square().mean().backward()
        one.step()
        other.step()
        dead = [
            parameter.detach()[~pruner.masks[name]] for name, parameter in net.named_parameters() if "weight" in name
        ]
        assert not torch.cat(dead).any()


def test_same_objects():
    """Law 5: classes, Parameter objects, keys, hooks and memory format are unchanged."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
    fired = []
    net.register_forward_hook(lambda *_: fired.append(1))
    ids = {name: id(parameter) for name, parameter in net.named_parameters()}
    keys, classes = list(net.state_dict()), [type(module) for module in net.modules()]
    optimizer = torch.optim.Adam(net.parameters())
    pruner = keepk.Pruner(net, [keepk.weights("0.*", keep=30)], optimizer)
    pruner.step()
    net(torch.randn(2, 3, 8, 8)).mean().backward()
    optimizer.step()
    assert {name: id(parameter) for name, parameter in net.named_parameters()} == ids
    assert (list(net.state_dict()), [type(module) for module in net.modules()]) == (keys, classes)
    assert net.get_parameter("0.weight").is_contiguous(memory_format=torch.channels_last)
    assert fired
    twin = copy.deepcopy(net)
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), twin.state_dict().values(), strict=True))


def test_the_order_of_a_tie_does_not_depend_on_the_memory_format():
    plain = nn.Conv2d(4, 6, 3, bias=False)
    nn.init.constant_(plain.weight, 0.5)
    turned = copy.deepcopy(plain)
    turned.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's types
    for net in (plain, turned):
        keepk.Pruner(net, [keepk.weights("*", keep=17)]).step()
    assert torch.equal(plain.weight, turned.weight)
    assert plain.weight.detach().flatten()[:17].all()


def test_zero_dim_parameters_keep_their_step_counter():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.1))
            self.weight = nn.Parameter(torch.ones(3))

    net = Scaled()
    optimizer = torch.optim.Adam(net.parameters())
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=3)], optimizer)
    (net.scale * net.weight.sum()).backward()
    optimizer.step()
    assert optimizer.state[net.scale]["exp_avg"] != 0
    pruner.step()
    assert net.scale == 0
    assert optimizer.state[net.scale]["step"] == 1
    assert optimizer.state[net.scale]["exp_avg"] == 0
