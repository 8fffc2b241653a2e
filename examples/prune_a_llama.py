"""Prune a language model in the Trainer of transformers; save it so that transformers alone loads it.

    python examples/prune_a_llama.py [--mlp 96] [--groups 4] [--epochs 5] [--out folder]

The model is a small Llama with random weights, and the data are sequences in which every token is the sum of the two
tokens before it. To adapt the script, change `make_model` and `make_data`. If it was killed, run it again with the same
``--out``, and it continues. It needs ``pip install "keepk[transformers]"``.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import keepk
from keepk.integrations.transformers import PruningCallback, resume
from keepk.typing import Space

TOKENS, LENGTH, SEQUENCES = 31, 16, 128


def make_model() -> Any:
    """The dense model: in each of 2 layers 64 MLP units, and 8 heads in 4 groups that share keys and values."""
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def make_data(number: int) -> list[dict[str, Any]]:
    """Sequences of token ids; the labels are the same ids, which the model shifts."""
    rows = torch.randint(3, TOKENS, (number, LENGTH), generator=torch.Generator().manual_seed(0))
    for place in range(2, LENGTH):
        rows[:, place] = 3 + (rows[:, place - 1] + rows[:, place - 2]) % (TOKENS - 3)
    return [{"input_ids": row, "labels": row} for row in rows.tolist()]


def run(*, mlp: int, groups: int, epochs: int, folder: Path) -> Any:
    """Train and prune, save to ``folder / "model"``, and return what plain ``from_pretrained`` loads from there."""
    set_seed(0)
    model, data = make_model(), make_data(SEQUENCES)
    cubic = keepk.Cubic(epochs=epochs - 1)  # the last epoch is fine-tuning
    # per_layer=True keeps the same number in every layer, so that a config can describe the result. A unit of
    # self_attn is a key-value head with the query heads that share it.
    spaces: list[Space] = [
        keepk.channels("*.mlp*", keep=mlp, per_layer=True, name="mlp", schedule=cubic),
        keepk.channels("*.self_attn*", keep=groups, per_layer=True, name="heads", schedule=cubic),
    ]
    # Without the cache of keys and values among the outputs: their shape would fix the heads.
    example = {"input_ids": torch.tensor([row["input_ids"] for row in data[:2]]), "use_cache": False}
    arguments = TrainingArguments(
        str(folder / "run"),
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    pruning = PruningCallback(spaces, example=example)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[pruning])
    trainer.train(resume_from_checkpoint=resume(trainer))
    print(pruning.pruner.report())

    print(keepk.save_pretrained(model, folder / "model"))
    loaded = LlamaForCausalLM.from_pretrained(folder / "model")  # needs nothing of keepk
    prompt = torch.tensor([data[0]["input_ids"][:4]])
    for cache in ("dynamic", "static"):
        print(cache, loaded.generate(prompt, max_new_tokens=4, do_sample=False, cache_implementation=cache).tolist())
    return loaded


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mlp", type=int, default=96, help="MLP units to keep in both layers, of 128")
    parser.add_argument("--groups", type=int, default=4, help="groups of heads to keep in both layers, of 8")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder to write to; by default a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run(mlp=options.mlp, groups=options.groups, epochs=options.epochs, folder=options.out or Path(temporary))


if __name__ == "__main__":
    main()
