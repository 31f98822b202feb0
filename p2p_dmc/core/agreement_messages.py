"""What peers say to each other to agree on a view, and the records behind it (DESIGN section 6).

Everything here is a plain value: the wire encodes it by its annotations, the disk keeps `Promises`, and the
two cores (`quorum.py`, `agreement.py`) reason about nothing else.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

Lineage: TypeAlias = tuple[int, int]
"""(view epoch, round); (0, 0) is the initial model. The larger one wins, lexicographically."""

UNKNOWN_BOOT = 0
"""In a promised set: an incarnation the promiser has not heard of yet. That one knows itself better."""
DIGEST_BYTES = 16
PEER_ID_MAX = 128
NUMBER_MAX = 2**62
MEMBERS_MAX = 4096
PENDING_MAX = 8192
REPLACED_MAX = 8
PAYLOAD_MAX_BYTES = 1 << 20


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _require_number(value: int, name: str) -> None:
    _require(0 <= value <= NUMBER_MAX, f"{name} {value} is outside 0..2^62")


def _require_history(history: bytes) -> None:
    _require(len(history) in (0, DIGEST_BYTES), f"a history id has 0 or 16 bytes, not {len(history)}")


def _require_sorted(names: tuple[str, ...], what: str) -> None:
    _require(len(names) <= MEMBERS_MAX, f"{what}: {len(names)} peers are too many")
    _require(all(a < b for a, b in itertools.pairwise(names)), f"{what} is not sorted and unique")
    _require(all(0 < len(name) <= PEER_ID_MAX for name in names), f"{what} has an odd peer id")


class Verdict(IntEnum):
    """What membership says about one incarnation of a peer."""

    REACHABLE = 0
    UNREACHABLE = 1
    """Dead: its suspicion ran out. The shell holds this back until a suspicion time has passed since it last
    acknowledged a probe of that peer: for so long may that peer count this one as crashed."""
    CRASHED = 2
    """Refused by its live host, while it acknowledged us within the last suspicion time."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class MemberId:
    """One incarnation of an agent: a restarted one is somebody else."""

    peer_id: str
    boot: int
    """From 1 on; see `UNKNOWN_BOOT`."""

    def __post_init__(self) -> None:
        _require(0 < len(self.peer_id) <= PEER_ID_MAX, f"peer id {self.peer_id!r} has an odd length")
        _require_number(self.boot, "boot")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRef:
    """A state by name: its lineage and the digest of its bits."""

    lineage: tuple[int, int]
    digest: bytes

    def __post_init__(self) -> None:
        _require(len(self.lineage) == 2, "a lineage is (view epoch, round)")
        for number in self.lineage:
            _require_number(number, "lineage")
        _require(len(self.digest) == DIGEST_BYTES, f"a digest has 16 bytes, not {len(self.digest)}")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ViewRef:
    """A view as far as counting its votes is concerned: its members here are its voters."""

    view_epoch: int
    members: tuple[MemberId, ...]

    def __post_init__(self) -> None:
        _require(0 < self.view_epoch <= NUMBER_MAX, f"a view epoch of {self.view_epoch} is outside 1..2^62")
        _require(0 < len(self.members) <= MEMBERS_MAX, "a view has 1 to 4096 members")
        _require_sorted(tuple(member.peer_id for member in self.members), "view members")

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(member.peer_id for member in self.members)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Replaced:
    """A history that another one took the place of."""

    history: bytes
    lineage: tuple[int, int]
    """Where the other one begins: states up to this one belong to both."""
    evicted: bool = False
    """By eviction: whoever is still in it gives it up. Otherwise (`Quorum.ANY`) either may turn out to be the one."""

    def __post_init__(self) -> None:
        _require(len(self.history) == DIGEST_BYTES, f"a history id has 16 bytes, not {len(self.history)}")
        _require(len(self.lineage) == 2, "a lineage is (view epoch, round)")
        for number in self.lineage:
            _require_number(number, "lineage")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A history that this peer gave up for another one. What it promised there it still says there."""

    history: bytes
    pending: tuple[ViewRef, ...]

    def __post_init__(self) -> None:
        _require_history(self.history)
        _require(len(self.pending) <= PENDING_MAX, f"{len(self.pending)} pending views are too many")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What must be on disk before it is said; what a restarted agent begins with."""

    n: int = 0
    """The greatest attempt ever said. After a start only greater ones are said."""
    history: bytes = b""
    base: ViewRef | None = None
    """The last view of which this peer completed a round *and* has a checkpoint."""
    known: ViewRef | None = None
    """The view that the checkpointed state comes from (the same as base, unless the state was adopted)."""
    pending: tuple[ViewRef, ...] = ()
    """Every set said since base, every set of one attempt too: somebody may have installed it."""
    courted: bytes = b""
    """The history this newcomer was asked to join, before it has been in a view of it: it founds no other."""
    replaced: tuple[Replaced, ...] = ()
    """Those that `history` took the place of, newest first: the newest few."""
    given_up: tuple[GivenUp, ...] = ()
    """Newest first: the newest few."""
    version: int = 0
    """Of the promises said last, at the time of this record. It grows on from here: whoever closed the run is the same
    member when it opens it again, and others may remember what it said before."""

    def __post_init__(self) -> None:
        _require_number(self.n, "n")
        _require_number(self.version, "version")
        _require(len(self.given_up) <= REPLACED_MAX, f"{len(self.given_up)} given-up histories are too many")
        _require(len(self.replaced) <= REPLACED_MAX, f"{len(self.replaced)} replaced histories are too many")
        _require_history(self.history)
        _require_history(self.courted)
        _require(len(self.pending) <= PENDING_MAX, f"{len(self.pending)} pending views are too many")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """A member that stopped, and its promises: it leaves the count of every view that these cover.

    `withdrawn`: said by the agent itself, and final for views up to `n` (it gives up its votes there).
    Otherwise it was seen to crash by the peer that says so, which has the promises that its last sign of life told
    of, or newer ones.
    """

    member: MemberId
    n: int = 0
    base: ViewRef | None = None
    pending: tuple[ViewRef, ...] = ()
    withdrawn: bool = False

    def __post_init__(self) -> None:
        _require_number(self.n, "n")
        _require(len(self.pending) <= PENDING_MAX, f"{len(self.pending)} pending views are too many")


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """A word: what one peer says in attempt `n` about the sets (A, D, V, E).

    Its content is fixed at the first word of n, and there is one word per (sender, n, A, D, V, E): repeated, it is
    the same but for `installed`, `minted` and `asks`.
    """

    history: bytes
    n: int
    sender: MemberId
    candidates: tuple[str, ...]
    """A: peer ids, sorted; the sender is among them."""
    stopped: tuple[str, ...]
    """D: peer ids of A that are not to be in the view, sorted."""
    voters: tuple[str, ...]
    """V: peer ids of A that vote in the view if they are in it, sorted. The others of A only learn."""
    completed: StateRef
    """The greatest state the sender holds and verified. Final: it froze before it said so."""
    base: ViewRef | None
    """The last view in which the sender completed a round."""
    known: ViewRef | None
    """The view that the greatest state the sender knows of (it may not hold it yet) comes from."""
    pending: tuple[ViewRef, ...]
    seen: tuple[Stopped, ...]
    vote_floor: int = 0
    """The sender has no vote in views up to this one: it withdrew from them."""
    version: int = 0
    """Of the sender's promises; see `Promised`."""
    joined: bool = False
    """The sender has been in a view of this history: it does not only want to join."""
    evicted: tuple[str, ...] = ()
    """E: peer ids, sorted, of which an operator says that they are gone for good: nobody waits for them."""
    replaced: tuple[Replaced, ...] = ()
    """What the sender's history took the place of."""
    payload: bytes = b""
    installed: bool = False
    """The sender has installed this view; whoever has not, and is in it, may."""
    minted: bytes = b""
    """The history that the installed view founded, b"" if it goes on with `history`: to whoever is not in it, a
    stranger says this."""
    asks: bool = False
    """The sender repeats itself, because it has not heard the receiver's word about these sets."""

    def __post_init__(self) -> None:
        _require_history(self.history)
        _require_history(self.minted)
        for name, number in (("n", self.n), ("vote floor", self.vote_floor), ("version", self.version)):
            _require_number(number, name)
        _require_sorted(self.candidates, "candidates")
        _require_sorted(self.stopped, "stopped")
        _require_sorted(self.voters, "voters")
        _require_sorted(self.evicted, "evicted")
        _require(len(self.replaced) <= REPLACED_MAX, f"{len(self.replaced)} replaced histories are too many")
        _require(self.sender.peer_id in self.candidates, "the sender is not a candidate of its own proposal")
        _require(self.sender.peer_id not in self.stopped, "the sender proposes to leave itself out")
        _require(set(self.stopped) <= set(self.candidates), "stopped peers that were never candidates")
        _require(set(self.voters) <= set(self.candidates), "voters that were never candidates")
        _require(len(self.pending) <= PENDING_MAX, f"{len(self.pending)} pending views are too many")
        _require(len(self.seen) <= MEMBERS_MAX, f"{len(self.seen)} stopped members are too many")
        _require(len(self.payload) <= PAYLOAD_MAX_BYTES, f"payload of {len(self.payload)} bytes is too large")

    @property
    def sets(self) -> tuple[tuple[str, ...], ...]:
        return self.candidates, self.stopped, self.voters, self.evicted

    @property
    def members(self) -> tuple[str, ...]:
        """C = A - D, sorted."""
        stopped = set(self.stopped)
        return tuple(peer for peer in self.candidates if peer not in stopped)

    @property
    def voting(self) -> tuple[str, ...]:
        """V - D: those that vote in the view which these sets make."""
        stopped = set(self.stopped)
        return tuple(peer for peer in self.voters if peer not in stopped)

    def digest(self) -> bytes:
        """Of all that a view depends on. Not of the version, which only counts promises."""
        facts = (self.history, self.n, self.sender, self.sets, self.completed, self.base, self.known)
        promises = (self.pending, self.seen, self.vote_floor, self.joined, self.replaced)
        hashed = hashlib.blake2b(repr((facts, promises)).encode(), digest_size=DIGEST_BYTES)
        hashed.update(self.payload)
        return hashed.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The pre-vote: the sender sees cause to leave the standing view."""

    history: bytes
    view_epoch: int
    sender: MemberId

    def __post_init__(self) -> None:
        _require_history(self.history)
        _require_number(self.view_epoch, "view epoch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promised:
    """The sender's promises have changed: whoever sees it crash counts it with these.

    Signs of life carry `version`: a crash is counted with promises at least as new as the last one told, or not at
    all.
    """

    history: bytes
    sender: MemberId
    n: int
    base: ViewRef | None
    pending: tuple[ViewRef, ...]
    version: int

    def __post_init__(self) -> None:
        _require_history(self.history)
        _require_number(self.n, "n")
        _require_number(self.version, "version")
        _require(len(self.pending) <= PENDING_MAX, f"{len(self.pending)} pending views are too many")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surpassed:
    """The answer to a proposal whose number the sender can no longer say: propose above `n`."""

    sender: MemberId
    n: int

    def __post_init__(self) -> None:
        _require_number(self.n, "n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawal:
    """The answer of an agent that takes no part for now (its trainer is lost), with its promises."""

    history: bytes
    stopped: Stopped

    def __post_init__(self) -> None:
        _require_history(self.history)
        _require(self.stopped.withdrawn, "a withdrawal is the word of the one who withdrew")


AgreementMessage: TypeAlias = Propose | Cause | Promised | Surpassed | Withdrawal


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """An agreed view. Same epoch and id on two peers: the same in every field (invariant 1)."""

    history: bytes
    view_epoch: int
    view_id: bytes
    """16 bytes, the hash of all its members' proposals."""
    members: tuple[MemberId, ...]
    """Voters and learners in ring order: all of them take part in every reduction."""
    voters: tuple[MemberId, ...]
    """Those that vote, train and complete rounds, in ring order. The other members are learners."""
    start: StateRef
    """The greatest completed state among the members; a voter that is behind adopts it before the first round."""
    holders: tuple[MemberId, ...]
    """The members that have it already."""
    payloads: tuple[bytes, ...]
    """What each member said besides, in ring order."""
    stopped: tuple[str, ...]
    """D: those left out of this view."""
    parent: bytes = b""
    """The history that this view's takes the place of; empty when this view does not begin one."""
    evicted: tuple[str, ...] = ()
    """Peer ids whose eviction let it take that place."""

    @property
    def ref(self) -> ViewRef:
        """The view as its votes are counted: without its learners."""
        return ViewRef(view_epoch=self.view_epoch, members=self.voters)

    @property
    def learners(self) -> tuple[MemberId, ...]:
        """Joiners that hold no state of this view yet: they reduce with weight zero, and nobody waits for them."""
        return tuple(member for member in self.members if member not in self.voters)

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(member.peer_id for member in self.members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What the shell does after an event, in the order of the fields."""

    froze: bool = False
    """First of all: no round of the old view completes any more; the loader hands out nothing."""
    persist: Promises | None = None
    """On disk (fsync) before anything in `sends` is sent or `installed` is acted upon."""
    sends: tuple[tuple[str, AgreementMessage], ...] = ()
    """(peer id, message), in any order, best effort."""
    installed: View | None = None
    """Stands from now on."""
    accepted: bool = True
    """False: the event had no effect (a round's result is to be discarded, a request came too late)."""
    trace: tuple[str, ...] = ()
    """One line per transition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementSettings:
    """Times, in milliseconds. Messages carry an attempt; these only bound how long a lost one costs."""

    resend_ms: int = 150
    """First repetition of a proposal that not everybody answered; doubles up to `resend_max_ms`."""
    resend_max_ms: int = 2_000
    join_patience_ms: int = 400
    """A joiner that does not answer an attempt for this long is left out of it."""
    join_ttl_ms: int = 1_500
    """A request to join is repeated more often than this, or forgotten: silent joiners block attempts."""
    pause_ms: int = 200
    """Before the second attempt in a row; doubles with each, up to `pause_max_ms`; randomised by a half."""
    pause_max_ms: int = 5_000
    calm_ms: int = 10_000
    """An attempt later than this after the last one starts at once again."""
    stuck_ms: int = 1_000
    """An attempt that cannot end as it is (somebody came back, sets disagree) is replaced then; doubles."""
    stuck_max_ms: int = 60_000
    """Unless there is news: each attempt adds a promise to keep until the next checkpoint."""
    shun_ms: int = 30_000
    """A learner in whose views two reductions in a row failed is not let in again for so long; doubles each time."""
    shun_max_ms: int = 1_800_000
    link_patience_ms: int = 10_000
    """Of one that does not hear a member whom everybody else hears: then it had better stand aside."""
    cause_ttl_ms: int = 2_000
    """A pre-vote counts for this long; it is repeated four times as often."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            _require(getattr(self, name) > 0, f"{name} must be positive")


def view_id(words: Iterable[Propose]) -> bytes:
    """The hash of all proposals, in ring order."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"dmc view")
    for word in words:
        hashed.update(word.digest())
    return hashed.digest()


def minted_history(identity: bytes) -> bytes:
    """The history that a view founds: every member mints the same one from the view's id."""
    return hashlib.blake2b(identity, digest_size=DIGEST_BYTES, person=b"dmc history").digest()
