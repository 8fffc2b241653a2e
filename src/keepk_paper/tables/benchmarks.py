"""Tables of the benchmarks, generated from the JSON files that the scripts in `benchmarks/` write."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from keepk.errors import DataError
from keepk.reports.tables import Table

SELECT_NAMES = {
    "read": "one plain read of all weights",
    "keepk_event": "keepk: `Pruner(...).step()`",
    "torch_global_unstructured": "torch: `prune.global_unstructured`",
}


def select_event(folder: Path) -> Table:
    """One global event: CPU seconds, extra memory, and both relative to keepk."""
    report = _read(folder / "select_event.json")
    ours = report["results"]["keepk_event"]
    rows = [_select_row(f"{SELECT_NAMES[name]}", row, ours) for name, row in report["results"].items()]
    for name, row in report.get("billion", {}).items():
        if name in SELECT_NAMES:
            rows.append(_billion_row(f"{SELECT_NAMES[name]}, 1,000,000,000 weights", row))
    columns = (
        f"{report['weights']:,} weights",
        "CPU s",
        "range",
        "plain reads",
        "extra MB",
        "CPU / keepk",
        "MB / keepk",
    )
    return Table(columns, tuple(rows))


def hold_masks(folder: Path) -> Table:
    """The cost of masks in a training step with batch size 128."""
    report = _read(folder / "hold_masks.json")
    rows = tuple(
        (
            f"{row['network']}, {row['optimizer']}",
            f"{row['weights']:,}",
            str(row["threads"]),
            f"{1000 * row['step_cpu_seconds']:.2f}",
            f"{row['cost_percent']:.1f} %",
            "{:.1f} to {:.1f} %".format(*row["cost_percent_quartiles"]),
            f"{row['hold_alone_percent']:.1f} %",
        )
        for row in report["rows"]
    )
    return Table(("network", "weights", "threads", "step, CPU ms", "cost of masks", "quartiles", "hook alone"), rows)


def collect_statistics(folder: Path) -> Table:
    """The cost of collecting statistics in a training step."""
    report = _read(folder / "collect_statistics.json")
    rows = tuple(
        (
            row["metric"],
            row["memory_format"].removesuffix("_format").replace("_", " "),
            f"{1000 * row['step_cpu_seconds']:.0f}",
            f"{row['cost_percent']:.1f} %",
            "{:.1f} to {:.1f} %".format(*row["cost_percent_quartiles"]),
            f"{row['alone_percent']:.1f} %",
        )
        for row in report["rows"]
    )
    return Table(("metric", "memory format", "step, CPU ms", "cost", "quartiles", "collector alone"), rows)


def paper_sizes(folder: Path) -> Table:
    """Parameters and MACs of the paper's networks at full width and the paper's counts, beside the printed ones."""
    rows = tuple(
        (
            row["network"],
            f"{row['kept']:,} of {row['total']:,}",
            f"{row['parameters']:,}",
            row["printed"],
            f"{row['macs'] / 1e6:.1f}M",
            f"{row['macs'] / row['dense_macs']:.3f}",
            f"{row['difference']:.0e}",
        )
        for row in _read(folder / "paper_sizes.json")["rows"]
    )
    columns = ("network", "kept", "parameters", "printed", "MACs", "of dense", "shrunk - masked")
    return Table(columns, rows)


def compact(folder: Path) -> Table:
    """The sparse LeNets before and after the removal of dead neurons, averaged over the seeds."""
    rows = dict[tuple[str, str], list[dict[str, Any]]]()
    for row in _read(folder / "compact.json")["rows"]:
        rows.setdefault((row["experiment"], row["recipe"]), []).append(row)
    columns = (
        "network",
        "recipe",
        "n",
        "weights",
        "weights after",
        "parameters",
        "parameters after",
        "largest difference",
    )
    return Table(columns, tuple(_compact_row(*key, found) for key, found in rows.items()))


def _compact_row(experiment: str, recipe: str, rows: list[dict[str, Any]]) -> tuple[str, ...]:
    means = [mean(row[key][place] for row in rows) for key in ("weights", "parameters") for place in (0, 1)]
    difference = max(row["relative_difference"] for row in rows)
    return (experiment, recipe, str(len(rows)), *(f"{value:,.0f}" for value in means), f"{difference:.0e}")


def shrink_event(folder: Path, name: str = "shrink_event") -> Table:
    """One removal event of keepk and one of Torch-Pruning, in CPU seconds."""
    rows = []
    for row in _read(folder / f"{name}.json")["networks"]:
        ours, bare, limit, theirs = row["keepk"], row["keepk_weights"], row["limit"], row["torch_pruning"]
        step, replay = theirs["step"]["cpu_seconds"], row.get("keepk_replay")  # older measurements have none
        replayed = ours["event"]["cpu_seconds"] + (replay["replay"]["cpu_seconds"] if replay else 0.0)
        rows.append(
            (
                row["network"],
                _seconds(ours["event"]),
                _seconds(replay["replay"]) if replay else "",
                _seconds(bare["event"]),
                _seconds(limit["copy"]),
                _seconds(limit["least"]),
                _seconds(theirs["step"]),
                f"{step / replayed:.1f}" if replay else "",
                *(f"{step / part['cpu_seconds']:.1f}" for part in (ours["event"], bare["event"], limit["least"])),
                f"{ours['removed_percent']:.1f} / {theirs['removed_percent']:.1f} %",
                " / ".join(
                    [_passes(ours, "event"), *([_passes(replay, "replay")] if replay else []), _passes(theirs, "step")]
                ),
            )
        )
    columns = (
        "network",
        "keepk with Adam (quartiles)",
        "replay",
        "without Adam",
        "plain copy",
        "least",
        "Torch-Pruning step",
        "step / with + replay",
        "step / with",
        "step / without",
        "step / least",
        "parameters gone",
        "passes",
    )
    return Table(columns, tuple(rows))


def shrink_event_half(folder: Path) -> Table:
    """The same with half of all channels removed at once."""
    return shrink_event(folder, "shrink_event_half")


def budget_event(folder: Path) -> Table:
    """One event with a budget, relative to one without that removes as much."""
    rows = tuple(
        (
            row["network"],
            f"{row['kept']:,} of {row['channels']:,}",
            f"{row['reached_macs'] / row['dense_macs']:.4f}",
            f"{row['event_cpu_seconds']:.3f}",
            f"{row['budget_cpu_seconds']:.3f}",
            f"{row['ratio']:.2f}",
            f"{row['cost_evaluations']}",
            f"{1000 * row['cost_cpu_seconds']:.0f}",
        )
        for row in _read(folder / "budget_event.json")["networks"]
    )
    columns = ("network", "channels kept", "MACs / dense", "event", "with a budget", "ratio", "costs computed", "ms")
    return Table(columns, rows)


def annealed_run(folder: Path) -> Table:
    """The time of a run that shrinks, relative to the dense run, beside the ratio of MACs."""
    rows = tuple(
        (
            name,
            f"{twin['time_share']:.3f}",
            f"{twin['macs_share']:.3f}",
            f"{twin['time_share'] / twin['macs_share']:.2f}",
            f"{1000 * twin['event_cpu_seconds']:.0f}",
        )
        for name, twin in _read(folder / "annealed_run.json")["twins"].items()
    )
    return Table(("VGG-16, annealed to 30 %", "time / dense", "MACs / dense", "time / MACs", "event, CPU ms"), rows)


def inference(folder: Path) -> Table:
    """The speed-up at inference with 70 % fewer channels, beside the ratio of MACs."""
    report = _read(folder / "inference.json")
    rows = tuple(
        (
            row["runtime"],
            str(row["batch"]),
            f"{row['baseline']['median']:.2f}",
            f"{row['model']['median']:.2f}",
            f"{row['ratio']['median']:.1f} ({row['ratio']['lower']:.1f} to {row['ratio']['upper']:.1f})",
            f"{report['macs_ratio']:.1f}",
        )
        for row in report["latency"]["rows"]
    )
    return Table(("runtime", "batch", "dense, ms", "1,267 channels, ms", "times as fast", "fewer MACs"), rows)


def compact_files(folder: Path) -> Table:
    """Sizes of compact files beside the entropy bound, and the speed of the decoder."""
    rows = []
    for row in _read(folder / "compact_files.json")["rows"]:
        plain = row["bytes"]["plain"]
        rows.append(
            (
                row["network"],
                f"{row['pruned_percent']:.0f} %",
                f"{plain:,}",
                f"{plain / row['bytes']['compact']:.1f}",
                f"{plain / row['entropy_bytes']:.1f}",
                f"{plain / row['bytes']['half']:.1f}",
                f"{row['decode_mb_per_second']:,.0f}",
            )
        )
    columns = ("network", "pruned", "bytes", "times smaller", "entropy bound", "with half=True", "decoded, MB/s")
    return Table(columns, tuple(rows))


def shrink_files(folder: Path) -> Table:
    """Memory and bytes of pruning a checkpoint on disk."""
    found = _read(folder / "shrink_files.json")
    before, after = found["parameters"]
    kept = ", ".join(f"{name} {found['sizes'][name]:,} -> {now:,}" for name, now in found["per_layer"].items())
    read, written = (found[key] / found[of] for key, of in (("rchar", "source_bytes"), ("wchar", "target_bytes")))
    rows = (
        ("parameters", f"{before:,} -> {after:,}"),
        ("in each layer", kept),
        ("files", f"{_gigabytes(found['source_bytes'])} -> {_gigabytes(found['target_bytes'])}"),
        (
            "largest file, largest tensor",
            f"{_gigabytes(found['largest_shard'])}, {_gigabytes(found['largest_tensor'])}",
        ),
        ("anonymous memory (RssAnon), peak", _gigabytes(found["rss_anon_peak"])),
        ("of this, before the call", _gigabytes(found["rss_anon_before"])),
        ("resident set (ru_maxrss), peak", _gigabytes(found["ru_maxrss"])),
        ("bytes read / bytes of the source", f"{read:.3f}"),
        ("bytes written / bytes of the target", f"{written:.3f}"),
        ("time, on a busy machine", f"{found['wall_seconds']:,.0f} s, {found['cpu_seconds']:,.0f} CPU s"),
    )
    return Table(("", "measured"), rows)


def growth(folder: Path) -> Table:
    """Time and memory of a trace and of an event by depth and width, and their slopes."""
    found, rows = _read(folder / "growth.json"), list[tuple[str, ...]]()
    for over, word in (("layers", "depth"), ("width", "width")):
        for row in found[over]:
            rows.append(
                (
                    f"{row['layers']} layers of width {row['width']:,}",
                    f"{row['units']:,}",
                    f"{row['trace_cpu_seconds']:.1f}",
                    f"{row['trace_bytes'] / 1e6:.0f}",
                    f"{row['event_cpu_seconds']:.1f}",
                    f"{row['event_bytes'] / 1e6:.0f}",
                )
            )
        slopes = found["slopes"][over]
        keys = ("trace_cpu_seconds", "trace_bytes", "event_cpu_seconds", "event_bytes")
        rows.append((f"slope over {word}", "", *(f"{slopes[key]:.2f}" for key in keys)))
    return Table(("Llama", "units", "trace, CPU s", "trace, MB", "event, CPU s", "event, MB"), tuple(rows))


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def shrink_trace(folder: Path) -> Table:
    """The one-time cost of finding the channels, beside a forward pass."""
    rows = []
    for row in _read(folder / "shrink_event.json")["networks"]:
        forward, ours, theirs = row["forward"], row["keepk"], row["torch_pruning"]
        rows.append(
            (
                row["network"],
                _seconds(forward),
                _seconds(ours["trace"]),
                f"{ours['trace']['cpu_seconds'] / forward['cpu_seconds']:.1f}",
                _seconds(theirs["build"]),
                f"{_passes(ours, 'trace')} / {_passes(theirs, 'build')}",
            )
        )
    columns = ("network", "forward pass", "keepk trace (quartiles)", "forward passes", "Torch-Pruning build", "passes")
    return Table(columns, tuple(rows))


def first_trace(folder: Path) -> Table:
    """Time and memory of the first trace in a new process."""
    names = {"imports": "tiny network: torch's own imports", "resnet_50": "ResNet-50, after those imports"}
    rows = tuple(
        (
            names[name],
            f"{row['cpu_seconds']:.2f}",
            f"{row['forward_cpu_seconds']:.2f}",
            f"{row['extra_mb']:.0f}",
        )
        for name, row in _read(folder / "shrink_event.json")["first_trace"].items()
    )
    return Table(("first trace of a process", "CPU s", "forward, CPU s", "extra MB"), rows)


def _seconds(part: dict[str, Any]) -> str:
    low, high = part["cpu_seconds_quartiles"]
    return f"{part['cpu_seconds']:.3f} ({low:.3f} to {high:.3f})"


def _passes(contender: dict[str, Any], part: str) -> str:
    """Forward and backward passes."""
    made = contender["passes"][part]
    return f"{made['forward']} + {made['backward']}"


def _select_row(name: str, row: dict[str, Any], ours: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["cpu_seconds_range"]
    return (
        name,
        f"{row['cpu_seconds']:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{row['plain_reads']:.1f}",
        f"{row['extra_mb']:,.0f}",
        f"{row['cpu_seconds'] / ours['cpu_seconds']:.1f}",
        f"{row['extra_mb'] / ours['extra_mb']:.1f}",
    )


def _billion_row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if "failed" in row:
        return (name, f"fails within {row['address_space_gb']} GB", "", "", "", "", "")
    return (name, f"{row['cpu_seconds']:.2f}", "one run", "", f"{row['extra_mb']:,.0f}", "", "")


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise DataError(f"{path}: no such result. Run make bench.")
    report: dict[str, Any] = json.loads(path.read_text())
    return report
