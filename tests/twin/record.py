"""What the twin answered: recorded once, before any node starts, and replayed against each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.twin.cases import Case, Oracle, Way
from tests.twin.replay import Request, ask

CANNOT_RECORD = (AssertionError, LookupError, OSError, TypeError, ValueError, httpx.HTTPError)


@dataclass(frozen=True)
class Recorded:
    case: Case
    request: Request
    prompt_lengths: tuple[int, ...]
    """Tokens of each prompt; empty where no engine hears of the request."""
    answer: dict[str, Any]


def record(url: str, cases: Iterable[Case]) -> dict[str, Recorded | Exception]:
    """By case name. A case that cannot be built fails its own test, not everybody's."""
    oracle = Oracle(url)
    recordings: dict[str, Recorded | Exception] = {}
    for case in cases:
        try:
            recordings[case.name] = _record_one(url, oracle, case)
        except CANNOT_RECORD as error:
            recordings[case.name] = error
    return recordings


def _record_one(url: str, oracle: Oracle, case: Case) -> Recorded:
    request = case.request(oracle)
    lengths = () if case.way is Way.NOWHERE else tuple(oracle.prompt_lengths(request))
    answer = ask(url, request)
    assert answer["status"] == case.status, f"{case.name}: the twin itself answers {answer}"
    if case.shows is not None:
        assert case.shows(answer), f"{case.name}: the twin's answer shows nothing: {answer}"
    return Recorded(case, request, lengths, answer)
