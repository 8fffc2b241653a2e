"""The speed of keepk.sparse beside dense and sparse engines, for single layers and for whole networks.

    python benchmarks/sparse_speed.py layers --out results/benchmarks/sparse_layers.json
    python benchmarks/sparse_speed.py networks --out results/benchmarks/sparse_networks.json

Each needs a machine without other work: `layers` takes about ten minutes, `networks` about five. A cell (a layer or a
network, with a batch size) that the file already has is skipped unless --again is passed, so that an interrupted run
can be continued. Everything runs on one thread. All engines of a cell take turns, round by round; the numbers are
microseconds of CPU time for one call as a user makes it, from a tensor or array to the result: the median of the rounds
and the quartiles.

    keepk         keepk.sparse
    torch         dense; contiguous, and for images also channels_last; BatchNorm is folded into the convolutions
    ort           ONNX Runtime, float32; ort_int8: quantised to int8 (static, per channel)
    openvino      float32
    mnn           MNN; mnn_sparse: converted with --detectSparseSpeedUp
    torch_csr     F.linear with a CSR weight (linear layers only)

The engines other than torch are measured if they are installed, all of them in an environment of their own:

    python -m venv peers && peers/bin/pip install -c constraints.txt torch==2.13.0
    peers/bin/pip install -c constraints.txt -e '.[onnx,sparse]' openvino MNN

Layers have random weights, of which the largest are left. Networks are those of `sparse_models.py`. `limit` is what the
machine can do at most if every multiply-add takes one operand from the first-level cache, in multiply-adds per ns.
"""

import argparse
import copy
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepk
from keepk.engine.kernels import Code
from keepk.engine.machine import Native, aligned, host
from keepk_paper import results
from keepk_paper.models import VGG16, LeNet5, LeNet300

BATCHES = (1, 16, 256)
SPARSITIES = (50, 70, 80, 90, 95, 98, 99)
OF_MNN = (70, 90, 98)  # its conversion takes seconds
ROUNDS, SECONDS = 7, 0.004  # of each contender: rounds, and seconds in each, unless a single call takes longer
Call = Callable[[], Any]


def layers() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    return {
        "linear 784x300": (nn.Linear(784, 300), (784,)),
        "linear 4096x4096": (nn.Linear(4096, 4096), (4096,)),
        "conv 64 3x3 at 32": (nn.Conv2d(64, 64, 3, padding=1), (64, 32, 32)),
        "conv 256 3x3 at 8": (nn.Conv2d(256, 256, 3, padding=1), (256, 8, 8)),
        "conv 512 1x1 at 7": (nn.Conv2d(512, 512, 1), (512, 7, 7)),
    }


def pruned(layer: nn.Module, percent: int) -> nn.Module:
    made = copy.deepcopy(layer)
    with keepk.Pruner(made, [keepk.weights("weight", prune=percent / 100)]) as pruner:
        pruner.step()
    return made


def networks(folder: Path) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """The networks of `sparse_models.py` that are there, and the dense VGG-16, whose values no speed depends on."""
    found: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}
    for line in results.read(folder / "models.jsonl"):
        name, options = line["recipe"], line["options"]
        if name == "vgg-start":
            continue
        kinds: dict[str, tuple[Any, tuple[int, ...]]] = {
            "lenet-300-100": (LeNet300, (1, 28, 28)),
            "lenet-5": (LeNet5, (1, 28, 28)),
        }
        build, shape = kinds.get(name, (VGG16, (3, 32, 32)))
        model = build(**options)
        found[name] = (model if name == "vgg-dense" else keepk.load(model, folder / name)).eval(), shape
    return found


# Contenders ----------------------------------------------------------------------------------------------------------


def of_keepk(model: nn.Module, x: Tensor) -> Call:
    fast = keepk.sparse(model, x[:2])
    return lambda: fast(x)


