"""The report of a run agrees with plain counting."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import keepk
from keepk.errors import KeepkError
from keepk.reports.tables import PlanReport
from reported_runs import mixed_run, rendered
from shrinking import step
from untyped import untyped


def counted_macs(model, example):
    """MACs per row of the example, by torch's counter on a copy, which counts two operations per MAC."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(model).eval()(example)
    return counter.get_total_flops() // 2 / len(example)


def counted_masked(pruner):
    """The number of masked entries of each parameter, counted one by one."""
    masks = pruner.masks
    return sum(
        1
        for name, parameter in pruner.model.named_parameters()
        for place in range(parameter.numel())
        if name in masks and not masks[name].reshape(-1)[place]
    )


@pytest.mark.parametrize("shrink", ["each", "end", "never"])
def test_every_number_is_that_of_plain_counting(shrink):
    pruner, example, optimizer = mixed_run(shrink)
    model = pruner.model
    planned = {"filters": (20, 15, 10, 6), "weights": (1_764, 900, 250, 50)}
    for epoch in range(4):
        found = keepk.report(pruner)
        assert (found.epoch, found.epochs, found.error) == (epoch, 3, None)
        assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
        assert found.masked == counted_masked(pruner)
        assert found.batch == len(example)
        assert found.macs == counted_macs(model, example)
        for space in found.spaces:
            wanted = planned[space.name]
            assert (space.total, space.planned, space.asked) == (wanted[0], wanted[epoch], wanted[3])
            assert space.kept == pruner.kept[space.name]
        weights, filters = found.spaces
        assert (filters.kind, weights.kind) == ("channels", "weights")
        assert filters.kept == filters.planned
        masks = pruner.masks
        assert weights.kept == sum(int(masks[name].sum()) for name in ("second.weight", "head.weight"))
        if not pruner.done:
            step(model, example, optimizer)
            pruner.step()
    widths = model.first.out_channels, model.second.out_channels
    assert widths == (8, 12) if shrink == "never" else sum(widths) == 6


def test_numbers_of_a_dense_model_by_hand():
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    found = keepk.report(keepk.Pruner(net, keepk.channels("0", keep=2), example=torch.zeros(5, 8)))
    assert (found.parameters, found.masked) == (8 * 6 + 6 + 6 * 3 + 3, 0)
    assert (found.macs, found.batch) == (8 * 6 + 6 * 3, 5)


def test_parameters_and_macs_are_those_of_inspect():
    """Both count the tensors as they are, including masked entries, and MACs per sample."""
    for shrink in ("each", "end", "never"):
        pruner, example, _ = mixed_run(shrink)
        for _ in range(3):
            pruner.step()
            found, seen = keepk.report(pruner), keepk.inspect(pruner.model, example)
            assert (found.parameters, found.macs, found.batch) == (seen.parameters, seen.macs, seen.batch)
            assert found.masked > 0
            costs = f"{seen.parameters:,} parameters ({found.masked:,} masked), {seen.macs:,} MACs per sample"
            assert str(found).endswith(costs)


