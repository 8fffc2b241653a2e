"""The README's table: means over shared seeds, beside a dense network of the same precision; rows follow by rule."""

from keepk_paper.tables.summary import COLUMNS, summary_table
from made_results import line, write

AMP = {"device": "cpu", "amp": True}


def rows(folder, *made):
    files: dict[str, list[dict[str, object]]] = {}
    for it in made:
        files.setdefault(it["experiment"], []).append(it)
    return summary_table(write(folder, files)).rows


def quarter(recipe, seed, error, **more):
    kept = 1_056 if recipe in ("control", "one-run-dense") else 422
    return line("vgg16-cifar10", recipe, seed, kept=kept, **more) | {"test_error": error, "val_error": error}


def test_errors_are_means_over_the_seeds_that_both_have_and_sizes_are_shares(tmp_path):
    made = [quarter("control", seed, error) for seed, error in ((1, 2.0), (2, 3.0), (3, 9.0))]
    made += [quarter("keepk-60", seed, error) for seed, error in ((1, 3.0), (2, 5.0), (4, 9.0))]
    # 1,056 / 422 = 2.5, for parameters and MACs of the made lines
    name = "VGG-16, width 1/4, CIFAR-10"
    assert rows(tmp_path, *made) == ((name, "422 of 1,056 channels", "4.00", "2.50", "2", "1/2.5", "1/2.5"),)
    assert len(COLUMNS) == 7


def test_the_run_with_the_lowest_validation_error_is_shown_if_it_has_a_control_of_its_precision(tmp_path):
    made = [quarter("control", 1, 2.0), quarter("keepk-60", 1, 3.0)]
    better = quarter("one-run-taylor-60", 1, 2.5, **AMP)
    alone = rows(tmp_path / "a", *made, quarter("one-run-dense", 1, 2.0), better)
    assert [it[:4] for it in alone] == [("VGG-16, width 1/4, CIFAR-10", "422 of 1,056 channels", "3.00", "2.00")]
    both = rows(tmp_path / "b", *made, better, quarter("one-run-dense", 1, 2.25, **AMP))
    name = "VGG-16, width 1/4, CIFAR-10, bfloat16 mixed precision"
    assert [it[:4] for it in both] == [(name, "422 of 1,056 channels", "2.50", "2.25")]


def test_full_width_comes_first(tmp_path):
    made = [quarter("control", 1, 2.0), quarter("keepk-60", 1, 3.0)]
    full = {"total": 4_224}
    made += [line("vgg16-svhn", "one-run-dense", **full), line("vgg16-svhn", "one-run-blend-60", kept=1_689, **full)]
    found = rows(tmp_path, *made)
    assert found[0][0] == "VGG-16, full width, SVHN (re-created, 15,000 training pictures)"
    assert found[0][1] == "1,689 of 4,224 channels"
    assert len(found) == 2


def test_networks_without_a_comparison_have_no_row(tmp_path):
    assert rows(tmp_path, quarter("keepk-60", 1, 3.0)) == ()
