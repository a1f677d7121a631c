"""Where a request runs. Pure: facts + a snapshot of the engines -> a plan, or a decline.

Nothing here waits, sends or remembers; the same facts and view give the same plan.

    hard reasons (answer needs one engine, a side is missing)  ->  one engine
    split = never                                              ->  any engine, all are replicas
    constants unknown                                          ->  split, shortest queues
    otherwise: the least milliseconds, own time + what running streams lose, of
        P for the prompt, D for the rest      (always, auto)
        D for all of it                       (auto, unless P idles and D holds no more of the prompt)

P and D of a split are chosen apart: what P costs does not depend on D, nor the reverse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import add, attrgetter
from typing import Literal, NamedTuple

from pdnode import estimate, turns
from pdnode.estimate import Ahead, Constants, Estimates
from pdnode.token1 import Token1

PREFILL, DECODE = "prefill", "decode"

Policy = Literal["round-robin", "least-loaded", "prefix-aware"]
Split = Literal["always", "auto", "never"]
POLICIES: tuple[Policy, ...] = ("round-robin", "least-loaded", "prefix-aware")
SPLITS: tuple[Split, ...] = ("always", "auto", "never")

REASONS = (
    # split
    "split_faster", "idle_prefill", "split_always", "split_unmeasured",
    # one engine, by choice
    "idle_decode", "prefix_on_decode", "whole_faster", "split_never",
    # one engine, because it must be
    "short_prompt", "max_tokens_1", "full_context", "no_prefill_engine", "no_decode_engine",
)  # fmt: skip
"""And the field or input that a request cannot be split for (``Facts.whole``, ``token1_field``)."""
DECLINES = ("no_engine_ready",)

SLOWED = 0.2
"""What a millisecond counts by which a stream comes later, step by step and within what a step may
take (``turns.STEADY``), beside one that it stands still."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What placement needs to know of a request. Lengths in tokens."""

    prompt_tokens: int
    max_tokens: int
    token1: Token1 = Token1.FORWARD
    token1_field: str = ""
    whole: str = ""
    """Why the request cannot be split whatever the load ("" when it can)."""
    cached: Mapping[int, int] = field(default_factory=dict)
    """slot -> tokens of this prompt whose KV that engine holds, or will when it gets there."""
    readable: Mapping[int, int] = field(default_factory=dict)
    """slot -> tokens of this prompt whose KV a peer can copy from that engine now."""
    sibling: int | None = None
    """The engine that is to compute, or computes, all of this prompt for another request."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine at one moment. ``queued_tokens``: prompt tokens sent and not yet answered."""

    slot: int
    role: str
    ready: bool
    requests: int = 0
    queued_tokens: int = 0
    queued_ms: float | None = None
    """The same work by its estimates; better, for it knows what is cached. None: not known."""
    queue: tuple[Ahead, ...] = ()
    """That work prompt by prompt, in the order of their deadlines; () when it is not known."""
    streams: int | None = None
    """Requests past their first token here. None: all requests of a D, none of a P."""
    free_tokens: int | None = None
    """KV room, what is only cached included. None: not known, taken as enough."""
    unused_tokens: int = 0
    """KV room that holds nothing yet, so that filling it pushes nothing out."""
    constants: Constants | None = None


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    prefill_policy: Policy = "prefix-aware"
    decode_policy: Policy = "prefix-aware"
    split: Split = "auto"
    stretch: float = 0.0
    """Prompts are computed by deadline (:mod:`pdnode.turns`); 0: in the order in which they came."""
    share_prefixes: bool = False
    """An engine can copy a prefix that it lacks from any engine that holds it."""


@dataclass(frozen=True, slots=True)
class NodeView:
    engines: tuple[EngineView, ...]
    block_size: int
    max_model_len: int
    config: PlacementConfig = PlacementConfig()
    arrivals_per_ms: float = 0.0
    """Requests that come to the node, lately."""
    turn: int = 0
    """Requests placed so far: whose turn it is under round-robin."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``prefill is None``: one engine, ``decode``, does all of it, for ``reason``."""

    prefill: int | None
    decode: int
    token1: Token1
    reason: str = ""
    prefix_from: int | None = None
    """Whom the engine that computes the prompt should copy its prefix from first."""
    estimates: Estimates | None = field(default=None, compare=False)
    decode_first: bool = False
    """D copies the prompt's KV while P computes it (see flow)."""
    coming_tokens: int = 0
    """Of the prompt: not here yet where it is computed, but asked for by another request."""
    beside_streams: bool = False
    """Streams run, or are about to come, where the prompt is computed and others decode."""


@dataclass(frozen=True, slots=True)
class Decline:
    reason: str


