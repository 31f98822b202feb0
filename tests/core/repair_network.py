"""Many peers that repair one data set, on one thread and one clock: words are lost, late and repeated, peers crash,
come back (some with an empty disk), flap and leave for good, shards rot, disks fill. The decisions are the product's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_dmc.core.placement import Placement, StoringPeer, placement
from p2p_dmc.core.pledges import Pledges
from p2p_dmc.core.repair import Repair, RepairSettings, Said, copies_of
from p2p_dmc.core.replication import Copies, Plan

D = b"d" * 16
SETTINGS = RepairSettings(fetch_still_ms=1500, drop_still_ms=6000, patience_ms=8000, most_asked=8)
TICK_MS = 250
NOTICE_MS = 2000
"""At most so long after a peer went or came everybody has noticed, each in its own time."""
FRESH_MS = 10_000
"""What was verified longer ago is verified again before it is pledged."""
SCRUB_MS = 20_000


def digest(i: int) -> bytes:
    return i.to_bytes(16, "big")


@dataclass
class Peer:
    peer_id: str
    domain: str = ""
    weight: int = 1  # 0: a seeder that means to leave
    capacity: int = 1 << 30  # in shards
    disk: dict[int, bool] = field(default_factory=dict)  # shard: whether its bytes are right
    up: bool = True
    life: int = 0
    sees: dict[str, int] = field(
        default_factory=dict
    )  # the peers that it believes to be up, and in which life
    verified: dict[int, int] = field(default_factory=dict)  # shard: when
    fetching: dict[int, int] = field(default_factory=dict)  # shard: until when
    full: bool = False
    dirty: bool = True
    placed: Placement | None = None
    repair: Repair = field(init=False)
    pledges: Pledges = field(init=False)


@dataclass(frozen=True)
class Rules:
    """What a run of the network may do, and with what."""

    loss: float = 0.1
    repeat: float = 0.1
    latest_ms: int = 800  # that a word arrives after it was said
    pledges: type[Pledges] = Pledges
    drops_on_hearsay: bool = False  # gives copies up on what it has heard: what pledges are for


class Network:
    """Invariant, checked at each copy that is given up: so many other right copies are on disks as are wanted, less
    those that a disk has lost of late.
    """

    def __init__(self, peers: int, shards: int, replicas: int, seed: int, rules: Rules | None = None) -> None:
        self.rng = random.Random(seed)
        self.rules = rules or Rules()
        self.replicas, self.shards = replicas, shards
        self.now_ms, self.notice_ms = 0, NOTICE_MS
        self.peers: dict[str, Peer] = {}
        self.words: list[tuple[int, int, Callable[[], None]]] = []
        self.said = 0
        self.cut: set[tuple[str, str]] = set()  # from whom to whom no word comes
        self.damage: list[tuple[int, int]] = []  # when, which shard
        self.moved: list[tuple[str, int]] = []  # to whom, which shard
        self.given_up: list[tuple[str, int]] = []
        self.repaired = 0
        self.violations: list[str] = []
        for i in range(peers):
            self.add(f"p{i:02}")

    # -- what happens ---------------------------------------------------------------------------------------------

    def add(self, peer_id: str, **facts: object) -> Peer:
        peer = self.peers[peer_id] = Peer(peer_id, **facts)  # type: ignore[arg-type]
        self.begin(peer)
        return peer

    def begin(self, peer: Peer) -> None:
        """A life of a peer: it knows nothing but what is on its disk."""
        peer.life += 1
        peer.up, peer.sees, peer.placed, peer.full = True, {peer.peer_id: peer.life}, None, False
        peer.verified, peer.fetching = {}, {}
        peer.pledges = self.rules.pledges(self.rng.getrandbits(62))
        peer.repair = Repair(
            me=peer.peer_id, dataset=D, shards=self.shards, replicas=self.replicas, pledges=peer.pledges,
            settings=SETTINGS,
        )  # fmt: skip
        for other in self.peers.values():
            if other is not peer and other.up:
                self.notices(other, peer)
                self.notices(peer, other)

    def notices(self, one: Peer, other: Peer) -> None:
        """In a while one peer knows how it stands with another then."""
        mine = one.life

        def notice() -> None:
            known, life = one.sees.get(other.peer_id, 0), other.life if other.up else 0
            if one.life != mine or not one.up or known == life:
                return
            one.repair.gone(other.peer_id)
            one.sees.pop(other.peer_id, None)
            one.dirty = True
            if life:
                one.sees[other.peer_id] = life
                self.tell(one, other)

        self.later(self.rng.randrange(self.notice_ms), notice)

    def crash(self, peer: Peer, *, empty: bool = False) -> None:
        peer.up = False
        if empty:
            self.damage += [(self.now_ms, shard) for shard, right in peer.disk.items() if right]
            peer.disk.clear()
        for other in self.peers.values():
            if other.up:
                self.notices(other, peer)

    def rot(self, peer: Peer, shard: int) -> None:
        """The bytes change under a file whose time and size stay."""
        if peer.disk.get(shard):
            peer.disk[shard] = False
            self.damage.append((self.now_ms, shard))

    def lose_file(self, peer: Peer, shard: int) -> None:
        if peer.disk.pop(shard, False):
            self.damage.append((self.now_ms, shard))

    def later(self, ms: int, what: Callable[[], None]) -> None:
        self.said += 1
        self.words.append((self.now_ms + ms, self.said, what))

    # -- words ----------------------------------------------------------------------------------------------------

    def send(self, sender: Peer, to: str, what: Callable[[Peer], None]) -> None:
        """Fenced as the agent does it: a word of a former life of its sender, or of one that is gone, is not heard."""
        life = sender.life
        receiver = self.peers[to]

        def arrive() -> None:
            if receiver.up and receiver.sees.get(sender.peer_id, 1 << 60) <= life:
                what(receiver)

        for _ in range(1 + (self.rng.random() < self.rules.repeat)):
            if self.rng.random() >= self.rules.loss and (sender.peer_id, to) not in self.cut:
                self.later(self.rng.randrange(1, self.rules.latest_ms), arrive)

    def own(self, peer: Peer) -> Copies:
        return copies_of(peer.verified, frozenset(peer.disk), peer.full, self.shards)

    def tell(self, peer: Peer, to: Peer) -> None:
        said = Said(copies=self.own(peer), placement=peer.placed.digest() if peer.placed else b"")
        self.send(peer, to.peer_id, lambda there: there.repair.heard(peer.peer_id, said))

    # -- time -----------------------------------------------------------------------------------------------------

    def run(self, ms: int, happens: Callable[[], None] = lambda: None) -> None:
        end_ms = self.now_ms + ms
        while self.now_ms < end_ms:
            self.now_ms += TICK_MS
            happens()
            due = sorted(word[:2] for word in self.words if word[0] <= self.now_ms)
            by = {word[:2]: word[2] for word in self.words}
            self.words = [word for word in self.words if word[0] > self.now_ms]
            for key in due:
                by[key]()
            for peer in list(self.peers.values()):
                if peer.up:
                    self.tick(peer)

    def tick(self, peer: Peer) -> None:
        stays = [p for p in sorted(peer.sees) if self.peers[p].weight]
        peers = [
            StoringPeer(peer_id=p, weight=self.peers[p].weight, domain=self.peers[p].domain) for p in stays
        ]
        if peer.placed is None:
            peer.placed = placement([digest(i) for i in range(self.shards)], peers, self.replicas)
            peer.dirty = True
        elif (new := peer.placed.with_peers(peers)) is not peer.placed:
            peer.placed, peer.dirty = new, True
        self.scrub(peer)
        own = self.own(peer)
        full = peer.repair.full(own)
        if peer.repair.plan is None or not peer.repair.plan.is_of(peer.placed, full):
            peer.repair.follow(Plan(peer.placed, full, peer.repair.plan), self.now_ms)
        self.fetch(peer, own)
        if peer.weight:
            peer.repair.give_up(self.own(peer), lambda shard: False, self.now_ms)
        else:
            peer.repair.leave(self.now_ms)
        for question in peer.pledges.questions(1000, self.now_ms):
            self.ask(peer, question.peer_id, question.number, question.shards)
        for shard in self.droppable(peer) if peer.weight else ():
            self.drop(peer, shard)
        others = [self.peers[p] for p in peer.sees if p != peer.peer_id]
        if others and (peer.dirty or self.now_ms % 1000 == 0):
            for other in others if peer.dirty else [self.rng.choice(others)]:
                self.tell(peer, other)
            peer.dirty = False

    def droppable(self, peer: Peer) -> list[int]:
        if not self.rules.drops_on_hearsay:
            return peer.repair.may_drop()
        return peer.pledges.asked_about(D)  # the keepers have all said that they hold it

    def ask(self, peer: Peer, to: str, number: int, shards: tuple[int, ...]) -> None:
        def asked(there: Peer) -> None:
            kept = there.pledges.answer(D, shards, lambda shard: self.has_fresh(there, shard))
            self.send(there, peer.peer_id, lambda back: back.pledges.pledged(to, D, number, kept))

        self.send(peer, to, asked)

    def has_fresh(self, peer: Peer, shard: int) -> bool:
        if shard not in peer.disk or shard not in peer.verified:
            return False
        if self.now_ms - peer.verified[shard] > FRESH_MS:
            self.verify(peer, shard)
        return shard in peer.verified

    def scrub(self, peer: Peer) -> None:
        old = [s for s in sorted(peer.disk) if self.now_ms - peer.verified.get(s, -SCRUB_MS) >= SCRUB_MS]
        gone = [s for s in sorted(peer.verified) if s not in peer.disk]
        for shard in [*gone, *old[:2]]:
            self.verify(peer, shard)

    def verify(self, peer: Peer, shard: int) -> None:
        if peer.disk.get(shard):
            peer.verified[shard] = self.now_ms
            return
        peer.disk.pop(shard, None)
        peer.verified.pop(shard, None)
        peer.dirty, self.repaired = True, self.repaired + 1

    def fetch(self, peer: Peer, own: Copies) -> None:
        wanted = peer.repair.to_fetch(own, self.now_ms)
        for shard in [s for s in wanted if s not in peer.fetching][: 3 - len(peer.fetching)]:
            if len(peer.disk) + len(peer.fetching) >= peer.capacity:
                peer.full = peer.dirty = True
                break
            peer.fetching[shard] = self.now_ms + self.rng.randrange(200, 1500)
        for shard in [s for s, until in peer.fetching.items() if until <= self.now_ms]:
            del peer.fetching[shard]
            sources = [p for p, said in peer.repair.others.items() if shard in said.copies.there]
            source = self.peers[self.rng.choice(sorted(sources))] if sources else None
            if source is not None and source.up and source.disk.get(shard) and shard not in peer.disk:
                peer.disk[shard], peer.verified[shard] = True, self.now_ms
                peer.dirty = True
                self.moved.append((peer.peer_id, shard))
        if peer.full and len(peer.disk) + 2 <= peer.capacity:
            peer.full, peer.dirty = False, True

    # -- what must be so ------------------------------------------------------------------------------------------

    def drop(self, peer: Peer, shard: int) -> None:
        others = sum(bool(p.disk.get(shard)) for p in self.peers.values() if p is not peer)
        since_ms = self.now_ms - FRESH_MS - SETTINGS.patience_ms
        damaged = sum(at >= since_ms and what == shard for at, what in self.damage)
        if others < self.replicas - damaged:
            self.violations.append(
                f"{self.now_ms} ms: {peer.peer_id} gave up shard {shard}; {others} others are left, {damaged} damaged"
            )
        peer.disk.pop(shard, None)
        peer.verified.pop(shard, None)
        peer.pledges.withdraw((D, shard))
        peer.dirty = True
        self.given_up.append((peer.peer_id, shard))

    def settled(self) -> bool:
        """Everybody who is up has what placement gives it and nothing else, verified."""
        up = [p for p in self.peers.values() if p.up]
        peers = [StoringPeer(peer_id=p.peer_id, weight=p.weight, domain=p.domain) for p in up if p.weight]
        placed = placement([digest(i) for i in range(self.shards)], peers, self.replicas)
        return all(
            {s for s, right in p.disk.items() if right} == set(placed.shards_of(p.peer_id)) == set(p.verified)
            for p in up
            if p.weight
        )

    def settle(self, within_ms: int = 180_000) -> None:
        end_ms = self.now_ms + within_ms
        while not self.settled():
            if self.now_ms >= end_ms:
                raise AssertionError(f"not settled after {within_ms} ms")
            self.run(1000)

    def fill(self) -> None:
        """Begin with every shard where placement wants it, verified, and with everybody knowing everybody."""
        peers = [
            StoringPeer(peer_id=p.peer_id, weight=p.weight, domain=p.domain) for p in self.peers.values()
        ]
        placed = placement([digest(i) for i in range(self.shards)], peers, self.replicas)
        for peer in self.peers.values():
            peer.disk = dict.fromkeys(placed.shards_of(peer.peer_id), True)
            peer.verified = dict.fromkeys(peer.disk, 0)
            peer.sees = {other.peer_id: other.life for other in self.peers.values()}
