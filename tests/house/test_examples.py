"""The code that users copy first: the scripts in examples/, the README's first block, and the API index."""

import argparse
import contextlib
import functools
import importlib.util
import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import keepk
import keepk.typing
from keepk_paper import results

REPOSITORY = Path(__file__).parents[2]
INDEX = (REPOSITORY / "docs" / "api.md").read_text()
PUBLIC = [
    *(f"keepk.{name}" for name in keepk.__all__),
    *(f"keepk.metrics.{name}" for name in keepk.metrics.__all__),
    "keepk.typing",
    *keepk.typing.__all__,
    *(name for name, value in vars(keepk.errors).items() if isinstance(value, type)),
]


def script(name):
    """A script in examples/, imported by its path."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prune_a_convnet():
    return script("prune_a_convnet")


@pytest.fixture
def prune_crepe():
    return script("prune_crepe")


@pytest.mark.filterwarnings("error::keepk.KeepkWarning")
def test_the_example_keeps_exactly_what_is_asked(prune_a_convnet, tmp_path, capsys):
    """Runs it for a few epochs; it returns the network that it loaded from its files."""
    with torch.random.fork_rng(devices=[]):
        small = prune_a_convnet.run(channels=96, weights=100, dense_epochs=1, fine_tune_epochs=1, folder=tmp_path)
    convolutions = [layer for layer in small.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert sum(layer.out_channels for layer in convolutions) == 96
    assert small.head[2].weight.count_nonzero() <= 100
    assert {path.name for path in tmp_path.iterdir()} >= {"small", "small.onnx"}
    assert "channels  channels    192       96    96  50.00%     96" in capsys.readouterr().out


def test_the_example_for_transformers_continues_after_a_kill(tmp_path, capsys):
    """Its second run finds the checkpoint of the first one, and plain transformers loads the model."""
    example = script("prune_a_llama")
    options = {"mlp": 96, "groups": 4, "epochs": 3, "folder": tmp_path}
    with torch.random.fork_rng(devices=[]):
        loaded = example.run(**options)
        again = example.run(**options)
    config = loaded.config
    assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (48, 4, 2)
    assert all(torch.equal(one, two) for one, two in zip(loaded.parameters(), again.parameters(), strict=True))
    assert not (tmp_path / "model" / "arch.json").exists()
    assert "'keepk/kept/heads': 4" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*(many workers|number of training batches|is not empty|treespec)")
@pytest.mark.parametrize("name", ["prune_in_lightning", "prune_with_accelerate"])
def test_the_examples_for_frameworks_continue_after_a_kill(name, tmp_path):
    """The second run finds the checkpoint of the first one."""
    example = script(name)
    with torch.random.fork_rng(devices=[]):
        small = example.run(channels=24, epochs=3, folder=tmp_path)
        again = example.run(channels=24, epochs=3, folder=tmp_path)
    assert small[0].out_channels + small[4].out_channels == 24
    assert all(torch.equal(one, two) for one, two in zip(small.parameters(), again.parameters(), strict=True))


def test_the_example_for_fsdp_continues_after_a_kill(tmp_path):
    """Here with one process; the second run finds the checkpoints of the first one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # public, and not exported
    try:
        example = script("prune_with_fsdp")
        options = {"channels": 48, "weights": 900, "epochs": 2, "folder": tmp_path}
        with torch.random.fork_rng(devices=[]):
            small, again = example.run(**options), example.run(**options)
    finally:
        dist.destroy_process_group()
    assert small[0].out_channels + small[4].out_channels + small[9].out_features == 48
    assert sum(int(it.count_nonzero()) for name, it in small.named_parameters() if name.endswith("weight")) == 900
    assert all(torch.equal(one, two) for one, two in zip(small.parameters(), again.parameters(), strict=True))


def test_the_examples_command_line(prune_a_convnet, monkeypatch):
    asked = {}
    monkeypatch.setattr(prune_a_convnet, "run", lambda **options: asked.update(options))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["prune_a_convnet.py", "--channels", "40", "--out", "there"])
    prune_a_convnet.main()
    assert asked == {
        "channels": 40,
        "weights": 100,
        "dense_epochs": 6,
        "fine_tune_epochs": 5,
        "folder": Path("there"),
    }


