"""The demo's story: seed, four peers, the seeder leaves, one is killed and comes back, all finish."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from p2p_dmc.demo.plan import DATASET, SCRIPT, Plan, stage_sources
from p2p_dmc.demo.processes import PeerProcess, Processes, alive
from p2p_dmc.demo.progress import Notice, Progress
from p2p_dmc.demo.screen import Screen
from p2p_dmc.errors import UserError

POLL_S = 0.1
SEEDER = "seeder"


@dataclass(slots=True)
class Outcome:
    """What happened, and when (unix seconds; 0 if it did not)."""

    homes: dict[str, Path]
    victim: str
    files: int = 0
    shards: int = 0
    began_s: float = 0.0
    training_s: float = 0.0
    """When the last peer had completed its first round."""
    seeder_left_s: float = 0.0
    killed_s: float = 0.0
    killed_pids: tuple[int, ...] = ()
    left_running: tuple[int, ...] = ()
    """Of the killed tree: must be empty."""
    killed_at_samples: int = 0
    recovered_s: dict[str, float] = field(default_factory=dict)
    """Per survivor, when it completed its first round of a view without the victim."""
    returned_s: float = 0.0
    """When the victim was started again."""
    trained_again_s: float = 0.0
    """When it completed its first round after that."""
    ended_s: float = 0.0
    notices: list[Notice] = field(default_factory=list)


class Story:
    """Runs the plan. Whoever starts it closes `processes` afterwards, whatever happened."""

    def __init__(self, plan: Plan, base: Path, homes: Path, screen: Screen, processes: Processes) -> None:
        self._plan, self._base, self._screen = plan, base, screen
        self._processes = processes
        self._seeder = processes.add(SEEDER, homes / SEEDER)
        self._peers = {name: processes.add(name, homes / name) for name in plan.names}
        self.progress = Progress({name: homes / name for name in (SEEDER, *plan.names)})
        victim = random.Random(plan.seed).choice(plan.names)
        self.outcome = Outcome(homes={name: homes / name for name in plan.names}, victim=victim)
        self._expected_to_end = {SEEDER}
        self._moved_s = time.monotonic()

    def run(self) -> Outcome:
        """The whole story; UserError when a peer fails or nothing moves any more."""
        self.outcome.began_s = time.time()
        address = self._seed()
        self._join_all(address)
        self._seeder_leaves()
        if self._plan.kill:
            self._kill()
            self._bring_back()
        self._finish()
        return self.outcome

    # -- chapters --------------------------------------------------------------------------------------------

    def _seed(self) -> str:
        sources = self._base / DATASET
        files, size = stage_sources(sources, self._plan.files)
        self.outcome.files = files
        self._say("phase", f"seeding {files} files of this machine's Python library, {size / 1e6:.1f} MB")
        self._seeder.start(
            *("seed-dataset", str(sources), "--name", DATASET, "--mode", "folder"),
            *("--replicas", str(self._plan.replicas), "--leave-when-replicated"),
            *("--home", str(self._seeder.home), "--peer-name", SEEDER, "--json"),
        )

        def seeding() -> bool:
            return any(fact.get("event") == "seeding" for fact in self._seeder.facts())

        self._until(seeding, "the data set to be seeded")
        fact = next(fact for fact in self._seeder.facts() if fact.get("event") == "seeding")
        self.outcome.shards = fact["shards"]
        self._say(
            "seeding",
            f"{fact['shards']} shards, {self._plan.replicas} replicas wanted, served at {fact['address']}",
            shards=fact["shards"],
            samples=fact["samples"],
            address=fact["address"],
        )
        return str(fact["address"])

    def _join(self, peer: PeerProcess, seed: str) -> None:
        peer.start(
            *("join", "--home", str(peer.home), "--name", peer.name, "--min-peers", str(self._plan.peers)),
            *("--checkpoint-every", "10s", "--json", seed, str(SCRIPT), *self._plan.script_arguments),
        )

    def _join_all(self, seed: str) -> None:
        """The first with the seeder's address, the others with both: the seeder may be gone before they ask."""
        names = ", ".join(self._peers)
        self._say("phase", f"{names} join; each imports torch, fetches its shards, and they found a run")
        first = self.progress.peers[self._plan.names[0]]
        for peer in self._peers.values():
            self._join(peer, f"{seed},{first.address}" if first.address else seed)
            self._until(lambda: first.address != "", "the first peer to listen")
        self._until(lambda: all(self.progress.round_times[n] for n in self._peers), "the first round")
        self.outcome.training_s = time.time()
        self._say("training", "every peer has completed its first round")

    def _seeder_leaves(self) -> None:
        self._until(lambda: not self._seeder.running, "every shard to have its holders")
        self.outcome.seeder_left_s = time.time()
        self.progress.peers[SEEDER].state = "left"
        if self._seeder.code:
            raise UserError(f"the seeding peer failed: {self._seeder.last_line()}")
        self._say("seeder_left", "the seeding peer is gone: every shard has its holders among the others")

    def _kill(self) -> None:
        outcome, due = self.outcome, self._samples_due()
        victim = self._peers[outcome.victim]

        def in_the_midst() -> bool:
            """A third of the way in, and not at an epoch's end, when nobody has anything left to take over."""
            samples = self.progress.run.samples
            return samples >= self._plan.kill_at * due and 0.1 < samples / outcome.files % 1 < 0.7

        self._until(in_the_midst, "a third of the run")
        if not victim.running:
            raise UserError(
                f"{victim.name} had ended before it could be killed; its words: {victim.last_line()}"
            )
        outcome.killed_at_samples = self.progress.run.samples
        self._expected_to_end.add(victim.name)
        outcome.killed_s = time.time()
        outcome.killed_pids = victim.kill_tree()
        self.progress.peers[victim.name].state = "killed"
        self._say(
            "kill",
            f"SIGKILL to {victim.name}'s whole process tree ({', '.join(map(str, outcome.killed_pids))})",
            peer=victim.name,
            pids=outcome.killed_pids,
        )
        self._until(self._recovered, "the survivors' next round")
        outcome.left_running = alive(outcome.killed_pids)
        longest = max(outcome.recovered_s.values()) - outcome.killed_s
        self._say("recovered", f"all survivors have completed a round again, {longest:.2f} s after the kill")

    def _recovered(self) -> bool:
        """Every survivor has completed a round of a view without the victim. Notes when."""
        outcome = self.outcome
        for name in self._peers:
            times = self.progress.rounds_without(outcome.victim, name, outcome.killed_s)
            if name != outcome.victim and times:
                outcome.recovered_s.setdefault(name, times[0])
        return len(outcome.recovered_s) == len(self._peers) - 1

    def _bring_back(self) -> None:
        outcome, due = self.outcome, self._samples_due()
        victim = self._peers[outcome.victim]
        self._until(lambda: self.progress.run.samples >= self._plan.return_at * due, "half of the run")
        helper = next(name for name in self._peers if name != victim.name)
        self._join(victim, self.progress.peers[helper].address)
        self._expected_to_end.discard(victim.name)
        outcome.returned_s = time.time()
        self._say("return", f"{victim.name} is started again, with {helper}'s address", peer=victim.name)

    def _finish(self) -> None:
        outcome, victim = self.outcome, self.progress.peers[self.outcome.victim]
        boot = victim.boot
        self._expected_to_end |= set(self._peers)

        def over() -> bool:
            if not outcome.trained_again_s and victim.boot > boot and victim.rounds_since_boot:
                outcome.trained_again_s = self.progress.round_times[victim.name][-1][0]
                self._say(
                    "trained_again",
                    f"{victim.name} trains again, {outcome.trained_again_s - outcome.returned_s:.1f} s after its start",
                    peer=victim.name,
                )
            return not any(peer.running for peer in self._peers.values())

        self._until(over, "all peers to finish")
        outcome.ended_s = time.time()
        self._poll()
        for peer in self._peers.values():
            if peer.code:
                raise UserError(f"{peer.name} failed: {peer.last_line()}")
        self._say("phase", "all peers have finished")

    # -- plumbing --------------------------------------------------------------------------------------------

    def _samples_due(self) -> int:
        return self.outcome.files * self._plan.epochs

    def _say(self, event: str, text: str, **facts: object) -> None:
        self._screen.event(time.time() - self.outcome.began_s, event, text, **facts)

    def _poll(self) -> None:
        round_before = self.progress.run.round
        notices = self.progress.poll()
        for notice in notices:
            at_s = notice.time - self.outcome.began_s
            self._screen.event(at_s, notice.event, notice.text, **notice.facts)
        self.outcome.notices += notices
        if notices or self.progress.run.round != round_before:
            self._moved_s = time.monotonic()
        self._screen.show(
            time.time() - self.outcome.began_s, self.progress, self._samples_due(), self._plan.epochs
        )

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Follow the peers until something is so; UserError when one has ended that should not, or none moves."""
        self._moved_s = time.monotonic()
        while True:
            self._poll()
            if condition():
                return
            for peer in self._processes.peers.values():
                early = peer.code is not None and peer.name not in self._expected_to_end
                if early or peer.code not in (None, 0, -9):
                    raise UserError(f"{peer.name} ended while waiting for {what}: {peer.last_line()}")
            if time.monotonic() - self._moved_s > self._plan.stall_s:
                raise UserError(
                    f"nothing has moved for {self._plan.stall_s:g} s while waiting for {what}; "
                    "look into the homes' agent.log with --keep DIR"
                )
            time.sleep(POLL_S)