def place(facts: Facts, view: NodeView) -> Plan | Decline:
    ready = [e for e in view.engines if e.ready]
    if not ready:
        return Decline("no_engine_ready")
    if view.config.split == "never":
        return _on_one(facts, view, "split_never", ready, view.config.prefill_policy)
    prefills = [e for e in ready if e.role == PREFILL]
    decodes = [e for e in ready if e.role == DECODE]
    reason = why_whole(facts, view) or _missing_side(prefills, decodes)
    if reason:
        return _on_its_side(facts, view, reason, prefills, decodes)
    prefills = _by_policy(prefills, view.config.prefill_policy, view.turn, least_queued)
    prefills = _with_sibling(facts, view, prefills)
    roomy = _with_room(facts, decodes)
    decodes = _by_policy(roomy, view.config.decode_policy, view.turn, least_busy)
    if not all(e.constants for e in (*prefills, *decodes)):
        p, d = least_queued(prefills), least_busy(decodes)
        return Plan(p.slot, d.slot, facts.token1, "split_unmeasured")
    return _least_ms(facts, view, prefills, decodes)


def why_whole(facts: Facts, view: NodeView) -> str:
    """The reason a request is not able to be split, or ""."""
    if facts.whole:
        return facts.whole
    if facts.token1 is Token1.SINGLE:
        return facts.token1_field
    if facts.max_tokens <= 1:
        return "max_tokens_1"
    # No full block: nothing that could be handed over.
    if facts.prompt_tokens < view.block_size:
        return "short_prompt"
    # Token 1 fills the context: there is nothing left to decode elsewhere.
    if facts.prompt_tokens + 1 >= view.max_model_len:
        return "full_context"
    return ""


def least_queued(engines: Iterable[EngineView]) -> EngineView:
    return min(engines, key=lambda e: (e.queued_tokens, e.requests, e.slot))


def least_busy(engines: Iterable[EngineView]) -> EngineView:
    return min(engines, key=lambda e: (e.requests, e.queued_tokens, e.slot))


# --- one engine -----------------------------------------------------------------------------------


def _on_its_side(facts: Facts, view: NodeView, reason: str, prefills: list, decodes: list) -> Plan:
    # A prompt of less than a block runs where it will decode: the streams there wait for it (a step or
    # two on a GPU, three or four on a CPU core), but on P its own would wait for every long prompt.
    # Work that is all prompt (scoring, pooling, one token) belongs where prompts belong.
    all_prompt = facts.max_tokens <= 1 or facts.whole or facts.token1 is Token1.SINGLE
    if prefills and (all_prompt or not decodes):
        return _on_one(facts, view, reason, prefills, view.config.prefill_policy)
    return _on_one(facts, view, reason, decodes, view.config.decode_policy)


def _on_one(
    facts: Facts, view: NodeView, reason: str, engines: list[EngineView], policy: Policy
) -> Plan:
    engines = _by_policy(_with_room(facts, engines), policy, view.turn, least_queued)
    if not all(e.constants for e in engines):
        return Plan(None, least_queued(engines).slot, Token1.FORWARD, reason)
    return _whole(facts, view, engines, reason)


def _missing_side(prefills: list[EngineView], decodes: list[EngineView]) -> str:
    if not prefills:
        return "no_prefill_engine"
    return "" if decodes else "no_decode_engine"


# --- candidates -----------------------------------------------------------------------------------


def _by_policy(engines: list[EngineView], policy: Policy, turn: int, least) -> list[EngineView]:
    """The engines that may be chosen among by estimate: all of them, or the policy's one."""
    if policy == "least-loaded":
        return [least(engines)]
    first = turn % len(engines)
    if policy == "round-robin":
        return [engines[first]]
    # Of equals the first is taken, and they must take turns: an idle node would otherwise fill one
    # engine's cache, and push things out of it, while the other caches stay empty.
    return engines[first:] + engines[:first]


def _with_sibling(facts: Facts, view: NodeView, prefills: list[EngineView]) -> list[EngineView]:
    """Choices of one request (``n``) come one by one, before the first of them is computed: on two
    engines their prompt would be computed twice, and on an idle node that looks as quick."""
    if view.config.prefill_policy != "prefix-aware":
        return prefills
    return [e for e in prefills if e.slot == facts.sibling] or prefills


def _with_room(facts: Facts, engines: list[EngineView]) -> list[EngineView]:
    """Those that can hold the request now; all of them, when it has to wait anyway."""
    room = [
        e
        for e in engines
        if e.free_tokens is None or e.free_tokens >= facts.prompt_tokens + _output(facts, e)
    ]
    return room or engines


def _output(facts: Facts, e: EngineView) -> float:
    if e.constants is None:
        return float(facts.max_tokens)
    return estimate.output_tokens(e.constants, facts.max_tokens)


