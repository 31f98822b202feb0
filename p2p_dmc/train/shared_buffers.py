"""Shared memory in which workers hand over their batches, used again and again.

torch makes new shared memory for each tensor and sends its descriptor over a connection of its own: with small
samples that costs more than reading and decoding them, and with large ones the kernel clears each page of it. Here a
task comes with a buffer that is lent, the worker writes the batch's tensors there, and it is lent again when nothing
in the loop's process refers to it. Where no buffer is to be had (they take Linux's memfd, and the loop may keep its
batches), the tensors go torch's way.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import mmap
import os
import pickle
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch.multiprocessing import reductions
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

SPARE = 4
"""Buffers beyond the batches under way: the loop has one or two batches, and may let go late."""
MOST_BUFFERS = 64
"""Each takes two of the descriptors that a process may have open, 1024 as a rule."""
LEAST_BYTES = 1 << 16
"""Of a buffer, which grows by doubling."""
ALIGN_BYTES = 64
MOST_APART = 2
"""A tensor that is a view of memory more than so many times its size goes torch's way, which can leave that where it
is."""

_by_torch: dict[type, Callable[[Any], Any]] = {
    torch.Tensor: reductions.reduce_tensor,
    torch.UntypedStorage: reductions.reduce_storage,
}


class Loan(NamedTuple):
    """A buffer for one task: its number, where a worker opens it, what the worker must find there, and how many
    buffers there are at most.
    """

    number: int
    path: str
    identity: tuple[int, int]
    among: int


# -- the loop's side ---------------------------------------------------------------------------------------------


class SharedBuffers:
    """Invariant: a buffer is idle, lent with one task, or in use, which is as long as a tensor that was made of it
    lives in this process. One that is in use at a fork is never lent again: the child may look at it for long.
    """

    def __init__(self, batches: int) -> None:
        """``batches``: under way at most."""
        self._most = min(batches + SPARE, MOST_BUFFERS)
        self._idle: list[_Buffer] = []  # the last one is the warmest
        self._lent: dict[int, _Buffer] = {}
        self._used: dict[int, _Buffer] = {}
        self._gone: deque[_View] = deque()
        """Views whose buffers are idle: told from any thread and in the middle of anything, so no code of ours runs."""
        _ALL.add(self)
        _watch_forks()

    def lend(self) -> Loan | None:
        """For one task; None if none is to be had."""
        self._take_back()
        if self._idle:
            buffer = self._idle.pop()
        elif len(self._lent) + len(self._used) < self._most and hasattr(os, "memfd_create"):
            try:
                buffer = _Buffer()
            except OSError:
                return None
        else:
            return None
        self._lent[buffer.number] = buffer
        _LENDERS[buffer.number] = self
        return Loan(buffer.number, buffer.path, buffer.identity, self._most)

    def open(self, number: int, used: int, data: bytes) -> Any:
        """What a worker has pickled into ``data``, the memory of whose tensors is in the buffer's first bytes."""
        buffer = self._lent[number]
        view = buffer.view(used)
        buffer.watched = _View(view, self._gone.append)
        buffer.watched.number = number
        self._used[number] = buffer
        del self._lent[number]
        return _Unpickler(data, view).load()

    def close(self) -> None:
        """The workers have ended. What the loop has stays as it is."""
        self.leave_used()
        for buffer in (*self._idle, *self._lent.values()):
            _LENDERS.pop(buffer.number, None)
            buffer.close()
        self._idle.clear()
        self._lent.clear()

    def leave_used(self) -> None:
        """Those that are in use now are not lent any more. For any thread."""
        self._take_back()
        for number in list(self._used):
            buffer = self._used.pop(number, None)
            if buffer is not None:
                buffer.close()

    def _take_back(self) -> None:
        """A thread that forks may do so at the same time; a lock would be held in its child for ever."""
        with contextlib.suppress(IndexError):
            while True:
                buffer = self._used.pop(self._gone.popleft().number, None)
                if buffer is not None:
                    self._idle.append(buffer)


class _View(weakref.ref[memoryview]):
    """Of the buffer with this number: it is in use while the view lives."""

    __slots__ = ("number",)
    number: int


