"""Calls that concern every engine of the node, answered as one engine would answer.

vLLM's front end knows one engine; an operator's call to it (reset the prefix cache, load a LoRA,
pause) is meant for all of ours. Each call goes to every ready engine at once; what the answers
become is said per call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pdnode.engine import Engine, EngineState
from pdnode.errors import EnginesDisagree


def _first(results: list) -> Any:
    return results[0]


def _concatenated(results: list[list]) -> list:
    return [item for result in results for item in result]


class FanOut:
    def __init__(self, engines: list[Engine]) -> None:
        self._engines = engines
        self.told_to_abort = False
        """The operator paused the engines, or put them to sleep: they end what they run."""

    async def _all(self, method: str, *args: Any, merge: Callable[[list], Any] = _first) -> Any:
        ready = [e for e in self._engines if e.state is EngineState.READY]
        calls = (getattr(engine.client, method)(*args) for engine in ready)
        return merge(list(await asyncio.gather(*calls)))

    async def _agreed(self, method: str, *args: Any) -> Any:
        def same(results: list) -> Any:
            if any(result != results[0] for result in results):
                raise EnginesDisagree(f"the engines answered {method} differently: {results}")
            return results[0]

        return await self._all(method, *args, merge=same)

    async def get_supported_tasks_async(self):
        return await self._all("get_supported_tasks_async")

    async def pause_scheduler_async(self, mode="abort", clear_cache: bool = True) -> None:
        self.told_to_abort = mode == "abort"
        await self._all("pause_scheduler_async", mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        await self._all("resume_scheduler_async")
        self.told_to_abort = False

    async def is_scheduler_paused_async(self) -> bool:
        return await self._all("is_scheduler_paused_async", merge=all)

    async def profile_async(self, *args: Any, **kwargs: Any) -> None:
        ready = [e for e in self._engines if e.state is EngineState.READY]
        await asyncio.gather(*(e.client.profile_async(*args, **kwargs) for e in ready))

    async def reset_mm_cache_async(self) -> None:
        await self._all("reset_mm_cache_async")

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        # Always with the connector: what it shows to other engines is part of the prefix cache.
        return await self._all("reset_prefix_cache_async", reset_running_requests, True, merge=all)

    async def reset_encoder_cache_async(self) -> None:
        await self._all("reset_encoder_cache_async")

    async def sleep_async(self, level: int = 1, mode="abort") -> None:
        self.told_to_abort = mode == "abort"
        await self._all("sleep_async", level, mode)

    async def release_kv_cache_memory_async(self) -> None:
        await self._all("release_kv_cache_memory_async")

    async def wake_up_async(self, tags: list[str] | None = None) -> bool:
        woken = await self._all("wake_up_async", tags, merge=all)
        self.told_to_abort = False
        return woken

    async def is_sleeping_async(self) -> bool:
        return await self._all("is_sleeping_async", merge=all)

    async def execute_dummy_batch_async(self) -> None:
        await self._all("execute_dummy_batch_async")

    async def set_weight_version_async(self, weight_version: str) -> None:
        await self._all("set_weight_version_async", weight_version)

    async def get_weight_version_async(self) -> str:
        return await self._agreed("get_weight_version_async")

    async def add_lora_async(self, lora_request) -> bool:
        return await self._all("add_lora_async", lora_request, merge=all)

    async def remove_lora_async(self, lora_id: int) -> bool:
        return await self._all("remove_lora_async", lora_id, merge=all)

    async def list_loras_async(self) -> set[int]:
        return await self._all("list_loras_async", merge=lambda sets: set.intersection(*sets))

    async def pin_lora_async(self, lora_id: int) -> bool:
        return await self._all("pin_lora_async", lora_id, merge=all)

    async def save_sharded_state_async(self, path: str, pattern=None, max_size=None) -> None:
        # Every engine holds the same weights; one copy is the model.
        await self._engines[0].client.save_sharded_state_async(path, pattern, max_size)

    async def collective_rpc_async(self, method, timeout=None, args=(), kwargs=None) -> list:
        return await self._all(
            "collective_rpc_async", method, timeout, args, kwargs, merge=_concatenated
        )

    async def compute_weight_checksums_async(self) -> list[dict[str, str]]:
        return await self._all("compute_weight_checksums_async", merge=_concatenated)

    async def get_status(self):
        return await self._all("get_status")
