"""WebDataset's tars, made by webdataset itself and by tarfile: as they are, or cut anew; and ours in its hands."""

from __future__ import annotations

import gzip
import io
import os
import struct
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset

from p2p_dmc.data.formats import scan
from p2p_dmc.data.found import Scan
from p2p_dmc.data.index import tar_bytes_of
from p2p_dmc.data.sharding import TarShard, plan_shards, taken_as_they_are
from p2p_dmc.data.store import Store
from p2p_dmc.data.writing import write_shards
from p2p_dmc.errors import UserError
from tests.data.helpers import content, make_tree, read_back, seed_tree, small_tree, take


def written(folder: Path, samples: int = 50, **settings: Any) -> Path:
    """Tars as webdataset writes them."""
    folder.mkdir(parents=True)
    with webdataset.ShardWriter(str(folder / "part-%04d.tar"), maxcount=20, verbose=0, **settings) as writer:
        for i in range(samples):
            writer.write(
                {"__key__": f"cat/{i:05d}", "txt": f"text {i}", "x.npy": content(str(i), i), "cls": i % 3}
            )
    return folder


def of_webdataset(*paths: Path) -> dict[str, dict[str, bytes]]:
    """What webdataset reads from tars, undecoded."""
    data = webdataset.WebDataset(list(map(str, paths)), shardshuffle=False, empty_check=False)
    return {one["__key__"]: {k: v for k, v in one.items() if not k.startswith("__")} for one in data}


def pack(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_shards_of_webdataset_are_taken_as_they_are(tmp_path: Path) -> None:
    folder = written(tmp_path / "wds")
    tars = sorted(folder.iterdir())
    assert len(tars) == 3
    store = Store(tmp_path / "store")
    found = scan(folder)
    manifest = write_shards(plan_shards(found), store, scan=found, name="n", mode="file", replicas=1, seed=0)
    assert found.kind == "WebDataset in 3 files"
    for i, one in enumerate(tars):
        data = store.path(manifest.digest, i).read_bytes()
        with store.path(manifest.digest, i).open("rb") as file:
            assert data[: tar_bytes_of(file.fileno())] == one.read_bytes()
    assert read_back(store, manifest) == of_webdataset(*tars)
    assert manifest.fields == ("cls", "txt", "x.npy") and manifest.classes == ("cat",)


def test_when_they_are_cut_anew(tmp_path: Path) -> None:
    """When somebody asks for what only cutting gives; the samples are the same."""
    found = scan(written(tmp_path / "wds"))
    whole = sorted(os.path.getsize(tar.path) for tar in found.tars)
    for options in (
        {"mode": "file", "max_shard_size": "auto", "order": None},
        {"mode": "auto", "max_shard_size": whole[-1], "order": None},
    ):
        assert taken_as_they_are(found, **options)  # type: ignore[arg-type]
    for changes in (
        {"mode": "folder"},
        {"max_shard_size": whole[-1] - 1},
        {"order": "keep"},
        {"order": "shuffle"},
    ):
        options = {"mode": "file", "max_shard_size": "auto", "order": None, **changes}
        assert not taken_as_they_are(found, **options)  # type: ignore[arg-type]
        assert not any(isinstance(shard, TarShard) for shard in plan_shards(found, **options))  # type: ignore[arg-type]
    _, samples = take(tmp_path / "wds", tmp_path, max_shard_size=10_000)
    assert samples == of_webdataset(*sorted((tmp_path / "wds").iterdir()))


def test_compressed_tars_are_cut_anew(tmp_path: Path) -> None:
    folder = written(tmp_path / "wds")
    expected = of_webdataset(*sorted(folder.iterdir()))
    for number, path in enumerate(sorted(folder.iterdir())):
        name = (".tar.gz", ".tgz", ".tar.gz")[number]
        path.with_suffix(name).write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert scan(folder).tars == ()
    _, samples = take(folder, tmp_path)
    assert samples == expected


def test_members_in_any_order_and_of_any_kind(tmp_path: Path) -> None:
    """Fields lie as the writer put them; folders, links and names without a field are no samples."""
    path = tmp_path / "odd.tar"
    long = "d/" + "l" * 300
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("d/a.link", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.txt"
            tar.addfile(info)
        for name in (
            "d/a.txt",
            "d/a.CLS",
            "README",
            "d/.hidden",
            "d/end.",
            f"{long}.z",
            f"{long}.a",
            "größe.v1.txt",
        ):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()[: len(name)]))
    found = scan(path)
    assert (found.skipped.special, found.skipped.unused) == (1, 3)
    assert len(found.tars) == 1
    manifest, samples = take(path, tmp_path)
    theirs = of_webdataset(path)
    assert theirs.pop("d/").keys() == {"hidden"} and theirs.pop("d/end").keys() == {""}
    assert samples == theirs
    assert set(samples) == {"d/a", long, "größe"} and set(samples["d/a"]) == {"txt", "cls"}
    assert manifest.shards[0].digest.hex() + ".tar" in os.listdir(
        tmp_path / f"store/{manifest.digest.hex()}/shards"
    )


