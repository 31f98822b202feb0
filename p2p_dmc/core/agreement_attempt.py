"""The books of agreement: one attempt's words, and what is known about the other peers. No decisions here."""

from __future__ import annotations

from collections.abc import Iterable

from p2p_dmc.core.agreement_messages import (
    UNKNOWN_BOOT,
    MemberId,
    Promised,
    Propose,
    Stopped,
    Verdict,
    ViewRef,
)


class Attempt:
    """Attempt n: the sets as this peer says them, and what everybody said last.

    Invariant: `candidates`, `stopped`, `voters` and `evicted` only grow.
    """

    def __init__(self, *, n: int, content: Propose, now_ms: int) -> None:
        self.n = n
        self.content = content
        """This peer's word, whose sets are replaced as they grow and whose content is fixed."""
        self.candidates: set[str] = set()
        self.stopped: set[str] = set()
        self.voters: set[str] = set()
        self.evicted: set[str] = set()
        self.words: dict[str, Propose] = {}
        self.since_ms: dict[str, int] = {}
        """When each candidate was first asked."""
        self.resend_at_ms = now_ms
        self.resend_gap_ms = 0
        self.replace_at_ms = now_ms
        self.judged: tuple[Propose, ...] = ()
        """The words of the last decision, which was no."""

    def grow(
        self,
        candidates: Iterable[str],
        stopped: Iterable[str],
        voters: Iterable[str],
        evicted: Iterable[str],
        now_ms: int,
    ) -> bool:
        """Take the union; True if it is more than before. Only candidates can be stopped, or vote."""
        before = self._size
        self.candidates |= set(candidates)
        self.stopped |= set(stopped) & self.candidates
        self.voters |= set(voters) & self.candidates
        self.evicted |= set(evicted)
        for peer in self.candidates:
            self.since_ms.setdefault(peer, now_ms)
        return self._size != before

    @property
    def _size(self) -> int:
        return len(self.candidates) + len(self.stopped) + len(self.voters) + len(self.evicted)

    @property
    def sets(self) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(sorted(one)) for one in (self.candidates, self.stopped, self.voters, self.evicted))

    @property
    def members(self) -> tuple[str, ...]:
        """C = A - D, sorted."""
        return tuple(sorted(self.candidates - self.stopped))

    @property
    def voting(self) -> tuple[str, ...]:
        """V - D, sorted."""
        return tuple(sorted(self.voters - self.stopped))

    def hear(self, word: Propose) -> None:
        """Keep the last word of each peer: of one incarnation, the one with the larger sets."""
        old = self.words.get(word.sender.peer_id)
        if old is not None and old.sender == word.sender:
            if sum(map(len, old.sets)) > sum(map(len, word.sets)):
                return
            if old.installed:
                return
        self.words[word.sender.peer_id] = word

    def unheard(self) -> list[str]:
        """Members that have not said these sets."""
        sets = self.sets
        return [peer for peer in self.members if peer not in self.words or self.words[peer].sets != sets]

    def agreed(self) -> tuple[Propose, ...] | None:
        """Everybody's word in ring order, once all members said the same sets."""
        if self.unheard():
            return None
        return tuple(sorted((self.words[peer] for peer in self.members), key=lambda word: word.sender))


