"""Plans keep samples and groups whole; shards are deterministic tar that other programs read."""

from __future__ import annotations

import hashlib
import io
import os
import re
import subprocess
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.data import sources, writing
from p2p_dmc.data.formats import scan
from p2p_dmc.data.found import FileField, Samples, Scan
from p2p_dmc.data.samples import read_index
from p2p_dmc.data.sharding import Shard, plan_shards
from p2p_dmc.data.store import Store, StoreFull
from p2p_dmc.data.tar import tar_header
from p2p_dmc.data.writing import write_shards
from p2p_dmc.errors import UserError
from tests.data.helpers import content, make_tree, seed_tree, small_tree

KIB = 1024


def fake_scan(sizes: dict[str, int], depth: int = 1) -> Scan:
    samples = ((key, [FileField("t", f"/{key}", sizes[key])]) for key in sorted(sizes))
    return Scan(Path("/"), Samples.of(samples, depth))


def tar_size(shard: Shard) -> int:
    """What the file will have, from the parts of tar: headers, padded contents, two zero blocks."""
    return 1024 + sum(512 + -(-size // 512) * 512 for sample in shard for _, _, size, *_ in sample.fields)


def keys(shards: list[Shard]) -> list[list[str]]:
    return [[sample.key for sample in shard] for shard in shards]


plans = st.dictionaries(
    st.builds(lambda folder, name: f"{folder}/{name}", st.sampled_from("abcde"), st.integers(0, 30)),
    st.integers(0, 9000),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(
    plans, st.sampled_from(["file", "folder"]), st.integers(1, 30_000), st.sampled_from(["shuffle", "keep"])
)
def test_every_sample_once_and_no_shard_too_large(
    sizes: dict[str, int], mode: str, limit: int, order: str
) -> None:
    shards = plan_shards(fake_scan(sizes), mode=mode, max_shard_size=limit, order=order, seed=1)  # type: ignore[arg-type]
    assert Counter(key for shard in keys(shards) for key in shard) == Counter(sizes.keys())
    assert all(shards)
    groups = [{sample.group for sample in shard} for shard in shards]
    if mode == "folder":
        assert sum(len(group) for group in groups) == len({key.split("/")[0] for key in sizes})
    for shard, group in zip(shards, groups, strict=True):
        whole = len(group) == 1 if mode == "folder" else len(shard) == 1
        assert tar_size(shard) <= limit or whole


@settings(max_examples=30)
@given(plans, st.integers(2000, 30_000))
def test_shards_are_filled(sizes: dict[str, int], limit: int) -> None:
    """Two neighbours would not fit into one: at most twice the shards that the bytes need."""
    shards = [s for s in plan_shards(fake_scan(sizes), max_shard_size=limit) if tar_size(s) <= limit]
    for one, other in pairwise(shards):
        assert tar_size(one) + tar_size(other[:1]) - 1024 > limit


def test_auto_size_is_a_256th_between_64_kib_and_64_mib() -> None:
    few = fake_scan({f"{i:03d}": 10_000 for i in range(100)})
    assert max(map(tar_size, plan_shards(few))) <= 64 * KIB
    assert len(plan_shards(few)) == 17  # six samples of 10 752 bytes of tar and the trailer fill 64 KiB
    medium = fake_scan({f"{i:05d}": 100_000 for i in range(1000)})
    assert len(plan_shards(medium)) in range(256, 350)
    large = fake_scan({f"{i:05d}": 1 << 28 for i in range(1000)})
    assert [len(shard) for shard in plan_shards(large)] == [1] * 1000


def test_shuffle_spreads_classes_and_depends_on_the_seed_alone() -> None:
    data = fake_scan({f"c{i // 100}/{i:04d}": 100 for i in range(1000)})
    shards = plan_shards(data, max_shard_size=64 * KIB, seed=5)
    assert all(len({sample.key.split("/")[0] for sample in shard}) >= 8 for shard in shards[:-1])
    backwards = [(sample.key, sample.fields) for sample in data.samples[::-1]]
    reordered = Scan(data.root, Samples.of(backwards))
    assert keys(plan_shards(reordered, max_shard_size=64 * KIB, seed=5)) == keys(shards)
    assert keys(plan_shards(data, max_shard_size=64 * KIB, seed=6)) != keys(shards)


def test_keep_is_key_order() -> None:
    data = fake_scan({f"c{i // 100}/{i:04d}": 100 for i in range(300)})
    shards = plan_shards(data, max_shard_size=20_000, order="keep")
    assert [key for shard in keys(shards) for key in shard] == [sample.key for sample in data.samples]


def test_an_oversize_group_gets_a_shard_of_its_own_size() -> None:
    data = fake_scan({**{f"big/{i}": 5000 for i in range(10)}, **{f"s{i}/x": 100 for i in range(6)}})
    shards = plan_shards(data, mode="folder", max_shard_size=8000)
    assert sorted(len(shard) for shard in shards) == [6, 10]


def test_the_shuffle_is_pinned() -> None:
    """A permutation of our own: this order is part of the format, on every machine and version."""
    data = fake_scan({f"{i}": 1 for i in range(10)})
    assert keys(plan_shards(data, seed=0)) == [["5", "2", "7", "1", "0", "8", "3", "9", "6", "4"]]


def test_wrong_settings_are_the_users_mistake() -> None:
    data = fake_scan({"a": 1})
    for bad in (-1, 1 << 64):
        with pytest.raises(UserError, match="seed"):
            plan_shards(data, seed=bad)
    with pytest.raises(UserError, match="--max-shard-size 0"):
        plan_shards(data, max_shard_size=0)
    with pytest.raises(UserError, match="split it"):
        plan_shards(fake_scan({"a": 1 << 41}))


# -- tar ----------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), min_size=1, max_size=300)
    | st.text(st.sampled_from("ab/é\udcff\udc80\n="), min_size=1, max_size=300),
    st.sampled_from([0, 1, 511, 512, 513, 8**11 - 1, 8**11, 1 << 39]),
)
def test_headers_say_the_same_to_tarfile(name: str, size: int) -> None:
    name = "x" + name.rstrip("/") + "x"
    header = tar_header(name.encode("utf-8", "surrogateescape"), size)
    assert len(header) % 512 == 0
    file = io.BytesIO(header + bytes(1024))
    member = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape").next()
    assert member is not None
    assert (member.name, member.size, member.mode, member.mtime, member.uid) == (name, size, 0o644, 0, 0)
    assert member.isfile() and member.uname == member.gname == ""


def test_header_bytes_are_pinned() -> None:
    short, long = tar_header(b"a/b.txt", 5), tar_header("größe".encode() * 30, 5)
    assert [len(short), len(long)] == [512, 1536]
    assert hashlib.sha256(short).hexdigest()[:16] == "acfe5f96d68a68d2"
    assert hashlib.sha256(long).hexdigest()[:16] == "01e803abe7cfd3b5"


# -- writing ------------------------------------------------------------------------------------------------


def test_shards_open_with_tarfile_and_match_the_manifest(tmp_path: Path) -> None:
    odd = ["d/größe.txt", "d/" + "l" * 150 + ".txt", "\udcff.txt", "Makefile", "d/new\nline.txt", "a.tar.gz"]
    tree = make_tree(small_tree(tmp_path / "tree"), {name: 700 + i for i, name in enumerate(odd)})
    store = Store(tmp_path / "store")
    manifest = seed_tree(tree, store)
    assert len(manifest.shards) > 3
    read = {}
    for index, shard in enumerate(manifest.shards):
        data = store.path(manifest.digest, index).read_bytes()
        assert len(data) == shard.size_bytes
        entries = read_index(store.path(manifest.digest, index))
        assert hashlib.blake2b(data, digest_size=16).digest() == shard.digest
        with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
            members = tar.getmembers()
            names = [f"{entry.key}.{field[0]}" for entry in entries for field in entry.fields]
            assert [member.name for member in members] == names
            places = [field[1:] for entry in entries for field in entry.fields]
            assert [(member.offset_data, member.size) for member in members] == places
            for member in members:
                file = tar.extractfile(member)
                assert file is not None
                read[member.name.removesuffix(".bin")] = file.read()
    assert read == {f"{p.relative_to(tree)}": p.read_bytes() for p in tree.rglob("*") if p.is_file()}
    assert store.holdings(manifest.digest) == frozenset(range(len(manifest.shards)))


def test_gnu_tar_lists_the_shards(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    manifest = seed_tree(
        make_tree(tmp_path / "tree", {"d/" + "l" * 150 + ".txt": 9, "a/größe.txt": 2}), store
    )
    command = ["tar", "--list", "--quoting-style=literal", "--file", str(store.path(manifest.digest, 0))]
    listing = subprocess.run(command, capture_output=True, check=True)
    assert listing.stderr == b""
    assert sorted(listing.stdout.decode().splitlines()) == ["a/größe.txt", "d/" + "l" * 150 + ".txt"]


def test_webdatasets_rule_finds_the_same_samples_for_names_with_one_dot(tmp_path: Path) -> None:
    """Its rule: the key ends at the first dot of the last part; a new key begins a new sample."""
    store = Store(tmp_path / "store")
    manifest = seed_tree(small_tree(tmp_path / "tree"), store)
    rule = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
    for index in range(len(manifest.shards)):
        grouped: list[tuple[str, list[str]]] = []
        with tarfile.open(store.path(manifest.digest, index)) as tar:
            for name in tar.getnames():
                match = rule.match(name)
                assert match is not None
                if not grouped or grouped[-1][0] != match[1]:
                    grouped.append((match[1], []))
                grouped[-1][1].append(match[2])
        assert grouped == [
            (entry.key, [field[0] for field in entry.fields])
            for entry in read_index(store.path(manifest.digest, index))
        ]


def test_same_input_same_bytes_whatever_the_file_times(tmp_path: Path) -> None:
    first = seed_tree(small_tree(tmp_path / "one"), Store(tmp_path / "s1"))
    other = small_tree(tmp_path / "two")
    for i, path in enumerate(sorted(other.rglob("*.txt"))):
        os.utime(path, (i, i))
        path.chmod(0o600)
    second = seed_tree(other, Store(tmp_path / "s2"))
    assert first.digest == second.digest
    assert first.to_bytes() == second.to_bytes()
    assert first.digest.hex() == "8c3146de634dde72ac68b1b4667c943e"  # the format has not changed
    assert seed_tree(other, Store(tmp_path / "s3"), seed=4).shard_digests != first.shard_digests


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    store = Store(tmp_path / "store")
    found = scan(small_tree(tmp_path / "tree"))
    shards = plan_shards(found, max_shard_size=20_000)
    manifest = write_shards(
        shards,
        store,
        scan=found,
        name="n",
        mode="file",
        replicas=1,
        seed=0,
        progress=lambda *call: calls.append(call),
    )
    assert calls[-1] == (manifest.total_bytes, manifest.total_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_a_file_that_grows_shrinks_or_vanishes_is_named(tmp_path: Path) -> None:
    for change in (lambda p: p.write_bytes(b"longer than before"), lambda p: p.write_bytes(b""), Path.unlink):
        tree = make_tree(tmp_path / "tree", {"d/x.t": 5, "d/y.t": 5})
        found = scan(tree)
        shards = plan_shards(found)
        change(tree / "d/y.t")
        store = Store(tmp_path / "store")
        with pytest.raises(UserError, match=r"d/y\.t"):
            write_shards(shards, store, scan=found, name="n", mode="file", replicas=1, seed=0)
        assert store.datasets() == () and list(store.root.iterdir()) == []


def test_no_room_is_said_before_anything_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", capacity_bytes=10_000)
    with pytest.raises(StoreFull, match="--capacity"):
        seed_tree(small_tree(tmp_path / "tree"), store)
    assert list(store.root.iterdir()) == [] and store.free_bytes() == 10_000


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing.os, "fsync", full)
    with pytest.raises(StoreFull, match="No space left"):
        seed_tree(small_tree(tmp_path / "tree"), store)
    assert len(calls) == 3 and list(store.root.iterdir()) == []


def test_wrong_name_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "tree", {"x.t": 1})
    for name in ("", "bell\a", "x" * 129):
        calls: list[object] = []
        monkeypatch.setattr(writing, "_write_shard", calls.append)
        with pytest.raises(UserError, match="name"):
            seed_tree(tree, Store(tmp_path / "store"), name=name)
        assert calls == []  # said before anything is written


def test_memory_stays_at_a_piece_for_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "tree", {"big.t": 300_000})
    monkeypatch.setattr(sources, "PIECE_BYTES", 4096)
    pieces = [len(piece) for piece in sources.Sources({}).whole(str(tree / "big.t"), 300_000)]
    assert max(pieces) == 4096 and sum(pieces) == 300_000
    assert content("big.t", 300_000) == b"".join(sources.Sources({}).whole(str(tree / "big.t"), 300_000))
