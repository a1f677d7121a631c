"""What a person reads while the node starts and stops. One line per fact, no control characters."""

from __future__ import annotations

import os
import time


class Progress:
    def __init__(self) -> None:
        self._begin_s = time.monotonic()
        self._states: dict[str, str] = {}
        # A stream of its own: fd 2 points at an engine's log while that engine is being started.
        self._out = os.fdopen(os.dup(2), "w", buffering=1)

    def line(self, text: str) -> None:
        print(f"pdnode: {text}", file=self._out, flush=True)

    def state(self, engine_id: str, state: str) -> None:
        """Print only a change."""
        if self._states.get(engine_id) == state:
            return
        self._states[engine_id] = state
        self.line(f"{engine_id:<12} {state:<9} {time.monotonic() - self._begin_s:5.1f} s")
