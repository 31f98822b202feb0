"""Whether this machine has room for more shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from p2p_dmc.agent.known import Known
from p2p_dmc.data.disk import StoreFull
from p2p_dmc.data.store import Store
from p2p_dmc.observe.journal import Journal

AGAIN_S = 60.0
"""That there is no room is said again only if it was not found for so long: many shards may find it at once, and what
they give back may be enough for one of them to begin again."""


class Room:
    """Says it once when there is none, however many shards and manifests find that out."""

    def __init__(
        self, store: Store, known: Mapping[bytes, Known], say: Callable[[str], None], journal: Journal
    ) -> None:
        self._store = store
        self._known = known
        self._say = say
        self._journal = journal
        self._full = False
        self._found_s: float | None = None

    def used_up(self, error: StoreFull) -> None:
        """There was none for something that came."""
        now_s = time.monotonic()
        is_news = self._found_s is None or now_s - self._found_s > AGAIN_S
        self._full, self._found_s = True, now_s
        if is_news:
            self._say(str(error))
            self._journal.event("store_full", reason=str(error))

    @property
    def full(self) -> bool:
        """There was no room for a shard, and there is none for a few yet."""
        if self._full:
            largest = max((max(k.manifest.shard_sizes) for k in self._known.values()), default=0)
            # no more may be there, ever
            room = max(largest, (self._store.capacity_bytes or 8 * largest) // 2)
            self._full = self._store.free_bytes() < min(4 * largest, room)
        return self._full
