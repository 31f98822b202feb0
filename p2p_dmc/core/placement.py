"""Who should hold which shard: weighted rendezvous hashing (HRW) with replicas and failure domains.

Every peer computes the same answer from the same three facts (shard digests, storing peers with their weights and
domains, number of replicas), so nobody needs to be asked. `hrw` says what each peer bids for a shard; its holders are
the cheapest, except that a second peer of one domain is taken only when there are fewer domains than replicas. In one
line: the peers of a shard stand in the order ``(not the first of its domain, cost, -score, peer_id)``, and the first R
of them hold it.

A peer's cost depends on that peer alone, hence a change moves only what it must: of every shard that a lost peer held
exactly one copy is made anew, also when a whole domain is lost, and a newcomer's shards go to nobody else. And the
placement after a change follows from the one before it (`Placement.with_peers`): a joiner enters with its own scores,
and after a leave the shards that it held are ranked anew.

With two or more replicas a peer's share of the *copies* is not proportional to its weight (no peer can hold two copies
of one shard); its share of the *primaries* is (docs/placement.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from p2p_dmc.core import hrw
from p2p_dmc.core.hrw import DIGEST_BYTES, MAX_WEIGHT
from p2p_dmc.core.ranking import I32, Field, Ranking, StoringPeer, merged

__all__ = [
    "DIGEST_BYTES",
    "MAX_REPLICAS",
    "MAX_WEIGHT",
    "Move",
    "Placement",
    "StoringPeer",
    "moves",
    "placement",
]

MAX_REPLICAS = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """``peer_id`` should hold shard ``shard_index`` now and did not before."""

    shard_index: int
    peer_id: str


class _Shards:
    """What is placed: the same object in every placement of the same shards."""

    __slots__ = ("_hashed", "digests", "keys")

    def __init__(self, digests: Sequence[bytes]) -> None:
        self.digests = tuple(digests)
        self.keys = hrw.shard_keys(self.digests)
        self._hashed: hashlib.blake2b | None = None

    def hashed(self) -> hashlib.blake2b:
        """A digest that has taken in the shards, to go on with."""
        if self._hashed is None:
            self._hashed = hashlib.blake2b(digest_size=16, person=b"dmc-placement")
            self._hashed.update(f"{len(self.digests)}\n".encode())
            self._hashed.update(b"".join(self.digests))
        return self._hashed.copy()


class Placement:
    """For each shard the peers that should hold it. Immutable; `placement` and `with_peers` make it.

    Invariant: a pure function of (shard digests, storing peers, replicas), the same bits on every machine and by every
    way to it.
    """

    __slots__ = ("_best", "_digest", "_flat", "_shards", "_spread", "peers", "replicas")

    def __init__(self, shards: _Shards, replicas: int, spread: Ranking, flat: Ranking | None) -> None:
        self.peers = spread.field.peers
        self.replicas = replicas
        self._shards = shards
        self._spread = spread
        self._flat = flat  # without regard to domains, where there are fewer than replicas
        self._best: I32 = spread.columns if flat is None else merged(spread.columns, flat.columns)
        self._digest = b""

    def with_peers(self, peers: Sequence[StoringPeer]) -> Placement:
        """The placement of the same shards on these peers, in any order: what `placement` computes, sooner.

        It takes a pass over the shards for each peer that is new or has another weight or domain, and a ranking of the
        shards that such a one, or one that has gone, was to hold. ValueError for a peer listed twice.
        """
        peers = sorted(peers, key=lambda peer: peer.peer_id)
        for one, other in pairwise(peers):
            if one.peer_id == other.peer_id:
                raise ValueError(f"peer {one.peer_id!r} is listed twice")
        if tuple(peers) == self.peers:
            return self
        keys, field, flat = self._shards.keys, Field(peers), None
        holders = min(self.replicas, len(peers))
        spread = self._spread.changed(keys, field, min(holders, field.domains))
        if field.domains < holders:
            plain = self._flat or _nobody(self._shards)
            flat = plain.changed(keys, Field(peers, with_domains=False), holders)
        return Placement(self._shards, self.replicas, spread, flat)

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._shards.digests)

    @property
    def shard_digests(self) -> tuple[bytes, ...]:
        return self._shards.digests

    def holders(self, shard_index: int) -> tuple[str, ...]:
        """The peers that should hold the shard, primary first: R of them, or all when there are fewer."""
        return tuple(self.peers[column].peer_id for column in self._best[:, shard_index].tolist())

    def rank(self, shard_index: int) -> tuple[str, ...]:
        """All storing peers, the holders first: whom to ask for the shard, first to last. One row's work."""
        field = self._spread.field
        scores = hrw.scores(self._shards.keys[shard_index], field.keys)
        bids = zip(
            hrw.costs(scores, field.weights).tolist(), (-score for score in scores.tolist()), strict=True
        )
        firsts: list[int] = []
        repeats: list[int] = []
        seen: set[int] = set()
        for column in [column for _, column in sorted(zip(bids, range(len(scores)), strict=True))]:
            domain = int(field.domain_of[column])
            (repeats if domain in seen else firsts).append(column)
            seen.add(domain)
        return tuple(self.peers[column].peer_id for column in firsts + repeats)

    def shards_of(self, peer_id: str) -> tuple[int, ...]:
        """Indexes of the shards that the peer should hold, ascending; none for a peer that does not store."""
        return tuple(np.flatnonzero(self.ranks_of(peer_id) >= 0).tolist())

    def columns(self) -> I32:
        """Of shape (ranks, shards): the holders, each by its place among ``peers``. Not to be written to."""
        return self._best

    def ranks_of(self, peer_id: str) -> I32:
        """Of shape (shards,): the peer's place among the shard's holders, 0 for its primary; -1 where it is not one."""
        for column, peer in enumerate(self.peers):
            if peer.peer_id == peer_id:
                is_it = self._best == column
                return np.where(is_it.any(axis=0), is_it.argmax(axis=0), -1).astype(np.int32)
        return np.full(len(self), -1, dtype=np.int32)

    def digest(self) -> bytes:
        """16 bytes that two peers compare to know that they mean the same placement."""
        if not self._digest:
            state = self._shards.hashed()
            state.update(f"{self.replicas} {len(self.peers)}\n".encode())
            for peer in self.peers:
                for text in (peer.peer_id, str(peer.weight), peer.domain):
                    state.update(f"{len(text.encode())} {text}\n".encode())
            state.update(np.ascontiguousarray(self._best, dtype="<i4").tobytes())
            self._digest = state.digest()
        return self._digest

    def _columns_in(self, other: Placement) -> I32:
        """This placement's holders as columns of ``other``; -1 for a peer that other does not have."""
        column_of = {peer.peer_id: column for column, peer in enumerate(other.peers)}
        translate = np.array([column_of.get(peer.peer_id, -1) for peer in self.peers], dtype=np.int32)
        return translate[self._best] if len(self.peers) else self._best


