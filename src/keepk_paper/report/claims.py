"""The claims of the paper, each with a verdict that follows from the results by a rule stated beside it.

A claim about errors rests on comparisons of two runs, each with a target. A comparison is confirmed if the upper end of
the 95 % interval of the difference is at most the target plus a tolerance. Without an interval (one seed, and no record
of which pictures were wrong) a difference above that bound is not confirmed, and one below it is left open.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from fractions import Fraction
from statistics import fmean

from keepk_paper.experiments import EXPERIMENTS
from keepk_paper.report import runs
from keepk_paper.report.intervals import Interval, paired
from keepk_paper.report.lines import Line, Lines, Results, in_common
from keepk_paper.report.numbers import Cell, Number, fewest_at_floor, number
from keepk_paper.report.runs import Setting

TOLERANCE = 0.3
# MNIST's errors are a tenth of CIFAR's, and so are the differences that matter.
MNIST_TOLERANCE = 0.1


Fact = tuple[str, Cell, str]


class Verdict(str, Enum):
    """The outcome of a claim or a comparison."""

    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "not confirmed"
    NOT_TESTABLE = "not testable here"
    NOT_YET_RUN = "not yet run"


@dataclass(frozen=True)
class Comparison:
    """Two runs of the same seeds.

    Attributes:
        setting: The network and the data.
        recipe: The run in question.
        other: The run that it is compared with.
        of: The lines of the one.
        against: The lines of the other, seed by seed.
        target: The difference that is asked for.
        tolerance: How far the difference may exceed the target; 0 asks for a difference below it.
        chosen: Whether the run represents the paper's method in this setting.
        decides: Whether the claim's verdict depends on it.
        caveat: A restriction of the data that readers should know.
    """

    setting: str
    recipe: str
    other: str
    of: Lines
    against: Lines
    target: float
    tolerance: float = TOLERANCE
    chosen: bool = True
    decides: bool = True
    caveat: str = ""

    @property
    def interval(self) -> Interval | None:
        """The difference with its 95 % interval."""
        return paired(self.of, self.against)

    @property
    def verdict(self) -> Verdict:
        """By the rule of this module."""
        # 0.3 + 1.4 is not quite 1.7 in floats. Without a tolerance the claim is "better", and a draw is not enough.
        bound = self.target + self.tolerance + (1e-9 if self.tolerance else -1e-9)
        if self.interval is not None:
            return Verdict.CONFIRMED if self.interval.high <= bound else Verdict.NOT_CONFIRMED
        difference = fmean(
            one["test_error"] - other["test_error"] for one, other in zip(self.of, self.against, strict=True)
        )
        return Verdict.NOT_CONFIRMED if difference > bound else Verdict.NOT_YET_RUN


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and its verdict.

    Attributes:
        key: Identifies it on the page.
        statement: The claim in a sentence.
        where: Where the paper makes it.
        printed: The paper's numbers for it.
        verdict: The outcome.
        reason: Why, in a sentence.
        rule: The criterion of the verdict.
        comparisons: The pairs of runs.
        facts: Other numbers, each with its name and unit.
        commands: The commands for the runs that are missing.
        caveat: A restriction of the data that readers should know.
    """

    key: str
    statement: str
    where: str
    printed: str
    verdict: Verdict = Verdict.NOT_YET_RUN
    reason: str = ""
    rule: str = ""
    comparisons: tuple[Comparison, ...] = ()
    facts: tuple[Fact, ...] = ()
    commands: tuple[str, ...] = ()
    caveat: str = ""


def claims(results: Results) -> list[Claim]:
    """All claims, in the order of the paper."""
    return [
        _exact(results),
        *_parity(results),
        *_mnist(results),
        _baseline(results),
        *(_no_loss(results, *row) for row in NO_LOSS),
        _slimming(results),
        _one_shot(results),
        _untrained(results),
        _alpha(results),
        _last_layers(results),
        _even_layers(results),
        _one_rate(results),
    ]


