"""Models of libraries that the core does not depend on: timm, transformers and peft, with random weights.

Each idiom also has a hand-written network in `zoo/networks/` or here, which is tested without the library.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import keepk
from keepk.errors import SpaceError
from networks import NETWORKS

SIZES = {
    "vocab_size": 211,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def library(name):
    """Import a library that needs torchvision, which may be built for a different torch."""
    if importlib.util.find_spec("torchvision"):
        sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
        importlib.import_module("torchvision_on_cpu").make_importable()
    return pytest.importorskip(name)


@pytest.fixture
def transformers():
    return library("transformers")


def words():
    return torch.randint(0, 211, (2, 12))


def heads(graph):
    """The number of units of each attention's group."""
    return {space.name: len(space.units) for space in graph.groups if "attn" in space.name or "attention" in space.name}


def llama(transformers, **options):
    config = transformers.LlamaConfig(num_key_value_heads=2, attn_implementation="eager", **SIZES, **ENDS, **options)
    return transformers.LlamaForCausalLM(config).eval()


# Adapters


class LoRA(nn.Module):
    """A hand-written linear layer with a low-rank update."""

    def __init__(self, inputs, outputs, rank):
        super().__init__()
        self.base_layer, self.r = nn.Linear(inputs, outputs), rank
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def adapted():
    return nn.Sequential(LoRA(7, 12, 4), nn.ReLU(), LoRA(12, 8, 4), nn.ReLU(), nn.Linear(8, 3))


def prune(model, example, *spaces):
    return keepk.Pruner(model, *spaces, example=example)


def test_ranks_of_adapters_are_not_counted():
    model, example = adapted(), torch.randn(5, 7)
    pruner = prune(model, example, keepk.channels("*", prune=0.5, metric=keepk.metrics.l2))
    pruner.step()
    assert pruner.kept == {"*": 10}
    assert [model[number].lora_A.out_features for number in (0, 2)] == [4, 4]
    assert [model[number].lora_B.out_features for number in (0, 2)] == [
        model[number].base_layer.out_features for number in (0, 2)
    ]


def test_ranks_of_adapters_that_a_glob_names_are_counted():
    model, example = adapted(), torch.randn(5, 7)
    pruner = prune(model, example, keepk.channels("*lora_A", keep=5, metric=keepk.metrics.l2))
    pruner.step()
    assert sum(model[number].lora_A.out_features for number in (0, 2)) == 5
    assert [model[number].base_layer.out_features for number in (0, 2)] == [12, 8]


def test_a_glob_that_finds_ranks_alone_says_so():
    model, example = nn.Sequential(nn.Linear(7, 6), LoRA(6, 3, 4)), torch.randn(5, 7)
    with pytest.raises(
        SpaceError, match=r"only ranks of adapters \('1\.lora_A' and 0 more\), .* Select '\*\.lora_A\*' to"
    ):
        prune(model, example, keepk.channels("1*", prune=0.5, metric=keepk.metrics.l2))


def test_choosing_a_share_leaves_the_ranks():
    model, example = adapted(), torch.randn(5, 7)
    graph = keepk.trace(model, example)
    keepk.shrink(model, graph, graph.choose(0.5))
    assert [model[number].lora_A.out_features for number in (0, 2)] == [4, 4]
    assert model[0].base_layer.out_features == 6


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft calls it
def test_the_heads_of_a_model_with_adapters_of_peft(transformers):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    model, example = peft.get_peft_model(llama(transformers, use_cache=False), config), words()
    pruner = prune(model, example, keepk.channels("*.self_attn*", prune=0.5, metric=keepk.metrics.l2))
    pruner.step()
    assert pruner.kept == {"*.self_attn*": 2}  # two layers, each with two groups of heads
    for layer in model.base_model.model.model.layers:
        query = layer.self_attn.q_proj
        assert query.lora_A["default"].out_features == query.r["default"] == 4
        assert query.lora_B["default"].out_features == query.base_layer.out_features == 24
    model(example)
    listed = keepk.inspect(model, example).attributes  # peft's own numbers stay as they are
    assert any(it.endswith("peft_config.default.r") for it in listed)
    assert any(it.endswith("q_proj.r.default") for it in listed)
    ranks = prune(model, example, keepk.channels("*.lora_A*", prune=0.5, metric=keepk.metrics.l2))
    ranks.step()
    assert ranks.kept == {"*.lora_A*": 8}
    model(example)


# Advice


