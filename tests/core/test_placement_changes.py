"""What moves when peers come, go and change, flat and with domains; and that following changes is exact."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core import hrw, ranking
from p2p_dmc.core.placement import Placement, StoringPeer, moves, placement
from tests.core.placement_oracle import (
    digests,
    gained_and_lost,
    oracle_moves,
    oracle_rank,
    peers_of,
)

domain_names = st.sampled_from(["", "", "a", "a", "b", "c"])
weights = st.sampled_from([1, 1, 1, 2, 3, 7, 100, 1 << 24])
replicas_wanted = st.integers(1, 5)


@st.composite
def some_peers(draw: st.DrawFn, least: int = 1, most: int = 9) -> list[StoringPeer]:
    """Without domains, with some, or all in a few."""
    given = draw(st.lists(weights, min_size=least, max_size=most))
    names = draw(st.sampled_from([[""], ["", "", "a", "b"], ["a", "b", "c", "d"], ["a", "b"]]))
    return peers_of(given, [draw(st.sampled_from(names)) for _ in given])


def without(peers: list[StoringPeer], gone: set[str]) -> list[StoringPeer]:
    return [peer for peer in peers if peer.peer_id not in gone]


# -- a placement follows changes exactly -------------------------------------------------------------------------------


def assert_same(followed: Placement, full: Placement) -> None:
    """Every bit that a later change or anybody else could see."""
    assert followed.peers == full.peers and followed.digest() == full.digest()
    assert np.array_equal(followed._best, full._best)
    for one, other in ((followed._spread, full._spread), (followed._flat, full._flat)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            for name in ("columns", "costs", "scores"):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name


peer_sets = st.lists(
    st.dictionaries(st.integers(0, 11), st.tuples(weights, domain_names), max_size=12), min_size=2, max_size=5
)


@settings(max_examples=100)
@given(peer_sets, replicas_wanted, st.integers(0, 1000))
def test_any_changes_lead_to_what_is_computed_anew(
    steps: list[dict[int, tuple[int, str]]], replicas: int, salt: int
) -> None:
    """Joins, leaves, other weights and other domains, several at once, one after the other."""
    shards = digests(40, salt)
    with patch.object(ranking, "_ROWS_PER_BLOCK", 16):
        followed = placement(shards, [], replicas)
        for step in steps:
            peers = [
                StoringPeer(peer_id=f"p{i}", weight=weight, domain=domain)
                for i, (weight, domain) in step.items()
            ]
            followed = followed.with_peers(peers)
            assert_same(followed, placement(shards, peers, replicas))
            assert list(followed.rank(7)) == oracle_rank(shards[7], peers)


@settings(max_examples=60)
@given(some_peers(least=2), replicas_wanted, st.data())
def test_one_change_of_each_kind_leads_to_what_is_computed_anew(
    peers: list[StoringPeer], replicas: int, data: st.DataObject
) -> None:
    shards = digests(60)
    before = placement(shards, peers, replicas)
    one = data.draw(st.sampled_from(peers))
    rest = without(peers, {one.peer_id})
    after_leave = before.with_peers(rest)
    assert_same(after_leave, placement(shards, rest, replicas))
    assert_same(after_leave.with_peers(peers), before)
    for other in (
        replace(one, weight=data.draw(weights)),
        replace(one, domain=data.draw(domain_names)),
    ):
        changed = [*rest, other]
        assert_same(before.with_peers(changed), placement(shards, changed, replicas))


def test_a_placement_that_others_follow_from_stays_what_it_is() -> None:
    shards, peers = digests(100), peers_of([1, 2, 3, 4, 5, 6])
    before = placement(shards, peers, 3)
    spread, digest = before._spread, before.digest()
    columns, costs, scores = before._best.copy(), spread.costs.copy(), spread.scores.copy()
    before.with_peers(peers[1:])
    before.with_peers([*peers, StoringPeer(peer_id="new", weight=50)])
    assert before.with_peers(peers[::-1]) is before
    assert np.array_equal(before._best, columns)
    assert np.array_equal(spread.costs, costs) and np.array_equal(spread.scores, scores)
    assert placement(shards, peers, 3).digest() == before.digest() == digest


def test_a_join_computes_the_newcomers_scores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a leave those of the shards that the leaver held: what makes a change cheap, counted in cells."""
    shards, peers, cells = digests(2000), peers_of([1] * 30), 0
    before = placement(shards, peers, 3)
    scores = hrw.scores

    def counting(keys: hrw.U64, keys_of_peers: hrw.U64 | np.uint64) -> hrw.U64:
        nonlocal cells
        found = scores(keys, keys_of_peers)
        cells += found.size
        return found

    monkeypatch.setattr(hrw, "scores", counting)
    before.with_peers([*peers, StoringPeer(peer_id="new")])
    assert cells == 2000
    cells = 0
    held = len(before.shards_of("peer-007"))
    before.with_peers(without(peers, {"peer-007"}))
    assert held * 29 <= cells <= 1.1 * held * 29  # a few rows twice: the guess was wrong for them


