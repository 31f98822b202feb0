"""What the agents do for a rendezvous, in one ROUTER: what one member publishes goes to all of them."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import zmq

from p2p_dmc.wire import codec
from p2p_dmc.wire import trainer_messages as tm


class Relay:
    """Passes StoreSet on as StoreValue to every trainer that has said anything, answers StoreGet, keeps the
    rest.

    ``hold`` delays publications until ``release``: a member whose state is not there yet.
    """

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/relay"
        self.seen: list[object] = []
        self._members: set[bytes] = set()
        self._values: dict[tuple[bytes, str], bytes] = {}
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(self.endpoint)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)
        self._socket.close()
        self._context.term()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(50):
                continue
            sender, data = self._socket.recv_multipart()
            self._members.add(sender)
            message = codec.decode(data)
            if isinstance(message, tm.StoreSet):
                self._values[message.view_id, message.key] = message.value
                for member in self._members:
                    self._value(member, message.view_id, message.key)
            elif isinstance(message, tm.StoreGet):
                self._value(sender, message.view_id, message.key)
            else:
                self.seen.append(message)

    def _value(self, member: bytes, view_id: bytes, key: str) -> None:
        if (view_id, key) in self._values:
            value = tm.StoreValue(view_id=view_id, key=key, value=self._values[view_id, key])
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([member, codec.encode(value)])
