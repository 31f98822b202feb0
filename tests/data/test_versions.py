"""Versions of one data set: shards that they share are one file, and a name means the newest."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.store import ShardMissing, Store
from p2p_dmc.data.versions import is_clash, meant, versions
from p2p_dmc.errors import UserError
from tests.data.helpers import seed_tree, small_tree


def after(manifest: Manifest, shards: slice = slice(None), **changes: object) -> Manifest:
    """A version that follows."""
    return replace(
        manifest,
        shards=manifest.shards[shards],
        classes=(),
        generation=manifest.generation + 1,
        origin=manifest.first,
        parent=manifest.digest,
        **changes,  # type: ignore[arg-type]
    )


@pytest.fixture
def first(tmp_path: Path) -> Manifest:
    return seed_tree(small_tree(tmp_path / "tree"), Store(tmp_path / "store", 1 << 20))


def store_at(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", 1 << 20)


def test_what_is_a_version_and_what_a_clash(first: Manifest) -> None:
    second = after(first)
    third, fork = after(second), after(first, replicas=3)
    assert versions([first, third, second], "small") == [third, second, first]
    assert versions([first], "other") == []
    assert not is_clash(first, first) and not is_clash(first, third) and is_clash(second, fork)
    stranger = replace(first, seed=99)
    for clashing in ([first, stranger], [second, stranger], [first, second, fork]):
        with pytest.raises(UserError, match="different data sets of this name"):
            versions(clashing, "small")


def test_a_version_is_named_by_its_digest(first: Manifest) -> None:
    second = after(first)
    both = [first, second]
    assert meant(both, "small") == [second, first]
    assert meant(iter(both), f"small@{first.digest.hex()[:8]}") == [first]
    assert meant(both, f"small@{first.digest.hex()}") == [first]
    assert meant(both, "small@") == meant(both, f"small@{first.digest.hex()[:3]}") == []
    assert meant(both, f"other@{first.digest.hex()}") == [] and meant(both, "small@ffffffff") == []
    odd = replace(first, name="small@home")
    assert meant([*both, odd], "small@home") == [odd]


def test_shared_shards_are_one_file_and_count_once(tmp_path: Path, first: Manifest) -> None:
    store, second = store_at(tmp_path), after(first, slice(1, None))
    free = store.free_bytes()
    store.add_manifest(second)
    assert store.holdings(second.digest) == frozenset(range(len(second.shards)))
    assert store.by_name("small") == second and store.free_bytes() == free
    for index in range(len(second.shards)):
        assert os.path.samefile(store.path(first.digest, index + 1), store.path(second.digest, index))
    store.drop(first.digest, 1)
    assert store.free_bytes() == free and store.verify(second.digest, 0)
    store.drop(second.digest, 0)
    assert store.free_bytes() == free + first.shard_sizes[1]
    again = store_at(tmp_path)
    assert again.free_bytes() == free + first.shard_sizes[1]
    assert again.holdings(second.digest) == frozenset(range(1, len(second.shards)))


def test_what_comes_for_one_version_is_there_for_the_other(tmp_path: Path, first: Manifest) -> None:
    origin, second = store_at(tmp_path), after(first)
    store = Store(tmp_path / "peer", 1 << 20)
    store.add_manifest(first)
    store.add_manifest(second)
    partial = store.open_partial(second.digest, 2)
    partial.write(0, origin.read_range(first.digest, 2, 0, first.shard_sizes[2]))
    assert partial.commit()
    assert store.holdings(first.digest) == store.holdings(second.digest) == {2}
    assert os.path.samefile(store.path(first.digest, 2), store.path(second.digest, 2))
    assert store.free_bytes() == (1 << 20) - first.shard_sizes[2]


def test_links_that_a_crash_left_out_are_made_when_the_store_is_opened(
    tmp_path: Path, first: Manifest
) -> None:
    second = after(first)
    store_at(tmp_path).add_manifest(second)
    folder = tmp_path / "store" / second.digest.hex() / "shards"
    for path in folder.iterdir():
        path.unlink()
    assert store_at(tmp_path).holdings(second.digest) == frozenset(range(len(second.shards)))


def test_a_damaged_file_is_gone_for_all_versions(tmp_path: Path, first: Manifest) -> None:
    store, second = store_at(tmp_path), after(first)
    store.add_manifest(second)
    with store.path(first.digest, 0).open("r+b") as file:
        file.write(b"damage")
    assert not store.verify(second.digest, 0)
    assert not store.has(first.digest, 0) and not store.path(first.digest, 0).exists()
    os.truncate(store.path(first.digest, 1), 100)
    assert not store.verify(first.digest, 1) and not store.has(second.digest, 1)


def test_without_links_each_version_has_its_own(
    tmp_path: Path, first: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def no_link(source: Path, target: Path) -> None:
        asked.append(target)
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    store, second = store_at(tmp_path), after(first)
    store.add_manifest(second)
    assert asked and store.holdings(second.digest) == frozenset()


def test_who_removes_a_version_by_hand_keeps_the_other(tmp_path: Path, first: Manifest) -> None:
    store, second = store_at(tmp_path), after(first)
    store.add_manifest(second)
    shutil.rmtree(store.root / first.digest.hex())
    with pytest.raises(ShardMissing):
        store.read_range(first.digest, 0, 0, 10)
    assert not store.verify(first.digest, 1)
    assert store.verify(second.digest, 0) and store.verify(second.digest, 1)


def test_a_version_that_lies_about_a_size_shares_nothing(tmp_path: Path, first: Manifest) -> None:
    lies = tuple(replace(shard, size_bytes=shard.size_bytes + 512) for shard in first.shards)
    store, second = store_at(tmp_path), replace(after(first), shards=lies)
    store.add_manifest(second)
    assert store.holdings(second.digest) == frozenset()
    with pytest.raises(ShardMissing):
        store.read_range(second.digest, 0, first.shard_sizes[0], 10)
    assert store.verify(first.digest, 0)


def test_seeding_a_version_again_leaves_one_file(tmp_path: Path, first: Manifest) -> None:
    store, second = store_at(tmp_path), after(first)
    store.add_manifest(second)
    store.path(first.digest, 0).write_bytes(bytes(first.shard_sizes[0]))
    free = store.free_bytes()
    assert seed_tree(tmp_path / "tree", store) == first
    for index in range(len(first.shards)):
        assert os.path.samefile(store.path(first.digest, index), store.path(second.digest, index))
    assert store.verify(second.digest, 0) and store.free_bytes() == free
