"""Results of the scripts that prune pretrained networks (`examples/prune_crepe.py`, `examples/prune_minilm.py`).

A script lists its networks as `Entry` objects. `run` makes and stores those that the file of results does not have,
and appends a line for each; `measure_speed` measures the stored ones, which needs a quiet machine and no training.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import keepk
from keepk_paper import results


@dataclass(frozen=True)
class Entry:
    """A network of a table.

    Args:
        recipe: How it is made.
        asked: Its budget in MACs.
        seed: Of the recipe.
        make: Makes it, and returns it, alone or with the CPU seconds that all processes spent on it.
        more: Further keys of its line, such as the length of the training.
    """

    recipe: str
    asked: int
    seed: int
    make: Callable[[], nn.Module | tuple[nn.Module, float]]
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the folder with the network."""
        return f"{self.recipe.replace(', ', '-').replace(' ', '-')}-{self.asked}-{self.seed}"


def run(
    experiment: str,
    entries: Iterable[Entry],
    figures: Callable[[nn.Module], Mapping[str, Any]],
    *,
    example: Any,
    folder: Path,
    out: Path,
    limit: int | None = None,
) -> None:
    """Make every network that `out` does not have yet, store it, and append a line.

    Args:
        experiment: The name of the experiment.
        entries: The networks. The first one is the dense network, which is not pruned.
        figures: Measures a network; `test_error` and `val_error` in percent are among its keys.
        example: An input, for counting MACs.
        folder: The networks are stored in its subfolder `networks`.
        out: The file of results.
        limit: The most networks to make in this call.
    """
    done = {(line["recipe"], line["seed"], line["asked"]): line for line in results.read(out)}
    dense: Mapping[str, Any] | None = None
    count = 0
    for entry in entries:
        key = (entry.recipe, entry.seed, entry.asked)
        if key in done:
            dense = dense or done[key]
            continue
        if count == limit:
            return
        count += 1
        began = time.process_time()
        made = entry.make()
        model, seconds = made if isinstance(made, tuple) else (made, time.process_time() - began)
        stored = folder / "networks" / entry.name
        keepk.save(model, stored)
        cost, found = keepk.inspect(model, example), figures(model)
        line = {
            **{"experiment": experiment, "recipe": entry.recipe, "seed": entry.seed},
            **{
                "asked": entry.asked,
                "kept": cost.macs,
                "total": dense["total"] if dense else cost.macs,
                "unit": "MACs",
            },
            **{"test_error": found["test_error"], "val_error": found["val_error"]},
            "dense_test_error": (dense or found)["test_error"],
            **{"seconds": round(seconds, 1), "versions": results.versions()},
            **entry.more,
            **found,
            "parameters": cost.parameters,
            "file_bytes": (stored / "model.safetensors").stat().st_size,
            "stored": entry.name,
        }
        results.append(out, [line])
        dense = dense or line
        print(f"{entry.name}: error {found['test_error']:.2f} %, {cost.macs:,} MACs, {seconds:.0f} s", flush=True)


def measure_speed(
    build: Callable[[Mapping[str, Any]], nn.Module], *, example: Any, batch: int, repeats: int, folder: Path, out: Path
) -> None:
    """Measure each stored network in turns with the dense one, and write the figures into its line.

    The file is written once, at the end, so nothing else may append to it meanwhile.

    Args:
        build: Makes the network of a line before it was pruned, in eval mode.
        example: An input with at least `batch` rows.
        batch: How many rows are measured at a time.
        repeats: How often each forward pass is measured.
        folder: As for `run`.
        out: The file of results.
    """
    lines = results.read(out)
    dense = keepk.load(build(lines[0]), folder / "networks" / lines[0]["stored"])
    for line in lines:
        model = keepk.load(build(line), folder / "networks" / line["stored"])
        row = keepk.latency(model, example, baseline=dense, batches=batch, threads=1, repeats=repeats).rows[0]
        assert row.ratio is not None  # there is a baseline
        line["ms"], line["batch"] = round(row.model.median, 3), batch
        line["times_as_fast"] = [round(it, 2) for it in (row.ratio.median, row.ratio.lower, row.ratio.upper)]
        print(f"{line['stored']}: {line['ms']} ms, {line['times_as_fast'][0]} times as fast", flush=True)
    unfinished = out.with_suffix(".part")
    unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))
    unfinished.replace(out)
