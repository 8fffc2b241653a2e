"""The report of a run says what plain counting says."""

import copy
import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import keepk
from keepk.errors import KeepkError
from networks import NETWORKS
from shrinking import step


def rendered(thing, width=100):
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(thing)
    return stream.getvalue()


def counted_macs(model, example):
    """By torch's own counter, on a copy: two operations for a multiply-accumulate."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(model).eval()(example)
    return counter.get_total_flops() // 2


def counted_parameters(pruner):
    """One by one: the numbers of each parameter that no mask takes away."""
    masks = pruner.masks
    return sum(
        1
        for name, parameter in pruner.model.named_parameters()
        for place in range(parameter.numel())
        if name not in masks or masks[name].reshape(-1)[place]
    )


def mixed_run(shrink="each"):
    """Channels and weights of one network, over three events."""
    model, example = NETWORKS["conv_bn_flatten"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    spaces = [
        keepk.weights(["second.weight", "head.weight"], keep=50, name="weights", schedule=[900, 250, 50]),
        keepk.channels(["first", "second"], keep=6, name="filters", schedule=[15, 10, 6]),
    ]
    return keepk.Pruner(model, spaces, optimizer, example=example, shrink=shrink), example, optimizer


@pytest.mark.parametrize("shrink", ["each", "end", "never"])
def test_every_number_is_that_of_plain_counting(shrink):
    pruner, example, optimizer = mixed_run(shrink)
    model = pruner.model
    planned = {"filters": (20, 15, 10, 6), "weights": (1_764, 900, 250, 50)}
    for epoch in range(4):
        found = keepk.report(pruner)
        assert (found.epoch, found.epochs, found.error) == (epoch, 3, None)
        assert found.parameters == counted_parameters(pruner)
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
    assert (found.parameters, found.macs) == (8 * 6 + 6 + 6 * 3 + 3, 5 * (8 * 6 + 6 * 3))


def test_a_tied_weight_is_counted_once_and_a_mask_of_it_too():
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False))
    net[2].weight = net[0].weight
    pruner = keepk.Pruner(net, keepk.weights("*", keep=10))
    assert keepk.report(pruner).parameters == 36
    pruner.step()
    assert keepk.report(pruner).parameters == 10


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
    assert found.line == "epoch 1/2: kept weight 60 of 100; 70 parameters, error 12.35 %"
    assert str(found).splitlines() == [
        "After epoch 1 of 2",
        "space      kind  total  planned  kept  kept %  asked",
        "------  -------  -----  -------  ----  ------  -----",
        "weight  weights    100       60    60  60.00%     25",
        "70 parameters, error 12.35 %",
    ]


def test_words_lines_and_a_rich_console_say_the_same():
    pruner, _, _ = mixed_run()
    pruner.step()
    found = keepk.report(pruner, error=3)
    macs, parameters = f"{found.macs:,} MACs", f"{found.parameters:,} parameters"
    kept = found.spaces[0].kept
    assert found.line == (
        f"epoch 1/3: kept weights {kept:,} of 1,764, filters 15 of 20; {parameters}, {macs}, error 3.00 %"
    )
    assert "\n" not in found.line
    for text in (str(found), rendered(found)):
        lines = [line.rstrip() for line in text.splitlines() if line.strip()]
        assert lines[0] == "After epoch 1 of 3"
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
    assert data["spaces"][1] == {
        "name": "filters",
        "kind": "channels",
        "total": 20,
        "planned": 15,
        "kept": 15,
        "asked": 6,
    }


def test_names_of_spaces_are_no_markup():
    net = nn.Linear(10, 10)
    pruner = keepk.Pruner(net, keepk.weights("weight", keep=25, name="[bold]all[/bold]"))
    assert "[bold]all[/bold]" in rendered(keepk.report(pruner))


def test_what_is_no_run_or_no_number_is_refused():
    net = nn.Linear(10, 10)
    with pytest.raises(KeepkError, match=r"report: got Linear. Give the keepk.Pruner of the run"):
        keepk.report(net)
    pruner = keepk.Pruner(net, keepk.weights("weight", keep=25))
    for error, words in (("1.5", "got str"), (True, "got bool"), (float("nan"), "not a finite"), (-1, "negative")):
        with pytest.raises(KeepkError, match=rf"report: error={error!r}: {words}"):
            keepk.report(pruner, error=error)
