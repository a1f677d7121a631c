"""What a request would cost where, in milliseconds. Pure functions of measured constants.

The model of an engine: a pass costs a fixed time, and for every token in it a time that grows with the
tokens before it (attention is quadratic). The token of a running stream is one like the others; only
while they are few, and no prompt is in the pass, reading the weights takes longer than computing
with them, and a stream costs little. A prompt takes passes of at most ``chunk_tokens``; every stream
on that engine waits for the prompt tokens in its pass. :class:`Estimator` measures the constants;
the functions only use them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from statistics import fmean, median
from typing import NamedTuple

MIN_OBSERVATIONS = 3
"""Of each kind, before a constant is believed."""
REFIT_EVERY = 32
RECENT = 255
PER_BUCKET = 15
MEMORY = 0.99
"""What an older report of evictions still counts when the next one comes."""


@dataclass(frozen=True, slots=True)
class Constants:
    """One engine, as measured. A hand-off's constants are those of the engine that copies."""

    prefill_pass_ms: float
    prefill_ms_per_token: float
    prefill_ms_per_token_context: float
    """Milliseconds per prompt token and token before it."""
    decode_step_ms: float
    decode_step_ms_per_stream: float
    handoff_ms: float
    handoff_ms_per_token: float
    front_ms: float
    """From the front end to an engine and back, per leg, without any work."""
    output_tokens: float = 128.0
    """A usual answer: ``max_tokens`` is only a limit."""
    evicted_returns: float = 0.0
    """Of the tokens that caches had to drop, the share that was computed again later."""
    chunk_tokens: int = 2048
    copy_in_step: bool = True
    """The hand-off's copy is part of an engine step, so that running streams wait for it."""


class Estimates(NamedTuple):
    """Why a plan was chosen: its own time, then what others lose by it, summed over them.

    ``stall_ms``: streams that run now. ``evict_ms``: who wants the KV that this one's replaces.
    ``behind_ms``: requests that come while this one is worked on, as often as they come lately.
    """

    new_tokens: int
    wait_ms: float
    prefill_ms: float
    handoff_ms: float
    decode_ms: float
    stall_ms: float
    evict_ms: float
    behind_ms: float
    other_ms: float | None = None
    """The total of the best plan of the other kind (split, or one engine); None: none looked at."""

    @property
    def total_ms(self) -> float:
        return sum(self[1:8])


def compute_ms(c: Constants, new: int, cached: int) -> float:
    """The part of a prefill that running streams in the same passes wait for."""
    context = cached + new / 2
    return new * (c.prefill_ms_per_token + c.prefill_ms_per_token_context * context)


