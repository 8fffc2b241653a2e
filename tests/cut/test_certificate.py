"""The certificate of a saved model: the total, requested and kept units of each space."""

import copy
import json
import pickle
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import keepk
from keepk.cut.record import record_of
from keepk.deploy.arch import describe
from keepk.deploy.arch_json import digest, to_document
from networks import NETWORKS
from saved_models import contents, refused


def built(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))


def example():
    return torch.linspace(-1, 1, 21).view(3, 7)


def channels(schedule=(9, 5)):
    return keepk.channels(["0", "3"], keep=5, name="channels", schedule=[21, *schedule])


def weights(schedule=(45, 20)):
    return keepk.weights("*.weight", exclude="1.weight", keep=20, name="weights", schedule=[120, *schedule])


GLOBS = {"channels": (["0", "3"], []), "weights": (["*.weight"], ["1.weight"])}


def entry(kind, total, asked, kept):
    select, exclude = GLOBS[kind]
    return {"kind": kind, "select": select, "exclude": exclude, "total": total, "asked": asked, "kept": kept}


RUNS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "channels": ([channels()], {}),
    "channels, masked": ([channels()], {"shrink": "never"}),
    "weights": ([weights()], {}),
    "both": ([channels(), weights()], {}),
    "both, at the end": ([channels(), weights()], {"shrink": "end"}),
}


def ran(name, events=3, model=None):
    model = built() if model is None else model
    pruner = keepk.Pruner(model, RUNS[name][0], example=example(), **RUNS[name][1])
    for _ in range(events):
        pruner.step()
    return model, pruner


def written(folder):
    return json.loads((folder / "arch.json").read_text())


def certificate_of(model):
    return to_document(describe(model))["certificate"]


@pytest.mark.parametrize("name", RUNS)
def test_it_is_in_the_file_and_comes_back_with_the_model(tmp_path, name):
    model, pruner = ran(name)
    wanted = {}
    if "weights" in pruner.kept:
        wanted["weights"] = entry("weights", 7 * 12 + 12 * 9 + 9 * 4, 20, 20)
    if "channels" in pruner.kept:
        wanted["channels"] = entry("channels", 21, 5, 5) | ({"masked": 16} if name == "channels, masked" else {})
    assert pruner.certificate == wanted
    keepk.save(model, tmp_path / "first")
    assert written(tmp_path / "first")["certificate"] == wanted
    fresh = keepk.load(built(seed=5), tmp_path / "first")
    assert certificate_of(fresh) == wanted
    keepk.save(fresh, tmp_path / "second")
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


