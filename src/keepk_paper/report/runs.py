"""Recipes: their kinds, the runs they are compared with, their commands, and the runs that are still missing."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import lru_cache

from keepk_paper import parity
from keepk_paper.experiments import EXPERIMENTS
from keepk_paper.one_run import METRICS
from keepk_paper.recipes import Recipe, Stage
from keepk_paper.report.lines import Line, Lines, Results, kind_of, seeds
from keepk_paper.results import USUAL, Training

NETWORKS = {"vgg16": "VGG-16", "densenet40": "DenseNet-40", "lenet-300-100": "LeNet-300-100", "lenet-5": "LeNet-5"}
DATA_SETS = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
PAPER_UNITS = {"vgg16": 4_224, "densenet40": 9_360}  # channels, and reads of channels
CAVEATS = {
    "cifar100": "CIFAR-100 with 15,000 training pictures instead of 50,000.",
    "svhn": "SVHN, re-created, with 15,000 training pictures and the first 10,000 test pictures.",
}
# The same in a few words, for titles.
RESTRICTIONS = {"cifar100": "15,000 training pictures", "svhn": "re-created, 15,000 training pictures"}


@dataclass(frozen=True)
class Kind:
    """A family of recipes.

    Attributes:
        pattern: Matches the whole name of a recipe, without the percentage at its end.
        label: A short description.
        candidate: Whether it may represent the paper's method; of several candidates the one with the lowest validation
            error does.
    """

    pattern: str
    label: str
    candidate: bool = False


KINDS = (
    Kind("one-run-dense", "dense, as many epochs"),
    Kind("control", "dense, trained further, as many epochs"),
    Kind("(full-)?dense", "dense, at the start of pruning"),
    Kind("one-run-scratch-.+", "the final widths from scratch"),
    Kind("one-run-blend", "one run, blend of means", candidate=True),
    Kind("one-run-taylor", "one run, Taylor importance", candidate=True),
    Kind("trained-.+-once", "from the trained net, one event"),
    Kind("trained-.+-cubic", "from the trained net, cubic schedule"),
    Kind("trained-.+-equal", "from the trained net, equal events"),
    Kind(r"trained-.+-mu\d+", "from the trained net, another value of mu"),
    Kind("trained-.+-layers", "from the trained net, one space per layer"),
    Kind("untrained-.+", "one run, events from the first epoch on"),
    Kind("alpha-0-sums", "from the trained net, norms that are sums"),
    Kind("alpha-0-means", "from the trained net, norms that are means"),
    Kind("trained-blend", "from the trained net, blend of means", candidate=True),
    Kind("trained-taylor", "from the trained net, Taylor importance", candidate=True),
    Kind("keepk", "from the trained net, BatchNorm scales", candidate=True),
    Kind("full", "the paper's text, full width", candidate=True),
    Kind("paper-gamma", "the paper's text, BatchNorm scales"),
    Kind("paper-blend", "the paper's text, blend of means"),
    Kind("blend", "from the trained net, blend of sums"),
    Kind("slimming-.+", "Network Slimming (Liu et al. 2017)"),
    Kind("one-shot-.+", "one-shot, the same ranking"),
    Kind("filters", "L1 norms of filters, by layer (Li et al. 2017)"),
    Kind("random", "random channels"),
    Kind("narrow-.+", "uniformly narrower, as many MACs"),
    Kind("seconds-.+", "dense, as many CPU seconds"),
)
OTHER = Kind(".*", "another recipe")


def kind(recipe: str) -> Kind:
    """The family that a recipe belongs to."""
    return next((it for it in KINDS if re.fullmatch(it.pattern, family(recipe))), OTHER)


def family(recipe: str) -> str:
    """The name without its percentage.

    >>> family("one-run-taylor-70"), family("control")
    ('one-run-taylor', 'control')
    """
    return re.sub(r"-\d{1,2}$", "", recipe)


def percent_removed(recipe: str) -> int | None:
    """The percentage of the channels that a recipe removes, from its name.

    >>> percent_removed("one-run-taylor-70"), percent_removed("control")
    (70, None)
    """
    found = re.search(r"-(\d{1,2})$", recipe)
    return int(found[1]) if found else None


def network_and_data(experiment: str) -> tuple[str, str]:
    """The parts of a name: ``vgg16-half-cifar10`` is VGG-16 on CIFAR-10.

    >>> network_and_data("vgg16-half-cifar10"), network_and_data("lenet-5")
    (('vgg16', 'cifar10'), ('lenet-5', 'mnist'))
    """
    if kind_of(experiment) != "channels":
        return experiment, "mnist"
    first, *_, last = experiment.split("-")
    return first, last


def caveat(experiment: str) -> str:
    """A restriction of the data of an experiment that readers should know; often empty."""
    return CAVEATS.get(network_and_data(experiment)[1], "")


@dataclass(frozen=True)
class Setting:
    """The recipes of an experiment that train the same dense network on the same pictures in the same precision.

    Attributes:
        experiment: The experiment.
        size: The units of the dense network as a fraction of the paper's; None if the paper has no such network.
        pictures: How many training pictures are used; None is all.
        recipes: The recipes with results, in the order of the file.
        key: Identifies it on the page.
        training: The device and precision.
    """

    experiment: str
    size: Fraction | None
    pictures: int | None
    recipes: tuple[str, ...]
    key: str
    training: Training = USUAL

    def of(self, results: Results, recipe: str) -> Lines:
        """The lines of one of its recipes."""
        return results.of(self.experiment, recipe, training=self.training)

    def __contains__(self, line: Line) -> bool:
        return (line.experiment, line.training) == (self.experiment, self.training) and line["recipe"] in self.recipes

    @property
    def title(self) -> str:
        """The network, its width and the data, with their restrictions, and the precision if it is not float32."""
        restricted = RESTRICTIONS.get(network_and_data(self.experiment)[1])
        part = f"the first {self.pictures:,} training pictures" if self.pictures else restricted
        words = [dense_title(self.experiment, self.size), *([f"({part})"] if part else [])]
        return " ".join(words) + (f", {self.training}" if self.training != USUAL else "")

    @property
    def short_title(self) -> str:
        """The title without the restrictions of the data, and with fewer words."""
        named = f", {self.training.short}" if self.training != USUAL else ""
        return f"{dense_title(self.experiment, self.size)}{named}"


def dense_title(experiment: str, size: Fraction | None) -> str:
    """The network of an experiment, its width and the data, for headings.

    >>> dense_title("vgg16-svhn", Fraction(1)), dense_title("densenet40-cifar10", Fraction(1, 3))
    ('VGG-16, full width, SVHN', 'DenseNet-40, growth rate 4, CIFAR-10')
    """
    network, data = network_and_data(experiment)
    words = [NETWORKS.get(network, network)]
    if size is not None and network == "vgg16":
        words.append("full width" if size == 1 else f"width {size}")
    elif size is not None:
        words.append(f"growth rate {12 * size}")
    return ", ".join([*words, DATA_SETS.get(data, "MNIST" if data == "mnist" else data)])


@lru_cache(maxsize=8)  # every comparison asks for the title of its setting
def settings(results: Results) -> tuple[Setting, ...]:
    """All settings in which channels were removed."""
    found = list[Setting]()
    for experiment in results.channel_experiments:
        groups = dict[tuple[Fraction | None, int | None, Training], list[str]]()
        for recipe in results.recipes(experiment):
            known = EXPERIMENTS.get(experiment, {}).get(recipe)
            key = _size(results, experiment, recipe), known.pictures if known else None
            for training in results.trainings(experiment, recipe):
                groups.setdefault((*key, training), []).append(recipe)
        for number, ((size, pictures, training), names) in enumerate(groups.items(), start=1):
            key_of_page = experiment if number == 1 else f"{experiment}-{number}"
            found.append(Setting(experiment, size, pictures, tuple(names), key_of_page, training))
    return tuple(found)


def _size(results: Results, experiment: str, recipe: str) -> Fraction | None:
    """By the dense network that a recipe is compared with: its own may be narrower from the start."""
    network, _ = network_and_data(experiment)
    if network not in PAPER_UNITS:
        return None
    known = EXPERIMENTS.get(experiment, {}).get(recipe)
    lines = [*results.of(experiment, recipe), *results.of(experiment, control(experiment, recipe) or recipe)]
    total = max(line["total"] for line in lines)
    # Without results of the control, a rival with the final widths does not tell the width it started from; its
    # layers do, because they are stored beside those of the dense network.
    dense = max(sum(width for _, width in line["layers"].values()) for line in lines)
    narrower = known is not None and known.match == "macs"
    return Fraction(total if narrower else max(total, dense), PAPER_UNITS[network])


def control(experiment: str, recipe: str) -> str | None:
    """The recipe of the dense network that a recipe is compared with; None if that is part of the same run."""
    known = EXPERIMENTS.get(experiment, {}).get(recipe)
    if known is None or kind_of(experiment) != "channels":
        return None
    if known.control or known.start is None:
        return known.control
    # The paper compares with the network that it started from. Our recipes train with higher rates and weight
    # decay, from which the dense network gains too, so they are compared with one that was trained further as well.
    literal = re.fullmatch("(full|paper-.+)", family(recipe))
    return known.start if literal or "control" not in EXPERIMENTS[experiment] else "control"


def dense_lines(results: Results, line: Line) -> Lines:
    """The lines of the dense network that a line is compared with: all seeds, of the same training."""
    name = control(line.experiment, line["recipe"])
    own = results.of(line.experiment, name or line["recipe"], training=line.training)
    return tuple(it for it in own if it["asked"] == it["total"])


def starts(results: Results, line: Line) -> Lines:
    """The lines of the runs that a run started from, whose training time counts as well."""
    found, recipe = list[Line](), EXPERIMENTS.get(line.experiment, {}).get(line["recipe"])
    while recipe is not None and recipe.start is not None:
        found += results.of(line.experiment, recipe.start, training=line.training)
        recipe = EXPERIMENTS[line.experiment].get(recipe.start)
    return tuple(found)


def matches(recipe: str, patterns: Sequence[str]) -> bool:
    """Whether a recipe's name is one of the names or patterns."""
    return any(fnmatchcase(recipe, pattern) for pattern in patterns)


