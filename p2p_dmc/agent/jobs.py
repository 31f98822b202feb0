"""Scripts that this agent runs as trainers, and whoever waits for them (DESIGN.md sections 2, 10, 11)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from p2p_dmc.agent import run_files
from p2p_dmc.agent.entering import pinned_version
from p2p_dmc.agent.run import Run
from p2p_dmc.agent.supervisor import AttachedTrainer, RestartBudget, TrainerExit, TrainerProcess
from p2p_dmc.agent.waiting import say_waiting
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.errors import RemoteProtocolError, UserError
from p2p_dmc.wire import trainer_messages as local
from p2p_dmc.wire.messages import LocalLine, SubmitEnded, SubmitScript

if TYPE_CHECKING:
    from p2p_dmc.agent.agent import Agent

SHARD_AGAIN_S = 5.0
"""A shard that a trainer waits for is looked for again after so long."""


class RunFinishedError(Exception):
    """Nothing is left to do: not a failure."""


@dataclass(slots=True)
class Job:
    """One submitted script."""

    submit: SubmitScript
    run: Run
    tell: Callable[[object], None]
    process: TrainerProcess | AttachedTrainer | None = None
    trainer_id: bytes | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    result: SubmitEnded | None = None
    stopping: bool = False
    silent_ticks: int = 0
    """Of this agent's clock, since the trainer last said something: an agent that was stopped itself counts none."""

    bye: bool = False
    """The trainer has closed its session, and says nothing any more."""

    def closed(self) -> None:
        """The trainer has closed its session; a process that goes on has no more to do with this job."""
        self.bye = True
        if isinstance(self.process, AttachedTrainer):
            self.process.kill()

    elsewhere: bool = False
    """Whoever waits for it is another process than the agent's, and does not see what the agent says."""


