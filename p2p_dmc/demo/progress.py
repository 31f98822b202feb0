"""Follows what the peers write in their journals while they run, and says what is new."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]

RATE_WINDOW_S = 5.0


class Tail:
    """The whole lines that a file has grown by since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Line]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(text) for text in whole.splitlines()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something a person may want to know, when it happened (unix seconds), and as facts."""

    time: float
    event: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class PeerProgress:
    """One peer as its journals show it."""

    name: str
    home: Path
    state: str = "waiting to start"
    peer_id: str = ""
    address: str = ""
    boot: int = 0
    view_epoch: int = 0
    round: int = 0
    rounds_since_boot: int = 0
    samples_per_s: float = 0.0
    """Of its own local steps."""
    bytes_sent: int = 0
    shards: int = 0


@dataclass(slots=True)
class RunProgress:
    """The run as the peers that complete its rounds show it."""

    view_epoch: int = 0
    members: tuple[str, ...] = ()
    round: int = 0
    epoch: int = 0
    tau: int = 0
    samples: int = 0
    losses: list[float] = field(default_factory=list)
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    """(unix seconds, samples so far) of the newest rounds."""

    @property
    def samples_per_s(self) -> float:
        """Over the last few seconds."""
        if len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return 0.0
        (then_s, before), (now_s, after) = self.recent[0], self.recent[-1]
        return (after - before) / (now_s - then_s)


class Progress:
    """Reads all journals at every `poll`."""

    def __init__(self, homes: Mapping[str, Path]) -> None:
        self.peers = {name: PeerProgress(name, home) for name, home in homes.items()}
        self.run = RunProgress()
        self.round_times: dict[str, list[tuple[float, int]]] = {name: [] for name in homes}
        """Per peer: (unix seconds, view epoch) of its rounds."""
        self._names: dict[str, str] = {}
        self._events = {name: Tail(home / "events.jsonl") for name, home in homes.items()}
        self._metrics = {name: Tail(home / "metrics.jsonl") for name, home in homes.items()}
        self._seen: set[tuple[Any, ...]] = set()
        self._seen_round = (0, 0)
        self._rings: dict[int, tuple[str, ...]] = {}
        """Per view, its members' peer_ids in ring order: `speeds` come in that order."""

    def name(self, peer_id: str) -> str:
        return self._names.get(peer_id, peer_id[:8])

    def poll(self) -> list[Notice]:
        """What is new, oldest first."""
        notices: list[Notice] = []
        for name, tail in self._events.items():
            lines = tail.read()
            for line in lines:
                notices += self._event(self.peers[name], line)
            notices += self._takeovers([line for line in lines if line["event"] == "takeover"])
        for name, tail in self._metrics.items():
            for line in tail.read():
                self._round(self.peers[name], line)
        return sorted(notices, key=lambda notice: notice.time)

    def rounds_without(self, absent: str, name: str, since_s: float) -> list[float]:
        """When a peer completed rounds of views that ``absent`` was not in, since then."""
        absent_id = self.peers[absent].peer_id
        views = {view for view, ring in self._rings.items() if absent_id not in ring}
        return [s for s, view in self.round_times[name] if view in views and s >= since_s]

    def count_shards(self) -> None:
        """How many shard files lie in each home."""
        for peer in self.peers.values():
            peer.shards = sum(1 for _ in peer.home.glob("store/*/shards/*.tar"))

    # -- events ----------------------------------------------------------------------------------------------

    def _event(self, peer: PeerProgress, line: Line) -> Iterator[Notice]:
        event = line["event"]
        if event == "started":
            peer.peer_id, peer.address, peer.boot = line["peer_id"], line["address"], line["boot"]
            peer.rounds_since_boot, peer.state = 0, "starting"
            self._names[peer.peer_id] = peer.name
        elif event == "trainer_ready":
            peer.state = "ready"
        elif event == "view":
            yield from self._view(peer, line)
        elif event == "member":
            yield from self._member(peer, line)
        elif event == "run_over":
            peer.state = line["outcome"]
        elif event in ("fault", "diverged", "refused", "bad_shard", "store_full", "shard_corrupt"):
            what = line.get("reason") or line.get("shard") or line.get("odd")
            yield self._notice(line, f"{peer.name}: {event.replace('_', ' ')}: {what}", peer=peer.name)

    def _notice(self, line: Line, text: str, **facts: Any) -> Notice:
        return Notice(time=line["time"], event=line["event"], text=text, facts=facts)

    def _first(self, *key: Any) -> bool:
        """Whether nobody has told this before: all members of a view write the same."""
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _view(self, peer: PeerProgress, line: Line) -> Iterator[Notice]:
        peer.view_epoch, peer.state = line["view_epoch"], "training"
        self._rings[line["view_epoch"]] = tuple(line["members"])
        if line["view_epoch"] > self.run.view_epoch:
            self.run.view_epoch = line["view_epoch"]
            self.run.members = tuple(sorted(self.name(p) for p in line["members"]))
        if self._first("view", line["history"], line["view_epoch"]):
            members = tuple(sorted(self.name(p) for p in line["members"]))
            yield self._notice(
                line,
                f"view {line['view_epoch']}: {', '.join(members)}, from round {line['start'][1]}",
                view_epoch=line["view_epoch"],
                members=members,
            )

    def _member(self, peer: PeerProgress, line: Line) -> Iterator[Notice]:
        subject = self.name(line["peer_id"])
        if line["state"] not in ("DEAD", "LEFT") or not self._first(
            *map(line.get, ("state", "peer_id", "boot"))
        ):
            return
        saw = "is dead" if line["state"] == "DEAD" else "has left"
        yield self._notice(
            line,
            f"{peer.name} notices first that {subject} {saw}: {line['reason']}",
            peer=peer.name,
            subject=subject,
            state=line["state"],
            reason=line["reason"],
        )

    def _takeovers(self, lines: Sequence[Line]) -> Iterator[Notice]:
        """One notice for all that one peer takes over from another in a view."""
        taken: dict[tuple[str, str], list[Line]] = {}
        for line in lines:
            if self._first("takeover", *map(line.get, ("view_epoch", "shard", "from", "to", "first"))):
                taken.setdefault((line["from"], line["to"]), []).append(line)
        for (old_id, new_id), parts in sorted(taken.items()):
            old, new = self.name(old_id), self.name(new_id)
            samples, shards = sum(part["samples"] for part in parts), len({part["shard"] for part in parts})
            yield self._notice(
                parts[0],
                f"{new} takes over {samples} files of {old}'s, from {shards} shard{'s' * (shards != 1)}",
                view_epoch=parts[0]["view_epoch"],
                **{"from": old, "to": new},
                samples=samples,
                shards=shards,
            )

    # -- rounds ----------------------------------------------------------------------------------------------

    def _round(self, peer: PeerProgress, line: Line) -> None:
        lineage = (line["view_epoch"], line["round"])
        peer.view_epoch, peer.round = lineage
        peer.rounds_since_boot += 1
        peer.bytes_sent += line["bytes_sent"]
        self.round_times[peer.name].append((line["time"], line["view_epoch"]))
        ring = self._rings.get(line["view_epoch"], ())
        if peer.peer_id in ring:
            peer.samples_per_s = line["speeds"][ring.index(peer.peer_id)]
        if lineage <= self._seen_round:
            return
        self._seen_round = lineage
        run = self.run
        run.round, run.epoch, run.tau = line["round"], line["epoch"], line["tau"]
        run.samples = line["samples_total"]
        if line["loss"] is not None:
            run.losses.append(line["loss"])
        run.recent.append((line["time"], line["samples_total"]))
        while len(run.recent) > 2 and run.recent[-1][0] - run.recent[0][0] > RATE_WINDOW_S:
            run.recent.popleft()
