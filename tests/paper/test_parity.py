"""The parity experiment at a small size: data, exact counts at every event, results, table and figure."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepk.errors import DataError
from keepk.plan.schedules import Annealing, Cubic
from keepk_paper import parity as experiment
from keepk_paper import results
from keepk_paper.figures.parity import curve, fewest_at_floor, parity_figure
from keepk_paper.parity import KEEPK, RECIPES, points, run_parity, save_figure
from keepk_paper.parity_training import Line, Part, Recipe, Stack, draw, split, train
from keepk_paper.tables import parity as parity_tables

SMALL = (60, 20, 20)
DECAY = ((0.001, 0.001),) * 3
TINY = Recipe("keepk", "adam", 0.01, DECAY, dense=1, anneal=6, tail=1, start=12, schedule=Annealing(0.5, 2, 0.1))


def test_labels_are_the_parity_of_five_signs_but_for_the_noise():
    parity = draw(7)
    assert [len(part.labels) for part in (parity.train, parity.validation, parity.test)] == [15_000, 5_000, 5_000]
    for part in (parity.train, parity.validation, parity.test):
        assert part.signs.shape[1] == 50
        assert Counter(part.signs.unique().tolist()) == Counter([-1.0, 1.0])
        negative = (part.signs[:, :5] < 0).sum(1)
        true = torch.where(negative % 2 == 0, 1.0, -1.0)
        assert torch.equal(part.labels != true, part.flipped)
        assert part.floor == 100 * (part.labels != true).double().mean().item()
        assert part.errors(true[None]).item() == part.floor
        assert abs(part.floor - 10) < 4 * 100 * (0.1 * 0.9 / len(part.labels)) ** 0.5
        assert part.signs.mean(0).abs().max() < 5 / len(part.labels) ** 0.5


def test_the_same_seed_draws_the_same_data_and_another_does_not():
    first, again, other = draw(3, sizes=SMALL), draw(3, sizes=SMALL), draw(4, sizes=SMALL)
    assert torch.equal(first.train.signs, again.train.signs)
    assert torch.equal(first.test.labels, again.test.labels)
    assert not torch.equal(first.train.signs, other.train.signs)


def test_an_output_of_zero_is_an_error():
    part = Part(torch.ones(4, 2), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4, dtype=torch.bool))
    assert part.errors(torch.tensor([[2.0, 0.0, -1.0, 3.0], [1.0, 1.0, -1.0, -1.0]])).tolist() == [50.0, 0.0]


@pytest.mark.parametrize(("seed", "sizes", "words"), [(-1, SMALL, "seed=-1: too small"), (1, (5, 0, 5), "part=0: too")])
def test_a_draw_of_nothing_is_refused(seed, sizes, words):
    with pytest.raises(DataError, match=words):
        draw(seed, sizes=sizes)


def oracle_counts(recipe, epoch, inits, goals):
    """The expected number of lines of each width: networks with the same start and equal plans so far share one."""
    pasts = {(init, recipe.plan(goal)[: epoch + 1]) for init in range(inits) for goal in goals}
    return Counter(past[-1] for _, past in pasts)


@pytest.mark.parametrize("schedule", [Annealing(0.5, 2, 0.1), Annealing(0.0, 0, 0.2), Cubic(epochs=6), Cubic(epochs=3)])
def test_every_network_has_exactly_the_nodes_of_its_plan_after_every_epoch(schedule):
    recipe = Recipe("keepk", "adam", 0.01, DECAY, dense=1, anneal=6, tail=1, start=12, schedule=schedule)
    seen = []

    def watch(epoch, stack):
        alive = (stack.outgoing != 0).sum(1).tolist()
        assert alive == list(stack.widths)
        assert stack.outgoing.shape[1] == max(stack.widths)
        assert Counter(alive) == oracle_counts(recipe, epoch, 3, (1, 2, 5))
        seen.append(epoch)

    trained = train(recipe, draw(1, sizes=SMALL), seed=1, inits=3, goals=(1, 2, 5), watch=watch)
    assert seen == list(range(1, 9))
    assert trained.kept == {12: 12, 1: 1, 2: 2, 5: 5}
    assert {len(errors.test) for errors in trained.errors.values()} == {3}


def test_networks_that_share_their_beginning_end_as_if_they_were_trained_apart():
    parity = draw(2, sizes=(200, 20, 20)).to(torch.float64)
    ends = []

    def keep_last(_, stack):
        ends.append([tensor.detach().clone() for tensor in stack.parameters()])

    train(TINY, parity, seed=2, inits=2, goals=(1, 3, 4), watch=keep_last)
    incoming, outgoing, offset = ends[-1]
    for place, goal in enumerate((1, 3, 4)):
        train(TINY, parity, seed=2, inits=2, goals=(goal,), watch=keep_last)
        alone = ends[-1]
        for init in range(2):
            member = 3 * init + place
            torch.testing.assert_close(incoming[member, :goal], alone[0][init], rtol=0, atol=1e-9)
            torch.testing.assert_close(outgoing[member, :goal], alone[1][init], rtol=0, atol=1e-9)
            torch.testing.assert_close(offset[member], alone[2][init], rtol=0, atol=1e-9)


lines = st.lists(st.sets(st.integers(1, 9), min_size=1).map(sorted), min_size=1, max_size=4)


@given(lines, st.lists(st.integers(1, 4), min_size=9, max_size=9))
def test_a_split_loses_no_network_and_parts_them_by_count(goals_of, widths_of):
    before = [Line(init, tuple(goals)) for init, goals in enumerate(goals_of)]
    counts = dict(enumerate(widths_of, start=1))
    sources, after, widths = split(before, counts)
    found = {
        (line.init, goal): (source, width)
        for source, line, width in zip(sources, after, widths, strict=True)
        for goal in line.goals
    }
    assert found == {
        (line.init, goal): (place, counts[goal]) for place, line in enumerate(before) for goal in line.goals
    }
    assert len(after) == len({(line.init, counts[goal]) for line in before for goal in line.goals})


def test_a_run_repeats_and_another_seed_differs():
    def numbers(seed):
        return [
            (point["val_errors"], point["test_errors"])
            for point in points(TINY, seed=seed, inits=2, goals=(1, 3), sizes=SMALL)
        ]

    assert numbers(1) == numbers(1)
    assert numbers(1) != numbers(2)


def test_the_recipes_are_as_long_and_ours_goes_from_256_to_every_goal():
    assert {(recipe.epochs, recipe.tail, recipe.batch) for recipe in RECIPES.values()} == {(102, 16, 100)}
    for goal in experiment.GOALS:
        counts = KEEPK.plan(goal)
        assert counts[0] == counts[KEEPK.dense] == 256
        assert counts[-1 - KEEPK.tail :] == (goal,) * (1 + KEEPK.tail)
        assert {recipe.plan(goal) for recipe in RECIPES.values() if recipe.start is None} == {(goal,) * 103}
        assert experiment.BY_PRUNER.plan(goal) == counts
    assert list(KEEPK.plan(1)[38:-16:3]) == list(range(17, 0, -1))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(("progress", "phase"), [(0, 0), (29.9, 0), (30, 1), (86, 2)])
def test_decay_takes_the_share_written_off_a_weight_without_gradient(recipe, progress, phase):
    phase = phase if recipe.start is not None else 0
    stack = Stack(torch.full((1, 1, 2), 2.0), torch.full((1, 1), 2.0), torch.full((1,), 2.0), [1]).double()
    for parameter in stack.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = recipe.make_optimizer(stack)
    recipe.tune(optimizer, progress)
    optimizer.step()
    left = [2 * (1 - shrink) for shrink in recipe.shrink[phase]]
    assert stack.incoming.tolist() == [[[pytest.approx(left[0], abs=1e-12)] * 2]]
    assert [stack.outgoing.item(), stack.offset.item()] == pytest.approx([left[1]] * 2, abs=1e-12)


@pytest.fixture
def small(monkeypatch):
    """The experiment with tiny recipes and data."""
    plain = {name: Recipe(name, name, 0.01, DECAY, dense=7, anneal=0, tail=1) for name in ("adam", "sgd")}
    monkeypatch.setattr(experiment, "RECIPES", {"keepk": TINY, **plain})
    monkeypatch.setattr(experiment, "draw", lambda seed, sizes: draw(seed, sizes=SMALL))  # noqa: ARG005
    monkeypatch.setattr(points, "__kwdefaults__", {**(points.__kwdefaults__ or {}), "goals": (1, 2, 4)})


@pytest.mark.usefixtures("small")
def test_results_hold_the_chosen_network_and_all_of_them(tmp_path):
    path = run_parity(draws=2, inits=3, results=tmp_path)
    records = results.read(path)
    assert [(it["seed"], it["recipe"], it["asked"]) for it in records] == [
        (seed, recipe, asked)
        for seed in (1, 2)
        for recipe, numbers in (("keepk", (12, 1, 2, 4)), ("adam", (1, 2, 4)), ("sgd", (1, 2, 4)))
        for asked in numbers
    ]
    for it in records:
        assert it["kept"] == it["asked"]
        assert it["total"] == (12 if it["recipe"] == "keepk" else it["asked"])
        assert it["init"] == it["val_errors"].index(min(it["val_errors"]))
        assert (it["val_error"], it["test_error"]) == (it["val_errors"][it["init"]], it["test_errors"][it["init"]])
        assert it["noise_floor"] == draw(it["seed"], sizes=SMALL).test.floor
        assert it["at_floor"] == (it["test_error"] < it["noise_floor"] + 0.3)
        dense = next(that for that in records if (that["recipe"], that["seed"]) == (it["recipe"], it["seed"]))
        assert it["dense_test_error"] == (dense if it["recipe"] == "keepk" else it)["test_error"]


@pytest.mark.usefixtures("small")
def test_what_is_in_the_file_is_not_run_again(tmp_path, capsys):
    path = run_parity(draws=1, inits=2, results=tmp_path, recipes=["adam"])
    before = path.read_bytes()
    capsys.readouterr()
    run_parity(draws=2, inits=2, results=tmp_path, recipes=["adam"])
    assert path.read_bytes().startswith(before)
    assert [it["seed"] for it in results.read(path)] == [1] * 3 + [2] * 3
    assert capsys.readouterr().out.startswith("parity adam draw 1: in ")
    run_parity(draws=1, inits=3, results=tmp_path, recipes=["adam"])
    assert [it["inits"] for it in results.read(path)] == [3] * 3 + [2] * 3


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"draws": 0}, r"draws=0: too small\. Pass an int of at least 1"),
        ({"threads": 0}, r"threads=0: too small"),
        ({"inits": 2.5}, r"inits=2\.5: got float"),
        ({"inits": 1_000}, r"inits=1000: too many\. Choose fewer than 1000"),
        ({"recipes": ["adm"]}, r"no recipe 'adm'\. Nearest names: .*'adam'"),
    ],
)
def test_what_cannot_be_run_is_refused_and_nothing_is_written(tmp_path, asked, words):
    with pytest.raises(DataError, match=words):
        run_parity(results=tmp_path, **asked)
    assert list(tmp_path.iterdir()) == []


def point(recipe, seed, asked, errors, floor=10.0):
    """A point whose first network was chosen."""
    shared = {"experiment": "parity", "total": 256, "dense_test_error": 14.0, "seconds": 1.0, "versions": {}}
    made = {
        "recipe": recipe,
        "seed": seed,
        "asked": asked,
        "kept": asked,
        "test_error": errors[0],
        "val_error": errors[0],
    }
    more = {"test_errors": errors, "noise_floor": floor, "inits": len(errors), "at_floor": errors[0] <= floor + 0.2}
    return {**shared, **made, **more}


RECORDS = [
    point("keepk", 1, 256, [14.0, 15.0]),
    point("keepk", 1, 3, [15.0, 50.0]),
    point("keepk", 1, 4, [10.1, 20.0]),
    point("keepk", 1, 5, [10.0, 12.0]),
    point("keepk", 2, 3, [16.0, 48.0], floor=11.0),
    point("keepk", 2, 4, [11.9, 14.0], floor=11.0),
    point("keepk", 2, 5, [11.2, 11.0], floor=11.0),
    point("adam", 1, 3, [48.0, 50.0]),
    point("adam", 2, 3, [49.0, 51.0], floor=11.0),
]


def test_the_table_is_means_over_draws_and_how_many_reach_the_floor():
    table = parity_tables.error_table(RECORDS)
    assert table.columns == ("hidden nodes", *("keepk test %", "draws", "starts"), *("adam test %", "draws", "starts"))
    assert table.rows == (
        ("3", "15.50", "0 of 2", "0 of 4", "48.50", "0 of 2", "0 of 4"),
        ("4", "11.00", "1 of 2", "1 of 4", "", "", ""),
        ("5", "10.60", "2 of 2", "3 of 4", "", "", ""),
        ("256", "14.00", "0 of 1", "0 of 2", "", "", ""),
    )
    assert table.title == "parity: test error, noise floor 10.50 % (mean of 2 draws)"


def test_the_figure_holds_the_data():
    drawn = curve(RECORDS[1:], "keepk")
    assert (drawn.nodes, drawn.chosen) == ([3, 4, 5], [15.5, 11.0, 10.6])
    assert (drawn.low[0], drawn.middle[0], drawn.high[0]) == (15.75, 32.0, 48.5)  # of 15, 16, 48, 50
    assert fewest_at_floor(RECORDS[1:]) == 5
    best, every = parity_figure(RECORDS).axes
    by_name = {line.get_label(): line for line in best.lines}
    ours = by_name["256 nodes annealed"]
    assert np.asarray(ours.get_xdata()).tolist() == [3, 4, 5]
    assert np.asarray(ours.get_ydata()).tolist() == [15.5, 11.0, 10.6]
    assert np.asarray(by_name["Adam from the start"].get_ydata()).tolist() == [48.5]
    assert set(np.asarray(by_name["noise floor"].get_ydata()).tolist()) == {10.5}
    assert {text.get_text() for text in best.texts} == {"5 nodes: 10.6 %", "noise floor 10.5 %"}
    assert np.asarray(every.lines[0].get_ydata()).tolist() == drawn.middle


def test_a_figure_without_a_floor_reached_marks_nothing():
    missed = [record for record in RECORDS if record["asked"] == 3]
    figure = parity_figure(missed)
    assert fewest_at_floor(missed) is None
    assert [text.get_text() for text in figure.axes[0].texts] == ["noise floor 10.5 %"]


def test_a_picture_comes_from_the_file_alone(tmp_path):
    (tmp_path / "parity.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    save_figure(tmp_path / "parity.jsonl", tmp_path / "parity.png")
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match=r"nothing\.jsonl: no results to draw\. Run `keepk paper run parity` first\."):
        save_figure(tmp_path / "nothing.jsonl", tmp_path / "other.png")


def test_results_of_another_device_are_not_mixed(tmp_path):
    line = dict.fromkeys(results.REQUIRED, 1) | {"device": "cuda", "amp": False}
    results.append(tmp_path / "parity.jsonl", [line])
    with pytest.raises(DataError, match=r"parity\.jsonl: holds results in float32 on cuda, which are not mixed"):
        run_parity(results=tmp_path)