def test_last_dot_in_tars(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", [("d/a.v1.txt", b"1"), ("d/a.v2.txt", b"2"), ("d/Makefile", b"3")])
    assert take(path, tmp_path, stem="last-dot")[1] == {
        "d/a.v1": {"txt": b"1"},
        "d/a.v2": {"txt": b"2"},
        "d/Makefile": {"bin": b"3"},
    }


def test_a_key_that_comes_again(tmp_path: Path) -> None:
    """Within one tar nobody can tell the samples apart; in two, the shard's digest does."""
    twice = pack(tmp_path / "twice.tar", [("a.txt", b"1"), ("b.txt", b"2"), ("a.txt", b"3")])
    with pytest.raises(UserError, match=r"'a': two samples have this key, in .*twice\.tar"):
        plan_shards(scan(twice))
    with pytest.raises(UserError, match="two members are field 'txt' of 'a'"):
        scan(pack(tmp_path / "field.tar", [("a.txt", b"1"), ("a.TXT", b"2")]))
    folder = tmp_path / "two"
    folder.mkdir()
    for number in range(2):
        pack(folder / f"{number}.tar", [("a.txt", b"%d" % number)])
    found = scan(folder)
    assert [[sample.key for sample in shard] for shard in plan_shards(found)] == [["a"], ["a"]]
    with pytest.raises(UserError, match=r"'a': two samples.*0\.tar' and '.*1\.tar'"):
        plan_shards(found, order="shuffle")
    (folder / "1.tar").write_bytes((folder / "0.tar").read_bytes())
    with pytest.raises(UserError, match="two of the tars are the same"):
        take(folder, tmp_path)


def test_tars_that_are_none_or_dangerous(tmp_path: Path) -> None:
    path = pack(tmp_path / "x.tar", [("a.txt", b"1" * 5000), ("b.txt", b"2" * 5000)])
    whole = path.read_bytes()
    path.write_bytes(whole[:9000])
    with pytest.raises(UserError, match=r"x\.tar': not whole, or no tar"):
        scan(path)
    path.write_bytes(b"no tar" * 200)
    with pytest.raises(UserError, match=r"x\.tar': not whole, or no tar"):
        scan(path)
    pack(path, [("a.txt", b""), ("a.pth", b"")])
    with pytest.raises(UserError, match=r"x\.tar/a\.pth': pickle"):
        scan(path)
    pack(path, [("README", b"")])
    with pytest.raises(UserError, match=r"WebDataset without a sample.*1 blank lines or members"):
        scan(path)
    pack(path, [(f"a.{i}", b"") for i in range(17)])
    with pytest.raises(UserError, match="more than 16 files"):
        scan(path)


def test_a_tar_that_changes_before_it_is_copied(tmp_path: Path) -> None:
    for options in ({}, {"order": "shuffle"}):
        path = pack(tmp_path / "x.tar", [("a.txt", b"1" * 600), ("b.txt", b"2")])
        found = scan(path)
        shards = plan_shards(found, **options)  # type: ignore[arg-type]
        data = bytearray(path.read_bytes())
        data[600] ^= 1
        path.write_bytes(data)  # as large as before
        os.utime(path, ns=(1, 1))
        with pytest.raises(UserError, match=r"x\.tar': changed while it was read"):
            write_shards(shards, Store(tmp_path / "s"), scan=found, name="n", mode="file", replicas=1, seed=0)


# -- our shards elsewhere -----------------------------------------------------------------------------------------


def shard_paths(store: Store, digest: bytes, count: int) -> list[Path]:
    return [store.path(digest, index) for index in range(count)]


def test_webdataset_reads_our_shards(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    odd = {"größe.txt": 5, "d/" + "l" * 150 + ".txt": 9, "empty.txt": 0, "sp ace/x.txt": 3}
    manifest = seed_tree(make_tree(small_tree(tmp_path / "tree"), odd), store)
    paths = shard_paths(store, manifest.digest, len(manifest.shards))
    assert len(paths) > 3
    assert of_webdataset(*paths) == read_back(store, manifest)


def test_gnu_tar_extracts_our_shards(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    names = {
        "größe.txt": 5,
        "d/" + "l" * 150 + ".txt": 700,
        "empty.txt": 0,
        "\udcff.txt": 3,
        "new\nline.txt": 1,
    }
    manifest = seed_tree(make_tree(small_tree(tmp_path / "tree"), names), store)
    out = tmp_path / "out"
    out.mkdir()
    for path in shard_paths(store, manifest.digest, len(manifest.shards)):
        done = subprocess.run(["tar", "-xf", str(path), "-C", str(out)], capture_output=True, check=True)
        assert all(b"hdrcharset" in line for line in done.stderr.splitlines())  # only means: bytes, no UTF-8
    there = {path.relative_to(tmp_path / "tree"): path.read_bytes() for path in tree_files(tmp_path / "tree")}
    assert {path.relative_to(out): path.read_bytes() for path in tree_files(out)} == there


def tree_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


class PlainShards(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Our shards with nothing but torch and the standard library."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> Any:
        for path in self.paths:
            with tarfile.open(path) as tar:
                for member in tar:
                    file = tar.extractfile(member)
                    assert file is not None
                    yield member.name, torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).sum()


def test_plain_torch_reads_our_shards(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    tree = make_tree(tmp_path / "tree", {f"c{i % 3}/{i:03d}.bin": i + 1 for i in range(40)})
    manifest = seed_tree(tree, store)
    data = PlainShards(shard_paths(store, manifest.digest, len(manifest.shards)))
    read: dict[str, int] = {}
    for names, sums in torch.utils.data.DataLoader(data, batch_size=7):
        read.update(zip(names, sums.tolist(), strict=True))
    assert read == {str(path.relative_to(tree)): sum(path.read_bytes()) for path in tree_files(tree)}


def test_our_shards_are_taken_as_they_are(tmp_path: Path) -> None:
    """What one home has cut, another takes: nothing of it is written anew."""
    store = Store(tmp_path / "store")
    first = seed_tree(small_tree(tmp_path / "tree"), store)
    found: Scan = scan(store.path(first.digest, 0).parent)
    again = write_shards(
        plan_shards(found),
        Store(tmp_path / "other"),
        scan=found,
        name="small",
        mode="file",
        replicas=2,
        seed=3,
    )
    assert sorted(again.shard_digests) == sorted(first.shard_digests)


def test_a_tar_that_ends_as_if_it_had_an_index(tmp_path: Path) -> None:
    """It says that the tar is shorter than it is: nobody could read such a shard."""
    path = pack(tmp_path / "x.tar", [("a.txt", b"1" * 600), ("b.txt", b"2")])
    with path.open("ab") as file:
        file.write(struct.pack("<IIIQ8s", path.stat().st_size - 1000, 0, 0, 0, b"dmcindex"))
    found, store = scan(path), Store(tmp_path / "s")
    with pytest.raises(UserError, match=r"x\.tar': field.*; pack it again, or have it cut with --order keep"):
        write_shards(plan_shards(found), store, scan=found, name="n", mode="file", replicas=1, seed=0)
    assert list(store.root.iterdir()) == []
    assert take(path, tmp_path, order="keep")[1] == {"a": {"txt": b"1" * 600}, "b": {"txt": b"2"}}
