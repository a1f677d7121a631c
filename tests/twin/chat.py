"""A conversation of many turns, as token ids: what was computed before, nobody computes again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

from bench.servers import MODEL_NAME, Node
from tests.twin.cases import BLOCK, ids
from tests.twin.replay import Request, ask

TURNS = 12
TURN_TOKENS = (150, 40, 90, 130)
"""What the user says, in turn; with 12 turns' answers it fits the model's context."""
ANSWER_TOKENS = 45


@dataclass(frozen=True)
class Turn:
    said: list[int]
    answer: list[int]
    text: str


def said(number: int) -> list[int]:
    return ids(random.Random(f"chat turn {number}"), TURN_TOKENS[number % len(TURN_TOKENS)])


def talk(url: str, salt: str, before_turn: Callable[[int], None] = lambda number: None):
    """The conversation: (turns, prompt tokens that were computed in each)."""
    history: list[int] = []
    turns, computed = [], []
    for number in range(TURNS):
        before_turn(number)
        history = history + said(number)
        answer = _complete(url, history, salt)
        choice, usage = answer["choices"][0], answer["usage"]
        cached = (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
        computed.append(usage["prompt_tokens"] - cached)
        turns.append(Turn(said(number), choice["token_ids"], choice["text"]))
        history = history + choice["token_ids"]
    return turns, computed


def _complete(url: str, prompt: list[int], salt: str) -> dict:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True, "cache_salt": salt}
    answer = ask(url, Request("/v1/completions", body))
    assert answer["status"] == 200, answer
    return answer["body"]


def siblings(url: str) -> dict:
    """Four choices of one long prompt: how much of it was computed is in ``usage``."""
    prompt = ids(random.Random("siblings"), 5 * BLOCK + 9)
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "n": 4,
        "max_tokens": 6,
        "temperature": 1,
        "top_k": 1,
    }
    answer = ask(url, Request("/v1/completions", body))
    assert answer["status"] == 200, answer
    return answer["body"]


def assert_little_was_computed(computed: list[int]) -> None:
    limits = [len(said(number)) + BLOCK for number in range(TURNS)]
    too_much = [
        f"turn {number + 1}: {tokens} prompt tokens computed, at most {limit} needed"
        for number, (tokens, limit) in enumerate(zip(computed, limits, strict=True))
        if number and tokens > limit
    ]
    assert not too_much, "\n".join(too_much)


def hopping(node: Node) -> Callable[[int], None]:
    """Before each turn another engine is the only one that computes prompts."""
    engines = [engine["id"] for engine in node.status()["engines"]]

    def give_roles(number: int) -> None:
        for i, engine in enumerate(engines):
            role = "prefill" if i == number % len(engines) else "decode"
            set_role(node, engine, role)

    return give_roles


def set_role(node: Node, engine: str, role: str) -> None:
    response = node.http.post("/pd/role", json={"engine": engine, "role": role})
    assert response.status_code == 200, response.text


def talk_while_roles_flip(node: Node, talkers: int, pause_s: float, flips: int) -> list:
    """Conversations during ``flips`` role changes: each talker begins another until all are made."""
    enough = threading.Event()

    def talk_on(talker: int) -> list:
        talked = []
        while not talked or not enough.is_set():
            talked.append(talk(node.url, f"flips {talker} {len(talked)}"))
        return talked

    with ThreadPoolExecutor(talkers) as pool:
        talking = [pool.submit(talk_on, talker) for talker in range(talkers)]
        try:
            for number in range(flips):
                if wait(talking, pause_s, FIRST_COMPLETED).done:
                    break  # a talker that ends before it may has failed, and says why below
                set_role(node, "prefill-1", ("decode", "prefill")[number % 2])
        finally:
            enough.set()
    return [conversation for each in talking for conversation in each.result()]


def roles_as_started(node: Node) -> None:
    for engine in node.status()["engines"]:
        set_role(node, engine["id"], engine["id"].partition("-")[0])
