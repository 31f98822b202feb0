"""The trainer's line to its agent: one thread owns the socket, the main thread has an inbox."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.wire import codec
from p2p_dmc.wire.trainer_messages import TrainerAlive

ALIVE_EVERY_MS = 1000  # an agent may take a trainer that says nothing for much longer for a stopped one
LINGER_MS = 1000  # what was said last still reaches the agent when the script ends


class LinkFailed(Exception):
    """The input/output thread ended by a fault of ours; the main thread must not wait for it."""


class AgentLink:
    """A DEALER to the agent. ``send`` is for any thread; ``get`` is for the main thread.

    ``early`` is called on the input/output thread with every message before anything else, and returns True
    for those that it has dealt with for good (the rest goes to the inbox, in order). It must not block. End
    of file on ``lifeline`` means that the agent is gone: the process exits at once, wherever the script is.
    """

    def __init__(self, endpoint: str, lifeline: int | None, early: Callable[[Any], bool]) -> None:
        self._endpoint = endpoint
        self._lifeline = lifeline
        self._early = early
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: deque[bytes] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._closing = False
        self._wake_lock = threading.Lock()
        self._closed = False
        self.waited_s = 0.0  # time the main thread has spent in get()
        self._thread = threading.Thread(target=self._run, name="dmc-link", daemon=True)
        self._thread.start()

    def send(self, message: Any) -> None:
        """Queue ``message`` for the agent; never blocks."""
        self._outbox.append(codec.encode(message))
        self._wake()

    def get(self, timeout_s: float | None = None) -> Any:
        """The next message, waiting for it; queue.Empty after ``timeout_s``.

        Waiting without a limit is bounded by the agent's life (``lifeline``).
        """
        started = time.perf_counter()
        try:
            return self._checked(self._inbox.get(timeout=timeout_s))
        finally:
            self.waited_s += time.perf_counter() - started

    def get_nowait(self) -> Any | None:
        """The next message if one is there."""
        try:
            return self._checked(self._inbox.get_nowait())
        except queue.Empty:
            return None

    def fail(self, reason: str) -> None:
        """The agent is gone: the main thread hears of it when it next waits. For any thread."""
        self._inbox.put(LinkFailed(reason))

    def close(self) -> None:
        """Send what is queued and end the thread; what is sent later goes nowhere."""
        self._closing = True
        self._wake()
        self._thread.join(timeout=LINGER_MS / 1000 + 1)
        with self._wake_lock:
            if not self._closed and not self._thread.is_alive():
                os.close(self._wake_read)
                os.close(self._wake_write)
            self._closed = True

    def _wake(self) -> None:
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # full of wake-ups: the thread will wake
            if not self._closed:
                os.write(self._wake_write, b"\0")

    def _checked(self, item: Any) -> Any:
        if isinstance(item, LinkFailed):
            raise item
        return item

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 the main thread raises it
            self._inbox.put(LinkFailed(f"the line to the agent broke: {type(error).__name__}: {error}"))

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = LINGER_MS
            socket.connect(self._endpoint)
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self._wake_read, zmq.POLLIN)
            lifeline, alive = self._lifeline, codec.encode(TrainerAlive())
            if lifeline is not None:
                poller.register(lifeline, zmq.POLLIN | zmq.POLLERR)
            while not (self._closing and not self._outbox):
                ready = dict(poller.poll(ALIVE_EVERY_MS if lifeline is not None else None))
                if not ready:
                    socket.send(alive)
                if lifeline is not None and lifeline in ready:
                    _check_lifeline(lifeline)
                if self._wake_read in ready:
                    _drain(self._wake_read)
                while self._outbox:
                    socket.send(self._outbox.popleft())
                while socket.poll(0):
                    self._receive(socket.recv())

    def _receive(self, data: bytes) -> None:
        try:
            message = codec.decode(data)
        except RemoteProtocolError as error:  # costs the message, nothing else
            print(f"p2p_dmc: unreadable message from the agent dropped: {error}", file=sys.stderr)
            return
        if not self._early(message):
            self._inbox.put(message)


def _check_lifeline(fd: int) -> None:
    if not os.read(fd, 64):
        # the agent is gone: a trainer without one must not go on, nor run the script's clean-up
        os._exit(1)


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass
