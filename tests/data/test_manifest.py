"""One encoding per manifest; nothing malformed gets in; a million samples stay usable."""

from __future__ import annotations

import random
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.data.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    SampleEntry,
    ShardEntry,
    class_of,
    content_digest,
)
from p2p_dmc.data.store import Store
from p2p_dmc.errors import RemoteProtocolError
from tests.data.helpers import seed_tree, small_tree

FIELDS = ("cls", "jpg", "txt")


def entry(number: int, samples: list[SampleEntry], size_bytes: int = 1 << 20) -> ShardEntry:
    return ShardEntry.build(content_digest(b"%d" % number), size_bytes, samples, FIELDS)


def sample(key: str, at: int, **sizes: int) -> SampleEntry:
    fields = []
    for extension in sorted(sizes):
        fields.append((extension, at, sizes[extension]))
        at += 512 + -(-sizes[extension] // 512) * 512
    return SampleEntry(key, tuple(fields))


def example() -> Manifest:
    first = entry(1, [sample("a/x", 512, jpg=700, cls=1), sample("a/\udcff", 4096, txt=0)])
    second = entry(2, [sample("größe", 1024, txt=5)], 4096)
    return Manifest("digits", "file", 2, 7, FIELDS, ("a",), (first, second))


def test_entries_come_back(tmp_path: Path) -> None:
    manifest = example()
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again == manifest and again.digest == manifest.digest
    assert len(again) == 3 and again.sample_counts == (2, 1)
    assert list(again.keys()) == ["a/x", "a/\udcff", "größe"]
    samples = again.shards[0].samples
    assert list(samples) == [sample("a/x", 512, cls=1, jpg=700), sample("a/\udcff", 4096, txt=0)]
    assert samples[-1] == samples[1] and samples[:1] == (samples[0],)
    for index in (2, -3):
        with pytest.raises(IndexError):
            samples[index]
    assert again.shard_sizes == (1 << 20, 4096) and again.total_bytes == (1 << 20) + 4096
    assert again.shard_digests == (content_digest(b"1"), content_digest(b"2"))
    assert (again.fields, again.classes) == (FIELDS, ("a",))
    assert (again.mode, again.replicas, again.seed) == ("file", 2, 7)


def test_the_bytes_are_msgpack_and_the_digest_is_theirs() -> None:
    """For each of msgpack's three sizes of byte string."""
    for count in (1, 20, 4000):
        samples = [sample(f"k{i}", 512 + 1024 * i, txt=0) for i in range(count)]
        manifest = Manifest("n", "file", 1, 0, FIELDS, (), (entry(1, samples, 8 << 20),))
        data = manifest.to_bytes()
        assert msgpack.packb(msgpack.unpackb(data)) == data
        assert Manifest.from_bytes(data).digest == manifest.digest == content_digest(data)


def test_bytes_are_pinned() -> None:
    assert example().digest.hex() == "ff3dfbb5065ff13e8f8a84d6fe302a62"


def test_every_setting_is_part_of_the_digest() -> None:
    base = example()
    head: dict[str, Any] = {
        "name": "digits", "mode": "file", "replicas": 2, "seed": 7, "fields": FIELDS, "classes": ("a",),
        "shards": base.shards,
    }  # fmt: skip
    changes = {
        "name": "d",
        "mode": "folder",
        "replicas": 3,
        "seed": 8,
        "classes": (),
        "shards": base.shards[:1],
    }
    digests = {Manifest(**{**head, key: value}).digest for key, value in changes.items()}
    assert len(digests | {base.digest}) == 7


def test_class_is_the_top_level_folder() -> None:
    assert [class_of(key) for key in ("a/b/c", "a/b", "a")] == ["a", "a", None]


# -- hostile bytes ------------------------------------------------------------------------------------------


def test_every_truncation_and_trailing_junk_is_refused() -> None:
    data = example().to_bytes()
    for length in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            Manifest.from_bytes(data[:length])
    with pytest.raises(RemoteProtocolError):
        Manifest.from_bytes(data + b"\0")


def test_every_flipped_byte_is_refused_or_another_data_set() -> None:
    data, digest = example().to_bytes(), example().digest
    refused = 0
    for position in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(data)
            changed[position] ^= flip
            try:
                assert Manifest.from_bytes(bytes(changed)).digest == content_digest(bytes(changed)) != digest
            except RemoteProtocolError:
                refused += 1
    assert refused > len(data)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_junk_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Manifest.from_bytes(data)


def repacked(**changes: Any) -> bytes:
    content = msgpack.unpackb(example().to_bytes())
    content.update(changes)
    return bytes(msgpack.packb(content))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"name": ""},
        {"name": "x" * 129},
        {"name": "\x1b[2J"},
        {"name": b"bytes"},
        {"mode": "other"},
        {"replicas": 0},
        {"replicas": True},
        {"replicas": 2.0},
        {"seed": -1},
        {"seed": None},
        {"fields": b"cls\0jpg"},
        {"fields": b"jpg\0cls\0txt"},
        {"fields": b"cls\0cls\0txt"},
        {"fields": b"__key__\0jpg\0txt"},
        {"fields": b"c/s\0jpg\0txt"},
        {"fields": "cls"},
        {"fields": b"\0" * 70_000},
        {"classes": b"a\0b\0c\0d"},
        {"classes": b"\0"},
        {"classes": b"b\0a"},
        {"digests": b""},
        {"digests": bytes(32)},
        {"digests": bytes(31)},
        {"sizes": np.array([1 << 20], "<u8").tobytes()},
        {"sizes": np.array([1 << 41, 4096], "<u8").tobytes()},
        {"sizes": np.array([0, 4096], "<u8").tobytes()},
        {"sizes": np.array([5000, 1024], "<u8").tobytes()},
        {"counts": np.array([2, 2**32 - 1], "<u4").tobytes()},
        {"counts": np.array([2, 0], "<u4").tobytes()},
        {"counts": np.array([3, 1], "<u4").tobytes()},
        {"index_sizes": np.array([2**32 - 1, 2**32 - 1], "<u4").tobytes()},
        {"indexes": b""},
        {"indexes": [b""]},
        {"extra": 1},
    ],
    ids=str,
)
def test_wrong_contents_are_refused(changes: dict[str, Any]) -> None:
    assert Manifest.from_bytes(repacked()) == example()
    with pytest.raises(RemoteProtocolError):
        Manifest.from_bytes(repacked(**changes))


