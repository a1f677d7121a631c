"""``python launcher.py plan TRACE``: which split of this box suits this traffic."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from pdnode import calibrate, planner, traffic
from pdnode.calibrate import Box
from pdnode.errors import PdNodeError, PlanError
from pdnode.estimate import Constants
from pdnode.flags import COUNT, SECONDS, Parser
from pdnode.plan_text import table
from pdnode.planner import DATA_PARALLEL, SHARE, Goals, Hardware, Row
from pdnode.traffic import BLOCK, Arrival

DEFAULT_URL = "http://127.0.0.1:8000"
SIMULATED = 1000
"""Requests of a trace that are played: each split plays them about a dozen times."""
BAR = 40
GIVEN_KV_TOKENS = 400_000
USUAL_BLOCK = {"gpu": 16, "cpu": 128}
"""vLLM's own choice of ``--block-size``."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, or 2 with one sentence."""
    try:
        own = _parser().parse_args(list(argv))
        arrivals = traffic.read(Path(own.trace))[: own.requests]
        box = _box(own)
        engines = own.engines or box.prefill + box.decode
        if engines < 2:
            raise PlanError(f"{engines} engine cannot be split: give --engines N of at least 2")
        if own.write_constants:
            _write(own.write_constants, box)
        goals = Goals(own.ttft_ms, own.itl_ms)
        print("\n".join(_head(arrivals, box, engines, goals)), flush=True)
        rows = planner.plan(arrivals, box.hardware, engines, goals)
    except PdNodeError as error:
        print(f"pdnode: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(render(rows, box, engines)))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="launcher.py plan",
        description="Simulate every split of the box for recorded traffic, and say which is best.",
    )
    parser.add_argument("trace", metavar="TRACE", help="JSONL, as --record-trace writes it")
    milliseconds = {"type": SECONDS, "metavar": "MS", "required": True}
    parser.add_argument("--ttft-ms", **milliseconds, help="goal: time to first token")
    parser.add_argument("--itl-ms", **milliseconds, help="goal: mean time between tokens")
    parser.add_argument(
        "--url", default=DEFAULT_URL, help="a running node to measure (default: %(default)s)"
    )
    parser.add_argument("--api-key", default="", help="of that node")
    parser.add_argument(
        "--constants", metavar="FILE", help="measured before (--write-constants): ask no node"
    )
    parser.add_argument("--write-constants", metavar="FILE", help="keep what was measured")
    parser.add_argument(
        "--engines", type=COUNT, metavar="N", help="engines of the box (default: the node's)"
    )
    parser.add_argument(
        "--requests",
        type=COUNT,
        default=SIMULATED,
        metavar="N",
        help="of the trace to play, from its beginning (default: %(default)s)",
    )
    return parser


# --- constants ------------------------------------------------------------------------------------


def _box(own) -> Box:
    if own.constants is None:
        if sys.stderr.isatty():
            print(f"measuring the node at {own.url}: a minute or two", file=sys.stderr, flush=True)
        return calibrate.measure(calibrate.Client(own.url, own.api_key))
    names = {field.name for field in fields(Constants)}
    try:
        said = json.loads(Path(own.constants).read_text())
        constants = Constants(**{k: v for k, v in said["constants"].items() if k in names})
        kind = said.get("kind", "gpu")
        hardware = Hardware(
            constants,
            int(said.get("kv_tokens", GIVEN_KV_TOKENS)),
            None if (contention := said.get("contention")) is None else float(contention),
            int(said.get("block_size", USUAL_BLOCK.get(kind, BLOCK))),
        )
        prefill, decode = int(said.get("prefill", 1)), int(said.get("decode", 1))
        return Box(hardware, prefill, decode, kind, {})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PlanError(
            f"--constants {own.constants}: {error}; write such a file with --write-constants FILE"
        ) from error


def _write(path: str, box: Box) -> None:
    said = asdict(box)
    del said["observed"], said["observed_requests"]
    said |= said.pop("hardware")
    try:
        Path(path).write_text(json.dumps(said, indent=1) + "\n")
    except OSError as error:
        raise PlanError(f"cannot write --write-constants {path} ({error.strerror})") from error


# --- text -----------------------------------------------------------------------------------------


