"""Weighted rendezvous hashing: keys, the logarithm in integers, and the sieve."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from pytest import approx, raises

from p2p_dmc.core import hrw
from tests.core.placement_oracle import MASK, digests, oracle_log, oracle_score

weights = st.sampled_from([1, 2, 3, 7, 100, 12345, 1 << 24])


def test_splitmix64_matches_the_published_first_output() -> None:
    assert hrw.splitmix64(1234567) == 6457827717110365317


def test_array_and_integer_mixing_agree() -> None:
    values = [0, 1, MASK, *(hrw.splitmix64(i) for i in range(200))]
    assert hrw._mix64_array(np.array(values, dtype=np.uint64)).tolist() == [hrw._mix64(v) for v in values]
    some = digests(50)
    assert hrw.shard_keys(some).tolist() == [hrw.shard_key(digest) for digest in some]
    with raises(ValueError, match="15 bytes"):
        hrw.shard_keys([bytes(16), bytes(15)])


def test_scores_and_costs_of_a_row_and_of_a_column_are_the_same() -> None:
    shards, names, rates = digests(20), [f"p{i}" for i in range(7)], [1, 2, 3, 4, 5, 6, 1 << 24]
    keys = hrw.shard_keys(shards)
    peers = np.array([hrw.peer_key(name) for name in names], dtype=np.uint64)
    each = np.array(rates, dtype=np.uint64)
    for i, digest in enumerate(shards):
        row = hrw.scores(keys[i], peers)
        assert row.tolist() == [oracle_score(digest, name) for name in names]
        assert hrw.costs(row, each).tolist() == [
            (oracle_log(score) << 13) // rate for score, rate in zip(row.tolist(), rates, strict=True)
        ]
    for j, name in enumerate(names):
        column = hrw.scores(keys, peers[j])
        assert column.tolist() == [oracle_score(digest, name) for digest in shards]
        assert hrw.costs(column, each[j]).tolist() == [
            (oracle_log(score) << 13) // rates[j] for score in column.tolist()
        ]


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
    assert got / 2**44 == approx(64 - math.log2(x), rel=2e-4, abs=1e-9)


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


# -- the sieve ----------------------------------------------------------------------------------------------


def least_score(cost: int, weight: int) -> int:
    return int(hrw.least_scores(np.array([cost], dtype=np.uint64), np.uint64(weight))[0])


def cost_of(score: int, weight: int) -> int:
    return int(hrw.costs(np.array([score], dtype=np.uint64), np.uint64(weight))[0])


scores = st.one_of(
    st.integers(0, MASK >> 1).map(lambda half: 2 * half + 1),
    st.integers(0, 63)
    .flatmap(lambda bits: st.integers(0, (1 << bits) - 1))
    .map(lambda far: (MASK - far) | 1),
)


@given(scores, weights, st.integers(0, 1 << 40))
def test_the_sieve_stops_nobody_who_costs_as_little(score: int, weight: int, more: int) -> None:
    cost = cost_of(score, weight)
    assert least_score(cost, weight) <= score
    assert least_score(min(hrw.NO_COST - 1, cost + more), weight) <= score


def test_the_sieve_stops_nobody_at_the_edges_of_the_table_cells() -> None:
    edges = [(1 << 63) + (i << 51) for i in range(4096)]
    around = np.array(
        sorted({(edge + d) | 1 for edge in edges for d in (-2, 0, 2)} | {MASK}), dtype=np.uint64
    )
    for weight in (np.uint64(1), np.uint64(3), np.uint64(1 << 24)):
        assert (hrw.least_scores(hrw.costs(around, weight), weight) <= around).all()


@given(st.integers(0, 1 << 60), weights)
def test_the_sieve_stops_most_of_the_others(far: int, weight: int) -> None:
    """For scores in the upper sixteenth, where those that matter are: not a word about the work otherwise."""
    score = (MASK - far) | 1
    assert MASK - least_score(cost_of(score, weight), weight) <= 1.04 * far + 2**22 + 2**8 * weight


def test_the_sieve_lets_everybody_into_a_free_place() -> None:
    assert [least_score(hrw.NO_COST, weight) for weight in (1, 1 << 24)] == [0, 0]
    assert least_score(1 << 63, 1) == 0