def compared(
    results: Results, of: Sequence[Line], against: Sequence[Line], *, target: float, tolerance: float = TOLERANCE
) -> Comparison | None:
    """Compare two runs on the seeds that both have; None if they share no seed."""
    of, against = in_common(of, against)
    if not of:
        return None
    experiment, recipe = of[0].experiment, of[0]["recipe"]
    names = [f"{lines[0]['recipe']}{' (dense)' * _is_own_dense(lines[0], of[0])}" for lines in (of, against)]
    setting, caveat = setting_title(results, experiment, recipe), runs.caveat(experiment)
    return Comparison(setting, names[0], names[1], of, against, target, tolerance, caveat=caveat)


def setting_title(results: Results, experiment: str, recipe: str) -> str:
    """The network and data of a run, for headings."""
    settings = (it for it in runs.settings(results) if it.experiment == experiment and recipe in it.recipes)
    return next((it.title for it in settings), runs.dense_title(experiment, None))


def _is_own_dense(line: Line, of: Line) -> bool:
    return line is not of and line["recipe"] == of["recipe"]


def _exact(results: Results) -> Claim:
    pruned = tuple(line for line in results if line["asked"] < line["total"])
    right = all(line["kept"] == line["asked"] for line in pruned)
    verdict = (Verdict.CONFIRMED if right else Verdict.NOT_CONFIRMED) if pruned else Verdict.NOT_YET_RUN
    return Claim(
        "exact",
        "The pruned network depends on exactly K parameters or channels.",
        "Algorithms 1 and 2",
        "exactly K",
        verdict,
        rule="Every result of a pruned network has as many units as were asked for.",
        facts=(
            ("pruned networks", number("lines", pruned, form="{:.0f}"), ""),
            ("with exactly K units", number("exact", pruned, form="{:.0f}"), ""),
        ),
        commands=() if pruned else ("keepk paper run lenet-300-100 --seeds 5",),
    )


def _parity(results: Results) -> Iterator[Claim]:
    by = {name: results.of("parity", name) for name in results.recipes("parity")}
    run_it = ("keepk paper run parity",)
    fewest = fewest_at_floor([it for it in by.get("keepk", ()) if it["asked"] < it["total"]])
    ours = tuple(it for it in by.get("keepk", ()) if it["asked"] < it["total"])
    here = tuple(it for it in ours if it["asked"] == fewest)
    draws: Fact = ("draws of the data", number("seeds", results.of("parity"), form="{:.0f}"), "")
    yield Claim(
        "parity-nodes",
        "Annealed from 256 hidden nodes, as few as 6 reach the best possible error on noisy parity data.",
        "Figure 2",
        "6 nodes",
        _if(fewest is not None and fewest <= 6, bool(ours)),
        rule="With 6 nodes or fewer, the best of ten starts is within 0.2 points of the noise floor on every draw.",
        facts=(
            ("fewest nodes at the floor", number("fewest_at_floor", ours, form="{:.0f}"), ""),
            ("their mean test error", number("mean:test_error", here), "%"),
            draws,
        ),
        commands=() if ours else run_it,
    )
    sgd = tuple(line for name, lines in by.items() if name.startswith("sgd") for line in lines)
    best = min((name for name in by if name.startswith("sgd")), key=lambda name: _best(by[name]), default="")
    # Half-way between the noise floor and guessing: below that, a network has learned most of the parity.
    learned = sgd and _best(by[best]) < (50 + fmean(line["noise_floor"] for line in sgd)) / 2
    yield Claim(
        "parity-sgd",
        "Plain SGD learns no good model of the parity with fewer than 100 hidden nodes.",
        "Figure 2",
        "no good model below 100 nodes",
        _if(not learned, bool(sgd)),
        "Tested with 1 to 16 nodes; a tenth of the weight decay is enough for SGD to learn." if learned else "",
        rule="With 1 to 16 nodes, no mean error of the best starts is below half-way between noise floor and guessing.",
        facts=(
            (f"lowest mean test error, recipe “{best}”", number("least_mean:test_error", by.get(best, ())), "%"),
            draws,
        ),
        commands=() if sgd else run_it,
    )
    adam = by.get("adam", ())
    reached = fewest_at_floor(adam)
    yield Claim(
        "parity-adam",
        "Adam without pruning learns something only above 25 hidden nodes, and mostly ends in poor local optima.",
        "Figure 2",
        "above 25 nodes",
        _if(reached is None, bool(adam)),
        "With weight decay and as many epochs as the annealed network, Adam does better than the paper says."
        if reached
        else "",
        rule="With 1 to 16 nodes, the best of ten starts never reaches the noise floor on every draw.",
        facts=(("fewest nodes at the floor", number("fewest_at_floor", adam, form="{:.0f}"), ""), draws),
        commands=() if adam else run_it,
    )
    yield Claim(
        "parity-boostnet",
        "BoostNet needs about 45 hidden nodes for the same task.",
        "Figure 2",
        "45 nodes",
        Verdict.NOT_TESTABLE,
        "The paper quotes BoostNet from its authors, trained on more data; its rule is not given here.",
    )


