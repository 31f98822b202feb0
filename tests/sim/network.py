"""The network: messages on their way, cables that are cut, peers that are deaf on one ear."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from p2p_dmc.agent.work import Strike
from p2p_dmc.core.agreement_messages import AgreementMessage, StateRef, Stopped


class Farewell:
    """A withdrawal on its way: what the agent promised, and what its trainers had in hand when they died."""

    __slots__ = ("stopped", "strikes")

    def __init__(self, stopped: Stopped, strikes: tuple[Strike, ...]) -> None:
        self.stopped, self.strikes = stopped, strikes


@dataclass(frozen=True, slots=True)
class Closed:
    """A host's word that it has stopped with the run (`p2p_dmc/wire/messages.py`, RunClosed)."""

    ref: StateRef
    view_id: bytes
    """Of the view in which it has stopped; b"" if it has said a set beyond that, or had no vote in it."""
    answer: bool
    """The sender has not heard that the receiver has stopped."""


Message: TypeAlias = AgreementMessage | Farewell | Closed

MOST_IN_FLIGHT = 64
"""On one link; when more are sent the oldest are lost."""


class Network:
    """Links are ordered pairs of peers. A message is delivered, dropped or doubled when somebody says so."""

    def __init__(self) -> None:
        self.flying: dict[tuple[str, str], list[Message]] = {}
        """Invariant: no list is empty."""
        self.side: dict[str, int] = {}
        """Peers on different sides of a cut do not hear each other."""
        self.deaf: set[tuple[str, str]] = set()
        """(source, destination) pairs of which the destination hears nothing."""

    def linked(self, source: str, destination: str) -> bool:
        side = self.side
        return side.get(source, 0) == side.get(destination, 0) and (source, destination) not in self.deaf

    def both_ways(self, one: str, other: str) -> bool:
        return self.linked(one, other) and self.linked(other, one)

    def all_linked(self, peers: Iterable[str]) -> bool:
        """Whether each of them reaches each other one."""
        names = list(peers)
        if self.deaf:
            return all(self.both_ways(a, b) for i, a in enumerate(names) for b in names[:i])
        return len({self.side.get(name, 0) for name in names}) <= 1

    def send(self, source: str, destination: str, message: Message) -> None:
        queue = self.flying.setdefault((source, destination), [])
        queue.append(message)
        if len(queue) > MOST_IN_FLIGHT:
            del queue[0]

    def take(self, source: str, destination: str, index: int, *, keep: bool = False) -> Message | None:
        """The index-th message on that link (the last one, if there are fewer); None if there is none."""
        queue = self.flying.get((source, destination))
        if queue is None:
            return None
        index = min(index, len(queue) - 1)
        message = queue[index]
        if not keep:
            del queue[index]
            if not queue:
                del self.flying[source, destination]
        return message

    def heal(self) -> None:
        self.side.clear()
        self.deaf.clear()

    def forget(self, peer: str) -> None:
        """A peer is gone for good: nothing more reaches it."""
        for link in [link for link in self.flying if peer in link]:
            del self.flying[link]
