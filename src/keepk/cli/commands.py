"""The subcommands of `keepk`. Each parses its options, calls the library and prints the result.

Needs typer and rich, the extra ``keepk[cli]``.
"""

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import keepk
from keepk.cli.targets import input_from, model_from
from keepk.errors import KeepkError
from keepk.run.report import plan_report, whole
from keepk.show.progress import epoch_progress
from keepk.show.tables import layer_table, plan_table
from keepk.show.terminal import PlanPlot


class PlainErrors(TyperGroup):
    """Print a `KeepkError` as one red line and exit with code 1, without a traceback; exit quietly on Ctrl-C."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except KeepkError as refused:
            # Without markup: messages quote names such as "blocks[0]", which rich would read as a tag.
            Console(stderr=True).print(f"Error: {refused}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None  # 128 + SIGINT, as shells report it


app = typer.Typer(
    cls=PlainErrors, no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
)


class Experiment(str, Enum):
    """The paper's experiments that `keepk run` repeats."""

    LENET_300_100 = "lenet-300-100"
    LENET_5 = "lenet-5"
    VGG16_CIFAR10 = "vgg16-cifar10"
    VGG16_HALF_CIFAR10 = "vgg16-half-cifar10"
    VGG16_FULL_CIFAR10 = "vgg16-full-cifar10"
    VGG16_SVHN = "vgg16-svhn"
    DENSENET40_CIFAR10 = "densenet40-cifar10"
    PARITY = "parity"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"keepk {keepk.__version__}")
        raise typer.Exit


@app.callback()
def _keepk(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Prune PyTorch models: say how many weights or channels to keep, and exactly that many are kept."""


@app.command()
def plan(
    *,
    total: Annotated[int, typer.Option("--total", "-M", help="M, the number of weights or channels.")],
    p0: Annotated[float, typer.Option(help="Share pruned by the end of the first part, 0 to 1.")],
    n1: Annotated[int, typer.Option(help="Epochs of the first part. 1 prunes p0 at once; 0 omits the part.")],
    nu: Annotated[float, typer.Option(help="Additional share pruned at each later event, 0 to 1.")],
    prune: Annotated[
        float | None, typer.Option("--prune", "--p", help="Share pruned at the end, 0 to 1. Give this or --keep.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", "-K", help="K, the number of weights or channels to keep. Give this or --prune."),
    ] = None,
    mu: Annotated[float, typer.Option(help="Steepness of the first part, at least 0.")] = 10,
    every: Annotated[int, typer.Option(help="Epochs between events after the first part.")] = 1,
    epochs: Annotated[
        int | None, typer.Option(help="Length of the plan in epochs.", show_default="until K is reached")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON with total, keep and the plan.")] = False,
) -> None:
    """Print an annealing plan: how many weights or channels are left after each epoch.

    Example: [cyan]keepk plan --total 266610 --p0 0.85 --prune 0.935 --n1 1 --nu 0.05[/cyan]
    """
    if keep is not None and 1 <= total < keep:
        raise KeepkError(f"plan: --keep {keep} is more than --total {total}. Keep at most {total}.")
    schedule = keepk.Annealing(p0=p0, n1=n1, nu=nu, mu=mu, every=every)
    report = plan_report(schedule, total, keep=keep, prune=prune, epochs=epochs)
    if as_json:
        typer.echo(json.dumps({"total": report.total, "keep": report.keep, "plan": report.counts}))
        return
    console = Console(highlight=False)
    console.print(plan_table(report), PlanPlot(report), sep="")


@app.command()
def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME",
            help="The model: a Python module (the current directory is searched first), and the name in it of a "
            "torch.nn.Module or of a callable without arguments that returns one.",
            show_default=False,
        ),
    ],
    inputs: Annotated[
        list[str],
        typer.Option(
            "--input",
            "-i",
            metavar="SHAPE[:DTYPE]",
            help="Shape of an argument of forward, such as 2x3x224x224, with a batch size of at least 2; filled with "
            "random float32 numbers. 2x12:int64 is filled with zeros of that dtype. Repeat the option for several "
            "arguments.",
            show_default=False,
        ),
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with all spaces, reasons, bindings and layers.")
    ] = False,
) -> None:
    """Report what can be removed from a model, what cannot and why, and what each layer costs.

    Nothing is trained, changed or downloaded. MACs are the multiply-accumulates of one forward pass.

    Example: [cyan]keepk inspect mynet:make_model --input 2x3x224x224[/cyan] (make_model in mynet.py)
    """
    example = tuple(map(input_from, inputs))
    report = keepk.inspect(model_from(model), example)
    if as_json:
        typer.echo(report.json())
        return
    Console(highlight=False).print(report)


@app.command()
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
    from keepk.paper import demo as story  # noqa: PLC0415 - the other commands start faster without it
    from keepk.paper.demo_parity import Setting  # noqa: PLC0415
    from keepk.paper.digits import Recipe  # noqa: PLC0415

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


@app.command()
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
    inits: Annotated[int | None, typer.Option(help="parity: initialisations per data draw.", show_default="10")] = None,
    figure: Annotated[Path | None, typer.Option(help="parity: write the figure to this PNG file.")] = None,
) -> None:
    """Repeat an experiment of the paper: train, prune, fine-tune, and write one line of JSON per result.

    Example: [cyan]keepk run lenet-300-100 --seeds 5[/cyan]
    """
    from keepk.paper import experiments, tables  # noqa: PLC0415 - the other commands start faster without it

    # None means "not given": an option that the experiment does not have is refused only if it was given.
    options = {"data": data, "seeds": seeds, "recipe": recipe, "results": results, "runs": runs, "jobs": jobs}
    options |= {"threads": threads, "full": full, "inits": inits, "figure": figure}
    written = experiments.run(experiment.value, options)
    console = Console(highlight=False)
    for table in tables.experiment_tables(written):
        console.print(table)
    console.print(f"Results: {written}", soft_wrap=True, markup=False)
