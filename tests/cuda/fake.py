"""Builds the driver in fake_driver/ and puts it in the way of a child. Skips where it cannot."""

import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = sorted((Path(__file__).parent / "fake_driver").glob("*.c"))
SKIPPED = 77  # The exit status of a case that cannot run here; its reason is on stderr.
_FLAGS = (
    "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread",
    "-Wl,-Bsymbolic",
)  # fmt: skip


def build(folder: Path) -> Path:
    """Compile into `folder` / libcuda.so.1; some seconds."""
    if util.find_spec("cuda") is None or util.find_spec("cuda.bindings") is None:
        pytest.skip("cuda-bindings is not installed")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the fake driver with")
    library = folder / "libcuda.so.1"
    command = ["gcc", *_FLAGS, f"-I{_headers()}", "-o", str(library), *map(str, _SOURCES), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return library


def _headers() -> Path:
    """cuda.h comes with Triton's wheel, or with a toolkit."""
    spec = util.find_spec("triton")
    folders = [Path(spec.origin).parent / "backends/nvidia/include"] if spec else []
    nvcc = shutil.which("nvcc")
    folders += [Path(nvcc).resolve().parents[1] / "include"] if nvcc else []
    folders += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    for folder in folders:
        if (folder / "cuda.h").exists():
            return folder
    pytest.skip("no cuda.h (triton or the CUDA toolkit has one) to build the fake driver with")


def environment(library: Path | None, **extra: object) -> dict[str, str]:
    """For a child process; `library` None: whatever driver there is."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, **{k: str(v) for k, v in extra.items()}}
    if library is not None:
        env["LD_LIBRARY_PATH"] = f"{library.parent}:{env.get('LD_LIBRARY_PATH', '')}"
    return env


def run_case(library: Path | None, name: str, **extra: object) -> None:
    """`python -m tests.cuda.cases NAME` must end well, and soon. `library` None: a real driver."""
    _run(["-m", "tests.cuda.cases", name], environment(library, **extra))


def run_code(code: str, **extra: object) -> None:
    """The same for a piece of Python, over the driver of this machine, if any."""
    _run(["-c", code], environment(None, **extra))


def python(arguments: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A child that ends, or is killed, within some minutes."""
    return subprocess.run(
        [sys.executable, *arguments], env=env, cwd=ROOT, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip


def _run(arguments: list[str], env: dict[str, str]) -> None:
    done = python(arguments, env)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