def placement(shard_digests: Sequence[bytes], peers: Sequence[StoringPeer], replicas: int) -> Placement:
    """Place every shard on its ``replicas`` best peers.

    ``shard_digests``: 16-byte content digests, in the manifest's order. ``peers`` in any order. Raises
    ValueError for a peer listed twice, a weight or a number of replicas out of bounds, a malformed digest.
    """
    if not isinstance(replicas, int) or not 1 <= replicas <= MAX_REPLICAS:
        raise ValueError(f"replicas {replicas!r} is not in 1..{MAX_REPLICAS}")
    shards = _Shards(shard_digests)
    return Placement(shards, replicas, _nobody(shards), None).with_peers(peers)


def _nobody(shards: _Shards) -> Ranking:
    return Ranking.empty(Field(()), 0, len(shards.digests))


def moves(before: Placement, after: Placement) -> tuple[Move, ...]:
    """What has to be fetched to get from one placement to the other, by shard, then by rank.

    Raises ValueError when the two are not about the same shards.
    """
    if before.shard_digests != after.shard_digests:
        raise ValueError("moves between placements of different shards")
    return tuple(_moves(before, after))


def _moves(before: Placement, after: Placement) -> Iterator[Move]:
    translated = after._columns_in(before)
    had = (translated[:, None, :] == before._best[None, :, :]).any(axis=1)
    for shard_index, rank in np.argwhere(~had.T).tolist():
        column = int(after._best[rank, shard_index])
        yield Move(shard_index=shard_index, peer_id=after.peers[column].peer_id)
