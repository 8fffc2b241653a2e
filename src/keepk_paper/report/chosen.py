"""The runs that represent the paper's method, chosen by validation error, and their curves of error by rate."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from keepk_paper.report import runs
from keepk_paper.report.lines import Line, Lines, Results, in_common
from keepk_paper.report.runs import RATES, Setting

# Rivals are compared with the runs that they rival, in other claims and in the tables.
RIVALS = ("one-run-scratch-*", "narrow-*", "seconds-*", "slimming-*", "one-shot-*", "filters-*", "random-*")


def subject(results: Results, setting: Setting, percent: int) -> str | None:
    """The recipe that represents the paper's method: the candidate with the lowest validation error.

    Candidates whose dense control has not been run in the same precision are chosen only if there are no others.
    """
    candidates = [name for name in pruned(setting, percent) if runs.kind(name).candidate]
    lines = {name: setting.of(results, name) for name in candidates}
    compared = [name for name in candidates if in_common(lines[name], runs.dense_lines(results, lines[name][0]))[0]]
    return min(compared or candidates, key=lambda name: validation(lines[name]), default=None)


def validation(lines: Sequence[Line]) -> float:
    """The mean validation error."""
    return fmean(line["val_error"] for line in lines)


def pruned(setting: Setting, percent: int) -> list[str]:
    """The recipes that remove this percentage, without rivals."""
    return [it for it in setting.recipes if runs.percent_removed(it) == percent and not runs.matches(it, RIVALS)]


def percentages(setting: Setting) -> list[int]:
    """The percentages that the recipes of a setting remove."""
    return sorted({it for name in setting.recipes if (it := runs.percent_removed(name)) is not None})


def best(results: Results, settings: Iterable[Setting], percent: int) -> tuple[Setting, str] | None:
    """Of several settings, the one whose chosen run has the lowest validation error, and that run."""
    found = [(setting, name) for setting in settings if (name := subject(results, setting, percent))]
    return min(found, key=lambda it: validation(it[0].of(results, it[1])), default=None)


def most_removed(results: Results, network: str, data: str) -> Lines:
    """The largest network, pruned by the chosen recipe at 70 %, or at the largest percentage there is."""
    settings = [it for it in runs.settings(results) if runs.network_and_data(it.experiment) == (network, data)]
    for size in sorted({it.size or 0 for it in settings}, reverse=True):
        alike = [it for it in settings if (it.size or 0) == size]
        known = {percent for setting in alike for percent in percentages(setting)}
        for percent in sorted(known, key=lambda it: (it != 70, -it)):
            if found := best(results, alike, percent):
                return found[0].of(results, found[1])
    return ()


def rate_families(results: Results, fewest: int = 2) -> list[tuple[Setting, list[str]]]:
    """The families of recipes that remove at least `fewest` different shares of the same network."""
    found = list[tuple[Setting, list[str]]]()
    for setting in runs.settings(results):
        by_family = dict[str, list[str]]()
        for percent in percentages(setting):
            for name in pruned(setting, percent):
                by_family.setdefault(runs.family(name), []).append(name)
        found += [(setting, names) for names in by_family.values() if len(names) >= fewest]
    return found


def rates_missing(names: Iterable[str]) -> list[int]:
    """The rates of the paper's curve that no recipe of a family has."""
    known = {runs.percent_removed(name) for name in names}
    return [rate for rate in RATES if rate not in known]


def rate_commands(results: Results, networks: Sequence[str]) -> tuple[str, ...]:
    """The commands for the points of the curves that are missing: of the families that have been started, or of all."""
    started = [it for it in rate_families(results, 1) if runs.network_and_data(it[0].experiment)[0] in networks]
    families = {(setting.experiment, runs.family(names[0])): rates_missing(names) for setting, names in started}
    # Other families have recipes for 60 and 70 % alone.
    wanted = {key: rates for key, rates in families.items() if key[1] in ("trained-blend", "trained-taylor")}
    if not wanted:
        wanted = {(f"{network}-cifar10", "trained-*"): list(RATES) for network in networks}
    return tuple(
        it
        for (experiment, name), rates in wanted.items()
        for rate in rates
        for it in runs.commands(results, experiment, (f"{name}-{rate}",), 1)
    )
