"""The trainer's process: started, watched, restarted when a signal killed it (DESIGN.md sections 2 and 10)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2p_dmc.wire.trainer_messages import ENV_AGENT, ENV_LIFELINE, ENV_RUN

ATTACHED_LOOK_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerExit:
    """How a trainer ended. ``signal_name`` is "" when it exited by itself; ``last_line`` of what it printed."""

    code: int
    signal_name: str
    last_line: str


class TrainerProcess:
    """One trainer process. It dies with its agent: a pipe that only the agent holds open is its lifeline."""

    def __init__(
        self,
        *,
        run: str,
        script: str,
        arguments: Sequence[str],
        endpoint: str,
        folder: str,
        environment: Mapping[str, str],
        log_path: Path,
        on_output: Callable[[bytes], None],
    ) -> None:
        self._run = run
        self._script = script
        self._arguments = tuple(arguments)
        self._endpoint = endpoint
        self._folder = folder
        self._environment = environment
        self._log_path = log_path
        self._on_output = on_output
        self._process: asyncio.subprocess.Process | None = None
        self._tail = b""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self) -> TrainerExit:
        """Start it and wait for its end; its output goes to trainer.log and to ``on_output`` as it comes."""
        lifeline, held_open = os.pipe()
        output, its_output = os.pipe()  # asyncio's own would keep wait() until every copy of it is closed
        environment = dict(self._environment)
        environment |= {ENV_AGENT: self._endpoint, ENV_RUN: self._run, ENV_LIFELINE: str(lifeline)}
        environment |= {"PYTHONUNBUFFERED": "1"}
        try:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "p2p_dmc.train.main",
                    self._script,
                    *self._arguments,
                    env=environment,
                    cwd=self._folder,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=its_output,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=(lifeline,),
                    start_new_session=True,  # Ctrl-C is the agent's to handle
                )
            finally:
                os.close(lifeline)
                os.close(its_output)
            code = await self._copy_output(self._process, output)
        finally:
            os.close(output)
            os.close(held_open)
            self.kill()
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        name = signal.Signals(-code).name if code < 0 else ""
        return TrainerExit(code=code, signal_name=name, last_line=lines[-1].strip() if lines else "")

    async def _copy_output(self, process: asyncio.subprocess.Process, output: int) -> int:
        """Until its end, not the pipe's: a process that the script left behind may hold that open."""
        loop = asyncio.get_running_loop()
        os.set_blocking(output, False)
        with open(self._log_path, "ab", buffering=0) as log_file:

            def copy() -> None:
                """Take what is there."""
                data = b""
                with contextlib.suppress(BlockingIOError):
                    data = os.read(output, 1 << 16)
                    if not data:
                        loop.remove_reader(output)
                if data:
                    self._tail = (self._tail + data)[-8192:]
                    with contextlib.suppress(OSError):  # a full disk costs lines, not the run
                        log_file.write(data)
                    self._on_output(data)

            loop.add_reader(output, copy)
            try:
                code = await process.wait()
                copy()  # all that the pipe can hold; another process may go on writing
            finally:
                loop.remove_reader(output)
        return code

    def kill(self) -> None:
        """End it at once, if it still runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()


class AttachedTrainer:
    """A trainer in a process that this agent did not start (a notebook): watched, never killed."""

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid
        self._closed = asyncio.Event()

    async def run(self) -> TrainerExit:
        """Until its session is closed or its process is gone."""
        while self.pid is not None and not self._closed.is_set():
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return TrainerExit(
                    code=-signal.SIGKILL, signal_name="SIGKILL", last_line="its process is gone"
                )
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), ATTACHED_LOOK_S)
        return TrainerExit(code=0, signal_name="", last_line="")

    def kill(self) -> None:
        """The session is over as far as this agent goes; the process is the user's."""
        self._closed.set()


class RestartBudget:
    """At most so many restarts within a window; beyond that, something is wrong that restarting does not mend."""

    def __init__(self, restarts: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._restarts = restarts
        self._window_s = window_s
        self._clock = clock
        self._when: list[float] = []

    def take(self) -> bool:
        """Whether one more restart is allowed now; counts it."""
        now_s = self._clock()
        self._when = [t for t in self._when if now_s - t < self._window_s]
        if len(self._when) >= self._restarts:
            return False
        self._when.append(now_s)
        return True
