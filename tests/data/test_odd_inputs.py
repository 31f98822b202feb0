"""Everything odd that a real folder holds has a defined result: docs/datasets.md, "What happens with"."""

from __future__ import annotations

import gzip
import os
import resource
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from p2p_dmc.data import formats, found, walk, writing
from p2p_dmc.data.formats import scan
from p2p_dmc.data.found import Scan
from p2p_dmc.data.index import MAX_KEY_BYTES
from p2p_dmc.data.manifest import MAX_CLASSES
from p2p_dmc.data.sharding import plan_shards
from p2p_dmc.data.store import Store
from p2p_dmc.data.writing import write_shards
from p2p_dmc.errors import UserError
from tests.data.helpers import keys_of, make_tree, read_back, seed_tree, take


def keys(scanned: Scan) -> list[str]:
    return [sample.key for sample in scanned.samples]


# -- names --------------------------------------------------------------------------------------------------------

ODD = {
    "-rf": "-rf",
    "..b": None,  # hidden
    "a..b": "a.",
    "...": None,
    "~": "~",
    "new\nline.txt": "new\nline",
    "tab\t.txt": "tab\t",
    "\x1b[2Jred.txt": "\x1b[2Jred",
    "quote\"'`$(id).txt": "quote\"'`$(id)",
    "back\\slash.txt": "back\\slash",
    "größe.txt": "größe",
    "gro\u0308ße.txt": "gro\u0308ße",  # the same to a reader, and another name
    "日本語.txt": "日本語",
    "😀.txt": "😀",
    "\udcff\udc80.txt": "\udcff\udc80",
    " .txt": " ",
    "CON.txt": "CON",
    "x" * 250 + ".txt": "x" * 250,
    "A.txt": "A",
    "a.txt": "a",  # another sample, on a file system that tells them apart
    "=path=.txt": "=path=",
    "././@PaxHeader"[4:]: "@PaxHeader",
}


def test_names_come_through_the_whole_way(tmp_path: Path) -> None:
    """Into the tar, the index and back; and out of the tar by `tar` and Python's tarfile."""
    sizes = {f"d/{name}": 10 + len(name) for name in ODD}
    tree = make_tree(tmp_path / "tree", sizes)
    store = Store(tmp_path / "store")
    manifest = seed_tree(tree, store)
    wanted = {f"d/{key}" for key in ODD.values() if key is not None}
    assert set(keys_of(store, manifest)) == wanted == set(read_back(store, manifest))
    assert scan(tree).skipped.hidden == sum(key is None for key in ODD.values()) == 2
    listed: set[bytes] = set()
    members: set[str] = set()
    for index in range(len(manifest.shards)):
        path = store.path(manifest.digest, index)
        words = ["tar", "--list", "--null", "--quoting-style=literal", "--file", str(path)]
        listed.update(subprocess.run(words, capture_output=True, check=True).stdout.split(b"\n"))
        with tarfile.open(path, encoding="utf-8", errors="surrogateescape") as tar:
            members.update(tar.getnames())
    assert {name.rpartition(".")[0] for name in members} == wanted
    assert {os.fsencode(name) for name in members if "\n" not in name} <= listed


def test_paths_of_any_length_up_to_the_bound(tmp_path: Path) -> None:
    """Longer than a path may be that is given to the system at once, which is why it is walked by relative names."""
    folder = "/".join(["d" * 200] * 15)
    _, samples = take(make_tree(tmp_path / "tree", {f"{folder}/x.txt": 5}), tmp_path)
    assert list(samples) == [f"{folder}/x"] and 3000 < len(folder) < MAX_KEY_BYTES


def test_a_member_of_a_tar_whose_name_is_longer_than_a_key_may_be(tmp_path: Path) -> None:
    for size, taken in ((MAX_KEY_BYTES - 2, True), (MAX_KEY_BYTES + 1, False)):
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            tar.addfile(tarfile.TarInfo(f"d/{'k' * (size - 2)}.txt"))
        if taken:
            assert [len(key) for key in keys(scan(path))] == [size]
        else:
            with pytest.raises(UserError, match=f"path longer than {MAX_KEY_BYTES} bytes; shorten it"):
                scan(path)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd.txt", "/etc/passwd.txt", "a/../../b.txt", "./x.txt", "l" * 300 + "/x.txt"]
)
def test_a_members_name_is_a_key_and_no_path(tmp_path: Path, name: str) -> None:
    """Nothing is ever written under it."""
    path = tmp_path / "in" / "x.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    _, samples = take(path, tmp_path / "in")
    assert list(samples) == [name.removesuffix(".txt")]
    written = {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file()}
    assert all(one == "in/x.tar" or one.startswith("in/store/") for one in written)


