"""Networks of the library transformers: language models, and some for speech and images."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from zoo_networks.network import CLASSES, VOCABULARY, Network, images, noise, tokens

DECODER_LENGTH = 5

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class Logits(nn.Module):
    """One tensor in, one tensor out; an encoder-decoder's decoder is fed ones."""

    def __init__(self, model: nn.Module, *, decoder: bool = False) -> None:
        super().__init__()
        self.model, self.decoder = model, decoder

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits, without the cache of past tokens."""
        settings: dict[str, Any] = {}
        if getattr(self.model.config, "use_cache", None) is not None:
            settings["use_cache"] = False
        if self.decoder:
            settings["decoder_input_ids"] = torch.ones(inputs.shape[0], DECODER_LENGTH, dtype=torch.long)
        logits: Tensor = self.model(inputs, **settings).logits
        return logits


def network(family: str, task: str, *, decoder: bool = False, **settings: Any) -> Callable[[], nn.Module]:
    """A model of a family ("Bert") for a task ("ForSequenceClassification")."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{family}Config")(**settings)
        return Logits(getattr(transformers, f"{family}{task}")(config), decoder=decoder)

    return make


def eager(family: str, task: str, **settings: Any) -> Callable[[], nn.Module]:
    """The same with eager attention, written as matrix products and a softmax."""
    return network(family, task, attn_implementation="eager", **settings)


classifies = partial(eager, task="ForSequenceClassification", num_labels=CLASSES)
speaks = partial(eager, task="ForCausalLM")
sees = partial(network, task="ForImageClassification", num_labels=CLASSES)

distilbert = classifies("DistilBert", vocab_size=VOCABULARY, dim=48, n_layers=2, n_heads=4, hidden_dim=96)
gpt2 = eager("GPT2", "LMHeadModel", vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4, n_positions=64)
opt = speaks(
    "OPT",
    vocab_size=VOCABULARY,
    hidden_size=48,
    word_embed_proj_dim=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=96,
    max_position_embeddings=64,
)
t5 = network(
    "T5",
    "ForConditionalGeneration",
    decoder=True,
    vocab_size=VOCABULARY,
    d_model=48,
    d_kv=12,
    d_ff=96,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
    feed_forward_proj="gated-gelu",
)
whisper = network(
    "Whisper",
    "ForConditionalGeneration",
    decoder=True,
    vocab_size=VOCABULARY,
    d_model=48,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_source_positions=32,
    max_target_positions=32,
    num_mel_bins=16,
    decoder_start_token_id=1,
    **ENDS,
)
vit = sees(
    "ViT",
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    image_size=32,
    patch_size=8,
)
segformer = network(
    "Segformer",
    "ForSemanticSegmentation",
    num_labels=CLASSES,
    depths=[1] * 4,
    hidden_sizes=[16, 32, 48, 64],
    num_attention_heads=[1, 2, 2, 4],
    decoder_hidden_size=32,
)
resnet = sees("ResNet", embedding_size=16, hidden_sizes=[32, 64, 96, 128], depths=[1] * 4)

NETWORKS = (
    Network("hf.bert", classifies("Bert", **SIZES), tokens()),
    Network("hf.distilbert", distilbert, tokens()),
    Network("hf.albert_shared", classifies("Albert", embedding_size=32, **SIZES), tokens()),
    Network("hf.gpt2", gpt2, tokens()),
    Network("hf.opt", opt, tokens()),
    Network("hf.llama_gqa", speaks("Llama", num_key_value_heads=2, **SIZES, **ENDS), tokens()),
    Network("hf.qwen3", speaks("Qwen3", num_key_value_heads=2, head_dim=12, **SIZES, **ENDS), tokens()),
    Network("hf.phi", speaks("Phi", **SIZES, **ENDS), tokens()),
    Network("hf.mixtral_moe", speaks("Mixtral", num_key_value_heads=2, num_local_experts=4, **SIZES, **ENDS), tokens()),
    Network("hf.t5_gated", t5, tokens()),
    Network("hf.whisper", whisper, noise(2, 16, 64)),
    Network("hf.vit", vit, images(32)),
    Network("hf.segformer", segformer, images(64)),
    Network("hf.resnet", resnet, images(64)),
)
