"""The subcommands of `keepk`. Each parses its options, calls the library and prints the result.

Needs typer and rich, the extra ``keepk[cli]``.
"""

import copy
import json
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import keepk
from keepk.cli.targets import (
    CHANNEL_METRICS,
    batches_from,
    function_from,
    input_from,
    load_weights,
    metric_from,
    model_from,
    set_attributes,
)
from keepk.deploy.prune import STAGES
from keepk.errors import KeepkError
from keepk.reports.tables import plan_report, plan_table
from keepk.reports.terminal import PlanPlot, stage_progress


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


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:NAME",
        help="The model: a Python module (the current directory is searched first), and the name in it of a "
        "torch.nn.Module or of a callable without arguments that returns one.",
        show_default=False,
    ),
]
Inputs = Annotated[
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
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set an attribute of the model's config, or of the model, such as use_cache=false. Can be repeated.",
        show_default=False,
    ),
]


@app.command()
def prune(  # noqa: PLR0913 - the options of the command
    *,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:NAME|FOLDER",
            help="The model, as for inspect; or the folder of a checkpoint of transformers, which is pruned on disk, "
            "tensor by tensor.",
            show_default=False,
        ),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="SHAPE[:DTYPE]",
            help="Shape of an argument of forward, as for inspect. A folder needs none if its model takes token ids or "
            "images.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pruned model, for keepk.load.", show_default=False)],
    macs: Annotated[
        str | None, typer.Option(help="Most MACs per sample: a share such as 0.5, or a number.", show_default=False)
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Most parameters: a share such as 0.5, or a number.", show_default=False)
    ] = None,
    keep: Annotated[int | None, typer.Option(help="Number of channels to keep.", show_default=False)] = None,
    share: Annotated[
        float | None, typer.Option("--prune", help="Share of channels to prune.", show_default=False)
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Safetensors file with the trained weights.", show_default=False)
    ] = None,
    settings: Settings = None,
    select: Annotated[list[str] | None, typer.Option(help="Glob over names of modules.", show_default="*")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Glob over names to leave out.", show_default=False)] = None,
    metric: Annotated[
        str | None, typer.Option(help=f"Metric: {', '.join(CHANNEL_METRICS)}.", show_default="reads weights alone")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="Safetensors file with 'inputs' (and 'targets') to recalibrate BatchNorms.", show_default=False
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size for --calibrate.")] = 64,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Function of the model and a batch that returns the loss, for metrics that need gradients.",
            show_default=False,
        ),
    ] = None,
    layer_floor: Annotated[
        float | None,
        typer.Option(
            help="Least share (below 1) or number of channels per layer; by default 0.1 under a budget, otherwise 1.",
            show_default=False,
        ),
    ] = None,
    round_to: Annotated[
        str | None,
        typer.Option(
            help='Make the width of every cut layer a multiple of this; "auto" chooses one for each layer.',
            show_default=False,
        ),
    ] = None,
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Keep the same share of every layer.")] = False,
) -> None:
    """Prune a trained model to a budget in one call, save it, and measure it.

    Nothing is trained. The model is loaded again with keepk.load(make_model(), OUT). The folder of a checkpoint is
    pruned without loading the model, and with --per-layer plain from_pretrained loads the result.

    Example: [cyan]keepk prune mynet:make_model --weights w.safetensors -i 2x3x224x224 --macs 0.5 --out small[/cyan]

    Example: [cyan]keepk prune Llama-7B --select "*.mlp*" --prune 0.25 --per-layer --out small[/cyan]
    """
    if Path(model).is_dir():
        only_for_models = {
            "--weights": weights,
            "--set": settings,
            "--calibrate": calibrate,
            "--loss": loss,
        }
        _refuse_options(only_for_models, f"which {model}, a folder, does not take: it is pruned by its weights alone")
        space = keepk.channels(
            select or "*",
            keep=keep,
            prune=share,
            macs=_number(macs, "--macs"),
            parameters=_number(parameters, "--parameters"),
            exclude=exclude or (),
            metric=None if metric is None else metric_from(metric),
            layer_floor=_floor(layer_floor),
            round_to="auto" if round_to == "auto" else _whole(round_to, "--round-to"),
            per_layer=per_layer,
        )
        found = keepk.shrink_files(model, out, space, example=tuple(map(input_from, inputs)) if inputs else None)
        Console(highlight=False).print(str(found), soft_wrap=True, markup=False)
        return
    if not inputs:
        raise KeepkError(f"prune: {model} is no folder, and a model needs an input. Pass --input, such as 2x3x224x224.")
    with stage_progress(Console(stderr=True), len(STAGES) + 3) as begin:
        begin("load")
        example = tuple(map(input_from, inputs))
        net = model_from(model)
        set_attributes(net, settings or ())
        if weights is not None:
            load_weights(net, weights)
        dense = copy.deepcopy(net)
        report = keepk.prune(
            net,
            example,
            macs=_number(macs, "--macs"),
            parameters=_number(parameters, "--parameters"),
            keep=keep,
            prune=share,
            select=select or "*",
            exclude=exclude or (),
            metric=None if metric is None else metric_from(metric),
            calibrate=None if calibrate is None else batches_from(calibrate, batch),
            loss=None if loss is None else function_from(loss),
            layer_floor=_floor(layer_floor),
            round_to="auto" if round_to == "auto" else _whole(round_to, "--round-to"),
            per_layer=per_layer,
            on_stage=begin,
        )
        begin("save")
        keepk.save(net, out)
        begin("measure")
        speed = keepk.latency(net.eval(), example, baseline=dense.eval(), batches=1, threads=1)
    console = Console(highlight=False)
    console.print(report, report.layers, speed, sep="\n")
    console.print(f"Saved to {out}", soft_wrap=True, markup=False)


def _refuse_options(given: Mapping[str, object], why: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise KeepkError(f"prune: got {option}, {why}. Leave it out.")


def _floor(given: float | None) -> float | None:
    """A share, or a number of channels as an int."""
    return int(given) if given is not None and given.is_integer() else given


def _whole(written: str | None, option: str) -> int | None:
    try:
        return None if written is None else int(written)
    except ValueError:
        raise KeepkError(f'prune: {option} {written}: not a whole number. Pass one, or "auto".') from None


def _number(written: str | None, option: str) -> int | float | None:
    """A share or a number: 0.5 is a float, 2000000 and 2_000_000 are ints."""
    if written is None:
        return None
    for kind in (int, float):
        try:
            return kind(written)
        except ValueError:
            continue
    raise KeepkError(f"prune: {option} {written}: not a number. Pass a share such as 0.5, or a whole number.")


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
    model: Model,
    inputs: Inputs,
    settings: Settings = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON with all spaces, reasons, bindings and layers.")
    ] = False,
) -> None:
    """Report which units of a model can be removed, which cannot and why, and what each layer costs.

    Nothing is trained, changed or downloaded. MACs are the multiply-accumulates of one forward pass.

    Example: [cyan]keepk inspect mynet:make_model --input 2x3x224x224[/cyan] (make_model in mynet.py)
    """
    example = tuple(map(input_from, inputs))
    net = model_from(model)
    set_attributes(net, settings or ())
    report = keepk.inspect(net, example)
    if as_json:
        typer.echo(report.json())
        return
    Console(highlight=False).print(report)


# Other packages add subcommands through this entry point group; `keepk_paper` adds `paper` and `demo`.
for entry in entry_points(group="keepk.commands"):
    entry.load()(app)