# --- milliseconds ---------------------------------------------------------------------------------


class _Leg(NamedTuple):
    """A part of the request on one engine. ``parts``: what Estimates will be made of."""

    total_ms: float
    slot: int
    parts: tuple[float, ...]
    prefix_from: int | None = None
    beside_streams: bool = False


_cost = attrgetter("total_ms")


def _least_ms(facts: Facts, view: NodeView, prefills: list, decodes: list) -> Plan:
    donor = _donor(facts, view)
    prompt = min((_prompt(facts, e, donor, view) for e in prefills), key=_cost)
    rest = min((_rest(facts, e, view, copy=True) for e in decodes), key=_cost)
    estimates = Estimates(*map(add, prompt.parts, rest.parts))
    split = Plan(
        prompt.slot,
        rest.slot,
        facts.token1,
        "split_always",
        prompt.prefix_from,
        estimates,
        coming_tokens=_coming_tokens(facts, prompt.slot),
        beside_streams=prompt.beside_streams,
    )
    if view.config.split == "always":
        return split
    return _lesser(split, _whole(facts, view, decodes, "whole_faster"), facts, view)


def _whole(facts: Facts, view: NodeView, engines: list[EngineView], reason: str) -> Plan:
    """All of the request on the one of ``engines`` where that costs least."""
    donor, coming = _donor(facts, view), _coming_ms(view, engines[0].role)
    prompt, rest = min(
        (
            (_prompt(facts, e, donor, view, coming), _rest(facts, e, view, copy=False))
            for e in engines
        ),
        key=lambda legs: legs[0].total_ms + legs[1].total_ms,
    )
    estimates = Estimates(*map(add, prompt.parts, rest.parts))
    return Plan(
        None,
        prompt.slot,
        Token1.FORWARD,
        reason,
        prompt.prefix_from,
        estimates,
        coming_tokens=_coming_tokens(facts, prompt.slot),
        beside_streams=prompt.beside_streams,
    )


def _lesser(split: Plan, whole: Plan, facts: Facts, view: NodeView) -> Plan:
    assert split.estimates is not None
    assert whole.estimates is not None
    split_ms, whole_ms = split.estimates.total_ms, whole.estimates.total_ms
    if split_ms < whole_ms:
        estimates = split.estimates._replace(other_ms=whole_ms)
        return replace(split, reason="split_faster", estimates=estimates)
    if _prefill_is_free(split, whole, facts, view):
        estimates = split.estimates._replace(other_ms=whole_ms)
        return replace(split, reason="idle_prefill", estimates=estimates)
    estimates = whole.estimates._replace(other_ms=split_ms)
    return replace(whole, reason=_why_not_split(split, whole, facts, view), estimates=estimates)


def _prefill_is_free(split: Plan, whole: Plan, facts: Facts, view: NodeView) -> bool:
    """P has nothing else to do and D no more of the prompt than P: one hand-off, less than a step, is
    all that D would save, and streams that come while it computes would pay for it with stalls that no
    estimate of this moment can see."""
    p = next(e for e in view.engines if e.slot == split.prefill)
    more_on_d = facts.cached.get(whole.decode, 0) > facts.cached.get(p.slot, 0)
    return not p.requests and not p.queued_tokens and not p.queued_ms and not more_on_d


def _why_not_split(split: Plan, whole: Plan, facts: Facts, view: NodeView) -> str:
    if not any(_streams(e) for e in view.engines if e.slot == whole.decode):
        return "idle_decode"
    if facts.cached.get(whole.decode, 0) > facts.cached.get(split.prefill, 0):
        return "prefix_on_decode"
    return "whole_faster"


def _prompt(
    facts: Facts,
    e: EngineView,
    donor: tuple[int, int] | None,
    view: NodeView,
    coming_ms: Sequence[float] = (),
) -> _Leg:
    """The prompt up to token 1 on ``e``, which may first copy what ``donor`` holds and it lacks."""
    # An engine computes at least the last token: sampling needs its logits.
    cached = min(facts.cached.get(e.slot, 0), facts.prompt_tokens - 1)
    if donor is not None and _copy_pays(e.constants, donor[1] - cached, cached):
        leg = _compute(facts, e, donor[1], donor[1] - cached, view, coming_ms)
        return leg._replace(prefix_from=donor[0])
    return _compute(facts, e, cached, 0, view, coming_ms)


def _copy_pays(c: Constants, tokens: int, cached: int) -> bool:
    return tokens > 0 and estimate.handoff_ms(c, tokens) < estimate.compute_ms(c, tokens, cached)


