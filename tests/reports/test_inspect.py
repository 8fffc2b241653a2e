"""The output of keepk.inspect: its text, its JSON, its counts, and the command."""

import dataclasses
import io
import json
import re
import shlex
import sys

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import keepk
from keepk.cli.commands import app
from keepk.errors import ShrinkError, TraceError
from keepk.reports.inspection import AS_A_WHOLE, SCREEN
from networks import NETWORKS
from untyped import untyped


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 3, groups=2),
        nn.Flatten(), nn.Linear(12 * 8 * 8, 10),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = 3
        self.query, self.key, self.value = (nn.Linear(7, 12, bias=False) for _ in range(3))
        self.out = nn.Linear(12, 5)

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.num_heads, -1).transpose(1, 2)

    def forward(self, x):
        query, key, value = (self.heads(layer(x)) for layer in (self.query, self.key, self.value))
        weights = (query @ key.transpose(-1, -2)).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


class LooksAtValues(nn.Module):
    """Its Python branches on a value, which a copy without weights does not have."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden.relu() if hidden.sum().item() < 1e9 else hidden)


def costs(report):
    return {layer.name: (layer.parameters, layer.macs) for layer in report.layers}


# ---- counts, by hand


def test_a_convolutional_network_by_hand():
    report = keepk.inspect(lenet(), torch.zeros(2, 1, 24, 24))
    assert costs(report) == {
        "0": (6 * 25 + 6, 20 * 20 * 6 * 25),
        "1": (12, 0),
        "4": (12 * 3 * 9 + 12, 8 * 8 * 12 * 3 * 9),
        "6": (768 * 10 + 10, 768 * 10),
    }
    assert report.parameters == 156 + 12 + 336 + 7690
    assert (report.batch, report.macs) == (2, 60_000 + 20_736 + 7_680)


def test_a_linear_network_by_hand():
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    assert costs(keepk.inspect(net, torch.zeros(2, 8))) == {"0": (54, 8 * 6), "2": (21, 6 * 3)}


def test_an_attention_by_hand():
    batch, time = 2, 5
    products = 2 * 3 * time * time * 4  # queries with keys, weights with values: 3 heads of 4
    projection = time * 7 * 12
    assert costs(keepk.inspect(Attention(), torch.zeros(batch, time, 7))) == {
        "": (0, products),
        "query": (84, projection),
        "key": (84, projection),
        "value": (84, projection),
        "out": (65, time * 12 * 5),
    }


def test_a_recurrent_layer_by_hand():
    """torch's counter misses it on a CPU, where the whole layer is one operation."""
    batch, time, inputs, hidden = 2, 5, 7, 6
    net = nn.LSTM(inputs, hidden, batch_first=True)
    steps = time * 4 * hidden * (inputs + hidden)
    assert costs(keepk.inspect(net, torch.zeros(batch, time, inputs))) == {
        "": (4 * hidden * (inputs + hidden + 2), steps)
    }


def test_a_layer_that_runs_twice_costs_twice_and_has_its_parameters_once():
    shared = nn.Linear(6, 6)
    net = nn.Sequential(nn.Linear(8, 6), shared, nn.ReLU(), shared, nn.Linear(6, 3))
    assert costs(keepk.inspect(net, torch.zeros(2, 8)))["1"] == (42, 2 * 6 * 6)


def test_tied_weights_count_once():
    net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11, bias=False))
    net[1].weight = net[0].weight
    report = keepk.inspect(net, torch.zeros(2, 5, dtype=torch.int64))
    assert costs(report) == {"0": (66, 0), "1": (0, 5 * 6 * 11)}
    assert report.parameters == 66


def test_a_model_that_looks_at_values_is_counted_with_its_weights():
    report = keepk.inspect(LooksAtValues(), torch.randn(2, 7))
    assert costs(report) == {"first": (48, 42), "last": (21, 18)}
    assert [(space.name, space.units) for space in report.spaces] == [("first", 6)]


# ---- counts, against torch's own on the real model


def counted_by_torch(model, example):
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its fused operation is not counted
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model.eval()(*example) if isinstance(example, tuple) else model.eval()(example)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name",
    ["attention_by_hand", "fused_qkv", "multihead_attention", "encoder_layer", "grouped", "transposed", "conv3d",
     "tied_embedding", "roll"],
)  # fmt: skip
def test_totals_are_those_of_torchs_counter_on_the_real_model(name):
    model, example = NETWORKS[name]()
    report = keepk.inspect(model, example)
    assert report.batch == len(example[0] if isinstance(example, tuple) else example)
    assert 2 * report.macs * report.batch == counted_by_torch(model, example)
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())


# ---- findings


