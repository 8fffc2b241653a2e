"""Judge channel removal on real architectures and on random networks, by an oracle that uses no pruning library.

    python benchmarks/zoo.py [--sources handwritten,vision] [--only NAME,...] [--random FROM:TO] [--onnx] [--reload]
                             [--limit 150] [--pruner keepk|torch-pruning|MODULE:FUNCTION] [--out FILE.jsonl]

A pruner removes about half of what can be removed exactly, in place: FUNCTION(model, inputs). Each network is judged
in a child process with a time limit:

    fwd     the shrunk network runs; its outputs have the old shapes and are finite
    eq      they equal those of the dense network with the removed slices set to zero (err, relative, < 1e-5)
    bwd     one training step has finite gradients
    tie     parameters that were shared are still shared
    par     the share of parameters left; above 0.95 the removal counts as vacuous
    onnx    torch.onnx.export and onnxruntime agree with the shrunk network
    reload  saved and loaded into a fresh dense network, it computes the same (keepk only)

Each network has one of four outcomes:

    passed   fwd, eq, bwd and tie are ok, and the removal is not vacuous
    wrong    the outputs differ, the shrunk network does not run, or a tie is lost
    refused  the pruner raised an error and left the network as it was, or it removed less than 5 %
    failed   the pruner raised an error half-way, crashed or hung, or its result cannot be checked or trained

Install, in addition to keepk: torch==2.13.0 first; then, with --no-deps, torchvision==0.28.0 and torch-pruning==1.6.1;
then pillow transformers timm monai einops onnx onnxscript onnxruntime.
"""

import argparse
import copy
import importlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import keepk

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "zoo"))  # the networks, which the tests use too

import zoo_networks
import zoo_oracle
import zoo_random
from zoo_networks import Inputs, Network

EQUAL, ONNX_EQUAL, VACUOUS = 1e-5, 1e-3, 0.95
SHOWN = ("prune", "fwd", "bwd", "eq", "err", "tie", "par", "onnx", "reload", "why", "onnx_why", "reload_why")
OUTCOMES = ("passed", "wrong", "refused", "failed")

Row = dict[str, str | float | bool]
Prune = Callable[[Network, nn.Module, Inputs], object]


def halve(model: nn.Module, inputs: Inputs) -> None:
    """Remove half of the units that can be removed exactly.

    Branches on values are accepted, because each network is judged on the inputs that it was traced with.
    """
    graph = keepk.trace(model, with_two_rows(inputs), value_branches="accept")
    keepk.shrink(model, graph, graph.choose(0.5))


def with_two_rows(inputs: Inputs) -> Inputs:
    """The inputs, repeated if they are a batch of one, which `keepk.trace` refuses."""
    tensors = [tensor for tensor in tree_leaves(inputs) if isinstance(tensor, Tensor) and tensor.dim()]
    if any(len(tensor) != 1 for tensor in tensors):
        return inputs
    twice: Inputs = tree_map(lambda it: torch.cat([it, it]) if isinstance(it, Tensor) and it.dim() else it, inputs)
    return twice


def halve_with_torch_pruning(model: nn.Module, inputs: Inputs, output_layers: list[nn.Module]) -> None:
    """The peer without configuration: half of every group by magnitude, the output layers left alone."""
    import torch_pruning  # noqa: PLC0415 - needed for the comparison only

    importance = torch_pruning.importance.GroupMagnitudeImportance()
    torch_pruning.pruner.BasePruner(
        model, inputs, importance=importance, pruning_ratio=0.5, ignored_layers=output_layers
    ).step()


def pruner(spec: str) -> Prune:
    if spec == "keepk":
        return lambda _, model, inputs: halve(model, inputs)
    if spec == "torch-pruning":
        return lambda network, model, inputs: halve_with_torch_pruning(model, inputs, network.output_layers(model))
    module, _, function = spec.partition(":")
    remove = getattr(importlib.import_module(module), function)
    return lambda _, model, inputs: remove(model, inputs)


