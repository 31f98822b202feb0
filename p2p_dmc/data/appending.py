"""A new version of a data set: what it has stays where it is, new samples go to new shards.

The input is the whole of it, grown. Every sample that the data set has must be in it, with the same contents: one
that has changed or is gone is refused by name, so that no version says otherwise than the one before it.
"""

from __future__ import annotations

import dataclasses
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import accumulate

from p2p_dmc.data.found import Samples, Scan, ScannedSample, key_of
from p2p_dmc.data.index import SampleEntry, ShardIndex, decode_key
from p2p_dmc.data.manifest import HELD_OUT, Manifest, Mode
from p2p_dmc.data.samples import read_index
from p2p_dmc.data.seeding import SEED, Plan, split
from p2p_dmc.data.sharding import MaxShardSize, Order, auto_limit, plan_shards
from p2p_dmc.data.sources import Sources
from p2p_dmc.data.spill import Log, sort_records
from p2p_dmc.data.store import Store
from p2p_dmc.errors import UserError

Progress = Callable[[int, int], None]  # (bytes done, bytes in all), of the shards, which are read twice

_PLACE = struct.Struct(">II")  # shard, place in it


def plan_versions(
    scan: Scan,
    store: Store,
    *,
    name: str,
    mode: Mode | None = None,
    max_shard_size: MaxShardSize = "auto",
    order: Order | None = None,
    val_fraction: float | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Plan | Manifest]:
    """Of the data set, and with ``val_fraction`` of the held-out one too: the version to be written.

    The manifest that is there where nothing is new. Raises UserError for a data set that is not in the store, or
    not whole, another mode than it has, a fraction where none was said before or the other way round, and for
    samples that have changed or are gone.
    """
    base = _base(store, name, mode, progress)
    parts = [(scan, base)]
    held_out = store.by_name(f"{name}{HELD_OUT}")
    if val_fraction is not None:
        rest, held = split(scan, val_fraction, base.mode)
        parts = [(rest, base), (held, _base(store, f"{name}{HELD_OUT}", mode, progress))]
    elif held_out is not None:
        raise UserError(
            f"--append: {held_out.name!r} holds samples of {name!r} out; give the same --val-fraction as before, or "
            "they would be trained on"
        )
    return [_plan(part, one, store, max_shard_size, order, progress) for part, one in parts]


def _base(store: Store, name: str, mode: Mode | None, progress: Progress) -> Manifest:
    """The newest version, which has to be here as a whole. What is damaged of it is held no longer."""
    base = store.by_name(name)
    if base is None:
        raise UserError(
            f"--append: no data set {name!r} in {str(store.root)!r}; seed it without --append first, give its "
            "--name, or --join SEED of the peers that have it"
        )
    if mode is not None and mode != base.mode:
        raise UserError(f"--mode {mode}: {name!r} was made with --mode {base.mode}; leave the option out")
    shards, held = len(base.shards), store.holdings(base.digest)
    if len(held) < shards:
        raise UserError(
            f"--append compares the input with what is there, and {shards - len(held)} of {shards} shards of "
            f"{name!r} are not in {str(store.root)!r}; with --join SEED they are fetched from the peers that have them"
        )
    damaged = 0
    for index, before_bytes in enumerate(_before_each(base)):
        progress(before_bytes, 2 * base.total_bytes)
        damaged += not store.verify(base.digest, index)
    if damaged:
        raise UserError(
            f"--append compares the input with what is there, and {damaged} of {shards} shards of {name!r} in "
            f"{str(store.root)!r} were damaged and are deleted; the same command fetches them from the peers that "
            "have them, with --join SEED if this home knows none"
        )
    return base


