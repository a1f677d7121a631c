"""Sends one request to a server and brings its answer into a form that two servers can share.

What differs between two answers to the same request by nature is taken out: ids, times, and where a
stream was cut into chunks. Everything else stays.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

REQUEST_S = 120.0
CLOSE = {"Connection": "close"}
"""Servers end an idle connection after 5 s, and a request sent in that moment would be lost."""
LOGPROB_TOLERANCE = 1e-2

TIMES = frozenset({"created", "created_at", "completed_at", "sequence_number"})
RANDOM_ID = re.compile(r"[a-z]+(?:[-_][a-z]+)*[-_][0-9a-f]{8,}")
TIME_OF_DAY = re.compile(r"\[\d\d:\d\d:\d\d\] ")
"""The grammar compiler's messages begin with it, and vLLM hands them to the client."""
GROWS = frozenset({"text", "content", "reasoning", "arguments", "delta", "partial_json"})
"""Keys whose strings a stream sends piece by piece."""


@dataclass(frozen=True)
class Request:
    """One HTTP request. ``client``: who sends it, ``openai`` (the Python package) or ``httpx``."""

    path: str
    body: dict[str, Any] | None = None
    method: str = "POST"
    client: str = "httpx"
    raw: bytes | None = None
    """Sent as it is, instead of ``body``."""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return bool(self.body and self.body.get("stream") is True)


def ask(url: str, request: Request) -> dict[str, Any]:
    """The server's normalised answer: ``status``, ``type`` and ``body`` or ``stream``."""
    return _ask_openai(url, request) if request.client == "openai" else _ask_httpx(url, request)


@functools.cache
def _httpx_client(url: str) -> httpx.Client:
    limits = httpx.Limits(max_connections=None)
    return httpx.Client(base_url=url, timeout=REQUEST_S, limits=limits, headers=CLOSE)


@functools.cache
def _openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        timeout=REQUEST_S,
        max_retries=0,
        default_headers=CLOSE,
    )


def _ask_httpx(url: str, request: Request) -> dict[str, Any]:
    client = _httpx_client(url)
    payload = {"content": request.raw} if request.raw is not None else {"json": request.body}
    if request.raw is None and request.body is None:
        payload = {}
    response = client.request(request.method, request.path, headers=request.headers, **payload)
    answer = {
        "status": response.status_code,
        "type": response.headers.get("content-type"),
        "allow": response.headers.get("allow"),
    }
    if (answer["type"] or "").startswith("text/event-stream"):
        return {**answer, "stream": fold_stream(_sse_events(response.text))}
    return {**answer, "body": normalised(_json_or_text(response))}


def _ask_openai(url: str, request: Request) -> dict[str, Any]:
    assert request.body is not None
    client = _openai_client(url)
    resources = {
        "/v1/completions": client.completions,
        "/v1/chat/completions": client.chat.completions,
        "/v1/responses": client.responses,
    }
    create = resources[request.path].create
    known = inspect.signature(create).parameters
    own = {key: value for key, value in request.body.items() if key in known}
    extra = {key: value for key, value in request.body.items() if key not in known}
    try:
        result = create(**own, extra_body=extra)
        if request.streams:
            events = [_dumped(chunk) for chunk in result]
            return {"status": 200, "stream": fold_stream([*events, "[DONE]"])}
    except openai.APIStatusError as error:
        return {"status": error.status_code, "body": normalised(_json_or_text(error.response))}
    return {"status": 200, "body": normalised(_dumped(result))}


def _dumped(model: Any) -> dict[str, Any]:
    # Some fields of vLLM's answers are no member of the union that the client declares.
    return model.model_dump(mode="json", exclude_unset=True, warnings=False)


def _json_or_text(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text


def normalised(value: Any) -> Any:
    """``value`` without random ids and times."""
    if isinstance(value, dict):
        return {key: normalised(item) for key, item in value.items() if key not in TIMES}
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if isinstance(value, str):
        return "<id>" if RANDOM_ID.fullmatch(value) else TIME_OF_DAY.sub("", value)
    return value


# --- streams -------------------------------------------------------------------------------------


def _sse_events(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def fold_stream(events: list[Any]) -> dict[str, Any]:
    """One value for a stream, the same wherever it was cut.

    Chunks of completions become one chunk. Typed events (Responses, Messages) become the list of
    them with neighbours of one type joined. ``usage_on`` says which chunks carried usage.
    """
    done = bool(events) and events[-1] == "[DONE]"
    chunks = [normalised(event) for event in events if event != "[DONE]"]
    if chunks and "type" in chunks[0]:
        return {"done": done, "events": _fold_typed(chunks)}
    folded: dict[str, Any] = {}
    for chunk in chunks:
        folded = _fold(folded, chunk)
    return {"done": done, "usage_on": _usage_on(chunks), "chunk": folded}


def _fold_typed(events: list[dict]) -> list[dict]:
    folded: list[dict] = []
    for event in events:
        if folded and folded[-1].get("type") == event.get("type"):
            folded[-1] = _fold(folded[-1], event)
        else:
            folded.append(event)
    return folded


def _usage_on(chunks: list[dict]) -> str:
    carries = [bool(chunk.get("usage")) for chunk in chunks]
    if all(carries):
        return "every chunk"
    if not any(carries):
        return "no chunk"
    return "the last chunk" if carries.index(True) == len(carries) - 1 else "some chunks"


def _fold(into: Any, new: Any, key: str = "") -> Any:
    if new is None or into is None:
        return into if new is None else new
    if isinstance(into, dict) and isinstance(new, dict):
        merged = dict(into)
        for name, item in new.items():
            merged[name] = _fold(into.get(name), item, name)
        return merged
    if isinstance(into, list) and isinstance(new, list):
        return _fold_lists(into, new)
    if isinstance(into, str) and isinstance(new, str) and key in GROWS:
        return into + new
    return new


def _fold_lists(into: list, new: list) -> list:
    if not all(isinstance(item, dict) and "index" in item for item in into + new):
        return into + new
    by_index = {item["index"]: item for item in into}
    for item in new:
        by_index[item["index"]] = _fold(by_index.get(item["index"]), item)
    return [by_index[index] for index in sorted(by_index)]


# --- comparing -----------------------------------------------------------------------------------


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """One line per place where ``found`` is not ``expected``; numbers may differ by a rounding."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = sorted(expected.keys() | found.keys())
        missing = object()
        return [
            line
            for key in keys
            for line in differences(
                expected.get(key, missing), found.get(key, missing), f"{where}.{key}"
            )
        ]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{where}[{i}]")]
    if isinstance(expected, float) and isinstance(found, float):
        if math.isclose(expected, found, rel_tol=0, abs_tol=LOGPROB_TOLERANCE):
            return []
    elif expected == found and type(expected) is type(found):
        return []
    return [f"{where}: the twin answers {expected!r}, the node {found!r}"]


def without_cached(answer: Any) -> Any:
    """The answer less ``cached_tokens``: in a crowd, which of two siblings finds the other's blocks
    is a matter of timing, on plain vLLM too."""
    if isinstance(answer, dict):
        return {key: without_cached(of) for key, of in answer.items() if key != "cached_tokens"}
    return [without_cached(one) for one in answer] if isinstance(answer, list) else answer
