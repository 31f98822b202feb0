"""Who should hold which shard: weighted rendezvous hashing (HRW) with replicas.

Every peer computes the same answer from the same three facts (shard digests, storing peers with their
weights, number of replicas), so nobody needs to be asked. For each pair a 64-bit score ``x`` is drawn by
hashing; read as ``u = x / 2**64`` it gives the cost ``-log2(u) / weight``, an exponential draw whose rate is
the weight, so the cheapest peer of a shard is peer i with probability ``w_i / W`` (Schindelhauer and
Schomaker 2005, "Weighted distributed hash tables"; Ceph's CRUSH straw2 is the same draw). A peer's cost
depends on that peer alone, hence a change moves only what it must.

All arithmetic is on integers: the C library's logarithm may differ in its last bit between machines, and
one bit is enough for two peers to disagree. The order of a shard's peers is ``(cost, -x, peer_id)``; the
cost never rises with ``x``, so for equal weights this is the order of the scores alone.

With two or more replicas a peer's share of the *copies* is not proportional to its weight (no peer can hold
two copies of one shard); its share of the *primaries* is.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

DIGEST_BYTES = 16
MAX_WEIGHT = 1 << 24
MAX_REPLICAS = 255

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment, an odd constant: multiplying by it loses nothing
_CELLS_PER_BLOCK = 1 << 20  # rows are taken in blocks of about 8 MiB per temporary array

# The logarithm's fixed point. The product (table difference) x (fraction) must stay below 2**64:
# a difference is below 2**(44 - 11.4), so 31 bits of fraction fit.
_LOG_BITS = 44
_TABLE_BITS = 12
_FRACTION_BITS = 31
_COST_SHIFT = 13  # -log2(u) is at most 64, that is 2**50 in fixed point: 13 more bits before dividing


@dataclass(frozen=True, slots=True, kw_only=True)
class StoringPeer:
    """A peer that stores shards; ``weight`` is its capacity in any unit all peers share, such as GiB."""

    peer_id: str
    weight: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.weight, int) or not 1 <= self.weight <= MAX_WEIGHT:
            raise ValueError(f"weight {self.weight!r} of peer {self.peer_id!r} is not in 1..{MAX_WEIGHT}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """``peer_id`` should hold shard ``shard_index`` now and did not before."""

    shard_index: int
    peer_id: str


def splitmix64(state: int) -> int:
    """First output of splitmix64 (Steele, Lea, Flood 2014) seeded with ``state``."""
    return _mix64((state + _GAMMA) & _MASK)


def _mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _mix64_array(values: U64) -> U64:
    """``_mix64`` of every element, in place; numpy's unsigned arrays wrap as 64-bit integers should."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def shard_key(shard_digest: bytes) -> int:
    """A shard's 64-bit key: both halves of its content digest, little endian, mixed."""
    low, high = int.from_bytes(shard_digest[:8], "little"), int.from_bytes(shard_digest[8:], "little")
    return _mix64((_mix64(low) + high) & _MASK)


def peer_key(peer_id: str) -> int:
    """A peer's 64-bit key, spread by the odd multiplier before it meets a shard's key."""
    digest = hashlib.blake2b(peer_id.encode("utf-8"), digest_size=8).digest()
    return (_GAMMA * _mix64(int.from_bytes(digest, "little"))) & _MASK


def _shard_keys(shard_digests: Sequence[bytes]) -> U64:
    for digest in shard_digests:
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"shard digest {digest!r} has {len(digest)} bytes instead of {DIGEST_BYTES}")
    halves = np.frombuffer(b"".join(shard_digests), dtype="<u8").astype(np.uint64).reshape(-1, 2)
    return _mix64_array(_mix64_array(halves[:, 0].copy()) + halves[:, 1])


