"""Probes on cut copies: channels that never fit are fixed, and train mode is probed for parts that only it uses."""

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn

import keepk
from keepk.compaction import operations as dead_ops
from keepk.cut import shrink
from keepk.errors import ShrinkError, SpaceError, TraceError
from keepk.graph.ids.facts import Bound, Facts, Reason
from keepk.graph.probe import probe, replay
from keepk.graph.probe import repairs as program_numbers
from keepk.graph.solve import bindings, solve
from keepk.graph.solve.bindings import UnionFind
from keepk.model import copies as shell
from masked import masked, relative_error
from networks import NETWORKS
from strategies import seeds
from untyped import untyped


def spaces(graph):
    return {space.name: len(space.units) for space in graph.groups}


def reasons(graph, tensor, axis):
    return [record.why for record in graph.fixed if (record.tensor, record.axis) == (tensor, axis)]


def check_both_modes(model, example):
    """Check that the cut model equals the masked model in eval and in train mode."""
    graph = keepk.trace(model, example)
    units = graph.choose(0.5, seed=0, lossy=True)
    oracle = masked(model, graph, units)
    keepk.shrink(model, graph, units)
    for training in (False, True):
        with torch.no_grad():
            wanted, got = oracle.train(training)(example), model.train(training)(example)
        assert relative_error(wanted, got) < 1e-10
    return graph


# Number of rounds


class Literals(nn.Module):
    """Four lines with a literal size, and a layer that could shrink."""

    def __init__(self):
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(2, 4) for _ in range(4))
        self.narrow = nn.ModuleList(nn.Linear(4, 2) for _ in range(4))
        self.last, self.head = nn.Linear(2, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, x):
        x = x + self.narrow[0](self.wide[0](x).relu().reshape(-1, 2, 2).flatten(1))
        x = x + self.narrow[1](self.wide[1](x).relu().reshape(-1, 2, 2).flatten(1))
        x = x + self.narrow[2](self.wide[2](x).relu().reshape(-1, 2, 2).flatten(1))
        x = x + self.narrow[3](self.wide[3](x).relu().reshape(-1, 2, 2).flatten(1))
        return self.head(self.last(x).relu())


def pairs():
    return torch.randn(3, 2, dtype=torch.float64)


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_what_did_not_fit_in_all_rounds_stays(monkeypatch, rounds):
    monkeypatch.setattr(probe, "ROUNDS", rounds)
    model, example = Literals(), pairs()
    graph = keepk.trace(model, example)
    assert not spaces(graph)
    [why] = reasons(graph, "last.weight", 0)
    assert why.startswith(f"did not fit after {rounds} tries on cut copies (aten::")
    assert "test_trying_out.py:" in why
    keepk.shrink(model, graph, graph.choose(0.5, seed=0, lossy=True))
    model(example)


def test_rounds_enough_leave_what_fits(monkeypatch):
    monkeypatch.setattr(probe, "ROUNDS", 5)
    graph = check_both_modes(Literals(), pairs())
    assert spaces(graph) == {"last": 6}
    assert "the size is written in the model's Python" in reasons(graph, "wide.3.weight", 0)[0]


