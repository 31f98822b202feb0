"""Orders at phases: who is struck, when, and what is left as proof."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from p2p_dmc.observe import phases
from p2p_dmc.wire.trainer_messages import ENV_AGENT

PACKAGE = Path(phases.__file__).parents[1]
CODE = """
import sys
from p2p_dmc.observe.phases import reach
for phase in sys.argv[1:]:
    print(phase, flush=True)
    reach(phase)
print("end", flush=True)
sys.stdin.read()
"""
PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CODE!r}, *sys.argv[1:]],
                         stdin=sys.stdin, env=os.environ | {{{ENV_AGENT!r}: "ipc:///nowhere"}})
child.wait()
sys.stdin.read()
"""


def start(folder: Path | None, *visits: str, code: str = CODE) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k not in (ENV_AGENT, phases.ENV_ORDERS)}
    if folder is not None:
        environment[phases.ENV_ORDERS] = str(folder)
    return subprocess.Popen(
        [sys.executable, "-c", code, *visits],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> tuple[list[str], int]:
    """What it printed, and its exit code."""
    words = process.communicate("", timeout=30)[0].split()
    return words, process.returncode


def proof(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "proof").read_text().splitlines()]


def test_without_the_variable_an_order_is_not_even_looked_for(tmp_path: Path) -> None:
    phases.give(tmp_path, "reducing", "kill")
    assert said(start(None, "reducing")) == (["reducing", "end"], 0)
    assert (tmp_path / "reducing").exists()


def test_an_order_strikes_at_its_phase_and_leaves_proof(tmp_path: Path) -> None:
    phases.give(tmp_path, "complete", "kill")
    process = start(tmp_path, "header-said", "complete", "complete")
    assert said(process) == (["header-said", "complete"], -signal.SIGKILL)
    [line] = proof(tmp_path)
    assert (line["phase"], line["action"], line["pid"]) == ("complete", "kill", process.pid)
    assert line["process"] == "agent"
    assert not (tmp_path / "complete").exists(), "the order is carried out once"


def test_the_count_is_since_the_order_was_given(tmp_path: Path) -> None:
    phases.give(tmp_path, "complete", "kill", count=3)
    words, code = said(start(tmp_path, *["complete"] * 5))
    assert (words, code) == (["complete"] * 3, -signal.SIGKILL)
    assert proof(tmp_path)[0]["count"] == 3


def test_a_delay_lets_the_process_go_on_for_a_moment(tmp_path: Path) -> None:
    phases.give(tmp_path, "reducing", "kill", delay_ms=50)
    process = start(tmp_path, "reducing", "reduced")
    assert process.wait(30) == -signal.SIGKILL
    assert process.stdout is not None and process.stdout.read().split() == ["reducing", "reduced", "end"]


def test_stop_freezes_the_process_until_it_is_continued(tmp_path: Path) -> None:
    phases.give(tmp_path, "serving", "stop")
    process = start(tmp_path, "serving")
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED) is not None
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    process.send_signal(signal.SIGCONT)
    assert said(process) == (["serving", "end"], 0)


def test_a_thread_is_held_until_it_may_go_on(tmp_path: Path) -> None:
    phases.give(tmp_path, "serving", "hold")
    process = start(tmp_path, "serving")
    assert process.stdout is not None and process.stdout.readline() == "serving\n"
    while not (tmp_path / "proof").exists():
        assert process.poll() is None
    assert proof(tmp_path)[0]["action"] == "hold" and process.poll() is None
    (tmp_path / "go-on").touch()
    assert said(process) == (["end"], 0)


def test_a_trainer_kills_its_agent_and_itself(tmp_path: Path) -> None:
    phases.give(tmp_path, "reducing", "kill-both")
    process = start(tmp_path, "reducing", code=PARENT)
    assert said(process) == (["reducing"], -signal.SIGKILL)
    [line] = proof(tmp_path)
    assert line["process"] == "trainer" and line["pid"] != process.pid
    with contextlib.suppress(
        psutil.NoSuchProcess
    ):  # it killed its parent first: its own end may take a moment
        psutil.Process(int(str(line["pid"]))).wait(30)


def test_an_order_that_makes_no_sense_is_not_given(tmp_path: Path) -> None:
    for phase, action in (("murder", "kill"), ("serving", "murder"), ("../serving", "kill")):
        with pytest.raises(ValueError, match="no such order"):
            phases.give(tmp_path, phase, action)
    assert list(tmp_path.iterdir()) == []


def reached_in(source: str) -> list[str]:
    """Phases in calls of `reach("...")`."""
    return [
        node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("reach", "phases.reach")
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ]


@pytest.mark.parametrize(
    ("folder", "known"), [("agent", phases.AGENT_PHASES), ("train", phases.TRAINER_PHASES)]
)
def test_every_phase_is_reached_somewhere_and_has_a_meaning(folder: str, known: dict[str, str]) -> None:
    reached = [p for path in sorted((PACKAGE / folder).rglob("*.py")) for p in reached_in(path.read_text())]
    assert sorted(set(reached)) == sorted(known)
