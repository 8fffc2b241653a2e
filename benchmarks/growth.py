"""How the time and memory of a trace and of an event grow with the depth and the width of a model.

    python benchmarks/growth.py --out results/benchmarks/growth.json

A Llama with random weights is traced with `keepk.trace`, then a `Pruner` removes a quarter of its MLP units and half of
its groups of heads in one event. Depth: 12 to 96 layers of width 64. Width: hidden sizes of 128 to 1,024 in 12 layers,
so that weights grow with the square of the width, and channels in proportion to it. Every size runs in a process of its
own, after a small model that loads everything. Times are CPU seconds. Memory is the peak of the resident set during the
trace or the event, less what was resident before. A slope is that of a line through the logarithms.
"""

import argparse
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchvision_on_cpu

torchvision_on_cpu.make_importable()
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402 - after torchvision was made importable

import keepk  # noqa: E402
from keepk_paper.results import versions  # noqa: E402

DEPTHS, WIDTH = (12, 24, 48, 96), 64
WIDTHS, DEPTH = (128, 256, 512, 1_024), 12
MEASURED = ("trace_cpu_seconds", "event_cpu_seconds", "trace_bytes", "event_bytes")


def make_model(layers: int, width: int) -> Any:
    torch.manual_seed(0)
    heads = width // 16
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def resident() -> int:
    """The resident set in bytes."""
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def measured(work: Callable[[], Any]) -> tuple[Any, float, int]:
    """The result of a function, its CPU seconds, and the growth of the resident set."""
    before, peak, done = resident(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], resident())

    thread = threading.Thread(target=sample)
    thread.start()
    begin = time.thread_time()
    result = work()
    seconds = time.thread_time() - begin
    done.set()
    thread.join()
    return result, seconds, max(peak[0], resident()) - before


def measure(layers: int, width: int) -> dict[str, Any]:
    """Trace a model and prune it once."""
    example = {"input_ids": torch.ones(2, 8, dtype=torch.long), "use_cache": False}
    example["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
    keepk.trace(make_model(1, 32), example)
    model = make_model(layers, width)
    graph, trace_seconds, trace_bytes = measured(lambda: keepk.trace(model, example))
    spaces = [
        keepk.channels("*.mlp*", prune=0.25, per_layer=True),
        keepk.channels("*.self_attn*", prune=0.5, per_layer=True),
    ]
    with keepk.Pruner(model, spaces, example=example) as pruner:
        _, event_seconds, event_bytes = measured(pruner.step)
    return {
        "layers": layers,
        "width": width,
        "parameters": sum(math.prod(graph.wiring.shapes[name]) for name in graph.wiring.parameters),
        "units": len(graph.units),
        "trace_cpu_seconds": round(trace_seconds, 3),
        "event_cpu_seconds": round(event_seconds, 3),
        "trace_bytes": trace_bytes,
        "event_bytes": event_bytes,
    }


def slope(rows: list[dict[str, Any]], over: str, key: str) -> float:
    """The slope of a line through the logarithms, by least squares."""
    xs, ys = ([math.log(max(row[it], 1e-9)) for row in rows] for it in (over, key))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="*", default=DEPTHS)
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS)
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    report: dict[str, Any] = {"benchmark": "growth", "slopes": {}}
    sizes = {
        "layers": [(layers, WIDTH) for layers in options.depths],
        "width": [(DEPTH, width) for width in options.widths],
    }
    for over, listed in sizes.items():
        rows = []
        for layers, width in listed:
            command = [sys.executable, __file__, "--one", str(layers), str(width)]
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append(json.loads(run.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
        report[over] = rows
        report["slopes"][over] = {key: round(slope(rows, over, key), 3) for key in MEASURED} if len(rows) > 1 else {}
        print(over, report["slopes"][over], flush=True)
    report["versions"] = versions()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
