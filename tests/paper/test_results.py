"""Result files are read as written; a repeated point replaces the earlier one, and a partial line is refused."""

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepk.errors import DataError
from keepk_paper import results

COUNTS = ["seed", "asked", "kept", "total"]
KEYS = ["experiment", "recipe", *COUNTS, "test_error", "val_error", "dense_test_error", "seconds", "versions"]


def point(recipe="paper", seed=1, asked=10, **more):
    values = ["lenet-5", recipe, seed, asked, asked, 100, 1.5, 1.25, 1.0, 2.5, results.versions()]
    return dict(zip(KEYS, values, strict=True)) | more


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "lenet-5.jsonl"


recipes = st.text(max_size=6)
points = st.builds(
    point,
    recipe=recipes,
    seed=st.integers(1, 3),
    asked=st.sampled_from([5, 10]),
    test_error=st.floats(0, 100),
    amp=st.booleans(),
    device=st.sampled_from(["cpu", "cuda", "cuda:1"]),
    layers=st.dictionaries(st.text(max_size=4), st.lists(st.integers(0, 9), max_size=2), max_size=2),
)


@given(writes=st.lists(st.lists(points, max_size=4), max_size=4))
def test_what_is_read_is_the_last_of_each_point_in_the_order_of_the_first(tmp_path_factory, writes):
    """Any text in a recipe's name and any float survive the round trip."""
    path = tmp_path_factory.mktemp("results") / "file.jsonl"
    for records in writes:
        results.append(path, records)
    written = [record for records in writes for record in records]

    def same(record, other):
        """A run of another precision or device is not a repetition."""
        devices = {it["device"][:4] for it in (record, other)}
        return len(devices) == 1 and all(record[key] == other[key] for key in ("recipe", "seed", "asked", "amp"))

    firsts = [record for place, record in enumerate(written) if not any(same(record, it) for it in written[:place])]
    assert results.read(path) == [next(it for it in reversed(written) if same(first, it)) for first in firsts]


def test_a_point_is_one_line_of_json(path):
    results.append(path, [point(seed=1), point(seed=2, note="two\nlines")])
    results.append(path, iter([point(seed=3)]))
    lines = path.read_bytes().decode("ascii").split("\n")
    assert [json.loads(line)["seed"] for line in lines[:-1]] == [1, 2, 3]
    assert lines[-1] == ""
    assert list(json.loads(lines[0])) == KEYS


def test_the_points_of_a_run_are_one_write(tmp_path):
    """Writes are counted below Python's buffer, with more data than a buffer holds."""
    sizes = []

    class Counted(io.FileIO):
        def write(self, content):
            sizes.append(len(content))
            return super().write(content)

    class CountedPath(type(Path())):  # type: ignore[misc]  # Path itself has no subclasses before Python 3.12
        def open(self, mode):
            return io.BufferedWriter(Counted(self, mode))

    path = CountedPath(tmp_path / "file.jsonl")
    results.append(path, [point(seed=seed, note="x" * 10_000) for seed in range(40)])
    assert sizes == [path.stat().st_size]
    assert sizes[0] > 400_000


def test_a_file_that_does_not_exist_holds_no_points(path):
    assert results.read(path) == []
    assert not path.parent.exists()


@pytest.mark.parametrize("key", KEYS)
def test_a_point_without_a_key_is_refused_and_nothing_is_written(path, key):
    results.append(path, [point(seed=1)])
    before = path.read_bytes()
    lacking = {name: value for name, value in point(seed=3).items() if name != key}
    with pytest.raises(DataError, match=rf"lenet-5\.jsonl: a result without {key}\. Every result has experiment, "):
        results.append(path, [point(seed=2), lacking])
    assert path.read_bytes() == before


@pytest.mark.parametrize("broken", ["", "{", '{"recipe": "pa', "7", "null", "\ufffd"])
def test_a_broken_line_is_refused_by_file_and_line(path, broken):
    results.append(path, [point(seed=1), point(seed=2)])
    whole = path.read_text()
    path.write_text(f"{whole}{broken}\n{whole}")
    with pytest.raises(DataError, match=r"lenet-5\.jsonl:3: not a result line\. Remove or repair it\."):
        results.read(path)


@pytest.mark.parametrize("lacking", ["[]", "{}", '{"recipe": "paper", "seed": 1, "asked": 3}'])
def test_a_line_without_all_keys_is_refused_by_file_and_line(path, lacking):
    results.append(path, [point(seed=1)])
    path.write_text(f"{path.read_text()}{lacking}\n")
    with pytest.raises(DataError, match=r"lenet-5\.jsonl:2: a result without .*test_error.* Remove or repair it\."):
        results.read(path)


def test_bytes_that_are_no_text_are_refused(path):
    results.append(path, [point(seed=1)])
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(DataError, match=":2: not a result line"):
        results.read(path)


def test_a_line_that_a_kill_cut_anywhere_is_refused_or_whole(path):
    results.append(path, [point()])
    line = path.read_text()
    for stop in range(1, len(line) - 1):
        path.write_text(line[:stop])
        with pytest.raises(DataError, match=":1: not a result line"):
            results.read(path)
    path.write_text(line[:-1])
    assert results.read(path) == [point()]


@pytest.mark.parametrize("odd", [{"amp": 1}, {"amp": "yes"}, {"device": None}])
def test_a_precision_that_is_not_one_is_refused(path, odd):
    results.append(path, [point(), point(seed=2, **odd)])
    with pytest.raises(DataError, match=r"lenet-5\.jsonl:2: device is not a name, or amp is not true or false\."):
        results.read(path)


def test_a_line_without_a_precision_repeats_one_of_float32_on_the_cpu(path):
    results.append(path, [point(test_error=1.0), point(amp=True, test_error=2.0, device="cpu")])
    results.append(path, [point(amp=False, device="cpu", test_error=3.0)])
    assert [line["test_error"] for line in results.read(path)] == [3.0, 2.0]


def test_lines_of_another_folder_are_taken_over_once_and_as_they_are(path, tmp_path):
    results.append(path, [point(seed=1), point(seed=2)])
    source = tmp_path / "source"
    results.append(source / "lenet-5.jsonl", [point(seed=2), point(seed=3, amp=True), point(seed=3)])
    results.append(source / "other.jsonl", [point(seed=1)])
    before = path.read_bytes()
    assert results.take_over(source, path.parent) == {"lenet-5.jsonl": 2, "other.jsonl": 1}
    new = (source / "lenet-5.jsonl").read_bytes().splitlines(keepends=True)[1:]
    assert path.read_bytes() == before + b"".join(new)
    assert results.take_over(source, path.parent) == {}


def test_a_folder_with_a_broken_line_is_not_taken_over(path, tmp_path):
    results.append(path, [point(seed=1)])
    source = tmp_path / "source"
    results.append(source / "a.jsonl", [point(seed=1)])
    (source / "b.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"b\.jsonl:1: not a result line"):
        results.take_over(source, path.parent)
    assert [it.name for it in path.parent.iterdir()] == ["lenet-5.jsonl"]
    with pytest.raises(DataError, match="empty: no result files"):
        results.take_over(tmp_path / "empty", path.parent)


def test_versions_name_what_made_the_result():
    versions = results.versions()
    commit = versions.pop("commit", None)
    assert set(versions) == {"keepk", "torch", "python"}
    assert all(version[0].isdigit() for version in versions.values())
    if commit is not None:  # in a git checkout
        assert re.fullmatch(r"[0-9a-f]{40}(\+changes)?", commit)