@dataclass(frozen=True)
class Case:
    """A network before and after the removal."""

    network: Network
    dense: nn.Module
    shrunk: nn.Module
    inputs: Inputs

    @torch.no_grad()
    def outputs(self, model: nn.Module) -> list[Tensor]:
        """The outputs of one of the two networks in eval mode."""
        return zoo_oracle.outputs(model.eval(), self.inputs)


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def attempt(key: str, check: Callable[[Case], Row], case: Case, *, failed: str = "FAIL", why: str = "why") -> Row:
    """The check's verdict; an error that it raises is a verdict, too."""
    try:
        return check(case)
    except Exception as error:
        return {key: failed, why: said(error)}


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def ties(model: nn.Module) -> set[frozenset[str]]:
    """The sets of names that refer to the same parameter object."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def untouched(case: Case) -> bool:
    before, after = case.dense.state_dict(), case.shrunk.state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def size_and_ties(case: Case) -> Row:
    share = round(parameter_count(case.shrunk) / parameter_count(case.dense), 3)
    tie = "ok" if ties(case.shrunk) == ties(case.dense) else "BROKEN"
    return {"par": share, "vacuous": share > VACUOUS, "tie": tie}


def forward(case: Case) -> Row:
    before, after = case.outputs(case.dense), case.outputs(case.shrunk)
    alike = [old.shape for old in before] == [new.shape for new in after]
    return {"fwd": "ok" if alike and all(new.isfinite().all() for new in after) else "BAD OUTPUT"}


def equality(case: Case) -> Row:
    error = zoo_oracle.error(case.dense, case.shrunk, case.inputs)
    measured: Row = {} if math.isnan(error) else {"err": error}  # JSON has no NaN
    return measured | {"eq": "ok" if error < EQUAL else "DIFF"}


def training(case: Case) -> Row:
    train_once(case.shrunk, case.inputs)
    return {"bwd": "ok"}


def dense_training(case: Case) -> Row:
    train_once(case.dense, case.inputs)
    return {}


def train_once(model: nn.Module, inputs: Inputs) -> None:
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    torch.stack([(output**2).mean() for output in zoo_oracle.outputs(model, inputs)]).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients or not all(gradient.isfinite().all() for gradient in gradients):
        raise ValueError("no finite gradients")
    optimizer.step()


def exported(case: Case) -> Row:
    error = zoo_oracle.difference(case.outputs(case.shrunk), onnx_outputs(case.shrunk, case.inputs))
    return {"onnx": "ok" if error < ONNX_EQUAL else f"DIFF {error:.2g}"}


def dense_exported(case: Case) -> Row:
    onnx_outputs(case.dense, case.inputs)
    return {}


def onnx_outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    import onnxruntime  # noqa: PLC0415 - only --onnx needs it

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "network.onnx")
        torch.onnx.export(model.eval(), inputs, path, dynamo=True, external_data=False, verbose=False)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    named = {slot.name: value.numpy() for slot, value in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, named)]


def reloaded(case: Case) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        keepk.save(case.shrunk, folder)
        loaded = keepk.load(case.network.build(), folder)
    pairs = zip(case.outputs(case.shrunk), case.outputs(loaded), strict=True)
    return {"reload": "ok" if all(torch.equal(saved, read) for saved, read in pairs) else "DIFF"}


def verdict(network: Network, prune: Prune, *, onnx: bool = False, reload: bool = False) -> Row:
    """Prune one network and run all checks."""
    model, inputs = zoo_oracle.randomize(network.build()), network.inputs()
    case = Case(network, copy.deepcopy(model), model, inputs)
    case.outputs(case.dense)  # outside the try: if the dense network does not run, the pruner is not to blame
    start = time.time()
    try:
        prune(network, model, inputs)
    except Exception as error:
        return {"prune": "FAIL" if untouched(case) else "HALF DONE", "why": said(error)}
    row: Row = {"prune": "ok", "seconds": round(time.time() - start, 2), **size_and_ties(case)}
    row |= attempt("fwd", forward, case)
    if row["fwd"] == "FAIL":
        return row
    row |= attempt("eq", equality, case, failed="not checked")
    row |= attempt("bwd", training, case)
    if row["bwd"] == "FAIL":
        row |= attempt("bwd", dense_training, case, failed="dense fails too")
    if onnx:
        row |= attempt("onnx", exported, case, why="onnx_why")
        if row["onnx"] == "FAIL":
            row |= attempt("onnx", dense_exported, case, failed="dense fails too", why="onnx_why")
    if reload:
        row |= attempt("reload", reloaded, case, why="reload_why")
    return row


def silently(judge: Callable[[], Row], sender: Connection) -> None:
    """Send the verdict from the child process, with the output of the libraries discarded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        sender.send(judge())
    except Exception as error:
        sender.send({"prune": "HARNESS", "why": said(error)})


