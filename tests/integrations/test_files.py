"""`keepk.shrink_files`: pruning checkpoints on disk. The oracle prunes the loaded model and saves it."""

import errno
import gc
import json
import shutil
import weakref
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import keepk
from keepk.errors import FileError, RankError, SpaceError
from keepk.integrations import files
from keepk.storage.shards import Shards

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
LLAMA = {"num_key_value_heads": 2, **SIZES, **ENDS}
VIT = {**{k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}, "image_size": 16}
HEADS, MLP = "*.self_attn*", "*.mlp*"
# By name: the class, the config, its sizes, and the globs of the spaces.
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA, (HEADS, MLP)),
    "qwen2-tied": ("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, "tie_word_embeddings": True}, (HEADS, MLP)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 8}, (HEADS, MLP)),
    "bert": ("BertForSequenceClassification", "BertConfig", SIZES, ("*.intermediate*",)),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 97, "n_embd": 24, "n_layer": 1, "n_head": 4, "n_positions": 64, **ENDS},
        (MLP,),
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {**VIT, "patch_size": 8}, ("*.attention.*", MLP)),
}


def saved(folder, name="llama", shards="8KB", dtype=torch.float32, **sizes):
    """A random checkpoint in shards, with files of a tokenizer beside it."""
    torch.manual_seed(0)
    class_name, config, given, _ = FAMILIES[name]
    made = getattr(transformers, config)(**{**given, **sizes})
    getattr(transformers, class_name)(made).to(dtype).save_pretrained(folder, max_shard_size=shards)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "nested").mkdir()
    (folder / "nested" / "notes.txt").write_text("kept")
    return folder


def loaded(folder, name="llama"):
    return getattr(transformers, FAMILIES[name][0]).from_pretrained(folder)


def halves(name="llama", **options):
    return [keepk.channels(it, prune=0.5, per_layer=True, **options) for it in FAMILIES[name][3]]


def example_of(model):
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    ids = torch.randint(3, 97, (2, 8))
    decoder = {"use_cache": False} if model.can_generate() else {}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **decoder}


def pruned_in_memory(folder, spaces, name="llama", **budget):
    model = loaded(folder, name)
    with keepk.Pruner(model, spaces, example=example_of(model), **budget) as pruner:
        pruner.step()
    return model


def tensors_in(folder):
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_same_tensors(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == it.dtype and torch.equal(found[name], it) for name, it in wanted.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_files_are_those_of_the_pruned_model(name, tmp_path):
    source, target = saved(tmp_path / "dense", name), tmp_path / "new" / "small"
    before = {path.name: path.read_bytes() for path in source.glob("*.*")}
    size = sum(it.nbytes for it in tensors_in(source).values())
    found = keepk.shrink_files(source, target, halves(name))
    model = pruned_in_memory(source, halves(name), name)
    keepk.save_pretrained(model, tmp_path / "oracle")
    assert found.plain, found.reason
    wanted = tensors_in(tmp_path / "oracle")
    assert_same_tensors(tensors_in(target), wanted)
    configs = [json.loads((it / "config.json").read_text()) for it in (target, tmp_path / "oracle")]
    assert configs[0] == configs[1]
    small = loaded(target, name)
    example = example_of(small)
    with torch.no_grad():
        assert torch.equal(small(**example)["logits"], model.eval()(**example)["logits"])
    # Every tensor is read at most twice, and written once.
    assert size < found.bytes_read <= 2 * size
    assert found.bytes_written == sum(it.nbytes for it in wanted.values())
    assert found.parameters == (loaded(source, name).num_parameters(), small.num_parameters())
    assert (target / "nested" / "notes.txt").read_text() == "kept"
    names = {path.name for path in source.iterdir()}
    assert {path.name for path in target.iterdir()} == names
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"small"}
    assert {path.name: path.read_bytes() for path in source.glob("*.*")} == before
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.bytes_written
    assert len(set(index["weight_map"].values())) > 1


def with_ties(layer):
    """A metric of the user's own, with many equal scores."""
    return layer.producer[0].tensor.flatten(1).sum(1).sign()


