"""The layers of a report agree with the modules of the model, and add up to its cost."""

import json
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import keepk
from keepk.errors import KeepkError
from keepk.run.channel_members import modules_of
from keepk.run.channels import ChannelSide
from networks import NETWORKS
from reported_runs import mixed_run, rendered
from traced_once import traced_before, traced_network

pytestmark = [
    pytest.mark.filterwarnings("ignore:space .* cannot be removed and (is|are) not:keepk.KeepkWarning"),
    pytest.mark.filterwarnings("ignore:space .* are tied at the cut:keepk.KeepkWarning"),
]


def by_width(model):
    """By name, the channels that a convolution or linear layer produces."""
    kinds = (nn.Conv2d, nn.Linear)
    return {name: len(it.weight) for name, it in model.named_modules() if isinstance(it, kinds)}


@pytest.mark.parametrize("shrink", ["each", "never"])
def test_channels_and_weights_of_each_layer(shrink):
    pruner, twin = mixed_run(shrink)[0], mixed_run("each")[0]  # the twin is really cut
    before, sizes = by_width(pruner.model), {n: p.numel() for n, p in pruner.model.named_parameters()}
    while not pruner.done:
        pruner.step()
        twin.step()
        layers, masks = pruner.report().layers, pruner.masks
        for name in ("first", "second"):
            assert layers[name].channels == before[name]
            assert layers[name].channels_kept == by_width(twin.model)[name]
        assert sum(it.channels_kept or 0 for it in layers) == pruner.kept["filters"]
        for name in ("second", "head"):
            assert layers[name].weights == sizes[f"{name}.weight"]
            assert layers[name].weights_kept == int(masks[f"{name}.weight"].sum())
        assert sum(it.weights_kept or 0 for it in layers) == pruner.kept["weights"]
        assert layers["head"].channels is None
        assert layers["first"].weights is None


@pytest.mark.parametrize(
    ("name", "at"),
    [("residual", "output"), ("dense_block", "input"), ("lstm", "output"), ("tied_autoencoder", "output")],
)
def test_costs_add_up_to_those_of_the_model(name, at):
    model, example, graph = traced_network(name)
    with traced_before(model, example, graph):
        pruner = keepk.Pruner(model, keepk.channels("*", prune=0.3, at=at, name="all"), example=example)
    for _ in range(2):
        report = pruner.report()
        assert sum(it.parameters for it in report.layers) == report.parameters
        assert sum(it.macs or 0 for it in report.layers) == report.macs
        side = pruner._session.channels
        assert isinstance(side, ChannelSide)
        listed = {it.name for it in report.layers if it.channels is not None}
        names, known = {n for it in side.members["all"].layers for n in modules_of(it, at)}, dict(model.named_modules())
        assert listed == {name for name in names if name in known}
        pruner.step()


def test_layers_of_one_residual_stream_list_the_same_channels():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.out = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x):
            return self.out(self.one(x) + self.other(x))

    torch.manual_seed(0)
    pruner = keepk.Pruner(Sum(), keepk.channels("*", keep=3), example=torch.zeros(2, 4))
    pruner.step()
    layers = pruner.report().layers
    assert [(it.name, it.channels, it.channels_kept) for it in layers] == [
        ("one", 8, 3),
        ("other", 8, 3),
        ("out", None, None),
    ]


def test_heads_are_listed_at_their_module_only():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 8, batch_first=True)
    pruner = keepk.Pruner(model, keepk.channels("self_attn*", keep=3), example=torch.randn(2, 5, 16))
    for kept in (4, 3):
        layers = pruner.report().layers
        assert [(it.name, it.channels, it.channels_kept) for it in layers if it.channels] == [("self_attn", 4, kept)]
        assert "(removed)" not in str(layers)
        pruner.step()


