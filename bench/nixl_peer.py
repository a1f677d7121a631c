"""A peer: two vLLM servers with the NixlConnector behind the least proxy they need, 1P1D on CPU cores.

As shipped, or ``quiet`` (bench/nixl_quiet.py): its best case where cores are few.
NIXL loads without CUDA: pip install 'pdnode[bench]'.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path

from bench.servers import START_S, Server, free_port

NOT_INSTALLED = "NIXL is not installed; pip install 'pdnode[bench]' brings it"
FIRST_S = 180.0
"""For the first request, which also connects the two engines: on two cores, with two threads that look
without pause, it took half a minute."""
MOVED = re.compile(r"^vllm:nixl_(bytes_transferred|xfer_time_seconds)_sum\S* (\S+)$", re.MULTILINE)


def installed() -> bool:
    return importlib.util.find_spec("nixl") is not None


class NixlEngine(Server):
    """One vLLM server that gives (``kv_producer``) or takes (``kv_consumer``) KV through NIXL."""

    def __init__(
        self, model: str, log: Path, cpus: str, role: str, quiet: bool, *args: str
    ) -> None:
        transfer: dict = {"kv_connector": "NixlConnector", "kv_role": role}
        transfer["kv_buffer_device"] = "cpu"
        if quiet:
            transfer["kv_connector_module_path"] = "bench.nixl_quiet"
            transfer["kv_connector_extra_config"] = {"num_threads": 0}
        serve = ("-m", "vllm.entrypoints.launchers.api_server.entry", "--model", model, *args)
        super().__init__(
            [*serve, "--kv-transfer-config", json.dumps(transfer)],
            log,
            {
                "VLLM_CPU_OMP_THREADS_BIND": cpus,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            },
        )


class NixlProxy(Server):
    def __init__(self, log: Path, prefill: str, decode: str) -> None:
        argv = ["-m", "bench.nixl_proxy", "--prefill", prefill, "--decode", decode]
        super().__init__(argv, log)


class NixlPair:
    """Looks like one server. ``prefill`` and ``decode`` are its engines, to be looked into or killed."""

    def __init__(
        self,
        model: str,
        folder: Path,
        *args: str,
        quiet: bool = False,
        cpus: Sequence[str] = ("0", "1"),
    ) -> None:
        self.prefill, self.decode = (
            NixlEngine(model, folder / f"nixl-{role}.log", bind, role, quiet, *args)
            for role, bind in zip(("kv_producer", "kv_consumer"), cpus, strict=True)
        )
        self.proxy = NixlProxy(folder / "nixl-proxy.log", self.prefill.url, self.decode.url)
        self.url, self.http = self.proxy.url, self.proxy.http

    def wait_ready(self, timeout_s: float = START_S) -> None:
        for server in (self.prefill, self.decode, self.proxy):
            server.wait_ready(timeout_s)
        self._connect()

    def _connect(self) -> None:
        """One request through both: the first also connects them."""
        model = self.http.get(f"{self.decode.url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": [7] * 300, "max_tokens": 2}
        self.http.post("/v1/completions", json=body, timeout=FIRST_S).raise_for_status()

    def kv_moved(self) -> tuple[float, float]:
        """(bytes, seconds) of all transfers so far, as the decode engine's own metrics count them."""
        sums = dict(MOVED.findall(self.decode.http.get("/metrics").text))
        return tuple(float(sums.get(n, 0)) for n in ("bytes_transferred", "xfer_time_seconds"))

    def tail(self, lines: int = 40) -> str:
        return "\n".join(s.tail(lines) for s in (self.prefill, self.decode, self.proxy))

    def stop(self) -> None:
        for server in (self.proxy, self.decode, self.prefill):
            server.stop()
