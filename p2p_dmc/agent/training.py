"""Everything while one view stands: leases, the barrier, completion (DESIGN.md section 7, one peer's side of it)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from p2p_dmc.agent.barrier import Barrier, BarrierResult
from p2p_dmc.agent.course import Course, Outcome, outer_step
from p2p_dmc.agent.state import Held, state_digest
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.agent.work import InFlight, Work, decode_payload, plain
from p2p_dmc.core.adacomm import TauPolicy, TauState
from p2p_dmc.core.agreement_messages import MemberId, StateRef, View
from p2p_dmc.core.braids import Braid, part, size, unordered
from p2p_dmc.core.ledger import Ledger, Stretch
from p2p_dmc.errors import RemoteProtocolError
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire.messages import RoundHeader
from p2p_dmc.wire.trainer_messages import (
    MAX_SKIPPED,
    MOST_LOSS_MICRO,
    Lease,
    LeaseEnd,
    Reduce,
    RoundComplete,
    RoundReady,
    RoundRefused,
    RoundResult,
)

AHEAD = 4
"""Shards of so many leases to come are fetched while the trainer has work: they are here when it wants them."""
SHARD_PATIENCE_S = 2.0
"""A lease waits this long for a shard on its way before the round goes on without it."""
MOST_LEASED = 1 << 20
BAD_ROUNDS = 3
"""So many rounds in a row without a finite delta are no accident: the peer leaves the run."""


class TrainingHost(Protocol):
    """What the run does for its training."""

    def to_trainer(self, message: object) -> None: ...
    def to_member(self, peer_id: str, message: object) -> None: ...
    def complete(self, ref: StateRef) -> bool: ...
    def hold(self, held: Held) -> None: ...
    def committed(self, held: Held) -> None: ...
    def barrier_change(self) -> None: ...
    def change_wanted(self) -> bool: ...
    def closing(self) -> bool: ...
    def close(self, finished: bool) -> None: ...
    def diverged(self, odd: tuple[MemberId, ...], me: bool) -> None: ...
    def not_finite(self, member: MemberId) -> None: ...
    def poisoned(self, rounds: int) -> None: ...
    def shard_here(self, shard: int) -> bool: ...
    def fetch_shard(self, shard: int, then: Callable[[], None]) -> None: ...
    def log_round(self, **facts: Any) -> None: ...


@dataclass(slots=True)
class Measured:
    """This peer's figures of the round before, for its next header."""

    comm_us: int = 0
    wait_us: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    speed: int = 0  # samples a second of local steps
    bad_rounds: int = 0  # in a row, without a finite delta


