"""Weighted HRW placement: golden vectors, a brute-force oracle, and what may move when peers change."""

from __future__ import annotations

import json
import math
from decimal import Decimal, getcontext
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.core import placement as hrw
from p2p_dmc.core.placement import Move, Placement, StoringPeer, moves, placement, splitmix64

GOLDEN = Path(__file__).with_name("placement_golden.json")
MASK = (1 << 64) - 1


def digests(count: int, salt: int = 0) -> list[bytes]:
    """Distinct 16-byte shard digests without any hash under test."""
    return [splitmix64(2 * i + salt).to_bytes(8, "big") + i.to_bytes(8, "big") for i in range(count)]


def peers_of(weights: list[int]) -> list[StoringPeer]:
    return [StoringPeer(peer_id=f"peer-{i:03d}", weight=weight) for i, weight in enumerate(weights)]


# -- the dumb oracle: one pair at a time, Python integers only ---------------------------------------------


def oracle_score(digest: bytes, peer_id: str) -> int:
    key = hrw.shard_key(digest)
    value = (key + hrw.peer_key(peer_id)) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return (value ^ (value >> 31)) | 1


def oracle_log(x: int) -> int:
    """-log2(x / 2**64) * 2**44 by the table, from the definition of its cells."""
    table = [int(entry) for entry in hrw._log_table()]
    shift = 64 - x.bit_length()
    mantissa = x << shift
    index, rest = divmod(mantissa - (1 << 63), 1 << 51)
    fraction = rest >> 20
    return (shift << 44) + table[index] - (((table[index] - table[index + 1]) * fraction) >> 31)


def oracle_rank(digest: bytes, peers: list[StoringPeer]) -> list[str]:
    def order(peer: StoringPeer) -> tuple[int, int, str]:
        score = oracle_score(digest, peer.peer_id)
        return (oracle_log(score) << 13) // peer.weight, -score, peer.peer_id

    return [peer.peer_id for peer in sorted(peers, key=order)]


# -- anchors ------------------------------------------------------------------------------------------------


def test_splitmix64_matches_the_published_first_output() -> None:
    assert splitmix64(1234567) == 6457827717110365317


def test_array_and_integer_mixing_agree() -> None:
    values = [0, 1, MASK, *(splitmix64(i) for i in range(200))]
    assert hrw._mix64_array(np.array(values, dtype=np.uint64)).tolist() == [hrw._mix64(v) for v in values]
    some = digests(50)
    assert hrw._shard_keys(some).tolist() == [hrw.shard_key(digest) for digest in some]


def test_golden_vectors() -> None:
    """The same file on every machine and version: a change here is a change of protocol."""
    golden = json.loads(GOLDEN.read_text())
    peers = [StoringPeer(peer_id=name, weight=weight) for name, weight in golden["peers"]]
    result = placement([bytes.fromhex(text) for text in golden["shards"]], peers, golden["replicas"])
    assert [list(result.rank(i)) for i in range(len(result))] == golden["ranks"]
    assert result.digest().hex() == golden["digest"]
    assert [
        [hrw.shard_key(d), *(oracle_score(d, p.peer_id) for p in peers)] for d in result.shard_digests
    ] == golden["keys_and_scores"]


# -- the logarithm ------------------------------------------------------------------------------------------


def test_log_table_is_exact() -> None:
    getcontext().prec = 50
    ln2 = Decimal(2).ln()
    table = hrw._log_table().tolist()
    for i in [0, 1, 2, 3, 1000, 2047, 2048, 4000, 4094, 4095, 4096]:
        exact = (1 - (1 + Decimal(i) / 4096).ln() / ln2) * 2**44
        assert abs(Decimal(table[i]) - exact) <= Decimal("0.5001")


@given(st.integers(1, MASK))
def test_log_matches_the_oracle_and_the_real_logarithm(x: int) -> None:
    got = int(hrw._minus_log2(np.array([x], dtype=np.uint64))[0])
    assert got == oracle_log(x)
    exact = 64 - math.log2(x)
    assert got / 2**44 == pytest.approx(exact, rel=2e-4, abs=1e-9)


@given(st.integers(1, MASK - 1), st.integers(0, 63))
def test_log_never_rises(x: int, step_bits: int) -> None:
    larger = min(MASK, x + (1 << step_bits))
    low, high = hrw._minus_log2(np.array([x, larger], dtype=np.uint64)).tolist()
    assert low >= high


def test_log_never_rises_across_the_edges_of_its_cells() -> None:
    edges = [1 << bit for bit in range(64)] + [(1 << 63) + (i << 51) for i in range(4096)]
    around = sorted({min(MASK, max(1, edge + d)) for edge in edges for d in (-1, 0, 1)} | {MASK})
    values = hrw._minus_log2(np.array(around, dtype=np.uint64)).tolist()
    assert all(a >= b for a, b in pairwise(values))
    assert values[0] == 64 << 44 and values[-1] >= 0


