"""An ONNX file computes what torch computes, for dense and shrunk models; a refused export leaves no files."""

import math
import os
import re
import subprocess
import sys
from typing import Any, cast

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.onnx._internal.exporter import _onnx_program

import keepk
from keepk.deploy.onnx import OnnxReport, export_onnx
from keepk.deploy.runtime import difference, rows_of, with_rows
from keepk.errors import FileError, KeepkError, TraceError
from keepk.model.example import Example
from keepk.model.layers import HeadwiseAttention
from keepk.storage import files
from masked import call, leaves, relative_error
from networks import NETWORKS
from untyped import untyped

TOLERANCE = 1e-5
PATTERNS = ("conv_bn_flatten", "dense_block", "multihead_attention", "dict_outputs", "embedding")


def in_float32(name):
    model, example = NETWORKS[name]()
    return model.float(), fresh(example, 3)


def fresh(example, rows, seed=0):
    """Random values in the example's shapes, with this number of rows."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(example, dict):
        return {key: fresh(value, rows, seed + at) for at, (key, value) in enumerate(example.items())}
    if isinstance(example, tuple):
        return tuple(fresh(value, rows, seed + at) for at, value in enumerate(example))
    if example.is_floating_point():
        return torch.randn(rows, *example.shape[1:], generator=generator)
    return torch.randint(0, 11, (rows, *example.shape[1:]), generator=generator)


def ran(path, example):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [put.name for put in session.get_inputs()]
    arrays = [tensor.numpy() for tensor in leaves(example)]
    return list(map(torch.from_numpy, session.run(None, dict(zip(names, arrays, strict=True)))))


@torch.no_grad()
def torch_outputs(model, example):
    return leaves(call(model.eval(), example))


def is_special(module):
    return isinstance(module, HeadwiseAttention) or hasattr(module, "reads_selection")


@pytest.mark.parametrize("name", PATTERNS)
def test_dense_and_shrunk_the_file_computes_what_torch_computes(tmp_path, name):
    model, example = in_float32(name)
    path = tmp_path / "net.onnx"
    for shrunk in (False, True):
        if shrunk:
            graph = keepk.trace(model, example)
            keepk.shrink(model, graph, graph.choose(0.5))
            assert any(map(is_special, model.modules())) == (name in ("dense_block", "multihead_attention"))
        report = export_onnx(model, example, path)
        assert list(tmp_path.iterdir()) == [report.path] == [path]
        assert report.bytes == path.stat().st_size
        assert report.difference is not None
        assert 0.0 <= report.difference < TOLERANCE
        assert all("[batch, " in spec for spec in (*report.inputs, *report.outputs))
        for rows in (1, 5):
            other = fresh(example, rows, seed=rows)
            assert relative_error(torch_outputs(model, other), ran(path, other)) < TOLERANCE


class Named(nn.Module):
    """A model with several arguments, not all of which are tensors."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, left, right, scale=2.0):
        return (self.left(left) - self.right(right)) * scale


def test_keyword_arguments_in_any_order(tmp_path):
    model, example = Named(), {"right": torch.randn(2, 5), "scale": 3.0, "left": torch.randn(2, 4)}
    report = export_onnx(model, example, tmp_path / "net.onnx")
    assert [spec.split(":")[0] for spec in report.inputs] == ["left", "right"]
    assert relative_error(torch_outputs(model, example), ran(report.path, (example["left"], example["right"]))) < 1e-5


