"""``python -m bench interference``: what running streams notice of long prompts.

Some streams write; then long prompts arrive back to back (the next one when the last is answered).
The gaps between the streams' tokens in that time, and all tokens computed in it, prompts included,
for 1P1D and for plain vLLM on the same cores: one engine over all cores, one engine per core, the
best chunk size of each.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from functools import partial
from itertools import pairwise

from bench.line_up import add_line_up_flags, measure_each
from bench.load import ask, session
from bench.measure import Series, quantile
from bench.mix import fresh
from bench.report import Report, add_output_flags, machine
from bench.streams import Timed

WARMUP_TOKENS = 16
SETTLE_S = 1.0
"""Streams run this long alone before the first long prompt."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench interference", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-prompt", type=int, default=64, help="tokens")
    parser.add_argument("--long-prompt", type=int, default=1900, help="tokens")
    parser.add_argument("--seconds", type=float, default=12.0, help="of long prompts, a round")
    parser.add_argument("--rounds", type=int, default=3)
    add_line_up_flags(parser)
    add_output_flags(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    measured = measure_each(options, partial(rounds, options))
    kinds = {name: kind for name, (kind, _) in measured.items()}
    found = {name: each for name, (_, each) in measured.items()}
    return report(options, found, kinds).finish(options)


async def rounds(options: argparse.Namespace, url: str) -> list[dict]:
    async with session(url) as client:
        for tokens in (options.stream_prompt, options.long_prompt):
            await ask(client, fresh(tokens, WARMUP_TOKENS))
        return [await one_round(options, client) for _ in range(options.rounds)]


async def one_round(options: argparse.Namespace, client) -> dict:
    """Gaps in ms, alone and beside long prompts; tokens per second of everything beside them."""
    streams = [Timed(0.0) for _ in range(options.streams)]
    # More tokens than can be written in the time; the streams are cancelled at its end.
    output = 2048 - options.stream_prompt - 1
    tasks = [
        asyncio.create_task(ask(client, fresh(options.stream_prompt, output), timed))
        for timed in streams
    ]
    while not all(timed.token_s for timed in streams):
        await asyncio.sleep(0.01)
        for task in tasks:
            if task.done():
                task.result()
    alone_s = time.monotonic()
    await asyncio.sleep(SETTLE_S)
    begin_s = time.monotonic()
    prompts, ttft = 0, []
    while time.monotonic() - begin_s < options.seconds:
        answer = await ask(client, fresh(options.long_prompt, 2))
        prompts += 1
        ttft.append(answer.ttft_s * 1e3)
    end_s = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    written = sum(begin_s <= at < end_s for timed in streams for at in timed.token_s)
    computed = written + prompts * (options.long_prompt + 2)
    return {
        "alone_ms": gaps_ms(streams, alone_s, begin_s),
        "beside_ms": gaps_ms(streams, begin_s, end_s),
        "long_ttft_ms": ttft,
        "written_per_s": written / (end_s - begin_s),
        "tokens_per_s": computed / (end_s - begin_s),
    }


def gaps_ms(streams: list[Timed], begin_s: float, end_s: float) -> list[float]:
    """Gaps that end in the time; one that spans its end counts as far as it went."""
    found = []
    for timed in streams:
        inside = [at for at in timed.token_s if begin_s <= at < end_s]
        before = [at for at in timed.token_s if at < begin_s]
        points = [*before[-1:], *inside, end_s]
        found += [(b - a) * 1e3 for a, b in pairwise(points)]
    return found


def report(options: argparse.Namespace, found: dict[str, list[dict]], kinds: dict) -> Report:
    made = Report("interference", "running streams while long prompts arrive")
    made.facts = machine() | {
        "load": f"{options.streams} streams from {options.stream_prompt} tokens; prompts of "
        f"{options.long_prompt} tokens back to back for {options.seconds:g} s, "
        f"{options.rounds} rounds",
        "held equal": f"cores, model, {options.dtype}, KV cache {options.kv_mib} MiB an engine",
    }
    columns = ("median", "p99", "largest", "alone, median", "tokens/s", "streams' tokens/s")
    table = made.table("gaps between a stream's tokens, ms", columns, log=True)
    for name, each in found.items():
        table.row(
            name,
            [
                Series([quantile(r["beside_ms"], 0.5) for r in each]),
                p99(each),
                Series([max(r["beside_ms"]) for r in each]),
                Series([quantile(r["alone_ms"], 0.5) for r in each]),
                Series([r["tokens_per_s"] for r in each]),
                Series([r["written_per_s"] for r in each]),
            ],
        )
    bars(made, found, kinds)
    return made


def p99(each: list[dict]) -> Series:
    return Series([quantile(r["beside_ms"], 0.99) for r in each])


def rate(each: list[dict]) -> float:
    return Series([r["tokens_per_s"] for r in each]).median


def bars(made: Report, found: dict[str, list[dict]], kinds: dict) -> None:
    """Against the plain configuration with the lowest p99."""
    plain = {name: each for name, each in found.items() if kinds[name] != "pdnode"}
    ours = [each for name, each in found.items() if kinds[name] == "pdnode"]
    if not plain or not ours:
        return
    best = min(plain, key=lambda name: p99(plain[name]).median)
    ratio = p99(ours[0]).median / p99(plain[best]).median
    made.bar(f"p99 gap, pdnode / best plain ({best})", ratio, 0.2, at_most=True)
    made.bar("tokens/s, pdnode / the same", rate(ours[0]) / rate(plain[best]), 0.9, at_most=False)
    fastest = max(rate(each) for each in plain.values())
    made.bar("tokens/s, pdnode / fastest plain", rate(ours[0]) / fastest, 0.95, at_most=False)
