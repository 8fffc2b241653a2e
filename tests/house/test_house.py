"""The public names, the direction of imports between packages, and the dependencies of the core."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import keepk
import keepk.typing

SOURCE = Path(keepk.__file__).parent
# A package imports from itself and from the packages to its left.
ROOMS = [
    "version",
    "errors",
    "plan",
    "model",
    "graph",
    "metrics",
    "rank",
    "cut",
    "compaction",
    "storage",
    "run",
    "checkpoint",
    "reports",
    "deploy",
    "engine",
    "integrations",
    "typing",
    "cli",
]
# `pruner.report()` needs a package to the right, which it imports when it is called and never at the top.
LATE = {("pruner.py", "keepk.reports.run"), ("pruner.py", "keepk.reports.tables")}
USERS = {"cli"}  # it imports `keepk` itself, as users do
CORE = {"torch", "safetensors", "numpy", "keepk"}
EXTRAS = {
    "cli": {"typer", "rich"},
    "reports": {"rich", "matplotlib"},
    "deploy": {"onnx", "onnxruntime", "rich", "matplotlib"},
    "engine": {"llvmlite"},
}
FRAMEWORKS = {"transformers", "accelerate", "lightning", "peft", "timm"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.col_offset) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"keepk.{alias.name}" for alias in node.names] if node.module == "keepk" else [node.module]
            yield from ((name, node.col_offset) for name in names)


def room_of(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return parts[0]


MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_rooms_import_only_from_their_left(path):
    own = ROOMS.index(room_of(path))
    for name, indent in imports(path):
        if name.startswith("keepk.") and not (indent and (path.name, name) in LATE):
            assert ROOMS.index(name.split(".")[1]) <= own, f"{path.name} imports {name}"
        assert name != "keepk" or room_of(path) in USERS, f"{path.name} imports the package, and with it every room"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_core_needs_torch_safetensors_and_numpy_only(path):
    allowed = CORE | EXTRAS.get(room_of(path), set()) | sys.stdlib_module_names
    allowed |= {path.stem} if room_of(path) == "integrations" else set()
    assert {name.split(".")[0] for name, _ in imports(path)} <= allowed


def test_a_framework_is_imported_only_in_the_file_of_its_name():
    for path in MODULES:
        found = {name.split(".")[0] for name, _ in imports(path)} & FRAMEWORKS
        assert found <= ({path.stem} if room_of(path) == "integrations" else set()), path


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_private_names_of_torch_are_used_in_one_file_only(path):
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            used |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            used.add(ast.unparse(node))
    private = {name for name in used if name.startswith("torch.") and re.search(r"\._(?!_)", name)}
    operations = {name for name in private if name.startswith("torch.ops.")}  # names of ATen, not of Python modules
    assert not private - operations or path.name == "torch_internals.py"


def test_the_public_names():
    assert (
        sorted(keepk.__all__)
        == keepk.__all__
        == [
            "Annealing",
            "Cubic",
            "KeepkWarning",
            "OneShot",
            "Phase",
            "Pruner",
            "Statistics",
            "channels",
            "compact",
            "errors",
            "export_onnx",
            "fit",
            "from_pretrained",
            "inspect",
            "latency",
            "load",
            "load_checkpoint",
            "metrics",
            "prune",
            "recalibrate",
            "report",
            "rule",
            "save",
            "save_checkpoint",
            "save_pretrained",
            "shrink",
            "shrink_files",
            "sparse",
            "trace",
            "verify",
            "weights",
        ]
    )
    assert keepk.metrics.__all__ == [
        "activation",
        "blend",
        "bn_scale",
        "fisher",
        "l1",
        "l1_l2",
        "l2",
        "lamp",
        "magnitude",
        "norm",
        "outgoing",
        "product",
        "random",
        "taylor",
        "wanda",
    ]
    for name in keepk.__all__:
        assert getattr(keepk, name).__doc__


def test_the_types_for_annotations():
    assert (
        sorted(keepk.typing.__all__)
        == keepk.typing.__all__
        == [
            "AnySchedule",
            "BudgetReport",
            "Call",
            "ChannelSpace",
            "Compaction",
            "Edits",
            "Fit",
            "FitPoint",
            "Graph",
            "Group",
            "Inspection",
            "LatencyReport",
            "LatencyRow",
            "Layer",
            "LayerCost",
            "LayerReport",
            "LayersReport",
            "OnnxReport",
            "Plan",
            "RunReport",
            "SavedPretrained",
            "Schedule",
            "ShrunkFiles",
            "Slices",
            "Space",
            "SpaceReport",
            "Spread",
            "WeightSpace",
        ]
    )


def test_the_types_are_those_of_the_public_functions(tmp_path):
    """Each type is what a public function returns or what a plug-in gets, so that annotations with it are true."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    example, seen = torch.randn(2, 8), []

    def metric(layer):
        seen.append(layer)
        return layer.producer[0].tensor.norm(dim=1)

    space = keepk.channels("0", keep=4, metric=metric)
    with keepk.Pruner(net, [space], example=example) as pruner:
        pruner.step()
        report = keepk.report(pruner)
    with keepk.Pruner(net, [keepk.channels("0", macs=0.6)], example=example) as pruner:
        budget = keepk.report(pruner).budgets[0]
    graph = keepk.trace(net, example)
    found, measured = keepk.inspect(net, example), keepk.latency(net, example, batches=1, repeats=1)
    for value, type_name in (
        (space, "Space"),
        (space, "ChannelSpace"),
        (keepk.weights("*", keep=1), "WeightSpace"),
        (seen[0], "Layer"),
        (seen[0].producer[0], "Slices"),
        (report, "RunReport"),
        (report.spaces[0], "SpaceReport"),
        (report.layers, "LayersReport"),
        (report.layers.rows[0], "LayerReport"),
        (budget, "BudgetReport"),
        (graph, "Graph"),
        (graph.groups[0], "Group"),
        (found, "Inspection"),
        (found.layers[0], "LayerCost"),
        (measured, "LatencyReport"),
        (measured.rows[0], "LatencyRow"),
        (measured.rows[0].model, "Spread"),
        (keepk.compact(net, example), "Compaction"),
        (keepk.export_onnx(net, example, tmp_path / "net.onnx"), "OnnxReport"),
        (keepk.shrink(net, graph, graph.choose(0.5)), "Edits"),
    ):
        assert isinstance(value, getattr(keepk.typing, type_name)), type_name


