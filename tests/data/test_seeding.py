"""From an input to data sets: what is recognised, held-out splits, dry runs, interrupted seeding."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from p2p_dmc.agent import seed_command
from p2p_dmc.cli import main
from p2p_dmc.data import writing
from p2p_dmc.data.formats import scan
from p2p_dmc.data.found import Samples
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.readers import base
from p2p_dmc.data.readers.base import Spool
from p2p_dmc.data.seeding import Plan, plan_data_sets, split
from p2p_dmc.data.sharding import plan_shards, settle_mode
from p2p_dmc.data.store import Store, StoreFull
from p2p_dmc.errors import UserError
from p2p_dmc.observe.console import Console
from tests.data.helpers import content, make_tree, read_back, small_tree, take

# -- ImageFolder --------------------------------------------------------------------------------------------------


def images(root: Path, *names: str) -> Path:
    return make_tree(root, {name: 5 + len(name) for name in names})


def test_image_folder_gets_its_classes_numbers(tmp_path: Path) -> None:
    folder = images(tmp_path / "pets", "dog/1.jpg", "dog/deep/2.PNG", "cat/1.jpeg", "ant/x.webp", ".DS_Store")
    assert scan(folder).kind == "ImageFolder of 3 classes"
    manifest, samples = take(folder, tmp_path)
    assert manifest.classes == ("ant", "cat", "dog")
    assert {key: sample["cls"] for key, sample in samples.items()} == {
        "dog/1": b"2",
        "dog/deep/2": b"2",
        "cat/1": b"1",
        "ant/x": b"0",
    }
    assert samples["dog/1"]["jpg"] == content("dog/1.jpg", 14)


@pytest.mark.parametrize(
    "names",
    [
        ("a/1.jpg", "loose.jpg"),
        ("a/1.jpg", "b/1.txt"),
        ("a/1.jpg", "a/1.png"),  # one sample of two images
        ("train/a/1.jpg", "test/a/1.jpg"),
        ("1.jpg", "2.jpg"),
    ],
)
def test_what_is_no_image_folder(tmp_path: Path, names: tuple[str, ...]) -> None:
    found = scan(images(tmp_path / "x", *names))
    assert found.kind == "folder of files" and "cls" not in found.extensions


def test_images_of_one_class_by_exclusion(tmp_path: Path) -> None:
    folder = images(tmp_path / "x", "a/1.jpg", "b/1.jpg", "b/about.txt")
    assert scan(folder, exclude=["*.txt"]).kind == "ImageFolder of 2 classes"
    assert scan(folder, exclude=["**/b/*"]).kind == "ImageFolder of 1 classes"


# -- what is recognised -------------------------------------------------------------------------------------------


def test_records_among_other_files_are_files(tmp_path: Path) -> None:
    folder = images(tmp_path / "x", "a/1.jpg", "labels.csv", "b.jsonl", "array.npy", "pairs.npz")
    found = scan(folder)
    assert found.kind == "folder of files" and found.extensions == ("csv", "jpg", "jsonl", "npy", "npz")
    (folder / "labels.csv").write_text("name,label\na/1,3\n")
    assert scan(folder, include=["*.csv"]).kind == "CSV"
    two = images(tmp_path / "y", "a.csv", "b.jsonl")
    assert scan(two).kind == "folder of files"


def test_arrays_in_a_folder_are_files_and_alone_are_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((4, 2)))
    assert len(scan(tmp_path).samples) == 1
    assert len(scan(tmp_path / "a.npy").samples) == 4


def test_exclude_and_include_together(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a.py": 1, "p/b.py": 1, "p/test_b.py": 1, "c.txt": 1})
    found = scan(tmp_path, include=["*.py"], exclude=["**/test_*"])
    assert [sample.key for sample in found.samples] == ["a", "p/b"]
    assert found.skipped.excluded == 2


def test_auto_mode_keeps_many_small_folders_together(tmp_path: Path) -> None:
    recordings = {f"rec{i:03d}/{part}.wav": 3000 for i in range(60) for part in range(3)}
    assert settle_mode(scan(make_tree(tmp_path / "a", recordings)), "auto") == "folder"
    few = {f"class{i % 4}/{i:03d}.wav": 3000 for i in range(180)}
    assert settle_mode(scan(make_tree(tmp_path / "b", few)), "auto") == "file"
    loose = {**recordings, "loose.wav": 1}
    assert settle_mode(scan(make_tree(tmp_path / "c", loose)), "auto") == "file"
    [plan] = plan_data_sets(scan(tmp_path / "a"), name="a", mode="auto")
    assert plan.mode == "folder"
    groups = [{sample.group for sample in shard} for shard in plan.shards]
    assert sum(map(len, groups)) == 60


# -- held out -----------------------------------------------------------------------------------------------------


def keys(samples: Samples) -> list[str]:
    return [sample.key for sample in samples]


def test_held_out_samples_are_in_no_other_data_set(tmp_path: Path) -> None:
    found = scan(small_tree(tmp_path / "tree", folders=5, samples=60))
    store = Store(tmp_path / "store")
    plans = plan_data_sets(found, name="small", val_fraction=0.2, max_shard_size=20_000)
    assert [plan.name for plan in plans] == ["small", "small-val"]
    train, held_out = (read_back(store, plan.write(store, 2)) for plan in plans)
    assert not set(train) & set(held_out) and set(train) | set(held_out) == set(keys(found.samples))
    assert 30 <= len(held_out) <= 90
    assert held_out == {key: take(tmp_path / "tree", tmp_path / "all")[1][key] for key in held_out}


def test_a_sample_stays_on_its_side_whatever_else_is_there(tmp_path: Path) -> None:
    small_tree(tmp_path, folders=3, samples=40)
    before = [set(keys(part.samples)) for part in split(scan(tmp_path), 0.3, "file")]
    make_tree(tmp_path, {f"new/{i}.txt": 3 for i in range(100)})
    after = [set(keys(part.samples)) for part in split(scan(tmp_path), 0.3, "file")]
    assert before[0] < after[0] and before[1] < after[1]
    larger = set(keys(split(scan(tmp_path), 0.5, "file")[1].samples))
    assert after[1] < larger


def test_folder_mode_holds_out_whole_groups(tmp_path: Path) -> None:
    found = scan(small_tree(tmp_path, folders=30, samples=4))
    train, held_out = split(found, 0.3, "folder")
    groups = [{sample.group for sample in part.samples} for part in (train, held_out)]
    assert all(groups) and not groups[0] & groups[1]


def test_a_fraction_that_leaves_one_side_empty(tmp_path: Path) -> None:
    found = scan(make_tree(tmp_path, {"a.txt": 1, "b.txt": 2}))
    for fraction, side in ((1e-9, "none"), (1 - 1e-9, "all")):
        with pytest.raises(UserError, match=rf"--val-fraction .*{side} of 2 samples"):
            split(found, fraction, "file")


# -- dry runs -----------------------------------------------------------------------------------------------------


def dry_run(path: Path, *words: str) -> Result:
    home = path.parent / "home"
    done = CliRunner().invoke(
        main, ["seed-dataset", str(path), "--dry-run", "--home", str(home), *words], catch_exceptions=False
    )
    assert not home.exists()
    return done


def test_a_dry_run_says_what_would_be_and_writes_nothing(tmp_path: Path, capfdbinary: object) -> None:
    path = tmp_path / "texts.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"n": %d}\n' % i for i in range(500))))
    before = sorted(tmp_path.iterdir())
    done = dry_run(path, "--json", "--val-fraction", "0.1", "--name", "texts")
    assert done.exit_code == 0, done.output
    assert sorted(tmp_path.iterdir()) == before
    out, err = capfdbinary.readouterr()  # type: ignore[attr-defined]
    facts = [json.loads(line) for line in out.splitlines()]
    found = scan(path)
    with Spool(None):
        plans = plan_data_sets(found, name="texts", val_fraction=0.1)
    for fact, plan in zip(facts, plans, strict=True):
        assert (fact["name"], fact["recognised"], fact["samples"]) == (plan.name, "JSONL", plan.sample_count)
        assert fact["shard_bytes"] == plan.shard_sizes()
    said = err.decode().splitlines()
    assert (
        said[0].startswith(f"{path}: JSONL, 500 samples with fields json, ")
        and said[-1] == "nothing was written"
    )
    assert [line for line in said if line.startswith("data set ")] == [said[1], said[3]]
    assert said[1].startswith("data set 'texts' would be ") and said[3].startswith(
        "data set 'texts-val' would"
    )
    assert said[-2].startswith("it has to be converted, which takes 4.8 KiB more in ")


def test_sizes_of_a_dry_run_are_those_that_are_written(tmp_path: Path) -> None:
    tree = make_tree(small_tree(tmp_path / "tree"), {"d/" + "l" * 150 + ".größe": 9})
    [plan] = plan_data_sets(scan(tree), name="n", max_shard_size=20_000)
    manifest = plan.write(Store(tmp_path / "store"), 1)
    assert plan.shard_sizes() == list(manifest.shard_sizes)


# -- interrupted --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for a process that ends without another word."""


