"""With `round_to="auto"` every layer keeps a multiple of a number of its own, the same in every resume."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import keepk
from keepk.errors import SpaceError, StateError
from keepk.model.costs import model_costs
from saved_models import looks, unchanged
from untyped import untyped

L2 = keepk.metrics.l2
pytestmark = pytest.mark.filterwarnings("ignore:space .* are tied at the cut:keepk.KeepkWarning")


def convnet(dtype=torch.float32):
    """Layers of 64, 100, 24 and 6 channels."""
    torch.manual_seed(0)
    widths, layers = (3, 64, 100, 24, 6), list[nn.Module]()
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)).to(dtype)


def pictures(dtype=torch.float32):
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(dtype)


def widths_of(model):
    return [it.out_channels for it in model.modules() if isinstance(it, nn.Conv2d)]


def made(dtype=torch.float32, **options):
    space = keepk.channels("*", name="all", **{"macs": 0.5, "round_to": "auto", "metric": L2, **options})
    return keepk.Pruner(convnet(dtype), space, example=pictures(dtype))


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [
        (torch.float32, [16, 16, 4, 1]),
        (torch.float64, [8, 8, 4, 1]),
        (torch.bfloat16, [16, 16, 4, 1]),  # 32 would leave the layers of 64 and 100 with two and three widths
    ],
)
@pytest.mark.parametrize("share", [0.7, 0.5, 0.2])
def test_widths_are_multiples_within_the_budget(dtype, steps, share):
    pruner = made(dtype, macs=share, schedule=keepk.Cubic(3))
    assert list(pruner.round_to["all"].values()) == steps
    before = widths_of(pruner.model)
    for bound in pruner.plan["all"]:
        pruner.step()
        assert model_costs(pruner.model, pruner.example).macs <= bound
        for step, dense, width in zip(steps, before, widths_of(pruner.model), strict=True):
            assert width == dense or width % step == 0
            assert 0 < width <= dense
    assert widths_of(pruner.model) != before


def test_it_is_the_set_that_the_numbers_by_hand_give():
    """With one number for all layers, it removes what `round_to=16` removes."""

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 4))

    states = []
    for number in ("auto", 16):
        model = net()
        space = keepk.channels("*", macs=0.4, round_to=untyped(number), metric=L2)
        keepk.Pruner(model, space, example=torch.zeros(2, 8)).step()
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert states[0]["0.weight"].shape[0] < 64 or states[0]["2.weight"].shape[0] < 96


def test_heads_keep_their_width_and_any_number():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(72, 6, 144, batch_first=True)  # heads of 12
    spaces = [keepk.channels(it, round_to="auto", metric=L2, name=it) for it in ("self_attn*", "linear1")]
    pruner = keepk.Pruner(model, spaces, example=torch.randn(2, 5, 72), macs=0.6)
    assert [list(it.values()) for it in pruner.round_to.values()] == [[1], [16]]
    pruner.step()
    assert model.linear1.out_features % 16 == 0
    assert model.self_attn.head_dim == 12
    assert model.self_attn.num_heads < 6


def test_cells_of_an_lstm_are_rounded():
    torch.manual_seed(0)
    pruner = keepk.Pruner(
        nn.Sequential(Last(), nn.Linear(64, 2)),
        keepk.channels("0.*", macs=0.5, round_to="auto", name="all", metric=L2),
        example=torch.randn(2, 3, 8),
    )
    assert list(pruner.round_to["all"].values()) == [16]
    pruner.step()
    assert pruner.kept["all"] in (16, 32, 48)


class Last(nn.Module):
    """The last output of an LSTM."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 64, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0][:, -1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"keep": 3},
            r"space 'f': round_to=\"auto\" is for budgets, got keep=3\. Pass macs= or parameters=",
        ),
        ({"prune": 0.5}, r"round_to=\"auto\" is for budgets, got prune=0\.5"),
        ({"macs": 0.5, "round_to": "best"}, r"round_to='best'\. Pass an int of at least 1, or \"auto\"\."),
    ],
)
def test_it_is_refused_without_a_budget(options, words):
    with pytest.raises(SpaceError, match=words):
        keepk.channels("f", **{"round_to": "auto", **options})


def test_a_budget_of_the_pruner_takes_it():
    spaces = [keepk.channels(name, name=name, round_to="auto", metric=L2) for name in ("0", "2")]
    pruner = keepk.Pruner(convnet(), spaces, example=pictures(), macs=0.6)
    pruner.step()
    assert all(width in (16, 32, 48, 64, 80, 96, 100) for width in widths_of(pruner.model)[:2])


def test_the_numbers_are_saved_and_a_resumed_run_ends_alike():
    one, other = (made(schedule=keepk.Cubic(3)) for _ in range(2))
    one.step()
    state = one.state_dict()
    assert state["channels"]["round_to"] == one.round_to
    other.load_state_dict(state)
    for run in (one, other):
        run.step()
        run.step()
    values = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in values)
    by_hand = made(round_to=None, schedule=keepk.Cubic(3))
    assert "round_to" not in by_hand.state_dict()["channels"]
    altered = copy.deepcopy(state)
    altered["channels"]["round_to"]["all"]["0"] = 32
    for run, saved in ((by_hand, state), (made(schedule=keepk.Cubic(3)), altered)):
        before = looks(run.model)
        with pytest.raises(StateError, match=r"were rounded to .*Load it with the same round_to= and dtype\."):
            run.load_state_dict(saved)
        unchanged(run.model, before)
