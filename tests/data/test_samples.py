"""Single samples by offset: what was put in comes out, and a damaged file is an error, never wrong bytes."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from p2p_dmc.data import samples
from p2p_dmc.data.index import SampleEntry
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.samples import SampleReader, ShardDamaged, read_index, read_sample
from p2p_dmc.data.store import Store
from tests.data.helpers import keys_of, make_tree, seed_tree, small_tree


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def seeded(tmp_path: Path) -> tuple[Path, Store, Manifest]:
    tree = make_tree(small_tree(tmp_path / "tree"), {"v1.2/a.b/x.json": 10, "\udcff.txt": 3, "plain": 4})
    store = Store(tmp_path / "store")
    return tree, store, seed_tree(tree, store)


def test_every_sample_in_any_order_equals_the_files(seeded: tuple[Path, Store, Manifest]) -> None:
    tree, store, manifest = seeded
    places = [(i, j) for i, shard in enumerate(manifest.shards) for j in range(shard.sample_count)]
    random.Random(1).shuffle(places)
    seen = set()
    before = open_descriptors()
    with SampleReader(max_open=2) as reader:
        for i, j in places:
            sample = read_sample(store.path(manifest.digest, i), manifest, i, j, reader)
            assert open_descriptors() <= before + 2
            key = sample.pop("__key__")
            assert isinstance(key, str)
            assert sample.pop("__dataset__") == manifest.name
            assert sample.pop("__shard__") == manifest.shards[i].digest.hex()
            seen.add(key)
            for extension, data in sample.items():
                path = tree / (key if key == "plain" else f"{key}.{extension}")
                assert data == path.read_bytes()
    assert open_descriptors() == before
    assert seen == set(keys_of(store, manifest)) and {"v1.2/a.b/x", "\udcff", "plain"} <= seen


def test_without_a_reader_nothing_stays_open(seeded: tuple[Path, Store, Manifest]) -> None:
    _, store, manifest = seeded
    before = open_descriptors()
    assert (
        read_sample(store.path(manifest.digest, 0), manifest, 0, 0)["__key__"] == keys_of(store, manifest)[0]
    )
    assert open_descriptors() == before


def test_short_file_is_an_error_that_names_it(seeded: tuple[Path, Store, Manifest]) -> None:
    _, store, manifest = seeded
    path = store.path(manifest.digest, 0)
    last = manifest.shards[0].sample_count - 1
    index = read_index(path)
    with SampleReader() as reader:
        first = reader.read(path, manifest, 0, 0)
        os.truncate(path, index[last].fields[-1][1])
        with pytest.raises(ShardDamaged, match=path.name):
            reader.read(path, manifest, 0, last)
        assert reader.read(path, manifest, 0, 0) == first
    for read in (lambda: read_sample(path, manifest, 0, 0), lambda: read_index(path)):
        with pytest.raises(ShardDamaged, match=f"{path.name}': index: 'none at the end"):
            read()


def test_replaced_file_is_opened_again(seeded: tuple[Path, Store, Manifest], tmp_path: Path) -> None:
    """After a damaged shard was deleted and fetched again, an open reader must see the new file."""
    _, store, manifest = seeded
    path = store.path(manifest.digest, 0)
    shutil.copy(path, tmp_path / "good")
    tar_bytes = read_index(path).tar_bytes
    path.write_bytes(bytes(tar_bytes) + path.read_bytes()[tar_bytes:])
    last = manifest.shards[0].sample_count - 1
    with SampleReader() as reader:
        wrong = reader.read(path, manifest, 0, last)
        os.replace(tmp_path / "good", path)
        right = reader.read(path, manifest, 0, last)
    assert right != wrong and right == read_sample(path, manifest, 0, last)


def test_gone_file_and_wrong_indexes(seeded: tuple[Path, Store, Manifest]) -> None:
    _, store, manifest = seeded
    path = store.path(manifest.digest, 0)
    for indexes in ((0, 10_000), (0, -1), (10_000, 0), (-1, 0)):
        with pytest.raises(IndexError):
            read_sample(path, manifest, *indexes)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_sample(path, manifest, 0, 0)
    with pytest.raises(ValueError, match="max_open"):
        SampleReader(0)


def test_an_index_of_another_shard_is_an_error(seeded: tuple[Path, Store, Manifest]) -> None:
    _, store, manifest = seeded
    path = store.path(manifest.digest, 0)
    shards = (
        replace(manifest.shards[0], sample_count=manifest.shards[0].sample_count - 1),
        *manifest.shards[1:],
    )
    with pytest.raises(ShardDamaged, match="samples, and the manifest says"):
        read_sample(path, replace(manifest, shards=shards), 0, 0)


def test_many_at_once_come_in_the_order_asked_for(seeded: tuple[Path, Store, Manifest]) -> None:
    _, store, manifest = seeded
    with SampleReader() as reader:
        for shard, count in enumerate(manifest.sample_counts):
            path = store.path(manifest.digest, shard)
            one_by_one = [reader.read(path, manifest, shard, index) for index in range(count)]
            order = [*range(count - 1, -1, -1), 0, 0]
            assert reader.read_many(path, manifest, shard, order) == [one_by_one[index] for index in order]
            assert reader.read_many(path, manifest, shard, []) == []
        with pytest.raises(IndexError):
            reader.read_many(path, manifest, shard, [0, count])


def test_fields_far_apart_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' tars may have a sample's files anywhere; their neighbours in between are not read along."""
    sizes: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: sizes.append(size) or pread(fd, size, at))
    path = tmp_path / "shard"
    path.write_bytes(b"a" * 10 + bytes(100_000) + b"b" * 20)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        far = SampleEntry("key", (("a", 0, 10), ("b", 100_010, 20)))
        near = SampleEntry("key", (("a", 5, 5), ("b", 8, 100)))
        assert samples._sample(str(path), descriptor, far, "d", "s") == {
            "__key__": "key", "__dataset__": "d", "__shard__": "s", "a": b"a" * 10, "b": b"b" * 20,
        }  # fmt: skip
        assert sizes == [10, 20]
        sizes.clear()
        assert samples._sample(str(path), descriptor, near, "d", "s")["b"] == b"aa" + bytes(98)
        assert sizes == [103]
    finally:
        os.close(descriptor)


