"""One data set as this peer knows it: who is to hold its shards, who says that it does, and who means otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from p2p_dmc.core.placement import Placement, StoringPeer, placement
from p2p_dmc.core.repair import Said
from p2p_dmc.core.replication import Copies
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import Stamp
from p2p_dmc.observe.journal import Journal

MOST_RANKS = 1024
"""That are remembered: of the shards on their way, which are looked at time and again."""
LOST_AFTER_S, LOST_REMINDER_S = 5.0, 60.0


@dataclass(slots=True)
class Dissent:
    """Another peer means a placement that is not this peer's."""

    placement: bytes
    since_s: float
    named: bool = False


@dataclass(slots=True)
class Known:
    """One data set as this peer knows it."""

    manifest: Manifest
    verified: dict[int, Stamp] = field(default_factory=dict)
    """Shards that had the right digest, in this life of the agent, while their file was as it is said here."""
    verified_s: dict[int, float] = field(default_factory=dict)
    """When, by the monotonic clock."""
    doubted: set[int] = field(default_factory=set)
    """Shards whose file was written to after it was verified, and that were not verified again since."""
    others: dict[str, Said] = field(default_factory=dict)
    placed: Placement | None = None
    dissents: dict[str, Dissent] = field(default_factory=dict)
    version: int = field(default_factory=lambda: int(time.monotonic() * 1e6))
    """Grows whenever what is held here, or what is known of it, changes; also over what was known of it before."""
    lost_said_s: float = 0.0
    changes: int | None = None
    """Of the store, when this was last compared with it,"""
    followed: frozenset[int] = frozenset()
    """and what was held then."""
    _ranks: tuple[Placement | None, dict[int, tuple[str, ...]]] = (None, {})

    def rank(self, shard: int) -> tuple[str, ...]:
        """All storing peers in the order in which the placement names them for a shard; nobody before there is one."""
        if self.placed is None:
            return ()
        if self._ranks[0] is not self.placed or len(self._ranks[1]) > MOST_RANKS:
            self._ranks = self.placed, {}
        ranks = self._ranks[1]
        if shard not in ranks:
            ranks[shard] = self.placed.rank(shard)
        return ranks[shard]

    def place(self, peers: tuple[StoringPeer, ...]) -> bool:
        """Place the shards on these peers; False where they are already."""
        return self.take(placed_on(self.manifest, self.placed, peers))

    def take(self, placed: Placement) -> bool:
        """The placement from now on; False if it is the one there was."""
        if placed is self.placed:
            return False
        self.placed = placed
        # gossip brings the others to it soon
        self.dissents = {peer_id: dissent for peer_id, dissent in self.dissents.items() if dissent.named}
        return True

    def verify(self, shard: int, stamp: Stamp | None) -> None:
        """The shard had the right digest when its file was like that; None: it is gone again."""
        if stamp is not None:
            self.doubted.discard(shard)
            self.verified[shard] = stamp
            self.verified_s[shard] = time.monotonic()
            self.version += 1

    def doubt(self, shard: int) -> bool:
        """The shard's file is another one than was verified, or gone; False if that was known."""
        self.verified_s.pop(shard, None)
        self.doubted.add(shard)
        if self.verified.pop(shard, None) is None:
            return False
        self.version += 1
        return True

    def vouched(self, shard: int, stamp: Stamp, other: Known, place: int) -> bool:
        """The shard's file is one that was verified as another version's, if it is."""
        if other.verified.get(place) != stamp:
            return False
        self.verify(shard, stamp)
        self.verified_s[shard] = other.verified_s[place]
        return True

    def dissenters(self) -> list[str]:
        """Who means another placement than this peer."""
        digest = self.placed.digest() if self.placed is not None else b""
        return sorted(peer_id for peer_id, other in self.others.items() if other.placement != digest)


def placed_on(manifest: Manifest, before: Placement | None, peers: tuple[StoringPeer, ...]) -> Placement:
    """The placement of a data set on these peers, from one that there was."""
    if before is None:
        before = placement(manifest.shard_digests, (), manifest.replicas)
    return before.with_peers(peers)


