"""Verdicts: made-up results whose outcome is known, and the rules at their edges."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from keepk.errors import DataError
from keepk_paper.experiments import EXPERIMENTS
from keepk_paper.report import numbers, runs
from keepk_paper.report.chosen import subject
from keepk_paper.report.claims import claims
from keepk_paper.report.lines import Line, read_folder
from keepk_paper.report.verdicts import Comparison, Verdict
from made_results import every_channel_run, line, write

PICTURES = 2_000


def exactly(number):
    """Flags with this many wrong pictures of 2,000, nested in each other: 20 are one percent."""
    return np.arange(PICTURES) < number


def half(recipe, number, seed=1, **more):
    kept = {"one-run-dense": 2_112}.get(recipe, 633)
    return line("vgg16-half-cifar10", recipe, seed, total=2_112, kept=kept, wrong=exactly(number), **more)


def found(folder, *made):
    files: dict[str, list[dict[str, object]]] = {}
    for it in made:
        files.setdefault(it["experiment"], []).append(it)
    return {claim.key: claim for claim in claims(read_folder(write(folder, files)))}


def test_a_small_loss_is_confirmed_and_a_large_one_is_not(tmp_path):
    """The target at half width and 70 % is .5: the upper end may be .8."""
    # 6 more of 2,000 are .3 points; nested, so that the standard error is 100 sqrt(.003 (1 - .003) / 2000) = .122
    small = found(tmp_path / "a", half("one-run-dense", 200), half("one-run-taylor-70", 206))["vgg16-cifar10-70"]
    assert small.verdict is Verdict.CONFIRMED
    (it,) = small.comparisons
    assert it.interval.difference == pytest.approx(0.3)
    assert it.interval.high == pytest.approx(0.3 + 1.96 * 0.1223, abs=1e-3)
    # 14 more are .7 points, and the upper end is 1.07
    large = found(tmp_path / "b", half("one-run-dense", 200), half("one-run-taylor-70", 214))["vgg16-cifar10-70"]
    assert large.verdict is Verdict.NOT_CONFIRMED


def test_a_quarter_of_the_width_does_not_decide(tmp_path):
    dense = line("vgg16-cifar10", "one-run-dense", wrong=exactly(200))
    pruned = line("vgg16-cifar10", "one-run-taylor-70", kept=316, wrong=exactly(206))
    claim = found(tmp_path, dense, pruned)["vgg16-cifar10-70"]
    assert claim.verdict is Verdict.NOT_YET_RUN
    assert [it.verdict for it in claim.comparisons] == [Verdict.CONFIRMED]
    assert "too small to decide" in claim.reason
    assert "keepk paper run vgg16-half-cifar10 --recipe one-run-taylor-70 --seeds 1" in claim.commands


def test_the_recipe_with_the_lowest_validation_error_decides_even_if_its_test_error_is_higher(tmp_path):
    dense, better = half("one-run-dense", 200), half("one-run-blend-70", 200, val_error=12.0)
    chosen = half("one-run-taylor-70", 260, val_error=11.0)
    claim = found(tmp_path, dense, better, chosen)["vgg16-cifar10-70"]
    assert claim.verdict is Verdict.NOT_CONFIRMED
    assert {it.recipe: it.decides for it in claim.comparisons} == {"one-run-blend-70": False, "one-run-taylor-70": True}


def test_only_seeds_that_both_runs_have_are_compared(tmp_path):
    made = [half("one-run-dense", 200, seed) for seed in (1, 2, 3)]
    made += [half("one-run-taylor-70", 220, seed) for seed in (2, 3, 4)]
    (it,) = found(tmp_path, *made)["vgg16-cifar10-70"].comparisons
    assert [one["seed"] for one in it.of] == [one["seed"] for one in it.against] == [2, 3]


def test_without_its_control_a_run_decides_nothing(tmp_path):
    claim = found(tmp_path, half("one-run-taylor-70", 200))["vgg16-cifar10-70"]
    assert (claim.verdict, claim.comparisons) == (Verdict.NOT_YET_RUN, ())


def comparison(*errors, target=0.5, **more):
    of, against = (
        tuple(Line("x.jsonl", 1, {"seed": seed, "test_error": error[place]}) for seed, error in enumerate(errors))
        for place in (0, 1)
    )
    return Comparison("", "", "", of, against, target, **more)


def test_one_seed_without_pictures_can_only_fail():
    assert comparison((11.0, 10.0)).verdict is Verdict.NOT_CONFIRMED
    assert comparison((10.0, 10.0)).verdict is Verdict.NOT_YET_RUN
    assert comparison((10.8, 10.0)).verdict is Verdict.NOT_YET_RUN  # at the bound


def test_the_bound_itself_is_confirmed():
    """Equal differences have an interval without width: its upper end is .8, which is .5 + .3."""
    at_bound = comparison((10.75, 10.0), (9.75, 9.0), target=0.45)
    assert at_bound.verdict is Verdict.CONFIRMED
    assert replace(at_bound, target=0.44).verdict is Verdict.NOT_CONFIRMED


def test_slimming_is_judged_by_its_best_penalty_on_validation(tmp_path):
    ours = line("vgg16-cifar10", "one-run-taylor-70", kept=316, wrong=exactly(240))
    best = line("vgg16-cifar10", "slimming-1e-4-70", kept=316, wrong=exactly(250), val_error=11.0)
    other = line("vgg16-cifar10", "slimming-1e-3-70", kept=316, wrong=exactly(200), val_error=12.0)
    claim = found(tmp_path, ours, best, other)["slimming"]
    assert [it.other for it in claim.comparisons] == ["slimming-1e-4-70"]
    assert claim.verdict is Verdict.CONFIRMED


def test_han_is_compared_by_weights_and_error_without_its_dense_point(tmp_path):
    def mnist(recipe, asked, number):
        made = line("lenet-5", recipe, total=431_080, kept=asked, wrong=exactly(number))
        return made | {"layers": {"conv1": [1, 2], "fc1": [1, 3]}}

    ours = [mnist("paper", 431_080, 15), mnist("paper", 15_781, 15)]
    for kept, verdict in ((36_000, Verdict.CONFIRMED), (12_000, Verdict.NOT_CONFIRMED)):
        rival = [mnist("han", 431_080, 15), mnist("han", kept, 15)]
        claim = found(tmp_path / f"{kept}", *ours, *rival)["lenet-5-han"]
        assert claim.verdict is verdict
        assert [cell.value for _, cell, _ in claim.facts] == [kept, 15_781]


def test_better_means_better(tmp_path):
    """Annealed and one-shot runs that are equally good do not confirm that annealing is better."""
    for number, verdict in ((240, Verdict.NOT_CONFIRMED), (300, Verdict.CONFIRMED)):
        ours = line("vgg16-cifar10", "one-run-taylor-70", kept=316, wrong=exactly(240))
        rival = line("vgg16-cifar10", "one-shot-taylor-70", kept=316, wrong=exactly(number))
        assert found(tmp_path / f"{number}", ours, rival)["annealing"].verdict is verdict


def test_a_network_that_keeps_a_unit_too_many_is_noticed(tmp_path):
    right = line("vgg16-cifar10", "one-run-taylor-70", kept=316)
    assert found(tmp_path / "a", right)["exact"].verdict is Verdict.CONFIRMED
    assert found(tmp_path / "b", right | {"kept": 317})["exact"].verdict is Verdict.NOT_CONFIRMED


def test_last_layers_that_keep_many_are_not_confirmed(tmp_path):
    def pruned(last):
        made = line("vgg16-cifar10", "one-run-taylor-70", kept=316)
        names = list(made["layers"])
        layers = {name: [5 if name in names[-5:] else 30, 100] for name in names} | {names[-1]: [last, 100]}
        return made | {"layers": layers}

    assert found(tmp_path / "a", pruned(4))["last-layers"].verdict is Verdict.CONFIRMED
    assert found(tmp_path / "b", pruned(60))["last-layers"].verdict is Verdict.NOT_CONFIRMED


def test_every_claim_gets_a_verdict_when_everything_has_run(tmp_path):
    made = every_channel_run(seeds=(1,))
    results = read_folder(write(tmp_path, made))
    verdicts = {claim.key: claim.verdict for claim in claims(results)}
    networks = ["vgg16-cifar10-60", "vgg16-cifar10-70", "vgg16-svhn-60", "last-layers"]
    assert {verdicts[key] for key in [*networks, "slimming", "annealing", "untrained", "alpha"]} <= {
        Verdict.CONFIRMED,
        Verdict.NOT_CONFIRMED,
    }
    assert len(verdicts) == len(claims(results))  # each has its own key


def test_svhn_and_cifar_100_say_what_they_rest_on(tmp_path):
    keys = ("vgg16-svhn-60", "densenet40-svhn-60", "vgg16-cifar100-50", "densenet40-cifar100-60")
    by_key = found(tmp_path, half("one-run-dense", 200))
    assert all("15,000 training pictures" in by_key[key].caveat for key in keys)
    assert all("re-created" in by_key[key].caveat for key in keys[:2])


def test_a_folder_without_results_says_what_to_run(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match=r"no results in .*Run an experiment first, such as `keepk paper run lenet"):
            read_folder(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"macs": None}, r"vgg16-cifar10\.jsonl:2: macs is None, not a number of zero or more\. Run the recipe again"),
        ({"test_error": "9"}, r"test_error is '9', not a number"),
        ({"test_error": float("nan")}, "test_error is nan, not a number"),
        ({"kept": 1.5}, r"kept is 1\.5, not a count"),
        ({"seed": -1}, "seed is -1, not a count"),
        ({"experiment": "vgg16-svhn"}, r"a result of experiment 'vgg16-svhn'\. Move the line to vgg16-svhn\.jsonl"),
    ],
)
def test_a_line_with_an_odd_value_is_refused_by_file_and_line(tmp_path, change, words):
    good = line("vgg16-cifar10", "one-run-dense")
    write(tmp_path, {"vgg16-cifar10": [good, good | {"recipe": "other"} | change]})
    with pytest.raises(DataError, match=words):
        read_folder(tmp_path)


@pytest.mark.parametrize("key", ["macs", "layers", "cpu_seconds", "epochs", "printed_parameters"])
def test_a_line_without_something_that_is_shown_is_refused(tmp_path, key):
    lacking = {name: value for name, value in line("vgg16-cifar10", "one-run-dense").items() if name != key}
    write(tmp_path, {"vgg16-cifar10": [lacking]})
    with pytest.raises(DataError, match=rf"\.jsonl:1: a result without {key}, which the report needs\. Run the recipe"):
        read_folder(tmp_path)


def test_two_counts_of_one_recipe_and_seed_are_refused(tmp_path):
    made = [line("vgg16-cifar10", "one-run-taylor-70", kept=kept) for kept in (316, 317)]
    with pytest.raises(
        DataError, match=r"lines 1 and 2 are both recipe 'one-run-taylor-70' with seed 1, at 316 and 317"
    ):
        read_folder(write(tmp_path, {"vgg16-cifar10": made}))


def test_the_papers_baseline_is_judged_only_at_its_own_length(tmp_path):
    short = line("vgg16-full-cifar10", "one-run-dense", total=4_224, wrong=exactly(130))
    assert found(tmp_path / "a", short)["baseline"].verdict is Verdict.NOT_TESTABLE
    for number, verdict in ((132, Verdict.CONFIRMED), (134, Verdict.NOT_CONFIRMED)):  # 6.6 and 6.7 %
        dense = line("vgg16-cifar10", "full-dense", total=4_224, wrong=exactly(number))
        assert found(tmp_path / f"{number}", dense)["baseline"].verdict is verdict


def test_settings_are_told_apart_by_the_width_of_the_dense_network(tmp_path):
    made = [
        line("densenet40-cifar10", "dense", total=3_120),
        line("densenet40-cifar10", "control", total=3_120),
        line("densenet40-cifar10", "keepk-60", total=3_120, kept=1_248),
        line("densenet40-cifar10", "one-run-dense", total=4_680),
        line("densenet40-cifar10", "one-run-blend-60", total=4_680, kept=1_872),
    ]
    results = read_folder(write(tmp_path, {"densenet40-cifar10": made}))
    small, large = runs.settings(results)
    assert (small.size, large.size) == (Fraction(1, 3), Fraction(1, 2))
    assert large.recipes == ("one-run-dense", "one-run-blend-60")
    assert (subject(results, small, 60), subject(results, large, 60)) == ("keepk-60", "one-run-blend-60")
    assert small.title == "DenseNet-40, growth rate 4, CIFAR-10 (the first 15,000 training pictures)"
    assert large.title == "DenseNet-40, growth rate 6, CIFAR-10"


def test_every_recipe_of_the_experiments_has_a_label_and_a_description():
    for experiment, recipes in EXPERIMENTS.items():
        for recipe in recipes:
            assert runs.kind(recipe) is not runs.OTHER or experiment.startswith("lenet"), recipe
            words = runs.describe(experiment, recipe)
            assert "epochs: learning rate" in words
            assert "0x" not in words  # no addresses of functions


def test_the_programme_names_commands_that_exist_and_ticks_off_what_has_run(tmp_path):
    nothing = read_folder(write(tmp_path / "a", {"vgg16-svhn": [line("vgg16-svhn", "odd", total=4_224)]}))
    states = runs.programme(nothing)
    assert not any(state.done for state in states)
    for state in states:
        for words in state.commands:
            _, _, _, experiment, _, recipe, *_ = words.split()
            assert recipe in EXPERIMENTS[experiment]
    every = read_folder(write(tmp_path / "b", every_channel_run(seeds=(1, 2, 3))))
    rows = {state.wanted.row for state in runs.programme(every) if state.done < state.wanted.seeds}
    assert all(row[0] in "456" for row in rows)  # those whose recipes are not written yet


# Precision

AMP = {"device": "cpu", "amp": True}


def test_a_run_is_compared_only_with_a_control_of_its_precision(tmp_path):
    mixed = found(tmp_path / "a", half("one-run-dense", 200), half("one-run-taylor-70", 200, **AMP))["vgg16-cifar10-70"]
    assert (mixed.verdict, mixed.comparisons) == (Verdict.NOT_YET_RUN, ())
    # With both controls there is one comparison, with the control in bfloat16.
    made = [half("one-run-dense", 100), half("one-run-dense", 199, **AMP), half("one-run-taylor-70", 200, **AMP)]
    claim = found(tmp_path / "b", *made)["vgg16-cifar10-70"]
    (it,) = claim.comparisons
    assert it.interval.difference == pytest.approx(0.05)
    assert claim.verdict is Verdict.CONFIRMED
    assert it.setting == "VGG-16, width 1/2, CIFAR-10, bfloat16 mixed precision"


def test_another_device_is_another_setting(tmp_path):
    made = [half("one-run-dense", 200, device="cuda", amp=False), half("one-run-taylor-70", 200)]
    assert found(tmp_path, *made)["vgg16-cifar10-70"].comparisons == ()


def test_rivals_and_pairs_of_another_precision_are_not_compared(tmp_path):
    def quarter(recipe, **more):
        return line("vgg16-cifar10", recipe, kept=316, **more)

    pairs = {
        "slimming": ("one-run-taylor-70", "slimming-1e-4-70"),
        "annealing": ("one-run-taylor-70", "one-shot-taylor-70"),
        "untrained": ("untrained-taylor-70", "trained-taylor-70"),
        "alpha": ("paper-gamma-70", "paper-blend-70"),
    }
    for key, (one, other) in pairs.items():
        assert found(tmp_path / f"{key}-1", quarter(one), quarter(other, **AMP))[key].comparisons == ()
        assert len(found(tmp_path / f"{key}-2", quarter(one, **AMP), quarter(other, **AMP))[key].comparisons) == 1


def test_one_event_from_the_trained_network_counts_for_annealing(tmp_path):
    annealed = line("vgg16-cifar10", "trained-taylor-70", kept=316, wrong=exactly(240))
    once = line("vgg16-cifar10", "trained-taylor-once-70", kept=316, wrong=exactly(300))
    (it,) = found(tmp_path, annealed, once)["annealing"].comparisons
    assert (it.recipe, it.other, it.verdict) == ("trained-taylor-70", "trained-taylor-once-70", Verdict.CONFIRMED)


def test_missing_runs_are_asked_for_in_the_precision_of_the_latest_line(tmp_path):
    made = [line("vgg16-cifar10", "dense"), line("vgg16-cifar10", "one-run-dense", **AMP)]
    results = read_folder(write(tmp_path, {"vgg16-cifar10": made}))
    (command,) = runs.commands(results, "vgg16-cifar10", ("one-run-taylor-70",), 3)
    assert command == "keepk paper run vgg16-cifar10 --recipe one-run-taylor-70 --seeds 3 --amp"
    (command,) = runs.commands(results, "vgg16-svhn", ("one-run-dense",), 1)
    assert command == "keepk paper run vgg16-svhn --recipe one-run-dense --seeds 1"


def test_seeds_of_two_precisions_or_recipes_do_not_add_up(tmp_path):
    made = [line("vgg16-cifar10", "one-run-dense", seed) for seed in (1, 2)]
    made += [line("vgg16-cifar10", "one-run-dense", 3, **AMP)]
    made += [
        line("vgg16-cifar10", "one-run-taylor-70", 1, kept=316),
        line("vgg16-cifar10", "one-run-blend-70", 2, kept=316),
    ]
    states = runs.programme(read_folder(write(tmp_path, {"vgg16-cifar10": made})))
    done = {
        state.wanted.recipes: state.done for state in states if state.wanted.row == "1. VGG-16, width 1/4, CIFAR-10"
    }
    assert (done["one-run-dense",], done[runs.one_run(70)]) == (2, 1)


def test_two_precisions_of_a_network_with_one_table_are_refused(tmp_path):
    made = line("lenet-5", "paper", total=431_080, kept=15_781)
    words = r"lenet-5\.jsonl: line 1 was trained in float32, line 2 in bfloat16 mixed precision\. .* to another folder"
    with pytest.raises(DataError, match=words):
        read_folder(write(tmp_path, {"lenet-5": [made, made | AMP]}))


def test_no_number_is_a_mean_over_precisions():
    lines = [Line("x.jsonl", number, {"test_error": 1.0, "seed": 1, **more}) for number, more in enumerate(({}, AMP))]
    with pytest.raises(AssertionError, match="mean:test_error over several trainings"):
        numbers.number("mean:test_error", lines)


def test_a_curve_of_rates_asks_only_for_what_is_missing(tmp_path):
    made = [
        line("vgg16-cifar10", f"trained-taylor-{percent}", kept=kept, **AMP) for percent, kept in ((30, 739), (70, 316))
    ]
    claim = found(tmp_path, *made)["one-rate"]
    assert claim.verdict is Verdict.NOT_YET_RUN
    assert claim.commands == tuple(
        f"keepk paper run vgg16-cifar10 --recipe trained-taylor-{rate} --seeds 1 --amp" for rate in (10, 50)
    )


def test_a_run_whose_control_is_missing_does_not_represent_the_others(tmp_path):
    """trained-taylor-70 has the lower validation error, but its control was not run in bfloat16."""
    made = [line("vgg16-cifar10", "one-run-dense", **AMP), line("vgg16-cifar10", "control")]
    made += [line("vgg16-cifar10", "one-run-blend-70", kept=316, val_error=13.0, **AMP)]
    made += [line("vgg16-cifar10", "trained-taylor-70", kept=316, val_error=12.0, **AMP)]

    def chosen(folder, lines):
        results = read_folder(write(folder, {"vgg16-cifar10": lines}))
        return {setting.training.amp: subject(results, setting, 70) for setting in runs.settings(results)}

    assert chosen(tmp_path / "a", made) == {True: "one-run-blend-70", False: None}
    made += [line("vgg16-cifar10", "control", **AMP)]
    assert chosen(tmp_path / "b", made)[True] == "trained-taylor-70"
    assert chosen(tmp_path / "c", [made[3]]) == {True: "trained-taylor-70"}