def test_importing_keepk_imports_no_extra():
    code = (
        "import sys, keepk\n"
        "extras = {'rich', 'typer', 'matplotlib', 'sklearn', 'scipy', 'onnx', 'onnxruntime', 'torch._dynamo'}\n"
        "extras |= {'transformers', 'accelerate', 'lightning', 'peft', 'timm', 'llvmlite'}\n"
        "extras &= set(sys.modules)\n"
        "assert not extras, extras"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loading_a_model_imports_no_trace_and_no_run():
    todo, seen = ["keepk.deploy.load"], set()
    while todo:
        module = todo.pop()
        path = SOURCE.parent / (module.replace(".", "/") + ".py")
        if module in seen or not path.exists():
            continue
        seen.add(module)
        todo += [name for name, indent in imports(path) if not indent]
    assert len(seen) <= 24, sorted(seen)
    assert not [module for module in seen if module.split(".")[1] in ("graph", "run")]


def test_the_reference_has_every_public_name():
    page = Path(__file__).parents[2].joinpath("docs", "reference.md").read_text()
    listed = set(re.findall(r"auto\w+:: (keepk(?:\.metrics)?\.\w+)", page))
    listed |= {f"keepk.metrics.{name}" for name in re.findall(r"py:data:: (\w+)", page)}
    public = {f"{module.__name__}.{name}" for module in (keepk, keepk.metrics) for name in module.__all__}
    assert public - listed == {"keepk.metrics"}  # a module, whose names are listed


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="tests are grouped for several processes")
@pytest.mark.xdist_group("grouped")
def test_groups_of_tests_run_in_one_process(request):
    """Otherwise every process traces every network and repeats expensive fixtures, as with pytest 9.2 and xdist 3.8."""
    assert request.node.nodeid.endswith("@grouped")
