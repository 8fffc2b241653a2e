"""The subcommands that repeat the paper's experiments: `keepk paper run`, `keepk paper report` and `keepk demo`.

They join the `keepk` command through the entry point group ``keepk.commands`` (see pyproject.toml).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from keepk.errors import DataError
from keepk.reports.tables import layer_table, whole
from keepk.reports.terminal import epoch_progress

if TYPE_CHECKING:
    from keepk_paper.experiments import Report  # imports torch


class Experiment(str, Enum):
    """The paper's experiments that `keepk paper run` repeats."""

    LENET_300_100 = "lenet-300-100"
    LENET_5 = "lenet-5"
    VGG16_CIFAR10 = "vgg16-cifar10"
    VGG16_HALF_CIFAR10 = "vgg16-half-cifar10"
    VGG16_FULL_CIFAR10 = "vgg16-full-cifar10"
    VGG16_SVHN = "vgg16-svhn"
    VGG16_HALF_CIFAR100 = "vgg16-half-cifar100"
    DENSENET40_CIFAR10 = "densenet40-cifar10"
    DENSENET40_CIFAR100 = "densenet40-cifar100"
    DENSENET40_SVHN = "densenet40-svhn"
    PARITY = "parity"
    ALL = "all"


def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for the figure, the numbers and the two saved networks; created if missing.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same numbers.")] = 0,
    dense_epochs: Annotated[int, typer.Option(min=0, help="Epochs of training before pruning.")] = 10,
    fine_tune_epochs: Annotated[int, typer.Option(min=0, help="Epochs of training after pruning.")] = 14,
    parity_starts: Annotated[
        int, typer.Option(min=1, max=99, help="Initialisations for each point of the parity figure.")
    ] = 3,
) -> None:
    """Prune a digit classifier to exactly K channels and K' head weights while it trains.

    Saves and loads it, measures how much smaller and faster it is, repeats a small version of the paper's parity
    experiment, and draws a figure. Takes about a minute on a CPU and downloads nothing.

    Example: [cyan]keepk demo --out demo --seed 0[/cyan]
    """
    from keepk_paper import demo as story  # noqa: PLC0415 - the other commands start faster without it
    from keepk_paper.demo_parity import Setting  # noqa: PLC0415 - the other commands start faster without it
    from keepk_paper.digits import Recipe  # noqa: PLC0415 - the other commands start faster without it

    console = Console(highlight=False)
    story.make_ready(out)
    recipe = Recipe(dense_epochs=dense_epochs, fine_tune_epochs=fine_tune_epochs)
    parity = Setting(inits=parity_starts)
    with epoch_progress(console, story.epochs_in_all(recipe, parity)) as watch:
        report = story.run(out, seed, recipe=recipe, parity=parity, watch=watch)
    picture, numbers = story.save(report, out)
    for unit, layers in (("channels", report.kept.channels), ("head weights", report.kept.head)):
        console.print(layer_table(layers, title=unit, total=whole(layers)))
    console.print(report, report.parity_line, sep="")
    console.print("One seed, 400 test images (one is 0.25 %). Other seeds differ: try --seed 1.", style="dim")
    console.print(f"Picture: {picture}\nNumbers: {numbers}\nNetwork: {out / story.SMALL}", soft_wrap=True, markup=False)


