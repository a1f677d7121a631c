"""The node's own hand on the roles: looks, asks ``roles``, changes, and says why."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pdnode.roles import LOOK_S, Hysteresis, propose

if TYPE_CHECKING:
    from pdnode.node import Node


async def keep(node: Node) -> None:
    """As long as the node serves."""
    started = {spec.slot: spec.role for spec in node.config.engines}
    gate = Hysteresis()
    while True:
        await asyncio.sleep(LOOK_S)
        if not node.ready or node.draining:
            continue
        change = gate.look(propose(node.client.view(), started), time.monotonic())
        if change is None:
            continue
        engine = node.engines[change.slot]
        saves = f", saves about {change.saves_ms:.0f} ms" if change.saves_ms else ""
        node.progress.line(
            f"--roles auto: {engine.engine_id} is sent {change.role} ({change.reason}{saves})"
        )
        node.change_role(engine.engine_id, change.role, change.reason)