def command(experiment: str, recipe: str, seeds_wanted: int, training: Training = USUAL) -> str:
    """The command that runs a recipe with seeds 1 to `seeds_wanted`.

    >>> command("parity", "sgd, light decay", 3)
    "keepk paper run parity --recipe 'sgd, light decay' --seeds 3"
    >>> command("vgg16-svhn", "one-run-dense", 1, Training(amp=True))
    'keepk paper run vgg16-svhn --recipe one-run-dense --seeds 1 --amp'
    """
    words = ["keepk", "paper", "run", experiment, "--recipe", recipe, "--seeds", str(seeds_wanted)]
    return shlex.join([*words, *training.options])


def describe(experiment: str, recipe: str) -> str:
    """A recipe in one paragraph, read off the code that runs it."""
    if kind_of(experiment) == "parity":
        found = parity.RECIPES.get(recipe)
        if found is None:
            return "This recipe is no longer in the code."
        start = f"{found.start} nodes annealed to 1 .. 16" if found.start else "1 .. 16 nodes from the start"
        return f"{start}; {found.optimizer}, learning rate {found.lr:g}, {found.epochs} epochs."
    known = EXPERIMENTS.get(experiment, {}).get(recipe)
    if known is None:
        return "This recipe is no longer in the code."
    return " ".join(_sentences(known))