def run(
    experiment: Annotated[
        Experiment,
        typer.Argument(
            metavar="EXPERIMENT",
            help=f"The experiment: {', '.join(one.value for one in Experiment)}.",
            show_default=False,
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the data; missing files are downloaded. Not for parity, which generates its data.",
            show_default="$KEEPK_DATA, else ~/.cache/keepk",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="Number of seeds per recipe: 1, 2, ...; for parity, number of data draws.", show_default="5, parity 3"
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(help="Name of a recipe. Repeat the option for several recipes.", show_default="all"),
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Folder for the results, one file per experiment.", show_default="results")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the checkpoints, from which an interrupted run resumes. Not for parity.",
            show_default="runs",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Number of runs in parallel. Not for parity.", show_default="2")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each run.", show_default="1")] = None,
    full: Annotated[
        bool | None,
        typer.Option(
            "--full",
            help="Train the paper's networks at full width and length, which takes days on a CPU. Not for parity.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool | None,
        typer.Option(
            "--quick",
            help="Train a few epochs on a few images, to see that everything works; results go to a folder quick.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device to train on, such as cuda.", show_default="cpu")] = None,
    amp: Annotated[
        bool | None,
        typer.Option("--amp", help="Train in mixed precision with bfloat16. Not for parity.", show_default=False),
    ] = None,
    inits: Annotated[int | None, typer.Option(help="parity: initialisations per data draw.", show_default="10")] = None,
    figure: Annotated[Path | None, typer.Option(help="parity: write the figure to this PNG file.")] = None,
) -> None:
    """Repeat an experiment of the paper: train, prune, fine-tune, and write one line of JSON per result.

    Example: [cyan]keepk paper run lenet-300-100 --seeds 5[/cyan]
    """
    from keepk_paper import experiments  # noqa: PLC0415 - the other commands start faster without it
    from keepk_paper.tables import pages as tables  # noqa: PLC0415 - the other commands start faster without it

    # None means "not given": an option that the experiment does not have is refused only if it was given.
    options: dict[str, Any] = {
        "data": data,
        "seeds": seeds,
        "recipe": recipe,
        "results": results,
        "runs": runs,
        "jobs": jobs,
    }
    options |= {"threads": threads, "full": full, "inits": inits, "figure": figure}
    options |= {"quick": quick, "device": device, "amp": amp}
    console = Console(highlight=False)
    try:
        with run_progress(console) as watch:
            written = experiments.run(experiment.value, options, watch)
    except KeyboardInterrupt:
        console.print("Interrupted. The same command resumes every run from its last epoch.")
        raise typer.Exit(130) from None
    for file in written:
        for table in tables.experiment_tables(file):
            console.print(table)
        console.print(f"Results: {file}", soft_wrap=True, markup=False)


@contextmanager
def run_progress(console: Console) -> "Iterator[Callable[[Report], None]]":
    """Show a bar for each run that trains, with its error so far and the time left; lines if not on a terminal.

    Yields:
        A callback for the reports of `keepk_paper.experiments.run`.
    """
    if not console.is_terminal:
        yield lambda report: console.print(str(report), markup=False, soft_wrap=True)
        return
    columns = (
        TextColumn("[bold]{task.description}", markup=True),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[words]}", style="cyan", markup=False),
        TimeRemainingColumn(),
    )
    bars = dict[str, TaskID]()
    with Progress(*columns, console=console) as progress:

        def watch(report: "Report") -> None:
            if report.note or report.epoch == report.epochs:
                progress.console.print(str(report), markup=False)
                if report.who in bars:
                    progress.remove_task(bars.pop(report.who))
                return
            words = f"kept {report.kept:,}  {report.errors}"
            if report.who not in bars:
                bars[report.who] = progress.add_task(report.who, total=report.epochs, words=words)
            progress.update(bars[report.who], completed=report.epoch, words=words)

        yield watch


def report(
    results: Annotated[
        Path | None,
        typer.Option(help="Folder with the result files.", show_default="results/ of the checkout, else ./results"),
    ] = None,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    docs: Annotated[
        Path | None,
        typer.Option(
            help="Markdown page whose marked tables are updated from the same results.",
            show_default="docs/results.md of the checkout, if its results are read",
        ),
    ] = None,
) -> None:
    """Write a page with a verdict for each claim of the paper, all tables and figures, and the runs behind them.

    The page is one HTML file that needs no network. Nothing is trained.

    Example: [cyan]keepk paper report --out report.html[/cyan]
    """
    try:
        from keepk_paper.report import write  # noqa: PLC0415 - the other commands start faster without it
    except ModuleNotFoundError as missing:
        if missing.name != "matplotlib":
            raise
        message = 'keepk paper report: matplotlib is not installed. Run: pip install "keepk[demo]"'
        raise DataError(message) from None

    console = Console(highlight=False)
    for verdict, number in write.report(results, out, docs).items():
        console.print(f"{number:>3} {verdict}")
    console.print(f"Page: {out}", soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    """Add the subcommands `paper run`, `paper report`, `demo`, and the deprecated `run` to the `keepk` command."""
    paper = typer.Typer(no_args_is_help=True, help="Repeat the experiments of the paper that keepk implements.")
    paper.command("run")(run)
    paper.command("report")(report)
    app.add_typer(paper, name="paper")
    app.command("demo")(demo)
    app.command("run", deprecated=True)(run)
