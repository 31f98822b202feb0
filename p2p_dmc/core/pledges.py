"""Giving up a copy so that the last one never goes, whatever is lost, late, repeated or restarted on the way.

Whoever wants to give up its copy of a shard asks the peers that are to keep it. One that has the shard, verified, and
is not itself asking about it, answers with a *pledge*. When all that were asked have pledged, the copy may go. Two
rules make that safe:

* while a peer asks about a shard it pledges nothing for it;
* a pledge counts only for the ask that it answers, and no two asks, also of a peer's different lives, share a number.

So, with no clock and no lease: *after any copy of a shard was given up, all R peers that were asked last of all still
have it.* For take, of all that gave their copy up, the one that asked last, and a peer Y that pledged to it. At that
moment Y had the shard and was not asking about it. Had Y given it up later, then after asking later: but nobody asked
later. A pledge that Y forgets by crashing is no loss: its next ask is again a later one. What takes copies besides, a
disk that fails, takes at most as many as R less one before the next repair, or the data set was kept too few times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

Key = tuple[bytes, int]
"""A shard: its data set's digest, its index in the manifest."""

MOST_SHARDS = 1024
"""That one message asks about: its answer looks at each one's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be asked of one peer: whether it keeps these shards of one data set."""

    peer_id: str
    dataset: bytes
    number: int
    shards: tuple[int, ...]


@dataclass(slots=True)
class _Ask:
    number: int
    of: frozenset[str]
    since_ms: int
    pledged: set[str] = field(default_factory=set)
    asked_ms: int | None = None


class Pledges:
    """The asks of one peer, and what it answers to those of others.

    ``first_number`` is to be one that no earlier life of this peer can have come near: a random one of 62 bits.
    """

    def __init__(self, first_number: int) -> None:
        self._number = first_number
        self._asks: dict[Key, _Ask] = {}
        self._open: dict[Key, _Ask] = {}  # those for which somebody has not pledged yet

    def __contains__(self, key: Key) -> bool:
        """Whether the shard is being asked about."""
        return key in self._asks

    def asked_about(self, dataset: bytes) -> list[int]:
        """Shards of a data set that are being asked about, ascending."""
        return sorted(shard for one, shard in self._asks if one == dataset)

    def open_count(self) -> int:
        """Shards for which somebody has not pledged yet."""
        return len(self._open)

    def ask(self, keys: Iterable[tuple[Key, Sequence[str]]], now_ms: int) -> None:
        """Ask these peers, one at least, about these shards. An ask of the same peers that is under way goes on."""
        self._number += 1
        for key, peers in keys:
            of = frozenset(peers)
            if not of:
                raise ValueError(f"shard {key[1]} of data set {key[0].hex()} is asked about of nobody")
            if key not in self._asks or self._asks[key].of != of:
                self._asks[key] = self._open[key] = _Ask(self._number, of, now_ms)

    def withdraw(self, key: Key) -> None:
        """Ask no more: what was pledged counts no more, and this peer may pledge again."""
        self._asks.pop(key, None)
        self._open.pop(key, None)

    def withdraw_older(self, age_ms: int, now_ms: int) -> None:
        """Give up on asks that have been open for so long: who was asked is busy, or asks about the same shard."""
        for key, ask in list(self._open.items()):
            if now_ms - ask.since_ms >= age_ms:
                self.withdraw(key)

    def gone(self, peer_id: str) -> None:
        """A peer went, or came back in another life: what it pledged says nothing about what it has now."""
        for key, ask in list(self._asks.items()):
            if peer_id in ask.of:
                self.withdraw(key)

    def lost(self, peer_id: str, dataset: bytes, shards: Iterable[int]) -> None:
        """A peer says that it has these no more, or has to look at them: what it pledged of them counts no more."""
        for shard in shards:
            ask = self._asks.get((dataset, shard))
            if ask is not None and peer_id in ask.of:
                self.withdraw((dataset, shard))

    def questions(self, again_ms: int, now_ms: int) -> list[Question]:
        """What is to be asked now: all that was not asked yet or was ``again_ms`` ago, and is not answered."""
        due: dict[tuple[str, bytes, int], list[int]] = {}
        for key, ask in sorted(self._open.items(), key=lambda item: item[0]):
            if ask.asked_ms is None or now_ms - ask.asked_ms >= again_ms:
                ask.asked_ms = now_ms
                for peer_id in sorted(ask.of - ask.pledged):
                    due.setdefault((peer_id, key[0], ask.number), []).append(key[1])
        return [
            Question(
                peer_id=peer_id,
                dataset=dataset,
                number=number,
                shards=tuple(shards[i : i + MOST_SHARDS]),
            )
            for (peer_id, dataset, number), shards in due.items()
            for i in range(0, len(shards), MOST_SHARDS)
        ]

    def answer(self, dataset: bytes, shards: Sequence[int], has: Callable[[int], bool]) -> tuple[int, ...]:
        """Which of these shards this peer pledges to keep; ``has``: it holds this one, verified, right now."""
        return tuple(shard for shard in shards if (dataset, shard) not in self._asks and has(shard))

    def pledged(self, peer_id: str, dataset: bytes, number: int, shards: Iterable[int]) -> None:
        """A peer's answer."""
        for shard in shards:
            ask = self._asks.get((dataset, shard))
            if ask is not None and ask.number == number and peer_id in ask.of:
                ask.pledged.add(peer_id)
                if ask.pledged >= ask.of:
                    self._open.pop((dataset, shard), None)

    def secured(self) -> list[Key]:
        """Shards whose copy here may go, now: everybody asked has pledged."""
        return sorted(self._asks.keys() - self._open.keys())
