"""`save_pretrained` and `from_pretrained` with models of transformers, small and random."""

import errno
import itertools
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import keepk
from keepk.errors import FileError
from keepk.integrations.pretrained import described_by_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {"num_key_value_heads": 2, **SIZES, **ENDS}
GPT2 = {"vocab_size": 97, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 64, **ENDS}
VIT = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
HEADS, MLP = "*.self_attn*", "*.mlp*"

# By name: the class, the config, the globs of heads and of MLPs, and the numbers of the config after half of all went.
LLAMA_LIKE = {"intermediate_size": (32, 16), "num_attention_heads": (4, 2), "num_key_value_heads": (2, 1)}
PLAIN = {
    "llama": ("LlamaForCausalLM", ("LlamaConfig", GROUPED), (HEADS, MLP), LLAMA_LIKE),
    "qwen2": ("Qwen2ForCausalLM", ("Qwen2Config", GROUPED), (HEADS, MLP), {"head_dim": (None, 6), **LLAMA_LIKE}),
    "qwen3": ("Qwen3ForCausalLM", ("Qwen3Config", {"head_dim": 8, **GROUPED}), (HEADS, MLP), LLAMA_LIKE),
    "mistral": ("MistralForCausalLM", ("MistralConfig", GROUPED), (HEADS, MLP), LLAMA_LIKE),
    "vit": (
        "ViTForImageClassification",
        ("ViTConfig", {"image_size": 16, "patch_size": 8, **VIT}),
        ("*.attention.*", MLP),
        {"head_dim": (None, 6), "intermediate_size": (32, 16), "num_attention_heads": (4, 2)},
    ),
    "bert": (
        "BertForSequenceClassification",
        ("BertConfig", SIZES),
        ("*.intermediate*",),
        {"intermediate_size": (32, 16)},
    ),
    "gpt2": ("GPT2LMHeadModel", ("GPT2Config", GPT2), (MLP,), {"n_inner": (None, 48)}),
}
BY_ARCH = {
    "bert": ("BertForSequenceClassification", ("BertConfig", SIZES), ("*.attention.self*", "*.intermediate*"), None),
    "gpt2": ("GPT2LMHeadModel", ("GPT2Config", GPT2), ("*.attn*", MLP), None),
}


def made(class_name, config, **options):
    torch.manual_seed(0)
    name, sizes = config
    return getattr(transformers, class_name)(getattr(transformers, name)(**sizes, **options))


def example_of(model):
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    ids = torch.randint(3, 97, (2, 8))
    decoder = model.can_generate()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | ({"use_cache": False} if decoder else {})


def halved(model, globs, *, per_layer=True):
    example = example_of(model)
    spaces = [keepk.channels(glob, prune=0.5, per_layer=per_layer, layer_floor=1) for glob in globs]
    with keepk.Pruner(model, spaces, example=example) as pruner:
        pruner.step()
    return example


def assert_same(model, loaded, example):
    assert not loaded.training
    mine, theirs = model.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], value) and mine[name].dtype == value.dtype for name, value in theirs.items())
    with torch.no_grad():
        assert torch.allclose(model.eval()(**example)["logits"], loaded(**example)["logits"], atol=1e-6)