class LossyLiterals(Literals):
    """The literal sizes come after a LayerNorm, whose channels are lossy."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4).double()

    def forward(self, x):
        x = x + self.narrow[0](self.norm(self.wide[0](x)).reshape(-1, 2, 2).flatten(1))
        return self.head(self.last(x).relu())


def test_lossy_units_that_did_not_fit_leave_the_exact_ones(monkeypatch):
    monkeypatch.setattr(probe, "ROUNDS", 1)
    graph = check_both_modes(LossyLiterals(), pairs())
    assert spaces(graph) == {"last": 6}
    assert graph.fixed


class HeadsByNumber(nn.Module):
    """A loop over literal numbers selects the heads, so their number is fixed."""

    def __init__(self):
        super().__init__()
        self.project, self.head = nn.Linear(6, 12), nn.Linear(3, 6)
        self.scales = nn.Parameter(torch.rand(4))

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (4, 3))
        return x + self.head(sum(heads[:, number] * self.scales[number] for number in range(4)).relu())


def test_the_first_failure_speaks_for_all_alike(monkeypatch):
    """Channels that enter an operation are blamed if none leave it; the same line in other layers is not retried."""
    copies = []
    copy = shell.Workshop.copy
    monkeypatch.setattr(shell.Workshop, "copy", lambda *a, **k: copies.append(1) or copy(*a, **k))
    tries = {}
    for blocks in (2, 8):
        copies.clear()
        model = nn.Sequential(*(HeadsByNumber() for _ in range(blocks))).double()
        check_both_modes(model, torch.randn(5, 6, dtype=torch.float64))
        tries[blocks] = len(copies)
    assert tries[8] == tries[2]


def test_exact_units_that_fail_beside_lossy_ones_are_blamed(monkeypatch):
    """Otherwise every round would blame no channel, and all rounds would be used up."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    tries = []

    def attempt(_bench, graph, units, _modes):
        tries.append(graph.units.lossy[units])
        besides = any(lossy.any() for lossy in tries) and not tries[-1].all()
        return replay.Mismatch(-1, "does not fit") if besides else None

    monkeypatch.setattr(probe.Bench, "attempt", attempt)
    graph = keepk.trace(model, torch.randn(3, 4))
    assert spaces(graph) == {"2": 8}
    assert len(tries) < 12


class Table(nn.Module):
    """Heads of a literal size, and a long list of indices, many of which equal that size."""

    def __init__(self, entries):
        super().__init__()
        self.first, self.second = nn.Linear(4, 12), nn.Linear(12, 3)
        self.indices = [12] * entries

    def forward(self, x):
        return self.second(self.first(x).view(-1, 12))


def test_a_table_of_indices_is_no_list_of_sizes():
    graph = keepk.trace(Table(1), torch.randn(3, 4))
    assert "the size is written in the model's Python" in reasons(graph, "first.weight", 0)[0]
    with_table = program_numbers.holding(Table(1_000), 12)
    assert not with_table
    assert program_numbers.holding(Table(3), 12) == [("indices", 0), ("indices", 1), ("indices", 2)]


def test_one_number_for_two_widths_keeps_them_equal():
    model, example = NETWORKS["one_number_for_two"]()
    graph = keepk.trace(model, example)
    [[left, right]] = graph.bindings
    assert len(left) == len(right) == 6
    with pytest.raises(ShrinkError, match=r"must lose equal numbers .* has its size in 'width', as another part"):
        keepk.shrink(model, graph, left[:2])
    keepk.shrink(model, graph, [*left[:2], *right[3:5]])
    assert model.width == 4
    model(example)


def test_one_size_for_all_heads_keeps_them_equal():
    model, example = NETWORKS["one_size_for_all_heads"]()
    graph = keepk.trace(model, example)
    [blocks] = graph.bindings
    assert [len(block) for block in blocks] == [6] * 4


