"""Placement the dumb way: one pair at a time, Python integers only."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from p2p_dmc.core import hrw
from p2p_dmc.core.placement import Placement, StoringPeer

MASK = (1 << 64) - 1


def digests(count: int, salt: int = 0) -> list[bytes]:
    """Distinct 16-byte shard digests without any hash under test."""
    return [hrw.splitmix64(2 * i + salt).to_bytes(8, "big") + i.to_bytes(8, "big") for i in range(count)]


def peers_of(weights: Sequence[int], domains: Sequence[str] = ()) -> list[StoringPeer]:
    """Peers peer-000, peer-001, ... with these weights, and these domains as far as they reach."""
    named = [*domains, *([""] * (len(weights) - len(domains)))]
    return [
        StoringPeer(peer_id=f"peer-{i:03d}", weight=weight, domain=named[i])
        for i, weight in enumerate(weights)
    ]


def oracle_score(digest: bytes, peer_id: str) -> int:
    value = (hrw.shard_key(digest) + hrw.peer_key(peer_id)) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return (value ^ (value >> 31)) | 1


@functools.cache
def log_table() -> list[int]:
    return [int(entry) for entry in hrw._log_table()]


def oracle_log(x: int) -> int:
    """-log2(x / 2**64) * 2**44 by the table, from the definition of its cells."""
    table = log_table()
    shift = 64 - x.bit_length()
    mantissa = x << shift
    index, rest = divmod(mantissa - (1 << 63), 1 << 51)
    fraction = rest >> 20
    return (shift << 44) + table[index] - (((table[index] - table[index + 1]) * fraction) >> 31)


def oracle_rank(digest: bytes, peers: Sequence[StoringPeer]) -> list[str]:
    """Walk down the flat order and take whoever brings a new domain; then the rest, in the flat order."""

    def order(peer: StoringPeer) -> tuple[int, int, str]:
        score = oracle_score(digest, peer.peer_id)
        return (oracle_log(score) << 13) // peer.weight, -score, peer.peer_id

    taken: list[StoringPeer] = []
    left: list[StoringPeer] = []
    for peer in sorted(peers, key=order):
        is_new = not peer.domain or peer.domain not in [other.domain for other in taken]
        (taken if is_new else left).append(peer)
    return [peer.peer_id for peer in taken + left]


def oracle_moves(before: Placement, after: Placement) -> set[tuple[int, str]]:
    return {(i, p) for i in range(len(after)) for p in set(after.holders(i)) - set(before.holders(i))}


def gained_and_lost(before: Placement, after: Placement, i: int) -> tuple[set[str], set[str]]:
    """Who is to hold shard i only now, and who only before."""
    then, now = set(before.holders(i)), set(after.holders(i))
    return now - then, then - now
