"""The Pruner with real models: names, ties, wrappers, metrics, states, several processes."""

import copy
import gc
import io
import subprocess
import sys
from pathlib import Path
from typing import Literal, cast

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import keepk
from keepk.errors import RankError, ShrinkError, SpaceError, StateError
from strategies import mlp, train_step
from untyped import untyped

HERE = Path(__file__).parents[1] / "support"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("glob", ["*", "embed*", "head*"])
def test_tied_parameters_count_once_under_any_of_their_names(glob):
    net = Tied()
    pruner = keepk.Pruner(net, [keepk.weights(glob, keep=7, name="all")])
    assert pruner.plan == {"all": (7,)}
    pruner.step()
    assert int(net.head.weight.count_nonzero()) == 7
    assert list(pruner.masks) == ["embed.weight"]


def test_excluding_one_name_of_a_tie_excludes_it():
    with pytest.raises(keepk.errors.SpaceError, match="leaves no weight"):
        keepk.Pruner(Tied(), [keepk.weights("*", keep=7, exclude="head*")])


def test_names_are_found_through_wrappers():
    net = mlp()
    inner = nn.Sequential(cast(nn.Module, torch.compile(net[0], backend="eager")), *net[1:])
    for wrapped in (net, inner, cast(nn.Module, torch.compile(net, backend="eager")), nn.DataParallel(inner)):
        with keepk.Pruner(wrapped, [keepk.weights("*.weight", keep=7)]) as pruner:
            assert list(pruner.masks) == ["0.weight", "2.weight", "4.weight"]


def test_a_compiled_model_trains_with_masks_held():
    net = mlp()
    compiled = cast(nn.Module, torch.compile(net, backend="eager"))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1, momentum=0.9)
    pruner = keepk.Pruner(compiled, [keepk.weights("*", keep=20)], optimizer)
    for _ in range(2):
        compiled(torch.randn(8, 6)).square().mean().backward()
        optimizer.step()
        pruner.step()
    assert sum(int(parameter.count_nonzero()) for parameter in net.parameters()) <= 20


def test_without_a_loop_one_line_is_all():
    net = mlp((10, 10))
    keepk.Pruner(net, [keepk.weights("*", keep=13, schedule=keepk.OneShot())]).step()
    assert sum(int(parameter.count_nonzero()) for parameter in net.parameters()) == 13


def test_a_taylor_metric_sees_gradients():
    net = mlp((6, 4))
    net(torch.randn(8, 6)).square().mean().backward()
    expected = (net[0].weight * net[0].weight.grad).abs().detach()
    space = keepk.weights("0.weight", keep=5, metric=lambda weight: (weight * weight.grad).abs())
    pruner = keepk.Pruner(net, [space])
    pruner.step()
    mask = pruner.masks["0.weight"]
    assert expected[mask].min() >= expected[~mask].max()


def test_torchs_own_functions_are_metrics():
    net = mlp((6, 4))
    largest = net[0].weight.detach().flatten().topk(5).values.min()
    keepk.Pruner(net, [keepk.weights("0.weight", keep=5, metric=torch.sigmoid)]).step()
    assert torch.equal(net[0].weight != 0, net[0].weight >= largest)


def test_a_model_that_changes_its_dtype_is_still_held():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    pruner = keepk.Pruner(net, [keepk.weights("*.weight", keep=20, schedule=[30, 20])], optimizer)
    train_step(net, optimizer)
    pruner.step()
    net.double()
    optimizer.state.clear()
    train_step(net, optimizer)
    assert sum(int(layer.weight.count_nonzero()) for layer in (net[0], net[2], net[4])) == 30
    pruner.step()
    assert sum(int(layer.weight.count_nonzero()) for layer in (net[0], net[2], net[4])) == 20