@pytest.mark.parametrize("name", ["channels", "weights"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_have_it_and_it_is_their_own(tmp_path, copied, name):
    model, pruner = ran(name, events=2)
    twin = copied(model)
    keepk.save(model, tmp_path / "model")
    keepk.save(twin, tmp_path / "twin")
    assert contents(tmp_path / "model") == contents(tmp_path / "twin")
    before = certificate_of(twin)
    pruner.step()
    assert certificate_of(model) != certificate_of(twin) == before


@pytest.mark.parametrize("name", RUNS)
def test_it_says_what_is_kept_at_every_event(tmp_path, name):
    """The certificate of a model that is saved during the plan has the counts of that epoch."""
    for events in range(4):
        model, pruner = ran(name, events=events)
        with nullcontext() if events else pytest.warns(keepk.KeepkWarning, match=r"step\(\) has not been called yet"):
            keepk.save(model, tmp_path / str(events))
        said = written(tmp_path / str(events))["certificate"]
        assert said == (pruner.certificate if events else {})
        for space, it in said.items():
            assert it["kept"] == pruner.kept[space]
            assert (it["kept"] == it["asked"]) == (events == 3)


def test_the_channels_that_it_counts_are_those_of_the_tensors(tmp_path):
    model, _ = ran("channels")
    keepk.save(model, tmp_path)
    document = written(tmp_path)
    widths = [len(_indices(document["tensors"][f"{layer}.weight"]["kept"]["0"])) for layer in (0, 3)]
    assert sum(widths) == document["certificate"]["channels"]["kept"] == 5


def _indices(text):
    runs = (part.split(":") for part in text.split(", "))
    return [index for first, *end in runs for index in range(int(first), int(end[0]) if end else int(first) + 1)]


def test_a_model_that_no_run_made_has_none(tmp_path):
    model = built()
    keepk.save(model, tmp_path / "dense")
    keepk.shrink(model, keepk.trace(model, example()), [0, 1])
    keepk.save(model, tmp_path / "shrunk")
    for folder in ("dense", "shrunk"):
        assert written(tmp_path / folder)["certificate"] == {}
        assert "certificate" not in record_of(keepk.load(built(), tmp_path / folder))


def test_a_load_brings_the_saved_run_in_place_of_the_models_own(tmp_path):
    """A model with pruned weights has its dense shape, so a saved model can be loaded into it."""
    keepk.save(built(), tmp_path / "dense")
    keepk.save(ran("channels")[0], tmp_path / "channels")
    for folder in ("dense", "channels"):
        model = keepk.load(ran("weights")[0], tmp_path / folder)
        keepk.save(model, tmp_path / "again")
        assert contents(tmp_path / "again") == contents(tmp_path / folder)


def test_a_resumed_run_certifies_what_it_loaded():
    _, source = ran("both", events=2)
    model, pruner = ran("both", events=0)
    pruner.load_state_dict(source.state_dict())
    assert certificate_of(model) == source.certificate
    pruner.step()
    assert certificate_of(model) == {
        "weights": entry("weights", 228, 20, 20),
        "channels": entry("channels", 21, 5, 5),
    }


def test_reads_of_a_dense_block_are_certified_too(tmp_path):
    model, pictures = NETWORKS["dense_block"]()
    pruner = keepk.Pruner(model, keepk.channels("norms.*", keep=20, at="input"), example=pictures)
    pruner.step()
    keepk.save(model, tmp_path)
    assert written(tmp_path)["certificate"] == {
        "norms.*": entry("channels", 8 + 12 + 16, 20, 20) | {"select": ["norms.*"]}
    }
    assert certificate_of(keepk.load(NETWORKS["dense_block"](seed=3)[0], tmp_path)) == pruner.certificate


def rewritten(folder, change, *, signed):
    document = written(folder)
    document["certificate"] = change(document["certificate"])
    if signed:
        document["sha256"] = digest(document)
    (folder / "arch.json").write_text(json.dumps(document))


def test_an_edited_certificate_is_refused(tmp_path):
    keepk.save(ran("weights")[0], tmp_path)
    rewritten(tmp_path, lambda said: {"weights": {**said["weights"], "kept": 19}}, signed=False)
    refused(tmp_path, built(), "arch.json: was edited or damaged after it was written: its sha256 differs")
    rewritten(tmp_path, lambda _: {}, signed=False)
    refused(tmp_path, built(), "its sha256 differs")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kept": 20.0}, "kept of the certificate of 'weights' is 20.0"),
        ({"kept": True}, "kept of the certificate of 'weights' is True"),
        ({"kept": -1}, "kept of the certificate of 'weights' is -1"),
        ({"kept": 229}, "kept of the certificate of 'weights' is 229"),
        ({"asked": 229}, "asked of the certificate of 'weights' is 229"),
        ({"asked": None}, "asked of the certificate of 'weights' is None"),
        ({"total": "228"}, "total of the certificate of 'weights' is '228'"),
        ({"kind": "neurons"}, "kind of the certificate of 'weights' is 'neurons'"),
        ({"kind": ["weights"]}, "kind of the certificate of 'weights' is"),
    ],
)
def test_a_certificate_that_no_run_gives_is_refused_even_if_it_is_signed(tmp_path, change, words):
    keepk.save(ran("weights")[0], tmp_path)
    rewritten(tmp_path, lambda said: {"weights": {**said["weights"], **change}}, signed=True)
    refused(tmp_path, built(), f"is not laid out as keepk.save writes it .*{words}")


