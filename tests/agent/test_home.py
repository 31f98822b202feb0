"""A home: one agent at a time, files that are whole whatever is killed, memory that leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc.agent import home as home_module
from p2p_dmc.agent.home import Home, MemoryFolder, write_json
from p2p_dmc.data.disk import write_durably
from p2p_dmc.errors import UserError

DEADLINE_S = 60.0


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home(tmp_path / "home")
    yield made
    made.unlock()


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def end(child: subprocess.Popen[str]) -> int:
    child.kill()
    code = child.wait(DEADLINE_S)
    if child.stdout is not None:
        child.stdout.close()
    return code


# -- one agent --------------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from typing import Any
from p2p_dmc.agent.home import Home
home = Home(Path(sys.argv[1]))
home.lock()
home.announce(address="tcp://127.0.0.1:7400")
print("locked", flush=True)
time.sleep(600)
"""


def test_one_agent_per_home_until_it_dies(home: Home) -> None:
    child = python(HOLD, home.root)
    try:
        assert line_of(child) == "locked"
        with pytest.raises(UserError, match=f"{home.root} already has a running agent; use another --home"):
            home.lock()
        running = home.running_agent()
        assert running is not None and running["pid"] == child.pid
        assert running["address"] == "tcp://127.0.0.1:7400"
    finally:
        assert end(child) == -signal.SIGKILL
    assert home.running_agent() is None  # agent.json is still there, its writer is not
    assert (home.root / "agent.json").exists()
    home.lock()


def test_a_failed_lock_leaves_the_other_one_alone(home: Home) -> None:
    other = Home(home.root)
    home.lock()
    home.announce(x=1)
    with pytest.raises(UserError):
        other.lock()
    other = Home(home.root)
    assert home.running_agent() == {"pid": os.getpid(), "x": 1} == other.running_agent()


def test_unlocking_gives_the_home_back_and_clears_up(home: Home) -> None:
    home.lock()
    endpoint = home.local_endpoint()
    home.announce()
    folder = home.sockets_folder
    assert folder is not None and folder.is_dir() and endpoint == f"ipc://{folder}/agent"
    assert len(endpoint) < 100  # a socket's path may have 107 bytes, however long the home's is
    home.unlock()
    assert not folder.exists() and not (home.root / "agent.json").exists()
    assert home.running_agent() is None
    other = Home(home.root)
    other.lock()
    other.unlock()


def test_without_an_agent_there_is_none(home: Home) -> None:
    assert home.running_agent() is None
    home.create()
    for text in ("", "{", "[]"):
        (home.root / "agent.json").write_text(text)
        assert home.running_agent() is None


def test_a_home_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="give another place with --home DIR"):
        Home(tmp_path / "file").create()
    with pytest.raises(UserError, match="give another place with --home DIR"):
        Home(tmp_path / "file" / "below").lock()


def test_places(home: Home) -> None:
    home.create()
    home.create()
    assert home.store_root.is_dir() and home.run_folder("mnist") == home.root / "runs" / "mnist"
    assert Home(Path("~/x")).root == Path.home() / "x" and Home(Path("x")).root.is_absolute()


def test_the_socket_of_an_agent_that_was_killed_is_removed_by_the_next(home: Home, tmp_path: Path) -> None:
    killed = Home(home.root)
    killed.lock()
    endpoint = killed.local_endpoint()
    killed.announce(endpoint=endpoint)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(endpoint.removeprefix("ipc://"))
    listening.close()
    assert killed._lock is not None
    killed._lock.close()  # as the kernel does for a process that is gone
    home.lock()
    assert killed.sockets_folder is not None and not killed.sockets_folder.exists()


def test_nothing_but_a_socket_of_an_agent_is_removed(home: Home, tmp_path: Path) -> None:
    kept = tmp_path / "dmc-precious" / "agent"
    kept.parent.mkdir()
    kept.write_text("of somebody else")
    home.create()
    home.announce(endpoint=f"ipc://{kept}")
    home.lock()
    assert kept.exists()


# -- identity ---------------------------------------------------------------------------------------------------------


def test_the_identity_stays_and_the_boot_grows(home: Home, tmp_path: Path) -> None:
    home.create()
    identities = [Home(home.root).start_identity() for _ in range(4)]
    assert [i.boot for i in identities] == [1, 2, 3, 4]
    assert len({(i.peer_id, i.public_key, i.secret_key) for i in identities}) == 1
    assert len(identities[0].peer_id) == 32 and int(identities[0].peer_id, 16) >= 0
    assert stat.S_IMODE((home.root / "identity.json").stat().st_mode) == 0o600
    other = Home(tmp_path / "other")
    other.create()
    assert other.start_identity().peer_id != identities[0].peer_id


def test_a_boot_is_on_disk_before_it_is_used(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    home.create()
    home.start_identity()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(home_module, "write_json", full)
    with pytest.raises(OSError, match="No space"):
        home.start_identity()
    monkeypatch.undo()
    assert home.start_identity().boot == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"public_key": "a", "secret_key": "b", "boot": "x"}']
)
def test_a_damaged_identity_is_an_error_and_never_a_new_one(home: Home, text: str) -> None:
    home.create()
    (home.root / "identity.json").write_text(text)
    with pytest.raises(UserError, match=r"identity\.json cannot be read; restore it"):
        home.start_identity()
    assert (home.root / "identity.json").read_text() == text


