"""Result files: one line of JSON per result, with the same keys for every experiment.

A result is identified by its recipe, seed and count, and by the device and precision that it was trained with: a run in
mixed precision is a different run, not a repetition of the one in float32. Both stay in the file, and each is compared
with runs of its own kind.

``python -m keepk_paper.results FOLDER`` appends the lines that another folder has and ``results`` lacks.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keepk.errors import DataError
from keepk.version import __version__

REQUIRED = (
    "experiment recipe seed asked kept total test_error val_error dense_test_error seconds versions".split()  # noqa: SIM905
)


@dataclass(frozen=True, order=True)
class Training:
    """The device and precision that a run was trained with. Errors are always evaluated in float32.

    Args:
        device: The type of the device: "cpu" or "cuda".
        amp: Whether the forward passes ran in mixed precision with bfloat16.

    >>> str(Training()), str(Training(amp=True)), str(Training("cuda:1"))
    ('float32', 'bfloat16 mixed precision', 'float32 on cuda')
    >>> Training("cuda", amp=True).short, Training("cuda", amp=True).options
    ('bfloat16 on cuda', ['--device', 'cuda', '--amp'])
    """

    device: str = "cpu"
    amp: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", self.device.partition(":")[0])  # which of several GPUs does not matter

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Training":
        """The training of a result line. Lines without the keys are older: a CPU in float32."""
        return cls(record.get("device", "cpu"), record.get("amp", False))

    def __str__(self) -> str:
        return f"bfloat16 mixed precision{self._on}" if self.amp else f"float32{self._on}"

    @property
    def short(self) -> str:
        """The same in a word or two."""
        return f"bfloat16{self._on}" if self.amp else f"float32{self._on}"

    @property
    def _on(self) -> str:
        return "" if self.device == "cpu" else f" on {self.device}"

    @property
    def options(self) -> list[str]:
        """The options of `keepk paper run` that ask for it."""
        return [*(["--device", self.device] if self.device != "cpu" else []), *(["--amp"] if self.amp else [])]

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a result line; none for a CPU in float32, as in older lines."""
        return {} if self == Training() else {"device": self.device, "amp": self.amp}


USUAL = Training()  # a CPU in float32


def label(record: Mapping[str, Any]) -> str:
    """The recipe of a line as a row of a table names it: with the precision and device if they are not the usual ones.

    >>> label({"recipe": "dense"}), label({"recipe": "dense", "device": "cpu", "amp": True})
    ('dense', 'dense, bfloat16')
    """
    training = Training.of(record)
    return f"{record['recipe']}{'' if training == USUAL else f', {training.short}'}"


def versions() -> dict[str, str]:
    """The versions of keepk, torch and Python, and the commit if keepk runs from a checkout."""
    found = {"keepk": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return found | ({"commit": commit} if (commit := _commit()) else {})


def _commit() -> str | None:
    """The commit, with "+changes" if files of the package differ from it; None without git or a checkout."""
    package = Path(__file__).resolve().parents[1]
    git = ["git", "-C", str(package)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
        if tracked.returncode:
            return None  # installed inside the checkout of another project, whose commit says nothing
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+changes" * bool(changed)


def append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append results to a file in a single write, so that a killed process leaves no partial line.

    Raises:
        DataError: If a result lacks a required key.
    """
    lines = []
    for record in records:
        missing = [key for key in REQUIRED if key not in record]
        if missing:
            raise DataError(f"{path}: a result without {', '.join(missing)}. Every result has {', '.join(REQUIRED)}.")
        lines.append(json.dumps(record, sort_keys=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write("".join(lines).encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """Read the results of a file; if a run was repeated, its last line counts.

    Runs of the same recipe and seed on another device or in another precision are not repetitions: both are returned.

    Raises:
        DataError: If a line is not a result.
    """
    return [record for _, record in numbered(path)]


def numbered(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The results of a file as in `read`, each with the number of its line, the first of which is 1."""
    if not path.exists():
        return []
    latest = dict[tuple[Any, ...], tuple[int, dict[str, Any]]]()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(line)
            missing = [key for key in REQUIRED if key not in record]
        except (ValueError, TypeError):
            raise DataError(f"{path}:{number}: not a result line. Remove or repair it.") from None
        if missing:
            raise DataError(f"{path}:{number}: a result without {', '.join(missing)}. Remove or repair it.")
        if not isinstance(record.get("device", ""), str) or not isinstance(record.get("amp", False), bool):
            raise DataError(f"{path}:{number}: device is not a name, or amp is not true or false. Repair the line.")
        latest[record["recipe"], record["seed"], record["asked"], Training.of(record)] = number, record
    return list(latest.values())


def take_over(source: Path, folder: Path) -> dict[str, int]:
    """Append the lines of the result files of `source` that those of `folder` lack, as they are written.

    Lines are compared as a whole, so that taking over the same folder again appends nothing.

    Returns:
        How many lines were appended, by file.

    Raises:
        DataError: If there are no result files, or a line is not a result.
    """
    files = sorted(source.glob("*.jsonl"))
    if not files:
        raise DataError(f"{source}: no result files. Name a folder that `keepk paper run` wrote.")
    for path in files:
        numbered(path)  # all are checked before the first is written
    appended = dict[str, int]()
    for path in files:
        target = folder / path.name
        known = set(target.read_bytes().splitlines()) if target.exists() else set[bytes]()
        new = [json.loads(line) for line in path.read_bytes().splitlines() if line not in known]
        if new:
            append(target, new)
            appended[path.name] = len(new)
    return appended


if __name__ == "__main__":
    for name, number in take_over(Path(sys.argv[1]), Path("results")).items():
        print(f"{name}: {number} lines appended")