# -- what a change moves: exactly as little as possible ----------------------------------------------------------------


@settings(max_examples=60)
@given(some_peers(least=2), replicas_wanted, st.data())
def test_a_lost_peer_or_domain_moves_exactly_the_copies_that_were_lost(
    peers: list[StoringPeer], replicas: int, data: st.DataObject
) -> None:
    shards = digests(30)
    domains = sorted({peer.domain for peer in peers if peer.domain})
    lost_domain = data.draw(st.sampled_from([None, *domains]))
    if lost_domain is None:
        gone = {data.draw(st.sampled_from(peers)).peer_id}
    else:
        gone = {peer.peer_id for peer in peers if peer.domain == lost_domain}
    before = placement(shards, peers, replicas)
    after = placement(shards, without(peers, gone), replicas)
    moved = 0
    for i in range(len(shards)):
        gained, lost = gained_and_lost(before, after, i)
        assert lost == gone & set(before.holders(i))  # nobody else drops anything
        assert len(after.holders(i)) == min(replicas, len(peers) - len(gone))
        moved += len(gained)
    held = sum(len(before.shards_of(peer_id)) for peer_id in gone)
    if len(peers) - len(gone) >= replicas:
        assert moved == held
    assert {(m.shard_index, m.peer_id) for m in moves(before, after)} == oracle_moves(before, after)
    assert len(moves(before, after)) == moved


@settings(max_examples=60)
@given(st.lists(weights, min_size=2, max_size=8), st.integers(1, 4), st.data())
def test_without_domains_a_leave_promotes_the_next(
    given: list[int], replicas: int, data: st.DataObject
) -> None:
    peers, shards = peers_of(given), digests(30)
    gone = data.draw(st.sampled_from(peers)).peer_id
    before = placement(shards, peers, replicas)
    after = before.with_peers(without(peers, {gone}))
    for i in range(len(shards)):
        # so a new primary is the old second choice
        assert after.rank(i) == tuple(peer_id for peer_id in before.rank(i) if peer_id != gone)
    if replicas < len(peers):
        assert tuple(m.shard_index for m in moves(before, after)) == before.shards_of(gone)


@settings(max_examples=60)
@given(some_peers(least=2), replicas_wanted, st.data())
def test_with_domains_the_second_choice_of_another_domain_becomes_primary(
    peers: list[StoringPeer], replicas: int, data: st.DataObject
) -> None:
    """Or the next of the lost peer's own domain, whoever bids less: nobody further back."""
    shards = digests(30)
    before = placement(shards, peers, replicas)
    flat = placement(shards, [replace(peer, domain="") for peer in peers], replicas)
    gone = data.draw(st.sampled_from(peers)).peer_id
    after = before.with_peers(without(peers, {gone}))
    for i in range(len(shards)):
        if before.holders(i)[0] == gone:
            assert after.holders(i)[0] == flat.rank(i)[1]
        elif len(peers) > 1:
            assert after.holders(i)[0] == before.holders(i)[0] == flat.rank(i)[0]