@pytest.mark.parametrize("certificate", [[], None, "all", {"weights": {}}, {"weights": None}, {"weights": [20]}])
def test_a_certificate_of_another_layout_is_refused(tmp_path, certificate):
    keepk.save(ran("weights")[0], tmp_path)
    rewritten(tmp_path, lambda _: certificate, signed=True)
    refused(tmp_path, built(), "is not laid out as keepk.save writes it")


def test_a_file_from_before_there_were_certificates_is_read(tmp_path):
    keepk.save(built(), tmp_path)
    document = written(tmp_path)
    del document["certificate"]
    document["sha256"] = digest(document)
    (tmp_path / "arch.json").write_text(json.dumps(document))
    assert certificate_of(keepk.load(built(seed=4), tmp_path)) == {}


def test_after_compaction_masks_are_held_and_the_certificate_says_what_is_alive(tmp_path):
    """Fine-tuning continues in the smaller network: pruned weights stay zero, and folded constants are kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.Sigmoid(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 4))
    with torch.no_grad():
        model.get_parameter("0.weight")[:3] *= 1e-3  # these three will get no input
        model.get_parameter("2.weight")[:, :3] += 2  # but have readers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    pruner = keepk.Pruner(model, keepk.weights("*", keep=40, name="weights"), optimizer)
    pruner.step()
    before = model(example())
    swept = keepk.compact(model, example(), optimizer)
    assert swept.units > 0
    assert swept.folded > 0
    torch.testing.assert_close(model(example()), before)
    alive = sum(int(p.count_nonzero()) for p in model.parameters())
    assert alive <= 40
    keepk.save(model, tmp_path)
    kept = {"kind": "weights", "select": ["*"], "exclude": [], "total": 253, "asked": 40, "kept": 40, "alive": alive}
    assert written(tmp_path)["certificate"] == {"weights": kept | {"cut_since": swept.units}}
    zero = {name: parameter == 0 for name, parameter in model.named_parameters()}
    for _ in range(3):
        model(example()).square().sum().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert (parameter[zero[name]] == 0).all()
        assert (parameter[~zero[name]] != 0).all()
    assert pruner.kept == {"weights": alive}
    assert pruner.certificate == {"weights": kept}
    assert all(mask.equal(~zero[name]) for name, mask in pruner.masks.items())
    with pytest.raises(keepk.errors.StateError, match=r"'0.weight' was cut since the run began, by keepk.compact"):
        pruner.state_dict()


@pytest.mark.parametrize("sweep", ["compact", "shrink", "shrink twice"])
def test_a_kept_weight_that_is_zero_stays_kept_when_the_model_is_cut(sweep):
    """The mask, not the value, says what is kept, also after other code has cut the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 1, groups=2), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 3, 1))
    images = torch.randn(2, 4, 5, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.get_parameter("2.weight")[:, ::4] = 0  # two of its eight inputs are not read
    keep_all_biases = lambda weight, name: weight.abs() + (1e3 if name.endswith("bias") else 0)  # noqa: E731
    pruner = keepk.Pruner(model, keepk.weights("*", keep=50, metric=keep_all_biases, name="weights"), optimizer)
    pruner.step()
    with torch.no_grad():
        model.get_parameter("0.bias").zero_()
    before = {
        name: (mask, parameter.detach().clone())
        for (name, parameter), mask in zip(model.named_parameters(), pruner.masks.values(), strict=True)
    }
    if sweep == "compact":
        assert keepk.compact(model, images, optimizer).units > 0
    else:
        graph = keepk.trace(model, images)
        for units in ([0, 4], [1, 5])[: 1 + (sweep == "shrink twice")]:
            keepk.shrink(model, graph, units, optimizer=optimizer)
    kept = record_of(model)["tensors"]
    for name, mask in pruner.masks.items():
        old = before[name][0]
        for axis, indices in kept.get(name, {"kept": {}})["kept"].items():
            assert np.ndim(indices) == 1
            old = old.index_select(int(axis), torch.tensor(indices))
        assert mask.equal(old), name
    assert pruner.masks["0.bias"].all()


def test_a_cut_by_hand_after_the_run_is_told_in_the_certificate(tmp_path):
    """The counts at the end of the run differ from the current ones."""
    model = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spaces = [keepk.channels("0", keep=8, name="hidden", metric=keepk.metrics.l1)]
    keepk.Pruner(model, spaces, optimizer, example=example()).step()
    assert "cut_since" not in certificate_of(model)["hidden"]
    graph = keepk.trace(model, example())
    keepk.shrink(model, graph, [0, 1])
    keepk.shrink(model, graph, [5])
    keepk.save(model, tmp_path)
    loaded = keepk.load(nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 4)), tmp_path)
    assert certificate_of(loaded)["hidden"]["kept"] == 8
    assert certificate_of(loaded)["hidden"]["cut_since"] == 3
    assert loaded[0].out_features == 5


