"""Scores and costs of weighted rendezvous hashing (HRW): what one peer bids for one shard.

For each pair a 64-bit score ``x`` is drawn by hashing; read as ``u = x / 2**64`` it gives the cost
``-log2(u) / weight``, an exponential draw whose rate is the weight, so the cheapest peer of a shard is peer i with
probability ``w_i / W`` (Schindelhauer and Schomaker 2005, "Weighted distributed hash tables"; Ceph's CRUSH straw2 is
the same draw). A peer's cost depends on that peer alone.

All arithmetic that decides is on integers: the C library's logarithm may differ in its last bit between machines, and
one bit is enough for two peers to disagree. The cost never rises with ``x``, so for equal weights the order by
``(cost, -x, peer_id)`` is the order of the scores alone.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]

DIGEST_BYTES = 16
MAX_WEIGHT = 1 << 24
NO_COST = (1 << 64) - 1
"""Above every cost, which is at most 2**63."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment, an odd constant: multiplying by it loses nothing

# The logarithm's fixed point. The product (table difference) x (fraction) must stay below 2**64:
# a difference is below 2**(44 - 11.4), so 31 bits of fraction fit.
_LOG_BITS = 44
_TABLE_BITS = 12
_FRACTION_BITS = 31
_COST_SHIFT = 13  # -log2(u) is at most 64, that is 2**50 in fixed point: 13 more bits before dividing

COST_UNIT = 2.0 ** (_LOG_BITS + _COST_SHIFT) / math.log(2)
"""Mean cost at weight 1."""


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


def shard_keys(shard_digests: Sequence[bytes]) -> U64:
    """``shard_key`` of each; ValueError for a digest of another length."""
    for digest in shard_digests:
        if len(digest) != DIGEST_BYTES:
            raise ValueError(f"shard digest {digest!r} has {len(digest)} bytes instead of {DIGEST_BYTES}")
    halves = np.frombuffer(b"".join(shard_digests), dtype="<u8").astype(np.uint64).reshape(-1, 2)
    return _mix64_array(_mix64_array(halves[:, 0].copy()) + halves[:, 1])


def peer_key(peer_id: str) -> int:
    """A peer's 64-bit key, spread by the odd multiplier before it meets a shard's key."""
    digest = hashlib.blake2b(peer_id.encode("utf-8"), digest_size=8).digest()
    return (_GAMMA * _mix64(int.from_bytes(digest, "little"))) & _MASK


def scores(keys: U64, keys_of_peers: U64 | np.uint64) -> U64:
    """A peer's score for each shard, or each peer's for one: odd, hence never 0; the larger the better."""
    found = _mix64_array(keys + keys_of_peers)
    found |= np.uint64(1)
    return found


def costs(scores: U64, weights: U64 | np.uint64) -> U64:
    """What scores cost peers of these weights, with 57 fractional bits: the smaller the better."""
    found: U64 = (_minus_log2(scores) << np.uint64(_COST_SHIFT)) // weights
    return found


def least_scores(most_costs: U64, weight: np.uint64) -> U64:
    """For each cost a score such that no smaller one gives a peer of that weight this cost or less.

    A sieve, not a decision: floats, with room for their rounding. ``-ln(u) >= 1 - u``, and in fixed point the logarithm
    is at most one unit below the true one, so a score of that cost is less than ``reach`` away from 2**64.
    """
    scale = float(weight) / COST_UNIT * 2.0**64 * (1 + 1e-9)
    reach = (most_costs + 1.0) * scale + 2.0 ** (64 - _LOG_BITS + 1)
    far = reach >= 2.0**63
    reach[far] = 0.0
    found: U64 = np.uint64(_MASK) - reach.astype(np.uint64)
    found[far] = 0
    return found


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
