"""Imports point one way: ipc -> torch, numpy, posix_ipc, the standard library."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ipc

FOLDER = Path(ipc.__file__).parent
ALLOWED = {"ipc", "torch", "numpy", "posix_ipc"} | sys.stdlib_module_names


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_file_imports_only_what_lies_below(file):
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module.split(".")[0])
    assert found <= ALLOWED


def test_index_and_copy_do_not_load_torch():
    code = "import sys, ipc.index, ipc.copy; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parent, check=True)


def test_every_exported_name_is_there():
    for name in ipc.__all__:
        assert getattr(ipc, name) is not None
    with pytest.raises(AttributeError):
        _ = ipc.nothing
