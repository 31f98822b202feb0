"""bin/netlab on real namespaces. Without root the only thing to test is that it refuses in one clear line."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

NETLAB = str(Path(__file__).parents[2] / "bin" / "netlab")
DEADLINE_S = 20
SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    with server.accept()[0] as peer:
        peer.sendall(b"x" * int(sys.argv[2]))
"""
CLIENT = """
import socket, sys
socket.setdefaulttimeout(10)
with socket.create_connection((sys.argv[1], 7000)) as peer:
    got = 0
    while chunk := peer.recv(1 << 20):
        got += len(chunk)
print(got)
"""
HEAR = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    here.bind((sys.argv[1], 7001))
    here.settimeout(float(sys.argv[2]))
    print("ready", flush=True)
    try:
        print(here.recv(100).decode())
    except TimeoutError:
        print("silence")
"""
SAY = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    for _ in range(3):
        here.sendto(b"hello", (sys.argv[1], 7001))
"""


def netlab(
    *arguments: str, check: bool = True, timeout_s: float = DEADLINE_S
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, NETLAB, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def allowed() -> bool:
    """Whether this process may make network namespaces here at all."""
    return (
        os.geteuid() == 0 and netlab("run", "1", "--name", "probe", "--", "true", check=False).returncode == 0
    )


ALLOWED = allowed()


@pytest.fixture
def lab() -> Iterator[str]:
    """A lab's name of our own, down again at the end."""
    name = f"t{os.getpid() % 10**8}"
    yield name
    if ALLOWED:
        netlab("down", "--name", name)
        assert namespaces_of(name) == []


def refused(done: subprocess.CompletedProcess[str]) -> bool:
    """One clear line, as on a machine where this test may do no more."""
    return done.returncode == 1 and done.stderr.startswith("netlab: ") and done.stderr.count("\n") == 1


def up(lab: str, *arguments: str) -> bool:
    """Brings the lab up, or asserts that netlab says clearly why it cannot."""
    done = netlab("up", *arguments, "--name", lab, check=ALLOWED)
    assert ALLOWED or refused(done), done.stderr
    return ALLOWED


def namespaces_of(name: str) -> list[str]:
    lines = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line.split()[0] for line in lines if line.startswith(f"{name}-")]


def hosts(lab: str) -> dict[str, dict[str, Any]]:
    return {
        host["host"]: host for host in json.loads(netlab("list", "--json", "--name", lab).stdout)["hosts"]
    }


