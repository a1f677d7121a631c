"""Every request that the node and its twin must answer alike, and its way through the node.

A body may depend on what the twin answers to something else (a stop string has to be part of the
greedy answer), so it is built once, while the twin runs, by a function of an :class:`Oracle`. The
node is then sent the same bytes. Each case has prompts of its own, seeded by its name: a prompt
seen before would be found in D's prefix cache and nothing would be handed over.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from bench.servers import MAX_MODEL_LEN
from bench.servers import MODEL_NAME as MODEL
from bench.tiny_models import EOS_ID
from tests.twin.replay import Request, ask

BLOCK = 128
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"

LONE_CHARACTERS = "ZXQVKJ#@%&^~|$"
"""Not in the tokenizer's corpus, so no merge has them: each is one token, also side by side."""
MERGED_IDS = range(260, 500)
"""Ids whose text is whole: a prompt that ends inside a UTF-8 sequence shifts vLLM's detokenizer."""
BYTE_IDS = range(3, 259)
CHAT_LENGTH = 150


class Way(Enum):
    """What a case does in the node."""

    SPLIT = "P's token is token 1, D goes on from there"
    RESAMPLED = "D samples token 1 itself"
    ENDS_ON_P = "token 1 is the last one, D gets nothing"
    RACES = "the front end ends it at token 1, when D may or may not have begun"
    WHOLE = "one engine does all of it"
    NOWHERE = "no engine hears of it"
    MANY = "the front end makes engine requests of it as it likes"


class Oracle:
    """Asks the running twin for what a body is built from. Leaves nothing in its prefix cache."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, body: dict) -> dict:
        answer = ask(self._url, Request(path, {"model": MODEL, **body}))
        assert answer["status"] == 200, answer
        return answer["body"]

    def greedy(self, prompt: list[int], tokens: int) -> list[tuple[int, str]]:
        """(id, text) of each token of the twin's own answer; fewer where EOS comes first."""
        choice = self.post(
            COMPLETIONS,
            {
                "prompt": prompt,
                "max_tokens": tokens,
                "temperature": 0,
                "logprobs": 0,
                "return_token_ids": True,
                "cache_salt": "oracle",
            },
        )["choices"][0]
        return list(zip(choice["token_ids"], choice["logprobs"]["tokens"], strict=True))

    def count(self, body: dict) -> int:
        kept = {key: body[key] for key in ("prompt", "messages", "tools") if key in body}
        return self.post("/tokenize", kept)["count"]

    def prompt_lengths(self, request: Request) -> list[int]:
        """Tokens of each prompt in the request."""
        body = request.body or {}
        if "messages" in body and isinstance(body["messages"][0], list):
            return [self.count({"messages": messages}) for messages in body["messages"]]
        if "messages" in body:
            return [self.count(body)]
        if "input" in body:
            return [self.count({"messages": [{"role": "user", "content": body["input"]}]})]
        prompt = body["prompt"]
        if isinstance(prompt, str):
            return [self.count({"prompt": prompt})]
        if isinstance(prompt[0], int):
            return [len(prompt)]
        return [len(p) if isinstance(p, list) else self.count({"prompt": p}) for p in prompt]

    def prompt_with_readable_answer(
        self, rng: random.Random, tokens: int
    ) -> tuple[list[int], list]:
        """A prompt whose greedy answer begins with ``tokens`` tokens of plain text, and those."""
        for _ in range(1000):
            prompt = ids(rng, BLOCK + 2)
            answer = self.greedy(prompt, tokens)
            texts = [text for _, text in answer]
            if len(texts) == tokens and all(t.isascii() and t.isprintable() and t for t in texts):
                return prompt, answer
        raise AssertionError("no prompt of 1000 has a readable answer")


def ids(rng: random.Random, length: int, among: range = MERGED_IDS) -> list[int]:
    return [rng.choice(among) for _ in range(length)]


