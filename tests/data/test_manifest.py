"""One encoding per manifest; nothing malformed gets in; it is as large as the shards are many."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.data.index import MAX_EXTENSION_BYTES, MAX_EXTENSIONS, MAX_SAMPLES
from p2p_dmc.data.manifest import (
    MAX_CLASSES,
    MAX_MANIFEST_BYTES,
    MAX_SHARDS,
    Manifest,
    ShardEntry,
    class_of,
    content_digest,
)
from p2p_dmc.data.store import Store
from p2p_dmc.errors import RemoteProtocolError
from tests.data.helpers import keys_of, seed_tree, small_tree

FIELDS = ("cls", "jpg", "txt")


def example(**changes: Any) -> Manifest:
    first = ShardEntry(content_digest(b"1"), 1 << 20, 2)
    second = ShardEntry(content_digest(b"2"), 4096, 1)
    settings: dict[str, Any] = {
        "name": "digits", "mode": "file", "replicas": 2, "seed": 7, "fields": FIELDS, "classes": ("a",),
        "shards": (first, second), **changes,
    }  # fmt: skip
    return Manifest(**settings)


def test_entries_come_back() -> None:
    for manifest in (example(), example(generation=3, origin=b"o" * 16, parent=b"p" * 16)):
        again = Manifest.from_bytes(manifest.to_bytes())
        assert again == manifest and again.digest == manifest.digest
        assert len(again) == 3 and again.sample_counts == (2, 1)
        assert again.shard_sizes == (1 << 20, 4096) and again.total_bytes == (1 << 20) + 4096
        assert again.shard_digests == (content_digest(b"1"), content_digest(b"2"))
        assert (again.fields, again.classes) == (FIELDS, ("a",))
        assert (again.mode, again.replicas, again.seed) == ("file", 2, 7)
    assert (again.generation, again.origin, again.parent) == (3, b"o" * 16, b"p" * 16)
    assert again.first == b"o" * 16 and example().first == example().digest


def test_the_bytes_are_msgpack_and_the_digest_is_theirs() -> None:
    data = example().to_bytes()
    assert msgpack.packb(msgpack.unpackb(data)) == data
    assert Manifest.from_bytes(data).digest == example().digest == content_digest(data)


def test_whoever_asks_for_ranges_has_it_encoded_once() -> None:
    manifest = example()
    assert manifest.to_bytes() is manifest.to_bytes()


def test_bytes_are_pinned() -> None:
    assert example().digest.hex() == "6746570afc457c083e6963e00f7e0795"


def test_every_setting_is_part_of_the_digest() -> None:
    base = example()
    changes: tuple[dict[str, Any], ...] = (
        {"name": "d"},
        {"mode": "folder"},
        {"replicas": 3},
        {"seed": 8},
        {"classes": ()},
        {"shards": base.shards[:1]},
        {"generation": 1, "origin": bytes(16), "parent": bytes(16)},
        {"generation": 2, "origin": bytes(16), "parent": bytes(16)},
        {"generation": 1, "origin": bytes(16), "parent": b"p" * 16},
    )
    assert len({example(**change).digest for change in changes} | {base.digest}) == 10


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
        {"version": 1},
        {"version": 3},
        {"generation": -1},
        {"generation": 1},
        {"origin": bytes(16)},
        {"generation": 1, "origin": bytes(16), "parent": bytes(15)},
        {"origin": ""},
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
        {"sizes": np.array([1023, 4096], "<u8").tobytes()},
        {"counts": np.array([2, 2**32 - 1], "<u4").tobytes()},
        {"counts": np.array([2, 0], "<u4").tobytes()},
        {"counts": np.array([2049, 1], "<u4").tobytes()},
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


def test_one_of_an_older_version_says_what_to_do() -> None:
    with pytest.raises(
        RemoteProtocolError, match="version 1, and this program reads version 2: seed the data again"
    ):
        Manifest.from_bytes(msgpack.packb({"version": 1, "name": "digits", "indexes": bytes(100)}))


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


def test_samples_do_not_make_it_larger() -> None:
    small, large = (
        example(classes=(), shards=(ShardEntry(bytes(16), 1 << 36, count),)) for count in (1, MAX_SAMPLES)
    )
    assert len(small.to_bytes()) == len(large.to_bytes())


def test_the_largest_fits(tmp_path: Path) -> None:
    """As many shards as there may be: the bound on the bytes is no tighter than the one on what they say."""
    shard = 16 + 8 + 4
    names = (MAX_EXTENSIONS + MAX_CLASSES) * (MAX_EXTENSION_BYTES + 1)
    assert MAX_SHARDS * shard + names + 1000 <= MAX_MANIFEST_BYTES


def test_real_manifest_round_trip(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    manifest = seed_tree(small_tree(tmp_path / "tree"), store)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    assert manifest.classes == ("class0", "class1", "class2", "class3") and manifest.fields == ("cls", "txt")
    assert len(manifest) == 48 and len(set(keys_of(store, manifest))) == 48