def start(lab: str, host: str, code: str, *arguments: str) -> subprocess.Popen[str]:
    """Python on a host, once it has said that it is ready."""
    command = [
        sys.executable,
        NETLAB,
        "exec",
        host,
        "--name",
        lab,
        "--",
        sys.executable,
        "-c",
        code,
        *arguments,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def on(lab: str, host: str, code: str, *arguments: str) -> str:
    return netlab("exec", host, "--name", lab, "--", sys.executable, "-c", code, *arguments).stdout.strip()


def transfer_s(lab: str, source: str, target: str, size_bytes: int) -> float:
    address = hosts(lab)[source]["address"]
    with start(lab, source, SERVER, address, str(size_bytes)):
        began_s = time.monotonic()
        assert on(lab, target, CLIENT, address) == str(size_bytes)
        return time.monotonic() - began_s


def hears(lab: str, listener: str, speaker: str, wait_s: float) -> bool:
    address = hosts(lab)[listener]["address"]
    with start(lab, listener, HEAR, address, str(wait_s)) as process:
        on(lab, speaker, SAY, address)
        return process.communicate(timeout=DEADLINE_S)[0].strip() == "hello"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        os.sched_yield()


# --- hosts and rates -------------------------------------------------------------------------------


def test_hosts_have_addresses_and_a_command_runs_on_one(lab: str) -> None:
    if not up(lab, "3", "--rate", "h1=100mbit,h3=1gbit"):
        return
    assert [(h["address"], h["rate"], h["state"]) for h in hosts(lab).values()] == [
        ("10.77.0.11", "100mbit", "up"),
        ("10.77.0.12", "unshaped", "up"),
        ("10.77.0.13", "1gbit", "up"),
    ]
    shown = netlab(
        "exec", "h2", "--name", lab, "--", "sh", "-c", "ip -4 addr; echo $NETLAB_ADDRESS; exit 7", check=False
    )
    assert shown.returncode == 7
    assert "10.77.0.12/24" in shown.stdout and shown.stdout.endswith("\n10.77.0.12\n")
    assert netlab("list", "--name", lab).stdout.splitlines()[0].split()[:3] == ["host", "address", "rate"]


def test_a_rate_holds_in_both_directions_and_the_counters_see_the_bytes(lab: str) -> None:
    if not up(lab, "2", "--rate", "h1=40mbit"):
        return
    size_bytes = 2_000_000  # 0.4 s at 40 Mbit/s
    before = hosts(lab)
    for source, target in (("h1", "h2"), ("h2", "h1")):
        assert transfer_s(lab, source, target, size_bytes) > 0.35
    after = hosts(lab)
    for host in ("h1", "h2"):
        for way in ("sent_bytes", "received_bytes"):
            assert size_bytes < after[host][way] - before[host][way] < 1.2 * size_bytes


def test_an_unshaped_lab_is_faster_than_any_rate_of_the_others(lab: str) -> None:
    if up(lab, "2"):
        assert transfer_s(lab, "h1", "h2", 20_000_000) < 3  # 53 Mbit/s would be slower


# --- cables ----------------------------------------------------------------------------------------


def test_a_cut_host_is_alone_until_it_is_healed(lab: str) -> None:
    if not up(lab, "3", "--rate", "50mbit"):
        return
    assert hears(lab, "h1", "h2", 5)
    netlab("cut", "h2", "--name", lab)
    assert hosts(lab)["h2"]["state"] == "cut"
    assert not hears(lab, "h1", "h2", 0.3) and not hears(lab, "h2", "h1", 0.3)
    assert hears(lab, "h1", "h3", 5)
    netlab("heal", "h2", "--name", lab)
    assert hosts(lab)["h2"]["state"] == "up"
    assert hears(lab, "h1", "h2", 5) and hears(lab, "h2", "h1", 5)
    assert transfer_s(lab, "h2", "h1", 2_000_000) > 0.25  # shaped as before


@pytest.mark.parametrize("rate", ["unshaped", "50mbit"])
def test_a_cable_cut_one_way_carries_the_other(lab: str, rate: str) -> None:
    if not up(lab, "2", "--rate", rate):
        return
    assert hears(lab, "h1", "h2", 5)  # and both know each other's hardware address now
    netlab("cut", "h2", "--one-way", "in", "--name", lab)
    assert hosts(lab)["h2"]["state"] == "cut-in"
    assert hears(lab, "h1", "h2", 5) and not hears(lab, "h2", "h1", 0.3)
    netlab("cut", "h2", "--one-way", "out", "--name", lab)
    assert not hears(lab, "h1", "h2", 0.3) and hears(lab, "h2", "h1", 5)
    netlab("heal", "h2", "--name", lab)
    assert hears(lab, "h1", "h2", 5) and hears(lab, "h2", "h1", 5)


# --- nothing stays behind --------------------------------------------------------------------------


def test_run_passes_the_exit_code_on_and_is_down_afterwards(lab: str) -> None:
    script = 'echo $NETLAB_HOSTS $NETLAB_ADDRESSES; "$NETLAB" exec h2 --name $NETLAB_NAME -- true && exit 5'
    done = netlab("run", "2", "--name", lab, "--", "sh", "-c", script, check=False)
    if ALLOWED:
        assert (done.returncode, done.stdout) == (5, "h1 h2 10.77.0.11 10.77.0.12\n")
        assert namespaces_of(lab) == []
        assert refused(netlab("run", "1", "--name", lab, "--", "/no/such/program", check=False))
        assert namespaces_of(lab) == []
    else:
        assert refused(done)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command_and_the_lab(lab: str, number: int) -> None:
    if not ALLOWED:
        assert refused(netlab("run", "1", "--name", lab, "--", "true", check=False))
        return
    with running(lab) as run:
        assert len(namespaces_of(lab)) == 2
        run.send_signal(number)
        assert run.wait(DEADLINE_S) == 128 + number
    assert namespaces_of(lab) == []


def running(lab: str) -> subprocess.Popen[str]:
    """`netlab run` with a host that is busy for ever."""
    script = 'echo ready; exec "$NETLAB" exec h1 --name $NETLAB_NAME -- tail -f /dev/null'
    command = [sys.executable, NETLAB, "run", "1", "--name", lab, "--", "sh", "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    wait_for(lambda: bool(pids_on(lab)))
    return process


def pids_on(lab: str) -> str:
    done = subprocess.run(["ip", "netns", "pids", f"{lab}-h1"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def alive(pid: int) -> bool:
    """A zombie that nobody has collected yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_killed_run_left_behind_is_cleared_by_the_next(lab: str) -> None:
    if not ALLOWED:
        assert refused(netlab("run", "1", "--name", lab, "--", "true", check=False))
        return
    with running(lab) as run:
        busy = refused(netlab("up", "2", "--name", lab, check=False))
        left = pids_on(lab)
        run.kill()
        run.wait(DEADLINE_S)
        assert busy and left and len(namespaces_of(lab)) == 2
        assert netlab("run", "3", "--name", lab, "--", "true").returncode == 0
        assert namespaces_of(lab) == [] and not alive(int(left))


def test_a_half_made_lab_is_replaced(lab: str) -> None:
    if not ALLOWED:
        assert refused(netlab("up", "2", "--name", lab, check=False))
        return
    for namespace in (f"{lab}-br", f"{lab}-h7"):
        subprocess.run(["ip", "netns", "add", namespace], check=True)
    assert up(lab, "2")
    assert sorted(namespaces_of(lab)) == [f"{lab}-br", f"{lab}-h1", f"{lab}-h2"]


# --- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "0"], "0 hosts"),
        (["up", "2", "--rate", "fast"], "rate 'fast'"),
        (["up", "2", "--rate", "h3=1mbit"], "no host 'h3'"),
        (["exec", "h1"], "give a command after --"),
        (["up", "1", "--", "true"], "no command here"),
        (["list"], "there is no lab"),
        (["cut", "h1"], "there is no lab"),
        (["exec", "h1", "--", "true"], "there is no lab"),
    ],
)
def test_mistakes_cost_one_line(lab: str, arguments: list[str], words: str) -> None:
    done = netlab(*arguments[:1], "--name", lab, *arguments[1:], check=False)
    assert refused(done)
    assert words in done.stderr or os.geteuid() != 0


def module() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("netlab", NETLAB)
    spec = importlib.util.spec_from_loader("netlab", loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


def test_without_root_or_tools_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    program = module()
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(program.NetlabError, match="need root"):
        program.main(["up", "2"])
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(program.NetlabError, match="install iproute2"):
        program.main(["up", "2"])
