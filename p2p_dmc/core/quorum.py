"""The decision at the end of an attempt: may these peers form a view, and from which state does it start?

A pure function of what all candidates said (DESIGN section 6, "State" and "Quorum"). Two sets of candidates
that could both hold would be two histories.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from p2p_dmc.core.agreement_messages import UNKNOWN_BOOT, MemberId, Propose, StateRef, Stopped, ViewRef


class Quorum(IntEnum):
    """How much of the last view must be there to go on."""

    MAJORITY = 0
    """A majority, leaving out those who withdrew and those seen to crash."""
    STRICT = 1
    """A majority, leaving out only those who withdrew: a firewall that refuses can counterfeit a crash."""
    ANY = 2
    """Progress over safety: a side without a majority goes on alone, under a new history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The votes of one view that must be held."""

    view: ViewRef
    votes: tuple[MemberId, ...]
    """Present members that kept their memory."""
    counted: int
    """Members less those who are accounted for."""
    missing: tuple[str, ...]
    """Peers of the counted ones without a vote here."""
    holds: bool

    def describe(self) -> str:
        name = f"view {self.view.view_epoch}"
        if not self.votes:
            return f"nobody here remembers {name}, so all its {len(self.view.members)} peers are needed"
        needed = self.counted // 2 + 1
        return f"{len(self.votes)} of {self.counted} members of {name} are here; {needed} are needed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the words of all candidates amount to."""

    holds: bool
    start: StateRef
    known: ViewRef | None
    """The view that the start state comes from, where anybody knows it."""
    thin: bool = False
    """Only `Quorum.ANY`, or an operator who evicted all that are waited for, lets this stand: under a new history."""
    lacking: tuple[Count, ...] = ()
    absent: tuple[str, ...] = ()
    """Peers that may have a state which nobody present has."""
    voters: int = 1
    """How many of the candidates would vote in the view; with none it does not hold."""
    strangers: bool = False
    """Nobody present has been in a view of this history: all were about to join, and know nothing of it."""

    @property
    def awaited(self) -> tuple[str, ...]:
        """Peers whose presence it lacks, sorted."""
        return tuple(sorted({peer for count in self.lacking for peer in count.missing} | set(self.absent)))

    def describe(self) -> str:
        """Why it does not hold, for people."""
        reasons = list(dict.fromkeys(count.describe() for count in self.lacking))
        if not self.voters:
            reasons.append("nobody here holds what this run has trained, or voted in its last view")
        if self.strangers:
            reasons.append("nobody here has been in a view of this run before")
        if self.absent:
            reasons.append(f"newer work may be on {', '.join(self.absent)}")
        return "; ".join(reasons) + (f"; waiting for {', '.join(self.awaited)}" if self.awaited else "")


def start_state(words: Sequence[Propose]) -> StateRef:
    """The greatest completed state among the members; of equals, that of the first in ring order.

    Whoever has been in a view of the history goes before a newcomer: each has an initial model of its own, and the
    history's is the one that its members have begun to train.
    """
    greatest = max(word.completed.lineage for word in words)
    ring = sorted(words, key=lambda word: (not word.joined, word.sender))
    return next(word.completed for word in ring if word.completed.lineage == greatest)


def count_votes(view: ViewRef, present: Mapping[str, Propose], accounted: Collection[MemberId]) -> Count:
    """Does the set of candidates hold `view`?

    Args:
        present: the words of the candidates, by peer id.
        accounted: members whose promises are known and who will not vote elsewhere.
    """
    votes = tuple(member for member in view.members if has_vote(member, view, present))
    absent = [member for member in view.members if member not in votes]
    left_out = {member for member in absent if member.peer_id in present or member in accounted}
    counted = len(view.members) - len(left_out)
    if votes:
        half = 2 * len(votes) == counted and view.members[0] in votes
        holds = 2 * len(votes) > counted or half
        missing = tuple(member.peer_id for member in absent if member not in left_out)
    else:  # nobody remembers it, so nobody can say who else does
        missing = tuple(peer for peer in view.peers if peer not in present)
        holds = not missing
    return Count(view=view, votes=votes, counted=counted, missing=missing, holds=holds)


def has_vote(member: MemberId, view: ViewRef, present: Mapping[str, Propose]) -> bool:
    """A member votes in the views it remembers, not in those of a former life or that it withdrew from.

    An incarnation unknown to who promised the set votes in it: its own promises tell if it was that one.
    """
    word = present.get(member.peer_id)
    if word is None or view.view_epoch <= word.vote_floor:
        return False
    return word.sender == member or member.boot == UNKNOWN_BOOT


