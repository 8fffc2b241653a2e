"""The house stays in order: public names, rooms, and what the core may import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import keepk

SOURCE = Path(keepk.__file__).parent
# A room imports from itself and from the rooms to its left.
ROOMS = [
    "version",
    "errors",
    "plan",
    "graph",
    "rank",
    "metrics",
    "cut",
    "run",
    "show",
    "deploy",
    "integrations",
    "paper",
    "cli",
]
USERS = {"paper", "cli"}  # they use the library as everybody does
CORE = {"torch", "safetensors", "numpy", "keepk"}
EXTRAS = {
    "cli": {"typer", "rich"},
    "show": {"rich", "matplotlib"},
    "deploy": {"onnx", "onnxruntime", "rich"},
    "paper": {"rich", "sklearn", "scipy", "matplotlib"},
}


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
    for name, _ in imports(path):
        if name.startswith("keepk."):
            assert ROOMS.index(name.split(".")[1]) <= own, f"{path.name} imports {name}"
        assert name != "keepk" or room_of(path) in USERS, f"{path.name} imports the package, and with it every room"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_core_needs_torch_safetensors_and_numpy_only(path):
    allowed = CORE | EXTRAS.get(room_of(path), set()) | sys.stdlib_module_names
    assert {name.split(".")[0] for name, _ in imports(path)} <= allowed


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
            "inspect",
            "latency",
            "load",
            "load_checkpoint",
            "metrics",
            "recalibrate",
            "report",
            "rule",
            "save",
            "save_checkpoint",
            "shrink",
            "trace",
            "verify",
            "weights",
        ]
    )
    assert keepk.metrics.__all__ == [
        "blend",
        "bn_scale",
        "l1",
        "l1_l2",
        "l2",
        "magnitude",
        "norm",
        "outgoing",
        "product",
        "random",
        "taylor",
    ]
    for name in keepk.__all__:
        assert getattr(keepk, name).__doc__


def test_importing_keepk_imports_no_extra():
    code = (
        "import sys, keepk\n"
        "extras = {'rich', 'typer', 'matplotlib', 'sklearn', 'scipy', 'onnx', 'onnxruntime', 'torch._dynamo'}\n"
        "extras &= set(sys.modules)\n"
        "assert not extras, extras"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
