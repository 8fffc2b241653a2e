"""`keepk prune`: the command loads, prunes, saves and measures; its options and errors."""

import io
import json
import shlex

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import keepk
from keepk.cli.commands import app
from keepk.deploy.prune import STAGES
from keepk.reports.terminal import stage_progress

SOURCE = """
import torch
from torch import nn


class Config:
    use_cache = True


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.BatchNorm2d(24), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10),
        )
        self.config = Config()

    def forward(self, x):
        y = super().forward(x)
        return (y, y) if self.config.use_cache == "twice" else y


def loss(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


seven = 7
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"net_{tmp_path.name}"  # imported modules stay in sys.modules, so each test has its own
    (tmp_path / f"{name}.py").write_text(SOURCE)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(24, 3, 8, 8, generator=generator), torch.randint(10, (24,), generator=generator)
    save_file({"inputs": images, "targets": labels}, tmp_path / "batches.safetensors")
    module = __import__(name)
    torch.manual_seed(0)
    net = module.Net()
    for norm in (net[1], net[4]):
        nn.init.uniform_(norm.weight)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    save_file({"inputs": torch.tensor(3.0)}, tmp_path / "number.safetensors")
    return tmp_path, module


def call(folder, options):
    line = f"prune {folder[1].__name__}:Net -i 2x3x8x8 --weights w.safetensors --out small {options}"
    return CliRunner().invoke(app, shlex.split(line), env={"COLUMNS": "160", "TERM": "dumb"})


@pytest.mark.parametrize(
    "options",
    [
        "--macs 0.5",
        "--parameters 2_000 --round-to 4 --layer-floor 0.2",
        "--keep 20 --metric l2 --exclude 8",
        "--macs 0.5 --per-layer",
        "--macs 0.5 --round-to auto",
        "--prune 0.5 --metric blend --calibrate batches.safetensors --batch 8",
        "--macs 0.5 --metric activation --calibrate batches.safetensors --set use_cache=false",
        "--macs 0.5 --metric taylor --calibrate batches.safetensors --loss MODULE:loss",
    ],
)
@pytest.mark.filterwarnings("ignore:space .* would keep:keepk.KeepkWarning")
def test_prune_saves_a_smaller_model_that_loads(folder, options):
    path, module = folder
    result = call(folder, options.replace("MODULE", module.__name__))
    assert result.exit_code == 0, result.output
    loaded = keepk.load(module.Net(), path / "small")
    assert loaded[0].out_channels + loaded[3].out_channels < 40
    assert "Saved to small" in result.output
    assert "MACs per sample" in result.output
    assert "Layers now; kept counts leave out masked units" in result.output
    for layer, width in ((0, loaded[0].out_channels), (3, loaded[3].out_channels)):
        row = next(line for line in result.output.splitlines() if line.split()[:2] == [str(layer), "Conv2d"])
        assert row.split()[2:4] == [str({0: 16, 3: 24}[layer]), str(width)]
    kept = json.loads((path / "small" / "arch.json").read_text())["certificate"]
    assert next(iter(kept.values()))["kept"] == loaded[0].out_channels + loaded[3].out_channels


def test_the_progress_bar_names_each_stage_on_a_terminal_only():
    for is_terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=is_terminal, width=100, color_system=None)
        with stage_progress(console, len(STAGES)) as begin:
            for stage in STAGES:
                begin(stage)
                console.print(stage.upper())  # draws the bar again
        assert all((stage in stream.getvalue()) == is_terminal for stage in STAGES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "neither"),
        ("--macs half", "--macs half: not a number. Pass a share such as 0.5"),
        ("--macs 0.5 --keep 3", "keep=3"),
        ("--macs 0.5 --round-to some", '--round-to some: not a whole number. Pass one, or "auto".'),
        ("--keep 20 --round-to auto", 'round_to="auto" is for budgets, got keep=20'),
        ("--macs 0.5 --metric l3", "--metric 'l3': unknown. Pass one of bn_scale, blend"),
        ("--macs 0.5 --metric taylor", "metric=taylor is computed from data"),
        ("--macs 0.5 --metric taylor --calibrate batches.safetensors", "needs gradients of a loss, got loss=None"),
        ("--macs 0.5 --loss MODULE:seven", "seven has type int. Name a function"),
        ("--macs 0.5 --loss loss", "not of the form module:name"),
        ("--macs 0.5 --loss no_such_module:loss", "--loss 'no_such_module:loss': there is no module"),
        ("--macs 0.5 --loss MODULE:los", "--loss 'MODULE:los': MODULE has no 'los'"),
        ("--macs 0.5 --set cache", "not of the form name=value"),
        ("--macs 0.5 --set cash=1", "neither the model nor its config has an attribute 'cash'"),
        ("--macs 0.5 --calibrate w.safetensors", "Save the samples as 'inputs'"),
        ("--macs 0.5 --calibrate number.safetensors", "'inputs' is a single number. Save one row of it per sample"),
        ("--macs 0.5 --loss MODULE:loss", "which is for metrics that need gradients"),
        ("--macs 0.5 --calibrate missing.safetensors", "missing.safetensors: cannot be read"),
        ("--macs 0.5 --weights batches.safetensors", "the weights do not fit the model"),
    ],
)
def test_prune_refuses_in_one_line_and_saves_nothing(folder, options, words):
    path, module = folder
    result = call(folder, options.replace("MODULE", module.__name__))
    assert result.exit_code == 1, result.output
    assert words.replace("MODULE", module.__name__) in " ".join(result.output.split())
    assert not (path / "small").exists()


def test_inspect_sets_attributes_too(folder):
    line = f"inspect {folder[1].__name__}:Net -i 2x3x8x8 --set config.use_cache=twice --json"
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == 0, result.output


def test_a_folder_is_pruned_on_disk(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    dense, small = str(tmp_path / "dense"), str(tmp_path / "small")
    options = ["--select", "*.mlp*", "--keep", "8", "--per-layer"]
    result = CliRunner().invoke(app, ["prune", dense, "--out", small, *options], env={"TERM": "dumb"})
    assert result.exit_code == 0, result.output
    assert "intermediate_size 12 -> 8" in result.output
    assert LlamaForCausalLM.from_pretrained(small).model.layers[0].mlp.up_proj.out_features == 8
    for more, words in ((["--set", "a=1"], "got --set, which"), ([], "exists")):
        result = CliRunner().invoke(app, ["prune", dense, "--out", small, *options, *more], env={"TERM": "dumb"})
        assert result.exit_code == 1
        assert words in result.output
    result = CliRunner().invoke(app, ["prune", "torch.nn:ReLU", "--out", small], env={"TERM": "dumb"})
    assert "is no folder, and a model needs an input" in result.output
