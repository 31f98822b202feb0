"""Getting the manifests of data sets that other peers speak of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from p2p_dmc.agent.bulk import BulkClient, SourceLostError
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.core.membership import MemberRecord
from p2p_dmc.data.disk import StoreFull
from p2p_dmc.data.manifest import MAX_MANIFEST_BYTES, Manifest
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire.messages import BulkKind, Holdings

log = logging.getLogger("p2p_dmc.data")
MOST = 64
"""Manifests that are fetched at once of those that one peer speaks of; it will speak of the others again."""

Then = Callable[[str, Holdings, Manifest], None]


class Manifests:
    """Fetches each from the peer that spoke of it."""

    def __init__(
        self,
        bulk: BulkClient,
        range_bytes: int,
        members: Callable[[], tuple[MemberRecord, ...]],
        tasks: Tasks,
        no_room: Callable[[StoreFull], None],
    ) -> None:
        self._bulk = bulk
        self._range_bytes = range_bytes
        self._members = members
        self._tasks = tasks
        self._no_room = no_room
        self._senders: dict[bytes, str] = {}

    def fetch(self, sender: str, said: Holdings, then: Then) -> None:
        """Unless that is under way; ``then`` learns it."""
        under_way = sum(other == sender for other in self._senders.values())
        if said.dataset not in self._senders and under_way < MOST:
            self._senders[said.dataset] = sender
            self._tasks.spawn(self._fetch(sender, said, then))

    async def _fetch(self, sender: str, said: Holdings, then: Then) -> None:
        try:
            address = next((r.bulk_address for r in self._members() if r.peer_id == sender), None)
            parts: list[bytes] = []
            total = 1
            while address is not None and sum(map(len, parts)) < total:
                total, data = await self._bulk.fetch(
                    address,
                    BulkKind.MANIFEST,
                    digest=said.dataset,
                    offset=sum(map(len, parts)),
                    size=self._range_bytes,
                )
                if total > MAX_MANIFEST_BYTES:
                    raise RemoteProtocolError(f"a manifest of {total} bytes")
                parts.append(bytes(data))
            manifest = await asyncio.to_thread(
                Manifest.from_bytes, b"".join(parts)
            )  # of many shards it takes seconds
            if manifest.digest != said.dataset:
                raise RemoteProtocolError("another manifest than was asked for")
            then(sender, said, manifest)
        except StoreFull as error:  # it is tried again when somebody speaks of it again
            self._no_room(error)
        except (SourceLostError, RemoteProtocolError, UserError) as error:
            log.warning("manifest %s from %s: %s", said.dataset.hex(), sender, error)
        finally:
            self._senders.pop(said.dataset, None)
