"""Weighted HRW placement with failure domains: golden vectors, a brute-force oracle, edges."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core import hrw, ranking
from p2p_dmc.core.placement import Move, StoringPeer, moves, placement
from p2p_dmc.core.ranking import Field
from tests.core.placement_oracle import (
    MASK,
    digests,
    oracle_moves,
    oracle_rank,
    oracle_score,
    peers_of,
)

GOLDEN = Path(__file__).with_name("placement_golden.json")
WEIGHTS = [1, 1, 1, 2, 3, 7, 100, 1 << 24]
DOMAINS = ["", "", "a", "a", "b", "c"]
one_peer = st.tuples(st.sampled_from(WEIGHTS), st.sampled_from(DOMAINS))


def test_golden_vectors() -> None:
    """The same file on every machine and version: a change here is a change of protocol."""
    golden = json.loads(GOLDEN.read_text())
    shards = [bytes.fromhex(text) for text in golden["shards"]]
    names = [name for name, _ in golden["peers"]]
    assert [
        [hrw.shard_key(digest), *(oracle_score(digest, name) for name in names)] for digest in shards
    ] == golden["keys_and_scores"]
    for one in golden["placements"]:
        peers = [
            StoringPeer(peer_id=name, weight=weight, domain=domain)
            for (name, weight), domain in zip(golden["peers"], one["domains"], strict=True)
        ]
        result = placement(shards, peers, golden["replicas"])
        assert [list(result.rank(i)) for i in range(len(result))] == one["ranks"]
        assert [list(result.holders(i)) for i in range(len(result))] == [
            rank[: golden["replicas"]] for rank in one["ranks"]
        ]
        assert result.digest().hex() == one["digest"]


# -- against the oracle -------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.lists(one_peer, max_size=9), st.integers(1, 12), st.integers(0, 1000))
def test_holders_and_rank_equal_the_oracle(given: list[tuple[int, str]], replicas: int, salt: int) -> None:
    peers, shards = peers_of([w for w, _ in given], [d for _, d in given]), digests(7, salt)
    result = placement(shards, peers[::-1], replicas)
    for i, digest in enumerate(shards):
        expected = tuple(oracle_rank(digest, peers))
        assert result.rank(i) == expected
        assert result.holders(i) == expected[:replicas]
    for peer in peers:
        assert result.shards_of(peer.peer_id) == tuple(
            i for i in range(len(shards)) if peer.peer_id in result.holders(i)
        )


def test_many_peers_equal_the_oracle() -> None:
    """Enough of them for the guess of what the first ranks cost to matter."""
    domains = [f"d{i % 11}" if i % 3 else "" for i in range(40)]
    for peers in (
        peers_of([1] * 40),
        peers_of([1 + i % 5 for i in range(40)]),
        peers_of([1 + i for i in range(40)], domains),
    ):
        shards = digests(300, len(domains))
        result = placement(shards, peers, 3)
        for i, digest in enumerate(shards):
            assert list(result.holders(i)) == oracle_rank(digest, peers)[:3]


@pytest.mark.parametrize("factor", [0.0, 0.001, 0.05, 0.3, 1.0, 1e9])
def test_a_wrong_guess_of_what_holders_cost_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    peers, shards = peers_of([1, 2, 3, 4, 5, 6, 7, 8], ["a", "a", "b"]), digests(200)
    right, guess = placement(shards, peers, 2).digest(), Field(peers).likely_cost(2)
    assert 0 < guess < hrw.NO_COST
    monkeypatch.setattr(Field, "likely_cost", lambda field, ranks: min(hrw.NO_COST, int(guess * factor)))
    assert placement(shards, peers, 2).digest() == right


@pytest.fixture
def chosen_scores(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Peer to score, the same for every shard; fill it in."""
    table: dict[str, int] = {}

    def scores(keys: hrw.U64, keys_of_peers: hrw.U64 | np.uint64) -> hrw.U64:
        of = {hrw.peer_key(peer_id): score for peer_id, score in table.items()}
        found = [of[int(key)] for key in np.atleast_1d(keys_of_peers)]
        return np.array(found * (len(keys) if np.ndim(keys) else 1), dtype=np.uint64)

    monkeypatch.setattr(hrw, "scores", scores)
    yield table


@pytest.mark.parametrize("domains", [[], ["a", "b", "a", "b"]])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_ties_go_to_the_larger_score_then_to_the_smaller_peer_id(
    chosen_scores: dict[str, int], domains: list[str], replicas: int
) -> None:
    # Adjacent scores of different, very large weights: their costs all round to zero.
    peers = peers_of([2**24, 2**24 - 1, 2**24 - 2, 2**24 - 3], domains)
    chosen_scores.update(zip([p.peer_id for p in peers], [MASK - 4, MASK, MASK, MASK - 2], strict=True))
    flat = ["peer-001", "peer-002", "peer-003", "peer-000"]
    expected = flat  # the first two are of different domains
    for order in (peers, peers[::-1], peers[1:] + peers[:1]):
        grown = placement(digests(2), order[:1], replicas)
        for count in (2, 3, 4):
            grown = grown.with_peers(order[:count])
        for result in (placement(digests(2), order, replicas), grown):
            assert list(result.rank(0)) == expected
            assert list(result.holders(0)) == list(result.holders(1)) == expected[:replicas]


def test_equal_scores_of_equal_weights(chosen_scores: dict[str, int]) -> None:
    peers = peers_of([1, 1, 1])
    chosen_scores.update({"peer-000": 5, "peer-001": 9, "peer-002": 9})
    assert placement(digests(1), peers, 3).holders(0) == ("peer-001", "peer-002", "peer-000")
    assert placement(digests(1), peers[::-1], 1).holders(0) == ("peer-001",)


