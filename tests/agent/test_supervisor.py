"""The trainer's process: how it ended, what it said, that it does not outlive its agent, how often it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dmc.agent.supervisor import AttachedTrainer, RestartBudget, TrainerExit, TrainerProcess

DEADLINE_S = 60.0


class Trainer:
    """A trainer process of a script given as text."""

    def __init__(self, root: Path, text: str, *arguments: str) -> None:
        self.output: list[bytes] = []
        self.started = asyncio.Event()
        self.log = root / "trainer.log"
        script = root / "script.py"
        script.write_text(text)
        self.process = TrainerProcess(
            run="mnist",
            script=str(script),
            arguments=arguments,
            endpoint="ipc:///nowhere/agent",
            folder=str(script.parent),
            environment=os.environ,
            log_path=self.log,
            on_output=self._on_output,
        )

    def _on_output(self, data: bytes) -> None:
        self.output.append(data)
        self.started.set()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


def ended(root: Path, text: str, *arguments: str) -> tuple[TrainerExit, Trainer]:
    trainer = Trainer(root, text, *arguments)
    return run(trainer.process.run()), trainer


@pytest.mark.parametrize(
    ("text", "code", "signal_name", "last_line"),
    [
        ("", 0, "", ""),
        ("print('one'); print('  two  '); print()", 0, "", "two"),
        ("import sys; print('bye'); sys.exit(3)", 3, "", "bye"),
        ("raise ValueError('no such thing')", 1, "", "ValueError: no such thing"),
        ("print('x', end=''); import os; os.kill(os.getpid(), 9)", -9, "SIGKILL", "x"),
        ("import os; os.abort()", -6, "SIGABRT", ""),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe end\\n')", 0, "", "\ufffd\ufffd end"),
        ("print('a' * 20000 + '\\nlast')", 0, "", "last"),
    ],
)
def test_how_it_ended(tmp_path: Path, text: str, code: int, signal_name: str, last_line: str) -> None:
    found, trainer = ended(tmp_path, text)
    assert (found.code, found.signal_name, found.last_line) == (code, signal_name, last_line)
    assert trainer.log.read_bytes() == b"".join(trainer.output)


def test_it_is_told_where_its_agent_is_and_gets_its_arguments(tmp_path: Path) -> None:
    text = """
import os, sys
print(os.environ["DMC_AGENT"], os.environ["DMC_RUN"], sys.argv[1:], sys.stdin.read() == "")
os.fstat(int(os.environ["DMC_LIFELINE"]))
print(os.getsid(0) == os.getpid())
"""
    found, trainer = ended(tmp_path, text, "--lr", "0.1")
    assert found.code == 0, found
    assert b"".join(trainer.output) == b"ipc:///nowhere/agent mnist ['--lr', '0.1'] True\nTrue\n"


def test_all_it_said_is_kept_the_last_word_too(tmp_path: Path) -> None:
    found, trainer = ended(tmp_path, "print('x' * 3_000_000); print('last', end=''); import os; os._exit(7)")
    assert found == TrainerExit(code=7, signal_name="", last_line="last")
    assert b"".join(trainer.output) == b"x" * 3_000_000 + b"\nlast" == trainer.log.read_bytes()


def test_a_log_that_cannot_be_written_costs_lines_not_the_trainer(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, "print('said')")
    trainer.log.symlink_to("/dev/full")
    assert run(trainer.process.run()).last_line == "said" and b"".join(trainer.output) == b"said\n"


def test_the_log_grows_over_several_lives(tmp_path: Path) -> None:
    ended(tmp_path, "print('first')")
    _, trainer = ended(tmp_path, "print('second')")
    assert trainer.log.read_bytes() == b"first\nsecond\n"


def test_a_process_that_the_script_left_behind_holds_nothing_up(tmp_path: Path) -> None:
    """It has the output pipe open; the trainer is over when it is over."""
    text = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
"""
    found, trainer = ended(tmp_path, text)
    os.kill(int(b"".join(trainer.output)), signal.SIGKILL)
    assert found.code == 0


def test_nor_does_one_that_writes_for_ever(tmp_path: Path) -> None:
    text = """
import os, subprocess
child = subprocess.Popen(["yes"])
print("\\n", child.pid, flush=True)
"""
    found, trainer = ended(tmp_path, text)
    pid = next(int(line) for line in b"".join(trainer.output).split() if line.isdigit())
    os.kill(pid, signal.SIGKILL)
    assert found.code == 0


def test_no_descriptor_and_no_process_is_left(tmp_path: Path) -> None:
    ended(tmp_path, "print('warm up')")
    before = len(os.listdir("/proc/self/fd"))
    for text in ("print(1)", "raise SystemExit(2)", "import os; os.kill(os.getpid(), 9)"):
        ended(tmp_path, text)
    assert len(os.listdir("/proc/self/fd")) == before


SLEEP = "import time; print('started', flush=True); time.sleep(600)"