def _compute(
    facts: Facts,
    e: EngineView,
    cached: int,
    copied: int,
    view: NodeView,
    coming_ms: Sequence[float],
) -> _Leg:
    """What lies beyond ``cached`` tokens, ``copied`` of which come from a peer. ``coming_ms``: when
    streams will come to an engine like this one."""
    c, streams = e.constants, _streams(e)
    copy_ms = estimate.handoff_ms(c, copied)
    new = facts.prompt_tokens - cached
    decodes = e.role == DECODE and view.config.split != "never"
    beside = decodes and bool(streams or coming_ms)
    bounded = beside and view.config.stretch
    if bounded:
        longer = turns.hurry(e.queue, estimate.prefill_ms(c, new, cached, streams), bounded)
        c = turns.in_passes_of(c, turns.beside_streams(c, cached, new, longer))
    ms = copy_ms + estimate.prefill_ms(c, new, cached, streams)
    wait_ms, late_ms = _among(e, streams, ms, view.config.stretch)
    stall = streams * (estimate.stall_ms(c, new, cached) + copy_ms * c.copy_in_step)
    if coming_ms:
        alike = sum(other.ready and other.role == e.role for other in view.engines)
        stall += sum(max(0.0, wait_ms + ms - at_ms) for at_ms in coming_ms) / alike
    behind = late_ms + estimate.behind_ms(_arrivals_per_ms(view, e.role), wait_ms, ms)
    if bounded:
        stall *= SLOWED
    evict = estimate.evict_ms(c, new + copied - e.unused_tokens)
    parts = (new, wait_ms, ms, 0.0, 0.0, stall, evict, behind)
    total_ms = wait_ms + ms + stall + evict + behind
    return _Leg(total_ms, e.slot, parts, beside_streams=beside)


def _coming_tokens(facts: Facts, slot: int) -> int:
    return max(0, facts.cached.get(slot, 0) - facts.readable.get(slot, 0))


def _coming_ms(view: NodeView, role: str) -> list[float]:
    """When prefill engines will be done with what they have, if engines of ``role`` get the rest of it.
    A stream that comes while a prompt is computed there waits for it with its second token."""
    found: list[float] = []
    if role == DECODE and view.config.split != "never":
        for e in view.engines:
            if e.ready and e.role == PREFILL:
                found += accumulate(prompt.left_ms for prompt in e.queue)
    return found


def _rest(facts: Facts, e: EngineView, view: NodeView, *, copy: bool) -> _Leg:
    """Every token after token 1 on ``e``; ``copy``: the prompt's KV comes from elsewhere."""
    c, streams = e.constants, _streams(e)
    tokens = estimate.output_tokens(c, facts.max_tokens)
    decode_ms = tokens * estimate.step_ms(c, streams + 1)
    stall = tokens * streams * (estimate.step_ms(c, streams + 1) - estimate.step_ms(c, streams))
    wait_ms = handoff_ms = evict = 0.0
    if copy:
        lacking = facts.prompt_tokens - facts.cached.get(e.slot, 0)
        copy_ms = estimate.handoff_ms(c, lacking)
        # It is due when it comes: whatever an engine is about to compute waits for a copy.
        wait_ms, _ = _among(e, streams, 0.0, view.config.stretch)
        handoff_ms = c.front_ms + copy_ms
        stall += copy_ms * streams * c.copy_in_step
        evict = estimate.evict_ms(c, lacking - e.unused_tokens)
    parts = (0, wait_ms, 0.0, handoff_ms, decode_ms, stall, evict, 0.0)
    return _Leg(wait_ms + handoff_ms + decode_ms + stall + evict, e.slot, parts)


def _arrivals_per_ms(view: NodeView, role: str) -> float:
    """At one engine of those that would be sent the same kind of work."""
    never = view.config.split == "never"
    return view.arrivals_per_ms / sum(e.ready and (never or e.role == role) for e in view.engines)


def _streams(e: EngineView) -> int:
    if e.streams is not None:
        return e.streams
    return e.requests if e.role == DECODE else 0


def _among(e: EngineView, streams: int, own_ms: float, stretch: float) -> tuple[float, float]:
    """(milliseconds until work that takes ``own_ms`` begins there, and by how much it makes others late)."""
    if e.queue:
        return turns.among(e.queue, own_ms, stretch)
    if e.queued_ms is not None:
        return e.queued_ms, 0.0
    return estimate.queue_ms(e.constants, e.queued_tokens, streams), 0.0


def _donor(facts: Facts, view: NodeView) -> tuple[int, int] | None:
    """(slot, tokens) of the longest prefix that could be copied, if that is to be done at all."""
    if not view.config.share_prefixes or not facts.readable:
        return None
    slot, tokens = max(facts.readable.items(), key=lambda held: (held[1], -held[0]))
    return slot, min(tokens, facts.prompt_tokens - 1)