def test_known_peers(home: Home) -> None:
    assert home.known_peers() == {}
    home.create()
    home.remember_peers({"tcp://a:1": "p"})
    assert home.known_peers() == {"tcp://a:1": "p"}
    for text in ("", "{", "[]", "7"):
        (home.root / "peers.json").write_text(text)
        assert home.known_peers() == {}


# -- files ------------------------------------------------------------------------------------------------------------

WRITE = """
import os, signal, sys
from pathlib import Path
from typing import Any
from p2p_dmc.agent import home
path, point = Path(sys.argv[1]), sys.argv[2]
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
if point == "dump":
    home.json.dump = lambda value, file: (file.write('{"n": '), file.flush(), die())
elif point == "fsync":
    home.os.fsync = die
elif point == "replace":
    home.os.replace = die
elif point == "folder":
    home.sync_folder = die
n = 0
while True:
    n += 1
    home.write_json(path, {"n": n, "pad": "x" * 20000})
    print(n, flush=True)
"""


@pytest.mark.parametrize("point", ["dump", "fsync", "replace", "folder"])
def test_a_file_is_the_old_or_the_new_whatever_is_killed(tmp_path: Path, point: str) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"n": 0})
    child = python(WRITE, path, point)
    assert child.wait(DEADLINE_S) == -signal.SIGKILL
    end(child)
    assert json.loads(path.read_text())["n"] == (1 if point == "folder" else 0)


def test_the_domain_is_what_was_told_last(home: Home) -> None:
    home.create()
    assert home.domain(None) == ""
    assert home.domain("rack1") == "rack1" == home.domain(None)
    assert home.domain("office/rack2") == "office/rack2" == Home(home.root).domain(None)
    assert home.domain("") == "" == home.domain(None)


@pytest.mark.parametrize("left", ["", "{", "7", '["rack1"]', '"no such name!"', '"\\ud800"', "\xff"])
def test_a_domain_that_cannot_be_read_is_none(home: Home, left: str) -> None:
    home.create()
    (home.root / "domain.json").write_bytes(left.encode("latin-1"))
    assert home.domain(None) == ""


def test_a_domain_that_cannot_be_written_counts_all_the_same(home: Home) -> None:
    assert home.domain("rack1") == "rack1"  # the folder is not there
    assert home.domain(None) == ""


def test_a_file_is_whole_at_any_instant(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for pause_s in (0.0, 0.003, 0.011):
        child = python(WRITE, path, "")
        assert line_of(child) == "1"
        time.sleep(pause_s)  # any instant will do
        end(child)
        found = json.loads(path.read_text())
        assert found["n"] >= 1 and len(found["pad"]) == 20000


@pytest.mark.parametrize("write", [write_json, lambda path, value: write_durably(path, bytes(value))])
def test_a_disk_that_refuses_a_file_keeps_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, Any], None]
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "x", [1])
    assert not list(tmp_path.iterdir())


def test_what_was_said_to_be_written_is_on_disk_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content before name, name before return: the order that a power cut respects."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(descriptor: int) -> None:
        steps.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content")
        fsync(descriptor)

    def traced_replace(a: Path, b: Path) -> None:
        steps.append("name")
        replace(a, b)

    monkeypatch.setattr(home_module.os, "fsync", traced_fsync)
    monkeypatch.setattr(home_module.os, "replace", traced_replace)
    write_json(tmp_path / "x.json", [1], mode=0o600)
    assert steps == ["content", "name", "folder"]
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == 0o600


# -- memory -----------------------------------------------------------------------------------------------------------

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def peer_id() -> Iterator[str]:
    """Nobody else's on this machine."""
    made = uuid.uuid4().hex
    yield made
    for left in Path("/dev/shm").glob(f"dmc-{made[:16]}-*"):
        shutil.rmtree(left)


def with_room(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(home_module.shutil, "disk_usage", lambda path: Usage(0, 0, free))


def test_memory_is_shared_where_there_is_room_and_else_in_the_home(
    home: Home, peer_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.create()
    with_room(monkeypatch, 201)
    memory = MemoryFolder(home, peer_id)
    folder = memory.folder(100)
    assert folder.parent == Path("/dev/shm") and memory.folder(10**15) == folder  # chosen once
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    memory.remove()
    memory.remove()
    assert not folder.exists()
    with_room(monkeypatch, 200)
    folder = memory.folder(100)
    assert folder.parent == home.root / "memory"
    memory.remove()
    assert not folder.exists()


@pytest.mark.parametrize("free", [0, 10**12])
def test_what_a_killed_agent_left_is_removed_and_nothing_else(
    home: Home, peer_id: str, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    home.create()
    left = []
    for room in (0, 10**12):  # one killed agent had its memory here, another one there
        with_room(monkeypatch, room)
        left.append(MemoryFolder(home, peer_id).folder(100))
        (left[-1] / "anchor").write_bytes(b"x" * 100)
        if room == 0:
            keep = home.root / "memory" / f"dmc-{'f' * 16}-other"
            keep.mkdir()
            continue
    (left[0]).mkdir(exist_ok=True)
    other = MemoryFolder(home, uuid.uuid4().hex)
    others = other.folder(100)
    with_room(monkeypatch, free)
    mine = MemoryFolder(home, peer_id).folder(100)
    assert mine not in left and [f.exists() for f in left] == [False, False]
    assert mine.exists() and others.exists() and keep.exists()
    other.remove()
