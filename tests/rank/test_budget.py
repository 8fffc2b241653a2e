"""The removal sequence of a budget, compared with an oracle that removes one block at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keepk.plan.portions import Portion
from keepk.rank.budget import Removals, interleaved, removals, shortest
from keepk.rank.channels import Choice


@st.composite
def spaces(draw):
    """Choices of three kinds: single units, layers in steps, bound parts; with ranks, forced units and dead ones."""
    choices, start = [], 0
    for _ in range(draw(st.integers(1, 4))):
        parts, size = draw(st.sampled_from([(1, 5), (1, 9), (2, 4), (3, 3)])), draw(st.integers(1, 3))
        blocks = tuple(np.arange(start + n * parts[1], start + (n + 1) * parts[1]) for n in range(parts[0]))
        start += parts[0] * parts[1]
        if parts[0] == 1 and size == 1:
            choices.append(Choice(blocks, Portion(tuple(range(1, parts[1] + 1))), free=True))
        else:
            lost = [n for n in range(parts[1]) if n % size == 0][::-1]
            choices.append(Choice(blocks, Portion(tuple(parts[0] * (parts[1] - n) for n in lost))))
    ranks = np.array(draw(st.permutations(range(1, start + 1))), np.float64)
    forced = np.zeros(start, bool)
    for choice in choices:
        for block in choice.blocks:
            forced[block[draw(st.integers(0, len(block) - 1))]] = True
    return choices, ranks, forced


def next_block(choice, alive, ranks, forced):
    """The units that may go next from one choice, found by trying numbers of units; None if none may."""
    living = [[u for u in block.tolist() if alive[u]] for block in choice.blocks]
    count = sum(map(len, living))
    for number in range(1, len(living[0]) + 1):
        left = count - number * len(living)
        ordered = [sorted(part, key=lambda unit: (forced[unit], ranks[unit])) for part in living]
        block = [unit for part in ordered for unit in part[:number]]
        allowed = choice.free or left in choice.portion.counts
        if allowed and not forced[block].any() and all(len(part) >= number for part in living):
            return block
    return None


def one_at_a_time(choices, alive, ranks, forced):
    """While any block may go, remove the one with the lowest mean rank, of equal ones that with the lowest unit."""
    alive, order = alive.copy(), list[list[int]]()
    while True:
        blocks = [it for choice in choices if (it := next_block(choice, alive, ranks, forced))]
        if not blocks:
            return order
        lowest = min(blocks, key=lambda block: (sum(ranks[block]) / len(block), min(block)))
        order.append(sorted(lowest))
        alive[lowest] = False


@given(spaces())
def test_blocks_go_in_the_order_of_the_oracle(space):
    choices, ranks, forced = space
    alive = np.ones(len(ranks), bool)
    found = [sorted(block.tolist()) for block in removals(choices, alive, ranks, forced).blocks()]
    assert found == one_at_a_time(choices, alive, ranks, forced)


@given(spaces(), st.data())
def test_a_sequence_goes_on_from_any_of_its_prefixes(space, data):
    choices, ranks, forced = space
    alive = np.ones(len(ranks), bool)
    whole = removals(choices, alive, ranks, forced)
    number = data.draw(st.integers(0, len(whole)))
    alive[whole.prefix(number)] = False
    rest = removals(choices, alive, ranks, forced)
    assert [it.tolist() for it in rest.blocks()] == [it.tolist() for it in [*whole.blocks()][number:]]


@given(spaces(), st.integers(0, 200), st.data())
def test_bisection_finds_the_shortest_prefix(space, bound, data):
    choices, ranks, forced = space
    sequence = removals(choices, np.ones(len(ranks), bool), ranks, forced)
    prices = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(ranks), max_size=len(ranks))))

    def cost(removed):
        return int(prices.sum() - prices[removed].sum())

    found = shortest(sequence, cost, bound)
    prefixes = [number for number in range(len(sequence) + 1) if cost(sequence.prefix(number)) <= bound]
    assert found == (prefixes[0] if prefixes else None)
    if found:
        assert shortest(sequence, cost, bound, least=found - 1) == found
        assert shortest(sequence, cost, bound, least=len(sequence)) == len(sequence)


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=4))
def test_interleaved_spaces_lose_the_same_share_to_the_block(sizes):
    sequences, totals = [], []
    for place, (blocks, size) in enumerate(sizes):
        units = 100 * place + np.arange(blocks * size)
        sequences.append(Removals(units, np.arange(1, blocks + 1) * size))
        totals.append(blocks * size)
    whole = interleaved(sequences, [0] * len(sizes), totals)
    assert sorted(whole.units.tolist()) == sorted(np.concatenate([it.units for it in sequences]).tolist())
    for number in range(len(whole) + 1):
        gone = np.bincount(whole.prefix(number) // 100, minlength=len(sizes))
        for place, (_, size) in enumerate(sizes):
            # Without its last block, no space has lost more than any other.
            before = max(0, gone[place] - size) / totals[place]
            assert all(before <= other / total for other, total in zip(gone, totals, strict=True))
