"""The recipes of `one_run`, their controls and rivals: epochs of events, and matched widths, costs and lengths."""

import json
import shutil
from functools import partial

import pytest
import torch
from torch import nn

import keepk
from keepk.errors import DataError
from keepk.plan.schedules import Annealing, plan
from keepk_paper import experiments, one_run, vgg
from keepk_paper.data import Split
from keepk_paper.models import VGG16
from keepk_paper.pictures import Pictures
from keepk_paper.recipes import Recipe, Stage
from keepk_paper.report import runs
from keepk_paper.train import Run

FINGERPRINTS = """\
lenet-300-100 paper 2b037e736625da4af36151476dc44cc0422b82c5393aee34c3190754a3477c15
lenet-300-100 keepk bd965e7a441e68cc2326604eca5e4dc3b925008eeffaaaea9e50726f421301ca
lenet-5 paper ddeeca6a921f79d4bf40ba003073525fa52bcc46b7e9b49416a137b28f7ee47f
lenet-5 keepk 1ec9221dcd046cfd20fded6acc6f159ab1ee1878fcceddde1fc95623293b93bf
vgg16-cifar10 dense ccc365380ff8838de9af7c49632d9cf63479a75d154f25be87984e2507854b24
vgg16-cifar10 control 150c2bc176d64d351f39e09cce146f157cf7098d3d917b2c39fb6960de842545
vgg16-cifar10 keepk-60 babbd8462e42aee98ab025b62ac124a315829a00b87b8bbe7ab32cc3252747c2
vgg16-cifar10 keepk-70 ba74edfb68c785c8023476eb37d8578e90ef7791858db7cff55da336f0781aa6
vgg16-cifar10 blend-70 2c7ff74f3d4183e1775952e621c9095f54624d32e238d91a1b429da1db22ac03
vgg16-cifar10 full-dense ca55f6b7bb1bf7a31cfaf653a7b62a518623d43e6dcd60f7a99f387eeb9e41fd
vgg16-cifar10 full-70 af6796a826f325d1e992bfd07ef84febc3a84616ebf8f1416814c0e18d47b4cb
vgg16-cifar10 one-run-dense 449ab232970bdf56bcd21bdfd0cc8bc9f2ca06ee6eb50a36a83ad4b59727c388
vgg16-half-cifar10 one-run-dense 44cfb673e9b3b94cda73c3006a0ddb1bf88a23ad44c9a749145daee309226394
vgg16-svhn one-run-dense 8d28a376db33452225b91e21335b466fa5840de6f11a968dafeb5007bab92d3b
densenet40-cifar10 dense 1478fffe28e2ae7202296934d50e3e55b6305850bfe15ed2b83cb8a1094edf4c
densenet40-cifar10 control 9a54e15f4350bc1e3c52faaacf038b1418be8720d677b5d4ea85791216fcbecc
densenet40-cifar10 keepk-60 a687ce909eed8a2e7b6c572e0a895639894f466029ec8dbe854518ed71ac8910
"""


@pytest.mark.parametrize("line", FINGERPRINTS.splitlines(), ids=lambda line: line.rpartition(" ")[0])
def test_the_fingerprints_of_committed_results_stay(line):
    """Otherwise a running checkpoint would no longer resume, and a finished seed would run again."""
    experiment, name, fingerprint = line.split()
    assert experiments.EXPERIMENTS[experiment][name].fingerprint() == fingerprint


def test_no_two_recipes_of_an_experiment_share_a_fingerprint():
    for named in experiments.EXPERIMENTS.values():
        assert all(recipe.name == name for name, recipe in named.items())
        assert len({recipe.fingerprint() for recipe in named.values()}) == len(named)
        assert all(other in named for recipe in named.values() for other in recipe.needs)
        assert all(recipe.control in (None, *named) for recipe in named.values())


