"""The ledger: what part of the epoch the committed model has seen (DESIGN sections 1, 7, 9; invariant 12).

Values here never change; every transition returns a new `Ledger`. Positions are places in the *epoch's order*
of a shard, which is a keyed permutation of its samples: a function of the data set, the seed and the epoch,
never of the peers. So a `Stretch` means the same samples to everyone.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, cast

import msgpack
import numpy as np

from p2p_dmc.errors import RemoteProtocolError

__all__ = [
    "Ledger",
    "Stretch",
    "check_exact",
    "sample_index",
    "sample_permutation",
    "shard_order",
]

FORMAT = 3
"""First item of the encoded form; grows when the encoding changes."""

Intervals = tuple[tuple[int, int], ...]
"""Half-open, sorted, disjoint, merged: the one way to write a set of positions."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Stretch:
    """Positions `[lo, hi)` in the current epoch's order of one shard; never empty."""

    shard: int
    lo: int
    hi: int

    def __post_init__(self) -> None:
        if not (type(self.shard) is type(self.lo) is type(self.hi) is int):
            raise ValueError(
                f"a stretch is made of three integers, not {self.shard!r}, {self.lo!r}, {self.hi!r}"
            )
        if self.shard < 0 or not 0 <= self.lo < self.hi:
            raise ValueError(f"no such stretch: shard {self.shard}, positions {self.lo} to {self.hi}")

    def __len__(self) -> int:
        return self.hi - self.lo


# --- order -----------------------------------------------------------------------------------------------


def _key(purpose: bytes, dataset_digest: bytes, numbers: Sequence[int]) -> int:
    """64 bits that depend on everything given; blake2b, so that no two purposes or epochs are related."""
    hasher = hashlib.blake2b(digest_size=8, person=purpose)
    hasher.update(len(dataset_digest).to_bytes(4, "little") + dataset_digest)
    for number in numbers:
        hasher.update(number.to_bytes(8, "little"))
    return int.from_bytes(hasher.digest(), "little")


def _permutation(key: int, count: int) -> tuple[int, ...]:
    """0..count-1 sorted by SplitMix64 of (key, index).

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
    It is a bijection of 64 bits, so there are no ties to break and the order is the same on any machine.
    """
    z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return tuple(cast("list[int]", np.argsort(z, kind="stable").tolist()))


@lru_cache(maxsize=8)
def shard_order(dataset_digest: bytes, seed: int, epoch: int, shards: int) -> tuple[int, ...]:
    """The order in which the shards come in this epoch: a permutation, whoever the peers are."""
    return _permutation(_key(b"shard order", dataset_digest, (seed, epoch)), shards)


@lru_cache(maxsize=64)
def sample_permutation(
    dataset_digest: bytes, seed: int, epoch: int, shard: int, count: int
) -> tuple[int, ...]:
    """For each position in the epoch's order of one shard, the index of the sample in the shard."""
    return _permutation(_key(b"sample order", dataset_digest, (seed, epoch, shard)), count)


def sample_index(dataset_digest: bytes, seed: int, epoch: int, shard: int, count: int, position: int) -> int:
    """Which sample of the shard comes at `position` in the epoch's order; the shard has `count` of them."""
    if not 0 <= position < count:
        raise ValueError(f"shard {shard} has positions 0 to {count - 1}, not {position}")
    return sample_permutation(dataset_digest, seed, epoch, shard, count)[position]


# --- sets of positions -----------------------------------------------------------------------------------


def union(a: Intervals, b: Intervals) -> Intervals:
    """Positions in either; touching intervals become one."""
    merged: list[tuple[int, int]] = []
    for lo, hi in sorted(a + b):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    return tuple(merged)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """Positions in `a` that are not in `b`."""
    left: list[tuple[int, int]] = []
    for lo, hi in a:
        i = bisect_left(b, (lo, lo))
        if i and b[i - 1][1] > lo:
            i -= 1
        while i < len(b) and b[i][0] < hi:
            cut_lo, cut_hi = b[i]
            if lo < cut_lo:
                left.append((lo, cut_lo))
            lo = min(cut_hi, hi)
            i += 1
        if lo < hi:
            left.append((lo, hi))
    return tuple(left)


