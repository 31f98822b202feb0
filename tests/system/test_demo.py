"""The demo itself, shortened: it passes, its checks can fail, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from p2p_dmc import demo
from p2p_dmc.demo.plan import RUN
from p2p_dmc.demo.story import Outcome
from p2p_dmc.observe.audit import audit
from p2p_dmc.observe.journal import read_lines

DEADLINE_S = 420
"""Generous: the demo takes under a minute on two free cores, but other tests may run beside it."""
PEERS = ("p1", "p2", "p3", "p4")


def leftovers(folder: Path) -> list[str]:
    """Processes whose command or working memory names the folder, and memory of the peers that had homes there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command:
            found.append(command.replace(b"\0", b" ").decode())
    for home in folder.iterdir():
        for line in read_lines(home / "events.jsonl")[:1] if home.is_dir() else ():
            found += map(str, Path("/dev/shm").glob(f"dmc-{line['peer_id'][:16]}-*"))
    return found


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """One run for all tests: the kept homes, and the lines that it printed."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "p2p_dmc.cli",
            "demo",
            "--quick",
            "--json",
            "--seed",
            "1",
            "--keep",
            str(folder),
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.stderr, lines[-3:])
    yield folder, lines


def test_the_demo_passes_and_says_what_happened(demonstration: tuple[Path, list[dict[str, Any]]]) -> None:
    summary = demonstration[1][-1]
    assert summary["event"] == "summary" and summary["ok"] and summary["faults"] == []
    assert summary["checks"] == dict.fromkeys(("equal", "exact", "killed", "noticed", "returned"), True)
    assert summary["samples_counted"] == summary["samples_due"] == summary["files"] * summary["epochs"]
    assert summary["loss_last"] < 0.8 * summary["loss_first"]
    assert summary["bytes_ddp"] > 2 * summary["bytes_sent"] > 0
    survivors = set(PEERS) - {summary["killed"]}
    assert set(summary["recovery_s"]) == survivors and min(summary["recovery_s"].values()) > 0
    assert {taken["from"] for taken in summary["takeovers"]} == {summary["killed"]}
    assert {taken["to"] for taken in summary["takeovers"]} <= survivors
    assert summary["rounds_compared"] > 5


def test_the_story_is_told_in_order(demonstration: tuple[Path, list[dict[str, Any]]]) -> None:
    told = [line["event"] for line in demonstration[1]]
    chapters = [
        "seeding",
        "training",
        "seeder_left",
        "kill",
        "recovered",
        "return",
        "trained_again",
        "summary",
    ]
    assert [event for event in told if event in chapters] == chapters
    assert told.count("round") > 5
    killed = next(line for line in demonstration[1] if line["event"] == "kill")
    assert len(killed["pids"]) >= 2  # agent and trainer


def test_nothing_is_left_but_the_homes(demonstration: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = demonstration[0]
    assert leftovers(folder) == []
    for peer in PEERS:
        assert (folder / peer / "runs" / RUN / "final" / "model.safetensors").stat().st_size > 1_000_000


def test_the_audit_fails_on_doctored_journals(demonstration: tuple[Path, list[dict[str, Any]]]) -> None:
    folder = demonstration[0]
    homes = [folder / peer for peer in PEERS]
    clean = audit(homes, RUN)
    assert clean.ok and clean.finished_epochs > 1
    journals = {home: (home / "metrics.jsonl").read_text() for home in homes}
    killed = next(line for line in demonstration[1] if line["event"] == "kill")["peer"]
    first = json.loads(journals[folder / killed].splitlines()[0])
    try:
        (folder / killed / "metrics.jsonl").write_text(
            journals[folder / killed].replace(first["digest"], "0" * 32, 1)
        )
        assert any("round 1: digest" in fault for fault in audit(homes, RUN).unequal)
        for home in homes:  # what one round counted, everybody forgets
            shorter = [json.loads(line) for line in journals[home].splitlines()]
            for line in shorter:
                if line["round"] == 3:
                    line["counted"] = line["counted"][1:]
            (home / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in shorter))
        doctored = audit(homes, RUN)
        assert doctored.unequal == () and any("never counted" in fault for fault in doctored.inexact)
    finally:
        for home, text in journals.items():
            (home / "metrics.jsonl").write_text(text)


def test_without_a_kill_the_demo_fails(
    demonstration: tuple[Path, list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same journals, but a story in which nobody was killed, noticed or came back."""
    outcome = Outcome(homes={peer: demonstration[0] / peer for peer in PEERS}, victim="p1")

    class Uneventful:
        def __init__(self, *parts: object) -> None:
            pass

        def run(self) -> Outcome:
            return outcome

    monkeypatch.setattr(demo, "Story", Uneventful)
    assert demo.main(keep=None, seed=1, as_json=True, quick=True) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["checks"] == {
        "equal": True,
        "exact": True,
        "killed": False,
        "noticed": False,
        "returned": False,
    }
    assert demo.main(keep=None, seed=1, as_json=False, quick=True) == 1
    shown = capsys.readouterr().out
    assert "no survivor ever said that p1 is dead" in shown and "loss over" in shown


def test_ctrl_c_ends_all_processes(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with subprocess.Popen(
        [sys.executable, "-m", "p2p_dmc.cli", "demo", "--quick", "--json", "--keep", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            for line in process.stdout:
                if json.loads(line)["event"] == "view":
                    break
            os.kill(process.pid, signal.SIGINT)
            process.stdout.read()
            said = process.stderr.read()
            assert process.wait(60) == 130, said
        finally:
            process.kill()
    assert "stopping the peers" in said and "no process is left" in said
    assert leftovers(folder) == []