class Aligned(nn.Module):
    """An operation that requires rows of a multiple of 16 bytes, like torch's grouped products."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.head = nn.Linear(4, 48), nn.Linear(48, 20), nn.Linear(20, 3)

    def forward(self, x):
        wide = self.wide(x).relu()
        if wide.shape[1] % 4:
            raise RuntimeError("strides should be multiple of 16 bytes")
        return self.head(self.narrow(wide.view(-1, wide.shape[1])).relu())


def test_a_width_that_must_be_a_multiple_is_kept_one():
    model, example = Aligned().double(), torch.randn(5, 4, dtype=torch.float64)
    graph = check_both_modes(model, example)
    assert [(space.name, space.multiple) for space in graph.groups] == [("wide", 8), ("narrow", 1)]
    assert model.wide.out_features == 24
    with pytest.raises(ShrinkError, match=r"21 units of 'wide' would be left, which must be a multiple of 8, because"):
        keepk.shrink(model, graph, graph.groups[0].units[graph.alive[graph.groups[0].units]][:3])
    assert model.wide.out_features == 24
    report = str(keepk.inspect(Aligned(), torch.randn(5, 4)))
    assert "Must keep a multiple\n  of 8 units: wide\n      other widths do not fit: RuntimeError: strides" in report


class AlignedTwice(nn.Module):
    """Half of each width fits, but the uneven shares do not."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 24), nn.Linear(24, 24), nn.Linear(24, 3)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = layer(x).relu()
            if x.shape[1] % 4:
                raise RuntimeError("strides should be multiple of 16 bytes")
        return self.head(x.view(-1, x.shape[1]))


def test_a_width_that_fails_with_an_uneven_share_is_kept_a_multiple():
    graph = check_both_modes(AlignedTwice().double(), torch.randn(5, 4, dtype=torch.float64))
    assert [(space.name, space.multiple) for space in graph.groups] == [("first", 8), ("second", 8)]


def test_multiples_that_do_not_help_are_not_asked_for():
    class Literal(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 24), nn.Linear(24, 16), nn.Linear(16, 3)

        def forward(self, x):
            if (wide := self.first(x).relu()).shape[1] != 24:
                raise RuntimeError("24 it is")
            return self.head(self.second(wide.view(-1, wide.shape[1])).relu())

    graph = keepk.trace(Literal(), torch.randn(5, 4))
    assert [(space.name, space.multiple) for space in graph.groups] == [("second", 1)]
    assert "24 it is" in reasons(graph, "first.weight", 0)[0]


def test_exactly_k_with_a_width_that_must_be_a_multiple():
    example = torch.randn(5, 4)
    for keep in (17, 33, 50):
        model = Aligned()
        pruner = keepk.Pruner(model, keepk.channels("*", keep=keep, metric=keepk.metrics.l1), example=example)
        pruner.step()
        assert pruner.kept == {"*": keep}
        assert model.wide.out_features % 8 == 0
        assert model.wide.out_features + model.narrow.out_features == keep
        model(example)
    with pytest.raises(SpaceError, match=r"'wide' must keep a multiple of 8 .*\. Nearest possible: 32 and 40"):
        keepk.Pruner(Aligned(), keepk.channels("wide", keep=33, metric=keepk.metrics.l1), example=example)


def test_a_sweep_leaves_a_multiple():
    model, example = Aligned().double(), torch.randn(5, 4, dtype=torch.float64)
    with torch.no_grad():
        model.narrow.weight[:, :11] = 0
        wanted = model(example)
        keepk.compact(model, example)
        assert relative_error(wanted, model(example)) < 1e-10
    assert model.wide.out_features == 40


@given(seed=seeds)
def test_a_straight_grid_stays_straight_whatever_is_united(seed):
    """Therefore one round of uniting columns is enough."""
    random = np.random.default_rng(seed)
    places = random.integers(0, 12, size=tuple(random.integers(2, 4, size=random.integers(2, 4))))
    grid = Bound(places.astype(np.int32), Reason(""))
    united = UnionFind(12)
    for _ in range(10):
        before = set(bindings._irregular(grid, united.classes).tolist())
        united.add(*random.integers(1, 12, size=(2, 1)))
        united.settle()
        after = set(bindings._irregular(grid, united.classes).tolist())
        assert {united.classes[atom] for atom in after} <= {united.classes[atom] for atom in before}


@given(seed=seeds)
def test_what_is_not_straightened_is_told(seed):
    random = np.random.default_rng(seed)
    places = [random.integers(0, 30, size=random.integers(2, 5, size=2)) for _ in "1234"]
    grids = [Bound(it.astype(np.int32), Reason("is transposed")) for it in places]
    united = UnionFind(30)
    left = bindings.enforce_grids(grids, united)
    told = {united.classes[atom] for bound in left for atom in bound.array}
    crooked = {united.classes[atom] for grid in grids for atom in bindings._irregular(grid, united.classes)}
    assert crooked == told