def test_a_member_whose_name_has_a_nul(tmp_path: Path) -> None:
    """Pax can say one, and a NUL is what ends a key elsewhere."""
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("stand-in.txt")
        member.pax_headers = {"path": "a\0b.txt"}
        tar.addfile(member)
    with tarfile.open(path) as tar:
        if tar.getnames() == ["a\0b.txt"]:
            with pytest.raises(UserError, match="has a NUL in it; rename it"):
                scan(path)
        else:  # some versions of Python end the name there
            assert keys(scan(path)) == ["stand-in"]


# -- what is no file ----------------------------------------------------------------------------------------------


def test_devices_pipes_and_links_to_them_are_passed_over_unopened(tmp_path: Path) -> None:
    """A pipe would be waited for, a tape rewound."""
    tree = make_tree(tmp_path / "tree", {"x.t": 4})
    os.mkfifo(tree / "pipe.t")
    (tree / "to_pipe.t").symlink_to(tree / "pipe.t")
    (tree / "zero.t").symlink_to("/dev/zero")
    special = 1
    if os.geteuid() == 0:
        os.mknod(tree / "null.t", 0o020600, os.makedev(1, 3))
        special = 2
    seen = scan(tree)
    assert keys(seen) == ["x"] and (seen.skipped.special, seen.skipped.links) == (special, 2)


@pytest.mark.parametrize("make", [lambda path: os.mkfifo(path), lambda path: path.symlink_to("/dev/null")])
def test_a_path_that_is_no_file_is_refused(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "x.jsonl"
    make(path)
    with pytest.raises(UserError, match="no file and no folder"):
        scan(path)


def test_a_file_that_becomes_a_pipe_or_a_link_elsewhere_after_the_look(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"a.t": 4, "b.t": 4})
    seen = scan(tree)
    (tree / "b.t").unlink()
    os.mkfifo(tree / "b.t")

    def write() -> None:
        with pytest.raises(UserError, match=r"b\.t'"):
            write_shards(
                plan_shards(seen),
                Store(tmp_path / "s"),
                scan=seen,
                name="n",
                mode="file",
                replicas=1,
                seed=0,
            )
        done.set()

    done = threading.Event()
    threading.Thread(target=write, daemon=True).start()
    assert done.wait(30)