def split(number, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(256, (number, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return Split(images, torch.randint(10, (number,), generator=generator))


DATA = Pictures(split(40, 1), split(20, 2), split(30, 3), 10, torch.full((3,), 127.0), torch.full((3,), 74.0))
WIDTH = 1 / 16  # 4, 4, 8, 8, 16, 16, 16 and six times 32 filters: 264
PLANS = {70: (79, Annealing(p0=0.5, n1=1, nu=0.2))}
SETTING = one_run.Setting(partial(vgg.vgg, options={"width": WIDTH}), 5, 2, 3, PLANS)


@pytest.fixture(scope="module")
def tiny():
    """The recipes of a setting that is small enough for a test, with small batches."""
    found = vgg._whole(SETTING)
    return {name: Recipe(**{**vars(recipe), "batch": 20}) for name, recipe in found.items()}


@pytest.fixture
def seed_of(monkeypatch, tmp_path, tiny):
    monkeypatch.setitem(experiments.EXPERIMENTS, "vgg16-cifar10", tiny)
    monkeypatch.setitem(experiments.DATA, "vgg16-cifar10", lambda _: DATA)
    folders = {"data": None, "results": tmp_path / "results", "runs": tmp_path / "runs"}

    def run(*names, **options):
        for name in names:
            experiments._one_seed("vgg16-cifar10", name, 1, threads=1, **folders, **options)
        lines = (tmp_path / "results" / "vgg16-cifar10.jsonl").read_text().splitlines()
        return {line["recipe"]: line for line in map(json.loads, lines)}

    return run


def filters(line):
    return [left for left, _ in line["layers"].values()]


@pytest.mark.filterwarnings("ignore::keepk.KeepkWarning")  # rankings of untrained networks give warnings
@pytest.mark.parametrize("metric", ["blend", "taylor"])
def test_controls_are_as_wide_as_costly_and_as_long_as_the_pruned_run(seed_of, metric):
    names = [f"{kind}-{metric}-70" for kind in ("one-run", "one-run-scratch", "narrow", "seconds")]
    lines = seed_of("one-run-dense", *names)
    dense, (pruned, scratch, narrow, seconds) = lines["one-run-dense"], (lines[name] for name in names)
    assert (pruned["asked"], pruned["kept"], pruned["total"], pruned["epochs"]) == (79, 79, 264, 5)
    assert filters(scratch) == filters(pruned) != filters(dense)
    assert (scratch["macs"], scratch["parameters"]) == (pruned["macs"], pruned["parameters"])
    assert scratch["epochs"] == narrow["epochs"] == 5
    assert len({tuple(filters(it)) for it in (narrow, pruned, dense)}) == 3
    assert abs(narrow["macs"] / pruned["macs"] - 1) < 0.2
    assert filters(seconds) == filters(dense)
    assert {it["dense_test_error"] for it in (pruned, scratch, narrow, seconds)} == {dense["test_error"]}
    assert all(it["commits"] == [it["versions"]["commit"]] for it in lines.values())
    if metric == "blend":
        assert all(left >= -(-total // 10) for left, total in pruned["layers"].values())


@pytest.mark.filterwarnings("ignore::keepk.KeepkWarning")
def test_events_are_where_the_setting_says(tmp_path, tiny):
    def counts(name):
        found = []
        run = Run(tiny[name], 1, DATA, tmp_path / name)
        run.finish(lambda _, pruner: found.append(sum(pruner.kept.values())))
        assert run.progress.points[-1]["kept"] == 79
        return found, run

    assert counts("one-run-taylor-70")[0] == [264, 132, 79, 79, 79]
    assert counts("random-70")[0] == [264, 132, 79, 79, 79]
    assert counts("one-shot-blend-70")[0] == [264, 264, 79, 79, 79]
    assert counts("slimming-1e-3-70")[0] == [264, 264, 79, 79, 79]
    found, run = counts("filters-70")
    assert found == [264, 264, 79, 79, 79]
    widths = one_run.filters_of(VGG16(width=WIDTH))
    assert one_run.filters_of(run.model) == one_run.equal_shares(widths, 79)


@pytest.mark.filterwarnings("ignore::keepk.KeepkWarning")
@pytest.mark.parametrize("name", ["one-run-taylor-70", "one-run-blend-70"])
def test_a_killed_run_ends_bit_equal(tmp_path, tiny, name):
    def finished(folder, killed_after):
        run = Run(tiny[name], 1, DATA, folder)

        def kill(progress, _):
            if progress.epoch == killed_after:
                raise KeyboardInterrupt

        if killed_after:
            with pytest.raises(KeyboardInterrupt):
                run.finish(kill)
            run = Run(tiny[name], 1, DATA, folder)
        run.finish(lambda *_: None)
        return run.model.state_dict()

    whole = finished(tmp_path / "whole", 0)
    for epoch in (1, 2):
        resumed = finished(tmp_path / f"killed{epoch}", epoch)
        assert [key for key in whole if not whole[key].equal(resumed[key])] == []


def test_a_penalty_on_scales_shrinks_them_and_nothing_else_does(tmp_path, tiny):
    def trained(penalty):
        stage = Stage(1, lr=0.1, momentum=0.0, nesterov=False, scale_l1=penalty)
        recipe = Recipe(**{**vars(tiny["one-run-dense"]), "stages": [stage], "batch": 40})
        run = Run(recipe, 1, DATA, tmp_path / str(penalty))
        before = [it.weight.detach().clone() for it in run.model.modules() if isinstance(it, nn.BatchNorm2d)]
        run.finish(lambda *_: None)
        norms = [it for it in run.model.modules() if isinstance(it, nn.BatchNorm2d)]
        return before, norms, run.model.get_parameter("features.0.weight")

    (before, plain, kernel), (_, penalised, other) = trained(0.0), trained(0.5)
    assert torch.equal(kernel, other)  # after one step
    for old, one, two in zip(before, plain, penalised, strict=True):
        torch.testing.assert_close(one.weight - two.weight, 0.05 * old.sign(), rtol=0, atol=1e-6)
        assert torch.equal(one.bias, two.bias)


def test_what_a_recipe_needs_must_be_finished(seed_of):
    with pytest.raises(DataError, match=r"no finished run of recipe 'one-run-blend-70' with seed 1.* Run it first"):
        seed_of("one-run-scratch-blend-70")


@pytest.mark.filterwarnings("ignore::keepk.KeepkWarning")  # rankings of untrained networks give warnings
def test_a_run_of_another_precision_is_neither_needed_nor_a_control(seed_of):
    lines = seed_of("one-run-dense")
    lines |= seed_of("one-run-blend-70", amp=True)
    assert lines["one-run-blend-70"]["dense_test_error"] is None  # its control was trained in float32
    words = (
        r"one-run-blend-70-1: the finished run of recipe 'one-run-blend-70' with seed 1 was trained in bfloat16 mixed "
        r"precision, but it is needed in float32\. Train both alike, or give another folder with --runs"
    )
    with pytest.raises(DataError, match=words):
        seed_of("one-run-scratch-blend-70")
    with pytest.raises(DataError, match=r"one-run-dense-1: .* trained in float32, but it is needed in bfloat16"):
        seed_of("seconds-blend-70", amp=True)
    assert seed_of("one-run-scratch-blend-70", amp=True)["one-run-scratch-blend-70"]["amp"] is True


@pytest.mark.filterwarnings("ignore::keepk.KeepkWarning")  # rankings of untrained networks give warnings
def test_the_result_line_of_a_needed_run_suffices_without_its_checkpoint(seed_of, tmp_path):
    lines = seed_of("one-run-dense", "one-run-blend-70")
    shutil.rmtree(tmp_path / "runs")
    lines = seed_of("one-run-scratch-blend-70", "seconds-blend-70")
    assert filters(lines["one-run-scratch-blend-70"]) == filters(lines["one-run-blend-70"])
    assert lines["seconds-blend-70"]["dense_test_error"] == lines["one-run-dense"]["test_error"]
    with pytest.raises(DataError, match=r"no finished run of recipe 'one-run-blend-70' with seed 1"):
        seed_of("narrow-blend-70", amp=True)  # the lines are of runs in float32


def test_only_recipes_without_results_are_trained_first():
    names = ["seconds-taylor-70", "trained-blend-60"]
    chosen = experiments._with_needed("vgg16-cifar10", names, {"one-run-taylor-70", "dense"}.__contains__)
    # The start of a run is needed with its weights, which a result line does not have.
    assert {*chosen} == {*names, "one-run-dense", "dense"}
    assert experiments._in_turn("vgg16-cifar10", chosen) == [["one-run-dense", "dense"], names]


def test_recipes_wait_for_those_they_need():
    chosen = experiments._with_needed("vgg16-cifar10", ["seconds-taylor-70", "trained-blend-60"], lambda _: False)
    assert {*chosen} == {
        *("one-run-taylor-70", "one-run-dense", "dense"),
        *("seconds-taylor-70", "trained-blend-60"),
    }
    groups = experiments._in_turn("vgg16-cifar10", chosen)
    assert [{*group} for group in groups] == [
        {"one-run-taylor-70", "one-run-dense", "dense"},
        {"seconds-taylor-70", "trained-blend-60"},
    ]


def test_the_width_with_as_many_macs_is_the_nearest():
    recipe = vgg._whole(vgg.QUARTER)["narrow-blend-70"]
    for width in (17, 40):
        macs = one_run._macs(recipe, width)
        settled = one_run.settled(recipe, {"macs": macs}, None)
        assert one_run._macs(recipe, round(settled.options["width"] * one_run.FINENESS)) == macs


def test_as_many_seconds_are_as_many_epochs():
    recipe = vgg._whole(vgg.QUARTER)["seconds-blend-70"]
    settled = one_run.settled(recipe, {"cpu_seconds": 610.0}, {"cpu_seconds": 1_000.0, "epochs": 40})
    assert settled.epochs == 24
    assert settled.stages[0].learning_rate(24) == pytest.approx(0)


@pytest.mark.parametrize(
    ("experiment", "first", "last", "counts"),
    [
        ("vgg16-cifar10", 12, 22, {"60": 422, "70": 316}),
        ("vgg16-half-cifar10", 12, 22, {"60": 844, "70": 633}),
        ("vgg16-full-cifar10", 9, 19, {"60": 1_689, "70": 1_267}),
        ("vgg16-svhn", 6, 12, {"60": 1_689}),
        ("vgg16-half-cifar100", 12, 17, {"50": 1_056}),
        ("densenet40-cifar10", 9, 19, {"60": 1_872}),
        ("densenet40-cifar100", 9, 19, {"60": 1_872}),
        ("densenet40-svhn", 6, 12, {"60": 1_872}),
    ],
)
def test_the_plans_of_the_committed_settings(experiment, first, last, counts):
    for percent, keep in counts.items():
        for metric in ("blend", "taylor"):
            recipe = experiments.EXPERIMENTS[experiment][f"one-run-{metric}-{percent}"]
            dense = experiments.EXPERIMENTS[experiment]["one-run-dense"]
            assert recipe.epochs == dense.epochs
            rates = [[it.stages[0].learning_rate(epoch) for epoch in range(it.epochs)] for it in (recipe, dense)]
            assert rates[0] == rates[1]
            network = recipe.network(**recipe.options)
            total = sum(norm.num_features for norm in network.modules() if isinstance(norm, nn.BatchNorm2d))
            (stage,), phases = recipe.stages, recipe.phases()
            assert phases is not None
            before, during = phases
            wanted, schedule = stage.keep[next(iter(recipe.spaces))]
            assert callable(schedule)
            plan = [total] * before.epochs + list(schedule(total, wanted, during.epochs))
            assert [plan[first - 2], plan[-1], wanted] == [total, keep, keep]
            falls = [n for n, (one, two) in enumerate(zip([total, *plan], plan, strict=False), start=1) if two < one]
            assert (falls[0], falls[-1]) == (first, last)
            assert keep == int(total * (100 - int(percent)) / 100 + 1e-9)


def test_a_network_of_given_filters_is_refused_unless_it_has_13():
    with pytest.raises(keepk.errors.KeepkError, match="give the filters of 13 convolutions"):
        VGG16(filters=[4] * 12)
    assert list(one_run.filters_of(VGG16(filters=range(1, 14), width=0.1)).values()) == list(range(1, 14))


@pytest.mark.parametrize("experiment", [name for name in experiments.EXPERIMENTS if name.startswith(("vgg", "dense"))])
def test_every_recipe_reaches_its_count_in_its_epochs_and_is_known_to_the_report(experiment):
    for name, recipe in experiments.EXPERIMENTS[experiment].items():
        assert runs.kind(name) is not runs.OTHER
        network = recipe.network(**recipe.options)
        channels = sum(norm.num_features for norm in network.modules() if isinstance(norm, nn.BatchNorm2d))
        totals = {**dict.fromkeys(recipe.spaces, channels), **one_run.filters_of(network)}
        for stage in recipe.stages:
            for space, (keep, schedule) in stage.keep.items():
                counts = plan(schedule, totals[space], keep, epochs=stage.epochs - stage.first_event + 1)
                assert counts[-1] == keep
                assert list(counts) == sorted(counts, reverse=True)
            if len(stage.keep) > 1:  # a space per layer: together they keep as many as one space would
                assert sum(keep for keep, _ in stage.keep.values()) == int(channels * (100 - int(name[-2:])) / 100)