def test_weights_that_came_back_are_not_certified(tmp_path):
    """A model that was loaded and trained further no longer has masks."""
    model, _ = ran("weights")
    keepk.save(model, tmp_path / "pruned")
    loaded = keepk.load(built(), tmp_path / "pruned")
    with torch.no_grad():
        loaded[0].weight.fill_(1.0)
    alive = sum(int(loaded[at].weight.count_nonzero()) for at in (0, 3, 5))
    with pytest.raises(keepk.errors.FileError, match=f"kept 20 units, but there are {alive} now"):
        keepk.save(loaded, tmp_path / "trained")
    keepk.save(loaded, tmp_path / "trained", certificate=False)
    assert written(tmp_path / "trained")["certificate"] == {}


def test_runs_one_after_another_are_both_certified():
    model, _ = ran("channels")
    keepk.Pruner(model, keepk.weights("*.weight", keep=20, name="weights")).step()
    assert certificate_of(model)["channels"] == entry("channels", 21, 5, 5)
    assert certificate_of(model)["weights"]["kept"] == 20


@pytest.mark.parametrize("begun", [False, True])
def test_an_average_has_the_certificate_of_its_model(begun):
    model = built()
    if begun:
        keepk.Pruner(model, keepk.channels("0", keep=6, name="channels"), example=example()).step()
    average = AveragedModel(model)
    pruner = keepk.Pruner(model, [keepk.channels("0", keep=2, name="channels")], example=example(), followers=[average])
    pruner.step()
    assert certificate_of(average.module) == certificate_of(model) == pruner.certificate


@pytest.mark.parametrize("masks", [False, True])
def test_a_report_and_a_certificate_count_what_was_swept(masks, tmp_path):
    """Channels removed by compaction are not counted, and no checkpoint can be made afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spaces = [keepk.channels(["0", "2"], keep=14, name="channels")]
    pruner = keepk.Pruner(model, spaces + [keepk.weights("*", keep=40, name="w")] * masks, optimizer, example=example())
    pruner.step()
    with torch.no_grad():
        model.get_parameter("2.weight")[:, :2] = 0  # two that are not read
    swept = keepk.compact(model, example(), optimizer)
    left = sum(cast(nn.Linear, model[place]).out_features for place in (0, 2))
    assert left == 14 - swept.units < 14
    assert pruner.kept["channels"] == left
    found = pruner.certificate["channels"]
    assert (found["kept"], found["alive"]) == (14, left)
    assert keepk.report(pruner).spaces[0].kept == left
    with pytest.raises(keepk.errors.StateError, match=r"was cut since the run began, by keepk.compact"):
        keepk.save_checkpoint(tmp_path, model=model, pruner=pruner, optimizer=optimizer)