def _sentences(recipe: Recipe) -> Iterator[str]:
    options = ", ".join(f"{name} {value:g}" for name, value in recipe.options.items())
    yield f"{recipe.network.__name__}{f' ({options})' if options else ''}, batches of {recipe.batch}."
    if recipe.start:
        yield f"Starts from the last network of {recipe.start}."
    if recipe.like:
        what = {"widths": "the widths", "macs": "as many MACs as", "seconds": "as many CPU seconds as"}[
            recipe.match or "widths"
        ]
        yield f"Has {what}{' of' if recipe.match == 'widths' else ''} the finished run of {recipe.like}."
    if recipe.metric is not None:
        floor = f", at least {recipe.layer_floor:.0%} of each layer" if recipe.layer_floor != 1 else ""
        yield f"Ranks by {getattr(recipe.metric, '__name__', repr(recipe.metric))}{floor}."
    for stage in recipe.stages:
        yield _stage(stage, recipe.units)
    if recipe.smoothing:
        yield f"Labels are smoothed by {recipe.smoothing:g}."
    if recipe.pictures:
        yield f"Trains on the first {recipe.pictures:,} pictures."


def _stage(stage: Stage, units: str) -> str:
    if stage.flat is None or stage.flat >= stage.epochs:
        falls = "constant"
    else:
        falls = f"constant for {stage.flat} epochs, then a cosine to 0" if stage.flat else "a cosine to 0"
    words = [f"{stage.epochs} epochs: learning rate {stage.lr:g}, {falls}"]
    words += [f"{stage.warmup} of warm-up"] if stage.warmup else []
    words += [f"weight decay {stage.decay:g}"] if stage.decay else []
    words += [f"L1 penalty {stage.scale_l1:g} on the scales"] if stage.scale_l1 else []
    if len(stage.keep) > 3:
        words.append(f"keeps {sum(keep for keep, _ in stage.keep.values()):,} in all, a count for each layer")
    else:
        words += [f"keeps {keep:,} ({name}) by {schedule!r}" for name, (keep, schedule) in stage.keep.items()]
    words += [f"ranked by {stage.metric.__name__}"] if stage.keep and units == "weights" else []
    words += [f"from epoch {stage.first_event} on"] if stage.keep and stage.first_event > 1 else []
    words += [f"{', '.join(stage.freeze)} frozen"] if stage.freeze else []
    return f"{', '.join(words)}."


