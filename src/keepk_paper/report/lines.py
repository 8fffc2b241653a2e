"""The lines of the result files, each with its place, so that a number can name the lines that it rests on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from keepk.errors import DataError
from keepk_paper import results
from keepk_paper.results import USUAL, Training

WEIGHTS = ("lenet-300-100", "lenet-5")
PARITY = "parity"
# The keys of a line, beyond those of every result, that the report's tables and figures read.
ALWAYS = ("epochs", "cpu_seconds")
NEEDED = {
    "weights": (*ALWAYS, "layers"),
    "channels": (*ALWAYS, "layers", "parameters", "printed_parameters", "macs"),
    "parity": (*ALWAYS, "noise_floor", "at_floor", "test_errors", "inits"),
}
# The order in which experiments on channels are shown; a file that is not listed comes last.
ORDER = (
    *("vgg16-cifar10", "vgg16-half-cifar10", "vgg16-full-cifar10", "densenet40-cifar10", "densenet40-half-cifar10"),
    *("vgg16-cifar100", "vgg16-half-cifar100", "densenet40-cifar100", "vgg16-svhn", "densenet40-svhn"),
)
COUNTS = ("seed", "asked", "kept", "total")
MEASURES = ("test_error", "val_error", "seconds", "epochs", "cpu_seconds", "macs", "parameters", "printed_parameters")


@dataclass(frozen=True, eq=False)
class Line:
    """A result and its place.

    Attributes:
        file: The name of the result file.
        number: The number of the line; the first is 1.
        record: The result.
    """

    file: str
    number: int
    record: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    @property
    def name(self) -> str:
        """The place as it is written on the page: ``lenet-5.jsonl:3``."""
        return f"{self.file}:{self.number}"

    @property
    def experiment(self) -> str:
        """The experiment, after which its file is named."""
        return self.file.removesuffix(".jsonl")

    @property
    def training(self) -> Training:
        """The device and precision of the run."""
        return Training.of(self.record)


Lines = tuple[Line, ...]


@dataclass(frozen=True, eq=False)
class Results:
    """All lines of a result folder, by experiment, in the order of the files."""

    folder: Path
    by_experiment: Mapping[str, Lines]

    def of(
        self,
        experiment: str,
        recipe: str | None = None,
        asked: int | None = None,
        training: Training | None = None,
    ) -> Lines:
        """The lines of an experiment, of one recipe if named, at one count and of one training if given."""
        found = self.by_experiment.get(experiment, ())
        return tuple(
            line
            for line in found
            if (recipe is None or line["recipe"] == recipe)
            and (asked is None or line["asked"] == asked)
            and (training is None or line.training == training)
        )

    def trainings(self, experiment: str, recipe: str | None = None) -> list[Training]:
        """The devices and precisions of an experiment, or of one of its recipes, in the order of the file."""
        return list(dict.fromkeys(line.training for line in self.of(experiment, recipe)))

    def latest_training(self, experiment: str) -> Training:
        """That of the last line of an experiment, for the runs that are still missing."""
        return max(self.of(experiment), key=lambda line: line.number).training if self.of(experiment) else USUAL

    def recipes(self, experiment: str) -> list[str]:
        """The recipes that an experiment has results of, in the order of the file."""
        return list(dict.fromkeys(line["recipe"] for line in self.of(experiment)))

    def __iter__(self) -> Iterator[Line]:
        return (line for lines in self.by_experiment.values() for line in lines)

    @property
    def channel_experiments(self) -> list[str]:
        """The experiments that remove channels."""
        found = [name for name in self.by_experiment if kind_of(name) == "channels"]
        return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def kind_of(experiment: str) -> str:
    """Whether an experiment prunes "weights" or "channels", or is "parity"."""
    if experiment == PARITY:
        return "parity"
    return "weights" if experiment in WEIGHTS else "channels"


def read_folder(folder: Path) -> Results:
    """Read and check all result files of a folder.

    Raises:
        DataError: If there are no results, or a line lacks something that the report shows.
    """
    files = sorted(folder.glob("*.jsonl"))
    found = {
        path.stem: lines
        for path in files
        if (lines := tuple(Line(path.name, number, record) for number, record in results.numbered(path)))
    }
    if not found:
        raise DataError(
            f"report: no results in {folder}. Run an experiment first, such as `keepk paper run lenet-300-100`, "
            "or name the folder with the result files: --results DIR."
        )
    for experiment, lines in found.items():
        for line in lines:
            _check(folder, experiment, line)
        if kind_of(experiment) == "channels":
            _check_one_point(folder, lines)
        else:
            _check_one_training(folder, lines)
    return Results(folder, found)


def seeds(lines: Iterable[Line]) -> list[int]:
    """The seeds of the lines, in order."""
    return sorted({line["seed"] for line in lines})


def in_common(one: Sequence[Line], other: Sequence[Line]) -> tuple[Lines, Lines]:
    """The lines of the seeds that both have, in the order of the seeds; only those of the same training are paired."""
    by_seed = [{(line["seed"], line.training): line for line in lines} for lines in (one, other)]
    shared = sorted(by_seed[0].keys() & by_seed[1].keys())
    first, second = (tuple(found[seed] for seed in shared) for found in by_seed)
    return first, second


def _check_one_point(folder: Path, lines: Lines) -> None:
    """Refuse two counts of one recipe and seed: means over the seeds would mix networks of different sizes."""
    seen = dict[tuple[str, int, Training], Line]()
    for line in lines:
        other = seen.setdefault((line["recipe"], line["seed"], line.training), line)
        if other is not line:
            raise DataError(
                f"report: {folder / line.file}: lines {other.number} and {line.number} are both recipe "
                f"{line['recipe']!r} with seed {line['seed']}, at {other['asked']} and {line['asked']} channels. "
                "Remove the outdated line, or give each count a recipe."
            )


def _check_one_training(folder: Path, lines: Lines) -> None:
    """Refuse two precisions or devices of an experiment whose tables have one row for each recipe."""
    first = lines[0]
    for line in lines:
        if line.training != first.training:
            raise DataError(
                f"report: {folder / line.file}: line {first.number} was trained in {first.training}, line "
                f"{line.number} in {line.training}. The tables of this experiment show one of them: move the lines of "
                "the other to another folder."
            )


def _check(folder: Path, experiment: str, line: Line) -> None:
    where = f"report: {folder / line.file}:{line.number}"
    again = "Run the recipe again with this version of keepk, or remove the line"
    needed = NEEDED[kind_of(experiment)]
    if missing := [key for key in needed if key not in line.record]:
        raise DataError(
            f"{where}: a result without {', '.join(missing)}, which the report needs. "
            f"{again}; if {line.file} is not a result file of this package, move it to another folder."
        )
    if line["experiment"] != experiment:
        raise DataError(
            f"{where}: a result of experiment {line['experiment']!r}. Move the line to {line['experiment']}.jsonl."
        )
    for key in (*COUNTS, *MEASURES):
        value = line.record.get(key)
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        real = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
        if key in line.record and not (whole if key in COUNTS else real):
            kind = "a count" if key in COUNTS else "a number of zero or more"
            raise DataError(f"{where}: {key} is {value!r}, not {kind}. {again}.")
