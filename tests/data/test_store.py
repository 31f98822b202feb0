"""The store: verified before it counts, atomic whatever crashes, bounded, and honest about what it holds."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.data import disk, partial
from p2p_dmc.data.disk import shard_path
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.partial import PartialShard
from p2p_dmc.data.store import ShardMissing, Store, StoreFull
from p2p_dmc.errors import RemoteProtocolError, UserError
from tests.data.helpers import make_tree, seed_tree, small_tree


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A seeded store to fetch from; not to be changed."""
    root = tmp_path_factory.mktemp("origin")
    store = Store(root / "store")
    seed_tree(small_tree(root / "tree"), store)
    return store


@pytest.fixture
def manifest(origin: Store) -> Manifest:
    return origin.manifest(origin.datasets()[0])


@pytest.fixture
def store(tmp_path: Path, manifest: Manifest) -> Store:
    """An empty store that knows the data set."""
    store = Store(tmp_path / "store")
    store.add_manifest(manifest)
    return store


def receive(origin: Store, store: Store, dataset: bytes, index: int, chunk_bytes: int = 4096) -> bool:
    """Fetch a shard in ranges, from the other end."""
    shard = store.open_partial(dataset, index)
    for offset, size in reversed(shard.missing_ranges(chunk_bytes)):
        shard.write(offset, origin.read_range(dataset, index, offset, size))
    return shard.commit()


def files_of(store: Store) -> set[str]:
    return {str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()}


# -- receiving ----------------------------------------------------------------------------------------------


def test_a_received_shard_equals_the_origins_and_survives_reopening(
    origin: Store, store: Store, manifest: Manifest
) -> None:
    d = manifest.digest
    assert store.holdings(d) == frozenset() and not store.has(d, 1)
    assert receive(origin, store, d, 1)
    assert store.has(d, 1) and store.holdings(d) == {1}
    assert store.path(d, 1).read_bytes() == origin.path(d, 1).read_bytes()
    assert files_of(store) == {
        f"{d.hex()}/manifest.msgpack",
        f"{d.hex()}/shards/{manifest.shard_digests[1].hex()}.tar",
    }
    again = Store(store.root)
    assert again.datasets() == (d,) and again.holdings(d) == {1} and again.manifest(d) == manifest


