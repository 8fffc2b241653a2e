"""Channels are removed in real training loops, and everything around the Pruner continues as if they were masked.

The oracle is the same loop with ``shrink="never"``: the model keeps its size, removed channels are zero after every
update, and the remaining ones must change as they do in the model that shrinks.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import keepk
from channel_resume_job import Densenet
from keepk.cut.record import record_of
from keepk.errors import KeepkError, OptimizerError
from masked import relative_error

EXAMPLE = torch.randn(4, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
IN_STEPS = keepk.Annealing(p0=0.2, n1=1, nu=0.1)


class Convnet(nn.Module):
    def __init__(self):
        super().__init__()
        # The gradient of a bias before a BatchNorm is rounding error, which Adam scales to a full step.
        self.conv1, self.norm1 = nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.fc1, self.fc2 = nn.Linear(8, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu().mean((2, 3))
        return self.fc2(self.fc1(x).relu())


def convnet(kind=Convnet):
    torch.manual_seed(0)
    return kind().double()


def conv_channels(keep=7, schedule=IN_STEPS):
    return keepk.channels("conv*", keep=keep, name="conv", schedule=schedule)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 1, 6, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (12,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def update(model, optimizers, seed):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(model, seed).backward()
    for optimizer in optimizers:
        optimizer.step()


def train(model, pruner, *optimizers, extra=1):
    """Train with two updates per epoch, to the end of the plan and for some more epochs."""
    for epoch in range(pruner.epochs + extra):
        for turn in range(2):
            update(model, optimizers, 10 * epoch + turn)
        pruner.step()


@torch.no_grad()
def answer(model):
    return model.eval()(EXAMPLE)


def left(model, name, tensor):
    """The part of a dense tensor that is left according to the model's record."""
    kept = record_of(model)["tensors"].get(name, {"kept": {}})["kept"]
    for axis, indices in kept.items():
        tensor = tensor.index_select(int(axis), torch.from_numpy(np.asarray(indices)))
    return tensor


def widths(model):
    return [model.conv1.out_channels, model.conv2.out_channels]


# Optimizers ----------------------------------------------------------------------------------------------------------


def two_optimizers(model):
    convs = [p for name, p in model.named_parameters() if name.startswith("conv")]
    others = [p for name, p in model.named_parameters() if not name.startswith("conv")]
    return torch.optim.SGD(convs, lr=0.05, momentum=0.9, weight_decay=0.01), torch.optim.AdamW(others, lr=0.01)


def two_groups(model):
    matrices, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": rest}]
    return (torch.optim.SGD(groups, lr=0.05, nesterov=True, momentum=0.5),)


LOOPS = {
    "momentum": lambda model: (sgd(model),),
    "adam foreach": lambda model: (torch.optim.Adam(model.parameters(), lr=0.01, foreach=True, amsgrad=True),),
    "adam fused": lambda model: (torch.optim.Adam(model.parameters(), lr=0.01, fused=True),),
    "rmsprop": lambda model: (torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5),),
    "two groups": two_groups,
    "two optimizers": two_optimizers,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_model_that_shrinks_trains_as_the_masked_one(name):
    """With every value of `shrink` the same channels are left, outputs are equal, and the optimizer stays in use."""
    ends = {}
    for shrink in ("each", "end", "never"):
        model = convnet()
        optimizers = LOOPS[name](model)
        spaces = [conv_channels(), keepk.weights(["conv*.weight", "fc*.weight"], keep=40, schedule=[281, 140, 80, 40])]
        pruner = keepk.Pruner(model, spaces, optimizers, example=EXAMPLE, shrink=shrink)
        train(model, pruner, *optimizers)
        assert pruner.kept == {"conv": 7, "conv*.weight+fc*.weight": 40}
        ends[shrink] = answer(model), pruner.state_dict()["channels"]["gone"], model
        held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        assert held == set(map(id, model.parameters()))
        for optimizer in optimizers:
            for parameter, state in optimizer.state.items():
                assert {v.shape for v in state.values() if torch.is_tensor(v) and v.dim()} <= {parameter.shape}
    assert sum(widths(ends["each"][2])) == sum(widths(ends["end"][2])) == 7
    assert widths(ends["never"][2]) == [6, 8]
    assert ends["each"][1] == ends["end"][1] == ends["never"][1]
    assert relative_error(ends["never"][0], ends["each"][0]) < 1e-9
    assert relative_error(ends["never"][0], ends["end"][0]) < 1e-9