def assert_generates_the_same(model, loaded):
    """Greedy, one prompt and a padded batch, with a cache that grows and one of fixed size."""
    ids = torch.tensor([[0, 0, 7, 8], [9, 10, 11, 12]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    alone = torch.tensor([[7, 8]])
    for cache in ("dynamic", "static"):
        mine, theirs, single = (
            it.generate(rows, attention_mask=rows.ne(0).long(), cache_implementation=cache, **options)
            for it, rows in ((model, ids), (loaded, ids), (loaded, alone))
        )
        assert torch.equal(mine, theirs)
        assert torch.equal(single[0, 2:], theirs[0, 4:])
        assert torch.equal(mine, model.generate(ids, attention_mask=ids.ne(0).long(), use_cache=False, **options))


@pytest.mark.parametrize("name", PLAIN)
def test_plain_from_pretrained_loads_uniform_widths(name, tmp_path):
    class_name, config, globs, changed = PLAIN[name]
    model = made(class_name, config)
    before, example = model.config.to_dict(), halved(model, globs)
    model.train()
    saved = keepk.save_pretrained(model, tmp_path)
    assert model.training
    assert saved.plain
    assert dict(saved.config) == changed
    assert not (tmp_path / "arch.json").exists()
    assert not list(tmp_path.glob(".keepk*"))
    loaded = type(model).from_pretrained(tmp_path)
    assert_same(model, loaded, example)
    after = model.config.to_dict()
    assert all(after[key] == value for key, value in before.items() if key not in ("architectures", "dtype"))
    if model.can_generate():
        assert_generates_the_same(model, loaded)


@pytest.mark.parametrize("name", BY_ARCH)
def test_heads_that_no_config_describes_go_through_arch_json(name, tmp_path):
    class_name, config, globs, _ = BY_ARCH[name]
    model = made(class_name, config)
    example = halved(model, globs)
    saved = keepk.save_pretrained(model, tmp_path)
    assert not saved.plain
    assert "keepk.from_pretrained, because no config of" in str(saved)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path)
    loaded = keepk.from_pretrained(type(model), tmp_path)
    assert_same(model, loaded, example)
    if model.can_generate():
        assert_generates_the_same(model, loaded)


def test_layers_of_different_widths_go_through_arch_json(tmp_path):
    model = made("LlamaForCausalLM", ("LlamaConfig", {**GROUPED, "num_hidden_layers": 2}))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= 3
        model.model.layers[1].self_attn.q_proj.weight *= 3
    spaces = [keepk.channels(HEADS, keep=3), keepk.channels(MLP, keep=40, metric=keepk.metrics.l2)]
    example = example_of(model)
    with keepk.Pruner(model, spaces, example=example) as pruner:
        pruner.step()
    assert [it.self_attn.k_proj.out_features for it in model.model.layers] in ([6, 12], [12, 6])
    assert not keepk.save_pretrained(model, tmp_path).plain
    loaded = keepk.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, attn_implementation="eager")
    assert_same(model, loaded, example)
    assert_generates_the_same(model, loaded)
    with pytest.raises(FileError, match="device_map= does not apply to it"):
        keepk.from_pretrained(type(model), tmp_path, device_map="cpu")


def test_a_config_that_refuses_the_widths_is_not_saved(tmp_path):
    """Llama's config wants the hidden size to be a multiple of the number of heads, although its layers do not."""
    sizes = {**GROUPED, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = made("LlamaForCausalLM", ("LlamaConfig", sizes))
    with keepk.Pruner(model, keepk.channels(HEADS, keep=3), example=example_of(model)) as pruner:
        pruner.step()
    saved = keepk.save_pretrained(model, tmp_path)
    assert "LlamaConfig refuses the remaining widths" in saved.reason
    assert_same(model, keepk.from_pretrained(type(model), tmp_path), example_of(model))


def test_weights_keep_their_sizes_and_their_zeros(tmp_path):
    model = made("LlamaForCausalLM", ("LlamaConfig", GROUPED)).to(torch.bfloat16)
    with keepk.Pruner(model, keepk.weights("*.mlp.*", keep=99)) as pruner:
        pruner.step()
    saved = keepk.save_pretrained(model, tmp_path)
    assert str(saved) == f"{tmp_path}: plain from_pretrained loads it; the config did not change"
    loaded = keepk.from_pretrained(type(model), tmp_path)
    assert_same(model, loaded, example_of(model))
    assert sum(int(it.count_nonzero()) for it in loaded.model.layers[0].mlp.parameters()) == 99
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 1
    with pytest.raises(FileError, match="longer zero"):
        keepk.save_pretrained(model, tmp_path)


# Dtypes, which a config states once for all tensors


def with_a_float_head(model):
    model.bfloat16().lm_head.float()
    return model


@pytest.mark.parametrize(
    ("cast", "uniform"),
    [(nn.Module.bfloat16, True), (nn.Module.bfloat16, False), (nn.Module.double, True), (with_a_float_head, True)],
)
def test_dtypes_are_saved(cast, uniform, tmp_path):
    model = cast(made("LlamaForCausalLM", ("LlamaConfig", {**GROUPED, "num_hidden_layers": 1 if uniform else 2})))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= 3
    halved(model, [MLP], per_layer=uniform)
    config = model.config.to_dict()
    saved = keepk.save_pretrained(model, tmp_path)
    assert model.config.to_dict() == config
    assert saved.plain == (uniform and cast is not with_a_float_head)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert written["dtype"] == str(model.dtype).removeprefix("torch.")
    load = type(model).from_pretrained if saved.plain else partial(keepk.from_pretrained, type(model))
    found, mine = load(tmp_path).state_dict(), model.state_dict()
    assert all(torch.equal(mine[name], value) and mine[name].dtype == value.dtype for name, value in found.items())
    assert found.keys() == mine.keys()


def test_weights_of_a_model_that_was_cast_after_loading(tmp_path):
    made("LlamaForCausalLM", ("LlamaConfig", GROUPED)).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path).bfloat16()
    with keepk.Pruner(model, keepk.weights("*.mlp.*", keep=99)) as pruner:
        pruner.step()
    assert keepk.save_pretrained(model, tmp_path).plain
    assert_same(model, type(model).from_pretrained(tmp_path), example_of(model))
    model.lm_head.float()  # a config cannot describe this, although no number in it changes
    assert "as bfloat16, and it is float32" in keepk.save_pretrained(model, tmp_path).reason
    assert keepk.from_pretrained(type(model), tmp_path).lm_head.weight.dtype is torch.float32


