"""Weights and channels of models that are sharded over two and three gloo processes."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import keepk
import sharded_processes as support

SCRIPT = Path(__file__).parents[1] / "support" / "sharded_processes.py"


def run_processes(count, folder):
    """Start the script without torchrun, which is a process of its own and slow to start."""
    folder.mkdir()
    environment = {**os.environ, "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=500)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(f"all checks passed on rank {rank}" in said[rank] for rank in range(count)), "\n".join(said)


def test_sharded_models_are_pruned_as_in_one_process(tmp_path):
    """Two processes, then three that continue from the checkpoint of the two, then this one alone."""
    run_processes(2, tmp_path / "two")
    run_processes(3, tmp_path / "three")
    run = support.run_of(support.net(seed=4))
    assert keepk.load_checkpoint(tmp_path / "checkpoint", **run) == {"step": 1}
    middle, end = torch.load(tmp_path / "expected.pt")
    support.assert_same_tensors(support.plain_state(run), middle)
    support.go_on(run, None, [2, 3])
    support.assert_same_tensors(support.plain_state(run), end)