def in_child(judge: Callable[[], Row], limit: float) -> Row:
    """The verdict of a forked child process; a crash and a time-out are verdicts, too."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=silently, args=(judge, sender))
    child.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(limit) else {"prune": "TIME-OUT"}
    except EOFError:
        return {"prune": "CRASH"}
    finally:
        child.kill()
        child.join()
        receiver.close()


def outcome(row: Row) -> str:
    """The outcome of a network, one of OUTCOMES."""
    if row.get("eq") == "DIFF" or row.get("tie") == "BROKEN" or row.get("fwd", "ok") != "ok":
        return "wrong"
    if row["prune"] == "FAIL" or row.get("vacuous"):
        return "refused"
    runs = row.get("fwd") == row.get("eq") == row.get("tie") == "ok"
    return "passed" if runs and row.get("bwd") in ("ok", "dense fails too") else "failed"


def shown(row: Row) -> str:
    values = {key: f"{row[key]:.3g}" if isinstance(row[key], float) else row[key] for key in SHOWN if key in row}
    return f"{outcome(row):8}{row['name']:30}{' '.join(f'{key}={value}' for key, value in values.items())}"


def summary(rows: Iterable[Row]) -> str:
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for source in (str(row["source"]), "all"):
            counts.setdefault(source, Counter())[outcome(row)] += 1
    counts["all"] = counts.pop("all", Counter())
    lines = [f"{'':12}{''.join(f'{name:>9}' for name in (*OUTCOMES, 'of'))}"]
    for source, count in counts.items():
        numbers = (*(count[name] for name in OUTCOMES), count.total())
        lines.append(f"{source:12}{''.join(f'{number:9d}' for number in numbers)}")
    return "\n".join(lines)


def networks(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[Network]:
    """The requested networks. Unknown names and missing packages are refused before the first verdict."""
    if args.random:
        return zoo_random.listing(args.random)
    sources = args.sources.split(",")
    if unknown := set(sources) - set(zoo_networks.SOURCES):
        parser.error(f"--sources: no {', '.join(sorted(unknown))}; there are {', '.join(zoo_networks.SOURCES)}")
    try:
        found = zoo_networks.listing(sources)
    except ModuleNotFoundError as error:
        parser.error(f"{error}. Install it (see --help), or leave its source out of --sources.")
    wanted = args.only.split(",") if args.only else [network.name for network in found]
    if unknown := set(wanted) - {network.name for network in found}:
        parser.error(f"--only: no {', '.join(sorted(unknown))} in {', '.join(sources)}")
    return [network for network in found if network.name in wanted]


def seeds(text: str) -> range:
    first, last = text.split(":")
    return range(int(first), int(last))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sources", default=",".join(zoo_networks.SOURCES), help="libraries to draw from; default: all"
    )
    parser.add_argument("--only", help="names of networks, as printed, separated by commas")
    parser.add_argument("--random", type=seeds, metavar="FROM:TO", help="random networks with these seeds instead")
    parser.add_argument("--pruner", default="keepk", help="keepk, torch-pruning or MODULE:FUNCTION")
    parser.add_argument("--onnx", action="store_true", help="also export each network")
    parser.add_argument("--reload", action="store_true", help="also save and load each network (keepk only)")
    parser.add_argument("--limit", type=float, default=150, help="time limit per network, in seconds")
    parser.add_argument("--out", type=Path, help="write one line of JSON per network; replaces the file")
    return parser


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    if args.reload and args.pruner != "keepk":
        parser.error("--reload judges keepk.save and keepk.load: it needs --pruner keepk")
    warnings.filterwarnings("ignore")
    sys.path.append(str(Path.cwd()))
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    prune, rows = pruner(args.pruner), []
    if args.pruner == "keepk":
        # torch imports much of itself in the first trace. Otherwise every child would do that, for about two seconds.
        (small,) = zoo_random.listing(range(1))
        halve(small.build(), small.inputs())
    with ExitStack() as stack:
        out = stack.enter_context(args.out.open("w")) if args.out else None
        for network in networks(parser, args):
            judge = partial(verdict, network, prune, onnx=args.onnx, reload=args.reload)
            row: Row = {"name": network.name, "source": network.source, **in_child(judge, args.limit)}
            row["outcome"] = outcome(row)
            row["pass"] = row["outcome"] == "passed"
            rows.append(row)
            print(shown(row), flush=True)
            if out:
                print(json.dumps(row), file=out, flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