# A model of the user's own, whose sizes alone do not say what was cut


class OwnConfig(transformers.PreTrainedConfig):
    model_type = "keepk-own"

    def __init__(self, heads=4, width=6, wide=12, **options):
        super().__init__(**options)
        self.heads, self.width, self.wide = heads, width, wide


class Own(transformers.PreTrainedModel):
    config: OwnConfig
    main_input_name = "rows"
    reads_config = False

    def __init__(self, config):
        super().__init__(config)
        size = config.heads * config.width
        self.into, self.out = nn.Linear(5, 3 * size), nn.Linear(size, config.wide)
        self.last, self.width, self.temperature = nn.Linear(config.wide, 3), config.width, config.width**-0.5
        self.post_init()

    def forward(self, rows):
        heads = self.config.heads if self.reads_config else -1
        query, key, value = self.into(rows).view(*rows.shape[:2], 3, heads, self.width).unbind(2)
        scores = torch.einsum("bihd,bjhd->bhij", query, key) * self.temperature
        x = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value).flatten(2)
        return {"logits": self.last(self.out(x).relu())}


class OwnThatReadsItsConfig(Own):
    reads_config = True


def own(cls, *globs):
    torch.manual_seed(0)
    model, rows = cls(OwnConfig()), torch.randn(2, 7, 5)
    with keepk.Pruner(model, [keepk.channels(glob, prune=0.5) for glob in globs], example=rows) as pruner:
        pruner.step()
    return model, {"rows": rows}


def test_fewer_heads_are_not_taken_for_narrower_ones(tmp_path):
    model, example = own(Own, "into")
    assert model.into.out_features == 36
    candidates, _ = described_by_config(model)
    assert [it.changes for it in candidates] == [{("", "heads"): 2}]  # with a width of 3, sizes would be the same
    with pytest.raises(FileError, match=r"inputs are not known\. Pass one"):
        keepk.save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())
    assert keepk.save_pretrained(model, tmp_path, example=example).plain
    assert_same(model, type(model).from_pretrained(tmp_path), example)


def test_outputs_are_compared(tmp_path, monkeypatch):
    """A class that reads its weights differently when it is built for fewer heads is not saved as a plain folder."""
    model, example = own(Own, "into")
    build = Own.__init__

    def other(self, config):
        build(self, config)
        self.last.register_forward_hook(lambda _, __, output: output + (config.heads == 2))

    monkeypatch.setattr(Own, "__init__", other)
    saved = keepk.save_pretrained(model, tmp_path, example=example)
    assert saved.reason == "the config that describes its sizes gives other outputs"
    monkeypatch.setattr(Own, "__init__", build)
    transformers.AutoConfig.register("keepk-own", OwnConfig, exist_ok=True)
    assert_same(model, keepk.from_pretrained(Own, tmp_path), example)


class OwnThatMasks(Own):
    """Has infinities in its outputs; `spoil` changes what a model built for two heads computes."""

    spoil: Any = None

    def __init__(self, config):
        super().__init__(config)
        if config.heads == 2 and self.spoil:
            self.last.register_forward_hook(lambda _, __, output: self.spoil(output))

    def forward(self, rows):
        logits = super().forward(rows)["logits"]
        return {"empty": rows[:0], "logits": torch.where(torch.arange(3) == 2, -torch.inf, logits)}


