"""Made-up result files for tests of the report: every recipe, with errors that follow from its name."""

import json
from base64 import b64encode
from zlib import crc32

import numpy as np

from keepk_paper.experiments import EXPERIMENTS
from keepk_paper.report.runs import PAPER_UNITS, network_and_data, percent_removed

PICTURES = 400
VERSIONS = {"keepk": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "commit": "0123456789" * 4}
WIDTHS = (1, 1, 2, 2, 4, 4, 4, 8, 8, 8, 8, 8, 8)  # of VGG-16, in 64ths of its full width


def flags(rate, seed, pictures=PICTURES):
    """Which pictures are wrong, as booleans; the hard pictures are the same for all runs."""
    hard = np.random.default_rng(0).random(pictures)
    noise = np.random.default_rng(seed).normal(0, 0.05, pictures)
    return hard + noise < rate


def packed(wrong):
    return b64encode(np.packbits(wrong).tobytes()).decode()


def line(experiment, recipe, seed=1, *, total=1_056, kept=None, rate=0.12, wrong=None, **more):
    """A result of an experiment that removes channels."""
    wrong = flags(rate, crc32(f"{experiment}{recipe}{seed}".encode())) if wrong is None else wrong
    kept = total if kept is None else kept
    parts = WIDTHS if experiment.startswith("vgg16") else range(2, 12)
    dense = [total * part // sum(parts) for part in parts]
    layers = {f"features.{place}": [max(1, width * kept // total), width] for place, width in enumerate(dense)}
    costs = {"parameters": kept * 900, "printed_parameters": kept * 890, "macs": kept * 20_000, "epochs": 40}
    error = 100 * float(wrong.mean())
    return {
        **{"experiment": experiment, "recipe": recipe, "seed": seed, "asked": kept, "kept": kept, "total": total},
        **{"test_error": error, "val_error": error - 0.5, "layers": layers, **costs, "seconds": 100.0 + seed},
        **{"cpu_seconds": 50.0 + seed, "test_wrong": packed(wrong), "dense_test_error": None, "threads": 1},
        **{"versions": VERSIONS, **more},
    }


def every_channel_run(seeds=(1, 2)):
    """Lines of all recipes on channels, by experiment."""
    made = {}
    for experiment, recipes in EXPERIMENTS.items():
        network, _ = network_and_data(experiment)
        if network in PAPER_UNITS:
            parts = {"half": 2, "full": 1, "svhn": 1}.get(experiment.split("-")[1], 4)
            total = PAPER_UNITS[network] // parts
            made[experiment] = [it for recipe in recipes for it in _lines(experiment, recipe, total, seeds)]
    return made


def _lines(experiment, recipe, total, seeds):
    percent = percent_removed(recipe) or 0
    thin = recipe.startswith(("one-run-scratch", "narrow"))
    left = total * (100 - percent) // 100
    size = {"total": left} if thin else {"total": total, "kept": total if recipe.startswith("seconds") else left}
    rate = 0.12 + percent / 4_000 + (crc32(recipe.encode()) % 100) / 5_000
    return [line(experiment, recipe, seed, rate=rate, **size) for seed in seeds]


def write(folder, made):
    """Write lines as result files, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for experiment, lines in made.items():
        text = "".join(json.dumps(it) + "\n" for it in lines)
        (folder / f"{experiment}.jsonl").write_text(text)
    return folder
