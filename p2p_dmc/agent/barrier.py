"""The headers of a view's current round: who stands at the barrier, and what follows from it (DESIGN.md section 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dmc.core.agreement_messages import MemberId, View
from p2p_dmc.wire.messages import RoundHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierResult:
    """All members' headers of one round, in ring order."""

    headers: tuple[RoundHeader, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        return tuple(h.samples if h.finite else 0 for h in self.headers)

    @property
    def change(self) -> bool:
        return any(h.change for h in self.headers)

    @property
    def closing(self) -> bool:
        return any(h.closing for h in self.headers)

    @property
    def final(self) -> bool:
        return all(h.final for h in self.headers)

    def odd_ones(self) -> tuple[int, ...]:
        """Members whose digest or payload specification is not the majority's."""
        said = [(h.digest, h.payload_spec) for h in self.headers]
        common = max(Counter(said).items(), key=lambda item: (item[1], item[0]))[0]
        return tuple(i for i, pair in enumerate(said) if pair != common)


class Barrier:
    """Collects headers of the current round and the one after it (a faster member may be ahead by one)."""

    def __init__(self, view: View, me: MemberId) -> None:
        self.view = view
        self.me = view.members.index(me)
        self.round = view.start.lineage[1] + 1
        """Rounds count through a whole history; the view epoch tells two of one number apart."""
        self._said: dict[int, dict[int, RoundHeader]] = {self.round: {}, self.round + 1: {}}
        self.last_own: RoundHeader | None = None
        """My header of the round before: repeated to a member that missed it."""

    def add(self, peer_id: str, header: RoundHeader) -> RoundHeader | None:
        """Take a header; returns my own when the sender, repeating itself, seems to have missed it."""
        if header.view_epoch != self.view.view_epoch or header.view_id != self.view.view_id:
            return None
        if peer_id not in self.view.peers:
            return None
        if header.round in self._said:
            index = self.view.peers.index(peer_id)
            again = index in self._said[header.round]
            self._said[header.round][index] = header
            if again and header.round == self.round and not self.missing():
                return (
                    self.own
                )  # whoever misses nobody's header repeats nothing, so this cannot go back and forth
        elif self.last_own is not None and header.round == self.last_own.round:
            return self.last_own
        return None

    def say(self, header: RoundHeader) -> None:
        """My own header of the current round."""
        self._said[self.round][self.me] = header

    @property
    def own(self) -> RoundHeader | None:
        return self._said[self.round].get(self.me)

    def missing(self) -> tuple[MemberId, ...]:
        """Members that have not said their header of the current round."""
        return tuple(m for i, m in enumerate(self.view.members) if i not in self._said[self.round])

    def result(self) -> BarrierResult | None:
        """Everybody's headers, once everybody has said one."""
        said = self._said[self.round]
        if len(said) < len(self.view.members):
            return None
        return BarrierResult(headers=tuple(said[i] for i in range(len(self.view.members))))

    def heard(self) -> Sequence[int]:
        return sorted(self._said[self.round])

    def next_round(self) -> None:
        """The current round is complete here."""
        self.last_own = self.own
        del self._said[self.round]
        self.round += 1
        self._said[self.round + 1] = {}
