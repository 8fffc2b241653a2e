"""The code that users copy first: the scripts in examples/, the README's first block, and the API index."""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest
import torch

import keepk
import keepk.typing

REPOSITORY = Path(__file__).parents[2]
INDEX = (REPOSITORY / "docs" / "api.md").read_text()
PUBLIC = [
    *(f"keepk.{name}" for name in keepk.__all__),
    *(f"keepk.metrics.{name}" for name in keepk.metrics.__all__),
    "keepk.typing",
    *keepk.typing.__all__,
    *(name for name, value in vars(keepk.errors).items() if isinstance(value, type)),
]


def script(name):
    """A script in examples/, imported by its path."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prune_a_convnet():
    return script("prune_a_convnet")


@pytest.mark.filterwarnings("error::keepk.KeepkWarning")
def test_the_example_keeps_exactly_what_is_asked(prune_a_convnet, tmp_path, capsys):
    """Runs it for a few epochs; it returns the network that it loaded from its files."""
    with torch.random.fork_rng(devices=[]):
        small = prune_a_convnet.run(channels=96, weights=100, dense_epochs=1, fine_tune_epochs=1, folder=tmp_path)
    convolutions = [layer for layer in small.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert sum(layer.out_channels for layer in convolutions) == 96
    assert small.head[2].weight.count_nonzero() <= 100
    assert {path.name for path in tmp_path.iterdir()} >= {"small", "small.onnx"}
    assert "channels  channels    192       96    96  50.00%     96" in capsys.readouterr().out


def test_the_example_for_transformers_continues_after_a_kill(tmp_path, capsys):
    """Its second run finds the checkpoint of the first one, and plain transformers loads the model."""
    example = script("prune_a_llama")
    options = {"mlp": 96, "groups": 4, "epochs": 3, "folder": tmp_path}
    with torch.random.fork_rng(devices=[]):
        loaded = example.run(**options)
        again = example.run(**options)
    config = loaded.config
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (48, 4, 2)
    assert all(torch.equal(one, two) for one, two in zip(loaded.parameters(), again.parameters(), strict=True))
    assert not (tmp_path / "model" / "arch.json").exists()
    assert "'keepk/kept/heads': 4" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*(many workers|number of training batches|is not empty|treespec)")
@pytest.mark.parametrize("name", ["prune_in_lightning", "prune_with_accelerate"])
def test_the_examples_for_frameworks_continue_after_a_kill(name, tmp_path):
    """The second run finds the checkpoint of the first one."""
    example = script(name)
    with torch.random.fork_rng(devices=[]):
        small = example.run(channels=24, epochs=3, folder=tmp_path)
        again = example.run(channels=24, epochs=3, folder=tmp_path)
    assert small[0].out_channels + small[4].out_channels == 24
    assert all(torch.equal(one, two) for one, two in zip(small.parameters(), again.parameters(), strict=True))


def test_the_examples_command_line(prune_a_convnet, monkeypatch):
    asked = {}
    monkeypatch.setattr(prune_a_convnet, "run", lambda **options: asked.update(options))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["prune_a_convnet.py", "--channels", "40", "--out", "there"])
    prune_a_convnet.main()
    assert asked == {
        "channels": 40,
        "weights": 100,
        "dense_epochs": 6,
        "fine_tune_epochs": 5,
        "folder": Path("there"),
    }


@pytest.mark.filterwarnings("error::keepk.KeepkWarning")
def test_the_readmes_first_block_runs_by_copy_and_paste(tmp_path, monkeypatch):
    """It prints what its comments say."""
    found = re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert found is not None
    block = found[1]
    said = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "README.md", "exec"), {})
    assert len(said) == 2
    assert printed.getvalue().splitlines() == said
    assert {path.name for path in (tmp_path / "small").iterdir()} == {"model.safetensors", "arch.json"}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_index(name):
    assert f"`{name}`" in INDEX


def test_the_index_has_no_other_names():
    assert set(re.findall(r"`(keepk\.[\w.]+)`", INDEX)) <= set(PUBLIC)
