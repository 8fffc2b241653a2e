"""Phases: a space advances only in its own phases, and frozen parameters do not change."""

import pytest
import torch
from torch import nn

import keepk
from keepk.errors import PlanError, SpaceError
from strategies import OPTIMIZERS, mlp, train_step
from untyped import untyped


def lenet_like():
    torch.manual_seed(0)
    return nn.ModuleDict({"conv": nn.Linear(6, 6), "norm": nn.BatchNorm1d(6), "fc": nn.Linear(6, 3)})


def forward(net, inputs):
    return net["fc"](net["norm"](net["conv"](inputs)).relu())


def test_the_papers_lenet_5_phases():
    net = lenet_like()
    spaces = [
        keepk.weights("fc.weight", keep=5, name="fc", schedule=[10, 5]),
        keepk.weights("conv.weight", keep=9, name="conv", schedule=keepk.Annealing(p0=0.0, n1=0, nu=0.3)),
    ]
    phases = [
        keepk.Phase(2, prune="fc", freeze=["conv*", "norm*"]),
        keepk.Phase(3, prune="conv", freeze="fc*"),
        keepk.Phase(2),
    ]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    pruner = keepk.Pruner(net, spaces, optimizer, phases=phases)
    assert pruner.plan == {"fc": (10, 5, 5, 5, 5, 5, 5), "conv": (36, 36, 25, 14, 9, 9, 9)}
    assert pruner.epochs == 7
    frozen_by_epoch = [("conv", "norm")] * 2 + [("fc",)] * 3 + [()] * 3
    for epoch, frozen in enumerate(frozen_by_epoch):
        before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
        mean = net["norm"].running_mean.clone()
        for _ in range(2):
            optimizer.zero_grad()
            forward(net, torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
        for name, parameter in net.named_parameters():
            assert torch.equal(before[name], parameter) is name.startswith(frozen), (epoch, name)
        assert not torch.equal(mean, net["norm"].running_mean)  # statistics still change
        pruner.step()
        if epoch < 7:
            assert pruner.kept == {name: counts[epoch] for name, counts in pruner.plan.items()}
    assert pruner.done


def test_a_space_stands_still_between_its_phases():
    pruner = keepk.Pruner(
        mlp((4, 4)),
        [keepk.weights("*", keep=2, name="all", schedule=[12, 8, 2])],
        phases=[keepk.Phase(1), keepk.Phase(2, prune="a*"), keepk.Phase(2), keepk.Phase(1, prune="all")],
    )
    assert pruner.plan["all"] == (20, 12, 8, 8, 8, 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_means_no_update_with_every_optimizer(name):
    net = mlp()
    optimizer = OPTIMIZERS[name](net.parameters())
    train_step(net, optimizer)  # momentum and history from before the freeze
    space = keepk.weights("2.weight", keep=4, schedule=[4])
    keepk.Pruner(net, [space], optimizer, phases=[keepk.Phase(3, prune="*", freeze="0.*")])
    before = [parameter.detach().clone() for parameter in net[0].parameters()]
    moving = net[4].weight.detach().clone()
    train_step(net, optimizer, 1)
    train_step(net, optimizer, 2)
    assert all(torch.equal(old, new) for old, new in zip(before, net[0].parameters(), strict=True))
    assert not torch.equal(moving, net[4].weight)


def test_frozen_holds_when_a_closure_makes_the_gradients():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1)
    keepk.Pruner(net, [keepk.weights("2.*", keep=4)], optimizer, phases=[keepk.Phase(1, prune="*", freeze="0.*")])
    before = net[0].weight.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = net(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    assert optimizer.step(closure=closure) > 0
    assert torch.equal(before, net[0].weight)


@pytest.mark.parametrize(
    ("phases", "epochs", "error", "words"),
    [
        ([keepk.Phase(2)], None, PlanError, "space 'all': no phase prunes it"),
        ([keepk.Phase(2, prune="al")], None, PlanError, "prune='al'.: no such space. Nearest names: 'all'"),
        ([keepk.Phase(2, prune="all", freeze="1.*")], None, SpaceError, "freeze='1.*'.: matches no parameter"),
        ([keepk.Phase(2, prune="all")], 3, PlanError, "epochs=3, but the phases have 2"),
        ([keepk.Phase(1, prune="all")], None, PlanError, "space 'all': .* needs 2 epochs"),
        ([keepk.Phase(2, prune="all", freeze="0.*")], None, PlanError, "no optimizer was passed"),
        ([], None, PlanError, "phases="),
        ("all", None, PlanError, "phases='all'"),
    ],
)
def test_phases_that_do_not_fit_are_refused(phases, epochs, error, words):
    space = keepk.weights("*", keep=2, name="all", schedule=[8, 2])
    with pytest.raises(error, match=words):
        keepk.Pruner(mlp((4, 4)), [space], epochs=epochs, phases=phases)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((True,), "got bool"), ((0,), "too small"), ((1.5,), "got float")],
)
def test_wrong_lengths_are_refused(arguments, words):
    with pytest.raises(PlanError, match=words):
        keepk.Phase(*arguments)


def test_globs_of_a_phase_are_strings():
    with pytest.raises(PlanError, match="not globs"):
        keepk.Phase(1, prune=untyped(3))