def _head(arrivals: list[Arrival], box: Box, engines: int, goals: Goals) -> Iterator[str]:
    c, hardware = box.hardware.constants, box.hardware
    prompt = sum(a.prompt_tokens for a in arrivals) / len(arrivals)
    answer = sum(a.output_tokens for a in arrivals) / len(arrivals)
    rate = planner.rate_per_s(arrivals)
    yield (
        f"trace      {len(arrivals)} requests, {rate:.2f} a second, {prompt:.0f} prompt and "
        f"{answer:.0f} output tokens on average"
    )
    yield f"box        {engines} engines with KV for {hardware.kv_tokens} tokens each"
    yield (
        f"engine     prefill {c.prefill_pass_ms:.1f} ms a pass + {c.prefill_ms_per_token * 1e3:.1f} "
        f"ms per 1000 tokens, decode {c.decode_step_ms:.2f} ms + {c.decode_step_ms_per_stream:.3f} "
        "per stream"
    )
    yield (
        f"hand-off   {c.handoff_ms:.2f} ms + {c.handoff_ms_per_token * 1e3:.2f} ms per 1000 tokens, "
        f"front end {c.front_ms:.1f} ms a leg"
    )
    if hardware.contention is None:
        yield "together   not known what engines cost each other, taken for nothing"
    elif hardware.contention:
        longer = f"{hardware.contention:.0%} longer"
        yield f"together   each other engine that works makes a pass {longer}"
    yield (
        f"goals      first token within {goals.ttft_ms:g} ms, {goals.itl_ms:g} ms between tokens, "
        f"for {SHARE:.0%} of the requests"
    )
    yield ""


def render(rows: Sequence[Row], box: Box, engines: int) -> Iterator[str]:
    """``rows``: best first."""
    header = ("split", "goals met", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "goodput/s")
    yield from table(header, map(_cells, rows))
    yield ""
    most = max(row.goodput for row in rows)
    for row in rows:
        bar = "#" * round(BAR * row.goodput / most) if most else ""
        yield f"{row.name:<13} {bar:<{BAR}} {_goodput(row)}"
    yield ""
    best = rows[0]
    if not most:
        yield "No split meets these goals at any rate: relax --ttft-ms or --itl-ms."
        return
    yield f"recommended: {flags_for(best, box.kind, engines)}"
    yield from _observed(rows, box)


def _cells(row: Row) -> tuple[str, ...]:
    times = (f"{v:.1f}" for v in (row.ttft_p50, row.ttft_p99, row.itl_p50, row.itl_p99))
    return row.name, f"{row.met:.1%}", *times, _goodput(row)


def _goodput(row: Row) -> str:
    return f"{'>' if row.limit else ''}{row.goodput:.2f}"


def flags_for(row: Row, kind: str, engines: int) -> str:
    """Of the launcher."""
    prefill, decode = row.prefill, row.decode
    split = ""
    if row.name == DATA_PARALLEL:
        prefill, decode, split = engines // 2, engines - engines // 2, " --split never"
    if kind == "cpu":
        return f"--prefill-engines {prefill} --decode-engines {decode}{split}"
    gpus = [str(i) for i in range(prefill + decode)]
    return (
        f"--prefill-gpus {','.join(gpus[:prefill])} --decode-gpus {','.join(gpus[prefill:])}{split}"
    )


def _observed(rows: Sequence[Row], box: Box) -> Iterator[str]:
    """What the node's last requests took, next to what was predicted for its present split."""
    mine = next((r for r in rows if (r.prefill, r.decode) == (box.prefill, box.decode)), None)
    if mine is None or not box.observed:
        return
    yield ""
    yield f"predicted for the node as it is ({mine.name}), and its last {box.observed_requests} requests:"
    predicted = {
        "ttft_ms_p50": mine.ttft_p50,
        "ttft_ms_p99": mine.ttft_p99,
        "itl_ms_p50": mine.itl_p50,
        "itl_ms_p99": mine.itl_p99,
    }
    rows_text = (
        (name, f"{predicted[name]:.1f}", f"{box.observed[name]:.1f}")
        for name in predicted
        if name in box.observed
    )
    yield from table(("", "predicted", "observed"), rows_text)