def test_it_says_what_the_graph_says():
    model, example = NETWORKS["grouped"]()
    report, graph = keepk.inspect(model, example), keepk.trace(model, example)
    assert [(space.name, space.kind, space.units) for space in report.spaces] == [
        (space.name, space.kind, len(space.units)) for space in graph.groups
    ]
    for found, space in zip(report.spaces, graph.groups, strict=True):
        assert (found.exact, found.lossy, found.why) == (len(space.units), 0, "")
        assert [(axis.tensor, axis.axis) for axis in found.axes] == [(tensor, axis) for tensor, axis, _ in space.axes]
    fixed = [(axis.tensor, axis.axis, axis.channels) for group in report.fixed for axis in group.axes]
    assert sorted(fixed) == sorted((axis.tensor, axis.axis, axis.channels) for axis in graph.fixed)
    assert (
        [part.parts for part in report.bindings]
        == [tuple(map(len, blocks)) for blocks in graph.bindings]
        == [(6, 6), (4, 4)]
    )


class OneUnit(nn.Module):
    """The first layer's two channels are added to each other, so that they are one unit."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(7, 2), nn.Linear(2, 8), nn.Linear(8, 4)

    def forward(self, x):
        pair = self.first(x)
        return self.last(self.middle(pair + pair.flip(-1)))


def test_a_unit_that_is_all_of_a_layer_cannot_shrink():
    model, example = OneUnit(), torch.zeros(2, 7)
    graph, report = keepk.trace(model, example), keepk.inspect(model, example)
    whole = graph.groups[0]
    with pytest.raises(ShrinkError, match="nothing would be left"):
        graph.edits(whole.units)
    assert [space.name for space in report.spaces] == ["middle"]
    assert report.fixed[0].why == AS_A_WHOLE
    assert {(axis.tensor, axis.axis) for axis in report.fixed[0].axes} == {axis[:2] for axis in whole.axes}
    assert all(axis.channels == axis.total for axis in report.fixed[0].axes)
    assert "Can shrink: 8 units in 1 space\n" in str(report)
    assert "Cannot shrink\n  axis 0 of first.weight, first.bias; axis 1 of middle.weight\n" in str(report)


def test_lossy_units_come_with_the_reason():
    model, example = NETWORKS["layer_norm"]()
    (space,) = keepk.inspect(model, example).spaces
    assert (space.name, space.units, space.exact, space.lossy) == ("first", 12, 0, 12)
    assert space.why == "is normalised over"
    assert re.fullmatch(r"aten::native_layer_norm in norm at refused\.py:\d+", str(space.where[0]))


def test_reasons_of_every_model_are_folded():
    fixed = keepk.inspect(lenet(), torch.zeros(2, 1, 24, 24)).fixed
    assert [(group.kind, [(axis.tensor, axis.axis) for axis in group.axes]) for group in fixed] == [
        ("output", [("6.weight", 0), ("6.bias", 0)]),
        ("kernel", [("0.weight", 2), ("0.weight", 3), ("4.weight", 2), ("4.weight", 3)]),
    ]


def test_one_line_of_repeated_blocks_is_one_reason():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x):
            return x + self.last(self.first(x).roll(1, -1))

    (rolled,) = (
        group
        for group in keepk.inspect(nn.Sequential(Block(), Block(), Block()), torch.zeros(2, 6)).fixed
        if group.kind == "operation"
    )
    assert [where.module for where in rolled.where] == ["0", "1", "2"]
    assert [axis.tensor for axis in rolled.axes if axis.tensor.endswith("weight")] == [
        f"{n}.first.weight" for n in range(3)
    ]


def test_the_model_is_unchanged():
    model, example = NETWORKS["conv_bn_flatten"]()
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    kept = {name: id(parameter) for name, parameter in model.named_parameters()}
    keepk.inspect(model, example)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == kept
    assert all(module.training for module in model.modules())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_wrapped_models_go_by_the_names_of_the_model_inside():
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    assert keepk.inspect(nn.DataParallel(net), torch.zeros(2, 8)) == keepk.inspect(net, torch.zeros(2, 8))


# ---- output


def test_the_table_in_words():
    model, example = NETWORKS["grouped"]()
    printed = str(keepk.inspect(model, example))
    for words in (
        "Grouped: 879 parameters, 48,755 MACs per sample (example: 3x3x6x10:float64)\n",
        "Can shrink: 27 units in 3 spaces\n",
        "  first       12  channel    exact  axis 0 of first.weight, first.bias; axis 1 of grouped.weight\n",
        "  read from an axis without channels, such as an input of the model: axis 1 of first.weight\n",
        "  kernels of convolutions: 4 axes\n",
        "Must lose equal numbers\n  2 parts of 6 units: first\n      goes into a grouped convolution (aten::conv",
        "Layers (MACs per sample)\n",
        "  total                   879  48,755  100.00%",
    ):
        assert words in printed
    assert re.search(
        r"^  outputs of the model \(\w+\.py:\d+\): axis 0 of head\.weight, head\.bias$", printed, re.MULTILINE
    )


def test_a_reason_stands_with_its_operation_and_line():
    model, example = NETWORKS["literal_sizes"]()
    printed = str(keepk.inspect(model, example))
    assert "Can shrink: nothing\nCannot shrink\n  axis 0 of first.weight, first.bias\n" in printed
    assert re.search(
        r"the size is written in the model's Python: .* \(aten::view\s+at\s+refused\.py:\d+\)", printed, re.DOTALL
    )


def test_lossy_in_words():
    model, example = NETWORKS["layer_norm"]()
    printed = str(keepk.inspect(model, example))
    assert re.search(r"^  first\s+12  channel    lossy  axis 0 of .* and \d more$", printed, re.MULTILINE)
    assert (
        "  lossy (removing one changes what the others compute): first\n      is normalised over (aten::native_layer"
        in printed
    )


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_rich_console_of_any_width_loses_nothing(width):
    model, example = NETWORKS["encoder_layer"]()
    report = keepk.inspect(model, example)
    console = Console(width=width, file=(written := io.StringIO()))
    console.print(report)
    shown = written.getvalue()
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width
    numbers = {f"{number:,}" for layer in report.layers for number in (layer.parameters, layer.macs)}
    assert [number for number in (*numbers, f"{report.macs:,}", f"{report.parameters:,}") if number not in shown] == []
    if width == 200:
        names = [*(layer.name for layer in report.layers), *(space.name for space in report.spaces)]
        assert [name for name in names if name not in shown] == []


@pytest.mark.parametrize("name", ["grouped", "encoder_layer", "index_by_tensor"])
def test_the_json_form_comes_back_as_it_went(name):
    model, example = NETWORKS[name]()
    report = keepk.inspect(model, example)
    assert json.loads(report.json()) == report.data()
    assert list(report.data()) == [
        "model",
        "example",
        "spaces",
        "fixed",
        "bindings",
        "layers",
        "batch",
        "unknown",
        "attributes",
        "parameters",
        "macs",
    ]
    assert report.data()["layers"] == [dataclasses.asdict(layer) for layer in report.layers]
    assert len(report.data()["fixed"]) == len(report.fixed)


def test_the_report_is_frozen_and_plain():
    report = keepk.inspect(lenet(), torch.zeros(2, 1, 24, 24))
    with pytest.raises(dataclasses.FrozenInstanceError):
        untyped(report).model = "other"
    assert hash(report) == hash(keepk.inspect(lenet(), torch.zeros(2, 1, 24, 24)))


def test_an_interactive_session_shows_the_table():
    report = keepk.inspect(lenet(), torch.zeros(2, 1, 24, 24))
    assert repr(report) == str(report)


def test_the_repr_of_a_large_model_fits_on_a_screen():
    layers = [layer for _ in range(100) for layer in (nn.Linear(6, 6), nn.ReLU())]
    report = keepk.inspect(nn.Sequential(*layers, nn.Linear(6, 3)), torch.zeros(2, 6))
    lines = repr(report).splitlines()
    assert len(str(report).splitlines()) > 200
    assert len(lines) <= SCREEN
    assert lines[0] == str(report).splitlines()[0]
    assert "Can shrink: 600 units in 100 spaces" in lines
    assert lines.count("  ... and 96 more rows") == 1
    assert [line for line in lines if line.startswith("  total ")] == [
        line for line in str(report).splitlines() if line.startswith("  total ")
    ]
    assert lines[-1] == "print() shows all of it."


def test_a_notebook_gets_every_table_and_note_escaped():
    model, example = NETWORKS["layer_norm"]()
    report = dataclasses.replace(keepk.inspect(model, example), unknown=("a <script> in forward",))
    html = report._repr_html_()
    assert html.count("<table>") == 2
    assert "a &lt;script&gt; in forward" in html
    assert "<script>" not in html
    assert "is normalised over" in html
    assert [layer.name for layer in report.layers if f">{layer.name}<" not in html] == []


def test_strange_input_is_refused_in_words():
    with pytest.raises(TraceError, match=r"got int as the model\. Pass a torch\.nn\.Module"):
        keepk.inspect(untyped(3), torch.zeros(2, 8))
    with pytest.raises(TraceError, match=r"Linear: its forward failed on the example \(RuntimeError"):
        keepk.inspect(nn.Linear(8, 3), torch.zeros(2, 7))
    with pytest.raises(TraceError, match=r"example: got str"):
        keepk.inspect(nn.Linear(8, 3), "2x8")


# ---- the command

MODULE = """
import torch
from torch import nn

