"""Imports go one way, and vLLM's insides are touched in one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = {"ipc": 0, "pdnode": 1, "launcher": 2}
# The command line is vLLM's own parser and nothing of its engine; default_model runs no engine.
VLLM_DOORS = {"pdnode/vllm_compat.py", "pdnode/vllm_args.py"}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").split(".")[0])
    return found


@pytest.mark.parametrize("layer", ["ipc", "pdnode"])
def test_no_import_points_up(layer):
    for path in sources(layer):
        above = {name for name in imports(path) if LAYERS.get(name, -1) > LAYERS[layer]}
        assert not above, f"{path.relative_to(ROOT)} imports {above}"


def test_ipc_does_not_know_that_vllm_exists():
    for path in sources("ipc"):
        assert "vllm" not in imports(path), path


def test_vllm_is_imported_through_one_door():
    for path in sources("pdnode"):
        name = str(path.relative_to(ROOT))
        if name not in VLLM_DOORS:
            assert "vllm" not in imports(path), name


def test_no_cycles():
    modules = {str(p.relative_to(ROOT))[:-3].replace("/", "."): p for p in sources("pdnode")}
    edges = {name: _runtime_imports(path) & modules.keys() for name, path in modules.items()}
    while edges:
        leaves = [name for name, needs in edges.items() if not needs & edges.keys()]
        assert leaves, f"import cycle among {sorted(edges)}"
        for name in leaves:
            del edges[name]


def _runtime_imports(path: Path) -> set[str]:
    """Modules imported when the file is, type-checking imports left out."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found