def _best(lines: Sequence[Line]) -> float:
    cell = number("least_mean:test_error", lines)
    assert isinstance(cell, Number)
    return cell.value


MNIST = {
    "lenet-300-100": (17_329, "17.4K of 267K", "1.57", "1.64"),
    "lenet-5": (15_781, "15.8K of 431K", "0.77", "0.80"),
}


def _mnist(results: Results) -> Iterator[Claim]:
    for experiment, (asked, kept, pruned_error, dense_error) in MNIST.items():
        comparisons = []
        # As for channels, validation decides which training represents the method: the paper's text, or ours.
        trained = [recipe for recipe in ("paper", "keepk") if results.of(experiment, recipe, asked)]
        chosen = min(trained, key=lambda it: _validation(results.of(experiment, it, asked)), default=None)
        for recipe in results.recipes(experiment):
            lines = results.of(experiment, recipe, asked)
            dense = tuple(it for it in results.of(experiment, recipe) if it["asked"] == it["total"])
            found = compared(results, lines, dense, target=0, tolerance=MNIST_TOLERANCE)
            comparisons += [replace(found, chosen=recipe == chosen, decides=recipe == chosen)] if found else []
        claim = Claim(
            f"{experiment}-no-loss",
            f"Pruned to {kept} weights, {runs.NETWORKS[experiment]} loses no accuracy.",
            "Table 1",
            f"{pruned_error} %, dense {dense_error} %",
            rule="Of the paper's text and our recipe, the one with the lower validation error is as good as its dense "
            "network.",
        )
        missing = (runs.command(experiment, "paper", 5),)
        yield _decided(claim, comparisons, missing)
        # The rule of Han et al. decides how many weights stay; the dense network may be a point of the same run.
        rival = (line for line in results.of(experiment) if line["recipe"].startswith("han"))
        han = tuple(line for line in rival if line["kept"] < line["total"])
        ours = results.of(experiment, "paper", asked)
        found = compared(results, ours, han, target=0, tolerance=MNIST_TOLERANCE)
        fewer = ours and han and max(it["kept"] for it in ours) < min(it["kept"] for it in han)
        smaller = Claim(
            f"{experiment}-han",
            f"On {runs.NETWORKS[experiment]}, annealing keeps fewer weights than Han et al. at a comparable error.",
            "Table 1",
            {"lenet-300-100": "17.4K against 22K", "lenet-5": "15.8K against 36K"}[experiment],
            rule="Fewer weights than by the recipe of Han et al., and an error that is not higher.",
            facts=(
                ("weights of Han et al.", number("mean:kept", han, form="{:,.0f}"), ""),
                ("weights here", number("mean:kept", ours if han else (), form="{:,.0f}"), ""),
            ),
        )
        decided = _decided(smaller, [found] if found else [], runs.commands(experiment, ("han*",), 3))
        yield replace(decided, verdict=Verdict.NOT_CONFIRMED) if han and not fewer else decided
    yield _pattern(
        results,
        "lenet-300-100",
        "LeNet-300-100 loses the largest share of its weights in the first layer and the smallest in the last.",
        "fc1 4.6 %, fc2 20.1 %, fc3 68.5 % left",
        lambda shares: shares["fc1"] < shares["fc2"] < shares["fc3"],
    )
    yield _pattern(
        results,
        "lenet-5",
        "LeNet-5 keeps the largest share of its weights in the first convolution.",
        "conv1 75 % left, the others at most 29.1 %",
        lambda shares: max(shares, key=lambda name: shares[name]) == "conv1",
    )


