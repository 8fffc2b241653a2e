"""Results: one line of JSON a point, the same keys for every experiment."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from keepk.errors import DataError
from keepk.version import __version__

REQUIRED = (
    "experiment recipe seed asked kept total test_error val_error dense_test_error seconds versions".split()  # noqa: SIM905
)


def versions() -> dict[str, str]:
    """The versions that a result was made with, and the commit where keepk runs from a checkout."""
    found = {"keepk": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return found | ({"commit": commit} if (commit := _commit()) else {})


def _commit() -> str | None:
    """The checkout's commit, with "+changes" if files of the package differ from it; None without git or a checkout."""
    package = Path(__file__).resolve().parents[1]
    git = ["git", "-C", str(package)]
    try:
        tracked = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, check=False)
        if tracked.returncode:
            return None  # installed below the checkout of another project
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+changes" * bool(changed)


def append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Add points to a result file, all of them in one write, so that a kill leaves no half line behind."""
    lines = []
    for record in records:
        missing = [key for key in REQUIRED if key not in record]
        if missing:
            raise DataError(f"{path}: a result without {', '.join(missing)}. Every point has {', '.join(REQUIRED)}.")
        lines.append(json.dumps(record, sort_keys=False) + "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write("".join(lines).encode())
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """The points of a result file; where one was run again, its last line counts."""
    if not path.exists():
        return []
    latest = dict[tuple[Any, ...], dict[str, Any]]()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            record = json.loads(line)
            missing = [key for key in REQUIRED if key not in record]
        except (ValueError, TypeError):
            raise DataError(f"{path}:{number}: not a result line. Remove or mend it.") from None
        if missing:
            raise DataError(f"{path}:{number}: a result without {', '.join(missing)}. Remove or mend it.")
        latest[record["recipe"], record["seed"], record["asked"]] = record
    return list(latest.values())