def _plan(
    scan: Scan,
    base: Manifest,
    store: Store,
    max_shard_size: MaxShardSize,
    order: Order | None,
    progress: Progress,
) -> Plan | Manifest:
    common = Log(scan.folder)
    new = Samples.written(scan.samples.book, _new(scan, base, store, common), scan.folder)
    _refuse_changed(scan, base, store, common, progress)
    if not new:
        return base
    if max_shard_size == "auto":
        max_shard_size = auto_limit(base.total_bytes + new.tally.tar_bytes)
    added = dataclasses.replace(scan, samples=new, tars=())
    shards = plan_shards(
        added, mode=base.mode, max_shard_size=max_shard_size, order=order or "shuffle", seed=SEED
    )
    return Plan(base.name, base.mode, shards, added, as_they_are=False, base=base)


def _new(scan: Scan, base: Manifest, store: Store, common: Log) -> Iterator[bytes]:
    """The records of new samples; ``common`` receives those of others behind their places in the version."""
    theirs = sort_records(_places(base, store), scan.folder)
    place = next(theirs, None)
    last = b""
    for one in sort_records((key_of(r) + b"\0" + r for r in scan.samples.records()), scan.folder):
        key, record = one.split(b"\0", 1)
        if key == last:
            raise UserError(f"{decode_key(key)!r}: two samples of the input have this key; rename one")
        last = key
        while place is not None and _key(place) < key:
            raise _gone(_key(place), base)
        if place is not None and _key(place) == key:
            common.append(place[-_PLACE.size :] + record)
            place = next(theirs, None)
        else:
            yield record
    if place is not None:
        raise _gone(_key(place), base)


def _key(place: bytes) -> bytes:
    return place[: -_PLACE.size - 1]


def _gone(key: bytes, base: Manifest) -> UserError:
    return UserError(
        f"{decode_key(key)!r}: a sample of {base.name!r} {base.digest.hex()[:12]} that is not in the input, or is "
        "twice in the data set; --append only adds: bring it back, or seed the input under another --name"
    )


def _places(base: Manifest, store: Store) -> Iterator[bytes]:
    """Every sample's key, and where it is."""
    for shard in range(len(base.shards)):
        index = read_index(store.path(base.digest, shard))
        for place in range(len(index)):
            yield index.key_bytes(place) + b"\0" + _PLACE.pack(shard, place)


def _refuse_changed(scan: Scan, base: Manifest, store: Store, common: Log, progress: Progress) -> None:
    """Compare the contents, shard by shard, so that each is read from its beginning to its end."""
    descriptor, index, opened, before_bytes = -1, None, -1, _before_each(base)
    with ExitStack() as stack, Sources(scan.stamps) as sources:
        for one in sort_records(common.read(), scan.folder):
            shard, place = _PLACE.unpack_from(one)
            if shard != opened:
                stack.close()
                opened = shard
                descriptor = os.open(store.path(base.digest, shard), os.O_RDONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
                index = ShardIndex.read(descriptor)
                progress(base.total_bytes + before_bytes[shard], 2 * base.total_bytes)
            assert index is not None
            sample = scan.samples.book.decode(one[_PLACE.size :])
            changed = _first_change(sample, index[place], sources, descriptor)
            if changed is not None:
                raise UserError(
                    f"{sample.key!r}: its field {changed!r} is another than when {base.name!r} "
                    f"{base.digest.hex()[:12]} was made; --append only adds: seed the input under another --name"
                )
        progress(2 * base.total_bytes, 2 * base.total_bytes)
        sources.check()


def _before_each(base: Manifest) -> list[int]:
    """Bytes of the shards before each one."""
    return [0, *accumulate(base.shard_sizes)][:-1]


def _first_change(sample: ScannedSample, entry: SampleEntry, sources: Sources, descriptor: int) -> str | None:
    """The first field that is not as it was, or that only one of the two has."""
    there = {name: (offset, size) for name, offset, size in entry.fields}
    for one in sample.fields:
        offset, size = there.pop(one.extension, (0, -1))
        if size != one.size:
            return one.extension
        for piece in sources.pieces(one):
            if os.pread(descriptor, len(piece), offset) != piece:
                return one.extension
            offset += len(piece)
    return next(iter(there), None)
