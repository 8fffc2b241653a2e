"""Law: killed at any moment and resumed, a run ends bit-equal to one that was never stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if not hasattr(os, "fork"):
    pytest.skip("the runs are forked", allow_module_level=True)

pytestmark = pytest.mark.xdist_group("test_resume")  # run the fixture in one process only


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    job = Path(__file__).parents[1].joinpath("support", "resume_job.py")
    command = [sys.executable, str(job), str(tmp_path_factory.mktemp("resume"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_and_resumed_runs_end_bit_equal_to_the_uninterrupted_one(report):
    for chain in report["chains"]:
        assert chain["final"] == report["uninterrupted"], chain


def test_the_runs_were_really_killed_and_also_inside_a_save(report):
    assert sum(chain["kills"] for chain in report["chains"]) >= 20
    assert sum(chain["inside_a_save"] for chain in report["chains"]) >= 3


@pytest.mark.parametrize("old", [0, 1], ids=["first checkpoint", "next checkpoint"])
def test_a_save_killed_at_any_file_step_leaves_the_old_or_the_new_checkpoint(report, old):
    sweep = report["sweeps"][old]
    assert sweep["found"] == sorted(sweep["found"])
    assert set(sweep["found"]) == {old, old + 1}
    assert len(sweep["found"]) >= 20
    assert set(sweep["files"]) == {2}
