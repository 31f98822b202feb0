"""Which samples each peer trained on in each round, recomputed from what the run wrote down of its views.

A view's members, what their proposals said, and a few numbers of each header are all that the assignments follow from
(DESIGN.md section 9): the journals of a few homes tell it for all peers of the run, those that are gone too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p_dmc.agent.barrier import BarrierResult
from p2p_dmc.agent.course import Course
from p2p_dmc.agent.work import Work, decode_payload, opening_ledger, plain
from p2p_dmc.core.adacomm import TauPolicy, start
from p2p_dmc.core.agreement_messages import MemberId, StateRef, View
from p2p_dmc.core.braids import Braid, in_turn
from p2p_dmc.core.ledger import Ledger, sample_index
from p2p_dmc.errors import UserError
from p2p_dmc.observe.audit import Line, PeerJournal, read_journal, trained_on, winning_history, winning_rounds
from p2p_dmc.wire.messages import RoundHeader

POLICY = TauPolicy(kind="fixed", tau0=1)
"""tau decides nothing about who trains on what."""
NOBODY = bytes(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one peer trained on in one round that counted."""

    peer_id: str
    view_epoch: int
    round: int
    epoch: int
    samples: tuple[tuple[int, int], ...]
    """(shard, index of the sample in the shard), in the order in which it consumed them; of a mixture its shard, see
    `audit.trained_on`."""


def seen(homes: Sequence[Path], run: str) -> Iterator[Seen]:
    """Of all rounds of the winning lineage, in order; UserError where the journals do not tell, or tell otherwise."""
    journals = [read_journal(home, run) for home in homes]
    _, rounds, broken = winning_rounds(journals, winning_history(journals))
    if broken:
        raise UserError(f"run {run!r}: {broken[0]}")
    ledger, skip_lost = _beginning(homes, run)
    course: Course | None = None
    view_id = ""
    for line in rounds:
        views = _views(journals, line)
        if course is None or view_id not in views:
            view_id, view = next(iter(views.items()), ("", None))
            if view is None:
                raise UserError(
                    f"run {run!r}: no journal tells of the assignment of view {line['view_epoch']}"
                )
            course = _opened(view, ledger, skip_lost=skip_lost)
        counted = _counted(course, line)
        ledger = course.ledger
        if [[list(map(list, braid)) for braid in plain(part)] for part in counted] != _recorded(
            line, counted
        ):
            what = f"view {line['view_epoch']} round {line['round']}"
            raise UserError(f"run {run!r}: {what} counted other samples than follow from its views")
        for member, braids in zip(course.view.members, counted, strict=True):
            if braids:
                yield Seen(
                    peer_id=member.peer_id,
                    view_epoch=line["view_epoch"],
                    round=line["round"],
                    epoch=line["epoch"],
                    samples=tuple(_samples(ledger, line["epoch"], braids)),
                )


def _samples(ledger: Ledger, epoch: int, braids: Iterable[Braid]) -> Iterator[tuple[int, int]]:
    for shard, at in in_turn(braids):
        count = ledger.counts[shard]
        yield shard, sample_index(ledger.dataset_digest, ledger.seed, epoch, shard, count, at)


def _beginning(homes: Sequence[Path], run: str) -> tuple[Ledger, bool]:
    """The ledger before the first round; whether lost shards count as skipped."""
    settings, mixture = trained_on(homes, run)
    seed, epochs = int(settings["seed"]), int(settings["epochs"])
    ledger = Ledger.start(mixture.digest, mixture.sample_counts, seed, epochs)
    return ledger, settings["lost shards"] == "skip"


def _views(journals: Iterable[PeerJournal], line: Line) -> dict[str, View]:
    """By their ids, the views of a round's number in its history that somebody trained in."""
    found: dict[str, View] = {}
    for journal in journals:
        for one in journal.of("assignment"):
            of_it = (one["history"], one["view_epoch"]) == (line["history"], line["view_epoch"])
            if of_it and one["view_id"] == line["view_id"]:
                found.setdefault(one["view_id"], _view(one))
    return found


def _view(told: Line) -> View:
    members = tuple(MemberId(peer_id=peer_id, boot=1) for peer_id in told["members"])
    voters = tuple(m for m, votes in zip(members, told["voting"], strict=True) if votes)
    return View(
        history=NOBODY,
        view_epoch=told["view_epoch"],
        view_id=bytes.fromhex(told["view_id"]),
        members=members,
        voters=voters,
        start=StateRef(lineage=(0, 0), digest=NOBODY),
        holders=voters,
        payloads=tuple(map(bytes.fromhex, told["payloads"])),
        stopped=(),
    )


def _opened(view: View, ledger: Ledger, *, skip_lost: bool) -> Course:
    ledger = opening_ledger([decode_payload(p) for p in view.payloads], ledger, skip_lost=skip_lost)
    work = Work.for_view(view, 0, ledger, keep_leases=False)
    return Course(view, 0, ledger, work, start(POLICY), POLICY)


def _counted(course: Course, line: Line) -> tuple[tuple[Braid, ...], ...]:
    """What the round counts of each member; the course moves on."""
    voting = tuple(member in course.view.voters for member in course.view.members)
    headers = tuple(header(line["view_epoch"], line["round"], *said) for said in line["said"])
    result = BarrierResult(headers=headers, voting=voting)
    course.work.leased = course.work.assignment.length(0)  # nobody leases here
    outcome = course.outcome(result)
    course.take(result, outcome)
    return outcome.counted


def header(
    view_epoch: int,
    number: int,
    samples: int,
    steps: int,
    compute_us: int,
    finite: bool = True,
    skipped: Sequence[Sequence[int]] = (),
) -> RoundHeader:
    """Of a round, as far as it decides who trains on what; the rest of it is empty."""
    return RoundHeader(
        view_epoch=view_epoch,
        view_id=NOBODY,
        round=number,
        digest=NOBODY,
        payload_spec=NOBODY,
        samples=samples,
        steps=steps,
        loss_sum_micro=0,
        compute_us=compute_us,
        comm_us=0,
        wait_us=0,
        bytes_sent=0,
        bytes_received=0,
        finite=finite,
        change=False,
        closing=False,
        final=False,
        skipped=tuple((lo, hi) for lo, hi in skipped),
    )


def _recorded(line: Line, counted: Sequence[Sequence[Braid]]) -> list[Any]:
    """The line's braids, of each member as many as were recomputed."""
    braids = iter(line["counted"])
    parts = [[next(braids, None) for _ in part] for part in counted]
    return parts if next(braids, None) is None else []
