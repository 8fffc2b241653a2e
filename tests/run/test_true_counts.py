"""`kept`, `report`, the certificate and `save` count the units in the model, however pruned ones came back."""

import copy
import json
import warnings
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import keepk
from keepk import KeepkWarning
from keepk.deploy.arch_json import digest
from keepk.errors import FileError, RankError, ShrinkError, StateError
from networks import NETWORKS

CURE = r"Call pruner.apply_masks\(\) to set them to zero again"


def built(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 4))
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.get_parameter("weight"))  # equal scales, so that a ranking over both is fair
    return model


def pruned(keep=300, *, held=True, **options):
    """A network of 5,440 weights after one event, its optimizer, its Pruner, and its values before."""
    model = built()
    best = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pruner = keepk.Pruner(model, keepk.weights("*.weight", keep=keep, name="w"), optimizer if held else None, **options)
    pruner.step()
    return model, optimizer, pruner, best


def nonzero(model):
    return sum(int(model[at].weight.count_nonzero()) for at in (0, 2))


def train(model, optimizer, seed=0):
    torch.manual_seed(seed)
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def reported(pruner):
    return {space.name: space.kept for space in keepk.report(pruner).spaces}


def load_best(model, best):
    model.load_state_dict(best)


def assign_best(model, best):
    model.load_state_dict({name: value.clone() for name, value in best.items()}, assign=True)


def assign_data(model, best):
    model[0].weight.data = best["0.weight"].clone()


def replace_parameter(model, best):
    model[2].weight = nn.Parameter(best["2.weight"].clone())


def train_elsewhere(model, _best):
    train(model, torch.optim.Adam(model.parameters()))


def write_nan(model, _best):
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))


COME_BACK = [load_best, assign_best, assign_data, replace_parameter, train_elsewhere, write_nan]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("come_back", COME_BACK)
def test_weights_that_came_back_are_counted_and_put_right(come_back, held, tmp_path):
    model, _, pruner, best = pruned(held=held, example=torch.zeros(2, 64))
    masks = pruner.masks
    come_back(model, best)
    there = 300 + sum(
        int((parameter[~masks[name]] != 0).sum()) for name, parameter in model.named_parameters() if name in masks
    )
    assert there > 300
    words = rf"space 'w': the last event kept 300 units, but there are {there:,} now.*load_state_dict.*{CURE}"
    with pytest.warns(KeepkWarning, match=words):
        assert pruner.kept == {"w": there}
    with pytest.warns(KeepkWarning, match=words):
        assert reported(pruner) == {"w": there}
    with pytest.warns(KeepkWarning, match=words):
        certificate = pruner.certificate["w"]
    assert (certificate["kept"], certificate["alive"], certificate["asked"]) == (there, there, 300)
    with pytest.raises(FileError, match=rf"save: {words}"):
        keepk.save(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    pruner.apply_masks()
    assert nonzero(model) == 300
    assert pruner.kept == reported(pruner) == {"w": 300}
    assert "alive" not in pruner.certificate["w"]
    keepk.save(model, tmp_path / "model")


def test_one_event_without_an_optimizer_followed_by_training():
    model, optimizer, pruner, _ = pruned(held=False)
    train(model, optimizer)
    assert nonzero(model) > 300
    with pytest.warns(KeepkWarning, match=CURE):
        assert reported(pruner) == {"w": nonzero(model)}


def test_a_kept_weight_that_is_zero_is_counted_and_so_is_what_came_back(tmp_path):
    """The mask says what is kept. The count can be wrong although fewer than K weights are nonzero."""
    model, _, pruner, _ = pruned()
    masks = pruner.masks
    with torch.no_grad():
        model[2].weight.zero_()
    assert nonzero(model) < 300
    assert pruner.kept == reported(pruner) == {"w": 300}
    keepk.save(model, tmp_path / "model")
    with torch.no_grad():
        model[0].weight[~masks["0.weight"]] += torch.eye(1, int((~masks["0.weight"]).sum()))[0]
    assert nonzero(model) < 300
    with pytest.warns(KeepkWarning, match="kept 300 units, but there are 301 now"):
        assert pruner.kept == {"w": 301}
    with pytest.raises(FileError, match="kept 300 units, but there are 301 now"):
        keepk.save(model, tmp_path / "model")


def test_applying_masks_reaches_optimizer_state_and_followers():
    model = built()
    best, average = copy.deepcopy(model.state_dict()), AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    pruner = keepk.Pruner(model, keepk.weights("*.weight", keep=300, name="w"), optimizer, followers=[average])
    pruner.step()
    model.load_state_dict(best)
    average.module.load_state_dict(best)
    optimizer.state[model[0].weight]["exp_avg"].fill_(1.0)
    pruner.apply_masks()
    mask = pruner.masks["0.weight"]
    assert nonzero(model) == nonzero(average.module) == 300
    assert not optimizer.state[model[0].weight]["exp_avg"][~mask].any()


@pytest.mark.filterwarnings("ignore:pruner.step:keepk.KeepkWarning")
def test_the_next_update_and_the_next_event_put_it_right_as_well():
    for way in ("update", "event", "flat event", "step after the plan"):
        model = built()
        best, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = {"event": [400, 300], "flat event": [300, 300]}.get(way, [300])
        space = keepk.weights("*.weight", keep=300, name="w", schedule=schedule)
        pruner = keepk.Pruner(model, space, optimizer)
        pruner.step()
        model.load_state_dict(best)
        if way == "update":
            train(model, optimizer)
        else:
            train(model, torch.optim.SGD(model.parameters(), lr=0.01))
            pruner.step()
        assert nonzero(model) == 300, way
        assert pruner.kept == {"w": 300}


def test_a_run_without_an_optimizer_names_the_cure():
    model, _, pruner, best = pruned(held=False)
    model.load_state_dict(best)
    with pytest.raises(StateError, match=r"the Pruner has no optimizer.*call pruner.apply_masks\(\) first"):
        pruner.step()
    pruner.apply_masks()
    pruner.step()


def test_each_of_the_three_warns_once_until_it_is_put_right():
    model, _, pruner, best = pruned()
    for _ in range(2):
        model.load_state_dict(best)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                assert pruner.kept == {"w": 5_440}
                keepk.report(pruner)
                assert pruner.certificate["w"]["alive"] == 5_440
        assert [it.category for it in told] == [KeepkWarning] * 3
        assert {it.filename for it in told} == {__file__}
        pruner.apply_masks()
        assert pruner.kept == {"w": 300}


def test_the_class_is_exported_and_one_filter_is_enough():
    assert KeepkWarning is keepk.errors.KeepkWarning
    assert issubclass(KeepkWarning, UserWarning)
    model, _, pruner, best = pruned()
    model.load_state_dict(best)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=KeepkWarning)
        assert pruner.kept == {"w": 5_440}


