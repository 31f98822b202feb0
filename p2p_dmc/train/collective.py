"""One collective group for each view, made, cancelled and dropped as gloo allows (DESIGN.md section 7).

A group is made on a thread of its own while local steps go on, used by the main thread, and never used again
after a failure. Dropping never blocks the main thread: what is stuck is reaped in the background.
"""

from __future__ import annotations

import datetime
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from p2p_dmc.errors import UserError
from p2p_dmc.observe.phases import reach
from p2p_dmc.train import sockets
from p2p_dmc.train.exchange import CollectiveError, Exchange, first_line
from p2p_dmc.train.rendezvous import AgentStore
from p2p_dmc.wire.trainer_messages import StoreValue, ViewStarted

__all__ = ["REAPER_PREFIX", "CollectiveError", "GroupKeeper", "ViewGroup", "check_backend", "ring_bytes"]

REAPER_PREFIX = "dmc-reap-"  # threads that end a group; the process must not wait for a stuck one
SHUT_AGAIN_S = (
    0.05  # an abort while traffic flows can miss (18 of 520 measured): shut down until nothing is left
)
READY_TIMEOUTS = 5  # connecting takes gloo up to five of its time-outs
EARLY_VALUES = 256  # rendezvous values of a view that this trainer has not been told of yet