# -- against the oracle -------------------------------------------------------------------------------------

weights_lists = st.lists(st.sampled_from([1, 1, 1, 2, 3, 7, 100, 1 << 24]), min_size=0, max_size=9)


@settings(max_examples=60)
@given(weights_lists, st.integers(1, 12), st.integers(0, 1000))
def test_holders_and_rank_equal_the_oracle(weights: list[int], replicas: int, salt: int) -> None:
    peers, shards = peers_of(weights), digests(7, salt)
    result = placement(shards, peers[::-1], replicas)
    for i, digest in enumerate(shards):
        expected = tuple(oracle_rank(digest, peers))
        assert result.rank(i) == expected
        assert result.holders(i) == expected[:replicas]
    for peer in peers:
        assert result.shards_of(peer.peer_id) == tuple(
            i for i in range(len(shards)) if peer.peer_id in result.holders(i)
        )


def test_ties_go_to_the_larger_score_then_to_the_smaller_peer_id() -> None:
    scores = np.array([[5, 9, 9], [9, 9, 5]], dtype=np.uint64)
    equal = np.ones(3, dtype=np.uint64)
    assert hrw._best(scores.copy(), equal, 3).tolist() == [[1, 2, 0], [0, 1, 2]]
    # Adjacent scores of different, very large weights: their costs all round to zero.
    top = np.array([[MASK - 4, MASK, MASK - 2]], dtype=np.uint64)
    assert hrw._best(top, np.array([2**24, 2**24 - 1, 2**24 - 2], dtype=np.uint64), 3).tolist() == [[1, 2, 0]]


def test_rank_breaks_ties_as_holders_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def top_scores(shard_keys: hrw.U64, peer_keys: hrw.U64) -> hrw.U64:
        return np.array([[MASK - 4, MASK, MASK, MASK - 2]] * len(shard_keys), dtype=np.uint64)

    monkeypatch.setattr(hrw, "_scores", top_scores)
    result = placement(digests(1), peers_of([2**24, 2**24 - 1, 2**24 - 2, 2**24 - 3]), 4)
    assert result.rank(0) == result.holders(0) == ("peer-001", "peer-002", "peer-003", "peer-000")


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    peers, shards = peers_of([1, 2, 3, 4, 5]), digests(101)
    whole = placement(shards, peers, 3)
    monkeypatch.setattr(hrw, "_CELLS_PER_BLOCK", 35)
    assert placement(shards, peers, 3).digest() == whole.digest()


@given(st.permutations(peers_of([1, 5, 2, 2, 9])))
def test_order_of_arrival_does_not_matter(peers: list[StoringPeer]) -> None:
    assert (
        placement(digests(20), peers, 2).digest() == placement(digests(20), sorted_by_id(peers), 2).digest()
    )


def sorted_by_id(peers: list[StoringPeer]) -> list[StoringPeer]:
    return sorted(peers, key=lambda peer: peer.peer_id)


def test_equal_weights_of_any_size_give_the_same_order() -> None:
    shards = digests(500)
    ones, many = placement(shards, peers_of([1] * 7), 3), placement(shards, peers_of([1000] * 7), 3)
    assert [ones.rank(i) for i in range(500)] == [many.rank(i) for i in range(500)]


def test_shard_order_does_not_matter_for_holders() -> None:
    shards, peers = digests(40), peers_of([1, 2, 3, 4])
    forwards, backwards = placement(shards, peers, 2), placement(shards[::-1], peers, 2)
    assert [forwards.holders(i) for i in range(40)] == [backwards.holders(39 - i) for i in range(40)]


# -- what a change moves ------------------------------------------------------------------------------------


def oracle_moves(before: Placement, after: Placement) -> set[tuple[int, str]]:
    return {(i, p) for i in range(len(after)) for p in set(after.holders(i)) - set(before.holders(i))}


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(1, 4), st.data())
def test_a_leave_touches_exactly_its_shards(weights: list[int], replicas: int, data: st.DataObject) -> None:
    peers, shards = peers_of(weights), digests(30)
    gone = data.draw(st.sampled_from(peers))
    before = placement(shards, peers, replicas)
    after = placement(shards, [peer for peer in peers if peer != gone], replicas)
    for i in range(len(shards)):
        expected = tuple(peer_id for peer_id in before.rank(i) if peer_id != gone.peer_id)
        assert after.rank(i) == expected  # so a new primary is the old second choice
    moved = moves(before, after)
    assert {(m.shard_index, m.peer_id) for m in moved} == oracle_moves(before, after)
    if replicas < len(peers):
        assert tuple(m.shard_index for m in moved) == before.shards_of(gone.peer_id)
    else:
        assert moved == ()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 20))