class Pair(nn.Module):
    """Takes two inputs, which may have different numbers of rows."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x, other):
        return self.two(self.one(x).relu()) + other.sum()


@pytest.mark.parametrize(
    ("other", "batch"),
    [
        (torch.zeros(4, 2), 4),
        (torch.zeros(1, 9), 4),  # broadcast, like position ids
        (torch.tensor(2.0), 4),
        (torch.zeros(9, 9), None),  # an attention mask: no dimension is known to be the batch
    ],
)
def test_macs_are_per_sample_where_the_example_has_a_batch(other, batch):
    example = (torch.zeros(4, 6), other)
    pruner = keepk.Pruner(Pair(), keepk.channels("one", keep=2), example=example)
    found, seen = keepk.report(pruner), keepk.inspect(pruner.model, example)
    per_sample = 6 * 5 + 5 * 3
    assert (found.batch, found.macs) == (batch, per_sample if batch else 4 * per_sample)
    assert (seen.batch, seen.macs) == (found.batch, found.macs)
    words = "per sample" if batch else "for the whole example (batch unknown)"
    assert f"MACs are {words}" in str(found).splitlines()[0]
    assert found.line.endswith(f"{found.macs} MACs {words}")
    assert f"{found.macs} MACs {words} (example: 4x6" in str(seen)
    assert f"Layers (MACs {words})" in str(seen)


def test_macs_that_are_not_for_each_row_are_of_the_whole_example():
    class Hyper(nn.Module):
        """Its weight is computed once per forward, independent of the batch size."""

        def __init__(self):
            super().__init__()
            self.seed, self.make = nn.Parameter(torch.randn(1, 3)), nn.Linear(3, 10)

        def forward(self, x):
            return x @ self.make(self.seed).view(5, 2)

    seen = keepk.inspect(Hyper(), torch.zeros(4, 5))
    assert (seen.batch, seen.macs) == (None, 3 * 10 + 4 * 5 * 2)


def test_a_first_dimension_that_is_a_sequence_is_not_taken_for_the_batch():
    class Attends(nn.Module):
        def __init__(self, batch_first, swaps=False):
            super().__init__()
            self.attention, self.swaps = nn.MultiheadAttention(6, 2, batch_first=batch_first), swaps

        def forward(self, x):
            x = x.transpose(0, 1) if self.swaps else x
            out = self.attention(x, x, x, need_weights=False)[0]
            return out.transpose(0, 1) if self.swaps else out

    x = torch.zeros(4, 7, 6)
    assert keepk.inspect(Attends(batch_first=False), x).batch is None
    for model in (Attends(batch_first=True), Attends(batch_first=False, swaps=True)):
        assert keepk.inspect(model, x).batch == 4
    assert keepk.inspect(nn.GRU(6, 5), x).batch is None
    assert keepk.inspect(nn.GRU(6, 5, batch_first=True), x).batch == 4


def test_a_tied_weight_is_counted_once_and_a_mask_of_it_too():
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False))
    net[2].weight = net[0].weight
    pruner = keepk.Pruner(net, keepk.weights("*", keep=10))
    assert (keepk.report(pruner).parameters, keepk.report(pruner).masked) == (36, 0)
    pruner.step()
    assert (keepk.report(pruner).parameters, keepk.report(pruner).masked) == (36, 26)


def test_a_report_changes_nothing():
    pruner, example, optimizer = mixed_run()
    step(pruner.model, example, optimizer)
    pruner.step()
    pruner.model.train()
    state, generator = copy.deepcopy(pruner.model.state_dict()), torch.get_rng_state()
    assert keepk.report(pruner) == keepk.report(pruner)
    assert all(torch.equal(state[name], value) for name, value in pruner.model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state())
    assert pruner.model.training
    assert all(parameter.grad is not None for parameter in pruner.model.parameters())


def test_without_an_example_there_are_no_macs():
    net = nn.Linear(10, 10)
    pruner = keepk.Pruner(net, keepk.weights("weight", keep=25, schedule=[60, 25]))
    pruner.step()
    found = keepk.report(pruner, error=12.345)
    assert found.macs is None
    assert found.line == "epoch 1/2: kept weight 60 of 100; 110 parameters (40 masked), error 12.35 %"
    assert str(found).splitlines() == [
        "After epoch 1 of 2; parameters include masked entries",
        "space      kind  total  planned  kept  kept %  asked",
        "------  -------  -----  -------  ----  ------  -----",
        "weight  weights    100       60    60  60.00%     25",
        "110 parameters (40 masked), error 12.35 %",
    ]


def test_words_lines_and_a_rich_console_say_the_same():
    pruner, _, _ = mixed_run()
    pruner.step()
    found = keepk.report(pruner, error=3)
    macs, parameters = f"{found.macs:,} MACs per sample", f"{found.parameters:,} parameters ({found.masked:,} masked)"
    kept = found.spaces[0].kept
    assert found.line == (
        f"epoch 1/3: kept weights {kept:,} of 1,764, filters 15 of 20; {parameters}, {macs}, error 3.00 %"
    )
    assert "\n" not in found.line
    for text in (str(found), rendered(found)):
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        assert lines[0] == "After epoch 1 of 3; parameters and MACs include masked entries, MACs are per sample"
        assert lines[-1] == f"{parameters}, {macs}, error 3.00 %"
        cells = [line.split() for line in lines]
        assert ["filters", "channels", "20", "15", "15", "75.00%", "6"] in cells
        assert ["weights", "weights", "1,764", "900", f"{kept:,}", f"{kept / 1_764:.2%}", "50"] in cells


def test_data_is_what_json_gives_back():
    pruner, _, _ = mixed_run()
    pruner.step()
    found = keepk.report(pruner, error=torch.tensor(1.5).item())
    data = found.data()
    assert json.loads(json.dumps(data)) == data
    assert data["error"] == 1.5
    assert (data["epoch"], data["epochs"], data["parameters"], data["macs"]) == (1, 3, found.parameters, found.macs)
    assert (data["masked"], data["batch"]) == (found.masked, found.batch)
    assert data["spaces"][1] == {
        "name": "filters",
        "kind": "channels",
        "total": 20,
        "planned": 15,
        "kept": 15,
        "asked": 6,
        "fixed": 0,
    }


def test_names_of_spaces_are_no_markup():
    net = nn.Linear(10, 10)
    pruner = keepk.Pruner(net, keepk.weights("weight", keep=25, name="[bold]all[/bold]"))
    assert "[bold]all[/bold]" in rendered(keepk.report(pruner))


def test_what_is_no_run_or_no_number_is_refused():
    net = nn.Linear(10, 10)
    with pytest.raises(KeepkError, match=r"report: got Linear. Pass the keepk.Pruner of the run"):
        keepk.report(untyped(net))
    pruner = keepk.Pruner(net, keepk.weights("weight", keep=25))
    for error, words in (("1.5", "got str"), (True, "got bool"), (float("nan"), "not a finite"), (-1, "negative")):
        with pytest.raises(KeepkError, match=rf"report: error={error!r}: {words}"):
            keepk.report(pruner, error=untyped(error))


# Output in a console and a notebook -----------------------------------------------------------------------------------


def linears(count):
    """This number of spaces of weights, one per layer, with names that need escaping in HTML."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    spaces = [keepk.weights(f"{i}.weight", keep=3, schedule=[8, 8, 3], name=f"<{i}&>") for i in range(count)]
    return keepk.Pruner(model, spaces)


