"""The subcommands of `keepk`. Each parses its options, calls the library and prints the result.

Needs typer and rich, the extra ``keepk[cli]``.
"""

import json
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import keepk
from keepk.cli.targets import input_from, model_from
from keepk.errors import KeepkError
from keepk.reports.tables import plan_report, plan_table
from keepk.reports.terminal import PlanPlot


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
    """Prune PyTorch models to exactly the number of weights or channels that you ask for."""


@app.command()
def plan(
    *,
    total: Annotated[int, typer.Option("--total", "-M", help="M, the number of weights or channels.")],
    p0: Annotated[float, typer.Option(help="Share pruned by the end of the first part, 0 to 1.")],
    n1: Annotated[int, typer.Option(help="Epochs of the first part. 1 prunes p0 in one event; 0 omits it.")],
    nu: Annotated[float, typer.Option(help="Additional share pruned at each later event, 0 to 1.")],
    prune: Annotated[
        float | None, typer.Option("--prune", "--p", help="Share pruned at the end, 0 to 1. Use this or --keep.")
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", "-K", help="K, the number of weights or channels to keep. Use this or --prune."),
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
    """Report which units of a model can be removed, which cannot and why, and what each layer costs.

    Nothing is trained, changed or downloaded. MACs are the multiply-accumulates of one forward pass.

    Example: [cyan]keepk inspect mynet:make_model --input 2x3x224x224[/cyan] (make_model in mynet.py)
    """
    example = tuple(map(input_from, inputs))
    report = keepk.inspect(model_from(model), example)
    if as_json:
        typer.echo(report.json())
        return
    Console(highlight=False).print(report)


# Other packages add subcommands through this entry point group; `keepk_paper` adds `paper` and `demo`.
for entry in entry_points(group="keepk.commands"):
    entry.load()(app)