class Torchcrepe(torch.nn.Module):
    """The network as torchcrepe 0.0.24 builds it, with two-dimensional convolutions and sigmoids at the end."""

    def __init__(self, widths):
        super().__init__()
        for number, (before, after) in enumerate(zip((1, *widths), widths, strict=False), start=1):
            size, stride = ((512, 1), (4, 1)) if number == 1 else ((64, 1), (1, 1))
            setattr(self, f"conv{number}", torch.nn.Conv2d(before, after, size, stride))
            setattr(self, f"conv{number}_BN", torch.nn.BatchNorm2d(after, eps=0.0010000000474974513, momentum=0.0))
        self.classifier = torch.nn.Linear(4 * widths[-1], 360)

    def forward(self, frames):
        seen = frames[:, None, :, None]
        for number in range(1, 7):
            seen = torch.nn.functional.pad(seen, (0, 0, 254, 254) if number == 1 else (0, 0, 31, 32))
            seen = torch.relu(getattr(self, f"conv{number}")(seen))
            seen = torch.nn.functional.max_pool2d(getattr(self, f"conv{number}_BN")(seen), (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(seen.permute(0, 2, 1, 3).flatten(1)))


def test_crepe_computes_what_torchcrepe_computes(prune_crepe):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = Torchcrepe(prune_crepe.WIDTHS["tiny"])
        for name, value in theirs.state_dict().items():
            if "_BN" in name and value.is_floating_point():
                value.uniform_(0.5, 1.5)
    ours = prune_crepe.from_torchcrepe(theirs.state_dict(), "tiny")
    frames, _ = prune_crepe.synthesised(5, seed=1)
    torch.testing.assert_close(ours(frames).sigmoid(), theirs.eval()(frames))
    full = prune_crepe.Crepe()
    assert sum(it.numel() for it in full.parameters()) == 22_239_976


@pytest.mark.parametrize("glide", [0.0, 3.0, -2.0])
@pytest.mark.parametrize("pitch", [61.0, 440.0, 990.0])
def test_synthesised_sounds_have_the_pitch_that_is_said(prune_crepe, pitch, glide):
    """The frequency of a tone is the slope of its analytic signal's phase; a voice repeats after one period."""
    random = np.random.default_rng(0)
    tone = prune_crepe._sound(random, pitch, glide=glide, voice=False)
    spectrum = np.fft.fft(tone * np.hanning(len(tone)))
    spectrum[len(tone) // 2 :] = 0
    phases = np.unwrap(np.angle(np.fft.ifft(spectrum)))
    slope = (phases[528] - phases[496]) / 32 * prune_crepe.RATE / (2 * np.pi)
    assert abs(1_200 * np.log2(slope / pitch)) < 25
    voice = prune_crepe._sound(random, 400.0, glide=0.0, voice=True)  # a period of 40 samples
    assert np.corrcoef(voice[40:], voice[:-40])[0, 1] > 0.999
    assert max(np.corrcoef(voice[lag:], voice[:-lag])[0, 1] for lag in range(10, 31)) < 0.99


def test_pitches_are_decoded_and_scored(prune_crepe):
    cents = torch.tensor([3_000.0, 4_321.0, 7_777.0])
    logits = torch.logit(prune_crepe.targets(cents), eps=1e-6)
    assert (prune_crepe.decoded(logits) - cents).abs().max() < 1
    off = cents + torch.tensor([0.0, 49.0, 51.0])
    fixed = torch.nn.Module()
    fixed.forward = lambda _: logits
    assert prune_crepe.accuracy(fixed, (torch.zeros(3, 1_024), off)) == 66.67


def test_the_crepe_example_makes_every_network_once_and_measures_it(prune_crepe, tmp_path, monkeypatch):
    monkeypatch.setattr(prune_crepe, "SHARES", ())
    monkeypatch.setattr(prune_crepe, "VALIDATION", 20)
    monkeypatch.setattr(prune_crepe, "WIDTHS", {"full": (32, 16, 16, 16, 16, 32), "tiny": (16, 8, 8, 8, 8, 16)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense, tiny = (prune_crepe.Crepe(widths).eval() for widths in prune_crepe.WIDTHS.values())
        options = argparse.Namespace(
            **{"anneal": False, "amp": True, "parts": 2, "training_frames": 64, "frames": 30, "seeds": [1]},
            **{"repeats": 2, "limit": 4, "folder": tmp_path, "out": tmp_path / "results" / "crepe.jsonl"},
        )
        for number in (4, 5, 5):  # at most 4 in a call; the third one finds everything
            prune_crepe.run(dense, tiny, options)
            assert len(results.read(options.out)) == len(options.out.read_text().splitlines()) == number
        options.anneal, options.limit = True, 3  # the dense network is trained last
        prune_crepe.run(dense, tiny, options)
        prune_crepe.measure_speed(options)
    lines = results.read(options.out)
    assert [line["recipe"] for line in lines[5:]] == ["tiny, trained", "annealed", "annealed, random"]
    assert {line["asked"] for line in lines} == {lines[0]["kept"], lines[1]["kept"]}
    for line in lines:
        assert line["kept"] <= line["asked"] <= line["total"] == lines[0]["kept"]
        assert 0 <= line["test_error"] <= 100
        assert line["file_bytes"] > 4 * line["parameters"]
        assert line["ms"] > 0
    assert lines[0]["widths"] == [32, 16, 16, 16, 16, 32]
    assert lines[0]["dense_test_error"] == lines[-1]["dense_test_error"] == lines[0]["test_error"]


def stop_after_the_first_checkpoint(run, monkeypatch):
    save = keepk.save_checkpoint

    def save_and_die(*arguments, **options):
        save(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(keepk, "save_checkpoint", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            run()


def test_an_annealed_crepe_that_was_killed_goes_on(prune_crepe, tmp_path, monkeypatch):
    monkeypatch.setattr(prune_crepe, "PART", 32)
    dense = prune_crepe.Crepe((32, 16, 16, 16, 16, 32))
    data = prune_crepe.distillation_set(dense, tmp_path, 64, amp=False)
    run = functools.partial(prune_crepe.trained, dense, data, parts=3, macs=4_000_000)
    whole, _ = run(tmp_path / "whole")
    stop_after_the_first_checkpoint(lambda: run(tmp_path / "killed"), monkeypatch)
    resumed, seconds = run(tmp_path / "killed")
    assert seconds > 0
    for (name, value), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_every_pass_of_crepes_training_has_each_frame_once(prune_crepe, monkeypatch):
    monkeypatch.setattr(prune_crepe, "PART", 32)
    parts = [prune_crepe.rows_of(part, 96).tolist() for part in range(6)]
    for one in (parts[:3], parts[3:]):
        assert sorted(row for part in one for row in part) == list(range(96))
    assert parts[:3] != parts[3:]


@pytest.fixture
def prune_minilm(monkeypatch):
    """The script for a tiny network of the same shape, with a tokenizer that knows a few words."""
    example = script("prune_minilm")
    monkeypatch.setattr(example, "TEST", 30)
    monkeypatch.setattr(example, "VALIDATION", 12)
    monkeypatch.setattr(example, "PART", 64)
    monkeypatch.setattr(example, "PAIR_BATCHES", 2)
    monkeypatch.setattr(example, "LAYERS", (0,))
    return example


def tiny_bert(example):
    sizes: dict[str, float] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = example.BertConfig(**sizes, intermediate_size=64, max_position_embeddings=32)
    return example.Encoder(config).eval()


class Numbers:
    """In place of a tokenizer: a word is a number."""

    def encode_batch(self, texts):
        return [argparse.Namespace(ids=[int(word) for word in text.split()]) for text in texts]


def groups_of_sentences(number):
    """A gloss and up to two examples each, of words that are numbers."""
    random = np.random.default_rng(0)

    def sentence():
        return " ".join(str(word) for word in random.integers(1, 64, random.integers(3, 12)))

    return [[sentence() for _ in range(1 + row % 3)] for row in range(number)]


def test_wordnets_lines_are_glosses_and_examples(prune_minilm, tmp_path):
    for part in ("noun", "verb", "adj", "adv"):
        licence = "  1 This software and database is being provided\n"
        (tmp_path / f"data.{part}").write_text(f'{licence}00001 03 n 01 a 0 | of {part}; "one, two"; "three" - X  \n')
    assert prune_minilm.synsets(tmp_path)[1] == ["of verb", "one, two", "three"]
    assert prune_minilm.glossed("plain (with; a remark)  ") == ["plain (with; a remark)"]


def test_held_out_sentences_share_no_synset_with_training(prune_minilm):
    groups = groups_of_sentences(200)
    groups[5] = [groups[11][0], "1 2 3"]  # one sentence in two synsets
    held_out, training = prune_minilm.split(groups, 60, Numbers())
    assert len({tuple(it) for it in held_out}) == len(held_out) == 60
    group_of: dict[tuple[int, ...], set[int]] = {}
    for number, group in enumerate(groups):
        for text in group:
            group_of.setdefault(tuple(map(int, text.split())), set()).add(number)
    seen = set().union(*(group_of[tuple(it)] for it in held_out))
    left = [tuple(it) for group in training for it in group]
    assert not set(left) & {tuple(it) for it in held_out}
    assert sum(len(group_of[it] & seen) == 0 for it in left) >= len(left) - 1
    assert len(training) > 100


def test_agreement_is_spearmans_and_counts_neighbours(prune_minilm):
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.functional.normalize(torch.randn(40, 8, generator=generator), dim=1) for _ in range(2))
    ours = torch.nn.functional.normalize(ours + 2 * theirs, dim=1)
    found = prune_minilm.agreement(ours, theirs)
    upper = np.triu_indices(40, 1)
    pairs = [(it @ it.T).numpy() for it in (ours, theirs)]
    assert found["spearman"] == pytest.approx(stats.spearmanr(*(it[upper] for it in pairs))[0], abs=1e-4)
    neighbours = [[[it for it in np.argsort(-row) if it != at] for at, row in enumerate(pair)] for pair in pairs]
    for count in (1, 10):
        same = np.mean([len({*a[:count]} & {*b[:count]}) / count for a, b in zip(*neighbours, strict=True)])
        assert found[f"top{count}"] == pytest.approx(100 * same, abs=0.01)
    assert found["test_error"] == pytest.approx(100 - found["top10"])


def test_vectors_do_not_depend_on_the_batch(prune_minilm):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = tiny_bert(prune_minilm)
    rows = [[3, 4, 5, 6], [7], [8, 9, 10]]
    alone = torch.cat([model(*prune_minilm.padded([row])) for row in rows])
    torch.testing.assert_close(prune_minilm.vectors(model, rows), alone)
    torch.testing.assert_close(alone.norm(dim=1), torch.ones(3))


def test_the_minilm_example_makes_every_network_once_and_measures_it(prune_minilm, tmp_path, monkeypatch):
    monkeypatch.setattr(prune_minilm, "DIVISORS", (2,))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = tiny_bert(prune_minilm)
        options = argparse.Namespace(
            **{"amp": True, "parts": 2, "sentences": 96, "repeats": 2, "limit": 4},
            **{"folder": tmp_path, "out": tmp_path / "results" / "minilm.jsonl"},
        )
        for number in (4, 6, 6):  # at most 4 in a call; the third one finds everything
            prune_minilm.run(dense, Numbers(), groups_of_sentences(200), options)
            assert len(results.read(options.out)) == len(options.out.read_text().splitlines()) == number
        prune_minilm.measure_speed(dense, Numbers(), groups_of_sentences(200), options)
    lines = {line["recipe"]: line for line in results.read(options.out)}
    assert [*lines] == ["dense", "one-shot", "one-shot, random", "annealed", "1 of 2 layers", "annealed, random"]
    for line in lines.values():
        assert line["kept"] <= line["asked"] <= line["total"] == lines["dense"]["kept"]
        assert line["ms"] > 0
        assert len(line["heads"]) == len(line["mlps"]) == (1 if "layers" in line["recipe"] else 2)
    assert lines["dense"]["test_error"] == 0
    assert lines["dense"]["heads"] == [2, 2]
    assert sum(lines["annealed"]["mlps"]) < 2 * 64


def test_a_distillation_that_was_killed_goes_on(prune_minilm, tmp_path, monkeypatch):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dense = tiny_bert(prune_minilm)
    _, training = prune_minilm.split(groups_of_sentences(60), 5, Numbers())
    rows = [row for group in training for row in group]
    data = rows, prune_minilm.vectors(dense, rows), [(group[0], group[1]) for group in training if group[1:]]
    macs = prune_minilm.macs_of(dense) // 2
    run = functools.partial(prune_minilm.distilled, dense, data, parts=3, macs=macs)
    whole, _ = run(tmp_path / "whole")
    stop_after_the_first_checkpoint(lambda: run(tmp_path / "killed"), monkeypatch)
    resumed, _ = run(tmp_path / "killed")
    for (name, value), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.filterwarnings("error::keepk.KeepkWarning")
def test_the_readmes_first_block_runs_by_copy_and_paste(tmp_path, monkeypatch):
    """It prints what its comments say."""
    found = re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert found is not None
    block = found[1]
    said = re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "README.md", "exec"), {})
    assert len(said) == 2
    assert printed.getvalue().splitlines() == said
    assert {path.name for path in (tmp_path / "small").iterdir()} == {"model.safetensors", "arch.json"}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_in_the_index(name):
    assert f"`{name}`" in INDEX


def test_the_index_has_no_other_names():
    assert set(re.findall(r"`(keepk\.[\w.]+)`", INDEX)) <= set(PUBLIC)
