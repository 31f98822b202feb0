"""One run on one peer: the agreement core, the state, the trainer, and what ties them (DESIGN.md sections 2, 6, 8)."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

from p2p_dmc.agent import run_files
from p2p_dmc.agent.aside import Aside
from p2p_dmc.agent.clock import now_ms
from p2p_dmc.agent.entering import Entrance, Step, others, run_meta
from p2p_dmc.agent.group_values import GroupValues
from p2p_dmc.agent.learning import Learning
from p2p_dmc.agent.member_desk import MemberDesk
from p2p_dmc.agent.rivals import Rivals
from p2p_dmc.agent.run_end import RunEnd
from p2p_dmc.agent.services import Services
from p2p_dmc.agent.state import Held
from p2p_dmc.agent.state_keeper import StateKeeper
from p2p_dmc.agent.tasks import Tasks
from p2p_dmc.agent.trainer_desk import TrainerDesk
from p2p_dmc.agent.training import Measured, Training
from p2p_dmc.agent.view_opening import out_of_date, report_given_up
from p2p_dmc.agent.views import Views
from p2p_dmc.agent.work import InFlight, ProposalPayload, bitmap, encode_payload, plain
from p2p_dmc.core.agreement import Agreement
from p2p_dmc.core.agreement_messages import (
    AgreementSettings,
    Lineage,
    MemberId,
    Promises,
    Ready,
    StateRef,
    Stopped,
    Verdict,
    View,
)
from p2p_dmc.core.ledger import Ledger
from p2p_dmc.core.quorum import Quorum
from p2p_dmc.observe.phases import reach
from p2p_dmc.wire import messages
from p2p_dmc.wire import trainer_messages as local

log = logging.getLogger("p2p_dmc.run")

UNPROVEN_SAID = 2
"""After so many failed reductions in a row a learner says what may be the reason."""
STUCK_S = 1.0
"""An attempt that has not led to a view for so long may need peers that have come since."""


class Run:
    """The shell around one run's agreement. Its trainer may come, die and come again."""

    def __init__(self, name: str, options: run_files.RunOptions, services: Services) -> None:
        self.name, self.options, self.services = name, options, services
        self.folder = services.home.run_folder(name)
        record = run_files.own_record(self.folder)
        boot = run_files.boot_for(record, services.boot, lambda: services.home.start_identity().boot)
        self.me = MemberId(peer_id=services.peer_id, boot=boot)
        self._promises = record.promises if record else Promises()
        self._closed = record is not None and record.closed
        self._tell_version(self._promises.version)
        self.keeper = StateKeeper(name, self.folder, services, self._promises)
        self.values = GroupValues(name, services)
        self.end = RunEnd(self)
        settings = services.settings
        self.entrance = Entrance(options.min_peers, settings.found_still_ms, settings.join_retry_ms)
        self.rivals, self.aside = Rivals(self), Aside(self)
        self.agreement: Agreement | None = None
        self._silent: Agreement | None = None
        """`agreement` once this peer stops: from then on it neither says nor hears anything of it."""
        self.desk = TrainerDesk(self)
        self.members = MemberDesk(self)
        self.views = Views(self)
        self.training: Training | None = None
        """As a voter; at most one of the two is there."""
        self.learning: Learning | None = None
        self.view: View | None = None
        self.measured, self.waiting = Measured(), ""
        self.stood_in = 0
        """Epoch of the last view that honoured this peer's claims; 0 when they are dead."""
        self.in_flight: InFlight | None = None
        self.parked = False
        """The trainer waits for a view, and does nothing but reduce until it trains in one."""
        self.said_failed: messages.GroupFailed | None = None
        """What this peer said last of a group that it dropped: again to whoever stands at that view's barrier."""
        self._unproven: set[int] = set()
        """Epochs of views in a row whose reduction failed while this peer was learning."""
        self._early_lease: local.LeaseRequest | None = None
        self._tasks = Tasks(self._failed)
        self.spawn = self._tasks.spawn

    # -- plumbing ---------------------------------------------------------------------------------------------------

    def _failed(self, error: BaseException) -> None:
        log.error("run %s: a background task failed", self.name, exc_info=error)
        self.event("fault", reason=repr(error))

    def event(self, event: str, **facts: Any) -> None:
        self.services.journal.event(event, run=self.name, **facts)

    def act(self, ready: Ready) -> Ready:
        """Do what the core says, in its order: to disk, then said, then acted on."""
        for line in ready.trace:
            log.info("run %s: %s", self.name, line)
        agreement, persist = self.agreement, ready.persist
        if agreement is not None and self._closed and agreement.promise_version > self._promises.version:
            persist = agreement.promises  # a closed record knows of all that was said: it is closed no more
        unsaved = persist is not None and not self._save(persist, closed=False)
        if unsaved or agreement is None:
            return ready  # what is not on disk is not said, and nothing is by a peer that has fallen silent
        self._tell_version(agreement.promise_version)
        self.members.say(ready.sends)
        if ready.froze:
            self.views.frozen()
        if ready.installed is not None:
            self.views.installed(ready.installed)
        return ready

    def _tell_version(self, version: int) -> None:
        """With every sign of life. Not of a closed run opened again, before it promises: it may be the same again."""
        self.services.promised(self.name, None if self._closed else version)

    def _save(self, promises: Promises, *, closed: bool) -> bool:
        """Put promises on disk. False when it takes none (`RunEnd.disk_refused`)."""
        self._promises, self._closed = promises, closed
        record = run_files.RunRecord(promises=promises, closed=closed, boot=self.me.boot)
        try:
            run_files.save_record(self.folder, record)
        except OSError as error:
            self.end.disk_refused(error)
            return False
        return True

    def fall_silent(self) -> None:
        """This peer stops: until its next start nothing of agreement is said, heard or installed here."""
        self._silent, self.agreement = self.agreement, None
        if self.rounds is not None:
            self.rounds.frozen = True

    def save_closed(self) -> bool:
        """All have stopped, this peer too: it keeps its vote at the next start. False when the disk refuses."""
        reach("all-stopped")
        return self._save(self._silent.promises if self._silent else self._promises, closed=True)

    # -- the trainer ------------------------------------------------------------------------------------------------

    def to_trainer(self, message: object) -> None:
        self.desk.send(message)

    def trainer_message(self, message: object) -> None:
        """One message of the trainer."""
        training = self.training  # alone, what it does may have installed the next view when it returns
        if isinstance(message, local.Parked):
            self.parked = self.training is None
        elif isinstance(message, local.RunReady):
            self.desk.run_ready(message)
        elif isinstance(message, local.InitialWritten):
            self.desk.initial_written(message)
        elif isinstance(message, local.LeaseRequest):
            self._lease(message)
        elif isinstance(message, local.RoundReady) and training is not None:
            if not self.end.leaving:
                training.round_ready(message)
                self.in_flight = training.in_flight
        elif isinstance(message, local.RoundResult):
            self._round_result(message)
        elif isinstance(message, local.RoundFailed):
            self._round_failed(message)
        elif isinstance(message, local.StoreSet) and self.view is not None:
            self.values.publish(self.view, self.services.peer_id, message)
        elif isinstance(message, local.StoreGet) and self.view is not None:
            self.values.want(self.view, message, self.to_trainer)

    def trainer_ready(self) -> None:
        """The trainer waits for a view; this peer holds a state."""
        self.views.new_trainer()
        self.parked = True
        held = self.keeper.current
        if self._silent is not None:
            return  # it is told to end as soon as the state is on disk
        if self.agreement is None and held is not None:
            self.agreement = Agreement(
                me=self.me,
                quorum=Quorum[self.desk.quorum.upper()],
                promises=self._promises,
                completed=held.ref,
                payload=self._payload,
                rng=random.Random(f"{self.me.peer_id}{self.me.boot}{self.name}"),
                settings=AgreementSettings(),
                now_ms=now_ms(),
            )
            self.services.replay_verdicts(self)
        elif self.agreement is not None and not self.aside.stands:
            self.act(self.agreement.rejoin(now_ms()))
        self.services.meta_changed()
        self.event("trainer_ready")

    def withdraw(self, reason: str) -> None:
        """Tell everybody that this peer takes no part any more, with what it promised: votes given up stay so."""
        if self.agreement is None:
            return
        stopped = self.agreement.withdraw()
        # a closed record keeps its votes at its next start, if it has said nothing since the last
        if not self._closed or self._save(self.agreement.promises, closed=False):
            self.members.tell_withdrawal(stopped, reason)
        self.views.forget()
        self.services.meta_changed()

    # -- leases and rounds -----------------------------------------------------------------------------------------

    def _lease(self, message: local.LeaseRequest) -> None:
        if self.training is not None and not self.training.frozen:
            self.training.lease(message.samples, message.ahead)
        else:
            self._early_lease = message

    def serve_early_lease(self) -> None:
        """The trainer asked before there was a view to hand it anything out of."""
        if self._early_lease is not None and self.training is not None:
            early, self._early_lease = self._early_lease, None
            self.training.lease(early.samples, early.ahead)

    def _round_result(self, message: local.RoundResult) -> None:
        training = self.training
        if training is not None:
            training.round_result(message)
            self.in_flight = training.in_flight
        elif self.learning is not None:
            self.learning.round_result(message)
        else:
            self.to_trainer(local.RoundRefused(view_epoch=message.view_epoch, round=message.round))
        self.members.hear_put_off()

    def _round_failed(self, message: local.RoundFailed) -> None:
        if self.agreement is None or self.view is None or message.view_epoch != self.view.view_epoch:
            return
        self.event("round_failed", view_epoch=message.view_epoch, round=message.round, reason=message.reason)
        failed = self.said_failed = messages.GroupFailed(
            view_epoch=self.view.view_epoch, view_id=self.view.view_id, reason=message.reason[:200]
        )
        for member in self.view.members:
            if member != self.me:
                self.to_member(member.peer_id, failed)
        self.group_failed(message.reason)

    def group_failed(self, reason: str) -> None:
        """A member has dropped this view's group: everybody knows, so nobody waits for the pre-vote's majority."""
        if self.training is not None:
            self.training.group_failed()
        if self.learning is not None:
            self.learning.group_failed()
        if self.learning is not None and self.learning.view.view_epoch not in self._unproven:
            self._unproven.add(self.learning.view.view_epoch)
            if len(self._unproven) == UNPROVEN_SAID:
                self.services.say(
                    "reductions with this peer fail, so the others go on without it and try again now and then: "
                    "see that TCP connections between the machines are let through on all ports"
                )
        if self.agreement is not None:
            self.act(
                self.agreement.wants_change(f"collective failed: {reason[:200]}", now_ms(), at_once=True)
            )
        self.members.hear_put_off()

    def ledger(self) -> Ledger:
        if self.training is not None:
            return self.training.ledger
        if self.keeper.current is None:
            raise AssertionError("no state is held")
        return self.keeper.current.ledger

    def _payload(self) -> bytes:
        """Fixed at the first word of an attempt: the freeze that comes with it stops leases."""
        data, hand = self.desk.data, self.views.hand()
        assert data is not None, "agreement begins with a ready trainer"
        count = len(data.mixture)
        return encode_payload(
            ProposalPayload(
                view_epoch=self.stood_in,
                epoch=hand.epoch,
                part=hand.part,
                claims=plain(hand.braids),
                holdings=bitmap(data.held(), count),
                reachable=bitmap(data.reachable(), count),
                speed=self.measured.speed,
                full=data.full,
                strikes=tuple(self.desk.strikes),
                counted=self.desk.counted,
            )
        )

    # -- what Training asks for (TrainingHost) ----------------------------------------------------------------------

    def to_member(self, peer_id: str, message: object) -> None:
        self.services.send(peer_id, message, self.name)

    def complete(self, ref: StateRef) -> bool:
        return self.agreement is not None and self.act(self.agreement.complete(ref, now_ms())).accepted

    def hold(self, held: Held) -> None:
        self.keeper.hold(held)
        self.end.round_over()
        self.aside.trains()
        self.views.based_on(held)
        self.desk.forget_strikes(self.views.in_ledger)

    def committed(self, held: Held) -> None:
        if self.agreement is None or self.view is None:
            return
        self.agreement.committed(held.ref.lineage)
        self.agreement.established(self.view.view_epoch)
        if self.keeper.checkpoint_due(held, self.options.checkpoint_every_s):
            self.spawn(self.checkpoint(held))

    async def checkpoint(self, held: Held, *, closed: bool = False) -> bool:
        """Write a committed state; on disk the base moves together with it."""
        keep = self.services.settings.checkpoints_kept
        written = await self.keeper.checkpoint(held, self.history, closed=closed, keep=keep)
        if written and (agreement := self.agreement or self._silent) is not None:
            self.act(agreement.checkpointed(held.ref.lineage, now_ms()))
        return written

    def barrier_change(self) -> None:
        if self.agreement is not None:
            self.act(self.agreement.at_barrier(now_ms()))

    def change_wanted(self) -> bool:
        return self.agreement is not None and self.agreement.change_wanted

    def wants_change(self, reason: str) -> None:
        if self.agreement is not None:
            self.act(self.agreement.wants_change(reason, now_ms(), at_once=False))

    def closing(self) -> bool:
        return self.end.stop_asked

    def close(self, finished: bool) -> None:
        self.end.close(finished)

    def diverged(self, odd: tuple[MemberId, ...], me: bool) -> None:
        """Equal lineages with unequal digests: a fault of memory, disk or program. The odd ones leave, loudly."""
        self.event("diverged", odd=[m.peer_id for m in odd])
        if me:
            self.desk.refuse(
                "this peer's state differs from the others' at the same round; restart it to adopt theirs"
            )

    def not_finite(self, member: MemberId) -> None:
        self.event("not_finite", peer_id=member.peer_id)

    def poisoned(self, rounds: int) -> None:
        self.desk.refuse(
            f"loss or parameters were not finite in {rounds} rounds in a row; lower the learning rate"
        )

    def shard_here(self, shard: int) -> bool:
        return self.desk.data is not None and self.desk.data.usable(shard)

    def fetch_shard(self, shard: int, then: Callable[[], None]) -> None:
        if self.desk.data is not None:
            self.desk.data.want(shard, then)

    def log_round(self, **facts: Any) -> None:
        self.services.journal.round(run=self.name, **facts)
        report_given_up(self, facts["skipped"])

    # -- other peers ------------------------------------------------------------------------------------------------

    def join_requested(self, peer_id: str) -> None:
        """A ready peer with the same settings asks to be let in: at the next barrier."""
        if self.agreement is not None and self.training is not None:
            self.act(self.agreement.join_requested(peer_id, now_ms()))
            if self.training is not None:
                self.training.repeat()

    def withdrawn(self, stopped: Stopped) -> None:
        if self.agreement is not None and not self.end.agreed:
            self.act(self.agreement.withdrawn(stopped, now_ms()))

    def verdict(self, peer_id: str, boot: int, verdict: Verdict, version: int = 0) -> None:
        """Membership's word about a peer. ``version``: of a crash, see `Agreement.verdict`."""
        if self.agreement is not None and peer_id != self.me.peer_id and not self.end.agreed:
            self.act(self.agreement.verdict(peer_id, boot, verdict, now_ms(), version=version))
        if verdict is not Verdict.REACHABLE:
            self.members.hear_put_off(at_once=True)

    @property
    def committed_lineage(self) -> Lineage | None:
        """The newest round that is known to be committed; None before this run has begun to listen."""
        return agreement.committed_lineage if (agreement := self.agreement or self._silent) else None

    @property
    def promises(self) -> Promises:
        """What this peer has promised, and in which founding of the run."""
        return self.agreement.promises if self.agreement is not None else self._promises

    @property
    def history(self) -> bytes:
        """The run's founding, as far as this peer knows it."""
        here = self.agreement.history if self.agreement is not None else self._promises.history
        return here or self.end.history

    def tick(self) -> None:
        """Timers of the core, repeated headers, and the way into a view."""
        if self.agreement is None or self.end.agreed:
            return
        self.members.hear_put_off()
        self.members.say_promises_again(self.agreement)
        self.act(self.agreement.tick(now_ms()))
        if self.end.outcome or self.aside.look():
            return
        if self.agreement.left_out and self.rounds is not None:
            self.event("left_out", view_epoch=self.rounds.view.view_epoch)
            self.views.end()
            self.stood_in = 0  # whoever was left out sets local := anchor
            self.services.meta_changed()  # nobody asks to be let into a view that stands no more
        training, learning = self.training, self.learning
        if training is not None and not training.frozen:
            if self.desk.data is not None and (reason := out_of_date(training, self.desk.data)):
                self.wants_change(reason)
            training.serve_lease()
            training.repeat()
            self.rivals.look()
        elif learning is not None and not learning.frozen:
            learning.repeat()
            self.rivals.look()
        elif self.desk.up:
            self._enter()

    def _enter(self) -> None:
        if self.agreement is None or not (self.agreement.frozen or self.agreement.left_out):
            return  # a view stands, its start state is on the way
        if self.rounds is not None and time.monotonic() - self.rounds.frozen_s < STUCK_S:
            return  # an attempt is under way
        step = self.entrance.step(
            run_meta(self),
            self.me.peer_id,
            others(self.services, self.name),
            self.services.seed_known(),
            self.agreement.promises.courted,
        )
        self.waiting = step.waiting or self.agreement.waiting_for() or ""
        if step.found:
            self.act(self.agreement.found(step.found, now_ms()))
        if step.court:
            self.act(self.agreement.court_another(step.court, now_ms()))
        if step.ask:
            self.spawn(self.keeper.pool().prepare(2))  # a state to download, and a round's result to keep
        if step.ask and not self.parked:
            self.to_trainer(
                local.Park()
            )  # whoever waits for this peer in a reduction waits for no local step
            return
        for peer_id in step.ask:
            self.services.send(peer_id, messages.JoinRequest(fingerprint=self.desk.fingerprint), self.name)
        if step.yield_to:
            self.give_up_history(step)

    def give_up_history(self, step: Step) -> None:
        """More is committed elsewhere, or this peer was evicted: forget this history and join as a newcomer."""
        held = self.keeper.current
        lineage = list(held.ref.lineage) if held is not None else None
        self.event("history_given_up", to=step.yield_to.hex(), replaced=step.replaced, lineage=lineage)
        self.views.forget()
        self.view = None
        if self.agreement is not None and held is not None:
            newcomer = StateRef(lineage=(0, 0), digest=held.ref.digest)
            self.act(self.agreement.yield_history(newcomer, now_ms()))
        self.services.meta_changed()

    @property
    def rounds(self) -> Training | Learning | None:
        """What goes on in the view that stands, or stood last."""
        return self.training or self.learning

    @property
    def unproven(self) -> bool:
        """The last reductions of this peer as a learner failed."""
        return bool(self._unproven)

    def proved(self) -> None:
        """As a learner this peer can be reduced with."""
        self._unproven.clear()
        self.views.proved()

    def stopped(self) -> None:
        """The voters stopped the run while this peer was learning: it has nothing to close."""
        self.to_trainer(local.TrainerStop(reason="the run was stopped"))
        self.end.over("stopped", "")

    async def shut_down(self) -> None:
        """The agent ends, or another script is to run under this name: nothing of this one is left in memory."""
        await self._tasks.close()
        self.keeper.discard()
