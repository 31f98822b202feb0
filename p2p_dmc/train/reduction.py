"""The sum of all members' vectors by way of compressed messages, with error feedback (see docs/compression.md).

A vector is cut into stripes, and each stripe into a segment for each member, its owner. Members send the owner what
they add to a segment; it adds these to its own in float32, and sends the sum to all. So each member's part is rounded
once and the sum once, however many they are, and everybody reads the sum from the same bytes. Two stripes are under
way while a third is coded, and nobody can be more than that ahead: a slow member slows every wait a little, as in a
ring, and no wait a lot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch

from p2p_dmc.observe.phases import reach
from p2p_dmc.train.collective import ViewGroup, ring_bytes
from p2p_dmc.train.compression import Codec, codec
from p2p_dmc.train.exchange import Exchange, Message

STRIPE_BYTES = 1 << 19
"""Of a stripe's payload, about: three of them must pass a slow link within gloo's time-out, as a ring's pieces of 1 MiB
must.
"""
STRIPE = 1 << 20
"""Elements of a stripe at most: while one is coded, others are under way."""
LEAST_SEGMENT = 1 << 13
LAG = 2
"""Stripes between the steps of one: what is under way fills the links while the processor codes."""
TO_OWNER, TO_ALL = 0, 1

Span = tuple[int, int]


class Moved(NamedTuple):
    """What a reduction did."""

    divisor: int
    """What is left to divide the result by."""
    sent_bytes: int
    received_bytes: int


class ErrorFeedback:
    """What earlier rounds' roundings left out of this member's parts, on the scale of the mean; kept for both outcomes
    of a round that is under way.

    ``owed`` was left out by rounds that are in the history. While a round's outcome is unknown, ``owed`` is what holds
    if it is not in it, and what ``opening`` handed out what holds if it is.
    """

    def __init__(self) -> None:
        self.owed: torch.Tensor | None = None  # None: nothing
        self._next: torch.Tensor | None = None
        self._open = False

    def opening(self, like: torch.Tensor) -> torch.Tensor:
        """Where to write what the round that begins leaves out."""
        if self._next is None:
            self._next = torch.empty_like(like)
        self._open = True
        return self._next

    def add_to(self, values: torch.Tensor, decay: float = 1.0) -> None:
        """``values`` += decay x what is owed, which stays as it is. After ``opening``, whose tensor this may use."""
        if self.owed is None:
            return
        if decay == 1.0:
            values.add_(self.owed)
        else:
            assert self._next is not None
            values.add_(torch.mul(self.owed, decay, out=self._next))

    def settle(self, *, counted: bool) -> None:
        """The round that was opened last, if any was since, is in the history, or never will be."""
        if counted and self._open:
            self.owed, self._next = self._next, self.owed
        self._open = False

    def forget(self) -> None:
        """Nothing is owed any more, and the memory is free."""
        self.owed = self._next = None
        self._open = False


class Reducer:
    """One trainer's part in the reductions of a run."""

    def __init__(self) -> None:
        self.feedback = ErrorFeedback()
        self._codecs: dict[str, Codec] = {}

    def reduce(
        self, group: ViewGroup, scheme: str, values: torch.Tensor, divisor: int, exact: int = 0
    ) -> Moved:
        """``values``, this member's weight x delta, become the sum or the mean of all: the same bits on all members.

        The last ``exact`` elements always travel as float32: running statistics, which may not fall below zero.
        CollectiveError leaves them partly reduced, and what is owed as it was.
        """
        if scheme == "none":
            self._add_debt(values, divisor)
            group.all_reduce(values)
            moved = ring_bytes(values.nbytes, group.view.world)
            return Moved(divisor, moved, moved)
        values.div_(float(divisor))
        error = self.feedback.opening(values)
        coder = self._codecs.setdefault(scheme, codec(scheme))
        self.feedback.add_to(values, coder.decay)
        coded, counts = values.numel() - exact, [0, 0]
        error[coded:].zero_()

        def work(exchange: Exchange) -> None:
            reduce_in(exchange, coder, values[:coded], error[:coded])
            counts[:] = exchange.sent_bytes, exchange.received_bytes

        group.exchange(work)
        if exact:
            group.all_reduce(values[coded:])
        sent, received = (count + ring_bytes(exact * values.itemsize, group.view.world) for count in counts)
        return Moved(1, sent, received)

    def _add_debt(self, values: torch.Tensor, divisor: int) -> None:
        """To a sum that is divided afterwards, by all members: others may owe nothing, and know of no debt here."""
        if self.feedback.owed is not None:
            error = self.feedback.opening(values)
            values.add_(torch.mul(self.feedback.owed, float(divisor), out=error))
            error.zero_()


def reduce_in(exchange: Exchange, coder: Codec, values: torch.Tensor, error: torch.Tensor) -> None:
    """``values``, this member's part, become the sum of all parts as coded; ``error`` what this member's codings left
    out: of its part where others own the segment, of the sum where it does.
    """
    if exchange.world == 1:
        error.zero_()
        return
    way: type[_Stripe] = _Owned if coder.is_sum else _Gathered
    whole = _Pass(exchange, coder, values, error)
    cuts = cut(values.numel(), coder, exchange.world)
    under_way: dict[int, _Stripe] = {}
    for step in range(len(cuts) + 2 * LAG):
        if step < len(cuts):
            under_way[step] = way(whole, cuts[step], step)
            under_way[step].begin()
        if step == 0:
            reach("reducing")
        if 0 <= step - LAG < len(cuts):
            under_way[step - LAG].middle()
        if step >= 2 * LAG:
            under_way.pop(step - 2 * LAG).end()