def test_lbfgs_starts_its_history_anew_and_goes_on():
    model = convnet()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    pruner = keepk.Pruner(model, conv_channels(), optimizer, example=EXAMPLE)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for _ in range(pruner.epochs):
        optimizer.step(closure)
        assert optimizer.state
        pruner.step()
        assert not optimizer.state
    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert sum(widths(model)) == 7


def test_an_optimizer_with_state_per_row_is_refused_before_the_run():
    model = convnet()
    with pytest.raises(OptimizerError, match="Adafactor: keeps its second moments per row and column"):
        keepk.Pruner(model, conv_channels(), torch.optim.Adafactor(model.parameters()), example=EXAMPLE)


def test_no_optimizer_is_needed_where_nothing_trains():
    model = convnet()
    train(model, pruner := keepk.Pruner(model, conv_channels(), example=EXAMPLE))
    assert pruner.done
    assert sum(widths(model)) == 7


# Gradients, scalers, schedulers --------------------------------------------------------------------------------------


def accumulated(shrink):
    """Accumulate the gradients of two batches, one before an event and one after it."""
    model = convnet()
    optimizer = sgd(model)
    pruner = keepk.Pruner(model, conv_channels(), optimizer, example=EXAMPLE, shrink=shrink)
    for epoch in range(pruner.epochs):
        loss_of(model, epoch).backward()
        pruner.step()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        loss_of(model, 100 + epoch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return answer(model)


def test_gradients_accumulate_over_an_event():
    assert relative_error(accumulated("never"), accumulated("each")) < 1e-9


def test_a_loss_from_before_an_event_is_refused():
    model = convnet()
    pruner = keepk.Pruner(model, conv_channels(), sgd(model), example=EXAMPLE)
    loss = loss_of(model, 0)
    pruner.step()
    with pytest.raises((KeepkError, RuntimeError), match=r"Run the forward pass again|modified by an inplace"):
        loss.backward()


def scaled(shrink):
    model = convnet().float()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    pruner = keepk.Pruner(model, conv_channels(), optimizer, example=EXAMPLE.float(), shrink=shrink)
    scales = []
    for epoch in range(pruner.epochs + 1):
        for turn in range(2):
            optimizer.zero_grad()
            x = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(10 * epoch + turn))
            loss = model(x).square().mean() * (float("inf") if (epoch, turn) == (2, 0) else 1.0)
            before = [p.detach().clone() for p in model.parameters()]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            skipped = all(torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))
            assert skipped == ((epoch, turn) == (2, 0))
        pruner.step()
    return model.eval()(EXAMPLE.float()), scales, pruner.state_dict()["channels"]["gone"]


def test_a_gradient_scaler_goes_on_and_skips_what_is_infinite():
    (wanted, scales, gone), (got, same_scales, same_gone) = scaled("never"), scaled("each")
    assert scales == same_scales
    assert min(scales) < max(scales)
    assert gone == same_gone
    assert relative_error(wanted, got) < 1e-4