class Largest(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that an operation creates."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return out


def test_counting_copies_nothing_larger_than_a_mask():
    model, _, pruner, best = pruned()
    model.load_state_dict(best)
    with pytest.warns(KeepkWarning), Largest() as largest:
        assert pruner.kept == {"w": 5_440}
    assert 0 < largest.bytes <= 64 * 80


def test_a_parameter_that_is_gone_or_has_another_size_is_counted_as_it_is():
    model, _, pruner, _ = pruned()
    kept = {name: int(mask.sum()) for name, mask in pruner.masks.items()}
    head, model[2] = model[2], nn.Identity()
    with pytest.warns(KeepkWarning, match=rf"kept 300 units, but there are only {kept['0.weight']} now.*new Pruner"):
        assert pruner.kept == {"w": kept["0.weight"]}
    with pytest.raises(StateError, match=r"'2.weight': no longer exists, but its mask has shape \(4, 80\)"):
        pruner.apply_masks()
    model[2] = head
    assert pruner.kept == {"w": 300}
    model[2] = nn.Linear(80, 7)
    with pytest.warns(KeepkWarning, match=CURE):
        assert pruner.kept == {"w": kept["0.weight"] + 7 * 80}


def test_a_parameter_under_another_name_is_still_there():
    class Twice(nn.Module):
        def forward(self, weight):
            return 2 * weight

    model, _, pruner, _ = pruned()
    parametrize.register_parametrization(model[0], "weight", Twice())
    assert pruner.kept == {"w": 300}


def test_without_its_pruner_a_model_is_not_saved_with_an_untrue_count(tmp_path):
    model, _, pruner, best = pruned(held=False)
    del pruner
    keepk.save(model, tmp_path / "pruned")
    for come_back in (model, keepk.load(built(), tmp_path / "pruned")):
        come_back.load_state_dict(best)
        words = r"space 'w': the last event kept 300 units, but there are 5,440 now.*certificate=False\)"
        with pytest.raises(FileError, match=words):
            keepk.save(come_back, tmp_path / "dense")
        keepk.save(come_back, tmp_path / "dense", certificate=False)
        assert json.loads((tmp_path / "dense" / "arch.json").read_text())["certificate"] == {}
        assert nonzero(keepk.load(built(seed=1), tmp_path / "dense")) == 5_440
    keepk.Pruner(model, keepk.weights("*.weight", keep=300, name="w")).step()
    keepk.save(model, tmp_path / "again")


MASKED = {
    "linear": lambda: (built(), torch.zeros(2, 64), ["0"], 20),
    "grouped": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(),
                      nn.Flatten(), nn.Linear(128, 5)),
        torch.zeros(2, 3, 8, 8), ["0", "3"], 8,
    ),
    "dense_block": lambda: (*NETWORKS["dense_block"](), ["norms.*"], 20),
}  # fmt: skip