@pytest.mark.parametrize("count", [1, 3, 40])
def test_a_repr_fits_on_a_screen(count):
    pruner = linears(count)
    pruner.step()
    for shown in (repr(pruner), repr(pruner.report())):
        assert len(shown.splitlines()) <= 25
        assert max(map(len, shown.splitlines())) <= 120
        assert "<0&>" in shown
    assert repr(pruner).startswith("Pruner(epoch 1 of 3)\n  <0&>: 8 of 16 weights kept, 3 at the end")
    assert (repr(pruner.report()) == str(pruner.report())) is (count < 40)
    assert ("... and 30 more spaces" in repr(pruner)) is (count == 40)
    pruner.close()
    assert repr(pruner).startswith("Pruner(epoch 1 of 3, closed)")


def test_a_repr_counts_and_changes_nothing():
    """A debugger may show it at any moment, also while the counts are wrong."""
    pruner = linears(1)
    pruner.step()
    pruner.model[0].weight.data.fill_(1.0)
    assert "8 of 16" in repr(pruner)
    with pytest.warns(keepk.KeepkWarning, match="pruned ones are no longer zero"):
        assert pruner.kept == {"<0&>": 16}


def test_the_method_is_the_function():
    pruner = linears(2)
    pruner.step()
    assert pruner.report(error=1.5) == keepk.report(pruner, error=1.5)
    with pytest.raises(KeepkError, match="report: error"):
        pruner.report(error="low")


def test_notebooks_get_escaped_tables():
    pruner = linears(2)
    pruner.step()
    html = pruner.report()._repr_html_()
    assert html.count("<tr>") == 3
    assert "<td>&lt;0&amp;&gt;</td>" in html
    assert "<0" not in html
    plan = pruner._repr_html_()
    assert "<th>epoch</th><th>&lt;0&amp;&gt;</th>" in plan
    assert [f"<td>{epoch}</td>" in plan for epoch in (1, 2, 3)] == [True, False, True]  # at 2 nothing changes
    assert "<0" not in plan
    assert PlanReport(16, (8, 8, 3))._repr_html_().count("<tr>") == 3


def test_a_plan_is_a_plain_dict(tmp_path):
    """Users store it in the `extra` of a checkpoint, which accepts only plain values."""
    pruner = linears(1)
    assert type(pruner.plan) is dict
    keepk.save_checkpoint(tmp_path, model=pruner.model, extra={"plan": pruner.plan})
    assert keepk.load_checkpoint(tmp_path, model=pruner.model) == {"plan": {"<0&>": (8, 8, 3)}}


def test_a_budget_is_reported_with_what_it_asks_and_reached():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))  # 66 MACs, 11 for each hidden neuron
    space = keepk.channels("0", macs=0.5, metric=keepk.metrics.l2, schedule=[50, 33])
    pruner = keepk.Pruner(net, [space], example=torch.zeros(2, 8))
    pruner.step()
    found = keepk.report(pruner)
    cells = [line.split() for line in str(found).splitlines()]
    assert ["space", "kind", "total", "planned", "kept", "kept", "%", "asked", "implied"] in cells
    assert ["0", "channels", "6", "4", "4", "66.67%", "-", "3"] in cells
    told = "budget 44 of at most 50, 33 at the end (66 MACs per sample at first)"
    assert str(found).splitlines()[-1] == f"51 parameters, 44 MACs per sample; {told}"
    assert found.line.endswith(told)
    data = found.data()
    assert json.loads(json.dumps(data)) == data
    budget = {"cost": "macs", "spaces": ["0"], "dense": 66, "planned": 50, "asked": 33, "reached": 44}
    assert data["budgets"] == [{"name": "0", **budget}]
    assert pruner.budgets == {"0": budget}
    assert (data["spaces"][0]["asked"], data["spaces"][0]["implied"], data["spaces"][0]["planned"]) == (None, 3, 4)
    pruner.step()
    assert keepk.report(pruner).line.endswith("budget 33 of at most 33 (66 MACs per sample at first)")


def test_a_budget_of_masked_channels_counts_them_as_removed():
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    pruner = keepk.Pruner(net, [keepk.channels("0")], example=torch.zeros(2, 8), shrink="never", parameters=0.6)
    pruner.step()
    found = keepk.report(pruner)
    assert found.parameters == 75
    assert found.budgets[0].reached == 39 <= found.budgets[0].asked == 45  # 12 for each of 3 neurons, and 3
    assert found.line.endswith("budget 39 of at most 45 (75 parameters at first)")