def interrupted(plan: Plan, store: Store, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Write until ``after`` shards are whole and one is begun."""
    real, calls = writing.os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > after:
            raise Killed
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(writing.os, "fsync", fsync)
        with pytest.raises(Killed):
            plan.write(store, 1)
    assert len(calls) == after + 1


def seeder(root: Path) -> Store:
    """The store as seed-dataset opens it."""
    return Store(root, keep_staging=True)


def resumed(plan: Plan, store: Store) -> tuple[Manifest, list[int]]:
    """Write it in another life; how many shards were there."""
    told: list[int] = []
    manifest = plan.write(store, 1, on_resumed=told.append)
    assert not list(store.root.glob("staging-*"))
    return manifest, told


def small_plan(tree: Path, spool: Spool | None = None) -> Plan:
    return plan_data_sets(scan(tree, spool=spool), name="small", max_shard_size=20_000)[0]


def test_interrupted_seeding_goes_on_after_the_last_whole_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = small_tree(tmp_path / "tree")
    whole = small_plan(tree).write(Store(tmp_path / "whole"), 1)
    interrupted(small_plan(tree), seeder(tmp_path / "store"), monkeypatch, after=2)
    touched = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*.tar")}
    assert len(touched) == 2
    manifest, told = resumed(small_plan(tree), seeder(tmp_path / "store"))
    assert told == [2] and manifest.digest == whole.digest
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*.tar")}
    assert all(after[path.name] == when for path, when in touched.items())
    assert read_back(Store(tmp_path / "store"), manifest) == read_back(Store(tmp_path / "whole"), whole)


def test_converted_data_go_on_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "texts.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"n": %d}\n' % i for i in range(200))))
    store = seeder(tmp_path / "store")
    with store.spool_folder() as folder, Spool(folder) as spool:
        interrupted(small_plan(path, spool), store, monkeypatch, after=3)
    store = seeder(tmp_path / "store")
    with store.spool_folder() as folder, Spool(folder) as spool:
        manifest, told = resumed(small_plan(path, spool), store)
    assert told == [3]
    samples = read_back(Store(store.root), manifest)
    assert [json.loads(samples[key]["json"])["n"] for key in sorted(samples)] == list(range(200))


@pytest.mark.parametrize(
    "change",
    [
        lambda tree, staging: os.utime(tree / "class0/item001.txt", ns=(1, 1)),
        lambda tree, staging: (tree / "class0/more.txt").write_text("x"),
        lambda tree, staging: (staging / "written").unlink(),
        lambda tree, staging: (staging / "written").write_text("no digest\n"),
        lambda tree, staging: (staging / "written").write_bytes(bytes(32) + b"\n\xff"),
        lambda tree, staging: [os.truncate(path, 100) for path in staging.rglob("*.tar")],
        lambda tree, staging: [path.unlink() for path in staging.rglob("*.tar")],
    ],
)
def test_what_does_not_fit_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Path], object]
) -> None:
    tree = small_tree(tmp_path / "tree")
    interrupted(small_plan(tree), seeder(tmp_path / "store"), monkeypatch, after=2)
    [staging] = (tmp_path / "store").glob("staging-*")
    change(tree, staging)
    manifest, told = resumed(small_plan(tree), seeder(tmp_path / "store"))
    assert told == []
    store = Store(tmp_path / "store")
    assert all(store.verify(manifest.digest, index) for index in range(len(manifest.shards)))
    assert read_back(store, manifest) == take(tree, tmp_path / "again")[1]


def test_an_agent_or_another_data_set_clears_what_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, other = small_tree(tmp_path / "tree"), make_tree(tmp_path / "other", {"x.txt": 5})
    root = tmp_path / "store"
    interrupted(small_plan(tree), seeder(root), monkeypatch, after=1)
    assert len(list(root.glob("staging-*"))) == 1
    Store(root)
    assert not list(root.glob("staging-*"))
    interrupted(small_plan(tree), seeder(root), monkeypatch, after=1)
    assert resumed(small_plan(other), seeder(root))[1] == []


def test_room_for_the_rest_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there already takes no more room; capacity counts all of it."""
    tree = small_tree(tmp_path / "tree")
    total = sum(small_plan(tree).shard_sizes())
    interrupted(small_plan(tree), seeder(tmp_path / "store"), monkeypatch, after=3)
    with pytest.raises(StoreFull):
        small_plan(tree).write(Store(tmp_path / "store", total - 1, keep_staging=True), 1)
    usage = shutil.disk_usage(tmp_path)
    there = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.tar"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(total=0, free=total - there))
    assert resumed(small_plan(tree), seeder(tmp_path / "store"))[1] == [3]


def test_killed_between_a_shards_rename_and_its_line_in_the_journal(tmp_path: Path) -> None:
    """The shard has its name and nobody knows of it: it is written again, and is there once."""
    tree = small_tree(tmp_path / "tree")
    whole = small_plan(tree).write(Store(tmp_path / "whole"), 1)
    child = f"""
import os, signal
from pathlib import Path
from p2p_dmc.data import writing
from p2p_dmc.data.store import Store
from tests.data.test_seeding import small_plan
real, calls = os.replace, []
def replace(source, target):
    real(source, target)
    calls.append(target)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
writing.os.replace = replace
small_plan(Path({str(tree)!r})).write(Store(Path({str(tmp_path / "store")!r}), keep_staging=True), 1)
"""
    done = subprocess.run([sys.executable, "-c", child], timeout=60)
    assert done.returncode == -signal.SIGKILL
    [staging] = (tmp_path / "store").glob("staging-*")
    assert len(list(staging.rglob("*.tar"))) == 3
    assert len((staging / "written").read_text().splitlines()) == 2
    manifest, told = resumed(small_plan(tree), seeder(tmp_path / "store"))
    assert told == [2] and manifest == whole
    there = sorted(path.name for path in (tmp_path / "store").rglob("*.tar"))
    assert there == sorted(f"{digest.hex()}.tar" for digest in whole.shard_digests)
    assert read_back(Store(tmp_path / "store"), manifest) == read_back(Store(tmp_path / "whole"), whole)


@pytest.mark.parametrize("whole", [0, 2])
def test_an_interrupt_says_what_the_same_command_will_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], whole: int
) -> None:
    plan, store = small_plan(small_tree(tmp_path / "tree")), seeder(tmp_path / "store")
    real, calls = writing.os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > whole:
            raise KeyboardInterrupt
        real(descriptor)

    monkeypatch.setattr(writing.os, "fsync", fsync)
    with Console(as_json=False) as console, pytest.raises(KeyboardInterrupt):
        seed_command._write(plan, store, 1, console)
    said = {
        0: "interrupted before a shard was whole; the same command begins anew",
        2: f"interrupted; the same command goes on after 2 of {len(plan.shards)} shards",
    }
    assert capfd.readouterr().err.splitlines() == [said[whole]]


