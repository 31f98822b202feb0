"""Lines of events.jsonl and metrics.jsonl in words, for whoever watches a `join`."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from p2p_dmc.config import format_size

MOST_NAMES = 8
MOST_KEYS = 3
RATE_WINDOW_S = 10.0
REASON_CHARACTERS = 160
Line = dict[str, Any]


class Narrator:
    """Remembers names and what was taken over, so that a line can say them. Pure: no clock, no output."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.names: dict[str, str] = dict(names or {})
        self._takeovers: list[Line] = []
        self._rounds: deque[tuple[float, int]] = deque()
        self._skipped = 0

    def name(self, peer_id: str, *, whole: bool = False) -> str:
        """ "alice", or "vm (1f2e3d4c)" where several peers have the name; the start of the id where none is known."""
        name = self.names.get(peer_id)
        if not name:
            return peer_id[:8]
        shared = sum(other == name for other in self.names.values()) > 1
        return f"{name} ({peer_id[:8]})" if shared or whole else name

    # -- events -------------------------------------------------------------------------------------------------

    def event(self, line: Line) -> list[str]:
        """What a person should read of one event; [] for most."""
        if line["event"] == "takeover":
            self._takeovers.append(line)
            return []
        tell = getattr(self, f"_{line['event']}", None)
        return self.pending() + (tell(line) if tell is not None else [])

    def pending(self) -> list[str]:
        """One line for the takeovers since the last call: a view change brings one for each stretch."""
        taken, self._takeovers = self._takeovers, []
        lines = []
        for victim in sorted({t["from"] for t in taken}):
            by: Counter[str] = Counter()
            for one in taken:
                if one["from"] == victim:
                    by[one["to"]] += one["samples"]
            parts = ", ".join(f"{self.name(peer)} takes {samples}" for peer, samples in sorted(by.items()))
            lines.append(f"{sum(by.values())} samples of {self.name(victim)} are taken over: {parts}")
        return lines

    def _member(self, line: Line) -> list[str]:
        self.names[line["peer_id"]] = line["name"]
        who = self.name(line["peer_id"], whole=True)
        if line["state"] == "ALIVE":
            return [
                f"{who} answers again" if line["old"] == "SUSPECT" else f"{who} is here, at {line['address']}"
            ]
        if line["state"] == "SUSPECT":
            return [f"{who} does not answer ({short(line['reason'])})"]
        if line["state"] == "DEAD":
            return [f"{who} is lost ({short(line['reason'])})"]
        return [f"{who} has left"]

    def _view(self, line: Line) -> list[str]:
        members = line["members"]
        named = ", ".join(self.name(m) for m in members[:MOST_NAMES])
        more = f" and {len(members) - MOST_NAMES} more" if len(members) > MOST_NAMES else ""
        learners = [self.name(m) for m in line.get("learners", ())]
        joining = ""
        if learners:
            who = (
                ", ".join(learners[:MOST_NAMES])
                if len(learners) <= MOST_NAMES
                else plural(len(learners), "peer")
            )
            joining = f"; {who} catching up"
        return [f"view {line['view_epoch']}: {plural(len(members), 'peer')}, {named}{more}{joining}"]

    def _assignment(self, line: Line) -> list[str]:
        new, self._skipped = line["skipped"] - self._skipped, line["skipped"]
        return [f"{plural(new, 'sample')} of epoch {line['epoch'] + 1} will be skipped"] if new > 0 else []

    def _given_up(self, line: Line) -> list[str]:
        named, samples = line["keys"][:MOST_KEYS], line["samples"]
        more = f" and {samples - len(named)} more" if samples > len(named) else ""
        return [f"{plural(samples, 'sample')} skipped: {', '.join(map(repr, named))}{more}"]

    def _trainer_ready(self, line: Line) -> list[str]:
        return [f"trainer of run {line['run']!r} is ready"]

    def _trainer_lost(self, line: Line) -> list[str]:
        return [f"{self.name(line['peer_id'])} trains no longer ({short(line['reason'])})"]

    def _adopted(self, line: Line) -> list[str]:
        epoch, number = line["lineage"]
        if number == 0:
            return [f"has the run's first parameters, in {line['seconds']:.1f} s"]
        return [f"caught up with view {epoch} round {number} in {line['seconds']:.1f} s"]

    def _adoption_failed(self, line: Line) -> list[str]:
        return [f"the run's state could not be fetched ({short(line['reason'])}); trying again"]

    def _round_failed(self, line: Line) -> list[str]:
        return [f"round {line['round']} broke off ({short(line['reason'])}); it is done again"]

    def _diverged(self, line: Line) -> list[str]:
        odd = ", ".join(self.name(p) for p in line["odd"])
        return [f"at the same round another state is held by {odd}"]

    def _join_refused(self, line: Line) -> list[str]:
        return [f"{self.name(line['peer_id'])} is refused ({short(line['reason'])})"]

    def _history_given_up(self, line: Line) -> list[str]:
        if line["replaced"]:
            view_epoch, number = line["lineage"] or (0, 0)
            return [
                "the others went on without this peer, which was evicted or gone: what only it has trained, up to "
                f"view {view_epoch} round {number}, is given up, and it joins them as a newcomer"
            ]
        return ["others have trained this run already: this peer gives up its own start and joins theirs"]

    def _evicted(self, line: Line) -> list[str]:
        return [f"{self.name(line['peer_id'])} is evicted: the run goes on without it, under a new history"]

    def _stop_asked(self, line: Line) -> list[str]:
        return [f"run {line['run']!r} is asked to stop ({short(line['reason'])})"]

    def _checkpoint_failed(self, line: Line) -> list[str]:
        return [f"no checkpoint was written ({short(line['reason'])})"]

    def _bad_shard(self, line: Line) -> list[str]:
        return [
            f"shard {line['shard'][:12]} arrived damaged from {self.name(line['source'])}; another peer is asked"
        ]

    def _fault(self, line: Line) -> list[str]:
        return [f"internal fault ({short(line['reason'])}); see agent.log"]

    # -- rounds -------------------------------------------------------------------------------------------------

    def round(self, line: Line) -> str:
        """Where the run stands after one complete round."""
        rate = self._rate(line["time"], line["samples_round"])
        loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
        return (
            f"view {line['view_epoch']} round {line['round']}  peers {line['members']}  epoch {line['epoch'] + 1}  "
            f"tau {line['tau']}  loss {loss}  {rate} samples/s  sent {format_size(line['bytes_sent'])} a round"
        )

    def _rate(self, time_s: float, samples: int) -> str:
        """Over the last seconds; the samples of the window's first round came before it."""
        rounds = self._rounds
        rounds.append((time_s, samples))
        while len(rounds) > 2 and time_s - rounds[1][0] >= RATE_WINDOW_S:
            rounds.popleft()
        spent_s = time_s - rounds[0][0]
        return f"{sum(n for _, n in list(rounds)[1:]) / spent_s:,.0f}" if spent_s > 0 else "-"


def plural(count: int, noun: str) -> str:
    """ "1 peer", "2 peers"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def short(reason: str) -> str:
    """The first line of a reason, of bounded length."""
    line = reason.strip().partition("\n")[0]
    return line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 3] + "..."


def labels(members: Iterable[Line]) -> dict[str, str]:
    """How to call each peer in a table: by its name, with the start of its id where names are shared."""
    members = list(members)
    shared = Counter(m["name"] for m in members)
    return {
        m["peer_id"]: m["name"] if shared[m["name"]] == 1 else f"{m['name']} {m['peer_id'][:8]}"
        for m in members
    }


def printable(text: str) -> str:
    """Without control characters but line ends: names come from other machines, a terminal obeys what it reads."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
