"""The commands of README.md and docs/, as they stand there, and how each may be tried.

A ``console`` block is marked by the line before it: ``<!-- run: here -->`` (cheap),
``<!-- run: node -->`` (against a node on port 8000) or ``<!-- not run: why -->``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```console\n(?P<body>.*?)```", re.DOTALL)
MARK = re.compile(r"run: (here|node)|not run: \S.*")


@dataclass(frozen=True, slots=True)
class Command:
    page: str
    line: int
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self) -> str:
        """As a user does who stands in the project's folder with its environment active: the output."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.text],
            check=False,
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def commands(page: Path) -> list[Command]:
    text = page.read_text()
    found = []
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start("body")) + 1
        current: list[str] = []
        for number, line in enumerate(block["body"].splitlines(), first):
            if line.startswith("$ "):
                current = [line[2:]]
                begin = number
            else:
                assert current, f"{page.name}:{number} is output; only commands belong here"
                current.append(line)
            if not line.endswith("\\"):
                name = str(page.relative_to(ROOT))
                found.append(Command(name, begin, block["mark"] or "", "\n".join(current)))
                current = []
    return found


ALL = [command for page in PAGES for command in commands(page)]