def test_a_deleted_file_is_closed_when_another_is_opened(seeded: tuple[Path, Store, Manifest]) -> None:
    _, store, manifest = seeded
    first, second = (store.path(manifest.digest, shard) for shard in (0, 1))
    with SampleReader() as reader:
        reader.read(first, manifest, 0, 0)
        first.unlink()
        reader.read(second, manifest, 1, 0)
        assert list(reader._descriptors) == [str(second)]


def test_what_was_found_is_read_though_its_file_is_deleted_before_others_are_found(
    seeded: tuple[Path, Store, Manifest],
) -> None:
    """Its descriptor is closed neither for that nor to make room, and so is no other file's by then."""
    _, store, manifest = seeded
    paths = [store.path(manifest.digest, shard) for shard in (0, 1, 2)]
    wanted = [read_sample(path, manifest, shard, 0) for shard, path in enumerate(paths)]
    before = open_descriptors()
    with SampleReader(max_open=3) as reader:
        reader.read(store.path(manifest.digest, 3), manifest, 3, 0)
        held: set[str] = set()
        found = [reader.find(paths[0], manifest, 0, [0], held)]
        paths[0].unlink()
        found += [reader.find(paths[shard], manifest, shard, [0], held) for shard in (1, 2, 0)]
        assert held == set(map(str, paths)) and open_descriptors() == before + 3
        assert [sample for one in found for _, sample in one.read()] == [*wanted, wanted[0]]
        with pytest.raises(FileNotFoundError):
            reader.find(paths[0], manifest, 0, [0], set())


def preads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets of all reads from here on."""
    offsets: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, at: offsets.append(at) or pread(fd, size, at))
    return offsets


def test_an_index_is_read_once_though_its_file_is_closed_meanwhile(
    seeded: tuple[Path, Store, Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, manifest = seeded
    first, second = (store.path(manifest.digest, shard) for shard in (0, 1))
    shutil.copy(first, tmp_path / "copy")
    offsets, fields = preads(monkeypatch), read_index(first).tar_bytes
    with SampleReader(max_open=1) as reader:

        def reads() -> list[bool]:
            """Whether each read is of the index, when the first shard's first sample is read."""
            reader.read(second, manifest, 1, 0)
            offsets.clear()
            reader.read(first, manifest, 0, 0)
            return [offset >= fields for offset in offsets]

        assert reads() == [True, True, False]  # how long it is, the index, the sample
        assert reads() == [False]
        os.replace(tmp_path / "copy", first)
        assert reads() == [True, True, False]  # another file has its name
        assert reads() == [False]
        os.utime(first, (1, 1))
        assert reads() == [True, True, False]  # it was written to
    assert (reader._closed_bytes, len(reader._closed)) == (0, 0)


def test_indexes_of_closed_files_are_kept_within_bounds(
    seeded: tuple[Path, Store, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, store, manifest = seeded
    paths = [store.path(manifest.digest, shard) for shard in range(len(manifest.shards))]
    room = max(read_index(path).memory_bytes for path in paths)
    monkeypatch.setattr(samples, "MOST_CLOSED_BYTES", room)
    with SampleReader(max_open=1) as reader:
        for _ in range(2):
            for shard, path in enumerate(paths):
                reader.read(path, manifest, shard, 0)
                kept = [index.memory_bytes for _, index in reader._closed.values()]
                assert reader._closed_bytes == sum(kept) <= room and len(reader._indexes) == 1
        monkeypatch.setattr(samples, "MOST_CLOSED_BYTES", room - 1)
        biggest = max(range(len(paths)), key=lambda i: read_index(paths[i]).memory_bytes)
        reader.read(paths[biggest], manifest, biggest, 0)
        reader.read(paths[biggest - 1], manifest, biggest - 1, 0)
        assert str(paths[biggest]) not in reader._closed


def test_of_many_open_files_all_the_deleted_ones_are_closed_soon(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {f"{i}.bin": 30_000 for i in range(12)})
    store = Store(tmp_path / "store")
    manifest = seed_tree(tree, store, max_shard_size=32_000)
    paths = [store.path(manifest.digest, shard) for shard in range(len(manifest.shards))]
    assert len(paths) >= 10
    with SampleReader() as reader:
        for shard in range(6):
            reader.read(paths[shard], manifest, shard, 0)
        for shard in (0, 2, 5):
            paths[shard].unlink()
        for shard in range(6, 10):
            reader.read(paths[shard], manifest, shard, 0)
        assert [paths.index(Path(name)) for name in reader._descriptors] == [1, 3, 4, 6, 7, 8, 9]