@functools.cache
def _log_table() -> U64:
    """``T[i] = (1 - log2(1 + i/n)) * 2**44`` for i in 0..n, computed with Python integers only.

    ln((a+1)/a) = 2 atanh(1/(2a+1)), and log2(1 + i/n) is the ratio of two sums of such terms, so no constant
    is needed. Three terms of the series, at a >= 4096, leave an error of 2**-80, far below the 44 bits kept.
    """
    n, precision = 1 << _TABLE_BITS, 120
    sums = [0]
    for a in range(n, 2 * n):
        odd = 2 * a + 1
        term, step = (1 << precision) // odd, 0
        for j in range(3):
            step += term // (2 * j + 1)
            term //= odd * odd
        sums.append(sums[-1] + step)
    total = sums[-1]
    return np.array([(((total - part) << _LOG_BITS) + total // 2) // total for part in sums], dtype=np.uint64)


def _minus_log2(x: U64) -> U64:
    """``-log2(x / 2**64)`` with 44 fractional bits, for x >= 1; never rises with x."""
    table = _log_table()
    high = x >> np.uint64(32)
    is_high = high > 0
    # frexp of an integer below 2**32 is exact everywhere: it yields the bit length.
    bit_length = np.frexp(np.where(is_high, high, x).astype(np.float64))[1] + np.where(is_high, 32, 0)
    shift = (64 - bit_length).astype(np.uint64)
    mantissa = x << shift  # top bit set
    index = ((mantissa >> np.uint64(63 - _TABLE_BITS)) & np.uint64((1 << _TABLE_BITS) - 1)).astype(np.intp)
    below_index = np.uint64(63 - _TABLE_BITS - _FRACTION_BITS)
    fraction = (mantissa >> below_index) & np.uint64((1 << _FRACTION_BITS) - 1)
    upper = table[index]
    drop = ((upper - table[index + 1]) * fraction) >> np.uint64(_FRACTION_BITS)
    result: U64 = (shift << np.uint64(_LOG_BITS)) + upper - drop
    return result


def _scores(shard_keys: U64, peer_keys: U64) -> U64:
    """Odd 64-bit scores, shape (shards, peers); the larger the better. Never 0, which marks 'taken' below."""
    scores: U64 = _mix64_array(shard_keys[:, None] + peer_keys[None, :]) | np.uint64(1)
    return scores


def _costs(scores: U64, weights: U64) -> U64:
    costs: U64 = (_minus_log2(scores) << np.uint64(_COST_SHIFT)) // weights[None, :]
    return costs


def _best(scores: U64, weights: U64, count: int) -> npt.NDArray[np.int32]:
    """Columns of the ``count`` first peers of each row in rank order, by repeated selection of the minimum.

    argmax returns the first of equals and the columns are sorted by peer_id, which breaks the last tie.
    """
    rows = np.arange(len(scores))
    best = np.empty((len(scores), count), dtype=np.int32)
    taken = np.uint64(_MASK)
    costs = None if (weights == weights[0]).all() else _costs(scores, weights)
    for rank in range(count):
        if costs is None:
            column = scores.argmax(axis=1)
            scores[rows, column] = 0
        else:
            cheapest = costs == costs.min(axis=1, keepdims=True)
            column = np.where(cheapest, scores, np.uint64(0)).argmax(axis=1)
            costs[rows, column] = taken
        best[:, rank] = column
    return best


class Placement:
    """For each shard the peers that should hold it. Immutable; build it with `placement`.

    Invariant: a pure function of (shard digests, storing peers, replicas), the same bits on every machine.
    """

    __slots__ = ("_best", "_keys", "_peer_keys", "_shard_digests", "_weights", "peers", "replicas")

    def __init__(self, shard_digests: Sequence[bytes], peers: Sequence[StoringPeer], replicas: int) -> None:
        if not isinstance(replicas, int) or not 1 <= replicas <= MAX_REPLICAS:
            raise ValueError(f"replicas {replicas!r} is not in 1..{MAX_REPLICAS}")
        self.peers = tuple(sorted(peers, key=lambda peer: peer.peer_id))
        self.replicas = replicas
        for one, other in zip(self.peers, self.peers[1:], strict=False):
            if one.peer_id == other.peer_id:
                raise ValueError(f"peer {one.peer_id!r} is listed twice")
        self._shard_digests = tuple(shard_digests)
        self._keys = _shard_keys(self._shard_digests)
        self._peer_keys = np.array([peer_key(peer.peer_id) for peer in self.peers], dtype=np.uint64)
        self._weights = np.array([peer.weight for peer in self.peers], dtype=np.uint64)
        self._best = self._rank_all(min(replicas, len(self.peers)))

    def _rank_all(self, count: int) -> npt.NDArray[np.int32]:
        if count == 0:
            return np.empty((len(self._keys), 0), dtype=np.int32)
        block = max(1, _CELLS_PER_BLOCK // len(self.peers))
        starts = range(0, len(self._keys), block)
        parts = [
            _best(_scores(self._keys[start : start + block], self._peer_keys), self._weights, count)
            for start in starts
        ]
        return np.concatenate(parts) if parts else np.empty((0, count), dtype=np.int32)

    def __len__(self) -> int:
        """Number of shards."""
        return len(self._shard_digests)

    @property
    def shard_digests(self) -> tuple[bytes, ...]:
        return self._shard_digests

    def holders(self, shard_index: int) -> tuple[str, ...]:
        """The peers that should hold the shard, primary first: R of them, or all when there are fewer."""
        return tuple(self.peers[column].peer_id for column in self._best[shard_index].tolist())

    def rank(self, shard_index: int) -> tuple[str, ...]:
        """All storing peers in rank order: whom to ask for the shard, first to last. One row's work."""
        if not self.peers:
            return ()
        scores = _scores(self._keys[shard_index : shard_index + 1], self._peer_keys)
        costs = _costs(scores, self._weights)[0].tolist()
        order = sorted(zip(costs, (-score for score in scores[0].tolist()), range(len(costs)), strict=True))
        return tuple(self.peers[column].peer_id for _, _, column in order)

    def shards_of(self, peer_id: str) -> tuple[int, ...]:
        """Indexes of the shards that the peer should hold, ascending; none for a peer that does not store."""
        for column, peer in enumerate(self.peers):
            if peer.peer_id == peer_id:
                return tuple(np.nonzero((self._best == column).any(axis=1))[0].tolist())
        return ()

    def digest(self) -> bytes:
        """16 bytes that two peers compare to know that they mean the same placement."""
        state = hashlib.blake2b(digest_size=16, person=b"dmc-placement")
        state.update(f"{len(self)} {self.replicas} {len(self.peers)}\n".encode())
        for peer in self.peers:
            state.update(f"{len(peer.peer_id.encode())} {peer.peer_id} {peer.weight}\n".encode())
        state.update(b"".join(self._shard_digests))
        state.update(self._best.astype("<i4").tobytes())
        return state.digest()

    def _columns_in(self, other: Placement) -> npt.NDArray[np.int32]:
        """This placement's holders as columns of ``other``; -1 for a peer that other does not have."""
        column_of = {peer.peer_id: column for column, peer in enumerate(other.peers)}
        translate = np.array([column_of.get(peer.peer_id, -1) for peer in self.peers], dtype=np.int32)
        return translate[self._best] if len(self.peers) else self._best


def placement(shard_digests: Sequence[bytes], peers: Sequence[StoringPeer], replicas: int) -> Placement:
    """Place every shard on its ``replicas`` best peers.

    ``shard_digests``: 16-byte content digests, in the manifest's order. ``peers`` in any order. Raises
    ValueError for a peer listed twice, a weight or a number of replicas out of bounds, a malformed digest.
    """
    return Placement(shard_digests, peers, replicas)


def moves(before: Placement, after: Placement) -> tuple[Move, ...]:
    """What has to be fetched to get from one placement to the other, by shard, then by rank.

    Raises ValueError when the two are not about the same shards.
    """
    if before.shard_digests != after.shard_digests:
        raise ValueError("moves between placements of different shards")
    return tuple(_moves(before, after))


def _moves(before: Placement, after: Placement) -> Iterator[Move]:
    translated = after._columns_in(before)
    had = (translated[:, :, None] == before._best[:, None, :]).any(axis=2)
    for shard_index, rank in np.argwhere(~had).tolist():
        column = int(after._best[shard_index, rank])
        yield Move(shard_index=shard_index, peer_id=after.peers[column].peer_id)
