"""Peers that repair a data set under faults: nothing is lost, no more is moved than placement requires."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from p2p_dmc.core.placement import StoringPeer, moves, placement
from p2p_dmc.core.pledges import Pledges
from p2p_dmc.core.repair import Repair, Said
from p2p_dmc.core.replication import Copies, Plan
from p2p_dmc.core.shard_set import ShardSet
from tests.core.repair_network import FRESH_MS, SETTINGS, TICK_MS, Network, Peer, Rules, digest


class Weather:
    """Random faults; never so many to one shard within one window that its replicas cannot stand them."""

    WINDOW_MS = FRESH_MS + SETTINGS.patience_ms + 10_000

    def __init__(self, net: Network, seed: int) -> None:
        self.net = net
        self.rng = random.Random(seed)
        self.happened: Counter[str] = Counter()

    def spares(self, shards: list[int]) -> bool:
        """Whether one more copy of each of these may be damaged."""
        net = self.net
        since_ms = net.now_ms - self.WINDOW_MS
        for shard in shards:
            recent = sum(at >= since_ms and what == shard for at, what in net.damage)
            right = sum(bool(p.disk.get(shard)) for p in net.peers.values())
            if recent >= net.replicas - 1 or right <= 1:
                return False
        return True

    def __call__(self) -> None:
        net, rng = self.net, self.rng
        if rng.random() > 0.08:
            return
        up = [p for p in net.peers.values() if p.up]
        down = [p for p in net.peers.values() if not p.up]
        what = rng.choice(["crash", "crash", "back", "back", "rot", "lose", "empty", "join", "leave"])
        peer = rng.choice(up)
        if what == "back" and down:
            net.begin(rng.choice(down))
        elif what == "crash" and len(up) > 3:
            net.crash(peer)
        elif what == "empty" and len(up) > 3 and self.spares(list(peer.disk)):
            net.crash(peer, empty=True)
        elif what in ("rot", "lose") and peer.disk and self.spares([shard := rng.choice(sorted(peer.disk))]):
            (net.rot if what == "rot" else net.lose_file)(peer, shard)
        elif what == "join" and len(net.peers) < 9:
            net.add(f"q{self.happened[what]:02}")
        elif what == "leave" and len(up) > 4 and len(net.peers) > 5 and self.spares(list(peer.disk)):
            net.crash(peer, empty=True)
            del net.peers[peer.peer_id]
            for one in net.peers.values():
                one.sees.pop(peer.peer_id, None)
                one.repair.gone(peer.peer_id)
        else:
            return
        self.happened[what] += 1


def stormy(
    seed: int, replicas: int, rules: Rules | None = None, ms: int = 120_000
) -> tuple[Network, Weather]:
    net = Network(peers=6, shards=12, replicas=replicas, seed=seed, rules=rules)
    first = next(iter(net.peers.values()))
    first.disk = dict.fromkeys(range(12), True)
    net.run(30_000)  # one had it all
    weather = Weather(net, seed)
    net.run(ms, weather)
    return net, weather


@pytest.mark.parametrize("seed", range(6))
def test_no_fault_that_the_replicas_can_stand_loses_a_shard(seed: int) -> None:
    net, weather = stormy(seed, replicas=2 + seed % 2)
    assert not net.violations
    assert sum(weather.happened.values()) >= 15 and net.given_up and net.repaired
    for peer in net.peers.values():
        if not peer.up:
            net.begin(peer)
    net.settle()
    assert not net.violations
    copies = Counter(s for p in net.peers.values() for s, right in p.disk.items() if right)
    assert all(copies[s] == net.replicas for s in range(net.shards))


@pytest.mark.parametrize("on_hearsay", [False, True])
def test_a_word_that_never_comes_costs_no_copy(on_hearsay: bool) -> None:
    """One has lost a shard and no room to fetch it; what it says does not reach the one that has a copy too many."""
    net = Network(peers=3, shards=8, replicas=2, seed=5, rules=Rules(loss=0.0, drops_on_hearsay=on_hearsay))
    net.fill()
    one, other = net.peers["p00"], net.peers["p01"]
    one.disk, one.verified = dict.fromkeys(range(8), True), dict.fromkeys(range(8), 0)
    net.run(4000)
    assert one.placed is not None and other.placed is not None
    shard = next(s for s in other.placed.shards_of("p01") if s not in one.placed.shards_of("p00"))
    net.cut.add(("p01", "p00"))
    net.lose_file(other, shard)
    net.verify(other, shard)
    net.damage.clear()  # as if it were long ago
    other.capacity = len(other.disk)
    net.run(30_000)
    assert (shard in one.disk) == (not on_hearsay)
    assert bool(net.violations) == on_hearsay


# -- no more than placement requires ----------------------------------------------------------------------------------


def at_rest(peers: int, seed: int, replicas: int = 2, shards: int = 40) -> Network:
    net = Network(peers=peers, shards=shards, replicas=replicas, seed=seed)
    net.fill()
    net.run(20_000)
    assert net.settled() and not net.moved and not net.given_up
    return net


def placed(net: Network, without: str = "") -> object:
    from p2p_dmc.core.placement import StoringPeer

    peers = [StoringPeer(peer_id=p, weight=one.weight) for p, one in net.peers.items() if p != without]
    return placement([digest(i) for i in range(net.shards)], peers, net.replicas)


@pytest.mark.parametrize("seed", range(4))
def test_after_a_loss_each_copy_that_went_is_made_once(seed: int) -> None:
    net = at_rest(5, seed, replicas=2 + seed % 2)
    before, after = placed(net), placed(net, "p02")
    net.crash(net.peers["p02"])
    net.settle()
    wanted = sorted((m.peer_id, m.shard_index) for m in moves(before, after))  # type: ignore[arg-type]
    assert sorted(net.moved) == wanted
    assert len(wanted) == len(before.shards_of("p02")) > 0  # type: ignore[attr-defined]
    assert not net.given_up


@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_gets_its_part_and_nobody_else_anything(seed: int) -> None:
    net = at_rest(5, seed)
    net.add("new")
    net.settle()
    after = placed(net)
    assert sorted(net.moved) == [("new", s) for s in after.shards_of("new")]  # type: ignore[attr-defined]
    assert len(net.given_up) == len(net.moved) and "new" not in {p for p, _ in net.given_up}


def test_who_is_gone_for_a_moment_moves_nothing() -> None:
    net = at_rest(5, 1)
    net.notice_ms = TICK_MS
    for _ in range(4):
        net.crash(net.peers["p01"])
        net.run(SETTINGS.fetch_still_ms - 3 * TICK_MS)
        net.begin(net.peers["p01"])
        net.run(15_000)
    assert net.moved == [] and net.given_up == []


def test_a_peer_that_comes_and_goes_for_ever_keeps_no_other_waiting() -> None:
    """Everybody hears of every flap at once, so that it is there and gone for less than bytes wait."""
    net = at_rest(5, 2)
    flapping, dead = net.peers["p01"], net.peers["p03"]
    before, after = placed(net), placed(net, "p03")

    def flap() -> None:
        if net.now_ms % 1000 == 0:
            for other in net.peers.values():
                if other is not flapping and other.up:
                    if other.sees.pop(flapping.peer_id, None) is None:
                        other.sees[flapping.peer_id] = flapping.life
                    else:
                        other.repair.gone(flapping.peer_id)
                    other.dirty = True

    net.crash(dead)
    net.run(40_000, flap)
    due = {(m.peer_id, m.shard_index) for m in moves(before, after)}  # type: ignore[arg-type]
    steady = {(p, s) for p, s in due if p != flapping.peer_id and flapping.peer_id not in before.holders(s)}  # type: ignore[attr-defined]
    assert steady and steady <= set(net.moved)
    assert len(net.moved) == len(set(net.moved)) and not net.violations


# -- no room ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_what_does_not_fit_goes_to_others_and_no_disk_holds_more_than_it_may(seed: int) -> None:
    net = Network(peers=0, shards=30, replicas=2, seed=seed)
    for i, capacity in enumerate((40, 4, 5, 30, 30)):
        net.add(f"p{i}", capacity=capacity)
    net.peers["p0"].disk = dict.fromkeys(range(30), True)
    small: list[Peer] = [net.peers["p1"], net.peers["p2"]]

    def watch() -> None:
        assert all(len(p.disk) <= p.capacity for p in net.peers.values())

    net.run(120_000, watch)
    copies = Counter(s for p in net.peers.values() for s in p.disk)
    assert all(copies[s] >= 2 for s in range(30)) and not net.violations
    assert all(p.full and len(p.disk) >= p.capacity - 1 for p in small)
    assert len(net.peers["p3"].disk) < 30  # others' shards only as far as somebody has no room


def test_with_no_room_anywhere_the_last_copies_stay() -> None:
    net = Network(peers=0, shards=20, replicas=2, seed=0)
    for i in range(3):
        net.add(f"p{i}", capacity=20 if i == 0 else 5)
    net.peers["p0"].disk = dict.fromkeys(range(20), True)
    net.run(60_000)
    copies = Counter(s for p in net.peers.values() for s in p.disk)
    assert all(copies[s] == 2 for s in range(20) if s not in net.peers["p0"].disk) and len(copies) == 20
    assert all(len(net.peers[p].disk) == 5 for p in ("p1", "p2"))


# -- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_a_seeder_that_may_leave_takes_nothing_with_it(seed: int) -> None:
    """Under loss, with a peer that crashes and one that is emptied meanwhile."""
    rng = random.Random(seed)
    net = Network(peers=4, shards=10, replicas=2, seed=seed, rules=Rules(loss=0.3))
    seeder = net.add("seeder", weight=0)
    seeder.disk = dict.fromkeys(range(10), True)
    for _ in range(400):
        net.run(TICK_MS)
        victim = net.peers[f"p{rng.randrange(4):02}"]
        if victim.up and net.now_ms < 20_000 and rng.random() < 0.05:
            net.crash(victim, empty=rng.random() < 0.5)
        elif not victim.up and rng.random() < 0.1:
            net.begin(victim)
        if seeder.repair.may_leave():
            break
    else:
        raise AssertionError("it never may")
    net.crash(seeder, empty=True)
    right = Counter(s for p in net.peers.values() for s, is_right in p.disk.items() if is_right)
    assert all(right[s] >= 2 for s in range(10))


def test_a_seeder_whose_only_peer_crashed_with_the_copy_stays() -> None:
    net = Network(peers=1, shards=4, replicas=1, seed=3)
    seeder = net.add("seeder", weight=0)
    seeder.disk = dict.fromkeys(range(4), True)
    net.run(15_000)
    assert seeder.repair.may_leave()
    net.crash(net.peers["p00"], empty=True)
    net.run(5000)
    assert not seeder.repair.may_leave()
    net.begin(net.peers["p00"])
    net.run(20_000)
    assert seeder.repair.may_leave() and len(net.peers["p00"].disk) == 4


def test_a_pledge_counts_no_more_once_its_copy_is_said_to_be_lost() -> None:
    me, keepers = "a", ("b", "c")
    placed = placement([digest(0)], [StoringPeer(peer_id=p) for p in keepers], 2)
    has, nothing = (
        Copies(verified=ShardSet.of(s, 1), unverified=ShardSet.of([], 1), full=False) for s in ([0], [])
    )
    pledges = Pledges(100)
    repair = Repair(me=me, dataset=bytes(16), shards=1, replicas=2, pledges=pledges, settings=SETTINGS)
    for peer_id in keepers:
        repair.heard(peer_id, Said(copies=has, placement=placed.digest()))
    repair.follow(Plan(placed, {}), 0)
    now_ms = SETTINGS.drop_still_ms
    repair.give_up(has, lambda shard: False, now_ms)
    [number] = {question.number for question in pledges.questions(1000, now_ms)}
    pledges.pledged("b", bytes(16), number, [0])
    repair.heard("b", Said(copies=nothing, placement=placed.digest(), version=1))
    pledges.pledged("c", bytes(16), number, [0])
    repair.give_up(has, lambda shard: False, now_ms)
    assert repair.may_drop() == []
    repair.heard("b", Said(copies=has, placement=placed.digest(), version=2))
    repair.give_up(has, lambda shard: False, now_ms)
    [number] = {question.number for question in pledges.questions(1000, now_ms)}
    for peer_id in keepers:
        pledges.pledged(peer_id, bytes(16), number, [0])
    assert repair.may_drop() == [0]