@pytest.mark.parametrize(
    "metric",
    [keepk.metrics.norm("l1_l2", per_weight=True), with_ties],
    ids=["norm", "with_ties"],  # workers compare them, and a function prints its address
)
def test_any_metric_with_one_tensor_in_memory_at_a_time(metric, tmp_path, monkeypatch):
    source = saved(tmp_path / "dense", dtype=torch.bfloat16)
    alive, counts, read = list[weakref.ref[torch.Tensor]](), [], Shards.read

    def counted(self, name):
        gc.collect()
        counts.append(sum(it() is not None for it in alive))
        value = read(self, name)
        alive.append(weakref.ref(value))
        return value

    monkeypatch.setattr(Shards, "read", counted)
    found = keepk.shrink_files(source, tmp_path / "small", halves(metric=metric))
    # A metric of producers reads q, k, v, gate and up; all seven are cut. The user's own one reads only q and gate.
    assert len(counts) == 7 + (2 if metric is with_ties else 5)
    assert max(counts) <= 1
    assert found.plain, found.reason
    model = pruned_in_memory(source, halves(metric=metric))
    assert model.dtype is torch.bfloat16
    assert_same_tensors(tensors_in(tmp_path / "small"), model.state_dict())
    assert found.kept == {HEADS: 1, MLP: 16}


