"""Statistics in two processes: activations are summed over them when an event is decided."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1] / "support"


def test_two_processes_rank_by_the_data_of_both():
    """Runs under torchrun with DistributedDataParallel over gloo."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(HERE / "two_processes_statistics.py")], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all checks passed on rank") == 2
