"""What is shipped: a wheel with the page in it, a container file and a unit that name what exists."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.people.commands import ROOT

SHIPPED = ("launcher.py", "pdnode", "ipc", "pyproject.toml", "README.md", "LICENSE")
NOTHING_BUILT = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SHIPPED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=NOTHING_BUILT)
        else:
            shutil.copy(path, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--no-index", "-w", str(folder), str(source)], check=True)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_the_page_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "pdnode = launcher:main" in archive.read(entry).decode()
    modules = {
        str(path.relative_to(ROOT))
        for top in ("pdnode", "ipc")
        for path in (ROOT / top).rglob("*.py")
    }
    page = {f"pdnode/page_files/{name}" for name in ("index.html", "page.css", "page.js")}
    assert modules | page | {"launcher.py"} <= names
    assert not any(name.startswith(("tests", "bench")) for name in names)


def test_the_wheel_installs_and_its_command_plans(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)
    done = subprocess.run(
        [sys.executable, str(site / "bin" / "pdnode"), "plan", "--help"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "launcher.py plan" in done.stdout


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (ROOT / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


def test_the_containerfile_names_what_exists() -> None:
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    stages = []
    for what, rest in instructions():
        assert what in known, what
        if what == "FROM":
            image, _, stage = rest.partition(" AS ")
            assert image.startswith("docker.io/")
            assert ":" in image
            stages.append(stage)
        elif what == "COPY":
            source = rest.split()[0]
            assert (ROOT / source).exists(), source
        elif what == "ENTRYPOINT":
            assert rest == '["pdnode"]'
            assert "pdnode" in script
    assert stages == ["cpu", "cuda"]


def test_the_unit_stops_the_launcher_gently() -> None:
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str
    unit.read(ROOT / "deploy" / "pdnode.service")
    service = unit["Service"]
    assert shlex.split(service["ExecStart"])[0].endswith("/pdnode")
    # TERM to all would end the engines under the requests that may still finish.
    assert service["KillMode"] == "mixed"
    assert int(service["TimeoutStopSec"]) > 30
    assert service["RestartPreventExitStatus"] == "2"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "pdnode.service").read_text()
    unit = tmp_path / "pdnode.service"
    unit.write_text(text.replace("/opt/pdnode/.venv/bin/pdnode", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["openai_client.py", "langchain_chat.py", "bench_serve.sh"])
def test_examples_are_whole(name: str) -> None:
    path = ROOT / "examples" / name
    if path.suffix == ".py":
        compile(path.read_text(), str(path), "exec")
    else:
        subprocess.run(["bash", "-n", str(path)], check=True)