def test_other_widths_in_each_layer_go_through_arch_json(tmp_path):
    source = saved(tmp_path / "dense", tie_word_embeddings=True, num_hidden_layers=2)
    spaces = [keepk.channels([HEADS, MLP])]
    found = keepk.shrink_files(source, tmp_path / "small", spaces, parameters=0.9)
    model = pruned_in_memory(source, spaces, parameters=0.9)
    assert "no config of LlamaForCausalLM describes" in str(found)
    small = keepk.from_pretrained(transformers.LlamaForCausalLM, tmp_path / "small")
    assert_same_tensors(small.state_dict(), model.state_dict())
    keepk.save(model, tmp_path / "oracle")
    mine, oracle = (json.loads((tmp_path / it / "arch.json").read_text()) for it in ("small", "oracle"))
    del mine["values"], mine["sha256"], oracle["values"], oracle["sha256"]
    computed = {name for name in oracle["tensors"] if "inv_freq" in name}
    oracle["tensors"] = {name: it for name, it in oracle["tensors"].items() if name not in computed}
    assert mine == oracle
    with pytest.raises(FileError, match=r"has an arch\.json"):
        keepk.shrink_files(tmp_path / "small", tmp_path / "smaller", spaces, parameters=0.9)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.last = nn.Sequential(nn.Conv2d(16, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
        self.last[3] = nn.Linear(8 * 4 * 4, 4)
        self.register_buffer("table", torch.arange(4), persistent=False)

    def forward(self, x):
        found = self.last(self.first(x))
        return found + self.get_buffer("table")


EXAMPLE = torch.ones(2, 3, 8, 8)
OWN: dict[str, Any] = {"spaces": keepk.channels("*", keep=12), "model": Net, "example": EXAMPLE}


def own(folder):
    """The files of a `Net`, which is traced much faster than a model of transformers."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for parameter in net.first[1].parameters():
            parameter.uniform_()
        net(torch.randn(2, 3, 8, 8))
    folder.mkdir()
    save_file(net.state_dict(), folder / "model.safetensors")
    return net


def test_a_model_of_the_users_own(tmp_path):
    net, example = own(tmp_path / "dense"), EXAMPLE
    found = keepk.shrink_files(tmp_path / "dense", tmp_path / "small", **OWN)
    with keepk.Pruner(net, OWN["spaces"], example=example) as pruner:
        pruner.step()
    assert found.kept == {"*": 12}
    small = keepk.load(Net(), tmp_path / "small", example=example)
    assert_same_tensors(small.state_dict(), net.state_dict())
    small.eval()
    net.eval()
    assert torch.equal(small(example), net(example))


# Refusals: nothing is written, and the source does not change


def assert_refused(tmp_path, error, words, spaces=None, target="small", **options):
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(error, match=words):
        keepk.shrink_files(tmp_path / "dense", tmp_path / target, spaces or halves(), **options)
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


def rewritten(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def to_pickle(folder):
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def without_a_shard(folder):
    min(folder.glob("*.safetensors")).unlink()


def renamed_in_the_index(folder):
    name = "model.safetensors.index.json"
    rewritten(folder / name, lambda it: it["weight_map"].update(more=it["weight_map"].popitem()[1]))


def outside_in_the_index(folder):
    name = "model.safetensors.index.json"
    rewritten(folder / name, lambda it: it["weight_map"].update({"lm_head.weight": "../model.safetensors"}))


def truncated(folder):
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def of_another_size(folder):
    rewritten(folder / "config.json", lambda it: it.update(intermediate_size=16))


def with_a_tensor_more(folder):
    save_in_place(folder, lambda it: it.update(more=torch.zeros(2)))


def with_a_tensor_less(folder):
    save_in_place(folder, lambda it: it.pop("model.norm.weight"))


def with_scales(folder):
    save_in_place(folder, lambda it: it.update({"lm_head.weight": it["lm_head.weight"].to(torch.float8_e4m3fn)}))


def with_two_values_of_a_tie(folder):
    rewritten(folder / "config.json", lambda it: it.update(tie_word_embeddings=True))


def save_in_place(folder, change):
    tensors = tensors_in(folder)
    change(tensors)
    for path in folder.glob("model*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (to_pickle, r"pytorch_model.bin is a pickle.* save_pretrained"),
        (without_a_shard, "names the shard model-00001-of-.*, which is missing"),
        (renamed_in_the_index, "disagrees with its shards: it says that tensor 'more' is in model-.* is in none of"),
        (outside_in_the_index, r"'../model.safetensors', which is not a file in this folder"),
        (truncated, r"is not a valid safetensors file \(it has [0-9,]* bytes, its header says"),
        (of_another_size, r"has shape \(.*\) in model-.* and \(.*\) in the model"),
        (with_a_tensor_more, "tensor 'more' is one of 1 that the files have and it has not"),
        (with_a_tensor_less, "'model.norm.weight' is one of 1 that the model has and the files lack"),
        (with_scales, "float8_e4m3fn in model.safetensors: the checkpoint is quantised"),
        (with_two_values_of_a_tie, "are tied in the model, and have different values"),
        (lambda it: rewritten(it / "config.json", lambda c: c.update(architectures=["Other"])), "one class of transf"),
        (lambda it: rewritten(it / "config.json", lambda c: c.update(quantization_config={"quant_method": "gptq"})),
         "the checkpoint is quantised .'gptq'"),
        (lambda it: (it / "config.json").unlink(), "has no config.json. Pass a function"),
        (lambda it: (it / "config.json").write_text("[]"), "is not a config of transformers"),
        (lambda it: shutil.copyfile(min(it.glob("*.safetensors")), it / "model.safetensors"), "has both model.safet"),
    ],
)  # fmt: skip
def test_damaged_and_other_checkpoints_are_refused(spoil, words, tmp_path):
    saved(tmp_path / "dense")
    spoil(tmp_path / "dense")
    assert_refused(tmp_path, FileError, words)


def test_values_that_cannot_be_ranked_are_refused(tmp_path):
    own(tmp_path / "dense")
    save_in_place(tmp_path / "dense", lambda it: it["first.0.weight"].fill_(torch.nan))
    assert_refused(tmp_path, RankError, "first.0", **OWN)


def test_bad_arguments_are_refused(tmp_path):
    saved(tmp_path / "dense")
    assert_refused(tmp_path, FileError, "is the source", target="dense")
    assert_refused(tmp_path, FileError, "is inside the source", target="dense/small")
    (tmp_path / "small").mkdir()
    assert_refused(tmp_path, FileError, "exists. Pass a new folder")
    (tmp_path / "small").rmdir()
    assert_refused(tmp_path, SpaceError, "Pass one or more of keepk.channels", spaces=keepk.weights("*", keep=9))
    assert_refused(tmp_path, SpaceError, "plans of 3 events", spaces=keepk.channels(MLP, keep=8, schedule=[24, 16, 8]))
    assert_refused(tmp_path, FileError, "is on cpu.*pass a function", model=nn.Linear(2, 2))
    assert_refused(tmp_path, FileError, "model=3 is neither", model=3)
    with pytest.raises(FileError, match="does not exist"):
        keepk.shrink_files(tmp_path / "other", tmp_path / "small", halves())
    statistics = keepk.Statistics(nn.Linear(2, 2))
    spaces = keepk.channels(MLP, keep=8, metric=keepk.metrics.taylor(statistics))
    assert_refused(tmp_path, SpaceError, "needs gradients, which files do not have", spaces=spaces)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    own(tmp_path / "dense")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_shard", full)
    assert_refused(tmp_path, FileError, "No space left.* Nothing was left there", **OWN)


def test_files_that_change_meanwhile_are_refused(tmp_path, monkeypatch):
    own(tmp_path / "dense")
    publish = files._copy_others

    def changed(*arguments):
        path = tmp_path / "dense" / "model.safetensors"
        path.write_bytes(path.read_bytes())
        return publish(*arguments)

    monkeypatch.setattr(files, "_copy_others", changed)
    assert_refused(tmp_path, FileError, "changed while it was read", **OWN)


def test_what_is_not_copied_is_listed(tmp_path):
    own(tmp_path / "dense")
    source = tmp_path / "dense"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "tokenizer.json").write_text("{}")
    for name in ("pytorch_model.bin", ".gitattributes", "nested/.hidden", "nested/model.onnx", ".cache/x"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"dense")
    (source / "nested" / "empty.bin").mkdir()  # a folder, whatever its name
    (source / "folder").symlink_to(tmp_path / "elsewhere")
    (source / "link.json").symlink_to(tmp_path / "elsewhere" / "tokenizer.json")
    (source / "dangling.json").symlink_to("nowhere")
    found = keepk.shrink_files(source, tmp_path / "small", **OWN)
    assert found.left_out == (
        *(".cache", ".gitattributes", "dangling.json", "folder", "nested/.hidden", "nested/model.onnx"),
        "pytorch_model.bin",
    )
    assert "not copied: .cache, .gitattributes" in str(found)
    copied = {str(it.relative_to(tmp_path / "small")) for it in (tmp_path / "small").rglob("*")}
    assert copied == {"arch.json", "model.safetensors", "nested", "nested/empty.bin", "link.json"}
    assert (tmp_path / "small" / "link.json").read_text() == "{}"
    assert not (tmp_path / "small" / "link.json").is_symlink()


def test_a_failure_leaves_no_parents_of_the_target(tmp_path, monkeypatch):
    own(tmp_path / "dense")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_shard", full)
    assert_refused(tmp_path, FileError, "No space left.* Nothing was left there", target="new/deep/small", **OWN)
    monkeypatch.undo()
    monkeypatch.setattr("os.fsync", full)  # of the parents that were just made
    assert_refused(tmp_path, FileError, "No space left.* Nothing was left there", target="new/deep/small", **OWN)


@pytest.mark.parametrize("how", [lambda net: net, lambda net: lambda: net])
def test_a_model_of_the_user_is_not_cut(how, tmp_path):
    own(tmp_path / "dense")
    with torch.device("meta"):
        net = Net()
    keepk.shrink_files(tmp_path / "dense", tmp_path / "small", **(OWN | {"model": how(net)}))
    assert net.state_dict()["first.0.weight"].shape[0] == 16
    assert net.training


def test_a_config_whose_forward_fails_is_not_chosen(tmp_path):
    """With narrower heads, the sizes are the same and the rotary embedding does not fit."""
    torch.manual_seed(0)
    sizes = {**LLAMA, "head_dim": 6, "query_pre_attn_scalar": 6}
    transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes)).save_pretrained(tmp_path / "dense")
    spaces = keepk.channels(HEADS, prune=0.5, per_layer=True)
    found = keepk.shrink_files(tmp_path / "dense", tmp_path / "small", spaces)
    assert found.config == {"num_attention_heads": (4, 2), "num_key_value_heads": (2, 1)}
    model = transformers.Gemma2ForCausalLM.from_pretrained(tmp_path / "dense")
    with keepk.Pruner(model, spaces, example=example_of(model)) as pruner:
        pruner.step()
    saved_in_memory = keepk.save_pretrained(model, tmp_path / "oracle")
    assert saved_in_memory.config == found.config
    assert_same_tensors(tensors_in(tmp_path / "small"), tensors_in(tmp_path / "oracle"))


def test_merged_experts_are_refused(tmp_path):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**{**LLAMA, "num_local_experts": 2})
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "dense")
    assert_refused(tmp_path, FileError, "merges 6 tensors, such as .*experts.* prune it in memory")
