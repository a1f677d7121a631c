"""The node's own metrics, ``pdnode:*``, beside vLLM's in ``/metrics``.

Counters and gauges are read from the same snapshot that ``/pd/status`` shows, at the scrape; nothing
is counted twice. ``engine`` is the slot, as in vLLM's metrics, and ``engine_id`` its name. Copies of
the start's self-test are in the per-engine counters, and in nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pdnode.timeline import Timeline

Status = dict[str, Any]
Rows = Iterable[tuple[Sequence[str], float]]

ENGINE = ("engine", "engine_id", "role")
PAIR = ("from", "to", "path")


@dataclass(frozen=True, slots=True)
class Family:
    """``name`` as Prometheus has it: counters end in _total."""

    name: str
    help: str
    labels: tuple[str, ...]
    rows: Callable[[Status], Rows]

    def metric(self, status: Status) -> Metric:
        counts = self.name.endswith("_total")
        kind = CounterMetricFamily if counts else GaugeMetricFamily
        metric = kind(self.name.removesuffix("_total"), self.help, labels=self.labels)
        for labels, value in self.rows(status):
            metric.add_metric(labels, value)
        return metric


def _node(name: str, help_text: str, field: str) -> Family:
    return Family(f"pdnode:{name}", help_text, (), lambda s: [((), s["counters"][field])])


def _engine(name: str, help_text: str, value: Callable[[Any], float] | str) -> Family:
    read = value if callable(value) else lambda e: e[value]

    def rows(status: Status) -> Rows:
        for slot, engine in enumerate(status["engines"]):
            yield (str(slot), engine["id"], engine["role"]), float(read(engine))

    return Family(f"pdnode:{name}", help_text, ENGINE, rows)


def _pair(name: str, help_text: str, field: str) -> Family:
    def rows(status: Status) -> Rows:
        for path in status["paths"]:
            yield (path["from"], path["to"], path["kind"]), path[field]

    return Family(f"pdnode:{name}", help_text, PAIR, rows)


def _reasons(status: Status) -> Rows:
    for reason, count in status["counters"]["single_engine_reasons"].items():
        yield (reason,), count


def _index_fill(status: Status) -> Rows:
    for slot, engine in enumerate(status["engines"]):
        fill = engine["index_entries"] / status["index_entries"]
        yield (str(slot), engine["id"], engine["role"]), fill


FAMILIES = (
    _node("requests_total", "Requests that came to the node.", "requests"),
    _node("requests_failed_total", "Requests that ended with an error of the node's.", "failed"),
    _node("requests_rejected_total", "Requests refused with 503 by a bound.", "rejected"),
    _node(
        "prompts_cut_total",
        "Prompts computed in shorter passes, for short prompts or beside streams.",
        "prompts_cut",
    ),
    _node(
        "prefills_deferred_total",
        "Prompts that waited because finished ones held their share of blocks.",
        "prefills_deferred",
    ),
    Family(
        "pdnode:single_engine_total",
        "Requests that one engine did alone, by the reason they were not split.",
        ("reason",),
        _reasons,
    ),
    _node("resumes_total", "Requests taken up again after the death of their engine.", "resumes"),
    _node(
        "resume_recomputed_tokens_total",
        "Tokens that a resume computed again.",
        "resume_recomputed_tokens",
    ),
    _node(
        "recomputed_prompt_tokens_total",
        "Prompt tokens that decode computed again instead of copying their KV.",
        "recomputed_prompt_tokens",
    ),
    _pair("handoffs_total", "Hand-offs from a prefill to a decode engine.", "handoffs"),
    _pair("path_gb_per_s", "GB/s of the pair's copy in the self-test at the start.", "gb_per_s"),
    _engine("handoff_bytes_total", "Bytes of KV that the engine copied in.", "handoff_bytes"),
    _engine("handoff_seconds_total", "Seconds the engine spent in copies.", "handoff_seconds"),
    _engine("load_failures_total", "Copies that failed; their KV is computed.", "load_failures"),
    _engine("stale_reads_total", "Copies thrown away, as the KV was replaced.", "stale_reads"),
    _engine("pins", "Finished prompts whose KV is kept for a reader.", "pins"),
    _engine("leases_expired_total", "Pins that nobody fetched within --lease.", "leases_expired"),
    Family(
        "pdnode:index_fill",
        "Share of the engine's table in the index that is in use.",
        ENGINE,
        _index_fill,
    ),
    _engine("index_full_total", "Requests not offered, as the table was full.", "index_full"),
    _engine("pool_hits_total", "Requests that took blocks from the KV pool.", "pool_hits"),
    _engine("pool_tokens_total", "Tokens that the KV pool saved computing.", "pool_tokens"),
    _engine("pool_stored_blocks_total", "Blocks put into the KV pool.", "pool_stored"),
    _engine("engine_up", "1 while the engine is ready.", lambda e: e["state"] == "ready"),
    _engine("engine_draining", "1 while it is sent no new work.", lambda e: e["draining"]),
    _engine("engine_restarts_total", "Times the engine was started again.", "restarts"),
    _engine("engine_requests_running", "Requests that its scheduler runs.", "running"),
    _engine("engine_requests_waiting", "Requests that its scheduler has waiting.", "waiting"),
    _engine(
        "engine_queued_prompt_tokens",
        "Prompt tokens that its scheduler has and has not sent through the model yet.",
        "queued_prompt_tokens",
    ),
    _engine("kv_blocks_free", "Blocks of the KV cache that no request holds.", "kv_blocks_free"),
    _engine("kv_blocks", "Blocks of the KV cache.", "kv_blocks_total"),
)


class Histogram:
    """Cumulative buckets over labels. Not thread-safe: the front end's loop observes and scrapes."""

    def __init__(self, name: str, help_text: str, label: str, bounds: Sequence[float]) -> None:
        self.name, self._help, self._label, self._bounds = name, help_text, label, bounds
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, label: str, value: float) -> None:
        counts = self._counts.setdefault(label, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[label] = self._sums.get(label, 0.0) + value

    def metric(self) -> Metric:
        metric = HistogramMetricFamily(self.name, self._help, labels=(self._label,))
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        for label, counts in self._counts.items():
            buckets = list(zip(names, accumulate(counts), strict=True))
            metric.add_metric((label,), buckets, self._sums[label])
        return metric


SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
COPY_SECONDS = (1e-5, 2.5e-5, 1e-4, 2.5e-4, 1e-3, 2.5e-3, 0.01, 0.025, 0.1, 0.25, 1, 2.5)
HISTOGRAMS = ("pdnode:wait_seconds", "pdnode:handoff_duration_seconds")
NAMES = frozenset({family.name for family in FAMILIES} | set(HISTOGRAMS))
"""Every metric of ours; a histogram's series carry _bucket, _sum and _count behind."""


class NodeMetrics(Collector):
    """``status``: a fresh snapshot, as ``/pd/status`` gives it."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status
        self._waits = Histogram(
            HISTOGRAMS[0],
            "From sending a leg to an engine to the step that begins it.",
            "leg",
            SECONDS,
        )
        self._copies = Histogram(
            HISTOGRAMS[1],
            "Time of one request's copy of KV, by the reader.",
            "engine",
            COPY_SECONDS,
        )

    def finished(self, asked: object, timeline: Timeline, request: object) -> None:
        """One of ``History.on_finished``."""
        for leg in timeline.legs:
            if leg.begun is not None:
                self._waits.observe(leg.kind, max(0.0, leg.begun - leg.sent))
            if leg.copied is not None:
                self._copies.observe(str(leg.slot), leg.copied.end - leg.copied.begin)

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        for family in FAMILIES:
            yield family.metric(status)
        yield self._waits.metric()
        yield self._copies.metric()

    def describe(self) -> Iterable[Metric]:
        # Asked at registration, when there is no status yet; the names are ours alone.
        return ()