def test_sparse_files_are_their_bytes(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with (tree / "holes.bin").open("wb") as file:
        file.truncate(3 << 20)
        file.seek(1 << 20)
        file.write(b"here")
    _, samples = take(tree, tmp_path)
    data = samples["holes"]["bin"]
    assert len(data) == 3 << 20 and data.strip(b"\0") == b"here" and data.index(b"here") == 1 << 20


# -- what cannot be read ------------------------------------------------------------------------------------------


def test_a_file_and_a_folder_that_may_not_be_read_are_named() -> None:
    """For real, by a user that is not root."""
    child = """
import os, sys
from pathlib import Path
from p2p_dmc.data.formats import scan
from p2p_dmc.errors import UserError
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    scan(Path(sys.argv[1]))
except UserError as error:
    print(error)
"""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        tree = make_tree(Path(name) / "tree", {"d/x.t": 1})
        for locked in (tree / "d/x.t", tree / "d"):
            mode = locked.stat().st_mode
            locked.chmod(0)
            words = [sys.executable, "-c", child, str(tree)]
            done = subprocess.run(words, capture_output=True, text=True, cwd="/")
            locked.chmod(mode)
            assert repr(str(locked)) in done.stdout and "denied" in done.stdout, done


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"x.jsonl": b'{"n": 1}\n{"n": 2}\n{"n": '},
            r"x\.jsonl': line 3 is no JSON: Expecting value at column 6; the file ends in it; if it is still being",
        ),
        ({"x.jsonl": b""}, r"x\.jsonl': JSONL without a sample"),
        ({"x.parquet": b""}, r"x\.parquet': (not whole, or no Parquet|reading it needs pyarrow)"),
        ({"x.csv": b"a,b\n"}, r"x\.csv': CSV without a sample"),
        ({"x.csv": "a,b\n1,2\n".encode("utf-16")}, r"x\.csv': not whole, or no CSV in UTF-8"),
        ({"x.tar": b""}, r"x\.tar': not whole, or no tar"),
        ({"x.npz": b""}, r"x\.npz': not whole, or no \.npz"),
        (
            {"x.bin": bytes(7), "x.json": b'{"dtype": "uint16", "block": 2}'},
            r"7 bytes are no whole number of uint16",
        ),
        (
            {"x.bin": bytes(8), "x.json": b'{"dtype": "uint16"}'},
            r"x\.json': a block of None tokens; say a number",
        ),
        (
            {"x.bin": bytes(8), "x.json": b'{"dtype": "uint16", "documents": []}'},
            r"x\.json': no documents, and 4 tokens; say where they begin",
        ),
        (
            {"x.bin": bytes(8), "x.json": b'{"dtype": "uint16", "documents": "d.npy"}'},
            r"/d\.npy': No such file",
        ),
        (
            {
                "x.bin": bytes(9),
                "x.idx": b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, 4, 0, 0, 1),
            },
            r"x\.bin': 9 bytes, more than its index says; copy both again",
        ),
    ],
)
def test_what_is_cut_short_or_empty_is_named(tmp_path: Path, files: dict[str, bytes], said: str) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=said) as refused:
        scan(tmp_path / next(iter(files)))
    assert "\n" not in str(refused.value)


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'  {"n": 1,, "m": 2}', "Expecting property name enclosed in double quotes at column 11"),
        (b'{"n": "' + bytes(50), "Invalid control character at column 8"),
        (b'{"n": "\xff"}', ".*utf-8.*"),
        (b'{"n": 1}{"n": 2}', "Extra data at column 9"),
        (b"[" * 100_000, ".*recursion.*"),
    ],
)
def test_a_line_that_is_no_json_is_named_wherever_it_is(
    tmp_path: Path, ending: str, line: bytes, said: str
) -> None:
    path = tmp_path / f"x.jsonl{ending}"
    for at in (0, 3, 6):
        written = [b'{"n": %d}' % i for i in range(7)]
        written[at:at] = [b"", line]  # a blank line is passed over, and counted
        path.write_bytes(PACKED[ending](b"\n".join(written) + b"\n"))
        with pytest.raises(UserError, match=rf"line {at + 2} is no JSON: {said}; mend it or take") as refused:
            take(path, tmp_path)
        assert repr(str(path)) in str(refused.value) and "\n" not in str(refused.value)
        assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.csv", b"\xef\xbb\xbfn\r\n1\r\n2\r\n"),
        ("x.jsonl", b'\xef\xbb\xbf{"n": "1"}\r\n\r\n{"n": "2"}\r\n'),
    ],
)
def test_marks_of_byte_order_and_line_ends_of_windows_are_no_part_of_a_row(
    tmp_path: Path, name: str, data: bytes
) -> None:
    (tmp_path / name).write_bytes(data)
    _, samples = take(tmp_path / name, tmp_path)
    assert sorted(sample["json"] for sample in samples.values()) == [b'{"n": "1"}', b'{"n": "2"}']


# -- many ---------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_files_in_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "tree" / "all"
    folder.mkdir(parents=True)
    for number in range(100_000):
        os.close(os.open(folder / f"{number:06d}.t", os.O_CREAT | os.O_WRONLY, 0o644))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seen = scan(tmp_path / "tree")
    assert len(seen.samples) == 100_000 and next(iter(seen.samples)).key == "all/000000"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < 100_000 * 600  # a run of the sort, not the samples


def test_more_top_level_folders_than_classes_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then they are no classes."""
    tree = make_tree(tmp_path / "tree", {f"{i:02d}/x.jpg": 5 for i in range(11)})
    assert take(tree, tmp_path / "a")[0].classes == tuple(f"{i:02d}" for i in range(11))
    for module in (formats, found, writing):
        monkeypatch.setattr(module, "MAX_CLASSES", 10)
    manifest, samples = take(tree, tmp_path / "b")
    assert manifest.classes == () and len(samples) == 11 and set(samples["00/x"]) == {"jpg"}
    assert MAX_CLASSES == 65536


def test_folders_without_end_are_walked_one_after_the_other(tmp_path: Path) -> None:
    """Not by recursion, and with one folder open at a time."""
    tree = tmp_path / "tree"
    tree.mkdir()
    folders = [str(tree) + "/d" * depth for depth in range(1, 1201)]
    for folder in folders:
        os.mkdir(folder)
    Path(folders[-1], "x.t").write_text("x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 20, hard))
    try:
        assert [key.count("/") for key in keys(scan(tree))] == [1200]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        Path(folders[-1], "x.t").unlink()
        for folder in reversed(folders):  # shutil.rmtree goes down by recursion
            os.rmdir(folder)


def test_a_folder_that_goes_while_it_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "tree", {"a/x.t": 1, "b/x.t": 1})
    real = os.scandir

    def scandir(path: str) -> Any:
        if path.endswith("/b"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return real(path)

    monkeypatch.setattr(walk.os, "scandir", scandir)
    with pytest.raises(UserError, match=r"/b': No such file"):
        scan(tree)