class PeerBook:
    """What is known about the others: incarnations, verdicts, promises, records of those that stopped."""

    def __init__(self) -> None:
        self.boots: dict[str, int] = {}
        self.verdicts: dict[str, tuple[int, Verdict]] = {}
        self.promised: dict[MemberId, Promised] = {}
        """The newest promises heard of each member."""
        self.greatest_n: dict[MemberId, int] = {}
        self.records: dict[MemberId, Stopped] = {}
        self.crashed: dict[MemberId, int] = {}
        """Seen to crash: the version of its promises that its last sign of life told of. Older ones count it not."""
        self.away: set[MemberId] = set()
        """Withdrawn, and not heard to be back."""
        self.joiners: dict[str, int] = {}
        """When each last asked to join."""

    def member(self, peer_id: str) -> MemberId:
        """The newest incarnation known."""
        return MemberId(peer_id=peer_id, boot=self.boots.get(peer_id, UNKNOWN_BOOT))

    def note(self, member: MemberId) -> bool:
        """Remember the incarnation; False if a newer one is known."""
        known = self.member(member.peer_id)
        if member.boot < known.boot:
            return False
        if member.boot > known.boot:
            self.crashed.pop(known, None)
        self.boots[member.peer_id] = member.boot
        return True

    def superseded(self, member: MemberId) -> bool:
        return self.boots.get(member.peer_id, 0) > member.boot

    def gone(self, peer_id: str) -> bool:
        """Dead, crashed or withdrawn, in its newest incarnation."""
        member = self.member(peer_id)
        boot, verdict = self.verdicts.get(peer_id, (0, Verdict.REACHABLE))
        return member in self.away or (boot >= member.boot and verdict is not Verdict.REACHABLE)

    def hear_promises(self, promised: Promised) -> None:
        old = self.promised.get(promised.sender)
        if old is not None and promised.version < old.version:
            return
        self.promised[promised.sender] = promised
        self._count_crash(promised.sender)  # it was on its way when the sender crashed

    def _count_crash(self, member: MemberId) -> None:
        """Whoever was seen to crash is counted so with promises as new as its last sign of life told of: until such
        are here it is only dead. A farewell says more than they do, unless they know of a later attempt.
        """
        promised, told = self.promised.get(member), self.crashed.get(member)
        if promised is None or told is None or promised.version < told:
            return
        record = self.records.get(member)
        if record is None or not record.withdrawn or record.n < promised.n:
            self.records[member] = crash_record(promised)

    def hear_word(self, word: Propose) -> bool:
        """Note what a word tells about its sender; False if the sender has said a greater n since."""
        if word.n < self.greatest_n.get(word.sender, 0):
            return False
        self.greatest_n[word.sender] = word.n
        record = self.records.get(word.sender)
        if record is not None and word.n > record.n:
            self.away.discard(word.sender)
        self.hear_promises(
            Promised(
                history=word.history,
                sender=word.sender,
                n=word.n,
                base=word.base,
                pending=word.pending,
                version=word.version,
            )
        )
        return True

    def judge(self, member: MemberId, verdict: Verdict, version: int) -> bool:
        """A verdict of membership; True if it is news.

        Args:
            member: of `UNKNOWN_BOOT`: the newest incarnation known, whichever that is.
            version: of the promises that the last sign of life told of; 0: it told of none.
        """
        if member.boot == UNKNOWN_BOOT:
            member = self.member(member.peer_id)
        news = (member.boot, verdict) != self.verdicts.get(member.peer_id, (member.boot, Verdict.REACHABLE))
        if self.note(member):
            self.verdicts[member.peer_id] = (member.boot, verdict)
        record = self.records.get(member)
        if verdict is Verdict.CRASHED:
            self.crashed[member] = max(version, self.crashed.get(member, 0))
            if record is not None and not record.withdrawn:  # of a former agent of the same member
                del self.records[member]
            self._count_crash(member)
        elif verdict is Verdict.REACHABLE:
            self.crashed.pop(member, None)
            if record is not None and not record.withdrawn:
                del self.records[member]
        return news

    def withdraw(self, stopped: Stopped) -> bool:
        """A member's own farewell; False if it has been heard of since."""
        old = self.records.get(stopped.member)
        if stopped.n < self.greatest_n.get(stopped.member, 0) or not self.note(stopped.member):
            return False
        if old is None or not old.withdrawn or old.n <= stopped.n:
            self.records[stopped.member] = stopped
        self.away.add(stopped.member)
        return True

    def forget_all_but(self, members: set[MemberId]) -> None:
        """Records and promises of members that no view of interest names are of no use."""
        for book in (self.records, self.promised, self.greatest_n, self.crashed):
            for member in [member for member in book if member not in members]:
                if member not in self.away:
                    del book[member]


def said_set(n: int, members: Iterable[MemberId]) -> ViewRef:
    return ViewRef(view_epoch=n, members=tuple(sorted(members)))


def crash_record(promised: Promised) -> Stopped:
    return Stopped(member=promised.sender, n=promised.n, base=promised.base, pending=promised.pending)
