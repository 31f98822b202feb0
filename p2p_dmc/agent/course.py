"""What a view's rounds make of its start state: ledger, tau and everybody's cursors (DESIGN.md section 7).

A pure function of the view, its start state and the rounds' headers: every voter computes it as the rounds complete,
a learner afterwards, from the headers that it kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dmc.agent.barrier import BarrierResult
from p2p_dmc.agent.work import Work
from p2p_dmc.core import adacomm
from p2p_dmc.core.adacomm import RoundFacts, TauPolicy, TauState
from p2p_dmc.core.agreement_messages import View
from p2p_dmc.core.braids import Braid, part, size, unordered
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.wire.messages import RoundHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one round changes, before anybody has recorded it."""

    counted: tuple[tuple[Braid, ...], ...]
    """Of each member, in ring order, as it consumed them."""
    ledger: Ledger
    tau: TauState
    quarantined: bool
    """Samples of the standing assignment are skipped from now on."""


class Course:
    """The shared part of a view's state as its rounds go by."""

    def __init__(
        self, view: View, me: int, ledger: Ledger, work: Work, tau: TauState, policy: TauPolicy
    ) -> None:
        self.view = view
        self.me = me
        self.ledger = ledger
        self.work = work
        self.tau = tau
        self.policy = policy
        self.speeds = [0] * len(view.members)

    def outcome(self, result: BarrierResult) -> Outcome:
        """Of the round whose headers these are. Nothing changes here."""
        parts = [
            divide(self.work.next_of(i, samples), header.skipped if samples else ())
            for i, (samples, header) in enumerate(zip(result.consumed, result.headers, strict=True))
        ]
        counted, skipped = zip(*parts, strict=True)
        ledger = self.ledger
        if any(skipped):
            ledger = ledger.skip(unordered(braid for braids in skipped for braid in braids))
        if any(counted):
            ledger = ledger.advance(unordered(braid for braids in counted for braid in braids))
        quarantined = ledger.progress()[1]
        for i, header in enumerate(result.headers):
            struck = () if header.finite else self.work.next_of(i, header.samples)
            for stretch in unordered(struck):
                ledger = ledger.strike(stretch) if ledger.epoch == self.ledger.epoch else ledger
        said = [facts(h) for h, votes in zip(result.headers, result.voting, strict=True) if votes]
        return Outcome(
            counted=counted,
            ledger=ledger,
            tau=adacomm.after_round(self.policy, self.tau, said),
            quarantined=ledger.epoch == self.ledger.epoch and ledger.progress()[1] > quarantined,
        )

    def take(self, result: BarrierResult, outcome: Outcome) -> None:
        """The round is complete."""
        for i, header in enumerate(result.headers):
            if header.compute_us and header.samples:
                self.speeds[i] = max(1, header.samples * 1_000_000 // header.compute_us)
        if outcome.ledger.epoch != self.ledger.epoch and not outcome.ledger.done:
            self.work = Work.for_epoch(self.view, self.me, outcome.ledger, self.speeds)
        elif not outcome.ledger.done:
            self.work.advance(result.consumed)
            if not result.headers[self.me].finite:
                self.work.drop_leases()
        self.ledger, self.tau = outcome.ledger, outcome.tau


def divide(
    consumed: Sequence[Braid], skipped: Sequence[tuple[int, int]]
) -> tuple[tuple[Braid, ...], tuple[Braid, ...]]:
    """What a member consumed, as what it trained on and what it ``skipped``: [lo, hi) in the order of consumption."""
    if not skipped:
        return tuple(consumed), ()
    left_out: list[Braid] = []
    trained: list[Braid] = []
    done = 0
    for lo, hi in skipped:
        trained += part(consumed, done, lo)
        left_out += part(consumed, lo, hi)
        done = hi
    return (*trained, *part(consumed, done, size(consumed))), tuple(left_out)


def facts(header: RoundHeader) -> RoundFacts:
    """A header as the tau controller reads it; one that was not finite says nothing about the loss."""
    if not header.finite:
        return RoundFacts(
            samples=0, steps=header.steps, loss_sum_micro=0, compute_us=header.compute_us, comm_us=0
        )
    return RoundFacts(
        samples=header.trained,
        steps=header.steps,
        loss_sum_micro=header.loss_sum_micro,
        compute_us=header.compute_us,
        comm_us=header.comm_us,
    )
