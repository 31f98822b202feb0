"""Did a run keep its promises? Read from all its homes' journals (DESIGN.md section 4, invariants 1, 3, 12).

The journals are what each peer wrote when it completed a round or installed a view, so those of a killed peer
count too. The audit shares no code with what it judges but the oracle `core.ledger.check_exact`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_dmc.agent.run_files import load_run, parts_of
from p2p_dmc.core.ledger import Stretch, check_exact
from p2p_dmc.data.disk import MANIFEST_NAME
from p2p_dmc.data.manifest import Manifest
from p2p_dmc.data.mixture import Mixture, Part
from p2p_dmc.errors import UserError
from p2p_dmc.observe.journal import read_lines

Lineage = tuple[int, int]
Line = dict[str, Any]

START: Lineage = (0, 0)
"""Lineage of the state before the first round."""

SAME_ON_ALL = (
    "digest",
    "state",
    "tau",
    "loss",
    "epoch",
    "samples_round",
    "samples_total",
    "counted",
    "skipped",
)
"""Fields of a round's line that are functions of committed state or of the round's headers."""

SAME_OF_A_VIEW = ("history", "members", "start", "digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJournal:
    """What one home wrote about one run, oldest line first."""

    peer: str
    """The home's folder name."""
    rounds: tuple[Line, ...]
    """Of metrics.jsonl, each with the `history` of its view added."""
    events: tuple[Line, ...]
    """Of events.jsonl: those of the run, and those of the peer as a whole (membership, shards)."""

    def of(self, event: str) -> Iterator[Line]:
        return (line for line in self.events if line["event"] == event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the journals say. The run kept its promises if both lists of faults are empty."""

    history: str
    head: Lineage
    """The last round of the winning lineage."""
    rounds: tuple[Line, ...]
    """One line per round of the winning lineage, in order."""
    compared: int
    """Rounds that at least two peers completed, winning or not."""
    unequal: tuple[str, ...]
    """Where two peers differ in something that they must share."""
    finished_epochs: int
    samples_due: int
    """Samples of the finished epochs."""
    samples_counted: int
    """Samples counted in the finished epochs by the rounds of the winning lineage."""
    inexact: tuple[str, ...]
    """Where the ledger is not exact."""

    @property
    def ok(self) -> bool:
        return not self.unequal and not self.inexact


def read_journal(home: Path, run: str) -> PeerJournal:
    """One home's lines about ``run``; empty when it never took part."""
    events = [e for e in read_lines(home / "events.jsonl") if e.get("run", run) == run]
    views = [e for e in events if e["event"] == "view"]
    rounds = [
        line | {"history": _history_of(line, views)}
        for line in read_lines(home / "metrics.jsonl")
        if line["run"] == run
    ]
    return PeerJournal(peer=home.name, rounds=tuple(rounds), events=tuple(events))


def _history_of(line: Line, views: Sequence[Line]) -> str:
    """The history of the newest view of that number which the peer had installed when it wrote the line."""
    same = [view for view in views if view["view_epoch"] == line["view_epoch"]]
    before = [view for view in same if view["time"] <= line["time"]]
    newest = (before or same)[-1:]  # a clock that was set back does not make a round homeless
    return str(newest[0]["history"]) if newest else ""


def trained_on(homes: Sequence[Path], run: str) -> tuple[dict[str, str], Mixture]:
    """The run's fingerprint, and what it says that the run trains on; UserError when no home has taken part, or none
    has the manifests.
    """
    for home in homes:
        pairs = [(str(a), str(b)) for a, b in load_run(home / "runs" / run).get("fingerprint", ())]
        found = [(_manifest(homes, part.digest), part.passes) for part in parts_of(pairs)]
        parts = tuple(Part(manifest, passes) for manifest, passes in found if manifest is not None)
        if parts and len(parts) == len(found):
            return dict(pairs), Mixture(parts)
    raise UserError(f"run {run!r}: none of the homes has taken part and holds its data set's manifest")


def _manifest(homes: Sequence[Path], digest: str) -> Manifest | None:
    paths = (path for home in homes for path in (home / "store").glob(f"{digest}*/{MANIFEST_NAME}"))
    return next((Manifest.from_bytes(path.read_bytes()) for path in paths), None)


def audit(homes: Sequence[Path], run: str, *, skipped: Iterable[tuple[int, Stretch]] = ()) -> Audit:
    """Read the homes' journals and judge.

    ``skipped``: (epoch, stretch) that the run gave up, besides what its rounds have on record as skipped.
    """
    journals = [read_journal(home, run) for home in homes]
    return judge(journals, trained_on(homes, run)[1].sample_counts, skipped=skipped)


def judge(
    journals: Sequence[PeerJournal], counts: Sequence[int], *, skipped: Iterable[tuple[int, Stretch]] = ()
) -> Audit:
    """As `audit`, for journals in memory. ``counts``: samples per shard, of a mixture per shard of it."""
    history = winning_history(journals)
    head, rounds, broken = winning_rounds(journals, history)
    compared, unequal = compare(journals)
    finished = finished_epochs(journals, rounds)
    counted = [(line["epoch"], s) for line in rounds for s in _stretches(line)]
    given_up = [*skipped, *(pair for line in rounds for pair in _skipped(line))]
    inexact = [*broken, *_wrong_totals(rounds), *check_exact(counts, finished, counted, given_up)]
    if not rounds:
        inexact.append("no peer completed a round")
    return Audit(
        history=history,
        head=head,
        rounds=tuple(rounds),
        compared=compared,
        unequal=tuple(unequal),
        finished_epochs=finished,
        samples_due=finished * sum(counts),
        samples_counted=sum(len(s) for epoch, s in counted if epoch < finished),
        inexact=tuple(inexact),
    )


def compare(journals: Sequence[PeerJournal]) -> tuple[int, list[str]]:
    """How many rounds at least two peers share, and in words where their lines differ."""
    faults: list[str] = []
    said: dict[tuple[str, int, int], list[tuple[str, Line]]] = {}
    for journal in journals:
        for line in journal.rounds:
            key = (line["history"], line["view_epoch"], line["round"])
            said.setdefault(key, []).append((journal.peer, line))
    for (_, view_epoch, number), lines in sorted(said.items()):
        (first, one), *others = lines
        for other, two in others:
            for field in SAME_ON_ALL:
                if _value(one, field) != _value(two, field):
                    faults.append(
                        f"view {view_epoch} round {number}: {field} is {_shown(one, field)} on {first}, "
                        f"{_shown(two, field)} on {other}"
                    )
    compared = sum(len({peer for peer, _ in lines}) > 1 for lines in said.values())
    return compared, [*faults, *_unequal_views(journals)]


def _unequal_views(journals: Sequence[PeerJournal]) -> Iterator[str]:
    """A view is its number and its id: one that only some of its members installed may be followed by another of
    that number, so that no round of it can complete.
    """
    seen: dict[tuple[int, str], tuple[str, Line]] = {}
    for journal in journals:
        for view in journal.of("view"):
            first, one = seen.setdefault((view["view_epoch"], view["view_id"]), (journal.peer, view))
            for field in SAME_OF_A_VIEW:
                if one[field] != view[field]:
                    yield (
                        f"view {view['view_epoch']}: {field} is {one[field]} on {first}, "
                        f"{view[field]} on {journal.peer}"
                    )


def _value(line: Line, field: str) -> Any:
    return sorted(line["counted"]) if field == "counted" else line.get(field)


def _shown(line: Line, field: str) -> str:
    value = str(line.get(field))
    return value if len(value) <= 40 else f"{value[:39]}…"


def winning_history(journals: Sequence[PeerJournal]) -> str:
    """The history in which the most samples were counted; "" when nobody completed a round."""
    best = max(
        ((line["samples_total"], line["history"]) for journal in journals for line in journal.rounds),
        default=(0, ""),
    )
    return str(best[1])


def winning_rounds(journals: Sequence[PeerJournal], history: str) -> tuple[Lineage, list[Line], list[str]]:
    """The head, one line per round from the start to it, and where the chain of views is broken.

    A view starts from a lineage that its members agreed on: rounds of earlier views beyond that are not in
    history. One that begins a history in another's place starts from a lineage of that other one.
    """
    views, completed = _views_that_count(journals, history), _completed(journals, history)
    if not completed:
        return START, [], []
    newest = max(views)
    start: Lineage = (views[newest]["start"][0], views[newest]["start"][1])
    head = max((lineage for lineage in completed if lineage[0] == newest), default=start)
    rounds: list[Line] = []
    faults: list[str] = []
    at = head
    while at > START:
        if at[0] not in views and (parent := _parent(journals, history)):
            history = parent
            views, completed = _views_that_count(journals, history), _completed(journals, history)
            continue
        if at[0] not in views:
            faults.append(f"view {at[0]} is in history, but in no journal")
            break
        begins: Lineage = (views[at[0]]["start"][0], views[at[0]]["start"][1])
        for number in range(at[1], begins[1], -1):
            if (at[0], number) in completed:
                rounds.append(completed[at[0], number])
            else:
                faults.append(f"view {at[0]} round {number} is in history, but in no journal")
        if not begins < at:
            faults.append(f"view {at[0]} starts from {begins}, which does not come before it")
            break
        at = begins
    return head, rounds[::-1], faults


def _parent(journals: Sequence[PeerJournal], history: str) -> str:
    """The history whose place this one took; "" when it took nobody's."""
    views = (view for journal in journals for view in journal.of("view") if view["history"] == history)
    return next((str(view["parent"]) for view in views if view.get("parent")), "")


def _completed(journals: Sequence[PeerJournal], history: str) -> dict[Lineage, Line]:
    """One line per round of this history that anybody completed."""
    completed: dict[Lineage, Line] = {}
    for journal in journals:
        for line in journal.rounds:
            if line["history"] == history:
                completed.setdefault((line["view_epoch"], line["round"]), line)
    return completed


def _views_that_count(journals: Sequence[PeerJournal], history: str) -> dict[int, Line]:
    """By number; of two of one number the one that rounds were completed in, else that with the newer start."""
    ranked: dict[int, tuple[bool, list[int], Line]] = {}
    for journal in journals:
        trained = {line["view_epoch"] for line in journal.rounds if line["history"] == history}
        for view in journal.of("view"):
            number = view["view_epoch"]
            rank = (number in trained, view["start"], view)
            if view["history"] == history and (number not in ranked or rank[:2] > ranked[number][:2]):
                ranked[number] = rank
    return {number: view for number, (_, _, view) in ranked.items()}


def finished_epochs(journals: Sequence[PeerJournal], rounds: Sequence[Line]) -> int:
    """Epochs that are over: all before the last round's, and that one too if a peer says that the run is."""
    if not rounds:
        return 0
    finished = any(e["outcome"] == "finished" for journal in journals for e in journal.of("run_over"))
    return int(rounds[-1]["epoch"]) + finished


def _wrong_totals(rounds: Sequence[Line]) -> Iterator[str]:
    """A running sum of what was counted must be what the lines say."""
    total = 0
    for line in rounds:
        total += sum(map(len, _stretches(line)))
        if line["samples_total"] != total:
            yield (
                f"view {line['view_epoch']} round {line['round']}: samples_total is {line['samples_total']}, "
                f"but the rounds up to it counted {total}"
            )
            return


def _stretches(line: Line) -> Iterator[Stretch]:
    return (Stretch(shard=shard, lo=lo, hi=hi) for braid in line["counted"] for shard, lo, hi in braid)


def _skipped(line: Line) -> Iterator[tuple[int, Stretch]]:
    return ((e, Stretch(shard=shard, lo=lo, hi=hi)) for e, shard, lo, hi in line.get("skipped", ()))
