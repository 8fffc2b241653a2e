"""The claims about channels: Tables 3 to 5, the figures of layers and rates, and the claims of the text."""

from dataclasses import replace
from fnmatch import fnmatchcase
from fractions import Fraction
from statistics import fmean

from keepk_paper.experiments import EXPERIMENTS
from keepk_paper.report import runs
from keepk_paper.report.chosen import (
    most_removed,
    percentages,
    pruned,
    rate_commands,
    rate_families,
    rates_missing,
    subject,
    validation,
)
from keepk_paper.report.lines import Lines, Results
from keepk_paper.report.numbers import Number, number
from keepk_paper.report.runs import RATES, Setting
from keepk_paper.report.verdicts import (
    TOLERANCE,
    Claim,
    Comparison,
    Fact,
    Verdict,
    compared,
    decided,
    judged,
    setting_title,
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


def claims(results: Results) -> list[Claim]:
    """All claims about channels, in the order of the paper."""
    return [
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


def _baseline(results: Results) -> Claim:
    """The dense networks themselves, at the paper's width and length."""
    printed = {"vgg16-cifar10": 6.34, "densenet40-cifar10": 6.11}
    known = [
        (name, results.of(name, "full-dense", training=training))
        for name in printed
        for training in results.trainings(name, "full-dense")
    ]
    facts = [(f"{setting_title(results, it[0])}, 250 epochs", number("mean:test_error", it), "%") for _, it in known]
    shorter = [
        (f"{setting.title}, {name}", number("mean:test_error", setting.of(results, name)), "%")
        for setting in runs.settings(results)
        for name in setting.recipes
        if (setting.size or 0) >= DECIDING_SIZE and name == "one-run-dense" and setting.experiment.endswith("cifar10")
    ]
    right = [fmean(line["test_error"] for line in it) <= printed[name] + TOLERANCE for name, it in known]
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
    dense_error: str,
    pruned_error: str,
    targets: dict[Fraction, float],
) -> Claim:
    own = max(0.0, round(float(pruned_error) - float(dense_error), 2))
    comparisons = list[Comparison]()
    for setting in runs.settings(results):
        if runs.network_and_data(setting.experiment) != (network, data):
            continue
        assert setting.size is not None
        chosen = subject(results, setting, percent)
        for recipe in pruned(setting, percent):
            lines = setting.of(results, recipe)
            target = targets.get(setting.size, own)
            if found := compared(results, lines, runs.dense_lines(results, lines[0]), target=target):
                decides = setting.size >= DECIDING_SIZE and recipe == chosen
                comparisons.append(replace(found, chosen=recipe == chosen, decides=decides))
    units = "channels" if network == "vgg16" else "channel reads"
    claim = Claim(
        f"{network}-{data}-{percent}",
        f"Removing {percent} % of the {units} of {runs.NETWORKS[network]} costs no accuracy on {runs.DATA_SETS[data]}.",
        where,
        f"{pruned_error} %, dense {dense_error} %",
        rule=(
            "At half of the paper's width or more, the recipe with the lowest validation error is within the target "
            "of a dense network that was trained for as many epochs."
        ),
        caveat=runs.CAVEATS.get(data, ""),
    )
    known = [it for it in EXPERIMENTS if it != runs.QUARTER and runs.network_and_data(it) == (network, data)]
    missing = tuple(it for name in known for it in runs.commands(results, name, runs.one_run(percent), 1))
    return decided(claim, comparisons, missing)


def _slimming(results: Results) -> Claim:
    comparisons = list[Comparison]()
    for setting in runs.settings(results):
        for percent in percentages(setting):
            penalties = [it for it in setting.recipes if fnmatchcase(it, f"slimming-*-{percent}")]
            ours = subject(results, setting, percent)
            if penalties and ours:
                best = min(penalties, key=lambda name: validation(setting.of(results, name)))
                comparisons += _pair(results, setting, ours, best, target=0)
    claim = Claim(
        "slimming",
        "The method is competitive with Network Slimming (Liu et al. 2017) or better.",
        "Tables 3 to 5",
        "6.20 % against 6.20 % (VGG-16, CIFAR-10, 70 %)",
        rule="At the same count and number of epochs, against the best of three penalties by validation error.",
    )
    return decided(claim, comparisons, runs.commands(results, runs.QUARTER, ("slimming-*-70",), 3))


def _one_shot(results: Results) -> Claim:
    comparisons = [
        found
        for setting in runs.settings(results)
        for rival in setting.recipes
        if runs.matches(rival, ("one-shot-*", "trained-*-once-*"))
        for annealed in [rival.replace("one-shot", "one-run").replace("-once", "")]
        for found in _pair(results, setting, annealed, rival, target=0, tolerance=0.0)
    ]
    claim = Claim(
        "annealing",
        "Gradual removal by the annealing plan is less greedy, and so better than removing everything at once.",
        "Sections 3 and 5",
        "no numbers",
        rule="With the same ranking and epochs, the annealed run is better than the one-shot run (tolerance 0).",
    )
    return decided(claim, comparisons, runs.commands(results, runs.QUARTER, ("one-shot-*-70", "trained-*-once-70"), 1))


def _untrained(results: Results) -> Claim:
    comparisons = [
        found
        for setting in runs.settings(results)
        for ours in setting.recipes
        if fnmatchcase(ours, "untrained-*")
        for found in _pair(results, setting, ours, ours.removeprefix("un"), target=0)
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
    return decided(claim, comparisons, runs.commands(results, runs.QUARTER, ("untrained-*-70",), 1))


def _alpha(results: Results) -> Claim:
    comparisons = [
        found
        for setting in runs.settings(results)
        for ours in setting.recipes
        if fnmatchcase(ours, "paper-gamma-*")
        for found in _pair(results, setting, ours, ours.replace("gamma", "blend"), target=0, tolerance=0.0)
    ]
    claim = Claim(
        "alpha",
        "For VGG-16, ranking by the BatchNorm scales alone is better than blending them with norms of weights.",
        "Section 6",
        "no numbers",
        rule="By the paper's text from the trained network, scales are better than the blend of means (tolerance 0).",
    )
    return decided(claim, comparisons, runs.commands(results, runs.QUARTER, ("paper-gamma-70", "paper-blend-70"), 1))


def _pair(
    results: Results, setting: Setting, ours: str, other: str, *, target: float, tolerance: float = TOLERANCE
) -> list[Comparison]:
    pair = setting.of(results, ours), setting.of(results, other)
    found = compared(results, *pair, target=target, tolerance=tolerance)
    return [found] if found else []


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
        judged(largest < whole, bool(lines)),
        _named(results, lines),
        rule="Each of the last five layers keeps a smaller share than the whole network.",
        facts=facts,
        commands=() if lines else runs.commands(results, runs.QUARTER, ("one-run-*-70",), 1),
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
        judged(isinstance(uneven, Number) and uneven.value <= EVEN, bool(lines)),
        _named(results, lines),
        rule="Without the transitions, the standard deviation of the shares left is at most a third of their mean.",
        facts=(
            ("left in the whole network", number("share:total", lines, form="{:.1f}"), "%"),
            ("standard deviation over mean of the shares", uneven, "%"),
        ),
        commands=() if lines else runs.commands(results, "densenet40-cifar10", ("keepk-60",), 1),
    )


def _named(results: Results, lines: Lines) -> str:
    if not lines:
        return ""
    return f"Measured on {setting_title(results, lines[0])}, recipe {lines[0]['recipe']}."


def _one_rate(results: Results) -> Claim:
    families = rate_families(results)
    complete = [(setting, names) for setting, names in families if not rates_missing(names)]
    comparisons = [
        found
        for setting, names in complete
        for name in names
        if runs.percent_removed(name) in RATES
        for lines in [setting.of(results, name)]
        if (found := compared(results, lines, runs.dense_lines(results, lines[0]), target=0))
    ]
    claim = Claim(
        "one-rate",
        "One global rate of 10, 30, 50 or 70 % for all layers gives networks that still generalise well.",
        "Figure 5",
        "a curve without numbers",
        rule="At each of the four rates, the error is not higher than that of the dense network.",
    )
    return decided(claim, comparisons, rate_commands(results, ("vgg16", "densenet40")))
