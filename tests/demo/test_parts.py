"""The demo's parts that need no peers: plots, process trees, sources, the comparison with DDP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from p2p_dmc import demo
from p2p_dmc.demo.plan import full, quick, source_files, stage_sources
from p2p_dmc.demo.plot import curve, shrink, sparkline, stretch
from p2p_dmc.demo.processes import MARK, alive, kill, marked, tree
from p2p_dmc.demo.progress import Progress
from p2p_dmc.demo.summary import ddp_bytes
from p2p_dmc.errors import UserError


def test_a_curve_falls_from_the_upper_left_to_the_lower_right() -> None:
    lines = curve([4.0, 3.0, 2.0, 1.0], columns=10, rows=4, marks={2: "here"}, plain=True)
    assert lines[:5] == [
        "   4.000 |**",
        "         |  ***",
        "   2.000 |     ***",
        "   1.000 |        **",
        "         +----------",
    ]
    assert lines[5] == " " * 16 + "^ here"
    assert curve([], columns=10) == []


def test_marks_that_would_touch_get_lines_of_their_own() -> None:
    lines = curve([2.0, 1.0] * 20, marks={3: "first", 5: "second", 39: "third"}, plain=True)
    assert [line.split() for line in lines[-2:]] == [["^", "first", "^", "third"], ["^", "second"]]


def test_braille_uses_its_eight_dots() -> None:
    assert curve([2.0, 1.0], columns=2, rows=2) == ["   2.000 ┤⠱⡀", "   1.000 ┤ ⢣", "         └──"]
    assert sparkline([0.0, 0.5, 1.0], 3) == "▁▅█"
    assert sparkline([2.0, 2.0], 5) == "▁▁"


def test_shrink_and_stretch() -> None:
    assert shrink([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert stretch([0.0, 1.0], 3) == [0.0, 0.5, 1.0]
    assert stretch([5.0], 3) == [5.0]


def test_ddp_sends_the_gradients_in_every_step() -> None:
    line = {"members": 4, "samples_round": 64}
    assert ddp_bytes([line], 1000, 8) == 2 * 2 * 3 * 4 * 1000  # 2 steps; 4 peers x 2 x 3/4 x 4 bytes x 1000
    assert ddp_bytes([line | {"samples_round": 65}], 1000, 8) == 3 * 2 * 3 * 4 * 1000  # a short step is one
    assert ddp_bytes([line | {"members": 1}], 1000, 8) == 0


def test_the_librarys_sources_are_taken_without_its_tests(tmp_path: Path) -> None:
    names = [
        "abc.py",
        "json/__init__.py",
        "json/tests/x.py",
        "site-packages/y.py",
        "test/z.py",
        "a/__pycache__/q.py",
    ]
    for name in [*names, "a/notes.txt"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link.py").symlink_to(tmp_path / "abc.py")
    assert [str(p) for p in source_files(tmp_path)] == ["abc.py", "json/__init__.py"]


def test_staging_is_the_same_each_time(tmp_path: Path) -> None:
    first = stage_sources(tmp_path / "a", 50)
    assert first == stage_sources(tmp_path / "b", 50) and first[0] == 50
    staged = source_files(tmp_path / "a")
    assert staged == source_files(tmp_path / "b")
    library = Path(sysconfig.get_paths()["stdlib"])
    assert all((library / p).read_bytes() == (tmp_path / "a" / p).read_bytes() for p in staged)


def test_the_plans_kill_before_they_bring_back() -> None:
    for plan in (full(0), quick(3)):
        assert 0 < plan.kill_at < plan.return_at < 1
        assert plan.epochs >= 2 and plan.peers == 4 and plan.replicas == 2
    assert quick(3).script_arguments[4] == "--seed=3"


def test_a_tree_is_found_and_killed_whole() -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], start_new_session=True, stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\ninput()"
    )
    token = f"test-{os.getpid()}"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: token},
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert tree(parent.pid) == (parent.pid, child)
        assert alive([parent.pid, child]) == (parent.pid, child)
        if sys.platform == "linux":
            assert set(marked(token)) == {parent.pid, child}
        kill(tree(parent.pid))
        assert parent.wait(10) == -signal.SIGKILL
    assert parent.pid not in alive([parent.pid])


def test_only_whole_lines_are_read(tmp_path: Path) -> None:
    home = tmp_path / "p1"
    home.mkdir()
    events = home / "events.jsonl"
    progress = Progress({"p1": home})
    events.write_text(
        '{"time":1,"event":"started","peer_id":"ab","address":"tcp://x:1","boot":1}\n{"time":2,"ev'
    )
    assert progress.poll() == [] and progress.name("ab") == "p1"
    with events.open("a") as file:
        file.write('ent":"fault","peer_id":"ab","reason":"why"}\n')
    assert [notice.text for notice in progress.poll()] == ["p1: fault: why"]
    assert progress.poll() == []


def test_a_folder_to_keep_must_be_empty(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="not empty"):
        demo.main(keep=tmp_path, seed=0, as_json=False)
    with pytest.raises(UserError, match="x/below"):
        demo.main(keep=tmp_path / "x" / "below", seed=0, as_json=False)