def accounted_for(view: ViewRef, words: Iterable[Propose], records: Collection[Stopped]) -> set[MemberId]:
    """The stopped members that leave the count of `view`.

    Who withdrew said so itself, for all views up to its n. Who was seen to crash is left out only on the word
    of a member of this very view: for a suspicion time after its last acknowledgement the dead one said no
    set without the witness, so the witness knows of every set that matters.
    """
    found = set()
    for word in words:
        for record in word.seen:
            if record not in records:
                continue
            known = view.view_epoch <= record.n if record.withdrawn else word.sender in view.members
            if known:
                found.add(record.member)
    return found


def decide(words: Sequence[Propose], quorum: Quorum) -> Decision:
    """Judge an attempt in which all candidates said the same sets; `words` holds one word of each.

    First without leaving anybody out, then without those who withdrew, then without those seen to crash too:
    their promises bind whoever leaves them out, and a majority of survivors need not.
    """
    seen = [record for word in words for record in word.seen]
    withdrawn = [record for record in seen if record.withdrawn]
    tiers = [[], withdrawn, seen] if quorum is not Quorum.STRICT else [[], withdrawn]
    decision = judge(words, [])
    for records in tiers[1:]:
        if decision.holds:
            break
        decision = judge(words, records)
    if decision.holds or decision.strangers or not decision.voters:
        return decision
    if quorum is Quorum.ANY or set(decision.awaited) <= set(words[0].evicted):
        return Decision(holds=True, start=decision.start, known=decision.known, thin=True)
    return decision


def judge(words: Sequence[Propose], records: Collection[Stopped]) -> Decision:
    """One pass of `decide`: these records, and no others, are believed and bind."""
    present = {word.sender.peer_id: word for word in words}
    start = start_state(words)
    passed, top = walk_bases(words, records, start)
    absent = {peer for view in passed for peer in view.peers if peer not in present}
    absent |= {peer for view in missed_origins(words, start) for peer in view.peers if peer not in present}
    needed = views_to_hold(words, records, passed, top)
    counts = [count_votes(view, present, accounted_for(view, words, records)) for view in needed]
    lacking = tuple(count for count in counts if not count.holds)
    voters = len(words[0].voting)
    return Decision(
        holds=not (lacking or absent or are_strangers(words)) and voters > 0,
        start=start,
        known=origin(words, start),
        lacking=lacking,
        absent=tuple(sorted(absent)),
        voters=voters,
        strangers=are_strangers(words),
    )


def are_strangers(words: Iterable[Propose]) -> bool:
    """Words of a history of which nobody has been: newcomers that lost those who let them in. They found nothing."""
    return any(word.history for word in words) and not any(word.joined for word in words)


def walk_bases(
    words: Iterable[Propose], records: Iterable[Stopped], start: StateRef
) -> tuple[list[ViewRef], ViewRef | None]:
    """The known bases from the newest down to the first of which somebody present has the state.

    Returns those passed over (all their peers must be present: a missing one may have it) and that one.
    """
    bases = {word.base for word in words} | {record.base for record in records}
    passed: list[ViewRef] = []
    for base in sorted((base for base in bases if base is not None), reverse=True):
        if start.lineage[0] >= base.view_epoch:
            return passed, base
        passed.append(base)
    return passed, None


def missed_origins(words: Iterable[Propose], start: StateRef) -> list[ViewRef]:
    """Views of which somebody knows a state that nobody present holds: it was a start not adopted in time."""
    known = {word.known for word in words}
    return sorted(view for view in known if view is not None and start.lineage[0] < view.view_epoch)


def views_to_hold(
    words: Sequence[Propose], records: Iterable[Stopped], passed: Sequence[ViewRef], top: ViewRef | None
) -> list[ViewRef]:
    """The bases down to the top one, and every view said since: somebody may have installed it."""
    since = top.view_epoch if top is not None else 0
    promised = {view for word in words for view in word.pending}
    promised |= {view for record in records for view in record.pending}
    joint = {view for view in promised if view.view_epoch > since}
    return sorted({*passed, *([top] if top is not None else []), *joint})


def origin(words: Sequence[Propose], start: StateRef) -> ViewRef | None:
    """The view in which the start state was completed.

    An agent restarted from a checkpoint may not know; then whoever may have been in it counts as in it.
    """
    epoch = start.lineage[0]
    told = [view for word in words for view in (word.base, word.known) if view is not None]
    guessed = [view for word in words for view in word.pending]
    for views in (told, guessed):
        members: dict[str, MemberId] = {}
        for view in views:
            if view.view_epoch == epoch:
                members |= {member.peer_id: member for member in view.members}
        if members:
            return ViewRef(view_epoch=epoch, members=tuple(sorted(members.values())))
    return None
