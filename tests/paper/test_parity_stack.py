"""A stack equals the same networks trained one by one and pruned by the library's selection."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from keepk.errors import RankError
from keepk.plan.schedules import Annealing
from keepk.rank.kth_largest import Ranked
from keepk.rank.weights import cut_points, dead_mask
from keepk_paper import parity
from keepk_paper.parity_training import Stack, draw, ranking, train, train_by_pruner, train_epoch, with_ones

INPUTS = 7
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
}


class Single(nn.Module):
    """One network, written in the obvious way, with a mask over its nodes."""

    def __init__(self, stack, member, width):
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, width).double(), nn.Linear(width, 1).double()
        with torch.no_grad():
            self.first.weight.copy_(stack.incoming[member, :width, :-1])
            self.first.bias.copy_(stack.incoming[member, :width, -1])
            self.last.weight[0].copy_(stack.outgoing[member, :width])
            self.last.bias.copy_(stack.offset[member])
        self.alive = list(range(width))

    def forward(self, signs):
        return self.last(torch.tanh(self.first(signs)))[:, 0]

    def by_node(self):
        return (self.first.weight, 0), (self.first.bias, 0), (self.last.weight, 1)

    def hold(self, optimizer):
        """Zero the pruned nodes in the weights and in the optimizer's state."""
        dead = [node for node in range(len(self.first.bias)) if node not in self.alive]
        for parameter, axis in self.by_node():
            of_optimizer = [it for it in optimizer.state[parameter].values() if torch.is_tensor(it) and it.dim()]
            for tensor in (parameter.data, *of_optimizer):
                tensor[(slice(None),) * axis + (dead,)] = 0.0

    def prune(self, keep, optimizer):
        scores = {
            node: abs(self.last.weight[0, node].item())
            * torch.cat([self.first.weight[node], self.first.bias[node : node + 1]]).norm().item()
            for node in self.alive
        }
        best = sorted(self.alive, key=lambda node: (-scores[node], node))[:keep]
        self.alive = sorted(best)
        self.hold(optimizer)

    def epoch(self, optimizer, batches):
        for signs, labels in batches:
            optimizer.zero_grad()
            F.softplus(-labels * self(signs)).mean().backward()
            optimizer.step()
            self.hold(optimizer)


def batches(seed, steps=3, size=6):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield (
            (torch.randint(2, (size, INPUTS), generator=generator) * 2 - 1).double(),
            (torch.randint(2, (size,), generator=generator) * 2 - 1).double(),
        )


def stacked(of):
    return [(with_ones(signs), labels) for signs, labels in of]


def same(stack, member, single):
    """Check that a member of the stack has the single network's remaining nodes, in order, followed by zeros."""
    width = stack.widths[member]
    assert width == len(single.alive)
    incoming = torch.cat([single.first.weight, single.first.bias[:, None]], 1)[single.alive]
    torch.testing.assert_close(stack.incoming[member, :width], incoming, rtol=0, atol=1e-9)
    torch.testing.assert_close(stack.outgoing[member, :width], single.last.weight[0, single.alive], rtol=0, atol=1e-9)
    torch.testing.assert_close(stack.offset[member], single.last.bias[0], rtol=0, atol=1e-9)
    assert not stack.incoming[member, width:].count_nonzero()
    assert not stack.outgoing[member, width:].count_nonzero()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_a_stack_is_training_its_members_one_by_one(name):
    """Members have different widths, are pruned twice and copied once; the optimizer's state is updated with them."""
    stack = Stack.fresh([8, 5, 8], INPUTS, seeds=[1, 2, 3]).double()
    singles = [Single(stack, member, width) for member, width in enumerate(stack.widths)]
    optimizer = OPTIMIZERS[name](stack.parameters())
    optimizers = [OPTIMIZERS[name](single.parameters()) for single in singles]
    for epoch, (members, widths) in enumerate(
        [([0, 1, 2, 2], [6, 5, 3, 7]), ([0, 2, 3], [2, 3, 1]), ([0, 1, 2], None)]
    ):
        train_epoch(stack, optimizer, stacked(batches(epoch)))
        for single, own in zip(singles, optimizers, strict=True):
            single.epoch(own, batches(epoch))
        for member, single in enumerate(singles):
            same(stack, member, single)
        if widths:
            pairs = [copy.deepcopy((singles[member], optimizers[member])) for member in members]
            singles, optimizers = [list(column) for column in zip(*pairs, strict=True)]
            stack.regroup(members, widths, optimizer)
            for single, own, width in zip(singles, optimizers, widths, strict=True):
                single.prune(width, own)
    signs = next(batches(9))[0]
    outputs = torch.stack([single(signs) for single in singles])
    torch.testing.assert_close(stack(with_ones(signs)), outputs, rtol=0, atol=1e-9)


