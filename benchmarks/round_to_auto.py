"""Half the MACs in milliseconds: with and without `round_to="auto"`, beside Torch-Pruning at the same MACs.

    pip install -c constraints.txt timm torch-pruning --no-deps
    python benchmarks/round_to_auto.py --out results/benchmarks/round_to_auto.json --cut    # makes the networks
    python benchmarks/round_to_auto.py --out results/benchmarks/round_to_auto.json    # measures them; quiet machine

Every network is cut to at most half of its MACs. Scores are random, the same for both variants of keepk, so that all
layers lose about the same share and widths are as odd as a ranking makes them. Torch-Pruning has one ratio for all
layers; bisection finds the smallest one that meets the same bound, without rounding and with `round_to=8`. Each result
takes turns with the dense network (`keepk.latency`), in torch and in onnxruntime, with one thread.

Pruned networks are kept in `--folder`, as pickles, because Torch-Pruning has no other format; delete it to make them
again. Networks that the result file has are not measured again, so a measurement that was stopped goes on.

`--networks tiny` needs neither timm nor Torch-Pruning and takes seconds.
"""

import argparse
import copy
import json
import warnings
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import keepk
from keepk.errors import KeepkError
from keepk.model.costs import model_costs
from keepk_paper.results import versions

SHARE = 0.5
TRIES = 12  # of the bisection over Torch-Pruning's ratio
TIMM = {
    "resnet50": "resnet50",
    "efficientnet_b0": "efficientnet_b0",
    "convnext_atto": "convnext_atto",
    "vit_tiny": "vit_tiny_patch16_224",
}


def tiny() -> nn.Module:
    """Three convolutions, to try the script out."""
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 96), (96, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def built(name: str) -> tuple[nn.Module, Tensor]:
    """A network with random weights, and an example."""
    torch.manual_seed(0)
    if name == "tiny":
        return tiny().eval(), torch.randn(2, 3, 32, 32)
    from torchvision_on_cpu import make_importable  # noqa: PLC0415 - timm needs torchvision

    make_importable()
    import timm  # noqa: PLC0415 - not for the tiny network

    return timm.create_model(TIMM[name], pretrained=False).eval(), torch.randn(2, 3, 224, 224)


def by_keepk(dense: nn.Module, example: Tensor, round_to: Any) -> nn.Module:
    """A copy cut by keepk."""
    model = copy.deepcopy(dense)
    metric = keepk.metrics.random(seed=0)
    keepk.prune(model, example, macs=SHARE, metric=metric, layer_floor=0.1, round_to=round_to)
    return model


def by_torch_pruning(dense: nn.Module, example: Tensor, round_to: int | None) -> nn.Module:
    """The largest copy that a single ratio of Torch-Pruning leaves within half of the MACs."""
    import torch_pruning  # noqa: PLC0415 - needed for the comparison only

    bound = SHARE * model_costs(dense, example).macs
    *_, head = (it for it in dense.modules() if isinstance(it, nn.Linear))
    name = next(path for path, it in dense.named_modules() if it is head)

    def cut(ratio: float) -> nn.Module:
        model = copy.deepcopy(dense)
        torch.manual_seed(0)  # the same scores at every ratio
        attentions: list[Any] = [it for it in model.modules() if hasattr(it, "qkv") and hasattr(it, "num_heads")]
        pruner = torch_pruning.pruner.BasePruner(
            model,
            example,
            importance=torch_pruning.importance.RandomImportance(),
            pruning_ratio=ratio,
            ignored_layers=[model.get_submodule(name)],
            round_to=round_to,
            num_heads={it.qkv: it.num_heads for it in attentions},
        )
        pruner.step()
        for it in attentions:  # Torch-Pruning leaves the sizes that timm's attention stores to its users
            it.num_heads, it.attn_dim = pruner.num_heads[it.qkv], it.qkv.out_features // 3
            it.head_dim = it.attn_dim // it.num_heads
        return model

    low, high, found = 0.0, 0.95, cut(0.95)
    for _ in range(TRIES):
        middle = (low + high) / 2
        model = cut(middle)
        if model_costs(model, example).macs <= bound:
            high, found = middle, model
        else:
            low = middle
    return found


VARIANTS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "keepk": lambda dense, example: by_keepk(dense, example, None),
    'keepk, round_to="auto"': lambda dense, example: by_keepk(dense, example, "auto"),
    "Torch-Pruning": lambda dense, example: by_torch_pruning(dense, example, None),
    "Torch-Pruning, round_to=8": lambda dense, example: by_torch_pruning(dense, example, 8),
}


def stored(name: str, variant: str, folder: Path) -> nn.Module:
    """The pruned network, which is made if the folder does not have it.

    Raises:
        KeepkError: keepk cannot cut the network.
        Exception: Torch-Pruning cannot, or is not installed.
    """
    file = folder / f"{name}-{[*VARIANTS].index(variant)}.pt"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(VARIANTS[variant](*built(name)).eval(), file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
    model: nn.Module = torch.load(file, weights_only=False)  # written above
    return model


def measured(name: str, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """The MACs, parameters and latencies of a variant, or the error that prevented the measurement."""
    dense, example = built(name)
    line: dict[str, Any] = {"network": name, "variant": variant, "dense_macs": model_costs(dense, example).macs}
    try:
        model = stored(name, variant, options.folder)
        now = model_costs(model, example)
        times = (
            None
            if options.cut
            else keepk.latency(
                model,
                example,
                baseline=dense,
                batches=options.batches,
                repeats=options.repeats,
                threads=1,
                runtimes=("torch", "onnxruntime"),
            )
        )
    except Exception as error:  # of a network that the peer cannot cut, a missing package, a failed export
        if variant.startswith("keepk") and not isinstance(error, KeepkError):
            raise
        return {**line, "failed": f"{type(error).__name__}: {error}"[:300]}
    found = {"macs": now.macs, "parameters": now.parameters, "widths": widths(model)}
    return {**line, **found, **({"latency": times.data()["rows"]} if times else {})}


def widths(model: nn.Module) -> list[int]:
    """The output widths of convolutions and linear layers."""
    return [int(it.weight.shape[0]) for it in model.modules() if isinstance(it, nn.Conv2d | nn.Linear)]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=[*TIMM, "tiny"], default=[*TIMM])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--cut", action="store_true", help="only make the pruned networks")
    parser.add_argument("--folder", type=Path, default=Path("runs/round_to_auto"), help="for the pruned networks")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # scores are random, and exporters warn of much
    done = json.loads(options.out.read_text())["lines"] if options.out and options.out.exists() else []
    lines = {(it["network"], it["variant"]): it for it in done}
    for name in options.networks:
        for variant in VARIANTS:
            known = lines.get((name, variant), {})
            if "latency" in known or "failed" in known or (known and options.cut):
                continue
            line = lines[name, variant] = measured(name, variant, options)
            print(json.dumps(line), flush=True)
            if options.out:
                write(options, [*lines.values()])


def write(options: argparse.Namespace, lines: list[dict[str, Any]]) -> None:
    """Replace the result file."""
    head = {"benchmark": "round_to_auto", "macs": SHARE, "threads": 1, "repeats": options.repeats}
    peer = {"torch-pruning": metadata.version("torch-pruning")} if find_spec("torch_pruning") else {}
    result = {**head, "lines": lines, "versions": {**versions(), **peer}}
    unfinished = options.out.with_suffix(".part")
    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    unfinished.replace(options.out)


if __name__ == "__main__":
    main()