def common(a: Intervals, b: Intervals) -> Intervals:
    """Positions in both."""
    return subtract(a, subtract(a, b))


def total(intervals: Intervals) -> int:
    """How many positions."""
    return sum(hi - lo for lo, hi in intervals)


# --- the ledger ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What the committed model has seen of the current epoch; replicated state, equal on all peers."""

    dataset_digest: bytes
    seed: int
    epochs: int
    counts: tuple[int, ...]
    """Samples of each shard."""
    epoch: int
    """The current epoch, from 0; equal to `epochs` when the run is done."""
    part: int
    """How often the rest of this epoch was shared out anew while a view stood (`core.rebalancing`)."""
    counted: tuple[Intervals, ...]
    """Per shard, the positions that complete rounds have counted. Invariant: disjoint from `skipped`."""
    skipped: tuple[Intervals, ...]
    """Per shard, the positions given up in this epoch: quarantined or lost."""
    strikes: tuple[Stretch, ...]
    """Stretches that were in progress at one death or non-finite round. Invariant: sorted, disjoint, open."""
    samples_total: int
    """Samples counted in all epochs so far."""

    def __post_init__(self) -> None:
        _check_settings(self)
        _check_intervals(self)
        _check_strikes(self)

    @classmethod
    def start(cls, dataset_digest: bytes, counts: Sequence[int], seed: int, epochs: int) -> Ledger:
        """Nothing seen yet. `counts`: samples per shard."""
        nothing: tuple[Intervals, ...] = ((),) * len(counts)
        return cls(
            dataset_digest=dataset_digest,
            seed=seed,
            epochs=epochs,
            counts=tuple(counts),
            epoch=0,
            part=0,
            counted=nothing,
            skipped=nothing,
            strikes=(),
            samples_total=0,
        )

    @property
    def done(self) -> bool:
        """Whether every epoch is over."""
        return self.epoch == self.epochs

    def progress(self) -> tuple[int, int, int]:
        """Samples of the current epoch: (counted, skipped, all there are)."""
        return sum(map(total, self.counted)), sum(map(total, self.skipped)), sum(self.counts)

    def remaining(self) -> tuple[Stretch, ...]:
        """What the epoch still needs, in the epoch's order."""
        order = shard_order(self.dataset_digest, self.seed, self.epoch, len(self.counts))
        return tuple(Stretch(shard=s, lo=lo, hi=hi) for s in order for lo, hi in self.open_positions(s))

    def open_positions(self, shard: int) -> Intervals:
        """Positions of one shard that are neither counted nor skipped in this epoch."""
        whole: Intervals = () if self.done else ((0, self.counts[shard]),)
        return subtract(subtract(whole, self.counted[shard]), self.skipped[shard])

    def advance(self, consumed: Iterable[Stretch]) -> Ledger:
        """Count what a complete round consumed; the next epoch begins in the call that finishes this one.

        ValueError, and nothing changes, if a sample does not exist or would count twice (invariant 12).
        """
        touched: dict[int, Intervals] = {}
        samples = 0
        for stretch in consumed:
            self._check_exists(stretch)
            piece = ((stretch.lo, stretch.hi),)
            seen = touched.get(stretch.shard, self.counted[stretch.shard])
            if common(piece, seen) or common(piece, self.skipped[stretch.shard]):
                raise ValueError(f"would count twice in epoch {self.epoch}: {stretch}; done: {seen}")
            touched[stretch.shard] = union(seen, piece)
            samples += len(stretch)
        return self._moved_on(
            counted=_patched(self.counted, touched), samples_total=self.samples_total + samples
        )

    def strike(self, *stretches: Stretch) -> Ledger:
        """Note what was in progress at one death or non-finite round; what was struck before is skipped.

        Twice is out (DESIGN section 10).
        """
        out = self.struck_out(*stretches)
        gone = self._per_shard(out)
        added = [
            Stretch(shard=shard, lo=lo, hi=hi)
            for shard, pieces in self._per_shard(stretches).items()
            for lo, hi in subtract(common(pieces, self.open_positions(shard)), gone.get(shard, ()))
        ]
        noted = replace(self, strikes=tuple(sorted([*self.strikes, *added])))
        return noted.skip(out)

    def struck_out(self, *stretches: Stretch) -> tuple[Stretch, ...]:
        """What `strike(*stretches)` would quarantine, so that it can be named: what has a strike already."""
        struck = self._per_shard(self.strikes)
        both = ((s, common(struck.get(s, ()), pieces)) for s, pieces in self._per_shard(stretches).items())
        return tuple(Stretch(shard=s, lo=lo, hi=hi) for s, pieces in both for lo, hi in pieces)

    def skip(self, stretches: Iterable[Stretch]) -> Ledger:
        """Give up on these samples for this epoch. What is counted already stays counted."""
        touched = {
            shard: union(self.skipped[shard], common(pieces, self.open_positions(shard)))
            for shard, pieces in self._per_shard(stretches).items()
        }
        return self._moved_on(skipped=_patched(self.skipped, touched))

    def _per_shard(self, stretches: Iterable[Stretch]) -> dict[int, Intervals]:
        found: dict[int, list[tuple[int, int]]] = {}
        for stretch in stretches:
            self._check_exists(stretch)
            found.setdefault(stretch.shard, []).append((stretch.lo, stretch.hi))
        return {shard: union(tuple(pieces), ()) for shard, pieces in found.items()}

    def shared_anew(self) -> Ledger:
        """The members have other assignments from here on: what they held of the former ones is void."""
        return replace(self, part=self.part + 1)

    def given_up_since(
        self, before: Ledger, counted: Iterable[Stretch] = ()
    ) -> tuple[tuple[int, Stretch], ...]:
        """(epoch, stretch) of what was skipped since `before`; `counted` is all that was counted since then.

        At most one epoch may have ended in between.
        """
        gone: list[tuple[int, int, Intervals]] = []
        shards = range(len(self.counts))
        if self.epoch == before.epoch:
            gone += [(self.epoch, s, subtract(self.skipped[s], before.skipped[s])) for s in shards]
        else:  # that epoch is whole: what is not counted was skipped
            seen: dict[int, Intervals] = {}
            for stretch in counted:
                seen[stretch.shard] = union(seen.get(stretch.shard, ()), ((stretch.lo, stretch.hi),))
            gone += [(before.epoch, s, subtract(before.open_positions(s), seen.get(s, ()))) for s in shards]
            gone += [(self.epoch, s, self.skipped[s]) for s in shards]
        return tuple((e, Stretch(shard=s, lo=lo, hi=hi)) for e, s, pieces in gone for lo, hi in pieces)

    def _check_exists(self, stretch: Stretch) -> None:
        if self.done:
            raise ValueError(f"all {self.epochs} epochs are over, yet there is {stretch}")
        if stretch.shard >= len(self.counts) or stretch.hi > self.counts[stretch.shard]:
            raise ValueError(f"no such samples: {stretch} of {len(self.counts)} shards")

    def _moved_on(
        self,
        *,
        counted: tuple[Intervals, ...] | None = None,
        skipped: tuple[Intervals, ...] | None = None,
        samples_total: int | None = None,
    ) -> Ledger:
        """The next value: strikes on settled samples are forgotten, a full epoch gives way to the next."""
        counted = self.counted if counted is None else counted
        skipped = self.skipped if skipped is None else skipped
        samples_total = self.samples_total if samples_total is None else samples_total
        epoch, part, strikes = self.epoch, self.part, _unsettled(self.strikes, counted, skipped)
        if sum(map(total, counted + skipped)) == sum(self.counts):
            counted = skipped = ((),) * len(self.counts)
            epoch, part, strikes = self.epoch + 1, 0, ()
        return replace(
            self,
            epoch=epoch,
            part=part,
            counted=counted,
            skipped=skipped,
            strikes=strikes,
            samples_total=samples_total,
        )

    def to_bytes(self) -> bytes:
        """The one encoding of this value (msgpack): equal ledgers, equal bytes."""
        return cast(
            bytes,
            msgpack.packb(
                (
                    FORMAT,
                    self.dataset_digest,
                    self.seed,
                    self.epochs,
                    self.counts,
                    self.epoch,
                    self.part,
                    tuple(map(_flat, self.counted)),
                    tuple(map(_flat, self.skipped)),
                    tuple((s.shard, s.lo, s.hi) for s in self.strikes),
                    self.samples_total,
                )
            ),
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """Inverse of `to_bytes`; RemoteProtocolError for anything that it would not have written."""
        try:
            version, digest, seed, epochs, counts, epoch, part, counted, skipped, strikes, samples_total = (
                msgpack.unpackb(data, use_list=False)
            )
            if version != FORMAT:
                raise ValueError(f"ledger format {version!r}, expected {FORMAT}")
            ledger = cls(
                dataset_digest=digest,
                seed=seed,
                epochs=epochs,
                counts=counts,
                epoch=epoch,
                part=part,
                counted=tuple(map(_paired, counted)),
                skipped=tuple(map(_paired, skipped)),
                strikes=tuple(Stretch(shard=s, lo=lo, hi=hi) for s, lo, hi in strikes),
                samples_total=samples_total,
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise RemoteProtocolError(f"not a ledger: {error}") from None
        if ledger.to_bytes() != data:
            raise RemoteProtocolError("not a ledger: written in another way than ours")
        return ledger


def _patched(per_shard: tuple[Intervals, ...], touched: dict[int, Intervals]) -> tuple[Intervals, ...]:
    patched = list(per_shard)
    for shard, intervals in touched.items():
        patched[shard] = intervals
    return tuple(patched)


def _open_part(ledger: Ledger, stretch: Stretch) -> Intervals:
    return common(((stretch.lo, stretch.hi),), ledger.open_positions(stretch.shard))


def _unsettled(
    strikes: tuple[Stretch, ...], counted: tuple[Intervals, ...], skipped: tuple[Intervals, ...]
) -> tuple[Stretch, ...]:
    """The strikes on samples that are neither counted nor skipped."""
    return tuple(
        Stretch(shard=s.shard, lo=lo, hi=hi)
        for s in strikes
        for lo, hi in subtract(subtract(((s.lo, s.hi),), counted[s.shard]), skipped[s.shard])
    )


def _flat(intervals: Intervals) -> tuple[int, ...]:
    return tuple(bound for interval in intervals for bound in interval)


def _paired(bounds: tuple[int, ...]) -> Intervals:
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


# --- validation: everything a peer could send wrong ------------------------------------------------------


def _require(condition: bool, complaint: str, *values: Any) -> None:
    if not condition:
        raise ValueError(complaint + ": " + ", ".join(map(repr, values)) if values else complaint)


def _check_settings(ledger: Ledger) -> None:
    _require(type(ledger.dataset_digest) is bytes, "the data set's digest is bytes", ledger.dataset_digest)
    for name in ("seed", "epochs", "epoch", "part", "samples_total"):
        value = getattr(ledger, name)
        _require(type(value) is int and 0 <= value < 2**63, f"{name} is an integer from 0", value)
    _require(ledger.epoch <= ledger.epochs and ledger.epochs > 0, "epoch", ledger.epoch, ledger.epochs)
    _require(type(ledger.counts) is tuple, "counts is a tuple", ledger.counts)
    for count in ledger.counts:
        _require(type(count) is int and 0 <= count < 2**63, "a shard has 0 or more samples", count)
    _require(sum(ledger.counts) > 0, "a data set without samples has no epochs")


def _check_intervals(ledger: Ledger) -> None:
    for name in ("counted", "skipped"):
        per_shard = getattr(ledger, name)
        _require(len(per_shard) == len(ledger.counts), f"{name}: one entry per shard")
        for intervals, count in zip(per_shard, ledger.counts, strict=True):
            end = -1
            for lo, hi in intervals:
                _require(type(lo) is type(hi) is int and end < lo < hi <= count, f"{name}: positions", lo, hi)
                end = hi
    for shard, (counted, skipped) in enumerate(zip(ledger.counted, ledger.skipped, strict=True)):
        _require(not common(counted, skipped), "both counted and skipped, in shard", shard)
    counted_now, skipped_now, there_are = ledger.progress()
    _require(counted_now + skipped_now < there_are, "a full epoch that is not over", ledger.epoch)
    _require(not ledger.done or counted_now + skipped_now == 0, "progress after the last epoch")
    past = ledger.samples_total - counted_now
    _require(
        0 <= past <= ledger.epoch * there_are, "samples_total does not fit the epochs", ledger.samples_total
    )


def _check_strikes(ledger: Ledger) -> None:
    for stretch in ledger.strikes:
        ledger._check_exists(stretch)
        _require(
            _open_part(ledger, stretch) == ((stretch.lo, stretch.hi),), "a strike on settled samples", stretch
        )
    for before, after in pairwise(ledger.strikes):
        apart = (before.shard, before.hi) <= (after.shard, after.lo)
        _require(apart, "strikes out of order", before, after)


# --- the dumb oracle -------------------------------------------------------------------------------------


def check_exact(
    counts: Sequence[int],
    finished_epochs: int,
    counted: Iterable[tuple[int, Stretch]],
    skipped: Iterable[tuple[int, Stretch]] = (),
) -> list[str]:
    """Replay a whole run and say in words which samples did not count exactly once; empty when all did.

    `counts`: samples per shard; `counted`: each (epoch, stretch) that some complete round counted; `skipped`:
    the same for what was given up. Epochs 0 to `finished_epochs` - 1 must be whole; a later one must only not
    repeat. It shares no code with `Ledger`, so that it can judge it.
    """
    times: dict[tuple[int, int, int], int] = {}
    for epoch, stretch in counted:
        for position in range(stretch.lo, stretch.hi):
            sample = (epoch, stretch.shard, position)
            times[sample] = times.get(sample, 0) + 1
    given_up = {(epoch, s.shard, position) for epoch, s in skipped for position in range(s.lo, s.hi)}
    due = {(e, s, p) for e in range(finished_epochs) for s, count in enumerate(counts) for p in range(count)}
    wrong: dict[tuple[int, int, int], str] = {}
    for sample in due | times.keys() | given_up:
        epoch, shard, position = sample
        n = times.get(sample, 0)
        if not (shard < len(counts) and position < counts[shard]):
            wrong[sample] = "does not exist"
        elif n > 1:
            wrong[sample] = f"counted {n} times"
        elif n == 1 and sample in given_up:
            wrong[sample] = "both counted and skipped"
        elif n == 0 and sample not in given_up:
            wrong[sample] = "never counted"
    return _in_words(wrong)


def _in_words(wrong: dict[tuple[int, int, int], str]) -> list[str]:
    """One line per run of neighbouring samples with the same fault."""
    lines: list[tuple[int, int, int, int, str]] = []
    for (epoch, shard, position), fault in sorted(wrong.items()):
        if lines and lines[-1][:2] == (epoch, shard) and lines[-1][3:] == (position, fault):
            lines[-1] = (epoch, shard, lines[-1][2], position + 1, fault)
        else:
            lines.append((epoch, shard, position, position + 1, fault))
    return [f"epoch {e}, shard {s}, positions {lo} to {hi - 1}: {fault}" for e, s, lo, hi, fault in lines]