def test_it_can_be_ended_at_once(tmp_path: Path) -> None:
    async def work() -> TrainerExit:
        trainer = Trainer(tmp_path, SLEEP)
        trainer.process.kill()  # not started: nothing happens
        task = asyncio.create_task(trainer.process.run())
        await trainer.started.wait()
        assert trainer.process.pid is not None
        trainer.process.kill()
        trainer.process.kill()
        return await task

    assert run(work()) == TrainerExit(code=-9, signal_name="SIGKILL", last_line="started")


def test_whoever_stops_waiting_for_it_ends_it(tmp_path: Path) -> None:
    async def work() -> int:
        trainer = Trainer(tmp_path, SLEEP)
        task = asyncio.create_task(trainer.process.run())
        await trainer.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert trainer.process.pid is not None
        return trainer.process.pid

    gone(run(work()))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def gone(pid: int) -> None:
    until(lambda: not alive(pid), f"process {pid} lives on")


AGENT = """
import asyncio, os, sys
from pathlib import Path
from p2p_dmc.agent.supervisor import TrainerProcess
def trainer(script):
    pending = b""  # a line may come in pieces, and a sister's pieces between them
    def pass_on(data):
        nonlocal pending
        *lines, pending = (pending + data).split(b"\\n")
        for line in lines:
            print(line.decode(), flush=True)
    return TrainerProcess(run="r", script=script, arguments=(), endpoint="ipc://x", folder="/",
                          environment=os.environ, log_path=Path(script + ".log"), on_output=pass_on).run()
async def main():
    await asyncio.gather(*map(trainer, sys.argv[1:]))
asyncio.run(main())
"""


@contextlib.contextmanager
def killed_agent(*scripts: Path) -> Iterator[list[int]]:
    """The process ids that the scripts print, once their agent has been killed. None is left afterwards."""
    pids: list[int] = []
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, *map(str, scripts)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        pids += [int(agent.stdout.readline()) for _ in scripts]
        assert all(map(alive, pids))
    finally:
        agent.kill()
        assert agent.wait(DEADLINE_S) == -signal.SIGKILL
        if agent.stdout is not None:
            agent.stdout.close()
    try:
        yield pids
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_trainer_dies_with_its_agent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    with killed_agent(script) as pids:
        gone(pids[0])


def test_the_lifeline_of_each_trainer_ends_with_the_agent_alone(tmp_path: Path) -> None:
    """Where the system does not kill the trainer, the pipe tells it; no sister process holds it open."""
    scripts = []
    for i in range(2):
        scripts.append(tmp_path / f"script{i}.py")
        scripts[-1].write_text(f"""
import ctypes, os
from pathlib import Path
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # as on a system that does not kill children
print(os.getpid(), flush=True)
ended = os.read(int(os.environ["DMC_LIFELINE"]), 1)
Path({str(tmp_path / f"ended{i}")!r}).write_bytes(b"end of file" if ended == b"" else ended)
""")
    with killed_agent(*scripts) as pids:
        for i, pid in enumerate(pids):
            gone(pid)
            assert (tmp_path / f"ended{i}").read_bytes() == b"end of file"


# -- attached ---------------------------------------------------------------------------------------------------------


def test_an_attached_trainer_is_watched_and_never_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    async def work() -> tuple[TrainerExit, TrainerExit]:
        attached = AttachedTrainer(process.pid)
        task = asyncio.create_task(attached.run())
        await asyncio.sleep(0)
        attached.kill()
        closed = await task
        assert process.poll() is None
        task = asyncio.create_task(AttachedTrainer(process.pid).run())
        await asyncio.sleep(0)
        process.kill()
        process.wait()
        return closed, await task

    try:
        closed, lost = run(work())
    finally:
        process.kill()
        process.wait()
    assert closed == TrainerExit(code=0, signal_name="", last_line="")
    assert lost.signal_name == "SIGKILL" and lost.code == -9 and lost.last_line == "its process is gone"


# -- restarts ---------------------------------------------------------------------------------------------------------


def test_so_many_restarts_within_the_window_and_no_more() -> None:
    now_s = [0.0]
    budget = RestartBudget(3, 600.0, lambda: now_s[0])
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    now_s[0] = 599.9
    assert not budget.take()
    now_s[0] = 600.0  # the first three are forgotten; what was refused never counted
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    assert not RestartBudget(0, 600.0, lambda: 0.0).take()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.lists(st.integers(0, 30), max_size=30))
def test_no_window_ever_has_more(restarts: int, pauses: list[int]) -> None:
    """Against counting by hand."""
    now_s = [0.0]
    budget = RestartBudget(restarts, 20.0, lambda: now_s[0])
    taken: list[float] = []
    for pause in pauses:
        now_s[0] += pause
        expected = sum(now_s[0] - 20 < t for t in taken) < restarts
        assert budget.take() is expected
        if expected:
            taken.append(now_s[0])
