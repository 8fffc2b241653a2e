"""Memory and bytes of `keepk.shrink_files` on a checkpoint of 7 billion parameters.

    python benchmarks/shrink_files.py --out results/benchmarks/shrink_files.json

The checkpoint is a Llama with the sizes of Mistral 7B and random bfloat16 weights, in shards of at most 1 GB, written
into a temporary folder that is deleted at the end; the run needs 27 GB there (--folder). A quarter of the MLP units and
half of the eight groups of heads in every layer are removed in a process of its own, which samples RssAnon of
/proc/self/status every 20 ms. Bytes are those that the process has read and written in calls to the system (rchar and
wchar of /proc/self/io), which include libraries that it imports. The time is the one of the machine as it was, with
other work on it and on its disk.

Afterwards, the widths in the headers of the new files are compared with the config, and two layers with a selection
that is computed here from the dense tensors.
"""

import argparse
import json
import math
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import torchvision_on_cpu

torchvision_on_cpu.make_importable()
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402 - after torchvision was made importable

import keepk  # noqa: E402
from keepk.storage.shards import StoredTensor, open_shards, write_shard  # noqa: E402
from keepk_paper.results import versions  # noqa: E402

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4_096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
KEPT = {"intermediate_size": 10_752, "num_attention_heads": 16, "num_key_value_heads": 4}
SHARD = 1_000_000_000  # bytes
CHECKED = (0, -1)  # layers that are compared with a selection computed here


def random_bytes(count: int, generator: torch.Generator) -> Iterator[Any]:
    """Normal bfloat16 numbers, a few megabytes at a time."""
    for start in range(0, count, 1 << 24):
        size = min(1 << 24, count - start) // 2
        values = torch.randn(size, generator=generator).mul_(0.02).to(torch.bfloat16)
        yield values.view(torch.uint8).numpy().data


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write the random checkpoint; returns its number of parameters."""
    config = LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", architectures=["LlamaForCausalLM"], **SIZES)
    with torch.device("meta"):
        shapes = {name: tuple(it.shape) for name, it in LlamaForCausalLM(config).state_dict().items()}
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    shards, room = list[list[str]](), 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if size > room:
            shards.append([])
            room = SHARD
        shards[-1].append(name)
        room -= size
    generator, places = torch.Generator().manual_seed(0), dict[str, str]()
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {StoredTensor(name, file, torch.bfloat16, shapes[name], 0): name for name in names}
        write_shard(folder / file, {it: random_bytes(it.nbytes, generator) for it in tensors}, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return int(total // 2)


def status(key: str) -> int:
    """A number of /proc/self/status in bytes."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def io() -> dict[str, int]:
    """The counters of /proc/self/io."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, _, value in (line.partition(": ") for line in lines)}


def shrink(source: Path, target: Path, layers: int) -> dict[str, Any]:
    """Prune in this process; returns what was measured."""
    samples, done = [status("RssAnon")], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            samples.append(status("RssAnon"))

    thread = threading.Thread(target=sample)
    before, wall, cpu = io(), time.perf_counter(), time.process_time()
    thread.start()
    spaces = [
        keepk.channels("*.mlp*", keep=layers * KEPT["intermediate_size"], per_layer=True),
        keepk.channels("*.self_attn*", keep=layers * KEPT["num_key_value_heads"], per_layer=True),
    ]
    found = keepk.shrink_files(source, target, spaces)
    done.set()
    thread.join()
    after = io()
    return {
        "kept": dict(found.kept),
        "parameters": list(found.parameters),
        "reason": found.reason,
        "rss_anon_before": samples[0],
        "rss_anon_peak": max(samples),
        "samples": len(samples),
        "ru_maxrss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "tensor_bytes_read": found.bytes_read,
        "tensor_bytes_written": found.bytes_written,
        "rchar": after["rchar"] - before["rchar"],
        "wchar": after["wchar"] - before["wchar"],
        "wall_seconds": round(time.perf_counter() - wall, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def check(source: Path, target: Path, layers: int) -> None:
    """Compare the new files with the config, and some layers with a selection computed from the dense tensors."""
    config = LlamaConfig.from_pretrained(target)
    assert {name: getattr(config, name) for name in KEPT} == KEPT, config
    with torch.device("meta"):
        shapes = {name: tuple(it.shape) for name, it in LlamaForCausalLM(config).state_dict().items()}
    with open_shards(source) as dense, open_shards(target) as small:
        assert {name: it.shape for name, it in small.tensors.items()} == shapes
        for layer in (range(layers)[number] for number in CHECKED):
            gate, up, down = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
            rows = (dense.read(gate).float().square().sum(1) + dense.read(up).float().square().sum(1)).sqrt()
            scores = rows * dense.read(down).float().square().sum(0).sqrt()
            kept = scores.topk(KEPT["intermediate_size"]).indices.sort().values
            for name, axis in ((gate, 0), (up, 0), (down, 1)):
                assert torch.equal(dense.read(name).index_select(axis, kept), small.read(name)), name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="where to make the temporary folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prune", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.prune:
        source, target = options.prune
        print(json.dumps(shrink(source, target, options.layers)))
        return
    with TemporaryDirectory(dir=options.folder) as folder:
        source, target = Path(folder) / "dense", Path(folder) / "small"
        source.mkdir()
        parameters = write_checkpoint(source, options.layers)
        size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        print(f"{parameters:,} parameters, {size / 1e9:.2f} GB in {len(list(source.glob('*.safetensors')))} shards")
        command = [sys.executable, __file__, "--layers", str(options.layers), "--prune", str(source), str(target)]
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found = json.loads(run.stdout.splitlines()[-1])
        assert not found["reason"], found["reason"]
        check(source, target, options.layers)
        largest = max(it.stat().st_size for it in source.glob("*.safetensors"))
        report = {
            "benchmark": "shrink_files",
            "sizes": {**SIZES, "num_hidden_layers": options.layers},
            "per_layer": KEPT,
            "largest_tensor": 2 * SIZES["vocab_size"] * SIZES["hidden_size"],
            "largest_shard": largest,
            "source_bytes": size,
            "target_bytes": sum(path.stat().st_size for path in target.glob("*.safetensors")),
            **found,
            "versions": versions(),
        }
    print(
        f"RssAnon {found['rss_anon_before'] / 1e9:.2f} GB before, peak {found['rss_anon_peak'] / 1e9:.2f} GB; "
        f"ru_maxrss {found['ru_maxrss'] / 1e9:.2f} GB; read {found['rchar'] / size:.3f} times, wrote "
        f"{found['wchar'] / report['target_bytes']:.3f} times; {found['wall_seconds']:.0f} s, "
        f"{found['cpu_seconds']:.0f} CPU s"
    )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