def _pattern(
    results: Results, experiment: str, statement: str, printed: str, holds: Callable[[dict[str, float]], bool]
) -> Claim:
    """A claim about the shares that are left by layer at the paper's count, by both of our recipes."""
    asked = MNIST[experiment][0]
    facts, right = list[Fact](), list[bool]()
    for recipe in ("paper", "keepk"):  # rivals may distribute the weights differently
        if lines := results.of(experiment, recipe, asked):
            cells = {name: number(f"share:{name}", lines, form="{:.1f}") for name in lines[0]["layers"]}
            facts += [(f"{name} of recipe {recipe}", cell, "% left") for name, cell in cells.items()]
            right.append(holds({name: cell.value for name, cell in cells.items() if isinstance(cell, Number)}))
    return Claim(
        f"{experiment}-layers",
        statement,
        "Table 2",
        printed,
        _if(all(right), bool(right)),
        rule="It holds for the recipe that follows the paper's text and for ours, on the mean over the seeds.",
        facts=tuple(facts),
        commands=() if right else (runs.command(experiment, "paper", 3),),
    )


# Network, data, percentage removed, where, the paper's dense and pruned error, and by the network's size relative to
# the paper's the difference that is asked for. A network of less than half the size has little to spare: it is
# reported, but does not decide. Where no target was set, it is what the paper itself loses.
Row = tuple[str, str, int, str, str, str, dict[Fraction, float]]
NO_LOSS: tuple[Row, ...] = (
    ("vgg16", "cifar10", 60, "Table 3", "6.34", "6.14", {Fraction(1, 4): 0.6, Fraction(1, 2): 0.2, Fraction(1): 0.4}),
    ("vgg16", "cifar10", 70, "Table 3", "6.34", "6.20", {Fraction(1, 4): 1.4, Fraction(1, 2): 0.5, Fraction(1): 0.4}),
    ("densenet40", "cifar10", 60, "Table 3", "6.11", "5.48", {Fraction(1, 3): 0.5, Fraction(1, 2): 0.5}),
    ("densenet40", "cifar10", 70, "Table 3", "6.11", "5.57", {}),
    ("vgg16", "cifar100", 50, "Table 4", "26.81", "26.55", {}),
    ("densenet40", "cifar100", 60, "Table 4", "25.36", "25.66", {}),
    ("vgg16", "svhn", 60, "Table 5", "2.18", "2.06", {Fraction(1): 0.2}),
    ("densenet40", "svhn", 60, "Table 5", "1.89", "1.80", {}),
)
DECIDING_SIZE = Fraction(1, 2)


def _baseline(results: Results) -> Claim:
    """The dense networks themselves, at the paper's width and length."""
    printed = {"vgg16-cifar10": 6.34, "densenet40-cifar10": 6.11}
    known = {name: results.of(name, "full-dense") for name in printed}
    facts = [
        (f"{runs.dense_title(name, None)}, 250 epochs", number("mean:test_error", it), "%")
        for name, it in known.items()
    ]
    shorter = [
        (f"{setting.title}, {name}", number("mean:test_error", results.of(setting.experiment, name)), "%")
        for setting in runs.settings(results)
        for name in setting.recipes
        if (setting.size or 0) >= DECIDING_SIZE and name == "one-run-dense" and setting.experiment.endswith("cifar10")
    ]
    right = [fmean(line["test_error"] for line in it) <= printed[name] + TOLERANCE for name, it in known.items() if it]
    verdict = Verdict.NOT_TESTABLE
    if right:
        verdict = Verdict.CONFIRMED if all(right) else Verdict.NOT_CONFIRMED
    return Claim(
        "baseline",
        "After 250 epochs, the dense VGG-16 and DenseNet-40 err on 6.34 and 6.11 % of CIFAR-10.",
        "Table 3",
        "6.34 % and 6.11 %",
        verdict,
        ""
        if right
        else "250 epochs at full width take weeks on two CPU cores; our dense networks are trained for 30 or 40.",
        rule="At full width and after 250 epochs, the error is at most 0.3 points higher than printed.",
        facts=(*facts, *shorter),
        commands=() if right else tuple(runs.command(name, "full-dense", 1) for name in printed),
    )