# -- what does not matter -----------------------------------------------------------------------------------


@pytest.mark.parametrize("domains", [[], ["a", "a", "b", "b", "a"]])
def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch, domains: list[str]) -> None:
    peers, shards = peers_of([1, 2, 3, 4, 5], domains), digests(101)
    whole = placement(shards, peers, 3)
    monkeypatch.setattr(ranking, "_ROWS_PER_BLOCK", 7)
    assert placement(shards, peers, 3).digest() == whole.digest()
    assert placement(shards, peers[1:], 3).with_peers(peers).digest() == whole.digest()


@given(st.permutations(peers_of([1, 5, 2, 2, 9], ["", "a", "a"])))
def test_order_of_arrival_does_not_matter(peers: list[StoringPeer]) -> None:
    by_id = sorted(peers, key=lambda peer: peer.peer_id)
    assert placement(digests(20), peers, 2).digest() == placement(digests(20), by_id, 2).digest()


def test_equal_weights_of_any_size_give_the_same_order() -> None:
    shards = digests(500)
    ones, many = placement(shards, peers_of([1] * 7), 3), placement(shards, peers_of([1000] * 7), 3)
    assert [ones.rank(i) for i in range(500)] == [many.rank(i) for i in range(500)]


def test_shard_order_does_not_matter_for_holders() -> None:
    shards, peers = digests(40), peers_of([1, 2, 3, 4], ["a", "b", "a", "b"])
    forwards, backwards = placement(shards, peers, 2), placement(shards[::-1], peers, 2)
    assert [forwards.holders(i) for i in range(40)] == [backwards.holders(39 - i) for i in range(40)]


def test_names_of_domains_do_not_matter_for_holders() -> None:
    shards, weights = digests(40), [1, 2, 3, 4, 5]
    one = placement(shards, peers_of(weights, ["a", "b", "a", "", "b"]), 3)
    two = placement(shards, peers_of(weights, ["z", "größer", "z", "only", "größer"]), 3)
    assert [one.rank(i) for i in range(40)] == [two.rank(i) for i in range(40)]


def test_a_peer_without_a_domain_shares_none() -> None:
    """Least of all with others that have none."""
    shards = digests(40)
    nameless = placement(shards, peers_of([1, 2, 3, 4, 5]), 3)
    apart = placement(shards, peers_of([1, 2, 3, 4, 5], list("abcde")), 3)
    assert [nameless.rank(i) for i in range(40)] == [apart.rank(i) for i in range(40)]


# -- edges --------------------------------------------------------------------------------------------------


def test_nothing_to_place_and_nobody_to_hold() -> None:
    nobody = placement(digests(3), [], 2)
    assert nobody.holders(1) == nobody.rank(1) == () and nobody.shards_of("peer-000") == ()
    nothing = placement([], peers_of([1, 2], ["a", "a"]), 2)
    assert len(nothing) == 0 and nothing.shards_of("peer-000") == ()
    assert nothing.with_peers(peers_of([1])).with_peers([]).digest() == placement([], [], 2).digest()
    assert nobody.digest() != nothing.digest()
    alone = placement(digests(3), peers_of([4]), 3)
    assert all(alone.holders(i) == ("peer-000",) for i in range(3))
    assert moves(nobody, nobody) == moves(nothing, nothing) == ()


def test_digest_tells_different_inputs_apart() -> None:
    shards, peers = digests(10), peers_of([1, 1, 1])
    seen = {
        placement(shards, peers, 2).digest(),
        placement(shards, peers, 3).digest(),
        placement(shards[1:], peers, 2).digest(),
        placement(shards, peers[1:], 2).digest(),
        placement(shards, peers_of([2, 2, 2]), 2).digest(),
        placement(shards, peers_of([1, 1, 1], ["a", "b", "c"]), 2).digest(),
        placement(shards, peers_of([1, 1, 1], ["a", "b", "d"]), 2).digest(),
    }
    assert len(seen) == 7


def test_moves_between_overlapping_sets_equal_the_oracle() -> None:
    shards = digests(200)
    before = placement(shards, peers_of([1, 2, 3, 4, 5]), 3)
    after = placement(shards, [*peers_of([1, 2, 3, 4, 5])[2:], StoringPeer(peer_id="new", weight=6)], 3)
    moved = moves(before, after)
    assert {(m.shard_index, m.peer_id) for m in moved} == oracle_moves(before, after)
    assert list(moved) == sorted(
        moved, key=lambda m: (m.shard_index, after.holders(m.shard_index).index(m.peer_id))
    )
    empty = placement(shards, [], 3)
    assert moves(after, empty) == ()
    assert len(moves(empty, after)) == 600
    assert moves(empty, after)[0] == Move(shard_index=0, peer_id=after.holders(0)[0])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="listed twice"):
        placement(digests(1), [*peers_of([1]), *peers_of([2])], 1)
    with pytest.raises(ValueError, match="listed twice"):
        placement(digests(1), [], 1).with_peers([*peers_of([1]), *peers_of([1])])
    for weight in (0, -1, (1 << 24) + 1, 1.5):
        with pytest.raises(ValueError, match="weight"):
            StoringPeer(peer_id="a", weight=weight)  # type: ignore[arg-type]
    for replicas in (0, 256):
        with pytest.raises(ValueError, match="replicas"):
            placement(digests(1), peers_of([1]), replicas)
    with pytest.raises(ValueError, match="15 bytes"):
        placement([bytes(15)], peers_of([1]), 1)
    with pytest.raises(ValueError, match="different shards"):
        moves(placement(digests(2), [], 1), placement(digests(3), [], 1))
    with pytest.raises(IndexError):
        placement(digests(2), peers_of([1]), 1).holders(2)
