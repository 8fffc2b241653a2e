"""The `keepk` command: its output and its errors."""

import json
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import keepk
from keepk.cli.commands import PlainErrors, app
from keepk_paper import experiments, parity
from keepk_paper.cli import Experiment
from keepk_paper.tables import pages as tables

FIGURE_1 = "plan --total 10000 --p0 0.8 --prune 0.9 --n1 10 --nu 0.02"
FIGURE_1_KEPT = [5600, 4133, 3400, 2960, 2666, 2457, 2300, 2177, 2080, 2000, 1800, 1600, 1400, 1200, 1000]
LENET_300_100 = "plan --total 266610 --p0 0.85 --prune 0.935 --n1 1 --nu 0.05"
OPTIONS = {
    "prune": "--input --out --macs --parameters --keep --prune --weights --set --select --exclude --metric --calibrate "
    "--batch --loss --layer-floor --round-to",
    "plan": "--total --p0 --n1 --nu --prune --keep --mu --every --epochs --json",
    "demo": "--out --seed --dense-epochs --fine-tune-epochs",
    "paper run": "--data --seeds --recipe --results --runs --jobs --threads --full --quick --device --amp --inits "
    "--figure lenet-5 parity",
    "paper report": "--results --out --docs",
}


def call(line, charset="utf-8"):
    return CliRunner(charset=charset).invoke(app, shlex.split(line), env={"COLUMNS": "80", "TERM": "dumb"})


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def table_rows(output):
    """The rows of a printed table as (epochs, kept, percent, pruned)."""
    found = re.findall(r"^\W*(\d[\d-]*)\W+([\d,]+)\W+([\d.]+)%\W+([\d,]+)\W*$", plain(output), re.MULTILINE)
    return [
        (epochs, int(kept.replace(",", "")), share, int(gone.replace(",", ""))) for epochs, kept, share, gone in found
    ]


def test_plan_prints_the_papers_figure_1():
    result = call(FIGURE_1)
    assert result.exit_code == 0
    gone = [before - after for before, after in pairwise([10_000, *FIGURE_1_KEPT])]
    shares = [f"{kept / 100:.2f}" for kept in FIGURE_1_KEPT]
    epochs = map(str, range(1, 16))
    assert table_rows(result.stdout) == list(zip(epochs, FIGURE_1_KEPT, shares, gone, strict=True))
    assert shares[:4] == ["56.00", "41.33", "34.00", "29.60"]


def test_plan_counts_exactly_where_floats_do_not():
    assert [row[1] for row in table_rows(call(LENET_300_100).stdout)] == [39_991, 26_661, 17_329]
    one_step = "plan --total 266200 --p0 0.935 --prune 0.935 --n1 1 --nu 0"
    assert table_rows(call(one_step).stdout) == [("1", 17_303, "6.50", 248_897)]


def test_keep_and_prune_give_one_plan():
    by_keep = LENET_300_100.replace("--prune 0.935", "--keep 17329")
    assert call(by_keep).stdout == call(LENET_300_100).stdout


def test_epochs_at_which_nothing_changes_are_folded():
    assert table_rows(call(f"{FIGURE_1} --epochs 20").stdout)[-2:] == [
        ("14", 1200, "12.00", 200),
        ("15-20", 1000, "10.00", 200),
    ]
    waiting = call("plan --total 100 --p0 0.5 --keep 10 --n1 1 --nu 0.4 --every 3")
    assert table_rows(waiting.stdout) == [("1-3", 50, "50.00", 50), ("4", 10, "10.00", 40)]


def test_plan_as_json():
    result = call(f"{FIGURE_1} --epochs 16 --json")
    assert json.loads(result.stdout) == {"total": 10_000, "keep": 1000, "plan": [*FIGURE_1_KEPT, 1000]}


def test_mu_reaches_the_schedule():
    printed = json.loads(call(f"{FIGURE_1} --mu 2.5 --json").stdout)["plan"]
    assert tuple(printed) == keepk.Annealing(p0=0.8, n1=10, nu=0.02, mu=2.5)(10_000, 1000, None)
    assert printed != FIGURE_1_KEPT


