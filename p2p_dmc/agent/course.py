"""What a view's rounds make of its start state: ledger, tau and everybody's cursors (DESIGN.md section 7).

A pure function of the view, its start state and the rounds' headers: every voter computes it as the rounds complete,
a learner afterwards, from the headers that it kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dmc.agent.barrier import BarrierResult
from p2p_dmc.agent.work import Work, decode_payload
from p2p_dmc.core import adacomm
from p2p_dmc.core.adacomm import RoundFacts, TauPolicy, TauState
from p2p_dmc.core.agreement_messages import View
from p2p_dmc.core.braids import Braid, part, size, unordered
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.core.outer import OuterPolicy
from p2p_dmc.core.pace import Pace, local_steps
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
    paces: tuple[Pace, ...]
    work: Work | None
    """For the next epoch, or for the rest of this one when that was shared out anew; None: it goes on as it was."""


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
        self.paces = tuple(Pace(before=decode_payload(p).speed) for p in view.payloads)

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
            if not header.finite and ledger.epoch == self.ledger.epoch:
                ledger = ledger.strike(*unordered(self.work.next_of(i, header.samples)))
        said = [facts(h) for h, votes in zip(result.headers, result.voting, strict=True) if votes]
        goes_on = ledger.epoch == self.ledger.epoch
        skips = goes_on and ledger.progress()[1] > quarantined
        paces = tuple(
            pace.after(h.samples, h.steps, h.compute_us)
            for pace, h in zip(self.paces, result.headers, strict=True)
        )
        work = None
        if not goes_on and not ledger.done:
            work = Work.for_epoch(self.view, self.me, ledger, [pace.speed for pace in paces])
        elif goes_on and not skips:
            drop = not result.headers[self.me].finite
            work = self.work.rebalanced(self.view, result.consumed, paces, drop_leases=drop)
            ledger = ledger if work is None else ledger.shared_anew()
        return Outcome(
            counted=counted,
            ledger=ledger,
            tau=adacomm.after_round(self.policy, self.tau, said),
            quarantined=skips,
            paces=paces,
            work=work,
        )

    def take(self, result: BarrierResult, outcome: Outcome) -> None:
        """The round is complete."""
        if outcome.work is not None:
            self.work = outcome.work
        elif not outcome.ledger.done:
            self.work.advance(result.consumed)
            if not result.headers[self.me].finite:
                self.work.drop_leases()
        self.ledger, self.tau, self.paces = outcome.ledger, outcome.tau, outcome.paces

    def steps(self) -> tuple[int, int]:
        """Local steps of my trainer in the next round, and the microseconds that it has for them (0: any)."""
        return local_steps(self.tau.tau, self.paces, self.me, self.work.busy)


def outer_step(outer: OuterPolicy, tau: TauState, result: BarrierResult) -> tuple[float, ...]:
    """How the round with these headers moves the anchor; ``tau`` before it. () when it is averaged plainly."""
    return outer.step(min(tau.tau, result.steps), tau.tau0) or ()


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
        rate_nano=header.rate_nano,
    )
