"""A plain ZeroMQ socket on the event loop: its messages go to a callback.

zmq.asyncio makes futures and looks at the socket's state several times for each message; where messages are many, that
is most of what they cost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import zmq
import zmq.asyncio

MOST_AT_ONCE = 16
"""Messages that are taken before others on the loop have their turn."""


def plain_socket(context: zmq.asyncio.Context, kind: int) -> zmq.Socket[bytes]:
    """A socket of this context that nothing waits on; the context closes it with its others."""
    made = context.socket(kind, socket_class=cast("Any", zmq.Socket))
    return cast("zmq.Socket[bytes]", made)


class Inbox:
    """``heard`` gets the frames of each message, in turn; while ``takes`` is false they stay in the socket's queue.

    Who makes ``takes`` true again calls `look`.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        heard: Callable[[Sequence[zmq.Frame]], None],
        takes: Callable[[], bool] = lambda: True,
    ) -> None:
        self.socket = socket
        self._heard = heard
        self._takes = takes
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.Handle | None = None
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._ready)
        self.look()

    def look(self) -> None:
        """See soon whether there are messages.

        The descriptor tells of news once, and whatever else is done with the socket may use that up.
        """
        if self._due is None and not self.socket.closed:
            self._due = self._loop.call_soon(self._ready)

    def _ready(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        for _ in range(MOST_AT_ONCE):
            if self.socket.closed or not self._takes():
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._heard(frames)
        self.look()

    def send(self, frames: Sequence[Any], *, copy: bool = True) -> None:
        """Without waiting; ZMQError where it cannot be sent now."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy)
        finally:
            self.look()

    def close(self) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self._descriptor)
            self.socket.close(0)
