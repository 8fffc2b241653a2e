"""The examples of docs/quantisation.md with tools that are no dependencies of keepk; run where they are installed."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import keepk
from keepk.errors import FileError, SpaceError

PAGE = (Path(__file__).parents[2] / "docs" / "quantisation.md").read_text()


@pytest.fixture
def names(tmp_path):
    """The names that the page's first block makes, with an untrained network of linear layers."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    batches = [torch.randn(8, 64)]
    keepk.prune(net, batches[0], macs=0.6, round_to=16)
    return {"net": net, "batches": batches, "folder": str(tmp_path), "torch": torch}


def assert_close(names):
    with torch.no_grad():
        wanted = names["net"](names["batches"][0])
    for output in names["outputs"]:
        assert (output - wanted).abs().max() < 0.05 * wanted.abs().max()


def block(name):
    found = re.search(rf"<!-- block: {name} -->\n```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.filterwarnings("default")  # of the tool
def test_torchao(names):
    pytest.importorskip("torchao")
    exec(block("torchao"), names)
    assert_close(names)
    with pytest.raises(SpaceError, match="quantised"):
        keepk.prune(names["dynamic"], names["batches"][0], keep=30)
    with pytest.raises(FileError, match="Int8Tensor"):
        keepk.save(names["weights_only"], names["folder"])


@pytest.mark.filterwarnings("default")
def test_openvino(names):
    pytest.importorskip("openvino")
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    folder = names["folder"]
    keepk.export_onnx(names["net"], names["batches"][0], f"{folder}/net.onnx")
    quant_pre_process(f"{folder}/net.onnx", f"{folder}/ready.onnx")
    quantize_dynamic(f"{folder}/ready.onnx", f"{folder}/int8.onnx")
    exec(block("openvino"), names)
    assert_close(names)