@pytest.mark.parametrize("shrink", ["never", "end"])
@pytest.mark.parametrize("name", MASKED)
def test_masked_channels_that_came_back_are_counted(name, shrink, tmp_path):
    model, example, select, keep = MASKED[name]()
    best = copy.deepcopy(model.state_dict())
    at: Literal["input", "output"] = "input" if name == "dense_block" else "output"
    space = keepk.channels(select, keep=keep, name="c", at=at, metric=keepk.metrics.l1, schedule=[keep + 4, keep])
    pruner = keepk.Pruner(model, space, example=example, shrink=shrink)
    total = pruner.certificate["c"]["total"]
    pruner.step()
    assert pruner.kept == {"c": keep + 4}
    model.load_state_dict(best)
    words = rf"kept {keep + 4} units, but there are {total} now"
    with pytest.warns(KeepkWarning, match=words):
        assert pruner.kept == {"c": total}
    with pytest.warns(KeepkWarning, match=words):
        assert reported(pruner) == {"c": total}
    with pytest.raises(FileError, match=words):
        keepk.save(model, tmp_path)
    pruner.apply_masks()
    assert pruner.kept == {"c": keep + 4}
    pruner.step()
    assert pruner.kept == reported(pruner) == {"c": keep}
    keepk.save(model, tmp_path)


def test_one_number_brings_one_masked_channel_back():
    model, example, select, keep = MASKED["grouped"]()
    pruner = keepk.Pruner(
        model, keepk.channels(select, keep=keep, name="c", metric=keepk.metrics.l1), example=example, shrink="never"
    )
    pruner.step()
    masked = (~pruner.masks["1.bias"]).nonzero().flatten()
    with torch.no_grad():
        model[1].bias[masked[0]] = 1e-6
    with pytest.warns(KeepkWarning, match="kept 8 units, but there are 9 now"):
        assert pruner.kept == {"c": 9}


def shrunk():
    model = nn.Sequential(nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 9)), nn.ReLU(), nn.Linear(9, 4))
    space = keepk.channels(["0.0", "0.2"], keep=14, name="c")
    pruner = keepk.Pruner(model, space, example=torch.zeros(3, 7))
    pruner.step()
    return model, pruner


def test_channels_that_others_took_or_brought_are_counted():
    model, pruner = shrunk()
    widths = model[0][0].out_features, model[0][2].out_features
    assert sum(widths) == 14
    part = keepk.trace(model[0], torch.zeros(3, 7))
    keepk.shrink(model[0], part, part.groups[0].units[:2])  # its record is on the submodule
    with pytest.warns(KeepkWarning, match="kept 14 units, but there are only 12 now"):
        assert pruner.kept == {"c": 12}

    model, pruner = shrunk()
    model[0] = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, model[0][2].out_features))
    there = 12 + model[0][2].out_features
    with pytest.warns(KeepkWarning, match=f"kept 14 units, but there are {there} now"):
        assert pruner.kept == {"c": there}
    with pytest.warns(KeepkWarning, match=f"kept 14 units, but there are {there} now"):
        assert reported(pruner) == {"c": there}

    model, pruner = shrunk()
    model[2] = nn.Linear(model[0][2].out_features, 10)  # a new head without channels of the space
    assert pruner.kept == {"c": 14}