def test_rows_that_cannot_be_bound_are_united():
    facts = Facts()
    facts.add_equal(np.array([1]), np.array([5]))
    facts.even.append(Bound(np.arange(1, 7, dtype=np.int32).reshape(2, 3), Reason("is unfolded")))
    solution = solve.solve(facts, 7)
    assert not solution.bindings
    assert solution.classes[1:].tolist() == [1, 1, 3, 1, 1, 3]


def test_every_level_of_a_grid_is_looked_at():
    """One channel breaks the grid in the outer rows, another only in the inner ones."""
    grid = np.zeros((2, 2, 2), np.int32)
    grid[0, 0] = grid[0, 1] = (1, 2)
    grid[1, 1] = (1, 2)
    grid[0, 0, 1] = 0
    [left] = bindings.enforce_grids([Bound(grid, Reason("is transposed"))], UnionFind(3))
    assert set(left.array.tolist()) == {1, 2}


# Parts used only in training


class Auxiliary(nn.Module):
    """A second head with hidden channels that runs only in training; `trouble` is an operation in it."""

    def __init__(self, trouble=None):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.hidden, self.classes = nn.Linear(16, 12), nn.Linear(12, 10)
        self.trouble = trouble
        self.double()

    def forward(self, x):
        body = self.body(x).relu()
        if not self.training:
            return self.head(body)
        classes = self.classes(self.reshaped(self.hidden(body).relu()))
        if self.trouble == "values" and classes.sum() > 1e9:
            raise AssertionError("never so large")
        if self.trouble == "always":
            raise ValueError("no targets")
        return self.head(body), classes

    def reshaped(self, hidden):
        return hidden.reshape(-1, 3, 4).flatten(1) if self.trouble == "literal" else hidden


def eights():
    return torch.randn(4, 8, dtype=torch.float64)


@pytest.mark.parametrize("trouble", [None, "values"])
def test_a_head_for_training_is_cut_along(trouble):
    """If the train-mode forward reads values, the copy has weights."""
    graph = check_both_modes(Auxiliary(trouble), eights())
    assert spaces(graph) == {"body": 16, "hidden": 12}
    assert ("hidden.weight", 1, 0) in graph.slices(0)
    assert "is an output of the model" in reasons(graph, "classes.weight", 0)[0]


def test_a_size_that_only_training_has_written_in_it_stays():
    graph = check_both_modes(Auxiliary("literal"), eights())
    assert spaces(graph) == {"body": 16}
    assert "the size is written in the model's Python" in reasons(graph, "hidden.weight", 0)[0]


def test_a_head_for_training_that_fails_keeps_its_size():
    """So do its inputs, up to the operation that failed."""
    model, example = Auxiliary("always"), eights()
    with pytest.raises(keepk.errors.TraceError, match=r"fails in train mode \(ValueError: no targets\).*train_mode="):
        keepk.trace(model, example)
    graph = keepk.trace(model, example, train_mode="accept")
    assert not spaces(graph)
    assert "fails in train mode (ValueError: no targets)" in graph.unknown[0]
    for tensor in ("hidden.weight", "classes.weight", "classes.bias"):
        assert (
            "is used in training at most, where forward fails: ValueError: no targets" in reasons(graph, tensor, 0)[0]
        )
    assert reasons(graph, "body.weight", 0)