def cut(count: int, coder: Codec, world: int) -> list[list[Span]]:
    """Stripes, of each its owners' segments in rank order: [lo, hi) of elements; whole rows but for the last one.

    The same on all members. Segments are empty where there is less than a row for each.
    """
    width = coder.width
    rows = -(-count // width)
    in_stripe = min(STRIPE // width, STRIPE_BYTES // coder.row_bytes)
    in_stripe = max(in_stripe, world * max(1, LEAST_SEGMENT // width))
    stripes = max(1, -(-rows // in_stripe))
    edges = [rows * i // stripes for i in range(stripes + 1)]
    return [
        [
            (
                min(count, width * (lo + (hi - lo) * owner // world)),
                min(count, width * (lo + (hi - lo) * (owner + 1) // world)),
            )
            for owner in range(world)
        ]
        for lo, hi in pairwise(edges)
    ]


class _Pass:
    """One reduction under way: both vectors, and room for payloads, which is used again stripe after stripe."""

    def __init__(self, exchange: Exchange, coder: Codec, values: torch.Tensor, error: torch.Tensor) -> None:
        self.exchange, self.coder, self.values, self.error = exchange, coder, values, error
        self._free: dict[int, list[torch.Tensor]] = {}

    def room(self, span: Span) -> torch.Tensor:
        """For the payload of these elements."""
        size_bytes = self.coder.size_bytes(span[1] - span[0])
        free = self._free.get(size_bytes)
        return free.pop() if free else torch.empty(size_bytes, dtype=torch.uint8)

    def give_back(self, rooms: Iterable[torch.Tensor]) -> None:
        for room in rooms:
            self._free.setdefault(room.nbytes, []).append(room)

    def encode(self, span: Span) -> torch.Tensor:
        """The payload of what the values are now; their error is noted."""
        payload, part = self.room(span), slice(*span)
        self.coder.encode(self.values[part], payload, self.error[part])
        return payload


class _Stripe(ABC):
    """One stripe on its way: begun, then ended, LAG stripes apart."""

    def __init__(self, whole: _Pass, segments: list[Span], number: int) -> None:
        self.whole, self.segments, self.number = whole, segments, number
        self.rank, self.others = whole.exchange.rank, whole.exchange.others
        self.arriving: dict[tuple[int, int], tuple[torch.Tensor, Message]] = {}
        self.sent: list[Message] = []
        self.rooms: list[torch.Tensor] = []

    def send(self, payload: torch.Tensor, to: int, kind: int) -> None:
        self.sent.append(self.whole.exchange.send(payload, to, 2 * self.number + kind))

    def expect(self, sender: int, kind: int, span: Span) -> None:
        room = self.whole.room(span)
        message = self.whole.exchange.receive(room, sender, 2 * self.number + kind)
        self.arriving[kind, sender] = (room, message)
        self.rooms.append(room)

    def arrived(self, sender: int, kind: int) -> torch.Tensor:
        payload, message = self.arriving.pop((kind, sender))
        message.wait()
        return payload

    def end(self) -> None:
        """Everything has arrived, everywhere that this member sent it."""
        self.finish()
        for message in self.sent:
            message.wait()
        self.whole.give_back(self.rooms)

    @abstractmethod
    def begin(self) -> None: ...

    def middle(self) -> None:  # noqa: B027 not every way has one
        """When the owners' sums can be made."""

    @abstractmethod
    def finish(self) -> None: ...


class _Owned(_Stripe):
    """Parts to their owners, sums to all: two codings, however many members."""

    def begin(self) -> None:
        for other in reversed(self.others):
            if not _empty(self.segments[self.rank]):
                self.expect(other, TO_OWNER, self.segments[self.rank])
            if not _empty(self.segments[other]):
                self.expect(other, TO_ALL, self.segments[other])
        for other in self.others:
            if not _empty(self.segments[other]):
                payload = self.whole.encode(self.segments[other])
                self.send(payload, other, TO_OWNER)
                self.rooms.append(payload)

    def middle(self) -> None:
        span = self.segments[self.rank]
        if _empty(span):
            return
        own = self.whole.values[slice(*span)]
        for other in reversed(self.others):
            self.whole.coder.add(self.arrived(other, TO_OWNER), own)
        payload = self.whole.encode(span)
        for other in self.others:
            self.send(payload, other, TO_ALL)
        self.whole.coder.decode(payload, own)  # what all others read
        self.rooms.append(payload)

    def finish(self) -> None:
        for other in reversed(self.others):
            span = self.segments[other]
            if not _empty(span):
                self.whole.coder.decode(self.arrived(other, TO_ALL), self.whole.values[slice(*span)])


class _Gathered(_Stripe):
    """Everybody's part to all, who add them in rank order: for parts that are far shorter than their sum."""

    def begin(self) -> None:
        span = self.segments[0][0], self.segments[-1][1]
        if _empty(span):
            return
        for other in reversed(self.others):
            self.expect(other, TO_ALL, span)
        payload = self.whole.encode(span)
        for other in self.others:
            self.send(payload, other, TO_ALL)
        self.rooms.append(payload)

    def finish(self) -> None:
        span = self.segments[0][0], self.segments[-1][1]
        if _empty(span):
            return
        total = self.whole.values[slice(*span)].zero_()
        mine = self.rooms[-1]
        for rank in range(self.whole.exchange.world):
            self.whole.coder.add(mine if rank == self.rank else self.arrived(rank, TO_ALL), total)


def _empty(span: Span) -> bool:
    return span[0] == span[1]
