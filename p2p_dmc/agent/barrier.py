"""The headers of a view's current round: who stands at the barrier, and what follows from it (DESIGN.md section 7)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dmc.core.agreement_messages import MemberId, View
from p2p_dmc.wire.messages import RoundHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierResult:
    """All members' headers of one round, in ring order. Of a learner's only the flags mean anything."""

    headers: tuple[RoundHeader, ...]
    voting: tuple[bool, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """Samples that each member adds to the average."""
        return tuple(
            h.trained if h.finite and votes else 0 for h, votes in zip(self.headers, self.voting, strict=True)
        )

    @property
    def consumed(self) -> tuple[int, ...]:
        """How far each member's cursor moves: with the samples that it skipped."""
        return tuple(
            h.samples if h.finite and votes else 0 for h, votes in zip(self.headers, self.voting, strict=True)
        )

    @property
    def steps(self) -> int:
        """The most local steps that a member's delta comes from."""
        said = zip(self.headers, self.weights, strict=True)
        return max((h.steps for h, weight in said if weight), default=0)

    @property
    def change(self) -> bool:
        return any(h.change for h in self.headers)

    @property
    def closing(self) -> bool:
        return any(h.closing for h in self.headers)

    @property
    def final(self) -> bool:
        return all(h.final for h, votes in zip(self.headers, self.voting, strict=True) if votes)

    def common(self) -> tuple[bytes, bytes]:
        """Digest of the state that the round starts from, and payload specification: most voters'."""
        said = Counter(
            (h.digest, h.payload_spec) for h, votes in zip(self.headers, self.voting, strict=True) if votes
        )
        return max(said.items(), key=lambda item: (item[1], item[0]))[0]

    def odd_ones(self) -> tuple[int, ...]:
        """Members whose digest (a learner has none to say) or payload specification is not the majority's."""
        digest, spec = self.common()
        return tuple(
            i
            for i, (h, votes) in enumerate(zip(self.headers, self.voting, strict=True))
            if h.payload_spec != spec or (votes and h.digest != digest)
        )


class Barrier:
    """Collects headers of the current round and the one after it (a faster member may be ahead by one)."""

    def __init__(self, view: View, me: MemberId) -> None:
        self.view = view
        self.me = view.members.index(me)
        self._voting = tuple(m in view.voters for m in view.members)
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
        headers = tuple(said[i] for i in range(len(self.view.members)))
        return BarrierResult(headers=headers, voting=self._voting)

    def heard(self) -> Sequence[int]:
        return sorted(self._said[self.round])

    def next_round(self) -> None:
        """The current round is complete here."""
        self.last_own = self.own
        del self._said[self.round]
        self.round += 1
        self._said[self.round + 1] = {}