@dataclass(frozen=True)
class Wanted:
    """Runs that the comparison needs.

    Attributes:
        row: The part of the programme.
        experiment: The experiment, or a pattern of names.
        recipes: Names or patterns; one run of any of them is enough.
        seeds: How many seeds are wanted.
    """

    row: str
    experiment: str
    recipes: tuple[str, ...]
    seeds: int = 1


@dataclass(frozen=True)
class State:
    """How far a part of the programme is.

    Attributes:
        wanted: The runs.
        found: Their lines.
        commands: One command per alternative; empty if there is no recipe for them yet.
    """

    wanted: Wanted
    found: Lines
    commands: tuple[str, ...]

    @property
    def done(self) -> int:
        """How many of the wanted seeds are there."""
        return min(len(seeds(self.found)), self.wanted.seeds)


QUARTER, HALF, FULL = "vgg16-cifar10", "vgg16-half-cifar10", "vgg16-full-cifar10"


def one_run(percent: int) -> tuple[str, ...]:
    """The names of the runs that train and prune at once, by either ranking."""
    return f"one-run-blend-{percent}", f"one-run-taylor-{percent}", f"one-run-{percent}"


@dataclass(frozen=True)
class Variant:
    """A value of something that is varied in a figure, all else being equal.

    Attributes:
        label: The value.
        recipes: The recipes with that value, one for each ranking.
    """

    label: str
    recipes: tuple[str, ...]


RATES = (10, 30, 50, 70)  # of the paper's curve of errors, in percent


def _by_metric(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.format(metric) for metric in METRICS)


BY_RATE = tuple(_by_metric(f"trained-{{}}-{rate}") for rate in RATES)
# What is varied in the figures of VGG-16 at a quarter of the width, with 70 % of the channels removed.
VARIANTS: dict[str, tuple[Variant, ...]] = {
    "schedules": (
        Variant("annealed, mu 10", _by_metric("trained-{}-70")),
        *(Variant(f"annealed, mu {mu}", _by_metric(f"trained-{{}}-mu{mu}-70")) for mu in (0, 1, 100)),
        Variant("cubic", _by_metric("trained-{}-cubic-70")),
        Variant("equal events", _by_metric("trained-{}-equal-70")),
        Variant("one event", _by_metric("trained-{}-once-70")),
    ),
    "alpha": (
        Variant("alpha 0, sums", ("alpha-0-sums-70",)),
        Variant("alpha 0.5, sums", ("blend-70",)),
        Variant("alpha 0, means", ("alpha-0-means-70",)),
        Variant("alpha 0.5, means", ("trained-blend-70",)),
        Variant("alpha 1, scales alone", ("keepk-70",)),
    ),
    "start": (
        Variant("trained network", _by_metric("trained-{}-70")),
        Variant("untrained network", _by_metric("untrained-{}-70")),
        Variant("in the middle of one run", _by_metric("one-run-{}-70")),
    ),
    "spaces": (
        Variant("one space for all layers", _by_metric("trained-{}-70")),
        Variant("one space per layer", _by_metric("trained-{}-layers-70")),
    ),
}