@settings(max_examples=60)
@given(some_peers(), replicas_wanted, weights, domain_names)
def test_a_join_moves_shards_only_to_the_newcomer(
    peers: list[StoringPeer], replicas: int, weight: int, domain: str
) -> None:
    shards = digests(30)
    newcomer = StoringPeer(peer_id="peer-0005x", weight=weight, domain=domain)
    before = placement(shards, peers, replicas)
    after = before.with_peers([*peers, newcomer])
    moved = moves(before, after)
    assert {m.peer_id for m in moved} <= {newcomer.peer_id}
    assert tuple(m.shard_index for m in moved) == after.shards_of(newcomer.peer_id)
    for i in range(len(shards)):
        assert len(gained_and_lost(before, after, i)[1]) <= 1


@settings(max_examples=60)
@given(some_peers(least=2), replicas_wanted, weights, st.data())
def test_a_weight_change_gives_to_or_takes_from_that_peer_only(
    peers: list[StoringPeer], replicas: int, weight: int, data: st.DataObject
) -> None:
    shards = digests(30)
    one = data.draw(st.sampled_from(peers))
    before = placement(shards, peers, replicas)
    after = before.with_peers([*without(peers, {one.peer_id}), replace(one, weight=weight)])
    for i in range(len(shards)):
        gained, lost = gained_and_lost(before, after, i)
        assert len(gained) == len(lost) <= 1
        assert gained <= {one.peer_id} if weight >= one.weight else lost <= {one.peer_id}


@settings(max_examples=60)
@given(some_peers(least=2), replicas_wanted, domain_names, st.data())
def test_a_domain_change_moves_only_shards_that_the_peer_has_or_gets(
    peers: list[StoringPeer], replicas: int, domain: str, data: st.DataObject
) -> None:
    """A leave and a join at worst: two copies of a shard."""
    shards = digests(30)
    one = data.draw(st.sampled_from(peers))
    before = placement(shards, peers, replicas)
    after = before.with_peers([*without(peers, {one.peer_id}), replace(one, domain=domain)])
    for i in range(len(shards)):
        gained, lost = gained_and_lost(before, after, i)
        assert len(gained) == len(lost) <= 2
        if one.peer_id not in before.holders(i) and one.peer_id not in after.holders(i):
            assert not gained


# -- how much a change moves: the closed forms -------------------------------------------------------------------------


def within(count: int, trials: int, probability: float) -> bool:
    """4.5 standard deviations of the binomial: shards are placed independently of each other."""
    return abs(count - trials * probability) < 4.5 * math.sqrt(trials * probability * (1 - probability))


@pytest.mark.parametrize("domains", [1, 2, 3, 5, 10], ids="{} peers a domain".format)
def test_a_leave_touches_and_a_join_takes_the_share_of_one_peer(domains: int) -> None:
    """R/N of the shards, R/(N+1) of them to a newcomer; domains of equal size and weight do not change that."""
    n, r, s = 30, 3, 4000
    names = [f"d{i % (n // domains)}" for i in range(n)] if domains > 1 else []
    peers, shards = peers_of([1] * n, names), digests(s)
    before = placement(shards, peers, r)
    assert within(len(moves(before, before.with_peers(peers[1:]))), s, r / n)
    if domains == 1:
        newcomer = StoringPeer(peer_id="new")
        assert within(len(moves(before, before.with_peers([*peers, newcomer]))), s, r / (n + 1))


def test_a_dead_peers_shards_spread_over_all_survivors() -> None:
    shards, peers = digests(3000), peers_of([1] * 20)
    before = placement(shards, peers, 2)
    after = before.with_peers(peers[1:])
    assert {move.peer_id for move in moves(before, after)} == {f"peer-{i:03d}" for i in range(1, 20)}


def test_a_dead_domains_shards_spread_over_all_survivors() -> None:
    shards, peers = digests(3000), peers_of([1] * 20, [f"d{i % 5}" for i in range(20)])
    before = placement(shards, peers, 2)
    after = before.with_peers([peer for peer in peers if peer.domain != "d0"])
    assert {move.peer_id for move in moves(before, after)} == {p.peer_id for p in after.peers}