def test_random_scores_differ_by_seed_and_parameter_and_repeat():
    def kept(seed):
        net = mlp((8, 8, 8))
        pruner = keepk.Pruner(net, [keepk.weights("*.weight", keep=64, metric=keepk.metrics.random(seed))])
        pruner.step()
        return pruner.masks

    first, again, other = kept(1), kept(1), kept(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert not torch.equal(first["0.weight"], first["2.weight"])


def test_random_wants_an_int():
    with pytest.raises(keepk.errors.RankError, match="got float"):
        keepk.metrics.random(untyped(0.5))


def test_infinite_scores_protect_weights():
    net = mlp((6, 4))
    keepk.Pruner(
        net,
        [keepk.weights("*", keep=4, metric=lambda weight: weight.abs() + (float("inf") if weight.dim() == 1 else 0))],
    ).step()
    assert net[0].bias.all()
    assert not net[0].weight.any()


def test_the_state_goes_through_torch_save_without_pickled_code():
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters())
    spaces = [keepk.weights("*", keep=9, schedule=keepk.Cubic(epochs=4))]
    pruner = keepk.Pruner(net, spaces, optimizer)
    for seed in range(2):
        train_step(net, optimizer, seed)
        pruner.step()
    buffer = io.BytesIO()
    torch.save({"pruner": pruner.state_dict(), "net": net.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)

    twin = mlp(seed=5)
    twin_optimizer = torch.optim.Adam(twin.parameters())
    resumed = keepk.Pruner(twin, spaces, twin_optimizer)
    twin.load_state_dict(saved["net"])
    twin_optimizer.load_state_dict(saved["optimizer"])
    resumed.load_state_dict(saved["pruner"])
    assert (resumed.epoch, resumed.kept) == (pruner.epoch, pruner.kept)
    for seed in range(2, 5):
        for model, trainer, each in ((net, optimizer, pruner), (twin, twin_optimizer, resumed)):
            train_step(model, trainer, seed)
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))


def test_a_state_is_not_changed_by_going_on():
    net = mlp()
    pruner = keepk.Pruner(net, [keepk.weights("*", keep=9, schedule=[40, 9])])
    pruner.step()
    state = pruner.state_dict()
    pruner.step()
    assert sum(int(mask.sum()) for mask in state["masks"].values()) == 40
    pruner.load_state_dict(state)
    assert pruner.kept == {"*": 40}
    pruner.step()
    assert pruner.kept == {"*": 9}


def test_closing_lets_go():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with keepk.Pruner(net, [keepk.weights("*.weight", keep=9)], optimizer) as pruner:
        pruner.step()
        train_step(net, optimizer)
        assert sum(int(layer.weight.count_nonzero()) for layer in (net[0], net[2], net[4])) == 9
    train_step(net, optimizer)
    assert sum(int(layer.weight.count_nonzero()) for layer in (net[0], net[2], net[4])) > 9


