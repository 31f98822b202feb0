"""A set of shards of one data set, as one bit a shard: a million shards on 256 peers are 32 MB, not gigabytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
"""Shape (shards,): whether each shard, by its index in the manifest, is meant."""


class ShardSet:
    """Indexes of shards of a data set with ``count`` of them. Immutable."""

    __slots__ = ("bits", "count")

    def __init__(self, bits: npt.NDArray[np.uint8], count: int) -> None:
        """``bits``: in numpy.packbits order, those after the last shard 0."""
        if len(bits) != (count + 7) // 8:
            raise ValueError(f"{len(bits)} bytes of bits for {count} shards")
        self.bits = bits
        self.count = count

    @classmethod
    def of(cls, shards: Iterable[int], count: int) -> ShardSet:
        mask = np.zeros(count, dtype=bool)
        mask[np.fromiter(shards, dtype=np.intp)] = True
        return cls.where(mask)

    @classmethod
    def where(cls, mask: Mask) -> ShardSet:
        return cls(np.packbits(mask), len(mask))

    @classmethod
    def from_bytes(cls, data: bytes, count: int) -> ShardSet:
        """The reverse of `to_bytes`; ValueError when the size does not fit. Bits after the last shard are ignored."""
        return cls.where(cls(np.frombuffer(data, np.uint8), count).mask())

    def to_bytes(self) -> bytes:
        return self.bits.tobytes()

    def mask(self) -> Mask:
        return np.unpackbits(self.bits, count=self.count).view(bool)

    def at(self, shards: npt.NDArray[np.intp]) -> Mask:
        """Of shape (len(shards),): whether each of these is in the set."""
        found: Mask = (self.bits[shards >> 3] >> (7 - (shards & 7)).astype(np.uint8) & 1).astype(np.bool_)
        return found

    def __contains__(self, shard: object) -> bool:
        if not isinstance(shard, int) or not 0 <= shard < self.count:
            return False
        return bool(self.bits[shard >> 3] >> (7 - (shard & 7)) & 1)

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.mask()).tolist())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.mask()))

    def __or__(self, other: ShardSet) -> ShardSet:
        return ShardSet(self.bits | other.bits, self.count)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ShardSet)
            and self.count == other.count
            and np.array_equal(self.bits, other.bits)
        )

    def __hash__(self) -> int:
        return hash((self.count, self.bits.tobytes()))

    def __repr__(self) -> str:
        return f"ShardSet({list(self)}, of {self.count})"


def union(sets: Iterable[ShardSet], count: int) -> ShardSet:
    """What is in any of these."""
    bits = np.zeros((count + 7) // 8, dtype=np.uint8)
    for one in sets:
        bits |= one.bits
    return ShardSet(bits, count)
