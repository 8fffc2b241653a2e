"""One event that removes channels, with Adam's state: keepk and Torch-Pruning on four networks, and keepk's trace.

    python benchmarks/shrink_event.py --out results/benchmarks/shrink_event.json
    python benchmarks/shrink_event.py --share 0.5 --out results/benchmarks/shrink_event_half.json

Images of 224 x 224, batch 2, one thread. Every measurement uses a fresh copy of the network after one training step, so
that weights, gradients and Adam's two moments exist; the contenders take turns. The columns:

    forward    one forward pass of the batch, eval mode, no gradients
    trace      keepk: Pruner(...), which traces the network and makes the plan; done once
    event      keepk: Pruner.step, which ranks the channels of every layer by the L1 norm of their filters, keeps
               exactly 95 % of each (or 1 - share), and removes the others from weights, gradients and the optimizer's
               state; with replay=False, so without the next column
    replay     keepk: the check before the cut, one forward pass per mode of a cut copy on the meta device; timed
               inside a second event with replay=True, the default
    weights    keepk: the event without the optimizer, so that only weights and gradients are cut, as Torch-Pruning does
    copy       one copy of weights, gradients and the two moments to new memory
    least      a lower bound for any implementation: one L1 norm of all weights, and one copy of the weights, gradients
               and moments that are left, to memory that is already allocated
    build      Torch-Pruning: BasePruner, with its dependency graph; done once
    step       Torch-Pruning: BasePruner.step, which ranks by group L1 norm and cuts weights and gradients: one of ten
               steps towards half of all channels (with a share of 0.5, the only one). Its parameters are new objects,
               so the optimizer has to be created again

Each network is run once before it is measured, because the first event of a process also pays for new memory. CPU
seconds are user + system time of the process. The garbage collector runs before each measurement. Requires torchvision
and torch-pruning (see zoo.py).
"""

import argparse
import copy
import ctypes
import gc
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepk
import torchvision_on_cpu
from keepk.cut import shrink
from keepk.graph.probe.verify import refuse_unfit
from keepk_paper.results import versions

BATCH, PICTURE, GOAL = 2, 224, 0.5
Times = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Network:
    """A network of torchvision, its output layer, and the `round_to` of Torch-Pruning's own example."""

    name: str
    torchvision_name: str
    head: str
    round_to: int | None = None

    def build(self) -> nn.Module:
        """The network with random weights."""
        torchvision_on_cpu.make_importable()
        from torchvision import models  # noqa: PLC0415 - it imports the meta kernels that `measure_imports` times

        model: nn.Module = models.get_model(self.torchvision_name, weights=None)
        return model


NETWORKS = (
    Network("VGG-16", "vgg16_bn", "classifier.6"),
    Network("ResNet-50", "resnet50", "fc"),
    Network("DenseNet-121", "densenet121", "classifier"),
    Network("ViT-B/16", "vit_b_16", "heads", round_to=12),
)


@dataclass(frozen=True)
class Trained:
    """A network in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @staticmethod
    def new(network: Network, pictures: Tensor) -> "Trained":
        """Build a network and train it for one step of Adam."""
        torch.manual_seed(0)
        model = network.build()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        F.cross_entropy(model(pictures), torch.arange(len(pictures))).backward()
        optimizer.step()
        return Trained(model, optimizer)

    def copy(self) -> "Trained":
        """A copy with separate weights, gradients and optimizer state."""
        twin = Trained(*copy.deepcopy((self.model, self.optimizer)))
        for mine, its in zip(self.model.parameters(), twin.model.parameters(), strict=True):
            its.grad = None if mine.grad is None else mine.grad.clone()  # deepcopy leaves gradients out
        return twin

    def tensors(self) -> list[Tensor]:
        """Weights, gradients, and the optimizer's state per weight."""
        state = [value for entry in self.optimizer.state.values() for value in entry.values() if value.ndim]
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        return [*(parameter.detach() for parameter in self.model.parameters()), *gradients, *state]


@dataclass(frozen=True)
class Task:
    """A network, and the share of every layer's channels that one event removes."""

    network: Network
    pictures: Tensor
    share: float