def test_two_processes_keep_the_same_set_and_say_who_differs():
    """Runs under torchrun with DistributedDataParallel over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(HERE / "two_processes.py")], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed on rank") == 2


@pytest.mark.parametrize("plan", [[10], [20, 10]])
def test_training_without_the_pruners_knowledge_is_refused(plan):
    """Without an optimizer nothing holds the zeros, and a certificate of weights that came back would be false."""
    torch.manual_seed(0)
    net, images = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 6)
    pruner = keepk.Pruner(net, keepk.weights("*", keep=10, schedule=plan))
    pruner.step()
    assert pruner.state_dict()["epoch"] == 1  # no training so far
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(images).square().sum().backward()
    optimizer.step()
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for act in (pruner.step, pruner.state_dict):
        with pytest.raises(StateError, match=r"pruned weights are no longer zero.*no optimizer"):
            act()
    assert pruner.epoch == 1
    assert all(map(torch.equal, before, net.parameters()))


def test_weights_that_a_cut_elsewhere_takes_below_the_plan_are_refused():
    """keepk.shrink between two events would silently undercut the plan."""
    torch.manual_seed(0)
    net, images = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    weights = keepk.Pruner(net, keepk.weights("*", keep=40, schedule=[60, 50, 40], name="some"), optimizer)
    weights.step()
    keepk.shrink(net, keepk.trace(net, images), range(6), optimizer=optimizer)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(RankError, match=r"'some': the model was cut elsewhere, which left only \d+ .* the 50 that its"):
        weights.step()
    assert weights.epoch == 1
    assert all(map(torch.equal, before, net.parameters()))


def test_a_rank_in_step_while_another_is_in_backward_ends_with_an_error():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(HERE / "two_processes.py"), "late"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed on rank") == 2


@pytest.mark.parametrize("shrink", ["each", "end", "never"])
def test_followers_are_masked_along(shrink):
    """Pruned weights are zero in the average as well, for every value of `shrink`."""
    torch.manual_seed(0)
    net, images = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    average, by_name = AveragedModel(net), {name: tensor.clone() for name, tensor in net.state_dict().items()}
    spaces = [
        keepk.channels("0", keep=4, schedule=[6, 5, 4], name="channels"),
        keepk.weights("2.weight", keep=9, schedule=[17, 14, 9], name="weights"),
    ]
    pruner = keepk.Pruner(net, spaces, optimizer, example=images, shrink=shrink, followers=[average, by_name])
    for _ in range(3):
        train_step(net, optimizer)
        average.update_parameters(net)
        pruner.step()
        masks = pruner.masks
        for tensors in (dict(average.module.named_parameters()), by_name):
            assert all(tensors[name].shape == parameter.shape for name, parameter in net.named_parameters())
            assert all((tensors[name][~mask] == 0).all() for name, mask in masks.items())
            assert all((tensors[name][mask] != 0).any() for name, mask in masks.items())


def test_a_follower_of_another_shape_is_refused():
    net = nn.Sequential(nn.Linear(6, 8))
    with pytest.raises(ShrinkError, match=r"followers\[0\]: '0.weight' has shape \(8, 5\), the model's \(8, 6\)"):
        keepk.Pruner(net, keepk.weights("*", keep=9), followers=[nn.Sequential(nn.Linear(5, 8))])


def another_shape(tensor):
    return tensor[:1].clone()


@torch.inference_mode()
def frozen_for_good(tensor):
    return tensor.clone()


@pytest.mark.parametrize("change", [another_shape, frozen_for_good])
@pytest.mark.parametrize("kind", ["weights", "channels", "masked channels"])
def test_a_follower_that_cannot_follow_stops_the_event_before_it_begins(kind, change):
    """Law 8: it is refused before the first weight changes, for every kind of space."""
    torch.manual_seed(0)
    net, images = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 6)
    by_name = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    space = keepk.weights("*", keep=9) if kind == "weights" else keepk.channels("0", keep=4)
    shrink: Literal["never", "each"] = "never" if kind == "masked channels" else "each"
    pruner = keepk.Pruner(net, space, example=images, shrink=shrink, followers=[by_name])
    by_name["2.weight"] = change(by_name["2.weight"])
    before = [tensor.clone() for tensor in (*net.parameters(), *by_name.values())]
    with pytest.raises(ShrinkError, match=r"followers\[0\]: '2.weight'"):
        pruner.step()
    assert pruner.epoch == 0
    assert all(map(torch.equal, before, (*net.parameters(), *by_name.values())))


# One Pruner at a time ------------------------------------------------------------------------------------------------

SPACES = {
    "weights": lambda: keepk.weights("0.*", keep=20, schedule=[30, 20], name="first weights"),
    "other weights": lambda: keepk.weights("4.*", keep=10, schedule=[20, 10], name="last weights"),
    "channels": lambda: keepk.channels("0", keep=5, schedule=[6, 5], name="first channels"),
    "other channels": lambda: keepk.channels("2", keep=5, schedule=[6, 5], name="last channels"),
}


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("second", SPACES)
@pytest.mark.parametrize("first", SPACES)
def test_a_second_pruner_is_refused_until_the_first_is_closed(first, second, trained):
    net, example = three_layers(), torch.randn(3, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) if trained else None
    space = SPACES[first]()
    pruner = keepk.Pruner(net, space, optimizer, example=example)
    before = copy.deepcopy(net.state_dict())
    for events, where in ((0, "at epoch 0 of 2"), (1, "at epoch 1 of 2")):
        for _ in range(events):
            pruner.step()
            before = copy.deepcopy(net.state_dict())
        words = rf"Pruner: the model already has one, with space '{space.name}', {where}; .* with pruner.close"
        with pytest.raises(SpaceError, match=words):
            keepk.Pruner(net, SPACES[second](), optimizer, example=example)
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    keepk.Pruner(three_layers(), SPACES[second](), example=example)  # a different model
    pruner.close()
    again = keepk.Pruner(net, SPACES[second](), optimizer, example=example)
    again.step()
    assert again.epoch == 1


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("first", SPACES)
def test_a_second_pruner_of_a_model_around_the_first_one_is_refused(first, trained):
    net, example = three_layers(), torch.randn(3, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) if trained else None
    pruner = keepk.Pruner(net, SPACES[first](), optimizer, example=example)
    for _ in range(2):
        before = copy.deepcopy(net.state_dict())
        with pytest.raises(SpaceError, match="the model already has one"):
            keepk.Pruner(nn.Sequential(net), keepk.weights("*", keep=5), optimizer)
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        pruner.step()


@pytest.mark.parametrize("kind", SPACES)
def test_a_pruner_that_nobody_refers_to_is_forgotten(kind):
    net, example = three_layers(), torch.randn(3, 8)
    keepk.Pruner(net, SPACES[kind](), example=example).step()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    first = keepk.Pruner(net, SPACES["other weights"](), optimizer)
    del first
    with pytest.raises(
        SpaceError, match="If no variable refers to it any more, its optimizer still does: delete that too"
    ):
        keepk.Pruner(net, SPACES["other weights"](), torch.optim.SGD(net.parameters(), lr=0.1))
    del optimizer
    gc.collect()
    keepk.Pruner(net, SPACES["other weights"](), torch.optim.SGD(net.parameters(), lr=0.1))


def test_a_pruner_that_has_cut_its_last_channel_holds_nothing_and_is_not_in_the_way():
    """Pruning in rounds uses a new Pruner for each round."""
    net, example = three_layers(), torch.randn(3, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for keep in (12, 8):
        pruner = keepk.Pruner(net, keepk.channels("0", keep=keep), optimizer, example=example)
        pruner.step()
        assert net[0].out_features == keep
    masks = keepk.Pruner(net, keepk.weights("4.weight", keep=9), optimizer)
    masks.step()
    with pytest.raises(SpaceError, match=r"with space '4\.weight', at the end of its plan; each of the two would"):
        keepk.Pruner(net, keepk.channels("0", keep=4), optimizer, example=example)


# Optimizers that are attached later


def updated(net, optimizer, rows):
    optimizer.zero_grad()
    net(rows).square().mean().backward()
    optimizer.step()


def test_an_attached_optimizer_is_the_same_as_one_that_was_passed():
    def run(attach_after):
        torch.manual_seed(0)
        net = mlp()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
        spaces = [keepk.channels("0", keep=3, schedule=[4, 3]), keepk.weights("4.weight", keep=4, schedule=[6, 4])]
        given = optimizer if attach_after is None else ()
        pruner = keepk.Pruner(net, spaces, given, example=torch.randn(2, net[0].in_features))
        for number, rows in enumerate(torch.randn(4, 5, net[0].in_features)):
            if number == attach_after:
                pruner.attach(optimizer)
            if attach_after is None or number >= attach_after:
                updated(net, optimizer, rows)
            pruner.step()
            assert int(net[4].weight.count_nonzero()) == pruner.kept["4.weight"]
        return net, optimizer

    passed, attached = run(None), run(0)
    for mine, theirs in zip(attached[0].parameters(), passed[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert all(torch.equal(attached[1].state[mine][key], it) for key, it in passed[1].state[theirs].items())
    run(1)  # between two events, when weights are masked already


def test_an_attached_optimizer_keeps_its_state_until_the_next_event():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    updated(net, optimizer, torch.randn(5, net[0].in_features))
    pruner = keepk.Pruner(net, keepk.weights("0.weight", keep=3, schedule=[9, 3]), ())
    pruner.step()
    before = optimizer.state[net[0].weight]["momentum_buffer"].clone()
    pruner.attach([optimizer])
    assert torch.equal(optimizer.state[net[0].weight]["momentum_buffer"], before)
    updated(net, optimizer, torch.randn(5, net[0].in_features))
    assert int(net[0].weight.count_nonzero()) <= 9
    pruner.step()
    assert int(optimizer.state[net[0].weight]["momentum_buffer"].count_nonzero()) <= 3
    pruner.close()
    assert not optimizer._optimizer_step_post_hooks
    with pytest.raises(keepk.errors.KeepkError, match="closed"):
        pruner.attach(optimizer)


@pytest.mark.parametrize("bad", [None, 3, torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)])
def test_what_is_no_optimizer_of_the_model_is_not_attached(bad):
    net = mlp()
    pruner, good = keepk.Pruner(net, keepk.weights("*", keep=3)), torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(keepk.errors.OptimizerError):
        pruner.attach([good, bad] if bad is not None else untyped(None))
    assert not good._optimizer_step_post_hooks


def test_a_phase_that_freezes_needs_an_optimizer_by_the_first_event():
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def make():
        phases = [keepk.Phase(epochs=2, prune=["0.weight"], freeze=["4.*"])]
        return keepk.Pruner(net, keepk.weights("0.weight", keep=3, schedule=[4, 3]), (), phases=phases)

    with make() as pruner, pytest.raises(keepk.errors.PlanError, match=r"attach\(optimizer\)"):
        pruner.step()
    before = net[4].weight.clone()
    with make() as pruner:
        pruner.attach(optimizer)
        updated(net, optimizer, torch.randn(5, net[0].in_features))
        pruner.step()
    assert torch.equal(before, net[4].weight)
