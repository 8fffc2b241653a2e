"""Statistics of activations, and the metrics that read them: `activation` for channels and `wanda` for weights.

The oracles compute the inputs of the reading layers with the layers themselves, and add up values in loops.
"""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import keepk
from keepk.errors import RankError, SpaceError, StateError
from keepk.metrics.inputs import InputSums
from untyped import untyped

KINDS = ("mean", "l2", "apoz")


class Convnet(nn.Module):
    """Convolutions with BatchNorm, the second one grouped, then a transposed one without BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 6, 3, groups=2)
        self.up = nn.ConvTranspose2d(6, 4, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.inputs(x)["up"][0].relu().mean((2, 3)))

    def inputs(self, x):
        """By layer, the inputs of the layers that read its channels, channels in dim 1; for "up" its own output."""
        first = self.norm(self.first(x)).relu()
        grouped = self.grouped(first).relu()
        return {"first": [first], "grouped": [grouped], "up": [self.up(grouped)]}

    def read(self, x):
        found = self.inputs(x)
        return {**found, "up": [found["up"][0].relu().mean((2, 3))]}


class Flattened(nn.Module):
    """A channel is several features of the linear layer behind the flatten."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv2d(3, 5, 3), nn.Linear(5 * 9, 7), nn.Linear(7, 3)

    def pooled(self, x):
        return nn.functional.max_pool2d(self.conv(x).relu(), 2)

    def forward(self, x):
        return self.head(self.fc(self.pooled(x).flatten(1)).relu())

    def read(self, x):
        return {"conv": [self.pooled(x)], "fc": [self.fc(self.pooled(x).flatten(1)).relu()]}


class Residual(nn.Module):
    """The stream has two readers, which see it after different operations."""

    def __init__(self):
        super().__init__()
        self.first, self.bn1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.bn2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.read(x)["first"][1])

    def read(self, x):
        stream = self.bn1(self.first(x))
        return {"first": [torch.relu(stream), (stream + self.bn2(self.second(torch.relu(stream)))).mean((2, 3))]}


class Attention(nn.Module):
    """Four heads of two features each."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.heads = 4

    def attended(self, x):
        q, k, v = (it(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for it in (self.q, self.k, self.v))
        return nn.functional.scaled_dot_product_attention(q, k, v)

    def forward(self, x):
        return self.out(self.attended(x).transpose(1, 2).flatten(2))

    def read(self, x):
        return {"q": [self.attended(x)]}


class Normed(nn.Module):
    """The reader has weight norm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 7)
        self.second = nn.utils.parametrizations.weight_norm(nn.Linear(7, 3), dim=1)

    def forward(self, x):
        return self.second(self.first(x).tanh())

    def read(self, x):
        return {"first": [self.first(x).tanh()]}


def made(kind, **options):
    torch.manual_seed(0)
    return kind(**options)


torch.manual_seed(1)
PICTURES, ROWS, TOKENS = torch.randn(3, 4, 3, 8, 8), torch.randn(3, 6, 10), torch.randn(3, 2, 5, 6)
NETWORKS = {
    "convnet": (Convnet, PICTURES, 9),
    "flattened": (Flattened, PICTURES, 6),
    "residual": (Residual, PICTURES, 3),
    "attention": (Attention, TOKENS, 2),
    "normed": (Normed, ROWS, 4),
}


def plain_scores(net, batches, kind):
    """By layer and channel, the score by its definition."""
    net = copy.deepcopy(net)  # the passes of a copy are not counted
    scores = dict[str, dict[int, float]]()
    values = dict[tuple[str, int, int], list[float]]()  # by layer, reader and channel
    with torch.no_grad():
        for batch in batches:
            for layer, readers in net.read(batch).items():
                for reader, inputs in enumerate(readers):
                    for channel in range(inputs.shape[1]):
                        values.setdefault((layer, reader, channel), []).extend(inputs[:, channel].flatten().tolist())
    by_channel = dict[tuple[str, int], list[float]]()
    for (layer, _, channel), found in values.items():
        total = 0.0
        for value in found:
            total += {"mean": abs(value), "l2": value**2, "apoz": float(value != 0)}[kind]
        by_channel.setdefault((layer, channel), []).append(total / len(found))
    for (layer, channel), means in by_channel.items():
        mean = sum(means) / len(means)
        scores.setdefault(layer, {})[channel] = math.sqrt(mean) if kind == "l2" else mean
    return {layer: [found[channel] for channel in sorted(found)] for layer, found in scores.items()}