def _no_loss(
    results: Results,
    network: str,
    data: str,
    percent: int,
    where: str,
    dense: str,
    pruned: str,
    targets: dict[Fraction, float],
) -> Claim:
    own = max(0.0, round(float(pruned) - float(dense), 2))
    comparisons = list[Comparison]()
    for setting in runs.settings(results):
        if runs.network_and_data(setting.experiment) != (network, data):
            continue
        assert setting.size is not None
        chosen = subject(results, setting, percent)
        for recipe in _pruned(setting, percent):
            lines = results.of(setting.experiment, recipe)
            target = targets.get(setting.size, own)
            if found := compared(results, lines, runs.dense_lines(results, lines[0]), target=target):
                decides = setting.size >= DECIDING_SIZE and recipe == chosen
                comparisons.append(replace(found, chosen=recipe == chosen, decides=decides))
    units = "channels" if network == "vgg16" else "channel reads"
    claim = Claim(
        f"{network}-{data}-{percent}",
        f"Removing {percent} % of the {units} of {runs.NETWORKS[network]} costs no accuracy on {runs.DATA_SETS[data]}.",
        where,
        f"{pruned} %, dense {dense} %",
        rule=(
            "At half of the paper's width or more, the recipe with the lowest validation error is within the target "
            "of a dense network that was trained for as many epochs."
        ),
        caveat=runs.CAVEATS.get(data, ""),
    )
    known = [it for it in EXPERIMENTS if it != runs.QUARTER and runs.network_and_data(it) == (network, data)]
    missing = tuple(it for name in known for it in runs.commands(name, runs.one_run(percent), 1))
    return _decided(claim, comparisons, missing)


def subject(results: Results, setting: Setting, percent: int) -> str | None:
    """The recipe that represents the paper's method: the candidate with the lowest validation error."""
    candidates = [name for name in _pruned(setting, percent) if runs.kind(name).candidate]
    return min(candidates, key=lambda name: _validation(results.of(setting.experiment, name)), default=None)


def _validation(lines: Sequence[Line]) -> float:
    return fmean(line["val_error"] for line in lines)


# Rivals are compared with the runs that they rival, in other claims and in the tables.
RIVALS = ("one-run-scratch-*", "narrow-*", "seconds-*", "slimming-*", "one-shot-*", "filters-*", "random-*")


def _pruned(setting: Setting, percent: int) -> list[str]:
    """The recipes that remove this percentage, without rivals."""
    return [it for it in setting.recipes if runs.percent_removed(it) == percent and not runs.matches(it, RIVALS)]


def _decided(claim: Claim, comparisons: Sequence[Comparison], missing: tuple[str, ...]) -> Claim:
    """The claim with its verdict: confirmed if all deciding comparisons are."""
    deciding = [it.verdict for it in comparisons if it.decides]
    if Verdict.NOT_CONFIRMED in deciding:
        verdict = Verdict.NOT_CONFIRMED
    elif deciding and Verdict.NOT_YET_RUN not in deciding:
        verdict = Verdict.CONFIRMED
    else:
        verdict = Verdict.NOT_YET_RUN
    reasons = list[str]()
    if verdict is Verdict.NOT_YET_RUN:
        small = comparisons and not deciding
        reasons += (
            ["Only networks that are too small to decide have been run; their numbers are below."] if small else []
        )
        reasons += [] if missing else ["This version has no recipe for the runs that decide."]
    reason = " ".join(reasons)
    commands = missing if verdict is Verdict.NOT_YET_RUN else ()
    return replace(claim, verdict=verdict, reason=reason, comparisons=tuple(comparisons), commands=commands)