@pytest.mark.parametrize("charset", ["ascii", "utf-8"])
def test_plan_fits_80_columns_and_speaks_the_terminals_encoding(charset):
    result = call(FIGURE_1, charset=charset)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.isascii() == (charset == "ascii")
    assert "10,000 " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            "--total 1000 --p0 0.95 --prune 0.9 --n1 1 --nu 0.05",
            "Annealing: p0=0.95 leaves 50 of 1000, fewer than the 100 to keep. Choose p0 <= 0.9",
        ),
        ("--total 1000 --p0 0.5 --n1 1 --nu 0.05", "got neither keep= nor prune=. Pass exactly one of them."),
        ("--total 1000 --p0 0.5 --n1 1 --nu 0.05 --keep 9 --prune 0.9", "got both keep=9 and prune=0.9."),
        ("--total 1000 --p0 0.5 --n1 1 --nu 0.05 --keep 9 --epochs 3", "It needs 11 epochs"),
        (
            "--total 1000 --p0 0.5 --n1 1 --nu 0.05 --keep 2000",
            "plan: --keep 2000 is more than --total 1000. Keep at most 1000.",
        ),
        ("--total 1000 --p0 0.5 --n1 1 --nu 0.05 --prune 1", "prune=1.0 keeps none"),
        ("--total 0 --p0 0.5 --n1 1 --nu 0.05 --keep 1", "total=0: too small. Pass an int of at least 1."),
        ("--total 10 --p0 0.5 --n1 1 --nu 0.05 --keep 1 --epochs 0", "epochs=0: too small."),
        ("--total 1000 --p0 nan --n1 1 --nu 0.05 --keep 9", "p0=nan: not a finite number."),
        ("--total 1000 --p0 1.5 --n1 1 --nu 0.05 --keep 9", "a share lies between 0 and 1. Write 0.9 for 90 %."),
    ],
)
def test_a_refusal_is_one_line_in_the_librarys_words(arguments, words):
    result = call(f"plan {arguments}")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert words in result.stderr
    assert plain(result.stderr).startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_recipe_that_does_not_exist_is_refused_by_name(tmp_path):
    result = call(f"paper run lenet-5 --recipe nope --data '{tmp_path}' --results '{tmp_path}/results'")
    assert result.exit_code == 1
    assert "no recipe 'nope'" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("experiment", "option", "other"),
    [
        ("vgg16-cifar10", "--figure x.png", "parity"),
        ("lenet-5", "--inits 10", "parity"),
        ("parity", "--full", "another experiment"),
        ("parity", "--jobs 2", "another experiment"),
        ("parity", "--runs x", "another experiment"),
        ("parity", "--data x", "another experiment"),
    ],
)
def test_an_option_of_another_experiment_is_refused(experiment, option, other, tmp_path):
    result = call(f"paper run {experiment} {option} --recipe nope --results '{tmp_path}/results'")
    assert result.exit_code == 1
    word = option.split()[0]
    assert f"run: {word} is not an option of {experiment}. Leave it out, or run {other}." in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_options_that_nobody_gives_are_those_of_the_experiment(monkeypatch, tmp_path):
    asked: list[Any] = []
    file = tmp_path / "none.jsonl"
    monkeypatch.setattr(experiments, "_run_recipes", lambda name, **options: asked.append((name, options)) or file)
    monkeypatch.setattr(parity, "run_parity", lambda **options: asked.append(options) or file)
    monkeypatch.setattr(tables, "experiment_tables", lambda _: [])
    assert [call(line).exit_code for line in ("paper run lenet-5 --full", "paper run parity --seeds 7")] == [0, 0]
    given = {"seeds": 5, "data": None, "runs": Path("runs"), "jobs": 2}
    shared = {"recipes": None, "results": Path("results"), "threads": 1, "device": "cpu"}
    (name, options), options_of_parity = asked
    assert callable(options.pop("watch"))
    assert (name, options) == ("lenet-5", {**shared, **given, "full": True, "amp": False, "quick": False})
    assert options_of_parity == {**shared, "draws": 7, "inits": 10}


def test_help_names_the_defaults_that_the_experiments_have():
    printed = " ".join(plain(call("paper run --help").stdout).replace("│", " ").split())
    for options, words in (
        (experiments.OPTIONS, "default: ({seeds}, parity"),
        (experiments.PARITY_OPTIONS, "parity {seeds})]"),
        (experiments.PARITY_OPTIONS, "[default: ({inits})]"),
        (experiments.OPTIONS, "[default: ({results})]"),
        (experiments.OPTIONS, "[default: ({runs})]"),
        (experiments.OPTIONS, "Not for parity. [default: ({jobs})]"),
        (experiments.OPTIONS, "of each run. [default: ({threads})]"),
    ):
        assert words.format(**options) in printed


def test_an_experiment_that_does_not_exist_is_a_usage_error():
    result = call("paper run lenet-6")
    assert result.exit_code == 2
    assert "lenet-300-100" in result.stderr


@pytest.mark.parametrize("command", OPTIONS)
def test_help_shows_an_example_and_every_option(command):
    result = call(f"{command} --help")
    assert result.exit_code == 0
    assert f"Example: keepk {command} " in plain(result.stdout)
    assert [option for option in OPTIONS[command].split() if option not in plain(result.stdout)] == []


def test_a_plan_is_of_weights_or_channels():
    printed = " ".join(plain(call("plan --help").stdout).split())
    assert "how many weights or channels are left after each epoch" in printed
    assert "weights or channels" in keepk.__doc__


def test_help_names_every_command():
    assert [command for command in OPTIONS if command.split()[0] not in plain(call("--help").stdout)] == []


def test_the_old_name_of_paper_run_works_and_says_that_it_is_deprecated(tmp_path):
    result = call(f"run lenet-5 --recipe nope --data '{tmp_path}' --results '{tmp_path}/results'")
    assert result.exit_code == 1
    assert "no recipe 'nope'" in result.stderr
    assert "deprecated" in result.stderr


def test_version():
    assert call("--version").stdout == f"keepk {keepk.__version__}\n"


def test_ctrl_c_is_quiet():
    interrupted = typer.Typer(cls=PlainErrors)

    @interrupted.callback()
    def root():
        pass

    @interrupted.command()
    def wait():
        raise KeyboardInterrupt

    result = CliRunner().invoke(interrupted, ["wait"])
    assert (result.exit_code, result.output) == (130, "")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_what_to_install(missing):
    program = f"""
import sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
from keepk.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(rf'keepk: {missing}[\w.]* is not installed\. Run: pip install "keepk\[cli\]"\n', result.stderr)


def test_main_is_the_command():
    program = "from keepk.cli import main; main()"
    arguments = [sys.executable, "-c", program, *LENET_300_100.split(), "--json"]
    printed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["plan"] == [39_991, 26_661, 17_329]


def test_every_experiment_can_be_named_on_the_command_line():
    assert {one.value for one in Experiment} == {*experiments.EXPERIMENTS, experiments.PARITY, experiments.ALL}