SCHEDULERS: dict[str, Callable[..., Any]] = {
    "one cycle": lambda optimizer: lrs.OneCycleLR(optimizer, max_lr=0.1, total_steps=20),
    "lambda": lambda optimizer: lrs.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "cosine": lambda optimizer: lrs.CosineAnnealingLR(optimizer, T_max=6),
    "plateau": lambda optimizer: lrs.ReduceLROnPlateau(optimizer, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_of_learning_rates_goes_on_through_events(name):
    rates = dict[bool, list[tuple[float, float]]]()
    for pruned in (True, False):
        model = convnet()
        optimizer = sgd(model)
        scheduler = SCHEDULERS[name](optimizer)
        pruner = keepk.Pruner(model, conv_channels(), optimizer, example=EXAMPLE)
        rates[pruned] = []
        for epoch in range(6):
            update(model, [optimizer], epoch)
            if pruned:
                pruner.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            rates[pruned].append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
    assert rates[True] == rates[False]
    assert len(set(rates[True])) > 1


# Followers -----------------------------------------------------------------------------------------------------------


def followed(shrink):
    model = convnet()
    optimizer = sgd(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    teacher = copy.deepcopy(model).requires_grad_(requires_grad=False)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    followers = [average, teacher, sums]
    pruner = keepk.Pruner(model, conv_channels(), optimizer, example=EXAMPLE, shrink=shrink, followers=followers)
    for epoch in range(pruner.epochs):
        update(model, [optimizer], epoch)
        average.update_parameters(model)
        for name, parameter in model.named_parameters():
            sums[name] += parameter.detach()
        pruner.step()
    tensors = {"average": dict(average.module.state_dict()), "teacher": dict(teacher.state_dict()), "sums": sums}
    return model, tensors, (average, teacher)


def test_averages_teachers_and_dicts_follow():
    """Each equals the remaining part of what it would be without cuts, and modules still run."""
    (_, dense, _), (model, cut, modules) = followed("never"), followed("each")
    for who in dense:
        assert dense[who].keys() == cut[who].keys()
        for name, wanted in dense[who].items():
            # The statistics of masked BatchNorm channels are still updated, but do not affect the others.
            assert relative_error(left(model, name, wanted).double(), cut[who][name].double()) < 1e-9, (who, name)
    assert all(follower(EXAMPLE).shape == (4, 3) for follower in modules)


def reading_run(use_buffers):
    model = convnet(Densenet)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    space = keepk.channels("norm*", at="input", keep=18, schedule=IN_STEPS)
    pruner = keepk.Pruner(model, space, optimizer, example=EXAMPLE, followers=[average])
    for epoch in range(pruner.epochs):
        update(model, [optimizer], epoch)
        average.update_parameters(model)
        pruner.step()
    for _ in range(20):
        average.update_parameters(model)
    return model, average


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_a_model_that_reads_selections_changes_no_selection(use_buffers):
    model, average = reading_run(use_buffers)
    chosen = record_of(model)["selections"]
    assert chosen
    for module, channels in chosen.items():
        for who in (model, average.module):
            assert who.get_submodule(module).selected_channels.tolist() == channels.tolist()


# torch.compile -------------------------------------------------------------------------------------------------------


def counting_backend(calls):
    def backend(graph, _inputs):
        calls.append(graph)
        return graph.forward

    return backend


@pytest.mark.parametrize("given", ["compiled", "plain"])
def test_a_compiled_model_is_compiled_again_after_every_event(given):
    """torch stops compiling after a few changes of shape unless its cache is reset."""
    calls, model = list[Any](), convnet()
    compiled = cast(nn.Module, torch.compile(model, backend=counting_backend(calls)))
    optimizer = sgd(model)
    schedule = [13, 12, 11, 10, 9]
    who = compiled if given == "compiled" else model
    pruner = keepk.Pruner(who, conv_channels(9, schedule), optimizer, example=EXAMPLE)
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        for epoch in range(pruner.epochs):
            update(compiled, [optimizer], epoch)
            assert len(calls) == epoch + 1
            pruner.step()
    torch._dynamo.reset()
    assert sum(widths(model)) == 9


@pytest.mark.parametrize("shrink", ["each", "never"])
def test_a_layer_that_is_compiled_for_itself_is_pruned_under_its_own_name(shrink):
    model, plain = convnet(), convnet()
    model.conv1 = torch.compile(model.conv1, backend="eager")
    for net in (model, plain):
        optimizer = sgd(net)
        spaces = [conv_channels(), keepk.weights("conv1.weight", keep=5, schedule=keepk.Cubic())]
        phases = [keepk.Phase(4, prune="conv"), keepk.Phase(3, prune="conv1.weight")]
        pruner = keepk.Pruner(net, spaces, optimizer, example=EXAMPLE, shrink=shrink, phases=phases)
        train(net, pruner, optimizer)
        assert pruner.kept == {"conv": 7, "conv1.weight": 5}
    torch._dynamo.reset()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs)


# Copies, the end, phases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Convnet, Densenet])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_in_the_midst_of_a_run_is_its_own(kind, copied):
    model = convnet(kind)
    optimizer = sgd(model)
    space = conv_channels() if kind is Convnet else keepk.channels("norm*", at="input", keep=18, schedule=IN_STEPS)
    pruner = keepk.Pruner(model, space, optimizer, example=EXAMPLE)
    update(model, [optimizer], 0)
    pruner.step()
    twin, before = copied(model), answer(model)
    assert torch.equal(answer(twin), before)
    update(twin.train(), [sgd(twin)], 1)
    assert torch.equal(answer(model), before)
    wanted = answer(twin)
    train(model.train(), pruner, optimizer, extra=0)
    assert torch.equal(answer(twin), wanted)
    if kind is Convnet:
        keepk.Pruner(twin, keepk.channels("conv*", prune=0.5), example=EXAMPLE).step()


def test_fine_tuning_after_the_end_keeps_what_is_kept():
    model = convnet()
    optimizer = sgd(model)
    spaces = [conv_channels(), keepk.weights("fc*.weight", keep=11, schedule=[50, 30, 20, 11])]
    pruner = keepk.Pruner(model, spaces, optimizer, example=EXAMPLE)
    train(model, pruner, optimizer, extra=0)
    assert pruner.done
    shapes, masks = [p.shape for p in model.parameters()], {n: m.clone() for n, m in pruner.masks.items()}
    before = answer(model)
    train(model.train(), pruner, optimizer, extra=2)
    assert [p.shape for p in model.parameters()] == shapes
    assert not torch.equal(answer(model), before)
    for name, mask in masks.items():
        assert torch.equal(pruner.masks[name], mask)
        assert not model.get_parameter(name)[~mask].any()
    assert {name: it["kept"] for name, it in pruner.certificate.items()} == {"conv": 7, "fc*.weight": 11}


@pytest.mark.parametrize("shrink", ["each", "never"])
def test_a_closed_pruner_lets_go(shrink):
    model = convnet()
    optimizer = sgd(model)
    spaces = [conv_channels(), keepk.weights("fc1.weight", keep=5, schedule=[30, 18, 10, 5])]
    with keepk.Pruner(model, spaces, optimizer, example=EXAMPLE, shrink=shrink) as pruner:
        train(model, pruner, optimizer, extra=0)
    update(model, [optimizer], 0)
    assert model.fc1.weight.count_nonzero() > 5
    with pytest.raises(KeepkError, match="Pruner: it was closed"):
        pruner.step()
    with pytest.raises(KeepkError, match="Pruner: it was closed"):
        pruner.load_state_dict(pruner.state_dict())


@pytest.mark.parametrize("shrink", ["each", "end", "never"])
def test_layers_that_are_frozen_while_channels_go_are_cut_and_not_trained(shrink):
    """The fc layers are frozen while channels of the conv layers are removed, and the other way round."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    phases = [keepk.Phase(3, prune="conv", freeze="fc*"), keepk.Phase(2, prune="fc", freeze=["conv*", "norm*"])]
    spaces = [conv_channels(schedule=keepk.Cubic()), keepk.channels("fc1", keep=4, name="fc", schedule=keepk.Cubic())]
    pruner = keepk.Pruner(model, spaces, optimizer, example=EXAMPLE, phases=phases, shrink=shrink)
    dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    for epoch in range(5):
        frozen = "fc" if epoch < 3 else ("conv", "norm")
        before = {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith(frozen)}
        moving = model.conv1.weight.detach().clone() if epoch < 3 else model.fc2.weight.detach().clone()
        update(model, [optimizer], epoch)
        assert all(torch.equal(model.get_parameter(name), value) for name, value in before.items())
        assert not torch.equal(model.conv1.weight if epoch < 3 else model.fc2.weight, moving)
        pruner.step()
        if epoch == 2:
            assert torch.equal(model.fc1.bias, dense["fc1.bias"])
            mask = pruner.masks.get("fc1.weight", torch.ones(()))
            assert torch.equal(model.fc1.weight, left(model, "fc1.weight", dense["fc1.weight"]) * mask)
    assert pruner.kept == {"conv": 7, "fc": 4}
    assert (sum(widths(model)), model.fc1.out_features) == ((14, 7) if shrink == "never" else (7, 4))
