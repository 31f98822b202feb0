"""What is a sample: DESIGN section 9, and everything odd that a real folder holds."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from p2p_dmc.data import walk
from p2p_dmc.data.formats import scan
from p2p_dmc.data.found import Scan, group_of
from p2p_dmc.data.readers.names import split_name
from p2p_dmc.errors import UserError
from tests.data.helpers import make_tree


def found(result: Scan) -> dict[str, tuple[str, ...]]:
    return {sample.key: tuple(field[0] for field in sample.fields) for sample in result.samples}


@pytest.mark.parametrize(
    ("name", "last_dot", "first_dot"),
    [
        ("a.jpg", ("a", "jpg"), ("a", "jpg")),
        ("a.JPG", ("a", "jpg"), ("a", "jpg")),
        ("a.tar.gz", ("a.tar", "gz"), ("a", "tar.gz")),
        ("Makefile", ("Makefile", "bin"), ("Makefile", "bin")),
        ("end.", ("end.", "bin"), ("end.", "bin")),
        ("a..b", ("a.", "b"), ("a", ".b")),
        ("v1.2 final.txt", ("v1.2 final", "txt"), ("v1", "2 final.txt")),
    ],
)
def test_stem_and_extension(name: str, last_dot: tuple[str, str], first_dot: tuple[str, str]) -> None:
    assert split_name(name) == last_dot
    assert split_name(name, "first-dot") == first_dot


def test_samples_fields_groups_and_classes(tmp_path: Path) -> None:
    make_tree(
        tmp_path,
        {"b/x.jpg": 5, "b/x.Cls": 1, "a/deep/er/y.json": 0, "loose.txt": 7, "README": 2, "a/x.jpg": 3},
    )
    result = scan(tmp_path)
    assert found(result) == {
        "README": ("bin",),
        "a/deep/er/y": ("json",),
        "a/x": ("jpg",),
        "b/x": ("cls", "jpg"),
        "loose": ("txt",),
    }
    assert [sample.group for sample in result.samples] == ["./README", "a", "a", "b", "./loose"]
    assert result.classes == ("a", "b")
    assert result.extensions == ("bin", "cls", "jpg", "json", "txt")
    assert result.total_bytes == 18
    assert result.samples[3].fields[1] == ("jpg", str(tmp_path / "b/x.jpg"), 5, 0, b"")


@pytest.mark.parametrize(
    ("key", "depth", "group"),
    [("a/b/c/x", 1, "a"), ("a/b/c/x", 2, "a/b"), ("a/b/c/x", 9, "a/b/c"), ("a/x", 2, "a"), ("x", 2, "./x")],
)
def test_group_is_the_folder_at_depth(key: str, depth: int, group: str) -> None:
    assert group_of(key, depth) == group


def test_order_is_that_of_the_key_bytes_not_of_the_directory(tmp_path: Path) -> None:
    names = ["b/1.t", "a.t", "a-.t", "a/1.t", "ä.t", "Z.t", "a/10.t", "a/2.t"]
    make_tree(tmp_path, dict.fromkeys(names, 1))
    keys = [sample.key for sample in scan(tmp_path).samples]
    assert keys == sorted(keys, key=lambda key: key.encode())
    assert len(keys) == len(names)


def test_one_file_is_one_sample(tmp_path: Path) -> None:
    make_tree(tmp_path, {"only.bin": 9, "other.bin": 1})
    result = scan(tmp_path / "only.bin")
    assert found(result) == {"only": ("bin",)}
    assert result.total_bytes == 9


def test_hidden_names_are_counted(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a.t": 1, ".hidden": 1, ".git/objects/1.t": 1, "d/.DS_Store": 1})
    result = scan(tmp_path)
    assert list(found(result)) == ["a"]
    assert result.skipped.hidden == 3 and result.skipped.total == 3


def test_include_matches_the_relative_path(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a.py": 1, "p/b.py": 1, "p/b.pyc": 1, "p/q/c.py": 1})
    assert list(found(scan(tmp_path, include=["*.py"]))) == ["a", "p/b", "p/q/c"]
    assert list(found(scan(tmp_path, include=["**/*.py"]))) == ["a", "p/b", "p/q/c"]
    assert list(found(scan(tmp_path, include=["p/*.py", "a.*"]))) == ["a", "p/b", "p/q/c"]
    assert scan(tmp_path, include=["*.py"]).skipped.excluded == 1
    with pytest.raises(UserError, match="4 not matching --include or matching --exclude"):
        scan(tmp_path, include=["*.jpg"])


def test_links_out_of_the_tree_and_loops(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", {"a/x.t": 4})
    make_tree(tmp_path, {"outside/secret.t": 1, "tree-not/near.t": 1})
    (tree / "a/out.t").symlink_to(tmp_path / "outside/secret.t")
    (tree / "a/near.t").symlink_to(tmp_path / "tree-not/near.t")  # a name that begins like the root's
    (tree / "a/outdir").symlink_to(tmp_path / "outside")
    (tree / "a/loop").symlink_to(tree)
    (tree / "a/self").symlink_to(tree / "a/self")
    (tree / "a/dangling.t").symlink_to(tree / "nothing")
    (tree / "a/inside.t").symlink_to(tree / "a/x.t")
    result = scan(tree)
    assert found(result) == {"a/inside": ("t",), "a/x": ("t",)}
    assert result.skipped.links == 6
    assert {field.size for sample in result.samples for field in sample.fields} == {4}


def test_the_given_path_may_be_a_link(tmp_path: Path) -> None:
    make_tree(tmp_path / "tree", {"x.t": 4})
    (tmp_path / "link").symlink_to(tmp_path / "tree")
    assert list(found(scan(tmp_path / "link"))) == ["x"]


def test_special_files_are_counted(tmp_path: Path) -> None:
    make_tree(tmp_path, {"x.t": 4})
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert scan(tmp_path).skipped.special == 2


def test_odd_names_survive(tmp_path: Path) -> None:
    names = [
        "new\nline.t",
        "sp ace.t",
        "quote'\".t",
        "größe.t",
        "\udcff\udcfe.t",
        "日本/x.t",
        "back\\slash.t",
        "-rf.t",
    ]
    make_tree(tmp_path, dict.fromkeys(names, 1))
    assert sorted(found(scan(tmp_path))) == sorted(name[:-2] for name in names)


def test_sixteen_files_make_a_sample_and_seventeen_do_not(tmp_path: Path) -> None:
    make_tree(tmp_path, {f"d/x.{i}": 1 for i in range(16)})
    assert len(scan(tmp_path).samples[0].fields) == 16
    make_tree(tmp_path, {"d/x.16": 1})
    with pytest.raises(UserError, match=r"'d/x': more than 16 files"):
        scan(tmp_path)


def test_two_files_for_one_field_are_refused_by_name(tmp_path: Path) -> None:
    make_tree(tmp_path, {"x.JPG": 1, "x.jpg": 1})
    with pytest.raises(UserError, match=r"x\.JPG.*x\.jpg"):
        scan(tmp_path)


def test_reserved_extension_is_refused(tmp_path: Path) -> None:
    make_tree(tmp_path, {"x.__key__": 1})
    with pytest.raises(UserError, match="reserved"):
        scan(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        scan(tmp_path / "missing")
    with pytest.raises(UserError, match="no samples found"):
        scan(tmp_path)
    with pytest.raises(UserError, match="--depth 0"):
        scan(tmp_path, depth=0)


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path, {"d/x.t": 1, "d/y.t": 1})
    asked: list[str] = []

    def access(path: str, mode: int) -> bool:
        asked.append(path)
        return not path.endswith("y.t")

    monkeypatch.setattr(walk.os, "access", access)  # root may read everything, so the answer is given here
    with pytest.raises(UserError, match=r"d/y\.t'.*permission denied"):
        scan(tmp_path)
    assert asked[-1].endswith("y.t")


def test_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tree(tmp_path, {"d/x.t": 1})
    scandir = os.scandir

    def refuse(path: str) -> object:
        if path.endswith("/d"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(walk.os, "scandir", refuse)
    with pytest.raises(UserError, match=r"/d': Permission denied"):
        scan(tmp_path)