class ViewGroup:
    """The group of one view; of world 1 there is none and everything succeeds.

    ``all_reduce`` and ``exchange`` are for the main thread; ``cancel``, ``put`` and ``drop`` are for any thread
    and do not block.
    """

    def __init__(self, view: ViewStarted, host: str, send: Callable[[Any], None]) -> None:
        self.view = view
        self._host = host
        self._lock = threading.Lock()
        self._settled = threading.Event()  # made, failed or cancelled
        self._idle = threading.Event()  # no operation of the main thread holds the group
        self._idle.set()
        self._error: str | None = None
        self._dropped = False
        self._group: Any = None
        self._mine: sockets.Endpoint | None = None
        self._others: frozenset[sockets.Endpoint] = frozenset()
        self._store: AgentStore | None = None
        self._maker: threading.Thread | None = None
        if view.world > 1:
            self._store = AgentStore(view.view_id, send, self._wrap, self._unwrap)
            self._maker = threading.Thread(
                target=self._make, name=f"dmc-group-{view.view_epoch}", daemon=True
            )
            self._maker.start()
        else:
            self._settled.set()

    def put(self, message: StoreValue) -> None:
        """A rendezvous value from the agent."""
        store = self._store
        if store is not None:
            store.put(message.key, message.value)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the view's members, in place. CollectiveError leaves it partly reduced."""
        if self.view.world > 1:
            self._run(lambda group: _all_reduce(group, tensor))

    def exchange(self, work: Callable[[Exchange], None]) -> None:
        """Do ``work`` with messages between the view's members. CollectiveError, also when any of its messages fails.

        It keeps nothing of what it is given. Alone in a view there is nobody to send to.
        """
        view = self.view
        if view.world == 1:
            work(Exchange(None, view.rank, 1))
        else:
            self._run(lambda group: work(Exchange(group, view.rank, view.world)))

    def _run(self, work: Callable[[Any], None]) -> None:
        """Do something with the group once it stands."""
        timeout_s = READY_TIMEOUTS * self.view.group_timeout_ms / 1000
        if not self._settled.wait(timeout_s):
            raise CollectiveError(f"the group was not made within {timeout_s:.0f} s")
        with self._lock:
            group = self._group
            if self._error is not None or group is None:
                raise CollectiveError(self._error or "the group was dropped")
            self._idle.clear()
        failed = None
        try:
            work(group)
        except CollectiveError as error:
            failed = str(error)  # not the error itself: the frames of its traceback hold the group
        finally:
            del group  # the last reference must fall on the reaper's thread
            self._idle.set()
        if failed is not None or self._error is not None:
            raise CollectiveError(failed or self._error)

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the group stands, waiting at most ``timeout_s`` for it."""
        return self._settled.wait(timeout_s) and self._error is None

    def cancel(self, reason: str = "cancelled") -> None:
        """Whatever waits in this group fails now, and whatever comes later does too."""
        self._fail(reason)
        store = self._store
        if store is not None:
            store.cancel()
        sockets.shut_connected(self._mine, self._others)

    def drop(self) -> None:
        """Cancel the group and free it in the background."""
        with self._lock:
            if self._dropped or self.view.world == 1:
                return
            self._dropped = True
        self.cancel("dropped")
        name = f"{REAPER_PREFIX}{self.view.view_epoch}"
        threading.Thread(target=self._reap, name=name, daemon=True).start()

    def _make(self) -> None:
        try:
            group = _make_gloo(self._store, self.view, self._host)
        except Exception as error:  # noqa: BLE001 gloo lets through what our store raises, too
            self._fail(f"the group could not be made: {first_line(error)}")
            return
        with self._lock:
            self._group = group
        del group
        self._settled.set()

    def _reap(self) -> None:
        assert self._maker is not None
        self._maker.join(SHUT_AGAIN_S)
        while self._maker.is_alive() or not self._idle.wait(SHUT_AGAIN_S):
            sockets.shut_connected(self._mine, self._others)
            self._maker.join(SHUT_AGAIN_S)
        with self._lock:
            group, self._group = self._group, None
        del group  # about 10 ms for each member
        self._store = None

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._error = self._error or reason
        self._settled.set()

    def _wrap(self, blob: bytes) -> bytes:
        self._mine = sockets.listener_in(blob)
        return sockets.pack_value(self._mine, blob)

    def _unwrap(self, value: bytes) -> bytes:
        listener, blob = sockets.unpack_value(value)
        if listener is not None and listener != self._mine:
            self._others |= {listener}
        return blob


class GroupKeeper:
    """At most one group at a time: the current view's. ``early`` runs on the link's thread."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.host = ""  # the agent's welcome says it, before any view
        self._send = send
        self._lock = threading.Lock()
        self._current: ViewGroup | None = None
        self._early: deque[StoreValue] = deque(maxlen=EARLY_VALUES)
        self._closed = False

    def start(self, view: ViewStarted) -> None:
        """Make this view's group; an earlier view's is dropped."""
        with self._lock:
            if self._closed or (self._current is not None and self._current.view.view_id == view.view_id):
                return
            if self._current is not None:
                self._current.drop()
            self._current = None
            if view.backend != "gloo":  # the main thread refuses it (``check_backend``)
                return
            self._current = ViewGroup(view, self.host, self._send)
            for message in self._early:
                if message.view_id == view.view_id:
                    self._current.put(message)
            self._early.clear()

    def put(self, message: StoreValue) -> None:
        """A rendezvous value; of a view still to come it is kept."""
        with self._lock:
            if self._current is not None and self._current.view.view_id == message.view_id:
                self._current.put(message)
            else:
                self._early.append(message)

    def cancel(self, view_epoch: int) -> None:
        """The agent's word that this view's group is over."""
        with self._lock:
            group = self._current
        if group is not None and group.view.view_epoch == view_epoch:
            group.cancel("cancelled by the agent")

    def get(self, view_epoch: int) -> ViewGroup:
        """The group of this view; CollectiveError when it is another's turn already."""
        with self._lock:
            group = self._current
        if group is None or group.view.view_epoch != view_epoch:
            raise CollectiveError(f"view {view_epoch} is over")
        return group

    def drop(self, view_epoch: int) -> None:
        """After a failure: this view's group is never used again."""
        with self._lock:
            group = self._current
        if group is not None and group.view.view_epoch == view_epoch:
            group.drop()

    def close(self) -> None:
        """No group from now on."""
        with self._lock:
            self._closed = True
            group, self._current = self._current, None
        if group is not None:
            group.drop()


def check_backend(backend: str) -> None:
    """UserError for a backend that this version cannot make a group of."""
    if backend != "gloo":
        raise UserError(f"backend {backend!r} is not there yet: start the run with --backend gloo")


def ring_bytes(size_bytes: int, world: int) -> int:
    """Bytes that each member of a ring all-reduce sends, and receives."""
    return 2 * size_bytes * (world - 1) // world


def _all_reduce(group: Any, tensor: torch.Tensor) -> None:
    try:
        under_way = group.allreduce([tensor])
        reach("reducing")
        under_way.wait()
    except RuntimeError as error:
        raise CollectiveError(first_line(error)) from None


def _make_gloo(store: AgentStore | None, view: ViewStarted, host: str) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = datetime.timedelta(milliseconds=view.group_timeout_ms)
    options._threads = 1
    options._devices = [gloo.create_device(hostname=host)]  # the default would listen on loopback only
    return gloo(store, view.rank, view.world, options)
