"""Who keeps what when some have no room, for how long, and how it all stands; sets of shards as bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core.placement import StoringPeer, placement
from p2p_dmc.core.repair import copies_of
from p2p_dmc.core.replication import Copies, Duty, Plan, tally
from p2p_dmc.core.shard_set import ShardSet
from tests.core.placement_oracle import digests

some_shards = st.sets(st.integers(0, 40))


@given(some_shards, some_shards, st.integers(41, 60))
def test_a_set_of_shards_is_a_set(one: set[int], other: set[int], count: int) -> None:
    a, b = ShardSet.of(one, count), ShardSet.of(other, count)
    assert set(a) == one and list(a) == sorted(one) and len(a) == len(one)
    assert set(a | b) == one | other
    assert [i in a for i in range(-3, count + 3)] == [i in one for i in range(-3, count + 3)]
    assert a.at(np.arange(count)).tolist() == [i in one for i in range(count)] == a.mask().tolist()
    assert (a == b) == (one == other) and ShardSet.from_bytes(a.to_bytes(), count) == a
    assert hash(ShardSet.where(a.mask())) == hash(a) and "x" not in a


def test_bits_that_do_not_fit_are_refused_and_those_after_the_last_ignored() -> None:
    for size in (0, 1, 3):
        with pytest.raises(ValueError, match="bits for 9 shards"):
            ShardSet.from_bytes(b"\xff" * size, 9)
    assert ShardSet.from_bytes(b"\xff\xff", 9) == ShardSet.of(range(9), 9)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[StoringPeer], int, dict[str, set[int]]]:
    count = draw(st.integers(1, 7))
    domains = draw(st.lists(st.sampled_from(["", "", "a", "b"]), min_size=count, max_size=count))
    peers = [StoringPeer(peer_id=f"p{i}", domain=domain) for i, domain in enumerate(domains)]
    full = draw(st.dictionaries(st.sampled_from([p.peer_id for p in peers]), st.sets(st.integers(0, 11))))
    return peers, draw(st.integers(1, 4)), full


@settings(max_examples=150)
@given(situations(), st.data())
def test_what_has_no_room_is_kept_by_the_next_ones(
    situation: tuple[list[StoringPeer], int, dict[str, set[int]]], data: st.DataObject
) -> None:
    peers, replicas, held = situation
    placed = placement(digests(12), peers, replicas)
    full = {p: ShardSet.of(shards, 12) for p, shards in held.items()}
    plan = Plan(placed, full)
    for shard in range(12):
        keepers = plan.keepers(shard)
        able = [p.peer_id for p in peers if p.peer_id not in full]
        stay = [p for p in placed.holders(shard) if p in able or shard in held[p]]
        assert keepers[: len(stay)] == tuple(stay) and len(set(keepers)) == len(keepers)
        assert set(keepers[len(stay) :]) <= set(able)
        assert len(keepers) == min(min(replicas, len(peers)), len({*stay, *able}))
    for peer in peers:
        ranks = plan.ranks_of(peer.peer_id).tolist()
        assert [rank >= 0 for rank in ranks] == [
            peer.peer_id in plan.keepers(s) and (peer.peer_id not in full or s in held[peer.peer_id])
            for s in range(12)
        ]
    assert plan.ranks_of("nobody").tolist() == [-1] * 12
    some = data.draw(st.sets(st.sampled_from(sorted(p.peer_id for p in peers))))
    other = {p: ShardSet.of([], 12) for p in some}
    assert plan.is_of(placed, full) and plan.is_of(placed, other) == (other == full)
    again = Plan(placed, other, plan)
    assert [again.keepers(s) for s in range(12)] == [Plan(placed, other).keepers(s) for s in range(12)]


def test_without_full_peers_the_plan_is_the_placement() -> None:
    placed = placement(digests(50), [StoringPeer(peer_id=f"p{i}") for i in range(5)], 2)
    plan = Plan(placed, {"gone": ShardSet.of([], 50)})
    assert [plan.keepers(s) for s in range(50)] == [placed.holders(s) for s in range(50)]
    for peer in placed.peers:
        ranks = placed.ranks_of(peer.peer_id)
        assert np.array_equal(plan.ranks_of(peer.peer_id), ranks)
        for s in range(50):
            holders = placed.holders(s)
            assert ranks[s] == (holders.index(peer.peer_id) if peer.peer_id in holders else -1)
    nobody = placement(digests(3), [], 2)
    assert nobody.ranks_of("p0").tolist() == [-1] * 3 and Plan(nobody, {}).keepers(0) == ()


def test_how_long_a_shard_is_this_peers_counts_for_each_shard_by_itself() -> None:
    duty = Duty(3)
    assert not duty.to_keep(0, 100).any() and not duty.to_give_up(0, 100).any()
    for now_ms, ranks in ((100, [0, -1, 1]), (150, [0, 0, 1]), (160, [1, -1, -1])):
        duty.follow(np.array(ranks, dtype=np.int32), now_ms)
    assert duty.to_keep(60, 160).tolist() == [True, False, False]  # another rank is no change
    assert not duty.to_give_up(50, 209).any()
    assert duty.to_give_up(50, 210).tolist() == [False, True, True]


def holds(verified: list[int], unverified: list[int] = [], *, full: bool = False) -> Copies:  # noqa: B006
    made = copies_of(dict.fromkeys(verified, 0), frozenset(verified + unverified), full, 4)
    assert set(made.verified) == set(verified) and set(made.unverified) == set(unverified)
    return made


def test_how_it_stands() -> None:
    peers = [StoringPeer(peer_id=p) for p in "abc"]
    placed = placement(digests(4), peers, 3)
    copies = {
        "a": holds([0, 1]),
        "b": holds([0], [2]),
        "c": holds([], full=True),
        "leaver": holds([1]),
    }
    plan = Plan(placed, {"c": ShardSet.of([], 4)})
    said = tally(plan, copies, 3, {"a", "b", "c"})
    assert (said.wanted, said.under_replicated, said.lost, said.unverified) == (3, 4, 1, 1)
    assert said.in_flight == 2  # shard 1 to b, shard 2 to a: c has no room, nobody has shard 3
    assert tally(plan, copies, 1, {"a", "b"}).under_replicated == 2
    assert tally(plan, {}, 2, {"a"}).lost == 4


def test_a_file_that_is_gone_is_no_copy() -> None:
    assert set(copies_of({0: 0, 1: 0}, frozenset([1]), False, 4).there) == {1}
