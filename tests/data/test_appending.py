"""A version that follows: what was there stays in its shards, what is new is in new ones, nothing else is taken."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.data import writing
from p2p_dmc.data.appending import plan_versions
from p2p_dmc.data.formats import scan
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.readers.base import Spool
from p2p_dmc.data.seeding import Plan, plan_data_sets
from p2p_dmc.data.store import Store
from p2p_dmc.errors import UserError
from tests.data.helpers import make_tree, read_back, small_tree


def seed(path: Path, store: Store, **options: Any) -> list[Manifest]:
    plans = plan_data_sets(scan(path), **{"name": "small", "max_shard_size": 20_000, **options})
    return [plan.write(store, 3) for plan in plans]


def append(path: Path, store: Store, **options: Any) -> list[Manifest]:
    with store.spool_folder() as folder, Spool(folder) as spool:
        plans = plan_versions(scan(path, spool=spool), store, **{"name": "small", **options})
        return [plan if isinstance(plan, Manifest) else plan.write(store, None) for plan in plans]


def grown(tree: Path) -> Path:
    """Two more samples in an old class and some in a new one, one of them of another field."""
    new = {f"class0/new{i}.txt": 100 + i for i in range(2)} | {f"zoo/{i}.txt": 900 for i in range(30)}
    return make_tree(tree, new | {"zoo/a.json": 5})


def test_what_is_new_is_in_new_shards(tmp_path: Path) -> None:
    tree, store = small_tree(tmp_path / "tree"), Store(tmp_path / "store")
    [first] = seed(tree, store)
    before = read_back(store, first)
    [second] = append(grown(tree), store)
    assert (second.generation, second.parent, second.origin) == (1, first.digest, first.digest)
    assert second.shards[: len(first.shards)] == first.shards and len(second.shards) > len(first.shards)
    assert (second.replicas, second.mode, second.name) == (3, "file", "small")
    assert second.fields == ("cls", "json", "txt") and second.classes == (*first.classes, "zoo")
    after = read_back(store, second)
    assert after.keys() - before.keys() == {
        *(f"class0/new{i}" for i in range(2)), *(f"zoo/{i}" for i in range(30)), "zoo/a",
    }  # fmt: skip
    assert {key: after[key] for key in before} == before == read_back(store, first)
    assert after["zoo/a"] == {"json": (tree / "zoo/a.json").read_bytes()}
    [third] = append(make_tree(tree, {"zoo/last.txt": 1}), store)
    assert (third.generation, third.parent, third.origin) == (2, second.digest, first.digest)
    again = Store(store.root)
    assert again.by_name("small") == third and len(again.datasets()) == 3
    links = {path.stat().st_ino for path in store.root.rglob("*.tar")}
    assert len(links) == len(third.shards)


def test_the_same_everywhere(tmp_path: Path) -> None:
    digests = []
    for home in ("a", "b"):
        tree, store = small_tree(tmp_path / home / "tree"), Store(tmp_path / home / "store")
        seed(tree, store)
        digests.append(append(grown(tree), store)[0].digest)
    assert digests[0] == digests[1]


def test_nothing_new_is_the_version_that_is_there(tmp_path: Path) -> None:
    tree, store = small_tree(tmp_path / "tree"), Store(tmp_path / "store")
    [first] = seed(tree, store)
    assert append(tree, store) == [first]
    [second] = append(grown(tree), store)
    assert append(tree, store) == [second]


def test_records_that_were_added_to_a_file(tmp_path: Path) -> None:
    path, store = tmp_path / "rows.jsonl", Store(tmp_path / "store")
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(500)))
    [first] = seed(path, store)
    with path.open("a") as file:
        file.write("".join(json.dumps({"n": n}) + "\n" for n in range(500, 520)))
    [second] = append(path, store)
    assert len(second) == 520 and len(second.shards) == len(first.shards) + 1
    samples = read_back(store, second)
    assert [json.loads(samples[f"{n:09d}"]["json"])["n"] for n in range(520)] == list(range(520))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tree: (tree / "class1/item003.txt").unlink(), "'class1/item003': its field 'txt' is"),
        (
            lambda tree: (tree / "class1/item003.txt").write_bytes(b"x" * 62),
            "'class1/item003': its field 'txt' is another",
        ),
        (lambda tree: (tree / "class1/item003.txt").write_bytes(b"x"), "'class1/item003': its field 'txt'"),
        (lambda tree: (tree / "class1/item003.more").write_bytes(b"x"), "'class1/item003': its field 'more'"),
        (
            lambda tree: [(tree / f"class0/item000.{end}").unlink() for end in ("txt", "cls")],
            r"'class0/item000': a sample of 'small' .* not in the input.*--append only adds",
        ),
        (
            lambda tree: [(tree / f"class3/item011.{end}").unlink() for end in ("txt", "cls")],
            "'class3/item011': a sample of 'small'",
        ),
    ],
)
def test_what_changed_or_is_gone_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    tree, store = small_tree(tmp_path / "tree"), Store(tmp_path / "store")
    [first] = seed(tree, store)
    assert (tree / "class1/item003.txt").stat().st_size == 62
    change(tree)
    with pytest.raises(UserError, match=said):
        append(grown(tree), store)
    assert store.datasets() == (first.digest,) and not list(store.root.glob("*-*"))


def test_an_image_of_a_new_class_that_moves_the_others_numbers_is_a_change(tmp_path: Path) -> None:
    tree, store = tmp_path / "photos", Store(tmp_path / "store")
    seed(make_tree(tree, {f"{name}/{i}.jpg": 50 for name in ("cat", "dog") for i in range(3)}), store)
    assert len(append(make_tree(tree, {"zebra/1.jpg": 9}), store)[0]) == 7
    with pytest.raises(
        UserError, match=r"'cat/\d': its field 'cls' is another than when 'small' .* was made"
    ):
        append(make_tree(tree, {"ant/1.jpg": 9}), store)


def test_a_held_out_sample_stays_held_out(tmp_path: Path) -> None:
    tree, store = small_tree(tmp_path / "tree", folders=5, samples=40), Store(tmp_path / "store")
    first = seed(tree, store, val_fraction=0.2)
    before = [set(read_back(store, one)) for one in first]
    with pytest.raises(
        UserError, match=r"'small-val' holds samples of 'small' out; give the same --val-fraction"
    ):
        append(tree, store)
    with pytest.raises(UserError, match="not in the input"):
        append(tree, store, val_fraction=0.4)
    second = append(grown(tree), store, val_fraction=0.2)
    after = [set(read_back(store, one)) for one in second]
    assert [one.name for one in second] == ["small", "small-val"]
    assert before[0] < after[0] and before[1] <= after[1] and not after[0] & after[1]
    assert len(after[0]) + len(after[1]) == 233


def test_what_cannot_be_appended_to(tmp_path: Path) -> None:
    tree, store = small_tree(tmp_path / "tree"), Store(tmp_path / "store")
    with pytest.raises(UserError, match=r"--append: no data set 'small' in .*; seed it without --append"):
        append(tree, store)
    [first] = seed(tree, store)
    with pytest.raises(UserError, match="--mode folder: 'small' was made with --mode file"):
        append(grown(tree), store, mode="folder")
    for shard in (0, 2):
        with store.path(first.digest, shard).open("r+b") as file:
            file.write(b"damage")
    for said in (
        "were damaged and are deleted; the same command fetches them from the peers that have them, with --join SEED",
        "are not in .*; with --join SEED they are fetched",
    ):
        with pytest.raises(UserError, match=rf"2 of {len(first.shards)} shards of 'small' .*{said}"):
            append(tree, store)


def test_groups_stay_together(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    tree = make_tree(
        tmp_path / "tree", {f"rec{i:02d}/{part}.wav": 3000 for i in range(20) for part in range(3)}
    )
    seed(tree, store, mode="folder")
    make_tree(tree, {f"rec{i:02d}/{part}.wav": 3000 for i in range(18, 30) for part in range(3, 6)})
    plans = plan_versions(scan(tree), store, name="small", max_shard_size=20_000)
    assert isinstance(plans[0], Plan) and plans[0].mode == "folder"
    groups = [group for shard in plans[0].shards for group in {sample.group for sample in shard}]
    assert len(groups) == len(set(groups)) == 12


def test_interrupted_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, root = small_tree(tmp_path / "tree"), tmp_path / "store"
    [first] = seed(tree, Store(root))
    make_tree(tree, {f"zoo/{i}.txt": 9000 for i in range(20)})
    real, calls = writing.os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 2:
            raise KeyboardInterrupt
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(writing.os, "fsync", fsync)
        with pytest.raises(KeyboardInterrupt):
            append(tree, Store(root, keep_staging=True), max_shard_size=20_000)
    store = Store(root, keep_staging=True)
    assert store.datasets() == (first.digest,)
    told: list[int] = []
    [plan] = plan_versions(scan(tree), store, name="small", max_shard_size=20_000)
    assert isinstance(plan, Plan)
    second = plan.write(store, None, on_resumed=told.append)
    assert told == [2] and len(read_back(store, second)) == 68


def test_killed_as_the_version_appears_its_shards_are_shared_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    tree, store = small_tree(tmp_path / "tree"), Store(tmp_path / "store")
    [first] = seed(tree, store)
    real = os.rename

    def rename(source: str, target: str) -> None:
        real(source, target)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", rename)
        with pytest.raises(Killed):
            append(grown(tree), store)
    again = Store(store.root)
    second = again.by_name("small")
    assert second is not None and second.parent == first.digest
    assert again.holdings(second.digest) == frozenset(range(len(second.shards)))
    assert len(read_back(again, second)) == 81