def test_shrunk_by_hand_from_the_whole_is_followed_without_a_warning():
    model, pruner = shrunk()
    graph = keepk.trace(model, torch.zeros(3, 7))
    keepk.shrink(model, graph, graph.groups[0].units[:2])
    assert pruner.kept == reported(pruner) == {"c": 12}


def test_channels_of_a_shared_axis_that_changed_cannot_be_counted():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.one, self.two = nn.Linear(7, 12), nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            first, second = self.both(x).relu().chunk(2, dim=1)
            return self.one(first) + self.two(second)

    model = Joined()
    pruner = keepk.Pruner(model, keepk.channels("both", keep=6, name="c"), example=torch.zeros(3, 7))
    model.both = nn.Linear(7, 11)
    with pytest.raises(ShrinkError, match=r"'both.weight': has shape \(11, 7\), but the Pruner left it with"):
        assert pruner.kept


def test_weights_that_came_back_before_a_cut_still_count_as_such():
    """A manual cut also cuts the masks; only weights that compact folds into biases may be alive without a mask."""
    model, optimizer, pruner, best = pruned()
    model.load_state_dict(best)
    graph = keepk.trace(model, torch.zeros(2, 64))
    keepk.shrink(model, graph, range(10), optimizer=optimizer)
    kept = sum(int(mask.sum()) for mask in pruner.masks.values())
    with pytest.warns(KeepkWarning, match=f"kept {kept} units, but there are {nonzero(model):,} now"):
        assert pruner.kept == {"w": nonzero(model)}
    pruner.apply_masks()
    assert pruner.kept == {"w": kept} == {"w": nonzero(model)}


def test_a_closed_pruner_counts_and_can_apply_its_masks():
    model, _, pruner, best = pruned()
    pruner.close()
    model.load_state_dict(best)
    with pytest.warns(KeepkWarning, match=CURE):
        assert pruner.kept == {"w": 5_440}
    pruner.apply_masks()
    assert pruner.kept == {"w": 300}


