"""Weights and channels of models that are sharded over two and three gloo processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_processes.py"


@pytest.mark.parametrize("processes", [2, 3])
def test_sharded_models_are_pruned_as_in_one_process(processes, tmp_path):
    """Started without torchrun, which is a process of its own and slow to start."""
    environment = {**os.environ, "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    started = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [process.communicate(timeout=500)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(f"all checks passed on rank {rank}" in said[rank] for rank in range(processes)), "\n".join(said)
