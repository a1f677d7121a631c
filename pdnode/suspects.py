"""Which of the requests on an engine that died is what killed it?

Nobody says so: a bad request, the kernel short of memory and a person with ``kill -9`` look alike. Two
deaths under one request without progress in between are taken for proof, but only where no other
request has the same against it: several are tried one after the other, and only the one on trial can
be blamed. A request that the engine had not begun, or that was still repeating what its client has,
made no step that could have killed anybody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdnode.journey import Journey

DEATHS_IN_A_ROW = 2
SHORT_LIVES = 6
"""So many deaths in a row with fewer than PROGRESS tokens between any two of them are proof as well."""
PROGRESS = 8


class Verdict(NamedTuple):
    blamed: list[Journey]
    held: list[Journey]
    """Wait for a trial: see ``Suspects.next``."""
    free: list[Journey]
    """Go on elsewhere at once."""


class Suspects:
    def __init__(self) -> None:
        self._held: deque[Journey] = deque()
        self._on_trial: Journey | None = None

    def judge(self, hit: Sequence[Journey], suspicious: Callable[[Journey], bool]) -> Verdict:
        """After a death under ``hit``. ``suspicious``: the engine had computed something of the request,
        and is not known to have been ended from outside."""
        accused = [journey for journey in hit if _accused(journey, suspicious(journey))]
        if self._on_trial in accused:
            blamed = [self._on_trial]
        elif len(accused) == 1:
            blamed = accused
        else:
            blamed = []
        held = [journey for journey in accused if journey not in blamed]
        self._held += held
        return Verdict(blamed, held, [journey for journey in hit if journey not in accused])

    def __bool__(self) -> bool:
        return self._on_trial is not None or bool(self._held)

    def next(self) -> Journey | None:
        """The request whose trial begins now. None: one is still going on, or nobody waits."""
        trial = self._on_trial
        if trial is not None and not trial.ended and trial.deaths_in_a_row:
            return None
        self._on_trial = None
        while self._held and self._on_trial is None:
            journey = self._held.popleft()
            self._on_trial = None if journey.ended else journey
        return self._on_trial


def _accused(journey: Journey, suspicious: bool) -> bool:
    journey.deaths += 1
    assert journey.leg is not None
    if not suspicious or (journey.leg.answered and journey.replayed):
        return False
    journey.deaths_in_a_row += 1
    if len(journey.emitted) - journey.emitted_at_death >= PROGRESS:
        journey.short_lives = 0
    journey.short_lives += 1
    journey.emitted_at_death = len(journey.emitted)
    return journey.deaths_in_a_row >= DEATHS_IN_A_ROW or journey.short_lives >= SHORT_LIVES