def test_a_parametrized_layer_is_one_row():
    torch.manual_seed(0)
    model = nn.Sequential(weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
    with keepk.Pruner(model, keepk.channels("0", keep=3), example=torch.zeros(2, 4)) as pruner:
        pruner.step()
        report = pruner.report()
    assert [(it.name, it.channels_kept) for it in report.layers] == [("0", 3), ("2", None)]
    assert sum(it.parameters for it in report.layers) == report.parameters
    weights = keepk.Pruner(model, keepk.weights("0.*", keep=3))
    assert [it.name for it in weights.report().layers if it.weights] == ["0"]


def test_revived_and_compacted_units_are_counted_as_they_are():
    torch.manual_seed(0)
    first = nn.Linear(4, 6)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = keepk.Pruner(model, keepk.weights("*.weight", keep=6, name="w"), optimizer, example=torch.zeros(2, 4))
    pruner.step()
    with torch.no_grad():
        first.weight[pruner.masks["0.weight"].logical_not()] = 1.0
    with pytest.warns(keepk.KeepkWarning):
        layers = pruner.report().layers
    masked = {name: int(mask.sum()) for name, mask in pruner.masks.items()}
    assert layers["0"].weights_kept == 24 > masked["0.weight"]
    pruner.apply_masks()
    keepk.compact(model, torch.zeros(2, 4))
    layers = pruner.report().layers
    assert layers["0"].weights == 24
    assert layers["0"].weights_kept == int(pruner.masks["0.weight"].sum()) <= first.weight.numel()
    assert sum(it.weights_kept or 0 for it in layers) == pruner.report().spaces[0].kept


def test_the_table_plainly_richly_in_html_and_as_data():
    pruner, _, _ = mixed_run()
    pruner.step()
    report = pruner.report()
    lines = str(report.layers).splitlines()
    assert lines[0].startswith("Layers now; kept counts leave out masked units, parameters and MACs include masked")
    assert lines[0].endswith("MACs are per sample")
    units = ["kept", "kept", "%"]
    assert lines[1].split() == ["layer", "type", "channels", *units, "weights", *units, "parameters", "MACs"]
    assert lines[-1].split()[0] == "total"
    assert lines[-1].split()[-2:] == [f"{report.parameters:,}", f"{report.macs:,}"]
    assert any(line.startswith("others") for line in lines)  # the norms
    for name in ("first", "second", "head"):
        assert name in rendered(report.layers, 140)
        assert f'<td style="text-align: left">{name}</td>' in report.layers._repr_html_()
    data = report.data()
    assert json.loads(json.dumps(data)) == data
    assert data["layers"] == report.layers.data()
    assert (
        repr(report.layers) == f"<LayersReport: {len(report.layers)} layers, 3 of them in a space; print() shows them>"
    )
    assert len(str(report).splitlines()) < 10  # the report itself stays short


def test_without_an_example_there_are_no_macs():
    torch.manual_seed(0)
    pruner = keepk.Pruner(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), keepk.weights("0.*", keep=3))
    pruner.step()
    layers = pruner.report().layers
    assert [(it.name, it.weights, it.weights_kept, it.macs) for it in layers] == [
        ("0", 30, 3, None),
        ("1", None, None, None),
    ]
    assert "MACs" not in str(layers)


def test_an_unknown_layer_is_refused():
    pruner, _, _ = mixed_run()
    with pytest.raises(KeepkError, match="report: the model has no layer 'third' with parameters or MACs"):
        pruner.report().layers["third"]


def test_the_plot_is_saved(tmp_path):
    model, example = NETWORKS["conv_bn_flatten"]()
    with keepk.Pruner(model, keepk.channels("*", keep=9), example=example) as pruner:
        pruner.step()
        layers = pruner.report().layers
    layers.plot(tmp_path / "layers.png")
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    layers.plot(str(tmp_path / "layers.svg"))
    assert "first" in (tmp_path / "layers.svg").read_text()
    with pytest.raises(KeepkError, match=r"layers\.xyz: .*not supported"):
        layers.plot(tmp_path / "layers.xyz")


def test_the_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    pruner, _, _ = mixed_run()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(KeepkError, match=r'pip install "keepk\[plot\]"'):
        pruner.report().layers.plot(tmp_path / "layers.png")
