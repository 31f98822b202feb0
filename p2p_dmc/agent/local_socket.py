"""The ipc:// socket of one agent: its trainers, and local commands such as `join` on a running home."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
import zmq.asyncio

from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire import codec

log = logging.getLogger("p2p_dmc.local")


class LocalSocket:
    """One ROUTER; ``on_message(routing id, message)``. Only this user can open the folder that it lies in."""

    def __init__(self, context: zmq.asyncio.Context, on_message: Callable[[bytes, object], None]) -> None:
        self._router = context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 200)
        self._router.setsockopt(zmq.SNDHWM, 0)  # the other side is this peer's own process
        self._router.setsockopt(zmq.MAXMSGSIZE, codec.MAX_MESSAGE_BYTES)
        self._on_message = on_message
        self.serving: asyncio.Task[None] | None = None
        self.bad = 0

    def bind(self, endpoint: str) -> None:
        self._router.bind(endpoint)
        self.serving = asyncio.create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            try:
                if len(frames) != 2:
                    raise RemoteProtocolError("a local message has one frame")
                self._on_message(frames[0], codec.decode(frames[1]))
            except RemoteProtocolError as error:
                self.bad += 1
                log.warning("a local message is dropped: %s", error)

    def send(self, routing_id: bytes, message: object) -> None:
        self._router.send_multipart([routing_id, codec.encode(message)], flags=zmq.NOBLOCK)

    def close(self) -> None:
        if self.serving is not None:
            self.serving.cancel()
        self._router.close()