class NeedsTargets(nn.Module):
    """A detector: in training it takes targets and returns a loss."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 3)
        self.double()

    def forward(self, x, targets=None):
        scores = self.head(self.body(x).relu())
        return (scores - targets).square().mean() if self.training else scores


def test_a_training_example_is_used_in_train_mode():
    with pytest.raises(keepk.errors.TraceError, match="training_example"):
        keepk.trace(NeedsTargets(), eights())
    graph = keepk.trace(NeedsTargets(), eights(), training_example=(eights(), torch.zeros(4, 3).double()))
    assert spaces(graph) == {"body": 16}
    assert graph.unknown == ()


class GroupedAuxiliary(nn.Module):
    """The head for training is a grouped convolution over a BatchNorm."""

    def __init__(self, fails):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 5, 1)
        self.norm, self.grouped, self.classes = nn.BatchNorm2d(12), nn.Conv2d(12, 6, 1, groups=3), nn.Conv2d(6, 4, 1)
        self.fails = fails
        self.double()

    def forward(self, x):
        body = self.body(x)
        if not self.training:
            return self.head(body)
        classes = self.classes(self.grouped(self.norm(body).relu()))
        if self.fails:
            raise ValueError("no targets")
        return self.head(body), classes


def test_a_grouped_convolution_that_only_training_uses():
    graph = check_both_modes(GroupedAuxiliary(fails=False), torch.randn(3, 3, 6, 7, dtype=torch.float64))
    assert spaces(graph)["grouped"] == 6
    assert not reasons(graph, "grouped.weight", 1)


def test_a_batch_norm_in_a_head_that_fails():
    model, example = GroupedAuxiliary(fails=True), torch.randn(3, 3, 6, 7, dtype=torch.float64)
    graph = keepk.trace(model, example, train_mode="accept")
    assert all("body" in name for name in spaces(graph))
    keepk.shrink(model, graph, graph.choose(0.5, seed=0))
    model.eval()(example)
    model.fails = False
    model.train()(example)


# Names of operations


class Moves(nn.Module):
    """A data movement between two layers, which torch does not decompose in inference mode."""

    def __init__(self, move, *, inference):
        super().__init__()
        self.body, self.head, self.move, self.inference = nn.Linear(4, 6), nn.Linear(6, 3), move, inference
        self.double()

    def forward(self, x):
        body = self.body(x)
        with torch.inference_mode(self.inference):
            body = self.move(body)
        return self.head(body)


MOVES = {
    "movedim": lambda x: x.movedim(2, 0).movedim(0, -1),
    "movedims": lambda x: x.movedim((0, 2), (2, 1)).movedim((1, 2), (2, 0)),
    "moveaxis": lambda x: torch.moveaxis(x, 2, 0).moveaxis(0, 2),
    "mT": lambda x: x.mT.relu().mT,
    "mH": lambda x: x.mH.mH,
    "adjoint": lambda x: torch.adjoint(x).transpose(1, -1),
    "swapaxes": lambda x: x.swapaxes(0, 2).swapdims(2, 0),
    "transpose_": lambda x: x.clone().transpose_(1, 2).permute(0, 2, 1),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_dims_that_change_places_are_followed(name, inference):
    model, example = Moves(MOVES[name], inference=inference), torch.randn(3, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        graph = check_both_modes(model, example)
    assert spaces(graph) == {"body": 6}


def test_a_sum_over_a_batch_of_products_stays():
    class Summed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            body = self.body(x)
            return self.head(torch.addbmm(body.new_zeros(6, 6), body.transpose(1, 2), body))

    graph = keepk.trace(Summed(), torch.randn(3, 5, 4))
    assert not spaces(graph)
    assert all(why.startswith("sums over a batch (aten::addbmm") for why in reasons(graph, "body.weight", 0))


def test_two_mask_rules_for_an_operation_are_refused():
    before = dict(dead_ops.BUILDERS)
    with pytest.raises(TraceError, match="mask rule for mul: there is one already, '_times'"):
        dead_ops._builds("mul")(untyped(lambda _: None))
    assert before == dead_ops.BUILDERS


class Final(nn.Module):
    """A number that must change with a width but is read-only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.width = nn.Linear(6, 8), nn.Linear(8, 3), 8

    def __setattr__(self, name, value):
        if name == "width" and "width" in self.__dict__:
            raise AttributeError("width is final")
        super().__setattr__(name, value)

    def forward(self, x):
        return self.second(self.first(x).relu().view(*x.shape[:-1], self.width))


