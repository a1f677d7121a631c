"""What a person reads while the node starts and stops.

Into a file or a pipe: one line per fact, no control characters. On a terminal: the same lines, and
below them a table of the engines that start, as long as any does.
"""

from __future__ import annotations

import os
import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

RISING = ("starting", "loading", "warming")
"""States of an engine on its way up, in order."""


class Progress:
    """``out``: for tests; by default a stream of its own on what is now stderr."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._begin_s = time.monotonic()
        self._states: dict[str, str] = {}
        # A stream of its own: fd 2 points at an engine's log while that engine is being started.
        self._out = out or os.fdopen(os.dup(2), "w", buffering=1)
        self._table = StartTable(self._out) if self._out.isatty() else None

    def line(self, text: str) -> None:
        if self._table is not None:
            self._table.line(f"pdnode: {text}")
        else:
            print(f"pdnode: {text}", file=self._out, flush=True)

    def state(self, engine_id: str, state: str) -> None:
        """Print only a change."""
        if self._states.get(engine_id) == state:
            return
        self._states[engine_id] = state
        if self._table is not None:
            self._table.state(engine_id, state)
            if state in RISING:
                return
        self.line(f"{engine_id:<12} {state:<9} {time.monotonic() - self._begin_s:5.1f} s")

    def close(self) -> None:
        """Leave the terminal as it was found."""
        if self._table is not None:
            self._table.close()


class StartTable:
    """Engines on their way up, each with its phase and how long it has been in it."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._rising: dict[str, tuple[str, float, Spinner]] = {}

    def line(self, text: str) -> None:
        self._console.print(Text(text))

    def state(self, engine_id: str, state: str) -> None:
        if state in RISING:
            self._rising[engine_id] = (state, time.monotonic(), Spinner("dots"))
        else:
            self._rising.pop(engine_id, None)
        if self._rising and self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        elif not self._rising:
            self.close()

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        # A copy: the refresh thread draws while the loop changes the engines.
        for engine_id, (state, since_s, spinner) in sorted(self._rising.copy().items()):
            done = RISING.index(state) + 1
            bar = Text("━" * 4 * done, "cyan") + Text("━" * 4 * (len(RISING) + 1 - done), "dim")
            took = f"{time.monotonic() - since_s:.0f} s"
            table.add_row(spinner, engine_id, bar, Text(state), Text(took, "dim"))
        return table

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