def prefill_ms(c: Constants, new: int, cached: int = 0, streams: int = 0) -> float:
    """``new`` prompt tokens after ``cached`` ones, on an engine that decodes ``streams`` others."""
    passes = -(-new // c.chunk_tokens)
    return passes * fixed_ms(c, streams) + compute_ms(c, new, cached)


def fixed_ms(c: Constants, streams: int) -> float:
    """Of a pass with prompt tokens and ``streams`` others, all but what the prompt tokens cost."""
    if not streams:
        return c.prefill_pass_ms
    return max(c.decode_step_ms, c.prefill_pass_ms) + stream_ms(c) * streams


def stream_ms(c: Constants) -> float:
    """What a running stream adds to a pass with prompt tokens."""
    return max(c.decode_step_ms_per_stream, c.prefill_ms_per_token)


def stall_ms(c: Constants, new: int, cached: int) -> float:
    """How much longer the passes are for each running stream than decode steps would be."""
    passes = -(-new // c.chunk_tokens)
    return passes * max(0.0, c.prefill_pass_ms - c.decode_step_ms) + compute_ms(c, new, cached)


def queue_ms(c: Constants, queued_tokens: int, streams: int = 0) -> float:
    """Work ahead of which only the length is known, so without its quadratic part."""
    passes = -(-queued_tokens // c.chunk_tokens)
    return passes * fixed_ms(c, streams) + queued_tokens * c.prefill_ms_per_token


def handoff_ms(c: Constants, tokens: int) -> float:
    """Copying ``tokens`` tokens of KV from a peer; nothing lacking, nothing paid."""
    return c.handoff_ms + c.handoff_ms_per_token * tokens if tokens else 0.0


def evict_ms(c: Constants, brought: int) -> float:
    """What ``brought`` tokens of KV that an engine did not hold cost whoever wants what they replace."""
    return max(0, brought) * c.evicted_returns * c.prefill_ms_per_token


def behind_ms(arrivals_per_ms: float, wait_ms: float, work_ms: float) -> float:
    """What ``work_ms`` costs those who arrive while it waits or runs: all of it, or half on average."""
    return arrivals_per_ms * work_ms * (wait_ms + work_ms / 2)


def step_ms(c: Constants, streams: float) -> float:
    reading_ms = c.decode_step_ms + c.decode_step_ms_per_stream * streams
    computing_ms = min(c.decode_step_ms, c.prefill_pass_ms) + c.prefill_ms_per_token * streams
    return max(reading_ms, computing_ms)


def output_tokens(c: Constants, max_tokens: int) -> float:
    return min(float(max_tokens), c.output_tokens)


@dataclass(slots=True, eq=False)
class Queued:
    """A prompt's work on an engine, until it is answered."""

    deadline_ms: float
    left_ms: float
    pass_ms: float = inf
    """What one pass of it takes at most."""


class Ahead(NamedTuple):
    """The same as placement sees it. Milliseconds from now."""

    due_ms: float
    left_ms: float
    pass_left_ms: float = 0.0
    """Until it could make room for one that is due earlier; 0 for those that are not computed now."""


class Backlog:
    """The prefill work an engine has been sent, in estimated milliseconds, as it is worked off.

    The front end hears only of answers. Between two of them the engine has worked on one prompt, but on
    no more than there was of it. One that is due earlier takes over when a pass ends; where in a pass
    the engine is nobody knows, so half a pass is assumed to be left.
    """

    __slots__ = ("_queue", "_running", "_since_ms", "_yields_ms")

    def __init__(self) -> None:
        self._queue: list[Queued] = []
        self._running: Queued | None = None
        self._since_ms = 0.0
        self._yields_ms = inf

    def sent(
        self, ms: float, now_ms: float, deadline_ms: float | None = None, pass_ms: float = inf
    ) -> Queued:
        """Without ``deadline_ms``: after all that is there."""
        self._settle(now_ms)
        queued = Queued(now_ms if deadline_ms is None else deadline_ms, ms, pass_ms)
        insort(self._queue, queued, key=attrgetter("deadline_ms"))
        running = self._running
        if running is None:
            self._running = queued
        elif queued.deadline_ms < running.deadline_ms and self._yields_ms == inf:
            self._yields_ms = now_ms + min(running.left_ms, running.pass_ms / 2)
        return queued

    def answered(self, queued: Queued, now_ms: float) -> None:
        """Or given up."""
        self._settle(now_ms)
        self._queue.remove(queued)
        if queued is self._running:
            self._next()

    def left_ms(self, now_ms: float) -> float:
        return sum(each.left_ms for each in self.queue(now_ms))

    def queue(self, now_ms: float) -> tuple[Ahead, ...]:
        self._settle(now_ms)
        return tuple(
            Ahead(q.deadline_ms - now_ms, q.left_ms, self._pass_left_ms(q, now_ms))
            for q in self._queue
        )

    def _pass_left_ms(self, queued: Queued, now_ms: float) -> float:
        if queued is not self._running:
            return 0.0
        if self._yields_ms < inf:
            return self._yields_ms - now_ms
        return min(queued.left_ms, queued.pass_ms / 2)

    def _settle(self, now_ms: float) -> None:
        while self._running is not None:
            until_ms = min(now_ms, self._yields_ms)
            # Work that took longer than estimated is at its end, it is not ahead of its time.
            worked_ms = max(0.0, until_ms - self._since_ms)
            self._running.left_ms = max(0.0, self._running.left_ms - worked_ms)
            self._since_ms = until_ms
            if self._yields_ms > now_ms:
                break
            self._next()
        self._since_ms = now_ms

    def _next(self) -> None:
        self._running = self._queue[0] if self._queue else None
        self._yields_ms = inf


class RobustFit:
    """``y = coefficients . x``, none negative, from the medians of buckets of like x.

    A bucket is a power of two per feature and keeps its last ``PER_BUCKET`` observations: outliers
    fall out with the median, old truths with the length, and rare sizes count like usual ones.
    """

    def __init__(self) -> None:
        self.observations = 0
        self._buckets: dict[tuple[int, ...], deque[tuple[float, ...]]] = {}
        self._of_others: dict[tuple[int, ...], deque[tuple[float, ...]]] = {}
        """Used where there is none of our own."""

    def add(self, x: tuple[float, ...], y: float, of_another: bool = False) -> bool:
        """True: nothing like it was known."""
        if y <= 0:
            return False  # a clock's grain, not a cost
        self.observations += not of_another
        buckets = self._of_others if of_another else self._buckets
        bucket = tuple(int(value).bit_length() for value in x)
        is_news = bucket not in self._buckets and bucket not in self._of_others
        buckets.setdefault(bucket, deque(maxlen=PER_BUCKET)).append((*x, y))
        return is_news

    def coefficients(self) -> tuple[float, ...]:
        buckets = self._of_others | self._buckets
        rows = [tuple(map(median, zip(*bucket, strict=True))) for bucket in buckets.values()]
        # Divided by y: an error of a tenth is as bad in a short prompt as in a long one.
        relative = [[value / row[-1] for value in row[:-1]] for row in rows]
        return tuple(_non_negative(relative, len(rows[0]) - 1))


def _non_negative(rows: list[list[float]], features: int) -> list[float]:
    """Least squares for ``row . coefficients = 1``; features that come out negative are dropped."""
    scale = [max(row[i] for row in rows) or 1.0 for i in range(features)]
    active = list(range(features))
    while active:
        scaled = [[row[i] / scale[i] for i in active] for row in rows]
        solution = _least_squares(scaled)
        if solution is None:
            active.pop()  # too few sizes seen to tell the last feature from the others
        elif min(solution) >= 0:
            found = dict(zip(active, solution, strict=True))
            return [found.get(i, 0.0) / scale[i] for i in range(features)]
        else:
            del active[solution.index(min(solution))]
    return [0.0] * features


def _least_squares(rows: list[list[float]]) -> list[float] | None:
    """For targets of 1, by the normal equations; None when they have no one solution."""
    n = len(rows[0])
    a = [
        [sum(r[i] * r[j] for r in rows) for j in range(n)] + [sum(r[i] for r in rows)]
        for i in range(n)
    ]
    for i in range(n):
        pivot = max(range(i, n), key=lambda k: abs(a[k][i]))
        a[i], a[pivot] = a[pivot], a[i]
        if abs(a[i][i]) < 1e-9 * len(rows):
            return None
        for k in range(n):
            if k != i:
                factor = a[k][i] / a[i][i]
                a[k] = [x - factor * y for x, y in zip(a[k], a[i], strict=True)]
    return [a[i][n] / a[i][i] for i in range(n)]


class Estimator:
    """Measures one engine's constants, from start and while it runs. Not thread-safe.

    Give it clean observations: a prefill that waited for nothing, a step without prompt tokens.
    What is not clean now and then is an outlier, which the bucket medians drop.
    """

    def __init__(
        self, *, chunk_tokens: int, copy_in_step: bool = True, initial: Constants | None = None
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._copy_in_step = copy_in_step
        self._prefill = RobustFit()
        self._decode = RobustFit()
        self._handoff = RobustFit()
        self._front: deque[float] = deque(maxlen=RECENT)
        self._output: deque[int] = deque(maxlen=RECENT)
        self._evicted = self._recomputed = 0.0
        self._constants = initial
        self._until_refit = 0

    def observe_prefill(
        self, new: int, cached: int, ms: float, pass_tokens: int = 0, *, of_another: bool = False
    ) -> None:
        """``pass_tokens``: if its passes were bounded. ``of_another``: engine, which is about as fast: a
        decode engine that computes a long prompt once a day should know what that takes."""
        passes = -(-new // min(pass_tokens or new, self._chunk_tokens))
        is_news = self._prefill.add((passes, new, new * (cached + new / 2)), ms, of_another)
        # The first long prompt changes what is believed of the next one by seconds.
        self._until_refit = 0 if is_news else self._until_refit - 1

    def observe_decode_step(self, streams: int, ms: float) -> None:
        self._decode.add((1, streams), ms)
        self._until_refit -= 1

    def observe_handoff(self, tokens: int, ms: float) -> None:
        self._handoff.add((1, tokens), ms)
        self._until_refit -= 1

    def observe_front(self, ms: float) -> None:
        self._front.append(ms)

    def observe_evictions(self, evicted_tokens: int, recomputed_tokens: int) -> None:
        """Since the last call, node-wide: dropped by caches, and computed although once held."""
        self._evicted = self._evicted * MEMORY + evicted_tokens
        self._recomputed = self._recomputed * MEMORY + recomputed_tokens
        self._until_refit -= 1

    def observe_output(self, tokens: int) -> None:
        self._output.append(tokens)

    def constants(self) -> Constants | None:
        """None until every kind of work has been seen (or ``initial`` was given)."""
        if self._until_refit <= 0:
            self._until_refit = REFIT_EVERY
            self._constants = self._refit() or self._constants
        return self._constants

    def _refit(self) -> Constants | None:
        fits = (self._prefill, self._decode, self._handoff)
        known = min(fit.observations for fit in fits) >= MIN_OBSERVATIONS
        if not known and self._constants is None:
            self._until_refit = 0
            return None
        return replace(
            self._constants or self._nothing_known(),
            **self._fitted(
                self._prefill,
                "prefill_pass_ms",
                "prefill_ms_per_token",
                "prefill_ms_per_token_context",
            ),
            **self._fitted(self._decode, "decode_step_ms", "decode_step_ms_per_stream"),
            **self._fitted(self._handoff, "handoff_ms", "handoff_ms_per_token"),
            **({"front_ms": median(self._front)} if self._front else {}),
            **({"output_tokens": fmean(self._output)} if self._output else {}),
            **({"evicted_returns": self._returns()} if self._evicted else {}),
        )

    def _returns(self) -> float:
        return min(1.0, self._recomputed / self._evicted)

    def _nothing_known(self) -> Constants:
        zeros = (0.0,) * 8
        return Constants(*zeros, chunk_tokens=self._chunk_tokens, copy_in_step=self._copy_in_step)

    @staticmethod
    def _fitted(fit: RobustFit, *names: str) -> dict[str, float]:
        if fit.observations < MIN_OBSERVATIONS:
            return {}
        return dict(zip(names, fit.coefficients(), strict=True))