def run(net, example, *, keep, kind="mean", seen=None, **options):
    seen = seen or keepk.Statistics(net, of=("activations",))
    space = keepk.channels("*", keep=keep, metric=keepk.metrics.activation(seen, kind=kind), name="c", **options)
    return seen, keepk.Pruner(net, space, example=example)


def layers_of(pruner):
    return pruner._session.channels.layers("c")


def scores_of(pruner, seen, kind):
    metric = keepk.metrics.activation(seen, kind=kind)
    return {layer.name: metric(layer).tolist() for layer in layers_of(pruner)}


def test_the_activation_of_a_channel_is_what_a_loop_computes():
    exercised = 0
    for make, batches, keep in NETWORKS.values():
        for kind in KINDS:
            for at in ("output", "input"):
                net = made(make).eval()
                seen, pruner = run(net, batches[0], keep=keep, kind=kind, at=at)
                with torch.no_grad():
                    for batch in batches:
                        net(batch)
                got, wanted = scores_of(pruner, seen, kind), plain_scores(net, batches, kind)
                assert got.keys() == wanted.keys()
                for layer, scores in got.items():
                    assert scores == pytest.approx(wanted[layer], rel=1e-5)
                    exercised += len(scores)
                assert seen.batches == len(batches)
                pruner.step()
                assert (pruner.kept, seen.batches) == ({"c": keep}, 0)
    assert exercised == 2 * 3 * (18 + 12 + 6 + 4 + 7)