# The rows of the comparison in the order in which they run: the experiment or a pattern of names, the number of seeds,
# and recipes of which one run is enough.
Row = tuple[str, str, int, tuple[tuple[str, ...], ...]]
DENSE_RUN = ("one-run-dense",)
ROWS: tuple[Row, ...] = (
    (
        *("1. VGG-16, width 1/4, CIFAR-10", QUARTER, 3),
        (
            *(DENSE_RUN, one_run(60), ("one-run-scratch-*-60",), ("slimming-*-60",)),
            *(one_run(70), ("one-run-scratch-*-70",), ("slimming-*-70",)),
        ),
    ),
    (
        *("1. VGG-16, width 1/4, CIFAR-10: other rivals", QUARTER, 1),
        (
            *(("paper-gamma-70",), ("paper-blend-70",), ("one-shot-*-70",), ("filters-70",)),
            *(("random-70",), ("narrow-*-70",), ("seconds-*-70",)),
        ),
    ),
    ("2. VGG-16, full width, SVHN", "vgg16-svhn", 1, (DENSE_RUN, one_run(60), ("one-run-scratch-*-60",))),
    ("3. VGG-16, width 1/2, CIFAR-10", HALF, 2, (DENSE_RUN, one_run(60), one_run(70))),
    ("3. VGG-16, width 1/2, CIFAR-10: from scratch", HALF, 1, (("one-run-scratch-*-70",),)),
    ("4. DenseNet-40, growth rate 6, CIFAR-10", "densenet40*-cifar10", 1, (DENSE_RUN, one_run(60))),
    ("5. VGG-16, CIFAR-100", "vgg16*-cifar100", 1, (DENSE_RUN, one_run(50))),
    ("5. DenseNet-40, CIFAR-100", "densenet40*-cifar100", 1, (DENSE_RUN, one_run(60))),
    ("5. DenseNet-40, SVHN", "densenet40*-svhn", 1, (DENSE_RUN, one_run(60))),
    ("6. VGG-16, global rates", QUARTER, 1, BY_RATE),
    ("6. DenseNet-40, global rates", "densenet40-cifar10", 1, BY_RATE),
    *(
        (f"6. VGG-16, {title}", QUARTER, 1, tuple(variant.recipes for variant in variants))
        for title, variants in VARIANTS.items()
    ),
    ("7. VGG-16, full width, CIFAR-10", FULL, 1, (DENSE_RUN, one_run(70), ("one-run-scratch-*-70",))),
)


def programme(results: Results) -> list[State]:
    """The state of every part of the programme."""
    return [_state(results, Wanted(row, name, it, number)) for row, name, number, many in ROWS for it in many]


def matching(results: Results, wanted: Wanted) -> Lines:
    """The lines of the wanted recipe and training that has most of the seeds; those of different ones do not add up."""
    found = dict[tuple[str, str, Training], list[Line]]()
    for experiment in results.by_experiment:
        if fnmatchcase(experiment, wanted.experiment):
            for line in results.of(experiment):
                if matches(line["recipe"], wanted.recipes):
                    found.setdefault((experiment, line["recipe"], line.training), []).append(line)
    return tuple(max(found.values(), key=lambda lines: len(seeds(lines)), default=()))


def commands(results: Results, experiment: str, recipes: Sequence[str], number: int) -> tuple[str, ...]:
    """The commands of all known recipes that match, in the precision of the experiment's latest result.

    The paper's own networks (``full-*``) take days on a CPU; they are left out.
    """
    return tuple(
        command(name, recipe, number, results.latest_training(name))
        for name, known in EXPERIMENTS.items()
        if fnmatchcase(name, experiment)
        for recipe in known
        if not recipe.startswith("full-") and matches(recipe, recipes)
    )


def _state(results: Results, wanted: Wanted) -> State:
    found = matching(results, wanted)
    return State(wanted, found, commands(results, wanted.experiment, wanted.recipes, wanted.seeds))