net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
number = 3

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(11, 6), nn.Linear(6, 4), nn.Linear(4, 2)
    def forward(self, words, weights):
        return self.last(self.first(self.table(words) * weights))

def make_net():
    return net

def make_nothing():
    return None

def needs_width(width):
    return nn.Linear(width, 2)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a module in it, which is not left imported."""
    (tmp_path / "nets_to_inspect.py").write_text(MODULE)
    (tmp_path / "broken_nets.py").write_text("import torch\nimport no_such_package_at_all\n")
    (tmp_path / "raising_nets.py").write_text("raise OSError('no disk')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("nets_to_inspect", "broken_nets", "raising_nets"):
        sys.modules.pop(name, None)


def call(line):
    return CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "100", "TERM": "dumb"})


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", ["net", "make_net"])
def test_the_command_inspects_a_model_or_what_a_function_makes(name):
    result = call(f"inspect nets_to_inspect:{name} --input 2x8")
    assert result.exit_code == 0, result.stderr
    assert "Sequential: 75 parameters, 66 MACs per sample (example: 2x8)" in result.stdout
    assert "Can shrink: 6 units in 1 space" in result.stdout


@pytest.mark.usefixtures("folder")
def test_the_command_prints_json():
    result = call("inspect nets_to_inspect:net --input 2x8 --json")
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    assert json.loads(result.stdout) == keepk.inspect(net, (torch.zeros(2, 8),)).data()


@pytest.mark.usefixtures("folder")
def test_several_inputs_and_their_types():
    result = call("inspect nets_to_inspect:Words --input 2x5:int64 --input 2x5x6 --json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["model"], found["example"], found["macs"]) == ("Words", ["2x5:int64", "2x5x6"], 5 * (24 + 8))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("nets_to_inspect --input 2x8", "model 'nets_to_inspect': not of the form module:name."),
        (
            "nets_to_inspect.py:net --input 2x8",
            "model 'nets_to_inspect.py:net': names a file, not a module. Leave out \".py\": nets_to_inspect:net.",
        ),
        ("./nets_to_inspect.py:net --input 2x8", 'Leave out ".py": nets_to_inspect:net.'),
        ("deeper/nets.py:net --input 2x8", 'Leave out ".py": deeper.nets:net.'),
        ("no_such_nets:net --input 2x8", "there is no module 'no_such_nets' in "),
        ("nets_to_inspect.deeper:net --input 2x8", "there is no module 'nets_to_inspect.deeper'"),
        (
            "broken_nets:net --input 2x8",
            "importing broken_nets failed (ModuleNotFoundError: No module named 'no_such_pack",
        ),
        ("raising_nets:net --input 2x8", "importing raising_nets failed (OSError: no disk)."),
        ("nets_to_inspect:nat --input 2x8", "nets_to_inspect has no 'nat'. Nearest names: 'net'"),
        ("nets_to_inspect:number --input 2x8", "number has type int. Name a torch.nn.Module or a callable"),
        ("nets_to_inspect:needs_width --input 2x8", "needs_width() failed (TypeError: needs_width() missing 1"),
        ("nets_to_inspect:make_nothing --input 2x8", "make_nothing() returned NoneType. Return a torch.nn.Module."),
        ("nets_to_inspect:net --input 2,8", "input '2,8': not of the form SIZExSIZE... or SIZExSIZE...:DTYPE."),
        ("nets_to_inspect:net --input 2x0", "input '2x0': not of the form"),
        ("nets_to_inspect:net --input 2x8:whole", "input '2x8:whole': not of the form"),
        ("nets_to_inspect:net --input 2x8:nn", "input '2x8:nn': not of the form"),
        (
            "nets_to_inspect:net --input 99999999999x99999999999",
            "'99999999999x99999999999': the tensor cannot be created (Runt",
        ),
        (f"nets_to_inspect:net --input {10**30}", "the tensor cannot be created ("),
        ("nets_to_inspect:net --input 2x9", "model Sequential: its forward failed on the example (RuntimeError"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, words):
    result = call(f"inspect {arguments}")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.startswith("Error: ")
    assert "Traceback" not in result.stderr


def test_the_command_without_input_is_a_usage_error():
    result = call("inspect torch.nn:ReLU")
    assert result.exit_code == 2
    assert "--input" in result.stderr


def test_help_says_all_that_is_needed():
    result = call("inspect --help")
    assert result.exit_code == 0
    for words in (
        "Example: keepk inspect mynet:make_model --input 2x3x224x224",
        "MODULE:NAME",
        "--json",
        "2x12:int64",
        "SHAPE",
    ):
        assert words in result.stdout


@pytest.mark.filterwarnings("ignore:.*quantization:DeprecationWarning", "ignore::UserWarning")
def test_a_model_prepared_for_quantisation_gets_the_cure():
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    net.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    prepared = torch.ao.quantization.prepare_qat(net.train())
    found = str(keepk.inspect(prepared, torch.zeros(2, 8)))
    assert "quantised or prepared for it" in found
    assert "Prune first and quantise afterwards" in found
