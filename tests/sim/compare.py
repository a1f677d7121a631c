"""Every router on every trace: ``python -m tests.sim.compare`` prints the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdnode import turns
from pdnode.placement import PlacementConfig
from pdnode.sim.engine import Engine
from pdnode.sim.node import Node, Result, percentile
from pdnode.sim.router import Placement, Router
from tests.sim.node import TRUE, engines, ideal_hit_rate
from tests.sim.routers import ApproximateTree
from tests.sim.traces import TRACES


def _placed(**config) -> Callable[[list[Engine]], Router]:
    return lambda engines: Placement(engines, PlacementConfig(**config), TRUE)


ROUTERS: dict[str, Callable[[list[Engine]], Router]] = {
    "place": _placed(share_prefixes=True, stretch=turns.STRETCH),
    "place, as they came": _placed(share_prefixes=True),
    "place, no sharing": _placed(),
    "round-robin": _placed(
        prefill_policy="round-robin", decode_policy="round-robin", split="always"
    ),
    "tree": ApproximateTree,
    "tree, tighter": lambda engines: ApproximateTree(
        engines, cache_threshold=0.3, abs_threshold=8, rel_threshold=1.5
    ),
    "never": _placed(split="never"),
}


@dataclass(frozen=True, slots=True)
class Row:
    trace: str
    router: str
    result: Result
    ideal: float
    """One engine with the cache of all sixteen."""

    @property
    def ttft_p99_ms(self) -> float:
        return percentile(self.result.ttft_ms, 0.99)

    def __str__(self) -> str:
        r = self.result
        return (
            f"{self.trace:6} {self.router:18} {r.hit_rate:6.3f} {self.ideal:6.3f}"
            f" {percentile(r.ttft_ms, 0.5):8.1f} {self.ttft_p99_ms:8.1f}"
            f" {percentile(r.per_token_ms, 0.5):7.1f} {percentile(r.per_token_ms, 0.99):7.1f}"
            f" {r.reasons.most_common(3)}"
        )


HEADER = (
    f"{'trace':6} {'router':18} {'hits':>6} {'ideal':>6} {'ttft p50':>8} {'p99 ms':>8}"
    f" {'tpot p50':>7} {'p99':>6} reasons"
)


def run(trace: str, router: str) -> Row:
    node = engines()
    result = Node(node, ROUTERS[router](node), TRUE).run(TRACES[trace]())
    return Row(trace, router, result, ideal_hit_rate(result, sum(e.cache.capacity for e in node)))


def main() -> None:
    print(HEADER)
    for trace in TRACES:
        for router in ROUTERS:
            print(run(trace, router), flush=True)


if __name__ == "__main__":
    main()
