"""``--kv-pool-gib``: off by default, counted, and refused where it could not serve."""

from __future__ import annotations

from types import SimpleNamespace as Fields

import pytest

from pdnode import checks, config
from pdnode.errors import ConfigError

GIB = checks.GIB


@pytest.fixture(autouse=True)
def box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "port", lambda host, number: None)
    monkeypatch.setattr(checks, "free_shm_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(checks, "available_memory_bytes", lambda: 8 * GIB)


def parse(text: str) -> config.NodeConfig:
    placement = ["--prefill-cpus", "0", "--decode-cpus", "1"]
    return config.parse(["--dry-run", *placement, *text.split()])


def test_off_by_default() -> None:
    assert parse("").kv_pool_bytes == 0


def test_the_default_kv_leaves_room_for_it() -> None:
    with_pool = parse("--kv-pool-gib 4")
    assert with_pool.kv_pool_bytes == 4 * GIB
    assert with_pool.kv_cache_bytes < parse("").kv_cache_bytes


@pytest.mark.parametrize(
    "text, expected",
    [
        ("--kv-pool-gib 9", "9216 MiB of KV pool"),
        ("--kv-pool-gib 7 --kv-cache-memory-bytes 1G", "lower --kv-pool-gib or --kv-cache-memory"),
        ("--kv-pool-gib -1", "-1 is not a number of at least 0"),
        ("--kv-pool-gib 1 --no-enable-prefix-caching", "leave --no-enable-prefix-caching out"),
    ],
)
def test_refusals(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    "kind, decode_tp, expected",
    [("gpu", 2, "for CPU engines so far"), ("cpu", 1, "--prefill-tp 2 and --decode-tp 1")],
)
def test_engines_it_could_not_serve(kind: str, decode_tp: int, expected: str) -> None:
    own = Fields(kv_pool_gib=1, prefill_tp=2, decode_tp=decode_tp)
    with pytest.raises(ConfigError, match=expected):
        config._pool(own, Fields(enable_prefix_caching=None), Fields(prefill=[Fields(kind=kind)]))