def fails(_):
    raise ValueError("head width must be even")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (None, ""),
        (lambda it: it + 1, "gives other outputs"),
        (lambda it: it * torch.nan, "gives other outputs"),
        (lambda it: it.masked_fill(it > 0, torch.inf), "gives other outputs"),
        (lambda it: it[:1], "gives other outputs"),
        (fails, "head width must be even"),
    ],
)
def test_outputs_that_are_not_finite_are_compared(spoil, reason, tmp_path, monkeypatch):
    model, example = own(OwnThatMasks, "into")
    monkeypatch.setattr(OwnThatMasks, "spoil", staticmethod(spoil) if spoil else None)
    saved = keepk.save_pretrained(model, tmp_path, example=example)
    assert saved.reason.endswith(reason + ")" * (spoil is fails))
    assert saved.plain == (spoil is None)


def test_outputs_without_numbers_are_not_comparable(tmp_path, monkeypatch):
    model, example = own(Own, "into")
    monkeypatch.setattr(Own, "forward", lambda self, rows: self.into(rows) * torch.nan)
    assert "no finite numbers" in keepk.save_pretrained(model, tmp_path, example=example).reason
    with pytest.raises(FileError, match=r"it fails on the example \(.*Pass an input of its forward"):
        keepk.save_pretrained(model, tmp_path, example={"rows": torch.ones(2, 2)})


@pytest.mark.parametrize("globs", [("into",), ("into", "out")])
def test_a_config_that_forward_reads_is_saved_as_it_was(globs, tmp_path):
    model, example = own(OwnThatReadsItsConfig, *globs)
    assert model.config.heads == 2  # changed by the cut, because forward reads it
    saved = keepk.save_pretrained(model, tmp_path, example=example)
    assert saved.plain
    assert saved.config["heads"] == (4, 2)
    assert_same(model, type(model).from_pretrained(tmp_path), example)


# Folders


def test_a_folder_has_one_model_at_a_time(tmp_path):
    model, example = own(Own, "into")
    keepk.save_pretrained(model, tmp_path, example=example)
    keepk.save(model, tmp_path)  # arch.json beside the config: for keepk.from_pretrained, another model
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    shards = {path.name for path in tmp_path.glob("model-*.safetensors")}
    assert shards
    keepk.save_pretrained(model, tmp_path, example=example)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert_same(model, keepk.from_pretrained(type(model), tmp_path), example)


def save_in_shards(model, folder):
    model.save_pretrained(folder, max_shard_size="1KB")


def save_in_one(model, folder):
    model.save_pretrained(folder)


def is_interrupted():
    raise KeyboardInterrupt


def disk_is_full():
    raise OSError(errno.ENOSPC, "No space left on device")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def failing_at(call, function, fail):
    """A function that fails the n-th time it is called."""
    count = itertools.count(1)

    def failing(*arguments, **options):
        if next(count) == call:
            fail()
        return function(*arguments, **options)

    return failing


@pytest.mark.parametrize("before", [save_in_shards, save_in_one, keepk.save])
@pytest.mark.parametrize("spoiled", [False, True])  # through arch.json, or plain
def test_a_failure_leaves_the_old_model(before, spoiled, tmp_path, monkeypatch):
    """Every rename fails once, by a full disk or an interrupt."""
    old, (model, example) = OwnThatMasks(OwnConfig()), own(OwnThatMasks, "into")
    monkeypatch.setattr(OwnThatMasks, "spoil", staticmethod(fails) if spoiled else None)
    before(old, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    wanted, rename, moves, said = contents(tmp_path), os.rename, 0, ""
    for moves in range(20):
        fail = is_interrupted if moves % 2 else disk_is_full
        monkeypatch.setattr(os, "rename", failing_at(moves + 1, rename, fail))
        try:
            keepk.save_pretrained(model, tmp_path, example=example)
            break
        except KeyboardInterrupt:
            pass
        except FileError as error:
            said = str(error)
        assert "No space left" in said
        assert "previous contents are unchanged" in said
        assert contents(tmp_path) == wanted
        assert not list(tmp_path.glob(".*"))
    assert 4 <= moves < 20
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        *(["arch.json"] if spoiled else []),
    }


