"""Rendezvous without a master: the store that gloo asks, answered through the agents (DESIGN.md section 7).

Of a store, gloo uses ``set`` of one key and ``wait`` and ``get`` of each member's key, from whatever thread
makes the group. Each value goes to the view's members through the authenticated agents.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from p2p_dmc.observe.phases import reach
from p2p_dmc.wire.trainer_messages import StoreGet, StoreSet

ASK_AGAIN_S = 0.2
WAIT_LIMIT_S = 600.0  # a member may be adopting a large state; a cancelled view ends the wait long before


class ViewCancelled(Exception):
    """The view that this group was for is over."""


class AgentStore(dist.Store):
    """The rendezvous of one view. The Python object must live as long as the group that uses it.

    ``wrap`` and ``unwrap`` add to and take from the published value what the group itself must know of the
    others.
    """

    def __init__(
        self,
        view_id: bytes,
        send: Callable[[Any], None],
        wrap: Callable[[bytes], bytes],
        unwrap: Callable[[bytes], bytes],
    ) -> None:
        super().__init__()
        self._view_id = view_id
        self._send = send
        self._wrap = wrap
        self._unwrap = unwrap
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._cancelled = False

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        wrapped = self._wrap(bytes(value))
        self.put(key, wrapped)
        self._send(StoreSet(view_id=self._view_id, key=key, value=wrapped))
        reach("rendezvous")

    def get(self, key: str) -> bytes:
        self._await(key, WAIT_LIMIT_S)
        return self._unwrap(self._values[key])

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        # gloo passes the group's time-out, which is for a broken connection; members come when their state is
        # there
        for key in keys:
            self._await(key, WAIT_LIMIT_S)

    def put(self, key: str, value: bytes) -> None:
        """A value from the agent, or our own. The first one stands."""
        with self._changed:
            self._values.setdefault(key, value)
            self._changed.notify_all()

    def cancel(self) -> None:
        """End every wait, now and later, with ViewCancelled."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def _await(self, key: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._cancelled or key in self._values, timeout=ASK_AGAIN_S)
                if key in self._values and not self._cancelled:
                    return
                cancelled = self._cancelled
            if cancelled:
                raise ViewCancelled("the view ended while its group was being made")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no member published {key} within {limit_s:.0f} s")
            self._send(StoreGet(view_id=self._view_id, key=key))