class Training:
    """One member's rounds in one view. Frozen once: then it hands out nothing and completes nothing more."""

    def __init__(
        self,
        host: TrainingHost,
        view: View,
        me: MemberId,
        held: Held,
        ledger: Ledger,
        work: Work,
        policy: TauPolicy,
        payload_spec: bytes,
        measured: Measured,
        keeper: StateKeeper,
    ) -> None:
        self.host = host
        self.view = view
        self.held = held
        self.course = Course(view, work.me, ledger, work, held.tau, policy)
        self.payload_spec = payload_spec
        self.measured = measured
        self.keeper = keeper
        self.barrier = Barrier(view, me)
        self.full = decode_payload(view.payloads[work.me]).full
        self.me = work.me
        self.frozen = False
        self.frozen_s = 0.0
        self.committed_round: tuple[int, int] = held.ref.lineage
        self.in_flight: InFlight | None = None
        """The round whose header I said: if it turns out complete elsewhere, my samples are in it."""
        self._given_up = ledger.given_up_since(held.ledger)
        """Quarantined or lost as the view opened; the first complete round puts it on record."""
        self._reducing: BarrierResult | None = None
        self._broken = False
        self._stale = False
        """Samples of the assignment were quarantined: the next barrier changes the view."""
        self._said_at_s = 0.0
        self._repeats = 0
        self._lease_wanted: tuple[int, int, float] | None = None
        """Samples, samples ahead of them, since when."""

    @property
    def ledger(self) -> Ledger:
        """That of the held state, with this view's strikes until its first round is complete."""
        return self.course.ledger

    @property
    def work(self) -> Work:
        """Everybody's assignment, and how far they are."""
        return self.course.work

    @property
    def reducing(self) -> tuple[int, int] | None:
        """Lineage of the round that the trainer is reducing, and may complete."""
        hopeful = self._reducing is not None and not self._broken
        return (self.view.view_epoch, self.barrier.round) if hopeful else None

    def group_failed(self) -> None:
        """The view's group is dropped: whatever is being reduced will not be complete here."""
        self._broken = True

    # -- leases ---------------------------------------------------------------------------------------------------

    def lease(self, samples: int, ahead: int = 0) -> None:
        """The trainer asks for samples, and which ``ahead`` follow them as far as that is known."""
        self._lease_wanted = (
            max(1, min(samples, MOST_LEASED)),
            max(0, min(ahead, MOST_LEASED)),
            time.monotonic(),
        )
        self.serve_lease()

    def serve_lease(self) -> None:
        """Answer a waiting lease if the shards are here; call again when one arrives and now and then."""
        if self._lease_wanted is None or self.frozen:
            return
        if self.ledger.done:
            return  # RunFinished follows once the last round is committed
        if self._stale:  # what it would get next may be what was just quarantined
            self._end_lease()
            return
        samples, ahead, since_s = self._lease_wanted
        wanted = self.work.peek(samples)
        ready = self._ready(wanted)
        if wanted and not ready and time.monotonic() - since_s < SHARD_PATIENCE_S:
            return
        if not ready:
            self._end_lease()
            return
        self._lease_wanted = None
        leased = plain(self.work.lease(ready))
        following = self.work.peek(max(AHEAD * samples, ahead))
        known = plain(part(following, 0, min(ahead, self._ready(following))))
        left = self.work.assignment.length(self.me) - self.work.leased
        self.host.to_trainer(Lease(epoch=self.ledger.epoch, braids=leased, ahead=known, left=left))

    def _ready(self, wanted: Sequence[Braid]) -> int:
        """How many samples in a row have their shards here. The others' are fetched, the first of them first."""
        ready, missing = 0, False
        for braid in wanted:
            away = [i for i, stretch in enumerate(braid) if not self.host.shard_here(stretch.shard)]
            for i in away:
                self.host.fetch_shard(braid[i].shard, self.serve_lease)
            if not missing:
                ready += away[0] if away else size([braid])
            missing = missing or bool(away)
        return ready

    def _end_lease(self) -> None:
        """Nothing more for now: the trainer comes to the barrier with what it has."""
        self._lease_wanted = None
        self.host.to_trainer(LeaseEnd(epoch=self.ledger.epoch, finished=False))

    # -- the barrier ----------------------------------------------------------------------------------------------

    def round_ready(self, said: RoundReady) -> None:
        """The trainer has done its local steps."""
        if self.frozen or said.view_epoch != self.view.view_epoch or said.round != self.barrier.round:
            return  # it will say so again in the next view
        if self.barrier.own is not None:
            return  # a header is said once: others may have acted on it
        if said.samples > self.work.leased - self.work.cursors[self.me]:
            raise RemoteProtocolError(
                f"the trainer says it consumed {said.samples} samples, more than it was given"
            )
        check_skipped(said.skipped, said.samples)
        if said.compute_us > 0 and said.samples > 0:
            fresh = said.samples * 1_000_000 // said.compute_us
            self.measured.speed = (
                (3 * self.measured.speed + fresh) // 4 if self.measured.speed else max(1, fresh)
            )
        lineage = (self.view.view_epoch, said.round)
        self.in_flight = InFlight(lineage, said.samples) if said.finite else None
        self._say(
            self._header(
                samples=said.samples,
                steps=said.steps,
                loss_sum_micro=said.loss_sum_micro,
                compute_us=said.compute_us,
                finite=said.finite,
                skipped=said.skipped,
                rate_nano=said.rate_nano,
            )
        )

    def _header(
        self,
        *,
        samples: int,
        steps: int,
        loss_sum_micro: int,
        compute_us: int,
        finite: bool,
        final: bool = False,
        skipped: tuple[tuple[int, int], ...] = (),
        rate_nano: int = 0,
    ) -> RoundHeader:
        return RoundHeader(
            view_epoch=self.view.view_epoch,
            view_id=self.view.view_id,
            round=self.barrier.round,
            digest=self.held.ref.digest,
            payload_spec=self.payload_spec,
            samples=samples,
            steps=steps,
            loss_sum_micro=loss_sum_micro,
            compute_us=compute_us,
            comm_us=self.measured.comm_us,
            wait_us=self.measured.wait_us,
            bytes_sent=self.measured.bytes_sent,
            bytes_received=self.measured.bytes_received,
            finite=finite,
            change=self.host.change_wanted(),
            closing=self.host.closing(),
            final=final,
            skipped=skipped,
            rate_nano=rate_nano,
        )

    def _say(self, header: RoundHeader) -> None:
        reach("before-header")
        self._said_at_s = time.monotonic()
        self.barrier.say(header)
        self._tell(header)
        reach("header-said")
        self.check_barrier()

    def _tell(self, header: RoundHeader, only: tuple[MemberId, ...] | None = None) -> None:
        for i, member in enumerate(self.view.members):
            if i != self.me and (only is None or member in only):
                self.host.to_member(member.peer_id, header)

    def header(self, peer_id: str, header: RoundHeader) -> None:
        """A member's header arrived."""
        repeat = self.barrier.add(peer_id, header)
        if repeat is not None and not self.frozen:
            self.host.to_member(peer_id, repeat)
        if not self.frozen:
            self.check_barrier()

    def repeat(self) -> None:
        """Time has passed: say my header again to whoever has not answered; flags may have been raised since.

        And to each other one in turn: somebody may have missed it who waits for a third one, as all do in a ring.
        """
        own = self.barrier.own
        if self.frozen or own is None or self._reducing is not None:
            return
        result = self.barrier.result()
        if result is not None and not any(result.weights):
            self._raise_flags(own)
        else:
            self._repeats += 1
            another = self.view.members[(self.me + self._repeats) % len(self.view.members)]
            self._tell(own, (*self.barrier.missing(), another))

    def _raise_flags(self, own: RoundHeader) -> None:
        """Everybody stands here with nothing to reduce: only a change or the end of the run leads on."""
        raised = replace(own, change=self.host.change_wanted(), closing=self.host.closing())
        if raised != own:
            self._say(raised)
        else:
            self._tell(own)

    def check_barrier(self) -> None:
        """Everybody's header is here: commit the round before, then stop, change, or reduce."""
        result = self.barrier.result()
        if result is None or self._reducing is not None or self.frozen:
            return
        odd = result.odd_ones() or self._greedy(result)
        if odd:
            self.frozen = True
            self.host.diverged(tuple(self.view.members[i] for i in odd), self.me in odd)
            return
        self.committed_round = self.held.ref.lineage
        self.host.committed(self.held)
        if result.final or result.closing:
            self.host.close(finished=result.final)
        elif result.change or self._stale:
            self.host.barrier_change()
        elif any(result.weights):
            self._start_reduction(result)
        elif any(not h.finite for h in result.headers) or self.ledger != self.held.ledger or self.work.left:
            self._complete_without_payload(result)

    def _greedy(self, result: BarrierResult) -> tuple[int, ...]:
        """Members whose header counts more samples than the assignment gave them."""
        work = self.work
        return tuple(
            i for i, h in enumerate(result.headers) if work.cursors[i] + h.samples > work.assignment.length(i)
        )

    def _start_reduction(self, result: BarrierResult) -> None:
        self.measured.wait_us = int((time.monotonic() - self._said_at_s) * 1e6)
        self._reducing = result
        self.host.to_trainer(
            Reduce(
                view_epoch=self.view.view_epoch,
                round=self.barrier.round,
                weight=result.weights[self.me],
                divisor=sum(result.weights),
                slot_path=str(self.keeper.scratch()),
                outer=outer_step(self.keeper.outer, self.held.tau, result),
            )
        )

    # -- completion -----------------------------------------------------------------------------------------------

    def round_result(self, said: RoundResult) -> None:
        """The trainer has the round's result in the scratch slot and asks whether it counts."""
        result = self._reducing
        if result is None or (said.view_epoch, said.round) != (self.view.view_epoch, self.barrier.round):
            self.host.to_trainer(RoundRefused(view_epoch=said.view_epoch, round=said.round))
            return
        self.measured.comm_us = max(1, said.comm_us)
        self.measured.bytes_sent, self.measured.bytes_received = said.bytes_sent, said.bytes_received
        if not self._complete(result, self.keeper.scratch(), said.digest):
            self.host.to_trainer(RoundRefused(view_epoch=said.view_epoch, round=said.round))

    def _complete_without_payload(self, result: BarrierResult) -> None:
        """Nobody has anything finite to add: the anchor stays, strikes and skipped samples go into the ledger.

        All may have come empty-handed although there is work: from a view in which they had none, or because a
        shard was late. In the next round they ask again.
        """
        self.keeper.pool().pin(self.held.slot)
        if not self._complete(result, self.held.slot, self.held.anchor_digest):
            self.keeper.pool().unpin(self.held.slot)

    def _complete(self, result: BarrierResult, slot: Path, anchor_digest: bytes) -> bool:
        """Record the round unless a freeze came first. Everything before the recording is a pure function."""
        outcome = self.course.outcome(result)
        ledger, tau = outcome.ledger, outcome.tau
        lineage = (self.view.view_epoch, self.barrier.round)
        ref = StateRef(lineage=lineage, digest=state_digest(anchor_digest, ledger, tau))
        if not self.host.complete(ref):
            return False
        reach("complete")
        before, tau_used = self.ledger, self.held.tau
        in_hand = self.work.leased - self.work.cursors[self.me] - result.consumed[self.me]
        counted = [braid for part in outcome.counted for braid in part]
        given_up = self._given_up + ledger.given_up_since(before, unordered(counted))
        self._given_up = ()
        self.held = Held(ref=ref, slot=slot, anchor_digest=anchor_digest, ledger=ledger, tau=tau)
        self.host.hold(self.held)
        self.course.take(result, outcome)
        self.in_flight, self._reducing, self._stale = None, None, outcome.quarantined
        self.barrier.next_round()
        steps, limit_us = self.course.steps()
        self._name_bad(result)
        self._report(result, outcome, given_up, before, tau_used)
        self.host.to_trainer(
            RoundComplete(
                view_epoch=lineage[0],
                round=lineage[1],
                steps=steps,
                limit_us=limit_us,
                epoch=ledger.epoch,
                reset=not result.headers[self.me].finite,
                retake=outcome.work is not None and self.work.leased < in_hand,
                may_decay=tau.lowest,
            )
        )
        self._after_completion()
        return True

    def _name_bad(self, result: BarrierResult) -> None:
        """Members whose delta was not finite weighed nothing; one that keeps on with it had better stop."""
        for i, header in enumerate(result.headers):
            if not header.finite:
                self.host.not_finite(self.view.members[i])
        if result.headers[self.me].finite:
            self.measured.bad_rounds = 0
        else:
            self.measured.bad_rounds += 1
            if self.measured.bad_rounds >= BAD_ROUNDS:
                self.host.poisoned(self.measured.bad_rounds)

    def _after_completion(self) -> None:
        if self.ledger.done:
            self._say(
                self._header(samples=0, steps=0, loss_sum_micro=0, compute_us=0, finite=True, final=True)
            )  # a run ends with headers alone, so its last round is committed too
        else:
            self.check_barrier()

    def start(self) -> None:
        """The view is open. With nothing left to train, headers alone finish the run."""
        if self.ledger.done and self.ledger == self.held.ledger:
            self._after_completion()
        elif self.ledger.done:  # by what is skipped: one round without payload puts that on record
            self._say(self._header(samples=0, steps=0, loss_sum_micro=0, compute_us=0, finite=True))

    def _report(
        self,
        result: BarrierResult,
        outcome: Outcome,
        given_up: tuple[tuple[int, Stretch], ...],
        before: Ledger,
        tau_used: TauState,
    ) -> None:
        samples = sum(result.weights)
        loss = sum(h.loss_sum_micro for h in result.headers if h.finite) / samples / 1e6 if samples else None
        own = result.headers[self.me]
        self.host.log_round(
            view_epoch=self.held.ref.lineage[0],
            view_id=self.view.view_id.hex(),
            round=self.held.ref.lineage[1],
            committed_round=self.committed_round[1],
            members=len(self.view.voters),
            tau=tau_used.tau,
            tau_reason=tau_used.reason,
            loss=None if loss is None else round(loss, 6),
            epoch=before.epoch,
            samples_round=samples,
            samples_total=self.ledger.samples_total,
            compute_s=own.compute_us / 1e6,
            comm_s=self.measured.comm_us / 1e6 if any(result.weights) else 0.0,
            wait_s=self.measured.wait_us / 1e6,
            bytes_sent=self.measured.bytes_sent,
            bytes_received=self.measured.bytes_received,
            digest=self.held.anchor_digest.hex(),
            state=self.held.ref.digest.hex(),
            counted=[braid for part in outcome.counted for braid in plain(part)],
            weights=list(result.weights),
            skipped=[[epoch, s.shard, s.lo, s.hi] for epoch, s in given_up],
            samples_skipped=sum(len(s) for _, s in given_up),
            part=before.part,
            speeds=[pace.speed for pace in self.course.paces],
            said=[[h.samples, h.steps, h.compute_us, h.finite, h.skipped] for h in result.headers],
        )

    # -- the end --------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """From here on this view completes no round; what it holds is the run's again."""
        if not self.frozen:
            self.frozen, self.frozen_s = True, time.monotonic()
            reach("proposing")
        self._reducing = None


def check_skipped(skipped: Sequence[tuple[int, int]], samples: int) -> None:
    """Places among the samples, sorted and apart from each other; RemoteProtocolError."""
    end = -1
    for lo, hi in skipped:
        if not end < lo < hi <= samples:
            raise RemoteProtocolError("skipped samples are not among those consumed, or out of order")
        end = hi
    if len(skipped) > MAX_SKIPPED:
        raise RemoteProtocolError(f"{len(skipped)} stretches of skipped samples, at most {MAX_SKIPPED}")


def check_header(header: RoundHeader) -> None:
    """Bounds of a header from the network; RemoteProtocolError."""
    numbers = (header.samples, header.steps, header.compute_us, header.comm_us, header.wait_us, header.round)
    if (
        any(not 0 <= n < 1 << 53 for n in (*numbers, header.rate_nano))
        or abs(header.loss_sum_micro) > MOST_LOSS_MICRO
    ):
        raise RemoteProtocolError("a header's number is out of range")
    check_skipped(header.skipped, header.samples)
    if len(header.digest) != 16 or len(header.payload_spec) != 16:
        raise RemoteProtocolError("a header's digest has 16 bytes")