@pytest.mark.parametrize("before", [save_in_shards, save_in_one])
def test_a_killed_process_leaves_one_model_or_none(before, tmp_path):
    """The new weights would fit the old config, so a folder with both would be loaded without an error."""
    old, model, example = Own(OwnConfig()), Own(OwnConfig(heads=2, width=12)), {"rows": torch.randn(2, 7, 5)}
    wanted = [old.state_dict()["into.weight"], model.state_dict()["into.weight"]]
    assert wanted[0].shape == wanted[1].shape
    seen = set()
    for number in range(1, 20):
        before(old, tmp_path)
        if not (child := os.fork()):
            os.rename = failing_at(number, os.rename, is_killed)
            keepk.save_pretrained(model, tmp_path, example=example)
            os._exit(0)
        survived = os.waitpid(child, 0)[1] == 0
        try:
            loaded = Own.from_pretrained(tmp_path)
        except OSError:  # there is no model.safetensors
            seen.add("none")
            assert list(tmp_path.glob(".keepk-old-*/model.safetensors*"))
        else:
            is_new = loaded.config.heads == 2
            assert torch.equal(loaded.into.weight, wanted[is_new])
            seen.add("new" if is_new else "old")
        if survived:
            break
    assert seen == {"old", "none", "new"}
    assert not list(tmp_path.glob(".*"))  # the leftovers of the killed processes, too


def test_a_model_in_shards_replaces_one_in_a_single_file(tmp_path, monkeypatch):
    Own(OwnConfig()).save_pretrained(tmp_path)
    model, example = own(Own, "into")
    save = Own.save_pretrained
    monkeypatch.setattr(Own, "save_pretrained", lambda self, folder: save(self, folder, max_shard_size="1KB"))
    assert keepk.save_pretrained(model, tmp_path, example=example).plain
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(model, Own.from_pretrained(tmp_path), example)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    monkeypatch.undo()
    keepk.save_pretrained(model, tmp_path, example=example)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_folders_that_cannot_be_written_are_refused(tmp_path):
    model, example = own(Own, "into")
    (tmp_path / "file").write_text("kept")
    for path in ("file", "file/below", "file/far/below"):
        with pytest.raises(FileError, match=r"cannot be written \(.*contents are unchanged"):
            keepk.save_pretrained(model, tmp_path / path, example=example)
    (tmp_path / "new" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(FileError, match=r"cannot be written \(model.safetensors is a folder\)"):
        keepk.save_pretrained(model, tmp_path / "new", example=example)
    (tmp_path / "new" / "adapter_config.json").write_text("{}")
    with pytest.raises(FileError, match=r"has an adapter_config.json, with which from_pretrained would load"):
        keepk.save_pretrained(model, tmp_path / "new", example=example)
    assert {str(it.relative_to(tmp_path)) for it in tmp_path.rglob("*")} == {
        *("file", "new", "new/model.safetensors", "new/adapter_config.json")
    }


def test_nothing_of_keepk_is_needed_to_load(tmp_path):
    class_name, config, globs, _ = PLAIN["llama"]
    model = made(class_name, config)
    halved(model, globs)
    keepk.save_pretrained(model, tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    code = (
        f"import sys; sys.modules['keepk'] = None; sys.path.append({str(BENCHMARKS)!r})\n"
        "import torch, torchvision_on_cpu; torchvision_on_cpu.make_importable()\n"
        "import transformers\n"
        f"model = transformers.LlamaForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False).tolist())"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert json.loads(run.stdout) == model.eval().generate(ids, max_new_tokens=6, do_sample=False).tolist()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (nn.Linear(2, 2), "Linear is not a model of transformers. Use keepk.save"),
        (3, "got int"),
    ],
)
def test_other_models_are_refused(given, words, tmp_path):
    with pytest.raises(FileError, match=words):
        keepk.save_pretrained(given, tmp_path)


def test_a_model_with_other_tensors_is_refused(tmp_path):
    model, example = own(Own, "into")
    model.adapter = nn.Linear(2, 2)
    with pytest.raises(FileError, match=r"other tensors .* 'adapter.bias', .* not build, .*merge_and_unload"):
        keepk.save_pretrained(model, tmp_path, example=example)
    with pytest.raises(FileError, match="as the class"):
        keepk.from_pretrained(model, tmp_path)