# -- room for what is converted ------------------------------------------------------------------------------------


def test_what_has_to_be_converted_asks_for_room_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("x,y\n" + "1,2\n" * 3000)
    for free, enough in ((2 * path.stat().st_size - 1, False), (1 << 30, True)):
        store = Store(tmp_path / "store")
        with store.spool_folder() as folder, Spool(folder, lambda free=free: free) as spool:  # type: ignore[misc]
            if enough:
                assert len(scan(path, spool=spool).samples) == 3000
            else:
                said = r"table\.csv': has to be .*23\.4 KiB or more, .* are free.*--home"
                with pytest.raises(StoreFull, match=said):
                    scan(path, spool=spool)
                assert spool.size_bytes == 0 and list(folder.iterdir()) == []
        assert list((tmp_path / "store").iterdir()) == []
    plain = tmp_path / "x.jsonl"
    plain.write_text('{"x": 1}\n')
    assert len(scan(plain, spool=Spool(tmp_path, lambda: 0)).samples) == 1  # nothing is converted


def test_converting_ends_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compressed data come to is not known before."""
    monkeypatch.setattr(base, "_ASK_EVERY_BYTES", 1000)
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"x": "%s"}\n' % (b"y" * 80) * 1000))
    store = Store(tmp_path / "store")
    with store.spool_folder() as folder, Spool(folder, lambda: 20_000) as spool:
        with pytest.raises(StoreFull, match=r"are converted.*as much again and 19\.5 KiB are free.*--home"):
            scan(path, spool=spool)
        assert 20_000 <= spool.size_bytes < 22_000
    assert list((tmp_path / "store").iterdir()) == []


# -- the odd ------------------------------------------------------------------------------------------------------


def test_a_sample_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    rows = [b'{"text": "%s"}\n' % (b"x" * (100_000 if i == 5 else 50)) for i in range(40)]
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(rows))
    manifest, samples = take(path, tmp_path, max_shard_size=20_000)
    assert len(samples["000000005"]["json"]) > 100_000
    assert sorted(shard.sample_count for shard in manifest.shards if shard.size_bytes > 25_000) == [1]


def test_a_record_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 10)

    def progress(done: int, total: int) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(UserError, match=r"x\.jsonl': changed while it was read"):
        scan(path, progress=progress)
    found = scan(path)
    path.write_bytes(b'{"a": 2}\n' * 10)
    os.utime(path, ns=(2, 2))
    with pytest.raises(UserError, match=r"x\.jsonl': changed while it was read"):
        writing.write_shards(
            plan_shards(found), Store(tmp_path / "s"), scan=found, name="n", mode="file", replicas=1, seed=0
        )


def test_two_files_of_one_stem_have_rows_of_one_key(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.ndjson"):
        (tmp_path / name).write_text('{"x": 1}\n')
    with pytest.raises(
        UserError, match=r"'a-000000000': two samples have this key.*a\.jsonl' and '.*a\.ndjson'"
    ):
        plan_shards(scan(tmp_path))


def test_empty_files(tmp_path: Path) -> None:
    """One that is a field is a field; one that should hold records holds none."""
    _, samples = take(make_tree(tmp_path / "x", {"a.txt": 0, "b.txt": 1}), tmp_path)
    assert samples["a"] == {"txt": b""}
    for name in ("x.jsonl", "x.csv", "x.tsv"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(UserError, match="without a sample"):
            scan(tmp_path / name)
    (tmp_path / "x.csv").write_text("only,names\n")
    with pytest.raises(UserError, match="without a sample"):
        scan(tmp_path / "x.csv")