def test_a_join_moves_shards_only_to_the_newcomer(weights: list[int], replicas: int, weight: int) -> None:
    peers, shards = peers_of(weights), digests(30)
    newcomer = StoringPeer(peer_id="peer-0005x", weight=weight)
    before, after = placement(shards, peers, replicas), placement(shards, [*peers, newcomer], replicas)
    moved = moves(before, after)
    assert {m.peer_id for m in moved} <= {newcomer.peer_id}
    assert tuple(m.shard_index for m in moved) == after.shards_of(newcomer.peer_id)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(1, 3), st.data())
def test_a_weight_change_moves_only_that_peers_shards(
    weights: list[int], replicas: int, data: st.DataObject
) -> None:
    shards = digests(30)
    which, weight = data.draw(st.integers(0, len(weights) - 1)), data.draw(st.integers(1, 40))
    changed = [*weights[:which], weight, *weights[which + 1 :]]
    name = f"peer-{which:03d}"
    before, after = (
        placement(shards, peers_of(weights), replicas),
        placement(shards, peers_of(changed), replicas),
    )
    for i in range(len(shards)):
        others = [p for p in before.rank(i) if p != name], [p for p in after.rank(i) if p != name]
        assert others[0] == others[1]
        gained = name in after.holders(i) and name not in before.holders(i)
        lost = name in before.holders(i) and name not in after.holders(i)
        assert not (gained and weight < weights[which]) and not (lost and weight > weights[which])


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


# -- balance, against the closed forms of rendezvous hashing -------------------------------------------------


def test_equal_weights_balance_within_the_closed_form() -> None:
    """Replica coefficient of variation sqrt((N-R)/(S*R)); the leave touches R/N of the shards."""
    n, r, s = 16, 3, 4096
    result = placement(digests(s), peers_of([1] * n), r)
    loads = np.array([len(result.shards_of(peer.peer_id)) for peer in result.peers])
    assert loads.sum() == s * r
    variation = math.sqrt((n - r) / (s * r))
    assert loads.std() / loads.mean() == pytest.approx(variation, rel=0.5)
    assert loads.max() / loads.mean() < 1 + 2 * variation * math.sqrt(2 * math.log(n))


def test_primaries_are_proportional_to_weight() -> None:
    weights, s = [1, 2, 3, 10, 16], 20_000
    result = placement(digests(s), peers_of(weights), 1)
    for peer in result.peers:
        share = Fraction(peer.weight, sum(weights))
        sigma = math.sqrt(s * share * (1 - share))
        assert abs(len(result.shards_of(peer.peer_id)) - float(s * share)) < 4.5 * sigma


def test_replicas_follow_the_exact_inclusion_probabilities() -> None:
    """Two replicas of weights 1, 1, 2, 4: successive sampling, not twice the weight's share."""
    s = 20_000
    result = placement(digests(s), peers_of([1, 1, 2, 4]), 2)
    shares = [len(result.shards_of(peer.peer_id)) / s for peer in result.peers]
    assert shares == pytest.approx([0.3095, 0.3095, 0.5714, 0.8095], abs=0.015)


def test_a_dead_peers_shards_spread_over_all_survivors() -> None:
    before = placement(digests(3000), peers_of([1] * 20), 2)
    after = placement(digests(3000), peers_of([1] * 20)[1:], 2)
    assert {move.peer_id for move in moves(before, after)} == {f"peer-{i:03d}" for i in range(1, 20)}


# -- edges --------------------------------------------------------------------------------------------------


def test_nothing_to_place_and_nobody_to_hold() -> None:
    nobody = placement(digests(3), [], 2)
    assert nobody.holders(1) == nobody.rank(1) == () and nobody.shards_of("peer-000") == ()
    nothing = placement([], peers_of([1, 2]), 2)
    assert len(nothing) == 0 and nothing.shards_of("peer-000") == ()
    assert nobody.digest() != nothing.digest()
    alone = placement(digests(3), peers_of([4]), 3)
    assert all(alone.holders(i) == ("peer-000",) for i in range(3))


def test_digest_tells_different_inputs_apart() -> None:
    shards, peers = digests(10), peers_of([1, 1, 1])
    seen = {
        placement(shards, peers, 2).digest(),
        placement(shards, peers, 3).digest(),
        placement(shards[1:], peers, 2).digest(),
        placement(shards, peers[1:], 2).digest(),
        placement(shards, peers_of([2, 2, 2]), 2).digest(),
    }
    assert len(seen) == 5


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="listed twice"):
        placement(digests(1), [*peers_of([1]), *peers_of([2])], 1)
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
