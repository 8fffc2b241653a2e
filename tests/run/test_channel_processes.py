"""Channels are removed from a model under DistributedDataParallel in two processes."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1] / "support"


def test_two_processes_shrink_the_same_model_and_say_who_differs():
    """Runs under torchrun with DistributedDataParallel over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(HERE / "two_processes_channels.py")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed on rank") == 2
