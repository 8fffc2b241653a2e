"""`keepk.verify`: correct networks pass, and a wrong rule is detected."""

import pytest
import torch
from torch import nn

import keepk
from keepk.errors import ShrinkError
from keepk.graph.rules import registry as table
from networks import NETWORKS
from traced_once import traced_network


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_right_by_numbers(name):
    model, example, graph = traced_network(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert keepk.verify(model, graph, example) < 1e-10
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.library.custom_op("keepk_tests::backwards", mutates_args=())
def backwards(x: torch.Tensor) -> torch.Tensor:
    return x.flip(-1).clone()


@backwards.register_fake
def _(x):
    return torch.empty_like(x)


class Backwards(nn.Module):
    def __init__(self):
        super().__init__()
        self.good, self.first, self.head = nn.Linear(7, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(backwards(self.first(self.good(x).relu())))


@pytest.fixture
def wrong_rule(monkeypatch):
    """A wrong rule, which claims that channels keep their positions."""
    monkeypatch.setattr(table, "RULES", dict(table.RULES))
    keepk.rule("keepk_tests::backwards")(lambda call: call.label_output(call.maps(call.inputs[0])))


@pytest.mark.usefixtures("wrong_rule")
def test_a_rule_that_lies_is_found_out_and_the_layer_named():
    model, example = Backwards().double(), torch.randn(4, 7, dtype=torch.float64)
    graph = keepk.trace(model, example)
    with pytest.raises(ShrinkError, match=r"differ by \d.*, because of 'first'\. Leave these"):
        keepk.verify(model, graph, example)
    keepk.shrink(model, graph, [int(unit) for unit in graph.groups[0].units[:3]])  # of the preceding layer
    assert model.good.out_features == 5


def test_a_network_that_lost_channels_before_is_verified_as_it_is():
    model, example, graph = traced_network("residual")
    keepk.shrink(model, graph, graph.choose(0.3, seed=5))
    assert keepk.verify(model, graph, example, share=0.4, seed=7) < 1e-12
    assert len(model(example)) == len(example)
