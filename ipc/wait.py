"""Waiting without a lock: a deadline, and a poll that starts in microseconds."""

import time

_SPINS = 20
_FIRST_S, _LONGEST_S = 50e-6, 1e-3


class Wait:
    """A time budget, spent in growing naps. `timeout_s`: None waits for ever, 0 not at all."""

    __slots__ = ("_deadline", "_nap_s", "_spins", "timeout_s")

    def __init__(self, timeout_s: float | None):
        self.timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.reset()

    def reset(self) -> None:
        """There was progress: poll fast again. The deadline stays."""
        self._spins, self._nap_s = _SPINS, _FIRST_S

    @property
    def spinning(self) -> bool:
        """True while the naps have not begun: too early for costly checks of the peer."""
        return self._spins > 0

    def nap(self) -> bool:
        """Sleep a little; False when the budget is spent."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return False
        if self._spins:
            self._spins -= 1
            return True
        left_s = self._nap_s if self._deadline is None else self._deadline - now
        time.sleep(min(self._nap_s, left_s))
        self._nap_s = min(self._nap_s * 1.5, _LONGEST_S)
        return True
