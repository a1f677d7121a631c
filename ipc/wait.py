"""Waiting without a lock: a deadline, and a poll that starts in microseconds."""

import os
import time

_SPIN_S = 200e-6  # what a MiB takes in a pipe; an idle core needs a third of it to wake up
_FIRST_S, _LONGEST_S = 50e-6, 1e-3


class Wait:
    """A time budget, spent in growing naps. `timeout_s`: None waits for ever, 0 not at all."""

    __slots__ = ("_deadline", "_nap_s", "_spin_end", "spinning", "timeout_s")

    def __init__(self, timeout_s: float | None):
        self.timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.reset()

    def reset(self) -> None:
        """There was progress: poll fast again. The deadline stays."""
        self._spin_end, self._nap_s = time.monotonic() + _SPIN_S, _FIRST_S
        self.spinning = True  # The naps have not begun: too early for costly checks of the peer.

    def nap(self) -> bool:
        """Sleep a little; False when the budget is spent."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return False
        if now < self._spin_end:
            os.sched_yield()  # Whoever is waited for may need this core.
            return True
        self.spinning = False
        left_s = self._nap_s if self._deadline is None else self._deadline - now
        time.sleep(min(self._nap_s, left_s))
        self._nap_s = min(self._nap_s * 1.5, _LONGEST_S)
        return True