class Jobs:
    """At most one script per run on one peer."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._jobs: dict[str, Job] = {}
        self._run_of_trainer: dict[bytes, str] = {}
        agent.journal.listeners.append(self._journal_line)
        self.last_round: dict[str, dict[str, Any]] = {}

    def submit(self, submit: SubmitScript, tell: Callable[[object], None], *, elsewhere: bool = False) -> Job:
        """Start a script; ``tell`` hears LocalLine and finally SubmitEnded. UserError when that run has one here."""
        agent = self._agent
        running = self._jobs.get(submit.run)
        if running is not None and running.result is None:
            raise UserError(
                f"run {submit.run!r} already has a trainer on this peer; give another --run name, "
                "or another --home for a second peer on this machine"
            )
        if run_files.load_run(agent.home.run_folder(submit.run)).get("finished"):
            path = agent.home.run_folder(submit.run) / "final" / "model.safetensors"
            raise RunFinishedError(
                f"run {submit.run!r} is finished: {path}; give another --run name to train anew"
            )
        options = run_files.RunOptions(
            quorum=submit.quorum,
            backend=submit.backend,
            min_peers=submit.min_peers,
            checkpoint_every_s=submit.checkpoint_every_s,
            on_lost=submit.on_lost,
        )
        previous = agent.runs.get(submit.run)
        if previous is not None:
            agent.spawn(previous.shut_down())
        run = Run(submit.run, options, agent.services())
        agent.runs[submit.run] = run
        job = Job(submit=submit, run=run, tell=tell, elsewhere=elsewhere)
        self._jobs[submit.run] = job
        agent.meta_changed()
        agent.spawn(self._work(job))
        agent.spawn(say_waiting(run, lambda line: tell(LocalLine(kind="say", data=line.encode()))))
        return job

    async def _work(self, job: Job) -> None:
        budget = RestartBudget(
            self._agent.settings.trainer_restarts, self._agent.settings.trainer_restart_window_s
        )
        while True:
            job.process = (
                AttachedTrainer(job.submit.attach)
                if job.submit.attach
                else TrainerProcess(
                    run=job.submit.run,
                    script=job.submit.script,
                    arguments=job.submit.arguments,
                    folder=job.submit.folder,
                    environment=dict(job.submit.environment),
                    endpoint=self._agent.endpoint,
                    log_path=self._agent.home.root / "trainer.log",
                    on_output=lambda data: job.tell(LocalLine(kind="output", data=data)),
                )
            )
            ended = await job.process.run()
            if job.trainer_id is not None:
                self._run_of_trainer.pop(job.trainer_id, None)
                job.trainer_id = None
            self._agent.journal.event(
                "trainer_exit", run=job.run.name, code=ended.code, signal=ended.signal_name
            )
            await job.run.end.settle()  # nobody is to miss this peer because its script ended meanwhile
            result = self._judge(job, ended, budget)
            if result is not None:
                await self._finish(job, result)
                return

    def _judge(self, job: Job, ended: TrainerExit, budget: RestartBudget) -> SubmitEnded | None:
        """What a trainer's end means; None: start it again."""
        run, outcome = job.run, job.run.end.outcome
        if outcome == "finished":
            if ended.code:
                return SubmitEnded(
                    code=1, line=f"the run is finished, but the script failed: {ended.last_line}"
                )
            return SubmitEnded(code=0, line=run.end.detail)
        if outcome == "stopped" and ended.code > 0 and not job.stopping:
            line = f"run {run.name!r} is stopped, but the script failed: {ended.last_line}"
            return SubmitEnded(code=1, line=line)
        if outcome in ("stopped", "left") or job.stopping:
            return SubmitEnded(
                code=0, line=f"run {run.name!r} {outcome or 'left'}; the same command goes on from there"
            )
        if outcome:
            return SubmitEnded(code=1, line=run.end.detail)
        if ended.code == 0:
            run.desk.lost("its script ended", in_hand=False)
            run.end.over("failed", "")
            return SubmitEnded(
                code=1,
                line=f"{job.submit.script} ended before its run did; iterate over peer.loader(...) to the end",
            )
        if not ended.signal_name:
            run.desk.lost(f"its script failed: {ended.last_line}", in_hand=True)
            run.end.over("failed", ended.last_line)
            return SubmitEnded(code=1, line=f"{job.submit.script} failed: {ended.last_line}")
        run.desk.lost(f"killed by {ended.signal_name}", in_hand=True)
        if not job.submit.attach and budget.take():
            self._agent.say(
                f"trainer of run {run.name!r} was killed by {ended.signal_name}; it is started again"
            )
            return None
        run.end.over("failed", f"killed by {ended.signal_name}")
        return SubmitEnded(
            code=1,
            line=f"trainer of run {run.name!r} was killed by {ended.signal_name} "
            f"{self._agent.settings.trainer_restarts + 1} times in "
            f"{self._agent.settings.trainer_restart_window_s / 60:g} minutes; see trainer.log",
        )

    async def _finish(self, job: Job, result: SubmitEnded) -> None:
        if job.run.end.outcome in ("finished", "stopped"):
            # the others may still need this peer's last headers; the trainer's own end has taken some of the time
            while (left_s := job.run.end.linger_s(time.monotonic())) > 0:
                await asyncio.sleep(left_s)
        job.result = result
        job.tell(result)
        job.ended.set()
        self._agent.data.release_use()

    def run_over(self, run: str) -> None:
        """The run is over on this peer; its trainer is told, and killed if it does not go."""
        job = self._jobs.get(run)
        if job is not None and job.run.end.outcome not in ("finished",):
            self._agent.spawn(self._end_trainer(job, "the run is over here"))

    async def _end_trainer(self, job: Job, reason: str) -> None:
        if job.trainer_id is None and job.process is not None:
            job.process.kill()  # it is still importing: nobody hears a word yet
        job.run.to_trainer(local.TrainerStop(reason=reason))
        try:
            await asyncio.wait_for(job.ended.wait(), 8.0)
        except asyncio.TimeoutError:
            if job.process is not None:
                job.process.kill()

    def leave(self, run: str, reason: str) -> None:
        """This peer leaves one run; UserError when it is not in it."""
        job = self._jobs.get(run)
        if job is None or job.result is not None:
            raise UserError(f"run {run!r} is not under way on this peer")
        self._agent.spawn(self._leave(job, reason))

    async def _leave(self, job: Job, reason: str) -> None:
        job.stopping = True
        await job.run.end.save_before_leaving()
        await job.run.end.leave_between_rounds()
        job.run.withdraw(reason)
        job.run.end.over("left", reason)

    async def stop_all(self, reason: str) -> None:
        """This peer leaves: every trainer is ended, every run told."""
        await asyncio.gather(*(self._leave(job, reason) for job in self._jobs.values() if job.result is None))
        pending = [asyncio.create_task(j.ended.wait()) for j in self._jobs.values() if j.result is None]
        if pending:
            await asyncio.wait(pending, timeout=10.0)
        self.kill_all()

    @property
    def all_finished(self) -> bool:
        """There was something to train here, and all of it is finished."""
        return bool(self._jobs) and all(job.run.end.outcome == "finished" for job in self._jobs.values())

    def kill_all(self) -> None:
        """No trainer outlives this agent."""
        for job in self._jobs.values():
            if job.process is not None:
                job.process.kill()

    # -- messages -----------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """A trainer that says nothing any more is ended; the rest follows from its end.

        Once the run is finished and its session closed a script may take as long as it likes, with an evaluation say.
        """
        limit = self._agent.settings.trainer_silence_s * 1000 / self._agent.settings.tick_ms
        for job in self._jobs.values():
            done = job.bye and job.run.end.outcome == "finished"
            if job.trainer_id is None or job.submit.attach or job.process is None or done:
                continue
            job.silent_ticks += 1
            if job.silent_ticks > limit:
                job.silent_ticks = 0
                self._agent.say(
                    f"trainer of run {job.run.name!r} has said nothing for "
                    f"{self._agent.settings.trainer_silence_s:g} s; it is killed"
                )
                self._agent.journal.event("trainer_silent", run=job.run.name)
                job.process.kill()

    def message(self, routing_id: bytes, message: object) -> None:
        """From a trainer, or from a command that hands over a script."""
        trained = self._jobs.get(self._run_of_trainer.get(routing_id, ""))
        if trained is not None:
            trained.silent_ticks = 0
        if isinstance(message, SubmitScript):
            self._submitted(routing_id, message)
        elif isinstance(message, local.TrainerHello):
            self._hello(routing_id, message)
        elif isinstance(message, local.DatasetRequest):
            self._agent.spawn(self._dataset(routing_id, message.name))
        elif isinstance(message, local.ShardRequest):
            self._shard(routing_id, message)
        else:
            job = self._jobs.get(self._run_of_trainer.get(routing_id, ""))
            if job is None or job.trainer_id != routing_id:
                raise RemoteProtocolError("a message of no trainer of this agent")
            if isinstance(message, local.TrainerBye):
                job.closed()
            elif isinstance(message, local.TrainerAlive):
                pass  # that was all
            else:
                job.run.trainer_message(message)

    def _submitted(self, routing_id: bytes, submit: SubmitScript) -> None:
        def tell(message: object) -> None:
            self._agent.local.send(routing_id, message)

        try:
            self.submit(submit, tell, elsewhere=True)
        except RunFinishedError as finished:
            tell(SubmitEnded(code=0, line=str(finished)))
        except UserError as error:
            tell(SubmitEnded(code=1, line=str(error)))

    def relay(self, line: str) -> None:
        """What the agent says, to those who wait for a script in another process."""
        for job in self._jobs.values():
            if job.elsewhere and job.result is None:
                job.tell(LocalLine(kind="say", data=line.encode(errors="backslashreplace")))

    def _hello(self, routing_id: bytes, hello: local.TrainerHello) -> None:
        job = self._jobs.get(hello.run)
        if job is None or job.process is None or job.process.pid != hello.pid:
            raise RemoteProtocolError(f"process {hello.pid} is no trainer of this agent")
        job.trainer_id, job.silent_ticks, job.bye = routing_id, 0, False
        self._run_of_trainer[routing_id] = hello.run
        job.run.desk.connected(lambda message: self._agent.local.send(routing_id, message))
        agent = self._agent
        job.run.to_trainer(
            local.TrainerWelcome(
                peer_id=agent.peer_id,
                name=agent.options.name,
                home=str(agent.home.root),
                store_root=str(agent.home.store_root),
                collective_host=job.run.services.collective_host(),
                checkpoint_every_s=job.run.options.checkpoint_every_s,
            )
        )

    async def _dataset(self, routing_id: bytes, name: str) -> None:
        """Wait until the data set is known and its first shard is here; say what is waited for."""
        said_s = 0.0
        data, loop = self._agent.data, asyncio.get_running_loop()
        started_s = loop.time()
        while True:
            if routing_id not in self._run_of_trainer:
                return  # the trainer that asked has ended
            manifest = self._version(self._run_of_trainer[routing_id], name)
            if manifest is not None:
                placed = data.placed(manifest.digest)
                if data.held(manifest.digest) or (placed and not placed.shards_of(self._agent.peer_id)):
                    break
            if loop.time() - max(started_s, said_s) > (2.0 if not said_s else 30.0):
                said_s = loop.time()
                known = ", ".join(sorted(m.name for m in data.manifests())) or "none"
                self._agent.say(
                    f"waiting for the first shards of data set {name!r}"
                    if manifest is not None
                    else f"waiting for data set {name!r}, which no peer has that is in contact; known so far: {known} "
                    "(seed it, or Ctrl-C and correct the name)"
                )
            await asyncio.sleep(0.05)
        path = self._agent.home.store_root / manifest.digest.hex() / "manifest.msgpack"
        ready = local.DatasetReady(name=name, digest=manifest.digest, manifest_path=str(path))
        self._agent.local.send(routing_id, ready)

    def _version(self, run: str, name: str) -> Manifest | None:
        """What a script means by a data set's name: in a run that has begun, the version with which it did."""
        agent = self._agent
        pinned = pinned_version(agent.runs[run], name) if run in agent.runs else None
        if pinned is not None:
            return agent.data.by_name(pinned)
        manifest = agent.data.by_name(name)
        has_others = manifest is not None and manifest.generation > 0
        if has_others and agent.options.seeds and agent.membership and not agent.membership.seed_contacted:
            return None  # whom it is about to meet may have begun with another version
        return manifest

    def _shard(self, routing_id: bytes, wanted: local.ShardRequest) -> None:
        data = self._agent.data
        manifest = data.manifest(wanted.dataset)
        if manifest is None or not 0 <= wanted.shard < len(manifest.shards):
            raise RemoteProtocolError("a shard of no data set")
        self._agent.spawn(self._get_shard(routing_id, wanted))

    async def _get_shard(self, routing_id: bytes, wanted: local.ShardRequest) -> None:
        """Wanted until it is here: whoever had it may fail, and somebody else have it later."""
        data, came = self._agent.data, asyncio.Event()
        while not data.usable(wanted.dataset, wanted.shard):
            if routing_id not in self._run_of_trainer:
                return  # the trainer that asked has ended
            came.clear()
            data.want(wanted.dataset, wanted.shard, came.set)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(came.wait(), SHARD_AGAIN_S)
        path = str(data.store.path(wanted.dataset, wanted.shard))
        ready = local.ShardReady(dataset=wanted.dataset, shard=wanted.shard, path=path)
        self._agent.local.send(routing_id, ready)

    def _journal_line(self, kind: str, line: dict[str, Any]) -> None:
        if kind == "round":
            self.last_round[line["run"]] = line
        job = self._jobs.get(line.get("run", ""))
        data = json.dumps(line, separators=(",", ":")).encode()
        for one in [job] if job is not None else list(self._jobs.values()):
            if one.result is None:
                one.tell(LocalLine(kind=kind, data=data))
