"""A shard's index: what was put in comes out, and nothing malformed gets in."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from p2p_dmc.data.index import (
    MAX_SAMPLES,
    IndexBuilder,
    SampleEntry,
    ShardIndex,
    encode_key,
    index_bytes,
    tar_bytes_of,
)

FIELDS = ("cls", "jpg", "txt")
TAR_BYTES = 4096


def packed(samples: list[SampleEntry], names: tuple[str, ...] = FIELDS) -> bytes:
    builder = IndexBuilder(names)
    for sample in samples:
        builder.add(encode_key(sample.key), sample.fields)
    return builder.to_bytes()


def opened(samples: list[SampleEntry], names: tuple[str, ...] = FIELDS) -> ShardIndex:
    data = packed(samples, names)
    return ShardIndex(data, TAR_BYTES + len(data))


SAMPLES = [
    SampleEntry("a/x", (("cls", 512, 1), ("jpg", 1536, 700))),
    SampleEntry("a/\udcff", (("txt", 3072, 0),)),
    SampleEntry("größe", (("txt", 1024, 5),)),  # where in the file is free
]


def test_entries_come_back() -> None:
    index = opened(SAMPLES)
    assert list(index) == SAMPLES and len(index) == 3
    assert index[-1] == SAMPLES[-1] and index[:2] == tuple(SAMPLES[:2])
    assert list(index.keys()) == ["a/x", "a/\udcff", "größe"] and index.key(1) == "a/\udcff"
    assert index.extensions == FIELDS and index.tar_bytes == TAR_BYTES
    for wrong in (3, -4):
        with pytest.raises(IndexError):
            index[wrong]


def test_its_size_is_known_before() -> None:
    keys = sum(len(encode_key(sample.key)) for sample in SAMPLES)
    assert len(packed(SAMPLES)) == index_bytes(len(b"cls_jpg_txt"), 3, 4, keys)


def test_it_is_found_at_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    data = packed(SAMPLES)
    for content, tar_bytes in ((bytes(TAR_BYTES) + data, TAR_BYTES), (bytes(5000), 5000), (b"", 0)):
        path.write_bytes(content)
        with path.open("rb") as file:
            assert tar_bytes_of(file.fileno()) == tar_bytes
            if content.endswith(data):
                assert list(ShardIndex.read(file.fileno())) == SAMPLES
            else:
                with pytest.raises(ValueError, match=r"shard|index"):
                    ShardIndex.read(file.fileno())


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = packed(SAMPLES)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=":"):
            ShardIndex(data[:length], TAR_BYTES + length)
    path = tmp_path / "shard"
    path.write_bytes(bytes(TAR_BYTES) + data)
    os.truncate(path, TAR_BYTES + len(data) - 1)
    with path.open("rb") as file, pytest.raises(ValueError, match="none at the end"):
        ShardIndex.read(file.fileno())


def test_every_flipped_byte_is_refused_or_harmless() -> None:
    """Digests find these; what an author meant so must not lead a reader outside the tar."""
    data = packed(SAMPLES)
    refused = 0
    for position in range(len(data)):
        for flip in (1, 0x80, 0xFF):
            changed = bytearray(data)
            changed[position] ^= flip
            try:
                index = ShardIndex(bytes(changed), TAR_BYTES + len(changed))
            except ValueError:
                refused += 1
                continue
            for _, offset, size in (one for sample in index for one in sample.fields):
                assert 0 <= offset <= offset + size <= TAR_BYTES
    assert refused > len(data)


@pytest.mark.parametrize(
    "samples",
    [
        [SampleEntry("k", (("txt", 512, 4000),))],  # ends outside
        [SampleEntry("k", (("txt", 1 << 30, 1),))],  # begins outside
        [SampleEntry("k", (("txt", 512, (1 << 64) - 512),))],  # wraps around
        [SampleEntry("k", (("txt", 512, 600),)), SampleEntry("l", (("txt", 1024, 1),))],  # overlap
        [SampleEntry("k", (("txt", 1024, 1),)), SampleEntry("l", (("txt", 512, 513),))],  # the other way
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
def test_what_does_not_fit_the_shard_is_refused(samples: list[SampleEntry]) -> None:
    names = FIELDS if not samples or len(samples[0].fields) < 17 else tuple(f"{i:02d}" for i in range(17))
    with pytest.raises(ValueError, match=r":|block"):
        opened(samples, names)


def test_claims_of_gigabytes_in_a_few_bytes_are_refused() -> None:
    for counts in (
        (0, MAX_SAMPLES + 1, 1, 1),
        (0, 1, (1 << 32) - 1, 1),
        (0, 1, 1, (1 << 64) - 1),
        (9, 1, 1, 1),
    ):
        data = struct.pack("<IIIQ8s", *counts, b"dmcindex")
        with pytest.raises(ValueError, match="index"):
            ShardIndex(data, TAR_BYTES + len(data))


def test_names_of_fields_are_checked() -> None:
    fields = [SampleEntry("k", (("b", 512, 1),))]
    for names in (("b", "a"), ("b", "b"), ("", "b"), ("a/", "b")):
        with pytest.raises(ValueError, match="field name"):
            opened(fields, names)
