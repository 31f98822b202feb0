"""Who is to keep what, followed as peers come and go; in a thread for a large data set, for the agent must hear."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from p2p_dmc.agent.known import Known, placed_on
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.core.placement import Placement, StoringPeer
from p2p_dmc.core.replication import Plan
from p2p_dmc.core.shard_set import ShardSet
from p2p_dmc.data.manifest import Manifest

log = logging.getLogger("p2p_dmc.data")
AT_ONCE = 300_000
"""Shards times peers that changed: so many scores are computed in some tens of ms."""

Facts = tuple[tuple[StoringPeer, ...], dict[str, ShardSet]]
"""The peers that store, sorted by peer_id, and those of them without room, with what they hold."""


class Placing:
    """Keeps each data set's plan up to date; ``placed`` hears of each new one.

    A result for facts that have changed while it was computed is not used, but the next one starts from it.
    """

    def __init__(self, facts: Callable[[Known], Facts], placed: Callable[[Known, Plan], None]) -> None:
        self._facts = facts
        self._placed = placed
        self._running: set[bytes] = set()
        self._tasks = Tasks(lambda error: log.error("a task failed", exc_info=error))

    def follow(self, known: Known, plan: Plan | None) -> None:
        """``plan`` is what there is; a new one comes now or soon, if other facts are true."""
        peers, full = self._facts(known)
        if plan is not None and plan.placed.peers == peers and plan.is_of(plan.placed, full):
            return
        if known.manifest.digest in self._running:
            return
        changed = set(peers) ^ set(plan.placed.peers if plan is not None else ())
        if len(known.manifest.shards) * (1 + len(changed) + len(full)) <= AT_ONCE:
            self._placed(known, planned(known.manifest, known.placed, plan, (peers, full)))
        else:
            self._running.add(known.manifest.digest)
            self._tasks.spawn(self._in_background(known, plan))

    async def _in_background(self, known: Known, plan: Plan | None) -> None:
        placed = known.placed
        try:
            facts = self._facts(known)
            while True:
                plan = await asyncio.to_thread(planned, known.manifest, placed, plan, facts)
                placed, of = plan.placed, facts
                facts = self._facts(known)
                if of == facts:
                    self._placed(known, plan)
                    return
        finally:
            self._running.discard(known.manifest.digest)

    async def close(self) -> None:
        await self._tasks.close()


def planned(manifest: Manifest, placed: Placement | None, before: Plan | None, facts: Facts) -> Plan:
    """The plan for these facts, with all that is computed of it once, from those that there were."""
    peers, full = facts
    placed = placed_on(manifest, placed, peers)
    placed.digest()
    return Plan(placed, full, before)
