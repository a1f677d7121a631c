"""Raw figures of one configuration, kept in a folder: a long bench can be run in pieces.

With ``--work DIR`` a configuration that is found there is not run again; without, everything is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Kept:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """What JSON can hold."""
        if self._folder is None:
            return measure()
        path = self._folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.json"
        if path.exists():
            return json.loads(path.read_text())
        found = measure()
        path.write_text(json.dumps(found))
        return found


def add_work_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="keep raw figures and logs here, to go on later"
    )