class Cached(nn.Module):
    """Attention that returns its keys and values, like a language model that uses its cache."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(7, 12), nn.LayerNorm(12)
        self.attn = nn.ModuleDict({name: nn.Linear(12, 12) for name in ("query", "key", "value", "out")})
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.first(x)
        query, key, value = (self.attn[name](self.norm(x)) for name in ("query", "key", "value"))
        x = x + self.attn["out"](torch.softmax(query @ key.transpose(1, 2), -1) @ value)
        return {"logits": self.head(self.norm(x)), "past_key_values": ((key, value),)}


def test_what_is_fixed_inside_a_glob_is_said_before_what_is_lossy():
    with pytest.raises(SpaceError) as error:
        prune(Cached(), torch.randn(2, 5, 7), keepk.channels("attn*", prune=0.5, metric=keepk.metrics.l2))
    words = str(error.value)
    assert words.startswith(
        "space 'attn*': select='attn*': axis 0 of 'attn.query.weight' (3 such axes) is fixed, is kept"
    )
    assert "past_key_values, the cache that forward returns; trace the model with use_cache=False" in words
    assert "The only channels that the glob matches, 12 of 'first', are others: lossy=True would remove" in words
    assert "Use lossy=True" not in words


def test_the_cache_of_a_language_model_is_named(transformers):
    model, example = llama(transformers), words()
    with pytest.raises(SpaceError, match=r"q_proj\.weight' \(6 such axes\) is fixed, .*use_cache=False") as error:
        prune(model, example, keepk.channels("*.self_attn*", prune=0.5, metric=keepk.metrics.l2))
    assert "Use lossy=True" not in str(error.value)
    assert "trace the model with use_cache=False" in str(keepk.inspect(model, example)).replace("\n      ", " ")
    pruner = prune(
        llama(transformers, use_cache=False),
        example,
        keepk.channels("*.self_attn*", prune=0.5, metric=keepk.metrics.l2),
    )
    pruner.step()
    assert pruner.kept == {"*.self_attn*": 2}


def test_a_lossy_layer_beside_the_outputs_is_still_advised():
    model = nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 3))
    with pytest.raises(SpaceError, match=r"matches 12 channels of '0', .* Use lossy=True to remove them anyway"):
        prune(model, torch.randn(5, 7), keepk.channels("*", prune=0.5, metric=keepk.metrics.l2))


# Attributes that forward does not use


class HeadsUnused(nn.Module):
    """BERT's idiom: forward uses only the width of a head."""

    def __init__(self):
        super().__init__()
        self.num_attention_heads, self.attention_head_size, self.all_head_size, self.layers = 4, 6, 24, 3
        self.query, self.key, self.value = (nn.Linear(7, 24) for _ in range(3))
        self.out = nn.Linear(24, 5)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, self.attention_head_size)
        query, key, value = (layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = (query @ key.transpose(2, 3)).softmax(-1) @ value
        return self.out(x.transpose(1, 2).flatten(2))


def test_attributes_that_keep_an_old_size_are_listed():
    model, example = HeadsUnused(), torch.randn(2, 5, 7)
    report = keepk.inspect(model, example)
    assert report.attributes == ("num_attention_heads", "all_head_size")
    assert "Attributes that stay as they are\n  num_attention_heads, all_head_size\n" in str(report)
    graph = keepk.trace(model, example)
    for left in (3, 2):
        edits = keepk.shrink(model, graph, graph.groups[0].units[graph.alive[graph.groups[0].units]][:1])
        assert {(it.attribute, it.value, it.size) for it in edits.unchanged} == {
            ("num_attention_heads", 4, left),
            ("all_head_size", 24, 6 * left),
        }
        assert "left as they are, though a size changed: num_attention_heads = 4" in str(edits)
    assert (model.num_attention_heads, model.all_head_size, model.layers) == (4, 24, 3)


def test_nothing_is_listed_where_every_number_follows():
    model, example = NETWORKS["reshape_that_copies"]()
    assert "Attributes that stay" not in str(keepk.inspect(model, example))
    graph = keepk.trace(model, example)
    edits = keepk.shrink(model, graph, graph.choose(0.5))
    assert (model.num_heads, model.head_dim, model.attn_dim) == (2, 6, 12)
    assert not edits.unchanged
    assert "though a size changed" not in str(edits)


def test_the_head_count_of_bert_is_listed(transformers):
    model, example = transformers.BertModel(transformers.BertConfig(**SIZES)).eval(), words()
    graph = keepk.trace(model, example)
    edits = keepk.shrink(model, graph, graph.choose(0.5))
    listed = {str(it) for it in edits.unchanged}
    assert "encoder.layer.0.attention.self.num_attention_heads = 4 (2 are left)" in listed
    assert "encoder.layer.1.attention.self.all_head_size = 48 (24 are left)" in listed


# Heads and widths


@pytest.fixture
def timm():
    return library("timm")


def halved(model, example):
    """Remove half of a model, check that it runs, and return its graph."""
    graph = keepk.trace(model, example)
    keepk.shrink(model, graph, graph.choose(0.5))
    model(example)
    return graph


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_patch16_224"])
def test_the_heads_of_a_vision_transformer_of_timm(timm, name):
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
    model, example = timm.create_model(name, **sizes).eval(), torch.randn(2, 3, 32, 32)
    graph = halved(model, example)
    assert heads(graph) == {"blocks.0.attn.qkv": 4, "blocks.1.attn.qkv": 4}
    assert [(block.attn.num_heads, block.attn.attn_dim) for block in model.blocks] == [(2, 24)] * 2
    assert keepk.verify(model, keepk.trace(model, example), example) < 1e-10


def test_the_heads_of_qwen3_with_experts(transformers):
    config = transformers.Qwen3MoeConfig(
        num_key_value_heads=2, head_dim=12, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2,
        use_cache=False, **SIZES, **ENDS,
    )  # fmt: skip
    graph = halved(transformers.Qwen3MoeForCausalLM(config).eval(), words())
    assert set(heads(graph).values()) == {2}
    assert {space.name: space.multiple for space in graph.groups if "experts" in space.name} == {
        f"model.layers.{layer}.mlp.experts.gate_up_proj": 8 for layer in range(2)
    }


def test_patch_tst(transformers):
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, d_model=32, num_attention_heads=4,
        num_hidden_layers=2, ffn_dim=48, prediction_length=6,
    )  # fmt: skip
    model, example = transformers.PatchTSTForPrediction(config).eval(), {"past_values": torch.randn(2, 32, 3)}
    graph = keepk.trace(model, example)
    assert not any(space.lossy for space in graph.groups)
    assert {f"model.encoder.layers.{layer}.ff.0" for layer in range(2)} <= {space.name for space in graph.groups}
    assert keepk.verify(model, graph, example) < 1e-10
    keepk.shrink(model, graph, graph.choose(0.5))
    model(**example)