def characters(rng: random.Random, length: int) -> str:
    """Text of exactly ``length`` tokens."""
    return "".join(rng.choice(LONE_CHARACTERS) for _ in range(length))


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


Build = Callable[[random.Random, Oracle], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    build: Build | None = None
    way: Way = Way.SPLIT
    reason: str = ""
    """The counter that a WHOLE case must raise."""
    method: str = "POST"
    client: str = "httpx"
    raw: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200
    shows: Callable[[dict], bool] | None = None
    """True for an answer in which the case's point can be seen: two empty answers are equal too."""

    def request(self, oracle: Oracle) -> Request:
        body = self.build(random.Random(self.name), oracle) if self.build else None
        if body is not None:
            body = {"model": MODEL, **body}
        return Request(self.path, body, self.method, self.client, self.raw, self.headers)


# --- reading answers -----------------------------------------------------------------------------


def choices(answer: dict) -> list[dict]:
    return (answer["stream"]["chunk"] if "stream" in answer else answer["body"])["choices"]


def token_counts(answer: dict) -> list[int]:
    return [len(choice["token_ids"]) for choice in choices(answer)]


def calls_paint(answer: dict) -> bool:
    choice = choices(answer)[0]
    message = choice.get("message") or choice["delta"]
    call = (message.get("tool_calls") or [{}])[0].get("function", {})
    return call.get("name") == "paint" and "color" in call["arguments"]


def finished(reason: str) -> Callable[[dict], bool]:
    return lambda answer: all(c["finish_reason"] == reason for c in choices(answer))


# --- the cases -----------------------------------------------------------------------------------


def fixed(**body: Any) -> Build:
    """The same body whatever the oracle says, with a fresh prompt of BLOCK + 2 ids."""
    return sized(BLOCK + 2, **body)


def chat(length: int = CHAT_LENGTH, **body: Any) -> Build:
    """A chat whose prompt has exactly ``length`` tokens, template included."""

    def build(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
        around = oracle.count({"messages": user("")})
        messages = user(characters(rng, length - around))
        return {"messages": messages, "temperature": 0, **body}

    return build


def sized(length: int, **body: Any) -> Build:
    return lambda rng, oracle: {"prompt": ids(rng, length), "temperature": 0, **body}


DETAILED = {"return_token_ids": True, "logprobs": 3}
CHAT_DETAILED = {"return_token_ids": True, "logprobs": True, "top_logprobs": 3}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def whole_reason(prompt_tokens: int, max_tokens: int | None) -> str:
    if max_tokens == 1 or prompt_tokens == MAX_MODEL_LEN - 1:
        return "max_tokens_1"  # vLLM itself lowers max_tokens to what the context leaves
    return "short_prompt" if prompt_tokens < BLOCK else ""


def length_cases() -> list[Case]:
    """Prompts around the block size and at the context's end, with few, many and no max_tokens."""
    cases = []
    for length in (1, 2, 127, 128, 129, 1000, MAX_MODEL_LEN - 1):
        for max_tokens in (1, 2, 200, None):
            reason = whole_reason(length, max_tokens)
            limit = {} if max_tokens is None else {"max_tokens": max_tokens}
            way = Way.WHOLE if reason else Way.SPLIT
            label = f"prompt_{length}-max_tokens_{max_tokens or 'absent'}"
            cases += [
                Case(
                    f"completion-{label}-{kind}",
                    COMPLETIONS,
                    sized(length, **limit, **DETAILED, **more),
                    way,
                    reason,
                    client="openai",
                )
                for kind, more in (("at_once", {}), ("streamed", STREAMED))
            ]
    return cases


def chat_length_cases() -> list[Case]:
    cases = []
    for length, max_tokens in (
        (127, 2),
        (128, 1),
        (128, 2),
        (129, 200),
        (1000, 200),
        (MAX_MODEL_LEN - 150, None),
        (MAX_MODEL_LEN - 1, None),
    ):
        reason = whole_reason(length, max_tokens)
        limit = {} if max_tokens is None else {"max_tokens": max_tokens}
        way = Way.WHOLE if reason else Way.SPLIT
        label = f"prompt_{length}-max_tokens_{max_tokens or 'absent'}"
        cases += [
            Case(
                f"chat-{label}-{kind}",
                CHAT,
                chat(length, **limit, **CHAT_DETAILED, **more),
                way,
                reason,
                client="openai",
            )
            for kind, more in (("at_once", {}), ("streamed", STREAMED))
        ]
    return cases


STOPS: dict[str, Callable[[list[str]], str]] = {
    "token_1": lambda t: t[0],
    "tokens_1_and_2": lambda t: t[0] + t[1][0],
    "tokens_1_to_3": lambda t: t[0] + t[1] + t[2][0],
    "tokens_3_to_5": lambda t: t[2] + t[3] + t[4][0],
}


def stop_case(name: str, stop: Callable[[list[str]], str], include: bool, stream: bool) -> Case:
    def build(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
        prompt, answer = oracle.prompt_with_readable_answer(rng, 5)
        wanted = stop([text for _, text in answer])
        return {
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 40,
            "stop": [wanted, "never said"],
            "include_stop_str_in_output": include,
            **DETAILED,
            **(STREAMED if stream else {}),
        }

    kinds = ("included" if include else "cut", "streamed" if stream else "at_once")
    way = Way.RACES if name == "token_1" else Way.SPLIT
    return Case(f"stop-{name}-{'-'.join(kinds)}", COMPLETIONS, build, way, shows=finished("stop"))


def stop_cases() -> list[Case]:
    return [
        stop_case(name, stop, include, stream)
        for name, stop in STOPS.items()
        for include in (False, True)
        for stream in (False, True)
    ]


def stop_token_case(which: int, way: Way) -> Case:
    def build(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
        prompt = ids(rng, BLOCK + 2)
        token, _ = oracle.greedy(prompt, which)[-1]
        return {
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 40,
            "stop_token_ids": [token],
            **DETAILED,
        }

    return Case(f"stop_token-{which}", COMPLETIONS, build, way, shows=finished("stop"))


ALWAYS_EOS = {"logit_bias": {str(EOS_ID): 100}}


def ending_cases() -> list[Case]:
    return [
        stop_token_case(1, Way.ENDS_ON_P),
        stop_token_case(2, Way.SPLIT),
        *(
            Case(
                f"eos_first-{kind}",
                COMPLETIONS,
                fixed(max_tokens=40, **ALWAYS_EOS, **DETAILED, **more),
                Way.ENDS_ON_P,
                shows=lambda a: token_counts(a) == [1] and finished("stop")(a),
            )
            for kind, more in (("at_once", {}), ("streamed", STREAMED))
        ),
        Case(
            "eos_first-chat",
            CHAT,
            chat(max_tokens=40, **ALWAYS_EOS, **CHAT_DETAILED),
            Way.ENDS_ON_P,
            client="openai",
            shows=finished("stop"),
        ),
        Case(
            "ignore_eos",
            COMPLETIONS,
            fixed(max_tokens=40, ignore_eos=True, **ALWAYS_EOS, **DETAILED),
            shows=lambda a: token_counts(a) == [40],
        ),
        Case(
            "min_tokens",
            COMPLETIONS,
            fixed(max_tokens=40, min_tokens=5, **ALWAYS_EOS, **DETAILED),
            Way.RESAMPLED,
            shows=lambda a: token_counts(a) == [6],
        ),
        Case(
            "min_tokens-streamed",
            COMPLETIONS,
            fixed(max_tokens=40, min_tokens=1, **ALWAYS_EOS, **DETAILED, **STREAMED),
            Way.RESAMPLED,
            shows=lambda a: token_counts(a) == [2],
        ),
    ]


def sampling_case(name: str, way: Way = Way.RESAMPLED, **body: Any) -> Case:
    return Case(name, COMPLETIONS, fixed(**{"max_tokens": 40, **DETAILED, **body}), way)


def banning_case(name: str, field_name: str, *, first: bool) -> Case:
    """Forbids (or allows only) tokens of the twin's free answer, so that the answer must change."""

    def build(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
        prompt, answer = oracle.prompt_with_readable_answer(rng, 3)
        token, text = answer[0 if first else 1]
        value = {
            "bad_words": [text],
            "allowed_token_ids": [t for t in MERGED_IDS if t != token],
            "logit_bias": {str(token): -100, "300": 5},
        }[field_name]
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 40, field_name: value}
        return {**body, **DETAILED}

    way = Way.RESAMPLED if field_name == "bad_words" else Way.SPLIT
    return Case(name, COMPLETIONS, build, way)


def sampling_cases() -> list[Case]:
    hot = {"temperature": 1, "seed": 1234}
    return [
        sampling_case("seed", **hot),
        sampling_case("seed-top_p-top_k-min_p", **hot, top_p=0.9, top_k=20, min_p=0.01),
        sampling_case("seed-streamed", **hot, **STREAMED),
        sampling_case("seed-greedy", Way.SPLIT, seed=1234),
        Case(
            "seed-chat",
            CHAT,
            chat(max_tokens=40, **CHAT_DETAILED, **hot),
            Way.RESAMPLED,
            client="openai",
        ),
        sampling_case("presence_penalty", presence_penalty=1.5),
        sampling_case("frequency_penalty", frequency_penalty=1.5),
        sampling_case("repetition_penalty", repetition_penalty=1.8),
        sampling_case("penalties-streamed", frequency_penalty=1.0, presence_penalty=1, **STREAMED),
        banning_case("bad_words-first", "bad_words", first=True),
        banning_case("bad_words-second", "bad_words", first=False),
        banning_case("allowed_token_ids-first", "allowed_token_ids", first=True),
        banning_case("logit_bias-first", "logit_bias", first=True),
        banning_case("logit_bias-second", "logit_bias", first=False),
        sampling_case("n_4", **hot, n=4),
        sampling_case("n_4-streamed", **hot, n=4, **STREAMED),
        Case(
            "n_4-chat",
            CHAT,
            chat(max_tokens=40, n=4, **CHAT_DETAILED, **hot),
            Way.RESAMPLED,
            client="openai",
        ),
        Case(
            "beam_search",
            COMPLETIONS,
            fixed(max_tokens=5, n=2, use_beam_search=True, temperature=0),
            Way.MANY,
        ),
    ]


def logprob_cases() -> list[Case]:
    return [
        sampling_case("logprobs-0", Way.SPLIT, logprobs=0),
        sampling_case("logprobs-20", Way.SPLIT, logprobs=20),
        Case("logprobs-chat_none", CHAT, chat(max_tokens=40, logprobs=True), client="openai"),
        Case(
            "logprobs-chat_20",
            CHAT,
            chat(max_tokens=40, logprobs=True, top_logprobs=20),
            client="openai",
        ),
        Case(
            "prompt_logprobs",
            COMPLETIONS,
            fixed(max_tokens=40, prompt_logprobs=2),
            Way.WHOLE,
            "prompt_logprobs",
            shows=lambda a: len(choices(a)[0]["prompt_logprobs"]) == BLOCK + 2,
        ),
        Case(
            "prompt_logprobs-chat",
            CHAT,
            chat(max_tokens=40, prompt_logprobs=2),
            Way.WHOLE,
            "prompt_logprobs",
        ),
        Case("echo", COMPLETIONS, fixed(max_tokens=40, echo=True), client="openai"),
        Case(
            "echo-streamed",
            COMPLETIONS,
            fixed(max_tokens=40, echo=True, **STREAMED),
            client="openai",
        ),
        Case(
            "echo-logprobs",
            COMPLETIONS,
            fixed(max_tokens=40, echo=True, logprobs=2),
            Way.WHOLE,
            "prompt_logprobs",
            client="openai",
        ),
    ]


def list_cases() -> list[Case]:
    def eight_lists(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
        prompts = [ids(rng, length) for length in (128, 129, 130, 200, 256, 257, 400, 500)]
        return {"prompt": prompts, "temperature": 0, "max_tokens": 20, **DETAILED}

    def eight_strings(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
        prompts = [characters(rng, 128 + 10 * i) for i in range(8)]
        return {"prompt": prompts, "temperature": 0, "max_tokens": 20, **DETAILED}

    def streamed(build: Build) -> Build:
        return lambda rng, oracle: {**build(rng, oracle), **STREAMED}

    return [
        Case("list_of_ids", COMPLETIONS, eight_lists, client="openai"),
        Case("list_of_strings", COMPLETIONS, eight_strings, client="openai"),
        Case("list_of_ids-streamed", COMPLETIONS, streamed(eight_lists), client="openai"),
        Case("list_of_strings-streamed", COMPLETIONS, streamed(eight_strings), client="openai"),
        Case(
            "string",
            COMPLETIONS,
            lambda rng, oracle: {
                "prompt": characters(rng, 300),
                "temperature": 0,
                "max_tokens": 20,
            },
            client="openai",
        ),
        Case(
            "bytes_that_are_no_text",
            COMPLETIONS,
            lambda rng, oracle: {
                "prompt": ids(rng, 300, BYTE_IDS),
                "temperature": 0,
                "max_tokens": 40,
                **DETAILED,
                **STREAMED,
            },
        ),
    ]


COLOR = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "good": {"type": "boolean"}},
    "required": ["color", "good"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "color", "schema": COLOR}}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": COLOR, "strict": True}}
PAINT = {"type": "function", "function": {"name": "paint"}}


def grammar_cases() -> list[Case]:
    def constrained(name: str, path: str, **body: Any) -> Case:
        build = (chat if path == CHAT else fixed)(max_tokens=60, **body)
        return Case(name, path, build, Way.RESAMPLED, shows=finished("stop"))

    return [
        *(
            constrained(f"json_schema-{kind}", CHAT, response_format=JSON_SCHEMA, **more)
            for kind, more in (("at_once", {}), ("streamed", STREAMED))
        ),
        constrained("json_object", CHAT, response_format={"type": "json_object"}),
        constrained("choice", COMPLETIONS, structured_outputs={"choice": ["red", "green"]}),
        constrained("choice-chat", CHAT, structured_outputs={"choice": ["red", "green"]}),
        constrained("regex", COMPLETIONS, structured_outputs={"regex": "[a-f]{12}"}),
        constrained(
            "regex-streamed", COMPLETIONS, structured_outputs={"regex": "[a-f]{12}"}, **STREAMED
        ),
    ]


def without_white_space(build: Build) -> Build:
    """A tool's grammar always allows it, and random weights would go on with it for ever."""

    def built(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
        blanks = oracle.post("/tokenize", {"prompt": "\t\n\r "})["tokens"]
        return {**build(rng, oracle), "logit_bias": {str(blank): -100 for blank in blanks}}

    return built


def tool_cases() -> list[Case]:
    cases = []
    for kind, more in (("at_once", {}), ("streamed", STREAMED)):
        for choice, value, way in (
            ("auto", "auto", Way.SPLIT),
            ("none", "none", Way.SPLIT),
            ("required", "required", Way.RESAMPLED),
            ("named", PAINT, Way.RESAMPLED),
        ):
            build = chat(max_tokens=80, tools=[TOOL], tool_choice=value, **more)
            shows = calls_paint if choice in ("required", "named") else None
            name = f"tools-{choice}-{kind}"
            build = without_white_space(build)
            cases.append(Case(name, CHAT, build, way, client="openai", shows=shows))
    return cases


def usage_cases() -> list[Case]:
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    return [
        Case(
            f"usage_{name}-{kind}",
            path,
            build(max_tokens=20, stream=True, **more),
            client="openai",
            shows=lambda a, on=on: a["stream"]["usage_on"] == on,
        )
        for kind, path, build in (("completion", COMPLETIONS, fixed), ("chat", CHAT, chat))
        for name, more, on in (
            ("not_asked", {}, "no chunk"),
            ("at_the_end", {"stream_options": {"include_usage": True}}, "the last chunk"),
            ("continuous", {"stream_options": continuous}, "every chunk"),
        )
    ]


def other_route_cases() -> list[Case]:
    def response(**body: Any) -> Build:
        return lambda rng, oracle: {"input": characters(rng, 200), "temperature": 0, **body}

    def chat_pair(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
        pair = [user(characters(rng, 150)), user(characters(rng, 160))]
        return {"messages": pair, "temperature": 0, "max_tokens": 8}

    return [
        Case("responses", RESPONSES, response(max_output_tokens=30), client="openai"),
        Case("responses-no_limit", RESPONSES, response(max_output_tokens=200)),
        Case("responses-streamed", RESPONSES, response(max_output_tokens=30, stream=True)),
        Case(
            "messages",
            "/v1/messages",
            chat(max_tokens=30),
            client="httpx",
        ),
        Case("messages-streamed", "/v1/messages", chat(max_tokens=30, stream=True)),
        Case("chat_batch", "/v1/chat/completions/batch", chat_pair),
        Case(
            "tokenize",
            "/tokenize",
            lambda rng, oracle: {"prompt": characters(rng, 50), "return_token_strs": True},
            Way.NOWHERE,
        ),
        Case("tokenize-chat", "/tokenize", chat(), Way.NOWHERE),
        Case(
            "detokenize",
            "/detokenize",
            lambda rng, oracle: {"tokens": ids(rng, 50)},
            Way.NOWHERE,
        ),
        Case("models", "/v1/models", way=Way.NOWHERE, method="GET"),
        Case("version", "/version", way=Way.NOWHERE, method="GET"),
        Case("health", "/health", way=Way.NOWHERE, method="GET"),
    ]


KV_PARAMS = {"do_remote_prefill": True, "transfer_id": "x", "remote_slot": 0}


def foreign_parameter_cases() -> list[Case]:
    """Hand-off parameters are the node's own; plain vLLM without a connector ignores them too."""
    asking = {"kv_transfer_params": KV_PARAMS}
    offering = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "y"}}
    return [
        Case("kv_params-remote_prefill", COMPLETIONS, fixed(max_tokens=20, **asking, **DETAILED)),
        Case("kv_params-remote_decode", COMPLETIONS, fixed(max_tokens=20, **offering, **DETAILED)),
        Case("kv_params-chat", CHAT, chat(max_tokens=20, **asking), client="openai"),
        Case(
            "kv_params-on_one_engine",
            COMPLETIONS,
            sized(50, max_tokens=20, **offering),
            Way.WHOLE,
            "short_prompt",
        ),
    ]


JSON_TYPE = {"content-type": "application/json"}


def refused_cases() -> list[Case]:
    def refused(
        name: str, path: str, build: Build, status: int = 400, client: str = "openai"
    ) -> Case:
        return Case(f"bad-{name}", path, build, Way.NOWHERE, client=client, status=status)

    def raw(name: str, content: bytes, headers: dict, path: str = COMPLETIONS) -> Case:
        return Case(f"bad-{name}", path, way=Way.NOWHERE, raw=content, headers=headers, status=400)

    return [
        refused("too_long", COMPLETIONS, sized(MAX_MODEL_LEN)),
        refused("too_long-streamed", COMPLETIONS, sized(MAX_MODEL_LEN + 5, stream=True)),
        refused("too_long-chat", CHAT, chat(MAX_MODEL_LEN + 1)),
        refused("temperature", COMPLETIONS, fixed(temperature=-1)),
        refused("max_tokens", COMPLETIONS, fixed(max_tokens=0)),
        refused("max_tokens-type", COMPLETIONS, fixed(max_tokens="many")),
        refused("logprobs", COMPLETIONS, fixed(logprobs=99)),
        refused("n", COMPLETIONS, fixed(n=0)),
        refused("top_p-chat", CHAT, chat(top_p=7)),
        refused("token_id", COMPLETIONS, lambda rng, oracle: {"prompt": [99999]}),
        refused("no_prompt", COMPLETIONS, lambda rng, oracle: {"prompt": []}),
        refused("no_messages", CHAT, lambda rng, oracle: {"messages": []}),
        refused("role_only", CHAT, lambda rng, oracle: {"messages": [{"content": "x"}]}),
        refused("grammar", COMPLETIONS, fixed(structured_outputs={"regex": "[a-"})),
        refused("prompt_logprobs-streamed", COMPLETIONS, fixed(prompt_logprobs=1, stream=True)),
        refused(
            "prompt_embeds",
            COMPLETIONS,
            lambda rng, oracle: {"prompt_embeds": "AAAA"},
            client="httpx",
        ),
        refused("model", COMPLETIONS, fixed(model="another"), 404),
        refused("model-chat", CHAT, chat(model="another"), 404),
        raw("empty_body", b"", {}),
        raw("empty_json_body", b"", JSON_TYPE),
        raw("empty_object", b"{}", JSON_TYPE),
        raw("empty_object-chat", b"{}", JSON_TYPE, CHAT),
        raw("broken_json", b'{"model": "tiny", ', JSON_TYPE),
        raw("broken_json-chat", b"[", JSON_TYPE, CHAT),
        raw("no_json", b"prompt=hello", {"content-type": "application/x-www-form-urlencoded"}),
        Case("bad-route", "/v1/nothing", way=Way.NOWHERE, raw=b"{}", headers=JSON_TYPE, status=404),
        Case("bad-method", COMPLETIONS, way=Way.NOWHERE, method="GET", status=405),
        Case(
            "bad-embeddings",
            "/v1/embeddings",
            lambda rng, oracle: {"input": "x"},
            Way.NOWHERE,
            status=404,
        ),
    ]


CASES: tuple[Case, ...] = (
    *length_cases(),
    *chat_length_cases(),
    *stop_cases(),
    *ending_cases(),
    *sampling_cases(),
    *logprob_cases(),
    *list_cases(),
    *grammar_cases(),
    *tool_cases(),
    *usage_cases(),
    *other_route_cases(),
    *foreign_parameter_cases(),
    *refused_cases(),
)

BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES)

CROWD_SIZE = 64


def crowd_case(number: int) -> Case:
    """One of the requests that are sent at once: short, one block, long, some of them streams."""
    kind = ("short", "one_block", "long", "chat")[number % 4]
    more = STREAMED if number % 8 >= 4 else {}
    body = {"max_tokens": 8 + number % 5 * 10, "return_token_ids": True, **more}

    def build(rng: random.Random, oracle: Oracle) -> dict[str, Any]:
        lengths = {
            "short": rng.randrange(1, BLOCK),
            "one_block": BLOCK,
            "long": rng.randrange(BLOCK + 1, MAX_MODEL_LEN - 100),
            "chat": rng.randrange(100, 1000),
        }
        maker = chat if kind == "chat" else sized
        return maker(lengths[kind], **body)(rng, oracle)

    return Case(f"crowd-{number:02}-{kind}", CHAT if kind == "chat" else COMPLETIONS, build)


CROWD = tuple(crowd_case(number) for number in range(CROWD_SIZE))