def looks(model):
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    values = {name: (id(tensor), tensor.data_ptr(), tensor.clone()) for name, tensor in tensors.items()}
    grads = {name: (id(p.grad), p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None}
    own = [
        {key: repr(value) for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
        for module in model.modules()
    ]
    return values, grads, own


def same(before, after):
    return before.keys() == after.keys() and all(
        one[:-1] == other[:-1] and torch.equal(one[-1], other[-1])
        for one, other in zip(before.values(), after.values(), strict=True)
    )


def test_nothing_of_the_model_changes_also_inside_wrappers(tmp_path):
    """The network stores results of forward passes, is mostly in train mode, and has gradients."""
    model, example = in_float32("caches")
    sum(leaf.sum() for leaf in leaves(call(model, example))).backward()
    model.grids.clear()
    model.train()
    model.head.eval()
    handle = model.register_forward_hook(lambda *_: None)
    wrapped = nn.DataParallel(cast(nn.Module, torch.compile(model, backend="eager")))
    before, state, given = looks(model), torch.get_rng_state(), example.clone()
    report = export_onnx(wrapped, example, tmp_path / "net.onnx")
    after = looks(model)
    assert same(before[0], after[0])
    assert same(before[1], after[1])
    assert before[2] == after[2]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(given, example)
    assert torch.is_grad_enabled()
    handle.remove()
    assert relative_error(torch_outputs(model, example), ran(report.path, example)) < TOLERANCE


class OtherWhenExported(nn.Module):
    def forward(self, x):
        return x + 1.0 if torch.onnx.is_in_onnx_export() else x


class OtherForOneRow(nn.Module):
    def forward(self, x):
        return x * 2.0 if x.shape[0] == 1 else x * 3.0


class ThreeRows(nn.Module):
    def forward(self, x):
        return x.reshape(3, -1) * 2.0


def refused(tmp_path, model, example, error, match, name="net.onnx", **options):
    """Check that an export is refused, the old file is unchanged, and there are no new files."""
    (tmp_path / "net.onnx").write_bytes(b"old")
    with pytest.raises(error, match=match):
        export_onnx(model, example, tmp_path / name, **options)
    assert [file.name for file in tmp_path.iterdir()] == ["net.onnx"]
    assert (tmp_path / "net.onnx").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("model", "example", "error", "match"),
    [
        (torch.relu, torch.ones(2, 4), TraceError, "got builtin_function_or_method as the model"),
        (nn.Linear(4, 3), "pictures", TraceError, "example: got str. Pass a tensor, a tuple"),
        (nn.Linear(4, 3), torch.tensor(1.0), TraceError, r"first tensor of shape \(\), so its batch size"),
        (nn.Linear(4, 3), {}, TraceError, "has no tensor, so its batch size cannot be changed"),
        (nn.Linear(4, 3), (2, 4), TraceError, r"example: got the shape \(2, 4\). Pass a tensor, not a shape."),
        (nn.Linear(4, 3), (torch.ones(2, 4), torch.ones(2)), TraceError, "A tuple is several arguments: pass the tens"),
        (nn.ReLU, torch.ones(2, 4), TraceError, r"export_onnx: got the class ReLU. Pass ReLU\(\), a model."),
        (nn.Linear(4, 3), torch.ones(2, 5), TraceError, r"Linear: its forward failed on \(2, 5\) .*Pass an example"),
        (nn.Linear(4, 3), {"x": torch.ones(2, 4)}, TraceError, "unexpected keyword argument 'x'"),
        (ThreeRows(), torch.ones(3, 4), TraceError, r"failed on \(4, 4\).*export with dynamic_batch=False"),
        (OtherWhenExported(), torch.ones(2, 4), FileError, r"differs from torch by 1.0e\+00 .*tolerance=0.0001"),
        (OtherForOneRow(), torch.ones(2, 4), FileError, r"on \(1, 4\), more than .*dynamic_batch=False"),
        (nn.Conv1d(4, 3, 1).double(), torch.ones(2, 4, 5).double(), FileError, "onnxruntime cannot run .*check=False"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_refused_leaves_the_old_file(tmp_path, model, example, error, match):
    refused(tmp_path, model, example, error, match)


def test_arguments_in_the_wrong_order_are_refused_with_the_right_one(tmp_path):
    with pytest.raises(FileError, match=r"^export_onnx: got Tensor as the path. The order is model, example, path.$"):
        export_onnx(nn.Linear(4, 3), tmp_path / "net.onnx", untyped(torch.ones(2, 4)))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("tolerance", ["a", -1e-4, float("nan"), True, (1e-4,)])
def test_what_is_no_tolerance_is_refused(tmp_path, tolerance):
    with pytest.raises(
        FileError, match=rf"^export_onnx: tolerance={re.escape(repr(tolerance))}\. Pass a number of at least 0"
    ):
        export_onnx(nn.Linear(4, 3), torch.ones(2, 4), tmp_path / "net.onnx", tolerance=tolerance)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("path", ["", "net\0.onnx", "net\ud800.onnx"])
def test_a_path_that_no_file_can_have_is_refused(path):
    with pytest.raises(FileError, match=rf"^export_onnx: got {re.escape(repr(path))} as the path, which no file can"):
        export_onnx(nn.Linear(4, 3), torch.ones(2, 4), path)


def test_a_model_that_cannot_be_exported_is_refused_with_the_reason(tmp_path, capfd):
    model, example = in_float32("python_branch")
    refused(tmp_path, model, example, FileError, "PythonBranch: torch.onnx cannot export .*data-dependent")
    assert capfd.readouterr() == ("", "")


def test_a_place_that_cannot_be_written_is_refused(tmp_path):
    model, example = nn.Linear(4, 3), torch.ones(2, 4)
    refused(tmp_path, model, example, FileError, "cannot be written .*Choose a file in a folder", "missing/net.onnx")
    refused(tmp_path, model, example, FileError, "cannot be written", "net.onnx/net.onnx")
    refused(tmp_path, model, example, FileError, "it is a folder", ".")


KILLED = """
import os, signal, sys, time
import torch
from torch import nn
from keepk.deploy import onnx
def stop(*_):
    print("here", flush=True)
    time.sleep(600)
onnx._checked = stop
onnx.export_onnx(nn.Linear(4, 3), torch.ones(2, 4), sys.argv[1])
"""


def half_way(path):
    """A process that stops after writing its temporary file, and the folder of that file."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    before = set(path.parent.iterdir())
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    (folder,) = set(path.parent.iterdir()) - before
    return process, folder


def test_what_a_killed_export_left_is_deleted_and_what_a_running_one_needs_is_not(tmp_path):
    path = tmp_path / "net.onnx"
    killed, _ = half_way(path)
    running, needed = half_way(path)
    try:
        killed.kill()
        killed.wait(60)
        others = (
            tmp_path / ".net.onnx-2-abcdefgh.tmp",
            tmp_path / ".net.onnx-mine.tmp",
            tmp_path / ".net.onnx-abcdefgh.tmp",
        )
        for other in others[:2]:
            other.mkdir()
        others[2].write_bytes(b"a file")
        export_onnx(nn.Linear(4, 3), torch.ones(2, 4), path)
        assert sorted(tmp_path.iterdir()) == sorted([path, needed, *others])
        assert (needed / "files" / "net.onnx").stat().st_size > 100
    finally:
        for process in (killed, running):
            process.kill()
            process.wait(60)
            process.stdout.close()
    export_onnx(nn.Linear(4, 3), torch.ones(2, 4), path)
    assert sorted(tmp_path.iterdir()) == sorted([path, *others])


@pytest.mark.parametrize("locks", [True, False])
def test_a_folder_that_may_be_of_a_running_export_is_deleted_when_it_is_old(tmp_path, monkeypatch, locks):
    """It has no lock file, or the file system does not support locks."""
    if not locks:
        monkeypatch.setattr(files, "try_lock", lambda _: None)
    young, old = tmp_path / ".net.onnx-abcdefgh.tmp", tmp_path / ".net.onnx-01234567.tmp"
    for folder in (young, old):
        folder.mkdir()
        if not locks:
            (folder / files.LOCK).touch()
    day_before = young.stat().st_mtime - 2 * files.LEFTOVER_AGE
    os.utime(old, (day_before, day_before))
    with files.own_folder(tmp_path / "net.onnx") as own:
        assert sorted(tmp_path.iterdir()) == sorted([young, own.parent])
    assert [*tmp_path.iterdir()] == [young]


def test_a_folder_that_was_deleted_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    real, seen = files._is_at, list[Any]()

    def deleted(handle, lock):
        if not seen:
            lock.unlink()
            lock.parent.rmdir()
        seen.append(lock)
        return real(handle, lock)

    monkeypatch.setattr(files, "_is_at", deleted)
    with files.own_folder(tmp_path / "net.onnx") as own:
        assert own.is_dir()
    assert len(set(seen)) == 2
    assert not [*tmp_path.iterdir()]


def test_a_failure_at_the_last_moment_leaves_the_old_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    refused(tmp_path, nn.Linear(4, 3), torch.ones(2, 4), FileError, "No space left.*is unchanged")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_with_the_extra(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    match = rf'{package} is not installed. Run: pip install "keepk\[onnx\]"'
    refused(tmp_path, nn.Linear(4, 3), torch.ones(2, 4), KeepkError, match)


def test_without_a_check_onnxruntime_is_not_needed_and_a_fixed_batch_stays(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        report = export_onnx(ThreeRows(), torch.ones(3, 4), tmp_path / "net.onnx", check=False, dynamic_batch=False)
    assert report.difference is None
    assert report.inputs == ("x: float[3, 4]",)
    assert torch.equal(ran(report.path, torch.ones(3, 4))[0], torch.full((3, 4), 2.0))


def test_a_difference_within_the_tolerance_passes(tmp_path):
    report = export_onnx(OtherWhenExported(), torch.ones(2, 4), tmp_path / "net.onnx", tolerance=1.0)
    assert report.difference == 1.0


def test_values_that_do_not_fit_lie_in_a_file_beside(tmp_path, monkeypatch):
    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 0)
    model = nn.Linear(64, 64)
    report = export_onnx(model, torch.ones(2, 64), tmp_path / "net.onnx")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["net.onnx", "net.onnx.data"]
    assert report.bytes == sum(file.stat().st_size for file in files)
    example = torch.randn(3, 64)
    assert relative_error(torch_outputs(model, example), ran(report.path, example)) < TOLERANCE


def test_the_report_prints_itself_in_a_line(tmp_path):
    report = OnnxReport(tmp_path, 20, ("x: float[batch, 3]",), ("y: float[batch, 2]",), 1.234e-7, 12_345)
    words = "x: float[batch, 3] -> y: float[batch, 2]; opset 20, 12,345 bytes, differs from torch by 1.2e-07"
    assert str(report) == f"{tmp_path}: {words}"
    assert repr(report) == f"<OnnxReport {report}>"
    cache = tuple(f"cache.{layer}: float[batch, 8]" for layer in range(48))
    short = repr(OnnxReport(tmp_path, 20, cache, cache[:4], None, 12_345))
    wanted = [", ".join([*cache[:3], more]) for more in ("45 more", "1 more")]
    assert short == f"<OnnxReport {tmp_path}: {' -> '.join(wanted)}; opset 20, 12,345 bytes, not checked>"


numbers = st.sampled_from([0.0, 1.0, -2.0, 3.5, math.inf, -math.inf, math.nan])
pairs = st.lists(st.tuples(numbers, numbers), max_size=6)


def slow_difference(pairs):
    gaps = [0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b) for a, b in pairs]
    gap = max((math.inf if math.isnan(value) else value for value in gaps), default=0.0)
    scale = max((abs(a) for a, _ in pairs if math.isfinite(a)), default=0.0)
    return gap / scale if scale else gap


@given(pairs=pairs)
def test_the_difference_is_that_of_a_slow_loop(pairs):
    wanted, got = (torch.tensor([pair[side] for pair in pairs]) for side in (0, 1))
    assert difference(wanted, got) == slow_difference(pairs)
    assert difference(wanted, got[:, None]) == math.inf


@given(before=st.integers(1, 5), after=st.integers(1, 12))
def test_rows_are_repeated_in_turn_and_what_has_other_lengths_stays(before, after):
    rows, other = torch.arange(before * 2).view(before, 2), torch.ones(before + 1)
    made = with_rows(Example((rows, 7), {"other": other, "again": rows}), after)
    wanted = [rows[at % before].tolist() for at in range(after)]
    assert made.arguments[0].tolist() == made.by_name["again"].tolist() == wanted
    assert made.arguments[1] == 7
    assert made.by_name["other"] is other
    assert rows_of(made) == after


def test_repeated_pictures_stay_channels_last():
    pictures = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = with_rows(Example.of(pictures), 3).arguments[0]
    assert made.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(made.numpy(), pictures[[0, 1, 0]].numpy())