def test_a_number_that_cannot_be_set_keeps_its_width():
    graph = keepk.trace(Final(), torch.randn(4, 6))
    assert len(graph.units) == 0
    assert any(it.tensor == "first.weight" and it.axis == 0 for it in graph.fixed)


# Numbers that are kept in children and in objects


def heads_of(graph):
    return {space.name: len(space.units) for space in graph.groups if space.name.endswith(("query", "value", "key"))}


@pytest.mark.parametrize("name", ["heads_in_a_child", "heads_in_a_config", "heads_in_a_dict"])
def test_blocks_with_numbers_of_their_own_may_keep_different_heads(name):
    model, example = NETWORKS[name]()
    graph = keepk.trace(model, example)
    assert heads_of(graph) == {"blocks.0.query": 4, "blocks.1.query": 4}
    oracle = masked(model, graph, units := graph.groups[-1].units[:3])
    keepk.shrink(model, graph, units)
    assert [block.value.out_features for block in model.blocks] == [24, 6]
    with torch.no_grad():
        assert relative_error(oracle(example), model(example)) < 1e-10


def test_blocks_that_share_a_child_lose_equally_many_heads():
    model, example = NETWORKS["heads_in_a_shared_child"]()
    graph = keepk.trace(model, example)
    assert heads_of(graph) == {"blocks.0.query": 4}  # heads of the two blocks are removed in pairs
    keepk.shrink(model, graph, graph.groups[-1].units[:1])
    assert model.blocks[0].sizes is model.blocks[1].sizes
    assert (model.blocks[0].sizes.heads, model.blocks[0].sizes.width) == (3, 18)
    assert [block.value.out_features for block in model.blocks] == [18, 18]


def test_a_config_that_others_hold_is_left_as_it_was(tmp_path):
    model, example = NETWORKS["heads_in_a_config"]()
    config = model.blocks[0].sizes
    graph = keepk.trace(model, example)
    edits = keepk.shrink(model, graph, graph.groups[-1].units[:2])
    assert {(it.module, it.attribute, it.old, it.new) for it in edits.settings} >= {
        ("blocks.1", "sizes.heads", 4, 2),
        ("blocks.1", "sizes.width", 24, 12),
    }
    assert vars(config) == {"heads": 4, "width": 24, "layers": 2}
    assert model.blocks[0].sizes is config
    assert vars(model.blocks[1].sizes) == {"heads": 2, "width": 12, "layers": 2}
    keepk.save(model, tmp_path / "net")
    loaded = keepk.load(NETWORKS["heads_in_a_config"]()[0], tmp_path / "net")
    assert torch.equal(loaded(example), model(example))
    assert vars(loaded.blocks[1].sizes) == vars(model.blocks[1].sizes)


def test_a_shrink_that_fails_leaves_the_config():
    model, example = NETWORKS["heads_in_a_config"]()
    config, graph = model.blocks[0].sizes, keepk.trace(model, example)
    prepared = shrink.prepare(model, graph, graph.groups[-1].units[:2])
    prepared.apply()()
    assert model.blocks[1].sizes is config
    assert vars(config) == {"heads": 4, "width": 24, "layers": 2}
    model(example)


def test_a_number_that_is_equal_by_chance_stays():
    """Four heads, four layers and four blocks of something else."""
    model, example = NETWORKS["heads_in_a_dict"]()
    model.times = 4
    graph = keepk.trace(model, example)
    keepk.shrink(model, graph, graph.choose(0.5))
    assert [block.options for block in model.blocks] == [{"heads": 2, "width": 12, "layers": 4}] * 2
    assert model.times == 4