class Dense(nn.Module):
    """Two BatchNorms read the first convolution: one alone, one as part of a concatenation."""

    def __init__(self):
        super().__init__()
        self.first, self.norm1, self.second = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=1)
        self.norm2, self.third, self.head = nn.BatchNorm2d(7), nn.Conv2d(7, 5, 3), nn.Linear(5, 2)

    def forward(self, x):
        return self.head(self.third(self.read(x)["norm2"]).relu().mean((2, 3)))

    def read(self, x):
        first = self.first(x)
        one = self.norm1(first).relu()
        return {"norm1": one, "norm2": self.norm2(torch.cat([first, self.second(one)], 1)).relu()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_reads_of_a_batchnorm_are_separate_units(kind):
    """A channel counts once for each BatchNorm that reads it, with the activation that this BatchNorm makes of it."""
    net = made(Dense).eval()
    seen = keepk.Statistics(net)
    metric = keepk.metrics.activation(seen, kind=kind)
    space = keepk.channels(["norm1", "norm2"], keep=6, metric=metric, name="c", at="input")
    pruner = keepk.Pruner(net, space, example=PICTURES[0])
    with torch.no_grad():
        for batch in PICTURES:
            net(batch)
        twin = copy.deepcopy(net)
        read = {name: torch.cat([twin.read(it)[name] for it in PICTURES]) for name in ("norm1", "norm2")}
    means = {
        "mean": lambda x: x.abs().mean((0, 2, 3)),
        "l2": lambda x: x.square().mean((0, 2, 3)).sqrt(),
        "apoz": lambda x: (x != 0).double().mean((0, 2, 3)),
    }[kind]
    wanted = sorted(float(it) for inputs in read.values() for it in means(inputs))
    got = sorted(it for layer in layers_of(pruner) for it in metric(layer).tolist())
    assert got == pytest.approx(wanted, rel=1e-5)
    assert len(got) == 11
    pruner.step()
    assert pruner.kept == {"c": 6}


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_active_channels_go(kind):
    net = made(Flattened)
    seen, pruner = run(net, PICTURES[0], keep=7, kind=kind)
    for batch in PICTURES:
        net(batch)
    metric = keepk.metrics.activation(seen, kind=kind)
    scores = {u: s for it in layers_of(pruner) for u, s in zip(it.units.tolist(), metric(it).tolist(), strict=True)}
    best = sorted(scores, key=lambda unit: (-scores[unit], unit))[:7]
    pruner.step()
    assert sorted(best) == [unit for layer in layers_of(pruner) for unit in layer.units.tolist()]


def test_train_and_eval_mode_with_and_without_gradients_all_count():
    net = made(Convnet)
    seen, pruner = run(net, PICTURES[0], keep=9)
    with torch.no_grad():
        net.eval()(PICTURES[0])
    with torch.inference_mode():
        net(PICTURES[1])
    net(PICTURES[2]).sum().backward()
    got = scores_of(pruner, seen, "mean")["grouped"]
    assert seen.batches == 3
    assert got == pytest.approx(plain_scores(net, PICTURES, "mean")["grouped"], rel=1e-5)
    net.train()(PICTURES[0]).sum().backward()  # the BatchNorm normalises by the batch now
    assert scores_of(pruner, seen, "mean")["grouped"] != pytest.approx(got, rel=1e-5)
    seen.update()  # needs no gradients, and counts nothing
    assert seen.batches == 4


def test_outputs_are_bit_equal_and_nothing_in_the_model_changes():
    net = made(Convnet)
    twin = copy.deepcopy(net)
    seen, _ = run(net, PICTURES[0], keep=9)
    for mode in (True, False):
        for it in (net, twin):
            it.train(mode)
        ours, theirs = net(PICTURES[0]), twin(PICTURES[0])
        assert torch.equal(ours, theirs)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert list(net.state_dict()) == list(twin.state_dict())
    assert all(torch.equal(value, twin.state_dict()[key]) for key, value in net.state_dict().items())
    assert seen.batches == 2


def hooks_of(net):
    return [hook for module in net.modules() for hook in module._forward_pre_hooks.values()]


@pytest.mark.parametrize("how", ["close", "with", "pruner", "end", "lost"])
def test_hooks_exist_only_while_activations_are_collected(how):
    net = made(Flattened)
    seen = keepk.Statistics(net)
    assert not hooks_of(net)
    seen, pruner = run(net, PICTURES[0], keep=6, seen=seen)
    assert len(hooks_of(net)) == 2
    net(PICTURES[0])
    if how == "close":
        seen.close()
    elif how == "with":
        with seen:
            net(PICTURES[1])
    elif how == "pruner":
        pruner.close()
    elif how == "end":
        pruner.step()
    else:
        del seen, pruner
    assert not hooks_of(net)
    if how in ("close", "with"):
        pruner.step()  # what was collected can still be read, and an event does not bring the hooks back
        assert pruner.kept == {"c": 6}
        assert not hooks_of(net)


def test_metrics_of_gradients_need_no_hooks():
    net = made(Convnet)
    seen = keepk.Statistics(net)
    keepk.Pruner(net, keepk.channels("*", keep=9, metric=keepk.metrics.fisher(seen)), example=PICTURES[0])
    assert not hooks_of(net)


def test_copies_of_the_model_do_not_count():
    net = made(Flattened)
    seen, pruner = run(net, PICTURES[0], keep=6)
    average = AveragedModel(net)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for twin in (copy.deepcopy(net), average, torch.load(file, weights_only=False)):
        twin(PICTURES[0])
        assert not any(isinstance(hook, InputSums) for hook in hooks_of(twin))
    assert seen.batches == 0
    with seen.paused():
        net(PICTURES[0])
    assert seen.batches == 0
    net(PICTURES[0])
    assert seen.batches == 1
    pruner.step()  # it replays the cut on copies, which have no data


def test_recomputed_activations_count_once():
    net = made(Flattened)
    seen, _ = run(net, PICTURES[0], keep=6)
    checkpoint(net, PICTURES[0].requires_grad_(), use_reentrant=False).sum().backward()
    PICTURES.requires_grad_(False)
    assert seen.batches == 1


def test_a_compiled_model_is_counted():
    net = made(Flattened).eval()
    seen, pruner = run(net, PICTURES[0], keep=6)
    compiled = torch.compile(net, backend="eager")
    with torch.no_grad():
        for batch in PICTURES:
            compiled(batch)
    for layer, scores in scores_of(pruner, seen, "mean").items():
        assert scores == pytest.approx(plain_scores(net, PICTURES, "mean")[layer], rel=1e-5)


def test_half_precision_does_not_overflow():
    net = nn.Sequential(nn.Linear(10, 4), nn.ReLU(), nn.Linear(4, 2)).half()
    seen, pruner = run(net, ROWS[0].half(), keep=2, kind="l2")
    net(ROWS[0].half() * 1000)
    with torch.no_grad():
        inputs = copy.deepcopy(net)[:2](ROWS[0].half() * 1000).double()
    assert inputs.max() > 300  # whose square is not a float16
    assert scores_of(pruner, seen, "l2")["0"] == pytest.approx(inputs.square().mean(0).sqrt().tolist(), rel=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        net(ROWS[0].half())
    assert seen.batches == 2


@pytest.mark.parametrize("size", [3e37, 1e25, 1.0, 1e-25, 1e-38])
def test_squares_neither_overflow_nor_vanish(size):
    """Features of very different sizes, in float32; each is scaled by itself."""
    sizes = torch.tensor([1.0, size, size, 0.0])
    net = nn.Sequential(nn.Linear(10, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    for kind in KINDS:
        seen, pruner = run(net, ROWS[0], keep=2, kind=kind)
        with torch.no_grad(), pruner:
            inputs = ROWS[0].abs()[:, :4] * sizes
            net[2](inputs)
            assert seen.batches == 1
            means = {"mean": inputs.double().mean(0), "l2": inputs.double().square().mean(0).sqrt()}
            wanted = means.get(kind, inputs.ne(0).double().mean(0))
            assert scores_of(pruner, seen, kind)["0"] == pytest.approx(wanted.tolist(), rel=1e-6, abs=0)
            net[2](inputs[:0])  # of no rows: counted, and nothing is added
            assert scores_of(pruner, seen, kind)["0"] == pytest.approx(wanted.tolist(), rel=1e-6, abs=0)


def test_a_pass_with_nan_is_not_counted():
    for kind in KINDS:
        net = made(Flattened)
        seen, pruner = run(net, PICTURES[0], keep=6, kind=kind)
        bad = PICTURES[0].clone()
        bad[0, 0, 0, 0] = math.nan
        net(bad)
        with pytest.raises(RankError, match=r"the input of 'fc' was NaN or infinite in all 1 forward passes .* the 5"):
            pruner.step()
        net(PICTURES[0])
        wanted = plain_scores(net, PICTURES[:1], kind)
        assert scores_of(pruner, seen, kind)["conv"] == pytest.approx(wanted["conv"], rel=1e-5)


def test_without_data_an_event_is_refused_and_nothing_changes():
    net = made(Flattened)
    seen, pruner = run(net, PICTURES[0], keep=6)
    match = r"no forward pass since the last event, 0 in all, so the 5 channels of 'conv' .* torch.no_grad\(\)"
    with pytest.raises(RankError, match=match):
        pruner.step()
    assert (pruner.epoch, pruner.kept) == (0, {"c": 12})
    net(PICTURES[0])
    seen.reset()
    with pytest.raises(RankError, match=match):
        pruner.step()
    net.pooled(PICTURES[0])
    net.head(torch.randn(2, 7))
    with pytest.raises(RankError, match=r"'fc' was called in none of the 1 forward passes .* exclude="):
        pruner.step()
    net(PICTURES[0])
    pruner.step()
    assert pruner.kept == {"c": 6}


@pytest.mark.parametrize("shrink", ["each", "end", "never"])
def test_it_follows_the_network_down(shrink):
    net = made(Convnet)
    seen = keepk.Statistics(net)
    metric = keepk.metrics.activation(seen, kind="l2")
    space = keepk.channels("*", keep=6, metric=metric, name="c", schedule=[14, 10, 6])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    pruner = keepk.Pruner(net, space, optimizer, example=PICTURES[0], shrink=shrink)
    for left in (14, 10, 6):
        for batch in PICTURES:
            optimizer.zero_grad()
            net(batch).square().mean().backward()
            seen.update()
            optimizer.step()
        assert seen.batches == len(PICTURES)
        pruner.step()
        assert (pruner.kept, seen.batches) == ({"c": left}, 0)
    net(PICTURES[0])
    assert seen.batches == 0  # the plan has ended


def test_a_cut_elsewhere_starts_over():
    net = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    seen, pruner = run(net, ROWS[0], keep=10, schedule=[14, 10])
    net(ROWS[0])
    with torch.no_grad():
        net.get_parameter("0.weight")[2] = 0
        net.get_parameter("0.bias")[2] = 0
    keepk.compact(net, ROWS[0])
    net(ROWS[0])  # not counted: the Pruner does not know the new widths yet
    assert pruner.kept == {"c": 15}
    assert seen.batches == 0
    net(ROWS[0])
    assert seen.batches == 1


def test_two_kinds_a_blend_and_weights_read_the_same_statistics():
    net = made(Convnet)
    seen = keepk.Statistics(net)
    alive, size = keepk.metrics.activation(seen, kind="apoz"), keepk.metrics.activation(seen, kind="l2")
    spaces = [
        keepk.channels("first", keep=4, metric=keepk.metrics.blend(0.5, scale=alive, weights=size), name="a"),
        keepk.channels("grouped", keep=4, metric=size, name="b"),
        keepk.weights("grouped.weight", keep=20, metric=keepk.metrics.wanda(seen), name="w"),
        keepk.weights("head.weight", keep=5, metric=keepk.metrics.fisher(seen), name="f"),
    ]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    pruner = keepk.Pruner(net, spaces, optimizer, example=PICTURES[0])
    net(PICTURES[0]).square().mean().backward()
    seen.update()
    pruner.step()
    assert pruner.kept == {"a": 4, "b": 4, "w": 20, "f": 5}


# Wanda ---------------------------------------------------------------------------------------------------------------


def plain_wanda(weight, inputs, axis=1, groups=1):
    """|w| times the norm of its input feature, one weight at a time; `inputs` has the features in dim 1."""
    scores = torch.zeros_like(weight)
    rows = weight.shape[0] // groups
    for place in torch.cartesian_prod(*(torch.arange(size) for size in weight.shape)).tolist():
        feature = place[axis] + (place[0] // rows * weight.shape[1] if groups > 1 else 0)
        norm = math.sqrt(sum(value**2 for batch in inputs for value in batch[:, feature].flatten().tolist()))
        scores[tuple(place)] = abs(float(weight[tuple(place)])) * norm
    return scores


def test_wanda_is_what_a_loop_computes():
    net = made(Convnet).eval()
    seen = keepk.Statistics(net, of=("activations",))
    space = keepk.weights("*.weight", exclude="norm*", keep=200, metric=keepk.metrics.wanda(seen), name="w")
    pruner = keepk.Pruner(net, space)
    with torch.no_grad():
        for batch in PICTURES:
            net(batch)
        twin = copy.deepcopy(net)
        found = [twin.read(batch) for batch in PICTURES]
        inputs = {
            "first.weight": [*PICTURES],
            "grouped.weight": [it["first"][0] for it in found],
            "up.weight": [it["grouped"][0] for it in found],
            "head.weight": [it["up"][0] for it in found],
        }
        wanted = {}
        for name, batches in inputs.items():
            weight = net.get_parameter(name)
            groups = 2 if name == "grouped.weight" else 1
            wanted[name] = plain_wanda(weight.detach(), batches, axis=0 if name == "up.weight" else 1, groups=groups)
            got = keepk.metrics.wanda(seen)(weight.detach(), name=name)
            torch.testing.assert_close(got.float(), wanted[name], rtol=1e-4, atol=1e-6)
    pruner.step()
    best = torch.cat([it.flatten() for it in wanted.values()]).sort(descending=True).values[199]
    kept = sum(int((scores >= best).sum()) for scores in wanted.values())
    assert (pruner.kept, kept) == ({"w": 200}, 200)
    for name, scores in wanted.items():
        assert torch.equal(pruner.masks[name], scores >= best)


def test_wanda_of_tokens_and_of_a_tied_weight():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
            self.other.weight = self.one.weight

        def forward(self, x):
            return self.other(self.one(x).relu())

    net = made(Tied)
    seen = keepk.Statistics(net)
    pruner = keepk.Pruner(net, keepk.weights("one.weight", keep=5, metric=keepk.metrics.wanda(seen)))
    with torch.no_grad():
        net(TOKENS[0])
        rows = TOKENS[0].flatten(0, 1)
        wanted = plain_wanda(net.one.weight.detach(), [rows, copy.deepcopy(net).one(rows).relu()])
    got = keepk.metrics.wanda(seen)(net.one.weight.detach(), name="one.weight")
    torch.testing.assert_close(got.float(), wanted, rtol=1e-4, atol=1e-6)
    pruner.step()
    assert pruner.kept == {"one.weight": 5}


def test_wanda_refuses_weights_without_an_input():
    net = made(Convnet)
    seen = keepk.Statistics(net)
    for glob, name, shape in (("head*", "head.bias", r"\(3,\)"), ("norm.weight", "norm.weight", r"\(8,\)")):
        with pytest.raises(RankError, match=f"'{name}' of shape {shape} is not the weight of an nn.Linear"):
            keepk.Pruner(net, keepk.weights(glob, keep=3, metric=keepk.metrics.wanda(seen)))
    pruner = keepk.Pruner(net, keepk.weights("head.weight", keep=3, metric=keepk.metrics.wanda(seen)))
    with pytest.raises(RankError, match=r"no forward pass .* so the 12 weights of 'head.weight' cannot be ranked"):
        pruner.step()
    with pytest.raises(RankError, match=r"has no data for parameter 'up.weight'. Use wanda\(statistics\)"):
        keepk.metrics.wanda(seen)(net.up.weight.detach(), name="up.weight")


# Refusals and states -------------------------------------------------------------------------------------------------


def test_heads_that_no_hook_can_see_are_refused_before_training():
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 4, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0])

    with pytest.raises(RankError, match=r"channels of 'attention\S*' are read by 'attention.out_proj.weight', and act"):
        run(made(Attends), torch.randn(2, 5, 8), keep=2)


def test_wrong_uses_are_refused():
    net = made(Flattened)
    seen = keepk.Statistics(net, of=("activations",))
    for kind in ("max", None, 3):
        with pytest.raises(RankError, match=r'activation\(kind=.*: unknown. Pass "mean", "l2" or "apoz"'):
            keepk.metrics.activation(seen, kind=untyped(kind))
    with pytest.raises(
        RankError, match=r"taylor\(statistics\): it needs gradients, and the statistics are only of act"
    ):
        keepk.metrics.taylor(seen)
    with pytest.raises(RankError, match=r"Make them with keepk.Statistics\(model, of=\('activations', 'gradients'\)\)"):
        keepk.metrics.fisher(seen)
    gradients = keepk.Statistics(net, of=("gradients",))
    for factory in (keepk.metrics.activation, keepk.metrics.wanda):
        with pytest.raises(RankError, match="it needs activations, and the statistics are only of gradients"):
            factory(gradients)
        with pytest.raises(RankError, match=r"\(statistics=3\): got int. Make it with keepk.Statistics\(model\)"):
            factory(untyped(3))
    with pytest.raises(SpaceError, match=r'Call it: keepk.metrics.activation\(statistics, kind="mean"\)'):
        keepk.Pruner(net, keepk.channels("*", keep=6, metric=keepk.metrics.activation), example=PICTURES[0])
    with pytest.raises(SpaceError, match="metric activation ranks channels, not weights"):
        keepk.Pruner(net, keepk.weights("*", keep=6, metric=keepk.metrics.activation(seen)))
    with pytest.raises(SpaceError, match="metric Wanda ranks weights, not channels"):
        keepk.Pruner(net, keepk.channels("*", keep=6, metric=keepk.metrics.wanda(seen)), example=PICTURES[0])
    with pytest.raises(SpaceError, match="reads the statistics of another model"):
        run(net, PICTURES[0], keep=6, seen=keepk.Statistics(made(Flattened)))


def test_a_pruner_that_is_refused_leaves_no_hooks():
    net = made(Convnet)
    seen, other = keepk.Statistics(net), keepk.Statistics(net)
    spaces = [
        keepk.channels("first", keep=4, metric=keepk.metrics.activation(seen)),
        keepk.weights("head.*", keep=3, metric=keepk.metrics.wanda(other)),
    ]
    with pytest.raises(RankError, match=r"'head.bias' of shape \(3,\) is not the weight"):
        keepk.Pruner(net, spaces, example=PICTURES[0])
    assert not hooks_of(net)


def test_a_checkpoint_keeps_the_state(tmp_path):
    def started():
        net = made(Flattened)
        seen = keepk.Statistics(net)
        spaces = [
            keepk.channels("*", keep=6, metric=keepk.metrics.activation(seen), name="c"),
            keepk.weights("head.weight", keep=3, metric=keepk.metrics.fisher(seen), name="w"),
        ]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return net, seen, optimizer, keepk.Pruner(net, spaces, optimizer, example=PICTURES[0])

    net, seen, optimizer, pruner = started()
    net(PICTURES[0]).square().mean().backward()
    seen.update()
    extra = {"statistics": seen.state_dict()}
    keepk.save_checkpoint(tmp_path, model=net, optimizer=optimizer, pruner=pruner, extra=extra)
    again, other, its_optimizer, second = started()
    found = keepk.load_checkpoint(tmp_path, model=again, optimizer=its_optimizer, pruner=second)
    other.load_state_dict(found["statistics"])
    assert (other.batches, scores_of(second, other, "mean")) == (1, scores_of(pruner, seen, "mean"))


def test_within_an_epoch_a_state_goes_on():
    def started():
        net = made(Convnet).eval()
        seen = keepk.Statistics(net)
        spaces = [
            keepk.channels("*", keep=9, metric=keepk.metrics.activation(seen), name="c", schedule=[14, 9]),
            keepk.weights("head.weight", keep=3, metric=keepk.metrics.wanda(seen), name="w", schedule=[6, 3]),
        ]
        return net, seen, keepk.Pruner(net, spaces, example=PICTURES[0])

    net, seen, pruner = started()
    net(PICTURES[0])
    pruner.step()
    net(PICTURES[1])
    state = copy.deepcopy([net.state_dict(), pruner.state_dict(), seen.state_dict()])
    net(PICTURES[2])
    pruner.step()

    again, other, second = started()
    with pytest.raises(StateError, match=r"inputs of 3 layers, and the metrics read those of 0 and 3, or they differ"):
        other.load_state_dict(state[2])
    second.load_state_dict(state[1])
    again.load_state_dict(state[0])
    other.load_state_dict(state[2])
    assert other.batches == 1
    again(PICTURES[2])
    second.step()
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in again.state_dict().items())
    old = {key: state[2][key] for key in ("units", "batches", "with_gradient", "sums")}
    with pytest.raises(StateError, match="squared gradients of 0 parameters and inputs of 0 layers"):
        other.load_state_dict({**old, "version": 1})
