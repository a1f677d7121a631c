"""vLLM's NIXL connector on its engine's own cores: NIXL's progress thread sleeps until there is
something to do, and the worker stays where it was bound.

Its best case where cores are few. As shipped the thread looks without pause, which takes a core per
worker, and vLLM moves every worker to the machine's last core. NIXL itself can sleep (``pthrDelay``),
its Python half asks for 0; neither it nor vLLM has a setting. Named as ``kv_connector_module_path``.
"""

from __future__ import annotations

import os
from typing import Any

from nixl import _api
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

SLEEP_US = 100_000
"""At most: a peer's message wakes it. What NIXL's listener thread does as shipped."""


class _Bindings:
    """NIXL's compiled half, with one constructor of it changed."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        config.pthrDelay = SLEEP_US
        return self._real.nixlAgent(name, config)


_api.nixlBind = _Bindings(_api.nixlBind)


class NixlConnector(nixl.NixlConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        cores = os.sched_getaffinity(0)
        super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, cores)