def _slimming(results: Results) -> Claim:
    comparisons = list[Comparison]()
    for setting in runs.settings(results):
        for percent in percentages(setting):
            penalties = [it for it in setting.recipes if fnmatchcase(it, f"slimming-*-{percent}")]
            ours = subject(results, setting, percent)
            if penalties and ours:
                best = min(penalties, key=lambda name: _validation(results.of(setting.experiment, name)))
                comparisons += _pair(results, setting.experiment, ours, best, target=0)
    claim = Claim(
        "slimming",
        "The method is competitive with Network Slimming (Liu et al. 2017) or better.",
        "Tables 3 to 5",
        "6.20 % against 6.20 % (VGG-16, CIFAR-10, 70 %)",
        rule="At the same count and number of epochs, against the best of three penalties by validation error.",
    )
    return _decided(claim, comparisons, runs.commands(runs.QUARTER, ("slimming-*-70",), 3))


def _one_shot(results: Results) -> Claim:
    comparisons = [
        found
        for experiment in results.channel_experiments
        for rival in results.recipes(experiment)
        if fnmatchcase(rival, "one-shot-*")
        for found in _pair(results, experiment, rival.replace("one-shot", "one-run"), rival, target=0, tolerance=0.0)
    ]
    claim = Claim(
        "annealing",
        "Gradual removal by the annealing plan is less greedy, and so better than removing everything at once.",
        "Sections 3 and 5",
        "no numbers",
        rule="With the same ranking and epochs, the annealed run is better than the one-shot run (tolerance 0).",
    )
    return _decided(claim, comparisons, runs.commands(runs.QUARTER, ("one-shot-*-70",), 1))


def _untrained(results: Results) -> Claim:
    comparisons = [
        found
        for experiment in results.channel_experiments
        for ours in results.recipes(experiment)
        if fnmatchcase(ours, "untrained-*")
        for found in _pair(results, experiment, ours, ours.removeprefix("un"), target=0)
    ]
    claim = Claim(
        "untrained",
        "The method prunes untrained networks as well as pre-trained ones.",
        "Abstract, Section 6",
        "no numbers",
        rule=(
            "A network that is pruned from its first epoch on is as good as one that is pruned after 50 epochs of "
            "training, with the same ranking."
        ),
    )
    return _decided(claim, comparisons, runs.commands(runs.QUARTER, ("untrained-*-70",), 1))


def _alpha(results: Results) -> Claim:
    comparisons = [
        found
        for experiment in results.channel_experiments
        for ours in results.recipes(experiment)
        if fnmatchcase(ours, "paper-gamma-*")
        for found in _pair(results, experiment, ours, ours.replace("gamma", "blend"), target=0, tolerance=0.0)
    ]
    claim = Claim(
        "alpha",
        "For VGG-16, ranking by the BatchNorm scales alone is better than blending them with norms of weights.",
        "Section 6",
        "no numbers",
        rule="By the paper's text from the trained network, scales are better than the blend of means (tolerance 0).",
    )
    return _decided(claim, comparisons, runs.commands(runs.QUARTER, ("paper-gamma-70", "paper-blend-70"), 1))


def _pair(
    results: Results, experiment: str, ours: str, other: str, *, target: float, tolerance: float = TOLERANCE
) -> list[Comparison]:
    pair = results.of(experiment, ours), results.of(experiment, other)
    found = compared(results, *pair, target=target, tolerance=tolerance)
    return [found] if found else []


def percentages(setting: Setting) -> list[int]:
    """The percentages that the recipes of a setting remove."""
    return sorted({it for name in setting.recipes if (it := runs.percent_removed(name)) is not None})


