"""The code in CONTRIBUTING.md runs as written, block after block, and prints what its comments say."""

import contextlib
import io
import re
from pathlib import Path

import torch

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_the_recipes_run_and_print_what_they_say():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6  # a rule in two parts, two metrics, a schedule, an experiment
    names: dict[str, object] = {"__name__": "contributing"}
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()) as printed:
        torch.manual_seed(0)
        for number, block in enumerate(blocks, start=1):
            exec(compile(block, f"CONTRIBUTING.md, block {number}", "exec"), names)
    promised = re.findall(r"^print\(.*\)  # (.*)$", "\n".join(blocks), re.MULTILINE)
    assert promised
    assert printed.getvalue().splitlines() == promised


def test_every_recipe_has_code():
    recipes = re.findall(r"^## (Add .*?)\n(.*?)(?=^## |\Z)", TEXT, re.DOTALL | re.MULTILINE)
    assert [title for title, _ in recipes] == [
        "Add a rule for an operation",
        "Add a metric",
        "Add a schedule",
        "Add an experiment",
    ]
    assert all("```python" in body for _, body in recipes)