def test_a_wrong_byte_is_found_and_the_file_not_kept(origin: Store, store: Store, manifest: Manifest) -> None:
    d, size = manifest.digest, manifest.shard_sizes[0]
    shard = store.open_partial(d, 0)
    shard.write(0, origin.read_range(d, 0, 0, size))
    good = origin.read_range(d, 0, size // 2, 1)
    shard.write(size // 2, bytes([good[0] ^ 1]))
    assert shard.commit() is False
    assert not store.has(d, 0) and files_of(store) == {f"{d.hex()}/manifest.msgpack"}
    assert receive(origin, store, d, 0)  # from another source


@pytest.mark.parametrize("order", ["onwards", "backwards", "mixed"])
@pytest.mark.parametrize("last", ["right", "wrong", "fails"])
def test_what_counts_is_what_the_file_has_in_whatever_order_it_was_written(
    store: Store, origin: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch, order: str, last: str
) -> None:
    """And whatever was written again over what had been right, or wrong, before."""
    d, size = manifest.digest, manifest.shard_sizes[0]
    whole = origin.read_range(d, 0, 0, size)
    shard = store.open_partial(d, 0)
    ranges = shard.missing_ranges(1000)
    turn = {"onwards": ranges, "backwards": ranges[::-1], "mixed": ranges[::2] + ranges[1::2]}[order]
    for offset, count in turn:
        shard.write(offset, whole[offset : offset + count])
    wrong = bytes(255 - byte for byte in whole[200:400])
    if last == "fails":
        pwrite = os.pwrite

        def half(descriptor: int, data: memoryview, offset: int) -> int:
            if len(data) < 200:
                raise OSError(errno.ENOSPC, "No space left on device")
            return pwrite(descriptor, data[:100], offset)

        monkeypatch.setattr(os, "pwrite", half)
        with pytest.raises(StoreFull):
            shard.write(200, wrong)
        monkeypatch.undo()
    else:
        shard.write(200, wrong)
        if last == "right":
            shard.write(200, whole[200:400])
    assert shard.commit() == (last == "right") == store.has(d, 0)


def test_what_arrived_can_be_read_while_the_whole_is_verified(
    store: Store, origin: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, size = manifest.digest, manifest.shard_sizes[0]
    whole = origin.read_range(d, 0, 0, size)
    shard = store.open_partial(d, 0)
    shard.write(0, whole)
    syncing, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slowly(descriptor: int) -> None:
        syncing.set()
        assert go_on.wait(20.0)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slowly)
    committing = threading.Thread(target=shard.commit)
    committing.start()
    assert syncing.wait(20.0)
    assert shard.read(100, 50) == whole[100:150]
    go_on.set()
    committing.join()
    assert shard.read(100, 50) is None and store.has(d, 0)


def test_commit_of_an_incomplete_shard_is_a_programming_error(store: Store, manifest: Manifest) -> None:
    shard = store.open_partial(manifest.digest, 0)
    shard.write(0, b"x")
    with pytest.raises(ValueError, match="missing"):
        shard.commit()
    assert not shard.closed and not store.has(manifest.digest, 0)


def test_ranges_outside_the_shard_and_writes_after_the_end_are_refused(
    store: Store, manifest: Manifest
) -> None:
    shard = store.open_partial(manifest.digest, 0)
    for offset, data in ((-1, b"x"), (shard.size_bytes, b"x"), (shard.size_bytes - 1, b"xy")):
        with pytest.raises(ValueError, match="outside"):
            shard.write(offset, data)
    shard.abandon()
    shard.abandon()
    with pytest.raises(ValueError, match="abandoned"):
        shard.write(0, b"x")
    with pytest.raises(ValueError, match="abandoned"):
        shard.commit()


def test_the_same_partial_shard_until_it_ends(origin: Store, store: Store, manifest: Manifest) -> None:
    d = manifest.digest
    first = store.open_partial(d, 0)
    first.write(0, b"abc")
    assert store.open_partial(d, 0) is first and first.written_bytes == 3
    first.abandon()
    second = store.open_partial(d, 0)
    assert second is not first and second.missing_ranges(1 << 30) == [(0, second.size_bytes)]
    second.abandon()
    assert receive(origin, store, d, 0)
    with pytest.raises(ValueError, match="held already"):
        store.open_partial(d, 0)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 40)), max_size=12), st.integers(1, 120))