class _Buffer:
    """Memory without a name in any folder. What is mapped stays when it is closed."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.number = next(_NUMBERS)
        self._file = os.memfd_create("p2p_dmc")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.identity = _identity(self._file)
        self.watched: _View | None = None
        self._memory: mmap.mmap | None = None

    def view(self, size: int) -> memoryview:
        if not size:
            return memoryview(bytearray())
        if self._memory is None or len(self._memory) < size:
            self._memory = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return memoryview(self._memory)[:size]

    def close(self) -> None:
        os.close(self._file)
        self._memory = None


_NUMBERS = itertools.count()
_LENDERS: dict[int, SharedBuffers] = {}
"""Of lent buffers, by number: torch calls `_open` with nothing but what the worker has sent, in a thread of its own if
batches are pinned."""
_ALL: weakref.WeakSet[SharedBuffers] = weakref.WeakSet()
_forks_watched = False


def _open(number: int, used: int, data: bytes) -> Any:
    return _LENDERS.pop(number).open(number, used, data)


def _watch_forks() -> None:
    global _forks_watched
    if not _forks_watched and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before_fork)
        _forks_watched = True


def _before_fork() -> None:
    for buffers in list(_ALL):
        buffers.leave_used()


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, view: memoryview) -> None:
        super().__init__(io.BytesIO(data))
        self._view = view

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _storage_at.__name__):
            return partial(_storage_in, self._view)  # a method would keep the view until garbage is collected
        return super().find_class(module, name)


def _storage_in(view: memoryview, at: int, size: int) -> torch.UntypedStorage:
    return torch.frombuffer(view, dtype=torch.uint8, count=size, offset=at).untyped_storage()


# -- a worker's side ---------------------------------------------------------------------------------------------


class Parcel:
    """What was made of a task, pickled; where it is unpickled, that comes out."""

    def __init__(self, number: int, used: int, data: bytes) -> None:
        self._parts = number, used, data

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _open, self._parts


class Desk:
    """Where a worker writes: it keeps the buffers mapped that it has had."""

    def __init__(self) -> None:
        self._memory: OrderedDict[int, mmap.mmap] = OrderedDict()
        """By number, the least recently lent first."""

    def begin(self, loan: Loan) -> Writer:
        """For one batch."""
        memory = self._memory.pop(loan.number, None)
        while len(self._memory) >= loan.among:
            self._memory.popitem(last=False)
        return Writer(loan, memory)

    def pack(self, made: Any, writer: Writer) -> Parcel:
        """Raises whatever pickling raises."""
        data = writer.pickle(made)
        if writer.memory is not None:
            self._memory[writer.loan.number] = writer.memory
        return Parcel(writer.loan.number, writer.used, data)


class Writer:
    """Writes the memory of one batch's tensors into a buffer, one after the other."""

    def __init__(self, loan: Loan, memory: mmap.mmap | None) -> None:
        """``memory``: the buffer, if it is mapped already."""
        self.loan = loan
        self.memory = memory
        self.used = 0
        self._places: dict[int, tuple[int, torch.Tensor]] = {}
        """Of what was written into the buffer, by address; with its tensor, so that nothing else gets that address."""
        self._apart: set[int] = set()

    def collate(self, items: list[Any]) -> Any:
        """As torch's default_collate does, into the buffer."""
        return collate(items, collate_fn_map={**default_collate_fn_map, torch.Tensor: self._stack})

    def pickle(self, made: Any) -> bytes:
        """What may have tensors anywhere in it; tensors that share memory still do so when they come out."""
        file = io.BytesIO()
        pickler = ForkingPickler(file, pickle.HIGHEST_PROTOCOL)
        reducers: dict[type, Callable[[Any], Any]] = {
            torch.Tensor: self._reduce_tensor,
            torch.UntypedStorage: self._reduce_storage,
        }
        pickler.dispatch_table = {**pickler.dispatch_table, **reducers}
        pickler.dump(made)
        return file.getvalue()

    def _stack(self, items: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        first = items[0]
        room = self._room(first.nbytes * len(items)) if _is_plain(first) else None
        if room is None:
            return collate_tensor_fn(items, collate_fn_map=collate_fn_map)
        return torch.stack(tuple(items), 0, out=room.view(first.dtype).view(len(items), *first.shape))

    def _room(self, size: int) -> torch.Tensor | None:
        """So many bytes of the buffer; None if they cannot be had."""
        at = self.used
        if not size:
            return None
        if self.memory is None or len(self.memory) < at + size:
            try:
                self.memory = _grown(self.loan, at + size)
            except OSError:
                return None
        self.used = -(-(at + size) // ALIGN_BYTES) * ALIGN_BYTES
        room = torch.frombuffer(self.memory, dtype=torch.uint8, count=size, offset=at)
        self._places[room.data_ptr()] = at, room
        return room

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            if storage.nbytes() > MOST_APART * tensor.nbytes:
                self._apart.add(storage.data_ptr())
        return _by_torch[torch.Tensor](tensor)

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        if storage.device.type != "cpu" or not storage.nbytes() or storage.is_shared():
            return _by_torch[torch.UntypedStorage](storage)
        address = storage.data_ptr()
        if address not in self._places:
            room = None if address in self._apart else self._room(storage.nbytes())
            if room is None:
                return _by_torch[torch.UntypedStorage](storage)
            room.untyped_storage().copy_(storage)
            address = room.data_ptr()
        return _storage_at, (self._places[address][0], storage.nbytes())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Nothing but numbers one after the other."""
    strided = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return strided and type(tensor) is torch.Tensor and not tensor.is_nested


def _grown(loan: Loan, least_bytes: int) -> mmap.mmap:
    """A buffer that has so many bytes at least. Raises OSError."""
    file = os.open(loan.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if _identity(file) != loan.identity:
            raise OSError(f"{loan.path} is another file now")
        size = max(LEAST_BYTES, os.fstat(file).st_size, 1 << (least_bytes - 1).bit_length())
        os.ftruncate(file, size)
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _storage_at(at: int, size: int) -> torch.UntypedStorage:
    """Stands in what is pickled for `_storage_in` of the view there."""
    raise RuntimeError("a buffer's memory outside of a parcel")