few_values = st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0])
rows = st.integers(1, 9).flatmap(
    lambda nodes: st.lists(st.lists(few_values, min_size=nodes, max_size=nodes), min_size=1)
)


@given(rows, st.data())
@settings(max_examples=60)
def test_the_nodes_kept_are_those_of_the_library_s_selection(scores, data):
    """Scores with many ties and zeros, set through the outgoing weights; each member keeps a different number."""
    outgoing = torch.tensor(scores)
    members, nodes = outgoing.shape
    incoming = torch.zeros(members, nodes, 2)
    incoming[..., 0] = 1.0
    stack = Stack(incoming, outgoing, torch.zeros(members), [nodes] * members)
    stack.incoming.data[..., 1] = torch.arange(nodes) * 1e-30  # identifies the nodes, too small to affect the scores
    counts = data.draw(st.lists(st.integers(1, nodes), min_size=members, max_size=members))
    expected = []
    for row, keep in zip(stack.scores(), counts, strict=True):
        ranked = Ranked("member", row)
        kept = ~dead_mask(ranked, cut_points([ranked], keep)[0])
        expected.append(kept.nonzero().squeeze(1).tolist())
    stack.regroup(range(members), counts, torch.optim.SGD(stack.parameters(), lr=0.1))
    names = (stack.incoming[..., 1] * 1e30).round().int()
    assert [names[member, :width].tolist() for member, width in enumerate(stack.widths)] == expected
    assert list(stack.widths) == counts


def test_a_node_of_zeros_that_is_kept_stays_kept():
    """The width, not the value, says what is kept: a second event prefers it to the padding."""
    stack = Stack(torch.zeros(2, 3, 2), torch.zeros(2, 3), torch.zeros(2), [3, 1])
    stack.regroup([0, 1], [2, 1], torch.optim.SGD(stack.parameters(), lr=0.1))
    assert stack.widths == (2, 1)
    assert stack.outgoing.shape == (2, 2)


def test_the_objects_that_the_optimizer_holds_stay():
    stack = Stack.fresh([4, 4], INPUTS, seeds=[0, 1])
    optimizer = torch.optim.AdamW(stack.parameters())
    before = list(map(id, stack.parameters()))
    stack.regroup([1], [2], optimizer)
    assert list(map(id, stack.parameters())) == before == list(map(id, optimizer.param_groups[0]["params"]))


def test_scores_that_are_no_numbers_are_refused():
    with pytest.raises(RankError, match=r"stack of 3 networks: 2 have NaN scores\. Lower the learning rate\."):
        ranking(torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [0.0, float("nan")]]))


def test_a_member_starts_from_its_own_seed_whatever_stands_beside_it():
    alone, beside = Stack.fresh([3], INPUTS, seeds=[5]), Stack.fresh([8, 3], INPUTS, seeds=[4, 5])
    assert torch.equal(alone.incoming[0], beside.incoming[1, :3])
    assert torch.equal(alone.outgoing[0], beside.outgoing[1, :3])
    assert torch.equal(alone.offset[0], beside.offset[1])
    assert alone.incoming.abs().max() <= INPUTS**-0.5
    assert alone.outgoing.abs().max() <= 3**-0.5


def test_the_stack_prunes_as_the_pruner_does():
    """Separate networks under `keepk.Pruner` keep the same nodes and end with the same errors, in float64."""
    recipe = replace(parity.KEEPK, start=16, dense=2, anneal=5, tail=2, schedule=Annealing(p0=0.5, n1=1, nu=0.125))
    data = draw(3, sizes=(400, 200, 300)).to(torch.float64)
    stacked, separate = (make(recipe, data, seed=3, inits=2, goals=(2, 4)) for make in (train, train_by_pruner))
    assert separate.kept == {2: 2, 4: 4, 16: 16}
    assert separate.errors == stacked.errors
    assert len({*separate.errors[2].test, *separate.errors[4].test}) == 4  # not four times the same network