def test_missing_ranges_equal_a_map_of_bytes(
    tmp_path_factory: pytest.TempPathFactory, writes: list[tuple[int, int]], chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("partial")
    told: list[int] = []
    shard = PartialShard(folder / "x", bytes(16), 100, on_written=told.append, on_end=lambda held, left: None)
    oracle = bytearray(100)
    covered = [False] * 100
    for number, (offset, size) in enumerate(writes):
        size = min(size, 100 - offset)
        shard.write(offset, bytes([number + 1]) * size)
        oracle[offset : offset + size] = bytes([number + 1]) * size
        covered[offset : offset + size] = [True] * size
    missing = shard.missing_ranges(chunk)
    assert all(1 <= size <= chunk for _, size in missing)
    assert [i for offset, size in missing for i in range(offset, offset + size)] == [
        i for i in range(100) if not covered[i]
    ]
    assert shard.written_bytes == sum(told) == sum(covered)
    assert (folder / "x.part").read_bytes()[:100].ljust(100, b"\0") == bytes(oracle)
    for start, end in shard.written_ranges:
        assert shard.read(start, end - start) == bytes(oracle[start:end])
        assert shard.read(start, end - start + 1) is None and shard.read(start - 1, 2) is None
    again = PartialShard(folder / "x", bytes(16), 100, on_written=told.append, on_end=lambda held, left: None)
    assert again.written_ranges == shard.written_ranges and again.written_bytes == sum(told)
    shard.abandon()
    assert shard.read(0, 1) is None


def test_notes_that_make_no_sense_cost_a_fetch_and_no_more(
    origin: Store, store: Store, manifest: Manifest
) -> None:
    d, size = manifest.digest, manifest.shard_sizes[0]
    path = store.path(d, 0).with_name(store.path(d, 0).name + ".part")
    for junk in (b"", b"x" * (size + 7), bytes(size) + b"\xff" * 37, bytes(size) + struct.pack("<QQ", 5, 5)):
        path.write_bytes(junk)
        shard = store.open_partial(d, 0)
        assert shard.missing_ranges(1 << 30) == [(0, size)]
        shard.abandon()
    path.write_bytes(bytes(size) + struct.pack("<QQQQ", 0, size, 7, size + 1))  # the whole, after a power cut
    shard = store.open_partial(d, 0)
    assert shard.written_bytes == size and not shard.commit() and not path.exists()
    assert len(shard.bad_blocks) == 1
    assert receive(origin, store, d, 0)


def test_threads_may_share_a_partial_shard(origin: Store, store: Store, manifest: Manifest) -> None:
    d = manifest.digest
    shard = store.open_partial(d, 0)
    ranges = shard.missing_ranges(512)
    random.Random(0).shuffle(ranges)

    def work(part: list[tuple[int, int]]) -> None:
        for offset, size in part:
            shard.write(offset, origin.read_range(d, 0, offset, size))

    threads = [threading.Thread(target=work, args=(ranges[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shard.commit()


# -- room ---------------------------------------------------------------------------------------------------


def test_capacity_counts_what_is_held_and_what_is_on_its_way(
    origin: Store, tmp_path: Path, manifest: Manifest
) -> None:
    d, sizes = manifest.digest, manifest.shard_sizes
    store = Store(tmp_path / "store", capacity_bytes=sizes[0] + sizes[1])
    store.add_manifest(manifest)
    assert receive(origin, store, d, 0)
    assert store.free_bytes() == sizes[1]
    on_its_way = store.open_partial(d, 1)
    assert store.free_bytes() == 0
    with pytest.raises(StoreFull, match="--capacity"):
        store.open_partial(d, 2)
    on_its_way.abandon()
    assert store.free_bytes() == sizes[1]
    store.drop(d, 0)
    store.drop(d, 0)
    assert store.free_bytes() == sizes[0] + sizes[1]
    assert receive(origin, store, d, 1)
    assert Store(store.root, capacity_bytes=sizes[1] + 7).free_bytes() == 7


def test_reserved_room_is_not_counted_twice_against_the_disk(
    origin: Store, store: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, size = manifest.digest, manifest.shard_sizes[0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 1_000_000))  # type: ignore[attr-defined]
    shard = store.open_partial(d, 0)
    assert store.free_bytes() == 1_000_000 - size
    shard.write(0, origin.read_range(d, 0, 0, 5000))
    assert store.free_bytes() == 1_000_000 - size + 5000
    shard.abandon()
    assert store.free_bytes() == 1_000_000
    assert receive(origin, store, d, 0)
    assert store.free_bytes() == 1_000_000


def test_what_an_earlier_life_began_counts_once_and_gives_way_where_room_is_short(
    origin: Store, store: Store, manifest: Manifest
) -> None:
    d, sizes = manifest.digest, manifest.shard_sizes
    for index in (0, 1):
        store.open_partial(d, index).write(0, origin.read_range(d, index, 0, sizes[index] - 1))
    again = Store(store.root, capacity_bytes=sizes[0] + sizes[2])
    assert again.free_bytes() == sizes[0] + sizes[2]  # nobody has asked for them yet
    shard = again.open_partial(d, 0)
    assert shard.written_bytes == sizes[0] - 1 and again.free_bytes() == sizes[2]
    assert again.begun(d, 0) is shard and again.begun(d, 1) is None and again.begun(b"x" * 16, 0) is None
    leftover = store.path(d, 1).with_name(store.path(d, 1).name + ".part")
    assert leftover.exists()
    with pytest.raises(StoreFull):
        again.open_partial(d, 1)
    assert leftover.exists() and again.open_partial(d, 2).written_bytes == 0
    with pytest.raises(StoreFull):
        again.open_partial(d, 3)
    assert not leftover.exists()
    shard.write(sizes[0] - 1, origin.read_range(d, 0, sizes[0] - 1, 1))
    assert shard.commit() and again.verify(d, 0)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_full_disk_is_a_clean_error_and_nothing_is_visible(
    call: str, origin: Store, store: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = manifest.digest
    failed: list[str] = []

    def full(*_: object) -> None:
        failed.append(call)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(partial.os, call, full)
        with pytest.raises(StoreFull, match="No space left"):
            receive(origin, store, d, 0)
    assert failed and not store.has(d, 0)
    if call == "pwrite":
        store.open_partial(d, 0).abandon()
    assert files_of(store) == {f"{d.hex()}/manifest.msgpack"}
    assert receive(origin, store, d, 0)


def test_a_really_full_disk() -> None:
    """The kernel's own refusal says the same as the simulated one."""
    with (
        pytest.raises(StoreFull, match="No space left"),
        disk.disk_errors(Path("x")),
        open("/dev/full", "wb", buffering=0) as full,
    ):
        full.write(b"x")


# -- serving and scrubbing ----------------------------------------------------------------------------------


def test_read_range_checks_what_peers_ask_for(origin: Store, store: Store, manifest: Manifest) -> None:
    d, size = manifest.digest, manifest.shard_sizes[0]
    whole = origin.path(d, 0).read_bytes()
    assert origin.read_range(d, 0, 100, 1000) == whole[100:1100]
    assert origin.read_range(d, 0, size, 0) == b""
    for offset, length in ((-1, 5), (0, -1), (0, size + 1), (size, 1), (1 << 80, 1)):
        with pytest.raises(RemoteProtocolError):
            origin.read_range(d, 0, offset, length)
    for index in (-1, len(manifest.shards)):
        with pytest.raises(RemoteProtocolError):
            origin.read_range(d, index, 0, 1)
        with pytest.raises(RemoteProtocolError):
            store.open_partial(d, index)
    with pytest.raises(ShardMissing):
        store.read_range(d, 0, 0, 1)
    with pytest.raises(LookupError, match="not known"):
        store.read_range(bytes(16), 0, 0, 1)
    assert not store.has(bytes(16), 0)


@pytest.mark.parametrize("damage", ["truncate", "delete"])
def test_a_file_found_short_or_gone_is_held_no_longer(
    damage: str, origin: Store, store: Store, manifest: Manifest
) -> None:
    d = manifest.digest
    assert receive(origin, store, d, 0)
    path = store.path(d, 0)
    os.truncate(path, 1000) if damage == "truncate" else path.unlink()
    with pytest.raises(ShardMissing):
        store.read_range(d, 0, 500, 1000)
    assert not store.has(d, 0) and not path.exists()
    assert receive(origin, store, d, 0)


def test_verify_finds_one_flipped_bit(origin: Store, store: Store, manifest: Manifest) -> None:
    d = manifest.digest
    assert receive(origin, store, d, 0) and receive(origin, store, d, 1)
    assert store.verify(d, 0) and store.verify(d, 1) and not store.verify(d, 2)
    path = store.path(d, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 4
    path.write_bytes(data)
    assert store.verify(d, 0) is False
    assert store.holdings(d) == {1} and not path.exists()


# -- opening ------------------------------------------------------------------------------------------------


def test_opening_removes_leftovers_and_wrong_sizes_but_nothing_else(
    origin: Store, store: Store, manifest: Manifest
) -> None:
    d = manifest.digest
    assert receive(origin, store, d, 0) and receive(origin, store, d, 1)
    os.truncate(store.path(d, 1), 10)
    store.path(d, 2).with_name("leftover.tar.part").write_bytes(b"x")
    for index in (0, 2):
        store.path(d, index).with_name(store.path(d, index).name + ".part").write_bytes(b"x")
    (store.root / "staging-abc/shards").mkdir(parents=True)
    (store.root / "notes.txt").write_text("mine")
    again = Store(store.root)
    assert again.holdings(d) == {0}
    assert files_of(again) == {
        "notes.txt",
        f"{d.hex()}/manifest.msgpack",
        f"{d.hex()}/shards/{manifest.shard_digests[0].hex()}.tar",
        f"{d.hex()}/shards/{manifest.shard_digests[2].hex()}.tar.part",  # it will be gone on with
    }
    assert not (store.root / "staging-abc").exists()


def test_a_damaged_manifest_is_reported_and_mended_without_fetching_again(
    origin: Store, store: Store, manifest: Manifest
) -> None:
    d = manifest.digest
    assert receive(origin, store, d, 0)
    path = store.root / d.hex() / "manifest.msgpack"
    other = Manifest(**{**vars_of(manifest), "seed": 99}).to_bytes()
    for damaged in (b"junk", path.read_bytes()[:-1], other):
        path.write_bytes(damaged)
        again = Store(store.root)
        assert again.datasets() == () and again.damaged == [path.parent]
        again.add_manifest(manifest)
        assert again.holdings(d) == {0}


def vars_of(manifest: Manifest) -> dict[str, object]:
    names = ("name", "mode", "replicas", "seed", "fields", "classes", "shards")
    return {name: getattr(manifest, name) for name in names}


def test_a_root_that_is_a_file_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="--home"):
        Store(tmp_path / "file")


def test_names_of_data_sets(tmp_path: Path, store: Store, manifest: Manifest) -> None:
    assert store.by_name("small") == manifest and store.by_name("other") is None
    store.add_manifest(manifest)  # twice is once
    other = Manifest(**{**vars_of(manifest), "seed": 99})  # type: ignore[arg-type]
    store.add_manifest(other)
    assert store.datasets() == tuple(sorted([manifest.digest, other.digest]))
    with pytest.raises(UserError) as caught:
        store.by_name("small")
    assert manifest.digest.hex() in str(caught.value) and other.digest.hex() in str(caught.value)


def test_seeding_another_data_set_under_a_taken_name_names_both(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    first = seed_tree(make_tree(tmp_path / "one", {"a.t": 1}), store)
    before = files_of(store)
    with pytest.raises(UserError, match=f"'small'.*{first.digest.hex()}"):
        seed_tree(make_tree(tmp_path / "two", {"b.t": 1}), store)
    assert files_of(store) == before and store.datasets() == (first.digest,)


def test_seeding_again_fills_in_what_was_lost(tmp_path: Path) -> None:
    tree, store = small_tree(tmp_path / "tree"), Store(tmp_path / "store", capacity_bytes=1 << 20)
    manifest = seed_tree(tree, store)
    free_bytes = store.free_bytes()
    store.drop(manifest.digest, 1)
    assert seed_tree(tree, store).digest == manifest.digest
    assert store.holdings(manifest.digest) == frozenset(range(len(manifest.shards)))
    assert store.free_bytes() == free_bytes == (1 << 20) - manifest.total_bytes
    assert Store(store.root).holdings(manifest.digest) == store.holdings(manifest.digest)


def test_seeding_while_a_shard_is_on_its_way(origin: Store, tmp_path: Path, manifest: Manifest) -> None:
    d = manifest.digest
    store = Store(tmp_path / "store", capacity_bytes=1 << 20)
    store.add_manifest(manifest)
    one, two = store.open_partial(d, 0), store.open_partial(d, 1)
    assert seed_tree(origin.root.parent / "tree", store).digest == d
    one.write(0, origin.read_range(d, 0, 0, one.size_bytes))
    assert one.commit()
    two.abandon()
    assert store.free_bytes() == (1 << 20) - manifest.total_bytes
    assert all(store.verify(d, index) for index in range(len(manifest.shards)))


def test_only_digests_become_paths(tmp_path: Path) -> None:
    for digest in (b"", b"../../../../etc", bytes(17)):
        with pytest.raises(ValueError, match="16 bytes"):
            shard_path(tmp_path, digest)
    assert shard_path(tmp_path, b"/../../../../etc").name == b"/../../../../etc".hex() + ".tar"


# -- crashes ------------------------------------------------------------------------------------------------

CHILD = """
import os, signal, sys
from pathlib import Path
from p2p_dmc.data import disk, partial, sharding, store as store_module
from p2p_dmc.data.store import Store
from tests.data.helpers import seed_tree

home, origin, tree, point = Path(sys.argv[1]), Store(Path(sys.argv[2])), Path(sys.argv[3]), sys.argv[4]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

store = Store(home)
if point.startswith("seed:"):
    name, after = point[5:].split("@")
    real, calls = getattr(os, name), [0]
    def count(*args, **kwargs):
        calls[0] += 1
        if calls[0] > int(after):
            die()
        return real(*args, **kwargs)
    setattr(os, name, count)
    seed_tree(tree, store)
else:
    dataset = origin.datasets()[0]
    store.add_manifest(origin.manifest(dataset))
    shard = store.open_partial(dataset, 0)
    size = shard.size_bytes
    if point in ("half", "torn", "unnoted"):
        shard.write(0, origin.read_range(dataset, 0, 0, size // 2))
        real, calls = os.pwrite, []
        def pwrite(descriptor, data, offset):
            calls.append(offset)
            if point == "torn" or len(calls) == 2:
                real(descriptor, bytes(data)[: len(data) // 2], offset)
                die()
            return real(descriptor, data, offset)
        if point == "half":
            die()
        os.pwrite = pwrite
    shard.write(0, origin.read_range(dataset, 0, 0, size))
    if point == "synced":
        os.replace = die
    elif point == "renamed":
        partial.sync_folder = die
    shard.commit()
print("survived")
"""


def crash(home: Path, origin: Store, tree: Path, point: str) -> None:
    """Run the child up to its crash point, and see that it really was killed there."""
    command = [sys.executable, "-c", CHILD, str(home), str(origin.root), str(tree), point]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert child.returncode == -signal.SIGKILL and "survived" not in child.stdout, child.stderr


@pytest.mark.parametrize(
    ("point", "held"),
    [("half", False), ("torn", False), ("unnoted", False), ("synced", False), ("renamed", True)],
)
def test_killed_while_receiving(
    point: str, held: bool, origin: Store, tmp_path: Path, manifest: Manifest
) -> None:
    d = manifest.digest
    crash(tmp_path / "store", origin, tmp_path, point)
    left = any(path.name.endswith(".part") for path in (tmp_path / "store").rglob("*"))
    assert left != held  # the crash left something behind, unless the rename had been done
    again = Store(tmp_path / "store")
    assert again.has(d, 0) is held and again.verify(d, 0) is held
    if point in ("half", "torn", "unnoted"):
        shard = again.open_partial(d, 0)
        half = shard.size_bytes // 2
        assert shard.missing_ranges(1 << 30) == [(half, shard.size_bytes - half)]
        assert shard.read(0, half) == origin.read_range(d, 0, 0, half)
    assert held or receive(origin, again, d, 0)
    assert not any(path.name.endswith(".part") for path in again.root.rglob("*"))


@pytest.mark.parametrize("point", ["seed:fsync@0", "seed:fsync@3", "seed:replace@2", "seed:rename@0"])
def test_killed_while_seeding(point: str, origin: Store, tmp_path: Path, manifest: Manifest) -> None:
    tree = origin.root.parent / "tree"
    crash(tmp_path / "store", origin, tree, point)
    assert any(path.name.startswith("staging-") for path in (tmp_path / "store").iterdir())
    again = Store(tmp_path / "store")
    assert again.datasets() == () and list(again.root.iterdir()) == []
    assert seed_tree(tree, again).digest == manifest.digest


def test_killed_just_after_publishing(origin: Store, tmp_path: Path, manifest: Manifest) -> None:
    """The last sync of the root comes after the rename: whatever is there is whole."""
    shards = len(manifest.shards)
    crash(tmp_path / "store", origin, origin.root.parent / "tree", f"seed:fsync@{shards + 3}")
    again = Store(tmp_path / "store")
    assert again.holdings(manifest.digest) == frozenset(range(shards))
    assert all(again.verify(manifest.digest, index) for index in range(shards))


# -- what others do to a store ----------------------------------------------------------------------------------------


def test_a_process_that_lacks_descriptors_loses_no_shard(
    origin: Store, store: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, real = manifest.digest, Path.open
    assert receive(origin, store, d, 0)

    def fail(path: Path, *arguments: object, **given: object) -> object:
        if path.suffix == ".tar":
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return real(path, *arguments, **given)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        with pytest.raises(ShardMissing, match="Too many open files"):
            store.read_range(d, 0, 0, 10)
        with pytest.raises(UserError, match="Too many open files"):
            store.verify(d, 0)
    assert store.has(d, 0) and store.verify(d, 0)


def test_seeding_again_puts_right_what_is_damaged(tmp_path: Path) -> None:
    tree, root = small_tree(tmp_path / "tree"), tmp_path / "store"
    manifest = seed_tree(tree, Store(root))
    right = Store(root).path(manifest.digest, 0).read_bytes()
    Store(root).path(manifest.digest, 0).write_bytes(bytes(len(right)))
    store = Store(root, capacity_bytes=1 << 20)
    free_bytes = store.free_bytes()
    assert seed_tree(tree, store) == manifest
    assert store.path(manifest.digest, 0).read_bytes() == right and store.free_bytes() == free_bytes


def test_the_same_shards_in_two_data_sets_are_two_files_and_count_twice(tmp_path: Path) -> None:
    tree, store = small_tree(tmp_path / "tree"), Store(tmp_path / "store", capacity_bytes=1 << 20)
    one, two = seed_tree(tree, store, name="one"), seed_tree(tree, store, name="two")
    assert one.shards == two.shards
    assert store.free_bytes() == (1 << 20) - one.total_bytes - two.total_bytes
    assert Store(store.root, 1 << 20).free_bytes() == store.free_bytes()


def test_nobody_waits_for_a_verification_to_hear_what_has_arrived(
    origin: Store, store: Store, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, size = manifest.digest, manifest.shard_sizes[0]
    shard = store.open_partial(d, 0)
    shard.write(0, origin.read_range(d, 0, 0, size))
    begun, go_on = threading.Event(), threading.Event()
    told: list[tuple[int, list[tuple[int, int]]]] = []

    def slow(descriptor: int) -> None:
        begun.set()
        assert go_on.wait(60.0)

    monkeypatch.setattr(os, "fsync", slow)
    verifying = threading.Thread(target=shard.commit)
    asking = threading.Thread(target=lambda: told.append((shard.written_bytes, shard.written_ranges)))
    verifying.start()
    assert begun.wait(60.0)
    asking.start()
    asking.join(30.0)
    heard = list(told)
    go_on.set()
    verifying.join()
    asking.join()
    assert heard == [(size, [(0, size)])] and store.has(d, 0)


def test_a_shard_that_is_left_for_a_while_takes_no_descriptor_and_is_gone_on_with(
    origin: Store, store: Store, manifest: Manifest
) -> None:
    d, size = manifest.digest, manifest.shard_sizes[0]
    before = len(os.listdir("/proc/self/fd"))
    shard = store.open_partial(d, 0)
    shard.write(1000, origin.read_range(d, 0, 1000, size - 1000))
    shard.suspend()
    shard.suspend()
    assert len(os.listdir("/proc/self/fd")) == before and store.begun(d, 0) is None
    again = store.open_partial(d, 0)
    assert again is not shard and again.written_ranges == [(1000, size)]
    again.write(0, origin.read_range(d, 0, 0, 1000))
    assert again.commit() and store.verify(d, 0)
