"""The README's table: means over seeds, compared with the dense network that it names."""

from keepk_paper import results
from keepk_paper.tables.summary import LINES, summary_table


def record(line, *, recipe, seed, asked, kept, error, **costs):
    made = {"experiment": line.experiment, "recipe": recipe, "seed": seed, "asked": asked, "kept": kept, "total": 1_000}
    about = {"val_error": error, "dense_test_error": 1.0, "spaces": {"all": kept}, "epochs": 1, "seconds": 1.0}
    about |= {"cpu_seconds": 1.0, "threads": 1, "versions": {}, "layers": {}}
    return {**made, "test_error": error, **about, **costs}


def test_errors_are_means_and_sizes_are_shares(tmp_path):
    for line in {line.experiment: line for line in LINES}.values():
        mine = [it for it in LINES if it.experiment == line.experiment]
        costs = {"parameters": 400, "macs": 90} if line.unit != "weights" else {}
        small = {"parameters": 100, "macs": 60} if costs else {}
        made = [record(line, recipe=line.dense, seed=1, asked=1_000, kept=1_000, error=2.0, **costs)]
        for it in mine:
            for seed, error in ((1, 3.0), (2, 4.0)):
                made.append(
                    record(it, recipe=it.recipe, seed=seed, asked=it.asked, kept=it.asked, error=error, **small)
                )
        results.append(tmp_path / f"{line.experiment}.jsonl", made)
    for line, row in zip(LINES, summary_table(tmp_path).rows, strict=True):
        less = ("", "") if line.unit == "weights" else ("1/4.0", "1/1.5")
        assert row == (line.name, f"{line.asked:,} of 1,000 {line.unit}", "3.50", "2.00", *less)