def timed(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """The result of `work`, with its CPU and wall seconds."""
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, (time.process_time() - cpu, time.perf_counter() - wall)


def keepk_event(trained: Trained, task: Task, *, optimizer: bool = True) -> Times:
    pruner, built = timed(keepk_builder(trained, task, optimizer=optimizer, replay=False))
    _, stepped = timed(pruner.step)
    return {"trace": built, "event": stepped}


def keepk_replay(trained: Trained, task: Task) -> Times:
    """The replay alone, which an event with replay=True runs before it changes anything."""
    pruner = keepk_builder(trained, task, replay=True)()
    replays = list[tuple[float, float]]()

    def watched(*arguments: Any, **by_name: Any) -> None:
        _, seconds = timed(lambda: refuse_unfit(*arguments, **by_name))
        replays.append(seconds)

    with mock.patch.object(shrink, "refuse_unfit", watched):
        pruner.step()
    (seconds,) = replays
    return {"replay": seconds}


def keepk_builder(trained: Trained, task: Task, *, optimizer: bool = True, replay: bool) -> Callable[[], keepk.Pruner]:
    found = keepk.trace(trained.model, task.pictures).groups
    # A DenseNet is cut at its convolutions, not at the reads of its BatchNorms.
    names = [group.module for group in found if not group.lossy and group.kind != "read"]
    spaces = [keepk.channels(name, prune=task.share, metric=keepk.metrics.l1) for name in names]
    chosen = trained.optimizer if optimizer else None
    return lambda: keepk.Pruner(trained.model, spaces, chosen, example=task.pictures, replay=replay)


def torch_pruning_event(trained: Trained, task: Task) -> Times:
    import torch_pruning  # noqa: PLC0415 - not in the child processes, which measure keepk alone

    def build() -> Any:
        return torch_pruning.pruner.BasePruner(
            trained.model,
            task.pictures,
            importance=torch_pruning.importance.GroupMagnitudeImportance(p=1),
            pruning_ratio=GOAL,
            iterative_steps=round(GOAL / task.share),
            ignored_layers=[trained.model.get_submodule(task.network.head)],
            round_to=task.network.round_to,
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruner, built = timed(build)
        _, stepped = timed(pruner.step)
    if hasattr(trained.model, "conv_proj"):  # Torch-Pruning's example sets the width of a ViT by hand, too
        trained.model.hidden_dim = trained.model.get_submodule("conv_proj").out_channels
    return {"build": built, "step": stepped}


def plain_copy(trained: Trained, _task: Task) -> Times:
    """Copy all tensors that an event cuts to new memory."""
    tensors = trained.tensors()
    _, seconds = timed(lambda: [tensor.clone() for tensor in tensors])
    return {"copy": seconds}


def least_work(trained: Trained, task: Task) -> Times:
    """Read all weights, as ranking must, then copy the tensors that an event leaves to allocated memory."""
    weights = [parameter.detach() for parameter in trained.copy().model.parameters()]
    keepk_event(trained, task)
    left = trained.tensors()
    there = [tensor.clone() for tensor in left]

    def work() -> None:
        for tensor in weights:
            torch.linalg.vector_norm(tensor, 1)
        for new, old in zip(there, left, strict=True):
            new.copy_(old)

    _, seconds = timed(work)
    return {"least": seconds}


CONTENDERS: dict[str, Callable[[Trained, Task], Times]] = {
    "keepk": keepk_event,
    "keepk_replay": keepk_replay,
    "keepk_weights": lambda trained, task: {"event": keepk_event(trained, task, optimizer=False)["event"]},
    "limit": lambda trained, task: plain_copy(trained.copy(), task) | least_work(trained, task),
    "torch_pruning": torch_pruning_event,
}


@torch.no_grad()
def forward(model: nn.Module, pictures: Tensor) -> tuple[float, float]:
    training = model.training
    model.eval()(pictures)  # warms up
    _, seconds = timed(lambda: model(pictures))
    model.train(training)
    return seconds


@contextmanager
def counted_passes(kind: type[nn.Module]) -> Iterator[dict[str, int]]:
    """Count the forward passes of this class of network, including its copies, and the backward passes."""
    counts = {"forward": 0, "backward": 0}

    def counting(function: Callable[..., Any], key: str) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **by_name: Any) -> Any:
            counts[key] += 1
            return function(*arguments, **by_name)

        return wrapped

    with (
        mock.patch.object(kind, "forward", counting(kind.forward, "forward")),
        mock.patch.object(torch.autograd, "backward", counting(torch.autograd.backward, "backward")),
        mock.patch.object(torch.autograd, "grad", counting(torch.autograd.grad, "backward")),
    ):
        yield counts


def passes_of(run: Callable[[], Any], kind: type[nn.Module]) -> dict[str, dict[str, int]]:
    """The passes of each part of a contender's work; each call of `timed` is one part."""
    parts = list[dict[str, int]]()

    def watched(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
        with counted_passes(kind) as counts:
            parts.append(counts)
            return work(), (0.0, 0.0)

    with mock.patch(f"{__name__}.timed", watched):
        names = list(run())
    return dict(zip(names, parts, strict=True))


def facts(trained: Trained, task: Task, name: str) -> dict[str, Any]:
    """Untimed facts: the number of passes, the share of parameters removed, and whether the shrunk network runs."""
    twin = trained.copy()
    before = sum(parameter.numel() for parameter in twin.model.parameters())
    passes = passes_of(lambda: CONTENDERS[name](twin, task), type(twin.model))
    after = sum(parameter.numel() for parameter in twin.model.parameters())
    output = twin.model.eval()(task.pictures)
    runs = bool(output.isfinite().all()) and tuple(output.shape) == (len(task.pictures), 1000)
    return {"passes": passes, "removed_percent": round(100 * (1 - after / before), 2), "runs": runs}


def summary(runs: list[tuple[float, float]]) -> dict[str, float | list[float]]:
    """Medians and quartiles."""
    result: dict[str, float | list[float]] = {}
    for key, values in zip(("cpu_seconds", "wall_seconds"), zip(*runs, strict=True), strict=True):
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        result[key], result[f"{key}_quartiles"] = round(middle, 4), [round(low, 4), round(high, 4)]
    return result


def measure(network: Network, share: float, repeats: int) -> dict[str, Any]:
    task = Task(network, torch.randn(BATCH, 3, PICTURE, PICTURE), share)
    trained = Trained.new(network, task.pictures)
    row: dict[str, Any] = {
        "network": network.name,
        "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
    }
    for name in ("keepk", "keepk_replay", "torch_pruning"):  # also the warm-up
        row[name] = facts(trained, task, name)
    row["keepk_weights"], row["limit"] = {}, {}
    runs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    forwards = []
    for _ in range(repeats):
        forwards.append(forward(trained.model, task.pictures))
        for name, contender in CONTENDERS.items():
            for part, seconds in contender(trained.copy(), task).items():
                runs.setdefault((name, part), []).append(seconds)
    row["forward"] = summary(forwards)
    for (name, part), of_one in runs.items():
        row[name][part] = summary(of_one)
    return row


def resident_mb(field: str) -> float:
    """VmRSS, the resident memory, or VmHWM, its peak since the last reset, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure_imports() -> dict[str, float]:
    """Trace a tiny network, which imports torch's meta kernels. The process must be fresh."""
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    return traced(tiny, torch.randn(2, 3, 8, 8))


def measure_first_trace() -> dict[str, float]:
    """Trace ResNet-50 for the first time; torchvision has imported the kernels. The process must be fresh."""
    pictures = torch.randn(BATCH, 3, PICTURE, PICTURE)
    model = next(network for network in NETWORKS if network.name == "ResNet-50").build()
    return traced(model, pictures)


def traced(model: nn.Module, pictures: Tensor) -> dict[str, float]:
    """Trace a model after a forward pass, and measure the time and the peak of the additional memory."""
    seconds, _ = forward(model, pictures)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that the forward pass freed would hide what the trace allocates
    # Reset the peak. ru_maxrss cannot be used, because a child inherits its parent's.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_mb("VmRSS")
    graph, (cpu, wall) = timed(lambda: keepk.trace(model, pictures))
    return {
        "forward_cpu_seconds": seconds,
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "extra_mb": resident_mb("VmHWM") - before,
        "units": len(graph.units),
    }


CHILDREN = {"imports": measure_imports, "resnet_50": measure_first_trace}


def first_traces(repeats: int) -> dict[str, dict[str, float]]:
    """Medians over fresh processes."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CHILDREN}
    for _ in range(repeats):
        for name, found in runs.items():
            done = subprocess.run(
                [sys.executable, __file__, "--child", name], capture_output=True, text=True, check=True
            )
            found.append(json.loads(done.stdout))
    return {
        name: {key: round(statistics.median(run[key] for run in found), 4) for key in found[0]}
        for name, found in runs.items()
    }


def table(report: dict[str, Any]) -> str:
    columns = ("forward", "trace", "event", "replay", "weights", "copy", "least", "build", "step")
    lines = [f"{'CPU seconds':14}" + "".join(f"{column:>9}" for column in columns) + f"{'ratio':>7}"]
    for row in report["networks"]:
        parts = row["keepk"] | {"weights": row["keepk_weights"]["event"]} | row["limit"] | row["torch_pruning"]
        parts["replay"] = row["keepk_replay"]["replay"]
        parts["forward"] = row["forward"]
        seconds = {column: parts[column]["cpu_seconds"] for column in columns}
        ratio = seconds["step"] / seconds["event"]
        lines.append(f"{row['network']:14}" + "".join(f"{s:9.3f}" for s in seconds.values()) + f"{ratio:7.1f}")
    return "\n".join([*lines, json.dumps(report["first_trace"], indent=2)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.05, help="share of every layer's channels removed by an event")
    parser.add_argument("--only", default="", help="names of networks, separated by commas")
    parser.add_argument("--child", choices=CHILDREN, help="measure a first trace in this process")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.child:
        print(json.dumps(CHILDREN[options.child]()))
        return
    wanted = options.only.split(",") if options.only else [network.name for network in NETWORKS]
    report = {
        "benchmark": "shrink_event",
        "batch": BATCH,
        "picture": PICTURE,
        "share": options.share,
        "threads": torch.get_num_threads(),
        "optimizer": "Adam",
        "repeats": options.repeats,
        "networks": [
            measure(network, options.share, options.repeats) for network in NETWORKS if network.name in wanted
        ],
        "first_trace": first_traces(options.repeats),
        "versions": {
            **versions(),
            **{name: importlib.metadata.version(name) for name in ("torchvision", "torch-pruning")},
        },
    }
    print(table(report))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
