"""What others get of this peer's shards: whole ones, and the ranges of those that it is receiving itself.

Only a whole shard has a digest, so what is passed on early is not verified by whoever passes it on. Whoever receives
it verifies the whole, as always, and finds out who sent what was wrong (`fetching`): damage costs a second fetch and
a name, and never goes further than into a file that does not count yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from p2p_dmc.agent.known import Known
from p2p_dmc.core.pledges import Key
from p2p_dmc.data.store import ShardMissing, Stamp, Store
from p2p_dmc.wire import codec
from p2p_dmc.wire.messages import BulkRequest

MOST_RANGES = 256
"""Of one shard that are told."""
RECENT_S = 3.0
"""A shard that came lately is told of along with those on their way: the word that it is held may take a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a peer has of the shards of one data set that it is receiving: (shard, ((start, end), ...)) in bytes."""

    shards: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class _WrittenToError(Exception):
    """A shard's file is another one than was verified."""


class Serving:
    """Answers bulk requests for shards and for what there is of them; reads in ``threads``, off the event loop."""

    def __init__(
        self,
        store: Store,
        known: Mapping[bytes, Known],
        coming: Callable[[], Iterable[Key]],
        damaged: Callable[[Key], None],
        threads: Executor,
    ) -> None:
        self._store = store
        self._known = known
        self._coming = coming
        self._damaged = damaged
        self._threads = threads
        self._came_s: dict[Key, float] = {}

    def came(self, key: Key) -> None:
        """A shard is whole now."""
        now_s = time.monotonic()
        self._came_s = {k: s for k, s in self._came_s.items() if now_s - s < RECENT_S} | {key: now_s}

    async def shard(self, request: BulkRequest) -> tuple[int, bytes] | None:
        """A range of a shard that is held, or that has arrived of one on its way."""
        known = self._known.get(request.digest)
        if known is None or request.part >= len(known.manifest.shards):
            return None
        total = known.manifest.shard_sizes[request.part]
        offset = min(request.offset, total)
        key, size = (request.digest, request.part), min(request.size, total - offset)
        if request.part in known.doubted and self._store.has(*key):
            return None  # nobody gets it before it was looked at again
        verified = known.verified.get(request.part)
        try:
            data = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._read, key, verified, offset, size
            )
        except ShardMissing:
            self._damaged(key)
            return None
        except _WrittenToError:
            if known.verified.get(request.part) == verified:  # else it was verified anew meanwhile
                self._damaged(key)
            return None
        return (total, data) if data is not None else None

    def _read(self, key: Key, verified: Stamp | None, offset: int, size: int) -> bytes | None:
        coming = self._store.begun(*key)
        if coming is not None and (data := coming.read(offset, size)) is not None:
            return data
        if coming is not None and not self._store.has(*key):
            return None
        if verified is not None and self._store.stamp(*key) != verified:
            raise _WrittenToError
        return self._store.read_range(*key, offset, size)

    def parts(self, request: BulkRequest) -> tuple[int, bytes] | None:
        """What has arrived of the shards that are on their way, or came lately."""
        known = self._known.get(request.digest)
        if known is None:
            return None
        now_s, sizes = time.monotonic(), known.manifest.shard_sizes
        told: dict[int, tuple[tuple[int, int], ...]] = {
            part: ((0, sizes[part]),)
            for (dataset, part), came_s in self._came_s.items()
            if dataset == request.digest and now_s - came_s < RECENT_S and self._store.has(dataset, part)
        }
        for dataset, part in self._coming():
            coming = self._store.begun(dataset, part) if dataset == request.digest else None
            if coming is not None and coming.written_bytes:
                told[part] = tuple(coming.written_ranges[:MOST_RANGES])
        data = codec.pack_value(Parts(shards=tuple(sorted(told.items()))))
        return len(data), data[request.offset : request.offset + request.size]