def of_torch(model: nn.Module, x: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Call:
    made = folded(model)
    if x.dim() == 4:
        made, x = made.to(memory_format=memory_format), x.contiguous(memory_format=memory_format)  # type: ignore[call-overload]

    def call() -> Any:
        with torch.inference_mode():
            return made(x)

    return call


def folded(model: nn.Module) -> nn.Module:
    """A copy with each BatchNorm of VGG-16 folded into the convolution before it."""
    made = copy.deepcopy(model).eval()
    if isinstance(made, VGG16):
        items: list[Any] = list(made.features)
        for i, layer in enumerate(items):
            if isinstance(layer, nn.BatchNorm2d):
                items[i - 1] = nn.utils.fusion.fuse_conv_bn_eval(items[i - 1], layer)
                items[i] = nn.Identity()
        made.features = nn.Sequential(*(it for it in items if not isinstance(it, nn.Identity)))
    return made


def of_csr(model: nn.Module, x: Tensor) -> Call:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is said to be in beta state
        weights = {name: it.detach().to_sparse_csr() for name, it in model.named_parameters() if it.dim() == 2}
    if isinstance(model, nn.Linear):
        return lambda: F.linear(x, weights["weight"], model.bias)
    biases = {name: it.detach() for name, it in model.named_parameters()}

    def call() -> Tensor:
        y = x.flatten(1)
        for name in ("fc1", "fc2", "fc3"):
            y = F.linear(y, weights[f"{name}.weight"], biases[f"{name}.bias"])
            y = F.relu(y) if name != "fc3" else y
        return y

    return call


def to_onnx(model: nn.Module, shape: tuple[int, ...], path: Path) -> Path:
    """An ONNX file of the folded model with an input "x" and any batch size."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                folded(model),
                (torch.randn(2, *shape),),
                str(path),
                input_names=["x"],
                output_names=["y"],
                dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                external_data=False,
                verbose=False,
            )
    return path


def of_ort(path: Path, x: Tensor) -> Call:
    onnxruntime = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    given = {"x": x.numpy()}
    return lambda: session.run(None, given)[0]


def quantised(path: Path, shape: tuple[int, ...]) -> Path:
    tools = importlib.import_module("onnxruntime.quantization")

    class Random(tools.CalibrationDataReader):  # type: ignore[misc, name-defined]  # ships no types
        left = 4

        def get_next(self) -> dict[str, Any] | None:
            self.left -= 1
            return {"x": np.random.randn(2, *shape).astype(np.float32)} if self.left >= 0 else None

    target = path.with_suffix(".int8.onnx")
    if not target.exists():
        tools.quantize_static(
            str(path),
            str(target),
            Random(),
            quant_format=tools.QuantFormat.QDQ,
            per_channel=True,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
        )
    return target


def of_openvino(path: Path, x: Tensor) -> Call:
    core = importlib.import_module("openvino").Core()
    model = core.read_model(str(path))
    model.reshape([len(x), *x.shape[1:]])
    hints = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(model, "CPU", hints).create_infer_request()
    given = x.numpy()
    return lambda: request.infer([given], share_inputs=True)[0]


def converted(path: Path, *, sparse: bool) -> Path:
    target = path.with_suffix(".sparse.mnn" if sparse else ".mnn")
    if not target.exists():
        # The program mnnconvert would also install a package and send a log.
        command = [sys.executable, "-c", "import sys, MNN, _tools; _tools.mnnconvert(sys.argv)"]
        command += ["-f", "ONNX", "--modelFile", str(path)]
        command += ["--MNNModel", str(target), "--bizCode", "keepk", *(["--detectSparseSpeedUp"] if sparse else [])]
        subprocess.run(command, check=True, capture_output=True)
    return target


def of_mnn(path: Path, x: Tensor) -> Call:
    MNN = importlib.import_module("MNN")  # noqa: N806 - its name
    interpreter = MNN.Interpreter(str(path))
    session = interpreter.createSession({"backend": "CPU", "numThread": 1, "precision": "high"})
    source = interpreter.getSessionInput(session)
    interpreter.resizeTensor(source, tuple(x.shape))
    interpreter.resizeSession(session)
    kind = MNN.Tensor_DimensionType_Caffe
    given, shape = x.numpy(), tuple(x.shape)
    result = interpreter.getSessionOutput(session)
    out = np.empty(result.getShape(), np.float32)

    def call() -> Any:
        source.copyFrom(MNN.Tensor(shape, MNN.Halide_Type_Float, given, kind))
        interpreter.runSession(session)
        host_tensor = MNN.Tensor(result.getShape(), MNN.Halide_Type_Float, out, kind)
        result.copyToHostTensor(host_tensor)
        return np.array(host_tensor.getNumpyData())  # a copy, since the tensor owns the memory

    return call


# Measuring -----------------------------------------------------------------------------------------------------------


def installed() -> list[str]:
    peers = {"ort": "onnxruntime", "ort_int8": "onnxruntime", "openvino": "openvino", "mnn": "MNN", "mnn_sparse": "MNN"}
    return [name for name, module in peers.items() if importlib.util.find_spec(module)]


def dense_contenders(model: nn.Module, x: Tensor, path: Path, peers: Sequence[str]) -> Iterator[tuple[str, Call]]:
    yield "torch", of_torch(model, x)
    if x.dim() == 4:
        yield "torch_channels_last", of_torch(model, x, torch.channels_last)
    if peers:
        to_onnx(model, tuple(x.shape[1:]), path)
    if "ort" in peers:
        yield "ort", of_ort(path, x)
    if "ort_int8" in peers:
        yield "ort_int8", of_ort(quantised(path, tuple(x.shape[1:])), x)
    if "openvino" in peers:
        yield "openvino", of_openvino(path, x)
    if "mnn" in peers:
        yield "mnn", of_mnn(converted(path, sparse=False), x)


def race(calls: dict[str, Call], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """CPU microseconds of each call: median and quartiles of rounds in which all take turns."""
    repeats, taken = {}, {name: list[float]() for name in calls}
    for name, call in calls.items():
        call()
        begin = time.process_time()
        call()
        repeats[name] = max(1, min(5_000, int(SECONDS / max(time.process_time() - begin, 1e-6))))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.process_time()
            for _ in range(repeats[name]):
                call()
            taken[name].append(1e6 * (time.process_time() - begin) / repeats[name])
    return {name: [round(it, 2) for it in median_and_quartiles(times)] for name, times in taken.items()}


def median_and_quartiles(times: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return [middle, low, high]


def limit() -> float:
    """Multiply-adds per nanosecond with one operand of each from the first-level cache."""
    machine, reach = host(), 4096
    code, sums = Code(machine.width), 10
    with code.function("run", "ptr %space", "ptr %inputs", "ptr %outputs", "i64 %begin", "i64 %end"):
        slots = [code.slot(code.vector, "zeroinitializer") for _ in range(sums)]
        with code.loop("%begin", "%end"), code.loop(0, reach // (machine.width * sums)) as i:
            weight = code.splat(code.load(code.at("%outputs", i), "float"))
            for j, slot in enumerate(slots):
                x = code.load(code.at("%inputs", code.plus(code.times(i, machine.width * sums), j * machine.width)))
                code.do(f"store {code.vector} {code.fma(weight, x, code.get(code.vector, slot))}, ptr {slot}")
        for j, slot in enumerate(slots):
            code.store(code.get(code.vector, slot), code.at("%space", j * machine.width))
    native, memory = Native(code.text(), machine), [aligned(reach) for _ in range(3)]
    places = [ctypes.c_void_p(it.ctypes.data) for it in memory]
    rates = []
    for _ in range(9):
        begin = time.process_time()
        native.run(*places, 0, 20_000)
        done = 20_000 * (reach // (machine.width * sums)) * machine.width * sums
        rates.append(done / (time.process_time() - begin) / 1e9)
    return round(statistics.median(rates), 1)


def layer_cell(name: str, batch: int, work: Path, peers: Sequence[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    layer, shape = layers()[name]
    layer.requires_grad_(False).eval()
    x, stem = torch.randn(batch, *shape), name.replace(" ", "-")
    calls = dict(dense_contenders(layer, x, work / f"{stem}.onnx", peers))
    kept = {}
    for percent in SPARSITIES:
        net = pruned(layer, percent)
        kept[str(percent)] = int(net.get_parameter("weight").count_nonzero())
        calls[f"keepk {percent}"] = of_keepk(nn.Sequential(net), x)
        if isinstance(net, nn.Linear) and percent >= 70 and batch < 256:
            calls[f"torch_csr {percent}"] = of_csr(net, x)
        if "mnn_sparse" in peers and percent in OF_MNN:
            path = to_onnx(net, shape, work / f"{stem}-{percent}.onnx")
            calls[f"mnn_sparse {percent}"] = of_mnn(converted(path, sparse=True), x)
    pixels = int(np.prod(layer(x[:1]).shape[2:]))
    total = layer.get_parameter("weight").numel()
    return {"layer": name, "batch": batch, "weights": total, "kept": kept, "pixels": pixels, "us": race(calls)}


def network_cell(name: str, batch: int, folder: Path, work: Path, peers: Sequence[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    model, shape = networks(folder)[name]
    x = torch.randn(batch, *shape)
    path = work / f"{name}.onnx"
    calls = dict(dense_contenders(model, x, path, peers))
    report = keepk.sparse(model, x[:2]).report
    calls["keepk"] = of_keepk(model, x)
    if name == "lenet-300-100":
        calls["torch_csr"] = of_csr(model, x)
    if "mnn_sparse" in peers:
        calls["mnn_sparse"] = of_mnn(converted(path, sparse=True), x)
    wanted = of_torch(model, x)()
    found = {
        key: float(np.abs(np.asarray(call()) - wanted.numpy()).max() / wanted.abs().max())
        for key, call in calls.items()
    }
    macs = {"left": sum(it.macs or 0 for it in report.layers), "dense": sum(it.dense_macs or 0 for it in report.layers)}
    torch_runs = len(report.fallbacks)
    about = {"network": name, "batch": batch, "macs": macs, "in_torch": torch_runs, "difference": found}
    return {**about, "us": race(calls)}


def print_cell(cell: dict[str, Any]) -> None:
    dense = min(cell["us"][name][0] for name in cell["us"] if name in ("torch", "torch_channels_last"))
    words = [f"{name} {times[0]:.1f} ({dense / times[0]:.1f}x)" for name, times in cell["us"].items()]
    print(f"{cell.get('layer', cell.get('network'))}, batch {cell['batch']}: {', '.join(words)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layers", "networks"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/sparse_speed"), help="a folder for converted models")
    parser.add_argument("--models", type=Path, default=Path("results/sparse"))
    parser.add_argument("--only", nargs="+", help="names of layers or networks; default: all")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--again", action="store_true", help="measure cells again that the file has")
    options = parser.parse_args()
    torch.set_num_threads(1)
    peers = installed()
    report: dict[str, Any] = {"benchmark": f"sparse_{options.what}", "cells": []}
    if options.out.exists():
        report = json.loads(options.out.read_text())
    report |= {"limit": limit(), "cpu": f"{host().name}, vectors of {host().width} floats", "peers": peers}
    report["versions"] = {**results.versions(), **{it: version_of(it) for it in ("onnxruntime", "openvino", "MNN")}}
    names = layers() if options.what == "layers" else networks(options.models)
    key = options.what[:-1]
    for name in options.only or names:
        for batch in options.batches:
            done = [it for it in report["cells"] if (it[key], it["batch"]) == (name, batch)]
            if done and not options.again:
                continue
            if options.what == "layers":
                cell = layer_cell(name, batch, options.work, peers)
            else:
                cell = network_cell(name, batch, options.models, options.work, peers)
            print_cell(cell)
            report["cells"] = [it for it in report["cells"] if it not in done] + [cell]
            options.out.parent.mkdir(parents=True, exist_ok=True)
            draft = options.out.with_suffix(".draft")
            draft.write_text(json.dumps(report, indent=1) + "\n")
            draft.replace(options.out)  # a killed run leaves the cells that it has measured


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
