"""Our metrics: clean for Prometheus, and the dashboard and alerts name only what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pdnode import metrics
from pdnode.timeline import Copied, LegTimes, Timeline
from pdnode.transfer_log import minute_line

RECORDED = Path(__file__).parent.parent / "people" / "status-1p1d.json"
DEPLOY = Path(__file__).parent.parent.parent / "deploy"
VLLM_NAMES = Path(__file__).parent.parent / "people" / "vllm-metrics.txt"
"""Names of vLLM's own metrics, as a node's /metrics gave them."""
PROMQL_NAME = re.compile(r"\b(?:pdnode|vllm):[a-z0-9_]+")


@pytest.fixture
def status() -> dict:
    return json.loads(RECORDED.read_text())


def scraped(status: dict) -> dict[str, dict]:
    registry = CollectorRegistry()
    collector = metrics.NodeMetrics(lambda: status)
    line = Timeline("cmpl-1", 300, arrived=1.0)
    copied = Copied(0, 1.2, 1.2004, 1000)
    line.legs = [
        LegTimes(0, "prefill", 300, sent=1.0, begun=1.004),
        LegTimes(1, "decode", 300, sent=1.1, begun=1.2, copied=copied),
    ]
    collector.finished(None, line, None)
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_clients_parser_reads_every_family_back(status: dict) -> None:
    status["counters"]["single_engine_reasons"] = {'quote"\\\nline': 3}
    samples = scraped(status)
    names = {name for name, *_ in samples}
    base = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in names}
    assert base == metrics.NAMES
    reason = ("reason", 'quote"\\\nline')
    assert samples["pdnode:single_engine_total", reason] == 3
    prefill = (("engine", "0"), ("engine_id", "prefill-0"), ("role", "prefill"))
    assert samples["pdnode:engine_up", *prefill] == 1
    assert samples["pdnode:wait_seconds_count", ("leg", "decode")] == 1
    assert samples["pdnode:wait_seconds_bucket", ("le", "0.005"), ("leg", "prefill")] == 1
    [handoffs] = [v for (name, *_), v in samples.items() if name == "pdnode:handoffs_total"]
    assert handoffs == status["paths"][0]["handoffs"]


def known() -> set[str]:
    ours = set(metrics.NAMES)
    for name in metrics.HISTOGRAMS:
        ours |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    return ours | set(VLLM_NAMES.read_text().split())


def expressions(value: object) -> list[str]:
    """Every ``expr`` and ``query`` in a dashboard or a rules file."""
    if isinstance(value, dict):
        own = [value[key] for key in ("expr", "query") if isinstance(value.get(key), str)]
        return own + [e for child in value.values() for e in expressions(child)]
    if isinstance(value, list):
        return [e for child in value for e in expressions(child)]
    return []


def test_the_dashboard_names_only_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    used = {name for e in expressions(dashboard) for name in PROMQL_NAME.findall(e)}
    assert len(used) > 10
    assert used <= known(), used - known()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard["panels"]:
        assert panel["type"] == "row" or all(target["expr"] for target in panel["targets"])


def test_the_alerts_name_only_metrics_that_exist_and_say_what_to_do() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
    used = {name for e in expressions(rules) for name in PROMQL_NAME.findall(e)}
    assert used
    assert used <= known(), used - known()
    for group in rules["groups"]:
        for rule in group["rules"]:
            assert rule["alert"]
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["description"]


def test_the_minutes_line_is_in_vllms_words() -> None:
    done = [(0.001, 1_000_000)] * 9 + [(0.011, 1_000_000)]
    assert minute_line(done, failed=1, expired=0) == (
        "KV Transfer metrics: Num successful transfers=10, Avg xfer time (ms)=2.0, "
        "P90 xfer time (ms)=11.0, Avg MB per transfer=1.0, Throughput (MB/s)=500.0, "
        "Num failed transfers=1, Num KV expired reqs=0"
    )
    assert minute_line([], 0, 0) == ""