def test_a_tied_weight_that_one_of_its_names_excludes_is_not_counted(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    pruner = keepk.Pruner(model, keepk.weights("*", keep=7, exclude="head*", name="w"))
    pruner.step()
    assert pruner.kept == {"w": 7}
    keepk.save(model, tmp_path)


@pytest.mark.parametrize("closed", [True, False])
def test_alive_is_counted_again_when_a_swept_model_is_saved(closed, tmp_path):
    model, _, pruner, _ = pruned(held=False)
    keepk.compact(model, torch.zeros(2, 64))
    if closed:
        pruner.close()
    with torch.no_grad():
        model[0].weight[model[0].weight.nonzero()[:3].unbind(1)] = 0.0  # still kept, no longer alive
    alive = nonzero(model)
    keepk.save(model, tmp_path)
    entry = json.loads((tmp_path / "arch.json").read_text())["certificate"]["w"]
    assert (entry["kept"], entry["alive"]) == (300, alive)
    loaded = keepk.load(built(), tmp_path)
    with torch.no_grad():
        loaded[0].weight[(loaded[0].weight == 0).nonzero()[:5].unbind(1)] = 1.0
    if alive + 5 <= 300:
        keepk.save(loaded, tmp_path)
        assert json.loads((tmp_path / "arch.json").read_text())["certificate"]["w"]["alive"] == alive + 5
    loaded[0].weight.data.fill_(1.0)
    with pytest.raises(FileError, match=rf"kept 300 units, but there are {nonzero(loaded):,} now"):
        keepk.save(loaded, tmp_path)


def weight_normed():
    model = nn.Sequential(weight_norm(nn.Linear(7, 12)), nn.Tanh(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4))
    return model, torch.zeros(3, 7), ["0", "2"], 8


def masked_run(name, shrink="never", **options):
    """A network with masked channels, its constructor, its earlier values, and its Pruner."""
    build = {**MASKED, "weight norm": weight_normed}[name]
    torch.manual_seed(0)
    model, example, select, keep = build()
    best = copy.deepcopy(model.state_dict())
    at: Literal["input", "output"] = "input" if name == "dense_block" else "output"
    schedule = [keep] if shrink == "never" else [keep, keep - 2]
    space = keepk.channels(select, keep=schedule[-1], name="c", at=at, metric=keepk.metrics.l1, schedule=schedule)
    followers = [copy.deepcopy(model)] if options.pop("follower", False) else []
    pruner = keepk.Pruner(model, space, example=example, shrink=shrink, followers=followers)
    pruner.step()
    return model, (lambda: build()[0]), best, keep, pruner, *followers


def said(folder):
    return json.loads((folder / "arch.json").read_text())["certificate"]["c"]


WITHOUT_PRUNER = {
    "closed": lambda model, pruner, *_: pruner.close() or model,
    "copied": lambda model, *_: copy.deepcopy(model),
    "loaded": lambda _model, _pruner, folder, build: keepk.load(build(), folder),
    "loaded and copied": lambda _model, _pruner, folder, build: copy.deepcopy(keepk.load(build(), folder)),
}


@pytest.mark.parametrize("shrink", ["never", "end"])
@pytest.mark.parametrize("name", [*MASKED, "weight norm"])
@pytest.mark.parametrize("how", WITHOUT_PRUNER)
def test_masked_channels_are_counted_without_a_pruner(how, name, shrink, tmp_path):
    model, build, best, keep, pruner = masked_run(name, shrink)
    total = pruner.certificate["c"]["total"]
    keepk.save(model, tmp_path / "first")
    assert (said(tmp_path / "first")["kept"], said(tmp_path / "first")["masked"]) == (keep, total - keep)
    alone = WITHOUT_PRUNER[how](model, pruner, tmp_path / "first", build)
    keepk.save(alone, tmp_path / "again")  # true as long as they are zero
    assert said(tmp_path / "again") == said(tmp_path / "first")
    assert keepk.load(build(), tmp_path / "again") is not None
    name_of, mask = next((name, mask) for name, mask in pruner.masks.items() if name.endswith(".bias"))
    with torch.no_grad():
        dict(alone.named_parameters())[name_of][(~mask).nonzero()[0]] = 1e-6
    with pytest.raises(FileError, match=rf"space 'c': the last event kept {keep} units, but there are {keep + 1} now"):
        keepk.save(alone, tmp_path / "again")
    alone.load_state_dict(best)
    words = rf"space 'c': the last event kept {keep} units, but there are {total} now.*certificate=False\)"
    with pytest.raises(FileError, match=words):
        keepk.save(alone, tmp_path / "again")
    keepk.save(alone, tmp_path / "again", certificate=False)
    document = json.loads((tmp_path / "again" / "arch.json").read_text())
    assert document["certificate"] == {}
    assert "masked" not in document


def test_masked_channels_of_a_follower_are_counted(tmp_path):
    *_, keep, pruner, ema = masked_run("grouped", follower=True)
    keepk.save(ema, tmp_path)
    assert (said(tmp_path)["kept"], said(tmp_path)["masked"]) == (keep, pruner.certificate["c"]["total"] - keep)
    with torch.no_grad():
        ema[0].weight.fill_(1)
    with pytest.raises(FileError, match=f"kept {keep} units, but there are .* now"):
        keepk.save(ema, tmp_path)


@pytest.mark.parametrize("name", ["linear", "grouped", "dense_block"])
def test_the_places_of_masked_channels_follow_a_cut_by_hand(name, tmp_path):
    model, build, _, keep, pruner = masked_run(name)
    total, example = pruner.certificate["c"]["total"], pruner.example
    pruner.close()
    graph = keepk.trace(model, example)
    keepk.shrink(model, graph, graph.choose(0.3, seed=1))
    keepk.save(model, tmp_path)
    masked = said(tmp_path).get("masked", 0)
    assert 0 < masked < total - keep
    for alone in (model, keepk.load(build(), tmp_path)):
        with torch.no_grad():
            for parameter in alone.parameters():
                parameter.fill_(1)
        with pytest.raises(FileError, match=f"kept {keep} units, but there are {keep + masked} now"):
            keepk.save(alone, tmp_path)
    keepk.compact(model, example)  # nothing is dead any more
    assert said(tmp_path)["masked"] == masked


def test_masked_channels_that_are_removed_later_are_not_masked_any_more(tmp_path):
    model, _, _, keep, pruner = masked_run("linear", "end")
    assert pruner.certificate["c"]["masked"] == 60
    pruner.step()
    assert "masked" not in pruner.certificate["c"]
    keepk.save(model, tmp_path)
    assert said(tmp_path)["kept"] == keep - 2 == model[0].out_features
    assert "masked" not in json.loads((tmp_path / "arch.json").read_text())


def test_masked_channels_that_cannot_be_counted_are_refused_with_the_cure(tmp_path):
    model, *_, pruner = masked_run("linear")
    model[0] = nn.Linear(64, 90)
    pruner.close()
    with pytest.raises(FileError, match=r"60 of its channels were masked .* cannot be counted.*Pruner is open.*=False"):
        keepk.save(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda it: it["masked"]["c"]["0.weight"].update({"0": ["0"]}), "60 masked channels"),
        (lambda it: it["masked"]["c"]["0.weight"].update({"0": ["0:2147483648"] * 60}), "not a rising run"),
        (lambda it: it["masked"]["c"]["0.weight"].update({"7": ["0"] * 60}), "not an axis of a tensor"),
        (lambda it: it["masked"]["c"]["0.weight"].update({"1,0": ["0"] * 60}), "not an axis of a masked"),
        (lambda it: it["masked"]["c"].update({"no": {"0": ["0"] * 60}}), "not laid out"),
        (lambda it: it["masked"].update({"d": {}}), "not laid out"),
        (lambda it: it["certificate"]["c"].update(masked=-1), "masked of the certificate"),
    ],
)
def test_forged_places_are_refused(change, match, tmp_path):
    model, build, *_ = masked_run("linear")
    keepk.save(model, tmp_path)
    document = json.loads((tmp_path / "arch.json").read_text())
    change(document)
    document["sha256"] = digest(document)
    (tmp_path / "arch.json").write_text(json.dumps(document))
    with pytest.raises(FileError, match=match):
        keepk.load(build(), tmp_path)