def most_removed(results: Results, network: str, data: str) -> Lines:
    """The largest network, pruned by the chosen recipe at 70 %, or at the largest percentage there is."""
    settings = [it for it in runs.settings(results) if runs.network_and_data(it.experiment) == (network, data)]
    for setting in sorted(settings, key=lambda it: -(it.size or 0)):
        for percent in sorted(percentages(setting), key=lambda it: (it != 70, -it)):
            if name := subject(results, setting, percent):
                return results.of(setting.experiment, name)
    return ()


def _last_layers(results: Results) -> Claim:
    lines = most_removed(results, "vgg16", "cifar10")
    facts: tuple[Fact, ...] = (
        ("left in the whole network", number("share:total", lines, form="{:.1f}"), "%"),
        ("most left in one of the last five layers", number("largest_of_last:5", lines, form="{:.1f}"), "%"),
        ("left in these five together", number("last_layers:5", lines, form="{:.1f}"), "%"),
    )
    whole, largest, _ = (cell.value if isinstance(cell, Number) else 0.0 for _, cell, _ in facts)
    return Claim(
        "last-layers",
        "In VGG-16 with 70 % of its channels removed, the last five layers keep very few.",
        "Figure 4",
        "a very small number in each of the last five layers",
        _if(largest < whole, bool(lines)),
        _named(results, lines),
        rule="Each of the last five layers keeps a smaller share than the whole network.",
        facts=facts,
        commands=() if lines else runs.commands(runs.QUARTER, ("one-run-*-70",), 1),
    )


EVEN = 100 / 3


def _even_layers(results: Results) -> Claim:
    lines = most_removed(results, "densenet40", "cifar10")
    uneven = number("unevenness:transition", lines, form="{:.0f}")
    return Claim(
        "even-layers",
        "In DenseNet-40 the channels left are spread evenly over the layers, except the two transitions.",
        "Figure 4",
        "relatively even",
        _if(isinstance(uneven, Number) and uneven.value <= EVEN, bool(lines)),
        _named(results, lines),
        rule="Without the transitions, the standard deviation of the shares left is at most a third of their mean.",
        facts=(
            ("left in the whole network", number("share:total", lines, form="{:.1f}"), "%"),
            ("standard deviation over mean of the shares", uneven, "%"),
        ),
        commands=() if lines else runs.commands("densenet40-cifar10", ("keepk-60",), 1),
    )


def _named(results: Results, lines: Lines) -> str:
    if not lines:
        return ""
    recipe = lines[0]["recipe"]
    return f"Measured on {setting_title(results, lines[0].experiment, recipe)}, recipe {recipe}."


def _one_rate(results: Results) -> Claim:
    wanted = {10, 30, 50, 70}
    families = rate_families(results)
    complete = [it for it in families if wanted <= {runs.percent_removed(name) for name in it[1]}]
    comparisons = [
        found
        for setting, names in complete
        for name in names
        if runs.percent_removed(name) in wanted
        for lines in [results.of(setting.experiment, name)]
        if (found := compared(results, lines, runs.dense_lines(results, lines[0]), target=0))
    ]
    claim = Claim(
        "one-rate",
        "One global rate of 10, 30, 50 or 70 % for all layers gives networks that still generalise well.",
        "Figure 5",
        "a curve without numbers",
        rule="At each of the four rates, the error is not higher than that of the dense network.",
    )
    missing = tuple(it for percent in (10, 30, 50) for it in runs.commands("*-cifar10", (f"*-{percent}",), 1))
    return _decided(claim, comparisons, missing)


def rate_families(results: Results) -> list[tuple[Setting, list[str]]]:
    """The families of recipes that remove at least two different shares of the same network."""
    found = list[tuple[Setting, list[str]]]()
    for setting in runs.settings(results):
        by_family = dict[str, list[str]]()
        for percent in percentages(setting):
            for name in _pruned(setting, percent):
                by_family.setdefault(runs.family(name), []).append(name)
        found += [(setting, names) for names in by_family.values() if len(names) > 1]
    return found


def _if(holds: bool, known: bool) -> Verdict:
    if not known:
        return Verdict.NOT_YET_RUN
    return Verdict.CONFIRMED if holds else Verdict.NOT_CONFIRMED
