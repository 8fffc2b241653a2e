"""One pruning event over all weights: keepk's Pruner, torch's global_unstructured, and one pass that reads the weights.

    python benchmarks/select_event.py --weights 100_000_000 --out results/benchmarks/select_event.json

Every repeat runs in a fresh process. CPU seconds are user + system time of all threads; extra MB is the peak of the
resident memory, less the resident memory after the weights were created.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import prune

import keepk

LAYERS, THREADS, PRUNED_TENTHS = 10, 2, 9
BILLION = 1_000_000_000


def model_of(weights: int) -> nn.ModuleList:
    width = weights // (LAYERS * 1000)
    layers = nn.ModuleList(nn.Linear(width, 1000, bias=False, device="meta") for _ in range(LAYERS))
    for layer in layers.to_empty(device="cpu"):
        nn.init.normal_(layer.get_parameter("weight"))
    return layers


def read(layers: nn.ModuleList) -> None:
    for layer in layers:
        layer.get_parameter("weight").detach().sum().item()


def keepk_event(layers: nn.ModuleList) -> None:
    """The full cost of one event for a user: the Pruner with its checks, and its step."""
    keepk.Pruner(layers, [keepk.weights("*", prune=PRUNED_TENTHS / 10)]).step()


def torch_global_unstructured(layers: nn.ModuleList) -> None:
    prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=PRUNED_TENTHS / 10)


CONTENDERS = {run.__name__: run for run in (read, keepk_event, torch_global_unstructured)}


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, weights: int, limit_gb: int) -> dict[str, float]:
    """Measure one event in this process, after a tiny event that loads the code."""
    if limit_gb:
        resource.setrlimit(resource.RLIMIT_AS, (limit_gb << 30, limit_gb << 30))
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    CONTENDERS[name](model_of(LAYERS * 1000))
    layers = model_of(weights)
    peak, cpu, wall = peak_mb(), time.process_time(), time.perf_counter()
    CONTENDERS[name](layers)
    result = {
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "extra_mb": peak_mb() - peak,
    }
    if name != "read":
        # torch's pruning leaves a plain tensor there, not a parameter.
        result["kept"] = sum(int(cast(torch.Tensor, layer.weight).count_nonzero()) for layer in layers)
    return result


def measure_apart(name: str, weights: int, limit_gb: int = 0) -> dict[str, Any]:
    """Measure in a fresh process. If that fails, return its last message and return code."""
    command = [sys.executable, __file__, "--contender", name, "--weights", str(weights), "--limit-gb", str(limit_gb)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        measured: dict[str, Any] = json.loads(done.stdout)
        return measured
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"failed": last, "returncode": done.returncode, "address_space_gb": limit_gb}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"repeats": len(runs)}
    for key in ("cpu_seconds", "wall_seconds", "extra_mb"):
        values = [round(run[key], 4) for run in runs]
        result[key] = statistics.median(values)
        result[f"{key}_range"] = [min(values), max(values)]
    if "kept" in runs[0]:
        result["kept"] = [run["kept"] for run in runs]
    return result


def compare(weights: int, repeats: int, torch_repeats: int, billion: bool, limit_gb: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for turn in range(repeats):  # in turns, so that other load on the machine affects all of them
        for name in CONTENDERS:
            if name != "torch_global_unstructured" or turn < torch_repeats:
                runs[name].append(measure_apart(name, weights))
    results = {name: summary(of_one) for name, of_one in runs.items()}
    theirs, plain = results["torch_global_unstructured"], results["read"]["cpu_seconds"]
    ours = results["keepk_event"]
    for key in ("cpu_seconds", "wall_seconds", "extra_mb"):
        ours[f"torch_over_ours_{key}"] = round(theirs[key] / ours[key], 1)
    for result in results.values():
        result["plain_reads"] = round(result["cpu_seconds"] / plain, 1)
    report: dict[str, Any] = {
        "benchmark": "select_event",
        "weights": weights,
        "asked": weights - weights * PRUNED_TENTHS // 10,
        "layers": LAYERS,
        "dtype": "float32",
        "threads": THREADS,
        "results": results,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }
    if billion:
        report["billion"] = {"weights": BILLION, "keepk_event": measure_apart("keepk_event", BILLION)}
        if limit_gb:
            report["billion"]["torch_global_unstructured"] = measure_apart(
                "torch_global_unstructured", BILLION, limit_gb
            )
    return report


def table(report: dict[str, Any]) -> str:
    lines = [f"{report['weights']:,} float32 weights, {report['threads']} threads, keep {report['asked']:,}", ""]
    lines.append(f"{'':28}{'CPU s':>10}{'wall s':>10}{'extra MB':>10}{'reads':>8}{'kept':>14}")
    rows = list(report["results"].items())
    rows += [(f"{name}, 1B", row) for name, row in report.get("billion", {}).items() if name != "weights"]
    for name, row in rows:
        if "failed" in row:
            lines.append(f"{name:28}  failed: {row['failed'][:90]}")
            continue
        kept = row.get("kept", "")
        kept = kept[0] if isinstance(kept, list) else kept
        lines.append(
            f"{name:28}{row['cpu_seconds']:10.3f}{row['wall_seconds']:10.3f}{row['extra_mb']:10.0f}"
            f"{row.get('plain_reads', ''):>8}{kept:>14}"
        )
    ours = report["results"]["keepk_event"]
    lines += ["", "torch / keepk: " + ", ".join(f"{k[16:]} {v}x" for k, v in ours.items() if k.startswith("torch_"))]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=100_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--torch-repeats", type=int, default=2)
    parser.add_argument("--billion", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit-gb", type=int, default=0, help="also run torch at 1B under this much address space")
    parser.add_argument("--contender", choices=CONTENDERS, help="measure only this one, in this process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.contender:
        print(json.dumps(measure(args.contender, args.weights, args.limit_gb)))
        return
    report = compare(args.weights, args.repeats, args.torch_repeats, args.billion, args.limit_gb)
    print(table(report))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