def test_another_encoding_of_the_same_content_is_refused() -> None:
    content = msgpack.unpackb(example().to_bytes())
    data = msgpack.packb(content).replace(b"\xa4seed\x07", b"\xa4seed\xcc\x07")  # 7 in two bytes
    assert msgpack.unpackb(data) == content
    with pytest.raises(RemoteProtocolError, match="canonical"):
        Manifest.from_bytes(data)


def test_fields_may_lie_in_any_order() -> None:
    """As in the tars of other programs."""
    samples = [SampleEntry("k", (("jpg", 2048, 1), ("txt", 512, 1))), SampleEntry("l", (("txt", 1024, 1),))]
    assert list(ShardEntry.build(bytes(16), 4096, samples, FIELDS).samples) == samples


@pytest.mark.parametrize(
    "samples",
    [
        [SampleEntry("k", (("txt", 512, 4000),))],  # ends outside
        [SampleEntry("k", (("txt", 1 << 40, 1),))],  # begins outside
        [SampleEntry("k", (("txt", 512, (1 << 64) - 512),))],  # wraps around
        [SampleEntry("k", (("txt", 512, 600),)), SampleEntry("l", (("txt", 1024, 1),))],  # overlap
        [
            SampleEntry("k", (("txt", 1024, 1),)),
            SampleEntry("l", (("txt", 512, 513),)),
        ],  # overlap the other way
        [SampleEntry("k", (("txt", 512, 1), ("jpg", 1024, 1)))],  # not sorted
        [SampleEntry("k", (("txt", 512, 1), ("txt", 1024, 1)))],  # twice
        [SampleEntry("k", (("txt", 100, 1),))],  # not at a block
        [SampleEntry("k", ())],  # nothing in it
        [SampleEntry("", (("txt", 512, 1),))],
        [SampleEntry("k" * 5000, (("txt", 512, 1),))],
        [SampleEntry("k", tuple((f"{i:02d}", 0, 0) for i in range(17)))],
        [],
    ],
)
def test_index_that_does_not_fit_the_shard_is_refused(samples: list[SampleEntry]) -> None:
    extensions = (
        FIELDS if not samples or len(samples[0].fields) < 17 else tuple(f"{i:02d}" for i in range(17))
    )
    with pytest.raises((ValueError, OverflowError)):
        ShardEntry.build(bytes(16), 4096, samples, extensions)


def test_hostile_lengths_allocate_nothing() -> None:
    """Claims of gigabytes in a few bytes: refused before memory is taken for them."""
    claims = [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\xdc\xff\xff",
    ]
    claims.append(repacked(counts=np.array([2**32 - 1, 2**32 - 1], "<u4").tobytes()))
    tracemalloc.start()
    for data in claims:
        with pytest.raises(RemoteProtocolError):
            Manifest.from_bytes(data)
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


def test_an_oversize_manifest_is_not_even_parsed() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return MAX_MANIFEST_BYTES + 1

    with pytest.raises(RemoteProtocolError, match="more than"):
        Manifest.from_bytes(Huge())


# -- size ---------------------------------------------------------------------------------------------------


def test_two_hundred_thousand_samples_open_quickly_and_lazily() -> None:
    """A fifth of a million here, to be kind to small machines; the cost is linear."""
    shards = []
    for number in range(100):
        keys = [f"class{i % 10}/{number:04d}-{i:06d}" for i in range(2000)]
        samples = [sample(key, 512 + 2048 * i, jpg=700) for i, key in enumerate(keys)]
        shards.append(entry(number, samples, 8 << 20))
    manifest = Manifest("big", "file", 2, 0, FIELDS, tuple(f"class{i}" for i in range(10)), tuple(shards))
    data = manifest.to_bytes()
    assert len(data) < 200_000 * 40
    tracemalloc.start()
    begin = time.perf_counter()
    again = Manifest.from_bytes(data)
    duration_s = time.perf_counter() - begin
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert duration_s < 1.0 and peak_bytes < 3 * len(data)
    chosen = random.Random(0).randrange(2000)
    assert again.shards[57].samples[chosen] == manifest.shards[57].samples[chosen]
    assert len(again) == len(list(again.keys())) == 200_000


def test_real_manifest_round_trip(tmp_path: Path) -> None:
    manifest = seed_tree(small_tree(tmp_path / "tree"), Store(tmp_path / "store"))
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.classes == ("class0", "class1", "class2", "class3") and manifest.fields == ("cls", "txt")
    assert len(manifest) == 48 and len(set(manifest.keys())) == 48
