"""A mixture: several data sets that a run trains on as on one, each a whole number of times an epoch.

A shard of a part that comes three times an epoch is three times in the mixture: the same samples, under numbers and so
in orders of their own. Long shards are cut into several, so that parts whose shards are unlike are mixed evenly. The
ledger, the assignment and the loader know no shards but the mixture's, and so every sample counts exactly once in each
of its passes. A data set by itself, once, is a mixture too, and in all the same as itself.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from p2p_dmc.data.manifest import DIGEST_BYTES, MAX_SHARDS, Manifest
from p2p_dmc.errors import UserError

MAX_PARTS = 16
"""Every peer tells all others of their digests."""
MAX_PASSES = 1000
SHARDS = 1024
"""An epoch is cut into about so many shards of like length: more mix better, and open more files."""
LEAST_SAMPLES = 16
"""Shards are not cut into shorter ones."""


@dataclass(frozen=True, slots=True)
class Part:
    """A data set of a mixture, and how many times an epoch each of its samples comes."""

    manifest: Manifest = field(repr=False)
    passes: int

    @property
    def samples(self) -> int:
        """That it has in an epoch."""
        return self.passes * len(self.manifest)


class Place(NamedTuple):
    """What a shard of a mixture stands for: samples of a data set's shard, from one on."""

    manifest: Manifest
    shard: int
    first: int


@dataclass(frozen=True)
class Mixture:
    """Made by every peer alone, from the manifests and the passes. UserError when it cannot be."""

    parts: tuple[Part, ...]
    """Invariant: sorted by name, whoever made it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(sorted(self.parts, key=lambda part: part.manifest.name)))
        names = [part.manifest.name for part in self.parts]
        if not 1 <= len(self.parts) <= MAX_PARTS:
            raise UserError(f"a mixture of {len(self.parts)} data sets; 1 to {MAX_PARTS} can be mixed")
        for part, name in zip(self.parts, names, strict=True):
            if names.count(name) > 1:
                raise UserError(f"data set {name!r} is in the mixture twice; name one version of it, once")
            if type(part.passes) is not int or not 1 <= part.passes <= MAX_PASSES:
                raise UserError(
                    f"{part.passes!r} passes over data set {name!r} an epoch; give 1 to {MAX_PASSES}"
                )
        if len(self) > MAX_SHARDS:
            raise UserError(
                f"{self.name} has {len(self)} shards an epoch, more than {MAX_SHARDS}; let parts come less often"
            )

    @classmethod
    def of(cls, manifest: Manifest) -> Mixture:
        """A data set by itself, once."""
        return cls((Part(manifest, 1),))

    @property
    def is_mixed(self) -> bool:
        """Whether it is anything but one data set as it is."""
        return len(self.parts) > 1 or self.parts[0].passes > 1

    @cached_property
    def digest(self) -> bytes:
        """Its identity, from which the order follows: the parts' digests and passes; 16 bytes."""
        if not self.is_mixed:
            return self.parts[0].manifest.digest
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"mixture")
        for part in self.parts:
            hasher.update(part.manifest.digest + part.passes.to_bytes(4, "little"))
        hasher.update(self._most.to_bytes(8, "little"))
        return hasher.digest()

    @cached_property
    def name(self) -> str:
        """For people: a data set's own, or `3 x code + 7 x web`."""
        if not self.is_mixed:
            return self.parts[0].manifest.name
        return " + ".join(f"{part.passes} x {part.manifest.name}" for part in self.parts)

    @cached_property
    def samples(self) -> int:
        """In an epoch."""
        return sum(part.samples for part in self.parts)

    @cached_property
    def sample_counts(self) -> tuple[int, ...]:
        """Samples per shard of the mixture."""
        if not self.is_mixed:
            return self.parts[0].manifest.sample_counts
        return tuple(
            count
            for part, cuts in zip(self.parts, self._cuts, strict=True)
            for _ in range(part.passes)
            for _, _, count in cuts
        )

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The names of all parts' classes, sorted."""
        return tuple(sorted({name for part in self.parts for name in part.manifest.classes}))

    @cached_property
    def _most(self) -> int:
        """Samples of its shards, at most, where several are mixed."""
        return max(LEAST_SAMPLES, -(-self.samples // SHARDS))

    @cached_property
    def _cuts(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Of each part (shard, first sample, samples) of what it is cut into."""
        return tuple(
            tuple(
                cut
                for shard, count in enumerate(part.manifest.sample_counts)
                for cut in self._cut(shard, count)
            )
            for part in self.parts
        )

    def _cut(self, shard: int, count: int) -> Iterator[tuple[int, int, int]]:
        pieces = -(-count // self._most)
        for piece in range(pieces):
            first, end = count * piece // pieces, count * (piece + 1) // pieces
            yield shard, first, end - first

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """One behind each part's last shard."""
        if not self.is_mixed:
            return (len(self.parts[0].manifest.shards),)
        cut = zip(self.parts, self._cuts, strict=True)
        return tuple(accumulate(part.passes * len(cuts) for part, cuts in cut))

    def __len__(self) -> int:
        """Number of shards, in an epoch."""
        return self._ends[-1]

    def where(self, shard: int) -> Place:
        """What a shard of the mixture stands for; IndexError if there is none."""
        if not 0 <= shard < len(self):
            raise IndexError(f"shard {shard} of a mixture with {len(self)}")
        if not self.is_mixed:
            return Place(self.parts[0].manifest, shard, 0)
        at = bisect_right(self._ends, shard)
        cuts = self._cuts[at]
        place, first, _ = cuts[(shard - (self._ends[at - 1] if at else 0)) % len(cuts)]
        return Place(self.parts[at].manifest, place, first)

    def shard_digest(self, shard: int) -> bytes:
        """Of the file that the shard's samples are in."""
        manifest, place, _ = self.where(shard)
        return manifest.shard_digests[place]

    def spread(self, sets: Iterable[frozenset[int]]) -> frozenset[int]:
        """The shards of the mixture of which the parts' ``sets``, one each, name the shard."""
        if not self.is_mixed:
            (named,) = sets
            return named
        found: list[int] = []
        start = 0
        for part, cuts, named in zip(self.parts, self._cuts, sets, strict=True):
            pieces = [at for at, (shard, _, _) in enumerate(cuts) if shard in named]
            for _ in range(part.passes):
                found += [start + at for at in pieces]
                start += len(cuts)
        return frozenset(found)


def mixture_of(parts: Iterable[tuple[bytes, int]], known: Callable[[bytes], Manifest | None]) -> Mixture:
    """From (digest, passes) of each part; UserError that names a digest of which the manifest is not ``known``."""
    found = []
    for digest, passes in parts:
        manifest = known(digest)
        if manifest is None:
            raise UserError(f"data set {digest.hex()} is not known here; seed it, or join a peer that has it")
        found.append(Part(manifest, passes))
    return Mixture(tuple(found))