def test_a_file_without_places_loads_and_is_not_saved_again_with_its_count(tmp_path):
    model, build, *_ = masked_run("linear")
    keepk.save(model, tmp_path)
    document = json.loads((tmp_path / "arch.json").read_text())
    del document["masked"]
    document["sha256"] = digest(document)
    (tmp_path / "arch.json").write_text(json.dumps(document))
    loaded = keepk.load(build(), tmp_path)
    with pytest.raises(FileError, match="cannot be counted"):
        keepk.save(loaded, tmp_path)


class TakesOne(nn.Module):
    """One channel of the first layer is selected by its index, so it cannot be removed."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(7, 8), nn.Linear(8, 5)

    def forward(self, x):
        h = self.first(x)
        return self.last(h + h[..., :1])


def test_a_channel_that_is_fixed_is_told_and_certified(tmp_path):
    words = (
        r"space 'c': 1 channel of its layers cannot be removed and is not counted: 'first' 1 of 8, one channel is "
        r"taken by its number \(aten::slice .*\)\. The space keeps 3 of the 7 others, so 4 remain in total"
    )
    model = TakesOne()
    with pytest.warns(KeepkWarning, match=words) as told:
        pruner = keepk.Pruner(model, keepk.channels("*", keep=3, name="c"), example=torch.zeros(2, 7))
    assert len(told) == 1
    assert told[0].filename == __file__
    pruner.step()
    assert model.first.out_features == 4
    assert (pruner.kept, pruner.certificate["c"]["fixed"]) == ({"c": 3}, 1)
    report = keepk.report(pruner)
    assert report.spaces[0].fixed == 1
    assert "not counted" in str(report)
    assert "c 3 of 7 (and 1 fixed)" in report.line
    keepk.save(model, tmp_path)
    assert said(tmp_path)["fixed"] == 1
    keepk.save(keepk.load(TakesOne(), tmp_path), tmp_path)
    assert said(tmp_path)["fixed"] == 1


def narrow(*widths):
    layers = [it for pair in pairwise(widths) for it in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize(("widths", "fixed"), [((20, 15, 1, 4), ["2"]), ((20, 15, 1, 1, 6, 1, 1), ["2", "4", "8"])])
def test_layers_of_width_one_are_told_and_certified(widths, fixed):
    torch.manual_seed(0)
    model, example = narrow(*widths), torch.randn(4, 20)
    listed = "; ".join(f"'{name}' 1 of 1, every layer keeps at least one channel" for name in fixed)
    with pytest.warns(KeepkWarning, match=rf"not counted: {listed}\. The space keeps 10 of") as told:
        pruner = keepk.Pruner(model, keepk.channels("*", keep=10, name="c"), example=example)
    assert len(told) == 1
    pruner.step()
    assert pruner.certificate["c"]["fixed"] == len(fixed)
    hidden = [layer.out_features for layer in list(model)[:-1] if isinstance(layer, nn.Linear)]
    assert sum(hidden) == pruner.kept["c"] + len(fixed)
    group = keepk.inspect(model, example).fixed[0]
    assert "has one channel" in group.why
    assert {axis.tensor for axis in group.axes if axis.axis == 0} == {f"{name}.weight" for name in fixed}


@pytest.mark.parametrize(
    ("model", "example", "globs"),
    [
        (narrow(1, 8, 1), torch.zeros(3, 1), "*"),  # an input and an output with one channel
        (narrow(20, 15, 1, 4), torch.zeros(3, 20), "0"),  # not selected
        (nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.ConvTranspose2d(6, 1, 3)), torch.zeros(2, 1, 8, 8), "*"),
        (
            nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 4, 1)),
            torch.zeros(2, 3, 8, 8),
            "*",
        ),
    ],
)
def test_inputs_outputs_and_other_layers_are_no_reason_to_warn(model, example, globs):
    pruner = keepk.Pruner(model, keepk.channels(globs, keep=4, name="c"), example=example)
    assert "fixed" not in pruner.certificate["c"]
    assert keepk.report(pruner).spaces[0].fixed == 0


def test_a_second_run_over_a_layer_that_was_cut_to_one_channel_tells_it(tmp_path):
    torch.manual_seed(0)
    model, example = narrow(20, 15, 8, 4), torch.randn(4, 20)
    keepk.Pruner(model, keepk.channels("2", keep=1, name="c"), example=example).step()
    keepk.save(model, tmp_path)
    model = keepk.load(narrow(20, 15, 8, 4), tmp_path)
    with pytest.warns(KeepkWarning, match="'2' 1 of 1"):
        keepk.Pruner(model, keepk.channels("*", keep=10, name="d"), example=example)


class TiedOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("untied", ["embed", "head"])
def test_a_tie_that_was_undone_is_counted_twice(untied):
    torch.manual_seed(0)
    model = TiedOnce()
    pruner = keepk.Pruner(model, keepk.weights("*", keep=60, name="w"))
    pruner.step()
    layer = getattr(model, untied)
    layer.weight = nn.Parameter(layer.weight.detach() + 1)
    with pytest.warns(KeepkWarning, match="kept 60 units, but there are 300 now"):
        assert pruner.kept == {"w": 300}


def test_a_layer_that_was_added_under_the_glob_is_counted():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pruner = keepk.Pruner(model, keepk.weights("*.weight", exclude="1*", keep=20, name="w"))
    pruner.step()
    model.append(nn.Linear(8, 8))
    with pytest.warns(KeepkWarning, match="kept 20 units, but there are 84 now"):
        assert pruner.kept == {"w": 84}


def test_a_second_run_over_the_same_weights_leaves_a_true_first_certificate(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(20, 40)
    for name, keep in (("first", 100), ("second", 50)):
        with keepk.Pruner(model, keepk.weights("weight", keep=keep, name=name)) as pruner:
            pruner.step()
    keepk.save(model, tmp_path)
    entries = json.loads((tmp_path / "arch.json").read_text())["certificate"]
    assert (entries["first"]["kept"], entries["first"]["alive"]) == (100, 50)
    assert entries["second"]["kept"] == 50
    assert "alive" not in entries["second"]


def test_compact_before_a_flat_tail_of_the_plan():
    model = built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = keepk.Pruner(model, keepk.weights("*.weight", keep=100, name="w"), optimizer, epochs=3)
    pruner.step()
    keepk.compact(model, torch.zeros(2, 64), optimizer)
    alive = nonzero(model)
    assert alive < 100
    for _ in range(3):
        train(model, optimizer)
        pruner.step()
        assert pruner.kept == {"w": alive} == {"w": nonzero(model)}
    assert pruner.done


def test_a_plan_that_still_falls_is_refused_where_a_sweep_left_fewer():
    model = built()
    space = keepk.weights("*.weight", keep=90, name="w", schedule=[100, 90])
    pruner = keepk.Pruner(model, space)
    pruner.step()
    keepk.compact(model, torch.zeros(2, 64))
    assert nonzero(model) < 90
    with pytest.raises(RankError, match=r"was cut elsewhere, which left only .* fewer than the 90 that its plan"):
        pruner.step()