def holders_of(copies: Mapping[str, Copies], me: str, shards: int) -> dict[int, list[str]]:
    """Shard index to the peers that hold it, verified, ``me`` first."""
    found: dict[int, list[str]] = {shard: [] for shard in range(shards)}
    for peer_id in sorted(copies, key=lambda peer_id: (peer_id != me, peer_id)):
        for shard in copies[peer_id].verified:
            found[shard].append(peer_id)
    return found


def report_fault(known: Known, shard: int, wrong: str, say: Callable[[str], None], journal: Journal) -> None:
    """A shard on this peer's disk is not what it should be (`Store.fault`)."""
    digest = known.manifest.shard_digests[shard].hex()
    say(
        f"data set {known.manifest.name!r}: shard {digest[:12]} {wrong} here; it is fetched from another peer anew"
    )
    journal.event("shard_corrupt", shard=digest, reason=wrong)


class DataWatch:
    """Says aloud what is wrong with a data set and does not pass."""

    def __init__(self, say: Callable[[str], None], journal: Journal, differ_still_s: float) -> None:
        self._say = say
        self._journal = journal
        self._differ_still_s = differ_still_s

    def lost(self, known: Known, reachable: frozenset[int], now_s: float, changed_s: float) -> None:
        """Shards that no live peer holds; ``changed_s``: when membership last moved."""
        manifest = known.manifest
        if len(reachable) == len(manifest.shards):
            return
        lost = sorted(set(range(len(manifest.shards))) - reachable)
        if lost and now_s - max(known.lost_said_s, changed_s) > (
            LOST_REMINDER_S if known.lost_said_s else LOST_AFTER_S
        ):
            known.lost_said_s = now_s
            names = ", ".join(manifest.shard_digests[i].hex()[:12] for i in lost[:3])
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            self._say(
                f"data set {manifest.name!r}: no live peer holds {len(lost)} of {len(manifest.shards)} "
                f"shards ({names}{more}); start a peer that has them"
            )
            self._journal.event("shards_lost", dataset=manifest.digest.hex(), shards=len(lost))

    def dissent(self, known: Known, names: Mapping[str, str], now_s: float) -> None:
        """Placement is to be the same everywhere, or two peers wait for each other to fetch and to drop.

        While members come and go it differs for a moment; one that still does is named, once, and when it is over.
        """
        if known.placed is None:
            return
        here, dissenters = known.placed.digest(), known.dissenters()
        for peer_id in [p for p in known.dissents if p not in dissenters]:
            if known.dissents.pop(peer_id).named and peer_id in known.others:
                self._tell(known, peer_id, names, here, over=True)
        for peer_id in dissenters:
            there = known.others[peer_id].placement
            dissent = known.dissents.get(peer_id)
            if dissent is None or (dissent.placement != there and not dissent.named):
                dissent = known.dissents[peer_id] = Dissent(there, now_s)
            if not dissent.named and now_s - dissent.since_s >= self._differ_still_s:
                dissent.named = True
                self._tell(known, peer_id, names, here, over=False)

    def _tell(self, known: Known, peer_id: str, names: Mapping[str, str], here: bytes, *, over: bool) -> None:
        who, name = names.get(peer_id, peer_id[:8]), known.manifest.name
        there = known.others[peer_id].placement
        if over:
            self._say(f"{who} places data set {name!r} as this peer does again")
        else:
            self._say(
                f"{who} places data set {name!r} otherwise than this peer ({there.hex()[:12]} there, "
                f"{here.hex()[:12]} here): the two see different peers, weights or domains, or run different "
                "versions; nothing is deleted until they agree"
            )
        self._journal.event(
            "placement_agrees" if over else "placement_differs",
            peer_id=peer_id,
            dataset=known.manifest.digest.hex(),
            here=here.hex(),
            there=there.hex(),
        )
